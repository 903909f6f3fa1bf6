"""The operator on TPUs (Pallas, Mosaic): a block of rows with all heads, streaming the keys.

In: queries, keys, values and an `Operator`. Out: attended values, and gradients of all of these; no scores. Pictures,
and why it is so, are in `docs/kernel.md`; in short:

Rows come in blocks, keys in tiles of 128 columns, which are the lanes of a register. A result needs scores of columns
beside it, so neighbouring tiles overlap by a halo, and each owns the columns between: nothing is carried along. A
softmax over all tiles is kept up as in FlashAttention: a maximum, a sum and a weighted sum of values for every row.

In fast memory the scores stand with lines (row, head) and lanes (column). 8 rows are a group, and of a group a
convolution is a matmul: its taps are copies of the group, rolled along the lanes and stacked as the contraction.

What the bias gives is a function of the distance row - column. A group's rows need the table 8 times, each shifted by a
row: the slab of it that a block and tile need is brought, and sheared so in fast memory. Where a group's part of the
slab begins at no multiple of 128, it is not the slab that is moved but the scores, which are rolled for their taps
anyway.

The backward pass computes a tile's probabilities anew from the saved log-sum-exp, all blocks of rows for one tile
after the other. Gradients of keys, values and kernels stay in fast memory while that lasts; those of queries and tables
are added up in main memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from dape_jax.kernels.tables import SLOPE, Operator, left_pad, vary_alike
from dape_jax.model.processors import DapeConfig
from dape_jax.sharding import this_device_kind

LANES = 128  # of a register: the columns of a tile
GROUP = 8  # rows that are mixed at once
AWAY = -1e30  # a score that gives probability 0
MIB = 2**20

# Fast memory of a core that a kernel may be given, by what JAX calls the chip. (On a CPU it is interpreted.)
VMEM_BYTES = {
    **dict.fromkeys(("TPU v4",), 15 * MIB),
    **dict.fromkeys(("TPU v5", "TPU v5p"), 60 * MIB),
    **dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e", "cpu"), 100 * MIB),
}
COMPILERS_SHARE = 0.2  # for what it keeps there itself
BLOCKS = (128, 64, 32)  # rows in a block, the first that fits


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a call is cut up; all of it known when the program is compiled.

    Args:
        num_rows: T.
        num_keys: S.
        num_heads: H.
        num_groups: G, heads of keys and values.
        head_dim: K.
        width: W.
        pad: columns of zeros to the left of a convolution.
        num_channels: C.
        row_stride: columns from one row to the next.
        window: columns that a row sees; None for all.
        block: rows of a block.
        backward: whether a tile's halo is that of the backward pass.
        dtype: of the convolutions' operands.
        vmem_bytes: that the kernel may use.
        interpret: see `kernels.attend_fused`.
    """

    num_rows: int
    num_keys: int
    num_heads: int
    num_groups: int
    head_dim: int
    width: int
    pad: int
    num_channels: int
    row_stride: int
    window: int | None
    block: int
    backward: bool
    dtype: jnp.dtype
    vmem_bytes: int
    interpret: Any

    @property
    def ahead(self) -> int:
        """Columns to its right that a column reads."""
        return self.width - 1 - self.pad

    @property
    def halo(self) -> tuple[int, int]:
        """Columns of a tile to either side of its own.

        Two convolutions read 2 pad columns to the left and 2 ahead to the right; their transposes, as many in the other
        direction.
        """
        read = 2 * self.pad, 2 * self.ahead
        return (sum(read), sum(read)) if self.backward else read

    @property
    def own(self) -> int:
        """Columns that are a tile's own."""
        return LANES - sum(self.halo)

    @property
    def num_tiles(self) -> int:
        """Windows over all keys; in the backward pass over the hidden columns too, which end `ahead` after the keys."""
        return pl.cdiv(self.num_keys + self.ahead * self.backward, self.own)

    @property
    def num_blocks(self) -> int:
        """Blocks of rows."""
        return pl.cdiv(self.num_rows, self.block)

    @property
    def heads(self) -> int:
        """H, filled up with heads of zeros to whole registers, of 16 lines if the numbers have 16 bits."""
        return pl.cdiv(self.num_heads, 16) * 16

    @property
    def channels(self) -> int:
        """C, filled up alike."""
        return pl.cdiv(self.num_channels, 16) * 16

    @property
    def lines(self) -> int:
        """Lines of a group's scores."""
        return GROUP * self.heads

    @property
    def unroll(self) -> int:
        """Groups in one turn of the loop, whose instructions the compiler can overlap."""
        return 1 if self.backward or self.interpret else min(4, self.block // GROUP)

    @property
    def slab(self) -> int:
        """Columns of the tables that the groups of a block and tile need."""
        return (self.row_stride * (self.block - GROUP) + LANES - 1) // LANES * LANES + 2 * LANES

    @property
    def room(self) -> int:
        """Columns before the slab, from which the later rows of a group are shifted in."""
        return pl.cdiv((GROUP - 1) * self.row_stride, LANES) * LANES

    @property
    def origin(self) -> int:
        """The column of the tables whose distance is 0. All that a real row reads is to its left, but for a block."""
        return pl.cdiv(self.num_keys + 2 * self.row_stride * self.block + LANES + self.room, LANES) * LANES

    @property
    def table_columns(self) -> int:
        """Columns of the tables."""
        return self.origin + pl.cdiv(self.row_stride * self.block, LANES) * LANES + self.slab + 2 * LANES

    @property
    def slab_parts(self) -> int:
        """Parts of 128 columns in which a slab is brought, with the room before it."""
        return (self.room + self.slab) // LANES

    def step(self, block: Any, tile: Any, first: Any) -> "_Step":
        """Where a block and a tile stand."""
        row = first + self.row_stride * self.block * block
        return _Step(self, row, tile * self.own - self.halo[0])

    def tiles_of(self, block: Any, first: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """First and last tile with a column of its own that a row of the block makes use of."""
        row = first + self.row_stride * self.block * block
        last = row + self.row_stride * (self.block - 1) + self.ahead * self.backward
        begin = 0 if self.window is None else row - self.window + 1 - self.pad * self.backward
        return xp.maximum(begin, 0) // self.own, xp.minimum(last // self.own, self.num_tiles - 1)

    def blocks_of(self, tile: Any, first: Any) -> tuple[Any, Any]:
        """First and last block with a row that makes use of a column of the tile's own: `tiles_of` turned round."""
        step = self.row_stride * self.block
        begin = tile * self.own - self.ahead * self.backward - first - self.row_stride * (self.block - 1)
        end = self.num_blocks - 1
        if self.window is not None:
            reach = (tile + 1) * self.own - 1 + self.window - 1 + self.pad * self.backward - first
            end = jnp.clip(reach // step, 0, end)
        return jnp.clip(-(-begin // step), 0, end), end


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
    """Attention by the kernel; arguments as `kernels.attend_fused` has them.

    Args:
        q_BTHK: queries.
        k_BSGK: keys.
        v_BSGK: values.
        first: the column at which the first row stands.
        operator: what is done to the scores.
        dtype: of the convolutions' operands.
        row_stride: columns from one row to the next.
        window: columns that a row sees; None for all.
        interpret: whether, and how, the kernel is interpreted.

    Raises:
        NotImplementedError: the chip's fast memory does not hold a block of rows with its tables.
    """
    tilings = _tilings(
        q_BTHK,
        k_BSGK,
        width=operator.width,
        pad=operator.pad,
        num_channels=operator.hidden_CN.shape[0],
        dtype=jnp.dtype(dtype),
        row_stride=row_stride,
        window=window,
        interpret=interpret,
    )
    return _attend(*tilings, q_BTHK, k_BSGK, v_BSGK, first, operator)


def tilings(
    q_BTHK: Any,
    k_BSGK: Any,
    config: DapeConfig,
    *,
    dtype: jnp.dtype,
    row_stride: int,
    window: int | None,
    device_kind: str | None = None,
) -> tuple[Tiling, Tiling]:
    """How forward and backward pass are cut up; arguments as `attend` and `kernels.why_not_fused` have them.

    Raises:
        NotImplementedError: see `attend`.
    """
    sizes = {"width": config.kernel_width, "pad": left_pad(config), "num_channels": config.channels}
    options = {"dtype": dtype, "row_stride": row_stride, "window": window, "interpret": False}
    return _tilings(q_BTHK, k_BSGK, device_kind, **sizes, **options)


def why_not(
    q_BTHK: Any, k_BSGK: Any, config: DapeConfig, *, row_stride: int, window: int | None, device_kind: str | None
) -> str | None:
    """Why the chip cannot run the kernel; None if it can."""
    options = {"row_stride": row_stride, "window": window, "device_kind": device_kind}
    try:
        tilings(q_BTHK, k_BSGK, config, dtype=q_BTHK.dtype, **options)
    except NotImplementedError as error:
        return str(error)
    return None


def _tilings(q_BTHK: Any, k_BSGK: Any, device_kind: str | None = None, **options: Any) -> tuple[Tiling, Tiling]:
    """Of the forward and of the backward pass."""
    num_rows, num_heads, head_dim = q_BTHK.shape[1:]
    num_keys, num_groups = k_BSGK.shape[1:3]
    shapes = {"num_rows": num_rows, "num_keys": num_keys, "num_heads": num_heads, "num_groups": num_groups}
    make = functools.partial(Tiling, head_dim=head_dim, **shapes, **options)
    forward, backward = (
        _tiling(functools.partial(make, backward=backward), q_BTHK.dtype.itemsize, device_kind or this_device_kind())
        for backward in (False, True)
    )
    return forward, backward


def num_steps(t: Tiling) -> int:
    """Pairs of a block and a tile that are computed in a sequence."""
    begin, end = t.tiles_of(np.arange(t.num_blocks), 0, np)
    return int((end - begin + 1).sum())


def cost(t: Tiling, batch: int, itemsize: int) -> pl.CostEstimate:
    """What a call computes and moves: planning reads it out of the compiled program, which does not show it otherwise.

    FLOPs are those of all tiles that are computed, the columns that tiles share and those after a row among them, but
    not heads and channels of zeros. Bytes are those of the blocks that the pipeline brings from main memory and takes
    back, in lines of 128 lanes.
    """
    steps = batch * num_steps(t)
    pairs = steps * t.block * LANES
    products, convolutions = (5, 6) if t.backward else (2, 2)
    flops = 2 * pairs * t.num_heads * (products * t.head_dim + convolutions * t.width * t.num_channels)
    line = pl.cdiv(t.head_dim, LANES) * LANES
    block, tile = t.num_heads * t.block * line * itemsize, t.num_groups * LANES * line * itemsize
    slab = (t.channels + t.heads) * (t.room + t.slab) * 4
    if t.backward:
        # q, out and its gradient; dq, read and written; so the slab, which is read once besides.
        of_step = 3 * block + 2 * t.num_heads * t.block * line * 4 + 3 * slab
        num_bytes = steps * of_step + batch * t.num_tiles * 4 * tile
    else:
        num_bytes = batch * t.num_blocks * 2 * block + steps * (2 * tile + slab)
    return pl.CostEstimate(flops=flops, transcendentals=pairs * t.num_heads, bytes_accessed=num_bytes)


def vmem_bytes(t: Tiling, itemsize: int) -> int:
    """Fast memory that a call takes by what it holds; the compiler adds to it.

    Args:
        t: the call.
        itemsize: bytes of a number in q, k and v.
    """
    line = LANES * 4
    of_rows = t.block * t.heads * line  # scores, for one
    of_heads = t.num_heads * t.block * LANES
    of_tiles = t.num_groups * LANES * LANES
    slab = (t.channels + t.heads) * (t.room + t.slab) * 4
    sheared = GROUP * (t.channels + t.heads) * t.slab * 4
    if not t.backward:
        return 5 * of_rows + of_heads * (4 + 4 * itemsize) + of_tiles * 4 * itemsize + 2 * slab + sheared
    held = 3 * of_rows + of_heads * (4 + 6 * itemsize) + of_tiles * (8 + 8 * itemsize)
    return held + 3 * slab + 2 * sheared


def _tiling(make: Callable[..., Tiling], itemsize: int, kind: str) -> Tiling:
    """The first of `BLOCKS` that fits into fast memory, or what is enough for all rows."""
    if kind not in VMEM_BYTES:
        raise NotImplementedError(f"{kind}; how much fast memory it has is known of {', '.join(VMEM_BYTES)}")
    limit = VMEM_BYTES[kind]
    tilings = [make(block=block, vmem_bytes=limit) for block in BLOCKS]
    needed = [vmem_bytes(t, itemsize) for t in tilings]
    fitting = [t for t, held in zip(tilings, needed, strict=True) if held <= (1 - COMPILERS_SHARE) * limit]
    if not fitting:
        raise NotImplementedError(
            f"a block of {BLOCKS[-1]} rows takes {needed[-1] / MIB:.0f} MiB of fast memory; "
            f"{kind} has {limit / MIB:.0f} MiB, and the compiler needs {COMPILERS_SHARE:.0%} of it"
        )
    # No more rows than there are, up to a block of the next smaller size.
    return next((t for t in reversed(fitting) if t.block >= t.num_rows), fitting[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(forward, backward, q_BTHK, k_BSGK, v_BSGK, first, operator):
    return _attend_forward(forward, backward, q_BTHK, k_BSGK, v_BSGK, first, operator)[0]


def _attend_forward(forward, backward, q_BTHK, k_BSGK, v_BSGK, first, operator):
    del backward
    out_BHTK, lse = _call_forward(forward, q_BTHK, k_BSGK, v_BSGK, first, operator)
    return jnp.moveaxis(out_BHTK, 1, 2), (q_BTHK, k_BSGK, v_BSGK, first, operator, out_BHTK, lse)


def _attend_backward(forward, backward, saved, dout_BTHK):
    q_BTHK, k_BSGK, v_BSGK, first, operator, out_BHTK, lse = saved
    lse = lse.reshape(lse.shape[0], -1)[:, : forward.num_rows * forward.heads]
    lost = -lse.shape[1] % (backward.block * backward.heads)
    # Rows that fill up the last block have no probability anywhere.
    lse = jnp.pad(lse, ((0, 0), (0, lost)), constant_values=-AWAY)
    gradients = _call_backward(backward, q_BTHK, k_BSGK, v_BSGK, first, operator, out_BHTK, lse, dout_BTHK)
    dq_BTHK, dk_BSGK, dv_BSGK, doperator = gradients
    return dq_BTHK, dk_BSGK, dv_BSGK, np.zeros((), jax.dtypes.float0), doperator


_attend.defvjp(_attend_forward, _attend_backward)


def _by_block(t: Tiling, x_BTHK: Array) -> Array:
    """[B, T, H, K] -> [B, H, rows of all blocks, K]."""
    x_BHTK = jnp.moveaxis(x_BTHK, 1, 2)
    return jnp.pad(x_BHTK, ((0, 0), (0, 0), (0, t.num_blocks * t.block - t.num_rows), (0, 0)))


def _by_tile(t: Tiling, x_BSGK: Array) -> Array:
    """[B, S, G, K] -> [B, tiles, G, 128, K], with zeros where there is no key."""
    left, right = t.halo
    x_BGSK = jnp.moveaxis(x_BSGK, 1, 2)
    behind = t.num_tiles * t.own - t.num_keys
    x = jnp.pad(x_BGSK, ((0, 0), (0, 0), (left, max(right + behind, 0)), (0, 0)))
    batch, groups, _, dim = x.shape

    def cut(x: Array) -> Array:
        return x[:, :, : t.num_tiles * t.own].reshape(batch, groups, t.num_tiles, t.own, dim)

    parts = [cut(x)]
    if left + right:  # the beginning of the next tile
        after = jnp.pad(x[:, :, t.own :], ((0, 0), (0, 0), (0, t.own), (0, 0)))
        parts.append(cut(after)[:, :, :, : left + right])
    return jnp.concatenate(parts, 3).transpose(0, 2, 1, 3, 4)


def _from_tiles(t: Tiling, x: Array) -> Array:
    """[B, tiles, G, 128, K] -> [B, S, G, K]: of each tile its own columns."""
    own = x[:, :, :, t.halo[0] : t.halo[0] + t.own]
    batch, _, groups, _, dim = x.shape
    return own.transpose(0, 1, 3, 2, 4).reshape(batch, -1, groups, dim)[:, : t.num_keys]


def _table(t: Tiling, hidden_CN: Array, added_HN: Array) -> Array:
    """Both tables, one above the other, against falling distance: column x has distance origin - x."""

    def filled(table: Array, lines: int) -> Array:
        before = t.table_columns - 1 - t.origin - t.ahead
        behind = t.origin - t.num_keys + 1
        return jnp.pad(table, ((0, lines - table.shape[0]), (before, behind)))

    return jnp.concatenate([filled(hidden_CN, t.channels), filled(added_HN, t.heads)])[:, ::-1]


def _left(t: Tiling, left_PCT: Array) -> Array:
    """[P, C, T] -> [blocks, P, channels, 128]: a lane for every row of a block."""
    P, C, T = left_PCT.shape
    some = max(P, 1)  # a kernel takes no empty array; this one is not read where there is nothing to the left
    filled = jnp.pad(left_PCT, ((0, some - P), (0, t.channels - C), (0, t.num_blocks * t.block - T)))
    blocks = jnp.moveaxis(filled.reshape(some, t.channels, t.num_blocks, t.block), 2, 0)
    return jnp.pad(blocks, ((0, 0), (0, 0), (0, 0), (0, LANES - t.block)))


def _at_once(t: Tiling, inputs: int) -> int:
    """Rows in one matmul of a convolution: two if the contraction has space for them, as two blocks of a diagonal."""
    return 2 if 2 * t.width * inputs <= LANES else 1


def _stacked(t: Tiling, kernel_WIO: Array, inputs: int, outputs: int) -> Array:
    """A convolution's kernel as [rows O, W rows I], the matrix that `_convolve` multiplies with."""
    width, given, made = kernel_WIO.shape
    rows = _at_once(t, inputs)
    kernel_WIO = jnp.pad(kernel_WIO, ((0, 0), (0, inputs - given), (0, outputs - made)))
    diagonal = jnp.einsum("rs,WIO->WrOsI", jnp.eye(rows, dtype=kernel_WIO.dtype), kernel_WIO)
    diagonal = diagonal.reshape(width, rows * outputs, rows * inputs)
    return jnp.concatenate(list(diagonal), 1).astype(t.dtype)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """A matmul accumulated in float32, and of float32 in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _roll(x: Array, by: Any) -> Array:
    """out[.., lane] = x[.., lane - by], round the register."""
    if isinstance(by, int):
        return pltpu.roll(x, by % x.shape[-1], 1) if by % x.shape[-1] else x
    return pltpu.roll(x, by & (LANES - 1), 1)


def _convolve(t: Tiling, weight: Array, taps: list[Array], inputs: int) -> Array:
    """One matmul for every `_at_once` rows of a group: taps [8 I, 128] -> [8 O, 128]."""
    lines = _at_once(t, inputs) * inputs
    rows = [
        _dot(weight, jnp.concatenate([tap[start : start + lines] for tap in taps]), (1, 0))
        for start in range(0, GROUP * inputs, lines)
    ]
    return jnp.concatenate(rows) if len(rows) > 1 else rows[0]


def _where(mask: Array, x: Array, other: Any = 0.0) -> Array:
    """`x` where a mask [8, 128] that is the same on all lines allows it."""
    return jnp.where(mask[None], x.reshape(-1, GROUP, LANES), other).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class _Step:
    """Where a block of rows and a tile of columns stand.

    Args:
        t: the call.
        row: column at which the block's first row stands.
        column: column of the tile's first lane.
    """

    t: Tiling
    row: Any
    column: Any

    @property
    def slab(self) -> Any:
        """Column of the tables where the slab begins."""
        last = self.t.origin - self.row + self.column - self.t.row_stride * (self.t.block - GROUP)
        return last // LANES * LANES

    def turn(self, group: Any) -> tuple[Any, Any]:
        """A group's part of the slab: a multiple of 128, and how far after it lane 0 stands."""
        at = self.t.origin - self.row + self.column - self.t.row_stride * GROUP * group - self.slab
        begin = at // LANES * LANES
        return pl.multiple_of(begin, LANES), at - begin

    def visible(self, num_lines: int, of_a_row: int, group: Any = 0) -> Array:
        """[lines, 128]: whether a row, which has `of_a_row` lines, sees a column; `group` says which is the first."""
        lane = jax.lax.broadcasted_iota(jnp.int32, (num_lines, LANES), 1)
        line = jax.lax.broadcasted_iota(jnp.int32, (num_lines, LANES), 0)
        distance = self.row - self.column + self.t.row_stride * (GROUP * group + line // of_a_row) - lane
        seen = (distance >= 0) & (self.column + lane >= 0)
        return seen if self.t.window is None else seen & (distance < self.t.window)

    def own(self, lane: Array) -> Array:
        """Whether a lane holds a column of the tile's own."""
        left = self.t.halo[0]
        return (lane >= left) & (lane < left + self.t.own)


def _shear(t: Tiling, table_refs: Sequence[Any], hidden_ref: Any, added_ref: Any) -> None:
    """Copy the slab 8 times over, for row r of a group shifted by r rows."""
    wide = jnp.concatenate([ref[...] for ref in table_refs], 1)
    for r in range(GROUP):
        shifted = _roll(wide, t.row_stride * r)[:, t.room :]
        hidden_ref[r * t.channels : (r + 1) * t.channels, :] = shifted[: t.channels]
        added_ref[r * t.heads : (r + 1) * t.heads, :] = shifted[t.channels :]


def _unsheared(t: Tiling, dhidden_ref: Any, dadded_ref: Any) -> Array:
    """What was gathered for the slab, as the gradient of its part of the tables: `_shear` transposed."""
    total: Any = 0
    for r in range(GROUP):
        of_row = jnp.concatenate(
            [
                dhidden_ref[r * t.channels : (r + 1) * t.channels, :],
                dadded_ref[r * t.heads : (r + 1) * t.heads, :],
            ]
        )
        wide = jnp.concatenate([of_row, jnp.zeros((of_row.shape[0], t.room), jnp.float32)], 1)
        total += _roll(wide, t.room - t.row_stride * r)
    return total


def _look_up(sheared_ref: Any, turn: tuple[Any, Any], lane: Array) -> Array:
    """A group's part of a sheared table, turned as the group's scores are."""
    begin, shift = turn
    here = sheared_ref[:, pl.ds(begin, LANES)]
    after = sheared_ref[:, pl.ds(pl.multiple_of(begin + LANES, LANES), LANES)]
    return jnp.where((lane >= shift)[None], *(x.reshape(-1, GROUP, LANES) for x in (here, after))).reshape(here.shape)


def _hidden(
    step: _Step,
    group: Any,
    scores: Array,
    turn: tuple[Any, Any],
    weight: Array,
    hidden_ref: Any,
    left_ref: Any | None,
) -> tuple[list[Array], Array, Array]:
    """Taps of Conv1, what it gives before the activation, and whether a lane's column exists; all turned."""
    t, shift = step.t, turn[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, (GROUP, LANES), 1)
    source = scores.astype(t.dtype)
    taps = [_roll(source, shift + (t.pad - w) + LANES) for w in range(t.width)]
    before = _convolve(t, weight, taps, t.heads) + _look_up(hidden_ref, turn, lane)
    if left_ref is not None:
        for column in range(t.pad):
            at = (t.halo[0] + column + shift) & (LANES - 1)
            rows = [_roll(left_ref[0, column], at - (GROUP * group + r) + LANES) for r in range(GROUP)]
            before -= _where(lane == at, jnp.concatenate(rows))
    exists = step.column + ((lane - shift) & (LANES - 1)) >= 0
    return taps, before, exists


def _forward_kernel(
    first_ref,
    q_ref,
    k_ref,
    v_ref,
    weight_1_ref,
    weight_2_ref,
    left_ref,
    *more_refs,
    t: Tiling,
):
    table_refs, (out_ref, lse_ref, *scratch_refs) = more_refs[: t.slab_parts], more_refs[t.slab_parts :]
    scores_ref, probs_ref, decay_ref, max_ref, sum_ref, values_ref, hidden_ref, added_ref = scratch_refs
    block, tile = pl.program_id(1), pl.program_id(2)
    begin, end = t.tiles_of(block, first_ref[0])
    step = t.step(block, tile, first_ref[0])
    needed = (tile >= begin) & (tile <= end)
    lane = jax.lax.broadcasted_iota(jnp.int32, (GROUP, LANES), 1)
    of_head = [pl.ds(head, t.block, stride=t.heads) for head in range(t.num_heads)]
    share = t.num_heads // t.num_groups

    @pl.when(tile == 0)
    def _():
        max_ref[...] = jnp.full(max_ref.shape, AWAY, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        values_ref[...] = jnp.zeros(values_ref.shape, jnp.float32)
        if t.heads > t.num_heads:
            scores_ref[...] = jnp.zeros(scores_ref.shape, jnp.float32)

    @pl.when(needed)
    def _():
        _shear(t, table_refs, hidden_ref, added_ref)
        visible = step.visible(t.block, 1)
        for head, lines in enumerate(of_head):
            scores = _dot(q_ref[0, head], k_ref[0, 0, head // share], (1, 1)) * t.head_dim**-0.5
            scores_ref[lines, :] = jnp.where(visible, scores, 0.0)

    def loaded(group: Any) -> dict[str, Any]:
        lines = pl.ds(pl.multiple_of(group * t.lines, t.lines), t.lines)
        refs = {"scores": scores_ref, "max": max_ref, "sum": sum_ref}
        return {"group": group, "lines": lines} | {name: ref[lines, :] for name, ref in refs.items()}

    def processed(group: Any, of_group: dict[str, Any], with_left: bool) -> tuple[Array, Array, Array, Array]:
        turn = step.turn(group)
        given = weight_1_ref[...], hidden_ref, left_ref if with_left else None
        _, before, exists = _hidden(step, group, of_group["scores"], turn, *given)
        hidden = _where(exists, jnp.maximum(before, SLOPE * before)).astype(t.dtype)
        taps = [_roll(hidden, t.pad - w) for w in range(t.width)]
        update = _convolve(t, weight_2_ref[...], taps, t.channels) + _look_up(added_ref, turn, lane)
        total = _roll(update, LANES - turn[1]) + of_group["scores"]
        lanes = jax.lax.broadcasted_iota(jnp.int32, total.shape, 1)
        counts = step.visible(t.lines, t.heads, group) & step.own(lanes)
        total = jnp.where(counts, total, AWAY)
        largest = jnp.maximum(of_group["max"], jnp.max(total, 1, keepdims=True))
        decay = jnp.exp(of_group["max"] - largest)
        probs = jnp.where(counts, jnp.exp(total - largest), 0.0)
        return largest, of_group["sum"] * decay + probs, decay, probs  # the sum's lanes are added up at the end

    def groups(with_left: bool) -> None:
        def body(turn, _):
            numbers = [turn * t.unroll + i for i in range(t.unroll)]
            # All loads first and all stores last: between them the compiler may overlap the groups.
            given = [loaded(number) for number in numbers]
            results = [processed(*pair, with_left) for pair in zip(numbers, given, strict=True)]
            for of_group, result in zip(given, results, strict=True):
                for ref, value in zip((max_ref, sum_ref, decay_ref, probs_ref), result, strict=True):
                    ref[of_group["lines"], :] = value
            return 0

        jax.lax.fori_loop(0, t.block // GROUP // t.unroll, body, 0)

    _in_first_tile_and_others(t, tile, needed, groups)

    @pl.when(needed)
    def _():
        for head, lines in enumerate(of_head):
            values = _dot(probs_ref[lines, :].astype(v_ref.dtype), v_ref[0, 0, head // share], (1, 0))
            values_ref[head] = values_ref[head] * decay_ref[lines, :][:, : t.head_dim] + values

    @pl.when(tile == t.num_tiles - 1)
    def _():
        total = jnp.broadcast_to(jnp.sum(sum_ref[...], 1, keepdims=True), sum_ref.shape)
        lse = (max_ref[...] + jnp.log(total)).reshape(-1, LANES, LANES)
        # Every lane of a line has the same number: 128 lines become one, each giving one lane.
        diagonal = jax.lax.broadcasted_iota(jnp.int32, lse.shape, 1) == jax.lax.broadcasted_iota(
            jnp.int32, lse.shape, 2
        )
        lse_ref[0, 0] = jnp.sum(jnp.where(diagonal, lse, 0.0), 1)
        sum_ref[...] = 1.0 / total
        for head, lines in enumerate(of_head):
            out_ref[0, head] = (values_ref[head] * sum_ref[lines, :][:, : t.head_dim]).astype(out_ref.dtype)


def _in_first_tile_and_others(t: Tiling, tile: Any, needed: Any, groups: Callable[[bool], None]) -> None:
    """The loop over groups, with the correction of the first columns in the first tile alone."""
    if not t.pad:
        pl.when(needed)(lambda: groups(False))
        return
    pl.when(needed & (tile == 0))(lambda: groups(True))
    pl.when(needed & (tile > 0))(lambda: groups(False))


def _backward_kernel(
    first_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    dout_ref,
    lse_ref,
    weight_1_ref,
    weight_2_ref,
    transposed_1_ref,
    transposed_2_ref,
    left_ref,
    *more_refs,
    t: Tiling,
):
    table_refs, (_, _, *more_refs) = more_refs[: t.slab_parts], more_refs[t.slab_parts :]  # two arrays of zeros
    dq_ref, dk_ref, dv_ref, dweight_1_ref, dweight_2_ref, dtable_ref, dleft_ref, *scratch_refs = more_refs
    scores_ref, dprobs_ref, probs_ref, dq_block_ref, dslab_ref, dk_sum_ref, dv_sum_ref, *scratch_refs = scratch_refs
    hidden_ref, added_ref, dhidden_ref, dadded_ref, semaphores = scratch_refs
    tile, block = pl.program_id(1), pl.program_id(2)
    begin, end = t.tiles_of(block, first_ref[0])
    step = t.step(block, tile, first_ref[0])
    needed = (tile >= begin) & (tile <= end)
    lane = jax.lax.broadcasted_iota(jnp.int32, (GROUP, LANES), 1)
    of_head = [pl.ds(head, t.block, stride=t.heads) for head in range(t.num_heads)]
    share = t.num_heads // t.num_groups

    # Gradients that many steps add to and that are too large to stay: read, added to and written by each.
    batch, columns = pl.program_id(0), pl.ds(pl.multiple_of(step.slab - t.room, LANES), t.room + t.slab)
    rows = pl.ds(pl.multiple_of(block * t.block, t.block), t.block)
    pairs = [(dq_ref.at[batch, :, rows, :], dq_block_ref), (dtable_ref.at[batch, :, columns], dslab_ref)]
    reads = [pltpu.make_async_copy(main, fast, semaphores.at[0, i]) for i, (main, fast) in enumerate(pairs)]
    writes = [pltpu.make_async_copy(fast, main, semaphores.at[1, i]) for i, (main, fast) in enumerate(pairs)]

    @pl.when(needed)
    def _():
        for read in reads:
            read.start()

    @pl.when((tile == 0) & (block == 0))
    def _():
        for ref in (dweight_1_ref, dweight_2_ref):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        if t.heads > t.num_heads:
            scores_ref[...] = jnp.zeros(scores_ref.shape, jnp.float32)
            dprobs_ref[...] = jnp.zeros(dprobs_ref.shape, jnp.float32)

    @pl.when(tile == 0)
    def _():
        dleft_ref[...] = jnp.zeros(dleft_ref.shape, jnp.float32)

    @pl.when(block == 0)
    def _():
        dk_sum_ref[...] = jnp.zeros(dk_sum_ref.shape, jnp.float32)
        dv_sum_ref[...] = jnp.zeros(dv_sum_ref.shape, jnp.float32)

    @pl.when(needed)
    def _():
        _shear(t, table_refs, hidden_ref, added_ref)
        dhidden_ref[...] = jnp.zeros(dhidden_ref.shape, jnp.float32)
        dadded_ref[...] = jnp.zeros(dadded_ref.shape, jnp.float32)
        visible = step.visible(t.block, 1)
        for head, lines in enumerate(of_head):
            scores = _dot(q_ref[0, head], k_ref[0, 0, head // share], (1, 1)) * t.head_dim**-0.5
            scores_ref[lines, :] = jnp.where(visible, scores, 0.0)
            dout = dout_ref[0, head]
            mean = jnp.sum(dout.astype(jnp.float32) * out_ref[0, head].astype(jnp.float32), 1, keepdims=True)
            dprobs_ref[lines, :] = _dot(dout, v_ref[0, 0, head // share], (1, 1)) - mean

    def lines_of(group: Any) -> Any:
        return pl.ds(pl.multiple_of(group * t.lines, t.lines), t.lines)

    def lse_of(group: Any) -> Array:
        """[lines, 1]: the numbers of a group, which lie along the lanes."""
        square = (LANES, LANES)
        diagonal = jax.lax.broadcasted_iota(jnp.int32, square, 0) == jax.lax.broadcasted_iota(jnp.int32, square, 1)
        rows = [lse_ref[0, 0, pl.ds(group * (t.lines // LANES) + i, 1), :] for i in range(t.lines // LANES)]
        columns = [jnp.where(diagonal, jnp.broadcast_to(row, square), 0.0) for row in rows]
        return jnp.concatenate([jnp.sum(column, 1, keepdims=True) for column in columns])

    def along_lanes(x: Array, lines: int) -> Array:
        """The 8 rows of a group side by side: [8 lines, 128] -> [lines, 8 x 128]."""
        return jnp.concatenate([x[r * lines : (r + 1) * lines] for r in range(GROUP)], 1)

    def of_group(group: Any, with_left: bool) -> None:
        turn = step.turn(group)
        shift, lines = turn[1], lines_of(group)
        scores, dprobs = scores_ref[lines, :], dprobs_ref[lines, :]
        given = weight_1_ref[...], hidden_ref, left_ref if with_left else None
        taps_1, before, exists = _hidden(step, group, scores, turn, *given)
        positive = before > 0
        hidden = _where(exists, jnp.where(positive, before, SLOPE * before)).astype(t.dtype)
        taps_2 = [_roll(hidden, t.pad - w) for w in range(t.width)]
        update = _convolve(t, weight_2_ref[...], taps_2, t.channels) + _look_up(added_ref, turn, lane)
        total = _roll(update, LANES - shift) + scores

        lanes = jax.lax.broadcasted_iota(jnp.int32, total.shape, 1)
        visible, own = step.visible(t.lines, t.heads, group), step.own(lanes)
        # Beyond these lanes the scores that a result needs are another tile's.
        known = visible & (lanes >= 2 * t.pad) & (lanes < LANES - 2 * t.ahead)
        probs = jnp.where(known, jnp.exp(total - lse_of(group)), 0.0)
        dtotal = probs * dprobs

        source = dtotal.astype(t.dtype)
        dtaps_2 = [_roll(source, shift + (w - t.pad) + LANES) for w in range(t.width)]
        dhidden = _convolve(t, transposed_2_ref[...], dtaps_2, t.heads)
        dbefore = _where(exists, jnp.where(positive, dhidden, SLOPE * dhidden))
        source = dbefore.astype(t.dtype)
        dtaps_1 = [_roll(source, w - t.pad) for w in range(t.width)]
        dscores = _roll(_convolve(t, transposed_1_ref[...], dtaps_1, t.channels), LANES - shift) + dtotal
        scores_ref[lines, :] = jnp.where(visible & own, dscores, 0.0)
        probs_ref[lines, :] = jnp.where(own, probs, 0.0)

        # From here on a column counts in the tile that owns it alone.
        own_turned = step.own((lane - shift) & (LANES - 1))
        dbefore = _where(own_turned, dbefore)
        dupdate = _where(own_turned, dtaps_2[t.pad].astype(jnp.float32)).astype(t.dtype)
        stacked_1 = jnp.concatenate([along_lanes(tap, t.heads) for tap in taps_1])
        stacked_2 = jnp.concatenate([along_lanes(tap, t.channels) for tap in taps_2])
        dweight_1_ref[0] += _dot(along_lanes(dbefore.astype(t.dtype), t.channels), stacked_1, (1, 1))
        dweight_2_ref[0] += _dot(along_lanes(dupdate, t.heads), stacked_2, (1, 1))

        here, begin = lane >= shift, turn[0]
        after = pl.multiple_of(begin + LANES, LANES)
        dadded = _where(own_turned, _roll(dtotal, shift))
        for ref, gradient in ((dhidden_ref, dbefore), (dadded_ref, dadded)):
            ref[:, pl.ds(begin, LANES)] += _where(here, gradient)
            ref[:, pl.ds(after, LANES)] += _where(~here, gradient)
        if with_left:
            of_channels = jax.lax.broadcasted_iota(jnp.int32, (t.channels, LANES), 1)
            for column in range(t.pad):
                at = (t.halo[0] + column + shift) & (LANES - 1)
                for r in range(GROUP):
                    row = GROUP * group + r
                    of_row = _roll(dbefore[r * t.channels : (r + 1) * t.channels], row - at + LANES)
                    dleft_ref[0, 0, column] -= jnp.where(of_channels == row, of_row, 0.0)

    def groups(with_left: bool) -> None:
        def body(group, _):
            of_group(group, with_left)
            return 0

        jax.lax.fori_loop(0, t.block // GROUP, body, 0)

    _in_first_tile_and_others(t, tile, needed, groups)

    @pl.when(needed)
    def _():
        for read in reads:
            read.wait()
        dslab_ref[...] += _unsheared(t, dhidden_ref, dadded_ref)
        for head, lines in enumerate(of_head):
            dscores = scores_ref[lines, :].astype(q_ref.dtype)
            probs = probs_ref[lines, :].astype(q_ref.dtype)
            dq_block_ref[head] += _dot(dscores, k_ref[0, 0, head // share], (1, 0))
            dk_sum_ref[head // share] += _dot(dscores, q_ref[0, head], (0, 0))
            dv_sum_ref[head // share] += _dot(probs, dout_ref[0, head], (0, 0))
        for write in writes:
            write.start()
        for write in writes:
            write.wait()

    @pl.when(block == t.num_blocks - 1)
    def _():
        dk_ref[0, 0] = (dk_sum_ref[...] * t.head_dim**-0.5).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_sum_ref[...].astype(dv_ref.dtype)


def _whole(x: Any, t: Tiling) -> pl.BlockSpec:
    """All of an array, brought once."""
    once = {} if t.interpret else {"pipeline_mode": pl.Buffered(1)}
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim, **once)


def _slabs(t: Tiling, table: Array, place: Callable[..., Any]) -> list[tuple[Array, pl.BlockSpec]]:
    """The slab of a step in parts, one beside the other; `place` says the step's block and tile."""

    def part(i: int) -> pl.BlockSpec:
        def index(b, outer, inner, first_ref):
            block, tile = place(b, outer, inner, first_ref)
            begin = (t.step(block, tile, first_ref[0]).slab - t.room) // LANES
            # A step that is left out has no slab, but a place for one.
            return 0, jnp.clip(begin, 0, t.table_columns // LANES - t.slab_parts) + i

        return pl.BlockSpec((table.shape[0], LANES), index)

    return [(table, part(i)) for i in range(t.slab_parts)]


def _call(
    t: Tiling,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: list[tuple[Array, pl.BlockSpec]],
    outputs: list[tuple[tuple[int, ...], Any, pl.BlockSpec]],
    scratch: list[Any],
    first: Array,
    **options: Any,
) -> Sequence[Array]:
    """`pl.pallas_call` with `first` beforehand; all that is given and made varies over the same mesh axes."""
    arrays = vary_alike(first.reshape(1), *(array for array, _ in inputs))
    axes = jax.typeof(arrays[0]).manual_axis_type
    # Pallas' usual interpreter is quick, but not made for the inside of a `shard_map`.
    interpret = pltpu.InterpretParams() if t.interpret is True and axes.varying else t.interpret
    in_specs, out_specs = [spec for _, spec in inputs], [spec for *_, spec in outputs]
    return pl.pallas_call(
        functools.partial(kernel, t=t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes) for shape, dtype, _ in outputs],
        interpret=interpret,
        **options,
    )(*arrays)


def _call_forward(t: Tiling, q_BTHK, k_BSGK, v_BSGK, first, operator: Operator) -> tuple[Array, Array]:
    batch, dtype = q_BTHK.shape[0], q_BTHK.dtype
    rows, lines = t.num_blocks * t.block, t.block * t.heads
    weight_1 = _stacked(t, operator.scores_WHC, t.heads, t.channels)
    weight_2 = _stacked(t, operator.output_WCH, t.channels, t.heads)
    table, left = _table(t, operator.hidden_CN, operator.added_HN), _left(t, operator.left_PCT)

    def tile_of(b, i, j, first_ref):
        return b, jnp.clip(j, *t.tiles_of(i, first_ref[0])), 0, 0, 0

    of_block = pl.BlockSpec((1, t.num_heads, t.block, t.head_dim), lambda b, i, j, _: (b, 0, i, 0))
    of_tile = pl.BlockSpec((1, 1, t.num_groups, LANES, t.head_dim), tile_of)
    out, lse = _call(
        t,
        _forward_kernel,
        (batch, t.num_blocks, t.num_tiles),
        [
            (_by_block(t, q_BTHK), of_block),
            (_by_tile(t, k_BSGK), of_tile),
            (_by_tile(t, v_BSGK), of_tile),
            (weight_1, _whole(weight_1, t)),
            (weight_2, _whole(weight_2, t)),
            (left, pl.BlockSpec((1, *left.shape[1:]), lambda b, i, j, _: (i, 0, 0, 0))),
            *_slabs(t, table, lambda b, i, j, first_ref: (i, tile_of(b, i, j, first_ref)[1])),
        ],
        [
            ((batch, t.num_heads, rows, t.head_dim), dtype, of_block),
            (
                (batch, t.num_blocks, lines // LANES, LANES),
                jnp.float32,
                pl.BlockSpec((1, 1, lines // LANES, LANES), lambda b, i, j, _: (b, i, 0, 0)),
            ),
        ],
        [
            *[pltpu.VMEM((lines, LANES), jnp.float32)] * 5,
            pltpu.VMEM((t.num_heads, t.block, t.head_dim), jnp.float32),
            pltpu.VMEM((GROUP * t.channels, t.slab), jnp.float32),
            pltpu.VMEM((GROUP * t.heads, t.slab), jnp.float32),
        ],
        first,
        name="dape_forward",
        compiler_params=_compiler_params(t),
        cost_estimate=cost(t, batch, dtype.itemsize),
    )
    return out[:, :, : t.num_rows], lse


def _compiler_params(t: Tiling) -> pltpu.CompilerParams:
    # Sequences are independent of each other, and so are blocks of rows while nothing is gathered over them.
    order = ("parallel", "arbitrary" if t.backward else "parallel", "arbitrary")
    return pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=t.vmem_bytes)


def _call_backward(t: Tiling, q_BTHK, k_BSGK, v_BSGK, first, operator: Operator, out_BHTK, lse, dout_BTHK):
    batch, dtype = q_BTHK.shape[0], q_BTHK.dtype
    rows, lines = t.num_blocks * t.block, t.block * t.heads
    weights = [
        _stacked(t, operator.scores_WHC, t.heads, t.channels),
        _stacked(t, operator.output_WCH, t.channels, t.heads),
        _stacked(t, operator.scores_WHC.swapaxes(1, 2), t.channels, t.heads),
        _stacked(t, operator.output_WCH.swapaxes(1, 2), t.heads, t.channels),
    ]
    table, untable = jax.vjp(functools.partial(_table, t), operator.hidden_CN, operator.added_HN)
    left, unleft = jax.vjp(functools.partial(_left, t), operator.left_PCT)

    def block_of(j, i, first_ref):
        return jnp.clip(i, *t.blocks_of(j, first_ref[0]))

    of_block = pl.BlockSpec(
        (1, t.num_heads, t.block, t.head_dim), lambda b, j, i, first_ref: (b, 0, block_of(j, i, first_ref), 0)
    )
    of_tile = pl.BlockSpec((1, 1, t.num_groups, LANES, t.head_dim), lambda b, j, i, _: (b, j, 0, 0, 0))
    of_lse = pl.BlockSpec(
        (1, 1, lines // LANES, LANES), lambda b, j, i, first_ref: (b, block_of(j, i, first_ref), 0, 0)
    )

    def left_block(j, i):
        # In later tiles the last block stays where it is, so that nothing is read or written again.
        return jnp.where(j == 0, i, t.num_blocks - 1)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def of_sequence(shape: tuple[int, ...]) -> tuple[tuple[int, ...], Any, pl.BlockSpec]:
        return (batch, *shape), jnp.float32, pl.BlockSpec((1, *shape), lambda b, *_: (b, *(0,) * len(shape)))

    tiles = (batch, t.num_tiles, t.num_groups, LANES, t.head_dim)
    inputs = [
        (_by_block(t, q_BTHK), of_block),
        (_by_tile(t, k_BSGK), of_tile),
        (_by_tile(t, v_BSGK), of_tile),
        (jnp.pad(out_BHTK, ((0, 0), (0, 0), (0, rows - t.num_rows), (0, 0))), of_block),
        (_by_block(t, dout_BTHK), of_block),
        (lse.reshape(batch, t.num_blocks, lines // LANES, LANES), of_lse),
        *[(weight, _whole(weight, t)) for weight in weights],
        (left, pl.BlockSpec((1, *left.shape[1:]), lambda b, j, i, _: (left_block(j, i), 0, 0, 0))),
        *_slabs(t, table, lambda b, j, i, first_ref: (block_of(j, i, first_ref), j)),
        (jnp.zeros((batch, t.num_heads, rows, t.head_dim), jnp.float32), anywhere),
        (jnp.zeros((batch, *table.shape), jnp.float32), anywhere),
    ]
    dq, dk, dv, dweight_1, dweight_2, dtable, dleft = _call(
        t,
        _backward_kernel,
        (batch, t.num_tiles, t.num_blocks),
        inputs,
        [
            ((batch, t.num_heads, rows, t.head_dim), jnp.float32, anywhere),
            (tiles, dtype, of_tile),
            (tiles, dtype, of_tile),
            of_sequence((t.channels, t.width * t.heads)),
            of_sequence((t.heads, t.width * t.channels)),
            ((batch, *table.shape), jnp.float32, anywhere),
            (
                (batch, *left.shape),
                jnp.float32,
                pl.BlockSpec((1, 1, *left.shape[1:]), lambda b, j, i, _: (b, left_block(j, i), 0, 0, 0)),
            ),
        ],
        [
            *[pltpu.VMEM((lines, LANES), jnp.float32)] * 3,
            pltpu.VMEM((t.num_heads, t.block, t.head_dim), jnp.float32),
            pltpu.VMEM((t.channels + t.heads, t.room + t.slab), jnp.float32),
            *[pltpu.VMEM((t.num_groups, LANES, t.head_dim), jnp.float32)] * 2,
            *[pltpu.VMEM((GROUP * t.channels, t.slab), jnp.float32), pltpu.VMEM((GROUP * t.heads, t.slab), jnp.float32)]
            * 2,
            pltpu.SemaphoreType.DMA((2, 2)),
        ],
        first,
        name="dape_backward",
        input_output_aliases={len(inputs) - 1: 0, len(inputs): 5},  # zeros, after `first`: dq, dtable
        compiler_params=_compiler_params(t),
        cost_estimate=cost(t, batch, dtype.itemsize),
    )
    dq_BTHK = jnp.moveaxis(dq[:, :, : t.num_rows] * t.head_dim**-0.5, 1, 2).astype(dtype)
    dk_BSGK, dv_BSGK = (_from_tiles(t, x).astype(k_BSGK.dtype) for x in (dk, dv))
    dhidden_CN, dadded_HN = untable(dtable.sum(0))
    (dleft_PCT,) = unleft(dleft.sum(0))
    H, C, W = t.num_heads, t.num_channels, t.width
    dscores_WHC = dweight_1.sum(0).reshape(t.channels, W, t.heads).transpose(1, 2, 0)[:, :H, :C]
    doutput_WCH = dweight_2.sum(0).reshape(t.heads, W, t.channels).transpose(1, 2, 0)[:, :C, :H]
    return dq_BTHK, dk_BSGK, dv_BSGK, Operator(dscores_WHC, doutput_WCH, dhidden_CN, dadded_HN, dleft_PCT)
