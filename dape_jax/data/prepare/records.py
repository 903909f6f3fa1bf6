"""Input files -> documents: open any file, find its records, and tell documents from skipped and bad records.

In: an `InputFile` of `corpus`. Out: `read_documents`. Next: `tokenizers` and `build`.

    name of a file                            content
    .jsonl .ndjson, and compressed .json      one JSON object per line
    .parquet                                  one record per row
    .bin and .idx                             token ids, as Megatron and GPT-NeoX write them
    any other                                 one document; skipped if binary (a NUL byte near its start)

.gz .bz2 .xz and .zst are decompressed (`paper.tex.zst`), also with several members or frames. Files are not trusted: a
record that cannot be read becomes a `BadRecord` with file, line and reason, and reading continues behind it. Memory is
bounded by `Selection.max_length`.
"""

import bz2
import contextlib
import dataclasses
import gzip
import io
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
from dape_jax.errors import InputError

Skipped = Literal["filtered", "too short", "too long", "binary file"]

_READ_BYTES = 2**20
_ZSTD_STEP_BYTES = 2**10  # decompressed at once: a KiB of Zstandard can be 32 MiB of zeros
_BINARY_PROBE_BYTES = 8192
_BATCH_BYTES = 2**20  # of parquet rows that are read at once
_MAX_ROWS = 1024
_MAX_ESCAPES = 3  # bytes of JSON per byte of UTF-8: "\u00e9" has six for two
_MAX_METADATA_BYTES = 2**20
_MAX_DETAIL_CHARS = 200

_DAMAGE = (zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError, EOFError)
_JSON = json.JSONDecoder(parse_constant=lambda name: _refuse_constant(name))


@dataclasses.dataclass(frozen=True)
class Selection:
    """The records that become documents, and the share of them for validation.

    Args:
        text_field: field of a record that holds its text; a dot descends into an object.
        where: pairs of a field and its accepted values (strings, or JSON's spelling of numbers and booleans).
        min_length: minimum bytes of UTF-8 of a document; of token ids in a `.bin` file.
        max_length: maximum, likewise. It bounds the memory.
        validation_fraction: share of the documents for validation.
    """

    text_field: str
    where: tuple[tuple[str, tuple[str, ...]], ...]
    min_length: int
    max_length: int
    validation_fraction: float

    @property
    def max_line(self) -> int:
        """Maximum bytes of a line of JSON. A longer one is a bad record, and is never held in memory."""
        return self.max_length * _MAX_ESCAPES + _MAX_METADATA_BYTES

    def skips_length(self, length: int) -> Skipped | None:
        """Return why a document of this length is skipped, or None if it is not."""
        return "too short" if length < self.min_length else "too long" if length > self.max_length else None


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read, or the point at which a file is damaged."""

    file: str
    line: int  # from 1: a line, a row of parquet or a document of a .bin file; 0 for the whole file
    reason: str  # one of a few, to be counted
    detail: str  # shortened to one line

    def __post_init__(self):
        object.__setattr__(self, "detail", " ".join(self.detail.split())[:_MAX_DETAIL_CHARS])


@dataclasses.dataclass(frozen=True)
class Document:
    """One document: its text or, from a .bin file, its token ids."""

    file: str
    line: int  # as in `BadRecord`
    content: bytes | Integer[np.ndarray, "_"]


Found = Document | BadRecord | Skipped


class _BadRecordError(Exception):
    """Reason and detail of a `BadRecord`, raised where its file and line are not known."""


def holds_ids(path: str) -> bool:
    """Return whether a file holds token ids instead of text."""
    return path.lower().endswith((".bin", ".idx"))


def read_documents(file: InputFile, selection: Selection, advance: Callable[[int], object]) -> Iterator[Found]:
    """Yield every record of a file, in order: a document, the reason why it is skipped, or a bad record.

    Args:
        file: from `corpus.find_files`.
        selection: the records that become documents.
        advance: called now and then with the number of input bytes read so far.

    Raises:
        InputError: the file cannot be read. (A file with damaged content gives a `BadRecord`.)
    """
    name, suffix = os.path.splitext(file.path.lower())
    is_lines = name.endswith((".jsonl", ".ndjson", ".json")) if suffix in _DECOMPRESS else False
    try:
        if holds_ids(file.path):
            yield from _read_ids(file, selection)
            return
        with contextlib.ExitStack() as stack:
            opened: Any = stack.enter_context(fsspec.open(file.path, "rb", compression=None))
            content = stack.enter_context(_DECOMPRESS.get(suffix, _buffered)(opened))
            if is_lines or suffix in (".jsonl", ".ndjson"):
                yield from _read_lines(content, file, selection, lambda: advance(opened.tell()))
            elif suffix == ".parquet":
                yield from _read_rows(opened, file, selection, advance)
            else:
                yield from _read_text(content, file, selection)
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or is_remote(file.path):  # each file system raises exceptions of its own
            text = " ".join(str(error).split())
            raise InputError(f"{file.path}: cannot be read: {text}") from error
        raise


# Decompression.


class _ZstdReader(io.RawIOBase):
    """Decompress Zstandard, frame after frame, in bounded memory.

    The readers of the library stop silently where the last frame is truncated; this one raises `EOFError`.
    """

    def __init__(self, compressed: Any):
        self._compressed = compressed
        self._input, self._output = b"", memoryview(b"")
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._compressed.read(_ZSTD_STEP_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("ends within a Zstandard frame")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._output = memoryview(self._frame.decompress(self._input))
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size


def _buffered(raw: Any) -> io.BufferedReader:
    return io.BufferedReader(raw, _READ_BYTES)


_DECOMPRESS: dict[str, Callable[[Any], io.BufferedIOBase]] = {
    ".gz": lambda compressed: gzip.GzipFile(fileobj=compressed),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda compressed: _buffered(_ZstdReader(compressed)),
}


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Raise `_BadRecordError` where compressed content is damaged."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # the disk or the network, not the content
            raise
        raise _BadRecordError("corrupt archive", str(error)) from error
    except _DAMAGE as error:
        reason = "truncated archive" if isinstance(error, EOFError) else "corrupt archive"
        raise _BadRecordError(reason, str(error)) from error


# One document per file.


def _read_text(content: io.BufferedIOBase, file: InputFile, selection: Selection) -> Iterator[Found]:
    try:
        with _damage():
            text = content.read(_BINARY_PROBE_BYTES)
            is_binary = b"\0" in text
            if not is_binary:
                text += content.read(max(0, selection.max_length + 1 - len(text)))
    except _BadRecordError as error:
        yield BadRecord(file.path, 0, *error.args)
        return
    if is_binary:
        yield "binary file"
    elif len(text) > selection.max_length:
        yield "too long"
    else:  # it has no fields, so none that match
        yield "filtered" if selection.where else Document(file.path, 1, text)


# Lines of JSON.


def _read_lines(
    content: io.BufferedIOBase, file: InputFile, selection: Selection, advance: Callable[[], object]
) -> Iterator[Found]:
    limit = selection.max_line + 1
    number = 0
    while True:
        number += 1
        try:
            with _damage():
                line = content.readline(limit)
                is_too_long = len(line) == limit and not line.endswith(b"\n")
                rest = line
                while is_too_long and rest and not rest.endswith(b"\n"):
                    rest = content.readline(_READ_BYTES)
        except _BadRecordError as error:
            yield BadRecord(file.path, number, *error.args)
            return
        if not line:
            return
        advance()
        try:
            if is_too_long:
                raise _BadRecordError("line too long", f"more than {selection.max_line} bytes")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.isspace():
                text = _text_of(line, selection)
                yield "filtered" if text is None else Document(file.path, number, text)
        except _BadRecordError as error:
            yield BadRecord(file.path, number, *error.args)


def _text_of(line: bytes, selection: Selection) -> bytes | None:
    """Return the text of a JSON record, or None if the record does not match `selection.where`."""
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
    if not _matches([_lookup(record, field) for field, _ in selection.where], selection):
        return None
    text = _lookup(record, selection.text_field)
    if text is None:
        raise _BadRecordError("no such field", f"{selection.text_field!r}, or it is null")
    if type(text) is not str:
        raise _BadRecordError("not a string", f"{selection.text_field!r} is of type {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _BadRecordError("not Unicode", str(error)) from error  # half a surrogate pair: JSON, but not text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _lookup(record: dict[str, Any], field: str) -> Any:
    """Return the value of a dotted field, or None."""
    value: Any = record
    for name in field.split("."):
        if type(value) is not dict or name not in value:
            return None
        value = value[name]
    return value


def _matches(values: list[Any], selection: Selection) -> bool:
    def spelled(value: Any) -> str | None:
        if isinstance(value, bytes):  # of parquet
            return value.decode("utf-8", "replace")
        return json.dumps(value) if isinstance(value, bool | int | float) else value if isinstance(value, str) else None

    return all(spelled(value) in accepted for value, (_, accepted) in zip(values, selection.where, strict=True))


# Rows of parquet.


def _read_rows(opened: Any, file: InputFile, selection: Selection, advance: Callable[[int], object]) -> Iterator[Found]:
    from pyarrow import parquet  # large, and not needed by training and evaluation

    fields = [selection.text_field, *(field for field, _ in selection.where)]
    number = 0
    try:
        # A column of a row group may have gigabytes, so it is not read ahead. Strings stay in their dictionary: rows
        # that share a large value share its memory.
        options: dict[str, Any] = {"buffer_size": _READ_BYTES, "pre_buffer": False}
        schema = parquet.ParquetFile(opened, **options).schema
        _check_columns(schema.to_arrow_schema(), fields)
        columns = [schema.column(i) for i in range(len(schema))]
        strings = [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and c.path in fields]
        source = parquet.ParquetFile(opened, read_dictionary=strings, **options)
        for index in range(source.metadata.num_row_groups):
            group = source.metadata.row_group(index)
            size = sum(
                chunk.total_uncompressed_size
                for chunk in map(group.column, range(group.num_columns))
                if any(f"{chunk.path_in_schema}.".startswith(f"{field}.") for field in fields)
            )
            rows_at_once = min(max(1, _BATCH_BYTES * group.num_rows // max(1, size)), _MAX_ROWS)
            for batch in source.iter_batches(rows_at_once, [index], columns=fields):
                for text, *values in zip(*(_values(batch, field) for field in fields), strict=True):
                    number += 1
                    yield _row(file, number, text, values, selection)
                advance(file.num_bytes * number // source.metadata.num_rows)
    except _BadRecordError as error:
        yield BadRecord(file.path, 0, *error.args)
    except Exception as error:  # a damaged file makes pyarrow raise many kinds
        if isinstance(error, OSError) and error.errno is not None:
            raise
        line = number + 1 if number else 0
        yield BadRecord(file.path, line, "corrupt parquet", f"{type(error).__name__}: {error}")


def _row(file: InputFile, number: int, text: bytes | None, values: list[Any], selection: Selection) -> Found:
    if not _matches(values, selection):
        return "filtered"
    if text is None:
        return BadRecord(file.path, number, "no such field", f"{selection.text_field!r} is null")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return BadRecord(file.path, number, "not UTF-8", str(error))
    return Document(file.path, number, text)


def _check_columns(schema: Any, fields: list[str]) -> None:
    """Raise `_BadRecordError` unless the schema has every field, and text in the first."""
    import pyarrow

    for field in fields:
        kind = pyarrow.struct(list(schema))
        for name in field.split("."):
            index = kind.get_field_index(name) if pyarrow.types.is_struct(kind) else -1
            if index < 0:
                raise _BadRecordError("no such field", f"{field!r}; there are {schema.names}")
            kind = kind.field(index).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if field == fields[0] and not _is_text(kind):
            raise _BadRecordError("not a string", f"{field!r} is {kind}")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    checks = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(check(kind) for check in checks)


def _values(batch: Any, field: str) -> Iterator[Any]:
    """Yield the values of a dotted field one by one, text as bytes that need not be UTF-8."""
    import pyarrow
    from pyarrow import compute

    top, *path = field.split(".")
    column = batch.column(top)
    if path:
        column = compute.call_function("struct_field", [column], compute.StructFieldOptions(path))
    indices = None
    if pyarrow.types.is_dictionary(column.type):
        column, indices = column.dictionary, column.indices
    if _is_text(column.type):
        column = column.cast(pyarrow.large_binary())
    if indices is None:
        return (value.as_py() for value in column)
    return (None if index is None else column[index].as_py() for index in indices.to_pylist())


# Token ids.


def _read_ids(file: InputFile, selection: Selection) -> Iterator[Found]:
    if is_remote(file.path):
        raise InputError(f"{file.path}: token ids are mapped into memory; copy .bin and .idx to a local disk")
    try:
        dataset = open_indexed(Path(file.path))
    except InputError as error:
        yield BadRecord(file.path, 0, "damaged .bin or .idx", str(error))
        return
    for index in range(dataset.num_documents):
        yield "filtered" if selection.where else Document(file.path, index + 1, dataset.document(index))
