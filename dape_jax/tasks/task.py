"""Definition of an algorithmic task.

In: a random generator and a length. Out: `inputs_BN` and `targets_BM`, symbols as int32 in host memory. Next:
`regular.py` and the files of the other levels.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
from jaxtyping import Bool, Int32

Symbols = Int32[np.ndarray, "B N"]
Targets = Int32[np.ndarray, "B M"]

BITS, DIGITS = tuple("01"), tuple("01234")


def strings(num_symbols: int, rng: np.random.Generator, num: int, length: int) -> Symbols:
    """Draw strings of independent symbols, uniform in 0..num_symbols - 1."""
    return rng.integers(0, num_symbols, (num, length), np.int32)


@dataclasses.dataclass(frozen=True)
class Task:
    """Function from strings of symbols to strings of symbols, with a sampler of inputs.

    Args:
        level: level of the Chomsky hierarchy: "regular", "context-free" (deterministic) or "context-sensitive".
        input_symbols: symbol of each integer in an input.
        output_symbols: symbol of each integer in a target.
        solve: `solve(inputs_BN) -> targets_BM`, exact.
        output_length: `output_length(N) -> M`.
        sampler: `sampler(rng, num, length) -> inputs_BN`; see `sample`. None: `strings` of all input symbols.
        end: output symbol after which the rest of a target is not counted, or None if every symbol counts.
        permutation_invariant: whether the target is independent of the order of the input's symbols.
        answered_in_place: whether answers are read at the last M input symbols, not at output tokens after the input.
        longest: largest input length, or None if unlimited.
    """

    level: str
    input_symbols: tuple[str, ...]
    output_symbols: tuple[str, ...]
    solve: Callable[[Symbols], Targets]
    output_length: Callable[[int], int] = lambda _: 1
    sampler: Callable[[np.random.Generator, int, int], Symbols] | None = None
    end: int | None = None
    permutation_invariant: bool = False
    answered_in_place: bool = False
    longest: int | None = None

    @property
    def random_accuracy(self) -> float:
        """Return the accuracy of chance: 1 / number of output symbols without END, as in the paper."""
        return 1 / (len(self.output_symbols) - (self.end is not None))

    def sample(self, rng: np.random.Generator, num: int, length: int) -> Symbols:
        """Return B = num random inputs of N symbols: `length`, or the nearest smaller N of the task."""
        return (self.sampler or partial(strings, len(self.input_symbols)))(rng, num, length)

    def counted(self, targets_BM: Targets) -> Bool[np.ndarray, "B M"]:
        """Return a mask of the target symbols that the accuracy counts: up to and including the first END, or all."""
        if self.end is None:
            return np.ones(targets_BM.shape, bool)
        return np.cumsum(targets_BM == self.end, axis=1) - (targets_BM == self.end) == 0
