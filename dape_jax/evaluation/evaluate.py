"""The evaluator's job: workdirs in, one comparison out. It reads checkpoints, never writes them. Next: `report.py`."""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dape_jax.config import RunConfig
from dape_jax.data.store import Corpus, load_corpus
from dape_jax.errors import InputError, require
from dape_jax.evaluation import report
from dape_jax.evaluation.perplexity import LengthResult, Window, choose_windows, evaluate_lengths
from dape_jax.positions import STRETCHES, Rope
from dape_jax.sharding import MeshConfig, make_mesh, parameter_shardings
from dape_jax.training import checkpoint
from dape_jax.transformer import Params, model_structure


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One model's perplexity by length.

    Args:
        name: the workdir's own name.
        workdir: where it was read from.
        step: of the checkpoint.
        train_length: T, in tokens.
        rotary: "rope" for the model as it was trained, or how its rotary embedding was stretched for each length.
        last_tokens: scored tokens of a sequence.
        data: digest of the corpus that was scored.
        lengths: one result for each length.
    """

    name: str
    workdir: str
    step: int
    train_length: int
    rotary: str
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
    rotary: tuple[str, ...] = ("rope",),
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
        rotary: every model is evaluated in each of these ways: "rope" is as it was trained; "pi", "ntk" and "yarn" are
            for models with RoPE, their positions stretched by length / train length; see `positions.stretched`.
        output: where the results go; None for the workdir, or the directory that all workdirs have in common.

    Raises:
        InputError: bad input, before any device work.
    """
    require(bool(workdirs), "workdir", [], "one workdir or more")
    require(len({w.name for w in workdirs}) == len(workdirs), "workdir", [w.name for w in workdirs], "different names")
    given = {"lengths": lengths or None, "last_tokens": last_tokens, "max_windows": max_windows}
    replaced = {field: value for field, value in given.items() if value is not None}
    models = [read_trained(workdir, step, replaced) for workdir in workdirs]
    require(bool(rotary) and len(set(rotary)) == len(rotary), "rotary", rotary, "one way or more, each once")
    for name, model in itertools.product(rotary, models):
        require(name in STRETCHES, "rotary", name, f"one of {list(STRETCHES)}")
        trained_with = model.run.model.rotary
        require(
            name == "rope" or type(trained_with) is Rope,
            "rotary",
            name,
            f"only 'rope', as it was trained, for {model.workdir}, whose model.rotary is {trained_with}",
        )
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
    results = [result for model in models for result in evaluate_trained(model, corpora[0], windows, rotary)]
    return report.write(results, output)


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


def restore(trained: Trained) -> tuple[Mesh, Params]:
    """The parameters of a checkpoint, spread over all devices, and the mesh that they live on."""
    model = trained.run.model
    mesh = make_mesh(MeshConfig(data=-1, fsdp=math.gcd(jax.device_count(), model.width)))
    _, abstract = model_structure(model)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        parameter_shardings(abstract, mesh),
    )
    return mesh, checkpoint.restore_params(trained.workdir, trained.step, target)


def evaluate_trained(
    trained: Trained, corpus: Corpus, windows: list[Window], rotary: tuple[str, ...]
) -> Iterator[RunResult]:
    """Evaluate one model on chosen windows, on all devices, in each of the ways of `rotary`."""
    run = trained.run
    mesh, params = restore(trained)
    for way in rotary:
        name = trained.workdir.absolute().name + ("" if way == "rope" else f"+{way}")
        train_length = run.train.train_length
        yield RunResult(
            name=name,
            workdir=str(trained.workdir),
            step=trained.step,
            train_length=train_length,
            rotary=way,
            last_tokens=run.evaluation.last_tokens,
            data=corpus.digest,
            lengths=evaluate_lengths(
                run.model, params, mesh, corpus.validation, windows, run.evaluation, name, way, train_length
            ),
        )
