"""Parse the text of a compiled program: collectives, matmul FLOPs, HBM traffic and buffers of one run.

In: the text of a compiled and scheduled program (`jax.stages.Compiled.as_text`). Out: `Work` of one device, since
shapes in the text are per device. Next: `compile.py`.

The format of XLA's text is not stable. `Compiled.cost_analysis` is a stable interface, but it reports neither
collectives nor buffers, and counts the body of a loop once. Extrapolating it from unrolled programs of 1 and 2 layers
is not reliable: for results/planning's 125m-T8192 (12 layers, libtpu 0.0.51) it gives 1.63e13 FLOPs and 158 GB, and the
program has 2.31e13 and 170 GB. In unrolled layers XLA merges recomputation with the forward pass, so that remat "full"
has no effect, and "bytes accessed" includes VMEM, and whole operands if a fusion reads only a slice.

The parser relies on names of operations and their shapes, `calls=`, `body=`, `condition=`, and the attributes of
collectives and convolutions. The target is TPUs, where the compiler converts every matmul to a convolution. On CPU and
GPU matmuls may be dots or library calls. A Pallas kernel for TPUs reports its own cost (`kernels.tpu.cost`); for other
kernels, operands and results count as traffic, and FLOPs as 0.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

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

    dtype: str  # in the compiler's notation: bf16, s32, pred
    dims: tuple[int, ...]
    num_bytes: int  # size, padded to the tiles of the layout
    in_hbm: bool  # False for VMEM

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


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
class Collective:
    """Collectives of one kind in one run of a program."""

    kind: str  # one of `COLLECTIVES`
    count: int  # number of executions
    num_bytes: int  # bytes received by a device, in total


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one device in one run of a program."""

    collectives: tuple[Collective, ...]  # one per kind, in order of decreasing bytes
    matmul_flops: int  # FLOPs of matmuls and convolutions
    hbm_bytes: int  # HBM traffic, each operand and result of a scheduled operation once
    largest: tuple[tuple[int, str, str], ...]  # largest allocated buffers: (bytes, shape, operation of the model)
    loops: tuple[int, ...]  # trip count of each loop; 0 if unknown (the body counts once)
    cycles: int  # the TPU compiler's estimate, without Pallas kernels
    kernels: tuple[tuple[str, int], ...]  # Pallas kernels: name of the instruction, and number of executions
    launches: int  # scheduled operations that compute or move data: on a GPU, the number of kernel launches


def read_work(text: str, num_largest: int = 8) -> Work:
    """Return the work of a compiled program, with its `num_largest` largest buffers."""
    program, entry = read_program(text)
    hbm_bytes = flops = cycles = launches = 0
    collectives: dict[tuple[str, ...], tuple[int, Instruction, str]] = {}  # by identity
    buffers: dict[str, tuple[int, str]] = {}
    loops: list[int] = []
    kernels: list[tuple[str, int]] = []
    for computation, times, is_fused, instruction in _walk(program, entry):
        if instruction.opcode == "while":
            loops.append(times * _trip_count(instruction, program))
        if instruction.kind in COLLECTIVES:
            key = _identity(computation, is_fused, instruction)
            # A collective that overlaps with a loop is also in the loop's body: it runs as often as its rarest part.
            if key not in collectives or times < collectives[key][0]:
                collectives[key] = times, instruction, computation
            continue
        if instruction.opcode in ("convolution", "dot") or _is_library_matmul(instruction):
            flops += times * matmul_flops(instruction, program[computation])
        if is_fused or instruction.opcode in FREE or instruction.opcode.endswith("-done"):
            continue
        launches += times
        cycles += times * int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        is_kernel = instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.text
        if is_kernel:
            kernels.append((instruction.name, times))
        cost = dict(re.findall(r'"(flops|bytes_accessed)":"(\d+)"', instruction.text)) if is_kernel else {}
        if len(cost) == 2:  # a Pallas kernel's `pl.CostEstimate`
            flops += times * int(cost["flops"])
            hbm_bytes += times * int(cost["bytes_accessed"])
        else:
            hbm_bytes += times * _traffic(instruction, program, program[computation])
        for buffer in instruction.results:
            if buffer.in_hbm:
                buffers.setdefault(str(buffer), (buffer.num_bytes, instruction.attribute(r'op_name="([^"]*)"')))
    counts, received = Counter(), Counter()
    for times, instruction, computation in collectives.values():
        kind, num_bytes = _received(instruction, computation)
        counts[kind] += times
        received[kind] += times * num_bytes
        hbm_bytes += times * _hbm_bytes(instruction.results)
    largest = sorted(((size, shape, source) for shape, (size, source) in buffers.items()), reverse=True)
    by_kind = tuple(Collective(kind, counts[kind], size) for kind, size in received.most_common())
    return Work(by_kind, flops, hbm_bytes, tuple(largest[:num_largest]), tuple(loops), cycles, tuple(kernels), launches)


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
    return Buffer(dtype, tuple(sizes), _bytes(dtype, padded), in_hbm=not re.search(r"S\([1-9]", tiling))


def _bytes(dtype: str, dims: Iterable[int]) -> int:
    """Return the size of an array without tiles: 2 bytes per element for bf16, 4 for s32, 1 for pred, 0 for token."""
    return math.prod(dims) * (8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)) // 8


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


def _walk(
    program: dict[str, Computation], computation: str, times: int = 1, is_fused: bool = False
) -> Iterator[tuple[str, int, bool, Instruction]]:
    """Yield computation, instruction, number of executions and whether it is in a fusion, for each instruction."""
    for instruction in program[computation].values():
        yield computation, times, is_fused, instruction
        if instruction.opcode == "while":
            body = instruction.attribute(r"body=%([\w.\-]+)")
            yield from _walk(program, body, times * max(1, _trip_count(instruction, program)))
        elif instruction.opcode in ("fusion", "call", "conditional", "async-start"):
            for name in instruction.called:
                yield from _walk(program, name, times, is_fused or instruction.opcode == "fusion")


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


# ---- collectives


def _identity(computation: str, is_fused: bool, instruction: Instruction) -> tuple[str, ...]:
    """Return a key shared by all parts of one collective.

    A collective that overlaps with other work is split over many fusions and loops, all with its channel; it counts
    once. The channel alone is not a key: successive collectives may share one.
    """
    channel = instruction.attribute(r"channel_id=(\d+)")
    if not is_fused or not channel or "reduce-scatter" in computation:
        return computation, instruction.name
    return channel, instruction.attribute(r'chain_id="(\d+)"'), instruction.opcode, str(instruction.results[0])


def _received(instruction: Instruction, computation: str) -> tuple[str, int]:
    """Return the true kind of a collective, and the bytes that a device receives with the best ring algorithm.

    With n devices in a group, a gather receives (n - 1) / n of its result, and a scatter (n - 1) / n of its operand. An
    all-reduce is a scatter followed by a gather.
    """
    kind, sizes = instruction.kind, [_bytes(buffer.dtype, buffer.dims) for buffer in instruction.results]
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        sizes = [max(sizes)]  # the others are its operands
    size, n = sum(sizes), _group_size(instruction)
    if kind == "collective-permute":
        return kind, size
    if kind == "reduce-scatter":
        return kind, size * (n - 1)
    if kind == "all-reduce" and "reduce-scatter" in computation:
        kind = "reduce-scatter"  # only a slice of the all-reduce is used
    return kind, size * (n - 1) // n * (2 if kind == "all-reduce" else 1)


def _group_size(instruction: Instruction) -> int:
    """Return the number of devices in a collective's group, for any of the three notations."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if size := instruction.attribute(r"replica_groups=\[\d+,(\d+)\]"):
        return int(size)
    return len(instruction.attribute(r"replica_groups=\{\{([0-9,]*)\}").split(","))


# ---- FLOPs


def _is_library_matmul(instruction: Instruction) -> bool:
    """Return whether an operation calls a GPU library for a matmul, or for the forward pass of a convolution."""
    target = instruction.attribute(r'custom_call_target="(__cublas\$|__cudnn\$conv\w*Forward)')
    return instruction.opcode == "custom-call" and target != ""


def matmul_flops(instruction: Instruction, computation: Computation) -> int:
    """Return the FLOPs of a matmul or a convolution, 2 for a multiply-add.

    Padding and the gaps of a dilated operand in the window of a convolution count as 0. (The compiler writes a matmul
    with a batch dim as such a convolution.)
    """
    left, right = (computation[name].results[0].dims for name in instruction.operands[:2])
    out = instruction.results[0].dims
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)
    if labels is None:
        summed = instruction.attribute(r'lhs_contracting_dim(?:s=\{|ensions":\[)([0-9,"]*)')
        return 2 * math.prod(out) * math.prod(left[int(dim)] for dim in re.findall(r"\d+", summed))
    left_dims, right_dims, out_dims = labels.groups()
    window = instruction.attribute(r"window=\{([^}]*)\}")
    options = {name: values.split("x") for name, values in re.findall(r"(\w+)=(\S+)", window)}
    flops = 2 * out[out_dims.index("b")] * out[out_dims.index("f")] * right[right_dims.index("i")]
    for dim in range(len(options["size"]) if options else 0):
        defaults = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
        values = defaults | {name: int(each[dim].split("_")[0]) for name, each in options.items()}
        size, num_rows = left[left_dims.index(str(dim))], out[out_dims.index(str(dim))]
        columns = (
            row * values["stride"] + tap * values["rhs_dilate"] - values["pad"]
            for row, tap in itertools.product(range(num_rows), range(values["size"]))
        )
        gap = values["lhs_dilate"]
        flops *= sum(column % gap == 0 and 0 <= column // gap < size for column in columns)
    return flops


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
