"""Trained models for every tool: read the config of a checkpoint, build its mesh, restore its parameters.

In: a workdir of `train.py`. Out: a `TrainedModel`, from which programs are compiled; then the parameters. Checkpoints
are never written here. Next: `programs.py`.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jax.sharding import Mesh

from dape_jax.config import RunConfig, TaskRunConfig, is_algorithmic
from dape_jax.data.store import Corpus, load_corpus
from dape_jax.data.tokenizers import TOKENIZER_FILE
from dape_jax.errors import InputError, os_errors, require
from dape_jax.evaluation.options import Options
from dape_jax.model.transformer import Params
from dape_jax.sharding import MeshConfig, make_mesh, mesh_of_all_devices
from dape_jax.storage import AnyPath, absolute, exists
from dape_jax.training import checkpoint
from dape_jax.training.step import abstract_params

logger = logging.getLogger(__name__)

AnyRunConfig = TypeVar("AnyRunConfig", bound=RunConfig | TaskRunConfig)


class DeletedStepError(InputError):
    """Error for a step that was deleted after its config was read, for example by its training run."""


@dataclasses.dataclass(frozen=True)
class TrainedModel(Generic[AnyRunConfig]):
    """Description of a checkpoint, read before its parameters."""

    workdir: AnyPath
    step: int
    run: AnyRunConfig  # config of the training run, with the evaluation fields that the caller overrides
    data_digest: str  # of the training corpus, or of the task's strings
    mesh: MeshConfig  # over the devices of this machine, independent of the mesh of the training run
    choice: str  # of the step: "newest", "best" or its number

    @property
    def name(self) -> str:
        """Return the last part of the workdir's absolute path, which names the model in tables and figures."""
        return absolute(self.workdir).name

    @property
    def label(self) -> str:
        """Return the name, preceded by the task of a run on a task: methods have the same names on all tasks."""
        return f"{self.run.data.task}/{self.name}" if isinstance(self.run, TaskRunConfig) else self.name


def are_algorithmic(workdirs: list[AnyPath]) -> bool:
    """Return whether the runs are on algorithmic tasks; a workdir without a run counts as a language model.

    Raises:
        InputError: some are and others are not.
    """
    configs = {}
    for workdir in workdirs:
        with _reading(workdir):
            configs[str(workdir)] = checkpoint.read_config(workdir)
    tasks = [workdir for workdir, saved in configs.items() if saved is not None and is_algorithmic(saved["config"])]
    allowed = f"must be all runs on tasks or all language models; {tasks} are runs on tasks"
    require(len(tasks) in (0, len(configs)), "workdir", list(configs), allowed)
    return bool(tasks)


def read_trained(
    workdir: AnyPath, step: str, overrides: dict[str, Any], mesh: MeshConfig | None = None
) -> TrainedModel[RunConfig]:
    """Read the description of a checkpoint of a language model.

    Args:
        workdir: run directory.
        step: "newest", "best" (the lowest validation loss) or a number.
        overrides: fields of the config's evaluation section to replace.
        mesh: mesh of the devices; by default sequences are spread over all of them, and parameters too as far as the
            width is divisible.

    Raises:
        InputError: there is no such checkpoint, it cannot be read, or the model's sizes are not divisible by the mesh.
    """
    return _read(RunConfig, workdir, step, overrides, mesh)


def read_trained_on_task(
    workdir: AnyPath, step: str, overrides: dict[str, Any], mesh: MeshConfig | None = None
) -> TrainedModel[TaskRunConfig]:
    """Read the description of a checkpoint of a model of an algorithmic task; see `read_trained`."""
    return _read(TaskRunConfig, workdir, step, overrides, mesh)


def _read(
    config: type[AnyRunConfig], workdir: AnyPath, step: str, overrides: dict[str, Any], mesh: MeshConfig | None
) -> TrainedModel[AnyRunConfig]:
    with _reading(workdir):
        number, saved = checkpoint.restore_config(workdir, step)
    saved["config"]["evaluation"] |= overrides
    run = config.from_dict(saved["config"])
    if mesh is None:
        mesh = mesh_of_all_devices(run.model.width)
    else:
        run.check_model_mesh(make_mesh(mesh))
    return TrainedModel(workdir, number, run, saved["data_digest"], mesh, step)


def _reading(workdir: AnyPath) -> contextlib.AbstractContextManager[None]:
    return os_errors("workdir", str(workdir), "cannot be read")


def read_models(
    read: Callable[[AnyPath, str, dict[str, Any], MeshConfig | None], TrainedModel[AnyRunConfig]],
    workdirs: Sequence[AnyPath],
    options: Options,
    mesh: MeshConfig | None,
    *overrides: str,
) -> list[TrainedModel[AnyRunConfig]]:
    """Read the descriptions of the models to compare, whose labels must differ; `read` is one of the functions above.

    The options named by `overrides` replace the config's evaluation field of that name, where they are given.

    Raises:
        InputError: there are no workdirs, two labels are equal, or a model cannot be read.
    """
    require(bool(workdirs), "workdir", [], "must have at least one directory")
    given = {field: getattr(options, field) for field in overrides if getattr(options, field) not in (None, ())}
    models = [read(workdir, options.step, given, mesh) for workdir in workdirs]
    require_different_names(models, "workdir")
    return models


def require_different_names(models: Sequence[TrainedModel], field: str) -> None:
    """Raise `InputError` if two models would have the same label in a table; `field` is the setting to name."""
    labels = [model.label for model in models]
    require(len(set(labels)) == len(labels), field, labels, "must have different names")


def require_same(models: Sequence[TrainedModel], *fields: str) -> None:
    """Raise `InputError` unless all models have the same value of each config field, such as "evaluation.lengths"."""
    for field in fields:
        section, name = field.split(".")
        values = {model.label: getattr(getattr(model.run, section), name) for model in models}
        option = f"; give --{name}" if section == "evaluation" else ""
        require(len(set(values.values())) == 1, field, values, f"must be the same for all{option}")


def validation_corpus(trained: TrainedModel[RunConfig], data: str | None) -> Corpus:
    """Return the corpus whose validation documents are scored: that of the training run, or the one at `data`.

    Raw text at `data` is encoded by the run's tokenizer.

    Raises:
        InputError: the corpus cannot be read or was prepared with another tokenizer, or the text under the model's
            `data.path` has changed since training.
    """
    config = trained.run.data
    if data is not None:
        file = trained.workdir / TOKENIZER_FILE
        tokenizer = str(file) if exists(file) else "bytes"
        try:
            return load_corpus(dataclasses.replace(config, path=data, tokenizer=tokenizer), lossy=True)
        except InputError as error:
            raise InputError(f"{error} (--data, for {trained.workdir})") from error
    is_known = config.path is not None
    require(is_known, "data.path", None, f"{trained.workdir} was imported, without a text; name one with --data")
    try:
        corpus = load_corpus(config, lossy=True)
    except InputError as error:
        raise InputError(f"{error} (the corpus of {trained.workdir}; name another to score with --data)") from error
    allowed = (
        f"no longer holds the text that {trained.workdir} was trained on (digest {corpus.digest}, "
        f"in training {trained.data_digest}), so its validation documents may be training data; name the corpus to "
        "score with --data"
    )
    require(corpus.digest == trained.data_digest, "data.path", config.path, allowed)
    return corpus


def restore(trained: TrainedModel) -> tuple[Mesh, Params]:
    """Read the parameters of a checkpoint; return the mesh, and the parameters sharded over it.

    Raises:
        DeletedStepError: the checkpoint was deleted.
        InputError: the checkpoint is damaged or cannot be read.
    """
    workdir, step, mesh = trained.workdir, trained.step, make_mesh(trained.mesh)
    with _reading(workdir):
        try:
            return mesh, checkpoint.restore_params(workdir, step, abstract_params(trained.run.model, mesh))
        except InputError as error:
            names = checkpoint.step_names(workdir)
            if str(step) in names:
                raise
            message = f"step = '{step}': was deleted from {workdir} during the evaluation; its steps are {names[::-1]}"
            raise DeletedStepError(message) from error


def restore_current(trained: TrainedModel[AnyRunConfig]) -> tuple[TrainedModel[AnyRunConfig], Mesh, Params]:
    """Read the parameters as `restore` does; if their step was deleted, choose the newest, or the best, step again.

    A training run deletes old steps, perhaps while the programs of an evaluation are compiled. All steps of a run have
    the same model, so the programs are also those of a later step.

    Returns:
        The description of the model, with the step that was read; the mesh; and the parameters.

    Raises:
        DeletedStepError: the checkpoint was deleted, and was chosen by its number.
        InputError: the checkpoint is damaged or cannot be read.
    """
    while True:
        try:
            return trained, *restore(trained)
        except DeletedStepError:
            if trained.choice not in ("newest", "best"):
                raise
        with _reading(trained.workdir):
            step, _ = checkpoint.restore_config(trained.workdir, trained.choice)
        logger.info("%s: step %d was deleted; step %d is read instead", trained.label, trained.step, step)
        trained = dataclasses.replace(trained, step=step)
