"""Sections that the recipes share. A recipe is its docstring and the fields in which it differs.

`configs/` is not a package, because a recipe is read by its path and may be anywhere. Recipes load this file with
`read_module(Path(__file__).with_name("common.py"))`, which works from any directory.
"""

from typing import Any

from ml_collections import config_dict


def model(**fields: Any) -> dict[str, Any]:
    """Return the `model` section; `fields` are the size, the block (`GPT_NEOX`), the method and what differs."""
    shared = dict(
        num_kv_heads=config_dict.placeholder(int),  # None: as num_heads; fewer for grouped-query attention
        vocab_size=257,  # 256 bytes and the end of a document
        num_outputs=config_dict.placeholder(int),  # None: as vocab_size
        window=config_dict.placeholder(int),  # None: all keys; --config.model.window=N for sliding-window attention
        remat="none",
        dtype="auto",
    )
    return shared | fields


def text(**fields: Any) -> dict[str, Any]:
    """Return the `data` section of a language model: the bytes of the standard library's source."""
    return dict(path="stdlib", tokenizer="bytes", cache_dir="data", validation_fraction=0.05, seed=0) | fields


def optimizer(**fields: Any) -> dict[str, Any]:
    """Return the `optimizer` section, of which `learning_rate` is missing: the paper's Adam and cosine schedule."""
    shared = dict(
        warmup_fraction=0.01,
        final_fraction=0.1,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    return shared | fields


def train(**fields: Any) -> dict[str, Any]:
    """Return the `train` section, of which lengths, steps, batch size and intervals are missing."""
    shared = dict(
        seed=0,
        accumulation_steps=1,
        logits_chunk_tokens=2048,
        max_to_keep=2,
        max_bad_steps=0,  # abort at the first non-finite step
    )
    return shared | fields


def mesh() -> dict[str, int]:
    """Return the `mesh` section: parameters and batch sharded over all devices."""
    return dict(data=1, fsdp=-1, context=1, tensor=1)


def perplexity(**fields: Any) -> dict[str, Any]:
    """Return the `evaluation` section of a language model, of which `lengths` and `max_windows` are missing."""
    shared = dict(last_tokens=64, batch_tokens=8192, blockwise_from=512, block_size=32)
    return shared | fields
