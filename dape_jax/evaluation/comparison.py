"""Methods in place of runs: means over seeds, labels, and paired differences from a baseline. Next: `figures.py`.

In: results of runs, as in the JSON of a report. Out: results of methods with the same fields, which tables and figures
show. Runs whose configs differ only in seeds are one method. All runs have the same windows, or the same strings, so
that their differences are taken window by window, or length by length.
"""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dape_jax.errors import require
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.report import Results
from dape_jax.evaluation.statistics import (
    Statistic,
    bins_result,
    bits_per_byte,
    delta_result,
    difference_of,
    gain,
    levels,
    over_seeds,
    perplexity_of,
    ratio_of_sums,
)

Run = dict[str, Any]


class Method(NamedTuple):
    """Runs of one method, with the names that --baseline and --labels take and the label that is shown."""

    name: str
    names: set[str]  # also of its runs
    label: str
    runs: list[Run]


def methods_of(runs: Results, options: Options) -> list[Method]:
    """Return the runs by method, each run alone without --group_seeds.

    Raises:
        InputError: --baseline or --labels names no run, there is only the baseline, or two methods have one label.
    """
    grouped, repeated = dict[Any, list[Run]](), Counter[Any]()
    for run in runs:
        of_config = run["config"] if "config" in run else run["name"]
        variant = run["task"] if "task" in run else run["rotary"] if "rotary" in run else ""
        same = (of_config, variant, run["seed"] if "seed" in run else None)
        repeated[same] += 1  # runs of one seed are not one method: their seeds are no sample
        key = of_config, variant, repeated[same]
        grouped.setdefault(key if options.group_seeds else id(run), []).append(run)
    labels, names = options.names, sorted({run["name"] for run in runs})
    methods = []
    for of_method in grouped.values():
        name = _common_name([run["name"] for run in of_method])
        known = {name}.union(*map(_names_of, of_method))
        names += [] if name in names else [name]
        label = next((labels[each] for each in labels if each in known), name)
        methods.append(Method(name, known, label, of_method))
    for field, given in (("labels", list(labels)), ("baseline", [options.baseline] if options.baseline else [])):
        for each in given:
            is_known = any(each in method.names for method in methods)
            require(is_known, f"--{field}", each, f"must be one of the runs {', '.join(names)}")
    advice = "needs another method to compare; --group_seeds=no makes one of each run"
    require(options.baseline is None or len(methods) > 1, "--baseline", options.baseline, advice)
    shown = [(method.label, method.runs[0]["task"] if "task" in method.runs[0] else "") for method in methods]
    require(len(set(shown)) == len(shown), "--labels", [label for label, _ in shown], "must be different names")
    return methods


def _names_of(run: Run) -> set[str]:
    """Return the names of a run: the one in the table and, of a run as trained, its directory."""
    has_directory = "workdir" in run and ("rotary" not in run or run["rotary"] == "rope")
    return {run["name"], *([run["workdir"], f"{run['workdir']}/"] if has_directory else [])}


def _common_name(names: list[str]) -> str:
    """Return the name of the runs without their seeds: kerple of kerple-seed0 and kerple-seed1, or of kerple/0 .. 9."""
    first, *others = names
    suffix = "".join(re.findall(r"\+(?:pi|ntk|yarn)$", first))  # of a rotary variant
    parts = zip(*(name.removesuffix(suffix).split("/") for name in names), strict=False)
    name = "/".join(filter(None, map(_without_seeds, parts)))
    return (name or f"{first} and {len(others)} more") + suffix if others else first


def _without_seeds(parts: Sequence[str]) -> str:
    """Return what the beginnings of the parts have in common, without the word seed and a number at its end."""
    columns = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*parts, strict=False))
    prefix = "".join(letters[0] for letters in columns)
    return prefix if prefix in parts else re.sub(r"[-_. ]*(seed)?[-_. ]*((?<![^-_. d])\d+)?$", "", prefix)


def compare(stem: str, runs: Results, options: Options) -> list[Run]:
    """Return the result of each method, and `differences` from the baseline: on the same windows, or the same task.

    `stem` is the name of the report. Of tasks, differences are of the mean accuracies.

    Raises:
        InputError: see `methods_of`; or a file of an earlier version has not the losses that a comparison needs.
    """
    combine, subtract = COMPARISONS[stem]
    methods, found = methods_of(runs, options), []
    baselines = [method for method in methods if options.baseline in method.names]
    for method in methods:
        result = method.runs[0] if len(method.runs) == 1 else method.runs[0] | combine(method.runs)
        first = method.runs[0]
        style = first["method"] if "method" in first else first["name"]
        result = result | {"name": method.label, "style": style, "runs": [run["name"] for run in method.runs]}
        for base in baselines:
            if base is not method and ("task" not in result or base.runs[0]["task"] == result["task"]):
                ours, others = _pairs(method.runs, base.runs)
                differences = [each | {"seeds": len(ours)} for each in subtract(ours, others)]
                result |= {"baseline": base.label, "differences": differences}
        found.append(result)
    return found


def _pairs(runs: list[Run], others: list[Run]) -> tuple[list[Run], list[Run]]:
    """Return the runs of two methods in pairs with equal seeds, or else in the given order."""
    by_seed = {run["seed"]: run for run in others if "seed" in run}
    same = [run for run in runs if "seed" in run and run["seed"] in by_seed]
    num = min(len(runs), len(others))
    return (same, [by_seed[run["seed"]] for run in same]) if same else (runs[:num], others[:num])


def _interval(name: str, found: Sequence[float | None]) -> Run:
    return dict(zip((name, "low", "high"), found, strict=True))


# ---- perplexities and gains from context


def _nats(runs: list[Run], at: int) -> np.ndarray:
    """Return the nll of the windows of one length, [seeds, windows]."""
    return np.array([run["lengths"][at]["window_nats"] for run in runs])


def _tokens(length: Run) -> np.ndarray:
    """Return the number of scored tokens of every window."""
    each = [length["num_tokens"] // length["num_windows"]] * length["num_windows"]
    return np.array(length["window_tokens"] if "window_tokens" in length else each)


def _mean_perplexities(runs: list[Run]) -> Run:
    """Return exp(mean loss over seeds) at each length."""
    lengths, documents = [], np.array(runs[0]["documents"])
    for at, first in enumerate(runs[0]["lengths"]):
        loss, *ends = over_seeds(documents, (_nats(runs, at),), _tokens(first), ratio_of_sums)
        low, high = (None if end is None else perplexity_of(end) for end in ends)
        length = {name: value for name, value in first.items() if not name.startswith("window_")}
        length |= {"perplexity": perplexity_of(loss), "low": low, "high": high}
        length |= {"nll_nats": loss * first["num_tokens"]}
        if "num_bytes" in first:
            length |= bits_per_byte(length["nll_nats"], first["num_bytes"])
        lengths.append(length)
    return {"lengths": lengths}


def _differences(name: str, statistic: Statistic, num_local: int, runs: list[Run], others: list[Run]) -> list[Run]:
    """Return the differences of a statistic of the nll of the first `num_local` lengths and of each later length."""
    documents, found = np.array(runs[0]["documents"]), []
    for at, each in list(enumerate(runs[0]["lengths"]))[num_local:]:
        sums = tuple(_nats(side, number) for side in (runs, others) for number in (*range(num_local), at))
        interval = over_seeds(documents, sums, _tokens(each), difference_of(statistic))
        found.append({"length": each["length"]} | _interval(name, interval))
    return found


def _mean_gains(runs: list[Run]) -> Run:
    local, *longer = runs[0]["lengths"]  # the first is the train length
    documents, tokens, local_nats = np.array(runs[0]["documents"]), _tokens(local), _nats(runs, 0)
    deltas = [
        delta_result(each["length"], documents, local_nats, _nats(runs, at), tokens)
        for at, each in enumerate(longer, start=1)
    ]
    return _mean_perplexities(runs) | {"deltas": deltas}


# ---- losses by position


def _bin_nats(runs: list[Run]) -> np.ndarray:
    """Return the nll of the windows in every bin, [seeds, windows, bins]."""
    has_windows = all("window_nats" in run["positions"]["bins"][0] for run in runs)
    allowed = "must be evaluated again to be compared: the losses of its windows are not in the file"
    require(has_windows, "positions", [run["name"] for run in runs], allowed)
    nats = [[each["window_nats"] for each in run["positions"]["bins"]] for run in runs]
    return np.array(nats).swapaxes(1, 2)


def _mean_positions(runs: list[Run]) -> Run:
    nats, ends = _bin_nats(runs), np.array([each["last"] for each in runs[0]["positions"]["bins"]])
    return {"positions": bins_result(np.array(runs[0]["documents"]), nats, ends, runs[0]["train_length"])}


def _position_differences(runs: list[Run], others: list[Run]) -> list[Run]:
    """Return the differences of the smoothed loss at every bin, of the reference and of the last octave."""
    sums, ends = (_bin_nats(runs), _bin_nats(others)), np.array([each["last"] for each in runs[0]["positions"]["bins"]])
    tokens = np.tile(np.diff(ends, prepend=0), (sums[0].shape[1], 1))
    statistic = difference_of(levels(ends, runs[0]["train_length"]))
    found = over_seeds(np.array(runs[0]["documents"]), sums, tokens, statistic)
    names = [*({"last": int(end)} for end in ends), {"mean": "reference_nats"}, {"mean": "last_octave_nats"}]
    nats, low, high = ([None] * len(names) if each is None else each for each in found)
    return [name | _interval("nats", each) for name, *each in zip(names, nats, low, high, strict=True)]


# ---- accuracies


def _mean_accuracies(runs: list[Run]) -> Run:
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


def _accuracy_differences(runs: list[Run], others: list[Run]) -> list[Run]:
    """Return the differences of the mean accuracies; the lengths take the place of documents in the bootstrap."""
    ours, theirs = (
        np.array([[each["accuracy"] for each in run["lengths"]] for run in side]) for side in (runs, others)
    )
    is_beyond = np.array([each["length"] > runs[0]["train_length"] for each in runs[0]["lengths"]])
    differences = []
    for part, chosen in (("trained", ~is_beyond), ("score", is_beyond)):
        if chosen.any():
            units = np.arange(chosen.sum())
            found = over_seeds(units, (ours[:, chosen] - theirs[:, chosen],), np.ones_like(units), ratio_of_sums)
            differences.append({"mean": part} | _interval("accuracy", found))
    return differences


# For each report: the result of the runs of a method, and the differences of paired runs.
COMPARISONS: dict[str, tuple[Callable[[list[Run]], Run], Callable[[list[Run], list[Run]], list[Run]]]] = {
    "lengths": (_mean_perplexities, functools.partial(_differences, "nats", ratio_of_sums, 0)),
    "delta": (_mean_gains, functools.partial(_differences, "delta", gain, 1)),
    "positions": (_mean_positions, _position_differences),
    "accuracy": (_mean_accuracies, _accuracy_differences),
}
