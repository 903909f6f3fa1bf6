"""Flags of the experiments' command line. This module does not import JAX, so that --help is quick."""

import dataclasses

from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.storage import require_local
from experiments.methods import PRESETS


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of the command line; empty flags take the preset's value."""

    preset: str = flag("small", f"Preset of sizes, lengths and training steps, one of {list(PRESETS)}.")
    data: str = flag("", "Training text, as in --config.data.path; the preset's if empty.")
    seeds: tuple[int, ...] = flag((), "Seeds of every model; the preset's if empty.")
    methods: tuple[str, ...] = flag((), "Methods to run; all of the experiment's if empty.")
    train_lengths: tuple[int, ...] = flag((), "Train lengths of the models to run; all of the experiment's if empty.")
    tasks: tuple[str, ...] = flag((), "Tasks of an experiment on algorithmic tasks; the preset's if empty.")
    results: str = flag("results", "Directory of the results files and the report.")
    workdirs: str = flag("runs/experiments", "Directory of the run directories.")

    def __post_init__(self):
        require_local(self.results, "--results")
        require_local(self.workdirs, "--workdirs")
        require(self.preset in PRESETS, "--preset", self.preset, f"must be one of {list(PRESETS)}")
        for field in ("seeds", "methods", "train_lengths", "tasks"):
            values = getattr(self, field)
            require(len(set(values)) == len(values), f"--{field}", values, "must not contain duplicates")
