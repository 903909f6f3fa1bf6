"""Run the benchmarks end to end at tiny sizes: they measure the requested cases and agree with the formulas."""

import dataclasses
import json
import os
import re
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import ROOT, run_python
from tqdm import tqdm

from benchmarks import attention, gpu, layer, listing, measure, step, step_cycles
from benchmarks.hlo import Operation, compile_program, read_work
from dape_jax.errors import InputError
from dape_jax.evaluation.programs import predicted_bytes
from dape_jax.hardware import MIB
from dape_jax.model.attention import Dense, Implementation

pytestmark = pytest.mark.extra


def tiny(directory: Path, **changes) -> attention.Settings:
    settings = attention.Settings(lengths=(16,), channels=4, repeats=2)
    return dataclasses.replace(settings, output=str(directory), **changes)


def written(directory: Path, stem: str = "cpu") -> dict:
    (file,) = directory.iterdir()
    assert file.name == f"{stem}.json"
    return json.loads(file.read_text())


def test_attention_measures_the_requested_case(tmp_path, monkeypatch, capsys):
    attention.run(tiny(tmp_path, directions=("backward",)))
    dense, blockwise, fused, cuda, *plain = written(tmp_path)["rows"]
    assert [row["name"] for row in plain] == ["plain auto", "plain jax"]
    shown = capsys.readouterr().out
    assert all("the platform 'cpu'" in row["failed"] and row["failed"] in shown for row in (fused, cuda))
    for row in (dense, blockwise, *plain):
        assert (row["model"], row["length"], row["direction"], row["failed"]) == ("125m", 16, "backward", None)
        assert row["min_ms"] == min(row["all_ms"]) > 0
        assert len(row["all_ms"]) == 2
        assert row["peak_mib"] >= row["temporary_mib"] > 0
        assert max(row["errors"].values()) < 1e-5
        parameters = [name for name in row["errors"] if name.startswith("parameters.")]
        assert bool(parameters) == ("plain" not in row["name"])
        assert {"out", "q", "k", "v"} <= set(row["errors"])
    for wrong in ({"lengths": (8, 8)}, {"kernel_width": 2}, {"vs": "torch", "bias": "fire"}):
        with pytest.raises(InputError, match="|".join(wrong)):
            tiny(tmp_path, **wrong)
    monkeypatch.setattr(listing, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="--vs = 'torch': PyTorch is not installed"):
        attention.run(tiny(tmp_path, vs="torch"))


class Wrong(Implementation):
    """Returns twice the right result."""

    def attend_rows(self, *arguments):
        return 2 * Dense().attend_rows(*arguments)


def fails(*_):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")


def test_wrong_results_and_failures_are_reported_and_the_others_measured(capsys, tmp_path, monkeypatch):
    implementations = {"dense": lambda _: Dense(), "blockwise": lambda _: Wrong(), "auto": fails}
    monkeypatch.setattr(attention, "implementation_of", lambda name: implementations[name](name))
    with pytest.raises(AssertionError, match="blockwise at 125m 16 forward"):
        attention.run(tiny(tmp_path, implementations=tuple(implementations), directions=("forward",)))
    of_name = {row["name"]: row for row in written(tmp_path)["rows"]}
    np.testing.assert_allclose(of_name["blockwise"]["errors"]["out"], 1, rtol=1e-5)
    assert of_name["auto"]["failed"] == "out of memory"
    assert "out of memory" in capsys.readouterr().out
    assert of_name["dense"]["errors"]["out"] < 1e-5
    assert of_name["dense"]["min_ms"] > 0


@pytest.mark.slow
@pytest.mark.exhaustive
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


def test_memory_of_a_call():
    """Measure a call with two arrays of 64 MiB at the same time, of which it frees one."""

    def call() -> np.ndarray:
        first = np.ones(8 * MIB)
        return first + 1

    taken = measure.resident_bytes_of_call(measure.Call(call))
    assert (taken is None) == (not Path("/proc/self/clear_refs").exists())  # only Linux says what is resident
    assert taken is None or 2 * 64 - 4 < taken / MIB < 2 * 64 + 16


def test_figures_of_a_compiled_program():
    """Trip counts multiply traffic."""

    def function(x, length):
        return jax.lax.scan(lambda y, _: (jnp.sin(y @ y), None), x, length=length)[0]

    x = jnp.ones((64, 64))
    five, ten = (compile_program(lambda x, n=n: function(x, n), x) for n in (5, 10))
    assert ten.work.hbm_bytes - five.work.hbm_bytes >= 5 * 2 * x.nbytes
    assert five.result_bytes == x.nbytes
    assert predicted_bytes(five.run) >= five.memory.temp_size_in_bytes + 2 * x.nbytes
    assert five.run(x).shape == x.shape


def test_a_step_is_timed_and_one_that_does_not_fit_is_not_run(monkeypatch):
    run = step.read_config("small", "125m", "kerple", 8, 8, "dense")
    timed = step.Step(run)
    with tqdm(disable=True) as bar:
        for _ in range(2):
            timed.take_turn(2, bar)
    result = timed.result()
    assert len(result["all_ms"]) == 2
    assert result["min_ms"] == min(result["all_ms"])
    np.testing.assert_allclose(result["tokens_per_s"], 64 / (result["min_ms"] / 1e3))
    assert result["mfu"] is None, "a CPU has no peak in the table"
    assert 5 < result["loss_nats"] < 7
    monkeypatch.setattr(step, "available_bytes", lambda mesh: 1000)
    with pytest.raises(MemoryError, match="out of memory"):
        step.Step(run)


def test_a_layer_with_the_kernels_of_a_step_is_requested_for_every_method():
    found = {}
    for method in step_cycles.METHODS:
        run = step.read_config("paper", "350m", method, 2048, 4 * 8, "auto")
        request = step_cycles.layer_request(run, "v5p:2x2x1", "350m")
        found[method] = request.layer.bias, request.layer.processor
        assert (request.model, request.layer.length, request.layer.batch) == ("350m", 2048, 8), "four chips share 32"
    assert found["rope"] == found["nope"] == (layer.PLAIN.bias, layer.PLAIN.processor)
    assert found["kerple"] == ("kerple", layer.PLAIN.processor)
    assert found["dape1x3-kerple"] == ("kerple", layer.Layer().processor)
    assert found["dape1x1-kerple"][1].kernel_width == 1


def test_operations_of_a_program_by_cycles():
    """Cycles are multiplied by trip counts; a fusion with a convolution is a matmul; sources are in this repository."""
    text = f"""HloModule m, is_scheduled=true

FileNames
1 "{ROOT}/dape_jax/model/loss.py"
2 "/usr/lib/python3/site-packages/optax/a.py"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=1 line=8 end_line=8 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

%fused (p.1: f32[8,8]) -> f32[8,8] {{
  %p.1 = f32[8,8] parameter(0)
  ROOT %convolution.1 = f32[8,8] convolution(%p.1, %p.1), metadata={{op_name="jit(f)/dot_general" stack_frame_id=1}}
}}

%body (p.2: f32[8,8]) -> f32[8,8] {{
  %p.2 = f32[8,8] parameter(0)
  ROOT %fusion.1 = f32[8,8] fusion(%p.2), calls=%fused, backend_config={{"estimated_cycles":"5"}}
}}

ENTRY %main (p.3: f32[8,8]) -> f32[8,8] {{
  %p.3 = f32[8,8] parameter(0)
  %copy.1 = f32[8,8] copy(%p.3), metadata={{op_name="f/t" stack_frame_id=2}}, backend_config={{"estimated_cycles":"9"}}
  ROOT %while.1 = f32[8,8] while(%copy.1), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""
    work, source = read_work(text), "dape_jax/model/loss.py:7"
    fusion, copy = (
        Operation("fusion.1", 15, True, "jit(f)/dot_general", source),
        Operation("copy.1", 9, False, "f/t", source),
    )
    assert work.operations == (fusion, copy)
    assert work.cycles == 24


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
    assert dape["other_ms"] > kerple["other_ms"] > kerple["matmuls_ms"] > 0
    assert 0 < dape["mfu"] < kerple["mfu"] < 1
    times = [operation["ms"] for operation in dape["operations"]]
    assert times == sorted(times, reverse=True)
    assert len(times) == 10
    assert any(operation["source"].startswith("dape_jax/") for operation in dape["operations"])


# ---- all measurements on one GPU


def test_a_part_records_every_case(tmp_path, monkeypatch):
    """A case that fails, or is not compiled in time, is recorded, and the others run."""

    hung = threading.Event()
    cases = {
        "first": lambda: ({"compile_s": 1.0}, lambda: {"min_ms": 2.0}),
        "large": fails,
        "fails": lambda: ({}, fails),
        "slow": hung.wait,
        "late": lambda: hung.wait(1.2) or ({}, lambda: {"min_ms": 4.0}),  # after half of the limit
        "last": lambda: ({}, lambda: {"min_ms": 3.0}),
    }
    monkeypatch.setattr(os, "_exit", lambda _: hung.set())
    file = tmp_path / "results.jsonl"
    gpu.run_part("layers", cases, file, 2)
    results = {case: line for (_, case), line in gpu.read_results(file).items()}
    assert [*results] == ["first", "large", "fails", "last", "late", "slow"]
    assert (results["first"]["compile_s"], results["first"]["min_ms"], results["last"]["min_ms"]) == (1.0, 2.0, 3.0)
    assert results["large"]["failed"] == results["fails"]["failed"] == "out of memory"
    assert results["late"]["min_ms"] == 4.0
    assert results["slow"]["failed"].startswith("not compiled")
    text = gpu.summarize(gpu.read_results(file))
    assert re.search(r"^  first +2\.000 ms   compile_s 1$", text, re.MULTILINE)
    assert "NOT MEASURED\n  layers large: out of memory\n  layers fails: out of memory\n" in text


def test_wrong_values_are_seen(monkeypatch):
    assert all(cases(plan) for cases in gpu.CASES.values() for plan in (gpu.FULL, gpu.TINY))
    for case in gpu.FULL.steps:
        step.read_config(gpu.FULL.preset, "125m", *case)
    monkeypatch.setitem(gpu.IMPLEMENTATIONS, "fused", Wrong())
    cases = gpu.correct_cases(gpu.TINY)
    wrong, right = (cases[f"kerple/{name}"]()[1]() for name in ("fused", "dense"))
    assert 0.9 < wrong["errors"]["out"] < 1.1
    assert (wrong["right"], right["right"]) == (False, True)
    text = gpu.summarize({("correct", "fused"): wrong, ("correct", "dense"): right | {"same_bits": False}})
    assert re.search(r"fused +WRONG .*\n +dense +right .* DIFFERENT BITS", text)


def test_a_part_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {"steps": 1.0})
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert gpu.start_part("steps", gpu.Settings(str(tmp_path), ("steps",))) == "killed after 1.0 s"


def test_results_are_not_mixed(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"part": "steps", "case": "a"}\n')
    with pytest.raises(InputError, match=r"has results of \['steps'\]: choose another directory or --parts"):
        gpu.main(gpu.Settings(str(tmp_path)))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_everything_is_measured_on_a_cpu(tmp_path):
    done = run_python("-m", "benchmarks.gpu", f"--output={tmp_path}", "--tiny", timeout=900)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "results.jsonl", "summary.txt"]
    results = gpu.read_results(tmp_path / "results.jsonl")
    assert {part for part, _ in results} == set(gpu.PARTS)
    assert not any("failed" in line for line in results.values())
    summary = (tmp_path / "summary.txt").read_text()
    assert "WRONG" not in summary
    assert "DIFFERENT BITS" not in summary
    assert results["layers", "cuda/24/1/backward"]["min_ms"] > 0
