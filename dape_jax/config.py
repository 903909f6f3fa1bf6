"""From a config file to checked, frozen values; every mistake is named before any device work.

In: the nested dict of a config file. Out: `RunConfig`. A section is read by the dataclass of the room that it
configures; its fields have no defaults here, so that a config file says everything.
"""

import dataclasses
import importlib.util
import json
import math
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import config_dict

from dape_jax.data.store import DataConfig
from dape_jax.errors import InputError, require
from dape_jax.evaluation.config import AccuracyConfig, EvaluationConfig
from dape_jax.model.attention import IMPLEMENTATIONS, Auto, Fused
from dape_jax.model.biases import BIASES
from dape_jax.model.contextual import CONTEXTUAL
from dape_jax.model.positions import ROTARY
from dape_jax.model.processors import PROCESSORS
from dape_jax.model.transformer import TransformerConfig
from dape_jax.sharding import BATCH_AXES, MeshConfig, check_mesh
from dape_jax.tasks.tapes import TaskConfig
from dape_jax.training.optimizer import OptimizerConfig

# The rooms that offer a choice by name; each is a dict from name to config dataclass.
CHOICES = {
    "rotary": ROTARY,
    "bias": BIASES | CONTEXTUAL,
    "processor": PROCESSORS,
    "attention": IMPLEMENTATIONS,
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Args of the training loop.

    Args:
        seed: of the parameters.
        train_length: T, in tokens; of a task the longest input, in symbols.
        batch_size: sequences in a step, over all devices and accumulation parts.
        accumulation_steps: parts in which a step's gradient is computed.
        logits_chunk_tokens: tokens on each device whose logits are held at once.
        num_steps: steps in all.
        eval_interval: steps between validations (and at the end).
        validation_batches: held-out batches in a validation.
        checkpoint_interval: steps between checkpoints (and at the end); a multiple of `eval_interval`.
        max_to_keep: newest checkpoints kept, besides the one with the lowest validation loss.
        max_bad_steps: bad steps in a row that are left out; at one more the run stops. See `make_train_step`.
        spike_nats: a loss so far above its running mean makes a step bad; None for never.
    """

    seed: int
    train_length: int
    batch_size: int
    accumulation_steps: int
    logits_chunk_tokens: int
    num_steps: int
    eval_interval: int
    validation_batches: int
    checkpoint_interval: int
    max_to_keep: int
    max_bad_steps: int
    spike_nats: float | None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "seed":
                require(0 <= value < 2**32, "train.seed", value, "0 to 2**32 - 1")
            elif field.name == "max_bad_steps":
                require(value >= 0, "train.max_bad_steps", value, "0 or more")
            elif field.name != "spike_nats":
                require(value > 0, f"train.{field.name}", value, "a positive number")
        require(
            self.checkpoint_interval % self.eval_interval == 0,
            "train.checkpoint_interval",
            self.checkpoint_interval,
            f"a multiple of train.eval_interval = {self.eval_interval}, so that every checkpoint has its loss",
        )
        require(
            self.spike_nats is None or 0 < self.spike_nats < math.inf,
            "train.spike_nats",
            self.spike_nats,
            "a positive number of nats per token, or None for never",
        )

    def check_devices(self, batch_axis_size: int) -> None:
        """Raise `InputError` unless the batch divides over devices and accumulation parts."""
        divisor = batch_axis_size * self.accumulation_steps
        require(
            self.batch_size % divisor == 0,
            "train.batch_size",
            self.batch_size,
            f"a multiple of {batch_axis_size} devices x {self.accumulation_steps} accumulation_steps = {divisor}",
        )


@dataclasses.dataclass(frozen=True)
class _Run:
    """The sections that every run has, one for each room."""

    model: TransformerConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    mesh: MeshConfig

    def __post_init__(self):
        fraction, num_steps = self.optimizer.warmup_fraction, self.train.num_steps
        require(
            round(fraction * num_steps) < num_steps,
            "optimizer.warmup_fraction",
            fraction,
            f"must leave a step of train.num_steps = {num_steps} after the warm-up",
        )

    def check_model_mesh(self, mesh: Mesh) -> None:
        """Raise `InputError` unless the model divides over a mesh."""
        model = self.model
        sizes = {"D": ("model.width", model.width)}
        sizes |= {"H": ("model.num_heads", model.num_heads), "G": ("model.num_kv_heads", model.num_kv_heads)}
        sizes |= {"F": ("4 x model.width", 4 * model.width)}
        check_mesh(mesh, sizes | {"V": ("model.vocab_size", model.vocab_size)})
        check_mesh(mesh, {"V": ("model.num_outputs", model.num_outputs)})

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise `InputError` unless batch, sequences and model divide over a mesh."""
        self.train.check_devices(math.prod(mesh.shape[axis] for axis in BATCH_AXES))
        check_mesh(mesh, {"T": self.sequence})
        self.check_model_mesh(mesh)

    @property
    def sequence(self) -> tuple[str, int]:
        """What every sequence's length is a multiple of: the field that says so, and the number."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RunConfig(_Run):
    """A language model on a corpus."""

    data: DataConfig
    evaluation: EvaluationConfig

    def __post_init__(self):
        super().__post_init__()
        require(self.model.causal, "model.causal", self.model.causal, "True for a language model")
        require(
            self.model.num_outputs == self.model.vocab_size,
            "model.num_outputs",
            self.model.num_outputs,
            f"as model.vocab_size = {self.model.vocab_size} in a language model",
        )

    @property
    def sequence(self) -> tuple[str, int]:
        """See `_Run`."""
        return "train.train_length", self.train.train_length

    @classmethod
    def from_dict(cls, spec: dict[str, Any]) -> "RunConfig":
        """Read and check a config file's dict.

        Raises:
            InputError: a section or field that is unknown, missing or out of range; or a run on a task.
        """
        if is_algorithmic(spec):
            raise InputError(f"data.task = {spec['data']['task']!r}: a run on a task, and this is for language models")
        return cls(**_read_sections(cls, spec))


@dataclasses.dataclass(frozen=True)
class TaskRunConfig(_Run):
    """A model on an algorithmic task."""

    data: TaskConfig
    evaluation: AccuracyConfig

    def __post_init__(self):
        super().__post_init__()
        for field in ("vocab_size", "num_outputs"):
            value, expected = getattr(self.model, field), getattr(self.data, field)
            require(value == expected, f"model.{field}", value, f"{expected} for {self.data.task}")
        lengths = {"train.train_length": self.train.train_length, "evaluation.lengths": max(self.evaluation.lengths)}
        for field in sorted(lengths, key=lengths.__getitem__, reverse=True):
            self.data.check_length(field, lengths[field])
        neighbours = self.model.causal and isinstance(self.model.attention, Auto | Fused)
        allowed = "dense or blockwise in a causal model: a kernel needs neighbouring positions, and these may be drawn"
        require(not neighbours, "model.attention", self.model.attention, allowed)
        changes = self.model.processor.why_not_cached
        for field, pad_to in (("data.pad_to", self.data.pad_to), ("evaluation.pad_to", self.evaluation.pad_to)):
            require(changes is None or pad_to == 1, field, pad_to, f"1, since padding is appended, and {changes}")

    @property
    def sequence(self) -> tuple[str, int]:
        """See `_Run`."""
        return "data.pad_to", self.data.pad_to

    @classmethod
    def from_dict(cls, spec: dict[str, Any]) -> "TaskRunConfig":
        """See `RunConfig.from_dict`."""
        return cls(**_read_sections(cls, spec))


def is_algorithmic(spec: dict[str, Any]) -> bool:
    """Whether a config file's dict is of a run on a task."""
    return "data" in spec and "task" in spec["data"]


def read_run(spec: dict[str, Any]) -> RunConfig | TaskRunConfig:
    """Read and check a config file's dict; see `RunConfig.from_dict`."""
    return TaskRunConfig.from_dict(spec) if is_algorithmic(spec) else RunConfig.from_dict(spec)


def _read_sections(cls: type, spec: dict[str, Any]) -> dict[str, Any]:
    _check_fields(cls, "config", spec)
    kinds = typing.get_type_hints(cls)
    return {
        name: read_model(section) if name == "model" else read_section(kinds[name], name, section)
        for name, section in spec.items()
    }


def _check_fields(cls: type, section: str, spec: dict[str, Any]) -> None:
    fields = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(spec) - fields):
        raise InputError(f"{section}.{unknown[0]} = {spec[unknown[0]]!r}: no such field; there are {sorted(fields)}")
    if missing := sorted(fields - set(spec)):
        raise InputError(f"{section}.{missing[0]}: missing")


def read_section(cls: type, section: str, spec: dict[str, Any]) -> Any:
    """Make the dataclass of a section whose fields are all given."""
    _check_fields(cls, section, spec)
    for name, kind in typing.get_type_hints(cls).items():
        allowed = typing.get_args(kind) or (kind,)  # of a union its parts
        if typing.get_origin(kind) is not tuple:  # whose elements its own dataclass checks
            is_right = isinstance(spec[name], (*allowed, int) if float in allowed else allowed)
            require(is_right, f"{section}.{name}", spec[name], " or ".join(of.__name__ for of in allowed))
    # A config that was saved as JSON has lists where it had tuples.
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in spec.items()})


def read_choice(field: str, choices: dict[str, Any], spec: dict[str, Any]) -> Any:
    """Make the config that `{"name": NAME, **options}` describes, from one of the dicts at the rooms' feet."""
    options = dict(spec)
    name = options.pop("name", None)
    require(name in choices, f"{field}.name", name, f"one of {sorted(choices)}")
    allowed = [f.name for f in dataclasses.fields(choices[name])]
    for option, value in options.items():
        require(option in allowed, f"{field}.{option}", value, f"{name!r} has the options {allowed}")
    return choices[name](**options)


def read_model(spec: dict[str, Any]) -> TransformerConfig:
    """Read the `model` section. The dtype "auto" is that of the platform; num_kv_heads None is num_heads, and
    num_outputs None is vocab_size.
    """
    _check_fields(TransformerConfig, "model", spec)
    chosen = {field: read_choice(f"model.{field}", table, spec[field]) for field, table in CHOICES.items()}
    dtype = spec["dtype"]
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    same = {"num_kv_heads": "num_heads", "num_outputs": "vocab_size"}
    sizes = {field: spec[other] if spec[field] is None else spec[field] for field, other in same.items()}
    return TransformerConfig(**{**spec, **chosen, **sizes, "dtype": dtype})


def choose(field: str, name: str, **options: Any) -> dict[str, Any]:
    """A choice with all of its options, for a config file: `choose("bias", "fire", threshold=64)`.

    Args:
        field: a key of `CHOICES`.
        name: a key of the dict there.
        options: those that differ from the defaults of the choice's dataclass.

    Raises:
        InputError: an unknown name or option.
    """
    choice = read_choice(f"model.{field}", CHOICES[field], {"name": name} | options)
    # What is None by default gets its type, so that a flag can set it.
    open_fields = {
        option.name: config_dict.placeholder(typing.get_args(option.type)[0])
        for option in dataclasses.fields(choice)
        if getattr(choice, option.name) is None
    }
    return {"name": name} | dataclasses.asdict(choice) | open_fields


def resolved(run: RunConfig | TaskRunConfig) -> dict[str, Any]:
    """A run's whole config as JSON, every option in it: what is saved, and what `RunConfig.from_dict` reads again."""
    spec = dataclasses.asdict(run)
    for field, table in CHOICES.items():
        (name,) = [name for name, kind in table.items() if type(getattr(run.model, field)) is kind]
        spec["model"][field] = {"name": name} | spec["model"][field]
    return json.loads(json.dumps(spec))


def parse_argument(argument: str | None, **defaults: Any) -> dict[str, Any]:
    """Read a config file's argument, `config.py:key=value,key=value`, each value of its default's type.

    Raises:
        InputError: an unknown key, or a value that is not of the type.
    """
    values = dict(defaults)
    for item in filter(None, (argument or "").split(",")):
        key, equals, text = item.partition("=")
        require(bool(equals) and key in defaults, "config argument", item, f"key=value with a key of {list(defaults)}")
        kind = type(defaults[key])
        try:
            values[key] = kind(text)
        except ValueError as error:
            raise InputError(f"config argument = {item!r}: {key} takes {kind.__name__}") from error
    return values


# What decides how a run is computed and stored, and not what comes out of it (but for rounding, and for which random
# numbers dropout draws, where mesh.context or accumulation lays them out in another way), and what it does about
# steps that go wrong: a run may be resumed with other values. The text is known by its digest, wherever it lies;
# `evaluation` is not read in training.
RESUMABLE_FIELDS = (
    "mesh",
    "model.attention",
    "model.remat",
    "data.path",
    "data.cache_dir",
    "train.accumulation_steps",
    "train.logits_chunk_tokens",
    "train.checkpoint_interval",
    "train.max_to_keep",
    "train.max_bad_steps",
    "train.spike_nats",
    "evaluation",
)


def read_module(file: Path) -> ModuleType:
    """Return the module in a file, for a config file, which is read by its path and belongs to no package.

    Raises:
        InputError: the file is missing.
    """
    allowed = "must exist; recipes need configs/common.py beside them, which is only in a clone"
    require(file.is_file(), "config file", str(file), allowed)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


METHOD_ARGUMENTS = {"rotary": "none", "bias": "nope", "processor": "none", "kernel": 3, "channels": 32}


def choose_method(argument: dict[str, Any], train_length: int, length_scale: float = 1.0) -> dict[str, Any]:
    """The fields of a `model` section that make a method of the paper, with its official settings.

    Args:
        argument: the values of `METHOD_ARGUMENTS`' keys, as `parse_argument` reads them.
        train_length: in tokens; YaRN reads it.
        length_scale: lengths of the recipe relative to the paper's; FIRE's threshold is scaled by it.

    Raises:
        InputError: an unknown name, or an option of DAPE without DAPE.
    """
    is_dape = argument["processor"] == "dape"
    for key in ("kernel", "channels"):
        require(
            is_dape or argument[key] == METHOD_ARGUMENTS[key],
            "config argument",
            f"{key}={argument[key]}",
            "is for processor=dape",
        )
    rotary = choose("rotary", argument["rotary"])
    if argument["rotary"] == "yarn":
        rotary |= {"train_length": train_length}
    bias = choose("bias", argument["bias"])
    if argument["bias"] == "fire":  # as the official configurations, which halve what they are given: 512 and 128
        bias |= {"threshold": round(length_scale * (256 if is_dape else 64))}
        bias |= {"activation": "leaky_relu" if is_dape else "relu"}
    processor = choose("processor", argument["processor"])
    if is_dape:
        processor |= {"kernel_width": argument["kernel"], "channels": argument["channels"]}
    return {"rotary": rotary, "bias": bias, "processor": processor}


def differences(saved: Any, new: Any, path: str = "", but: tuple[str, ...] = ()) -> list[str]:
    """One line for every leaf in which two nested dicts differ, save those at or under the dotted paths of `but`."""
    if path in but:
        return []
    if isinstance(saved, dict) and isinstance(new, dict):
        keys = sorted(set(saved) | set(new))
        return [
            line
            for key in keys
            for line in differences(
                saved.get(key, "(none)"), new.get(key, "(none)"), f"{path}.{key}" if path else key, but
            )
        ]
    return [] if saved == new else [f"{path}: saved {saved!r}, now {new!r}"]
