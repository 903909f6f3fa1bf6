"""The evaluator's job: workdirs in, one comparison out. It reads checkpoints, never writes them. Next: `report.py`."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax

from dape_jax.config import RunConfig
from dape_jax.data.store import Corpus, load_corpus
from dape_jax.errors import InputError, require
from dape_jax.evaluation import report
from dape_jax.evaluation.perplexity import LengthResult, Window, choose_windows, evaluate_lengths
from dape_jax.sharding import MeshConfig, make_mesh, parameter_shardings
from dape_jax.training import checkpoint
from dape_jax.transformer import model_structure


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One model's perplexity by length.

    Args:
        name: the workdir's own name.
        workdir: where it was read from.
        step: of the checkpoint.
        train_length: T, in tokens.
        last_tokens: scored tokens of a sequence.
        data: digest of the corpus that was scored.
        lengths: one result for each length.
    """

    name: str
    workdir: str
    step: int
    train_length: int
    last_tokens: int
    data: str
    lengths: list[LengthResult]


def evaluate(
    workdirs: list[Path],
    *,
    step: str = "newest",
    lengths: tuple[int, ...] = (),
    last_tokens: int | None = None,
    max_windows: int | None = None,
    data: str | None = None,
    output: Path | None = None,
) -> report.Written:
    """Evaluate one checkpoint of every workdir and write one comparison.

    Args:
        workdirs: of the runs, each with another name.
        step: "newest", "best" (the lowest validation loss) or a number.
        lengths: sequence lengths; empty for those of each run's config.
        last_tokens: scored tokens; None for that of each run's config.
        max_windows: scored windows at most; None for that of each run's config.
        data: in the form of `data.path`, another corpus whose held-out documents are scored; None for the run's own.
        output: where the results go; None for the workdir, or the directory that all workdirs have in common.

    Raises:
        InputError: bad input, before any device work.
    """
    require(bool(workdirs), "workdir", [], "one workdir or more")
    require(len({w.name for w in workdirs}) == len(workdirs), "workdir", [w.name for w in workdirs], "different names")
    given = {"lengths": lengths or None, "last_tokens": last_tokens, "max_windows": max_windows}
    replaced = {field: value for field, value in given.items() if value is not None}
    models = [read_trained(workdir, step, replaced) for workdir in workdirs]
    common = os.path.commonpath([workdir.absolute() for workdir in workdirs])
    output = Path(common) if output is None else output
    protocols = [dataclasses.asdict(model.run.evaluation) for model in models]
    for field in ("lengths", "last_tokens", "max_windows"):
        values = [protocol[field] for protocol in protocols]
        require(len(set(values)) == 1, f"evaluation.{field}", values, f"the same for all; give --{field}")
    corpora = [held_out_corpus(model, data) for model in models]
    digests = [corpus.digest for corpus in corpora]
    require(len(set(digests)) == 1, "data", digests, "the same text for all; give --data")
    evaluation = models[0].run.evaluation
    windows = choose_windows(corpora[0].validation, max(evaluation.lengths), evaluation.max_windows)
    report.make_directory(output)
    return report.write([evaluate_trained(model, corpora[0], windows) for model in models], output)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a checkpoint says of itself, the evaluation's flags put in.

    Args:
        workdir: where it lies.
        step: its number.
        run: the config it was trained with.
        data_digest: of the corpus it was trained on.
    """

    workdir: Path
    step: int
    run: RunConfig
    data_digest: str


def read_trained(workdir: Path, step: str, replaced: dict[str, Any]) -> Trained:
    """Read the config of a checkpoint; `replaced` are fields of its evaluation section that flags have set."""
    number, saved = checkpoint.restore_config(workdir, step)
    spec: dict[str, Any] = saved["config"]
    spec["evaluation"] |= replaced
    return Trained(workdir, number, RunConfig.from_dict(spec), saved["data_digest"])


def held_out_corpus(trained: Trained, data: str | None) -> Corpus:
    """The corpus that a model was trained on, or another; what is scored is what it holds out.

    Raises:
        InputError: the text under the model's `data.path` has changed since.
    """
    config = trained.run.data
    if data is not None:
        return load_corpus(dataclasses.replace(config, path=data))
    try:
        corpus = load_corpus(config)
    except InputError as error:
        raise InputError(f"{error} (the corpus of {trained.workdir}; name another to score with --data)") from error
    require(
        corpus.digest == trained.data_digest,
        "data.path",
        config.path,
        f"no longer holds the text that {trained.workdir} was trained on (digest {corpus.digest}, then "
        f"{trained.data_digest}), so what it holds out may have been trained on; name the corpus to score with --data",
    )
    return corpus


def evaluate_trained(trained: Trained, corpus: Corpus, windows: list[Window]) -> RunResult:
    """Evaluate one model on chosen windows, on all devices."""
    run = trained.run
    mesh = make_mesh(MeshConfig(data=-1, fsdp=math.gcd(jax.device_count(), run.model.width)))
    _, abstract = model_structure(run.model)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        parameter_shardings(abstract, mesh),
    )
    params = checkpoint.restore_params(trained.workdir, trained.step, target)
    name = trained.workdir.absolute().name
    return RunResult(
        name=name,
        workdir=str(trained.workdir),
        step=trained.step,
        train_length=run.train.train_length,
        last_tokens=run.evaluation.last_tokens,
        data=corpus.digest,
        lengths=evaluate_lengths(run.model, params, mesh, corpus.validation, windows, run.evaluation, name),
    )
