"""Predict memory and time of a run on a TPU slice, without a TPU.

dape-plan --config=configs/paper.py:6.7b --topology=v5e:16x16
"""

import dataclasses
from pathlib import Path

from absl import flags

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.hardware import read_topology
from dape_jax.recipes import define_config_flag
from dape_jax.storage import require_local


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    topology: str = flag(dataclasses.MISSING, "TPU slice, v4|v5e|v5p|v6e:SHAPE, for example v5e:16x16.")
    mesh: str | None = flag(None, "Mesh of the slice, for example fsdp=64,context=4; if not given, up to 4 are tried.")
    batch: int | None = flag(None, "Sequences in a step; train.batch_size of the config if not given.")
    eval_length: int | None = flag(None, "Also compile the evaluator at this length.")
    output: str | None = flag(None, "Directory for plan.json.")

    def __post_init__(self):
        for name in ("batch", "eval_length"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name}", value, "must be positive")
        require(self.output != "", "--output", self.output, "must be a directory")
        require_local(self.output or "", "--output")


def main(settings: Settings) -> None:
    """Plan the run and print the report."""
    import jax  # after the flags are checked: it takes seconds to import

    from dape_jax.planning.plan import plan_run, run_to_plan, save, to_markdown
    from dape_jax.provenance import make_results_directory
    from dape_jax.sharding import read_mesh

    if settings.output:
        make_results_directory(Path(settings.output), "--output")
    hardware = read_topology(settings.topology)
    jax.config.update("jax_platforms", "cpu")  # nothing runs on a device
    run = run_to_plan(flags.FLAGS.config, settings.batch)
    mesh = None if settings.mesh is None else read_mesh("--mesh", settings.mesh)
    plans = plan_run(run, hardware, mesh, settings.eval_length)
    print(to_markdown(run, hardware, plans), end="")
    if settings.output:
        save(Path(settings.output), run, hardware, plans)


def command() -> None:
    """Run the command line `dape-plan`."""
    define_config_flag()
    command_line.run(main, Settings)


if __name__ == "__main__":
    command()
