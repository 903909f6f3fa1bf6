"""Parts that recipes share. A recipe consists of its docstring and the fields in which it differs.

The argument of every recipe but `retrofit.py` chooses a method, with the paper's official settings (`docs/methods.md`):

    rotary=none|rope|pi|ntk|yarn  bias=nope|alibi|kerple|kerple_power|sandwich|t5|fire|cope|transformer_xl
    processor=none|dape  kernel=W  channels=C
    fire=auto|dape|plain  FIRE's published settings with DAPE or without it; auto: with DAPE if processor=dape
    seed=N                of the parameters, dropout and order of the data; `dape-eval` takes seeds together

All other fields are set by flags: --config.train.num_steps=2000, --config.model.attention=fused.
"""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from dape_jax.config import InitConfig, TrainConfig, choose
from dape_jax.data.store import DataConfig
from dape_jax.errors import InputError, require
from dape_jax.evaluation.config import AccuracyConfig, EvaluationConfig
from dape_jax.model.transformer import TransformerConfig
from dape_jax.sharding import MeshConfig
from dape_jax.tasks.tapes import TaskConfig
from dape_jax.training.optimizer import OptimizerConfig

METHOD = {"rotary": "none", "bias": "nope", "processor": "none", "kernel": 3, "channels": 32, "fire": "auto", "seed": 0}
Fields = dict[str, Any]


def make(
    *, model: Fields, data: Fields, optimizer: Fields, train: Fields, evaluation: Fields, seed: int = 0
) -> ConfigDict:
    """Return a complete config: fields that are not given have the defaults of their dataclasses.

    `seed` is that of model and data.
    """
    of_data, of_evaluation = (TaskConfig, AccuracyConfig) if "task" in data else (DataConfig, EvaluationConfig)
    fields = dict(
        # The vocabulary is the corpus's, padded as the mesh needs it.
        model=_defaults(TransformerConfig) | dict(vocab_size=None, vocab_multiple=None) | model,
        data=_defaults(of_data) | dict(seed=seed) | data,
        optimizer=_defaults(OptimizerConfig) | optimizer,
        train=_defaults(TrainConfig) | dict(seed=seed) | train,
        mesh=_defaults(MeshConfig),  # parameters and batch are sharded over all devices
        init=_defaults(InitConfig),  # random parameters, all trained
        evaluation=_defaults(of_evaluation) | evaluation,
    )
    config: Any = ConfigDict(fields)
    rotary = model["rotary"] if "rotary" in model else {}
    if "train_length" in rotary and rotary["train_length"] == train["train_length"]:  # YaRN's, follows a flag
        config.model.rotary.train_length = config.train.get_oneway_ref("train_length")
    return config


def _defaults(config: type) -> Fields:
    """Return the fields of a config dataclass that have a default, except those that are chosen by name."""
    return {
        field.name: field.default
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING and not dataclasses.is_dataclass(field.default)
    }


def parse_argument(argument: str | None, **defaults: Any) -> Fields:
    """Parse a config file's argument, `config.py:key=value,key=value`; values have the types of their defaults.

    Raises:
        InputError: a key is unknown or given twice, or a value has another type.
    """
    given: Fields = {}
    for item in filter(None, (argument or "").split(",")):
        key, equals, value = item.partition("=")
        allowed = f"must be key=value with a key of {list(defaults)}; other fields are set by --config.SECTION.FIELD="
        require(bool(equals) and key in defaults, "config argument", item, allowed)
        require(key not in given, "config argument", argument, f"must have {key} once")
        kind = type(defaults[key])
        try:
            given[key] = kind(value)
        except ValueError as error:
            raise InputError(f"config argument = {item!r}: {key} must be of type {kind.__name__}") from error
    return defaults | given


def parse_size(argument: str | None, sizes: dict[str, Fields], **defaults: Any) -> tuple[str, Fields]:
    """Parse an argument that begins with a size, `config.py:SIZE,key=value`; the first size is the default."""
    size, _, rest = (argument or next(iter(sizes))).partition(",")
    require(size in sizes, "config argument", size, f"must begin with a size, one of {list(sizes)}, then key=value")
    return size, parse_argument(rest, **METHOD, **defaults)


def choose_method(argument: Fields, train_length: int, length_scale: float = 1.0) -> Fields:
    """Return the fields of the `model` section for a method, with the paper's official settings.

    Args:
        argument: values for the keys of `METHOD`, from `parse_argument`.
        train_length: train length in tokens, for YaRN.
        length_scale: ratio of the recipe's lengths to the paper's; it scales FIRE's threshold.

    Raises:
        InputError: a name is unknown, or an option of DAPE or FIRE is given without it.
    """
    is_dape, is_fire = argument["processor"] == "dape", argument["bias"] == "fire"
    for key in ("kernel", "channels"):
        is_allowed = is_dape or argument[key] == METHOD[key]
        require(is_allowed, "config argument", f"{key}={argument[key]}", "needs processor=dape")
    is_allowed = argument["fire"] in (("auto", "dape", "plain") if is_fire else ("auto",))
    allowed = "must be auto, dape or plain, and only with bias=fire"
    require(is_allowed, "config argument", f"fire={argument['fire']}", allowed)
    method = {field: choose(field, argument[field]) for field in ("rotary", "bias", "processor")}
    if argument["rotary"] == "yarn":
        method["rotary"] |= {"train_length": train_length}
    if is_fire:  # the official configurations have thresholds of 512 and 128, and the official code halves them
        with_dape = is_dape if argument["fire"] == "auto" else argument["fire"] == "dape"
        method["bias"] |= {"threshold": round(length_scale * (256 if with_dape else 64))}
        method["bias"] |= {"activation": "leaky_relu" if with_dape else "relu"}
    if is_dape:
        method["processor"] |= {"kernel_width": argument["kernel"], "channels": argument["channels"]}
    return method
