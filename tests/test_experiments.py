"""Test the experiments: the catalogue agrees with the paper, no run is trained twice, the report states the results."""

import dataclasses
import itertools
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import tiny
from processes import ROOT

from dape_jax.config import RunConfig, TaskRunConfig, read_run
from dape_jax.errors import InputError
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.protocols import table_of
from dape_jax.evaluation.report import json_values
from dape_jax.model.transformer import model_structure
from dape_jax.tasks import CHE as TASKS
from experiments import __main__ as experiments_main
from experiments import plots, report, run, runs, verdicts
from experiments.catalogue import EXPERIMENTS
from experiments.claims import NOT_IN_PAPER, Claim, Experiment, Less, Result, cell, score
from experiments.methods import METHODS, PRESETS, Preset, TaskPreset
from experiments.paper import paper_tables
from experiments.run import PlannedRun, Run, config_of, run_experiment, runs_of
from experiments.runs import Group, Series, add_run, paper_groups, read_groups, read_lines, read_runs, write_lines
from experiments.settings import Settings

pytestmark = pytest.mark.extra


def runs_with_one_seed(name: str, preset: str) -> list[Run]:
    """Return the runs of an experiment with seed 0, on a text or on all of its tasks."""
    tasks = EXPERIMENTS[name].tasks
    return runs_of(EXPERIMENTS[name], Settings(preset, data="" if tasks else "stdlib", seeds=(0,), tasks=tasks))


# ---- the catalogue


def test_methods_and_train_lengths_choose_among_the_runs():
    every, methods = runs_of(EXPERIMENTS["fig2"], Settings()), ("rope", "dape1x3-kerple")
    chosen = runs_of(EXPERIMENTS["fig2"], Settings(methods=methods, train_lengths=(128,)))
    assert chosen == [item for item in every if item.model.method in methods and item.train_length == 128]
    assert 0 < len(chosen) < len(every)


def test_every_run_has_its_own_valid_config():
    """Models are built once, with one layer and few tokens, although experiments share them."""
    models = {}
    for name, preset in [(name, preset) for name, each in EXPERIMENTS.items() for preset in each.presets]:
        planned = runs_with_one_seed(name, preset)
        assert len({item.name for item in planned}) == len(planned) > 0
        configs = [read_run(config_of(item)) for item in planned]
        assert len({str(config) for config in configs}) == len(configs)
        for item, config in zip(planned, configs, strict=True):
            assert (config.train.train_length, config.train.seed, config.data.seed) == (item.train_length, 0, 0)
            assert item.lengths == tuple(sorted(set(item.lengths)))
            if item.model.task:
                assert isinstance(config, TaskRunConfig)
                assert config.data.task == item.model.task
                assert min(item.lengths) <= item.train_length < max(item.lengths)  # so that both means exist
            else:
                assert isinstance(config, RunConfig)
                assert config.data.path == "stdlib"
            if PRESETS[preset].length_divisor > 1:
                one_layer = dataclasses.replace(config.model, num_layers=1, vocab_size=16, num_outputs=16)
                models[str(one_layer)] = one_layer
    for model in models.values():
        model_structure(model)


def test_the_paper_preset_has_the_published_settings():
    (item,) = [item for item in runs_with_one_seed("table5", "paper") if item.model.method == "dape1x3-kerple"]
    config, table8 = RunConfig.from_dict(config_of(item)), paper_tables()["table8"]["125m"]
    assert table8["batch"] == "32 x 8 GPUs"
    model, train, optimizer = config.model, config.train, config.optimizer
    found = [train.batch_size, train.train_length, train.num_steps, model.num_heads, model.num_layers, model.width]
    assert found == [32 * 8, *(table8[name] for name in ("train_length", "iterations", "heads", "layers", "width"))]
    assert [optimizer.learning_rate, [optimizer.beta1, optimizer.beta2]] == [table8["learning_rate"], table8["betas"]]
    assert (config.evaluation.last_tokens, item.lengths) == (256, (512, 1024, 2048, 4096, 8192))
    for preset in EXPERIMENTS["fig3"].presets:  # steps have equal numbers of tokens, as the paper's
        runs_of_preset = [read_run(config_of(item)).train for item in runs_with_one_seed("fig3", preset)]
        assert len({train.train_length for train in runs_of_preset}) == 6
        assert len({train.batch_size * train.train_length for train in runs_of_preset}) == 1


def test_the_paper_preset_has_the_published_settings_of_the_tasks():
    runs, printed = runs_with_one_seed("table6", "paper"), paper_tables()["table6"]
    of_paper = {(method, row["task"]) for method in printed["methods"] for row in printed["tasks"]}
    ours = {(item.model.method, item.model.task) for item in runs}
    assert {each for each in ours if each[1] != "binary_multiplication"} == of_paper
    assert {task for _, task in ours} == set(TASKS)
    for row, name in itertools.product(printed["tasks"], ("permutation_invariant", "random_accuracy")):
        assert getattr(TASKS[row["task"]], name) == row[name]
    for item in runs[:11]:
        config = TaskRunConfig.from_dict(config_of(item))
        assert (config.train.num_steps, config.train.train_length, config.train.batch_size) == (200_000, 40, 128)
        assert (config.evaluation.num_sequences, item.lengths[-460:]) == (512, tuple(range(41, 501)))


def test_claims_compare_results_of_runs():
    for name, experiment in EXPERIMENTS.items():
        planned = runs_with_one_seed(name, experiment.presets[-1])
        divisor = experiment.length_divisor(experiment.presets[-1])
        measured = {
            (item.model, None if item.model.task else length * divisor)
            for item in planned
            for length in item.lengths
            if not (experiment.metric == "delta" and length == item.train_length)
        }
        claims = experiment.claims.values()
        sides = {side for claim in claims for less in claim.comparisons for side in (less.low, less.high)}
        assert {(model, side.length) for side in sides if isinstance(side, Result) for model in side.models} <= measured
        assert all(0 < (claim.at_least or 1) <= len(claim.comparisons) for claim in claims)
    assert set(METHODS) == {method for experiment in EXPERIMENTS.values() for method in experiment.methods}


def test_the_papers_claims_hold_of_the_papers_numbers():
    checked, counts = Counter(), {}
    for name, experiment in EXPERIMENTS.items():
        for group, (text, each) in itertools.product(paper_groups(name), experiment.claims.items()):
            found = [verdicts.difference(less, runs.lookup_in(group), experiment.metric) for less in each.comparisons]
            found = [difference for difference in found if difference]  # the paper does not print every number
            holds = [difference.mean < 0 for difference in found]
            assert {difference.num_seeds for difference in found} <= {1}
            assert sum(holds) >= (len(holds) if each.at_least is None else each.at_least), text
            checked[group.data] += len(holds)
            counts[text] = sum(holds), len(holds)
    assert min(checked["arxiv"], checked["books3"], checked[""]) > 80
    # Where the paper counts tasks, its numbers give its count.
    assert [count for text, count in counts.items() if "of 11" in text] == [(8, 11), (6, 11)]


# ---- identities


def test_identities_depend_on_the_fields_that_change_results_and_on_no_others(monkeypatch):
    (item, *_) = runs_with_one_seed("converged", "converged")
    spec = config_of(item)

    def identity(metric: str = "perplexity", seeds: bool = True, **changes: object) -> str:
        config = read_run(tiny.changed(spec, **changes))
        return PlannedRun(item, metric, config, "digest", "group").identity(seeds=seeds)

    assert identity() != identity(metric="delta")
    for change in ({"train__num_steps": 7}, {"model__width": 8}, {"evaluation__last_tokens": 32}):
        assert identity() != identity(**change)
        assert identity(seeds=False) != identity(seeds=False, **change)
    for change in ({"train__seed": 9}, {"data__seed": 9}):
        assert identity() != identity(**change)
        assert identity(seeds=False) == identity(seeds=False, **change)
    unseen = ({"train__logits_chunk_tokens": 64}, {"data__path": "copy"}, {"model__vocab_multiple": 128})
    for change in (*unseen, {"evaluation__batch_tokens": 4096}):
        assert identity() == identity(**change)
        assert identity("step_ms") != identity("step_ms", **change)
    on_cpu, block_size = identity(), spec["evaluation"]["block_size"]
    monkeypatch.setattr(run, "device_platform", lambda: "gpu")
    spec = config_of(item)
    assert spec["evaluation"]["block_size"] > block_size
    assert identity() == on_cpu
    assert spec["model"]["dtype"] == "float32"


def test_committed_results_are_of_the_catalogues_runs_and_stored_once():
    """Compare identities: otherwise all runs would be trained again."""
    checked, planned_identities, identities = Counter(), {}, {}
    for name, groups in read_runs(ROOT / "results").items():
        experiment = EXPERIMENTS[name]
        for group, stored in groups.items():
            preset, _, text = group.partition("-")
            data = "" if experiment.tasks else "stdlib"
            settings = Settings(preset, data=data, seeds=tuple(range(5)), tasks=experiment.tasks)
            planned = {item.name: item for item in runs_of(experiment, settings)}
            for run_name, found in stored.items():
                item = planned[run_name]
                same = (item.recipe, item.argument, str(item.overrides), item.lengths, found["data"], experiment.metric)
                if same not in planned_identities:
                    spec = config_of(item)
                    if text not in ("", "stdlib"):  # a prepared corpus, which has its own tokenizer
                        spec["data"] |= {"path": f"data/{text}", "tokenizer": None}
                    ours = PlannedRun(item, experiment.metric, read_run(spec), found["data"], group)
                    planned_identities[same] = ours.identity()
                if found["key"] not in identities:
                    identities[found["key"]] = runs.identity_of_stored(found)
                assert identities[found["key"]] == planned_identities[same], (name, group, run_name)
                checked[name] += 1
    assert (checked["fig2"], checked["fig5"], sum(checked.values())) == (84, 70, 906)
    lines = [line for name in EXPERIMENTS for line in read_lines(ROOT / "results" / name / runs.FILE)]
    stored = [line["key"] for line in lines if "stored_in" not in line]
    assert len(stored) == len(set(stored)) == len(identities) == len(set(identities.values())) == 708


def test_committed_reports_are_those_of_the_committed_runs():
    """Check one experiment of each metric, because all of them take minutes.

    Numbers are compared to nine digits: the order in which a matmul sums depends on the CPU.
    """

    def read(text: str) -> dict:
        return json.loads(text, parse_float=lambda number: f"{float(number):.9g}")

    names, page = ("fig4", "table1", "table6", "table7"), (ROOT / "results" / "README.md").read_text()
    for group in (group for group in read_groups(ROOT / "results") if group.experiment in names):
        content = report._content(group)
        committed = read((ROOT / "results" / group.experiment / "report.json").read_text())
        assert read(json.dumps(json_values(content))) == committed[group.name]
        claims = [(group, claim) for claim in content["claims"]]
        texts = [report._section(group), *(line for line in report._parts(claims) if line != "None.")]
        texts += [report._verdict_row(*each) for each in claims if "deciding" in each[1]]
        texts += [
            report._tables(each, f"**Paper**, {each.data}") for each in paper_groups(group.experiment) if each.data
        ]
        assert all(text in page for text in texts)


# ---- running

CLAIM = {"ALiBi is within ten times Kerple": Claim([Less(cell("alibi", 16, 32), cell("kerple", 16, 32), 10.0)])}
TASK_CLAIM = {"ALiBi is better": Claim([Less(*(score((method,), "even_pairs", 4) for method in ("kerple", "alibi")))])}
SIZES = {"model.num_layers": 1, "model.width": 16, "model.num_heads": 2, "train.validation_batches": 1}


@pytest.fixture
def small_world(tmp_path: Path, monkeypatch) -> dict[str, str]:
    """Return results and workdirs of three tiny experiments: two on a text with a shared model, and one on tasks."""
    text = {"data.cache_dir": str(tmp_path / "cache"), "data.validation_fraction": 0.3}
    steps = {"train.num_steps": 2, "train.eval_interval": 2, "evaluation.max_windows": 8, "evaluation.last_tokens": 16}
    of_tasks = {"train.num_steps": 2, "train.batch_size": 8, "evaluation.num_sequences": 8}
    on_tasks = TaskPreset(("even_pairs", "reverse_string"), ("kerple", "alibi"), (3, 4, 5, 7), of_tasks)
    path = str(tiny.write_text(tmp_path / "text"))
    preset = Preset("small.py", {"125m": "xs"}, 1, 8, (0, 1), path, on_tasks, overrides=SIZES | text | steps)
    monkeypatch.setitem(PRESETS, "tiny", preset)
    for name, named in (("one", ("kerple", "alibi")), ("two", ("alibi", "nope"))):
        experiment = Experiment("title", named, CLAIM, "source", (16,), longest=32, presets=("tiny",))
        monkeypatch.setitem(EXPERIMENTS, name, experiment)
    experiment = Experiment("title", ("kerple", "alibi", "nope"), TASK_CLAIM, train_lengths=(4,), presets=("tiny",))
    of_tasks = {"tasks": tuple(TASKS), "metric": "accuracy", "overrides": SIZES | {"train.train_length": 4}}
    monkeypatch.setitem(EXPERIMENTS, "tasks", dataclasses.replace(experiment, **of_tasks))
    return {"results": str(tmp_path / "results"), "workdirs": str(tmp_path / "workdirs")}


def run_tiny(name: str, world: dict[str, str], seeds: tuple[int, ...] = (), tasks: tuple[str, ...] = ()) -> list[dict]:
    """Return the stored runs of an experiment, in their order."""
    planned = run_experiment(name, Settings("tiny", seeds=seeds, tasks=tasks, **world))
    stored = read_runs(Path(world["results"]))[name][planned[0].group]
    return [stored[item.run.name] for item in planned]


def length_result(length: int, perplexity: float) -> dict:
    """Return the results of one window with one scored token."""
    nats = math.log(perplexity)
    return {"length": length, "perplexity": perplexity, "num_tokens": 1, "num_windows": 1, "window_nats": [nats]}


@pytest.fixture
def trained(monkeypatch) -> list[tuple[str, int]]:
    """Return the list of models that would be trained, by method and seed; results are computed from the seed."""
    models = []

    def train_and_evaluate(item, workdirs):
        models.append((item.run.model.method, item.run.seed))
        results = [length_result(length, length + item.run.seed / 8) for length in item.run.lengths]
        return {"documents": [0], "lengths": results}

    monkeypatch.setattr(run, "train_and_evaluate", train_and_evaluate)
    return models


def test_finished_runs_are_reused_and_a_killed_experiment_resumes(small_world, trained, monkeypatch, caplog):
    caplog.set_level("INFO", "dape_jax")  # as the command line does

    def killed(*arguments):
        raise KeyboardInterrupt

    results = Path(small_world["results"])
    with monkeypatch.context() as patch:
        patch.setattr(run, "train_and_evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            run_tiny("one", small_world)
    assert not list(results.rglob(runs.FILE))
    first, _ = run_tiny("one", small_world, (0,))
    assert trained == [("kerple", 0), ("alibi", 0)]
    both = run_tiny("one", small_world)
    assert trained[2:] == [("kerple", 1), ("alibi", 1)]
    assert "one: run 2 of 2: alibi-xs-T16-seed1" in caplog.messages
    assert both[0] == first
    assert run_tiny("one", small_world) == both
    run_tiny("two", small_world)
    assert trained[4:] == [("nope", 0), ("nope", 1)]  # alibi is taken from the other experiment
    lines = read_lines(results / "two" / runs.FILE)
    assert [line.get("stored_in") for line in lines] == ["one", "one", None, None]
    content = both[1]
    assert (content["method"], content["seed"], content["train_length"]) == ("alibi", 0, 16)
    assert [result["length"] for result in content["lengths"]] == [16, 32]
    assert {"commit", "device", "versions", "wall_seconds", "config", "data"} <= set(content)

    readme = report.write(results).read_text().replace("\N{NO-BREAK SPACE}", " ")
    verdict = "| [one](#one) tiny, text | ALiBi is within ten times Kerple | **holds**, 1 of 1 hold "
    assert f"{verdict}| alibi T16 at 32 against 10.00 x kerple T16 at 32: -90.0 % [-90.0, -90.0] | 2 |  | " in readme
    assert "- two: ALiBi is within ten times Kerple." in readme  # there are no runs of Kerple
    paper, others = readme.split("### Questions that the paper leaves open")
    numbers = [len(e.claims) for e in EXPERIMENTS.values() if e.source == NOT_IN_PAPER]
    assert f"\n\n1 holds, {sum(len(e.claims) for e in EXPERIMENTS.values()) - sum(numbers) - 1} not tested.\n" in paper
    assert f"\n\n{sum(numbers)} not tested.\n" in others
    described = json.loads((results / "one" / "report.json").read_bytes())["tiny-text"]
    (claim,) = described["claims"]
    assert claim["minutes"] == pytest.approx(sum(each["wall_seconds"] for each in both) / 60)
    (series,) = [series for series in described["series"] if series["method"] == "kerple"]
    assert [series["values"][seed]["32"] for seed in ("0", "1")] == [32, 32.125]
    assert (results / "one" / "figure.png").stat().st_size > 3_000

    # Numbers of seeds are shown if they differ.
    assert "| method | trained at | 16 | 32 |" in readme
    write_lines(results / "two" / runs.FILE, lines[:-1])
    page = report.write(results).read_text()
    for row in ("| method | trained at | seeds | 16 | 32 |", "| alibi | 16 | 2 |", "| nope | 16 | 1 |"):
        assert row in page

    # Another config or another text of the same name is refused, also under another seed.
    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "alibi", "bias=nope")
        with pytest.raises(InputError, match="another config or text"):
            run_tiny("one", small_world, (2,))
    (results.parent / "text" / "00.txt").write_text("another text " * 30)
    for seeds in ((), (2,)):
        with pytest.raises(InputError, match="another config or text"):
            run_tiny("one", small_world, seeds)
    assert len(trained) == 6


def test_two_processes_cannot_use_one_directory(small_world, monkeypatch):
    def train_and_evaluate(item, workdirs):
        for name, changes in (("--results", {"workdirs": small_world["workdirs"] + "/other"}), ("--workdirs", {})):
            with pytest.raises(InputError, match=f"^{name}.*in use by another process"):
                run_tiny("one" if changes else "two", small_world | changes)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train_and_evaluate", train_and_evaluate)
    with pytest.raises(KeyboardInterrupt):
        run_tiny("one", small_world, (0,))


def test_a_report_needs_runs_of_the_catalogue(small_world, trained):
    run_tiny("one", small_world)
    file = Path(small_world["results"]) / "one" / runs.FILE
    write_lines(file, [each | {"method": "z"} for each in read_lines(file) if each["method"] == "alibi"])
    for results in (file.parents[1], file.parents[1] / "nothing"):
        with pytest.raises(InputError, match="finished runs"):
            report.write(results)
    run_tiny("two", small_world)
    file.unlink()
    with pytest.raises(InputError, match=r"run of .*two.* = 'alibi-xs-T16-seed0': must be in .*one"):
        report.write(file.parents[1])
    file.write_bytes(b"a part of a file")
    with pytest.raises(InputError, match=f"^--results = '{file}': cannot be read: ZstdError"):
        read_lines(file)


def test_accuracy_is_measured_and_reported_by_task(small_world):
    """Lengths 5 and 7 are beyond training, 3 and 4 within."""
    (measured,) = run_tiny("tasks", small_world | {"methods": ("alibi",)}, (0,), ("even_pairs",))
    about = [measured[field] for field in ("method", "task", "train_length", "seed", "metric")]
    assert about == ["alibi", "even_pairs", 4, 0, "accuracy"]
    assert "--config.evaluation.num_sequences=8" in measured["train_command"]
    (written,) = Path(small_world["workdirs"]).glob("*/accuracy.json")
    (result,) = json.loads(written.read_bytes())["runs"]
    assert measured["lengths"] == result["lengths"]
    assert [(item["length"], item["num_sequences"]) for item in result["lengths"]] == [(n, 8) for n in (3, 4, 5, 7)]
    readme = report.write(Path(small_world["results"])).read_text()
    for field in ("score", "trained"):  # one definition of the means
        assert f"| even_pairs | regular | 50 | {100 * result[field]:.2f} |" in readme


def test_perplexity_delta_and_time_are_measured(small_world, monkeypatch):
    monkeypatch.setattr(run, "TIMED_STEPS", 2)
    for name, metric in (("plain", "perplexity"), ("delta", "delta"), ("time", "step_ms")):
        named = ("kerple", "alibi") if name == "time" else ("kerple",)
        experiment = dataclasses.replace(EXPERIMENTS["one"], methods=named, claims={}, metric=metric)
        monkeypatch.setitem(EXPERIMENTS, name, experiment)
    (plain,), (delta,), times = (run_tiny(name, small_world, (0,)) for name in ("plain", "delta", "time"))
    workdirs = [path for path in Path(small_world["workdirs"]).iterdir() if path.is_dir()]
    assert len(workdirs) == 1  # both are of one model
    local, full = [result["perplexity"] for result in delta["lengths"]]
    groups = {group.experiment: group for group in read_groups(Path(small_world["results"]))}
    measured = {result["length"]: result["perplexity"] for result in plain["lengths"]}
    assert groups["plain"].series[0].values[0] == measured
    assert measured[32] == pytest.approx(full, rel=1e-6)
    assert groups["delta"].series[0].values[0] == {32: pytest.approx(local - full, rel=1e-12)}  # equation 6
    assert groups["time"].series[1].values[0] == {16: times[1]["step_ms"]}

    # Times of another seed are measured together, and finished ones are kept.
    calls, result = [], {"step_ms": 1.0, "step_ms_each": [1.0]}
    monkeypatch.setattr(run, "step_milliseconds", lambda batch: calls.append(batch) or [result] * 2)
    again = run_tiny("time", small_world, (0, 1))
    assert [[item.run.seed for item in batch] for batch in calls] == [[1, 1]]
    assert again[:2] == times
    assert report.write(Path(small_world["results"])).exists()

    # An interrupted measurement is repeated as a whole: the time that was stored is replaced.
    file = Path(small_world["results"]) / "time" / runs.FILE
    write_lines(file, [line for line in read_lines(file) if line["name"] != "alibi-xs-T16-seed0"])
    assert [each["step_ms"] for each in run_tiny("time", small_world, (0,))] == [1.0, 1.0]


@pytest.mark.parametrize("value", [math.inf, math.nan, 1.7e308], ids=str)
@pytest.mark.parametrize("metric", ["perplexity", "delta"])
def test_models_that_diverged_are_in_the_report(small_world, monkeypatch, metric: str, value: float):
    """One seed, then both, of a method diverged: figures leave it out, tables name it, and the JSON is valid."""
    monkeypatch.setitem(EXPERIMENTS, "one", dataclasses.replace(EXPERIMENTS["one"], metric=metric))
    diverged, small = length_result(32, value) | {"delta": -value}, length_result(16, 3.0) | {"delta": 1.0}
    planned = run.plan_runs("one", Settings("tiny", **small_world))
    for seeds in ((0,), (0, 1)):
        results = Path(f"{small_world['results']}-{len(seeds)}")
        for item in planned:
            is_diverged = item.run.model.method == "kerple" and item.run.seed in seeds
            of_run = [small, diverged if is_diverged else small | {"length": 32}]
            content = item.content(json_values({"documents": [0], "lengths": of_run, "deltas": of_run[1:]}), 1.0)
            add_run(results, "one", item.group, item.run.name, content)
        page = report.write(results).read_text()
        (group,) = json.loads((results / "one" / "report.json").read_text(), parse_constant=pytest.fail).values()
        found = float(group["series"][0]["values"]["0"]["32"])
        assert found == pytest.approx(value if metric == "perplexity" else -value, nan_ok=True)
        (row,) = [line for line in page.splitlines() if line.startswith("| kerple | 16 |")]
        assert len(row) < 100
        assert ("nan" if math.isnan(value) else "inf" if value == math.inf or len(seeds) == 2 else "e+307") in row


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ("run fig99", {}, ["run = 'fig99'", "fig2"]),
        ("run table6", {"data": "stdlib"}, ["--data", "stdlib", "must be empty"]),
        ("run fig2", {"tasks": ("even_pairs",)}, ["--tasks", "even_pairs", "must be empty"]),
        ("run fig2", {"methods": ("rope", "rope")}, ["--methods", "rope", "duplicates"]),
        ("run fig2", {"train_lengths": (128, 512)}, ["--train_lengths", "512", "[32, 128]"]),
        ("run fig3", {"methods": ("rope",), "train_lengths": (64,)}, ["--methods, --train_lengths", "rope", "64"]),
        ("run fig2", {"preset": "huge"}, ["--preset", "huge", "small"]),
        ("run fig2", {"preset": "paper"}, ["--data", "paper"]),
        ("show cost", {"preset": "paper"}, ["--preset = 'paper'", "small"]),
        ("", {}, ["command", "list"]),
        ("list fig2", {}, ["list = 'fig2'"]),
    ],
)
def test_bad_input_is_named(small_world, monkeypatch, arguments: str, changes: dict, words: list[str]):
    monkeypatch.setattr(experiments_main, "use_compilation_cache", lambda *_: None)  # of this process
    with pytest.raises(InputError) as error:
        experiments_main.main(Settings(**small_world | changes), *arguments.split())
    assert all(word in str(error.value) for word in words)
    assert not Path(small_world["results"]).exists()


def test_experiments_are_listed_and_shown(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(experiments_main, "use_compilation_cache", lambda *_: None)
    monkeypatch.setattr(run, "run_experiment", lambda *_: [])
    train = ["configs/small.py:xs,bias=kerple"]
    for arguments, changes, words in (
        (["list"], {}, ["fig1", "table9", "appendixE"]),
        (["show", "fig5"], {}, ["Note: FIRE's official settings", *train, "2048", "--workdir=runs/"]),
        (["run", "fig5"], {"results": "mine", "workdirs": str(tmp_path)}, ["experiments report --results=mine"]),
        (["show", "table6"], {"preset": "paper", "tasks": ("odds_first",)}, ["11 runs", "at 1 to 500"]),
    ):
        experiments_main.main(Settings(**changes), *arguments)
        output = capsys.readouterr().out
        assert all(word in output for word in words), output


# ---- figures


def test_every_experiment_is_drawn_with_a_style_for_each_curve_and_the_papers_curves():
    for name, experiment in EXPERIMENTS.items():
        series = [
            Series(model, {0: {model.train_length: 2.0 + n, 2 * model.train_length: 3.0 + n}}, {})
            for n, model in enumerate(experiment.models)
        ]
        group = Group(name, "small", "" if experiment.tasks else "stdlib", {"commit": ["0"]}, series)
        figure = plots.experiment_figure([group])
        for panel in (panel for panel in figure.axes if not panel.patches):  # no bars
            curves = [line for line in panel.get_lines() if not str(line.get_label()).startswith("_")]
            assert curves
            styles = {(line.get_color(), str(line._dash_pattern), line.get_alpha()) for line in curves}
            assert len(styles) == len(curves)
    ours = dataclasses.replace(paper_groups("fig2")[0], about={"x": []}, preset="small", data="a")
    figure = plots.experiment_figure([dataclasses.replace(ours, series=ours.series[:1])])
    figure.draw_without_rendering()
    titles = [axes.title.get_window_extent() for axes in figure.axes]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(titles, 2))
    assert figure.axes[0].get_title() == "small, a: xs, trained at 32"
    assert any(axes.get_title().startswith("paper") for axes in figure.axes)
    (legend,) = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
    labels = {line.get_label() for axes in figure.axes for line in axes.get_lines()}
    assert {text.get_text() for text in legend.get_texts()} == labels


def test_a_method_has_one_style_in_every_figure():
    """Figures of evaluations and of experiments."""
    runs = json.loads((ROOT / "results/quickstart/lengths.json").read_text())["runs"]
    figures = table_of("lengths", runs, Options())[1].figure, plots.experiment_figure(paper_groups("fig2"))
    drawn = [[line for axes in figure.axes for line in axes.get_lines()] for figure in figures]
    one, other = (
        [{(line.get_color(), line.get_marker()) for line in lines if line.get_label() == method} for lines in drawn]
        for method in ("kerple", "dape1x3-kerple")
    )
    assert one[0] == one[1] != other[0] == other[1]
    assert len(one[0]) == len(other[0]) == 1
