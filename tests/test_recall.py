"""Recall: sequences with one answer to each question, controls that bracket a model, and what is left behind."""

import json
import shutil
from pathlib import Path

import jax
import matplotlib.image
import numpy as np
import pytest
import scipy.stats
import tiny
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from test_command_lines import run as run_command

from dape_jax.data.tokenizers import Bytes
from dape_jax.errors import InputError
from dape_jax.evaluation import recall as module
from dape_jax.evaluation.recall import (
    ASKED,
    BLOCK,
    LINES,
    distances_at,
    draw_trials,
    letters_of,
    measure,
    recall,
    write_corpus,
)
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.model.transformer import model_structure
from dape_jax.training import loop

LETTERS = letters_of(Bytes())


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recall")


@pytest.fixture(scope="module")
def runs(root) -> list[Path]:
    """A trained run and its copy."""
    loop.train(tiny.spec(root, train__num_steps=2), root / "runs" / "dape")
    shutil.copytree(root / "runs" / "dape", root / "runs" / "copy")
    return [root / "runs" / "copy", root / "runs" / "dape"]


def is_sequence(task: str, tokens_T: np.ndarray, distance: int) -> bool:
    """Whether a sequence is what the module says."""
    length = len(tokens_T)
    block = tokens_T[length - BLOCK - distance : length - distance]
    end = tokens_T[length - BLOCK :]
    filler = np.concatenate([tokens_T[: length - BLOCK - distance], tokens_T[length - distance : length - BLOCK]])
    if len(set(block.tolist())) < BLOCK or set(filler.tolist()) & set(block.tolist()):
        return False
    if task == "copy":
        return end.tolist() == block.tolist()
    pairs = {tuple(pair) for pair in block.reshape(-1, 2).tolist()}
    return {tuple(pair) for pair in end.reshape(-1, 2).tolist()} == pairs


cases = st.tuples(st.sampled_from(list(ASKED)), st.integers(16, 200), st.integers(0, 10**6), st.integers(0, 2**40))


@settings(deadline=None, max_examples=60)
@given(cases)
def test_sequences_are_what_they_are_said_to_be(case):
    task, length, place, seed = case
    distance = BLOCK + place % (length - 2 * BLOCK + 1)
    arguments = {"length": length, "distance": distance, "trials": 3}
    tokens_BT = draw_trials(task, LETTERS, **arguments, seed=seed)
    assert tokens_BT.shape == (3, length)
    assert set(tokens_BT.ravel().tolist()) <= set(LETTERS.tolist())
    assert all(is_sequence(task, tokens_T, distance) for tokens_T in tokens_BT)
    np.testing.assert_array_equal(tokens_BT, draw_trials(task, LETTERS, **arguments, seed=seed))
    assert (tokens_BT != draw_trials(task, LETTERS, **arguments, seed=seed + 1)).any()
    assert (tokens_BT[0] != tokens_BT[1]).any()


def test_letters_are_what_is_written_with_letters_alone():
    assert bytes(LETTERS.tolist()) == bytes(sorted(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))

    class Pieces(Bytes):
        """Tokens of several letters, one of letters and others, one that is not there, and an end of document."""

        name = "pieces"
        vocab_size = 14

        def decode(self, ids):
            pieces = [b"the", b" the", b"a1", b"\xc3", "é".encode(), b"", *(b"xy" + bytes([i]) for i in b"ABCDEFGH")]
            if ids[0] == 2:
                raise InputError("ids = 2: not in the vocabulary")
            return pieces[ids[0]]

    assert letters_of(Pieces()).tolist() == [0, *range(6, 14)]

    class TooFew(Pieces):
        vocab_size = 13

    with pytest.raises(InputError, match=r"data.tokenizer = 'pieces': more than 8 tokens .* has 8"):
        letters_of(TooFew())


# ---- controls


def look_back(tokens_BT: np.ndarray, horizon: int, rng: np.random.Generator) -> np.ndarray:
    """What followed the same token the last time, if that was no more than `horizon` tokens ago; else any letter."""
    length = tokens_BT.shape[1]
    answers_BT = rng.choice(LETTERS, (len(tokens_BT), BLOCK))
    for b, tokens_T in enumerate(tokens_BT):
        for i in range(BLOCK):
            t = length - BLOCK + i
            earlier = [s for s in range(max(0, t - horizon), t) if tokens_T[s] == tokens_T[t]]
            if earlier:
                answers_BT[b, i] = tokens_T[earlier[-1] + 1]
    return answers_BT


def is_by_chance(result, chance: float) -> bool:
    return scipy.stats.binomtest(result.num_right, result.num_asked, chance).pvalue > 1e-4


@pytest.mark.parametrize("task", ASKED)
@pytest.mark.parametrize("distance", [8, 16, 64, 128, 248])
def test_an_oracle_is_always_right_and_one_that_sees_less_only_up_to_there(task, distance):
    options = {"length": 256, "distance": distance, "trials": 60, "seed": 1}
    oracle = measure(lambda tokens_BT: look_back(tokens_BT, 256, np.random.default_rng(0)), task, LETTERS, **options)
    assert oracle.accuracy == oracle.high == 1
    assert oracle.num_right == oracle.num_asked == 60 * len(ASKED[task])
    limited = measure(lambda tokens_BT: look_back(tokens_BT, 90, np.random.default_rng(0)), task, LETTERS, **options)
    if distance <= 90 - BLOCK:
        assert limited.accuracy == 1
    else:
        assert is_by_chance(limited, 1 / len(LETTERS))


@pytest.mark.parametrize("task", ASKED)
def test_guesses_are_right_by_chance(task):
    rng = np.random.default_rng(0)
    options = {"length": 64, "distance": 32, "trials": 400, "seed": 2}

    def guess_letters(tokens_BT):
        return rng.choice(LETTERS, (len(tokens_BT), BLOCK))

    def guess_answers(tokens_BT):
        """Of what the block answers, without its order."""
        answers = tokens_BT[:, [64 - BLOCK - 32 + place + 1 for place in ASKED[task]]]
        return rng.permuted(np.repeat(answers, 4, axis=1), axis=1)[:, :BLOCK]

    uniform = measure(guess_letters, task, LETTERS, **options)
    assert is_by_chance(uniform, 1 / 52)
    assert uniform.low < 1 / 52 < uniform.high
    within = measure(guess_answers, task, LETTERS, **options)
    assert is_by_chance(within, 1 / len(ASKED[task]))
    assert not is_by_chance(within, 1 / 52)


# ---- models


def test_answers_are_the_likeliest_letters_of_the_whole_forward(runs, tmp_path):
    """Whatever the batches and the length's implementation of attention: counted from logits of every position."""
    recall(runs[1:], lengths=(16, 64), trials=5, output=tmp_path)
    (found,) = json.loads((tmp_path / "recall.json").read_text())["runs"]
    trained = read_trained(runs[1], "newest", {})
    _, params = restore(trained)
    graphdef, _ = model_structure(trained.run.model)
    forward = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
    expected = []
    for length in (16, 64):
        for task in ASKED:
            for distance in distances_at(length, ()):
                tokens_BT = draw_trials(task, LETTERS, length=length, distance=distance, trials=5, seed=0)
                logits_BTV = np.asarray(forward(params, tokens_BT.astype(np.int32)))
                places = length - BLOCK + np.array(ASKED[task])
                answers = LETTERS[logits_BTV[:, places][..., LETTERS].argmax(-1)]
                expected.append((task, length, distance, int((answers == tokens_BT[:, places + 1]).sum())))
    assert [(r["task"], r["length"], r["distance"], r["num_right"]) for r in found["results"]] == expected
    assert [(length, distance) for task, length, distance, _ in expected if task == "copy"] == [
        *((16, 8), (64, 8), (64, 16), (64, 32))
    ]


def test_a_comparison_is_the_same_twice_and_earlier_ones_are_kept(runs, tmp_path):
    contents = []
    for output in (tmp_path / "first", tmp_path / "second"):
        written = recall(runs, lengths=(24, 40), distances=(8, 11, 32), trials=9, output=output)
        contents.append((output / "recall.json").read_bytes())
    assert contents[0] == contents[1]
    results = json.loads(contents[0])["runs"]
    assert [run["name"] for run in results] == ["copy", "dape"]
    assert results[0]["results"] == results[1]["results"]
    for run in results:
        assert run["chance"] == 1 / run["num_letters"] == 1 / 52
        assert {(r["length"], r["distance"]) for r in run["results"]} == {
            (24, 8),
            (24, 11),
            (40, 8),
            (40, 11),
            (40, 32),
        }
        assert all(r["low"] <= r["accuracy"] <= r["high"] for r in run["results"])
        assert all(r["num_asked"] == 9 * len(ASKED[r["task"]]) for r in run["results"])
    first = results[0]["results"][0]
    for table in (written.table, (output / "recall.md").read_text()):
        assert f"{first['accuracy']:.2f} [{first['low']:.2f}, {first['high']:.2f}]" in table
    picture = matplotlib.image.imread(output / "recall.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50
    recall(runs, lengths=(24,), trials=1, seed=1, output=output)
    assert [file.read_bytes() for file in output.glob("recall.*.json")] == [contents[1]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": (15, 64)}, ["lengths = (15, 64)", "16 tokens or more"]),
        ({"lengths": (64, 32)}, ["evaluation.lengths", "increasing"]),
        ({"lengths": (16, 64), "distances": (7, 16)}, ["distances = (7, 16)", "8 (a block) to 56"]),
        ({"lengths": (16, 64), "distances": (8, 57)}, ["distances = (8, 57)", "8 (a block) to 56"]),
        ({"lengths": (16, 64), "distances": (16, 8)}, ["distances = (16, 8)", "increasing"]),
        ({"lengths": (16, 64), "distances": (32,)}, ["lengths = 16", "has room for none of (32,)"]),
        ({"trials": 0}, ["trials = 0", "1 or more"]),
        ({"seed": -1}, ["seed = -1", "0 or more"]),
        ({"step": "3"}, ["step = '3'"]),
    ],
)
def test_bad_input_is_named(runs, tmp_path, options, words):
    with pytest.raises(InputError) as error:
        recall(runs, output=tmp_path / "out", **options)
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_weights_are_read(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "restore", None)  # calling it would be a TypeError
    monkeypatch.setattr("dape_jax.evaluation.memory.available_bytes", lambda mesh: 1)
    with pytest.raises(InputError, match=r"evaluation.lengths = 16: dape needs .* no length fits"):
        recall(runs[1:], lengths=(16,), output=tmp_path)


# ---- text to train on


@settings(deadline=None, max_examples=5)
@given(st.integers(16, 80), st.integers(0, 1000))
def test_every_line_of_the_text_is_a_sequence(tmp_path_factory, length, seed):
    directory = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(directory, documents=2, length=length, seed=seed)
    files = sorted(directory.iterdir())
    assert len(files) == 2
    assert files[0].read_bytes() != files[1].read_bytes()
    seen = set()
    for file in files:
        lines = file.read_bytes().splitlines()
        assert len(lines) == LINES
        for line in lines:
            tokens_T = Bytes().encode(line)
            assert len(tokens_T) <= length
            of_line = [
                (task, distance)
                for task in ASKED
                for distance in range(BLOCK, len(line) - BLOCK + 1)
                if is_sequence(task, tokens_T, distance)
            ]
            assert of_line
            seen.update(of_line)
    assert {task for task, _ in seen} == set(ASKED)
    distances = {distance for _, distance in seen}
    assert min(distances) == BLOCK
    assert max(distances) > 0.8 * (length - BLOCK)


def test_text_is_not_written_over(tmp_path):
    for arguments, words in (
        ({"documents": 1, "length": 15}, "lengths = 15: 16 letters or more"),
        ({"documents": 0, "length": 64}, "documents = 0: 1 or more"),
    ):
        with pytest.raises(InputError, match=words):
            write_corpus(tmp_path / "corpus", **arguments)
    write_corpus(tmp_path / "corpus", documents=1, length=20)
    with pytest.raises(InputError, match=r"corpus = .*does not exist yet"):
        write_corpus(tmp_path / "corpus", documents=1, length=20)


@pytest.mark.slow
def test_from_the_command_line(root, runs, tmp_path):
    command = ("-m", "dape_jax.evaluation.recall")
    done = run_command(
        *command, f"--workdir={runs[0]},{runs[1]}", "--lengths=16,32", "--trials=2", f"--output={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "recall.png") in done.stdout
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"recall.{e}" for e in ("json", "md", "png", "txt")]
    done = run_command(*command, f"--corpus={tmp_path}/text", "--documents=3", "--lengths=40")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "text").iterdir())) == 3
    for flags, words in (
        ([], "--workdir = []: either this or --corpus=DIR"),
        (["--corpus=x", "--lengths=16,32"], "--lengths = ['16', '32']: one number"),
        ([f"--workdir={runs[0]}", "--distances=far"], "--distances = ['far']: whole numbers"),
        ([f"--workdir={runs[0]}", "--distances=3"], "distances = (3,): 8 (a block) to"),
    ):
        done = run_command(*command, *flags)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {words}")
