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
from jaxtyping import Array

from dape_jax.kernels.tables import left_pad, vary_alike
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


def _compiler_params(t: Tiling) -> pltpu.CompilerParams:
    # Sequences are independent of each other, and so are blocks of rows while nothing is gathered over them.
    order = ("parallel", "arbitrary" if t.backward else "parallel", "arbitrary")
    return pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=t.vmem_bytes)
