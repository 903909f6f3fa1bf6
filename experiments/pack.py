"""Convert run files of earlier versions, RESULTS/EXPERIMENT/GROUP/NAME.json, to `runs.jsonl.zst`; compare all numbers.

python -m experiments.pack OLD NEW      # also compares, if NEW has the runs already; OLD may have either layout
"""

import sys
from pathlib import Path

from dape_jax.errors import InputError
from dape_jax.files import read_json
from experiments.catalogue import EXPERIMENTS
from experiments.runs import FILE, Run, read_runs, write_lines


def old_runs(results: Path, name: str) -> dict[str, dict[str, Run]]:
    """Return the runs of an experiment in the earlier layout, by group and name."""
    found: dict[str, dict[str, Run]] = {}
    for file in sorted((results / name).glob("*/*-seed*.json")):
        found.setdefault(file.parent.name, {})[file.stem] = read_json(file)
    return found


def main(old: Path, new: Path) -> None:
    """Write the runs that NEW lacks, read NEW, and compare every value with OLD."""
    packed, stored_in = read_runs(old), {}
    expected = {name: old_runs(old, name) or packed[name] for name in EXPERIMENTS}
    for name, groups in expected.items():
        lines = []
        for group, runs in groups.items():
            for stem, run in runs.items():
                first = stored_in.setdefault(run["key"], (name, group, stem))
                stored = run if first == (name, group, stem) else {"key": run["key"], "stored_in": first[0]}
                lines.append({"group": group, "name": stem, **stored})
        if lines and not (new / name / FILE).exists():
            (new / name).mkdir(parents=True, exist_ok=True)
            write_lines(new / name / FILE, lines)
    found = read_runs(new)
    for name in (name for name in EXPERIMENTS if found[name] != expected[name]):
        raise InputError(f"{new / name}: differs from {old / name}")
    number = sum(len(runs) for groups in expected.values() for runs in groups.values())
    print(f"{number} runs, {len(stored_in)} of them distinct: equal in {old} and {new}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
