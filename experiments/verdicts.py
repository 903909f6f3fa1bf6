"""Verdicts on the paper's claims, from paired differences. In: results by seed. Out: judgements. Next: `report.py`.

Both sides of a comparison have the same windows and the same seeds. The verdict is therefore based on their difference,
not on the overlap of two intervals. The difference is uncertain for two reasons: other documents could have been
scored, and other seeds trained. Draw b of the bootstrap is

    difference_b = mean over seeds of difference(documents drawn in b) + t_b * s / sqrt(n)

for n seeds. Documents are drawn with replacement. s is the standard deviation between the seeds' differences, and t_b
is drawn from Student's t distribution with n - 1 degrees of freedom; drawing three seeds with replacement would
underestimate the spread. For step times the units that are drawn are steps, for accuracies they are input lengths.

    comparison   one inequality at one length. Its p-value is the share of draws that contradict it
    pair         the comparisons of two models at all lengths. They are not independent and count once. A pair holds if
                 all its comparisons hold; it is contradicted if one is reversed, after Bonferroni's correction
    claim        holds if all its pairs hold, or the required number of them, after Holm's correction; contradicted if
                 more pairs are contradicted than it allows; otherwise undecided
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from dape_jax.errors import InputError
from experiments.claims import Claim, Less, Result
from experiments.methods import PRESETS

Verdict = Literal["holds", "contradicted", "undecided", "not tested"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
LEVEL = 0.05  # of two-sided tests, and of the intervals
DRAWS = 10_000
MIN_SEEDS = 2  # one seed does not show the spread


@dataclasses.dataclass(frozen=True)
class Sample:
    """Results of a model with one seed at one length, for every unit of the bootstrap.

    Attributes:
        units: unit of each row. Windows of one document have the same unit and are drawn together.
        rows: measured numbers; the value of the sample is a function of their means. One column, or two for delta
            perplexity: nats per token without and with the context before the last train length.
    """

    units: tuple[Any, ...]
    rows: np.ndarray

    @classmethod
    def of_value(cls, value: float) -> "Sample":
        """Return a sample with one unit, of this value."""
        return cls((0,), np.array([[value]]))

    def value(self) -> float:
        """Return the value with every unit counted once."""
        return float(self.values(np.ones((1, len(set(self.units)))))[0])

    def values(self, counts: np.ndarray) -> np.ndarray:
        """Return the value of each draw; `counts` has a row for each draw, and a column for each unit."""
        unique, which = np.unique(np.array(self.units), return_inverse=True)
        sums, sizes = np.zeros((len(unique), self.rows.shape[1])), np.bincount(which)
        np.add.at(sums, which, self.rows)
        means = (counts @ sums) / (counts @ sizes)[:, None]
        return means[:, 0] if means.shape[1] == 1 else np.exp(means[:, 0]) - np.exp(means[:, 1])


# Maps one side of a comparison to its samples by seed; the largest of them counts. Empty if there is no result.
Lookup = Callable[[Result], dict[int, list[Sample]]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference low - factor * high of a comparison: in per cent of the latter for perplexities and times.

    `p_less` is the p-value of "the difference is not below 0", `p_more` of "it is not above 0". They and the interval
    are NaN with one seed. If a model diverged, the interval is NaN, and the p-values are 0 or 1.
    """

    less: Less
    mean: float
    low: float
    high: float
    p_less: float
    p_more: float
    num_seeds: int  # seeds of both sides
    unit: str  # "%" or ""

    def __str__(self):
        return format_difference(self.mean, self.low, self.high, self.unit)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of a report."""
        return {"difference": self.mean, "low": self.low, "high": self.high, "seeds": self.num_seeds}


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Verdict on a claim and on its pairs, each of two models at all lengths.

    The weakest comparison of a pair has the largest p-value. `deciding` is that of the required pairs, or None if the
    claim is not tested.
    """

    verdict: Verdict
    pairs: tuple[tuple[Difference, Verdict], ...]  # the weakest comparison of each, and its verdict
    deciding: Difference | None

    def num_pairs(self, verdict: Verdict) -> int:
        """Return the number of pairs with a verdict."""
        return sum(found == verdict for _, found in self.pairs)


def judge(claim: Claim, lookup: Lookup, metric: str) -> Judgement:
    """Return the verdict on a claim.

    It is "not tested" unless the claim has comparisons, and all of them have results of `MIN_SEEDS` seeds.
    """
    by_models: dict[Any, list[Difference]] = {}
    for each in claim.comparisons:
        found = difference(each, lookup, metric)
        if found is None or found.num_seeds < MIN_SEEDS:
            return Judgement("not tested", (), None)
        models = (side.models if isinstance(side, Result) else side for side in (each.low, each.high))
        by_models.setdefault(tuple(models), []).append(found)
    if not by_models:
        return Judgement("not tested", (), None)
    pairs = by_models.values()
    holds = holm([max(each.p_less for each in pair) for pair in pairs])
    contradicted = holm([min(1.0, len(pair) * min(each.p_more for each in pair)) for pair in pairs])
    needed = len(pairs) if claim.at_least is None else claim.at_least
    verdict = _verdict(sum(holds) >= needed, sum(contradicted) > len(pairs) - needed)
    weakest = [max(pair, key=_weakness) for pair in pairs]
    of_pairs: list[Verdict] = [_verdict(*found) for found in zip(holds, contradicted, strict=True)]
    return Judgement(verdict, tuple(zip(weakest, of_pairs, strict=True)), sorted(weakest, key=_weakness)[needed - 1])


def _weakness(found: Difference) -> tuple[float, float]:
    return found.p_less, found.mean


def _verdict(holds: bool, contradicted: bool) -> Verdict:
    return "holds" if holds else "contradicted" if contradicted else "undecided"


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


def difference(less: Less, lookup: Lookup, metric: str) -> Difference | None:
    """Return the difference of a comparison, or None if the two sides have no seed in common.

    Raises:
        InputError: the two sides were scored on different windows.
    """
    sides = [lookup(side) if isinstance(side, Result) else side for side in (less.low, less.high)]
    measured = [side for side in sides if isinstance(side, dict)]
    seeds = sorted(set.intersection(*map(set, measured)))
    if not seeds:
        return None
    units, *others = [sample.units for side in measured for seed in seeds for sample in side[seed]]
    if any(each != units for each in others):
        raise InputError(f"{less.low} and {less.high}: were scored on different windows and cannot be compared")
    rng = np.random.default_rng(0)
    counts = _draw(rng, len(set(units)))
    drawn, found = np.zeros(DRAWS), np.zeros(len(seeds))
    low = high = p_less = p_more = math.nan
    with np.errstate(all="ignore"):  # models that diverged
        for index, seed in enumerate(seeds):
            one, other = (_side(side, seed, counts, metric) for side in sides)
            one_minus_other = one - other - math.log(less.factor) if is_log(metric) else one - less.factor * other
            found[index], drawn = one_minus_other[-1], drawn + one_minus_other[:-1] / len(seeds)
        mean = float(np.mean(found))
        if not np.isfinite(found).all():  # NaN cannot be compared; infinite losses can
            p_less, p_more = float(not (found < 0).all()), float(not (found > 0).all())
        elif len(seeds) > 1:
            drawn += rng.standard_t(len(seeds) - 1, DRAWS) * np.std(found, ddof=1) / math.sqrt(len(seeds))
            low, high = map(float, np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2]))
            p_less, p_more = (float((1 + np.sum(reversed_)) / (1 + DRAWS)) for reversed_ in (drawn >= 0, drawn <= 0))
    unit = "%" if is_log(metric) else ""
    if unit:
        mean, low, high = (100 * (math.inf if n > 700 else math.expm1(n)) for n in (mean, low, high))
    return Difference(less, mean, low, high, p_less, p_more, len(seeds), unit)


def _draw(rng: np.random.Generator, num_units: int) -> np.ndarray:
    """Return the number of times that each unit is drawn with replacement, [DRAWS, num_units]."""
    chosen = rng.integers(num_units, size=(DRAWS, num_units), dtype=np.int32) + num_units * np.arange(DRAWS)[:, None]
    return np.bincount(chosen.ravel(), minlength=DRAWS * num_units).reshape(DRAWS, num_units).astype(np.float64)


def is_log(metric: str) -> bool:
    """Return whether values of a metric are compared by their ratio."""
    return metric in ("perplexity", "step_ms")


def describe(less: Less, metric: str, preset: str = "paper", *, with_length: bool = True) -> str:
    """Return the two sides of a comparison, "against" for a ratio, with the lengths and sizes of a preset.

    The paper's 125m, the usual size, is left out. Without lengths a model that is compared with itself is named once.
    """
    divisor, sizes = PRESETS[preset].length_divisor, PRESETS[preset].sizes

    def name(side: Result | float) -> str:
        if not isinstance(side, Result):
            return f"{side:g}"
        (method, size, task, train_length), *others = side.models
        if task:
            methods = (model.method for model in side.models)
            return f"{' or '.join(methods) if len(others) < 2 else f'the best of {1 + len(others)}'} on {task}"
        model = f"{method}{'' if size == '125m' else f' {sizes[size]}'} T{train_length // divisor}"
        return model if side.length is None or not with_length else f"{model} at {side.length // divisor}"

    factor = "" if less.factor == 1 else f"{less.factor:.2f} x "
    word = "against" if is_log(metric) else "minus"
    low, high = name(less.low), name(less.high)
    return low if low == f"{factor}{high}" else f"{low} {word} {factor}{high}"


def format_difference(mean: float, low: float, high: float, unit: str) -> str:
    """Return a difference with its interval, if it has one."""
    digits, unit = (1, f" {unit}") if unit else (2, "")
    return f"{mean:+.{digits}f}{unit}" + ("" if math.isnan(low) else f" [{low:+.{digits}f}, {high:+.{digits}f}]")


def _side(side: Any, seed: int, counts: np.ndarray, metric: str) -> np.ndarray:
    """Return the value of a side for each draw, followed by the value with every unit counted once."""
    if not isinstance(side, dict):
        return np.full(DRAWS + 1, math.log(side) if is_log(metric) else side)
    values = [np.append(sample.values(counts), sample.value()) for sample in side[seed]]
    return np.max(values, axis=0)
