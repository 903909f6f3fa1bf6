"""Launch the kernels with jaxlib's custom call for Triton, which takes any PTX.

In: a tiling, arrays and scalars. Out: arrays. `nvrtc.py` compiles.
"""

import importlib
import zlib
from pathlib import Path
from typing import Any

import jax
from jax import Array

from dape_jax.kernels.cuda.nvrtc import cached_code, nvrtc
from dape_jax.kernels.cuda.tiling import Tiling

SOURCES = {
    name: (Path(__file__).parent / name).read_text(encoding="utf-8")
    for name in ("warp.h", "tile.h", "forward.cu", "backward.cu")
}
TARGET = "triton_kernel_call_ffi"


def capability() -> str:
    """Return the compute capability of the GPU, "9.0"; without a GPU, an H100's."""
    return getattr(jax.devices()[0], "compute_capability", "9.0")


def check() -> None:
    """Raise `NotImplementedError` if kernels cannot be compiled or launched here."""
    try:
        nvrtc()
        _launcher()
    except (OSError, ImportError, AttributeError) as error:
        raise NotImplementedError(f"the kernels cannot be compiled: {error}") from error


def _launcher() -> Any:
    """Return jaxlib's module that launches kernels.

    Raises:
        ImportError: this version of jaxlib has none.
        AttributeError: JAX's plugin for CUDA is missing.
    """
    launcher = importlib.import_module("jaxlib.gpu_triton")
    assert launcher.TritonKernel
    return launcher


def launch(
    tiling: Tiling, grid: tuple[int, int, int], out: list, arrays: list[Array], ints: list[int], scale: float
) -> list[Array]:
    """Run a kernel on the GPU. Its arguments: pointers to the arrays and to `out`, then the ints, then the scale."""
    launcher, architecture = _launcher(), capability().replace(".", "")
    defines = tiling.defines() | {"SHARED_BYTES": tiling.shared_bytes}
    ptx = cached_code(SOURCES, tiling.kernel, f"compute_{architecture}", defines).decode()
    name = f"dape_{tiling.kernel}"
    kernel = launcher.TritonKernel(name, tiling.warps, 1, tiling.shared_bytes, ptx, "", int(architecture))
    zeroed = [x.size * x.dtype.itemsize if tiling.kernel == "backward" else 0 for x in out]
    parameters = [launcher.create_array_parameter(size, 16) for size in [0] * len(arrays) + zeroed]
    parameters += [launcher.create_scalar_parameter(int(x), "i32") for x in ints]
    parameters += [launcher.create_scalar_parameter(float(scale), "fp32")]
    proto = launcher.TritonKernelCall(kernel, *grid, parameters).to_proto(name, b"")
    call = jax.ffi.ffi_call(TARGET, out, vmap_method="sequential")
    return list(call(*arrays, opaque=zlib.compress(proto)))
