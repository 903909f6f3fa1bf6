"""Options of the evaluations, which are flags of `eval.py`. Imports no JAX, so that --help is quick."""

import dataclasses

from dape_jax.command_line import flag
from dape_jax.errors import require

STEP_HELP = "Checkpoint: newest, best (lowest validation loss) or its number."
PROTOCOLS = ("perplexity", "delta")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of every evaluation, and flags of `eval.py`. None or empty means the value in the run's config."""

    step: str = flag("newest", STEP_HELP)
    lengths: tuple[int, ...] = flag(
        (),
        "Increasing sequence lengths in tokens (of a task: input lengths in symbols); 40-500/20 is 40, 60, 80 .. 500, "
        "and 1-40 is 1, 2, 3 .. 40. Those of the run's config if empty.",
    )


@dataclasses.dataclass(frozen=True)
class PerplexityOptions(Options):
    """Options of `evaluate`, and flags of `eval.py` for language models."""

    last_tokens: int | None = flag(None, "Scored tokens of a sequence; that of the run's config if unset.")
    max_windows: int | None = flag(None, "Maximum number of scored sequences; that of the run's config if unset.")
    data: str | None = flag(
        None, "Another corpus whose validation documents are scored, in the form of --config.data.path."
    )
    rotary: tuple[str, ...] = flag(
        ("rope",),
        "Variants of models with RoPE, one row of the table each: rope (as trained), pi, ntk, yarn. Other models are "
        "evaluated once, as trained.",
    )
    protocol: str = flag(
        "perplexity",
        "perplexity of the last tokens by length; or delta, the gain from the context before the last train-length "
        "tokens.",
    )
    by_position: bool = flag(False, "Measure the loss by position in windows of the longest length instead.")

    def __post_init__(self):
        is_delta, by_position, last_tokens = self.protocol == "delta", self.by_position, self.last_tokens
        require(self.protocol in PROTOCOLS, "protocol", self.protocol, f"must be one of {list(PROTOCOLS)}")
        require(not (by_position and is_delta), "by_position", by_position, "cannot be combined with --protocol=delta")
        allowed = "must not be given with --protocol=delta, which scores as many tokens as the train length"
        require(not is_delta or last_tokens is None, "last_tokens", last_tokens, allowed)
        allowed = "must not be given with --by_position, which scores all tokens"
        require(not by_position or last_tokens is None, "last_tokens", last_tokens, allowed)
        from dape_jax.model.positions import STRETCHES  # imports JAX, which --help does not need

        is_known = set(self.rotary) <= set(STRETCHES) and len(set(self.rotary)) == len(self.rotary) > 0
        require(is_known, "rotary", self.rotary, f"must be one or more of {list(STRETCHES)}, each once")

    @property
    def kind(self) -> str:
        """Return the kind of comparison: "perplexity", "delta" or "positions"."""
        return "positions" if self.by_position else self.protocol


@dataclasses.dataclass(frozen=True)
class TaskOptions(Options):
    """Options of `evaluate_tasks`, and flags of `eval.py` for runs on algorithmic tasks."""

    num_sequences: int | None = flag(
        None, "For runs on tasks: sequences of each length; that of the run's config if unset."
    )
    dropout: bool | None = flag(None, "For runs on tasks: whether dropout stays on; as in the run's config if unset.")
