"""Files that survive interruptions: atomic writes, JSON with digests, exclusive locks."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dape_jax.errors import InputError, require
from dape_jax.storage import AnyPath, bucket_errors, is_remote

logger = logging.getLogger(__name__)


def write_atomically(file: AnyPath, content: bytes) -> None:
    """Write a file atomically: readers see the old or the new content, even after a power failure.

    Raises:
        OSError: the directory is missing, not writable or full; the old content is kept.
    """
    if is_remote(file):  # objects are replaced atomically
        with bucket_errors():
            file.write_bytes(content)
        return
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "xb") as opened:  # x: do not follow a symbolic link created by another user
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, file)
        sync_directory(file.parent)
    finally:
        with contextlib.suppress(OSError):  # after the rename there is nothing to remove
            partial.unlink()


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk, so that a rename in it survives a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(file: AnyPath, value: Any) -> None:
    """Write `value` as indented JSON, atomically; see `write_atomically`."""
    write_atomically(file, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_bytes(file: AnyPath) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with bucket_errors():
        return file.read_bytes()


def read_json(file: AnyPath) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        InputError: the file cannot be read, or is not a JSON object.
    """
    try:
        return parse_json(str(file), read_bytes(file))
    except OSError as error:
        raise InputError(f"{file}: cannot be read as JSON: {error}") from error


def parse_json(file: str, content: bytes) -> dict[str, Any]:
    """Parse the content of `file` as a JSON object.

    Raises:
        InputError: the content is not a JSON object.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON: {error}") from error
    require(type(value) is dict, file, type(value).__name__, "must be a JSON object")
    return value


def json_digest(value: Any) -> str:
    """Return the SHA-256 of `value` as JSON with sorted keys, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def exclusive_lock(directory: Path, field: str, lock_file: str = "lock") -> Iterator[None]:
    """Hold an exclusive lock on `directory`, creating it if missing, until the block ends or the process dies.

    Args:
        directory: directory to lock.
        field: name of the flag or argument with the directory, for messages.
        lock_file: name of the file in the directory that is locked. The file is not deleted; its content identifies
            the process that holds the lock. A symbolic link is rejected: another user could have chosen its target.

    Raises:
        InputError: another process holds the lock, or the directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise InputError(f"{field} = {str(directory)!r}: cannot be written to: {error}") from error
    try:
        _lock(descriptor, directory, field, lock_file)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def waiting_lock(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, creating it if missing, after waiting for the current holders on this machine.

    Raises:
        OSError: the file cannot be created. (On a file system without locks, this does not wait.)
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path, field: str, lock_file: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have renamed the directory, and this file with it, since it was opened.
        is_current = os.path.samestat(os.fstat(descriptor), os.lstat(directory / lock_file))
    except (BlockingIOError, FileNotFoundError):
        is_current = False
    except OSError as error:
        logger.warning("%s: the file system has no locks (%s); two runs in it are not detected", directory, error)
        return
    if not is_current:
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
        raise InputError(
            f"{field} = {str(directory)!r}: in use by another process{holder and f' ({holder})'}; wait for it, stop it "
            "or choose another directory"
        )
    with contextlib.suppress(OSError):  # the content is only for the message above; other writes report a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
