"""Tapes: strings of a task as model inputs with targets, loss weights and positions.

In: a `Task` and its strings. Out: host arrays [B, T]: the tape and, for each of its tokens, the target, its loss
weight, whether the accuracy counts it, and its position. Next: `batches.py`, and `dape_jax.evaluation.accuracy`.

A tape is the input, optional computation tokens, and one output token per symbol of the target. Loss and accuracy use
the logits at the output tokens. `reverse_string` of "abb", padded to a multiple of 8:

    tape      a b b # # # . .         #: output token        .: padding, at position -1
    target    . . . b b a . .
    position  0 1 2 3 4 5 - -

A task that is answered in place has no output tokens: its targets are at the last M input symbols. Associative recall
of 2 pairs:

    tape      c X a Y a c . .
    target    . . . . Y X . .
    position  0 1 2 3 4 5 - -

All strings of a batch have the same length. Only the padding is masked. Lengths that are padded to the same T share a
compiled program.
"""

import dataclasses
import hashlib

import numpy as np

from dape_jax.errors import one_of, positive, require
from dape_jax.tasks import TASKS
from dape_jax.tasks.task import Symbols, Targets, Task

# Purposes of random draws: part of the random seed, so that each purpose has its own strings.
TRAINING, VALIDATION, EVALUATION, DIGEST = range(4)

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Strings and tapes of a task; a training batch has one length, uniform in 1..train.train_length.

    Source: Deletang et al. 2023; randomized positions: Ruoss et al. 2023, section 3.
    """

    task: str  # its name
    computation_steps: int  # computation tokens per input symbol, between input and output
    pad_to: int  # tapes are padded to a multiple of this; longest tape length / pad_to programs are compiled
    # Positions are drawn from 0..max_position - 1, sorted, for every batch, in training and in evaluation (randomized
    # positional encodings); None: positions 0..T-1.
    max_position: int | None
    seed: int  # of strings and positions

    def __post_init__(self):
        one_of(self, "data", task=TASKS)
        require(self.computation_steps >= 0, "data.computation_steps", self.computation_steps, "must be 0 or more")
        allowed = f"must be 0: {self.task} is answered at its last input symbols"
        in_place = self.of.answered_in_place
        require(not in_place or self.computation_steps == 0, "data.computation_steps", self.computation_steps, allowed)
        positive(self, "data", "pad_to")
        require(0 <= self.seed < 2**32, "data.seed", self.seed, "must be 0 to 2**32 - 1")

    @property
    def of(self) -> Task:
        """Return the task."""
        return TASKS[self.task]

    @property
    def vocab_size(self) -> int:
        """Return the number of token types: input symbols, the computation token if it is used, the output token.

        A task that is answered in place uses the output token only for padding.
        """
        return len(self.of.input_symbols) + (self.computation_steps > 0) + 1

    @property
    def num_outputs(self) -> int:
        """Return the number of output symbols."""
        return len(self.of.output_symbols)

    def tape_length(self, length: int) -> int:
        """Return the number of tokens of the tape of an input of `length` symbols, without padding."""
        num_answers = 0 if self.of.answered_in_place else self.of.output_length(length)
        return length * (1 + self.computation_steps) + num_answers

    def check_length(self, field: str, length: int) -> None:
        """Raise `InputError` unless inputs of `length` symbols exist and `max_position` suffices for their tapes."""
        longest = self.of.longest
        allowed = "must be 1 or more symbols" + ("" if longest is None else f", at most {longest} for {self.task}")
        require(0 < length <= (length if longest is None else longest), field, length, allowed)
        tape = self.tape_length(length)
        allowed = f"must be at least {tape}, the tape length at {field} = {length}, or None (the recipe's positions=0)"
        enough = self.max_position is None or tape <= self.max_position
        require(enough, "data.max_position", self.max_position, allowed)


def make_tapes(config: TaskConfig, inputs_BN: Symbols, targets_BM: Targets, rng: np.random.Generator) -> Batch:
    """Return the tapes of a batch of strings.

    Args:
        config: task and layout of the tapes.
        inputs_BN: input strings.
        targets_BM: their targets.
        rng: random generator of positions.

    Returns:
        `inputs`, `targets` and `positions` (int32), `weights` (float32: 1 at target symbols, else 0) and `counted`
        (bool: the target symbols that the accuracy counts), all [B, T]. All rows have the same positions.
    """
    task, (num, length), answers = config.of, inputs_BN.shape, targets_BM.shape[1]
    after_input = length * (1 + config.computation_steps)
    begin = length - answers if task.answered_in_place else after_input
    tape = begin + answers
    shape = (num, -(-tape // config.pad_to) * config.pad_to)
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
    """Draw one batch, which depends only on the arguments.

    Args:
        config: task, layout of the tapes, and seed.
        purpose: `TRAINING`, `VALIDATION` or `DIGEST`.
        number: index of the batch.
        num: number of rows.
        longest: draw the input length uniformly from 1..longest.
        length: input length, instead of `longest`.
    """
    rng = np.random.default_rng([purpose, config.seed, number])
    if length is None:
        assert longest is not None
        length = int(rng.integers(1, longest + 1))
    inputs_BN = config.of.sample(rng, num, length)
    return make_tapes(config, inputs_BN, config.of.solve(inputs_BN), rng)


def digest(config: TaskConfig) -> str:
    """Return a SHA-256 over sample batches; a checkpoint records it to detect changed strings on resume."""
    hasher = hashlib.sha256(config.task.encode())
    for length in (1, 2, 7, 40):
        if config.max_position is None or config.tape_length(length) <= config.max_position:
            for array in draw_tapes(config, DIGEST, length, 4, length=length).values():
                hasher.update(array.tobytes())
    return hasher.hexdigest()
