"""Evaluate trained models by sequence length.

    dape-eval --workdir=runs/a,runs/b --lengths=128,256,512                        # perplexity by length
    dape-eval --workdir=runs/a,runs/b --lengths=128,256,512 --baseline=a           # and paired differences from a
    dape-eval --workdir=runs/a,runs/b --lengths=128,256,512 --protocol=delta       # gain from context
    dape-eval --workdir=runs/a,runs/b --lengths=512 --protocol=positions           # loss by position
    dape-eval --workdir=runs/che/a,runs/che/b --lengths=1-40,60-500/20             # runs on tasks: accuracy by length
    dape-eval --plot=runs/lengths.json --labels=a=Kerple,b=DAPE --format=pdf       # the figure again, in another form

In a clone, `python eval.py` is the same program.
"""

import dataclasses

from dape_jax import command_line
from dape_jax.command_line import COMPILATION_CACHE, flag, use_compilation_cache
from dape_jax.errors import require
from dape_jax.evaluation.options import Options
from dape_jax.storage import to_path


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags other than the options of the evaluations."""

    workdir: tuple[str, ...] = flag((), "Run directories to compare.")
    plot: str | None = flag(
        None, "JSON of an evaluation, such as lengths.json: show it again with --baseline, --labels and --format."
    )
    mesh: str | None = flag(
        None,
        "Mesh of the devices, as axis=size,axis=size: context=8 shares every sequence among eight devices. If unset, "
        "sequences are spread over all devices.",
    )
    output: str | None = flag(
        None, "Directory of the results; the workdir, or the path common to all workdirs, if unset."
    )
    compilation_cache: str | None = flag(None, COMPILATION_CACHE)


def main(given: Flags) -> None:
    """Evaluate, which prints the table."""
    allowed = "must be directories, separated by commas, unless there is --plot"
    require(all(given.workdir or [given.plot]), "--workdir", list(given.workdir), allowed)
    require(not (given.plot and given.workdir), "--plot", given.plot, "must not be given with --workdir")
    if given.plot:
        from dape_jax.evaluation.figures import redraw

        file, output = to_path(given.plot, "--plot"), to_path(given.output, "--output") if given.output else None
        print(f"\nfigure: {redraw(file, command_line.from_flags(Options), output).figure}")
        return

    use_compilation_cache(given.compilation_cache)
    from dape_jax.distributed import require_single_process  # after the flags are checked: JAX takes seconds to import
    from dape_jax.evaluation.accuracy import evaluate_tasks
    from dape_jax.evaluation.perplexity import evaluate
    from dape_jax.evaluation.trained import are_algorithmic
    from dape_jax.sharding import read_mesh

    require_single_process()
    workdirs = [to_path(workdir, "--workdir") for workdir in given.workdir]
    mesh = None if given.mesh is None else read_mesh("--mesh", given.mesh)
    output = to_path(given.output, "--output") if given.output else None
    run = evaluate_tasks if are_algorithmic(workdirs) else evaluate
    paths = run(workdirs, command_line.from_flags(Options), mesh=mesh, output=output)
    print(f"\nresults: {paths.directory}\nfigure: {paths.figure}")


def command() -> None:
    """Run the command line `dape-eval`."""
    command_line.run(main, Flags, Options)
