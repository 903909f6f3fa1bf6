"""One attention layer, q, k, v -> out, without projections: its function, and the errors of its results.

In: sizes, bias and processor. Out: a function to time or to compile. Next: `attention.py`, `gpu.py`, `tpu.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from benchmarks.hlo import compile_program
from benchmarks.measure import Call, Row
from dape_jax.config import CHOICES
from dape_jax.errors import is_out_of_memory
from dape_jax.hardware import MIB
from dape_jax.model.attention import Implementation, attend
from dape_jax.model.processors import DapeConfig, PlainConfig
from dape_jax.model.transformer import SIZES

DIRECTIONS = ("forward", "backward")  # backward: forward and the gradients of all inputs in one program
BIASES = CHOICES["bias"]
# Largest errors explained by rounding: of arrays with a dim of tokens; and of the gradients of parameters, which are
# sums of millions of terms of both signs. A GPU may multiply float32 with 10 bits of mantissa.
TOLERANCES = {"float32": (5e-3, 2e-2), "bfloat16": (3e-2, 1e-1)}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes, bias and processor of an attention layer; by default those of the 125M model with DAPE1x3-Kerple."""

    length: int = 512
    batch: int = 1
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    bias: str = "kerple"
    processor: DapeConfig | PlainConfig = DapeConfig(kernel_width=3, channels=32)
    window: int | None = None
    dtype: str = "bfloat16"  # of q, k, v and the operands of the convolutions

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of queries, keys, values and the cotangent of the output."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [(self.batch, self.length, each, self.head_dim) for each in heads]

    def arrays(self) -> list[Float[Array, "B T H K"]]:
        """Return random queries, keys, values and a cotangent."""
        dtype = jnp.dtype(self.dtype)
        return [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(self.shapes())]

    def modules(self) -> tuple[Any, Any]:
        """Return the bias and the processor."""
        rngs = nnx.Rngs(0)
        bias = BIASES[self.bias]().build(self.heads, self.head_dim, rngs)
        options = {"has_bias": bias is not None, "dtype": jnp.dtype(self.dtype), "rngs": rngs}
        return bias, self.processor.build(self.heads, **options)

    def function(self, direction: str, implementation: Any) -> tuple[Callable[..., dict[str, Any]], nnx.State]:
        """Return (parameters, q, k, v, cotangent) -> out and, backward, all gradients, by name; and the parameters.

        `implementation` is one of `attention.py` or its name, or a function that replaces `attend`.
        """
        bias, processor = self.modules()
        graphdef, params = nnx.split(nnx.Dict(bias=bias, processor=processor))
        is_known = isinstance(implementation, str | Implementation)
        options = {"implementation": implementation, "window": self.window} if is_known else {}
        function = attend if is_known else implementation

        def forward(params: Any, *qkv: jax.Array) -> jax.Array:
            layer = nnx.merge(graphdef, params)
            return function(*qkv, bias=layer.bias, processor=layer.processor, **options)

        def run(params: Any, *arrays: jax.Array) -> dict[str, Any]:
            if direction == "forward":
                return {"out": forward(params, *arrays[:3])}
            out_BTHK, pullback = jax.vjp(forward, params, *arrays[:3])
            dparams, dq, dk, dv = pullback(arrays[3])
            return {"out": out_BTHK, "q": dq, "k": dk, "v": dv, "parameters": dparams}

        return run, params


def layer_of(model: str, **fields: Any) -> Layer:
    """Return a layer with the heads of one of the paper's models."""
    heads = SIZES[model]["num_heads"]
    return Layer(heads=heads, kv_heads=heads, head_dim=SIZES[model]["width"] // heads, **fields)


PLAIN = Layer(bias="nope", processor=PlainConfig())


def plain(layer: Layer) -> Layer:
    """Return a layer without bias and processor."""
    return dataclasses.replace(layer, bias=PLAIN.bias, processor=PLAIN.processor)


def compile_layer(layer: Layer, direction: str, implementation: Any) -> tuple[Call, Row]:
    """Compile a layer for the local device; return a call of it, and the figures of the compiled program."""
    function, params = layer.function(direction, implementation)
    arrays = layer.arrays()
    program = compile_program(function, params, *arrays)
    return Call(functools.partial(program.run, params, *arrays)), {
        "compile_s": program.compile_s,
        "temporary_mib": program.memory.temp_size_in_bytes / MIB,
        "result_mib": program.result_bytes / MIB,
    }


# ---- correctness


def as_numpy(results: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return out and the gradients by name, float32, without the gradient of Conv2's bias, which is 0."""
    leaves = jax.tree_util.tree_flatten_with_path(results)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {name: np.asarray(x, np.float32) for name, x in named.items() if "output_bias_H" not in name}


@functools.lru_cache(maxsize=16)
def expected_results(layer: Layer, direction: str) -> dict[str, np.ndarray] | None:
    """Return the results of `dense` in float32 at full precision, or None if they need too much memory."""
    function, params = dataclasses.replace(layer, dtype="float32").function(direction, "dense")
    try:
        with jax.default_matmul_precision("highest"):
            return as_numpy(jax.jit(function)(params, *(x.astype(jnp.float32) for x in layer.arrays())))
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def errors_of(found: dict[str, np.ndarray], layer: Layer, direction: str) -> dict[str, float]:
    """Return |x - expected| / |expected| of arrays, as vectors, or {} if `expected_results` are unknown."""
    expected = expected_results(layer, direction)
    if expected is None:
        return {}
    return {
        name: float(np.linalg.norm(x - expected[name]) / np.linalg.norm(expected[name])) for name, x in found.items()
    }


def is_right(errors: dict[str, float], dtype: str) -> bool:
    """Return whether all errors are within the tolerance for rounding."""
    of_tokens, of_parameters = TOLERANCES[dtype]
    return all(e < (of_parameters if name.startswith("parameters.") else of_tokens) for name, e in errors.items())
