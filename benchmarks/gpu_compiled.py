"""Compile one attention layer for a GPU that is not present: launches, memory, traffic.

    pip install 'jax[cuda13]==0.10.2'
    python -m benchmarks.gpu_compiled --lengths=512,2048,8192 --batches=1,8

One layer is q, k, v -> out without projections, with the heads of the 125M model, in bfloat16, by default with Kerple
and DAPE 1x3. Needs JAX's plugin for CUDA, but no GPU: the chip is an H200, described by `TARGET`. The command writes
OUTPUT/gpu_compiled.json and prints a table. Columns:

    launches      kernels of one run, with trip counts of loops
    temp MiB      temporary memory of the compiled program, without inputs and outputs
    GB            operands and results of all operations, with trip counts of loops; some stay in the L2 cache
    compile s     seconds of compilation

Without a GPU nothing can be tuned: matmuls are Triton kernels with default sizes.
"""

import dataclasses
import itertools
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from benchmarks.gpu import IMPLEMENTATIONS, of_implementation
from benchmarks.hlo import compile_program
from benchmarks.layer import DIRECTIONS, Layer
from benchmarks.measure import Row, check_names, check_positive, failure, table, write
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.hardware import MIB
from dape_jax.provenance import make_results_directory

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


def compile_layer(name: str, length: int, batch: int, direction: str) -> dict[str, Any]:
    """Return one row: figures of a compiled layer."""
    topology = topologies.get_topology_desc("", platform="cuda", target_config=TARGET, topology="1x1x1")
    sharding = NamedSharding(Mesh(np.array(topology.devices), ("chip",)), PartitionSpec())
    layer = of_implementation(Layer(length, batch), name)
    function, params = layer.function(direction, IMPLEMENTATIONS[name])
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in layer.shapes()]
    row = {"implementation": name, "length": length, "batch": batch, "direction": direction, "failed": None}
    device = AbstractDevice(DEVICE_KIND, None, "gpu")
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            program = compile_program(function, params, *arrays)
    except Exception as error:  # of any kind: continue with the other layers
        return row | {"failed": failure(error)}
    return row | {
        "launches": program.work.launches,
        "temporary_mib": program.memory.temp_size_in_bytes / MIB,
        "gbyte": program.work.hbm_bytes / 1e9,
        "compile_s": program.compile_s,
    }


def cells(rows: list[Row]) -> list[list[str]]:
    """Return the rows of the table, header first."""
    labels = {"": "implementation", "length": "length", "batch": "batch", "direction": "direction"}
    figures = {"launches": ("launches", ","), "temp MiB": ("temporary_mib", ",.1f"), "GB": ("gbyte", ".3f")}
    return table(rows, labels, figures | {"compile s": ("compile_s", ".0f")})


def main(settings: Settings) -> None:
    """Compile every combination and write the report."""
    has_plugin = any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    require(has_plugin, "jax", jax.__version__, "needs the plugin for CUDA: pip install 'jax[cuda13]==0.10.2'")
    make_results_directory(Path(settings.output))
    cases = itertools.product(settings.implementations, settings.lengths, settings.batches, settings.directions)
    rows = []
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    with tqdm(list(cases), unit="program", desc="gpu") as bar:
        for case in bar:
            bar.set_postfix_str(" ".join(map(str, case)))
            rows.append(compile_layer(*case))
    for row in rows:
        if row["failed"]:
            print(f"{row['implementation']} {row['length']} {row['direction']}: {row['failed']}", file=sys.stderr)
    caption = "One layer, Kerple with DAPE 1x3 (cudnn: neither), bfloat16, compiled for an H200 without one."
    write("gpu_compiled", settings, rows, caption, cells(rows))


if __name__ == "__main__":
    command_line.run(main, Settings)
