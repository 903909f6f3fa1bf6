"""Run the benchmarks end to end at tiny sizes: they measure the requested cases and agree with the formulas."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

from benchmarks import attention, gpu, gpu_cases, gpu_compiled, listing, measure, step, step_cycles, table7
from benchmarks.hlo import compile_program
from dape_jax.errors import InputError
from dape_jax.evaluation.programs import predicted_bytes
from dape_jax.hardware import CHIPS, MIB
from dape_jax.kernels import gpu as kernels
from dape_jax.model.attention import Dense, Implementation
from dape_jax.model.flops import executed_flops, model_flops

ROOT = Path(__file__).parents[1]
CHIP = {chip.name: chip for chip in CHIPS}


def tiny(directory: Path, **changes) -> attention.Settings:
    settings = attention.Settings(lengths=(16,), channels=4, block_size=4, num_buckets=2, repeats=2)
    return dataclasses.replace(settings, output=str(directory), **changes)


def written(directory: Path, stem: str) -> dict:
    (file,) = directory.iterdir()
    assert file.name == f"{stem}.json"
    return json.loads(file.read_text())


def test_attention_measures_the_requested_case_and_without_torch_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(listing, "find_spec", lambda name: None)
    attention.run(tiny(tmp_path, vs="torch", directions=("backward",)))
    content = written(tmp_path, "cpu")
    rows = content["rows"]
    assert [row["name"] for row in rows] == ["dense", "blockwise", "plain jax"]
    for row in rows:
        assert (row["model"], row["length"], row["direction"], row["failed"]) == ("125m", 16, "backward", None)
        assert row["min_ms"] == min(row["all_ms"]) > 0
        assert len(row["all_ms"]) == 2
        assert row["peak_mib"] >= row["temporary_mib"] > 0
        assert row["compiled_gflop"] > 0
        assert row["compiled_gbyte"] > 0
        assert row["roofline"] is None, "a CPU has no peak in the table"
        assert max(row["errors"].values()) < 1e-5
        parameters = [name for name in row["errors"] if name.startswith("parameters.")]
        assert bool(parameters) == (row["name"] != "plain jax")
        assert {"out", "q", "k", "v"} <= set(row["errors"])
        assert row["time_ratios"]["dense"] == row["min_ms"] / rows[0]["min_ms"]
        assert row["memory_ratios"]["dense"] == row["peak_mib"] / rows[0]["peak_mib"]
    fused, torch = content["left_out"]
    assert fused.startswith("fused is skipped")
    assert "torch is skipped: PyTorch is not installed" in torch
    table, errors = capsys.readouterr()
    assert all(line in errors and line in table for line in (fused, torch))
    assert len(table.splitlines()) == 2 + 1 + len(rows) + 2


class Wrong(Implementation):
    """Returns twice the right result."""

    def attend_rows(self, *arguments):
        return 2 * Dense().attend_rows(*arguments)


class Large(Implementation):
    """Runs out of memory."""

    def attend_rows(self, *arguments):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")


def test_wrong_results_and_failures_are_reported_and_the_others_measured(capsys, tmp_path, monkeypatch):
    implementations = {"dense": Dense(), "blockwise": Wrong(), "auto": Large()}
    monkeypatch.setattr(attention, "implementations", lambda *_: implementations)
    with pytest.raises(AssertionError, match="blockwise at 125m 16 forward"):
        attention.run(tiny(tmp_path, implementations=tuple(implementations), directions=("forward",)))
    of_name = {row["name"]: row for row in written(tmp_path, "cpu")["rows"]}
    np.testing.assert_allclose(of_name["blockwise"]["errors"]["out"], 1, rtol=1e-5)
    assert of_name["auto"]["failed"] == "out of memory"
    assert of_name["auto"]["min_ms"] is None
    assert "out of memory" in capsys.readouterr().out
    for name in ("dense", attention.PLAIN):
        assert of_name[name]["errors"]["out"] < 1e-5
        assert of_name[name]["min_ms"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside PyTorch's compiler
def test_torch_computes_the_same(tmp_path):
    pytest.importorskip("torch")
    attention.run(tiny(tmp_path, vs="torch", batch=2))
    rows = written(tmp_path, "cpu")["rows"]
    of_torch = [row for row in rows if row["name"] in listing.NAMES]
    assert [row["name"] for row in of_torch] == [*listing.NAMES] * 2
    for row in of_torch:
        assert row["failed"] is None
        assert set(row["errors"]) == ({"out"} if row["direction"] == "forward" else {"out", "q", "k", "v"})
        assert max(row["errors"].values()) < 1e-5
        assert row["time_ratios"]["torch eager"] > 0


@pytest.mark.parametrize(
    ("name", "direction"), [("dense", "forward"), ("blockwise", "backward"), (attention.PLAIN, "backward")]
)
def test_compiled_flops_are_those_of_the_formula(name, direction):
    """Count all pairs of a query and a key, not only the causal ones, and trip counts of scans."""
    length = 64
    settings = attention.Settings(lengths=(length,), channels=4, block_size=8, num_buckets=1)
    case = attention.Case(settings, "125m", length, direction)
    function, params = attention.jax_function(case, name)
    compiled = compile_program(function, params, *case.inputs()).work.matmul_flops
    flops, _ = attention.layer_work(case, name)
    every_pair = flops * length**2 / (length * (length + 1) / 2)
    # At most the whole forward pass is recomputed; edges add a few columns.
    recomputed = 4 / 3 if (name, direction) == ("blockwise", "backward") else 1
    assert 0.99 * every_pair < compiled < 1.06 * recomputed * every_pair


def test_work_of_a_layer():
    case = attention.Case(attention.Settings(batch=2, channels=32, dtype="bfloat16"), "125m", 512, "forward")
    pairs, heads, width = 512 * 513 // 2, 12, 64
    convolution = 3 * heads * 32
    flops, num_bytes = attention.layer_work(case, "dense")
    assert flops == 2 * pairs * (2 * (2 * heads * width + 2 * convolution) + convolution)
    assert num_bytes == 4 * 2 * 512 * heads * width * 2
    assert attention.layer_work(case, attention.PLAIN)[0] == 2 * pairs * 2 * 2 * heads * width
    backward = dataclasses.replace(case, direction="backward")
    assert attention.layer_work(backward, "dense") == (3 * flops, 2 * num_bytes)


def test_the_kernel_is_refused_on_a_platform_without_one(tmp_path):
    with pytest.raises(InputError, match="--implementations = 'fused'"):
        attention.run(tiny(tmp_path, implementations=("dense", "fused")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (attention, {"lengths": ()}, "--lengths"),
        (attention, {"lengths": (8, 8)}, "--lengths"),
        (attention, {"models": ("13b",)}, "--models"),
        (attention, {"kernel_width": 2}, "--kernel_width"),
        (attention, {"block_size": 0}, "--block_size"),
        (attention, {"vs": "torch", "bias": "fire"}, "--bias = 'fire': with --vs=torch"),
        (step, {"models": ("125m", "125m")}, "--models"),
        (step, {"method": "dape"}, "--method"),
        (gpu_compiled, {"implementations": ("flash",)}, "--implementations"),
        (table7, {"chip": "h300"}, "--chip"),
    ],
)
def test_bad_settings(settings, changes, words):
    with pytest.raises(InputError, match=words):
        settings.Settings(**changes)


class Device:
    """Device that computes for 1 ms after each call; calling takes no time, and waiting 10 ms."""

    def __init__(self, monkeypatch):
        self.now = self.free_at = 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def start(self) -> None:
        self.free_at = max(self.now, self.free_at) + 1e-3

    def wait(self, _) -> None:
        self.now = self.free_at + 1e-2


@pytest.mark.parametrize(("platform", "expected"), [("gpu", 1e-3 + 1e-2 / 9), ("cpu", 1.1e-2)])
def test_a_device_is_not_waited_for_after_every_call(monkeypatch, platform, expected):
    """One call takes 11 ms here; nine are queued, which takes a tenth of a second."""
    device = Device(monkeypatch)
    monkeypatch.setattr(measure, "device_platform", lambda: platform)
    monkeypatch.setattr(measure, "WARMUP_CALLS", 1)
    with tqdm(disable=True) as bar:
        samples = measure.seconds_in_turns({"a": measure.Call(device.start, device.wait)}, 3, bar)
    np.testing.assert_allclose(samples["a"], [expected] * 3)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says what is resident")
@pytest.mark.parametrize("mebibytes", [64, pytest.param(200, marks=pytest.mark.slow)])
def test_memory_of_a_call(mebibytes):
    """Measure a call with two arrays at the same time, of which it frees one."""

    def call() -> np.ndarray:
        first = np.ones(mebibytes * MIB // 8)
        return first + 1

    taken = measure.resident_bytes_of_call(measure.Call(call))
    assert taken is not None
    assert 2 * mebibytes - 4 < taken / MIB < 2 * mebibytes + 16


def test_figures_of_a_compiled_program():
    def function(x):
        return jax.lax.scan(lambda y, _: (jnp.sin(y @ y), None), x, length=5)[0]

    program = compile_program(function, jnp.ones((64, 64)))
    assert program.work.matmul_flops == 5 * 2 * 64**3
    assert program.result_bytes == 64 * 64 * 4
    assert predicted_bytes(program.run) >= program.memory.temp_size_in_bytes + 2 * 64 * 64 * 4
    assert program.run(jnp.ones((64, 64))).shape == (64, 64)


def tiny_step(directory: Path, **changes) -> step.Settings:
    settings = step.Settings(preset="small", lengths=(8,), batch=8, turns=2, steps=2, output=str(directory))
    return dataclasses.replace(settings, **changes)


@pytest.mark.parametrize(
    "names", [("dense",), pytest.param(("dense", "blockwise", "auto"), marks=pytest.mark.slow)], ids=len
)
def test_step_measures_the_requested_case(tmp_path, names):
    step.run(tiny_step(tmp_path, implementations=names))
    rows = written(tmp_path, "cpu")["rows"]
    assert [(row["model"], row["length"], row["name"]) for row in rows] == [("125m", 8, name) for name in names]
    run = step.read_config("small", "125m", "dape1x3-kerple", 8, 8, "dense")
    for row in rows:
        assert row["failed"] is None
        assert len(row["all_ms"]) == 2
        assert row["min_ms"] == min(row["all_ms"])
        np.testing.assert_allclose(row["tokens_per_s"], 64 / (row["min_ms"] / 1e3))
        assert row["model_gflop"] == model_flops(run.model, 8, 8).total / 1e9
        assert row["mfu"] is None
        assert row["needed_gib"] > 0
        np.testing.assert_allclose(row["loss_nats"], rows[0]["loss_nats"], rtol=1e-5)
    per_device = executed_flops(run.model, 8, 8, batch_parts=8).total / 8 / 1e9
    np.testing.assert_allclose(rows[0]["compiled_gflop"], per_device, rtol=0.1)


def test_a_step_that_does_not_fit_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "available_bytes", lambda mesh: 1000)
    monkeypatch.setattr(step, "init_state", lambda *_: pytest.fail("allocates"))
    step.run(tiny_step(tmp_path, implementations=("dense",)))
    (row,) = written(tmp_path, "cpu")["rows"]
    assert row["failed"].startswith("out of memory")
    assert row["min_ms"] is None


@pytest.mark.parametrize("chip", ["v5e", pytest.param("h200", marks=pytest.mark.slow)])
def test_table7_by_roofline(tmp_path, capsys, chip):
    table7.run(table7.Settings(chip=chip, implementation="dense", output=str(tmp_path)))
    content = written(tmp_path, chip)
    assert content["by_roofline"]
    assert "BY ROOFLINE" in capsys.readouterr().out
    of = {(row["model"], row["method"]): row for row in content["rows"]}
    assert len(of) == 3 * 7
    for model in ("350m", "2.7b", "6.7b"):
        assert of[model, "rope"]["min_ms"] < of[model, "kerple"]["min_ms"] < of[model, "dape1x3-kerple"]["min_ms"]
        assert of[model, "dape1x3-kerple"]["ratio"] == of[model, "dape1x3-kerple"]["paper_ratio"] == 1
        for row in (of[model, method] for method in ("rope", "dape1x3-kerple")):
            np.testing.assert_allclose(row["min_ms"], sum(row["parts_ms"].values()))
    assert of["350m", "dape1x3-kerple"]["paper_ms"] == 252.84
    # A step cannot be faster than its matmuls at the chip's peak, nor than reading the parameters and moments.
    run = table7.runs_of(table7.Settings(), "6.7b")["rope"]
    least = model_flops(run.model, 512, 1).total / CHIP[chip].peak_flops
    assert of["6.7b", "rope"]["min_ms"] > 1e3 * max(least, 12 * 6.6e9 / CHIP[chip].hbm_bytes_per_second)
    # The larger the model, the smaller DAPE's share, as in the paper's table.
    ratios = [of[model, "kerple"]["ratio"] for model in ("350m", "2.7b", "6.7b")]
    assert ratios == sorted(ratios)


def test_table7_by_roofline_of_the_kernel(tmp_path):
    table7.run(table7.Settings(chip="v5e", implementation="fused", models=("350m",), output=str(tmp_path)))
    of = {row["method"]: row for row in written(tmp_path, "v5e")["rows"]}
    assert [method for method, row in of.items() if row["failed"] is not None] == ["fire"]
    assert of["fire"]["ratio"] is None
    assert of["kerple"]["ratio"] < 1
    dense = table7.runs_of(table7.Settings(implementation="dense"), "350m")["dape1x3-kerple"]
    seconds = table7.roofline_seconds(table7.on_chip(dense, CHIP["v5e"]), 512, 1, CHIP["v5e"])
    assert of["dape1x3-kerple"]["parts_ms"]["attention"] < 1e3 * seconds["attention"] / 4


def test_a_layer_with_the_kernels_of_a_step_is_requested_for_every_method():
    found = {}
    for method in step_cycles.METHODS:
        run = step.read_config("paper", "350m", method, 2048, 4 * 8, "auto")
        request = step_cycles.layer_request(run, "v5p:2x2x1", "350m")
        found[method] = request.settings.bias, request.processor, request.settings.kernel_width
        assert (request.model, request.length, request.settings.batch) == ("350m", 2048, 8), "four chips share 32"
    assert found["rope"][:2] == ("nope", "plain")
    assert found["kerple"][:2] == ("kerple", "plain")
    assert found["dape1x3-kerple"] == ("kerple", "dape", 3)
    assert found["dape1x1-kerple"] == ("kerple", "dape", 1)


def test_ratios_of_cycles_and_programs_that_do_not_fit_are_shown():
    row = {"topology": "v5e:1x1", "model": "125m", "length": 512, "attention": "fused"}
    rows = [
        row | {"method": "kerple", "kernels_ms": 1.0, "other_ms": 3.0, "reason": None, "ratio": 0.5},
        row | {"method": "dape1x3-kerple", "kernels_ms": 4.0, "other_ms": 4.0, "reason": None, "ratio": 1.0},
        row | {"method": "fire", "reason": "memory", "ratio": None},
    ]
    _, kerple, dape, fire = step_cycles.cells(rows)
    assert kerple[3:] == ["kerple", "fused", "4.0", "25%", "0.500"]
    assert dape[-1] == "1.000"
    assert fire[-3:] == ["failed", "-", "-"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_cycles_of_a_training_step(libtpu):
    """In a model of two layers, DAPE takes more cycles than Kerple alone, and more in its kernels."""
    run = {m: step.read_config("paper", "125m", m, 512, 2, "auto") for m in ("kerple", "dape1x3-kerple")}
    found = {}
    for method, each in run.items():
        changes = {"num_layers": 2, "vocab_size": 512, "num_outputs": 512, "dtype": "bfloat16", "remat": "full"}
        each = dataclasses.replace(each, model=dataclasses.replace(each.model, **changes))
        found[method] = step_cycles.measure(each, "v5e:1x1", "125m", libtpu)
        assert found[method]["reason"] is None
    kerple, dape = found["kerple"], found["dape1x3-kerple"]
    assert 1.5 * kerple["kernels_ms"] < dape["kernels_ms"] < 4 * kerple["kernels_ms"]
    assert dape["other_ms"] > kerple["other_ms"] > 0


def run_module(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


# ---- all measurements on one GPU


def test_a_group_records_every_step_and_resumes_after_the_case_that_ended_it(tmp_path, monkeypatch):
    def fails():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    def cases(prepared: list[str]) -> dict:
        def prepare(name):
            return lambda: prepared.append(name) or ({"compile_s": 1.0}, lambda: {"min_ms": 2.0})

        return {
            "first": prepare("first"),
            "deadly": prepare("deadly"),
            "large": fails,
            "untimed": lambda: ({"right": True}, None),
            "last": prepare("last"),
        }

    # An earlier process prepared the first case, and was killed in the second.
    earlier = [("first", "prepares"), ("first", "prepared"), ("deadly", "prepares")]
    text = "".join(json.dumps({"group": "g", "case": case, "status": status}) + "\n" for case, status in earlier)
    (tmp_path / "results.jsonl").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    prepared: list[str] = []
    gpu_cases.run_group("g", cases(prepared), tmp_path, tmp_path / "ready", 100)
    assert prepared == ["first", "last"]
    assert (tmp_path / "ready").exists()
    results = gpu.read_results(tmp_path / "results.jsonl")
    assert {case: line["status"] for (_, case), line in results.items()} == {
        "first": "done",
        "deadly": "prepares",
        "large": "failed",
        "untimed": "done",
        "last": "done",
    }
    assert results["g", "large"]["reason"] == "out of memory"
    assert (results["g", "last"]["compile_s"], results["g", "last"]["min_ms"]) == (1.0, 2.0)

    before = (tmp_path / "results.jsonl").read_text()
    gpu_cases.run_group("other", cases(prepared), tmp_path, tmp_path / "ready", -1)
    assert (tmp_path / "results.jsonl").read_text() == before, "no time is left to prepare anything"


def test_every_group_has_cases_and_variants_restore_the_constants():
    for group in gpu.GROUPS:
        assert gpu_cases.cases_of(group, gpu_cases.FULL)
        assert gpu_cases.cases_of(group, gpu_cases.TINY)
    with pytest.raises(ValueError, match="tea"):
        gpu_cases.cases_of("tea", gpu_cases.FULL)
    assert all(sum(gpu.MEMORY[group] for group in phase) <= 1 for phase, _ in gpu.PHASES)
    assert sorted(group for phase, _ in gpu.PHASES for group in phase) == sorted(gpu.GROUPS)
    for case in gpu_cases.FULL.steps:
        step.read_config(gpu_cases.FULL.preset, *case)
    default = kernels.NUM_WARPS
    gpu_cases.VARIANTS["fused-warps-8"].set_constants()
    assert default != kernels.NUM_WARPS == 8
    gpu_cases.MAIN["fused"].set_constants()
    assert default == kernels.NUM_WARPS


def test_wrong_values_are_seen(monkeypatch):
    monkeypatch.setattr(gpu_cases, "FUSED", Wrong())
    plan = dataclasses.replace(gpu_cases.TINY, correct={"kerple": gpu_cases.TINY_LAYER})
    figures, measure = gpu_cases.correctness(plan, "float32")["kerple"]()
    assert measure is None
    assert not figures["fused"]["right"]
    assert 0.9 < figures["fused"]["errors"]["out"] < 1.1
    for name in ("blockwise", "dense"):
        assert figures[name]["right"]
        assert figures[name]["same_bits"]


GROUP = """
import sys, time, pathlib
ready, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
if behaviour == "dies once" and not ready.with_suffix(".died").exists():
    ready.with_suffix(".died").touch()
    sys.exit(9)
ready.touch()
assert sys.stdin.readline() == "go\\n"
if behaviour == "hangs":
    time.sleep(1000)
"""


def test_groups_that_die_are_restarted_and_those_that_hang_are_killed(tmp_path, monkeypatch, capsys):
    behaviours = {"environment": "works", "torch": "hangs", "steps": "dies once"}
    monkeypatch.setattr(gpu, "GROUPS", dict.fromkeys(behaviours, 2.0))
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    measurement = gpu.Measurement(tmp_path, 60, tiny=False)

    def command(group, prepare_s):
        return [sys.executable, str(script), str(measurement.cache / group), behaviours[group]]

    monkeypatch.setattr(measurement, "group_command", command)
    measurement.measure(list(behaviours), measurement.deadline)
    said = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    expected = ["environment: status 0", "torch: killed at its limit", "steps died with status 9", "steps: status 0"]
    assert said == expected


RESULTS = [
    {"group": "environment", "case": "rates", "status": "done", "matmul_tflops": 700.0},
    {
        "group": "correct-float32",
        "case": "kerple",
        "status": "done",
        "fused": {"right": True, "same_bits": False, "worst": "q", "errors": {"q": 2e-3, "k": 1e-3}},
        "dense": {"right": False, "same_bits": True, "worst": "k", "errors": {"q": 1.0, "k": 2.0}},
    },
    {"group": "correct-float32", "case": "window", "status": "failed", "reason": "out of memory"},
    *(
        {"group": "fused-forward", "case": f"fused/{T}/1/forward", "status": "done", "min_ms": T / 1e3}
        | {"temporary_mib": 12.0, "errors": {"out": 1e-3}}
        for T in (512, 2048)
    ),
    {"group": "xla-forward", "case": "dense/2048/1/forward", "status": "runs"},
    {"group": "steps", "case": "350m/dape1x3-kerple/512/1/dense", "status": "done", "min_ms": 20.0, "mfu": None},
    {"group": "steps", "case": "350m/kerple/512/1/dense", "status": "done", "min_ms": 15.0, "mfu": 0.4},
    {"group": "torch", "case": "torch", "status": "done", "left_out": "PyTorch is not installed"},
    {"group": "train", "case": "fused", "status": "done", "loss_nats": 3.2},
]


def test_the_summary_has_figures_failures_and_what_is_missing(tmp_path):
    path = tmp_path / "results.jsonl"
    begun = {"group": "steps", "case": "350m/kerple/512/1/dense", "status": "prepares"}
    path.write_text("".join(json.dumps(line) + "\n" for line in [begun, *RESULTS]))
    results = gpu.read_results(path)
    text = gpu.summarize(results, "DIR")
    for words in (
        "fused right 2.0e-03 (q), DIFFERENT BITS IN A SECOND RUN; dense WRONG 2.0e+00 (k)",
        "out of memory",
        "fused                  2.048 (12), error 1.0e-03",
        "350m/kerple/512/1/dense                  min_ms 15, mfu 0.4, 0.750 of dape1x3-kerple, dense",
        "NOT FINISHED: xla-forward dense/2048/1/forward",
        "FAILED OR NOT RUN: torch torch: PyTorch is not installed",
        '"matmul_tflops": 700.0',
    ):
        assert words in text
    gpu.plot(results, tmp_path / "layers.png")
    assert (tmp_path / "layers.png").stat().st_size > 1000
    assert "NOT FINISHED: nothing" in gpu.summarize({}, "DIR")


def test_bad_flags_of_the_measurement(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"group": "steps", "case": "a", "status": "done"}\n')
    output = f"--output={tmp_path}"
    for flags, words in (
        ([], "--output"),
        ([output], "has results of steps; choose another directory, or --groups"),
        ([output, "--groups=train,steps"], "has results of steps"),
        ([output, "--groups=train,tea"], "--groups = tea: must be of"),
    ):
        done = run_module("benchmarks.gpu", *flags)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_everything_is_measured_on_a_cpu(tmp_path):
    done = run_module("benchmarks.gpu", f"--output={tmp_path}", "--tiny", "--seconds=800")
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["environment.txt", "layers.png", "log.txt", "results.jsonl", "summary.txt", "train.txt"]
    results = gpu.read_results(tmp_path / "results.jsonl")
    assert {group for group, _ in results} == {*gpu.GROUPS, "train"}
    assert {line["status"] for line in results.values()} == {"done"}
    summary = (tmp_path / "summary.txt").read_text()
    assert "NOT FINISHED: nothing" in summary
    assert "WRONG" not in summary
    assert "OTHER BITS" not in summary
    fused = results["fused-backward", "fused/24/1/backward"]
    assert fused["min_ms"] > 0
    assert results["train", "blockwise"]["tokens_per_s"] > 0


PTXAS = """#!/bin/sh
echo "ptxas info    : Compiling entry function 'dape_forward_kernel__1' for 'sm_90a'" >&2
echo "    0 bytes stack frame, $SPILLED bytes spill stores, 0 bytes spill loads" >&2
echo "ptxas info    : Used 130 registers, used 1 barriers" >&2
"""


def test_registers_and_spills_are_read(tmp_path, monkeypatch):
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(PTXAS)
    ptxas.chmod(0o755)
    monkeypatch.setenv("SPILLED", "48")
    (tmp_path / "a.ptx").write_text(".target sm_90a\n.visible .entry dape_forward_kernel__1()")
    (tmp_path / "b.ptx").write_text(".target sm_90a\n.visible .entry gemm()")
    assert gpu_compiled.read_kernels(tmp_path, str(ptxas)) == {"forward": {"registers": 130, "spilled_bytes": 48}}
    assert not (tmp_path / "a.ptx").exists(), "the next program's kernels have the same names"

    row = {"implementation": "fused", "length": 512, "batch": 1, "direction": "forward"}
    figures = {"launches": 36, "temporary_mib": 12.4, "gbyte": 0.057, "compile_s": 2.0, "failed": None}
    kernel = {"forward": {"registers": 130, "spilled_bytes": 48}, "scores": {"registers": 9, "spilled_bytes": 0}}
    rows = [row | figures | {"kernels": kernel}, row | {"failed": "out of memory"}]
    _, fused, failed = gpu_compiled.cells(rows)
    assert fused[4:9] == ["36", "12.4", "0.057", "130 / 9", "48 / 0"]
    assert failed[4] == "failed"
