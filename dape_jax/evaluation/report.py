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

import matplotlib
from etils import epath
from matplotlib.figure import Figure

from dape_jax.errors import require
from dape_jax.files import read_json, write_atomically
from dape_jax.provenance import provenance
from dape_jax.storage import absolute

Results = Sequence[dict[str, Any]]  # the "runs" of a report's JSON: one result for each model

FIXED_BELOW = 1e9  # tables show larger numbers with an exponent: a perplexity can have 300 digits


class Table(NamedTuple):
    """Caption, rows of cells, of which the first is the header, and the figure of the same numbers, or None."""

    caption: str
    rows: list[list[str]]
    figure: Figure | None = None


class ReportPaths(NamedTuple):
    """Directory of a report, its table for the terminal, and the file of its figure, or None."""

    directory: epath.Path
    table: str
    figure: epath.Path | None


def save(
    stem: str, directory: epath.PathLike, content: dict[str, Any] | None, table: Table, formats: Sequence[str] = ()
) -> ReportPaths:
    """Write the files to an existing directory, replacing those of the same stem, and print the table.

    Args:
        stem: name of the files.
        directory: directory of the files.
        content: content of the JSON, to which commit, command, device and versions are added; None writes no JSON.
        table: table, and the figure of the PNG if it has one.
        formats: further files, of the table (csv, md) or the figure (pdf, svg).
    """
    caption, rows, figure = table
    directory, files = epath.Path(directory), dict[str, bytes]()
    if content is not None:
        files["json"] = (json.dumps(json_values(content | provenance("flax")), indent=1) + "\n").encode()
    files |= {name: (make(caption, rows).rstrip() + "\n").encode() for name, make in FORMATS.items() if name in formats}
    if figure is not None:
        files |= {name: image_of(figure, name) for name in IMAGES if name == "png" or name in formats}
    text = text_table(caption, rows)
    print(text, flush=True)  # before the files, for which the disk may be full
    for suffix, file_content in files.items():
        write_atomically(directory / f"{stem}.{suffix}", file_content)
    return ReportPaths(directory, text, None if figure is None else directory / f"{stem}.png")


def image_of(figure: Figure, name: str) -> bytes:
    """Return a figure as png, pdf or svg. Letters of a PDF are TrueType; the same figure gives the same bytes."""
    image = io.BytesIO()
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "dape_jax"}):
        figure.savefig(image, format=name, dpi=150, metadata=IMAGES[name])
    return image.getvalue()


def read_results(file: epath.Path) -> list[dict[str, Any]]:
    """Return the runs of a report's JSON, with its numbers as floats.

    Raises:
        InputError: the file is missing, damaged, or no report of an evaluation.
    """
    content = read_json(file)
    require(bool(content.get("runs")), "--plot", str(file), "must be the JSON of an evaluation")
    return [_floats(run) for run in content["runs"]]


def _floats(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _floats(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_floats(each, name) for each in value]
    return float(value) if value in ("inf", "-inf", "nan") and name != "name" else value


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
IMAGES = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}  # with metadata without a time


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


def with_interval(result: dict[str, Any], field: str, form: str = "", factor: float = 1) -> str:
    """Return a number of a table times a factor, with its 95 % interval if it has one that is not NaN."""

    def show(value: float) -> str:
        return f"{factor * value:{form}}" if form else number(factor * value)

    low, high = result["low"], result["high"]
    if low is None or math.isnan(low) or math.isnan(high):
        return show(result[field])
    return f"{show(result[field])} [{show(low)}, {show(high)}]"
