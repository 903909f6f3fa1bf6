r"""Tasks of the Chomsky hierarchy (the paper's table 6): train on inputs of 1 to 40 symbols, test on 1 to 500.

    python train.py --config=configs/che.py:task=missing_duplicate_string,bias=kerple,processor=dape,kernel=3 \
        --workdir=runs/che/missing_duplicate_string/dape1x3-kerple
    python eval.py --workdir=runs/che/missing_duplicate_string/dape1x3-kerple

Argument: task=NAME, one of

    regular            even_pairs modular_arithmetic parity_check cycle_navigation
    context-free       stack_manipulation reverse_string modular_arithmetic_brackets solve_equation
    context-sensitive  duplicate_string missing_duplicate_string odds_first binary_addition binary_multiplication
                       compute_sqrt bucket_sort associative_recall

then a method (`configs/common.py`) and

    positions=M          randomized positional encodings: positions are drawn from 0..M-1; 0: positions 0, 1, 2, ..
    computation_steps=K  computation tokens on the tape for each input symbol

--config.model.causal=True trains a decoder instead of the paper's encoder.

Expect for even_pairs after 1,500 steps, on two CPU cores (`results/che`; accuracy in %, mean over lengths 1 to 40 and
mean over lengths 41 to 500): Kerple 52.50 and 51.51; DAPE1x3-Kerple 100.00 and 82.95. Chance is 50 %. The paper trains
200,000 steps.
"""

import dataclasses

from ml_collections import ConfigDict

from dape_jax.config import choose
from dape_jax.configs import common
from dape_jax.errors import require
from dape_jax.model.transformer import ENCODER
from dape_jax.tasks import TASKS
from dape_jax.tasks.tapes import TaskConfig

TRAIN_LENGTH, TEST_LENGTH = 40, 500
NUM_PROGRAMS = 5  # programs compiled for training, one for each padded length of a tape


def get_config(argument: str | None = None) -> ConfigDict:
    """Return the recipe's config for an argument; see the module's docstring."""
    choice = common.parse_argument(argument, task="", positions=0, computation_steps=0, **common.METHOD)
    require(choice["task"] in TASKS, "config argument", f"task={choice['task']}", f"must be one of {list(TASKS)}")
    task = TaskConfig(choice["task"], choice["computation_steps"], 1, choice["positions"] or None, choice["seed"])
    pad_to = -(-task.tape_length(TRAIN_LENGTH) // NUM_PROGRAMS)
    return common.make(
        seed=choice["seed"],
        model=dict(
            num_layers=5,
            width=64,
            num_heads=8,
            vocab_size=task.vocab_size,
            num_outputs=task.num_outputs,
            vocab_multiple=1,
            **ENCODER,
            **common.choose_method(choice, TRAIN_LENGTH, length_scale=TRAIN_LENGTH / 512),
            attention=choose("attention", "dense"),
            dtype="float32",
        ),
        data=dataclasses.asdict(task) | dict(pad_to=pad_to),
        # A constant learning rate.
        optimizer=dict(learning_rate=1e-3, warmup_fraction=0.0, final_fraction=1.0, beta2=0.999, weight_decay=0.0),
        train=dict(
            train_length=TRAIN_LENGTH,  # longest input; each batch has one length, drawn uniformly from 1..40
            batch_size=128,
            num_steps=200_000,
            eval_interval=500,
            validation_batches=8,
        ),
        evaluation=dict(
            lengths=tuple(range(1, TEST_LENGTH + 1)),
            num_sequences=512,
            batch_tokens=4096,  # fits in a CPU's cache: twice as fast as a batch of four times the size
            pad_to=32,
            dropout=False,
            blockwise_from=64,
            block_size=16,
        ),
    )
