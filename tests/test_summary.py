"""Test the summary figures: ratios of perplexities with DAPE to those without, and costs relative to Kerple."""

import dataclasses
import math
from statistics import fmean

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from experiments import summary
from experiments.catalogue import EXPERIMENTS, METHODS
from experiments.groups import Group, Series
from experiments.verdicts import Sample

SEEDS, DOCUMENTS = (0, 1, 2), 40


def series_of(method: str, nats: dict[int, float], train_length: int = 512, **fields) -> Series:
    """Return a model with this loss at each length; documents and seeds differ, equally for all models."""
    draw = np.random.default_rng(0)
    samples, values = {}, {}
    for seed in SEEDS:
        noise = draw.normal(0, 0.3, DOCUMENTS) + 0.01 * seed
        samples[seed] = {at: Sample(tuple(range(DOCUMENTS)), (mean + noise)[:, None]) for at, mean in nats.items()}
        values[seed] = {at: math.exp(mean + noise.mean()) for at, mean in nats.items()}
    return Series(method, "125m", "", train_length, values, samples=samples, **fields)


def group_of(experiment: str, *series: Series, data: str = "stdlib") -> Group:
    return Group(experiment, "small", data, {"wall_seconds": [1.0]}, list(series))


def test_the_base_of_a_method_is_the_method_without_dape():
    bases = {method: summary.base_of(method) for method in METHODS}
    assert bases["dape1x3-kerple"] == bases["dape1x1-kerple"] == bases["dape1x11-kerple"] == "kerple"
    assert bases["dape1x3-kerple-window"] == "kerple-window"
    assert bases["dape1x3-kerple-rate2"] == "kerple-rate2"
    assert bases["kerple"] is bases["rope"] is bases["fire-as-with-dape"] is bases["dape1x1-kerple-c64"] is None


def test_gains_are_ratios_of_perplexities():
    lengths = (512, 4096, 8192)
    base = series_of("kerple", dict.fromkeys(lengths, 2.0))
    better = series_of("dape1x3-kerple", {512: 2.0 + math.log(0.9), 4096: 2.0 + math.log(0.5), 8192: 1.0})
    fewer = dataclasses.replace(better, samples={0: better.samples[0]})
    found = summary.gains([group_of("table5", fewer, base), group_of("fig2", better, base)])
    assert [(each.method, each.base, each.factor, each.num_seeds) for each in found] == [
        ("dape1x3-kerple", "kerple", 1, 3),
        ("dape1x3-kerple", "kerple", 8, 3),
    ]
    assert {each.where for each in found} == {"small, stdlib, T = 128"}
    assert [each.ratio for each in found] == pytest.approx([0.9, 0.5])
    # Documents and seeds have the same noise on both sides, so the interval has no width.
    assert all(each.low == pytest.approx(each.ratio) and each.high == pytest.approx(each.ratio) for each in found)
    assert summary.gains([group_of("fig6", better, base), group_of("fig3", better, base)]) == []  # other settings
    (axes, *_) = summary.gain_figure(found).axes
    points = [line for line in axes.get_lines() if line.get_marker() == "o" and len(line.get_xdata())]
    assert [line.get_xdata()[0] for line in points] == pytest.approx([0.9])


def test_the_figure_of_gains_has_a_row_for_each_measured_gain_and_no_others():
    measured = [("dape1x1-rope", "a"), ("dape1x3-kerple", "a"), ("dape1x3-kerple", "b"), ("dape1x5-kerple", "b")]
    found = [
        summary.Gain(method, "", where, factor, 0.9, 0.8, 1.0, 3) for factor in (1, 8) for method, where in measured
    ]
    figure = summary.gain_figure(found)
    for axes, num_rows in zip(figure.axes, (4, 4, 0), strict=True):
        points = [line for line in axes.get_lines() if line.get_marker() == "o" and len(line.get_xdata())]
        assert [float(line.get_ydata()[0]) for line in points] == [1, 3, 4, 6][:num_rows]
        assert len({line.get_color() for line in points}) == min(2, num_rows)
    assert figure.axes[0].get_yticks().tolist() == [1, 3.5, 6]
    assert figure.axes[0].get_ylim() == (7, 0)


def test_the_figure_of_gains_tells_texts_apart_and_shows_all_ratios():
    found = [summary.Gain("dape1x1-kerple", "kerple", f"text {i}", 1, 0.8 + i / 10, 1e-3, 1e3, 2) for i in range(12)]
    figure = summary.gain_figure(found)
    axes, (legend,) = figure.axes[0], figure.legends
    points = [line for line in axes.get_lines() if line.get_marker() != "None" and len(line.get_xdata())]
    assert len({(to_rgba(line.get_color()), line.get_marker()) for line in points}) == len(legend.get_texts()) == 12
    low, high = axes.get_xlim()
    assert 0.4 < low < 0.8  # the intervals are much wider
    assert 1.9 < high < 4


def figure_of(costs: list[summary.Cost]) -> Figure:
    figure = summary.cost_figure(costs)
    assert figure is not None
    return figure


def drawn_in(figure: Figure) -> list[tuple[float, float, str]]:
    """Return place and fill of the markers in the first panel of a figure of costs."""
    lines = [line for line in figure.axes[0].get_lines() if line.get_marker() != "None" and len(line.get_xdata())]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0]), line.get_fillstyle()) for line in lines]


def test_costs_are_relative_to_kerple_with_its_number_of_steps():
    kerple = series_of("kerple", {4096: 2.0}, train_flops=100.0, num_steps=600)
    more = series_of("kerple-840-steps", {4096: 1.9}, train_flops=140.0, num_steps=840)
    dape = series_of("dape1x3-kerple", {4096: 1.5}, train_flops=140.0, num_steps=600)
    unknown = series_of("rope", {4096: 3.0})
    trained = group_of("cost", kerple, more, dape, unknown)
    assert {each.method: (each.flops, each.time) for each in summary.costs([trained])} == {
        "kerple": (1.0, None),
        "kerple-840-steps": (1.4, None),
        "dape1x3-kerple": (1.4, None),
    }
    timed = [
        dataclasses.replace(series, values={0: {512: ms}}, samples={}, num_steps=1)
        for series, ms in ((kerple, 10.0), (dape, 16.0))
    ]
    found = summary.costs([trained, group_of("times", *timed)])
    assert [each.time for each in found] == pytest.approx([1.0, 1.4, 1.6])
    assert found[2].perplexities == tuple(dape.over_seeds(4096))
    figure = figure_of(found)
    assert [text.get_text() for text in figure.legends[0].texts] == ["kerple", "kerple-840-steps", "dape1x3-kerple"]
    for axes, costs in zip(figure.axes, ([1.0, 1.4, 1.4], [1.0, 1.4, 1.6]), strict=True):
        points = [line.get_xdata() for line in axes.get_lines() if line.get_marker() != "None"]
        assert [point[0] for point in points if len(point)] == pytest.approx(costs)
    assert len(figure_of(summary.costs([trained])).axes) == 1  # without times
    assert summary.costs([trained, group_of("table7", *timed)]) == summary.costs([trained])  # times of other steps
    places = [dataclasses.replace(each, where=where) for where in "abc" for each in found]
    untimed = [dataclasses.replace(each, where="d", time=None) for each in found]
    titles = [axes.get_title() for axes in figure_of([*places, *untimed]).axes]
    assert titles == ["a", "a", "b", "b", "c", "c", "d"]
    changed = dataclasses.replace(dape, method="dape1x3-kerple-bias")
    with_change = summary.costs([trained, group_of("variants", changed)])
    assert "dape1x3-kerple-bias" in {each.method for each in with_change}
    labels = [text.get_text() for text in figure_of(with_change).legends[0].texts]
    assert labels == ["kerple", "kerple-840-steps", "dape1x3-kerple"]
    assert summary.costs([group_of("cost", dape)]) == []
    kerple_mean = fmean(found[0].perplexities)
    failed = summary.Cost("rope", found[0].where, (kerple_mean, 9 * kerple_mean), 1.0, None)
    usual = [(each.flops, fmean(each.perplexities), "full") for each in found]
    assert drawn_in(figure_of(found)) == usual
    assert drawn_in(figure_of([*found, failed])) == [*usual, (1.0, 3 * kerple_mean, "none")]
    assert drawn_in(figure_of([failed])) == [(1.0, 5 * kerple_mean, "full")]  # nothing to compare it with
    diverged = [dataclasses.replace(each, perplexities=(math.inf,)) for each in found]
    assert summary.cost_figure(diverged) is None
    assert len(figure_of([*found, *diverged]).axes) == 2


def test_losses_are_by_step_and_by_the_time_of_the_steps():
    kerple = series_of("kerple", {4096: 2.0}, curves={seed: {100: 2.0, 200: 1.5 - seed / 10} for seed in (0, 1)})
    longer = series_of("kerple-840-steps", {4096: 2.0}, curves={0: {400: 1.0}})
    dape = series_of("dape1x3-kerple", {4096: 1.5}, curves={0: {200: math.inf}})
    other = series_of("rope", {4096: 3.0}, curves={0: {200: 3.0}})
    timed = [
        dataclasses.replace(series, values={0: {512: ms}}, samples={}, curves={})
        for series, ms in ((kerple, 60.0), (dape, 120.0))
    ]
    groups = [group_of("fig2", kerple, dape), group_of("cost", kerple, longer, other), group_of("times", *timed)]
    found = summary.learning([*groups, group_of("fig3", other)])  # figure 3 has other settings
    assert [(each.method, each.seed, each.step, each.minutes, each.nats) for each in found] == [
        ("kerple", 0, 100, 0.1, 2.0),
        ("kerple", 0, 200, 0.2, 1.5),
        ("kerple", 1, 100, 0.1, 2.0),
        ("kerple", 1, 200, 0.2, 1.4),
        ("dape1x3-kerple", 0, 200, 0.4, math.inf),
        ("kerple-840-steps", 0, 400, 0.4, 1.0),
        ("rope", 0, 200, None, 3.0),
    ]
    assert {each.where for each in found} == {"small, stdlib, T = 128"}
    figure = summary.learning_figure(found)
    assert figure is not None
    for axes, last in zip(figure.axes, ([200, 200, 200, 400], [0.2, 0.2, 0.4, 0.4]), strict=True):
        lines = [line.get_xdata() for line in axes.get_lines() if len(line.get_xdata())]
        assert [line[-1] for line in lines] == last  # RoPE is not in the figure
    methods = ["kerple", "dape1x3-kerple", "kerple-840-steps"]
    assert [text.get_text() for text in figure.legends[0].texts] == methods
    without_times = summary.learning_figure(summary.learning(groups[:2]))
    assert without_times is not None
    assert len(without_times.axes) == 1
    assert summary.learning_figure(summary.learning([group_of("fig2", other)])) is None


def test_each_method_of_the_figure_of_costs_has_its_own_colour_and_marker():
    methods = (*EXPERIMENTS["fig2"].methods, *EXPERIMENTS["variants"].methods, *EXPERIMENTS["cost"].methods)
    styles = summary.styles_of(tuple(dict.fromkeys(methods)))
    assert len(set(styles.values())) == len(styles) > 20
    assert styles["dape1x3-kerple"][0] == styles["kerple"][0] != styles["rope"][0]
    assert styles["dape1x3-kerple"][1] != styles["dape1x1-kerple"][1] != styles["kerple"][1] == styles["rope"][1]
    comparable = [experiment for experiment in EXPERIMENTS.values() if summary._is_comparable(experiment)]
    drawn = dict.fromkeys(method for experiment in comparable for method in experiment.methods)
    styles = summary.styles_of([method for method in drawn if method not in summary._OMITTED])
    assert len(set(styles.values())) == len(styles) > 30
