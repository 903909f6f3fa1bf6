"""Evaluation: the paper's protocol, its statistics, bit-exact repetition, and the written files."""

import csv
import dataclasses
import itertools
import math
import shutil
import subprocess
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import tiny
from etils import epath
from helpers import read_runs, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from matplotlib.figure import Figure
from processes import run_python
from tiny import load_corpus, store_of

from dape_jax import provenance
from dape_jax.config import CHOICES, RunConfig
from dape_jax.data.batches import train_batches
from dape_jax.data.store import TokenStore
from dape_jax.data.tokenizers import save_tokenizer, train_bpe
from dape_jax.errors import InputError, require
from dape_jax.evaluation import command as watching
from dape_jax.evaluation import figures, perplexity, programs, protocols, report, statistics, trained
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.perplexity import choose_windows, compile_lengths, score_windows, window_batch
from dape_jax.evaluation.programs import model_at, padded_batches, predicted_bytes
from dape_jax.evaluation.protocols import compare, methods_of
from dape_jax.evaluation.report import ReportPaths
from dape_jax.evaluation.trained import TrainedModel, corpora_of, named_apart, read_trained
from dape_jax.model.transformer import model_structure
from dape_jax.sharding import MeshConfig, make_mesh, put_batch
from dape_jax.training import checkpoint
from dape_jax.training.step import Training, abstract_params, init_state, make_nll_step, make_train_step

ALL = MeshConfig(data=1, fsdp=-1, context=1, tensor=1)


def evaluate(
    workdirs: list[Path], *, mesh: MeshConfig | None = None, output: Path | None = None, **options: Any
) -> ReportPaths:
    """Evaluate with the options as keywords."""
    return perplexity.evaluate(workdirs, Options(**options), mesh=mesh, output=output)


@pytest.fixture(scope="module")
def runs(trained_runs) -> list[Path]:
    return trained_runs


def untrained(trained_root: Path, **changes: Any) -> TrainedModel:
    """Return a model without a checkpoint."""
    run = RunConfig.from_dict(tiny.spec(trained_root, **changes))
    return TrainedModel("test", epath.Path("test"), 0, run, "", run.mesh)


def numbered(lengths: list[int]) -> TokenStore:
    """Return a token store in memory, whose document d is d * 1000 + 0, 1, 2, ..."""
    return store_of(lengths, np.concatenate([d * 1000 + np.arange(n, dtype=np.uint32) for d, n in enumerate(lengths)]))


# ---- windows and batches


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=12),
    st.sets(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(1, 5),
)
def test_every_length_is_scored_on_the_same_tokens(document_lengths, lengths, max_windows, batch_size):
    store, longest = numbered(document_lengths), max(lengths)
    if max(document_lengths) <= longest:
        with pytest.raises(InputError, match=f"lengths = {longest}: must be at most {max(document_lengths) - 1}"):
            choose_windows(store, longest, max_windows)
        return
    windows = choose_windows(store, longest, max_windows)
    room = sum((n - 1) // longest for n in document_lengths)
    assert len(set(windows)) == len(windows) == min(max_windows, room)
    # No document has two windows while another, long enough, has none.
    used = np.bincount([w.document for w in windows], minlength=len(document_lengths))
    if used.max() > 1:
        assert all(used[d] for d, n in enumerate(document_lengths) if n > longest)
    # No token of the longest windows is scored twice.
    inputs = [(w.document, i) for w in windows for i in range(w.end - longest, w.end)]
    assert len(set(inputs)) == len(inputs)
    scored = []
    for length in sorted(lengths):
        rows = []
        for numbers, num_real in padded_batches(len(windows), batch_size):
            batch = window_batch(store, windows, length, numbers)
            assert batch["inputs"].shape == batch["targets"].shape == (batch_size, length)
            np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
            np.testing.assert_array_equal(batch["inputs"] + 1, batch["targets"])
            rows.extend(batch["targets"][:num_real])
        assert [row[-1] for row in rows] == [window.document * 1000 + window.end - 1 for window in windows]
        scored.append([row[-min(lengths) :].tolist() for row in rows])
    assert all(other == scored[0] for other in scored)


def test_a_sample_of_windows_is_of_random_documents_from_their_ends():
    """Documents of a corpus are often sorted by source: the first ones would be no sample of all of them."""
    store = numbered([100] * 40)
    windows = choose_windows(store, 30, 60)
    first, second = ([window.document for window in each] for each in (windows[:40], windows[40:]))
    assert sorted(first) == list(range(40))
    assert first[:8] == [11, 27, 4, 24, 23, 2, 3, 34]  # results that were written remain comparable
    assert second == first[:20]
    assert {window.end for window in windows[:40]} == {100}
    assert {window.end for window in windows[40:]} == {70}
    assert choose_windows(store, 30, 5) == windows[:5]


def test_bytes_of_the_scored_tokens_are_counted():
    """Document 0 has the bytes 0 to 39; those of document 1 decode to nothing."""
    store = numbered([40, 40])
    windows = choose_windows(store, 16, 4)
    for window in windows:
        assert window.scored(16, 5) == slice(11, 16)
    num_bytes = perplexity.scored_bytes(store, windows, 16, 5)
    assert num_bytes == 5 * [window.document for window in windows].count(0) > 0
    scores = statistics.scores_by_length(np.arange(4), {16: np.full((4, 5), math.log(2))})._replace(
        num_bytes=[num_bytes]
    )
    assert statistics.lengths_of(scores, 8)["lengths"][0]["bits_per_byte"] == pytest.approx(4 * 5 / num_bytes)
    assert "bits_per_byte" not in statistics.lengths_of(scores._replace(num_bytes=[0]), 8)["lengths"][0]
    for first in (None, 7):
        strided = perplexity.strided_windows(store, 16, 8, first)
        targets = window_batch(store, strided, 16, np.arange(len(strided)))["targets"]
        scored = perplexity.mask_unscored(targets, strided)[[window.document == 0 for window in strided]]
        assert scored.compressed().tolist() == list(range(1 if first is None else 0, 39))


# ---- statistics


def result_of(
    stem: str, documents: np.ndarray, nll_by_length: dict[int, np.ndarray], train_length: int = 8
) -> dict[str, Any]:
    """Return the result of one run."""
    (protocol,) = [each for each in protocols.PROTOCOLS.values() if each.stem == stem]
    return protocol.result(protocol.scores(documents, nll_by_length), train_length)


def length_result(documents: np.ndarray, nll: np.ndarray) -> dict[str, Any]:
    (result,) = result_of("lengths", documents, {7: nll})["lengths"]
    return result


def positions_result(nll: np.ndarray, train_length: int) -> dict[str, Any]:
    """Return the loss by position of windows of different documents."""
    return result_of("positions", np.arange(len(nll)), {nll.shape[1]: nll}, train_length)["positions"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 50)), min_size=1, max_size=30), st.integers(1, 64))
def test_perplexity_is_of_the_sum(rows, tokens_each):
    """Perplexity is exp(sum of nll / number of tokens), not a mean of perplexities; the interval contains it."""
    documents, nlls = np.array([document for document, _ in rows]), np.array([nll for _, nll in rows])
    result = length_result(documents, np.outer(nlls, np.full(tokens_each, 1 / tokens_each)))
    assert result["perplexity"] == pytest.approx(math.exp(nlls.sum() / (len(rows) * tokens_each)))
    assert result["num_tokens"] == len(rows) * tokens_each
    assert result["num_documents"] == len({document for document, _ in rows})
    if len(rows) == 1:
        assert result["low"] is result["high"] is None
    else:
        assert result["low"] <= result["perplexity"] * (1 + 1e-9)
        assert result["high"] >= result["perplexity"] * (1 - 1e-9)


@pytest.mark.parametrize("windows_each", [1, 5])
def test_intervals_are_those_of_95_per_cent(windows_each):
    """Compare with 1.96 standard errors of the mean of independent documents."""
    rng, num = np.random.default_rng(0), 300
    nll = np.repeat(2.0 + rng.standard_normal(num), windows_each)
    documents = np.repeat(np.arange(num), windows_each)
    result = length_result(documents, nll[:, None])
    error = nll.std() / math.sqrt(num)
    for bound, sign in (("low", -1), ("high", 1)):
        assert math.log(result[bound]) == pytest.approx(nll.mean() + sign * 1.96 * error, abs=0.15 * error)
    assert length_result(documents, np.array(result["window_nats"])[:, None]) == result  # computed again from the file


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_bins_are_means_of_what_was_measured(length, num_windows, train_length, seed):
    nll = np.random.default_rng(seed).exponential(size=(num_windows, length))
    positions = positions_result(nll, train_length)
    bins, ends = positions["bins"], [each["last"] for each in positions["bins"]]
    assert (np.diff(ends) > 0).all()
    assert {2**octave for octave in range(length.bit_length())} | {length} <= set(ends)
    for each in bins:
        measured = nll[:, each["first"] - 1 : each["last"]]
        assert each["num_tokens"] == measured.size
        assert each["nll_nats"] == pytest.approx(measured.mean())
        widest = statistics.SMOOTHED_OCTAVES + 1e-9
        near = [other for other in bins if abs(math.log2(other["last"] / each["last"])) <= widest]
        smoothed = nll[:, near[0]["first"] - 1 : near[-1]["last"]].mean()
        assert each["smoothed_nats"] == pytest.approx(smoothed)
        assert each["excess_nats"] == pytest.approx(smoothed - positions["reference_nats"])
    trained = min(train_length, length)
    around = [each for each in bins if each["first"] > trained // 2 and each["last"] <= trained]
    assert positions["reference_nats"] == pytest.approx(nll[:, around[0]["first"] - 1 : around[-1]["last"]].mean())
    assert (positions["breaks_at"] is None) or positions["breaks_at"] > train_length


@pytest.mark.parametrize("breaks_at", [100, 700])
def test_a_break_is_found_and_noise_is_not_a_break(breaks_at):
    """Find a loss that rises by twice the margin at a position, and no break where the interval of the excess has 0."""
    noisy = positions_result(np.random.default_rng(4).normal(2.0, 30 * statistics.MARGIN_NATS, (64, 1024)), 64)
    assert noisy["breaks_at"] is None
    assert max(each["excess_nats"] for each in noisy["bins"] if each["first"] > 64) > statistics.MARGIN_NATS
    nll = np.random.default_rng(0).normal(2.0, 10 * statistics.MARGIN_NATS, (64, 1024))
    nll[:, breaks_at - 1 :] += 2 * statistics.MARGIN_NATS
    # The smoothed curve exceeds the margin when half of its window is beyond the break.
    octaves = math.log2(positions_result(nll, 64)["breaks_at"] / breaks_at)
    assert abs(octaves) < statistics.SMOOTHED_OCTAVES


@pytest.mark.parametrize("first_nan", [40, 200])
def test_positions_whose_loss_is_nan_are_where_a_model_breaks(first_nan):
    """NaN does not change the smoothed loss of earlier positions."""
    nll = np.random.default_rng(0).normal(2.0, 0.1, (8, 256))
    expected = positions_result(nll, 64)
    nll[3, first_nan - 1 :] = np.nan
    found = positions_result(nll, 64)
    assert expected["breaks_at"] is None
    assert max(65, first_nan * 2**-statistics.SMOOTHED_OCTAVES) <= found["breaks_at"] <= max(65, first_nan)
    for bin_found, bin_expected in zip(found["bins"], expected["bins"], strict=True):
        is_before = bin_found["last"] * 2**statistics.SMOOTHED_OCTAVES < first_nan
        assert math.isnan(bin_found["nll_nats"]) == (bin_found["last"] >= first_nan)
        assert bin_found["smoothed_nats"] == bin_expected["smoothed_nats"] or not is_before


@pytest.mark.parametrize(("stem", "loss"), [("lengths", 1e9), ("delta", 1e9), ("positions", math.nan)])
def test_a_model_that_diverged_does_not_affect_the_others(tmp_path, stem, loss):
    lengths = (64,) if stem == "positions" else (16, 32)
    scored = {length: np.random.default_rng(length).normal(2, 0.1, (4, 64 // len(lengths))) for length in lengths}
    diverged = {length: nll * loss for length, nll in scored.items()}
    about = {"train_length": 16, "last_tokens": 16}
    both = [
        about | {"name": name} | result_of(stem, np.arange(4), nll, 16)
        for name, nll in (("bad", diverged), ("good", scored))
    ]
    protocols.save(stem, tmp_path, both[:1], Options())
    paths = protocols.save(stem, tmp_path, both, Options())
    first, second = read_runs(tmp_path, stem)
    assert second == report.json_values(both[1])
    if stem != "positions":
        assert [each["perplexity"] for each in first["lengths"]] == ["inf", "inf"]
    assert matplotlib.image.imread(paths.figure).shape[0] > 300


@pytest.mark.parametrize("value", [1e99, 1.7e308, math.nan], ids=str)
def test_figures_leave_out_points_that_cannot_be_drawn(value):
    """Omitted points are still in the table."""
    counts = {"num_tokens": 64, "num_windows": 4, "num_documents": 2}
    ends = [dict.fromkeys(("perplexity", "low", "high"), each) | counts for each in (3.0, value)]
    run = {"name": "_a_$^$", "train_length": 16, "last_tokens": 16}
    run |= {"lengths": [{"length": length} | each for length, each in zip((16, 64), ends, strict=True)]}
    _, (_, rows, figure) = protocols.table_of("lengths", [run], Options())
    assert report.number(value) in rows[1][2]
    (line,) = [
        each for each in figure.axes[0].get_lines() if len(each.get_ydata()) == 2 and each.get_marker() != "None"
    ]
    assert np.isfinite(line.get_ydata()).tolist() == [True, value == 1e99]
    report.image_of(figure, "png")  # a name that matplotlib would read as a formula


# ---- comparisons from a report's JSON

QUICKSTART = Path(__file__).parents[1] / "results/quickstart/lengths.json"
# Losses of 80 windows, the same for all runs, so that they cancel in differences; and differences of three seeds.
EASY, SPREAD = np.random.default_rng(0).normal(32, 4, 80), np.array([[-0.8], [0.0], [0.8]])
OF_SEEDS, OF_DOCUMENTS = 4.303 * 0.8 / math.sqrt(3) / 16, 1.96 * EASY.std() / math.sqrt(80) / 16  # half intervals


def seeds_of(
    nats: np.ndarray, name: str, config: str, stem: str = "lengths", change: float = 0.0
) -> list[dict[str, Any]]:
    """Return the results of one run for each seed, [seeds, windows], two windows a document and 16 tokens a window.

    With a context of 16 more tokens, and after the train length of 8, the loss of each token is larger by `change`.
    """
    documents = np.repeat(np.arange(nats.shape[1] // 2), 2)
    identity = {"train_length": 8, "last_tokens": 16, "rotary": "rope", "config": config, "method": name}
    results = []
    for seed, row in enumerate(nats):
        each = row[:, None] / 16 + np.zeros(16)
        by_length = {
            "lengths": {16: each},
            "delta": {8: each[:, :8], 24: each[:, :8] + change},
            "positions": {16: each + change * (np.arange(16) >= 8)},
        }[stem]
        results.append(identity | {"name": f"{name}-seed{seed}", "seed": seed} | result_of(stem, documents, by_length))
    return results


def test_paired_differences_are_those_of_the_saved_windows():
    """Compute the mean and its bootstrap over documents by hand."""
    runs = report.read_results(epath.Path(QUICKSTART))
    methods = compare("lengths", runs, Options(baseline="kerple"))
    assert compare("lengths", runs, Options(baseline="runs/quickstart/kerple/")) == methods
    _, ours = methods
    documents, rng = np.array(runs[0]["documents"]), np.random.default_rng(1)
    assert [each["length"] for each in ours["differences"]] == [64, 128, 256, 512, 1024, 2048]
    lengths = list(zip(ours["differences"], *(run["lengths"] for run in runs), strict=True))
    for found, theirs, other in lengths[::5]:
        nats = np.array(other["window_nats"]) - np.array(theirs["window_nats"])
        assert found["nats"] == pytest.approx(nats.mean() / 64)
        of_document = [nats[documents == each] for each in set(documents)]
        draws = [rng.choice(len(of_document), len(of_document)) for _ in range(1000)]
        means = [np.concatenate([of_document[each] for each in draw]).mean() / 64 for draw in draws]
        width = found["high"] - found["low"]
        assert [found["low"], found["high"]] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.1 * width)
        assert found["high"] < 0
        assert width < math.log(other["high"] / other["low"]) / 3  # far narrower than the intervals of the runs


def test_seeds_are_one_method_with_an_interval_over_seeds_and_documents():
    runs = seeds_of(EASY + SPREAD, "kerple", "a") + seeds_of(EASY + SPREAD - 1.6, "dape1x3-kerple", "b")
    base, ours = compare("lengths", runs, Options(baseline="kerple-seed1"))
    assert (base["name"], base["runs"]) == ("kerple", ["kerple-seed0", "kerple-seed1", "kerple-seed2"])
    (length,) = base["lengths"]
    assert math.log(length["perplexity"]) == pytest.approx(EASY.mean() / 16)
    half = math.hypot(OF_SEEDS, OF_DOCUMENTS)
    assert math.log(length["high"] / length["low"]) == pytest.approx(2 * half, rel=0.15)
    (difference,) = ours["differences"]
    assert (difference["length"], difference["seeds"]) == (16, 3)
    assert [difference[end] for end in ("nats", "low", "high")] == pytest.approx([-0.1] * 3)
    _, (_, rows, figure) = protocols.table_of("lengths", runs, Options(labels=("kerple=Kerple",)))
    assert [row[0] for row in rows] == ["", "Kerple (3 seeds)", "dape1x3-kerple (3 seeds)"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Kerple", "dape1x3-kerple"]
    for chosen, base in (([runs[0], *runs[3:]], "kerple-seed0"), (runs[:4], "kerple")):
        name = protocols.table_of("lengths", chosen, Options(baseline=base))[1].rows[-1][0]
        assert name.endswith(f" - {base} (1 seed), nats")
    assert len(compare("lengths", runs, Options(group_seeds=False))) == 6
    seeds = [run for run in runs if run["name"].startswith("kerple-seed")]
    for labels in (("kerple-seed1=A", "kerple-seed0=B"), ("kerple=A", "kerple=B")):
        with pytest.raises(InputError, match=r"--labels = \['A', 'B'\]: must be one for .* kerple; --group_seeds=no"):
            methods_of(seeds, Options(labels=labels))
    with pytest.raises(InputError, match=r"--baseline = 'kerple-seed1': needs another method .* --group_seeds=no"):
        compare("lengths", seeds, Options(baseline="kerple-seed1"))


def two_methods(stem: str) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Return the results of two methods of three seeds, and the rows of their table.

    The baseline loses 0.08 nats a token beyond the train length; the other gains as much, and starts 0.2 lower.
    """
    runs = seeds_of(EASY + SPREAD, "kerple", "a", stem, 0.08) + seeds_of(EASY + SPREAD - 3.2, "dape", "b", stem, -0.08)
    shown, table = protocols.table_of(stem, runs, Options(baseline="kerple"))
    top, below = table.figure.axes
    colors = [{line.get_label(): line.get_color() for line in axes.get_lines()} for axes in (top, below)]
    assert colors[0]["dape"] == colors[1]["dape"] != colors[0]["kerple"]
    assert "kerple" not in colors[1]
    return shown, table.rows


def test_gains_of_methods_are_compared_on_the_same_windows():
    (base, ours), rows = two_methods("delta")
    start = math.exp(EASY.mean() / 16), math.exp(EASY.mean() / 16 - 0.2)
    gains = [p - p * math.exp(change) for p, change in zip(start, (0.08, -0.08), strict=True)]
    for each, gain in zip((base, ours), gains, strict=True):
        (delta,) = each["deltas"]
        assert delta["delta"] == pytest.approx(gain)
        assert delta["delta"] == each["lengths"][0]["perplexity"] - each["lengths"][1]["perplexity"]
        width = 2 * math.hypot(OF_SEEDS, OF_DOCUMENTS) * abs(gain)
        assert delta["high"] - delta["low"] == pytest.approx(width, rel=0.2)
    (difference,) = ours["differences"]
    assert (difference["delta"], difference["seeds"]) == (pytest.approx(gains[1] - gains[0]), 3)
    assert rows[0] == ["", "kerple (3 seeds)", "dape (3 seeds)", "dape - kerple"]
    assert rows[-1][-1].startswith(f"{gains[1] - gains[0]:+.2f} [")


def test_losses_by_position_of_methods_are_compared_on_the_same_windows():
    (base, ours), rows = two_methods("positions")
    assert base["positions"]["reference_nats"] == pytest.approx(EASY.mean() / 16)
    *bins, reference, last_octave = ours["differences"]
    assert [each["last"] for each in bins] == [each["last"] for each in ours["positions"]["bins"]]
    for each, nats in ((reference, -0.2), (last_octave, -0.36), (bins[0], -0.2), (bins[-1], -0.36)):
        assert [each[end] for end in ("nats", "low", "high")] == pytest.approx([nats] * 3, abs=1e-5)  # all cancels
    assert rows[3] == ["dape - kerple", *(f"{n:+.3f} [{n:+.3f}, {n:+.3f}]" for n in (-0.2, -0.36)), ""]
    one = seeds_of(EASY[None], "kerple", "a", "positions", 0.3)  # a method of one run is that run
    assert compare("positions", one, Options())[0]["positions"] == one[0]["positions"]
    for each in one[0]["positions"]["bins"]:
        del each["window_nats"]
    with pytest.raises(InputError, match=r"positions = \['kerple-seed0'\]: must be evaluated again"):
        compare("positions", seeds_of(EASY[None], "alibi", "b", "positions") + one, Options(baseline="alibi-seed0"))


def test_accuracies_of_seeds_are_averaged_and_compared():
    """The interval adds those over seeds and over strings; each method's seeds differ as the other's do."""

    def results(name: str, accuracies: list[float]) -> list[dict[str, Any]]:
        about = {"config": name, "task": "even_pairs", "train_length": 5, "random_accuracy": 0.5, "dropout": False}
        at = [{"length": length, "num_sequences": 8} for length in (4, 5, 6, 7)]
        return [
            about
            | {"name": f"{name}-seed{seed}", "seed": seed, "trained": x, "score": None}
            | {"lengths": [each | {"accuracy": x, "low": x - 0.03, "high": x + 0.04} for each in at]}
            for seed, x in enumerate(accuracies)
        ]

    runs = results("kerple", [0.5, 0.6]) + results("dape", [0.6, 0.7])
    (_, ours), (_, rows, _) = protocols.table_of("accuracy", runs, Options(baseline="kerple"))
    assert (ours["trained"], ours["score"]) == (pytest.approx(0.65), None)
    for each in ours["lengths"]:
        width = math.hypot(12.7062 * 0.05, 0.03)  # the quantile of Student's t
        assert [each[end] for end in ("accuracy", "low", "high")] == pytest.approx([0.65, 0.65 - width, 1], abs=1e-5)
    assert rows[2][:3] == ["dape (2 seeds)", "65.00", "-"]
    assert rows[3][:3] == ["dape - kerple", *["+10.00 [+10.00, +10.00]"] * 2]
    figure = figures.plot_accuracies([ours | {"task": task} for task in "abcd"])  # the last panels are removed
    assert all(panel.xaxis.get_tick_params()["labelbottom"] for panel in figure.axes)


@pytest.mark.parametrize(
    ("workdirs", "names"),
    [
        ("runs/kerple-seed0 other/dape", "kerple-seed0 dape"),
        ("runs/kerple/seed0 runs/dape/seed0 runs/kerple/seed1 runs/fire", "kerple/seed0 dape/seed0 kerple/seed1 fire"),
        ("runs/seed0/kerple runs/seed1/kerple", "seed0/kerple seed1/kerple"),
        ("a/runs/x b/runs/x", "a/runs/x b/runs/x"),
        ("runs/x runs/x/x", "x x/x"),
    ],
)
def test_names_are_the_last_parts_of_workdirs_that_differ(trained_root, workdirs, names):
    models = [dataclasses.replace(untrained(trained_root), workdir=epath.Path(each)) for each in workdirs.split()]
    assert [model.name for model in named_apart(models, "workdir")] == names.split()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("kerple-seed0 kerple-seed1", "kerple"),
        ("kerple/seed0 kerple/seed1", "kerple"),
        ("v2/seed10 v2/seed11", "v2"),
        ("seed0/kerple seed1/kerple", "kerple"),
        ("kerple/0 kerple/1 kerple/12", "kerple"),
        ("kerple/10+yarn kerple/11+yarn", "kerple+yarn"),
        ("x y", "x and 1 more"),
        ("seed0 seed1", "a"),
        ("0/1 1/0 0/0", "0/1 and 2 more"),
    ],
)
def test_a_method_has_the_name_of_its_runs_without_their_seeds(names, expected):
    runs = [{"name": name, "workdir": f"a/{name}", "config": 1, "seed": at} for at, name in enumerate(names.split())]
    (method,) = methods_of(runs, Options(labels=(f"{expected}=A",)))
    assert (method.name, method.label) == (expected, "A")


def test_methods_of_one_name_are_told_apart_by_a_run():
    runs = [{"name": f"try{number}", "config": number // 2, "seed": number} for number in range(4)]
    assert [method.name for method in methods_of(runs, Options())] == ["try0 and 1 more", "try2 and 1 more"]


def test_runs_are_one_method_if_their_configs_differ_only_in_seeds(trained_root):
    one, other, longer = (
        untrained(trained_root, **changes).identity
        for changes in ({}, {"train__seed": 3, "data__seed": 4, "train__max_to_keep": 7}, {"train__num_steps": 9})
    )
    assert one["config"] == other["config"] != longer["config"]
    assert (one["seed"], other["seed"], one["method"]) == (0, 3, "dape1x3-kerple")


def test_a_figure_is_drawn_again_from_the_json_and_its_pdf_has_truetype_fonts(tmp_path):
    options = Options(baseline="kerple", labels=("kerple=A\udcff\n",), format=("pdf", "svg", "md"))  # not UTF-8
    drawn = protocols.redraw(epath.Path(QUICKSTART), options, epath.Path(tmp_path))
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".md", ".pdf", ".png", ".svg"]
    assert r"dape1x3-kerple - A\udcff\n, nats" in drawn.table
    pdf = (tmp_path / "lengths.pdf").read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    saved = protocols.save("lengths", tmp_path, read_runs(QUICKSTART.parent), options)
    assert saved.table == drawn.table
    assert (tmp_path / "lengths.pdf").read_bytes() == pdf
    (tmp_path / "positions.json").write_text('{"runs": [{"name": "a"}]}')
    (tmp_path / "accuracy.json").write_text('{"runs": []}')
    wrong = {"other": "must be lengths.json", "delta": "delta.json: .*No such file", "positions": "cannot be read"}
    for name, words in {**wrong, "accuracy": "must be the JSON of an evaluation"}.items():
        with pytest.raises(InputError, match=words):
            protocols.redraw(epath.Path(tmp_path / f"{name}.json"), Options(), None)


# ---- scores


def test_training_loss_is_the_evaluators_loss(trained_root):
    """Compare the training step and the evaluator on the same batch, at the train length."""
    run = RunConfig.from_dict(tiny.spec(trained_root, train__num_steps=4))  # the programs of the trained run
    mesh = make_mesh(run.mesh)
    corpus = load_corpus(run.data)
    batch = next(train_batches(corpus.train, train_length=16, global_batch_size=8, seed=0, shard_index=0, num_shards=1))
    at_length, _ = model_structure(model_at(run.model, 16, run.evaluation, "rope", 16))
    training = Training.of(run, mesh)
    state, step = init_state(training), make_train_step(training)
    with jax.set_mesh(mesh):
        evaluated = np.asarray(make_nll_step(at_length, 16)(state.params, put_batch(batch, mesh)))
        _, metrics = step(state, put_batch(batch, mesh))
    assert float(metrics["loss_nats"]) == pytest.approx(float(evaluated.mean()), rel=1e-6)


def test_scores_are_those_of_whole_windows_dense_and_blockwise(trained_root, caplog):
    """Score all tokens of dense windows in one call: the evaluator's are its last, without a new program."""
    mesh, model = make_mesh(ALL), untrained(trained_root, evaluation__lengths=(16, 64), evaluation__blockwise_from=64)
    store = load_corpus(model.run.data).validation
    params = init_state(Training.of(model.run, mesh)).params
    windows = choose_windows(store, 64, 8)
    compiled = compile_lengths(model, len(windows))
    scores = score_windows(compiled, params, mesh, store, windows, "test")
    graphdef, _ = model_structure(model.run.model)
    for length, nll in scores.items():
        with jax.set_mesh(mesh):
            batch = put_batch(window_batch(store, windows, length, np.arange(8)), mesh)
            expected = make_nll_step(graphdef, length)(params, batch)
        assert nll.shape == (8, 16)
        np.testing.assert_allclose(nll, expected[:, -16:], rtol=1e-4)
    caplog.clear()
    with jax.log_compiles(True):
        score_windows(compiled, params, mesh, store, windows, "test")
        assert not [record for record in caplog.records if "ompil" in record.getMessage()]
        jax.jit(lambda x: x * 3)(1.0)
        assert [record for record in caplog.records if "ompil" in record.getMessage()]


@pytest.mark.extra
def test_devices_that_share_a_sequence_give_the_same(runs, tmp_path):
    """Perplexities do not depend on the mesh, up to rounding, dense and blockwise."""
    found, expected = (
        read_runs(evaluate(runs[1:], mesh=mesh, lengths=(16, 64), output=tmp_path / str(mesh)).directory)[0]["lengths"]
        for mesh in (MeshConfig(1, 2, 4, 1), None)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["nll_nats"] == pytest.approx(theirs["nll_nats"], rel=1e-5)
        assert ours["num_tokens"] == theirs["num_tokens"]


# ---- comparisons of runs


def test_two_evaluations_are_bit_equal_and_compare_methods(runs, capsys):
    """Results are in the common directory, and replace earlier ones."""
    contents, output = [], runs[0].parent
    for formats in ((), ("csv", "md")):
        written = evaluate(runs, lengths=(16, 64), format=formats)
        contents.append((output / "lengths.json").read_bytes())
        assert capsys.readouterr().out == written.table + "\n"
        assert {file.suffix[1:] for file in output.glob("lengths.*")} == {"json", "png", *formats}
    assert contents[0] == contents[1]
    results = read_runs(output)
    assert [run["name"] for run in results] == ["none", "dape"]
    with (output / "lengths.csv").open(newline="") as file:
        cells = [row[1:] for row in csv.reader(file)][1:]
    for run, row in zip(results, cells, strict=True):
        assert [result["length"] for result in run["lengths"]] == [16, 64]
        for result, cell in zip(run["lengths"], row, strict=True):
            assert result["low"] < result["perplexity"] < result["high"]
            assert cell == f"{result['perplexity']:.2f} [{result['low']:.2f}, {result['high']:.2f}]"
            assert all(cell in text for text in (written.table, (output / "lengths.md").read_text()))
            assert result["bits_per_byte"] == result["nll_nats"] / result["num_bytes"] / math.log(2)
            assert result["num_tokens"] - result["num_windows"] <= result["num_bytes"] < result["num_tokens"]
    assert len(np.unique(matplotlib.image.imread(output / "lengths.png")[..., 0])) > 50
    evaluate(runs, lengths=(16,), max_windows=4)
    assert [run["lengths"][0]["num_windows"] for run in read_runs(output)] == [4, 4]


@pytest.mark.extra
def test_delta_is_the_difference_of_two_perplexities_of_the_train_lengths_tokens(runs, tmp_path):
    """Compute equation 6 from the other protocol, and its 16 tokens of the train length whatever the config scores."""
    for protocol in ("perplexity", "delta"):
        written = evaluate(runs, protocol=protocol, output=tmp_path)
    for run, expected in zip(read_runs(tmp_path, "delta"), read_runs(tmp_path), strict=True):
        assert run["lengths"] == expected["lengths"]
        local, *beyond = expected["lengths"]
        assert [delta["length"] for delta in run["deltas"]] == [32, 64]
        for delta, full in zip(run["deltas"], beyond, strict=True):
            assert delta["delta"] == pytest.approx(local["perplexity"] - full["perplexity"])
            assert delta["low"] <= delta["delta"] <= delta["high"]
            # Paired by documents: variation between easy and hard documents is not noise of the difference.
            assert delta["high"] - delta["low"] < local["high"] - local["low"]
            assert f"{delta['delta']:.2f} [" in written.table
    config = read_trained(runs[0], "newest", {"last_tokens": 8}).run.evaluation
    assert protocols.from_train_length(config, 32) == dataclasses.replace(config, lengths=(32, 64), last_tokens=32)


@pytest.mark.extra
def test_loss_by_position_adds_up_to_the_perplexity_of_all_tokens(runs, tmp_path):
    written = evaluate(runs, protocol="positions", lengths=(16, 64), output=tmp_path)
    evaluate(runs, lengths=(64,), last_tokens=64, output=tmp_path)
    for run, expected in zip(read_runs(tmp_path, "positions"), read_runs(tmp_path), strict=True):
        positions, (result,) = run["positions"], expected["lengths"]
        assert positions["length"] == positions["bins"][-1]["last"] == 64
        assert sum(each["num_tokens"] for each in positions["bins"]) == result["num_tokens"]
        total = sum(each["nll_nats"] * each["num_tokens"] for each in positions["bins"])
        assert total == pytest.approx(result["nll_nats"], rel=1e-6)
        assert f"{positions['reference_nats']:.3f}" in written.table


def test_runs_that_differ_only_in_seeds_share_their_compiled_programs(runs, tmp_path, monkeypatch):
    other, compiled = shutil.copytree(runs[0], tmp_path / "again" / runs[0].name), []

    def compile_(model: TrainedModel, num_windows: int) -> Any:
        compiled.append(model.name)
        return compile_lengths(model, num_windows)

    monkeypatch.setattr(perplexity, "compile_lengths", compile_)
    evaluate([runs[0], other, runs[1]], lengths=(16,), output=tmp_path / "out")
    assert compiled == [f"{runs[0].parent.name}/none", f"{runs[1].parent.name}/dape"]
    first, again, _ = read_runs(tmp_path / "out")
    assert first["lengths"] == again["lengths"]


def test_evaluation_reads_params_only_of_any_checkpoint(runs, tmp_path):
    """Evaluate the newest checkpoint, the best by validation loss, or one by number, without optimizer state."""
    copy = Path(shutil.copytree(runs[1], tmp_path / "dape"))
    for item in ("opt_state", "data"):
        shutil.rmtree(copy / "checkpoints" / "4" / item)
    found = {step: read_runs(evaluate([copy], step=step, lengths=(16,)).directory) for step in ("newest", "best", "2")}
    assert {step: run["step"] for step, (run,) in found.items()} == {"newest": 4, "best": 4, "2": 2}
    (expected,) = read_runs(evaluate(runs[1:], output=tmp_path / "out", lengths=(16,)).directory)
    assert found["newest"][0]["lengths"] == expected["lengths"] != found["2"][0]["lengths"]


@pytest.mark.slow
def test_a_rope_model_is_evaluated_as_trained_and_stretched(trained_root, runs, tmp_path):
    """Report one row per variant of RoPE, equal at the train length and different beyond.

    A model without RoPE in the same report has one row.
    """
    rope = {"name": "rope", "base": 10_000.0}
    changes = {"model__rotary": rope, "model__bias": {"name": "nope"}, "model__processor": {"name": "none"}}
    run, ways = write_run(tmp_path / "run", tiny.spec(trained_root, **changes)), ("rope", "yarn")
    evaluate([run, runs[0]], rotary=ways, lengths=(16, 64), output=tmp_path, data=str(trained_root / "text"))
    *results, other = read_runs(tmp_path)
    assert (other["name"], other["rotary"]) == (runs[0].name, "rope")
    assert [(run["name"], run["rotary"]) for run in results] == list(zip(["run", "run+yarn"], ways, strict=True))
    at_train_length, beyond = ([run["lengths"][i]["nll_nats"] for run in results] for i in (0, 1))
    assert at_train_length == pytest.approx([at_train_length[0]] * 2, rel=1e-6)
    assert len({round(nll, 4) for nll in beyond}) == 2


# ---- texts


def test_another_corpus_is_scored_with_the_tokenizer_of_the_run(runs, trained_root, tmp_path):
    """Ids of another tokenizer would give a perplexity without meaning."""
    other = tiny.write_text(tmp_path / "other")
    (other / "more.txt").write_text("more " * 100)
    written = evaluate(runs[:1], output=tmp_path / "out", lengths=(16,), data=str(other))
    data = RunConfig.from_dict(tiny.spec(trained_root, data__path=str(other), data__validation_fraction=1.0)).data
    assert read_runs(written.directory)[0]["data"] == load_corpus(data).digest

    with_bpe = shutil.copytree(runs[0], tmp_path / "run")
    save_tokenizer(train_bpe(["number 1 is a text of a few words"], 257), with_bpe)

    def tokenizer_of(workdir: Path, text: Path) -> str:
        model = read_trained(workdir, "newest", {})
        data = dataclasses.replace(model.run.data, cache_dir=str(tmp_path / "cache"))
        model = dataclasses.replace(model, run=dataclasses.replace(model.run, data=data))
        (store,) = corpora_of(model, str(text)).validation.values()
        return store.sidecar.tokenizer

    assert tokenizer_of(runs[0], other) == "bytes"
    (prepared,) = (tmp_path / "cache").glob("[!.]*")
    assert tokenizer_of(runs[0], prepared) == "bytes"
    assert tokenizer_of(with_bpe, other) != "bytes"
    with pytest.raises(InputError, match="was prepared with 'bytes'"):
        tokenizer_of(with_bpe, prepared)


def test_a_split_of_a_corpus_or_all_of_a_text_is_scored(runs, trained_root, tmp_path):
    """Every document is longer than a window, and gives one."""
    data = RunConfig.from_dict(tiny.spec(trained_root)).data
    prepared = load_corpus(data)
    corpus, output = str(prepared.train.directory.parent), tmp_path / "out"
    for text, split, expected in (
        (corpus, "train", prepared.train.num_documents),
        (corpus, "validation", prepared.validation.num_documents),
        (corpus, "all", 40),
        (data.path, "validation", 40),  # the text without a split
        (None, "all", 40),
    ):
        options = {"lengths": (16,), "last_tokens": 4, "max_windows": expected}
        written = evaluate(runs[:1], data=text, split=split, output=output, **options)
        (run,) = read_runs(output)
        (result,) = run["lengths"]
        assert (run["split"], result["num_documents"], result["num_tokens"]) == (split, expected, 4 * expected)
        assert f"from {expected} documents, {4 * expected} scored tokens" in written.table
    with pytest.raises(InputError, match=r"split = 'train': must have documents in .*text as bytes"):
        evaluate(runs[:1], data=data.path, split="train", output=output)


def test_texts_that_moved_changed_or_differ_are_refused(runs, monkeypatch, tmp_path):
    """--data with the moved text would score what the run was trained on."""
    model = read_trained(runs[0], "newest", {})
    data = dataclasses.replace(model.run.data, path="moved.txt")
    with pytest.raises(InputError, match=r"'moved.txt': does not exist.*make it a link.*raw text as a whole"):
        corpora_of(dataclasses.replace(model, run=dataclasses.replace(model.run, data=data)), None)
    with monkeypatch.context() as patch:
        patch.setattr(perplexity, "load_corpora", tiny.changed_corpus(tmp_path))
        with pytest.raises(InputError, match=r"data.path = .*no longer holds the text .*--data"):
            evaluate(runs[1:], lengths=(16,), output=tmp_path)

    def other_for_dape(model: TrainedModel, *args: Any) -> Any:
        corpora = corpora_of(model, *args)
        return corpora if model.name == "dape" else dataclasses.replace(corpora, validation=corpora.train)

    monkeypatch.setattr(perplexity, "corpora_of", other_for_dape)
    with pytest.raises(InputError, match=r"data = \{'none': '.*text.* as bytes', 'dape': '.*'\}: must be.*--data=TEXT"):
        evaluate(runs, output=tmp_path)


def test_a_text_that_differs_from_its_digest_is_refused(runs, trained_root, tmp_path):
    """Whole windows could have changed: no result is given."""
    data = RunConfig.from_dict(tiny.spec(trained_root, data__cache_dir=str(tmp_path / "cache"))).data
    directory = load_corpus(data).validation.directory
    tiny.flip(directory / "tokens.bin", -1)
    with pytest.raises(InputError, match="digest = "):
        evaluate(runs[:1], lengths=(16,), output=tmp_path / "other", data=str(directory.parent))
    assert not (tmp_path / "other").exists()


# ---- mistakes

OPTIONS = {
    "length too long": ({"lengths": (16, 10_000)}, "evaluation.lengths = 10000"),
    "length 0": ({"lengths": (0,)}, r"evaluation.lengths = \(0,\)"),
    "lengths decrease": ({"lengths": (32, 16)}, "evaluation.lengths = .*increasing"),
    "no scored tokens": ({"last_tokens": 0}, "evaluation.last_tokens = 0"),
    "no windows": ({"max_windows": 0}, "evaluation.max_windows = 0"),
    "step": ({"step": "3"}, r"step = '3': must be one of \['newest', 'best', '2', '4'\]"),
    "protocol": ({"protocol": "deltas"}, "protocol = 'deltas'"),
    "split": ({"split": "test"}, "split = 'test'"),
    "format": ({"format": ("eps",)}, r"format = \('eps',\)"),
    "baseline": ({"protocol": "delta", "baseline": "fire"}, "--baseline = 'fire': must be one of the runs dape, none"),
    "labels": ({"labels": ("none",)}, r"labels = \('none',\)"),
    "unknown label": ({"labels": ("fire=FIRE",)}, "--labels = 'fire': must be one of the runs dape, none"),
    "equal labels": ({"labels": ("none=A", "dape=A")}, r"--labels = \['A', 'A'\]"),
    "field of tasks": ({"num_sequences": 3}, "num_sequences = 3"),
    "own tokens": ({"protocol": "positions", "last_tokens": 8}, "last_tokens = 8: .*--protocol=positions"),
    "delta lengths": ({"protocol": "delta", "lengths": (8, 16)}, r"evaluation.lengths = \(8, 16\): .*train length, 16"),
    "stride of lengths": ({"stride": 8}, "stride = 8: .*one length"),
    "stride too long": ({"stride": 17, "lengths": (16,)}, "stride = 17: must be 1 to 16"),
    "stride of deltas": ({"stride": 8, "protocol": "delta"}, "stride = 8: .*--protocol"),
    "rotary not of the model": ({"rotary": ("rope", "pi")}, "rotary = .*'pi'.*: no model"),
    "unknown rotary": ({"rotary": ("xpos",)}, r"rotary = \('xpos',\)"),
    "rotary twice": ({"rotary": ("rope", "rope")}, "rotary = .*each once"),
    "length on the mesh": ({"mesh": MeshConfig(1, 1, 8, 1), "lengths": (12,)}, "evaluation.lengths = 12"),
    "scored on the mesh": ({"mesh": MeshConfig(1, 1, 8, 1), "last_tokens": 4}, "evaluation.last_tokens = 4"),
    "heads on the mesh": ({"mesh": MeshConfig(1, 1, 1, 8)}, "model.num_heads = 2"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options_are_named(runs, tmp_path, monkeypatch, case):
    """Raw text may take hours to prepare: only a length that no document has is found after it is read."""
    options, words = OPTIONS[case]
    if case != "length too long":
        monkeypatch.setattr(perplexity, "load_corpora", None)  # calling it would be a TypeError
    with pytest.raises(InputError, match=words):
        evaluate(runs, output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_bad_workdirs_are_named(runs, tmp_path):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for workdirs, words in (
        ([tmp_path / "nothing"], "must be a directory written by dape-train"),
        ([runs[0], runs[0]], "must be different directories"),
        ([], "must have at least one directory"),
        ([tmp_path / "empty"], "with a checkpoint"),
    ):
        with pytest.raises(InputError, match=words):
            evaluate(workdirs, output=tmp_path / "out", lengths=(16,))
    assert not (tmp_path / "out").exists()


def test_models_differ_in_no_field_that_counts(runs, tmp_path, monkeypatch):
    def read(workdir: Path, *arguments: Any) -> TrainedModel:
        model, changed = read_trained(workdir, *arguments), 16 if workdir == runs[0] else 8
        train = dataclasses.replace(model.run.train, train_length=changed)
        evaluation = dataclasses.replace(model.run.evaluation, max_windows=changed)
        return dataclasses.replace(model, run=dataclasses.replace(model.run, train=train, evaluation=evaluation))

    monkeypatch.setattr(trained, "read_trained", read)
    evaluate(runs, lengths=(16,), stride=16, output=tmp_path)
    with pytest.raises(InputError, match=r"evaluation.max_windows = .*: must be the same for all; give --max_windows"):
        evaluate(runs, output=tmp_path)
    with pytest.raises(InputError, match=r"train.train_length = \{'none': 16, 'dape': 8\}: must be the same for all"):
        evaluate(runs, protocol="delta", output=tmp_path)


def test_results_of_the_repository_name_the_commit_that_made_them(tmp_path: Path, monkeypatch):
    """Uncommitted changes of the source are rejected only for results/; changes of other results are ignored."""
    clone = tmp_path / "clone"
    source, results = clone / "source.py", clone / "results"
    monkeypatch.setattr(provenance, "ROOT", clone)
    results.mkdir(parents=True)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("DAPE_COMMIT", "1234567")
    assert provenance.commit() == "1234567"

    def git(*arguments: str) -> str:
        author = ["-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *author, *arguments], cwd=clone, stderr=subprocess.DEVNULL, text=True)

    for file in (source, results / "result.json"):
        file.write_text("1")
    for command in ("init", "add .", "commit --message=first"):
        git(*command.split())
    (results / "result.json").write_text("2")
    assert provenance.commit() == git("describe", "--always").strip()
    provenance.make_results_directory(results / "second")

    source.write_text("2")
    assert provenance.commit() == git("describe", "--always").strip() + "-dirty"
    with pytest.raises(InputError, match=r"output = .*results/third.*uncommitted changes.*DAPE_ALLOW_DIRTY_RESULTS=1"):
        provenance.make_results_directory(results / "third")
    assert not (results / "third").exists()
    provenance.make_results_directory(tmp_path / "third")
    with pytest.raises(InputError, match=r"output = .*source\.py.*cannot be written to"):
        provenance.make_results_directory(source)
    with pytest.raises(InputError, match=r"output = '/proc': cannot be written to"):  # found before the work begins
        provenance.make_results_directory("/proc")
    monkeypatch.setenv(provenance.ALLOW_DIRTY, "1")
    provenance.make_results_directory(results / "third")


# ---- memory


def bytes_at(run: RunConfig, length: int, last_tokens: int, **model: Any) -> int:
    """Return the predicted memory of scoring one sequence per device; nothing is allocated."""
    mesh: Mesh = make_mesh(run.mesh)
    config = model_at(dataclasses.replace(run.model, **model), length, run.evaluation, "rope", 16)
    rows = jax.ShapeDtypeStruct((mesh.size, length), jnp.int32)
    step = make_nll_step(model_structure(config)[0], last_tokens)
    with jax.set_mesh(mesh):
        return predicted_bytes(step.lower(abstract_params(config, mesh), {"inputs": rows, "targets": rows}).compile())


@pytest.mark.parametrize(
    "bias", [pytest.param(bias, marks=() if bias == "kerple" else pytest.mark.slow) for bias in CHOICES["bias"]]
)
@pytest.mark.extra
def test_predicted_memory_is_linear_in_length(trained_root, bias):
    """Compare lengths 8,192 and 32,768."""
    run = untrained(trained_root, model__bias={"name": bias}).run
    assert bytes_at(run, 32768, 16) <= 4.3 * bytes_at(run, 8192, 16)


def test_no_more_than_a_chunk_of_logits_is_held(trained_root):
    """Check by position at a large vocabulary, where [T, V] logits would take most of the memory."""
    run, length, vocab_size = untrained(trained_root).run, 8192, 20_000
    found = bytes_at(run, length, length, vocab_size=vocab_size, num_outputs=vocab_size)
    assert 1024 * vocab_size * 4 < found < length * vocab_size * 4 / 2


def test_a_length_that_does_not_fit_is_refused_before_weights_are_read(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "restore", None)  # calling it would be a TypeError
    monkeypatch.setattr(programs, "available_bytes", lambda mesh: 2**16)
    with pytest.raises(InputError, match=r"evaluation.lengths = 64: dape needs .* 8 sequences"):
        evaluate(runs[1:], lengths=(16, 64), max_windows=8, output=tmp_path)
    errors = {"RESOURCE_EXHAUSTED: CompileTimeHbmOom": InputError, "INTERNAL: a bug": jax.errors.JaxRuntimeError}
    for message, kind in errors.items():
        error = jax.errors.JaxRuntimeError(message)
        monkeypatch.setattr(jax.stages.Lowered, "compile", unittest.mock.Mock(side_effect=error))
        with pytest.raises(kind):
            evaluate(runs[1:], lengths=(64,), output=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_another_protocol_from_the_command_line(runs):
    flags = (f"--workdir={runs[0]},{runs[1]}", "--lengths=16,32", "--protocol=delta", "--format=md")
    done = run_python("eval.py", *flags)
    assert done.returncode == 0, done.stderr
    assert str(runs[0].parent / "delta.png") in done.stdout
    assert {file.suffix for file in runs[0].parent.glob("delta.*")} == {".json", ".md", ".png"}


def test_a_pattern_of_workdirs_matches_runs(tmp_path):
    root = epath.Path(tmp_path)
    for name in ("a/x2/checkpoints", "x1/checkpoints", "x[1]"):
        (root / name).mkdir(parents=True)
    for pattern, names in (("*", ["x1"]), ("**", ["a/x2", "x1"]), ("c*", ["c*"]), ("x[1]", ["x[1]"])):
        assert watching.matching(root / pattern) == [root / name for name in names]


# ---- a run that is being trained


def test_checkpoints_are_evaluated_as_they_appear(tmp_path, monkeypatch):
    """Each step once, except one with results and one that was deleted meanwhile, until that of the last step."""
    path, ran = epath.Path(tmp_path), []

    def run(step, directory):
        require(step != "6", "step", step, "damaged")
        ran.append((step, directory.name))

    def watch(*saved: list[str]) -> None:
        looks = itertools.chain(saved, itertools.repeat(saved[-1]))
        monkeypatch.setattr(checkpoint, "step_names", lambda _: next(looks))
        watching.watch(path, path, run)

    monkeypatch.setattr(watching, "WATCH_SECONDS", 0)
    (tmp_path / "config.json").write_text('{"config": {"train": {"num_steps": 10}}, "data_digest": ""}')
    (tmp_path / "step_4").mkdir()
    (tmp_path / "step_4" / "lengths.json").write_text("{}")
    with pytest.raises(InputError, match="step = '6': damaged"):  # and still there
        watch(["6"])
    watch([], ["2"], ["4", "2"], ["6", "4"], ["8"], ["8"], ["10", "8"])
    assert ran == [("2", "step_2"), ("8", "step_8"), ("10", "step_10")]


def test_a_run_whose_training_has_not_ended_is_named(runs, monkeypatch, caplog):
    number, saved = checkpoint.restore_config(runs[0])
    read_trained(runs[0], "newest", {})
    assert not caplog.messages
    monkeypatch.setattr(checkpoint, "restore_config", lambda *_: (number - 1, saved))
    read_trained(runs[0], "newest", {})
    assert caplog.messages == [f"{runs[0]}: step {number - 1} of {number}, its training has not ended"]


def test_the_interval_of_a_single_length_is_drawn():
    axes = Figure().subplots()
    figures.band(axes, [64], [(1.0, 2.0)], "C0")
    (area,) = axes.collections
    assert area.get_linewidth() > 0
    assert {tuple(point) for point in area.get_paths()[0].vertices} == {(64, 1), (64, 2)}
