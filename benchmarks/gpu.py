"""Run all measurements on one GPU in at most nine minutes; see `docs/gpu.md`.

    python -m benchmarks.gpu --output=results/gpu/h100
    python -m benchmarks.gpu --output=runs/gpu --tiny        # the same on a CPU, with tiny sizes

Measured: correctness of every implementation; times and memory of one layer (`dense`, `blockwise`, the fused kernel
and variants of both, cuDNN's plain attention, PyTorch); complete training steps; a short training run.

Each group of cases is a process (`gpu_cases.py`) with a time limit. The groups of a phase are prepared in parallel,
because compilation needs CPU time, and then timed one at a time: a group waits for a line on its standard input. A
group that crashes is restarted, without the case that ended it. This module does not need JAX, so that the summary is
written even if JAX fails.

`--groups` selects some of the groups, and adds them to the results that are already in the directory:

    python -m benchmarks.gpu --output=results/gpu/h100 --groups=steps,train

Output, six files:

    results.jsonl   a line for every step of every case; only the last line of a case counts
    summary.txt     tables made from results.jsonl
    layers.png      times of one layer
    environment.txt hardware and software of the machine
    train.txt       the short trainings
    log.txt         output of the groups

A time is the minimum of five samples, each the mean of queued calls (`measure.py`).
"""

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import signal
import statistics
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
    "variants-forward": 20,
    "variants-backward": 30,
    "steps": 60,
}
AFTER = {"train": 60}  # what follows the groups, and its seconds
# Phases, and the part of the total time until the end of each. Two groups need much memory, and have the GPU alone.
ALONE = ("environment", "steps")
PHASES = ((ALONE[:1], 0.06), (tuple(group for group in GROUPS if group not in ALONE), 0.55), (ALONE[1:], 0.8))
# Share of the GPU's memory that a group may take. A process keeps memory that it no longer uses.
MEMORY = dict.fromkeys(GROUPS, 0.05) | {"environment": 0.75, "steps": 0.75, "xla-forward": 0.18, "xla-backward": 0.37}
MEMORY |= {"correct-bfloat16": 0.1, "correct-float32": 0.1}
PREPARING_SHARE = 0.6  # part of a phase in which its groups compile
RESTART_S, MIN_RESTART_S = 60, 10  # extra time of a group that is restarted, and the least time to restart one
TRAIN_STEPS = 150
LOG_BYTES = 2**20  # bytes kept of the end of each log
Line = dict[str, Any]


class Measurement:
    """Processes of one measurement, and the time left for them."""

    def __init__(self, output: Path, seconds: float, tiny: bool, groups: Sequence[str] = ()):
        self.output, self.tiny = output, tiny
        self.groups = groups or [*GROUPS, *AFTER]
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
            "MPLBACKEND": "Agg",
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

    def start(self, command: list[str], output: Path, **environment: str) -> subprocess.Popen:
        """Start a command in a new process group, with its output appended to a file."""
        with output.open("ab") as file:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment | environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, process: subprocess.Popen, limit_s: float) -> int | None:
        """Let a process continue; return its exit status, or None if it and its children were killed at the limit."""
        try:
            process.communicate(b"go\n", max(1.0, limit_s))
            return process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None

    def group_command(self, group: str, prepare_s: float) -> list[str]:
        """Return the command of a group, which may prepare its cases for some seconds."""
        command = [sys.executable, "-m", "benchmarks.gpu_cases", f"--group={group}", f"--output={self.output}"]
        command += [f"--ready={self.cache / group}", f"--prepare_s={prepare_s:.0f}"]
        return [*command, *(["--tiny"] if self.tiny else [])]

    def start_group(self, group: str, prepare_s: float) -> subprocess.Popen:
        """Start a group of cases."""
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY[group])}
        if group.startswith("correct"):  # values do not depend on the choice among matmuls, and compiling is quicker
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
        return self.start(self.group_command(group, prepare_s), self.output / "log.txt", **environment)

    def measure(self, groups: Sequence[str], until: float) -> None:
        """Prepare groups in parallel, then time them one at a time, until a time."""
        prepare_s = PREPARING_SHARE * (until - time.monotonic())
        processes = {group: self.start_group(group, prepare_s) for group in groups}
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
                status = self.finish(self.start_group(group, left_s), left_s)
            self.say(f"{group}: {'killed at its limit' if status is None else f'status {status}'}")

    def train_command(self, attention: str) -> list[str]:
        """Return the command that trains for a few steps on the text of Python's standard library, as bytes."""
        config, flags = "configs/paper.py:125m,bias=kerple,processor=dape,kernel=3", ["--config.data.tokenizer=bytes"]
        flags += ["--config.train.batch_size=32", f"--config.train.num_steps={TRAIN_STEPS}"]
        flags += ["--config.model.vocab_size=257", f"--config.model.attention={attention}"]
        if self.tiny:
            config, flags = "configs/quickstart.py:bias=kerple,processor=dape,kernel=3,channels=4", []
            flags += ["--config.train.batch_size=4", "--config.train.num_steps=6", "--config.model.num_layers=1"]
        flags += ["--config.data.path=stdlib", f"--config.data.cache_dir={self.cache}/data"]
        flags += ["--config.train.eval_interval=100000", "--config.train.checkpoint_interval=100000"]
        return [sys.executable, "train.py", f"--config={config}", *flags, f"--workdir={self.cache}/{attention}"]

    def train(self, attention: str) -> None:
        """Train for a few steps."""
        command = self.train_command(attention)
        started, log = time.monotonic(), self.cache / f"train-{attention}.txt"
        status = self.finish(self.start(command, log), min(AFTER["train"] * (4 if self.tiny else 1), self.left_s - 10))
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace")).replace("\r", "\n")
        lines = [line for line in text.splitlines() if line.strip()]
        shown = re.findall(r"loss ([\d.]+), ([\d,]+) tokens/s", text)
        line = {"group": "train", "case": attention, "status": "done" if status == 0 else f"status {status}"}
        line |= {"seconds": round(time.monotonic() - started, 1), "loss_nats": float(shown[-1][0]) if shown else None}
        rates = [float(rate.replace(",", "")) for _, rate in shown[-50:]]
        line |= {"tokens_per_s": statistics.median(rates) if rates else None}
        with (self.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        with (self.output / "train.txt").open("a") as file:
            file.write(f"$ {' '.join(command[1:])}\n" + "\n".join([*lines[:15], "...", *lines[-15:]]) + "\n")
        self.say(f"train {attention}: status {status}")

    def run(self) -> None:
        """Measure the groups phase by phase, and then the rest."""
        is_selection = len(self.groups) < len(GROUPS) + len(AFTER)  # then the groups share the time
        for phase, part in PHASES:
            if groups := [group for group in phase if group in self.groups]:
                self.measure(groups, self.deadline - (0 if is_selection else 1 - part) * self.total_s)
        for attention in ("blockwise",) if self.tiny else ("fused", "blockwise"):
            if "train" in self.groups and self.left_s > 40:
                self.train(attention)


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
    text = [f"python -m benchmarks.gpu --output={output}", "", "ENVIRONMENT"]
    hidden = ("group", "case", "at")
    for (group, case), line in results.items():
        if group == "environment":
            text.append(f"  {case}: {json.dumps({k: v for k, v in line.items() if k not in hidden})}")
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
            errors = f", error {max(line['errors'].values()):.1e}" if "errors" in line else ""
            text.append(f"    {name:18} {figures + errors if line['status'] == 'done' else reason_of(line)}")
    text += ["", "TRAINING STEPS"]
    steps = {case: line for (group, case), line in results.items() if group == "steps"}
    for case, line in steps.items():
        base = steps.get("350m/dape1x3-kerple/512/1/dense", {}).get("min_ms") if case.startswith("350m") else None
        ratio = f", {line['min_ms'] / base:.3f} of dape1x3-kerple, dense" if base and "min_ms" in line else ""
        names = ("min_ms", "tokens_per_s", "mfu", "needed_gib", "loss_nats")
        figures = ", ".join(f"{name} {line[name]:,.4g}" for name in names if line.get(name) is not None)
        text.append(f"  {case:40} {figures + ratio if line['status'] == 'done' else reason_of(line)}")
    text += ["", f"TRAINING, {TRAIN_STEPS} steps of 125M, 32 x 512 bytes"]
    for (group, case), line in results.items():
        if group == "train":
            text.append(f"  {case}: {json.dumps({k: v for k, v in line.items() if k not in hidden})}")
    unfinished = [f"{group} {case}" for (group, case), line in results.items() if line["status"] in UNFINISHED]
    failed = [
        f"{group} {case}: {reason_of(line)}"
        for (group, case), line in results.items()
        if line["status"] == "failed" or "left_out" in line
    ]
    text += ["", f"NOT FINISHED: {', '.join(unfinished) or 'nothing'}"]
    return "\n".join([*text, *(f"FAILED OR NOT RUN: {line}" for line in failed)])


UNFINISHED = ("prepares", "prepared", "runs")


def reason_of(line: Line) -> str:
    """Return why a case has no figures."""
    return line.get("reason") or line.get("left_out") or line["status"]


def plot(results: dict[tuple[str, str], Line], path: Path) -> None:
    """Plot the times of one layer: a row for each direction, a column for each batch size."""
    from matplotlib.figure import Figure

    points: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for (length, batch, direction), lines in layer_times(results).items():
        for name, line in lines.items():
            if line["status"] == "done":
                points.setdefault((direction, batch), {}).setdefault(name, []).append((length, line["min_ms"]))
    if not points:
        return
    rows, columns = sorted({direction for direction, _ in points}, reverse=True), sorted({batch for _, batch in points})
    names = dict.fromkeys(name for curves in points.values() for name in curves)
    names_of = {"forward": "forward", "backward": "forward and backward"}
    colors = {name: f"C{index % 10}" for index, name in enumerate(names)}
    size = (2.2 * len(columns) + 2, 2.8 * len(rows) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    lengths = sorted({length for curves in points.values() for curve in curves.values() for length, _ in curve})
    for (direction, row), (batch, column) in itertools.product(
        zip(rows, panels, strict=True), zip(columns, panels.T, strict=True)
    ):
        (axes,) = set(row) & set(column)
        for name, curve in points.get((direction, batch), {}).items():
            axes.plot(*zip(*curve, strict=True), "o-", color=colors[name], label=name, markersize=4)
        axes.set(xscale="log", yscale="log", title=f"B = {batch}, {names_of[direction]}")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=90)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize=8)
    figure.supxlabel("sequence length (tokens)")
    figure.supylabel("time of one layer (ms)")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, and always write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*GROUPS, *AFTER]
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
        plot(results, output / "layers.png")


if __name__ == "__main__":
    main()
