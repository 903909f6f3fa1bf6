"""Train a model on a text or on an algorithmic task.

    dape-train --config=configs/quickstart.py --workdir=runs/mine

In a clone, `python train.py` is the same program.
"""

import contextlib
import dataclasses

from absl import flags

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import InputError, require
from dape_jax.recipes import define_config_flag
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

    def __post_init__(self):
        require(bool(self.workdir), "--workdir", self.workdir, "must be a directory")


RUNTIME_FLAGS = ("coordinator", "num_processes", "process_id")


def main(_: list[str]) -> None:
    """Initialise the distributed runtime, and train."""
    from dape_jax.distributed import distributed_runtime  # after the flags are checked: JAX takes seconds to import
    from dape_jax.training.loop import train

    with distributed_runtime(*(flags.FLAGS[name].value for name in RUNTIME_FLAGS)):
        settings = command_line.from_flags(Settings)
        train(command_line.config_of(flags.FLAGS["config"]), to_path(settings.workdir, "--workdir"))


def tell_other_processes(arguments: list[str], error: InputError) -> None:
    """End all processes of a run with this process's error in a flag or the config file; return if it runs alone.

    Otherwise the other processes would wait for this one to join.
    """
    from dape_jax.distributed import distributed_runtime

    values = flags.FlagValues()
    for name in RUNTIME_FLAGS:
        values[name] = flags.FLAGS[name]
    values.set_gnu_getopt()  # parsing must not stop at `--workdir DIR`: DIR looks positional
    with contextlib.suppress(flags.Error, InputError):
        values(arguments, known_only=True)
        with distributed_runtime(*(values[name].value for name in RUNTIME_FLAGS), error=error):
            pass


def command() -> None:
    """Run the command line `dape-train`."""
    define_config_flag()
    command_line.define_flags(Settings)
    command_line.run(
        main,
        interrupted="interrupted; the same command resumes from the newest checkpoint",
        on_bad_flags=tell_other_processes,
    )
