"""Position encodings that depend on content as well as position: CoPE and Transformer-XL's.

In: queries `q_BTHK`, keys `k_BSGK`, their scores and their positions. Out: `bias_BHTS`, added to the scores. Next:
`processors.py`.

They replace a bias of `biases.py`: in a config (`model.bias`), in `attend`, and in DAPE, which reads them as the bias B
together with the scores A = Q K^T / sqrt(K).

To add one, follow the instructions in `biases.py`; its config has `reads_content = True`.
"""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dape_jax.errors import positive, require
from dape_jax.model.biases import BIASES, BiasConfig, fan_in_uniform
from dape_jax.model.scores import Keys, Pairs, Queries, VisiblePairs, over_heads, products
from dape_jax.sharding import full_precision


class Content(NamedTuple):
    """Arguments of a contextual encoding."""

    q_BTHK: Queries  # not divided by sqrt(K)
    k_BSGK: Keys  # of G heads, shared by H query heads; see `scores.products`
    scores_BHTS: Pairs  # A = Q K^T / sqrt(K)
    mask: VisiblePairs  # True where the query sees the key
    q_pos_T: Int[Array, "T"]  # positions of the queries
    k_pos_S: Int[Array, "S"]  # positions of the keys


@runtime_checkable
class ContextualBias(Protocol):
    """Contextual encoding, as `attention.py` calls it."""

    def from_content(self, content: Content, *, causal: bool) -> Float[Array, "B H T S"]:
        """Return the term to add to the scores, in their dtype; where the mask is False, any finite number."""
        ...


def _check_built(name: str, field: str, built: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Raise `InputError` if a module was built for other heads than those of the queries."""
    require(built == needed, f"bias {name}: {field}", built, f"must be {needed}, as in q_BTHK")


class Cope(nnx.Module):
    """CoPE: a key's position is the sum of the gates from the key to the query.

        pos(i, j) = min(sum over j <= m <= i of sigmoid(A(i, m)), P - 1)
        bias(i, j) = w q_i . table[ceil(pos)] + (1 - w) q_i . table[floor(pos)]        w = pos - floor(pos)

    Gates of masked keys are 0. The table has embeddings of P positions, the same for all heads, initialised to 0. The
    gradient is that of this formula: it flows through w, but not through ceil, floor or a clamped position.

    Source: Golovneva et al. 2024, equations 3 to 5, and the official DAPE code.
    Differs: nothing.
    """

    def __init__(self, num_heads: int, head_dim: int, config: "CopeConfig", rngs: nnx.Rngs):
        self.table_KP = nnx.Param(jnp.zeros((head_dim, config.num_positions)))

    def from_content(self, content: Content, *, causal: bool) -> Pairs:
        """See the class.

        Raises:
            InputError: attention is not causal: CoPE defines no position for a later key.
        """
        allowed = "must be another bias: CoPE counts earlier keys, so it needs causal attention"
        require(causal, "model.bias", "cope", allowed)
        (q_BTHK, _, scores_BHTS, mask, *_), table_KP = content, self.table_KP[...]
        _check_built("Cope", "head_dim", table_KP.shape[:1], q_BTHK.shape[3:])
        pos_BHTS = jax.lax.cumsum(jnp.where(over_heads(mask), jax.nn.sigmoid(scores_BHTS), 0), axis=3, reverse=True)
        last, dtype = table_KP.shape[1] - 1, scores_BHTS.dtype
        pos_BHTS = jnp.where(pos_BHTS <= last, pos_BHTS, last)
        floor_BHTS, ceil_BHTS = jax.lax.stop_gradient((jnp.floor(pos_BHTS), jnp.ceil(pos_BHTS)))
        w_BHTS, precision = pos_BHTS - floor_BHTS, full_precision(dtype)
        embedded_BHTP = jnp.einsum("BTHK,KP->BHTP", q_BTHK.astype(dtype), table_KP.astype(dtype), precision=precision)
        at_ceil, at_floor = (
            jnp.take_along_axis(embedded_BHTP, index.astype(jnp.int32), axis=-1) for index in (ceil_BHTS, floor_BHTS)
        )
        return w_BHTS * at_ceil + (1 - w_BHTS) * at_floor


@dataclasses.dataclass(frozen=True)
class CopeConfig(BiasConfig):
    """Config of CoPE."""

    num_positions: int = 64  # P, the official code's npos_max: all positions >= P - 1 share the last embedding
    module = Cope
    reads_content = True

    def __post_init__(self):
        positive(self, "model.bias", "num_positions")


class TransformerXL(nnx.Module):
    """The terms that Transformer-XL's relative positions add to the scores.

        bias(i, j) = (content_h . k_j + (q_i + position_h) . R[i - j]) / sqrt(K)

        R[r] = [sin(r w), cos(r w)] relative[:, h, :]        w_m = 10000^(-2m/D), m < D/2, D = H K

    The sinusoids of i - j are products of those of i and of j, so no table over distances is needed: queries are mapped
    back to width D, rotated by their own position, and multiplied with the sinusoids of the keys' positions.

    Initialisation: projection U(+-1/sqrt(D)); content and position, the official code's r_w_bias and r_r_bias, normal
    with std 0.02.

    Source: Dai et al. 2019, section 3.3, with the official DAPE code's order of sines and cosines.
    Differs: positions are relative to the first query, so that in float32 the error of an angle is 6e-8 times the
        range of the positions in one call (a block of rows against its keys), not times their size. Later keys have
        negative distances.
    """

    def __init__(self, num_heads: int, head_dim: int, config: "TransformerXLConfig", rngs: nnx.Rngs):
        width, shape = num_heads * head_dim, (num_heads, head_dim)
        require(width % 2 == 0, "model.width", width, "must be even for Transformer-XL's sines and cosines")
        self.relative_DHK = fan_in_uniform(rngs, (width, *shape), width)
        self.content_HK = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        self.position_HK = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))

    def from_content(self, content: Content, *, causal: bool) -> Pairs:
        """Return the terms for every (query, key) pair; matmuls accumulate in the scores' dtype."""
        q_BTHK, k_BSGK, scores_BHTS, _, q_pos_T, k_pos_S = content
        dtype, operands = scores_BHTS.dtype, q_BTHK.dtype
        matmul = {"precision": full_precision(operands), "preferred_element_type": dtype}
        relative_DHK, content_HK, position_HK = self.relative_DHK[...], self.content_HK[...], self.position_HK[...]
        _check_built("TransformerXL", "num_heads, head_dim", content_HK.shape, q_BTHK.shape[2:])
        width = relative_DHK.shape[0]
        frequency_m = jnp.asarray(10_000.0 ** (-np.arange(0, width, 2) / width), dtype)

        def sin_cos(pos: Int[Array, "_"]) -> tuple[Float[Array, "_ m"], Float[Array, "_ m"]]:
            angle = (pos - q_pos_T[0]).astype(dtype)[:, None] * frequency_m[None, :]
            return jnp.sin(angle), jnp.cos(angle)

        content_BHTS = products(content_HK.astype(k_BSGK.dtype)[None, None], k_BSGK, dtype)  # one row for all queries
        shifted_BTHK = q_BTHK + position_HK.astype(operands)[None, None]
        lifted_BTHD = jnp.einsum("BTHK,DHK->BTHD", shifted_BTHK, relative_DHK.astype(operands), **matmul)
        sines_BTHm, cosines_BTHm = jnp.split(lifted_BTHD, 2, axis=-1)
        q_sin, q_cos = (x[None, :, None, :] for x in sin_cos(q_pos_T))
        rotated_BTHD = jnp.concatenate(
            [cosines_BTHm * q_sin - sines_BTHm * q_cos, sines_BTHm * q_sin + cosines_BTHm * q_cos], axis=-1
        )
        k_SD = jnp.concatenate(sin_cos(k_pos_S), axis=-1)
        position_BHTS = jnp.einsum("BTHD,SD->BHTS", rotated_BTHD.astype(operands), k_SD.astype(operands), **matmul)
        return (content_BHTS + position_BHTS) * q_BTHK.shape[-1] ** -0.5


@dataclasses.dataclass(frozen=True)
class TransformerXLConfig(BiasConfig):
    """Config of Transformer-XL's relative positions."""

    module = TransformerXL
    reads_content = True


BIASES |= {"cope": CopeConfig, "transformer_xl": TransformerXLConfig}
