"""Configs: the nested dict of a config file, converted to frozen dataclasses and checked before any device work.

In: the nested dict of a config file. Out: `RunConfig` or `TaskRunConfig`. Each section becomes the dataclass of the
module that it configures. Fields without a default must be given; recipes and `config.json` contain all fields.
"""

import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import cattrs
import jax
from absl import flags
from cattrs.gen import make_dict_structure_fn, override
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh

from dape_jax.data.store import DataConfig
from dape_jax.errors import Changeable, InputError, Resumable, did_you_mean, one_of, positive, require
from dape_jax.evaluation.config import AccuracyConfig, EvaluationConfig
from dape_jax.imports import import_modules
from dape_jax.model.attention import IMPLEMENTATIONS, Fused
from dape_jax.model.biases import BIASES
from dape_jax.model.positions import ROTARY
from dape_jax.model.processors import PROCESSORS
from dape_jax.model.transformer import FOLLOWS, PARAMETER_KINDS, TransformerConfig
from dape_jax.sharding import BATCH_AXES, MeshConfig, check_mesh
from dape_jax.tasks.tapes import TaskConfig
from dape_jax.training.optimizer import OptimizerConfig

Self = TypeVar("Self", bound="BaseRunConfig")  # beartype, which checks annotations in tests, cannot check `typing.Self`

# Fields of the `model` section that are chosen by name, each with the tables of names and config dataclasses (not with
# copies: a module named in `model.imports` adds to them).
CHOICES: dict[str, Mapping[str, Any]] = {
    "rotary": ROTARY,
    "alternate_rotary": ROTARY,
    "bias": BIASES,
    "processor": PROCESSORS,
    "attention": IMPLEMENTATIONS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of the training loop."""

    seed: int = 0  # of the parameters and of dropout
    train_length: int  # T, in tokens; for a task, the longest input in symbols
    batch_size: Changeable[int]  # sequences per step, over all devices and accumulation parts
    accumulation_steps: Resumable[int] = 1  # parts of a batch, computed one after the other
    logits_chunk_tokens: Resumable[int] = 2048  # tokens per device whose logits are in memory
    num_steps: Changeable[int]  # steps of the whole run
    eval_interval: Resumable[int]  # steps between validations; the last step is always validated
    validation_batches: Resumable[int]  # batches per validation
    # steps between checkpoints; None: `eval_interval`; the last step is always saved
    checkpoint_interval: Resumable[int] = FOLLOWS
    # seconds since the last checkpoint after which the next one is saved, whatever the interval; None: any number
    checkpoint_seconds: Resumable[float | None] = None
    max_to_keep: Resumable[int] = 2  # newest checkpoints to keep; the best one is kept as well
    max_bad_steps: Resumable[int] = 0  # consecutive non-finite steps to skip before aborting
    wandb: Resumable[str | None] = None  # project in Weights & Biases, or None
    # account or team in Weights & Biases; None: that of WANDB_ENTITY, or the default
    wandb_entity: Resumable[str | None] = None
    # group of the run in Weights & Biases; None: that of WANDB_RUN_GROUP, or none
    wandb_group: Resumable[str | None] = None
    # comma-separated tags of the run in Weights & Biases; None: those of WANDB_TAGS, or none
    wandb_tags: Resumable[str | None] = None
    profile_steps: Resumable[tuple[int, ...]] = ()  # first and last step of a trace, or ()

    def __post_init__(self):
        if self.checkpoint_interval is None:
            object.__setattr__(self, "checkpoint_interval", self.eval_interval)
        positive(self, "train", "train_length", "batch_size", "accumulation_steps", "logits_chunk_tokens", "num_steps")
        positive(self, "train", "eval_interval", "validation_batches", "checkpoint_interval", "max_to_keep")
        require(0 <= self.seed < 2**32, "train.seed", self.seed, "must be from 0 to 2**32 - 1")
        require(self.max_bad_steps >= 0, "train.max_bad_steps", self.max_bad_steps, "must not be negative")
        is_name = self.wandb not in ("", "True", "true", "False", "false")
        require(is_name, "train.wandb", self.wandb, "must be the name of a project, or None")
        steps = self.profile_steps
        is_trace = len(steps) == 2 and 0 < steps[0] <= steps[1] <= self.num_steps
        allowed = f"must be empty, or the first and last step of a trace, at most train.num_steps = {self.num_steps}"
        require(not steps or is_trace, "train.profile_steps", steps, allowed)
        seconds = self.checkpoint_seconds
        require(seconds is None or seconds > 0, "train.checkpoint_seconds", seconds, "must be positive, or None")


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Initial parameters of a run, and the parameters that it trains."""

    source: str | None = None  # workdir or workdir@step of the run whose parameters are used; None: random parameters
    # comma-separated members of PARAMETER_KINDS; other parameters are frozen; None: train all
    train_only: str | None = None
    optimizer: bool = False  # start with the source's moments, too; the schedule starts from the beginning
    data: str = "start"  # "start" of the order of the data, or "continue" where the source is

    def __post_init__(self):
        one_of(self, "init", data=("start", "continue"))
        for field, is_used in (("optimizer", self.optimizer), ("data", self.data == "continue")):
            allowed = "needs init.source, the run to continue"
            require(self.source is not None or not is_used, f"init.{field}", getattr(self, field), allowed)
        allowed = "must be a run directory, or directory@step, where step is a number, newest or best"
        require(self.source is None or all(self.source_and_step), "init.source", self.source, allowed)
        kinds, allowed = self.trained_kinds, f"must be a comma-separated list of {list(PARAMETER_KINDS)}"
        is_list = set(kinds) <= set(PARAMETER_KINDS) and len(set(kinds)) == len(kinds)
        require(is_list, "init.train_only", self.train_only, f"{allowed}, each at most once")

    @property
    def source_and_step(self) -> tuple[str, str]:
        """Return the workdir and the step that `source` names: "runs/a@500" is ("runs/a", "500").

        The last "@" after the last "/" separates them. Without one, the step is "newest".
        """
        directory, at, step = (self.source or "").rpartition("@")
        return (directory, step) if at and "/" not in step else (self.source or "", "newest")

    @property
    def trained_kinds(self) -> tuple[str, ...]:
        """Return the kinds of parameters to train, or () if all parameters are trained."""
        return () if self.train_only is None else tuple(self.train_only.split(","))


@dataclasses.dataclass(frozen=True)
class BaseRunConfig:
    """Sections that a language model and a task have in common."""

    model: TransformerConfig
    optimizer: Changeable[OptimizerConfig]
    train: TrainConfig
    mesh: Resumable[MeshConfig]
    init: InitConfig

    def __post_init__(self):
        if self.model.vocab_multiple is None:
            are_accelerators = jax.default_backend() != "cpu" and jax.device_count() > 1
            tensor = self.mesh.tensor if self.mesh.tensor > 0 else self.mesh.sizes(jax.device_count())[-1]
            multiple = math.lcm(128 if are_accelerators else 1, tensor)
            object.__setattr__(self, "model", dataclasses.replace(self.model, vocab_multiple=multiple))
        num_steps = self.train.num_steps
        field = "warmup_fraction" if self.optimizer.warmup_steps is None else "warmup_steps"
        warmup_steps, decay_steps = self.optimizer.num_warmup_steps(num_steps), self.optimizer.decay_steps
        allowed = f"must leave at least one step of train.num_steps = {num_steps} after the warm-up"
        require(warmup_steps < num_steps, f"optimizer.{field}", getattr(self.optimizer, field), allowed)
        allowed = f"must be at most {num_steps - warmup_steps}, the steps after the warm-up"
        require(decay_steps <= num_steps - warmup_steps, "optimizer.decay_steps", decay_steps, allowed)

    def check_model_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise `InputError` unless the model can be split evenly over a mesh."""
        fields = {"D": "width", "H": "num_heads", "G": "num_kv_heads", "F": "mlp_width"}
        check_mesh(mesh, {axis: (f"model.{field}", getattr(self.model, field)) for axis, field in fields.items()})
        padded = f"model.vocab_multiple = {self.model.vocab_multiple}: the padded model"
        for field in ("vocab_size", "num_outputs"):
            check_mesh(mesh, {"V": (f"{padded}.{field}", self.model.padded(getattr(self.model, field)))})

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise `InputError` unless batch, sequences and model can be split evenly over a mesh."""
        batch_size, num_parts = self.train.batch_size, self.train.accumulation_steps
        num_devices = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        divisor = num_devices * num_parts
        allowed = f"must be a multiple of {divisor} = {num_devices} devices x {num_parts} accumulation_steps"
        require(batch_size % divisor == 0, "train.batch_size", batch_size, allowed)
        length = ("train.train_length", self.train.train_length)
        if isinstance(self, TaskRunConfig):  # the length of every tape is a multiple of this
            length = ("data.pad_to", self.data.pad_to)
        check_mesh(mesh, {"T": length})
        self.check_model_mesh(mesh)

    @classmethod
    def from_dict(cls: type[Self], spec: dict[str, Any]) -> Self:
        """Return the checked config of a config file's dict.

        Raises:
            InputError: a section or field is unknown, missing or out of range; with a line for each.
        """
        if cls is RunConfig and is_algorithmic(spec):
            task = spec["data"]["task"]
            raise InputError(f"data.task = {task!r}: must not be set: this program needs a language model")
        return _structure(cls, spec)


@dataclasses.dataclass(frozen=True)
class RunConfig(BaseRunConfig):
    """Run of a language model on a corpus."""

    data: DataConfig
    evaluation: Resumable[EvaluationConfig]

    def __post_init__(self):
        super().__post_init__()
        require(self.model.causal, "model.causal", self.model.causal, "must be True for a language model")
        vocab_size, num_outputs = self.model.vocab_size, self.model.num_outputs
        allowed = f"must be model.vocab_size = {vocab_size} for a language model"
        require(num_outputs == vocab_size, "model.num_outputs", num_outputs, allowed)
        self.model.check_length("train.train_length", self.train.train_length)


@dataclasses.dataclass(frozen=True)
class TaskRunConfig(BaseRunConfig):
    """Run of a model on an algorithmic task."""

    data: TaskConfig
    evaluation: Resumable[AccuracyConfig]

    def __post_init__(self):
        super().__post_init__()
        for field in ("vocab_size", "num_outputs"):
            value, expected = getattr(self.model, field), getattr(self.data, field)
            require(value == expected, f"model.{field}", value, f"must be {expected} for {self.data.task}")
        self.data.check_length("evaluation.lengths", max(self.evaluation.lengths))
        self.data.check_length("train.train_length", self.train.train_length)
        message = "must not be fused in a task: kernels need consecutive positions, and a tape may skip some"
        require(not isinstance(self.model.attention, Fused), "model.attention", self.model.attention, message)
        reason = self.model.processor.why_not_cached
        for field, pad_to in (("data.pad_to", self.data.pad_to), ("evaluation.pad_to", self.evaluation.pad_to)):
            require(reason is None or pad_to == 1, field, pad_to, f"must be 1: padding is appended, and {reason}")


def is_algorithmic(spec: dict[str, Any]) -> bool:
    """Return whether a config file's dict describes a run on an algorithmic task."""
    return "data" in spec and isinstance(spec["data"], dict) and "task" in spec["data"]


def read_run(spec: dict[str, Any]) -> RunConfig | TaskRunConfig:
    """Return the checked config of a config file's dict; see `BaseRunConfig.from_dict`."""
    return TaskRunConfig.from_dict(spec) if is_algorithmic(spec) else RunConfig.from_dict(spec)


def read_model(spec: dict[str, Any]) -> TransformerConfig:
    """Return the checked `model` section; see `BaseRunConfig.from_dict`."""
    return _structure(TransformerConfig, spec, "model")


def choose(field: str, name: str, **options: Any) -> dict[str, Any]:
    """Return the dict of a choice with all its options, for a config file: `choose("bias", "fire", threshold=64)`.

    `field` is a key of `CHOICES`.

    Raises:
        InputError: the name or an option is unknown, or an option is out of range.
    """
    return {"name": name} | dataclasses.asdict(_structure(_kind(field, name), options, f"model.{field}"))


def read_text(spec: dict[str, Any], path: str, text: str) -> Any:
    """Return the text of a flag as a value of the type of the field at a dotted path of a config, or as it is.

    Raises:
        LookupError, TypeError, InputError: there is no such field.
    """
    section, *inner = path.split(".")
    kind: Any = typing.get_type_hints(TaskRunConfig if is_algorithmic(spec) else RunConfig)[section]
    if len(inner) > 1:
        kind = _kind(inner[0], spec[section][inner[0]]["name"])
    kind, *others = typing.get_args(field := typing.get_type_hints(kind)[inner[-1]]) or (field,)
    convert = flags.BooleanParser().parse if kind is bool else kind
    try:
        if others == [...]:  # tuple[int, ...], with or without brackets
            return tuple(map(convert, re.findall(r"[^\s,()\[\]'\"]+", "" if text == "None" else text)))
        return None if text == "None" else convert(text)
    except (TypeError, ValueError):
        return text  # `read_run` refuses it


def _kind(field: str, name: Any) -> type:
    """Return the config dataclass of a choice by its name; raise `InputError` if there is none."""
    table = CHOICES[field]
    if isinstance(name, str) and name in table:
        return table[name]
    others = [other for other, of_other in CHOICES.items() if name in list(of_other) and name != "none"]
    own = "; --import=MODULE adds those of a module of your own" if field in ("bias", "processor") else ""
    advice = did_you_mean(str(name), table) or own
    if others:
        advice = f"; {name} is a value of model.{others[0]}: give {others[0]}={name}"
    raise InputError(f"model.{field}.name = {name!r}: must be one of {sorted(table)}{advice}")


def resolved(run: RunConfig | TaskRunConfig) -> dict[str, Any]:
    """Return a run's complete config as JSON values, which `read_run` accepts and checkpoints store."""
    spec = dataclasses.asdict(run)
    for field, table in CHOICES.items():
        if spec["model"][field] is not None:
            (name,) = [name for name, kind in table.items() if type(getattr(run.model, field)) is kind]
            spec["model"][field] = {"name": name} | spec["model"][field]
    return json.loads(json.dumps(spec))


def follow_saved(spec: dict[str, Any], saved: dict[str, Any] | None) -> dict[str, Any]:
    """Return a config file's dict in which the automatic fields of the model are those of the record of a saved run.

    They depend on the devices, and a run may resume on others.
    """
    if saved is None or "model" not in spec:
        return spec
    model, chosen = spec["model"], resolved(read_run(saved["config"]))["model"]
    values = {"dtype": "auto", "vocab_multiple": None}
    automatic = [name for name, value in values.items() if name in model and model[name] == value]
    return spec | {"model": model | {name: chosen[name] for name in automatic}}


def differences(
    saved: dict[str, Any], new: dict[str, Any], ignored: tuple[str, ...] = (), names: tuple[str, str] = ("saved", "now")
) -> list[str]:
    """Return one line for each leaf in which two nested dicts differ, except at or below the dotted paths `ignored`.

    `names` are the two dicts' names in the lines.
    """
    old, now = (flatten_dict(side, sep=".") for side in (saved, new))
    return [
        f"{path}: {names[0]} {old.get(path, '(none)')!r}, {names[1]} {now.get(path, '(none)')!r}"
        for path in sorted(old | now)
        if (path in old, old.get(path)) != (path in now, now.get(path))
        and not any(f"{path}.".startswith(f"{each}.") for each in ignored)
    ]


# ---- conversion of nested dicts to dataclasses

_converter = cattrs.Converter(forbid_extra_keys=True)


def _value(value: Any, kind: Any) -> Any:
    """Return a number, text or bool of exactly this type, or a tuple of a list of them, because JSON has no tuples.

    An integer may become a float. A bool is not an integer.
    """
    if typing.get_origin(kind) is tuple:
        member = typing.get_args(kind)[0]
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be a list of values of type {member.__name__}")
        return tuple(_value(each, member) for each in value)
    is_right = isinstance(value, (int, float) if kind is float else kind)
    if not is_right or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"must be of type {kind.__name__}")
    if kind in (int, float) and not (abs(value) < 2**32 if isinstance(value, int) else math.isfinite(value)):
        raise ValueError("must be finite" if isinstance(value, float) else "must be below 2**32 in size")
    return kind(value)


def _choice(field: str, value: Any, _: Any) -> Any:
    """Return the config dataclass described by `{"name": NAME, **options}`."""
    options = dict(value) if isinstance(value, dict) else {}
    require("name" in options, f"model.{field}", value, "must be a dict with a name and options")
    return _converter.structure(options, _kind(field, options.pop("name")))


def _section(cls: type) -> Callable[[Any, Any], Any]:
    """Return a function that converts a dict to a dataclass. None is left to a field whose default is None."""
    choices = CHOICES if cls is TransformerConfig else ()
    hooks = {field: override(struct_hook=functools.partial(_choice, field)) for field in choices}
    convert = make_dict_structure_fn(cls, _converter, **hooks)  # type: ignore[arg-type]
    optional = {field.name for field in dataclasses.fields(cls) if field.default is None}

    def structure(value: Any, kind: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("must be a section with fields")
        if cls is TransformerConfig and isinstance(modules := value.get("imports"), list | tuple):
            import_modules(modules, "model.imports")  # before names of biases and processors are looked up
        given = {name: each for name, each in value.items() if not (each is None and name in optional)}
        return convert(given, kind)

    return structure


for primitive in (int, float, str, bool):
    _converter.register_structure_hook(primitive, _value)
_converter.register_structure_hook_func(lambda kind: typing.get_origin(kind) is tuple, _value)
_converter.register_structure_hook_factory(dataclasses.is_dataclass, _section)


def _structure(cls: type, spec: Any, path: str = "") -> Any:
    """Return the dataclass of a nested dict.

    Raises:
        InputError: with a line for each mistake.
    """
    try:
        return _converter.structure(spec, cls)
    except (cattrs.BaseValidationError, ValueError) as error:
        raise InputError(*_messages(error, spec, path)) from None


def _messages(error: BaseException, value: Any, path: str) -> Iterator[str]:
    """Yield a line with field, value and what is allowed, for each mistake in the value at a dotted path."""
    if isinstance(error, InputError):  # raised by the dataclass, which names its fields
        yield from error.messages
    elif isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [field.name for field in dataclasses.fields(error.cl)]
        for name in sorted(error.extra_fields):
            advice = did_you_mean(name, known) or f"; the fields are {known}"
            yield f"{path}.{name} = {value[name]!r}: no such field{advice}".lstrip(".")
    elif isinstance(error, cattrs.ClassValidationError):
        of_fields, of_all = error.group_exceptions()
        for each in of_all:
            yield from _messages(each, value, path)
        for each, note in of_fields:
            inner = value[note.name] if note.name in value else None
            yield from _messages(each, inner, f"{path}.{note.name}".lstrip("."))
    elif isinstance(error, KeyError):
        yield f"{path}: missing"
    elif isinstance(error, RuntimeError | AssertionError):  # not of the value; JAX has no device, for example
        raise error
    else:
        yield f"{path} = {value!r}: {error}"


def _marked_fields(cls: type, mark: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of the sections and fields whose type is marked as `Resumable` or `Changeable`."""
    for name, kind in typing.get_type_hints(cls, include_extras=True).items():
        if typing.get_origin(kind) is Annotated and kind.__metadata__ == mark.__metadata__:
            yield prefix + name
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _marked_fields(kind, mark, f"{prefix}{name}.")


RESUMABLE_FIELDS = tuple(_marked_fields(RunConfig, Resumable))
CHANGEABLE_FIELDS = tuple(_marked_fields(RunConfig, Changeable))
