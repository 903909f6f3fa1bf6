"""`PROTOCOLS`, the questions that evaluations of language models answer; and the reports of all evaluations.

A row says which tokens are scored at which lengths, and makes the result of one model, the difference of two, and the
table and figure of all. Appendix A of the paper measures the gain from the context before the last T_train tokens
("delta"): their perplexity given only those tokens, minus their perplexity given all N (equation 6). The first is the
perplexity at length T_train with all targets scored, because sequences of all lengths end at the same places.

Reports show methods in place of runs: means over runs whose configs differ only in seeds, and paired differences from a
baseline. All runs have the same windows, or the same strings, so that their differences are taken window by window, or
length by length.

To add a protocol, add a row. Next: `perplexity.py`, `accuracy.py`.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dape_jax.errors import printable, require
from dape_jax.evaluation import report, statistics
from dape_jax.evaluation.config import EvaluationConfig
from dape_jax.evaluation.figures import accuracy_table, delta_table, perplexity_table, positions_table
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.report import ReportPaths, Results, Table
from dape_jax.evaluation.statistics import Documents, Interval, NllByLength, Scores, Statistic, over_seeds
from dape_jax.storage import read_errors

Run = dict[str, Any]
# Fields that the results of benchmarks, of tasks or of earlier versions do not have.
ABSENT = {"rotary": "rope", "seed": None, "task": "", "workdir": None}
Difference = tuple[str, Statistic, list[Run]]  # name in a report, statistic, and what identifies each of its values


# ---- methods


class Method(NamedTuple):
    """Runs of one method, with the names that --baseline and --labels take and the label that is shown."""

    name: str
    names: set[str]  # also of its runs
    label: str
    task: str
    runs: list[Run]


def methods_of(runs: Results, options: Options) -> list[Method]:
    """Return the runs by method, each run alone without --group_seeds.

    Raises:
        InputError: --baseline or --labels names no run, there is only the baseline, or two methods have one label.
    """
    grouped, repeated = dict[Any, list[Run]](), Counter[Any]()
    for number, run in enumerate(runs):
        known = ABSENT | {"config": run["name"]} | run
        same = known["config"], known["task"], known["rotary"]
        repeated[same, known["seed"]] += 1  # runs of one seed are not one method: their seeds are no sample
        key = (same, repeated[same, known["seed"]]) if options.group_seeds else number
        grouped.setdefault(key, []).append(run)
    labels = [label.split("=", 1) for label in options.labels]
    shared = [(_common_name(group), (ABSENT | group[0])["task"]) for group in grouped.values()]
    methods = []
    for group, (name, task) in zip(grouped.values(), shared, strict=True):
        first, *others = group
        if others and (not name or shared.count((name, task)) > 1):
            name = f"{first['name']} and {len(others)} more"
        known = {name}.union(*map(_names_of, group))
        given = list(dict.fromkeys(label for each, label in labels if each in known))
        advice = f"must be one for all runs of {name}; --group_seeds=no makes a method of each run"
        require(len(given) <= 1, "--labels", given, advice)
        # Escaped where it is not UTF-8, as the files and figures are.
        label = printable(given[0] if given else name)
        methods.append(Method(name, known, label, task, group))
    names = dict.fromkeys([*sorted(run["name"] for run in runs), *(method.name for method in methods)])
    asked = [("--labels", each) for each, _ in labels] + [("--baseline", options.baseline)] * bool(options.baseline)
    for field, each in asked:
        is_known = any(each in method.names for method in methods)
        require(is_known, field, each, f"must be one of the runs {', '.join(names)}")
    advice = "needs another method to compare; --group_seeds=no makes one of each run"
    require(options.baseline is None or len(methods) > 1, "--baseline", options.baseline, advice)
    shown = [(method.label, method.task) for method in methods]
    require(len(set(shown)) == len(shown), "--labels", [label for label, _ in shown], "must be different names")
    return methods


def _names_of(run: Run) -> set[str]:
    """Return the names of a run: the one in the table and, of a run as trained, its directory."""
    known = ABSENT | run
    has_directory = known["workdir"] is not None and known["rotary"] == "rope"
    return {run["name"], *([run["workdir"], f"{run['workdir']}/"] if has_directory else [])}


def _common_name(runs: list[Run]) -> str:
    """Return the name of the runs without their seeds: kerple of kerple-seed0 and kerple-seed1, or of kerple/0 .. 9.

    Where all of a name is a seed, it is that of the directory above, if they share it, or else "".
    """
    names = [run["name"] for run in runs]
    suffix, common = "".join(re.findall(r"\+(?:pi|ntk|yarn)$", names[0])), list[str]()  # of a rotary variant
    for parts in map(set, zip(*(name.removesuffix(suffix).split("/") for name in names), strict=False)):
        if len(parts) > 1:  # common is what precedes the number of the seed
            parts = {re.sub(r"[-_. ]*(seed[-_. ]*)?\d+$", "", part) for part in parts}
        common += parts if len(parts) == 1 else []
    above = {epath.Path((ABSENT | run)["workdir"] or "").parent.name for run in runs}
    name = above.pop() if common == [""] and len(above) == 1 else "/".join(filter(None, common))
    if len(runs) == 1:
        return names[0]
    return name + suffix if name else ""


def _pairs(runs: list[Run], others: list[Run]) -> tuple[list[Run], list[Run]]:
    """Return the runs of two methods in pairs with equal seeds, or else in the given order."""
    by_seed = {run["seed"]: run for run in others if "seed" in run}
    same = [run for run in runs if "seed" in run and run["seed"] in by_seed]
    num = min(len(runs), len(others))
    return (same, [by_seed[run["seed"]] for run in same]) if same else (runs[:num], others[:num])


def _named(name: str, interval: Interval) -> Run:
    return {name: interval.value, "low": interval.low, "high": interval.high}


# ---- losses


def saved_scores(runs: Sequence[Run]) -> Scores:
    """Return the scores of the runs of a method from their results."""
    of_runs = [run["positions"]["bins"] if "positions" in run else run["lengths"] for run in runs]
    allowed = "must be evaluated again to be compared: the losses of its windows are not in the file"
    has_windows = all("window_nats" in each for of_run in of_runs for each in of_run)
    require(has_windows, "positions", [run["name"] for run in runs], allowed)
    nats = np.array([[each["window_nats"] for each in of_run] for of_run in of_runs]).swapaxes(1, 2)
    first, num_windows = of_runs[0], nats.shape[1]
    tokens = [
        each["window_tokens"] if "window_tokens" in each else [each["num_tokens"] // num_windows] * num_windows
        for each in first
    ]
    places = [each["last"] if "last" in each else each["length"] for each in first]
    num_bytes = [each["num_bytes"] for each in first if "num_bytes" in each] or None
    return Scores(np.array(runs[0]["documents"]), places, nats, np.array(tokens).T, num_bytes)


def loss_by_length(places: list[int], train_length: int) -> Difference:
    """Compare the loss at every length."""
    return "nats", np.divide, [{"length": length} for length in places]


def gain_by_length(places: list[int], train_length: int) -> Difference:
    """Compare the gain from context at every length after the first."""
    return "delta", statistics.gains, [{"length": length} for length in places[1:]]


def loss_by_position(places: list[int], train_length: int) -> Difference:
    """Compare the smoothed loss at every bin, around the train length and in the last octave."""
    means = [{"mean": "reference_nats"}, {"mean": "last_octave_nats"}]
    return "nats", statistics.levels(places, train_length), [*({"last": end} for end in places), *means]


# ---- accuracies


def mean_accuracies(runs: list[Run]) -> Run:
    """Return the means over seeds; an interval adds Student's over seeds and Wilson's over strings in quadrature."""
    import scipy.stats  # imported here, because it takes half a second

    lengths, t = [], scipy.stats.t.ppf(0.975, len(runs) - 1)
    for at, first in enumerate(runs[0]["lengths"]):
        of_seeds = [run["lengths"][at] for run in runs]
        values = np.array([each["accuracy"] for each in of_seeds])
        over_seeds, mean = t * values.std(ddof=1) / math.sqrt(len(runs)), float(values.mean())
        low, high = (
            math.hypot(over_seeds, np.mean([each["accuracy"] - each[end] for each in of_seeds]))
            for end in ("low", "high")
        )
        lengths.append(first | {"accuracy": mean, "low": max(0.0, mean - low), "high": min(1.0, mean + high)})
    means = {
        part: None if runs[0][part] is None else float(np.mean([run[part] for run in runs]))
        for part in ("trained", "score")
    }
    return {"lengths": lengths} | means


def accuracy_differences(runs: list[Run], others: list[Run]) -> list[Run]:
    """Return the differences of the mean accuracies; the lengths take the place of documents in the bootstrap."""
    ours, theirs = (
        np.array([[[each["accuracy"]] for each in run["lengths"]] for run in side]) for side in (runs, others)
    )
    is_beyond = np.array([each["length"] > runs[0]["train_length"] for each in runs[0]["lengths"]])
    differences = []
    for part, chosen in (("trained", ~is_beyond), ("score", is_beyond)):
        if chosen.any():
            units = np.arange(chosen.sum())
            found = over_seeds(units, (ours[:, chosen] - theirs[:, chosen],), np.ones((len(units), 1)), np.divide)
            differences.append({"mean": part} | _named("accuracy", *found))
    return differences


# ---- protocols


def from_train_length(evaluation: EvaluationConfig, train_length: int) -> EvaluationConfig:
    """Return T_train and the lengths above it, with T_train scored tokens.

    Raises:
        InputError: no length is above the train length.
    """
    longer = tuple(length for length in evaluation.lengths if length > train_length)
    allowed = f"must have one or more above the train length, {train_length}"
    require(bool(longer), "evaluation.lengths", evaluation.lengths, allowed)
    return dataclasses.replace(evaluation, lengths=(train_length, *longer), last_tokens=train_length)


def longest_window(evaluation: EvaluationConfig, train_length: int) -> EvaluationConfig:
    """Return the longest length, with all of its tokens scored."""
    longest = max(evaluation.lengths)
    return dataclasses.replace(evaluation, lengths=(longest,), last_tokens=longest)


class Report(NamedTuple):
    """How results are compared and shown."""

    stem: str  # of its files
    combine: Callable[[list[Run]], Run]  # the seeds of a method -> its result
    subtract: Callable[[list[Run], list[Run]], list[Run]]  # paired runs of two methods -> their differences
    table: Callable[[Results], Table]


class Protocol(NamedTuple):
    """One question about language models, and its `Report`."""

    stem: str  # of the files of its report
    windows: Callable[[EvaluationConfig, int], EvaluationConfig] | None  # what is scored; None: as the config says
    scores: Callable[[Documents, NllByLength], Scores]
    result: Callable[[Scores, int], Run]  # scores, T_train -> the result of a run, or of the seeds of a method
    difference: Callable[[list[int], int], Difference]  # places of the scores, T_train -> how two methods differ
    table: Callable[[Results], Table]

    def combine(self, runs: list[Run]) -> Run:
        """Return the result of a method from the scores of its runs."""
        return self.result(saved_scores(runs), runs[0]["train_length"])

    def subtract(self, runs: list[Run], others: list[Run]) -> list[Run]:
        """Return the differences of paired runs with their intervals."""
        ours, theirs = saved_scores(runs), saved_scores(others)
        field, statistic, at = self.difference(ours.places, runs[0]["train_length"])

        def difference(nats: np.ndarray, other_nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
            return statistic(nats, tokens) - statistic(other_nats, tokens)

        found = over_seeds(ours.documents, (ours.nats, theirs.nats), ours.tokens, difference)
        return [place | _named(field, each) for place, each in zip(at, found, strict=True)]


PROTOCOLS = {
    "perplexity": Protocol(
        "lengths", None, statistics.scores_by_length, statistics.lengths_of, loss_by_length, perplexity_table
    ),
    "delta": Protocol(
        "delta", from_train_length, statistics.scores_by_length, statistics.gains_of, gain_by_length, delta_table
    ),
    "positions": Protocol(
        "positions",
        longest_window,
        statistics.scores_by_position,
        statistics.positions_of,
        loss_by_position,
        positions_table,
    ),
}


# ---- reports

ACCURACY = Report("accuracy", mean_accuracies, accuracy_differences, accuracy_table)
REPORTS = {report.stem: report for report in (*PROTOCOLS.values(), ACCURACY)}


def compare(stem: str, runs: Results, options: Options) -> list[Run]:
    """Return the result of each method, and `differences` from the baseline: on the same windows, or the same task.

    Raises:
        InputError: see `methods_of`; or a file of an earlier version has not the losses that a comparison needs.
    """
    methods, found = methods_of(runs, options), []
    baselines = [method for method in methods if options.baseline in method.names]
    for method in methods:
        first, *others = method.runs
        result = first | (REPORTS[stem].combine(method.runs) if others else {})
        style = first["method"] if "method" in first else first["name"]
        result |= {"name": method.label, "style": style, "runs": [run["name"] for run in method.runs]}
        for base in baselines:
            if base is not method and base.task == method.task:
                ours, theirs = _pairs(method.runs, base.runs)
                differences = [each | {"seeds": len(ours)} for each in REPORTS[stem].subtract(ours, theirs)]
                result |= {"baseline": base.label, "differences": differences}
        found.append(result)
    return found


def table_of(stem: str, runs: Results, options: Options) -> tuple[Results, Table]:
    """Return the results that are shown in place of the runs, and their table and figure."""
    shown = compare(stem, runs, options)
    table = REPORTS[stem].table(shown)
    if "bos" in runs[0] and runs[0]["bos"] is not None and "stride" not in runs[0]:
        table = table._replace(caption=f"{table.caption} The first token of each sequence is {runs[0]['bos']}.")
    return shown, table


def save(stem: str, directory: epath.PathLike, runs: list[Run], options: Options) -> ReportPaths:
    """Write the report of an evaluation; `methods` of its JSON are seeds taken together, and differences."""
    shown, table = table_of(stem, runs, options)
    is_compared = any(len(each["runs"]) > 1 or "differences" in each for each in shown)
    content = {"runs": runs} | ({"methods": _without_windows(shown)} if is_compared else {})
    return report.save(stem, directory, content, table, options.format)


def _without_windows(value: Any) -> Any:
    """Return nested dicts and lists without the numbers of each window, which are in the results of the runs."""
    if isinstance(value, dict):
        names = [name for name in value if name != "documents" and not name.startswith("window_")]
        return {name: _without_windows(value[name]) for name in names}
    return list(map(_without_windows, value)) if isinstance(value, list) else value


def redraw(file: epath.Path, options: Options, output: epath.Path | None) -> ReportPaths:
    """Write table and figure of an evaluation's JSON again, to its directory by default; the JSON is not changed.

    Raises:
        InputError: the file has no results, or is damaged.
    """
    require(file.stem in REPORTS, "--plot", str(file), f"must be {', '.join(f'{stem}.json' for stem in REPORTS)}")
    with read_errors("--plot", str(file)):
        _, table = table_of(file.stem, report.read_results(file), options)
    return report.save(file.stem, output or file.parent, None, table, options.format)
