"""Verdicts on the paper's claims, from paired differences. In: results by seed. Out: judgements. Next: `report.py`.

Both sides of a comparison are measured on the same tokens and with the same seeds, so their difference is judged, and
not the overlap of two intervals. Its noise has two sources: the documents that were scored, and the seeds of the runs.
Draw b of the bootstrap is

    difference_b = mean over seeds of difference(documents drawn in b) + t_b * s / sqrt(n)

for n seeds: documents are drawn with replacement, s is the standard deviation between the seeds' differences, and t_b
is drawn from Student's t distribution with n - 1 degrees of freedom, because three seeds drawn with replacement show
too little of what other seeds would give. Times of steps have turns instead of documents, accuracies have lengths.

    comparison   one inequality at one length; its p-value is the share of draws that deny it
    pair         all comparisons of the same two models, at all lengths: these are not independent, so a pair counts
                 once. It holds if all its comparisons do, and is contradicted if one is, after Bonferroni's correction
    claim        all its pairs hold, or as many as it names, after Holm's correction: "holds". So many are contradicted
                 that it cannot hold: "contradicted". Otherwise "undecided"
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from dape_jax.errors import InputError
from dape_jax.experiments.catalogue import Cell, Claim, Less, Score

Verdict = Literal["holds", "contradicted", "undecided", "not tested"]
LEVEL = 0.05  # of two-sided tests, and of the intervals
DRAWS = 10_000
MIN_SEEDS = 2  # one seed does not show the spread


@dataclasses.dataclass(frozen=True)
class Sample:
    """Results of a model with one seed at one length, for units that can be drawn again.

    Attributes:
        units: name of the unit of each row: windows of one document are drawn together.
        rows: numbers whose means over rows give the value: one column, or for delta perplexity two, the nats per token
            without and with the context before the last train length.
    """

    units: tuple[Any, ...]
    rows: np.ndarray

    @classmethod
    def of_value(cls, value: float) -> "Sample":
        """Return a sample of which only the value is known."""
        return cls((0,), np.array([[value]]))

    def value(self) -> float:
        """Return the value of all rows."""
        return float(self.values(np.ones((1, len(set(self.units)))))[0])

    def values(self, counts: np.ndarray) -> np.ndarray:
        """Return the value of each draw; `counts` has a row for each draw, and a column for each unit."""
        unique, which = np.unique(np.array(self.units), return_inverse=True)
        sums, sizes = np.zeros((len(unique), self.rows.shape[1])), np.bincount(which)
        np.add.at(sums, which, self.rows)
        means = (counts @ sums) / (counts @ sizes)[:, None]
        return means[:, 0] if means.shape[1] == 1 else np.exp(means[:, 0]) - np.exp(means[:, 1])


# From a side of a comparison to its samples by seed, of which the largest value counts; empty if there is no result.
Lookup = Callable[[Cell | Score], dict[int, list[Sample]]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """low - factor * high of a comparison; of logarithms for perplexities and times.

    `p_less` and `p_more` are the p-values of "it is not below 0" and "it is not above 0". With one seed there is no
    interval.
    """

    less: Less
    mean: float
    low: float
    high: float
    p_less: float
    p_more: float


@dataclasses.dataclass(frozen=True)
class Pair:
    """The comparisons of two models at all lengths, with the p-values of all of them together."""

    differences: tuple[Difference, ...]

    @property
    def p_holds(self) -> float:
        """Return the p-value of "not all comparisons hold"."""
        return max(each.p_less for each in self.differences)

    @property
    def p_contradicted(self) -> float:
        """Return the p-value of "no comparison is reversed"."""
        return min(1.0, len(self.differences) * min(each.p_more for each in self.differences))

    @property
    def weakest(self) -> Difference:
        """Return the comparison that is furthest from holding."""
        return max(self.differences, key=lambda each: (each.p_less, each.mean))


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Verdict on a claim, with the numbers of its pairs that hold and that are contradicted.

    `weakest` is the deciding comparison in words: of the pairs that the claim needs, the one that is furthest from
    holding.
    """

    claim: str
    verdict: Verdict
    holding: int
    contradicted: int
    pairs: int
    weakest: str
    note: str


def judge(claim: Claim, lookup: Lookup, metric: str, divisor: int = 1, min_seeds: int = MIN_SEEDS) -> Judgement:
    """Return the verdict on a claim; lengths in its text are divided by `divisor`.

    A claim is not tested unless it has comparisons, and all of them have results of `min_seeds` seeds.
    """
    compared = [difference(less, lookup, metric) for less in claim.comparisons]
    grouped: dict[Any, list[Difference]] = {}
    for each, (found, num_seeds) in zip(claim.comparisons, compared, strict=True):
        if num_seeds < min_seeds or found is None:
            return Judgement(claim.text, "not tested", 0, 0, 0, "", claim.note)
        grouped.setdefault(_models(each), []).append(found)
    pairs = [Pair(tuple(each)) for each in grouped.values()]
    if not pairs:
        return Judgement(claim.text, "not tested", 0, 0, 0, "", claim.note)
    holding = sum(holm([pair.p_holds for pair in pairs]))
    contradicted = sum(holm([pair.p_contradicted for pair in pairs]))
    needed = len(pairs) if claim.at_least is None else claim.at_least
    verdict: Verdict = "undecided"
    if holding >= needed:
        verdict = "holds"
    elif contradicted > len(pairs) - needed:
        verdict = "contradicted"
    deciding = sorted((pair.weakest for pair in pairs), key=lambda each: (each.p_less, each.mean))[needed - 1]
    text = describe(deciding, metric, divisor)
    return Judgement(claim.text, verdict, holding, contradicted, len(pairs), text, claim.note)


def holm(p_values: Sequence[float]) -> list[bool]:
    """Return which hypotheses are rejected at half of `LEVEL`, one side of a test, by Holm's step-down procedure.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda each: p_values[each])):
        if not p_values[index] <= LEVEL / 2 / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def difference(less: Less, lookup: Lookup, metric: str) -> tuple[Difference | None, int]:
    """Return the difference of a comparison, or None without results, and the number of seeds that both sides have.

    Raises:
        InputError: the two sides were scored on different windows.
    """
    sides = [lookup(side) if isinstance(side, Cell | Score) else side for side in (less.low, less.high)]
    seeds = sorted(set.intersection(*(set(side) for side in sides if isinstance(side, dict))))
    if not seeds:
        return None, 0
    samples = [sample for side in sides if isinstance(side, dict) for seed in seeds for sample in side[seed]]
    units = samples[0].units
    if any(sample.units != units for sample in samples):
        raise InputError(f"{less.low} and {less.high}: were scored on different windows and cannot be compared")
    rng = np.random.default_rng(0)
    counts = _draw(rng, len(set(units)))
    drawn, found = np.zeros(DRAWS), np.zeros(len(seeds))
    with np.errstate(all="ignore"):  # of models that diverged
        for index, seed in enumerate(seeds):
            low, high = (_side(side, seed, counts, metric) for side in sides)
            if is_log(metric):
                low_minus_high = low - high - math.log(less.factor)
            else:
                low_minus_high = low - less.factor * high
            found[index], drawn = low_minus_high[-1], drawn + low_minus_high[:-1] / len(seeds)
        mean = float(np.mean(found))
        if not np.isfinite(found).all():  # a loss is NaN, which shows nothing, or infinite
            below, above = bool((found < 0).all()), bool((found > 0).all())
            return Difference(less, mean, math.nan, math.nan, float(not below), float(not above)), len(seeds)
        if len(seeds) == 1:
            return Difference(less, mean, math.nan, math.nan, math.nan, math.nan), 1
        drawn += rng.standard_t(len(seeds) - 1, DRAWS) * np.std(found, ddof=1) / math.sqrt(len(seeds))
        low, high = np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2])
        p_less, p_more = (float((1 + np.sum(reversed_)) / (1 + DRAWS)) for reversed_ in (drawn >= 0, drawn <= 0))
    return Difference(less, mean, float(low), float(high), p_less, p_more), len(seeds)


def _draw(rng: np.random.Generator, num_units: int) -> np.ndarray:
    """Return how often each unit is drawn, with replacement, in each of `DRAWS` draws of as many as there are."""
    chosen = rng.integers(num_units, size=(DRAWS, num_units), dtype=np.int32) + num_units * np.arange(DRAWS)[:, None]
    return np.bincount(chosen.ravel(), minlength=DRAWS * num_units).reshape(DRAWS, num_units).astype(np.float64)


def is_log(metric: str) -> bool:
    """Return whether values of a metric are compared by their ratio."""
    return metric in ("perplexity", "step_ms")


def describe(found: Difference, metric: str, divisor: int = 1) -> str:
    """Return a difference in words: in per cent of the higher side, or in units of the metric."""
    factor = "" if found.less.factor == 1 else f"{found.less.factor:.2f} x "
    sides = f"{_name(found.less.low, divisor)} against {factor}{_name(found.less.high, divisor)}"
    numbers = [found.mean, found.low, found.high]
    if is_log(metric):
        mean, low, high = (100 * _expm1(number) for number in numbers)
        return f"{sides}: {mean:+.1f} %" + ("" if math.isnan(low) else f" [{low:+.1f}, {high:+.1f}]")
    mean, low, high = numbers
    return f"{sides}: {mean:+.2f}" + ("" if math.isnan(low) else f" [{low:+.2f}, {high:+.2f}]")


def _expm1(number: float) -> float:
    return math.inf if number > 700 else math.expm1(number)


def _side(side: Any, seed: int, counts: np.ndarray, metric: str) -> np.ndarray:
    """Return the value of a side for each draw, and at the end for all units."""
    if not isinstance(side, dict):
        return np.full(DRAWS + 1, math.log(side) if is_log(metric) else side)
    values = [np.append(sample.values(counts), sample.value()) for sample in side[seed]]
    return np.max(values, axis=0)


def _models(less: Less) -> tuple[Any, Any]:
    """Return what two comparisons of the same models share."""
    low, high = (
        (side.method, side.train_length, side.size) if isinstance(side, Cell) else side
        for side in (less.low, less.high)
    )
    return low, high


def _name(side: Cell | Score | float, divisor: int) -> str:
    if isinstance(side, Score):
        methods = side.methods if len(side.methods) < 3 else (f"the best of {len(side.methods)}",)
        return f"{' or '.join(methods)} on {side.task}"
    if isinstance(side, Cell):
        return f"{side.method} T{side.train_length // divisor} at {side.length // divisor}"
    return f"{side:g}"
