"""Evaluation: the paper's protocol, bit-exact repetition, and the written files."""

import csv
import dataclasses
import errno
import io
import json
import logging
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from test_command_lines import run as run_command

from dape_jax import provenance
from dape_jax.config import CHOICES, RunConfig
from dape_jax.data.batches import train_batches
from dape_jax.data.store import Corpus, Sidecar, TokenStore, load_corpus
from dape_jax.data.tokenizers import save_tokenizer, train_bpe
from dape_jax.errors import InputError
from dape_jax.evaluation import perplexity, programs, report, trained
from dape_jax.evaluation.options import PerplexityOptions
from dape_jax.evaluation.perplexity import (
    choose_windows,
    compile_lengths,
    score_windows,
    window_batch,
)
from dape_jax.evaluation.programs import (
    available_bytes,
    compile_programs,
    host_available_bytes,
    model_at,
    padded_batches,
    predicted_bytes,
    run_in_batches,
)
from dape_jax.evaluation.report import ReportPaths
from dape_jax.evaluation.statistics import (
    MARGIN_NATS,
    SMOOTHED_OCTAVES,
    bin_ends,
    delta_result,
    length_result,
    positions_result,
)
from dape_jax.evaluation.trained import TrainedModel, read_trained, validation_corpus
from dape_jax.files import json_digest
from dape_jax.model.transformer import model_structure
from dape_jax.planning.flops import forward_flops
from dape_jax.progress import Progress
from dape_jax.sharding import BATCH, MeshConfig, make_mesh, parameter_shardings, put_batch, read_mesh
from dape_jax.training import loop
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import init_params, init_state, make_nll_step, make_train_step, shardings_of


def evaluate(
    workdirs: list[Path],
    *,
    mesh: MeshConfig | None = None,
    output: Path | None = None,
    show: report.Show | None = None,
    **options: Any,
) -> ReportPaths:
    """Evaluate with the options as keywords."""
    return perplexity.evaluate(workdirs, PerplexityOptions(**options), mesh=mesh, output=output, show=show)


def make_mesh_of_all() -> Mesh:
    return make_mesh(MeshConfig(data=1, fsdp=-1, context=1, tensor=1))


@pytest.fixture(scope="module")
def root(trained_root) -> Path:
    """Directory of the text that the runs were trained on."""
    return trained_root


@pytest.fixture(scope="module")
def runs(trained_runs) -> list[Path]:
    """Two trained runs on the same text."""
    return trained_runs


def read_runs(directory: Path, stem: str = "lengths") -> list[dict[str, Any]]:
    return json.loads((directory / f"{stem}.json").read_text())["runs"]


def untrained(spec: dict[str, Any]) -> TrainedModel:
    """Return a model without a checkpoint."""
    run = RunConfig.from_dict(spec)
    return TrainedModel(Path("test"), 0, run, "", run.mesh, "newest")


def store_of(lengths: list[int]) -> TokenStore:
    """Return a token store in memory, whose document d is d * 1000 + 0, 1, 2, ..."""
    tokens = np.concatenate([d * 1000 + np.arange(n, dtype=np.uint32) for d, n in enumerate(lengths)])
    sidecar = Sidecar(1, "bytes", 257, "<u4", len(lengths), len(tokens), "", "validation", "", "")
    return TokenStore(Path(), sidecar, tokens, np.concatenate([[0], np.cumsum(lengths)]))


@pytest.mark.parametrize("num_rows", [1, 7, 8, 11, 16])
def test_rows_in_batches_are_each_run_once_and_padding_is_dropped(num_rows):
    mesh, progress, seen = make_mesh_of_all(), [], []

    def make_batch(rows: np.ndarray) -> dict[str, np.ndarray]:
        seen.append(rows.tolist())
        return {"inputs": np.stack([rows, rows + 100], axis=1).astype(np.int32)}

    def step(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return batch["inputs"] * 2, batch["inputs"].sum(axis=1)

    options = {"num_rows": num_rows, "batch_size": 8, "mesh": mesh, "progress": progress.append}
    doubled, sums = run_in_batches(step, make_batch, **options)
    np.testing.assert_array_equal(doubled, 2 * np.stack([np.arange(num_rows), np.arange(num_rows) + 100], axis=1))
    np.testing.assert_array_equal(sums, 2 * np.arange(num_rows) + 100)
    assert {len(rows) for rows in seen} == {8}
    assert sum(progress) == num_rows
    assert seen[-1][progress[-1] - 1 :] == [num_rows - 1] * (9 - progress[-1])


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
        with pytest.raises(
            InputError, match=f"evaluation.lengths = {longest}: must be at most {max(document_lengths) - 1}"
        ):
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
        assert len(rows) == len(windows)
        scored.append([row[-min(lengths) :].tolist() for row in rows])
    assert all(other == scored[0] for other in scored)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 50)), min_size=1, max_size=30), st.integers(1, 64))
def test_perplexity_is_of_the_sum(rows, tokens_each):
    """Perplexity is exp(sum of nll / number of tokens), not a mean of perplexities; the interval contains it."""
    documents, nlls = np.array([document for document, _ in rows]), np.array([nll for _, nll in rows])
    result = length_result(7, documents, np.outer(nlls, np.full(tokens_each, 1 / tokens_each)))
    assert result["perplexity"] == pytest.approx(math.exp(nlls.sum() / (len(rows) * tokens_each)))
    assert result["num_tokens"] == len(rows) * tokens_each
    assert result["num_documents"] == len({document for document, _ in rows})
    if result["num_documents"] == 1:
        assert result["low"] is None
        assert result["high"] is None
    else:
        assert result["low"] <= result["perplexity"] * (1 + 1e-9)
        assert result["high"] >= result["perplexity"] * (1 - 1e-9)


@pytest.mark.parametrize("windows_each", [1, 5])
def test_intervals_are_those_of_95_per_cent(windows_each):
    """Compare with 1.96 standard errors of the mean of independent documents."""
    rng, num = np.random.default_rng(0), 300
    nll = np.repeat(2.0 + rng.standard_normal(num), windows_each)
    documents = np.repeat(np.arange(num), windows_each)
    result = length_result(7, documents, nll[:, None])
    error = nll.std() / math.sqrt(num)
    for bound, sign in (("low", -1), ("high", 1)):
        assert math.log(result[bound]) == pytest.approx(nll.mean() + sign * 1.96 * error, abs=0.15 * error)
    # Every interval can be computed again from the file.
    again = np.array(result["window_nats"])[:, None]
    assert length_result(7, documents, again) == result


def test_training_loss_is_the_evaluators_loss(root):
    """Compare the training step and the evaluator on the same batch, at the train length."""
    run = RunConfig.from_dict(tiny.spec(root, train__num_steps=4))  # the programs of the trained run
    mesh = make_mesh(run.mesh)
    corpus = load_corpus(run.data)
    batch = next(train_batches(corpus.train, train_length=16, global_batch_size=8, seed=0, shard_index=0, num_shards=1))
    graphdef, _ = model_structure(run.model)
    at_length, _ = model_structure(model_at(run.model, 16, run.evaluation, "rope", 16))
    optimizer = make_optimizer(run.optimizer, 4)
    state = init_state(run.model, optimizer, 0, mesh)
    step = make_train_step(graphdef, optimizer, shardings_of(state))
    with jax.set_mesh(mesh):
        evaluated = np.asarray(make_nll_step(at_length, 16)(state.params, put_batch(batch, mesh)))
        _, metrics = step(state, put_batch(batch, mesh))
    assert float(metrics["loss_nats"]) == pytest.approx(float(evaluated.mean()), rel=1e-6)


def test_blockwise_beyond_a_threshold_changes_no_result(root):
    """Blockwise and dense lengths of the evaluator give the same results."""
    results, changes = [], {"model__num_layers": 1, "evaluation__lengths": (16, 64)}
    mesh, params = make_mesh_of_all(), None
    for blockwise_from in (1, 10_000):
        model = untrained(tiny.spec(root, evaluation__blockwise_from=blockwise_from, **changes))
        store = load_corpus(model.run.data).validation
        params = init_params(model.run.model, 0, mesh) if params is None else params
        windows = choose_windows(store, 64, 8)
        compiled = compile_lengths(model, "rope", len(windows))
        results.append(score_windows(compiled, params, mesh, store, windows, "test"))
    assert list(results[0]) == [16, 64]
    for length, nll in results[0].items():
        assert nll.shape == (len(windows), 16)
        np.testing.assert_allclose(nll, results[1][length], rtol=1e-4)


@pytest.mark.parametrize("mesh", [pytest.param("context=8", marks=pytest.mark.slow), "fsdp=2,context=4"])
def test_devices_that_share_a_sequence_give_the_same(runs, tmp_path, mesh):
    """Perplexities do not depend on the mesh, up to rounding, dense and blockwise."""
    found, expected = (
        read_runs(evaluate(runs[1:], mesh=m, lengths=(16, 64), output=tmp_path / str(n)).directory)
        for n, m in enumerate((read_mesh("--mesh", mesh), None))
    )
    for ours, theirs in zip(found[0]["lengths"], expected[0]["lengths"], strict=True):
        assert ours["nll_nats"] == pytest.approx(theirs["nll_nats"], rel=1e-5)
        assert ours["num_tokens"] == theirs["num_tokens"]


def test_two_evaluations_agree_to_the_bit_and_compare_methods(runs, tmp_path):
    contents = []
    for output in (tmp_path / "first", tmp_path / "second"):
        written = evaluate(runs, lengths=(16, 64), output=output)
        assert written.directory == output
        contents.append((output / "lengths.json").read_bytes())
    assert contents[0] == contents[1]
    results = json.loads(contents[0])
    assert [run["name"] for run in results["runs"]] == ["none", "dape"]
    for run in results["runs"]:
        assert [result["length"] for result in run["lengths"]] == [16, 64]
        assert all(result["low"] < result["perplexity"] < result["high"] for result in run["lengths"])
    table = (output / "lengths.txt").read_text()
    markdown = (output / "lengths.md").read_text()
    for run in results["runs"]:
        for result in run["lengths"]:
            assert f"{result['perplexity']:.2f} [" in table
            assert f"{result['perplexity']:.2f} [" in markdown
    with (output / "lengths.csv").open(newline="") as file:
        numbers = list(csv.DictReader(file))
    records = [{"name": run["name"]} | result for run in results["runs"] for result in run["lengths"]]
    assert len(numbers) == len(records) == 4
    for row, record in zip(numbers, records, strict=True):
        assert (row["name"], int(row["length"])) == (record["name"], record["length"])
        assert float(row["perplexity"]) == record["perplexity"]  # every digit
    assert (output / "lengths.pdf").read_bytes().startswith(b"%PDF-")
    figure = matplotlib.image.imread(output / "lengths.png")
    assert figure.shape[0] > 300
    assert len(np.unique(figure.reshape(-1, figure.shape[-1]), axis=0)) > 50


def test_results_are_in_the_common_directory_and_replace_earlier_ones(runs):
    common = runs[0].parent
    assert evaluate(runs, lengths=(16,)).directory == common
    assert [run["last_tokens"] for run in read_runs(common)] == [16, 16]
    evaluate(runs, lengths=(16,), max_windows=4)
    assert [run["lengths"][0]["num_windows"] for run in read_runs(common)] == [4, 4]
    assert len(list(common.glob("lengths*"))) == 6


def test_another_corpus_can_be_scored(runs, root, tmp_path):
    other = tiny.write_text(tmp_path / "other")
    (other / "more.txt").write_text("more " * 100)
    written = evaluate(runs[:1], output=tmp_path / "out", lengths=(16,), data=str(other))
    digest = read_runs(written.directory)[0]["data"]
    data = RunConfig.from_dict(tiny.spec(root)).data
    assert digest == load_corpus(dataclasses.replace(data, path=str(other))).digest
    assert digest != load_corpus(data).digest


def test_another_corpus_has_the_tokenizer_of_the_run(runs, tmp_path):
    """Ids of another tokenizer would give a perplexity without meaning."""
    other = tiny.write_text(tmp_path / "other")
    bpe = train_bpe(["number 1 is a text of a few words"], 257)
    with_bpe = tmp_path / "run"
    shutil.copytree(runs[0], with_bpe)
    save_tokenizer(bpe, with_bpe)

    def model_of(workdir):
        model = read_trained(workdir, "newest", {})
        data = dataclasses.replace(model.run.data, cache_dir=str(tmp_path / "cache"))
        return dataclasses.replace(model, run=dataclasses.replace(model.run, data=data))

    of_bytes, of_bpe = model_of(runs[0]), model_of(with_bpe)
    assert validation_corpus(of_bytes, str(other)).validation.sidecar.tokenizer == "bytes"
    (prepared,) = (tmp_path / "cache").iterdir()
    assert validation_corpus(of_bytes, str(prepared)).validation.sidecar.tokenizer == "bytes"
    assert validation_corpus(of_bpe, str(other)).validation.sidecar.tokenizer == bpe.name != "bytes"
    with pytest.raises(InputError, match=r"was prepared with 'bytes' \(--data, for .*run\)"):
        validation_corpus(of_bpe, str(prepared))


def test_evaluation_reads_params_only(runs, tmp_path):
    """Evaluate a run without optimizer state."""
    copy = tmp_path / "dape"
    shutil.copytree(runs[1], copy)
    shutil.rmtree(copy / "checkpoints" / "4" / "opt_state")
    shutil.rmtree(copy / "checkpoints" / "4" / "data")
    found = evaluate([copy], lengths=(16,))
    expected = evaluate(runs[1:], output=tmp_path / "out", lengths=(16,))
    nlls = [read_runs(written.directory)[0]["lengths"] for written in (found, expected)]
    assert nlls[0] == nlls[1]


def test_any_checkpoint_can_be_evaluated(runs, tmp_path):
    """Evaluate the newest checkpoint, the best by validation loss, or one by number."""

    def step_of(step: str) -> int:
        return read_runs(evaluate(runs[1:], step=step, lengths=(16,), output=tmp_path / step).directory)[0]["step"]

    assert [step_of(step) for step in ("newest", "best", "2")] == [4, 4, 2]


@pytest.mark.slow
def test_a_rope_model_is_evaluated_as_trained_and_stretched(root, runs, tmp_path):
    """Report one row per variant of RoPE, equal at the train length and different beyond.

    A model without RoPE in the same report has one row.
    """
    rope = {"name": "rope", "base": 10_000.0}
    changes = {"model__rotary": rope, "model__bias": {"name": "nope"}, "model__processor": {"name": "none"}}
    spec = tiny.spec(root, train__num_steps=2, model__num_layers=1, **changes)
    loop.train(spec, tmp_path / "run")
    ways = ("rope", "yarn")
    evaluate([tmp_path / "run", runs[0]], rotary=ways, lengths=(16, 64), output=tmp_path)
    *results, other = read_runs(tmp_path)
    assert (other["name"], other["rotary"]) == (runs[0].name, "rope")
    assert [(run["name"], run["rotary"]) for run in results] == list(zip(["run", "run+yarn"], ways, strict=True))
    at_train_length, beyond = ([run["lengths"][i]["nll_nats"] for run in results] for i in (0, 1))
    assert at_train_length == pytest.approx([at_train_length[0]] * 2, rel=1e-6)
    assert len({round(nll, 4) for nll in beyond}) == 2


def test_names_that_matplotlib_would_read_as_formulas(runs, tmp_path):
    shutil.copytree(runs[1], tmp_path / "_a_$^$")
    assert evaluate([tmp_path / "_a_$^$"], lengths=(16,)).figure.exists()


OPTIONS = {
    "length too long": ({"lengths": (16, 10_000)}, r"evaluation.lengths = 10000: must be at most \d+"),
    "length 0": ({"lengths": (0,)}, r"evaluation.lengths = \(0,\): must be one or more positive integers"),
    "lengths decrease": ({"lengths": (32, 16)}, r"evaluation.lengths = .*increasing"),
    "no scored tokens": ({"last_tokens": 0}, "evaluation.last_tokens = 0: must be positive"),
    "no windows": ({"max_windows": 0}, "evaluation.max_windows = 0: must be positive"),
    "step": ({"step": "3"}, r"step = '3': must be one of \['newest', 'best', '2', '4'\]"),
    "protocol": ({"protocol": "deltas"}, r"protocol = 'deltas': must be one of \['perplexity', 'delta'\]"),
    "both": ({"protocol": "delta", "by_position": True}, "by_position = True: .*--protocol=delta"),
    "delta tokens": ({"protocol": "delta", "last_tokens": 8}, "last_tokens = 8: .*train length"),
    "position tokens": ({"by_position": True, "last_tokens": 8}, "last_tokens = 8: .*--by_position"),
    "delta lengths": ({"protocol": "delta", "lengths": (8, 16)}, r"evaluation.lengths = \(8, 16\): .*train length, 16"),
    "delta too long": ({"protocol": "delta", "lengths": (16, 10_000)}, "evaluation.lengths = 10000: must be at most"),
    "positions too long": ({"by_position": True, "lengths": (16, 10_000)}, "evaluation.lengths = 10000: .*at most"),
    "rotary not of the model": (
        {"rotary": ("rope", "pi")},
        r"rotary = .*'pi'.*: must be 'rope', .*: no model .*NoRotary",
    ),
    "unknown rotary": ({"rotary": ("xpos",)}, r"rotary = \('xpos',\): must be one or more of"),
    "no rotary": ({"rotary": ()}, r"rotary = \(\): must be one or more of"),
    "rotary twice": ({"rotary": ("rope", "rope")}, "rotary = .*each once"),
    "length on the mesh": ({"mesh": MeshConfig(1, 1, 8, 1), "lengths": (12,)}, "evaluation.lengths = 12"),
    "scored on the mesh": ({"mesh": MeshConfig(1, 1, 8, 1), "last_tokens": 4}, "evaluation.last_tokens = 4"),
    "heads on the mesh": ({"mesh": MeshConfig(1, 1, 1, 8)}, "model.num_heads = 2"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options_are_named(runs, tmp_path, case):
    options, words = OPTIONS[case]
    with pytest.raises(InputError, match=words):
        evaluate(runs, output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_bad_workdirs_are_named(runs, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    for workdirs, words in (
        ([tmp_path / "nothing"], "must be a directory written by dape-train"),
        ([runs[0], runs[0]], "must have different names"),
        ([], "must have at least one directory"),
        ([empty], "has no checkpoint yet"),
    ):
        with pytest.raises(InputError, match=words):
            evaluate(workdirs, output=tmp_path / "out", lengths=(16,))
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(perplexity, "compile_lengths", None)  # calling it would be a TypeError
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"output = .*file.*cannot be written to"):
        evaluate(runs, output=tmp_path / "file")


def test_results_of_the_repository_name_the_commit_that_made_them(tmp_path: Path, monkeypatch):
    """Uncommitted changes of the source are rejected only for results/; changes of other results are ignored."""
    clone = tmp_path / "clone"
    results = clone / "results"
    monkeypatch.setattr(provenance, "ROOT", clone)
    results.mkdir(parents=True)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("DAPE_COMMIT", "1234567")
    assert provenance.commit() == "1234567"
    provenance.make_results_directory(results / "first")

    def git(*arguments: str) -> str:
        author = ["-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *author, *arguments], cwd=clone, stderr=subprocess.DEVNULL, text=True)

    source, result = clone / "source.py", results / "first" / "result.json"
    for file in (source, result):
        file.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "--message=first")
    result.write_text("2")
    assert provenance.commit() == git("describe", "--always").strip()
    provenance.make_results_directory(results / "second")

    source.write_text("2")
    assert provenance.commit() == git("describe", "--always").strip() + "-dirty"
    with pytest.raises(InputError, match=r"output = .*results/third.*uncommitted changes.*DAPE_ALLOW_DIRTY_RESULTS=1"):
        provenance.make_results_directory(results / "third")
    assert not (results / "third").exists()
    provenance.make_results_directory(tmp_path / "third")
    monkeypatch.setenv(provenance.ALLOW_DIRTY, "1")
    provenance.make_results_directory(results / "third")


def test_text_that_has_changed_since_training_is_refused(runs, monkeypatch, tmp_path):
    monkeypatch.setattr(trained, "load_corpus", tiny.changed_corpus(tmp_path))
    with pytest.raises(InputError, match=r"data.path = .*no longer holds the text .*--data"):
        evaluate(runs[1:], lengths=(16,), output=tmp_path)


def test_a_window_longer_than_any_document_names_the_longest(root):
    store = load_corpus(RunConfig.from_dict(tiny.spec(root)).data).validation
    longest = int(np.diff(store.offsets).max())
    assert choose_windows(store, longest - 1, 5)
    with pytest.raises(InputError, match=f"at most {longest - 1}"):
        choose_windows(store, longest, 5)
    assert jax.device_count() == 8


# ---- what context gains


def test_delta_is_the_difference_of_two_perplexities_of_the_same_tokens(runs, tmp_path):
    """Compute equation 6 from the other protocol with the last T_train tokens scored."""
    written = evaluate(runs, protocol="delta", output=tmp_path)
    evaluate(runs, last_tokens=16, output=tmp_path)
    deltas, perplexities = read_runs(tmp_path, "delta"), read_runs(tmp_path)
    for run, expected in zip(deltas, perplexities, strict=True):
        assert run["lengths"] == expected["lengths"]
        local, *beyond = expected["lengths"]
        assert (local["length"], local["num_tokens"]) == (16, 16 * local["num_windows"])
        assert [delta["length"] for delta in run["deltas"]] == [32, 64]
        for delta, full in zip(run["deltas"], beyond, strict=True):
            assert delta["delta"] == pytest.approx(local["perplexity"] - full["perplexity"])
            assert delta["local"] == local["perplexity"]
            assert delta["full"] == full["perplexity"]
            assert delta["low"] <= delta["delta"] <= delta["high"]
            # Paired by documents: variation between easy and hard documents is not noise of the difference.
            assert delta["high"] - delta["low"] < local["high"] - local["low"]
    assert written.figure == tmp_path / "delta.png"
    for table in (written.table, (tmp_path / "delta.md").read_text()):
        for run in deltas:
            for delta in run["deltas"]:
                assert f"{delta['delta']:.2f} [" in table
                assert f"{delta['full']:.2f}" in table
        assert [table.find(f"ΔP({length})") > 0 for length in (16, 32, 64)] == [False, True, True]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(1, 50)), min_size=2, max_size=20), st.floats(-0.9, 0.9))
def test_delta_is_positive_where_context_helps(rows, saved):
    documents, local = np.array([document for document, _ in rows]), np.array([nll for _, nll in rows])
    result = delta_result(64, documents, *(np.outer(nll, np.full(16, 1 / 16)) for nll in (local, local - saved)))
    assert result["delta"] == pytest.approx(result["local"] - result["full"])
    # Every document gains the same nll in every window, so no sample of documents changes the sign.
    assert np.sign(result["delta"]) == np.sign(saved) or result["delta"] == pytest.approx(0)
    if result["low"] is not None and result["high"] is not None:
        assert result["low"] >= 0 or saved < 0
        assert result["high"] <= 0 or saved > 0


def test_runs_on_different_corpora_are_named_with_their_texts(runs, tmp_path, monkeypatch):
    found = {}

    def other_corpora(models: list[TrainedModel], data: str | None) -> list[Corpus]:
        (corpus, *_) = originals(models, data)
        sidecar = dataclasses.replace(corpus.train.sidecar, digest="1" * 64)
        other = dataclasses.replace(corpus, train=dataclasses.replace(corpus.train, sidecar=sidecar))
        found["digests"] = [corpus.digest, other.digest]
        return [corpus, other]

    originals = perplexity.validation_corpora
    monkeypatch.setattr(perplexity, "validation_corpora", other_corpora)
    with pytest.raises(InputError, match=r"data = \{'none': '.*text.* as bytes', 'dape': '.*'\}: must be") as error:
        evaluate(runs, output=tmp_path)
    assert "--data=TEXT" in str(error.value)
    assert len(set(found["digests"])) == 2
    assert not any(digest[:8] in str(error.value) for digest in found["digests"])


def test_models_of_another_train_length_have_no_common_delta(runs, tmp_path, monkeypatch):
    def read(workdir: Path, *arguments: Any) -> TrainedModel:
        model = trained.read_trained(workdir, *arguments)
        if workdir == runs[0]:
            return model
        train = dataclasses.replace(model.run.train, train_length=8)
        return dataclasses.replace(model, run=dataclasses.replace(model.run, train=train))

    monkeypatch.setattr(perplexity, "read_trained", read)
    with pytest.raises(InputError, match=r"train.train_length = \{'none': 16, 'dape': 8\}: must be the same for all"):
        evaluate(runs, protocol="delta", output=tmp_path)


# ---- loss by position


@given(st.integers(1, 200_000))
def test_bins_hold_every_position_once_and_end_at_powers_of_two(length):
    ends = bin_ends(length)
    assert ends[-1] == length
    assert (np.diff(ends) > 0).all()
    assert {2**octave for octave in range(length.bit_length())} <= set(ends.tolist())
    assert len(ends) <= 16 * (length.bit_length() + 1)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_bins_are_means_of_what_was_measured(length, num_windows, train_length, seed):
    nll = np.random.default_rng(seed).exponential(size=(num_windows, length))
    positions = positions_result(np.arange(num_windows), nll, train_length)
    for each in positions["bins"]:
        measured = nll[:, each["first"] - 1 : each["last"]]
        assert each["num_tokens"] == measured.size
        assert each["nll_nats"] == pytest.approx(measured.mean())
        near = [b for b in positions["bins"] if abs(math.log2(b["last"] / each["last"])) <= SMOOTHED_OCTAVES + 1e-9]
        smoothed = nll[:, near[0]["first"] - 1 : near[-1]["last"]].mean()
        assert each["smoothed_nats"] == pytest.approx(smoothed)
        assert each["excess_nats"] == pytest.approx(smoothed - positions["reference_nats"])
    trained = min(train_length, length)
    around = [b for b in positions["bins"] if b["first"] > trained // 2 and b["last"] <= trained]
    assert positions["reference_nats"] == pytest.approx(nll[:, around[0]["first"] - 1 : around[-1]["last"]].mean())
    assert (positions["breaks_at"] is None) or positions["breaks_at"] > train_length


@pytest.mark.parametrize("breaks_at", [None, 100, 700])
def test_a_break_is_found_and_noise_is_not_a_break(breaks_at):
    """Find a loss that rises by twice the margin at a position, with noise ten times as large."""
    nll = np.random.default_rng(0).normal(2.0, 10 * MARGIN_NATS, (64, 1024))
    if breaks_at is not None:
        nll[:, breaks_at - 1 :] += 2 * MARGIN_NATS
    found = positions_result(np.arange(64), nll, 64)["breaks_at"]
    if breaks_at is None:
        assert found is None
    else:
        # The smoothed curve exceeds the margin when half of its window is beyond the break.
        assert breaks_at * 2**-SMOOTHED_OCTAVES < found < breaks_at * 2**SMOOTHED_OCTAVES


def test_loss_by_position_adds_up_to_the_perplexity_of_all_tokens(runs, tmp_path):
    written = evaluate(runs, by_position=True, lengths=(16, 64), output=tmp_path)
    evaluate(runs, lengths=(64,), last_tokens=64, output=tmp_path)
    by_position, whole = read_runs(tmp_path, "positions"), read_runs(tmp_path)
    assert [run["name"] for run in by_position] == ["none", "dape"]
    for run, expected in zip(by_position, whole, strict=True):
        positions, (result,) = run["positions"], expected["lengths"]
        assert positions["length"] == positions["bins"][-1]["last"] == 64
        assert sum(each["num_tokens"] for each in positions["bins"]) == result["num_tokens"]
        total = sum(each["nll_nats"] * each["num_tokens"] for each in positions["bins"])
        assert total == pytest.approx(result["nll_nats"], rel=1e-6)
        assert all(each["excess_low"] <= each["excess_nats"] <= each["excess_high"] for each in positions["bins"])
        assert f"{positions['reference_nats']:.3f}" in written.table
    figure = matplotlib.image.imread(tmp_path / "positions.png")
    assert len(np.unique(figure.reshape(-1, figure.shape[-1]), axis=0)) > 50


# ---- models that diverged


def strict_runs(directory: Path, stem: str) -> list[dict[str, Any]]:
    """Read the runs of a report, and fail on the tokens NaN and Infinity, which are no JSON."""
    return json.loads((directory / f"{stem}.json").read_text(), parse_constant=pytest.fail)["runs"]


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_perplexity_too_large_for_a_float_is_infinite(local, full):
    documents, losses = np.arange(4), [np.full((4, 2), loss) for loss in (local, full)]
    for loss, nll in zip((local, full), losses, strict=True):
        result = length_result(8, documents, nll)
        assert result["perplexity"] == (pytest.approx(math.exp(loss)) if loss < 709 else pytest.approx(math.inf))
        assert (result["perplexity"] == math.inf) == (loss > math.log(np.finfo(float).max))
        assert result["low"] == pytest.approx(result["perplexity"]) == result["high"]
    delta = delta_result(8, documents, *losses)
    if math.isinf(delta["local"]) and math.isinf(delta["full"]):
        assert math.isnan(delta["delta"])  # the difference of two infinities
    else:
        assert delta["delta"] == delta["local"] - delta["full"]


@pytest.mark.parametrize("first_nan", [None, 40, 200])
def test_positions_whose_loss_is_nan_are_where_a_model_breaks(first_nan):
    """NaN does not change the smoothed loss of earlier positions."""
    nll = np.random.default_rng(0).normal(2.0, 0.1, (8, 256))
    expected = positions_result(np.arange(8), nll, 64)
    if first_nan is not None:
        nll[3, first_nan - 1 :] = np.nan
    found = positions_result(np.arange(8), nll, 64)
    assert expected["breaks_at"] is None
    if first_nan is None:
        assert found == expected
        return
    assert max(65, first_nan * 2**-SMOOTHED_OCTAVES) <= found["breaks_at"] <= max(65, first_nan)
    for bin_found, bin_expected in zip(found["bins"], expected["bins"], strict=True):
        is_before = bin_found["last"] * 2**SMOOTHED_OCTAVES < first_nan
        assert math.isnan(bin_found["nll_nats"]) == (bin_found["last"] >= first_nan)
        assert bin_found["smoothed_nats"] == bin_expected["smoothed_nats"] or not is_before


@pytest.mark.parametrize(
    ("kind", "stem"), [({}, "lengths"), ({"protocol": "delta"}, "delta"), ({"by_position": True}, "positions")]
)
@pytest.mark.parametrize("factor", [1e9, math.nan], ids=str)
def test_a_model_that_diverged_is_named_and_does_not_affect_the_others(
    runs, tmp_path, monkeypatch, caplog, kind, stem, factor
):
    def diverge(model: TrainedModel) -> tuple:
        model, mesh, params = trained.restore_current(model)
        is_first = model.workdir == runs[0]
        return model, mesh, params | {"unembedding_DV": params["unembedding_DV"] * (factor if is_first else 1)}

    expected = strict_runs(evaluate(runs[1:], lengths=(16, 32), output=tmp_path / "alone", **kind).directory, stem)
    monkeypatch.setattr(perplexity, "restore_current", diverge)
    with caplog.at_level(logging.WARNING, logger="dape_jax"):
        written = evaluate(runs, lengths=(16, 32), output=tmp_path / "both", **kind)
    diverged, other = strict_runs(written.directory, stem)
    assert [other] == expected
    word = "nan" if math.isnan(factor) else "inf"
    (warning,) = [record.getMessage() for record in caplog.records if record.name == perplexity.__name__]
    assert warning.startswith("none: the loss is NaN" if word == "nan" else "none: the loss is so large")
    assert all(length in warning for length in (("32",) if stem == "positions" else ("16", "32")))
    assert "\n" not in warning
    if stem == "positions":
        assert math.isfinite(float(diverged["positions"]["reference_nats"])) == (word == "inf")
    else:
        assert [result["perplexity"] for result in diverged["lengths"]] == [word, word]
        assert word in written.table
    assert written.figure is not None
    assert written.figure.exists()


@pytest.mark.parametrize("kind", ["perplexity", "delta"])
@pytest.mark.parametrize("value", [1.7e308, 1e99, math.inf, math.nan], ids=str)
def test_figures_leave_out_points_that_cannot_be_drawn(tmp_path, kind, value):
    """Omitted points are still in the table."""
    common = {"num_tokens": 64, "num_windows": 4, "num_documents": 2}
    each = {"length": 16, "perplexity": 3.0, "low": 2.0, "high": 4.0, **common}
    deltas = [{"length": 32, "local": 3.0, "full": 2.0, "delta": 1.0, "low": 0.5, "high": 1.5}]
    deltas.append({"length": 64, "local": value, "full": 2.0, "delta": value, "low": value, "high": value})
    last = {**each, "length": 64, "perplexity": value, "low": value, "high": value}
    run = {"name": "a", "train_length": 16, "last_tokens": 16, "deltas": deltas, "lengths": [each, last]}
    written = report.WRITERS[kind]([run], tmp_path)
    assert report.number(value) in written.table
    _, axes = report.plot_by_length([run], {"perplexity": "lengths", "delta": "deltas"}[kind], kind, "")
    (line,) = axes.get_lines()
    assert np.isfinite(line.get_ydata()).tolist() == [True, value == 1e99]


def test_tables_have_no_number_with_hundreds_of_digits():
    huge = {"perplexity": 1.5e300, "low": 1e299, "high": math.inf}
    assert report.with_interval(huge, "perplexity") == "1.5e+300 [1e+299, inf]"
    assert report.with_interval(huge | {"perplexity": math.nan, "low": math.nan}, "perplexity") == "nan"
    assert report.with_interval({"perplexity": 123456.789, "low": None, "high": None}, "perplexity") == "123456.79"


# ---- files that cannot be written or read


def test_a_text_that_differs_from_its_digest_is_refused(runs, tmp_path):
    """Whole windows could have changed: no result is given."""
    texts, output = tmp_path / "texts", tmp_path / "output"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"text {number} of this test, " * 9)
    evaluate(runs[:1], lengths=(16,), output=output, data=str(texts))
    data = dataclasses.replace(trained.read_trained(runs[0], "newest", {}).run.data, path=str(texts))
    file = load_corpus(data).validation.directory / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="digest = "):
        evaluate(runs[:1], lengths=(16,), output=tmp_path / "other", data=str(texts))
    assert not list((tmp_path / "other").glob("*"))


def test_the_table_is_shown_before_a_full_disk_is_named(runs, tmp_path, monkeypatch):
    shown = []

    def fail(file: Path, content: bytes) -> None:
        assert shown
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    with monkeypatch.context() as patch:
        patch.setattr(report, "write_atomically", fail)
        with pytest.raises(InputError, match=r"output = .*out.*cannot be written to: .*No space left") as error:
            evaluate(runs, lengths=(16,), output=tmp_path / "out", show=shown.append)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "out").iterdir())
    expected = evaluate(runs, lengths=(16,), output=tmp_path / "other")
    assert shown == [expected.table]


def test_a_reader_of_the_output_that_has_exited_loses_no_files(tmp_path):
    def fail(table: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        report.save("stem", tmp_path, {"runs": []}, "caption", [["a"], ["b"]], None, fail)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["stem.csv", "stem.json", "stem.md", "stem.txt"]


@pytest.mark.slow
def test_the_command_line_prints_the_table_and_then_what_cannot_be_written(runs, tmp_path):
    (tmp_path / "lengths.json").mkdir()  # even root cannot replace it by a file
    done = run_command("eval.py", f"--workdir={runs[1]}", "--lengths=16", "--max_windows=2", f"--output={tmp_path}")
    assert done.returncode == 2
    assert done.stdout.startswith("Perplexity of the last 16 tokens")
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"error: output = {str(tmp_path)!r}: cannot be written to: ")
    assert "Traceback" not in done.stderr


def copy_of(run: Path, directory: Path) -> Path:
    return Path(shutil.copytree(run, directory / run.name))


@pytest.mark.parametrize("step", ["newest", "best"])
def test_a_step_that_is_deleted_during_the_evaluation_is_replaced_by_a_newer_one(
    runs, tmp_path, monkeypatch, caplog, step
):
    workdir = copy_of(runs[1], tmp_path)
    expected = read_runs(evaluate([workdir], lengths=(16,), output=tmp_path / "before").directory)[0]

    def compile_and_delete(*arguments: Any) -> list:
        compiled = compile_lengths(*arguments)
        newer = (workdir / "checkpoints" / "4").rename(workdir / "checkpoints" / "6")
        digests = newer / "digests" / "metadata"
        digests.write_text(json.dumps(json.loads(digests.read_text()) | {"step": json_digest(6)}))
        return compiled

    monkeypatch.setattr(perplexity, "compile_lengths", compile_and_delete)
    with caplog.at_level(logging.INFO, logger="dape_jax"):
        found = read_runs(evaluate([workdir], step=step, lengths=(16,), output=tmp_path / "after").directory)[0]
    assert (expected["step"], found["step"]) == (4, 6)
    assert found == expected | {"step": 6}
    said = [record.getMessage() for record in caplog.records if record.name == trained.__name__]
    assert said == ["dape: step 4 was deleted; step 6 is read instead"]


def test_a_step_chosen_by_number_that_is_deleted_is_named(runs, tmp_path, monkeypatch):
    workdir = copy_of(runs[1], tmp_path)

    def compile_and_delete(*arguments: Any) -> list:
        shutil.rmtree(workdir / "checkpoints" / "4")
        return compile_lengths(*arguments)

    monkeypatch.setattr(perplexity, "compile_lengths", compile_and_delete)
    with pytest.raises(InputError, match=r"^step = '4': was deleted from .*; its steps are \['2'\]$"):
        evaluate([workdir], step="4", lengths=(16,), output=tmp_path / "out")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["config.json", "checkpoints", "checkpoints/4", "checkpoints/4/config", "text"])
def test_files_that_cannot_be_read_are_one_line(runs, root, tmp_path, monkeypatch, name, number):
    """Let all system calls on and below a path fail, as on an unreachable file server."""
    workdir = copy_of(runs[1], tmp_path)
    denied = str(root / "text" if name == "text" else workdir / name)

    def failing(call: Callable) -> Callable:
        def fail(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith(f"{denied}/"):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *arguments, **options)

        return fail

    for module, call in ((os, "stat"), (os, "open"), (os, "listdir"), (os, "scandir"), (io, "open")):
        monkeypatch.setattr(module, call, failing(getattr(module, call)))
    monkeypatch.setattr("builtins.open", io.open)

    def evaluate_as_the_command_line() -> None:
        assert not trained.are_algorithmic([workdir])
        evaluate([workdir], step="4", lengths=(16,), output=tmp_path / "out")

    with pytest.raises(InputError) as error:
        evaluate_as_the_command_line()
    assert "\n" not in str(error.value)
    assert str(root / "text" if name == "text" else workdir) in str(error.value)


# ---- memory


def compiled_at(run: RunConfig, length: int, last_tokens: int, **model):
    """Compile the scoring step for one sequence per device; nothing is allocated."""
    config = dataclasses.replace(run.model, **model)
    mesh = make_mesh(run.mesh)
    graphdef, abstract = model_structure(model_at(config, length, run.evaluation, "rope", 16))
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        parameter_shardings(abstract, mesh),
    )
    rows = jax.ShapeDtypeStruct((mesh.size, length), jnp.int32, sharding=NamedSharding(mesh, BATCH))
    with jax.set_mesh(mesh):
        return make_nll_step(graphdef, last_tokens).lower(params, {"inputs": rows, "targets": rows}).compile()


def growth(run: RunConfig, length: int, last_tokens: int | None = None) -> float:
    """Return the growth of predicted memory when the length is multiplied by four."""
    short, long = (predicted_bytes(compiled_at(run, n, last_tokens or n)) for n in (length, 4 * length))
    return long / short


def test_predicted_memory_is_linear_in_length(root):
    run = RunConfig.from_dict(tiny.spec(root, model__num_layers=1))
    assert growth(run, 8192, last_tokens=16) <= 4.3
    assert growth(run, 8192) <= 4.3  # by position: every token is scored
    dense = RunConfig.from_dict(tiny.spec(root, model__num_layers=1, evaluation__blockwise_from=10**6))
    assert growth(dense, 1024, last_tokens=16) > 12  # what the figure would be if anything were quadratic


DAPE, NONE = tiny.SPEC["model"]["processor"], {"name": "none"}
ONE_OF_EACH_KIND = ("nope", "kerple", "cope", "transformer_xl")
CLOSE_TO_OTHERS = [(bias, DAPE) for bias in sorted(CHOICES["bias"]) if bias not in ONE_OF_EACH_KIND]
CLOSE_TO_OTHERS += [(bias, NONE) for bias in ONE_OF_EACH_KIND]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bias", "processor"),
    [
        *((bias, DAPE) for bias in ONE_OF_EACH_KIND),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in CLOSE_TO_OTHERS),
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_predicted_memory_is_linear_in_length_for_every_method(root, bias, processor):
    run = RunConfig.from_dict(tiny.spec(root, model__bias={"name": bias}, model__processor=processor))
    assert growth(run, 8192, last_tokens=16) <= 4.3


def test_no_more_than_a_chunk_of_logits_is_held(root):
    """Check by position at a large vocabulary, where [T, V] logits would take most of the memory."""
    run = RunConfig.from_dict(tiny.spec(root, model__num_layers=1))
    length, vocab_size = 8192, 20_000
    found = predicted_bytes(compiled_at(run, length, length, vocab_size=vocab_size, num_outputs=vocab_size))
    assert found < length * vocab_size * 4 / 2
    small = predicted_bytes(compiled_at(run, 1024, 1024, vocab_size=vocab_size, num_outputs=vocab_size))
    assert small > 1024 * vocab_size * 4  # a chunk of logits is counted


def test_unembedding_in_chunks_changes_no_value(root):
    """Test chunks that divide the number of tokens and chunks that do not."""
    run = RunConfig.from_dict(tiny.spec(root, model__num_layers=1))
    mesh = make_mesh(run.mesh)
    params = init_params(run.model, 0, mesh)
    graphdef, _ = model_structure(run.model)
    tokens = np.random.default_rng(0).integers(0, 257, (8, 17)).astype(np.int32)
    with jax.set_mesh(mesh):
        batch = put_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)
        plain = make_nll_step(graphdef, 16)(params, batch)
        for last_tokens, logits_chunk_tokens in ((16, 5), (15, 5), (7, 1)):
            chunked = make_nll_step(graphdef, last_tokens, logits_chunk_tokens)(params, batch)
            np.testing.assert_allclose(plain[:, -last_tokens:], chunked, rtol=1e-6)


def test_a_length_that_does_not_fit_is_refused_with_one_that_does(runs, root, tmp_path, monkeypatch):
    """Reject before weights are read; the named length fits, and twice this length does not."""
    run = RunConfig.from_dict(tiny.spec(root))
    needed = {length: predicted_bytes(compiled_at(run, length, 16)) for length in (16, 32, 64)}
    assert needed[16] < needed[32] < needed[64]
    monkeypatch.setattr(perplexity, "restore_current", None)  # calling it would be a TypeError
    monkeypatch.setattr(programs, "available_bytes", lambda mesh: needed[32])
    for lengths, said in (
        ((16, 64), "halved repeatedly, the first length that fits is 32"),
        ((32, 64), "largest of --lengths that fits is 32"),
    ):
        with pytest.raises(InputError) as error:
            evaluate(runs[1:], lengths=lengths, max_windows=8, output=tmp_path)
        assert str(error.value).startswith("evaluation.lengths = 64: dape needs ")
        assert f"{needed[64] / 2**30:.2f} GiB on each device, where {needed[32] / 2**30:.2f} GiB are free" in str(
            error.value
        )
        assert str(error.value).endswith(said)
    assert not list(tmp_path.glob("lengths.*"))


def test_a_compiler_that_runs_out_of_memory_has_found_what_does_not_fit(root, monkeypatch):
    """Compilers for TPUs run out of memory because they know the chip's memory."""
    mesh, tiny_model = make_mesh_of_all(), untrained(tiny.spec(root)).run.model

    class Step:
        def __init__(self, length: int, message: str):
            self.jitted = jax.jit(lambda params, batch: batch["inputs"] + 1)
            self.message, self.length = message, length

        def __call__(self, *args): ...
        def trace(self, *args): ...

        def lower(self, *args):
            return self.jitted.lower(*args) if self.length <= 24 else self

        def compile(self):
            raise jax.errors.JaxRuntimeError(self.message)

    def compile_with(message: str):
        return compile_programs(
            lambda length: (Step(length, message), tiny_model, mesh.size),
            [8, 64],
            {},
            mesh,
            batch_names=("inputs",),
            name="big",
        )

    with pytest.raises(InputError) as error:
        compile_with("RESOURCE_EXHAUSTED: CompileTimeHbmOom: 117.79G needed")
    assert str(error.value).startswith("evaluation.lengths = 64: big needs more than the compiler can allocate")
    assert str(error.value).endswith("halved repeatedly, the first length that fits is 16")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_with("INTERNAL: a bug")
    monkeypatch.setattr(programs, "available_bytes", lambda mesh: 1)
    with pytest.raises(InputError, match=r"big needs more .* for 8 sequences at once; no length fits"):
        compile_with("RESOURCE_EXHAUSTED")


def test_the_predicted_program_is_the_one_that_runs(root, caplog):
    """Scoring compiles no other programs, and the prediction for long lengths is logged."""
    model = untrained(tiny.spec(root))
    mesh, store = make_mesh(model.mesh), load_corpus(model.run.data).validation
    params = init_params(model.run.model, 0, mesh)
    windows = choose_windows(store, 64, 8)
    with caplog.at_level(logging.INFO):
        compiled = compile_lengths(model, "rope", len(windows))
    (said,) = [record.getMessage() for record in caplog.records if record.name == programs.__name__]
    assert said.startswith("test: length 64 is predicted to take 0.00 GiB on each device, where ")
    score_windows(compiled, params, mesh, store, windows, "test")  # compiles the remaining functions
    caplog.clear()
    with jax.log_compiles(True):
        score_windows(compiled, params, mesh, store, windows, "test")
        assert not [record for record in caplog.records if "ompil" in record.getMessage()]
        jax.jit(lambda x: x * 3)(1.0)
        assert [record for record in caplog.records if "ompil" in record.getMessage()]


def test_progress_is_measured_in_work(root, monkeypatch):
    """Eight times the tokens are more than eight times the work, so that the remaining time is right."""
    bars, model = [], untrained(tiny.spec(root, evaluation__lengths=(8, 64)))

    class Bar(Progress):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.updates = []
            bars.append(self)

        def update(self, n=1):
            self.updates.append(n)
            return super().update(n)

    monkeypatch.setattr(perplexity, "Progress", Bar)
    mesh, store = make_mesh(model.mesh), load_corpus(model.run.data).validation
    windows = choose_windows(store, 64, 4)
    compiled = compile_lengths(model, "rope", len(windows))
    score_windows(compiled, init_params(model.run.model, 0, mesh), mesh, store, windows, "test")
    (bar,) = bars
    short, long = (len(windows) * forward_flops(model.run.model, length, 1).total for length in (8, 64))
    assert (bar.n, bar.total, bar.updates[0], sum(bar.updates[1:])) == (short + long, short + long, short, long)
    assert long > 8 * short


GROUPS = {
    "v2": ("0::/a/b", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "v1": (
        "4:memory:/a/b",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
    "v1 with another": (
        "3:cpu,memory:/a/b",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize("version", GROUPS)
@pytest.mark.parametrize("place", ["", "a", "a/b"])
def test_available_memory_is_limited_by_host_and_control_group(tmp_path, version, place):
    (line, top, limit, usage, cache), MIB = GROUPS[version], 2**20
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:   8192000 kB\nMemAvailable:    4096 kB\nHugePages_Total:   0\n")
    (tmp_path / "proc/self/cgroup").write_text(f"9:pids:/x\n{line}\n")
    assert host_available_bytes(tmp_path) == 4 * MIB  # no control group to be seen
    group = tmp_path / top / place
    group.mkdir(parents=True)
    (group / usage).write_text(f"{6 * MIB}\n")
    for said, expected in (("max", 4), (str(2**63 - 4096), 4), (str(9 * MIB), 3), (str(5 * MIB), 0)):
        (group / limit).write_text(f"{said}\n")
        assert host_available_bytes(tmp_path) == expected * MIB
    (group / "memory.stat").write_text(f"anon 5\n{cache} {5 * MIB}\n")
    assert host_available_bytes(tmp_path) == 4 * MIB  # 5 allowed, of which 1 is permanently used
    (group / limit).write_text(f"{3 * MIB}\n")
    assert host_available_bytes(tmp_path) == 2 * MIB


def test_devices_of_a_cpu_share_its_memory():
    mesh = make_mesh_of_all()
    total = available_bytes(mesh) * mesh.size
    assert total == pytest.approx(host_available_bytes(), rel=0.2)
    assert 2**26 < total < 2**50


@pytest.mark.slow
def test_every_protocol_from_the_command_line(runs):
    common = runs[0].parent
    for flags, stem in ((["--protocol=delta"], "delta"), (["--by_position"], "positions")):
        done = run_command("eval.py", f"--workdir={runs[0]},{runs[1]}", "--lengths=16,32", *flags)
        assert done.returncode == 0, done.stderr
        assert "is predicted to take" in done.stderr
        assert str(common / f"{stem}.png") in done.stdout
        assert sorted(file.name for file in common.glob(f"{stem}.*")) == [
            f"{stem}.{e}" for e in ("csv", "json", "md", "pdf", "png", "txt")
        ]
    done = run_command("eval.py", "--help")
    assert all(f"--{name}" in done.stdout for name in ("workdir", "[no]by_position", "[no]dropout", "num_sequences"))
    done = run_command("eval.py", f"--workdir={runs[0]}", "--protocol=deltas")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: protocol = 'deltas': must be one of ['perplexity', 'delta']"]
    done = run_command("eval.py", f"--workdir={runs[0]}", "--num_sequences=3")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: --num_sequences = 3: must not be given: it is only for runs on tasks"]
