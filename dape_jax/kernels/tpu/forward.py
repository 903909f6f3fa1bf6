"""The forward kernel, and the operations on a group of rows that the backward kernel repeats.

Grid: (sequence, block of rows, tile of keys), tiles innermost. As in FlashAttention, VMEM holds for each row and head
of the block a running maximum m, a running sum l of exp(score - m), and the sum of values weighted likewise:

    for tile in tiles of the block:
        scores = Q K^T / sqrt(K)                                one matmul per head
        for group of 8 rows in the block:
            total = scores + added - left_added + Conv2(leaky_relu_change(Conv1(scores), knee - left_knee))
            new m, new l, probs = exp(total - m), decay = exp(old m - m)
        values = values * decay + probs V                       one matmul per head
    out = values / l,  log-sum-exp = m + log(l)

The log-sum-exp is saved for the backward pass. Scores, hidden features and probabilities never leave VMEM.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from dape_jax.kernels.tables import Operator
from dape_jax.kernels.tpu import tiling
from dape_jax.kernels.tpu.tiling import GROUP_ROWS, LANES, MASKED_SCORE, SUBLANES, SlabOffset, Step, Tiling, iota
from dape_jax.model.processors import leaky_relu_change
from dape_jax.sharding import full_precision

# ---- Operations in VMEM, shared with the backward kernel


def clear(*refs: Any) -> None:
    """Fill float32 refs with zeros."""
    for ref in refs:
        ref[...] = jnp.zeros(ref.shape, jnp.float32)


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Return the matmul over one dim of each operand, accumulated in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    precision = full_precision(a.dtype)
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def roll(x: Array, by: Any) -> Array:
    """Roll along the lanes: out[.., lane] = x[.., lane - by], modulo their number."""
    if isinstance(by, int):
        return pltpu.roll(x, by % x.shape[-1], 1) if by % x.shape[-1] else x
    return pltpu.roll(x, by & (LANES - 1), 1)


def select(mask: Array, x: Array, other: Any = 0.0) -> Array:
    """Return `x` where the mask is True, else `other`. The mask is one register, [8, 128], repeated over sublanes."""
    return jnp.where(mask[None], x.reshape(-1, SUBLANES, LANES), other).reshape(x.shape)


def convolve(t: Tiling, matrix: Array, taps: list[Array], inputs: int) -> Array:
    """Convolve a group: taps [8 * inputs, 128] -> [8 * outputs, 128], one matmul for every `rows_per_dot` rows."""
    num_sublanes = tiling.rows_per_dot(t, inputs) * inputs
    rows = [
        dot(matrix, jnp.concatenate([tap[start : start + num_sublanes] for tap in taps]), (1, 0))
        for start in range(0, GROUP_ROWS * inputs, num_sublanes)
    ]
    return jnp.concatenate(rows) if len(rows) > 1 else rows[0]


def shear(t: Tiling, slab_refs: Sequence[Any], knee_ref: Any, added_ref: Any) -> None:
    """Copy the slab 8 times, for row r of a group shifted right by the distance between row 0 and row r."""
    slab = jnp.concatenate([ref[...] for ref in slab_refs], 1)
    for r in range(GROUP_ROWS):
        shifted = roll(slab, t.row_stride * r)[:, t.slab_margin :]
        knee_ref[r * t.padded_channels : (r + 1) * t.padded_channels, :] = shifted[: t.padded_channels]
        added_ref[r * t.padded_heads : (r + 1) * t.padded_heads, :] = shifted[t.padded_channels :]


def read_table(sheared_ref: Any, offset: SlabOffset, lane: Array) -> Array:
    """Return a group's entries of a sheared table, rolled right by `offset.shift`.

    Both pieces start at multiples of 128; lanes before the shift belong to the second:

        sheared   |. . . a b c d|e f g . . . .|      entries wanted: a b c d e f g, from `start + shift` on
        returned  |e f g a b c d|
    """
    here = sheared_ref[:, pl.ds(offset.start, LANES)]
    after = sheared_ref[:, pl.ds(pl.multiple_of(offset.start + LANES, LANES), LANES)]
    pieces = (x.reshape(-1, SUBLANES, LANES) for x in (here, after))
    return jnp.where((lane >= offset.shift)[None], *pieces).reshape(here.shape)


def corrected(
    t: Tiling, group: Any, sheared_ref: Any, offset: SlabOffset, left_ref: Any | None, num_columns: int
) -> Array:
    """Return `read_table` minus the correction of the first columns; `left_ref` is None in a tile without them."""
    lane = iota((SUBLANES, LANES), 1)
    entries = read_table(sheared_ref, offset, lane)
    if left_ref is None:
        return entries
    for column in range(num_columns):
        column_lane = (t.halo[0] + column + offset.shift) & (LANES - 1)
        # In `left_ref` a lane is a row. Roll each row's lane to that of the column.
        rows = [roll(left_ref[0, column], column_lane - (GROUP_ROWS * group + r) + LANES) for r in range(GROUP_ROWS)]
        entries -= select(lane == column_lane, jnp.concatenate(rows))
    return entries


class LeftRefs(NamedTuple):
    """Corrections of the first columns, in the first tile; both are None in others."""

    knee: Any = None
    added: Any = None


def hidden_features(
    step: Step, group: Any, scores: Array, offset: SlabOffset, matrix: Array, knee_ref: Any, left_ref: Any | None
) -> tuple[list[Array], Array, Array, Array]:
    """Apply the first convolution to a group's scores.

    Returns:
        The taps, the features of the scores, the knees of LeakyReLU, and whether the column of a lane is a column (not
        left of column 0). All are rolled right by `offset.shift`.
    """
    t = step.t
    lane = iota((SUBLANES, LANES), 1)
    source = scores.astype(t.dtype)
    taps = [roll(source, offset.shift + (t.pad - w) + LANES) for w in range(t.width)]
    knee = corrected(t, group, knee_ref, offset, left_ref, t.pad)
    exists = step.key_column + ((lane - offset.shift) & (LANES - 1)) >= 0
    return taps, convolve(t, matrix, taps, t.padded_heads), knee, exists


def heads_of_block(t: Tiling) -> list[tuple[int, int, Any]]:
    """Return for each head its index, its head of keys, and the sublanes of its rows: every `padded_heads`-th."""
    sublanes = [pl.ds(head, t.block_rows, stride=t.padded_heads) for head in range(t.num_heads)]
    return [(head, head // (t.num_heads // t.num_groups), rows) for head, rows in enumerate(sublanes)]


def group_rows(t: Tiling, group: Any) -> Any:
    """Return the sublanes of a group in a block."""
    return pl.ds(pl.multiple_of(group * t.group_sublanes, t.group_sublanes), t.group_sublanes)


def loop_over_groups(t: Tiling, tile: Any, needed: Any, process: Callable[[Any, bool], None]) -> None:
    """Call `process(iteration, in_first_tile)` for the groups of a block, if the step is needed.

    The first tile has its own loop, since only its columns need the corrections `left`.
    """

    def loop(*, in_first_tile: bool) -> None:
        def body(iteration, _):
            process(iteration, in_first_tile)
            return 0

        jax.lax.fori_loop(0, t.loop_iterations, body, 0)

    if not t.pad:
        pl.when(needed)(lambda: loop(in_first_tile=False))
        return
    pl.when(needed & (tile == 0))(lambda: loop(in_first_tile=True))
    pl.when(needed & (tile > 0))(lambda: loop(in_first_tile=False))


# ---- The kernel


class Inputs(NamedTuple):
    """Inputs of the forward kernel: arrays with their specs, or refs of one step's blocks."""

    q: Any
    k: Any
    v: Any
    matrix_1: Any  # first convolution
    matrix_2: Any  # second convolution
    left: LeftRefs
    slab: list[Any]  # pieces of 128 columns


class Outputs(NamedTuple):
    """Outputs of the forward kernel."""

    out: Any
    lse: Any  # log-sum-exp of each row and head, in the order of sublanes


class Scratch(NamedTuple):
    """VMEM of the forward kernel. The first five have the layout of scores."""

    scores: Any
    probs: Any  # relative to the running maximum
    decay: Any  # exp(old maximum - new maximum)
    max: Any  # running maximum, the same in all lanes
    sum: Any  # running sum of probs; lanes are summed after the last tile
    values: Any  # running weighted sum of values
    knee: Any  # sheared table
    added: Any  # sheared table


def forward_kernel(first_ref: Any, inputs: Inputs, outputs: Outputs, scratch: Scratch, *, t: Tiling) -> None:
    """Process one tile of keys for one block of rows."""
    block, tile = pl.program_id(1), pl.program_id(2)
    begin, end = t.tile_range(block, first_ref[0])
    step = t.step(block, tile, first_ref[0])
    needed = (tile >= begin) & (tile <= end)

    @pl.when(tile == 0)
    def _():
        scratch.max[...] = jnp.full(scratch.max.shape, MASKED_SCORE, jnp.float32)
        clear(scratch.sum, scratch.values)
        if t.padded_heads > t.num_heads:
            clear(scratch.scores)

    @pl.when(needed)
    def _():
        shear(t, inputs.slab, scratch.knee, scratch.added)
        visible = step.visible(t.block_rows, 1)
        for head, key_head, rows in heads_of_block(t):
            scores = dot(inputs.q[0, head], inputs.k[0, 0, key_head], (1, 1)) * t.head_dim**-0.5
            scratch.scores[rows, :] = jnp.where(visible, scores, 0.0)

    def update(group: Any, left: LeftRefs, scores: Array, old_max: Array, old_sum: Array) -> tuple[Array, ...]:
        """Return the new maximum, sum, decay and probs of a group."""
        offset = step.slab_offset(group)
        _, x, knee, exists = hidden_features(step, group, scores, offset, inputs.matrix_1[...], scratch.knee, left.knee)
        hidden = select(exists, leaky_relu_change(x, knee)).astype(t.dtype)
        taps = [roll(hidden, t.pad - w) for w in range(t.width)]
        added = corrected(t, group, scratch.added, offset, left.added, 2 * t.pad)
        change = convolve(t, inputs.matrix_2[...], taps, t.padded_channels) + added
        total = roll(change, LANES - offset.shift) + scores
        lanes = iota(total.shape, 1)
        counts = step.visible(t.group_sublanes, t.padded_heads, group) & step.owned(lanes)
        total = jnp.where(counts, total, MASKED_SCORE)
        new_max = jnp.maximum(old_max, jnp.max(total, 1, keepdims=True))
        decay = jnp.exp(old_max - new_max)
        probs = jnp.where(counts, jnp.exp(total - new_max), 0.0)
        return new_max, old_sum * decay + probs, decay, probs

    def process(iteration: Any, in_first_tile: bool) -> None:
        left = inputs.left if in_first_tile else LeftRefs()
        groups = [iteration * t.unroll + i for i in range(t.unroll)]
        rows_of_groups = [group_rows(t, group) for group in groups]
        # All loads first and all stores last, so that the compiler may overlap the groups in between.
        loaded = [[ref[rows, :] for ref in (scratch.scores, scratch.max, scratch.sum)] for rows in rows_of_groups]
        updated = [update(group, left, *values) for group, values in zip(groups, loaded, strict=True)]
        for rows, values in zip(rows_of_groups, updated, strict=True):
            for ref, value in zip((scratch.max, scratch.sum, scratch.decay, scratch.probs), values, strict=True):
                ref[rows, :] = value

    loop_over_groups(t, tile, needed, process)

    @pl.when(needed)
    def _():
        for head, key_head, rows in heads_of_block(t):
            probs = scratch.probs[rows, :].astype(inputs.v.dtype)
            values = dot(probs, inputs.v[0, 0, key_head], (1, 0))
            scratch.values[head] = scratch.values[head] * scratch.decay[rows, :][:, : t.head_dim] + values

    @pl.when(tile == t.num_tiles - 1)
    def _():
        total = jnp.broadcast_to(jnp.sum(scratch.sum[...], 1, keepdims=True), scratch.sum.shape)
        lse = (scratch.max[...] + jnp.log(total)).reshape(-1, LANES, LANES)
        # All lanes of a sublane hold the same number. Take the diagonal of each 128 x 128: sublanes become lanes.
        diagonal = iota(lse.shape, 1) == iota(lse.shape, 2)
        outputs.lse[0, 0] = jnp.sum(jnp.where(diagonal, lse, 0.0), 1)
        scratch.sum[...] = 1.0 / total
        for head, _, rows in heads_of_block(t):
            out = scratch.values[head] * scratch.sum[rows, :][:, : t.head_dim]
            outputs.out[0, head] = out.astype(outputs.out.dtype)


def left_blocks(t: Tiling, left_knee_PCT: Array, left_added_QHT: Array) -> LeftRefs:
    """Lay out both corrections of the first columns."""
    return LeftRefs(
        tiling.to_left_blocks(t, left_knee_PCT, t.padded_channels),
        tiling.to_left_blocks(t, left_added_QHT, t.padded_heads),
    )


def forward_pass(
    t: Tiling, q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, first: Array, operator: Operator
) -> tuple[Array, Array]:
    """Run the forward kernel.

    Returns:
        The output [B, H, T, K], and the log-sum-exp [B, blocks, block_rows * padded heads / 128, 128].
    """
    batch = q_BTHK.shape[0]
    matrix_1 = tiling.to_matrix(t, operator.scores_WHC, t.padded_heads, t.padded_channels)
    matrix_2 = tiling.to_matrix(t, operator.output_WCH, t.padded_channels, t.padded_heads)
    table = tiling.to_table(t, operator.knee_CN, operator.added_HN)
    left = left_blocks(t, operator.left_knee_PCT, operator.left_added_QHT)
    out = jax.ShapeDtypeStruct((batch, t.num_heads, t.padded_rows, t.head_dim), q_BTHK.dtype)
    lse = jax.ShapeDtypeStruct((batch, t.num_blocks, t.block_sublanes // LANES, LANES), jnp.float32)

    def by_block(x: Array) -> tiling.Blocked:
        return tiling.Blocked(x, pl.BlockSpec((1, *x.shape[1:]), lambda b, i, *_: (i, 0, 0, 0)))

    scores_scratch = tiling.scratch_of(t.block_sublanes, LANES)
    knee_scratch, added_scratch = tiling.sheared_scratch(t)
    outputs = tiling.call(
        t,
        forward_kernel,
        first=first,
        inputs=Inputs(
            q=tiling.by_rows(t, tiling.to_blocks(t, q_BTHK)),
            k=tiling.by_tiles(t, tiling.to_tiles(t, k_BSGK)),
            v=tiling.by_tiles(t, tiling.to_tiles(t, v_BSGK)),
            matrix_1=tiling.whole(t, matrix_1),
            matrix_2=tiling.whole(t, matrix_2),
            left=jax.tree.map(by_block, left),
            slab=tiling.slab_of(t, table),
        ),
        outputs=Outputs(out=tiling.by_rows(t, out), lse=tiling.by_lanes(t, lse)),
        scratch=Scratch(
            scores=scores_scratch,
            probs=scores_scratch,
            decay=scores_scratch,
            max=scores_scratch,
            sum=scores_scratch,
            values=tiling.scratch_of(t.num_heads, t.block_rows, t.head_dim),
            knee=knee_scratch,
            added=added_scratch,
        ),
    )
    return outputs.out[:, :, : t.num_rows], outputs.lse
