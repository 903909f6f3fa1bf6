"""Run the paper's experiments, and judge its claims.

python -m experiments list
python -m experiments show fig2                                    # its claims, and the command of each run
python -m experiments run fig2 --results=mine                      # train and evaluate; results/ has finished runs
python -m experiments run table6 --results=mine --tasks=even_pairs
python -m experiments report --results=mine                        # tables, figures and verdicts
"""

from pathlib import Path

from dape_jax import command_line
from dape_jax.command_line import use_compilation_cache
from dape_jax.errors import require
from experiments.catalogue import EXPERIMENTS
from experiments.claims import format_lengths
from experiments.settings import Settings

COMMANDS = ("list", "show", "run", "report")


def main(settings: Settings, command: str = "", name: str = "") -> None:
    """Run one of `COMMANDS`."""
    require(command in COMMANDS, "command", command, f"must be one of {list(COMMANDS)}")
    takes_name = command in ("show", "run")
    allowed = f"must be one of {list(EXPERIMENTS)}" if takes_name else "must be empty"
    require(name in EXPERIMENTS if takes_name else not name, command, name, allowed)

    from dape_jax.provenance import make_results_directory  # after the flags are checked: JAX takes seconds to import
    from experiments import report
    from experiments.run import run_experiment, runs_of, train_command

    if command == "list":
        for key, experiment in EXPERIMENTS.items():
            print(f"{key:10}  {experiment.title} ({experiment.source})")
    elif command == "show":
        experiment = EXPERIMENTS[name]
        runs = runs_of(experiment, settings)
        print(f"{name}: {experiment.title} ({experiment.source}); metric: {experiment.metric}\n\nclaims")
        for text, claim in experiment.claims.items():
            print(f"  {text}" + f"\n    Note: {claim.note}" * bool(claim.note))
        print(f"\n{len(runs)} runs with the preset {settings.preset}")
        for run in runs:
            print(f"  {run.name}, evaluated at {format_lengths(run.lengths)}")
            print(f"    {train_command(run)} --workdir=runs/{run.name}")
    elif command == "run":
        # Models that differ only in the seed share compiled programs, also between processes.
        use_compilation_cache(str(make_results_directory(settings.workdirs, "--workdirs") / "compiled"))
        runs, results = run_experiment(name, settings), settings.results
        print(f"{len(runs)} runs in {results}/{name}; compare them: python -m experiments report --results={results}")
    else:
        print(f"report: {report.write(Path(settings.results))}")


if __name__ == "__main__":
    command_line.run(
        main,
        Settings,
        interrupted="interrupted; finished runs are kept, and the same command continues with the others",
        positional=("COMMAND", "NAME"),
    )
