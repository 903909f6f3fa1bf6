"""Test the measurement on one GPU, on a CPU: processes, restarts, limits, the summary, and all of it together."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_cases, gpu_compiled
from benchmarks.step import read_config
from dape_jax.errors import InputError
from dape_jax.kernels import gpu as kernels
from dape_jax.model.attention import Dense

ROOT = Path(__file__).parents[1]


def lines_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


# ---- one group


def test_a_group_records_every_step_and_resumes_after_the_case_that_ended_it(tmp_path):
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
    (tmp_path / "go-g").touch()
    prepared: list[str] = []
    gpu_cases.run_group("g", cases(prepared), tmp_path, tmp_path)
    assert prepared == ["first", "last"]
    assert (tmp_path / "ready-g").exists()
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

    (tmp_path / "stop").touch()
    before = lines_of(tmp_path)
    gpu_cases.run_group("other", cases(prepared), tmp_path, tmp_path)
    assert lines_of(tmp_path) == before, "no time is left to prepare anything"


def test_every_group_has_cases_and_variants_restore_the_constants():
    for group in [*gpu.GROUPS, "profiled"]:
        assert gpu_cases.cases_of(group, gpu_cases.FULL)
        assert gpu_cases.cases_of(group, gpu_cases.TINY)
    with pytest.raises(ValueError, match="tea"):
        gpu_cases.cases_of("tea", gpu_cases.FULL)
    for step in gpu_cases.FULL.steps:
        read_config(gpu_cases.FULL.preset, *step)
    default = kernels.NUM_WARPS
    gpu_cases.VARIANTS["fused-warps-8"].set_constants()
    assert default != kernels.NUM_WARPS == 8
    gpu_cases.MAIN["fused"].set_constants()
    assert default == kernels.NUM_WARPS


class Wrong:
    """Returns twice the right result."""

    def __call__(self, *arguments):
        return 2 * Dense()(*arguments)


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


# ---- all groups


GROUP = """
import sys, time, pathlib
group, control, behaviour = sys.argv[1:]
control = pathlib.Path(control)
if behaviour == "dies once" and not (control / "died").exists():
    (control / "died").touch()
    sys.exit(9)
if behaviour == "hangs while it prepares":
    time.sleep(1000)
(control / f"ready-{group}").touch()
while not (control / f"go-{group}").exists():
    time.sleep(0.01)
if behaviour == "hangs while it is timed":
    time.sleep(1000)
"""


def test_groups_that_die_are_restarted_and_those_that_hang_are_killed(tmp_path, monkeypatch, capsys):
    behaviours = {
        "environment": "works",
        "steps": "dies once",
        "torch": "hangs while it is timed",
        "xla-forward": "hangs while it prepares",
    }
    monkeypatch.setattr(gpu, "GROUPS", dict.fromkeys(behaviours, 1.0))
    monkeypatch.setattr(gpu, "GRACE_S", 0.5)
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    measurement = gpu.Measurement(tmp_path, 20, tiny=False, processes=8)

    def command(group, output):
        return [sys.executable, str(script), group, str(measurement.control), behaviours[group]]

    monkeypatch.setattr(measurement, "group_command", command)
    processes = measurement.prepare(list(behaviours), measurement.deadline - 16)
    measurement.measure(processes, measurement.deadline)
    said = capsys.readouterr().out
    for line in (
        "steps died with status 9",
        "steps is prepared",
        "steps is timed: status 0",
        "environment is timed: status 0",
        "xla-forward has not prepared all cases",
        "xla-forward was killed while it prepared a case",
        "torch is timed: killed at its limit",
    ):
        assert line in said
    assert all(process.poll() is not None for process in processes.values())


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


@pytest.mark.parametrize("groups", [[], ["torch", "steps", "fused-forward"]])
def test_groups_are_measured_in_phases(tmp_path, monkeypatch, groups):
    measurement = gpu.Measurement(tmp_path, 1000, tiny=True, processes=8, groups=groups)
    prepared, limits = [], []
    monkeypatch.setattr(measurement, "prepare", lambda groups, until: prepared.append(groups))
    monkeypatch.setattr(measurement, "measure", lambda _, until: limits.append(until - measurement.deadline + 1000))
    monkeypatch.setattr(measurement, "train", lambda attention: prepared.append([attention]))
    measurement.run()
    if groups:
        assert prepared == [["fused-forward", "torch"], ["steps"]]
        assert limits == pytest.approx([1000, 1000])
    else:
        assert prepared == [["environment"], list(gpu.GROUPS)[1:-1], ["steps"], ["blockwise"]]
        assert limits == pytest.approx([60, 550, 800])
        assert sum(gpu.MEMORY[group] for group in prepared[1]) <= 1


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


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_bad_flags_of_the_measurement(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"group": "steps", "case": "a", "status": "done"}\n')
    output = f"--output={tmp_path}"
    for flags, words in (
        ([], "--output"),
        ([output], "has results of steps; choose another directory, or --groups"),
        ([output, "--groups=train,steps"], "has results of steps"),
        ([output, "--groups=train,tea"], "--groups = tea: must be of"),
    ):
        done = run(*flags)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_everything_is_measured_on_a_cpu(tmp_path):
    done = run(f"--output={tmp_path}", "--tiny", "--seconds=800", "--processes=2")
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


@pytest.mark.slow
def test_the_training_of_full_size_begins(tmp_path, monkeypatch):
    """Train with one layer and two steps only, within a limit for a busy CPU instead of the GPU's."""
    monkeypatch.setitem(gpu.AFTER, "train", 600)
    measurement = gpu.Measurement(tmp_path, 600, tiny=False, processes=1)
    changes = ["model.num_layers=1", "train.num_steps=2", "train.batch_size=2"]
    flags = [f"--config.{change}" for change in changes]
    command = [*measurement.train_command("blockwise"), *flags]
    monkeypatch.setattr(measurement, "train_command", lambda attention: command)
    measurement.train("blockwise")
    (line,) = lines_of(tmp_path)
    assert line["status"] == "done", (tmp_path / "train.txt").read_text()
    assert 4 < line["loss_nats"] < 7


# ---- compiled without a GPU

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
    assert len(gpu_compiled.plot(rows).axes) == 3


def test_without_the_plugin_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(InputError, match="pip install"):
        gpu_compiled.find_ptxas()


@pytest.mark.parametrize("changes", [{"lengths": ()}, {"batches": (0,)}, {"implementations": ("flash",)}])
def test_bad_settings_of_the_compilation(changes):
    with pytest.raises(InputError, match=f"--{next(iter(changes))}"):
        gpu_compiled.Settings(**changes)
