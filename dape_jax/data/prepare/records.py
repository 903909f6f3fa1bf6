"""Files -> records: batches of raw content that one process cuts, and the documents that any number find in them.

In: the files of `corpus`. Out: `read_batches` gives batches, in the order of the files; `examine` gives what is in a
batch: documents, and what is none. Next: `tokenizers` and `build`.

    name of a file                          what it holds
    .jsonl .ndjson, also with .gz or .zst;  one JSON object in each line
    .json.gz .json.zst
    .parquet                                one record in each row
    .bin and .idx                           token ids, as Megatron and GPT-NeoX write them
    any other                               one document; not if it is binary: with a NUL byte near its start

Files come from outside. A record that cannot be read, whatever the cause, is a `Bad` with file, line and reason, and
reading goes on behind it. What is held in memory has a bound, which depends on `Selection.max_length` alone.
"""

import dataclasses
import functools
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import zstandard
from jaxtyping import Integer

from dape_jax.data.prepare.megatron import open_indexed
from dape_jax.errors import InputError

Skipped = Literal["filtered", "too short", "too long", "binary file"]

_LINES = (".jsonl", ".ndjson")
_LINES_COMPRESSED = (*_LINES, ".json")
_COMPRESSED = (".gz", ".zst")
_PARQUET, _IDS, _IDS_INDEX = ".parquet", ".bin", ".idx"
_BINARY_PROBE_BYTES = 8192

_READ_BYTES = 2**20
_ZSTD_STEP_BYTES = 2**10  # decompressed at once: a KiB of Zstandard can be 32 MiB of zeros
_PIECE_BYTES = 2**20
_OVERHEAD_BYTES = 256  # of a piece, a row or a document of ids that holds nothing: there may be millions of them
_MAX_ROWS = 1024  # of parquet that are read at once
_MAX_ESCAPES = 3  # bytes of JSON for a byte of UTF-8: "\u00e9" has six for two
_MAX_METADATA_BYTES = 2**20
_MAX_DETAIL_CHARS = 200


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which records become documents, and on which side of the split they fall.

    Args:
        text_field: where a record has its text; a dot leads into an object.
        where: fields, written alike, and the values of which a record must have one: strings, or what JSON spells so.
        min_length: bytes of UTF-8 of a document; ids, if it is of a `.bin` file.
        max_length: the same. It bounds the memory.
        validation_fraction: the share of the documents that is held out for validation.
    """

    text_field: str
    where: tuple[tuple[str, tuple[str, ...]], ...]
    min_length: int
    max_length: int
    validation_fraction: float

    @property
    def max_line(self) -> int:
        """Bytes of a line of JSON; a longer one is bad, and is never held whole."""
        return self.max_length * _MAX_ESCAPES + _MAX_METADATA_BYTES

    def by_length(self, length: int) -> Skipped | None:
        """Why a document of this length is left out, or None if it is not."""
        return "too short" if length < self.min_length else "too long" if length > self.max_length else None


@dataclasses.dataclass(frozen=True)
class Position:
    """A place between two records, from which reading can go on."""

    file: int = 0  # which of the files
    offset: int = 0  # in it: bytes of its lines, decompressed; or rows; or documents
    line: int = 0  # its lines before there


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read, or the place where a file breaks off."""

    file: str
    line: int  # from 1: a line, a row of parquet or a document of a .bin file; 0 for the whole file
    reason: str  # one of few, to be counted by
    detail: str  # cut to one line that is not long

    def __post_init__(self):
        object.__setattr__(self, "detail", " ".join(self.detail.split())[:_MAX_DETAIL_CHARS])


@dataclasses.dataclass(frozen=True)
class Lines:
    """Whole lines, each a record in JSON."""

    file: str
    first: int  # the number of the first, from 1
    content: bytes


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a parquet file: the text as it is stored, and the values of the fields of `where`."""

    file: str
    first: int
    rows: list[tuple[bytes | None, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Text:
    """A file that is one document."""

    file: str
    content: bytes


@dataclasses.dataclass(frozen=True)
class Ids:
    """Documents of a pair of .bin and .idx files."""

    file: str
    first: int
    documents: list[Integer[np.ndarray, "_"]]


RawRecords = Lines | Rows | Text | Ids | BadRecord | Skipped


@dataclasses.dataclass(frozen=True)
class Batch:
    """About `_PIECE_BYTES` of raw content, to be examined here or in another process."""

    pieces: list[RawRecords]
    after: Position  # its last record
    num_input_bytes: int  # of all files, compressed as they are, up to there


@dataclasses.dataclass(frozen=True)
class Document:
    """One document: its text or, from a .bin file, its ids."""

    file: str
    line: int  # as in `Bad`
    content: bytes | Integer[np.ndarray, "_"]


class _BadRecord(Exception):
    """Reason and detail of a `Bad`, from where its file and line are not known."""


def input_files(found: list[tuple[str, Path]]) -> list[Path]:
    """The files that are read, each pair of .bin and .idx once, by its .bin."""
    once = {}
    for _, file in found:
        if file.suffix.lower() == _IDS_INDEX and file.with_suffix(_IDS).exists():
            file = file.with_suffix(_IDS)
        once.setdefault(os.path.abspath(file), file)
    return list(once.values())


def holds_ids(file: Path) -> bool:
    """Whether a file holds token ids and not text."""
    return file.suffix.lower() in (_IDS, _IDS_INDEX)


def _holds_lines(file: Path) -> bool:
    name, compression = os.path.splitext(file.name.lower())
    if compression in _COMPRESSED:
        return name.endswith(_LINES_COMPRESSED)
    return compression in _LINES


# Reading: one process cuts files into pieces.


def read_batches(files: list[Path], selection: Selection, start: Position) -> Iterator[Batch]:
    """Everything in the files from a position on, in order.

    Args:
        files: from `input_files`.
        selection: what the pieces will be examined for; what is too long is not read.
        start: 0, or the `after` of an earlier batch. Where batches are cut depends on it, what is in them does not.

    Raises:
        InputError: a file cannot be read. (One whose content is damaged is a `Bad`.)
    """
    pieces, size, input_before = [], 0, 0
    after = start
    for index, file in enumerate(files):
        try:
            num_bytes = file.stat().st_size
            if index >= start.file:
                begin = start if index == start.file else Position(index)
                for piece, piece_size, after, num_read in _read_file(file, selection, begin):
                    pieces.append(piece)
                    size += piece_size + _OVERHEAD_BYTES
                    if size >= _PIECE_BYTES:
                        yield Batch(pieces, after, input_before + num_read)
                        pieces, size = [], 0
                after = Position(index + 1)
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error}") from error
        input_before += num_bytes
    if pieces or after != start:
        yield Batch(pieces, after, input_before)


_Read = Iterator[
    tuple[RawRecords, int, Position, int]
]  # a piece, its size, the position after it, bytes read of the file


def _read_file(file: Path, selection: Selection, start: Position) -> _Read:
    if _holds_lines(file):
        return _read_lines(file, selection, start)
    if file.suffix.lower() == _PARQUET:
        return _read_rows(file, selection, start)
    if holds_ids(file):
        return _read_ids(file, selection, start)
    return _read_text(file, selection, start)


def _read_text(file: Path, selection: Selection, start: Position) -> _Read:
    with open(file, "rb") as opened:
        content = opened.read(_BINARY_PROBE_BYTES)
        piece: RawRecords = "binary file"
        if b"\0" not in content:
            content += opened.read(max(0, selection.max_length + 1 - len(content)))
            piece = "too long" if len(content) > selection.max_length else Text(str(file), content)
    yield piece, len(content), Position(start.file + 1), len(content)


def _read_lines(file: Path, selection: Selection, start: Position) -> _Read:
    """Lines in pieces of at least `_PIECE_BYTES`, but for the last; a line that is too long is passed over."""
    offset, line = start.offset, start.line
    held, num_held, has_end = [], 0, False  # blocks that no piece has yet, and whether a line ends in them
    in_long_line = False
    damage = None
    with open(file, "rb") as opened:

        def lines(content: bytes) -> tuple[RawRecords, int, Position, int]:
            nonlocal offset, line
            piece = Lines(str(file), line + 1, content)
            offset, line = offset + len(content), line + content.count(b"\n")
            return piece, len(content), Position(start.file, offset, line), opened.tell()

        def too_long() -> tuple[RawRecords, int, Position, int]:
            nonlocal line
            line += 1
            bad = BadRecord(str(file), line, *_too_long(selection).args)
            return bad, 0, Position(start.file, offset, line), opened.tell()

        for block in _blocks(file, opened, offset):
            if isinstance(block, _BadRecord):
                damage = block
                break
            if in_long_line:
                end = block.find(b"\n") + 1
                offset += end or len(block)
                if not end:
                    continue
                yield too_long()
                in_long_line = False
                block = block[end:]
            held.append(block)
            num_held += len(block)
            has_end = has_end or b"\n" in block
            if has_end and num_held >= _PIECE_BYTES:
                content = b"".join(held)
                end = content.rfind(b"\n") + 1
                yield lines(content[:end])
                held, num_held, has_end = [content[end:]], len(content) - end, False
            elif not has_end and num_held > selection.max_line:
                offset += num_held
                held, num_held, in_long_line = [], 0, True

        content = b"".join(held)
        if damage:
            content = content[: content.rfind(b"\n") + 1]  # the line in which it breaks off is no record
        if content:
            yield lines(content)
        if damage:
            yield BadRecord(str(file), line + 1, *damage.args), 0, Position(start.file + 1), opened.tell()
        elif in_long_line:
            yield too_long()


def _too_long(selection: Selection) -> _BadRecord:
    return _BadRecord("line too long", f"more than {selection.max_line} bytes")


def _blocks(file: Path, opened: BinaryIO, offset: int) -> Iterator[bytes | _BadRecord]:
    """The content from an offset on, decompressed; where it is damaged, a `_BadRecord` comes last."""
    match file.suffix.lower():
        case ".gz":
            blocks = _gzip_blocks(opened)
        case ".zst":
            blocks = _zstd_blocks(opened)
        case _:
            opened.seek(offset)
            yield from iter(functools.partial(opened.read, _READ_BYTES), b"")
            return
    for block in blocks:
        if isinstance(block, _BadRecord) or len(block) > offset:
            yield block[offset:] if isinstance(block, bytes) else block
            offset = 0
        else:
            offset -= len(block)


def _gzip_blocks(opened: BinaryIO) -> Iterator[bytes | _BadRecord]:
    with gzip.GzipFile(fileobj=opened) as members:
        try:
            # read1: what was read before an error is not lost with it, as in a longer read.
            yield from iter(functools.partial(members.read1, _READ_BYTES), b"")
        except EOFError as error:
            yield _BadRecord("truncated archive", str(error))
        except (gzip.BadGzipFile, zlib.error) as error:
            yield _BadRecord("corrupt archive", str(error))


def _zstd_blocks(opened: BinaryIO) -> Iterator[bytes | _BadRecord]:
    """One frame after another. The library's own reader of many frames says nothing when the last is cut short."""
    decompressor = zstandard.ZstdDecompressor()
    frame = None
    while data := opened.read(_READ_BYTES):
        for begin in range(0, len(data), _ZSTD_STEP_BYTES):
            step = data[begin : begin + _ZSTD_STEP_BYTES]
            while step:
                if frame is None:
                    frame = decompressor.decompressobj()
                try:
                    content = frame.decompress(step)
                except zstandard.ZstdError as error:
                    yield _BadRecord("corrupt archive", str(error))
                    return
                yield from (content[i : i + _READ_BYTES] for i in range(0, len(content), _READ_BYTES))
                step = b""
                if frame.eof:
                    step, frame = frame.unused_data, None
    if frame is not None:
        yield _BadRecord("truncated archive", "ends within a Zstandard frame")


def _read_rows(file: Path, selection: Selection, start: Position) -> _Read:
    # Not above: it is large, and neither the worker processes nor training and evaluation need it.
    from pyarrow import parquet

    fields = [selection.text_field, *(field for field, _ in selection.where)]
    num_bytes = file.stat().st_size
    row = start.offset
    with open(file, "rb") as opened:
        try:
            # A column of a row group may be gigabytes: it is not to be read ahead, nor at once.
            opened_parquet = parquet.ParquetFile(opened, buffer_size=_READ_BYTES, pre_buffer=False)
            _check_columns(opened_parquet.schema_arrow, fields)
            metadata = opened_parquet.metadata
            end = 0
            for group in range(metadata.num_row_groups):
                first, end = end, end + metadata.row_group(group).num_rows
                if end <= start.offset:
                    continue
                at_once = _rows_at_once(opened, metadata, group, fields)
                for table in opened_parquet.iter_batches(at_once, [group], columns=fields):
                    skipped = max(0, start.offset - first)
                    first += table.num_rows
                    if skipped >= table.num_rows:
                        continue
                    rows = _rows(table.slice(skipped), fields)
                    row += len(rows)
                    held = (value for text, of_where in rows for value in (text, *of_where) if isinstance(value, bytes))
                    size = sum(map(len, held)) + _OVERHEAD_BYTES * len(rows)
                    piece = Rows(str(file), row - len(rows) + 1, rows)
                    yield piece, size, Position(start.file, row, row), num_bytes * row // max(1, metadata.num_rows)
        except _BadRecord as error:
            reason, detail = error.args
        except Exception as error:  # a damaged file makes pyarrow raise a dozen kinds, some of several lines
            reason, detail = "corrupt parquet", f"{type(error).__name__}: {error}"
        else:
            return
    bad = BadRecord(str(file), row + 1 if row else 0, reason, detail)
    yield bad, 0, Position(start.file + 1), num_bytes


def _check_columns(schema: Any, fields: list[str]) -> None:
    """Raise `_BadRecord` unless the schema has every field, and text in the first."""
    import pyarrow

    for field in fields:
        kind = pyarrow.struct(list(schema))
        for name in field.split("."):
            index = kind.get_field_index(name) if pyarrow.types.is_struct(kind) else -1
            if index < 0:
                raise _BadRecord("no such field", f"{field!r}; there are {schema.names}")
            kind = kind.field(index).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if field == fields[0] and not _is_text(kind):
            raise _BadRecord("not a string", f"{field!r} is {kind}")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    checks = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(check(kind) for check in checks)


def _rows_at_once(opened: BinaryIO, metadata: Any, number: int, fields: list[str]) -> int:
    """As many rows of a group as have about `_PIECE_BYTES`.

    A column with a dictionary holds a value once, however many rows have it: the longest one counts for each of them.
    """
    from pyarrow import compute, parquet

    group = metadata.row_group(number)
    columns = [group.column(i) for i in range(group.num_columns)]
    wanted = [c for c in columns if any(f"{c.path_in_schema}.".startswith(f"{field}.") for field in fields)]
    longest = sum(column.total_uncompressed_size for column in wanted) // max(1, group.num_rows)
    shared = {c.path_in_schema for c in wanted if c.has_dictionary_page and c.physical_type == "BYTE_ARRAY"}
    for field in shared & {*fields}:
        as_stored = parquet.ParquetFile(opened, read_dictionary=[field], buffer_size=_READ_BYTES, pre_buffer=False)
        for row in as_stored.iter_batches(1, [number], columns=[field]):
            length = compute.call_function("binary_length", [_column(row, field).dictionary])
            longest = max(longest, compute.call_function("max", [length]).as_py() or 0)
            break  # it brings the whole dictionary
    return min(max(1, _PIECE_BYTES // max(1, longest)), _MAX_ROWS)


def _column(table: Any, field: str) -> Any:
    from pyarrow import compute

    top, *path = field.split(".")
    column = table.column(top)
    return compute.call_function("struct_field", [column], compute.StructFieldOptions(path)) if path else column


def _rows(table: Any, fields: list[str]) -> list[tuple[bytes | None, tuple[Any, ...]]]:
    import pyarrow

    def values(field: str) -> list[Any]:
        column = _column(table, field)
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if _is_text(column.type):
            column = column.cast(pyarrow.large_binary())  # which does not mind if it is not UTF-8
        return column.to_pylist()

    texts, *of_where = map(values, fields)
    return [(text, tuple(column[i] for column in of_where)) for i, text in enumerate(texts)]


def _read_ids(file: Path, selection: Selection, start: Position) -> _Read:
    num_bytes = file.stat().st_size
    try:
        dataset = open_indexed(file)
    except InputError as error:
        bad = BadRecord(str(file), 0, "damaged .bin or .idx", str(error))
        yield bad, 0, Position(start.file + 1), num_bytes
        return
    documents, size, first = [], 0, start.offset

    def held() -> tuple[RawRecords, int, Position, int]:
        end = first + len(documents)
        piece = Ids(str(file), first + 1, documents)
        return piece, size, Position(start.file, end, end), num_bytes * end // dataset.num_documents

    for index in range(start.offset, dataset.num_documents):
        ids = dataset.document(index)
        is_too_long = len(ids) > selection.max_length + 1  # with its end_of_document
        if documents and (is_too_long or size >= _PIECE_BYTES):
            yield held()
            documents, size, first = [], 0, index
        if is_too_long:
            end = first = index + 1
            yield "too long", 0, Position(start.file, end, end), num_bytes * end // dataset.num_documents
        else:
            documents.append(np.array(ids))
            size += ids.nbytes + _OVERHEAD_BYTES
    if documents:
        yield held()


# Examining: any process finds the documents in a piece.


def examine(piece: RawRecords, selection: Selection) -> Iterator[Document | BadRecord | Skipped]:
    """What is in a piece, in order: documents, what is left out, and what is bad."""
    match piece:
        case Lines():
            yield from _examine_lines(piece, selection)
        case Rows():
            yield from _examine_rows(piece, selection)
        case Text(file, content):  # it has no fields, so none that match
            yield "filtered" if selection.where else Document(file, 1, content)
        case Ids(file, first, documents):
            for number, ids in enumerate(documents, first):
                yield "filtered" if selection.where else Document(file, number, ids)
        case _:
            yield piece


def _examine_lines(piece: Lines, selection: Selection) -> Iterator[Document | BadRecord | Skipped]:
    begin, number = 0, piece.first
    while begin < len(piece.content):
        end = piece.content.find(b"\n", begin)
        end = len(piece.content) if end < 0 else end
        line = piece.content[begin:end]
        try:
            if len(line) > selection.max_line:
                raise _too_long(selection)
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line and not line.isspace():
                text = _text_of(line, selection)
                yield "filtered" if text is None else Document(piece.file, number, text)
        except _BadRecord as error:
            reason, detail = error.args
            yield BadRecord(piece.file, number, reason, detail)
        begin, number = end + 1, number + 1


def _text_of(line: bytes, selection: Selection) -> bytes | None:
    """The text of a record in JSON, or None if the record does not match."""
    try:
        record = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _BadRecord("not UTF-8", str(error)) from error
    except ValueError as error:
        raise _BadRecord("not JSON", str(error)) from error
    except RecursionError as error:
        raise _BadRecord("nested too deeply", str(error)) from error
    if type(record) is not dict:
        raise _BadRecord("not an object", type(record).__name__)
    if not _matches([_lookup(record, field) for field, _ in selection.where], selection):
        return None
    text = _lookup(record, selection.text_field)
    if text is None:
        raise _BadRecord("no such field", f"{selection.text_field!r}, or it is null")
    if type(text) is not str:
        raise _BadRecord("not a string", f"{selection.text_field!r} is of type {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _BadRecord("not Unicode", str(error)) from error  # half a surrogate pair: JSON, but not text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _lookup(record: dict[str, Any], field: str) -> Any:
    """The value of a dotted field, or None."""
    value: Any = record
    for name in field.split("."):
        if type(value) is not dict or name not in value:
            return None
        value = value[name]
    return value


def _matches(values: list[Any] | tuple[Any, ...], selection: Selection) -> bool:
    def spelled(value: Any) -> str | None:
        if isinstance(value, bytes):  # of parquet
            return value.decode("utf-8", "replace")
        return json.dumps(value) if isinstance(value, bool | int | float) else value if isinstance(value, str) else None

    return all(spelled(value) in allowed for value, (_, allowed) in zip(values, selection.where, strict=True))


def _examine_rows(piece: Rows, selection: Selection) -> Iterator[Document | BadRecord | Skipped]:
    for number, (text, values) in enumerate(piece.rows, piece.first):
        if not _matches(values, selection):
            yield "filtered"
        elif text is None:
            yield BadRecord(piece.file, number, "no such field", f"{selection.text_field!r} is null")
        else:
            try:
                text.decode()
                yield Document(piece.file, number, text)
            except UnicodeDecodeError as error:
                yield BadRecord(piece.file, number, "not UTF-8", str(error))
