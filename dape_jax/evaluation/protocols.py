"""`PROTOCOLS`, the questions that evaluations of language models answer; and the reports of all evaluations.

A row says which tokens are scored at which lengths, and makes the result of one model, the difference of two, and the
table and figure of all. Appendix A of the paper measures the gain from the context before the last T_train tokens
("delta"): their perplexity given only those tokens, minus their perplexity given all N (equation 6). The first is the
perplexity at length T_train with all targets scored, because sequences of all lengths end at the same places.

To add a protocol, add a row. Next: `perplexity.py`, `accuracy.py`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from etils import epath

from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.evaluation.comparison import (
    Difference,
    Run,
    accuracy_differences,
    compare,
    gain_by_length,
    loss_by_length,
    loss_by_position,
    loss_differences,
    mean_accuracies,
    mean_losses,
)
from dape_jax.evaluation.config import EvaluationConfig
from dape_jax.evaluation.figures import accuracy_table, delta_table, perplexity_table, positions_table
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.report import ReportPaths, Results, Table
from dape_jax.evaluation.statistics import (
    Documents,
    NllByLength,
    Scores,
    gains_of,
    lengths_of,
    positions_of,
    scores_by_length,
    scores_by_position,
)
from dape_jax.storage import read_errors


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


class Protocol(NamedTuple):
    """One question about language models."""

    stem: str  # of the files of its report
    windows: Callable[[EvaluationConfig, int], EvaluationConfig] | None  # what is scored; None: as the config says
    scores: Callable[[Documents, NllByLength], Scores]
    result: Callable[[Scores, int], Run]  # scores, T_train -> the result of a run, or of the seeds of a method
    difference: Callable[[list[int], int], Difference]  # places of the scores, T_train -> how two methods differ
    table: Callable[[Results], Table]


PROTOCOLS = {
    "perplexity": Protocol("lengths", None, scores_by_length, lengths_of, loss_by_length, perplexity_table),
    "delta": Protocol("delta", from_train_length, scores_by_length, gains_of, gain_by_length, delta_table),
    "positions": Protocol(
        "positions", longest_window, scores_by_position, positions_of, loss_by_position, positions_table
    ),
}


# ---- reports


class Report(NamedTuple):
    """How results are compared and shown; see `comparison.compare`."""

    combine: Callable[[list[Run]], Run]
    subtract: Callable[[list[Run], list[Run]], list[Run]]
    table: Callable[[Results], Table]


REPORTS = {
    stem: Report(partial(mean_losses, result), partial(loss_differences, difference), table)
    for stem, _, _, result, difference, table in PROTOCOLS.values()
} | {"accuracy": Report(mean_accuracies, accuracy_differences, accuracy_table)}


def table_of(stem: str, runs: Results, options: Options) -> tuple[Results, Table]:
    """Return the results that are shown in place of the runs, and their table and figure."""
    combine, subtract, make_table = REPORTS[stem]
    shown = compare(runs, options, combine, subtract)
    table = make_table(shown)
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
