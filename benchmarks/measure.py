"""What the benchmarks share: flags that are a dataclass's fields, calls that take turns, and what a call takes.

In: functions to measure. Out: their times, their memory, and what their compiled programs do. Next: `attention.py`, one
layer; `step.py`, a step of training; `table7.py`, the paper's table of times.

What a call takes is what it holds at most beyond what was there before it, its inputs not counted:

    on CPU      the high-water mark of the process's resident set, of PyTorch and JAX alike (Linux alone); of a program
                of JAX at least what its compiler says, since small buffers may come from memory that is resident still
    elsewhere   of a program of JAX what its compiler says, temporary memory and results, since the mark of JAX's
                allocator cannot be reset; of PyTorch on CUDA its allocator's mark
"""

import ctypes
import dataclasses
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.stages import Wrapped
from tqdm import tqdm

from dape_jax.errors import printable
from dape_jax.evaluation.memory import predicted_bytes
from dape_jax.planning.hlo import Work, read_work

# JAX would take most of a GPU at once, where PyTorch lives beside it; and it would leave a quarter, where it is alone.
# It reads these when it first looks for devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")

REST_S = 0.02  # between two calls: the threads of the one before go on spinning for a while
UNTIMED = 2  # calls to warm up
MIB = 2**20


# ---- programs, time and memory


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function of JAX.

    Args:
        run: calls it.
        compile_s: seconds of compilation.
        temporary_bytes: that it holds besides inputs and results.
        held_bytes: those, and its results where they do not lie in its inputs' place.
        needed_bytes: those, and its inputs.
        work: what it does in one run; bodies of loops as often as they run.
    """

    run: Callable[..., Any]
    compile_s: float
    temporary_bytes: int
    held_bytes: int
    needed_bytes: int
    work: Work


def compile_program(function: Callable[..., Any], *arguments: Any) -> Program:
    """Compile a function, jitted or not, for arguments like these."""
    lowered = (function if isinstance(function, Wrapped) else jax.jit(function)).lower(*arguments)
    started = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - started
    memory = compiled.memory_analysis()
    assert memory is not None
    return Program(
        run=compiled,
        compile_s=compile_s,
        temporary_bytes=memory.temp_size_in_bytes,
        held_bytes=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        needed_bytes=predicted_bytes(compiled),
        work=read_work(compiled.as_text() or ""),
    )


def seconds_in_turns(functions: dict[str, Callable[[], Any]], repeats: int, bar: tqdm) -> dict[str, list[float]]:
    """Time all functions, one call of each after another, `repeats` times over, after two calls to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(-UNTIMED, repeats):
        for name, function in functions.items():
            time.sleep(REST_S)
            start = time.perf_counter()
            jax.block_until_ready(function())
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
                bar.update()
    return seconds


def resident_bytes_of_call(function: Callable[[], Any]) -> int | None:
    """How far a call raises the resident set of this process; None where the system does not say."""
    clear_refs = Path("/proc/self/clear_refs")
    if not clear_refs.exists():
        return None
    jax.block_until_ready(function())  # what it makes once, as libraries do, is not what it takes
    gc.collect()
    time.sleep(5 * REST_S)  # until what the last call held is free, and given back
    ctypes.CDLL(None).malloc_trim(0)
    clear_refs.write_text("5")  # sets the mark to what is resident now
    before = _status_bytes("VmRSS")
    result = jax.block_until_ready(function())
    taken = _status_bytes("VmHWM") - before
    del result
    return taken


def _status_bytes(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


def why_failed(error: BaseException) -> str:
    """An error in one line: out of memory, or its kind and how it begins."""
    text = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return "out of memory"
    return printable(f"{type(error).__name__}: {text[:200]}")
