"""Evaluate trained models by sequence length.

python eval.py --workdir=runs/a,runs/b --lengths=128,256,512                        # perplexity by length
python eval.py --workdir=runs/a,runs/b --lengths=128,256,512 --protocol=delta       # what context gains
python eval.py --workdir=runs/a,runs/b --lengths=512 --by_position                  # loss by position
"""

from pathlib import Path

from absl import flags

from dape_jax import command_line
from dape_jax.errors import require
from dape_jax.evaluation.evaluate import evaluate
from dape_jax.processes import require_alone
from dape_jax.sharding import read_mesh

WORKDIR = flags.DEFINE_list("workdir", None, "Directories of the runs to compare.")
STEP = flags.DEFINE_string("step", "newest", "Checkpoint: newest, best (lowest validation loss) or its number.")
LENGTHS = flags.DEFINE_list(
    "lengths", [], "Sequence lengths in tokens, increasing; those of the run's config if empty."
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
MESH = flags.DEFINE_string(
    "mesh",
    None,
    "Mesh of the devices, as axis=size,axis=size: context=8 has eight devices share every sequence. Unset, sequences "
    "are spread over all devices.",
)
OUTPUT = flags.DEFINE_string("output", None, "Where results go; the workdir, or the directory common to all, if unset.")
flags.mark_flag_as_required("workdir")


@flags.validator("lengths", "--lengths must be whole numbers, parted by commas")
def _are_whole_numbers(values: list[str]) -> bool:
    return all(value.isdecimal() for value in values)


def main(_: list[str]) -> None:
    """Flags, then one call."""
    require_alone()
    require(all(WORKDIR.value or [""]), "--workdir", WORKDIR.value, "directories, parted by commas")
    report = evaluate(
        [Path(workdir) for workdir in WORKDIR.value or ()],
        step=STEP.value or "newest",
        lengths=tuple(int(length) for length in LENGTHS.value or ()),
        last_tokens=LAST_TOKENS.value,
        max_windows=MAX_WINDOWS.value,
        data=DATA.value,
        rotary=tuple(ROTARY.value or ()),
        protocol=PROTOCOL.value or "",
        by_position=bool(BY_POSITION.value),
        mesh=None if MESH.value is None else read_mesh("--mesh", MESH.value),
        output=Path(OUTPUT.value) if OUTPUT.value else None,
    )
    print(f"\n{report.table}\n\nresults: {report.directory}\npicture: {report.picture}")


if __name__ == "__main__":
    command_line.run(main)
