"""Measure time and memory of one DAPE attention layer, and compare it with plain attention.

    python -m benchmarks.attention --vs=torch --lengths=512,2048
    python -m benchmarks.attention --vs=torch --lengths=512,1024,2048,4096,8192 --dtype=bfloat16 --output=results/gpu

The second command is for a GPU. One layer is q, k, v -> out, without projections, with the heads of the paper's models.
All implementations at one model, length and direction are called in turns in one process (A B C A B C ..), so that
other load slows all of them. It does not slow them equally: threads that wait for each other, such as PyTorch's, are
slowed most. Ratios are reliable only on an idle machine.

Timed: the implementations of `attention.py` (`dense` is the formula, compiled by XLA); `plain jax`, causal attention
without bias and DAPE by `jax.nn.dot_product_attention` (cuDNN on a GPU in bfloat16); and with `--vs=torch`, with the
same weights and inputs, `torch eager` and `torch.compile`, the listing of the paper's appendix L (`listing.py`), and
`plain torch`, PyTorch's `scaled_dot_product_attention`.

Output: a table on the terminal, and OUTPUT/PLATFORM.json. The columns:

    direction     forward, or backward: forward and the gradients of q, k, v, bias and convolutions in one program
    min ms        minimum time of a call over `--repeats` samples (see `measure.py`); the JSON has all of them
    / dense ..    time and peak memory relative to dense; also to torch eager, torch.compile, plain jax
    peak MiB      memory of a call; see `measure.py`
    GFLOP/s       FLOPs of `layer_work` / minimum time: those that the layer needs, for every implementation
    roofline      minimum time of `layer_work` on the chip / measured time; for bfloat16, on the chips of `hardware.py`
    GFLOP, GB     matmuls and memory traffic of one run of the compiled program, with trip counts of loops. A Pallas
                  kernel reports its own cost, or counts as its operands and results. Not for PyTorch
    compile s     seconds of compilation
    error         largest error of out and the gradients, |x - reference| / |reference| as vectors. The reference is
                  dense in float32 at full precision for the same inputs; for the listing with the listing's edge

A failure, for example out of memory, has a row without figures, and its reason is printed above the table. If an error
exceeds the tolerance for rounding, the program ends with status 1, after all output is written.
"""

import dataclasses
import functools
import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from tqdm import tqdm

from benchmarks import listing
from benchmarks.hlo import compile_program
from benchmarks.measure import (
    Call,
    Row,
    check_names,
    check_positive,
    failure,
    layer_function,
    resident_bytes_of_call,
    seconds_in_turns,
    table,
    write,
)
from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.config import CHOICES
from dape_jax.errors import is_out_of_memory, require
from dape_jax.hardware import MIB, chip_of
from dape_jax.kernels import KERNELS
from dape_jax.model.attention import IMPLEMENTATIONS, Auto, Dense, Fused, Implementation, attend
from dape_jax.model.biases import NopeConfig
from dape_jax.model.processors import DapeConfig, PlainConfig
from dape_jax.model.transformer import SIZES
from dape_jax.provenance import make_results_directory
from dape_jax.sharding import device_platform

DIRECTIONS = ("forward", "backward")
# Largest errors explained by rounding: of arrays with a dim of tokens; and of the gradients of parameters, which are
# sums of millions of terms of both signs. A GPU may multiply float32 with 10 bits of mantissa.
TOLERANCES = {"float32": (5e-3, 2e-2), "bfloat16": (3e-2, 1e-1)}
BIASES = CHOICES["bias"]
PLAIN = "plain jax"
BASELINES = ("torch eager", "torch.compile", "dense", PLAIN)
RATIOS = {"time_ratios": "min_ms", "memory_ratios": "peak_mib"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    vs: str = flag("", "`torch` to time also the paper's listing and plain attention in PyTorch.")
    models: tuple[str, ...] = flag(
        ("125m",), f"Models that give the number and width of the heads: {', '.join(SIZES)}."
    )
    lengths: tuple[int, ...] = flag((512,), "Sequence lengths in tokens.")
    implementations: tuple[str, ...] = flag((), "Implementations to time; all but `auto` if not given.")
    directions: tuple[str, ...] = flag(DIRECTIONS, f"Directions to time: {', '.join(DIRECTIONS)}.")
    bias: str = flag("kerple", f"Position bias: {', '.join(BIASES)}.")
    kernel_width: int = flag(3, "Kernel width W of DAPE; 0 for no DAPE.")
    channels: int = flag(32, "Hidden channels C of DAPE.")
    batch: int = flag(1, "Batch size B.")
    dtype: str = flag("float32", f"Dtype of q, k, v and the convolutions' operands: {', '.join(TOLERANCES)}.")
    block_size: int | None = flag(None, "Rows in a block of `blockwise`; chosen by platform if not given.")
    num_buckets: int | None = flag(None, "Ranges of rows in `blockwise`; chosen by platform if not given.")
    repeats: int = flag(10, "Samples of the time of each implementation.")
    output: str = flag("results/attention", "Directory of the JSON.")

    def __post_init__(self):
        check_positive(self, "lengths", "batch", "channels", "repeats", "block_size", "num_buckets")
        width = self.kernel_width
        require(width == 0 or (width > 0 and width % 2 == 1), "--kernel_width", width, "must be odd, or 0 for no DAPE")
        check_names("models", self.models, SIZES)
        check_names("directions", self.directions, DIRECTIONS)
        check_names("implementations", self.implementations or ("dense",), IMPLEMENTATIONS)
        check_names("bias", (self.bias,), BIASES)
        check_names("dtype", (self.dtype,), TOLERANCES)
        require(self.vs in ("", "torch"), "--vs", self.vs, "must be torch, or empty")
        allowed = f"with --vs=torch, must be one of {listing.BIASES}"
        require(not self.vs or self.bias in listing.BIASES, "--bias", self.bias, allowed)

    @property
    def processor(self) -> DapeConfig | PlainConfig:
        """Config of the processor."""
        return DapeConfig(self.kernel_width, self.channels) if self.kernel_width else PlainConfig()


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, length and direction; all implementations timed for it are called in turns."""

    settings: Settings
    model: str
    length: int
    direction: str

    @property
    def heads(self) -> int:
        """H."""
        return SIZES[self.model]["num_heads"]

    @property
    def head_dim(self) -> int:
        """K."""
        return SIZES[self.model]["width"] // self.heads

    def inputs(self) -> list[Float[Array, "B T H K"]]:
        """Return queries, keys, values and a cotangent."""
        shape = (self.settings.batch, self.length, self.heads, self.head_dim)
        return [jax.random.normal(jax.random.key(i), shape, jnp.dtype(self.settings.dtype)) for i in range(4)]


FIELDS = (
    *("model", "length", "direction", "name", "failed"),
    *("min_ms", "median_ms", "all_ms", "peak_mib", "temporary_mib", "gflop_per_s", "roofline"),
    *("compiled_gflop", "compiled_gbyte", "compile_s", "errors", "time_ratios", "memory_ratios"),
)


def row_of(case: Case, name: str, **figures: Any) -> Row:
    """Return a line of the table, see the module's docstring, with None for what is unknown."""
    empty = {"all_ms": (), "errors": {}, "time_ratios": {}, "memory_ratios": {}}
    labels = {"model": case.model, "length": case.length, "direction": case.direction, "name": name}
    return dict.fromkeys(FIELDS) | empty | labels | figures


def modules_of(case: Case, edge: str) -> tuple[Any, Any]:
    """Return the bias and the processor of a layer."""
    settings, rngs = case.settings, nnx.Rngs(0)
    processor = settings.processor
    if isinstance(processor, DapeConfig):
        processor = dataclasses.replace(processor, edge=edge)
    bias = BIASES[settings.bias]().build(case.heads, case.head_dim, rngs)
    return bias, processor.build(case.heads, has_bias=bias is not None, dtype=settings.dtype, rngs=rngs)


def implementations(block_size: int | None, num_buckets: int | None) -> dict[str, Implementation]:
    """Return every implementation by name; arguments that are None have the platform's values."""
    auto = Auto(block_size, num_buckets)
    blockwise = auto.blockwise(device_platform())
    return {"auto": auto, "dense": Dense(), "blockwise": blockwise, "fused": Fused()}


def jax_function(case: Case, name: str, edge: str = "prefix") -> tuple[Callable[..., dict[str, Any]], nnx.State]:
    """Return the function to time, (parameters, q, k, v, cotangent) -> out and gradients, and the parameters."""
    if name == PLAIN:
        library = "cudnn" if device_platform() == "gpu" and case.settings.dtype == "bfloat16" else "xla"
        plain = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=library)
        return layer_function(None, None, lambda *qkv, **_: plain(*qkv), case.direction)
    implementation = implementations(case.settings.block_size, case.settings.num_buckets)[name]
    return layer_function(
        *modules_of(case, edge), functools.partial(attend, implementation=implementation), case.direction
    )


def layer_work(case: Case, name: str) -> tuple[float, float]:
    """Return the FLOPs and bytes that the layer needs, for P = T (T + 1) / 2 causal pairs.

        2 P [ B (2 H K + W H C + W C H) + W H C ]        Q K^T and P V; Conv1 of the scores, Conv2; Conv1 of the bias

    The bias has no batch dim, so its half of Conv1 is counted once. Gradients cost two products for each product;
    recomputation is not counted. Bytes: q, k, v are read and out is written once; in the backward pass also their
    gradients and the cotangent. Plain attention has no convolutions.
    """
    settings = case.settings
    processor = PlainConfig() if name in (PLAIN, listing.PLAIN) else settings.processor
    pair = processor.pair_flops(case.heads, has_bias=BIASES[settings.bias] is not NopeConfig)
    flops_of_pair = settings.batch * (4 * case.heads * case.head_dim + pair.of_scores) + pair.of_bias
    flops = case.length * (case.length + 1) / 2 * flops_of_pair
    size = settings.batch * case.length * case.heads * case.head_dim * jnp.dtype(settings.dtype).itemsize
    return (3 * flops, 8 * size) if case.direction == "backward" else (flops, 4 * size)


def roofline_seconds(case: Case, name: str) -> float | None:
    """Return the minimum time of `layer_work` on this chip, or None if its peak is unknown for the dtype."""
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None or case.settings.dtype != "bfloat16":
        return None
    flops, num_bytes = layer_work(case, name)
    return max(flops / chip.peak_flops, num_bytes / chip.hbm_bytes_per_second)


def as_numpy(results: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return out and the gradients by name, float32, without the gradient of Conv2's bias, which is 0."""
    leaves = jax.tree_util.tree_flatten_with_path(results)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {name: np.asarray(x, np.float32) for name, x in named.items() if "output_bias_H" not in name}


@functools.lru_cache(maxsize=3)
def reference(case: Case, kind: str) -> dict[str, np.ndarray] | None:
    """Return the expected results for the kind "plain" or an edge of DAPE, or None if they need too much memory."""
    settings = dataclasses.replace(case.settings, dtype="float32")
    if kind == "plain":
        settings = dataclasses.replace(settings, bias="nope", kernel_width=0)
    function, params = jax_function(dataclasses.replace(case, settings=settings), "dense", kind)
    try:
        with jax.default_matmul_precision("highest"):
            return as_numpy(jax.jit(function)(params, *(x.astype(jnp.float32) for x in case.inputs())))
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def errors_of(found: dict[str, np.ndarray], expected: dict[str, np.ndarray] | None) -> dict[str, float]:
    """Return the relative errors of arrays, as vectors, or {} if there is no reference."""
    if expected is None:
        return {}
    return {
        name: float(np.linalg.norm(x - expected[name]) / np.linalg.norm(expected[name])) for name, x in found.items()
    }


def is_right(errors: dict[str, float], dtype: str) -> bool:
    """Return whether all errors are within the tolerance for rounding."""
    of_tokens, of_parameters = TOLERANCES[dtype]
    return all(e < (of_parameters if name.startswith("parameters.") else of_tokens) for name, e in errors.items())


def prepare(case: Case, name: str) -> tuple[Call, Row]:
    """Return the call to time, and its row, still without times."""
    arrays = case.inputs()
    on_cpu = device_platform() == "cpu"
    if name in listing.NAMES:
        made = listing.torch_function(name, *modules_of(case, "listing"), arrays, case.direction)
        call, found = made.call, listing.as_numpy(made.call.start())
        peak = resident_bytes_of_call(call) if on_cpu else listing.bytes_of_call(call)
        figures: Row = {"compile_s": made.compile_s}
    else:
        function, params = jax_function(case, name)
        program = compile_program(function, params, *arrays)
        call = Call(functools.partial(program.run, params, *arrays))
        found, peak = as_numpy(call.start()), program.memory.temp_size_in_bytes + program.result_bytes
        if on_cpu:
            peak = max(peak, resident_bytes_of_call(call) or 0)
        figures = {
            "temporary_mib": program.memory.temp_size_in_bytes / MIB,
            "compiled_gflop": program.work.matmul_flops / 1e9,
            "compiled_gbyte": program.work.hbm_bytes / 1e9,
            "compile_s": program.compile_s,
        }
    kind = "plain" if name in (PLAIN, listing.PLAIN) else "listing" if name in listing.NAMES else "prefix"
    figures |= {"errors": errors_of(found, reference(case, kind)), "peak_mib": None if peak is None else peak / MIB}
    return call, row_of(case, name, **figures)


def measure_case(case: Case, names: list[str], bar: tqdm) -> list[Row]:
    """Measure one model, length and direction."""
    calls: dict[str, Call] = {}
    rows: dict[str, Row] = {}
    for name in names:
        bar.set_postfix_str(f"{case.model} {case.length} {case.direction} {name}")
        try:
            calls[name], rows[name] = prepare(case, name)
        except Exception as error:  # of any kind: continue with the other measurements
            rows[name] = row_of(case, name, failed=failure(error))
            bar.write(f"{case.model} {case.length} {case.direction} {name}: {rows[name]['failed']}", file=sys.stderr)
            bar.update(case.settings.repeats)
        gc.collect()
        if name in listing.NAMES:
            listing.empty_cache()
    for name, seconds in seconds_in_turns(calls, case.settings.repeats, bar).items():
        (flops, _), least = layer_work(case, name), roofline_seconds(case, name)
        rows[name] |= {
            "min_ms": 1e3 * min(seconds),
            "median_ms": 1e3 * float(np.median(seconds)),
            "all_ms": tuple(1e3 * each for each in seconds),
            "gflop_per_s": flops / min(seconds) / 1e9,
            "roofline": None if least is None else least / min(seconds),
        }
    for row, (ratios, field) in itertools.product(rows.values(), RATIOS.items()):
        if row[field] is not None:
            row[ratios] = {name: row[field] / rows[name][field] for name in BASELINES if rows.get(name, {}).get(field)}
    return list(rows.values())


def cells(rows: list[Row]) -> list[list[str]]:
    """Return the rows of the table, header first."""

    def ratio(row: Row, name: str) -> str:
        return "; ".join(f"{row[ratios][name]:.2f}" for ratios in RATIOS if name in row[ratios]) or "-"

    names = [name for name in BASELINES if any(row["name"] == name for row in rows)]
    return table(
        rows,
        {"model": "model", "length": "length", "direction": "direction", "": "name"},
        {"min ms": ("min_ms", ".2f")}
        | {f"/ {name.removeprefix('torch ')}": (functools.partial(ratio, name=name), "") for name in names}
        | {"peak MiB": ("peak_mib", ".1f"), "GFLOP/s": ("gflop_per_s", ".1f"), "roofline": ("roofline", ".1%")}
        | {"GFLOP": ("compiled_gflop", ".2f"), "GB": ("compiled_gbyte", ".2f"), "compile s": ("compile_s", ".1f")}
        | {"error": (lambda row: max(row["errors"].values(), default=None), ".0e")},
    )


def choose(requested: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the implementations to time, and a message if one is skipped.

    Args:
        requested: names; if empty, all but `auto`, and `fused` only if it has a kernel for the platform.

    Raises:
        InputError: `fused` is requested, but has no kernel for the platform.
    """
    names = list(requested or (name for name in IMPLEMENTATIONS if name != "auto"))
    platform = device_platform()
    if "fused" not in names or platform in KERNELS:
        return names, []
    why = f"its kernels are for {' and '.join(KERNELS)}, and this platform is {platform!r}"
    require(not requested, "--implementations", "fused", why)
    return [name for name in names if name != "fused"], [f"fused is skipped: {why}"]


def run(settings: Settings) -> None:
    """Measure everything and write the output."""
    make_results_directory(Path(settings.output))
    names, left_out = choose(settings.implementations)
    names.append(PLAIN)
    if settings.vs:
        why = listing.why_not_torch(device_platform())
        names = names if why else [*listing.NAMES, *names]
        left_out += [f"torch is skipped: {why}"] if why else []
    for line in left_out:
        print(line, file=sys.stderr)

    cases = [
        Case(settings, *each) for each in itertools.product(settings.models, settings.lengths, settings.directions)
    ]
    rows: list[Row] = []
    with tqdm(total=len(cases) * len(names) * settings.repeats, unit="call", desc="attention") as bar:
        for case in cases:
            rows += measure_case(case, names, bar)

    platform, layer = device_platform(), f"DAPE 1x{settings.kernel_width}" if settings.kernel_width else "no DAPE"
    what = f"{layer}, bias {settings.bias}, batch {settings.batch}, {settings.dtype}; {jax.devices()[0].device_kind}"
    caption = f"One attention layer ({what}): time and peak memory; / NAME: both relative to NAME."
    failed = [
        f"{row['name']} at {row['model']} {row['length']} {row['direction']}: {row['failed']}"
        for row in rows
        if row["failed"]
    ]
    caption = " ".join([caption, *(f"{line}." for line in [*left_out, *failed])])
    content: dict[str, Any] = {"left_out": left_out}
    if "torch eager" in names:
        import torch  # pyright: ignore[reportMissingImports]

        content["torch"] = torch.__version__
    write(platform, settings, rows, caption, cells(rows), **content)
    if wrong := [row for row in rows if not is_right(row["errors"], settings.dtype)]:
        lines = [
            f"{row['name']} at {row['model']} {row['length']} {row['direction']}: {row['errors']}" for row in wrong
        ]
        raise AssertionError("errors exceed the tolerance for rounding:\n" + "\n".join(lines))


def main(_: list[str]) -> None:
    """Parse flags and run."""
    run(from_flags(Settings))


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
