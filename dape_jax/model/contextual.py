"""Position encodings that depend on content as well as position: CoPE and Transformer-XL's.

In: queries `q_BTHK`, keys `k_BSGK`, their scores and their positions. Out: `bias_BHTS`, added to the scores. Next:
`processors.py`.

They replace a bias of `biases.py`: in a config (`model.bias`), in `attend`, and in DAPE, which reads them as the bias B
together with the scores A = Q K^T / sqrt(K).

To add one, follow the instructions in `biases.py`, but add the line to `CONTEXTUAL` at the end of this file.
"""

import dataclasses
import math
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dape_jax.errors import positive, require
from dape_jax.model.scores import products
from dape_jax.sharding import full_precision


@runtime_checkable
class ContextualBias(Protocol):
    """Contextual encoding, as `attention.py` calls it."""

    def from_content(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        scores_BHTS: Float[Array, "B H T S"],
        mask_TS: Bool[Array, "T S"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        causal: bool,
    ) -> Float[Array, "B H T S"]:
        """Return the term to add to the scores, in their dtype; where the mask is False, any finite number.

        Args:
            q_BTHK: queries.
            k_BSGK: keys of G heads, shared by H query heads; see `scores.products`.
            scores_BHTS: Q K^T / sqrt(K).
            mask_TS: True where the query sees the key.
            q_pos_T: query positions.
            k_pos_S: key positions.
            causal: whether attention is causal.
        """
        ...


def cope(
    q_BTHK: Float[Array, "B T H K"],
    scores_BHTS: Float[Array, "B H T S"],
    mask_TS: Bool[Array, "T S"],
    table_KP: Float[Array, "K P"],
) -> Float[Array, "B H T S"]:
    """Return CoPE's bias: a key's position is the sum of the gates from the key to the query.

        pos(i, j) = min(sum over j <= m <= i of sigmoid(scores(i, m)), P - 1)
        bias(i, j) = w q_i . table[ceil(pos)] + (1 - w) q_i . table[floor(pos)]        w = pos - floor(pos)

    The gradient is that of this formula: it flows through w, but not through ceil, floor or a clamped position.

    Args:
        q_BTHK: queries, not divided by sqrt(K).
        scores_BHTS: Q K^T / sqrt(K).
        mask_TS: True where the query sees the key; other gates are 0.
        table_KP: embeddings of P positions, the same for all heads.

    Source: Golovneva et al. 2024, equations 3 to 5, and the official DAPE code.
    Differs: nothing.
    """
    gates_BHTS = jnp.where(mask_TS[None, None], jax.nn.sigmoid(scores_BHTS), 0)
    pos_BHTS = jax.lax.cumsum(gates_BHTS, axis=3, reverse=True)
    last = table_KP.shape[1] - 1
    pos_BHTS = jnp.where(pos_BHTS <= last, pos_BHTS, last)
    floor_BHTS = jax.lax.stop_gradient(jnp.floor(pos_BHTS))
    w_BHTS = pos_BHTS - floor_BHTS
    dtype = scores_BHTS.dtype
    embedded_BHTP = jnp.einsum(
        "BTHK,KP->BHTP", q_BTHK.astype(dtype), table_KP.astype(dtype), precision=full_precision(dtype)
    )
    below_BHTS = floor_BHTS.astype(jnp.int32)
    above_BHTS = jax.lax.stop_gradient(jnp.ceil(pos_BHTS)).astype(jnp.int32)
    at_above, at_below = (jnp.take_along_axis(embedded_BHTP, index, axis=-1) for index in (above_BHTS, below_BHTS))
    return w_BHTS * at_above + (1 - w_BHTS) * at_below


class Cope(nnx.Module):
    """CoPE. The table is initialised to 0, as in the official code."""

    def __init__(self, head_dim: int, num_positions: int):
        self.table_KP = nnx.Param(jnp.zeros((head_dim, num_positions)))

    def from_content(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        scores_BHTS: Float[Array, "B H T S"],
        mask_TS: Bool[Array, "T S"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        causal: bool,
    ) -> Float[Array, "B H T S"]:
        """See `cope`.

        Raises:
            InputError: attention is not causal: CoPE defines no position for a later key.
        """
        require(
            causal, "model.bias", "cope", "must be another bias: CoPE counts earlier keys, so it needs causal attention"
        )
        return cope(q_BTHK, scores_BHTS, mask_TS, self.table_KP[...])


@dataclasses.dataclass(frozen=True)
class CopeConfig:
    """Config of CoPE.

    Args:
        num_positions: P, the official code's npos_max: all positions >= P - 1 share the last embedding.
    """

    num_positions: int = 64
    shared_by_layers: ClassVar[bool] = False

    def __post_init__(self):
        positive(self, "model.bias", "num_positions")

    def build(self, num_heads: int, head_dim: int, rngs: nnx.Rngs) -> Cope:
        """Make the module."""
        return Cope(head_dim, self.num_positions)


def transformer_xl(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    q_pos_T: Int[Array, "T"],
    k_pos_S: Int[Array, "S"],
    relative_DHK: Float[Array, "D H K"],
    content_HK: Float[Array, "H K"],
    position_HK: Float[Array, "H K"],
    dtype: jnp.dtype,
) -> Float[Array, "B H T S"]:
    """Return the terms that Transformer-XL's relative positions add to the scores.

        bias(i, j) = (content_h . k_j + (q_i + position_h) . R[i - j]) / sqrt(K)

        R[r] = [sin(r w), cos(r w)] relative[:, h, :]        w_m = 10000^(-2m/D), m < D/2, D = H K

    The sinusoids of i - j are products of those of i and of j, so no table over distances is needed: queries are mapped
    back to width D, rotated by their own position, and multiplied with the sinusoids of the keys' positions.

    Args:
        q_BTHK: queries.
        k_BSGK: keys; see `scores.products`.
        q_pos_T: query positions.
        k_pos_S: key positions.
        relative_DHK: projection from sinusoids to heads.
        content_HK: r_w_bias of the official code.
        position_HK: r_r_bias of the official code.
        dtype: accumulation dtype of the matmuls.

    Source: Dai et al. 2019, section 3.3, with the official DAPE code's order of sines and cosines.
    Differs: positions are relative to the first query, so that in float32 the error of an angle is 6e-8 times the
        range of the positions in one call (a block of rows against its keys), not times their size. Later keys have
        negative distances.
    """
    width = relative_DHK.shape[0]
    frequency_m = jnp.asarray(10_000.0 ** (-np.arange(0, width, 2) / width), dtype)

    def sin_cos(pos: Int[Array, "_"]) -> tuple[Float[Array, "_ m"], Float[Array, "_ m"]]:
        angle = (pos - q_pos_T[0]).astype(dtype)[:, None] * frequency_m[None, :]
        return jnp.sin(angle), jnp.cos(angle)

    content_BHTS = products(content_HK.astype(k_BSGK.dtype)[None, None], k_BSGK, dtype)  # one row for all queries
    lifted_BTHD = jnp.einsum(
        "BTHK,DHK->BTHD",
        q_BTHK + position_HK.astype(q_BTHK.dtype)[None, None],
        relative_DHK.astype(q_BTHK.dtype),
        precision=full_precision(q_BTHK.dtype),
        preferred_element_type=dtype,
    )
    sines_BTHm, cosines_BTHm = jnp.split(lifted_BTHD, 2, axis=-1)
    (q_sin, q_cos), (k_sin, k_cos) = sin_cos(q_pos_T), sin_cos(k_pos_S)
    q_sin, q_cos = q_sin[None, :, None, :], q_cos[None, :, None, :]
    rotated_BTHD = jnp.concatenate(
        [cosines_BTHm * q_sin - sines_BTHm * q_cos, sines_BTHm * q_sin + cosines_BTHm * q_cos], axis=-1
    )
    position_BHTS = jnp.einsum(
        "BTHD,SD->BHTS",
        rotated_BTHD.astype(q_BTHK.dtype),
        jnp.concatenate([k_sin, k_cos], axis=-1).astype(q_BTHK.dtype),
        precision=full_precision(q_BTHK.dtype),
        preferred_element_type=dtype,
    )
    return (content_BHTS + position_BHTS) * q_BTHK.shape[-1] ** -0.5


class TransformerXL(nnx.Module):
    """Transformer-XL's relative positions. Initialisation: projection U(+-1/sqrt(D)), both vectors normal, std 0.02."""

    def __init__(self, num_heads: int, head_dim: int, *, rngs: nnx.Rngs):
        width, shape = num_heads * head_dim, (num_heads, head_dim)
        limit = 1 / math.sqrt(width)
        self.relative_DHK = nnx.Param(jax.random.uniform(rngs.params(), (width, *shape), minval=-limit, maxval=limit))
        self.content_HK = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        self.position_HK = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))

    def from_content(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        scores_BHTS: Float[Array, "B H T S"],
        mask_TS: Bool[Array, "T S"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        causal: bool,
    ) -> Float[Array, "B H T S"]:
        """See `transformer_xl`."""
        return transformer_xl(
            q_BTHK,
            k_BSGK,
            q_pos_T,
            k_pos_S,
            self.relative_DHK[...],
            self.content_HK[...],
            self.position_HK[...],
            scores_BHTS.dtype,
        )


@dataclasses.dataclass(frozen=True)
class TransformerXLConfig:
    """Config of Transformer-XL's relative positions."""

    shared_by_layers: ClassVar[bool] = False

    def build(self, num_heads: int, head_dim: int, rngs: nnx.Rngs) -> TransformerXL:
        """Make the module.

        Raises:
            InputError: the width is odd.
        """
        width = num_heads * head_dim
        require(width % 2 == 0, "model.width", width, "must be even for Transformer-XL's sines and cosines")
        return TransformerXL(num_heads, head_dim, rngs=rngs)


CONTEXTUAL = {"cope": CopeConfig, "transformer_xl": TransformerXLConfig}
