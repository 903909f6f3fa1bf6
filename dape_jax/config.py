"""Configs: the nested dict of a config file, converted to frozen dataclasses and checked before any device work.

In: the nested dict of a config file. Out: `RunConfig` or `TaskRunConfig`. Each section becomes the dataclass of the
module that it configures. Fields have no default values, except the options of `CHOICES`, so config files are complete.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import typing
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from jax.sharding import Mesh
from ml_collections import config_dict

from dape_jax.data.store import DataConfig
from dape_jax.errors import InputError, check_all, did_you_mean, positive, require
from dape_jax.evaluation.config import AccuracyConfig, EvaluationConfig
from dape_jax.model.attention import IMPLEMENTATIONS, Auto, Fused
from dape_jax.model.biases import BIASES
from dape_jax.model.contextual import CONTEXTUAL
from dape_jax.model.positions import ROTARY
from dape_jax.model.processors import PROCESSORS
from dape_jax.model.transformer import GPT_NEOX, PARAMETER_KINDS, TransformerConfig
from dape_jax.sharding import BATCH_AXES, MeshConfig, check_mesh
from dape_jax.tasks.tapes import TaskConfig
from dape_jax.training.optimizer import OptimizerConfig

Self = TypeVar("Self", bound="BaseRunConfig")  # beartype, which checks annotations in tests, cannot check `typing.Self`

# Fields of the `model` section that are chosen by name, each with a dict from name to config dataclass.
CHOICES = {
    "rotary": ROTARY,
    "bias": BIASES | CONTEXTUAL,
    "processor": PROCESSORS,
    "attention": IMPLEMENTATIONS,
}


LARGEST_INTEGER = 2**31 - 1  # positions, windows and steps are int32 on a device
# Largest values of seeds, and of fields that set the size of an array: a larger number is a mistake.
LARGEST = {
    "model.num_layers": 10_000,
    "model.width": 2**20,
    "model.num_heads": 2**16,
    "model.num_kv_heads": 2**16,
    "model.head_dim": 2**16,
    "model.mlp_width": 2**22,
    "model.vocab_size": 2**28,
    "model.num_outputs": 2**28,
    "model.processor.channels": 2**16,
    "model.processor.kernel_width": 2**16,
    "model.bias.num_buckets": 2**20,
    "model.bias.position_dim": 2**16,
    "model.bias.num_positions": 2**20,
    "model.bias.width": 2**16,
    "train.num_steps": 10**8,
    "train.seed": 2**32 - 1,
    "data.seed": 2**32 - 1,
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of the training loop."""

    seed: int  # of the parameters and of dropout
    train_length: int  # T, in tokens; for a task, the longest input in symbols
    batch_size: int  # sequences per step, over all devices and accumulation parts
    accumulation_steps: int  # parts of a batch whose gradients are computed one after the other
    logits_chunk_tokens: int  # tokens per device whose logits are in memory at a time
    num_steps: int
    eval_interval: int  # steps between validations; the last step is always validated
    validation_batches: int  # batches per validation
    checkpoint_interval: int  # steps between checkpoints, a multiple of `eval_interval`; the last step is always saved
    max_to_keep: int  # newest checkpoints to keep; the one with the lowest validation loss is kept as well
    max_bad_steps: int  # consecutive non-finite steps to skip before aborting
    wandb: str | None  # project in Weights & Biases that also receives the metrics, or None
    profile_steps: tuple[int, ...]  # first and last step of a trace in the workdir's profile/; (): no trace

    def __post_init__(self):
        others = {field.name for field in dataclasses.fields(self)}
        others -= {"seed", "max_bad_steps", "wandb", "profile_steps"}
        steps = self.profile_steps
        check_all(
            lambda: require(0 <= self.seed < 2**32, "train.seed", self.seed, "must be from 0 to 2**32 - 1"),
            lambda: require(self.max_bad_steps >= 0, "train.max_bad_steps", self.max_bad_steps, "must not be negative"),
            lambda: positive(self, "train", *sorted(others)),
            lambda: require(self.wandb != "", "train.wandb", self.wandb, "must be the name of a project"),
            lambda: require(
                not steps or (len(steps) == 2 and 0 < steps[0] <= steps[1]),
                "train.profile_steps",
                steps,
                "must be empty, or the first and the last step of a trace",
            ),
        )
        is_validated = self.checkpoint_interval % self.eval_interval == 0
        allowed = f"must be a multiple of train.eval_interval = {self.eval_interval}: every checkpoint is validated"
        require(is_validated, "train.checkpoint_interval", self.checkpoint_interval, allowed)


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Initial parameters of a run, and the parameters that it trains."""

    source: str | None  # workdir or workdir@step of the run whose parameters are used; None: random parameters
    train_only: str | None  # comma-separated members of PARAMETER_KINDS; other parameters are frozen; None: train all

    def __post_init__(self):
        allowed = "must be a run directory, or directory@step, where step is a number, newest or best"
        require(self.source is None or all(self.source_and_step), "init.source", self.source, allowed)
        allowed = f"must be a comma-separated list of {list(PARAMETER_KINDS)}, each at most once"
        is_list = set(self.trained_kinds) <= set(PARAMETER_KINDS)
        is_list = is_list and len(set(self.trained_kinds)) == len(self.trained_kinds)
        require(is_list, "init.train_only", self.train_only, allowed)

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
    optimizer: OptimizerConfig
    train: TrainConfig
    mesh: MeshConfig
    init: InitConfig

    def __post_init__(self):
        fraction, num_steps = self.optimizer.warmup_fraction, self.train.num_steps
        allowed = f"must leave at least one step of train.num_steps = {num_steps} after the warm-up"
        require(round(fraction * num_steps) < num_steps, "optimizer.warmup_fraction", fraction, allowed)

    def check_model_mesh(self, mesh: Mesh) -> None:
        """Raise `InputError` unless the model can be split evenly over a mesh."""
        model = self.model
        sizes = {"D": ("model.width", model.width)}
        sizes |= {"H": ("model.num_heads", model.num_heads), "G": ("model.num_kv_heads", model.num_kv_heads)}
        sizes |= {"F": ("model.mlp_width", model.mlp_width)}
        check_mesh(mesh, sizes | {"V": ("model.vocab_size", model.vocab_size)})
        check_mesh(mesh, {"V": ("model.num_outputs", model.num_outputs)})

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise `InputError` unless batch, sequences and model can be split evenly over a mesh."""
        batch_size, num_parts = self.train.batch_size, self.train.accumulation_steps
        num_devices = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        divisor = num_devices * num_parts
        allowed = f"must be a multiple of {divisor} = {num_devices} devices x {num_parts} accumulation_steps"
        require(batch_size % divisor == 0, "train.batch_size", batch_size, allowed)
        check_mesh(mesh, {"T": self.length_multiple})
        self.check_model_mesh(mesh)

    @property
    def length_multiple(self) -> tuple[str, int]:
        """Return the name and the value of the field that divides every sequence length."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls: type[Self], spec: dict[str, Any]) -> Self:
        """Return the checked config of a config file's dict. A `train.checkpoint_interval` of None is `eval_interval`.

        Raises:
            InputError: a section or field is unknown, missing or out of range.
        """
        _check_fields(cls, "config", spec)
        for name, section in spec.items():
            require(isinstance(section, dict), f"config.{name}", section, "must be a section with fields")
        kinds, others = typing.get_type_hints(cls), [name for name in spec if name != "model"]
        model, *sections = check_all(
            lambda: _read_model_of(spec),
            *(functools.partial(_read_section_of, kinds[name], name, spec) for name in others),
        )
        return cls(model=model, **dict(zip(others, sections, strict=True)))


@dataclasses.dataclass(frozen=True)
class RunConfig(BaseRunConfig):
    """Run of a language model on a corpus."""

    data: DataConfig
    evaluation: EvaluationConfig

    def __post_init__(self):
        super().__post_init__()
        require(self.model.causal, "model.causal", self.model.causal, "must be True for a language model")
        vocab_size, num_outputs = self.model.vocab_size, self.model.num_outputs
        allowed = f"must be model.vocab_size = {vocab_size} for a language model"
        require(num_outputs == vocab_size, "model.num_outputs", num_outputs, allowed)

    @property
    def length_multiple(self) -> tuple[str, int]:
        """See `BaseRunConfig`."""
        return "train.train_length", self.train.train_length

    @classmethod
    def from_dict(cls: type[Self], spec: dict[str, Any]) -> Self:
        """See `BaseRunConfig`.

        Raises:
            InputError: `data` is a task.
        """
        if is_algorithmic(spec):
            raise InputError(
                f"data.task = {spec['data']['task']!r}: must not be set: this program needs a language model"
            )
        return super().from_dict(spec)


@dataclasses.dataclass(frozen=True)
class TaskRunConfig(BaseRunConfig):
    """Run of a model on an algorithmic task."""

    data: TaskConfig
    evaluation: AccuracyConfig

    def __post_init__(self):
        super().__post_init__()
        for field in ("vocab_size", "num_outputs"):
            value, expected = getattr(self.model, field), getattr(self.data, field)
            require(value == expected, f"model.{field}", value, f"must be {expected} for {self.data.task}")
        lengths = {"train.train_length": self.train.train_length, "evaluation.lengths": max(self.evaluation.lengths)}
        for field in sorted(lengths, key=lengths.__getitem__, reverse=True):
            self.data.check_length(field, lengths[field])
        needs_neighbours = self.model.causal and isinstance(self.model.attention, Auto | Fused)
        message = "must be dense or blockwise in a causal task: kernels need consecutive positions, tasks may skip some"
        require(not needs_neighbours, "model.attention", self.model.attention, message)
        reason = self.model.processor.why_not_cached
        for field, pad_to in (("data.pad_to", self.data.pad_to), ("evaluation.pad_to", self.evaluation.pad_to)):
            require(reason is None or pad_to == 1, field, pad_to, f"must be 1: padding is appended, and {reason}")

    @property
    def length_multiple(self) -> tuple[str, int]:
        """See `BaseRunConfig`."""
        return "data.pad_to", self.data.pad_to


def is_algorithmic(spec: dict[str, Any]) -> bool:
    """Return whether a config file's dict describes a run on an algorithmic task."""
    return "data" in spec and isinstance(spec["data"], dict) and "task" in spec["data"]


def read_run(spec: dict[str, Any]) -> RunConfig | TaskRunConfig:
    """Return the checked config of a config file's dict; see `BaseRunConfig.from_dict`."""
    return TaskRunConfig.from_dict(spec) if is_algorithmic(spec) else RunConfig.from_dict(spec)


def _read_model_of(spec: dict[str, Any]) -> TransformerConfig:
    check_numbers(spec["model"], "model")
    return read_model(spec["model"])


def _read_section_of(cls: type, section: str, spec: dict[str, Any]) -> Any:
    given = spec[section]
    check_numbers(given, section)
    has_both = {"checkpoint_interval", "eval_interval"} <= set(given)
    if cls is TrainConfig and has_both and given["checkpoint_interval"] is None:
        given = given | {"checkpoint_interval": given["eval_interval"]}
    return read_section(cls, section, given)


def _check_fields(cls: type, section: str, spec: dict[str, Any]) -> None:
    fields = {field.name for field in dataclasses.fields(cls)}
    unknown, missing = sorted(set(spec) - fields), sorted(fields - set(spec))
    messages = [
        f"{section}.{name} = {spec[name]!r}: no such field{did_you_mean(name, fields)}; the fields are {sorted(fields)}"
        for name in unknown
    ]
    messages += [f"{section}.{name}: missing" for name in missing]
    if messages:
        raise InputError(*messages)


def _typed(cls: type, section: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return `spec` with the types of a dataclass's fields: integers become floats, and lists become tuples.

    Raises:
        InputError: a value has another type.
    """
    hints = {name: kind for name, kind in typing.get_type_hints(cls).items() if name in spec}
    hints = {name: kind for name, kind in hints.items() if typing.get_origin(kind) is not typing.ClassVar}
    checks = [functools.partial(_typed_value, kind, f"{section}.{name}", spec[name]) for name, kind in hints.items()]
    return spec | dict(zip(hints, check_all(*checks), strict=True))


def _typed_value(kind: Any, field: str, value: Any) -> Any:
    kinds = typing.get_args(kind) or (kind,)  # the members of a union
    if typing.get_origin(kind) is tuple:  # JSON has no tuples
        is_right = isinstance(value, list | tuple) and all(type(each) is kinds[0] for each in value)
        require(is_right, field, value, f"must be a list of values of type {kinds[0].__name__}")
        return tuple(value)
    is_right = isinstance(value, (*kinds, int) if float in kinds else kinds)
    is_right = is_right and (bool in kinds or not isinstance(value, bool))  # a bool is an int in Python
    names = ["None" if kind is type(None) else kind.__name__ for kind in kinds]
    require(is_right, field, value, "must be of type " + " or ".join(names))
    return float(value) if isinstance(value, int) and float in kinds else value


def check_numbers(spec: Any, field: str = "") -> None:
    """Raise `InputError` for an integer beyond its limit, or a float that is not finite, in nested dicts and lists."""
    if isinstance(spec, dict):
        names = {name: f"{field}.{name}" if field else str(name) for name in spec}
        check_all(*(functools.partial(check_numbers, value, names[name]) for name, value in spec.items()))
    elif isinstance(spec, list | tuple):
        for value in spec:
            check_numbers(value, field)
    elif isinstance(spec, int):
        largest = LARGEST[field] if field in LARGEST else LARGEST_INTEGER
        limit = f"must be at most {largest}" if spec > 0 else f"must be at least {-largest}"
        require(abs(spec) <= largest, field, spec, limit)
    elif isinstance(spec, float):
        require(math.isfinite(spec), field, spec, "must be finite")


def read_section(cls: type, section: str, spec: dict[str, Any]) -> Any:
    """Return the dataclass of a section.

    Raises:
        InputError: a field is unknown, missing, of another type or out of range.
    """
    _check_fields(cls, section, spec)
    return cls(**_typed(cls, section, spec))


def read_choice(field: str, choices: dict[str, Any], spec: dict[str, Any]) -> Any:
    """Return the config dataclass described by `{"name": NAME, **options}`.

    `field` names the field in messages, and `choices` is a dict from name to config dataclass, like `biases.BIASES`.

    Raises:
        InputError: the name or an option is unknown, or an option is out of range.
    """
    require(isinstance(spec, dict), field, spec, "must be a dict with a name and options")
    options = dict(spec)
    name = options.pop("name", None)
    require(isinstance(name, str) and name in choices, f"{field}.name", name, f"must be one of {sorted(choices)}")
    allowed = [f.name for f in dataclasses.fields(choices[name])]
    for option, value in options.items():
        advice = did_you_mean(option, allowed)
        require(option in allowed, f"{field}.{option}", value, f"no such option{advice}; {name!r} has {allowed}")
    return choices[name](**_typed(choices[name], field, options))


def read_model(spec: dict[str, Any]) -> TransformerConfig:
    """Return the checked `model` section.

    Raises:
        InputError: a field is unknown, missing or out of range.
    """
    _check_fields(TransformerConfig, "model", spec)
    derived = ("num_kv_heads", "num_outputs", "head_dim", "mlp_width")
    given = {name: value for name, value in spec.items() if name not in CHOICES}
    given = {name: value for name, value in given.items() if not (name in derived and value is None)}
    fields, *choices = check_all(
        lambda: _typed(TransformerConfig, "model", given),
        *(functools.partial(read_choice, f"model.{name}", table, spec[name]) for name, table in CHOICES.items()),
    )
    return TransformerConfig(**dict(zip(CHOICES, choices, strict=True)), **fields)


def choose(field: str, name: str, **options: Any) -> dict[str, Any]:
    """Return the dict of a choice with all its options, for a config file: `choose("bias", "fire", threshold=64)`.

    `field` is a key of `CHOICES`.

    Raises:
        InputError: the name or an option is unknown, or an option is out of range.
    """
    return {"name": name} | _fields_of(read_choice(f"model.{field}", CHOICES[field], {"name": name} | options))


def _fields_of(section: Any) -> dict[str, Any]:
    """Return the fields of a config dataclass, with None as a typed placeholder, which flags can set."""
    kinds = typing.get_type_hints(type(section))
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {
        name: config_dict.placeholder(typing.get_args(kinds[name])[0]) if value is None else value
        for name, value in values.items()
    }


def config_file_dict(run: RunConfig | TaskRunConfig) -> dict[str, Any]:
    """Return a run's config in the form of a config file, in which a flag can set every field."""
    spec = {field.name: _fields_of(getattr(run, field.name)) for field in dataclasses.fields(run)}
    saved = resolved(run)["model"]
    return spec | {"model": spec["model"] | {field: choose(field, **saved[field]) for field in CHOICES}}


def resolved(run: RunConfig | TaskRunConfig) -> dict[str, Any]:
    """Return a run's complete config as JSON values, which `read_run` accepts and checkpoints store."""
    spec = dataclasses.asdict(run)
    for field, table in CHOICES.items():
        (name,) = [name for name, kind in table.items() if type(getattr(run.model, field)) is kind]
        spec["model"][field] = {"name": name} | spec["model"][field]
    return json.loads(json.dumps(spec))


def _added(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the sections and fields that configs of older versions lack, with values that keep the older behaviour."""
    model = spec["model"]
    same = ("parallel_residual", "norm", "norm_epsilon", "gated_mlp", "mlp_bias", "tied_embeddings")
    fields = {name: GPT_NEOX[name] for name in same}
    fields |= {"head_dim": model["width"] // model["num_heads"], "mlp_width": 4 * model["width"]}
    fields |= {"attention_output_bias": model["projection_bias"]}
    fields |= {"rotary": {} if model["rotary"]["name"] == "none" else {"fraction": 1.0}}
    train = {"wandb": None, "profile_steps": []}
    return {"init": {"source": None, "train_only": None}, "model": fields, "train": train}


def upgraded(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved config with the sections and fields that it lacks if an older version saved it.

    A config that no version could have saved is returned unchanged; `read_run` raises `InputError` for it.
    """

    def fill(spec: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
        filled = {k: fill(v, added[k]) if k in added and isinstance(v, dict) else v for k, v in spec.items()}
        return {name: value for name, value in added.items() if name not in spec} | filled

    try:
        return fill(saved, _added(saved))
    except (KeyError, TypeError, ZeroDivisionError):
        return saved


def without_added(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config without the sections and fields that newer versions added and that have no effect.

    Equivalent configs saved by different versions give equal results, so they can be compared.
    """

    def strip(spec: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in spec.items() if not (name in added and added[name] == value)}
        return {k: strip(v, added[k]) if k in added and isinstance(v, dict) else v for k, v in kept.items()}

    return strip(spec, _added(spec))


# Fields that may change on resume: they affect only performance, storage, evaluation and the handling of bad steps.
# The trained model changes by rounding; a change of `mesh.context` or of the accumulation also changes dropout's masks.
# `data.path` may change because a digest identifies the data.
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
    "train.wandb",
    "train.profile_steps",
    "evaluation",
)


def read_module(file: Path) -> ModuleType:
    """Import a config file by its path: it is not part of a package.

    Raises:
        InputError: the file is missing.
    """
    allowed = "must exist; a copy of a recipe needs a copy of configs/common.py next to it"
    require(file.is_file(), "config file", str(file), allowed)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(
    saved: Any, new: Any, path: str = "", ignored: tuple[str, ...] = (), names: tuple[str, str] = ("saved", "now")
) -> list[str]:
    """Return one line for each leaf in which two nested dicts differ, except at or below the dotted paths `ignored`.

    `names` are the two dicts' names in the lines.
    """
    if path in ignored:
        return []
    if not (isinstance(saved, dict) and isinstance(new, dict)):
        return [] if saved == new else [f"{path}: {names[0]} {saved!r}, {names[1]} {new!r}"]
    lines = []
    for key in sorted(set(saved) | set(new)):
        old_value, new_value = (side[key] if key in side else "(none)" for side in (saved, new))
        lines += differences(old_value, new_value, f"{path}.{key}" if path else key, ignored, names)
    return lines
