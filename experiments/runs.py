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
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dape_jax.config import RESUMABLE_FIELDS, RunConfig, TaskRunConfig, read_run
from dape_jax.errors import require
from dape_jax.evaluation.report import FIXED_BELOW
from dape_jax.evaluation.trained import fields_without
from dape_jax.files import json_digest, write_atomically
from dape_jax.storage import read_errors
from experiments.catalogue import EXPERIMENTS
from experiments.claims import NOT_IN_PAPER, Model, Result
from experiments.methods import PRESETS
from experiments.paper import paper_tables
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
    is_time = metric == "step_ms"
    fields = fields_without(config, () if is_time else UNIDENTIFYING_FIELDS, seeds=seeds)
    return json_digest([fields, data, metric, [] if is_time else list(lengths)])


def identity_of_stored(run: Run, *, seeds: bool = True) -> str:
    """Return the identity of a stored run. Config fields that its version did not have are the defaults of today's."""
    config = read_run(run["config"])
    lengths = [result["length"] for result in run["lengths"]] if "lengths" in run else []
    return identity(config, run["data"], run["metric"], lengths, seeds=seeds)


def read_lines(file: Path) -> list[Run]:
    """Return the lines of a compressed file of JSON lines; none if it does not exist."""
    with read_errors("--results", str(file)):
        return [json.loads(line) for line in zstd.decompress(file.read_bytes()).splitlines()] if file.exists() else []


def write_lines(file: Path, lines: list[Run]) -> None:
    """Write a compressed file of JSON lines atomically."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_atomically(file, zstd.compress(text.encode(), level=19))


def read_runs(results: Path) -> dict[str, dict[str, dict[str, Run]]]:
    """Return the finished runs under a directory, by experiment, group and name.

    Raises:
        InputError: a file is damaged, or a run is stored by an experiment whose file is missing.
    """
    lines = [(name, line) for name in EXPERIMENTS for line in read_lines(results / name / FILE)]
    stored = {(name, line["key"]): line for name, line in lines if "stored_in" not in line}
    found: dict[str, dict[str, dict[str, Run]]] = {name: {} for name in EXPERIMENTS}
    for name, line in lines:
        place = line.get("stored_in", name), line["key"]
        allowed = f"must be in {results / place[0] / FILE}; restore that file, or choose another --results"
        require(place in stored, f"run of {results / name / FILE}", line["name"], allowed)
        run = {field: value for field, value in stored[place].items() if field not in ("group", "name")}
        found[name].setdefault(line["group"], {})[line["name"]] = run
    return found


def add_run(results: Path, experiment: str, group: str, name: str, run: Run) -> None:
    """Add a run to an experiment's file, by its key alone if it is stored already, in place of one with its name."""
    place = {"group": group, "name": name}
    line, kept = place | run, []
    for other in EXPERIMENTS:
        lines = read_lines(results / other / FILE)
        if other == experiment:
            kept = lines = [each for each in lines if (each["group"], each["name"]) != (group, name)]
        if any(each | place == place | run for each in lines):
            line = {**place, "key": run["key"], "stored_in": other}
    (results / experiment).mkdir(parents=True, exist_ok=True)
    write_lines(results / experiment / FILE, sorted([*kept, line], key=lambda each: (each["group"], each["name"])))


# ---- runs by model


@dataclasses.dataclass(frozen=True)
class Series:
    """Results of one model by seed and length. Accuracies are in per cent.

    Claims are judged by the samples, by seed and by the length of a `claims.Result`. `train_flops` is None and
    `num_steps` is 0 if unknown. `seconds` is the time that training and evaluation took, over all seeds.
    """

    model: Model
    values: dict[int, dict[int, float]]
    samples: dict[int, dict[int | None, Sample]]
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

    def means(self, *, beyond: bool) -> dict[int, float]:
        """Return the mean by seed of the values at lengths above the train length, or at the others."""
        chosen = {
            seed: [value for length, value in of_seed.items() if (length > self.model.train_length) == beyond]
            for seed, of_seed in self.values.items()
        }
        return {seed: fmean(values) for seed, values in chosen.items() if values}


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
        return EXPERIMENTS[self.experiment].length_divisor(self.preset)

    @property
    def sizes(self) -> dict[str, str]:
        """Names of sizes in tables and figures by the paper's: those of the recipe."""
        return PRESETS[self.preset].sizes

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
    experiment, divisor = EXPERIMENTS[name], EXPERIMENTS[name].length_divisor(preset)
    by_model, stored = defaultdict[Model, list[Run]](list), runs.values()
    for run in stored:
        length = run["train_length"] if experiment.tasks else run["paper_train_length"]
        by_model[Model(run["method"], run.get("paper_size", ""), run.get("task", ""), length)].append(run)
    series = []
    for model in (model for model in experiment.models if model in by_model):
        of_model = by_model[model]
        results = {run["seed"]: measured(run, experiment.metric, divisor) for run in of_model}
        values = {seed: found for seed, (found, _) in results.items()}
        samples = {seed: found for seed, (_, found) in results.items()}
        flops, num_steps = of_model[-1].get("train_flops"), of_model[-1]["config"]["train"]["num_steps"]
        series.append(Series(model, values, samples, flops, num_steps, sum(run["wall_seconds"] for run in of_model)))
    facts: dict[str, list[Any]] = {field: sorted({json.dumps(run[field]) for run in stored}) for field in PROVENANCE}
    facts["wall_seconds"] = [run["wall_seconds"] for run in stored]
    if experiment.tasks:
        facts["num_steps"] = sorted({run["config"]["train"]["num_steps"] for run in stored})
        facts["num_sequences"] = sorted({run["config"]["evaluation"]["num_sequences"] for run in stored})
    return Group(name, preset, data, facts, series)


def measured(run: Run, metric: str, divisor: int) -> tuple[dict[int, float], dict[int | None, Sample]]:
    """Return the results of a run by the paper's length, and their samples: a row for each window, step or length."""
    if metric == "step_ms":
        times, at = np.array(run["step_ms_each"], float), divisor * run["train_length"]
        return {at: float(run["step_ms"])}, {at: Sample(tuple(range(len(times))), np.log(times)[:, None])}
    if metric == "accuracy":
        values = {result["length"]: 100 * result["accuracy"] for result in run["lengths"]}
        beyond = {at: value for at, value in values.items() if at > run["train_length"]}
        return values, {None: Sample(tuple(beyond), np.array(list(beyond.values()))[:, None])} if beyond else {}
    units, rows = tuple(run["documents"]), dict[int, np.ndarray]()
    for result in run["lengths"]:
        tokens_each = result["num_tokens"] / result["num_windows"]
        rows[result["length"]] = np.array([float(nats) for nats in result["window_nats"]]) / tokens_each
    if metric == "perplexity":
        values = {divisor * result["length"]: float(result["perplexity"]) for result in run["lengths"]}
        return values, {divisor * length: Sample(units, nats[:, None]) for length, nats in rows.items()}
    values = {divisor * result["length"]: float(result["delta"]) for result in run["deltas"]}
    local = rows[run["train_length"]]
    return values, {at: Sample(units, np.stack([local, rows[at // divisor]], axis=1)) for at in values}


def mean_of(values: Sequence[float]) -> float:
    """Return the mean; infinity or NaN where `fmean` would raise: for infinities, or sums too large for a float."""
    return fmean(values) if max(map(abs, values)) < FIXED_BELOW else sum(values) / len(values)


def lookup_in(group: Group) -> Lookup:
    """Return the function that looks up samples in a group."""
    by_model = {series.model: series.samples for series in group.series}

    def lookup(result: Result) -> dict[int, list[Sample]]:
        samples = [by_model[model] if model in by_model else {} for model in result.models]
        seeds = set.intersection(*({seed for seed, of in each.items() if result.length in of} for each in samples))
        return {seed: [each[seed][result.length] for each in samples] for seed in seeds}

    return lookup


def paper_groups(name: str) -> list[Group]:
    """Return the paper's numbers of an experiment as runs with one seed, one group per text.

    It prints the mean accuracy on a task beyond the train length, which is the only value of the task's series.
    """
    experiment, tables, batch = EXPERIMENTS[name], paper_tables(), PRESETS["paper"].batch
    if experiment.overrides or experiment.source == NOT_IN_PAPER:
        return []
    curves = defaultdict[str, dict[Model, dict[int, float]]](lambda: defaultdict(dict))
    table6, longest = tables["table6"], max(PRESETS["paper"].on_tasks.lengths)
    for row in table6["tasks"] if experiment.tasks else ():
        for method, accuracy in zip(table6["methods"], row["accuracy"], strict=True):
            curves[""][Model(method, "", row["task"], experiment.train_lengths[0])] = {longest: accuracy}
    assert batch is not None
    for curve in tables["curves"]:
        # If the paper uses equal tokens per step at all train lengths, only train length 128 has the usual batch size.
        usual = batch * curve["train_length"]
        step_tokens = curve["step_tokens"] if "step_tokens" in curve else usual
        if curve["metric"] == experiment.metric and step_tokens == (experiment.step_tokens or usual):
            model = Model(curve["method"], curve["size"], "", curve["train_length"])
            curves[curve["dataset"]][model] |= {int(length): value for length, value in curve["values"].items()}
    groups = []
    for text, of_text in sorted(curves.items()):
        series = []
        for model in (model for model in experiment.models if model in of_text):
            samples = {
                None if model.task else at: Sample.of_value(math.log(value) if is_log(experiment.metric) else value)
                for at, value in of_text[model].items()
            }
            series.append(Series(model, {0: of_text[model]}, {0: samples}))
        groups += [Group(name, "paper", text, {}, series)] if series else []
    return groups
