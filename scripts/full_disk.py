"""Fill the disk at many different times of a run, and check that the run can be resumed.

    sudo .venv/bin/python scripts/full_disk.py --count=50 --output=results/survival

A tiny run trains in an in-memory file system, which is too small. `--count` sizes, up to the size of the run, make
different writes fail. Allowed outcomes:

    refused      an error of one line, before or during training; after the file system is enlarged, the same command
                 ends with a checkpoint bitwise equal to that of a run with enough space
    equal        the space is enough, and the last checkpoint is bitwise equal

Any other outcome is reported, and the exit status is 1. The counts are written to OUTPUT/full_disk.json. Mounting a
file system needs root.
"""

import collections
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corrupt import Runner, digests, outcome, train_arguments
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.errors import require
from dape_jax.files import write_json
from dape_jax.provenance import make_results_directory, provenance

BLOCK = 4096  # sizes are multiples of this number of bytes
ENOUGH = 2**26  # bytes, more than the run needs


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    count: int = flag(50, "Number of file system sizes to try.")
    output: str = flag("results/survival", "Directory of the JSON.")

    def __post_init__(self):
        require(self.count > 0, "--count", self.count, "must be positive")


@contextlib.contextmanager
def mounted(directory: Path, size: int) -> Iterator[None]:
    """Mount an in-memory file system of `size` bytes, and unmount it at the end of the block."""
    mount(directory, f"size={size}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def mount(directory: Path, options: str) -> None:
    """Mount an in-memory file system, or remount it with another size."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    subprocess.run(command, check=True, capture_output=True)


def main(_: list[str]) -> None:
    """Run with each size, and write the counts."""
    settings = from_flags(Settings)
    require(os.geteuid() == 0, "user", os.geteuid(), "must be 0: only root can mount a file system")
    directory = make_results_directory(Path(settings.output))
    scratch = Path(tempfile.mkdtemp(prefix="full_disk_"))  # a TemporaryDirectory would be removed by each fork
    try:
        result = full_disk(scratch, settings)
    finally:
        shutil.rmtree(scratch)
    result["provenance"] = provenance("orbax-checkpoint", "flax", "grain", "optax")
    write_json(directory / "full_disk.json", result)
    print(json.dumps({name: result[name] for name in ("count", "bytes_needed", "outcomes", "last_lines")}, indent=1))
    if result["not_allowed"]:
        sys.exit(1)


def full_disk(scratch: Path, settings: Settings) -> dict[str, Any]:
    """Return the counts of outcomes, and the forbidden outcomes."""
    count, text, disk = settings.count, scratch / "text", scratch / "disk"
    text.mkdir()
    disk.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"{number} scores of queries and keys, " * 40)
    runner = Runner(scratch, settings)
    arguments = [
        f"--config.data.cache_dir={disk}/data" if "cache_dir" in argument else argument
        for argument in train_arguments(scratch, disk / "run")
    ]
    with mounted(disk, ENOUGH):
        status, said = runner.run(*arguments)
        if status != 0:
            raise RuntimeError(f"the run with enough space fails:\n{said}")
        expected, needed = digests(disk / "run"), shutil.disk_usage(disk).used

    counts, lines, not_allowed = collections.Counter(), collections.Counter(), []
    for number in tqdm(range(count), unit="size"):
        size = max(1, needed * (number + 1) // count // BLOCK) * BLOCK
        with mounted(disk, size):
            status, said = runner.run(*arguments)
            found, last = outcome(status, said), said.strip().splitlines()[-1]
            if found == "one line":
                mount(disk, f"remount,size={ENOUGH}")
                again, said_again = runner.run(*arguments)
                is_equal = outcome(again, said_again) == "ended" and digests(disk / "run") == expected
                found = "refused" if is_equal else f"refused, then {outcome(again, said_again)}"
                said += said_again
                lines[re.sub(r"\d[\d,.]*", "N", last.replace(str(scratch), ""))] += 1
            elif found == "ended":
                found = "equal" if digests(disk / "run") == expected else "other bits"
        counts[found] += 1
        if found not in ("refused", "equal"):
            shown = [line for line in re.split(r"[\r\n]", said) if line.strip() and "%|" not in line]
            not_allowed.append({"bytes": size, "outcome": found, "said": shown[-6:]})
            tqdm.write(f"{size} bytes: {found}: {shown[-1]}")
    return {
        "count": count,
        "bytes_needed": needed,
        "outcomes": dict(sorted(counts.items())),
        "last_lines": dict(lines.most_common()),
        "not_allowed": not_allowed,
    }


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
