"""Does it fit? A step is compiled before anything is allocated, and the compiler says how much memory it will take.

In: a step for every length and the shapes of its arguments. Out: a `Program` for every length: the compiled step, which
is also what runs. Next: `perplexity.py`.

What a program takes is its arguments, its results and what it needs in between. A device has what its runtime says; the
devices of a CPU share what the operating system can still give and the control group of the process allows.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Wrapped
from tqdm import tqdm

from dape_jax.errors import InputError
from dape_jax.model.transformer import Params
from dape_jax.sharding import ROW_AXES, activation_spec

logger = logging.getLogger(__name__)

GIB = 2**30


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A step compiled for one length: `step(params, batch)`.

    Args:
        length: of the sequences, in tokens.
        batch_size: sequences in a batch.
        step: the compiled step; its arguments must have the shapes and the places that it was compiled for.
        num_bytes: memory that it takes on each device, its arguments included.
    """

    length: int
    batch_size: int
    step: Compiled
    num_bytes: int


def compile_programs(
    step_at: Callable[[int], tuple[Wrapped, int]],
    lengths: Sequence[int],
    params: Params,
    mesh: Mesh,
    *,
    batch_names: tuple[str, ...],
    name: str,
    field: str = "evaluation.lengths",
) -> list[Program]:
    """Compile a step for every length, the longest first, and refuse what does not fit into memory.

    Args:
        step_at: gives, for a length, the jitted `step(params, batch)` and the number of sequences in a batch.
        lengths: in tokens, increasing.
        params: arrays, or their shapes and shardings alone.
        mesh: where parameters and batches live.
        batch_names: of the int32[B, T] arrays that a batch consists of.
        name: of the model, for progress, log and errors.
        field: that the lengths come from, for errors.

    Returns:
        One program for each length, in the order given.

    Raises:
        InputError: a length does not fit; names it, the memory, and the largest length that fits.
    """
    available = available_bytes(mesh)

    def compile_at(length: int) -> Program | None:
        step, batch_size = step_at(length)
        sharding = NamedSharding(mesh, activation_spec("BT"))
        rows = jax.ShapeDtypeStruct((batch_size, length), np.int32, sharding=sharding)
        compiled = _compile(step, params, dict.fromkeys(batch_names, rows), mesh)
        return None if compiled is None else Program(length, batch_size, compiled, predicted_bytes(compiled))

    def fits(program: Program | None) -> bool:
        return program is not None and program.num_bytes <= available

    programs = []
    for length in tqdm(sorted(lengths, reverse=True), desc=f"{name}: compiling", unit="length", leave=False):
        program = compile_at(length)
        if program is None or not fits(program):
            needed = "more than the compiler can place" if program is None else f"{program.num_bytes / GIB:.2f} GiB"
            parts = math.prod(mesh.shape[axis] for axis in ROW_AXES)
            largest = _largest_that_fits(lambda length: fits(compile_at(length)), length, lengths, parts)
            raise InputError(
                f"{field} = {length}: {name} needs {needed} on each device, where {available / GIB:.2f} GiB "
                f"are free, for {step_at(length)[1]} sequences at once; {largest}"
            )
        if not programs:
            logger.info(
                "%s: length %s is predicted to take %.2f GiB on each device, where %.2f GiB are free",
                name,
                f"{length:,}",
                program.num_bytes / GIB,
                available / GIB,
            )
        programs.append(program)
    return programs[::-1]


def _compile(step: Wrapped, params: Params, batch: dict[str, Any], mesh: Mesh) -> Compiled | None:
    """The compiled step; None if the compiler itself finds that the device's memory cannot hold it."""
    with jax.set_mesh(mesh):
        lowered = step.lower(params, batch)
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "CompileTimeHbmOom" not in str(error):
                raise
            return None


def _largest_that_fits(fits: Callable[[int], bool], length: int, lengths: Sequence[int], parts: int) -> str:
    """Halve a length that does not fit until it does, then see whether one that was asked for lies between.

    Only lengths that divide into the parts that devices take of a text are tried.
    """
    half = length // 2 // parts * parts
    while half and not fits(half):
        logger.info("length %s does not fit either", f"{half:,}")
        half = half // 2 // parts * parts
    if not half:
        return "no length fits"
    for asked in sorted(lengths, reverse=True):
        if half <= asked < min(2 * half + 1, length) and fits(asked):
            return f"the largest of --lengths that fits is {asked}"
    return f"the largest power-of-two part of it that fits is {half}"


def predicted_bytes(compiled: Compiled) -> int:
    """Memory that a compiled program takes on each device: arguments, results, and what it needs in between."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes  # results that take the place of arguments
    )


def available_bytes(mesh: Mesh) -> int:
    """Memory that is free on each device of this process: on the one that has least."""
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        return host_available_bytes() // len(devices)
    stats = [device.memory_stats() for device in devices]
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)


def host_available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can still get, in the host's own figures and in those of its control groups.

    A control group's file cache that was not used of late counts as free: it is dropped before memory is refused.

    Args:
        root: of the file system.
    """
    meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo")}
    if not meminfo:  # not Linux: all that there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = meminfo["MemAvailable"]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # In a container the path may be the host's, of which only the top is to be seen.
        group = Path(path.lstrip("/"))
        for directory in {root / top / group, *(root / top / parent for parent in group.parents), root / top}:
            limits, usages = _lines(directory / limit), _lines(directory / usage)
            if limits and usages and limits[0] != "max":
                stat = dict(line.split() for line in _lines(directory / "memory.stat"))
                used = int(usages[0]) - (int(stat[cache]) if cache in stat else 0)
                available = min(available, max(0, int(limits[0]) - used))
    return available


def _lines(file: Path) -> list[str]:
    """Of a file of the kernel's; none where it is not there or not for us."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
