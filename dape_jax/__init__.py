"""DAPE V2 in JAX: attention scores treated as a feature map.

Shape legend, one for the whole package. A name carries its shape as a suffix (`scores_BHTS`), einsums use the same
letters, and so do the names of the model's parameters, from which `sharding.py` derives their sharding.

    B  batch                      T  query positions            S  key positions
    D  model width                H  heads                      K  width of one head
    F  feed-forward width         V  vocabulary                 L  layers (stacked parameters)
    C  hidden channels of the score convolution                 W  width of its kernel
    G  heads of keys and values         R  H / G, query heads that share one
    M  hidden width of FIRE's MLP       N  buckets of T5's bias         P  positions of CoPE's table
    I, O  channels in and out of a convolution                          J  its output columns: keys and padding
    In `tasks/`: N symbols of an input, M of its target

`axis` means a mesh axis, `dim` a tensor dimension. `scores` are before the softmax, `probs` after it, `bias` is added
to scores. Names contain units: `nll_nats`, `num_tokens`, `warmup_steps`.

Reading order: model/ (positions, scores, biases, contextual, processors, attention, transformer), kernels, sharding,
data, tasks, training, evaluation.

The names below are the stable interface for other programs: `docs/library.md`.
"""

# ruff: noqa: F403, F405
import importlib
from typing import TYPE_CHECKING, Any

from dape_jax.version import __version__ as __version__

if TYPE_CHECKING:
    from dape_jax.library import *

__all__ = [  # noqa: RUF022
    # Attention over any block of query rows.
    "attend",
    "Dense",
    "Blockwise",
    "Fused",
    "Auto",
    "ScoreMod",
    "Mask",
    "score",
    "Scores",
    "masked_softmax",
    # Pure functions of arrays.
    "dape",
    "key_convolution",
    "distances",
    "alibi",
    "alibi_slopes",
    "kerple",
    "kerple_power",
    "sandwich",
    "t5",
    "cope",
    # NNX modules that hold the parameters of these functions.
    "Dape",
    "Plain",
    "Alibi",
    "Kerple",
    "KerplePower",
    "Sandwich",
    "T5",
    "Fire",
    "Cope",
    "TransformerXL",
    # Frozen configs that build the modules.
    "DapeConfig",
    "PlainConfig",
    "NopeConfig",
    "AlibiConfig",
    "KerpleConfig",
    "KerplePowerConfig",
    "SandwichConfig",
    "T5Config",
    "FireConfig",
    "CopeConfig",
    "TransformerXLConfig",
    # Rotary embedding.
    "NoRotary",
    "Rope",
    "PositionInterpolation",
    "NtkAware",
    "Yarn",
    "Llama3Rope",
    # Registries: names in config files -> configs and implementations.
    "BIASES",
    "CONTEXTUAL",
    "PROCESSORS",
    "ROTARY",
    "IMPLEMENTATIONS",
    # Base classes and protocols for new biases, processors and implementations.
    "Bias",
    "BiasConfig",
    "ContextualBias",
    "Processor",
    "ProcessorConfig",
    "DistanceBias",
    "Implementation",
    # The paper's model.
    "TransformerConfig",
    "Transformer",
    "Cache",
    "make_cache",
    # Exception for invalid input.
    "InputError",
]


def __getattr__(name: str) -> Any:
    """Return a name of `dape_jax.library`, imported on first use, so that `--help` need not import JAX."""
    if name in __all__:
        return getattr(importlib.import_module("dape_jax.library"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
