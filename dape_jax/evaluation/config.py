"""Config sections of the evaluations: `EvaluationConfig` of language models, `AccuracyConfig` of algorithmic tasks.

This module must not import `dape_jax.config`, which imports it.
"""

import dataclasses

from dape_jax.errors import positive, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of perplexity by length; see `perplexity.py`."""

    lengths: tuple[int, ...]  # sequence lengths N in tokens, increasing
    last_tokens: int = 64  # scored tokens at the end of a sequence; all tokens of a shorter one
    max_windows: int  # maximum number of scored windows; see `choose_windows`
    batch_tokens: int = 8192  # a batch has as many sequences as fit, and at least one for each device
    blockwise_from: int = 512  # length from which attention is fused or blockwise, so that memory is linear in length
    block_size: int = 32  # rows of a block of blockwise attention

    def __post_init__(self):
        _check_lengths(self.lengths)
        positive(self, "evaluation", "last_tokens", "max_windows", "batch_tokens", "blockwise_from", "block_size")


@dataclasses.dataclass(frozen=True)
class AccuracyConfig:
    """Settings of accuracy by length; see `accuracy.py`, and `EvaluationConfig` for the shared fields."""

    lengths: tuple[int, ...]  # input lengths in symbols, increasing
    num_sequences: int  # sequences of each length
    batch_tokens: int  # a batch has as many tapes as fit
    pad_to: int  # tapes are padded to a multiple of this; compare `data.pad_to`
    dropout: bool  # whether dropout stays on, as in the reference's evaluation
    blockwise_from: int  # tape length from which attention is blockwise
    block_size: int  # rows of a block of blockwise attention

    def __post_init__(self):
        _check_lengths(self.lengths)
        positive(self, "evaluation", "num_sequences", "batch_tokens", "pad_to", "blockwise_from", "block_size")


def _check_lengths(lengths: tuple[int, ...]) -> None:
    is_increasing = list(lengths) == sorted(set(lengths)) and min(lengths, default=0) > 0
    allowed = "must be one or more positive integers in increasing order"
    require(is_increasing, "evaluation.lengths", lengths, allowed)
