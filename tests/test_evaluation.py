"""Evaluation: the paper's protocol, to the bit the same twice, and what it leaves behind."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import matplotlib.image
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dape_jax.config import RunConfig
from dape_jax.data.batches import train_batches
from dape_jax.data.store import Sidecar, TokenStore, load_corpus
from dape_jax.errors import InputError
from dape_jax.evaluation import evaluate as evaluate_module
from dape_jax.evaluation.evaluate import evaluate
from dape_jax.evaluation.perplexity import (
    Window,
    choose_windows,
    evaluate_lengths,
    model_at,
    summarise,
    window_batches,
)
from dape_jax.sharding import make_mesh, put_batch
from dape_jax.training import loop
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import TrainState, init_opt_state, init_params, make_nll_step, make_train_step, shardings_of
from dape_jax.transformer import model_structure


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def runs(root) -> list[Path]:
    """Two trained runs on the same text."""
    for name in ("none", "dape"):
        spec = tiny.spec(root, train__num_steps=4, train__checkpoint_every=4)
        if name == "none":
            spec["model"]["processor"] = {"name": "none"}
        loop.train(spec, root / "runs" / name)
    return [root / "runs" / "none", root / "runs" / "dape"]


def store_of(lengths: list[int]) -> TokenStore:
    """A token store in memory: document d is d * 1000 + 0, 1, 2, ..."""
    tokens = np.concatenate([d * 1000 + np.arange(n, dtype=np.uint32) for d, n in enumerate(lengths)])
    sidecar = Sidecar(1, "bytes", 257, "<u4", len(lengths), len(tokens), "", "validation", "", "")
    return TokenStore(Path(), sidecar, tokens, np.concatenate([[0], np.cumsum(lengths)]))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=12),
    st.sets(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(1, 5),
)
def test_every_length_is_scored_on_the_same_tokens(document_lengths, lengths, max_windows, batch_size):
    store, longest = store_of(document_lengths), max(lengths)
    if max(document_lengths) <= longest:
        with pytest.raises(InputError, match=f"evaluation.lengths = {longest}: at most {max(document_lengths) - 1}"):
            choose_windows(store, longest, max_windows)
        return
    windows = choose_windows(store, longest, max_windows)
    room = sum((n - 1) // longest for n in document_lengths)
    assert len(set(windows)) == len(windows) == min(max_windows, room)
    # No document gives two windows while another that is long enough gives none.
    used = np.bincount([w.document for w in windows], minlength=len(document_lengths))
    if used.max() > 1:
        assert all(used[d] for d, n in enumerate(document_lengths) if n > longest)
    # No token of the longest windows is scored twice.
    inputs = [(w.document, i) for w in windows for i in range(w.end - longest, w.end)]
    assert len(set(inputs)) == len(inputs)
    scored = []
    for length in sorted(lengths):
        rows = []
        for batch, num_real in window_batches(store, windows, length, batch_size):
            assert batch["inputs"].shape == batch["targets"].shape == (batch_size, length)
            np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
            np.testing.assert_array_equal(batch["inputs"] + 1, batch["targets"])
            rows.extend(batch["targets"][:num_real])
        assert len(rows) == len(windows)
        scored.append([row[-min(lengths) :].tolist() for row in rows])
    assert all(other == scored[0] for other in scored)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 50)), min_size=1, max_size=30), st.integers(1, 64))
def test_perplexity_is_of_the_sum(rows, tokens_each):
    """exp(sum of nll / number of tokens), not a mean of perplexities; the interval holds it."""
    windows = [Window(document, 10 * i) for i, (document, _) in enumerate(rows)]
    nlls = np.array([nll for _, nll in rows])
    result = summarise(7, windows, nlls, tokens_each)
    assert result.perplexity == pytest.approx(math.exp(nlls.sum() / (len(rows) * tokens_each)))
    assert result.num_tokens == len(rows) * tokens_each
    assert result.num_documents == len({document for document, _ in rows})
    if result.num_documents == 1:
        assert result.low is None
        assert result.high is None
    else:
        assert result.low <= result.perplexity * (1 + 1e-9)
        assert result.high >= result.perplexity * (1 - 1e-9)


def test_training_loss_is_the_evaluators_loss(root):
    """The same batch, at the train length, through the training step and through the evaluator's."""
    run = RunConfig.from_dict(tiny.spec(root))
    mesh = make_mesh(run.mesh)
    corpus = load_corpus(run.data)
    batch = next(train_batches(corpus.train, train_length=16, global_batch_size=8, seed=0, shard_index=0, num_shards=1))
    params = init_params(run.model, 0, mesh)
    graphdef, _ = model_structure(run.model)
    at_length, _ = model_structure(model_at(run.model, 16, run.evaluation, "rope", 16))
    with jax.set_mesh(mesh):
        evaluated = make_nll_step(at_length, 16)(params, put_batch(batch, mesh))
    optimizer = make_optimizer(run.optimizer, 10)
    state = TrainState(params, init_opt_state(optimizer, params, mesh))
    step = make_train_step(graphdef, optimizer, 1, shardings_of(state))
    with jax.set_mesh(mesh):
        _, metrics = step(state, put_batch(batch, mesh))
    assert float(metrics["loss_nats"]) == pytest.approx(float(evaluated.mean()), rel=1e-6)


def test_blockwise_beyond_a_threshold_changes_no_result(root):
    """The evaluator's blockwise lengths give what dense ones give."""
    run = RunConfig.from_dict(tiny.spec(root))
    mesh = make_mesh(run.mesh)
    params = init_params(run.model, 0, mesh)
    store = load_corpus(run.data).validation
    windows = choose_windows(store, 64, 8)
    results = []
    for blockwise_from in (1, 10_000):
        evaluation = RunConfig.from_dict(tiny.spec(root, evaluation__blockwise_from=blockwise_from)).evaluation
        results.append(evaluate_lengths(run.model, params, mesh, store, windows, evaluation, "test", "rope", 16))
    for blockwise, dense in zip(*results, strict=True):
        assert blockwise.nll_nats == pytest.approx(dense.nll_nats, rel=1e-5)
    assert results[0][0].num_tokens == results[0][-1].num_tokens


def test_two_evaluations_agree_to_the_bit_and_compare_methods(runs, tmp_path):
    contents = []
    for output in (tmp_path / "first", tmp_path / "second"):
        written = evaluate(runs, output=output)
        assert written.directory == output
        contents.append((output / "lengths.json").read_bytes())
    assert contents[0] == contents[1]
    results = json.loads(contents[0])
    assert [run["name"] for run in results["runs"]] == ["none", "dape"]
    for run in results["runs"]:
        assert [result["length"] for result in run["lengths"]] == [16, 32, 64]
        assert all(result["low"] < result["perplexity"] < result["high"] for result in run["lengths"])
    table = (output / "lengths.txt").read_text()
    markdown = (output / "lengths.md").read_text()
    for run in results["runs"]:
        for result in run["lengths"]:
            assert f"{result['perplexity']:.2f} [" in table
            assert f"{result['perplexity']:.2f} [" in markdown
    picture = matplotlib.image.imread(output / "lengths.png")
    assert picture.shape[0] > 300
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50


def test_results_land_in_the_common_directory_and_earlier_ones_are_kept(runs):
    common = runs[0].parent
    first = evaluate(runs, lengths=(16,))
    assert first.directory == common
    before = (common / "lengths.json").read_text()
    evaluate(runs, lengths=(16,))
    assert len(list(common.glob("lengths*.json"))) == 1
    evaluate(runs, lengths=(16, 32), last_tokens=8)
    kept = [file for file in common.glob("lengths.*.json")]
    assert [file.read_text() for file in kept] == [before]
    assert json.loads((common / "lengths.json").read_text())["runs"][0]["last_tokens"] == 8


def test_another_corpus_can_be_scored(runs, root, tmp_path):
    other = tiny.write_text(tmp_path / "other")
    (other / "more.txt").write_text("more " * 100)
    written = evaluate(runs[:1], output=tmp_path / "out", lengths=(16,), data=str(other))
    digest = json.loads((written.directory / "lengths.json").read_text())["runs"][0]["data"]
    data = RunConfig.from_dict(tiny.spec(root)).data
    assert digest == load_corpus(dataclasses.replace(data, path=str(other))).digest
    assert digest != load_corpus(data).digest


def test_evaluation_reads_params_alone(runs, tmp_path):
    """A run whose optimizer state is gone can still be evaluated."""
    copy = tmp_path / "dape"
    shutil.copytree(runs[1], copy)
    shutil.rmtree(copy / "checkpoints" / "4" / "opt_state")
    shutil.rmtree(copy / "checkpoints" / "4" / "data")
    found = evaluate([copy], lengths=(16,))
    expected = evaluate(runs[1:], output=tmp_path / "out", lengths=(16,))
    nlls = [json.loads((w.directory / "lengths.json").read_text())["runs"][0]["lengths"] for w in (found, expected)]
    assert nlls[0] == nlls[1]


def test_any_checkpoint_can_be_evaluated(root, tmp_path):
    """The newest, the best by validation loss, or one by its number."""
    loop.train(tiny.spec(root, train__num_steps=4), tmp_path / "run")

    def step_of(step: str) -> int:
        written = evaluate([tmp_path / "run"], step=step, lengths=(16,), output=tmp_path / step)
        return json.loads((written.directory / "lengths.json").read_text())["runs"][0]["step"]

    assert [step_of(step) for step in ("newest", "best", "2")] == [4, 4, 2]
    with pytest.raises(InputError, match=r"step = '3': one of \['newest', 'best', '2', '4'\]"):
        step_of("3")


def test_an_output_that_cannot_be_written_is_named_before_the_work(runs, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(evaluate_module, "evaluate_trained", None)  # calling it would be a TypeError
    with pytest.raises(InputError, match=r"output = .*file.*cannot be written to"):
        evaluate(runs, output=tmp_path / "file")


def test_a_rope_model_is_evaluated_as_trained_and_stretched(root, runs, tmp_path):
    """A row for each way; at the train length all are what was trained, beyond it all are different."""
    rope = {"name": "rope", "base": 10_000.0}
    loop.train(tiny.spec(root, train__num_steps=2, model__rotary=rope, model__bias={"name": "nope"}), tmp_path / "run")
    ways = ("rope", "pi", "yarn")
    evaluate([tmp_path / "run"], rotary=ways, lengths=(16, 64), output=tmp_path)
    results = json.loads((tmp_path / "lengths.json").read_text())["runs"]
    assert [(run["name"], run["rotary"]) for run in results] == list(
        zip(["run", "run+pi", "run+yarn"], ways, strict=True)
    )
    at_train_length, beyond = ([run["lengths"][i]["nll_nats"] for run in results] for i in (0, 1))
    assert at_train_length == pytest.approx([at_train_length[0]] * 3, rel=1e-6)
    assert len({round(nll, 4) for nll in beyond}) == 3
    for rotary, workdirs, words in (
        (("pi",), runs, "rotary = 'pi': only 'rope'"),
        (("xpos",), [tmp_path / "run"], "rotary = 'xpos': one of"),
        ((), [tmp_path / "run"], "rotary = "),
    ):
        with pytest.raises(InputError, match=words):
            evaluate(workdirs, rotary=rotary, output=tmp_path)


def test_names_that_matplotlib_would_read_as_formulas(root, tmp_path):
    loop.train(tiny.spec(root, train__num_steps=2), tmp_path / "_a_$^$")
    assert evaluate([tmp_path / "_a_$^$"], lengths=(16,)).picture.exists()


@pytest.mark.parametrize(
    ("lengths", "last_tokens", "words"),
    [
        ((16, 10_000), None, ["evaluation.lengths", "10000", "at most"]),
        ((0,), None, ["evaluation.lengths", "0", "positive"]),
        ((16,), 0, ["evaluation.last_tokens", "0", "positive"]),
    ],
)
def test_bad_input_is_named(runs, tmp_path, lengths, last_tokens, words):
    with pytest.raises(InputError) as error:
        evaluate(runs, output=tmp_path / "out", lengths=lengths, last_tokens=last_tokens)
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "out").exists()


def test_bad_workdirs_are_named(runs, root, tmp_path, monkeypatch):
    def message(workdirs) -> str:
        with pytest.raises(InputError) as error:
            evaluate(workdirs, output=tmp_path / "out", lengths=(16,))
        return str(error.value)

    assert "train.py" in message([tmp_path / "nothing"])
    assert "different names" in message([runs[0], runs[0]])
    assert "one workdir" in message([])

    def die(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "put_batch", die)
        with pytest.raises(KeyboardInterrupt):
            loop.train(tiny.spec(root), tmp_path / "young")
    assert "no checkpoint yet" in message([tmp_path / "young"])


def test_text_that_has_changed_since_training_is_refused(tmp_path):
    spec = tiny.spec(tmp_path, train__num_steps=2)
    loop.train(spec, tmp_path / "run")
    (tmp_path / "text" / "new.txt").write_text("new text " * 50)
    with pytest.raises(InputError, match="--data"):
        evaluate([tmp_path / "run"], lengths=(16,))


def test_a_window_longer_than_any_document_names_the_longest(root):
    store = load_corpus(RunConfig.from_dict(tiny.spec(root)).data).validation
    longest = int(np.diff(store.offsets).max())
    assert choose_windows(store, longest - 1, 5)
    with pytest.raises(InputError, match=f"at most {longest - 1}"):
        choose_windows(store, longest, 5)
    assert jax.device_count() == 8
