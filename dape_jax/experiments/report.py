"""What finished runs say of the paper's claims: `results/README.md`, `report.json` and a picture of each experiment.

In: the files that `run.py` wrote, and the paper's printed figures. Lengths and sizes are the paper's in claims and ours
in tables; a preset's divisor stands between them.
"""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dape_jax.data.build import write_json
from dape_jax.errors import InputError, require
from dape_jax.evaluation.report import band, markdown_table
from dape_jax.experiments.catalogue import EXPERIMENTS, PRESETS, Cell, Claim, Experiment, paper_tables
from dape_jax.experiments.run import read_run

Verdict = Literal["holds", "does not hold", "not tested"]
MIN_SEEDS = 2  # one seed says nothing of the spread

# What a comparison reads: a cell's value for each seed; empty where there is none.
Look = Callable[[Cell], dict[int, float]]

_ABOUT = ("commit", "device", "num_devices", "num_cpus", "versions")
UNITS = {"perplexity": "perplexity", "delta": "delta perplexity", "step_ms": "milliseconds of a training step"}


@dataclasses.dataclass(frozen=True)
class Series:
    """One method, trained at one length: its value at every length for every seed.

    Args:
        method: a key of `METHODS`.
        size: the paper's.
        train_length: the paper's.
        values: seed -> the paper's length -> value.
    """

    method: str
    size: str
    train_length: int
    values: dict[int, dict[int, float]]

    def over_seeds(self, length: int) -> list[float]:
        """The values at a length."""
        return [values[length] for values in self.values.values() if length in values]


@dataclasses.dataclass(frozen=True)
class Group:
    """All finished runs of an experiment under one preset on one text."""

    experiment: str
    preset: str
    data: str
    series: list[Series]
    about: dict[str, list[Any]]  # commits, devices, versions and times of the runs


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What became of a claim.

    Args:
        claim: its text.
        verdict: "holds" if every comparison holds with every seed.
        holding: comparisons that hold with every seed.
        comparisons: all of them.
        weakest: the comparison that is nearest to failing, or fails by most, with its figures over seeds.
    """

    claim: str
    verdict: Verdict
    holding: int
    comparisons: int
    weakest: str


def judge(claim: Claim, look: Look, divisor: int = 1, min_seeds: int = MIN_SEEDS) -> Judgement:
    """Decide a claim from figures.

    A comparison is of the same seed on both sides, and holds if it does so with every seed. A claim is not tested
    unless all of its comparisons have figures from `min_seeds` seeds.

    Args:
        claim: what is compared.
        look: where the figures are.
        divisor: of the lengths, for messages.
        min_seeds: seeds that are needed.
    """
    holding, weakest = 0, (math.inf, "")
    for less in claim.comparisons:
        low, high = (look(side) if isinstance(side, Cell) else side for side in (less.low, less.high))
        seeds = set.intersection(*(set(side) for side in (low, high) if isinstance(side, dict)))
        if len(seeds) < min_seeds:
            return Judgement(claim.text, "not tested", 0, len(claim.comparisons), "")
        lows = [low[seed] if isinstance(low, dict) else low for seed in sorted(seeds)]
        highs = [high[seed] if isinstance(high, dict) else high for seed in sorted(seeds)]
        margins = [(less.factor * b - a) / (max(abs(a), abs(b)) or 1) for a, b in zip(lows, highs, strict=True)]
        margins = [-math.inf if math.isnan(margin) else margin for margin in margins]  # no number, nothing shown
        holding += min(margins) > 0
        if min(margins) < weakest[0]:
            factor = "" if less.factor == 1 else f"{less.factor:.2f} x "
            text = f"{_side(less.low, lows, divisor)} < {factor}{_side(less.high, highs, divisor)}"
            failing = [str(seed) for seed, margin in zip(sorted(seeds), margins, strict=True) if margin <= 0]
            weakest = (min(margins), f"{text}, but not with seed {' and '.join(failing)}" if failing else text)
    total = len(claim.comparisons)
    if not total:
        return Judgement(claim.text, "not tested", 0, 0, "")
    return Judgement(claim.text, "holds" if holding == total else "does not hold", holding, total, weakest[1])


def _side(side: Cell | float, values: list[float], divisor: int) -> str:
    if isinstance(side, Cell):
        return f"{side.method} T{side.train_length // divisor} at {side.length // divisor}: {_spread(values)}"
    return f"{side:g}"


def _spread(values: list[float]) -> str:
    """Mean and half the range over seeds."""
    mean, half = sum(values) / len(values), (max(values) - min(values)) / 2
    digits = 2 if abs(mean) < 1000 else 0
    return f"{mean:.{digits}f}" if len(values) == 1 else f"{mean:.{digits}f} ± {half:.{digits}f}"


# ---- figures: ours and the paper's


def read(results: Path) -> list[Group]:
    """The finished runs under a directory, in the catalogue's order.

    Raises:
        InputError: a file there is no run's.
    """
    groups = []
    for name, experiment in EXPERIMENTS.items():
        for directory in sorted((results / name).glob("*-*/")):
            preset, _, data = directory.name.partition("-")
            if preset in PRESETS:
                group = _group(name, preset, data, experiment, sorted(directory.glob("*-seed*.json")))
                groups += [group] if group.series else []
    return groups


def _group(name: str, preset: str, data: str, experiment: Experiment, files: list[Path]) -> Group:
    divisor = PRESETS[preset].length_divisor
    order = [(m, s, t) for s in experiment.sizes for t in experiment.train_lengths for m in experiment.methods]
    values: dict[tuple[str, str, int], dict[int, dict[int, float]]] = defaultdict(dict)
    settings: dict[tuple[str, str, int], Any] = {}
    runs = []
    for file in files:
        run = read_run(file)
        key = (run["method"], run["paper_size"], run["paper_train_length"])
        if key not in order:  # the catalogue has it no more
            continue
        runs.append(run)
        try:
            measured = _measured(run, experiment.measure)
            values[key][run["seed"]] = {length * divisor: value for length, value in measured.items()}
            # What the seeds of a method have in common, without which their spread would be none over seeds.
            setting = [run["config"][section] for section in ("model", "optimizer", "evaluation")]
            setting.append(run["config"]["train"] | {"seed": 0})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{file}: cannot be read as a run that measures {experiment.measure}: {error!r}"
            ) from error
        same = run["data"] == runs[0]["data"] and setting == settings.setdefault(key, setting)
        require(same, str(file), run["key"], "a run with the text of those beside it, and the config of other seeds")
    about = {field: sorted({json.dumps(run[field]) for run in runs}) for field in _ABOUT}
    about["wall_seconds"] = [run["wall_seconds"] for run in runs]
    return Group(name, preset, data, [Series(*key, values[key]) for key in order if key in values], about)


def _measured(run: dict[str, Any], measure: str) -> dict[int, float]:
    if measure == "step_ms":
        return {run["train_length"]: float(run["step_ms"])}
    results, field = (run["deltas"], "delta") if measure == "delta" else (run["lengths"], "perplexity")
    return {int(result["length"]): float(result[field]) for result in results}


def paper_group(name: str, dataset: str) -> Group:
    """What the paper prints of an experiment on one of its datasets, as if it were a run with one seed."""
    experiment = EXPERIMENTS[name]
    batch = PRESETS["paper"].batch
    assert batch is not None
    found: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    for curve in paper_tables()["curves"]:
        # Where the paper keeps the tokens of a step, only a train length of 128 has the batch of everything else.
        usual = batch * curve["train_length"]
        step_tokens = curve["step_tokens"] if "step_tokens" in curve else usual
        if (curve["metric"], curve["dataset"]) == (experiment.measure, dataset):
            if step_tokens == (experiment.step_tokens or usual):
                key = (curve["method"], curve["size"], curve["train_length"])
                found[key] |= {int(length): value for length, value in curve["values"].items()}
    wanted = [
        (method, size, train_length)
        for size in experiment.sizes
        for train_length in experiment.train_lengths
        for method in experiment.methods
        if not experiment.overrides and (method, train_length) not in experiment.skipped
    ]
    series = [Series(*key, {0: found[key]}) for key in wanted if key in found]
    return Group(name, "paper", dataset, series, {})


def looker(group: Group) -> Look:
    """Read a group's figures cell by cell."""
    by_key = {(series.method, series.size, series.train_length): series.values for series in group.series}

    def look(cell: Cell) -> dict[int, float]:
        values = by_key.get((cell.method, cell.size, cell.train_length), {})
        return {seed: lengths[cell.length] for seed, lengths in values.items() if cell.length in lengths}

    return look


# ---- what is written


def write(results: Path) -> Path:
    """Write the report on all finished runs, and return its README.md.

    Raises:
        InputError: nothing to report, or nowhere to write.
    """
    groups = read(results)
    require(
        bool(groups), "--results", str(results), "a directory with finished runs (python -m dape_jax.experiments run)"
    )
    judged = {
        name: [
            (group, [judge(claim, looker(group), _divisor(group)) for claim in experiment.claims])
            for group in groups
            if group.experiment == name
        ]
        for name, experiment in EXPERIMENTS.items()
    }
    try:
        for group in groups:
            plot(group, results / group.experiment / f"{group.preset}-{group.data}.png")
        write_json(results / "report.json", _as_json(judged))
        (results / "README.md").write_text(_readme(judged) + "\n")
    except OSError as error:
        raise InputError(f"--results = {str(results)!r}: cannot be written to: {error}") from error
    return results / "README.md"


def _divisor(group: Group) -> int:
    return PRESETS[group.preset].length_divisor


def _as_json(judged: dict[str, list[tuple[Group, list[Judgement]]]]) -> dict[str, Any]:
    return {
        name: {
            f"{group.preset}-{group.data}": {
                "claims": [dataclasses.asdict(judgement) for judgement in judgements],
                "series": [dataclasses.asdict(series) for series in group.series],
                "about": group.about,
            }
            for group, judgements in of_experiment
        }
        for name, of_experiment in judged.items()
    }


_INTRODUCTION = f"""# The paper's experiments, and what they show here

Written by `python -m dape_jax.experiments report` from the runs beside it; `report.json` has the same figures. `small`
is `configs/small.py`: every length of the paper divided by four, models of 0.4 M parameters and more, bytes of the
standard library's source. It tests whether a claim shows at that scale, not the paper's figures.

A claim **holds** if every comparison in it holds with every seed; it is **not tested** without at least {MIN_SEEDS}
seeds of every run that it compares. Figures are the mean over seeds ± half their range.

## Verdicts

| experiment | claim of the paper, with its lengths | verdict | comparisons that hold | the weakest, with our lengths |
| --- | --- | --- | ---: | --- |"""


def _readme(judged: dict[str, list[tuple[Group, list[Judgement]]]]) -> str:
    lines = [_INTRODUCTION]
    for name, of_experiment in judged.items():
        if not of_experiment:
            why = EXPERIMENTS[name].missing or "no runs"
            for claim in EXPERIMENTS[name].claims:
                lines.append(f"| {name} | {claim.text} | not tested | | {why} |")
        for group, judgements in of_experiment:
            for item in judgements:
                tested = item.verdict != "not tested"
                count = f"{item.holding} of {item.comparisons}" if tested else ""
                where = f"[{name}](#{name}) {group.preset}, {group.data}"
                lines.append(f"| {where} | {item.claim} | **{item.verdict}** | {count} | {item.weakest} |")
    for name, of_experiment in judged.items():
        if of_experiment:
            lines += ["", f"## {name}", "", f"{EXPERIMENTS[name].title} ({EXPERIMENTS[name].source})."]
        for group, _ in of_experiment:
            lines += ["", _section(group)]
        if of_experiment:
            for dataset in ("arxiv", "books3"):
                if (paper := paper_group(name, dataset)).series:
                    lines += ["", markdown_table(f"**Paper**, {dataset}: {_unit(paper)}", _rows(paper))]
    return "\n".join(lines)


def _unit(group: Group) -> str:
    return UNITS[EXPERIMENTS[group.experiment].measure]


def _section(group: Group) -> str:
    seeds = sorted({seed for series in group.series for seed in series.values})
    minutes = sum(group.about["wall_seconds"]) / 60
    commits, devices, cpus = (
        ", ".join(str(json.loads(value)) for value in group.about[field]) for field in ("commit", "device", "num_cpus")
    )
    versions = "; ".join(
        ", ".join(f"{package} {number}" for package, number in json.loads(item).items())
        for item in group.about["versions"]
    )
    caption = f"**Ours**, {group.preset} on {group.data}: {_unit(group)}, seeds {', '.join(map(str, seeds))}"
    return (
        f"{markdown_table(caption, _rows(group))}\n\n"
        f"![{group.experiment}]({group.experiment}/{group.preset}-{group.data}.png)\n\n"
        f"`python -m dape_jax.experiments run {group.experiment} --preset={group.preset}`; commit {commits}; "
        f"{devices}, {cpus} CPUs; {versions}; {minutes:.0f} minutes in all."
    )


def _rows(group: Group) -> list[list[str]]:
    """Header and rows: one for each method and train length, with a column for each length."""
    divisor = 1 if not group.about else _divisor(group)
    lengths = sorted({length for s in group.series for values in s.values.values() for length in values})
    sizes = {series.size for series in group.series}
    rows = [["method", *(["size"] if len(sizes) > 1 else []), "trained at", *(str(n // divisor) for n in lengths)]]
    for series in group.series:
        names = [series.method, *([series.size] if len(sizes) > 1 else []), str(series.train_length // divisor)]
        cells = [_spread(values) if (values := series.over_seeds(length)) else "" for length in lengths]
        rows.append(names + cells)
    return rows


def plot(group: Group, file: Path) -> None:
    """Draw a group: a panel for each size and train length, ours above what the paper prints."""
    divisor = _divisor(group)
    papers = [(dataset, paper_group(group.experiment, dataset)) for dataset in ("arxiv", "books3")]
    rows = [(f"{group.preset}, {group.data}", group, divisor)]
    rows += [(f"paper, {dataset}", paper, 1) for dataset, paper in papers if _is_drawn(paper)]
    panels = list(dict.fromkeys((series.size, series.train_length) for series in group.series))
    merged = EXPERIMENTS[group.experiment].step_tokens is not None  # train lengths are what is compared
    if merged:
        panels = [(size, 0) for size in dict.fromkeys(size for size, _ in panels)]
    figure = Figure(figsize=(5.4 * len(panels) + 1.2, 3.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(panels), squeeze=False)
    methods = list(dict.fromkeys((s.method, s.train_length if merged else 0) for s in group.series))
    palette = matplotlib.color_sequences["tab10" if len(methods) <= 10 else "tab20"]
    colors = dict(zip(methods, palette, strict=False))
    for row, (title, shown, scale) in enumerate(rows):
        for column, (size, train_length) in enumerate(panels):
            _panel(axes[row][column], shown, scale, size, train_length, colors)
            trained = "" if merged else f", trained at {train_length // scale}"
            shown_size = PRESETS[shown.preset].sizes[size]
            axes[row][column].set_title(f"{title}: {shown_size}{trained}", fontsize=9)
    if EXPERIMENTS[group.experiment].measure != "step_ms":  # whose bars have their names beside them
        lines = {line.get_label(): line for panel in axes[0] for line in panel.get_lines()}
        axes[0][-1].legend(handles=lines.values(), fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(file, dpi=120)


def _is_drawn(paper: Group) -> bool:
    return any(len(values) > 1 for series in paper.series for values in series.values.values())


def _panel(
    axes: Axes, group: Group, divisor: int, size: str, train_length: int, colors: dict[tuple[str, int], Any]
) -> None:
    shown = [s for s in group.series if s.size == size and train_length in (0, s.train_length)]
    values_drawn = []
    if EXPERIMENTS[group.experiment].measure == "step_ms":
        means = [(s.method, sum(v := s.over_seeds(s.train_length)) / len(v)) for s in shown]
        axes.barh([name for name, _ in means], [value for _, value in means])
        axes.set_xlabel(_unit(group))
        return
    for series in shown:
        key = (series.method, series.train_length if train_length == 0 else 0)
        label = series.method if train_length else f"{series.method}, trained at {series.train_length // divisor}"
        lengths = sorted({length for values in series.values.values() for length in values})
        over_seeds = [series.over_seeds(length) for length in lengths]
        means = [sum(values) / len(values) for values in over_seeds]
        ours = [length // divisor for length in lengths]
        width = 2.2 if series.method.startswith("dape") else 1.2
        axes.plot(ours, means, marker="o", markersize=3, linewidth=width, label=label, color=colors[key])
        band(axes, ours, [(min(values), max(values)) for values in over_seeds], colors[key])
        values_drawn += means
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    if values_drawn and min(values_drawn) > 0 and max(values_drawn) > 4 * min(values_drawn):
        axes.set_yscale("log")
        for which in ("major", "minor"):
            getattr(axes.yaxis, f"set_{which}_formatter")("{x:g}")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel(_unit(group))
    axes.grid(alpha=0.3)
