"""Measure time and memory of one DAPE attention layer, and compare it with plain attention.

    python -m benchmarks.attention --vs=torch --lengths=512,2048
    python -m benchmarks.attention --vs=torch --lengths=512,1024,2048,4096,8192 --dtype=bfloat16 --output=results/gpu

The second command is for a GPU. One layer is q, k, v -> out, without projections, with the heads of the paper's models.
All implementations at one model, length and direction are called in turns in one process (A B C A B C ..), so that
other load slows all of them. It does not slow them equally: threads that wait for each other, such as PyTorch's, are
slowed most. Ratios are reliable only on an idle machine.

Timed: the implementations of `attention.py` (`dense` is the formula, compiled by XLA); causal attention without bias
and DAPE, `plain auto` by `attention.py` and `plain jax` by `jax.nn.dot_product_attention` (cuDNN on a GPU in bfloat16,
all scores at once elsewhere); and with `--vs=torch`, with the same weights and inputs, `torch eager` and
`torch.compile`, the listing of the paper's appendix L (`listing.py`), and `plain torch`, PyTorch's
`scaled_dot_product_attention`.

Output: a table on the terminal, and OUTPUT/PLATFORM.json. The columns:

    direction     forward, or backward: forward and the gradients of q, k, v, bias and convolutions in one program
    min ms        minimum time of a call over `--repeats` samples (see `measure.py`); the JSON has all of them
    peak MiB      memory of a call; see `measure.py`
    compile s     seconds of compilation
    error         largest error of out and the gradients, |x - reference| / |reference| as vectors. The reference is
                  dense in float32 at full precision for the same inputs; for the listing with the listing's edge

A failure, for example out of memory or a kernel for another platform, has a row without figures, and its reason is
printed above the table. If an error exceeds the tolerance for rounding, the program ends with status 1, after all
output is written.
"""

import dataclasses
import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from benchmarks import listing
from benchmarks.layer import (
    BIASES,
    DIRECTIONS,
    TOLERANCES,
    Layer,
    as_numpy,
    compile_layer,
    errors_of,
    is_right,
    layer_of,
    plain,
)
from benchmarks.measure import (
    Call,
    Row,
    check_names,
    check_positive,
    failure,
    resident_bytes_of_call,
    seconds_in_turns,
    write,
)
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.hardware import MIB
from dape_jax.model.attention import IMPLEMENTATIONS, Auto, Implementation
from dape_jax.model.processors import DapeConfig, PlainConfig
from dape_jax.model.transformer import SIZES
from dape_jax.provenance import make_results_directory
from dape_jax.sharding import device_platform

PLAIN_AUTO, PLAIN = "plain auto", "plain jax"
DEFAULT = tuple(name for name in IMPLEMENTATIONS if name != "auto")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    vs: str = flag("", "`torch` to time also the paper's listing and plain attention in PyTorch.")
    models: tuple[str, ...] = flag(
        ("125m",), f"Models that give the number and width of the heads: {', '.join(SIZES)}."
    )
    lengths: tuple[int, ...] = flag((512,), "Sequence lengths in tokens.")
    implementations: tuple[str, ...] = flag(DEFAULT, f"Implementations to time: {', '.join(IMPLEMENTATIONS)}.")
    directions: tuple[str, ...] = flag(DIRECTIONS, f"Directions to time: {', '.join(DIRECTIONS)}.")
    bias: str = flag("kerple", f"Position bias: {', '.join(BIASES)}.")
    kernel_width: int = flag(3, "Kernel width W of DAPE; 0 for no DAPE.")
    channels: int = flag(32, "Hidden channels C of DAPE.")
    batch: int = flag(1, "Batch size B.")
    dtype: str = flag("float32", f"Dtype of q, k, v and the convolutions' operands: {', '.join(TOLERANCES)}.")
    repeats: int = flag(10, "Samples of the time of each implementation.")
    output: str = flag("results/attention", "Directory of the JSON.")

    def __post_init__(self):
        check_positive(self, "lengths", "batch", "channels", "repeats")
        width = self.kernel_width
        require(width == 0 or (width > 0 and width % 2 == 1), "--kernel_width", width, "must be odd, or 0 for no DAPE")
        check_names("models", self.models, SIZES)
        check_names("directions", self.directions, DIRECTIONS)
        check_names("implementations", self.implementations, IMPLEMENTATIONS)
        check_names("bias", (self.bias,), BIASES)
        check_names("dtype", (self.dtype,), TOLERANCES)
        require(self.vs in ("", "torch"), "--vs", self.vs, "must be torch, or empty")
        allowed = f"with --vs=torch, must be one of {listing.BIASES}"
        require(not self.vs or self.bias in listing.BIASES, "--bias", self.bias, allowed)


def variant_of(layer: Layer, name: str) -> Layer:
    """Return the layer that an implementation computes: the listing has another edge, plain attention no DAPE."""
    if name in (PLAIN_AUTO, PLAIN, listing.PLAIN):
        return plain(layer)
    if name in listing.NAMES and isinstance(layer.processor, DapeConfig):
        return dataclasses.replace(layer, processor=dataclasses.replace(layer.processor, edge="listing"))
    return layer


def implementation_of(name: str) -> Implementation:
    """Return an implementation; of `blockwise`, with the platform's sizes."""
    if name == "blockwise":
        return Auto().blockwise(device_platform())
    return Auto() if name == PLAIN_AUTO else IMPLEMENTATIONS[name]()


def plain_attention(*qkv: jax.Array, **_: None) -> jax.Array:
    """Compute causal attention by JAX's own function."""
    library = "cudnn" if device_platform() == "gpu" and qkv[0].dtype == "bfloat16" else "xla"
    return jax.nn.dot_product_attention(*qkv, is_causal=True, implementation=library)


def prepare(layer: Layer, direction: str, name: str) -> tuple[Call, Row]:
    """Return the call to time, and its figures without times."""
    on_cpu = device_platform() == "cpu"
    if name in listing.NAMES:
        call, compile_s = listing.torch_function(name, *layer.modules(), layer.arrays(), direction)
        found = listing.as_numpy(call.start())
        figures: Row = {"compile_s": compile_s}
        peak = resident_bytes_of_call(call) if on_cpu else listing.bytes_of_call(call)
        peak_mib = None if peak is None else peak / MIB
    else:
        call, figures = compile_layer(layer, direction, plain_attention if name == PLAIN else implementation_of(name))
        found, peak_mib = as_numpy(call.start()), figures["temporary_mib"] + figures["result_mib"]
        if on_cpu:
            peak_mib = max(peak_mib, (resident_bytes_of_call(call) or 0) / MIB)
    return call, figures | {"errors": errors_of(found, layer, direction), "peak_mib": peak_mib}


def measure_case(settings: Settings, model: str, length: int, direction: str, names: list[str], bar: tqdm) -> list[Row]:
    """Measure one model, length and direction; see the module's docstring."""
    processor = DapeConfig(settings.kernel_width, settings.channels) if settings.kernel_width else PlainConfig()
    fields = {"batch": settings.batch, "bias": settings.bias, "processor": processor, "dtype": settings.dtype}
    layers = {name: variant_of(layer_of(model, length=length, **fields), name) for name in names}
    labels = {"model": model, "length": length, "direction": direction, "failed": None, "errors": {}}
    calls: dict[str, Call] = {}
    rows: dict[str, Row] = {name: labels | {"name": name} for name in names}
    for name, layer in layers.items():
        bar.set_postfix_str(f"{model} {length} {direction} {name}")
        try:
            calls[name], figures = prepare(layer, direction, name)
            rows[name] |= figures
        except Exception as error:  # of any kind: continue with the other measurements
            rows[name]["failed"] = failure(error)
            bar.write(f"{model} {length} {direction} {name}: {rows[name]['failed']}", file=sys.stderr)
            bar.update(settings.repeats)
        gc.collect()
        if name in listing.NAMES:
            listing.empty_cache()
    for name, seconds in seconds_in_turns(calls, settings.repeats, bar).items():
        rows[name] |= {"min_ms": 1e3 * min(seconds), "all_ms": tuple(1e3 * each for each in seconds)}
    return list(rows.values())


def run(settings: Settings) -> None:
    """Measure everything and write the output."""
    platform = device_platform()
    why = listing.why_not_torch(platform) if settings.vs else None
    require(why is None, "--vs", settings.vs, why or "")
    make_results_directory(Path(settings.output))
    names = [*(listing.NAMES if settings.vs else ()), *settings.implementations, PLAIN_AUTO, PLAIN]
    cases = list(itertools.product(settings.models, settings.lengths, settings.directions))
    rows: list[Row] = []
    with tqdm(total=len(cases) * len(names) * settings.repeats, unit="call", desc="attention") as bar:
        for case in cases:
            rows += measure_case(settings, *case, names, bar)

    def title(row: Row) -> str:
        return f"{row['name']} at {row['model']} {row['length']} {row['direction']}"

    layer = f"DAPE 1x{settings.kernel_width}" if settings.kernel_width else "no DAPE"
    what = f"{layer}, bias {settings.bias}, batch {settings.batch}, {settings.dtype}; {jax.devices()[0].device_kind}"
    caption = f"One attention layer ({what}): time and peak memory."
    caption = " ".join([caption, *(f"{title(row)}: {row['failed']}." for row in rows if row["failed"])])
    content: dict[str, Any] = {}
    if settings.vs:
        import torch  # pyright: ignore[reportMissingImports]

        content["torch"] = torch.__version__
    labels = {"model": "model", "length": "length", "direction": "direction", "": "name"}
    figures = {"min ms": ("min_ms", ".2f"), "peak MiB": ("peak_mib", ".1f"), "compile s": ("compile_s", ".1f")}
    figures |= {"error": (lambda row: max(row["errors"].values(), default=None), ".0e")}
    write(platform, settings, caption, rows, labels, figures, **content)
    if wrong := [f"{title(row)}: {row['errors']}" for row in rows if not is_right(row["errors"], settings.dtype)]:
        raise AssertionError("errors exceed the tolerance for rounding:\n" + "\n".join(wrong))


if __name__ == "__main__":
    command_line.run(run, Settings)
