"""Results of evaluating language models: what `perplexity.py` computes and `report.py` writes.

`low` and `high` are the ends of a 95 % bootstrap interval over documents, or None with fewer than two documents.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LengthResult:
    """Perplexity at one sequence length: exp(nll_nats / num_tokens), the nll summed over all scored tokens."""

    length: int
    perplexity: float
    low: float | None
    high: float | None
    nll_nats: float
    num_tokens: int
    num_windows: int
    num_documents: int


@dataclasses.dataclass(frozen=True)
class DeltaResult:
    """Gain from the context before the last T_train tokens, at one sequence length N.

    `local` is the perplexity of the last T_train tokens given only those tokens, `full` that of the same tokens given
    all N, and `delta` is local - full (equation 6 of the paper), positive where the context helps. The interval is that
    of `delta`.
    """

    length: int
    local: float
    full: float
    delta: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class PositionBin:
    """Loss at the positions `first` to `last`; see `positions_result`.

    `nll_nats` is the mean over the targets of the bin, `smoothed_nats` that over the targets of the bins nearby, and
    `excess_nats` is `smoothed_nats` minus the loss around the train length, with its interval.
    """

    first: int
    last: int
    nll_nats: float
    num_tokens: int
    smoothed_nats: float
    excess_nats: float
    excess_low: float | None
    excess_high: float | None


@dataclasses.dataclass(frozen=True)
class PositionsResult:
    """Loss by position of one model in windows of `length` tokens; see `positions_result`.

    `reference_nats` is the mean loss around the train length, `last_octave_nats` that from length / 2 to length.
    `breaks_at` is the first position of the bin where the model breaks, or None; `margin_nats` is the excess that
    counts as a break.
    """

    length: int
    reference_nats: float
    last_octave_nats: float
    breaks_at: int | None
    margin_nats: float
    num_windows: int
    num_documents: int
    bins: list[PositionBin]


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """Identity of an evaluated model, and the base class of the three results below.

    `rotary` is "rope" for the model as trained, else the stretching of its rotary embedding; `last_tokens` the number
    of scored tokens of a sequence; `data` the digest of the scored corpus.
    """

    name: str
    workdir: str
    step: int
    train_length: int
    rotary: str
    last_tokens: int
    data: str


@dataclasses.dataclass(frozen=True)
class RunResult(EvaluatedModel):
    """Perplexity by length of one model: protocol "perplexity"."""

    lengths: list[LengthResult]


@dataclasses.dataclass(frozen=True)
class DeltaRunResult(RunResult):
    """Perplexity and gain from context by length of one model: protocol "delta".

    The first of `lengths` is T_train: the local perplexity of every delta. `deltas` are at the lengths above it.
    """

    deltas: list[DeltaResult]


@dataclasses.dataclass(frozen=True)
class PositionsRunResult(EvaluatedModel):
    """Loss by position of one model: `by_position`."""

    positions: PositionsResult
