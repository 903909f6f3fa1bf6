"""Fused operator on TPUs (Pallas, Mosaic): a block of rows with all heads, streaming over tiles of keys.

In: queries, keys, values and an `Operator`. Out: attended values, and gradients of all inputs; scores are never in HBM.
Reading order: `tiling.py` (grid, halo, layouts), `forward.py`, `backward.py`; `docs/kernel.md` explains the design.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dape_jax.kernels.tables import Operator
from dape_jax.kernels.tpu.backward import backward_pass
from dape_jax.kernels.tpu.forward import forward_pass
from dape_jax.kernels.tpu.tiling import Tiling, cost, tilings

__all__ = ["Tiling", "attend", "cost", "tilings"]


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
    """Return attention computed by the kernels. The first row is at the column `first`.

    Raises:
        NotImplementedError: see `tilings`.
    """
    sizes = operator.width, operator.pad, operator.knee_CN.shape[0]
    options = {"dtype": dtype, "row_stride": row_stride, "window": window, "interpret": interpret}
    return _attend(*tilings(q_BTHK, k_BSGK, sizes, **options), q_BTHK, k_BSGK, v_BSGK, first, operator)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(forward_tiling, backward_tiling, q_BTHK, k_BSGK, v_BSGK, first, operator):
    return _attend_forward(forward_tiling, backward_tiling, q_BTHK, k_BSGK, v_BSGK, first, operator)[0]


def _attend_forward(forward_tiling, backward_tiling, q_BTHK, k_BSGK, v_BSGK, first, operator):
    del backward_tiling
    out_BTHK, lse = forward_pass(forward_tiling, q_BTHK, k_BSGK, v_BSGK, first, operator)
    return out_BTHK, (q_BTHK, k_BSGK, v_BSGK, first, operator, out_BTHK, lse)


def _attend_backward(forward_tiling, backward_tiling, saved, dout_BTHK):
    q_BTHK, k_BSGK, v_BSGK, first, operator, out_BTHK, lse = saved
    dq_BTHK, dk_BSGK, dv_BSGK, doperator = backward_pass(
        forward_tiling, backward_tiling, q_BTHK, k_BSGK, v_BSGK, first, operator, out_BTHK, lse, dout_BTHK
    )
    return dq_BTHK, dk_BSGK, dv_BSGK, np.zeros((), jax.dtypes.float0), doperator


_attend.defvjp(_attend_forward, _attend_backward)
