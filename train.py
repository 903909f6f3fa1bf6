"""Train a language model: `python train.py --config=configs/quickstart.py --workdir=runs/mine`."""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from dape_jax import command_line
from dape_jax.distributed import distributed_runtime
from dape_jax.errors import require
from dape_jax.training.loop import train

CONFIG = config_flags.DEFINE_config_file("config", help_string="Config file, with its argument after a colon.")
WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; the same one again goes on where it stopped.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, for a run of several processes.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes the run has.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0 on.")
flags.mark_flags_as_required(["config", "workdir"])


def main(_: list[str]) -> None:
    """Flags, then one call in the company of the run's other processes."""
    require(bool(WORKDIR.value), "--workdir", WORKDIR.value, "a directory")
    workdir = Path(WORKDIR.value or "")
    with distributed_runtime(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, workdir / "checkpoints"):
        train(command_line.config_of(CONFIG), workdir)


if __name__ == "__main__":
    command_line.run(main, "interrupted; training goes on from its newest checkpoint with the same command")
