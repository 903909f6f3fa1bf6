"""Files that survive interruptions: atomic writes, JSON with digests, exclusive locks."""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import filelock
from etils import epath

from dape_jax.errors import InputError, require
from dape_jax.storage import is_remote

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that git lfs has not downloaded


@contextlib.contextmanager
def name_errors(path: epath.PathLike) -> Iterator[None]:
    """Name `path` in an `OSError` of the block that names no file, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(file: epath.PathLike, content: bytes) -> None:
    """Write a file atomically: readers see the old or the new content, even after a power failure.

    Raises:
        OSError: the directory is missing, not writable or full; the old content is kept.
    """
    file = epath.Path(file)
    if is_remote(file):  # objects are replaced atomically
        file.write_bytes(content)
        return
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex}.partial")
    try:
        with name_errors(file), open(partial, "xb") as opened:  # x: follow no symbolic link of another user
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, file)
    finally:
        with contextlib.suppress(OSError):  # after the rename there is nothing to remove
            partial.unlink()


def write_json(file: epath.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, atomically; see `write_atomically`."""
    write_atomically(file, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_json(file: epath.PathLike) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        InputError: the file cannot be read, or is not a JSON object.
    """
    try:
        return parse_json(str(file), epath.Path(file).read_bytes())
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
        is_pointer = content.startswith(LFS_POINTER)
        advice = "; it is a pointer of git lfs, to download the file: git lfs pull" if is_pointer else ""
        raise InputError(f"{file}: cannot be read as JSON: {error}{advice}") from error
    require(type(value) is dict, file, type(value).__name__, "must be a JSON object")
    return value


def json_digest(value: Any) -> str:
    """Return the SHA-256 of `value` as JSON with sorted keys, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def exclusive_lock(directory: epath.PathLike, field: str, lock_file: str = "lock") -> Iterator[None]:
    """Hold an exclusive lock on a local directory, creating it if missing, until the block ends or the process dies.

    Args:
        directory: directory to lock.
        field: name of the flag or argument with the directory, for messages.
        lock_file: name of the file in the directory that is locked. The file is not deleted.

    Raises:
        InputError: another process holds the lock, or the directory cannot be written to.
    """
    lock = filelock.FileLock(os.path.join(directory, lock_file), timeout=0)
    try:
        epath.Path(directory).mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        advice = "in use by another process; wait for it, stop it or choose another directory"
        raise InputError(f"{field} = {str(directory)!r}: {advice}") from error
    except OSError as error:
        raise InputError(f"{field} = {str(directory)!r}: cannot be written to: {error}") from error
    try:
        yield
    finally:
        lock.release()
