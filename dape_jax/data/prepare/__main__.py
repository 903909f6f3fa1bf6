"""Run `python -m dape_jax.data.prepare --input=.. --output=..`; see `command.py`."""

from dape_jax import command_line
from dape_jax.data.prepare.command import define_flags, main

if __name__ == "__main__":
    define_flags()
    command_line.run(main, "interrupted: the same command resumes")
