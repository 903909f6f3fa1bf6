"""DAPE V2 in JAX: attention scores treated as a feature map.

Shape legend, one for the whole package. A name carries its shape as a suffix (`scores_BHTS`), einsums use the same
letters, and so do the names of the model's parameters, from which `sharding.py` derives their sharding.

    B  batch                      T  query positions            S  key positions
    D  model width                H  heads                      K  width of one head
    F  feed-forward width         V  vocabulary                 L  layers (stacked parameters)
    C  hidden channels of the score convolution                 W  width of its kernel
    G  heads of keys and values         R  H / G, query heads that share one
    M  hidden width of FIRE's MLP       N  buckets of T5's bias         P  positions of a table
    I, O  channels in and out of a convolution                          J  its output columns: keys and padding
    In `tasks/`: N symbols of an input, M of its target

`axis` means a mesh axis, `dim` a tensor dimension. `scores` are before the softmax, `probs` after it, `bias` is added
to scores. Names contain units: `nll_nats`, `num_tokens`, `warmup_steps`.

Reading path, from a text to its perplexity by length; other modules are read when they are needed:

    ./           config  sharding
    data/        store  batches
    model/       positions  scores  biases  processors  attention  transformer  loss
    training/    loop  step  optimizer  checkpoint  metrics
    evaluation/  perplexity  report

The names below are the stable interface for other programs: `docs/library.md`.
"""

# ruff: noqa: F403, F405
import importlib
from typing import TYPE_CHECKING, Any

from dape_jax.version import __version__ as __version__

if TYPE_CHECKING:
    from dape_jax.library import *

__all__ = ["Auto", "Blockwise", "Dense", "Fused", "attend", "masked_softmax", "score"]
__all__ += ["dape", "distances", "kerple", "key_convolution"]  # functions of arrays
__all__ += ["AlibiConfig", "FireConfig", "KerpleConfig", "KerplePowerConfig", "SandwichConfig", "T5Config"]
__all__ += ["CopeConfig", "DapeConfig", "TransformerXLConfig"]  # frozen configs that build NNX modules
__all__ += ["Llama3Rope", "NtkAware", "PositionInterpolation", "Rope", "Yarn"]
__all__ += ["BIASES", "PROCESSORS"]  # names in config files -> configs
__all__ += ["Bias", "BiasConfig", "ContextualBias", "DistanceBias", "Processor", "ProcessorConfig"]  # to subclass
__all__ += ["Cache", "Transformer", "TransformerConfig", "make_cache"]  # the paper's model
__all__ += ["InputError"]


def __getattr__(name: str) -> Any:
    """Return a name of `dape_jax.library`, imported on first use, so that `--help` need not import JAX."""
    if name in __all__:
        return getattr(importlib.import_module("dape_jax.library"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the module and the stable ones, for completion and `help(dape_jax)`."""
    return [*globals(), *__all__]
