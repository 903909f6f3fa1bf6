"""Texts -> documents: between separators, or in pieces. In: a stream of a text. Out: its documents. Next: `records`."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

from dape_jax.data.prepare.config import Skipped

_NEAR = 1024  # bytes before a cut in which a line break or white space is looked for
_BLOCK = 2**20  # bytes that are read at a time


def between(content: Any, begin: bytes, separator: bytes, max_length: int) -> Iterator[bytes | Skipped]:
    """Yield the parts of a text between separators, without line breaks next to these and without blank parts."""
    rest, is_too_long = b"", False
    # More is read while there is no separator: otherwise the time is quadratic.
    blocks = iter(lambda: content.read(max(_BLOCK, len(rest))), b"")
    for block in itertools.chain([begin], blocks):
        *parts, rest = (rest + block).split(separator)
        for part in parts:
            if is_too_long or part.strip():
                yield "too long" if is_too_long else part.strip(b"\r\n")
            is_too_long = False
        if len(rest) > max_length + len(separator):
            rest, is_too_long = rest[-len(separator) :], True
    if is_too_long or rest.strip():
        yield "too long" if is_too_long else rest.strip(b"\r\n")


def in_pieces(content: Any, begin: bytes, length: int) -> Iterator[bytes]:
    """Yield a text in pieces of at most `length` bytes, cut at line breaks."""
    rest = begin
    while len(text := rest + content.read(max(0, length + 1 - len(rest)))) > length:
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
    first = next((at for at in range(end, max(0, end - 4), -1) if text[at] & 0xC0 != 0x80), end)  # of a character
    return first
