"""The backward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from dape_jax.kernels.tables import SLOPE, Operator
from dape_jax.kernels.tpu.forward import (
    _convolve,
    _dot,
    _hidden,
    _in_first_tile_and_others,
    _look_up,
    _roll,
    _shear,
    _where,
)
from dape_jax.kernels.tpu.tiling import (
    GROUP,
    LANES,
    Tiling,
    _by_block,
    _by_tile,
    _call,
    _compiler_params,
    _from_tiles,
    _left,
    _slabs,
    _stacked,
    _table,
    _whole,
    cost,
)


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
