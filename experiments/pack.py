"""Convert run files of earlier versions, RESULTS/EXPERIMENT/GROUP/NAME.json, to `runs.jsonl.zst`; compare all numbers.

python -m experiments.pack OLD NEW      # also compares, if NEW has the runs already
"""

import sys
from pathlib import Path

from dape_jax.errors import InputError
from dape_jax.files import read_json
from experiments.catalogue import EXPERIMENTS
from experiments.runs import FILE, Run, read_runs, run_name, write_lines


def old_runs(results: Path) -> dict[str, dict[tuple[str, str], Run]]:
    """Return the runs of the earlier layout, by experiment, and by group and name."""
    return {
        name: {
            (file.parent.name, file.stem): read_json(file) for file in sorted((results / name).glob("*/*-seed*.json"))
        }
        for name in EXPERIMENTS
    }


def main(old: Path, new: Path) -> None:
    """Write the runs that NEW lacks, read NEW, and compare every value with OLD."""
    expected, stored_in = old_runs(old), {}
    for name, runs in expected.items():
        lines = []
        for (group, stem), run in runs.items():
            if run_name(run) != stem:
                raise InputError(f"{old / name / group / stem}.json: is the run {run_name(run)}")
            stored = {"key": run["key"], "stored_in": stored_in[run["key"]]} if run["key"] in stored_in else run
            stored_in.setdefault(run["key"], name)
            lines.append({"group": group, "name": stem, **stored})
        if lines and not (new / name / FILE).exists():
            (new / name).mkdir(parents=True, exist_ok=True)
            write_lines(new / name / FILE, lines)
    found = read_runs(new)
    for name, runs in expected.items():
        read = {(group, stem): run for group, of_group in found[name].items() for stem, run in of_group.items()}
        differing = [key for key in runs.keys() | read.keys() if runs.get(key) != read.get(key)]
        if differing:
            raise InputError(f"{new / name}: differs from {old / name} in {differing}")
    print(f"{sum(map(len, expected.values()))} runs, {len(stored_in)} of them distinct: equal in {old} and {new}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
