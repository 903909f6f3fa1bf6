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

from benchmarks import attention, gpu, gpu_cases, layer, listing, measure, step, step_cycles
from benchmarks.hlo import compile_program
from dape_jax.errors import InputError
from dape_jax.evaluation.programs import predicted_bytes
from dape_jax.hardware import MIB
from dape_jax.model.attention import Dense, Implementation
from dape_jax.model.flops import model_flops

pytestmark = pytest.mark.extra


def tiny(directory: Path, **changes) -> attention.Settings:
    settings = attention.Settings(lengths=(16,), channels=4, block_size=4, num_buckets=2, repeats=2)
    return dataclasses.replace(settings, output=str(directory), **changes)


def written(directory: Path, stem: str = "cpu") -> dict:
    (file,) = directory.iterdir()
    assert file.name == f"{stem}.json"
    return json.loads(file.read_text())


def test_attention_measures_the_requested_case_and_without_torch_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(listing, "find_spec", lambda name: None)
    attention.run(tiny(tmp_path, vs="torch", directions=("backward",)))
    content = written(tmp_path)
    rows = content["rows"]
    assert [row["name"] for row in rows] == ["dense", "blockwise", "plain jax"]
    for row in rows:
        assert (row["model"], row["length"], row["direction"], row["failed"]) == ("125m", 16, "backward", None)
        assert row["min_ms"] == min(row["all_ms"]) > 0
        assert len(row["all_ms"]) == 2
        assert row["peak_mib"] >= row["temporary_mib"] > 0
        assert row["compiled_gbyte"] > 0
        assert row["roofline"] is None, "a CPU has no peak in the table"
        assert max(row["errors"].values()) < 1e-5
        parameters = [name for name in row["errors"] if name.startswith("parameters.")]
        assert bool(parameters) == (row["name"] != "plain jax")
        assert {"out", "q", "k", "v"} <= set(row["errors"])
        assert row["time_ratios"]["dense"] == row["min_ms"] / rows[0]["min_ms"]
        assert row["memory_ratios"]["dense"] == row["peak_mib"] / rows[0]["peak_mib"]
    shown, errors = capsys.readouterr()
    fused, torch = content["left_out"]
    assert fused.startswith("fused is skipped")
    assert "PyTorch is not installed" in torch
    assert all(line in errors and line in shown for line in (fused, torch))
    with pytest.raises(InputError, match="--implementations = 'fused'"):
        attention.choose(("dense", "fused"))


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
    of_name = {row["name"]: row for row in written(tmp_path)["rows"]}
    np.testing.assert_allclose(of_name["blockwise"]["errors"]["out"], 1, rtol=1e-5)
    assert (of_name["auto"]["failed"], of_name["auto"]["min_ms"]) == ("out of memory", None)
    assert "out of memory" in capsys.readouterr().out
    assert of_name["dense"]["errors"]["out"] < 1e-5
    assert of_name["dense"]["min_ms"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside PyTorch's compiler
def test_torch_computes_the_same(tmp_path):
    pytest.importorskip("torch")
    attention.run(tiny(tmp_path, vs="torch", batch=2, implementations=("dense",), directions=("backward",)))
    of_torch = [row for row in written(tmp_path)["rows"] if row["name"] in listing.NAMES]
    assert [row["name"] for row in of_torch] == [*listing.NAMES]
    for row in of_torch:
        assert row["failed"] is None
        assert set(row["errors"]) == {"out", "q", "k", "v"}
        assert max(row["errors"].values()) < 1e-5


def test_work_of_a_layer():
    case = layer.Layer(batch=2)
    pairs, heads, width = 512 * 513 // 2, 12, 64
    convolution = 3 * heads * 32
    flops, num_bytes = case.work("forward")
    assert flops == 2 * pairs * (2 * (2 * heads * width + 2 * convolution) + convolution)
    assert num_bytes == 4 * 2 * 512 * heads * width * 2
    assert layer.plain(case).work("forward")[0] == 2 * pairs * 2 * 2 * heads * width
    assert case.work("backward") == (3 * flops, 2 * num_bytes)


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (attention, {"lengths": (8, 8)}, "--lengths"),
        (attention, {"kernel_width": 2}, "--kernel_width"),
        (attention, {"block_size": 0}, "--block_size"),
        (attention, {"vs": "torch", "bias": "fire"}, "--bias = 'fire': with --vs=torch"),
        (step, {"methods": ("dape",)}, "--methods"),
    ],
)
def test_bad_settings(settings, changes, words):
    with pytest.raises(InputError, match=words):
        settings.Settings(**changes)


@pytest.mark.parametrize(("platform", "expected"), [("gpu", 1e-3 + 1e-2 / 9), ("cpu", 1.1e-2)])
def test_a_device_is_not_waited_for_after_every_call(monkeypatch, platform, expected):
    """A device computes for 1 ms after each call; waiting takes 10 ms. Nine calls are queued: a tenth of a second."""
    now = free_at = 0.0

    def start() -> None:
        nonlocal free_at
        free_at = max(now, free_at) + 1e-3

    def wait(_) -> None:
        nonlocal now
        now = free_at + 1e-2

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    monkeypatch.setattr(measure, "device_platform", lambda: platform)
    monkeypatch.setattr(measure, "WARMUP_CALLS", 1)
    with tqdm(disable=True) as bar:
        samples = measure.seconds_in_turns({"a": measure.Call(start, wait)}, 3, bar)
    np.testing.assert_allclose(samples["a"], [expected] * 3)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says what is resident")
def test_memory_of_a_call():
    """Measure a call with two arrays of 64 MiB at the same time, of which it frees one."""

    def call() -> np.ndarray:
        first = np.ones(8 * MIB)
        return first + 1

    taken = measure.resident_bytes_of_call(measure.Call(call))
    assert taken is not None
    assert 2 * 64 - 4 < taken / MIB < 2 * 64 + 16


def test_figures_of_a_compiled_program():
    """Trip counts multiply traffic and launches."""

    def function(x, length):
        return jax.lax.scan(lambda y, _: (jnp.sin(y @ y), None), x, length=length)[0]

    x = jnp.ones((64, 64))
    five, ten = (compile_program(lambda x, n=n: function(x, n), x) for n in (5, 10))
    assert (ten.work.launches - five.work.launches) % 5 == 0
    assert ten.work.launches - five.work.launches >= 5
    assert ten.work.hbm_bytes - five.work.hbm_bytes >= 5 * 2 * x.nbytes
    assert five.result_bytes == x.nbytes
    assert predicted_bytes(five.run) >= five.memory.temp_size_in_bytes + 2 * x.nbytes
    assert five.run(x).shape == x.shape


def test_step_measures_the_requested_case_and_what_does_not_fit_is_not_run(tmp_path, monkeypatch):
    settings = step.Settings(preset="small", lengths=(8,), batch=8, turns=2, steps=2, implementations=("dense",))
    settings = dataclasses.replace(settings, methods=("kerple",), output=str(tmp_path / "fits"))
    step.run(settings)
    (row,) = written(tmp_path / "fits")["rows"]
    assert (row["model"], row["length"], row["method"], row["name"]) == ("125m", 8, "kerple", "dense")
    assert row["failed"] is None
    assert len(row["all_ms"]) == 2
    assert row["min_ms"] == min(row["all_ms"])
    np.testing.assert_allclose(row["tokens_per_s"], 64 / (row["min_ms"] / 1e3))
    run = step.read_config("small", "125m", "kerple", 8, 8, "dense")
    assert row["model_gflop"] == model_flops(run.model, 8, 8).total / 1e9
    assert row["mfu"] is None
    assert row["needed_gib"] > 0
    assert 5 < row["loss_nats"] < 7

    monkeypatch.setattr(step, "available_bytes", lambda mesh: 1000)
    monkeypatch.setattr(step, "init_state", lambda *_: pytest.fail("allocates"))
    step.run(dataclasses.replace(settings, output=str(tmp_path / "large")))
    (row,) = written(tmp_path / "large")["rows"]
    assert row["failed"].startswith("out of memory")
    assert row["min_ms"] is None


def test_a_layer_with_the_kernels_of_a_step_is_requested_for_every_method():
    found = {}
    for method in step.TABLE7:
        run = step.read_config("paper", "350m", method, 2048, 4 * 8, "auto")
        request = step_cycles.layer_request(run, "v5p:2x2x1", "350m")
        found[method] = request.layer.bias, request.layer.processor
        assert (request.model, request.layer.length, request.layer.batch) == ("350m", 2048, 8), "four chips share 32"
    assert found["rope"] == (layer.PLAIN.bias, layer.PLAIN.processor)
    assert found["kerple"] == ("kerple", layer.PLAIN.processor)
    assert found["dape1x3-kerple"] == ("kerple", layer.Layer().processor)
    assert found["dape1x1-kerple"][1].kernel_width == 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_cycles_of_a_training_step(libtpu):
    """In a model of two layers, DAPE takes more cycles than Kerple alone, and more in its kernels."""
    found = {}
    for method in ("kerple", "dape1x3-kerple"):
        fields = {"num_layers": 2, "vocab_size": 512, "num_outputs": 512, "dtype": "bfloat16", "remat": "full"}
        fields = {f"model.{name}": value for name, value in fields.items()}
        run = step.read_config("paper", "125m", method, 512, 2, "auto", **fields)
        found[method] = step_cycles.measure(run, "v5e:1x1", "125m", libtpu)
        assert found[method]["reason"] is None
    kerple, dape = found["kerple"], found["dape1x3-kerple"]
    assert 1.5 * kerple["kernels_ms"] < dape["kernels_ms"] < 4 * kerple["kernels_ms"]
    assert dape["other_ms"] > kerple["other_ms"] > 0


# ---- all measurements on one GPU


def test_a_group_records_every_step_and_resumes_after_the_case_that_ended_it(tmp_path, monkeypatch):
    """An earlier process prepared the first case, and was killed in the second."""

    def fails():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    prepared: list[str] = []
    timed = {
        name: lambda name=name: prepared.append(name) or ({"compile_s": 1.0}, lambda: {"min_ms": 2.0})
        for name in ("first", "deadly", "last")
    }
    cases = timed | {"large": fails, "untimed": lambda: ({"right": True}, None)}
    earlier = [("first", "prepares"), ("first", "prepared"), ("deadly", "prepares")]
    file = tmp_path / "results.jsonl"
    lines = [json.dumps({"group": "g", "case": case, "status": status}) for case, status in earlier]
    file.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    gpu_cases.run_group("g", cases, tmp_path, tmp_path / "ready", 100)
    assert prepared == ["first", "last"]
    assert (tmp_path / "ready").exists()
    results = {case: line for (_, case), line in gpu.read_results(file).items()}
    expected = {"first": "done", "deadly": "prepares", "last": "done", "large": "failed", "untimed": "done"}
    assert {case: line["status"] for case, line in results.items()} == expected
    assert results["large"]["reason"] == "out of memory"
    assert (results["last"]["compile_s"], results["last"]["min_ms"]) == (1.0, 2.0)

    before = file.read_text()
    gpu_cases.run_group("other", cases, tmp_path, tmp_path / "ready", -1)
    assert file.read_text() == before, "no time is left to prepare anything"


def test_every_group_has_cases_and_wrong_values_are_seen(monkeypatch):
    assert all(gpu_cases.cases_of(group, plan) for group in gpu.GROUPS for plan in (gpu_cases.FULL, gpu_cases.TINY))
    assert all(sum(gpu.MEMORY[group] for group in phase) <= 1 for phase, _ in gpu.PHASES)
    assert sorted(group for phase, _ in gpu.PHASES for group in phase) == sorted(gpu.GROUPS)
    for case in gpu_cases.FULL.steps:
        step.read_config(gpu_cases.FULL.preset, *case)
    monkeypatch.setitem(gpu_cases.IMPLEMENTATIONS, "fused", Wrong())
    figures, then = gpu_cases.correctness(gpu_cases.TINY, "float32")["kerple"]()
    assert then is None
    assert 0.9 < figures["fused"]["errors"]["out"] < 1.1
    assert {name: (x["right"], x["same_bits"]) for name, x in figures.items()} == {
        "fused": (False, True),
        "blockwise": (True, True),
        "dense": (True, True),
    }


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

    monkeypatch.setattr(measurement, "command", command)
    measurement.measure(list(behaviours), measurement.deadline)
    said = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    expected = ["environment: status 0", "torch: killed at its limit", "steps died with status 9", "steps: status 0"]
    assert said == expected


RIGHT = {"right": True, "same_bits": False, "worst": "q", "errors": {"q": 2e-3, "k": 1e-3}}
WRONG = {"right": False, "same_bits": True, "worst": "k", "errors": {"q": 1.0, "k": 2.0}}
RESULTS = [
    {"group": "steps", "case": "350m/kerple/512/1/dense", "status": "prepares"},
    {"group": "environment", "case": "rates", "status": "done", "matmul_tflops": 700.0},
    {"group": "correct-float32", "case": "kerple", "status": "done", "fused": RIGHT, "dense": WRONG},
    {"group": "correct-float32", "case": "window", "status": "failed", "reason": "out of memory"},
    {"group": "fused-forward", "case": "fused/2048/1/forward", "status": "done", "min_ms": 2.048, "temporary_mib": 12},
    {"group": "xla-forward", "case": "dense/2048/1/forward", "status": "runs"},
    {"group": "steps", "case": "350m/kerple/512/1/dense", "status": "done", "min_ms": 15.0, "mfu": 0.4},
    {"group": "torch", "case": "torch", "status": "done", "left_out": "PyTorch is not installed"},
    {"group": "train", "case": "fused", "status": "done", "loss_nats": 3.2},
]


def test_the_summary_has_figures_failures_and_what_is_missing(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in RESULTS))
    text = gpu.summarize(gpu.read_results(path), "DIR")
    for words in (
        '"matmul_tflops": 700.0',
        "fused right 2.0e-03 (q), DIFFERENT BITS IN A SECOND RUN; dense WRONG 2.0e+00 (k)",
        "out of memory",
        "fused                  2.048 (12)",
        "350m/kerple/512/1/dense                  min_ms 15, mfu 0.4",
        '"loss_nats": 3.2',
        "NOT FINISHED: xla-forward dense/2048/1/forward",
        "FAILED OR NOT RUN: torch torch: PyTorch is not installed",
    ):
        assert words in text
    assert "NOT FINISHED: nothing" in gpu.summarize({}, "DIR")


def test_bad_flags_of_the_measurement(tmp_path, monkeypatch, capsys):
    (tmp_path / "results.jsonl").write_text('{"group": "steps", "case": "a", "status": "done"}\n')
    for flags, words in (
        ([], "has results of steps; choose another directory, or --groups"),
        (["--groups=train,steps"], "has results of steps"),
        (["--groups=train,tea"], "--groups = tea: must be of"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu", f"--output={tmp_path}", *flags])
        with pytest.raises(SystemExit, match="2"):
            gpu.main()
        assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.exhaustive
def test_everything_is_measured_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", f"--output={tmp_path}", "--tiny", "--seconds=800"]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["environment.txt", "log.txt", "results.jsonl", "summary.txt"]
    results = gpu.read_results(tmp_path / "results.jsonl")
    assert {group for group, _ in results} == set(gpu.GROUPS)
    assert {line["status"] for line in results.values()} == {"done"}
    summary = (tmp_path / "summary.txt").read_text()
    assert "NOT FINISHED: nothing" in summary
    assert "WRONG" not in summary
    assert "DIFFERENT BITS" not in summary
    assert results["fused-backward", "fused/24/1/backward"]["min_ms"] > 0
    assert results["train", "blockwise"]["tokens_per_s"] > 0
