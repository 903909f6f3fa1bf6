"""A length-extrapolation curve in minutes, on two CPU cores and text that every Python has.

A byte-level model of 0.9 M parameters learns the standard library's source at 64 bytes and is tested at up to 2048, 32
times longer. `make demo` runs both methods and draws them into one picture:

    python train.py --config=configs/quickstart.py:processor=none --workdir=runs/quickstart/kerple
    python train.py --config=configs/quickstart.py:processor=dape --workdir=runs/quickstart/dape1x3-kerple
    python eval.py --workdir=runs/quickstart/kerple,runs/quickstart/dape1x3-kerple

Argument: rotary=none|rope|pi|ntk|yarn, bias=nope|alibi|kerple|kerple_power|sandwich|t5|fire|cope|transformer_xl,
processor=none|dape, kernel=1|3|5|..., channels=C; any field below can be set too, as --config.train.num_steps=2000 or
--config.model.processor.alignment=causal (`docs/methods.md` has the options of every method).
"""

from ml_collections import ConfigDict, config_dict

from dape_jax.config import METHOD_ARGUMENTS, choose, choose_method, parse_argument
from dape_jax.model.transformer import GPT_NEOX


def get_config(argument: str | None = None) -> ConfigDict:
    """The recipe."""
    choice = parse_argument(argument, **METHOD_ARGUMENTS | dict(bias="kerple", processor="dape"))
    config = ConfigDict()
    config.model = dict(
        num_layers=4,
        width=128,
        num_heads=4,
        num_kv_heads=config_dict.placeholder(int),  # as num_heads; fewer for grouped-query attention
        vocab_size=257,  # 256 bytes and the end of a document
        num_outputs=config_dict.placeholder(int),  # as vocab_size
        **GPT_NEOX,
        **choose_method(choice, train_length=64, length_scale=0.5),
        window=config_dict.placeholder(int),  # all keys; --config.model.window=N for sliding-window attention
        attention=choose("attention", "blockwise", block_size=32, num_buckets=2),  # faster than dense here, even at 64
        remat="none",
        dtype="auto",
    )
    config.data = dict(
        path="stdlib",
        tokenizer="bytes",
        cache_dir="data",
        validation_fraction=0.05,
        seed=0,
    )
    config.optimizer = dict(
        learning_rate=2e-3,
        warmup_fraction=0.01,
        final_fraction=0.1,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(
        seed=0,
        train_length=64,
        batch_size=16,
        accumulation_steps=1,
        logits_chunk_tokens=8192,
        num_steps=1000,
        eval_interval=250,
        validation_batches=20,
        checkpoint_interval=500,
        max_to_keep=2,
        max_bad_steps=0,  # stop at the first step whose loss is not finite
        spike_nats=config_dict.placeholder(float),  # or whose loss is so far above its running mean
    )
    config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
    config.evaluation = dict(
        lengths=(64, 128, 256, 512, 1024, 2048),
        last_tokens=64,  # the same 64 bytes at every length
        max_windows=128,
        batch_tokens=8192,
        blockwise_from=512,
        block_size=32,
    )
    return config
