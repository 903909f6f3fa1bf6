"""Draw gain, cost and learning of DAPE over all experiments. In: groups of finished runs. Next: `report.py`.

    gain       perplexity with DAPE divided by perplexity without, at 1, 8 and 32 times the train length
    cost       perplexity at 8 times the train length by the FLOPs of training, and by the measured time of a step
    learning   validation loss at the train length by the steps of training, and by its time

Sizes and lengths are the paper's, as in `groups.Group`.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from dape_jax.evaluation.figures import distinct_colors, drawn, log_y_axis
from experiments.catalogue import EXPERIMENTS, METHODS, OVERRIDES, Cell, Experiment, Less
from experiments.groups import Group, Series, lookup_in
from experiments.verdicts import difference

FACTORS = (1, 8, 32)  # evaluation length / train length
COST_FACTOR = 8
COST_LIMIT = 3  # times Kerple's perplexity: the upper end of the figure of costs
# Kerple trained for more steps: a step takes as long as Kerple's.
_LONGER = [method for method, changes in OVERRIDES.items() if set(changes) == {"train.num_steps"}]
# Methods in the figure of learning: with DAPE, and without it at about the same cost.
_COMPARED = (*EXPERIMENTS["cost"].methods, *EXPERIMENTS["equal_time"].methods)
# Methods that the figure of costs omits: changes of DAPE, and other learning rates.
_SIDE = ("variants", "rates")
_OMITTED = {method for name in _SIDE for method in EXPERIMENTS[name].methods} - {
    method for name, experiment in EXPERIMENTS.items() if name not in _SIDE for method in experiment.methods
}
MARKERS = "os^Dv<>PX*pd+x1234hH8"


@dataclasses.dataclass(frozen=True)
class Gain:
    """Ratio of perplexities with DAPE and without, at one length, with its 95 % interval (NaN with one seed).

    `where` is the preset, the text and our train length.
    """

    method: str
    base: str
    where: str
    factor: int
    ratio: float
    low: float
    high: float
    num_seeds: int


def base_of(method: str) -> str | None:
    """Return the method without DAPE, or None if the catalogue has no such method."""
    processor, _, rest = method.partition("-")
    return rest if processor.startswith("dape") and rest in METHODS else None


def gains(groups: Sequence[Group]) -> list[Gain]:
    """Return the gain of every method with DAPE on every text, once for runs that several experiments share."""
    found: dict[tuple[str, str, int], Gain] = {}
    for group in groups:
        experiment = EXPERIMENTS[group.experiment]
        if not _is_comparable(experiment):
            continue
        lookup = lookup_in(group)
        for series in group.series:
            base, where = base_of(series.method), _where(group, series)
            if base is None:
                continue
            for factor in FACTORS:
                at = (series.train_length, series.train_length * factor, series.size)
                less = Less(Cell(series.method, *at), Cell(base, *at))
                each = difference(less, lookup, experiment.metric)
                key = (series.method, where, factor)
                if each is not None and (key not in found or each.num_seeds > found[key].num_seeds):
                    ratio, low, high = (math.exp(min(value, 700)) for value in (each.mean, each.low, each.high))
                    found[key] = Gain(series.method, base, where, factor, ratio, low, high, each.num_seeds)
    return list(found.values())


def _is_comparable(experiment: Experiment) -> bool:
    """Return whether an experiment measures perplexity with the preset's data and settings."""
    return experiment.metric == "perplexity" and not experiment.overrides and experiment.step_tokens is None


def _where(group: Group, series: Series) -> str:
    return f"{group.title}, {_trained_at(group, series)}"


def _trained_at(group: Group, series: Series) -> str:
    """Return our size, unless it is the smallest, and our train length."""
    size = "" if series.size == "125m" else f"{group.sizes[series.size]}, "
    return f"{size}T = {series.train_length // group.divisor}"


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
    panels[0].set_yticks(list(labels), list(labels.values()), fontsize=7)
    panels[0].set_ylim(borders[-1], 0)
    panels[1].set_xlabel("perplexity with DAPE / perplexity without (95 % interval; below 1, DAPE is better)")
    handles = [panels[0].plot([], [], marker="o", color=color, label=where)[0] for where, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(places)), fontsize=8)
    return figure


@dataclasses.dataclass(frozen=True)
class Cost:
    """Perplexity of a model at `COST_FACTOR` times its train length by seed, and the cost of its training.

    `flops` and `time` of the training are relative to Kerple's. `time` is the number of steps times the time of a step,
    where the steps of all methods were timed in turns; it is None if they were not timed.
    """

    method: str
    where: str
    perplexities: tuple[float, ...]
    flops: float
    time: float | None


def step_times(groups: Sequence[Group]) -> dict[tuple[str, str, str], float]:
    """Return the milliseconds of a step, measured in turns, by preset, size with train length, and method.

    Times of steps with another batch than the runs' (table 7) are omitted.
    """
    found: dict[tuple[str, str, str], float] = {}
    for group in groups:
        experiment = EXPERIMENTS[group.experiment]
        for series in group.series if experiment.metric == "step_ms" and experiment.step_batch is None else ():
            mean = fmean(series.over_seeds(series.train_length))
            for method in (series.method, *(_LONGER if series.method == "kerple" else ())):
                found[group.preset, _trained_at(group, series), method] = mean
    return found


def costs(groups: Sequence[Group]) -> list[Cost]:
    """Return the cost of every method on every text for which its FLOPs and Kerple's FLOPs are recorded."""
    step_ms = step_times(groups)
    trained: dict[tuple[str, str], tuple[tuple[float, ...], Series, Group]] = {}
    for group in groups:
        experiment = EXPERIMENTS[group.experiment]
        for series in group.series:
            if _is_comparable(experiment) and series.train_flops is not None:
                values = tuple(series.over_seeds(COST_FACTOR * series.train_length))
                key = (_where(group, series), series.method)
                if values and (key not in trained or len(values) > len(trained[key][0])):
                    trained[key] = (values, series, group)
    found = []
    for (where, method), (values, series, group) in trained.items():
        if (where, "kerple") not in trained:
            continue
        _, base, _ = trained[where, "kerple"]
        assert series.train_flops is not None, method
        assert base.train_flops is not None, where
        place = (group.preset, _trained_at(group, series))
        time = None
        if {(*place, method), (*place, "kerple")} <= set(step_ms):
            time = step_ms[*place, method] * series.num_steps / (step_ms[*place, "kerple"] * base.num_steps)
        found.append(Cost(method, where, values, series.train_flops / base.train_flops, time))
    return found


def cost_figure(found: Sequence[Cost]) -> Figure | None:
    """Draw perplexity by cost: for each text and train length a panel for FLOPs and, if measured, one for time.

    Perplexities above `COST_LIMIT` times Kerple's are drawn there with open markers, so that the rest can be compared.
    Changes of DAPE (`variants`), other learning rates (`rates`) and diverged models are omitted; None without others.
    """
    found = [each for each in found if each.method not in _OMITTED and math.isfinite(fmean(each.perplexities))]
    if not found:
        return None
    points: dict[tuple[str, str], list[tuple[Cost, float]]] = {}
    for each in found:
        points.setdefault((each.where, "FLOPs"), []).append((each, each.flops))
        if each.time is not None:
            points.setdefault((each.where, "time"), []).append((each, each.time))
    figure, panels = _panels(points, f"perplexity at {COST_FACTOR} x the train length")
    styles = styles_of(list(dict.fromkeys(each.method for each in found)))
    limits = {each.where: COST_LIMIT * fmean(each.perplexities) for each in found if each.method == "kerple"}
    for (place, name), axes in panels.items():
        limit = limits[place] if place in limits else math.inf
        for each, cost in points[place, name]:
            color, marker = styles[each.method]
            mean, low, high = (min(f(each.perplexities), limit) for f in (fmean, min, max))
            axes.plot([cost, cost], [low, high], color=color, linewidth=1)
            filled = "full" if mean < limit else "none"
            axes.plot([cost], [mean], marker=marker, fillstyle=filled, color=color, alpha=0.8, linestyle="")
        log_y_axis(axes)
        axes.set_xlabel(f"{name} of training, relative to Kerple")
        axes.grid(alpha=0.3, which="both")
    handles = [
        figure.axes[0].plot([], [], color=color, marker=marker, linestyle="", label=method)[0]
        for method, (color, marker) in styles.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    return figure


def _panels(keys: Collection[tuple[str, str]], label: str) -> tuple[Figure, dict[tuple[str, str], Axes]]:
    """Return a figure and its panels: one for each place and quantity, places with more quantities first.

    The panels of a place are side by side and share the vertical axis, with its label on the first.
    """
    quantities: dict[str, list[str]] = {}
    for place, quantity in keys:
        quantities.setdefault(place, []).append(quantity)
    ordered = sorted(quantities, key=lambda place: -len(quantities[place]))
    num_columns = min(4, len(keys))
    num_rows = math.ceil(len(keys) / num_columns)
    figure = Figure(figsize=(2 + 3.6 * num_columns, 3.4 * num_rows), layout="constrained")
    free = iter(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    panels: dict[tuple[str, str], Axes] = {}
    for place in ordered:
        of_place = {(place, quantity): next(free) for quantity in quantities[place]}
        panels |= of_place
        first, *others = of_place.values()
        first.set_ylabel(label)
        for axes in others:
            axes.sharey(first)
        for axes in (first, *others):
            axes.set_title(place, fontsize=9)
    for axes in free:
        axes.remove()
    return figure, panels


@dataclasses.dataclass(frozen=True)
class Learned:
    """Validation loss of a model after a training step, at its train length.

    `minutes` is the number of steps times the time of one, as in `Cost`; None if the method was not timed.
    """

    method: str
    where: str
    seed: int
    step: int
    minutes: float | None
    nats: float


def learning(groups: Sequence[Group]) -> list[Learned]:
    """Return the validation losses of every model on every text, once for runs that several experiments share."""
    found: dict[tuple[str, str, int, int], Learned] = {}
    step_ms = step_times(groups)
    for group in groups:
        for series in group.series if _is_comparable(EXPERIMENTS[group.experiment]) else ():
            method, where = series.method, _where(group, series)
            ms = step_ms.get((group.preset, _trained_at(group, series), method))
            for seed, curve in series.curves.items():
                for step, nats in curve.items():
                    minutes = None if ms is None else step * ms / 60_000
                    found.setdefault((method, where, seed, step), Learned(method, where, seed, step, minutes, nats))
    return list(found.values())


def learning_figure(found: Sequence[Learned]) -> Figure | None:
    """Draw the losses of Kerple and of DAPE on Kerple on each text, at each train length; None without losses."""
    shown = [each for each in found if each.method in _COMPARED]
    if not shown:
        return None
    curves: dict[tuple[str, str], dict[tuple[str, int], list[Learned]]] = {}
    for each in shown:
        for quantity in ("step",) if each.minutes is None else ("step", "minutes"):
            of_panel = curves.setdefault((each.where, quantity), {})
            of_panel.setdefault((each.method, each.seed), []).append(each)
    figure, panels = _panels(curves, "validation loss (nats per token)")
    methods = list(dict.fromkeys(each.method for each in shown))
    colors = dict(zip(methods, distinct_colors(len(methods)), strict=True))
    for (place, quantity), axes in panels.items():
        for (method, _), curve in curves[place, quantity].items():
            points = [getattr(each, quantity) for each in curve], drawn(each.nats for each in curve)
            axes.plot(*points, marker="o", markersize=3, linewidth=1, color=colors[method])
        axes.set_xlabel("step" if quantity == "step" else "time of the training steps (minutes)")
        axes.grid(alpha=0.3)
    handles = [figure.axes[0].plot([], [], color=color, label=method)[0] for method, color in colors.items()]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    return figure


def styles_of(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour for each method's positions, as in "kerple", and a marker for the rest of its name."""
    names = {}
    for method in methods:
        rest = method.partition("-")[2] if method.startswith("dape") else method
        positions = min((name for name in METHODS if rest == name or rest.startswith(f"{name}-")), key=len)
        names[method] = (positions, method.replace(positions, ""))
    colors, markers = (list(dict.fromkeys(each)) for each in zip(*names.values(), strict=True))
    return {
        method: (f"C{colors.index(positions) % 10}", MARKERS[markers.index(variant) % len(MARKERS)])
        for method, (positions, variant) in names.items()
    }
