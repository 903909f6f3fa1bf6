"""Compare finished runs with the paper's claims: write `results/README.md`, `report.json` and a figure per experiment.

Lengths in claims and groups are the paper's; tables and figures divide them by the preset's divisor.
"""

import dataclasses
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dape_jax.errors import os_errors, require
from dape_jax.evaluation.figures import band, distinct_colors, drawn, log_y_axis, mark_train_lengths, only_drawn
from dape_jax.evaluation.report import FIXED_BELOW, csv_text, drawings, json_values, markdown_table
from dape_jax.files import write_json
from dape_jax.tasks import TASKS
from experiments.catalogue import EXPERIMENTS, NOT_IN_PAPER, Cell, Less, Score
from experiments.groups import Group, Series, lookup_in, paper_groups, read_groups
from experiments.summary import (
    Cost,
    Gain,
    Learned,
    cost_figure,
    costs,
    gain_figure,
    gains,
    learning,
    learning_figure,
)
from experiments.verdicts import (
    MIN_SEEDS,
    VERDICTS,
    Difference,
    Judgement,
    describe,
    difference,
    format_difference,
    in_units,
    is_log,
    judge,
)

UNITS = {
    "perplexity": "perplexity",
    "delta": "delta perplexity",
    "step_ms": "milliseconds per training step",
    "accuracy": "accuracy in %",
}


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


# ---- output


def write(results: Path) -> Path:
    """Write the report on all finished runs and return the path of its README.md.

    Raises:
        InputError: there is nothing to report, or the directory cannot be written to.
    """
    groups = read_groups(results)
    allowed = "must be a directory with finished runs (python -m experiments run)"
    require(bool(groups), "--results", str(results), allowed)
    with os_errors("--results", str(results), "cannot be written to"):
        for group in groups:
            files = drawings(plot(group), dpi=120) | {"csv": csv_text(_number_rows(group)).encode()}
            for suffix, content in files.items():
                (results / group.experiment / f"{group.name}.{suffix}").write_bytes(content)
        parts = [_INTRODUCTION]
        if gained := gains(groups):
            _write_summary(results, "gain", gain_figure(gained), gained)
            parts += [_GAIN, "![gain](gain.png)"]
        spent = costs(groups)
        if (figure := cost_figure(spent)) is not None:
            _write_summary(results, "cost", figure, spent)
            parts += [_COST, "![cost](cost.png)"]
        learned = learning(groups)
        if (figure := learning_figure(learned)) is not None:
            _write_summary(results, "learning", figure, learned)
            parts += [_LEARNING, "![learning](learning.png)"]
        judged = [(group, judge_all(group)) for group in groups]
        write_json(results / "report.json", json_values(_as_json(judged)))
        page = "\n\n".join([*parts, f"{_VERDICTS}\n{_readme(judged)}{_other_tables(results)}"])
        (results / "README.md").write_text(f"{page}\n")
    return results / "README.md"


def _write_summary(results: Path, stem: str, figure: Figure, rows: Sequence[Gain | Cost | Learned]) -> None:
    header = [field.name for field in dataclasses.fields(rows[0])]
    numbers = csv_text([header, *(list(vars(row).values()) for row in rows)]).encode()
    for suffix, content in (drawings(figure, dpi=120) | {"csv": numbers}).items():
        (results / f"{stem}.{suffix}").write_bytes(content)


def _number_rows(group: Group) -> list[list[Any]]:
    """Return a header and a row for each value of a group, at the lengths that were evaluated."""
    metric = EXPERIMENTS[group.experiment].metric
    rows: list[list[Any]] = [["method", "size", "task", "train_length", "seed", "length", metric]]
    for series in group.series:
        size = group.sizes[series.size] if series.size else ""
        model = [series.method, size, series.task, series.train_length // group.divisor]
        for seed, by_length in series.values.items():
            rows += [[*model, seed, length // group.divisor, value] for length, value in by_length.items()]
    return rows


def judge_all(group: Group) -> list[Judgement]:
    """Return the verdicts on the claims of a group's experiment."""
    experiment, lookup = EXPERIMENTS[group.experiment], lookup_in(group)
    return [judge(claim, lookup, experiment.metric) for claim in experiment.claims]


def _as_json(judged: list[tuple[Group, list[Judgement]]]) -> dict[str, Any]:
    content: dict[str, Any] = {name: {} for name in EXPERIMENTS}
    for group, judgements in judged:
        series = [_series_json(item) for item in group.series]
        claims = [_claim_json(group, item) for item in judgements]
        content[group.experiment][group.name] = {"claims": claims, "series": series, "about": group.about}
    return content


def _series_json(series: Series) -> dict[str, Any]:
    """Return the results of a model without samples and curves, which are in the files of its runs."""
    fields = vars(series).items()
    return {key: value for key, value in fields if key not in ("samples", "curves") and value not in ("", {})}


def _claim_json(group: Group, item: Judgement) -> dict[str, Any]:
    content: dict[str, Any] = {"claim": item.claim.text, "verdict": item.verdict}
    content |= {"note": item.claim.note} if item.claim.note else {}
    if item.deciding is None:
        return content
    metric = EXPERIMENTS[group.experiment].metric
    content |= {"holding": item.holding, "contradicted": item.contradicted, "unit": "%" if is_log(metric) else ""}
    content |= {"deciding": _describe(group, item.deciding.less)} | _numbers(item.deciding, metric)
    content["pairs"] = [
        {"pair": _describe(group, pair.weakest.less, with_length=False), "verdict": verdict}
        | {"weakest": _describe(group, pair.weakest.less)}
        | _numbers(pair.weakest, metric)
        for pair, verdict in zip(item.pairs, item.of_pairs, strict=True)
    ]
    return content | {"paper": _papers(group, item.deciding.less), "minutes": _minutes(group, item)}


def _numbers(found: Difference, metric: str) -> dict[str, float]:
    mean, low, high = in_units(found, metric)
    return {"difference": mean, "low": low, "high": high, "seeds": found.num_seeds}


def _describe(group: Group, less: Less, *, with_length: bool = True) -> str:
    metric = EXPERIMENTS[group.experiment].metric
    return describe(less, metric, divisor=group.divisor, sizes=group.sizes, with_length=with_length)


def _papers(group: Group, less: Less) -> dict[str, str]:
    """Return the paper's difference of a comparison, by text."""
    metric, found = EXPERIMENTS[group.experiment].metric, {}
    for paper in paper_groups(group.experiment):
        each = difference(less, lookup_in(paper), metric)
        if each is not None:
            found[paper.data] = format_difference(each, metric)
    return found


def _minutes(group: Group, item: Judgement) -> float:
    """Return the time that the runs which a claim compares took, over all seeds."""
    cells, scores = set(), set()
    for side in (side for less in item.claim.comparisons for side in (less.low, less.high)):
        if isinstance(side, Cell):
            cells.add((side.method, side.size, side.train_length))
        elif isinstance(side, Score):
            scores |= {(method, side.task) for method in side.methods}
    return sum(
        series.seconds / 60
        for series in group.series
        if (series.method, series.size, series.train_length) in cells or (series.method, series.task) in scores
    )


_INTRODUCTION = """# The paper's experiments, reproduced

`python -m experiments report` writes this page from the results files in this directory; `report.json` has the
same numbers. The preset `small` is `configs/small.py`: every length of the paper divided by four, models of 0.4 M
parameters and more, 1.6 tokens per parameter, bytes of the standard library's source. For the tasks of table 6 it is
`configs/che.py` with fewer and smaller steps. The preset `converged` is `configs/small.py` with 50 tokens per
parameter, on a corpus of `experiments/corpora.py`; the preset `25m` is `configs/paper.py` with 25 M parameters. Sizes
xs, s, m and l replace the paper's 125m, 350m, 2.7b and 6.7b. The presets test whether a claim holds at that scale; they
do not reproduce the paper's numbers."""

_GAIN = """## What DAPE gains

Perplexity with DAPE divided by perplexity without, on the same windows and seeds; numbers in `gain.csv`. FIRE's
official settings depend on DAPE, so the ratios to FIRE are not due to DAPE alone. A point without an interval has one
seed. Intervals wider than the axes are cut."""

_COST = """## What DAPE costs

Perplexity at eight times the train length by the cost of training, relative to Kerple's; numbers in `cost.csv`, which
also has the methods of `variants` and `rates`. Methods above three times Kerple's perplexity are drawn there, with open
markers. Kerple with more steps, wider and deeper has the FLOPs or the time of DAPE1x3-Kerple, or more. FLOPs of biases
are not counted, also where they need products of matrices (CoPE, Transformer-XL). The time of a training is the number
of its steps times the time of one, which is measured in turns (experiment `times`)."""

_LEARNING = """## How fast models learn

Validation loss during training, at the train length, by step and by time. The models are Kerple, DAPE on Kerple, and
Kerple at about the cost of DAPE, with a line for each seed. `learning.csv` has all methods. Times are as in the figure
of costs."""

_VERDICTS = f"""## Verdicts

Claims are judged by paired differences on the same windows and seeds, with a bootstrap over documents and Student's t
over seeds (`experiments/verdicts.py`). All lengths of two models are one pair. A claim **holds** if all its
pairs hold, or the required number of them, after Holm's correction at 5 %. It is **contradicted** if too many pairs are
reversed, **undecided** otherwise, and not tested unless every run that it compares has {MIN_SEEDS} seeds or more.
The deciding comparison is the weakest of the required ones. *Ours* is its difference with the 95 % interval, *seeds*
the number of seeds that both sides have, *paper* the same difference in the paper's numbers, *minutes* the time that
training and evaluation took. In all other tables, values are the mean over seeds ± half their range. Figures cut curves
far above most others."""

_VERDICT_HEADER = [
    "| experiment | claim, with the paper's lengths | verdict | pairs that hold | reversed "
    "| deciding comparison, with our lengths and sizes | ours | seeds | paper | minutes |",
    "| --- | --- | --- | ---: | ---: | --- | --- | ---: | --- | ---: |",
]


def _readme(judged: list[tuple[Group, list[Judgement]]]) -> str:
    sections, notes = [], defaultdict(list)
    for name, experiment in EXPERIMENTS.items():
        for claim in experiment.claims:
            notes[claim.note].append(f"{name}, {claim.text}")
        if ours := [group for group, _ in judged if group.experiment == name]:
            sections += ["", f"## {name}", "", f"{experiment.title} ({experiment.source})."]
            sections += [part for group in ours for part in ("", _section(group))]
            for paper in paper_groups(name):
                sections += ["", _tables(paper, ", ".join(filter(None, ("**Paper**", paper.data))))]
    noted = [f"- {note} Claims: {'; '.join(claims)}." for note, claims in notes.items() if note]
    return "\n".join(
        [
            *("", "### Claims of the paper", "", *_verdicts(judged, in_paper=True)),
            *("", "### Questions that the paper leaves open", "", *_verdicts(judged, in_paper=False)),
            *("", "### Claims with pairs of different verdicts", "", *_parts(judged)),
            *("", "### Notes on claims", "", *noted, *sections),
        ]
    )


def _verdicts(judged: list[tuple[Group, list[Judgement]]], *, in_paper: bool) -> list[str]:
    """Return lines on the claims of the paper's experiments, or of the others: counts, tested claims, untested ones."""
    rows, untested, counts = [], [], Counter[str]()
    for name, experiment in EXPERIMENTS.items():
        if (experiment.source != NOT_IN_PAPER) != in_paper:
            continue
        tested = set()
        for group, judgements in judged:
            for item in judgements if group.experiment == name else ():
                if item.deciding is not None:
                    tested.add(item.claim.text)
                    counts[item.verdict] += 1
                    rows.append(_verdict_row(group, item))
        if missing := [claim.text for claim in experiment.claims if claim.text not in tested]:
            untested.append(f"- {name}: {'; '.join(missing)}.")
            counts["not tested"] += len(missing)
    lines = [", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]) + "."]
    lines += ["", *_VERDICT_HEADER, *rows] if rows else []
    return [*lines, "", "Not tested:", "", *untested] if untested else lines


def _parts(judged: list[tuple[Group, list[Judgement]]]) -> list[str]:
    """Return a line for each claim whose pairs have different verdicts, with the pairs of each verdict."""
    lines = []
    for group, judgements in judged:
        for item in judgements:
            verdicts = [verdict for verdict in VERDICTS if verdict in item.of_pairs]
            if len(verdicts) > 1:
                names = [_describe(group, pair.weakest.less, with_length=False) for pair in item.pairs]
                named = list(zip(names, item.of_pairs, strict=True))
                parts = [f"{verdict}: {', '.join(name for name, of in named if of == verdict)}" for verdict in verdicts]
                text = "; ".join(parts)
                lines.append(f"- {group.experiment} {group.title}, {item.claim.text}. {text[0].upper()}{text[1:]}.")
    return lines or ["None."]


def _verdict_row(group: Group, item: Judgement) -> str:
    assert item.deciding is not None, item
    metric = EXPERIMENTS[group.experiment].metric
    cells = [
        f"[{group.experiment}](#{group.experiment.lower()}) {group.title}",  # anchors are lower case
        item.claim.text,
        f"**{item.verdict}**",
        f"{item.holding} of {len(item.pairs)}",
        str(item.contradicted),
        _describe(group, item.deciding.less),
        format_difference(item.deciding, metric),
        str(item.deciding.num_seeds),
        "; ".join(" ".join(filter(None, each)) for each in _papers(group, item.deciding.less).items()),
        f"{_minutes(group, item):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


_OTHERS = {  # measurements that are not experiments of the paper: title -> stem of the files in the results directory
    "Up to 32,768 tokens of math, models of the experiment `converged`": "long/lengths",
    "Up to 131,072 tokens of prose, models of the same experiment": "long_prose/lengths",
    "A needle in held-out text, the same models": "needle/needle",
    "Loss by position, the same models": "positions/positions",
    "How much three texts repeat": "repetition/repetition",
    "Where models of math differ, by what copying predicts": "copying/copying",
    "Where models of prose differ, by what copying predicts": "copying_prose/copying",
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
        f"`python -m experiments run {group.experiment} --preset={group.preset}`; commit {commits}; "
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
    """Return header and rows: one row per model, one column per length; sizes and numbers of seeds if they differ."""
    lengths = group.lengths()
    has_sizes = len({series.size for series in group.series}) > 1
    has_seeds = len({len(series.values) for series in group.series}) > 1
    lengths_here = [str(length // group.divisor) for length in lengths]
    rows = [["method", *["size"] * has_sizes, "trained at", *["seeds"] * has_seeds, *lengths_here]]
    for series in group.series:
        names = [series.method, *[group.sizes[series.size]] * has_sizes, str(series.train_length // group.divisor)]
        names += [str(len(series.values))] * has_seeds
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
    colors = dict(zip(curves, distinct_colors(len(curves)), strict=True))
    for empty in axes[len(groups) * len(panels) :]:
        empty.remove()
    for panel_axes, (shown, panel) in zip(axes, itertools.product(groups, panels), strict=False):
        task, size, train_length = panel
        series = [item for item in shown.series if panel_of(item) == panel]
        if not series:  # the paper has no numbers for this panel
            panel_axes.remove()
            continue
        trained = f", trained at {train_length // shown.divisor}" if train_length and not task else ""
        panel_axes.set_title(f"{shown.title}: {task or shown.sizes[size]}{trained}", fontsize=9)
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
        if compares_train_lengths:  # a name has our train length in our panel, and the paper's in the paper's
            for panel_axes in figure.axes:
                _add_legend(panel_axes, [panel_axes])
        else:
            _add_legend(axes[across - 1], figure.axes)
    return figure


def _add_legend(axes: Axes, panels: Sequence[Axes]) -> None:
    """Add a legend with the curves of these panels to the right of one of them."""
    lines: dict[str, Line2D] = {}
    for line in (line for panel in panels for line in panel.get_lines()):
        lines.setdefault(str(line.get_label()), line)  # ours, rather than a single number of the paper
    handles = [line for label, line in lines.items() if not label.startswith("_")]
    axes.legend(handles=handles, fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _draw_curve(axes: Axes, series: Series, divisor: int, name: str, color: Any) -> None:
    """Plot the mean over seeds and their range; a single number is a marker with its name below it."""
    over_seeds = [series.over_seeds(length) for length in series.lengths()]
    lengths = [length // divisor for length in series.lengths()]
    width, marker = 2.2 if series.method.startswith("dape") else 1.2, "o" if len(lengths) <= 40 else None
    means = drawn(_mean(values) for values in over_seeds)
    if len(lengths) == 1:
        axes.plot(lengths, means, marker="D", markersize=6, linestyle="", label=name, color=color)
        if math.isfinite(means[0]):
            at = {"xytext": (0, -13), "textcoords": "offset points", "ha": "center"}
            axes.annotate(name, (lengths[0], means[0]), **at, fontsize=7, color=color)
        return
    axes.plot(lengths, means, marker=marker, markersize=3, linewidth=width, label=name, color=color)
    band(axes, lengths, [(min(values), max(values)) for values in over_seeds], color)


def _scale_text_axes(axes: Axes, series: list[Series]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("sequence length (tokens)")
    curves = [only_drawn(_mean(item.over_seeds(length)) for length in item.lengths()) for item in series]
    curves = [means for means in curves if means]
    if not curves:
        return
    low, top = min(map(min, curves)), max(map(max, curves))
    if low > 0:
        peaks = [max(means) for means in curves]
        usual = median(peaks)
        if usual < 2 * min(peaks) and top > 4 * usual:
            # Most methods are close to each other, and the few far above would make one line of them.
            top = max(1.5 * usual, 1.1 * max(map(min, curves)))  # part of each curve is drawn
            axes.set_ylim(0.95 * low, top)
        if top > 4 * low:
            log_y_axis(axes)
    elif low < 0 and max(-low, top) > 10:
        # Differences of both signs: linear between -1 and 1, logarithmic beyond, where one method may hide the others.
        axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter("{x:g}")


def _scale_task_axes(axes: Axes, series: list[Series]) -> None:
    chance = 100 * TASKS[series[0].task].random_accuracy
    axes.axhline(chance, color="gray", linestyle=":", linewidth=1.5)
    axes.annotate("chance", (0.99, chance - 1), xycoords=("axes fraction", "data"), ha="right", va="top", fontsize=8)
    mark_train_lengths(axes, [series[0].train_length])
    axes.set_xlim(left=0)
    axes.set_ylim(-3, 105)
    axes.set_xlabel("input length (symbols)")
