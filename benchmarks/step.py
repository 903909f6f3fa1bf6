"""Measure time and memory of a complete training step, by method and by implementation of attention.

    python -m benchmarks.step --preset=small --models=125m,350m --lengths=128,512
    python -m benchmarks.step --models=125m --lengths=512,2048,8192 --batch=4
    python -m benchmarks.step --models=350m,2.7b,6.7b --methods=table7 --implementations=auto

The last command measures the paper's table 7, one sequence of 512 tokens by the methods of the table.

The step is that of `train.py`, compiled for the recipe's config (`configs/paper.py`; with `--preset=small`,
`configs/small.py`, whose sizes represent the paper's) on all devices, on random tokens. Steps that are compared run in
turns. Only one model is in memory at a time, and nothing is allocated for a step that does not fit according to the
compiler. For a step on a TPU slice that is not available: `docs/planning.md`.

Output: a table on the terminal, and OUTPUT/PLATFORM.json. The columns:

    min ms        minimum time of a step over `--turns`; the JSON has all of them. The steps of a turn are started one
                  after another, as in `train.py`, and timed together
    / first       time and memory relative to the first method and implementation of the model and length
    tokens/s      at the minimum
    needs GiB     memory of a device, by the compiler: state, batch and temporary memory
    GFLOP         FLOPs that the model needs (`flops.py`)
    GB            the compiled program's memory traffic on one device
    MFU           the model's FLOPs / (minimum time x the devices' peak); for the chips of `hardware.py`
    compile s     seconds of compilation
    loss          loss of the first step, in nats
"""

import dataclasses
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks.attention import choose, implementations
from benchmarks.hlo import compile_program
from benchmarks.measure import Row, check_names, check_positive, failure, table, write
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.config import RunConfig, resolved
from dape_jax.data.store import STDLIB, follow_corpus
from dape_jax.evaluation.programs import available_bytes, predicted_bytes
from dape_jax.hardware import GIB, mfu
from dape_jax.model.attention import IMPLEMENTATIONS
from dape_jax.model.flops import model_flops
from dape_jax.model.transformer import SIZES, model_structure
from dape_jax.provenance import make_results_directory
from dape_jax.recipes import read_module
from dape_jax.sharding import device_platform, make_mesh, put_batch
from dape_jax.training import loop
from dape_jax.training.metrics import METRICS_FILE
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import abstract_state, init_state, make_train_step, shardings_of
from experiments.catalogue import EXPERIMENTS
from experiments.methods import METHODS, PRESETS
from experiments.run import RECIPES

TABLE7 = EXPERIMENTS["table7"].methods  # methods of the paper's table of times
RATIO_TO = "dape1x3-kerple"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    preset: str = flag("paper", f"Recipe of the models: {', '.join(PRESETS)}.")
    models: tuple[str, ...] = flag(("125m",), f"The paper's models: {', '.join(SIZES)}.")
    lengths: tuple[int, ...] = flag((512,), "Train lengths in tokens.")
    implementations: tuple[str, ...] = flag((), "Implementations to time; all but `auto` if not given.")
    methods: tuple[str, ...] = flag(("dape1x3-kerple",), f"Methods, or `table7`: {', '.join(METHODS)}.")
    batch: int = flag(1, "Sequences in a step.")
    turns: int = flag(3, "Turns of each implementation; each starts with an untimed step.")
    steps: int = flag(3, "Timed steps in a turn.")
    output: str = flag("results/step", "Directory of the JSON.")

    def __post_init__(self):
        check_positive(self, "lengths", "batch", "turns", "steps")
        check_names("preset", (self.preset,), PRESETS)
        if self.methods == ("table7",):
            object.__setattr__(self, "methods", TABLE7)
        check_names("methods", self.methods, METHODS)
        check_names("models", self.models, SIZES)
        check_names("implementations", self.implementations or ("dense",), IMPLEMENTATIONS)


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
    attention = implementations(None, None)[implementation]
    return dataclasses.replace(run, model=dataclasses.replace(run.model, attention=attention))


FIELDS = (
    *("failed", "min_ms", "median_ms", "all_ms", "tokens_per_s", "needed_gib", "compile_s"),
    *("model_gflop", "compiled_gbyte", "mfu", "loss_nats"),
)


class Step:
    """Compiled train step. It uses no device memory between its turns."""

    def __init__(self, run: RunConfig):
        """Compile the step.

        Raises:
            MemoryError: the step does not fit.
        """
        self.run, self.mesh, self.seconds, self.loss_nats = run, make_mesh(run.mesh), [], 0.0
        graphdef, _ = model_structure(run.model)
        optimizer = make_optimizer(run.optimizer, run.train.num_steps)
        state = abstract_state(run.model, optimizer, self.mesh)
        shardings = shardings_of(state)
        # Jitted here, so that it is compiled once, not in every turn.
        self.init = jax.jit(
            lambda: init_state(run.model, optimizer, run.train.seed, self.mesh), out_shardings=shardings
        )
        step = make_train_step(
            graphdef,
            optimizer,
            shardings,
            accumulation_steps=run.train.accumulation_steps,
            logits_chunk_tokens=run.train.logits_chunk_tokens,
        )
        shape = (run.train.batch_size, run.train.train_length + 1)
        tokens = np.random.default_rng(0).integers(run.model.vocab_size, size=shape, dtype=np.int32)
        self.rows = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        with jax.set_mesh(self.mesh):
            self.program = compile_program(step, state, put_batch(self.rows, self.mesh))
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
        """Return the times and figures of all turns, see the module's docstring; `failed` is None."""
        run, program, least = self.run, self.program, min(self.seconds)
        flops = model_flops(run.model, run.train.train_length, run.train.batch_size).total
        return {
            "failed": None,
            "min_ms": 1e3 * least,
            "median_ms": 1e3 * statistics.median(self.seconds),
            "all_ms": tuple(1e3 * each for each in self.seconds),
            "tokens_per_s": run.train.batch_size * run.train.train_length / least,
            "needed_gib": self.needed_bytes / GIB,
            "compile_s": program.compile_s,
            "model_gflop": flops / 1e9,
            "compiled_gbyte": program.work.hbm_bytes / 1e9,
            "mfu": mfu(flops / least, jax.devices()[0].device_kind, jax.device_count()),
            "loss_nats": self.loss_nats,
        }


def train(run: RunConfig, workdir: Path) -> list[Row]:
    """Train as `train.py` does, without validation until the end; return the metrics of every step."""
    last = {"eval_interval": run.train.num_steps, "checkpoint_interval": run.train.num_steps}
    loop.train(resolved(dataclasses.replace(run, train=dataclasses.replace(run.train, **last))), workdir)
    lines = [json.loads(line) for line in (workdir / METRICS_FILE).read_text().splitlines()]
    return [line for line in lines if "train/loss_nats" in line]


Name = tuple[str, str]  # method, and implementation of attention


def time_steps(runs: dict[Name, RunConfig], turns: int, num_steps: int, bar: tqdm) -> dict[Name, Row]:
    """Time the steps of several runs in turns. A failure is reported, and the others are timed."""
    steps: dict[Name, Step] = {}
    found: dict[Name, Row] = {}

    def fails(name: Name, error: Exception) -> None:
        found[name] = dict.fromkeys(FIELDS) | {"failed": failure(error), "all_ms": ()}
        bar.write(f"{' '.join(name)}: {found[name]['failed']}", file=sys.stderr)

    for name, run in runs.items():
        bar.set_postfix_str(f"compiling {' '.join(name)}")
        try:
            steps[name] = Step(run)
        except Exception as error:
            fails(name, error)
            bar.update(turns * num_steps)
    for turn, (name, step) in itertools.product(range(turns), list(steps.items())):
        bar.set_postfix_str(" ".join(name))
        try:
            if name not in found:
                step.take_turn(num_steps, bar)
        except Exception as error:
            fails(name, error)
            bar.update((turns - turn) * num_steps)
    return {name: found[name] if name in found else steps[name].result() for name in runs}


def cells(rows: list[Row]) -> list[list[str]]:
    """Return the rows of the table, header first."""
    first = {(row["model"], row["length"]): row for row in reversed(rows)}

    def ratios(row: Row) -> str | None:
        base = first[row["model"], row["length"]]
        fields = ("min_ms", "needed_gib")
        return None if base["failed"] else "; ".join(f"{row[field] / base[field]:.2f}" for field in fields)

    return table(
        rows,
        {"model": "model", "length": "length", "method": "method", "": "name"},
        {"min ms": ("min_ms", ".1f"), "/ first": (ratios, ""), "tokens/s": ("tokens_per_s", ",.0f")}
        | {"needs GiB": ("needed_gib", ".2f"), "GFLOP": ("model_gflop", ",.1f"), "GB": ("compiled_gbyte", ".1f")}
        | {"MFU": ("mfu", ".1%"), "compile s": ("compile_s", ".1f"), "loss": ("loss_nats", ".4f")},
    )


def run(settings: Settings) -> None:
    """Measure everything and write the output."""
    make_results_directory(Path(settings.output))
    cases = list(itertools.product(settings.models, sorted(settings.lengths)))
    names, left_out = choose(settings.implementations)

    def configs(model: str, length: int) -> dict[tuple[str, str], RunConfig]:
        return {
            (method, name): read_config(settings.preset, model, method, length, settings.batch, name)
            for method, name in itertools.product(settings.methods, names)
        }

    planned = [each for case in cases for each in configs(*case).values()]
    for each in planned:
        each.check_mesh(make_mesh(each.mesh))
    for line in left_out:
        print(line, file=sys.stderr)

    rows: list[Row] = []
    num_turns = len(cases) * len(settings.methods) * len(names) * settings.turns
    with tqdm(total=num_turns * settings.steps, unit="step", desc="steps") as bar:
        for model, length in cases:
            found = time_steps(configs(model, length), settings.turns, settings.steps, bar)
            case = {"model": model, "size": PRESETS[settings.preset].sizes[model], "length": length}
            rows += [case | {"method": method, "name": name} | times for (method, name), times in found.items()]

    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    what = f"preset {settings.preset}, batch {settings.batch}, {planned[0].model.dtype}; {device}"
    caption = f"A training step ({what}); / first: time and memory relative to the first of the model and length."
    failed = [
        f"{row['method']} {row['name']} at {row['model']} {row['length']}: {row['failed']}"
        for row in rows
        if row["failed"]
    ]
    caption = " ".join([caption, *(f"{line}." for line in [*left_out, *failed])])
    write(device_platform(), settings, rows, caption, cells(rows), left_out=left_out)


if __name__ == "__main__":
    command_line.run(run, Settings)
