r"""Language-model runs of the paper with all lengths divided by four, at sizes that two CPU cores train in minutes.

    python train.py --config=configs/small.py:xs,bias=kerple,processor=dape,kernel=3,train_length=32 \
        --workdir=runs/small/dape1x3-kerple
    python eval.py --workdir=runs/small/dape1x3-kerple

Expect (`results/README.md`, perplexity per byte at 32 and at 2048, mean of five seeds): 5.31 and 5.05; with
processor=none 5.93 and 6.21.

Argument: a size, xs|s|m|l, then a method (`configs/common.py`) and train_length=T.

The sizes replace the paper's 125m, 350m, 2.7b and 6.7b. Train lengths 32, 128 and 256 replace 128, 512 and 1024. A step
has 1,024 tokens. The longest evaluation length is 2048, in the paper 8192: in both, 64 times the shortest train length.
The text is the source of Python's standard library, the tokens are bytes. The presets `small` and `converged` of
`python -m experiments` use this recipe.
"""

from ml_collections import ConfigDict

from dape_jax.config import choose
from dape_jax.configs import common
from dape_jax.data.store import STDLIB
from dape_jax.model.transformer import GPT_NEOX

SIZES = {
    "xs": dict(num_layers=3, width=96, num_heads=4),
    "s": dict(num_layers=4, width=128, num_heads=4),
    "m": dict(num_layers=5, width=192, num_heads=6),
    "l": dict(num_layers=6, width=256, num_heads=8),
}
LEARNING_RATES = {"xs": 3e-3, "s": 2e-3, "m": 1.5e-3, "l": 1e-3}


def get_config(argument: str | None = None) -> ConfigDict:
    """Return the recipe's config for an argument; see the module's docstring."""
    size, choice = common.parse_size(argument, SIZES, train_length=32)
    train_length = choice["train_length"]
    # Experiments have one CPU core each: few rows with DAPE, so that the hidden features fit in its cache.
    block_size = 8 if choice["processor"] == "dape" else 32
    return common.make(
        seed=choice["seed"],
        model=dict(
            **SIZES[size],
            **GPT_NEOX,
            **common.choose_method(choice, train_length, length_scale=0.25),
            attention=choose("attention", "blockwise", block_size=block_size, num_buckets=2),
        ),
        data=dict(path=STDLIB),
        optimizer=dict(learning_rate=LEARNING_RATES[size], warmup_fraction=0.02),
        train=dict(
            train_length=train_length,
            batch_size=max(1, 1024 // max(1, train_length)),
            num_steps=600,
            eval_interval=300,
            validation_batches=16,
            max_to_keep=1,
        ),
        evaluation=dict(
            lengths=tuple(2**n for n in range(5, 12) if 2**n >= train_length) or (train_length,),
            max_windows=128,
            batch_tokens=2048,  # for the same reason
            block_size=block_size,
        ),
    )
