"""What the kernel for TPUs takes, without a TPU: compiled ahead of time, one layer for each line.

    make tpu-aot
    python -m benchmarks.tpu --topologies=v5e:2x2 --lengths=2048,4096,8192,16384,32768

One layer is q, k, v -> out, without projections, Kerple and DAPE 1x3 unless flags say otherwise, in bfloat16. Written
are OUTPUT/tpu.json, tables (tpu.txt, tpu.md) and OUTPUT/tpu.png. The columns:

    direction     forward, or backward: forward and the gradients of everything in one program
    temp MiB      temporary memory of the compiled program, inputs and outputs not counted
    GB            moved between main memory and chip: blocks that the kernel's pipeline brings and takes back
                  (`kernels.tpu.cost`), operands and results of everything else, bodies of loops as often as they run
    bandwidth ms  the time that takes at the chip's bandwidth
    schedule ms   of the kernel, its own instructions, one bundle for each cycle, as often as its loops run; of other
                  drivers the compiler's estimate of cycles. Either leaves out much of the waiting for memory
    compile s     seconds of compilation

`blockwise` is the driver for TPUs where there is no kernel; `naive` is `Dense`: what XLA makes of the layer. Where a
program does not fit, the reason stands in the JSON. GB of `naive` are the compiler's own count (`cost_analysis`), which
is right where there are no loops; `operand_gb` in the JSON is counted as for the others.

The schedule is read from the compiler's listing of its last pass, which is asked for with flags that nobody promises;
where they are gone, the column is empty. Clocks (GHz) are no vendor's promise either: v4 1.05, v5e 1.5, v5p 1.75,
v6e 1.64; v4 and v5p have two cores, which share sequences out.
"""

import collections
import dataclasses
import itertools
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.hardware import find_libtpu, in_process, libtpu_version, read_topology, why_not
from dape_jax.kernels import tpu
from dape_jax.model.attention import Auto, Dense, Fused, Implementation
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig, ScoreMod
from dape_jax.model.transformer import SIZES
from dape_jax.planning.hlo import read_work

DIRECTIONS = ("forward", "backward")
DRIVERS: dict[str, Implementation] = {"fused": Fused(), "blockwise": Auto().blockwise("tpu"), "naive": Dense()}
CLOCK_HZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.64e9}
CORES = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1}
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags, checked."""

    topologies: tuple[str, ...] = flag(("v5e:2x2",), "Slices to compile for; one chip of each is used.")
    lengths: tuple[int, ...] = flag((2048, 8192), "Sequence lengths in tokens.")
    models: tuple[str, ...] = flag(("125m",), f"Whose heads and head widths: {', '.join(SIZES)}.")
    directions: tuple[str, ...] = flag(DIRECTIONS, "What to compile.")
    implementations: tuple[str, ...] = flag(("fused",), f"What to compile: {', '.join(DRIVERS)}.")
    batch: int = flag(1, "Batch size B.")
    kernel_width: int = flag(3, "Kernel width W of DAPE.")
    channels: int = flag(32, "Hidden channels C of DAPE.")
    bias: str = flag("kerple", "Position bias.")
    output: str = flag("results/tpu", "Directory of the JSON and the picture.")

    def __post_init__(self):
        for name, allowed in {"models": SIZES, "directions": DIRECTIONS, "drivers": DRIVERS}.items():
            value = getattr(self, name)
            require(bool(value) and set(value) <= set(allowed), f"--{name}", value, f"some of {tuple(allowed)}")
        require(self.bias in BIASES, "--bias", self.bias, f"one of {tuple(BIASES)}")
        require(bool(self.lengths) and min(self.lengths) > 0, "--lengths", self.lengths, "lengths of 1 or more")
        for topology in self.topologies:
            hardware = read_topology(topology)
            require(hardware.is_tpu, "--topologies", topology, "slices of TPUs")


@dataclasses.dataclass(frozen=True)
class Request:
    """One line of the table."""

    topology: str
    model: str
    length: int
    direction: str
    implementation: str
    settings: Settings


def compile_layer(request: Request) -> dict[str, Any]:
    """Compile a layer for one chip and read what it takes; in a process of its own, see `slices.in_process`."""
    options = {"chip_config_name": "megacore"} if request.topology.startswith("v4") else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=request.topology, **options).devices
    mesh = Mesh(np.array(devices[:1]), ("chip",), axis_types=(AxisType.Auto,))
    settings, sizes = request.settings, SIZES[request.model]
    H, K = sizes["num_heads"], sizes["width"] // sizes["num_heads"]
    rngs = nnx.Rngs(0)
    bias = BIASES[settings.bias]().build(H, K, rngs)
    config = DapeConfig(settings.kernel_width, settings.channels)
    graphdef, params = nnx.split((bias, config.build(H, has_bias=bias is not None, dtype=jnp.bfloat16, rngs=rngs)))

    def shape(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def forward(params, q_BTHK, k_BSHK, v_BSHK):
        bias, processor = nnx.merge(graphdef, params)
        pos_T = jnp.arange(request.length)
        return DRIVERS[request.implementation](q_BTHK, k_BSHK, v_BSHK, pos_T, pos_T, ScoreMod(bias, processor))

    def backward(params, q_BTHK, k_BSHK, v_BSHK, dout_BTHK):
        out_BTHK, pullback = jax.vjp(forward, params, q_BTHK, k_BSHK, v_BSHK)
        return out_BTHK, pullback(dout_BTHK)

    params = jax.tree.map(lambda x: shape(x.shape, x.dtype), params)
    arrays = [shape((settings.batch, request.length, H, K), jnp.bfloat16)] * (3 + (request.direction == "backward"))
    started = time.monotonic()
    with jax.set_mesh(mesh):
        try:
            step = {"forward": forward, "backward": backward}[request.direction]
            compiled = jax.jit(step).lower(params, *arrays).compile()
        except jax.errors.JaxRuntimeError as error:
            return {"fits": False, "reason": why_not(str(error))}
        except NotImplementedError as error:
            return {"fits": False, "reason": str(error)}
        seconds = time.monotonic() - started
        tilings = tpu.tilings(arrays[0], arrays[1], config, dtype=jnp.dtype(jnp.bfloat16), row_stride=1, window=None)
    passes = tilings[: 1 + DIRECTIONS.index(request.direction)]
    stats = compiled.memory_analysis()
    assert stats is not None
    try:
        work = read_work(compiled.as_text() or "")
    except jax.errors.JaxRuntimeError:  # of some programs for v5p and v6e the compiler cannot read its own text
        work = None
    moved = None if work is None else work.hbm_bytes
    if request.implementation == "naive":
        moved = (compiled.cost_analysis() or {}).get("bytes accessed")
    return {
        "fits": True,
        "temporary_mib": stats.temp_size_in_bytes / MIB,
        "peak_mib": stats.peak_memory_in_bytes / MIB,
        "hbm_bytes": moved,
        "operand_gb": None if work is None else work.hbm_bytes / 1e9,
        "cycles": None if work is None else work.cycles,
        "compile_s": seconds,
        "kernels": [of_kernel(t, settings.batch) for t in passes] if request.implementation == "fused" else [],
    }


def of_kernel(t: tpu.Tiling, batch: int) -> dict[str, Any]:
    """What one pass of the kernel does: bytes, FLOPs, and how often its parts run."""
    cost = tpu.cost(t, batch, jnp.dtype(jnp.bfloat16).itemsize)
    return {
        "name": "dape_backward" if t.backward else "dape_forward",
        "bytes": cost.bytes_accessed,
        "flops": cost.flops,
        "block": t.block,
        "steps": batch * tpu.num_steps(t),  # pairs of a block of rows and a window of columns
        "turns": t.block // tpu.GROUP // t.unroll,  # of the loop over groups, in a step
        "runs": batch * (t.num_tiles if t.backward else t.num_blocks),  # of the outer loop
    }


@dataclasses.dataclass(frozen=True)
class Region:
    """A run of bundles between two labels of the compiler's listing."""

    label: str
    num_bundles: int
    has_matmul: bool


def read_regions(listing: str) -> list[Region]:
    """Cut a listing of bundles at its labels: LB begins the body of a loop, PF what a condition jumps over."""
    regions: list[Region] = []
    label, start, address, has_matmul = "entry", 0, 0, False
    for line in listing.splitlines():
        found = re.match(r"^\s*(0x[0-9a-f]+|0)\s*([A-Z]{2})?\s*:(.*)$", line)
        if not found:
            continue
        address = int(found[1], 16)
        if found[2]:
            regions.append(Region(label, address - start, has_matmul))
            label, start, has_matmul = found[2], address, False
        has_matmul = has_matmul or "vmatmul" in found[3]
    return [*regions, Region(label, address + 1 - start, has_matmul)]


def bundles(regions: list[Region], steps: int, turns: int, runs: int) -> int:
    """Bundles that a kernel issues.

    Of two loops over groups the first is that of the first window of columns, which only some steps are; all count as
    the second. What else multiplies matrices is in every step; the rest counts once for every run of the outer loop.
    """
    loops = [region.num_bundles for region in regions if region.label == "LB" and region.has_matmul]
    of_step = sum(region.num_bundles for region in regions if region.label != "LB" and region.has_matmul)
    rest = sum(region.num_bundles for region in regions if not region.has_matmul)
    return steps * (turns * loops[-1] + of_step) + runs * rest


def schedule_ms(folder: Path, kernel: dict[str, Any], topology: str) -> float | None:
    """Milliseconds of a pass by the compiler's listing in a folder; None if there is none."""
    listings = [file for file in folder.glob("*-final_bundles.txt") if kernel["name"] in file.name]
    listings = [file for file in listings if "schedule-analysis" not in file.name]
    if not listings:
        return None
    chip = topology.partition(":")[0]
    count = bundles(
        read_regions(listings[0].read_text(errors="replace")), kernel["steps"], kernel["turns"], kernel["runs"]
    )
    return 1e3 * count / CLOCK_HZ[chip] / CORES[chip]


def measure(request: Request, libtpu: Path) -> dict[str, Any]:
    """One line: what the compiler says, and what follows from it."""
    chip = read_topology(request.topology).chip
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{wanted} --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
        outcome = in_process(compile_layer, request, libtpu)
        row = {"topology": request.topology, "model": request.model, "length": request.length}
        row |= {"direction": request.direction, "driver": request.implementation} | outcome
        if not outcome["fits"]:
            return row
        times = [schedule_ms(Path(folder), kernel, request.topology) for kernel in outcome["kernels"]]
    chip_hz = CLOCK_HZ[chip.name]
    schedule = None
    if not outcome["kernels"]:
        schedule = 1e3 * outcome["cycles"] / chip_hz if outcome["cycles"] else None
    elif None not in times:
        schedule = sum(filter(None, times))
    return row | {
        "moved_gb": moved_gb(outcome),
        "bandwidth_ms": 1e12 * moved_gb(outcome) / chip.hbm_bytes_per_second,
        "schedule_ms": schedule,
        "schedule_of_passes_ms": times,
    }


def moved_gb(outcome: dict[str, Any]) -> float:
    """Of the whole program; where its text cannot be read, of the kernel alone."""
    return (outcome["hbm_bytes"] or sum(kernel["bytes"] for kernel in outcome["kernels"])) / 1e9


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table, its header first."""
    header = ["slice", "model", "length", "direction", "", "temp MiB", "GB", "bandwidth ms", "schedule ms", "compile s"]

    def line(row: dict[str, Any]) -> list[str]:
        first = [row["topology"], row["model"], f"{row['length']:,}", row["direction"], row["driver"]]
        if not row["fits"]:
            return [*first, "does not fit", "", "", "", ""]
        schedule = row["schedule_ms"]
        return [
            *first,
            f"{row['temporary_mib']:,.1f}",
            f"{row['moved_gb']:.3f}",
            f"{row['bandwidth_ms']:.2f}",
            "-" if schedule is None else f"{schedule:.2f}",
            f"{row['compile_s']:.0f}",
        ]

    return [header, *map(line, rows)]


def plot(rows: list[dict[str, Any]]) -> Figure:
    """Draw memory and time against length, forward and backward together."""
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    memory, times = figure.subplots(1, 2)
    lines: dict[tuple[str, ...], list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        if row["fits"] and row["direction"] == "backward":
            lines[row["topology"].partition(":")[0], row["model"], row["driver"]].append(row)
    for name, points in lines.items():
        points = sorted(points, key=lambda row: row["length"])
        lengths = [row["length"] for row in points]
        memory.plot(lengths, [row["temporary_mib"] for row in points], marker="o", label=" ".join(name))
        field = "schedule_ms" if all(row["schedule_ms"] for row in points) else "bandwidth_ms"
        style = "-" if field == "schedule_ms" else "--"
        times.plot(lengths, [row[field] for row in points], style, marker="o", label=f"{' '.join(name)}, {field[:-3]}")
    memory.set_ylabel("temporary memory (MiB)")
    times.set_ylabel("estimated time (ms)")
    ticks = sorted({row["length"] for row in rows})
    for axes in (memory, times):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [str(length) for length in ticks], rotation=30)
        axes.set_xlabel("sequence length (tokens)")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=7)
    figure.suptitle("one layer, forward and backward, compiled ahead of time", fontsize=10)
    return figure


def main(_: list[str]) -> None:
    """Flags, compilations, then what is left behind."""
    settings = from_flags(Settings)
    libtpu, directory = find_libtpu(), Path(settings.output)
    report.make_directory(directory)
    asked = itertools.product(
        settings.topologies, settings.models, settings.lengths, settings.directions, settings.implementations
    )
    rows = []
    with tqdm(list(asked), unit="program", desc="tpu") as bar:
        for names in bar:
            bar.set_postfix_str(" ".join(map(str, names)))
            rows.append(measure(Request(*names, settings), libtpu))
    content = {"rows": rows, "libtpu": libtpu_version(libtpu)}
    caption = f"One layer, DAPE 1x{settings.kernel_width}, bias {settings.bias}, bfloat16, compiled ahead of time."
    print("\n" + report.save("tpu", directory, content, caption, cells(rows), plot(rows)).table)


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
