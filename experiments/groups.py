"""Finished runs and the paper's numbers, by experiment. In: files written by `run.py`. Next: `report.py`.

Sizes and lengths of `Series`, like those of claims, are the paper's.
"""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dape_jax.errors import InputError, require
from experiments.catalogue import (
    EXPERIMENTS,
    NOT_IN_PAPER,
    PRESETS,
    Cell,
    Model,
    Score,
    length_divisor,
    models_of,
    paper_tables,
)
from experiments.run import identity, read_result
from experiments.verdicts import Lookup, Sample, is_log

PROVENANCE = ("commit", "device", "num_devices", "num_cpus", "versions")


@dataclasses.dataclass(frozen=True)
class Series:
    """Results of one model by seed and length. Accuracies are in per cent.

    Sizes and lengths are the paper's; `size` is "" for a task, `task` is "" for a text. `values` and `samples` are by
    seed and length; claims are judged by the samples. For a task, `within` and `beyond` are the means, by seed, over
    lengths up to the train length and over longer ones. `train_flops` is None and `num_steps` is 0 if unknown.
    `seconds` is the time that training and evaluation took, over all seeds. `curves` are the validation
    losses during training in nats, by seed and step.
    """

    method: str
    size: str
    task: str
    train_length: int
    values: dict[int, dict[int, float]]
    within: dict[int, float] = dataclasses.field(default_factory=dict)
    beyond: dict[int, float] = dataclasses.field(default_factory=dict)
    samples: dict[int, dict[int, Sample]] = dataclasses.field(default_factory=dict)
    train_flops: float | None = None
    num_steps: int = 0
    seconds: float = 0.0
    curves: dict[int, dict[int, float]] = dataclasses.field(default_factory=dict)

    def lengths(self) -> list[int]:
        """Return the lengths that have a value."""
        return sorted({length for by_length in self.values.values() for length in by_length})

    def over_seeds(self, length: int) -> list[float]:
        """Return the values at a length."""
        return [by_length[length] for by_length in self.values.values() if length in by_length]


@dataclasses.dataclass(frozen=True)
class Group:
    """Finished runs of an experiment with one preset on one text (`data`) or on the tasks, or the paper's numbers.

    `about` contains commits, devices, versions and times of the runs, and is empty for the paper; `series` has one
    entry per model.
    """

    experiment: str
    preset: str
    data: str
    about: dict[str, list[Any]]
    series: list[Series]

    @property
    def name(self) -> str:
        """Name of the group's directory and stem of its figure."""
        return "-".join(filter(None, (self.preset, self.data)))

    @property
    def title(self) -> str:
        """Title of the group in the report."""
        return ", ".join(filter(None, (self.preset, self.data)))

    @property
    def divisor(self) -> int:
        """Divisor of the paper's lengths in tables and figures."""
        return length_divisor(EXPERIMENTS[self.experiment], self.preset) if self.about else 1

    @property
    def sizes(self) -> dict[str, str]:
        """Names of sizes in tables and figures by the paper's: those of the recipe."""
        return PRESETS[self.preset if self.about else "paper"].sizes

    def lengths(self) -> list[int]:
        """Return the lengths that have a value."""
        return sorted({length for series in self.series for length in series.lengths()})


def lookup_in(group: Group) -> Lookup:
    """Return the function that looks up samples in a group."""

    def lookup(side: Cell | Score) -> dict[int, list[Sample]]:
        if isinstance(side, Cell):
            model = (side.method, side.size, side.train_length)
            found = [item.samples for item in group.series if (item.method, item.size, item.train_length) == model]
            return {seed: [of[side.length]] for by_seed in found for seed, of in by_seed.items() if side.length in of}
        series = [item for item in group.series if item.task == side.task and item.method in side.methods]
        if len(series) < len(side.methods):  # needs the results of all methods
            return {}
        seeds = set.intersection(*(set(item.beyond) for item in series))
        return {seed: [_beyond(item, seed) for item in series] for seed in seeds}

    return lookup


def _beyond(series: Series, seed: int) -> Sample:
    """Return the accuracies at lengths beyond the train length, or their mean if only the mean is known."""
    if seed not in series.values:
        return Sample.of_value(series.beyond[seed])
    chosen = {at: value for at, value in series.values[seed].items() if at > series.train_length}
    return Sample(tuple(chosen), np.array(list(chosen.values()))[:, None])


# ---- results: ours and the paper's


def read_groups(results: Path) -> list[Group]:
    """Return the finished runs under a directory in the catalogue's order.

    Raises:
        InputError: a file is not a results file, or does not match the others in its directory.
    """
    groups = []
    for name, experiment in EXPERIMENTS.items():
        for directory in sorted((results / name).glob("*/")):
            preset, _, data = directory.name.partition("-")
            if preset in PRESETS and (data == "") == bool(experiment.tasks):
                group = _read_group(name, preset, data, sorted(directory.glob("*-seed*.json")))
                groups += [group] if group.series else []
    return groups


def _read_group(name: str, preset: str, data: str, files: list[Path]) -> Group:
    experiment = EXPERIMENTS[name]
    order = models_of(experiment)
    divisor = length_divisor(experiment, preset)
    values: dict[Model, dict[int, dict[int, float]]] = defaultdict(dict)
    samples: dict[Model, dict[int, dict[int, Sample]]] = defaultdict(dict)
    settings: dict[Model, Any] = {}
    training: dict[Model, dict[str, Any]] = {}
    curves: dict[Model, dict[int, dict[int, float]]] = defaultdict(dict)
    digests: dict[str, str] = {}  # digest of the text, or of each task
    runs = []
    for file in files:
        run = read_result(file)
        try:
            if experiment.tasks:
                model = (run["method"], "", run["train_length"], run["task"])
            else:
                model = (run["method"], run["paper_size"], run["paper_train_length"], "")
            if model not in order:  # removed from the catalogue
                continue
            measured = _measured(run, experiment.metric)
            drawn = _samples(run, experiment.metric, measured)
            # Must be equal for all seeds of a model; otherwise their range would not show the effect of the seed alone.
            config = identity(run["config"], experiment.metric)
            setting = {key: section | {"seed": 0} for key, section in config.items()}
            if "validation_nats" in run:
                nats = run["validation_nats"].items()
                curves[model][run["seed"]] = {int(step): float(loss) for step, loss in nats}
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{file}: must be a run that measures {experiment.metric}: {error!r}") from error
        seconds = run["wall_seconds"] + (training[model]["seconds"] if model in training else 0)
        training[model] = {"num_steps": run["config"]["train"]["num_steps"], "seconds": seconds}
        if "train_flops" in run:
            training[model]["train_flops"] = float(run["train_flops"])
        values[model][run["seed"]] = {length * divisor: value for length, value in measured.items()}
        samples[model][run["seed"]] = {length * divisor: sample for length, sample in drawn.items()}
        same_data = run["data"] == digests.setdefault(model[-1], run["data"])
        same_setting = setting == settings.setdefault(model, setting)
        allowed = "must have the text of the other runs and the config of its other seeds"
        require(same_data and same_setting, str(file), run["key"], allowed)
        runs.append(run)
    about = {field: sorted({json.dumps(run[field]) for run in runs}) for field in PROVENANCE}
    about["wall_seconds"] = [run["wall_seconds"] for run in runs]
    if experiment.tasks:
        about["num_steps"] = sorted({run["config"]["train"]["num_steps"] for run in runs})
        about["num_sequences"] = sorted({run["config"]["evaluation"]["num_sequences"] for run in runs})
    series = [
        dataclasses.replace(_series(model, values[model], samples[model]), **training[model], curves=curves[model])
        for model in order
        if model in values
    ]
    return Group(name, preset, data, about, series)


def _measured(run: dict[str, Any], metric: str) -> dict[int, float]:
    if metric == "step_ms":
        return {run["train_length"]: float(run["step_ms"])}
    if metric == "accuracy":
        return {int(result["length"]): 100 * float(result["accuracy"]) for result in run["lengths"]}
    results, field = (run["deltas"], "delta") if metric == "delta" else (run["lengths"], "perplexity")
    return {int(result["length"]): float(result[field]) for result in results}


def _samples(run: dict[str, Any], metric: str, measured: dict[int, float]) -> dict[int, Sample]:
    """Return the sample at each length: one row per window or step, or only the value for files of older versions."""
    if metric in ("perplexity", "delta") and "documents" in run:
        units, rows = tuple(run["documents"]), {}
        for result in run["lengths"]:
            tokens_each = result["num_tokens"] / result["num_windows"]
            rows[int(result["length"])] = np.array([float(nats) for nats in result["window_nats"]]) / tokens_each
        if metric == "perplexity":
            return {length: Sample(units, nats[:, None]) for length, nats in rows.items()}
        local = rows[run["train_length"]]
        return {length: Sample(units, np.stack([local, rows[length]], axis=1)) for length in measured}
    if metric == "step_ms" and "step_ms_each" in run:
        times = np.array(run["step_ms_each"], float)
        return {length: Sample(tuple(range(len(times))), np.log(times)[:, None]) for length in measured}
    return {length: _of_value(value, metric) for length, value in measured.items()}


def _of_value(value: float, metric: str) -> Sample:
    with np.errstate(divide="ignore"):
        return Sample.of_value(float(np.log(value)) if is_log(metric) else value)


def _series(
    model: Model, values: dict[int, dict[int, float]], samples: dict[int, dict[int, Sample]] | None = None
) -> Series:
    method, size, train_length, task = model
    within, beyond = {}, {}
    for seed, by_length in values.items() if task else ():
        for means, is_beyond in ((within, False), (beyond, True)):
            chosen = [value for length, value in by_length.items() if (length > train_length) == is_beyond]
            if chosen:
                means[seed] = fmean(chosen)
    return Series(method, size, task, train_length, values, within, beyond, samples or {})


def paper_groups(name: str) -> list[Group]:
    """Return the paper's numbers of an experiment as runs with one seed, one group per text."""
    experiment, tables = EXPERIMENTS[name], paper_tables()
    if experiment.tasks:
        table = tables["table6"]
        printed = {
            (method, row["task"]): float(accuracy)
            for row in table["tasks"]
            for method, accuracy in zip(table["methods"], row["accuracy"], strict=True)
        }
        series = [
            Series(method, size, task, train_length, {}, beyond={0: printed[method, task]})
            for method, size, train_length, task in models_of(experiment)
            if (method, task) in printed
        ]
        return [Group(name, "paper", "", {}, series)]
    batch = PRESETS["paper"].batch
    assert batch is not None
    found: dict[str, dict[Model, dict[int, float]]] = {"arxiv": defaultdict(dict), "books3": defaultdict(dict)}
    for curve in tables["curves"]:
        # If the paper uses equal tokens per step at all train lengths, only train length 128 has the usual batch size.
        usual = batch * curve["train_length"]
        step_tokens = curve["step_tokens"] if "step_tokens" in curve else usual
        if curve["metric"] == experiment.metric and step_tokens == (experiment.step_tokens or usual):
            model = (curve["method"], curve["size"], curve["train_length"], "")
            found[curve["dataset"]][model] |= {int(length): value for length, value in curve["values"].items()}
    is_printed = not experiment.overrides and experiment.source != NOT_IN_PAPER
    wanted = models_of(experiment) if is_printed else []
    groups = []
    for dataset, curves in found.items():
        series = []
        for model in wanted:
            if model in curves:
                values = curves[model]
                samples = {length: _of_value(value, experiment.metric) for length, value in values.items()}
                series.append(_series(model, {0: values}, {0: samples}))
        groups.append(Group(name, "paper", dataset, {}, series))
    return [group for group in groups if group.series]
