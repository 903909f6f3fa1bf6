r"""Language-model runs of the paper, selected by one argument.

    dape-prepare --input='books3/*.jsonl.zst' --output=data/books3 --tokenizer=20B_tokenizer.json --lossy
    python train.py --config=configs/paper.py:125m,bias=kerple,processor=dape,kernel=3,train_length=512 \
        --config.data.path=data/books3 --workdir=runs/books3/dape1x3-kerple
    python eval.py --workdir=runs/books3/dape1x3-kerple

Argument: a size, 25m|125m|350m|2.7b|6.7b, then a method (`configs/common.py`) and train_length=T.

Hardware (paper): eight GPUs. Settings are the paper's table 8 and its official configurations: Adam (0.9, 0.95, 1e-8),
1 % warm-up, cosine to a tenth, weight decay 0.1, clip 1.0, batch 32 on each of eight devices, 50,000 steps. The paper's
perplexities (Books3, T = 512, table 5): Kerple 19.83 at 512 and 40.94 at 8192; DAPE1x3-Kerple 18.95 and 17.20. This
project has not trained at this scale.

The vocabulary of 50,304 tokens is GPT-NeoX's, padded as in the official code. The tokenizer is the prepared corpus's;
--config.model.vocab_size=None selects its vocabulary size. Perplexities of a corpus prepared as bytes are per byte and
not comparable with the paper's.

Differs: bfloat16 instead of float16 (--config.model.dtype=float16 uses a dynamic loss scale); the right edge of the
convolution is "prefix" (--config.model.processor.edge=listing follows the paper's listing); the learning rates of 2.7b
and 6.7b are GPT-3's, because the paper does not give them.

`25m` is not the paper's. The preset `25m` of `python -m experiments` trains it on one GPU in minutes.

Figures and tables: `docs/reproducing.md`; several devices: `docs/distributed.md`; memory: `docs/planning.md`.
"""

from ml_collections import ConfigDict

from dape_jax.config import choose
from dape_jax.configs import common
from dape_jax.model.transformer import GPT_NEOX
from dape_jax.model.transformer import SIZES as PAPER_SIZES

SIZES = {"25m": {"num_layers": 8, "width": 512, "num_heads": 8}} | PAPER_SIZES
LEARNING_RATES = {"25m": 1e-3, "125m": 6e-4, "350m": 3e-4, "2.7b": 1.6e-4, "6.7b": 1.2e-4}


def get_config(argument: str | None = None) -> ConfigDict:
    """Return the recipe's config for an argument; see the module's docstring."""
    size, choice = common.parse_size(argument or "125m", SIZES, train_length=512)
    train_length = choice["train_length"]
    return common.make(
        seed=choice["seed"],
        model=dict(
            **SIZES[size],
            **GPT_NEOX,
            **common.choose_method(choice, train_length),
            vocab_size=50_304,
            attention=choose("attention", "auto"),
            remat="full",
        ),
        data=dict(path="", validation_fraction=0.01),  # no default: --config.data.path is required
        optimizer=dict(learning_rate=LEARNING_RATES[size]),
        train=dict(
            train_length=train_length, batch_size=256, num_steps=50_000, eval_interval=500, validation_batches=8
        ),
        evaluation=dict(
            lengths=tuple(2**n for n in range(7, 14) if 2**n >= train_length) or (train_length,),
            last_tokens=256,
            max_windows=512,
            batch_tokens=65_536,
            blockwise_from=1024,
            block_size=128,
        ),
    )
