"""Time the host's work per training step, for a tiny model with 12 layers.

    python -m benchmarks.dispatch

Writes OUTPUT/dispatch.json, and prints a line for each part of a step of the training loop: reading the next batch,
placing it on the device, and calling the step, which returns before the device has finished. The sum limits the steps
per second on any device.
"""

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.data.batches import train_batches
from dape_jax.data.store import DataConfig
from dape_jax.files import write_json
from dape_jax.model.attention import Dense
from dape_jax.model.transformer import TransformerConfig, model_structure
from dape_jax.provenance import make_results_directory, provenance
from dape_jax.sharding import MeshConfig, make_mesh, put_batch
from dape_jax.training.optimizer import OptimizerConfig, make_optimizer
from dape_jax.training.source import load_corpus
from dape_jax.training.step import init_state, make_train_step, shardings_of

PARTS = ("next batch", "place batch", "call step")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of this program."""

    steps: int = flag(300, "Number of timed steps, after 20 steps of warm-up.")
    output: str = flag("results/dispatch", "Directory of the JSON.")


def main(settings: Settings) -> None:
    """Time the parts of each step, and write their medians."""
    output = make_results_directory(Path(settings.output))
    model = TransformerConfig(num_layers=12, width=32, num_heads=4, vocab_size=257, attention=Dense(), dtype="float32")
    config = OptimizerConfig(1e-3, 0.1, 0.1, 0.9, 0.95, 1e-8, 0.1, 1.0)
    optimizer, mesh = make_optimizer(config, 1000), make_mesh(MeshConfig(1, -1, 1, 1))
    graphdef, _ = model_structure(model)
    state = init_state(model, optimizer, 0, mesh)
    step = make_train_step(graphdef, optimizer, shardings_of(state))
    milliseconds: dict[str, list[float]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory() as directory, jax.set_mesh(mesh):
        text = Path(directory) / "text"
        text.mkdir()
        for number in range(20):
            (text / f"{number}.txt").write_text(f"{number} scores of queries and keys " * 200)
        data = DataConfig(path=str(text), tokenizer="bytes", cache_dir=directory, validation_fraction=0.3, seed=0)
        batches = train_batches(
            load_corpus(data).train, train_length=16, global_batch_size=8, seed=0, shard_index=0, num_shards=1
        )
        for number in range(20 + settings.steps):
            # Wait for the previous step, because the call below could block on the device's queue.
            jax.block_until_ready(state)
            times = [time.perf_counter()]
            rows = next(batches)
            times.append(time.perf_counter())
            batch = put_batch(rows, mesh)
            times.append(time.perf_counter())
            state, _ = step(state, batch)
            times.append(time.perf_counter())
            if number >= 20:
                for part, seconds in zip(PARTS, np.diff(times), strict=True):
                    milliseconds[part].append(1000 * seconds)
    medians = {part: round(statistics.median(times), 3) for part, times in milliseconds.items()}
    medians["sum"] = round(sum(medians.values()), 3)
    leaves = len(jax.tree.leaves(state))
    for part, median in medians.items():
        print(f"{part:12s} {median:8.3f} ms")
    content = {"median_ms": medians, "steps": settings.steps, "num_layers": 12, "num_arrays": leaves}
    write_json(output / "dispatch.json", content | provenance("flax", "optax"))
    print(f"{leaves} arrays in the state; written to {output / 'dispatch.json'}")


if __name__ == "__main__":
    command_line.run(main, Settings)
