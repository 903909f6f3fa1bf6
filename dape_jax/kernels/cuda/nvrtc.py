"""Compile the kernels with NVRTC, by ctypes.

In: sources, macros and an architecture. Out: PTX or machine code, which is kept in the user's cache directory.
`jax[cuda12]`, `jax[cuda13]` and PyTorch install NVRTC. Exported models have a copy of this file and of `tiling.py`, so
neither imports another part of the package.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import sys
import tempfile
from pathlib import Path

# Bytes of shared memory that a block can have, by compute capability; the last is for others.
SHARED_BYTES = {"8.0": 163 * 1024, "8.6": 99 * 1024, "8.7": 163 * 1024, "8.9": 99 * 1024, "9.0": 227 * 1024}
SHARED_BYTES |= {"10.0": 227 * 1024, "10.3": 227 * 1024, "11.0": 227 * 1024, "12.0": 99 * 1024, "12.1": 99 * 1024}


def shared_bytes(capability: str) -> int:
    """Return the bytes of shared memory that a block can have on a GPU of this compute capability."""
    return SHARED_BYTES[capability] if capability in SHARED_BYTES else min(SHARED_BYTES.values())


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """Load NVRTC: the wheel that JAX or PyTorch installs, or the system's.

    Raises:
        OSError: there is none.
    """
    # CUDA 12 ("cuda_nvrtc") before 13 ("cu13"): JAX may be for either, and its assembler takes older code, not newer.
    wheels = [x for folder in sys.path for x in sorted(Path(folder).glob("nvidia/*/lib/libnvrtc.so.1*"), reverse=True)]
    for path in (*wheels, *map(Path, ("libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so"))):
        with contextlib.suppress(OSError):
            if path.is_absolute():  # NVRTC 13.0 does not look beside itself for the library that it needs
                for builtins in path.parent.glob("libnvrtc-builtins.so.1*"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(path))
    raise OSError("NVRTC was not found; pip install nvidia-cuda-nvrtc")


def compile_source(
    sources: dict[str, str], kernel: str, architecture: str, defines: dict[str, int], options: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """Compile a kernel; return its code, PTX for "compute_90", machine code for "sm_90", and the log.

    Raises:
        RuntimeError: the compiler's messages.
    """
    lib, log, code = nvrtc(), ctypes.c_size_t(), ctypes.c_size_t()
    headers = {name.encode(): text.encode() for name, text in sources.items() if name.endswith(".h")}
    program, strings = ctypes.c_void_p(), ctypes.c_char_p * len(headers)
    arguments = len(headers), strings(*headers.values()), strings(*headers)
    source = sources[f"{kernel}.cu"].encode()
    lib.nvrtcCreateProgram(ctypes.byref(program), source, kernel.encode(), *arguments)
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


def cached_code(sources: dict[str, str], kernel: str, architecture: str, defines: dict[str, int]) -> bytes:
    """Return the code of a kernel, from the cache or compiled."""
    key = hashlib.sha256(f"{sources} {kernel} {defines} {architecture}".encode()).hexdigest()
    cache = os.environ["XDG_CACHE_HOME"] if "XDG_CACHE_HOME" in os.environ else "~/.cache"
    suffix = "ptx" if architecture.startswith("compute") else "cubin"
    path = Path(cache).expanduser() / "dape_jax" / f"{key}.{suffix}"
    if path.is_file():
        return path.read_bytes()
    code, _ = compile_source(sources, kernel, architecture, defines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError:
        pass  # a cache that cannot be written is no fault
    return code
