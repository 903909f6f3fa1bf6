"""Compare methods by the compiler's cycles of a complete training step on a TPU, without a TPU.

    make tpu-aot
    python -m benchmarks.step_cycles --topologies=v5e:1x1,v5p:2x2x1 --models=125m,350m --lengths=512,2048,8192

For the methods of the paper's table 7, the train step is compiled ahead of time, data-parallel over the chips of a
slice, with 16,384 tokens in the batch of a chip and rematerialised layers, and its cycles are summed, with trip counts
of loops:

    kernels     bundles of instructions of one layer's kernels, one per cycle (`benchmarks.tpu`)
    matmuls     the compiler's estimate for other operations with a matmul, and what is fused with it
    rest        the compiler's estimate for all other operations; collectives are not counted

Attention is the choice of `auto`. A method's ratio is its cycles over those of DAPE1x3-Kerple, and its MFU the model's
FLOPs (`flops.py`) over the chips' peak in that time. The paper's table 7 measures one sequence of 512 tokens on unnamed
hardware. Output: a table, a table of the ten most expensive operations of the rest, and OUTPUT/step_cycles.json.
"""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from benchmarks import tpu
from benchmarks.hlo import compile_program
from benchmarks.layer import BIASES, Layer
from benchmarks.measure import check_names, check_positive, table, write
from benchmarks.step import read_config
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.config import RunConfig
from dape_jax.errors import require
from dape_jax.evaluation.report import text_table
from dape_jax.hardware import mfu, read_topology
from dape_jax.model.flops import model_flops
from dape_jax.model.processors import DapeConfig, PlainConfig
from dape_jax.model.transformer import SIZES, attention_of
from dape_jax.planning.compile import compile_error, find_libtpu, in_process, libtpu_version
from dape_jax.planning.plan import Plan
from dape_jax.provenance import make_results_directory
from experiments.catalogue import EXPERIMENTS

TABLE7 = EXPERIMENTS["table7"].methods  # methods of the paper's table of times
METHODS = ("nope", *TABLE7)
RATIO_TO = "dape1x3-kerple"
TOKENS = 16_384  # in the batch of a chip
NUM_LISTED = 10  # most expensive operations


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    topologies: tuple[str, ...] = flag(("v5e:1x1",), "Slices to compile for.")
    models: tuple[str, ...] = flag(("125m",), f"The paper's models: {', '.join(SIZES)}.")
    lengths: tuple[int, ...] = flag((512, 2048, 8192), "Train lengths in tokens.")
    methods: tuple[str, ...] = flag(TABLE7, f"Methods: {', '.join(METHODS)}.")
    output: str = flag("results/step_cycles", "Directory of the JSON.")

    def __post_init__(self):
        check_names("models", self.models, SIZES)
        check_names("methods", self.methods, METHODS)
        require(RATIO_TO in self.methods, "--methods", self.methods, f"must include {RATIO_TO}")
        for topology in self.topologies:
            read_topology(topology)
        check_positive(self, "lengths")
        for length in self.lengths:
            require(TOKENS % length == 0, "--lengths", length, f"must divide {TOKENS}")


def layer_request(run: RunConfig, topology: str, model: str) -> tpu.Request:
    """Return the request with which `benchmarks.tpu` counts the kernels' bundles of one layer of a run on one chip."""
    (bias,) = (name for name, config in BIASES.items() if type(run.model.bias) is config)
    batch = run.train.batch_size // read_topology(topology).num_chips
    heads, head_dim = run.model.num_heads, run.model.head_dim
    assert isinstance(run.model.processor, DapeConfig | PlainConfig)
    layer = Layer(run.train.train_length, batch, heads, heads, head_dim, bias, run.model.processor)
    return tpu.Request(topology, model, "backward", "fused", layer)


def compile_step(plan: Plan) -> dict[str, Any]:
    """Compile a train step and return its cycles and kernels; must run in a separate process, see `in_process`."""
    mesh, step, arguments = plan.build()
    with jax.set_mesh(mesh):
        try:
            program = compile_program(step, *arguments)
        except jax.errors.JaxRuntimeError as error:
            return {"fits": False, "reason": compile_error(error)}
    matmuls = sum(each.cycles for each in program.work.operations if each.has_matmul)
    rest = [dataclasses.asdict(each) for each in program.work.operations if not each.has_matmul][:NUM_LISTED]
    figures = {"cycles": program.work.cycles, "matmuls": matmuls, "rest": rest, "kernels": program.work.kernels}
    return {"fits": True, "peak_bytes": program.memory.peak_memory_in_bytes} | figures


def measure(run: RunConfig, topology: str, model: str, libtpu: Path) -> dict[str, Any]:
    """Return the milliseconds of a training step of one chip, or the reason of a failure."""
    hardware, length = read_topology(topology), run.train.train_length
    attention = attention_of(run.model, length, "tpu", hardware.chip.device_kinds[0])
    found: dict[str, Any] = {"attention": type(attention).__name__.lower()}
    os.environ.pop("LIBTPU_INIT_ARGS", None)  # no listings of the step: writing them takes longer than compiling it
    outcome = in_process(compile_step, Plan(run, hardware), libtpu)
    if not outcome["fits"]:
        return found | {"reason": outcome["reason"]}
    kernels_ms = 0.0
    if outcome["kernels"]:
        layer = tpu.measure(layer_request(run, topology, model), libtpu)
        of_pass = dict(zip(("dape_forward", "dape_backward"), layer["kernels_of_passes_ms"], strict=True))
        for name, times in outcome["kernels"]:
            kernels_ms += times * sum(ms for kernel, ms in of_pass.items() if kernel in name)
    cycle_ms = 1e3 / tpu.CLOCK_HZ[hardware.chip.name]
    found |= {"kernels_ms": kernels_ms, "other_ms": outcome["cycles"] * cycle_ms, "reason": None}
    flops = model_flops(run.model, length, run.train.batch_size)
    for operation in outcome["rest"]:
        operation["ms"] = operation.pop("cycles") * cycle_ms
    return found | {
        "matmuls_ms": outcome["matmuls"] * cycle_ms,  # of `other_ms`
        "mfu": mfu(1e3 * flops / total_ms(found), hardware.chip.device_kinds[0], hardware.num_chips),
        "operations": outcome["rest"],
        "peak_bytes": outcome["peak_bytes"],
    }


def total_ms(row: dict[str, Any]) -> float:
    """Return the milliseconds of a step."""
    return row["kernels_ms"] + row["other_ms"]


def main(settings: Settings) -> None:
    """Compile every combination and write the report."""
    libtpu = find_libtpu()
    make_results_directory(Path(settings.output))
    rows: list[dict[str, Any]] = []
    cases = list(itertools.product(settings.topologies, settings.models, settings.lengths))
    with tqdm(total=len(cases) * len(settings.methods), unit="program", desc="steps") as bar:
        for topology, model, length in cases:
            hardware, of_case = read_topology(topology), []
            for method in settings.methods:
                bar.set_postfix_str(f"{topology} {model} {length} {method}")
                batch = TOKENS // length * hardware.num_chips
                fields = {"model.dtype": "bfloat16", "model.remat": "full", "mesh.data": -1, "mesh.fsdp": 1}
                run = read_config("paper", model, method, length, batch, "auto", **fields)
                row = {"topology": topology, "model": model, "length": length, "method": method}
                of_case.append(row | measure(run, topology, model, libtpu))
                bar.update()
            (base,) = (row for row in of_case if row["method"] == RATIO_TO)
            for row in of_case:
                known = row["reason"] is None and base["reason"] is None
                rows.append(row | {"ratio": total_ms(row) / total_ms(base) if known else None})
    caption = (
        f"A training step by the compiler's cycles, {TOKENS:,} tokens on each chip, bfloat16, remat=full. "
        f"Ratio: to {RATIO_TO}."
    )
    labels = {name: name for name in ("topology", "model", "length", "method")}
    every = [row | operation for row in rows if row["reason"] is None for operation in row["operations"]]
    operations = table(every, labels | {name: name for name in ("name", "source", "jax_name")}, {"ms": ("ms", ".2f")})
    print(text_table("Most expensive operations outside kernels, without matmuls:", operations), end="\n\n")
    figures = {"ms": (total_ms, ".1f"), "kernels": ("kernels_ms", ".1f"), "matmuls": ("matmuls_ms", ".1f")}
    figures |= {"rest": (lambda row: row["other_ms"] - row["matmuls_ms"], ".1f"), "MFU": ("mfu", ".1%")}
    figures, labels = figures | {"ratio": ("ratio", ".3f")}, labels | {"attention": "attention"}
    write("step_cycles", settings, caption, rows, labels, figures, libtpu=libtpu_version(libtpu))


if __name__ == "__main__":
    command_line.run(main, Settings)
