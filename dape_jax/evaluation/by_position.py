"""Loss by position in the window: where does a method break? In: nll of windows' targets. Next: `evaluate.py`.

A target's position is the number of tokens before it in its window, 1 to N. Positions are put into bins that grow with
them, `BINS_PER_OCTAVE` to every doubling, or as many as it has positions; a power of two ends one:

    1 | 2 | .. | 25 | 26 | 27 28 | 29 | 30 | 31 32 | 33 | 34 | 35 36 | 37 38 | 39 | 40 41 | ..

A single bin is noisy, since it is one place of every window. So the curve that is drawn and judged is smoothed: at each
bin, the mean over all targets of the bins that end within `SMOOTHED_OCTAVES` of it to either side.

A method breaks at the first bin beyond the train length where the smoothed loss is more than `MARGIN_NATS` above the
loss around the train length (the mean over the positions from T_train / 2 to T_train) and where the 95 % bootstrap
interval of that excess, over documents, lies above 0, so that noise alone is not called a break.
"""

import dataclasses

import numpy as np
from jaxtyping import Float64, Int

from dape_jax.evaluation.perplexity import Window, interval_over_documents

BINS_PER_OCTAVE = 16
SMOOTHED_OCTAVES = 0.25
MARGIN_NATS = 0.1


@dataclasses.dataclass(frozen=True)
class PositionBin:
    """Loss at some neighbouring positions.

    Args:
        first: the first of the positions.
        last: the last of them.
        nll_nats: mean over their targets, as measured.
        num_tokens: these targets.
        smoothed_nats: mean over the targets of the bins around; see the module.
        excess_nats: `smoothed_nats`, less the loss around the train length.
        excess_low: lower end of the excess's 95 % bootstrap interval over documents; None with fewer than two.
        excess_high: its upper end.
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
class Positions:
    """One model's loss by position.

    Args:
        length: N, of the windows.
        reference_nats: mean loss around the train length; see the module.
        last_octave_nats: mean loss from N / 2 to N.
        breaks_at: first position of the bin where the method breaks; None if it does not.
        margin_nats: the excess that counts as a break.
        num_windows: windows that the means are over.
        num_documents: documents they come from.
        bins: by increasing position.
    """

    length: int
    reference_nats: float
    last_octave_nats: float
    breaks_at: int | None
    margin_nats: float
    num_windows: int
    num_documents: int
    bins: list[PositionBin]


def bin_ends(length: int) -> Int[np.ndarray, "bins"]:
    """The last position of every bin."""
    octaves = np.arange(0, np.log2(length) * BINS_PER_OCTAVE) / BINS_PER_OCTAVE
    return np.append(np.unique(np.floor(2**octaves).astype(int)), length)


def summarise_positions(
    windows: list[Window], nll_of_windows: Float64[np.ndarray, "windows length"], train_length: int
) -> Positions:
    """Sum up a model's loss by position.

    Args:
        windows: what was scored.
        nll_of_windows: of every target of every window.
        train_length: of the model, in tokens.
    """
    num_windows, length = nll_of_windows.shape
    ends = bin_ends(length)
    starts = np.append(0, ends[:-1])
    nll = np.add.reduceat(nll_of_windows, starts, axis=1)
    tokens = np.tile(ends - starts, (num_windows, 1))

    octaves = np.log2(ends)
    near = np.abs(octaves[:, None] - octaves) <= SMOOTHED_OCTAVES + 1e-9
    trained = min(train_length, length)
    around = ((starts >= trained // 2) & (ends <= trained))[None]
    last_octave = (starts >= length // 2)[None]

    def mean(nll: np.ndarray, tokens: np.ndarray, bins: np.ndarray) -> np.ndarray:
        """Over the bins that are True in each row; the sums have a bin in each row, as the bootstrap gives them."""
        return (bins @ nll) / (bins @ tokens)

    def excess(nll: np.ndarray, tokens: np.ndarray, axis: int) -> np.ndarray:
        nll, tokens = nll.sum(axis), tokens.sum(axis)
        return mean(nll, tokens, near) - mean(nll, tokens, around)

    interval = interval_over_documents(windows, (nll, tokens), excess)
    low, high = ([None] * len(ends),) * 2 if interval is None else (bounds.tolist() for bounds in interval)
    excess_nats = excess(nll, tokens, 0)
    nll, tokens = nll.sum(0), tokens.sum(0)
    smoothed_nats = mean(nll, tokens, near)
    broken = (starts >= train_length) & (excess_nats > MARGIN_NATS)
    if interval is not None:
        broken &= interval[0] > 0
    return Positions(
        length=length,
        reference_nats=float(mean(nll, tokens, around)[0]),
        last_octave_nats=float(mean(nll, tokens, last_octave)[0]),
        breaks_at=int(starts[np.argmax(broken)]) + 1 if broken.any() else None,
        margin_nats=MARGIN_NATS,
        num_windows=num_windows,
        num_documents=len({window.document for window in windows}),
        bins=[
            PositionBin(
                first=int(starts[i]) + 1,
                last=int(ends[i]),
                nll_nats=float(nll[i] / tokens[i]),
                num_tokens=int(tokens[i]),
                smoothed_nats=float(smoothed_nats[i]),
                excess_nats=float(excess_nats[i]),
                excess_low=low[i],
                excess_high=high[i],
            )
            for i in range(len(ends))
        ],
    )
