"""Compile ahead of time for a TPU slice that is not attached.

libtpu, the compiler for TPUs, needs no TPU. It runs in a separate process, one at a time, so that its memory is freed
and its messages can be suppressed. Next: `plan.py`, for complete runs; `benchmarks/`.
"""

import concurrent.futures.process
import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from dape_jax.errors import InputError, is_out_of_memory, require
from dape_jax.hardware import Slice


def slice_devices(hardware: Slice) -> list[Any]:
    """Return the devices of a slice, which need not exist, to compile for. Needs libtpu: call it from `in_process`."""
    # By default libtpu exposes the two cores of a v4 chip as two devices; the cloud's runtime exposes one.
    options = {"chip_config_name": "megacore"} if hardware.chip.name == "v4" else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=hardware.name, **options).devices


def compile_error(error: BaseException) -> str:
    """Return why a program was not compiled: the memory that it needs, if too large, or the compiler's error."""
    message = " ".join(str(error).split())
    if not is_out_of_memory(error):
        return f"the compiler failed: {message[:300]}"
    found = re.search(r"total memory required for .*? exceeds available HBM \([^)]*\)|Used .*? of .*? hbm", message)
    return found[0] if found else message[:300]


def in_process(function: Callable[[Any], dict[str, Any]], request: Any, libtpu: Path) -> dict[str, Any]:
    """Run a function that compiles, in a separate process, without showing the compiler's messages.

    Return its results, among them whether the program `fits`, and if not, the `reason`.
    """
    # No TPU is used, so other processes may use libtpu too, and no cloud metadata is queried for a slice.
    os.environ.update(TPU_LIBRARY_PATH=str(libtpu), TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.NamedTemporaryFile("r", suffix=".log", encoding="utf-8", errors="replace") as log:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, context, _redirect_messages, (log.name,)) as pool:
            try:
                return pool.submit(function, request).result()
            except concurrent.futures.process.BrokenProcessPool:
                last = " ".join(log.read().splitlines()[-3:])
                return {"fits": False, "reason": f"the compiler ended its process: {last[:300]}"}


def _redirect_messages(log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())


def find_libtpu() -> Path:
    """Return the compiler: the file in `TPU_LIBRARY_PATH`, the installed package, or the copy of `make tpu-aot`.

    Raises:
        InputError: none of them exists.
    """
    if path := os.environ.get("TPU_LIBRARY_PATH"):
        require(Path(path).is_file(), "TPU_LIBRARY_PATH", path, "must be the file libtpu.so")
        return Path(path)
    spec = importlib.util.find_spec("libtpu")
    installed = Path(spec.origin).parent if spec and spec.origin else Path(sys.prefix) / "tpu-aot" / "libtpu"
    if not (installed / "libtpu.so").is_file():
        # Not installed into the environment: there, every JAX command on a machine without a TPU would print a warning.
        raise InputError(
            "libtpu: not installed; pip install --no-deps --target=tpu-aot libtpu, and set "
            "TPU_LIBRARY_PATH=tpu-aot/libtpu/libtpu.so"
        )
    return installed / "libtpu.so"


def libtpu_version(library: Path) -> str:
    """Return the version of a libtpu file."""
    found = list(importlib.metadata.distributions(name="libtpu", path=[str(library.parent.parent)]))
    return found[0].version if found else "unknown"
