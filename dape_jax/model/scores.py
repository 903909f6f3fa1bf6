"""Attention scores: Q K^T, mask, softmax, and the number of keys that each block of query rows needs.

In: `q_BTHK`, `k_BSGK` and their positions. Out: `scores_BHTS`, `mask_TS`, `probs_BHTS`. Next: `biases.py`.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dape_jax.errors import require
from dape_jax.sharding import full_precision

# Arrays that many signatures share.
Queries = Float[Array, "B T H K"]
Keys = Float[Array, "B S G K"]  # and values
Pairs = Float[Array, "B H T S"]  # a number for each pair of a query and a key: scores, probabilities
BiasPairs = Float[Array, "#B H T S"]  # the batch dim is 1 if the bias does not depend on content
VisiblePairs = Bool[Array, "T S"] | Bool[Array, "B 1 T S"]  # True where the query sees the key; with segments, B


class Positions(NamedTuple):
    """Positions of query rows and keys, and the first positions of their segments.

        segment_ids_BS   3 3 3 7 7
        start_BS         0 0 0 3 3

    Keys of other segments are masked, and columns left of a row's segment are outside its array, as if the segment were
    alone.
    """

    q_pos_T: Int[Array, "T"]
    k_pos_S: Int[Array, "S"]  # those of padding are negative
    q_start_BT: Int[Array, "B T"] | None = None  # first position of each query's segment; None: a row is one segment
    k_start_BS: Int[Array, "B S"] | None = None  # the same for each key


@jax.tree_util.register_static  # makes a mask a valid argument of a jitted function
@dataclasses.dataclass(frozen=True)
class Mask:
    """Visibility of keys as a function of positions.

        Causal, with a window of 3:

        k 0 1 2 3 4
    q 0   x . . . .        key position <= query position
    q 1   x x . . .        and, with a window, distance < window: a query sees itself and window - 1 keys before it
    q 2   x x x . .        (on both sides if attention is not causal)
    q 3   . x x x .
    q 4   . . x x x

    No query at a position >= 0 sees padding, nor a key of another segment.

    Args:
        causal: a query sees no key after it. If False, it sees both sides (encoders).
        window: a query sees keys at a distance below this, or None for all keys.
        row_stride: step between the columns of neighbouring query rows, the last at one of the last `row_stride`
            columns; n > 1 if a device has every n-th row, and all keys. None if positions are given: the rows are
            anywhere. It does not change which keys a query sees, only how many are read for a block of rows.
    """

    causal: bool = True
    window: int | None = None
    row_stride: int | None = 1

    def __post_init__(self):
        advice, kind = "if traced, bind it with functools.partial before jit", type(self.causal)
        allowed = f"must be True or False (docs/library.md has other masks); {advice}"
        require(issubclass(kind, int | np.bool_), "causal", kind.__name__, allowed)
        is_window = self.window is None or (isinstance(self.window, int | np.integer) and 1 <= self.window <= 2**30)
        require(is_window, "window", self.window, f"must be an integer from 1 to 2**30, or None; {advice}")

    def visible(self, positions: Positions) -> VisiblePairs:
        """Return the mask of a block of query rows."""
        q_pos_T, k_pos_S, q_start_BT, k_start_BS = positions
        distance_TS = q_pos_T[:, None] - k_pos_S[None, :]
        if self.causal:  # as unsigned numbers, negative positions are larger than all others: one comparison, not two
            mask_TS = k_pos_S.astype(jnp.uint32)[None, :] <= q_pos_T.astype(jnp.uint32)[:, None]
        else:
            mask_TS = jnp.broadcast_to(k_pos_S[None, :] >= 0, distance_TS.shape)
        if self.window is not None:
            mask_TS &= jnp.abs(distance_TS) < self.window
        if q_start_BT is None or k_start_BS is None:
            return mask_TS
        return mask_TS[None, None] & (q_start_BT[:, None, :, None] == k_start_BS[:, None, None, :])


def as_positions(name: str, pos: Any, halo: tuple[int, int] | None = None) -> Any:
    """Return positions as an array of signed integers, whose differences do not wrap around, or None.

    Those of keys, for which the processor's `key_halo` is given, must increase, padding last; where `jit` traces them,
    this is not checked. With the halo (0, 0), padding may be anywhere.
    """
    if pos is None:
        return None
    pos = pos if isinstance(pos, jax.Array) else np.asarray(pos)
    require(pos.ndim == 1, name, pos.shape or pos, f"must be [{name[-1]}], the same for the batch")
    is_integer = jnp.issubdtype(pos.dtype, jnp.integer)
    require(is_integer, f"{name}.dtype", pos.dtype.name, "must be integers: positions, not a mask")
    if halo is not None and not isinstance(pos, Tracer):
        keys = np.asarray(pos).astype(np.int64)
        keys = keys[keys >= 0] if halo == (0, 0) else keys
        falls = np.flatnonzero((keys[1:] >= 0) & ((keys[:-1] < 0) | (np.diff(keys) <= 0)))[:1].tolist()
        allowed = "must increase, padding last; for packed documents or padding on the left give segment_ids instead"
        require(not falls, name, [keys[each : each + 2].tolist() for each in falls], allowed)
    return pos.astype(np.int32) if jnp.issubdtype(pos.dtype, jnp.unsignedinteger) else pos


def segment_starts(segment_ids: Any, shape: tuple[int, ...]) -> Int[Array, "B S"]:
    """Return the column at which each token's segment starts: a segment is a run of equal ids. Check their shape."""
    # JAX would drop the upper 32 bits of ids with 64, and then some segments could not be told apart.
    segment_ids_BS = segment_ids if isinstance(segment_ids, jax.Array) else np.asarray(segment_ids)
    require(segment_ids_BS.shape == shape, "segment_ids.shape", segment_ids_BS.shape, f"must be [B, S] = {shape}")
    is_first_BS = jnp.pad(segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first_BS, jnp.arange(shape[1])[None], 0), axis=1)


def over_heads(mask: VisiblePairs) -> Bool[Array, "_ 1 T S"]:
    """Return the mask with the dims of scores, [B, H, T, S]; those that it does not depend on are 1.

    Raises:
        InputError: the mask has other dims or no booleans; a mask that is added to scores is not supported.
    """
    allowed = "must be booleans, [T, S] or [B, 1, T, S], True where the query sees the key"
    require(mask.dtype == bool and mask.ndim in (2, 4), "mask", f"{mask.dtype.name} {mask.shape}", allowed)
    return mask[None, None] if mask.ndim == 2 else mask


def soft_cap(x: Float[Array, "..."], cap: Float[Array, ""] | float | None) -> Float[Array, "..."]:
    """Return cap tanh(x / cap), which is between -cap and cap, or `x` if the cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Scores(NamedTuple):
    """Arguments of a processor."""

    scores_BHTS: Pairs  # A = Q K^T / sqrt(K), after `soft_cap` if there is a cap
    bias_BHTS: BiasPairs | None  # B; the batch dim is 1 if B does not depend on content
    mask: VisiblePairs  # True where the query sees the key


def products(q_BTHK: Float[Array, "#B T H K"], k_BSGK: Keys, dtype: jnp.dtype) -> Pairs:
    """Return Q K^T, accumulated in `dtype`. Each of the G key heads serves H / G neighbouring query heads."""
    batch, num_keys, groups, head_dim = k_BSGK.shape
    num_rows, heads = q_BTHK.shape[1:3]
    # Heads first: with another order of dims the product would have to be transposed.
    q_BHTK = jnp.moveaxis(jnp.broadcast_to(q_BTHK, (batch, *q_BTHK.shape[1:])), 2, 1)
    q_BGRTK = q_BHTK.reshape(batch, groups, -1, num_rows, head_dim)
    precision = full_precision(q_BTHK.dtype)
    scores_BGRTS = jnp.einsum("BGRTK,BSGK->BGRTS", q_BGRTK, k_BSGK, precision=precision, preferred_element_type=dtype)
    return scores_BGRTS.reshape(batch, heads, num_rows, num_keys)


def masked_softmax(scores_BHTS: Float[Array, "B H T S"], mask: VisiblePairs) -> Float[Array, "B H T S"]:
    """Return the softmax over the visible keys; exactly 0 at masked keys, if the row has a visible key.

    A masked score is a large finite negative number, not -inf. A row without a visible key is then uniform instead of
    NaN, and its gradient is finite.
    """
    return jax.nn.softmax(_masked(scores_BHTS, mask), axis=-1)


def masked_exp(scores_BHTS: Pairs, mask: VisiblePairs, dtype: DTypeLike) -> tuple[Pairs, Float[Array, "B H T 1"]]:
    """Return the numerator of `masked_softmax` in `dtype`, exp(scores - largest of the row), and its denominator.

    If a product with values comes before the division, the gradient needs no sum of products over the keys, for which
    XLA's program on a CPU is slow: it took longer than all matmuls of the gradient. In 16 bits the numerator is the
    probability, and the denominator 1: the gradient of exp is smaller by the sum, and could underflow in float16.
    """
    if jnp.dtype(dtype).itemsize < 4:
        return masked_softmax(scores_BHTS, mask).astype(dtype), jnp.ones_like(scores_BHTS[..., :1])
    masked_BHTS = _masked(scores_BHTS, mask)
    exp_BHTS = jnp.exp(masked_BHTS - jax.lax.stop_gradient(masked_BHTS.max(-1, keepdims=True)))
    return exp_BHTS.astype(dtype), exp_BHTS.sum(-1, keepdims=True)


def _masked(scores_BHTS: Pairs, mask: VisiblePairs) -> Pairs:
    """Return the scores, with a large finite negative number where the query does not see the key."""
    masked = jnp.asarray(-0.7 * jnp.finfo(scores_BHTS.dtype).max, scores_BHTS.dtype)
    return jnp.where(over_heads(mask), scores_BHTS, masked)


BLOCK_BYTES = 2**28  # maximum size, on a GPU, of a block's arrays over pairs of a row and a key
MIN_BLOCK_ROWS = 128


def rows_in_block(features: int, num_rows: int, num_keys: int, num_runs: int) -> int:
    """Return the number of rows in a block on a GPU: as many as memory allows, to launch few kernels.

    `features` is the number of float32 numbers for each pair of a row and a key, over all sequences. The result is at
    most T / `num_runs`, or 256 if that is larger, so that each run reads only the keys that it needs.
    """
    fitting = BLOCK_BYTES // (4 * features * num_keys) // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS
    wanted = max(2 * MIN_BLOCK_ROWS, -(-num_rows // num_runs))
    return max(MIN_BLOCK_ROWS, min(fitting, wanted))


def causal_runs(
    num_rows: int, num_keys: int, block: int, num_runs: int, mask: Mask, halo: tuple[int, int] = (0, 0)
) -> list[tuple[int, int, int]]:
    """Split query rows into runs of blocks: return (first block, end, number of keys that every block reads) of each.

    The rows must be at the last key positions, as in self-attention: row t is at one of the `row_stride` columns that
    start at S - row_stride (T - t). With 8 rows and keys, blocks of 2 rows and two runs:

        rows 0..3    x x x x          run 0: blocks 0 and 1 read keys 0..3
        rows 4..7    x x x x x x x x  run 1: blocks 2 and 3 read keys 0..7

    so n runs compute (n + 1) / (2 n) of all pairs. With a window there is one run, and each block reads its own keys
    and window - 1 keys before them. With `num_runs` = 1, or if attention is not causal or rows are anywhere, each
    block reads all keys. `block` is the number of rows in a block; for `halo`, see `Processor.key_halo`.
    """
    num_blocks = -(-num_rows // block)
    left, right = halo
    if num_runs == 1 or not mask.causal or mask.row_stride is None:
        return [(0, num_blocks, num_keys)]
    if mask.window is not None:
        return [(0, num_blocks, min(num_keys, left + mask.window - 1 + mask.row_stride * block + right))]
    num_runs = min(num_runs, num_blocks)
    cuts = [num_blocks * i // num_runs for i in range(num_runs + 1)]
    return [
        (start, stop, min(num_keys, num_keys - mask.row_stride * (num_rows - stop * block) + right))
        for start, stop in itertools.pairwise(cuts)
    ]
