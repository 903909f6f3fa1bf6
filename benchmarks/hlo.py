"""Compile a function for the local devices or for a TPU slice, and read the work of one run from the program's text.

In: a jitted function and the shapes of its arguments. Out: a `CompiledProgram`, with its `Work` on one device, since
shapes in the text are per device. Next: `attention.py`, `step.py`, `gpu.py`, `tpu.py`, `step_cycles.py`.

The format of XLA's text is not stable. `Compiled.cost_analysis` is, but it counts the body of a loop once, and its
bytes include VMEM, and whole operands if a fusion reads only a slice. Collectives are not counted.

The parser relies on names of operations and their shapes, `calls=`, `body=` and `condition=`. A Pallas kernel for TPUs
reports its own traffic (`kernels.tpu.cost`); for other kernels, operands and results count.
"""

import dataclasses
import functools
import itertools
import math
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled, Lowered, Wrapped

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# Operations that neither compute nor move data: names for existing buffers, and control flow (the bodies are counted).
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all"}
SLICES = {"dynamic-slice", "slice", "gather"}

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
ARRAY = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)(?::([^}]*))?\})?")
CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")
NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Array of a program."""

    dims: tuple[int, ...]
    num_bytes: int  # size, padded to the tiles of the layout
    in_hbm: bool  # False for VMEM


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Operation of a program: `%name = results opcode(%operands), attributes`."""

    name: str
    opcode: str
    results: tuple[Buffer, ...]
    operands: tuple[str, ...]
    text: str  # text after the opcode
    is_root: bool

    @property
    def called(self) -> list[str]:
        """Return the names of the computations that the operation runs."""
        return [name for group in CALLED.findall(self.text) for name in NAME.findall(group)]

    @property
    def kind(self) -> str:
        """Return the opcode; for the start of an asynchronous operation, the opcode of that operation."""
        return self.opcode.removesuffix("-start")

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern in the text, or "" if there is no match."""
        found = re.search(pattern, self.text)
        return found[1] if found else ""


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Operation:
    """Scheduled operation of a program for a TPU."""

    name: str  # the instruction's name
    cycles: int  # the compiler's estimate, over all executions in one run
    has_matmul: bool
    jax_name: str  # JAX's name of its result, with the transformations around it; "" if the compiler made it
    source: str  # file and line in this repository that called it, or ""


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one device in one run of a program, without collectives."""

    hbm_bytes: int  # HBM traffic, each operand and result of a scheduled operation once
    operations: tuple[Operation, ...]  # most expensive first, without Pallas kernels
    kernels: tuple[tuple[str, int], ...]  # Pallas kernels: name of the instruction, and number of executions

    @property
    def cycles(self) -> int:
        """Return the TPU compiler's estimate, without Pallas kernels."""
        return sum(operation.cycles for operation in self.operations)


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Compiled function. All figures are for one device."""

    lowered: Lowered
    run: Compiled
    compile_s: float  # seconds of compilation, without tracing
    memory: Any  # the compiler's `CompiledMemoryStats`

    @functools.cached_property
    def work(self) -> Work:
        """Return the work of one run, from the program's text.

        jaxlib 0.10 cannot read programs of libtpu 0.0.51 for v5p and v6e that use their sparse cores, for example for a
        gather. With an option, the compiler writes the same text to a directory.
        """
        try:
            return read_work(self.run.as_text() or "")
        except jax.errors.JaxRuntimeError:
            with tempfile.TemporaryDirectory() as folder:
                self.lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
                (file,) = Path(folder).glob("*.after_codegen.txt")
                return read_work(file.read_text())

    @property
    def result_bytes(self) -> int:
        """Return the size of the results, without those that reuse the memory of donated arguments."""
        return self.memory.output_size_in_bytes - self.memory.alias_size_in_bytes


def compile_program(function: Callable[..., Any], *arguments: Any) -> CompiledProgram:
    """Compile a function, jitted or not, for arguments of these shapes, dtypes and shardings.

    Raises:
        jax.errors.JaxRuntimeError: compilation fails; on TPUs, also if the program does not fit in memory.
    """
    lowered = (function if isinstance(function, Wrapped) else jax.jit(function)).lower(*arguments)
    started = time.monotonic()
    compiled = lowered.compile()
    compile_s = time.monotonic() - started
    memory = compiled.memory_analysis()
    assert memory is not None
    return CompiledProgram(lowered, compiled, compile_s, memory)


def read_work(text: str) -> Work:
    """Return the work of a compiled and scheduled program, given its text."""
    program, entry = read_program(text)
    sources = read_sources(text)
    hbm_bytes = 0
    kernels: list[tuple[str, int]] = []
    operations: list[Operation] = []
    for computation, times, instruction in _walk(program, entry):
        is_free = instruction.opcode in FREE or instruction.opcode.endswith("-done")
        if is_free or instruction.kind in COLLECTIVES:
            continue
        if cycles := times * int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0):
            # A fusion with several results has no metadata: take that of its last operation with some.
            parts = [each for name in instruction.called for each in program[name].values()]
            described = next((x for x in (instruction, *reversed(parts)) if "op_name=" in x.text), instruction)
            name, frame = (described.attribute(x) for x in (r'op_name="([^"]*)"', r"stack_frame_id=(\d+)"))
            source = sources[int(frame or 0)]
            operations.append(Operation(instruction.name, cycles, _has_matmul(instruction, program), name, source))
        is_kernel = instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.text
        if is_kernel:
            kernels.append((instruction.name, times))
        # A Pallas kernel's `pl.CostEstimate`.
        own = instruction.attribute(r'"bytes_accessed":"(\d+)"') if is_kernel else ""
        hbm_bytes += times * (int(own) if own else _traffic(instruction, program, program[computation]))
    operations.sort(key=lambda operation: -operation.cycles)
    return Work(hbm_bytes, tuple(operations), tuple(kernels))


def _has_matmul(instruction: Instruction, program: dict[str, Computation]) -> bool:
    """Return whether an operation is a matmul, or a fusion with one. A TPU's matmuls are convolutions."""
    fused = (each for name in instruction.called for each in program[name].values())
    return instruction.opcode in ("convolution", "dot") or any(_has_matmul(each, program) for each in fused)


# ---- text


def read_buffer(dtype: str, dims: str, layout: str, tiling: str) -> Buffer:
    """Parse the type of an array, given in parts such as "bf16", "4096,12", "1,0", "T(8,128)(2,1)S(1)".

    Dims are padded to the tiles: minor dims, which the layout lists first, to the last sizes of a tile.
    """
    sizes = [int(size) for size in dims.split(",") if size]
    padded = list(sizes)
    if layout and (tile := re.search(r"T\(([0-9,]+)\)", tiling)):
        for dim, size in zip(map(int, layout.split(",")), map(int, reversed(tile[1].split(","))), strict=False):
            padded[dim] = -(-padded[dim] // size) * size
    # 2 bytes per element for bf16, 4 for s32, 1 for pred, 0 for token
    num_bytes = math.prod(padded) * (8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)) // 8
    return Buffer(tuple(sizes), num_bytes, in_hbm=not re.search(r"S\([1-9]", tiling))


def read_program(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a program by name, and the name of its entry computation."""
    program: dict[str, Computation] = {}
    entry = name = ""
    for line in text.splitlines():
        if heading := COMPUTATION.match(line):
            name = heading[2]
            entry = name if heading[1] else entry
            program[name] = {}
        elif name and (found := INSTRUCTION.match(line)):
            is_root, own_name, types, opcode, rest = found.groups()
            results = tuple(read_buffer(*parts) for parts in ARRAY.findall(types))
            operands = tuple(NAME.findall(rest.split(")")[0]))
            program[name][own_name] = Instruction(own_name, opcode, results, operands, rest, bool(is_root))
    return program, entry


def read_sources(text: str) -> dict[int, str]:
    """Return the file and line of each stack frame: of its innermost call in this repository, or "" if it has none."""
    root = f"{Path(__file__).parents[1]}/"
    files = text.partition("\nFileNames\n")[2].partition("\n\n")[0]
    names = {int(number): file for number, file in re.findall(r'^(\d+) "(.*)"$', files, re.MULTILINE)}
    places = re.findall(r"^(\d+) \{file_name_id=(\d+) .*? line=(\d+) ", text, re.MULTILINE)
    locations = {int(number): (names[int(file)], line) for number, file, line in places}
    sources: dict[int, str] = defaultdict(str)
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", text, re.MULTILINE)
    for frame, location, parent in frames:
        file, line = locations[int(location)]
        is_own = file.startswith(root) and "site-packages" not in file
        # The text numbers parents from 1, where 1 is none, and a frame follows its parent.
        sources[int(frame)] = f"{file.removeprefix(root)}:{line}" if is_own else sources[int(parent) - 1]
    return sources


def _walk(program: dict[str, Computation], computation: str, times: int = 1) -> Iterator[tuple[str, int, Instruction]]:
    """Yield computation, number of executions and instruction, for each instruction outside fusions."""
    for instruction in program[computation].values():
        yield computation, times, instruction
        if instruction.opcode == "while":
            body = instruction.attribute(r"body=%([\w.\-]+)")
            yield from _walk(program, body, times * max(1, _trip_count(instruction, program)))
        elif instruction.opcode in ("call", "conditional", "async-start"):
            for name in instruction.called:
                yield from _walk(program, name, times)


def _trip_count(loop: Instruction, program: dict[str, Computation]) -> int:
    """Return the trip count of a loop, or 0 if unknown.

    It is the constant with which the loop's condition compares the counter: loops in this project are scans, which
    count from 0 in steps of one.
    """
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition = program[loop.attribute(r"condition=%([\w.\-]+)")].values()
    bounds = {int(x.text.split(")")[0]) for x in condition if x.opcode == "constant" and not x.results[0].dims}
    return bounds.pop() if len(bounds) == 1 else 0


# ---- HBM traffic


def _hbm_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the bytes of the buffers that are in HBM."""
    return sum(buffer.num_bytes for buffer in buffers if buffer.in_hbm)


def _traffic(instruction: Instruction, program: dict[str, Computation], computation: Computation) -> int:
    """Return the bytes that a scheduled operation reads from HBM and writes to it."""
    operands = [computation[name].results for name in instruction.operands]
    if instruction.opcode in ("copy-start", "slice-start"):
        # Copies between HBM and VMEM: the results are destination, source and a semaphore, in either order.
        arrays = [buffer for buffer in instruction.results if buffer.dims]
        return min((buffer.num_bytes for buffer in arrays), default=0) * len({buffer.in_hbm for buffer in arrays})
    if instruction.opcode in SLICES:
        return 2 * _hbm_bytes(instruction.results)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sum(buffer.num_bytes for buffer in operands[1])
    if instruction.opcode != "fusion" or not instruction.called:
        return _hbm_bytes(itertools.chain(*operands, instruction.results))
    return _fusion_traffic(instruction, program[instruction.called[0]])


def _fusion_traffic(fusion: Instruction, body: Computation) -> int:
    """Return the traffic of a fusion: only used slices of its operands, and no buffers that it passes through."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in body.values():
        for name in instruction.operands:
            users[name].append(instruction)

    def users_behind_bitcasts(name: str) -> Iterator[Instruction]:
        for user in users[name]:
            yield from users_behind_bitcasts(user.name) if user.opcode == "bitcast" else [user]

    total = 0
    for instruction in body.values():
        if instruction.opcode != "parameter" or not any(buffer.in_hbm for buffer in instruction.results):
            continue
        reads = [user for user in users_behind_bitcasts(instruction.name) if not _passes_through(user)]
        is_sliced = all(user.opcode in SLICES or user.opcode == "dynamic-update-slice" for user in reads)
        read = [user for user in reads if user.opcode in SLICES] if is_sliced else [instruction]
        total += sum(buffer.num_bytes for each in read for buffer in each.results)
    (root,) = [instruction for instruction in body.values() if instruction.is_root]
    outputs = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(outputs) != len(fusion.results):  # an output is a tuple of arrays: the parts of a collective
        return total
    for output, buffer in zip(outputs, fusion.results, strict=True):
        while output.opcode == "bitcast":
            output = body[output.operands[0]]
        if not buffer.in_hbm or output.opcode == "parameter" or _passes_through(output):
            continue
        is_update = output.opcode == "dynamic-update-slice"
        total += sum(each.num_bytes for each in (body[output.operands[1]].results if is_update else (buffer,)))
    return total


def _passes_through(instruction: Instruction) -> bool:
    """Return whether the operation is a collective, which is counted separately, or a part of one."""
    is_part = instruction.opcode == "custom-call" and "AsyncCollective" in instruction.text
    return is_part or instruction.kind in COLLECTIVES or instruction.kind == "tuple"
