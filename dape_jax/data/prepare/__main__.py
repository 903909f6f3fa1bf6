"""Run `python -m dape_jax.data.prepare --input=.. --output=..`; see `command.py`."""

from dape_jax.data.prepare.command import command

if __name__ == "__main__":
    command()
