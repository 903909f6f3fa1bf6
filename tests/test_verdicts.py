"""Test the verdicts: intervals have their level, verdicts follow from differences and count independent pairs."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dape_jax.errors import InputError
from experiments import report, runs, verdicts
from experiments.claims import Claim, Less, Model, cell, score
from experiments.verdicts import Sample, describe, difference, holm, judge

pytestmark = pytest.mark.extra

A, B = cell("a", 16, 16), cell("b", 16, 16)


def lookup_of(values: dict):
    """Return a lookup of constant values by seed."""
    return lambda side: {seed: [Sample.of_value(value)] for seed, value in values[side].items()}


def verdicts_of(judgement: verdicts.Judgement) -> list[str]:
    return [verdict for _, verdict in judgement.pairs]


def noisy(rng: np.random.Generator, mean: float, of_seeds: float, of_documents: float, seeds: int = 3, units: int = 40):
    """Return samples by seed, with an effect of each document that seeds share and an effect of each seed."""
    documents = of_documents * rng.standard_normal(units)
    return {
        seed: [Sample(tuple(range(units)), (mean + documents + of_seeds * rng.standard_normal())[:, None])]
        for seed in range(seeds)
    }


# ---- one comparison


@pytest.mark.parametrize(
    ("of_seeds", "of_documents", "seeds"),
    [
        (0.05, 0.5, 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.1, 0, 3), (0, 0.5, 3), (0.1, 0.1, 5))),
    ],
)
def test_intervals_cover_the_truth_as_often_as_they_say(of_seeds, of_documents, seeds):
    """Simulate 400 studies with noise from seeds, documents and both. An 80 % or a 99.9 % interval would fail."""
    rng = np.random.default_rng(0)
    covered, beyond = 0, 0
    for _ in range(400):
        low = noisy(rng, 1.0, of_seeds, of_documents, seeds)
        base = {seed: [Sample(sample.units, np.ones_like(sample.rows))] for seed, (sample,) in low.items()}
        found = difference(Less(A, B), {A: low, B: base}.__getitem__, "perplexity")
        covered += found.low <= 0 <= found.high
        beyond += min(found.p_less, found.p_more) < 0.05 / 2
    assert 0.92 <= covered / 400 <= 0.985
    assert beyond == pytest.approx(400 - covered, abs=4)


def test_noise_that_both_sides_share_cancels():
    """Differences are paired by window and seed: hard documents and lucky seeds are those of both sides."""
    rng = np.random.default_rng(0)
    base = noisy(rng, 1.0, 0.3, 1.0)
    better = {seed: [Sample(sample.units, sample.rows - 0.01)] for seed, (sample,) in base.items()}
    found = difference(Less(A, B), {A: better, B: base}.__getitem__, "perplexity")
    assert found.num_seeds == 3
    assert (found.mean, found.low, found.high) == (pytest.approx(100 * math.expm1(-0.01)),) * 3
    assert found.p_less < 0.001 < 0.999 < found.p_more
    unpaired = {seed + 1: samples for seed, samples in better.items()}  # of seeds 1 and 2 of the other side
    other = difference(Less(A, B), {A: unpaired, B: base}.__getitem__, "perplexity")
    assert other.num_seeds == 2
    assert other.high - other.low > 0.1


def test_windows_of_a_document_are_drawn_together():
    """Four copies of each window as four windows of its document give the same interval, and a narrower one if not."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((30, 1)) - 0.3
    zero = {A: {}, B: {}}

    def width(units, rows):
        zero[A] = {seed: [Sample(units, rows)] for seed in (0, 1)}
        zero[B] = {seed: [Sample(units, np.zeros_like(rows))] for seed in (0, 1)}
        found = difference(Less(A, B), zero.__getitem__, "perplexity")
        return found.high - found.low

    once = width(tuple(range(30)), rows)
    copies = np.repeat(rows, 4, axis=0)
    assert width(tuple(np.repeat(np.arange(30), 4).tolist()), copies) == pytest.approx(once)
    assert width(tuple(range(120)), copies) < 0.6 * once


def test_delta_perplexity_is_a_difference_of_perplexities():
    rows = np.log([[4.0, 2.0], [4.0, 2.0]])
    assert Sample((0, 1), rows).value() == pytest.approx(2.0)
    assert Sample((0, 1), rows[:, ::-1]).value() == pytest.approx(-2.0)


def test_sides_scored_on_other_windows_are_refused():
    values = {A: {0: [Sample((0, 1), np.ones((2, 1)))]}, B: {0: [Sample((0, 2), np.ones((2, 1)))]}}
    with pytest.raises(InputError, match="different windows"):
        difference(Less(A, B), values.__getitem__, "perplexity")


@pytest.mark.parametrize(
    ("of_low", "of_high", "verdict"),
    [
        (6.0, math.inf, "holds"),
        (math.inf, 6.0, "contradicted"),
        (math.inf, math.inf, "undecided"),
        (math.inf, math.nan, "undecided"),
        (1.0, math.nan, "undecided"),
        (math.nan, 1.0, "undecided"),
        (6.0, 1.7e308, "holds"),
    ],
)
def test_a_model_that_diverged_is_worse_than_any_other(of_low: float, of_high: float, verdict: str):
    """Between two of them nothing is shown, whatever the factor; NaN shows nothing."""
    logs = {A: dict.fromkeys((0, 1), math.log(of_low)), B: dict.fromkeys((0, 1), math.log(of_high))}
    for factor in (0.5, 1.0, 2.0):
        judgement = judge(Claim([Less(A, B, factor)]), lookup_of(logs), "perplexity")
        assert judgement.verdict == verdict
        assert len(str(judgement.deciding)) < 40


# ---- several comparisons


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0001, 0.002, 0.004, 0.006, 0.009, 0.02, 0.03, 0.5, math.nan]), max_size=6))
def test_holm_rejects_as_many_as_its_definition(p_values):
    """Compare with the definition: reject while the k-th smallest p-value is at most level / (m - k + 1)."""
    ordered = sorted(p_values, key=lambda p: (math.isnan(p), p))
    number = 0
    while number < len(ordered) and ordered[number] <= verdicts.LEVEL / 2 / (len(ordered) - number):
        number += 1
    rejected = holm(p_values)
    assert sum(rejected) == number or any(map(math.isnan, p_values))
    assert {p for p, is_rejected in zip(p_values, rejected, strict=True) if is_rejected} <= set(ordered[:number])


def test_all_lengths_of_two_models_are_one_pair():
    """It holds if it does at every length. Another train length is another pair."""
    cells = {
        (method, trained, at): cell(method, trained, at)
        for method in "ab"
        for trained in (16, 32)
        for at in (32, 64, 128)
    }
    values = {cell: {0: 1.0, 1: 1.0001, 2: 1.0} for cell in cells.values()}
    for (method, *_), at in cells.items():
        if method == "a":
            values[at] = {0: 0.5, 1: 0.5001, 2: 0.5}
    better = Claim([Less(cells["a", t, at], cells["b", t, at]) for t in (16, 32) for at in (32, 64, 128)])
    judgement = judge(better, lookup_of(values), "perplexity")
    assert (judgement.verdict, *verdicts_of(judgement)) == ("holds", "holds", "holds")

    values[cells["a", 32, 64]] = {0: 0.5, 1: 1.5, 2: 1.0}  # one length of one pair is noisy
    judgement = judge(better, lookup_of(values), "perplexity")
    assert (judgement.verdict, *verdicts_of(judgement)) == ("undecided", "holds", "undecided")
    names = [describe(weakest.less, "perplexity", with_length=False) for weakest, _ in judgement.pairs]
    assert names == ["a T16 against b T16", "a T32 against b T32"]
    itself = Less(cells["a", 16, 64], cells["a", 16, 32])
    assert describe(itself, "perplexity", with_length=False) == "a T16"
    assert describe(itself, "perplexity") == "a T16 at 64 against a T16 at 32"
    assert describe(judgement.deciding.less, "perplexity") == "a T32 at 64 against b T32 at 64"
    assert describe(Less(0.0, cell("a", 128, 256)), "delta", "small") == "0 minus a T32 at 64"
    larger = Less(cell("a", 128, 256, "350m"), cell("b", 128, 256, "350m"), 1.5)
    assert describe(larger, "step_ms") == "a 350m T128 at 256 against 1.50 x b 350m T128 at 256"
    assert describe(larger, "step_ms", "small") == "a s T32 at 64 against 1.50 x b s T32 at 64"
    assert judge(dataclasses.replace(better, at_least=1), lookup_of(values), "perplexity").verdict == "holds"

    values[cells["a", 32, 64]] = {0: 2.0, 1: 2.0001, 2: 2.0}  # and now it is reversed
    judgement = judge(better, lookup_of(values), "perplexity")
    assert (judgement.verdict, *verdicts_of(judgement)) == ("contradicted", "holds", "contradicted")
    group = runs.Group("fig2", "paper", "text", {}, [])
    lines = report._parts([(group, report._claim(group, "better", better, judgement))])
    assert lines == ["- fig2 paper, text, better. Holds: a T16 against b T16; contradicted: a T32 against b T32."]
    assert judge(dataclasses.replace(better, at_least=1), lookup_of(values), "perplexity").verdict == "holds"


def test_comparisons_are_of_the_same_seed_and_need_it_on_both_sides():
    values = {A: {0: 1.0, 1: 5.0, 2: 3.0, 7: 9.0}, B: {0: 1.1, 1: 5.1, 2: 3.1, 3: 0.1}}
    assert judge(Claim([Less(A, B)]), lookup_of(values), "perplexity").verdict == "holds"
    for side in (A, B):
        one = values | {side: {0: values[side][0]}}
        assert judge(Claim([Less(A, B)]), lookup_of(one), "perplexity").verdict == "not tested"
    assert judge(Claim([]), lookup_of(values), "perplexity").verdict == "not tested"
    missing = Claim([Less(A, B), Less(cell("c", 16, 16), B)])
    assert judge(missing, lookup_of(values | {cell("c", 16, 16): {}}), "perplexity").verdict == "not tested"


def test_a_constant_and_a_factor_are_compared_by_ratio_or_by_difference():
    values = lookup_of({A: {0: math.log(2.0)}, B: {0: math.log(4.0)}})
    for less, expected in ((Less(A, 2.5), 2 / 2.5), (Less(A, B, 0.25), 2 / (0.25 * 4)), (Less(1.0, A), 1 / 2)):
        found = difference(less, values, "perplexity")
        assert found.mean == pytest.approx(100 * (expected - 1))
        assert str(found) == f"{100 * (expected - 1):+.1f} %"
    found = difference(Less(0.0, A), lookup_of({A: {0: 3.0}}), "delta")
    assert found.mean == -3.0


def test_the_best_of_some_methods_is_taken_in_each_draw_and_needs_all():
    series = [
        runs.Series(
            Model(method, "", "parity_check", 40),
            {},
            {seed: {None: Sample.of_value(value)} for seed, value in enumerate(values)},
        )
        for method, values in (("rope", (1.0, 2.0)), ("kerple", (3.0, 1.0, 9.0)))
    ]
    lookup = runs.lookup_in(runs.Group("table6", "small", "", {}, series))

    def best(*methods: str) -> dict[int, float]:
        found = lookup(score(methods, "parity_check"))
        return {seed: max(sample.value() for sample in samples) for seed, samples in found.items()}

    assert best("kerple") == {0: 3.0, 1: 1.0, 2: 9.0}
    assert best("rope", "kerple") == {0: 3.0, 1: 2.0}
    assert best("rope", "fire") == {}
    assert lookup(score(("rope",), "even_pairs")) == {}
    found = difference(Less(score(("rope", "kerple"), "parity_check"), 0.0), lookup, "accuracy")
    assert found.mean == 2.5
