"""Tiling of the TPU kernels: grid, blocks, halos, layouts in HBM and VMEM, memory and cost.

Scores of one sequence are computed by blocks of rows (all heads) and tiles of keys, and never leave VMEM:

                     tile 0      tile 1      tile 2        512 columns = keys; neighbouring tiles overlap
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
return the blocks of a neighbouring step, so that the pipeline copies nothing for them. If one tile has all keys, the
forward grid is (half of the batch, block, sequence): sequences share the block's tables, which are sheared once.

**Phases.** A tile has p = 4 phases of 128 columns: lane l of phase f is column 4 l + f. The neighbour of a column is
in the same lane of the next phase, so that a tap of a convolution reads another register. Only taps that read beyond
the first or the last phase roll a register by one lane:

        lane             0    1    2   ...   127
        phase 0          0    4    8   ...   508
        phase 1          1    5    9   ...   509
        phase 2          2    6   10   ...   510
        phase 3          3    7   11   ...   511

With few keys, or a small VMEM, p is smaller.

**Halo.** A result at column j reads hidden features at j - pad .. j + ahead, and these read scores at j - 2 pad ..
j + 2 ahead. A tile owns the columns between its halos, and the columns of the next tile follow. The backward pass has
two more, transposed, convolutions, so its halo is twice as wide. Nothing is carried between tiles.

**Pieces.** Keys and values are in HBM once, in pieces of as many columns as a tile, 512. The columns of a tile with
halos are in two pieces. In VMEM a column has the same lane and phase as in its piece, so that the kernel only selects,
lane by lane, from one piece or the next, and the first columns of a tile are not in lane 0:

        tile 1, columns 500 .. 1011         lane    0    1   ...  124  125  126  127
                                         phase 0  512  516   ... 1008  500  504  508
                                                  (from piece 1 . . . | from piece 0)

Neighbouring columns are in neighbouring lanes, lane 127 next to lane 0, as a roll sees them. The gradients of keys and
values go back in the same way: a tile completes the piece in which the columns that it owns begin.

A single tile of all keys (up to 512) has no halo: a tap beyond its first or last column reads 0. Only the last rows
need more, hidden columns beyond the last score; see `forward.right_edge`.

**Layout in VMEM.** A register has 8 sublanes x 128 lanes of float32; a line is the 128 lanes of one sublane. An octet
is a register of 8 heads of one row. If 1 to 4 heads remain, those of two rows share a register, a quad; if 5 to 7
remain, they use a padded octet. Two rows are a unit:

        H = 12:   octet, row 0 | octet, row 1 | quad, rows 0 and 1

Convolutions are matmuls of a unit. Conv1 takes the lines of n + W - 1 phases, and returns the hidden features of two
rows and n = 2 phases, [2 n C, 128]; Conv2 takes the hidden features of n + W - 1 phases of one row, and returns n
phases. A loop iteration processes a group of 8 rows.

**Distance tables.** The bias contributes a function of the distance row - column, tabulated in HBM once for each
remainder of the distance modulo p, with decreasing distances: column x of remainder b has distance
b + p (origin - x). So row i reads the same entries in phase f as row i - 1 in phase f - 1, and a row needs one copy
of its entries, rolled to its lanes ("sheared"), which all phases read. Entries of masked distances are -1e30, which
makes their probability 0.

        array                     HBM                                            VMEM, for a grid step
        q, dout                   [B, H, blocks * block_rows, K]                 [H, block_rows, K]
        out, dq, also q and dout  [B, H / m, K, blocks * 128], m = 128 / block_rows [H / m, K, 128]
        k, v and gradients        [B, pieces, G, p, K, 128]                      [G, p, K, 128], two pieces of k and v
        convolution weights       [outputs, inputs] of a matmul                  all of it, loaded once
        distance tables           [p, padded channels + head lines, columns]     slab, then a copy for each row
        right edge                [B, units, phases, registers, 8, 128]          of the sequence
        left corrections          [blocks, P, padded channels, 128]              [P, padded channels, 128]
                                  [blocks, 2 P, head lines, 128]                 [2 P, head lines, 128]
        log-sum-exp, sum(dout out) [B, blocks, lines / 128, 128]
        scores, probs, hidden     never                                          [p, lines, 128]
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
from dape_jax.hardware import LANES, MIB
from dape_jax.sharding import this_device_kind, vary_alike

SUBLANES = 8  # sublanes of a register of 32-bit numbers
GROUP_ROWS = 8  # rows of a loop iteration
UNIT_ROWS = 2  # rows whose convolutions are computed together
MASKED_SCORE = -1e30  # gives a probability of 0
PHASES = (4, 2, 1)  # phases of a tile; not more than all keys need

# VMEM that one kernel may use on a core, by `device_kind`. Kernels are interpreted on a CPU.
VMEM_BYTES = hardware.VMEM_BYTES | {"cpu": 100 * MIB}
COMPILER_SHARE = 0.2  # share of VMEM reserved for the compiler's temporary values
BLOCKS = (128, 64, 32)  # rows of a block; not more than all rows need


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return pl.cdiv(number, multiple) * multiple


def iota(shape: tuple[int, ...], dim: int) -> Array:
    """Return the index along `dim` of an array with two or more dims (Mosaic has no iota in one dim)."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, dim)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static parameters of one kernel call: sizes, and their division into blocks and tiles."""

    num_rows: int  # T
    num_keys: int  # S
    num_heads: int  # H
    num_groups: int  # G, heads of keys and values
    head_dim: int  # K
    width: int  # W
    pad: int  # columns that a convolution reads to its left
    num_channels: int  # C; 0 if nothing is convolved
    row_stride: int  # columns between neighbouring rows
    window: int | None  # columns that a row sees, or None for all
    block_rows: int
    phases: int  # p
    backward: bool  # the backward pass has a wider halo
    dtype: jnp.dtype  # dtype of the convolutions' operands
    vmem_limit_bytes: int
    interpret: Any  # see `kernels.attend_fused`

    @property
    def ahead(self) -> int:
        """Return the number of columns that a convolution reads to its right."""
        return self.width - 1 - self.pad

    @property
    def is_single(self) -> bool:
        """Return whether one tile has all keys. It has no halo: zeros are left and right of it."""
        return self.num_keys <= self.phases * LANES

    @property
    def tile_columns(self) -> int:
        """Return the number of columns of a tile."""
        return self.phases * LANES

    @property
    def halo(self) -> tuple[int, int]:
        """Return the number of columns of a tile to the left and right of those it owns.

        Two convolutions read 2 pad columns to the left and 2 ahead to the right. Their transposes read the same number
        in the opposite direction. All phases of a lane are owned, or none.
        """
        if self.is_single:
            return 0, 0
        left, right = 2 * self.pad, 2 * self.ahead
        if self.backward:
            left = right = left + right
        return round_up(left, self.phases), right

    @property
    def owned_columns(self) -> int:
        """Return the number of columns a tile owns, a multiple of p: the distance between neighbouring tiles."""
        return (self.tile_columns - sum(self.halo)) // self.phases * self.phases

    @property
    def is_aligned(self) -> bool:
        """Return whether tiles have no halo: a tile is a piece of the keys, not parts of two."""
        return self.owned_columns == self.tile_columns

    @property
    def pieces_per_tile(self) -> int:
        """Return the number of pieces of keys that a tile reads."""
        return 1 if self.is_aligned else 2

    @property
    def num_pieces(self) -> int:
        """Return the number of pieces of keys and values, each of as many columns as a tile."""
        return pl.cdiv(self.num_keys, self.tile_columns)

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles.

        In the backward pass they cover hidden features, `ahead` columns beyond S, and the last tile owns no column left
        of the last piece, since it writes the gradient of that piece.
        """
        if self.is_aligned:
            return self.num_pieces
        of_columns = pl.cdiv(self.num_keys + self.ahead * self.backward, self.owned_columns)
        in_last_piece = pl.cdiv((self.num_pieces - 1) * self.tile_columns, self.owned_columns) + 1
        return max(of_columns, in_last_piece * self.backward)

    @property
    def num_right(self) -> int:
        """Return the number of hidden columns to the right of a single tile that its last results read."""
        return max(self.num_keys + self.ahead - self.phases * LANES, 0) if self.is_single else 0

    @property
    def right_rows(self) -> range:
        """Return the rows whose results read these columns: the last `ahead` rows."""
        return range(max(self.num_rows - self.ahead, 0), self.num_rows if self.num_right else 0)

    @property
    def right_units(self) -> range:
        """Return the units of these rows."""
        return range(self.right_rows.start // UNIT_ROWS, pl.cdiv(self.right_rows.stop, UNIT_ROWS))

    @property
    def right_phases(self) -> range:
        """Return the phases of these results: of the last `ahead` columns."""
        return range(max(self.phases - self.ahead, 0), self.phases)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of rows."""
        return pl.cdiv(self.num_rows, self.block_rows)

    @property
    def padded_rows(self) -> int:
        """Return the number of rows of all blocks."""
        return self.num_blocks * self.block_rows

    @property
    def heads_per_line(self) -> int:
        """Return m, the number of heads of a block whose rows are side by side in lanes."""
        return LANES // self.block_rows

    @property
    def column_shape(self) -> tuple[int, int, int]:
        """Return the shape of a block with lanes for rows; see `head_columns`."""
        return pl.cdiv(self.num_heads, self.heads_per_line), self.head_dim, LANES

    @property
    def all_columns_shape(self) -> tuple[int, int, int]:
        """Return the shape of all these blocks side by side, of one sequence."""
        lines, dim, lanes = self.column_shape
        return lines, dim, self.num_blocks * lanes

    def head_columns(self, head: int) -> tuple[Any, ...]:
        """Return the index of a head in a block with lanes for rows."""
        lanes = pl.ds(head % self.heads_per_line * self.block_rows, self.block_rows)
        return head // self.heads_per_line, slice(None), lanes

    @property
    def octets(self) -> int:
        """Return the number of registers of 8 heads per row."""
        return self.num_heads // 8 + (self.num_heads % 8 > 4)

    @property
    def quads(self) -> int:
        """Return the number of registers of 4 heads that two rows share: 0 or 1."""
        return int(0 < self.num_heads % 8 <= 4)

    @property
    def head_lines(self) -> int:
        """Return the number of lines of one row's heads, with a quad's lines twice: for the upper and lower row."""
        return SUBLANES * (self.octets + self.quads)

    @property
    def padded_channels(self) -> int:
        """Return C padded to whole registers of 16-bit numbers."""
        return round_up(self.num_channels, 16)

    @property
    def table_lines(self) -> int:
        """Return the number of lines of the distance tables."""
        return self.padded_channels + self.head_lines

    @property
    def phases_per_dot(self) -> int:
        """Return n, the number of phases that a matmul of a convolution computes."""
        return min(2, self.phases)

    @property
    def window_phases(self) -> int:
        """Return the number of phases that a matmul of a convolution reads."""
        return self.phases_per_dot + self.width - 1

    @property
    def slots(self) -> int:
        """Return the number of rolled copies of table entries for the rows of a block and of one more group."""
        rows = self.block_rows + GROUP_ROWS
        return self.phases + rows if self.row_stride == 1 else self.phases * rows

    @property
    def left_buffers(self) -> int:
        """Return the number of groups whose rolled corrections of the first columns are kept; three are in use."""
        return self.block_rows // GROUP_ROWS if self.is_single and not self.backward else 4

    @property
    def slab_columns(self) -> int:
        """Return the number of table columns that the rows of a block need for one tile."""
        reach = (self.row_stride * (self.block_rows - 1) + self.phases - 1) // self.phases + 1
        return round_up(reach, LANES) + 2 * LANES

    @property
    def table_origin(self) -> int:
        """Return the table column of distances 0 .. p - 1.

        Larger distances are to its left. A block of padded rows may read beyond the entries of visible columns.
        """
        largest = self.num_keys + self.row_stride * (self.block_rows + GROUP_ROWS) + sum(self.halo)
        return round_up(pl.cdiv(largest, self.phases) + LANES, LANES)

    @property
    def table_columns(self) -> int:
        """Return the number of columns of the tables."""
        smallest = self.row_stride * (self.block_rows + GROUP_ROWS) + sum(self.halo) + self.phases * LANES
        return self.table_origin + round_up(pl.cdiv(smallest, self.phases), LANES) + self.slab_columns

    @property
    def steps(self) -> "Step":
        """Return the grid steps of one sequence that compute something, as arrays, if the first row is column 0."""
        begin, end = self.tile_range(np.arange(self.num_blocks), 0, np)
        size = end + 1 - begin
        block = np.repeat(np.arange(self.num_blocks), size)
        tile = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size - begin, size)
        return self.step(block, tile, 0)

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

    def pieces_of(self, tile: Any) -> list[Any]:
        """Return the pieces with a tile's columns. At the edges some columns, and their piece, may not exist."""
        piece = (tile * self.owned_columns - self.halo[0]) // self.tile_columns
        return [jnp.clip(piece + i, 0, self.num_pieces - 1) for i in range(self.pieces_per_tile)]

    def gradient_piece_of(self, tile: Any) -> Any:
        """Return the piece with the first column that a tile owns."""
        return jnp.minimum(tile * self.owned_columns // self.tile_columns, self.num_pieces - 1)


@dataclasses.dataclass(frozen=True)
class Step:
    """Positions of the block of rows and the tile of columns of one grid step."""

    t: Tiling
    query_column: Any  # column of the block's first row
    key_column: Any  # first column of the tile; negative in the left halo of tile 0

    def table_position(self, row: Any, phase: int) -> tuple[Any, Any]:
        """Return the remainder and the column of the tables for a row and the tile's first column of a phase."""
        t = self.t
        distance = self.query_column + t.row_stride * row - self.key_column - phase
        return distance & (t.phases - 1), t.table_origin - (distance >> (t.phases.bit_length() - 1))

    def groups(self, xp: Any = jnp) -> tuple[Any, Any]:
        """Return the range of groups of rows that use a column owned by the tile: the first, and one after the last."""
        t = self.t
        owned = self.key_column + t.halo[0] - self.query_column
        begin, end = owned - t.ahead * t.backward, t.row_stride * t.block_rows
        if t.window is not None:
            end = owned + t.owned_columns + t.window - 1 + t.pad * t.backward
        begin, end = (-(-x // t.row_stride) for x in (begin, end))  # rows
        last = t.block_rows // GROUP_ROWS - 1
        begin, end = xp.clip(begin // GROUP_ROWS, 0, last), xp.clip((end - 1) // GROUP_ROWS, 0, last)
        return begin, xp.maximum(begin, end) + 1

    @property
    def slab_start(self) -> Any:
        """Return the table column at which the slab starts, a multiple of 128."""
        return self.table_position(self.t.block_rows - 1, 0)[1] // LANES * LANES

    @property
    def first_lane(self) -> Any:
        """Return the lane of the tile's first column."""
        return 0 if self.t.is_aligned else self.key_column // self.t.phases & (LANES - 1)

    def column(self, phase: int, num_rows: int = SUBLANES) -> Array:
        """Return the column of each lane, less the tile's first column: [num_rows, 128]."""
        return self.t.phases * (iota((num_rows, LANES), 1) - self.first_lane & (LANES - 1)) + phase

    def visible(self, phase: int) -> Array:
        """Return whether a row uses the tile and sees a column: [block_rows, 128]."""
        t, (begin, end) = self.t, self.groups()
        row = iota((t.block_rows, LANES), 0)
        column = self.key_column + self.column(phase, t.block_rows)
        distance = self.query_column + t.row_stride * row - column
        visible = (distance >= 0) & (column >= 0) & (row >= GROUP_ROWS * begin) & (row < GROUP_ROWS * end)
        return visible if t.window is None else visible & (distance < t.window)

    def owned(self) -> Array:
        """Return whether the tile owns the columns of a lane: [8, 128]."""
        column = self.column(0)
        return (column >= self.t.halo[0]) & (column < self.t.halo[0] + self.t.owned_columns)


def tilings(
    q_BTHK: jax.ShapeDtypeStruct | Array,
    k_BSGK: jax.ShapeDtypeStruct | Array,
    sizes: tuple[int, int, int],
    *,
    dtype: jnp.dtype,
    row_stride: int = 1,
    window: int | None = None,
    interpret: Any = False,
    device_kind: str | None = None,
) -> tuple[Tiling, Tiling]:
    """Choose the tilings of the forward and of the backward pass, for a device kind or the current device.

    `sizes` are W, P and C; see `tables.convolution_sizes`.

    Raises:
        NotImplementedError: the size of the device's VMEM is unknown, no block of rows fits into it, or K is odd in 16
            bits, of which a register has pairs.
    """
    num_rows, num_heads, head_dim = q_BTHK.shape[1:]
    if head_dim % 2 and q_BTHK.dtype.itemsize == 2:
        raise NotImplementedError(f"a head has {head_dim} dims, and must have an even number in {q_BTHK.dtype}")
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
        **dict(zip(("width", "pad", "num_channels"), sizes, strict=True)),
        row_stride=row_stride,
        window=window,
        dtype=jnp.dtype(dtype),
        vmem_limit_bytes=limit,
        interpret=interpret,
    )

    def up_to(needed: int, sizes: tuple[int, ...]) -> list[int]:
        """Return the sizes up to the smallest that is at least `needed`, or all."""
        return [size for size in sizes if size <= min((x for x in sizes if x >= needed), default=size)]

    def choose(*, backward: bool) -> Tiling:
        candidates = [
            make(block_rows=rows, phases=phases, backward=backward)
            for phases in up_to(pl.cdiv(num_keys, LANES), PHASES)
            for rows in up_to(num_rows, BLOCKS)
        ]
        if backward:  # more rows save more than more phases, unless there is only one phase
            candidates.sort(key=lambda t: (t.phases > 1, t.block_rows, t.phases), reverse=True)
        needed = [vmem_bytes(t, q_BTHK.dtype.itemsize) for t in candidates]
        fitting = [t for t, size in zip(candidates, needed, strict=True) if size <= (1 - COMPILER_SHARE) * limit]
        if not fitting:
            raise NotImplementedError(
                f"a block of {BLOCKS[-1]} rows needs {needed[-1] / MIB:.0f} MiB of VMEM; {device_kind} has "
                f"{limit / MIB:.0f} MiB, of which the compiler needs {COMPILER_SHARE:.0%}"
            )
        return fitting[0]

    return choose(backward=False), choose(backward=True)


def cost(t: Tiling, batch: int, itemsize: int) -> pl.CostEstimate:
    """Return FLOPs and HBM traffic of a call. The compiled program shows neither, so benchmarks read this estimate.

    FLOPs count the products of all steps that are computed, and the convolutions of all groups of rows that use their
    tile, with halos and masked columns, but without padded heads and channels. Bytes count the blocks that the pipeline
    copies between HBM and VMEM, rows of K numbers padded to 128 lanes.
    """
    begin, end = t.steps.groups(np)
    steps, groups = batch * len(begin), batch * int((end - begin).sum())
    pairs, convolved = (rows * t.phases * LANES * t.num_heads for rows in (steps * t.block_rows, groups * GROUP_ROWS))
    products, convolutions = (5, 6) if t.backward else (2, 2)
    flops = 2 * (pairs * products * t.head_dim + convolved * convolutions * t.width * t.num_channels)
    rows = t.num_heads * t.block_rows * round_up(t.head_dim, LANES)
    columns = int(np.prod(t.column_shape))
    tile = t.num_groups * t.phases * LANES * t.head_dim * itemsize
    slab = t.phases * t.table_lines * t.slab_columns * 4
    if t.backward:
        # A step reads q and dout twice and the slab, and reads and writes dq (float32) and the slab's gradient.
        step_bytes = (2 * rows + 2 * columns) * itemsize + 2 * columns * 4 + 3 * slab
        num_bytes = steps * step_bytes + batch * t.num_tiles * 2 * (t.pieces_per_tile + 1) * tile
    else:
        num_slabs = math.gcd(batch, 2) * t.num_blocks if t.is_single else steps
        num_bytes = (
            batch * t.num_blocks * (rows + columns) * itemsize + steps * 2 * t.pieces_per_tile * tile + num_slabs * slab
        )
    return pl.CostEstimate(flops=flops, transcendentals=convolved, bytes_accessed=num_bytes)


def vmem_bytes(t: Tiling, itemsize: int) -> int:
    """Return the VMEM that scratch and blocks need, without the compiler's temporary values.

    Blocks that the pipeline copies are double-buffered.
    """
    heads = t.block_rows * (8 * t.octets + 4 * t.quads) * LANES * 4  # bytes of one phase
    rows = t.num_heads * t.block_rows * round_up(t.head_dim, LANES)
    columns = t.column_shape[0] * round_up(t.head_dim, SUBLANES) * LANES
    tile = t.num_groups * t.phases * LANES * round_up(t.head_dim, SUBLANES)
    slab = t.phases * t.table_lines * t.slab_columns * 4
    sheared = t.slots * t.table_lines * LANES * 4
    hidden = 2 * GROUP_ROWS * t.padded_channels * LANES * t.dtype.itemsize  # one phase, two groups
    left = t.pad * (t.padded_channels + 2 * t.head_lines) * LANES * 4
    rolled_left = t.left_buffers * GROUP_ROWS * left
    if t.backward:
        blocks = 2 * ((2 * rows + 2 * columns + 2 * (t.pieces_per_tile + 1) * tile) * itemsize + slab + 2 * left)
        scratch = 3 * t.phases * heads + 4 * columns + 2 * 4 * tile + 2 * slab + 2 * sheared + 2 * t.phases * hidden
    else:
        blocks = 2 * ((rows + columns + 2 * t.pieces_per_tile * tile) * itemsize + slab + left)
        scratch = (t.phases + 3) * heads + 4 * columns + slab + sheared + (t.phases + t.width - 1) * hidden
    return blocks + scratch + rolled_left


# ---- Layouts in HBM


def to_blocks(t: Tiling, x_BTHK: Array) -> Array:
    """Transpose rows to heads first and pad them to whole blocks: [B, T, H, K] -> [B, H, padded rows, K]."""
    x_BHTK = jnp.moveaxis(x_BTHK, 1, 2)
    return jnp.pad(x_BHTK, ((0, 0), (0, 0), (0, t.padded_rows - t.num_rows), (0, 0)))


def to_columns(t: Tiling, x_BTHK: Array) -> Array:
    """Move rows to lanes, m heads side by side: [B, T, H, K] -> [B, H / m, K, blocks * 128]."""
    batch, _, heads, dim = x_BTHK.shape
    x = jnp.pad(to_blocks(t, x_BTHK), ((0, 0), (0, -heads % t.heads_per_line), (0, 0), (0, 0))).swapaxes(2, 3)
    x = x.reshape(batch, -1, t.heads_per_line, dim, t.num_blocks, t.block_rows).transpose(0, 1, 3, 4, 2, 5)
    return x.reshape(batch, *t.all_columns_shape)


def from_columns(t: Tiling, x: Array) -> Array:
    """Invert `to_columns`: [B, H / m, K, blocks * 128] -> [B, T, H, K]."""
    batch, lines, dim, _ = x.shape
    x = x.reshape(batch, lines, dim, t.num_blocks, t.heads_per_line, t.block_rows).transpose(0, 1, 4, 2, 3, 5)
    return jnp.moveaxis(x.reshape(batch, -1, dim, t.padded_rows)[:, : t.num_heads, :, : t.num_rows], 3, 1)


def to_pieces(t: Tiling, x_BSGK: Array) -> Array:
    """Split keys into pieces of as many columns as a tile: [B, S, G, K] -> [B, pieces, G, p, K, 128]."""
    batch, _, groups, dim = x_BSGK.shape
    x = jnp.pad(x_BSGK, ((0, 0), (0, t.num_pieces * t.tile_columns - t.num_keys), (0, 0), (0, 0)))
    return x.reshape(batch, t.num_pieces, LANES, t.phases, groups, dim).transpose(0, 1, 4, 3, 5, 2)


def add_at(x: Array, update: Array, *start: int) -> Array:
    """Add an update to a slice of an array, in place if the array is not used again."""
    stop = [begin + size for begin, size in zip(start, update.shape, strict=True)]
    return jax.lax.dynamic_update_slice(x, jax.lax.slice(x, start, stop) + update.astype(x.dtype), start)


def add_to_columns(t: Tiling, x: Array, rows: range, x_BHRK: Array) -> Array:
    """Add some rows to the result of a kernel as `to_columns`."""
    m = t.heads_per_line
    x_BHRK = jnp.pad(x_BHRK, ((0, 0), (0, -t.num_heads % m), (0, 0), (0, 0)))
    for i, row in enumerate(rows):
        for of_line in range(m):
            update = x_BHRK[:, of_line::m, i, :, None]
            lane = of_line * t.block_rows + row % t.block_rows
            x = add_at(x, update, 0, 0, 0, row // t.block_rows * LANES + lane)
    return x


def from_pieces(t: Tiling, x: Array) -> Array:
    """Invert `to_pieces`: [B, pieces, G, p, K, 128] -> [B, S, G, K]."""
    batch, _, groups, _, dim, _ = x.shape
    return x.transpose(0, 1, 5, 3, 2, 4).reshape(batch, -1, groups, dim)[:, : t.num_keys]


def by_register(t: Tiling, x_HX: Array) -> Array:
    """Arrange heads as the lines of a row: [H, ...] -> [head lines, ...], with a quad's lines twice."""
    padded = SUBLANES * t.octets + 4 * t.quads
    x = jnp.pad(x_HX, ((0, padded - t.num_heads), *((0, 0),) * (x_HX.ndim - 1)))
    quad = x[SUBLANES * t.octets :]
    return jnp.concatenate([x, quad]) if t.quads else x


def to_table(t: Tiling, knee_CN: Array, added_HN: Array) -> Array:
    """Stack both tables for each remainder of the distance: [p, table lines, columns]; see `Step.table_position`."""

    def by_remainder(x_XN: Array, smallest: int, fill: float) -> Array:
        """Arrange entries of consecutive distances, the first of which is `smallest`: [p, X, columns]."""
        num_distances = x_XN.shape[1]
        before = t.phases * (t.table_origin + 1) - smallest - num_distances
        after = t.phases * t.table_columns - before - num_distances
        x = jnp.pad(x_XN[:, ::-1], ((0, 0), (before, after)), constant_values=fill)
        return x.reshape(-1, t.table_columns, t.phases)[..., ::-1].transpose(2, 0, 1)

    knee = jnp.pad(knee_CN, ((0, t.padded_channels - t.num_channels), (0, 0)))
    visible = added_HN[:, t.ahead :][:, : t.window or t.num_keys]
    parts = by_remainder(knee, -t.ahead, 0.0), by_remainder(by_register(t, visible), 0, MASKED_SCORE)
    return jnp.concatenate(parts, 1)


def to_units(t: Tiling, x_BRAH: Array) -> Array:
    """Arrange results of the last rows and columns as registers of units, with zeros elsewhere.

    [B, last rows, last columns, H] -> [B, units, phases, registers, 8, 128]; see `Tiling.right_units`.
    """
    batch, rows, columns, _ = x_BRAH.shape
    units, octets, quads = t.right_units, t.octets, t.quads
    before = t.num_rows - rows - UNIT_ROWS * units.start
    after = UNIT_ROWS * len(units) - before - rows
    missing_heads = SUBLANES * octets + 4 * quads - t.num_heads
    x = jnp.pad(x_BRAH, ((0, 0), (before, after), (0, 0), (0, missing_heads)))
    x = x.reshape(batch, len(units), UNIT_ROWS, columns, -1).swapaxes(2, 3)
    of_octets = x[..., : SUBLANES * octets].reshape(*x.shape[:4], octets, SUBLANES).swapaxes(3, 4)
    parts = [of_octets.reshape(*x.shape[:3], UNIT_ROWS * octets, SUBLANES)]
    if quads:
        parts.append(x[..., SUBLANES * octets :].reshape(*x.shape[:3], 1, SUBLANES))
    x = jnp.concatenate(parts, 3)  # [B, units, columns, registers, 8]
    column = t.phases * np.arange(LANES) + np.array(t.right_phases)[:, None] - (t.phases * LANES - columns)
    of_columns = [jnp.where((column == i)[:, None, None], x[:, :, None, i, ..., None], 0.0) for i in range(columns)]
    return functools.reduce(jnp.add, of_columns)


def to_left_blocks(t: Tiling, left_PXT: Array) -> Array:
    """Split a correction of the first columns into blocks: [P, X, T] -> [blocks, P, X, 128], one lane per row."""
    P, X, T = left_PXT.shape
    left_PXT = jnp.pad(left_PXT, ((0, 0), (0, 0), (0, t.padded_rows - T)))
    blocks = jnp.moveaxis(left_PXT.reshape(P, X, t.num_blocks, t.block_rows), 2, 0)
    return jnp.pad(blocks, ((0, 0), (0, 0), (0, 0), (0, LANES - t.block_rows)))


class Line(NamedTuple):
    """Content of the lines of a matmul's operand, one array of numbers per field."""

    row: np.ndarray  # row of the unit
    phase: np.ndarray  # phase of the window that is read, or of the phases that are computed
    number: np.ndarray  # head or channel; -1 for a padding line


def packed_order(t: Tiling, num_registers: int) -> np.ndarray:
    """Return the lines of registers in the order in which `forward.pack` joins them: 16-bit numbers in pairs."""
    lines = np.arange(round_up(num_registers, 2) * SUBLANES).reshape(-1, 2, SUBLANES)
    return (lines if t.dtype == jnp.float32 else lines.swapaxes(1, 2)).reshape(-1)


def score_lines(t: Tiling, num_phases: int) -> Line:
    """Return the lines of a unit's scores in a number of phases, packed."""
    sizes = [SUBLANES] * t.octets + [4] * t.quads
    found = [(r, SUBLANES * i + j) for i, size in enumerate(sizes) for r in range(UNIT_ROWS) for j in range(size)]
    rows, heads = np.array(found).T
    heads = np.where(heads < t.num_heads, heads, -1)
    order = packed_order(t, num_phases * len(heads) // SUBLANES)
    fill = len(order) - num_phases * len(heads)
    phases = np.repeat(np.arange(num_phases), len(heads))
    parts = (np.tile(rows, num_phases), phases, np.tile(heads, num_phases))
    return Line(*(np.pad(part, (0, fill), constant_values=-1)[order] for part in parts))


def output_lines(t: Tiling, row: int) -> Line:
    """Return the lines that a convolution to heads computes for a row of a unit: n phases, not packed."""
    lines = np.arange(t.head_lines)
    head = np.where(lines < SUBLANES * t.octets, lines, SUBLANES * t.octets + lines % 4)
    of_row = (lines < SUBLANES * t.octets) | (lines % SUBLANES // 4 == row)
    head = np.where(of_row & (head < t.num_heads), head, -1)
    n = t.phases_per_dot
    return Line(np.zeros(n * len(lines), int), np.repeat(np.arange(n), len(lines)), np.tile(head, n))


def hidden_lines(t: Tiling, num_rows: int, num_phases: int, *, packed: bool) -> Line:
    """Return the lines of hidden features of some rows and phases."""
    channel = np.arange(t.padded_channels)
    if packed:
        channel = channel[packed_order(t, t.padded_channels // SUBLANES)]
    channel = np.where(channel < t.num_channels, channel, -1)
    row, phase, index = np.meshgrid(np.arange(num_rows), np.arange(num_phases), channel, indexing="ij")
    return Line(row.reshape(-1), phase.reshape(-1), index.reshape(-1))


def to_matrix(kernel_WIO: Array, outputs: Line, inputs: Line) -> Array:
    """Return a convolution as a matrix [outputs, inputs], with tap w where an input is w phases after an output."""
    tap = inputs.phase - outputs.phase[:, None]
    is_tap = (tap >= 0) & (tap < kernel_WIO.shape[0]) & (inputs.row == outputs.row[:, None])
    is_tap &= (inputs.number >= 0) & (outputs.number[:, None] >= 0)
    taps = kernel_WIO[np.where(is_tap, tap, 0), np.maximum(inputs.number, 0), np.maximum(outputs.number, 0)[:, None]]
    return jnp.where(is_tap, taps, 0.0)


# ---- Block specs and call


class Blocked(NamedTuple):
    """Array of a kernel call, or shape and dtype of a result, with its block spec.

    The arguments of index maps are the grid indices (sequence, outer, inner) and the ref of the column of row 0.
    """

    array: Any
    spec: pl.BlockSpec


def by_rows(t: Tiling, array: Any) -> Blocked:
    """Make block specs for an array from `to_blocks`."""
    block = 1, t.num_heads, t.block_rows, t.head_dim
    return Blocked(array, pl.BlockSpec(block, lambda b, *step: (b, 0, t.block_of(*step), 0)))


def by_columns(t: Tiling, array: Any) -> Blocked:
    """Make block specs for an array from `to_columns`."""
    return Blocked(array, pl.BlockSpec((1, *t.column_shape), lambda b, *step: (b, 0, 0, t.block_of(*step))))


def by_pieces(t: Tiling, array: Any, piece_of: Callable[[Any], Any]) -> Blocked:
    """Make block specs for an array from `to_pieces`, given the piece of a tile."""
    block = 1, 1, t.num_groups, t.phases, t.head_dim, LANES
    return Blocked(array, pl.BlockSpec(block, lambda b, *step: (b, piece_of(t.tile_of(*step)), 0, 0, 0, 0)))


def by_tiles(t: Tiling, array: Any) -> list[Blocked]:
    """Make block specs for the pieces of a tile; see `Tiling.pieces_of`."""
    return [by_pieces(t, array, lambda tile, i=i: t.pieces_of(tile)[i]) for i in range(t.pieces_per_tile)]


def by_lanes(t: Tiling, array: Any) -> Blocked:
    """Make block specs for a log-sum-exp, [B, blocks, lines of a block / 128, 128]."""
    return Blocked(array, pl.BlockSpec((1, 1, *array.shape[2:]), lambda b, *step: (b, t.block_of(*step), 0, 0)))


def by_sequence(array: Any) -> Blocked:
    """Make block specs for an array with a block for each sequence, [B, ...]."""
    block = 1, *array.shape[1:]
    return Blocked(array, pl.BlockSpec(block, lambda b, *_: (b, *(0,) * (len(block) - 1))))


def whole(t: Tiling, array: Any) -> Blocked:
    """Copy an array to VMEM once and keep it there."""
    once = {} if t.interpret else {"pipeline_mode": pl.Buffered(1)}
    return Blocked(array, pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim, **once))


def in_hbm(array: Any) -> Blocked:
    """Leave an array in HBM: the kernel copies parts of it to VMEM itself."""
    return Blocked(array, pl.BlockSpec(memory_space=pl.ANY))


def slab_of(t: Tiling, table: Array) -> list[Blocked]:
    """Make block specs of a step's slab of the tables, in pieces of 128 columns side by side."""
    num_parts = t.slab_columns // LANES

    def part(i: int) -> Blocked:
        def index(_, *step):
            begin = t.step(t.block_of(*step), t.tile_of(*step), step[-1][0]).slab_start // LANES
            # A skipped step may be outside the table; its index must not be.
            return 0, 0, jnp.clip(begin, 0, t.table_columns // LANES - num_parts) + i

        return Blocked(table, pl.BlockSpec((t.phases, t.table_lines, LANES), index))

    return [part(i) for i in range(num_parts)]


def scratch_of(*shape: int) -> Any:
    """Return float32 scratch in VMEM."""
    return pltpu.VMEM(shape, jnp.float32)


def _by_block_and_sequence(sequences: int, spec: pl.BlockSpec) -> pl.BlockSpec:
    """Convert the index map of a block spec from the grid (sequence, block, tile) to (part, block, sequence)."""
    index = spec.index_map
    if index is None:
        return spec
    return dataclasses.replace(spec, index_map=lambda part, block, b, ref: index(part * sequences + b, block, 0, ref))


def call(
    t: Tiling, kernel: Callable[..., None], *, first: Array, inputs: Any, outputs: Any, scratch: Any, **options: Any
) -> Any:
    """Run `kernel(first_ref, inputs, outputs, scratch, t=t)` over the grid; return the outputs.

    `inputs` and `outputs` are trees of `Blocked`, `scratch` is a tree of VMEM buffers; the kernel receives trees of
    refs. Index maps depend on `first`, the column of row 0, which is prefetched to SMEM. `options` are passed to
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
    semantics: Any = ("parallel", "arbitrary" if t.backward else "parallel", "arbitrary")
    batch = arrays.q.shape[0]
    grid = (batch, t.num_tiles, t.num_blocks) if t.backward else (batch, t.num_blocks, t.num_tiles)
    if t.is_single and not t.backward:  # the sequences of a block share its tables; each core takes half of them
        halves = math.gcd(batch, 2)
        grid, semantics = (halves, t.num_blocks, batch // halves), ("parallel", "arbitrary", "arbitrary")
        in_specs, out_specs = jax.tree.map(
            functools.partial(_by_block_and_sequence, batch // halves),
            (in_specs, out_specs),
            is_leaf=lambda x: isinstance(x, pl.BlockSpec),
        )
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
