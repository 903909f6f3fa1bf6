"""Statistics of scored windows: perplexity by length, gain from context, loss by position, with bootstrap intervals.

In: the nll of windows, and the document that each window comes from. Out: results as JSON values, which `report.py`
writes. "low" and "high" are the ends of a 95 % bootstrap interval over documents, or over the windows of a single
document; None with a single window. The perplexity of a model that diverged is infinite where exp(loss) is too large
for a float; a result that depends on a NaN, or on a difference of two infinities, is NaN. Next: `perplexity.py`.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float64, Int, Num

BINS_PER_OCTAVE = 16
SMOOTHED_OCTAVES = 0.25
MARGIN_NATS = 0.1
WINDOW_DIGITS = 5  # of the nll of a window in a bin, of which there are many

Documents = Int[np.ndarray, "windows"]  # the document of each window
Statistic = Callable[..., Any]  # of sums and numbers of tokens, with a row for each document, and of their `axis`


def bootstrap_interval(documents: Documents, sums: tuple[np.ndarray, ...], statistic: Statistic) -> Any:
    """Return the ends of a statistic's 95 % bootstrap interval over documents, as numbers or lists, or (None, None)."""
    return over_seeds(documents, tuple(each[None] for each in sums[:-1]), sums[-1], statistic)[1:]


def over_seeds(
    documents: Documents,
    sums: tuple[Num[np.ndarray, "seeds windows ..."], ...],
    tokens: Num[np.ndarray, "windows ..."],
    statistic: Statistic,
) -> tuple[Any, Any, Any]:
    """Return a statistic of the mean sums over seeds and the ends of its 95 % interval over documents and seeds.

    Draw b of the bootstrap is statistic(documents of b) + t_b s / sqrt(n), for n seeds: s is the standard deviation of
    their statistics, and t_b is drawn from Student's t distribution with n - 1 degrees of freedom. One seed has the
    interval over documents. The ends are None with a single window.
    """
    means, num = (*(each.mean(axis=0) for each in sums), tokens), len(sums[0])
    with np.errstate(over="ignore", invalid="ignore"):  # a seed that diverged: NaN
        value = np.asarray(statistic(*means, axis=0)).tolist()
        found = _bootstrap(documents, means, statistic)
        if found is None:
            return value, None, None
        low, high = found.confidence_interval
        if num > 1:
            of_seeds = [statistic(*(each[seed] for each in sums), tokens, axis=0) for seed in range(num)]
            error = np.std(of_seeds, axis=0, ddof=1) / math.sqrt(num)
            t = np.random.default_rng(0).standard_t(num - 1, found.bootstrap_distribution.shape[-1])
            low, high = np.quantile(found.bootstrap_distribution + t * error[..., None], [0.025, 0.975], axis=-1)
    return value, low.tolist(), high.tolist()


def difference_of(statistic: Statistic) -> Statistic:
    """Return the statistic of paired sums: of the first half of the sums, minus that of the second half."""

    def difference(*sums_and_tokens: np.ndarray, axis: int) -> Any:
        *sums, tokens = sums_and_tokens
        ours, others = sums[: len(sums) // 2], sums[len(sums) // 2 :]
        return statistic(*ours, tokens, axis=axis) - statistic(*others, tokens, axis=axis)

    return difference


def _bootstrap(documents: Documents, sums: tuple[np.ndarray, ...], statistic: Statistic) -> Any:
    """Return scipy's result of a bootstrap over documents, or None with a single window.

    Whole documents are drawn, because the windows of a document are not independent; of a single document, windows are
    drawn, for lack of better units. All sums are taken of the same draw, so that paired values stay paired.

    Args:
        documents: the document of each row of the sums.
        sums: arrays with a row for each window.
        statistic: function of arrays with a row for each document, and of the `axis` of these rows.
    """
    unique, which = np.unique(documents, return_inverse=True)
    if len(unique) == 1:
        unique = which = np.arange(len(documents))
    if len(unique) == 1:
        return None

    def sum_by_document(rows: np.ndarray) -> np.ndarray:
        totals = np.zeros((len(unique), *rows.shape[1:]))
        np.add.at(totals, which, rows)
        return totals

    import scipy.stats  # imported here, because it takes half a second

    with warnings.catch_warnings(), np.errstate(over="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", scipy.stats.DegenerateDataWarning)  # raised for NaN, whose interval is NaN
        return scipy.stats.bootstrap(
            tuple(map(sum_by_document, sums)),
            statistic,
            axis=0,
            paired=True,
            vectorized=True,
            method="percentile",
            n_resamples=2000,
            batch=200,
            rng=np.random.default_rng(0),
        )


def ratio_of_sums(sums: np.ndarray, counts: np.ndarray, axis: int) -> Any:
    """Return sum(sums) / sum(counts), a statistic for `bootstrap_interval`."""
    return sums.sum(axis) / counts.sum(axis)


def perplexity_of(loss_nats: float) -> float:
    """Return exp(loss_nats), infinite where that is too large for a float."""
    try:
        return math.exp(loss_nats)
    except OverflowError:
        return math.inf


def _perplexity(nll: np.ndarray, tokens: np.ndarray, axis: int) -> Any:
    return np.exp(nll.sum(axis) / tokens.sum(axis))


def gain(local: np.ndarray, full: np.ndarray, tokens: np.ndarray, axis: int) -> Any:
    """Return the gain from context, a statistic for `over_seeds`; see `delta_result`."""
    return _perplexity(local, tokens, axis) - _perplexity(full, tokens, axis)


def lengths_of(documents: Documents, nll_by_length: dict[int, np.ndarray], train_length: int) -> dict[str, Any]:
    """Return the perplexity of one model at every length, and the document of each window."""
    lengths = [length_result(length, documents, nll) for length, nll in nll_by_length.items()]
    return {"documents": documents.tolist(), "lengths": lengths}


def deltas_of(documents: Documents, nll_by_length: dict[int, np.ndarray], train_length: int) -> dict[str, Any]:
    """Return the perplexities of one model, and its gain from context at every length above the train length."""
    sums = {length: nll.sum(axis=1)[None] for length, nll in nll_by_length.items()}
    tokens, local = np.full(*nll_by_length[train_length].shape), sums[train_length]
    longer = [length for length in sums if length > train_length]
    deltas = [delta_result(length, documents, local, sums[length], tokens) for length in longer]
    return lengths_of(documents, nll_by_length, train_length) | {"deltas": deltas}


def positions_of(documents: Documents, nll_by_length: dict[int, np.ndarray], train_length: int) -> dict[str, Any]:
    """Return the loss by position of one model in the windows of the only length."""
    (nll,) = nll_by_length.values()
    return {"documents": documents.tolist(), "positions": positions_result(documents, nll, train_length)}


def length_result(length: int, documents: Documents, nll: Float64[np.ndarray, "windows scored"]) -> dict[str, Any]:
    """Return the perplexity at one length, exp(nll_nats / num_tokens), from the nll in nats of all scored tokens.

    `window_nats` has the nll of each window, from which every interval can be computed again; `window_tokens` the
    number of its scored tokens, if they differ.
    """
    nll_of_windows, num_tokens = np.asarray(nll.sum(axis=1)), np.ma.count(nll, axis=1)  # without masked tokens
    total_nll = float(nll_of_windows.sum())
    low, high = bootstrap_interval(documents, (nll_of_windows, num_tokens), _perplexity)
    return {
        "length": length,
        "perplexity": perplexity_of(total_nll / int(num_tokens.sum())),
        "low": low,
        "high": high,
        "nll_nats": total_nll,
        "num_tokens": int(num_tokens.sum()),
        "num_windows": len(nll),
        "num_documents": len(set(documents.tolist())),
        "window_nats": nll_of_windows.tolist(),
    } | ({} if np.ptp(num_tokens) == 0 else {"window_tokens": num_tokens.tolist()})


def bits_per_byte(nll_nats: float, num_bytes: int) -> dict[str, Any]:
    """Return the loss in bits per byte of the scored text, nll_nats / (num_bytes ln 2), and the number of bytes."""
    return {"bits_per_byte": nll_nats / num_bytes / math.log(2), "num_bytes": num_bytes}


def delta_result(
    length: int,
    documents: Documents,
    local: Float64[np.ndarray, "seeds windows"],
    full: Float64[np.ndarray, "seeds windows"],
    tokens: Int[np.ndarray, "windows"],
) -> dict[str, Any]:
    """Return the gain from the context before the last T_train tokens at one length N, with its interval.

    `local` is the nll in nats of the last T_train tokens of every window, given only those tokens; `full` that of the
    same tokens, given all N. Over several seeds, perplexities are exp(mean loss).
    """
    _, low, high = over_seeds(documents, (local, full), tokens, gain)
    local_perplexity, full_perplexity = (perplexity_of(nll.mean(axis=0).sum() / tokens.sum()) for nll in (local, full))
    return {
        "length": length,
        "local": local_perplexity,
        "full": full_perplexity,
        "delta": local_perplexity - full_perplexity,  # equation 6 of the paper, positive where the context helps
        "low": low,
        "high": high,
    }


def bin_ends(length: int) -> Int[np.ndarray, "bins"]:
    """Return the last position of every bin; see `positions_result`."""
    octaves = np.arange(0, np.log2(length) * BINS_PER_OCTAVE) / BINS_PER_OCTAVE
    return np.append(np.unique(np.floor(2**octaves).astype(int)), length)


def positions_result(
    documents: Documents, nll_of_windows: Float64[np.ndarray, "windows length"], train_length: int
) -> dict[str, Any]:
    """Return the loss by position of one model, and the position where it breaks.

    The position of a target is the number of tokens before it in its window, 1 to N. The width of bins grows with the
    position: there are `BINS_PER_OCTAVE` bins to a doubling (fewer where there are fewer positions), and a power of two
    ends a bin:

        1 | 2 | .. | 25 | 26 | 27 28 | 29 | 30 | 31 32 | 33 | 34 | 35 36 | 37 38 | 39 | 40 41 | ..

    `nll_of_windows` is the nll in nats of every target. `window_nats` of a bin has that of each window, rounded.
    """
    ends = bin_ends(nll_of_windows.shape[1])
    nll = np.add.reduceat(nll_of_windows, np.append(0, ends[:-1]), axis=1)
    result = bins_result(documents, nll[None], ends, train_length)
    for each, of_bin in zip(result["bins"], nll.T, strict=True):
        each["window_nats"] = of_bin.round(WINDOW_DIGITS).tolist()
    return result


def levels(ends: Int[np.ndarray, "bins"], train_length: int) -> Statistic:
    """Return the statistic of the smoothed loss at every bin, then of the reference and the last octave's mean loss.

    A single bin is noisy, because it is one place of every window. The curve is therefore smoothed: its value at a bin
    is the mean over all targets of the bins that end within `SMOOTHED_OCTAVES` on either side. The reference is the
    loss around the train length, the mean over positions from T_train / 2 to T_train.
    """
    starts, octaves, length = np.append(0, ends[:-1]), np.log2(ends), ends[-1]
    reference_length = min(train_length, length)
    is_chosen = np.vstack(
        [
            np.abs(octaves[:, None] - octaves) <= SMOOTHED_OCTAVES + 1e-9,
            (starts >= reference_length // 2) & (ends <= reference_length),
            starts >= length // 2,
        ]
    )

    def means(nll: np.ndarray, tokens: np.ndarray, axis: int) -> np.ndarray:
        """Return the means over the chosen bins; bins are the first axis of the sums, and the means of the result."""
        nll, tokens = nll.sum(axis), tokens.sum(axis)
        is_finite = np.isfinite(nll)
        total = is_chosen @ np.where(is_finite, nll, 0)  # 0 * NaN of a bin that is not chosen would be NaN
        return np.where(is_chosen @ ~is_finite, np.nan, total) / (is_chosen @ tokens)

    return means


def bins_result(
    documents: Documents,
    nll: Float64[np.ndarray, "seeds windows bins"],
    ends: Int[np.ndarray, "bins"],
    train_length: int,
) -> dict[str, Any]:
    """Return the loss by position of the seeds of one method, from the nll in nats of every bin, and where it breaks.

    A model breaks at the first bin beyond the train length where the smoothed loss exceeds the reference (see `levels`)
    by more than `MARGIN_NATS`, and where the 95 % interval of that excess is above 0, so that noise is not taken for a
    break. It also breaks at a bin whose excess is NaN.
    """
    starts, statistic, num_windows = np.append(0, ends[:-1]), levels(ends, train_length), nll.shape[1]
    tokens = np.tile(ends - starts, (num_windows, 1))

    def excess(nll: np.ndarray, tokens: np.ndarray, axis: int) -> np.ndarray:
        means = statistic(nll, tokens, axis)
        return means[:-2] - means[-2]

    excess_nats, low, high = over_seeds(documents, (nll,), tokens, excess)
    total, each_bin = nll.mean(axis=0), tokens.sum(0)
    *smoothed_nats, reference_nats, last_octave_nats = statistic(total, tokens, 0).tolist()
    total = total.sum(0)
    is_above = np.array(excess_nats) > MARGIN_NATS
    if low is not None:
        is_above &= np.array(low) > 0
    is_broken = (starts >= train_length) & (is_above | np.isnan(excess_nats))
    return {
        "length": int(ends[-1]),
        "reference_nats": reference_nats,  # mean loss around the train length
        "last_octave_nats": last_octave_nats,  # mean loss from length / 2 to length
        "breaks_at": int(starts[np.argmax(is_broken)]) + 1 if is_broken.any() else None,
        "margin_nats": MARGIN_NATS,
        "num_windows": num_windows,
        "num_documents": len(set(documents.tolist())),
        "bins": [
            {
                "first": int(starts[i]) + 1,
                "last": int(ends[i]),
                "nll_nats": float(total[i] / each_bin[i]),
                "num_tokens": int(each_bin[i]),
                "smoothed_nats": smoothed_nats[i],
                "excess_nats": excess_nats[i],  # smoothed_nats minus reference_nats, with its interval
                "excess_low": None if low is None else low[i],
                "excess_high": None if high is None else high[i],
            }
            for i in range(len(ends))
        ],
    }
