"""Gain of DAPE over all experiments: perplexity with it divided by perplexity without. Next: `report.py`."""

import dataclasses
import math
from collections.abc import Sequence

from experiments.catalogue import EXPERIMENTS
from experiments.methods import METHODS, Cell, Less
from experiments.runs import Group, lookup_in
from experiments.verdicts import difference

FACTORS = (1, 8, 32)  # evaluation length / train length


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
    """Return the gain of every method with DAPE on every text, once for runs that several experiments share.

    Experiments with other data or settings than the preset's are left out.
    """
    found: dict[tuple[str, str, int], Gain] = {}
    for group in groups:
        experiment, lookup = EXPERIMENTS[group.experiment], lookup_in(group)
        if experiment.metric != "perplexity" or experiment.overrides or experiment.step_tokens is not None:
            continue
        for series in (series for series in group.series if base_of(series.method) is not None):
            size = "" if series.size == "125m" else f"{group.sizes[series.size]}, "
            where = f"{group.title}, {size}T = {series.train_length // group.divisor}"
            base = str(base_of(series.method))
            for factor in FACTORS:
                at = (series.train_length, series.train_length * factor, series.size)
                each = difference(Less(Cell(series.method, *at), Cell(base, *at)), lookup, experiment.metric)
                key = (series.method, where, factor)
                if each is not None and (key not in found or each.num_seeds > found[key].num_seeds):
                    ratio, low, high = (math.exp(min(value, 700)) for value in (each.mean, each.low, each.high))
                    found[key] = Gain(series.method, base, where, factor, ratio, low, high, each.num_seeds)
    return list(found.values())
