"""The operator on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dape_jax.kernels.tables import Operator
from dape_jax.kernels.tpu.backward import _call_backward
from dape_jax.kernels.tpu.forward import _call_forward
from dape_jax.kernels.tpu.tiling import AWAY, BLOCKS, GROUP, VMEM_BYTES, Tiling, _tilings, cost, num_steps, tilings
from dape_jax.model.processors import DapeConfig

__all__ = ["BLOCKS", "GROUP", "VMEM_BYTES", "Tiling", "attend", "cost", "num_steps", "tilings", "why_not"]


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
    """Attention by the kernel; arguments as `kernels.attend_fused` has them.

    Args:
        q_BTHK: queries.
        k_BSGK: keys.
        v_BSGK: values.
        first: the column at which the first row stands.
        operator: what is done to the scores.
        dtype: of the convolutions' operands.
        row_stride: columns from one row to the next.
        window: columns that a row sees; None for all.
        interpret: whether, and how, the kernel is interpreted.

    Raises:
        NotImplementedError: the chip's fast memory does not hold a block of rows with its tables.
    """
    tilings = _tilings(
        q_BTHK,
        k_BSGK,
        width=operator.width,
        pad=operator.pad,
        num_channels=operator.hidden_CN.shape[0],
        dtype=jnp.dtype(dtype),
        row_stride=row_stride,
        window=window,
        interpret=interpret,
    )
    return _attend(*tilings, q_BTHK, k_BSGK, v_BSGK, first, operator)


def why_not(
    q_BTHK: Any, k_BSGK: Any, config: DapeConfig, *, row_stride: int, window: int | None, device_kind: str | None
) -> str | None:
    """Why the chip cannot run the kernel; None if it can."""
    options = {"row_stride": row_stride, "window": window, "device_kind": device_kind}
    try:
        tilings(q_BTHK, k_BSGK, config, dtype=q_BTHK.dtype, **options)
    except NotImplementedError as error:
        return str(error)
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(forward, backward, q_BTHK, k_BSGK, v_BSGK, first, operator):
    return _attend_forward(forward, backward, q_BTHK, k_BSGK, v_BSGK, first, operator)[0]


def _attend_forward(forward, backward, q_BTHK, k_BSGK, v_BSGK, first, operator):
    del backward
    out_BHTK, lse = _call_forward(forward, q_BTHK, k_BSGK, v_BSGK, first, operator)
    return jnp.moveaxis(out_BHTK, 1, 2), (q_BTHK, k_BSGK, v_BSGK, first, operator, out_BHTK, lse)


def _attend_backward(forward, backward, saved, dout_BTHK):
    q_BTHK, k_BSGK, v_BSGK, first, operator, out_BHTK, lse = saved
    lse = lse.reshape(lse.shape[0], -1)[:, : forward.num_rows * forward.heads]
    lost = -lse.shape[1] % (backward.block * backward.heads)
    # Rows that fill up the last block have no probability anywhere.
    lse = jnp.pad(lse, ((0, 0), (0, lost)), constant_values=-AWAY)
    gradients = _call_backward(backward, q_BTHK, k_BSGK, v_BSGK, first, operator, out_BHTK, lse, dout_BTHK)
    dq_BTHK, dk_BSGK, dv_BSGK, doperator = gradients
    return dq_BTHK, dk_BSGK, dv_BSGK, np.zeros((), jax.dtypes.float0), doperator


_attend.defvjp(_attend_forward, _attend_backward)
