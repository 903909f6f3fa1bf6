"""Run the CUDA kernels of DAPE attention on PyTorch's tensors, with gradients.

In: queries, keys, values, a bias of the distance and a processor. Out: attended values. `modeling_dape.py` calls it;
both files, and `cuda_kernels.py` with the kernels' sources, are copied into every exported checkpoint. NVRTC compiles
the kernels and the CUDA driver launches them, both by ctypes.

The functions are those of `dape_jax.kernels.tables` and `dape_jax.kernels.cuda` in PyTorch. Autograd differentiates the
tables, so the kernels know neither the bias nor its parameters.
"""

import ctypes
import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .cuda_kernels import (
    BLOCK_BYTES,
    LOG2E,
    MAX_GRADIENT,
    MAX_KNEE,
    SOURCES,
    Tiling,
    cached_code,
    fragments,
    in_register_order,
    multiple,
    nvrtc,
    shared_bytes,
    tilings,
)

SLOPE = 0.01  # negative slope of the LeakyReLU
MIN_ROWS = 16  # with fewer, as in generation, PyTorch computes no more than the tables


def why_not(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, processor: Any) -> str | None:
    """Return why the kernels cannot run for these tensors on this device, or None if they can."""
    if q_BTHK.shape[1] < MIN_ROWS:
        return f"fewer than {MIN_ROWS} rows"
    if not q_BTHK.dtype == k_BSGK.dtype == v_BSGK.dtype:
        return "the dtypes of q, k and v differ"
    if (reason := why_not_on(q_BTHK.device, q_BTHK.dtype)) is not None:
        return reason
    try:
        tilings_of(q_BTHK, k_BSGK, processor)
    except NotImplementedError as error:
        return str(error)
    return None


def why_not_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot run for this dtype on this device, or None if they can."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if os.getenv("DAPE_CUDA_KERNELS") != "1":  # until they are measured right and faster on a GPU
        return "DAPE_CUDA_KERNELS=1 is not set: the kernels are tested in an emulator only"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {name_of(dtype)}, not bfloat16 or float16"
    if torch.version.cuda is None or float(capability(device)) < 8:
        return "the GPU is not NVIDIA's with compute capability 8.0 or more"
    try:
        nvrtc()
        driver()
    except OSError as error:
        return str(error)
    return None


def name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def tilings_of(q_BTHK: Tensor, k_BSGK: Tensor, processor: Any) -> tuple[Tiling, Tiling]:
    """Return the tilings of the kernels; see `tilings`."""
    sizes = (1, 0, 0)
    if processor is not None:
        width, channels, _ = processor.output_WCH.shape
        sizes = width, processor.halo, channels
    (heads, head_dim), groups = q_BTHK.shape[2:], k_BSGK.shape[2]
    limit = shared_bytes(capability(q_BTHK.device))
    return tilings((heads, groups, head_dim), name_of(q_BTHK.dtype), sizes, row_stride=1, limit=limit)


def attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, bias: Any, processor: Any, window: int | None) -> Tensor:
    """Return `modeling_dape.attend`, computed by the kernels, for rows that `why_not` accepts."""
    t, backward = tilings_of(q_BTHK, k_BSGK, processor)
    (num_rows, _, head_dim), num_keys = q_BTHK.shape[1:], k_BSGK.shape[1]
    call = Call(t, backward, window or 2**30, head_dim**-0.5, num_keys - num_rows)
    with torch.autocast(q_BTHK.device.type, enabled=False):
        q, k, v = (functional.pad(x, (0, -head_dim % 16)).contiguous() for x in (q_BTHK, k_BSGK, v_BSGK))
        first, second, knee, added, left_knee, left_added = make_operator(bias, processor, q, num_keys, window)
        more = 0, t.channels - knee.shape[1]
        first, second = (functional.pad(heads_to_slots(t, x), (0, 0, *more)) for x in (first.mT, second))
        knee, left_knee = (functional.pad(x, more) for x in (knee, left_knee))
        added, left_added = (heads_to_slots(t, x) for x in (added, left_added))
        return Attention.apply(call, q, k, v, first, second, knee, added, left_knee, left_added)[..., :head_dim]


def heads_to_slots(t: Tiling, x: Tensor) -> Tensor:
    """Move the heads of the last dim to their slots: each quarter of 4 slots has the next heads, then zeros."""
    quarters = t.slots // 4
    of_quarter = -(-t.heads // quarters)
    x = functional.pad(x, (0, quarters * of_quarter - t.heads)).unflatten(-1, (quarters, of_quarter))
    return functional.pad(x, (0, 4 - of_quarter)).flatten(-2)


def convolve(x_XJI: Tensor, kernel_WIO: Tensor) -> Tensor:
    """Return y[.., j, o] = sum over w and i of kernel[w, i, o] x[.., j + w, i], with W - 1 fewer columns."""
    return torch.einsum("...JIW,WIO->...JO", x_XJI.unfold(-2, len(kernel_WIO), 1), kernel_WIO)


def make_operator(bias: Any, processor: Any, q_BTHK: Tensor, num_keys: int, window: int | None) -> tuple[Tensor, ...]:
    """Return the convolutions and the tables of `dape_jax.kernels.tables.make_operator`, which describes them.

    Returns:
        In float32, the convolutions [W, H, C] of the scores and [W, C, H], knee [N, C], added [N, H], and in the first
        columns [P, T, C] and [2 P, T, H].
    """
    (num_rows, heads), zeros = q_BTHK.shape[1:3], functools.partial(torch.zeros, device=q_BTHK.device)
    arange = functools.partial(torch.arange, device=q_BTHK.device)

    def of_distance(distance_N: Tensor) -> Tensor:
        if bias is None:
            return zeros(len(distance_N), heads)
        return bias(distance_N[None].clamp(min=0).float(), zeros(1, 1))[0, :, 0].T

    if processor is None:
        tables = zeros(num_keys, 0), of_distance(arange(num_keys)), zeros(0, num_rows, 0), zeros(0, num_rows, heads)
        return zeros(1, heads, 0), zeros(1, 0, heads), *tables
    (width, channels, _), pad = processor.output_WCH.shape, processor.halo
    ahead = width - 1 - pad
    num_distances = ahead + num_keys
    column_T1 = arange(num_keys - num_rows, num_keys)[:, None]
    halves = processor.scores_WHC, processor.bias_WHC
    scores_WHC, bias_WHC = (zeros(width, heads, channels) if x is None else x.float() for x in halves)
    output_WCH = processor.output_WCH.float()
    # All distances that Conv2 depends on. A larger distance is a column to the left, so the kernels are flipped.
    distance_N = arange(-3 * ahead, num_keys + 2 * pad)
    visible_N = (distance_N >= 0) & (distance_N < (window or 2**30))
    bias_NH = of_distance(distance_N).masked_fill(~visible_N[:, None], 0)
    hidden_NC = processor.hidden_bias_C.float() + convolve(bias_NH, bias_WHC.flip(0))
    # Contribution of the columns -P .. -1, which do not exist, to the hidden features of columns 0 .. P - 1.
    before_TPH = bias_NH[column_T1 - arange(-pad, 0) + 3 * ahead]
    left_TPC = convolve(functional.pad(before_TPH, (0, 0, 0, width)), bias_WHC)[:, :pad]

    # The kernels' gradient of the knee is that of all that reads h_B. The bias of Conv2 shifts a whole row and cancels
    # in the softmax.
    fixed_NC, fixed_left_TPC = hidden_NC.detach(), left_TPC.detach()
    added_NH = processor.output_bias_H.detach().float()
    added_NH = added_NH + convolve(functional.leaky_relu(fixed_NC, SLOPE), output_WCH.flip(0))
    if processor.residual:
        added_NH = added_NH + bias_NH[2 * ahead :][:num_distances]
    # The table's minus the true features of the hidden columns -P .. P - 1; rows before such a column do not read it.
    hidden_TQC = fixed_NC[(column_T1 - arange(-pad, pad) + 2 * ahead).clamp(min=0)]
    excess_TQC = functional.leaky_relu(hidden_TQC, SLOPE)
    excess_TQC[:, pad:] -= functional.leaky_relu(hidden_TQC[:, pad:] - fixed_left_TPC, SLOPE)
    left_added_TQH = convolve(functional.pad(excess_TQC, (0, 0, 0, width)), output_WCH)[:, : 2 * pad]
    knee_NC, left_knee_TPC = (1 - SLOPE) * hidden_NC[ahead:][:num_distances], (1 - SLOPE) * left_TPC
    return scores_WHC, output_WCH, knee_NC, added_NH, left_knee_TPC.movedim(1, 0), left_added_TQH.movedim(1, 0)


# ---- launch


def capability(device: torch.device) -> str:
    """Return the compute capability of a GPU, "9.0"."""
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


@functools.cache
def driver() -> ctypes.CDLL:
    """Load the CUDA driver.

    Raises:
        OSError: there is none.
    """
    return ctypes.CDLL("libcuda.so.1")


def check(status: int) -> None:
    """Raise `RuntimeError` with the driver's message if a call has failed."""
    if status:
        message = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(message))
        raise RuntimeError(f"CUDA driver: {(message.value or b'unknown error').decode()}")


@functools.cache
def function_of(tiling: Tiling, device: torch.device) -> ctypes.c_void_p:
    """Return a kernel, compiled and loaded on a device, which is the current one."""
    defines = tiling.defines() | {"SHARED_BYTES": tiling.shared_bytes}
    architecture = f"sm_{capability(device).replace('.', '')}"
    code = cached_code(SOURCES, tiling.kernel, architecture, defines)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuModuleLoadData(ctypes.byref(module), code))
    check(driver().cuModuleGetFunction(ctypes.byref(function), module, f"dape_{tiling.kernel}".encode()))
    check(driver().cuFuncSetAttribute(function, 8, tiling.shared_bytes))  # maximum of dynamic shared memory
    return function


def launch(tiling: Tiling, grid: tuple[int, int, int], tensors: list[Tensor], ints: list[int], scale: float) -> None:
    """Run a kernel on the current stream. Its arguments: pointers to inputs and outputs, the ints, the scale."""
    device = tensors[0].device
    values = [*(ctypes.c_void_p(x.data_ptr()) for x in tensors), *map(ctypes.c_int, ints), ctypes.c_float(scale)]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    with torch.cuda.device(device):
        function, stream = function_of(tiling, device), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = (*grid, 32 * tiling.warps, 1, 1, tiling.shared_bytes)
        check(driver().cuLaunchKernel(function, *size, stream, pointers, None))


# ---- forward and backward


@dataclasses.dataclass(frozen=True)
class Call:
    """Static arguments: tilings, window, factor of the scores, and the column of the first row."""

    forward: Tiling
    backward: Tiling
    window: int
    scale: float
    first: int


def operands(t: Tiling, first: int, operator: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights of a kernel, the tables, and the column of the first row."""
    half = torch.float32 if t.dtype == "float32" else torch.float16
    of_scores_WCS, output_WCS, *tables = operator
    parts = [of_scores_WCS / LOG2E, output_WCS.mT * LOG2E, output_WCS, of_scores_WCS.mT]
    weights = [fragments(x).to(half) for x in (parts[:2] if t.kernel == "forward" else parts) if t.channels]
    knee, added, left_knee, left_added = tables
    knee, left_knee = (x.clamp(-MAX_KNEE, MAX_KNEE).to(half) for x in (knee, left_knee))
    tables = [in_register_order(x) for x in (knee, added * LOG2E, left_knee, left_added * LOG2E)]
    first_column = torch.full((1,), first, dtype=torch.int32, device=knee.device)
    found = [torch.cat(weights) if weights else knee, *tables]
    return [*(x.contiguous() for x in found), first_column]


class Attention(torch.autograd.Function):
    """Attention of the last rows by the kernels.

    Arguments: the call; q, k, v; and the operator with slots S of heads: convolutions [W, C, S], tables [N, C], [N, S],
    [P, T, C] and [2 P, T, S].
    """

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, *operator: Tensor) -> Tensor:
        """Return attended values; keep the logarithms of the sums of exponentials in base 2."""
        t, (batch, num_rows, heads, _), num_keys = call.forward, q.shape, k.shape[1]
        blocks = -(-num_rows // t.rows)
        chunks, per_chunk = t.chunks(blocks * batch, num_keys)
        empty = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
        exact, lse = empty(*q.shape), empty(batch, num_rows, heads)
        if chunks > 1:
            exact, lse = empty(chunks, *q.shape), empty(chunks, batch, num_rows, heads, 2)
        ints = [num_rows, num_keys, len(operator[3]), call.window, per_chunk]
        tensors = [q, k, v, *operands(t, call.first, operator), exact, lse]
        launch(t, (blocks, chunks, batch), tensors, ints, call.scale * LOG2E)
        if chunks > 1:
            reference, total = lse.unbind(-1)
            largest = reference.amax(0)
            weight = torch.exp2(reference - largest)
            sums = (weight * total).sum(0)
            exact = torch.where(total[..., None] > 0, exact, 0)  # a chunk without columns has no values
            exact = (weight[..., None] * exact).sum(0) / sums[..., None]
            lse = largest + torch.log2(sums)
        ctx.call, out = call, exact.to(q.dtype)
        ctx.save_for_backward(q, k, v, *operator, out, (exact - out).to(q.dtype), lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, dout: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the operator, by blocks of rows, which limit the memory of P and dS."""
        q, k, v, *operator, out, rest, lse = ctx.saved_tensors
        call, (batch, num_rows, heads, _), num_keys = ctx.call, q.shape, k.shape[1]
        dout = dout.to(q.dtype)
        delta = ((out.float() + rest.float()) * dout.float()).sum(-1)
        scale = gradient_scale(dout, v, operator)
        block = max(1, BLOCK_BYTES // (4 * batch * heads * num_keys * call.backward.rows)) * call.backward.rows
        total = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v, *operator)]
        for start in range(0, num_rows, block):
            stop = min(start + block, num_rows)
            rows, keys, whole = slice(start, stop), slice(call.first + stop), slice(None)
            # Second dim of q, k, v and the operator; distances, channels and slots are whole.
            places = [(whole, x) for x in (rows, keys, keys, *4 * [whole], rows, rows)]
            inputs = [x[at].contiguous() for x, at in zip((q, k, v, *operator), places, strict=True)]
            of_rows = [x[:, rows].contiguous() for x in (dout, lse, delta)]
            found = gradients(dataclasses.replace(call, first=call.first + start), inputs, of_rows, scale)
            for x, at, part in zip(total, places, found, strict=True):
                x[at] += part
        return None, *(x.to(y.dtype) for x, y in zip(total, (q, k, v, *operator), strict=True))


def gradient_scale(dout: Tensor, v: Tensor, operator: Sequence[Tensor]) -> Tensor:
    """Return a power of two with which gradients of scores and of hidden channels are at most `MAX_GRADIENT`."""

    def longest(x: Tensor) -> Tensor:
        return x.float().square().sum(-1).amax().sqrt()

    gain = torch.ones((), device=v.device)
    if operator[1].numel():
        first, second = (x.abs().sum((0, dim)).amax() for x, dim in zip(operator, (1, 2), strict=False))
        gain = torch.maximum(second, 1 + second * first)
    exponent = torch.floor(torch.log2(MAX_GRADIENT / (2 * longest(dout) * longest(v) * gain)))
    return torch.exp2(exponent.clamp(-100, 100))


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return the product in float32. Scaled sums could exceed float16, so its factors are converted."""
    return x.float() @ y.float() if x.dtype == torch.float16 else (x @ y).float()


def gradients(call: Call, inputs: Sequence[Tensor], of_rows: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs q, k, v and the operator; k and v end at the last row's column.

    `of_rows` are the gradient of the output, the logarithms of the sums, and the products of output and gradient.
    """
    q, k, v, *operator = inputs
    t, (batch, num_rows, heads, _), (num_keys, groups) = call.backward, q.shape, k.shape[1:3]
    C, W, ahead, num_distances = t.channels, t.width, t.ahead, len(operator[3])
    blocks, padded = -(-num_rows // t.rows), num_keys + 2 * ahead
    chunks, per_chunk = t.chunks(blocks * batch, padded)
    padded = multiple(padded, t.columns)
    grid, zeros = (blocks, chunks, batch), functools.partial(torch.zeros, device=q.device)
    probs, d_scores = zeros(2, batch, heads, blocks * t.rows, padded, dtype=q.dtype)
    num_parts, num_tables = math.prod(grid), batch * t.layers(chunks, per_chunk) * blocks
    start, entries = t.rows + t.columns, padded + 2 * t.rows + t.columns
    shapes = (num_tables, entries, C + t.slots), (num_parts, W, t.slots, C), (num_parts, W, C, t.slots)
    shapes += (batch, t.pad, num_rows, C), (batch, 2 * t.pad, num_rows, t.slots)
    parts = [zeros(shape) for shape in shapes]
    tensors = [q, k, v, *of_rows, *operands(t, call.first, operator), scale, probs, d_scores, *parts]
    ints = [num_rows, num_keys, num_distances, call.window, per_chunk, padded]
    launch(t, grid, tensors, ints, call.scale * LOG2E)

    probs, d_scores = (x[:, :, :num_rows].unflatten(1, (groups, -1)) for x in (probs, d_scores))  # [B, G, R, T, S]
    q, dout = (x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4) for x in (q, of_rows[0]))  # [B, G, R, T, K]
    d_scores, probs = d_scores[..., :num_keys], probs[..., 2 * ahead :][..., :num_keys]
    factor = call.scale / scale
    dq = factor * matmul(d_scores, k.movedim(1, 2)[:, :, None]).flatten(1, 2)
    dk = factor * matmul(d_scores.flatten(2, 3).mT, q.flatten(2, 3))  # also summed over R
    dv = matmul(probs.flatten(2, 3).mT, dout.flatten(2, 3))
    d_tables, d_first, d_second, d_left_knee, d_left_added = (x.sum(0) / scale for x in parts)
    d_tables = functional.pad(d_tables, (0, 0, 0, max(0, num_distances + start - entries)))
    d_knee = d_tables[start:][:num_distances, :C] / (1 - SLOPE)
    d_added = d_tables[start - ahead :][:num_distances, C:]
    of_inputs = (x.movedim(1, 2) for x in (dq, dk, dv))
    return *of_inputs, d_first.mT / LOG2E, d_second, d_knee, d_added, d_left_knee, d_left_added
