"""Measure the memory of importing checkpoints of real sizes, without their weights.

    python scripts/import_memory.py

Checkpoints with the shapes of published models are written as sparse files of zeros, which take no disk space. Each is
imported by `dape_jax.pretrained.load`, in a separate process, onto eight simulated devices (--mesh=fsdp=8). These
devices use the machine's memory, so the peak includes the parameters, in float32; the rest is the memory of the import
itself, which depends on the largest tensor. The peak is measured before the checkpoint of the run is written (`read`),
and at the end (`whole`). The 8B model has 6 of its 32 layers, because the parameters of all layers would take 32 GB;
its tensors have the published sizes.

The results are written to OUTPUT/import_memory.json.
"""

import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import flags

from dape_jax import command_line
from dape_jax.files import write_json
from dape_jax.pretrained.families import family_of
from dape_jax.provenance import make_results_directory, provenance

ROOT = Path(__file__).resolve().parent.parent

OUTPUT = flags.DEFINE_string("output", "results/pretrained", "Directory of the JSON.")

PYTHIA_2_8B = {
    "model_type": "gpt_neox",
    "num_hidden_layers": 32,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "intermediate_size": 10240,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
}
LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
MODELS = {"pythia-2.8b": (PYTHIA_2_8B, "F16"), "llama-3-8b, 6 of 32 layers": (LLAMA_3_8B, "BF16")}

# Program of the measured process: import a checkpoint, print the peak before the run's checkpoint is written.
IMPORT = """
import resource, sys
from pathlib import Path
from dape_jax.pretrained import load
from dape_jax.sharding import MeshConfig

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

begin, read = peak(), load.read_params
def measured(*args):
    params = read(*args)
    print("read", peak() - begin, flush=True)
    return params
load.read_params = measured
source, workdir = sys.argv[1:]
load.import_run(Path(source), Path(workdir), tokenizer="bytes", mesh=MeshConfig(1, 8, 1, 1))
print("whole", peak() - begin)
"""


def main(_: list[str]) -> None:
    """Import every model; print and write the figures."""
    output = make_results_directory(Path(OUTPUT.value))
    results = []
    for name, (config, dtype) in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            result = {"name": name, "config": config, "dtype": dtype} | measure(config, dtype, Path(directory))
        results.append(result)
        beyond = (result["peak_read_bytes"] - result["parameter_bytes"]) / result["largest_tensor_bytes"]
        print(
            f"{name}: parameters {result['parameter_bytes'] / 1e9:.2f} GB, largest tensor "
            f"{result['largest_tensor_bytes'] / 1e9:.2f} GB, peak {result['peak_read_bytes'] / 1e9:.2f} GB: "
            f"{beyond:.1f} times the largest tensor beyond the parameters; {result['peak_whole_bytes'] / 1e9:.2f} GB "
            "with the checkpoint"
        )
    write_json(output / "import_memory.json", {"models": results} | provenance("safetensors"))


def measure(config: dict[str, Any], dtype: str, directory: Path) -> dict[str, Any]:
    """Return the peaks of one import, in bytes beyond those of the imported packages."""
    shapes = tensor_shapes(config)
    source = directory / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    write_sparse(source / "model.safetensors", shapes, dtype)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-c", IMPORT, str(source), str(directory / "run")]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    peaks = {key: int(value) for key, value in (line.split() for line in done.stdout.splitlines() if " " in line)}
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    return {
        "parameter_bytes": sum(sizes),
        "largest_tensor_bytes": max(sizes),
        "peak_read_bytes": peaks["read"],
        "peak_whole_bytes": peaks["whole"],
    }


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint with this config."""
    shapes = {}
    for path, tensor in family_of(config).tensors.items():
        for layer in range(config["num_hidden_layers"] if path.startswith("layers/") else 1):
            shapes[tensor.name.format(layer=layer)] = tensor.shape
    return shapes


def write_sparse(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Write a sparse safetensors file with zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    os.truncate(file, 8 + len(encoded) + end)


if __name__ == "__main__":
    command_line.run(main)
