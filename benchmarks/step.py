"""Compile and time a training step, that of `train.py`, on random tokens.

In: a recipe's config. Out: seconds of a step, and its memory by the compiler. Next: `gpu.py`, `step_cycles.py`, and the
experiments that compare times, `experiments/run.py`.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks.hlo import compile_program
from benchmarks.measure import Row
from dape_jax.config import RunConfig
from dape_jax.data.store import STDLIB, follow_corpus
from dape_jax.evaluation.programs import available_bytes, predicted_bytes
from dape_jax.hardware import GIB, mfu
from dape_jax.model.attention import IMPLEMENTATIONS
from dape_jax.model.flops import model_flops
from dape_jax.recipes import RECIPES, read_module
from dape_jax.sharding import make_mesh, put_batch
from dape_jax.training.step import Training, abstract_state, init_state, make_train_step, shardings_of
from experiments.methods import METHODS, PRESETS


def read_config(
    preset: str, model: str, method: str, length: int, batch: int, implementation: str, **overrides: Any
) -> RunConfig:
    """Return the run of a recipe with this implementation of attention.

    Args:
        preset: a key of `PRESETS`.
        model: the paper's size.
        method: a key of `METHODS`.
        length: T, in tokens.
        batch: sequences in a step.
        implementation: a key of `IMPLEMENTATIONS`.
        overrides: values of other fields of the config, by dotted name.

    Raises:
        InputError: the recipe does not allow it.
    """
    argument = f"{PRESETS[preset].sizes[model]},{METHODS[method]},train_length={length}"
    config = read_module(RECIPES / PRESETS[preset].recipe).get_config(argument)
    # The recipe requires a text and evaluation lengths.
    fields = {"train.batch_size": batch, "data.path": STDLIB, "evaluation.lengths": (length,)} | overrides
    config.update_from_flattened_dict(fields)
    run = RunConfig.from_dict(follow_corpus(config.to_dict()))
    attention = IMPLEMENTATIONS[implementation]()
    return dataclasses.replace(run, model=dataclasses.replace(run.model, attention=attention))


class Step:
    """Compiled train step. It uses no device memory between its turns."""

    def __init__(self, run: RunConfig):
        """Compile the step.

        Raises:
            MemoryError: the step does not fit.
        """
        self.run, self.mesh, self.seconds, self.loss_nats = run, make_mesh(run.mesh), [], 0.0
        training = Training.of(run, self.mesh)
        state = abstract_state(training)
        # Jitted here, so that it is compiled once, not in every turn.
        self.init = jax.jit(lambda: init_state(training), out_shardings=shardings_of(state))
        shape = (run.train.batch_size, run.train.train_length + 1)
        tokens = np.random.default_rng(0).integers(run.model.vocab_size, size=shape, dtype=np.int32)
        self.rows = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        with jax.set_mesh(self.mesh):
            self.program = compile_program(make_train_step(training), state, put_batch(self.rows, self.mesh))
        self.needed_bytes, free = predicted_bytes(self.program.run), available_bytes(self.mesh)
        if self.needed_bytes > free:
            raise MemoryError(f"out of memory: {self.needed_bytes / GIB:.1f} GiB are needed, {free / GIB:.1f} are free")

    def take_turn(self, num_steps: int, bar: tqdm) -> None:
        """Initialise the state, and time `num_steps` steps after an untimed one."""
        with jax.set_mesh(self.mesh):
            state = self.init()
            batch = put_batch(self.rows, self.mesh)
            state, metrics = jax.block_until_ready(self.program.run(state, batch))
            self.loss_nats = float(metrics["loss_nats"])
            started = time.perf_counter()
            for _ in range(num_steps):
                state, _ = self.program.run(state, batch)
            jax.block_until_ready(state)
            self.seconds.append((time.perf_counter() - started) / num_steps)
            bar.update(num_steps)

    def result(self) -> Row:
        """Return the times of all turns, the rates at the shortest, and the loss of the first step."""
        run, least = self.run, min(self.seconds)
        flops = model_flops(run.model, run.train.train_length, run.train.batch_size)
        return {
            "min_ms": 1e3 * least,
            "all_ms": tuple(1e3 * each for each in self.seconds),
            "tokens_per_s": run.train.batch_size * run.train.train_length / least,
            "mfu": mfu(flops / least, jax.devices()[0].device_kind, jax.device_count()),
            "loss_nats": self.loss_nats,
        }
