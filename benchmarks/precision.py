"""Measure the error of DAPE in 16 bits: the processed scores of one row, compared with float64.

    python -m benchmarks.precision

The row is the last of `length` rows. Its query and the keys are drawn from a normal distribution, and the parameters
are newly initialised. An error is the largest among the scores within 20 nats of the row's maximum: others have no
weight in the softmax. The table and OUTPUT/precision.json have three errors in nats; those that are not finite are a
dash in the table and null in the JSON:

    as written   Conv2(LeakyReLU(Conv1([A; B]))), hidden features rounded to the dtype
    dape         `processors.dape`, centred on the features of the bias B (docs/kernel.md)
    float32      `dape` in float32
"""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from tqdm import tqdm

from benchmarks.measure import check_names, check_positive, write
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.model.attention import score
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import SLOPE, DapeConfig, dape
from dape_jax.provenance import make_results_directory

HEADS, HEAD_DIM = 12, 16
NEAR_NATS = 20.0  # scores further below the row's maximum have no weight
DTYPES = ("bfloat16", "float16")
KNOWN_BIASES = tuple(name for name in BIASES if name != "nope")
DEFAULT_BIASES = ("alibi", "kerple", "kerple_power", "t5", "fire")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags."""

    lengths: tuple[int, ...] = flag((512, 2048, 8192, 32_768), "Numbers of keys.")
    biases: tuple[str, ...] = flag(DEFAULT_BIASES, f"Position biases: {', '.join(KNOWN_BIASES)}.")
    output: str = flag("results/precision", "Directory of the JSON.")

    def __post_init__(self):
        check_names("biases", self.biases, KNOWN_BIASES)
        check_positive(self, "lengths")


@functools.cache
def last_row(bias: str, length: int, config: DapeConfig) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the last row's scores, bias and mask in float32, and the parameters of a newly initialised processor."""

    @nnx.jit
    def build():
        rngs = nnx.Rngs(0)
        built = BIASES[bias]().build(HEADS, HEAD_DIM, rngs)
        return built, config.build(HEADS, has_bias=built is not None, rngs=rngs)

    built, layer = build()
    draw = np.random.default_rng(1)
    q, k = (draw.standard_normal((1, n, HEADS, HEAD_DIM), np.float32) for n in (1, length))
    rows = jax.jit(score, static_argnames="causal")(q, k, np.array([length - 1]), np.arange(length), bias=built)
    return jax.device_get((tuple(rows), nnx.to_pure_dict(nnx.state(layer, nnx.Param))))


def processed(rows: Any, params: Any, config: DapeConfig, dtype: str) -> Float[Array, "B H T S"]:
    """Return the row's processed scores with convolutions in a dtype."""
    return dape(*rows, **params, alignment=config.alignment, residual=config.residual, dtype=dtype)


process = jax.jit(processed, static_argnums=(2, 3))


def exact(rows: Any, params: Any, config: DapeConfig) -> np.ndarray:
    """Return the row's processed scores in float64."""
    with jax.enable_x64(True):
        rows, params = jax.tree.map(lambda x: x if x.dtype == bool else x.astype(np.float64), (rows, params))
        return jax.device_get(process(rows, params, config, "float64"))


@functools.partial(jax.jit, static_argnums=2)
def as_written(rows: Any, params: Any, dtype: str) -> Float[Array, "B H T S"]:
    """Return the row's processed scores by the formula as written: operands of both convolutions in a dtype."""
    scores_BHTS, bias_BHTS, _ = rows  # the last row sees every key
    pad = params["output_WCH"].shape[0] // 2

    def convolve(x_IS: Array, kernel_WIO: Array, length: int) -> Array:
        x_IS, kernel_WIO = x_IS.astype(dtype), kernel_WIO.astype(dtype)
        taps = [
            jnp.einsum("IO,IS->OS", kernel_IO, x_IS[:, w : w + length], preferred_element_type=jnp.float32)
            for w, kernel_IO in enumerate(kernel_WIO)
        ]
        return sum(taps[1:], taps[0])

    length = scores_BHTS.shape[-1]
    x_XS = jnp.concatenate([scores_BHTS[0, :, 0], bias_BHTS[0, :, 0]])
    kernel_WXC = jnp.concatenate([params["scores_WHC"], params["bias_WHC"]], 1)
    hidden_CS = convolve(jnp.pad(x_XS, ((0, 0), (pad, 2 * pad))), kernel_WXC, length + pad)
    hidden_CS = jax.nn.leaky_relu(hidden_CS + params["hidden_bias_C"][:, None], SLOPE)
    output_HS = convolve(jnp.pad(hidden_CS, ((0, 0), (pad, 0))), params["output_WCH"], length)
    return scores_BHTS + bias_BHTS + (output_HS + params["output_bias_H"][:, None])[None, :, None]


def largest_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest error of scores with weight, in nats; infinity if a score is NaN."""
    near = expected > expected.max(-1, keepdims=True) - NEAR_NATS
    error = np.abs(np.where(near, found.astype(np.float64) - expected, 0)).max()
    return float(np.nan_to_num(error, nan=np.inf))


def measure(bias: str, dtype: str, length: int, config: DapeConfig) -> dict[str, Any]:
    """Return one row of the table."""
    rows, params = last_row(bias, length, config)
    expected = exact(rows, params, config)
    found = {
        "as_written": as_written(rows, params, dtype),
        "dape": process(rows, params, config, dtype),
        "float32": process(rows, params, config, "float32"),
    }
    errors = {name: largest_error(jax.device_get(each), expected) for name, each in found.items()}
    known = {name: error if np.isfinite(error) else None for name, error in errors.items()}
    return {"bias": bias, "dtype": dtype, "length": length, **known}


def main(settings: Settings) -> None:
    """Measure every combination and write the report."""
    make_results_directory(Path(settings.output))
    config = DapeConfig()
    cases = list(itertools.product(settings.biases, DTYPES, settings.lengths))
    rows = [measure(*case, config) for case in tqdm(cases, unit="row", desc="precision")]
    caption = (
        f"Largest errors in nats of the last row's scores within {NEAR_NATS:.0f} nats of its maximum, "
        f"DAPE1x{config.kernel_width}, {config.channels} channels, new parameters."
    )
    labels = {"bias": "bias", "dtype": "dtype", "length": "length"}
    figures = {"as written": ("as_written", ".2g"), "dape": ("dape", ".2g"), "float32": ("float32", ".2g")}
    write("precision", settings, caption, rows, labels, figures)


if __name__ == "__main__":
    command_line.run(main, Settings)
