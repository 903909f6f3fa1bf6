"""An experiment as data: models, their results, and the claims that compare them. Next: `paper.py`, `catalogue.py`.

An experiment trains methods x sizes x train lengths on a text, or methods x algorithmic tasks, and evaluates one
metric. Its claims are inequalities between results. Lengths and sizes are the paper's; a preset maps them to those of a
recipe.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from experiments.methods import PRESETS


class Model(NamedTuple):
    """Model of an experiment. The size is "" for a task, the task is "" for a text."""

    method: str
    size: str
    task: str
    train_length: int


class Result(NamedTuple):
    """Best result of some models: at a length, or for None the mean over the lengths beyond the train length."""

    models: tuple[Model, ...]
    length: int | None


def cell(method: str, train_length: int, length: int, size: str = "125m") -> Result:
    """Return the result at `length` of one model on a text."""
    return Result((Model(method, size, "", train_length),), length)


def score(methods: tuple[str, ...], task: str, train_length: int = 40) -> Result:
    """Return the best mean accuracy of several methods on a task."""
    return Result(tuple(Model(method, "", task, train_length) for method in methods), None)


@dataclasses.dataclass(frozen=True)
class Less:
    """Inequality low < factor * high."""

    low: Result | float
    high: Result | float
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Claim:
    """Claim of the paper: all of its pairs hold, or `at_least` of them; `verdicts.py` defines a pair."""

    comparisons: Sequence[Less]
    at_least: int | None = None
    note: str = ""  # other explanations of the verdict


NOT_IN_PAPER = "not in the paper"
AT = (128, 512)  # train lengths of most experiments


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One figure or table. Sizes and lengths are the paper's."""

    title: str
    methods: tuple[str, ...]  # keys of METHODS
    claims: dict[str, Claim] = dataclasses.field(default_factory=dict)  # by their text
    source: str = NOT_IN_PAPER  # section, figure or table of the paper
    train_lengths: tuple[int, ...] = AT  # in tokens; for tasks a single length, in symbols
    sizes: tuple[str, ...] = ("125m",)  # unused for tasks, where the recipe has one size
    tasks: tuple[str, ...] = ()  # keys of TASKS, each with its own models; empty for models on a text
    skipped: tuple[tuple[str, int], ...] = ()  # pairs (method, train length) that the paper does not have
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)  # config fields that differ from the recipe's
    # "perplexity"; "delta" (appendix A); "step_ms", milliseconds per training step; or "accuracy", for tasks
    metric: str = "perplexity"
    step_tokens: int | None = None  # tokens per step, if the paper uses the same number at all train lengths
    longest: int = 8192  # longest evaluation length
    step_batch: int | None = None  # sequences per step, for a measurement of time
    presets: tuple[str, ...] = ("small", "converged", "paper")  # keys of PRESETS for which it is defined

    @property
    def models(self) -> list[Model]:
        """Models of the experiment."""
        return [
            Model(method, size, task, train_length)
            for task in self.tasks or ("",)
            for size in (("",) if self.tasks else self.sizes)
            for train_length in self.train_lengths
            for method in self.methods
            if (method, train_length) not in self.skipped
        ]

    def length_divisor(self, preset: str) -> int:
        """Return the divisor of the paper's lengths in runs with a preset; 1 on tasks, which have the paper's."""
        return 1 if self.tasks else PRESETS[preset].length_divisor


def lengths_from(train_length: int, longest: int = 8192) -> tuple[int, ...]:
    """Return the paper's evaluation lengths: the train length and its doublings up to `longest`."""
    return tuple(train_length * 2**n for n in range(20) if train_length * 2**n <= longest)


def up_to(longest: int) -> Callable[[int], tuple[int, ...]]:
    """Return the function from a train length to `lengths_from` it up to `longest`."""
    return partial(lengths_from, longest=longest)


def within(train_length: int) -> tuple[int, ...]:
    """Return the train length alone."""
    return (train_length,)


def beyond(train_length: int) -> tuple[int, ...]:
    """Return the paper's evaluation lengths above the train length."""
    return lengths_from(train_length)[1:]


def format_lengths(lengths: tuple[int, ...]) -> str:
    """Format increasing lengths: "1 to 40" if there are no gaps, "1, 14, 27" otherwise."""
    first, last = lengths[0], lengths[-1]
    return f"{first} to {last}" if len(lengths) == last - first + 1 > 2 else ", ".join(map(str, lengths))


# ---- claims

Names = str | tuple[str, ...]


def names(methods: Names | float) -> tuple[Any, ...]:
    """Return one method or several, or a number in their place, as a tuple."""
    return methods if isinstance(methods, tuple) else (methods,)


def better(
    low: Names | float,
    others: Names | float,
    train_lengths: tuple[int, ...] = AT,
    lengths: Callable[[int], tuple[int, ...]] = lengths_from,
    *,
    factor: float = 1.0,
    size: str = "125m",
    note: str = "",
) -> Claim:
    """Return the claim that each method of `low` is better than each of `others`, trained at the same length.

    `lengths` maps a train length to the evaluation lengths of the comparison. Results of `others` are multiplied by
    `factor`. A number takes the place of a method's results.
    """

    def side(name: str | float, train_length: int, length: int) -> Result | float:
        return cell(name, train_length, length, size) if isinstance(name, str) else name

    comparisons = [
        Less(side(method, train_length, length), side(other, train_length, length), factor)
        for method in names(low)
        for other in names(others)
        for train_length in train_lengths
        for length in lengths(train_length)
    ]
    return Claim(comparisons, note=note)


def easier_at(longest: int, methods: Names, train_lengths: tuple[int, ...] = AT) -> Claim:
    """Return the claim that each method is better at `longest` than at its train length."""
    return Claim([Less(cell(name, t, longest), cell(name, t, t)) for t in train_lengths for name in names(methods)])


def outscores(high: Names, low: Names, tasks: tuple[str, ...], at_least: int | None = None, note: str = "") -> Claim:
    """Return the claim that the best of methods `high` is better than the best of `low`, on each task."""
    return Claim([Less(score(names(low), t), score(names(high), t)) for t in tasks], at_least, note)
