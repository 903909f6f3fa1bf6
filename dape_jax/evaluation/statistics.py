"""Statistics of scored windows: perplexity by length, gain from context, loss by position, with bootstrap intervals.

In: `Scores`, of one run or of the seeds of one method. Out: results as JSON values, which `report.py` writes. "low" and
"high" are the ends of a 95 % interval over documents and seeds (see `over_seeds`), None with a single window. The
perplexity of a model that diverged is infinite where exp(loss) is too large for a float; a result that depends on a
NaN, or on a difference of two infinities, is NaN. Next: `protocols.py`.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int, Num

BINS_PER_OCTAVE = 16
SMOOTHED_OCTAVES = 0.25
MARGIN_NATS = 0.1
WINDOW_DIGITS = 5  # of the nll of a window in a bin, of which there are many
NUM_DRAWS = 2000

Documents = Int[np.ndarray, "windows"]  # the document of each window
NllByLength = dict[int, Float64[np.ndarray, "windows scored"]]  # nats, of the scored tokens of every window
Statistic = Callable[..., Float[np.ndarray, "... values"]]  # of sums and numbers of tokens, all [..., places]


class Scores(NamedTuple):
    """Losses of the seeds of one method on the same windows, in sums over the scored tokens of each place.

    A place is a sequence length or, for the loss by position, a bin of positions, which its last one names.
    """

    documents: Documents
    places: list[int]
    nats: Float64[np.ndarray, "seeds windows places"]
    tokens: Int[np.ndarray, "windows places"]
    num_bytes: list[int] | None = None  # that the scored tokens of each place decode to


class Interval(NamedTuple):
    """Value of a statistic, and the ends of its interval or None."""

    value: float
    low: float | None
    high: float | None


def scores_by_length(documents: Documents, nll_by_length: NllByLength) -> Scores:
    """Return the scores of one run at each length; masked tokens are not scored."""
    nats = np.stack([np.asarray(nll.sum(axis=1)) for nll in nll_by_length.values()], axis=1)
    tokens = np.stack([np.ma.count(nll, axis=1) for nll in nll_by_length.values()], axis=1)
    return Scores(documents, list(nll_by_length), nats[None], tokens)


def scores_by_position(documents: Documents, nll_by_length: NllByLength) -> Scores:
    """Return the scores of one run in bins of the positions in windows of the only length.

    The position of a target is the number of tokens before it in its window, 1 to N. The width of bins grows with the
    position: there are `BINS_PER_OCTAVE` bins to a doubling (fewer where there are fewer positions), and a power of two
    ends a bin:

        1 | 2 | .. | 25 | 26 | 27 28 | 29 | 30 | 31 32 | 33 | 34 | 35 36 | 37 38 | 39 | 40 41 | ..
    """
    (nll,) = nll_by_length.values()
    length = nll.shape[1]
    octaves = np.arange(0, np.log2(length) * BINS_PER_OCTAVE) / BINS_PER_OCTAVE
    ends = np.append(np.unique(np.floor(2**octaves).astype(int)), length)
    nats = np.add.reduceat(nll, np.append(0, ends[:-1]), axis=1)
    return Scores(documents, ends.tolist(), nats[None], np.tile(np.diff(ends, prepend=0), (len(nll), 1)))


def over_seeds(
    documents: Documents,
    sums: tuple[Num[np.ndarray, "seeds windows places"], ...],
    tokens: Num[np.ndarray, "windows places"],
    statistic: Statistic,
) -> list[Interval]:
    """Return each value of a statistic of the mean sums over seeds, with its 95 % interval over documents and seeds.

    Draw b of the bootstrap is statistic(documents of b) + t_b s / sqrt(n), for n seeds: s is the standard deviation of
    their statistics, and t_b is drawn from Student's t distribution with n - 1 degrees of freedom. One seed has the
    interval over documents. The ends are None with a single window.

    Whole documents are drawn, because the windows of a document are not independent; of a single document, windows are
    drawn, for lack of better units. All sums are taken of the same draw, so that paired values stay paired.
    """
    unique, units = np.unique(documents, return_inverse=True)
    if len(unique) == 1:
        unique = units = np.arange(len(documents))

    def of_units(rows: np.ndarray) -> np.ndarray:
        totals = np.zeros((len(unique), rows.shape[1]))
        np.add.at(totals, units, rows)
        return totals

    num_seeds, means = len(sums[0]), [of_units(rows) for rows in (*(each.mean(axis=0) for each in sums), tokens)]
    draws = np.random.default_rng(0).integers(0, len(unique), (NUM_DRAWS, len(unique)))
    with np.errstate(over="ignore", invalid="ignore"):  # a seed that diverged: NaN
        values = statistic(*(each.sum(axis=0) for each in means)).tolist()
        if len(unique) == 1:
            return [Interval(value, None, None) for value in values]
        drawn = statistic(*(np.stack([each[draw].sum(axis=0) for draw in draws]) for each in means))
        if num_seeds > 1:
            of_seeds = statistic(*(each.sum(axis=1) for each in sums), tokens.sum(axis=0))
            t = np.random.default_rng(0).standard_t(num_seeds - 1, NUM_DRAWS)
            drawn += t[:, None] * of_seeds.std(axis=0, ddof=1) / math.sqrt(num_seeds)
        low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return list(map(Interval, values, low.tolist(), high.tolist()))


# ---- statistics other than the mean loss, which is `np.divide`


def gains(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the statistic of the gain from context at every length after the first; see `gains_of`."""
    perplexities = np.exp(nats / tokens)
    return perplexities[..., :1] - perplexities[..., 1:]


def levels(places: Sequence[int], train_length: int) -> Statistic:
    """Return the statistic of the smoothed loss at every bin, then of the reference and the last octave's mean loss.

    A single bin is noisy, because it is one place of every window. The curve is therefore smoothed: its value at a bin
    is the mean over all targets of the bins that end within `SMOOTHED_OCTAVES` on either side. The reference is the
    loss around the train length, the mean over the bins from T_train / 2 to T_train, without those across these ends.
    """
    ends = np.array(places)
    starts, octaves, length = np.append(0, ends[:-1]), np.log2(ends), ends[-1]
    reference_length = min(train_length, length)
    is_chosen = np.vstack(
        [
            np.abs(octaves[:, None] - octaves) <= SMOOTHED_OCTAVES + 1e-9,
            (starts >= reference_length // 2) & (ends <= reference_length),
            starts >= length // 2,
        ]
    )

    def means(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        is_finite = np.isfinite(nats)
        total = np.where(is_finite, nats, 0) @ is_chosen.T  # 0 * NaN of a bin that is not chosen would be NaN
        return np.where(~is_finite @ is_chosen.T, np.nan, total) / (tokens @ is_chosen.T)

    return means


# ---- results


def perplexity_of(loss_nats: float) -> float:
    """Return exp(loss_nats), infinite where that is too large for a float."""
    return math.inf if loss_nats > math.log(sys.float_info.max) else math.exp(loss_nats)


def lengths_of(scores: Scores, train_length: int) -> dict[str, Any]:
    """Return the perplexity at every length, exp(nll_nats / num_tokens), and the document of each window.

    Over several seeds it is exp(mean loss). The result of one seed has `window_nats`, the nll of each window, from
    which every interval can be computed again, and `window_tokens`, the number of its scored tokens, if they differ.
    `bits_per_byte` is nll_nats / (num_bytes ln 2), absent if a length scores only ends of documents, without bytes.
    """
    documents, lengths, nats, tokens, num_bytes = scores
    results = []
    for at, loss in enumerate(over_seeds(documents, (nats,), tokens, np.divide)):
        nll_nats, num_tokens = float(nats[..., at].mean(axis=0).sum()), int(tokens[:, at].sum())
        perplexity, low, high = (None if each is None else perplexity_of(each) for each in loss)
        result = {"length": lengths[at], "perplexity": perplexity, "low": low, "high": high}
        result |= {"nll_nats": nll_nats, "num_tokens": num_tokens, **sample_of(documents)}
        if num_bytes and all(num_bytes):
            result |= {"bits_per_byte": nll_nats / num_bytes[at] / math.log(2), "num_bytes": num_bytes[at]}
        if len(nats) == 1:
            result |= {"window_nats": nats[0, :, at].tolist()}
            result |= {"window_tokens": tokens[:, at].tolist()} if np.ptp(tokens[:, at]) else {}
        results.append(result)
    return {"documents": documents.tolist(), "lengths": results}


def sample_of(documents: Documents) -> dict[str, int]:
    """Return the numbers of windows and documents."""
    return {"num_windows": len(documents), "num_documents": len(set(documents.tolist()))}


def gains_of(scores: Scores, train_length: int) -> dict[str, Any]:
    """Return the perplexities, and at every length N after T_train the gain from the context before the last T_train.

    The same T_train tokens are scored at every length: given only themselves (`local`), and given all N (`full`).
    """
    result = lengths_of(scores, train_length)
    local, *longer = result["lengths"]
    deltas = [
        {
            "length": each["length"],
            "local": local["perplexity"],
            "full": each["perplexity"],
            "delta": local["perplexity"] - each["perplexity"],  # equation 6 of the paper, positive where context helps
            "low": gain.low,
            "high": gain.high,
        }
        for each, gain in zip(longer, over_seeds(scores.documents, (scores.nats,), scores.tokens, gains), strict=True)
    ]
    return result | {"deltas": deltas}


def positions_of(scores: Scores, train_length: int) -> dict[str, Any]:
    """Return the loss by position, from the scores in bins, and the position where the model breaks.

    A model breaks at the first bin beyond the train length where the smoothed loss exceeds the reference (see `levels`)
    by more than `MARGIN_NATS`, and where the 95 % interval of that excess is above 0, so that noise is not taken for a
    break. It also breaks at a bin whose excess is NaN. `window_nats` of one seed has the nll of each window, rounded.
    """
    documents, ends, nats, tokens, _ = scores
    levels_of, bins = levels(ends, train_length), []
    totals, num_tokens = nats.mean(axis=0).sum(axis=0), tokens.sum(axis=0)

    def excess_of(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        means = levels_of(nats, tokens)
        return means[..., :-2] - means[..., -2:-1]

    def breaks(result: dict[str, Any]) -> bool:
        excess, low = result["excess_nats"], result["excess_low"]
        is_above = excess > MARGIN_NATS and (low is None or low > 0)
        return result["first"] > train_length and (is_above or math.isnan(excess))

    *smoothed_nats, reference_nats, last_octave_nats = levels_of(totals, num_tokens).tolist()
    for at, excess in enumerate(over_seeds(documents, (nats,), tokens, excess_of)):
        result = {"first": ends[at - 1] + 1 if at else 1, "last": ends[at], "num_tokens": int(num_tokens[at])}
        result |= {"nll_nats": float(totals[at] / num_tokens[at]), "smoothed_nats": smoothed_nats[at]}
        # smoothed_nats minus reference_nats, with its interval
        result |= {"excess_nats": excess.value, "excess_low": excess.low, "excess_high": excess.high}
        bins.append(result | ({"window_nats": nats[0, :, at].round(WINDOW_DIGITS).tolist()} if len(nats) == 1 else {}))
    positions = {
        "length": ends[-1],
        "reference_nats": reference_nats,  # mean loss around the train length
        "last_octave_nats": last_octave_nats,  # mean loss from length / 2 to length
        "breaks_at": next((each["first"] for each in filter(breaks, bins)), None),
        "margin_nats": MARGIN_NATS,
        **sample_of(documents),
        "bins": bins,
    }
    return {"documents": documents.tolist(), "positions": positions}
