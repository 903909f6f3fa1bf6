"""What a compiled program does in one run, read from its text: collectives, matmul FLOPs, memory traffic, buffers.

In: the text of a compiled and scheduled program (`jax.stages.Compiled.as_text`). Out: `Work`. Next: `planning.py`.

It is made for TPUs, where the compiler makes a convolution of every matmul. On CPU and GPU matmuls may be dots, and on
GPU calls of libraries too. What a kernel of our own does inside is not in the text: one for TPUs says it of itself
(`kernels.tpu.cost`); of one for GPUs, operands and results count as traffic, and nothing as FLOPs.

The compiler's own `cost_analysis` counts the body of a loop once, and the layers are a loop. Here every body counts as
often as it runs: the number is the constant that the loop's condition compares its counter with. Loops in this project
are scans, which count from 0 by one.

A collective that the compiler runs beside other work is spread over many fusions, and over loops, that all carry its
channel; it counts once. Shapes in the text are those of one device, so every figure is for one device.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}  # s8, u32 and the like say their own

# Neither compute nor move anything: names for what is there, and control flow, whose bodies are walked.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all"}
SLICES = {"dynamic-slice", "slice", "gather"}

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
ARRAY = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)(?::([^}]*))?\})?")
CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array of a program.

    Args:
        dtype: as the compiler calls it.
        dims: its shape.
        num_bytes: that it takes, filled up to the tiles of its layout.
        in_hbm: whether it is in the chip's main memory, and not in its vector memory.
    """

    dtype: str
    dims: tuple[int, ...]
    num_bytes: int
    in_hbm: bool

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a program."""

    name: str
    opcode: str
    results: tuple[Buffer, ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs."""
        return tuple(name for group in CALLED.findall(self.text) for name in re.findall(r"%([\w.\-]+)", group))

    @property
    def source(self) -> str:
        """The operation of the model that it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind in one run of a program.

    Args:
        kind: one of `COLLECTIVES`.
        count: how often one is run.
        num_bytes: that a device receives in all.
    """

    kind: str
    count: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does in one run.

    Args:
        collectives: by kind, the most bytes first.
        matmul_flops: of matmuls and convolutions.
        hbm_bytes: read from and written to main memory, each operand and result of a scheduled operation once.
        largest: the largest buffers that the program makes: (bytes, shape, operation).
        loops: how often the body of each loop runs in all; 0 if its condition could not be read (its body counts once).
        cycles: that the compiler for TPUs estimates, of what is no kernel of ours.
    """

    collectives: tuple[Collective, ...]
    matmul_flops: int
    hbm_bytes: int
    largest: tuple[tuple[int, str, str], ...]
    loops: tuple[int, ...]
    cycles: int


Program = dict[str, dict[str, Instruction]]


def read_buffer(dtype: str, dims: str, layout: str, places: str) -> Buffer:
    """An array from the parts of its type: bf16, 4096,12, 1,0, T(8,128)(2,1)S(1)."""
    sizes = [int(size) for size in dims.split(",") if size]
    bits = BITS[dtype] if dtype in BITS else int(re.sub(r"\D", "", dtype) or 0)
    padded = list(sizes)
    if (tile := re.search(r"T\(([0-9,]+)\)", places or "")) and layout:
        for dim, size in zip(map(int, layout.split(",")), reversed(list(map(int, tile[1].split(",")))), strict=False):
            padded[dim] = -(-padded[dim] // size) * size
    in_hbm = re.search(r"S\([1-9]", places or "") is None
    return Buffer(dtype, tuple(sizes), math.prod(padded) * bits // 8, in_hbm)


def read_program(text: str) -> tuple[Program, str]:
    """The computations of a program by name, and the name of the one that it starts with."""
    program: Program = {}
    entry = name = ""
    for line in text.splitlines():
        if heading := COMPUTATION.match(line):
            name = heading[2]
            entry = name if heading[1] else entry
            program[name] = {}
        elif name and (found := INSTRUCTION.match(line)):
            buffers = tuple(read_buffer(*parts) for parts in ARRAY.findall(found[3]))
            operands = tuple(re.findall(r"%([\w.\-]+)", found[5].split(")")[0]))
            program[name][found[2]] = Instruction(found[2], found[4], buffers, operands, found[5], bool(found[1]))
    return program, entry


def read_work(text: str, num_largest: int = 8) -> Work:
    """Read what a program does in one run.

    Args:
        text: of the compiled program.
        num_largest: of its buffers that are named.
    """
    program, entry = read_program(text)
    hbm_bytes = flops = cycles = 0
    found: dict[Any, tuple[int, str, int, int]] = {}  # by identity: times, kind, bytes received, bytes of results
    made: dict[str, tuple[int, str]] = {}
    loops: list[int] = []
    for place, instruction in _walk(program, Place(entry, 1, False), loops):
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            key = _identity(place, instruction)
            # One that goes on beside a loop stands in the loop's body too: it runs as often as where it runs least.
            if key not in found or place.times < found[key][0]:
                written = sum(buffer.num_bytes for buffer in instruction.results if buffer.in_hbm)
                found[key] = (place.times, *_received(instruction, kind, place.computation), written)
            continue
        if instruction.opcode in ("convolution", "dot") or _is_library_matmul(instruction):
            flops += place.times * matmul_flops(instruction, program[place.computation])
        if place.is_fused or instruction.opcode in FREE or instruction.opcode.endswith("-done"):
            continue
        if estimate := re.search(r'"estimated_cycles":"(\d+)"', instruction.text):
            cycles += place.times * int(estimate[1])
        kernel = _of_kernel(instruction)
        if kernel is None:
            hbm_bytes += place.times * _traffic(instruction, program, program[place.computation])
        else:
            flops += place.times * kernel.flops
            hbm_bytes += place.times * kernel.hbm_bytes
        for buffer in instruction.results:
            if buffer.in_hbm:
                made.setdefault(str(buffer), (buffer.num_bytes, instruction.source))
    counts, received = Counter(), Counter()
    for times, kind, num_bytes, written in found.values():
        counts[kind] += times
        received[kind] += times * num_bytes
        hbm_bytes += times * written
    largest = sorted(((size, shape, source) for shape, (size, source) in made.items()), reverse=True)
    return Work(
        collectives=tuple(Collective(kind, counts[kind], size) for kind, size in received.most_common()),
        matmul_flops=flops,
        hbm_bytes=hbm_bytes,
        largest=tuple(largest[:num_largest]),
        loops=tuple(loops),
        cycles=cycles,
    )


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a walk stands: in which computation, how often that runs, and whether it is a fusion's."""

    computation: str
    times: int
    is_fused: bool


def _identity(place: Place, instruction: Instruction) -> tuple[str, ...]:
    """What is the same for all parts of one collective that is spread over fusions, and else for none but itself.

    A channel alone is not enough: collectives that stand in line may share one.
    """
    channel = re.search(r"channel_id=(\d+)", instruction.text)
    if not place.is_fused or channel is None or "reduce-scatter" in place.computation:
        return place.computation, instruction.name
    chain = re.search(r'chain_id="(\d+)"', instruction.text)
    return channel[1], chain[1] if chain else "", instruction.opcode, str(instruction.results[0])


def _walk(program: Program, place: Place, loops: list[int]) -> Iterator[tuple[Place, Instruction]]:
    """Every instruction that runs, bodies of loops and fusions included."""
    for instruction in program[place.computation].values():
        yield place, instruction
        if instruction.opcode == "while":
            trips = _trip_count(instruction, program)
            loops.append(trips * place.times)
            (body,) = re.findall(r"body=%([\w.\-]+)", instruction.text)
            yield from _walk(program, Place(body, place.times * max(1, trips), False), loops)
        elif instruction.opcode in ("fusion", "call", "conditional", "async-start"):
            is_fused = place.is_fused or instruction.opcode == "fusion"
            for name in instruction.called:
                yield from _walk(program, dataclasses.replace(place, computation=name, is_fused=is_fused), loops)


def _trip_count(loop: Instruction, program: Program) -> int:
    """The number that the loop's condition compares with; 0 if it is not to be read."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
        return int(known[1])
    (condition,) = re.findall(r"condition=%([\w.\-]+)", loop.text)
    lines = program[condition].values()
    bounds = {int(line.text.split(")")[0]) for line in lines if line.opcode == "constant" and not line.results[0].dims}
    return bounds.pop() if len(bounds) == 1 else 0


def _received(instruction: Instruction, kind: str, computation: str) -> tuple[str, int]:
    """What kind of collective it is in truth, and the bytes that a device receives, by the best ring algorithm.

    n devices in a group: of its result a gather receives all but its own part, (n - 1) / n; a scatter as much of its
    operand; an all-reduce is a scatter and then a gather.
    """
    arrays = [math.prod(buffer.dims) * _bytes_each(buffer.dtype) for buffer in instruction.results]
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        arrays = [max(arrays)]  # its operands stand beside its results
    size = sum(arrays)
    if kind == "collective-permute":
        return kind, size
    n = _group_size(instruction.text)
    if kind == "all-reduce" and "reduce-scatter" in computation:
        return "reduce-scatter", size * (n - 1) // n
    if kind == "reduce-scatter":
        return kind, size * (n - 1)
    return kind, size * (n - 1) // n * (2 if kind == "all-reduce" else 1)


def _bytes_each(dtype: str) -> int:
    return (BITS[dtype] if dtype in BITS else int(re.sub(r"\D", "", dtype) or 0)) // 8


def _group_size(text: str) -> int:
    """Devices of a collective's group, from any of the three ways in which it is written."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", text):
        return int(iota[2])
    groups = re.search(r"replica_groups=\{\{([0-9,]*)\}", text)
    return len(groups[1].split(",")) if groups else 1


class OfKernel(NamedTuple):
    """What a kernel of ours says of itself (`pl.CostEstimate`)."""

    flops: int
    hbm_bytes: int


def _of_kernel(instruction: Instruction) -> OfKernel | None:
    """What a call of a kernel does inside; None for anything else."""
    if instruction.opcode != "custom-call" or "tpu_custom_call" not in instruction.text:
        return None
    said = dict(re.findall(r'"(flops|bytes_accessed)":"(\d+)"', instruction.text))
    return OfKernel(int(said["flops"]), int(said["bytes_accessed"])) if len(said) == 2 else None


def _is_library_matmul(instruction: Instruction) -> bool:
    """Whether it calls a library of GPUs for a matmul, or for a convolution whose result is the larger side."""
    called = re.search(r'custom_call_target="(__cublas\$|__cudnn\$conv\w*Forward)', instruction.text)
    return instruction.opcode == "custom-call" and called is not None


def matmul_flops(instruction: Instruction, computation: dict[str, Instruction]) -> int:
    """FLOPs of a matmul or a convolution, which is what a TPU's compiler makes of every matmul, 2 for a multiply-add.

    Where its window stands on padding, or between the elements of a spread-out operand, nothing is multiplied: this is
    how a batch dim of a matmul looks.
    """
    left, right = (computation[name].results[0].dims for name in instruction.operands[:2])
    out = instruction.results[0].dims
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)
    if labels is None:
        summed = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([0-9,"]*)', instruction.text)
        assert summed is not None
        return 2 * math.prod(out) * math.prod(left[int(dim)] for dim in re.findall(r"\d+", summed[1]))
    of_left, of_right, of_out = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", instruction.text)
    options = dict(item.split("=") for item in window[1].split()) if window else {}
    flops = 2 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    for dim in range(len(options["size"].split("x")) if options else 0):

        def option(name: str, default: str, dim: int = dim) -> str:
            return options[name].split("x")[dim] if name in options else default

        spread, step = int(option("lhs_dilate", "1")), int(option("stride", "1"))
        between, low = int(option("rhs_dilate", "1")), int(option("pad", "0_0").split("_")[0])
        size, rows = left[of_left.index(str(dim))], out[of_out.index(str(dim))]
        columns = int(option("size", "1"))
        places = (row * step + column * between - low for row, column in itertools.product(range(rows), range(columns)))
        flops *= sum(place % spread == 0 and 0 <= place // spread < size for place in places)
    return flops


def _traffic(instruction: Instruction, program: Program, computation: dict[str, Instruction]) -> int:
    """Bytes that a scheduled operation reads from main memory and writes to it."""
    operands = [computation[name].results for name in instruction.operands]
    if instruction.opcode in ("copy-start", "slice-start"):
        # Between the two memories: results are destination, source and a semaphore, in one order or the other.
        moved = min((b.num_bytes for b in instruction.results if b.dims), default=0)
        return moved * len({b.in_hbm for b in instruction.results if b.dims})
    if instruction.opcode in SLICES:
        return 2 * sum(buffer.num_bytes for buffer in instruction.results if buffer.in_hbm)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sum(buffer.num_bytes for buffer in operands[1])
    if instruction.opcode != "fusion" or not instruction.called:
        return sum(b.num_bytes for b in itertools.chain(*operands, instruction.results) if b.in_hbm)
    return _fusion_traffic(instruction, program[instruction.called[0]])


def _fusion_traffic(fusion: Instruction, body: dict[str, Instruction]) -> int:
    """Of a fusion: operands of which it takes a slice count as that, and what it hands through does not count."""
    users: dict[str, list[Instruction]] = {}
    for instruction in body.values():
        for name in instruction.operands:
            users.setdefault(name, []).append(instruction)
    total = 0
    for instruction in body.values():
        if instruction.opcode != "parameter" or not any(buffer.in_hbm for buffer in instruction.results):
            continue
        reads = [user for user in _beyond_bitcasts(users, instruction.name) if not _hands_through(user)]
        if all(user.opcode in SLICES or user.opcode == "dynamic-update-slice" for user in reads):
            total += sum(b.num_bytes for user in reads if user.opcode in SLICES for b in user.results)
        else:
            total += sum(buffer.num_bytes for buffer in instruction.results)
    (root,) = [instruction for instruction in body.values() if instruction.is_root]
    outputs = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for output, buffer in zip(outputs, _flat(fusion, outputs), strict=False):
        while output.opcode == "bitcast":
            output = body[output.operands[0]]
        if buffer is None or not buffer.in_hbm or output.opcode == "parameter" or _hands_through(output):
            continue
        is_update = output.opcode == "dynamic-update-slice"
        total += sum(b.num_bytes for b in body[output.operands[1]].results) if is_update else buffer.num_bytes
    return total


def _flat(fusion: Instruction, outputs: list[Instruction]) -> list[Buffer | None]:
    """The fusion's own result for each of its outputs; none for an output that is several arrays."""
    if len(outputs) == len(fusion.results):
        return list(fusion.results)
    return [None] * len(outputs)


def _hands_through(instruction: Instruction) -> bool:
    """Whether it is a collective, counted by itself, or the start, the end or a part of one."""
    kind = instruction.opcode.removesuffix("-start")
    return kind in COLLECTIVES or kind == "tuple" or (kind == "custom-call" and "AsyncCollective" in instruction.text)


def _beyond_bitcasts(users: dict[str, list[Instruction]], name: str) -> list[Instruction]:
    found = []
    for user in users[name] if name in users else []:
        found += _beyond_bitcasts(users, user.name) if user.opcode == "bitcast" else [user]
    return found
