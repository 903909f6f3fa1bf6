"""Measure time and memory of calls, check flags, and write tables; shared by the benchmarks.

In: functions. Out: seconds and bytes. Next: `attention.py`, one layer; `step.py`, a training step; `gpu.py`, both on
one GPU.

A GPU or TPU works asynchronously. Waiting for every call would add the launch time, 50 to 100 us, which can be as long
as a layer takes. There, a sample is the time of several calls, started one after another and waited for once, divided
by their number. On a CPU a sample is one call.

The memory of a call is its peak above the level before the call, without its inputs:

    on CPU      the peak of the process's resident set, for PyTorch and JAX (Linux only). For a JAX program it is at
                least the compiler's figure, since small buffers may use memory that is still resident
    elsewhere   for a JAX program the compiler's figure, temporary memory and results, because the peak of JAX's
                allocator cannot be reset; for PyTorch on CUDA the peak of its allocator
"""

import ctypes
import dataclasses
import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from dape_jax.errors import is_out_of_memory, printable, require
from dape_jax.evaluation import report
from dape_jax.sharding import device_platform

# By default JAX reserves 75 % of a GPU: too much if PyTorch also uses the GPU, too little if JAX uses it alone. JAX
# reads these variables when it initialises its devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")

REST_S = 0.02  # between two calls, because the threads of the previous call keep spinning for a while
WARMUP_CALLS = 2
SAMPLE_S = 0.1  # minimum time of a sample on a GPU or TPU, unless `MAX_QUEUED` calls are faster
MAX_QUEUED = 100  # maximum number of queued calls; JAX itself blocks if there are many more


class Call(NamedTuple):
    """Function to time.

    Args:
        start: starts a call and returns its result, which the device may still be computing.
        wait: waits for a result, and thus for all earlier calls.
    """

    start: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready


def seconds_in_turns(calls: dict[str, Call], repeats: int, bar: tqdm) -> dict[str, list[float]]:
    """Return `repeats` samples of the time of each call, taken in turns, after `WARMUP_CALLS` turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    queued = dict.fromkeys(calls, 1)
    for turn in range(-WARMUP_CALLS, repeats):
        for name, call in calls.items():
            time.sleep(REST_S)
            sample = seconds_of(call, queued[name])
            if turn >= 0:
                seconds[name].append(sample)
                bar.update()
            elif device_platform() != "cpu":
                queued[name] = min(MAX_QUEUED, max(2, round(SAMPLE_S / sample)))
    return seconds


def seconds_of(call: Call, queued: int) -> float:
    """Return the time of a call, as the mean of `queued` calls that are started without waiting."""
    begin = time.perf_counter()
    for _ in range(queued - 1):
        call.start()
    call.wait(call.start())
    return (time.perf_counter() - begin) / queued


def resident_bytes_of_call(call: Call) -> int | None:
    """Return the increase of this process's resident set by a call, or None if the system does not report it."""
    clear_refs = Path("/proc/self/clear_refs")
    if not clear_refs.exists():
        return None
    call.wait(call.start())  # exclude one-time allocations, for example of libraries
    gc.collect()
    time.sleep(5 * REST_S)  # until the memory of this call is freed and returned
    ctypes.CDLL(None).malloc_trim(0)
    clear_refs.write_text("5")  # resets the peak to the current resident set
    before = _status_bytes("VmRSS")
    result = call.start()
    call.wait(result)
    taken = _status_bytes("VmHWM") - before
    del result
    return taken


def _status_bytes(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


def failure(error: BaseException) -> str:
    """Describe an error in one line: "out of memory", or its type and the start of its message."""
    if is_out_of_memory(error):
        return "out of memory"
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def check_names(flag: str, value: tuple[str, ...], allowed: Iterable[str]) -> None:
    """Raise `InputError` unless a flag lists some of the allowed names, without duplicates."""
    allowed = tuple(allowed)
    is_valid = bool(value) and set(value) <= set(allowed) and len(set(value)) == len(value)
    require(is_valid, f"--{flag}", value, f"must be some of {allowed}, without duplicates")


def check_positive(settings: Any, *names: str) -> None:
    """Raise `InputError` unless these flags, numbers or lists of different numbers, are positive or None."""
    for name in names:
        value = getattr(settings, name)
        numbers = value if isinstance(value, tuple) else (1 if value is None else value,)
        require(bool(numbers) and min(numbers) > 0, f"--{name}", value, "must be positive")
        require(len(set(numbers)) == len(numbers), f"--{name}", value, "must not contain duplicates")


Row = dict[str, Any]


def table(
    rows: list[Row], labels: dict[str, str], figures: Mapping[str, tuple[str | Callable[..., Any], str]]
) -> list[list[str]]:
    """Return the rows of a table, header first.

    Args:
        rows: one for each line; "failed" or "reason" is why there are no figures.
        labels: from header to field, for the first columns.
        figures: from header to field, or function of a row, and its format; None is shown as a dash.
    """
    lines = [[*labels, *figures]]
    for row in rows:
        line = [f"{row[field]:,}" if isinstance(row[field], int) else str(row[field]) for field in labels.values()]
        if row.get("failed") or row.get("reason"):
            lines.append([*line, "failed", *["-"] * (len(figures) - 1)])
            continue
        values = [(field(row) if callable(field) else row[field], digits) for field, digits in figures.values()]
        lines.append([*line, *("-" if value is None else format(value, digits) for value, digits in values)])
    return lines


def write(stem: str, settings: Any, caption: str, rows: list[Row], labels: Any, figures: Any, **content: Any) -> None:
    """Print the `table` of the rows, and write the rows to `settings.output`/STEM.json."""
    directory = Path(settings.output)
    content = {"settings": dataclasses.asdict(settings), **content, "rows": rows}
    report.save(stem, directory, content, report.Table(caption, table(rows, labels, figures)))
    print(f"\nresults: {directory}")
