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
import math
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import Row, check_names, check_positive, table, write
from benchmarks.step import read_config, train
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.provenance import make_results_directory

DTYPES = ("float32", "bfloat16", "float16")
WINDOW = 25
BAND_NATS = 0.05
METHOD = "dape1x3-kerple"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    steps: int = flag(300, "Training steps.")
    length: int = flag(512, "Train length in tokens.")
    batch: int = flag(2, "Sequences in a step.")
    dtypes: tuple[str, ...] = flag(DTYPES, f"Dtypes, the first for comparison: {', '.join(DTYPES)}.")
    output: str = flag("results/precision_training", "Directory of the JSON.")

    def __post_init__(self):
        require(self.steps >= WINDOW, "--steps", self.steps, f"must be at least {WINDOW}")
        check_positive(self, "length", "batch")
        check_names("dtypes", self.dtypes, DTYPES)


def smooth(losses: list[float]) -> np.ndarray:
    """Return the mean over each `WINDOW` consecutive steps."""
    return np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid")


def measure(settings: Settings, directory: Path) -> list[Row]:
    """Return one row for each dtype."""
    rows: list[Row] = []
    for dtype in settings.dtypes:
        fields = {"model.dtype": dtype, "train.num_steps": settings.steps, "data.cache_dir": str(directory / "cache")}
        run = read_config("small", "125m", METHOD, settings.length, settings.batch, "auto", **fields)
        lines = train(run, directory / dtype)
        losses = [float(line["train/loss_nats"]) for line in lines]
        scales = [line["train/loss_scale"] for line in lines if "train/loss_scale" in line]
        rows.append(
            {"dtype": dtype, "losses": losses, "loss_scales": scales, "skipped": int(lines[-1]["train/skipped"])}
        )
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


def main(settings: Settings) -> None:
    """Train, write the report, and fail if a run differs by more than `BAND_NATS`."""
    make_results_directory(Path(settings.output))
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(settings, Path(directory))
    caption = f"{METHOD}, {settings.length} tokens, {settings.steps} steps; mean loss of {WINDOW} steps, nats."
    write("precision_training", settings, rows, caption, cells(rows), band_nats=BAND_NATS)
    if wrong := [row["dtype"] for row in rows if not row["apart"] <= BAND_NATS or not math.isfinite(row["loss"])]:
        raise AssertionError(f"further than {BAND_NATS} nats from {rows[0]['dtype']}: {wrong}")


if __name__ == "__main__":
    command_line.run(main, Settings)
