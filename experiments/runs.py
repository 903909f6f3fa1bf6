"""Finished runs: `results/EXPERIMENT/runs.jsonl.zst`, one line per run. In: `run.py`. Next: `report.py`.

    {"group": "small-stdlib", "key": "9a31..", "method": "kerple", ..}    a run: config, results, provenance
    {"group": "small-stdlib", "key": "e336..", "stored_in": "fig2"}       the same run, stored by another experiment

A group is a preset with the name of the text, or the preset alone for algorithmic tasks. A run is recognised by its
`identity`, all that determines its results; its key is a digest of this, in the version that stored it. `Series` and
`Group` are runs by model, and the paper's numbers in the same form. Their sizes and lengths, like those of claims, are
the paper's.
"""

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from dape_jax.config import RESUMABLE_FIELDS, RunConfig, TaskRunConfig, read_run, resolved
from dape_jax.evaluation.report import FIXED_BELOW
from dape_jax.files import json_digest, write_atomically
from dape_jax.storage import read_errors
from experiments.catalogue import EXPERIMENTS
from experiments.methods import NOT_IN_PAPER, PRESETS, Cell, Model, Score, length_divisor, models_of, paper_tables
from experiments.verdicts import Lookup, Sample, is_log

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FILE = "runs.jsonl.zst"
PROVENANCE = ("commit", "device", "num_devices", "num_cpus", "versions")
# Config fields that do not change results: fields that may change when a run resumes, padding of the vocabulary, and
# evaluation fields that affect only performance. The text and the evaluation lengths are separate parts of a run's key.
UNIDENTIFYING_FIELDS = (
    *(field for field in RESUMABLE_FIELDS if field != "evaluation"),
    "model.vocab_multiple",
    *(f"evaluation.{field}" for field in ("lengths", "batch_tokens", "blockwise_from", "block_size")),
)

Run = dict[str, Any]


def identity(
    config: RunConfig | TaskRunConfig, data: str, metric: str, lengths: Sequence[int], *, seeds: bool = True
) -> str:
    """Return a digest of all that determines a run's results; for step times, of the complete config.

    Args:
        config: config of the run.
        data: digest of the text, or of the task's strings.
        metric: metric of the experiment.
        lengths: evaluation lengths.
        seeds: whether the digest depends on the seeds.
    """
    fields = {
        field: value
        for field, value in flatten_dict(resolved(config), keep_empty_nodes=False, sep=".").items()
        if (metric == "step_ms" or not any(f"{field}.".startswith(f"{name}.") for name in UNIDENTIFYING_FIELDS))
        and (seeds or not field.endswith(".seed"))
    }
    return json_digest([fields, data, metric, [] if metric == "step_ms" else list(lengths)])


def identity_of_stored(run: Run, *, seeds: bool = True) -> str:
    """Return the identity of a stored run. Config fields that its version did not have are the defaults of today's."""
    config = read_run(run["config"])
    lengths = [result["length"] for result in run["lengths"]] if "lengths" in run else []
    return identity(config, run["data"], run["metric"], lengths, seeds=seeds)


def run_name(run: Run) -> str:
    """Return the name of a run, unique in its group, as in "kerple-xs-T32-seed0" or "kerple-even_pairs-seed0"."""
    model = run["task"] if "task" in run else f"{run['size']}-T{run['train_length']}"
    return f"{run['method']}-{model}-seed{run['seed']}"


def read_lines(file: Path) -> list[Run]:
    """Return the lines of a compressed file of JSON lines; none if it does not exist."""
    with read_errors("results", str(file)):
        return [json.loads(line) for line in zstd.decompress(file.read_bytes()).splitlines()] if file.exists() else []


def write_lines(file: Path, lines: list[Run]) -> None:
    """Write a compressed file of JSON lines atomically."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_atomically(file, zstd.compress(text.encode(), level=19))


def read_runs(results: Path) -> dict[str, dict[str, dict[str, Run]]]:
    """Return the finished runs under a directory, by experiment, group and name.

    Raises:
        InputError: a file is damaged.
    """
    lines = [(name, line) for name in EXPERIMENTS for line in read_lines(results / name / FILE)]
    stored = {(name, line["key"]): line for name, line in lines if "stored_in" not in line}
    found: dict[str, dict[str, dict[str, Run]]] = {name: {} for name in EXPERIMENTS}
    for name, line in lines:
        whole = stored[line["stored_in"] if "stored_in" in line else name, line["key"]]
        run = {field: value for field, value in whole.items() if field not in ("group", "name")}
        found[name].setdefault(line["group"], {})[line["name"]] = run
    return found


def add_run(results: Path, experiment: str, group: str, run: Run) -> None:
    """Add a run to an experiment's file, by its key alone if it is stored already, in place of one with its name."""
    place = {"group": group, "name": run_name(run)}
    line, kept = place | run, []
    for name in EXPERIMENTS:
        lines = read_lines(results / name / FILE)
        if name == experiment:
            kept = lines = [each for each in lines if (each["group"], each["name"]) != (group, place["name"])]
        if any({**each, **place} == place | run for each in lines):
            line = {**place, "key": run["key"], "stored_in": name}
    (results / experiment).mkdir(parents=True, exist_ok=True)
    write_lines(results / experiment / FILE, sorted([*kept, line], key=lambda each: (each["group"], each["name"])))


# ---- runs by model


@dataclasses.dataclass(frozen=True)
class Series:
    """Results of one model by seed and length. Accuracies are in per cent.

    `size` is "" for a task, `task` is "" for a text. Claims are judged by the samples. For a task, `within` and
    `beyond` are the means, by seed, over lengths up to the train length and over longer ones. `train_flops` is None and
    `num_steps` is 0 if unknown. `seconds` is the time that training and evaluation took, over all seeds.
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

    @property
    def lengths(self) -> list[int]:
        """Lengths that have a value."""
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
        """Name of the group in files."""
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

    @property
    def lengths(self) -> list[int]:
        """Lengths that have a value."""
        return sorted({length for series in self.series for length in series.lengths})


def read_groups(results: Path) -> list[Group]:
    """Return the finished runs under a directory in the catalogue's order."""
    groups = [_group(name, *each) for name, of_name in read_runs(results).items() for each in sorted(of_name.items())]
    return [group for group in groups if group.series]


def _group(name: str, group: str, runs: dict[str, Run]) -> Group:
    preset, _, data = group.partition("-")
    experiment, divisor = EXPERIMENTS[name], length_divisor(EXPERIMENTS[name], preset)
    order, by_model, about = models_of(experiment), defaultdict[Model, list[Run]](list), []
    for run in runs.values():
        length = run["train_length"] if experiment.tasks else run["paper_train_length"]
        model: Model = (run["method"], run.get("paper_size", ""), length, run.get("task", ""))
        if model in order:  # else removed from the catalogue
            by_model[model].append(run)
            about.append(run)
    series = []
    for model in (model for model in order if model in by_model):
        values: dict[int, dict[int, float]] = {}
        samples: dict[int, dict[int, Sample]] = {}
        for run in by_model[model]:
            found = measured(run, experiment.metric)
            values[run["seed"]] = {at * divisor: value for at, value in found.items()}
            of_run = samples_of(run, experiment.metric, found)
            samples[run["seed"]] = {at * divisor: sample for at, sample in of_run.items()}
        last, seconds = by_model[model][-1], sum(run["wall_seconds"] for run in by_model[model])
        more = {"train_flops": last.get("train_flops"), "num_steps": last["config"]["train"]["num_steps"]}
        series.append(dataclasses.replace(_series(model, values, samples), seconds=seconds, **more))
    facts = {field: sorted({json.dumps(run[field]) for run in about}) for field in PROVENANCE}
    facts["wall_seconds"] = [run["wall_seconds"] for run in about]
    if experiment.tasks:
        facts["num_steps"] = sorted({run["config"]["train"]["num_steps"] for run in about})
        facts["num_sequences"] = sorted({run["config"]["evaluation"]["num_sequences"] for run in about})
    return Group(name, preset, data, facts, series)


def measured(run: Run, metric: str) -> dict[int, float]:
    """Return what a run measures, by length."""
    if metric == "step_ms":
        return {run["train_length"]: float(run["step_ms"])}
    if metric == "accuracy":
        return {int(result["length"]): 100 * float(result["accuracy"]) for result in run["lengths"]}
    results, field = (run["deltas"], "delta") if metric == "delta" else (run["lengths"], "perplexity")
    return {int(result["length"]): float(result[field]) for result in results}


def samples_of(run: Run, metric: str, values: dict[int, float]) -> dict[int, Sample]:
    """Return the sample at each length: one row per window or step, or only the value for files of older versions."""
    if metric in ("perplexity", "delta") and "documents" in run:
        units, rows = tuple(run["documents"]), {}
        for result in run["lengths"]:
            tokens_each = result["num_tokens"] / result["num_windows"]
            rows[int(result["length"])] = np.array([float(nats) for nats in result["window_nats"]]) / tokens_each
        if metric == "perplexity":
            return {length: Sample(units, nats[:, None]) for length, nats in rows.items()}
        local = rows[run["train_length"]]
        return {length: Sample(units, np.stack([local, rows[length]], axis=1)) for length in values}
    if metric == "step_ms" and "step_ms_each" in run:
        times = np.array(run["step_ms_each"], float)
        return {length: Sample(tuple(range(len(times))), np.log(times)[:, None]) for length in values}
    return {length: _of_value(value, metric) for length, value in values.items()}


def mean_of(values: Sequence[float]) -> float:
    """Return the mean; infinity or NaN where `fmean` would raise: for infinities, or sums too large for a float."""
    return fmean(values) if max(map(abs, values)) < FIXED_BELOW else sum(values) / len(values)


def _of_value(value: float, metric: str) -> Sample:
    with np.errstate(divide="ignore"):
        return Sample.of_value(float(np.log(value)) if is_log(metric) else value)


def _series(
    model: Model, values: dict[int, dict[int, float]], samples: dict[int, dict[int, Sample]] | None = None
) -> Series:
    method, size, train_length, task = model
    means: dict[bool, dict[int, float]] = {False: {}, True: {}}  # of lengths beyond the train length, or not
    for seed, by_length in values.items() if task else ():
        for is_beyond, of_seed in means.items():
            if chosen := [value for length, value in by_length.items() if (length > train_length) == is_beyond]:
                of_seed[seed] = fmean(chosen)
    return Series(method, size, task, train_length, values, means[False], means[True], samples or {})


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
    if experiment.overrides or experiment.source == NOT_IN_PAPER:
        return []
    batch = PRESETS["paper"].batch
    assert batch is not None
    curves: dict[str, dict[Model, dict[int, float]]] = {"arxiv": defaultdict(dict), "books3": defaultdict(dict)}
    for curve in tables["curves"]:
        # If the paper uses equal tokens per step at all train lengths, only train length 128 has the usual batch size.
        usual = batch * curve["train_length"]
        step_tokens = curve["step_tokens"] if "step_tokens" in curve else usual
        if curve["metric"] == experiment.metric and step_tokens == (experiment.step_tokens or usual):
            model = (curve["method"], curve["size"], curve["train_length"], "")
            curves[curve["dataset"]][model] |= {int(length): value for length, value in curve["values"].items()}
    groups = []
    for text, of_text in curves.items():
        series = [
            _series(model, {0: values}, {0: {at: _of_value(value, experiment.metric) for at, value in values.items()}})
            for model in models_of(experiment)
            if (values := of_text.get(model))
        ]
        groups += [Group(name, "paper", text, {}, series)] if series else []
    return groups
