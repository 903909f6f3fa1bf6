"""Length-extrapolation curve in minutes, on two CPU cores and the source of Python's standard library.

A byte-level model of 0.9 M parameters is trained on the standard library's source at 64 bytes and evaluated at up to
2048, 32 times longer. Both methods and one figure, in a clone by `make demo`:

    python train.py --config=configs/quickstart.py:processor=none --workdir=runs/quickstart/kerple
    python train.py --config=configs/quickstart.py:processor=dape --workdir=runs/quickstart/dape1x3-kerple
    python eval.py --workdir=runs/quickstart/kerple,runs/quickstart/dape1x3-kerple

Expect (`results/quickstart`, perplexity per byte at 64 and at 2048): Kerple 4.88 and 5.16; DAPE1x3-Kerple 4.30 and
4.15.

Argument: a method (`configs/common.py`); by default bias=kerple,processor=dape.
"""

from ml_collections import ConfigDict

from dape_jax.config import choose
from dape_jax.configs import common
from dape_jax.data.store import STDLIB
from dape_jax.model.transformer import GPT_NEOX


def get_config(argument: str | None = None) -> ConfigDict:
    """Return the recipe's config for an argument; see the module's docstring."""
    choice = common.parse_argument(argument, **common.METHOD | dict(bias="kerple", processor="dape"))
    return common.make(
        seed=choice["seed"],
        model=dict(
            num_layers=4,
            width=128,
            num_heads=4,
            **GPT_NEOX,
            **common.choose_method(choice, train_length=64, length_scale=0.5),
            # Faster than dense even at a length of 64.
            attention=choose("attention", "blockwise", block_size=32, num_buckets=2),
        ),
        data=dict(path=STDLIB),
        optimizer=dict(learning_rate=2e-3),
        train=dict(train_length=64, batch_size=16, num_steps=1000, eval_interval=250, validation_batches=20),
        evaluation=dict(lengths=(64, 128, 256, 512, 1024, 2048), max_windows=128),
    )
