"""Methods in place of runs: means over seeds, labels, and paired differences from a baseline. Next: `figures.py`.

In: results of runs, as in the JSON of a report. Out: results of methods with the same fields, which tables and figures
show. Runs whose configs differ only in seeds are one method. All runs have the same windows, or the same strings, so
that their differences are taken window by window, or length by length.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dape_jax.errors import require
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.report import Results
from dape_jax.evaluation.statistics import bits_per_byte, mean_over_seeds, perplexity_of

Run = dict[str, Any]
Pairs = list[tuple[Run, Run]]  # runs of a method and of the baseline


class Method(NamedTuple):
    """Runs of one method, by the name that --baseline and --labels take and by the one that is shown."""

    name: str
    label: str
    runs: list[Run]


def methods_of(runs: Results, options: Options) -> list[Method]:
    """Return the runs by method, each run alone without --group_seeds.

    Raises:
        InputError: --baseline or --labels names no run, or two methods would have one label.
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
        known = {name, *(run["name"] for run in of_method)}
        names += [] if name in names else [name]
        methods.append(Method(name, next((labels[each] for each in labels if each in known), name), of_method))
    for field, given in (("labels", list(labels)), ("baseline", [options.baseline] if options.baseline else [])):
        for each in given:
            require(each in names, f"--{field}", each, f"must be one of the runs {', '.join(names)}")
    shown = [(method.label, method.runs[0]["task"] if "task" in method.runs[0] else "") for method in methods]
    require(len(set(shown)) == len(shown), "--labels", [label for label, _ in shown], "must be different names")
    return methods


def _common_name(names: list[str]) -> str:
    """Return the name of the runs without their seeds: kerple for kerple-seed0 and kerple-seed1."""
    first, *others = names
    suffix = "".join(re.findall(r"\+(?:pi|ntk|yarn)$", first))  # of a rotary variant
    columns = zip(*(name.removesuffix(suffix) for name in names), strict=False)
    prefix = "".join(letters[0] for letters in itertools.takewhile(lambda letters: len(set(letters)) == 1, columns))
    if prefix not in names:
        prefix = re.sub(r"[-_. ]*(seed)?[-_. ]*((?<=[-_. d])\d+)?$", "", prefix)
    return (prefix or f"{first} and {len(others)} more") + suffix if others else first


def compare_perplexities(runs: Results, options: Options) -> list[Run]:
    """Return perplexity by length of each method, and `differences`, in nats per token, from the baseline.

    Over several seeds, perplexity is exp(mean loss).
    """
    return _compared(runs, options, _mean_perplexities, _differences)


def compare_accuracies(runs: Results, options: Options) -> list[Run]:
    """Return accuracy by length of each method, and `differences` of the means from the baseline on the same task."""
    return _compared(runs, options, _mean_accuracies, _differences_of_means)


def label_runs(runs: Results, options: Options) -> list[Run]:
    """Return the results of each run, with its label."""
    allowed = "must be unset: it needs perplexities by length, or accuracies"
    require(options.baseline is None, "--baseline", options.baseline, allowed)
    alone = dataclasses.replace(options, group_seeds=False)
    return [run | {"name": label, "style": _style(run)} for _, label, (run,) in methods_of(runs, alone)]


def _style(run: Run) -> str:
    return run["method"] if "method" in run else run["name"]


def _compared(
    runs: Results,
    options: Options,
    combine: Callable[[list[Run]], Run],
    subtract: Callable[[Pairs], list[Run]],
) -> list[Run]:
    methods, found = methods_of(runs, options), []
    is_baseline = [options.baseline in (each.name, *(run["name"] for run in each.runs)) for each in methods]
    baselines = [method for method, chosen in zip(methods, is_baseline, strict=True) if chosen]
    for method in methods:
        result = method.runs[0] if len(method.runs) == 1 else method.runs[0] | combine(method.runs)
        result = result | {"name": method.label, "style": _style(method.runs[0])}
        result |= {"runs": [run["name"] for run in method.runs]}
        for base in baselines:
            if base is not method and ("task" not in result or base.runs[0]["task"] == result["task"]):
                result |= {"baseline": base.label, "differences": subtract(_pairs(method.runs, base.runs))}
        found.append(result)
    return found


def _pairs(runs: list[Run], others: list[Run]) -> Pairs:
    """Return the runs of two methods in pairs with equal seeds, or else in the given order."""
    by_seed = {run["seed"]: run for run in others if "seed" in run}
    same = [(run, by_seed[run["seed"]]) for run in runs if "seed" in run and run["seed"] in by_seed]
    return same or list(zip(runs, others, strict=False))


# ---- perplexities


def _loss(runs: list[Run], at: int, others: list[Run] | None = None) -> tuple[float, float | None, float | None]:
    """Return the loss of the windows of one length, or its difference from that of other runs; mean and interval."""
    first = runs[0]["lengths"][at]
    nats = np.array([run["lengths"][at]["window_nats"] for run in runs])
    if others is not None:
        with np.errstate(invalid="ignore"):  # of two infinite losses
            nats = nats - np.array([run["lengths"][at]["window_nats"] for run in others])
    each = [first["num_tokens"] // first["num_windows"]] * first["num_windows"]
    tokens = first["window_tokens"] if "window_tokens" in first else each
    return mean_over_seeds(np.array(runs[0]["documents"]), nats, np.array(tokens))


def _mean_perplexities(runs: list[Run]) -> Run:
    lengths = []
    for at, first in enumerate(runs[0]["lengths"]):
        loss, *ends = _loss(runs, at)
        low, high = (None if end is None else perplexity_of(end) for end in ends)
        length = {name: value for name, value in first.items() if not name.startswith("window_")}
        length |= {"perplexity": perplexity_of(loss), "low": low, "high": high}
        length |= {"nll_nats": loss * first["num_tokens"]}
        if "num_bytes" in first:
            length |= bits_per_byte(length["nll_nats"], first["num_bytes"])
        lengths.append(length)
    return {"lengths": lengths}


def _differences(pairs: Pairs) -> list[Run]:
    runs, others = map(list, zip(*pairs, strict=True))
    differences = []
    for at, first in enumerate(runs[0]["lengths"]):
        nats, low, high = _loss(runs, at, others)
        differences.append({"length": first["length"], "nats": nats, "low": low, "high": high, "seeds": len(pairs)})
    return differences


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


def _differences_of_means(pairs: Pairs) -> list[Run]:
    """Return the differences of the mean accuracies; the lengths take the place of documents in the bootstrap."""
    train_length, differences = pairs[0][0]["train_length"], []
    accuracies = [[[each["accuracy"] for each in run["lengths"]] for run in pair] for pair in pairs]
    of_pairs = np.array([np.subtract(ours, other) for ours, other in accuracies])
    is_beyond = np.array([each["length"] > train_length for each in pairs[0][0]["lengths"]])
    for part, chosen in (("trained", ~is_beyond), ("score", is_beyond)):
        if chosen.any():
            units = np.arange(chosen.sum())
            mean, low, high = mean_over_seeds(units, of_pairs[:, chosen], np.ones_like(units))
            differences.append({"mean": part, "accuracy": mean, "low": low, "high": high, "seeds": len(pairs)})
    return differences
