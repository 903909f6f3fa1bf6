"""What the experiments promise: a catalogue that agrees with the paper, no run twice, verdicts from figures."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dape_jax.config import RunConfig
from dape_jax.errors import InputError
from dape_jax.experiments import catalogue, report, run
from dape_jax.experiments.catalogue import EXPERIMENTS, METHODS, PRESETS, Cell, Claim, Experiment, Less, Preset
from dape_jax.experiments.run import config_of, run_experiment, runs_of
from dape_jax.transformer import model_structure

RUNNABLE = [name for name, experiment in EXPERIMENTS.items() if not experiment.missing]


# ---- the catalogue


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", RUNNABLE)
def test_every_run_has_a_valid_config_of_its_own(name: str, preset: str):
    runs = runs_of(EXPERIMENTS[name], PRESETS[preset], (0,), "some/text")
    assert len({item.name for item in runs}) == len(runs) > 0
    configs = [RunConfig.from_dict(config_of(item, PRESETS[preset])) for item in runs]
    assert all(a != b for i, a in enumerate(configs) for b in configs[:i])
    for item, config in zip(runs, configs, strict=True):
        assert (config.train.train_length, config.train.seed, config.data.seed) == (item.train_length, 0, 0)
        assert config.data.path == "some/text"
        if PRESETS[preset].length_divisor > 1:
            model_structure(config.model)


def test_the_paper_preset_has_the_published_settings():
    (item,) = [
        item
        for item in runs_of(EXPERIMENTS["table5"], PRESETS["paper"], (0,), "books3")
        if item.method == "dape1x3-kerple"
    ]
    config, table8 = RunConfig.from_dict(config_of(item, PRESETS["paper"])), catalogue.paper_tables()["table8"]["125m"]
    assert table8["batch"] == "32 x 8 GPUs"
    assert config.train.batch_size == 32 * 8
    assert config.train.train_length == table8["train_length"]
    assert config.train.num_steps == table8["iterations"]
    assert config.model.num_heads == table8["heads"]
    assert config.model.num_layers == table8["layers"]
    assert config.model.width == table8["width"]
    assert config.optimizer.learning_rate == table8["learning_rate"]
    assert [config.optimizer.beta1, config.optimizer.beta2] == table8["betas"]
    assert config.evaluation.last_tokens == 256
    assert item.lengths == (512, 1024, 2048, 4096, 8192)


def test_the_same_tokens_in_a_step_at_every_train_length_where_the_paper_has_it_so():
    for preset in PRESETS.values():
        configs = [
            RunConfig.from_dict(config_of(item, preset)) for item in runs_of(EXPERIMENTS["fig3"], preset, (0,), "text")
        ]
        tokens = {config.train.batch_size * config.train.train_length for config in configs}
        assert len({config.train.train_length for config in configs}) == 6
        assert len(tokens) == 1


@pytest.mark.parametrize("name", RUNNABLE)
def test_claims_compare_what_is_run(name: str):
    experiment = EXPERIMENTS[name]
    measured = {
        Cell(item.method, item.paper_train_length, length, item.paper_size)
        for item in runs_of(experiment, PRESETS["paper"], (0,), "text")
        for length in item.lengths
        if not (experiment.measure == "delta" and length == item.paper_train_length)
    }
    cells = {side for claim in experiment.claims for less in claim.comparisons for side in (less.low, less.high)}
    assert {cell for cell in cells if isinstance(cell, Cell)} <= measured
    assert all(claim.comparisons for claim in experiment.claims)


def test_every_method_is_used():
    assert set(METHODS) == {method for experiment in EXPERIMENTS.values() for method in experiment.methods}


@pytest.mark.parametrize("dataset", ["arxiv", "books3"])
def test_the_papers_claims_hold_of_the_papers_figures(dataset: str):
    checked = 0
    for name, experiment in EXPERIMENTS.items():
        look = report.looker(report.paper_group(name, dataset))
        for claim in experiment.claims:
            printed = tuple(
                less
                for less in claim.comparisons
                if all(not isinstance(side, Cell) or look(side) for side in (less.low, less.high))
            )
            judgement = report.judge(dataclasses.replace(claim, comparisons=printed), look, min_seeds=1)
            assert judgement.holding == judgement.comparisons, judgement
            checked += len(printed)
    assert checked > 80


def test_the_papers_figures_stand_only_beside_runs_with_their_tokens_in_a_step():
    """Tables 2 and 5 have more at a train length of 512 or 1024 than figure 3."""
    trained_at = {series.train_length for series in report.paper_group("fig3", "arxiv").series}
    assert trained_at == {128, 4096}
    assert {series.train_length for series in report.paper_group("table5", "arxiv").series} == {512}


def test_figures_of_the_paper_are_those_of_its_tables():
    curves = catalogue.paper_tables()["curves"]

    def value(source: str, dataset: str, method: str, length: int, metric: str = "perplexity") -> float:
        (found,) = [
            curve["values"][str(length)]
            for curve in curves
            if (curve["source"], curve["dataset"], curve["method"], curve["metric"])
            == (source, dataset, method, metric)
            and str(length) in curve["values"]
        ]
        return found

    assert value("table 2", "arxiv", "nope", 8192) == 17167.32
    assert value("table 4", "books3", "dape1x7-kerple", 2048) == 22.3
    assert value("table 5", "arxiv", "kerple", 512) == 4.57
    assert value("table 9", "books3", "cope", 8192) == 90.66
    assert value("table 1", "books3", "kerple", 8192, "delta") == -21.09
    for method in ("rope", "alibi", "dape1x3-kerple"):  # printed figures are consistent: equation 6
        for length in (1024, 4096, 8192):
            full, local, delta = (value("table 1", "books3", method, length, m) for m in ("full", "local", "delta"))
            assert local - full == pytest.approx(delta, abs=0.011)


# ---- verdicts


@settings(max_examples=100, deadline=None)
@given(
    figures=st.lists(
        st.tuples(st.floats(0.1, 100, allow_nan=False), st.floats(0.1, 100, allow_nan=False)), min_size=1, max_size=5
    ),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_a_claim_holds_if_it_does_with_every_seed(figures: list[tuple[float, float]], factor: float):
    low, high = Cell("a", 1, 1), Cell("b", 1, 1)
    values = {low: dict(enumerate(a for a, _ in figures)), high: dict(enumerate(b for _, b in figures))}
    judgement = report.judge(Claim("", (Less(low, high, factor),)), values.__getitem__)
    if len(figures) < 2:
        assert judgement.verdict == "not tested"
    else:
        assert judgement.verdict == ("holds" if all(a < factor * b for a, b in figures) else "does not hold")


def test_what_is_not_a_number_holds_nothing():
    low, high = Cell("a", 1, 1), Cell("b", 1, 1)
    for figures in ((1.0, math.nan), (math.nan, 1.0)):
        values = {low: dict(enumerate(figures)), high: {0: 2.0, 1: 2.0}}
        judgement = report.judge(Claim("", (Less(low, high),)), values.__getitem__)
        assert (judgement.verdict, judgement.holding) == ("does not hold", 0)
        assert "nan" in judgement.weakest


def test_seeds_are_compared_with_themselves_and_missing_ones_are_not_made_up():
    low, high = Cell("a", 1, 1), Cell("b", 1, 1)
    values = {low: {0: 1.0, 1: 5.0, 3: 9.0}, high: {0: 2.0, 1: 6.0, 2: 0.1}}
    claim = Claim("", (Less(low, high), Less(0.5, high), Less(high, 7.0)))
    judgement = report.judge(claim, lambda cell: {seed: values[cell][seed] for seed in (0, 1)})
    assert (judgement.verdict, judgement.holding) == ("holds", 3)
    assert report.judge(claim, values.__getitem__).verdict == "does not hold"  # of the seeds 0, 1, 2, seed 2 fails one
    assert report.judge(claim, lambda cell: {0: values[cell][0]}).verdict == "not tested"


# ---- running

CLAIM = Claim("b is within ten times a", (Less(Cell("b", 16, 32), Cell("a", 16, 32), 10.0),))
RECIPE = """
import copy, json
from ml_collections import ConfigDict

def get_config(argument):
    size, bias, train_length, seed = argument.split(",")
    spec = json.loads(SPEC)
    spec["model"]["bias"]["name"] = bias
    spec["train"] |= {"train_length": int(train_length.split("=")[1]), "seed": int(seed.split("=")[1])}
    return ConfigDict(spec)
"""


@pytest.fixture
def small_world(tmp_path: Path, monkeypatch) -> dict[str, Path]:
    """Two experiments of two tiny models each, one of them in both."""
    spec = tiny.spec(tmp_path, train__num_steps=2, evaluation__lengths=(16, 32))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(RECIPE.replace("SPEC", repr(json.dumps(spec))))
    monkeypatch.setattr(run, "CONFIGS", tmp_path / "configs")
    monkeypatch.setitem(PRESETS, "tiny", Preset("tiny.py", {"125m": "xs"}, 1, None, (0, 1), str(tmp_path / "text")))
    for method, bias in (("a", "kerple"), ("b", "alibi"), ("c", "nope")):
        monkeypatch.setitem(METHODS, method, bias)
    monkeypatch.setattr(run, "lengths_from", lambda length: (length, 2 * length))
    for name, methods in (("one", ("a", "b")), ("two", ("b", "c"))):
        monkeypatch.setitem(EXPERIMENTS, name, Experiment("title", "source", methods, (16,), (CLAIM,)))
    return {"results": tmp_path / "results", "workdirs": tmp_path / "workdirs"}


def run_tiny(name: str, world: dict[str, Path], seeds: tuple[int, ...] = ()) -> list[Path]:
    return run_experiment(name, "tiny", data="", seeds=seeds, **world)


@pytest.fixture
def trained(monkeypatch) -> list[tuple[str, int]]:
    """Which models are trained, by bias and seed; nothing is, and figures are made up of the seed."""
    models = []

    def train(config, workdir):
        models.append((config["model"]["bias"]["name"], config["train"]["seed"]))

    def measure(experiment, item, workdir):
        return {"lengths": [{"length": length, "perplexity": length + item.seed / 8} for length in item.lengths]}

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(run, "measure", measure)
    return models


def test_finished_runs_are_reused_and_a_killed_experiment_goes_on(small_world, trained, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", killed)
        with pytest.raises(KeyboardInterrupt):
            run_tiny("one", small_world)
    assert trained == [("kerple", 0)]
    assert not list(small_world["results"].rglob("*.json"))
    (first,) = [file for file in run_tiny("one", small_world, (0,)) if file.name.startswith("a-")]
    before = first.read_bytes()
    assert trained[1:] == [("kerple", 0), ("alibi", 0)]

    files = run_tiny("one", small_world)
    assert trained[3:] == [("kerple", 1), ("alibi", 1)]
    assert first in files
    assert first.read_bytes() == before
    assert run_tiny("one", small_world) == files
    run_tiny("two", small_world)
    assert trained[5:] == [("nope", 0), ("nope", 1)]  # alibi is taken from the other experiment

    content = json.loads(files[1].read_bytes())
    assert (content["method"], content["seed"], content["train_length"]) == ("b", 0, 16)
    assert [result["length"] for result in content["lengths"]] == [16, 32]
    assert {"commit", "device", "versions", "wall_seconds", "config", "data"} <= set(content)

    # What the runs say, in three forms.
    readme = report.write(small_world["results"]).read_text()
    assert "| [one](#one) tiny, text | b is within ten times a | **holds** | 1 of 1 |" in readme
    assert "| [two](#two) tiny, text | b is within ten times a | **not tested** |" in readme
    assert "| fig2 | DAPE1x3-Kerple is the best of all at the train length | not tested | | no runs |" in readme
    assert "| a | 16 | 16.06 ± 0.06 | 32.06 ± 0.06 |" in readme
    described = json.loads((small_world["results"] / "report.json").read_bytes())
    (series,) = [series for series in described["one"]["tiny-text"]["series"] if series["method"] == "a"]
    assert [series["values"][seed]["32"] for seed in ("0", "1")] == [32, 32.125]
    assert (small_world["results"] / "one" / "tiny-text.png").stat().st_size > 10_000

    # Another text under the same name is not taken for this one, nor put beside it under another seed.
    (small_world["results"].parent / "text" / "00.txt").write_text("another text " * 30)
    for seeds in ((), (2,)):
        with pytest.raises(InputError, match="another config or text"):
            run_tiny("one", small_world, seeds)
    assert len(trained) == 7


def test_two_processes_do_not_write_the_same(small_world, trained, monkeypatch):
    said = []

    def measure(experiment, item, workdir, real=run.measure):
        for name, changes in (("one", {"workdirs": small_world["workdirs"] / "other"}), ("two", {})):
            with pytest.raises(InputError, match="another process is at work") as error:
                run_tiny(name, small_world | changes)
            said.append(str(error.value).split()[0])
        return real(experiment, item, workdir)

    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", measure)
        run_tiny("one", small_world, (0,))
    assert said == ["--results", "--workdirs"] * 2
    assert trained == [("kerple", 0), ("alibi", 0)]
    run_tiny("two", small_world, (0,))  # what they had is free again


def test_what_no_report_can_be_made_of_is_named(small_world, trained):
    run_tiny("one", small_world)
    file = small_world["results"] / "one" / "tiny-text" / "a-xs-T16-seed1.json"
    good = json.loads(file.read_bytes())
    optimizer = good["config"]["optimizer"] | {"learning_rate": 1.0}
    for changes in (
        {"seed": [1]},
        {"versions": 3},
        {"wall_seconds": None},
        {"config": {}},
        {"lengths": 3},
        {"lengths": [{"length": 16}]},
        {"lengths": [{"length": 16, "perplexity": "low"}]},
        {"data": "another text"},
        {"config": good["config"] | {"optimizer": optimizer}},  # whose spread would not be one over seeds
    ):
        file.write_text(json.dumps(good | changes))
        with pytest.raises(InputError, match=r"a-xs-T16-seed1\.json") as error:
            report.write(small_world["results"])
        assert "\n" not in str(error.value)
    for text in ("{", "[]", "{}"):
        file.write_text(text)
        with pytest.raises(InputError, match=r"a-xs-T16-seed1\.json"):
            report.write(small_world["results"])
        with pytest.raises(InputError, match=r"a-xs-T16-seed1\.json"):
            run_tiny("two", small_world)

    # One seed, and a method that the catalogue has no more: what is left is reported.
    file.write_text(json.dumps(good | {"method": "z"}))
    assert (
        "| [one](#one) tiny, text | b is within ten times a | **not tested** |"
        in report.write(small_world["results"]).read_text()
    )


def test_perplexity_delta_and_time_are_measured(small_world, monkeypatch):
    monkeypatch.setattr(run, "TIMED_TURNS", 2)
    for name, measure, methods in (
        ("plain", "perplexity", ("a",)),
        ("delta", "delta", ("a",)),
        ("time", "step_ms", ("a", "b")),
    ):
        monkeypatch.setitem(EXPERIMENTS, name, Experiment("title", "source", methods, (16,), (), measure=measure))
    (plain,), (delta,), times = (run_tiny(name, small_world, (0,)) for name in ("plain", "delta", "time"))
    assert len([path for path in small_world["workdirs"].iterdir() if path.is_dir()]) == 1  # both are of one model
    local, full = [result["perplexity"] for result in json.loads(delta.read_bytes())["lengths"]]
    groups = {group.experiment: group for group in report.read(small_world["results"])}
    measured = {result["length"]: result["perplexity"] for result in json.loads(plain.read_bytes())["lengths"]}
    assert groups["plain"].series[0].values[0] == measured
    assert measured[32] == pytest.approx(full, rel=1e-6)
    assert groups["delta"].series[0].values[0] == {32: pytest.approx(local - full, rel=1e-12)}  # equation 6
    assert groups["time"].series[1].values[0] == {16: json.loads(times[1].read_bytes())["step_ms"]}

    # Another seed's times are taken beside one another, and finished ones stay.
    before = [file.read_bytes() for file in times]
    calls = []
    monkeypatch.setattr(run, "step_milliseconds", lambda configs: calls.append(configs) or [{"step_ms": 1.0}] * 2)
    again = run_tiny("time", small_world, (0, 1))
    assert [[config.train.seed for config in configs] for configs in calls] == [[1, 1]]
    assert [file.read_bytes() for file in again if file in times] == before
    assert report.write(small_world["results"]).exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "fig99"}, ["experiment", "fig99", "fig2"]),
        ({"name": "table6"}, ["table6", "algorithmic tasks"]),
        ({"preset_name": "huge"}, ["--preset", "huge", "small"]),
        ({"preset_name": "paper"}, ["--data", "paper"]),
        ({"seeds": (1, 1)}, ["--seeds", "each once"]),
        ({"preset_name": "tiny", "data": "/nowhere"}, ["data.path", "/nowhere"]),
    ],
)
def test_bad_input_is_named(small_world, changes: dict, words: list[str]):
    arguments = {"name": "fig2", "preset_name": "small", "data": "", "seeds": ()} | small_world | changes
    if changes.get("preset_name") == "tiny":
        arguments["name"] = "one"
    with pytest.raises(InputError) as error:
        run_experiment(arguments.pop("name"), arguments.pop("preset_name"), **arguments)
    assert all(word in str(error.value) for word in words)
    assert not small_world["results"].exists()


def test_a_report_on_nothing_or_on_something_else_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="finished runs"):
        report.write(tmp_path)
    for text in ("{", "[]", "{}", '{"method": 1}'):
        file = tmp_path / "fig2" / "small-stdlib" / "a-seed0.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        with pytest.raises(InputError, match=r"a-seed0\.json"):
            report.write(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["list"], 0, ["fig1", "table9", "appendixE"]),
        (["show", "fig6"], 0, ["--config.model.processor.leak=True", "below 1.1"]),
        (["show", "fig2", "--preset=paper"], 0, ["configs/paper.py:125m,bias=kerple", "8192"]),
        (["show", "fig7"], 2, ["error: experiment = 'fig7'"]),
        ([], 2, ["error: command", "list"]),
        (["run"], 2, ["error: run", "fig2"]),
        (["list", "fig2"], 2, ["error: list = 'fig2'"]),
        (["list", "fig2", "x"], 2, ["COMMAND NAME"]),
        (["run", "fig2", "--seeds=a"], 2, ["--seeds"]),
    ],
)
def test_the_command_line(arguments: list[str], status: int, words: list[str]):
    command = [sys.executable, "-m", "dape_jax.experiments", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == status, done.stderr
    output = done.stdout if status == 0 else done.stderr
    assert all(word in output for word in words), output
    assert status == 0 or len(done.stderr.splitlines()) == 1
