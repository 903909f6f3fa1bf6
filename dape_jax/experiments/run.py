"""Runs an experiment: what the catalogue names, through `train` and `evaluate`. Next: `report.py`.

    runs/experiments/<16 hex digits>/                       workdir of a model, named by its config and its text
    results/fig2/small-stdlib/kerple-xs-T32-seed0.json      what was measured of it
    results/table6/small/kerple-even_pairs-seed0.json       or, on a task, which needs no text

A file in results/ is written whole, when its run has finished, and is never written again (but for times that a kill
left without those they were measured beside). A model or a measurement that another experiment has finished is taken
from there: figure 2 and table 4 share their Kerple.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dape_jax.config import RunConfig, TaskRunConfig, resolved
from dape_jax.config import read_run as read_config
from dape_jax.data.prepare.build import read_json, write_json
from dape_jax.data.store import DataConfig, load_corpus
from dape_jax.errors import InputError, require
from dape_jax.evaluation.accuracy import evaluate_tasks
from dape_jax.evaluation.evaluate import evaluate
from dape_jax.experiments.catalogue import EXPERIMENTS, METHODS, PRESETS, Experiment, Preset, find, lengths_from
from dape_jax.model.transformer import model_structure
from dape_jax.provenance import provenance
from dape_jax.sharding import make_mesh, put_batch
from dape_jax.tasks import tapes
from dape_jax.training.loop import train
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import init_state, make_train_step, shardings_of

logger = logging.getLogger(__name__)

CONFIGS = Path(__file__).parents[2] / "configs"
TIMED_TURNS, TIMED_STEPS = 4, 5  # of each method, and steps of a turn

# What every run's file has, besides its figures.
FIELDS = {
    **dict.fromkeys(("key", "data", "method", "measure", "commit", "device"), str),
    **dict.fromkeys(("train_length", "seed", "num_devices", "num_cpus"), int),
    **dict.fromkeys(("versions", "config"), dict),
    "wall_seconds": float,
}
TEXT_FIELDS = {"paper_size": str, "size": str, "paper_train_length": int}
TASK_FIELDS = {"task": str}


@dataclasses.dataclass(frozen=True)
class Run:
    """One model of an experiment under a preset.

    Args:
        method: a key of `METHODS`.
        train_length: T, in tokens; of a task the longest input, in symbols.
        lengths: of the evaluation.
        seed: of the parameters, and of the order of the text or the strings of the task.
        recipe: file under `configs/`.
        argument: of the recipe.
        overrides: fields of its config that are set besides.
    """

    method: str
    train_length: int
    lengths: tuple[int, ...]
    seed: int
    recipe: str
    argument: str
    overrides: dict[str, Any]

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.model}-seed{self.seed}"

    @property
    def model(self) -> str:
        """What the runs with other seeds are other runs of."""
        raise NotImplementedError

    @property
    def about(self) -> dict[str, Any]:
        """What its file says of it."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TextRun(Run):
    """A model of an experiment on a text.

    Args:
        paper_size: the size in the paper that it stands for.
        paper_train_length: the train length in the paper that it stands for.
        size: of the recipe.
    """

    paper_size: str
    paper_train_length: int
    size: str

    @property
    def model(self) -> str:
        """See `Run`."""
        return f"{self.method}-{self.size}-T{self.train_length}"

    @property
    def about(self) -> dict[str, Any]:
        """See `Run`."""
        fields = ("method", "paper_size", "paper_train_length", "size", "train_length", "seed")
        return {field: getattr(self, field) for field in fields}


@dataclasses.dataclass(frozen=True)
class TaskRun(Run):
    """A model of an experiment on the algorithmic tasks.

    Args:
        task: a key of `TASKS`.
    """

    task: str

    @property
    def model(self) -> str:
        """See `Run`."""
        return f"{self.method}-{self.task}"

    @property
    def about(self) -> dict[str, Any]:
        """See `Run`."""
        return {field: getattr(self, field) for field in ("method", "task", "train_length", "seed")}


def runs_of(
    experiment: Experiment, preset: Preset, *, seeds: tuple[int, ...], data: str, tasks: tuple[str, ...]
) -> Sequence[Run]:
    """What an experiment trains under a preset, seed by seed.

    Args:
        experiment: of the catalogue.
        preset: what stands for the paper's settings.
        seeds: one run of every model for each; empty for the preset's.
        data: the text; "" for the preset's own, if it has one.
        tasks: of an experiment on tasks; empty for the preset's.

    Raises:
        InputError: seeds or tasks that are given twice, tasks that the experiment does not have, or data that it does
            not read.
    """
    require(len(set(seeds)) == len(seeds), "--seeds", seeds, "each once")
    require(len(set(tasks)) == len(tasks), "--tasks", tasks, "each once")
    seeds = seeds or preset.seeds
    if experiment.tasks:
        require(data == "", "--data", data, "for experiments on a text; the tasks draw their own strings")
        for task in tasks:
            require(task in experiment.tasks, "--tasks", task, f"one or more of {list(experiment.tasks)}")
        return _task_runs(experiment, preset, seeds, tasks or preset.on_tasks.tasks)
    require(not tasks, "--tasks", tasks, "for experiments on tasks; this one is on a text")
    return _text_runs(experiment, preset, seeds, data or preset.data)


def _text_runs(experiment: Experiment, preset: Preset, seeds: tuple[int, ...], data: str) -> list[TextRun]:
    runs = []
    for seed, paper_size, paper_length, method in itertools.product(
        seeds, experiment.sizes, experiment.train_lengths, experiment.methods
    ):
        if (method, paper_length) in experiment.skipped:
            continue
        size = preset.sizes[paper_size]
        train_length = paper_length // preset.length_divisor
        batch = preset.batch
        if batch is not None and experiment.step_tokens is not None:
            batch = experiment.step_tokens // paper_length
        if experiment.step_batch is not None:
            batch = experiment.step_batch
        argument = f"{size},{METHODS[method]},train_length={train_length},seed={seed}"
        if batch is not None:
            argument += f",batch={batch}"
        # Every model of an experiment is evaluated from the shortest of its train lengths on.
        shortest = min(experiment.train_lengths) if experiment.step_tokens else paper_length
        run = TextRun(
            method=method,
            train_length=train_length,
            lengths=tuple(length // preset.length_divisor for length in lengths_from(shortest)),
            seed=seed,
            recipe=preset.recipe,
            argument=argument,
            overrides=experiment.overrides | ({"data.path": data} if data else {}),
            paper_size=paper_size,
            paper_train_length=paper_length,
            size=size,
        )
        runs.append(run)
    return runs


def _task_runs(experiment: Experiment, preset: Preset, seeds: tuple[int, ...], tasks: tuple[str, ...]) -> list[TaskRun]:
    settings = preset.on_tasks
    (train_length,) = experiment.train_lengths
    return [
        TaskRun(
            method=method,
            train_length=train_length,
            lengths=settings.lengths,
            seed=seed,
            recipe=settings.recipe,
            argument=f"task={task},{METHODS[method]},num_steps={settings.num_steps},seed={seed}",
            overrides=experiment.overrides | {"evaluation.num_sequences": settings.num_sequences},
            task=task,
        )
        for seed in seeds
        for task in tasks
        for method in experiment.methods
        if method in settings.methods
    ]


def config_of(run: Run) -> dict[str, Any]:
    """The nested dict of a run's config, as `train.py` would read it.

    Raises:
        InputError: the recipes are not beside the package.
    """
    file = CONFIGS / run.recipe
    spec = importlib.util.spec_from_file_location(f"configs.{file.stem}", file)
    if spec is None or spec.loader is None or not file.exists():
        raise InputError(f"preset: {file} is not there; experiments run in a clone, with its configs/")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(run.argument).to_dict()
    for field, value in run.overrides.items():
        *sections, last = field.split(".")
        section = config
        for name in sections:
            section = section[name]
        require(last in section, "overrides", field, f"a field of {sorted(section)}")
        section[last] = value
    return config


def train_command(run: Run) -> str:
    """The command that trains a run by hand."""
    flags = [f"--config.{field}={value}" for field, value in run.overrides.items()]
    return " ".join(["python train.py", f"--config=configs/{run.recipe}:{run.argument}", *flags])


def run_experiment(
    name: str,
    preset_name: str,
    *,
    data: str,
    seeds: tuple[int, ...],
    tasks: tuple[str, ...],
    results: Path,
    workdirs: Path,
) -> list[Path]:
    """Run what is not finished yet of an experiment.

    Args:
        name: of the experiment.
        preset_name: "small" or "paper".
        data: the text, as in `--config.data.path`; "" for the preset's own.
        seeds: one run of every model for each; empty for the preset's.
        tasks: of an experiment on tasks; empty for the preset's.
        results: directory that the measurements go to.
        workdirs: directory that the models go to.

    Returns:
        The files of all its runs.

    Raises:
        InputError: bad input, before any device work.
    """
    experiment = find(name)
    require(preset_name in PRESETS, "--preset", preset_name, f"one of {list(PRESETS)}")
    preset = PRESETS[preset_name]
    runs = runs_of(experiment, preset, seeds=seeds, data=data, tasks=tasks)
    require(
        bool(experiment.tasks or data or preset.data),
        "--data",
        data,
        f"the text to train on; the preset {preset_name!r} has none of its own",
    )
    configs = [config_of(run) for run in runs]
    checked = [read_config(config) for config in configs]
    for config in checked:
        model_structure(config.model)
    digests = data_digests(checked)
    directory = results / name / "-".join([preset_name, *data_names(checked)])
    keys = [
        _digest([resolved(config), digest, experiment.measure, run.lengths])
        for config, digest, run in zip(checked, digests, runs, strict=True)
    ]
    files = [directory / f"{run.name}.json" for run in runs]
    others = [file for other in EXPERIMENTS for file in sorted((results / other).glob("*/*-seed*.json"))]
    finished = {read_result(file)["key"]: file for file in others}
    expected = dict(zip(files, keys, strict=True))
    data_of = {run.model: digest for run, digest in zip(runs, digests, strict=True)}
    for file in sorted(directory.glob("*-seed*.json")):  # of other seeds too, which the report puts beside these
        found, model = read_result(file), file.name.rpartition("-seed")[0]
        same = model not in data_of or found["data"] == data_of[model]
        same &= file not in expected or found["key"] == expected[file]
        require(same, str(file), found["key"], "holds a run with another config or text; give another --results")
    for directory_of, flag in ((directory, "--results"), (workdirs, "--workdirs")):
        try:
            directory_of.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{flag} = {str(directory_of)!r}: cannot be written to: {error}") from error

    def finish(index: int, measured: dict[str, Any], seconds: float) -> None:
        run = runs[index]
        about = run.about | {"measure": experiment.measure}
        about |= {"train_command": train_command(run), "wall_seconds": round(seconds, 1)}
        content = {"key": keys[index], "data": digests[index], **about, **measured, **provenance("flax", "optax")}
        write_json(files[index], content | {"config": resolved(checked[index])})

    with _alone("--results", directory), _alone("--workdirs", workdirs):
        todo = []
        for index, (file, key) in enumerate(zip(files, keys, strict=True)):
            if file.exists():
                continue
            if key in finished:
                logger.info("%s: the same run as %s", file.name, finished[key])
                write_json(file, read_result(finished[key]))
            else:
                todo.append(index)
        logger.info("%s: %d runs, %d of them finished", name, len(runs), len(runs) - len(todo))
        if experiment.measure == "step_ms":
            timed = {index: config for index, config in enumerate(checked) if isinstance(config, RunConfig)}
            sizes = [(run.about["size"], run.seed) for run in runs]
            for size in dict.fromkeys(sizes):
                together = [index for index in timed if sizes[index] == size]
                if set(together) & set(todo):  # compared side by side, so all of them or none
                    started = time.monotonic()
                    times = step_milliseconds([timed[index] for index in together])
                    seconds_each = (time.monotonic() - started) / len(together)
                    for index, measured in zip(together, times, strict=True):
                        finish(index, measured, seconds_each)
            return files
        for number, index in enumerate(todo, 1):
            run = runs[index]
            logger.info("%s: run %d of %d: %s", name, number, len(todo), run.name)
            started = time.monotonic()
            workdir = workdirs / _digest([resolved(checked[index]), digests[index]])[:16]
            train(configs[index], workdir)
            finish(index, measure(experiment, run, checked[index], workdir), time.monotonic() - started)
    return files


def read_result(file: Path) -> dict[str, Any]:
    """What `run_experiment` wrote of a run.

    Raises:
        InputError: it cannot be read, or is no run's.
    """
    run = read_json(file)
    fields = FIELDS | (TASK_FIELDS if "task" in run else TEXT_FIELDS)
    wrong = [field for field, kind in fields.items() if field not in run or not isinstance(run[field], kind)]
    require(not wrong, str(file), wrong, "fields that every run has")
    return run


@contextlib.contextmanager
def _alone(flag: str, directory: Path) -> Iterator[None]:
    """Have a directory to this process alone, so that no two write the same model or measurement.

    Raises:
        InputError: another process has it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            allowed = "another process is at work in it; wait for it, or give another"
            raise InputError(f"{flag} = {str(directory)!r}: {allowed}") from error
        yield
    finally:
        os.close(descriptor)


def measure(experiment: Experiment, run: Run, config: RunConfig | TaskRunConfig, workdir: Path) -> dict[str, Any]:
    """What the evaluator says of a trained model at the experiment's lengths, under its protocol."""
    if isinstance(config, TaskRunConfig):
        # As many as are asked for now: the model may have been trained when the config said another number.
        num_sequences = config.evaluation.num_sequences
        written = evaluate_tasks([workdir], lengths=run.lengths, num_sequences=num_sequences, output=workdir)
        (result,) = json.loads((written.directory / "accuracy.json").read_bytes())["runs"]
        return {"lengths": result["lengths"]}
    written = evaluate([workdir], lengths=run.lengths, protocol=experiment.measure, output=workdir)
    name = "delta.json" if experiment.measure == "delta" else "lengths.json"
    (result,) = json.loads((written.directory / name).read_bytes())["runs"]
    return {field: result[field] for field in ("lengths", "deltas") if field in result}


def step_milliseconds(configs: list[RunConfig]) -> list[dict[str, Any]]:
    """Time of a training step of each model, in turns, on random tokens: median, and the quartiles around it.

    Only the model whose turn it is holds memory: of the largest, a device has no room for two.
    """
    steps: list[Any] = [None] * len(configs)
    seconds: list[list[float]] = [[] for _ in configs]
    for _, (index, config) in itertools.product(range(TIMED_TURNS), enumerate(configs)):
        mesh = make_mesh(config.mesh)
        optimizer = make_optimizer(config.optimizer, config.train.num_steps)
        state = init_state(config.model, optimizer, config.train.seed, mesh)
        if steps[index] is None:
            graphdef, _ = model_structure(config.model)
            accumulation_steps = config.train.accumulation_steps
            steps[index] = make_train_step(
                graphdef, optimizer, shardings_of(state), accumulation_steps=accumulation_steps
            )
        shape = (config.train.batch_size, config.train.train_length + 1)
        tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
        with jax.set_mesh(mesh):
            batch = put_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)
            state, _ = jax.block_until_ready(steps[index](state, batch))  # compiles, in the first turn
            for _ in range(TIMED_STEPS):
                started = time.perf_counter()
                state, _ = jax.block_until_ready(steps[index](state, batch))
                seconds[index].append(time.perf_counter() - started)
        del state, batch
    results = []
    for times in seconds:
        low, median, high = (1000 * value for value in statistics.quantiles(times, n=4))
        results.append({"step_ms": median, "step_ms_quartiles": [low, high], "timed_steps": len(times)})
    return results


def data_digests(configs: Sequence[RunConfig | TaskRunConfig]) -> list[str]:
    """Of what each run reads, whatever its seed: its text, or the strings that its task draws."""
    unseeded = [dataclasses.replace(config.data, seed=0) for config in configs]
    digests = {
        data: load_corpus(data).digest if isinstance(data, DataConfig) else tapes.digest(data)
        for data in dict.fromkeys(unseeded)
    }
    return [digests[data] for data in unseeded]


def data_names(configs: Sequence[RunConfig | TaskRunConfig]) -> list[str]:
    """What the runs' texts are called in results/: the last part of their path. Tasks have none."""
    paths = dict.fromkeys(config.data.path for config in configs if isinstance(config, RunConfig))
    names = [Path(os.path.expanduser(path)).name for path in paths]
    return [
        "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name) or "text" for name in names
    ]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
