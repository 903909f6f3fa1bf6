"""On what, and with what, a result was made: stands beside every figure that the project writes."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax


def provenance(*packages: str) -> dict[str, Any]:
    """Commit, command, device and versions, for JSON. No time of day, so that equal runs leave equal files.

    Args:
        packages: whose versions matter, besides jax.
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
    """The commit of the source, with -dirty if it was changed since; "unknown" outside a clone."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
