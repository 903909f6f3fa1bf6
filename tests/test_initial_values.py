"""Compare the initial values of every parameter with the distributions that papers and official codes state.

A Kolmogorov-Smirnov test rejects values that are too large and values that are too small. Random keys are fixed, so
each test either always passes or always fails.
"""

import math

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from scipy import stats

from dape_jax.config import read_model
from dape_jax.model.biases import BIASES
from dape_jax.model.transformer import ENCODER, LLAMA, Transformer, TransformerConfig, flat_params

pytestmark = pytest.mark.extra

D, H, G, F, L, V = 128, 64, 32, 192, 4, 200  # see the shape legend
SHAPE = {"width": D, "num_heads": H, "num_kv_heads": G, "mlp_width": F, "num_layers": L, "vocab_size": V}
KERNEL_WIDTH, CHANNELS = 3, 24
DAPE = {"name": "dape", "kernel_width": KERNEL_WIDTH, "channels": CHANNELS}
NO_DAPE = {"bias": {"name": "nope"}, "processor": {"name": "none"}}
REJECTED = 1e-5  # p-value below which values are not from a distribution

MODELS = {  # changes of GPT-NeoX's
    # Without the biases that have no parameters; without a bias, DAPE has fewer.
    **{bias: {"bias": {"name": bias}, "processor": DAPE} for bias in BIASES if bias not in ("alibi", "sandwich")},
    "scores-alone": {"bias": {"name": "kerple"}, "processor": DAPE | {"inputs": "scores"}},
    "bias-alone": {"bias": {"name": "kerple"}, "processor": DAPE | {"inputs": "bias"}},
    "identity": {"bias": {"name": "kerple"}, "processor": DAPE | {"init": "identity"}},
    "wide-fire": {"bias": {"name": "fire", "width": 50, "initial_c": 0.3}, "processor": {"name": "none"}},
    "encoder": ENCODER | NO_DAPE,
    "llama": LLAMA | NO_DAPE,
    "tied": NO_DAPE | {"tied_embeddings": True},
}


def uniform(low: float, high: float):
    return stats.uniform(low, high - low)


def pytorch(fan_in: int):
    """Return the distribution of weights and biases of PyTorch's Linear and Conv2d."""
    return uniform(-(fan_in**-0.5), fan_in**-0.5)


def stated(model: TransformerConfig, path: tuple[str, ...]):
    """Return the distribution of a parameter, or the number that all its values are."""
    name, processor = path[-1], model.processor
    if "processor" in path:
        num_inputs = H if processor.inputs != "both" or model.bias == BIASES["nope"]() else 2 * H
        if name in ("output_WCH", "output_bias_H"):
            return 0.0 if processor.init == "identity" else pytorch(CHANNELS * KERNEL_WIDTH)
        return pytorch(num_inputs * KERNEL_WIDTH)
    if "bias" in path[:-1] or "shared_bias" in path:
        return {
            "p_H": uniform(0, 2),
            "a_H": uniform(0, 1),
            "table_NH": stats.norm(scale=math.sqrt(2 / (32 + H))),  # T5 in GPT-NeoX: Xavier
            "c": getattr(model.bias, "initial_c", None),
            "threshold_multiplier": 1.0,
            "hidden_M": pytorch(1),
            "hidden_bias_M": pytorch(1),
            "output_MH": pytorch(getattr(model.bias, "width", 1)),
            "output_bias_H": pytorch(getattr(model.bias, "width", 1)),
            "table_KP": 0.0,
            "relative_DHK": pytorch(D),
            "content_HK": stats.norm(scale=0.02),
            "position_HK": stats.norm(scale=0.02),
        }[name]
    if "bias" in name:
        return 0.0
    if name == "scale":
        return 1.0
    if model.initializer == "fan_in":
        std = {"embedding_VD": 0.02, "down_FD": F**-0.5}.get(name, D**-0.5)
        return stats.truncnorm(-2, 2, scale=std)
    ends_branch = name in ("output_HKD", "down_FD")
    return stats.norm(scale=2 / (L * math.sqrt(D)) if ends_branch else math.sqrt(2 / (5 * D)))


def rejects(values: np.ndarray, expected) -> bool:
    """Return whether the values are not from the distribution, or not all equal to the number."""
    if isinstance(expected, float):
        return not np.all(values == np.float32(expected))
    return stats.kstest(values.ravel(), expected.cdf).pvalue < REJECTED


@pytest.mark.parametrize("name", MODELS)
def test_values_are_from_the_stated_distributions(name):
    """Check every parameter, and that values twice as large or half as large are rejected.

    No two random parameters, nor two layers of one, have the same values.
    """
    model, samples = read_model(tiny.SPEC["model"] | SHAPE | MODELS[name]), []
    init = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Transformer(model, rngs=nnx.Rngs(0)), nnx.Param)))
    for path, values in flat_params(jax.device_get(init())).items():
        expected = stated(model, path)
        assert not rejects(values, expected), path
        if expected != 0.0:
            assert rejects(2 * values, expected), path
            assert rejects(values / 2, expected), path
        if not isinstance(expected, float):
            parts = values if path[0] == "layers" else values[None]
            samples += [tuple(part.ravel()[:16] / np.abs(part).max()) for part in parts]
    assert len(set(samples)) == len(samples) > 10
