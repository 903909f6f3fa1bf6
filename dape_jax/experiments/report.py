"""Compare finished runs with the paper's claims: write `results/README.md`, `report.json` and a figure per experiment.

Input: the files written by `run.py`, and the numbers printed in the paper. Lengths and sizes in claims and in `Series`
are the paper's; tables and figures divide lengths by the preset's divisor.
"""

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dape_jax.errors import InputError, os_errors, require
from dape_jax.evaluation.report import (
    FIXED_BELOW,
    band,
    csv_text,
    drawings,
    drawn,
    json_values,
    mark_train_lengths,
    markdown_table,
    only_drawn,
)
from dape_jax.experiments.catalogue import (
    EXPERIMENTS,
    NOT_IN_PAPER,
    PRESETS,
    Cell,
    Model,
    Score,
    models_of,
    paper_tables,
)
from dape_jax.experiments.run import identity, read_result
from dape_jax.experiments.verdicts import MIN_SEEDS, Judgement, Lookup, Sample, is_log, judge
from dape_jax.files import write_json
from dape_jax.tasks import TASKS

PROVENANCE = ("commit", "device", "num_devices", "num_cpus", "versions")
UNITS = {
    "perplexity": "perplexity",
    "delta": "delta perplexity",
    "step_ms": "milliseconds per training step",
    "accuracy": "accuracy in %",
}


@dataclasses.dataclass(frozen=True)
class Series:
    """Results of one model by seed and length. Accuracies are in per cent.

    Sizes and lengths are the paper's; `size` is "" for a task, `task` is "" for a text. `values` and `samples` are by
    seed and length; claims are judged by the samples. For a task, `within` and `beyond` are, by seed, the means over
    lengths up to the train length, and beyond.
    """

    method: str
    size: str
    task: str
    train_length: int
    values: dict[int, dict[int, float]]
    within: dict[int, float] = dataclasses.field(default_factory=dict)
    beyond: dict[int, float] = dataclasses.field(default_factory=dict)
    samples: dict[int, dict[int, Sample]] = dataclasses.field(default_factory=dict)

    def lengths(self) -> list[int]:
        """Return the lengths that have a value."""
        return sorted({length for by_length in self.values.values() for length in by_length})

    def over_seeds(self, length: int) -> list[float]:
        """Return the values at a length."""
        return [by_length[length] for by_length in self.values.values() if length in by_length]


@dataclasses.dataclass(frozen=True)
class Group:
    """Finished runs of an experiment with one preset on one text (`data`) or on the tasks, or the paper's numbers.

    `about` contains commits, devices, versions and times of the runs, and is empty for the paper; `series` has one
    entry per model.
    """

    experiment: str
    preset: str
    data: str
    about: dict[str, list[Any]]
    series: list[Series]

    @property
    def name(self) -> str:
        """Name of the group's directory and stem of its figure."""
        return "-".join(filter(None, (self.preset, self.data)))

    @property
    def title(self) -> str:
        """Title of the group in the report."""
        return ", ".join(filter(None, (self.preset, self.data)))

    @property
    def divisor(self) -> int:
        """Divisor of the paper's lengths in tables and figures."""
        return 1 if EXPERIMENTS[self.experiment].tasks or not self.about else PRESETS[self.preset].length_divisor

    def lengths(self) -> list[int]:
        """Return the lengths that have a value."""
        return sorted({length for series in self.series for length in series.lengths()})


def _format_spread(values: list[float]) -> str:
    """Return the mean and half the range over seeds, or "" without values."""
    if not values:
        return ""
    mean, half = _mean(values), (max(values) - min(values)) / 2
    form = ".2f" if abs(mean) < 1000 else ".0f" if abs(mean) < FIXED_BELOW else ".2g"
    return f"{mean:{form}}" if len(values) == 1 or not math.isfinite(mean) else f"{mean:{form}} ± {half:{form}}"


def _mean(values: Sequence[float]) -> float:
    """Return the mean; infinity or NaN where `fmean` would raise: for infinities, or sums too large for a float."""
    return fmean(values) if max(map(abs, values)) < FIXED_BELOW else sum(values) / len(values)


def lookup_in(group: Group) -> Lookup:
    """Return the function that looks up samples in a group."""

    def lookup(side: Cell | Score) -> dict[int, list[Sample]]:
        if isinstance(side, Cell):
            model = (side.method, side.size, side.train_length)
            found = [item.samples for item in group.series if (item.method, item.size, item.train_length) == model]
            return {seed: [of[side.length]] for by_seed in found for seed, of in by_seed.items() if side.length in of}
        series = [item for item in group.series if item.task == side.task and item.method in side.methods]
        if len(series) < len(side.methods):  # needs the results of all methods
            return {}
        seeds = set.intersection(*(set(item.beyond) for item in series))
        return {seed: [_beyond(item, seed) for item in series] for seed in seeds}

    return lookup


def _beyond(series: Series, seed: int) -> Sample:
    """Return the accuracies at the lengths beyond training, or their mean if only that is known."""
    if seed not in series.values:
        return Sample.of_value(series.beyond[seed])
    chosen = {at: value for at, value in series.values[seed].items() if at > series.train_length}
    return Sample(tuple(chosen), np.array(list(chosen.values()))[:, None])


# ---- results: ours and the paper's


def read_groups(results: Path) -> list[Group]:
    """Return the finished runs under a directory in the catalogue's order.

    Raises:
        InputError: a file is not a results file, or does not match the others in its directory.
    """
    groups = []
    for name, experiment in EXPERIMENTS.items():
        for directory in sorted((results / name).glob("*/")):
            preset, _, data = directory.name.partition("-")
            if preset in PRESETS and (data == "") == bool(experiment.tasks):
                group = _read_group(name, preset, data, sorted(directory.glob("*-seed*.json")))
                groups += [group] if group.series else []
    return groups


def _read_group(name: str, preset: str, data: str, files: list[Path]) -> Group:
    experiment = EXPERIMENTS[name]
    order = models_of(experiment)
    divisor = 1 if experiment.tasks else PRESETS[preset].length_divisor
    values: dict[Model, dict[int, dict[int, float]]] = defaultdict(dict)
    samples: dict[Model, dict[int, dict[int, Sample]]] = defaultdict(dict)
    settings: dict[Model, Any] = {}
    digests: dict[str, str] = {}  # digest of the text, or of each task
    runs = []
    for file in files:
        run = read_result(file)
        try:
            if experiment.tasks:
                model = (run["method"], "", run["train_length"], run["task"])
            else:
                model = (run["method"], run["paper_size"], run["paper_train_length"], "")
            if model not in order:  # removed from the catalogue
                continue
            measured = _measured(run, experiment.metric)
            drawn = _samples(run, experiment.metric, measured)
            # Must be equal for all seeds of a model; otherwise their range would not be a range over seeds.
            config = identity(run["config"], experiment.metric)
            setting = {key: section | {"seed": 0} for key, section in config.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{file}: must be a run that measures {experiment.metric}: {error!r}") from error
        values[model][run["seed"]] = {length * divisor: value for length, value in measured.items()}
        samples[model][run["seed"]] = {length * divisor: sample for length, sample in drawn.items()}
        same_data = run["data"] == digests.setdefault(model[-1], run["data"])
        same_setting = setting == settings.setdefault(model, setting)
        allowed = "must have the text of the other runs and the config of its other seeds"
        require(same_data and same_setting, str(file), run["key"], allowed)
        runs.append(run)
    about = {field: sorted({json.dumps(run[field]) for run in runs}) for field in PROVENANCE}
    about["wall_seconds"] = [run["wall_seconds"] for run in runs]
    if experiment.tasks:
        about["num_steps"] = sorted({run["config"]["train"]["num_steps"] for run in runs})
        about["num_sequences"] = sorted({run["config"]["evaluation"]["num_sequences"] for run in runs})
    series = [_series(model, values[model], samples[model]) for model in order if model in values]
    return Group(name, preset, data, about, series)


def _measured(run: dict[str, Any], metric: str) -> dict[int, float]:
    if metric == "step_ms":
        return {run["train_length"]: float(run["step_ms"])}
    if metric == "accuracy":
        return {int(result["length"]): 100 * float(result["accuracy"]) for result in run["lengths"]}
    results, field = (run["deltas"], "delta") if metric == "delta" else (run["lengths"], "perplexity")
    return {int(result["length"]): float(result[field]) for result in results}


def _samples(run: dict[str, Any], metric: str, measured: dict[int, float]) -> dict[int, Sample]:
    """Return the numbers of each window or step by length; of runs of older versions, the value alone."""
    if metric in ("perplexity", "delta") and "documents" in run:
        units, rows = tuple(run["documents"]), {}
        for result in run["lengths"]:
            tokens_each = result["num_tokens"] / result["num_windows"]
            rows[int(result["length"])] = np.array([float(nats) for nats in result["window_nats"]]) / tokens_each
        if metric == "perplexity":
            return {length: Sample(units, nats[:, None]) for length, nats in rows.items()}
        local = rows[run["train_length"]]
        return {length: Sample(units, np.stack([local, rows[length]], axis=1)) for length in measured}
    if metric == "step_ms" and "step_ms_each" in run:
        times = np.array(run["step_ms_each"], float)
        return {length: Sample(tuple(range(len(times))), np.log(times)[:, None]) for length in measured}
    return {length: _of_value(value, metric) for length, value in measured.items()}


def _of_value(value: float, metric: str) -> Sample:
    with np.errstate(divide="ignore"):
        return Sample.of_value(float(np.log(value)) if is_log(metric) else value)


def _series(
    model: Model, values: dict[int, dict[int, float]], samples: dict[int, dict[int, Sample]] | None = None
) -> Series:
    method, size, train_length, task = model
    within, beyond = {}, {}
    for seed, by_length in values.items() if task else ():
        for means, is_beyond in ((within, False), (beyond, True)):
            chosen = [value for length, value in by_length.items() if (length > train_length) == is_beyond]
            if chosen:
                means[seed] = fmean(chosen)
    return Series(method, size, task, train_length, values, within, beyond, samples or {})


def paper_groups(name: str) -> list[Group]:
    """Return the paper's numbers of an experiment as runs with one seed, one group per text."""
    experiment, tables = EXPERIMENTS[name], paper_tables()
    if experiment.tasks:
        table = tables["table6"]
        printed = {
            (method, row["task"]): float(accuracy)
            for row in table["tasks"]
            for method, accuracy in zip(table["methods"], row["accuracy"], strict=True)
        }
        series = [
            Series(method, size, task, train_length, {}, beyond={0: printed[method, task]})
            for method, size, train_length, task in models_of(experiment)
            if (method, task) in printed
        ]
        return [Group(name, "paper", "", {}, series)]
    batch = PRESETS["paper"].batch
    assert batch is not None
    found: dict[str, dict[Model, dict[int, float]]] = {"arxiv": defaultdict(dict), "books3": defaultdict(dict)}
    for curve in tables["curves"]:
        # If the paper uses equal tokens per step at all train lengths, only train length 128 has the usual batch size.
        usual = batch * curve["train_length"]
        step_tokens = curve["step_tokens"] if "step_tokens" in curve else usual
        if curve["metric"] == experiment.metric and step_tokens == (experiment.step_tokens or usual):
            model = (curve["method"], curve["size"], curve["train_length"], "")
            found[curve["dataset"]][model] |= {int(length): value for length, value in curve["values"].items()}
    is_printed = not experiment.overrides and experiment.source != NOT_IN_PAPER
    wanted = models_of(experiment) if is_printed else []
    groups = []
    for dataset, curves in found.items():
        series = []
        for model in wanted:
            if model in curves:
                values = curves[model]
                samples = {length: _of_value(value, experiment.metric) for length, value in values.items()}
                series.append(_series(model, {0: values}, {0: samples}))
        groups.append(Group(name, "paper", dataset, {}, series))
    return [group for group in groups if group.series]


# ---- output


def write(results: Path) -> Path:
    """Write the report on all finished runs and return the path of its README.md.

    Raises:
        InputError: there is nothing to report, or the directory cannot be written to.
    """
    groups = read_groups(results)
    allowed = "must be a directory with finished runs (python -m dape_jax.experiments run)"
    require(bool(groups), "--results", str(results), allowed)
    with os_errors("--results", str(results), "cannot be written to"):
        for group in groups:
            files = drawings(plot(group), dpi=120) | {"csv": csv_text(_number_rows(group)).encode()}
            for suffix, content in files.items():
                (results / group.experiment / f"{group.name}.{suffix}").write_bytes(content)
        write_json(results / "report.json", json_values(_as_json(groups)))
        (results / "README.md").write_text(_readme(groups) + _other_tables(results) + "\n")
    return results / "README.md"


def _number_rows(group: Group) -> list[list[Any]]:
    """Return a header and a row for each value of a group, at the lengths that were evaluated."""
    metric = EXPERIMENTS[group.experiment].metric
    rows: list[list[Any]] = [["method", "size", "task", "train_length", "seed", "length", metric]]
    for series in group.series:
        size = PRESETS[group.preset].sizes[series.size] if series.size else ""
        model = [series.method, size, series.task, series.train_length // group.divisor]
        for seed, by_length in series.values.items():
            rows += [[*model, seed, length // group.divisor, value] for length, value in by_length.items()]
    return rows


def judge_all(group: Group) -> list[Judgement]:
    """Return the verdicts on the claims of a group's experiment."""
    experiment, lookup = EXPERIMENTS[group.experiment], lookup_in(group)
    return [judge(claim, lookup, experiment.metric, group.divisor) for claim in experiment.claims]


def _as_json(groups: list[Group]) -> dict[str, Any]:
    def without_empty(items: Sequence[Judgement | Series]) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in vars(item).items() if key != "samples" and value not in ("", {})}
            for item in items
        ]

    content: dict[str, Any] = {name: {} for name in EXPERIMENTS}
    for group in groups:
        claims, series = without_empty(judge_all(group)), without_empty(group.series)
        content[group.experiment][group.name] = {"claims": claims, "series": series, "about": group.about}
    return content


_INTRODUCTION = f"""# The paper's experiments, reproduced

`python -m dape_jax.experiments report` writes this page from the results files in this directory; `report.json` has the
same numbers. The preset `small` is `configs/small.py`: every length of the paper divided by four, models of 0.4 M
parameters and more, bytes of the standard library's source. For the tasks of table 6 it is `configs/che.py` with fewer
steps. It tests whether a claim holds at that scale; it does not reproduce the paper's numbers.

Claims are judged by paired differences on the same windows and seeds, with a bootstrap over documents and Student's t
over seeds (`dape_jax/experiments/verdicts.py`). All lengths of two models are one pair. A claim **holds** if all its
pairs hold, or the required number of them, after Holm's correction at 5 %. It is **contradicted** if too many pairs are
reversed, **undecided** otherwise, and **not tested** unless every run that it compares has {MIN_SEEDS} seeds or more.
The deciding comparison is the weakest of the required ones, with its 95 % interval and our lengths. In tables, values
are the mean over seeds ± half their range.

## Verdicts

| experiment | claim of the paper, with its lengths | verdict | pairs that hold | contradicted | deciding |
| --- | --- | --- | ---: | ---: | --- |"""


def _readme(groups: list[Group]) -> str:
    verdicts, sections, notes = [], [], defaultdict(list)
    for name, experiment in EXPERIMENTS.items():
        ours = [group for group in groups if group.experiment == name]
        for claim in experiment.claims:
            notes[claim.note].append(f"{name}, {claim.text}")
            if not ours:
                verdicts.append(f"| {name} | {claim.text} | not tested | | | no runs |")
        for group in ours:
            for item in judge_all(group):
                counts = f"{item.holding} of {item.pairs} | {item.contradicted}" if item.pairs else " | "
                where = f"[{name}](#{name}) {group.title}"
                verdicts.append(f"| {where} | {item.claim} | **{item.verdict}** | {counts} | {item.weakest} |")
        if ours:
            sections += ["", f"## {name}", "", f"{experiment.title} ({experiment.source})."]
            sections += [part for group in ours for part in ("", _section(group))]
            for paper in paper_groups(name):
                sections += ["", _tables(paper, ", ".join(filter(None, ("**Paper**", paper.data))))]
    noted = [f"- {note} Claims: {'; '.join(claims)}." for note, claims in notes.items() if note]
    return "\n".join([_INTRODUCTION, *verdicts, "", "Notes on claims:", "", *noted, *sections])


_OTHERS = {  # measurements that are no experiment of the paper: section -> files in the results' directory
    "The demo": "quickstart/lengths",
    "Two algorithmic tasks after 1,500 steps": "che/accuracy",
    "Associative recall": "recall/accuracy",
    "One attention layer on a CPU": "attention/cpu",
}


def _other_tables(results: Path) -> str:
    """Return sections with the tables of other measurements, as far as their files exist."""
    parts = []
    for title, stem in _OTHERS.items():
        table, raw = results / f"{stem}.md", results / f"{stem}.json"
        if table.exists() and raw.exists():
            about = json.loads(raw.read_text())
            source = f"{about['device']}, {about['num_cpus']} CPUs; raw figures in `results/{stem}.json`."
            parts += [
                f"## {title}",
                table.read_text().strip(),
                f"`{about['command']}`; commit {about['commit']}; {source}",
            ]
    return "".join(f"\n\n{part}" for part in parts)


def _section(group: Group) -> str:
    minutes = sum(group.about["wall_seconds"]) / 60
    commits, devices, cpus = (
        ", ".join(str(json.loads(value)) for value in group.about[field]) for field in ("commit", "device", "num_cpus")
    )
    versions = "; ".join(
        ", ".join(f"{package} {number}" for package, number in json.loads(item).items())
        for item in group.about["versions"]
    )
    whose = " on ".join(filter(None, (f"**Ours**, {group.preset}", group.data)))
    return (
        f"{_tables(group, whose)}\n\n"
        f"![{group.experiment}]({group.experiment}/{group.name}.png)\n\n"
        f"`python -m dape_jax.experiments run {group.experiment} --preset={group.preset}`; commit {commits}; "
        f"{devices}, {cpus} CPUs; {versions}; {minutes:.0f} minutes in total."
    )


def _tables(group: Group, whose: str) -> str:
    """Return a group's table; for tasks, one for lengths beyond training, as in the paper, and one for those within."""
    experiment = EXPERIMENTS[group.experiment]
    caption = f"{whose}: {UNITS[experiment.metric]}"
    seeds = sorted({seed for series in group.series for seed in series.values})
    with_seeds = f", seeds {', '.join(map(str, seeds))}" if group.about else ""
    if not experiment.tasks:
        return markdown_table(caption + with_seeds, _text_rows(group))
    if not group.about:
        return markdown_table(f"{caption}, mean over lengths 41 to 500", _task_rows(group, beyond=True))
    (train_length,) = experiment.train_lengths
    steps, sequences = (" or ".join(f"{n:,}" for n in group.about[field]) for field in ("num_steps", "num_sequences"))
    trained = f"{steps} steps on lengths 1 to {train_length}, {sequences} sequences of each length{with_seeds}"
    tables = []
    for beyond in (True, False):
        if shown := [length for length in group.lengths() if (length > train_length) == beyond]:
            over = f"mean over {len(shown)} lengths, {shown[0]} to {shown[-1]}"
            tables.append(markdown_table(f"{caption}, {over}; {trained}", _task_rows(group, beyond=beyond)))
    return "\n\n".join(tables)


def _text_rows(group: Group) -> list[list[str]]:
    """Return header and rows: one row per model, one column per length."""
    lengths, has_sizes = group.lengths(), len({series.size for series in group.series}) > 1
    lengths_here = [str(length // group.divisor) for length in lengths]
    rows = [["method", *(["size"] if has_sizes else []), "trained at", *lengths_here]]
    for series in group.series:
        names = [series.method, *([series.size] if has_sizes else []), str(series.train_length // group.divisor)]
        rows.append(names + [_format_spread(series.over_seeds(length)) for length in lengths])
    return rows


def _task_rows(group: Group, *, beyond: bool) -> list[list[str]]:
    """Return header and rows: one row per task, one column for chance and one per method."""
    means = {(series.method, series.task): series.beyond if beyond else series.within for series in group.series}
    methods = [m for m in EXPERIMENTS[group.experiment].methods if any(m == found for found, _ in means)]
    rows = [["task", "level", "chance", *methods]]
    for task in dict.fromkeys(series.task for series in group.series):
        cells = [
            _format_spread(list(means[method, task].values())) if (method, task) in means else "" for method in methods
        ]
        rows.append([task, TASKS[task].level, f"{100 * TASKS[task].random_accuracy:.0f}", *cells])
    return rows


# ---- figures


def plot(group: Group) -> Figure:
    """Draw a group: a panel for each task, or for each size and train length with the paper's curves below."""
    experiment = EXPERIMENTS[group.experiment]
    # One panel compares train lengths if the paper uses the same tokens per step at all of them.
    compares_train_lengths = experiment.step_tokens is not None

    def panel_of(series: Series) -> tuple[str, str, int]:
        return series.task, series.size, 0 if compares_train_lengths else series.train_length

    panels = list(dict.fromkeys(panel_of(series) for series in group.series))
    groups = [group, *(paper for paper in paper_groups(group.experiment) if len(paper.lengths()) > 1)]
    across = min(3, len(panels)) if experiment.tasks else len(panels)
    down = -(-len(panels) // across) * len(groups)
    figure = Figure(figsize=(5.4 * across + 1.2, 3.6 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    # Our methods first. The paper may have methods that are not finished here.
    curves = dict.fromkeys(
        (item.method, compares_train_lengths and item.train_length) for shown in groups for item in shown.series
    )
    colors = dict(zip(curves, matplotlib.color_sequences["tab10" if len(curves) <= 10 else "tab20"], strict=False))
    for empty in axes[len(groups) * len(panels) :]:
        empty.remove()
    for panel_axes, (shown, panel) in zip(axes, itertools.product(groups, panels), strict=False):
        task, size, train_length = panel
        series = [item for item in shown.series if panel_of(item) == panel]
        trained = f", trained at {train_length // shown.divisor}" if train_length and not task else ""
        panel_axes.set_title(f"{shown.title}: {task or PRESETS[shown.preset].sizes[size]}{trained}", fontsize=9)
        if experiment.metric == "step_ms":
            times = [fmean(item.over_seeds(item.train_length)) for item in series]
            panel_axes.barh([item.method for item in series], times)
            panel_axes.set_xlabel(UNITS[experiment.metric])
            continue
        for item in series:
            name = item.method + f", trained at {item.train_length // shown.divisor}" * compares_train_lengths
            color = colors[item.method, compares_train_lengths and item.train_length]
            _draw_curve(panel_axes, item, shown.divisor, name, color)
        (_scale_task_axes if task else _scale_text_axes)(panel_axes, series)
        panel_axes.set_ylabel(UNITS[experiment.metric])
        panel_axes.grid(alpha=0.3)
    if experiment.metric != "step_ms":  # bars are labelled on the axis
        lines = {line.get_label(): line for panel in axes for line in panel.get_lines()}
        handles = [line for label, line in lines.items() if not str(label).startswith("_")]
        axes[across - 1].legend(handles=handles, fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _draw_curve(axes: Axes, series: Series, divisor: int, name: str, color: Any) -> None:
    """Plot the mean over seeds and their range; a single number is a marker with its name next to it."""
    over_seeds = [series.over_seeds(length) for length in series.lengths()]
    lengths = [length // divisor for length in series.lengths()]
    width, marker = 2.2 if series.method.startswith("dape") else 1.2, "o" if len(lengths) <= 40 else None
    means = drawn(_mean(values) for values in over_seeds)
    if len(lengths) == 1:
        axes.plot(lengths, means, marker="D", markersize=6, linestyle="", label=name, color=color)
        if math.isfinite(means[0]):
            at = {"xytext": (6, 4), "textcoords": "offset points"}
            axes.annotate(name, (lengths[0], means[0]), **at, fontsize=7, color=color)
        return
    axes.plot(lengths, means, marker=marker, markersize=3, linewidth=width, label=name, color=color)
    band(axes, lengths, [(min(values), max(values)) for values in over_seeds], color)


def _scale_text_axes(axes: Axes, series: list[Series]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    means = only_drawn(_mean(item.over_seeds(length)) for item in series for length in item.lengths())
    if means and min(means) > 0 and max(means) > 4 * min(means):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("sequence length (tokens)")


def _scale_task_axes(axes: Axes, series: list[Series]) -> None:
    chance = 100 * TASKS[series[0].task].random_accuracy
    axes.axhline(chance, color="gray", linestyle=":", linewidth=1.5)
    axes.annotate("chance", (0.99, chance - 1), xycoords=("axes fraction", "data"), ha="right", va="top", fontsize=8)
    mark_train_lengths(axes, [series[0].train_length])
    axes.set_xlim(left=0)
    axes.set_ylim(-3, 105)
    axes.set_xlabel("input length (symbols)")
