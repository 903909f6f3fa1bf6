"""Plain causal attention on GPUs with cuDNN's flash attention, for models without bias and processor (NoPE, RoPE).

In: q, k, v. Out: attended values. Next: `kernels/__init__.py`, which checks positions.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dape_jax.model.biases import DistanceBias
from dape_jax.model.scores import Mask

HEAD_DIM_MULTIPLE = 8


def why_not(
    q_BTHK: jax.ShapeDtypeStruct | Array, k_BSGK: jax.ShapeDtypeStruct | Array, bias: DistanceBias | None, mask: Mask
) -> str | None:
    """Return why cuDNN cannot compute this causal attention, or None if it can."""
    if bias is not None:
        return f"cuDNN takes a bias only as an array as large as the scores, not as the function {type(bias).__name__}"
    if q_BTHK.dtype != jnp.bfloat16:
        return f"q is {q_BTHK.dtype.name}; cuDNN takes bfloat16"
    if q_BTHK.shape[3] % HEAD_DIM_MULTIPLE:
        return f"K = {q_BTHK.shape[3]}; cuDNN takes multiples of {HEAD_DIM_MULTIPLE}"
    if mask.row_stride != 1 or q_BTHK.shape[1] != k_BSGK.shape[1]:
        return "the rows are not all rows of the sequence, as cuDNN's causal mask assumes"
    return None


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    *,
    window: int | None,
    interpret: bool,
) -> Float[Array, "B T H K"]:
    """Return causal attention: softmax(Q K^T / sqrt(K)) V.

    Args:
        q_BTHK: queries.
        k_BTGK: keys.
        v_BTGK: values.
        window: a query sees keys at a distance below this, or None for all keys.
        interpret: use XLA's implementation, which runs on any device.
    """
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BTGK,
        v_BTGK,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla" if interpret else "cudnn",
    )
