"""Paths in object storage, gs:// and s3://, and local paths; a lease replaces a lock in object storage.

A bucket has no rename, append or locks. Instead, writes are atomic, reads see the last write, and a write can be
conditional on the object's version.

A local path is a `pathlib.Path`, a path in a bucket an `epath.Path`. They have the same methods, but network errors
become `OSError`s only inside `bucket_errors()`, and outside `list_directory` a failed listing counts as empty.
"""

import contextlib
import errno
import functools
import glob
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import fsspec.config
from etils import epath
from typing_extensions import TypeIs

from dape_jax.errors import InputError, describe, exit_at_once, require, require_package

AnyPath = Path | epath.Path

LEASE_SECONDS = 60.0  # a run that could not renew its lease for this long stops
_RENEW_SECONDS = 10.0
_WATCH_SECONDS = 1.5 * LEASE_SECONDS  # a lease that was not renewed for this long is taken over
_ANSWER_SECONDS = LEASE_SECONDS / 3  # timeout of a renewal
_LOOK_SECONDS = 2.0  # interval between reads of another run's lease

_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # package for each scheme, for epath and fsspec
_EXTRAS = {"gs": "gcs", "s3": "s3"}
_LIBRARIES = {"aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "requests", "s3fs", "urllib3"}
_TENSORSTORE_ERRORS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED", "ABORTED")

logger = logging.getLogger(__name__)


# ---- paths


def to_path(text: str, field: str) -> AnyPath:
    """Parse a path given by a user: a local path, gs://bucket/path or s3://bucket/path.

    Raises:
        InputError: the scheme is not supported, the bucket is missing, or a package is not installed. The message names
            `field`.
    """
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    scheme, separator, rest = text.partition("://")
    if not separator:
        allowed = "must be a local path, gs://bucket/path or s3://bucket/path, with two slashes"
        require(re.match(r"[a-z][a-z0-9]+:/", text) is None, field, text, allowed)
        return Path(text)
    require(scheme in _PACKAGES, field, text, "must be a local path, gs://bucket/path or s3://bucket/path")
    require(bool(rest.strip("/")) and not rest.startswith("/"), field, text, f"must be {scheme}://bucket/path")
    require(not glob.has_magic(rest), field, text, "must not contain *, ? or [, which are patterns in a bucket")
    require_package(_PACKAGES[scheme], _EXTRAS[scheme], field, text)
    _prepare_libraries()
    return epath.Path(text)


def require_local(text: str, field: str) -> None:
    """Raise `InputError` for a URL: the path must be in the local file system."""
    require("://" not in text, field, text, "must be a local directory")


def is_remote(path: AnyPath) -> TypeIs[epath.Path]:
    """Return whether a path is in a bucket."""
    return "://" in os.fspath(path)


def absolute(path: AnyPath) -> AnyPath:
    """Return a local path as an absolute path, and a path in a bucket unchanged."""
    return path if is_remote(path) else path.absolute()


def list_directory(directory: AnyPath) -> list[str]:
    """Return the names in a directory, or [] if the directory does not exist.

    Raises:
        OSError: the directory cannot be read. (`exists` and `is_dir` of a path in a bucket would return False.)
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not is_remote(directory):
            return os.listdir(directory)
        with bucket_errors():
            system, path = fsspec.url_to_fs(os.fspath(directory))
            entries = [entry.rstrip("/") for entry in system.ls(path, detail=False)]
            return [os.path.basename(entry) for entry in entries if entry != path.rstrip("/")]
    return []


def exists(file: AnyPath) -> bool:
    """Return whether a file exists; True for a broken symbolic link.

    Raises:
        OSError: the file system cannot be read.
    """
    if not is_remote(file):
        return os.path.lexists(file)
    with bucket_errors():
        system, path = fsspec.url_to_fs(os.fspath(file))
        try:
            return bool(system.info(path))
        except FileNotFoundError:
            return False


def move_directory(source: AnyPath, target: AnyPath) -> None:
    """Rename a directory; in a bucket, copy its files and then delete them.

    Raises:
        OSError: the directory cannot be moved. In a bucket, a part of it may have been copied.
    """
    if not is_remote(source):
        os.rename(source, target)
        return
    with bucket_errors():
        system, path = fsspec.url_to_fs(os.fspath(source))
        moved = fsspec.url_to_fs(os.fspath(target))[1]
        for name in system.find(path):
            system.cp_file(name, moved + name.removeprefix(path))
        with contextlib.suppress(FileNotFoundError):  # the answer to the deletion was lost and the deletion repeated
            system.rm(path, recursive=True)


@contextlib.contextmanager
def bucket_errors() -> Iterator[None]:
    """Raise `OSError` for the exceptions that object storage libraries raise for network or permission errors."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if is_of_network(error):
            raise OSError(errno.EIO, " ".join(str(error).split())[:300] or type(error).__name__) from error
        raise


def is_of_network(error: BaseException) -> bool:
    """Return whether an error means that a bucket could not be reached or used, not that an object is damaged."""
    library = type(error).__module__.partition(".")[0]
    is_of_tensorstore = isinstance(error, ValueError) and str(error).startswith(_TENSORSTORE_ERRORS)
    return library in _LIBRARIES or is_of_tensorstore or isinstance(error, ConnectionError | TimeoutError)


@functools.cache
def _prepare_libraries() -> None:
    """Configure the libraries for buckets, before their first use.

    Listings are never cached: other processes may write to the directory. Orbax supports only TensorStore's driver for
    Google Cloud Storage; the S3 driver is added. gcsfs is prevented from checking, on every call, for a kind of bucket
    that is not used here. TensorStore has its own environment variable for the address of an emulator.
    """
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
    for protocol in ("gs", "gcs", "s3"):
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    fsspec.config.conf["s3"].setdefault("config_kwargs", {"retries": {"mode": "standard", "max_attempts": 8}})

    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    normalize, gcs_store = tensorstore_utils._normalize_path, gcs_utils.get_kvstore_for_gcs

    def store(path: str) -> dict[str, Any]:
        return _s3_store(path) if path.startswith("s3://") else gcs_store(path)

    tensorstore_utils._normalize_path = lambda path: normalize(path).replace("s3:/", "s3://", 1)
    tensorstore_utils._use_gcs_driver = lambda directory: directory.startswith(("gs://", "s3://"))
    gcs_utils.get_kvstore_for_gcs = store


def _s3_store(url: str) -> dict[str, Any]:
    """Return TensorStore's spec of a path in S3, with the settings that botocore reads from the environment."""
    bucket, _, path = url.removeprefix("s3://").partition("/")
    described: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
    region = os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION"))
    described |= {"endpoint": endpoint} if endpoint else {}
    described |= {"aws_region": region} if region else {}
    # Otherwise TensorStore first tries every other source of credentials, and logs that they have none.
    described |= {"aws_credentials": {"type": "environment"}} if "AWS_ACCESS_KEY_ID" in os.environ else {}
    return described


# ---- lease


class _ChangedError(Exception):
    """Error: the version of an object has changed since it was read."""


@contextlib.contextmanager
def lease(directory: epath.Path, field: str, name: str) -> Iterator[None]:
    """Hold a lease on a directory in a bucket until the block ends: the object `name` in it, renewed by a thread.

    The object is created, renewed and taken over only if its version is the one that was read last. A run that could
    not renew it for `LEASE_SECONDS`, or that finds another run's lease, exits immediately with status 1, without
    saving. The clocks of machines are never compared: a run takes over the lease of a killed run after observing for
    `1.5 LEASE_SECONDS` that it is not renewed. On the same machine, the end of the other process is detected.

    Raises:
        InputError: another run holds the lease, or the directory cannot be written to.
    """
    try:
        with bucket_errors():
            held = _Lease(directory / name)
            held.acquire(field)
    except OSError as error:
        raise InputError(f"{field} = {str(directory)!r}: cannot be written to: {describe(error)}") from error
    ended = threading.Event()
    renewing = threading.Thread(target=held.renew, args=(ended,), daemon=True, name="lease")
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        with contextlib.suppress(OSError, _ChangedError), bucket_errors():
            held.write(released=True)


class _Lease:
    """Object of a lease, with the version that was written last."""

    def __init__(self, file: epath.Path):
        self.file = file
        self.system, self.path = fsspec.url_to_fs(os.fspath(file))
        self.id, self.version = uuid.uuid4().hex, ""

    def acquire(self, field: str) -> None:
        """Write the object if it is missing, released or no longer renewed.

        Raises:
            InputError: another run holds the lease.
        """
        while True:
            with contextlib.suppress(_ChangedError):
                self.version = self.seen()
                if self.version:
                    self.wait_for_end(field)
                self.write()
                return

    def wait_for_end(self, field: str) -> None:
        """Wait until the run that holds the lease has ended, or its object has changed."""
        holder = self.holder()
        if holder["released"] or (holder["machine"] == _machine() and not Path(f"/proc/{holder['process']}").exists()):
            return
        name = f"process {holder['process']} on {holder['host']}"
        logger.warning(
            "%s: held by %s; it is taken over if it is not renewed for %d seconds", self.file, name, _WATCH_SECONDS
        )
        end = time.monotonic() + _WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            if (version := self.seen()) != self.version:
                if not version or self.holder()["released"]:
                    raise _ChangedError
                raise InputError(
                    f"{field} = {str(self.file.parent)!r}: in use by another process ({name}); wait for it, stop it or "
                    "choose another directory"
                )

    def renew(self, ended: threading.Event) -> None:
        """Write the object repeatedly until the event is set."""
        renewed = time.monotonic()
        while not ended.wait(_RENEW_SECONDS):
            begun = time.monotonic()
            try:
                with bucket_errors():
                    self.write()
                renewed = begun
            except _ChangedError:
                _end(f"{self.file}: another run has taken the directory over")
            except OSError as error:
                if time.monotonic() - renewed > LEASE_SECONDS:
                    _end(f"{self.file}: could not be renewed for {LEASE_SECONDS:.0f} seconds: {describe(error)}")

    def seen(self) -> str:
        """Return the version of the object, or "" if there is none."""
        with contextlib.suppress(FileNotFoundError):
            found = self.system.info(self.path)
            return str(found["generation"] if "generation" in found else found["ETag"])
        return ""

    def holder(self) -> dict[str, Any]:
        """Return the content of the object, which describes the holder."""
        nobody = {"host": "unknown", "process": 0, "machine": "", "released": False}
        try:
            return nobody | json.loads(self.system.cat_file(self.path))
        except (FileNotFoundError, ValueError, TypeError):
            return nobody

    def write(self, released: bool = False) -> None:
        """Replace the object if its version is the one that was read or written last.

        Raises:
            _ChangedError: the version has changed.
        """
        content = json.dumps(
            {
                "host": socket.gethostname(),
                "process": os.getpid(),
                "machine": _machine(),
                "released": released,
                "id": self.id,
                "written": uuid.uuid4().hex,  # makes every version unique
            }
        ).encode()
        try:
            with bucket_errors():
                self.version = self.put(content)
        except OSError as error:
            # A write with a late answer is retried: its first attempt may have changed the object.
            version = self.seen()
            if version and self.system.cat_file(self.path) == content:
                self.version = version
            elif version != self.version:
                raise _ChangedError from error
            else:
                raise

    def put(self, content: bytes) -> str:
        """Replace the object if its version is `self.version`; return the new version."""
        bucket, key = self.path.split("/", 1)
        if "s3" in self.system.protocol:
            condition = {"IfMatch": self.version} if self.version else {"IfNoneMatch": "*"}
            call = functools.partial(self.system._call_s3, "put_object", Bucket=bucket, Key=key, Body=content)
            written: Any = fsspec.asyn.sync(self.system.loop, call, **condition, timeout=_ANSWER_SECONDS)
            return str(written["ETag"])
        url = f"{self.system._location}/upload/storage/v1/b/{bucket}/o"
        call = functools.partial(self.system._call, "POST", url, uploadType="media", name=key, json_out=True)
        condition = {"ifGenerationMatch": self.version or "0"}
        written = fsspec.asyn.sync(self.system.loop, call, **condition, data=content, timeout=_ANSWER_SECONDS)
        return str(written["generation"])


def _end(reason: str) -> None:
    """Exit the process: another run may own the directory."""
    exit_at_once(1, f"{reason}; the same command resumes from the newest checkpoint")


def _machine() -> str:
    """Return an identifier of this boot of the machine and of this container, or a unique one if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex
