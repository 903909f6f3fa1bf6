"""Implement the attention layer in PyTorch: as in the listing of the paper's appendix L, and plain causal attention.

In: weights and inputs of `attention.py`. Out: functions to time. PyTorch is imported only here, and only if requested.

Heads come before positions in q, k, v and out, so that PyTorch need not transpose. All arrays have full size and one
dtype, except Kerple's logarithm and the softmax, which are float32.
"""

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import Call

BIASES = ("nope", "alibi", "kerple")
PLAIN = "plain torch"
NAMES = ("torch eager", "torch.compile", PLAIN)


def why_not_torch(platform: str) -> str | None:
    """Return why PyTorch cannot be compared with JAX on a platform, or None if it can."""
    if find_spec("torch") is None:
        return "PyTorch is not installed (pip install -e '.[torch]')"
    import torch  # pyright: ignore[reportMissingImports]

    if platform == "gpu" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA device"
    if platform not in ("cpu", "gpu"):
        return f"PyTorch does not support the platform {platform!r} here"
    return None


def torch_function(
    name: str, bias: Any, dape: Any, arrays: list[jax.Array], direction: str
) -> tuple[Call, float | None]:
    """Return a call that computes the layer in PyTorch, and the seconds of the first call if it compiles, or None.

    Args:
        name: one of `NAMES`.
        bias: module of a bias of `BIASES`, or None.
        dape: module of the processor.
        arrays: q, k, v, cotangent, [B, T, H, K].
        direction: "forward", or "backward" for out and all gradients.
    """
    import torch  # pyright: ignore[reportMissingImports]

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    dtype = getattr(torch, str(arrays[0].dtype))
    torch.set_num_threads(os.cpu_count() or 1)

    def tensor(x: Any, dtype: Any = dtype) -> Any:
        return torch.tensor(np.asarray(jnp.asarray(x, jnp.float32))).to(device, dtype)

    q_BHTK, k_BHSK, v_BHSK, cotangent_BHTK = (tensor(x).permute(0, 2, 1, 3).contiguous() for x in arrays)
    leaves = [x.requires_grad_() for x in (q_BHTK, k_BHSK, v_BHSK)]
    if name == PLAIN:

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, is_causal=True)

    else:
        forward, parameters = _listing(bias, dape, q_BHTK, k_BHSK, v_BHSK, tensor)
        leaves += [x.requires_grad_() for x in parameters]
    if name == "torch.compile":
        torch._dynamo.config.recompile_limit = 1000  # so that no shape falls back to eager execution
        forward = torch.compile(forward, dynamic=False)

    def run() -> dict[str, Any]:
        if direction == "forward":
            with torch.no_grad():
                return {"out": forward()}
        out_BHTK = forward()
        gradients = torch.autograd.grad(out_BHTK, leaves, cotangent_BHTK)
        return {"out": out_BHTK.detach(), **dict(zip("qkv", gradients, strict=False)), "others": gradients[3:]}

    def wait(_: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    if name != "torch.compile":
        return Call(run, wait), None
    started = time.perf_counter()
    wait(run())
    return Call(run, wait), time.perf_counter() - started


def _listing(
    bias: Any, dape: Any, q_BHTK: Any, k_BHSK: Any, v_BHSK: Any, tensor: Callable[..., Any]
) -> tuple[Any, list[Any]]:
    """Return the result of the listing's forward pass, and its parameters."""
    import torch  # pyright: ignore[reportMissingImports]

    batch, _, length, head_dim = q_BHTK.shape
    parameters: list[Any] = []

    def convolution(kernel_WIO: Any, bias_O: Any) -> Any:
        width, inputs, outputs = kernel_WIO.shape
        conv = torch.nn.Conv2d(inputs, outputs, (1, width), padding=(0, width // 2))
        conv.weight = torch.nn.Parameter(tensor(kernel_WIO).permute(2, 1, 0)[:, :, None].contiguous())
        conv.bias = torch.nn.Parameter(tensor(bias_O))
        return conv

    mlp = None
    if hasattr(dape, "output_WCH"):
        halves = [half[...] for half in (dape.scores_WHC, dape.bias_WHC) if half is not None]
        mlp = torch.nn.Sequential(
            convolution(jnp.concatenate(halves, 1), dape.hidden_bias_C[...]),
            torch.nn.LeakyReLU(0.01),
            convolution(dape.output_WCH[...], dape.output_bias_H[...]),
        )
        parameters += mlp.parameters()
    pos_T = jnp.arange(length)
    is_future_TS = tensor(pos_T[:, None] < pos_T[None], torch.bool)
    p_and_a: list[Any] = []
    distance_TS = alibi_HTS = None
    if hasattr(bias, "p_H"):  # Kerple
        p_and_a = [tensor(x[...], torch.float32) for x in (bias.p_H, bias.a_H)]
        distance_TS = tensor(jnp.maximum(pos_T[:, None] - pos_T[None], 0), torch.float32)
        parameters += p_and_a
    elif bias is not None:
        alibi_HTS = tensor(bias(pos_T, pos_T))

    def forward() -> Any:
        total = scores_BHTS = torch.matmul(q_BHTK, k_BHSK.transpose(-1, -2)) / head_dim**0.5
        features, bias_HTS = [scores_BHTS], alibi_HTS
        if distance_TS is not None:
            p_H11, a_H11 = (x.clamp(min=0.01)[:, None, None] for x in p_and_a)
            bias_HTS = (-p_H11 * torch.log(1 + a_H11 * distance_TS)).to(scores_BHTS.dtype)
        if bias_HTS is not None:
            features.append(torch.tile(bias_HTS, (batch, 1, 1, 1)))
            total = total + bias_HTS
        if mlp is not None:
            total = total + mlp(torch.tril(torch.cat(features, 1)))
        total = total.masked_fill(is_future_TS, torch.finfo(total.dtype).min)
        probs_BHTS = torch.softmax(total, -1, dtype=torch.float32).to(v_BHSK.dtype)
        return torch.matmul(probs_BHTS, v_BHSK)

    return forward, parameters


def as_numpy(results: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return out and the gradients of q, k and v in the layout of `attention.py`, float32."""
    return {
        name: x.detach().permute(0, 2, 1, 3).float().cpu().numpy() for name, x in results.items() if name != "others"
    }


def bytes_of_call(call: Call) -> int:
    """Return the memory of a call on CUDA; see `measure.py`."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call.start()
    taken = torch.cuda.max_memory_allocated() - before
    del result
    return taken


def empty_cache() -> None:
    """Free the GPU memory cached by PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
