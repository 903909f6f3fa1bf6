"""Test the experiments: the catalogue agrees with the paper, no run is trained twice, verdicts match results."""

import dataclasses
import errno
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny
from matplotlib.figure import Figure

from dape_jax import command_line
from dape_jax.config import RunConfig, TaskRunConfig, read_run
from dape_jax.errors import InputError
from dape_jax.evaluation.report import json_values
from dape_jax.model.transformer import model_structure
from dape_jax.recipes import read_module
from dape_jax.tasks import CHE as TASKS
from experiments import __main__ as experiments_main
from experiments import catalogue, groups, report, run, verdicts
from experiments.catalogue import (
    EXPERIMENTS,
    METHODS,
    NOT_IN_PAPER,
    PRESETS,
    Cell,
    Claim,
    Experiment,
    Less,
    Preset,
    Score,
    TaskPreset,
)
from experiments.run import PlannedRun, Run, Settings, config_of, run_experiment, runs_of

ROOT = Path(__file__).parents[1]


def runs_with_one_seed(name: str, preset: str) -> list[Run]:
    """Return the runs of an experiment with seed 0, on a text or on all of its tasks."""
    tasks = EXPERIMENTS[name].tasks
    return runs_of(EXPERIMENTS[name], Settings(preset, data="" if tasks else "some/text", seeds=(0,), tasks=tasks))


# ---- the catalogue


def test_methods_and_train_lengths_choose_among_the_runs():
    every = runs_of(EXPERIMENTS["fig2"], Settings())
    chosen = runs_of(EXPERIMENTS["fig2"], Settings(methods=("rope", "dape1x3-kerple"), train_lengths=(128,)))
    assert chosen == [item for item in every if item.method in ("rope", "dape1x3-kerple") and item.train_length == 128]
    assert 0 < len(chosen) < len(every)


@pytest.mark.parametrize(
    ("name", "preset"), [(name, preset) for name, experiment in EXPERIMENTS.items() for preset in experiment.presets]
)
def test_every_run_has_its_own_valid_config(name: str, preset: str):
    runs = runs_with_one_seed(name, preset)
    assert len({item.name for item in runs}) == len(runs) > 0
    configs = [read_run(config_of(item)) for item in runs]
    assert all(a != b for i, a in enumerate(configs) for b in configs[:i])
    for item, config in zip(runs, configs, strict=True):
        assert (config.train.train_length, config.train.seed, config.data.seed) == (item.train_length, 0, 0)
        assert item.lengths == tuple(sorted(set(item.lengths)))
        if item.task:
            assert isinstance(config, TaskRunConfig)
            assert config.data.task == item.task
            assert min(item.lengths) <= item.train_length < max(item.lengths)  # so that both means exist
        else:
            assert isinstance(config, RunConfig)
            assert config.data.path == "some/text"
    if PRESETS[preset].length_divisor > 1:
        for model in {json.dumps(str(config.model)): config.model for config in configs}.values():
            model_structure(model)


def test_the_paper_preset_has_the_published_settings():
    (item,) = [item for item in runs_with_one_seed("table5", "paper") if item.method == "dape1x3-kerple"]
    config, table8 = RunConfig.from_dict(config_of(item)), catalogue.paper_tables()["table8"]["125m"]
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


def test_the_paper_preset_has_the_published_settings_of_the_tasks():
    runs = runs_with_one_seed("table6", "paper")
    printed = catalogue.paper_tables()["table6"]
    of_paper = {(method, row["task"]) for method in printed["methods"] for row in printed["tasks"]}
    assert {(item.method, item.task) for item in runs if item.task != "binary_multiplication"} == of_paper
    assert {item.task for item in runs} == set(TASKS)
    for row in printed["tasks"]:
        task = TASKS[row["task"]]
        assert (task.permutation_invariant, task.random_accuracy) == (
            row["permutation_invariant"],
            row["random_accuracy"],
        )
    for item in runs[:11]:
        config = TaskRunConfig.from_dict(config_of(item))
        assert (config.train.num_steps, config.train.train_length, config.train.batch_size) == (200_000, 40, 128)
        assert config.evaluation.num_sequences == 512
        assert item.lengths[-460:] == tuple(range(41, 501))


def test_steps_have_equal_numbers_of_tokens_where_the_papers_do():
    for preset in EXPERIMENTS["fig3"].presets:
        configs = [RunConfig.from_dict(config_of(item)) for item in runs_with_one_seed("fig3", preset)]
        tokens = {config.train.batch_size * config.train.train_length for config in configs}
        assert len({config.train.train_length for config in configs}) == 6
        assert len(tokens) == 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_claims_compare_results_of_runs(name: str):
    experiment = EXPERIMENTS[name]
    runs = runs_with_one_seed(name, experiment.presets[-1])
    divisor = 1 if experiment.tasks else PRESETS[experiment.presets[-1]].length_divisor
    measured = {
        Cell(item.method, item.paper_train_length, length * divisor, item.paper_size)
        for item in runs
        for length in item.lengths
        if not (experiment.metric == "delta" and length == item.train_length)
    }
    scored = {(item.method, item.task) for item in runs}
    sides = {side for claim in experiment.claims for less in claim.comparisons for side in (less.low, less.high)}
    assert {side for side in sides if isinstance(side, Cell)} <= measured
    assert {(m, side.task) for side in sides if isinstance(side, Score) for m in side.methods} <= scored
    assert all(claim.comparisons for claim in experiment.claims)
    assert all(0 < claim.at_least < len(claim.comparisons) for claim in experiment.claims if claim.at_least is not None)


def test_every_method_is_used():
    assert set(METHODS) == {method for experiment in EXPERIMENTS.values() for method in experiment.methods}


@pytest.mark.parametrize("dataset", ["arxiv", "books3"])
def test_the_papers_claims_hold_of_the_papers_numbers(dataset: str):
    checked = 0
    for name, experiment in EXPERIMENTS.items():
        for group in (group for group in groups.paper_groups(name) if group.data == dataset):
            lookup = groups.lookup_in(group)
            for claim in experiment.claims:
                printed = tuple(
                    less
                    for less in claim.comparisons
                    if all(not isinstance(side, Cell) or lookup(side) for side in (less.low, less.high))
                )
                for less in printed:
                    found = verdicts.difference(less, lookup, experiment.metric)
                    assert found.num_seeds == 1
                    assert found.mean < 0, verdicts.describe(less, experiment.metric)
                checked += len(printed)
    assert checked > 80


def test_the_papers_claims_hold_of_the_papers_table_of_tasks():
    (group,) = groups.paper_groups("table6")
    counts = {}
    for claim in EXPERIMENTS["table6"].claims:
        means = [verdicts.difference(less, groups.lookup_in(group), "accuracy").mean for less in claim.comparisons]
        counts[claim.text] = sum(mean < 0 for mean in means), len(means)
        assert counts[claim.text][0] >= (len(means) if claim.at_least is None else claim.at_least)
    # Where the paper counts tasks, its numbers give its count.
    assert [count for text, count in counts.items() if "of 11" in text] == [(8, 11), (6, 11)]


def test_the_papers_numbers_are_shown_only_with_runs_of_equal_tokens_per_step():
    """Tables 2 and 5 have more tokens per step at a train length of 512 or 1024 than figure 3."""
    for name, trained_at in (("fig3", {128, 4096}), ("table5", {512})):
        (group,) = [group for group in groups.paper_groups(name) if group.data == "arxiv"]
        assert {series.train_length for series in group.series} == trained_at


def test_an_experiment_with_one_finished_method_is_drawn_with_the_papers():
    (paper, *others) = groups.paper_groups("fig2")
    figure = report.plot(dataclasses.replace(paper, series=paper.series[:1]))
    (legend,) = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
    drawn = {series.method for group in (paper, *others) for series in group.series if series.train_length == 128}
    assert {text.get_text() for text in legend.get_texts()} == drawn


def test_each_panel_with_several_train_lengths_has_its_own_legend():
    """Draw our lengths, which are a quarter of the paper's, so that a name is of two curves."""
    (paper, _) = groups.paper_groups("fig3")
    series = [dataclasses.replace(paper.series[0], train_length=length) for length in (128, 512)]
    ours = dataclasses.replace(paper, preset="small", about={"wall_seconds": [1.0]}, series=series)
    figure = report.plot(ours)
    assert len(figure.axes) == 3
    colors = []
    for axes in figure.axes:
        drawn = {line.get_label(): line.get_color() for line in axes.get_lines()}
        shown = {line.get_label(): line.get_color() for line in axes.get_legend().get_lines()}
        assert shown == drawn
        colors.append(shown["dape1x3-kerple, trained at 128"])
    assert colors[0] != colors[1] == colors[2]


def test_panels_without_numbers_of_the_paper_are_left_out():
    (paper,) = groups.paper_groups("appendixE")
    ours = [dataclasses.replace(each, train_length=length) for each in paper.series for length in (128, 512)]
    panels = report.plot(dataclasses.replace(paper, series=ours)).axes
    assert len(panels) == 3
    assert all(axes.has_data() for axes in panels)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_claims_that_compare_fire_with_and_without_dape_name_the_confound(name: str):
    for claim in EXPERIMENTS[name].claims:
        pairs = [
            [side.methods if isinstance(side, Score) else (side.method,) for side in (less.low, less.high)]
            for less in claim.comparisons
            if not isinstance(less.low, float) and not isinstance(less.high, float)
        ]
        mixed = any(
            any(low == "fire" for low in a) and any(high.endswith("-fire") for high in b)
            for low_high in pairs
            for a, b in (low_high, low_high[::-1])
        )
        assert ("FIRE" in claim.note) == mixed, claim.text


def test_numbers_of_the_paper_are_those_of_its_tables():
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


# ---- recipes and keys


def flat(spec: dict, prefix: str = "") -> set[str]:
    """Return the dotted names of all fields and sections."""
    names = set()
    for name, value in spec.items():
        names |= {prefix + name} | (flat(value, f"{prefix}{name}.") if isinstance(value, dict) else set())
    return names


@pytest.mark.parametrize("recipe", ["quickstart", "small", "paper", "che"])
def test_recipes_are_read_from_any_directory(recipe: str, tmp_path: Path, monkeypatch):
    argument = "task=even_pairs" if recipe == "che" else None
    expected = read_module(ROOT / "configs" / f"{recipe}.py").get_config(argument).to_dict()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != ROOT])
    assert read_module(ROOT / "configs" / f"{recipe}.py").get_config(argument).to_dict() == expected
    monkeypatch.chdir(ROOT)
    assert read_module(Path("configs", f"{recipe}.py")).get_config(argument).to_dict() == expected


def test_a_recipe_can_be_copied(tmp_path: Path):
    (tmp_path / "mine.py").write_text((ROOT / "configs" / "small.py").read_text())
    assert read_module(tmp_path / "mine.py").get_config("s").model.num_layers == 4


def test_keys_depend_on_the_fields_that_change_results_and_on_no_others(tmp_path: Path):
    (item, *_) = runs_with_one_seed("fig2", "small")
    spec = config_of(item)

    def key(metric: str = "perplexity", **changes: object) -> str:
        changed = json.loads(json.dumps(spec))
        for field, value in changes.items():
            section, name = field.split("__")
            changed[section][name] = value
        return PlannedRun(item, metric, {}, read_run(changed), "digest", tmp_path).key

    assert key() != key(metric="delta")
    for change in ({"train__num_steps": 7}, {"model__width": 8}, {"optimizer__learning_rate": 1.0}, {"train__seed": 9}):
        assert key() != key(**change)
    assert key() != key(evaluation__last_tokens=32)
    for change in ({"train__logits_chunk_tokens": 64}, {"data__path": "copy"}, {"evaluation__batch_tokens": 4096}):
        assert key() == key(**change)
        assert key("step_ms") != key("step_ms", **change)


def test_runs_on_an_accelerator_have_larger_blocks_and_the_same_keys(tmp_path: Path, monkeypatch):
    runs = runs_with_one_seed("converged", "converged")

    def planned() -> list[PlannedRun]:
        specs = [config_of(item) for item in runs]
        return [
            PlannedRun(item, "perplexity", spec, read_run(spec), "digest", tmp_path)
            for item, spec in zip(runs, specs, strict=True)
        ]

    on_cpu = planned()
    monkeypatch.setattr(run, "device_platform", lambda: "gpu")
    on_gpu = planned()
    assert all(a.config != b.config for a, b in zip(on_cpu, on_gpu, strict=True))
    assert [a.key for a in on_cpu] == [b.key for b in on_gpu]
    assert [a.workdir_name for a in on_cpu] == [b.workdir_name for b in on_gpu]
    assert {b.config.model.dtype for b in on_gpu} == {"float32"}
    assert all(
        b.config.evaluation.block_size > a.config.evaluation.block_size for a, b in zip(on_cpu, on_gpu, strict=True)
    )


@pytest.mark.parametrize("name", ["fig2", "table6"])
def test_fields_left_out_of_keys_are_fields(name: str):
    named = flat(config_of(runs_with_one_seed(name, "small")[0]))
    unknown = set(run.UNIDENTIFYING_FIELDS) - named
    assert all(name == "table6" and field.startswith("data.") for field in unknown), unknown


def test_committed_results_are_of_the_catalogues_runs():
    """Compare the keys: otherwise all runs would be trained again."""
    checked = Counter()
    for directory in {file.parent for file in (ROOT / "results").glob("*/*/*-seed*.json")}:
        name, (preset, _, text) = directory.parent.name, directory.name.partition("-")
        experiment = EXPERIMENTS[name]
        data = "" if experiment.tasks else "stdlib"
        settings = Settings(preset, data=data, seeds=tuple(range(5)), tasks=experiment.tasks)
        runs = {item.name: item for item in runs_of(experiment, settings)}
        for file in directory.glob("*-seed*.json"):
            found, spec = run.read_result(file), config_of(runs[file.stem])
            if text not in ("", "stdlib"):  # a prepared corpus, which has its own tokenizer
                spec["data"] |= {"path": f"data/{text}", "tokenizer": None}
            expected = PlannedRun(runs[file.stem], experiment.metric, {}, read_run(spec), found["data"], file)
            assert found["key"] == expected.key, file
            checked[name] += 1
    assert (checked["fig2"], checked["fig5"]) == (84, 70)
    assert sum(checked.values()) == 906


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

TASK_CLAIM = Claim("b is better than a", (Less(Score(("a",), "even_pairs"), Score(("b",), "even_pairs")),))
TASK_RECIPE = """
from pathlib import Path
from dape_jax.recipes import read_module

def get_config(argument):
    task, bias, *settings = argument.split(",")
    config = read_module(Path(CHE)).get_config(",".join([task, f"bias={bias}", *settings]))
    config.model.update(num_layers=1, width=16, num_heads=2)
    config.train.update(train_length=4, validation_batches=1)
    return config
""".replace("CHE", repr(str(ROOT / "configs" / "che.py")))


@pytest.fixture
def small_world(tmp_path: Path, monkeypatch) -> dict[str, str]:
    """Return results and workdirs of three tiny experiments: two on a text with a shared model, and one on tasks."""
    sizes = {"model__num_layers": 1, "model__processor": {"name": "none"}}
    spec = tiny.spec(tmp_path, train__num_steps=2, evaluation__lengths=(16, 32), **sizes)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(RECIPE.replace("SPEC", repr(json.dumps(spec))))
    monkeypatch.setattr(run, "RECIPES", tmp_path / "configs")
    (tmp_path / "configs" / "tasks.py").write_text(TASK_RECIPE)
    on_tasks = TaskPreset("tasks.py", ("even_pairs", "reverse_string"), ("a", "b"), 2, 8, (3, 4, 5, 7), 8)
    preset = Preset("tiny.py", {"125m": "xs"}, 1, None, (0, 1), str(tmp_path / "text"), on_tasks)
    monkeypatch.setitem(PRESETS, "tiny", preset)
    for method, bias in (("a", "kerple"), ("b", "alibi"), ("c", "nope")):
        monkeypatch.setitem(METHODS, method, bias)
    monkeypatch.setattr(run, "lengths_from", lambda length, longest: (length, 2 * length))
    for name, methods in (("one", ("a", "b")), ("two", ("b", "c")), ("unknown", ("a", "dape1x9"))):
        experiment = Experiment("title", "source", methods, (16,), (CLAIM,), presets=("tiny",))
        monkeypatch.setitem(EXPERIMENTS, name, experiment)
    on_tasks = dataclasses.replace(
        experiment,
        methods=("a", "b", "c"),
        train_lengths=(4,),
        claims=(TASK_CLAIM,),
        tasks=tuple(TASKS),
        metric="accuracy",
    )
    monkeypatch.setitem(EXPERIMENTS, "tasks", on_tasks)
    return {"results": str(tmp_path / "results"), "workdirs": str(tmp_path / "workdirs")}


def run_tiny(name: str, world: dict[str, str], seeds: tuple[int, ...] = (), tasks: tuple[str, ...] = ()) -> list[Path]:
    return run_experiment(name, Settings("tiny", seeds=seeds, tasks=tasks, **world))


@pytest.fixture
def trained(monkeypatch) -> list[tuple[str, int]]:
    """Return the list of models that would be trained, by bias and seed; results are computed from the seed instead."""
    models = []

    def train(config, workdir):
        models.append((config["model"]["bias"]["name"], config["train"]["seed"]))
        if "task" in config["data"]:
            models[-1] += (config["data"]["task"],)

    def evaluate_run(item, workdir):
        seed, lengths = item.run.seed, item.run.lengths
        if item.metric == "accuracy":
            reached = 0.5 + 0.25 * (item.run.method == "b") + seed / 8
            return {"lengths": [{"length": length, "accuracy": reached - length / 100} for length in lengths]}
        return {"lengths": [{"length": length, "perplexity": length + seed / 8} for length in lengths]}

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(run, "evaluate_run", evaluate_run)
    return models


def test_finished_runs_are_reused_and_a_killed_experiment_resumes(small_world, trained, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "evaluate_run", killed)
        with pytest.raises(KeyboardInterrupt):
            run_tiny("one", small_world)
    assert trained == [("kerple", 0)]
    assert not list(Path(small_world["results"]).rglob("*.json"))
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

    # The report, in three forms.
    readme = report.write(Path(small_world["results"])).read_text()
    assert (
        "| [one](#one) tiny, text | b is within ten times a | **holds** | 1 of 1 | 0 "
        "| b T16 at 32 against 10.00 x a T16 at 32 | -90.0 % [-90.0, -90.0] | 2 |  | "
    ) in readme
    assert "- two: b is within ten times a." in readme  # there are no runs of a
    assert "- fig2: DAPE1x3-Kerple is the best of all at the train length; " in readme
    paper, others = readme.split("### Questions that the paper leaves open")
    numbers = [len(e.claims) for e in EXPERIMENTS.values() if e.source == NOT_IN_PAPER]
    assert f"\n\n1 holds, {sum(len(e.claims) for e in EXPERIMENTS.values()) - sum(numbers) - 1} not tested.\n" in paper
    assert f"\n\n{sum(numbers)} not tested.\n" in others
    assert "| a | 16 | 16.06 ± 0.06 | 32.06 ± 0.06 |" in readme
    described = json.loads((Path(small_world["results"]) / "report.json").read_bytes())
    (claim,) = described["one"]["tiny-text"]["claims"]
    assert claim["difference"] == pytest.approx(-90)
    assert claim["minutes"] == pytest.approx(sum(json.loads(file.read_bytes())["wall_seconds"] for file in files) / 60)
    assert (claim["verdict"], claim["low"] <= claim["difference"] <= claim["high"]) == ("holds", True)
    (pair,) = claim["pairs"]
    assert (pair["pair"], pair["verdict"]) == ("b T16 against 10.00 x a T16", "holds")
    assert {pair["weakest"], claim["deciding"]} == {"b T16 at 32 against 10.00 x a T16 at 32"}
    assert pair["difference"] == claim["difference"]
    (series,) = [series for series in described["one"]["tiny-text"]["series"] if series["method"] == "a"]
    assert [series["values"][seed]["32"] for seed in ("0", "1")] == [32, 32.125]
    assert (Path(small_world["results"]) / "one" / "tiny-text.png").stat().st_size > 10_000
    assert (Path(small_world["results"]) / "one" / "tiny-text.pdf").read_bytes().startswith(b"%PDF-")
    header, *numbers = (Path(small_world["results"]) / "one" / "tiny-text.csv").read_text().splitlines()
    assert header == "method,size,task,train_length,seed,length,perplexity"
    assert sum(line.startswith("a,") and line.endswith((",32,32", ",32,32.0", ",32,32.125")) for line in numbers) == 2

    # Another text of the same name is refused, also under another seed.
    (Path(small_world["results"]).parent / "text" / "00.txt").write_text("another text " * 30)
    for seeds in ((), (2,)):
        with pytest.raises(InputError, match="another config or text"):
            run_tiny("one", small_world, seeds)
    assert len(trained) == 7


def test_tables_have_the_number_of_seeds_of_each_model_if_it_differs(small_world, trained):
    *_, last = run_tiny("two", small_world)
    results = Path(small_world["results"])
    assert "| method | trained at | 16 | 32 |" in report.write(results).read_text()
    last.unlink()
    page = report.write(results).read_text()
    assert all(row in page for row in ("| method | trained at | seeds | 16 | 32 |", "| b | 16 | 2 |", "| c | 16 | 1 |"))


def test_two_processes_cannot_use_one_directory(small_world, trained, monkeypatch):
    refused = []

    def evaluate_run(item, workdir, real=run.evaluate_run):
        for name, changes in (("one", {"workdirs": small_world["workdirs"] + "/other"}), ("two", {})):
            with pytest.raises(InputError, match="in use by another process") as error:
                run_tiny(name, small_world | changes)
            refused.append(str(error.value).split()[0])
        return real(item, workdir)

    with monkeypatch.context() as patch:
        patch.setattr(run, "evaluate_run", evaluate_run)
        run_tiny("one", small_world, (0,))
    assert refused == ["--results", "--workdirs"] * 2
    assert trained == [("kerple", 0), ("alibi", 0)]
    run_tiny("two", small_world, (0,))  # the locks are released


def test_damaged_results_are_named(small_world, trained):
    run_tiny("one", small_world)
    file = Path(small_world["results"]) / "one" / "tiny-text" / "a-xs-T16-seed1.json"
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
        {"config": good["config"] | {"optimizer": optimizer}},  # the range would not be one over seeds
    ):
        file.write_text(json.dumps(good | changes))
        with pytest.raises(InputError, match=r"a-xs-T16-seed1\.json") as error:
            report.write(Path(small_world["results"]))
        assert "\n" not in str(error.value)
    for text in ("{", "[]", "{}"):
        file.write_text(text)
        with pytest.raises(InputError, match=r"a-xs-T16-seed1\.json"):
            report.write(Path(small_world["results"]))
        with pytest.raises(InputError, match=r"a-xs-T16-seed1\.json"):
            run_tiny("two", small_world)

    # A method that is no longer in the catalogue is left out.
    file.write_text(json.dumps(good | {"method": "z"}))
    readme = report.write(Path(small_world["results"])).read_text()
    assert "- one: b is within ten times a." in readme
    assert "| [one](#one)" not in readme


def test_tasks_are_run_and_reported_as_methods_by_tasks(small_world, trained):
    files = run_tiny("tasks", small_world, (0,))
    models = [(bias, 0, task) for task in ("even_pairs", "reverse_string") for bias in ("kerple", "alibi")]
    assert trained == models
    assert files[1] == Path(small_world["results"]) / "tasks" / "tiny" / "b-even_pairs-seed0.json"
    before = [file.read_bytes() for file in files]
    run_tiny("tasks", small_world)
    assert trained == models + [(bias, 1, task) for bias, _, task in models]
    assert run_tiny("tasks", small_world, (1,), ("reverse_string", "even_pairs"))
    assert len(trained) == 8
    assert [file.read_bytes() for file in files] == before
    content = json.loads(before[1])
    assert {field: content[field] for field in ("method", "task", "train_length", "seed", "metric")} == {
        "method": "b",
        "task": "even_pairs",
        "train_length": 4,
        "seed": 0,
        "metric": "accuracy",
    }
    assert "--config.evaluation.num_sequences=8" in content["train_command"]
    assert content["config"]["evaluation"]["num_sequences"] == 8

    # Another task than the preset's, without the methods that it leaves out.
    (file, _) = run_tiny("tasks", small_world, (0,), ("bucket_sort",))
    assert file.name == "a-bucket_sort-seed0.json"
    assert trained[8:] == [("kerple", 0, "bucket_sort"), ("alibi", 0, "bucket_sort")]

    readme = report.write(Path(small_world["results"])).read_text()
    verdict = "| [tasks](#tasks) tiny | b is better than a | **holds** | 1 of 1 | 0 |"
    assert f"{verdict} a on even_pairs minus b on even_pairs | -25.00 [-25.00, -25.00] |" in readme
    # Lengths 5 and 7 are beyond training, 3 and 4 within; seeds differ by 12.5.
    assert "| even_pairs | regular | 50 | 50.25 ± 6.25 | 75.25 ± 6.25 |" in readme
    assert "| even_pairs | regular | 50 | 52.75 ± 6.25 | 77.75 ± 6.25 |" in readme
    assert "| bucket_sort | context-sensitive | 20 | 44.00 | 69.00 |" in readme
    assert "mean over 2 lengths, 5 to 7; 2 steps on lengths 1 to 4, 8 sequences of each length, seeds 0, 1" in readme
    assert (Path(small_world["results"]) / "tasks" / "tiny.png").stat().st_size > 10_000
    described = json.loads((Path(small_world["results"]) / "report.json").read_bytes())
    (series,) = [
        series
        for series in described["tasks"]["tiny"]["series"]
        if (series["method"], series["task"]) == ("b", "reverse_string")
    ]
    assert series["beyond"] == {"0": pytest.approx(69), "1": pytest.approx(81.5)}
    assert series["values"]["1"]["7"] == pytest.approx(80.5)

    # Damaged results, and those of another config, are named.
    file = files[0].with_name("a-even_pairs-seed1.json")
    good = json.loads(file.read_bytes())
    for changes in (
        {"task": 1},
        {"task": "even_pairs", "lengths": [{"length": 3}]},
        {"lengths": 1},
        {"data": "other strings"},
        {"config": good["config"] | {"optimizer": {}}},
    ):
        file.write_text(json.dumps(good | changes))
        with pytest.raises(InputError, match=r"a-even_pairs-seed1\.json") as error:
            report.write(Path(small_world["results"]))
        assert "\n" not in str(error.value)
    file.write_text(json.dumps(good | {"data": "other strings"}))
    with pytest.raises(InputError, match="another config or text"):
        run_tiny("tasks", small_world, (0,))  # seeds 0 and 1 share a directory
    assert len(trained) == 10


def test_accuracy_is_measured(small_world, monkeypatch):
    tiny_tasks = dataclasses.replace(PRESETS["tiny"].on_tasks, methods=("b",))
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], on_tasks=tiny_tasks))
    (file,) = run_tiny("tasks", small_world, (0,), ("even_pairs",))
    (written,) = Path(small_world["workdirs"]).glob("*/accuracy.json")
    (result,) = json.loads(written.read_bytes())["runs"]
    assert json.loads(file.read_bytes())["lengths"] == result["lengths"]
    assert [item["length"] for item in result["lengths"]] == [3, 4, 5, 7]
    assert {item["num_sequences"] for item in result["lengths"]} == {8}
    (group,) = report.read_groups(Path(small_world["results"]))
    (series,) = group.series
    assert series.beyond == {0: pytest.approx(100 * result["score"])}  # one definition of the score
    assert series.within == {0: pytest.approx(100 * result["trained"])}


def test_perplexity_delta_and_time_are_measured(small_world, monkeypatch):
    monkeypatch.setattr(run, "TIMED_TURNS", 2)
    for name, metric, methods in (
        ("plain", "perplexity", ("a",)),
        ("delta", "delta", ("a",)),
        ("time", "step_ms", ("a", "b")),
    ):
        experiment = dataclasses.replace(EXPERIMENTS["one"], methods=methods, claims=(), metric=metric)
        monkeypatch.setitem(EXPERIMENTS, name, experiment)
    (plain,), (delta,), times = (run_tiny(name, small_world, (0,)) for name in ("plain", "delta", "time"))
    assert (
        len([path for path in Path(small_world["workdirs"]).iterdir() if path.is_dir()]) == 1
    )  # both are of one model
    local, full = [result["perplexity"] for result in json.loads(delta.read_bytes())["lengths"]]
    groups = {group.experiment: group for group in report.read_groups(Path(small_world["results"]))}
    measured = {result["length"]: result["perplexity"] for result in json.loads(plain.read_bytes())["lengths"]}
    assert groups["plain"].series[0].values[0] == measured
    assert measured[32] == pytest.approx(full, rel=1e-6)
    assert groups["delta"].series[0].values[0] == {32: pytest.approx(local - full, rel=1e-12)}  # equation 6
    assert groups["time"].series[1].values[0] == {16: json.loads(times[1].read_bytes())["step_ms"]}

    # Times of another seed are measured together, and finished ones are kept.
    before = [file.read_bytes() for file in times]
    calls = []
    monkeypatch.setattr(run, "step_milliseconds", lambda configs: calls.append(configs) or [{"step_ms": 1.0}] * 2)
    again = run_tiny("time", small_world, (0, 1))
    assert [[config.train.seed for config in configs] for configs in calls] == [[1, 1]]
    assert [file.read_bytes() for file in again if file in times] == before
    assert report.write(Path(small_world["results"])).exists()


@pytest.mark.parametrize("value", [math.inf, math.nan, 1.7e308], ids=str)
@pytest.mark.parametrize("metric", ["perplexity", "delta"])
def test_models_that_diverged_are_in_the_report(small_world, trained, monkeypatch, metric: str, value: float):
    """One seed, then all, of a method diverged: figures leave it out, tables name it, and the JSON is valid."""
    monkeypatch.setitem(EXPERIMENTS, "one", dataclasses.replace(EXPERIMENTS["one"], metric=metric))
    diverged = {"length": 32, "perplexity": value, "delta": -value}
    small = {"length": 16, "perplexity": 3.0, "delta": 1.0}
    for seeds in ((0,), (0, 1)):

        def evaluate_run(item: PlannedRun, workdir: Path, seeds: tuple = seeds) -> dict:
            of_run = [small, diverged if item.run.method == "a" and item.run.seed in seeds else small | {"length": 32}]
            return json_values({"lengths": of_run, "deltas": of_run})

        monkeypatch.setattr(run, "evaluate_run", evaluate_run)
        world = small_world | {"results": f"{small_world['results']}-{len(seeds)}"}
        files = run_tiny("one", world)
        page = report.write(Path(world["results"])).read_text()
        read = json.loads((Path(world["results"]) / "report.json").read_text(), parse_constant=pytest.fail)
        (group,) = read["one"].values()
        found = float(group["series"][0]["values"]["0"]["32"])
        expected = value if metric == "perplexity" else -value
        assert found == pytest.approx(expected, nan_ok=True)
        (row,) = [line for line in page.splitlines() if line.startswith("| a | 16 |")]
        assert len(row) < 100
        assert ("nan" if math.isnan(value) else "inf" if value == math.inf or len(seeds) == 2 else "e+307") in row
        assert all(json.loads(file.read_text(), parse_constant=pytest.fail) for file in files)


def test_a_results_directory_that_is_full_is_named(small_world, trained, monkeypatch):
    def fail(file: Path, content: dict) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_json", fail)
        with pytest.raises(InputError, match=r"--results = .*seed0.json.*: cannot be written: .*No space left"):
            run_tiny("one", small_world)
    run_tiny("one", small_world)
    monkeypatch.setattr(report, "write_json", fail)
    with pytest.raises(InputError, match=r"--results = .*: cannot be written to: .*No space left"):
        report.write(Path(small_world["results"]))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("fig99", {}, ["experiment", "fig99", "fig2"]),
        ("table6", {"tasks": ("even_pears",)}, ["--tasks", "even_pears", "even_pairs"]),
        ("table6", {"tasks": ("even_pairs", "even_pairs")}, ["--tasks", "even_pairs", "duplicates"]),
        ("table6", {"data": "stdlib"}, ["--data", "stdlib", "own strings"]),
        ("fig2", {"tasks": ("even_pairs",)}, ["--tasks", "even_pairs", "on a text"]),
        ("fig2", {"methods": ("dape1x3",)}, ["--methods", "dape1x3", "dape1x3-kerple"]),
        ("fig2", {"train_lengths": (128, 512)}, ["--train_lengths", "512", "[32, 128]"]),
        ("fig2", {"train_lengths": (32, 32)}, ["--train_lengths", "32", "duplicates"]),
        ("fig3", {"methods": ("rope",), "train_lengths": (64,)}, ["--methods, --train_lengths", "rope", "64"]),
        ("table6", {"methods": ("alibi",)}, ["--methods", "alibi", "small"]),
        ("unknown", {"preset": "tiny"}, ["method of the experiment", "dape1x9", "METHODS"]),
        ("fig2", {"methods": ("rope", "rope")}, ["--methods", "rope", "duplicates"]),
        ("fig2", {"preset": "huge"}, ["--preset", "huge", "small"]),
        ("fig2", {"preset": "paper"}, ["--data", "paper"]),
        ("fig2", {"seeds": (1, 1)}, ["--seeds", "duplicates"]),
        ("one", {"preset": "tiny", "data": "/nowhere"}, ["data.path", "/nowhere"]),
    ],
)
def test_bad_input_is_named(small_world, name: str, changes: dict, words: list[str]):
    with pytest.raises(InputError) as error:
        run_experiment(name, Settings(**small_world | changes))
    assert all(word in str(error.value) for word in words)
    assert not Path(small_world["results"]).exists()


def test_a_report_on_nothing_or_on_something_else_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="finished runs"):
        report.write(tmp_path)
    for text in ("{", "[]", "{}", '{"method": 1}'):
        file = tmp_path / "fig2" / "small-stdlib" / "a-seed0.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        with pytest.raises(InputError, match=r"a-seed0\.json"):
            report.write(tmp_path)


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "settings_of_flags", "words"),
    [
        (["list"], {}, ["fig1", "table9", "appendixE"]),
        (["show", "fig5"], {}, ["Note: FIRE's official settings"]),
        (["show", "fig6"], {}, ["--config.model.processor.leak=True", "below 1.1"]),
        (["show", "fig2"], {"preset": "paper"}, ["configs/paper.py:125m,bias=kerple", "8192"]),
        (["show", "table6"], {}, ["configs/che.py:task=even_pairs,bias=kerple,processor=dape,kernel=3", "8 of 11"]),
        (["show", "table6"], {"preset": "paper", "tasks": ("odds_first",)}, ["11 runs", "evaluated at 1 to 500"]),
    ],
)
def test_commands_print(arguments: list[str], settings_of_flags: dict, words: list[str], capsys, monkeypatch):
    monkeypatch.setattr(command_line, "from_flags", lambda kind: kind(**settings_of_flags))
    experiments_main.main(["experiments", *arguments])
    output = capsys.readouterr().out
    assert all(word in output for word in words), output


@pytest.mark.parametrize(
    ("arguments", "settings_of_flags", "words"),
    [
        (["show", "table6"], {"tasks": ("odds",)}, ["--tasks = 'odds'", "odds_first"]),
        (["show", "fig7"], {}, ["experiment = 'fig7'"]),
        (["show", "cost"], {"preset": "paper"}, ["--preset = 'paper'", "small"]),
        ([], {}, ["command", "list"]),
        (["run"], {}, ["run = ''", "fig2"]),
        (["list", "fig2"], {}, ["list = 'fig2'"]),
    ],
)
def test_commands_refuse(arguments: list[str], settings_of_flags: dict, words: list[str], monkeypatch):
    monkeypatch.setattr(command_line, "from_flags", lambda kind: kind(**settings_of_flags))
    with pytest.raises(InputError) as error:
        experiments_main.main(["experiments", *arguments])
    assert all(word in str(error.value) for word in words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["show", "table6", "--preset=paper", "--tasks=odds_first", "--seeds=1,2"], 0, ["22 runs", "seed=2"]),
        (["list", "fig2", "x"], 2, ["COMMAND NAME"]),
        (["run", "fig2", "--seeds=a"], 2, ["--seeds"]),
    ],
)
def test_the_command_line(arguments: list[str], status: int, words: list[str]):
    command = [sys.executable, "-m", "experiments", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == status, done.stderr
    output = done.stdout if status == 0 else done.stderr
    assert all(word in output for word in words), output
    assert status == 0 or len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_recipes_work_on_the_command_line_of_another_directory(tmp_path: Path):
    config = f"--config={ROOT / 'configs' / 'small.py'}:xs,bias=fire"
    command = [sys.executable, str(ROOT / "train.py"), config, "--config.train.num_steps=0", "--workdir=run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "train.num_steps = 0" in done.stderr


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_finished_experiment_is_drawn_with_a_color_for_each_curve(name):
    experiment = EXPERIMENTS[name]
    series = [
        groups.Series(method, size, task, train_length, {0: {train_length: 2.0 + n, 2 * train_length: 3.0 + n}})
        for n, (method, size, train_length, task) in enumerate(catalogue.models_of(experiment))
    ]
    data = "" if experiment.tasks else "stdlib"
    figure = report.plot(groups.Group(name, "small", data, {"commit": ["0"]}, series))
    for panel in (panel for panel in figure.axes if not panel.patches):  # no bars
        curves = [line for line in panel.get_lines() if not str(line.get_label()).startswith("_")]
        assert curves
        assert len({line.get_color() for line in curves}) == len(curves)


def test_a_curve_far_above_most_others_is_cut_but_not_hidden():
    """Check that the axis ends near the close curves, each curve has a point on it, and none is cut if most differ."""

    def limits(*curves: tuple[float, float]) -> tuple[float, float]:
        axes = Figure().subplots()
        series = [
            groups.Series(str(n), "125m", "", 512, {0: {512: low, 4096: high}}) for n, (low, high) in enumerate(curves)
        ]
        for item in series:
            report._draw_curve(axes, item, 1, item.method, "tab:blue")
        report._scale_text_axes(axes, series)
        return axes.get_ylim()

    close = [(2.3, 1.9), (2.3, 2.2)]
    low, high = limits(*close, (2.3, 110.0))
    assert 1.5 < low < 1.9
    assert 2.3 < high < 4
    low, high = limits(*close, (2.3, 2.3), (9.0, 110.0))
    assert 1.5 < low < 1.9
    assert 9.0 < high < 110.0
    assert limits(*close, (2.3, 30.0), (2.3, 110.0))[1] > 110.0
    assert limits((2.3, 1.9), (2.3, 30.0), (2.3, 110.0))[1] > 110.0


def test_a_single_published_number_is_drawn_with_its_name():
    """Draw a marker, because a line through one point would be invisible; a curve has no name next to it."""
    axes = Figure().subplots()
    alone = groups.Series("cope", "125m", "", 512, {0: {1024: 20.5}})
    curve = groups.Series("kerple", "125m", "", 512, {0: {512: 19.0, 1024: 21.0}})
    for item in (alone, curve):
        report._draw_curve(axes, item, 1, item.method, "tab:blue")
    assert [(text.get_text(), tuple(text.xy)) for text in axes.texts] == [("cope", (1024, 20.5))]
    point, line = axes.get_lines()
    assert (point.get_marker(), point.get_linestyle(), line.get_linestyle()) == ("D", "None", "-")
    unknown = groups.Series("cope", "125m", "", 512, {0: {1024: math.nan}})
    report._draw_curve(axes, unknown, 1, "nothing", "tab:blue")
    assert len(axes.texts) == 1
