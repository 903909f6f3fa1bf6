"""Programs: one compiled step for each length, refused before it runs if it does not fit into memory.

In: a step for each length, and the shapes of its arguments. Out: a `Program` for each length, compiled before any
parameters are read, and `run_in_batches`, which runs it over any number of rows. Next: `perplexity.py`, `accuracy.py`.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Wrapped
from jaxtyping import Int

from dape_jax.errors import InputError, is_out_of_memory
from dape_jax.evaluation.config import AccuracyConfig, EvaluationConfig
from dape_jax.model.attention import Auto, Dense
from dape_jax.model.positions import Rope, stretched
from dape_jax.model.transformer import Params, TransformerConfig
from dape_jax.planning.flops import forward_flops
from dape_jax.progress import Progress
from dape_jax.sharding import BATCH_AXES, ROW_AXES, activation_spec, put_batch

logger = logging.getLogger(__name__)

GIB = 2**30


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Compiled `step(params, batch)` for batches of one shape, with its memory on each device, arguments included.

    `row_flops` is the work for one sequence, in which progress is measured: it grows faster than the length.
    """

    length: int
    batch_size: int
    row_flops: int
    step: Compiled
    num_bytes: int


def model_at(
    config: TransformerConfig, length: int, evaluation: EvaluationConfig, rotary: str, train_length: int
) -> TransformerConfig:
    """Return a language model's config for sequences of one length.

    Attention is dense below `evaluation.blockwise_from` and linear in memory from there on. A rotary embedding is
    stretched as `rotary` says; see `positions.stretched`.
    """
    linear = Auto(block_size=evaluation.block_size)
    config = dataclasses.replace(config, attention=linear if length >= evaluation.blockwise_from else Dense())
    if isinstance(config.rotary, Rope):
        config = dataclasses.replace(config, rotary=stretched(config.rotary, rotary, length, train_length))
    return config


def batch_size_at(length: int, num_sequences: int, evaluation: EvaluationConfig | AccuracyConfig, mesh: Mesh) -> int:
    """Return the number of sequences in a batch: as many as fit, rounded up to a multiple of the batch axes."""
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    return -(-min(num_sequences, max(1, evaluation.batch_tokens // length)) // parts) * parts


# ---- compiling


def compile_programs(
    step_at: Callable[[int], tuple[Wrapped, TransformerConfig, int]],
    lengths: Sequence[int],
    params: Params,
    mesh: Mesh,
    *,
    batch_names: tuple[str, ...],
    name: str,
    field: str = "evaluation.lengths",
) -> list[Program]:
    """Compile a step for every length, the longest first, and refuse a length that does not fit into memory.

    Args:
        step_at: returns, for a length, the jitted `step(params, batch)`, the model's config and the number of sequences
            of a batch.
        lengths: lengths in tokens.
        params: first argument of the step: arrays, or only their shapes and shardings.
        mesh: mesh of parameters and batches.
        batch_names: names of the int32[B, T] arrays of a batch.
        name: name of the model in progress bar, log and errors.
        field: config field of the lengths, for errors.

    Raises:
        InputError: a length does not fit; the message has the memory it needs and the largest length that fits.
    """
    available = available_bytes(mesh)

    def compile_at(length: int) -> Program | None:
        """Return the program, or None if the compiler itself finds that it does not fit."""
        step, config, batch_size = step_at(length)
        sharding = NamedSharding(mesh, activation_spec("BT"))
        rows = jax.ShapeDtypeStruct((batch_size, length), np.int32, sharding=sharding)
        with jax.set_mesh(mesh):
            lowered = step.lower(params, dict.fromkeys(batch_names, rows))
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return None
        return Program(length, batch_size, forward_flops(config, length, 1).total, compiled, predicted_bytes(compiled))

    def fits(program: Program | None) -> bool:
        return program is not None and program.num_bytes <= available

    programs = []
    for length in Progress(sorted(lengths, reverse=True), desc=f"{name}: compiling", unit="length", leave=False):
        program = compile_at(length)
        if program is None or not fits(program):
            needed = "more than the compiler can allocate" if program is None else f"{program.num_bytes / GIB:.2f} GiB"
            parts = math.prod(mesh.shape[axis] for axis in ROW_AXES)
            largest = _largest_that_fits(lambda length: fits(compile_at(length)), length, lengths, parts)
            raise InputError(
                f"{field} = {length}: {name} needs {needed} on each device, where {available / GIB:.2f} GiB "
                f"are free, for {step_at(length)[2]} sequences at once; {largest}"
            )
        if not programs:
            message = "%s: length %s is predicted to take %.2f GiB on each device, where %.2f GiB are free"
            logger.info(message, name, f"{length:,}", program.num_bytes / GIB, available / GIB)
        programs.append(program)
    return programs[::-1]


def _largest_that_fits(fits: Callable[[int], bool], length: int, lengths: Sequence[int], parts: int) -> str:
    """Return a phrase with the largest length that fits.

    Halve a length that does not fit until it does, then look for a longer one among the requested lengths.
    Only multiples of `parts`, the number of devices that share a sequence, are tried.
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
    return f"halved repeatedly, the first length that fits is {half}"


# ---- memory


def predicted_bytes(compiled: Compiled) -> int:
    """Return the memory that a compiled program needs on each device: arguments, results and temporaries."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes  # results that overwrite arguments
    )


def available_bytes(mesh: Mesh) -> int:
    """Return the minimum free memory of this process's devices; the devices of a CPU share the host's memory."""
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        return host_available_bytes() // len(devices)
    stats = [device.memory_stats() for device in devices]
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)


def host_available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process can still allocate, limited by the host and by its control groups.

    Inactive file cache of a control group counts as free: the kernel drops it before it refuses memory. `root` is the
    root of the file system.
    """
    meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo")}
    if not meminfo:  # not Linux: only the total memory is known
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
        # In a container the path may be the host's, and only the top directory may be visible.
        group = Path(path.lstrip("/"))
        for directory in {root / top / group, *(root / top / parent for parent in group.parents), root / top}:
            limits, usages = _lines(directory / limit), _lines(directory / usage)
            if limits and usages and limits[0] != "max":
                stat = dict(line.split() for line in _lines(directory / "memory.stat"))
                used = int(usages[0]) - (int(stat[cache]) if cache in stat else 0)
                available = min(available, max(0, int(limits[0]) - used))
    return available


def _lines(file: Path) -> list[str]:
    """Return the lines of a kernel file, or [] if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


# ---- running


def padded_batches(num_rows: int, batch_size: int) -> Iterator[tuple[Int[np.ndarray, "B"], int]]:
    """Split rows into batches of one size; yield the row numbers of each, and the number of those that are not padding.

    The last batch is padded with copies of its last row. Seven rows in batches of four:

        0 1 2 3    4 real
        4 5 6 6    3 real
    """
    for start in range(0, num_rows, batch_size):
        stop = min(start + batch_size, num_rows)
        yield np.minimum(np.arange(start, start + batch_size), stop - 1), stop - start


def run_in_batches(
    step: Callable[[dict[str, jax.Array]], Any],
    make_batch: Callable[[Int[np.ndarray, "B"]], dict[str, np.ndarray]],
    *,
    num_rows: int,
    batch_size: int,
    mesh: Mesh,
    progress: Callable[[int], object],
) -> Any:
    """Run a step over all rows in batches of one size; return its outputs for every row, without those of padding.

    Args:
        step: function of a batch on the devices, such as a program's step with its parameters; its outputs are arrays
            with one row for each row of the batch.
        make_batch: returns the batch of the given row numbers; see `padded_batches`.
        num_rows: number of all rows.
        batch_size: rows of a batch.
        mesh: mesh that batches are put on.
        progress: called after each batch with the number of its real rows.
    """
    outputs = []
    for rows, num_real in padded_batches(num_rows, batch_size):
        output = jax.device_get(step(put_batch(make_batch(rows), mesh)))
        outputs.append(jax.tree.map(lambda array: array[:num_real], output))  # noqa: B023
        progress(num_real)
    return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)
