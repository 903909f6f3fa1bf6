"""Provenance of a result: commit, command, device and versions, stored with every figure."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax


def provenance(*packages: str) -> dict[str, Any]:
    """Return commit, command, device and versions as JSON values.

    The time is left out, so that equal runs write equal files.

    Args:
        packages: packages whose versions are recorded, in addition to jax.
    """
    return {
        "commit": _commit(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("jax", *packages)},
    }


def _commit() -> str:
    """Return the commit of the source, with -dirty if files were changed, or "unknown" outside a git clone."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
