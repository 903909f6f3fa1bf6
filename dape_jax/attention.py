"""Causal attention with processed scores: one function over rows of queries, and two drivers for it.

In: `q_BTHK`, `k_BSHK`, `v_BSHK` and their positions, a bias from `biases.py`, a processor from `processors.py`. Out:
`out_BTHK`. Next: `transformer.py`.

A query row is complete in itself: everything done to scores mixes heads and keys, never two query rows. So `attend` on
all rows (`dense`), on blocks of rows (`blockwise`), on some rows of many devices, or on one row against a cache, is the
same function and gives the same numbers.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dape_jax.biases import Bias
from dape_jax.errors import require
from dape_jax.processors import Plain, Processor


def masked_softmax(scores_BHTS: Float[Array, "B H T S"], mask_TS: Bool[Array, "T S"]) -> Float[Array, "B H T S"]:
    """Softmax over the keys that the mask lets through; exactly 0 elsewhere.

    A masked score is a large finite negative number, not -inf: a row with no key at all then gives numbers, not NaNs,
    and so does its gradient.
    """
    masked = jnp.asarray(-0.7 * jnp.finfo(scores_BHTS.dtype).max, scores_BHTS.dtype)
    return jax.nn.softmax(jnp.where(mask_TS[None, None], scores_BHTS, masked), axis=-1)


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BSHK: Float[Array, "B S H K"],
    v_BSHK: Float[Array, "B S H K"],
    q_pos_T: Int[Array, "T"],
    k_pos_S: Int[Array, "S"],
    *,
    bias: Bias | None = None,
    processor: Processor | None = None,
) -> Float[Array, "B T H K"]:
    """Causal attention of any block of query rows over the keys.

        softmax(processor(Q K^T / sqrt(K), bias, mask)) V        mask: key position <= query position

    Args:
        q_BTHK: queries, rotated already where positions are rotary.
        k_BSHK: keys.
        v_BSHK: values.
        q_pos_T: positions of the queries, in any order.
        k_pos_S: positions of the keys, increasing: neighbouring columns are what the convolution calls neighbours.
        bias: position bias; None for none.
        processor: what is done to the scores; None for scores + bias.

    Returns:
        The attended values in the dtype of `v_BSHK`. Scores, bias and softmax are float32 (float64 if the inputs are).
    """
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    mask_TS = k_pos_S[None, :] <= q_pos_T[:, None]
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, preferred_element_type=dtype)
    scores_BHTS *= q_BTHK.shape[-1] ** -0.5
    bias_HTS = None if bias is None else bias(q_pos_T, k_pos_S)
    processor = Plain() if processor is None else processor
    scores_BHTS = processor(scores_BHTS, bias_HTS, mask_TS)
    probs_BHTS = masked_softmax(scores_BHTS, mask_TS).astype(v_BSHK.dtype)
    out_BTHK = jnp.einsum("BHTS,BSHK->BTHK", probs_BHTS, v_BSHK, preferred_element_type=dtype)
    return out_BTHK.astype(v_BSHK.dtype)


@dataclasses.dataclass(frozen=True)
class Dense:
    """All rows at once: memory grows with T x S. The choice at short lengths."""

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSHK: Float[Array, "B S H K"],
        v_BSHK: Float[Array, "B S H K"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        *,
        bias: Bias | None = None,
        processor: Processor | None = None,
    ) -> Float[Array, "B T H K"]:
        """See `attend`."""
        return attend(q_BTHK, k_BSHK, v_BSHK, q_pos_T, k_pos_S, bias=bias, processor=processor)


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """A scan over blocks of rows, each recomputed in the backward pass: memory grows with block_size x S.

    Causal saving: the rows are cut into `num_buckets` runs, each with its own number of keys, so that n buckets do
    (n + 1) / (2 n) of the square. The program has one scan for each bucket and does not grow with T.

    With more than one bucket the rows must stand at the end of the keys, row t at column S - T + t, as in
    self-attention; with one bucket they may be any rows.

    Args:
        block_size: rows in a block.
        num_buckets: runs of rows with their own number of keys.
    """

    block_size: int = 64
    num_buckets: int = 1

    def __post_init__(self):
        require(self.block_size > 0, "model.attention.block_size", self.block_size, "a positive number of rows")
        require(self.num_buckets > 0, "model.attention.num_buckets", self.num_buckets, "1 or more")

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSHK: Float[Array, "B S H K"],
        v_BSHK: Float[Array, "B S H K"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        *,
        bias: Bias | None = None,
        processor: Processor | None = None,
    ) -> Float[Array, "B T H K"]:
        """See `attend`."""
        batch, num_rows, heads, head_dim = q_BTHK.shape
        num_keys = k_BSHK.shape[1]
        processor = Plain() if processor is None else processor
        block = min(self.block_size, num_rows)
        num_blocks = -(-num_rows // block)
        # The last block is filled up with copies of the last row, which are cut off again.
        fill = (0, num_blocks * block - num_rows)
        q_filled = jnp.pad(q_BTHK, ((0, 0), fill, (0, 0), (0, 0)), mode="edge")
        q_blocks = jnp.moveaxis(q_filled.reshape(batch, num_blocks, block, heads, head_dim), 1, 0)
        pos_blocks = jnp.pad(q_pos_T, (fill,), mode="edge").reshape(num_blocks, block)

        num_buckets = min(self.num_buckets, num_blocks)
        cuts = [num_blocks * i // num_buckets for i in range(num_buckets + 1)]
        outs = []
        for start, stop in itertools.pairwise(cuts):
            visible = num_keys
            if num_buckets > 1:
                visible = min(num_keys, num_keys - num_rows + stop * block + processor.key_halo)
            k, v, k_pos = k_BSHK[:, :visible], v_BSHK[:, :visible], k_pos_S[:visible]

            @jax.checkpoint
            def rows_of_block(q, pos, k=k, v=v, k_pos=k_pos):
                return attend(q, k, v, pos, k_pos, bias=bias, processor=processor)

            outs.append(
                jax.lax.map(lambda block: rows_of_block(*block), (q_blocks[start:stop], pos_blocks[start:stop]))
            )
        out_blocks = jnp.concatenate(outs)
        return jnp.moveaxis(out_blocks, 0, 1).reshape(batch, num_blocks * block, heads, head_dim)[:, :num_rows]


IMPLEMENTATIONS = {"dense": Dense, "blockwise": Blockwise}
