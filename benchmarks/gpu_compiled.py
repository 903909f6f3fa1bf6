"""Compile one attention layer for a GPU that is not present: launches, memory, traffic, registers.

    pip install 'jax[cuda13]==0.10.2'
    python -m benchmarks.gpu_compiled --lengths=512,2048,8192 --batches=1,8

One layer is q, k, v -> out without projections, with the heads of the 125M model, in bfloat16, by default with Kerple
and DAPE 1x3. Needs JAX's plugin for CUDA, but no GPU: the chip is an H200, described by `TARGET`. The command writes
OUTPUT/gpu_compiled.json and prints a table. Columns:

    launches      kernels of one run, with trip counts of loops
    temp MiB      temporary memory of the compiled program, without inputs and outputs
    GB            operands and results of all operations, with trip counts of loops; some stay in the L2 cache
    registers     registers of a thread in the kernels of `kernels/gpu.py` (forward / parameters' gradient / scores'
                  gradient), the maximum of all blocks; 255 is the limit
    spills        bytes per thread that did not fit in registers
    compile s     seconds of compilation

Without a GPU nothing can be tuned: matmuls are Triton kernels with default sizes. Registers are reported by `ptxas` for
the PTX written by XLA; JAX 0.11 no longer writes it, so they are missing there.
"""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from benchmarks.gpu_cases import MAIN, VARIANTS, Layer
from benchmarks.hlo import compile_program
from benchmarks.measure import Row, check_names, check_positive, failure, table, write
from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.errors import require
from dape_jax.hardware import MIB
from dape_jax.provenance import make_results_directory

DIRECTIONS = ("forward", "backward")
IMPLEMENTATIONS = MAIN | VARIANTS
# XLA's description of an H200 (GpuTargetConfigProto).
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a" name: "NVIDIA H200 141GB HBM3e"
  device_address_bits: 64 driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""
DEVICE_KIND = "NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    lengths: tuple[int, ...] = flag((2048,), "Sequence lengths in tokens.")
    batches: tuple[int, ...] = flag((1,), "Batch sizes.")
    implementations: tuple[str, ...] = flag(("fused",), f"Implementations: {', '.join(IMPLEMENTATIONS)}.")
    directions: tuple[str, ...] = flag(DIRECTIONS, f"Directions: {', '.join(DIRECTIONS)}.")
    output: str = flag("results/gpu_compiled", "Directory of the JSON.")

    def __post_init__(self):
        check_positive(self, "lengths", "batches")
        check_names("implementations", self.implementations, IMPLEMENTATIONS)
        check_names("directions", self.directions, DIRECTIONS)


def find_ptxas() -> str:
    """Return the path of the assembler installed with JAX's CUDA plugin.

    Raises:
        InputError: the plugin is not installed.
    """
    found = [file for base in sys.path for file in Path(base or ".").glob("nvidia/*/bin/ptxas")]
    require(bool(found), "jax", jax.__version__, "needs the plugin for CUDA: pip install 'jax[cuda13]==0.10.2'")
    return str(found[0])


def read_kernels(folder: Path, ptxas: str) -> dict[str, dict[str, int]]:
    """Return registers and spilled bytes of this project's kernels by name, the maximum over their copies."""
    kernels: dict[str, dict[str, int]] = {}
    for path in folder.glob("*.ptx"):
        text = path.read_text(errors="replace")
        if "dape_" not in text:
            continue
        target = re.search(r"\.target (\w+)", text)
        command = [ptxas, "-v", f"-arch={target[1] if target else 'sm_90a'}", str(path), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for part in re.split(r"Compiling entry function", said)[1:]:
            name = re.search(r"'(dape_\w+?_kernel)", part)
            if name:
                figures = {"registers": r"Used (\d+) registers", "spilled_bytes": r"(\d+) bytes spill stores"}
                for figure, pattern in figures.items():
                    of_kernel = kernels.setdefault(name[1].removeprefix("dape_").removesuffix("_kernel"), {})
                    of_kernel[figure] = max(of_kernel.get(figure, 0), int(re.findall(pattern, part)[0]))
        path.unlink()
    return dict(sorted(kernels.items()))


def compile_layer(name: str, length: int, batch: int, direction: str, folder: Path, ptxas: str) -> dict[str, Any]:
    """Return one row: figures of a compiled layer."""
    topology = topologies.get_topology_desc("", platform="cuda", target_config=TARGET, topology="1x1x1")
    sharding = NamedSharding(Mesh(np.array(topology.devices), ("chip",)), PartitionSpec())
    variant = IMPLEMENTATIONS[name]
    variant.set_constants()
    layer: Layer = dataclasses.replace(variant.layer, length=length, batch=batch)
    function, params = layer.function(variant.implementation, direction, "bfloat16")

    def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shape = jnp.zeros((batch, length, layer.heads, layer.head_dim), jnp.bfloat16)
    arrays = [abstract(shape)] * 4
    row = {"implementation": name, "length": length, "batch": batch, "direction": direction, "failed": None}
    device = AbstractDevice(DEVICE_KIND, None, "gpu")
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            program = compile_program(function, jax.tree.map(abstract, params), *arrays)
    except Exception as error:  # of any kind: continue with the other layers
        return row | {"failed": failure(error)}
    return row | {
        "launches": program.work.launches,
        "temporary_mib": program.memory.temp_size_in_bytes / MIB,
        "gbyte": program.work.hbm_bytes / 1e9,
        "matmul_gflop": program.work.matmul_flops / 1e9,
        "compile_s": program.compile_s,
        "kernels": read_kernels(folder, ptxas),
    }


def cells(rows: list[Row]) -> list[list[str]]:
    """Return the rows of the table, header first."""

    def of_kernels(row: Row, figure: str) -> str:
        return " / ".join(str(kernel[figure]) for kernel in row["kernels"].values())

    figures = {"launches": ("launches", ","), "temp MiB": ("temporary_mib", ",.1f"), "GB": ("gbyte", ".3f")}
    figures |= {
        "registers": (lambda row: of_kernels(row, "registers"), ""),
        "spills": (lambda row: of_kernels(row, "spilled_bytes"), ""),
        "compile s": ("compile_s", ".0f"),
    }
    labels = {"": "implementation", "length": "length", "batch": "batch", "direction": "direction"}
    return table(rows, labels, figures)


def main(_: list[str]) -> None:
    """Parse flags, compile every combination and write the report."""
    settings = from_flags(Settings)
    ptxas = find_ptxas()
    make_results_directory(Path(settings.output))
    cases = itertools.product(settings.implementations, settings.lengths, settings.batches, settings.directions)
    rows = []
    with tempfile.TemporaryDirectory() as folder, tqdm(list(cases), unit="program", desc="gpu") as bar:
        jax.config.update("jax_platforms", "cpu")  # nothing runs
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_gpu_autotune_level=0"
        for case in bar:
            bar.set_postfix_str(" ".join(map(str, case)))
            rows.append(compile_layer(*case, Path(folder), ptxas))
    for row in rows:
        if row["failed"]:
            print(f"{row['implementation']} {row['length']} {row['direction']}: {row['failed']}", file=sys.stderr)
    caption = "One layer, Kerple with DAPE 1x3 (cudnn: neither), bfloat16, compiled for an H200 without one."
    write("gpu_compiled", settings, rows, caption, cells(rows))


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
