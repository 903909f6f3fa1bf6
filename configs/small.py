r"""The paper's language-model runs, every length divided by four, at sizes that two CPU cores train in minutes.

    python train.py --config=configs/small.py:xs,bias=kerple,processor=dape,kernel=3,train_length=32 \
        --workdir=runs/small/dape1x3-kerple
    python eval.py --workdir=runs/small/dape1x3-kerple

Argument: xs|s|m|l first, then any of

    rotary=none|rope|pi|ntk|yarn  bias=nope|alibi|kerple|kerple_power|sandwich|t5|fire|cope|transformer_xl
    processor=none|dape  kernel=W  channels=C
    train_length=T  batch=B  num_steps=N  seed=S

Sizes stand for the paper's 125m, 350m, 2.7b and 6.7b. Train lengths 32, 128 and 256 stand for 128, 512 and 1024, each
with 1,024 tokens a step unless the batch is given, and evaluation goes from there to 2048 where the paper's goes to
8192: 64 times the shortest train length, as there. Text is the standard library's source, tokens are bytes. `small` in
`python -m dape_jax.experiments` means this recipe; what it showed is in `results/README.md`.
"""

from ml_collections import ConfigDict, config_dict

from dape_jax.config import METHOD_ARGUMENTS, choose, choose_method, parse_argument
from dape_jax.errors import require
from dape_jax.model.transformer import GPT_NEOX

SIZES = {
    "xs": dict(num_layers=3, width=96, num_heads=4),
    "s": dict(num_layers=4, width=128, num_heads=4),
    "m": dict(num_layers=5, width=192, num_heads=6),
    "l": dict(num_layers=6, width=256, num_heads=8),
}
LEARNING_RATES = {"xs": 3e-3, "s": 2e-3, "m": 1.5e-3, "l": 1e-3}


def get_config(argument: str | None = None) -> ConfigDict:
    """The recipe."""
    size, _, rest = (argument or "xs").partition(",")
    require(size in SIZES, "config argument", size, f"a size first, one of {list(SIZES)}, then key=value")
    choice = parse_argument(rest, **METHOD_ARGUMENTS, train_length=32, batch=0, num_steps=600, seed=0)
    train_length = choice["train_length"]

    config = ConfigDict()
    config.model = dict(
        **SIZES[size],
        num_kv_heads=config_dict.placeholder(int),  # as num_heads; fewer for grouped-query attention
        vocab_size=257,  # 256 bytes and the end of a document
        num_outputs=config_dict.placeholder(int),  # as vocab_size
        **GPT_NEOX,
        **choose_method(choice, train_length, length_scale=0.25),
        window=config_dict.placeholder(int),  # all keys; --config.model.window=N for sliding-window attention
        attention=choose("attention", "blockwise", block_size=32, num_buckets=2),
        remat="none",
        dtype="auto",
    )
    config.data = dict(
        path="stdlib",
        tokenizer="bytes",
        cache_dir="data",
        validation_fraction=0.05,
        seed=choice["seed"],
    )
    config.optimizer = dict(
        learning_rate=LEARNING_RATES[size],
        warmup_fraction=0.02,
        final_fraction=0.1,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(
        seed=choice["seed"],
        train_length=train_length,
        batch_size=choice["batch"] or max(1, 1024 // max(1, train_length)),
        accumulation_steps=1,
        logits_chunk_tokens=8192,
        num_steps=choice["num_steps"],
        eval_interval=300,
        validation_batches=16,
        checkpoint_interval=300,
        max_to_keep=1,
        max_bad_steps=0,  # stop at the first step whose loss is not finite
        spike_nats=config_dict.placeholder(float),  # or whose loss is so far above its running mean
    )
    config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
    config.evaluation = dict(
        lengths=tuple(2**n for n in range(5, 12) if 2**n >= train_length),
        last_tokens=64,
        max_windows=32,
        batch_tokens=8192,
        blockwise_from=512,
        block_size=32,
    )
    return config
