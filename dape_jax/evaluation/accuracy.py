"""Accuracy by length, of models on the algorithmic tasks. In: checkpoints. Out: files: `accuracy.*`. Next: `report.py`.

At every length so many fresh strings are answered, the same for every model, and the symbols of the answers that are
right are counted, as `tapes.py` says which count. The score is the mean of the accuracies at lengths above the train
length.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tqdm import tqdm

from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.evaluation.memory import Program, compile_programs
from dape_jax.evaluation.perplexity import batch_size_at
from dape_jax.evaluation.trained import TrainedOnTask, abstract_params, read_trained_on_task, restore
from dape_jax.model.attention import Blockwise, Dense
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.sharding import MeshConfig, check_mesh, make_mesh, put_batch, replicated
from dape_jax.tasks.tapes import EVALUATION, AccuracyConfig, Batch, TaskConfig, make_tapes
from dape_jax.training.step import positions_of

TABLE_LENGTHS = (10, 20, 40, 50, 100, 200, 300, 400, 500)  # columns, of the lengths that were evaluated
MAX_COLUMNS = 8
MARKED = 60  # lengths at most that a picture has a mark for each of


@dataclasses.dataclass(frozen=True)
class LengthAccuracy:
    """Accuracy at one length.

    Args:
        length: N that was asked for; a task may have only shorter ones, by a symbol.
        accuracy: share of the symbols that are right.
        low: lower end of its 95 % interval; see `summarise`.
        high: its upper end.
        num_sequences: strings.
        num_symbols: symbols that count, of all strings.
    """

    length: int
    accuracy: float
    low: float
    high: float
    num_sequences: int
    num_symbols: int


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One model's accuracy by length, and its means.

    Args:
        task: a key of `TASKS`.
        name: the workdir's own name.
        workdir: where it was read from.
        step: of the checkpoint.
        train_length: the longest input of training, in symbols.
        random_accuracy: of a guess.
        dropout: whether it was on.
        lengths: one result for each length.
        trained: mean accuracy over the lengths up to the train length; None without any.
        score: mean accuracy over the lengths above it; None without any.
        reference_score: the same without the first length above it, which the reference leaves out.

    Differs: the reference's score, a list of the accuracies at 1, 2, .. sliced from index 41 on, begins with length 42.
    """

    task: str
    name: str
    workdir: str
    step: int
    train_length: int
    random_accuracy: float
    dropout: bool
    lengths: list[LengthAccuracy]
    trained: float | None
    score: float | None
    reference_score: float | None


def evaluate_tasks(
    workdirs: list[Path],
    *,
    step: str = "newest",
    lengths: tuple[int, ...] = (),
    num_sequences: int | None = None,
    dropout: bool | None = None,
    mesh: MeshConfig | None = None,
    output: Path | None = None,
) -> report.ReportPaths:
    """Evaluate one checkpoint of every workdir and write one comparison.

    Args:
        workdirs: of the runs; those on the same task have different names.
        step: "newest", "best" (the lowest validation loss) or a number.
        lengths: of the inputs, in symbols; empty for those of each run's config.
        num_sequences: strings of each length; None for the number in each run's config.
        dropout: whether it stays on; None for what each run's config says.
        mesh: of the devices; None spreads sequences over all of them. With `context`, devices share a sequence.
        output: where the results go; None for the workdir, or the directory that all workdirs have in common.

    Returns:
        Where the results lie: a directory, the table and the picture. The "runs" of the JSON there are `TaskResult`s.

    Raises:
        InputError: bad input, or a length that does not fit into memory, before any weights are read.
    """
    require(bool(workdirs), "workdir", [], "one workdir or more")
    given = {"lengths": lengths or None, "num_sequences": num_sequences, "dropout": dropout}
    replaced = {field: value for field, value in given.items() if value is not None}
    models = [read_trained_on_task(workdir, step, replaced, mesh) for workdir in workdirs]
    labels = [model.label for model in models]
    require(len(set(labels)) == len(labels), "workdir", labels, "different names on each task")
    for field in ("lengths", "num_sequences", "dropout"):
        values = [getattr(model.run.evaluation, field) for model in models]
        require(len(set(values)) == 1, f"evaluation.{field}", values, f"the same for all; give --{field}")
    trained_at = [model.run.train.train_length for model in models]
    require(len(set(trained_at)) == 1, "train.train_length", trained_at, "the same for all")
    for model in models:
        check_mesh(make_mesh(model.mesh), {"T": ("evaluation.pad_to", model.run.evaluation.pad_to)})
    output = report.common_directory(workdirs) if output is None else output
    report.make_directory(output)
    # All programs before any weights: what does not fit is refused before hours go into what does.
    programs = [compile_tapes(model) for model in models]
    results = [score_on_task(*of_model) for of_model in zip(models, programs, strict=True)]
    content = {"runs": [dataclasses.asdict(result) for result in results]}
    return report.save("accuracy", output, content, caption(results), cells(results), plot(results))


# ---- what is asked


def padded_length(config: TaskConfig, length: int, pad_to: int) -> int:
    """T: tokens of the tapes of a length, filled up."""
    return -(-config.tape_length(length) // pad_to) * pad_to


def tape_batches(
    config: TaskConfig, length: int, *, num_sequences: int, batch_size: int, padded: int
) -> Iterator[tuple[Batch, int]]:
    """The tapes that a length is judged on, and how many rows of the batch are real.

    The strings depend on nothing but task and length, whatever seed a model was trained with and however many fit into
    a batch. Random positions are drawn anew for every batch, as in training.

    Args:
        config: of the task.
        length: of the strings.
        num_sequences: in all.
        batch_size: rows of a batch; the last is filled up with copies of its last row.
        padded: T.
    """
    rng = np.random.default_rng([EVALUATION, length])
    inputs_BN = config.of.sample(rng, num_sequences, length)
    targets_BM = config.of.solve(inputs_BN)
    for first in range(0, num_sequences, batch_size):
        rows = np.minimum(np.arange(first, first + batch_size), num_sequences - 1)
        batch = make_tapes(config, inputs_BN[rows], targets_BM[rows], rng, pad_to=padded)
        yield batch, min(batch_size, num_sequences - first)


# ---- the programs


def model_at(config: TransformerConfig, padded: int, evaluation: AccuracyConfig) -> TransformerConfig:
    """The same model with the attention that suits the length. (Not causal, all rows are of one bucket.)"""
    blockwise = Blockwise(block_size=evaluation.block_size, num_buckets=4)
    return dataclasses.replace(config, attention=blockwise if padded >= evaluation.blockwise_from else Dense())


def make_answer_step(graphdef: nnx.GraphDef, dropout: bool) -> Wrapped:
    """Make `step({"params": params, "number": number}, batch) -> answers_BT`, jitted.

    At every place of a tape the likeliest symbol. The number of the batch is what dropout's random numbers depend on.
    """

    def step(model_and_number: dict[str, Any], batch: dict[str, Array]) -> Int[Array, "B T"]:
        model = nnx.merge(graphdef, model_and_number["params"])
        key = jax.random.fold_in(jax.random.key(0), model_and_number["number"]) if dropout else None
        return model.logits(model.features(batch["inputs"], positions_of(batch), key)).argmax(axis=-1)

    return jax.jit(step)


def compile_tapes(trained: TrainedOnTask) -> dict[int, Program]:
    """One model's programs, by the T of the tapes; none of its weights are read.

    Raises:
        InputError: a length does not fit into memory.
    """
    mesh, params = abstract_params(trained)
    run, evaluation = trained.run, trained.run.evaluation

    def step_at(padded: int) -> tuple[Wrapped, int]:
        graphdef, _ = model_structure(model_at(run.model, padded, evaluation))
        fitting = batch_size_at(padded, evaluation.num_sequences, evaluation, mesh)
        # As many batches as that takes, and as equal ones as can be: less of the last is filling.
        even = -(-evaluation.num_sequences // -(-evaluation.num_sequences // fitting))
        return make_answer_step(graphdef, evaluation.dropout), batch_size_at(padded, even, evaluation, mesh)

    tapes = sorted({padded_length(run.data, length, evaluation.pad_to) for length in evaluation.lengths})
    number = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(mesh))
    programs = compile_programs(
        step_at,
        tapes,
        {"params": params, "number": number},
        mesh,
        batch_names=("inputs", "positions"),
        name=trained.label,
        field="tokens of a tape (evaluation.lengths, with the answer and padding)",
    )
    return {program.length: program for program in programs}


def score_on_task(trained: TrainedOnTask, programs: dict[int, Program]) -> TaskResult:
    """Ask one model, on all devices, and sum up."""
    mesh, params = restore(trained)
    run = trained.run
    lengths = list(accuracies(run.data, run.evaluation, programs, params, mesh, trained.label))

    def mean(above: int, to: int | float) -> float | None:
        chosen = [result.accuracy for result in lengths if above < result.length <= to]
        return math.fsum(chosen) / len(chosen) if chosen else None

    train_length = run.train.train_length
    return TaskResult(
        task=run.data.task,
        name=trained.workdir.absolute().name,
        workdir=str(trained.workdir),
        step=trained.step,
        train_length=train_length,
        random_accuracy=run.data.of.random_accuracy,
        dropout=run.evaluation.dropout,
        lengths=lengths,
        trained=mean(0, train_length),
        score=mean(train_length, math.inf),
        reference_score=mean(train_length + 1, math.inf),
    )


def accuracies(
    config: TaskConfig,
    evaluation: AccuracyConfig,
    programs: dict[int, Program],
    params: Params,
    mesh: Mesh,
    name: str,
) -> Iterator[LengthAccuracy]:
    """Run a model's programs: each length.

    Args:
        config: of the task.
        evaluation: lengths and protocol.
        programs: from `compile_tapes`.
        params: the parameters, placed as they were said to be.
        mesh: where they live.
        name: shown by the progress bar.
    """
    num_tokens = evaluation.num_sequences * sum(map(config.tape_length, evaluation.lengths))
    number = 0
    with jax.set_mesh(mesh), tqdm(total=num_tokens, unit="token", unit_scale=True, desc=name) as bar:
        for length in evaluation.lengths:
            bar.set_postfix_str(f"length {length}")
            padded = padded_length(config, length, evaluation.pad_to)
            program = programs[padded]
            right, counted = [], []
            for batch, num_real in tape_batches(
                config,
                length,
                num_sequences=evaluation.num_sequences,
                batch_size=program.batch_size,
                padded=padded,
            ):
                arguments = {"params": params, "number": jax.device_put(np.int32(number), replicated(mesh))}
                read = {name: batch[name] for name in ("inputs", "positions")}
                answers_BT = jax.device_get(program.step(arguments, put_batch(read, mesh)))
                counted_BT = batch["counted"][:num_real]
                right.append(((answers_BT == batch["targets"])[:num_real] & counted_BT).sum(axis=1))
                counted.append(counted_BT.sum(axis=1))
                number += 1
                bar.update(num_real * config.tape_length(length))
            yield summarise(length, np.concatenate(right), np.concatenate(counted))


def summarise(length: int, right_B: Int[np.ndarray, "B"], counted_B: Int[np.ndarray, "B"]) -> LengthAccuracy:
    """Sum up a length: right symbols of counted ones, over all sequences, and the 95 % interval.

    The interval is Wilson's, for as many independent symbols as would vary as the sequences do: the symbols of one
    sequence hang together. With one symbol each, those are the sequences; where nothing varies, they are too, so that a
    model that was never wrong has an interval all the same.

    Differs: the reference takes the mean over 8 batches of 64 sequences each. Where an END says how many symbols of a
        sequence count (addition, multiplication, stack manipulation), batches of short targets weigh more there.
    """
    accuracy = right_B.sum() / counted_B.sum()
    # In integers up to the division, so that what does not vary does not: rounding would make its interval vanish.
    off_B = right_B * counted_B.sum() - right_B.sum() * counted_B
    variance = np.sum((off_B / counted_B.sum() ** 2) ** 2)
    independent = accuracy * (1 - accuracy) / variance if variance > 0 else len(right_B)
    z = 1.959964  # 97.5 % of a normal distribution lies below
    centre = (accuracy + z**2 / (2 * independent)) / (1 + z**2 / independent)
    half = z * math.sqrt(accuracy * (1 - accuracy) / independent + (z / (2 * independent)) ** 2)
    half /= 1 + z**2 / independent
    return LengthAccuracy(
        length=length,
        accuracy=float(accuracy),
        low=float(max(0, centre - half)),
        high=float(min(1, centre + half)),
        num_sequences=len(right_B),
        num_symbols=int(counted_B.sum()),
    )


# ---- what it leaves behind


def columns(lengths: Sequence[int]) -> list[int]:
    """The lengths that the table has columns for: all, round ones, or some of equal distance, the last among them."""
    if len(lengths) <= MAX_COLUMNS:
        return list(lengths)
    round_ones = [length for length in TABLE_LENGTHS if length in lengths]
    if len(round_ones) >= MAX_COLUMNS // 2:
        return round_ones[-MAX_COLUMNS:]
    return [lengths[round((i + 1) * len(lengths) / MAX_COLUMNS) - 1] for i in range(MAX_COLUMNS)]


def percent(accuracy: float | None) -> str:
    """As the paper's table has it; a dash where there is none."""
    return "-" if accuracy is None else f"{100 * accuracy:.2f}"


def cells(results: Sequence[TaskResult]) -> list[list[str]]:
    """Header and rows: each model's means, and its accuracy at some lengths."""
    train_length = results[0].train_length
    shown = columns([result.length for result in results[0].lengths])
    several = len({run.task for run in results}) > 1
    rows = [["", *(["task"] if several else []), f"<= {train_length}", f"> {train_length}", *map(str, shown)]]
    for run in results:
        at = {result.length: percent(result.accuracy) for result in run.lengths}
        means = [percent(run.trained), percent(run.score)]
        rows.append([run.name, *([run.task] if several else []), *means, *(at[length] for length in shown)])
    return rows


def caption(results: Sequence[TaskResult]) -> str:
    """What the table shows."""
    first = results[0]
    lengths, train_length = [result.length for result in first.lengths], first.train_length
    beyond = [length for length in lengths if length > train_length]
    span = f", {beyond[0]} to {beyond[-1]}" if beyond else ""
    guesses: dict[str, list[str]] = {}
    for task, guess in {run.task: run.random_accuracy for run in results}.items():
        guesses.setdefault(percent(guess), []).append(task)
    return (
        f"Accuracy in % by input length, trained on inputs of 1 to {train_length} symbols"
        f"{', dropout on' if first.dropout else ''}; {first.lengths[0].num_sequences} sequences of each length. "
        f"<= {train_length}: mean over {len(lengths) - len(beyond)} lengths; > {train_length}, the score: mean over "
        f"{len(beyond)} lengths{span}. A random guess is right in "
        + "; ".join(f"{guess} ({', '.join(tasks)})" for guess, tasks in guesses.items())
        + "."
    )


def plot(results: Sequence[TaskResult]) -> Figure:
    """Draw accuracy against length: a panel for each task, a colour for each method, a guess dotted."""
    tasks, names = list(dict.fromkeys(run.task for run in results)), list(dict.fromkeys(run.name for run in results))
    across = 2 if len(tasks) in (2, 4) else min(3, len(tasks))
    down = -(-len(tasks) // across)
    figure = Figure(figsize=(6.4 if across == 1 else 4.2 * across, 0.9 + 3.2 * down), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in panels[len(tasks) :]:
        axes.remove()
    lines: dict[str, Line2D] = {}
    for number, (axes, task) in enumerate(zip(panels, tasks, strict=False)):
        lines |= draw_task(axes, [run for run in results if run.task == task], names)
        if number % across == 0:
            axes.set_ylabel("accuracy")
        if number + across >= len(tasks):  # nothing below it
            axes.set_xlabel("input length N (symbols)")
            axes.tick_params(labelbottom=True)
    shown = [*names, "train length", "random guess"]
    figure.legend(
        [lines[name] for name in shown],
        [report.label(name) for name in shown],
        loc="outside lower center",
        ncols=min(len(shown), (3, 4, 6)[across - 1]),
    )
    return figure


def draw_task(axes: Axes, runs: Sequence[TaskResult], names: list[str]) -> dict[str, Line2D]:
    """One panel; gives its lines by their names."""
    lines = {}
    for run in runs:
        lengths = [result.length for result in run.lengths]
        color, marker = f"C{names.index(run.name) % 10}", "o" if len(lengths) <= MARKED else None
        accuracies = [result.accuracy for result in run.lengths]
        (lines[run.name],) = axes.plot(lengths, accuracies, marker=marker, markersize=3, color=color)
        report.band(axes, lengths, [(result.low, result.high) for result in run.lengths], color)
    gray = {"color": "gray", "linewidth": 1.2}
    lines["train length"] = axes.axvline(runs[0].train_length, linestyle="--", **gray)
    lines["random guess"] = axes.axhline(runs[0].random_accuracy, linestyle=":", **gray)
    axes.set_title(runs[0].task.replace("_", " "))
    axes.set_xlim(0, 1.02 * runs[0].lengths[-1].length)
    axes.set_ylim(-0.03, 1.05)
    axes.grid(alpha=0.3)
    return lines
