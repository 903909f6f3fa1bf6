"""Tables and figures of perplexity by length, gain from context, loss by position and accuracy; parts of other figures.

In: one result for each run or method. Out: a `Table` for `report.py`. Next: `protocols.py`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.typing import ColorType

from dape_jax.evaluation.report import Results, Table, number, with_interval
from dape_jax.evaluation.statistics import BINS_PER_OCTAVE
from dape_jax.evaluation.styles import styles_of

TABLE_LENGTHS = (10, 20, 40, 100, 200, 300, 400, 500)  # a longer table of accuracies has the nearest ones, and the last
LOG_FROM = 3  # an axis is logarithmic if its largest value is more than this times its smallest
XLABEL = "sequence length N (tokens)"
DRAWN_BELOW = 1e100  # figures omit larger numbers: matplotlib computes with their multiples


def perplexity_table(results: Results) -> Table:
    """Return perplexity by length: a row for each model, a column for each length, as in the paper."""
    last_tokens, lengths = results[0]["last_tokens"], results[0]["lengths"]
    fewer = ", ".join(f"{each['num_tokens']:,} at {each['length']}" for each in lengths if each["length"] < last_tokens)
    scored, how = f"the last {last_tokens} tokens", " by sequence length"
    if "stride" in results[0]:
        scored, bos = "whole documents", results[0]["bos"] or "no token"
        how = f", in windows that advance by {results[0]['stride']} ({bos} before a document)"
    caption = (
        f"Perplexity of {scored}{how}, trained at {_train_lengths(results)} tokens. "
        f"{_sample(lengths[-1])}, {lengths[-1]['num_tokens']:,} scored tokens{fewer and f' ({fewer})'}; "
        f"95 % bootstrap intervals over {_units(lengths[-1])}."
    )
    caption += _of_methods(results, "exp(mean loss)", "loss minus that of {} on the same windows, in nats per token")
    rows = [["", *(str(each["length"]) for each in lengths)]]
    for run in results:
        rows.append([_in_table(run), *(with_interval(each, "perplexity") for each in run["lengths"])])
        if all("num_bytes" in each and each["num_bytes"] > each["num_tokens"] for each in run["lengths"]):
            rows.append([f"{run['name']}, bits per byte", *(f"{each['bits_per_byte']:.4f}" for each in run["lengths"])])
        if "differences" in run:
            cells = (with_interval(each, "nats", "+.3f") for each in run["differences"])
            rows.append([f"{_difference(run, results)}, nats", *cells])
    labels = f"perplexity of {scored}", "nats", "loss minus that of\n{} (nats)"
    figure, panels = _plot(results, "lengths", "perplexity", *labels)
    perplexities = only_drawn(each["perplexity"] for run in results for each in run["lengths"])
    if perplexities and max(perplexities) > LOG_FROM * min(perplexities):
        log_axis(panels[0])
    return Table(caption, rows, figure)


def delta_table(results: Results) -> Table:
    """Return the gain from context: a column for each model, as in table 1 of the paper."""
    train_length, longest = results[0]["train_length"], results[0]["lengths"][-1]
    caption = (
        f"P(N): perplexity of the last {train_length} tokens, the train length, given all N; local: given "
        "only those tokens; ΔP = local - P(N), positive where the context helps. "
        f"{_sample(longest)}, {longest['num_tokens']:,} scored tokens, the same at every N; "
        f"95 % bootstrap intervals of the difference over {_units(longest)}."
    )
    caption += _of_methods(results, "P = exp(mean loss)", "ΔP minus that of {} on the same windows")
    compared = [run for run in results if "differences" in run]
    rows = [["", *map(_in_table, results), *(_difference(run, results) for run in compared)]]
    for at, deltas in enumerate(zip(*(run["deltas"] for run in results), strict=True)):
        length, unused = deltas[0]["length"], [""] * len(compared)
        differences = (with_interval(run["differences"][at], "delta", "+.2f") for run in compared)
        rows += [
            [f"P({length})", *(number(each["full"]) for each in deltas), *unused],
            [f"P({length}, local)", *(number(each["local"]) for each in deltas), *unused],
            [f"ΔP({length})", *(with_interval(each, "delta") for each in deltas), *differences],
        ]
    ylabel = "ΔP (> 0: context helps)"
    figure, panels = _plot(results, "deltas", "delta", ylabel, "delta", "ΔP minus that of\n{}")
    for panel, name in zip(panels, ("deltas", "differences"), strict=False):
        values = only_drawn(each["delta"] for run in results if name in run for each in run[name])
        if max(map(abs, values), default=0) > 10:
            panel.set_yscale("symlog", linthresh=1)  # a model that breaks would flatten the others
    return Table(caption, rows, figure)


def positions_table(results: Results) -> Table:
    """Return loss by position: a row for each model, and where it breaks."""
    first = results[0]["positions"]
    caption = (
        f"Loss in nats by position in windows of {first['length']} tokens, trained at {_train_lengths(results)} "
        f"tokens. {_sample(first)}, {first['num_windows'] * first['length']:,} scored tokens. A model breaks where its "
        f"smoothed loss is more than {first['margin_nats']} nats above that around the train length (T/2..T)."
    )
    caption += _of_methods(results, "mean loss", "loss minus that of {} on the same windows, with 95 % intervals")
    rows = [["", "around the train length", f"{first['length'] // 2}..{first['length']}", "breaks at"]]
    with_bins = [run | {"bins": run["positions"]["bins"]} for run in results]
    figure, panels = _plot(with_bins, "bins", "smoothed_nats", "loss (nats)", "nats", "loss minus that of\n{} (nats)")
    for run, style in zip(with_bins, styles_for(results), strict=True):
        found, bins, color = run["positions"], run["bins"], style["color"]
        losses = f"{found['reference_nats']:.3f}", f"{found['last_octave_nats']:.3f}"
        rows.append([_in_table(run), *losses, "-" if found["breaks_at"] is None else str(found["breaks_at"])])
        last, single = ([each[field] for each in bins] for field in ("last", "nll_nats"))
        panels[0].plot(last, single, ".", color=color, markersize=3, alpha=0.35)
        for broken in (each for each in bins if each["first"] == found["breaks_at"]):
            panels[0].plot(broken["last"], broken["smoothed_nats"], "x", color=color, markersize=11, markeredgewidth=3)
        if "differences" in run:
            cells = (with_interval(each, "nats", "+.3f") for each in run["differences"] if "mean" in each)
            rows.append([_difference(run, results), *cells, ""])
    return Table(caption, rows, figure)


def _of_methods(results: Results, mean: str, difference: str) -> str:
    """Return what a caption says of seeds and of differences from the baseline, if there are any."""
    over = f" Over several seeds: {mean}, with the interval over these and seeds."
    differences = f" Differences: {difference.format(_baseline(results))}."
    return over * any(len(run["runs"]) > 1 for run in results) + differences * bool(_baseline(results))


def _in_table(run: dict[str, Any]) -> str:
    """Return the name of a method in a table, with the number of its seeds if there are several."""
    return run["name"] + f" ({len(run['runs'])} seeds)" * (len(run["runs"]) > 1)


def _difference(run: dict[str, Any], results: Results) -> str:
    """Return the name of a difference in a table, with the number of pairs of seeds if a method has more seeds."""
    pairs, names = run["differences"][0]["seeds"], (run["name"], run["baseline"])
    has_more = any(len(each["runs"]) > pairs for each in results if each["name"] in names)
    return " - ".join(names) + f" ({pairs} seed{'s' * (pairs > 1)})" * has_more


def _baseline(results: Results) -> str:
    return next((run["baseline"] for run in results if "differences" in run), "")


def _train_lengths(results: Results) -> str:
    return ", ".join(str(length) for length in sorted({run["train_length"] for run in results}))


def _sample(result: dict[str, Any]) -> str:
    number = result["num_documents"]
    return f"{result['num_windows']} sequences from {number} document{'s' * (number > 1)}"


def _units(result: dict[str, Any]) -> str:
    return "documents" if result["num_documents"] > 1 else "sequences, which are not independent"


def _plot(
    results: Results, name: str, field: str, ylabel: str, difference: str, difference_label: str
) -> tuple[Figure, list[Axes]]:
    """Draw a curve for each model, `run[name][i][field]` by length or position, with its intervals.

    If there are differences from a baseline, their field `difference` is drawn in a second panel below.
    """
    baseline, by_position = _baseline(results), name == "bins"
    x, style_more = ("last", {"markevery": BINS_PER_OCTAVE}) if by_position else ("length", {})
    figure = Figure(figsize=(6.4, 6.4 if baseline else 4.0), layout="constrained")
    panels = list(figure.subplots(2 if baseline else 1, sharex=True, squeeze=False)[:, 0])
    fields = (name, field, ylabel), ("differences", difference, difference_label.format(baseline))
    for panel, (of_run, of_point, label) in zip(panels, fields, strict=False):
        if of_run in ("deltas", "differences"):
            panel.axhline(0, color="gray", linewidth=1, zorder=1.9)  # below the curves
        for run, style in zip(results, styles_for(results), strict=True):
            if of_run in run:
                points = [point for point in run[of_run] if x in point]  # not the differences of means
                _curve(panel, [point[x] for point in points], points, of_point, run["name"], style | style_more)
        ends = [point[x] for point in results[0][name]]
        panel.update_datalim([(end, 0) for end in ends], updatey=False)  # also if no point is drawn
        ticks = [2**octave for octave in range(ends[-1].bit_length())] if by_position else ends
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45 if len(ticks) > 8 else 0)
        panel.grid(alpha=0.3)
        panel.set(xlabel="position in the window (tokens)" if by_position else XLABEL, ylabel=label)
        panel.label_outer()
        if name != "deltas":  # these are all beyond it
            mark_train_lengths(panel, [run["train_length"] for run in results])
    add_legend(figure)
    return figure, panels


def _curve(axes: Axes, x: Sequence[int], values: Results, field: str, name: str, style: dict[str, Any]) -> None:
    """Draw the field of the values against x, with its intervals if there are any."""
    axes.plot(x, drawn(each[field] for each in values), label=escaped(name), **style)
    if "low" in values[0]:
        band(axes, x, [(each["low"], each["high"]) for each in values], style["color"])


# ---- accuracy


def percent(accuracy: float | None) -> str:
    """Return an accuracy as the paper's table prints it, or a dash for None."""
    return "-" if accuracy is None else f"{100 * accuracy:.2f}"


def accuracy_table(results: Results) -> Table:
    """Return a row for each model: its means, and its accuracy at some lengths."""
    train_length, lengths = results[0]["train_length"], [result["length"] for result in results[0]["lengths"]]
    near = {min(lengths, key=lambda length: abs(length - wanted)) for wanted in TABLE_LENGTHS}
    shown = sorted(near | {lengths[-1]}) if len(lengths) > 8 else lengths
    chances = {run["task"]: run["random_accuracy"] for run in results}
    task = ["task"] if len(chances) > 1 else []
    rows = [["", *task, f"<= {train_length}", f"> {train_length}", *map(str, shown)]]
    for run in results:
        at = {result["length"]: percent(result["accuracy"]) for result in run["lengths"]}
        means = [percent(run["trained"]), percent(run["score"])]
        rows.append([_in_table(run), *(run[name] for name in task), *means, *(at[length] for length in shown)])
        if "differences" in run:
            differences = {each["mean"]: with_interval(each, "accuracy", "+.2f", 100.0) for each in run["differences"]}
            cells = [*(run[name] for name in task), *(differences.get(mean, "-") for mean in ("trained", "score"))]
            rows.append([_difference(run, results), *cells, *[""] * len(shown)])
    beyond = [length for length in lengths if length > train_length]
    span = f", {beyond[0]} to {beyond[-1]}" if beyond else ""
    dropout, num_sequences = ", dropout on" if results[0]["dropout"] else "", results[0]["lengths"][0]["num_sequences"]
    caption = (
        f"Accuracy in % by input length, trained on inputs of 1 to {train_length} symbols{dropout}; {num_sequences} "
        f"sequences of each length. <= {train_length}: mean over {len(lengths) - len(beyond)} lengths; "
        f"> {train_length}, the score: mean over {len(beyond)} lengths{span}. Chance: "
        f"{', '.join(f'{percent(chance)} ({task})' for task, chance in chances.items())}."
    )
    caption += _of_methods(results, "mean accuracy", "mean accuracy minus that of {}, over the same lengths")
    return Table(caption, rows, plot_accuracies(results))


def plot_accuracies(results: Results) -> Figure:
    """Draw accuracy against length: a panel for each task, a line for each model, a dotted line for chance."""
    tasks = list(dict.fromkeys(run["task"] for run in results))
    across = min(3, len(tasks))
    down = -(-len(tasks) // across)
    figure = Figure(figsize=(2.2 + 4.2 * across, 0.8 + 3.2 * down), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes, task in zip(panels.ravel(), tasks, strict=False):
        runs = [run for run in results if run["task"] == task]
        for run, style in zip(runs, styles_for(runs), strict=True):
            lengths, small = [result["length"] for result in run["lengths"]], {"markersize": 4, "markevery": 0.05}
            _curve(axes, lengths, run["lengths"], "accuracy", run["name"], style | small)
        axes.axhline(runs[0]["random_accuracy"], linestyle=":", color="gray", label="chance")
        axes.set(title=task.replace("_", " "), ylim=(-0.03, 1.05), xlabel="input length N (symbols)")
        axes.tick_params(labelbottom=True)  # also above the place of a removed panel
        mark_train_lengths(axes, [runs[0]["train_length"]])
        axes.grid(alpha=0.3)
    for axes in panels.ravel()[len(tasks) :]:
        axes.remove()
    panels[0, 0].set_ylabel("accuracy")
    add_legend(figure)
    return figure


# ---- parts of figures


def drawn(values: Iterable[float]) -> list[float]:
    """Return the values, with NaN for those that a figure leaves out."""
    return [value if abs(value) < DRAWN_BELOW else math.nan for value in values]


def only_drawn(values: Iterable[float]) -> list[float]:
    """Return the values without those that a figure leaves out."""
    return [value for value in values if abs(value) < DRAWN_BELOW]


def styles_for(results: Results) -> list[dict[str, Any]]:
    """Return colour, marker and line style of each result."""
    return styles_of([run["style"] for run in results])


def escaped(name: str) -> str:
    """Escape a name for matplotlib: $ would start a formula, and a leading _ would omit it from the legend."""
    without_formula = name.replace("$", r"\$")
    return f" {without_formula}" if without_formula.startswith("_") else without_formula


def band(
    axes: Axes, x: Sequence[int], intervals: Sequence[tuple[float | None, float | None]], color: ColorType
) -> None:
    """Shade the intervals, if there are any; a single one, which has no area, is a line."""
    low, high = zip(*intervals, strict=True)
    if None not in low:
        alpha, linewidth = (0.4, 1.5) if len(x) == 1 else (0.15, 0)
        axes.fill_between(x, drawn(low), drawn(high), color=color, alpha=alpha, linewidth=linewidth)


def add_legend(figure: Figure) -> None:
    """Add the legend of all curves above the panels, where it covers none of them."""
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    columns = max(1, int(13 * figure.get_figwidth() / (max(map(len, handles)) + 7)))  # 13 letters an inch
    rows = -(-len(handles) // columns)
    # A long legend takes no room from the panels.
    figure.set_figheight(figure.get_figheight() + 0.19 * max(0, rows - 2))
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper center", ncols=min(columns, len(handles)), fontsize=9
    )


def log_axis(axes: Axes) -> None:
    """Scale the y axis by powers of ten, labelled with plain numbers; call it after plotting."""
    axes.set_yscale("log")
    axis, (low, high) = axes.yaxis, axes.get_ylim()
    axis.set_major_formatter("{x:g}")
    axis.set_tick_params(which="both", length=3.5, pad=3.5)  # else minor labels are beside the line of the major ones
    # The longer the axis, the fewer labels fit between powers of ten: all, those at 2 and 5, or none.
    if high > 30 * low:
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.set_minor_formatter("{x:g}" if high < 1e4 * low else NullFormatter())


def mark_train_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """Draw a vertical line at every train length; its label is on the side that has room for it."""
    for length in sorted(set(lengths)):
        axes.axvline(length, color="gray", linestyle="--", linewidth=1)
        at = axes.transAxes.inverted().transform(axes.transData.transform((length, 1)))[0]
        where = {"xy": (length, 0.03), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        side = {"xytext": (3, 0), "ha": "left"} if at < 0.7 else {"xytext": (-3, 0), "ha": "right"}
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
        axes.annotate("train length", **where, **side, va="bottom", fontsize=8, bbox=box)
