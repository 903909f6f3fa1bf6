"""Measure time and memory of a complete training step, by implementation of attention.

    python -m benchmarks.step --preset=small --models=125m,350m --lengths=128,512
    python -m benchmarks.step --models=125m --lengths=512,2048,8192 --batch=4

The step is that of `train.py`, compiled for the recipe's config (`configs/paper.py`; with `--preset=small`,
`configs/small.py`, whose sizes represent the paper's) on all devices, on random tokens. Steps that are compared run in
turns. Only one model is in memory at a time, and nothing is allocated for a step that does not fit according to the
compiler. For a step on a TPU slice that is not available: `docs/planning.md`.

Output: a table on the terminal, and OUTPUT/PLATFORM.json. The columns:

    min ms        minimum time of a step over `--turns`; the JSON has all of them. The steps of a turn are started one
                  after another, as in `train.py`, and timed together
    / dense       time and memory relative to dense
    tokens/s      at the minimum
    needs GiB     memory of a device, by the compiler: state, batch and temporary memory
    GFLOP         FLOPs that the model needs (`flops.py`); and those of the compiled program's matmuls, on one device,
                  with trip counts of loops. A Pallas kernel counts only if it reports its cost
    GB            the compiled program's memory traffic on one device
    MFU           the model's FLOPs / (minimum time x the devices' peak); for the chips of `hardware.py`
    compile s     seconds of compilation
    loss          loss of the first step, in nats
"""

import dataclasses
import itertools
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from benchmarks.attention import choose, implementations
from benchmarks.hlo import compile_program
from benchmarks.measure import Row, check_names, check_positive, failure, table, write
from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.config import RunConfig
from dape_jax.data.corpus import STDLIB
from dape_jax.evaluation.programs import available_bytes, predicted_bytes
from dape_jax.hardware import GIB, mfu
from dape_jax.model.attention import IMPLEMENTATIONS
from dape_jax.model.flops import model_flops
from dape_jax.model.transformer import SIZES, model_structure
from dape_jax.provenance import make_results_directory
from dape_jax.sharding import device_platform, make_mesh, put_batch
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import abstract_state, init_state, make_train_step, shardings_of
from experiments.methods import METHODS, PRESETS
from experiments.run import Run, config_of


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    preset: str = flag("paper", f"Recipe of the models: {', '.join(PRESETS)}.")
    models: tuple[str, ...] = flag(("125m",), f"The paper's models: {', '.join(SIZES)}.")
    lengths: tuple[int, ...] = flag((512,), "Train lengths in tokens.")
    implementations: tuple[str, ...] = flag((), "Implementations to time; all but `auto` if not given.")
    method: str = flag("dape1x3-kerple", f"Method of the models: {', '.join(METHODS)}.")
    batch: int = flag(1, "Sequences in a step.")
    turns: int = flag(3, "Turns of each implementation; each starts with an untimed step.")
    steps: int = flag(3, "Timed steps in a turn.")
    output: str = flag("results/step", "Directory of the JSON.")

    def __post_init__(self):
        check_positive(self, "lengths", "batch", "turns", "steps")
        check_names("preset", (self.preset,), PRESETS)
        check_names("method", (self.method,), METHODS)
        check_names("models", self.models, SIZES)
        check_names("implementations", self.implementations or ("dense",), IMPLEMENTATIONS)


def read_config(preset: str, model: str, method: str, length: int, batch: int, implementation: str) -> RunConfig:
    """Return the run of a recipe with this implementation of attention.

    Args:
        preset: a key of `PRESETS`.
        model: the paper's size.
        method: a key of `METHODS`.
        length: T, in tokens.
        batch: sequences in a step.
        implementation: a key of `IMPLEMENTATIONS`.

    Raises:
        InputError: the recipe does not allow it.
    """
    size = PRESETS[preset].sizes[model]
    spec = config_of(
        Run(
            method=method,
            train_length=length,
            lengths=(length,),
            seed=0,
            recipe=PRESETS[preset].recipe,
            argument=f"{size},{METHODS[method]},train_length={length}",
            # The recipe requires a text and lengths, which are not used.
            overrides={"train.batch_size": batch, "data.path": STDLIB, "evaluation.lengths": (length,)},
            paper_size=model,
            paper_train_length=length,
            size=size,
        )
    )
    run = RunConfig.from_dict(spec)
    attention = implementations(None, None)[implementation]
    return dataclasses.replace(run, model=dataclasses.replace(run.model, attention=attention))


FIELDS = (
    *("failed", "min_ms", "median_ms", "all_ms", "tokens_per_s", "needed_gib", "compile_s"),
    *("model_gflop", "compiled_gflop", "compiled_gbyte", "mfu", "loss_nats"),
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
            "compiled_gflop": program.work.matmul_flops / 1e9,
            "compiled_gbyte": program.work.hbm_bytes / 1e9,
            "mfu": mfu(flops / least, jax.devices()[0].device_kind, jax.device_count()),
            "loss_nats": self.loss_nats,
        }


def time_steps(runs: dict[str, RunConfig], turns: int, num_steps: int, bar: tqdm) -> dict[str, Row]:
    """Time the steps of several runs in turns. A failure is reported, and the others are timed."""
    steps: dict[str, Step] = {}
    found: dict[str, Row] = {}

    def fails(name: str, error: Exception) -> None:
        found[name] = dict.fromkeys(FIELDS) | {"failed": failure(error), "all_ms": ()}
        bar.write(f"{name}: {found[name]['failed']}", file=sys.stderr)

    for name, run in runs.items():
        bar.set_postfix_str(f"compiling {name}")
        try:
            steps[name] = Step(run)
        except Exception as error:
            fails(name, error)
            bar.update(turns * num_steps)
    for turn, (name, step) in itertools.product(range(turns), list(steps.items())):
        bar.set_postfix_str(name)
        try:
            if name not in found:
                step.take_turn(num_steps, bar)
        except Exception as error:
            fails(name, error)
            bar.update((turns - turn) * num_steps)
    return {name: found[name] if name in found else steps[name].result() for name in runs}


def cells(rows: list[Row]) -> list[list[str]]:
    """Return the rows of the table, header first."""
    dense = {(row["model"], row["length"]): row for row in rows if row["name"] == "dense" and row["failed"] is None}

    def ratios(row: Row) -> str | None:
        base = dense.get((row["model"], row["length"]))
        return (
            None if base is None else "; ".join(f"{row[field] / base[field]:.2f}" for field in ("min_ms", "needed_gib"))
        )

    return table(
        rows,
        {"model": "model", "length": "length", "": "name"},
        {"min ms": ("min_ms", ".1f"), "/ dense": (ratios, ""), "tokens/s": ("tokens_per_s", ",.0f")}
        | {"needs GiB": ("needed_gib", ".2f"), "GFLOP": ("model_gflop", ",.1f")}
        | {"compiled": ("compiled_gflop", ",.1f"), "GB": ("compiled_gbyte", ".1f"), "MFU": ("mfu", ".1%")}
        | {"compile s": ("compile_s", ".1f"), "loss": ("loss_nats", ".4f")},
    )


def run(settings: Settings) -> None:
    """Measure everything and write the output."""
    make_results_directory(Path(settings.output))
    cases = list(itertools.product(settings.models, sorted(settings.lengths)))

    def configs(names: list[str], model: str, length: int) -> dict[str, RunConfig]:
        recipe = (settings.preset, model, settings.method, length, settings.batch)
        return {name: read_config(*recipe, name) for name in names}

    checked = [configs(["dense"], *case)["dense"] for case in cases]
    for each in checked:
        each.check_mesh(make_mesh(each.mesh))
    names, left_out = choose(settings.implementations)
    for line in left_out:
        print(line, file=sys.stderr)

    rows: list[Row] = []
    with tqdm(total=len(cases) * len(names) * settings.turns * settings.steps, unit="step", desc="steps") as bar:
        for model, length in cases:
            found = time_steps(configs(names, model, length), settings.turns, settings.steps, bar)
            case = {"model": model, "size": PRESETS[settings.preset].sizes[model], "length": length}
            rows += [case | {"name": name} | times for name, times in found.items()]

    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    what = f"{settings.method}, preset {settings.preset}, batch {settings.batch}, {checked[0].model.dtype}; {device}"
    caption = f"A training step ({what}); / dense: time and memory relative to dense."
    failed = [f"{row['name']} at {row['model']} {row['length']}: {row['failed']}" for row in rows if row["failed"]]
    caption = " ".join([caption, *(f"{line}." for line in [*left_out, *failed])])
    write(device_platform(), settings, rows, caption, cells(rows), left_out=left_out)


def main(_: list[str]) -> None:
    """Parse flags and run."""
    run(from_flags(Settings))


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
