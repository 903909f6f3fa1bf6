"""Compile the kernels with NVRTC and launch them with jaxlib's custom call for Triton, which takes any PTX.

In: a tiling, arrays and scalars. Out: arrays. `jax[cuda12]`, `jax[cuda13]` and PyTorch install NVRTC; nothing else is
needed. PTX is kept in the user's cache directory, by its source, macros and architecture.
"""

import ctypes
import functools
import hashlib
import importlib
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import jax
from jax import Array

from dape_jax.kernels.cuda.tiling import Tiling

SOURCES = Path(__file__).parent
HEADERS = ("warp.h", "tile.h")
TARGET = "triton_kernel_call_ffi"
# Bytes of shared memory that a block can have, by compute capability; the last is for others.
SHARED_BYTES = {"8.0": 163 * 1024, "8.6": 99 * 1024, "8.7": 163 * 1024, "8.9": 99 * 1024, "9.0": 227 * 1024}
SHARED_BYTES |= {"10.0": 227 * 1024, "10.3": 227 * 1024, "11.0": 227 * 1024, "12.0": 99 * 1024, "12.1": 99 * 1024}


def capability() -> str:
    """Return the compute capability of the GPU, "9.0"; without a GPU, an H100's."""
    return getattr(jax.devices()[0], "compute_capability", "9.0")


def shared_limit() -> int:
    """Return the bytes of shared memory that a block can have."""
    return SHARED_BYTES[capability()] if capability() in SHARED_BYTES else min(SHARED_BYTES.values())


def why_not() -> str | None:
    """Return why kernels cannot be compiled or launched here, or None if they can."""
    found = capability()
    if not found.replace(".", "").isdigit() or float(found) < 8:
        return f"the kernels need an NVIDIA GPU of compute capability 8.0 or more; this one has {found!r}"
    try:
        nvrtc()
        _launcher()
    except (OSError, ImportError, AttributeError) as error:
        return f"the kernels cannot be compiled: {error}"
    return None


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """Load NVRTC: the wheel that JAX or PyTorch installs, or the system's.

    Raises:
        OSError: there is none.
    """
    wheels = (path for folder in sys.path for path in sorted(Path(folder).glob("nvidia/*/lib/libnvrtc.so.1*")))
    for name in (*map(str, wheels), "libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            pass
    raise OSError("NVRTC was not found; pip install nvidia-cuda-nvrtc")


def _launcher() -> Any:
    """Return jaxlib's module that launches kernels.

    Raises:
        ImportError: this version of jaxlib has none.
        AttributeError: JAX's plugin for CUDA is missing.
    """
    launcher = importlib.import_module("jaxlib.gpu_triton")
    assert launcher.TritonKernel
    return launcher


def compile_source(
    kernel: str, architecture: str, defines: dict[str, int], options: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """Compile a kernel with NVRTC; return its code, PTX for "compute_90", machine code for "sm_90a", and the log.

    Raises:
        RuntimeError: the compiler's messages.
    """
    lib, log, code = nvrtc(), ctypes.c_size_t(), ctypes.c_size_t()
    headers = [(SOURCES / name).read_bytes() for name in HEADERS]
    program, strings = ctypes.c_void_p(), ctypes.c_char_p * len(HEADERS)
    names = strings(*(name.encode() for name in HEADERS))
    source = (SOURCES / f"{kernel}.cu").read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(program), source, kernel.encode(), len(HEADERS), strings(*headers), names)
    flags = [f"--gpu-architecture={architecture}", "--std=c++20", "--use_fast_math", "-default-device", *options]
    flags += [f"-D{name}={value}" for name, value in defines.items()]
    status = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*(x.encode() for x in flags)))
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(log))
    messages = ctypes.create_string_buffer(log.value)
    lib.nvrtcGetProgramLog(program, messages)
    if status:
        raise RuntimeError(f"NVRTC cannot compile the {kernel} kernel: {messages.value.decode()}")
    kind = "PTX" if architecture.startswith("compute") else "CUBIN"
    getattr(lib, f"nvrtcGet{kind}Size")(program, ctypes.byref(code))
    result = ctypes.create_string_buffer(code.value)
    getattr(lib, f"nvrtcGet{kind}")(program, result)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return result.raw.rstrip(b"\0") if kind == "PTX" else result.raw, messages.value.decode()


@functools.cache
def ptx_of(tiling: Tiling, architecture: str) -> str:
    """Return the PTX of a kernel, from the cache or compiled."""
    defines = tiling.defines() | {"SHARED_BYTES": tiling.shared_bytes}
    sources = b"".join((SOURCES / name).read_bytes() for name in (*HEADERS, f"{tiling.kernel}.cu"))
    key = hashlib.sha256(sources + f"{defines} {architecture}".encode()).hexdigest()
    folder = (
        Path(os.environ["XDG_CACHE_HOME"] if "XDG_CACHE_HOME" in os.environ else "~/.cache").expanduser() / "dape_jax"
    )
    path = folder / f"{key}.ptx"
    if path.is_file():
        return path.read_text()
    ptx = compile_source(tiling.kernel, architecture, defines)[0].decode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as file:
            file.write(ptx)
        Path(file.name).replace(path)
    except OSError:
        pass  # a cache that cannot be written is no fault
    return ptx


def launch(
    tiling: Tiling, grid: tuple[int, int, int], out: list, arrays: list[Array], ints: list[int], scale: float
) -> list[Array]:
    """Run a kernel on the GPU. Its arguments: pointers to the arrays and to `out`, then the ints, then the scale."""
    launcher, architecture = _launcher(), capability().replace(".", "")
    name, ptx = f"dape_{tiling.kernel}", ptx_of(tiling, f"compute_{architecture}")
    kernel = launcher.TritonKernel(name, tiling.warps, 1, tiling.shared_bytes, ptx, "", int(architecture))
    zeroed = [x.size * x.dtype.itemsize if tiling.kernel == "backward" else 0 for x in out]
    parameters = [launcher.create_array_parameter(size, 16) for size in [0] * len(arrays) + zeroed]
    parameters += [launcher.create_scalar_parameter(int(x), "i32") for x in ints]
    parameters += [launcher.create_scalar_parameter(float(scale), "fp32")]
    proto = launcher.TritonKernelCall(kernel, *grid, parameters).to_proto(name, b"")
    call = jax.ffi.ffi_call(TARGET, out, vmap_method="sequential")
    return list(call(*arrays, opaque=zlib.compress(proto)))
