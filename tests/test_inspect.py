"""`inspect` reports the content of a corpus's stores, and a damaged corpus in one line."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dape_jax.data import inspect
from dape_jax.data.inspect import FIGURE_FILE, JSON_FILE, InspectConfig
from dape_jax.data.store import Corpus, DataConfig, TokenStore, load_corpus
from dape_jax.data.tokenizers import save_tokenizer, train_bpe
from dape_jax.errors import InputError


def inspect_corpus(directory: Path, **changes) -> dict:
    return inspect.inspect_corpus(directory, InspectConfig(**changes))


HOSTILE = "\x1b[2J\x1b]0;title\x07 \u202eright to left\u2028line\r\n日本語 "


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def corpus(request, tmp_path_factory) -> Corpus:
    """Return a corpus of forty files of words and one with control sequences."""
    root = tmp_path_factory.mktemp("inspect")
    text = tiny.write_text(root / "text")
    (text / "hostile.txt").write_text(HOSTILE * 20)
    tokenizer = "bytes"
    if request.param == "bpe":
        save_tokenizer(train_bpe((file.read_text() for file in sorted(text.iterdir())), 300), root)
        tokenizer = str(root / "tokenizer.json")
    return load_corpus(DataConfig(str(text), tokenizer, str(root / "cache"), 0.3, 0))


def directory_of(corpus: Corpus) -> Path:
    return corpus.train.directory.parent


def copied(corpus: Corpus, to: Path) -> Path:
    """Return a copy to damage."""
    for store in (corpus.train, corpus.validation):
        (to / store.sidecar.split).mkdir(parents=True)
        for file in store.directory.iterdir():
            (to / store.sidecar.split / file.name).write_bytes(file.read_bytes())
    return to


def test_counts_lengths_and_samples_are_the_stores(corpus, capsys):
    content = inspect_corpus(directory_of(corpus), samples=1000)
    printed = capsys.readouterr().out
    tokenizer = corpus.train.tokenizer
    assert (content["tokenizer"], content["vocab_size"]) == (tokenizer.name, tokenizer.vocab_size)
    for store in (corpus.train, corpus.validation):
        summary = content["splits"][store.sidecar.split]
        documents = [store.document(i)[:-1] for i in range(store.num_documents)]
        sizes = np.array([len(tokens) for tokens in documents])
        assert (summary["num_documents"], summary["num_tokens"]) == (len(sizes), sizes.sum() + len(sizes))
        assert summary["digest"] == store.digest
        assert summary["lengths"]["mean"] == pytest.approx(sizes.mean())
        quantiles = summary["lengths"]["quantiles"]
        assert (quantiles["smallest"], quantiles["largest"]) == (sizes.min(), sizes.max())
        assert (sizes <= quantiles["median"]).mean() >= 0.5 >= (sizes < quantiles["median"]).mean()
        for row in summary["lengths"]["histogram"]:
            assert row["documents"] == np.count_nonzero((row["from"] <= sizes) & (sizes <= row["to"]))
        assert sum(row["documents"] for row in summary["lengths"]["histogram"]) == len(sizes)
        text = [tokenizer.decode(tokens) for tokens in documents]
        assert summary["bytes_per_token"] == pytest.approx(sum(map(len, text)) / sizes.sum())
        assert [sample["text"] for sample in summary["samples"]] == [whole.decode()[:200] for whole in text]
        for said in (
            f"{len(sizes):,} documents",
            f"{summary['num_tokens']:,} tokens",
            f"digest {store.digest}: verified",
        ):
            assert said in printed


def test_control_characters_of_a_text_are_escaped(corpus, capsys):
    inspect_corpus(directory_of(corpus), samples=1000)
    printed = capsys.readouterr().out
    assert r"\x1b[2J" in printed  # the hostile text was shown
    assert all(char.isprintable() or char == "\n" for char in printed)


def test_samples_are_seeded(corpus, capsys):
    def sampled(seed: int) -> list[int]:
        train = inspect_corpus(directory_of(corpus), samples=5, seed=seed)["splits"]["train"]
        return [sample["document"] for sample in train["samples"]]

    assert sampled(0) == sampled(0) != sampled(1)
    assert len(set(sampled(0))) == 5


def test_one_store_can_be_inspected_alone(corpus, capsys):
    whole = inspect_corpus(directory_of(corpus))
    alone = inspect_corpus(corpus.validation.directory)
    assert alone["splits"] == {"validation": whole["splits"]["validation"]}


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**40)), min_size=1, max_size=30))
def test_the_histogram_holds_every_length_once(corpus, sizes):
    """Check also with a store larger than a chunk, and larger than the sample for quantiles."""
    num_tokens = sum(sizes) + len(sizes)
    sidecar = dataclasses.replace(corpus.train.sidecar, num_documents=len(sizes), num_tokens=num_tokens)
    tokens = np.broadcast_to(np.uint16(0), num_tokens)
    offsets = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64) + 1)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "_CHUNK", 4)
        patch.setattr(inspect, "_MAX_RANKED", 10)
        lengths = inspect._lengths(TokenStore(Path("memory"), sidecar, tokens, offsets), 0)
    for row in lengths["histogram"]:
        assert row["documents"] == sum(row["from"] <= size <= row["to"] for size in sizes)
    assert sum(row["documents"] for row in lengths["histogram"]) == len(sizes)
    assert lengths["mean"] == pytest.approx(np.mean(sizes))
    assert set(lengths["quantiles"].values()) <= set(sizes)
    assert len(sizes) > 10 or lengths["quantiles"]["largest"] == max(sizes)


def test_output_holds_the_same_and_is_never_overwritten(corpus, tmp_path, capsys):
    output = tmp_path / "not" / "there yet"
    content = inspect_corpus(directory_of(corpus), output=str(output))
    assert json.loads((output / JSON_FILE).read_text()) == content
    assert (output / FIGURE_FILE).read_bytes().startswith(b"\x89PNG")
    for name in (JSON_FILE, FIGURE_FILE):
        with pytest.raises(InputError, match=rf"output = .*: must not contain {name} yet"):
            inspect_corpus(directory_of(corpus), output=str(output))
        (output / name).unlink()


def test_rejected_records_are_counted(corpus, tmp_path, capsys):
    directory = copied(corpus, tmp_path / "corpus")
    assert "rejected" not in inspect_corpus(directory)  # a corpus without a record has no such counts
    record = json.loads((directory_of(corpus) / "record.json").read_text())
    record["rejected"] = {"not JSON\x1b": 1200, "no such field": 0}
    (directory / "record.json").write_text(json.dumps(record))
    capsys.readouterr()
    content = inspect_corpus(directory)
    assert content["rejected"] == record["rejected"]
    printed = capsys.readouterr().out
    assert "rejected: 1,200 not JSON\\x1b\n" in printed
    assert str(directory / "rejected.jsonl") in printed


@pytest.mark.parametrize("value", [7, [], {"not JSON": "1"}, {"not JSON": -1}])
def test_a_damaged_record_is_refused(corpus, tmp_path, value):
    directory = copied(corpus, tmp_path / "corpus")
    record = json.loads((directory_of(corpus) / "record.json").read_text())
    (directory / "record.json").write_text(json.dumps(record | {"rejected": value}))
    with pytest.raises(InputError, match=r"record\.json"):
        inspect_corpus(directory)


def test_no_text_of_a_damaged_corpus_is_shown(corpus, tmp_path, capsys):
    directory = copied(corpus, tmp_path / "corpus")
    file = directory / "train" / "tokens.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"train/store\.json: digest"):
        inspect_corpus(directory, output=str(tmp_path / "output"))
    assert ": verified" not in capsys.readouterr().out
    assert not list((tmp_path / "output").iterdir())


@pytest.mark.parametrize("missing", ["train", "validation"])
def test_half_a_corpus_is_refused(corpus, tmp_path, missing):
    directory = copied(corpus, tmp_path / "corpus")
    (directory / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=rf"{missing}/store\.json"):
        inspect_corpus(directory)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"samples": -1}, "samples = -1"), ({"seed": -1}, "seed = -1"), ({"seed": 2**32}, "seed")],
)
def test_bad_numbers_are_refused(corpus, changes, words):
    with pytest.raises(InputError, match=words):
        inspect_corpus(directory_of(corpus), **changes)


def run(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "dape_jax.data.inspect", *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("corpus", ["bpe"], indirect=True)
def test_the_command_line(corpus, tmp_path):
    done = run(directory_of(corpus), "--samples=100", f"--output={tmp_path}/output")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("digest [0-9a-f]{64}: verified", done.stdout)) == 2
    assert r"\u65e5" in done.stdout  # a terminal that is not UTF-8
    assert json.loads((tmp_path / "output" / JSON_FILE).read_text())["source"] == corpus.train.sidecar.source

    directory = copied(corpus, tmp_path / "corpus")
    with open(directory / "validation" / "tokens.bin", "r+b") as file:
        file.truncate(10)
    for arguments, words in (
        ([directory], "validation/store.json: num_tokens"),
        ([tmp_path], "directory = "),
        ([], "DIR = ''"),
        ([directory, directory], "must be DIR and flags"),
    ):
        failed = run(*arguments)
        assert failed.returncode == 2
        (line,) = failed.stderr.splitlines()
        assert line.startswith("error: ")
        assert words in line
