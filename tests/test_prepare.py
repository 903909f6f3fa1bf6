"""Any files go in; what comes out is every good document once, or one line that says why not. Nothing half is whole."""

import contextlib
import dataclasses
import fcntl
import gzip
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from test_megatron import write as write_pair

from dape_jax.data import corpus
from dape_jax.data.prepare import build, command, records
from dape_jax.data.prepare.build import REJECTED_FILE, SPLITS
from dape_jax.data.prepare.command import PrepareConfig
from dape_jax.data.prepare.records import BadRecord, Document, Position, Selection, examine, read_batches
from dape_jax.data.store import Corpus, DataConfig, load_corpus, open_corpus
from dape_jax.data.tokenizers import Bytes, read_tokenizer
from dape_jax.errors import InputError

quick = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def no_fsync() -> Iterator[None]:
    """Power cuts are not simulated, and waiting for the disk would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
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
    }


RECORDS = [record(i, text) for i, text in enumerate(DOCUMENTS)]
LINES = [json.dumps(content, ensure_ascii=i % 3 == 0).encode() + b"\n" for i, content in enumerate(RECORDS)]


def members(compress: Callable[[bytes], bytes]) -> bytes:
    """Seven lines in each member of the archive, cut within a line."""
    content = b"".join(LINES)
    cuts = [*range(0, len(content), len(content) // 6 + 5), len(content)]
    return b"".join(compress(content[a:b]) for a, b in itertools.pairwise(cuts))


def parquet_file(**columns: pyarrow.Array | list) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink, row_group_size=9)
    return sink.getvalue().to_pybytes()


def write_input(kind: str, root: Path) -> str:
    """DOCUMENTS as files of a kind; what --input then is."""
    root.mkdir(exist_ok=True)
    lines = b"".join(LINES)
    match kind:
        case "text":
            for i, text in enumerate(DOCUMENTS):
                (root / f"{i:02}.tex").write_bytes(text.encode())
            return str(root)
        case "parts.jsonl":
            for i in range(0, len(LINES), 10):
                (root / f"{i}.jsonl").write_bytes(b"".join(LINES[i : i + 10]))
            return f"{root}/0.jsonl,{root}/[123]*.jsonl"
        case "jsonl" | "ndjson":
            content = b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n\r\n").rstrip()  # as Windows may write it
        case "jsonl.gz" | "json.gz":
            content = members(gzip.compress)
        case "JSONL.ZST" | "json.zst":
            content = members(zstandard.compress)
        case "parquet":
            content = parquet_file(**{name: [r[name] for r in RECORDS] for name in ("other", "text", "meta")})
        case "dictionary.parquet":
            content = parquet_file(text=pyarrow.array(DOCUMENTS).dictionary_encode(), meta=[r["meta"] for r in RECORDS])
    (root / f"file.{kind}").write_bytes(content)
    return f"{root}/*"


KINDS = ("text", "parts.jsonl", "jsonl", "ndjson", "jsonl.gz", "json.gz", "JSONL.ZST", "json.zst", "parquet")
KINDS += ("dictionary.parquet",)


def config(source: str | Path, to: str | Path, **changes) -> PrepareConfig:
    fields = {"input": tuple(str(source).split(",")), "output": str(to), "tokenizer": "bytes"}
    return PrepareConfig(**(fields | {"validation_fraction": 0.3} | changes))


def texts(made: Corpus) -> list[str]:
    stores = (made.train, made.validation)
    return [store.tokenizer.decode(store.document(i)).decode() for store in stores for i in range(store.num_documents)]


def rejected(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / REJECTED_FILE).read_text().splitlines()]


def write(file: Path, *parts: bytes) -> Path:
    file.write_bytes(b"".join(parts))
    return file


# what goes in


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Corpus:
    root = tmp_path_factory.mktemp("expected")
    return command.prepare(config(write_input("jsonl", root / "in"), root / "out")).corpus


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, expected: Corpus, kind: str):
    prepared = command.prepare(config(write_input(kind, tmp_path / "in"), tmp_path / "out"))
    assert sorted(texts(prepared.corpus)) == sorted(DOCUMENTS)
    assert prepared.corpus.digest == expected.digest
    assert prepared.record.num_text_bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert not rejected(tmp_path / "out")
    for store in (prepared.corpus.train, prepared.corpus.validation):
        store.verify()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize("named", ["pair.bin", "pair.idx", ""])
def test_ids_are_taken_as_they_are(tmp_path: Path, dtype: str, has_end: bool, named: str):
    ids = [list(text.encode()) for text in DOCUMENTS]
    (tmp_path / "in").mkdir()
    write_pair(tmp_path / "in/pair", [[[*document, 256] if has_end else document] for document in [*ids, []]], dtype)
    prepared = command.prepare(config(tmp_path / "in" / named, tmp_path / "out"))
    assert sorted(texts(prepared.corpus)) == sorted(DOCUMENTS)
    assert prepared.record.left_out == {"too short": 1}
    store = prepared.corpus.train
    assert all(np.count_nonzero(store.document(i) == 256) == 1 for i in range(store.num_documents))


@pytest.mark.parametrize("wrong", [257, -5])
def test_ids_of_another_tokenizer_stop_it(tmp_path: Path, wrong: int):
    write_pair(tmp_path / "pair", [[[1, 2]], [[3, wrong]], [[4]]], "int32")
    said = rf"pair\.bin: document 2: token id = {wrong}: the tokenizer bytes has 0 to 256"
    with pytest.raises(InputError, match=said):
        command.prepare(config(tmp_path / "pair.bin", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("where", "kept"),
    [
        (("meta.pile_set_name=ArXiv",), lambda i: i % 2 == 0),
        (("meta.pile_set_name=ArXiv|Books3", "meta.year=2003|2004|1999"), lambda i: i in (3, 4)),
        (("meta.ok=true", "meta.year=2001|2002|2005|2010"), lambda i: i in (1, 2, 5, 10)),
    ],
)
def test_where_chooses_records(tmp_path: Path, kind: str, where: tuple[str, ...], kept: Callable[[int], bool]):
    source = write_input(kind, tmp_path / "in")
    prepared = command.prepare(config(source, tmp_path / "out", where=where, validation_fraction=0.5))
    assert sorted(texts(prepared.corpus)) == sorted(text for i, text in enumerate(DOCUMENTS) if kept(i))
    assert prepared.record.left_out == {"filtered": sum(not kept(i) for i in range(len(DOCUMENTS)))}
    assert not prepared.record.rejected


def test_a_record_that_is_filtered_is_not_bad(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", b'{"meta": 3}\n{"meta": {"pile_set_name": ["ArXiv"]}}\n', *LINES)
    prepared = command.prepare(config(source, tmp_path / "out", where=("meta.pile_set_name=ArXiv",)))
    assert prepared.record.left_out == {"filtered": 2 + len(LINES) // 2}
    assert not prepared.record.rejected


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_lengths_are_bytes_of_utf8(tmp_path: Path, kind: str):
    lengths = sorted(len(text.encode()) for text in DOCUMENTS)
    low, high = lengths[5], lengths[-6]
    source = write_input(kind, tmp_path / "in")
    prepared = command.prepare(config(source, tmp_path / "out", min_length=low, max_length=high))
    assert sorted(texts(prepared.corpus)) == sorted(text for text in DOCUMENTS if low <= len(text.encode()) <= high)
    counted = {"too short": sum(n < low for n in lengths), "too long": sum(n > high for n in lengths)}
    assert prepared.record.left_out == counted


def test_another_field_and_mixed_files(tmp_path: Path):
    write(tmp_path / "a.jsonl", *(json.dumps({"a": {"b": text}}).encode() + b"\n" for text in DOCUMENTS[:20]))
    write(tmp_path / "b.parquet", parquet_file(a=[{"b": text} for text in DOCUMENTS[20:30]]))
    for i, text in enumerate(DOCUMENTS[30:]):
        write(tmp_path / f"c{i}.md", text.encode())
    write(tmp_path / "d.png", b"\x89PNG\0")
    prepared = command.prepare(config(tmp_path, tmp_path / "out", text_field="a.b"))
    assert sorted(texts(prepared.corpus)) == sorted(DOCUMENTS)
    assert prepared.record.left_out == {"binary file": 1}
    again = command.prepare(config(tmp_path, tmp_path / "out", text_field="a.b"))  # the output lies in the input
    assert again.usage is None


# bad records

DEEP = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD_LINES = {
    b'{"text": "caf\xe9"}': "not UTF-8",
    b'\xff\xfe{\x00"\x00': "not UTF-8",
    b"{'text': 1}": "not JSON",
    b'{"text": "a"} {"text": "b"}': "not JSON",
    b'{"text": "a", "n": NaN}': "not JSON",
    b'{"text": "a", "n": -Infinity}': "not JSON",
    b'{"text": "a", "n": ' + b"9" * 5000 + b"}": "not JSON",
    b'{"text": "ab': "not JSON",
    b"\0": "not JSON",
    DEEP: "nested too deeply",
    b"[1]": "not an object",
    b'"text"': "not an object",
    b"null": "not an object",
    b"{}": "no such field",
    b'{"text": null}': "no such field",
    b'{"TEXT": "a"}': "no such field",
    b'{"text": 3}': "not a string",
    b'{"text": ["a"]}': "not a string",
    rb'{"text": "\ud800"}': "not Unicode",
    b'{"text": "' + b"x" * 1_049_000 + b'"}': "line too long",
}


def test_every_bad_record_is_named_by_file_and_line_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="dape_jax")
    lines, expected = [], []
    for i, (line, reason) in enumerate(BAD_LINES.items()):
        lines += [LINES[i], b"  \n", line + b"\n"]
        expected.append((str(tmp_path / "a.jsonl"), 3 * i + 3, reason))
    source = write(tmp_path / "a.jsonl", *lines)
    prepared = command.prepare(config(source, tmp_path / "out", max_length=100))
    found = rejected(tmp_path / "out")
    assert [(bad["file"], bad["line"], bad["reason"]) for bad in found] == expected
    assert all(len(bad["detail"]) <= 200 for bad in found)
    assert prepared.record.rejected == dict(Counter(BAD_LINES.values()))
    kept = [text for text in DOCUMENTS[: len(BAD_LINES)] if len(text.encode()) <= 100]
    assert sorted(texts(prepared.corpus)) == sorted(kept)
    assert prepared.record.left_out == {"too long": len(BAD_LINES) - len(kept)}
    shown = [message for message in caplog.messages if "a.jsonl, line" in message]
    assert 1 <= len(shown) < len(found)


def test_strict_stops_at_the_first(tmp_path: Path):
    write(tmp_path / "a.jsonl", *LINES)
    write(tmp_path / "b.jsonl", *LINES[:3], b"{}\n", b"[]\n")
    given = config(tmp_path / "*.jsonl", tmp_path / "out", strict=True)
    with pytest.raises(InputError, match=r"b\.jsonl, line 4: no such field: 'text'") as caught:
        command.prepare(given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError):
        load_corpus(DataConfig(str(tmp_path / "out.partial"), None, str(tmp_path / "cache"), 0.1, 0))
    assert command.prepare(dataclasses.replace(given, strict=False)).record.rejected == {
        "no such field": 1,
        "not an object": 1,
    }


def reasons(source: Path) -> list[tuple[int, str]]:
    output = source.parent / "out"
    write(source.parent / "good.jsonl", *LINES)
    command.prepare(config(f"{source},{source.parent}/good.jsonl", output))
    found = rejected(output)
    assert {bad["file"] for bad in found} <= {str(source)}
    return [(bad["line"], bad["reason"]) for bad in found]


def test_bad_rows_and_files_of_parquet(tmp_path: Path):
    invalid = pyarrow.array([b"caf\xe9", b"fine"] * 10).view(pyarrow.string())
    for name, content, expected in [
        ("nulls", parquet_file(text=["a", None] * 2), [(2, "no such field"), (4, "no such field")]),
        ("invalid", parquet_file(text=invalid), [(i, "not UTF-8") for i in range(1, 20, 2)]),
        ("binary", parquet_file(text=[b"a", b"\xff"]), [(2, "not UTF-8")]),
        ("missing", parquet_file(other=["a"]), [(0, "no such field")]),
        ("number", parquet_file(text=[1, 2]), [(0, "not a string")]),
        ("truncated", parquet_file(text=["a"])[:-9], [(0, "corrupt parquet")]),
        ("empty", b"", [(0, "corrupt parquet")]),
        ("torn", parquet_file(text=DOCUMENTS).replace(b"PAR1\x15", b"PAR1\xff"), [(0, "corrupt parquet")]),
    ]:
        (tmp_path / name).mkdir()
        assert reasons(write(tmp_path / name / "a.parquet", content)) == expected, name


def test_a_damaged_pair_is_one_bad_record(tmp_path: Path):
    write_pair(tmp_path / "pair", [[[1, 2]]] * 9)
    write(tmp_path / "pair.bin", b"\1")
    assert reasons(tmp_path / "pair.bin") == [(0, "damaged .bin or .idx")]


@quick
@given(st.sampled_from(["gz", "zst"]), st.data())
def test_what_comes_before_a_truncation_is_kept(compression: str, data: st.DataObject):
    whole = members(gzip.compress if compression == "gz" else zstandard.compress)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    with tempfile.TemporaryDirectory() as root:
        file = write(Path(root, f"a.jsonl.{compression}"), cut)
        found = everything([file], plain_selection())
    bad = [item for item in found if isinstance(item, BadRecord)]
    kept = [item.content.decode() for item in found if isinstance(item, Document)]
    assert kept == DOCUMENTS[: len(kept)]
    # A cut between two members loses what is behind it in silence, but for the line, or the letter, that it cuts.
    assert bad == found[len(kept) :]
    assert len(bad) <= 1
    # Of one byte nothing tells that a member of gzip, which has two to be known by, would begin there.
    unknown = {"corrupt archive"} if compression == "gz" and cut.endswith(b"\x1f") else set()
    assert {item.reason for item in bad} <= {"truncated archive", "not JSON", "not UTF-8"} | unknown
    assert all(item.line == len(kept) + 1 for item in bad)
    assert bad or len(kept) in (0, len(DOCUMENTS))
    if cut == whole[:-1]:
        assert [item.reason for item in bad] == ["truncated archive"]


# reading: whatever the cuts, and from wherever it goes on


def plain_selection(max_length: int = 2**24) -> Selection:
    return Selection("text", (), 1, max_length, 0.3)


def everything(files: list[Path], selection: Selection, start: Position | None = None) -> list:
    batches = read_batches(files, selection, start or Position())
    return [found for batch in batches for piece in batch.pieces for found in examine(piece, selection)]


def same(a: list, b: list) -> bool:
    def plain(item):
        return (item.file, item.line, bytes(memoryview(item.content))) if isinstance(item, Document) else item

    return list(map(plain, a)) == list(map(plain, b))


@contextlib.contextmanager
def sizes(**changes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(records, name, value)
        yield


@quick
@given(
    st.lists(
        st.sampled_from([*LINES[:6], b"\n", b"{}\n", b"x" * 300 + b"\n", b"y" * 90, b'{"text": "z"}']), max_size=20
    ),
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from(["", ".gz", ".zst"]),
)
def test_lines_do_not_depend_on_how_they_are_cut(lines: list[bytes], read: int, piece: int, compression: str):
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression]
    selection = plain_selection(60)
    with tempfile.TemporaryDirectory() as root, sizes(_MAX_METADATA_BYTES=20):
        file = write(Path(root, f"a.jsonl{compression}"), compress(b"".join(lines)))
        whole = everything([file], selection)
        with sizes(_READ_BYTES=read, _PIECE_BYTES=piece, _ZSTD_STEP_BYTES=min(read, 7)):
            assert same(everything([file], selection), whole)
            for batch in read_batches([file], selection, Position()):
                held = sum(len(piece.content) for piece in batch.pieces if isinstance(piece, records.Lines))
                assert held <= 2 * max(piece, selection.max_line) + 2 * read
        by_line = [line for line in b"".join(lines).split(b"\n") if line]
        too_long = sum(len(line) > selection.max_line for line in by_line)
    assert len(whole) == len(by_line)
    assert Counter(item.reason for item in whole if isinstance(item, BadRecord))["line too long"] == too_long


def test_reading_goes_on_from_any_batch(tmp_path: Path):
    for kind in KINDS:
        write_input(kind, tmp_path / kind)
    write_pair(tmp_path / "pair", [[[*text.encode(), 256]] for text in DOCUMENTS])
    write(tmp_path / "bad.jsonl", *(line + b"\n" + LINES[0] for line in BAD_LINES))
    write(tmp_path / "cut.jsonl.zst", members(zstandard.compress)[:-200])
    write(tmp_path / "cut.parquet", parquet_file(text=DOCUMENTS)[:-3])
    files = records.input_files(corpus.find_files(str(tmp_path)))
    selection = plain_selection()
    whole = everything(files, selection)
    assert sum(isinstance(item, Document) for item in whole) >= (len(KINDS) + 1) * len(DOCUMENTS)
    with sizes(_PIECE_BYTES=4000):
        batches = list(read_batches(files, selection, Position()))
        assert len(batches) > 20
        done = 0
        for batch in batches:
            done += sum(1 for piece in batch.pieces for _ in examine(piece, selection))
            assert same(everything(files, selection, batch.after), whole[done:])
    assert [batch.num_input_bytes for batch in batches] == sorted(batch.num_input_bytes for batch in batches)
    assert batches[-1].num_input_bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("kind", ["empty", "null", "shared", "ids"])
@pytest.mark.parametrize("field", ["text", "a.text"])
def test_a_batch_has_a_bound_whatever_is_in_it(tmp_path: Path, kind: str, field: str):
    """Documents and rows that hold nothing, and rows that share one large value of a dictionary."""
    large, indices = pyarrow.array(["x" * 5000]), pyarrow.array([0] * 4000, pyarrow.int32())
    columns = {
        "empty": pyarrow.array([""] * 4000),
        "null": pyarrow.nulls(4000, pyarrow.string()),
        "shared": pyarrow.DictionaryArray.from_arrays(indices, large),
    }
    file = tmp_path / "file.parquet"
    if kind == "ids":
        file = tmp_path / "file.bin"
        write_pair(tmp_path / "file", [[]] * 4000 + [[[1]]])
    elif "." in field:
        nested = pyarrow.StructArray.from_arrays([columns[kind].cast(pyarrow.string())] * 2, ["text", "b"])
        parquet.write_table(pyarrow.table({"a": nested}), file)
    else:
        parquet.write_table(pyarrow.table({"text": columns[kind]}), file)
    selection = dataclasses.replace(plain_selection(), text_field=field, where=((field, ("x",)),))
    with sizes(_PIECE_BYTES=2**16):
        batches = [batch.pieces for batch in read_batches([file], selection, Position())]
    assert len(batches) > 3
    for pieces in batches:
        rows = [row for piece in pieces if isinstance(piece, records.Rows) for row in piece.rows]
        assert sum(len(text or b"") for text, _ in rows) <= 2**17
        assert len(rows) + sum(len(piece.documents) for piece in pieces if isinstance(piece, records.Ids)) <= 2048


# stopped and started


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """Good and bad records in several kinds of files."""
    root = tmp_path_factory.mktemp("mixed")
    write(root / "a.jsonl", *(line for pair in zip(LINES, [b"{}\n", b"x\n"] * 20, strict=True) for line in pair))
    write(root / "b.jsonl.zst", members(zstandard.compress)[:-50])
    write(root / "c.parquet", parquet_file(text=[text.upper() for text in DOCUMENTS]))
    for i in range(20):
        write(root / f"d{i}.txt", f"text {i} ".encode() * i)
    return root


def test_the_number_of_workers_decides_nothing(tmp_path: Path, mixed: Path):
    with sizes(_PIECE_BYTES=500):
        one = command.prepare(config(mixed, tmp_path / "one"))
        three = command.prepare(config(mixed, tmp_path / "three", workers=3))
    assert three.corpus.digest == one.corpus.digest
    assert three.record == one.record
    assert rejected(tmp_path / "three") == rejected(tmp_path / "one")
    assert one.usage.worker_peak_bytes == 0 < three.usage.worker_peak_bytes


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Hundreds of corpora would each tell what they leave out."""
    logger = logging.getLogger("dape_jax")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.sampled_from([0.0, 1e9]))
def test_an_interrupted_build_goes_on_to_the_same_result(mixed: Path, stops: list[int], record_seconds: float):
    with tempfile.TemporaryDirectory() as root, sizes(_PIECE_BYTES=900), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "RECORD_SECONDS", record_seconds)
        whole = command.prepare(config(mixed, f"{root}/whole"))
        given = config(mixed, f"{root}/out")
        tokenize = build.tokenize
        for stop in stops:
            calls = iter(range(stop))

            def stopped(*args, calls=calls):
                if next(calls, None) is None:
                    raise KeyboardInterrupt
                return tokenize(*args)

            with pytest.MonkeyPatch.context() as during, contextlib.suppress(KeyboardInterrupt):
                during.setattr(build, "tokenize", stopped)
                command.prepare(given)
            partial = Path(root, "out.partial")
            if partial.exists():  # what a kill may leave behind its record
                for file in partial.glob("*/*"):
                    write(file, file.read_bytes(), b"torn")
        again = command.prepare(given)
        assert again.corpus.digest == whole.corpus.digest
        assert again.record == whole.record
        assert rejected(Path(root, "out")) == rejected(Path(root, "whole"))


RUN = (
    "import sys\n"
    "from dape_jax import command_line\n"
    "from dape_jax.data.prepare import build, command, records\n"
    "build.RECORD_SECONDS, records._PIECE_BYTES = 0.02, 20_000\n"
    "if __name__ == '__main__':\n"
    "    command.define_flags()\n"
    "    command_line.run(command.main, 'interrupted')\n"
)


# Five seconds of reading, so that a signal comes before its end on the busiest machine.
SLOW_RUN = RUN.replace(
    "if __name__",
    "import time\n"
    "read = build.read_batches\n"
    "build.read_batches = lambda *given: (time.sleep(0.01) or batch for batch in read(*given))\n"
    "if __name__",
    1,
)


def start(root: Path, source: Path, output: Path, *more: str, script: str = RUN) -> subprocess.Popen:
    arguments = [f"--input={source}", f"--output={output}", "--tokenizer=bytes", "--validation_fraction=0.3", *more]
    program = write(root / "run.py", script.encode())  # a file, for workers to import
    return subprocess.Popen(
        [sys.executable, str(program), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def write_many(root: Path) -> Path:
    draw = random.Random(0)
    content = b"".join(draw.choice([*LINES, b"{}\n"]) for _ in range(60_000))
    cuts = [*range(0, len(content), 300_000), len(content)]
    frames = (zstandard.compress(content[a:b]) for a, b in itertools.pairwise(cuts))
    return write(root / "many.jsonl.zst", *frames)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are looked up in /proc")
def test_killed_at_any_moment_it_goes_on_to_the_same_digest(tmp_path: Path):
    source = write_many(tmp_path)
    begun = time.monotonic()
    whole = start(tmp_path, source, tmp_path / "whole", "--workers=2")
    assert whole.wait() == 0, whole.stderr.read()
    seconds = time.monotonic() - begun
    whole.communicate()
    draw, kills, positions = random.Random(1), 0, []
    for _ in range(6):
        running = start(tmp_path, source, tmp_path / "out", "--workers=2")
        time.sleep(draw.uniform(0.4, 0.9) * seconds)
        workers = children(running.pid)
        running.kill()
        running.communicate()
        kills += running.returncode == -signal.SIGKILL
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            assert time.monotonic() < deadline, "workers outlive the process that they work for"
            time.sleep(0.1)
        if (tmp_path / "out").exists():
            break
        with pytest.raises(InputError):
            load_corpus(DataConfig(str(tmp_path / "out.partial"), None, str(tmp_path / "cache"), 0.1, 0))
        position = build.read_record(tmp_path / "out.partial").position
        positions.append((position.file, position.offset))
    assert kills > 1
    assert positions == sorted(positions)
    last = start(tmp_path, source, tmp_path / "out", "--workers=1")
    output, errors = last.communicate()
    assert last.returncode == 0, errors
    assert open_corpus(tmp_path / "out").digest == open_corpus(tmp_path / "whole").digest
    assert rejected(tmp_path / "out") == rejected(tmp_path / "whole")
    assert open_corpus(tmp_path / "out").digest in output


@pytest.mark.slow
def test_ctrl_c_and_a_dead_worker_end_it_with_one_line(tmp_path: Path):
    source = write_many(tmp_path)
    for victim, status, said in [("group", 130, "interrupted"), ("worker", 2, "error: workers = 2: one of them died")]:
        arguments = [f"--input={source}", f"--output={tmp_path}/out", "--tokenizer=bytes", "--workers=2"]
        program = write(tmp_path / "run.py", SLOW_RUN.encode())
        running = subprocess.Popen(
            [sys.executable, str(program), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        while not (tmp_path / "out.partial/record.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if victim == "group":
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        else:
            os.kill(max(children(running.pid)), signal.SIGKILL)
        _, errors = running.communicate(timeout=60)
        lines = [line for line in errors.splitlines() if "left out:" not in line and "MB/s" not in line]
        assert (running.returncode, len(lines)) == (status, 1), errors
        assert lines[0].startswith(said)
        assert not (tmp_path / "out").exists()
        os.unlink(tmp_path / "out.partial/record.json")


class Dying(Bytes):
    def encode(self, text: bytes) -> np.ndarray:
        os._exit(9)


def test_a_dead_worker_is_one_line(tmp_path: Path):
    (tmp_path / "out").mkdir()
    file = write(tmp_path / "a.jsonl", *LINES)
    with pytest.raises(InputError, match="workers = 2: one of them died"):
        build.build(tmp_path / "out", [file], plain_selection(), Dying(), workers=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_length": 99}, "max_length: saved 16777216, now 99"),
        ({"text_field": "other"}, "text_field: saved 'text', now 'other'"),
        ({"where": ("meta.ok=true",)}, "where: saved "),
        ({"validation_fraction": 0.5}, "validation_fraction: saved 0.3, now 0.5"),
        ({"tokenizer": None, "train_bpe": 300}, "tokenizer: saved 'bytes', now"),
        ("add", "input./.*/new.jsonl: saved"),
        ("touch", "input./.*/a.jsonl: saved"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_another_recipe_is_refused_and_named(tmp_path: Path, changes: dict | str, said: str, complete: bool):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.jsonl", *LINES, b"{}\n")
    given = config(tmp_path / "in", tmp_path / "out", strict=not complete)
    with contextlib.nullcontext() if complete else pytest.raises(InputError):
        command.prepare(given)
    if changes == "add":
        write(tmp_path / "in/new.jsonl", *LINES)
    elif changes == "touch":
        os.utime(tmp_path / "in/a.jsonl", ns=(1, 1))
    directory = tmp_path / ("out" if complete else "out.partial")
    before = {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    with pytest.raises(InputError, match=rf"another recipe.*{said}"):
        command.prepare(dataclasses.replace(given, **(changes if isinstance(changes, dict) else {})))
    assert {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()} == before


def test_the_same_recipe_again_does_nothing(tmp_path: Path):
    given = config(write_input("jsonl", tmp_path / "in"), tmp_path / "out")
    first = command.prepare(given)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")}
    again = command.prepare(dataclasses.replace(given, workers=3, strict=True))
    assert again.usage is None
    assert (again.corpus.digest, again.record) == (first.corpus.digest, first.record)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")} == before
    assert "was complete" in command.summary(again)


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_what_others_made_is_not_touched(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    write(tmp_path / name / "thesis.tex", b"text")
    with pytest.raises(InputError, match=f"{name}"):
        command.prepare(config(write_input("jsonl", tmp_path / "in"), tmp_path / "out"))
    assert (tmp_path / name / "thesis.tex").read_bytes() == b"text"


def test_a_second_process_is_refused(tmp_path: Path):
    given = config(write_input("jsonl", tmp_path / "in"), tmp_path / "out")
    (tmp_path / "out.partial").mkdir()
    with open(tmp_path / "out.partial/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"out\.partial': another process is at work in it"):
            command.prepare(given)
    assert command.prepare(given).usage


def test_a_kill_between_two_steps_leaves_nothing_behind(tmp_path: Path, monkeypatch):
    given = config(write_input("jsonl", tmp_path / "in"), tmp_path / "out", tokenizer=None, train_bpe=300)
    whole = command.prepare(dataclasses.replace(given, output=str(tmp_path / "whole")))
    directory = tmp_path / "out.partial"
    (directory / "train").mkdir(parents=True)  # killed while tokenizers were saved
    for place in (directory, directory / "train"):
        write(place / ".tokenizer.json.0123", b"{")
    build.write_json(directory / "recipe.json", build.read_json(tmp_path / "whole/recipe.json"))
    assert command.prepare(given).corpus.digest == whole.corpus.digest
    write(tmp_path / "out/lock")  # killed when it had just renamed the directory
    assert command.prepare(given).usage is None
    names = [
        sorted(file.relative_to(root) for file in root.rglob("*")) for root in (tmp_path / "out", tmp_path / "whole")
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"position": {"file": "0", "offset": 0, "line": 0}},
        {"position": {"file": 0, "offset": -5, "line": 0}},
        {"num_documents": None},
        {"num_tokens": {"train": 1}},
        {"num_tokens": {"train": 1.5, "validation": 1}},
        {"left_out": {"filtered": "many"}},
        {"rejected": []},
        {"rejected_bytes": -1},
        {"more": 0},
    ],
)
def test_a_damaged_record_is_one_line(tmp_path: Path, changes: dict, complete: bool):
    given = config(write_input("jsonl", tmp_path / "in"), tmp_path / "out")
    command.prepare(given)
    directory = tmp_path / "out"
    if not complete:
        directory = directory.rename(tmp_path / "out.partial")
    build.write_json(directory / "record.json", build.read_json(directory / "record.json") | changes)
    with pytest.raises(InputError, match=r"record\.json: is damaged; delete"):
        command.prepare(given)


# tokenizers


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is looked up in /proc")
def test_training_a_tokenizer_takes_no_more_memory_for_a_long_document():
    script = (
        "from dape_jax.data.prepare.build import peak_bytes\n"
        "from dape_jax.data.tokenizers import train_bpe\n"
        "text = 'the rows are queries ' * 200_000\n"
        "before = peak_bytes()\n"
        "train_bpe([text], 300)\n"
        "print(peak_bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 * 2**20


def test_a_trained_tokenizer_is_complete_and_not_trained_again(tmp_path: Path, monkeypatch):
    given = config(write_input("jsonl", tmp_path / "in"), tmp_path / "out", tokenizer=None, train_bpe=300)
    with monkeypatch.context() as patch:
        patch.setattr(build, "tokenize", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            command.prepare(given)
    monkeypatch.setattr(command, "train_bpe", None)
    made = command.prepare(given).corpus
    assert sorted(texts(made)) == sorted(DOCUMENTS)
    assert made.train.tokenizer.vocab_size == 300
    assert made.train.num_tokens + made.validation.num_tokens < sum(len(text.encode()) for text in DOCUMENTS)
    file = str(tmp_path / "out/tokenizer.json")
    assert read_tokenizer(file).name == made.train.sidecar.tokenizer
    named = command.prepare(config(tmp_path / "in/*", tmp_path / "named", tokenizer=file))
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


def test_a_tokenizer_is_trained_on_the_training_side_alone(tmp_path: Path):
    def trained(output: str, documents: list[str]) -> str:
        source = write(
            tmp_path / f"{output}.jsonl", *(json.dumps({"text": text}).encode() + b"\n" for text in documents)
        )
        made = command.prepare(config(source, tmp_path / output, tokenizer=None, train_bpe=290)).corpus
        return made.train.sidecar.tokenizer

    validation = [f"zebra {i} " * 50 for i in range(40)]
    validation = [text for text in validation if corpus.split_of(text.encode(), 0.3) == "validation"]
    assert trained("one", DOCUMENTS) == trained("other", [*validation, *DOCUMENTS])


def test_raw_text_needs_a_tokenizer(tmp_path: Path):
    with pytest.raises(InputError, match=r"data\.tokenizer = None: raw text .*'bytes' or a tokenizer\.json"):
        load_corpus(DataConfig(write_input("text", tmp_path / "in"), None, str(tmp_path / "cache"), 0.3, 0))


def test_text_that_a_tokenizer_cannot_take_is_bad(tmp_path: Path):
    first = command.prepare(config(write_input("text", tmp_path / "in"), tmp_path / "a", tokenizer=None, train_bpe=257))
    write(tmp_path / "in/zz.txt", b"caf\xe9")
    name = str(tmp_path / "a/tokenizer.json")
    prepared = command.prepare(config(tmp_path / "in", tmp_path / "b", tokenizer=name))
    assert prepared.corpus.digest == first.corpus.digest
    assert [(bad["line"], bad["reason"]) for bad in rejected(tmp_path / "b")] == [(1, "cannot be encoded")]


# what the user is told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input": ()}, "input = ''"),
        ({"input": ("nowhere",)}, "input = 'nowhere': no files there"),
        ({"output": ""}, "output = ''"),
        ({"tokenizer": None}, r"tokenizer, train_bpe = \(None, None\): one of the two"),
        ({"train_bpe": 300}, r"tokenizer, train_bpe = \('bytes', 300\)"),
        ({"tokenizer": "gpt2"}, "tokenizer = 'gpt2'"),
        ({"tokenizer": None, "train_bpe": 3}, "train_bpe = 3: 257"),
        ({"train_bpe_bytes": 0}, "train_bpe_bytes = 0"),
        ({"text_field": ""}, "text_field = ''"),
        ({"where": ("meta",)}, "where = 'meta': field=value"),
        ({"where": ("meta.ok=no",)}, "no documents there: 40 filtered"),
        ({"text_field": "words"}, r"no documents there: 40 bad \(no such field\)"),
        ({"min_length": 0}, "min_length = 0"),
        ({"min_length": 9, "max_length": 8}, "max_length = 8"),
        ({"max_length": 2**40}, "max_length = "),
        ({"validation_fraction": 0.0}, "validation_fraction = 0.0"),
        (
            {"validation_fraction": 1e-9},
            "validation_fraction = 1e-09: leaves no validation documents of the 40 in input = ",
        ),
        ({"validation_fraction": float("nan")}, "validation_fraction = nan"),
        ({"workers": 0}, "workers = 0"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, changes: dict, said: str):
    source = write_input("jsonl", tmp_path / "in")
    with pytest.raises(InputError, match=said) as caught:
        command.prepare(config(source, tmp_path / "out", **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    # What is wrong in itself leaves nothing that would be in the way of the right command.
    assert (tmp_path / "out.partial").exists() == ("documents" in said)


def test_ids_train_no_tokenizer(tmp_path: Path):
    write_pair(tmp_path / "pair", [[[1, 2]]])
    with pytest.raises(InputError, match=r"train_bpe = 300: \.bin files hold ids"):
        command.prepare(config(tmp_path / "pair.bin", tmp_path / "out", tokenizer=None, train_bpe=300))


def test_files_and_directories_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch):
    source = write(tmp_path / "a.jsonl", *LINES)
    with pytest.raises(InputError, match=r"output = .*cannot be written to"):
        command.prepare(config(source, source / "out"))

    def unreadable(*_):
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr(records, "_read_lines", unreadable)
    with pytest.raises(InputError, match=r"a\.jsonl: cannot be read: .*Permission denied"):
        command.prepare(config(source, tmp_path / "out"))


def test_the_name_of_a_file_cannot_drive_the_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="dape_jax")
    source = write(tmp_path / "a\x1b[2J\n.jsonl", *LINES, b"{}\n")
    command.prepare(config(source, tmp_path / "out"))
    assert "\\x1b[2J\\n.jsonl, line 41: no such field" in caplog.text
    assert "\x1b" not in caplog.text
    assert rejected(tmp_path / "out")[0]["file"] == str(source)
    with pytest.raises(InputError, match=r"a\\x1b\[2J\\n\.jsonl, line 41"):
        command.prepare(config(source, tmp_path / "strict", strict=True))


def test_the_command_line(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", *LINES, b"{}\n")
    command = [sys.executable, "-m", "dape_jax.data.prepare", f"--input={source}", f"--output={tmp_path}/out"]
    command += [
        "--tokenizer=bytes",
        "--workers=2",
        "--validation_fraction=0.3",
        "--where=meta.pile_set_name=ArXiv|Books3",
    ]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    made = open_corpus(tmp_path / "out")
    for said in (
        made.digest,
        "1 filtered",
        "MB/s of text",
        "MiB in the largest worker",
        f"{made.train.num_tokens:,} train",
    ):
        assert said in done.stdout
    refused = subprocess.run([*command, "--strict", "--max_length=9"], capture_output=True, text=True, cwd=root)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "max_length: saved 16777216, now 9" in refused.stderr


# fuzzing

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(["text", "meta", "a"]), values),
    max_leaves=5,
)
malformed_lines = st.lists(
    st.one_of(
        json_values.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(st.just("text"), json_values, min_size=1).map(lambda value: json.dumps(value).encode()),
        st.binary(max_size=20),
        st.sampled_from([*BAD_LINES, *LINES[:5]][:-6]),
    ),
    max_size=5,
).map(b"\n".join)


@st.composite
def mutated(draw, content: bytes) -> bytes:
    """A few bytes changed, cut out, doubled or put in; mostly what was whole is no more."""
    data = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "drop", "double", "insert", "number"])):
            case "flip" if data:
                data[at] ^= draw(st.integers(1, 255))
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 40))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=10))
            case _:
                number = draw(st.sampled_from([0, 1, 2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1]))
                data[at : at + 8] = number.to_bytes(8, "little")
    return bytes(data)


def pair(documents: list[str]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as root:
        write_pair(Path(root, "a"), [[[*text.encode(), 256]] for text in documents])
        return {f".{name}": Path(root, f"a.{name}").read_bytes() for name in ("bin", "idx")}


VALID = {
    ".jsonl": b"".join(LINES[:8]),
    ".jsonl.gz": gzip.compress(b"".join(LINES[:4])) + gzip.compress(b"".join(LINES[4:8])),
    ".jsonl.zst": zstandard.compress(b"".join(LINES[:4])) + zstandard.compress(b"".join(LINES[4:8])),
    ".parquet": parquet_file(text=DOCUMENTS[:12], meta=[r["meta"] for r in RECORDS[:12]]),
    ".txt": DOCUMENTS[5].encode(),
    **pair(DOCUMENTS[:8]),
}


@st.composite
def malformed_files(draw) -> dict[str, bytes]:
    """Files by name: one or two kinds, whole or not, and sometimes a good one beside them."""
    files = {}
    for i in range(draw(st.integers(1, 2))):
        suffix = draw(st.sampled_from(sorted(VALID)))
        if suffix in (".bin", ".idx"):
            files |= {f"{i}.bin": VALID[".bin"], f"{i}.idx": VALID[".idx"]}
        if draw(st.integers(0, 5)) == 0:
            content = draw(st.binary(max_size=60))
        elif suffix == ".jsonl" and draw(st.booleans()):
            content = draw(malformed_lines)
        else:
            content = draw(mutated(VALID[suffix]))
        files[f"{i}{suffix}"] = content
    if draw(st.booleans()):
        files["z.jsonl"] = b"".join(LINES[:10])
    return files


def check_prepare(files: dict[str, bytes], changes: dict) -> None:
    with tempfile.TemporaryDirectory() as root:
        source, output = Path(root, "in"), Path(root, "out")
        source.mkdir()
        for name, content in files.items():
            write(source / name, content)
        try:
            made = command.prepare(config(source, output, validation_fraction=0.5, **changes)).corpus
        except InputError as error:
            assert str(error).isprintable(), "one line"  # noqa: PT017
            assert not output.exists()
            for half in (output, output.with_name("out.partial")):
                with pytest.raises(InputError):
                    load_corpus(DataConfig(str(half), None, f"{root}/cache", 0.5, 0))
            return
        for split in SPLITS:
            getattr(made, split).verify()
        assert load_corpus(DataConfig(str(output), None, f"{root}/cache", 0.5, 0)).digest == made.digest


options = st.fixed_dictionaries(
    {},
    optional={
        "strict": st.booleans(),
        "where": st.sampled_from([("meta.pile_set_name=ArXiv",), ("text=a",)]),
        "text_field": st.sampled_from(["meta", "meta.pile_set_name", "a.b.c"]),
        "max_length": st.integers(1, 300),
    },
)


@settings(max_examples=250, deadline=None)
@given(malformed_files(), options)
def test_malformed_input_ends_in_a_corpus_or_one_line(files: dict[str, bytes], changes: dict):
    check_prepare(files, changes)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(malformed_files(), options)
def test_more_malformed_input_ends_in_a_corpus_or_one_line(files: dict[str, bytes], changes: dict):
    check_prepare(files, changes)


@pytest.fixture(scope="module")
def small_store(tmp_path_factory) -> dict[str, bytes]:
    """The files of a complete corpus."""
    root = tmp_path_factory.mktemp("small")
    source = write(root / "a.jsonl", *LINES[:12])
    command.prepare(config(source, root / "out", tokenizer=None, train_bpe=260))
    return {
        file.relative_to(root / "out").as_posix(): file.read_bytes()
        for file in (root / "out").rglob("*")
        if file.is_file()
    }


def check_store(files: dict[str, bytes], data: st.DataObject) -> None:
    of_stores = sorted(name for name in files if "/" in name)
    changed = dict(files)
    for name in data.draw(st.lists(st.sampled_from(of_stores), min_size=1, max_size=2, unique=True)):
        changed[name] = data.draw(st.one_of(st.just(b""), mutated(files[name]), st.binary(max_size=50)))
        if data.draw(st.integers(0, 9)) == 0:
            del changed[name]
    with tempfile.TemporaryDirectory() as root:
        for name, content in changed.items():
            Path(root, name).parent.mkdir(exist_ok=True)
            write(Path(root, name), content)
        try:
            loaded = load_corpus(DataConfig(root, None, f"{root}/cache", 0.5, 0))
            for store in (loaded.train, loaded.validation):
                for i in range(store.num_documents):
                    store.tokenizer.decode(store.document(i))
                store.verify()
        except InputError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return
        whole = {name: content for name, content in changed.items() if name.endswith(("tokens.bin",))}
        assert whole == {name: files[name] for name in whole}, "changed, and verified as whole"


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_malformed_store_is_whole_or_refused(small_store: dict[str, bytes], data: st.DataObject):
    check_store(small_store, data)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_more_malformed_stores_are_whole_or_refused(small_store: dict[str, bytes], data: st.DataObject):
    check_store(small_store, data)
