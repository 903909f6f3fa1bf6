"""Plan a run: `python -m dape_jax.planning --config=configs/paper.py:6.7b --topology=v5e:16x16`; see `plan.py`."""

from absl import flags

from dape_jax import command_line
from dape_jax.planning.plan import main

if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "topology"])
    command_line.run(main)
