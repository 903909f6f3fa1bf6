"""Plan the paper's four model sizes, DAPE1x3-Kerple, on v5e.

    python scripts/plan_sizes.py [NAME ..]

Runs `python -m dape_jax.planning` for all plans below, or for the given names. Writes plan.json and plan.md to
results/planning/NAME, and results/planning/table.md from all existing plans. Takes 15 to 40 minutes on two cores.
"""

import json
import subprocess
import sys
from pathlib import Path

from dape_jax import command_line
from dape_jax.errors import require
from dape_jax.hardware import GIB

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "results" / "planning"

# Name: argument of configs/paper.py, slice and mesh.
PLANS = {
    "125m": ("125m", "v5e:2x2", "fsdp=4"),
    "125m-blockwise": ("125m,attention=blockwise", "v5e:2x2", "fsdp=4"),
    "125m-T8192": ("125m,train_length=8192,batch=4", "v5e:2x2", "fsdp=4"),
    "350m": ("350m", "v5e:4x4", "fsdp=16"),
    "2.7b": ("2.7b", "v5e:8x8", "fsdp=64"),
    "6.7b": ("6.7b", "v5e:16x16", "fsdp=256"),
    "6.7b-T4096": ("6.7b,train_length=4096,batch=64", "v5e:16x16", "fsdp=64,context=4"),
}
METHOD = "bias=kerple,processor=dape,kernel=3"


def plan(name: str) -> None:
    """Run the planner, which prints its progress. If it fails, exit with its status."""
    argument, topology, mesh = PLANS[name]
    command = ["-m", "dape_jax.planning", f"--config=configs/paper.py:{argument},{METHOD}", f"--topology={topology}"]
    command += [f"--mesh={mesh}", f"--output={(OUTPUT / name).relative_to(ROOT)}"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)


def table() -> str:
    """Return a Markdown table with a row per existing plan; numbers are for one chip."""
    lines = [
        "| model | slice | mesh | batch x length | parameters and moments | peak | received | compute | memory "
        "| interconnect | MFU at most |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in PLANS:
        file = OUTPUT / name / "plan.json"
        for found in json.loads(file.read_text())["plans"] if file.exists() else []:
            cells = [name, PLANS[name][1], found["mesh"], f"{found['batch_size']} x {found['length']}"]
            if found["fits"]:
                state = found["held_bytes"]["parameters"] + found["held_bytes"]["moments"]
                received = sum(collective["num_bytes"] for collective in found["collectives"])
                cells += [f"{size / GIB:.2f} GiB" for size in (state, found["peak_bytes"])]
                cells += [f"{received / 1e9:.1f} GB"]
                cells += [f"{seconds * 1e3:.0f} ms" for seconds in found["roofline_seconds"].values()]
                cells += [f"{found['mfu']:.0%}"]
            else:
                cells += ["", f"no: {found['reason']}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Run all plans, or those given as arguments; write the table."""
    names = arguments[1:] or list(PLANS)
    for name in names:
        require(name in PLANS, "NAME", name, f"must be one of {list(PLANS)}")
    for name in names:
        plan(name)
        (OUTPUT / "table.md").write_text(table())
    print(table(), end="")


if __name__ == "__main__":
    command_line.run(main, positional=tuple(PLANS))
