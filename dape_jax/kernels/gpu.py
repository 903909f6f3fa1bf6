"""Fused operator on GPUs: Pallas (Triton) kernels for bias and convolutions; matmuls and softmax by XLA.

In: the arguments of `attend_fused`, and an `Operator`. Out: attended values. Next: `docs/kernel.md`.

Rows are processed in blocks, which are recomputed in the backward pass. A block needs a matmul for its scores A, one
kernel that computes the input of the softmax, the softmax, and a matmul with the values. The hidden channels, C for
every pair of a row and a column, exist only in registers. Two more kernels compute the gradients. Memory limits the
rows of a block: see `scores.rows_in_block`.

Triton computes on tiles in registers, with three limits for a convolution: a tile cannot be shifted, a dot has two dims
and no batch dim, and all sizes are powers of 2, at least 16 in a dot. Therefore

- a tile belongs to one row: `BAND_WIDTH` columns x heads, or x channels. Heads and channels are padded with zeros.
- a convolution is one dot per tap, M x K x N = columns x heads x channels, or columns x channels x heads.
- a tap that reads w columns away loads the shifted tile again, from the cache.
- the second convolution reads W hidden columns, so they are computed W times, each time from shifted scores.
- the gradient of a convolution's kernel is a dot over the columns. Several taps are loaded side by side, as one tile of
  columns x (taps x heads), so that the dot has the 64 rows, taps x heads, that Hopper's tensor cores need.

A program owns a band of offsets, offset = column - row, for `PROGRAM_ROWS` rows:

    column 0 1 2 3 4 5
    row 0  c . . . . .       program c: offsets -1 and 0
    row 1  c c . . . .       program b: offsets -3 and -2
    row 2  b c c . . .
    row 3  b b c c . .       Columns after a row or before a window have no program.
    row 4  a b b c c .       Programs that have only columns left of column 0 return immediately.
    row 5  a a b b c c

Where a row sees no key, the row's first program (c) stores a constant.

The bias contributes a function of the offset, so a program reads the same table entries for all its rows and sums their
gradients in registers. Each program writes its partial gradients of tables and convolution kernels, and XLA sums
them: no atomics are used, and results are bitwise reproducible.

Shapes: O offsets of a band · N distances of a table · P and Q = 2 P columns of the left corrections · X = taps x padded
heads.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from dape_jax.kernels.tables import HIGHEST, Operator
from dape_jax.model.processors import SLOPE, leaky_relu_change, leaky_relu_change_gradient
from dape_jax.model.scores import Mask, causal_runs, products, rows_in_block
from dape_jax.sharding import full_precision, vary_alike

NUM_RUNS = 4  # runs of blocks, each with its own number of keys: XLA computes 5/8 of the square, not all of it
# Compiled for an H200, the kernels of 12 heads, 32 channels and W = 3 need 124, 126 and 214 of 255 registers. With 128
# offsets the last kernel runs out of registers; with 32, no dot occupies the tensor cores of all four warps.
BAND_WIDTH = 64  # offsets of a program
NUM_WARPS = 4
PROGRAM_ROWS = 16  # rows of a program, over which it sums gradients
DOT_ROWS = 64  # taps x heads in one dot of the gradient of a convolution's kernel
# Largest W x heads x channels, padded, whose taps are unrolled. Larger unrolled loops exceed the shared memory.
MAX_UNROLLED = 4096


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
    """Return attention computed by the kernels. Row 0 is at column `first`, every row at one of the S columns."""
    batch, num_rows, heads, head_dim = q_BTHK.shape
    num_keys = k_BSGK.shape[1]
    reach = num_keys if window is None else min(window, num_keys)
    channels = operator.knee_CN.shape[0]
    t = Tiling(jnp.dtype(dtype), heads, channels, operator.width, operator.pad, reach, row_stride, interpret)
    num_blocks = pl.cdiv(num_rows, rows_in_block(batch * heads, num_rows, num_keys, NUM_RUNS))
    block = pl.cdiv(pl.cdiv(num_rows, num_blocks), PROGRAM_ROWS) * PROGRAM_ROWS
    num_blocks = pl.cdiv(num_rows, block)

    def to_blocks(x: Array, dim: int) -> Array:
        x = jnp.pad(x, [(0, num_blocks * block - num_rows if i == dim else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:dim], num_blocks, block, *x.shape[dim + 1 :]), dim, 0)

    def left_blocks(left_PXT: Array) -> Array:
        left_PXT = jnp.pad(left_PXT, ((0, int(operator.pad == 0)), (0, 0), (0, 0)))  # Pallas needs non-empty arrays
        return to_blocks(pad_for_dot(jnp.moveaxis(left_PXT, 1, 2), 2), 1)

    # Rows are padded with zeros, which are removed from the result.
    blocks = (
        to_blocks(q_BTHK, 1),
        left_blocks(operator.left_knee_PCT),
        left_blocks(operator.left_added_QHT),
        first + row_stride * block * jnp.arange(num_blocks, dtype=jnp.int32),
    )
    shared = (
        to_matrix(t, operator.scores_WHC),
        to_matrix(t, jnp.moveaxis(operator.output_WCH, 1, 2)),
        pad_for_dot(jnp.flip(operator.knee_CN, 1).T, 1),
        pad_for_dot(jnp.flip(operator.added_HN, 1).T, 1),
    )

    # Without a window, more than one run needs rows at the last key positions.
    num_runs = NUM_RUNS if window is not None or num_rows * row_stride == num_keys else 1
    outs = []
    for start, stop, num_read in causal_runs(num_rows, num_keys, block, num_runs, Mask(True, window, row_stride)):

        @jax.checkpoint
        def attend_block(block_inputs, k, v, shared, num_read=num_read):
            q, *left, row = block_inputs
            begin = jnp.clip(row - (reach - 1), 0, num_keys - num_read)
            if num_read < num_keys and window is None:
                k, v = k[:, :num_read], v[:, :num_read]
            elif num_read < num_keys:
                k, v = (jax.lax.dynamic_slice_in_dim(x, begin, num_read, axis=1) for x in (k, v))
            scores: Array = process(t, *vary_alike(jnp.stack([row, begin]), q, k, *shared, *left))
            probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
            probs = probs.reshape(batch, v.shape[2], -1, block, num_read)
            precision = full_precision(v.dtype)
            out = jnp.einsum("BGRTS,BSGK->BTGRK", probs, v, precision=precision, preferred_element_type=jnp.float32)
            return out.reshape(batch, block, heads, head_dim).astype(v.dtype)

        run = tuple(x[start:stop] for x in blocks)
        outs.append(
            jax.lax.map(lambda block_inputs, attend=attend_block: attend(block_inputs, k_BSGK, v_BSGK, shared), run)
        )
    out_blocks = jnp.concatenate(outs)
    return jnp.moveaxis(out_blocks, 0, 1).reshape(batch, num_blocks * block, heads, head_dim)[:, :num_rows]


def dot_size(size: int) -> int:
    """Return the smallest valid size of a dim of a dot that is at least `size`."""
    return max(16, pl.next_power_of_2(size))


def pad_for_dot(x: Array, *dims: int) -> Array:
    """Pad these dims with zeros to valid sizes of a dot."""
    return jnp.pad(x, [(0, dot_size(size) - size if i in dims else 0) for i, size in enumerate(x.shape)])


def to_matrix(t: "Tiling", kernel_WHC: Array) -> Array:
    """Reshape a convolution's kernel to [X, channels], both padded, taps to a multiple of `taps_per_dot`."""
    kernel_WHC = jnp.pad(kernel_WHC, ((0, -t.width % t.taps_per_dot), (0, 0), (0, 0)))
    return pad_for_dot(kernel_WHC, 1, 2).reshape(-1, dot_size(kernel_WHC.shape[2]))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static parameters of the computation of a block of rows, without shapes of arrays."""

    dtype: jnp.dtype  # dtype of the dots' operands
    heads: int  # H
    channels: int  # C
    width: int  # W
    pad: int  # columns that a convolution reads to its left
    reach: int  # columns that a row sees, including its own
    row_stride: int  # columns between neighbouring rows
    interpret: Any  # see `kernels.attend_fused`

    @property
    def ahead(self) -> int:
        """Return the number of columns that a convolution reads to its right."""
        return self.width - 1 - self.pad

    @property
    def padded_heads(self) -> int:
        """Return H, padded for a dot."""
        return dot_size(self.heads)

    @property
    def unrolled(self) -> bool:
        """Return whether the loop over taps is unrolled."""
        return self.width * self.padded_heads * dot_size(self.channels) <= MAX_UNROLLED

    @property
    def taps_per_dot(self) -> int:
        """Return the number of taps, side by side with all their heads, of one dot."""
        return min(max(1, DOT_ROWS // self.padded_heads), pl.next_power_of_2(self.width))


@dataclasses.dataclass(frozen=True)
class Row:
    """Row that a program is processing."""

    index: Array  # index in the block
    column: Array  # column among the keys


@dataclasses.dataclass(frozen=True)
class Band:
    """Band of offsets of a program: iterates over its rows, reads tiles, and computes hidden features from them.

    `scores_taps` and `output_taps` return [taps_per_dot * H, C] of a convolution's kernel, starting at a tap. If taps
    are unrolled, they are loaded only once.
    """

    t: Tiling
    starts: Any  # columns of the block's first row and first key
    scores: Any  # [H, T, S]
    scores_taps: Callable[[Any], Array]
    output_taps: Callable[[Any], Array]
    knee: Any  # [N, C]
    left_knee: Any  # [P, T, C]
    offset_O: Array
    last: Array  # largest offset
    taps_per_dot: int

    def walk(self, visit: Callable[[Row, Any], Any], carry: Any) -> Any:
        """Compute `carry = visit(row, carry)` over the program's rows, or over none if no row has a column."""
        start = pl.program_id(1) * PROGRAM_ROWS

        def step(i: Array, carry: Any) -> Any:
            index = start + i
            return visit(Row(index, self.starts[0] + self.t.row_stride * index), carry)

        last_row = self.starts[0] + self.t.row_stride * (start + PROGRAM_ROWS - 1)
        num_rows = jnp.where(last_row + self.last >= 0, jnp.int32(PROGRAM_ROWS), jnp.int32(0))
        return jax.lax.fori_loop(jnp.int32(0), num_rows, step, carry)

    def sum_taps(self, term: Callable[[Any], Array], total: Array) -> Array:
        """Add a term to `total` for every tap, or for the first of every `taps_per_dot` taps."""
        if self.t.unrolled:
            for first in range(0, self.t.width, self.taps_per_dot):
                total += term(first)
            return total
        num_terms, step = jnp.int32(pl.cdiv(self.t.width, self.taps_per_dot)), jnp.int32(self.taps_per_dot)
        return jax.lax.fori_loop(jnp.int32(0), num_terms, lambda i, total: total + term(i * step), total)

    def locate(self, ref: Any, row: Row, shift: Any = 0, taps: int = 1, step: int = 1) -> tuple[Any, Array]:
        """Return the indices of a tile in [H, T, S], and a mask of those that the row sees; see `read`."""
        inner = jax.lax.iota(jnp.int32, taps * self.t.padded_heads)
        head, tap = inner % self.t.padded_heads, inner // self.t.padded_heads
        offset = self.offset_O[:, None] + (shift + step * tap)[None, :]
        index = row.column + offset - self.starts[1]
        mask = (offset <= 0) & (offset > -self.t.reach) & (index >= 0) & (index < ref.shape[2])
        return ref.at[head[None, :], row.index, index], mask & (head < self.t.heads)[None, :]

    def fill(self, ref: Any, value: Any) -> None:
        """Store a value in [H, T, S] where the program's rows see no key, if this is their first program."""
        head = jax.lax.iota(jnp.int32, self.t.padded_heads)[None, :]
        size, num_keys = self.offset_O.shape[0], jnp.int32(ref.shape[2])
        index_O = self.offset_O - self.last + (size - 1)  # 0 .. size - 1; a second iota would need 40 more registers

        def visit(row: Row, _: None) -> None:
            own = row.column - self.starts[1]  # index of the row's own key

            def store(tile: Array, _: None) -> None:
                index = (tile * size + index_O)[:, None]
                unseen = ((index > own) | (index <= own - self.t.reach)) & (index < num_keys)
                values = jnp.full((size, self.t.padded_heads), value, ref.dtype)
                triton.store(ref.at[head, row.index, index], values, mask=unseen & (head < self.t.heads))

            for begin, end in ((0, own - self.t.reach + 1), (own + 1, num_keys)):
                num_tiles = jnp.where(self.last == 0, pl.cdiv(jnp.clip(end, 0, num_keys), size), 0)
                jax.lax.fori_loop(jnp.maximum(begin, 0) // size, num_tiles, store, None)

        self.walk(visit, None)

    def read(self, ref: Any, row: Row, shift: Any = 0, taps: int = 1, step: int = 1) -> Array:
        """Load a tile [O, taps * H] of [H, T, S], with 0 where the row sees no key.

        The first copy of the band is `shift` columns to its right; each further copy is `step` after the previous one.
        """
        elements, mask = self.locate(ref, row, shift, taps, step)
        return triton.load(elements, mask=mask, other=0)

    def read_table(self, table: Any, shift: Any = 0) -> Array:
        """Load [O, ..] of a table [N, ..] whose last entry has the largest offset, with 0 outside the table."""
        index_O = self.offset_O + (shift + table.shape[0] - 1 - self.t.ahead)
        inside_O = (index_O >= 0) & (index_O < table.shape[0])
        return triton.load(table.at[index_O[:, None], _last_dim(table)], mask=inside_O[:, None], other=0)

    def locate_left(self, left: Any, row: Row, shift: Any = 0) -> tuple[Any, Array]:
        """Return the elements [O, X] of [P, T, X] at the band's columns, and a mask of those that exist."""
        column_O = row.column + self.offset_O + shift
        inside_O = (column_O >= 0) & (column_O < (left.shape[0] if self.t.pad else 0))
        inner = _last_dim(left)
        return left.at[column_O[:, None], row.index, inner], inside_O[:, None] & (inner >= 0)  # broadcast to [O, X]

    def read_corrected(self, table: Any, left: Any, row: Row, shift: Any = 0) -> Array:
        """Load [O, X] of a table [N, X], minus its correction [P, T, X] in the first columns."""
        entries = self.read_table(table, shift)
        if self.t.pad:
            elements, mask = self.locate_left(left, row, shift)
            entries -= triton.load(elements, mask=mask, other=0)
        return entries

    def dot(self, a: Array, b: Array, trans_a: bool = False, trans_b: bool = False) -> Array:
        """Return a matmul accumulated in float32."""
        a, b = a.astype(self.t.dtype), b.astype(self.t.dtype)
        precision = HIGHEST
        if self.t.dtype == jnp.float32 and not self.t.interpret:
            # Sum of three TF32 products, accurate to 2^-21: without tensor cores the tiles exceed the registers.
            precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return triton.dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=precision)

    def read_inputs(self, row: Row, shift: Any, first: Any) -> Array:
        """Load the scores that hidden columns read by tap `first` and the taps in the same dot."""
        return self.read(self.scores, row, shift + first - self.t.pad, self.taps_per_dot)

    def read_output_gradients(self, d_out: Any, row: Row, shift: Any, first: Any) -> Array:
        """Load the gradients of the columns that read hidden columns by these taps."""
        return self.read(d_out, row, shift + self.t.pad - first, self.taps_per_dot, step=-1)

    def features(self, row: Row, shift: Any = 0) -> tuple[Array, Array, Array]:
        """Return features of the scores, knees of LeakyReLU, and a mask of existing columns, `shift` to the right."""
        knee = self.read_corrected(self.knee, self.left_knee, row, shift)
        y = self.sum_taps(
            lambda w: self.dot(self.read_inputs(row, shift, w), self.scores_taps(w)), jnp.zeros_like(knee)
        )
        return y, knee, (row.column + self.offset_O + shift >= 0)[:, None]

    def features_gradient(
        self, d_out: Any, row: Row, y: Array, knee: Array, exists: Array, shift: Any = 0
    ) -> tuple[Array, Array]:
        """Return the gradients of features and knees, [O, C], given the gradient of the softmax's input, [H, T, S]."""

        def term(w: Any) -> Array:
            return self.dot(self.read_output_gradients(d_out, row, shift, w), self.output_taps(w))

        d_hidden = jnp.where(exists, self.sum_taps(term, jnp.zeros_like(y)), 0)
        d_features = leaky_relu_change_gradient(y, knee, d_hidden)
        return d_features, d_features / (1 - SLOPE)  # see `tables.Operator`


def _last_dim(ref: Any) -> Array:
    """Return the indices of the last dim, [1, size]."""
    return jax.lax.iota(jnp.int32, ref.shape[-1])[None, :]


def activate(y: Array, knee: Array, exists: Array) -> Array:
    """Apply the nonlinearity. Columns that do not exist become 0, the padding of the second convolution."""
    return jnp.where(exists, leaky_relu_change(y, knee), 0)


def make_band(refs: Sequence[Any], t: Tiling, band_offsets: int, largest: int = 0, taps_per_dot: int = 1) -> Band:
    """Return the program's band, given the refs common to all kernels. The first program has the `largest` offset."""
    starts, scores, scores_kernel, output_kernel, knee, left_knee = refs

    def taps_of(kernel: Any) -> Callable[[Any], Array]:
        def load(first: Any) -> Array:
            return kernel[pl.ds(first * t.padded_heads, taps_per_dot * t.padded_heads), :]

        if not t.unrolled:
            return load
        return {first: load(first) for first in range(0, t.width, taps_per_dot)}.__getitem__

    last = largest - pl.program_id(2) * band_offsets
    offset_O = last - (band_offsets - 1) + jax.lax.iota(jnp.int32, band_offsets)
    taps = taps_of(scores_kernel), taps_of(output_kernel)
    return Band(t, starts, scores, *taps, knee, left_knee, offset_O, last, taps_per_dot)


def forward_kernel(
    starts: Any,
    scores: Any,
    scores_kernel: Any,
    output_kernel: Any,
    knee: Any,
    added: Any,
    left_knee: Any,
    left_added: Any,
    out: Any,
    *,
    t: Tiling,
    band_offsets: int,
) -> None:
    """Compute out[j] = scores[j] + added + sum over w of activate(features[j + w - P]) output_kernel[w]^T."""
    band = make_band((starts, scores, scores_kernel, output_kernel, knee, left_knee), t, band_offsets)

    def visit(row: Row, _: None) -> None:
        def term(w: Any) -> Array:
            return band.dot(activate(*band.features(row, w - t.pad)), band.output_taps(w), trans_b=True)

        z = band.read(scores, row).astype(jnp.float32) + band.read_corrected(added, left_added, row)
        elements, mask = band.locate(out, row)
        triton.store(elements, band.sum_taps(term, z), mask=mask)

    # A large finite number, as in `scores.masked_softmax`; NaN if the tables are NaN, also for rows without a key.
    band.fill(out, jnp.minimum(-0.7 * float(jnp.finfo(out.dtype).max), added[0, 0]))
    band.walk(visit, None)


def scores_gradient_kernel(*refs: Any, t: Tiling, band_offsets: int) -> None:
    """Compute d_scores[j] = d_out[j] + sum over w of d_features[j - w + P] scores_kernel[w]^T."""
    *common, d_out, d_scores = refs
    band = make_band(common, t, band_offsets)

    def visit(row: Row, _: None) -> None:
        def term(w: Any) -> Array:
            shift = t.pad - w
            d_y, _ = band.features_gradient(d_out, row, *band.features(row, shift), shift)
            return band.dot(d_y, band.scores_taps(w), trans_b=True)

        d_z = band.sum_taps(term, band.read(d_out, row))
        elements, mask = band.locate(d_scores, row)
        triton.store(elements, d_z.astype(d_scores.dtype), mask=mask)

    band.fill(d_scores, 0)
    band.walk(visit, None)


def parameters_gradient_kernel(*refs: Any, t: Tiling, band_offsets: int) -> None:
    """Sum the gradients of the parameters over the program's rows.

    Every hidden column must be counted once, so bands begin `ahead` columns after a row. For the convolutions' kernels,
    the last grid axis divides the taps into groups of `taps_per_dot`.
    """
    *common, d_out, d_left_knee, d_left_added, d_scores_kernel, d_output_kernel, d_knee, d_added = refs
    band = make_band(common, t, band_offsets, largest=t.ahead, taps_per_dot=t.taps_per_dot)
    first_tap = 0 if t.taps_per_dot >= t.width else pl.program_id(3) * t.taps_per_dot

    def visit(row: Row, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        d_scores_kernel, d_output_kernel, d_knee, d_added = carry
        features = band.features(row)
        d_y, d_knees = band.features_gradient(d_out, row, *features)
        d_scores_kernel += band.dot(band.read_inputs(row, 0, first_tap), d_y, trans_a=True)
        d_output_kernel += band.dot(
            band.read_output_gradients(d_out, row, 0, first_tap), activate(*features), trans_a=True
        )
        d_outs = band.read(d_out, row)
        # Stored last: the compiler merges equal loads only if no store is between them.
        for d_left, gradient in ((d_left_knee, d_knees), (d_left_added, d_outs)):
            elements, mask = band.locate_left(d_left, row)
            triton.store(elements, -gradient, mask=mask)
        return d_scores_kernel, d_output_kernel, d_knee + d_knees, d_added + d_outs

    outs = (d_scores_kernel, d_output_kernel, d_knee, d_added)
    totals = band.walk(visit, tuple(jnp.zeros(out.shape, jnp.float32) for out in outs))
    for out, total in zip(outs, totals, strict=True):
        out[...] = total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def process(
    t: Tiling,
    starts: Int[Array, "2"],
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    scores_XC: Float[Array, "X C"],
    output_XC: Float[Array, "X C"],
    knee_NC: Float[Array, "N C"],
    added_NH: Float[Array, "N H_padded"],
    left_knee_PTC: Float[Array, "P T C"],
    left_added_QTH: Float[Array, "Q T H_padded"],
) -> Float[Array, "B H T S"]:
    """Return the input of the softmax for a block of rows, float32.

    `starts` are the columns of the first row and of the first key. `scores_XC` and `output_XC` (transposed) have the
    layout of `to_matrix`. Tables are padded and ordered by increasing offset: the largest distance first.

    The matmul is part of this function so that the gradient of the scores, which is as large as the scores, has the
    dtype of the matmuls that read it.
    """
    operands = (starts, q_BTHK, k_BSGK, scores_XC, output_XC, knee_NC, added_NH, left_knee_PTC, left_added_QTH)
    return _process_forward(t, *operands)[0]


def _process_forward(
    t: Tiling, starts: Array, q_BTHK: Array, k_BSGK: Array, *operands: Array
) -> tuple[Array, tuple[Any, ...]]:
    scores_BHTS = products(q_BTHK, k_BSGK, jnp.dtype(jnp.float32)) * q_BTHK.shape[-1] ** -0.5
    scores_XC, output_XC, *tables = operands
    block = (starts, scores_BHTS, scores_XC.astype(t.dtype), output_XC.astype(t.dtype), *tables)
    num_offsets = min(t.reach, scores_BHTS.shape[3])
    (out_BHTS,) = _call(forward_kernel, t, block, num_offsets, sequence_outputs=[(scores_BHTS.shape, jnp.float32)])
    return out_BHTS, (starts, q_BTHK, k_BSGK, scores_BHTS, *operands)


def _process_backward(t: Tiling, residuals: tuple[Array, ...], d_out_BHTS: Array) -> tuple[Array | None, ...]:
    starts, q_BTHK, k_BSGK, scores_BHTS, scores_XC, output_XC, knee_NC, added_NH, *lefts = residuals
    kernels = (scores_XC.astype(t.dtype), output_XC.astype(t.dtype))
    block = (starts, scores_BHTS, *kernels, knee_NC, lefts[0], d_out_BHTS)
    shape, dtype = scores_BHTS.shape, q_BTHK.dtype
    num_offsets = min(t.reach, shape[3])
    (d_scores_BHTS,) = _call(scores_gradient_kernel, t, block, num_offsets, sequence_outputs=[(shape, dtype)])
    d_q_BTHK, d_k_BSGK = _products_gradient(d_scores_BHTS, q_BTHK, k_BSGK)
    num_offsets += t.width - 1  # hidden columns are also read by neighbouring columns
    width, taps = band_width(num_offsets), (t.taps_per_dot * t.padded_heads, scores_XC.shape[1])
    *d_lefts, d_scores_kernel, d_output_kernel, d_knee, d_added = _call(
        parameters_gradient_kernel,
        t,
        block,
        num_offsets,
        sequence_outputs=[((shape[0], *left.shape), jnp.float32) for left in lefts],
        program_outputs=[taps, taps, (width, knee_NC.shape[1]), (width, added_NH.shape[1])],
        num_groups=pl.cdiv(t.width, t.taps_per_dot),
    )

    def sum_table(bands: Array) -> Array:
        # Bands are in order of decreasing offset, and the first offset is that of the table's last entry.
        flipped = jnp.flip(bands[:, :, :, 0].sum((0, 1)), 1).reshape(-1, bands.shape[-1])[: len(knee_NC)]
        return jnp.flip(jnp.pad(flipped, ((0, len(knee_NC) - len(flipped)), (0, 0))), 0)

    def sum_left(d_left_BPTX: Array) -> Array:
        # Programs store only the columns in their bands. Some of the first columns may be outside all bands.
        column_P = jnp.arange(d_left_BPTX.shape[1])
        offset_PT = column_P[:, None] - (starts[0] + t.row_stride * jnp.arange(shape[2]))[None, :]
        stored_PT = (offset_PT <= t.ahead) & (offset_PT > t.ahead - d_knee.shape[2] * width) & (t.pad > 0)
        return jnp.where(stored_PT[None, :, :, None], d_left_BPTX, 0).sum(0)

    return (
        None,
        d_q_BTHK,
        d_k_BSGK,
        d_scores_kernel.sum((0, 1, 2)).reshape(scores_XC.shape),
        d_output_kernel.sum((0, 1, 2)).reshape(output_XC.shape),
        sum_table(d_knee),
        sum_table(d_added),
        *map(sum_left, d_lefts),
    )


process.defvjp(_process_forward, _process_backward)


def _products_gradient(d_scores_BHTS: Array, q_BTHK: Array, k_BSGK: Array) -> tuple[Array, Array]:
    """Return the gradients of queries and keys, given the gradient of their scaled products."""
    batch, num_rows, _, head_dim = q_BTHK.shape
    groups = k_BSGK.shape[2]
    d_scores_BGRTS = d_scores_BHTS.reshape(batch, groups, -1, *d_scores_BHTS.shape[2:])
    q_BTGRK = q_BTHK.reshape(batch, num_rows, groups, -1, head_dim)
    matmul = functools.partial(
        jnp.einsum, precision=full_precision(q_BTHK.dtype), preferred_element_type=jnp.dtype(jnp.float32)
    )
    d_q_BTGRK = matmul("BGRTS,BSGK->BTGRK", d_scores_BGRTS, k_BSGK) * head_dim**-0.5
    d_k_BSGK = matmul("BGRTS,BTGRK->BSGK", d_scores_BGRTS, q_BTGRK) * head_dim**-0.5
    return d_q_BTGRK.reshape(q_BTHK.shape).astype(q_BTHK.dtype), d_k_BSGK.astype(k_BSGK.dtype)


def band_width(num_offsets: int) -> int:
    """Return the number of offsets of one program, if all programs together have `num_offsets`."""
    return min(BAND_WIDTH, dot_size(num_offsets))


def _call(
    kernel: Callable[..., None],
    t: Tiling,
    operands: tuple[Array, ...],
    num_offsets: int,
    sequence_outputs: Sequence[tuple[tuple[int, ...], Any]],
    program_outputs: Sequence[tuple[int, ...]] = (),
    num_groups: int = 1,
) -> Sequence[Array]:
    """Run a kernel on the grid (sequence, `PROGRAM_ROWS` rows, band of offsets, group of taps).

    Args:
        kernel: the kernel. Its arguments are refs of operands and outputs, and the tiling.
        t: the tiling.
        operands: `starts`, scores, then others. The first dim of operands with four dims is the sequence.
        num_offsets: number of offsets to cover, starting at the largest.
        sequence_outputs: shapes and dtypes of the outputs that all programs of a sequence share.
        program_outputs: shapes of float32 outputs of each program: [B, T / PROGRAM_ROWS, bands, groups, ..].
        num_groups: groups of taps.
    """
    scores_BHTS = operands[1]
    num_bands = pl.cdiv(num_offsets, band_width(num_offsets))
    grid = (scores_BHTS.shape[0], scores_BHTS.shape[2] // PROGRAM_ROWS, num_bands, num_groups)
    axes = jax.typeof(scores_BHTS).manual_axis_type

    def shared(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape[1:]), lambda b, *_: (b, *[0] * (len(shape) - 1)))

    def own(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((*[None] * len(grid), *shape), lambda *program: (*program, *[0] * len(shape)))

    return pl.pallas_call(
        functools.partial(kernel, t=t, band_offsets=band_width(num_offsets)),
        grid=grid,
        in_specs=[shared(x.shape) if x.ndim == 4 else pl.BlockSpec() for x in operands],
        out_specs=[*(shared(shape) for shape, _ in sequence_outputs), *map(own, program_outputs)],
        out_shape=[
            *(jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes) for shape, dtype in sequence_outputs),
            *(jax.ShapeDtypeStruct((*grid, *shape), jnp.float32, manual_axis_type=axes) for shape in program_outputs),
        ],
        compiler_params=triton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=t.interpret,
        name=f"dape_{kernel.__name__}",
    )(*operands)
