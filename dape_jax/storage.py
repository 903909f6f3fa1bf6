"""Paths given by users: local, gs://bucket/path or s3://bucket/path, all `etils.epath.Path`; and files of a run.

A bucket has no locks. A run that writes to a directory in a bucket keeps the object `run.lock` there: its host, process
and time, written again every minute. Two runs that start within the same second do not see each other at first; the
one whose marker was replaced ends within a minute.
"""

import contextlib
import glob
import json
import logging
import math
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec.config
from etils import epath

from dape_jax.errors import InputError, require, require_package

_PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}  # package of each scheme for fsspec, and its extra
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs the traceback of each error that it raises
MARKER_SECONDS, _WRITE_SECONDS = 600, 60  # age from which a marker is ignored; interval between writes


def to_path(text: str, field: str) -> epath.Path:
    """Parse a path given by a user: a local path, gs://bucket/path or s3://bucket/path.

    Raises:
        InputError: the scheme is not supported, the bucket is missing, or a package is not installed. The message names
            `field`.
    """
    scheme, separator, rest = text.removeprefix("file://").partition("://")
    allowed = "must be a local path, gs://bucket/path or s3://bucket/path"
    if not separator:
        require(re.match(r"[a-z][a-z0-9]+:/", scheme) is None, field, text, f"{allowed}, with two slashes")
        return epath.Path(os.path.expanduser(scheme))  # a shell leaves the ~ of --workdir=~/runs as it is
    require(scheme in _PACKAGES, field, text, allowed)
    require(bool(rest.strip("/")) and not rest.startswith("/"), field, text, f"must be {scheme}://bucket/path")
    require(not glob.has_magic(rest), field, text, "must not contain *, ? or [, which are patterns in a bucket")
    require_package(*_PACKAGES[scheme], field, text)
    for protocol in ("gs", "gcs", "s3"):  # other processes and TensorStore write to the same directories
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    return epath.Path(text)


def require_local(text: str, field: str) -> None:
    """Raise `InputError` for a URL: the path must be in the local file system."""
    require("://" not in text, field, text, "must be a local directory")


def is_remote(path: epath.PathLike) -> bool:
    """Return whether a path is in a bucket."""
    return "://" in os.fspath(path)


def absolute(path: epath.PathLike) -> epath.Path:
    """Return a local path as an absolute path, and a path in a bucket unchanged."""
    return epath.Path(path) if is_remote(path) else epath.Path(path).absolute()


@contextlib.contextmanager
def read_errors(field: str, path: str, work: str = "read") -> Iterator[None]:
    """Raise `InputError` for any error in the block: file systems define their own exceptions."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # ImportError names the missing package
        text = " ".join(str(error).split())
        raise InputError(f"{field} = {path!r}: cannot be {work}: {type(error).__name__}: {text}") from error


def names_in(directory: epath.Path) -> list[str]:
    """Return the names in a directory, or [] if it does not exist; an error of the network is raised."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [path.name for path in directory.iterdir()]
    return []


class AppendedFiles(contextlib.ExitStack):
    """Files of a run directory that are appended to: logs, metrics, traces.

    An object in a bucket cannot be appended to. For a bucket, `local` is a temporary directory, and `upload` copies the
    files that have grown.
    """

    def __init__(self, workdir: epath.PathLike):
        super().__init__()
        self.workdir, self.sizes, self.is_bucket = epath.Path(workdir), dict[Path, int](), is_remote(workdir)
        temporary = [self.enter_context(tempfile.TemporaryDirectory())] if self.is_bucket else []
        self.local = epath.Path(*temporary or [workdir])
        self.callback(self.upload)

    def earlier(self, name: str) -> epath.Path:
        """Return the local path of a file of the run directory; it has the content of earlier starts, if any."""
        file = self.workdir / name
        if self.is_bucket and file.exists():
            (self.local / name).write_bytes(file.read_bytes())
        return self.local / name

    def upload(self) -> None:
        """Copy files that have grown to the bucket."""
        for file in filter(Path.is_file, Path(self.local).rglob("*") if self.is_bucket else ()):
            size = file.stat().st_size
            if self.sizes.get(file) != size:
                (self.workdir / file.relative_to(self.local)).write_bytes(file.read_bytes())
                self.sizes[file] = size


@contextlib.contextmanager
def run_marker(file: epath.Path) -> Iterator[Callable[[], None]]:
    """Keep an object in a bucket that names the run that writes to its directory, until the block ends.

    Yields a function that writes the object again if a minute has passed. A marker that was not written for ten minutes
    is ignored, and one of a process of this host that has ended.

    Raises:
        InputError: it is the marker of another run; also raised by the function. The caller must not write to the
            directory.
    """
    mine = {"host": socket.gethostname(), "process": os.getpid()}
    written_at = -math.inf

    def refresh() -> None:
        nonlocal written_at
        if time.monotonic() - written_at >= _WRITE_SECONDS:
            other = _other_run(file)
            advice = f"in use by another run ({other}); if that run has ended, delete {file} or wait 10 minutes"
            require(not other, "workdir", str(file.parent), advice)
            file.write_bytes(json.dumps(mine | {"time": time.time()}).encode())
            written_at = time.monotonic()

    refresh()
    try:
        yield refresh
    finally:
        if not _other_run(file):
            file.unlink(missing_ok=True)


def _other_run(file: epath.Path) -> str:
    """Return the process of another run that wrote the marker, or ""."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return ""
    is_old = time.time() - found.get("time", 0) > MARKER_SECONDS  # 0: written by an older version
    is_here = found["host"] == socket.gethostname()
    has_ended = is_here and (found["process"] == os.getpid() or not Path(f"/proc/{found['process']}").exists())
    return "" if is_old or has_ended else f"process {found['process']} on {found['host']}"
