"""What an evaluation leaves behind: a table as text and Markdown, JSON, and a picture, all of one name.

In: one result for each model. Out: files: `lengths.*` (perplexity by length), `delta.*` (what context gains) and
`positions.*` (loss by position). `save` is what other evaluations write theirs with.
"""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import ColorType

from dape_jax.errors import InputError, require
from dape_jax.provenance import provenance

if TYPE_CHECKING:
    from dape_jax.evaluation.evaluate import DeltaRunResult, PositionsRunResult, RunResult

SUFFIXES = (".json", ".txt", ".md", ".png")


@dataclasses.dataclass(frozen=True)
class ReportPaths:
    """Where a report lies, its table for the terminal, and its picture if there is one."""

    directory: Path
    table: str
    picture: Path | None = None


def write(results: Sequence["RunResult"], directory: Path) -> ReportPaths:
    """Write perplexity by length: rows are models and columns are lengths, as in the paper's tables."""
    runs = [dataclasses.asdict(result) for result in results]
    return save("lengths", directory, {"runs": runs}, _caption(results), _cells(results), plot(results))


def write_delta(results: Sequence["DeltaRunResult"], directory: Path) -> ReportPaths:
    """Write what context gains: columns are models, and each length has three rows, as in the paper's table 1."""
    runs = [dataclasses.asdict(result) for result in results]
    return save("delta", directory, {"runs": runs}, _delta_caption(results), _delta_cells(results), plot_delta(results))


def write_positions(results: Sequence["PositionsRunResult"], directory: Path) -> ReportPaths:
    """Write loss by position: the table says where each model breaks."""
    runs = [dataclasses.asdict(result) for result in results]
    cells = _positions_cells(results)
    return save("positions", directory, {"runs": runs}, _positions_caption(results), cells, plot_positions(results))


def save(
    stem: str, directory: Path, content: dict[str, Any], caption: str, rows: list[list[str]], figure: Figure | None
) -> ReportPaths:
    """Write JSON, table and picture; those of an earlier, different evaluation there are kept under another name.

    Args:
        stem: of the files' names.
        directory: where they go; it is there.
        content: of the JSON, to which commit, command, device and versions are added.
        caption: of the table: what it shows and of how much.
        rows: of the table, the header first.
        figure: the picture; None for none.
    """
    text = json.dumps(content | provenance("flax"), indent=1) + "\n"
    _keep_earlier(stem, directory, text)
    table = text_table(caption, rows)
    (directory / f"{stem}.json").write_text(text)
    (directory / f"{stem}.txt").write_text(table + "\n")
    (directory / f"{stem}.md").write_text(markdown_table(caption, rows) + "\n")
    if figure is None:
        return ReportPaths(directory, table)
    picture = directory / f"{stem}.png"
    figure.savefig(picture, dpi=150)
    return ReportPaths(directory, table, picture)


def common_directory(workdirs: Sequence[Path]) -> Path:
    """Where results go unless told otherwise: the workdir, or the directory that all workdirs have in common."""
    return Path(os.path.commonpath([workdir.absolute() for workdir in workdirs]))


def make_directory(directory: Path) -> None:
    """Make the directory that results will go to, before the work whose results they are.

    Raises:
        InputError: it cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output = {str(directory)!r}: cannot be written to: {error}") from error
    require(os.access(directory, os.W_OK), "output", str(directory), "a directory that can be written to")


def _keep_earlier(stem: str, directory: Path, text: str) -> None:
    earlier = directory / f"{stem}.json"
    if not earlier.exists() or earlier.read_text() == text:
        return
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(earlier.stat().st_mtime))
    while (directory / f"{stem}.{stamp}.json").exists():  # of the same second
        stamp += "+"
    for suffix in SUFFIXES:
        file = directory / f"{stem}{suffix}"
        if file.exists():
            file.replace(file.with_stem(f"{stem}.{stamp}"))


def text_table(caption: str, rows: list[list[str]]) -> str:
    """A table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([caption, "", *lines])


def markdown_table(caption: str, rows: list[list[str]]) -> str:
    """A table for a README."""
    header, *body = rows
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] + ["---:"] * (len(header) - 1), *body)]
    return "\n".join([caption, "", *lines])


def with_interval(value: float, low: float | None, high: float | None) -> str:
    """A figure of a table, with its 95 % interval if it has one."""
    return f"{value:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")


# ---- perplexity by length


def _cells(results: Sequence["RunResult"]) -> list[list[str]]:
    """Header and rows: each model's perplexity and its 95 % interval at each length."""
    lengths = [result.length for result in results[0].lengths]
    return [["", *(str(length) for length in lengths)]] + [
        [run.name, *(with_interval(result.perplexity, result.low, result.high) for result in run.lengths)]
        for run in results
    ]


def _caption(results: Sequence["RunResult"]) -> str:
    last_tokens, lengths = results[0].last_tokens, results[0].lengths
    longest = lengths[-1]
    fewer = [f"{result.num_tokens:,} at {result.length}" for result in lengths if result.length < last_tokens]
    trained = ", ".join(str(length) for length in sorted({run.train_length for run in results}))
    only = f" ({', '.join(fewer)})" if fewer else ""
    return (
        f"Perplexity of the last {last_tokens} tokens by sequence length, trained at {trained} tokens. "
        f"{longest.num_windows} sequences from {longest.num_documents} held-out documents, {longest.num_tokens:,} "
        f"scored tokens{only}; 95 % bootstrap intervals over documents."
    )


def plot(results: Sequence["RunResult"]) -> Figure:
    """Draw perplexity against length, the train length marked."""
    figure, axes = _figure()
    for run in results:
        lengths = [result.length for result in run.lengths]
        (line,) = axes.plot(lengths, [result.perplexity for result in run.lengths], marker="o", label=label(run.name))
        band(axes, lengths, [(result.low, result.high) for result in run.lengths], line.get_color())
    highest = max(result.perplexity for run in results for result in run.lengths)
    lowest = min(result.perplexity for run in results for result in run.lengths)
    if highest > 5 * lowest:
        axes.set_yscale("log")
    axes.set_xlabel("sequence length N (tokens)")
    axes.set_ylabel(f"perplexity of the last {results[0].last_tokens} tokens")
    lengths_axis(axes, [result.length for result in results[0].lengths])
    mark_train_lengths(axes, [run.train_length for run in results])
    axes.legend()
    return figure


# ---- what context gains


def _delta_cells(results: Sequence["DeltaRunResult"]) -> list[list[str]]:
    """Header, and for each length the perplexity with all context, that with the train length's, and the difference."""
    rows = [["", *(run.name for run in results)]]
    for deltas in zip(*(run.deltas for run in results), strict=True):
        length = deltas[0].length
        rows += [
            [f"P({length})", *(f"{delta.full:.2f}" for delta in deltas)],
            [f"P({length}, local)", *(f"{delta.local:.2f}" for delta in deltas)],
            [f"ΔP({length})", *(with_interval(delta.delta, delta.low, delta.high) for delta in deltas)],
        ]
    return rows


def _delta_caption(results: Sequence["DeltaRunResult"]) -> str:
    longest = results[0].lengths[-1]
    return (
        f"P(N): perplexity of the last {results[0].train_length} tokens, the train length, given all N; local: given "
        "those tokens alone; ΔP = local - P(N), positive where the context helps. "
        f"{longest.num_windows} sequences from {longest.num_documents} held-out documents, {longest.num_tokens:,} "
        "scored tokens, the same at every N; 95 % bootstrap intervals of the difference over documents."
    )


def plot_delta(results: Sequence["DeltaRunResult"]) -> Figure:
    """Draw what context gains against length."""
    figure, axes = _figure()
    axes.axhline(0, color="gray", linewidth=1)
    for run in results:
        lengths = [delta.length for delta in run.deltas]
        (line,) = axes.plot(lengths, [delta.delta for delta in run.deltas], marker="o", label=label(run.name))
        band(axes, lengths, [(delta.low, delta.high) for delta in run.deltas], line.get_color())
    if max(abs(delta.delta) for run in results for delta in run.deltas) > 10:
        axes.set_yscale("symlog", linthresh=1)  # a model that breaks would flatten all others
    axes.set_xlabel("sequence length N (tokens)")
    axes.set_ylabel(f"ΔP of the last {results[0].train_length} tokens (> 0: context helps)")
    lengths_axis(axes, [delta.length for delta in results[0].deltas])
    axes.legend()
    return figure


# ---- loss by position


def _positions_cells(results: Sequence["PositionsRunResult"]) -> list[list[str]]:
    """Header, and for each model its loss around the train length, its loss at the end, and where it breaks."""
    longest = results[0].positions.length
    rows = [["", "around the train length", f"{longest // 2}..{longest}", "breaks at"]]
    for run in results:
        positions = run.positions
        breaks_at = "-" if positions.breaks_at is None else str(positions.breaks_at)
        rows.append([run.name, f"{positions.reference_nats:.3f}", f"{positions.last_octave_nats:.3f}", breaks_at])
    return rows


def _positions_caption(results: Sequence["PositionsRunResult"]) -> str:
    positions = results[0].positions
    trained = ", ".join(str(length) for length in sorted({run.train_length for run in results}))
    return (
        f"Loss in nats by position in windows of {positions.length} tokens, trained at {trained} tokens. "
        f"{positions.num_windows} windows from {positions.num_documents} held-out documents. A model breaks where its "
        f"smoothed loss is more than {positions.margin_nats} nats above that around the train length (T/2..T)."
    )


def plot_positions(results: Sequence["PositionsRunResult"]) -> Figure:
    """Draw loss against position: smoothed as lines, bins as dots, the train length and breaks marked."""
    figure, axes = _figure()
    for run in results:
        bins = run.positions.bins
        last = [each.last for each in bins]
        (line,) = axes.plot(last, [each.smoothed_nats for each in bins], label=label(run.name))
        axes.plot(last, [each.nll_nats for each in bins], ".", color=line.get_color(), markersize=3, alpha=0.35)
        if run.positions.breaks_at is not None:
            (broken,) = [each for each in bins if each.first == run.positions.breaks_at]
            axes.plot(broken.last, broken.smoothed_nats, "X", color=line.get_color(), markersize=9)
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("loss (nats)")
    lengths_axis(axes, [2**octave for octave in range(results[0].positions.length.bit_length())])
    mark_train_lengths(axes, [run.train_length for run in results])
    axes.legend()
    return figure


# ---- what the pictures share


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    return figure, figure.subplots()


def label(name: str) -> str:
    """A name as matplotlib takes it: $ would start a formula, and a leading _ would leave it out of the legend."""
    escaped = name.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def band(
    axes: Axes, x: Sequence[int], intervals: Sequence[tuple[float | None, float | None]], color: ColorType
) -> None:
    """Shade intervals, if there are any."""
    low = [low for low, _ in intervals if low is not None]
    high = [high for _, high in intervals if high is not None]
    if len(low) == len(high) == len(x):
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def lengths_axis(axes: Axes, ticks: Sequence[int]) -> None:
    """Lengths along x, by powers of two, and a grid."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(length) for length in ticks])
    axes.grid(alpha=0.3)
    if len(ticks) > 8:
        axes.tick_params(axis="x", labelrotation=45)


def mark_train_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """A line at every train length."""
    for length in sorted(set(lengths)):
        axes.axvline(length, color="gray", linestyle="--", linewidth=1)
        axes.annotate(
            "train length", (length, 0.03), xycoords=("data", "axes fraction"), ha="left", va="bottom", fontsize=8
        )
