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
import importlib
import itertools
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from benchmarks import attention as one_layer
from benchmarks import listing
from benchmarks.gpu import GROUPS
from benchmarks.hlo import compile_program
from benchmarks.measure import Call, failure, layer_function, seconds_in_turns, seconds_of
from benchmarks.step import Step, read_config
from benchmarks.table7 import RATIO_TO, TABLE
from dape_jax.hardware import GIB, MIB
from dape_jax.kernels import gpu
from dape_jax.model.attention import Blockwise, Dense, Fused, Implementation, attend
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig, PlainConfig
from dape_jax.sharding import device_platform

GRACE_S = 45  # extra time for the case that is being prepared at the limit
SAMPLES = 5
DENSE_PAIRS = 2**25  # rows x columns x sequences: `dense` needs tens of GiB for more
Figures = dict[str, Any]
# Returns figures, and a function that times the case, or None.
Prepare = Callable[[], tuple[Figures, Callable[[], Figures] | None]]


DAPE = DapeConfig(kernel_width=3, channels=32)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One attention layer, q, k, v -> out."""

    length: int = 512
    batch: int = 1
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    bias: str = "kerple"
    processor: DapeConfig | PlainConfig = DAPE
    window: int | None = None

    def arrays(self, dtype: str) -> list[jax.Array]:
        """Return queries, keys, values and a cotangent, the same numbers in every dtype."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.length, each, self.head_dim) for each in heads]
        return [jax.random.normal(jax.random.key(i), x, jnp.bfloat16).astype(dtype) for i, x in enumerate(shapes)]

    def function(
        self, implementation: Implementation, direction: str, dtype: str
    ) -> tuple[Callable[..., dict[str, Any]], nnx.State]:
        """Return (parameters, q, k, v, cotangent) -> out and, backward, all gradients; and the parameters."""
        rngs = nnx.Rngs(0)
        bias = BIASES[self.bias]().build(self.heads, self.head_dim, rngs)
        processor = self.processor.build(self.heads, has_bias=bias is not None, dtype=jnp.dtype(dtype), rngs=rngs)
        with_options = functools.partial(attend, window=self.window, implementation=implementation)
        return layer_function(bias, processor, with_options, direction)


PLAIN = Layer(bias="nope", processor=PlainConfig())


def with_dape(kernel_width: int = 3, **options: Any) -> Layer:
    """Return a layer with other options of DAPE."""
    return Layer(length=300, batch=2, processor=DapeConfig(kernel_width, channels=32, **options))


@dataclasses.dataclass(frozen=True)
class Variant:
    """Implementation, with constants of the GPU kernels, and with or without a processor."""

    implementation: Implementation
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    layer: Layer = Layer()

    def set_constants(self) -> None:
        """Set these constants of the GPU kernels, and all others to their defaults."""
        for name, value in (DEFAULTS | self.constants).items():
            setattr(gpu, name, value)


def block_rows(rows: int) -> dict[str, Any]:
    """Return the constant that fixes the rows of a block of the GPU kernels."""
    return {"rows_in_block": lambda *_: rows}


DEFAULTS = {name: getattr(gpu, name) for name in ("rows_in_block", "PROGRAM_ROWS", "NUM_WARPS", "BAND_WIDTH")}
FUSED = Fused("gpu")
MAIN = {
    "fused": Variant(FUSED),
    "blockwise": Variant(Blockwise(128, 4)),
    "dense": Variant(Dense()),
    "cudnn": Variant(FUSED, layer=PLAIN),
}
VARIANTS = {
    "fused-rows-128": Variant(FUSED, block_rows(128)),
    "fused-rows-256": Variant(FUSED, block_rows(256)),
    "fused-rows-1024": Variant(FUSED, block_rows(1024)),
    "fused-rows-2048": Variant(FUSED, block_rows(2048)),
    "fused-walk-8": Variant(FUSED, {"PROGRAM_ROWS": 8}),
    "fused-warps-8": Variant(FUSED, {"NUM_WARPS": 8}),
    "fused-band-32": Variant(FUSED, {"BAND_WIDTH": 32}),
    "blockwise-64x4": Variant(Blockwise(64, 4)),
    "blockwise-256x4": Variant(Blockwise(256, 4)),
    "blockwise-512x4": Variant(Blockwise(512, 4)),
    "blockwise-128x8": Variant(Blockwise(128, 8)),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes, steps and preset of all cases."""

    correct: dict[str, Layer]
    shapes: tuple[tuple[int, int], ...]  # (T, B) of one layer
    variant_shapes: tuple[tuple[int, int], ...]
    variants: dict[str, Variant]
    torch_shapes: tuple[tuple[int, int], ...]
    steps: tuple[tuple[str, str, int, int, str], ...]  # model, method, T, B, implementation
    preset: str  # preset of the steps' recipe


OTHER_METHODS = [method for method in TABLE.methods if method != RATIO_TO]
FULL = Plan(
    correct={
        "kerple": Layer(batch=2),
        "ragged": Layer(length=333, batch=2),
        "long": Layer(length=2048),
        "350m": Layer(heads=16, kv_heads=16),
        "one-kv-head": Layer(length=200, kv_heads=1, batch=2),
        "window": Layer(length=700, window=130),
        "w1": with_dape(kernel_width=1),
        "w5": with_dape(kernel_width=5),
        "w7-32-heads": dataclasses.replace(with_dape(kernel_width=7), heads=32, kv_heads=32, head_dim=80, batch=1),
        "causal-w2": dataclasses.replace(with_dape(kernel_width=2, alignment="causal"), bias="alibi"),
        "nope": Layer(length=300, bias="nope"),
        "equation-2": with_dape(residual=False),
        "plain": dataclasses.replace(PLAIN, batch=2),
        "plain-window": dataclasses.replace(PLAIN, length=700, window=130, kv_heads=4),
    },
    shapes=((512, 1), (2048, 1), (512, 16), (2048, 8), (256, 64), (8192, 1), (1024, 8), (4096, 2)),
    variant_shapes=((2048, 1), (2048, 8)),
    variants=VARIANTS,
    torch_shapes=((512, 1), (2048, 1), (512, 16), (1024, 8)),
    steps=(
        *(("125m", "dape1x3-kerple", 512, 32, name) for name in ("fused", "blockwise", "dense")),
        ("125m", "kerple", 512, 32, "dense"),
        *(("350m", "dape1x3-kerple", 512, 1, name) for name in ("dense", "fused", "blockwise")),
        *(("350m", method, 512, 1, "auto" if method == "rope" else "dense") for method in OTHER_METHODS),
        *(("125m", "dape1x3-kerple", 2048, 8, name) for name in ("fused", "blockwise")),
        ("125m", "rope", 2048, 8, "auto"),
    ),
    preset="paper",
)
TINY_DAPE = DapeConfig(kernel_width=3, channels=4)
TINY_LAYER = Layer(length=24, heads=2, kv_heads=1, head_dim=8, processor=TINY_DAPE)
TINY = Plan(
    correct={"kerple": TINY_LAYER, "plain": dataclasses.replace(TINY_LAYER, bias="nope", processor=PlainConfig())},
    shapes=((24, 1),),
    variant_shapes=((24, 1),),
    variants={name: VARIANTS[name] for name in ("fused-rows-128", "blockwise-64x4")},
    torch_shapes=((24, 1),),
    steps=(("125m", "dape1x3-kerple", 32, 2, "blockwise"), ("125m", "kerple", 32, 2, "dense")),
    preset="small",
)


# ---- cases


def errors_of(
    layer: Layer, implementation: Implementation, direction: str, dtype: str, exact: dict[str, np.ndarray]
) -> tuple[dict[str, float], bool]:
    """Return the relative errors of values and gradients, and whether a second run gives the same bits."""
    function, params = layer.function(implementation, direction, dtype)
    run = functools.partial(jax.jit(function), params, *layer.arrays(dtype))
    found, again = one_layer.as_numpy(run()), one_layer.as_numpy(run())
    same = all(np.array_equal(found[name], again[name]) for name in found)
    return one_layer.errors_of(found, exact), same


def exact_results(layer: Layer, direction: str) -> dict[str, np.ndarray]:
    """Return the results of `Dense` in float32 at full precision."""
    function, params = layer.function(Dense(), direction, "float32")
    with jax.default_matmul_precision("highest"):
        return one_layer.as_numpy(jax.jit(function)(params, *layer.arrays("float32")))


def correctness(plan: Plan, dtype: str) -> dict[str, Prepare]:
    """Return the cases that compare every implementation with `exact_results`."""

    def compare(layer: Layer) -> Figures:
        exact = exact_results(layer, "backward")
        candidates = {"fused": FUSED, "blockwise": Blockwise(128, 4), "dense": Dense()}
        if isinstance(layer.processor, PlainConfig) and dtype == "float32":
            del candidates["fused"]  # cuDNN has no float32
        figures: Figures = {}
        for name, implementation in candidates.items():
            errors, same = errors_of(layer, implementation, "backward", dtype, exact)
            of_tokens, of_parameters = one_layer.TOLERANCES[dtype]
            limits = {each: of_parameters if each.startswith("parameters.") else of_tokens for each in errors}
            figures[name] = {
                "right": all(errors[each] < limits[each] for each in errors),
                "same_bits": same,
                "worst": max(errors, key=lambda each: np.nan_to_num(errors[each], nan=np.inf)),
                "errors": errors,
            }
        return figures

    return {name: lambda layer=layer: (compare(layer), None) for name, layer in plan.correct.items()}


def layer_cases(plan: Plan, variants: dict[str, Variant], shapes: Any, direction: str) -> dict[str, Prepare]:
    """Return the cases that time one layer, named VARIANT/T/B/DIRECTION."""

    def prepare(variant: Variant, length: int, batch: int) -> tuple[Figures, Callable[[], Figures]]:
        variant.set_constants()
        layer = dataclasses.replace(variant.layer, length=length, batch=batch)
        if plan is TINY:
            layer = dataclasses.replace(TINY_LAYER, bias=layer.bias, processor=layer.processor)
        function, params = layer.function(variant.implementation, direction, "bfloat16")
        program = compile_program(function, params, *layer.arrays("bfloat16"))
        call = Call(functools.partial(program.run, params, *layer.arrays("bfloat16")))
        figures = {
            "compile_s": program.compile_s,
            "temporary_mib": program.memory.temp_size_in_bytes / MIB,
            "result_mib": program.result_bytes / MIB,
            "compiled_gbyte": program.work.hbm_bytes / 1e9,
        }
        if variant.constants and batch * length**2 <= DENSE_PAIRS:  # others are compared in `correctness`
            found = one_layer.as_numpy(call.start())
            figures["errors"] = one_layer.errors_of(found, exact_results(layer, direction))
        return figures, functools.partial(times_of, call)

    return {
        f"{name}/{length}/{batch}/{direction}": functools.partial(prepare, variant, length, batch)
        for (length, batch), (name, variant) in itertools.product(shapes, variants.items())
        if not isinstance(variant.implementation, Dense) or batch * length**2 <= DENSE_PAIRS
    }


def times_of(call: Call) -> Figures:
    """Return samples of the time of a call."""
    with tqdm(disable=True) as bar:
        samples = seconds_in_turns({"": call}, SAMPLES, bar)[""]
    return {"min_ms": 1e3 * min(samples), "median_ms": 1e3 * float(np.median(samples)), "once_ms": once_ms(call)}


def once_ms(call: Call) -> float:
    """Return the time of one call, including waiting for its result."""
    return 1e3 * seconds_of(call, 1)


def torch_cases(plan: Plan) -> dict[str, Prepare]:
    """Return the cases that time PyTorch: the paper's listing, eager and compiled, and plain attention."""
    if why := listing.why_not_torch(device_platform()):
        return {"torch": lambda: ({"left_out": why}, None)}

    def prepare(name: str, length: int, batch: int, direction: str) -> tuple[Figures, Callable[[], Figures]]:
        settings = one_layer.Settings(batch=batch, dtype="bfloat16", channels=4 if plan is TINY else 32)
        case = one_layer.Case(settings, "125m", length, direction)
        made = listing.torch_function(name, *one_layer.modules_of(case, "listing"), case.inputs(), direction)
        on_cuda = device_platform() == "gpu"

        def measure() -> Figures:
            figures = times_of(made.call)
            if on_cuda:
                figures["peak_mib"] = listing.bytes_of_call(made.call) / MIB
            listing.empty_cache()
            return figures

        return {"compile_s": made.compile_s}, measure

    return {
        f"{name}/{length}/{batch}/{direction}": functools.partial(prepare, name, length, batch, direction)
        for (length, batch), direction, name in itertools.product(
            plan.torch_shapes, one_layer.DIRECTIONS, listing.NAMES
        )
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


def environment_cases() -> dict[str, Prepare]:
    """Return the cases that describe the machine and its capabilities."""

    def versions() -> Figures:
        found = {}
        for name in ("jax", "jaxlib", "flax", "orbax.checkpoint", "grain", "numpy", "torch", "triton", "train"):
            try:
                found[name] = str(getattr(importlib.import_module(name), "__version__", "imported"))
            except Exception as error:  # of any kind: it is reported
                found[name] = failure(error)
        return {"device": jax.devices()[0].device_kind, "platform": device_platform(), "versions": found}

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
            "matmul_tflops": 2e-9 * n**3 / product["min_ms"],
            "copy_gb_per_s": 8e-6 * size / copy["min_ms"],
            "empty_call_us": 1e3 * empty["min_ms"],
            "empty_call_once_us": 1e3 * empty["once_ms"],
        }

    return {"versions": lambda: (versions(), None), "rates": lambda: ({}, rates)}


def cases_of(group: str, plan: Plan) -> dict[str, Prepare]:
    """Return the cases of a group by name."""
    kind, _, rest = group.partition("-")
    match kind:
        case "environment":
            return environment_cases()
        case "correct":
            return correctness(plan, rest)
        case "fused":
            return layer_cases(plan, {"fused": MAIN["fused"], "cudnn": MAIN["cudnn"]}, plan.shapes, rest)
        case "xla":
            return layer_cases(plan, {name: MAIN[name] for name in ("blockwise", "dense")}, plan.shapes, rest)
        case "variants":
            return layer_cases(plan, plan.variants, plan.variant_shapes, rest)
        case "steps":
            return step_cases(plan)
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
