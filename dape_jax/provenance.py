"""Provenance of a result: commit, command, device and versions, stored with the result; and the starts of a run.

`starts.jsonl` in a run's directory has a line for each start, with the same `id`, which external services use.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from etils import epath

from dape_jax.errors import InputError, require
from dape_jax.files import parse_json, write_atomically
from dape_jax.storage import absolute, is_remote

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "jaxlib", "flax", "grain", "optax", "orbax-checkpoint")  # versions must be equal on all processes
ALLOW_DIRTY = "DAPE_ALLOW_DIRTY_RESULTS"
STARTS_FILE = "starts.jsonl"
COMMIT = "DAPE_COMMIT"  # commit of a copy of the source that is not a git clone


def provenance(*packages: str) -> dict[str, Any]:
    """Return commit, command, device and versions as JSON values.

    The time is left out, so that equal runs write equal files.

    Args:
        packages: packages whose versions are recorded, in addition to jax.
    """
    return {
        "commit": commit(),
        "command": command(),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("jax", *packages)},
    }


def describe(facts: dict[str, Any]) -> str:
    """Return a line on where a run runs, from `provenance` with the fields `dtype`, `attention` and `num_processes`."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    device = f"{facts['num_devices']} x {facts['device']}"
    device += "" if facts["platform"] == facts["device"] else f" ({facts['platform']})"
    device += f" of {facts['num_processes']} processes" if facts["num_processes"] > 1 else ""
    return f"{device}, {facts['dtype']}, attention {facts['attention']}, {versions}"


def record_start(workdir: epath.PathLike, step: int, facts: dict[str, Any]) -> None:
    """Add a line to `STARTS_FILE`, with the id of the run, which is drawn for the first line."""
    file = epath.Path(workdir) / STARTS_FILE
    before = file.read_bytes() if file.exists() else b""
    chosen = run_id(workdir) if before else uuid.uuid4().hex[:16]
    write_atomically(file, before + f"{json.dumps({'id': chosen, 'step': step} | facts)}\n".encode())


def run_id(workdir: epath.PathLike) -> str:
    """Return the id of the run in a directory, which a moved or copied directory keeps."""
    file = epath.Path(workdir) / STARTS_FILE
    return parse_json(str(file), file.read_bytes().splitlines()[0])["id"]


def command() -> str:
    """Return the command that started this process: `python train.py ...`, or `dape-train ...` for an entry point."""
    arguments = sys.orig_argv[1:]
    if arguments and Path(arguments[0]).name.startswith("dape-"):
        return " ".join([Path(arguments[0]).name, *arguments[1:]])
    return " ".join(["python", *arguments])


def package_versions() -> dict[str, str]:
    """Return the versions of this package and of `PACKAGES`.

    The version of this package includes a digest of its source, because a git clone has the same version at all
    commits.
    """
    found = {}
    for name in ("dape_jax", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # the clone is not installed
            found[name] = "not installed"
    source = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        source.update(file.read_bytes())
    found["dape_jax"] += f", source {source.hexdigest()[:12]}"
    return found


def make_results_directory(directory: epath.PathLike, field: str = "output") -> epath.Path:
    """Create a directory for results before the work begins, and return it.

    Args:
        directory: any directory. Results in the repository's results/ are committed, so they must be reproducible from
            a commit.
        field: name of the flag or argument with the directory, for messages.

    Raises:
        InputError: the directory cannot be written to; or it is in results/, the source has uncommitted changes, and
            the environment variable `DAPE_ALLOW_DIRTY_RESULTS` is not 1.
    """
    path = epath.Path(directory)
    if absolute(path).is_relative_to(ROOT / "results") and not os.environ.get(ALLOW_DIRTY):
        allowed = f"commit the changes, choose a directory outside results/, or set {ALLOW_DIRTY}=1"
        clean = not commit().endswith("-dirty")
        require(clean, field, str(directory), f"the source has uncommitted changes; {allowed}")
    try:
        if not is_remote(path):  # a bucket has no directories
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise InputError(f"{field} = {str(directory)!r}: cannot be written to: {error}") from error
    return path


def commit() -> str:
    """Return the commit of the source; if it is not a git clone, the environment variable `DAPE_COMMIT`, or "unknown".

    The suffix -dirty is added if tracked files have changed, except in results/: a command may write several results,
    and the first must not mark the next as dirty.
    """
    if not (ROOT / ".git").exists():  # installed: git would describe a repository around the environment
        return os.environ.get(COMMIT, "unknown")
    try:
        name = _git("describe", "--always", "--exclude=*").strip()
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changes else name


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
