"""Figures of the report: the curves of an experiment. In: `runs.py`. Next: `report.py`."""

import io
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from dape_jax.evaluation.figures import LOG_FROM, band, drawn, log_axis, mark_train_lengths, only_drawn
from dape_jax.evaluation.styles import styles_of
from dape_jax.files import write_atomically
from dape_jax.tasks import TASKS
from experiments.catalogue import EXPERIMENTS
from experiments.methods import PRESETS
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


def experiment_figure(groups: list[Group]) -> Figure:
    """Draw an experiment: a row of panels for each of our groups, by task or by size and train length; then the paper.

    One panel compares train lengths if the paper uses the same tokens per step at all of them. Panels of perplexities
    in a row have one axis. Methods of a task and tasks that have no run are named.
    """
    experiment = EXPERIMENTS[groups[0].experiment]
    metric, compares = experiment.metric, experiment.step_tokens is not None
    papers = [paper for paper in paper_groups(groups[0].experiment) if len(paper.lengths) > 1]
    rows = [(group, _panels(group.series, compares)) for group in (*groups, *papers)]
    if experiment.tasks:  # many panels: three in a row
        rows = [(group, panels[i : i + 3]) for group, panels in rows for i in range(0, len(panels), 3)]
    across = max(len(panels) for _, panels in rows)
    figure = Figure(figsize=(5.4 * across + 1.2, 3.6 * len(rows)), layout="constrained")
    sharey = "row" if metric == "perplexity" else False
    grid = figure.subplots(len(rows), across, squeeze=False, sharey=sharey)
    # Our methods first. The paper may have methods that are not finished here.
    curves = dict.fromkeys(_curve(item, compares) for _, panels in rows for panel in panels for item in panel)
    styles = dict(zip(curves, styles_of([method for method, _ in curves]), strict=True))
    if compares:  # the longer the train length, the lighter the curve
        trained = sorted({length for _, length in curves})
        for (_, length), style in styles.items():
            style.pop("markerfacecolor", None)
            style |= {"linestyle": "-", "alpha": 1 - 0.75 * trained.index(length) / len(trained)}
    for row, (group, panels) in zip(grid, rows, strict=True):
        for axes, panel in itertools.zip_longest(row, panels):
            if panel is None:
                axes.remove()
                continue
            model = panel[0].model
            where = model.task or group.sizes[model.size]
            trained = "" if compares or model.task else f", trained at {model.train_length // group.divisor}"
            axes.set_title(f"{group.title}: {where}{trained}", fontsize=9)
            if metric == "step_ms":
                means = [fmean(item.over_seeds(item.model.train_length)) for item in panel]
                colors = [styles[_curve(item, compares)]["color"] for item in panel]
                axes.barh([item.model.method for item in panel], means, color=colors)
                axes.set_xlabel(UNITS[metric])
                continue
            for item in panel:
                trained = f", trained at {item.model.train_length // group.divisor}" * compares
                _draw_curve(axes, item, group.divisor, item.model.method + trained, styles[_curve(item, compares)])
            if model.task:
                _finish_task(axes, panel, group)
            axes.set_ylabel(UNITS[metric] if axes is row[0] or not sharey else "")
            axes.grid(alpha=0.3)
        if metric in ("perplexity", "delta"):
            for axes, _ in zip(row, panels, strict=False):
                _scale_text_axes(axes, [item for panel in panels for item in panel], metric)
    if experiment.tasks:
        methods = {method: None for group in groups for method in PRESETS[group.preset].on_tasks.methods}
        run = {name for group in groups for item in group.series for name in item.model}
        missing = [name for name in (*experiment.tasks, *methods) if name not in run]
        figure.supxlabel(f"without a run: {', '.join(missing)}" if missing else "", fontsize=9)
    if compares:  # a name has our train length in our panel, and the paper's in the paper's
        for axes in figure.axes:
            _add_legend(axes, [axes])
    elif metric != "step_ms":  # bars are labelled on the axis
        _add_legend(grid[0][len(rows[0][1]) - 1], figure.axes)
    return figure


def _panels(series: Sequence[Series], compares: bool) -> list[list[Series]]:
    panels = defaultdict(list)
    for item in series:
        panels[item.model.task, item.model.size, 0 if compares else item.model.train_length].append(item)
    return list(panels.values())


def _curve(series: Series, compares: bool) -> tuple[str, int]:
    return series.model.method, series.model.train_length if compares else 0


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
    width = 2.2 if series.model.method.startswith("dape") else 1.2
    sizes = {"markersize": 4, "linewidth": width} if len(lengths) > 1 else {"markersize": 7, "linestyle": ""}
    x, y = [], []
    for length, mean in zip(lengths, drawn(mean_of(values) for values in over_seeds), strict=True):
        has_gap = bool(x) and not series.model.task and length > 2 * x[-1]
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


def _finish_task(axes: Axes, series: list[Series], group: Group) -> None:
    """Draw chance and the train length, and name the methods of the group that were not run on the task."""
    task, train_length = series[0].model.task, series[0].model.train_length
    axes.axhline(100 * TASKS[task].random_accuracy, color="gray", linestyle=":", linewidth=1.5, label="chance")
    axes.set_xlim(left=0)
    mark_train_lengths(axes, [train_length])
    axes.set(ylim=(-3, 105), xlabel="input length (symbols)")
    run = {item.model.method for item in series}
    if missing := [name for name in dict.fromkeys(item.model.method for item in group.series) if name not in run]:
        text = f"not run: {', '.join(missing)}"
        axes.annotate(text, (0.99, 0.98), xycoords="axes fraction", ha="right", va="top", fontsize=8)
