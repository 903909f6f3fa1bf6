"""What a task of the Chomsky-hierarchy benchmark is.

In: a random generator and a length. Out: `inputs_BN` (symbols) and `targets_BM` (what they are answered with), int32 in
host memory. Next: `regular.py`, and the other levels' files.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int32

Symbols = Int32[np.ndarray, "B N"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A function from strings to strings, and the strings that it is asked.

    Args:
        level: of the hierarchy: "regular", "context-free" (deterministic) or "context-sensitive".
        input_symbols: what the numbers of an input mean.
        output_symbols: what the numbers of a target mean.
        output_length: M of an input of N symbols.
        sample: `sample(rng, num, length) -> inputs_BN`, B = num random inputs of one length; N is `length`, or the
            nearest shorter one that the task has.
        solve: `solve(inputs_BN) -> targets_BM`, exactly.
        end: the output symbol after which a target holds nothing that counts; None where all of it counts.
        permutation_invariant: whether the order of the input's symbols does not matter.
        answered_in_place: whether answers are read at the last M symbols of the input, not at output tokens after it.
        longest: the longest input that the task has; None without a limit.
    """

    level: str
    input_symbols: tuple[str, ...]
    output_symbols: tuple[str, ...]
    output_length: Callable[[int], int]
    sample: Callable[[np.random.Generator, int, int], Symbols]
    solve: Callable[[Symbols], Int32[np.ndarray, "B M"]]
    end: int | None = None
    permutation_invariant: bool = False
    answered_in_place: bool = False
    longest: int | None = None

    @property
    def random_accuracy(self) -> float:
        """Of a guess among the symbols that a target is made of, END aside: the paper's random accuracy."""
        return 1 / (len(self.output_symbols) - (self.end is not None))

    def counted(self, targets_BM: Int32[np.ndarray, "B M"]) -> Bool[np.ndarray, "B M"]:
        """Which symbols of a target the accuracy counts: up to the first END, and it; all where there is no END."""
        if self.end is None:
            return np.ones(targets_BM.shape, bool)
        return np.cumsum(targets_BM == self.end, axis=1) - (targets_BM == self.end) == 0
