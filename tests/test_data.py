"""Check the data pipeline: no document is lost or in both splits, nothing is read twice, the order resumes."""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sysconfig
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import load_corpus, store_of

from dape_jax.data import store as store_module
from dape_jax.data.batches import PackedDocuments, Windows, train_batches, validation_batches
from dape_jax.data.prepare.command import prepare
from dape_jax.data.prepare.config import PrepareConfig
from dape_jax.data.prepare.inputs import find_files
from dape_jax.data.prepare.splits import split_of
from dape_jax.data.store import SIDECAR_FILE, TOKENS_FILE, Corpus, DataConfig, TokenStore, open_corpus, verify_stores
from dape_jax.errors import InputError
from dape_jax.training.source import load_corpora

quick = settings(max_examples=15, deadline=None)

PACKED = ("inputs", "targets", "segment_ids", "weights")
DOCUMENTS = [f"document {i}: ".encode() + bytes(range(1, 256)) * (i % 3) + b"\n" for i in range(40)]


def write(directory: Path, documents: list[bytes], name: str = "{}.txt") -> Path:
    for i, document in enumerate(documents):
        file = directory / name.format(i)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(document)
    return directory


def config(path: str | Path, cache: str | Path, **changes) -> DataConfig:
    fields = {"path": str(path), "tokenizer": "bytes", "cache_dir": str(cache), "validation_fraction": 0.3, "seed": 0}
    return DataConfig(**(fields | changes))


def texts(store: TokenStore) -> list[bytes]:
    return [store.tokenizer.decode(store.document(i)) for i in range(store.num_documents)]


@pytest.fixture
def made(tmp_path: Path) -> tuple[DataConfig, Corpus]:
    made_config = config(write(tmp_path / "text", DOCUMENTS), tmp_path / "cache")
    return made_config, load_corpus(made_config)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """Return the directory of a corpus to copy and damage."""
    root = tmp_path_factory.mktemp("pristine")
    return load_corpus(config(write(root / "text", DOCUMENTS), root / "cache")).train.directory.parent


# files and documents


def found(root: Path, *patterns: str) -> list[str]:
    """Return the paths below `root` of the files that are found there."""
    files = find_files([f"{root}/{pattern}" for pattern in patterns or ("",)])
    return [Path(file.path).relative_to(root).as_posix() for file in files]


def test_files_of_a_directory_a_glob_and_a_file(tmp_path: Path):
    for name in ["b.txt", "a.txt", "sub/deep/c.py", ".hidden", ".git/config", "sub/.d", "part[1].md"]:
        write(tmp_path, [b"text"], name)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert found(tmp_path) == ["a.txt", "b.txt", "part[1].md", "sub/deep/c.py"]  # linked.txt is a.txt, as for globs
    assert found(tmp_path, "linked.txt") == ["linked.txt"]
    assert found(tmp_path, "**/*.py") == ["sub/deep/c.py"]
    for pattern, names in (("*.txt", ["a.txt", "b.txt"]), ("a.txt", ["a.txt"]), ("part[1].md", ["part[1].md"])):
        assert found(tmp_path, pattern) == names  # the last is taken literally, because it exists
    assert found(tmp_path, "b.txt", "*.txt", "sub") == ["b.txt", "a.txt", "sub/deep/c.py"]
    kept = find_files([str(tmp_path)], [tmp_path / "sub", tmp_path / "a.txt"])
    assert [Path(file.path).name for file in kept] == ["b.txt", "linked.txt", "part[1].md"]


def test_standard_library_of_this_interpreter(tmp_path: Path, monkeypatch):
    root = Path(sysconfig.get_path("stdlib")).resolve()
    names = [Path(file.path).relative_to(root).as_posix() for file in find_files(["stdlib"])]
    assert len(names) >= 1000
    assert names == sorted(set(names))
    assert {"os.py", "json/__init__.py", "asyncio/tasks.py"} <= set(names)
    assert all(name.endswith(".py") and "site-packages" not in name for name in names)
    write(tmp_path / "lib", [b"x = 1"] * 3, "m{}.py")
    write(tmp_path / "lib/site-packages", [b"x = 2"], "installed.py")
    (tmp_path / "lib/sitecustomize.py").symlink_to(__file__)  # a link that leaves it
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "lib"))
    assert [Path(file.path).name for file in find_files(["stdlib"])] == ["m0.py", "m1.py", "m2.py"]


# the split


def test_the_validation_fraction_is_held_out():
    held_out = [{i for i in range(10_000) if split_of(f"{i}".encode(), x) == "validation"} for x in (0.1, 0.2)]
    assert abs(len(held_out[1]) - 2000) < 5 * 40  # five standard deviations
    assert held_out[0] < held_out[1]  # a larger fraction only moves documents into validation


# raw text: prepared once


def test_each_document_is_in_one_split_and_none_is_lost(made: tuple[DataConfig, Corpus]):
    _, loaded = made
    in_file_order = [Path(file.path).read_bytes() for file in find_files([loaded.train.sidecar.source])]
    for store, split in ((loaded.train, "train"), (loaded.validation, "validation")):
        assert texts(store) == [text for text in in_file_order if split_of(text, 0.3) == split]
        ends = [store.document(i)[-1] for i in range(store.num_documents)]
        assert set(ends) == {store.tokenizer.end_of_document}
        assert sum(len(store.document(i)) for i in range(store.num_documents)) == store.num_tokens == len(store.tokens)
        assert (store.directory / TOKENS_FILE).stat().st_size == 2 * store.num_tokens
        assert not store.tokens.flags.writeable
        verify_stores([store])
        with pytest.raises(IndexError):
            store.document(store.num_documents)


def test_unchanged_inputs_are_not_read_again(made: tuple[DataConfig, Corpus], caplog):
    made_config, first = made
    for file in Path(made_config.path).iterdir():  # other text, same size and time: only reading shows it
        stat = file.stat()
        file.write_bytes(b"?" * stat.st_size)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    caplog.set_level("INFO", logger="dape_jax")
    for again in (made_config, dataclasses.replace(made_config, seed=7)):
        second = load_corpus(again)
        assert second.train.directory == first.train.directory
        assert texts(second.train) == texts(first.train)
        assert str(first.train.directory.parent) in caplog.text


CHANGES = {
    "content": lambda path: (path / "3.txt").write_bytes(DOCUMENTS[3] + b"more"),
    "touch": lambda path: os.utime(path / "3.txt", ns=(1, 1)),
    "add": lambda path: (path / "new.txt").write_bytes(b"a new document"),
    "rename": lambda path: (path / "3.txt").rename(path / "zzz.txt"),
}


def test_changed_inputs_make_a_new_store_and_keep_the_old_one(made: tuple[DataConfig, Corpus]):
    made_config, first = made
    path, loaded = Path(made_config.path), [first]
    for change, apply in CHANGES.items():
        apply(path)
        loaded.append(load_corpus(made_config))
        assert (loaded[-1].digest == loaded[-2].digest) == (change == "touch")
    moved = dataclasses.replace(made_config, path=str(path.rename(path.with_name("moved"))))
    loaded += [load_corpus(moved), load_corpus(dataclasses.replace(moved, validation_fraction=0.5))]
    assert loaded[-3].digest == loaded[-2].digest != loaded[-1].digest
    assert len({each.train.directory for each in loaded}) == len(loaded)
    for each in loaded:
        verify_stores(each)


def test_a_corpus_of_an_earlier_commit_is_opened(tmp_path: Path):
    """`dape-prepare --train_bpe=258 --validation_fraction=0.4` of commit bbabf1f made it."""
    with tarfile.open(Path(__file__).parent / "fixtures/corpus_of_bbabf1f.tar.xz") as archive:
        archive.extractall(tmp_path / "old", filter="data")
    loaded = load_corpus(config(tmp_path / "old", tmp_path / "cache", tokenizer=None))
    verify_stores(loaded)
    assert loaded.digest == "ea36e5f5883ebc83eda46d3f97fe0c3b84a0173d640347d03b471d92e6384fec"
    assert texts(loaded.train) == [b"one document", b"a third"]
    assert texts(loaded.validation) == [b"two of them", "number four, é".encode(), b"five"]
    assert not (tmp_path / "cache").exists()


# a prepared corpus in a bucket


@pytest.fixture
def bucket(pristine: Path, tmp_path: Path) -> str:
    system = fsspec.filesystem("memory")
    system.put(f"{pristine}/", f"/{tmp_path.name}/corpus", recursive=True)
    return f"memory://{tmp_path.name}/corpus"


def test_a_corpus_in_a_bucket_is_copied_once_and_nothing_else(bucket: str, pristine: Path, tmp_path: Path, monkeypatch):
    system = fsspec.filesystem("memory")
    for name in ("../outside", "train/../../outside", "/outside", "train/more"):
        system.store[f"/{tmp_path.name}/corpus/{name}"] = system.store[f"/{tmp_path.name}/corpus/train/{SIDECAR_FILE}"]
    loaded = load_corpus(config(bucket, tmp_path / "cache", tokenizer=None))
    assert loaded.digest == open_corpus(pristine).digest
    copy = tmp_path / "cache" / loaded.digest[:16]
    assert loaded.train.directory.parent == copy
    names = (TOKENS_FILE, store_module.OFFSETS_FILE, SIDECAR_FILE, store_module.VERIFIED_FILE)
    expected = {copy / split / name for split in ("train", "validation") for name in names}
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == {*expected, copy.with_name(f".{copy.name}.lock")}
    monkeypatch.setattr(type(system), "get", None)
    assert load_corpus(config(bucket, tmp_path / "cache", tokenizer=None)).digest == loaded.digest


def test_a_damaged_or_incomplete_corpus_in_a_bucket_gets_no_name(bucket: str, tmp_path: Path):
    system, tokens = fsspec.filesystem("memory"), f"/{tmp_path.name}/corpus/train/{TOKENS_FILE}"
    system.pipe(tokens, b"\1" + system.cat(tokens)[1:])
    with pytest.raises(InputError, match=r"digest = .*must be the digest of the files, "):
        load_corpus(config(bucket, tmp_path / "cache", tokenizer=None))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    system.rm(f"/{tmp_path.name}/corpus/validation", recursive=True)
    with pytest.raises(InputError, match=r"data\.path = .*: must be a whole corpus"):
        load_corpus(config(bucket, tmp_path / "cache", tokenizer=None))


# several texts


def test_a_text_for_validation_is_used_whole_and_so_is_the_other(tmp_path: Path):
    one, other = write(tmp_path / "one", DOCUMENTS[:9]), write(tmp_path / "other", DOCUMENTS[20:])
    both = config(one, tmp_path / "cache", validation_path=str(other))
    corpora = load_corpora(both)
    (train,), (validation,) = corpora.train.values(), corpora.validation.values()
    assert (Counter(texts(train)), Counter(texts(validation))) == (Counter(DOCUMENTS[:9]), Counter(DOCUMENTS[20:]))
    inner = load_corpora(dataclasses.replace(both, path=f"{tmp_path}/o*/*.txt", validation_path=str(other / "0.txt")))
    assert [store.num_documents for store in inner.stores("all")] == [28, 1]  # files are not in both
    (other / "new.txt").write_bytes(b"more")
    assert load_corpora(both).digest != corpora.digest
    with pytest.raises(InputError, match=r"data\.validation_path = '/nowhere': does not exist; .* a data\.mixture"):
        load_corpora(dataclasses.replace(both, validation_path="/nowhere"))


def test_a_text_for_validation_is_encoded_as_the_corpus(tmp_path: Path):
    words = [f"document {i} of a few words".encode() for i in range(30)]
    options = {"input": (str(write(tmp_path / "one", words)),), "validation_fraction": 0.5}
    made = prepare(PrepareConfig(output=str(tmp_path / "bpe"), train_bpe=260, **options)).corpus
    prepare(PrepareConfig(output=str(tmp_path / "bytes"), tokenizer="bytes", **options))
    other = str(write(tmp_path / "other", words[:3]))
    mine = config(tmp_path / "bpe", tmp_path / "cache", tokenizer=None, validation_path=other)
    corpora = load_corpora(mine)
    (train,), (validation,) = corpora.train.values(), corpora.validation.values()
    assert train.sidecar == made.train.sidecar  # a corpus has its own splits
    assert texts(validation) == words[:3]
    mixture = load_corpora(dataclasses.replace(mine, mixture=f"{tmp_path}/one=1,{tmp_path}/bpe=1"))
    for store in (validation, mixture.train[str(tmp_path / "one")]):
        assert store.sidecar.tokenizer == made.train.sidecar.tokenizer
    with pytest.raises(InputError, match=r"data\.mixture = .*bytes': 'bytes'.*: must have been prepared with the same"):
        load_corpora(dataclasses.replace(mine, mixture=f"{tmp_path}/bpe=1,{tmp_path}/bytes=1", validation_path=None))


def test_a_mixture_is_of_the_corpora_that_it_names(tmp_path: Path):
    one, other = write(tmp_path / "a=b", DOCUMENTS[:20]), write(tmp_path / "other", DOCUMENTS[20:])
    mine = config("stdlib", tmp_path / "cache", mixture=f"{one}=.7, {other}=3e0")
    assert (mine.path, mine.weights) == (None, {str(one): 0.7, str(other): 3.0})
    corpora = load_corpora(mine)
    assert list(corpora.train) == list(corpora.validation) == list(mine.weights)
    assert load_corpora(mine).digest == corpora.digest
    assert load_corpora(dataclasses.replace(mine, mixture=f"{one}=0.8,{other}=3")).digest != corpora.digest
    every = store_module.joined(corpora.stores("all"))
    assert Counter(texts(every)) == Counter(DOCUMENTS)
    assert every.num_tokens == sum(len(document) + 1 for document in DOCUMENTS)


# store: damage


@pytest.fixture
def copy(pristine: Path, tmp_path: Path) -> Path:
    """Return the directory of a corpus to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


@quick
@given(st.sampled_from([TOKENS_FILE, store_module.OFFSETS_FILE]), st.integers(1, 255), st.booleans(), st.data())
def test_a_changed_byte_is_detected(pristine: Path, name: str, bits: int, is_cut: bool, data: st.DataObject):
    """A byte is changed, or the file ends there: it is refused, or the byte is not used."""
    with tempfile.TemporaryDirectory() as root:
        copy = Path(shutil.copytree(pristine, Path(root, "copy")))
        before, content = np.array(open_corpus(copy).train.offsets), bytearray((copy / "train" / name).read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= bits
        (copy / "train" / name).write_bytes(content[:at] if is_cut else content)
        try:
            store = open_corpus(copy).train
            verify_stores([store])
        except InputError as error:
            assert str(copy / "train" / SIDECAR_FILE) in str(error)  # noqa: PT017
        else:
            assert name == store_module.OFFSETS_FILE  # padding of the header
            np.testing.assert_array_equal(store.offsets, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"fields = \[\]: must be "),
        ({"format_version": 1}, r"format_version, split, fingerprint = \(1, .*: must be \(2, "),
        ({"vocab_size": 10**30}, "cannot be read"),
        ({"vocab_size": 200}, "num_tokens, num_documents"),
        ({"num_documents": 7}, r"num_tokens, num_documents = \(\d+, 7\): must be "),
        ({"num_tokens": 3}, r"num_tokens, num_documents = \(3, \d+\): must be "),
        ({"tokenizer": "bpe-0123456789abcdef"}, "tokenizer = 'bytes': must be bpe-0123456789abcdef"),
        ({"split": "test"}, r"split, fingerprint = \(2, 'test', "),
        ({"fingerprint": "0"}, r"split, fingerprint = \(2, 'validation', '0'\)"),
        ({"digest": "0" * 64}, "digest = '000"),
        ({"tokenizer": ["bytes"]}, r"tokenizer = \['bytes'\]: must be of type str"),
    ],
)
def test_a_sidecar_that_does_not_fit_is_named(copy: Path, change: dict | None, message: str):
    file = copy / "validation" / SIDECAR_FILE
    file.write_text(json.dumps({} if change is None else json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=message):  # noqa: PT012
        loaded = load_corpus(config(copy, copy / "cache", tokenizer=None))
        verify_stores(loaded)
        assert loaded.validation.tokenizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tokens, offsets: (np.where(np.arange(tokens.size) == 7, 257, tokens), offsets),
            r"tokens\.bin: token id = 257: must be 0 to 256",
        ),
        (lambda tokens, offsets: (tokens, offsets[::-1]), r"offsets\.npy: first and last .* must rise from 0 to \d+,"),
        (lambda tokens, offsets: (tokens, offsets + 1), r"first and last offset = \(1, \d+\): "),
        (
            lambda tokens, offsets: (tokens, np.r_[0, offsets[-2:0:-1], offsets[-1]]),
            r"first and last offset = \(0, \d+\): ",
        ),
        (lambda tokens, offsets: (tokens, offsets[None]), r"num_tokens, num_documents = .*: must be \(\d+, 0, \d+\)"),
    ],
)
def test_stores_of_another_program_are_checked(copy: Path, change, message):
    """Digests may be right, and ids or the places of documents wrong."""
    store = copy / "train"
    tokens, offsets = change(np.fromfile(store / TOKENS_FILE, "<u2"), np.load(store / store_module.OFFSETS_FILE))
    tokens.astype("<u2").tofile(store / TOKENS_FILE)
    np.save(store / store_module.OFFSETS_FILE, offsets)
    sidecar = json.loads((store / SIDECAR_FILE).read_text())
    sidecar["digest"] = hashlib.sha256(tokens.astype("<u2").tobytes() + offsets.tobytes()).hexdigest()
    (store / SIDECAR_FILE).write_text(json.dumps(sidecar))
    with pytest.raises(InputError, match=message):
        verify_stores(open_corpus(copy))


def test_files_are_read_once_for_each_identity(copy: Path, monkeypatch):
    copied = open_corpus(copy)
    verify_stores(copied, full=False)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", None)
        verify_stores(copied, full=False)
        with pytest.raises(TypeError):
            verify_stores(copied)
    file = copied.train.directory / TOKENS_FILE
    stat = file.stat()
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same size, time and inode
    with pytest.raises(InputError, match="must be the digest of the files"):
        verify_stores(copied, full=False)
    (copied.validation.directory / store_module.VERIFIED_FILE).write_text("{")
    verify_stores([copied.validation], full=False)
    monkeypatch.setattr(store_module, "write_json", lambda *_: os.write(-1, b""))  # as in a directory of another user
    verify_stores([copied.validation])


@pytest.mark.parametrize("name", [TOKENS_FILE, store_module.OFFSETS_FILE, SIDECAR_FILE, ""])
def test_a_corpus_that_is_not_whole_is_refused(copy: Path, name: str):
    lost = copy / "validation" / name
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    for path, message in ((copy, r"store\.json"), (copy / "train", "is one split of a corpus")):
        with pytest.raises(InputError, match=message):
            load_corpus(config(path, copy / "cache"))


# messages


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", ""),
        ("tokenizer", "gpt2"),
        ("tokenizer", "x-0123456789abcde"),
        ("cache_dir", "gs://bucket/cache"),
        ("validation_fraction", float("nan")),
        ("seed", -1),
        ("validation_path", ""),
        ("validation_path", "text"),  # it is also trained on
        ("mixture", "books,code=1"),
        ("mixture", "books=0.7,books=0.3"),
        ("mixture", "books=0,code=1"),
        ("mixture", "=1"),
        ("mixture", "books=nan"),
        ("packing", "rows"),
    ],
)
def test_a_wrong_config_names_field_and_value(field: str, value: object):
    with pytest.raises(InputError) as refused:
        config(**{"path": "text", "cache": "cache"} | {field: value})
    assert str(refused.value).startswith(f"data.{field} = {value!r}: must ")


@pytest.mark.parametrize("path", ["nowhere", "no/*.where", "a\0b", "empty directory", "empty files", "binary"])
def test_nothing_to_read_names_the_path(tmp_path: Path, path: str):
    (tmp_path / "empty directory").mkdir()
    write(tmp_path / "empty files", [b"", b""])
    write(tmp_path / "binary", [b"\0", b"\0\1", b""])
    with pytest.raises(InputError, match=r"data\.path = ") as caught:
        load_corpus(config(tmp_path / path, tmp_path / "cache"))
    assert repr(str(tmp_path / path)) in str(caught.value)


# batches: windows

sizes = st.tuples(st.integers(2, 400), st.integers(1, 12)).filter(lambda pair: pair[0] > pair[1])  # num_tokens, T


@quick
@given(sizes)
def test_windows_tile_the_store_and_targets_are_one_ahead(size: tuple[int, int]):
    num_tokens, length = size
    windows = Windows(store_of([num_tokens]), length)
    rows = [windows[i] for i in range(len(windows))]
    inputs, targets = (np.concatenate([row[name] for row in rows]) for name in ("inputs", "targets"))
    np.testing.assert_array_equal(inputs, np.arange(len(inputs)))
    np.testing.assert_array_equal(targets, inputs + 1)
    assert inputs.dtype == targets.dtype == np.int32
    assert 0 <= num_tokens - 1 - len(targets) < length


# batches: training


def rows_of(
    *stores: TokenStore, length: int, batch: int, steps: int, shard=(0, 1), seed=0, state=None, **options
) -> tuple[list[list[tuple]], dict]:
    """Return the inputs of the rows that one process reads in each step, from a state on, and the last state."""
    options |= {"train_length": length, "global_batch_size": batch, "seed": seed}
    iterator = train_batches(*stores, shard_index=shard[0], num_shards=shard[1], **options)
    if state is not None:
        iterator.set_state(json.loads(json.dumps(state)))
    found = [next(iterator) for _ in range(steps)]
    state = iterator.get_state()
    iterator.close()
    for each in found:
        assert set(each) == set(PACKED if options.get("packing") == "documents" else PACKED[:2])
        for name in ("inputs", "targets"):
            assert (each[name].shape, each[name].dtype) == ((batch // shard[1], length), np.int32)
        is_target = each["weights"] > 0 if "weights" in each else np.ones((batch // shard[1], length), bool)
        np.testing.assert_array_equal(each["targets"], np.where(is_target, each["inputs"] + 1, 0))
    return [[tuple(row) for row in each["inputs"].tolist()] for each in found], state


def flat(steps: Iterable[list[tuple]]) -> list[tuple]:
    return [row for step in steps for row in step]


def rows_in(store: TokenStore, length: int, is_packed: bool) -> tuple[list[dict[str, np.ndarray]], dict[str, str]]:
    """Return all windows or packed rows of a store, and the options that choose them."""
    rows = PackedDocuments(store, length) if is_packed else Windows(store, length)
    return [rows[i] for i in range(len(rows))], {"packing": "documents" if is_packed else "stream"}


@quick
@given(sizes, st.integers(1, 9), st.integers(0, 2**32 - 1), st.booleans())
def test_every_window_once_per_epoch(size: tuple[int, int], batch: int, seed: int, is_packed: bool):
    store, length = store_of([size[0]]), size[1]
    rows, options = rows_in(store, length, is_packed)
    every = sorted(tuple(row["inputs"].tolist()) for row in rows)
    epochs = 3
    steps = -(-epochs * len(every) // batch)
    seen = flat(rows_of(store, length=length, batch=batch, steps=steps, seed=seed, **options)[0])
    for epoch in range(epochs):
        assert sorted(seen[epoch * len(every) : (epoch + 1) * len(every)]) == every


def test_order_differs_between_epochs_and_between_seeds():
    def epochs(seed: int) -> list[list[tuple]]:
        return rows_of(store_of([65]), length=1, batch=64, steps=3, seed=seed)[0]

    for seed in (0, 1, 12345):
        orders = epochs(seed) + epochs(seed + 1)
        assert len({tuple(order) for order in orders}) == 6  # nor is the order of seed + 1 a shifted copy
        assert sorted(orders[0]) != orders[0]
        assert epochs(seed) == epochs(seed)


OTHER = np.arange(1000, 1161, dtype=np.uint32)  # tokens of another store
# Grain takes 5 ms to find the position of a window in a shuffled order of 3, and 0.1 ms in one of 100.
SOURCES = {
    "stream": ([store_of([401])], {"length": 4}),
    "mixture": ([store_of([401]), store_of([161], OTHER[:161])], {"length": 4, "weights": (0.7, 0.3)}),
    "documents": ([store_of([2, 5, 9, 30, 4, 11, 7, 3, 8, 6] * 9)], {"length": 8, "packing": "documents"}),
}


@pytest.mark.parametrize("kind", SOURCES)
@quick
@given(
    st.integers(0, 30),
    st.integers(1, 10),
    st.sampled_from([(1, 1), (4, 4), (8, 4), (2, 6)]),
    st.sampled_from([1, 2, 4]),
)
def test_resume_is_exact_with_another_batch_size_and_number_of_processes(
    kind: str, before: int, after: int, batches: tuple[int, int], num_shards: int
):
    stores, options = SOURCES[kind]
    one, other = batches[0], batches[1] * num_shards
    first, state = rows_of(*stores, batch=one, steps=before, **options)
    assert state == {"global_next_index": before * one}
    resumed = {"batch": other, "steps": after, "state": state} | options
    shards = [rows_of(*stores, shard=(shard, num_shards), **resumed) for shard in range(num_shards)]
    end = before * one + after * other
    assert all(state == {"global_next_index": end} for _, state in shards)
    whole = flat(rows_of(*stores, batch=1, steps=end, **options)[0])
    assert flat(first) == whole[: before * one]
    for step in range(after):
        begin = before * one + step * other
        assert sorted(flat(steps[step] for steps, _ in shards)) == sorted(whole[begin : begin + other])


def test_a_store_shorter_than_a_window_is_refused():
    store, shard = store_of([100]), {"seed": 0, "shard_index": 0, "num_shards": 1}
    with pytest.raises(InputError, match="train_length = 100: must be at most 99: memory has 100 tokens"):
        train_batches(store, train_length=100, global_batch_size=4, **shard)


def test_a_mixture_has_the_shares_of_its_weights_and_each_text_its_epochs():
    def first_tokens(steps: int, weights: tuple[float, float]) -> list[int]:
        stores = store_of([101]), store_of([41], OTHER[:41])  # of 25 windows and 10
        return [row[0] for row in flat(rows_of(*stores, length=4, batch=10, steps=steps, weights=weights)[0])]

    windows = first_tokens(100, (0.7, 0.3))
    of_first = [start for start in windows if start < 1000]
    assert abs(len(of_first) - 700) <= 7
    for found, every in ((of_first, 25), ([start for start in windows if start >= 1000], 10)):
        assert len(set(found[:every])) == len(set(found[every : 2 * every])) == every
        assert found[:every] != found[every : 2 * every]
    assert first_tokens(10, (7.0, 3.0)) == windows[:100]
    assert first_tokens(10, (1.0, 3.0)) != windows[:100]
    longest_share = max(len(list(run)) for is_first, run in itertools.groupby(start < 1000 for start in windows))
    assert longest_share <= 4  # the texts alternate


# batches: validation


@quick
@given(sizes, st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_validation_batches_are_fixed_full_and_spread(size: tuple[int, int], batch: int, num: int, is_packed: bool):
    store, length = store_of([size[0]]), size[1]
    rows, options = rows_in(store, length, is_packed)
    assume(batch <= len(rows))
    found, again = (
        validation_batches(store, length=length, batch_size=batch, num_batches=num, multiple=1, **options)
        for _ in range(2)
    )
    assert len(found) == min(num, len(rows) // batch)
    for one, two in zip(found, again, strict=True):
        assert {name: values.shape for name, values in one.items()} == dict.fromkeys(rows[0], (batch, length))
        assert one["inputs"].dtype == one["targets"].dtype == np.int32
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
    every = [row["targets"].tolist() for row in rows]
    gaps = np.diff([*(every.index(row.tolist()) for one in found for row in one["targets"]), len(rows)])
    assert every[0] == found[0]["targets"][0].tolist()
    assert gaps.min() > 0
    assert gaps.max() - gaps.min() <= 1


@quick
@given(sizes, st.sampled_from([1, 2, 8]), st.integers(1, 4), st.booleans())
def test_a_validation_set_smaller_than_a_batch_is_used_whole(size, multiple: int, num_batches: int, is_packed: bool):
    store, length = store_of([size[0]]), size[1]
    rows, options = rows_in(store, length, is_packed)
    batch_size = (len(rows) // multiple + 1) * multiple
    options |= {"length": length, "num_batches": num_batches, "multiple": multiple}
    (batch,) = validation_batches(store, batch_size=batch_size, **options)
    assert len(batch["inputs"]) % multiple == 0
    assert len(batch["inputs"]) <= batch_size
    is_target = [row["weights"] > 0 if is_packed else np.ones(length, bool) for row in rows]
    every = np.concatenate([row["targets"][each] for row, each in zip(rows, is_target, strict=True)])
    weights = batch["weights"] if "weights" in batch else np.ones(batch["inputs"].shape, np.float32)
    np.testing.assert_array_equal(batch["targets"][weights > 0], every)  # each once
    assert weights.sum() == len(every)


# batches: packed documents


document_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=40).filter(lambda sizes: max(sizes) > 1)


@quick
@given(document_sizes, st.integers(1, 24))
def test_packed_rows_hold_every_target_once_and_no_document_is_mixed(sizes: list[int], length: int):
    store = store_of(sizes)
    rows = PackedDocuments(store, length)
    document_of = np.repeat(np.arange(len(sizes)), sizes)
    seen, num_rests = [], 0
    for row in (rows[i] for i in range(len(rows))):
        assert {(name, values.shape) for name, values in row.items()} == {(name, (length,)) for name in PACKED}
        is_padding = row["segment_ids"] == 0
        np.testing.assert_array_equal(row["weights"], ~is_padding)
        assert not is_padding[0]
        np.testing.assert_array_equal(np.sort(is_padding), is_padding)  # padding is last
        starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=-1))
        for start, stop in itertools.pairwise([*starts, length]):
            if is_padding[start]:
                continue
            inputs, targets = row["inputs"][start:stop], row["targets"][start:stop]
            np.testing.assert_array_equal(inputs, inputs[0] + np.arange(stop - start))
            np.testing.assert_array_equal(targets, inputs + 1)
            assert len(set(document_of[inputs]) | set(document_of[targets])) == 1
            seen += targets.tolist()
            num_rests += stop - start < length
    firsts = {0, *np.cumsum(sizes)[:-1].tolist()}
    assert sorted(seen) == [token for token in range(sum(sizes)) if token not in firsts]
    fewest = -(-len(seen) // length)
    assert fewest <= len(rows) <= fewest + num_rests // 2 + 1


def test_packing_wastes_little():
    sizes = np.random.default_rng(0).geometric(1 / 100, 3000).tolist()
    rows = PackedDocuments(store_of([size + 1 for size in sizes]), 128)
    assert sum(sizes) / (len(rows) * 128) > 0.98
    first, second = PackedDocuments(store_of([6, 5, 4]), 8)  # the last fits exactly beside the first
    assert first["segment_ids"].tolist() == [1] * 5 + [2] * 3
    assert second["segment_ids"].tolist() == [1] * 4 + [0] * 4
