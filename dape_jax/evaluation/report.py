"""Reports: the files of an evaluation, with one stem: table (text, Markdown), figure (PNG, PDF), numbers (JSON, CSV).

In: one result for each model. Out: `lengths.*` (perplexity by length), `delta.*` (gain from context), `positions.*`
(loss by position). `save` also writes the files of other evaluations and of benchmarks.

JSON has no infinity and no NaN. They are written as the strings "inf", "-inf" and "nan", which `float` reads. Tables
use the same strings. Figures omit such points, and numbers above 1e100.
"""

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.typing import ColorType

from dape_jax.errors import InputError, os_errors
from dape_jax.files import write_atomically
from dape_jax.provenance import provenance
from dape_jax.storage import AnyPath, absolute, is_remote

Results = Sequence[dict[str, Any]]  # the "runs" of a report's JSON: one result for each model
Show = Callable[[str], object]  # prints a table

FIXED_BELOW = 1e9  # tables show larger numbers with an exponent: a perplexity can have 300 digits
DRAWN_BELOW = 1e100  # figures omit larger numbers: matplotlib computes with their multiples


@dataclasses.dataclass(frozen=True)
class ReportPaths:
    """Directory of a report, its table for the terminal, and the file of its figure, or None."""

    directory: AnyPath
    table: str
    figure: AnyPath | None = None


def save(
    stem: str,
    directory: AnyPath,
    content: dict[str, Any],
    caption: str,
    rows: list[list[str]],
    figure: Figure | None,
    show: Show | None = None,
) -> ReportPaths:
    """Show the table, then write all files to an existing directory; files of the same stem are replaced.

    The CSV has a row for each record of `content["runs"]`, or those of the table if there are no runs. Commit, command,
    device and versions are added to the content of the JSON. The first of the table's rows is its header. `show` is
    called before anything is written, so that a full disk does not lose the results.

    Raises:
        InputError: the directory cannot be written to.
    """
    table = text_table(caption, rows)
    files = {
        "json": (json.dumps(json_values(content | provenance("flax")), indent=1) + "\n").encode(),
        "txt": f"{table}\n".encode(),
        "md": f"{markdown_table(caption, rows)}\n".encode(),
        "csv": csv_text(number_rows(content) or rows).encode(),
    }
    if figure is not None:
        files |= drawings(figure, dpi=150)
    try:
        if show is not None:
            show(table)
    finally:  # also if the reader of the output has exited, as in `| head`
        with os_errors("output", str(directory), "cannot be written to"):
            for suffix, file_content in files.items():
                write_atomically(directory / f"{stem}.{suffix}", file_content)
    return ReportPaths(directory, table, None if figure is None else directory / f"{stem}.png")


def drawings(figure: Figure, dpi: int) -> dict[str, bytes]:
    """Return a figure as PNG and as PDF. The same figure gives the same bytes."""
    files = {}
    for suffix, metadata in (("png", {}), ("pdf", {"CreationDate": None})):
        image = io.BytesIO()
        figure.savefig(image, dpi=dpi, format=suffix, metadata=metadata)
        files[suffix] = image.getvalue()
    return files


def csv_text(rows: Sequence[Sequence[Any]]) -> str:
    """Return rows as CSV, with numbers in full precision and an empty cell for None."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def number_rows(content: dict[str, Any]) -> list[list[Any]]:
    """Return a header and a row for each record in the lists of `content["runs"]`, such as each length of each run."""
    found = [
        {"name": run["name"]} | record
        for run in (content["runs"] if "runs" in content else [])
        for record in _records(run)
    ]
    header = list(dict.fromkeys(field for record in found for field in record))
    rows = [[record[field] if field in record else None for field in header] for record in found]
    return [header, *rows] if rows else []


def _records(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the dicts in the lists of a result, at any depth of dicts, without values that are not numbers or text."""
    found = []
    for value in result.values():
        if isinstance(value, dict):
            found += _records(value)
        elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
            found += [{k: v for k, v in each.items() if not isinstance(v, dict | list)} for each in value]
    return found


def json_values(value: Any) -> Any:
    """Return nested dicts, lists and tuples with their infinite and NaN numbers as text, which `float` reads."""
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def common_directory(workdirs: Sequence[AnyPath]) -> AnyPath:
    """Return the default directory of results: the workdir, or the longest path common to all workdirs.

    Raises:
        InputError: the paths have no common part, because they are in different buckets, or only some are local.
    """
    first, *others = map(absolute, workdirs)
    lineages = [{os.fspath(each), *map(os.fspath, each.parents)} for each in others]
    common = next((up for up in (first, *first.parents) if all(os.fspath(up) in each for each in lineages)), None)
    if common is None or (is_remote(first) and not os.fspath(common).partition("://")[2]):  # not even a bucket
        raise InputError(f"workdir = {list(map(str, workdirs))}: must have a common directory; give --output")
    return common


def text_table(caption: str, rows: list[list[str]]) -> str:
    """Return a table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([caption, "", *lines])


def markdown_table(caption: str, rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    header, *body = rows
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] + ["---:"] * (len(header) - 1), *body)]
    return "\n".join([caption, "", *lines])


def number(value: float) -> str:
    """Return a number of a table: 4.83, 1.2e+300, inf, nan."""
    return f"{value:.2f}" if abs(value) < FIXED_BELOW else f"{value:.2g}"


def with_interval(result: dict[str, Any], field: str) -> str:
    """Return a number of a table, with its 95 % interval if it has one that is not NaN."""
    low, high = result["low"], result["high"]
    if low is None or math.isnan(low) or math.isnan(high):
        return number(result[field])
    return f"{number(result[field])} [{number(low)}, {number(high)}]"


# ---- perplexity by length


def write_perplexity(results: Results, directory: AnyPath, show: Show | None = None) -> ReportPaths:
    """Write perplexity by length to `lengths.*`: a row for each model, a column for each length, as in the paper."""
    last_tokens, lengths = results[0]["last_tokens"], results[0]["lengths"]
    fewer = ", ".join(f"{each['num_tokens']:,} at {each['length']}" for each in lengths if each["length"] < last_tokens)
    caption = (
        f"Perplexity of the last {last_tokens} tokens by sequence length, trained at {_train_lengths(results)} tokens. "
        f"{_sample(lengths[-1])}, {lengths[-1]['num_tokens']:,} scored tokens{fewer and f' ({fewer})'}; "
        "95 % bootstrap intervals over documents."
    )
    rows = [["", *(str(each["length"]) for each in lengths)]]
    rows += [[run["name"], *(with_interval(each, "perplexity") for each in run["lengths"])] for run in results]
    figure, axes = plot_by_length(results, "lengths", "perplexity", f"perplexity of the last {last_tokens} tokens")
    perplexities = only_drawn(each["perplexity"] for run in results for each in run["lengths"])
    if perplexities and max(perplexities) > 5 * min(perplexities):
        log_y_axis(axes)
    mark_train_lengths(axes, [run["train_length"] for run in results])
    return save("lengths", directory, {"runs": results}, caption, rows, figure, show)


# ---- gain from context


def write_delta(results: Results, directory: AnyPath, show: Show | None = None) -> ReportPaths:
    """Write the gain from context to `delta.*`: a column for each model, as in table 1 of the paper."""
    train_length, longest = results[0]["train_length"], results[0]["lengths"][-1]
    caption = (
        f"P(N): perplexity of the last {train_length} tokens, the train length, given all N; local: given "
        "only those tokens; ΔP = local - P(N), positive where the context helps. "
        f"{_sample(longest)}, {longest['num_tokens']:,} scored tokens, the same at every N; "
        "95 % bootstrap intervals of the difference over documents."
    )
    rows = [["", *(run["name"] for run in results)]]
    for deltas in zip(*(run["deltas"] for run in results), strict=True):
        length = deltas[0]["length"]
        rows += [
            [f"P({length})", *(number(each["full"]) for each in deltas)],
            [f"P({length}, local)", *(number(each["local"]) for each in deltas)],
            [f"ΔP({length})", *(with_interval(each, "delta") for each in deltas)],
        ]
    ylabel = f"ΔP of the last {train_length} tokens (> 0: context helps)"
    figure, axes = plot_by_length(results, "deltas", "delta", ylabel)
    if max(map(abs, only_drawn(each["delta"] for run in results for each in run["deltas"])), default=0) > 10:
        axes.set_yscale("symlog", linthresh=1)  # a model that breaks would flatten the others
    axes.axhline(0, color="gray", linewidth=1, zorder=1.9)  # below the curves
    return save("delta", directory, {"runs": results}, caption, rows, figure, show)


# ---- loss by position


def write_positions(results: Results, directory: AnyPath, show: Show | None = None) -> ReportPaths:
    """Write loss by position to `positions.*`: a row for each model, and where it breaks."""
    first = results[0]["positions"]
    caption = (
        f"Loss in nats by position in windows of {first['length']} tokens, trained at {_train_lengths(results)} "
        f"tokens. {first['num_windows']} windows from {first['num_documents']} validation documents. A model breaks "
        f"where its smoothed loss is more than {first['margin_nats']} nats above that around the train length (T/2..T)."
    )
    rows = [["", "around the train length", f"{first['length'] // 2}..{first['length']}", "breaks at"]]
    for run in results:
        found = run["positions"]
        breaks_at = "-" if found["breaks_at"] is None else str(found["breaks_at"])
        rows.append([run["name"], f"{found['reference_nats']:.3f}", f"{found['last_octave_nats']:.3f}", breaks_at])
    return save("positions", directory, {"runs": results}, caption, rows, plot_positions(results), show)


def plot_positions(results: Results) -> Figure:
    """Draw loss against position: a line for the smoothed loss, dots for bins, marks at train length and breaks."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for run in results:
        bins, breaks_at = run["positions"]["bins"], run["positions"]["breaks_at"]
        last = [each["last"] for each in bins]
        (line,) = axes.plot(last, [each["smoothed_nats"] for each in bins], label=label(run["name"]))
        axes.plot(last, [each["nll_nats"] for each in bins], ".", color=line.get_color(), markersize=3, alpha=0.35)
        if breaks_at is not None:
            (broken,) = [each for each in bins if each["first"] == breaks_at]
            axes.plot(broken["last"], broken["smoothed_nats"], "X", color=line.get_color(), markersize=9)
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("loss (nats)")
    lengths_axis(axes, [2**octave for octave in range(results[0]["positions"]["length"].bit_length())])
    mark_train_lengths(axes, [run["train_length"] for run in results])
    axes.legend()
    return figure


WRITERS = {"perplexity": write_perplexity, "delta": write_delta, "positions": write_positions}


def _train_lengths(results: Results) -> str:
    return ", ".join(str(length) for length in sorted({run["train_length"] for run in results}))


def _sample(result: dict[str, Any]) -> str:
    return f"{result['num_windows']} sequences from {result['num_documents']} validation documents"


# ---- figures


def plot_by_length(results: Results, name: str, field: str, ylabel: str) -> tuple[Figure, Axes]:
    """Draw a curve for each model, `run[name][i][field]` against the sequence length, with its intervals."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    lengths = [each["length"] for each in results[0][name]]
    for run in results:
        (line,) = axes.plot(lengths, drawn(each[field] for each in run[name]), marker="o", label=label(run["name"]))
        band(axes, lengths, [(each["low"], each["high"]) for each in run[name]], line.get_color())
    axes.set_xlabel("sequence length N (tokens)")
    axes.set_ylabel(ylabel)
    lengths_axis(axes, lengths)
    axes.legend()
    return figure, axes


def distinct_colors(number: int) -> list[ColorType]:
    """Return a list of colours; above 20, neighbours in the list, such as variants of a method, are similar."""
    if number <= 20:
        return list(matplotlib.color_sequences["tab10" if number <= 10 else "tab20"][:number])
    return [matplotlib.colormaps["turbo"](n / (number - 1)) for n in range(number)]


def drawn(values: Iterable[float]) -> list[float]:
    """Return the values, with NaN for those that a figure leaves out."""
    return [value if abs(value) < DRAWN_BELOW else math.nan for value in values]


def only_drawn(values: Iterable[float]) -> list[float]:
    """Return the values without those that a figure leaves out."""
    return [value for value in values if abs(value) < DRAWN_BELOW]


def label(name: str) -> str:
    """Escape a name for matplotlib: $ would start a formula, and a leading _ would omit it from the legend."""
    escaped = name.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def band(
    axes: Axes, x: Sequence[int], intervals: Sequence[tuple[float | None, float | None]], color: ColorType
) -> None:
    """Shade the intervals, if there are any."""
    low = drawn(low for low, _ in intervals if low is not None)
    high = drawn(high for _, high in intervals if high is not None)
    if len(low) == len(high) == len(x):
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def lengths_axis(axes: Axes, ticks: Sequence[int]) -> None:
    """Scale the x axis by powers of two, label the lengths and draw a grid."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(length) for length in ticks])
    axes.grid(alpha=0.3)
    if len(ticks) > 8:
        axes.tick_params(axis="x", labelrotation=45)


def log_y_axis(axes: Axes) -> None:
    """Scale the y axis by powers of ten, labelled with plain numbers; call it after plotting."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    low, high = axes.get_ylim()
    # The longer the axis, the fewer labels fit between powers of ten: all, those at 2 and 5, or none.
    if high > 30 * low:
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}" if high < 1e4 * low else NullFormatter())


def mark_train_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """Draw a vertical line at every train length."""
    for length in sorted(set(lengths)):
        axes.axvline(length, color="gray", linestyle="--", linewidth=1)
        axes.annotate(
            "train length", (length, 0.03), xycoords=("data", "axes fraction"), ha="left", va="bottom", fontsize=8
        )
