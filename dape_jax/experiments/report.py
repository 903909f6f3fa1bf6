"""What finished runs say of the paper's claims: `results/README.md`, `report.json` and a picture of each experiment.

In: the files that `run.py` wrote, and the paper's printed figures. Lengths and sizes are the paper's in claims and ours
in tables; a preset's divisor stands between them. Experiments on the algorithmic tasks have groups and tables of their
own, at the foot.
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

from dape_jax.data.prepare.build import write_json
from dape_jax.errors import InputError, require
from dape_jax.evaluation.report import band, mark_train_lengths, markdown_table
from dape_jax.experiments.catalogue import EXPERIMENTS, PRESETS, Cell, Claim, Experiment, Score, paper_tables
from dape_jax.experiments.run import read_result
from dape_jax.tasks import TASKS

Verdict = Literal["holds", "does not hold", "not tested"]
MIN_SEEDS = 2  # one seed says nothing of the spread

# What a comparison reads: a figure's value for each seed; empty where there is none.
Look = Callable[[Cell | Score], dict[int, float]]

_ABOUT = ("commit", "device", "num_devices", "num_cpus", "versions")
UNITS = {
    "perplexity": "perplexity",
    "delta": "delta perplexity",
    "step_ms": "milliseconds of a training step",
    "accuracy": "accuracy in %",
}


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
class TaskSeries:
    """One method on one task: accuracies in per cent.

    Args:
        method: a key of `METHODS`.
        task: a key of `TASKS`.
        values: seed -> length -> accuracy; the paper prints none.
        within: seed -> mean over the lengths of training; the paper prints none.
        beyond: seed -> mean over the lengths beyond.
    """

    method: str
    task: str
    values: dict[int, dict[int, float]]
    within: dict[int, float]
    beyond: dict[int, float]


@dataclasses.dataclass(frozen=True)
class _Group:
    """All finished runs of an experiment under one preset on one text, or on the tasks.

    Args:
        experiment: a key of `EXPERIMENTS`.
        preset: a key of `PRESETS`.
        data: the name of the text; "" for tasks.
        about: commits, devices, versions and times of the runs.
    """

    experiment: str
    preset: str
    data: str
    about: dict[str, list[Any]]

    @property
    def name(self) -> str:
        """Of its directory, and of its picture."""
        return "-".join(filter(None, (self.preset, self.data)))


@dataclasses.dataclass(frozen=True)
class Group(_Group):
    """Models on a text."""

    series: list[Series]


@dataclasses.dataclass(frozen=True)
class TaskGroup(_Group):
    """Models on the algorithmic tasks."""

    series: list[TaskSeries]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What became of a claim.

    Args:
        claim: its text.
        verdict: "holds" if every comparison holds with every seed, or as many as the claim asks for.
        holding: comparisons that hold with every seed.
        comparisons: all of them.
        weakest: the comparison that decides, with its figures over seeds: of those that have to hold, the one that is
            nearest to failing, or fails by most.
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
    compared, total = [], len(claim.comparisons)
    for less in claim.comparisons:
        low, high = (look(side) if isinstance(side, Cell | Score) else side for side in (less.low, less.high))
        seeds = sorted(set.intersection(*(set(side) for side in (low, high) if isinstance(side, dict))))
        if len(seeds) < min_seeds:
            return Judgement(claim.text, "not tested", 0, total, "")
        lows = [low[seed] if isinstance(low, dict) else low for seed in seeds]
        highs = [high[seed] if isinstance(high, dict) else high for seed in seeds]
        margins = [(less.factor * b - a) / (max(abs(a), abs(b)) or 1) for a, b in zip(lows, highs, strict=True)]
        margins = [-math.inf if math.isnan(margin) else margin for margin in margins]  # no number, nothing shown
        factor = "" if less.factor == 1 else f"{less.factor:.2f} x "
        text = f"{_side(less.low, lows, divisor)} < {factor}{_side(less.high, highs, divisor)}"
        failing = [str(seed) for seed, margin in zip(seeds, margins, strict=True) if margin <= 0]
        compared.append((min(margins), f"{text}, but not with seed {' and '.join(failing)}" if failing else text))
    if not total:
        return Judgement(claim.text, "not tested", 0, 0, "")
    holding = sum(margin > 0 for margin, _ in compared)
    needed = total if claim.at_least is None else claim.at_least
    _, deciding = sorted(compared, key=lambda item: item[0])[total - needed]
    return Judgement(claim.text, "holds" if holding >= needed else "does not hold", holding, total, deciding)


def _side(side: Cell | Score | float, values: list[float], divisor: int) -> str:
    if isinstance(side, Score):
        methods = side.methods if len(side.methods) < 3 else (f"the best of {len(side.methods)}",)
        return f"{' or '.join(methods)} on {side.task}: {_spread(values)}"
    if isinstance(side, Cell):
        return f"{side.method} T{side.train_length // divisor} at {side.length // divisor}: {_spread(values)}"
    return f"{side:g}"


def _spread(values: list[float]) -> str:
    """Mean and half the range over seeds."""
    mean, half = sum(values) / len(values), (max(values) - min(values)) / 2
    digits = 2 if abs(mean) < 1000 else 0
    return f"{mean:.{digits}f}" if len(values) == 1 else f"{mean:.{digits}f} ± {half:.{digits}f}"


# ---- figures: ours and the paper's


def read(results: Path) -> list[Group | TaskGroup]:
    """The finished runs under a directory, in the catalogue's order.

    Raises:
        InputError: a file there is no run's.
    """
    groups: list[Group | TaskGroup] = []
    for name, experiment in EXPERIMENTS.items():
        for directory in sorted((results / name).glob("*/")):
            preset, _, data = directory.name.partition("-")
            if preset in PRESETS and (data == "") == bool(experiment.tasks):
                values, about = _read_runs(experiment, sorted(directory.glob("*-seed*.json")))
                if not values:
                    continue
                if experiment.tasks:
                    groups.append(_task_group(name, preset, values, about))
                else:
                    groups.append(_text_group(name, preset, data, values, about))
    return groups


# By what a file says of its model: seed -> length -> value.
Values = dict[tuple[Any, ...], dict[int, dict[int, float]]]


def _read_runs(experiment: Experiment, files: list[Path]) -> tuple[Values, dict[str, list[Any]]]:
    """What one directory's runs measured, and what is said about them."""
    fields = ("method", "task") if experiment.tasks else ("method", "paper_size", "paper_train_length")
    order = _order(experiment)
    values: Values = defaultdict(dict)
    settings: dict[tuple[Any, ...], Any] = {}
    digests: dict[str, str] = {}  # of the text, or of each task
    runs = []
    for file in files:
        run = read_result(file)
        try:
            key = tuple(run[field] for field in fields)
            if key not in order:  # the catalogue has it no more
                continue
            values[key][run["seed"]] = _measured(run, experiment.measure)
            # What the seeds of a method have in common, without which their spread would be none over seeds.
            setting = [run["config"][section] for section in ("model", "optimizer", "evaluation")]
            setting.append(run["config"]["train"] | {"seed": 0})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{file}: cannot be read as a run that measures {experiment.measure}: {error!r}"
            ) from error
        same = run["data"] == digests.setdefault(run["task"] if experiment.tasks else "", run["data"])
        same &= setting == settings.setdefault(key, setting)
        require(same, str(file), run["key"], "a run with the text of those beside it, and the config of other seeds")
        runs.append(run)
    about = {field: sorted({json.dumps(run[field]) for run in runs}) for field in _ABOUT}
    about["wall_seconds"] = [run["wall_seconds"] for run in runs]
    if experiment.tasks:
        about["num_steps"] = sorted({run["config"]["train"]["num_steps"] for run in runs})
        about["num_sequences"] = sorted({run["config"]["evaluation"]["num_sequences"] for run in runs})
    return {key: values[key] for key in order if key in values}, about


def _order(experiment: Experiment) -> list[tuple[Any, ...]]:
    """The models of an experiment, in the catalogue's order."""
    if experiment.tasks:
        return [(method, task) for task in experiment.tasks for method in experiment.methods]
    return [(m, s, t) for s in experiment.sizes for t in experiment.train_lengths for m in experiment.methods]


def _text_group(name: str, preset: str, data: str, values: Values, about: dict[str, list[Any]]) -> Group:
    divisor = PRESETS[preset].length_divisor
    of_paper = {
        key: {seed: {length * divisor: value for length, value in of.items()} for seed, of in of_seeds.items()}
        for key, of_seeds in values.items()
    }
    series = [Series(method, size, length, of_seeds) for (method, size, length), of_seeds in of_paper.items()]
    return Group(name, preset, data, about, series)


def _measured(run: dict[str, Any], measure: str) -> dict[int, float]:
    if measure == "step_ms":
        return {run["train_length"]: float(run["step_ms"])}
    if measure == "accuracy":
        return {int(result["length"]): 100 * float(result["accuracy"]) for result in run["lengths"]}
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
    return Group(name, "paper", dataset, {}, series)


def paper_groups(name: str) -> list[Group | TaskGroup]:
    """All that the paper prints of an experiment."""
    if EXPERIMENTS[name].tasks:
        return [paper_task_group(name)]
    return [group for dataset in ("arxiv", "books3") if (group := paper_group(name, dataset)).series]


def looker(group: Group | TaskGroup) -> Look:
    """Read a group's figures one by one."""
    return _score_looker(group) if isinstance(group, TaskGroup) else _cell_looker(group)


def _cell_looker(group: Group) -> Look:
    by_key = {(series.method, series.size, series.train_length): series.values for series in group.series}

    def look(cell: Cell | Score) -> dict[int, float]:
        assert isinstance(cell, Cell)
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
            figure = plot_tasks(group) if isinstance(group, TaskGroup) else plot(group)
            figure.savefig(results / group.experiment / f"{group.name}.png", dpi=120)
        write_json(results / "report.json", _as_json(judged))
        (results / "README.md").write_text(_readme(judged) + "\n")
    except OSError as error:
        raise InputError(f"--results = {str(results)!r}: cannot be written to: {error}") from error
    return results / "README.md"


def _divisor(group: Group | TaskGroup) -> int:
    return PRESETS[group.preset].length_divisor


def _as_json(judged: dict[str, list[tuple[Group | TaskGroup, list[Judgement]]]]) -> dict[str, Any]:
    return {
        name: {
            group.name: {
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
standard library's source; and, for the tasks of table 6, `configs/che.py` with fewer steps. It tests whether a claim
shows at that scale, not the paper's figures.

A claim **holds** if every comparison in it holds with every seed, or as many of them as it says; it is **not tested**
without at least {MIN_SEEDS} seeds of every run that it compares. Figures are the mean over seeds ± half their range.

## Verdicts

| experiment | claim of the paper, with its lengths | verdict | comparisons that hold | the weakest, with our lengths |
| --- | --- | --- | ---: | --- |"""


def _readme(judged: dict[str, list[tuple[Group | TaskGroup, list[Judgement]]]]) -> str:
    lines = [_INTRODUCTION]
    for name, of_experiment in judged.items():
        if not of_experiment:
            for claim in EXPERIMENTS[name].claims:
                lines.append(f"| {name} | {claim.text} | not tested | | no runs |")
        for group, judgements in of_experiment:
            for item in judgements:
                tested = item.verdict != "not tested"
                count = f"{item.holding} of {item.comparisons}" if tested else ""
                where = f"[{name}](#{name}) {_title(group)}"
                lines.append(f"| {where} | {item.claim} | **{item.verdict}** | {count} | {item.weakest} |")
    for name, of_experiment in judged.items():
        if of_experiment:
            lines += ["", f"## {name}", "", f"{EXPERIMENTS[name].title} ({EXPERIMENTS[name].source})."]
        for group, _ in of_experiment:
            lines += ["", _section(group)]
        if of_experiment:
            for paper in paper_groups(name):
                lines += ["", _tables(paper, f"**Paper**{f', {paper.data}' if paper.data else ''}")]
    return "\n".join(lines)


def _title(group: Group | TaskGroup) -> str:
    return ", ".join(filter(None, (group.preset, group.data)))


def _unit(group: Group | TaskGroup) -> str:
    return UNITS[EXPERIMENTS[group.experiment].measure]


def _tables(group: Group | TaskGroup, whose: str) -> str:
    if isinstance(group, TaskGroup):
        return _task_tables(group, whose)
    return markdown_table(f"{whose}: {_unit(group)}{_seeds(group)}", _rows(group))


def _seeds(group: Group | TaskGroup) -> str:
    """Of our runs; the paper's figures have none."""
    seeds = sorted({seed for series in group.series for seed in series.values})
    return f", seeds {', '.join(map(str, seeds))}" if group.about else ""


def _section(group: Group | TaskGroup) -> str:
    minutes = sum(group.about["wall_seconds"]) / 60
    commits, devices, cpus = (
        ", ".join(str(json.loads(value)) for value in group.about[field]) for field in ("commit", "device", "num_cpus")
    )
    versions = "; ".join(
        ", ".join(f"{package} {number}" for package, number in json.loads(item).items())
        for item in group.about["versions"]
    )
    on_text = f" on {group.data}" if group.data else ""
    return (
        f"{_tables(group, f'**Ours**, {group.preset}{on_text}')}\n\n"
        f"![{group.experiment}]({group.experiment}/{group.name}.png)\n\n"
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


def plot(group: Group) -> Figure:
    """Draw a group on a text: a panel for each size and train length, ours above what the paper prints."""
    divisor = _divisor(group)
    rows = [(_title(group), group, divisor)]
    for paper in paper_groups(group.experiment):
        if isinstance(paper, Group) and _is_drawn(paper):
            rows.append((_title(paper), paper, 1))
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
    return figure


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


# ---- the algorithmic tasks


def _task_group(name: str, preset: str, values: Values, about: dict[str, list[Any]]) -> TaskGroup:
    (train_length,) = EXPERIMENTS[name].train_lengths

    def means(of_seeds: dict[int, dict[int, float]], *, beyond: bool) -> dict[int, float]:
        chosen = {
            seed: [value for length, value in of_lengths.items() if (length > train_length) == beyond]
            for seed, of_lengths in of_seeds.items()
        }
        return {seed: math.fsum(accuracies) / len(accuracies) for seed, accuracies in chosen.items() if accuracies}

    series = [
        TaskSeries(method, task, of_seeds, means(of_seeds, beyond=False), means(of_seeds, beyond=True))
        for (method, task), of_seeds in values.items()
    ]
    return TaskGroup(name, preset, "", about, series)


def paper_task_group(name: str) -> TaskGroup:
    """What the paper prints of the tasks, as if it were a run with one seed."""
    table = paper_tables()["table6"]
    printed = {
        (method, row["task"]): float(accuracy)
        for row in table["tasks"]
        for method, accuracy in zip(table["methods"], row["accuracy"], strict=True)
    }
    wanted = [key for key in _order(EXPERIMENTS[name]) if key in printed]
    series = [TaskSeries(method, task, {}, {}, {0: printed[method, task]}) for method, task in wanted]
    return TaskGroup(name, "paper", "", {}, series)


def _score_looker(group: TaskGroup) -> Look:
    by_key = {(series.method, series.task): series.beyond for series in group.series}

    def look(score: Cell | Score) -> dict[int, float]:
        assert isinstance(score, Score)
        of_methods = [by_key.get((method, score.task), {}) for method in score.methods]
        seeds = set.intersection(*map(set, of_methods))  # the best of all, or none
        return {seed: max(of_seeds[seed] for of_seeds in of_methods) for seed in seeds}

    return look


def _task_tables(group: TaskGroup, whose: str) -> str:
    """Means over the lengths beyond training, as in the paper's table; and of ours those within."""
    (train_length,) = EXPERIMENTS[group.experiment].train_lengths
    if not group.about:
        return markdown_table(f"{whose}: {_unit(group)}, mean over lengths 41 to 500", _task_rows(group, beyond=True))
    steps, sequences = (" or ".join(f"{n:,}" for n in group.about[field]) for field in ("num_steps", "num_sequences"))
    trained = f"{steps} steps on lengths 1 to {train_length}, {sequences} sequences of each length{_seeds(group)}"
    lengths = sorted({length for series in group.series for values in series.values.values() for length in values})
    tables = []
    for beyond in (True, False):
        if shown := [str(length) for length in lengths if (length > train_length) == beyond]:
            over = f"mean over {len(shown)} lengths, {shown[0]} to {shown[-1]}"
            tables.append(
                markdown_table(f"{whose}: {_unit(group)}, {over}; {trained}", _task_rows(group, beyond=beyond))
            )
    return "\n\n".join(tables)


def _task_rows(group: TaskGroup, *, beyond: bool) -> list[list[str]]:
    """Header and rows: one for each task, with a column for what a guess reaches and one for each method."""
    means = {(series.method, series.task): series.beyond if beyond else series.within for series in group.series}
    rows = [["task", "level", "guess", *_methods(group)]]
    for task in dict.fromkeys(series.task for series in group.series):
        cells = [_spread(list(of.values())) if (of := means.get((method, task))) else "" for method in _methods(group)]
        rows.append([task, TASKS[task].level, f"{100 * TASKS[task].random_accuracy:.0f}", *cells])
    return rows


def _methods(group: TaskGroup) -> list[str]:
    found = {series.method for series in group.series}
    return [method for method in EXPERIMENTS[group.experiment].methods if method in found]


def plot_tasks(group: TaskGroup) -> Figure:
    """Draw a group on tasks: a panel for each, accuracy against length."""
    tasks, methods = list(dict.fromkeys(series.task for series in group.series)), _methods(group)
    colors = dict(zip(methods, matplotlib.color_sequences["tab10" if len(methods) <= 10 else "tab20"], strict=False))
    across = min(3, len(tasks))
    down = -(-len(tasks) // across)
    figure = Figure(figsize=(4.2 * across + 1.8, 3.4 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(tasks) :]:
        axes.remove()
    lines = {}
    for axes, task in zip(panels, tasks, strict=False):
        for series in (series for series in group.series if series.task == task):
            lengths = sorted({length for values in series.values.values() for length in values})
            over_seeds = [[v[length] for v in series.values.values() if length in v] for length in lengths]
            means = [sum(values) / len(values) for values in over_seeds]
            width, color = 2.2 if series.method.startswith("dape") else 1.2, colors[series.method]
            marker = "o" if len(lengths) <= 40 else None
            (lines[series.method],) = axes.plot(
                lengths, means, marker=marker, markersize=3, linewidth=width, color=color
            )
            band(axes, lengths, [(min(values), max(values)) for values in over_seeds], color)
        guess = 100 * TASKS[task].random_accuracy
        axes.axhline(guess, color="gray", linestyle=":", linewidth=1.5)
        axes.annotate("guess", (0.99, guess - 1), xycoords=("axes fraction", "data"), ha="right", va="top", fontsize=8)
        mark_train_lengths(axes, EXPERIMENTS[group.experiment].train_lengths)
        axes.set_title(f"ours, {_title(group)}: {task}", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(-3, 105)
        axes.set_xlabel("input length (symbols)")
        axes.set_ylabel(_unit(group))
        axes.grid(alpha=0.3)
    figure.legend([lines[method] for method in methods], methods, fontsize=8, loc="outside right center")
    return figure
