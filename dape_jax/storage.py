"""Paths given by users: local, gs://bucket/path or s3://bucket/path, all `etils.epath.Path`; the marker of a run.

A bucket has no locks. A run that writes to a directory in a bucket keeps the object `run.lock` there: its host, process
and time, written again every minute. Two runs that start within the same second do not see each other at first; the
one whose marker was replaced ends within a minute.
"""

import contextlib
import glob
import json
import os
import re
import socket
import time
from pathlib import Path

import fsspec.config
from etils import epath

from dape_jax.errors import InputError, require, require_package

_PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}  # package of each scheme for fsspec, and its extra
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
        return epath.Path(scheme)
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


def names_in(directory: epath.Path) -> list[str]:
    """Return the names in a directory, or [] if it does not exist; an error of the network is raised."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [path.name for path in directory.iterdir()]
    return []


class Marker:
    """Object in a bucket that names the run that writes to its directory, from the start to the end of a block.

    A marker that was not written for ten minutes is ignored, and one of a process of this host that has ended.
    """

    def __init__(self, file: epath.Path, field: str):
        self.file, self.field, self.written_at = file, field, -_WRITE_SECONDS
        self.mine = {"host": socket.gethostname(), "process": os.getpid()}

    def __enter__(self) -> "Marker":
        self.refresh()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._other():
            self.file.unlink()

    def refresh(self) -> None:
        """Write the object if a minute has passed since it was written.

        Raises:
            InputError: it is the marker of another run. The caller must not write to the directory.
        """
        if time.monotonic() - self.written_at >= _WRITE_SECONDS:
            if other := self._other():
                message = (
                    f"in use by another run ({other}); if that run has ended, delete {self.file} or wait 10 minutes"
                )
                raise InputError(f"{self.field} = {str(self.file.parent)!r}: {message}")
            self.file.write_bytes(json.dumps(self.mine | {"time": time.time()}).encode())
            self.written_at = time.monotonic()

    def _other(self) -> str:
        """Return the process of another run that wrote the object, or ""."""
        try:
            found = json.loads(self.file.read_bytes())
        except FileNotFoundError:
            return ""
        is_old = time.time() - found.get("time", 0) > MARKER_SECONDS  # 0: written by an older version
        is_here = found["host"] == self.mine["host"]
        has_ended = is_here and (found["process"] == os.getpid() or not Path(f"/proc/{found['process']}").exists())
        return "" if is_old or has_ended else f"process {found['process']} on {found['host']}"
