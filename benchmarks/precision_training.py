"""Train a small DAPE model in float32, bfloat16 and float16, and compare the losses.

    python -m benchmarks.precision_training

The model is `xs` of `configs/small.py` with DAPE1x3-Kerple, 512 tokens per sequence, on the standard library's source
as bytes. All runs have the same initial parameters and batches. OUTPUT/precision_training.json has the loss and the
loss scale of every step. The columns of the table:

    loss          mean loss of the last `WINDOW` steps, in nats
    apart         largest difference of the mean over `WINDOW` steps from float32's, in nats
    skipped       steps without an update, because a gradient overflowed (float16)
    loss scale    loss scale of the last step (float16)

The status is 1 if a loss is not finite, or differs from float32's by more than `BAND_NATS`.
"""

import dataclasses
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks.measure import Row, check_names, check_positive, table, write
from benchmarks.step import read_config
from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.config import RunConfig
from dape_jax.errors import require
from dape_jax.model.transformer import model_structure
from dape_jax.provenance import make_results_directory
from dape_jax.sharding import make_mesh, put_batch
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.source import open_source
from dape_jax.training.step import abstract_state, init_state, make_train_step, shardings_of
from experiments.methods import METHODS

DTYPES = ("float32", "bfloat16", "float16")
WINDOW = 25
BAND_NATS = 0.05


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    steps: int = flag(300, "Training steps.")
    length: int = flag(512, "Train length in tokens.")
    batch: int = flag(2, "Sequences in a step.")
    method: str = flag("dape1x3-kerple", f"Method of the model: {', '.join(METHODS)}.")
    dtypes: tuple[str, ...] = flag(DTYPES, f"Dtypes, the first for comparison: {', '.join(DTYPES)}.")
    output: str = flag("results/precision_training", "Directory of the JSON.")

    def __post_init__(self):
        require(self.steps >= WINDOW, "--steps", self.steps, f"must be at least {WINDOW}")
        check_positive(self, "length", "batch")
        check_names("method", (self.method,), METHODS)
        check_names("dtypes", self.dtypes, DTYPES)


def train(run: RunConfig, num_steps: int, bar: tqdm) -> dict[str, Any]:
    """Return the loss and the loss scale of every step, and the number of skipped steps."""
    mesh = make_mesh(run.mesh)
    run.check_mesh(mesh)
    graphdef, _ = model_structure(run.model)
    optimizer = make_optimizer(run.optimizer, num_steps)
    step = make_train_step(graphdef, optimizer, shardings_of(abstract_state(run.model, optimizer, mesh)))
    batches = open_source(run, mesh).batches
    losses, scales = [], []
    with jax.set_mesh(mesh):
        state = init_state(run.model, optimizer, run.train.seed, mesh)
        for batch in itertools.islice(batches, num_steps):
            state, metrics = step(state, put_batch(batch, mesh))
            losses.append(float(metrics["loss_nats"]))
            if state.health.loss_scale is not None:
                scales.append(float(state.health.loss_scale))
            bar.update()
    return {"losses": losses, "loss_scales": scales, "skipped": int(state.health.skipped)}


def smooth(losses: list[float]) -> np.ndarray:
    """Return the mean over each `WINDOW` consecutive steps."""
    return np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid")


def measure(settings: Settings, cache: Path) -> list[dict[str, Any]]:
    """Return one row for each dtype."""
    base = read_config("small", "125m", settings.method, settings.length, settings.batch, "auto")
    base = dataclasses.replace(base, data=dataclasses.replace(base.data, cache_dir=str(cache)))
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(settings.dtypes) * settings.steps, unit="step") as bar:
        for dtype in settings.dtypes:
            bar.set_postfix_str(dtype)
            run = dataclasses.replace(base, model=dataclasses.replace(base.model, dtype=dtype))
            rows.append({"dtype": dtype} | train(run, settings.steps, bar))
    reference = smooth(rows[0]["losses"])
    for row in rows:
        losses = smooth(row["losses"])
        row |= {"loss": float(losses[-1]), "apart": float(np.abs(losses - reference).max())}
    return rows


def cells(rows: list[Row]) -> list[list[str]]:
    """Return the rows of the table, header first."""
    figures = {"loss": ("loss", ".4f"), "apart": ("apart", ".4f"), "skipped": ("skipped", "")}
    figures |= {"loss scale": (lambda row: row["loss_scales"][-1] if row["loss_scales"] else None, ",.0f")}
    return table(rows, {"dtype": "dtype"}, figures)


def main(_: list[str]) -> None:
    """Train, write the report, and fail if a run differs by more than `BAND_NATS`."""
    settings = from_flags(Settings)
    make_results_directory(Path(settings.output))
    with tempfile.TemporaryDirectory() as cache:
        rows = measure(settings, Path(cache))
    caption = f"{settings.method}, {settings.length} tokens, {settings.steps} steps; mean loss of {WINDOW} steps, nats."
    write("precision_training", settings, rows, caption, cells(rows), band_nats=BAND_NATS)
    if wrong := [row["dtype"] for row in rows if not row["apart"] <= BAND_NATS or not math.isfinite(row["loss"])]:
        raise AssertionError(f"further than {BAND_NATS} nats from {rows[0]['dtype']}: {wrong}")


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
