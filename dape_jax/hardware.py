"""Slices of hardware that is not here, and the compiler for TPUs, which needs none.

In: the name of a slice, v5e:16x16. Out: what it consists of; and programs compiled for it by libtpu, one at a time,
each in a process of its own, so that neither the compiler's memory nor its messages stay behind. Next: `planning.py`,
whole runs; `benchmarks/tpu.py`, one layer.
"""

import concurrent.futures.process
import dataclasses
import importlib.metadata
import importlib.util
import math
import multiprocessing
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dape_jax.errors import InputError, require
from dape_jax.planning.flops import CHIPS, Chip

# Slices that can be had; tests ask libtpu for each. (It compiles for others too, as 32x16, which no pod has.)
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SOLID = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
TOPOLOGIES = {"v4": SOLID, "v5e": FLAT, "v5p": SOLID, "v6e": FLAT}
GPUS_OF_A_SERVER = 8

LIBTPU_HELP = "not installed; `make tpu-aot` installs it beside the environment, where nothing but planning sees it"


@dataclasses.dataclass(frozen=True)
class Slice:
    """The hardware of a plan.

    Args:
        name: v5e:4x4, or h200:8.
        chip: what it consists of.
        num_chips: of them.
    """

    name: str
    chip: Chip
    num_chips: int

    @property
    def platform(self) -> str:
        """What JAX calls it."""
        return "tpu" if self.is_tpu else "gpu"

    @property
    def is_tpu(self) -> bool:
        """Whether it is compiled for; planned by formula if not."""
        return self.chip.name in TOPOLOGIES


def read_topology(text: str) -> Slice:
    """The slice that a flag names.

    Raises:
        InputError: a chip or a slice that is not known; names those that are.
    """
    name, _, shape = text.partition(":")
    chips = {chip.name: chip for chip in CHIPS}
    require(name in chips, "--topology", text, f"CHIP:SHAPE with a chip of {sorted(chips)}")
    if name not in TOPOLOGIES:
        allowed = [str(n) for n in range(1, GPUS_OF_A_SERVER + 1)]
        require(shape in allowed, "--topology", text, f"{name}:N, the N = 1 to {GPUS_OF_A_SERVER} GPUs of one server")
        return Slice(text, chips[name], int(shape))
    known = ", ".join(f"{name}:{shape}" for shape in TOPOLOGIES[name])
    require(shape in TOPOLOGIES[name], "--topology", text, f"one of {known}")
    return Slice(text, chips[name], math.prod(map(int, shape.split("x"))))


def why_not(error: str) -> str:
    """The compiler's own figures of a program that does not fit; or what else it stopped at."""
    text = " ".join(error.split())
    if "RESOURCE_EXHAUSTED" not in text and "CompileTimeHbmOom" not in text:
        return f"the compiler failed: {text[:300]}"
    found = re.search(r"total memory required for .*? exceeds available HBM \([^)]*\)|Used .*? of .*? hbm", text)
    return found[0] if found else text[:300]


def in_process(compile_it: Callable[[Any], dict[str, Any]], request: Any, libtpu: Path) -> dict[str, Any]:
    """Compile in a process of its own, its messages kept away but for what they say of the partitioning.

    Args:
        compile_it: `compile_program`, or another that says at least whether the program `fits`.
        request: what it is given.
        libtpu: the compiler.
    """
    # No TPU is touched, so others may use libtpu too, and nobody is asked what slice this machine is a part of.
    os.environ.update(TPU_LIBRARY_PATH=str(libtpu), TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, context, _begin, (log.name,)) as pool:
            try:
                outcome = pool.submit(compile_it, request).result()
            except concurrent.futures.process.BrokenProcessPool:
                last = " ".join(log.read().splitlines()[-3:])
                return {"fits": False, "reason": f"the compiler ended its process: {last[:300]}"}
        return outcome | {"num_full_rematerializations": log.read().count("Involuntary full rematerialization")}


def _begin(log: str) -> None:
    """Begin a process that compiles: its messages go to a file, and it ends with the one that it works for."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def find_libtpu() -> Path:
    """The compiler: where `TPU_LIBRARY_PATH` says, in the environment, or where `make tpu-aot` puts it.

    Raises:
        InputError: it is in none of them.
    """
    if path := os.environ.get("TPU_LIBRARY_PATH"):
        require(Path(path).is_file(), "TPU_LIBRARY_PATH", path, "the file libtpu.so")
        return Path(path)
    spec = importlib.util.find_spec("libtpu")
    installed = Path(spec.origin).parent if spec and spec.origin else Path(sys.prefix) / "tpu-aot" / "libtpu"
    if not (installed / "libtpu.so").is_file():
        raise InputError(f"libtpu: {LIBTPU_HELP}")
    return installed / "libtpu.so"


def libtpu_version(library: Path) -> str:
    """The version of the compiler that a file belongs to."""
    found = list(importlib.metadata.distributions(name="libtpu", path=[str(library.parent.parent)]))
    return found[0].version if found else "unknown"
