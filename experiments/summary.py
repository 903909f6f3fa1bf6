"""Gain and cost of DAPE over all experiments. In: groups of finished runs. Next: `plots.py`, `report.py`.

    gain   perplexity with DAPE divided by perplexity without, at 1, 8 and 32 times the train length
    cost   perplexity at 8 times the train length by the FLOPs of training, and by the measured time of a step

Sizes and lengths are the paper's, as in `runs.Group`.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import fmean

from experiments.catalogue import EXPERIMENTS
from experiments.methods import METHODS, OVERRIDES, Cell, Experiment, Less
from experiments.runs import Group, Series, lookup_in
from experiments.verdicts import difference

FACTORS = (1, 8, 32)  # evaluation length / train length
COST_FACTOR = 8
# Kerple trained for more steps: a step takes as long as Kerple's.
_LONGER = [method for method, changes in OVERRIDES.items() if set(changes) == {"train.num_steps"}]


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
