"""Evaluate trained models by sequence length.

python eval.py --workdir=runs/a,runs/b --lengths=128,256,512                        # perplexity by length
python eval.py --workdir=runs/a,runs/b --lengths=128,256,512 --protocol=delta       # gain from context
python eval.py --workdir=runs/a,runs/b --lengths=512 --by_position                  # loss by position
python eval.py --workdir=runs/che/a,runs/che/b --lengths=1-40,60-500/20             # runs on tasks: accuracy by length
"""

import dataclasses

from absl import flags

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.distributed import require_single_process
from dape_jax.errors import require
from dape_jax.evaluation.accuracy import TaskOptions, evaluate_tasks
from dape_jax.evaluation.perplexity import PerplexityOptions, evaluate
from dape_jax.evaluation.trained import Options, are_algorithmic
from dape_jax.sharding import read_mesh
from dape_jax.storage import to_path


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags other than the options of the evaluations."""

    workdir: tuple[str, ...] = flag(dataclasses.MISSING, "Run directories to compare.")
    mesh: str | None = flag(
        None,
        "Mesh of the devices, as axis=size,axis=size: context=8 has eight devices share every sequence. If unset, "
        "sequences are spread over all devices.",
    )
    output: str | None = flag(
        None, "Directory of the results; the workdir, or the path common to all workdirs, if unset."
    )


def main(_: list[str]) -> None:
    """Parse flags, evaluate, print the table."""
    require_single_process()
    given = command_line.from_flags(Flags)
    require(all(given.workdir or [""]), "--workdir", list(given.workdir), "must be directories, separated by commas")
    workdirs = [to_path(workdir, "--workdir") for workdir in given.workdir]
    mesh = None if given.mesh is None else read_mesh("--mesh", given.mesh)
    output = to_path(given.output, "--output") if given.output else None
    if are_algorithmic(workdirs):
        refuse_flags(PerplexityOptions, "language models")
        paths = evaluate_tasks(workdirs, command_line.from_flags(TaskOptions), mesh=mesh, output=output, show=print)
    else:
        refuse_flags(TaskOptions, "runs on tasks")
        paths = evaluate(workdirs, command_line.from_flags(PerplexityOptions), mesh=mesh, output=output, show=print)
    print(f"\nresults: {paths.directory}\nfigure: {paths.figure}")


def refuse_flags(options: type[Options], models: str) -> None:
    """Raise `InputError` if a flag is given that only these options have, which are for other models."""
    shared = {field.name for field in dataclasses.fields(Options)}
    for name in (field.name for field in dataclasses.fields(options) if field.name not in shared):
        given = flags.FLAGS[name]
        require(not given.present, f"--{name}", given.value, f"only for {models}, and these are not")


if __name__ == "__main__":
    for each in (Flags, Options, PerplexityOptions, TaskOptions):
        command_line.define_flags(each)
    command_line.run(main)
