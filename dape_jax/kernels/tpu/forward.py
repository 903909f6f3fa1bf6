"""Forward kernel, and the operations on units of rows that it shares with the backward kernel.

Grid: (sequence, block of rows, tile of keys), tiles innermost. As in FlashAttention, VMEM contains, for each row and
head of the block, a running maximum m, a running sum l of exp(score - m), and a sum of values with the same weights:

    for tile in tiles of the block:
        scores = Q K^T / sqrt(K)                                one matmul per head and phase
        for group of 8 rows in the block:
            total = scores + added - left_added + Conv2(leaky_relu_change(Conv1(scores), knee - left_knee))
            new m, new l, probs = exp(total - m), decay = exp(old m - m)
        values = values * decay + V^T probs^T                   one matmul per head and phase
    out = values / l,  log-sum-exp = m + log(l)

A loop iteration computes the hidden features of one group and the remaining steps of the previous group: they are
independent, so their matmuls overlap.

The log-sum-exp is saved for the backward pass. Scores, hidden features and probabilities never leave VMEM.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from dape_jax.kernels.tables import Operator
from dape_jax.kernels.tpu import tiling
from dape_jax.kernels.tpu.tiling import GROUP_ROWS, LANES, MASKED_SCORE, SUBLANES, UNIT_ROWS, Step, Tiling, iota
from dape_jax.model.processors import SLOPE, leaky_relu_change
from dape_jax.sharding import full_precision

Registers = list[Array]  # each [8, 128]
Unit = list[Registers]  # for each phase the registers of two rows
UNITS = range(0, GROUP_ROWS, UNIT_ROWS)  # the first row of each unit of a group

# ---- Registers


def clear(*refs: Any) -> None:
    """Fill float32 refs with zeros."""
    for ref in refs:
        ref[...] = jnp.zeros(ref.shape, jnp.float32)


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Return the matmul over one dim of each operand, accumulated in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    precision = full_precision(a.dtype)
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def join(parts: Sequence[Array], axis: int) -> Array:
    """Concatenate arrays; a single one is returned without a copy."""
    return jnp.concatenate(list(parts), axis) if len(parts) > 1 else parts[0]


def dots(matrix: Array, operands: Sequence[Array]) -> list[Array]:
    """Return the products of a matrix and several operands, computed side by side for matrix units wider than 128."""
    products = dot(matrix, join(operands, 1), (1, 0))
    return [products[:, i * LANES : (i + 1) * LANES] for i in range(len(operands))]


def roll(x: Array, by: Any) -> Array:
    """Roll along the lanes: out[.., lane] = x[.., lane - by], modulo their number."""
    if isinstance(by, int):
        return pltpu.roll(x, by % LANES, 1) if by % LANES else x
    return pltpu.roll(x, by & (LANES - 1), 1)


def shift(t: Tiling, x: Array, by: int) -> Array:
    """Roll a phase for a tap beyond the first or last phase; in a single tile there are zeros beyond its columns."""
    rolled, lane = roll(x, by), iota((SUBLANES, LANES), 1)
    return select((lane >= by) & (lane < LANES + by), rolled) if t.is_single else rolled


def select(mask: Array, x: Array, other: Any = 0.0) -> Array:
    """Return `x` where the mask is True, else `other`. The mask is one register, [8, 128], repeated over sublanes."""
    other = jnp.asarray(other, x.dtype)
    return jnp.where(mask[None], x.reshape(-1, SUBLANES, LANES), other).reshape(x.shape)


def registers_of(x: Array) -> Registers:
    """Split [8 n, 128] into registers."""
    return [x[i : i + SUBLANES] for i in range(0, x.shape[0], SUBLANES)]


def pack(t: Tiling, registers: Registers) -> Array:
    """Join registers into one array for a matmul; see `tiling.packed_order` for the order of its lines."""
    if len(registers) % 2:
        registers = [*registers, jnp.zeros_like(registers[0])]
    return join([_pair(t, a, b) for a, b in zip(registers[::2], registers[1::2], strict=True)], 0)


def _pair(t: Tiling, a: Array, b: Array) -> Array:
    if t.dtype == jnp.float32:
        return jnp.concatenate([a, b])
    if t.interpret:  # the interpreter has no rule for `pack_elementwise`
        low, high = (jax.lax.bitcast_convert_type(x.astype(t.dtype), jnp.uint16).astype(jnp.uint32) for x in (a, b))
        return low | (high << 16)
    return pltpu.pack_elementwise([a, b], packed_dtype=t.dtype)


def operand(t: Tiling, packed: Sequence[Array]) -> Array:
    """Return packed arrays as the operand of a matmul, with lines in the order of `tiling.packed_order`."""
    joined = join(packed, 0)
    return joined if t.dtype == jnp.float32 else pltpu.bitcast(joined, t.dtype)


def packed_scratch(t: Tiling, *shape: int) -> Any:
    """Return VMEM for packed hidden features, [*shape, C, 128], or None if nothing is convolved."""
    if not t.num_channels:
        return None
    if t.dtype == jnp.float32:
        return pltpu.VMEM((*shape, t.padded_channels, LANES), jnp.float32)
    return pltpu.VMEM((*shape, t.padded_channels // 2, LANES), jnp.uint32)


# ---- Arrays with one number per row, head and lane of a block


class Heads(NamedTuple):
    """Refs with the numbers of all rows and heads of a block; None if there are no octets, or no quad.

    octets: [octets, 8 block_rows, 128], quads: [4 block_rows, 128]; optionally with a leading dim of phases.
    """

    octets: Any
    quads: Any


def heads_of(t: Tiling, make: Callable[..., Any], *lead: int) -> Heads:
    """Return `make(shape)` for octets and quads."""
    octets = make((*lead, t.octets, SUBLANES * t.block_rows, LANES)) if t.octets else None
    return Heads(octets, make((*lead, 4 * t.block_rows, LANES)) if t.quads else None)


def heads_scratch(t: Tiling, *lead: int) -> Heads:
    """Return float32 VMEM for the numbers of all rows and heads of a block."""
    return heads_of(t, lambda shape: pltpu.VMEM(shape, jnp.float32), *lead)


def head_rows(t: Tiling, heads: Heads, head: int, *phase: int) -> tuple[Any, Any]:
    """Return the ref and the index of one head's numbers, [block_rows, 128]."""
    if head < SUBLANES * t.octets:
        lines = pl.ds(head % SUBLANES, t.block_rows, stride=SUBLANES)
        return heads.octets.at[(*phase, head // SUBLANES)], (lines, slice(None))
    lines = pl.ds(head - SUBLANES * t.octets, t.block_rows, stride=4)
    return (heads.quads.at[phase] if phase else heads.quads), (lines, slice(None))


def _unit_at(t: Tiling, heads: Heads, row: Any, *phase: int) -> list[tuple[Any, Any]]:
    found = []
    for octet in range(t.octets):
        for r in range(UNIT_ROWS):
            lines = pl.ds(pl.multiple_of((row + r) * SUBLANES, SUBLANES), SUBLANES)
            found.append((heads.octets, (*phase, octet, lines, slice(None))))
    if t.quads:
        lines = pl.ds(pl.multiple_of(row * 4, SUBLANES), SUBLANES)
        found.append((heads.quads, (*phase, lines, slice(None))))
    return found


def load(t: Tiling, heads: Heads, row: Any, *phase: int) -> Registers:
    """Return the registers of rows `row` and `row + 1`."""
    return [ref[index] for ref, index in _unit_at(t, heads, row, *phase)]


def store(t: Tiling, heads: Heads, registers: Registers, row: Any, *phase: int) -> None:
    """Store the registers of rows `row` and `row + 1`."""
    for (ref, index), register in zip(_unit_at(t, heads, row, *phase), registers, strict=True):
        ref[index] = register


def load_unit(t: Tiling, heads: Heads, row: Any) -> Unit:
    """Return the registers of rows `row` and `row + 1` in all phases."""
    return [load(t, heads, row, phase) for phase in range(t.phases)]


def by_unit(t: Tiling, lines: Sequence[Array], merge: Callable[[Array, Array], Array]) -> Registers:
    """Make the registers of a unit from the head lines of two rows; `merge` joins their last registers in a quad."""
    upper, lower = (registers_of(x) for x in lines)
    found = [x for octet in range(t.octets) for x in (upper[octet], lower[octet])]
    return [*found, merge(upper[t.octets], lower[t.octets])] if t.quads else found


def is_upper() -> Array:
    """Return whether a line of a quad belongs to the first row of the unit."""
    return iota((SUBLANES, LANES), 0) < 4


# ---- Distance tables


def slot(t: Tiling, row: Any, phase: int) -> Any:
    """Return the slot of the rolled table entries of a row and a phase. Neighbouring rows share them: see `tiling`."""
    return t.phases + row - phase if t.row_stride == 1 else t.phases * row + phase


def new_slots(t: Tiling) -> list[tuple[int, int]]:
    """Return (row, phase) of the slots that a group of rows adds to those of the previous group."""
    return [(row, phase) for row in range(GROUP_ROWS) for phase in range(1 if t.row_stride == 1 else t.phases)]


def first_slots(t: Tiling) -> list[tuple[int, int]]:
    """Return (row, phase) of all slots of the first group."""
    return [(0, phase) for phase in range(1, t.phases) if t.row_stride == 1] + new_slots(t)


def slab_columns(step: Step, row: Any, phase: int) -> tuple[Any, Any, Any]:
    """Return the remainder of the distance, and the column of a row's entry for lane 0 in the slab.

    The column is the sum of a multiple of 128 and of a rest, 0 .. 127.
    """
    remainder, column = step.table_position(row, phase)
    column = jnp.maximum(column - step.slab_start, 0)  # a row beyond the block is not used
    start = column // LANES * LANES
    return remainder, pl.multiple_of(start, LANES), column - start


def shear(step: Step, slab_ref: Any, row: Any, phase: int, lane: Array) -> Array:
    """Return the table entries of a row and a phase: [table lines, 128]."""
    remainder, start, shift = slab_columns(step, row, phase)
    here = slab_ref[remainder, :, pl.ds(start, LANES)]
    after = slab_ref[remainder, :, pl.ds(pl.multiple_of(start + LANES, LANES), LANES)]
    pieces = (x.reshape(-1, SUBLANES, LANES) for x in (here, after))
    return roll(jnp.where((lane >= shift)[None], *pieces).reshape(here.shape), step.first_lane - shift + LANES)


class LeftRefs(NamedTuple):
    """Corrections of the first columns: of a block or, after `roll_left`, of recent groups; None if there are none."""

    knee: Any = None
    added: Any = None


def left_scratch(t: Tiling) -> LeftRefs:
    """Return VMEM for the results of `roll_left`."""
    if not t.pad:
        return LeftRefs()
    sizes = (t.pad, t.padded_channels), (2 * t.pad, t.head_lines)
    return LeftRefs(*(tiling.scratch_of(t.left_buffers, GROUP_ROWS, *size, LANES) for size in sizes))


def _left_buffer(t: Tiling, row: Any) -> Any:
    return row // GROUP_ROWS & (t.left_buffers - 1)


def roll_left(t: Tiling, left: LeftRefs, row: Any, lane: Array) -> LeftRefs:
    """Return the corrections of a group's rows, each in the lane of its column: lists by row, then by column."""

    def of(ref: Any, num_columns: int) -> list[list[Array]]:
        # In `left` a lane is a row.
        found: list[list[Array]] = [[] for _ in range(GROUP_ROWS)]
        for column in range(num_columns):
            at = column // t.phases
            for r in range(GROUP_ROWS):
                found[r].append(select(lane == at, roll(ref[0, column], at - r - row + LANES)))
        return found

    return LeftRefs(of(left.knee, t.pad), of(left.added, 2 * t.pad))


# ---- Convolutions


class Matrices(NamedTuple):
    """Matrices of the two convolutions; None if nothing is convolved."""

    to_hidden: Any = None  # of a unit: [2 n C, lines of a window]
    to_heads: Any = None  # of each row of a unit: [2, n lines, window of C]


def matrices_of(t: Tiling, kernel_WHC: Array, kernel_WCH: Array) -> Matrices:
    """Return the matrices of two convolutions as operands."""
    if not t.num_channels:
        return Matrices()
    hidden_lines = tiling.hidden_lines(t, UNIT_ROWS, t.phases_per_dot, packed=False)
    to_hidden = tiling.to_matrix(kernel_WHC, hidden_lines, tiling.score_lines(t, t.window_phases)).astype(t.dtype)
    window_lines = tiling.hidden_lines(t, 1, t.window_phases, packed=True)
    of_rows = [tiling.to_matrix(kernel_WCH, tiling.output_lines(t, row), window_lines) for row in range(UNIT_ROWS)]
    return Matrices(tiling.whole(t, to_hidden), tiling.whole(t, jnp.stack(of_rows).astype(t.dtype)))


def window(t: Tiling, phases: Unit, rolled: Callable[[int, int], Registers], begin: int) -> Registers:
    """Return the registers of the phases that a matmul reads, starting at `begin`.

    A phase beyond the last is the first phase of the next lane: `rolled(phase, lanes)` returns it.
    """
    found = []
    for at in range(begin, begin + t.window_phases):
        phase, lanes = at % t.phases, at // t.phases
        found += phases[phase] if lanes == 0 else rolled(phase, -lanes)
    return found


def windows(t: Tiling, unit: Unit, before: int) -> list[Array]:
    """Return the operands of a convolution of a unit that reads `before` phases to the left: one for every n phases."""

    @functools.cache
    def rolled(phase: int, by: int) -> Registers:
        return [shift(t, register, by) for register in unit[phase]]

    begins = range(-before, t.phases - before, t.phases_per_dot)
    return [operand(t, [pack(t, window(t, unit, rolled, begin))]) for begin in begins]


def to_hidden(t: Tiling, matrix: Array, operands: Sequence[Array]) -> list[list[Array]]:
    """Convolve scores of a unit: `windows` -> [row][phase] of [C, 128]."""
    n, C = t.phases_per_dot, t.padded_channels
    products = dots(matrix, operands)
    return [
        [products[phase // n][(row * n + phase % n) * C :][:C] for phase in range(t.phases)] for row in range(UNIT_ROWS)
    ]


def beyond(t: Tiling, before: int) -> list[tuple[int, int]]:
    """Return each (phase, lanes) that a convolution reading `before` phases to the left reads from other lanes."""
    after = t.width - 1 - before
    outside = [*range(-before, 0), *range(t.phases, t.phases + after)]
    return list(dict.fromkeys((at % t.phases, -(at // t.phases)) for at in outside))


def with_rolled(t: Tiling, phases: Sequence[Array], before: int) -> list[Array]:
    """Return the phases of a row, then the rolled phases that `to_heads` reads."""
    return [*phases, *(shift(t, phases[phase], by) for phase, by in beyond(t, before))]


def to_heads(t: Tiling, matrices: Any, hidden: Sequence[Sequence[Array]], before: int) -> Unit:
    """Convolve packed hidden features of a unit, `with_rolled` of each row, reading `before` phases to the left."""
    rolled_phases = beyond(t, before)
    n, lines = t.phases_per_dot, t.head_lines
    products = []
    for row in range(UNIT_ROWS):

        def rolled(phase: int, by: int, row: int = row) -> Registers:
            return [hidden[row][t.phases + rolled_phases.index((phase, by))]]

        of_row = [[x] for x in hidden[row]]
        begins = range(-before, t.phases - before, n)
        products.append(dots(matrices[row], [operand(t, window(t, of_row, rolled, begin)) for begin in begins]))
    parts = [
        [products[row][phase // n][phase % n * lines :][:lines] for row in range(UNIT_ROWS)]
        for phase in range(t.phases)
    ]
    return [by_unit(t, part, jnp.add) for part in parts]  # lines that belong to the other row's half of the quad are 0


def pairs_of(num_heads: int) -> list[list[int]]:
    """Return the heads in pairs: matmuls of one head overlap those of the other."""
    return [[*range(head, min(head + 2, num_heads))] for head in range(0, num_heads, 2)]


def row_of(group: Any) -> Any:
    """Return the first row of a group."""
    return pl.multiple_of(group * GROUP_ROWS, GROUP_ROWS)


def loop_over_groups(t: Tiling, tile: Any, needed: Any, loop: Callable[[bool], None]) -> None:
    """Call `loop(in_first_tile)` if the step is needed. Only the first tile's columns need the corrections `left`."""
    if t.pad == 0:
        pl.when(needed)(lambda: loop(False))
        return
    pl.when(needed & (tile == 0))(lambda: loop(True))
    if t.num_tiles > 1:
        pl.when(needed & (tile > 0))(lambda: loop(False))


class RowTables:
    """Table entries of the rows of a block in one tile, from a kernel's inputs and scratch.

    Args:
        step: positions of the block and the tile.
        block: number of the block.
        inputs: `left`, the corrections of the first columns, and `right`; see `right_edge`.
        scratch: `slab`, and `sheared` and `left` for rolled entries and corrections.
        in_first_tile: whether there are corrections.
    """

    def __init__(self, step: Step, block: Any, inputs: Any, scratch: Any, *, in_first_tile: bool):
        self.step, self.t, self.block, self.inputs, self.scratch = step, step.t, block, inputs, scratch
        self.left = scratch.left if in_first_tile else LeftRefs()
        self.lane = iota((SUBLANES, LANES), 1)

    def read(self, row: Any, slots: Sequence[tuple[int, int]]) -> tuple[list[Array], LeftRefs]:
        """Return the table entries for some slots, and the corrections of a group of rows, for `store`."""
        entries = [shear(self.step, self.scratch.slab, row + r, phase, self.lane) for r, phase in slots]
        has_left = self.left.knee is not None and slots
        return entries, roll_left(self.t, self.inputs.left, row, self.lane) if has_left else LeftRefs((), ())

    def store(self, row: Any, slots: Sequence[tuple[int, int]], entries: Sequence[Array], left: LeftRefs) -> None:
        """Store the result of `read`."""
        for (r, phase), lines in zip(slots, entries, strict=True):
            self.scratch.sheared[slot(self.t, row + r, phase)] = lines
        for of_rows, ref in zip(left, self.left, strict=True):
            for r, columns in enumerate(of_rows):
                for column, numbers in enumerate(columns):
                    ref[_left_buffer(self.t, row), r, column] = numbers

    def fill(self, row: Any, slots: Sequence[tuple[int, int]]) -> None:
        """Store the table entries for some slots, and the corrections of a group of rows."""
        self.store(row, slots, *self.read(row, slots))

    def knee(self, row: Any, r: int, phase: int) -> Array:
        """Return the knees of row `row + r` in a phase, [C, 128]; `row` is the first row of a group."""
        entries = self.scratch.sheared[slot(self.t, row + r, phase), : self.t.padded_channels]
        return self._corrected(entries, self.left.knee, self.t.pad, row, r, phase)

    def added(self, row: Any, r: int, phase: int) -> Registers:
        """Return the terms added to the scores of rows `row + r` and `row + r + 1` in a phase; see `knee` for `row`."""
        t, lines = self.t, []
        for of_unit in range(r, r + UNIT_ROWS):
            entries = self.scratch.sheared[slot(t, row + of_unit, phase), t.padded_channels :]
            lines.append(self._corrected(entries, self.left.added, 2 * t.pad, row, of_unit, phase))
        return by_unit(t, lines, functools.partial(jnp.where, is_upper()))

    def _corrected(self, entries: Array, left_ref: Any, num_columns: int, row: Any, r: int, phase: int) -> Array:
        if left_ref is None:
            return entries
        for column in range(num_columns):
            if column % self.t.phases == phase:
                entries = entries - left_ref[_left_buffer(self.t, row), r, column]
        return entries

    def existing(self, x: Array) -> Array:
        """Return `x`, with zeros in columns that do not exist (left of column 0)."""
        if self.left.knee is None or not self.t.halo[0]:
            return x
        return select(self.step.column(0) >= self.t.halo[0], x)


def hidden_features(
    t: Tiling, tables: RowTables, matrix: Array, unit: Unit, row: Any, r: int
) -> tuple[list[list[Array]], list[list[Array]], list[list[Array]]]:
    """Apply the first convolution and the nonlinearity to the scores of rows `row + r` and `row + r + 1`.

    Returns:
        For each row and phase: packed hidden features, features of the scores, and knees.
    """
    x = to_hidden(t, matrix, windows(t, unit, t.pad))
    knees = [[tables.knee(row, r + k, phase) for phase in range(t.phases)] for k in range(UNIT_ROWS)]
    hidden = [
        [pack(t, registers_of(tables.existing(leaky_relu_change(*each)))) for each in zip(x[k], knees[k], strict=True)]
        for k in range(UNIT_ROWS)
    ]
    return hidden, x, knees


def add_tables(t: Tiling, tables: RowTables, scores: Unit, row: Any, r: int) -> Unit:
    """Add to the scores of rows `row + r` and `row + r + 1` what does not depend on hidden features of this tile."""
    total = [[s + a for s, a in zip(scores[f], tables.added(row, r, f), strict=True)] for f in range(t.phases)]
    for unit, is_here in right_unit(t, tables.block, row, r):
        for i, f in enumerate(t.right_phases):
            total[f] = [x + is_here * tables.inputs.right[0, unit, i, k] for k, x in enumerate(total[f])]
    return total


def right_unit(t: Tiling, block: Any, row: Any, r: int) -> list[tuple[int, Any]]:
    """Return the index in `Tiling.right_units` of a unit that can be at `r` in its group, and 1.0 if it is this one.

    The unit has the rows `row + r` and `row + r + 1` of the block; `row` is the first row of a group.
    """
    rows = [(i, UNIT_ROWS * unit) for i, unit in enumerate(t.right_units) if UNIT_ROWS * unit % GROUP_ROWS == r]
    return [(i, ((block == at // t.block_rows) & (row + r == at % t.block_rows)).astype(jnp.float32)) for i, at in rows]


def add_change(
    t: Tiling, matrices: Any, hidden: Sequence[Sequence[Array]], total: Unit, correct: Sequence[Array]
) -> Unit:
    """Add the second convolution of hidden features, `with_rolled` of each row; MASKED_SCORE where not `correct`."""
    change = to_heads(t, matrices, hidden, t.pad)

    def add(f: int, c: Array, x: Array) -> Array:
        return c + x if t.is_single else jnp.where(correct[f], c + x, MASKED_SCORE)  # in a single tile all are correct

    return [[add(f, c, x) for c, x in zip(change[f], total[f], strict=True)] for f in range(t.phases)]


def diagonal_sum(x: Array, axis: int) -> Array:
    """Convert lines to lanes or back: sum the diagonals of [128, 128] squares over an axis."""
    diagonal = iota(x.shape, x.ndim - 2) == iota(x.shape, x.ndim - 1)
    return jnp.sum(jnp.where(diagonal, x, 0.0), axis, keepdims=x.ndim == 2)


def of_tile(step: Step, pieces: Sequence[Any], group: int, phase: int) -> Array:
    """Return the keys or values of a tile: [K, 128]. A column has the same lane as in its piece."""
    if len(pieces) == 1:
        return pieces[0][0, 0, group, phase]
    dtype = pieces[0].dtype
    if not step.t.interpret:  # the interpreter has no rule for `bitcast`
        pieces = [piece.bitcast(jnp.uint32) for piece in pieces]  # 16-bit numbers in pairs
    parts = [piece[0, 0, group, phase] for piece in pieces]
    found = jnp.where(iota(parts[0].shape, 1) >= step.first_lane, *parts)
    return found if step.t.interpret else pltpu.bitcast(found, dtype)


def copy_slab(parts: Sequence[Any], slab_ref: Any) -> None:
    """Put the pieces of the slab side by side."""
    for i, part in enumerate(parts):
        slab_ref[:, :, i * LANES : (i + 1) * LANES] = part[...]


# ---- Kernel


class Inputs(NamedTuple):
    """Inputs of the forward kernel: arrays with their specs, or refs of one step's blocks."""

    q: Any
    k: Any
    v: Any
    matrices: Matrices
    left: LeftRefs
    right: Any  # see `right_edge`
    slab: list[Any]  # pieces of 128 columns


class Outputs(NamedTuple):
    """Outputs of the forward kernel."""

    out: Any
    lse: Heads  # log-sum-exp of each row and head, in the order of lines


class Scratch(NamedTuple):
    """VMEM of the forward kernel."""

    scores: Heads  # scores of each phase, later overwritten by probabilities relative to the running maximum
    decay: Heads  # exp(old maximum - new maximum)
    max: Heads  # running maximum, the same in all lanes
    sum: Heads  # running sum of probs; lanes are summed after the last tile
    values: Any  # running weighted sum of values
    slab: Any
    sheared: Any  # table entries by slot
    left: LeftRefs  # rolled
    hidden: Any  # packed hidden features of two groups


def forward_kernel(first_ref: Any, inputs: Inputs, outputs: Outputs, scratch: Scratch, *, t: Tiling) -> None:
    """Process one tile of keys for one block of rows."""
    block, tile = pl.program_id(1), 0 if t.is_single else pl.program_id(2)
    first_tile, last_tile = t.tile_range(block, first_ref[0])
    step = t.step(block, tile, first_ref[0])
    needed = t.is_single or (tile >= first_tile) & (tile <= last_tile)
    is_first_sequence = t.is_single and pl.program_id(2) == 0
    first, end = step.groups()
    phases, heads_per_group = range(t.phases), t.num_heads // t.num_groups
    num_hidden = t.phases + len(beyond(t, t.pad))

    @pl.when(tile == 0)
    def _():
        for ref in jax.tree.leaves(scratch.max):
            ref[...] = jnp.full(ref.shape, MASKED_SCORE, jnp.float32)
        clear(*jax.tree.leaves(scratch.sum), scratch.values)
        if t.num_heads % 4:
            clear(*jax.tree.leaves(scratch.scores))

    make_tables = functools.partial(RowTables, step, block, inputs, scratch)

    @pl.when(is_first_sequence)
    def _():  # all sequences have the same tables
        copy_slab(inputs.slab, scratch.slab)
        tables = make_tables(in_first_tile=t.pad > 0)
        tables.fill(row_of(first), first_slots(t))
        jax.lax.fori_loop(first + 1, end, lambda group, _: tables.fill(row_of(group), new_slots(t)), None)

    @pl.when(needed)
    def _():
        if not t.is_single:
            copy_slab(inputs.slab, scratch.slab)
        visible = [step.visible(phase) for phase in phases]
        for head in range(t.num_heads):
            keys = [of_tile(step, inputs.k, head // heads_per_group, phase) for phase in phases]
            for phase, scores in zip(phases, dots(inputs.q[0, head], keys), strict=True):
                ref, index = head_rows(t, scratch.scores, head, phase)
                ref[index] = jnp.where(visible[phase], scores * t.head_dim**-0.5, 0.0)

    @pl.when(needed & ((first > 0) | (end < t.block_rows // GROUP_ROWS)))
    def _():  # groups of rows that do not use the tile
        for ref in jax.tree.leaves(scratch.decay):
            ref[...] = jnp.ones(ref.shape, jnp.float32)

    def loop(in_first_tile: bool) -> None:
        tables = make_tables(in_first_tile=in_first_tile)
        owned = [step.owned()] * t.phases

        def to_features(row: Any) -> list[Any]:
            """Return the hidden features of a group: for each unit [row][phase], with rolled ones."""
            units = [load_unit(t, scratch.scores, row + r) for r in UNITS]
            hidden = [
                hidden_features(t, tables, inputs.matrices.to_hidden[...], unit, row, r)[0]
                for r, unit in zip(UNITS, units, strict=True)
            ]
            return [[with_rolled(t, of_row, t.pad) for of_row in unit] for unit in hidden]

        def to_probs(row: Any, r: int) -> tuple[Registers, Registers, Registers, Unit]:
            """Return the new maximum, sum and decay of a unit, and its probs."""
            total = add_tables(t, tables, load_unit(t, scratch.scores, row + r), row, r)
            if t.num_channels:
                buffer = row // GROUP_ROWS & 1
                hidden = [[scratch.hidden[buffer, r + k, f] for f in range(num_hidden)] for k in range(UNIT_ROWS)]
                total = add_change(t, inputs.matrices.to_heads, hidden, total, owned)
            new_max, new_sum, decay = [], [], []
            probs: Unit = [[] for _ in phases]
            old = zip(load(t, scratch.max, row + r), load(t, scratch.sum, row + r), strict=True)
            for i, (old_max, old_sum) in enumerate(old):
                largest = functools.reduce(jnp.maximum, [total[f][i] for f in phases])
                new_max.append(jnp.maximum(old_max, jnp.max(largest, 1, keepdims=True)))
                decay.append(jnp.exp(old_max - new_max[i]))
                for f in phases:
                    probs[f].append(jnp.exp(total[f][i] - new_max[i]))
                new_sum.append(old_sum * decay[i] + functools.reduce(jnp.add, [probs[f][i] for f in phases]))
            return new_max, new_sum, decay, probs

        def store_features(hidden: Sequence[Any], row: Any) -> None:
            for r, unit in zip(UNITS, hidden, strict=True):
                for k in range(UNIT_ROWS):
                    for f in range(num_hidden):
                        scratch.hidden[row // GROUP_ROWS & 1, r + k, f] = unit[k][f]

        def store_probs(results: Sequence[tuple[Any, ...]], row: Any) -> None:
            for r, (new_max, new_sum, decay, probs) in zip(UNITS, results, strict=True):
                store(t, scratch.max, new_max, row + r)
                store(t, scratch.sum, new_sum, row + r)
                store(t, scratch.decay, decay, row + r)
                for f in phases:
                    store(t, scratch.scores, probs[f], row + r, f)

        row = row_of(first)
        slots = [] if t.is_single else new_slots(t)  # of the next group
        if not t.is_single:
            tables.fill(row, first_slots(t))
        if not t.num_channels:

            def plain_body(group, _):
                row = row_of(group)
                results = [to_probs(row, r) for r in UNITS]
                entries = tables.read(row + GROUP_ROWS, slots)
                store_probs(results, row)
                tables.store(row + GROUP_ROWS, slots, *entries)
                return 0

            jax.lax.fori_loop(first, end, plain_body, 0)
            return
        store_features(to_features(row), row)
        tables.fill(row + GROUP_ROWS, slots)

        def body(group, _):
            row, before = row_of(group), row_of(group - 1)
            # All loads first and all stores last, so that the compiler can overlap the operations between them. Of
            # the orders that were tried, this one compiles to the fewest instruction bundles.
            entries = tables.read(row + GROUP_ROWS, slots)
            results = [to_probs(before, r) for r in UNITS]
            hidden = to_features(row)
            store_features(hidden, row)
            store_probs(results, before)
            tables.store(row + GROUP_ROWS, slots, *entries)
            return 0

        jax.lax.fori_loop(first + 1, end, body, 0)
        row = row_of(end - 1)
        store_probs([to_probs(row, r) for r in UNITS], row)

    loop_over_groups(t, tile, needed, loop)

    def in_lanes(heads: Heads, head: int) -> Array:
        """Return one number per row, which is the same in all lanes, as [1, block_rows]."""
        ref, index = head_rows(t, heads, head)
        return diagonal_sum(ref[index][:, : t.block_rows], 0)

    @pl.when(needed)
    def _():
        for pair in pairs_of(t.num_heads):
            new: list[Any] = [0.0] * len(pair)
            for phase in phases:
                for i, head in enumerate(pair):
                    ref, index = head_rows(t, scratch.scores, head, phase)
                    values = of_tile(step, inputs.v, head // heads_per_group, phase)
                    new[i] += dot(values, ref[index].astype(values.dtype), (1, 1))
            for i, head in enumerate(pair):
                at = t.head_columns(head)
                scratch.values[at] = scratch.values[at] * in_lanes(scratch.decay, head) + new[i]

    @pl.when(tile == t.num_tiles - 1)
    def _():
        for m, sums, lse in zip(*map(jax.tree.leaves, (scratch.max, scratch.sum, outputs.lse)), strict=True):
            total = jnp.broadcast_to(jnp.sum(sums[...], -1, keepdims=True), sums.shape)
            squares = (-1, LANES, LANES)
            # All lanes of a line contain the same number. Take the diagonal of each square: lines become lanes.
            lse[0, 0] = diagonal_sum((m[...] + jnp.log(total)).reshape(squares), 1)
            sums[...] = total
        for head in range(t.num_heads):
            out = scratch.values[t.head_columns(head)] * (1.0 / in_lanes(scratch.sum, head))
            outputs.out[0, *t.head_columns(head)] = out.astype(outputs.out.dtype)


def left_blocks(t: Tiling, left_knee_PCT: Array, left_added_QHT: Array) -> LeftRefs:
    """Convert both corrections of the first columns to blocks."""
    if not t.pad:
        return LeftRefs()
    knee = jnp.pad(left_knee_PCT, ((0, 0), (0, t.padded_channels - t.num_channels), (0, 0)))
    added = jnp.moveaxis(tiling.by_register(t, jnp.moveaxis(left_added_QHT, 1, 0)), 0, 1)
    return LeftRefs(tiling.to_left_blocks(t, knee), tiling.to_left_blocks(t, added))


def last_rows(t: Tiling, blocks: Array) -> Float[Array, "B H R K"]:
    """Return the rows that `right_edge` reads, from `tiling.to_blocks`."""
    return blocks[:, :, t.right_rows.start : t.right_rows.stop]


def last_keys(t: Tiling, pieces: Array) -> Float[Array, "B N G K"]:
    """Return the keys that `right_edge` reads, from `tiling.to_pieces`: slices of these cost less than of all keys."""
    columns = range(t.tile_columns - t.pad, t.num_keys)
    return jnp.stack([pieces[:, 0, :, column % t.phases, :, column // t.phases] for column in columns], 1)


def right_edge(t: Tiling, first: Array, q_BHRK: Array, k_BNGK: Array, operator: Operator) -> Float[Array, "B ..."]:
    """Return what hidden columns beyond a single tile add to its last results, as `tiling.to_units`.

    A tile of 512 columns has all scores of 512 keys, but the results of the last `ahead` rows read hidden columns from
    512 on. These depend on the scores of few rows and columns, so XLA computes and differentiates their part.

    `q_BHRK` are the last rows, see `Tiling.right_rows`; `k_BNGK` are the `last_keys`.
    """
    size, columns = t.tile_columns, t.num_right
    query_column_R = first + t.row_stride * jnp.array(np.array(t.right_rows))
    key_column_N = np.arange(size - t.pad, t.num_keys)
    k_BNHK = jnp.repeat(k_BNGK, t.num_heads // t.num_groups, 2)
    options = {"preferred_element_type": jnp.float32, "precision": full_precision(q_BHRK.dtype)}
    scores_BRNH = jnp.einsum("BHRK,BNHK->BRNH", q_BHRK, k_BNHK, **options) * t.head_dim**-0.5
    distance_RN = query_column_R[:, None] - key_column_N[None]
    visible_RN = (distance_RN >= 0) & (distance_RN < (t.window or t.num_keys))
    scores_BRNH = jnp.where(visible_RN[None, ..., None], scores_BRNH, 0.0)

    def product(x: Array, weight: Array) -> Array:
        precision = full_precision(t.dtype)
        return jnp.matmul(
            x.astype(t.dtype), weight.astype(t.dtype), precision=precision, preferred_element_type=jnp.float32
        )

    # Hidden column size + m reads the scores m + w, of which those beyond the last key are 0.
    padded = jnp.pad(scores_BRNH, ((0, 0), (0, 0), (0, columns + t.width - 1 - len(key_column_N)), (0, 0)))
    x_BRMC = functools.reduce(
        jnp.add, [product(padded[:, :, w : w + columns], operator.scores_WHC[w]) for w in range(t.width)]
    )
    # The needed distances are -ahead .. -1.
    distance_RM = query_column_R[:, None] - (size + np.arange(columns))[None]
    knees = [
        jnp.where(distance_RM[..., None] == n - t.ahead, operator.knee_CN[:, n][None, None], 0.0)
        for n in range(t.ahead)
    ]
    knee_1RMC = functools.reduce(jnp.add, knees)[None]
    # The gradient of the knees is defined by `Operator`.
    features, stop = x_BRMC + knee_1RMC / (1 - SLOPE), jax.lax.stop_gradient
    slope = stop(jnp.where((1 - SLOPE) * x_BRMC + knee_1RMC > 0, 1.0, SLOPE))
    hidden_BRMC = stop(leaky_relu_change(x_BRMC, knee_1RMC)) + slope * (features - stop(features))
    # The result of column size - ahead + a reads hidden column size + m with the tap W - 1 - a + m.
    results = [
        functools.reduce(
            jnp.add,
            [
                product(hidden_BRMC[:, :, m], operator.output_WCH[t.width - 1 - a + m])
                for m in range(min(a + 1, columns))
            ],
        )
        for a in range(t.ahead)
    ]
    return tiling.to_units(t, jnp.stack(results, 2))


def forward_pass(
    t: Tiling, q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, first: Array, operator: Operator
) -> tuple[Array, Heads]:
    """Run the forward kernel.

    Returns:
        The output [B, T, H, K], and the log-sum-exp of each row and head [B, blocks, lines / 128, 128].
    """
    batch = q_BTHK.shape[0]
    left = left_blocks(t, operator.left_knee_PCT, operator.left_added_QHT)
    out = jax.ShapeDtypeStruct((batch, *t.all_columns_shape), q_BTHK.dtype)
    q, k = tiling.to_blocks(t, q_BTHK), tiling.to_pieces(t, k_BSGK)
    right = right_edge(t, first, last_rows(t, q), last_keys(t, k), operator) if t.num_right else None

    def by_block(x: Array) -> tiling.Blocked:
        return tiling.Blocked(x, pl.BlockSpec((1, *x.shape[1:]), lambda b, i, *_: (i, 0, 0, 0)))

    def lse_of(shape: tuple[int, ...]) -> tiling.Blocked:
        lines = batch, t.num_blocks, math.prod(shape[:-1]) // LANES, LANES
        return tiling.by_lanes(t, jax.ShapeDtypeStruct(lines, jnp.float32))

    outputs = tiling.call(
        t,
        forward_kernel,
        first=first,
        inputs=Inputs(
            q=tiling.by_rows(t, q),
            k=tiling.by_tiles(t, k),
            v=tiling.by_tiles(t, tiling.to_pieces(t, v_BSGK)),
            matrices=matrices_of(t, operator.scores_WHC, operator.output_WCH),
            left=jax.tree.map(by_block, left),
            right=None if right is None else tiling.by_sequence(right),
            slab=tiling.slab_of(t, tiling.to_table(t, operator.knee_CN, operator.added_HN)),
        ),
        outputs=Outputs(out=tiling.by_columns(t, out), lse=heads_of(t, lse_of)),
        scratch=Scratch(
            scores=heads_scratch(t, t.phases),
            decay=heads_scratch(t),
            max=heads_scratch(t),
            sum=heads_scratch(t),
            values=tiling.scratch_of(*t.column_shape),
            slab=tiling.scratch_of(t.phases, t.table_lines, t.slab_columns),
            sheared=tiling.scratch_of(t.slots, t.table_lines, LANES),
            left=left_scratch(t),
            hidden=packed_scratch(t, 2, GROUP_ROWS, t.phases + len(beyond(t, t.pad))),
        ),
    )
    return tiling.from_columns(t, outputs.out), outputs.lse
