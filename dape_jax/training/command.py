"""Train a model on a text or on an algorithmic task.

    dape-train --config=configs/quickstart.py --workdir=runs/mine

In a clone, `python train.py` is the same program.
"""

import dataclasses
from typing import Any

from dape_jax import command_line
from dape_jax.command_line import COMPILATION_CACHE, flag, use_compilation_cache
from dape_jax.errors import require
from dape_jax.storage import to_path


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of this program."""

    workdir: str = flag(dataclasses.MISSING, "Run directory. Re-running with the same directory resumes training.")
    coordinator: str | None = flag(
        None,
        "host:port of process 0, for a run with several processes. If unset, JAX detects the processes of SLURM, a TPU "
        "pod or Open MPI.",
    )
    num_processes: int | None = flag(None, "Number of processes of the run, given with --coordinator.")
    process_id: int | None = flag(None, "Index of this process, from 0, given with --coordinator.")
    verify: bool = flag(
        False, "Check the digest of the whole corpus, even if its files are unchanged since the last check."
    )
    compilation_cache: str | None = flag(None, COMPILATION_CACHE)
    change: tuple[str, ...] = flag(
        (),
        "Comma-separated fields in which a resumed run may differ from its config: train.batch_size, train.num_steps, "
        "optimizer, or a field of optimizer. The steps that are done are kept.",
    )
    plan: bool = flag(False, "Compile the training step, print its memory and the costs of the run, and exit.")

    def __post_init__(self):
        require(bool(self.workdir), "--workdir", self.workdir, "must be a directory")


def main(settings: Settings, spec: dict[str, Any]) -> None:
    """Join the other processes of the run, and train."""
    workdir = to_path(settings.workdir, "--workdir")
    use_compilation_cache(settings.compilation_cache)
    from dape_jax.distributed import join  # after the flags are checked: JAX takes seconds to import
    from dape_jax.training.loop import train

    join(settings.coordinator, settings.num_processes, settings.process_id)
    if settings.plan:
        from dape_jax.planning.plan import print_attached  # only now: training needs nothing of it

        print_attached(spec, [*command_line.config_flags(), f"--workdir={settings.workdir}"])
        return
    train(spec, workdir, settings.verify, settings.change)


def command() -> None:
    """Run the command line `dape-train`."""
    message = "interrupted; the same command resumes from the newest checkpoint"
    command_line.run(main, Settings, config=True, interrupted=message)
