"""Comparison of trained models: the steps that every evaluation of several workdirs shares.

Read the models' configs, require that what is compared is the same for all, make the output directory, compile every
program, then restore and score one model after the other. Used by `perplexity.py` and `accuracy.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jax.sharding import Mesh

from dape_jax.errors import require
from dape_jax.evaluation.report import common_directory, make_directory
from dape_jax.evaluation.trained import CheckpointInfo, restore
from dape_jax.model.transformer import Params
from dape_jax.sharding import MeshConfig

Model = TypeVar("Model", bound=CheckpointInfo)
Programs = TypeVar("Programs")
Result = TypeVar("Result")


def read_models(
    read: Callable[[Path, str, dict[str, Any], MeshConfig | None], Model],
    workdirs: Sequence[Path],
    step: str,
    overrides: dict[str, Any],
    mesh: MeshConfig | None,
) -> list[Model]:
    """Read the descriptions of the models to compare.

    Args:
        read: `read_trained` or `read_trained_on_task`.
        workdirs: run directories, one or more, whose labels are different.
        step: see `read_trained`.
        overrides: fields of the evaluation section to replace, where not None.
        mesh: see `read_trained`.
    """
    require(bool(workdirs), "workdir", [], "must be one workdir or more")
    given = {field: value for field, value in overrides.items() if value is not None}
    models = [read(workdir, step, given, mesh) for workdir in workdirs]
    labels = [model.label for model in models]
    require(len(set(labels)) == len(labels), "workdir", labels, "must have different names")
    return models


def require_same(models: Sequence[CheckpointInfo], *fields: str) -> None:
    """Raise `InputError` unless all models have the same value of each config field, such as "evaluation.lengths"."""
    for field in fields:
        section, name = field.split(".")
        values = [getattr(getattr(model.run, section), name) for model in models]
        flag = f"; give --{name}" if section == "evaluation" else ""
        require(len(set(values)) == 1, field, values, f"must be the same for all{flag}")


def score_models(
    models: Sequence[Model],
    compile_model: Callable[[Model], Programs],
    score_model: Callable[[Model, Programs, Params, Mesh], Iterable[Result]],
    output: Path | None,
) -> tuple[list[Result], Path]:
    """Compile the programs of all models, then restore and score one model after the other.

    All programs are compiled before any parameters are read, so that a length that does not fit into memory is refused
    before the work begins. Only one model's parameters are in memory at a time.

    Args:
        models: descriptions of the models.
        compile_model: returns the programs of a model.
        score_model: returns the results of a model, given its programs, parameters and mesh.
        output: directory of the results; by default the workdir, or the longest path common to all workdirs.

    Returns:
        The results of all models, and the directory to write them to.

    Raises:
        InputError: the directory is not writable, or a length does not fit into memory.
    """
    directory = common_directory([model.workdir for model in models]) if output is None else output
    make_directory(directory)
    programs = [compile_model(model) for model in models]

    def restore_and_score(model: Model, of_model: Programs) -> list[Result]:
        mesh, params = restore(model)
        return list(score_model(model, of_model, params, mesh))

    return [
        result
        for model, of_model in zip(models, programs, strict=True)
        for result in restore_and_score(model, of_model)
    ], directory
