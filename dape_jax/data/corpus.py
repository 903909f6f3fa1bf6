"""Paths -> files, and which side of the split a document falls on.

In: `config.data.path`, or the inputs of `prepare`. Out: the files that it names, in a fixed order. Next: `records`,
which reads them.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from dape_jax.errors import InputError

Split = Literal["train", "validation"]

STDLIB = "stdlib"
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_STDLIB_MIN_FILES = 100  # a whole one has more than a thousand; a zipped or stripped one a handful


def find_files(path: str, field: str = "data.path") -> list[tuple[str, Path]]:
    """The files that a path names, as (name, file) sorted by name; nothing is read yet.

    Args:
        path: "stdlib" (the source of this interpreter's own standard library), a directory (every file under it; hidden
            files and linked directories are left out), a glob (`**` descends; a file counts once), or one file.
        field: what the user knows the path as, for messages.

    Raises:
        InputError: nothing is there, or this installation carries no standard library source.
    """
    if path == STDLIB:
        return _find_stdlib(field)
    root = Path(os.path.expanduser(path))
    try:
        if root.is_file():
            found = [(root.name, root)]
        elif root.is_dir():
            found = [(file.relative_to(root).as_posix(), file) for file in _walk(root) if file.is_file()]
        else:
            matches = sorted(glob.glob(str(root), recursive=True), reverse=True)
            once = {os.path.realpath(match): Path(match) for match in matches}  # ** goes round and round a linked loop
            found = [(file.as_posix(), file) for file in once.values() if file.is_file()]
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise InputError(f"{field} = {path!r}: cannot be read: {error}") from error
    if not found:
        raise InputError(
            f"{field} = {path!r}: no files there; give a file, a directory or a glob that matches some, or {STDLIB!r}"
        )
    return sorted(found)


def _find_stdlib(field: str) -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    found = [
        (file.relative_to(root).as_posix(), file)
        for file in (_walk(root, leave_out=_STDLIB_LEFT_OUT) if root.is_dir() else ())
        # Debian links sitecustomize.py into /etc: a link that leaves the tree is no part of Python.
        if file.suffix == ".py" and file.is_file() and file.resolve().is_relative_to(root)
    ]
    if len(found) < _STDLIB_MIN_FILES:
        raise InputError(
            f"{field} = {STDLIB!r}: this Python has no standard library source to train on ({len(found)} .py files "
            f"under {root}); name your own text with --config.data.path=<directory, file or glob>"
        )
    return sorted(found)


def _walk(root: Path, leave_out: Iterable[str] = ()) -> Iterator[Path]:
    """Every file under root; hidden names are left out, and links to directories are not followed."""

    def stop(error: OSError) -> None:
        raise error  # os.walk would otherwise pass over an unreadable directory in silence

    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in leave_out]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def split_of(document: bytes, validation_fraction: float) -> Split:
    """The side a document falls on, decided by a hash of its content alone.

    Two copies of a text are therefore never on both sides, whatever their names, places and order.

    Args:
        document: the text, or token ids as bytes.
        validation_fraction: the share of the hashes that is held out for validation.
    """
    hash_in_64_bits = int.from_bytes(hashlib.sha256(document).digest()[:8])
    return "validation" if hash_in_64_bits < validation_fraction * 2**64 else "train"
