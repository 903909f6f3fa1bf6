"""Read what a compiled program does in one run from its text: collectives, matmul FLOPs, HBM traffic, buffers.

In: the text of a compiled and scheduled program (`jax.stages.Compiled.as_text`). Out: `Work`, for one device, since
shapes in the text are those of one device. Next: `compile.py`.

XLA does not promise the format of its text. `Compiled.cost_analysis` would be the stable way, but it counts the body of
a loop once. Extrapolating it from unrolled programs of 1 and 2 layers is not reliable either. For results/planning's
125m-T8192 (12 layers, libtpu 0.0.51) it gives 1.63e13 FLOPs and 158 GB, and the program has 2.31e13 and 170 GB, because

- in unrolled layers XLA merges recomputation with the forward pass, so that remat "full" has no effect;
- "bytes accessed" includes VMEM and whole operands of which a fusion reads a slice: 29 % above HBM traffic at 1 layer;
- loops over row blocks, chunks of logits and accumulation parts would have to be unrolled too;
- it reports no collectives and no buffers.

Format that is relied on: names of operations and their shapes, `calls=`, `body=`, `condition=`, and the attributes of
collectives and convolutions. TPUs are the target: there, the compiler makes a convolution of every matmul. On CPU and
GPU matmuls may be dots or library calls. A Pallas kernel for TPUs reports its own cost (`kernels.tpu.cost`); the
operands and results of any other kernel count as traffic, and its FLOPs as 0.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# Operations that neither compute nor move anything: names for existing buffers, and control flow, whose bodies count.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all"}
SLICES = {"dynamic-slice", "slice", "gather"}

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
ARRAY = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)(?::([^}]*))?\})?")
CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")
NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array of a program.

    Args:
        dtype: the compiler's name of its dtype: bf16, s32, pred.
        dims: its shape.
        num_bytes: its size, padded to the tiles of its layout.
        in_hbm: whether it is in HBM, and not in VMEM.
    """

    dtype: str
    dims: tuple[int, ...]
    num_bytes: int
    in_hbm: bool

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def unpadded_bytes(self) -> int:
        """Its size without padding."""
        return math.prod(self.dims) * bits_of(self.dtype) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An operation of a program: `%name = results opcode(%operands), attributes`."""

    name: str
    opcode: str
    results: tuple[Buffer, ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @functools.cached_property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        return [name for group in CALLED.findall(self.text) for name in NAME.findall(group)]

    @property
    def kind(self) -> str:
        """Its opcode; for the start of an asynchronous operation, that of the operation."""
        return self.opcode.removesuffix("-start")

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of a pattern in its text, or None."""
        found = re.search(pattern, self.text)
        return found[1] if found else None


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind in one run of a program.

    Args:
        kind: one of `COLLECTIVES`.
        count: number of times that one is run.
        num_bytes: bytes that a device receives in all of them.
    """

    kind: str
    count: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one device in one run of a program.

    Args:
        collectives: by kind, the one with the most bytes first.
        matmul_flops: FLOPs of matmuls and convolutions.
        hbm_bytes: bytes read from and written to HBM, each operand and result of a scheduled operation once.
        largest: the largest buffers that the program allocates: (bytes, shape, operation of the model).
        loops: for each loop, the number of times that its body runs; 0 if unknown (the body counts once).
        cycles: the TPU compiler's own estimate for everything but Pallas kernels.
    """

    collectives: tuple[Collective, ...]
    matmul_flops: int
    hbm_bytes: int
    largest: tuple[tuple[int, str, str], ...]
    loops: tuple[int, ...]
    cycles: int


def read_work(text: str, num_largest: int = 8) -> Work:
    """Return the work of a compiled program.

    Args:
        text: the program.
        num_largest: number of the largest buffers to return.
    """
    program, entry = read_program(text)
    hbm_bytes = flops = cycles = 0
    collectives: dict[tuple[str, ...], tuple[int, Instruction, str]] = {}  # by identity
    buffers: dict[str, tuple[int, str]] = {}
    loops: list[int] = []
    for computation, times, is_fused, instruction in _walk(program, entry, 1, False, loops):
        if instruction.kind in COLLECTIVES:
            key = _identity(computation, is_fused, instruction)
            # If it runs beside a loop, it is in the loop's body as well: it runs as often as its rarest part.
            if key not in collectives or times < collectives[key][0]:
                collectives[key] = times, instruction, computation
            continue
        if instruction.opcode in ("convolution", "dot") or _is_library_matmul(instruction):
            flops += times * matmul_flops(instruction, program[computation])
        if is_fused or instruction.opcode in FREE or instruction.opcode.endswith("-done"):
            continue
        cycles += times * int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        kernel_flops, num_bytes = _kernel_cost(instruction) or (0, _traffic(instruction, program, program[computation]))
        flops += times * kernel_flops
        hbm_bytes += times * num_bytes
        for buffer in instruction.results:
            if buffer.in_hbm:
                source = instruction.attribute(r'op_name="([^"]*)"') or ""
                buffers.setdefault(str(buffer), (buffer.num_bytes, source))
    counts, received = Counter(), Counter()
    for times, instruction, computation in collectives.values():
        kind, num_bytes = _received(instruction, computation)
        counts[kind] += times
        received[kind] += times * num_bytes
        hbm_bytes += times * sum(buffer.num_bytes for buffer in instruction.results if buffer.in_hbm)
    largest = sorted(((size, shape, source) for shape, (size, source) in buffers.items()), reverse=True)
    return Work(
        collectives=tuple(Collective(kind, counts[kind], size) for kind, size in received.most_common()),
        matmul_flops=flops,
        hbm_bytes=hbm_bytes,
        largest=tuple(largest[:num_largest]),
        loops=tuple(loops),
        cycles=cycles,
    )


# ---- the text


def bits_of(dtype: str) -> int:
    """Return the bits of an element: 16 for bf16, 32 for s32, 8 for pred, and 0 for token."""
    return 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)


def read_buffer(dtype: str, dims: str, layout: str, tiling: str) -> Buffer:
    """Return an array from the parts of its type, for example "bf16", "4096,12", "1,0", "T(8,128)(2,1)S(1)".

    Dims are padded to the tiles, minor dims (which the layout lists first) to the last sizes of a tile.
    """
    sizes = [int(size) for size in dims.split(",") if size]
    padded = list(sizes)
    if layout and (tile := re.search(r"T\(([0-9,]+)\)", tiling)):
        for dim, size in zip(map(int, layout.split(",")), map(int, reversed(tile[1].split(","))), strict=False):
            padded[dim] = -(-padded[dim] // size) * size
    in_hbm = re.search(r"S\([1-9]", tiling) is None
    return Buffer(dtype, tuple(sizes), math.prod(padded) * bits_of(dtype) // 8, in_hbm)


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
    program: dict[str, Computation], computation: str, times: int, is_fused: bool, loops: list[int]
) -> Iterator[tuple[str, int, bool, Instruction]]:
    """Yield every instruction that runs: its computation, how often it runs, whether in a fusion, and the instruction.

    Adds the number of runs of every loop's body to `loops`.
    """
    for instruction in program[computation].values():
        yield computation, times, is_fused, instruction
        if instruction.opcode == "while":
            trip_count = _trip_count(instruction, program)
            loops.append(trip_count * times)
            body = instruction.attribute(r"body=%([\w.\-]+)")
            assert body is not None
            yield from _walk(program, body, times * max(1, trip_count), False, loops)
        elif instruction.opcode in ("fusion", "call", "conditional", "async-start"):
            for name in instruction.called:
                yield from _walk(program, name, times, is_fused or instruction.opcode == "fusion", loops)


def _trip_count(loop: Instruction, program: dict[str, Computation]) -> int:
    """Return how often a loop's body runs, or 0 if unknown.

    It is the constant that the loop's condition compares its counter with: loops in this project are scans, which
    count from 0 by one.
    """
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition = loop.attribute(r"condition=%([\w.\-]+)")
    assert condition is not None
    constants = [each for each in program[condition].values() if each.opcode == "constant" and not each.results[0].dims]
    bounds = {int(constant.text.split(")")[0]) for constant in constants}
    return bounds.pop() if len(bounds) == 1 else 0


# ---- collectives


def _identity(computation: str, is_fused: bool, instruction: Instruction) -> tuple[str, ...]:
    """Return a key that all parts of one collective have in common.

    A collective that the compiler runs beside other work is spread over many fusions and loops, which all have its
    channel; it counts once. The channel alone is not enough: successive collectives may share one.
    """
    channel = instruction.attribute(r"channel_id=(\d+)")
    if not is_fused or channel is None or "reduce-scatter" in computation:
        return computation, instruction.name
    chain = instruction.attribute(r'chain_id="(\d+)"') or ""
    return channel, chain, instruction.opcode, str(instruction.results[0])


def _received(instruction: Instruction, computation: str) -> tuple[str, int]:
    """Return the true kind of a collective, and the bytes that a device receives by the best ring algorithm.

    For n devices in a group, a gather receives (n - 1) / n of its result and a scatter as much of its operand. An
    all-reduce is a scatter followed by a gather.
    """
    kind, sizes = instruction.kind, [buffer.unpadded_bytes for buffer in instruction.results]
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        sizes = [max(sizes)]  # the others are its operands
    size, n = sum(sizes), _group_size(instruction)
    if kind == "collective-permute":
        return kind, size
    if kind == "reduce-scatter":
        return kind, size * (n - 1)
    if kind == "all-reduce" and "reduce-scatter" in computation:
        kind = "reduce-scatter"  # of which only a slice is used
    return kind, size * (n - 1) // n * (2 if kind == "all-reduce" else 1)


def _group_size(instruction: Instruction) -> int:
    """Return the number of devices in a collective's group, from any of the three notations."""
    if axes := instruction.attribute(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}"):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", instruction.attribute(r"replica_groups=mesh\[([^\]]*)\]") or ""))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes))
    if size := instruction.attribute(r"replica_groups=\[\d+,(\d+)\]"):
        return int(size)
    group = instruction.attribute(r"replica_groups=\{\{([0-9,]*)\}")
    return len(group.split(",")) if group else 1


# ---- FLOPs


def _kernel_cost(instruction: Instruction) -> tuple[int, int] | None:
    """Return FLOPs and HBM bytes of a Pallas kernel by its own `pl.CostEstimate`, or None for any other operation."""
    if instruction.opcode != "custom-call" or "tpu_custom_call" not in instruction.text:
        return None
    cost = dict(re.findall(r'"(flops|bytes_accessed)":"(\d+)"', instruction.text))
    return (int(cost["flops"]), int(cost["bytes_accessed"])) if len(cost) == 2 else None


def _is_library_matmul(instruction: Instruction) -> bool:
    """Return whether it calls a GPU library for a matmul, or for a convolution whose result is the larger side."""
    target = instruction.attribute(r'custom_call_target="(__cublas\$|__cudnn\$conv\w*Forward)')
    return instruction.opcode == "custom-call" and target is not None


def matmul_flops(instruction: Instruction, computation: Computation) -> int:
    """Return the FLOPs of a matmul or a convolution, 2 for a multiply-add.

    Where the window of a convolution covers padding, or the gaps of a dilated operand, nothing is multiplied. (The
    compiler writes a matmul with a batch dim as such a convolution.)
    """
    left, right = (computation[name].results[0].dims for name in instruction.operands[:2])
    out = instruction.results[0].dims
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)
    if labels is None:
        summed = instruction.attribute(r'lhs_contracting_dim(?:s=\{|ensions":\[)([0-9,"]*)')
        assert summed is not None
        return 2 * math.prod(out) * math.prod(left[int(dim)] for dim in re.findall(r"\d+", summed))
    left_dims, right_dims, out_dims = labels.groups()
    window = instruction.attribute(r"window=\{([^}]*)\}")
    options = dict(item.split("=") for item in window.split()) if window else {}
    flops = 2 * out[out_dims.index("b")] * out[out_dims.index("f")] * right[right_dims.index("i")]
    for dim in range(len(options["size"].split("x")) if options else 0):

        def option(name: str, default: int, dim: int = dim) -> int:
            return int(options[name].split("x")[dim].split("_")[0]) if name in options else default

        stride, left_dilation, right_dilation = option("stride", 1), option("lhs_dilate", 1), option("rhs_dilate", 1)
        size, num_rows = left[left_dims.index(str(dim))], out[out_dims.index(str(dim))]
        columns = (
            row * stride + tap * right_dilation - option("pad", 0)
            for row, tap in itertools.product(range(num_rows), range(option("size", 1)))
        )
        flops *= sum(column % left_dilation == 0 and 0 <= column // left_dilation < size for column in columns)
    return flops


# ---- HBM traffic


def _traffic(instruction: Instruction, program: dict[str, Computation], computation: Computation) -> int:
    """Return the bytes that a scheduled operation reads from HBM and writes to it."""
    operands = [computation[name].results for name in instruction.operands]
    if instruction.opcode in ("copy-start", "slice-start"):
        # Between HBM and VMEM: the results are destination, source and a semaphore, in either order.
        arrays = [buffer for buffer in instruction.results if buffer.dims]
        return min((buffer.num_bytes for buffer in arrays), default=0) * len({buffer.in_hbm for buffer in arrays})
    if instruction.opcode in SLICES:
        return 2 * sum(buffer.num_bytes for buffer in instruction.results if buffer.in_hbm)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sum(buffer.num_bytes for buffer in operands[1])
    if instruction.opcode != "fusion" or not instruction.called:
        return sum(b.num_bytes for b in itertools.chain(*operands, instruction.results) if b.in_hbm)
    return _fusion_traffic(instruction, program[instruction.called[0]])


def _fusion_traffic(fusion: Instruction, body: Computation) -> int:
    """Return the traffic of a fusion: only the used slices of its operands, and no buffers that it passes through."""
    users: dict[str, list[Instruction]] = {name: [] for name in body}
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
    if len(outputs) != len(fusion.results):  # one of them is several arrays: the parts of a collective
        return total
    for output, buffer in zip(outputs, fusion.results, strict=True):
        while output.opcode == "bitcast":
            output = body[output.operands[0]]
        if not buffer.in_hbm or output.opcode == "parameter" or _passes_through(output):
            continue
        is_update = output.opcode == "dynamic-update-slice"
        written = body[output.operands[1]].results if is_update else (buffer,)
        total += sum(each.num_bytes for each in written)
    return total


def _passes_through(instruction: Instruction) -> bool:
    """Return whether it is a collective, which is counted separately, or a part of one."""
    is_part = instruction.opcode == "custom-call" and "AsyncCollective" in instruction.text
    return is_part or instruction.kind in COLLECTIVES or instruction.kind == "tuple"
