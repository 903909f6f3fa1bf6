"""The operator on GPUs: kernels in Pallas (Triton) for bias and convolutions, matmuls and softmax by XLA around them.

In: what `attend_fused` is given, and an `Operator`. Out: attended values. Next: `docs/kernel.md`.

Rows are taken in blocks, one after the other, each computed again in the backward pass. Of a block there is a matmul
for its scores A, one kernel that makes of them what the softmax sees, the softmax, and a matmul with the values. The
hidden channels, C for every pair of a row and a column, are in registers alone. Two more kernels give the gradients.

Triton computes on tiles in registers, and for a convolution that sets three limits: a tile cannot be shifted, a dot has
two dims and no batch, and all sizes are powers of 2, of 16 or more in a dot. So

- a tile is of one row: `LANES` columns x heads, or x channels. Heads and channels are filled up with zeros.
- a convolution is a dot for each of its W taps, M x K x N = columns x heads x channels, or columns x channels x heads.
- what a tap reads w columns away is not shifted but loaded from there; it is in the cache.
- the second convolution reads W hidden columns, so these are computed W times over, each time from shifted scores.
- the gradient of a convolution's kernel is a dot over the columns. For that, taps are loaded side by side, as one tile
  of columns x (taps x heads): (taps x heads) x columns x channels has the 64 rows that Hopper's matrix units want.

A program does not own columns but offsets from the row, offset = column - row, and walks down `ROWS` rows:

    column 0 1 2 3 4 5
    row 0  c . . . . .       the program of c, offsets -1 and 0
    row 1  c c . . . .       the program of b, offsets -3 and -2
    row 2  b c c . . .
    row 3  b b c c . .       so no program is there for what lies after a row or before a window, and those for what
    row 4  a b b c c .       lies to the left of column 0 return at once
    row 5  a a b b c c

What the bias gives is a function of the offset: a program reads the same entries of the tables for all its rows and
sums their gradients in registers. Gradients of tables and of convolution kernels leave once per program, and XLA sums
them: no atomics, the same bits every time.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from dape_jax.kernels.tables import HIGHEST, SLOPE, Operator, vary_alike
from dape_jax.model.scores import Mask, causal_runs, products

BLOCK_ROWS = 128  # rows of a block; memory grows with it, and a block of 2048 keys is about what the L2 cache holds
NUM_RUNS = 4  # of blocks, each with its own number of keys: XLA then computes 5/8 of the square, not all of it
# Compiled for an H200, the kernels of 12 heads, 32 channels and W = 3 need 124, 126 and 214 registers of 255. With 128
# lanes the last has not enough, with 32 none is done by the matrix units of all four warps together.
LANES = 64  # offsets of a program
NUM_WARPS = 4
ROWS = 16  # rows of a program, over which it sums gradients
TOGETHER = 64  # taps x heads in one dot of a kernel's gradient
# W x heads x channels, filled up; above, taps are a loop, as unrolled they would need more than the shared memory.
UNROLLED = 4096


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    first: Int[Array, ""],
    operator: Operator,
    *,
    dtype: jnp.dtype,
    row_stride: int,
    window: int | None,
    interpret: Any,
) -> Float[Array, "B T H K"]:
    """See `kernels.attend_fused`.

    Args:
        q_BTHK: queries.
        k_BSGK: keys.
        v_BSGK: values.
        first: the column at which the first row stands; all rows stand at one of the S columns.
        operator: bias and processor.
        dtype: of the convolutions' operands.
        row_stride: columns from one row to the next.
        window: a row sees columns less than so many before its own.
        interpret: see `attend_fused`.
    """
    batch, num_rows, heads, head_dim = q_BTHK.shape
    num_keys = k_BSGK.shape[1]
    reach = num_keys if window is None else min(window, num_keys)
    channels = operator.hidden_CN.shape[0]
    plan = Plan(jnp.dtype(dtype), heads, channels, operator.width, operator.pad, reach, row_stride, interpret)
    num_blocks = pl.cdiv(num_rows, BLOCK_ROWS)
    block = pl.cdiv(pl.cdiv(num_rows, num_blocks), ROWS) * ROWS
    num_blocks = pl.cdiv(num_rows, block)

    def blocks_of(x: Array, axis: int) -> Array:
        x = jnp.pad(x, [(0, num_blocks * block - num_rows if a == axis else 0) for a in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], num_blocks, block, *x.shape[axis + 1 :]), axis, 0)

    left_PCT = jnp.pad(operator.left_PCT, ((0, int(operator.pad == 0)), (0, 0), (0, 0)))  # not empty, for no kernel can
    # Rows beyond the last are zeros, and are cut off again: nothing depends on them.
    blocks = (
        blocks_of(q_BTHK, 1),
        blocks_of(fill(jnp.moveaxis(left_PCT, 1, 2), 2), 1),
        first + row_stride * block * jnp.arange(num_blocks, dtype=jnp.int32),
    )
    shared = (
        rows_of_kernel(operator.scores_WHC, plan),
        rows_of_kernel(jnp.moveaxis(operator.output_WCH, 1, 2), plan),
        fill(jnp.flip(operator.hidden_CN, 1).T, 1),
        fill(jnp.flip(operator.added_HN, 1).T, 1),
    )

    # Runs need rows that are the last of the keys; with a window, a block reads keys from its own first row's on.
    num_runs = NUM_RUNS if window is not None or num_rows * row_stride == num_keys else 1
    outs = []
    for start, stop, num_read in causal_runs(num_rows, num_keys, block, num_runs, Mask(True, window, row_stride)):

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def rows_of_block(of_block, k, v, shared, num_read=num_read):
            q, left, row = of_block
            begin = jnp.clip(row - (reach - 1), 0, num_keys - num_read)
            if num_read < num_keys and window is None:
                k, v = k[:, :num_read], v[:, :num_read]
            elif num_read < num_keys:
                k, v = (jax.lax.dynamic_slice_in_dim(x, begin, num_read, axis=1) for x in (k, v))
            place = jnp.stack([row, begin])
            scores = products(q, k, jnp.dtype(jnp.float32)) * head_dim**-0.5
            scores: Array = process(plan, *vary_alike(place, scores, *shared, left))
            mask = seen(plan, row, begin, block, num_read)
            # A large finite number, as in `attention.masked_softmax`; NaN where the tables are, for rows without a key.
            masked = jnp.minimum(-0.7 * jnp.finfo(scores.dtype).max, shared[-1][0, 0])
            scores = jnp.where(mask[None, None], scores, masked)
            probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
            probs = probs.reshape(batch, v.shape[2], -1, block, num_read)
            out = jnp.einsum("BGRTS,BSGK->BTGRK", probs, v, preferred_element_type=jnp.float32)
            return out.reshape(batch, block, heads, head_dim).astype(v.dtype)

        of_run = tuple(x[start:stop] for x in blocks)
        outs.append(jax.lax.map(lambda of_block, of=rows_of_block: of(of_block, k_BSGK, v_BSGK, shared), of_run))
    out_blocks = jnp.concatenate(outs)
    return jnp.moveaxis(out_blocks, 0, 1).reshape(batch, num_blocks * block, heads, head_dim)[:, :num_rows]


def size_in_dot(size: int) -> int:
    """The least that a dot can have for it."""
    return max(16, pl.next_power_of_2(size))


def fill(x: Array, *axes: int) -> Array:
    """Add zeros to these dims, up to sizes that a dot can have."""
    return jnp.pad(x, [(0, size_in_dot(size) - size if a in axes else 0) for a, size in enumerate(x.shape)])


def rows_of_kernel(kernel_WHC: Array, plan: "Plan") -> Array:
    """A convolution's kernel as a matrix, taps x heads to channels, filled up; taps to a multiple of `together`."""
    kernel_WHC = jnp.pad(kernel_WHC, ((0, -plan.width % plan.together), (0, 0), (0, 0)))
    return fill(kernel_WHC, 1, 2).reshape(-1, size_in_dot(kernel_WHC.shape[2]))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a block of rows when it is compiled, besides shapes.

    Args:
        dtype: of the dots' operands.
        heads: H.
        channels: C.
        width: W.
        pad: of the operator.
        reach: a row sees columns less than so many before its own.
        row_stride: columns from one row to the next.
        interpret: see `attend_fused`.
    """

    dtype: jnp.dtype
    heads: int
    channels: int
    width: int
    pad: int
    reach: int
    row_stride: int
    interpret: Any

    @property
    def ahead(self) -> int:
        """W - 1 - P, of the operator."""
        return self.width - 1 - self.pad

    @property
    def filled(self) -> int:
        """H, filled up."""
        return size_in_dot(self.heads)

    @property
    def unrolled(self) -> bool:
        """Whether taps are no loop."""
        return self.width * self.filled * size_in_dot(self.channels) <= UNROLLED

    @property
    def together(self) -> int:
        """How many taps one dot can take, side by side with all their heads."""
        return min(max(1, TOGETHER // self.filled), pl.next_power_of_2(self.width))


def seen(plan: Plan, row: Int[Array, ""], begin: Int[Array, ""], num_rows: int, num_keys: int) -> Bool[Array, "T S"]:
    """True where a row sees a key; the first row stands at `row`, the first key at `begin`."""
    offset_TS = begin + jnp.arange(num_keys)[None, :] - (row + plan.row_stride * jnp.arange(num_rows))[:, None]
    return (offset_TS <= 0) & (offset_TS > -plan.reach)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row that a program has come to.

    Args:
        index: in its block.
        column: where it stands.
    """

    index: Array
    column: Array


@dataclasses.dataclass(frozen=True)
class Band:
    """What a program does: how to come to its rows, to read tiles, and to make hidden columns of them.

    Args:
        plan: see there.
        place: columns of the first row and of the first key of the block.
        scores: [H, T, S].
        scores_taps: [together x H, C] of the first convolution's kernel, from a tap on; loaded once, if without a loop.
        output_taps: likewise of the second's.
        hidden: [N, C].
        left: [P, T, C].
        offset_L: the offset of every lane.
        last: the largest of them.
        together: taps in a dot.
    """

    plan: Plan
    place: Any
    scores: Any
    scores_taps: Callable[[Any], Array]
    output_taps: Callable[[Any], Array]
    hidden: Any
    left: Any
    offset_L: Array
    last: Array
    together: int

    def walk(self, visit: Callable[[Row, Any], Any], carry: Any) -> Any:
        """`carry = visit(row, carry)` for the program's rows, if there is a column for any of them."""
        start = pl.program_id(1) * ROWS

        def step(i: Array, carry: Any) -> Any:
            index = start + i
            return visit(Row(index, self.place[0] + self.plan.row_stride * index), carry)

        last_row = self.place[0] + self.plan.row_stride * (start + ROWS - 1)
        num_rows = jnp.where(last_row + self.last >= 0, jnp.int32(ROWS), jnp.int32(0))
        return jax.lax.fori_loop(jnp.int32(0), num_rows, step, carry)

    def sum_taps(self, term: Callable[[Any], Array], total: Array) -> Array:
        """The sum of `total` and a term for every tap, or for the first of every few that are `together`."""
        if self.plan.unrolled:
            for first in range(0, self.plan.width, self.together):
                total += term(first)
            return total
        num_terms, step = jnp.int32(pl.cdiv(self.plan.width, self.together)), jnp.int32(self.together)
        return jax.lax.fori_loop(jnp.int32(0), num_terms, lambda i, total: total + term(i * step), total)

    def keys(self, ref: Any, row: Row, shift: Any = 0, together: int = 1, step: int = 1) -> tuple[Any, Array]:
        """Where in [H, T, S] a tile is, [L, together x H], and which of it the row sees; see `read`."""
        inner = jax.lax.iota(jnp.int32, together * self.plan.filled)
        head, tap = inner % self.plan.filled, inner // self.plan.filled
        offset = self.offset_L[:, None] + (shift + step * tap)[None, :]
        index = row.column + offset - self.place[1]
        seen = (offset <= 0) & (offset > -self.plan.reach) & (index >= 0) & (index < ref.shape[2])
        return ref.at[head[None, :], row.index, index], seen & (head < self.plan.heads)[None, :]

    def read(self, ref: Any, row: Row, shift: Any = 0, together: int = 1, step: int = 1) -> Array:
        """[L, together x H] of [H, T, S]; 0 where the row sees no key.

        Args:
            ref: scores, or their gradient.
            row: which.
            shift: how far to the right of the lanes.
            together: how often.
            step: how far to the right of that the next is.
        """
        at, seen = self.keys(ref, row, shift, together, step)
        return triton.load(at, mask=seen, other=0)

    def entries(self, table: Any, shift: Any = 0) -> Array:
        """[L, ..] of a table [N, ..], which ends with the largest offset; 0 where it has none."""
        index_L = self.offset_L + (shift + table.shape[0] - 1 - self.plan.ahead)
        inside_L = (index_L >= 0) & (index_L < table.shape[0])
        return triton.load(table.at[index_L[:, None], _all(table)], mask=inside_L[:, None], other=0)

    def edge(self, left: Any, row: Row, shift: Any = 0) -> tuple[Any, Array]:
        """Where in [P, T, C] the columns are, [L, C], and which of them are in it."""
        column_L = row.column + self.offset_L + shift
        inside_L = (column_L >= 0) & (column_L < self.plan.pad)
        channels = _all(left)
        return left.at[column_L[:, None], row.index, channels], inside_L[:, None] & (channels >= 0)

    def dot(self, a: Array, b: Array, trans_a: bool = False, trans_b: bool = False) -> Array:
        """A matmul that accumulates in float32."""
        a, b = a.astype(self.plan.dtype), b.astype(self.plan.dtype)
        precision = HIGHEST
        if self.plan.dtype == jnp.float32 and not self.plan.interpret:
            # The sum of three products of TF32, to 2^-21: without matrix units the tiles do not fit the registers.
            precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return triton.dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=precision)

    def read_by(self, row: Row, shift: Any, first: Any) -> Array:
        """What hidden columns read by the tap `first`, and by those `together` with it."""
        return self.read(self.scores, row, shift + first - self.plan.pad, self.together)

    def readers_of(self, d_out: Any, row: Row, shift: Any, first: Any) -> Array:
        """Of the columns that read hidden columns by these taps, the gradients."""
        return self.read(d_out, row, shift + self.plan.pad - first, self.together, step=-1)

    def before(self, row: Row, shift: Any = 0) -> tuple[Array, Array]:
        """[L, C]: hidden columns before LeakyReLU, `shift` to the right of the lanes; and which of them there are."""
        y = self.entries(self.hidden, shift)
        if self.plan.pad:
            at, inside = self.edge(self.left, row, shift)
            y -= triton.load(at, mask=inside, other=0)
        y = self.sum_taps(lambda w: self.dot(self.read_by(row, shift, w), self.scores_taps(w)), y)
        return y, (row.column + self.offset_L + shift >= 0)[:, None]

    def gradient_before(self, d_out: Any, row: Row, y: Array, exists: Array, shift: Any = 0) -> Array:
        """[L, C]: the gradient of `before`, from that of what the softmax sees, [H, T, S]."""

        def term(w: Any) -> Array:
            return self.dot(self.readers_of(d_out, row, shift, w), self.output_taps(w))

        d_hidden = self.sum_taps(term, jnp.zeros_like(y))
        return jnp.where(exists, jnp.where(y >= 0, d_hidden, SLOPE * d_hidden), 0)


def _all(ref: Any) -> Array:
    """0, 1, .. for the last dim."""
    return jax.lax.iota(jnp.int32, ref.shape[-1])[None, :]


def leaky_relu(y: Array, exists: Array) -> Array:
    """LeakyReLU where there is a column; 0, the padding of the second convolution, elsewhere."""
    return jnp.where(exists, jnp.maximum(y, SLOPE * y), 0)


def make_band(
    place,
    scores,
    scores_kernel,
    output_kernel,
    hidden,
    left,
    *,
    plan: Plan,
    num_lanes: int,
    largest: int = 0,
    together: int = 1,
) -> Band:
    """Of the refs that all kernels have; the first program has the offset `largest` and those before it."""

    def taps_of(kernel: Any) -> Callable[[Any], Array]:
        def load(first: Any) -> Array:
            return kernel[pl.ds(first * plan.filled, together * plan.filled), :]

        if not plan.unrolled:
            return load
        return {first: load(first) for first in range(0, plan.width, together)}.__getitem__

    last = largest - pl.program_id(2) * num_lanes
    offset_L = last - (num_lanes - 1) + jax.lax.iota(jnp.int32, num_lanes)
    return Band(
        plan, place, scores, taps_of(scores_kernel), taps_of(output_kernel), hidden, left, offset_L, last, together
    )


def forward_kernel(
    place, scores, scores_kernel, output_kernel, hidden, added, left, out, *, plan: Plan, num_lanes: int
) -> None:
    """out[j] = scores[j] + added + sum over w of LeakyReLU(before[j + w - P]) output_kernel[w]^T."""
    band = make_band(place, scores, scores_kernel, output_kernel, hidden, left, plan=plan, num_lanes=num_lanes)

    def visit(row: Row, _: None) -> None:
        def term(w: Any) -> Array:
            y, exists = band.before(row, w - plan.pad)
            return band.dot(leaky_relu(y, exists), band.output_taps(w), trans_b=True)

        z = band.read(scores, row).astype(jnp.float32) + band.entries(added)
        at, seen = band.keys(out, row)
        triton.store(at, band.sum_taps(term, z), mask=seen)

    band.walk(visit, None)


def scores_gradient_kernel(
    place, scores, scores_kernel, output_kernel, hidden, left, d_out, d_scores, *, plan: Plan, num_lanes: int
) -> None:
    """d_scores[j] = d_out[j] + sum over w of d_before[j - w + P] scores_kernel[w]^T."""
    band = make_band(place, scores, scores_kernel, output_kernel, hidden, left, plan=plan, num_lanes=num_lanes)

    def visit(row: Row, _: None) -> None:
        def term(w: Any) -> Array:
            shift = plan.pad - w
            d_y = band.gradient_before(d_out, row, *band.before(row, shift), shift)
            return band.dot(d_y, band.scores_taps(w), trans_b=True)

        d_z = band.sum_taps(term, band.read(d_out, row))
        at, seen = band.keys(d_scores, row)
        triton.store(at, d_z.astype(d_scores.dtype), mask=seen)

    band.walk(visit, None)


def parameters_gradient_kernel(
    place,
    scores,
    scores_kernel,
    output_kernel,
    hidden,
    left,
    d_out,
    d_left,
    d_scores_kernel,
    d_output_kernel,
    d_hidden,
    d_added,
    *,
    plan: Plan,
    num_lanes: int,
) -> None:
    """Sums over the program's rows, of every hidden column once: up to `ahead` after the row.

    Of the convolutions' kernels a program has the taps that one dot can have, of the others all.
    """
    refs = (place, scores, scores_kernel, output_kernel, hidden, left)
    band = make_band(*refs, plan=plan, num_lanes=num_lanes, largest=plan.ahead, together=plan.together)
    own = 0 if plan.together >= plan.width else pl.program_id(3) * plan.together

    def visit(row: Row, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        of_scores, of_output, of_hidden, of_added = carry
        y, exists = band.before(row)
        d_y = band.gradient_before(d_out, row, y, exists)
        of_scores += band.dot(band.read_by(row, 0, own), d_y, trans_a=True)
        of_output += band.dot(band.readers_of(d_out, row, 0, own), leaky_relu(y, exists), trans_a=True)
        of_added += band.read(d_out, row)
        at, inside = band.edge(d_left, row)
        triton.store(at, -d_y, mask=inside)  # last: what is loaded twice is loaded once only if no store is between
        return of_scores, of_output, of_hidden + d_y, of_added

    outs = (d_scores_kernel, d_output_kernel, d_hidden, d_added)
    totals = band.walk(visit, tuple(jnp.zeros(out.shape, jnp.float32) for out in outs))
    for out, total in zip(outs, totals, strict=True):
        out[...] = total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def process(
    plan: Plan,
    place: Int[Array, "2"],
    scores_BHTS: Float[Array, "B H T S"],
    scores_XC: Float[Array, "X C"],
    output_XC: Float[Array, "X C"],
    hidden_NC: Float[Array, "N C"],
    added_NH: Float[Array, "N H_filled"],
    left_PTC: Float[Array, "P T C"],
) -> Float[Array, "B H T S"]:
    """What the softmax sees of a block of scores, where a row sees a key; anything, NaN too, elsewhere.

    Args:
        plan: see there.
        place: columns of the first row and of the first key.
        scores_BHTS: A, its dtype that of the dots.
        scores_XC: the first convolution; see `rows_of_kernel`.
        output_XC: the second, transposed.
        hidden_NC: as in `Operator`, filled up, by growing offset: the farthest distance first.
        added_NH: likewise.
        left_PTC: likewise, of these rows.
    """
    return _process_forward(plan, place, scores_BHTS, scores_XC, output_XC, hidden_NC, added_NH, left_PTC)[0]


def _process_forward(plan: Plan, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    place, scores_BHTS, *kernels, hidden_NC, added_NH, left_PTC = operands
    kernels = [kernel.astype(plan.dtype) for kernel in kernels]
    of_block = (place, scores_BHTS, *kernels, hidden_NC, added_NH, left_PTC)
    num_offsets = min(plan.reach, scores_BHTS.shape[3])
    (out_BHTS,) = _call(forward_kernel, plan, of_block, num_offsets, of_sequence={scores_BHTS.shape: jnp.float32})
    return out_BHTS, operands


def _process_backward(plan: Plan, operands: tuple[Array, ...], d_out_BHTS: Array) -> tuple[Array | None, ...]:
    place, scores_BHTS, scores_XC, output_XC, hidden_NC, added_NH, left_PTC = operands
    kernels = (scores_XC.astype(plan.dtype), output_XC.astype(plan.dtype))
    of_block = (place, scores_BHTS, *kernels, hidden_NC, left_PTC, d_out_BHTS)
    shape, dtype = scores_BHTS.shape, scores_BHTS.dtype
    num_offsets = min(plan.reach, shape[3])
    (d_scores_BHTS,) = _call(scores_gradient_kernel, plan, of_block, num_offsets, of_sequence={shape: dtype})
    num_offsets += plan.width - 1  # hidden columns are read by columns next to them
    lanes, taps = lanes_of(num_offsets), (plan.together * plan.filled, scores_XC.shape[1])
    d_left_BPTC, d_scores_kernel, d_output_kernel, d_hidden, d_added = _call(
        parameters_gradient_kernel,
        plan,
        of_block,
        num_offsets,
        of_sequence={(shape[0], *left_PTC.shape): jnp.float32},
        of_program=[taps, taps, (lanes, hidden_NC.shape[1]), (lanes, added_NH.shape[1])],
        num_groups=pl.cdiv(plan.width, plan.together),
    )

    def table(of_program: Array) -> Array:
        # Programs go from the largest offset down, and both they and the table begin with the same.
        flipped = jnp.flip(of_program[:, :, :, 0].sum((0, 1)), 1).reshape(-1, of_program.shape[-1])[: len(hidden_NC)]
        return jnp.flip(jnp.pad(flipped, ((0, len(hidden_NC) - len(flipped)), (0, 0))), 0)

    # Programs have stored what belongs to their offsets, and of the first `pad` columns some may lie farther back.
    column_P = jnp.arange(left_PTC.shape[0])
    offset_PT = column_P[:, None] - (place[0] + plan.row_stride * jnp.arange(shape[2]))[None, :]
    stored_PT = (offset_PT <= plan.ahead) & (offset_PT > plan.ahead - d_hidden.shape[2] * lanes)
    stored_PT &= (column_P < plan.pad)[:, None]
    mask_TS = seen(plan, place[0], place[1], shape[2], shape[3])
    return (
        None,
        jnp.where(mask_TS[None, None], d_scores_BHTS, 0),
        d_scores_kernel.sum((0, 1, 2)).reshape(scores_XC.shape),
        d_output_kernel.sum((0, 1, 2)).reshape(output_XC.shape),
        table(d_hidden),
        table(d_added),
        jnp.where(stored_PT[None, :, :, None], d_left_BPTC, 0).sum(0),
    )


process.defvjp(_process_forward, _process_backward)


def lanes_of(num_offsets: int) -> int:
    """L, of programs that have as many offsets between them."""
    return min(LANES, size_in_dot(num_offsets))


def _call(
    kernel: Callable[..., None],
    plan: Plan,
    operands: tuple[Array, ...],
    num_offsets: int,
    of_sequence: dict[tuple[int, ...], Any],
    of_program: Sequence[tuple[int, ...]] = (),
    num_groups: int = 1,
) -> Sequence[Array]:
    """Run a kernel for every sequence, every `ROWS` rows, and all offsets.

    Args:
        kernel: to run; refs of operands and outputs, and the plan.
        plan: see there.
        operands: what is in place first: `place`, scores. Those of four dims have a sequence for each of the first.
        num_offsets: how many offsets to cover, from the largest down.
        of_sequence: shapes and dtypes of outputs that all programs of a sequence share.
        of_program: shapes of outputs that are a program's own.
        num_groups: of taps, with a program for each.

    Returns:
        The outputs; those of programs are [B, T / ROWS, bands, groups, ..] and float32.
    """
    scores_BHTS = operands[1]
    num_bands = pl.cdiv(num_offsets, lanes_of(num_offsets))
    grid = (scores_BHTS.shape[0], scores_BHTS.shape[2] // ROWS, num_bands, num_groups)
    axes = jax.typeof(scores_BHTS).manual_axis_type

    def shared(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape[1:]), lambda b, *_: (b, *[0] * (len(shape) - 1)))

    def own(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((*[None] * len(grid), *shape), lambda *program: (*program, *[0] * len(shape)))

    return pl.pallas_call(
        functools.partial(kernel, plan=plan, num_lanes=lanes_of(num_offsets)),
        grid=grid,
        in_specs=[shared(x.shape) if x.ndim == 4 else pl.BlockSpec() for x in operands],
        out_specs=[*map(shared, of_sequence), *map(own, of_program)],
        out_shape=[
            *(jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes) for shape, dtype in of_sequence.items()),
            *(jax.ShapeDtypeStruct((*grid, *shape), jnp.float32, manual_axis_type=axes) for shape in of_program),
        ],
        compiler_params=triton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=plan.interpret,
        name=f"dape_{kernel.__name__}",
    )(*operands)
