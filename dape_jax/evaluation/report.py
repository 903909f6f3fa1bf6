"""What an evaluation leaves behind: a table as text and Markdown, `lengths.json`, and `lengths.png`.

In: one `RunResult` for each model. Out: files. Rows are models and columns are lengths, as in the paper's tables.
"""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from dape_jax.errors import InputError, require
from dape_jax.provenance import provenance

if TYPE_CHECKING:
    from dape_jax.evaluation.evaluate import RunResult

FILES = ("lengths.json", "lengths.txt", "lengths.md", "lengths.png")


@dataclasses.dataclass(frozen=True)
class Written:
    """Where a report lies, and its table for the terminal."""

    directory: Path
    table: str

    @property
    def picture(self) -> Path:
        """The curve."""
        return self.directory / "lengths.png"


def write(results: Sequence["RunResult"], directory: Path) -> Written:
    """Write table, JSON and picture; results of an earlier, different evaluation there are kept under another name."""
    runs = [dataclasses.asdict(result) for result in results]
    content = json.dumps({"runs": runs} | provenance("flax"), indent=1) + "\n"
    _keep_earlier(directory, content)
    table = text_table(results)
    (directory / "lengths.json").write_text(content)
    (directory / "lengths.txt").write_text(table + "\n")
    (directory / "lengths.md").write_text(markdown_table(results) + "\n")
    plot(results, directory / "lengths.png")
    return Written(directory, table)


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


def _keep_earlier(directory: Path, content: str) -> None:
    earlier = directory / "lengths.json"
    if not earlier.exists() or earlier.read_text() == content:
        return
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(earlier.stat().st_mtime))
    for name in FILES:
        file = directory / name
        if file.exists():
            file.replace(file.with_stem(f"{file.stem}.{stamp}"))


def _cells(results: Sequence["RunResult"]) -> list[list[str]]:
    """Header and rows: each model's perplexity and its 95 % interval at each length."""
    lengths = [result.length for result in results[0].lengths]
    rows = [["", *(str(length) for length in lengths)]]
    for run in results:
        rows.append([run.name])
        for result in run.lengths:
            interval = "" if result.low is None else f" [{result.low:.2f}, {result.high:.2f}]"
            rows[-1].append(f"{result.perplexity:.2f}{interval}")
    return rows


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


def text_table(results: Sequence["RunResult"]) -> str:
    """The table for a terminal."""
    rows = _cells(results)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([_caption(results), "", *lines])


def markdown_table(results: Sequence["RunResult"]) -> str:
    """The table for a README."""
    header, *rows = _cells(results)
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] + ["---:"] * (len(header) - 1), *rows)]
    return "\n".join([_caption(results), "", *lines])


def _label(name: str) -> str:
    """A name as matplotlib takes it: $ would start a formula, and a leading _ would leave it out of the legend."""
    escaped = name.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def plot(results: Sequence["RunResult"], file: Path) -> None:
    """Draw perplexity against length, the train length marked."""
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for run in results:
        lengths = [result.length for result in run.lengths]
        (line,) = axes.plot(lengths, [result.perplexity for result in run.lengths], marker="o", label=_label(run.name))
        low = [result.low for result in run.lengths if result.low is not None]
        high = [result.high for result in run.lengths if result.high is not None]
        if len(low) == len(high) == len(lengths):
            axes.fill_between(lengths, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    for length in sorted({run.train_length for run in results}):
        axes.axvline(length, color="gray", linestyle="--", linewidth=1)
        axes.annotate(
            "train length", (length, 0.03), xycoords=("data", "axes fraction"), ha="left", va="bottom", fontsize=8
        )
    highest = max(result.perplexity for run in results for result in run.lengths)
    lowest = min(result.perplexity for run in results for result in run.lengths)
    if highest > 5 * lowest:
        axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    ticks = [result.length for result in results[0].lengths]
    axes.set_xticks(ticks, [str(length) for length in ticks])
    axes.set_xlabel("sequence length N (tokens)")
    axes.set_ylabel(f"perplexity of the last {results[0].last_tokens} tokens")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)
