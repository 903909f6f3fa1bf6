"""Perplexity by length, after the paper's protocol. In: a model and held-out documents. Next: `by_position.py`.

The whole N-token sequence is processed and its last tokens are scored. Every length ends at the same places of the same
documents, so lengths differ in how much comes before, not in what is predicted:

    document   . . . . . . . . . . . . . . . . e          e: where a window ends
    N = 4                      [i i i i]                  inputs; the target of each is the token after it
    N = 8              [i i i i i i i i]
    scored                          t t                   the last 2 targets, the same for both

The paper's appendix A asks what the context before the last T_train tokens is worth: their perplexity given those
tokens alone, less their perplexity given all N (equation 6). Here the first is the perplexity at the length T_train,
all of its targets scored, since sequences of all lengths end at the same places.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
import scipy.stats
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Float64
from tqdm import tqdm

from dape_jax.data.store import TokenStore
from dape_jax.errors import require
from dape_jax.evaluation.memory import Program, compile_programs
from dape_jax.model.attention import Auto, Dense
from dape_jax.model.positions import Rope, stretched
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.sharding import BATCH_AXES, put_batch
from dape_jax.tasks.tapes import AccuracyConfig
from dape_jax.training.step import make_nll_step


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Args of the evaluation by length.

    Args:
        lengths: sequence lengths N, in tokens.
        last_tokens: scored tokens at the end of a sequence; at N below it, all N, and so fewer than elsewhere.
        max_windows: windows that are scored at most; see `choose_windows`.
        batch_tokens: tokens processed at once; a batch holds as many sequences as fit, and one at least.
        blockwise_from: from this length on attention is fused or blockwise, so that memory is linear in length.
        block_size: rows of a block where it is blockwise.
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


def interval_over_documents(
    windows: list[Window], sums: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray]
) -> tuple[np.ndarray, np.ndarray] | None:
    """The 95 % bootstrap interval of a statistic of sums over documents; None with fewer than two documents.

    Whole documents are drawn, since a document's windows are not independent, and all sums are taken of the same draw:
    what is paired stays paired.

    Args:
        windows: where each row of the sums comes from.
        sums: arrays with a row for each window.
        statistic: of arrays with a row for each document and the `axis` that these rows are on.
    """
    of_documents = tuple(sum_by_document(windows, rows) for rows in sums)
    if len(of_documents[0]) < 2:
        return None
    interval = scipy.stats.bootstrap(
        of_documents,
        statistic,
        axis=0,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=2000,
        batch=200,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return np.asarray(interval.low), np.asarray(interval.high)


def sum_by_document(windows: list[Window], rows: np.ndarray) -> np.ndarray:
    """Add up the rows of every document's windows."""
    documents, which = np.unique([window.document for window in windows], return_inverse=True)
    sums = np.zeros((len(documents), *rows.shape[1:]))
    np.add.at(sums, which, rows)
    return sums


def summarise(length: int, windows: list[Window], nll_of_windows: np.ndarray, tokens_each: int) -> LengthResult:
    """Sum up a length; see `interval_over_documents`."""
    tokens_of_windows = np.full(len(windows), tokens_each)
    total_nll, total_tokens = float(nll_of_windows.sum()), int(tokens_of_windows.sum())

    def perplexity(nll: np.ndarray, tokens: np.ndarray, axis: int) -> np.ndarray:
        return np.exp(nll.sum(axis) / tokens.sum(axis))

    low, high = interval_over_documents(windows, (nll_of_windows, tokens_of_windows), perplexity) or (None, None)
    return LengthResult(
        length=length,
        perplexity=math.exp(total_nll / total_tokens),
        low=None if low is None else float(low),
        high=None if high is None else float(high),
        nll_nats=total_nll,
        num_tokens=total_tokens,
        num_windows=len(windows),
        num_documents=len({window.document for window in windows}),
    )


@dataclasses.dataclass(frozen=True)
class DeltaResult:
    """What a model gains from the context before the last T_train tokens, at one length.

    Args:
        length: N.
        local: perplexity of the last T_train tokens, given those tokens alone.
        full: perplexity of the same tokens, given all N.
        delta: local - full, the paper's equation 6; positive where the context helps.
        low: lower end of the difference's 95 % bootstrap interval over documents; None with fewer than two documents.
        high: its upper end.
    """

    length: int
    local: float
    full: float
    delta: float
    low: float | None
    high: float | None


def difference(
    length: int, windows: list[Window], local_nll: np.ndarray, full_nll: np.ndarray, tokens_each: int
) -> DeltaResult:
    """The gain at one length, from the nll of every window's last tokens.

    Args:
        length: N.
        windows: what was scored.
        local_nll: of a window's scored tokens, given those tokens alone.
        full_nll: of the same tokens, given all N.
        tokens_each: scored tokens of a window.
    """
    tokens = np.full(len(windows), tokens_each)

    def gain(local: np.ndarray, full: np.ndarray, tokens: np.ndarray, axis: int) -> np.ndarray:
        return np.exp(local.sum(axis) / tokens.sum(axis)) - np.exp(full.sum(axis) / tokens.sum(axis))

    low, high = interval_over_documents(windows, (local_nll, full_nll, tokens), gain) or (None, None)
    local, full = (math.exp(nll.sum() / tokens.sum()) for nll in (local_nll, full_nll))
    return DeltaResult(
        length=length,
        local=local,
        full=full,
        delta=local - full,
        low=None if low is None else float(low),
        high=None if high is None else float(high),
    )


def model_at(
    config: TransformerConfig, length: int, evaluation: EvaluationConfig, rotary: str, train_length: int
) -> TransformerConfig:
    """The same model with the attention that suits the length, and its rotary embedding stretched if asked for."""
    linear = Auto(block_size=evaluation.block_size)
    config = dataclasses.replace(config, attention=linear if length >= evaluation.blockwise_from else Dense())
    if isinstance(config.rotary, Rope):
        config = dataclasses.replace(config, rotary=stretched(config.rotary, rotary, length, train_length))
    return config


def batch_size_at(length: int, num_sequences: int, evaluation: EvaluationConfig | AccuracyConfig, mesh: Mesh) -> int:
    """Sequences in a batch: as many as `batch_tokens` holds, and one at least for each part that devices make of it."""
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    return -(-min(num_sequences, max(1, evaluation.batch_tokens // length)) // parts) * parts


def compile_lengths(
    config: TransformerConfig,
    params: Params,
    mesh: Mesh,
    evaluation: EvaluationConfig,
    *,
    num_windows: int,
    rotary: str,
    train_length: int,
    name: str,
) -> list[Program]:
    """The scoring step of one model for every length, compiled and found to fit into memory.

    Args:
        config: the model.
        params: its parameters, or their shapes and shardings alone.
        mesh: where they live; sequences are split over its devices.
        evaluation: lengths and protocol.
        num_windows: sequences that will be scored.
        rotary: "rope" for the rotary embedding as it is, or how it is stretched; see `positions.stretched`.
        train_length: of the model, in tokens.
        name: shown by progress, log and errors.

    Raises:
        InputError: a length does not fit; see `compile_programs`.
    """

    def step_at(length: int) -> tuple[Wrapped, int]:
        graphdef, _ = model_structure(model_at(config, length, evaluation, rotary, train_length))
        step = make_nll_step(graphdef, min(evaluation.last_tokens, length))
        return step, batch_size_at(length, num_windows, evaluation, mesh)

    return compile_programs(step_at, evaluation.lengths, params, mesh, batch_names=("inputs", "targets"), name=name)


def score_windows(
    programs: list[Program], params: Params, mesh: Mesh, store: TokenStore, windows: list[Window], name: str
) -> Iterator[tuple[int, Float64[np.ndarray, "windows scored"]]]:
    """Run a model's programs: each length, and the nll of every window's scored tokens there, in nats.

    Args:
        programs: from `compile_lengths`.
        params: the parameters, placed as they were said to be.
        mesh: where they live.
        store: held-out documents.
        windows: where sequences end; see `choose_windows`.
        name: shown by the progress bar.
    """
    num_tokens = len(windows) * sum(program.length for program in programs)
    with jax.set_mesh(mesh), tqdm(total=num_tokens, unit="token", unit_scale=True, desc=name) as bar:
        for program in programs:
            bar.set_postfix_str(f"length {program.length}")
            nlls = []
            for batch, num_real in window_batches(store, windows, program.length, program.batch_size):
                nll_BT = jax.device_get(program.step(params, put_batch(batch, mesh)))
                nlls.append(np.asarray(nll_BT[:num_real], np.float64))
                bar.update(num_real * program.length)
            yield program.length, np.concatenate(nlls)
