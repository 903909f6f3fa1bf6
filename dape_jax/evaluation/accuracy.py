"""Accuracy by length of models on the algorithmic tasks. In: workdirs of runs on tasks. Out: files `accuracy.*`.

All models answer the same new strings, the same number at every length. Accuracy is the share of correct symbols among
those that count (see `tapes.py`). The score is the mean accuracy over the lengths above the train length.
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array, Int

from dape_jax.config import TaskRunConfig
from dape_jax.evaluation import report
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.programs import Program, batch_size_at, compile_programs, run_in_batches
from dape_jax.evaluation.protocols import methods_of, save
from dape_jax.evaluation.trained import TrainedModel, measure_each, read_models, require_same
from dape_jax.model.attention import Blockwise, Dense
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.progress import Progress
from dape_jax.provenance import make_results_directory
from dape_jax.sharding import MeshConfig, check_mesh, make_mesh, replicated
from dape_jax.tasks.tapes import EVALUATION, Batch, TaskConfig, make_tapes
from dape_jax.training.step import abstract_params, positions_of

logger = logging.getLogger(__name__)


def evaluate_tasks(
    workdirs: Sequence[epath.PathLike],
    options: Options = Options(),
    *,
    mesh: MeshConfig | None = None,
    output: epath.PathLike | None = None,
) -> report.ReportPaths:
    """Evaluate one checkpoint of every workdir and write one comparison, `accuracy.*`; see `perplexity.evaluate`."""
    of_language = "last_tokens", "max_windows", "data", "split", "verify", "rotary", "protocol", "stride", "bos"
    options.refuse("language models", *of_language)
    models = read_models(TaskRunConfig, workdirs, options, mesh, "lengths", "num_sequences", "dropout")
    fields = ("evaluation.lengths", "evaluation.num_sequences", "evaluation.dropout", "train.train_length")
    require_same(models, *fields)
    for model in models:
        check_mesh(make_mesh(model.mesh), {"T": ("evaluation.pad_to", model.run.evaluation.pad_to)})

    methods_of([model.identity for model in models], options)  # refuses wrong names
    directory = make_results_directory(output or report.common_directory(workdirs))
    return save("accuracy", directory, measure_each(models, compile_tapes, task_result), options)


# ---- tapes


def padded_length(config: TaskConfig, length: int, pad_to: int) -> int:
    """Return T, the number of tokens of padded tapes for inputs of one length."""
    return -(-config.tape_length(length) // pad_to) * pad_to


class Tapes:
    """Tapes of `padded` tokens: new strings that depend only on task and length, not on the model or its batches.

    Random positions are drawn for every batch, as in training.
    """

    def __init__(self, config: TaskConfig, length: int, num_sequences: int, padded: int):
        self.config = dataclasses.replace(config, pad_to=padded)
        self.rng = np.random.default_rng([EVALUATION, length])
        self.inputs_BN = config.of.sample(self.rng, num_sequences, length)
        self.targets_BM = config.of.solve(self.inputs_BN)
        unused = np.random.default_rng(0)  # for random positions, on which targets do not depend
        tapes = make_tapes(self.config, self.inputs_BN, self.targets_BM, unused)
        self.targets_BT, self.counted_BT = tapes["targets"], tapes["counted"]

    def batch(self, rows: Int[np.ndarray, "B"]) -> Batch:
        """Return the inputs and positions of the tapes numbered `rows`."""
        tapes = make_tapes(self.config, self.inputs_BN[rows], self.targets_BM[rows], self.rng)
        return {name: tapes[name] for name in ("inputs", "positions")}


# ---- answers


def make_answer_step(graphdef: nnx.GraphDef, dropout: bool) -> Wrapped:
    """Make `step({"params": params, "number": number}, batch) -> answers_BT`, jitted.

    The answer at every token of a tape is the most probable symbol, or -1 where the logits are not finite. The key of
    dropout is derived from the number of the batch.
    """

    def step(model_and_number: dict[str, Any], batch: dict[str, Array]) -> Int[Array, "B T"]:
        model = nnx.merge(graphdef, model_and_number["params"])
        key = jax.random.fold_in(jax.random.key(0), model_and_number["number"]) if dropout else None
        logits_BTV = model.logits(model.features(batch["inputs"], positions_of(batch), key))
        return jnp.where(jnp.isfinite(logits_BTV.max(axis=-1)), logits_BTV.argmax(axis=-1), -1)

    return jax.jit(step)


def compile_tapes(trained: TrainedModel[TaskRunConfig]) -> dict[int, Program]:
    """Compile the programs of one model without reading its parameters; return them by T, the tokens of a tape."""
    mesh, run, evaluation = make_mesh(trained.mesh), trained.run, trained.run.evaluation

    def step_at(padded: int) -> tuple[Wrapped, TransformerConfig, int]:
        blockwise = Blockwise(block_size=evaluation.block_size, num_buckets=4)
        attention = blockwise if padded >= evaluation.blockwise_from else Dense()
        config = dataclasses.replace(run.model, attention=attention)
        largest = batch_size_at(padded, evaluation.num_sequences, evaluation, mesh)
        # Keep the number of batches, and make their sizes as equal as possible, so that the last has less padding.
        num_batches = -(-evaluation.num_sequences // largest)
        even = -(-evaluation.num_sequences // num_batches)
        step = make_answer_step(model_structure(config)[0], evaluation.dropout)
        return step, config, batch_size_at(padded, even, evaluation, mesh)

    tapes = sorted({padded_length(run.data, length, evaluation.pad_to) for length in evaluation.lengths})
    number = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(mesh))
    programs = compile_programs(
        step_at,
        tapes,
        {"params": abstract_params(run.model, mesh), "number": number},
        mesh,
        batch_names=("inputs", "positions"),
        name=trained.label,
        field="tokens of a tape (evaluation.lengths, with the answer and padding)",
    )
    return {program.length: program for program in programs}


def answer_tapes(
    trained: TrainedModel[TaskRunConfig], programs: dict[int, Program], params: Params, mesh: Mesh
) -> list[dict[str, Any]]:
    """Run the programs that `compile_tapes` returned; return the accuracy of the model at each length."""
    config, evaluation = trained.run.data, trained.run.evaluation
    numbers = itertools.count()  # batch numbers, which continue from one length to the next
    program_at = {length: programs[padded_length(config, length, evaluation.pad_to)] for length in evaluation.lengths}
    accuracies, flops = [], evaluation.num_sequences * sum(program.row_flops for program in program_at.values())
    with jax.set_mesh(mesh), Progress(total=flops, unit="FLOP", unit_scale=True, desc=trained.label) as bar:
        for length, program in program_at.items():
            bar.set_postfix_str(f"length {length}")
            tapes = Tapes(config, length, evaluation.num_sequences, program.length)

            def answer(batch: dict[str, jax.Array], program: Program = program) -> jax.Array:
                number = jax.device_put(np.int32(next(numbers)), replicated(mesh))
                return program.step({"params": params, "number": number}, batch)

            answers_BT = run_in_batches(
                answer,
                tapes.batch,
                num_rows=evaluation.num_sequences,
                batch_size=program.batch_size,
                mesh=mesh,
                progress=lambda num_rows, program=program: bar.update(num_rows * program.row_flops),
            )
            if ((answers_BT < 0) & tapes.counted_BT).any():
                message = "%s: the model has diverged: its logits at length %d are not finite"
                logger.warning(message, trained.label, length)
            right_B = ((answers_BT == tapes.targets_BT) & tapes.counted_BT).sum(axis=1)
            counted_B = tapes.counted_BT.sum(axis=1)
            accuracies.append(length_accuracy(length, right_B, counted_B))
    return accuracies


def length_accuracy(length: int, right_B: Int[np.ndarray, "B"], counted_B: Int[np.ndarray, "B"]) -> dict[str, Any]:
    """Return the accuracy at one length, correct symbols / symbols that count, with a 95 % interval.

    The symbols of one sequence are not independent. The interval is Wilson's for the number of independent symbols that
    would have the variance observed between sequences. With one symbol each, that is the number of sequences; it is
    also used where nothing varies, so that a model without errors has an interval too.

    Differs: the reference takes the mean over 8 batches of 64 sequences each. Where an END decides how many symbols of
        a sequence count (addition, multiplication, stack manipulation), batches of short targets weigh more there.
    """
    accuracy = right_B.sum() / counted_B.sum()
    # Subtract integers: rounding errors would give equal sequences a tiny variance, and so an interval of width 0.
    off_B = right_B * counted_B.sum() - right_B.sum() * counted_B
    variance = np.sum((off_B / counted_B.sum() ** 2) ** 2)
    independent = accuracy * (1 - accuracy) / variance if variance > 0 else len(right_B)
    z = 1.959964  # 97.5 % quantile of the normal distribution
    centre = (accuracy + z**2 / (2 * independent)) / (1 + z**2 / independent)
    half = z * math.sqrt(accuracy * (1 - accuracy) / independent + (z / (2 * independent)) ** 2)
    half /= 1 + z**2 / independent
    return {
        "length": length,  # a task that has no input of this length uses one symbol less
        "accuracy": float(accuracy),
        "low": float(max(0, centre - half)),
        "high": float(min(1, centre + half)),
        "num_sequences": len(right_B),
        "num_symbols": int(counted_B.sum()),
    }


def task_result(
    trained: TrainedModel[TaskRunConfig], programs: dict[int, Program], params: Params, mesh: Mesh
) -> dict[str, Any]:
    """Return the result of one model, with its mean accuracies, which are None if there are no lengths to average.

    Differs: the reference slices the list of accuracies at lengths 1, 2, .. from index 41 on, so its score begins with
        length 42 instead of 41.
    """
    run, train_length = trained.run, trained.run.train.train_length
    lengths = answer_tapes(trained, programs, params, mesh)

    def mean(above: int, to: int | float) -> float | None:
        chosen = [each["accuracy"] for each in lengths if above < each["length"] <= to]
        return math.fsum(chosen) / len(chosen) if chosen else None

    return trained.identity | {
        "random_accuracy": run.data.of.random_accuracy,
        "dropout": run.evaluation.dropout,
        "lengths": lengths,
        "trained": mean(0, train_length),
        "score": mean(train_length, math.inf),
    }
