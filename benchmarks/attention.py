"""How fast is one DAPE attention layer, and how much memory does it take?

    python -m benchmarks.attention --vs=torch --lengths=512,2048

One layer is q, k, v -> out, without projections. Everything measured at one length and direction takes turns in one
process (A B C A B C ..), so that a busy machine slows all of it, though not alike: threads that wait for each other, as
PyTorch's do, suffer most. For a ratio to rely on, keep the machine quiet.

Written are a table, OUTPUT/<platform>.json and OUTPUT/<platform>.png. The columns:

    direction        forward, or backward: forward and the gradients of q, k, v, bias and convolutions in one program
    min, median      milliseconds of a call, over `--repeats`
    x min, x median  minimum over torch's minimum, median over torch's median; below 1 is faster than torch
    GFLOP/s          `layer_flops` over the minimum: the work of the layer, whatever the implementation makes of it
    temp MiB         temporary memory of the compiled program, inputs and outputs not counted
    compile s        seconds of compilation

The JSON also holds `bytes_accessed_loops_once`, the compiler's count, which enters a loop's body once and so says
little about `blockwise`; its count of FLOPs has the same flaw and is left out.

`--vs=torch` (CPU) times the listing of the paper's appendix L in eager PyTorch, with the same weights and inputs. That
all outputs agree is checked with edge="listing"; what is timed is our default edge.
"""

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import flags
from flax import nnx
from jaxtyping import Array, Float
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.attention import IMPLEMENTATIONS
from dape_jax.config import CHOICES
from dape_jax.errors import require
from dape_jax.processors import DapeConfig, PlainConfig
from dape_jax.provenance import provenance

DIRECTIONS = ("forward", "backward")
DTYPES = ("float32", "bfloat16")
BIASES = CHOICES["bias"]
TORCH_BIASES = ("nope", "alibi", "kerple")
REST_S = 0.02  # between two calls: the threads of the one before go on spinning for a while


def _flag(default: Any, text: str) -> Any:
    """A field that `define_flags` makes a flag of."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags, checked."""

    vs: str = _flag("", "`torch` to time the paper's listing in eager PyTorch as well.")
    lengths: tuple[int, ...] = _flag((512,), "Sequence lengths in tokens.")
    bias: str = _flag("kerple", f"Position bias: {', '.join(BIASES)}.")
    kernel_width: int = _flag(3, "Kernel width W of DAPE; 0 for no DAPE.")
    batch: int = _flag(1, "Batch size B.")
    heads: int = _flag(12, "Heads H.")
    head_dim: int = _flag(64, "Width K of one head.")
    channels: int = _flag(32, "Hidden channels C of DAPE.")
    implementations: tuple[str, ...] = _flag(tuple(IMPLEMENTATIONS), "What to time.")
    block_size: int = _flag(32, "Rows in a block of `blockwise`.")
    num_buckets: int = _flag(4, "Runs of rows with their own number of keys in `blockwise`.")
    directions: tuple[str, ...] = _flag(DIRECTIONS, "What to time.")
    repeats: int = _flag(10, "Timed calls of each.")
    dtype: str = _flag("float32", f"Of q, k, v and the convolutions' operands: {', '.join(DTYPES)}.")
    output: str = _flag("results/attention", "Directory of the JSON and the picture.")

    def __post_init__(self):
        for name in ("batch", "heads", "head_dim", "channels", "block_size", "num_buckets", "repeats"):
            require(getattr(self, name) > 0, f"--{name}", getattr(self, name), "1 or more")
        width = self.kernel_width
        require(width == 0 or (width > 0 and width % 2 == 1), "--kernel_width", width, "an odd width, or 0 for no DAPE")
        require(bool(self.lengths) and min(self.lengths) > 0, "--lengths", self.lengths, "lengths of 1 or more")
        for name, allowed in {"implementations": IMPLEMENTATIONS, "directions": DIRECTIONS}.items():
            value = getattr(self, name)
            require(bool(value) and set(value) <= set(allowed), f"--{name}", value, f"some of {tuple(allowed)}")
        require(self.bias in BIASES, "--bias", self.bias, f"one of {tuple(BIASES)}")
        require(self.dtype in DTYPES, "--dtype", self.dtype, f"one of {DTYPES}")
        require(self.vs in ("", "torch"), "--vs", self.vs, "torch, or nothing")
        if self.vs:
            require(self.bias in TORCH_BIASES, "--bias", self.bias, f"with --vs=torch, one of {TORCH_BIASES}")
            require(self.dtype == "float32", "--dtype", self.dtype, "with --vs=torch, float32")
            require(find_spec("torch") is not None, "--vs", self.vs, "needs PyTorch: pip install -e '.[torch]'")


def define_flags() -> None:
    """One flag for each field of `Settings`."""
    for field in dataclasses.fields(Settings):
        default: Any = field.default
        define: Any = {int: flags.DEFINE_integer, str: flags.DEFINE_string, tuple: flags.DEFINE_list}[type(default)]
        define(field.name, list(map(str, default)) if isinstance(default, tuple) else default, field.metadata["help"])


def settings_from_flags() -> Settings:
    """Read the flags."""
    given = flags.FLAGS.flag_values_dict()
    lengths = given["lengths"]
    require(all(length.isdecimal() for length in lengths), "--lengths", lengths, "whole numbers, parted by commas")
    given["lengths"] = [int(length) for length in lengths]
    values: dict[str, Any] = {field.name: given[field.name] for field in dataclasses.fields(Settings)}
    for name in ("lengths", "implementations", "directions"):
        values[name] = tuple(values[name])
    return Settings(**values)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; the module's docstring says what the columns mean. None: not known, or not compared."""

    length: int
    direction: str
    name: str
    min_ms: float
    median_ms: float
    gflop_per_s: float
    min_ratio: float | None = None
    median_ratio: float | None = None
    temporary_mib: float | None = None
    compile_s: float | None = None
    bytes_accessed_loops_once: float | None = None
    difference_from_torch: float | None = None


class Layer(nnx.Module):
    """What the parameters of one layer belong to: its bias and its processor."""

    def __init__(self, settings: Settings, edge: str):
        rngs = nnx.Rngs(0)
        dape = (
            DapeConfig(settings.kernel_width, settings.channels, edge=edge) if settings.kernel_width else PlainConfig()
        )
        self.bias = BIASES[settings.bias]().build(settings.heads, settings.head_dim, rngs)
        self.processor = dape.build(settings.heads, has_bias=self.bias is not None, dtype=settings.dtype, rngs=rngs)


def jax_function(settings: Settings, name: str, direction: str, edge: str = "prefix") -> tuple[Callable, nnx.State]:
    """The function to time, (parameters, q, k, v, cotangent) -> out or (out, gradients), and the parameters."""
    implementation = IMPLEMENTATIONS[name]
    fields = [field.name for field in dataclasses.fields(implementation)]
    attention = implementation(**{field: getattr(settings, field) for field in fields})
    graphdef, params = nnx.split(Layer(settings, edge))

    def forward(params, q_BTHK, k_BSHK, v_BSHK):
        layer = nnx.merge(graphdef, params)
        pos_T = jnp.arange(q_BTHK.shape[1])
        return attention(q_BTHK, k_BSHK, v_BSHK, pos_T, pos_T, bias=layer.bias, processor=layer.processor)

    def backward(params, q_BTHK, k_BSHK, v_BSHK, cotangent_BTHK):
        out_BTHK, pullback = jax.vjp(forward, params, q_BTHK, k_BSHK, v_BSHK)
        return out_BTHK, pullback(cotangent_BTHK)

    return {"forward": lambda *inputs: forward(*inputs[:-1]), "backward": backward}[direction], params


def torch_function(settings: Settings, direction: str, arrays: list[Float[Array, "B T H K"]]) -> Callable[[], Any]:
    """The same layer as a PyTorch user writes it after the paper's appendix L: everything at full size, eagerly.

    Heads come before positions in q, k, v and out, so that PyTorch has nothing to transpose.
    """
    import torch  # pyright: ignore[reportMissingImports]

    def tensor(x: Any) -> Any:
        return torch.tensor(np.asarray(x))

    def convolution(kernel_WIO: Any, bias_O: Any) -> Any:
        width, inputs, outputs = kernel_WIO.shape
        conv = torch.nn.Conv2d(inputs, outputs, (1, width), padding=(0, width // 2))
        conv.weight.data = tensor(kernel_WIO).permute(2, 1, 0)[:, :, None].contiguous()
        conv.bias.data = tensor(bias_O)
        return conv

    torch.set_num_threads(os.cpu_count() or 1)
    layer: Any = Layer(settings, "listing")
    bias, dape = layer.bias, layer.processor
    q_BHTK, k_BHSK, v_BHSK, cotangent_BHTK = (tensor(x).permute(0, 2, 1, 3).contiguous() for x in arrays)
    p_and_a = [tensor(x[...]) for x in (bias.p_H, bias.a_H)] if settings.bias == "kerple" else []
    leaves = [x.requires_grad_() for x in (q_BHTK, k_BHSK, v_BHSK, *p_and_a)]
    mlp = None
    if settings.kernel_width:
        halves = [half[...] for half in (dape.scores_WHC, dape.bias_WHC) if half is not None]
        mlp = torch.nn.Sequential(
            convolution(jnp.concatenate(halves, 1), dape.hidden_bias_C[...]),
            torch.nn.LeakyReLU(0.01),
            convolution(dape.output_WCH[...], dape.output_bias_H[...]),
        )
        leaves += mlp.parameters()
    pos_T = jnp.arange(q_BHTK.shape[2])
    future_TS = tensor(pos_T[:, None] < pos_T)
    distance_TS = tensor(jnp.maximum(pos_T[:, None] - pos_T, 0).astype(jnp.float32))
    alibi_HTS = tensor(bias(pos_T, pos_T)) if settings.bias == "alibi" else None

    def bias_HTS() -> Any:
        if settings.bias != "kerple":
            return alibi_HTS
        with torch.no_grad():
            p_H, a_H = (x.clamp_(min=0.01) for x in p_and_a)
        return -p_H[:, None, None] * torch.log(1 + a_H[:, None, None] * distance_TS)

    def forward() -> Any:
        total = scores_BHTS = torch.matmul(q_BHTK, k_BHSK.transpose(-1, -2)) / settings.head_dim**0.5
        features, added = [scores_BHTS], bias_HTS()
        if added is not None:
            features.append(torch.tile(added, (settings.batch, 1, 1, 1)))
            total = total + added
        if mlp is not None:
            total = total + mlp(torch.tril(torch.cat(features, 1)))
        total = total.masked_fill(future_TS, torch.finfo(total.dtype).min)
        return torch.matmul(torch.softmax(total, -1), v_BHSK)

    def backward() -> Any:
        out_BHTK = forward()
        return out_BHTK.detach(), torch.autograd.grad(out_BHTK, leaves, cotangent_BHTK)

    return {"forward": torch.no_grad()(forward), "backward": backward}[direction]


def layer_flops(settings: Settings, length: int, direction: str) -> float:
    """FLOPs that the layer cannot do without: those of its products, for P = T (T + 1) / 2 causal pairs.

        2 P [ B (2 H K + W H C + W C H) + W H C ]        Q K^T and P V; Conv1 of the scores, Conv2; Conv1 of the bias

    The bias has no batch dim, so its half of Conv1 is counted once. Gradients cost two products for each product; what
    is computed a second time to save memory is not counted.
    """
    convolution = settings.kernel_width * settings.heads * settings.channels
    products = settings.batch * (2 * settings.heads * settings.head_dim + 2 * convolution)
    products += 0 if settings.bias == "nope" else convolution
    return (3 if direction == "backward" else 1) * length * (length + 1) * products


def random_inputs(settings: Settings, length: int) -> list[Float[Array, "B T H K"]]:
    """Queries, keys, values and a cotangent."""
    shape = (settings.batch, length, settings.heads, settings.head_dim)
    return [jax.random.normal(jax.random.key(i), shape, jnp.dtype(settings.dtype)) for i in range(4)]


def largest_difference(settings: Settings, name: str, arrays: list[Float[Array, "B T H K"]]) -> float:
    """Largest difference of an output from PyTorch's, both with the listing's right edge; an error above 1e-4."""
    function, params = jax_function(settings, name, "forward", edge="listing")
    ours_BTHK = np.asarray(jax.jit(function)(params, *arrays))
    theirs_BTHK = torch_function(settings, "forward", arrays)().permute(0, 2, 1, 3).numpy()
    difference = float(np.abs(ours_BTHK - theirs_BTHK).max())
    if not difference < 1e-4:
        raise AssertionError(f"{name} and torch differ by {difference} at length {arrays[0].shape[1]}")
    return difference


def seconds_in_turns(functions: dict[str, Callable[[], Any]], repeats: int, bar: tqdm) -> dict[str, list[float]]:
    """Time all functions, one call of each after another, `repeats` times over, after two calls to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(-2, repeats):
        for name, function in functions.items():
            time.sleep(REST_S)
            start = time.perf_counter()
            jax.block_until_ready(function())
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
                bar.update()
    return seconds


def measure(settings: Settings, length: int, direction: str, bar: tqdm) -> list[Row]:
    """The rows of one length and direction."""
    arrays = random_inputs(settings, length)
    functions: dict[str, Callable[[], Any]] = {}
    compiler: dict[str, dict[str, Any]] = {}
    if settings.vs:
        functions["torch"] = torch_function(settings, direction, arrays)
    for name in settings.implementations:
        function, params = jax_function(settings, name, direction)
        lowered = jax.jit(function).lower(params, *arrays)
        start = time.perf_counter()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - start
        memory = compiled.memory_analysis()
        compiler[name] = {
            "temporary_mib": memory.temp_size_in_bytes / 2**20 if memory else None,
            "compile_s": compile_s,
            "bytes_accessed_loops_once": (compiled.cost_analysis() or {}).get("bytes accessed"),
            "difference_from_torch": largest_difference(settings, name, arrays) if settings.vs else None,
        }
        functions[name] = functools.partial(compiled, params, *arrays)

    seconds = seconds_in_turns(functions, settings.repeats, bar)
    low = {name: min(times) for name, times in seconds.items()}
    middle = {name: float(np.median(times)) for name, times in seconds.items()}
    return [
        Row(
            length,
            direction,
            name,
            min_ms=1e3 * low[name],
            median_ms=1e3 * middle[name],
            gflop_per_s=layer_flops(settings, length, direction) / low[name] / 1e9,
            min_ratio=low[name] / low["torch"] if settings.vs else None,
            median_ratio=middle[name] / middle["torch"] if settings.vs else None,
            **compiler.get(name, {}),
        )
        for name in functions
    ]


def text_table(rows: list[Row]) -> str:
    """The table for a terminal."""
    columns = ["length", "direction", "name", "min_ms", "median_ms", "min_ratio", "median_ratio"]
    columns += ["gflop_per_s", "temporary_mib", "compile_s"]
    header = ["length", "direction", "", "min ms", "median ms", "x min", "x median", "GFLOP/s", "temp MiB", "compile s"]

    def cell(row: Row, column: str) -> str:
        value = getattr(row, column)
        if value is None:
            return "-"
        return f"{value:.{2 if 'ratio' in column else 1}f}" if isinstance(value, float) else str(value)

    cells = [header, *([cell(row, column) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def plot(rows: list[Row], title: str, file: Path) -> None:
    """Draw time against length, one panel for each direction."""
    directions = list(dict.fromkeys(row.direction for row in rows))
    lengths = sorted({row.length for row in rows})
    size = (max(4.2 * len(directions), 6.4), 3.8)
    figure, panels = plt.subplots(1, len(directions), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, direction in zip(panels[0], directions, strict=True):
        for name in dict.fromkeys(row.name for row in rows):
            points = sorted((r.length, r.min_ms) for r in rows if (r.name, r.direction) == (name, direction))
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set_title({"forward": "forward", "backward": "forward + backward"}[direction])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xlabel("sequence length (tokens)")
        axes.grid(alpha=0.3, which="both")
    panels[0, 0].set_ylabel("time of one layer (ms, minimum)")
    panels[0, 0].legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(_: list[str]) -> None:
    """Flags, measurements, then what is left behind."""
    settings = settings_from_flags()
    platform = jax.devices()[0].platform
    require(not settings.vs or platform == "cpu", "--vs", settings.vs, "on CPU alone (JAX_PLATFORMS=cpu)")

    cases = [(length, direction) for length in settings.lengths for direction in settings.directions]
    calls = len(cases) * settings.repeats * (len(settings.implementations) + bool(settings.vs))
    with tqdm(total=calls, unit="call", desc="attention") as bar:
        rows = [row for length, direction in cases for row in measure(settings, length, direction, bar)]

    directory = Path(settings.output)
    directory.mkdir(parents=True, exist_ok=True)
    content = {"rows": [dataclasses.asdict(row) for row in rows], **provenance(*["torch"] if settings.vs else [])}
    (directory / f"{platform}.json").write_text(json.dumps(content, indent=1) + "\n")
    layer = f"{f'DAPE 1x{settings.kernel_width}' if settings.kernel_width else 'no DAPE'}, {settings.bias}"
    title = f"{layer}, batch {settings.batch}, {settings.heads} heads, {settings.dtype}; {content['device']}"
    plot(rows, title, directory / f"{platform}.png")
    print(f"\n{text_table(rows)}\n\nresults: {directory}")


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
