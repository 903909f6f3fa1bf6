"""Input files -> records: the texts of a file or the token ids in it, and what of it is left out.

In: an `InputFile` of `inputs`. Out: its records, from `read_records`. Next: `splits`.

    content                                            records
    JSON objects in lines (.jsonl, .ndjson, or seen)   the text field of each
    JSON array of objects with the text field          the same; also of one such object in a .json file
    parquet, Arrow (`save_to_disk` of datasets)        the text field of each row
    .bin and .idx of the same name                     token ids, as Megatron and GPT-NeoX write them
    any other text                                     one, or those between separators
    binary (a NUL byte near its start)                 none; bad

A record that cannot be read is left out with its reason, and reading continues after it.
"""

import contextlib
import datetime
import decimal
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from dape_jax.data.prepare.config import PrepareConfig
from dape_jax.data.prepare.inputs import DAMAGE, InputFile, open_input
from dape_jax.data.prepare.megatron import read_documents as read_ids
from dape_jax.errors import InputError, require_package
from dape_jax.files import LFS_POINTER
from dape_jax.storage import is_remote

Content = str | bytes | Integer[np.ndarray, "_"]  # text of a record, (part of) a text file, or token ids

PIECE_BYTES = 2**24  # a longer text that is a whole split is cut into documents of this length
_ARROW_FILE, _ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"  # first bytes
_VALUE_BYTES = 2**30  # longest JSON value: a line, or a whole file
_ROWS = 16  # rows of parquet in memory at a time
_BLOCK = 2**20  # bytes that are read at a time to find separators
_NEAR = 1024  # bytes before a cut in which a line break or white space is looked for


class LeftOut(NamedTuple):
    """Record that is not in the corpus, or the position at which a file is damaged."""

    reason: str  # category, for counts
    detail: str = ""


SKIPPED = ("filtered", "too short", "too long")  # reasons that follow from the options; others are of bad records
_BLANK = LeftOut("blank line")  # not counted


# ---- the text of a record


def select_text(record: Any, config: PrepareConfig) -> str | LeftOut:
    """Return the text of a record, or why it is left out."""
    if isinstance(record, LeftOut):
        return record
    for field, accepted in config.conditions:
        if not any(_matches(lookup(record, field), text) for text in accepted):
            return LeftOut("filtered", _described(record, field))
    text = lookup(record, config.text_field)
    if isinstance(text, str | bytes):  # parquet has bytes, perhaps not of UTF-8
        return text if isinstance(text, str) else text.decode(errors="surrogateescape")
    return LeftOut("no text", f"{_described(record, config.text_field)}; --text_field of dape-prepare names another")


def lookup(record: Any, field: str) -> Any:
    """Return the value of a field, or None: its name as it is, or else with dots that descend into objects."""
    if not isinstance(record, dict) or field in record:
        return record[field] if isinstance(record, dict) else None
    first, _, rest = field.partition(".")
    return lookup(record.get(first), rest) if rest else None


def _described(record: Any, field: str) -> str:
    """Return what a record has in a field, for messages."""
    value = lookup(record, field)
    if not isinstance(record, dict):
        return f"a {type(record).__name__}, not an object"
    if value is None:
        return f"{field!r} is {'null' if field in record else f'missing; fields: {[*record][:20]}'}"
    return f"{field!r} is {_spelled(value)[:40]} ({type(value).__name__})"


def _spelled(value: Any) -> str:
    """Return a value as `where` gives it: as in JSON, text without quotes, a date or time in ISO 8601."""
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    return json.dumps(value) if isinstance(value, bool | int | float | None) else str(value)


def _matches(value: Any, text: str) -> bool:
    """Return whether a value is the one in `where`, perhaps spelled otherwise."""
    if text == _spelled(value) or isinstance(value, bool):
        return text == _spelled(value)
    with contextlib.suppress(ValueError, decimal.InvalidOperation):
        if isinstance(value, datetime.datetime):
            given = datetime.datetime.fromisoformat(text)
            return value == given.replace(tzinfo=given.tzinfo or value.tzinfo)
        return decimal.Decimal(text) == value  # 2003 and 2003.0
    return False


# ---- the records of a file


def holds_ids(path: str) -> bool:
    """Return whether a local file contains token ids, which are mapped into memory: a .bin with its .idx."""
    prefix, suffix = os.path.splitext(path)
    return suffix.lower() in (".bin", ".idx") and all(os.path.exists(prefix + each) for each in (".bin", ".idx"))


def read_records(file: InputFile, config: PrepareConfig, is_alone: bool) -> Iterator[tuple[int, Content | LeftOut]]:
    """Yield every record of a file, in order: its number from 1, and its content or why it is left out.

    The number is that of the line, the row of parquet, the document of a .bin file or of a text. Lengths and the
    encoding are not checked. A text file is read in pieces if it `is_alone` in its split.

    Raises:
        InputError: the file cannot be read. (Damaged content is left out.)
    """
    number = 0
    try:
        for number, found in enumerate(_records(file.path, config, is_alone), 1):
            if found is not _BLANK:
                yield number, found
    except DAMAGE as error:
        if isinstance(error, InputError) and not holds_ids(file.path):  # a package is missing
            raise
        if isinstance(error, OSError) and (error.errno is not None or is_remote(file.path)):
            raise InputError(f"{file.path}: cannot be read: {error}") from error
        reason = "not Unicode" if isinstance(error, UnicodeError) else "damaged file"
        yield number + 1, LeftOut(reason, f"{type(error).__name__}: {error}")


def _records(path: str, config: PrepareConfig, is_alone: bool) -> Iterator[Content | LeftOut]:
    if holds_ids(path) and not config.where:
        yield from read_ids(path)
        return
    with open_input(path) as (content, head):
        if head.startswith(LFS_POINTER):
            yield LeftOut("not downloaded", "a pointer of git-lfs: `git lfs pull` replaces it by the file")
        elif (values := _values(path, content, head, config)) is not None:
            yield from (select_text(value, config) for value in values)
        elif config.where:
            yield LeftOut("filtered", "a text has no fields")
        elif b"\0" in head:
            others = "give text in UTF-8, JSON lines or parquet; archives are not unpacked"
            flat = "it has no .idx on the same local disk, and token files without one are not supported"
            yield LeftOut("binary file", f"a NUL byte: {flat if path.lower().endswith('.bin') else others}")
        elif config.separator is not None:
            yield from between(content, config.separator, config.max_length)
        elif is_alone:
            yield from _pieces(content, min(config.max_length, PIECE_BYTES))
        else:
            yield content.read(config.max_length + 1)


def _values(path: str, content: Any, head: bytes, config: PrepareConfig) -> Iterable[Any] | None:
    """Return the rows of a table or the values of JSON in a file, or None: it is text, as JSON without the field is."""
    name = re.sub(r"\.(gz|bz2|xz|zst)$", "", path.lower())
    is_table = head.startswith((b"PAR1", _ARROW_FILE, _ARROW_STREAM)) and b"\0" in head
    if is_table or name.endswith((".parquet", ".arrow")):
        return _rows(path, content, head, config)
    start, is_json, begins = content.tell(), name.endswith(".json"), b"" if b"\0" in head else head.lstrip()
    is_array, is_lines = re.match(rb"\[\s*\{", begins) is not None, name.endswith((".jsonl", ".ndjson"))
    if is_lines and not is_array:
        return _lines(content)
    if begins.startswith(b"{"):
        # The first two lines tell lines of JSON from one object on several lines, and from a file about something else.
        first = list(itertools.islice((value for value in _lines(content) if value is not _BLANK), 2))
        content.seek(start)
        has_text = any(isinstance(lookup(value, config.text_field), str) for value in first)
        are_objects = {*map(type, first)} == {dict}
        if (has_text and (is_json or are_objects)) or (is_json and are_objects and len(first) == 2):
            return _lines(content)
    if is_array or (is_json and begins.startswith(b"{")):
        value = _parse(content.read(_VALUE_BYTES))
        values = value if isinstance(value, list) else [value]
        has_text = any(isinstance(lookup(each, config.text_field), str) for each in values)
        if has_text or (is_lines and isinstance(value, list)):
            return values
        content.seek(start)
    return _lines(content) if is_lines else None


def _rows(path: str, content: Any, head: bytes, config: PrepareConfig) -> Iterator[dict[str, Any] | LeftOut]:
    require_package("pyarrow", "parquet", "input", path)
    from pyarrow import ipc, parquet  # large, and needed only here

    fields = [config.text_field, *(field for field, _ in config.conditions)]
    batches: Iterable[Any]
    if head.startswith(_ARROW_FILE):
        file = ipc.open_file(content)
        names, batches = file.schema.names, map(file.get_batch, range(file.num_record_batches))
    elif head.startswith(_ARROW_STREAM):
        batches = ipc.open_stream(content)
        names = batches.schema.names
    else:
        # The default limits refuse files with many columns and row groups.
        limits = dict.fromkeys(("thrift_string_size_limit", "thrift_container_size_limit"), 2**31 - 1)
        file = parquet.ParquetFile(content, pre_buffer=False, **limits)
        names, batches = file.schema_arrow.names, file.iter_batches(_ROWS, columns=fields, use_threads=False)
    needed = {name for field in fields for name in (field, field.partition(".")[0])}
    for batch in batches:
        columns = [i for i, name in enumerate(batch.schema.names) if name in needed]
        for row in map(batch.select(columns).slice, range(batch.num_rows), itertools.repeat(1)):
            try:
                yield dict.fromkeys(names) | row.to_pylist()[0]  # the names of all columns, for messages
            except (OverflowError, ValueError) as error:  # of this row; not every writer checks its text and times
                yield LeftOut("not Unicode" if isinstance(error, UnicodeError) else "out of range", str(error))


def _lines(content: Any) -> Iterator[Any]:
    return map(_parse, iter(lambda: content.readline(_VALUE_BYTES), b""))


def _parse(text: bytes) -> Any:
    """Return a JSON value, or why it is left out."""
    try:
        return _BLANK if text.isspace() else json.loads(text)
    except (ValueError, RecursionError) as error:
        return LeftOut("not JSON", f"{error}; each line must be one value")


# ---- the parts of a text


def between(content: Any, separator: bytes, max_length: int) -> Iterator[bytes | LeftOut]:
    """Yield the parts of a text between separators, without line breaks next to these and without blank parts.

    A line break of the separator is also one of Windows.
    """
    pattern, longest = re.escape(separator), 2 * len(separator)
    pattern = pattern if b"\r" in separator else pattern.replace(b"\\\n", rb"\r?\n")
    rest, too_long, is_end = b"", None, False
    while not is_end:
        # More is read while there is no separator: otherwise the time is quadratic.
        block = content.read(max(_BLOCK, len(rest)))
        is_end = not block
        *parts, rest = re.split(pattern, rest + block)
        for part in [*parts, rest] if is_end else parts:
            if too_long or part.strip():
                yield too_long or part.strip(b"\r\n")
            too_long = None
        if len(rest) > max_length + longest:
            rest, too_long = rest[-longest:], LeftOut("too long", f"longer than max_length = {max_length}")


def _pieces(content: Any, length: int) -> Iterator[bytes]:
    """Yield a text in pieces of at most `length` bytes, cut at line breaks."""
    rest = b""
    while len(text := rest + content.read(length + 1 - len(rest))) > length:
        at = cut_before(text, length)
        yield text[:at]
        rest = text[at:]
    yield text


def cut_before(text: bytes, end: int) -> int:
    """Return a position of a text in (0, end] to cut it: after a line break or white space, or between characters."""
    begin = max(0, end - _NEAR)
    for pattern in (rb"(?s).*\n", rb"(?s).*\s"):
        if match := re.match(pattern, text[begin:end]):
            return begin + match.end()
    return next((at for at in range(end, max(0, end - 4), -1) if text[at] & 0xC0 != 0x80), end)  # begins a character
