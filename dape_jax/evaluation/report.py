"""Reports: the files of an evaluation, with one stem: numbers (JSON), a figure (PNG) and, on request, the table.

In: one result for each model, a table and a figure. Out: files, and the table on the terminal. Benchmarks use it too.

JSON has no infinity and no NaN. They are written as the strings "inf", "-inf" and "nan", which `float` reads. Tables
use the same strings. Figures omit such points, and numbers above 1e100.
"""

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath
from matplotlib.figure import Figure

from dape_jax.errors import require
from dape_jax.files import write_atomically
from dape_jax.provenance import provenance
from dape_jax.storage import absolute

Results = Sequence[dict[str, Any]]  # the "runs" of a report's JSON: one result for each model

FIXED_BELOW = 1e9  # tables show larger numbers with an exponent: a perplexity can have 300 digits


class Table(NamedTuple):
    """Caption, rows of cells, of which the first is the header, and the figure of the same numbers, or None."""

    caption: str
    rows: list[list[str]]
    figure: Figure | None


class ReportPaths(NamedTuple):
    """Directory of a report, its table for the terminal, and the file of its figure, or None."""

    directory: epath.Path
    table: str
    figure: epath.Path | None


def save(
    stem: str,
    directory: epath.PathLike,
    content: dict[str, Any],
    caption: str,
    rows: list[list[str]],
    figure: Figure | None,
    formats: Sequence[str] = (),
) -> ReportPaths:
    """Write the files to an existing directory, replacing those of the same stem, and print the table.

    Commit, command, device and versions are added to the content of the JSON. `formats` are further files: csv, md.
    """
    directory, table = epath.Path(directory), text_table(caption, rows)
    files = {"json": (json.dumps(json_values(content | provenance("flax")), indent=1) + "\n").encode()}
    files |= {name: (FORMATS[name](caption, rows).rstrip() + "\n").encode() for name in formats}
    if figure is not None:
        files["png"] = png_of(figure)
    for suffix, file_content in files.items():
        write_atomically(directory / f"{stem}.{suffix}", file_content)
    print(table, flush=True)
    return ReportPaths(directory, table, None if figure is None else directory / f"{stem}.png")


def png_of(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    image = io.BytesIO()
    figure.savefig(image, dpi=150)
    return image.getvalue()


def text_table(caption: str, rows: list[list[str]]) -> str:
    """Return a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([caption, "", *lines])


def markdown_table(caption: str, rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    header, *body = rows
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] + ["---:"] * (len(header) - 1), *body)]
    return "\n".join([caption, "", *lines])


def csv_table(caption: str, rows: list[list[str]]) -> str:
    """Return a table as CSV, without its caption."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


FORMATS = {"csv": csv_table, "md": markdown_table}


def json_values(value: Any) -> Any:
    """Return nested dicts, lists and tuples with their infinite and NaN numbers as text, which `float` reads."""
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def common_directory(workdirs: Sequence[epath.PathLike]) -> epath.Path:
    """Return the default directory of results: the workdir, or the longest path common to all workdirs.

    Raises:
        InputError: the paths have no common part, because they are in different buckets, or only some are local.
    """
    first, *others = map(absolute, workdirs)
    common = next(up for up in (first, *first.parents) if all(each.is_relative_to(up) for each in others))
    is_directory = os.fspath(common) not in ("/", "gs://", "s3://")
    require(is_directory, "workdir", list(map(str, workdirs)), "must have a common directory; give --output")
    return common


def number(value: float) -> str:
    """Return a number of a table: 4.83, 1.2e+300, inf, nan."""
    return f"{value:.2f}" if abs(value) < FIXED_BELOW else f"{value:.2g}"


def with_interval(result: dict[str, Any], field: str) -> str:
    """Return a number of a table, with its 95 % interval if it has one that is not NaN."""
    low, high = result["low"], result["high"]
    if low is None or math.isnan(low) or math.isnan(high):
        return number(result[field])
    return f"{number(result[field])} [{number(low)}, {number(high)}]"
