"""The operator on GPUs (Pallas, Triton)."""

from typing import Any

from jaxtyping import Array, Float, Int

from dape_jax.kernels.tables import Operator


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    first: Int[Array, ""],
    operator: Operator,
    *,
    apart: int,
    window: int | None,
    interpret: Any,
) -> Float[Array, "B T H K"]:
    """See `kernels.attend_fused`."""
    raise NotImplementedError
