"""Definition of an algorithmic task.

In: a random generator and a length. Out: `inputs_BN` and `targets_BM`, symbols as int32 in host memory. Next:
`regular.py` and the files of the other levels.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int32

Symbols = Int32[np.ndarray, "B N"]
Targets = Int32[np.ndarray, "B M"]


@dataclasses.dataclass(frozen=True)
class Task:
    """Function from strings of symbols to strings of symbols, with a sampler of inputs.

    Args:
        level: level of the Chomsky hierarchy: "regular", "context-free" (deterministic) or "context-sensitive".
        input_symbols: symbol of each integer in an input.
        output_symbols: symbol of each integer in a target.
        output_length: `output_length(N) -> M`.
        sample: `sample(rng, num, length) -> inputs_BN`, B = num random inputs of one length; N is `length`, or the
            nearest smaller length for which the task is defined.
        solve: `solve(inputs_BN) -> targets_BM`, exact.
        end: output symbol after which the rest of a target is not counted, or None if every symbol counts.
        permutation_invariant: whether the target is independent of the order of the input's symbols.
        answered_in_place: whether answers are read at the last M input symbols, not at output tokens after the input.
        longest: largest input length, or None if unlimited.
    """

    level: str
    input_symbols: tuple[str, ...]
    output_symbols: tuple[str, ...]
    output_length: Callable[[int], int]
    sample: Callable[[np.random.Generator, int, int], Symbols]
    solve: Callable[[Symbols], Targets]
    end: int | None = None
    permutation_invariant: bool = False
    answered_in_place: bool = False
    longest: int | None = None

    @property
    def random_accuracy(self) -> float:
        """Return the accuracy of chance: 1 / number of output symbols without END, as in the paper."""
        return 1 / (len(self.output_symbols) - (self.end is not None))

    def counted(self, targets_BM: Targets) -> Bool[np.ndarray, "B M"]:
        """Return a mask of the target symbols that the accuracy counts: up to and including the first END, or all."""
        if self.end is None:
            return np.ones(targets_BM.shape, bool)
        return np.cumsum(targets_BM == self.end, axis=1) - (targets_BM == self.end) == 0
