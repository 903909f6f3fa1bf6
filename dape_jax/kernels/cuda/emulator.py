"""Run the kernels on a CPU: the same source, compiled by a C++ compiler with `emulator.h`; for tests.

In: the arguments of `compiler.launch`. Out: its results.
"""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax import Array

from dape_jax.kernels.cuda.tiling import Tiling

SOURCES = Path(__file__).parent
SEED = 0  # of the order of the warps


@functools.cache
def library(kernel: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{kernel}.so"
        flags = ["-O2", "-std=c++20", "-w", "-shared", "-fPIC", "-fno-gnu-unique", *(f"-D{x}={y}" for x, y in defines)]
        subprocess.run(["g++", *flags, "-x", "c++", SOURCES / f"{kernel}.cu", "-o", path], check=True)
        return ctypes.CDLL(path)


def launch(
    tiling: Tiling, grid: tuple[int, int, int], out: list, arrays: list[Array], ints: list[int], scale: float
) -> list[Array]:
    """Run a kernel in the emulator. 16-bit numbers are stored as float32; with float32 queries they are not rounded."""
    assert {x.dtype.name for x in arrays} <= {tiling.dtype, "float16", "float32", "int32"}  # no conversion on a GPU
    rounds = {} if tiling.dtype == "float32" else {"ROUND": 1}
    defines = tuple((tiling.defines() | rounds).items())

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        run = library(tiling.kernel, defines).run
        arrays = tuple(np.ascontiguousarray(x, np.int32 if x.dtype == np.int32 else np.float32) for x in arrays)
        results = [np.full(x.shape, 0 if tiling.kernel == "backward" else np.nan, np.float32) for x in out]
        pointers = [x.ctypes.data for x in (*arrays, *results)]
        c_ints, c_grid = (ctypes.c_int * len(ints))(*ints), (ctypes.c_int * 3)(*grid)
        run((ctypes.c_void_p * len(pointers))(*pointers), c_ints, ctypes.c_float(scale), c_grid, SEED)
        return [x.astype(shape.dtype) for x, shape in zip(results, out, strict=True)]

    return list(jax.pure_callback(run, out, *arrays, vmap_method="sequential"))
