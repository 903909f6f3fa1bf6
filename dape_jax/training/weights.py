"""Start from weights: parameters of another run's checkpoint. In: `init.source` of a config. Next: `loop.py`.

The optimizer, the schedule and the position in the data are new. Rotary embedding, bias and processor may differ from
the source's. All other parameters must be the same, by path and shape. This is checked before any device work.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from dape_jax.config import RunConfig, TaskRunConfig, differences, read_run, resolved
from dape_jax.data.tokenizers import Tokenizer, saved_tokenizer
from dape_jax.distributed import require_same
from dape_jax.errors import InputError, os_errors, require
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import Params, TransformerConfig, flat_params, model_structure, parameter_kind
from dape_jax.storage import AnyPath, absolute, to_path
from dape_jax.training import checkpoint
from dape_jax.training.step import abstract_params

# Fields of a model that may differ from the source's without a warning.
_FREE_FIELDS = ("rotary", "bias", "processor", "attention", "remat", "dtype", "initializer", "dropout")

ParameterPath = tuple[str, ...]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Checkpoint from which a run starts."""

    workdir: AnyPath
    step: int
    model: TransformerConfig  # of the source
    taken: tuple[ParameterPath, ...]  # parameters that the run starts with; all others are new
    record: dict[str, Any]  # JSON values that say where the parameters came from

    def restore(self, mesh: Mesh) -> Params:
        """Read the parameters to start with, sharded over the mesh.

        Raises:
            InputError: they differ from what was saved, or cannot be read.
        """
        with _reading(f"{self.workdir}@{self.step}"):
            flat = flat_params(checkpoint.restore_params(self.workdir, self.step, abstract_params(self.model, mesh)))
        return unflatten_dict({path: flat[path] for path in self.taken})


@contextlib.contextmanager
def _reading(source: str) -> Iterator[None]:
    """Raise `InputError` that names `init.source` for an error in the block."""
    try:
        with os_errors("init.source", source, "cannot be read"):
            yield
    except InputError as error:
        if str(error).startswith("init.source"):
            raise
        raise InputError(f"init.source = {source!r}: {error}") from error


def open_weights(run: RunConfig | TaskRunConfig, tokenizer: Tokenizer | None) -> Weights:
    """Compare the run that `init.source` names with `run`; no parameters are read yet.

    Args:
        run: config of the new run.
        tokenizer: of its corpus; a task has none.

    Raises:
        InputError: there is no such checkpoint, its tokens have another meaning, or the models do not fit.
    """
    assert run.init.source is not None
    field, (directory, which) = run.init.source, run.init.source_and_step
    with _reading(field):
        workdir = to_path(directory, "init.source")
        step, saved = checkpoint.restore_config(workdir, which)
        source = read_run(saved["config"])
        names = [_tokens_of(source, saved_tokenizer(workdir)), _tokens_of(run, tokenizer)]
    require_same("init.source", f"step {step} of {directory}")
    require(names[0] == names[1], "init.source", field, f"its tokens are those of {names[0]}, this run's of {names[1]}")
    taken, new, dropped = _compare(source.model, run.model, field)
    logger.info("parameters of %s, step %d: %d arrays are used", workdir, step, len(taken))
    for text, paths in (("start as new", new), ("of the source are not used", dropped)):
        if paths:
            logger.info("%d arrays %s: %s", len(paths), text, ", ".join(map("/".join, paths)))
    processor = run.model.processor
    if (
        isinstance(processor, DapeConfig)
        and processor.init != "identity"
        and {"processor"} & set(map(parameter_kind, new))
    ):
        logger.warning("the processor is new and changes the scores; model.processor.init=identity would leave them")
    models = resolved(source)["model"], resolved(run)["model"]
    if lines := differences(*models, ignored=_FREE_FIELDS, names=("source", "now")):
        logger.warning("the model differs from that of %s: %s", workdir, "; ".join(lines))
    record = {"workdir": str(absolute(workdir)), "step": step, "data_digest": saved["data_digest"]}
    return Weights(workdir, step, source.model, taken, record)


def _tokens_of(run: RunConfig | TaskRunConfig, tokenizer: Tokenizer | None) -> str:
    """Return a text that is equal for runs whose tokens have the same meaning."""
    if isinstance(run, TaskRunConfig):
        return f"the task {run.data.task}"
    assert tokenizer is not None
    return f"the tokenizer {tokenizer.name}"


def _compare(
    source: TransformerConfig, model: TransformerConfig, field: str
) -> tuple[tuple[ParameterPath, ...], tuple[ParameterPath, ...], tuple[ParameterPath, ...]]:
    """Return the paths of the parameters to take from the source, of new ones, and of those of the source not used.

    A bias or processor of another name has none of the source's parameters, also where paths and shapes agree: their
    meaning differs.

    Raises:
        InputError: a parameter of the source has another shape, or one that is missing on either side is not part of
            bias or processor.
    """
    theirs, ours = (flat_params(model_structure(each)[1]) for each in (source, model))
    same = {kind: type(getattr(source, kind)) is type(getattr(model, kind)) for kind in ("bias", "processor")}

    def is_shared(path: ParameterPath) -> bool:
        kind = parameter_kind(path)
        return path in theirs and path in ours and (kind is None or same[kind])

    for path in [path for path in (*ours, *theirs) if not is_shared(path) and parameter_kind(path) is None]:
        place = "the source" if path in ours else "this model"
        raise InputError(f"init.source = {field!r}: {'/'.join(path)}: {place} has no such parameter")
    taken = tuple(filter(is_shared, ours))
    for path in taken:
        shapes = [side[path].shape for side in (theirs, ours)]
        message = f"{'/'.join(path)}: its shape is {shapes[0]}, that of this model's is {shapes[1]}"
        require(shapes[0] == shapes[1], "init.source", field, message)
    new, dropped = (tuple(path for path in side if not is_shared(path)) for side in (ours, theirs))
    return taken, new, dropped
