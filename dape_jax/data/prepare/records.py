"""Input files -> documents: find the records of a file, and classify these as documents, skipped or bad.

In: an `InputFile` of `inputs`. Out: its documents, from `read_documents`. Next: `splits`.

    content                                            documents
    JSON objects in lines (.jsonl, .ndjson, or seen)   the text field of each
    JSON array of objects with the text field          the same; also of one such object in a .json file
    parquet                                            the text field of each row
    .bin and .idx of the same name                     token ids, as Megatron and GPT-NeoX write them
    any other text                                     one, or those between separators
    binary (a NUL byte near its start)                 none; bad

A record that cannot be read becomes a `Bad` with its reason, and reading continues after it.
"""

import datetime
import decimal
import fractions
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Integer

from dape_jax.data.prepare.config import Bad, PrepareConfig, Skipped
from dape_jax.data.prepare.inputs import DAMAGE, InputFile, compression_of, open_input
from dape_jax.data.prepare.megatron import read_documents as read_ids
from dape_jax.data.prepare.texts import between, in_pieces
from dape_jax.data.store import Split
from dape_jax.errors import InputError, require, require_package
from dape_jax.storage import is_remote

Content = bytes | Integer[np.ndarray, "_"]  # text, or token ids of a .bin file

PIECE_BYTES = 2**24  # a longer text that is a whole split is cut into documents of this length
_LINE_BYTES = 2**26  # longest of the lines that tell lines of JSON from other text
_WHOLE_BYTES = 2**30  # longest JSON that is not in lines
_ROWS = 16  # rows of parquet in memory at a time

Select = Callable[[Any, PrepareConfig], bytes | Skipped | Bad]


# ---- the text of a record


def select_text(record: Any, config: PrepareConfig) -> bytes | Skipped | Bad:
    """Return the text of a record, or why it is skipped or bad."""
    for field, accepted in config.conditions:
        value = lookup(record, field)
        if not any(_matches(value, text) for text in accepted):
            return "filtered"
    text = lookup(record, config.text_field)
    try:
        if isinstance(text, str | bytes):  # bytes from parquet
            return (text if isinstance(text, str) else text.decode()).encode()
    except UnicodeError as error:  # half a surrogate pair is JSON, but not Unicode
        return Bad("not Unicode", str(error))
    if not isinstance(record, dict):
        return Bad("no text", f"a {type(record).__name__}, not an object; a .json file may have an array of objects")
    found = f"missing; fields: {listed(record)}" if text is None else type(text).__name__
    return Bad("no text", f"{config.text_field!r} is {found}; --text_field of dape-prepare names another field")


def lookup(record: Any, field: str) -> Any:
    """Return the value of a field, or None: its name as it is, or else with dots that descend into objects."""
    if not isinstance(record, dict) or field in record:
        return record[field] if isinstance(record, dict) else None
    dots = (i for i, char in enumerate(field) if char == ".")
    found = (lookup(record[field[:i]], field[i + 1 :]) for i in dots if field[:i] in record)
    return next((value for value in found if value is not None), None)


def spelled(value: Any) -> str:
    """Return a value as `where` gives it: as in JSON, text without quotes, a date or time in ISO 8601."""
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    return json.dumps(value) if isinstance(value, bool | int | float | None) else str(value)


def _matches(value: Any, text: str) -> bool:
    """Return whether a value is the one in `where`, perhaps spelled otherwise."""
    if text == spelled(value):
        return True
    try:
        if isinstance(value, datetime.datetime):
            given = datetime.datetime.fromisoformat(text)
            return value == (given if given.tzinfo else given.replace(tzinfo=value.tzinfo))
        is_number = isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool)
        return is_number and fractions.Fraction(text) == fractions.Fraction(value)  # 2003 and 2003.0
    except (ValueError, ArithmeticError):
        return False


def listed(names: Iterable[Any]) -> str:
    """Return the first names of fields as text."""
    return ", ".join(str(name) for name in itertools.islice(names, 20)) or "none"


# ---- the records of a file


def split_of(document: bytes, validation_fraction: float) -> Split:
    """Return the split of a document, which depends only on a hash of its content.

    Copies of a document are therefore always in the same split, independent of their names, locations and order. A
    document is its text, or its token ids as bytes.
    """
    hash_in_64_bits = int.from_bytes(hashlib.sha256(document).digest()[:8])
    return "validation" if hash_in_64_bits < validation_fraction * 2**64 else "train"


def holds_ids(path: str) -> bool:
    """Return whether a file contains token ids: a .bin with its .idx. In a bucket the name alone decides."""
    prefix, suffix = os.path.splitext(path)
    is_pair = suffix.lower() in (".bin", ".idx")
    return is_pair and (is_remote(path) or all(os.path.exists(prefix + each) for each in (".bin", ".idx")))


def is_text(file: InputFile, config: PrepareConfig) -> bool:
    """Return whether a file is text, not records or ids."""
    try:
        with open_input(file.path) as (content, head):
            return not holds_ids(file.path) and _format(file.path, content, head, config)[0] == "text"
    except DAMAGE:
        return False


def read_documents(
    file: InputFile, config: PrepareConfig, select: Select = select_text
) -> Iterator[tuple[int, Content | Skipped | Bad]]:
    """Yield every record of a file, in order: its number from 1, and its content, why it is skipped, or why it is bad.

    The number is that of the line, the row of parquet, the document of a .bin file or of a text. Lengths are not
    checked. `select` returns the text of a JSON value or a row of parquet; by default, as `config` says.

    Raises:
        InputError: the file cannot be read. (A file with damaged content gives a `Bad`.)
    """
    is_local = not (holds_ids(file.path) and is_remote(file.path))
    require(is_local, "input", file.path, "must be on a local disk with its .idx: token ids are mapped into memory")
    number = 0
    try:
        for number, found in enumerate(_records(file, config, select), 1):
            if found is not None:
                yield number, found
    except ModuleNotFoundError:
        require_package("pyarrow", "parquet", "input", file.path)
        raise
    except DAMAGE as error:
        if isinstance(error, OSError) and (error.errno is not None or is_remote(file.path)):
            raise InputError(f"{file.path}: cannot be read: {error}") from error
        reason = "not Unicode" if isinstance(error, UnicodeError) else "damaged file"
        yield number + 1, Bad(reason, f"{type(error).__name__}: {error}")


def _records(file: InputFile, config: PrepareConfig, select: Select) -> Iterator[Content | Skipped | Bad | None]:
    """Yield the records of a file, and None for a blank line."""
    if holds_ids(file.path) and not config.where:
        yield from read_ids(file.path)
        return
    with open_input(file.path) as (content, head):
        if head.startswith(b"version https://git-lfs.github.com/spec/"):
            yield Bad("not downloaded", "a pointer of git-lfs: `git lfs pull` replaces it by the file")
            return
        form, begin = _format(file.path, content, head, config)
        text = b"".join(begin) if form == "text" else b""
        if form == "parquet":
            for row in _rows(content, config):
                yield select(row, config)
        elif form == "lines":
            for line in itertools.chain(begin, content):
                record = None if line.isspace() else _parse(line)
                yield record if line.isspace() or isinstance(record, Bad) else select(record, config)
        elif form == "array":
            for record in begin:
                yield select(record, config)
        elif config.where:
            yield "filtered"  # a text has no fields, so none match
        elif form == "binary":
            others = "give text in UTF-8, JSON lines or parquet; archives are not unpacked"
            flat = "it has no .idx, and token files without one are not supported"
            yield Bad("binary file", f"a NUL byte: {flat if file.path.lower().endswith('.bin') else others}")
        elif config.separator is not None:
            yield from between(content, text, config.separator, config.max_length)
        elif file.is_alone:
            yield from in_pieces(content, text, min(config.max_length, PIECE_BYTES))
        else:
            yield text + content.read(max(0, config.max_length + 1 - len(text)))


def _format(path: str, content: Any, head: bytes, config: PrepareConfig) -> tuple[str, list[Any]]:
    """Return the format of a file: "parquet", "binary", "lines", "array" or "text"; and the part that was read.

    This is all values of an array (one for a single object), and lines of the others.
    """
    name = path.lower().removesuffix(compression_of(path))
    if (head.startswith(b"PAR1") and b"\0" in head) or name.endswith(".parquet"):
        return "parquet", []
    if name.endswith((".jsonl", ".ndjson")):
        return "lines", []
    if b"\0" in head:
        return "binary", []
    if not re.match(rb"\s*(\[\s*)?\{", head):
        return "text", []
    begin: list[bytes] = []
    is_json = name.endswith(".json")
    if not re.match(rb"\s*\[", head):
        # The first two lines tell lines of JSON from one object on several lines, and from a file about something else.
        while sum(not line.isspace() for line in begin) < 2 and (line := content.readline(_LINE_BYTES)):
            begin.append(line)
        records = [_parse(line) for line in begin if not line.isspace()]
        are_objects = all(isinstance(record, dict) for record in records)
        has_text = isinstance(lookup(records[0], config.text_field), str)
        if (has_text or len(records) == 2) if is_json and are_objects else has_text and (is_json or are_objects):
            return "lines", begin
        if not is_json:
            return "text", begin
    text = b"".join([*begin, content.read(_WHOLE_BYTES)])
    found = _parse(text)
    values = found if isinstance(found, list) else [found]
    return ("array", values) if isinstance(lookup(values[0], config.text_field), str) else ("text", [text])


def _rows(content: Any, config: PrepareConfig) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet  # large, and needed only here

    fields = [config.text_field, *(field for field, _ in config.conditions)]
    most = 2**31 - 1  # the defaults refuse files with many columns and row groups
    file = parquet.ParquetFile(
        content, pre_buffer=False, thrift_string_size_limit=most, thrift_container_size_limit=most
    )
    names = dict.fromkeys(file.schema_arrow.names)  # of all columns, for messages
    for batch in file.iter_batches(_ROWS, columns=fields, use_threads=False):
        yield from (names | row for row in batch.to_pylist())


def _parse(line: bytes) -> Any:
    """Return a JSON value, or a `Bad`."""
    try:
        try:
            return json.loads(line)
        except ValueError:  # perhaps an integer longer than Python converts
            return json.loads(line, parse_int=str)
    except RecursionError as error:
        return Bad("nested too deeply", str(error))
    except ValueError as error:
        return Bad("not JSON", str(error))
