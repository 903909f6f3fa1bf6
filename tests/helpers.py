"""Attention layers for tests: every bias, processor and implementation, and samples of their product."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dape_jax.model.attention import Blockwise, Dense, Implementation, attend
from dape_jax.model.biases import BIASES
from dape_jax.model.contextual import CONTEXTUAL
from dape_jax.model.processors import PROCESSORS, DapeConfig, ScoreMod
from dape_jax.model.scores import Mask, Positions

ALL_BIASES = BIASES | CONTEXTUAL
SMALL_BIAS = {"fire": {"threshold": 6}, "cope": {"num_positions": 4}}  # thresholds that short sequences reach

ALL_PROCESSORS = {name: kind() for name, kind in PROCESSORS.items() if kind is not DapeConfig}
ALL_PROCESSORS |= {f"dape{W}": DapeConfig(kernel_width=W, channels=5) for W in (1, 3, 5, 11)}
ALL_PROCESSORS |= {f"causal{W}": DapeConfig(kernel_width=W, channels=5, alignment="causal") for W in (2, 4)}
ALL_PROCESSORS |= {
    "equation2": DapeConfig(kernel_width=3, channels=5, residual=False),
    "of_scores": DapeConfig(kernel_width=3, channels=5, inputs="scores"),
    "of_bias": DapeConfig(kernel_width=3, channels=5, inputs="bias"),
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


def is_valid(bias: str, processor: str, *others: str) -> bool:
    """Return whether a processor has its inputs: a processor that reads only the bias needs one."""
    return not (bias == "nope" and processor == "of_bias")


def meetings(case: Sequence[Any], groups: Sequence[tuple[int, ...]]) -> set[tuple]:
    """Return the combinations of values in a case: for each group of axes, their values."""
    return {(axes, tuple(case[axis] for axis in axes)) for axes in groups}


def covering(
    axes: Sequence[Sequence], groups: Sequence[tuple[int, ...]], seed: int = 0, valid: Callable[..., bool] = is_valid
) -> list:
    """Return a sample of the product of `axes` with all valid combinations of values of every group of axes.

    Greedy: the next case is the first of a shuffled product with the most combinations that are still missing.

    Args:
        axes: values of each axis.
        groups: for example (0, 1): all combinations of a value of axis 0 and a value of axis 1.
        seed: seed of the shuffle.
        valid: whether a case of the product is valid.
    """
    product = [case for case in itertools.product(*axes) if valid(*case)]
    met = {case: meetings(case, groups) for case in random.Random(seed).sample(product, len(product))}
    missing = set().union(*met.values())
    sample = set()
    while missing:
        best = max(met, key=lambda case: len(met[case] & missing))
        missing -= met.pop(best)
        sample.add(best)
    return [case for case in product if case in sample]


def pairwise(axes: Sequence[Sequence], seed: int = 0, valid: Callable[..., bool] = is_valid) -> list:
    """Return a sample of the product of `axes` with every valid pair of values of two axes."""
    return covering(axes, list(itertools.combinations(range(len(axes)), 2)), seed, valid)


def each_value(axes: Sequence[Sequence], seed: int = 0, valid: Callable[..., bool] = is_valid) -> list:
    """Return a sample of the product of `axes` with every value of every axis."""
    return covering(axes, [(axis,) for axis in range(len(axes))], seed, valid)


AXES = (ALL_BIASES, ALL_PROCESSORS, ALL_IMPLEMENTATIONS, KINDS)


@functools.cache
def sample() -> list[tuple[str, str, str, str]]:
    """Return a sample of `AXES` with every bias and every processor in every implementation and kind."""
    return covering(AXES, [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])


def every_case(axes: Sequence[Sequence], sample: Sequence, valid: Callable[..., bool] = is_valid) -> list:
    """Return the complete product as parameters of a test; cases that are not in `sample` are slow.

    Those of `sample` that add no value of an axis are extra.
    """
    quick = each_value(axes, valid=lambda *case: case in sample)
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.extra if case in sample else pytest.mark.slow)
        for case in itertools.product(*axes)
        if valid(*case)
    ]


@functools.cache
def make_bias(bias: str, heads: int, head_dim: int) -> nnx.Module | None:
    return nnx.jit(lambda: ALL_BIASES[bias](**SMALL_BIAS.get(bias, {})).build(heads, head_dim, nnx.Rngs(0)))()


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


@functools.cache
def compiled(bias: str, processor: str, implementation: str, kind: str = "full", causal: bool = True) -> Callable:
    """Return `run(qkv, q_pos, k_pos, weight) -> out, (gradients of parameters, gradients of qkv)`, compiled once.

    The gradients are those of (out * weight).sum(): a weight that is 0 except in some rows selects these rows.
    """
    params, attend = make_layer(bias, processor)
    window = KINDS[kind].get("window")

    @jax.jit
    def run(params, qkv, q_pos, k_pos, weight):
        def loss(params, qkv):
            function = ALL_IMPLEMENTATIONS[implementation]
            out = attend(params, *qkv, function, q_pos, k_pos, causal=causal, window=window)
            return (out * weight).sum(), out

        grads, out = jax.grad(loss, (0, 1), has_aux=True)(params, qkv)
        return out, grads

    return lambda *args: jax.device_get(run(params, *args))


def tolerance(bias: str) -> float:
    """Return a few float32 units of the largest score; Sandwich's bias is d / 2r = 32 at distance 0."""
    return 2e-5 if bias == "sandwich" else 2e-6
