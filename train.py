"""Train a model: `python train.py --config=configs/quickstart.py --workdir=runs/mine`; the same as `dape-train`."""

from dape_jax.training.command import command

if __name__ == "__main__":
    command()
