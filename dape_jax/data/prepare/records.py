"""Input files -> documents: open files, find their records, and classify these as documents, skipped or bad.

In: an `InputFile` of `corpus`. Out: its documents, from `read_documents`. Next: `tokenizers` and `build`.

    file name                                 content
    .jsonl .ndjson, and compressed .json      one JSON object per line
    .parquet                                  one record per row
    .bin and .idx                             token ids, as Megatron and GPT-NeoX write them
    any other                                 one document; skipped if binary (a NUL byte near its start)

.gz .bz2 .xz and .zst are decompressed (`paper.tex.zst`), also with several members or frames. Files are untrusted: a
record that cannot be read becomes a `BadRecord` with file, line and reason, and reading continues after it. Memory is
bounded by `Selection.max_length`.
"""

import bz2
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import fsspec
import numpy as np
import zstandard
from jaxtyping import Integer

from dape_jax.data.corpus import InputFile, is_remote
from dape_jax.data.prepare.megatron import open_indexed
from dape_jax.errors import InputError, require_package

Skipped = Literal["filtered", "too short", "too long", "binary file"]
Content = bytes | Integer[np.ndarray, "_"]  # text, or token ids of a .bin file

_READ_BYTES = 2**20
_ZSTD_STEP_BYTES = 2**10  # input decompressed at a time: a KiB of Zstandard can be 32 MiB of zeros
_BINARY_PROBE_BYTES = 8192
_MAX_ESCAPES = 3  # bytes of JSON per byte of UTF-8: "\u00e9" has six for two
_MAX_METADATA_BYTES = 2**20
_MAX_DETAIL_CHARS = 200
_STRINGS = ("string", "large_string", "string_view", "binary", "large_binary")  # types of a column of text


@dataclasses.dataclass(frozen=True)
class Selection:
    """Records that become documents, and the share of them for validation."""

    text_field: str  # field with the text of a record; a dot descends into an object
    where: tuple[tuple[str, tuple[str, ...]], ...]  # fields and their accepted values, numbers and booleans as in JSON
    min_length: int  # minimum length of a document in bytes of UTF-8, or in ids for a .bin file
    max_length: int  # maximum length, in the same units; it bounds the memory
    validation_fraction: float

    @property
    def max_line(self) -> int:
        """Maximum bytes of a line of JSON. A longer line is a bad record, and is never in memory as a whole."""
        return self.max_length * _MAX_ESCAPES + _MAX_METADATA_BYTES

    def skips_length(self, length: int) -> Skipped | None:
        """Return why a document of this length is skipped, or None if it is not."""
        return "too short" if length < self.min_length else "too long" if length > self.max_length else None

    def accepts(self, value_of: Callable[[str], Any]) -> bool:
        """Return whether a record, given as a function from field to value, matches `where`."""
        return all(_spelled(value_of(field)) in accepted for field, accepted in self.where)


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """Record that cannot be read, or position at which a file is damaged."""

    file: str
    line: int  # counted from 1: a line, a row of parquet or a document of a .bin file; 0 for the whole file
    reason: str  # category, for counts
    detail: str  # shortened to one line

    def __post_init__(self):
        object.__setattr__(self, "detail", " ".join(self.detail.split())[:_MAX_DETAIL_CHARS])


@dataclasses.dataclass(frozen=True)
class Document:
    """One document."""

    file: str
    line: int  # as in `BadRecord`
    content: Content


class _BadRecordError(Exception):
    """Error with reason and detail of a `BadRecord`; also with its line, if the rest of the file is unreadable."""


def holds_ids(path: str) -> bool:
    """Return whether a file contains token ids instead of text."""
    return path.lower().endswith((".bin", ".idx"))


def read_documents(
    file: InputFile, selection: Selection, advance: Callable[[int], object]
) -> Iterator[Document | BadRecord | Skipped]:
    """Yield every record of a file, in order: a document, the reason why it is skipped, or a bad record.

    `advance` is called from time to time with the number of input bytes read so far.

    Raises:
        InputError: the file cannot be read. (A file with damaged content gives a `BadRecord`.)
    """
    name, suffix = os.path.splitext(file.path.lower())
    is_lines = suffix in (".jsonl", ".ndjson") or (
        suffix in _DECOMPRESS and name.endswith((".jsonl", ".ndjson", ".json"))
    )
    try:
        with contextlib.ExitStack() as stack:
            records: Iterator[tuple[int, Any]]  # line numbers, and arguments of `content_of`
            content_of: Callable[[Any, Selection], Content | Skipped]
            if holds_ids(file.path):
                records, content_of = _read_ids(file), _whole
            else:
                opened: Any = stack.enter_context(fsspec.open(file.path, "rb", compression=None))
                content = stack.enter_context(_DECOMPRESS.get(suffix, _buffered)(opened))
                if is_lines:
                    records = _read_lines(content, selection.max_line, lambda: advance(opened.tell()))
                    content_of = _text_of_line
                elif suffix == ".parquet":
                    require_package("pyarrow", "parquet", "input", file.path)
                    records, content_of = _read_rows(opened, file, selection, advance), _text_of_row
                else:
                    records, content_of = _read_text(content, selection.max_length), _whole
            for line, record in records:
                try:
                    found = content_of(record, selection)
                except _BadRecordError as error:
                    yield BadRecord(file.path, line, *error.args)
                else:
                    yield found if isinstance(found, str) else Document(file.path, line, found)
    except _BadRecordError as error:
        reason, detail, line = error.args
        yield BadRecord(file.path, line, reason, detail)
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or is_remote(file.path):  # file systems define their own exceptions
            text = " ".join(str(error).split())
            raise InputError(f"{file.path}: cannot be read: {text}") from error
        raise


# Decompression.


class _ZstdReader(io.RawIOBase):
    """Decompress Zstandard, frame by frame, in bounded memory.

    The library's readers stop silently at a truncated last frame; this one raises `EOFError`.
    """

    def __init__(self, compressed: Any):
        self._blocks, self._block = _zstd_blocks(compressed), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._block = self._block or next(self._blocks, b"")
        size = min(len(buffer), len(self._block))
        buffer[:size], self._block = self._block[:size], self._block[size:]
        return size


def _zstd_blocks(compressed: Any) -> Iterator[memoryview]:
    frame = None
    while data := compressed.read(_ZSTD_STEP_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if block := frame.decompress(data):
                yield memoryview(block)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("ends within a Zstandard frame")


def _buffered(raw: Any) -> io.BufferedReader:
    return io.BufferedReader(raw, _READ_BYTES)


_DECOMPRESS: dict[str, Callable[[Any], io.BufferedIOBase]] = {
    ".gz": lambda compressed: gzip.GzipFile(fileobj=compressed),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda compressed: _buffered(_ZstdReader(compressed)),
}


@contextlib.contextmanager
def _damage(line: int) -> Iterator[None]:
    """Raise `_BadRecordError` for an error in the block that means that compressed content is damaged."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # an error of the disk or the network, not of the content
            raise
        raise _BadRecordError("corrupt archive", str(error), line) from error
    except EOFError as error:
        raise _BadRecordError("truncated archive", str(error), line) from error
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise _BadRecordError("corrupt archive", str(error), line) from error


# Whole documents: a text file, or the documents of a .bin file.


def _read_text(content: io.BufferedIOBase, max_length: int) -> Iterator[tuple[int, bytes | Skipped]]:
    with _damage(line=0):
        text = content.read(_BINARY_PROBE_BYTES)
        is_binary = b"\0" in text
        if not is_binary:
            text += content.read(max(0, max_length + 1 - len(text)))
    yield 1, "binary file" if is_binary else "too long" if len(text) > max_length else text


def _read_ids(file: InputFile) -> Iterator[tuple[int, Integer[np.ndarray, "_"]]]:
    if is_remote(file.path):
        raise InputError(f"{file.path}: token ids are mapped into memory; copy .bin and .idx to a local disk")
    try:
        dataset = open_indexed(Path(file.path))
    except InputError as error:
        raise _BadRecordError("damaged .bin or .idx", str(error), 0) from error
    for index in range(dataset.num_documents):
        yield index + 1, dataset.document(index)


def _whole(content: Content | Skipped, selection: Selection) -> Content | Skipped:
    if isinstance(content, str):
        return content
    return "filtered" if selection.where else content  # it has no fields, so none match


# Lines of JSON.


def _read_lines(
    content: io.BufferedIOBase, max_line: int, advance: Callable[[], object]
) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank, with None for a line that is too long."""
    for number in itertools.count(1):
        with _damage(number):
            line = rest = content.readline(max_line + 1)
            is_too_long = len(line) > max_line and not line.endswith(b"\n")
            while is_too_long and rest and not rest.endswith(b"\n"):
                rest = content.readline(_READ_BYTES)
        if not line:
            return
        advance()
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if is_too_long or not line.isspace():
            yield number, None if is_too_long else line


def _text_of_line(line: bytes | None, selection: Selection) -> bytes | Skipped:
    if line is None:
        raise _BadRecordError("line too long", f"more than {selection.max_line} bytes")
    try:
        record = _JSON.decode(line.decode())
    except UnicodeDecodeError as error:
        raise _BadRecordError("not UTF-8", str(error)) from error
    except ValueError as error:
        raise _BadRecordError("not JSON", str(error)) from error
    except RecursionError as error:
        raise _BadRecordError("nested too deeply", str(error)) from error
    if type(record) is not dict:
        raise _BadRecordError("not an object", type(record).__name__)
    if not selection.accepts(lambda field: _lookup(record, field)):
        return "filtered"
    text = _lookup(record, selection.text_field)
    if text is None:
        raise _BadRecordError("no such field", f"{selection.text_field!r}, or it is null")
    if type(text) is not str:
        raise _BadRecordError("not a string", f"{selection.text_field!r} is of type {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _BadRecordError("not Unicode", str(error)) from error  # half a surrogate pair is JSON, but not Unicode


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def _lookup(record: Any, field: str) -> Any:
    """Return the value of a dotted field, or None."""
    for name in field.split("."):
        record = record.get(name) if type(record) is dict else None
    return record


def _spelled(value: Any) -> str | None:
    """Return a value in the notation of `where`, or None for an array or an object."""
    if isinstance(value, bytes):  # from parquet
        return value.decode("utf-8", "replace")
    return json.dumps(value) if isinstance(value, bool | int | float) else value if isinstance(value, str) else None


# Rows of parquet.


def _read_rows(
    opened: Any, file: InputFile, selection: Selection, advance: Callable[[int], object]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the fields of `selection` of each row, strings as bytes; one row at a time, to bound the memory."""
    import pyarrow  # large, and not needed for training and evaluation
    from pyarrow import parquet

    fields = [selection.text_field, *(field for field, _ in selection.where)]
    number = 0
    try:
        # A column of a row group may have gigabytes, so it is not prefetched.
        source = parquet.ParquetFile(opened, buffer_size=_READ_BYTES, pre_buffer=False)
        example = pyarrow.scalar(None, pyarrow.struct(list(source.schema_arrow)))
        for field in fields:
            try:
                kind = _scalar(example, field).type
            except (KeyError, TypeError) as error:
                detail = f"{field!r}; the fields are {source.schema_arrow.names}"
                raise _BadRecordError("no such field", detail, 0) from error
            if field == selection.text_field and str(kind) not in _STRINGS:
                raise _BadRecordError("not a string", f"{field!r} is {kind}", 0)
        for batch in source.iter_batches(1, columns=fields, use_threads=False):
            number += 1
            row = batch.to_struct_array()[0]
            yield number, {field: _value(_scalar(row, field)) for field in fields}
            advance(file.num_bytes * number // source.metadata.num_rows)
    except _BadRecordError:
        raise
    except Exception as error:  # pyarrow raises many kinds of errors for damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise
        line = number + 1 if number else 0
        raise _BadRecordError("corrupt parquet", f"{type(error).__name__}: {error}", line) from error


def _scalar(struct: Any, field: str) -> Any:
    """Return a dotted field; raise KeyError or TypeError if there is none."""
    for name in field.split("."):
        struct = struct[name]
    return struct.value if str(struct.type).startswith("dictionary") else struct


def _value(scalar: Any) -> Any:
    if str(scalar.type) in _STRINGS and scalar.is_valid:
        return scalar.as_buffer().to_pybytes()  # it need not be UTF-8
    return scalar.as_py()


def _text_of_row(row: dict[str, Any], selection: Selection) -> bytes | Skipped:
    if not selection.accepts(row.__getitem__):
        return "filtered"
    text = row[selection.text_field]
    if text is None:
        raise _BadRecordError("no such field", f"{selection.text_field!r} is null")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise _BadRecordError("not UTF-8", str(error)) from error
    return text
