"""Run all measurements on one GPU in at most nine minutes; see `docs/gpu.md`.

    python -m benchmarks.gpu --output=results/gpu/h100
    python -m benchmarks.gpu --output=runs/gpu --tiny        # the same on a CPU, with tiny sizes

Measured: correctness of every implementation; times and memory of one layer (`dense`, `blockwise`, the fused kernel,
cuDNN's plain attention, PyTorch); complete training steps; a short training run.

Each group of cases is a process (`gpu_cases.py`) with a time limit. The groups of a phase are prepared in parallel,
because compilation needs CPU time, and then timed one at a time: a group waits for a line on its standard input. A
group that crashes is restarted, without the case that ended it. This module does not need JAX, so that the summary is
written even if JAX fails.

`--groups` selects some of the groups, and adds them to the results that are already in the directory:

    python -m benchmarks.gpu --output=results/gpu/h100 --groups=steps,train

Output, four files:

    results.jsonl   a line for every step of every case; only the last line of a case counts
    summary.txt     tables made from results.jsonl
    environment.txt hardware and software of the machine
    log.txt         output of the groups

A time is the minimum of five samples, each the mean of queued calls (`measure.py`).
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Groups of cases, in order of importance, and the seconds that their timing may take.
GROUPS = {
    "environment": 30,
    "correct-bfloat16": 5,
    "correct-float32": 5,
    "fused-forward": 25,
    "fused-backward": 35,
    "xla-forward": 25,
    "xla-backward": 35,
    "torch": 40,
    "steps": 60,
    "train": 120,
}
# Phases, and the part of the total time until the end of each. Some groups need much memory, and have the GPU alone.
ALONE = ("environment", "steps", "train")
TOGETHER = tuple(group for group in GROUPS if group not in ALONE)
PHASES = ((("environment",), 0.06), (TOGETHER, 0.55), (("steps",), 0.8), (("train",), 1.0))
# Share of the GPU's memory that a group may take. A process keeps memory that it no longer uses.
MEMORY = dict.fromkeys(GROUPS, 0.05) | dict.fromkeys(ALONE, 0.75) | {"xla-forward": 0.18, "xla-backward": 0.37}
MEMORY |= {"correct-bfloat16": 0.1, "correct-float32": 0.1}
PREPARING_SHARE = 0.6  # part of a phase in which its groups compile
RESTART_S, MIN_RESTART_S = 60, 10  # extra time of a group that is restarted, and the least time to restart one
LOG_BYTES = 2**20  # bytes kept of the end of the log
Line = dict[str, Any]


class Measurement:
    """Processes of one measurement, and the time left for them."""

    def __init__(self, output: Path, seconds: float, tiny: bool, groups: Sequence[str] = ()):
        self.output, self.tiny, self.groups = output, tiny, groups or list(GROUPS)
        self.total_s, self.deadline = seconds, time.monotonic() + seconds
        self.cache = Path(tempfile.mkdtemp(prefix="dape_gpu_"))
        self.environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor"),
            "TRITON_CACHE_DIR": str(self.cache / "triton"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore::DeprecationWarning",
        }
        if tiny:
            self.environment["JAX_PLATFORMS"] = "cpu"

    @property
    def left_s(self) -> float:
        """Return the seconds left."""
        return self.deadline - time.monotonic()

    def say(self, text: str) -> None:
        """Print progress."""
        print(f"[{self.left_s:4.0f} s left] {text}", flush=True)

    def finish(self, process: subprocess.Popen, limit_s: float) -> int | None:
        """Let a process continue; return its exit status, or None if it and its children were killed at the limit."""
        try:
            process.communicate(b"go\n", max(1.0, limit_s))
            return process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None

    def command(self, group: str, prepare_s: float) -> list[str]:
        """Return the command of a group, which may prepare its cases for some seconds."""
        command = [sys.executable, "-m", "benchmarks.gpu_cases", f"--group={group}", f"--output={self.output}"]
        command += [f"--ready={self.cache / group}", f"--prepare_s={prepare_s:.0f}"]
        return [*command, *(["--tiny"] if self.tiny else [])]

    def start(self, group: str, prepare_s: float) -> subprocess.Popen:
        """Start a group of cases in a new process group, with its output appended to the log."""
        environment = self.environment | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY[group])}
        if group.startswith("correct"):  # values do not depend on the choice among matmuls, and compiling is quicker
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
        streams = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with (self.output / "log.txt").open("ab") as log:
            command, options = self.command(group, prepare_s), {"env": environment, "start_new_session": True}
            return subprocess.Popen(command, cwd=ROOT, stdout=log, **streams, **options)

    def measure(self, groups: Sequence[str], until: float) -> None:
        """Prepare groups in parallel, then time them one at a time, until a time."""
        prepare_s = PREPARING_SHARE * (until - time.monotonic())
        processes = {group: self.start(group, prepare_s) for group in groups}
        while time.monotonic() < until and any(
            process.poll() is None and not (self.cache / group).exists() for group, process in processes.items()
        ):
            time.sleep(0.1)
        for group, process in processes.items():
            limit_s = GROUPS[group] * (8 if self.tiny else 1)
            status = self.finish(process, min(limit_s, until - time.monotonic()))
            for _ in range(3):
                left_s = min(RESTART_S + limit_s, until - time.monotonic())
                if status in (0, None) or left_s < MIN_RESTART_S:
                    break
                self.say(f"{group} died with status {status}")
                status = self.finish(self.start(group, left_s), left_s)
            self.say(f"{group}: {'killed at its limit' if status is None else f'status {status}'}")

    def run(self) -> None:
        """Measure the groups phase by phase. Selected groups share the time."""
        for phase, part in PHASES:
            if groups := [group for group in phase if group in self.groups]:
                part = part if len(self.groups) == len(GROUPS) else 1
                self.measure(groups, self.deadline - (1 - part) * self.total_s)


def describe() -> str:
    """Describe the hardware and software of the machine."""
    # A copy of the source without git names its commit in this variable: `dape_jax/provenance.py`.
    parts = [
        f"DAPE_COMMIT={os.environ.get('DAPE_COMMIT', '')}",
        f"{platform.platform()}; Python {platform.python_version()}; {os.cpu_count()} cores",
    ]
    commands = ["git describe --always --dirty", "nvidia-smi", "python -m pip list --format=freeze"]
    for command in [*commands, "nvcc --version"]:
        try:
            words = command.replace("python", sys.executable, 1).split()
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30)
            parts.append(f"$ {command}\n{done.stdout}{done.stderr[-500:]}")
        except (OSError, subprocess.TimeoutExpired) as error:
            parts.append(f"$ {command}\n{error}")
    return "\n".join(parts)


# ---- summary


def read_results(path: Path) -> dict[tuple[str, str], Line]:
    """Return the last line of every case, by group and case."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(line["group"], line["case"]): line for line in lines}


def reason_of(line: Line) -> str:
    """Return why a case has no figures."""
    return line.get("reason") or line.get("left_out") or line["status"]


def layer_times(results: dict[tuple[str, str], Line]) -> dict[tuple[int, int, str], dict[str, Line]]:
    """Return the lines of one layer by T, B and direction, then by variant."""
    found: dict[tuple[int, int, str], dict[str, Line]] = {}
    for (group, case), line in results.items():
        if group not in ("steps", "environment", "train") and case.count("/") == 3:
            name, length, batch, direction = case.split("/")
            found.setdefault((int(length), int(batch), direction), {})[name] = line
    return dict(sorted(found.items()))


def summarize(results: dict[tuple[str, str], Line], output: str) -> str:
    """Return the results as tables."""

    def figures_of(wanted: str) -> list[str]:
        lines = {case: line for (group, case), line in results.items() if group == wanted}
        hidden = ("group", "case", "at")
        return [f"  {case}: {json.dumps({k: v for k, v in lines[case].items() if k not in hidden})}" for case in lines]

    text = [f"python -m benchmarks.gpu --output={output}", "", "ENVIRONMENT", *figures_of("environment")]
    text += ["", "CORRECTNESS against dense in float32: largest relative error of values and gradients"]
    for (group, case), line in results.items():
        if not group.startswith("correct"):
            continue
        cells = [
            f"{name} {'right' if x['right'] else 'WRONG'} {x['errors'][x['worst']]:.1e} ({x['worst']})"
            + ("" if x["same_bits"] else ", DIFFERENT BITS IN A SECOND RUN")
            for name, x in line.items()
            if isinstance(x, dict)
        ]
        text.append(f"  {group.removeprefix('correct-'):9} {case:14} " + ("; ".join(cells) or reason_of(line)))
    text += ["", "ONE LAYER, bfloat16, ms (temporary MiB)"]
    for (length, batch, direction), lines in layer_times(results).items():
        text.append(f"  T={length} B={batch} {direction}")
        for name, line in lines.items():
            memory = line.get("temporary_mib", line.get("peak_mib"))
            figures = f"{line.get('min_ms', 0):9.3f}" + ("" if memory is None else f" ({memory:,.0f})")
            text.append(f"    {name:18} {figures if line['status'] == 'done' else reason_of(line)}")
    text += ["", "TRAINING STEPS"]
    for (group, case), line in results.items():
        if group == "steps":
            names = ("min_ms", "tokens_per_s", "mfu", "needed_gib", "loss_nats")
            figures = ", ".join(f"{name} {line[name]:,.4g}" for name in names if line.get(name) is not None)
            text.append(f"  {case:40} {figures if line['status'] == 'done' else reason_of(line)}")
    text += ["", "TRAINING, 150 steps of 125M, 32 x 512 bytes", *figures_of("train")]
    begun = ("prepares", "prepared", "runs")
    unfinished = [f"{group} {case}" for (group, case), line in results.items() if line["status"] in begun]
    failed = [
        f"{group} {case}: {reason_of(line)}"
        for (group, case), line in results.items()
        if line["status"] == "failed" or "left_out" in line
    ]
    text += ["", f"NOT FINISHED: {', '.join(unfinished) or 'nothing'}"]
    return "\n".join([*text, *(f"FAILED OR NOT RUN: {line}" for line in failed)])


def main() -> None:
    """Measure, and always write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(GROUPS)
    parser.add_argument("--output", type=Path, required=True, help="Directory of the results.")
    parser.add_argument("--groups", default="", help=f"Comma-separated groups, of {', '.join(known)}; all if empty.")
    parser.add_argument("--seconds", type=float, default=500, help="Total time in seconds; at least 120.")
    parser.add_argument("--tiny", action="store_true", help="Tiny sizes, on a CPU.")
    flags = parser.parse_args()
    if flags.seconds < 120:
        parser.error(f"--seconds = {flags.seconds:g}: must be at least 120")
    groups = list(filter(None, flags.groups.split(",")))
    if unknown := [group for group in groups if group not in known]:
        parser.error(f"--groups = {','.join(unknown)}: must be of {known}")
    measured = {group for group, _ in read_results(flags.output / "results.jsonl")}
    if repeated := sorted(measured.intersection(groups or known)):
        advice = "choose another directory, or --groups"
        parser.error(f"--output = {str(flags.output)!r}: has results of {', '.join(repeated)}; {advice}")
    flags.output.mkdir(parents=True, exist_ok=True)
    output = flags.output.absolute()
    (output / "environment.txt").write_text(describe())
    measurement = Measurement(output, flags.seconds, flags.tiny, groups)
    try:
        measurement.run()
    finally:
        results = read_results(output / "results.jsonl")
        text = summarize(results, str(flags.output))
        (output / "summary.txt").write_text(text + "\n")
        print(text)
        if (log := output / "log.txt").exists():
            log.write_bytes(log.read_bytes()[-LOG_BYTES:])
        shutil.rmtree(measurement.cache, ignore_errors=True)


if __name__ == "__main__":
    main()
