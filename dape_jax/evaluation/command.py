"""Evaluate trained models by sequence length.

    dape-eval --workdir=runs/a,runs/b --lengths=128,256,512                        # perplexity by length
    dape-eval --workdir=runs/a,runs/b --lengths=128,256,512 --baseline=a           # and paired differences from a
    dape-eval --workdir=runs/a,runs/b --lengths=128,256,512 --protocol=delta       # gain from context
    dape-eval --workdir=runs/a,runs/b --lengths=512 --protocol=positions           # loss by position
    dape-eval --workdir=runs/che/a,runs/che/b --lengths=1-40,60-500/20             # runs on tasks: accuracy by length
    dape-eval --plot=runs/lengths.json --labels=a=Kerple,b=DAPE --format=pdf       # the figure again, in another form
    dape-eval --workdir=runs/a --watch                                             # each checkpoint, when it is saved

In a clone, `python eval.py` is the same program.
"""

import dataclasses
import glob
import logging
import os
import time
from collections.abc import Callable

from etils import epath

from dape_jax import command_line
from dape_jax.command_line import COMPILATION_CACHE, flag, use_compilation_cache
from dape_jax.errors import InputError, require
from dape_jax.evaluation.options import Options
from dape_jax.storage import names_in, to_path

logger = logging.getLogger(__name__)

WATCH_SECONDS = 10  # between looks for new checkpoints


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags other than the options of the evaluations."""

    workdir: tuple[str, ...] = flag((), "Run directories to compare, or patterns of these: runs/*; ** descends.")
    plot: str | None = flag(
        None, "JSON of an evaluation, such as lengths.json: show it again with --baseline, --labels and --format."
    )
    mesh: str | None = flag(
        None,
        "Mesh of the devices, as axis=size,axis=size: context=8 shares every sequence among eight devices. If unset, "
        "sequences are spread over all devices.",
    )
    output: str | None = flag(None, "Directory of results; if unset the workdir, or the path common to all workdirs.")
    watch: bool = flag(
        False,
        "Evaluate the checkpoints of one run as they are saved, until that of the last step; results of step N are in "
        "step_N of --output, by default of WORKDIR/watched. Steps that have results there are left out.",
    )
    compilation_cache: str | None = flag(None, COMPILATION_CACHE)


def main(given: Flags) -> None:
    """Evaluate, which prints the table."""
    allowed = "must be directories, separated by commas, unless there is --plot"
    require(all(given.workdir or [given.plot]), "--workdir", list(given.workdir), allowed)
    require(not (given.plot and given.workdir), "--plot", given.plot, "must not be given with --workdir")
    if given.plot:
        from dape_jax.evaluation.protocols import redraw
        from dape_jax.provenance import make_results_directory

        file, options = to_path(given.plot, "--plot"), command_line.from_flags(Options)
        shown = ("baseline", "group_seeds", "labels", "format")
        options.refuse("--workdir", *(name for name in vars(options) if name not in shown))
        output = make_results_directory(to_path(given.output, "--output")) if given.output else None
        print(f"\nfigure: {redraw(file, options, output).figure}")
        return

    use_compilation_cache(given.compilation_cache)
    from dape_jax.distributed import require_single_process  # after the flags are checked: JAX takes seconds to import
    from dape_jax.evaluation.accuracy import evaluate_tasks
    from dape_jax.evaluation.perplexity import evaluate
    from dape_jax.evaluation.trained import are_algorithmic
    from dape_jax.sharding import read_mesh

    require_single_process()
    workdirs = [workdir for each in given.workdir for workdir in matching(to_path(each, "--workdir"))]
    mesh = None if given.mesh is None else read_mesh("--mesh", given.mesh)
    output = to_path(given.output, "--output") if given.output else None
    options = command_line.from_flags(Options)

    def run(options: Options, output: epath.PathLike | None) -> None:
        evaluate_any = evaluate_tasks if are_algorithmic(workdirs) else evaluate
        paths = evaluate_any(workdirs, options, mesh=mesh, output=output)
        print(f"\nresults: {paths.directory}\nfigure: {paths.figure}", flush=True)

    if given.watch:
        require(len(workdirs) == 1, "--workdir", list(given.workdir), "must be one directory with --watch")
        require(options.step == "newest", "--step", options.step, "must not be given with --watch")
        (workdir,) = workdirs
        watch(workdir, output or workdir / "watched", lambda step, to: run(dataclasses.replace(options, step=step), to))
    else:
        run(options, output)


def matching(path: epath.Path) -> list[epath.Path]:
    """Return the run directories that match a pattern, which a shell leaves in --workdir=runs/*; else the path."""
    found = [] if os.path.exists(path) else map(epath.Path, sorted(glob.glob(os.fspath(path), recursive=True)))
    return [each for each in found if (each / "checkpoints").is_dir()] or [path]


def watch(workdir: epath.Path, output: epath.Path, run: Callable[[str, epath.Path], None]) -> None:
    """Call `run` with each saved step of a run and the directory of its results, until that of the last step.

    Steps that are deleted before they are evaluated are left out, with a warning.
    """
    from dape_jax.training import checkpoint

    logger.info("watching %s; Ctrl-C ends", workdir)
    seen, is_last = set[str](), False
    while not is_last:
        new = [step for step in reversed(checkpoint.step_names(workdir)) if step not in seen]
        if not new:
            time.sleep(WATCH_SECONDS)
            continue
        step, directory = new[0], output / f"step_{new[0]}"
        seen.add(step)
        try:
            saved = checkpoint.read_config(workdir)  # of the newest start, which may have extended the run
            is_last = saved is not None and int(step) == saved["config"]["train"]["num_steps"]
            if any(name.endswith(".json") for name in names_in(directory)):
                logger.info("step %s: its results are in %s", step, directory)
                continue
            run(step, directory)
        except InputError:
            if step in checkpoint.step_names(workdir):
                raise
            logger.warning("step %s: deleted before it was evaluated; a larger train.max_to_keep keeps more", step)


def command() -> None:
    """Run the command line `dape-eval`."""
    command_line.run(main, Flags, Options)
