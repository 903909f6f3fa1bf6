"""The fused operator: `attention.attend` without a score in memory, for a bias that is a function of the distance.

In: what `attend` is given. Out: the same values and gradients, or `NotImplementedError` with the reason. Next:
`attention.py`, whose `Fused` and `Auto` call it.

`tables.py` turns bias and processor into what a kernel reads: the kernels of the two convolutions, and what the bias
gives as functions of the distance. `tpu.py` and `gpu.py` are a kernel each. `docs/kernel.md` explains how they work.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dape_jax.kernels import tpu
from dape_jax.kernels.tables import left_pad, make_operator, vary_alike
from dape_jax.model.processors import Dape

KERNELS = ("tpu", "gpu")
DTYPES = (jnp.float32, jnp.bfloat16)
MAX_HEADS = MAX_CHANNELS = 64
MAX_HEAD_DIM = 128
MAX_WIDTH = 7


def why_not_fused(
    q_BTHK: jax.ShapeDtypeStruct | Array,
    k_BSGK: jax.ShapeDtypeStruct | Array,
    *,
    bias: Any = None,
    processor: Any = None,
    causal: bool = True,
    window: int | None = None,
    row_stride: int = 1,
    platform: str,
    device_kind: str | None = None,
) -> str | None:
    """Why there is no kernel for this attention; None if there is one.

    Args:
        q_BTHK: queries, or their shape and dtype.
        k_BSGK: keys, or their shape and dtype.
        bias: position bias or contextual encoding; None for none.
        processor: what is done to the scores; None for nothing.
        causal: whether a query sees no key after it.
        window: columns that a query sees; None for all.
        row_stride: columns from one row to the next.
        platform: of the devices: "tpu", "gpu" or "cpu".
        device_kind: of the devices, as JAX calls it; None for that of those that there are.
    """
    if platform not in KERNELS:
        return f"the devices are of the platform {platform!r}, and the kernels for {' and '.join(KERNELS)}"
    if not isinstance(processor, Dape):
        return "the kernels are those of DAPE"
    config = processor.config
    limits = {
        "H": (q_BTHK.shape[2], MAX_HEADS),
        "K": (q_BTHK.shape[3], MAX_HEAD_DIM),
        "C": (config.channels, MAX_CHANNELS),
        "W": (config.kernel_width, MAX_WIDTH),
    }
    for name, (value, limit) in limits.items():
        if value > limit:
            return f"{name} = {value}; the kernels take up to {limit}"
    for name, dtype in {"q": q_BTHK.dtype, "k": k_BSGK.dtype, "the processor": processor.dtype or jnp.float32}.items():
        if dtype not in DTYPES or (name == "k" and dtype != q_BTHK.dtype):
            known = " or ".join(jnp.dtype(dtype).name for dtype in DTYPES)
            return f"{name} is {jnp.dtype(dtype).name}; the kernels take {known}, and one for q, k and v"
    if not causal:
        return "causal = False; the kernels skip what lies after a query"
    if config.leak:
        return "leak = True; the kernels mask before they convolve"
    if config.edge != "prefix" and left_pad(config) < config.kernel_width - 1:
        return f"edge = {config.edge!r}; the kernels have the edge 'prefix', where rows do not depend on their number"
    if bias is not None and not getattr(bias, "of_distance", False):
        return (
            f"{type(bias).__name__} is no function of the distance alone: what the first convolution makes of it is as "
            "large as the scores, and no table"
        )
    if platform == "tpu":
        return tpu.why_not(q_BTHK, k_BSGK, config, row_stride=row_stride, window=window, device_kind=device_kind)
    return None


def attend_fused(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    q_pos_T: Int[Array, "T"],
    k_pos_S: Int[Array, "S"],
    *,
    bias: Any = None,
    processor: Any = None,
    causal: bool = True,
    window: int | None = None,
    row_stride: int = 1,
    platform: str,
    interpret: Any = False,
) -> Float[Array, "B T H K"]:
    """`attention.attend`, by a kernel.

    Args:
        q_BTHK: see `attend`.
        k_BSGK: see `attend`.
        v_BSGK: see `attend`.
        q_pos_T: positions of the queries, each `row_stride` after the one before it.
        k_pos_S: positions of the keys, each one after the one before it, with those of the queries among them. Where
            positions turn out to be others, which is known when the program runs, all values are NaN.
        bias: see `attend`; a function of the distance.
        processor: see `attend`; a `Dape`.
        causal: see `attend`; True.
        window: see `attend`.
        row_stride: columns from one row to the next.
        platform: whose kernel.
        interpret: run it in Pallas' interpreter, slowly, on whatever device: True, or how in detail.

    Raises:
        NotImplementedError: there is no kernel for this; the reason stands in it.
    """
    reason = why_not_fused(
        q_BTHK,
        k_BSGK,
        bias=bias,
        processor=processor,
        causal=causal,
        window=window,
        row_stride=row_stride,
        platform=platform,
    )
    if reason is None and v_BSGK.dtype != k_BSGK.dtype:
        reason = f"k is {k_BSGK.dtype} and v is {v_BSGK.dtype}"
    if reason is not None:
        raise NotImplementedError(f"no fused attention for this: {reason}")
    processor.check_bias(bias is not None)
    neighbours = jnp.all(jnp.diff(q_pos_T) == row_stride) & jnp.all(jnp.diff(k_pos_S) == 1)
    neighbours &= (q_pos_T[0] >= k_pos_S[0]) & (q_pos_T[-1] <= k_pos_S[-1])
    # The column at which the first row stands; one that is there, whatever the positions are.
    first = jnp.where(neighbours, q_pos_T[0] - k_pos_S[0], 0).astype(jnp.int32)
    operator = make_operator(
        bias,
        processor,
        num_heads=q_BTHK.shape[2],
        num_rows=q_BTHK.shape[1],
        num_keys=k_BSGK.shape[1],
        first=first,
        row_stride=row_stride,
        window=window,
        valid=neighbours,
    )
    kernel = importlib.import_module(f"{__name__}.{platform}")  # one platform's tools need not be there for another's
    return kernel.attend(
        *vary_alike(q_BTHK, k_BSGK, v_BSGK, first, operator),
        dtype=processor.dtype or jnp.dtype(jnp.float32),
        row_stride=row_stride,
        window=window,
        interpret=interpret,
    )
