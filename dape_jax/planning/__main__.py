"""Plan a run on hardware that need not exist: memory, hours, chip-hours, the largest batch, the command that trains.

    dape-plan --config=configs/paper.py:125m,bias=kerple,processor=dape --topology=v5litepod-16
    dape-plan --config=configs/paper.py:6.7b --topology=h100:64

For the devices of this machine: `dape-train --plan`.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.hardware import UTILISATION, read_topology
from dape_jax.storage import require_local


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    topology: str = flag(
        dataclasses.MISSING,
        "TPU slice, as v4|v5e|v5p|v6e:SHAPE (v5e:16x16) or by the cloud's name (v5litepod-256, v5p-8, v6e-8); or GPUs, "
        "as a100|h100|h200|b200:NUMBER.",
    )
    mesh: str | None = flag(None, "Mesh of the slice, for example fsdp=64,context=4; if not given, up to 4 are tried.")
    compile: bool = flag(True, "Compile the step for a TPU slice. Otherwise, and for GPUs, memory is by formula.")
    utilisation: float = flag(
        UTILISATION, "Model FLOPs utilisation for hours and chip-hours; a run's log shows its MFU."
    )
    output: str | None = flag(None, "Directory for plan.json.")

    def __post_init__(self):
        require(0 < self.utilisation <= 1, "--utilisation", self.utilisation, "must be above 0, and at most 1")
        require_local(self.output or "", "--output")


def main(settings: Settings, spec: dict[str, Any]) -> None:
    """Plan the run and print the report."""
    import jax  # after the flags are checked: it takes seconds to import

    from dape_jax.planning.plan import plan_run, run_to_plan, save, to_markdown
    from dape_jax.provenance import make_results_directory
    from dape_jax.sharding import read_mesh

    if settings.output:
        make_results_directory(Path(settings.output), "--output")
    hardware = read_topology(settings.topology)
    jax.config.update("jax_platforms", "cpu")  # nothing runs on a device
    run = run_to_plan(spec)
    mesh = None if settings.mesh is None else read_mesh("--mesh", settings.mesh)
    plans = plan_run(run, hardware, mesh, by_formula=not settings.compile)
    given = [*command_line.config_flags(), "--workdir=runs/planned"]
    print(to_markdown(run, plans, settings.utilisation, given), end="")
    if settings.output:
        save(Path(settings.output), run, plans, settings.utilisation)


def command() -> None:
    """Run the command line `dape-plan`."""
    command_line.run(main, Settings, config=True)


if __name__ == "__main__":
    command()
