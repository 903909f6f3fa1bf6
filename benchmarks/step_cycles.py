"""Compare methods by the compiler's cycles of a complete training step on a TPU, without a TPU.

    make tpu-aot
    python -m benchmarks.step_cycles --topologies=v5e:1x1,v5p:2x2x1 --models=125m,350m --lengths=512,2048,8192

For the methods of the paper's table 7, the train step is compiled ahead of time, data-parallel over the chips of a
slice, with `--tokens` tokens in the batch of a chip, and its cycles are summed, with trip counts of loops:

    kernels     bundles of instructions of one layer's kernels, one per cycle (`benchmarks.tpu`)
    other       the compiler's estimate for all other operations; collectives are not counted

Attention is the choice of `auto`. A method's ratio is its cycles over those of DAPE1x3-Kerple. The paper's table 7
measures one sequence of 512 tokens on unnamed hardware. Output: OUTPUT/step_cycles.json, tables and a figure.
"""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import tpu
from benchmarks.hlo import compile_program
from benchmarks.step import check_names, read_config
from benchmarks.table7 import RATIO_TO, TABLE
from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.config import RunConfig
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.hardware import read_topology
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import SIZES, attention_of
from dape_jax.planning.compile import compile_error, find_libtpu, in_process, libtpu_version
from dape_jax.planning.plan import REMATS, Request
from dape_jax.provenance import make_results_directory
from dape_jax.sharding import MeshConfig

METHODS = TABLE.methods


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    topologies: tuple[str, ...] = flag(("v5e:1x1",), "Slices to compile for.")
    models: tuple[str, ...] = flag(("125m",), f"The paper's models: {', '.join(SIZES)}.")
    lengths: tuple[int, ...] = flag((512, 2048, 8192), "Train lengths in tokens.")
    methods: tuple[str, ...] = flag(METHODS, f"Methods: {', '.join(METHODS)}.")
    tokens: int = flag(16_384, "Tokens in the batch of a chip.")
    remat: str = flag("full", f"Rematerialisation of layers: {', '.join(REMATS)}.")
    output: str = flag("results/step_cycles", "Directory of the tables, the JSON and the figure.")

    def __post_init__(self):
        check_names("models", self.models, SIZES)
        check_names("methods", self.methods, METHODS)
        require(RATIO_TO in self.methods, "--methods", self.methods, f"must include {RATIO_TO}")
        require(self.remat in REMATS, "--remat", self.remat, f"must be one of {REMATS}")
        for topology in self.topologies:
            read_topology(topology)
        require(bool(self.lengths) and min(self.lengths) > 0, "--lengths", self.lengths, "must be positive")
        for length in self.lengths:
            require(self.tokens % length == 0, "--tokens", self.tokens, f"must be a multiple of {length}")


def layer_request(run: RunConfig, topology: str, model: str) -> tpu.Request:
    """Return the request with which `benchmarks.tpu` counts the kernels' bundles of one layer of a run on one chip."""
    (bias,) = (name for name, config in BIASES.items() if type(run.model.bias) is config)
    batch = run.train.batch_size // read_topology(topology).num_chips
    dape = run.model.processor if isinstance(run.model.processor, DapeConfig) else None
    sizes = {"kernel_width": dape.kernel_width, "channels": dape.channels} if dape else {}
    settings = dataclasses.replace(tpu.Settings(batch=batch, bias=bias), **sizes)
    processor = "dape" if dape else "plain"
    return tpu.Request(topology, model, run.train.train_length, "backward", processor, "fused", settings)


def compile_step(request: Request) -> dict[str, Any]:
    """Compile a train step and return its cycles and kernels; must run in a separate process, see `in_process`."""
    mesh, step, arguments = request.build()
    with jax.set_mesh(mesh):
        try:
            program = compile_program(step, *arguments)
        except jax.errors.JaxRuntimeError as error:
            return {"fits": False, "reason": compile_error(error)}
    figures = {"cycles": program.work.cycles, "kernels": program.work.kernels}
    return {"fits": True, "peak_bytes": program.memory.peak_memory_in_bytes} | figures


def measure(run: RunConfig, topology: str, model: str, libtpu: Path) -> dict[str, Any]:
    """Return the milliseconds of a training step of one chip, or the reason of a failure."""
    hardware, length = read_topology(topology), run.train.train_length
    attention = attention_of(run.model, length, "tpu", hardware.chip.device_kinds[0])
    found: dict[str, Any] = {"attention": type(attention).__name__.lower()}
    os.environ.pop("LIBTPU_INIT_ARGS", None)  # no listings of the step: writing them takes longer than compiling it
    outcome = in_process(compile_step, Request(run, hardware, MeshConfig(-1, 1, 1, 1)), libtpu)
    if not outcome["fits"]:
        return found | {"reason": outcome["reason"]}
    kernels_ms = 0.0
    if outcome["kernels"]:
        layer = tpu.measure(layer_request(run, topology, model), libtpu)
        of_pass = dict(zip(("dape_forward", "dape_backward"), layer["kernels_of_passes_ms"], strict=True))
        for name, times in outcome["kernels"]:
            kernels_ms += times * sum(ms for kernel, ms in of_pass.items() if kernel in name)
    other_ms = 1e3 * outcome["cycles"] / tpu.CLOCK_HZ[hardware.chip.name]
    return found | {"kernels_ms": kernels_ms, "other_ms": other_ms, "peak_bytes": outcome["peak_bytes"], "reason": None}


def total_ms(row: dict[str, Any]) -> float:
    """Return the milliseconds of a step."""
    return row["kernels_ms"] + row["other_ms"]


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, header first."""
    lines = [["slice", "model", "length", "method", "attention", "ms", "in kernels", "ratio"]]
    for row in rows:
        line = [row["topology"], row["model"], f"{row['length']:,}", row["method"], row["attention"]]
        if row["reason"] is not None:
            lines.append([*line, "does not fit", "", ""])
            continue
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append([*line, f"{total_ms(row):.1f}", f"{row['kernels_ms'] / total_ms(row):.0%}", ratio])
    return lines


def plot(rows: list[dict[str, Any]]) -> Figure:
    """Plot the ratios, a panel for each slice and model, a group of bars for each length."""
    panels = list(dict.fromkeys((row["topology"], row["model"]) for row in rows))
    figure = Figure(figsize=(max(4.2 * len(panels), 6.4), 4.2), layout="constrained")
    lengths, methods = (list(dict.fromkeys(row[field] for row in rows)) for field in ("length", "method"))
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        for i, method in enumerate(methods):
            ratios = {
                row["length"]: row["ratio"] or 0
                for row in rows
                if (row["topology"], row["model"], row["method"]) == (*panel, method)
            }
            places = [at + 0.8 * (i + 0.5) / len(methods) - 0.4 for at in range(len(lengths))]
            axes.bar(places, [ratios[length] for length in lengths], 0.8 / len(methods), label=method)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_xlabel("train length (tokens)")
        axes.set_title(" ".join(panel), fontsize=9)
        axes.axhline(1, color="gray", linewidth=0.5)
    figure.axes[0].set_ylabel(f"cycles relative to {RATIO_TO}")
    figure.axes[-1].legend(fontsize=6)
    return figure


def main(_: list[str]) -> None:
    """Parse flags, compile every combination and write the report."""
    settings = from_flags(Settings)
    libtpu, directory = find_libtpu(), Path(settings.output)
    make_results_directory(directory)
    rows: list[dict[str, Any]] = []
    cases = list(itertools.product(settings.topologies, settings.models, settings.lengths))
    with tqdm(total=len(cases) * len(settings.methods), unit="program", desc="steps") as bar:
        for topology, model, length in cases:
            hardware, of_case = read_topology(topology), []
            for method in settings.methods:
                bar.set_postfix_str(f"{topology} {model} {length} {method}")
                batch = settings.tokens // length * hardware.num_chips
                run = read_config("paper", model, method, length, batch, "auto")
                run = dataclasses.replace(
                    run, model=dataclasses.replace(run.model, dtype="bfloat16", remat=settings.remat)
                )
                row = {"topology": topology, "model": model, "length": length, "method": method}
                of_case.append(row | measure(run, topology, model, libtpu))
                bar.update()
            (base,) = (row for row in of_case if row["method"] == RATIO_TO)
            for row in of_case:
                known = row["reason"] is None and base["reason"] is None
                rows.append(row | {"ratio": total_ms(row) / total_ms(base) if known else None})
    content = {"rows": rows, "libtpu": libtpu_version(libtpu), "settings": dataclasses.asdict(settings)}
    caption = (
        f"A training step by the compiler's cycles, {settings.tokens:,} tokens on each chip, bfloat16, "
        f"remat={settings.remat}. Ratio: to {RATIO_TO}."
    )
    report.save("step_cycles", directory, content, caption, cells(rows), plot(rows))


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
