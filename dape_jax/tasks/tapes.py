"""A task's strings -> what a model reads and is judged on.

In: a `Task`, its strings. Out: arrays in host memory, all [B, T]: a tape, and beside every place of it the target, its
weight in the loss, and whether the accuracy counts it. Next: `batches.py`, and `dape_jax.evaluation.accuracy`.

A tape is the input, optional computation tokens, and one output token for every symbol of the target, at which the
model's logits are scored. Reverse "abb", padded to a multiple of 8:

    tape      a b b # # # . .         #: output token        .: padding, at position -1
    target    . . . b b a . .
    position  0 1 2 3 4 5 - -

A task that is answered in place has no output tokens: its last M symbols are scored. Associative recall of 2 pairs:

    tape      c X a Y a c . .
    target    . . . . Y X . .
    position  0 1 2 3 4 5 - -

All strings of a batch have one length, so only the padding is masked. Lengths that are padded to the same T share one
compiled program.
"""

import dataclasses
import hashlib

import numpy as np
from jaxtyping import Int32

from dape_jax.errors import require
from dape_jax.tasks import TASKS
from dape_jax.tasks.task import Symbols, Task

# What random numbers are drawn for: the same seed gives each its own strings.
TRAINING, VALIDATION, EVALUATION, DIGEST = range(4)

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The strings that a model is trained on: every batch of one length, uniform in 1..train.train_length.

    Args:
        task: a key of `TASKS`.
        computation_steps: computation tokens for every input symbol, between input and output.
        pad_to: tapes are filled up to a multiple of it; the number of programs is the longest tape's length over it.
        max_position: positions are drawn at random, increasing, from so many, anew for every batch, in training and in
            evaluation (randomized positional encodings); None for 0..T-1.
        seed: of strings and positions.

    Source: Deletang et al. 2023; randomized positions: Ruoss et al. 2023, section 3.
    """

    task: str
    computation_steps: int
    pad_to: int
    max_position: int | None
    seed: int

    def __post_init__(self):
        require(self.task in TASKS, "data.task", self.task, f"one of {list(TASKS)}")
        require(self.computation_steps >= 0, "data.computation_steps", self.computation_steps, "must be 0 or more")
        allowed = f"must be 0: {self.task} is answered at its last input symbols"
        in_place = self.of.answered_in_place
        require(not in_place or self.computation_steps == 0, "data.computation_steps", self.computation_steps, allowed)
        require(self.pad_to > 0, "data.pad_to", self.pad_to, "a positive number of tokens")
        require(0 <= self.seed < 2**32, "data.seed", self.seed, "0 to 2**32 - 1")

    @property
    def of(self) -> Task:
        """The task."""
        return TASKS[self.task]

    @property
    def vocab_size(self) -> int:
        """Tokens of a tape: the input symbols, the computation token if there is one, and the output token.

        A task that is answered in place uses the output token for padding alone.
        """
        return len(self.of.input_symbols) + (self.computation_steps > 0) + 1

    @property
    def num_outputs(self) -> int:
        """Symbols of a target."""
        return len(self.of.output_symbols)

    def tape_length(self, length: int) -> int:
        """Return the tokens of the tape of an input of `length` symbols, without padding."""
        num_answers = 0 if self.of.answered_in_place else self.of.output_length(length)
        return length * (1 + self.computation_steps) + num_answers

    def check_length(self, field: str, length: int) -> None:
        """Raise `InputError` unless there are strings of a length, and positions for their tapes."""
        longest = self.of.longest
        allowed = "must be 1 or more symbols" + ("" if longest is None else f", at most {longest} for {self.task}")
        require(0 < length <= (length if longest is None else longest), field, length, allowed)
        tape = self.tape_length(length)
        require(
            self.max_position is None or tape <= self.max_position,
            "data.max_position",
            self.max_position,
            f"at least {tape}, the tape's length at {field} = {length}; or None (positions=0) for positions from 0 on",
        )


def make_tapes(
    config: TaskConfig,
    inputs_BN: Symbols,
    targets_BM: Int32[np.ndarray, "B M"],
    rng: np.random.Generator,
    pad_to: int | None = None,
) -> Batch:
    """Lay out a batch.

    Args:
        config: of the task.
        inputs_BN: strings.
        targets_BM: their targets.
        rng: of random positions.
        pad_to: other than the config's.

    Returns:
        `inputs`, `targets` and `positions` (int32), `weights` (float32: 1 at every symbol of the target) and `counted`
        (bool: those of them that the accuracy counts), all [B, T]; the positions of all rows are the same.
    """
    task, (num, length), answers = config.of, inputs_BN.shape, targets_BM.shape[1]
    after_input = length * (1 + config.computation_steps)
    begin = length - answers if task.answered_in_place else after_input
    tape = begin + answers
    pad_to = config.pad_to if pad_to is None else pad_to
    shape = (num, -(-tape // pad_to) * pad_to)
    computation = len(task.input_symbols)
    output = computation + (config.computation_steps > 0)
    inputs, targets = np.full(shape, output, np.int32), np.zeros(shape, np.int32)
    weights, counted = np.zeros(shape, np.float32), np.zeros(shape, bool)
    inputs[:, :length] = inputs_BN
    inputs[:, length:after_input] = computation
    targets[:, begin:tape] = targets_BM
    weights[:, begin:tape] = 1
    counted[:, begin:tape] = task.counted(targets_BM)
    positions = np.full(shape, -1, np.int32)
    if config.max_position is None:
        positions[:, :tape] = np.arange(tape)
    else:
        positions[:, :tape] = np.sort(rng.choice(config.max_position, tape, replace=False))
    return {"inputs": inputs, "targets": targets, "weights": weights, "counted": counted, "positions": positions}


def draw_tapes(
    config: TaskConfig, purpose: int, number: int, num: int, *, longest: int | None = None, length: int | None = None
) -> Batch:
    """A batch that its number decides, whatever was drawn before.

    Args:
        config: of the task.
        purpose: what it is for: `TRAINING` or `VALIDATION`.
        number: of the batch.
        num: B.
        longest: the length is uniform in 1..longest.
        length: or this one.
    """
    rng = np.random.default_rng([purpose, config.seed, number])
    if length is None:
        assert longest is not None
        length = int(rng.integers(1, longest + 1))
    inputs_BN = config.of.sample(rng, num, length)
    return make_tapes(config, inputs_BN, config.of.solve(inputs_BN), rng)


def digest(config: TaskConfig) -> str:
    """Of the strings that a task's config draws: what a checkpoint records to know them again."""
    found = hashlib.sha256(config.task.encode())
    for length in (1, 2, 7, 40):
        if config.max_position is None or config.tape_length(length) <= config.max_position:
            for array in draw_tapes(config, DIGEST, length, 4, length=length).values():
                found.update(array.tobytes())
    return found.hexdigest()
