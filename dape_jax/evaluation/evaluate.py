"""The evaluator's job: workdirs in, one comparison out. It reads checkpoints, never writes them. Next: `report.py`.

Three kinds of comparison: perplexity by length, the delta of the paper's appendix A, and loss by position.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from dape_jax.data.store import Corpus
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.evaluation.by_position import Positions, summarise_positions
from dape_jax.evaluation.memory import Program
from dape_jax.evaluation.perplexity import (
    DeltaResult,
    LengthResult,
    Window,
    choose_windows,
    compile_lengths,
    difference,
    score_windows,
    summarise,
)
from dape_jax.evaluation.trained import TrainedModel, abstract_params, read_trained, restore, validation_corpus
from dape_jax.model.positions import STRETCHES, Rope
from dape_jax.sharding import MeshConfig, check_mesh, make_mesh

PROTOCOLS = ("perplexity", "delta")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What was evaluated: one model, in one way.

    Args:
        name: the workdir's own name.
        workdir: where it was read from.
        step: of the checkpoint.
        train_length: T, in tokens.
        rotary: "rope" for the model as it was trained, or how its rotary embedding was stretched for each length.
        last_tokens: scored tokens of a sequence.
        data: digest of the corpus that was scored.
    """

    name: str
    workdir: str
    step: int
    train_length: int
    rotary: str
    last_tokens: int
    data: str


@dataclasses.dataclass(frozen=True)
class RunResult(Evaluated):
    """One model's perplexity by length: what protocol "perplexity" gives.

    Args:
        lengths: one result for each length.
    """

    lengths: list[LengthResult]


@dataclasses.dataclass(frozen=True)
class DeltaRunResult(RunResult):
    """One model's perplexity by length, and what it gains from context: what protocol "delta" gives.

    The first of `lengths` is T_train, all of its targets scored: the local perplexity that every delta starts from.

    Args:
        deltas: the gain at each length above T_train.
    """

    deltas: list[DeltaResult]


@dataclasses.dataclass(frozen=True)
class PositionsRunResult(Evaluated):
    """One model's loss by position: what `by_position` gives.

    Args:
        positions: the loss, and where it breaks.
    """

    positions: Positions


def evaluate(
    workdirs: list[Path],
    *,
    step: str = "newest",
    lengths: tuple[int, ...] = (),
    last_tokens: int | None = None,
    max_windows: int | None = None,
    data: str | None = None,
    rotary: tuple[str, ...] = ("rope",),
    protocol: str = "perplexity",
    by_position: bool = False,
    mesh: MeshConfig | None = None,
    output: Path | None = None,
) -> report.ReportPaths:
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
        protocol: "perplexity" of the last tokens by length, which writes `lengths.*`; or "delta", by how much the
            context before the last T_train tokens lowers their perplexity, at each length above T_train, which writes
            `delta.*`.
        by_position: instead of that, the loss by position in windows of the longest length; writes `positions.*`.
        mesh: of the devices; None spreads sequences over all of them. With `context`, devices share a sequence.
        output: where the results go; None for the workdir, or the directory that all workdirs have in common.

    Returns:
        Where the results lie: a directory, the table and the picture. The "runs" of the JSON there are `RunResult`s,
        `DeltaRunResult`s or `PositionsRunResult`s, one for each model and way.

    Raises:
        InputError: bad input, or a length that does not fit into memory, before any weights are read.
    """
    require(bool(workdirs), "workdir", [], "one workdir or more")
    require(len({w.name for w in workdirs}) == len(workdirs), "workdir", [w.name for w in workdirs], "different names")
    require(protocol in PROTOCOLS, "protocol", protocol, f"one of {list(PROTOCOLS)}")
    require(not by_position or protocol == "perplexity", "by_position", by_position, f"not with --protocol={protocol}")
    delta = protocol == "delta"
    require(not delta or last_tokens is None, "last_tokens", last_tokens, "not with --protocol=delta: the train length")
    require(
        not by_position or last_tokens is None, "last_tokens", last_tokens, "not with --by_position: all are scored"
    )
    given = {"lengths": lengths or None, "last_tokens": last_tokens, "max_windows": max_windows}
    replaced = {field: value for field, value in given.items() if value is not None}
    models = [read_trained(workdir, step, replaced, mesh) for workdir in workdirs]
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
    output = report.common_directory(workdirs) if output is None else output
    if delta:
        trained_at = [model.run.train.train_length for model in models]
        require(len(set(trained_at)) == 1, "train.train_length", trained_at, "the same for all, with --protocol=delta")
        models = [scored_for_delta(model) for model in models]
    if by_position:
        models = [scored_by_position(model) for model in models]
    for model in models:
        check_lengths(model)
    for field in ("lengths", "last_tokens", "max_windows"):
        values = [getattr(model.run.evaluation, field) for model in models]
        require(len(set(values)) == 1, f"evaluation.{field}", values, f"the same for all; give --{field}")
    corpora = [validation_corpus(model, data) for model in models]
    digests = [corpus.digest for corpus in corpora]
    require(len(set(digests)) == 1, "data", digests, "the same text for all; give --data")
    evaluation = models[0].run.evaluation
    windows = choose_windows(corpora[0].validation, max(evaluation.lengths), evaluation.max_windows)
    report.make_directory(output)
    # All programs before any weights: what does not fit is refused before hours go into what does.
    programs = [compile_trained(model, len(windows), rotary) for model in models]
    scored = (
        of_model
        for model, of_ways in zip(models, programs, strict=True)
        for of_model in score_trained(model, corpora[0], windows, of_ways)
    )
    if by_position:
        return report.write_positions([by_position_result(*of_model, windows) for of_model in scored], output)
    if delta:
        return report.write_delta([delta_result(*of_model, windows) for of_model in scored], output)
    return report.write([perplexity_result(*of_model, windows) for of_model in scored], output)


NllOfLengths = dict[int, Float64[np.ndarray, "windows scored"]]  # of every window's scored tokens, in nats


def perplexity_result(run: Evaluated, nll_of_lengths: NllOfLengths, windows: list[Window]) -> RunResult:
    """Sum up a model by length."""
    lengths = [summarise(length, windows, nll.sum(axis=1), nll.shape[1]) for length, nll in nll_of_lengths.items()]
    return RunResult(**dataclasses.asdict(run), lengths=lengths)


def delta_result(run: Evaluated, nll_of_lengths: NllOfLengths, windows: list[Window]) -> DeltaRunResult:
    """Sum up a model by length, each above the first compared with the first."""
    sums = {length: nll.sum(axis=1) for length, nll in nll_of_lengths.items()}
    local, *beyond = sums
    return DeltaRunResult(
        **dataclasses.asdict(run),
        lengths=perplexity_result(run, nll_of_lengths, windows).lengths,
        deltas=[difference(length, windows, sums[local], sums[length], run.last_tokens) for length in beyond],
    )


def by_position_result(run: Evaluated, nll_of_lengths: NllOfLengths, windows: list[Window]) -> PositionsRunResult:
    """Sum up a model by position, at its one length."""
    (nll_of_windows,) = nll_of_lengths.values()
    positions = summarise_positions(windows, nll_of_windows, run.train_length)
    return PositionsRunResult(**dataclasses.asdict(run), positions=positions)


def check_lengths(trained: TrainedModel) -> None:
    """Raise `InputError` unless every length, and what is scored of it, divides over the devices that share a text."""
    mesh, evaluation = make_mesh(trained.mesh), trained.run.evaluation
    for length in evaluation.lengths:
        check_mesh(mesh, {"T": ("evaluation.lengths", length)})
        scored, context = min(evaluation.last_tokens, length), mesh.shape["context"]
        require(scored % context == 0, "evaluation.last_tokens", scored, f"a multiple of mesh.context = {context}")


def scored_for_delta(trained: TrainedModel) -> TrainedModel:
    """The same with the lengths and scored tokens of protocol "delta": T_train, and the lengths above it.

    Raises:
        InputError: there are none above it.
    """
    evaluation, train_length = trained.run.evaluation, trained.run.train.train_length
    beyond = tuple(length for length in evaluation.lengths if length > train_length)
    allowed = f"one or more above the train length, {train_length}"
    require(bool(beyond), "evaluation.lengths", evaluation.lengths, allowed)
    return _scored(trained, (train_length, *beyond), train_length)


def scored_by_position(trained: TrainedModel) -> TrainedModel:
    """The same with the longest length alone, and all of its tokens scored."""
    longest = max(trained.run.evaluation.lengths)
    return _scored(trained, (longest,), longest)


def _scored(trained: TrainedModel, lengths: tuple[int, ...], last_tokens: int) -> TrainedModel:
    evaluation = dataclasses.replace(trained.run.evaluation, lengths=lengths, last_tokens=last_tokens)
    return dataclasses.replace(trained, run=dataclasses.replace(trained.run, evaluation=evaluation))


def compile_trained(trained: TrainedModel, num_windows: int, rotary: tuple[str, ...]) -> dict[str, list[Program]]:
    """One model's programs, by the ways of `rotary`; none of its weights are read.

    Raises:
        InputError: a length does not fit into memory.
    """
    mesh, params = abstract_params(trained)
    run = trained.run
    return {
        way: compile_lengths(
            run.model,
            params,
            mesh,
            run.evaluation,
            num_windows=num_windows,
            rotary=way,
            train_length=run.train.train_length,
            name=_name(trained, way),
        )
        for way in rotary
    }


def score_trained(
    trained: TrainedModel, corpus: Corpus, windows: list[Window], programs: dict[str, list[Program]]
) -> Iterator[tuple[Evaluated, NllOfLengths]]:
    """Score chosen windows with one model, on all devices, in each of its ways."""
    mesh, params = restore(trained)
    for way, of_lengths in programs.items():
        run = Evaluated(
            name=_name(trained, way),
            workdir=str(trained.workdir),
            step=trained.step,
            train_length=trained.run.train.train_length,
            rotary=way,
            last_tokens=trained.run.evaluation.last_tokens,
            data=corpus.digest,
        )
        yield run, dict(score_windows(of_lengths, params, mesh, corpus.validation, windows, run.name))


def _name(trained: TrainedModel, rotary: str) -> str:
    return trained.workdir.absolute().name + ("" if rotary == "rope" else f"+{rotary}")
