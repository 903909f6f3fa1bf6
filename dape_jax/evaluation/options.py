"""Options of the evaluations, which are flags of `eval.py`. Imports no JAX, so that --help is quick."""

import dataclasses

from dape_jax.command_line import flag
from dape_jax.errors import require

FORMATS = ("csv", "md", "pdf", "png", "svg")
STEP_HELP = "Checkpoint: newest, best (lowest validation loss) or its number."


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `evaluate` and `evaluate_tasks`, and flags of `eval.py`.

    None or empty means the value in the run's config.
    """

    step: str = flag("newest", STEP_HELP)
    lengths: tuple[int, ...] = flag(
        (),
        "Increasing sequence lengths in tokens (of a task: input lengths in symbols); 40-500/20 is 40, 60, 80 .. 500, "
        "and 1-40 is 1, 2, 3 .. 40. Those of the run's config if empty.",
    )
    format: tuple[str, ...] = flag((), "Further files: csv, md with the table; pdf, svg with the figure of the png.")
    baseline: str | None = flag(
        None,
        "Run, by name or directory, to which the others are compared by paired differences on the same windows: of the "
        "loss in nats (with --protocol=delta, of ΔP), at each length or position.",
    )
    group_seeds: bool = flag(True, "Show runs whose configs differ only in seeds as one method: mean and interval.")
    labels: tuple[str, ...] = flag((), "Names of runs or methods in table and figure: run=Name,other=Another name.")
    # Of language models.
    last_tokens: int | None = flag(None, "Scored tokens of a sequence; that of the run's config if unset.")
    max_windows: int | None = flag(None, "Maximum number of scored sequences; that of the run's config if unset.")
    data: str | None = flag(
        None,
        "Another text to score, in the form of --config.data.path: all documents of raw text; of a corpus, --split.",
    )
    split: str = flag("validation", "Documents of a corpus that are scored: train, validation or all.")
    verify: bool = flag(False, "Check the digest of the text, even if its files are unchanged since the last check.")
    rotary: tuple[str, ...] = flag(
        ("rope",),
        "Variants of models with RoPE, one row of the table each: rope (as trained), pi, ntk, yarn. Other models are "
        "evaluated once, as trained.",
    )
    stride: int | None = flag(
        None,
        "Score each token of every document once, except the first, in windows of the only length that advance by this "
        "number of tokens, as in Hugging Face's guide. Windows without overlap do not score their first tokens. With "
        "--bos, documents begin with the token.",
    )
    bos: bool = flag(
        True, "Replace the first token of a sequence by that which an imported model's tokenizer puts before a text."
    )
    protocol: str = flag(
        "perplexity",
        "perplexity of the last tokens by length; delta, the gain from the context before the last train-length "
        "tokens; or positions, the loss by position in windows of the longest length.",
    )
    # Of runs on tasks.
    num_sequences: int | None = flag(None, "For runs on tasks: sequences of each length; as in its config if unset.")
    dropout: bool | None = flag(None, "For runs on tasks: whether dropout stays on; as in the run's config if unset.")

    def __post_init__(self):
        require(all("=" in label for label in self.labels), "labels", self.labels, "must be run=Name,other=Name")
        require(set(self.format) <= set(FORMATS), "format", self.format, f"must be of {list(FORMATS)}, or none")
        splits = ["train", "validation", "all"]
        require(self.split in splits, "split", self.split, f"must be one of {splits}")

    def refuse(self, models: str, *names: str) -> None:
        """Raise `InputError` if one of these options is given, which are only for other models."""
        for field in dataclasses.fields(self):
            value, allowed = getattr(self, field.name), f"must not be given: it is only for {models}"
            require(field.name not in names or value == field.default, field.name, value, allowed)
