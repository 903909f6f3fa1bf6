"""The backward kernel: all gradients, from the output, its gradient and the log-sum-exp of the forward pass.

Grid: (sequence, tile of keys, block of rows), blocks innermost. A step repeats the forward computation of its scores,
hidden features and probabilities, then applies the transposed convolutions, which roll in the opposite direction:

    dtotal  = probs * (dout V^T - sum(dout * out))              dO, one matmul per head
    dhidden = Conv2^T(dtotal),  dbefore = dhidden * (1 or SLOPE)
    dscores = dtotal + Conv1^T(dbefore)
    dQ += dscores K,  dK += dscores^T Q,  dV += probs^T dout,  dW1 += dbefore taps^T,  dW2 += dtotal taps^T

A column that several tiles compute counts in the tile that owns it. Where gradients accumulate:

    k, v                    VMEM, while the blocks of their tile pass
    convolution weights     VMEM, to the end of the sequence
    left correction         VMEM, in the first tile of columns
    q, distance tables      HBM, in float32: too large for VMEM. Each step copies its block in, adds, and copies it back
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from dape_jax.kernels.tables import SLOPE, Operator
from dape_jax.kernels.tpu.forward import (
    convolve,
    dot,
    group_rows,
    head_rows,
    hidden_features,
    loop_over_groups,
    read_table,
    roll,
    select,
    shear,
    sheared_scratch,
)
from dape_jax.kernels.tpu.tiling import (
    GROUP_ROWS,
    LANES,
    SUBLANES,
    Tiling,
    call,
    cost,
    from_tiles,
    iota,
    slab_specs,
    to_blocks,
    to_left_blocks,
    to_matrix,
    to_table,
    to_tiles,
    whole_spec,
)


class Inputs(NamedTuple):
    """Inputs of the backward kernel: arrays, their block specs, or refs of one step's blocks. Blocks are

    Args:
        q: [1, H, block_rows, K].
        k: [1, 1, G, 128, K].
        v: [1, 1, G, 128, K].
        out: [1, H, block_rows, K].
        dout: [1, H, block_rows, K].
        lse: [1, 1, block_rows * padded heads / 128, 128].
        matrix_1: first convolution.
        matrix_2: second convolution.
        transposed_1: transposed first convolution.
        transposed_2: transposed second convolution.
        left: [1, P, padded channels, 128].
        slab: pieces [padded channels + padded heads, 128].
        dq: zeros in HBM, donated to the output of the same name.
        dtable: zeros in HBM, donated to the output of the same name.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    matrix_1: Any
    matrix_2: Any
    transposed_1: Any
    transposed_2: Any
    left: Any
    slab: list[Any]
    dq: Any
    dtable: Any


class Outputs(NamedTuple):
    """Gradients. Blocks are

    Args:
        dq: all of it, in HBM.
        dk: [1, 1, G, 128, K].
        dv: [1, 1, G, 128, K].
        dmatrix_1: [1, padded channels, W * padded heads].
        dmatrix_2: [1, padded heads, W * padded channels].
        dtable: all of it, in HBM.
        dleft: [1, 1, P, padded channels, 128].
    """

    dq: Any
    dk: Any
    dv: Any
    dmatrix_1: Any
    dmatrix_2: Any
    dtable: Any
    dleft: Any


class Scratch(NamedTuple):
    """VMEM of the backward kernel. The first three are [block_rows * padded heads, 128].

    Args:
        scores: of the tile; overwritten with their gradient, a group at a time.
        dprobs: dout V^T - sum(dout * out).
        probs: of the tile.
        dq: [H, block_rows, K], sum over tiles, copied from and to HBM.
        dslab: [padded channels + padded heads, margin + slab], likewise.
        dk: [G, 128, K], sum over blocks.
        dv: [G, 128, K], sum over blocks.
        hidden: sheared table.
        added: sheared table.
        dhidden: gradient of the sheared table.
        dadded: gradient of the sheared table.
        semaphores: of copies from HBM and to HBM, of dq and dslab.
    """

    scores: Any
    dprobs: Any
    probs: Any
    dq: Any
    dslab: Any
    dk: Any
    dv: Any
    hidden: Any
    added: Any
    dhidden: Any
    dadded: Any
    semaphores: Any


def unshear(t: Tiling, dhidden_ref: Any, dadded_ref: Any) -> Array:
    """Return the gradient of the slab and its margin: the transpose of `forward.shear`."""
    total: Any = 0
    for r in range(GROUP_ROWS):
        dhidden = dhidden_ref[r * t.padded_channels : (r + 1) * t.padded_channels, :]
        dadded = dadded_ref[r * t.padded_heads : (r + 1) * t.padded_heads, :]
        row = jnp.concatenate([dhidden, dadded])
        row = jnp.concatenate([row, jnp.zeros((row.shape[0], t.slab_margin), jnp.float32)], 1)
        total += roll(row, t.slab_margin - t.row_stride * r)
    return total


def group_lse(t: Tiling, lse_ref: Any, group: Any) -> Array:
    """Return the log-sum-exp of a group as [8 * padded heads, 1]: lanes become sublanes."""
    square = (LANES, LANES)
    diagonal = iota(square, 0) == iota(square, 1)
    num_rows = t.group_sublanes // LANES
    rows = [lse_ref[0, 0, pl.ds(group * num_rows + i, 1), :] for i in range(num_rows)]
    columns = [jnp.where(diagonal, jnp.broadcast_to(row, square), 0.0) for row in rows]
    return jnp.concatenate([jnp.sum(column, 1, keepdims=True) for column in columns])


def rows_to_lanes(x: Array, num_sublanes: int) -> Array:
    """Put the 8 rows of a group side by side: [8 * num_sublanes, 128] -> [num_sublanes, 8 * 128]."""
    return jnp.concatenate([x[r * num_sublanes : (r + 1) * num_sublanes] for r in range(GROUP_ROWS)], 1)


def backward_kernel(first_ref: Any, inputs: Inputs, outputs: Outputs, scratch: Scratch, *, t: Tiling) -> None:
    """Add the gradients of one block of rows and one tile of keys."""
    tile, block = pl.program_id(1), pl.program_id(2)
    begin, end = t.tile_range(block, first_ref[0])
    step = t.step(block, tile, first_ref[0])
    needed = (tile >= begin) & (tile <= end)
    lane = iota((SUBLANES, LANES), 1)
    heads_per_group = t.num_heads // t.num_groups

    # Sums in HBM. The copies in start first and are awaited last.
    batch = pl.program_id(0)
    columns = pl.ds(pl.multiple_of(step.slab_start - t.slab_margin, LANES), t.slab_margin + t.slab_columns)
    rows = pl.ds(pl.multiple_of(block * t.block_rows, t.block_rows), t.block_rows)
    pairs = [(outputs.dq.at[batch, :, rows, :], scratch.dq), (outputs.dtable.at[batch, :, columns], scratch.dslab)]
    reads = [pltpu.make_async_copy(hbm, vmem, scratch.semaphores.at[0, i]) for i, (hbm, vmem) in enumerate(pairs)]
    writes = [pltpu.make_async_copy(vmem, hbm, scratch.semaphores.at[1, i]) for i, (hbm, vmem) in enumerate(pairs)]

    @pl.when(needed)
    def _():
        for read in reads:
            read.start()

    @pl.when((tile == 0) & (block == 0))
    def _():
        for ref in (outputs.dmatrix_1, outputs.dmatrix_2):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        if t.padded_heads > t.num_heads:
            scratch.scores[...] = jnp.zeros(scratch.scores.shape, jnp.float32)
            scratch.dprobs[...] = jnp.zeros(scratch.dprobs.shape, jnp.float32)

    @pl.when(tile == 0)
    def _():
        outputs.dleft[...] = jnp.zeros(outputs.dleft.shape, jnp.float32)

    @pl.when(block == 0)
    def _():
        scratch.dk[...] = jnp.zeros(scratch.dk.shape, jnp.float32)
        scratch.dv[...] = jnp.zeros(scratch.dv.shape, jnp.float32)

    @pl.when(needed)
    def _():
        shear(t, inputs.slab, scratch.hidden, scratch.added)
        scratch.dhidden[...] = jnp.zeros(scratch.dhidden.shape, jnp.float32)
        scratch.dadded[...] = jnp.zeros(scratch.dadded.shape, jnp.float32)
        visible = step.visible(t.block_rows, 1)
        for head, rows in enumerate(head_rows(t)):
            scores = dot(inputs.q[0, head], inputs.k[0, 0, head // heads_per_group], (1, 1)) * t.head_dim**-0.5
            scratch.scores[rows, :] = jnp.where(visible, scores, 0.0)
            dout = inputs.dout[0, head]
            mean = jnp.sum(dout.astype(jnp.float32) * inputs.out[0, head].astype(jnp.float32), 1, keepdims=True)
            scratch.dprobs[rows, :] = dot(dout, inputs.v[0, 0, head // heads_per_group], (1, 1)) - mean

    def process(group: Any, in_first_tile: bool) -> None:
        # Forward again. Arrays are rolled right by `shift` where they meet the tables.
        offset, rows = step.slab_offset(group), group_rows(t, group)
        start, shift = offset
        scores, dprobs = scratch.scores[rows, :], scratch.dprobs[rows, :]
        left_ref = inputs.left if in_first_tile else None
        taps_1, before, exists = hidden_features(
            step, group, scores, offset, inputs.matrix_1[...], scratch.hidden, left_ref
        )
        positive = before > 0
        hidden = select(exists, jnp.where(positive, before, SLOPE * before)).astype(t.dtype)
        taps_2 = [roll(hidden, t.pad - w) for w in range(t.width)]
        change = convolve(t, inputs.matrix_2[...], taps_2, t.padded_channels) + read_table(scratch.added, offset, lane)
        total = roll(change, LANES - shift) + scores
        lanes = iota(total.shape, 1)
        visible, owned = step.visible(t.group_sublanes, t.padded_heads, group), step.owned(lanes)
        # Outside of these lanes a result would need scores of another tile.
        correct = visible & (lanes >= 2 * t.pad) & (lanes < LANES - 2 * t.ahead)
        probs = jnp.where(correct, jnp.exp(total - group_lse(t, inputs.lse, group)), 0.0)

        # Backward through softmax and convolutions.
        dtotal = probs * dprobs
        source = dtotal.astype(t.dtype)
        dtaps_2 = [roll(source, shift + (w - t.pad) + LANES) for w in range(t.width)]
        dhidden = convolve(t, inputs.transposed_2[...], dtaps_2, t.padded_heads)
        dbefore = select(exists, jnp.where(positive, dhidden, SLOPE * dhidden))
        source = dbefore.astype(t.dtype)
        dtaps_1 = [roll(source, w - t.pad) for w in range(t.width)]
        dconvolved = convolve(t, inputs.transposed_1[...], dtaps_1, t.padded_channels)
        dscores = roll(dconvolved, LANES - shift) + dtotal
        scratch.scores[rows, :] = jnp.where(visible & owned, dscores, 0.0)
        scratch.probs[rows, :] = jnp.where(owned, probs, 0.0)

        # Parameters: from here on, only columns that this tile owns count.
        owned_rolled = step.owned((lane - shift) & (LANES - 1))
        dbefore = select(owned_rolled, dbefore)
        dchange = select(owned_rolled, dtaps_2[t.pad].astype(jnp.float32)).astype(t.dtype)
        stacked_1 = jnp.concatenate([rows_to_lanes(tap, t.padded_heads) for tap in taps_1])
        stacked_2 = jnp.concatenate([rows_to_lanes(tap, t.padded_channels) for tap in taps_2])
        outputs.dmatrix_1[0] += dot(rows_to_lanes(dbefore.astype(t.dtype), t.padded_channels), stacked_1, (1, 1))
        outputs.dmatrix_2[0] += dot(rows_to_lanes(dchange, t.padded_heads), stacked_2, (1, 1))

        here = lane >= shift
        following = pl.multiple_of(start + LANES, LANES)
        dadded = select(owned_rolled, roll(dtotal, shift))
        for ref, gradient in ((scratch.dhidden, dbefore), (scratch.dadded, dadded)):
            ref[:, pl.ds(start, LANES)] += select(here, gradient)
            ref[:, pl.ds(following, LANES)] += select(~here, gradient)
        if in_first_tile:
            row_lane = iota((t.padded_channels, LANES), 1)  # in `left` a lane is a row
            for column in range(t.pad):
                column_lane = (t.halo[0] + column + shift) & (LANES - 1)
                for r in range(GROUP_ROWS):
                    row = GROUP_ROWS * group + r
                    drow = dbefore[r * t.padded_channels : (r + 1) * t.padded_channels]
                    drow = roll(drow, row - column_lane + LANES)
                    outputs.dleft[0, 0, column] -= jnp.where(row_lane == row, drow, 0.0)

    loop_over_groups(t, tile, needed, process)

    @pl.when(needed)
    def _():
        for read in reads:
            read.wait()
        scratch.dslab[...] += unshear(t, scratch.dhidden, scratch.dadded)
        for head, rows in enumerate(head_rows(t)):
            dscores = scratch.scores[rows, :].astype(inputs.q.dtype)
            probs = scratch.probs[rows, :].astype(inputs.q.dtype)
            scratch.dq[head] += dot(dscores, inputs.k[0, 0, head // heads_per_group], (1, 0))
            scratch.dk[head // heads_per_group] += dot(dscores, inputs.q[0, head], (0, 0))
            scratch.dv[head // heads_per_group] += dot(probs, inputs.dout[0, head], (0, 0))
        for write in writes:
            write.start()
        for write in writes:
            write.wait()

    @pl.when(block == t.num_blocks - 1)
    def _():
        outputs.dk[0, 0] = (scratch.dk[...] * t.head_dim**-0.5).astype(outputs.dk.dtype)
        outputs.dv[0, 0] = scratch.dv[...].astype(outputs.dv.dtype)


def backward_pass(
    t: Tiling,
    q_BTHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    first: Array,
    operator: Operator,
    out_BHTK: Array,
    lse: Array,
    dout_BTHK: Array,
) -> tuple[Array, Array, Array, Operator]:
    """Run the backward kernel; return the gradients of q, k, v and the operator."""
    batch, dtype = q_BTHK.shape[0], q_BTHK.dtype
    H, C, W = t.num_heads, t.num_channels, t.width
    matrices = [
        to_matrix(t, operator.scores_WHC, t.padded_heads, t.padded_channels),
        to_matrix(t, operator.output_WCH, t.padded_channels, t.padded_heads),
        to_matrix(t, operator.scores_WHC.swapaxes(1, 2), t.padded_channels, t.padded_heads),
        to_matrix(t, operator.output_WCH.swapaxes(1, 2), t.padded_heads, t.padded_channels),
    ]
    table, table_vjp = jax.vjp(functools.partial(to_table, t), operator.hidden_CN, operator.added_HN)
    left, left_vjp = jax.vjp(functools.partial(to_left_blocks, t), operator.left_PCT)
    lse_block = t.block_sublanes // LANES, LANES
    score_scratch = pltpu.VMEM((t.block_sublanes, LANES), jnp.float32)
    tile_scratch = pltpu.VMEM((t.num_groups, LANES, t.head_dim), jnp.float32)
    hidden_scratch, added_scratch = sheared_scratch(t)

    def needed_block(tile, block, first_ref):
        return jnp.clip(block, *t.block_range(tile, first_ref[0]))

    def left_block(tile, block):
        # After the first tile the index stays at the last block, so that nothing is copied again.
        return jnp.where(tile == 0, block, t.num_blocks - 1)

    block_spec = pl.BlockSpec(
        (1, H, t.block_rows, t.head_dim), lambda b, j, i, first_ref: (b, 0, needed_block(j, i, first_ref), 0)
    )
    tile_spec = pl.BlockSpec((1, 1, t.num_groups, LANES, t.head_dim), lambda b, j, i, _: (b, j, 0, 0, 0))
    lse_spec = pl.BlockSpec((1, 1, *lse_block), lambda b, j, i, first_ref: (b, needed_block(j, i, first_ref), 0, 0))
    hbm_spec = pl.BlockSpec(memory_space=pl.ANY)

    dq = jax.ShapeDtypeStruct((batch, H, t.padded_rows, t.head_dim), jnp.float32)
    dtable = jax.ShapeDtypeStruct((batch, *table.shape), jnp.float32)
    dtiles = jax.ShapeDtypeStruct((batch, t.num_tiles, t.num_groups, LANES, t.head_dim), dtype)
    matrix_shapes = (t.padded_channels, W * t.padded_heads), (t.padded_heads, W * t.padded_channels)
    inputs = Inputs(
        q=to_blocks(t, q_BTHK),
        k=to_tiles(t, k_BSGK),
        v=to_tiles(t, v_BSGK),
        out=jnp.pad(out_BHTK, ((0, 0), (0, 0), (0, t.padded_rows - t.num_rows), (0, 0))),
        dout=to_blocks(t, dout_BTHK),
        lse=lse.reshape(batch, t.num_blocks, *lse_block),
        matrix_1=matrices[0],
        matrix_2=matrices[1],
        transposed_1=matrices[2],
        transposed_2=matrices[3],
        left=left,
        slab=[table] * t.slab_parts,
        dq=jnp.zeros(dq.shape, dq.dtype),
        dtable=jnp.zeros(dtable.shape, dtable.dtype),
    )
    num_operands = 1 + len(jax.tree.leaves(inputs))  # `first` is operand 0
    outputs = call(
        t,
        backward_kernel,
        name="dape_backward",
        grid=(batch, t.num_tiles, t.num_blocks),
        first=first,
        inputs=inputs,
        in_specs=Inputs(
            q=block_spec,
            k=tile_spec,
            v=tile_spec,
            out=block_spec,
            dout=block_spec,
            lse=lse_spec,
            matrix_1=whole_spec(t, matrices[0]),
            matrix_2=whole_spec(t, matrices[1]),
            transposed_1=whole_spec(t, matrices[2]),
            transposed_2=whole_spec(t, matrices[3]),
            left=pl.BlockSpec((1, *left.shape[1:]), lambda b, j, i, _: (left_block(j, i), 0, 0, 0)),
            slab=slab_specs(t, table.shape[0], lambda b, j, i, first_ref: (needed_block(j, i, first_ref), j)),
            dq=hbm_spec,
            dtable=hbm_spec,
        ),
        out_shape=Outputs(
            dq=dq,
            dk=dtiles,
            dv=dtiles,
            dmatrix_1=jax.ShapeDtypeStruct((batch, *matrix_shapes[0]), jnp.float32),
            dmatrix_2=jax.ShapeDtypeStruct((batch, *matrix_shapes[1]), jnp.float32),
            dtable=dtable,
            dleft=jax.ShapeDtypeStruct((batch, *left.shape), jnp.float32),
        ),
        out_specs=Outputs(
            dq=hbm_spec,
            dk=tile_spec,
            dv=tile_spec,
            dmatrix_1=pl.BlockSpec((1, *matrix_shapes[0]), lambda b, *_: (b, 0, 0)),
            dmatrix_2=pl.BlockSpec((1, *matrix_shapes[1]), lambda b, *_: (b, 0, 0)),
            dtable=hbm_spec,
            dleft=pl.BlockSpec((1, 1, *left.shape[1:]), lambda b, j, i, _: (b, left_block(j, i), 0, 0, 0)),
        ),
        scratch=Scratch(
            scores=score_scratch,
            dprobs=score_scratch,
            probs=score_scratch,
            dq=pltpu.VMEM((H, t.block_rows, t.head_dim), jnp.float32),
            dslab=pltpu.VMEM((t.padded_channels + t.padded_heads, t.slab_margin + t.slab_columns), jnp.float32),
            dk=tile_scratch,
            dv=tile_scratch,
            hidden=hidden_scratch,
            added=added_scratch,
            dhidden=hidden_scratch,
            dadded=added_scratch,
            semaphores=pltpu.SemaphoreType.DMA((2, 2)),
        ),
        input_output_aliases={
            num_operands - 2: Outputs._fields.index("dq"),
            num_operands - 1: Outputs._fields.index("dtable"),
        },
        cost_estimate=cost(t, batch, dtype.itemsize),
    )
    dq_BTHK = jnp.moveaxis(outputs.dq[:, :, : t.num_rows] * t.head_dim**-0.5, 1, 2).astype(dtype)
    dk_BSGK, dv_BSGK = (from_tiles(t, x).astype(k_BSGK.dtype) for x in (outputs.dk, outputs.dv))
    dhidden_CN, dadded_HN = table_vjp(outputs.dtable.sum(0))
    (dleft_PCT,) = left_vjp(outputs.dleft.sum(0))
    dmatrix_1 = outputs.dmatrix_1.sum(0).reshape(t.padded_channels, W, t.padded_heads)
    dmatrix_2 = outputs.dmatrix_2.sum(0).reshape(t.padded_heads, W, t.padded_channels)
    dscores_WHC = dmatrix_1.transpose(1, 2, 0)[:, :H, :C]
    doutput_WCH = dmatrix_2.transpose(1, 2, 0)[:, :C, :H]
    return dq_BTHK, dk_BSGK, dv_BSGK, Operator(dscores_WHC, doutput_WCH, dhidden_CN, dadded_HN, dleft_PCT)
