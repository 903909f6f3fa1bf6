"""The paper's table 7, time of a training step by method and model: measured here, or by roofline for another chip.

    python -m benchmarks.table7                              # on the device that is here
    python -m benchmarks.table7 --preset=small               # models that two CPU cores train
    python -m benchmarks.table7 --chip=h200                  # by roofline; nothing runs

The paper's are RoPE, T5's bias, ALiBi, Kerple, FIRE, DAPE-Kerple and DAPE1x3-Kerple at 350M, 2.7B and 6.7B, one
sequence of 512 tokens, 32 channels, on hardware that it does not name. Written are a table, JSON and a picture, in
OUTPUT under the name of the platform or the chip. A method has its time, and that over the time of DAPE1x3-Kerple;
beside them stand the paper's of both.

Measured is the step of `step.py`, on all devices: the least of `--turns` times `--steps`, methods in turns. A model
that does not fit has a dash.

By roofline a step takes the sum, over what has to wait for each other, of the larger of FLOPs over the chip's peak and
bytes over its bandwidth. FLOPs are those executed (`flops.executed_flops`). Bytes, for N parameters, L layers
and each pass (one forward, two backward, one more where a layer is recomputed, one more for the scores of a block):

    weights      2 N a pass                                                    cast to bfloat16, read once
    optimizer    36 N                   parameters and moments read and written, gradients written once and read twice
    dense        2 L P [ B (4 H + 2 H) + 4 H ]                          every array between two products is written once
      with DAPE  2 L P [ B (4 H + 2 H + 2 C + 4 H) + 4 H + 4 C ]        and read once: scores, probabilities, hidden
    blockwise    the same                                               features, processed scores; bias, its features
    fused, TPU   2 L B H K [ 2 T + T (T + R) / R ]                      q and out once, k and v once for R = 128 rows
      GPU        2 L P B (2 H + 4 H + 2 H)                              scores, processed scores and probabilities

P are the pairs of a query and a key that are computed (`flops.pairs_computed`), in all of a layer's passes; float32 is
4 bytes, bfloat16 2. What a bias itself costs, FIRE's network for one, is not counted, and so biases that differ in the
paper are alike by roofline. Nor is it that a block of `blockwise` may stay in a chip's caches. So a time is no
prediction, and no bound: it says what binds.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks.attention import choose
from benchmarks.step import check_names, read_config, time_steps
from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.config import RunConfig
from dape_jax.errors import InputError, require
from dape_jax.evaluation import report
from dape_jax.experiments.catalogue import EXPERIMENTS, PRESETS, paper_tables
from dape_jax.model.attention import IMPLEMENTATIONS, Blockwise, Fused
from dape_jax.model.biases import NopeConfig
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import TransformerConfig, attention_of, model_structure, parameter_counts
from dape_jax.planning.flops import CHIPS, Chip, executed_flops, pairs_computed
from dape_jax.sharding import device_platform, make_mesh

TABLE = EXPERIMENTS["table7"]
RATIO_TO = "dape1x3-kerple"
KERNEL_ROWS = 128  # of queries, for which a kernel reads keys and values once
CHIP_NAMES = tuple(chip.name for chip in CHIPS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags, checked."""

    chip: str = flag("", f"By roofline for this chip, one of {', '.join(CHIP_NAMES)}; measured if not given.")
    preset: str = flag("paper", f"Recipe of the models: {', '.join(PRESETS)}.")
    models: tuple[str, ...] = flag(TABLE.sizes, f"The paper's models: {', '.join(TABLE.sizes)}.")
    implementation: str = flag("auto", f"Of attention: {', '.join(IMPLEMENTATIONS)}.")
    turns: int = flag(3, "Turns of each method, a step to warm up in every one.")
    steps: int = flag(5, "Timed steps of a turn.")
    output: str = flag("results/table7", "Directory of the table, the JSON and the picture.")

    def __post_init__(self):
        for name in ("turns", "steps"):
            require(getattr(self, name) > 0, f"--{name}", getattr(self, name), "1 or more")
        require(self.chip in ("", *CHIP_NAMES), "--chip", self.chip, f"one of {CHIP_NAMES}, or nothing to measure")
        require(self.preset in PRESETS, "--preset", self.preset, f"one of {tuple(PRESETS)}")
        check_names("models", self.models, TABLE.sizes)
        allowed = tuple(IMPLEMENTATIONS)
        require(self.implementation in allowed, "--implementation", self.implementation, f"one of {allowed}")


def runs_of(settings: Settings, model: str) -> dict[str, RunConfig]:
    """The run of every method at a model."""
    (length,) = TABLE.train_lengths
    length //= PRESETS[settings.preset].length_divisor
    batch = TABLE.step_batch or 1
    return {
        method: read_config(settings.preset, model, method, length, batch, settings.implementation)
        for method in TABLE.methods
    }


def paper_ms() -> dict[tuple[str, str], float]:
    """The paper's milliseconds, by model and method."""
    curves = [curve for curve in paper_tables()["curves"] if curve["source"] == "table 7"]
    return {(curve["size"], curve["method"]): ms for curve in curves for ms in curve["values"].values()}


def on_chip(run: RunConfig, chip: Chip) -> TransformerConfig:
    """A run's model as it would be on a chip: in bfloat16, and with the attention that suits it."""
    platform = "tpu" if chip.device_kinds[0].startswith("TPU") else "gpu"
    model = dataclasses.replace(run.model, dtype="bfloat16")
    return dataclasses.replace(
        model, attention=attention_of(model, run.train.train_length, platform, chip.device_kinds[0])
    )


def roofline_seconds(model: TransformerConfig, length: int, batch: int, chip: Chip) -> dict[str, float]:
    """Least time of a step on a chip, by part, as the head of this file says."""
    H, K, L = model.num_heads, model.head_dim, model.num_layers
    has_bias, again = not isinstance(model.bias, NopeConfig), model.remat != "none"
    channels = model.processor.channels if isinstance(model.processor, DapeConfig) else 0
    pairs = pairs_computed(model.attention, length, model.window)
    if isinstance(model.attention, Fused):
        of_pass = 2 * pairs * batch * (2 * H + 4 * H + 2 * H)
        if chip.device_kinds[0].startswith("TPU"):
            of_pass = 2 * batch * H * K * (2 * length + length * (length + KERNEL_ROWS) // KERNEL_ROWS)
    elif channels:
        of_pass = 2 * pairs * (batch * (4 * H + 2 * H + 2 * channels + 4 * H) + has_bias * (4 * H + 4 * channels))
    else:
        of_pass = 2 * pairs * (batch * (4 * H + 2 * H) + has_bias * 4 * H)
    flops = executed_flops(model, length, batch)
    num_params = parameter_counts(model_structure(model)[1])["total"]

    def seconds(flops: int, num_bytes: int) -> float:
        return max(flops / chip.peak_flops, num_bytes / chip.hbm_bytes_per_second)

    passes = 3 + again + isinstance(model.attention, Blockwise | Fused)
    return {
        "weights": seconds(flops.projections + flops.mlp + flops.unembedding, 2 * num_params * (3 + again)),
        "attention": seconds(flops.attention + flops.processor, L * passes * of_pass),
        "optimizer": seconds(0, 36 * num_params),
    }


def estimated(runs: dict[str, RunConfig], chip: Chip) -> dict[str, dict[str, Any]]:
    """`roofline_seconds` of every method, as milliseconds."""
    found: dict[str, dict[str, Any]] = {}
    for method, run in runs.items():
        found[method] = {"failed": None, "min_ms": None}
        try:
            model = on_chip(run, chip)
        except InputError as error:  # a kernel was asked for, and there is none for this method
            found[method] |= {"attention": type(run.model.attention).__name__.lower(), "failed": str(error)}
            continue
        seconds = roofline_seconds(model, run.train.train_length, run.train.batch_size, chip)
        found[method] |= {"attention": type(model.attention).__name__.lower(), "min_ms": 1e3 * sum(seconds.values())}
        found[method] |= {"parts_ms": {part: 1e3 * each for part, each in seconds.items()}}
    return found


def with_ratios(model: str, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a model: what was found, and what the paper has, each with its ratio."""
    paper, base = paper_ms(), found[RATIO_TO]["min_ms"]
    rows = []
    for method, each in found.items():
        of_paper, ms = paper[model, method], each["min_ms"]
        ratios = {"ratio": ms / base if ms and base else None, "paper_ratio": of_paper / paper[model, RATIO_TO]}
        rows.append({"model": model, "method": method, "paper_ms": of_paper} | ratios | each)
    return rows


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table: a line for each model and method."""
    columns = {"min_ms": "ms", "ratio": "ratio", "paper_ms": "ms (paper)", "paper_ratio": "ratio (paper)"}
    lines = [["model", "", "attention", *columns.values()]]
    for row in rows:
        digits = {field: 4 if "ratio" in field else 2 for field in columns}
        lines.append(
            [row["model"], row["method"], row["attention"]]
            + ["-" if row[field] is None else f"{row[field]:.{digits[field]}f}" for field in columns]
        )
    return lines


def plot(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draw each method's time over that of DAPE1x3-Kerple, ours and the paper's, a panel for each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(max(3.4 * len(models), 6.4), 4.0), layout="constrained")
    panels = figure.subplots(1, len(models), sharex=True, sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        shown = [row for row in rows if row["model"] == model]
        places = range(len(shown))
        axes.barh([y - 0.2 for y in places], [row["ratio"] or 0 for row in shown], 0.4, label="ours")
        axes.barh(
            [y + 0.2 for y in places], [row["paper_ratio"] for row in shown], 0.4, label="paper", color="lightgray"
        )
        axes.set_yticks(places, [row["method"] for row in shown])
        axes.set_xlabel(f"time over that of {RATIO_TO}")
        axes.set_title(model)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(title, fontsize=10)
    return figure


def run(settings: Settings) -> None:
    """Measurements or estimates, then what is left behind."""
    directory = Path(settings.output)
    report.make_directory(directory)
    runs = {model: runs_of(settings, model) for model in settings.models}
    chips = {chip.name: chip for chip in CHIPS}
    rows: list[dict[str, Any]] = []
    if settings.chip:
        for model in settings.models:
            rows += with_ratios(model, estimated(runs[model], chips[settings.chip]))
        chip = chips[settings.chip]
        how = f"BY ROOFLINE for {chip.name} ({chip.source}): by formula, if nothing stays in caches; nothing was run"
    else:
        choose((settings.implementation,))
        for each in (each for of_model in runs.values() for each in of_model.values()):
            each.check_mesh(make_mesh(each.mesh))
        total = len(runs) * len(TABLE.methods) * settings.turns * settings.steps
        with tqdm(total=total, unit="step", desc="table 7") as bar:
            for model in settings.models:
                found = time_steps(runs[model], settings.turns, settings.steps, bar)
                about = {"attention": settings.implementation}
                found = {method: about | dataclasses.asdict(timed) for method, timed in found.items()}
                rows += with_ratios(model, found)
        how = f"measured on {jax.device_count()} x {jax.devices()[0].device_kind}"
    (first, *_others) = runs[settings.models[0]].values()
    sizes = "" if settings.preset == "paper" else f" (preset {settings.preset})"
    what = f"one sequence of {first.train.train_length} tokens{sizes}, attention {settings.implementation}"
    caption = f"Table 7, milliseconds of a training step, {what}; {how}. Ratio: over {RATIO_TO}."
    content = {"settings": dataclasses.asdict(settings), "by_roofline": bool(settings.chip), "rows": rows}
    content |= {"chip": dataclasses.asdict(chips[settings.chip])} if settings.chip else {}
    stem = "-".join([settings.chip or device_platform(), *([] if settings.preset == "paper" else [settings.preset])])
    print("\n" + report.save(stem, directory, content, caption, cells(rows), plot(rows, f"{what}\n{how}")).table)
    print(f"\nresults: {directory}")


def main(_: list[str]) -> None:
    """Flags, then one call."""
    settings: Settings = from_flags(Settings)
    if settings.chip:
        jax.config.update("jax_platforms", "cpu")  # nothing runs
    run(settings)


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
