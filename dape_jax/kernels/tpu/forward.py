"""The forward pass, and operations inside a kernel that the backward pass shares."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from dape_jax.kernels.tables import SLOPE, Operator
from dape_jax.kernels.tpu.tiling import (
    AWAY,
    GROUP,
    LANES,
    Tiling,
    _at_once,
    _by_block,
    _by_tile,
    _call,
    _compiler_params,
    _left,
    _slabs,
    _stacked,
    _Step,
    _table,
    _whole,
    cost,
)


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


def _shear(t: Tiling, table_refs: Sequence[Any], hidden_ref: Any, added_ref: Any) -> None:
    """Copy the slab 8 times over, for row r of a group shifted by r rows."""
    wide = jnp.concatenate([ref[...] for ref in table_refs], 1)
    for r in range(GROUP):
        shifted = _roll(wide, t.row_stride * r)[:, t.room :]
        hidden_ref[r * t.channels : (r + 1) * t.channels, :] = shifted[: t.channels]
        added_ref[r * t.heads : (r + 1) * t.heads, :] = shifted[t.channels :]


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
