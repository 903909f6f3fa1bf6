"""Check tokenizers: no text is lost or ends a document, and a file is accepted unchanged or rejected."""

import copy
import json
import random
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tokenizers as library
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import load_corpus

from dape_jax.data import tokenizers
from dape_jax.data.prepare.command import PrepareConfig, prepare, show
from dape_jax.data.store import DataConfig
from dape_jax.data.tokenizers import (
    END_TOKENS,
    TOKENIZER_FILE,
    Bytes,
    HfTokenizer,
    read_tokenizer,
    save_tokenizer,
    train_bpe,
)
from dape_jax.errors import InputError
from dape_jax.evaluation.trained import read_trained
from dape_jax.tools.completion import added_text
from dape_jax.tools.maps import read_tokens
from dape_jax.training.loop import train

quick = settings(max_examples=40, deadline=None)

TEXTS = [
    "def main(argument):\n    if argument is None:\n        return None\n",
    "The scores of a long text are a picture whose rows are queries.\r\n\r\n\tThe columns are keys.   ",
    "Übergrößenträger, naïve café; 日本語のテキスト, עברית; 👩‍👩‍👧‍👦 👍🏽 don't we'll 12345\n",
] * 3
SPACES = [" " * n for n in range(24, 1, -1)]
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}

# Texts with special tokens, cut characters, runs of spaces, and characters that normalisation would change.
SPECIAL = (*END_TOKENS, "<|padding|>", "<|im_end|>", "\r\n", "e\u0301", "\u212b", "\u0000", "don't", "▁", "Ġ")
pieces = st.one_of(st.text(), st.sampled_from(SPECIAL), st.integers(1, 60).map(lambda n: " " * n))
texts = st.lists(pieces, max_size=8).map("".join)


def trained() -> dict[str, Any]:
    return json.loads(train_bpe(TEXTS, 400).content)


def gpt2() -> dict[str, Any]:
    """Return a file like GPT-2's: no type of the model, merges as strings, the end of a document last."""
    model = trained()["model"]
    vocab = {token: id - 1 for token, id in model["vocab"].items() if id}
    end = len(vocab)
    empty = dict.fromkeys(("unk_token", "continuing_subword_prefix", "end_of_word_suffix"), "")
    merges = [" ".join(pair) for pair in model["merges"]]
    return {
        "version": "1.0",
        "added_tokens": [{"id": end, "content": "<|endoftext|>", **ADDED, "normalized": True}],
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": BYTE_LEVEL,
        "decoder": BYTE_LEVEL | {"add_prefix_space": True},
        "model": empty | {"vocab": vocab | {"<|endoftext|>": end}, "merges": merges},
    }


def qwen() -> dict[str, Any]:
    """Return a file like Qwen's, whose regular expression splits words, with runs of spaces, like GPT-NeoX's."""
    content = gpt2()
    del content["model"]["vocab"]["<|endoftext|>"]
    end = len(content["model"]["vocab"])
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    words += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    added = [{"id": end + i, "content": token, **ADDED} for i, token in enumerate([END_TOKENS[0], "<|im_end|>"])]
    plain = ADDED | {"special": False, "normalized": True}
    added += [{"id": end + 2 + i, "content": run, **plain} for i, run in enumerate(SPACES)]
    parts = [split, BYTE_LEVEL | {"use_regex": False}]
    return content | {"added_tokens": added, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}


FORMS = {form.__name__: form() for form in (gpt2, qwen, trained)}


def write(directory: Path, content: Any) -> str:
    file = directory / "some tokenizer.json"
    file.write_text(json.dumps(content))
    return str(file)


@pytest.fixture(scope="module", params=FORMS)
def form(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(form, tmp_path_factory) -> tokenizers.Tokenizer:
    return read_tokenizer(write(tmp_path_factory.mktemp(form), FORMS[form]))


# lossless encoding


@quick
@given(text=texts.map(str.encode))
def test_text_is_lossless_and_never_ends_a_document(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.append(ids, tokenizer.end_of_document).astype(np.int32)) == text
    assert tokenizer.end_of_document not in ids
    assert added_text(tokenizer, ids[:0], ids) == text.decode()
    assert b"".join(tokenizer.decode(ids[i : i + 1]) for i in range(ids.size)) == text
    assert ids.size == 0 or ids.max() < tokenizer.vocab_size


@quick
@given(text=st.lists(st.sampled_from([*TEXTS, *SPACES, "a", "é", "日", "\n", "\t", " the", "!!", "'s"])).map("".join))
def test_ids_are_those_of_the_library(form, tokenizer, text):
    """Without special tokens in the text, ids equal upstream's; special tokens are where the file has them."""
    upstream = library.Tokenizer.from_str(json.dumps(FORMS[form]))
    assert tokenizer.encode(text.encode()).tolist() == upstream.encode(text, add_special_tokens=False).ids
    added = {token["content"]: token["id"] for token in FORMS[form]["added_tokens"]}
    assert tokenizer.end_of_document == added["<|endoftext|>"]
    assert tokenizer.vocab_size == max([*FORMS[form]["model"]["vocab"].values(), *added.values()]) + 1


def test_ids_without_a_token_have_no_text(tmp_path):
    """Tokens with large ids extend the vocabulary; a model of a larger vocabulary may sample others."""
    content = copy.deepcopy(FORMS["trained"])
    vocab = content["model"]["vocab"]
    vocab["é"] = 1000  # the byte E9
    tokenizer = read_tokenizer(write(tmp_path, content))
    assert tokenizer.vocab_size == 1001
    assert tokenizer.decode(np.array([1000, 999, 5000, vocab["a"]])) == b"\xe9a"
    assert Bytes().decode(np.array([97, 256, 5000, 98])) == b"ab"


def test_bytes_that_are_not_utf8_are_refused(tokenizer):
    with pytest.raises(InputError, match="position 3"):
        tokenizer.encode(b"caf\xe9")


@quick
@given(text=texts, words=st.lists(st.sampled_from(["the", "scores", "12", "é", "日本"]), min_size=1, max_size=40))
def test_long_texts_are_encoded_in_pieces(tokenizer, text, words):
    """Words give the ids of the whole text, and a text without a position to cut is also lossless."""
    sentence = " ".join(words).encode()
    whole = tokenizer.encode(sentence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "_PIECE_CHARS", 7)
        assert len(tokenizers._pieces(sentence.decode(), 7)) >= len(sentence.decode()) / 7
        assert np.array_equal(tokenizer.encode(sentence), whole)
        assert tokenizer.decode(tokenizer.encode(text.encode())) == text.encode()


# models other than byte-level BPE


def unigram() -> dict[str, Any]:
    """Return a file like T5's: compatible characters and runs of spaces are merged."""
    made = library.Tokenizer(library.models.Unigram())
    spaces = library.normalizers.Replace(library.Regex(" {2,}"), " ")
    made.normalizer = library.normalizers.Sequence([library.normalizers.NFKC(), spaces])
    made.pre_tokenizer, made.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    options = {"special_tokens": ["<pad>", "</s>", "<unk>"], "unk_token": "<unk>", "show_progress": False}
    made.train_from_iterator(TEXTS, library.trainers.UnigramTrainer(vocab_size=200, **options))
    return json.loads(made.to_str())


OTHERS = {"sentencepiece": tiny.sentencepiece_bpe(TEXTS), "unigram": unigram()}


@pytest.fixture(scope="module", params=OTHERS)
def upstream(request) -> library.Tokenizer:
    return library.Tokenizer.from_str(json.dumps(OTHERS[request.param]))


@pytest.fixture(scope="module")
def other(upstream, tmp_path_factory) -> tokenizers.Tokenizer:
    """Return the tokenizer of `upstream`, read by this package; it is lossy."""
    return read_tokenizer(write(tmp_path_factory.mktemp("other"), json.loads(upstream.to_str())))


# Without special tokens, which are pieces of Unigram: a text with one would end its document, and is rejected.
plain_texts = st.lists(
    st.one_of(st.text(), st.sampled_from([*TEXTS, "\ufffd", "é", "日", "\n", "  ", " the", "▁", "don't"])), max_size=6
).map("".join)


@quick
@given(text=plain_texts)
def test_other_models_give_the_ids_and_the_text_of_the_library(upstream, other, text):
    ids = other.encode(text.encode())
    assert ids.tolist() == upstream.encode(text, add_special_tokens=False).ids
    expected = upstream.decode(ids.tolist(), skip_special_tokens=False)
    assert other.decode(np.append(ids, other.end_of_document).astype(np.int64)).decode() == expected
    assert added_text(other, ids[:0], ids) == expected


def test_a_continuation_keeps_the_space_before_it(tmp_path):
    """Test sentencepiece's "▁the", which without its context is "the"."""
    tokenizer = read_tokenizer(write(tmp_path, OTHERS["sentencepiece"]))
    whole, prompt = tokenizer.encode(b"The scores of a text"), tokenizer.encode(b"The scores")
    assert whole[: prompt.size].tolist() == prompt.tolist()
    assert tokenizer.decode(whole[prompt.size :]) == b"of a text"
    assert added_text(tokenizer, prompt, whole[prompt.size :]) == " of a text"
    ids = tokenizer.encode("a 𝔸".encode())
    for end, added in ((1, ""), (2, " "), (4, " \ufffd\ufffd"), (ids.size, " 𝔸")):
        assert added_text(tokenizer, ids[:1], ids[1:end]) == added


# training


def test_training_gives_the_size_that_was_asked_for_whatever_the_order_of_the_texts(caplog, capfd):
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    first, again, other = (train_bpe(iter(t), 500) for t in (TEXTS, shuffled, TEXTS[:1]))
    assert first.content == again.content
    assert first.name == again.name != other.name
    caplog.clear()
    for vocab_size in (257, 300):
        tokenizer = train_bpe(TEXTS, vocab_size)
        assert tokenizer.vocab_size == vocab_size
        assert tokenizer.end_of_document == 0
        assert {tokenizer.decode(np.array([id])) for id in range(1, 257)} == {bytes([byte]) for byte in range(256)}
    assert not caplog.text
    assert train_bpe(["abc"], 1000).vocab_size == 259  # the bytes, the end, ab and abc
    assert "259" in caplog.text
    assert capfd.readouterr().out == ""


def test_the_name_is_of_the_content_and_the_file_is_stored_as_it_is(tmp_path):
    """Truncation, padding and dropout are ignored, not removed."""

    def read(**changes: Any) -> tokenizers.Tokenizer:
        return read_tokenizer(write(tmp_path, FORMS["gpt2"] | changes))

    model = FORMS["gpt2"]["model"]
    name = read().name
    assert re.fullmatch("bpe-[0-9a-f]{16}", name)
    assert name == read(model=dict(reversed(model.items()))).name
    assert name != read(model=model | {"merges": model["merges"][:-1]}).name
    truncation = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    random_merges = model | {"dropout": 0.5}
    tokenizer, text = read(truncation=truncation, model=random_merges), "".join(TEXTS).encode()
    assert json.loads(tokenizer.content) == FORMS["gpt2"] | {"truncation": truncation, "model": random_merges}
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).tolist() == tokenizer.encode_controls(text).tolist() == read().encode(text).tolist()


# names and files


@pytest.mark.parametrize("kind", [*FORMS, *OTHERS, "bytes"])
def test_a_saved_tokenizer_is_the_same(kind, tmp_path):
    tokenizer = read_tokenizer("bytes" if kind == "bytes" else write(tmp_path, (FORMS | OTHERS)[kind]))
    directory = tmp_path / "not" / "there yet"
    save_tokenizer(tokenizer, directory)
    assert [file.name for file in directory.glob("*")] == ([] if kind == "bytes" else [TOKENIZER_FILE])
    text = "".join(TEXTS).encode()
    again = tokenizers.saved_tokenizer(directory)
    assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    for field in ("name", "vocab_size", "end_of_document"):
        assert getattr(again, field) == getattr(tokenizer, field)
    save_tokenizer(again, directory)
    assert DataConfig("text", tokenizer.name, "cache", 0.5, 0).tokenizer == tokenizer.name


# in a run


def test_attention_maps_read_a_text_with_the_tokenizer_of_the_run(trained_run, tmp_path):
    given, workdir = train_bpe(TEXTS, 257), shutil.copytree(trained_run, tmp_path / "run")
    save_tokenizer(given, workdir)
    (tmp_path / "read.txt").write_text(TEXTS[1])
    content, _ = read_tokens(read_trained(workdir, "newest", {}), 4, epath.Path(tmp_path, "read.txt"))
    np.testing.assert_array_equal(content, given.encode(TEXTS[1].encode())[:4])


def test_a_workdir_with_another_tokenizer_is_refused_before_the_run_begins(tmp_path):
    workdir, first = tmp_path / "run", train_bpe(TEXTS, 300)
    save_tokenizer(first, workdir)
    with pytest.raises(InputError, match="must be bytes or missing"):
        train(tiny.spec(tmp_path), workdir)
    with pytest.raises(InputError, match=rf"{first.name}.*must be bpe-.* or missing"):
        save_tokenizer(train_bpe(TEXTS, 301), workdir)
    assert {file.name for file in workdir.iterdir()} == {TOKENIZER_FILE, "run.lock"}


def test_any_added_token_may_end_documents_and_is_remembered(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the scores {number} of a text")
    spec = write(tmp_path, json.loads(json.dumps(FORMS["trained"]).replace(END_TOKENS[0], "<|stop|>")))
    fields = {"input": (str(tmp_path / "text"),), "validation_fraction": 0.5, "output": str(tmp_path / "out")}
    made = prepare(PrepareConfig(**fields, tokenizer=spec, end_of_document="<|stop|>")).corpus
    end = library.Tokenizer.from_file(spec).token_to_id("<|stop|>")
    assert made.train.tokenizer.end_of_document == end == made.train.document(0)[-1]
    saved = DataConfig(str(tmp_path / "text"), str(tmp_path / "out/tokenizer.json"), str(tmp_path / "cache"), 0.5, 0)
    assert load_corpus(saved).digest == made.digest
    # The library, and so transformers, reads the saved file.
    assert library.Tokenizer.from_file(saved.tokenizer).token_to_id("<|stop|>") == end
    with pytest.raises(InputError, match="end_of_document = 'other'"):
        read_tokenizer(spec, end="other")


def test_a_file_without_added_tokens_has_its_end_in_the_vocabulary(tmp_path):
    """The library saves such a file for GPT-2's vocab.json and merges.txt."""
    expected = read_tokenizer(write(tmp_path, FORMS["gpt2"]))
    tokenizer = read_tokenizer(write(tmp_path, FORMS["gpt2"] | {"added_tokens": []}))
    assert tokenizer.end_of_document == expected.end_of_document
    assert isinstance(tokenizer, HfTokenizer)
    assert HfTokenizer(tokenizer.content).name == tokenizer.name
    text = "the scores<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode(text.encode())).decode() == text


# loss and refusals

LOSSY = {"normalizer": FORMS["trained"] | {"normalizer": {"type": "NFC"}}, "sentencepiece": OTHERS["sentencepiece"]}


@pytest.mark.parametrize("case", LOSSY)
def test_a_text_that_a_tokenizer_changes_needs_lossy_and_is_counted(tmp_path, case, capsys, caplog):
    """Raw text of an existing model is accepted with a warning."""
    spec = write(tmp_path, LOSSY[case])
    tokenizer, upstream = read_tokenizer(spec), library.Tokenizer.from_file(spec)
    text = "The scores ▁" if case == "sentencepiece" else "The Scores e\u0301"
    assert tokenizer.encode(text.encode()).tolist() == upstream.encode(text, add_special_tokens=False).ids
    source, cache = tmp_path / "a.jsonl", str(tmp_path / "cache")
    source.write_text("\n".join(json.dumps({"text": f"{' ' * (i % 2)}{text} {i}"}) for i in range(12)))
    fields = {"input": (str(source),), "validation_fraction": 0.5, "output": str(tmp_path / "out"), "tokenizer": spec}
    with pytest.raises(InputError, match=rf"document [12]: tokenizer = '{tokenizer.name}': .*--lossy accepts"):
        prepare(PrepareConfig(**fields))
    prepared = prepare(PrepareConfig(**fields, lossy=True))
    num_lossy = prepared.record.num_lossy
    assert (prepared.record.num_documents.total(), num_lossy in (6, 12)) == (12, True)
    show(tmp_path / "out")
    assert f"cannot be decoded exactly from their tokens: {num_lossy}\n" in capsys.readouterr().out
    raw = DataConfig(str(source), spec, cache, 0.5, 0)
    with pytest.raises(InputError, match=r"data.path = .*: must decode to the text; dape-prepare --lossy accepts"):
        load_corpus(raw)
    for _ in range(2):  # built, and then found
        caplog.clear()
        assert load_corpus(raw, lossy=True).digest == prepared.corpus.digest
        assert f"{num_lossy} documents cannot be decoded exactly" in caplog.text
    with pytest.raises(InputError, match=rf"lossy = False: {num_lossy} documents of .* differ from"):
        load_corpus(raw)
    if case == "normalizer":
        found = {store.tokenizer.decode(store.document(0)).decode().split()[2] for store in prepared.corpus}
        assert found == {unicodedata.normalize("NFC", "e\u0301")}


def changed(*path: str | int, to: Any) -> bytes:
    """Return a tokenizer's file with one value changed."""
    content = copy.deepcopy(FORMS["trained"])
    *outer, last = path
    place: Any = content
    for key in outer:
        place = place[key]
    place[last] = to
    return json.dumps(content).encode()


NO_END = json.dumps(FORMS["qwen"] | {"added_tokens": []})
NO_FILE = r"is not a tokenizer\.json that the tokenizers library reads"
REFUSED: dict[str, tuple[bytes | None, str]] = {
    "no model": (changed("model", to=None), NO_FILE),
    "no end": (NO_END.encode(), r"added_tokens must have an end-of-document token: .*; `add_special_tokens` of"),
    "added id": (changed("added_tokens", 0, "id", to=7), r"added token '<\|endoftext\|>': id = 7"),
    "empty": (b"", NO_FILE),
    "a list": (b"[]", NO_FILE),
    "not UTF-8": (b"\xff\xfe{", NO_FILE),
    "no fields": (b'{"model": {}}', NO_FILE),
}
REFUSED |= dict.fromkeys(["gpt2", "nowhere/tokenizer.json", "a\0b", "."], (None, "must be 'bytes', or the path of"))


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_or_missing_file_is_refused_in_one_line(tmp_path, case):
    content, words = REFUSED[case]
    file = tmp_path / case
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=words) as refused:
        read_tokenizer(str(file))
    assert str(refused.value).startswith(f"data.tokenizer = {str(file)!r}: ")
