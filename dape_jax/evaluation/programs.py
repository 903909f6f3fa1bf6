"""Programs: one compiled step for each length, refused before it runs if it does not fit into memory.

In: a step for each length, and the shapes of its arguments. Out: a `Program` for each length, compiled before any
parameters are read, and `run_in_batches`, which runs it over any number of rows. Next: `perplexity.py`, `accuracy.py`.
"""

import dataclasses
import math
import os
import re
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
from dape_jax.hardware import GIB
from dape_jax.model.attention import Auto, Dense
from dape_jax.model.flops import forward_flops
from dape_jax.model.positions import Rope, stretched
from dape_jax.model.transformer import Params, TransformerConfig
from dape_jax.progress import Progress
from dape_jax.sharding import BATCH_AXES, activation_spec, put_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Compiled `step(params, batch)` for batches of one shape.

    `row_flops` is the work for one sequence, in which progress is measured: it grows faster than the length.
    """

    length: int
    batch_size: int
    row_flops: int
    step: Compiled


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
        lengths: lengths in tokens, increasing.
        params: shapes and shardings of the first argument of the step.
        mesh: mesh of parameters and batches.
        batch_names: names of the int32[B, T] arrays of a batch.
        name: name of the model in progress bar and errors.
        field: config field of the lengths, for errors.

    Raises:
        InputError: a length does not fit; the message has the memory it needs and the memory that is free.
    """
    available, programs = available_bytes(mesh), []
    sharding = NamedSharding(mesh, activation_spec("BT"))
    for length in Progress(lengths[::-1], desc=f"{name}: compiling", unit="length", leave=False):
        step, config, batch_size = step_at(length)
        rows = jax.ShapeDtypeStruct((batch_size, length), np.int32, sharding=sharding)
        compiled, needed = None, "more than the compiler can allocate"
        try:
            with jax.set_mesh(mesh):
                compiled = step.lower(params, dict.fromkeys(batch_names, rows)).compile()
            needed = f"{predicted_bytes(compiled) / GIB:.2f} GiB"
        except jax.errors.JaxRuntimeError as error:  # compilers for TPUs know the chip's memory
            if not is_out_of_memory(error):
                raise
        if compiled is None or predicted_bytes(compiled) > available:
            raise InputError(
                f"{field} = {length}: {name} needs {needed} on each device, where {available / GIB:.2f} GiB are free, "
                f"for {batch_size} sequences at once; give shorter --lengths, or more devices to a sequence with --mesh"
            )
        programs.append(Program(length, batch_size, forward_flops(config, length, 1), compiled))
    return programs[::-1]


def predicted_bytes(compiled: Compiled) -> int:
    """Return the memory that a compiled program needs on each device: arguments, results and temporaries."""
    stats = compiled.memory_analysis()
    assert stats is not None
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return held - stats.alias_size_in_bytes  # results that overwrite arguments


def available_bytes(mesh: Mesh) -> int:
    """Return the minimum free memory of this process's devices; the devices of a CPU share the host's memory."""
    devices = mesh.local_devices
    if devices[0].platform != "cpu":
        stats = [device.memory_stats() for device in devices]
        return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: only the total memory is known
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    (kibibytes,) = re.findall(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(encoding="utf-8"), re.MULTILINE)
    return int(kibibytes) * 1024 // len(devices)


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
