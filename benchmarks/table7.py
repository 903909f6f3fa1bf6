"""Measure the paper's table 7, time of a training step by method and model, or compute it by roofline for another chip.

    python -m benchmarks.table7                              # on the local devices
    python -m benchmarks.table7 --preset=small               # models that two CPU cores can train
    python -m benchmarks.table7 --chip=h200                  # by roofline; nothing runs

The paper's methods are RoPE, T5's bias, ALiBi, Kerple, FIRE, DAPE-Kerple and DAPE1x3-Kerple at 350M, 2.7B and 6.7B, one
sequence of 512 tokens, 32 channels, on hardware that it does not name. Output: a table, JSON and a figure in OUTPUT,
with the name of the platform or the chip. They contain the time of each method, its ratio to that of DAPE1x3-Kerple,
and the paper's values of both.

The measured step is that of `step.py`, on all devices: the minimum over `--turns` of the mean of `--steps`, methods in
turns. A model that does not fit has a dash.

By roofline, the time of a step is a sum over its sequential parts; the time of a part is the maximum of FLOPs over the
chip's peak and bytes over its bandwidth. FLOPs are the executed ones (`flops.executed_flops`). Bytes, for N parameters,
L layers and each pass (one forward, two backward, one more if layers are recomputed, one more for the scores of a
block):

    weights      2 N per pass                                                  cast to bfloat16, read once
    optimizer    36 N                   parameters and moments read and written, gradients written once and read twice
    dense        2 L P [ B (4 H + 2 H) + 4 H ]                          every array between two products is written once
      with DAPE  2 L P [ B (4 H + 2 H + 2 C + 4 H) + 4 H + 4 C ]        and read once: scores, probabilities, hidden
    blockwise    the same                                               features, processed scores; bias, its features
    fused        2 L B H K [ 2 T + T (T + R) / R ]                      q and out once, k and v once for R = 128 rows
      DAPE, GPU  2 L P B (2 H + 4 H + 2 H)                              scores, processed scores and probabilities

P is the number of computed pairs of a query and a key (`flops.pairs_computed`), in all passes of a layer; float32 has 4
bytes, bfloat16 2. The cost of the bias itself, for example FIRE's MLP, is not counted, so biases whose times differ in
the paper are equal by roofline. Caches, in which a block of `blockwise` may fit, are ignored. The time is therefore
neither a prediction nor a bound: it shows the bottleneck.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from benchmarks.attention import choose
from benchmarks.measure import Row, check_names, check_positive, table, write
from benchmarks.step import read_config, time_steps
from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.config import RunConfig
from dape_jax.errors import InputError, require
from dape_jax.hardware import CHIPS, Chip
from dape_jax.model.attention import IMPLEMENTATIONS, Blockwise, Fused
from dape_jax.model.biases import NopeConfig
from dape_jax.model.flops import executed_flops, pairs_computed
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import TransformerConfig, attention_of, model_structure, parameter_counts
from dape_jax.provenance import make_results_directory
from dape_jax.sharding import device_platform, make_mesh
from experiments.catalogue import EXPERIMENTS
from experiments.methods import PRESETS, paper_tables

TABLE = EXPERIMENTS["table7"]
RATIO_TO = "dape1x3-kerple"
KERNEL_ROWS = 128  # query rows per read of keys and values in a fused kernel
CHIP_OF_NAME = {chip.name: chip for chip in CHIPS}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    chip: str = flag("", f"Compute by roofline for this chip, one of {', '.join(CHIP_OF_NAME)}; measure if not given.")
    preset: str = flag("paper", f"Recipe of the models: {', '.join(PRESETS)}.")
    models: tuple[str, ...] = flag(TABLE.sizes, f"The paper's models: {', '.join(TABLE.sizes)}.")
    implementation: str = flag("auto", f"Implementation of attention: {', '.join(IMPLEMENTATIONS)}.")
    turns: int = flag(3, "Turns of each method; each starts with an untimed step.")
    steps: int = flag(5, "Timed steps in a turn.")
    output: str = flag("results/table7", "Directory of the JSON.")

    def __post_init__(self):
        check_positive(self, "turns", "steps")
        known = ("", *CHIP_OF_NAME)
        require(self.chip in known, "--chip", self.chip, f"must be one of {known[1:]}, or empty")
        check_names("preset", (self.preset,), PRESETS)
        check_names("models", self.models, TABLE.sizes)
        check_names("implementation", (self.implementation,), IMPLEMENTATIONS)


def runs_of(settings: Settings, model: str) -> dict[str, RunConfig]:
    """Return the run of every method for a model."""
    (length,) = TABLE.train_lengths
    length //= PRESETS[settings.preset].length_divisor
    batch = TABLE.step_batch or 1
    return {
        method: read_config(settings.preset, model, method, length, batch, settings.implementation)
        for method in TABLE.methods
    }


def paper_ms() -> dict[tuple[str, str], float]:
    """Return the paper's milliseconds, by model and method."""
    curves = [curve for curve in paper_tables()["curves"] if curve["source"] == "table 7"]
    return {(curve["size"], curve["method"]): ms for curve in curves for ms in curve["values"].values()}


def on_chip(run: RunConfig, chip: Chip) -> TransformerConfig:
    """Return a run's model for a chip: in bfloat16, with the chip's implementation of attention."""
    platform = "tpu" if chip.is_tpu else "gpu"
    model = dataclasses.replace(run.model, dtype="bfloat16")
    return dataclasses.replace(
        model, attention=attention_of(model, run.train.train_length, platform, chip.device_kinds[0])
    )


def roofline_seconds(model: TransformerConfig, length: int, batch: int, chip: Chip) -> dict[str, float]:
    """Return the minimum time of a step on a chip by part; see the module's docstring."""
    H, K, L = model.num_heads, model.head_dim, model.num_layers
    has_bias, recomputed = not isinstance(model.bias, NopeConfig), model.remat != "none"
    channels = model.processor.channels if isinstance(model.processor, DapeConfig) else 0
    pairs = pairs_computed(model.attention, length, model.window)
    if isinstance(model.attention, Fused):
        bytes_of_pass = 2 * pairs * batch * (2 * H + 4 * H + 2 * H)
        if chip.is_tpu or not channels:
            bytes_of_pass = 2 * batch * H * K * (2 * length + length * (length + KERNEL_ROWS) // KERNEL_ROWS)
    elif channels:
        bytes_of_pass = 2 * pairs * (batch * (4 * H + 2 * H + 2 * channels + 4 * H) + has_bias * (4 * H + 4 * channels))
    else:
        bytes_of_pass = 2 * pairs * (batch * (4 * H + 2 * H) + has_bias * 4 * H)
    flops = executed_flops(model, length, batch)
    num_params = parameter_counts(model_structure(model)[1])["total"]

    def seconds(flops: int, num_bytes: int) -> float:
        return max(flops / chip.peak_flops, num_bytes / chip.hbm_bytes_per_second)

    passes = 3 + recomputed + isinstance(model.attention, Blockwise | Fused)
    return {
        "weights": seconds(flops.projections + flops.mlp + flops.unembedding, 2 * num_params * (3 + recomputed)),
        "attention": seconds(flops.attention + flops.processor, L * passes * bytes_of_pass),
        "optimizer": seconds(0, 36 * num_params),
    }


def estimated(runs: dict[str, RunConfig], chip: Chip) -> dict[str, dict[str, Any]]:
    """Return milliseconds by `roofline_seconds` for every method."""
    found: dict[str, dict[str, Any]] = {}
    for method, run in runs.items():
        found[method] = {"failed": None, "min_ms": None}
        try:
            model = on_chip(run, chip)
        except InputError as error:  # the fused kernel was requested, but does not support this method
            found[method] |= {"attention": type(run.model.attention).__name__.lower(), "failed": str(error)}
            continue
        seconds = roofline_seconds(model, run.train.train_length, run.train.batch_size, chip)
        found[method] |= {"attention": type(model.attention).__name__.lower(), "min_ms": 1e3 * sum(seconds.values())}
        found[method] |= {"parts_ms": {part: 1e3 * each for part, each in seconds.items()}}
    return found


def with_ratios(model: str, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a model: our times and the paper's, each with its ratio."""
    paper, base = paper_ms(), found[RATIO_TO]["min_ms"]
    rows = []
    for method, each in found.items():
        their_ms, our_ms = paper[model, method], each["min_ms"]
        ratios = {"ratio": our_ms / base if our_ms and base else None, "paper_ratio": their_ms / paper[model, RATIO_TO]}
        rows.append({"model": model, "method": method, "paper_ms": their_ms} | ratios | each)
    return rows


def cells(rows: list[Row]) -> list[list[str]]:
    """Return the rows of the table, header first, one per model and method."""
    figures = {"ms": ("min_ms", ".2f"), "ratio": ("ratio", ".4f")}
    figures |= {"ms (paper)": ("paper_ms", ".2f"), "ratio (paper)": ("paper_ratio", ".4f")}
    shown = [row | {"failed": None} for row in rows]  # a model that does not fit still has the paper's figures
    return table(shown, {"model": "model", "": "method", "attention": "attention"}, figures)


def run(settings: Settings) -> None:
    """Measure or compute all times, and write the output."""
    make_results_directory(Path(settings.output))
    runs = {model: runs_of(settings, model) for model in settings.models}
    rows: list[dict[str, Any]] = []
    if settings.chip:
        chip = CHIP_OF_NAME[settings.chip]
        for model in settings.models:
            rows += with_ratios(model, estimated(runs[model], chip))
        how = f"BY ROOFLINE for {chip.name} ({chip.source}): by formula, without caches; nothing was run"
    else:
        choose((settings.implementation,))
        for each in (each for by_method in runs.values() for each in by_method.values()):
            each.check_mesh(make_mesh(each.mesh))
        total = len(runs) * len(TABLE.methods) * settings.turns * settings.steps
        with tqdm(total=total, unit="step", desc="table 7") as bar:
            for model in settings.models:
                found = time_steps(runs[model], settings.turns, settings.steps, bar)
                attention = {"attention": settings.implementation}
                rows += with_ratios(model, {method: attention | each for method, each in found.items()})
        how = f"measured on {jax.device_count()} x {jax.devices()[0].device_kind}"
    (first, *_others) = runs[settings.models[0]].values()
    sizes = "" if settings.preset == "paper" else f" (preset {settings.preset})"
    what = f"one sequence of {first.train.train_length} tokens{sizes}, attention {settings.implementation}"
    caption = f"Table 7, milliseconds of a training step, {what}; {how}. Ratio: to {RATIO_TO}."
    content: Row = {"by_roofline": bool(settings.chip)}
    content |= {"chip": dataclasses.asdict(CHIP_OF_NAME[settings.chip])} if settings.chip else {}
    stem = "-".join([settings.chip or device_platform(), *([] if settings.preset == "paper" else [settings.preset])])
    write(stem, settings, rows, caption, cells(rows), **content)


def main(_: list[str]) -> None:
    """Parse flags and run."""
    settings: Settings = from_flags(Settings)
    if settings.chip:
        jax.config.update("jax_platforms", "cpu")  # nothing runs
    run(settings)


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
