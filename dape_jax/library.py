"""Stable interface for other programs. `dape_jax/__init__.py` imports it when one of its names is first used."""

# ruff: noqa: F401
from dape_jax.errors import InputError
from dape_jax.model.attention import Auto, Blockwise, Dense, Fused, attend, score
from dape_jax.model.biases import (
    BIASES,
    AlibiConfig,
    Bias,
    BiasConfig,
    DistanceBias,
    FireConfig,
    KerpleConfig,
    KerplePowerConfig,
    SandwichConfig,
    T5Config,
    distances,
    kerple,
)
from dape_jax.model.contextual import ContextualBias, CopeConfig, TransformerXLConfig
from dape_jax.model.positions import Llama3Rope, NtkAware, PositionInterpolation, Rope, Yarn
from dape_jax.model.processors import PROCESSORS, DapeConfig, Processor, ProcessorConfig, dape, key_convolution
from dape_jax.model.scores import masked_softmax
from dape_jax.model.transformer import Cache, Transformer, TransformerConfig, make_cache
