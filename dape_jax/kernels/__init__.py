"""Fused operator: `attention.attend` without scores in memory, for biases that depend only on the distance.

In: the arguments of `attend`. Out: the same values and gradients, or `NotImplementedError` with the reason. Next:
`attention.py`, whose `Fused` and `Auto` call it.

`tables.py` converts bias and processor to the arrays that a kernel reads: the weights of the two convolutions, and the
bias's contribution as functions of the distance. `tpu/`, `cuda/` and `gpu.py` (Triton) are the kernels; without bias
and processor (NoPE, RoPE), a GPU uses cuDNN's flash attention. `docs/kernel.md` explains how they work.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dape_jax.kernels.tables import convolution_sizes, make_operator
from dape_jax.model.biases import DistanceBias
from dape_jax.model.processors import Dape, Plain, ScoreMod
from dape_jax.model.scores import Mask, Positions
from dape_jax.sharding import vary_alike

KERNELS = ("tpu", "gpu", "cuda")
DTYPES = (jnp.float32, jnp.bfloat16)
LIMITS = {"H": 64, "K": 128, "C": 64, "W": 7}
CUDNN_HEAD_DIM = 8  # cuDNN takes multiples of it
MIN_CAPABILITY = 8.0  # compute capability of an NVIDIA GPU: the least that Triton and the kernels in CUDA support


def why_not_fused(
    q_BTHK: jax.ShapeDtypeStruct | Array,
    k_BSGK: jax.ShapeDtypeStruct | Array,
    score_mod: ScoreMod = ScoreMod(),
    mask: Mask = Mask(),
    *,
    v_dtype: DTypeLike | None = None,
    has_segments: bool = False,
    platform: str,
    device_kind: str | None = None,
) -> str | None:
    """Return why no kernel supports this attention, or None if one does.

    Args:
        q_BTHK: queries, or their shape and dtype.
        k_BSGK: keys, or their shape and dtype.
        score_mod: bias and processor.
        mask: which keys a query sees, and the step between rows.
        v_dtype: dtype of the values, or None for that of the keys.
        has_segments: whether a row has segments, packed documents.
        platform: platform of the devices, "tpu", "gpu" or "cpu"; or "cuda" for the kernels in CUDA.
        device_kind: JAX's `device_kind` of the devices, or None for the devices of this process.
    """
    bias, processor, scale, cap = score_mod
    if platform not in KERNELS:
        return f"there are kernels for TPUs and GPUs, not for the platform {platform!r}"
    config, sizes = None, {"H": q_BTHK.shape[2], "K": q_BTHK.shape[3]}
    dtypes = {"q": q_BTHK.dtype, "k": k_BSGK.dtype, "v": jnp.dtype(v_dtype or k_BSGK.dtype)}
    if isinstance(processor, Dape):
        config = processor.config
        sizes |= {"C": config.channels, "W": config.kernel_width}
        dtypes["the processor"] = processor.dtype or jnp.float32
    elif not isinstance(processor, Plain):
        return f"there are kernels for DAPE and for no processor, not for {type(processor).__name__}"
    for name, size in sizes.items():
        if size > LIMITS[name]:
            return f"{name} = {size}; the kernels take up to {LIMITS[name]}"
    known_dtypes = (*DTYPES, jnp.float16) if platform == "cuda" else DTYPES
    for name, dtype in dtypes.items():
        if dtype not in known_dtypes or (name in "kv" and dtype != q_BTHK.dtype):
            known = " or ".join(jnp.dtype(dtype).name for dtype in known_dtypes)
            return f"{name} is {jnp.dtype(dtype).name}; the kernels take {known}, the same for q, k and v"
    if mask.row_stride is None:
        return "positions are given; the kernels take consecutive positions, which are those of None"
    is_listing = config is not None and config.key_halo[1] > 0  # if there is no leak
    is_distance, kind = bias is None or isinstance(bias, DistanceBias), type(bias).__name__
    is_cudnn, num_rows = platform == "gpu" and config is None, q_BTHK.shape[1]
    is_whole = mask.row_stride == 1 and num_rows == k_BSGK.shape[1]
    with_bias = f"cuDNN takes a bias only as an array as large as the scores, not as the function {kind}"
    for is_given, reason in (
        (has_segments, "segment_ids are given; the kernels do not stop at the edges of documents"),
        (scale is not None, "scale is given; the kernels multiply scores by 1 / sqrt(K)"),
        (cap is not None, "cap is given; the kernels do not cap scores"),
        (not mask.causal, "causal = False; the kernels skip keys after a query"),
        (config is not None and config.leak, "leak = True; the kernels mask before they convolve"),
        (is_listing, "edge = 'listing'; the kernels take only 'prefix', where a row depends on no later key"),
        (not is_distance, f"{kind} is not a DistanceBias: it is as large as the scores, not a table over distances"),
        (is_cudnn and bias is not None, with_bias),
        (is_cudnn and q_BTHK.dtype != jnp.bfloat16, f"q is {q_BTHK.dtype.name}; cuDNN takes bfloat16"),
        (is_cudnn and sizes["K"] % CUDNN_HEAD_DIM > 0, f"K = {sizes['K']}; cuDNN takes multiples of {CUDNN_HEAD_DIM}"),
        (is_cudnn and not is_whole, "the rows are not all rows of the sequence, as cuDNN's causal mask assumes"),
    ):
        if is_given:
            return reason
    if is_cudnn:
        return None
    reason = None if platform == "tpu" else _why_not_nvidia()
    if platform == "gpu" or reason is not None:
        return reason
    args, row_stride = (q_BTHK, k_BSGK, convolution_sizes(config)), mask.row_stride
    try:  # each kernel imports libraries that the others do not need
        if platform == "tpu":
            from dape_jax.kernels import tpu

            options = {"row_stride": row_stride, "window": mask.window, "device_kind": device_kind}
            tpu.tilings(*args, dtype=q_BTHK.dtype, **options)
        else:
            from dape_jax.kernels import cuda

            cuda.tilings_of(*args, row_stride)
    except NotImplementedError as error:
        return str(error)
    return None


def _why_not_nvidia() -> str | None:
    """Return why this process's GPU cannot run the kernels, or None if it can or if there is none."""
    found = getattr(jax.devices()[0], "compute_capability", None)  # "9.0"; of an AMD GPU: "gfx942"
    if found is None or (found.replace(".", "").isdigit() and float(found) >= MIN_CAPABILITY):
        return None
    return f"the kernels need an NVIDIA GPU of compute capability {MIN_CAPABILITY} or more; this one has {found!r}"


def attend_fused(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    positions: Positions,
    score_mod: ScoreMod = ScoreMod(),
    mask: Mask = Mask(),
    *,
    platform: str,
    interpret: Any = False,
) -> Float[Array, "B T H K"]:
    """Compute `attention.attend` with a kernel.

    Args:
        q_BTHK: see `attend`.
        k_BSGK: see `attend`.
        v_BSGK: see `attend`.
        positions: positions of the queries, each `mask.row_stride` after the previous one, and of the keys, 0..S-1.
        score_mod: a `DistanceBias` or None, and a `Dape` or `Plain`; on GPUs, `Plain` only without a bias.
        mask: causal, with any window and row stride.
        platform: platform of the kernel.
        interpret: run the kernel in Pallas' interpreter, slowly, on any device: True, or detailed options. XLA's
            implementation of the same function replaces cuDNN's kernel.

    Raises:
        NotImplementedError: no kernel supports these arguments; the message gives the reason.
    """
    options = {"v_dtype": v_BSGK.dtype, "has_segments": positions.q_start_BT is not None}
    reason = why_not_fused(q_BTHK, k_BSGK, score_mod, mask, **options, platform=platform)
    if reason is not None:
        raise NotImplementedError(f"no kernel supports this attention: {reason}")
    bias, processor = score_mod[:2]
    assert isinstance(processor, Dape | Plain)
    assert isinstance(bias, DistanceBias | None)
    dtype = jnp.dtype(jnp.float32)
    if isinstance(processor, Dape):
        processor.check_bias(bias is not None)
        dtype = processor.dtype or dtype
    if platform == "gpu" and isinstance(processor, Plain):
        window = None if mask.window is None else (mask.window - 1, 0)
        options = {"is_causal": True, "implementation": "xla" if interpret else "cudnn"}
        return jax.nn.dot_product_attention(q_BTHK, k_BSGK, v_BSGK, local_window_size=window, **options)
    first = positions.q_pos_T[0].astype(jnp.int32)  # column of the first row
    sizes = {"num_heads": q_BTHK.shape[2], "num_rows": q_BTHK.shape[1], "num_keys": k_BSGK.shape[1]}
    operator = make_operator(bias, processor, **sizes, first=first, mask=mask)
    kernel = importlib.import_module(f"{__name__}.{platform}")  # other platforms' tools may be missing
    return kernel.attend(
        *vary_alike(q_BTHK, k_BSGK, v_BSGK, first, operator),
        dtype=dtype,
        row_stride=mask.row_stride,
        window=mask.window,
        interpret=interpret,
    )
