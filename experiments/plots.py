"""Figures of the report: curves of an experiment, and the gain of DAPE. In: `runs.py`, `gains.py`."""

import io
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from matplotlib.typing import ColorType
from PIL import Image

from dape_jax.evaluation.figures import LOG_FROM, band, drawn, log_axis, mark_train_lengths, only_drawn
from dape_jax.evaluation.styles import styles_of
from dape_jax.files import write_atomically
from dape_jax.tasks import TASKS
from experiments.catalogue import EXPERIMENTS
from experiments.gains import FACTORS, Gain, base_of
from experiments.methods import METHODS, PRESETS
from experiments.runs import Group, Series, mean_of, paper_groups

UNITS = {
    "perplexity": "perplexity",
    "delta": "delta perplexity",
    "step_ms": "milliseconds per training step",
    "accuracy": "accuracy in %",
}


def write_png(file: Path, figure: Figure) -> None:
    """Write a figure with 256 colors, which keep those of its lines. The same figure gives the same bytes."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, dpi=100, format="png")
    Image.open(full).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        small, "png", optimize=True
    )
    write_atomically(file, small.getvalue())


# ---- one experiment


def experiment_figure(groups: list[Group]) -> Figure:
    """Draw an experiment: a row of panels for each of our groups, by task or by size and train length; then the paper.

    One panel compares train lengths if the paper uses the same tokens per step at all of them. Panels of perplexities
    in a row have one axis. Methods of a task and tasks that have no run are named.
    """
    experiment = EXPERIMENTS[groups[0].experiment]
    compares = experiment.step_tokens is not None
    papers = [paper for paper in paper_groups(groups[0].experiment) if len(paper.lengths) > 1]
    rows = [(group, _panels(group.series, compares)) for group in (*groups, *papers)]
    if experiment.tasks:  # many panels: three in a row
        rows = [(group, panels[i : i + 3]) for group, panels in rows for i in range(0, len(panels), 3)]
    across = max(len(panels) for _, panels in rows)
    figure = Figure(figsize=(5.4 * across + 1.2, 3.6 * len(rows)), layout="constrained")
    sharey = "row" if experiment.metric == "perplexity" else False
    grid = figure.subplots(len(rows), across, squeeze=False, sharey=sharey)
    # Our methods first. The paper may have methods that are not finished here.
    curves = dict.fromkeys(_curve(item, compares) for _, panels in rows for panel in panels for item in panel)
    styles = dict(zip(curves, styles_of([method for method, _ in curves]), strict=True))
    if compares:  # the longer the train length, the lighter the curve
        trained = sorted({length for _, length in curves})
        for curve, style in styles.items():
            style.pop("markerfacecolor", None)
            style |= {"linestyle": "-", "alpha": 1 - 0.75 * trained.index(curve[1]) / len(trained)}
    for row, (group, panels) in zip(grid, rows, strict=True):
        for axes, panel in itertools.zip_longest(row, panels):
            if panel is None:
                axes.remove()
            else:
                _draw_panel(axes, group, panel, experiment.metric, compares, styles)
        if experiment.metric in ("perplexity", "delta"):
            for axes, _ in zip(row, panels, strict=False):
                _scale_text_axes(axes, [item for panel in panels for item in panel], experiment.metric)
        for axes in row[1:] if sharey else ():
            axes.set_ylabel("")  # it is that of the first panel
    if experiment.tasks:
        methods = {method: None for group in groups for method in PRESETS[group.preset].on_tasks.methods}
        run = {name for group in groups for item in group.series for name in (item.task, item.method)}
        missing = [name for name in (*experiment.tasks, *methods) if name not in run]
        figure.supxlabel(f"without a run: {', '.join(missing)}" if missing else "", fontsize=9)
    if experiment.metric == "step_ms":  # bars are labelled on the axis
        return figure
    if compares:  # a name has our train length in our panel, and the paper's in the paper's
        for axes in figure.axes:
            _add_legend(axes, [axes])
    else:
        _add_legend(grid[0][len(rows[0][1]) - 1], figure.axes)
    return figure


def _panels(series: Sequence[Series], compares: bool) -> list[list[Series]]:
    panels = defaultdict(list)
    for item in series:
        panels[item.task, item.size, 0 if compares else item.train_length].append(item)
    return list(panels.values())


def _curve(series: Series, compares: bool) -> tuple[str, int]:
    return series.method, series.train_length if compares else 0


def _draw_panel(
    axes: Axes, group: Group, series: list[Series], metric: str, compares: bool, styles: dict[tuple[str, int], Any]
) -> None:
    first = series[0]
    trained = "" if compares or first.task else f", trained at {first.train_length // group.divisor}"
    axes.set_title(f"{group.title}: {first.task or group.sizes[first.size]}{trained}", fontsize=9)
    if metric == "step_ms":
        means = [fmean(item.over_seeds(item.train_length)) for item in series]
        axes.barh([item.method for item in series], means, color=[styles[_curve(i, compares)]["color"] for i in series])
        axes.set_xlabel(UNITS[metric])
        return
    for item in series:
        name = f"{item.method}, trained at {item.train_length // group.divisor}" if compares else item.method
        _draw_curve(axes, item, group.divisor, name, styles[_curve(item, compares)])
    if first.task:
        _scale_task_axes(axes, series)
        shown = dict.fromkeys(item.method for item in group.series)
        if missing := [method for method in shown if method not in {item.method for item in series}]:
            text = f"not run: {', '.join(missing)}"
            axes.annotate(text, (0.99, 0.98), xycoords="axes fraction", ha="right", va="top", fontsize=8)
    axes.set_ylabel(UNITS[metric])
    axes.grid(alpha=0.3)


def _add_legend(axes: Axes, panels: Sequence[Axes]) -> None:
    """Add a legend with the curves of these panels to the right of one of them."""
    lines = dict[str, Line2D]()
    for line in (line for panel in panels for line in panel.get_lines()):
        lines.setdefault(str(line.get_label()), line)  # ours, not the paper's
    handles = [line for label, line in lines.items() if not label.startswith("_")]
    size = 9 if len(handles) < 15 else 7  # all of them fit beside one panel
    axes.legend(handles=handles, fontsize=size, loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=3.5)


def _draw_curve(axes: Axes, series: Series, divisor: int, name: str, style: dict[str, Any]) -> None:
    """Plot the mean over seeds and their range; a single number is a marker.

    The line of a text has a gap where the paper gives no number for a doubling of the length.
    """
    over_seeds = [series.over_seeds(length) for length in series.lengths]
    lengths = [length // divisor for length in series.lengths]
    width = 2.2 if series.method.startswith("dape") else 1.2
    sizes = {"markersize": 4, "linewidth": width} if len(lengths) > 1 else {"markersize": 7, "linestyle": ""}
    x, y = [], []
    for length, mean in zip(lengths, drawn(mean_of(values) for values in over_seeds), strict=True):
        has_gap = bool(x) and not series.task and length > 2 * x[-1]
        x += [length, length] if has_gap else [length]
        y += [math.nan, mean] if has_gap else [mean]
    axes.plot(x, y, label=name, **style | sizes)
    band(axes, lengths, [(min(values), max(values)) for values in over_seeds], style["color"])


def _scale_text_axes(axes: Axes, series: list[Series], metric: str) -> None:
    """Scale the axes of a panel for the curves of all panels that are compared with it."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("sequence length (tokens)")
    curves = [only_drawn(mean_of(item.over_seeds(length)) for length in item.lengths) for item in series]
    curves = [means for means in curves if means]
    if not curves:
        return
    low, top = min(map(min, curves)), max(map(max, curves))
    if metric == "perplexity":
        peaks = [max(means) for means in curves]
        usual = median(peaks)
        if usual < 2 * min(peaks) and top > 100 * usual:
            # Most methods are close to each other, and the few far above would make one line of them.
            top = max(1.5 * usual, 1.1 * max(map(min, curves)))  # part of each curve is drawn
            axes.set_ylim(0.95 * low, top)
        if top > LOG_FROM * low:
            log_axis(axes)
    elif low < 0 and max(-low, top) > 10:
        # Differences of both signs: linear between -1 and 1, logarithmic beyond, where one method may hide the others.
        axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter("{x:g}")


def _scale_task_axes(axes: Axes, series: list[Series]) -> None:
    chance = 100 * TASKS[series[0].task].random_accuracy
    axes.axhline(chance, color="gray", linestyle=":", linewidth=1.5, label="chance")
    axes.set_xlim(left=0)
    mark_train_lengths(axes, [series[0].train_length])
    axes.set_ylim(-3, 105)
    axes.set_xlabel("input length (symbols)")


# ---- all experiments


def distinct_colors(number: int) -> list[ColorType]:
    """Return a list of colours; above 20, neighbours in the list are similar."""
    if number <= 20:
        return list(matplotlib.color_sequences["tab10" if number <= 10 else "tab20"][:number])
    return [matplotlib.colormaps["turbo"](n / (number - 1)) for n in range(number)]


def gain_figure(found: Sequence[Gain]) -> Figure:
    """Draw the gains: a panel for each factor, a row for each method on each text at each train length.

    All ratios are inside the axes; intervals that are wider are cut at the border.
    """
    places = list(dict.fromkeys(each.where for each in found))
    colors = dict(zip(places, distinct_colors(len(places)), strict=True))
    measured = {(each.method, each.where) for each in found}
    rows: dict[tuple[str, str], int] = {}
    labels: dict[float, str] = {}  # by the height of the middle of a method's rows
    borders = [0]  # one row between methods
    for method in METHODS:
        of_method = [(method, where) for where in places if (method, where) in measured]
        if of_method:
            rows |= {each: borders[-1] + 1 + i for i, each in enumerate(of_method)}
            labels[borders[-1] + (1 + len(of_method)) / 2] = f"{method}\nagainst {base_of(method)}"
            borders.append(borders[-1] + 1 + len(of_method))
    figure = Figure(figsize=(11, 1.6 + 0.16 * borders[-1]), layout="constrained")
    panels = figure.subplots(1, len(FACTORS), sharex=True, sharey=True, squeeze=False)[0]
    for axes, factor in zip(panels, FACTORS, strict=True):
        axes.axvline(1.0, color="gray", linewidth=1)
        for border in borders[1:-1]:
            axes.axhline(border, color="gray", linewidth=0.5, alpha=0.4)
        for each in (each for each in found if each.factor == factor and math.isfinite(each.ratio)):
            at, color = rows[each.method, each.where], colors[each.where]
            axes.plot([each.ratio], [at], marker="o", markersize=4, color=color)
            if math.isfinite(each.low) and math.isfinite(each.high):
                axes.plot([each.low, each.high], [at, at], color=color, linewidth=1.2)
        axes.set_title(f"at {factor} x the train length" if factor > 1 else "at the train length", fontsize=10)
        axes.grid(alpha=0.3, axis="x")
    shown = [1.0, *(each.ratio for each in found if math.isfinite(each.ratio))]
    low, high = min(shown) / 1.15, max(shown) * 1.15
    panels[0].set_xscale("log")
    panels[0].set_xlim(low, high)
    wide = high / low > 6  # with more ticks, their labels would overlap
    ticks = (0.1, 0.2, 0.5, 1, 2, 5) if wide else (0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1, 1.2, 1.5, 2, 3)
    panels[0].set_xticks([tick for tick in ticks if low <= tick <= high])
    panels[0].xaxis.set_major_formatter("{x:g}")
    panels[0].xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_yticks(list(labels), list(labels.values()), fontsize=8)
    panels[0].set_ylim(borders[-1], 0)
    panels[1].set_xlabel("perplexity with DAPE / perplexity without (95 % interval; below 1, DAPE is better)")
    handles = [panels[0].plot([], [], marker="o", color=color, label=where)[0] for where, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(places)), fontsize=8)
    return figure
