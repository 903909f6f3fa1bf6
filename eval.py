"""Evaluate trained models: `python eval.py --workdir=runs/a,runs/b --lengths=128,256`; the same as `dape-eval`."""

from dape_jax.evaluation.command import command

if __name__ == "__main__":
    command()
