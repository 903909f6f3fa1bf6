"""How far back a model recalls: accuracy on synthetic sequences, by the distance of what is asked. No download.

    python -m dape_jax.evaluation.recall --workdir=runs/a,runs/b --lengths=64,256,1024
    python -m dape_jax.evaluation.recall --corpus=data/recall --documents=200 --lengths=64     # text to train on

In: checkpoints. Out, in --output: `recall.json`, the table as `recall.txt` and `recall.md`, the picture `recall.png`.

Sequences are random letters. Somewhere stands a block of `BLOCK` of them, and the last tokens, `distance` tokens after
it, ask for what it holds; all else is filler (.). The tokens of a block differ from one another and do not occur in the
filler, so that each question has one answer. With a length of 24 and a distance of 12:

    copy      . . . . a b c d e f g h . . . . a b c d e f g h     the same again
    asked                                     ^ ^ ^ ^ ^ ^ ^       at each of these, the next token
    answers                                   b c d e f g h

    recall    . . . . a b c d e f g h . . . . e f a b g h c d     pairs, key and value, again in another order
    asked                                     ^   ^   ^   ^       at each key, its value
    answers                                   f   b   h   d

A copied token is exactly `distance` tokens back; for a pair that is the mean, and a single one is up to `BLOCK` - 2
tokens nearer or farther. The answer taken is the likeliest of the letters, so a guess is right once in as many as there
are. A model that sees the block but not its order can guess among its answers, and is right once in 7 (copy) or 4
(recall): only what is above that is recall.

The letters are the tokens that are written with a-z and A-Z alone: 52 of the bytes, some thousands of a byte-pair
vocabulary. The end of a document is none of them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from absl import flags
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array, Int, Integer
from matplotlib.figure import Figure
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.data.tokenizers import Bytes, Tokenizer, saved_tokenizer
from dape_jax.errors import InputError, require
from dape_jax.evaluation import report
from dape_jax.evaluation.memory import Program, compile_programs
from dape_jax.evaluation.perplexity import batch_size_at, model_at
from dape_jax.evaluation.trained import TrainedModel, abstract_params, read_trained, restore
from dape_jax.model.transformer import Params, model_structure
from dape_jax.sharding import put_batch

BLOCK = 8
# Tasks, and the places in the end block where the next token is asked for.
ASKED = {"copy": (0, 1, 2, 3, 4, 5, 6), "recall": (0, 2, 4, 6)}
LINES = 256  # of a document that --corpus writes


# ---- sequences


def draw(
    task: str, letters_N: Integer[np.ndarray, "N"], length: int, distance: int, rng: np.random.Generator
) -> Int[np.ndarray, "T"]:
    """Draw a sequence; see the module.

    Args:
        task: a key of `ASKED`.
        letters_N: what tokens are drawn from, more than `BLOCK` of them.
        length: T.
        distance: between the block and the end block, `BLOCK` to T - `BLOCK`.
        rng: where the draw comes from.
    """
    shuffled_N = rng.permutation(letters_N)
    block, others = shuffled_N[:BLOCK], shuffled_N[BLOCK:]
    tokens_T = rng.choice(others, length)
    tokens_T[length - BLOCK - distance : length - distance] = block
    tokens_T[length - BLOCK :] = block if task == "copy" else rng.permutation(block.reshape(-1, 2)).ravel()
    return tokens_T.astype(int)


def draw_trials(
    task: str, letters_N: Integer[np.ndarray, "N"], *, length: int, distance: int, trials: int, seed: int
) -> Int[np.ndarray, "trials T"]:
    """Sequences of one task, length and distance, the same for the same arguments; see `draw`."""
    rng = np.random.default_rng([seed, list(ASKED).index(task), length, distance])
    return np.stack([draw(task, letters_N, length, distance, rng) for _ in range(trials)])


def letters_of(tokenizer: Tokenizer) -> Int[np.ndarray, "N"]:
    """The tokens that are written with a-z and A-Z alone.

    Raises:
        InputError: there are too few of them for a block and its filler.
    """

    def is_letters(token: int) -> bool:
        try:
            text = tokenizer.decode(np.array([token]))
        except InputError:  # an id that the vocabulary leaves out
            return False
        return text.isalpha() and text.isascii()

    letters_N = np.array([token for token in range(tokenizer.vocab_size) if is_letters(token)])
    allowed = f"more than {BLOCK} tokens that are letters alone; it has {len(letters_N)}"
    require(len(letters_N) > BLOCK, "data.tokenizer", tokenizer.name, allowed)
    return letters_N


def distances_at(length: int, distances: tuple[int, ...]) -> list[int]:
    """The distances that a length has room for; of no distances, the powers of two."""
    powers = [2**power for power in range(BLOCK.bit_length() - 1, length.bit_length())]
    return [distance for distance in distances or powers if distance <= length - BLOCK]


# ---- accuracy


@dataclasses.dataclass(frozen=True)
class RecallResult:
    """Accuracy at one length and distance.

    Args:
        task: "copy" or "recall".
        length: of the sequences, in tokens.
        distance: of what was asked, in tokens; see the module.
        accuracy: share of the questions that were answered rightly.
        low: lower end of its 95 % binomial interval (Wilson's), which takes questions as independent.
        high: its upper end.
        num_right: questions answered rightly.
        num_asked: questions.
        trials: sequences that they come from.
    """

    task: str
    length: int
    distance: int
    accuracy: float
    low: float
    high: float
    num_right: int
    num_asked: int
    trials: int


@dataclasses.dataclass(frozen=True)
class RecallRunResult:
    """One model's accuracy by length and distance.

    Args:
        name: the workdir's own name.
        workdir: where it was read from.
        step: of the checkpoint.
        train_length: in tokens.
        num_letters: tokens that the answer is taken from.
        chance: accuracy of a guess among them.
        results: one for each task, length and distance.
    """

    name: str
    workdir: str
    step: int
    train_length: int
    num_letters: int
    chance: float
    results: list[RecallResult]


# Tokens of sequences of equal length -> at each of the last BLOCK positions, the token that comes next.
Answer = Callable[[Int[np.ndarray, "B T"]], Integer[np.ndarray, "B block"]]


def measure(
    answer: Answer,
    task: str,
    letters_N: Integer[np.ndarray, "N"],
    *,
    length: int,
    distance: int,
    trials: int,
    seed: int,
) -> RecallResult:
    """Ask whatever answers, and count; arguments as those of `draw_trials`."""
    tokens_BT = draw_trials(task, letters_N, length=length, distance=distance, trials=trials, seed=seed)
    asked = np.array(ASKED[task])
    expected = tokens_BT[:, length - BLOCK + asked + 1]
    right = answer(tokens_BT)[:, asked] == expected
    num_right, num_asked = int(right.sum()), right.size
    interval = scipy.stats.binomtest(num_right, num_asked).proportion_ci(method="wilson")
    return RecallResult(
        task=task,
        length=length,
        distance=distance,
        accuracy=num_right / num_asked,
        low=float(interval.low),
        high=float(interval.high),
        num_right=num_right,
        num_asked=num_asked,
        trials=trials,
    )


def make_answer_step(graphdef: nnx.GraphDef, letters_N: Integer[np.ndarray, "N"]) -> Wrapped:
    """Make `step(params, batch) -> token_B8`, jitted: after each of the last `BLOCK` tokens, the likeliest letter."""

    def step(params: Params, batch: dict[str, Array]) -> Int[Array, "B block"]:
        model = nnx.merge(graphdef, params)
        logits_BTV = model.logits(model.features(batch["inputs"])[:, -BLOCK:])
        return jnp.asarray(letters_N)[jnp.argmax(logits_BTV[..., letters_N], axis=-1)]

    return jax.jit(step)


def answer_with(program: Program, params: Params, mesh: Mesh, bar: tqdm) -> Answer:
    """A model that answers, a batch at a time; the last batch is filled up with copies of its last row."""

    def answer(tokens_BT: Int[np.ndarray, "B T"]) -> Integer[np.ndarray, "B block"]:
        answers = []
        for first in range(0, len(tokens_BT), program.batch_size):
            rows = tokens_BT[first : first + program.batch_size]
            fill = program.batch_size - len(rows)
            inputs = np.pad(rows, ((0, fill), (0, 0)), mode="edge").astype(np.int32)
            found = jax.device_get(program.step(params, put_batch({"inputs": inputs}, mesh)))
            answers.append(np.asarray(found)[: len(rows)])
            bar.update(rows.size)
        return np.concatenate(answers)

    return answer


# ---- the evaluation


def recall(
    workdirs: list[Path],
    *,
    lengths: tuple[int, ...] = (),
    distances: tuple[int, ...] = (),
    trials: int = 32,
    seed: int = 0,
    step: str = "newest",
    output: Path | None = None,
) -> report.ReportPaths:
    """Ask one checkpoint of every workdir, and write one comparison.

    Args:
        workdirs: of the runs, each with another name.
        lengths: sequence lengths in tokens, increasing; empty for those of each run's config.
        distances: increasing; asked for at each length that has room for them. Empty for the powers of two.
        trials: sequences for each task, length and distance.
        seed: of the sequences.
        step: "newest", "best" (the lowest validation loss) or a number.
        output: where the results go; None for the workdir, or the directory that all workdirs have in common.

    Returns:
        Where the results lie: a directory, the table and the picture. The "runs" of the JSON are `RecallRunResult`s.

    Raises:
        InputError: bad input, or a length that does not fit into memory, before any weights are read.
    """
    require(bool(workdirs), "workdir", [], "one workdir or more")
    require(len({w.name for w in workdirs}) == len(workdirs), "workdir", [w.name for w in workdirs], "different names")
    require(trials > 0, "trials", trials, "1 or more")
    require(seed >= 0, "seed", seed, "0 or more")
    models = [read_trained(workdir, step, {"lengths": lengths} if lengths else {}) for workdir in workdirs]
    asked_for = [model.run.evaluation.lengths for model in models]
    require(len(set(asked_for)) == 1, "evaluation.lengths", asked_for, "the same for all; give --lengths")
    lengths = asked_for[0]
    check_lengths(lengths, distances)
    output = report.common_directory(workdirs) if output is None else output
    letters = [letters_of(saved_tokenizer(model.workdir)) for model in models]
    report.make_directory(output)
    programs = [compile_trained(*model_and_letters, trials) for model_and_letters in zip(models, letters, strict=True)]
    results = [
        ask_trained(*of_model, distances=distances, trials=trials, seed=seed)
        for of_model in zip(models, letters, programs, strict=True)
    ]
    content = {"seed": seed, "block": BLOCK, "runs": [dataclasses.asdict(result) for result in results]}
    return report.save("recall", output, content, caption(results), cells(results), plot(results))


def check_lengths(lengths: tuple[int, ...], distances: tuple[int, ...]) -> None:
    """Raise `InputError` unless every length has room for a distance, and every distance a length."""
    require(min(lengths) >= 2 * BLOCK, "lengths", lengths, f"{2 * BLOCK} tokens or more, a block and its end block")
    require(list(distances) == sorted(set(distances)), "distances", distances, "increasing, each once")
    low, high = BLOCK, max(lengths) - BLOCK
    allowed = f"{low} (a block) to {high} (the longest length less a block)"
    require(all(low <= distance <= high for distance in distances), "distances", distances, allowed)
    for length in lengths:
        require(bool(distances_at(length, distances)), "lengths", length, f"has room for none of {distances}")


def compile_trained(trained: TrainedModel, letters_N: Integer[np.ndarray, "N"], trials: int) -> list[Program]:
    """One model's programs by length; none of its weights are read.

    Raises:
        InputError: a length does not fit into memory.
    """
    mesh, params = abstract_params(trained)
    run = trained.run

    def step_at(length: int) -> tuple[Wrapped, int]:
        config = model_at(run.model, length, run.evaluation, "rope", run.train.train_length)
        step = make_answer_step(model_structure(config)[0], letters_N)
        return step, batch_size_at(length, trials, run.evaluation, mesh)

    name = trained.workdir.absolute().name
    return compile_programs(step_at, run.evaluation.lengths, params, mesh, batch_names=("inputs",), name=name)


def ask_trained(
    trained: TrainedModel,
    letters_N: Integer[np.ndarray, "N"],
    programs: list[Program],
    *,
    distances: tuple[int, ...],
    trials: int,
    seed: int,
) -> RecallRunResult:
    """Ask one model, on all devices."""
    mesh, params = restore(trained)
    name = trained.workdir.absolute().name
    num_tokens = sum(program.length * len(distances_at(program.length, distances)) for program in programs)
    results = []
    total = num_tokens * trials * len(ASKED)
    with jax.set_mesh(mesh), tqdm(total=total, unit="token", unit_scale=True, desc=name) as bar:
        for program in programs:
            bar.set_postfix_str(f"length {program.length}")
            answer = answer_with(program, params, mesh, bar)
            for task in ASKED:
                for distance in distances_at(program.length, distances):
                    length = program.length
                    results.append(
                        measure(answer, task, letters_N, length=length, distance=distance, trials=trials, seed=seed)
                    )
    return RecallRunResult(
        name=name,
        workdir=str(trained.workdir),
        step=trained.step,
        train_length=trained.run.train.train_length,
        num_letters=len(letters_N),
        chance=1 / len(letters_N),
        results=results,
    )


# ---- what it leaves behind


def caption(results: list[RecallRunResult]) -> str:
    """What the table shows."""
    first = results[0].results[0]
    chance = ", ".join(sorted({f"{run.chance:.1g}" for run in results}))
    trained = ", ".join(str(length) for length in sorted({run.train_length for run in results}))
    return (
        f"Accuracy of recall by distance in tokens, trained at {trained} tokens. {first.trials} sequences for each "
        "length and distance, with 7 questions (copy) or 4 (recall) each; 95 % binomial intervals. A guess among all "
        f"letters: {chance}; among the block's own answers: {1 / 7:.2f} (copy), {1 / 4:.2f} (recall)."
    )


def cells(results: list[RecallRunResult]) -> list[list[str]]:
    """Header and rows: each model's accuracy, by task and length, at each distance."""
    distances = sorted({result.distance for run in results for result in run.results})
    rows = [["", "task", "length", *(str(distance) for distance in distances)]]
    for run in results:
        by_row: dict[tuple[str, int], dict[int, str]] = {}
        for result in run.results:
            shown = report.with_interval(result.accuracy, result.low, result.high)
            by_row.setdefault((result.task, result.length), {})[result.distance] = shown
        for (task, length), shown in by_row.items():
            row = [shown[distance] if distance in shown else "" for distance in distances]
            rows.append([run.name, task, str(length), *row])
    return rows


def plot(results: list[RecallRunResult]) -> Figure:
    """Draw accuracy against distance: a panel for each task, a colour for each model, a stroke for each length."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, len(ASKED), sharey=True)
    strokes = ["-", "--", "-.", ":"]
    lengths = sorted({result.length for run in results for result in run.results})
    for axes, task in zip(panels, ASKED, strict=True):
        for number, run in enumerate(results):
            color = f"C{number % 10}"
            for which, length in enumerate(lengths):
                of_length = [result for result in run.results if (result.task, result.length) == (task, length)]
                distances = [result.distance for result in of_length]
                style = {"linestyle": strokes[which % len(strokes)], "marker": "o", "markersize": 3, "color": color}
                line = report.label(f"{run.name}, N = {length}")
                axes.plot(distances, [result.accuracy for result in of_length], label=line, **style)
                report.band(axes, distances, [(result.low, result.high) for result in of_length], color)
        axes.axhline(max(run.chance for run in results), color="gray", linestyle=":", linewidth=1)
        axes.axhline(1 / len(ASKED[task]), color="gray", linestyle="--", linewidth=1)
        axes.set_title(task)
        axes.set_xlabel("distance (tokens)")
        axes.set_ylim(-0.03, 1.03)
        report.lengths_axis(axes, sorted({result.distance for run in results for result in run.results}))
        report.mark_train_lengths(axes, [run.train_length for run in results])
    panels[0].set_ylabel("accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


# ---- text to train on


def write_corpus(directory: Path, *, documents: int, length: int, seed: int = 0) -> None:
    """Write text that teaches the tasks: files of `LINES` lines, each a sequence of either task in letters.

    A line's distance is drawn evenly in its logarithm, and before the block is as much filler as there is room for, or
    less. A line is `length` letters at most: a window of training that is twice as long holds a whole one.

    Args:
        directory: of the files; not there yet.
        documents: how many files.
        length: letters of a line at most.
        seed: of the draws.

    Raises:
        InputError: bad input, or a directory that is there or cannot be made.
    """
    require(documents > 0, "documents", documents, "1 or more")
    require(length >= 2 * BLOCK, "lengths", length, f"{2 * BLOCK} letters or more, a block and its end block")
    require(not directory.exists(), "corpus", str(directory), "a directory that does not exist yet")
    report.make_directory(directory)
    for document in tqdm(range(documents), unit="document", desc=directory.name):
        rng = np.random.default_rng([seed, document])
        (directory / f"{document:06}.txt").write_bytes(b"".join(lines(rng, length)))


def lines(rng: np.random.Generator, length: int) -> Iterator[bytes]:
    """The lines of one document; see `write_corpus`."""
    letters_N = letters_of(Bytes())
    for task in rng.choice(list(ASKED), LINES):
        distance = int(BLOCK * math.exp(rng.uniform(0, math.log((length - BLOCK + 1) / BLOCK))))
        num_tokens = int(rng.integers(distance + BLOCK, length + 1))
        yield Bytes().decode(draw(str(task), letters_N, num_tokens, distance, rng)) + b"\n"


def define_flags() -> None:
    """The flags; not at import, where they would meet those of other command lines."""
    flags.DEFINE_list("workdir", [], "Directories of the runs to compare.")
    flags.DEFINE_list("lengths", [], "Sequence lengths in tokens, increasing; those of the run's config if empty.")
    flags.DEFINE_list("distances", [], "Distances in tokens, increasing; the powers of two if empty.")
    flags.DEFINE_integer("trials", 32, "Sequences for each task, length and distance.")
    flags.DEFINE_integer("seed", 0, "Of the sequences.")
    flags.DEFINE_string("step", "newest", "Checkpoint: newest, best (lowest validation loss) or its number.")
    flags.DEFINE_string("output", None, "Where results go; the workdir, or the directory common to all, if unset.")
    flags.DEFINE_string("corpus", None, "Instead: a new directory for text that teaches the tasks, of --lengths=N.")
    flags.DEFINE_integer("documents", 200, f"Files of that text, each of {LINES} lines.")


def main(_: list[str]) -> None:
    """Flags, then one call."""
    given = flags.FLAGS
    for name, values in (("lengths", given.lengths), ("distances", given.distances)):
        require(all(map(str.isdecimal, values)), f"--{name}", values, "whole numbers, parted by commas")
    lengths = tuple(map(int, given.lengths))
    require(
        bool(given.workdir) != (given.corpus is not None), "--workdir", given.workdir, "either this or --corpus=DIR"
    )
    if given.corpus is not None:
        require(len(lengths) == 1, "--lengths", given.lengths, "one number, the letters of a line, with --corpus")
        write_corpus(Path(given.corpus), documents=given.documents, length=lengths[0], seed=given.seed)
        print(f"\ntext: {given.corpus}")
        return
    require(all(given.workdir), "--workdir", given.workdir, "directories, parted by commas")
    written = recall(
        [Path(workdir) for workdir in given.workdir],
        lengths=lengths,
        distances=tuple(map(int, given.distances)),
        trials=given.trials,
        seed=given.seed,
        step=given.step,
        output=Path(given.output) if given.output else None,
    )
    print(f"\n{written.table}\n\nresults: {written.directory}\npicture: {written.picture}")


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
