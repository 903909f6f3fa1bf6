"""Measure the TPU kernels without a TPU: compile one layer ahead of time for each row of a table.

    make tpu-aot
    python -m benchmarks.tpu --topologies=v5e:2x2 --lengths=2048,4096,8192,16384,32768

One layer is q, k, v -> out without projections, in bfloat16, by default with Kerple and DAPE 1x3, and one sequence. The
command prints a table and writes OUTPUT/tpu.json. Columns:

    direction     forward, or backward: forward and all gradients in one program
    temp MiB      temporary memory of the compiled program, without inputs and outputs
    GB            HBM traffic: blocks copied by the kernel's pipeline (`kernels.tpu.cost`), operands and results of all
                  other operations, with trip counts of loops
    bandwidth ms  time of this traffic at the chip's bandwidth
    kernels ms    kernels: instruction bundles, one per cycle, with trip counts of loops
    other ms      all other operations: the compiler's estimate of cycles, with trip counts of loops
    compile s     seconds of compilation

The last two times omit most of the time spent waiting for memory. `blockwise` runs on a TPU without a kernel. `naive`
is `Dense`, compiled by XLA. `splash` is JAX's splash attention, for `--processors=plain --bias=nope`. If a program does
not fit, the JSON has the reason. GB of `naive` are the compiler's count (`cost_analysis`), which is correct without
loops; `operand_gb` in the JSON is counted as for the others.

Bundles are read from the compiler's listing of its last pass, requested by undocumented flags. Clock rates (GHz) are
not published by the vendor: v4 1.05, v5e 1.5, v5p 1.75, v6e 1.64. v4 and v5p have two cores, which share the sequences:
one sequence takes twice the given time.
"""

import dataclasses
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from benchmarks.hlo import compile_program
from benchmarks.layer import BIASES, DIRECTIONS, Layer, layer_of
from benchmarks.measure import check_names, check_positive, write
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import InputError
from dape_jax.hardware import MIB, read_topology
from dape_jax.kernels import tpu
from dape_jax.kernels.tables import convolution_sizes
from dape_jax.model.attention import Auto
from dape_jax.model.processors import DapeConfig, Plain, PlainConfig
from dape_jax.model.transformer import SIZES
from dape_jax.planning.compile import compile_error, find_libtpu, in_process, libtpu_version, slice_devices
from dape_jax.provenance import make_results_directory

PROCESSORS = {"dape": DapeConfig(kernel_width=3, channels=32), "plain": PlainConfig()}
SPLASH_BLOCK = 512  # rows and keys of a grid step


def splash(q_BTHK, k_BSHK, v_BSHK, bias, processor):
    """Compute causal attention with JAX's splash attention."""
    if bias is not None or not isinstance(processor, Plain):
        raise InputError("--implementations: splash has neither bias nor processor")
    length, heads = q_BTHK.shape[1:3]
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = splash_attention_kernel.BlockSizes(**dict.fromkeys(names, SPLASH_BLOCK), use_fused_bwd_kernel=True)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    attend = splash_attention_kernel.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    q_BHTK, k_BHSK, v_BHSK = (jnp.moveaxis(x, 1, 2) for x in (q_BTHK, k_BSHK, v_BSHK))
    heads_first: Any = jax.vmap(attend)
    return jnp.moveaxis(heads_first(q_BHTK * q_BHTK.shape[-1] ** -0.5, k_BHSK, v_BHSK), 2, 1)


IMPLEMENTATIONS: dict[str, Any] = {
    "fused": "fused",
    "blockwise": Auto().blockwise("tpu"),
    "naive": "dense",
    "splash": splash,
}
CLOCK_HZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.64e9}
CORES = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1}
# Undocumented: the compiler writes a listing of its last pass for each operation.
DUMP_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags."""

    topologies: tuple[str, ...] = flag(("v5e:2x2",), "Slices to compile for; one chip of each is used.")
    lengths: tuple[int, ...] = flag((2048, 8192), "Sequence lengths in tokens.")
    models: tuple[str, ...] = flag(("125m",), f"Model sizes that give H and K: {', '.join(SIZES)}.")
    directions: tuple[str, ...] = flag(DIRECTIONS, f"Programs to compile: {', '.join(DIRECTIONS)}.")
    processors: tuple[str, ...] = flag(("dape",), f"Processors: {', '.join(PROCESSORS)}.")
    implementations: tuple[str, ...] = flag(("fused",), f"Implementations: {', '.join(IMPLEMENTATIONS)}.")
    bias: str = flag("kerple", "Position bias.")
    output: str = flag("results/tpu", "Directory of the JSON.")

    def __post_init__(self):
        check_names("models", self.models, SIZES)
        check_names("directions", self.directions, DIRECTIONS)
        check_names("processors", self.processors, PROCESSORS)
        check_names("implementations", self.implementations, IMPLEMENTATIONS)
        check_names("bias", (self.bias,), BIASES)
        check_positive(self, "lengths")
        for topology in self.topologies:
            read_topology(topology)


@dataclasses.dataclass(frozen=True)
class Request:
    """One row of the table."""

    topology: str
    model: str
    direction: str
    implementation: str
    layer: Layer


def requests_of(settings: Settings) -> list[Request]:
    """Return a request for every combination of the settings."""
    sizes = (settings.topologies, settings.models, settings.lengths)
    requests = []
    for topology, model, length, direction, processor, implementation in itertools.product(
        *sizes, settings.directions, settings.processors, settings.implementations
    ):
        layer = layer_of(model, length=length, bias=settings.bias, processor=PROCESSORS[processor])
        requests.append(Request(topology, model, direction, implementation, layer))
    return requests


def compile_layer(request: Request) -> dict[str, Any]:
    """Compile a layer for one chip and return its figures; must run in a separate process, see `in_process`."""
    mesh = Mesh(np.array(slice_devices(read_topology(request.topology))[:1]), ("chip",), axis_types=(AxisType.Auto,))
    layer = request.layer
    function, params = layer.function(request.direction, IMPLEMENTATIONS[request.implementation])

    def shape(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    params = jax.tree.map(lambda x: shape(x.shape, x.dtype), params)
    arrays = [shape(x, jnp.bfloat16) for x in layer.shapes()]
    with jax.set_mesh(mesh):
        try:
            program = compile_program(function, params, *arrays)
        except jax.errors.JaxRuntimeError as error:
            return {"fits": False, "reason": compile_error(error)}
        except NotImplementedError as error:
            return {"fits": False, "reason": str(error)}
        dape = layer.processor if isinstance(layer.processor, DapeConfig) else None
        tilings = tpu.tilings(arrays[0], arrays[1], convolution_sizes(dape), dtype=jnp.dtype(jnp.bfloat16))
    num_passes, kernels = 1 + DIRECTIONS.index(request.direction), []
    if request.implementation == "fused":
        kernels = [describe_kernel(t, layer.batch) for t in tilings[:num_passes]]
    elif request.implementation == "splash":
        heads, blocks = layer.batch * layer.heads, layer.length // SPLASH_BLOCK
        runs = {"steps": heads * blocks * (blocks + 1) // 2, "outer_steps": heads * blocks}
        names = ("splash_mha_fwd", "splash_mha_dkv")[:num_passes]
        kernels = [{"name": name, "bytes": 0, "runs": runs} for name in names]
    work, moved = program.work, program.work.hbm_bytes
    if request.implementation == "naive":
        moved = (program.run.cost_analysis() or {}).get("bytes accessed")
    return {
        "fits": True,
        "temporary_mib": program.memory.temp_size_in_bytes / MIB,
        "peak_mib": program.memory.peak_memory_in_bytes / MIB,
        "hbm_bytes": moved,
        "operand_gb": work.hbm_bytes / 1e9,
        "cycles": work.cycles,
        "compile_s": program.compile_s,
        "kernels": kernels,
    }


def describe_kernel(t: tpu.Tiling, batch: int) -> dict[str, Any]:
    """Return the traffic and FLOPs of one pass, and the number of executions of its parts."""
    cost = tpu.cost(t, batch, jnp.dtype(jnp.bfloat16).itemsize)
    begin, end = t.steps.groups(np)
    in_first_tile = t.steps.key_column == -t.halo[0]
    iterations = end - begin - bool(t.num_channels)  # iterations of the loop over groups
    shares_tables = t.is_single and not t.backward  # prepared by the first sequence of each half of the batch
    tables = {"tables": (end - begin).tolist() * math.gcd(batch, 2)} if shares_tables else {}
    return {
        "name": "dape_backward" if t.backward else "dape_forward",
        "bytes": cost.bytes_accessed,
        "flops": cost.flops,
        "block": t.block_rows,
        "phases": t.phases,
        "runs": {
            "outer_steps": batch * (t.num_tiles if t.backward else t.num_blocks),  # size of the grid's outer axis
            "steps": batch * len(begin),  # steps that compute something
            "first_tile_steps": batch * int(in_first_tile.sum()),
            "groups": batch * int((end - begin).sum()),
            "iterations": batch * int(iterations.sum()),
            "first_tile_iterations": batch * int(iterations[in_first_tile].sum()),
        }
        | tables,
    }


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive bundles of the compiler's listing in the same loops, without a label between them."""

    depth: int  # loops around it; 1 is the loop over grid steps
    num_bundles: int
    computes: bool  # has matmuls or, in a loop over groups, exp


def read_regions(listing: str) -> list[Region]:
    """Split a listing of bundles at labels (PF: target of a forward jump) and at the start and end of loops (>)."""
    regions: list[Region] = []
    start = depth = address = 0
    computes = False
    for line in listing.splitlines():
        found = re.match(r"^\s*(0x[0-9a-f]+|0)\s*([A-Z]{2})?\s*:([\s>]*)(.*)$", line)
        if not found:
            continue
        address = int(found[1], 16)
        if found[2] or found[3].count(">") != depth:
            regions.append(Region(depth, address - start, computes))
            start, depth, computes = address, found[3].count(">"), False
        computes = computes or "vmatmul" in found[4] or (depth > 1 and re.search(r"vpow2|vexp", found[4]) is not None)
    regions.append(Region(depth, address + 1 - start, computes))
    return [region for region in regions if region.num_bundles]


def count_bundles(regions: list[Region], runs: dict[str, Any]) -> int:
    """Return the number of bundles that a kernel issues.

    If there are two loops over groups, the first runs in the first tile and the second in the others; a kernel without
    corrections of the first columns has one loop. With convolutions, regions with matmuls next to a loop are its
    prologue and epilogue. Other regions with matmuls run once per step, and regions without once per outer step. If
    `tables` has the numbers of groups whose tables are prepared, once for all sequences, the longest loop without
    matmuls prepares all groups but the first, and the longest region before it the first.
    """
    others = [region for region in regions if not region.computes]
    once_per_outer_step = runs["outer_steps"] * sum(region.num_bundles for region in others)
    if "tables" in runs:
        loop = max((region for region in others if region.depth > 1), key=lambda region: region.num_bundles)
        before = max(region.num_bundles for region in others[: others.index(loop)])
        once_per_outer_step += before * (len(runs["tables"]) - runs["outer_steps"])
        once_per_outer_step += loop.num_bundles * (sum(runs["tables"]) - len(runs["tables"]) - runs["outer_steps"])
    if "groups" not in runs:  # a kernel without a loop over groups
        return once_per_outer_step + runs["steps"] * sum(region.num_bundles for region in regions if region.computes)
    loops = [i for i, region in enumerate(regions) if region.depth > 1 and region.computes]
    with_matmul = [i for i, region in enumerate(regions) if region.depth == 1 and region.computes]
    around: dict[int, list[int]] = {loop: [] for loop in loops}
    if runs["iterations"] < runs["groups"]:
        around = {
            loop: [max(i for i in with_matmul if i < loop), min(i for i in with_matmul if i > loop)] for loop in loops
        }

    def size(chosen: Iterable[int]) -> int:
        return sum(regions[i].num_bundles for i in chosen)

    other_tiles_steps = runs["steps"] - runs["first_tile_steps"]
    other_tiles_iterations = runs["iterations"] - runs["first_tile_iterations"]
    once_per_step = set(with_matmul) - set(itertools.chain(*around.values()))
    return (
        runs["steps"] * size(once_per_step)
        + runs["first_tile_steps"] * size(around[loops[0]])
        + other_tiles_steps * size(around[loops[-1]])
        + runs["first_tile_iterations"] * size(loops[:1])
        + other_tiles_iterations * size(loops[-1:])
        + once_per_outer_step
    )


def kernel_cycles(folder: Path, kernel: dict[str, Any], chip: str) -> float:
    """Return the cycles of one call of a kernel, according to the compiler's listing in a folder.

    A program's calls of the same kernel share a listing or have equal listings.

    Raises:
        FileNotFoundError: there is no listing of the kernel.
    """
    listings = [file for file in folder.glob("*-final_bundles.txt") if kernel["name"] in file.name]
    listings = [file for file in listings if "schedule-analysis" not in file.name]
    if not listings:
        raise FileNotFoundError(f"{folder}: no listing of {kernel['name']}")
    regions = read_regions(listings[0].read_text(errors="replace"))
    return count_bundles(regions, kernel["runs"]) / CORES[chip]


def measure(request: Request, libtpu: Path) -> dict[str, Any]:
    """Return one row: the compiler's results and the times computed from them."""
    chip = read_topology(request.topology).chip
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = DUMP_FLAGS.format(folder=folder)
        outcome = in_process(compile_layer, request, libtpu)
        processor = "plain" if isinstance(request.layer.processor, PlainConfig) else "dape"
        row = {"topology": request.topology, "model": request.model, "length": request.layer.length}
        row |= {"direction": request.direction, "processor": processor, "implementation": request.implementation}
        row |= outcome
        if not outcome["fits"]:
            return row
        cycles = [kernel_cycles(Path(folder), kernel, chip.name) for kernel in outcome["kernels"]]
    times = [1e3 * each / CLOCK_HZ[chip.name] for each in cycles]
    moved_gb = outcome["hbm_bytes"] / 1e9
    return row | {
        "moved_gb": moved_gb,
        "bandwidth_ms": 1e12 * moved_gb / chip.hbm_bytes_per_second,
        "kernels_ms": sum(times),
        "kernels_of_passes_ms": times,
        "other_ms": 1e3 * outcome["cycles"] / CLOCK_HZ[chip.name],
    }


def main(settings: Settings) -> None:
    """Compile every combination and write the report."""
    libtpu = find_libtpu()
    make_results_directory(Path(settings.output))
    rows = []
    with tqdm(requests_of(settings), unit="program", desc="tpu") as bar:
        for request in bar:
            bar.set_postfix_str(" ".join((request.topology, request.model, request.direction, request.implementation)))
            rows.append(measure(request, libtpu))
    caption = f"One layer, bias {settings.bias}, bfloat16, compiled ahead of time; dape is 1x3."
    labels = {name: name for name in ("topology", "model", "length", "direction", "processor", "implementation")}
    figures = {
        "temp MiB": ("temporary_mib", ",.1f"),
        "GB": ("moved_gb", ".3f"),
        "bandwidth ms": ("bandwidth_ms", ".2f"),
        "kernels ms": (lambda row: row["kernels_ms"] if row["kernels"] else None, ".2f"),
        "other ms": ("other_ms", ".2f"),
        "compile s": ("compile_s", ".0f"),
    }
    write("tpu", settings, caption, rows, labels, figures, libtpu=libtpu_version(libtpu))


if __name__ == "__main__":
    command_line.run(main, Settings)
