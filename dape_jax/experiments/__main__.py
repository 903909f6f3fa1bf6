"""The command line of the paper's experiments: list, show, run and report."""

from pathlib import Path

import jax
from absl import flags

from dape_jax import command_line
from dape_jax.errors import require
from dape_jax.experiments import report
from dape_jax.experiments.catalogue import EXPERIMENTS, PRESETS, find, spelt
from dape_jax.experiments.run import run_experiment, runs_of, train_command

COMMANDS = ("list", "show", "run", "report")
PRESET = flags.DEFINE_enum("preset", "small", list(PRESETS), "Settings: two CPU cores in minutes, or as published.")
DATA = flags.DEFINE_string("data", "", "Text to train on, as in --config.data.path; the preset's own if empty.")
SEEDS = flags.DEFINE_list("seeds", [], "One run of every model for each; the preset's if empty.")
TASKS = flags.DEFINE_list("tasks", [], "Of an experiment on the algorithmic tasks; the preset's if empty.")
RESULTS = flags.DEFINE_string("results", "results", "Directory of the measurements and of the report.")
WORKDIRS = flags.DEFINE_string("workdirs", "runs/experiments", "Directory of the models.")


@flags.validator("seeds", "--seeds must be whole numbers, parted by commas")
def _are_whole_numbers(values: list[str]) -> bool:
    return all(value.isdecimal() for value in values)


def main(arguments: list[str]) -> None:
    """Flags, then one call."""
    command, name = [*arguments[1:], "", ""][:2]
    require(command in COMMANDS, "command", command, f"one of {list(COMMANDS)}")
    takes_name = command in ("show", "run")
    require(bool(name) == takes_name, command, name, f"one of {list(EXPERIMENTS)}" if takes_name else "no name")
    seeds, tasks = tuple(int(seed) for seed in SEEDS.value or ()), tuple(TASKS.value or ())
    if command == "list":
        for key, experiment in EXPERIMENTS.items():
            print(f"{key:10}  {experiment.title} ({experiment.source})")
    elif command == "show":
        experiment = find(name)
        runs = runs_of(experiment, PRESETS[PRESET.value], seeds=seeds, data=DATA.value or "", tasks=tasks)
        print(f"{name}: {experiment.title} ({experiment.source}); measures {experiment.measure}\n\nclaims")
        for claim in experiment.claims:
            print(f"  {claim.text}")
        print(f"\n{len(runs)} runs with the preset {PRESET.value}")
        for run in runs:
            print(f"  {run.name}, evaluated at {spelt(run.lengths)}\n    {train_command(run)}")
    elif command == "run":
        # The seeds of a method share their programs, in this process and in the next.
        jax.config.update("jax_compilation_cache_dir", str(Path(WORKDIRS.value, "compiled").absolute()))
        files = run_experiment(
            name,
            PRESET.value,
            data=DATA.value,
            seeds=seeds,
            tasks=tasks,
            results=Path(RESULTS.value),
            workdirs=Path(WORKDIRS.value),
        )
        print(f"{len(files)} runs in {files[0].parent}; python -m dape_jax.experiments report compares them")
    else:
        print(f"report: {report.write(Path(RESULTS.value))}")


if __name__ == "__main__":
    command_line.run(
        main,
        "interrupted; finished runs are kept, and the same command goes on with the rest",
        positional=("COMMAND", "NAME"),
    )
