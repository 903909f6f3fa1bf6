"""Evaluate trained models by sequence length.

python eval.py --workdir=runs/a,runs/b --lengths=128,256,512                        # perplexity by length
python eval.py --workdir=runs/a,runs/b --lengths=128,256,512 --protocol=delta       # what context gains
python eval.py --workdir=runs/a,runs/b --lengths=512 --by_position                  # loss by position
python eval.py --workdir=runs/che/a,runs/che/b --lengths=1-40,60-500/20             # runs on tasks: accuracy by length
"""

from pathlib import Path

from absl import flags

from dape_jax import command_line
from dape_jax.distributed import require_single_process
from dape_jax.errors import require
from dape_jax.evaluation.accuracy import evaluate_tasks
from dape_jax.evaluation.evaluate import evaluate
from dape_jax.evaluation.trained import are_algorithmic
from dape_jax.sharding import read_mesh

WORKDIR = flags.DEFINE_list("workdir", None, "Directories of the runs to compare.")
STEP = flags.DEFINE_string("step", "newest", "Checkpoint: newest, best (lowest validation loss) or its number.")
LENGTHS = flags.DEFINE_list(
    "lengths",
    [],
    "Sequence lengths in tokens (of a task: in symbols), increasing; 40-500/20 is 40, 60, 80 .. 500, and 1-40 is "
    "1, 2, 3 .. 40. Those of the run's config if empty.",
)
LAST_TOKENS = flags.DEFINE_integer(
    "last_tokens", None, "Scored tokens of a sequence; that of the run's config if unset."
)
MAX_WINDOWS = flags.DEFINE_integer("max_windows", None, "Scored sequences at most; that of the run's config if unset.")
DATA = flags.DEFINE_string(
    "data", None, "Another corpus whose held-out documents are scored, as in --config.data.path."
)
ROTARY = flags.DEFINE_list(
    "rotary",
    ["rope"],
    "Ways to evaluate models with RoPE, one row of the table each: rope (as trained), pi, ntk, yarn.",
)
PROTOCOL = flags.DEFINE_string(
    "protocol",
    "perplexity",
    "What is compared: perplexity of the last tokens by length, or delta, by how much the context before the last "
    "train-length tokens lowers their perplexity.",
)
BY_POSITION = flags.DEFINE_bool("by_position", False, "Loss by position in windows of the longest length instead.")
NUM_SEQUENCES = flags.DEFINE_integer(
    "num_sequences", None, "Of a task: strings of each length; as many as the run's config says if unset."
)
DROPOUT = flags.DEFINE_bool("dropout", None, "Of a task: whether dropout stays on; as the run's config says if unset.")
MESH = flags.DEFINE_string(
    "mesh",
    None,
    "Mesh of the devices, as axis=size,axis=size: context=8 has eight devices share every sequence. Unset, sequences "
    "are spread over all devices.",
)
OUTPUT = flags.DEFINE_string("output", None, "Where results go; the workdir, or the directory common to all, if unset.")
flags.mark_flag_as_required("workdir")


OF_TEXT, OF_TASKS = (LAST_TOKENS, MAX_WINDOWS, DATA, ROTARY, PROTOCOL, BY_POSITION), (NUM_SEQUENCES, DROPOUT)


def main(_: list[str]) -> None:
    """Flags, then one call."""
    require_single_process()
    require(all(WORKDIR.value or [""]), "--workdir", WORKDIR.value, "directories, parted by commas")
    workdirs = [Path(workdir) for workdir in WORKDIR.value or ()]
    shared = {
        "step": STEP.value or "newest",
        "lengths": command_line.read_numbers("--lengths", LENGTHS.value or []),
        "mesh": None if MESH.value is None else read_mesh("--mesh", MESH.value),
        "output": Path(OUTPUT.value) if OUTPUT.value else None,
    }
    tasks = are_algorithmic(workdirs)
    for flag in OF_TEXT if tasks else OF_TASKS:
        allowed = f"only for {'language models' if tasks else 'runs on tasks'}, and these are not"
        require(not flag.present, f"--{flag.name}", flag.value, allowed)
    if tasks:
        report = evaluate_tasks(workdirs, num_sequences=NUM_SEQUENCES.value, dropout=DROPOUT.value, **shared)
    else:
        report = evaluate(
            workdirs,
            last_tokens=LAST_TOKENS.value,
            max_windows=MAX_WINDOWS.value,
            data=DATA.value,
            rotary=tuple(ROTARY.value or ()),
            protocol=PROTOCOL.value or "",
            by_position=bool(BY_POSITION.value),
            **shared,
        )
    print(f"\n{report.table}\n\nresults: {report.directory}\npicture: {report.picture}")


if __name__ == "__main__":
    command_line.run(main)
