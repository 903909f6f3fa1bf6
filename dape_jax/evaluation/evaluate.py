"""The evaluator's job: workdirs in, one comparison out. It reads checkpoints, never writes them. Next: `report.py`."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from dape_jax.config import RunConfig
from dape_jax.data.store import load_corpus
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.evaluation.perplexity import LengthResult, evaluate_lengths
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
    runs = [read_run(workdir, lengths, last_tokens) for workdir in workdirs]
    protocols = [(run.evaluation.lengths, run.evaluation.last_tokens) for run, _ in runs]
    require(
        len(set(protocols)) == 1, "lengths, last_tokens", protocols, "the same for all; give --lengths, --last_tokens"
    )

    results = []
    for workdir, (run, digest) in zip(workdirs, runs, strict=True):
        results.append(evaluate_run(workdir, run, digest, data))
    digests = {result.name: result.data for result in results}
    require(len(set(digests.values())) == 1, "data", digests, "the same text for all; give --data")
    if output is None:
        output = Path(*_common_parts([workdir.absolute() for workdir in workdirs]))
    return report.write(results, output)


def _common_parts(paths: list[Path]) -> list[str]:
    common = []
    for parts in zip(*(path.parts for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return common


def read_run(workdir: Path, lengths: tuple[int, ...], last_tokens: int | None) -> tuple[RunConfig, str]:
    """The config that a workdir's run was trained with, the evaluation's flags put in, and its corpus's digest."""
    saved = checkpoint.read_config(workdir)
    require(saved is not None, "workdir", str(workdir), "a directory that train.py has written")
    assert saved is not None
    spec: dict[str, Any] = saved["config"]
    if lengths:
        spec["evaluation"]["lengths"] = lengths
    if last_tokens is not None:
        spec["evaluation"]["last_tokens"] = last_tokens
    return RunConfig.from_dict(spec), saved["data_digest"]


def evaluate_run(workdir: Path, run: RunConfig, digest: str, data: str | None) -> RunResult:
    """Evaluate one run on the held-out documents of its corpus, or of another."""
    corpus = load_corpus(run.data if data is None else dataclasses.replace(run.data, path=data))
    require(
        data is not None or corpus.digest == digest,
        "data.path",
        run.data.path,
        f"no longer holds the text that {workdir} was trained on (digest {corpus.digest}, then {digest}), so what it "
        "holds out may have been trained on; name the corpus to score with --data",
    )
    mesh = make_mesh(MeshConfig(data=1, fsdp=-1))
    _, abstract = model_structure(run.model)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        parameter_shardings(abstract, mesh),
    )
    step, params = checkpoint.restore_params(workdir, target)
    return RunResult(
        name=workdir.absolute().name,
        workdir=str(workdir),
        step=step,
        train_length=run.train.train_length,
        last_tokens=run.evaluation.last_tokens,
        data=corpus.digest,
        lengths=evaluate_lengths(run.model, params, mesh, corpus.validation, run.evaluation, workdir.name),
    )
