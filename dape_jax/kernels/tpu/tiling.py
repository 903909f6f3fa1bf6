"""Tiling of the TPU kernels: grid, blocks, halos, layouts in HBM and VMEM, memory and cost.

Scores of one sequence are computed a block of rows (all heads) by a tile of keys at a time and never leave VMEM:

                     tile 0      tile 1      tile 2        128 columns = keys = lanes; neighbouring tiles overlap
                 +-----------+-----------+-----------+
        block 0  |  x x      |  skipped  |  skipped  |     x: visible scores
                 |  x x x    |           |           |     32, 64 or 128 rows of all heads
                 +-----------+-----------+-----------+
        block 1  |  x x x x  |  x        |  skipped  |
                 |  x x x x  |  x x      |           |
                 +-----------+-----------+-----------+

**Grid.** Forward is (sequence, block, tile): the tiles of a block follow each other, and its running softmax stays in
VMEM. Backward is (sequence, tile, block): the blocks of a tile follow each other, and the gradients of its keys and
values stay in VMEM. A grid step is one block and one tile. Steps that no row needs do nothing, and their index maps
return the blocks of a neighbouring step, so that the pipeline copies nothing for them.

**Halo.** A result at column j reads hidden features at j - pad .. j + ahead, and those read scores as far again. A tile
computes 128 columns and owns those between its halos; the next tile starts where the owned columns end. W = 3:

        lane            0   1   2   3   ...   125   126   127
        scores          x   x   x   x   ...    x     x     x      computed from Q and K
        hidden              x   x   x   ...    x     x            correct
        results                 x   x   ...    x                  correct, and owned by this tile (lanes 2 .. 125)

The backward pass convolves twice more, transposed, so its halo is twice as wide. Nothing is carried between tiles.

**Layout in VMEM.** A register has 8 sublanes x 128 lanes. Scores are [(row, head), 128]: sublanes are row-major, lanes
are columns. 8 rows are a group: [8 * padded heads, 128]. A convolution is a matmul over a group, whose taps are copies
of the group rolled along the lanes and stacked along the contraction dim:

        [channels, W * heads] @ [W * heads, 128]      for every row of the group

**Distance tables.** The bias contributes a function of the distance row - column, tabulated in HBM as
[padded channels + padded heads, table_columns], distance falling to the right. A step needs a slab of it:

        table   |....................[  margin  |      slab      ]..............|

`shear` (in `forward.py`) copies the slab 8 times to VMEM, one copy for each row of a group, shifted by its distance to
the group's first row. A group's part of the slab may start at any lane. Then the scores are rolled to the table, not
the table to the scores: scores are smaller, and their taps need a roll in any case.

        array                     HBM                                            VMEM, for a grid step
        q, out and gradients      [B, H, blocks * block_rows, K]                 [H, block_rows, K]
        k, v and gradients        [B, tiles, G, 128, K], halos duplicated        [G, 128, K]
        convolution weights       [rows * outputs, W * rows * inputs]            all of it, loaded once
        distance tables           [padded channels + padded heads, columns]      slab, then 8 sheared copies
        left corrections          [blocks, P, padded channels, 128]              [P, padded channels, 128]
                                  [blocks, 2 P, padded heads, 128]               [2 P, padded heads, 128]
        log-sum-exp               [B, blocks, block_rows * padded heads / 128, 128]
        scores, probs, hidden     never                                          [block_rows * padded heads, 128]
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from dape_jax import hardware
from dape_jax.hardware import MIB
from dape_jax.kernels.tables import vary_alike
from dape_jax.sharding import this_device_kind

LANES = 128  # of a register: the columns of a tile
SUBLANES = 8  # of a register of 32-bit numbers
GROUP_ROWS = 8  # rows whose convolutions are computed together
MASKED_SCORE = -1e30  # its probability is 0

# VMEM that one kernel may use on a core, by `device_kind`. Kernels are interpreted on a CPU.
VMEM_BYTES = hardware.VMEM_BYTES | {"cpu": 100 * MIB}
COMPILER_SHARE = 0.2  # of VMEM, left to the compiler for temporary values
BLOCKS = (128, 64, 32)  # rows of a block; the first size that fits into VMEM is used


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return pl.cdiv(number, multiple) * multiple


def iota(shape: tuple[int, ...], dim: int) -> Array:
    """Return the index along `dim` in an array of two or more dims. (Mosaic has no iota in one dim.)"""
    return jax.lax.broadcasted_iota(jnp.int32, shape, dim)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static description of one kernel call: sizes, and how they are cut into blocks and tiles."""

    num_rows: int  # T
    num_keys: int  # S
    num_heads: int  # H
    num_groups: int  # G, heads of keys and values
    head_dim: int  # K
    width: int  # W
    pad: int  # columns that a convolution reads to its left
    num_channels: int  # C
    row_stride: int  # columns between neighbouring rows
    window: int | None  # columns that a row sees, or None for all
    block_rows: int
    backward: bool  # the backward pass has a wider halo
    dtype: jnp.dtype  # of the convolutions' operands
    vmem_limit_bytes: int
    interpret: Any  # see `kernels.attend_fused`

    @property
    def ahead(self) -> int:
        """Return how many columns a convolution reads to its right."""
        return self.width - 1 - self.pad

    @property
    def halo(self) -> tuple[int, int]:
        """Return the columns of a tile to the left and right of those it owns.

        Two convolutions read 2 pad columns to the left and 2 ahead to the right. Their transposes read the same number
        in the opposite direction.
        """
        read = 2 * self.pad, 2 * self.ahead
        return (sum(read), sum(read)) if self.backward else read

    @property
    def owned_columns(self) -> int:
        """Return how many columns a tile owns: the distance between neighbouring tiles."""
        return LANES - sum(self.halo)

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles. In the backward pass they cover hidden features, which end `ahead` after S."""
        return pl.cdiv(self.num_keys + self.ahead * self.backward, self.owned_columns)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of rows."""
        return pl.cdiv(self.num_rows, self.block_rows)

    @property
    def padded_rows(self) -> int:
        """Return the rows of all blocks."""
        return self.num_blocks * self.block_rows

    @property
    def padded_heads(self) -> int:
        """Return H padded to whole registers: 16 sublanes if numbers have 16 bits."""
        return round_up(self.num_heads, 16)

    @property
    def padded_channels(self) -> int:
        """Return C padded to whole registers."""
        return round_up(self.num_channels, 16)

    @property
    def block_sublanes(self) -> int:
        """Return the sublanes of a block's scores."""
        return self.block_rows * self.padded_heads

    @property
    def group_sublanes(self) -> int:
        """Return the sublanes of a group's scores."""
        return GROUP_ROWS * self.padded_heads

    @property
    def unroll(self) -> int:
        """Return the groups in one loop iteration. The compiler can overlap their instructions."""
        return 1 if self.backward or self.interpret else min(4, self.block_rows // GROUP_ROWS)

    @property
    def loop_iterations(self) -> int:
        """Return the iterations of the loop over the groups of a block."""
        return self.block_rows // GROUP_ROWS // self.unroll

    @property
    def slab_columns(self) -> int:
        """Return the columns of the tables that the groups of a block need for one tile."""
        return round_up(self.row_stride * (self.block_rows - GROUP_ROWS), LANES) + 2 * LANES

    @property
    def slab_margin(self) -> int:
        """Return the columns loaded before the slab. `shear` shifts them into the copies for later rows of a group."""
        return round_up((GROUP_ROWS - 1) * self.row_stride, LANES)

    @property
    def slab_shape(self) -> tuple[int, int]:
        """Return the shape of the slab with its margin."""
        return self.padded_channels + self.padded_heads, self.slab_margin + self.slab_columns

    @property
    def table_origin(self) -> int:
        """Return the table column of distance 0.

        Entries for visible columns are to its left. A block of padded rows may read to its right.
        """
        return round_up(self.num_keys + 2 * self.row_stride * self.block_rows + LANES + self.slab_margin, LANES)

    @property
    def table_columns(self) -> int:
        """Return the number of columns of the tables."""
        return self.table_origin + round_up(self.row_stride * self.block_rows, LANES) + self.slab_columns + 2 * LANES

    @property
    def num_steps(self) -> int:
        """Return the grid steps of one sequence that compute something."""
        begin, end = self.tile_range(np.arange(self.num_blocks), 0, np)
        return int((end - begin + 1).sum())

    def step(self, block: Any, tile: Any, first: Any) -> "Step":
        """Return the positions of a block and a tile, given the column `first` of row 0."""
        query_column = first + self.row_stride * self.block_rows * block
        return Step(self, query_column, tile * self.owned_columns - self.halo[0])

    def tile_range(self, block: Any, first: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """Return the first and last tile that own a column used by a row of the block."""
        row = first + self.row_stride * self.block_rows * block
        last = row + self.row_stride * (self.block_rows - 1) + self.ahead * self.backward
        begin = 0 if self.window is None else row - self.window + 1 - self.pad * self.backward
        return xp.maximum(begin, 0) // self.owned_columns, xp.minimum(last // self.owned_columns, self.num_tiles - 1)

    def block_range(self, tile: Any, first: Any) -> tuple[Any, Any]:
        """Return the first and last block with a row that uses a column of the tile: the inverse of `tile_range`."""
        step = self.row_stride * self.block_rows
        begin = tile * self.owned_columns - self.ahead * self.backward - first - self.row_stride * (self.block_rows - 1)
        end = self.num_blocks - 1
        if self.window is not None:
            reach = (tile + 1) * self.owned_columns - 1 + self.window - 1 + self.pad * self.backward - first
            end = jnp.clip(reach // step, 0, end)
        return jnp.clip(-(-begin // step), 0, end), end

    def block_of(self, outer: Any, inner: Any, first_ref: Any) -> Any:
        """Return the block of a grid step; if the step is skipped, the nearest one that its tile needs."""
        return jnp.clip(inner, *self.block_range(outer, first_ref[0])) if self.backward else outer

    def tile_of(self, outer: Any, inner: Any, first_ref: Any) -> Any:
        """Return the tile of a grid step; if the step is skipped, the nearest one that its block needs."""
        return outer if self.backward else jnp.clip(inner, *self.tile_range(outer, first_ref[0]))


class SlabOffset(NamedTuple):
    """Where a group's entries start in the slab: at `start + shift`."""

    start: Any  # a multiple of 128
    shift: Any  # 0 .. 127; the group's scores are rolled right by as many lanes to meet the table


@dataclasses.dataclass(frozen=True)
class Step:
    """Positions of the block of rows and the tile of columns of one grid step."""

    t: Tiling
    query_column: Any  # of the block's first row
    key_column: Any  # of the tile's first lane; negative in the left halo of tile 0

    @property
    def slab_start(self) -> Any:
        """Return the table column at which the slab starts, a multiple of 128."""
        t = self.t
        last = t.table_origin - self.query_column + self.key_column - t.row_stride * (t.block_rows - GROUP_ROWS)
        return last // LANES * LANES

    def slab_offset(self, group: Any) -> SlabOffset:
        """Return where in the slab the entries of a group's first row start."""
        t = self.t
        column = t.table_origin - self.query_column + self.key_column - t.row_stride * GROUP_ROWS * group
        column -= self.slab_start
        start = column // LANES * LANES
        return SlabOffset(pl.multiple_of(start, LANES), column - start)

    def visible(self, num_sublanes: int, sublanes_per_row: int, group: Any = 0) -> Array:
        """Return whether a row sees a column: [num_sublanes, 128], beginning with the first row of `group`."""
        lane, sublane = (iota((num_sublanes, LANES), dim) for dim in (1, 0))
        distance = self.query_column - self.key_column
        distance = distance + self.t.row_stride * (GROUP_ROWS * group + sublane // sublanes_per_row) - lane
        visible = (distance >= 0) & (self.key_column + lane >= 0)
        return visible if self.t.window is None else visible & (distance < self.t.window)

    def owned(self, lane: Array) -> Array:
        """Return whether the tile owns the column in a lane."""
        left = self.t.halo[0]
        return (lane >= left) & (lane < left + self.t.owned_columns)


def tilings(
    q_BTHK: jax.ShapeDtypeStruct | Array,
    k_BSGK: jax.ShapeDtypeStruct | Array,
    *,
    width: int,
    pad: int,
    num_channels: int,
    dtype: jnp.dtype,
    row_stride: int,
    window: int | None,
    interpret: Any = False,
    device_kind: str | None = None,
) -> tuple[Tiling, Tiling]:
    """Choose the tilings of the forward and of the backward pass, for a device kind or the present device.

    Raises:
        NotImplementedError: the size of the device's VMEM is unknown, or no block of rows fits into it.
    """
    num_rows, num_heads, head_dim = q_BTHK.shape[1:]
    num_keys, num_groups = k_BSGK.shape[1:3]
    device_kind = device_kind or this_device_kind()
    if device_kind not in VMEM_BYTES:
        raise NotImplementedError(f"the VMEM size of {device_kind} is unknown; it is known for {', '.join(VMEM_BYTES)}")
    limit = VMEM_BYTES[device_kind]
    make = functools.partial(
        Tiling,
        num_rows=num_rows,
        num_keys=num_keys,
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        width=width,
        pad=pad,
        num_channels=num_channels,
        row_stride=row_stride,
        window=window,
        dtype=jnp.dtype(dtype),
        vmem_limit_bytes=limit,
        interpret=interpret,
    )

    def choose(*, backward: bool) -> Tiling:
        candidates = [make(block_rows=rows, backward=backward) for rows in BLOCKS]
        needed = [vmem_bytes(t, q_BTHK.dtype.itemsize) for t in candidates]
        fitting = [t for t, size in zip(candidates, needed, strict=True) if size <= (1 - COMPILER_SHARE) * limit]
        if not fitting:
            raise NotImplementedError(
                f"a block of {BLOCKS[-1]} rows needs {needed[-1] / MIB:.0f} MiB of VMEM; {device_kind} has "
                f"{limit / MIB:.0f} MiB, of which the compiler needs {COMPILER_SHARE:.0%}"
            )
        # The smallest block that holds all rows, else the largest that fits.
        return next((t for t in reversed(fitting) if t.block_rows >= num_rows), fitting[0])

    return choose(backward=False), choose(backward=True)


def cost(t: Tiling, batch: int, itemsize: int) -> pl.CostEstimate:
    """Return FLOPs and HBM traffic of a call. The compiled program shows neither, so planning reads this estimate.

    FLOPs count all steps that are computed, with halos and masked columns, but without padded heads and channels. Bytes
    count the blocks that the pipeline copies between HBM and VMEM, rows of K numbers padded to 128 lanes.
    """
    steps = batch * t.num_steps
    pairs = steps * t.block_rows * LANES
    products, convolutions = (5, 6) if t.backward else (2, 2)
    flops = 2 * pairs * t.num_heads * (products * t.head_dim + convolutions * t.width * t.num_channels)
    padded_dim = round_up(t.head_dim, LANES)
    block_numbers = t.num_heads * t.block_rows * padded_dim
    tile = t.num_groups * LANES * padded_dim * itemsize
    slab = math.prod(t.slab_shape) * 4
    if t.backward:
        # A step reads q, out, dout and the slab, and reads and writes dq (float32) and the slab's gradient.
        step_bytes = 3 * block_numbers * itemsize + 2 * block_numbers * 4 + 3 * slab
        num_bytes = steps * step_bytes + batch * t.num_tiles * 4 * tile
    else:
        num_bytes = batch * t.num_blocks * 2 * block_numbers * itemsize + steps * (2 * tile + slab)
    return pl.CostEstimate(flops=flops, transcendentals=pairs * t.num_heads, bytes_accessed=num_bytes)


def vmem_bytes(t: Tiling, itemsize: int) -> int:
    """Return the VMEM that scratch and pipelined blocks need, without the compiler's temporary values."""
    scores = t.block_sublanes * LANES * 4
    block_numbers = t.num_heads * t.block_rows * LANES
    tile_numbers = t.num_groups * LANES * LANES
    slab = math.prod(t.slab_shape) * 4
    sheared = GROUP_ROWS * (t.padded_channels + t.padded_heads) * t.slab_columns * 4
    if not t.backward:
        return 5 * scores + block_numbers * (4 + 4 * itemsize) + tile_numbers * 4 * itemsize + 2 * slab + sheared
    arrays = 3 * scores + block_numbers * (4 + 6 * itemsize) + tile_numbers * (8 + 8 * itemsize)
    return arrays + 3 * slab + 2 * sheared


# ---- Layouts in HBM


def to_blocks(t: Tiling, x_BTHK: Array) -> Array:
    """Lay rows out by head and pad them to whole blocks: [B, T, H, K] -> [B, H, padded rows, K]."""
    x_BHTK = jnp.moveaxis(x_BTHK, 1, 2)
    return jnp.pad(x_BHTK, ((0, 0), (0, 0), (0, t.padded_rows - t.num_rows), (0, 0)))


def to_tiles(t: Tiling, x_BSGK: Array) -> Array:
    """Cut keys into overlapping tiles: [B, S, G, K] -> [B, tiles, G, 128, K], with zeros where there is no key."""
    left, right = t.halo
    x_BGSK = jnp.moveaxis(x_BSGK, 1, 2)
    missing = t.num_tiles * t.owned_columns - t.num_keys
    x = jnp.pad(x_BGSK, ((0, 0), (0, 0), (left, max(right + missing, 0)), (0, 0)))
    batch, groups, _, dim = x.shape

    def cut(x: Array) -> Array:
        x = x[:, :, : t.num_tiles * t.owned_columns]
        return x.reshape(batch, groups, t.num_tiles, t.owned_columns, dim)

    parts = [cut(x)]
    if left + right:  # the first columns of the next tile
        following = jnp.pad(x[:, :, t.owned_columns :], ((0, 0), (0, 0), (0, t.owned_columns), (0, 0)))
        parts.append(cut(following)[:, :, :, : left + right])
    return jnp.concatenate(parts, 3).transpose(0, 2, 1, 3, 4)


def from_tiles(t: Tiling, x: Array) -> Array:
    """Join the columns that tiles own: [B, tiles, G, 128, K] -> [B, S, G, K]."""
    owned = x[:, :, :, t.halo[0] : t.halo[0] + t.owned_columns]
    batch, _, groups, _, dim = x.shape
    return owned.transpose(0, 1, 3, 2, 4).reshape(batch, -1, groups, dim)[:, : t.num_keys]


def to_table(t: Tiling, knee_CN: Array, added_HN: Array) -> Array:
    """Stack both tables, distance falling to the right: column x has distance table_origin - x."""

    def pad(table: Array, num_sublanes: int) -> Array:
        before = t.table_columns - 1 - t.table_origin - t.ahead
        after = t.table_origin - t.num_keys + 1
        return jnp.pad(table, ((0, num_sublanes - table.shape[0]), (before, after)))

    return jnp.concatenate([pad(knee_CN, t.padded_channels), pad(added_HN, t.padded_heads)])[:, ::-1]


def to_left_blocks(t: Tiling, left_PXT: Array, padded: int) -> Array:
    """Lay out a correction of the first columns: [P, X, T] -> [blocks, P, padded X, 128], a lane for a row."""
    P, X, T = left_PXT.shape
    at_least_one = max(P, 1)  # Pallas takes no empty array; this one is not read if P = 0
    left_PXT = jnp.pad(left_PXT, ((0, at_least_one - P), (0, padded - X), (0, t.padded_rows - T)))
    blocks = jnp.moveaxis(left_PXT.reshape(at_least_one, padded, t.num_blocks, t.block_rows), 2, 0)
    return jnp.pad(blocks, ((0, 0), (0, 0), (0, 0), (0, LANES - t.block_rows)))


def rows_per_dot(t: Tiling, inputs: int) -> int:
    """Return the rows in one matmul of a convolution: two, block-diagonally, if the contraction fits into 128."""
    return 2 if 2 * t.width * inputs <= LANES else 1


def to_matrix(t: Tiling, kernel_WIO: Array, inputs: int, outputs: int) -> Array:
    """Lay a convolution's kernel out as the matrix of `forward.convolve`: [rows * outputs, W * rows * inputs].

    With two rows per matmul, each tap is block-diagonal:

        [ tap 0   0   | tap 1   0   | ... ]
        [   0   tap 0 |   0   tap 1 | ... ]
    """
    width, num_inputs, num_outputs = kernel_WIO.shape
    rows = rows_per_dot(t, inputs)
    kernel_WIO = jnp.pad(kernel_WIO, ((0, 0), (0, inputs - num_inputs), (0, outputs - num_outputs)))
    diagonal = jnp.einsum("rs,WIO->WrOsI", jnp.eye(rows, dtype=kernel_WIO.dtype), kernel_WIO)
    diagonal = diagonal.reshape(width, rows * outputs, rows * inputs)
    return jnp.concatenate(list(diagonal), 1).astype(t.dtype)


# ---- Block specs and the call


class Blocked(NamedTuple):
    """An array of a kernel call, or the shape and dtype of a result, with its spec.

    Index maps get the grid indices (sequence, outer, inner), and the ref of the column of row 0.
    """

    array: Any
    spec: pl.BlockSpec


def by_rows(t: Tiling, array: Any) -> Blocked:
    """Block an array laid out by `to_blocks`."""
    block = 1, t.num_heads, t.block_rows, t.head_dim
    return Blocked(array, pl.BlockSpec(block, lambda b, *step: (b, 0, t.block_of(*step), 0)))


def by_tiles(t: Tiling, array: Any) -> Blocked:
    """Block an array laid out by `to_tiles`."""
    block = 1, 1, t.num_groups, LANES, t.head_dim
    return Blocked(array, pl.BlockSpec(block, lambda b, *step: (b, t.tile_of(*step), 0, 0, 0)))


def by_lanes(t: Tiling, array: Any) -> Blocked:
    """Block the log-sum-exp, [B, blocks, block_rows * padded heads / 128, 128]."""
    return Blocked(array, pl.BlockSpec((1, 1, *array.shape[2:]), lambda b, *step: (b, t.block_of(*step), 0, 0)))


def whole(t: Tiling, array: Any) -> Blocked:
    """Copy an array to VMEM once and keep it there."""
    once = {} if t.interpret else {"pipeline_mode": pl.Buffered(1)}
    return Blocked(array, pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim, **once))


def in_hbm(array: Any) -> Blocked:
    """Leave an array in HBM: the kernel copies what it needs."""
    return Blocked(array, pl.BlockSpec(memory_space=pl.ANY))


def slab_of(t: Tiling, table: Array) -> list[Blocked]:
    """Block the tables into a step's slab and its margin, in pieces of 128 columns side by side."""
    num_sublanes, num_parts = t.slab_shape[0], t.slab_shape[1] // LANES

    def part(i: int) -> Blocked:
        def index(_, *step):
            position = t.step(t.block_of(*step), t.tile_of(*step), step[-1][0])
            begin = (position.slab_start - t.slab_margin) // LANES
            # A skipped step may lie outside the table; its index must not.
            return 0, jnp.clip(begin, 0, t.table_columns // LANES - num_parts) + i

        return Blocked(table, pl.BlockSpec((num_sublanes, LANES), index))

    return [part(i) for i in range(num_parts)]


def scratch_of(*shape: int) -> Any:
    """Return float32 scratch in VMEM."""
    return pltpu.VMEM(shape, jnp.float32)


def sheared_scratch(t: Tiling) -> tuple[Any, Any]:
    """Return VMEM for the sheared slabs of the two tables: hidden features, and what is added to scores."""
    return tuple(scratch_of(GROUP_ROWS * n, t.slab_columns) for n in (t.padded_channels, t.padded_heads))


def call(
    t: Tiling, kernel: Callable[..., None], *, first: Array, inputs: Any, outputs: Any, scratch: Any, **options: Any
) -> Any:
    """Run `kernel(first_ref, inputs, outputs, scratch, t=t)` over the grid; return the outputs.

    `inputs` and `outputs` are trees of `Blocked`, `scratch` is a tree of VMEM buffers, and the kernel gets trees of
    refs. Index maps depend on `first`, the column of row 0, which is prefetched to SMEM. `options` are those of
    `pl.pallas_call`.
    """

    def split(tree: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Blocked))
        return structure.unflatten([x.array for x in leaves]), structure.unflatten([x.spec for x in leaves])

    (arrays, in_specs), (results, out_specs) = split(inputs), split(outputs)
    # Inside a shard_map all operands and results must vary over the same mesh axes.
    first, arrays = vary_alike(first.reshape(1), arrays)
    axes = jax.typeof(first).manual_axis_type
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes), results)
    # The default interpreter is faster, but does not work inside a shard_map.
    interpret = pltpu.InterpretParams() if t.interpret is True and axes.varying else t.interpret
    # Sequences are independent. So are blocks of rows in the forward pass; the backward pass sums over them.
    semantics = ("parallel", "arbitrary" if t.backward else "parallel", "arbitrary")
    batch = arrays.q.shape[0]
    grid = (batch, t.num_tiles, t.num_blocks) if t.backward else (batch, t.num_blocks, t.num_tiles)
    return pl.pallas_call(
        functools.partial(kernel, t=t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=(in_specs,), out_specs=(out_specs,), scratch_shapes=(scratch,)
        ),
        out_shape=(shapes,),
        interpret=interpret,
        name="dape_backward" if t.backward else "dape_forward",
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=t.vmem_limit_bytes),
        cost_estimate=cost(t, batch, arrays.q.dtype.itemsize),
        **options,
    )(first, arrays)[0]
