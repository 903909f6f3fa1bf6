"""Measure everything on one GPU in at most seven minutes; see `docs/gpu.md`.

    python -m benchmarks.gpu --output=results/gpu/h200
    python -m benchmarks.gpu --output=runs/gpu --tiny                    # the same on a CPU, kernels emulated

Parts, in order of importance, each a process with its own limit of time:

    correct   values and gradients of implementations against `dense` in float32; whether a second run has the same bits
    layers    times and memory of one layer: the CUDA kernels, the Triton kernel, cuDNN's plain attention, Kerple
              without DAPE in the CUDA kernels, `blockwise`
    steps     training steps of the 125M model
    torch     PyTorch's listing of the paper, compiled, and its plain attention

A part compiles its cases in threads, and runs those that are ready one at a time. Parts that measure times begin after
half of their limit, when most are ready, so that compiling does not disturb them. Every line of OUTPUT/results.jsonl is
written immediately, so that a part that dies or is killed loses one case. OUTPUT/summary.txt has tables made from the
lines, OUTPUT/log.txt the output of the parts, with the machine's hardware and software.

`--parts` measures some of the parts, and adds them to the directory. A time is the minimum of five samples, each the
mean of queued calls (`measure.py`).
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks import listing
from benchmarks.attention import variant_of
from benchmarks.layer import (
    DIRECTIONS,
    PLAIN,
    Layer,
    as_numpy,
    compile_layer,
    errors_of,
    expected_results,
    is_right,
    plain,
)
from benchmarks.measure import Call, check_names, failure, seconds_in_turns, seconds_of
from benchmarks.step import Step, read_config
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.hardware import GIB, MIB
from dape_jax.model.attention import Blockwise, Dense, Fused, Implementation
from dape_jax.model.processors import DapeConfig, PlainConfig
from dape_jax.provenance import provenance
from dape_jax.sharding import device_platform

ROOT = Path(__file__).parents[1]
PARTS = {"correct": 120, "layers": 130, "steps": 130, "torch": 40}  # with their limits in seconds
SAMPLES = 5
Figures = dict[str, Any]
# Returns figures, and a function that runs the case and returns more.
Prepare = Callable[[], tuple[Figures, Callable[[], Figures]]]

IMPLEMENTATIONS: dict[str, Implementation] = {
    "cuda": Fused("cuda"),  # in the emulator without a GPU
    "cuda-kerple": Fused("cuda"),  # of a layer without processor
    "fused": Fused("gpu"),
    "cudnn": Fused("gpu"),  # of a layer without bias and processor
    "blockwise": Blockwise(128, 4),
    "dense": Dense(),
}


def of_implementation(layer: Layer, name: str) -> Layer:
    """Return the layer that an implementation computes."""
    if name == "cuda-kerple":
        return dataclasses.replace(layer, processor=PlainConfig())
    return plain(layer) if name == "cudnn" else layer


def with_dape(kernel_width: int, **options: Any) -> Layer:
    """Return a layer with other options of DAPE."""
    return Layer(length=300, batch=2, processor=DapeConfig(kernel_width, channels=32, **options))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Layers, shapes and steps of all cases."""

    layer: Layer  # layer to time
    correct: dict[str, Layer]
    shapes: tuple[tuple[int, int], ...]  # (T, B) of one layer
    torch_shapes: tuple[tuple[int, int], ...]
    steps: tuple[tuple[str, int, int, str], ...]  # method, T, B, implementation
    preset: str  # preset of the steps' recipe


FULL = Plan(
    layer=Layer(),
    correct={
        "kerple": Layer(batch=2),
        "ragged": Layer(length=333, batch=2),
        "long": Layer(length=2048),
        "350m": Layer(heads=16, kv_heads=16),
        "one-kv-head": Layer(length=200, kv_heads=1, batch=2),
        "window": Layer(length=700, window=130),
        "w1": with_dape(1),
        "w5": with_dape(5),
        "w7-32-heads": dataclasses.replace(with_dape(7), heads=32, kv_heads=32, head_dim=80, batch=1),
        "causal-w2": dataclasses.replace(with_dape(2, alignment="causal"), bias="alibi"),
        "nope": Layer(length=300, bias="nope"),
        "equation-2": with_dape(3, residual=False),
        "kerple-alone": dataclasses.replace(Layer(batch=2), processor=PlainConfig()),
        "plain": dataclasses.replace(PLAIN, batch=2),
    },
    shapes=((2048, 1), (512, 16), (8192, 1), (2048, 8), (512, 1)),
    torch_shapes=((512, 1), (2048, 1), (512, 16)),
    steps=(
        ("dape1x3-kerple", 512, 32, "cuda"),
        ("dape1x3-kerple", 512, 32, "fused"),
        ("kerple", 512, 32, "cuda"),
        ("rope", 512, 32, "auto"),
        ("dape1x3-kerple", 2048, 8, "cuda"),
        ("kerple", 2048, 8, "cuda"),
        ("rope", 2048, 8, "auto"),
    ),
    preset="paper",
)
TINY_LAYER = Layer(length=24, heads=2, kv_heads=1, head_dim=8, processor=DapeConfig(kernel_width=3, channels=4))
TINY = Plan(
    layer=TINY_LAYER,
    correct={"kerple": TINY_LAYER, "plain": plain(TINY_LAYER)},
    shapes=((24, 1),),
    torch_shapes=((24, 1),),
    steps=(("dape1x3-kerple", 32, 8, "blockwise"), ("kerple", 32, 8, "dense")),
    preset="small",
)


# ---- cases of each part


def correct_cases(plan: Plan) -> dict[str, Prepare]:
    """Return the cases that compare implementations, named LAYER/IMPLEMENTATION."""

    def prepare(layer: Layer, name: str) -> tuple[Figures, Callable[[], Figures]]:
        function, params = layer.function("backward", IMPLEMENTATIONS[name])
        program = jax.jit(function).lower(params, *layer.arrays()).compile()
        expected_results(layer, "backward")  # compiled in this thread too

        def run() -> Figures:
            found, again = (as_numpy(program(params, *layer.arrays())) for _ in range(2))
            errors = errors_of(found, layer, "backward")
            return {
                "right": is_right(errors, layer.dtype),
                "same_bits": all(np.array_equal(found[each], again[each]) for each in found),
                "worst": max(errors, key=lambda each: np.nan_to_num(errors[each], nan=np.inf)),
                "errors": errors,
            }

        return {}, run

    def takes(layer: Layer, name: str) -> bool:
        return name != "fused" or isinstance(layer.processor, DapeConfig) or layer.bias == "nope"  # cuDNN takes no bias

    names = ("cuda", "dense", "fused")  # in order of importance
    cases = [(case, layer, name) for name in names for case, layer in plan.correct.items() if takes(layer, name)]
    return {f"{case}/{name}": functools.partial(prepare, layer, name) for case, layer, name in cases}


def layer_cases(plan: Plan) -> dict[str, Prepare]:
    """Return the cases that time one layer, named IMPLEMENTATION/T/B/DIRECTION."""

    def prepare(name: str, length: int, batch: int, direction: str) -> tuple[Figures, Callable[[], Figures]]:
        layer = of_implementation(dataclasses.replace(plan.layer, length=length, batch=batch), name)
        call, figures = compile_layer(layer, direction, IMPLEMENTATIONS[name])
        return figures, functools.partial(times_of, call)

    names = ("cuda", "cudnn", "cuda-kerple", "fused", "blockwise")
    cases = [(name, *shape, way) for shape, way, name in itertools.product(plan.shapes, DIRECTIONS, names)]
    cases = [case for case in cases if case[0] != "blockwise" or case[1] * case[2] <= 8192]
    return {"/".join(map(str, case)): functools.partial(prepare, *case) for case in cases}


def times_of(call: Call) -> Figures:
    """Return the time of a call, from samples of queued calls; and of one call, including waiting for its result."""
    with tqdm(disable=True) as bar:
        samples = seconds_in_turns({"": call}, SAMPLES, bar)[""]
    return {"min_ms": 1e3 * min(samples), "all_ms": [1e3 * x for x in samples], "once_ms": 1e3 * seconds_of(call, 1)}


def step_cases(plan: Plan) -> dict[str, Prepare]:
    """Return the cases that time whole training steps of the 125M model, named METHOD/T/B/IMPLEMENTATION."""

    def prepare(*case: Any) -> tuple[Figures, Callable[[], Figures]]:
        step = Step(read_config(plan.preset, "125m", *case))

        def run() -> Figures:
            with tqdm(disable=True) as bar:
                for _ in range(3):
                    step.take_turn(5, bar)
            return step.result()

        return {"compile_s": step.program.compile_s, "needed_gib": step.needed_bytes / GIB}, run

    return {"/".join(map(str, case)): functools.partial(prepare, *case) for case in plan.steps}


def torch_cases(plan: Plan) -> dict[str, Prepare]:
    """Return the cases that time PyTorch, named NAME/T/B/DIRECTION."""
    if why := listing.why_not_torch(device_platform()):
        return {"torch": lambda: ({"left_out": why}, dict)}

    def prepare(name: str, length: int, batch: int, direction: str) -> tuple[Figures, Callable[[], Figures]]:
        sizes = {"length": length, "batch": batch, "kv_heads": plan.layer.heads}
        layer = variant_of(dataclasses.replace(plan.layer, **sizes), name)

        def run() -> Figures:  # PyTorch compiles in one thread only
            call, compile_s = listing.torch_function(name, *layer.modules(), layer.arrays(), direction)
            figures = times_of(call) | {"compile_s": compile_s}
            if device_platform() == "gpu":
                figures["peak_mib"] = listing.bytes_of_call(call) / MIB
            listing.empty_cache()
            return figures

        return {}, run

    names = [name for name in listing.NAMES if name != "torch eager"]
    cases = itertools.product(names, plan.torch_shapes, DIRECTIONS)
    return {f"{name}/{T}/{B}/{way}": functools.partial(prepare, name, T, B, way) for name, (T, B), way in cases}


CASES = {"correct": correct_cases, "layers": layer_cases, "steps": step_cases, "torch": torch_cases}


# ---- processes


def run_part(part: str, cases: dict[str, Prepare], file: Path, limit_s: float) -> None:
    """Compile the cases in threads, and run each when it is ready; write a line for each."""
    started, parent = time.monotonic(), {"part": part, "device": jax.devices()[0].device_kind}

    def write(case: str, figures: Figures) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(parent | {"case": case} | figures) + "\n")

    pool = concurrent.futures.ThreadPoolExecutor(8)
    waiting = {pool.submit(prepare): case for case, prepare in cases.items()}
    if part != "correct":
        concurrent.futures.wait(waiting, limit_s / 2)
    while waiting:
        left_s = max(0, started + 0.9 * limit_s - time.monotonic())
        concurrent.futures.wait(waiting, left_s, concurrent.futures.FIRST_COMPLETED)
        future = next((each for each in waiting if each.done()), None)
        if future is None:
            break
        case = waiting.pop(future)
        try:
            figures, run = future.result()
            write(case, figures | run())
        except Exception as error:  # of any kind: continue with the other cases
            traceback.print_exc()
            write(case, {"failed": failure(error)})
    for case in waiting.values():
        write(case, {"failed": f"not compiled after {time.monotonic() - started:.0f} s"})
    os._exit(0)  # without waiting for threads that still compile


def start_part(part: str, settings: "Settings") -> str:
    """Run a part in a process; return how it ended."""
    limit_s = PARTS[part] * (10 if settings.tiny else 1)
    command = [sys.executable, "-m", "benchmarks.gpu", f"--output={settings.output}", f"--parts={part}", "--inside"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    environment |= {"JAX_PLATFORMS": "cpu"} if settings.tiny else {}
    if part == "correct":  # not timed; choosing among matmuls by timing them would take most of its limit
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    with Path(settings.output, "log.txt").open("ab") as log:
        options = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
        process = subprocess.Popen([*command, *(["--tiny"] if settings.tiny else [])], cwd=ROOT, **options)
        try:
            return f"status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"killed after {limit_s} s"


# ---- summary


def read_results(path: Path) -> dict[tuple[str, str], Figures]:
    """Return the last line of every case, by part and case."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(line["part"], line["case"]): line for line in lines}


def summarize(results: dict[tuple[str, str], Figures]) -> str:
    """Return the results as tables."""
    text = ["CORRECTNESS against dense in float32: largest relative error of values and gradients"]
    for (part, case), line in results.items():
        if part == "correct" and "right" in line:
            verdict = "right" if line["right"] else "WRONG"
            bits = "" if line["same_bits"] else ", DIFFERENT BITS IN A SECOND RUN"
            text.append(f"  {case:30} {verdict} {line['errors'][line['worst']]:.1e} ({line['worst']}){bits}")
    for part, title in (("layers", "ONE LAYER, bfloat16"), ("torch", "PYTORCH"), ("steps", "TRAINING STEPS, 125M")):
        text += ["", title]
        for (_, case), line in ((key, line) for key, line in results.items() if key[0] == part and "min_ms" in line):
            names = ("temporary_mib", "peak_mib", "needed_gib", "tokens_per_s", "mfu", "loss_nats", "compile_s")
            figures = ", ".join(
                f"{name} {line[name]:,.4g}" for name in names if name in line and line[name] is not None
            )
            text.append(f"  {case:36} {line['min_ms']:9.3f} ms   {figures}")
    text += ["", "NOT MEASURED"]
    for (part, case), line in results.items():
        text += [f"  {part} {case}: {line[why]}" for why in ("failed", "left_out") if why in line]
    return "\n".join(text)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    output: str = flag("results/gpu/new", "Directory of the results.")
    parts: tuple[str, ...] = flag((*PARTS,), f"Parts: {', '.join(PARTS)}.")
    tiny: bool = flag(False, "Tiny sizes, on a CPU.")
    inside: bool = flag(False, "Run a part in this process; used by the command itself.")

    def __post_init__(self):
        check_names("parts", self.parts, PARTS)


def main(settings: Settings) -> None:
    """Measure, and always write the summary."""
    output = Path(settings.output).absolute()
    settings = dataclasses.replace(settings, output=str(output))
    file, plan = output / "results.jsonl", TINY if settings.tiny else FULL
    if settings.inside:
        (part,) = settings.parts
        run_part(part, CASES[part](plan), file, PARTS[part] * (10 if settings.tiny else 1))
    measured = sorted({part for part, _ in read_results(file)} & {*settings.parts})
    require(
        not measured, "--output", settings.output, f"has results of {measured}: choose another directory or --parts"
    )
    output.mkdir(parents=True, exist_ok=True)
    with (output / "log.txt").open("a") as log:
        log.write(f"{json.dumps(provenance())}\n")
        log.flush()
        for command in (["nvidia-smi"], [sys.executable, "-m", "pip", "list", "--format=freeze"]):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, stdout=log, stderr=log, timeout=30)
    try:
        for part in settings.parts:
            print(f"{part}: {start_part(part, settings)}", flush=True)
    finally:
        text = summarize(read_results(file))
        (output / "summary.txt").write_text(text + "\n")
        print(text)


if __name__ == "__main__":
    command_line.run(main, Settings)
