"""Sections shared by the recipes. A recipe consists of its docstring and the fields in which it differs.

`configs/` is not a package, because a recipe is read by its path and may be copied to any directory, together with this
file. Recipes load it with `read_module(Path(__file__).with_name("common.py"))`.
"""

from typing import Any

from ml_collections import config_dict

from dape_jax.config import choose
from dape_jax.errors import InputError, require

METHOD_ARGUMENTS = {"rotary": "none", "bias": "nope", "processor": "none", "kernel": 3, "channels": 32, "fire": "auto"}


def model(**fields: Any) -> dict[str, Any]:
    """Return the `model` section; `fields` are size, block (for example `GPT_NEOX`), method and other values."""
    shared = dict(
        num_kv_heads=config_dict.placeholder(int),  # None: num_heads; fewer for grouped-query attention
        head_dim=config_dict.placeholder(int),  # None: width / num_heads
        mlp_width=config_dict.placeholder(int),  # None: 4 x width
        vocab_size=config_dict.placeholder(int),  # None: the corpus's
        num_outputs=config_dict.placeholder(int),  # None: vocab_size
        window=config_dict.placeholder(int),  # None: all keys; --config.model.window=N for sliding-window attention
        remat="none",
        dtype="auto",
    )
    return shared | fields


def text(**fields: Any) -> dict[str, Any]:
    """Return the `data` section of a language model: bytes of the standard library's source."""
    shared = dict(
        path="stdlib",
        tokenizer=config_dict.placeholder(str),  # None: the prepared corpus's, or bytes for raw text
        cache_dir="data",
        validation_fraction=0.05,
        seed=0,
    )
    return shared | fields


def optimizer(**fields: Any) -> dict[str, Any]:
    """Return the `optimizer` section, without `learning_rate`: the paper's Adam and cosine schedule."""
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
    """Return the `train` section, without lengths, steps, batch size and intervals."""
    shared = dict(
        seed=0,
        accumulation_steps=1,
        logits_chunk_tokens=2048,
        checkpoint_interval=config_dict.placeholder(int),  # None: eval_interval
        max_to_keep=2,
        max_bad_steps=0,  # abort at the first non-finite step
        wandb=config_dict.placeholder(str),  # None: metrics are written only to TensorBoard's files
        profile_steps=(),  # --config.train.profile_steps=10,15 traces these steps
    )
    return shared | fields


def mesh() -> dict[str, int]:
    """Return the `mesh` section: parameters and batch are sharded over all devices."""
    return dict(data=1, fsdp=-1, context=1, tensor=1)


def init() -> dict[str, Any]:
    """Return the `init` section: random parameters, all trained. `docs/training.md` describes the other values."""
    return dict(source=config_dict.placeholder(str), train_only=config_dict.placeholder(str))


def perplexity(**fields: Any) -> dict[str, Any]:
    """Return the `evaluation` section of a language model, without `lengths` and `max_windows`."""
    shared = dict(last_tokens=64, batch_tokens=8192, blockwise_from=512, block_size=32)
    return shared | fields


def parse_argument(argument: str | None, **defaults: Any) -> dict[str, Any]:
    """Parse a config file's argument, `config.py:key=value,key=value`; values have the types of their defaults.

    Raises:
        InputError: a key is unknown or given twice, or a value has another type.
    """
    values, given = dict(defaults), set()
    for item in filter(None, (argument or "").split(",")):
        key, equals, text = item.partition("=")
        require(key not in given, "config argument", argument, f"must have {key} once")
        given.add(key)
        require(
            bool(equals) and key in defaults,
            "config argument",
            item,
            f"must be key=value with a key of {list(defaults)}",
        )
        kind = type(defaults[key])
        try:
            values[key] = kind(text)
        except ValueError as error:
            raise InputError(f"config argument = {item!r}: {key} must be of type {kind.__name__}") from error
    return values


def choose_method(argument: dict[str, Any], train_length: int, length_scale: float = 1.0) -> dict[str, Any]:
    """Return the fields of the `model` section for a method, with the paper's official settings.

    Args:
        argument: values for the keys of `METHOD_ARGUMENTS`, from `parse_argument`.
        train_length: train length in tokens, for YaRN.
        length_scale: ratio of the recipe's lengths to the paper's; it scales FIRE's threshold.

    Raises:
        InputError: a name is unknown, or an option of DAPE or FIRE is given without it.
    """
    is_dape = argument["processor"] == "dape"
    for key in ("kernel", "channels"):
        require(
            is_dape or argument[key] == METHOD_ARGUMENTS[key],
            "config argument",
            f"{key}={argument[key]}",
            "needs processor=dape",
        )
    rotary = choose("rotary", argument["rotary"])
    if argument["rotary"] == "yarn":
        rotary |= {"train_length": train_length}
    bias = choose("bias", argument["bias"])
    allowed = "must be auto, dape or plain, and only with bias=fire"
    is_allowed = argument["fire"] in (("auto", "dape", "plain") if argument["bias"] == "fire" else ("auto",))
    require(is_allowed, "config argument", f"fire={argument['fire']}", allowed)
    # The official configurations have thresholds of 512 and 128, and the official code halves them.
    if argument["bias"] == "fire":
        with_dape = is_dape if argument["fire"] == "auto" else argument["fire"] == "dape"
        bias |= {"threshold": round(length_scale * (256 if with_dape else 64))}
        bias |= {"activation": "leaky_relu" if with_dape else "relu"}
    processor = choose("processor", argument["processor"])
    if is_dape:
        processor |= {"kernel_width": argument["kernel"], "channels": argument["channels"]}
    return {"rotary": rotary, "bias": bias, "processor": processor}
