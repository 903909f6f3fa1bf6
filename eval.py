"""Evaluate trained models by sequence length.

python eval.py --workdir=runs/a,runs/b --lengths=128,256,512                        # perplexity by length
python eval.py --workdir=runs/a,runs/b --lengths=128,256,512 --protocol=delta       # gain from context
python eval.py --workdir=runs/a,runs/b --lengths=512 --by_position                  # loss by position
python eval.py --workdir=runs/che/a,runs/che/b --lengths=1-40,60-500/20             # runs on tasks: accuracy by length
"""

import dataclasses
from pathlib import Path

from absl import flags

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.distributed import require_single_process
from dape_jax.errors import require
from dape_jax.evaluation.accuracy import evaluate_tasks
from dape_jax.evaluation.perplexity import evaluate
from dape_jax.evaluation.trained import STEP_HELP, are_algorithmic
from dape_jax.sharding import read_mesh


@dataclasses.dataclass(frozen=True)
class CommonFlags:
    """Flags for all runs."""

    workdir: tuple[str, ...] = flag(dataclasses.MISSING, "Run directories to compare.")
    step: str = flag("newest", STEP_HELP)
    lengths: tuple[int, ...] = flag(
        (),
        "Increasing sequence lengths in tokens (of a task: input lengths in symbols); 40-500/20 is 40, 60, 80 .. 500, "
        "and 1-40 is 1, 2, 3 .. 40. Those of the run's config if empty.",
    )
    mesh: str | None = flag(
        None,
        "Mesh of the devices, as axis=size,axis=size: context=8 has eight devices share every sequence. If unset, "
        "sequences are spread over all devices.",
    )
    output: str | None = flag(
        None, "Directory of the results; the workdir, or the path common to all workdirs, if unset."
    )


@dataclasses.dataclass(frozen=True)
class TextFlags:
    """Flags for language models."""

    last_tokens: int | None = flag(None, "Scored tokens of a sequence; that of the run's config if unset.")
    max_windows: int | None = flag(None, "Maximum number of scored sequences; that of the run's config if unset.")
    data: str | None = flag(
        None, "Another corpus whose validation documents are scored, in the form of --config.data.path."
    )
    rotary: tuple[str, ...] = flag(
        ("rope",), "Variants of models with RoPE, one row of the table each: rope (as trained), pi, ntk, yarn."
    )
    protocol: str = flag(
        "perplexity",
        "perplexity of the last tokens by length; or delta, the gain from the context before the last train-length "
        "tokens.",
    )
    by_position: bool = flag(False, "Measure the loss by position in windows of the longest length instead.")


@dataclasses.dataclass(frozen=True)
class TaskFlags:
    """Flags for runs on algorithmic tasks."""

    num_sequences: int | None = flag(None, "Of a task: strings of each length; that of the run's config if unset.")
    dropout: bool | None = flag(None, "Of a task: whether dropout stays on; as in the run's config if unset.")


def main(_: list[str]) -> None:
    """Parse flags, evaluate, print the table."""
    require_single_process()
    common = command_line.from_flags(CommonFlags)
    require(all(common.workdir or [""]), "--workdir", list(common.workdir), "must be directories, separated by commas")
    workdirs = [Path(workdir) for workdir in common.workdir]
    is_task = are_algorithmic(workdirs)
    refuse_flags(TextFlags if is_task else TaskFlags, "language models" if is_task else "runs on tasks")
    call, settings = (evaluate_tasks, TaskFlags) if is_task else (evaluate, TextFlags)
    report = call(
        workdirs,
        step=common.step,
        lengths=common.lengths,
        mesh=None if common.mesh is None else read_mesh("--mesh", common.mesh),
        output=Path(common.output) if common.output else None,
        **dataclasses.asdict(command_line.from_flags(settings)),
    )
    print(f"\n{report.table}\n\nresults: {report.directory}\nfigure: {report.figure}")


def refuse_flags(settings: type, models: str) -> None:
    """Raise `InputError` if a flag of these settings is given, which are for other models."""
    for field in dataclasses.fields(settings):
        given = flags.FLAGS[field.name]
        require(not given.present, f"--{field.name}", given.value, f"only for {models}, and these are not")


if __name__ == "__main__":
    for each in (CommonFlags, TextFlags, TaskFlags):
        command_line.define_flags(each)
    command_line.run(main)
