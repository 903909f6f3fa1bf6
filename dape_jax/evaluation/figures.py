"""Tables and figures of perplexity by length, gain from context and loss by position; parts of other figures.

In: one result for each model. Out: a `Table` for `report.py`. Next: `perplexity.py`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.typing import ColorType

from dape_jax.evaluation.report import Results, Table, number, with_interval

DRAWN_BELOW = 1e100  # figures omit larger numbers: matplotlib computes with their multiples


def perplexity_table(results: Results) -> Table:
    """Return perplexity by length: a row for each model, a column for each length, as in the paper."""
    last_tokens, lengths = results[0]["last_tokens"], results[0]["lengths"]
    fewer = ", ".join(f"{each['num_tokens']:,} at {each['length']}" for each in lengths if each["length"] < last_tokens)
    scored = f"of the last {last_tokens} tokens by sequence length"
    if "stride" in results[0]:
        bos = results[0]["bos"] or "no token"
        scored = f"of all tokens, in windows that advance by {results[0]['stride']} ({bos} before a document)"
    caption = (
        f"Perplexity {scored}, trained at {_train_lengths(results)} tokens. "
        f"{_sample(lengths[-1])}, {lengths[-1]['num_tokens']:,} scored tokens{fewer and f' ({fewer})'}; "
        "95 % bootstrap intervals over documents."
    )
    rows = [["", *(str(each["length"]) for each in lengths)]]
    rows += [[run["name"], *(with_interval(each, "perplexity") for each in run["lengths"])] for run in results]
    label = "perplexity of all tokens" if "stride" in results[0] else f"perplexity of the last {last_tokens} tokens"
    figure, axes = plot_by_length(results, "lengths", "perplexity", label)
    perplexities = only_drawn(each["perplexity"] for run in results for each in run["lengths"])
    if perplexities and max(perplexities) > 5 * min(perplexities):
        log_y_axis(axes)
    mark_train_lengths(axes, [run["train_length"] for run in results])
    return Table(caption, rows, figure)


def delta_table(results: Results) -> Table:
    """Return the gain from context: a column for each model, as in table 1 of the paper."""
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
    return Table(caption, rows, figure)


def positions_table(results: Results) -> Table:
    """Return loss by position: a row for each model, and where it breaks."""
    first = results[0]["positions"]
    caption = (
        f"Loss in nats by position in windows of {first['length']} tokens, trained at {_train_lengths(results)} "
        f"tokens. {_sample(first)}, {first['num_windows'] * first['length']:,} scored tokens. A model breaks where its "
        f"smoothed loss is more than {first['margin_nats']} nats above that around the train length (T/2..T)."
    )
    rows = [["", "around the train length", f"{first['length'] // 2}..{first['length']}", "breaks at"]]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for run in results:
        found = run["positions"]
        bins, breaks_at = found["bins"], found["breaks_at"]
        losses = f"{found['reference_nats']:.3f}", f"{found['last_octave_nats']:.3f}"
        rows.append([run["name"], *losses, "-" if breaks_at is None else str(breaks_at)])
        last = [each["last"] for each in bins]
        (line,) = axes.plot(last, [each["smoothed_nats"] for each in bins], label=label(run["name"]))
        axes.plot(last, [each["nll_nats"] for each in bins], ".", color=line.get_color(), markersize=3, alpha=0.35)
        for broken in (each for each in bins if each["first"] == breaks_at):
            axes.plot(broken["last"], broken["smoothed_nats"], "X", color=line.get_color(), markersize=9)
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("loss (nats)")
    lengths_axis(axes, [2**octave for octave in range(first["length"].bit_length())])
    mark_train_lengths(axes, [run["train_length"] for run in results])
    axes.legend()
    return Table(caption, rows, figure)


def _train_lengths(results: Results) -> str:
    return ", ".join(str(length) for length in sorted({run["train_length"] for run in results}))


def _sample(result: dict[str, Any]) -> str:
    return f"{result['num_windows']} sequences from {result['num_documents']} documents"


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


# ---- parts of figures


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
