"""Stable interface for other programs. `dape_jax/__init__.py` imports it when one of its names is first used."""

# ruff: noqa: F401
from dape_jax.errors import InputError
from dape_jax.model.attention import (
    IMPLEMENTATIONS,
    Auto,
    Blockwise,
    Dense,
    Fused,
    Implementation,
    attend,
    score,
)
from dape_jax.model.biases import (
    BIASES,
    T5,
    Alibi,
    AlibiConfig,
    Bias,
    BiasConfig,
    DistanceBias,
    Fire,
    FireConfig,
    Kerple,
    KerpleConfig,
    KerplePower,
    KerplePowerConfig,
    NopeConfig,
    Sandwich,
    SandwichConfig,
    T5Config,
    alibi,
    alibi_slopes,
    distances,
    kerple,
    kerple_power,
    sandwich,
    t5,
)
from dape_jax.model.contextual import (
    CONTEXTUAL,
    ContextualBias,
    Cope,
    CopeConfig,
    TransformerXL,
    TransformerXLConfig,
    cope,
)
from dape_jax.model.positions import ROTARY, Llama3Rope, NoRotary, NtkAware, PositionInterpolation, Rope, Yarn
from dape_jax.model.processors import (
    PROCESSORS,
    Dape,
    DapeConfig,
    Plain,
    PlainConfig,
    Processor,
    ProcessorConfig,
    ScoreMod,
    dape,
    key_convolution,
)
from dape_jax.model.scores import Mask, Scores, masked_softmax
from dape_jax.model.transformer import Cache, Transformer, TransformerConfig, make_cache
