"""The evaluator's job: workdirs in, one comparison out. It reads checkpoints, never writes them. Next: `report.py`."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax

from dape_jax.config import RunConfig
from dape_jax.data.store import Corpus, load_corpus
from dape_jax.errors import require
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
    workdirs: list[Path], output: Path | None, lengths: tuple[int, ...], last_tokens: int | None, data: str | None
) -> report.Written:
    """Evaluate the newest checkpoint of every workdir and write one comparison.

    Args:
        workdirs: of the runs, each with another name.
        output: where the results go; the workdir, or the directory that all workdirs have in common.
        lengths: sequence lengths; empty for those of each run's config.
        last_tokens: scored tokens; None for that of each run's config.
        data: in the form of `data.path`, another corpus whose held-out documents are scored; None for the run's own.

    Raises:
        InputError: bad input, before any device work.
    """
    require(bool(workdirs), "workdir", [], "one workdir or more")
    require(len({w.name for w in workdirs}) == len(workdirs), "workdir", [w.name for w in workdirs], "different names")
    models = [read_trained(workdir, lengths, last_tokens) for workdir in workdirs]
    protocols = [(model.run.evaluation.lengths, model.run.evaluation.last_tokens) for model in models]
    require(len(set(protocols)) == 1, "lengths, last_tokens", protocols, "one for all; give --lengths, --last_tokens")
    corpora = [held_out_corpus(model, data) for model in models]
    digests = [corpus.digest for corpus in corpora]
    require(len(set(digests)) == 1, "data", digests, "the same text for all; give --data")
    evaluation = models[0].run.evaluation
    windows = choose_windows(corpora[0].validation, max(evaluation.lengths), evaluation.max_windows)
    results = [evaluate_trained(model, corpora[0], windows) for model in models]
    common = os.path.commonpath([workdir.absolute() for workdir in workdirs])
    return report.write(results, Path(common) if output is None else output)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a checkpoint says of itself, the evaluation's flags put in.

    Args:
        workdir: where it lies.
        step: the newest.
        run: the config it was trained with.
        data_digest: of the corpus it was trained on.
    """

    workdir: Path
    step: int
    run: RunConfig
    data_digest: str


def read_trained(workdir: Path, lengths: tuple[int, ...], last_tokens: int | None) -> Trained:
    """Read the config of a workdir's newest checkpoint; flags that are given replace its own."""
    step, saved = checkpoint.restore_config(workdir)
    spec: dict[str, Any] = saved["config"]
    if lengths:
        spec["evaluation"]["lengths"] = lengths
    if last_tokens is not None:
        spec["evaluation"]["last_tokens"] = last_tokens
    return Trained(workdir, step, RunConfig.from_dict(spec), saved["data_digest"])


def held_out_corpus(trained: Trained, data: str | None) -> Corpus:
    """The corpus that a model was trained on, or another; what is scored is what it holds out.

    Raises:
        InputError: the text under the model's `data.path` has changed since.
    """
    config = trained.run.data
    if data is not None:
        return load_corpus(dataclasses.replace(config, path=data))
    corpus = load_corpus(config)
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
