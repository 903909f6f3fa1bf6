"""Check corpus preparation: every valid document once, or an error of one line; incomplete corpora are never opened."""

import bz2
import contextlib
import dataclasses
import datetime
import decimal
import functools
import gzip
import http.server
import itertools
import json
import logging
import lzma
import os
import random
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pyarrow
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import run_python
from pyarrow import ipc, parquet
from tiny import load_corpus

from dape_jax.data.prepare import build, command, records
from dape_jax.data.prepare.build import REJECTED_FILE
from dape_jax.data.prepare.command import PrepareConfig, prepare, show
from dape_jax.data.prepare.inputs import find_files, zstd
from dape_jax.data.prepare.megatron import read_documents as read_ids
from dape_jax.data.prepare.records import LeftOut, read_records
from dape_jax.data.prepare.splits import split_of
from dape_jax.data.store import Corpus, DataConfig, open_corpus, verify_stores
from dape_jax.data.tokenizers import read_tokenizer
from dape_jax.errors import InputError

quick = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def no_fsync() -> Iterator[None]:
    """Disable fsync, because power failures are not simulated."""
    with mock.patch.object(os, "fsync"):
        yield


SETS = ("ArXiv", "Books3")
DOCUMENTS = [
    f"document {i}:{' ' * i}" + 'naïve café, 日本語 \\ " \n\t 👩‍👩‍👧 the rows are queries ' * (i % 4) for i in range(40)
]


def record(i: int, text: str) -> dict:
    return {
        "text": text,
        "meta": {"pile_set_name": SETS[i % 2], "year": 2000 + i, "ok": True},
        "other": [{"a": None}],
        "day": f"2020-01-0{i % 9 + 1}",
        "a.year": 2000 + i,
    }


RECORDS = [record(i, text) for i, text in enumerate(DOCUMENTS)]
LINES = [json.dumps(content, ensure_ascii=i % 3 == 0).encode() + b"\n" for i, content in enumerate(RECORDS)]


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd.compress,
}


def members(compress: Callable[[bytes], bytes], content: bytes = b"".join(LINES)) -> bytes:
    """Compress in about seven members, cut within a line."""
    cuts = [*range(0, len(content), len(content) // 6 + 5), len(content)]
    return b"".join(compress(content[a:b]) for a, b in itertools.pairwise(cuts))


def parquet_file(**columns: pyarrow.Array | list) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink, row_group_size=9)
    return sink.getvalue().to_pybytes()


def arrow(write: Callable, **columns: pyarrow.Array | list) -> bytes:
    table, sink = pyarrow.table(columns), pyarrow.BufferOutputStream()
    with write(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    return sink.getvalue().to_pybytes()


def in_lines(documents: Iterable[str]) -> bytes:
    """Return JSON lines of documents."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in documents)


TIMES = [datetime.datetime(2020, 1, 1 + i % 3, 12 * (i % 2)) for i in range(len(DOCUMENTS))]
PARQUET = {name: [r[name] for r in RECORDS] for name in ("other", "meta", "a.year")} | {
    "text": pyarrow.array(DOCUMENTS).dictionary_encode(),
    "day": [datetime.date.fromisoformat(r["day"]) for r in RECORDS],
    "time": TIMES,
    "zone": pyarrow.array(TIMES, pyarrow.timestamp("ns", "UTC")),
    "odd": [2.0, None] * 20,
    "price": [decimal.Decimal("1.50"), decimal.Decimal("0.30")] * 20,
}
ALL_LINES = b"".join(LINES)
LONG = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 28})
SUFFIXES = [*COMPRESS] * 10
# Files of DOCUMENTS: one for each document, or all in one.
FILES: dict[str, list[bytes] | bytes] = {
    "tex": [text.encode() for text in DOCUMENTS],
    "tex.gz": [COMPRESS[SUFFIXES[i]](text.encode()) for i, text in enumerate(DOCUMENTS)],  # the content decides
    "txt": [text.encode(("utf-8-sig", "utf-16")[i % 2]) for i, text in enumerate(DOCUMENTS)],
    "json": [json.dumps(content, indent=i % 2 or None).encode() for i, content in enumerate(RECORDS)],
    "ndjson": LINES,
    "jsonl": b"\xef\xbb\xbf" + ALL_LINES.replace(b"\n", b"\r\n\r\n").rstrip(),  # as Windows may write it
    "utf16.jsonl": ALL_LINES.decode().encode("utf-16"),
    "lines.txt": ALL_LINES,
    "lines.json": ALL_LINES,
    "plain.jsonl.gz": ALL_LINES,  # as if decompressed on its way here
    "array.json": json.dumps(RECORDS).encode(),
    "array.jsonl": json.dumps(RECORDS, indent=1).encode(),
    "long.zst": LONG.compress(ALL_LINES) + LONG.flush(),
    "jsonl.gz": members(gzip.compress),
    "JSONL.ZST": members(zstd.compress),
    "json.xz": members(lambda part: lzma.compress(part) + bytes(4)),  # padding, as the format allows
    "bz2": members(bz2.compress),
    "parquet": parquet_file(**PARQUET),
    "parquet.part": parquet_file(**PARQUET),
    "arrow": arrow(ipc.new_stream, **PARQUET),  # as `save_to_disk` of datasets writes
    "feather": arrow(ipc.new_file, **PARQUET),
}


def write_input(kind: str, root: Path) -> str:
    """Write DOCUMENTS as files of a kind; return the value of --input."""
    root.mkdir(exist_ok=True)
    contents = FILES[kind]
    for i, content in enumerate(contents if isinstance(contents, list) else [contents]):
        write(root / f"{i:02}.{kind}", content)
    return f"{root}/*"


def config(source: str | Path, to: str | Path, **changes) -> PrepareConfig:
    fields = {"input": tuple(str(source).split(",")), "output": str(to), "tokenizer": "bytes"}
    return PrepareConfig(**(fields | {"validation_fraction": 0.3} | changes))


def texts(made: Corpus) -> list[str]:
    return [store.tokenizer.decode(store.document(i)).decode() for store in made for i in range(store.num_documents)]


def rejected(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / REJECTED_FILE).read_text().splitlines()]


def write(file: Path, *parts: bytes) -> Path:
    file.write_bytes(b"".join(parts))
    return file


def dape_prepare(source: str | Path, output: Path, *more: str, **environment: str) -> subprocess.CompletedProcess:
    flags = [f"--input={source}", f"--output={output}", "--tokenizer=bytes", "--validation_fraction=0.3", *more]
    return run_python("-m", "dape_jax.data.prepare", *flags, **environment)


# input


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Corpus:
    root = tmp_path_factory.mktemp("expected")
    return prepare(config(write_input("jsonl", root / "in"), root / "out")).corpus


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, expected: Corpus, kind: str):
    prepared = prepare(config(write_input(kind, tmp_path / "in"), tmp_path / "out"))
    assert sorted(texts(prepared.corpus)) == sorted(DOCUMENTS)
    assert prepared.corpus.digest == expected.digest
    assert prepared.record.num_text_bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert not rejected(tmp_path / "out")
    verify_stores(prepared.corpus)
    assert not list(tmp_path.glob("*.partial"))


def test_names_are_not_read_as_patterns_or_chains_of_file_systems(tmp_path: Path, monkeypatch, expected: Corpus):
    (tmp_path / "a[1]").mkdir()
    write(tmp_path / "a[1]" / "File::Spec.jsonl", *LINES)
    monkeypatch.chdir(tmp_path / "a[1]")
    for i, source in enumerate(("*.jsonl", ".", "File::Spec.jsonl")):
        assert prepare(config(source, tmp_path / f"{i}::corpus")).corpus.digest == expected.digest
    assert load_corpus(DataConfig(f"{tmp_path}/0::corpus")).digest == expected.digest


def test_a_recursive_glob_ends_where_directories_link_each_other(tmp_path: Path):
    """Directories that each link to the one above have 2^40 paths. Every file is found once."""
    for name in ("a/b", "a-c/.hidden"):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name / "1.txt", b"text")
        for i in range(2):
            (tmp_path / name / f"up{i}").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    for pattern, found in {
        "**": ["a/b/1.txt"],
        "**/1.*": ["a/b/1.txt"],
        "linked/**": ["linked/b/1.txt"],
        "[al]*/**/b/*.txt": ["a/b/1.txt"],
        "**/.hidden/1.txt": ["a-c/.hidden/1.txt"],
    }.items():
        paths = [Path(file.path).relative_to(tmp_path) for file in find_files([f"{tmp_path}/{pattern}"])]
        assert [str(path) for path in paths] == found, pattern


def test_remote_files_are_read(tmp_path: Path, expected: Corpus):
    system, root = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    system.pipe(f"{root}/a.jsonl", b"".join(LINES[:20]))
    system.pipe(f"{root}/b.jsonl.gz", members(gzip.compress, b"".join(LINES[20:])))
    for hidden in (".git/config.jsonl", "c/.cache/d.jsonl.gz", ".e.jsonl.gz"):
        system.pipe(f"{root}/{hidden}", LINES[0])
    everything = f"memory:/{root}/**"
    for i, source in enumerate((f"memory:/{root}", everything, f"memory:/{root}/a.jsonl,memory:/{root}/*.jsonl.gz")):
        assert prepare(config(source, tmp_path / f"{i}")).corpus.digest == expected.digest
    system.pipe(f"{root}/a.jsonl", b"".join(LINES))
    with pytest.raises(InputError, match="was made with"):
        prepare(config(f"memory:/{root}", tmp_path / "0"))
    system.pipe(f"{root}/a.bin", b"\0\1")
    with pytest.raises(InputError, match=r"input = .*a\.bin'"):
        prepare(config(f"memory:/{root}/a.bin", tmp_path / "ids"))


def test_one_file_at_a_url_is_read(tmp_path: Path, expected: Corpus):
    pytest.importorskip("aiohttp")
    write(tmp_path / "a.json", *LINES)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            made = prepare(config(f"http://127.0.0.1:{server.server_port}/a.json", tmp_path / "out"))
        finally:
            server.shutdown()
    assert made.corpus.digest == expected.digest


@pytest.mark.parametrize(
    ("named", "dtype", "has_end"), [("pair.bin", "uint16", True), ("pair.idx", "int32", False), ("", "int64", True)]
)
def test_ids_are_taken_as_they_are(tmp_path: Path, dtype: str, has_end: bool, named: str):
    ids = [list(text.encode()) for text in DOCUMENTS]
    (tmp_path / "in").mkdir()
    write_pair(tmp_path / "in/pair", [[[*document, 256] if has_end else document] for document in [*ids, []]], dtype)
    prepared = prepare(config(tmp_path / "in" / named, tmp_path / "out"))
    assert sorted(texts(prepared.corpus)) == sorted(DOCUMENTS)
    assert prepared.record.skipped == {"too short": 1}
    store = prepared.corpus.train
    assert all(np.count_nonzero(store.document(i) == 256) == 1 for i in range(store.num_documents))


@pytest.mark.parametrize("wrong", [257, -5])
def test_ids_of_another_tokenizer_stop_it(tmp_path: Path, wrong: int):
    write_pair(tmp_path / "pair", [[[1, 2]], [[3, wrong]], [[4]]], "int32")
    with pytest.raises(InputError, match=rf"pair\.bin: document 2: token id = {wrong}: must be 0 to 256"):
        prepare(config(tmp_path / "pair.bin", tmp_path / "out"))


@pytest.mark.parametrize(
    ("kinds", "where", "kept"),
    [
        ("jsonl parquet arrow", ("meta.pile_set_name=ArXiv|Books3", "meta.year=2003|2004|1999"), lambda i: i in (3, 4)),
        ("jsonl parquet", ("meta.ok=true", "meta.year=2001|2002|2005|2010"), lambda i: i in (1, 2, 5, 10)),
        ("jsonl parquet", ("day=2020-01-03", "a.year=2002.0|2011"), lambda i: i in (2, 11)),
        ("parquet", ("time=2020-01-02", "zone=2020-01-02", "odd=2"), lambda i: i % 6 == 4),
        ("parquet", ("time=2020-01-02T12:00:00|2020-01-03T12:00Z|2020-01-03 12:00",), lambda i: i % 6 in (1, 5)),
        ("parquet", ("zone=2020-01-02T12:00:00|2020-01-03T12:00Z|2020-01-03 12:00",), lambda i: i % 6 in (1, 5)),
        ("parquet", ("price=1.5|2",), lambda i: i % 2 == 0),
    ],
)
def test_where_chooses_records(tmp_path: Path, kinds: str, where: tuple[str, ...], kept: Callable[[int], bool]):
    """Check also times and numbers that are written otherwise than in the file."""
    for kind in kinds.split():
        source = write_input(kind, tmp_path / kind)
        prepared = prepare(config(source, tmp_path / f"{kind} out", where=where, validation_fraction=0.5))
        assert sorted(texts(prepared.corpus)) == sorted(text for i, text in enumerate(DOCUMENTS) if kept(i))
        assert prepared.record.skipped == {"filtered": sum(not kept(i) for i in range(len(DOCUMENTS)))}
        assert not prepared.record.rejected


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("meta.yaer=2001", r"'meta\.yaer' is missing; fields: .*'meta'"),
        ("meta.year=1999", r"'meta\.year' is 2000 \(int\); .*: \d: 'meta\.year' is 2001 \(int\); "),
        ("meta=ArXiv", r"'meta' is .*'ArXiv', .* \(dict\)"),
    ],
)
def test_a_filter_without_a_match_is_explained(tmp_path: Path, kind: str, where: str, message: str):
    with pytest.raises(InputError, match=f"no documents found: 40 filtered; .*: 1: {message}"):
        prepare(config(write_input(kind, tmp_path / "in"), tmp_path / "out", where=(where,)))


@pytest.mark.parametrize("kind", ["tex", "jsonl", "parquet"])
def test_lengths_are_bytes_of_utf8(tmp_path: Path, kind: str):
    lengths = sorted(len(text.encode()) for text in DOCUMENTS)
    low, high = lengths[5], lengths[-9]  # which cuts a character of some longer documents
    source, changes = write_input(kind, tmp_path / "in"), {"tokenizer": None, "train_bpe": 300, "min_length": low}
    prepared = prepare(config(source, tmp_path / "out", max_length=high, **changes))
    assert sorted(texts(prepared.corpus)) == sorted(text for text in DOCUMENTS if low <= len(text.encode()) <= high)
    counted = {"too short": sum(n < low for n in lengths), "too long": sum(n > high for n in lengths)}
    assert prepared.record.skipped == counted


def test_another_field_and_mixed_files(tmp_path: Path, monkeypatch):
    """Python source keeps its mark: published results have the digest of the standard library with such files."""
    write(tmp_path / "a", b'{"a": null}\n', *(json.dumps({"a": {"b": x}}).encode() + b"\n" for x in DOCUMENTS[:20]))
    write(tmp_path / "b.parquet", parquet_file(a=[{"b": text} for text in DOCUMENTS[20:25]]))
    write(tmp_path / "b.arrow", arrow(ipc.new_stream, a=[{"b": text} for text in DOCUMENTS[25:30]], c=[1] * 5))
    write(tmp_path / "dataset_info.json", b'{"features": {}}')  # `save_to_disk` of datasets writes it
    cached = write(tmp_path / "cache-0123456789abcdef_00000_of_00001.arrow", (tmp_path / "b.arrow").read_bytes())
    assert [file.path for file in find_files([str(cached)])] == [str(cached)]
    for i, text in enumerate(DOCUMENTS[30:]):
        write(tmp_path / f"c{i}.md", text.encode())
    write(tmp_path / "d.png", b"\x89PNG\0")
    write(tmp_path / "e.py", "source".encode("utf-8-sig"))
    prepared = prepare(config(tmp_path, tmp_path / "out", text_field="a.b"))
    assert sorted(texts(prepared.corpus)) == sorted([*DOCUMENTS, "\ufeffsource"])
    reasons = [(Path(bad["file"]).name, bad["reason"]) for bad in rejected(tmp_path / "out")]
    assert reasons == [("a", "no text"), ("d.png", "binary file")]
    again = prepare(config(tmp_path, tmp_path / "out", text_field="a.b"))  # the output is in the input
    assert again.corpus.digest == prepared.corpus.digest
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # the tables are not left out
    with pytest.raises(InputError, match=r"b\.arrow': needs the package pyarrow: pip install"):
        prepare(config(f"{tmp_path}/a,{tmp_path}/b.*", tmp_path / "without", text_field="a.b"))


# one text, few documents, separators, a validation set of the user


TEXT = "".join(f"line {i}: {'naïve café, 日本語' * (i % 3)}\n" for i in range(300))
FORMS = {
    "lines": TEXT,
    "no breaks": TEXT.replace("\n", " "),
    "no spaces": "a" + "日本語" * 3000,
    "windows": TEXT.replace("\n", "\r\n"),
    "json": json.dumps({"name": TEXT}, indent=1, ensure_ascii=False),
    "array": json.dumps([{"name": TEXT}], ensure_ascii=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_end_of_one_text_is_held_out(tmp_path: Path, form: str):
    text = FORMS[form]
    files = {"a.txt": text.encode(), "b": gzip.compress(text.encode("utf-16")), "c.json": text.encode("utf-8-sig")}
    for piece in (2**24, 100):
        digests = set()
        with mock.patch.multiple(records, PIECE_BYTES=piece):
            for name, content in files.items():
                made = prepare(config(write(tmp_path / name, content), tmp_path / f"{piece} {name}")).corpus
                made_texts = texts(made)  # decoded: no character is cut
                assert "".join(made_texts) == text
                assert max(len(each.encode()) for each in made_texts) <= piece
                held_out = "".join(made_texts[made.train.num_documents :])
                assert -1 <= len(held_out.encode()) - 0.3 * len(text.encode()) <= 1024
                assert (form, piece) != ("lines", 2**24) or all(each.endswith("\n") for each in made_texts)
                digests.add(made.digest)
        assert len(digests) == 1


def test_an_interrupted_division_at_a_position_is_repeated(tmp_path: Path):
    """It cannot resume after a complete file, because the position is counted from the first."""
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", in_lines([TEXT] * 9))
    with mock.patch.multiple(build, _SAVE_BYTES=1):
        whole = prepare(config(f"{tmp_path}/*.jsonl", tmp_path / "whole"))
        with stopped_after(12), pytest.raises(KeyboardInterrupt):
            prepare(config(f"{tmp_path}/*.jsonl", tmp_path / "out"))
        assert_same(prepare(config(f"{tmp_path}/*.jsonl", tmp_path / "out")), whole)
    assert whole.record.cut is not None


@pytest.mark.parametrize(
    ("files", "num_copies", "reasons", "options"),
    [
        ({"a.jsonl": in_lines([TEXT])}, 1, [], {}),
        ({"a.jsonl": in_lines([TEXT] * 3)}, 3, [], {}),
        ({"a.txt": TEXT.encode(), "b.txt": b"caf\xe9 \0" * 9}, 1, ["binary file"], {}),
        # Trained on the train split, and its tokens are counted; what is not Unicode is not.
        ({"b.txt": b"\xe9" * 9999, "c.txt": TEXT.encode()}, 1, ["not Unicode"], {"tokenizer": None, "train_bpe": 300}),
        ({}, 1, [], {}),  # ids
    ],
)
def test_few_documents_are_divided_at_a_position(tmp_path, files, num_copies, reasons, options, caplog):
    caplog.set_level(logging.INFO, "dape_jax")
    for name, content in files.items():
        write(tmp_path / name, content)
    source = f"{tmp_path}/*" if files else f"{write_pair(tmp_path / 'a', [[[*TEXT.encode(), 256]]])}.bin"
    given, whole = config(source, tmp_path / "out", validation_fraction=0.1, **options), TEXT * num_copies
    made = prepare(given)
    assert "".join(texts(made.corpus)) == whole
    validation = "".join(texts(made.corpus)[made.corpus.train.num_documents :])
    assert 0 <= len(validation.encode()) - 0.1 * len(whole.encode()) <= 1024
    assert_same(prepare(given), made)
    assert [bad["reason"] for bad in rejected(tmp_path / "out")] == reasons
    assert caplog.text.count("held out: about the last 10 %") == 2  # at every start


@quick
@given(
    documents=st.lists(st.text("ab-=", max_size=12).filter(lambda text: "==" not in f"={text}="), max_size=9),
    block=st.integers(1, 9),
    longest=st.integers(2, 9),
)
@example(documents=["a" * 10, "b"], block=13, longest=2)  # half of the separator ends a part that is too long
def test_separators_divide_a_text(documents: list[str], block: int, longest: int):
    with tempfile.TemporaryDirectory() as root, mock.patch.multiple(records, _BLOCK=block):
        file = write(Path(root, "a.txt"), "\r\n==\n".join(documents).encode())
        given = config(file, "out", document_separator="==", max_length=longest)
        made = [item for _, item in read_records(*find_files([str(file)]), given, is_alone=True)]
    kept, too_long = [text for text in documents if text], LeftOut("too long", f"longer than max_length = {longest}")
    assert len(made) == len(kept)
    for item, text in zip(made, kept, strict=True):
        assert item == text.encode() or (item == too_long and len(text) + 3 > longest)


def test_a_separator_is_given_with_escapes_and_named_if_it_is_seen(tmp_path: Path, caplog):
    caplog.set_level(logging.WARNING, "dape_jax")
    stories = "<|endoftext|>\n".join(text.replace("\n", " ") + "\n" for text in DOCUMENTS)
    source = write(tmp_path / "stories.txt", stories.encode())

    def warned(output: str, **options) -> tuple[int, str]:
        caplog.clear()
        return sum(prepare(config(source, tmp_path / output, **options)).record.num_documents.values()), caplog.text

    number, said = warned("a")
    assert "--document_separator='<|endoftext|>' " in said
    # separators that divide none of many files
    prepare(config(f"{write_input('tex', tmp_path / 'in')}", tmp_path / "many", document_separator="###"))
    readme, several = write(tmp_path / "README.md", b"a"), write(tmp_path / "several.txt", b"one</s>two</s>three</s>")
    prepare(config(f"{readme},{several}", tmp_path / "several"))
    assert "'###': separates nothing" in caplog.text
    assert "--document_separator='</s>' " in caplog.text
    assert (number, warned("b", document_separator="<|endoftext|>")) == (2, (40, ""))
    assert "'###': separates nothing" in warned("c", document_separator="###")[1]
    for output, separators in (("d", ["\n\n"]), ("windows", ["\r\n\r\n"]), ("both", ["\n\n", "\r\n\r\n"])):
        lines = [text.replace("\n", "") + separators[i * len(separators) // 40] for i, text in enumerate(DOCUMENTS)]
        write(source, "".join(lines).encode())
        assert warned(output, document_separator=r"\n\n") == (40, "")
    data = DataConfig(str(source), "bytes", str(tmp_path / "cache"), 0.3, 0, document_separator="\n\n")
    assert load_corpus(data).digest == load_corpus(dataclasses.replace(data, path=str(tmp_path / "d"))).digest
    assert caplog.text.count("data.document_separator = '\\n\\n': not used: dape-prepare") == 1
    write(tmp_path / "a.csv", b"id,text\n1,words\n")
    write(tmp_path / "b.csv.gz", gzip.compress(b"id,text\n2,words\n"))
    source = tmp_path / "*.csv*"
    assert warned("e")[1].count("a.csv is read as text, without the field 'text'") == 1
    source = f"{readme},{tmp_path}/*.csv"
    assert "a.csv is read as text, without the field 'text'" in warned("f")[1]
    source = f"{tmp_path}/*.txt,{tmp_path}/*.csv"
    assert "is read as text" not in warned("g")[1]
    source = write(tmp_path / "part-0", b'{"body": "a"}\n{"body": "b"}\n')
    assert "part-0 is read as text, without the field 'text'" in warned("h")[1]


def test_the_files_of_a_validation_set_are_held_out(tmp_path: Path):
    write_input("tex", tmp_path / "in")
    made = prepare(config(tmp_path / "in", tmp_path / "out", validation=(f"{tmp_path}/in/0*.tex",))).corpus
    assert texts(made) == DOCUMENTS[10:] + DOCUMENTS[:10]  # also those that are in the input
    for i in range(10):  # linked files are these files
        (tmp_path / f"link{i}").symlink_to(tmp_path / f"in/0{i}.tex")
    sources = f"{tmp_path}/in,{tmp_path}/link*"
    made = prepare(config(sources, tmp_path / "linked", validation=(f"{tmp_path}/link*",))).corpus
    assert texts(made) == DOCUMENTS[10:] + DOCUMENTS[:10]
    assert sorted(texts(prepare(config(sources, tmp_path / "both")).corpus)) == sorted(DOCUMENTS)
    train, test = (write(tmp_path / f"{name}.txt", TEXT.encode()) for name in ("train", "test"))
    made = prepare(config(train, tmp_path / "c", validation=(str(test),), max_length=1000)).corpus
    assert "".join(texts(made)) == 2 * TEXT  # longer texts are cut, if nothing else is in their split
    empty = write(tmp_path / "empty.txt")
    for wrong, words in (
        ("nothing", "no files there"),
        (empty, "no documents found: 1 too short; .*: 1: shorter than min_length = 1"),
    ):
        with pytest.raises(InputError, match=rf"validation = .*: {words}"):
            prepare(config(train, tmp_path / "d", validation=(f"{tmp_path / wrong}",)))


def test_what_is_left_out_is_counted_at_every_start(tmp_path: Path, caplog):
    write_input("tex", tmp_path / "in")
    wrong = {"a.png": b"\0", "b.txt": b"", "c.txt": b"", "flat.bin": b"\1\0" * 99, "d\udcff.gz": b"\x1f\x8b"}
    wrong["e.jsonl"] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for name, content in wrong.items():  # one name is not UTF-8
        write(tmp_path / "in" / name, content)
    (tmp_path / "in/linked").symlink_to(tmp_path)
    (tmp_path / "in/lost.txt").symlink_to(tmp_path / "nowhere")
    data = DataConfig(str(tmp_path / "in"), "bytes", str(tmp_path / "in/cache"), 0.3, 0)  # the cache is in the text
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dape_jax"):
            directory = load_corpus(data).train.directory.parent
        links, lost, said = caplog.messages
        assert lost == f"1 links without a file left out, such as {tmp_path}/in/lost.txt"
        assert links == f"links to directories in {tmp_path}/in left out: linked; '{tmp_path}/in/**' follows them"
        counts = "2 too short, 2 binary file, 1 damaged file, 1 not downloaded"
        assert said == f"left out: {counts}; see {directory}/{REJECTED_FILE}"
    found = {Path(bad["file"]).name: bad["detail"] for bad in rejected(directory)}
    assert found.keys() == wrong.keys()
    assert "it has no .idx" in found["flat.bin"]


def test_what_a_data_set_has_beside_its_training_records_is_named(tmp_path: Path, caplog):
    caplog.set_level(logging.WARNING, "dape_jax")
    (data := tmp_path / "in/data").mkdir(parents=True)
    test, train = data / "Test-1-fedcba9876543210.jsonl", data / "train-0-0123456789abcdef.jsonl"
    readme, _, _ = write(tmp_path / "in/README.md", b"a data set"), write(test, *LINES), write(train, *LINES)
    packed = write(Path(f"{train}.bz2"), bz2.compress(train.read_bytes()))
    advice = "give the files to train on, and others as --validation (in training, data.validation_path)"
    pairs = (test, train), (train, packed)
    named, twice = (f"{one} and {other} are both used, whatever their names: {advice}" for one, other in pairs)
    mixed = f"the corpus has texts, as in {readme} and records, as in {test}"
    folders = f"directories that match '{tmp_path}/in/*' left out, such as {tmp_path}/in/data; '**' descends into them"
    parts = [("", [named, mixed])] * 2 + [("/*", [folders]), ("/data/train*l", []), ("/data/train*", [twice])]
    for path, said in parts:
        caplog.clear()
        prepare(config(f"{tmp_path}/in{path}", tmp_path / f"out{len(path)}"))
        assert caplog.messages == said


def test_a_prepared_corpus_is_no_text(tmp_path: Path):
    prepare(config(write(tmp_path / "a.jsonl", *LINES), tmp_path / "out"))
    for path in ("out", "out/train", f"../{tmp_path.name}"):
        with pytest.raises(InputError, match=rf"input = '{tmp_path}/{path}': must be text, not a prepared corpus"):
            prepare(config(tmp_path / path, tmp_path / "again"))


# bad records

BAD_LINES = {
    b'{"text": "caf\xe9"}': "not JSON",
    b"{'text': 1}": "not JSON",
    b'{"text": "a"} {"text": "b"}': "not JSON",
    b"\0": "not JSON",
    b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "not JSON",
    b"[1]": "no text",
    b"null": "no text",
    b"{}": "no text",
    b'{"text": null}': "no text",
    b'{"text": 3}': "no text",
    rb'{"text": "\ud800"}': "not Unicode",
}


def test_every_bad_record_is_named_by_file_and_line_and_left_out(tmp_path: Path):
    lines, expected = [], []
    name = str(tmp_path / "a\x1b[2J.jsonl")
    for i, (line, reason) in enumerate(BAD_LINES.items()):
        good = LINES[i].replace(b'"other": ', b'"score": NaN, "other": ')  # as many programs write
        lines += [good, b"  \n", line + b"\n"]
        expected.append((name, 3 * i + 3, reason))
    prepared = prepare(config(write(Path(name), *lines), tmp_path / "out", max_length=100))
    found = rejected(tmp_path / "out")
    long = [i for i in range(len(BAD_LINES)) if len(DOCUMENTS[i].encode()) > 100]
    expected = sorted([*expected, *((name, 3 * i + 1, "too long") for i in long)])
    assert [(bad["file"], bad["line"], bad["reason"]) for bad in found] == expected
    assert all(len(bad["detail"]) <= 200 for bad in found)
    assert prepared.record.rejected == dict(Counter(BAD_LINES.values()))
    assert sorted(texts(prepared.corpus)) == sorted(DOCUMENTS[i] for i in range(len(BAD_LINES)) if i not in long)
    assert prepared.record.skipped == {"too long": len(long)}


NOT_UTF8 = pyarrow.array([b"\xff", b"a", b"\xff"]).view(pyarrow.string())
LATE = pyarrow.array([4 * 10**17, 0], pyarrow.timestamp("us"))
HEX = random.Random(0).randbytes(100_000).hex().encode()
DAMAGED = {
    "no text": ("a.parquet", parquet_file(text=["a", None] * 2), [(2, "no text"), (4, "no text")]),
    "not Unicode": ("a.parquet", parquet_file(text=[b"a", b"\xff"]), [(2, "not Unicode")]),
    "not Unicode in strings": ("a.parquet", parquet_file(text=NOT_UTF8), [(1, "not Unicode"), (3, "not Unicode")]),
    "after the year 9999": ("a.parquet", parquet_file(text=LATE), [(1, "out of range"), (2, "no text")]),
    "first of an array": ("a.json", b'[{"text": null}, {"text": "a"}]', [(1, "no text")]),
    "no field": ("a.parquet", parquet_file(other=["a"]), [(1, "no text")]),
    "number": ("a.parquet", parquet_file(text=[1, 2]), [(1, "no text"), (2, "no text")]),
    "cut": ("a.parquet", parquet_file(text=["a"])[:-9], [(1, "damaged file")]),
    "empty": ("a.parquet", b"", [(1, "damaged file")]),
    "cut stream": ("a.arrow", FILES["arrow"][:-4], [(41, "damaged file")]),
    # Integers of 128 bits: what pyarrow does not support is another kind of error.
    "wide stream": ("a.arrow", arrow(ipc.new_stream, text=["a"], n=[1]).replace(b"@", b"\x80"), [(1, "damaged file")]),
    "empty stream": ("a.arrow", b"", [(1, "damaged file")]),
}
for suffix, compress in COMPRESS.items():
    DAMAGED[suffix] = (f"a.txt.{suffix}", compress(HEX)[:-50], [(1, "damaged file")])
    between = compress(LINES[0]) + b"\0\1" + compress(LINES[1])
    DAMAGED[f"after a member of {suffix}"] = (f"a.jsonl.{suffix}", between, [(2, "damaged file")])


@pytest.mark.parametrize("case", DAMAGED)
def test_bad_rows_and_damaged_files_are_left_out(tmp_path: Path, case: str):
    name, content, expected = DAMAGED[case]
    source, good = write(tmp_path / name, content), write(tmp_path / "good.jsonl", *LINES)
    prepare(config(f"{source},{good}", tmp_path / "out"))
    found = [(bad["file"], bad["line"], bad["reason"]) for bad in rejected(tmp_path / "out")]
    assert found == [(str(source), *each) for each in expected]


@quick
@given(st.sampled_from(["gz", "zst", "xz"]), st.data())
def test_records_before_a_truncation_are_kept(compression: str, data: st.DataObject):
    whole = members(COMPRESS[compression])
    cut = whole[: data.draw(st.integers(0, len(whole)) | st.just(len(whole) - 1))]
    with tempfile.TemporaryDirectory() as root:
        file = write(Path(root, f"a.jsonl.{compression}"), cut)
        found = list(read_records(*find_files([str(file)]), config(file, "out"), is_alone=True))
    bad = [(number, item) for number, item in found if isinstance(item, LeftOut)]
    kept = [item for _, item in found if isinstance(item, str)]
    assert kept == DOCUMENTS[: len(kept)]
    # A cut between two members loses the rest silently, except for the line, or the character, that it cuts.
    assert bad == found[len(kept) :]
    assert [number for number, _ in bad] == [len(kept) + 1] * len(bad)
    assert {item.reason for _, item in bad} <= {"damaged file", "not JSON"}
    assert bad or len(kept) in (0, len(DOCUMENTS))
    if cut == whole[:-1]:
        assert [item.reason for _, item in bad] == ["damaged file"]


# interruptions


@contextlib.contextmanager
def stopped_after(num_documents: int) -> Iterator[None]:
    """Interrupt a build at its next document after this number of them."""
    encode, calls = build.encode, iter(range(num_documents))

    def stopped(found, inputs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return encode(found, inputs)

    with mock.patch.multiple(build, encode=stopped):
        yield


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """Write good and bad records in several kinds of files."""
    root = tmp_path_factory.mktemp("mixed")
    write(root / "a.jsonl", *(line for pair in zip(LINES, [b"{}\n", b"x\n"] * 20, strict=True) for line in pair))
    write(root / "b.jsonl.zst", members(zstd.compress)[:-50])
    write(root / "c.parquet", parquet_file(text=[text.upper() for text in DOCUMENTS]))
    for i in range(20):
        write(root / f"d{i}.txt", f"text {i} ".encode() * i)
    return root


@pytest.fixture(scope="module")
def whole(mixed: Path, tmp_path_factory) -> command.Prepared:
    """Return the corpus of an uninterrupted process."""
    return prepare(config(mixed, tmp_path_factory.mktemp("whole") / "out"))


def assert_same(made: command.Prepared, whole: command.Prepared) -> None:
    assert made.corpus.digest == whole.corpus.digest
    assert made.record == whole.record
    directories = [each.corpus.train.directory.parent for each in (made, whole)]
    assert rejected(directories[0]) == rejected(directories[1])


@settings(max_examples=15, deadline=None)
@given(stops=st.lists(st.integers(0, 150), min_size=1, max_size=4), save_bytes=st.sampled_from([1, 900, 2**26]))
def test_an_interrupted_build_resumes_to_the_same_result(
    mixed: Path, whole: command.Prepared, stops: list[int], save_bytes: int
):
    with tempfile.TemporaryDirectory() as root, mock.patch.multiple(build, _SAVE_BYTES=save_bytes):
        given, num_complete = config(mixed, f"{root}/out"), 0
        for stop in stops:
            with stopped_after(stop), contextlib.suppress(KeyboardInterrupt):
                prepare(given)
            for file in Path(root).glob("out.partial/**/*.*"):  # a killed process leaves more than it has recorded
                if file.suffix in (".bin", ".lengths", ".jsonl"):
                    file.write_bytes(file.read_bytes() + b"?")
            if (file := Path(root, "out.partial/progress.json")).exists():
                assert save_bytes < 2**26 or Path(root, "out").exists()
                assert json.loads(file.read_text())["num_files"] >= num_complete, "a complete file was lost"
                num_complete = json.loads(file.read_text())["num_files"]
        assert_same(prepare(given), whole)
        assert {path.name for path in Path(root).iterdir()} == {"out", ".out.lock"}


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Stop `prepare` after its recipe and tokenizer are written."""
    with mock.patch.multiple(command, build_corpus=None), pytest.raises(TypeError):
        yield


RECIPES: dict[str, dict] = {
    "max_length": {"max_length": 99},
    "where": {"where": ("meta.ok=true",)},
    "tokenizer": {"tokenizer": None, "train_bpe": 300},
    "document_separator": {"document_separator": "=="},
    "validation": {"validation": ("c.jsonl",)},
    "input": {"input": ("b.jsonl", "in")},
    "more/new.jsonl": {"input": ("more", "in", "b.jsonl")},
}


@pytest.mark.parametrize("complete", [True, False])
def test_another_recipe_is_refused_and_named(tmp_path: Path, monkeypatch, complete: bool):
    monkeypatch.chdir(tmp_path)
    for name in ("in/a.jsonl", "b.jsonl", "c.jsonl", "more/new.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        write(Path(name), *LINES, b"{}\n")
    given, directory = config("in,b.jsonl", "out"), Path("out" if complete else "out.partial")
    if complete:
        assert_same(prepare(given), prepare(dataclasses.replace(given, workers=3)))
    else:
        with interrupted():
            prepare(given)
    recipe, files = json.loads((directory / "recipe.json").read_text()), map(Path, ("in/a.jsonl", "b.jsonl"))
    names = "format_version tokenizer text_field where min_length max_length validation_fraction input"
    assert {*recipe} == {*names.split()}  # older corpora have no others
    assert recipe["input"] == {str(f.absolute()): [f.stat().st_size, f.stat().st_mtime_ns] for f in files}

    def content() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}

    before = content()
    for field, changes in RECIPES.items():
        with pytest.raises(InputError, match=rf"{field} = .* was made with"):
            prepare(dataclasses.replace(given, **changes))
        assert content() == before
    os.utime("in/a.jsonl", ns=(1, 1))
    with pytest.raises(InputError, match=r"a\.jsonl = .* \(bytes and time of change\): .* was made with"):
        prepare(given)


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_files_of_other_programs_are_not_changed(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    write(tmp_path / name / "thesis.tex", b"text")
    with pytest.raises(InputError, match=f"{name}"):
        prepare(config(write_input("jsonl", tmp_path / "in"), tmp_path / "out"))
    assert (tmp_path / name / "thesis.tex").read_bytes() == b"text"


def test_a_second_process_waits(tmp_path: Path):
    given = config(write_input("jsonl", tmp_path / "in"), tmp_path / "out")
    begun, made = threading.Event(), []

    def slow(*arguments, build_corpus=build.build_corpus, **options):
        assert not begun.is_set(), "two processes build"
        begun.set()
        time.sleep(0.3)
        return build_corpus(*arguments, **options)

    with mock.patch.multiple(command, build_corpus=slow):
        first = threading.Thread(target=lambda: made.append(prepare(given)))
        first.start()
        begun.wait()
        second = prepare(given)
        first.join()
    assert_same(second, made[0])


# tokenizers


def test_a_trained_tokenizer_is_complete_and_not_trained_again(tmp_path: Path, monkeypatch):
    """The number of threads that encode does not matter."""
    given = config(write_input("jsonl", tmp_path / "in"), tmp_path / "out", tokenizer=None, train_bpe=300, workers=1)
    with interrupted():
        prepare(given)
    monkeypatch.setattr(command, "train_bpe", None)
    made = prepare(given).corpus
    assert sorted(texts(made)) == sorted(DOCUMENTS)
    assert made.train.tokenizer.vocab_size == 300
    assert made.train.num_tokens + made.validation.num_tokens < sum(len(text.encode()) for text in DOCUMENTS)
    file = str(tmp_path / "out/tokenizer.json")
    assert read_tokenizer(file).name == made.train.sidecar.tokenizer
    named = prepare(config(tmp_path / "in/*", tmp_path / "named", tokenizer=file, workers=4))
    assert named.corpus.digest == made.digest

    def loaded(tokenizer: str | None) -> Corpus:
        return load_corpus(DataConfig(str(tmp_path / "out"), tokenizer, str(tmp_path / "cache"), 0.1, 0))

    for tokenizer in (None, file, made.train.sidecar.tokenizer):
        assert loaded(tokenizer).digest == made.digest
    for tokenizer in ("bytes", "bpe-0123456789abcdef"):
        with pytest.raises(InputError, match=f"data.tokenizer = '{tokenizer}': .*was prepared with 'bpe-"):
            loaded(tokenizer)
    assert not (tmp_path / "cache").exists()
    copied = DataConfig(str(tmp_path / "in"), file, str(tmp_path / "cache"), 0.3, 0)
    assert load_corpus(copied).digest == made.digest  # raw text goes through the same builder


def test_a_tokenizer_is_trained_only_on_the_training_split(tmp_path: Path):
    """Test a division by the hash, and one at a position."""

    def trained(output: str, documents: list[str]) -> str:
        source = write(tmp_path / f"{output}.jsonl", in_lines(documents))
        made = prepare(config(source, tmp_path / output, tokenizer=None, train_bpe=290)).corpus
        return made.train.sidecar.tokenizer

    validation = [f"zebra {i} " * 50 for i in range(40)]
    validation = [text for text in validation if split_of(text.encode(), 0.3) == "validation"]
    assert trained("one", DOCUMENTS) == trained("other", [*validation, *DOCUMENTS])
    words = " the rows are queries" * 100
    assert trained("end", [words + " zebra" * 60]) == trained("another end", [words + " tiger" * 60])


def test_raw_text_needs_a_tokenizer(tmp_path: Path):
    text = write_input("tex", tmp_path / "in")
    with pytest.raises(InputError, match=r"data\.tokenizer = None: raw text .*'bytes' or a tokenizer\.json"):
        load_corpus(DataConfig(text, None, str(tmp_path / "cache"), 0.3, 0))


# messages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": ("nowhere",)}, "input = 'nowhere': no files there"),
        ({"validation": "SOURCE"}, "input = .*: must have files that are not in validation"),
        ({"input": "PAIR", "tokenizer": None, "train_bpe": 300}, r"train_bpe = 300: .*pair\.bin has ids"),
        ({"output": "gs://bucket/a"}, "output = 'gs://bucket/a': must be a new local directory"),
        ({"train_bpe": 300}, r"tokenizer, train_bpe = \('bytes', 300\): give exactly one"),
        ({"tokenizer": None}, r"tokenizer, train_bpe = \(None, None\): give exactly one"),
        ({"tokenizer": None, "train_bpe": 9}, "train_bpe = 9: must be 257"),
        ({"end_of_document": "x"}, "end_of_document = 'x': needs a --tokenizer"),
        ({"text_field": "words"}, r"40 no text; .*'words' is missing; fields: \['text', 'meta',"),
        ({"input": "EMPTY"}, r"no documents found: the files are empty$"),
        ({"input": "NULL"}, r"1 no text; .*'text' is null; --text_field"),
        ({"input": "ARRAY"}, r"1 no text; .*a list, not an object"),
        ({"where": ("meta",)}, "where = 'meta': must be field=value"),
        ({"max_length": 0}, "max_length = 0: must be min_length = 1 to"),
        ({"validation_fraction": float("nan")}, "validation_fraction = nan"),
        ({"workers": 0}, "workers = 0"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, changes: dict, message: str):
    source = write_input("jsonl", tmp_path / "in")
    paths = {"SOURCE": (source,), "PAIR": (f"{write_pair(tmp_path / 'pair', PAIR)}.bin",)}
    paths["ARRAY"] = (str(write(tmp_path / "array.jsonl", b'["a", "b"]')),)
    paths["EMPTY"] = (str(write(tmp_path / "empty.jsonl.gz", gzip.compress(b""))),)
    paths["NULL"] = (str(write(tmp_path / "null.jsonl", b'{"text": null}')),)
    changes = {name: paths.get(str(value), value) for name, value in changes.items()}
    with pytest.raises(InputError, match=message):
        prepare(config(source, **{"to": tmp_path / "out"} | changes))
    # A rejected command leaves no files that would make the corrected command fail.
    assert not {"out", "out.partial"} & {path.name for path in tmp_path.iterdir()}


def test_the_command_line(tmp_path: Path, capsys):
    """It prepares and then shows a corpus, in any locale; it shows one alone; it refuses other flags in one line."""
    source = write(tmp_path / "a.jsonl", in_lines(["", *(f"\x1b[2J\u202e{'é' * i}" for i in range(9))]), b"{}\n")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    prepared = dape_prepare(source, tmp_path / "out", "--workers=2", **locale).stdout
    show(tmp_path / "out")
    assert prepared.splitlines() == capsys.readouterr().out.replace("é", r"\xe9").splitlines()
    assert run_python("-m", "dape_jax.data.prepare", f"--show={tmp_path}/out", **locale).stdout == prepared
    assert all(char.isprintable() or char == "\n" for char in prepared)
    made = open_corpus(tmp_path / "out")
    for said in (
        f"digest {made.digest}: verified",
        "skipped: 1 too short",
        "bad: 1 no text; see ",
        r"\x1b[2J\u202e\xe9",
    ):
        assert said in prepared
    for store in made:
        lengths = np.diff(store.offsets) - 1
        assert f"{len(lengths)} documents, {store.num_tokens} tokens" in prepared
        assert f"(mean {lengths.mean():,.1f}): smallest {lengths.min()}" in prepared
    refused = dape_prepare(source, tmp_path / "out", "--max_length=9")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "max_length = '9': must be 16777216" in refused.stderr


# token ids of Megatron

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
PAIR = [[[5, 6, 7]], [[1], [], [2, 3], [100]], [], [[]], [[9, 9]], []]  # documents of sequences of tokens


def write_pair(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> Path:
    """Write a pair as the official code's builder does."""
    sequences = [sequence for document in documents for sequence in document]
    sizes = [len(sequence) for sequence in sequences]
    starts = [sum(sizes[:i]) * np.dtype(dtype).itemsize for i in range(len(sizes))]
    offsets = [sum(len(document) for document in documents[:i]) for i in range(len(documents) + 1)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype]) + struct.pack("<QQ", len(sizes), len(offsets))
    index += struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(starts)}q", *starts)
    index += struct.pack(f"<{len(offsets)}q", *offsets)
    write(Path(f"{prefix}.idx"), index)
    write(Path(f"{prefix}.bin"), *(np.array(sequence, dtype).tobytes() for sequence in sequences))
    return prefix


@pytest.mark.parametrize("dtype", CODES)
def test_pairs_are_read_token_for_token(tmp_path: Path, dtype: str):
    found = list(read_ids(f"{write_pair(tmp_path / 'pair.0', PAIR, dtype)}.idx"))
    assert [tokens.tolist() for tokens in found] == [[5, 6, 7], [1, 2, 3, 100], [], [], [9, 9], []]
    assert all(tokens.dtype == dtype for tokens in found)


NUM_SEQUENCES = sum(map(len, PAIR))
SIZES, STARTS, INDEX = 34, 34 + 4 * NUM_SEQUENCES, 34 + 12 * NUM_SEQUENCES
REFUSED: dict[str, tuple[str, int, int | bytes, str]] = {
    "cut": ("", 20, 0, r"pair: \.bin and \.idx must be a pair"),
    "empty": ("", 0, 0, r"pair: \.bin and \.idx must be a pair"),
    "other magic": ("<9s", 0, b"TNTIDX\0\0\1", r"pair\.idx: magic, version, dtype = \(b'TNTIDX"),
    "float": ("<B", 17, 6, r"pair\.idx: magic, version, dtype = .* 6\): must be .*'uint16'"),
    "sequences without end": ("<Q", 18, 2**64 - 1, r"pair\.idx: size = \d+: must be "),
    "no documents": ("<Q", 26, 0, r"pair\.idx: size"),
    "negative size": ("<i", SIZES + 8, -1, r"pair\.idx: sequences"),
    "larger last size": ("<i", STARTS - 4, 3, r"pair\.bin: size = 18: must be 20"),
    "index ends late": ("<q", INDEX + 8 * len(PAIR), 8, r"pair\.idx: documents = \[0, 8\]"),
    "index decreases": ("<q", INDEX + 8, 7, r"pair\.idx: documents"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_pair_is_refused_by_file_and_field(tmp_path: Path, case: str):
    form, at, value, words = REFUSED[case]
    prefix = write_pair(tmp_path / "pair", PAIR)
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    if form:
        struct.pack_into(form, data, at, value)
    write(Path(f"{prefix}.idx"), data if form else data[:at])
    with pytest.raises(InputError, match=words):
        list(read_ids(f"{prefix}.bin"))
    good = write(tmp_path / "good.jsonl", *LINES)
    prepare(config(f"{prefix}.bin,{good}", tmp_path / "out"))
    assert [(bad["file"], bad["reason"]) for bad in rejected(tmp_path / "out")] == [(f"{prefix}.bin", "damaged file")]
