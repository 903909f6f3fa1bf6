"""Study of a continued RoPE model (`experiments/retrofit.py`): its averages, and its paired differences."""

import math
from pathlib import Path

import numpy as np
import pytest

from dape_jax.errors import InputError
from dape_jax.files import read_json
from experiments import retrofit
from experiments.runs import read_lines

LENGTH = 128


def point(nll_nats, documents=None):
    documents = list(range(len(nll_nats))) if documents is None else documents
    return {"nll_nats": {str(LENGTH): list(nll_nats)}, "documents": documents}


def test_perplexity_is_of_the_mean_loss_over_seeds_and_the_first_windows():
    seeds = {0: point([1.0, 3.0, 9.0]), 1: point([2.0, 4.0, 9.0])}
    assert retrofit.perplexities(seeds, (LENGTH,), 2) == {LENGTH: pytest.approx(math.exp(2.5))}


def test_change_is_paired_by_window():
    """Windows differ by much more than the two runs do."""
    rng = np.random.default_rng(0)
    base = {seed: point(rng.uniform(1, 5, 32)) for seed in (0, 1)}
    ours = {seed: point(np.array(each["nll_nats"][str(LENGTH)]) - 0.1) for seed, each in base.items()}
    found = retrofit.change(ours, base, LENGTH)
    expected = 100 * math.expm1(-0.1)
    assert [found[key] for key in ("percent", "low", "high")] == pytest.approx(3 * [expected])
    assert found["seeds"] == {0: pytest.approx(expected), 1: pytest.approx(expected)}


def test_interval_of_a_change_is_over_documents():
    """Windows of one document are drawn together, so that fewer documents give a wider interval."""
    rng = np.random.default_rng(0)
    effects = np.repeat(rng.normal(0, 0.1, 8), 8)

    def width(documents):
        found = retrofit.change({0: point(effects, documents)}, {0: point(np.zeros(64), documents)}, LENGTH)
        return found["high"] - found["low"]

    assert width(list(np.repeat(range(8), 8))) > 1.5 * width(list(range(64)))


def test_other_windows_are_not_compared():
    with pytest.raises(AssertionError):
        retrofit.change({0: point([1.0], [0])}, {0: point([1.0], [1])}, LENGTH)


def test_every_pair_names_ways():
    assert {way for pair in retrofit.PAIRS for way in pair} == set(retrofit.WAYS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"way": ("T5",)}, "--way = 'T5': must be one of ['RoPE', "),
        ({"steps": 250}, "--steps = 250: must be a positive multiple of 100"),
        ({"seeds": ()}, "--seeds = (): must have one or more seeds"),
    ],
)
def test_wrong_flags(wrong, message):
    with pytest.raises(InputError) as error:
        retrofit.Study(**wrong)
    assert message in str(error.value)


def test_run_directories_of_ways_differ():
    study = retrofit.Study()
    names = [
        study.continued(way, 0, stage).name for way, stages in retrofit.WAYS.items() for stage in range(len(stages))
    ]
    assert len(set(names)) == len(names)
    assert [study.percent(percent) for percent in retrofit.PERCENTS] == [30, 75, 150, 300, 600]


def test_models_that_were_trained_again_have_the_same_losses():
    """Compare committed results with those of the named commit, which trained one way from the beginning."""
    results = Path(__file__).parents[1] / "results" / "retrofit"
    first, again = (read_json(directory / "retrofit.json") for directory in (results, results / "again"))
    assert first["commit"] != again["commit"]
    points = {(each["way"], each["seed"], each["percent"]): each for each in read_lines(results / "points.jsonl.zst")}
    repeated = read_lines(results / "again" / "points.jsonl.zst")
    compared = [(each, points[each["way"], each["seed"], each["percent"]]) for each in repeated]
    assert {each["way"] for each, _ in compared} >= {"original, rope", "ALiBi + DAPE1x3"}
    for each, other in compared:
        assert each["nll_nats"] == other["nll_nats"]
        assert each["documents"] == other["documents"]
