"""Positions that act on queries and keys: rotary embedding.

In: `x_BTHK` (queries or keys) and their positions `pos_T`. Out: the rotated `x_BTHK`. Next: `biases.py`.

To add a variant: a frozen dataclass with a `__call__` like `Rope`'s, and one line in `ROTARY` at the foot.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dape_jax.errors import require


@dataclasses.dataclass(frozen=True)
class NoRotary:
    """Queries and keys as they are."""

    def __call__(self, x_BTHK: Float[Array, "B T H K"], pos_T: Int[Array, "T"]) -> Float[Array, "B T H K"]:
        """Return `x_BTHK` unchanged."""
        del pos_T
        return x_BTHK


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    With a, b the first and second half of a head's vector and w_m = base^(-2m/K), m < K/2:

        a' = a cos(pos w) - b sin(pos w)        b' = b cos(pos w) + a sin(pos w)

    Args:
        base: the longest wavelength divided by 2 pi, in positions.

    Source: Su et al. 2021, in GPT-NeoX's rotate-half form over all K dims.
    Differs: angles are computed where they are used, in float32 or better; the official code caches them up to a
      maximum length, in the parameters' dtype, and so cannot run beyond it.
    """

    base: float = 10_000.0

    def __post_init__(self):
        require(self.base > 1, "model.rotary.base", self.base, "a number above 1")

    def __call__(self, x_BTHK: Float[Array, "B T H K"], pos_T: Int[Array, "T"]) -> Float[Array, "B T H K"]:
        """Rotate `x_BTHK` by its positions; computes in float32 at least and returns the input's dtype."""
        head_dim = x_BTHK.shape[-1]
        require(head_dim % 2 == 0, "width / num_heads", head_dim, "rotary embedding needs an even head dim")
        dtype = jnp.promote_types(x_BTHK.dtype, jnp.float32)
        frequency_m = jnp.asarray(self.base, dtype) ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
        angle_Tm = pos_T.astype(dtype)[:, None] * frequency_m[None, :]
        cos, sin = jnp.cos(angle_Tm)[None, :, None, :], jnp.sin(angle_Tm)[None, :, None, :]
        a, b = jnp.split(x_BTHK.astype(dtype), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHK.dtype)


ROTARY = {"none": NoRotary, "rope": Rope}
