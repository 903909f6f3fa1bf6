"""Backward kernel: all gradients, from the output, its gradient and the log-sum-exp of the forward pass.

Grid: (sequence, tile of keys, block of rows), blocks innermost. A step repeats the forward computation of its scores,
hidden features and probabilities, then applies the transposed convolutions, which read in the opposite direction:

    dtotal  = probs * (dout V^T - sum(dout * out))              dO, one matmul per head and phase
    dhidden = Conv2^T(dtotal),  dx = dhidden * (1 or SLOPE)
    dscores = dtotal + Conv1^T(dx)
    dQ += dscores K,  dK += dscores^T Q,  dV += probs^T dout,  dW1 += dx taps^T,  dW2 += dtotal taps^T

The gradient of `knee` is dx / (1 - SLOPE): see `tables.Operator`.

A loop iteration recomputes the forward pass of one group of rows and computes the gradients of the previous group. A
column that several tiles compute counts only in the tile that owns it. Gradients are accumulated in:

    k, v                    VMEM, over the blocks of their tile, then in the block of their piece
    convolution weights     VMEM, over the sequence
    left corrections        VMEM, in the first tile of columns
    q, distance tables      HBM, in float32: too large for VMEM. Each step copies its block in, adds, and copies it
                            back. The first tile of a block of rows reads no gradient of q
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from dape_jax.kernels.tables import Operator
from dape_jax.kernels.tpu import tiling
from dape_jax.kernels.tpu.forward import (
    UNITS,
    Heads,
    LeftRefs,
    Matrices,
    Registers,
    RowTables,
    Unit,
    add_change,
    add_tables,
    clear,
    copy_slab,
    dot,
    dots,
    first_slots,
    head_rows,
    heads_scratch,
    hidden_features,
    is_upper,
    join,
    last_keys,
    last_rows,
    left_blocks,
    left_scratch,
    load_unit,
    loop_over_groups,
    matrices_of,
    new_slots,
    of_tile,
    operand,
    pack,
    packed_scratch,
    pairs_of,
    registers_of,
    right_edge,
    right_unit,
    roll,
    row_of,
    select,
    slab_columns,
    slot,
    store,
    to_heads,
    to_hidden,
    windows,
    with_rolled,
)
from dape_jax.kernels.tpu.tiling import GROUP_ROWS, LANES, MASKED_SCORE, SUBLANES, UNIT_ROWS, Tiling, iota
from dape_jax.model.processors import SLOPE


class Inputs(NamedTuple):
    """Inputs of the backward kernel: arrays with their specs, or refs of one step's blocks."""

    q: Any
    q_columns: Any  # transposed: a lane for each row
    k: Any
    v: Any
    dout: Any
    dout_columns: Any
    lse: Heads
    row_sum: Heads  # sum(dout * out) of each row and head, as `lse`
    matrices: Matrices
    transposed: Matrices  # matrices of the transposed convolutions
    left: LeftRefs
    right: Any  # see `forward.right_edge`
    slab: list[Any]  # pieces of 128 columns
    dtable: Any  # zeros, donated to the output of the same name


class Outputs(NamedTuple):
    """Gradients."""

    dq: Any
    dtable: Any
    dk: Any
    dv: Any
    dmatrices: Matrices  # the second matrix is that of the transposed convolution
    dleft: LeftRefs
    dright: Any


class Scratch(NamedTuple):
    """VMEM of the backward kernel. The first three have phases."""

    scores: Heads
    dprobs: Heads  # dout V^T, then the gradient of the total, then that of the scores
    probs: Heads
    dq: Any  # sum over tiles, copied from and to HBM
    dslab: Any  # sum over tiles, copied from and to HBM
    dk: Any  # sum over blocks
    dv: Any  # sum over blocks
    slab: Any
    sheared: Any  # table entries by slot
    dsheared: Any
    left: LeftRefs  # rolled
    hidden: Any  # packed hidden features of two groups
    slope: Any  # packed numbers of two groups, negative where the slope of the nonlinearity is SLOPE
    semaphores: Any  # semaphores of the copies of dq and dslab from and to HBM


class Recomputed(NamedTuple):
    """Results of the forward computation of a unit, for its gradients."""

    hidden: list[list[Array]]  # packed, [row][phase]
    slope: list[list[Array]]
    probs: Unit
    dtotal: Unit


class HiddenGradients(NamedTuple):
    """Gradients of the hidden features of a unit."""

    dtotal_operands: list[Array]  # gradients of the total, as operands of convolutions
    dx: list[list[Array]]  # [row][phase]
    packed_dx: list[list[Array]]


class Gradients(NamedTuple):
    """Gradients of a unit."""

    dscores: Unit
    dx: list[list[Array]]
    dtotal: Unit
    dmatrix_1: Array
    dmatrix_2: Array


def are_positive(t: Tiling, packed: Array) -> Registers:
    """Return masks of the positive numbers of a packed array, one register each."""
    if t.dtype == jnp.float32:
        return [register > 0 for register in registers_of(packed)]
    words = registers_of(pltpu.bitcast(packed, jnp.int32))
    return [mask for word in words for mask in ((word << 16) > 0, word > 0)]


def lines_of_unit(t: Tiling, lines: Heads, row: Any, lane: Array) -> Registers:
    """Return the numbers of rows `row` and `row + 1`, from `to_lines`, in all lanes of their registers."""
    sublane = iota((SUBLANES, LANES), 0)

    def register(ref: Any, line: Any) -> Array:
        numbers = jnp.broadcast_to(ref[0, 0, pl.ds(line // LANES, 1), :], (SUBLANES, LANES))
        picked = jnp.where(lane == (line & (LANES - 1)) + sublane, numbers, 0.0)
        return jnp.broadcast_to(jnp.sum(picked, 1, keepdims=True), (SUBLANES, LANES))

    octets = [(octet, r) for octet in range(t.octets) for r in range(UNIT_ROWS)]
    found = [register(lines.octets, (octet * t.block_rows + row + r) * SUBLANES) for octet, r in octets]
    return [*found, register(lines.quads, row * 4)] if t.quads else found


def head_lines(t: Tiling, unit: Registers, row: int) -> Array:
    """Return the lines of one row of a unit; lines of the other row's half of the quad are 0."""
    lines = [unit[UNIT_ROWS * octet + row] for octet in range(t.octets)]
    if t.quads:
        lines.append(jnp.where(is_upper() if row == 0 else ~is_upper(), unit[-1], 0.0))
    return join(lines, 0)


def backward_kernel(first_ref: Any, inputs: Inputs, outputs: Outputs, scratch: Scratch, *, t: Tiling) -> None:
    """Add the gradients of one block of rows and one tile of keys."""
    tile, block = pl.program_id(1), pl.program_id(2)
    first_tile, last_tile = t.tile_range(block, first_ref[0])
    step = t.step(block, tile, first_ref[0])
    needed = (tile >= first_tile) & (tile <= last_tile)
    first, end = step.groups()
    lane = iota((SUBLANES, LANES), 1)
    phases, heads_per_group = range(t.phases), t.num_heads // t.num_groups
    n = t.phases_per_dot
    owned = step.owned()

    # Sums in HBM. Copies to VMEM start first and are awaited before anything is added.
    batch = pl.program_id(0)
    last_start = t.table_columns - t.slab_columns
    columns = pl.ds(pl.multiple_of(jnp.clip(step.slab_start, 0, last_start), LANES), t.slab_columns)
    rows = pl.ds(pl.multiple_of(block * LANES, LANES), LANES)
    pairs = [(outputs.dq.at[batch, :, :, rows], scratch.dq), (outputs.dtable.at[batch, :, :, columns], scratch.dslab)]
    reads = [pltpu.make_async_copy(hbm, vmem, scratch.semaphores.at[0, i]) for i, (hbm, vmem) in enumerate(pairs)]
    writes = [pltpu.make_async_copy(vmem, hbm, scratch.semaphores.at[1, i]) for i, (hbm, vmem) in enumerate(pairs)]

    is_first = tile == first_tile  # of the block: dq has no value yet
    pl.when(needed & ~is_first)(reads[0].start)
    pl.when(needed)(reads[1].start)

    @pl.when(is_first)
    def _():
        clear(scratch.dq)

    @pl.when((tile == 0) & (block == 0))
    def _():
        clear(*jax.tree.leaves((outputs.dmatrices, outputs.dright)))
        if t.num_heads % 4:
            clear(*jax.tree.leaves((scratch.scores, scratch.dprobs)))

    @pl.when(tile == 0)
    def _():
        clear(*jax.tree.leaves(outputs.dleft))

    piece = t.gradient_piece_of(tile)

    def write_gradients(*, only_owned: bool) -> None:
        """Write the gradients of a piece of the keys and values, or only of those that the tile owns."""
        column = piece * t.tile_columns + t.phases * iota((t.head_dim, LANES), 1)
        for sums, scale, to in ((scratch.dk, t.head_dim**-0.5, outputs.dk), (scratch.dv, 1.0, outputs.dv)):
            for group, phase in itertools.product(range(t.num_groups), phases):
                at, total = (0, 0, group, phase), sums[group, phase] * scale
                if only_owned:
                    total = jnp.where(column >= tile * t.owned_columns, total, to[at].astype(jnp.float32))
                to[at] = total.astype(to.dtype)

    if not t.is_aligned:

        @pl.when((block == 0) & (tile > 0) & (piece > t.gradient_piece_of(tile - 1)))
        def _():  # the sums are of the previous tile, which owns the first columns of this piece
            write_gradients(only_owned=False)

    @pl.when(block == 0)
    def _():
        clear(scratch.dk, scratch.dv)

    @pl.when(needed)
    def _():
        copy_slab(inputs.slab, scratch.slab)
        scratch.dsheared[pl.ds(slot(t, row_of(first), t.phases), t.phases)] = jnp.zeros(
            (t.phases, t.table_lines, LANES), jnp.float32
        )
        visible = [step.visible(phase) for phase in phases]
        for head in range(t.num_heads):
            dout, group = inputs.dout[0, head], head // heads_per_group
            scores = dots(inputs.q[0, head], [of_tile(step, inputs.k, group, phase) for phase in phases])
            dprobs = dots(dout, [of_tile(step, inputs.v, group, phase) for phase in phases])
            for phase in phases:
                ref, index = head_rows(t, scratch.scores, head, phase)
                ref[index] = jnp.where(visible[phase], scores[phase] * t.head_dim**-0.5, 0.0)
                ref, index = head_rows(t, scratch.dprobs, head, phase)
                ref[index] = jnp.where(visible[phase], dprobs[phase], 0.0)
        pl.when(~is_first)(reads[0].wait)
        reads[1].wait()

    @pl.when(needed & ((first > 0) | (end < t.block_rows // GROUP_ROWS)))
    def _():  # groups of rows that do not use the tile
        clear(*jax.tree.leaves(scratch.probs))

    def loop(in_first_tile: bool) -> None:
        tables = RowTables(step, block, inputs, scratch, in_first_tile=in_first_tile)

        def is_correct(phase: int) -> Array:
            """Return whether a column's result depends only on scores of this tile."""
            column, first_column = step.column(phase), t.halo[0] if in_first_tile else 2 * t.pad
            return (column >= first_column) & (column < t.tile_columns - 2 * t.ahead)

        def counted(registers: Registers) -> Registers:
            """Return registers with zeros where another tile owns the column."""
            return registers if t.is_aligned else [jnp.where(owned, x, jnp.zeros((), x.dtype)) for x in registers]

        def unshear(row: Any, phase: int) -> None:
            """Add the (complete) gradient of a row's table entries to the gradient of the slab."""
            remainder, start, shift = slab_columns(step, row, phase)
            dentries = roll(select(owned, scratch.dsheared[slot(t, row, phase)]), shift - step.first_lane + LANES)
            here = lane >= shift
            scratch.dslab[remainder, :, pl.ds(start, LANES)] += select(here, dentries)
            scratch.dslab[remainder, :, pl.ds(pl.multiple_of(start + LANES, LANES), LANES)] += select(~here, dentries)

        def load_first(row: Any) -> list[tuple[Any, ...]]:
            scores_and_dprobs, lse_and_sum = (scratch.scores, scratch.dprobs), (inputs.lse, inputs.row_sum)
            return [
                (
                    *(load_unit(t, ref, row + r) for ref in scores_and_dprobs),
                    *(lines_of_unit(t, ref, row + r, lane) for ref in lse_and_sum),
                )
                for r in UNITS
            ]

        def load_second(row: Any) -> list[tuple[Any, ...]]:
            buffer = row // GROUP_ROWS & 1

            def of_unit(ref: Any, r: int) -> list[list[Array]]:
                return [[ref[buffer, r + k, f] for f in phases] for k in range(UNIT_ROWS)]

            return [
                (
                    load_unit(t, scratch.scores, row + r),
                    load_unit(t, scratch.dprobs, row + r),
                    of_unit(scratch.hidden, r),
                    of_unit(scratch.slope, r),
                )
                for r in UNITS
            ]

        def features_of(loaded: Sequence[tuple[Any, ...]], row: Any) -> list[tuple[Any, Any]]:
            """Return packed hidden features and slopes of each unit."""
            found = []
            for r, (scores, *_) in zip(UNITS, loaded, strict=True):
                hidden, *x_and_knees = hidden_features(t, tables, inputs.matrices.to_hidden[...], scores, row, r)
                pairs = [zip(*of_row, strict=True) for of_row in zip(*x_and_knees, strict=True)]
                slope = [[pack(t, registers_of((1 - SLOPE) * x + knee)) for x, knee in of_row] for of_row in pairs]
                found.append((hidden, slope))
            return found

        def recompute(features: Sequence[Any], loaded: Sequence[tuple[Any, ...]], row: Any) -> list[Recomputed]:
            found = []
            for r, (hidden, slope), (scores, dprobs, lse, row_sum) in zip(UNITS, features, loaded, strict=True):
                total = add_tables(t, tables, scores, row, r)
                if t.num_channels:
                    with_beyond = [with_rolled(t, of_row, t.pad) for of_row in hidden]
                    total = add_change(t, inputs.matrices.to_heads, with_beyond, total, [*map(is_correct, phases)])
                probs = [[jnp.exp(x - m) for x, m in zip(total[f], lse, strict=True)] for f in phases]
                dtotal = [[p * (d - s) for p, d, s in zip(probs[f], dprobs[f], row_sum, strict=True)] for f in phases]
                found.append(Recomputed(hidden, slope, probs, dtotal))
            return found

        def hidden_gradients_of(loaded: Sequence[tuple[Any, ...]]) -> list[HiddenGradients]:
            operands = [windows(t, dtotal, t.ahead) for _, dtotal, _, _ in loaded]
            dxs = [dx_of(x, slope) for x, (_, _, _, slope) in zip(operands, loaded, strict=True)]
            packed = [[[pack(t, registers_of(x)) for x in of_row] for of_row in dx] for dx in dxs]
            return [HiddenGradients(*unit) for unit in zip(operands, dxs, packed, strict=True)]

        def gradients_of(
            of_hidden: Sequence[HiddenGradients], loaded: Sequence[tuple[Any, ...]], row: Any
        ) -> list[Gradients]:
            found = []
            for r, unit, (_, dtotal, _, _) in zip(UNITS, of_hidden, loaded, strict=True):
                with_beyond = [with_rolled(t, of_row, t.ahead) for of_row in unit.packed_dx]
                dconvolved = to_heads(t, inputs.transposed.to_heads, with_beyond, t.ahead)
                dscores = []
                for f in phases:
                    terms = zip(dconvolved[f], dtotal[f], tables.added(row, r, f), strict=True)
                    dscores.append([jnp.where(owned & (a > MASKED_SCORE / 2), c + d, 0.0) for c, d, a in terms])
                found.append(dscores)
            return [
                Gradients(
                    dscores,
                    unit.dx,
                    dtotal,
                    weights(windows(t, scores, t.pad), unit.packed_dx),
                    weights(unit.dtotal_operands, hidden),
                )
                for dscores, unit, (scores, dtotal, hidden, _) in zip(found, of_hidden, loaded, strict=True)
            ]

        def dx_of(operands: Sequence[Array], slope: Sequence[Sequence[Array]]) -> list[list[Array]]:
            dhidden = to_hidden(t, inputs.transposed.to_hidden[...], operands)

            def dx(k: int, f: int) -> Array:
                masks = are_positive(t, slope[k][f])
                registers = zip(masks, registers_of(dhidden[k][f]), strict=True)
                return tables.existing(join([jnp.where(mask, d, SLOPE * d) for mask, d in registers], 0))

            return [[dx(k, f) for f in phases] for k in range(UNIT_ROWS)]

        def weights(operands: Sequence[Array], packed: Sequence[Sequence[Array]]) -> Array:
            """Return the gradient of a matrix [lines of a window, 2 n C]; columns count in the tile that owns them."""
            parts = [[join(counted(registers_of(packed[k][f])), 0) for f in phases] for k in range(UNIT_ROWS)]
            outputs_of = [
                operand(t, [x for of_row in parts for x in of_row[begin : begin + n]])
                for begin in range(0, t.phases, n)
            ]
            return dot(join(operands, 1), join(outputs_of, 1), (1, 1))

        def store_first(results: Sequence[Recomputed], row: Any) -> None:
            buffer = row // GROUP_ROWS & 1
            for r, unit in zip(UNITS, results, strict=True):
                for f in phases:
                    for k in range(UNIT_ROWS if t.num_channels else 0):
                        scratch.hidden[buffer, r + k, f] = unit.hidden[k][f]
                        scratch.slope[buffer, r + k, f] = unit.slope[k][f]
                    store(t, scratch.probs, counted(unit.probs[f]), row + r, f)
                    store(t, scratch.dprobs, unit.dtotal[f], row + r, f)
                for i, is_here in right_unit(t, block, row, r):
                    for j, f in enumerate(t.right_phases):
                        for register, d in enumerate(unit.dtotal[f]):
                            outputs.dright[0, i, j, register] += is_here * d

        def store_second(results: Sequence[Gradients], row: Any) -> None:
            outputs.dmatrices.to_hidden[0] += functools.reduce(jnp.add, [unit.dmatrix_1 for unit in results])
            outputs.dmatrices.to_heads[0] += functools.reduce(jnp.add, [unit.dmatrix_2 for unit in results])
            for r, unit in zip(UNITS, results, strict=True):
                for f in phases:
                    store(t, scratch.dprobs, unit.dscores[f], row + r, f)
            add_to_tables(results, row)
            if in_first_tile:
                add_left(results, row)

        def add_to_tables(results: Sequence[Gradients | Recomputed], row: Any) -> None:
            dentries: dict[int, list[Array]] = {}
            for r, unit in zip(UNITS, results, strict=True):
                for f in phases:
                    for k in range(UNIT_ROWS):
                        lines = [head_lines(t, unit.dtotal[f], k)]
                        if isinstance(unit, Gradients):
                            lines = [unit.dx[k][f] / (1 - SLOPE), *lines]
                        dentries.setdefault(slot(t, r + k, f) - slot(t, 0, 0), []).append(join(lines, 0))
            for offset, parts in sorted(dentries.items()):
                total = functools.reduce(jnp.add, parts)
                at = slot(t, row, 0) + offset
                # The previous group wrote the slots left of this group's first slot.
                scratch.dsheared[at] = total + scratch.dsheared[at] if offset < 0 else total
            shared = t.phases - 1 if t.row_stride == 1 else 0
            for r, phase in new_slots(t):
                unshear(row + r - shared, phase)

        def add_left(results: Sequence[Gradients], row: Any) -> None:
            for ref, num_columns in ((outputs.dleft.knee, t.pad), (outputs.dleft.added, 2 * t.pad)):
                row_lane = iota((ref.shape[3], LANES), 1)  # in `dleft` a lane is a row
                for column in range(num_columns):
                    phase, to = column % t.phases, column // t.phases
                    for r, unit in zip(UNITS, results, strict=True):
                        for k in range(UNIT_ROWS):
                            d = unit.dx[k][phase] / (1 - SLOPE)
                            d = d if ref is outputs.dleft.knee else head_lines(t, unit.dtotal[phase], k)
                            d = roll(d, row + r + k - to + LANES)
                            ref[0, 0, column] -= jnp.where(row_lane == row + r + k, d, 0.0)

        def plain_body(group, _):
            row = row_of(group)
            loaded = load_first(row)
            results = recompute([([], [])] * len(loaded), loaded, row)
            entries = tables.read(row + GROUP_ROWS, new_slots(t))
            store_first(results, row)
            tables.store(row + GROUP_ROWS, new_slots(t), *entries)
            add_to_tables(results, row)
            return 0

        def body(group, _):
            row, row_before = row_of(group), row_of(group - 1)
            # All loads first and all stores last, so that the compiler can overlap the operations between them.
            now, before = load_first(row), load_second(row_before)
            entries = tables.read(row + GROUP_ROWS, new_slots(t))
            # Of the orders of operations that were tried, this one compiles to the fewest instruction bundles.
            of_hidden = hidden_gradients_of(before)
            features = features_of(now, row)
            gradients = gradients_of(of_hidden, before, row_before)
            store_first(recompute(features, now, row), row)
            tables.store(row + GROUP_ROWS, new_slots(t), *entries)
            store_second(gradients, row_before)
            return 0

        row = row_of(first)
        tables.fill(row, first_slots(t))
        if t.num_channels:
            loaded = load_first(row)
            store_first(recompute(features_of(loaded, row), loaded, row), row)
            tables.fill(row + GROUP_ROWS, new_slots(t))
            jax.lax.fori_loop(first + 1, end, body, 0)
            row = row_of(end - 1)
            last = load_second(row)
            store_second(gradients_of(hidden_gradients_of(last), last, row), row)
        else:
            jax.lax.fori_loop(first, end, plain_body, 0)
            row = row_of(end - 1)
        if t.row_stride == 1:
            for r in range(1, t.phases):
                unshear(row + GROUP_ROWS - t.phases + r, 0)

    loop_over_groups(t, tile, needed, loop)

    @pl.when(needed)
    def _():
        for pair in pairs_of(t.num_heads):
            dq: list[Any] = [0.0] * len(pair)
            for phase in phases:
                for i, head in enumerate(pair):
                    group = head // heads_per_group
                    ref, index = head_rows(t, scratch.dprobs, head, phase)
                    dscores = ref[index].astype(inputs.q.dtype)
                    ref, index = head_rows(t, scratch.probs, head, phase)
                    probs = ref[index].astype(inputs.q.dtype)
                    dq[i] += dot(of_tile(step, inputs.k, group, phase), dscores, (1, 1))
                    scratch.dk[group, phase] += dot(inputs.q_columns[0, *t.head_columns(head)], dscores, (1, 0))
                    scratch.dv[group, phase] += dot(inputs.dout_columns[0, *t.head_columns(head)], probs, (1, 0))
            for i, head in enumerate(pair):
                scratch.dq[t.head_columns(head)] += dq[i]
        for write in writes:
            write.start()
        for write in writes:
            write.wait()

    @pl.when(block == t.num_blocks - 1)
    def _():
        write_gradients(only_owned=not t.is_aligned)


def to_lines(t: Tiling, x_BXTN: Array, fill: float) -> Array:
    """Arrange numbers of rows and heads, in X registers of N heads, as blocks: [B, blocks, lines / 128, 128]."""
    batch, registers, num_rows, heads = x_BXTN.shape
    rows = (0, t.padded_rows - num_rows)
    x = jnp.pad(x_BXTN, ((0, 0), (0, 0), rows, (0, 0)), constant_values=fill)
    x = x.reshape(batch, registers, t.num_blocks, t.block_rows, heads).swapaxes(1, 2)
    return x.reshape(batch, t.num_blocks, -1, LANES)


def lay_out_lse(forward: Tiling, t: Tiling, lse: Heads) -> Heads:
    """Convert the log-sum-exp to the blocks of the backward pass. Rows beyond T get probabilities of 0."""
    batch = jax.tree.leaves(lse)[0].shape[0]

    def of(x: Array, registers: int, heads: int) -> Array:
        x = x.reshape(batch, forward.num_blocks, registers, forward.block_rows, heads).swapaxes(1, 2)
        x = x.reshape(batch, registers, forward.padded_rows, heads)[:, :, : t.num_rows]
        return to_lines(t, x, -MASKED_SCORE)

    octets = of(lse.octets, t.octets, SUBLANES) if t.octets else None
    return Heads(octets, of(lse.quads, 1, 4) if t.quads else None)


def lay_out_sums(t: Tiling, x_BTH: Array) -> Heads:
    """Arrange a sum for each row and head in the blocks of the log-sum-exp."""

    def of(x_BTH: Array, heads: int) -> Array:
        x_BTH = jnp.pad(x_BTH, ((0, 0), (0, 0), (0, -x_BTH.shape[2] % heads)))
        return to_lines(t, x_BTH.reshape(*x_BTH.shape[:2], -1, heads).swapaxes(1, 2), 0.0)

    num_octets = SUBLANES * t.octets
    octets = of(x_BTH[..., :num_octets], SUBLANES) if t.octets else None
    return Heads(octets, of(x_BTH[..., num_octets:], 4) if t.quads else None)


def backward_pass(
    forward: Tiling,
    t: Tiling,
    q_BTHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    first: Array,
    operator: Operator,
    out_BTHK: Array,
    lse: Heads,
    dout_BTHK: Array,
) -> tuple[Array, Array, Array, Operator]:
    """Run the backward kernel; return the gradients of q, k, v and the operator.

    `forward` is the tiling of the forward pass, which returned `out_BTHK` and `lse`.
    """
    batch = q_BTHK.shape[0]
    transposed_1, transposed_2 = (x.swapaxes(1, 2)[::-1] for x in (operator.scores_WHC, operator.output_WCH))
    table, table_vjp = jax.vjp(functools.partial(tiling.to_table, t), operator.knee_CN, operator.added_HN)
    left, left_vjp = jax.vjp(functools.partial(left_blocks, t), operator.left_knee_PCT, operator.left_added_QHT)
    row_sum_BTH = (dout_BTHK.astype(jnp.float32) * out_BTHK.astype(jnp.float32)).sum(-1)
    lines = lay_out_lse(forward, t, lse), lay_out_sums(t, row_sum_BTH)
    lse, row_sum = (jax.tree.map(functools.partial(tiling.by_lanes, t), x) for x in lines)
    q, k = tiling.to_blocks(t, q_BTHK), tiling.to_pieces(t, k_BSGK)
    right = right_vjp = None
    if t.num_right:
        edges = last_rows(t, q), last_keys(t, k), operator
        right, right_vjp = jax.vjp(functools.partial(right_edge, t, first), *edges)

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), jnp.float32)

    def left_block(tile, block):
        # After the first tile the index stays at the last block, so that no block is copied again.
        return jnp.where(tile == 0, block, t.num_blocks - 1)

    def left_input(x: Array) -> tiling.Blocked:
        return tiling.Blocked(x, pl.BlockSpec((1, *x.shape[1:]), lambda b, j, i, _: (left_block(j, i), 0, 0, 0)))

    def left_gradient(x: Array) -> tiling.Blocked:
        spec = pl.BlockSpec((1, 1, *x.shape[1:]), lambda b, j, i, _: (b, left_block(j, i), 0, 0, 0))
        return tiling.Blocked(float32(*x.shape), spec)

    score_lines = tiling.score_lines(t, t.window_phases)
    hidden_lines = tiling.hidden_lines(t, UNIT_ROWS, t.phases_per_dot, packed=True)
    K = t.head_dim
    dtable = float32(*table.shape)
    dpieces = tiling.by_pieces(t, jax.ShapeDtypeStruct(k.shape, k.dtype), t.gradient_piece_of)
    inputs = Inputs(
        q=tiling.by_rows(t, q),
        q_columns=tiling.by_columns(t, tiling.to_columns(t, q_BTHK)),
        k=tiling.by_tiles(t, k),
        v=tiling.by_tiles(t, tiling.to_pieces(t, v_BSGK)),
        dout=tiling.by_rows(t, tiling.to_blocks(t, dout_BTHK)),
        dout_columns=tiling.by_columns(t, tiling.to_columns(t, dout_BTHK)),
        lse=lse,
        row_sum=row_sum,
        matrices=matrices_of(t, operator.scores_WHC, operator.output_WCH),
        transposed=matrices_of(t, transposed_2, transposed_1),
        left=jax.tree.map(left_input, left),
        right=None if right is None else tiling.by_sequence(right),
        slab=tiling.slab_of(t, table),
        dtable=tiling.in_hbm(jnp.zeros(dtable.shape, dtable.dtype)),
    )
    dmatrix = tiling.by_sequence(float32(len(score_lines.number), len(hidden_lines.number)))
    outputs = Outputs(
        dq=tiling.in_hbm(float32(*t.all_columns_shape)),
        dk=dpieces,
        dv=dpieces,
        dmatrices=Matrices(dmatrix, dmatrix) if t.num_channels else Matrices(),
        dtable=tiling.in_hbm(dtable),
        dleft=jax.tree.map(left_gradient, left),
        dright=None if right is None else tiling.by_sequence(float32(*right.shape[1:])),
    )
    tile_scratch = tiling.scratch_of(t.num_groups, t.phases, K, LANES)
    slab_scratch = tiling.scratch_of(t.phases, t.table_lines, t.slab_columns)
    sheared_scratch = tiling.scratch_of(t.slots, t.table_lines, LANES)
    scratch = Scratch(
        scores=heads_scratch(t, t.phases),
        dprobs=heads_scratch(t, t.phases),
        probs=heads_scratch(t, t.phases),
        dq=tiling.scratch_of(*t.column_shape),
        dslab=slab_scratch,
        dk=tile_scratch,
        dv=tile_scratch,
        slab=slab_scratch,
        sheared=sheared_scratch,
        dsheared=sheared_scratch,
        left=left_scratch(t),
        hidden=packed_scratch(t, 2, GROUP_ROWS, t.phases),
        slope=packed_scratch(t, 2, GROUP_ROWS, t.phases),
        semaphores=pltpu.SemaphoreType.DMA((2, 2)),
    )
    # The last operand is `dtable`, the second output; operand 0 is `first`.
    aliases = {len(jax.tree.leaves(inputs, is_leaf=lambda x: isinstance(x, tiling.Blocked))): 1}
    gradients = tiling.call(
        t, backward_kernel, first=first, inputs=inputs, outputs=outputs, scratch=scratch, input_output_aliases=aliases
    )
    dq, dk, dright = gradients.dq, gradients.dk, None
    if right_vjp is not None:
        dq_BHRK, dk_BNGK, dright = right_vjp(gradients.dright)
        dq = tiling.add_to_columns(t, dq, t.right_rows, dq_BHRK.astype(jnp.float32) * K**0.5)
        for i, column in enumerate(range(t.num_keys - dk_BNGK.shape[1], t.num_keys)):
            update = dk_BNGK[:, i, None, :, None, :, None]
            dk = tiling.add_at(dk, update, 0, 0, 0, column % t.phases, 0, column // t.phases)
    dq_BTHK = (tiling.from_columns(t, dq) * K**-0.5).astype(q_BTHK.dtype)
    dk_BSGK, dv_BSGK = (tiling.from_pieces(t, x).astype(k_BSGK.dtype) for x in (dk, gradients.dv))

    def of_kernel(dmatrix: Array, kernel_WHC: Array) -> Array:
        """Return the gradient of a kernel from that of its matrix, [lines of a window, 2 n C], C in packed order."""
        matrix = functools.partial(tiling.to_matrix, outputs=hidden_lines, inputs=score_lines)
        return jax.vjp(matrix, kernel_WHC)[1](dmatrix.sum(0).T)[0]

    dscores_WHC, doutput_WCH = jnp.zeros_like(operator.scores_WHC), jnp.zeros_like(operator.output_WCH)
    if t.num_channels:
        dscores_WHC = of_kernel(gradients.dmatrices.to_hidden, operator.scores_WHC)
        doutput_WCH = of_kernel(gradients.dmatrices.to_heads, transposed_2)[::-1].swapaxes(1, 2)
    dknee_CN, dadded_HN = table_vjp(gradients.dtable.sum(0))
    dleft = left_vjp(jax.tree.map(lambda x: x.sum(0), gradients.dleft))
    doperator = Operator(dscores_WHC, doutput_WCH, dknee_CN, dadded_HN, *dleft)
    if dright is not None:
        doperator = jax.tree.map(jnp.add, doperator, dright)
    return dq_BTHK, dk_BSGK, dv_BSGK, doperator
