"""Draw the figure of one layer's times on an H100 again from its raw file: `python -m benchmarks.figures`."""

from matplotlib.figure import Figure

from dape_jax.evaluation.figures import log_axis
from dape_jax.evaluation.styles import styles_of
from experiments.plots import write_png
from experiments.tables import RESULTS, h100

FILE = RESULTS / "gpu/h100/layers.png"


def layers_figure(times: dict[str, float]) -> Figure:
    """Draw times by length and batch: a panel for each direction, a marker for each implementation that was timed.

    `times` are milliseconds by case, IMPLEMENTATION/T/B/DIRECTION.
    """
    cases = {tuple(case.split("/")): ms for case, ms in times.items()}
    shapes = sorted({(int(length), int(batch)) for _, length, batch, _ in cases})
    names = list(dict.fromkeys(name for name, *_ in cases))
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, direction in zip(panels, ("forward", "backward"), strict=True):
        for name, style in zip(names, styles_of(names), strict=True):
            found = {at: (name, *map(str, shape), direction) for at, shape in enumerate(shapes)}
            found = {at: cases[case] for at, case in found.items() if case in cases}
            axes.plot(list(found.values()), list(found), label=name, **style | {"linestyle": ""})
        axes.set_title("forward" if direction == "forward" else "forward and backward", fontsize=10)
        axes.set_yticks(range(len(shapes)), [f"{length:,} x {batch}" for length, batch in shapes])
        axes.grid(alpha=0.3)
    log_axis(panels[0], "x")
    panels[0].invert_yaxis()
    panels[0].set_ylabel("T x B")
    figure.supxlabel("time of one layer (ms)", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names), fontsize=8)
    return figure


if __name__ == "__main__":
    write_png(
        FILE,
        layers_figure(
            {case: row["min_ms"] for (group, case), row in h100().items() if group == "layers" and "min_ms" in row}
        ),
    )
