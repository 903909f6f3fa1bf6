"""Input files -> documents: open files, find their records, and classify these as documents, skipped or bad.

In: an `InputFile` of `corpus`. Out: its documents, from `read_documents`. Next: `tokenizers` and `build`.

    file name                                 content
    .jsonl .ndjson, and compressed .json      one JSON object per line
    .parquet                                  one record per row
    .bin and .idx                             token ids, as Megatron and GPT-NeoX write them
    any other                                 one document; skipped if binary (a NUL byte near its start)

.gz .bz2 .xz and .zst are decompressed (`paper.tex.zst`), also with several members or frames. A record that cannot be
read becomes a `Bad` with its reason, and reading continues after it. Memory is bounded by `Selection.max_length`.
"""

import bz2
import contextlib
import dataclasses
import gzip
import itertools
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import fsspec
import numpy as np
from jaxtyping import Integer

from dape_jax.data.corpus import InputFile, is_remote
from dape_jax.data.prepare.megatron import read_documents as read_ids
from dape_jax.errors import InputError, require_package

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Content = bytes | Integer[np.ndarray, "_"]  # text, or token ids of a .bin file
Skipped = Literal["filtered", "too short", "too long", "binary file"]

_OPEN: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda compressed: gzip.GzipFile(fileobj=compressed),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": zstd.ZstdFile,
}
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstd.ZstdError)
_BINARY_PROBE_BYTES = 8192
_MAX_ESCAPES = 3  # bytes of JSON per byte of UTF-8: "\u00e9" has six for two
_MAX_METADATA_BYTES = 2**20
_ROWS = 16  # rows of parquet in memory at a time


@dataclasses.dataclass(frozen=True)
class Selection:
    """Records that become documents, and the share of them for validation."""

    text_field: str  # field with the text of a record; a dot descends into an object
    where: tuple[tuple[str, tuple[str, ...]], ...]  # fields and their accepted values, numbers and booleans as in JSON
    min_length: int  # minimum length of a document in bytes of UTF-8, or in ids for a .bin file
    max_length: int  # maximum length, in the same units; it bounds the memory
    validation_fraction: float

    def skips_length(self, length: int) -> Skipped | None:
        """Return why a document of this length is skipped, or None if it is not."""
        return "too short" if length < self.min_length else "too long" if length > self.max_length else None


@dataclasses.dataclass(frozen=True)
class Bad:
    """Record that cannot be read, or the position at which a file is damaged."""

    reason: str  # category, for counts
    detail: str


def holds_ids(path: str) -> bool:
    """Return whether a file contains token ids instead of text."""
    return path.lower().endswith((".bin", ".idx"))


def read_documents(file: InputFile, selection: Selection) -> Iterator[tuple[int, Content | Skipped | Bad]]:
    """Yield every record of a file, in order: its number from 1, and its content, why it is skipped, or why it is bad.

    The number is that of the line, the row of parquet or the document of a .bin file.

    Raises:
        InputError: the file cannot be read. (A file with damaged content gives a `Bad`.)
    """
    name, suffix = os.path.splitext(file.path.lower())
    is_lines = suffix in (".jsonl", ".ndjson") or (suffix in _OPEN and name.endswith((".jsonl", ".ndjson", ".json")))
    if holds_ids(file.path) and is_remote(file.path):
        raise InputError(f"{file.path}: token ids are mapped into memory; copy .bin and .idx to a local disk")
    number, damage = 0, _DAMAGE
    try:
        with contextlib.ExitStack() as stack:
            if holds_ids(file.path):
                damage, records = (InputError,), _select_whole(read_ids(file.path), selection)
            else:
                content: Any = stack.enter_context(fsspec.open(file.path, "rb", compression=None))
                if suffix in _OPEN:
                    content = stack.enter_context(_OPEN[suffix](content))
                if is_lines:
                    records = _read_lines(content, selection)
                elif suffix == ".parquet":
                    require_package("pyarrow", "parquet", "input", file.path)
                    damage = () if is_remote(file.path) else (Exception,)  # pyarrow raises many kinds
                    records = _read_rows(content, selection)
                else:
                    records = _select_whole(_read_text(content, selection), selection)
            for number, found in records:
                yield number, found
    except Exception as error:  # file systems define their own exceptions
        of_system = isinstance(error, OSError) and error.errno is not None
        if isinstance(error, damage) and not of_system:
            yield number + 1, Bad("damaged file", f"{type(error).__name__}: {error}")
        elif isinstance(error, OSError) or is_remote(file.path):
            raise InputError(f"{file.path}: cannot be read: {' '.join(str(error).split())}") from error
        else:
            raise


def _select_whole(
    contents: Iterable[Content | Skipped], selection: Selection
) -> Iterator[tuple[int, Content | Skipped | Bad]]:
    for number, content in enumerate(contents, 1):
        is_filtered = not isinstance(content, str) and bool(selection.where)  # it has no fields, so none match
        yield number, "filtered" if is_filtered else content


def _read_text(content: Any, selection: Selection) -> Iterator[bytes | Skipped]:
    text = content.read(_BINARY_PROBE_BYTES)
    if b"\0" in text:
        yield "binary file"
        return
    text += content.read(max(0, selection.max_length + 1 - len(text)))
    yield "too long" if len(text) > selection.max_length else text


def _read_lines(content: Any, selection: Selection) -> Iterator[tuple[int, bytes | Skipped | Bad]]:
    """Yield the lines that are not blank. A line that is too long is a bad record, and never in memory as a whole."""
    longest = selection.max_length * _MAX_ESCAPES + _MAX_METADATA_BYTES
    for number in itertools.count(1):
        line = rest = content.readline(longest + 1)
        if not line:
            return
        is_too_long = len(line) > longest and not line.endswith(b"\n")
        while is_too_long and rest and not rest.endswith(b"\n"):
            rest = content.readline(longest)
        if is_too_long:
            yield number, Bad("line too long", f"more than {longest} bytes")
            continue
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.isspace():
            continue
        try:
            record = _JSON.decode(line.decode())
        except (ValueError, RecursionError) as error:
            yield number, Bad("not JSON", str(error))
        else:
            yield number, _select(lambda field, record=record: _lookup(record, field), selection)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def _lookup(record: Any, field: str) -> Any:
    """Return the value of a dotted field, or None."""
    for name in field.split("."):
        record = record.get(name) if type(record) is dict else None
    return record


def _read_rows(content: Any, selection: Selection) -> Iterator[tuple[int, bytes | Skipped | Bad]]:
    import pyarrow  # large, and needed only here
    from pyarrow import compute, parquet

    def values(batch: Any, field: str) -> list[Any]:
        name, *rest = field.split(".")
        column = batch.column(name)
        for name in rest:
            column = compute.struct_field(column, name)  # type: ignore[attr-defined]  # made at run time
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
            column = column.cast(pyarrow.large_binary())  # it need not be UTF-8
        return column.to_pylist()

    fields = [selection.text_field, *(field for field, _ in selection.where)]
    source, number = parquet.ParquetFile(content, pre_buffer=False), 0
    names = source.schema_arrow.names
    if missing := [field for field in fields if field.partition(".")[0] not in names]:
        yield 1, Bad("no text", f"no column {missing[0]!r}; the columns are {names}")
        return
    for batch in source.iter_batches(_ROWS, columns=fields, use_threads=False):
        for row in zip(*(values(batch, field) for field in fields), strict=True):
            number += 1
            yield number, _select(dict(zip(fields, row, strict=True)).get, selection)


def _select(value_of: Callable[[str], Any], selection: Selection) -> bytes | Skipped | Bad:
    """Return the text of a record, which is given as a function from field to value; or why it is skipped or bad."""
    if any(_spelled(value_of(field)) not in accepted for field, accepted in selection.where):
        return "filtered"
    text = value_of(selection.text_field)
    try:
        if isinstance(text, str):
            return text.encode()
        if isinstance(text, bytes):
            text.decode()
            return text
    except UnicodeError as error:  # half a surrogate pair is JSON, but not Unicode
        return Bad("not Unicode", str(error))
    return Bad("no text", f"{selection.text_field!r} is {'missing' if text is None else type(text).__name__}")


def _spelled(value: Any) -> str | None:
    """Return a value in the notation of `where`, or None for an array or an object."""
    if isinstance(value, bytes):  # from parquet
        return value.decode("utf-8", "replace")
    return json.dumps(value) if isinstance(value, bool | int | float) else value if isinstance(value, str) else None
