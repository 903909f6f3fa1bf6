"""Perplexity by length, after the paper's protocol. In: checkpoints and held-out documents. Next: `evaluate.py`.

The whole N-token sequence is processed and its last tokens are scored. Every length ends at the same places of the same
documents, so lengths differ in how much comes before, not in what is predicted:

    document   . . . . . . . . . . . . . . . . e          e: where a window ends
    N = 4                      [i i i i]                  inputs; the target of each is the token after it
    N = 8              [i i i i i i i i]
    scored                          t t                   the last 2 targets, the same for both
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import numpy as np
import scipy.stats
from jax.sharding import Mesh
from tqdm import tqdm

from dape_jax.attention import Blockwise, Dense
from dape_jax.data.store import TokenStore
from dape_jax.errors import require
from dape_jax.positions import Rope, stretched
from dape_jax.sharding import put_batch
from dape_jax.training.step import make_nll_step
from dape_jax.transformer import Params, TransformerConfig, model_structure


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Args of the evaluation by length.

    Args:
        lengths: sequence lengths N, in tokens.
        last_tokens: scored tokens at the end of a sequence; at N below it, all N, and so fewer than elsewhere.
        max_windows: windows that are scored at most; see `choose_windows`.
        batch_tokens: tokens processed at once; a batch holds as many sequences as fit, and one at least.
        blockwise_from: from this length on attention is blockwise, so that memory is linear in length.
        block_size: rows of a block then.
    """

    lengths: tuple[int, ...]
    last_tokens: int
    max_windows: int
    batch_tokens: int
    blockwise_from: int
    block_size: int

    def __post_init__(self):
        require(len(self.lengths) > 0, "evaluation.lengths", self.lengths, "one length or more")
        for length in self.lengths:
            require(
                isinstance(length, int) and length > 0, "evaluation.lengths", self.lengths, "positive numbers of tokens"
            )
        require(
            list(self.lengths) == sorted(set(self.lengths)), "evaluation.lengths", self.lengths, "increasing, each once"
        )
        for field in ("last_tokens", "max_windows", "batch_tokens", "blockwise_from", "block_size"):
            require(getattr(self, field) > 0, f"evaluation.{field}", getattr(self, field), "a positive number")


@dataclasses.dataclass(frozen=True)
class Window:
    """A place in a document where sequences of all lengths end: the token at `end - 1` is the last target."""

    document: int
    end: int


def choose_windows(store: TokenStore, longest: int, max_windows: int) -> list[Window]:
    """Places to score: windows of the longest length at the end of documents, then before those, without overlap.

    All documents that are long enough give one before any gives two, so that a few long ones do not decide the figure.

    Args:
        store: held-out documents.
        longest: the longest N; a window takes N inputs and one more token, the last target.
        max_windows: at most so many; among documents of equal standing the choice is random, and always the same.

    Raises:
        InputError: no document is long enough.
    """
    document_lengths = np.diff(store.offsets)
    windows_each = (document_lengths - 1) // longest
    order = np.random.default_rng(0).permutation(store.num_documents)
    windows = [
        Window(int(document), int(document_lengths[document]) - taken * longest)
        for taken in range(min(max_windows, max(windows_each)))
        for document in order
        if taken < windows_each[document]
    ]
    require(
        bool(windows),
        "evaluation.lengths",
        longest,
        f"at most {max(document_lengths) - 1}: the longest held-out document has {max(document_lengths)} tokens",
    )
    return windows[:max_windows]


def window_batches(
    store: TokenStore, windows: list[Window], length: int, batch_size: int
) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """Sequences of one length that end at the windows, and how many rows of the batch are real.

    All batches have one shape: the last is filled up with copies of its last row.
    """
    for first in range(0, len(windows), batch_size):
        chosen = windows[first : first + batch_size]
        padded = chosen + chosen[-1:] * (batch_size - len(chosen))
        rows = np.stack([store.document(w.document)[w.end - length - 1 : w.end] for w in padded]).astype(np.int32)
        yield {"inputs": rows[:, :-1], "targets": rows[:, 1:]}, len(chosen)


@dataclasses.dataclass(frozen=True)
class LengthResult:
    """Perplexity at one length.

    Args:
        length: N.
        perplexity: exp(sum of nll / number of tokens).
        low: lower end of the 95 % bootstrap interval over documents; None with fewer than two documents.
        high: its upper end.
        nll_nats: sum over all scored tokens.
        num_tokens: scored tokens.
        num_windows: sequences.
        num_documents: documents they come from.
    """

    length: int
    perplexity: float
    low: float | None
    high: float | None
    nll_nats: float
    num_tokens: int
    num_windows: int
    num_documents: int


def summarise(length: int, windows: list[Window], nll_of_windows: np.ndarray, tokens_each: int) -> LengthResult:
    """Sum up a length; the interval resamples whole documents, since a document's windows are not independent."""
    documents = np.array([window.document for window in windows])
    _, which = np.unique(documents, return_inverse=True)
    nll_of_documents = np.bincount(which, weights=nll_of_windows)
    tokens_of_documents = np.bincount(which) * tokens_each
    total_nll, total_tokens = float(nll_of_documents.sum()), int(tokens_of_documents.sum())

    def perplexity(nll: np.ndarray, tokens: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.exp(nll.sum(axis) / tokens.sum(axis))

    low = high = None
    if len(nll_of_documents) > 1:
        interval = scipy.stats.bootstrap(
            (nll_of_documents, tokens_of_documents),
            perplexity,
            paired=True,
            vectorized=True,
            method="percentile",
            n_resamples=2000,
            batch=200,
            rng=np.random.default_rng(0),
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    return LengthResult(
        length=length,
        perplexity=math.exp(total_nll / total_tokens),
        low=low,
        high=high,
        nll_nats=total_nll,
        num_tokens=total_tokens,
        num_windows=len(windows),
        num_documents=len(nll_of_documents),
    )


def model_at(
    config: TransformerConfig, length: int, evaluation: EvaluationConfig, rotary: str, train_length: int
) -> TransformerConfig:
    """The same model with the attention that suits the length, and its rotary embedding stretched if asked for."""
    blockwise = Blockwise(block_size=evaluation.block_size, num_buckets=4)
    config = dataclasses.replace(config, attention=blockwise if length >= evaluation.blockwise_from else Dense())
    if isinstance(config.rotary, Rope):
        config = dataclasses.replace(config, rotary=stretched(config.rotary, rotary, length, train_length))
    return config


def evaluate_lengths(
    config: TransformerConfig,
    params: Params,
    mesh: Mesh,
    store: TokenStore,
    windows: list[Window],
    evaluation: EvaluationConfig,
    name: str,
    rotary: str,
    train_length: int,
) -> list[LengthResult]:
    """Perplexity of one model at every length.

    Args:
        config: the model.
        params: its parameters.
        mesh: where they live; sequences are split over its devices.
        store: held-out documents.
        windows: where sequences end; see `choose_windows`.
        evaluation: lengths and protocol.
        name: shown by the progress bar.
        rotary: "rope" for the rotary embedding as it is, or how it is stretched; see `positions.stretched`.
        train_length: of the model, in tokens.
    """
    results = []
    with (
        jax.set_mesh(mesh),
        tqdm(total=len(windows) * sum(evaluation.lengths), unit="token", unit_scale=True, desc=name) as bar,
    ):
        for length in evaluation.lengths:
            bar.set_postfix_str(f"length {length}")
            tokens_each = min(evaluation.last_tokens, length)
            graphdef, _ = model_structure(model_at(config, length, evaluation, rotary, train_length))
            nll_step = make_nll_step(graphdef, tokens_each)
            batch_size = -(-min(len(windows), max(1, evaluation.batch_tokens // length)) // mesh.size) * mesh.size
            nlls = []
            for batch, num_real in window_batches(store, windows, length, batch_size):
                nll_BT = np.asarray(jax.device_get(nll_step(params, put_batch(batch, mesh))), np.float64)
                nlls.append(nll_BT[:num_real].sum(axis=1))
                bar.update(num_real * length)
            results.append(summarise(length, windows, np.concatenate(nlls), tokens_each))
    return results
