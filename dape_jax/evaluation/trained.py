"""Trained models for every tool: read the config of a checkpoint, build its mesh, restore its parameters.

In: a workdir of `train.py`. Out: a `TrainedModel`, from which programs are compiled; then the parameters. Checkpoints
are never written here. Next: `programs.py`.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from etils import epath
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from dape_jax.config import RESUMABLE_FIELDS, RunConfig, TaskRunConfig, is_algorithmic, resolved
from dape_jax.data.store import Corpora
from dape_jax.data.tokenizers import TOKENIZER_FILE
from dape_jax.errors import InputError, require
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.styles import method_name
from dape_jax.files import json_digest
from dape_jax.model.transformer import Params
from dape_jax.sharding import MeshConfig, make_mesh, mesh_of_all_devices
from dape_jax.storage import absolute
from dape_jax.training import checkpoint
from dape_jax.training.source import load_corpora
from dape_jax.training.step import abstract_params

logger = logging.getLogger(__name__)

AnyRunConfig = TypeVar("AnyRunConfig", bound=RunConfig | TaskRunConfig)
UNGROUPED = (*RESUMABLE_FIELDS, "model.vocab_multiple")  # config fields that do not change results


@dataclasses.dataclass(frozen=True)
class TrainedModel(Generic[AnyRunConfig]):
    """Description of a checkpoint, read before its parameters."""

    name: str  # in tables and figures: the last parts of the workdir's path; see `named_apart`
    workdir: epath.Path
    step: int
    run: AnyRunConfig  # config of the training run, with the evaluation fields that the caller overrides
    data_digest: str  # of the training corpus, or of the task's strings
    mesh: MeshConfig  # over the devices of this machine, independent of the mesh of the training run
    rotary: str = "rope"  # as trained, or a variant of RoPE; see `positions.stretched`

    @property
    def label(self) -> str:
        """Return the name, preceded by the task of a run on a task: methods have the same names on all tasks."""
        return f"{self.run.data.task}/{self.name}" if isinstance(self.run, TaskRunConfig) else self.name

    @property
    def identity(self) -> dict[str, Any]:
        """Return the fields by which a report identifies the run; `config` is equal for runs that differ in seeds."""
        run, digest = self.run, json_digest([fields_without(self.run, UNGROUPED), self.data_digest])
        about = {"name": self.name, "workdir": str(self.workdir), "step": self.step, "method": method_name(run)}
        about |= {"task": run.data.task} if isinstance(run, TaskRunConfig) else {"rotary": self.rotary}
        return about | {"train_length": run.train.train_length, "seed": run.train.seed, "config": digest}


def fields_without(run: RunConfig | TaskRunConfig, names: Sequence[str], *, seeds: bool = False) -> dict[str, Any]:
    """Return the fields of a config by their paths, without those named and, by default, without seeds."""
    return {
        field: value
        for field, value in flatten_dict(resolved(run), keep_empty_nodes=False, sep=".").items()
        if (seeds or not field.endswith(".seed")) and not any(f"{field}.".startswith(f"{name}.") for name in names)
    }


def are_algorithmic(workdirs: Sequence[epath.PathLike]) -> bool:
    """Return whether the runs are on algorithmic tasks; a workdir without a run counts as either, and is refused later.

    Raises:
        InputError: some are and others are not.
    """
    configs = {str(each): saved for each in workdirs if (saved := checkpoint.read_config(each)) is not None}
    tasks = [workdir for workdir, saved in configs.items() if is_algorithmic(saved["config"])]
    allowed = f"must be all runs on tasks or all language models; {tasks} are runs on tasks"
    require(len(tasks) in (0, len(configs)), "workdir", list(configs), allowed)
    return bool(tasks)


def read_trained(
    workdir: epath.PathLike,
    step: str,
    overrides: dict[str, Any],
    mesh: MeshConfig | None = None,
    config: type[AnyRunConfig] = RunConfig,
) -> TrainedModel[AnyRunConfig]:
    """Read the description of a checkpoint.

    Args:
        workdir: run directory.
        step: "newest", "best" (the lowest validation loss) or a number.
        overrides: fields of the config's evaluation section to replace.
        mesh: mesh of the devices; by default sequences are spread over all of them, and parameters too as far as the
            width is divisible.
        config: `RunConfig` for a language model, or `TaskRunConfig`.

    Raises:
        InputError: there is no such checkpoint, it is damaged, or the model's sizes are not divisible by the mesh.
    """
    number, saved = checkpoint.restore_config(workdir, step)
    saved["config"]["evaluation"] |= overrides
    run = config.from_dict(saved["config"])
    if step == "newest" and "imported" not in saved and number < run.train.num_steps:
        logger.warning("%s: step %d of %d, its training has not ended", workdir, number, run.train.num_steps)
    if mesh is None:
        mesh = mesh_of_all_devices(run.model.width)
    else:
        run.check_model_mesh(make_mesh(mesh))
    return TrainedModel(absolute(workdir).name, epath.Path(workdir), number, run, saved["data_digest"], mesh)


def read_models(
    config: type[AnyRunConfig],
    workdirs: Sequence[epath.PathLike],
    options: Options,
    mesh: MeshConfig | None,
    *overrides: str,
) -> list[TrainedModel[AnyRunConfig]]:
    """Read the descriptions of the models to compare, with different labels.

    The options named by `overrides` replace the config's evaluation field of that name, where they are given.

    Raises:
        InputError: there are no workdirs, two are the same, or a model cannot be read.
    """
    require(bool(workdirs), "workdir", [], "must have at least one directory")
    given = {field: getattr(options, field) for field in overrides if getattr(options, field) not in (None, ())}
    models = [read_trained(workdir, options.step, given, mesh, config) for workdir in workdirs]
    return named_apart(models, "workdir")


def named_apart(models: Sequence[TrainedModel[AnyRunConfig]], field: str) -> list[TrainedModel[AnyRunConfig]]:
    """Return the models with different labels, from as few last parts of their workdirs below the common directory.

    For runs/kerple/seed0, runs/dape/seed0 and runs/fire: kerple/seed0, dape/seed0 and fire.

    Raises:
        InputError: two workdirs are the same; `field` is the setting to name.
    """
    paths = [absolute(model.workdir).parts for model in models]
    columns = zip(*(path[:-1] for path in paths), strict=False)
    common = list(itertools.takewhile(lambda parts: len(set(parts)) == 1, columns))
    below = [len(path) - len(common) for path in paths]
    for num in range(1, max(below) + 1):
        names = ["/".join(path[-min(num, most) :]) for path, most in zip(paths, below, strict=True)]
        named = [dataclasses.replace(model, name=name) for model, name in zip(models, names, strict=True)]
        if len({model.label for model in named}) == len(models):
            return named
    raise InputError(f"{field} = {[str(model.workdir) for model in models]}: must be different directories")


def measure_each(
    models: Sequence[TrainedModel], compile_model: Callable[..., Any], measure: Callable[..., dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the result `measure(model, compile_model(model), params, mesh)` of every model.

    All programs are compiled before any parameters are read, so that a length that does not fit is refused early.
    Models that differ only in seeds share their programs, and variants of RoPE their parameters.
    """

    def key_of(model: TrainedModel) -> tuple[Any, ...]:
        run, data = model.run, dataclasses.replace(model.run.data, seed=0)
        return run.model, run.evaluation, run.train.train_length, data, model.mesh, model.rotary

    programs, results = {}, []
    for model in models:
        if key_of(model) not in programs:
            programs[key_of(model)] = compile_model(model)
    for _, group in itertools.groupby(models, key=lambda model: model.workdir):
        first, *others = group
        mesh, params = restore(first)
        results += [measure(model, programs[key_of(model)], params, mesh) for model in (first, *others)]
        del params  # before the next model's are read
    return results


def require_same(models: Sequence[TrainedModel], *fields: str) -> None:
    """Raise `InputError` unless all models have the same value of each config field, such as "evaluation.lengths"."""
    for field in fields:
        section, name = field.split(".")
        values = {model.label: getattr(getattr(model.run, section), name) for model in models}
        option = f"; give --{name}" if section == "evaluation" else ""
        require(len(set(values.values())) == 1, field, values, f"must be the same for all{option}")


def corpora_of(
    trained: TrainedModel[RunConfig], data: str | None, load: Callable[..., Corpora] | None = None
) -> Corpora:
    """Return the corpora of the training run, or the corpus at `data`.

    Raw text at `data` is encoded by the run's tokenizer, and all of it is for validation. `load` may be a cached
    `load_corpora`; runs that differ in the order of their windows have the same corpora.

    Raises:
        InputError: a corpus cannot be read or was prepared with another tokenizer, or the text under the model's
            `data.path` has changed since training.
    """
    config, workdir = dataclasses.replace(trained.run.data, seed=0), trained.workdir
    advice = f"the corpus of {workdir}; if it was moved, run where this path is right or make it a link. --data "
    advice += "scores another text, raw text as a whole"
    if data is not None:
        tokenizer = workdir / TOKENIZER_FILE
        name = str(tokenizer) if tokenizer.exists() else "bytes"
        whole = {"mixture": None, "validation_path": None, "validation_fraction": 1.0}
        config = dataclasses.replace(config, path=data, tokenizer=name, **whole)
        advice = f"--data, for {workdir}"
    allowed = f"{workdir} was imported, without a text; name one with --data"
    require(bool(config.weights), "data.path", None, allowed)
    try:
        corpora = (load or load_corpora)(config, lossy=True)
    except InputError as error:
        raise InputError(f"{error} ({advice})") from error
    allowed = (
        f"no longer holds the text that {workdir} was trained on (digest {corpora.digest}, in training "
        f"{trained.data_digest}), so its validation documents may be training data; name the corpus to score with "
        "--data"
    )
    is_same = data is not None or corpora.digest == trained.data_digest
    require(is_same, "data.path", config.path or config.mixture, allowed)
    return corpora


def restore(trained: TrainedModel) -> tuple[Mesh, Params]:
    """Read the parameters of a checkpoint; return the mesh, and the parameters sharded over it.

    Raises:
        InputError: the checkpoint is damaged.
    """
    mesh = make_mesh(trained.mesh)
    abstract = abstract_params(trained.run.model, mesh)
    return mesh, checkpoint.restore_params(trained.workdir, trained.step, abstract)
