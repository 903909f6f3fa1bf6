"""Paths -> input files in a fixed order, and these as streams of bytes, decompressed and decoded.

In: the paths given to `prepare`. Out: the files that they name; of each, a stream and its first bytes. Next: `records`,
which finds the records in it.
"""

import bz2
import codecs
import contextlib
import functools
import glob
import gzip
import io
import itertools
import logging
import lzma
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from dape_jax.data.store import SIDECAR_FILE, STDLIB, Split
from dape_jax.errors import require
from dape_jax.storage import is_remote, read_errors

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

logger = logging.getLogger(__name__)

# BadGzipFile is an OSError, UnicodeError and InputError are ValueErrors; pyarrow's errors are of the first four kinds.
DAMAGE = (EOFError, NotImplementedError, OSError, ValueError, zlib.error, lzma.LZMAError, zstd.ZstdError)

_WINDOW = zstd.DecompressionParameter.window_log_max  # files of `zstd --long` need more than the default
_COMPRESSIONS: dict[bytes, Callable[..., Any]] = {  # first bytes, as a pattern, and how to open
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": lambda file: io.BufferedReader(_Streams(bz2.BZ2Decompressor, file)),
    rb"\xfd7zXZ\x00": lambda file: io.BufferedReader(_Streams(lzma.LZMADecompressor, file)),
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": functools.partial(zstd.open, options={_WINDOW: _WINDOW.bounds()[1]}),
}
_HEAD_BYTES = 8192
# Metadata of `save_to_disk`, and results of `map` and `filter` beside the rows that these were computed from.
_DATASETS_FILES = r"(dataset_dict|dataset_info|state)\.json|cache-[0-9a-f]{16}\w*\.arrow"


class InputFile(NamedTuple):
    """Input file, with the properties that show whether it has changed."""

    path: str  # absolute path, or URL
    num_bytes: int
    version: int | str  # modification time in ns; for a remote file, fsspec's key of its version
    split: Split | None = None  # of its documents; None: chosen for each document


def find_files(paths: Iterable[str], excluded: Collection[Path] = (), field: str = "input") -> list[InputFile]:
    """Return the files that paths name, without reading them: sorted for each path, and every file once.

    A path is "stdlib" (the source of this interpreter's standard library), a directory (every file under it, except
    hidden files and linked directories), a glob (`**` descends), one file, or the URL of any of these on a file system
    supported by fsspec (gs://, s3://, hf://). A pair of .bin and .idx counts as its .bin. Files under the `excluded`
    directories are left out, and so are metadata and caches beside the .arrow files of the library datasets.

    Raises:
        InputError: a path has no files, or cannot be read. The message names `field`.
    """
    files: dict[str, InputFile] = {}
    for path in paths:
        with read_errors(field, path):
            found = _find_remote(path) if is_remote(path) else map(_stat, _find_local(path))
            kept = [file for file in found if not any(Path(file.path).is_relative_to(each) for each in excluded)]
        others = [file for file in kept if not re.fullmatch(_DATASETS_FILES, os.path.basename(file.path))]
        kept = others if any(file.path.endswith(".arrow") for file in others) else kept
        corpora = sorted({os.path.dirname(file.path) for file in kept if os.path.basename(file.path) == SIDECAR_FILE})
        allowed = f"must be text, not a prepared corpus, as in {corpora[:1]}: train on that with --config.data.path"
        require(not corpora, field, path, allowed)
        allowed = f"no files there; give a file, a directory or a glob that matches files, or {STDLIB!r}"
        require(len(kept) > 0, field, path, allowed)
        for file in kept:  # a linked file has several paths; Python's stay, so that its corpus is the same everywhere
            files.setdefault(file.path if path == STDLIB else os.path.realpath(file.path), file)
    return list(files.values())


def _find_remote(url: str) -> list[InputFile]:
    system, path = fsspec.url_to_fs(url)
    found = system.glob(path, detail=True) if glob.has_magic(path) else system.find(path, detail=True)
    infos = {name: found[name] or system.info(name) for name in sorted(found)}  # of one https:// file, `find` gives {}
    given = re.split(r"[*?\[]", path)[0].rstrip("/")
    return [
        InputFile(system.unstrip_protocol(name), info["size"] or 0, system.ukey(name))
        for name, info in infos.items()
        if info["type"] == "file" and "/." not in name.removeprefix(given)
    ]


def _find_local(path: str) -> list[str]:
    root = os.path.abspath(os.path.expanduser(path))
    if path == STDLIB:
        root = os.path.realpath(sysconfig.get_path("stdlib"))
        found = [file for file in _walk(root, ("site-packages", "dist-packages")) if file.endswith(".py")]
        # Debian links sitecustomize.py into /etc: a link to a file outside the tree is not part of Python.
        found = [file for file in found if Path(os.path.realpath(file)).is_relative_to(root)]
    elif os.path.exists(root):
        found = list(_walk(root)) if os.path.isdir(root) else [root]
    else:
        found = list(map(os.path.abspath, _matches(os.path.expanduser(path))))
        if "**" not in path and (folders := sorted(filter(os.path.isdir, found))):
            logger.warning("directories that match %r left out, such as %s; '**' descends into them", path, folders[0])
    files = sorted(found)
    if missing := [file for file in files if not os.path.exists(file)]:  # as git-annex leaves files that it did not get
        logger.warning("%d links without a file left out, such as %s", len(missing), missing[0])
    return [file for file in files if os.path.isfile(file)]


def _walk(root: str, excluded: Collection[str] = ()) -> Iterator[str]:
    """Yield every file under root, except hidden files and files in linked directories."""
    for folder, subfolders, files in os.walk(root, onerror=_stop):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in excluded]
        if links := ", ".join(name for name in subfolders if os.path.islink(os.path.join(folder, name))):
            logger.warning("links to directories in %s left out: %s; '%s/**' follows them", folder, links, root)
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def _matches(pattern: str) -> Iterator[str]:
    """Yield the paths that match a glob; `**` also descends into linked directories, but into each directory once."""
    parts = re.fullmatch(r"(?s)(|.*?/)\*\*(?:/(.*))?", pattern)
    if parts is None:
        yield from glob.glob(pattern)
        return
    visited = set[str]()
    for root in sorted(glob.glob(parts[1])) if parts[1] else [""]:
        for folder, subfolders, _ in os.walk(root or ".", onerror=_stop, followlinks=True):
            if (path := os.path.realpath(folder)) in visited:
                subfolders.clear()
                continue
            visited.add(path)
            # In the order of the paths, in which a file that is found several times gets its name.
            subfolders[:] = sorted((name for name in subfolders if not name.startswith(".")), key="{}/".format)
            yield from _matches(os.path.join(glob.escape(folder), parts[2] or "*"))


def _stop(error: OSError) -> None:
    raise error  # os.walk would otherwise skip an unreadable directory silently


def _stat(path: str) -> InputFile:
    prefix, suffix = os.path.splitext(path)
    if suffix.lower() == ".idx" and os.path.exists(f"{prefix}.bin"):
        path = f"{prefix}.bin"
    stat = os.stat(path)
    return InputFile(path, stat.st_size, stat.st_mtime_ns)


@contextlib.contextmanager
def open_input(path: str) -> Iterator[tuple[Any, bytes]]:
    """Open a file as a stream of bytes, and yield it with its first bytes.

    Compressed content is decompressed, whatever its name. Text with a byte order mark is decoded, and becomes UTF-8
    without the mark.
    """
    with contextlib.ExitStack() as stack:
        # fsspec would read :: in a local name, as in File::Spec.txt, as a chain of file systems.
        raw: Any = fsspec.open(path, "rb", compression=None) if is_remote(path) else open(path, "rb", buffering=0)
        raw = stack.enter_context(raw)
        content: Any = stack.enter_context(io.BufferedReader(raw))  # `readline` of a file in a bucket takes no size
        head = _head(content.read)
        content.seek(0)
        if decompress := next((each for magic, each in _COMPRESSIONS.items() if re.match(magic, head)), None):
            head = _head(decompress(content).read1)
            content.seek(0)  # with a new decompressor: after damage, the first may return nothing
            content = stack.enter_context(decompress(content))
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            content = io.BytesIO(content.read().decode("utf-16").encode())
            head = content.getvalue()[:_HEAD_BYTES]
        elif head.startswith(codecs.BOM_UTF8) and not path.endswith(".py"):
            # Python source keeps it: the corpus of the standard library, and the results on it, would be others.
            content.seek(len(codecs.BOM_UTF8))
            head = head[len(codecs.BOM_UTF8) :]
        yield content, head


def _head(read: Callable[[int], bytes]) -> bytes:
    """Return the first bytes of a stream, up to a place where it is damaged."""
    head = b""
    with contextlib.suppress(*DAMAGE):
        while len(head) < _HEAD_BYTES and (block := read(_HEAD_BYTES - len(head))):
            head += block
    return head


class _Streams(io.RawIOBase):
    """Content of bzip2 or xz streams one after another, with any zeros as padding between and after them.

    `bz2.open` and `lzma.open` would silently end at padding or damage between two streams.
    """

    def __init__(self, decompressor: Callable[[], Any], file: Any) -> None:
        self._decompressor, self._file = decompressor, file
        self.seek(0)

    def readable(self) -> bool:
        return True

    seekable = readable

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        while whence == os.SEEK_END and self.read(io.DEFAULT_BUFFER_SIZE):
            pass
        position += self._position if whence != os.SEEK_SET else 0
        self._file.seek(0)
        self._blocks, self._rest, self._position = self._decompressed(), b"", 0
        while self.read(min(position - self._position, io.DEFAULT_BUFFER_SIZE)):
            pass
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(filter(None, self._blocks), b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        self._position += size
        return size

    def _decompressed(self) -> Iterator[bytes]:
        read = functools.partial(self._file.read, io.DEFAULT_BUFFER_SIZE)
        block = read()
        while block:
            stream = self._decompressor()
            while not stream.eof:
                if stream.needs_input and not block:
                    raise EOFError("the file ends within a compressed stream")
                yield stream.decompress(block, io.DEFAULT_BUFFER_SIZE)
                block = read() if stream.needs_input else b""
            # The next stream, or damage, is after zeros.
            rest = itertools.chain([stream.unused_data], iter(read, b""))
            block = next(filter(None, (each.lstrip(b"\0") for each in rest)), b"")
