"""Measure one group of cases on a GPU, in a process started by `gpu.py`.

    python -m benchmarks.gpu_cases --output=DIR --group=fused-forward --ready=DIR/ready

In: the name of a group. Out: lines of DIR/results.jsonl, each written and closed immediately, so that no line is lost
if the process dies. Next: `gpu.py`.

A group first prepares all of its cases: it compiles them and compares values. Then it waits for a line or the end of
its standard input before it times them, because other groups are still preparing. A group that died in a case can be
restarted: it resumes after that case.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks import listing
from benchmarks.attention import variant_of
from benchmarks.gpu import GROUPS
from benchmarks.layer import DIRECTIONS, PLAIN, Layer, as_numpy, compile_layer, errors_of, is_right, plain
from benchmarks.measure import Call, failure, seconds_in_turns, seconds_of
from benchmarks.step import RATIO_TO, TABLE7, Step, read_config, train
from dape_jax.hardware import GIB, MIB
from dape_jax.model.attention import Blockwise, Dense, Fused, Implementation
from dape_jax.model.processors import DapeConfig
from dape_jax.sharding import device_platform

GRACE_S = 45  # extra time for the case that is being prepared at the limit
SAMPLES = 5
DENSE_PAIRS = 2**25  # rows x columns x sequences: `dense` needs tens of GiB for more
Figures = dict[str, Any]
# Returns figures, and a function that times the case, or None.
Prepare = Callable[[], tuple[Figures, Callable[[], Figures] | None]]

IMPLEMENTATIONS: dict[str, Implementation] = {
    "fused": Fused("gpu"),
    "cudnn": Fused("gpu"),  # of a layer without bias and processor
    "blockwise": Blockwise(128, 4),
    "blockwise-256x4": Blockwise(256, 4),
    "blockwise-512x4": Blockwise(512, 4),
    "dense": Dense(),
}


def of_implementation(layer: Layer, name: str) -> Layer:
    """Return the layer that an implementation computes."""
    return plain(layer) if name == "cudnn" else layer


def with_dape(kernel_width: int, **options: Any) -> Layer:
    """Return a layer with other options of DAPE."""
    return Layer(length=300, batch=2, processor=DapeConfig(kernel_width, channels=32, **options))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Layers, shapes, steps and preset of all cases."""

    layer: Layer  # layer to time
    correct: dict[str, Layer]
    shapes: tuple[tuple[int, int], ...]  # (T, B) of one layer
    torch_shapes: tuple[tuple[int, int], ...]
    steps: tuple[tuple[str, str, int, int, str], ...]  # model, method, T, B, implementation
    trained: tuple[str, str, int, int]  # model, method, T, B
    train_steps: int
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
        "plain": dataclasses.replace(PLAIN, batch=2),
        "plain-window": dataclasses.replace(PLAIN, length=700, window=130, kv_heads=4),
    },
    shapes=((512, 1), (2048, 1), (512, 16), (2048, 8), (256, 64), (8192, 1), (1024, 8), (4096, 2)),
    torch_shapes=((512, 1), (2048, 1), (512, 16), (1024, 8)),
    steps=(
        *(("125m", "dape1x3-kerple", 512, 32, name) for name in ("fused", "blockwise", "dense")),
        ("125m", "kerple", 512, 32, "dense"),
        *(("350m", "dape1x3-kerple", 512, 1, name) for name in ("dense", "fused", "blockwise")),
        *(("350m", name, 512, 1, "auto" if name == "rope" else "dense") for name in TABLE7 if name != RATIO_TO),
        *(("125m", "dape1x3-kerple", 2048, 8, name) for name in ("fused", "blockwise")),
        ("125m", "rope", 2048, 8, "auto"),
    ),
    trained=("125m", "dape1x3-kerple", 512, 32),
    train_steps=150,
    preset="paper",
)
TINY_LAYER = Layer(length=24, heads=2, kv_heads=1, head_dim=8, processor=DapeConfig(kernel_width=3, channels=4))
TINY = Plan(
    layer=TINY_LAYER,
    correct={"kerple": TINY_LAYER, "plain": plain(TINY_LAYER)},
    shapes=((24, 1),),
    torch_shapes=((24, 1),),
    steps=(("125m", "dape1x3-kerple", 32, 8, "blockwise"), ("125m", "kerple", 32, 8, "dense")),
    trained=("125m", "dape1x3-kerple", 32, 8),
    train_steps=6,
    preset="small",
)


# ---- cases


def correctness(plan: Plan, dtype: str) -> dict[str, Prepare]:
    """Return the cases that compare every implementation with `dense` in float32, values and all gradients."""

    def compare(layer: Layer) -> Figures:
        names = ["fused", "blockwise", "dense"]
        if layer == plain(layer) and dtype == "float32":
            names.remove("fused")  # cuDNN has no float32
        return {name: figures_of(layer, name) for name in names}

    def figures_of(layer: Layer, name: str) -> Figures:
        function, params = layer.function("backward", IMPLEMENTATIONS[name])
        run = functools.partial(jax.jit(function), params, *layer.arrays())
        found, again = as_numpy(run()), as_numpy(run())
        errors = errors_of(found, layer, "backward")
        return {
            "right": is_right(errors, dtype),
            "same_bits": all(np.array_equal(found[each], again[each]) for each in found),
            "worst": max(errors, key=lambda each: np.nan_to_num(errors[each], nan=np.inf)),
            "errors": errors,
        }

    layers = {name: dataclasses.replace(layer, dtype=dtype) for name, layer in plan.correct.items()}
    return {name: lambda layer=layer: (compare(layer), None) for name, layer in layers.items()}


def layer_cases(plan: Plan, names: tuple[str, ...], direction: str) -> dict[str, Prepare]:
    """Return the cases that time one layer, named IMPLEMENTATION/T/B/DIRECTION."""

    def prepare(name: str, length: int, batch: int) -> tuple[Figures, Callable[[], Figures]]:
        layer = of_implementation(dataclasses.replace(plan.layer, length=length, batch=batch), name)
        call, figures = compile_layer(layer, direction, IMPLEMENTATIONS[name])
        return figures, functools.partial(times_of, call)

    return {
        f"{name}/{length}/{batch}/{direction}": functools.partial(prepare, name, length, batch)
        for (length, batch), name in itertools.product(plan.shapes, names)
        if name != "dense" or batch * length**2 <= DENSE_PAIRS
    }


def times_of(call: Call) -> Figures:
    """Return the time of a call, from samples of queued calls; and of one call, including waiting for its result."""
    with tqdm(disable=True) as bar:
        samples = seconds_in_turns({"": call}, SAMPLES, bar)[""]
    once_ms = 1e3 * seconds_of(call, 1)
    return {"min_ms": 1e3 * min(samples), "median_ms": 1e3 * float(np.median(samples)), "once_ms": once_ms}


def torch_cases(plan: Plan) -> dict[str, Prepare]:
    """Return the cases that time PyTorch: the paper's listing, eager and compiled, and plain attention."""
    if why := listing.why_not_torch(device_platform()):
        return {"torch": lambda: ({"left_out": why}, None)}

    def prepare(name: str, length: int, batch: int, direction: str) -> tuple[Figures, Callable[[], Figures]]:
        sizes = {"length": length, "batch": batch, "kv_heads": plan.layer.heads}
        layer = variant_of(dataclasses.replace(plan.layer, **sizes), name)
        call, compile_s = listing.torch_function(name, *layer.modules(), layer.arrays(), direction)

        def measure() -> Figures:
            figures = times_of(call)
            if device_platform() == "gpu":
                figures["peak_mib"] = listing.bytes_of_call(call) / MIB
            listing.empty_cache()
            return figures

        return {"compile_s": compile_s}, measure

    cases = itertools.product(plan.torch_shapes, DIRECTIONS, listing.NAMES)
    return {
        f"{name}/{length}/{batch}/{direction}": functools.partial(prepare, name, length, batch, direction)
        for (length, batch), direction, name in cases
    }


def step_cases(plan: Plan) -> dict[str, Prepare]:
    """Return the cases that time whole training steps, named MODEL/METHOD/T/B/IMPLEMENTATION."""

    def prepare(*case: Any) -> tuple[Figures, Callable[[], Figures]]:
        step = Step(read_config(plan.preset, *case))

        def measure() -> Figures:
            with tqdm(disable=True) as bar:
                for _ in range(3):
                    step.take_turn(5, bar)
            result = step.result()
            return {name: result[name] for name in ("min_ms", "median_ms", "tokens_per_s", "mfu", "loss_nats")}

        return {"compile_s": step.program.compile_s, "needed_gib": step.needed_bytes / GIB}, measure

    return {"/".join(map(str, case)): functools.partial(prepare, *case) for case in plan.steps}


def train_cases(plan: Plan) -> dict[str, Prepare]:
    """Return the cases that train for some steps on the text of Python's standard library, by implementation."""

    def measure(name: str) -> Figures:
        fields = {"data.tokenizer": "bytes", "model.vocab_size": 257, "train.num_steps": plan.train_steps}
        with tempfile.TemporaryDirectory() as folder:
            run = read_config(plan.preset, *plan.trained, name, **fields, **{"data.cache_dir": f"{folder}/cache"})
            lines = train(run, Path(folder, "run"))
        rates = [line["train/tokens_per_second"] for line in lines[-50:]]
        return {"loss_nats": lines[-1]["train/loss_nats"], "tokens_per_s": statistics.median(rates)}

    names = ("fused", "blockwise") if plan is FULL else ("blockwise",)
    return {name: lambda name=name: ({}, lambda: measure(name)) for name in names}


def environment_cases() -> dict[str, Prepare]:
    """Return the case that measures the machine."""

    def rates() -> Figures:
        n, size = (8192, 2**30) if device_platform() == "gpu" else (256, 2**20)
        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
        x, small = jnp.ones(size), jnp.zeros(8)
        multiply, negate, add = jax.jit(jnp.matmul), jax.jit(jnp.negative), jax.jit(lambda x: x + 1)
        product, copy, empty = (
            times_of(Call(functools.partial(function, *args)))
            for function, args in ((multiply, (a, b)), (negate, (x,)), (add, (small,)))
        )
        return {
            "device": jax.devices()[0].device_kind,
            "matmul_tflops": 2e-9 * n**3 / product["min_ms"],
            "copy_gb_per_s": 8e-6 * size / copy["min_ms"],
            "empty_call_us": 1e3 * empty["min_ms"],
            "empty_call_once_us": 1e3 * empty["once_ms"],
        }

    return {"rates": lambda: ({}, rates)}


def cases_of(group: str, plan: Plan) -> dict[str, Prepare]:
    """Return the cases of a group by name."""
    kind, _, rest = group.partition("-")
    match kind:
        case "environment":
            return environment_cases()
        case "correct":
            return correctness(plan, rest)
        case "fused":
            return layer_cases(plan, ("fused", "cudnn"), rest)
        case "xla":
            return layer_cases(plan, ("blockwise", "dense"), rest)
        case "steps":
            return step_cases(plan)
        case "train":
            return train_cases(plan)
        case "torch":
            return torch_cases(plan)
    raise ValueError(group)


# ---- process


def run_group(group: str, cases: dict[str, Prepare], output: Path, ready_file: Path, prepare_s: float) -> None:
    """Prepare the cases, create a file, wait for permission, time the cases; see the module's docstring."""
    until = time.monotonic() + prepare_s
    signal.alarm(int(prepare_s) + GRACE_S)  # ends the process, even inside a compiler
    path = output / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    status = {line["case"]: line["status"] for line in lines if line["group"] == group}

    def write(case: str, status: str, figures: Figures) -> None:
        line = json.dumps({"group": group, "case": case, "status": status, "at": round(time.time(), 1)} | figures)
        with path.open("a") as file:
            file.write(line + "\n")

    def attempt(case: str, begins: str, function: Callable[[], Any]) -> Any:
        write(case, begins, {})
        try:
            return function()
        except Exception as error:  # of any kind: continue with the other cases
            traceback.print_exc()
            write(case, "failed", {"reason": failure(error)})
            return None

    ready: dict[str, tuple[Figures, Callable[[], Figures]]] = {}
    for case, prepare in cases.items():
        # A case that an earlier process of this group started but did not finish is the one that ended the process.
        if status.get(case, "prepared") != "prepared" or time.monotonic() > until:
            continue
        if (prepared := attempt(case, "prepares", prepare)) is not None:
            figures, measure = prepared
            write(case, "prepared" if measure else "done", figures)
            if measure:
                ready[case] = figures, measure
    signal.alarm(0)
    ready_file.touch()
    if ready:
        sys.stdin.readline()
    for case, (figures, measure) in ready.items():
        if (measured := attempt(case, "runs", measure)) is not None:
            write(case, "done", figures | measured)


def main() -> None:
    """Run a group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="Directory of results.jsonl.")
    parser.add_argument("--group", required=True, help=f"One of {', '.join(GROUPS)}.")
    parser.add_argument("--ready", type=Path, required=True, help="File to create when all cases are prepared.")
    parser.add_argument("--prepare_s", type=float, default=300, help="Seconds after which no case is prepared.")
    parser.add_argument("--tiny", action="store_true", help="Sizes for a CPU.")
    flags = parser.parse_args()
    run_group(
        flags.group, cases_of(flags.group, TINY if flags.tiny else FULL), flags.output, flags.ready, flags.prepare_s
    )


if __name__ == "__main__":
    main()
