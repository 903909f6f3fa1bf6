"""Paths -> input files, in a fixed order.

In: the paths given to `prepare`. Out: the files that they name. Next: `records`, which reads them.
"""

import glob
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import fsspec

from dape_jax.data.store import SIDECAR_FILE, STDLIB, Split
from dape_jax.errors import require
from dape_jax.storage import is_remote, read_errors


class InputFile(NamedTuple):
    """Input file, with the properties that show whether it has changed."""

    path: str  # absolute path, or URL
    num_bytes: int
    version: int | str  # modification time in ns; for a remote file, fsspec's key of its version
    split: Split | None = None  # of its documents; None: chosen for each document
    is_alone: bool = False  # no other file has the same `split`


def find_files(paths: Iterable[str], excluded: Collection[Path] = (), field: str = "input") -> list[InputFile]:
    """Return the files that paths name, without reading them: sorted for each path, and every file once.

    A path is "stdlib" (the source of this interpreter's standard library), a directory (every file under it, except
    hidden files and linked directories), a glob (`**` descends), one file, or the URL of any of these on a file system
    supported by fsspec (gs://, s3://, hf://). A pair of .bin and .idx counts as its .bin. Files under the `excluded`
    directories are left out.

    Raises:
        InputError: a path has no files, or cannot be read. The message names `field`.
    """
    files: dict[str, InputFile] = {}
    for path in paths:
        with read_errors(field, path):
            found = _find_remote(path) if is_remote(path) else map(_stat, _find_local(path))
            kept = [file for file in found if not any(Path(file.path).is_relative_to(each) for each in excluded)]
        corpora = sorted({os.path.dirname(file.path) for file in kept if os.path.basename(file.path) == SIDECAR_FILE})
        allowed = f"must be text, not a prepared corpus, as in {corpora[:1]}: train on that with --config.data.path"
        require(not corpora, field, path, allowed)
        allowed = f"no files there; give a file, a directory or a glob that matches files, or {STDLIB!r}"
        require(len(kept) > 0, field, path, allowed)
        for file in kept:
            files.setdefault(file.path, file)
    return list(files.values())


def _find_remote(url: str) -> list[InputFile]:
    system, path = fsspec.url_to_fs(url)
    found = system.glob(path, detail=True) if glob.has_magic(path) else system.find(path, detail=True)
    return [
        InputFile(system.unstrip_protocol(name), info["size"] or 0, system.ukey(name))
        for name, info in sorted(found.items())
        if info["type"] == "file" and not os.path.basename(name).startswith(".")
    ]


def _find_local(path: str) -> list[str]:
    root = os.path.abspath(os.path.expanduser(path))
    if path == STDLIB:
        root = os.path.realpath(sysconfig.get_path("stdlib"))
        found = [file for file in _walk(root, ("site-packages", "dist-packages")) if file.endswith(".py")]
        # Debian links sitecustomize.py into /etc: a link to a file outside the tree is not part of Python.
        found = [file for file in found if Path(os.path.realpath(file)).is_relative_to(root)]
    elif os.path.isdir(root):
        found = list(_walk(root))
    elif os.path.exists(root):
        found = [root]
    else:
        matches = sorted(glob.glob(root, recursive=True), reverse=True)
        found = {os.path.realpath(match): match for match in matches}.values()  # ** follows circular links
    return sorted(file for file in found if os.path.isfile(file))


def _walk(root: str, excluded: Collection[str] = ()) -> Iterator[str]:
    """Yield every file under root, except hidden files and files in linked directories."""

    def stop(error: OSError) -> None:
        raise error  # os.walk would otherwise skip an unreadable directory silently

    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in excluded]
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def _stat(path: str) -> InputFile:
    prefix, suffix = os.path.splitext(path)
    if suffix.lower() == ".idx" and os.path.exists(f"{prefix}.bin"):
        path = f"{prefix}.bin"
    stat = os.stat(path)
    return InputFile(path, stat.st_size, stat.st_mtime_ns)
