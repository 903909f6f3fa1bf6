"""Attention layers for tests: every bias, processor and implementation, and samples of their product. Random models."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dape_jax.config import read_run, resolved
from dape_jax.data.tokenizers import Bytes, save_tokenizer
from dape_jax.model.attention import Blockwise, Dense, Implementation, attend, attend_on_mesh
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import PROCESSORS, DapeConfig, ScoreMod
from dape_jax.model.scores import Mask, Positions
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.sharding import make_mesh, parameter_shardings, stripe, unstripe
from dape_jax.training import checkpoint

OF_POSITIONS = [name for name, config in BIASES.items() if name != "nope" and not config.reads_content]
SMALL_BIAS = {"fire": {"threshold": 6}, "cope": {"num_positions": 4}}  # thresholds that short sequences reach

ALL_PROCESSORS = {name: kind() for name, kind in PROCESSORS.items() if kind is not DapeConfig}
ALL_PROCESSORS |= {f"dape{W}": DapeConfig(kernel_width=W, channels=5) for W in (1, 3, 5, 11)}
ALL_PROCESSORS |= {f"causal{W}": DapeConfig(kernel_width=W, channels=5, alignment="causal") for W in (2, 4)}
ALL_PROCESSORS |= {
    "of_bias": DapeConfig(kernel_width=3, channels=5, inputs="bias"),
    "of_scores": DapeConfig(kernel_width=3, channels=5, inputs="scores"),
    "equation2": DapeConfig(kernel_width=3, channels=5, residual=False),
    "identity": DapeConfig(kernel_width=3, channels=5, init="identity"),
}


@dataclasses.dataclass(frozen=True)
class Cached(Implementation):
    """Attend as in generation: a few rows at a time, against a cache with random numbers in unwritten columns."""

    num_rows: int = 3
    num_unused: int = 3

    def attend_rows(self, q, k, v, positions, score_mod, mask):
        attend = jax.jit(Dense().attend_rows, static_argnums=5)  # traced once for all steps of the same size
        q_pos, k_pos, *_ = positions
        unused = 10_000 + jnp.arange(self.num_unused, dtype=k_pos.dtype)
        batch, length, *kv_shape = k.shape
        cache = [7 * make_qkv(length + self.num_unused, batch, *kv_shape)[0].astype(k.dtype) for _ in range(2)]
        outs = []
        for start in range(0, length, self.num_rows):
            rows = slice(start, min(start + self.num_rows, length))
            cache = [c.at[:, rows].set(x[:, rows]) for c, x in zip(cache, (k, v), strict=True)]
            positions = Positions(q_pos[rows], jnp.concatenate([k_pos, unused]))
            outs.append(attend(q[:, rows], *cache, positions, score_mod, mask))
        return jnp.concatenate(outs, axis=1)


@dataclasses.dataclass(frozen=True)
class AnyRows(Implementation):
    """Blockwise attention as with given positions: every block reads all keys."""

    def attend_rows(self, q, k, v, positions, score_mod, mask):
        mask = dataclasses.replace(mask, row_stride=None)
        return Blockwise(4, 2).attend_rows(q, k, v, positions, score_mod, mask)


@dataclasses.dataclass(frozen=True)
class OnMesh(Implementation):
    """Self-attention with rows striped over the devices of the mesh."""

    attention: Implementation

    def attend_rows(self, q, k, v, positions, score_mod, mask):
        q, k, v = (stripe(x, 1) for x in (q, k, v))
        out = attend_on_mesh(self.attention, q, k, v, score_mod, mask, starts_BS=positions.k_start_BS)
        return unstripe(out, 1)


def random_params(config: TransformerConfig) -> Params:
    """Return random parameters of a model, none of which is 0: initial zeros could hide an error."""
    draw = np.random.default_rng(0)

    def random(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        numbers = draw.normal(0, 0.3, leaf.shape)
        is_positive = path[-1].key in ("scale", "p_H", "a_H", "c", "threshold_multiplier")
        return np.asarray(np.exp(numbers) if is_positive else numbers, leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, model_structure(config)[1])


def logits(config: TransformerConfig, params: Params, tokens: np.ndarray) -> np.ndarray:
    graphdef, _ = model_structure(config)
    return np.asarray(jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(params, tokens.astype(np.int32)))


def write_run(workdir: Path, spec: dict[str, Any], tokenizer: Any = None) -> Path:
    """Write a run with random parameters at step 0."""
    run = read_run(spec)
    params, record = random_params(run.model), {"config": resolved(run), "data_digest": "digest"}
    params = jax.device_put(params, parameter_shardings(params, make_mesh(run.mesh)))
    workdir.mkdir(parents=True)
    save_tokenizer(tokenizer or Bytes(), workdir)
    checkpoint.write_config(workdir, record)
    checkpoint.save_params(workdir, params, record)
    return workdir


def read_runs(directory: Path, stem: str = "lengths") -> list[dict[str, Any]]:
    """Read the runs of a report, and fail on the tokens NaN and Infinity, which are no JSON."""
    return json.loads((directory / f"{stem}.json").read_text(), parse_constant=pytest.fail)["runs"]


def padded_like(tree: Any, like: Any) -> Any:
    """Return the arrays of a tree with zeros up to the shapes of those of another."""

    def pad(x: Any, other: Any) -> np.ndarray:
        result = np.zeros(other.shape, x.dtype)
        result[tuple(map(slice, x.shape))] = x
        return result

    return jax.tree.map(pad, tree, like)


def attend_rows(implementation, q, k, v, q_pos, k_pos, score_mod=ScoreMod(), mask=Mask()):
    """Call an implementation, or a function with the same arguments, at these positions."""
    function = getattr(implementation, "attend_rows", implementation)
    return function(q, k, v, Positions(q_pos, k_pos), score_mod, mask)


# Several blocks and runs at the lengths used here. The fused kernels have their own tests, in `test_kernels.py`.
ALL_IMPLEMENTATIONS = {
    "dense": Dense(),
    "blockwise": Blockwise(block_size=4, num_buckets=2),
    "any_rows": AnyRows(),
    "cached": Cached(),
}
KINDS = {"full": {}, "grouped_window": {"kv_heads": 1, "window": 4}}
LENGTH = 11


INVALID = ("nope", "of_bias")  # a processor that reads only the bias needs one
AXES = (BIASES, ALL_PROCESSORS, ALL_IMPLEMENTATIONS, KINDS)


def each_value(axes: Sequence[Collection]) -> list[tuple]:
    """Return cases of the product of `axes` with every value of every axis: of the longest once, of others in turn."""
    values = list(map(list, axes))
    return [tuple(axis[i % len(axis)] for axis in values) for i in range(max(map(len, values)))]


def sample() -> list[tuple[str, str, str, str]]:
    """Return a sample of `AXES` with every bias and every processor in every implementation and kind."""
    biases, processors, implementations, kinds = map(list, AXES)
    return [
        (biases[i % len(biases)], processors[(i + j) % len(processors)], implementation, kinds[(i + j // 2) % 2])
        for j, implementation in enumerate(implementations)
        for i in range(len(processors))
    ]


def every_case(axes: Sequence[Collection], quick: Collection[tuple], extra: Collection[tuple] = ()) -> list:
    """Return the complete product as parameters of a test; cases that are not in `quick` or `extra` are slow."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.extra if case in extra else pytest.mark.slow)
        for case in itertools.product(*axes)
        if case[:2] != INVALID
    ]


@functools.cache
def make_bias(bias: str, heads: int, head_dim: int) -> nnx.Module | None:
    return nnx.jit(lambda: BIASES[bias](**SMALL_BIAS.get(bias, {})).build(heads, head_dim, nnx.Rngs(0)))()


@functools.cache
def make_processor(processor: str, heads: int, has_bias: bool, dtype: Any) -> nnx.Module:
    config = ALL_PROCESSORS[processor]
    return nnx.jit(lambda: config.build(heads, has_bias=has_bias, dtype=dtype, rngs=nnx.Rngs(1)))()


@functools.cache
def make_layer(bias: str, processor: str, heads: int = 2, head_dim: int = 4, dtype=jnp.float32):
    """Return the random parameters of a bias and a processor, and a function of them that attends."""
    layer = nnx.Dict(
        bias=make_bias(bias, heads, head_dim), processor=make_processor(processor, heads, bias != "nope", dtype)
    )
    graphdef, params = nnx.split(layer, nnx.Param)
    # Parameters at 0 would hide errors in their inputs.
    draw = np.random.default_rng(2)
    params = jax.tree.map(
        lambda p: jnp.asarray(p if p.any() else (0.3 * draw.normal(size=p.shape)).astype(p.dtype)),
        jax.device_get(nnx.to_pure_dict(params)),
    )

    def run(params, q, k, v, implementation, q_pos=None, k_pos=None, **options):
        layer = nnx.merge(graphdef, params)
        if k_pos is None:
            options |= {"bias": layer.bias, "processor": layer.processor, "implementation": implementation}
            return attend(q, k, v, **options)
        score_mod = ScoreMod(layer.bias, layer.processor)
        return attend_rows(implementation, q, k, v, q_pos, k_pos, score_mod, Mask(**options))

    return params, run


def make_qkv(
    length: int = LENGTH, batch: int = 2, heads: int = 2, head_dim: int = 4, seed: int = 1, kv_heads: int | None = None
) -> list[jax.Array]:
    """Return normal queries [B, T, H, K], keys and values [B, T, G, K]."""
    draw = np.random.default_rng(seed)
    shapes = [(batch, length, h, head_dim) for h in (heads, kv_heads or heads, kv_heads or heads)]
    return [jnp.asarray(draw.normal(size=shape).astype(np.float32)) for shape in shapes]


def make_weight(out: jax.Array) -> jax.Array:
    """Return a random cotangent for `out`."""
    return jnp.asarray(np.random.default_rng(3).normal(size=out.shape).astype(np.float32))


def value_and_grads(layer: tuple, implementation: Implementation, dtype: Any = jnp.float32, **options: Any) -> Callable:
    """Return `run(qkv, weight, *positions) -> out, (gradients of parameters, gradients of qkv)`, compiled once.

    The gradients are those of (out * weight).sum(): a weight that is 0 except in some rows selects these rows.
    """
    params, attend = layer

    @jax.jit
    def run(params, qkv, weight, *positions):
        def loss(params, qkv):
            out = attend(params, *(x.astype(dtype) for x in qkv), implementation, *positions, **options)
            assert out.dtype == dtype
            out = out.astype(jnp.float32)
            return (out * weight).sum(), out

        grads, out = jax.grad(loss, (0, 1), has_aux=True)(params, qkv)
        return out, grads

    return lambda *args: jax.device_get(run(params, *args))


@functools.cache
def compiled(bias: str, processor: str, implementation: str, kind: str = "full", causal: bool = True) -> Callable:
    """Return `value_and_grads` of a method, an implementation and a kind; tests share the program."""
    options = {"causal": causal, "window": KINDS[kind].get("window")}
    return value_and_grads(make_layer(bias, processor), ALL_IMPLEMENTATIONS[implementation], **options)


def tolerance(bias: str) -> float:
    """Return a few float32 units of the largest score; Sandwich's bias is d / 2r = 32 at distance 0."""
    return 2e-5 if bias == "sandwich" else 2e-6
