"""Start from another run's checkpoint. In: the `init` section of a config. Next: `loop.py`.

Rotary embedding, bias and processor may differ from the source's. All other parameters must match by path and shape,
which is checked before any device work. The schedule starts from the beginning; optimizer and order of the data, too,
unless `init.optimizer` and `init.data` say that they continue. This needs the parameters and the data of the source.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import optax
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from dape_jax.config import RESUMABLE_FIELDS, RunConfig, TaskRunConfig, differences, read_run, resolved
from dape_jax.data.conventions import Conventions, saved_conventions
from dape_jax.data.tokenizers import Tokenizer, saved_tokenizer
from dape_jax.distributed import require_same
from dape_jax.errors import InputError, require
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import Params, TransformerConfig, flat_params, model_structure, parameter_kind
from dape_jax.storage import absolute, to_path
from dape_jax.training import checkpoint
from dape_jax.training.source import Source
from dape_jax.training.step import TrainState, abstract_params

# Fields of a model that may differ from the source's without a warning.
_FREE_FIELDS = ("rotary", "bias", "processor", "attention", "remat", "dtype", "initializer", "dropout")

ParameterPath = tuple[str, ...]

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """Values with which a run starts; None, and parameters that are missing, are those of a new run."""

    params: Params
    opt_state: optax.OptState | None = None
    data: dict[str, Any] | None = None  # place in the order of the data
    conventions: Conventions = Conventions()


class Found(NamedTuple):
    """Checkpoint that `init.source` names."""

    workdir: epath.Path
    step: int
    saved: dict[str, Any]  # its JSON values
    run: RunConfig | TaskRunConfig


def find_start(run: RunConfig | TaskRunConfig) -> Found:
    """Find the checkpoint that `init.source` names, before the data are read: text may take hours to prepare.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    assert run.init.source is not None
    directory, which = run.init.source_and_step
    workdir = to_path(directory, "init.source")
    with _reading(run.init.source):
        step, saved = checkpoint.restore_config(workdir, which)
        return Found(workdir, step, saved, read_run(saved["config"]))


def read_start(
    run: RunConfig | TaskRunConfig, found: Found, data: Source, planned: TrainState, mesh: Mesh
) -> tuple[Start, dict[str, Any]]:
    """Read what `init` names of a checkpoint, after comparing its config with `run`.

    Args:
        run: config of the new run.
        found: result of `find_start`.
        data: training data of the new run.
        planned: shapes, dtypes and shardings of its state.
        mesh: mesh over which the parameters are sharded.

    Returns:
        What the new run takes from the source, and its origin as JSON values, for `config.json` and checkpoints.

    Raises:
        InputError: the source is damaged, its tokenizer or task differs, or its parameters do not match; or, of what
            should continue, the source's differs.
    """
    assert run.init.source is not None
    field, (workdir, step, saved, source) = run.init.source, found
    with _reading(field):
        names = [_tokens_of(source, saved_tokenizer(workdir)), _tokens_of(run, data.tokenizer)]
    require_same(init_source=f"step {step} of {field}")
    require(names[0] == names[1], "init.source", field, f"has {names[0]}, but this run has {names[1]}")
    taken, new, dropped = _compare(source.model, run.model, field)
    logger.info("parameters of %s, step %d: %d arrays are used", workdir, step, len(taken))
    for text, paths in (("are newly initialised", new), ("of the source are not used", dropped)):
        if paths:
            logger.info("%d arrays %s: %s", len(paths), text, ", ".join(map("/".join, paths)))
    processor = run.model.processor
    if isinstance(processor, DapeConfig) and processor.init != "identity" and "processor" in map(parameter_kind, new):
        logger.warning("the new processor changes the scores even untrained; model.processor.init=identity would not")
    models = resolved(source)["model"], resolved(run)["model"]
    if lines := differences(*models, ignored=_FREE_FIELDS, names=("source", "now")):
        logger.warning("the model differs from that of %s: %s", workdir, "; ".join(lines))
    items: dict[str, Any] = {"params": ocp.args.StandardRestore(abstract_params(source.model, mesh))}
    if run.init.optimizer:
        is_whole = not (new or dropped or "imported" in saved) and source.init.train_only == run.init.train_only
        allowed = f"must be False: {workdir} has no moments, or those of other parameters than this run trains"
        require(is_whole, "init.optimizer", True, allowed)
        items["opt_state"] = ocp.args.StandardRestore(planned.opt_state)
    if run.init.data == "continue":
        facts = [
            {"data": each["data"], "train_length": each["train"]["train_length"], "digest": digest}
            for each, digest in ((resolved(source), saved["data_digest"]), (resolved(run), data.digest))
        ]
        lines = differences(*facts, ignored=RESUMABLE_FIELDS, names=("source", "now"))
        require(not lines, "init.data", "continue", f"needs the data of {workdir}: {'; '.join(lines)}")
        items["data"] = ocp.args.JsonRestore()
    with _reading(field):
        arrays: dict[str, Any] = dict.fromkeys(("opt_state", "data")) | checkpoint.restore_items(workdir, step, **items)
    flat = flat_params(arrays["params"])
    record = {"workdir": str(absolute(workdir)), "step": step, "data_digest": saved["data_digest"]}
    params = unflatten_dict({path: flat[path] for path in taken})
    return Start(params, arrays["opt_state"], arrays["data"], saved_conventions(workdir)), record


@contextlib.contextmanager
def _reading(source: str) -> Iterator[None]:
    """Name `init.source` in an `InputError` of the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"init.source = {source!r}: {error}") from error


def _tokens_of(run: RunConfig | TaskRunConfig, tokenizer: Tokenizer | None) -> str:
    """Return the name of the tokenizer or task; it is equal if tokens have the same meaning."""
    if isinstance(run, TaskRunConfig):
        return f"the task {run.data.task}"
    assert tokenizer is not None
    return f"the tokenizer {tokenizer.name}"


def _compare(
    source: TransformerConfig, model: TransformerConfig, field: str
) -> tuple[tuple[ParameterPath, ...], tuple[ParameterPath, ...], tuple[ParameterPath, ...]]:
    """Return the paths of the parameters taken from the source, of new parameters, and of unused ones of the source.

    If the type of the bias or processor differs, none of its parameters are taken, even if paths and shapes agree:
    their meaning differs.

    Raises:
        InputError: a shared parameter has another shape, or a parameter outside the bias, the processor and the learned
            positions exists on one side only.
    """
    theirs, ours = (flat_params(model_structure(each)[1]) for each in (source, model))
    same = {kind: type(getattr(source, kind)) is type(getattr(model, kind)) for kind in ("bias", "processor")}

    def is_shared(path: ParameterPath) -> bool:
        kind = parameter_kind(path)
        return path in theirs and path in ours and (kind is None or same[kind])

    required = [path for path in (*ours, *theirs) if parameter_kind(path) is None and path != ("positions_PD",)]
    for path in [path for path in required if not is_shared(path)]:
        place = "the source" if path in ours else "this model"
        raise InputError(f"init.source = {field!r}: {'/'.join(path)}: {place} has no such parameter")
    taken = tuple(filter(is_shared, ours))
    multiple, advice = source.vocab_multiple, ""
    if multiple != model.vocab_multiple:
        advice = f"; the source has --config.model.vocab_multiple={multiple}"
    for path in taken:
        shapes = [side[path].shape for side in (theirs, ours)]
        message = f"{'/'.join(path)}: has shape {shapes[0]}, but {shapes[1]} in this model{advice}"
        require(shapes[0] == shapes[1], "init.source", field, message)
    new, dropped = (tuple(path for path in side if not is_shared(path)) for side in (ours, theirs))
    return taken, new, dropped
