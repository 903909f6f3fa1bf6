"""Open input files: decompress them, and decode text to UTF-8. The content decides, before the name.

In: a path or URL. Out: a stream and its first bytes. Next: `records`, which finds the records in it.
"""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import fsspec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# Also BadGzipFile, an OSError; errors of pyarrow, ValueErrors and OSErrors; UnicodeError and InputError, ValueErrors.
DAMAGE = (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, zstd.ZstdError)

_WINDOW = zstd.DecompressionParameter.window_log_max.bounds()[1]  # files of `zstd --long` need more than the default
_COMPRESSIONS: dict[str, tuple[bytes, Any]] = {  # first bytes, as a pattern, and how to open
    ".gz": (rb"\x1f\x8b", gzip.open),
    ".bz2": (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", bz2.open),
    ".xz": (rb"\xfd7zXZ\x00", lzma.open),
    ".zst": (
        rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
        lambda file: zstd.open(file, options={zstd.DecompressionParameter.window_log_max: _WINDOW}),
    ),
}
_MARKS = {  # byte order marks; that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF8: None,
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_HEAD_BYTES = 8192


@contextlib.contextmanager
def open_input(path: str) -> Iterator[tuple[Any, bytes]]:
    """Open a file as a stream of bytes, and yield it with its first bytes.

    Compressed content is decompressed, whatever its name. Text with a byte order mark is decoded, and becomes UTF-8
    without the mark.
    """
    with contextlib.ExitStack() as stack:
        content: Any = stack.enter_context(fsspec.open(path, "rb", compression=None))
        head = _head(content.read)
        content.seek(0)
        compressions = [suffix for suffix, (magic, _) in _COMPRESSIONS.items() if re.match(magic, head)]
        if not (head and is_text(head)):  # else it was decompressed on its way here, and has kept its name
            compressions += [suffix for suffix in [compression_of(path)] if suffix]
        if compressions:
            decompress = _COMPRESSIONS[compressions[0]][1]
            head = _head(decompress(content).read1)
            content.seek(0)  # with a new decompressor: after damage, the first may return nothing
            content = stack.enter_context(decompress(content))
        for mark, encoding in _MARKS.items():
            # Python source keeps it: the corpus of the standard library, and the results on it, would be others.
            if head.startswith(mark) and (encoding is not None or not path.endswith(".py")):
                content.seek(len(mark))
                head = head[len(mark) :]
                if encoding is not None:
                    content = io.BufferedReader(_Recoded(content, encoding))
                    head = content.peek(_HEAD_BYTES)
                break
        yield content, head


def compression_of(path: str) -> str:
    """Return the suffix that names the compression of a file, or ""."""
    suffix = os.path.splitext(path.lower())[1]
    return suffix if suffix in _COMPRESSIONS else ""


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are text in UTF-8, of which the last character may be cut."""
    with contextlib.suppress(UnicodeError):
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    return False


def _head(read: Callable[[int], bytes]) -> bytes:
    """Return the first bytes of a stream, up to a place where it is damaged."""
    head = b""
    with contextlib.suppress(*DAMAGE):
        while len(head) < _HEAD_BYTES and (block := read(_HEAD_BYTES - len(head))):
            head += block
    return head


class _Recoded(io.RawIOBase):
    """Text of another encoding as UTF-8."""

    def __init__(self, content: Any, encoding: str):
        self._content, self._decoder, self._rest = content, codecs.getincrementaldecoder(encoding)(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (block := self._content.read(_HEAD_BYTES)):
            self._rest = self._decoder.decode(block).encode()
        if not self._rest:
            self._decoder.decode(b"", final=True)  # raises if the last character is cut
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
