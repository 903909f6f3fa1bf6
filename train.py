"""Train a language model: `python train.py --config=configs/quickstart.py --workdir=runs/mine`."""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from dape_jax import command_line
from dape_jax.errors import require
from dape_jax.training.loop import train

CONFIG = config_flags.DEFINE_config_file("config", help_string="Config file, with its argument after a colon.")
WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; the same one again goes on where it stopped.")
flags.mark_flags_as_required(["config", "workdir"])


def main(_: list[str]) -> None:
    """Flags, then one call."""
    require(bool(WORKDIR.value), "--workdir", WORKDIR.value, "a directory")
    train(command_line.config_of(CONFIG), Path(WORKDIR.value or ""))


if __name__ == "__main__":
    command_line.run(main, "interrupted; training goes on from its newest checkpoint with the same command")
