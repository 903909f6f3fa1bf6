"""Run an experiment of the catalogue: train its models, evaluate them, store one line per run. Next: `runs.py`.

    runs/experiments/<16 hex digits>/     run directory of a model, named by its config and text
    results/fig2/runs.jsonl.zst           the results of the experiment's models, see `runs.py`

Experiments share models and results: figure 2 and table 4 have the same runs of Kerple. A stored run is never replaced,
except for interrupted step times, which are comparable only if measured together.
"""

import dataclasses
import itertools
import logging
import statistics
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dape_jax.config import RunConfig, TaskRunConfig, choose, read_run, resolved
from dape_jax.data.store import DataConfig, follow_corpus
from dape_jax.errors import require
from dape_jax.evaluation.accuracy import evaluate_tasks
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.perplexity import evaluate
from dape_jax.files import exclusive_lock, read_json
from dape_jax.model.flops import model_flops_per_token
from dape_jax.provenance import make_results_directory, provenance
from dape_jax.recipes import RECIPES, read_module
from dape_jax.sharding import device_platform
from dape_jax.tasks import tapes
from dape_jax.training.loop import train
from dape_jax.training.metrics import read_metrics
from dape_jax.training.source import load_corpora
from experiments.catalogue import EXPERIMENTS
from experiments.claims import Experiment, Model, lengths_from
from experiments.methods import METHODS, OVERRIDES, PRESETS, RATES
from experiments.runs import add_run, identity, identity_of_stored, read_runs
from experiments.settings import Settings

logger = logging.getLogger("dape_jax.experiments")  # of the package, whose messages a command line prints

TIMED_STEPS = 20  # of each model


@dataclasses.dataclass(frozen=True)
class Run:
    """One model of an experiment with a preset, on a text or on an algorithmic task.

    Sizes and lengths are the preset's, those of `model` the paper's. For a task, lengths are the paper's, in symbols,
    and there are no sizes.
    """

    model: Model
    size: str
    train_length: int
    lengths: tuple[int, ...]  # evaluation lengths
    seed: int
    recipe: str  # file under configs/
    argument: str  # argument of the recipe
    overrides: dict[str, Any]  # config fields to set, as with flags

    @property
    def name(self) -> str:
        """Name of the run, unique in its group, as in "kerple-xs-T32-seed0" or "kerple-even_pairs-seed0"."""
        of_model = self.model.task or f"{self.size}-T{self.train_length}"
        return f"{self.model.method}-{of_model}-seed{self.seed}"


def runs_of(experiment: Experiment, settings: Settings) -> list[Run]:
    """Return the runs of an experiment, ordered by seed, then by model.

    Raises:
        InputError: the experiment does not have the preset, a method, a train length or a task; no run is left; or a
            text is given for an experiment on tasks.
    """
    divisor = experiment.length_divisor(settings.preset)
    train_lengths = tuple(length // divisor for length in experiment.train_lengths)
    for flag, given, allowed in (
        ("--preset", (settings.preset,), experiment.presets),
        ("--methods", settings.methods, experiment.methods),
        ("--train_lengths", settings.train_lengths, train_lengths),
        ("--tasks", settings.tasks, experiment.tasks),
        ("--data", (settings.data,), () if experiment.tasks else (settings.data,)),
    ):
        expected = f"must be one of {list(allowed)}" if allowed else "must be empty"
        for value in filter(None, given):
            require(value in allowed, flag, value, f"{expected} for this experiment")
    preset = PRESETS[settings.preset]
    on_tasks = (settings.tasks or preset.on_tasks.tasks, preset.on_tasks.methods)
    tasks, methods = on_tasks if experiment.tasks else (("",), experiment.methods)
    runs = [
        _run(experiment, settings, seed, model)
        for seed, model in itertools.product(settings.seeds or preset.seeds, experiment.models)
        if model.method in (settings.methods or methods)
        and model.method in methods
        and model.train_length // divisor in (settings.train_lengths or train_lengths)
        and model.task in tasks
    ]
    selected, allowed = (settings.methods, settings.train_lengths), f"must select a run of preset {settings.preset!r}"
    require(bool(runs), "--methods, --train_lengths", selected, allowed)
    return runs


def _run(experiment: Experiment, settings: Settings, seed: int, model: Model) -> Run:
    method, paper_size, task, paper_length = model
    preset, train_length = PRESETS[settings.preset], paper_length // experiment.length_divisor(settings.preset)
    fields: dict[str, Any] = {"train.seed": seed, "data.seed": seed}
    if task:
        fields |= preset.on_tasks.overrides | experiment.overrides
        argument = f"task={task},{METHODS[method]}"
        return Run(model, "", train_length, preset.on_tasks.lengths, seed, "che.py", argument, fields)
    if experiment.step_batch is not None:
        fields["train.batch_size"] = experiment.step_batch
    elif preset.batch is not None:
        of_experiment = experiment.step_tokens and experiment.step_tokens // paper_length
        fields["train.batch_size"] = of_experiment or preset.batch
    elif preset.step_tokens is not None:
        fields["train.batch_size"] = preset.step_tokens // train_length
    size, data = preset.sizes[paper_size], settings.data or preset.data
    if "-rate" in method:
        factor = RATES[method[method.index("-rate") :]]
        fields["optimizer.learning_rate"] = factor * read_module(RECIPES / preset.recipe).LEARNING_RATES[size]
    fields |= preset.overrides | experiment.overrides | OVERRIDES.get(method, {})
    fields |= {"data.path": data} if data else {}
    # If train lengths are compared, every model is evaluated from the shortest of them.
    shortest = min(experiment.train_lengths) if experiment.step_tokens else paper_length
    lengths = tuple(length // preset.length_divisor for length in lengths_from(shortest, experiment.longest))
    argument = f"{size},{METHODS[method]},train_length={train_length}"
    return Run(model, size, train_length, lengths, seed, preset.recipe, argument, fields)


def config_of(run: Run) -> dict[str, Any]:
    """Return a run's config as a nested dict, the input of `training.loop.train`.

    Blocks of rows and batches of `small.py` fit the cache of a CPU core. On other devices they are larger, as every
    block launches the same kernels: results change by rounding.

    Raises:
        InputError: the recipe is missing, or rejects its argument.
    """
    config = read_module(RECIPES / run.recipe).get_config(run.argument)
    if run.recipe == "small.py" and device_platform() != "cpu":
        config.model.attention = choose("attention", "auto")
        config.evaluation.update(block_size=256, batch_tokens=32768)
    config.lock()  # so that an override of an unknown field raises an error
    config.update_from_flattened_dict(run.overrides)
    return follow_corpus(config.to_dict())


def train_command(run: Run) -> str:
    """Return the command that trains a run manually."""
    flags = [f"--config.{field}={value}" for field, value in run.overrides.items()]
    return " ".join(["python train.py", f"--config=configs/{run.recipe}:{run.argument}", *flags])


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Run with its metric, config, the digest of its data, and its group in `runs.py`."""

    run: Run
    metric: str
    config: RunConfig | TaskRunConfig
    data_digest: str
    group: str

    def identity(self, *, seeds: bool = True) -> str:
        """Return the digest of all that determines the results; see `runs.identity`."""
        return identity(self.config, self.data_digest, self.metric, self.run.lengths, seeds=seeds)

    def content(self, results: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the run's line: what was run, the results, and their provenance."""
        run, (method, paper_size, task, paper_length) = self.run, self.run.model
        of_text = {"paper_size": paper_size, "size": run.size, "paper_train_length": paper_length}
        about = {"key": self.identity(), "data": self.data_digest, "method": method}
        about |= {"task": task} if task else of_text
        about |= {"train_length": run.train_length, "seed": run.seed, "metric": self.metric}
        about |= {"train_command": train_command(run), "wall_seconds": round(seconds, 1)}
        return about | results | provenance("flax", "optax") | {"config": resolved(self.config)}


def plan_runs(name: str, settings: Settings) -> list[PlannedRun]:
    """Return the runs of an experiment with their configs; see `run_experiment`."""
    experiment = EXPERIMENTS[name]
    runs = runs_of(experiment, settings)
    data = "" if experiment.tasks else settings.data or PRESETS[settings.preset].data
    allowed = f"must be the text to train on; the preset {settings.preset!r} has no default"
    require(bool(experiment.tasks or data), "--data", settings.data, allowed)
    configs = [read_run(config_of(run)) for run in runs]
    # The digest of a text, or of a task's strings, must be the same for every seed.
    unseeded = [dataclasses.replace(config.data, seed=0) for config in configs]
    digests = {
        each: load_corpora(each).digest if isinstance(each, DataConfig) else tapes.digest(each)
        for each in set(unseeded)
    }
    group = settings.preset if experiment.tasks else f"{settings.preset}-{Path(data).name}"
    return [
        PlannedRun(run, experiment.metric, config, digests[each], group)
        for run, config, each in zip(runs, configs, unseeded, strict=True)
    ]


def run_experiment(name: str, settings: Settings) -> list[PlannedRun]:
    """Run the unfinished runs of an experiment and return all its runs.

    Raises:
        InputError: the input is invalid; raised before any device is used.
    """
    planned, results, workdirs = plan_runs(name, settings), Path(settings.results), Path(settings.workdirs)
    make_results_directory(results, "--results")
    with exclusive_lock(results / name, "--results", ".lock"), exclusive_lock(workdirs, "--workdirs", ".lock"):
        stored = read_runs(results)
        own = stored[name].get(planned[0].group, {})
        _check_existing(planned, own)
        needed = {(item.data_digest, item.metric) for item in planned}
        every = [run for groups in stored.values() for runs in groups.values() for run in runs.values()]
        finished = {identity_of_stored(run): run for run in every if (run["data"], run["metric"]) in needed}
        unfinished = []
        for item in (item for item in planned if item.run.name not in own):
            if item.identity() in finished:  # of another experiment
                add_run(results, name, item.group, item.run.name, finished[item.identity()])
            else:
                unfinished.append(item)
        logger.info("%s: %d runs, %d of them finished", name, len(planned), len(planned) - len(unfinished))
        is_timed, batches = planned[0].metric == "step_ms", [[item] for item in unfinished]
        if is_timed:  # together for the models of one size and seed, or they are not comparable
            by_size = itertools.groupby(planned, lambda item: (item.run.seed, item.run.size))
            batches = [batch for batch in (list(items) for _, items in by_size) if any(x in unfinished for x in batch)]
        for number, batch in enumerate(batches, 1):
            logger.info("%s: run %d of %d: %s", name, number, len(batches), ", ".join(item.run.name for item in batch))
            started = time.monotonic()
            found = step_milliseconds(batch) if is_timed else [train_and_evaluate(item, workdirs) for item in batch]
            seconds_each = (time.monotonic() - started) / len(batch)
            for item, of_item in zip(batch, found, strict=True):
                add_run(results, name, item.group, item.run.name, item.content(of_item, seconds_each))
    return planned


def _check_existing(planned: list[PlannedRun], own: dict[str, dict[str, Any]]) -> None:
    """Raise `InputError` if stored runs of a model, also with other seeds, are of another text or config."""
    expected = {item.run.name.rpartition("-seed")[0]: item.identity(seeds=False) for item in planned}
    for name, found in own.items():
        model = name.rpartition("-seed")[0]
        same = model not in expected or identity_of_stored(found, seeds=False) == expected[model]
        require(same, name, found["key"], "is a stored run with another config or text; choose another --results")


def train_and_evaluate(item: PlannedRun, workdirs: Path) -> dict[str, Any]:
    """Return the results of a model at the run's lengths, its FLOPs, and its training curve.

    The curve is the validation loss by step, in nats, and the median time of a step. Their product is the loss by
    training time, without compilation, validation and checkpoints.
    """
    lengths, config, found = item.run.lengths, item.config, dict[str, Any]()
    workdir = workdirs / identity(config, item.data_digest, "", ())[:16]  # of all that determines the model
    train(resolved(config), workdir)
    if isinstance(config, TaskRunConfig):
        stem, options = "accuracy", Options(lengths=lengths, num_sequences=config.evaluation.num_sequences)
        evaluate_tasks([workdir], options, output=workdir)
    else:
        stem, sizes = "delta" if item.metric == "delta" else "lengths", config.train
        evaluate([workdir], Options(lengths=lengths, protocol=item.metric), output=workdir)
        per_token = model_flops_per_token(config.model, sizes.train_length, sizes.batch_size)
        found["train_flops"] = per_token * sizes.train_length * sizes.batch_size * sizes.num_steps
    (results,) = read_json(workdir / f"{stem}.json")["runs"]
    scalars = read_metrics(workdir)
    return {field: results[field] for field in ("documents", "lengths", "deltas") if field in results} | {
        **found,
        "validation_nats": {str(step): nats for step, nats in scalars["validation/loss_nats"].items()},
        "train_step_ms": 1000 * statistics.median(scalars["train/step_seconds"].values()),
    }


def step_milliseconds(batch: list[PlannedRun]) -> list[dict[str, Any]]:
    """Return the times of each model's steps on random tokens, measured in turns, and their median."""
    from benchmarks.step import Step  # imports settings of memory on a GPU, which are not those of training

    steps = [Step(item.config) for item in batch if isinstance(item.config, RunConfig)]
    with tqdm(total=TIMED_STEPS * len(steps), desc="timing", unit="step") as bar:
        for _, step in itertools.product(range(TIMED_STEPS), steps):
            step.take_turn(1, bar)
    times = [[1000 * seconds for seconds in step.seconds] for step in steps]
    return [{"step_ms": statistics.median(each), "step_ms_each": each} for each in times]
