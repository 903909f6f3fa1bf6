"""Paths -> input files, and the split of a document.

In: `config.data.path`, or the inputs of `prepare`. Out: the files that they name, in a fixed order. Next:
`prepare.records`, which reads them.
"""

import contextlib
import glob
import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import fsspec

from dape_jax.errors import InputError

Split = Literal["train", "validation"]

STDLIB = "stdlib"
_STDLIB_EXCLUDED = ("site-packages", "dist-packages", "__pycache__", "lib-dynload")
_STDLIB_MIN_FILES = 100  # a complete library has more than a thousand; a zipped or stripped one fewer than ten


class InputFile(NamedTuple):
    """Input file, with the properties that show whether it has changed."""

    path: str  # local path, or URL
    num_bytes: int
    version: int | str  # modification time in ns; for a remote file, fsspec's key of its version


def find_files(path: str, field: str = "data.path") -> list[InputFile]:
    """Return the files that a path names, sorted by path, without reading them.

    A path is "stdlib" (the source of this interpreter's standard library), a directory (every file under it, except
    hidden files and linked directories), a glob (`**` descends; a file counts once), one file, or the URL of any of
    these on a file system supported by fsspec (gs://, s3://, hf://). `field` is the name of the path in messages.

    Raises:
        InputError: no file is found, this installation has no standard library source, or a package is missing.
    """
    path = path.removeprefix("file://")
    if is_remote(path):
        found = _find_remote(path, field)
    elif path == STDLIB:
        found = list(map(_stat, _find_stdlib()))
    else:
        try:
            found = list(map(_stat, sorted(_find_local(Path(os.path.expanduser(path))), key=str)))
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
            raise InputError(f"{field} = {path!r}: cannot be read: {error}") from error
    if path == STDLIB and len(found) < _STDLIB_MIN_FILES:
        raise InputError(
            f"{field} = {STDLIB!r}: this Python has no standard library source to train on ({len(found)} .py files); "
            "name your own text with --config.data.path=<directory, file or glob>"
        )
    if not found:
        raise InputError(
            f"{field} = {path!r}: no files there; give a file, a directory or a glob that matches files, or {STDLIB!r}"
        )
    return found


def unique_files(found: Iterable[InputFile], excluded: Sequence[Path] = ()) -> list[InputFile]:
    """Return each file once, a pair of .bin and .idx as its .bin, without files under `excluded` directories."""
    files: dict[str, InputFile] = {}
    for file in found:
        prefix, suffix = os.path.splitext(file.path)
        if suffix.lower() == ".idx" and os.path.exists(f"{prefix}.bin"):
            file = _stat(Path(f"{prefix}.bin"))
        path = absolute(file.path)
        if not any(Path(path).is_relative_to(directory) for directory in excluded):
            files.setdefault(path, file)
    return list(files.values())


def is_remote(path: str) -> bool:
    """Return whether a path is a URL."""
    return "://" in path


def absolute(path: str) -> str:
    """Return a local path as an absolute path, and a URL unchanged."""
    return path if is_remote(path) else os.path.abspath(path)


@contextlib.contextmanager
def remote_errors(field: str, url: str) -> Iterator[None]:
    """Raise `InputError` for any error in the block: file systems define their own exceptions."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # ImportError names the missing package
        text = " ".join(str(error).split())
        raise InputError(f"{field} = {url!r}: cannot be read: {type(error).__name__}: {text}") from error


def _find_local(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    if root.is_dir():
        return [file for file in _walk(root) if file.is_file()]
    matches = sorted(glob.glob(str(root), recursive=True), reverse=True)
    unique = {os.path.realpath(match): Path(match) for match in matches}  # ** follows circular links: keep a file once
    return [file for file in unique.values() if file.is_file()]


def _find_remote(url: str, field: str) -> list[InputFile]:
    with remote_errors(field, url):
        system, path = fsspec.url_to_fs(url)
        found = system.glob(path, detail=True) if glob.has_magic(path) else system.find(path, detail=True)
        return [
            InputFile(system.unstrip_protocol(name), info["size"] or 0, system.ukey(name))
            for name, info in sorted(found.items())
            if info["type"] == "file" and not os.path.basename(name).startswith(".")
        ]


def _find_stdlib() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    files = (file for file in (_walk(root, _STDLIB_EXCLUDED) if root.is_dir() else ()) if file.suffix == ".py")
    # Debian links sitecustomize.py into /etc: a link to a file outside the tree is not part of Python.
    return sorted((file for file in files if file.is_file() and file.resolve().is_relative_to(root)), key=str)


def _walk(root: Path, excluded: Collection[str] = ()) -> Iterator[Path]:
    """Yield every file under root, except hidden files and files in linked directories."""

    def stop(error: OSError) -> None:
        raise error  # os.walk would otherwise skip an unreadable directory silently

    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in excluded]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _stat(file: Path) -> InputFile:
    stat = file.stat()
    return InputFile(str(file), stat.st_size, stat.st_mtime_ns)


def split_of(document: bytes, validation_fraction: float) -> Split:
    """Return the split of a document, which depends only on a hash of its content.

    Copies of a document are therefore always in the same split, independent of their names, locations and order. A
    document is its text, or its token ids as bytes.
    """
    hash_in_64_bits = int.from_bytes(hashlib.sha256(document).digest()[:8])
    return "validation" if hash_in_64_bits < validation_fraction * 2**64 else "train"
