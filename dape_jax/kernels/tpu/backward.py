"""The backward kernel: all gradients, from the output, its gradient and the log-sum-exp of the forward pass.

Grid: (sequence, tile of keys, block of rows), blocks innermost. A step repeats the forward computation of its scores,
hidden features and probabilities, then applies the transposed convolutions, which roll in the opposite direction:

    dtotal  = probs * (dout V^T - sum(dout * out))              dO, one matmul per head
    dhidden = Conv2^T(dtotal),  dx = dhidden * (1 or SLOPE),  dknee = dhidden * (1, 0 or -1)
    dscores = dtotal + Conv1^T(dx)
    dQ += dscores K,  dK += dscores^T Q,  dV += probs^T dout,  dW1 += dx taps^T,  dW2 += dtotal taps^T

A column that several tiles compute counts in the tile that owns it. Where gradients accumulate:

    k, v                    VMEM, while the blocks of their tile pass
    convolution weights     VMEM, to the end of the sequence
    left corrections        VMEM, in the first tile of columns
    q, distance tables      HBM, in float32: too large for VMEM. Each step copies its block in, adds, and copies it back
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from dape_jax.kernels.tables import Operator
from dape_jax.kernels.tpu import tiling
from dape_jax.kernels.tpu.forward import (
    LeftRefs,
    clear,
    convolve,
    corrected,
    dot,
    group_rows,
    heads_of_block,
    hidden_features,
    left_blocks,
    loop_over_groups,
    roll,
    select,
    shear,
)
from dape_jax.kernels.tpu.tiling import GROUP_ROWS, LANES, SUBLANES, Tiling, iota
from dape_jax.model.processors import leaky_relu_change, leaky_relu_change_gradients


class Inputs(NamedTuple):
    """Inputs of the backward kernel: arrays with their specs, or refs of one step's blocks."""

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    matrix_1: Any  # first convolution
    matrix_2: Any  # second convolution
    transposed_1: Any
    transposed_2: Any
    left: LeftRefs
    slab: list[Any]  # pieces of 128 columns
    dq: Any  # zeros, donated to the output of the same name
    dtable: Any  # likewise


class Outputs(NamedTuple):
    """Gradients."""

    dq: Any
    dk: Any
    dv: Any
    dmatrix_1: Any
    dmatrix_2: Any
    dtable: Any
    dleft: LeftRefs


class Scratch(NamedTuple):
    """VMEM of the backward kernel. The first three have the layout of scores."""

    scores: Any  # overwritten with their gradient, a group at a time
    dprobs: Any  # dout V^T - sum(dout * out)
    probs: Any
    dq: Any  # sum over tiles, copied from and to HBM
    dslab: Any  # likewise
    dk: Any  # sum over blocks
    dv: Any  # sum over blocks
    knee: Any  # sheared table
    added: Any  # sheared table
    dknee: Any
    dadded: Any
    semaphores: Any  # of copies from HBM and to HBM, of dq and dslab


def unshear(t: Tiling, dknee_ref: Any, dadded_ref: Any) -> Array:
    """Return the gradient of the slab and its margin: the transpose of `forward.shear`."""
    total: Any = 0
    for r in range(GROUP_ROWS):
        dknee = dknee_ref[r * t.padded_channels : (r + 1) * t.padded_channels, :]
        dadded = dadded_ref[r * t.padded_heads : (r + 1) * t.padded_heads, :]
        row = jnp.concatenate([dknee, dadded])
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
        clear(outputs.dmatrix_1, outputs.dmatrix_2)
        if t.padded_heads > t.num_heads:
            clear(scratch.scores, scratch.dprobs)

    @pl.when(tile == 0)
    def _():
        clear(*outputs.dleft)

    @pl.when(block == 0)
    def _():
        clear(scratch.dk, scratch.dv)

    @pl.when(needed)
    def _():
        shear(t, inputs.slab, scratch.knee, scratch.added)
        clear(scratch.dknee, scratch.dadded)
        visible = step.visible(t.block_rows, 1)
        for head, key_head, rows in heads_of_block(t):
            scores = dot(inputs.q[0, head], inputs.k[0, 0, key_head], (1, 1)) * t.head_dim**-0.5
            scratch.scores[rows, :] = jnp.where(visible, scores, 0.0)
            dout = inputs.dout[0, head]
            mean = jnp.sum(dout.astype(jnp.float32) * inputs.out[0, head].astype(jnp.float32), 1, keepdims=True)
            scratch.dprobs[rows, :] = dot(dout, inputs.v[0, 0, key_head], (1, 1)) - mean

    def process(group: Any, in_first_tile: bool) -> None:
        # Forward again. Arrays are rolled right by `shift` where they meet the tables.
        offset, rows = step.slab_offset(group), group_rows(t, group)
        start, shift = offset
        scores, dprobs = scratch.scores[rows, :], scratch.dprobs[rows, :]
        left = inputs.left if in_first_tile else LeftRefs()
        taps_1, x, knee, exists = hidden_features(
            step, group, scores, offset, inputs.matrix_1[...], scratch.knee, left.knee
        )
        hidden = select(exists, leaky_relu_change(x, knee)).astype(t.dtype)
        taps_2 = [roll(hidden, t.pad - w) for w in range(t.width)]
        added = corrected(t, group, scratch.added, offset, left.added, 2 * t.pad)
        change = convolve(t, inputs.matrix_2[...], taps_2, t.padded_channels) + added
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
        dx, dknee = leaky_relu_change_gradients(x, knee, select(exists, dhidden))
        source = dx.astype(t.dtype)
        dtaps_1 = [roll(source, w - t.pad) for w in range(t.width)]
        dconvolved = convolve(t, inputs.transposed_1[...], dtaps_1, t.padded_channels)
        dscores = roll(dconvolved, LANES - shift) + dtotal
        scratch.scores[rows, :] = jnp.where(visible & owned, dscores, 0.0)
        scratch.probs[rows, :] = jnp.where(owned, probs, 0.0)

        # Parameters: from here on, only columns that this tile owns count.
        owned_rolled = step.owned((lane - shift) & (LANES - 1))
        dx, dknee = select(owned_rolled, dx), select(owned_rolled, dknee)
        dchange = select(owned_rolled, dtaps_2[t.pad].astype(jnp.float32)).astype(t.dtype)
        stacked_1 = jnp.concatenate([rows_to_lanes(tap, t.padded_heads) for tap in taps_1])
        stacked_2 = jnp.concatenate([rows_to_lanes(tap, t.padded_channels) for tap in taps_2])
        outputs.dmatrix_1[0] += dot(rows_to_lanes(dx.astype(t.dtype), t.padded_channels), stacked_1, (1, 1))
        outputs.dmatrix_2[0] += dot(rows_to_lanes(dchange, t.padded_heads), stacked_2, (1, 1))

        here = lane >= shift
        following = pl.multiple_of(start + LANES, LANES)
        dadded = select(owned_rolled, roll(dtotal, shift))
        for ref, gradient in ((scratch.dknee, dknee), (scratch.dadded, dadded)):
            ref[:, pl.ds(start, LANES)] += select(here, gradient)
            ref[:, pl.ds(following, LANES)] += select(~here, gradient)
        if in_first_tile:
            for ref, gradient, num_columns in (
                (outputs.dleft.knee, dknee, t.pad),
                (outputs.dleft.added, dadded, 2 * t.pad),
            ):
                num_sublanes = ref.shape[3]
                row_lane = iota((num_sublanes, LANES), 1)  # in `dleft` a lane is a row
                for column in range(num_columns):
                    column_lane = (t.halo[0] + column + shift) & (LANES - 1)
                    for r in range(GROUP_ROWS):
                        row = GROUP_ROWS * group + r
                        drow = gradient[r * num_sublanes : (r + 1) * num_sublanes]
                        drow = roll(drow, row - column_lane + LANES)
                        ref[0, 0, column] -= jnp.where(row_lane == row, drow, 0.0)

    loop_over_groups(t, tile, needed, process)

    @pl.when(needed)
    def _():
        for read in reads:
            read.wait()
        scratch.dslab[...] += unshear(t, scratch.dknee, scratch.dadded)
        for head, key_head, rows in heads_of_block(t):
            dscores = scratch.scores[rows, :].astype(inputs.q.dtype)
            probs = scratch.probs[rows, :].astype(inputs.q.dtype)
            scratch.dq[head] += dot(dscores, inputs.k[0, 0, key_head], (1, 0))
            scratch.dk[key_head] += dot(dscores, inputs.q[0, head], (0, 0))
            scratch.dv[key_head] += dot(probs, inputs.dout[0, head], (0, 0))
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
    batch, H, C, W = q_BTHK.shape[0], t.num_heads, t.num_channels, t.width
    matrices = [
        tiling.to_matrix(t, operator.scores_WHC, t.padded_heads, t.padded_channels),
        tiling.to_matrix(t, operator.output_WCH, t.padded_channels, t.padded_heads),
        tiling.to_matrix(t, operator.scores_WHC.swapaxes(1, 2), t.padded_channels, t.padded_heads),
        tiling.to_matrix(t, operator.output_WCH.swapaxes(1, 2), t.padded_heads, t.padded_channels),
    ]
    table, table_vjp = jax.vjp(functools.partial(tiling.to_table, t), operator.knee_CN, operator.added_HN)
    left, left_vjp = jax.vjp(functools.partial(left_blocks, t), operator.left_knee_PCT, operator.left_added_QHT)

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), jnp.float32)

    def left_block(tile, block):
        # After the first tile the index stays at the last block, so that nothing is copied again.
        return jnp.where(tile == 0, block, t.num_blocks - 1)

    def left_input(x: Array) -> tiling.Blocked:
        return tiling.Blocked(x, pl.BlockSpec((1, *x.shape[1:]), lambda b, j, i, _: (left_block(j, i), 0, 0, 0)))

    def left_gradient(x: Array) -> tiling.Blocked:
        spec = pl.BlockSpec((1, 1, *x.shape[1:]), lambda b, j, i, _: (b, left_block(j, i), 0, 0, 0))
        return tiling.Blocked(float32(*x.shape), spec)

    def summed(*shape: int) -> tiling.Blocked:
        return tiling.Blocked(float32(*shape), pl.BlockSpec((1, *shape), lambda b, *_: (b, 0, 0)))

    dq, dtable = float32(H, t.padded_rows, t.head_dim), float32(*table.shape)
    dtiles = jax.ShapeDtypeStruct((batch, t.num_tiles, t.num_groups, LANES, t.head_dim), q_BTHK.dtype)
    inputs = Inputs(
        q=tiling.by_rows(t, tiling.to_blocks(t, q_BTHK)),
        k=tiling.by_tiles(t, tiling.to_tiles(t, k_BSGK)),
        v=tiling.by_tiles(t, tiling.to_tiles(t, v_BSGK)),
        out=tiling.by_rows(t, jnp.pad(out_BHTK, ((0, 0), (0, 0), (0, t.padded_rows - t.num_rows), (0, 0)))),
        dout=tiling.by_rows(t, tiling.to_blocks(t, dout_BTHK)),
        lse=tiling.by_lanes(t, lse.reshape(batch, t.num_blocks, t.block_sublanes // LANES, LANES)),
        matrix_1=tiling.whole(t, matrices[0]),
        matrix_2=tiling.whole(t, matrices[1]),
        transposed_1=tiling.whole(t, matrices[2]),
        transposed_2=tiling.whole(t, matrices[3]),
        left=jax.tree.map(left_input, left),
        slab=tiling.slab_of(t, table),
        dq=tiling.in_hbm(jnp.zeros(dq.shape, dq.dtype)),
        dtable=tiling.in_hbm(jnp.zeros(dtable.shape, dtable.dtype)),
    )
    outputs = Outputs(
        dq=tiling.in_hbm(dq),
        dk=tiling.by_tiles(t, dtiles),
        dv=tiling.by_tiles(t, dtiles),
        dmatrix_1=summed(t.padded_channels, W * t.padded_heads),
        dmatrix_2=summed(t.padded_heads, W * t.padded_channels),
        dtable=tiling.in_hbm(dtable),
        dleft=jax.tree.map(left_gradient, left),
    )
    scores_scratch = tiling.scratch_of(t.block_sublanes, LANES)
    tile_scratch = tiling.scratch_of(t.num_groups, LANES, t.head_dim)
    knee_scratch, added_scratch = tiling.sheared_scratch(t)
    scratch = Scratch(
        scores=scores_scratch,
        dprobs=scores_scratch,
        probs=scores_scratch,
        dq=tiling.scratch_of(H, t.block_rows, t.head_dim),
        dslab=tiling.scratch_of(*t.slab_shape),
        dk=tile_scratch,
        dv=tile_scratch,
        knee=knee_scratch,
        added=added_scratch,
        dknee=knee_scratch,
        dadded=added_scratch,
        semaphores=pltpu.SemaphoreType.DMA((2, 2)),
    )
    # Operand `dtable`; `first` is operand 0.
    last = len(jax.tree.leaves(inputs, is_leaf=lambda x: isinstance(x, tiling.Blocked)))
    aliases = {last - 1: Outputs._fields.index("dq"), last: Outputs._fields.index("dtable")}
    gradients = tiling.call(
        t, backward_kernel, first=first, inputs=inputs, outputs=outputs, scratch=scratch, input_output_aliases=aliases
    )
    dq_BTHK = jnp.moveaxis(gradients.dq[:, :, : t.num_rows] * t.head_dim**-0.5, 1, 2).astype(q_BTHK.dtype)
    dk_BSGK, dv_BSGK = (tiling.from_tiles(t, x).astype(k_BSGK.dtype) for x in (gradients.dk, gradients.dv))
    dknee_CN, dadded_HN = table_vjp(gradients.dtable.sum(0))
    dleft = left_vjp(jax.tree.map(lambda x: x.sum(0), gradients.dleft))
    dmatrix_1 = gradients.dmatrix_1.sum(0).reshape(t.padded_channels, W, t.padded_heads)
    dmatrix_2 = gradients.dmatrix_2.sum(0).reshape(t.padded_heads, W, t.padded_channels)
    dscores_WHC = dmatrix_1.transpose(1, 2, 0)[:, :H, :C]
    doutput_WCH = dmatrix_2.transpose(1, 2, 0)[:, :C, :H]
    return dq_BTHK, dk_BSGK, dv_BSGK, Operator(dscores_WHC, doutput_WCH, dknee_CN, dadded_HN, *dleft)
