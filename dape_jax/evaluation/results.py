"""Results of evaluating language models: what `perplexity.py` computes and `report.py` writes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LengthResult:
    """Perplexity at one length.

    Args:
        length: sequence length N.
        perplexity: exp(sum of nll / number of tokens).
        low: lower end of the 95 % bootstrap interval over documents, or None with fewer than two documents.
        high: upper end of the interval, or None.
        nll_nats: sum over all scored tokens.
        num_tokens: number of scored tokens.
        num_windows: number of sequences.
        num_documents: number of documents that the sequences come from.
    """

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
    """Gain from the context before the last T_train tokens, at one length.

    Args:
        length: sequence length N.
        local: perplexity of the last T_train tokens, given only those tokens.
        full: perplexity of the same tokens, given all N.
        delta: local - full (equation 6 of the paper), positive where the context helps.
        low: lower end of the 95 % bootstrap interval of `delta` over documents, or None with fewer than two documents.
        high: upper end of the interval, or None.
    """

    length: int
    local: float
    full: float
    delta: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class PositionBin:
    """Loss over a range of positions.

    Args:
        first: first position of the bin.
        last: last position of the bin.
        nll_nats: mean over the targets of the bin.
        num_tokens: number of these targets.
        smoothed_nats: mean over the targets of the bins nearby; see `positions_result`.
        excess_nats: `smoothed_nats` minus the loss around the train length.
        excess_low: lower end of the 95 % bootstrap interval of `excess_nats` over documents, or None with fewer than
            two documents.
        excess_high: upper end of the interval, or None.
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
    """Loss by position of one model.

    Args:
        length: length N of the windows.
        reference_nats: mean loss around the train length; see `positions_result`.
        last_octave_nats: mean loss from N / 2 to N.
        breaks_at: first position of the bin where the model breaks, or None if it does not.
        margin_nats: excess that counts as a break.
        num_windows: number of windows.
        num_documents: number of documents that the windows come from.
        bins: the loss by position.
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
    """Identity of an evaluated model; base class of the three results below.

    Args:
        name: name of the workdir, with the rotary variant if there is one.
        workdir: run directory.
        step: number of the checkpoint.
        train_length: T_train, in tokens.
        rotary: "rope" for the model as trained, or the stretching of its rotary embedding.
        last_tokens: scored tokens of a sequence.
        data: digest of the scored corpus.
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
