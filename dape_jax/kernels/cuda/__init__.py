"""Fused operator on NVIDIA GPUs, in CUDA C++: two kernels for every shape, compiled at run time by NVRTC.

In: queries, keys, values and an `Operator`. Out: attended values, and gradients of all inputs. Reading order: `tile.h`
(what both kernels do with a tile), `forward.cu`, `backward.cu`; `nvrtc.py` compiles and `compiler.py` launches them,
`warp.h` has the instructions. `emulator.h` has the same instructions for a CPU, so that tests run the same source
without a GPU.

Scores, hidden channels and the weights of the convolutions are float16 inside (finer than bfloat16, and centred as
`tables.py` describes, so that they are small), sums are float32. Gradients of scores are float16 times a power of two:
its size follows from the norms of `dout`, v and the weights, so that no number can overflow.

Nothing is added in an unknown order: results are the same bits in every run.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dape_jax.kernels.cuda import compiler, emulator
from dape_jax.kernels.cuda.nvrtc import shared_bytes
from dape_jax.kernels.cuda.tiling import (
    BLOCK_BYTES,
    LOG2E,
    MAX_GRADIENT,
    MAX_KNEE,
    Tiling,
    fragments,
    in_register_order,
    multiple,
    tilings,
)
from dape_jax.kernels.tables import Operator
from dape_jax.model.processors import SLOPE
from dape_jax.model.scores import Mask, causal_runs
from dape_jax.sharding import device_platform, full_precision, vary_alike

NUM_RUNS = 4  # runs of blocks of rows, each with its own number of keys


def tilings_of(q: Any, k: Any, sizes: tuple[int, int, int], row_stride: int) -> tuple[Tiling, Tiling]:
    """Return the tilings of the kernels for the device; see `tables.convolution_sizes`.

    Raises:
        NotImplementedError: the kernels cannot run on the device, or no tiling fits.
    """
    if device_platform() == "gpu":
        if q.dtype == jnp.float32:
            raise NotImplementedError("q is float32; the kernels take bfloat16 or float16")
        compiler.check()
    heads = (q.shape[2], *k.shape[2:])
    return tilings(heads, q.dtype.name, sizes, row_stride=row_stride, limit=shared_bytes(compiler.capability()))


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    first: Int[Array, ""],
    operator: Operator,
    *,
    dtype: jnp.dtype,
    row_stride: int,
    window: int | None,
    interpret: Any,
) -> Float[Array, "B T H K"]:
    """Return attention computed by the kernels. Row 0 is at column `first`, every row at one of the S columns.

    `dtype` has no effect: the kernels mix heads in float16. With `interpret` they run in the emulator, with float32
    inputs without any rounding to 16 bits.

    Raises:
        NotImplementedError: see `tilings_of`.
    """
    del dtype
    sizes, head_dim = (operator.width, operator.pad, operator.knee_CN.shape[0]), q_BTHK.shape[3]
    call = Call(*tilings_of(q_BTHK, k_BSGK, sizes, row_stride), window, head_dim**-0.5, bool(interpret))
    q, k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, -head_dim % 16),)) for x in (q_BTHK, k_BSGK, v_BSGK))
    channels = call.forward.channels - sizes[2]
    operator = operator._replace(
        scores_WHC=jnp.pad(operator.scores_WHC, ((0, 0), (0, 0), (0, channels))),
        output_WCH=jnp.pad(operator.output_WCH, ((0, 0), (0, channels), (0, 0))),
        knee_CN=jnp.pad(operator.knee_CN, ((0, channels), (0, 0))),
        left_knee_PCT=jnp.pad(operator.left_knee_PCT, ((0, 0), (0, channels), (0, 0))),
    )
    out: Array = _attend(call, q, k, v, first, operator)
    return out[..., :head_dim]


@dataclasses.dataclass(frozen=True)
class Call:
    """Static arguments of a call."""

    forward: Tiling
    backward: Tiling
    window: int | None  # see `Mask`
    scale: float  # factor of the scores
    interpret: bool  # run the kernels in the emulator

    def launch(self, tiling: Tiling, grid: tuple[int, int, int], out: list, arrays: list, ints: list[int]) -> list:
        """Run a kernel: pointers to the arrays and to its results `out`, then the ints, then the factor of scores."""
        launch = emulator.launch if self.interpret else compiler.launch
        results = launch(tiling, grid, out, arrays, ints, self.scale * LOG2E)
        return vary_alike(results, arrays)[0]  # otherwise they would count as replicated in a user's `shard_map`

    @property
    def reach(self) -> int:
        """Return the window as the kernels take it."""
        return self.window or 2**30


# ---- operands


def heads_to_slots(t: Tiling, x: Array, dim: int) -> Array:
    """Move the heads of a dim to their slots; see `tile.h`."""
    shape = [*x.shape]
    shape[dim] = t.slots
    return jnp.zeros(shape, x.dtype).at[(slice(None),) * dim + (slots_of(t),)].set(x)


def slots_of(t: Tiling) -> np.ndarray:
    """Return the slot of each head."""
    of_quarter = -(-t.heads // (t.slots // 4))
    head = np.arange(t.heads)
    return head // of_quarter * 4 + head % of_quarter


def operands(t: Tiling, operator: Operator) -> tuple[Array, Array, list[Array]]:
    """Return the weights of the forward and of the backward kernel, and the tables."""
    first = heads_to_slots(t, operator.scores_WHC, 1).swapaxes(1, 2)  # [W, C, slots]
    second = heads_to_slots(t, operator.output_WCH, 2).swapaxes(1, 2)  # [W, slots, C]
    parts = [first / LOG2E, second * LOG2E, second.swapaxes(1, 2), first.swapaxes(1, 2)]
    both = [jnp.concatenate([fragments(x) for x in parts[:count]]) if t.channels else jnp.zeros(8) for count in (2, 4)]

    half = jnp.float32 if t.dtype == "float32" else jnp.float16

    def channels(x: Array) -> Array:
        return in_register_order(jnp.clip(x, -MAX_KNEE, MAX_KNEE)).astype(half)

    def slots(x: Array) -> Array:
        return in_register_order(heads_to_slots(t, x * LOG2E, x.ndim - 1))

    tables = [(channels, operator.knee_CN.T), (slots, operator.added_HN.T)]
    tables += [(channels, operator.left_knee_PCT.swapaxes(1, 2)), (slots, operator.left_added_QHT.swapaxes(1, 2))]
    tables = [f(x) if x.size else jnp.zeros(8, half) for f, x in tables]  # a pointer needs an array
    return both[0].astype(half), both[1].astype(half), tables


# ---- forward and backward


def _run_forward(call: Call, q: Array, k: Array, v: Array, first: Array, operator: Operator) -> tuple[Array, Array]:
    """Return attended values in float32, and the logarithms of the sums of exponentials in base 2."""
    t, (batch, num_rows, heads, _), num_keys = call.forward, q.shape, k.shape[1]
    weights, _, tables = operands(t, operator)
    blocks = -(-num_rows // t.rows)
    chunks, per_chunk = t.chunks(blocks * batch, num_keys)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    if chunks == 1:
        out = [shape(q.shape), shape((batch, num_rows, heads))]
    else:
        out = [shape((chunks, *q.shape)), shape((chunks, batch, num_rows, heads, 2))]
    ints = [num_rows, num_keys, operator.added_HN.shape[1], call.reach, per_chunk]
    out, lse = call.launch(t, (blocks, chunks, batch), out, [q, k, v, weights, *tables, first.reshape(1)], ints)
    if chunks == 1:
        return out, lse
    reference, total = lse[..., 0], lse[..., 1]
    largest = reference.max(0, keepdims=True)
    weight = jnp.exp2(reference - largest)
    sums = (weight * total).sum(0)
    out = jnp.where(total[..., None] > 0, out, 0)  # a chunk without columns has no values
    return (weight[..., None] * out).sum(0) / sums[..., None], largest[0] + jnp.log2(sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call, q, k, v, first, operator):
    return _run_forward(call, q, k, v, first, operator)[0].astype(q.dtype)


def _attend_forward(call, q, k, v, first, operator):
    exact, lse = _run_forward(call, q, k, v, first, operator)
    # The gradients of a row's scores sum to 0 only if `delta` is of the output before rounding. A parameter of the bias
    # sums many of them, which nearly cancel. XLA removes a conversion to 16 bits and back, so it cannot round here.
    info = jnp.finfo(q.dtype)
    rest = (exact - jax.lax.reduce_precision(exact, info.nexp, info.nmant)).astype(q.dtype)
    out = exact.astype(q.dtype)
    return out, (q, k, v, first, operator, out, rest, lse)


def _attend_backward(call, saved, dout):
    q, k, v, first, operator, out, rest, lse = saved
    t, (batch, num_rows, heads, _), num_keys = call.backward, q.shape, k.shape[1]
    dout = dout.astype(q.dtype)
    delta = jnp.sum((out.astype(jnp.float32) + rest.astype(jnp.float32)) * dout.astype(jnp.float32), -1)
    scale = _gradient_scale(dout, v, operator)
    # Blocks of rows limit the memory of P and dS.
    fitting = max(1, BLOCK_BYTES // (4 * batch * heads * num_keys * t.rows))
    block = min(fitting, -(-num_rows // t.rows)) * t.rows
    num_blocks = -(-num_rows // block)

    def to_blocks(x: Array, dim: int, value: float = 0) -> Array:
        padding = [(0, num_blocks * block - num_rows if i == dim else 0) for i in range(x.ndim)]
        x = jnp.pad(x, padding, constant_values=value)
        return jnp.moveaxis(x.reshape(*x.shape[:dim], num_blocks, block, *x.shape[dim + 1 :]), dim, 0)

    by_row = to_blocks(q, 1), to_blocks(dout, 1), to_blocks(lse, 1, 1e30), to_blocks(delta, 1)  # P of padding is 0
    by_row += to_blocks(operator.left_knee_PCT, 2), to_blocks(operator.left_added_QHT, 2)
    by_row += (first + t.row_stride * block * jnp.arange(num_blocks, dtype=jnp.int32),)
    total, _ = vary_alike([jnp.zeros(x.shape, jnp.float32) for x in (k, v, *operator[:4])], q)
    whole = call.window is None and num_rows * t.row_stride == num_keys  # rows are at the last keys
    runs = causal_runs(num_rows, num_keys, block, NUM_RUNS if whole else 1, Mask(True, None, t.row_stride))
    of_rows = []
    for start, stop, num_read in runs:

        def visit(total: list[Array], part: tuple[Array, ...], num_read: int = num_read):
            q, dout, lse, delta, left_knee, left_added, first = part
            cut = operator._replace(left_knee_PCT=left_knee, left_added_QHT=left_added)
            gradients, of_rows = _gradients_of_rows(
                call, q, k[:, :num_read], v[:, :num_read], dout, lse, delta, first, cut, scale
            )
            for i in (0, 1):
                gradients[i] = jnp.pad(gradients[i], ((0, 0), (0, num_keys - num_read), (0, 0), (0, 0)))
            return [x + y for x, y in zip(total, gradients, strict=True)], of_rows

        total, part = jax.lax.scan(visit, total, jax.tree.map(lambda x, a=start, b=stop: x[a:b], by_row))
        of_rows.append(part)

    def from_blocks(x: Array, dim: int) -> Array:
        x = jnp.moveaxis(x, 0, dim)
        x = x.reshape(*x.shape[:dim], num_blocks * block, *x.shape[dim + 2 :])
        return jax.lax.slice_in_dim(x, 0, num_rows, axis=dim)

    dq, d_left_knee, d_left_added = (jnp.concatenate(x) for x in zip(*of_rows, strict=True))
    dk, dv, d_first, d_second, d_knee, d_added = total
    d_operator = Operator(d_first, d_second, d_knee, d_added, from_blocks(d_left_knee, 2), from_blocks(d_left_added, 2))
    return (
        from_blocks(dq, 1).astype(q.dtype),
        dk.astype(k.dtype),
        dv.astype(v.dtype),
        np.zeros((), jax.dtypes.float0),
        d_operator,
    )


def _gradient_scale(dout: Array, v: Array, operator: Operator) -> Float[Array, ""]:
    """Return a power of two with which gradients of scores and of hidden channels are at most `MAX_GRADIENT`.

    |dout v^T - delta| <= 2 |dout| |v|, times 1 or the norm of the transposed convolutions
    """

    def longest(x: Array) -> Array:
        return jnp.sqrt(jnp.max(jnp.sum(x.astype(jnp.float32) ** 2, -1)))

    gain = one = jnp.ones((), jnp.float32)  # as the kernel reads it, also with `jax_enable_x64`
    if operator.output_WCH.size:
        second = jnp.abs(operator.output_WCH).sum((0, 2)).max()
        gain = jnp.maximum(second, 1 + second * jnp.abs(operator.scores_WHC).sum((0, 2)).max())
    exponent = jnp.floor(jnp.log2(MAX_GRADIENT / (2 * longest(dout) * longest(v) * gain)))
    return jnp.ldexp(one, jnp.clip(exponent, -100, 100).astype(jnp.int32))


def _gradients_of_rows(call, q, k, v, dout, lse, delta, first, operator, grad_scale):
    """Return the gradients of k, v and the operator's four shared arrays; and of q and the operator's left arrays."""
    t, (batch, num_rows, heads, head_dim), (num_keys, groups) = call.backward, q.shape, k.shape[1:3]
    channels, width, pad, ahead = t.channels, t.width, t.pad, t.ahead
    _, weights, tables = operands(t, operator)
    num_distances = operator.added_HN.shape[1]
    blocks, padded = num_rows // t.rows, num_keys + 2 * ahead
    chunks, per_chunk = t.chunks(blocks * batch, padded)
    padded = multiple(padded, t.columns)
    grid, square = (blocks, chunks, batch), jax.ShapeDtypeStruct((batch, heads, num_rows, padded), q.dtype)
    num_parts, entries = math.prod(grid), padded + 2 * t.row_stride * t.rows + t.columns
    num_tables = batch * t.layers(chunks, per_chunk) * blocks
    shapes = (num_tables, entries, channels + t.slots), *((num_parts, width, t.slots * channels),) * 2
    shapes += (batch, pad, num_rows, channels), (batch, 2 * pad, num_rows, t.slots)
    shapes = [x if math.prod(x) else (8,) for x in shapes]
    out = [square, square, *(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)]
    arrays = [q, k, v, dout, lse, delta, weights, *tables, first.reshape(1), grad_scale.reshape(1)]
    ints = [num_rows, num_keys, num_distances, call.reach, per_chunk, padded]
    probs, d_scores, d_tables, *parts = call.launch(t, grid, out, arrays, ints)

    probs, d_scores = (x.reshape(batch, groups, -1, num_rows, padded) for x in (probs, d_scores))
    q, dout = (x.reshape(batch, num_rows, groups, -1, head_dim) for x in (q, dout))
    k = jnp.pad(k, ((0, 0), (0, padded - num_keys), (0, 0), (0, 0)))
    options = {"preferred_element_type": jnp.float32, "precision": full_precision(q.dtype)}
    factor = call.scale / grad_scale
    dq = factor * jnp.einsum("BGRTS,BSGK->BTGRK", d_scores, k, **options).reshape(batch, num_rows, heads, head_dim)
    dk = factor * jnp.einsum("BGRTS,BTGRK->BSGK", d_scores, q, **options)[:, :num_keys]
    dv = jnp.einsum("BGRTS,BTGRK->BSGK", probs, dout, **options)[:, 2 * ahead :][:, :num_keys]

    slots, start = slots_of(t), t.columns + t.row_stride * t.rows
    d_tables = d_tables.sum(0)
    d_tables = jnp.pad(d_tables, ((0, max(0, num_distances + start - entries)), (0, 0))) / grad_scale
    d_knee = d_tables[start:][:num_distances, :channels].T / (1 - SLOPE)
    d_added = d_tables[start - ahead :][:num_distances, channels:].T[slots]
    if channels == 0:
        return [dk, dv, *(jnp.zeros(x.shape, jnp.float32) for x in operator[:3]), d_added], (dq, *operator[4:])
    d_first, d_second, d_left_knee, d_left_added = (x.sum(0) / grad_scale for x in parts)
    d_first = d_first.reshape(width, t.slots, channels)[:, slots] / LOG2E
    d_second = d_second.reshape(width, channels, t.slots)[:, :, slots]
    if pad == 0:
        return [dk, dv, d_first, d_second, d_knee, d_added], (dq, *operator[4:])
    left = d_left_knee.swapaxes(1, 2), d_left_added[..., slots].swapaxes(1, 2)
    return [dk, dv, d_first, d_second, d_knee, d_added], (dq, *left)


_attend.defvjp(_attend_forward, _attend_backward)
