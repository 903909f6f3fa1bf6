"""Provenance of a result: commit, command, device and versions, stored with every figure."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from dape_jax.errors import InputError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
ALLOW_DIRTY = "DAPE_ALLOW_DIRTY_RESULTS"


def provenance(*packages: str) -> dict[str, Any]:
    """Return commit, command, device and versions as JSON values.

    The time is left out, so that equal runs write equal files.

    Args:
        packages: packages whose versions are recorded, in addition to jax.
    """
    return {
        "commit": commit(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("jax", *packages)},
    }


def require_committed(directory: Path) -> None:
    """Check, before work that writes to the repository's results/, that the commit stored with them made them.

    Args:
        directory: where results will be written; every directory outside of results/ is accepted.

    Raises:
        InputError: the source has changes that are not committed, and the environment does not allow them.
    """
    if not directory.absolute().is_relative_to(RESULTS) or os.environ.get(ALLOW_DIRTY):
        return
    if commit().endswith("-dirty"):
        raise InputError(
            f"output = {str(directory)!r}: the source has uncommitted changes, so no commit would name what made these "
            f"results; commit the changes, choose a directory outside of results/, or set {ALLOW_DIRTY}=1"
        )


def commit() -> str:
    """Return the commit of the source, or "unknown" if it is not a git clone.

    With -dirty if tracked files were changed, except in results/: one command can write several results there.
    """
    if not (ROOT / ".git").exists():  # installed: git would describe a repository around the environment
        return "unknown"
    try:
        name = _git("describe", "--always", "--exclude=*").stdout.strip()
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results").stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changes else name


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
