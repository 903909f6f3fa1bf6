"""Input files -> documents: open files, find their records, and classify these as documents, skipped or bad.

In: an `InputFile` of `inputs`. Out: its documents, from `read_documents`. Next: `build`, which tokenizes them.

    file name                                 content
    .jsonl .ndjson, and compressed .json      one JSON object per line
    .parquet                                  one record per row
    .bin and .idx                             token ids, as Megatron and GPT-NeoX write them
    any other                                 one document; bad if binary (a NUL byte near its start)

.gz .bz2 .xz and .zst are decompressed (`paper.tex.zst`), also with several members or frames. A record that cannot be
read becomes a `Bad` with its reason, and reading continues after it.
"""

import bz2
import contextlib
import dataclasses
import gzip
import hashlib
import json
import lzma
import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
from jaxtyping import Integer

from dape_jax.data.prepare.config import PrepareConfig, Skipped
from dape_jax.data.prepare.inputs import InputFile
from dape_jax.data.prepare.megatron import read_documents as read_ids
from dape_jax.data.store import Split
from dape_jax.errors import InputError, require, require_package
from dape_jax.storage import is_remote

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Content = bytes | Integer[np.ndarray, "_"]  # text, or token ids of a .bin file

_OPEN: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": zstd.open}
# Also BadGzipFile, an OSError; the errors of pyarrow, ValueErrors and OSErrors; and InputError, a ValueError.
_DAMAGE = (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, zstd.ZstdError)
_BINARY_PROBE_BYTES = 8192
_ROWS = 16  # rows of parquet in memory at a time


@dataclasses.dataclass(frozen=True)
class Bad:
    """Record that cannot be read, or the position at which a file is damaged."""

    reason: str  # category, for counts
    detail: str


def split_of(document: bytes, validation_fraction: float) -> Split:
    """Return the split of a document, which depends only on a hash of its content.

    Copies of a document are therefore always in the same split, independent of their names, locations and order. A
    document is its text, or its token ids as bytes.
    """
    hash_in_64_bits = int.from_bytes(hashlib.sha256(document).digest()[:8])
    return "validation" if hash_in_64_bits < validation_fraction * 2**64 else "train"


def holds_ids(path: str) -> bool:
    """Return whether a file contains token ids instead of text."""
    return path.lower().endswith((".bin", ".idx"))


def read_documents(file: InputFile, config: PrepareConfig) -> Iterator[tuple[int, Content | Skipped | Bad]]:
    """Yield every record of a file, in order: its number from 1, and its content, why it is skipped, or why it is bad.

    The number is that of the line, the row of parquet or the document of a .bin file. Lengths are not checked.

    Raises:
        InputError: the file cannot be read. (A file with damaged content gives a `Bad`.)
    """
    if file.path.lower().endswith(".parquet"):
        require_package("pyarrow", "parquet", "input", file.path)
    is_local = not (holds_ids(file.path) and is_remote(file.path))
    require(is_local, "input", file.path, "must be on a local disk with its .idx: token ids are mapped into memory")
    number = 0
    try:
        for number, found in _records(file.path, config):
            yield number, found
    except _DAMAGE as error:
        if isinstance(error, OSError) and (error.errno is not None or is_remote(file.path)):
            raise InputError(f"{file.path}: cannot be read: {error}") from error
        yield number + 1, Bad("damaged file", f"{type(error).__name__}: {error}")


def _records(path: str, config: PrepareConfig) -> Iterator[tuple[int, Content | Skipped | Bad]]:
    name, suffix = os.path.splitext(path.lower())
    is_lines = suffix in (".jsonl", ".ndjson") or (suffix in _OPEN and name.endswith((".jsonl", ".ndjson", ".json")))
    if config.where and not is_lines and suffix != ".parquet":
        yield 1, "filtered"  # it has no fields, so none match
        return
    if holds_ids(path):
        yield from enumerate(read_ids(path), 1)
        return
    with contextlib.ExitStack() as stack:
        content: Any = stack.enter_context(fsspec.open(path, "rb", compression=None))
        if suffix in _OPEN:
            content = stack.enter_context(_OPEN[suffix](content))
        if is_lines:
            for number, line in enumerate(content, 1):
                if not line.isspace():
                    yield number, _parse(line, config)
        elif suffix == ".parquet":
            for number, row in enumerate(_rows(content, config), 1):
                yield number, _select(row, config)
        else:
            text: bytes = content.read(_BINARY_PROBE_BYTES)
            if b"\0" in text:
                yield 1, Bad("binary file", "a NUL byte")
            else:
                yield 1, text + content.read(config.max_length + 1)


def _rows(content: Any, config: PrepareConfig) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet  # large, and needed only here

    fields = [config.text_field, *(field for field, _ in config.conditions)]
    for batch in parquet.ParquetFile(content, pre_buffer=False).iter_batches(_ROWS, columns=fields, use_threads=False):
        yield from batch.to_pylist()


def _parse(line: bytes, config: PrepareConfig) -> bytes | Skipped | Bad:
    try:
        return _select(json.loads(line), config)
    except (ValueError, RecursionError) as error:
        return Bad("not JSON", str(error))


def _select(record: Any, config: PrepareConfig) -> bytes | Skipped | Bad:
    """Return the text of a record, or why it is skipped or bad."""
    if any(_spelled(_lookup(record, field)) not in accepted for field, accepted in config.conditions):
        return "filtered"
    text = _lookup(record, config.text_field)
    try:
        if isinstance(text, str | bytes):  # bytes from parquet
            return (text if isinstance(text, str) else text.decode()).encode()
    except UnicodeError as error:  # half a surrogate pair is JSON, but not Unicode
        return Bad("not Unicode", str(error))
    return Bad("no text", f"{config.text_field!r} is {'missing' if text is None else type(text).__name__}")


def _lookup(record: Any, field: str) -> Any:
    """Return the value of a dotted field, or None."""
    for name in field.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _spelled(value: Any) -> str:
    """Return a value in the notation of `where`: as in JSON, text without quotes, and a date as YYYY-MM-DD."""
    return json.dumps(value) if isinstance(value, bool | int | float | None) else str(value)
