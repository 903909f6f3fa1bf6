"""Tables and sentences with numbers for README.md and docs/, from the files in `results/`.

`make tables` runs the blocks of the pages that call these functions (cogapp), and a test fails if a page is not up to
date. A block is an HTML comment, so that only its output is shown.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from dape_jax.evaluation.options import Options
from dape_jax.evaluation.protocols import table_of
from dape_jax.evaluation.report import with_interval
from dape_jax.fields import sections
from dape_jax.hardware import mfu
from dape_jax.model.flops import model_flops_per_token
from dape_jax.planning.plan import run_to_plan
from dape_jax.recipes import read_config
from experiments.catalogue import EXPERIMENTS
from experiments.claims import NOT_IN_PAPER
from experiments.paper import paper_tables
from experiments.report import unbroken
from experiments.runs import read_runs
from experiments.verdicts import format_difference

RESULTS = Path(__file__).parents[1] / "results"
NAMES = {"nope": "NoPE", "rope": "RoPE", "t5": "T5", "alibi": "ALiBi", "kerple": "Kerple", "fire": "FIRE"}
NAMES |= {f"dape1x{n}-{base}": f"DAPE1x{n}-{NAMES[base]}" for n in (1, 3) for base in ("rope", "kerple")}
NAMES["kerple-8500-steps"] = "Kerple, 8,500 steps"
PAIR = ("kerple", "dape1x3-kerple")
NO_NUMBER = ("", "NaN", "not run", "refused", "does not fit")  # in columns of numbers
Row = dict[str, Any]


@cache
def read(name: str) -> Any:
    """Return the content of a JSON file in results/, a list of its lines for JSON lines."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def select(rows: Iterable[Row], **wanted: Any) -> Row:
    """Return the only row with these values."""
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def table(header: Iterable[Any], rows: Iterable[Iterable[Any]], *, is_text: bool = False) -> str:
    """Return a Markdown table. Columns of numbers after the first are right-aligned, unless `is_text`."""
    names = [f"{int(name):,}" if str(name).isdigit() else name for name in header]
    cells = [[str(cell) if is_text else unbroken(str(cell)) for cell in row] for row in rows]
    numeric = [
        bool(i) and not is_text and all(cell in NO_NUMBER or cell[0] in "+-<0123456789" for cell in column)
        for i, column in enumerate(zip(*cells, strict=True))
    ]
    rule = ["---:" if is_numeric else "---" for is_numeric in numeric]
    return "\n".join("| " + " | ".join(row) + " |" for row in (names, rule, *cells))


def plain(value: float) -> str:
    """Return a positive number with two significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def fixed(values: Iterable[float], digits: int = 2, unit: str = "") -> list[str]:
    """Return cells of numbers with a fixed number of digits after the point."""
    return [f"{value:,.{digits}f}{unit}" for value in values]


# ---- experiments


def seeds_of(experiment: str, method: str, train_length: int, length: int, group: str) -> list[float]:
    """Return the result of each seed at a length; lengths are ours, which are the paper's over four in all groups."""
    groups, at = read(f"{experiment}/report.json"), str(4 * length)
    return [
        values[at]
        for series in (groups[group]["series"] if group in groups else ())
        if (series["method"], series["train_length"]) == (method, 4 * train_length)
        for values in series["values"].values()
        if at in values
    ]


def counts() -> str:
    """Return a sentence on how many claims of the paper have each verdict."""
    names = [name for name, each in EXPERIMENTS.items() if each.source != NOT_IN_PAPER]
    claims = [claim for name in names for group in read(f"{name}/report.json").values() for claim in group["claims"]]
    found = Counter(claim["verdict"] for claim in claims)
    text = f"{found['holds']} hold, {found['contradicted']} are contradicted, {found['undecided']} are undecided"
    rest = found["not tested"]
    return f"Of the paper's {len(claims)} claims, judged with small models, {text} and {rest} not tested so far."


def converged(text: str) -> str:
    """Return the table of `converged`: means over seeds after fifty tokens per parameter, trained at 64 and 128."""
    methods = ("rope", "dape1x3-rope", "alibi", "kerple", "kerple-8500-steps", "dape1x1-kerple", "dape1x3-kerple")
    rows, lengths = [], (64, 128, 512, 4096)
    for trained, method in itertools.product((64, 128), methods):
        experiment = "equal_time" if method.endswith("steps") else "converged"
        values = [seeds_of(experiment, method, trained, length, f"converged-{text}") for length in lengths]
        if any(values):
            shown = (f"{fmean(each):.2f}" if each else "-" for each in values)
            rows.append([NAMES[method], trained, len(values[-1]), *shown])
    return table(["perplexity per byte", "trained at", "seeds", *lengths], rows)


def larger() -> str:
    """Return the table of the models with 25 million parameters, seed 0."""
    lengths = (256, 512, 1024, 4096, 16384)
    rows = ([NAMES[method], *larger_values(method, *lengths)] for method in ("rope", *PAIR))
    return table(["perplexity per byte at", *lengths], rows)


def larger_values(method: str, *lengths: int) -> list[str]:
    """Return the perplexities of seed 0 with 25 million parameters."""
    values = select(read("larger/report.json")["25m-math"]["series"], method=method)["values"]["0"]
    return fixed(values[str(length)] for length in lengths)


def table6() -> str:
    """Return our accuracies of table 6, mean and range over seeds, within and beyond the train lengths; the paper's."""
    methods, printed = ("kerple", "dape1x1-kerple", "dape1x3-kerple"), paper_tables()["table6"]
    papers = {row["task"]: dict(zip(printed["methods"], row["accuracy"], strict=True)) for row in printed["tasks"]}
    ours = {(each["task"], each["method"]): each for each in read("table6/report.json")["small"]["series"]}
    rows = []
    for task, part in itertools.product(dict.fromkeys(task for task, _ in ours), ("within", "beyond")):
        values = [list(ours[task, method][part].values()) if (task, method) in ours else [] for method in methods]
        shown = [f"{fmean(v):.1f} ({min(v):.1f} to {max(v):.1f})" if v else "not run" for v in values]
        paper = ", ".join(fixed(papers[task][method] for method in methods)) if part == "beyond" else ""
        rows.append([f"`{task}`", "1 to 40" if part == "within" else "41 to 500", *shown, paper])
    return table(["task", "lengths", *(NAMES[method] for method in methods), "in the paper"], rows)


# ---- evaluations


def evaluation(name: str, baseline: str | None = None) -> str:
    """Return the table that `eval.py` prints for DIRECTORY/lengths.json, delta.json or positions.json.

    With a baseline, it has a column for each row that is printed, because differences are long.
    """
    _, (_, rows, _) = table_of(name.rpartition("/")[2], read(f"{name}.json")["runs"], Options(baseline=baseline))
    header, *rows = zip(*rows, strict=True) if baseline else rows
    return table(header, rows)


def accuracies(name: str, lengths: Sequence[int]) -> str:
    """Return the table of `accuracy.json`, in %: means within and beyond the train lengths, and some lengths."""
    results, rows = read(f"{name}/accuracy.json")["runs"], []
    several = len({run["task"] for run in results}) > 1
    for run in results:
        at_lengths = [select(run["lengths"], length=length)["accuracy"] for length in lengths]
        values = fixed(100 * value for value in (run["trained"], run["score"], *at_lengths))
        rows.append([run["name"], *[run["task"]] * several, *values])
    return table(["", *["task"] * several, "<= 40", "> 40", *lengths], rows)


def needle() -> str:
    """Return the decrease in loss with a needle at the beginning of a window, by length."""
    lengths, rows = (128, 512, 2048), []
    for run in read("needle/needle.json")["runs"]:
        found = [select(run["lengths"], length=length, depth=0.0) for length in lengths]
        rows.append([run["name"], *(with_interval(each, "decrease_nats", ".2f") for each in found)])
    return table(["nats per digit", *lengths], rows)


def copying(*texts: str) -> str:
    """Return the decrease in loss from Kerple to DAPE1x3-Kerple in windows of 512, by what copying predicts."""
    rows = [
        [text, each["class"], f"{100 * each['share']:.1f} %", with_interval(each, "decrease_nats", ".3f")]
        for text, name in zip(texts, ("copying", "copying_prose"), strict=True)
        for each in read(f"{name}/copying.json")["runs"][1]["lengths"]
        if each["length"] == 512
    ]
    return table(["text", "copy", "share of the bytes", "decrease in loss, nats"], rows)


def repetition() -> str:
    """Return the share of bytes that copying from the context predicts, by its length."""
    lengths, rows = (64, 512, 4096), []
    for run in read("repetition/repetition.json")["runs"]:
        shares = (100 * select(run["lengths"], length=length)["predicted"] for length in lengths)
        rows.append([run["name"], *fixed(shares, 1, " %")])
    return table(["predictable by copying from", *(f"{length:,} bytes" for length in lengths)], rows)


def curves(text: str) -> str:
    """Return the validation loss of Kerple and DAPE1x3-Kerple during training at 64, mean of three seeds, in nats."""
    stored, rows, steps = read_runs(RESULTS)["converged"][f"converged-{text}"], [], (300, 1200, 5000)
    for method in PAIR:
        losses = [stored[f"{method}-xs-T64-seed{seed}"]["validation_nats"] for seed in range(3)]
        rows.append([NAMES[method], *fixed((fmean(of_seed[str(step)] for of_seed in losses) for step in steps), 3)])
    return table([f"{text}, after steps", *steps], rows)


# ---- README


def evidence() -> str:
    """Return the table of README.md."""

    def at(experiment: str, method: str, text: str) -> str:
        found = [seeds_of(experiment, method, 64, length, f"converged-{text}") for length in (64, 2048)]
        return ", ".join(fixed(map(fmean, found)))

    demo = [select(read("quickstart/lengths.json")["runs"], name=method)["lengths"] for method in PAIR]
    of_demo = [", ".join(fixed(select(of, length=at)["perplexity"] for at in (64, 2048))) for of in demo]
    math, prose = ([at("converged", method, text) for method in PAIR] for text in ("math", "prose"))
    math[0] += f"; 1.7 times the steps: {at('equal_time', 'kerple-8500-steps', 'math')}"
    large = [", ".join(larger_values(method, 256, 16384)) for method in PAIR]
    recall = [select(read("recall/accuracy.json")["runs"], name=method) for method in PAIR]
    scores = fixed((100 * run["score"] for run in recall), unit=" %")
    scores[0] += f" ({100 * recall[0]['trained']:.2f} % at the train lengths)"
    rows = (
        ("perplexity per byte at 64, the train length, and at 2,048 (one seed)", of_demo, "quickstart/lengths.json"),
        ("the same after 20 M tokens of SageMath's manual (mean of three seeds)", math, "README.md#converged"),
        ("25 M parameters, on an H100: at 256, the train length, and at 16,384 (one seed)", large, "README.md#larger"),
        ("at 64 and 2,048 after 20 M tokens of prose: no gain (mean of three seeds)", prose, "README.md#converged"),
        ("associative recall, lengths 60 to 480, trained on 1 to 40 (chance 6.25 %)", scores, "recall/accuracy.json"),
    )
    named = [
        [text, dape, kerple, f"[{file.split('/')[0].split('#')[-1]}](results/{file})"]
        for text, (kerple, dape), file in rows
    ]
    return table(["measurement", "DAPE1x3-Kerple", "Kerple", "numbers"], named)


# One layer on a CPU: names in the raw file, and what they compute.
CPU_LAYERS = {
    "blockwise": "DAPE, here",
    "torch eager": "DAPE, PyTorch eager",
    "torch.compile": "DAPE, `torch.compile`",
    "plain auto": "plain, here",
    "plain jax": "plain, `jax.nn.dot_product_attention`",
    "plain torch": "plain, PyTorch",
}


def cpu_layers(length: int, field: str) -> dict[str, float]:
    """Return time or memory of one layer on a CPU, forward and backward, in the order of `CPU_LAYERS`."""
    rows, at = read("attention/cpu.json")["rows"], {"direction": "backward", "length": length}
    return {name: select(rows, name=name, **at)[field] for name in CPU_LAYERS}


def layer_times() -> str:
    """Return time and memory of one layer at 2,048 tokens."""
    ms, mib = (cpu_layers(2048, field) for field in ("min_ms", "peak_mib"))
    rows = [[label, f"{ms[name] / 1000:.2f} s", f"{mib[name]:,.0f} MiB"] for name, label in CPU_LAYERS.items()]
    ratios = [of["torch.compile"] / of["blockwise"] for of in (ms, mib)]
    fused, blockwise = (h100()["layers", f"{name}/2048/1/backward"]["min_ms"] for name in ("fused", "blockwise"))
    return (
        "One attention layer of the 125M model, forward and backward at 2,048 tokens in float32, on two CPU cores\n"
        "([raw file](results/attention/cpu.json)); DAPE in PyTorch is the paper's listing:\n\n"
        f"{table(['layer', 'time', 'peak memory'], rows)}\n\n"
        f"The compiled listing takes {ratios[0]:.1f} times the time of DAPE here, {ratios[1]:.0f} times the memory.\n"
        f"On an H100, in bfloat16, DAPE takes {fused:.1f} ms with the fused kernel and {blockwise:.1f} ms without "
        "([GPUs](docs/gpu.md))."
    )


def layers_on_a_cpu() -> str:
    """Return time and memory of one layer on a CPU, beside PyTorch."""
    cases = (("512", 512, "min_ms", " ms"), ("2,048", 2048, "min_ms", " ms"))
    cases = (*cases, ("2,048, peak memory", 2048, "peak_mib", " MiB"))
    rows = ([label, *fixed(cpu_layers(at, field).values(), 0, unit)] for label, at, field, unit in cases)
    return table(["T", *CPU_LAYERS.values()], rows)


# ---- GPUs


def h100(name: str = "h100") -> dict[tuple[str, str], Row]:
    """Return what was measured on an H100, by group and case; the group of one layer's times is "layers"."""
    lines = read(f"gpu/{name}/results.jsonl")
    return {("layers" if line["case"].count("/") == 3 else line["group"], line["case"]): line for line in lines}


def h100_layers() -> str:
    """Return times and memory of one layer on an H100, and how many times as fast as `blockwise` the kernel is."""
    layers, rows = {case: line for (_, case), line in h100().items() if "min_ms" in line}, []
    shapes = ((512, 1), (512, 16), (1024, 8), (2048, 1), (2048, 8), (4096, 2), (8192, 1))
    for (length, batch), direction in itertools.product(shapes, ("forward", "backward")):
        names = ("fused", "blockwise", "dense", "torch.compile", "cudnn")
        found = [layers.get(f"{name}/{length}/{batch}/{direction}") for name in names]
        memory = [line and line["temporary_mib" if "temporary_mib" in line else "peak_mib"] for line in found]
        shown = [f"{line['min_ms']:.3f} ({mib:,.0f})" if line else "" for line, mib in zip(found, memory, strict=True)]
        fused, blockwise, *_ = found
        ratio = f"{blockwise['min_ms'] / fused['min_ms']:.1f}" if fused and blockwise else ""
        label = "forward" if direction == "forward" else "and backward"
        rows += [[f"{length:,}", batch, label, *shown[:2], ratio, *shown[2:]]] if any(shown) else []
    others = ("`dense`", "PyTorch, compiled listing", "cuDNN, no bias, no DAPE")
    return table(["T", "B", "", "`fused`", "`blockwise`", "`blockwise` / `fused`", *others], rows)


def h100_correct() -> str:
    """Return the number of shapes, and the largest relative error of each implementation, of the check on an H100."""
    rows, names = [], ("fused", "blockwise", "dense")
    for dtype in ("bfloat16", "float32"):
        lines = [line for (group, _), line in h100("h100_correct").items() if group == f"correct-{dtype}"]
        assert all(line[name]["right"] and line[name]["same_bits"] for line in lines for name in names)
        worst = (max(error for line in lines for error in line[name]["errors"].values()) for name in names)
        rows.append([dtype, len(lines), *(f"{error:.2g}" for error in worst)])
    return table(["largest relative error", "shapes", *(f"`{name}`" for name in names)], rows)


def h100_steps() -> str:
    """Return the times of training steps on an H100."""
    rows = []
    for name in ("fused", "blockwise"):
        line = h100("h100_steps")["steps", f"125m/dape1x3-kerple/512/32/{name}"]
        row = f"125M, DAPE1x3-Kerple, `{name}`", "32 x 512", f"{line['min_ms']:.1f} ms", f"{line['needed_gib']:.2f} GiB"
        rows.append([*row, f"{line['loss_nats']:.4f} (first step)"])
    line = h100()["train", "fused"]
    speed = f"{line['tokens_per_s']:,.0f} tokens/s"
    rows.append(["125M, `train.py`, 150 steps, `fused`", "32 x 512", speed, "", f"{line['loss_nats']:.3f} (last step)"])
    stored = read_runs(RESULTS)["larger"]["25m-math"]
    for method, name in (("kerple", "`dense`"), ("dape1x3-kerple", "`fused`"), ("rope", "cuDNN")):
        run = stored[f"{method}-25m-T256-seed0"]
        rows.append([f"25M, {NAMES[method]}, {name}", "512 x 256", f"{run['train_step_ms']:.0f} ms", "", ""])
    return table(["model", "batch", "training step", "XLA needs", "loss, nats"], rows)


def cuda_compiled() -> str:
    """Return figures of the CUDA kernels of the 125M model's layer, compiled without a GPU."""
    layer, rows = {"heads": 12, "head_dim": 64, "channels": 32, "width": 3}, []
    for row in read("cuda_compiled/cuda_compiled.json")["rows"]:
        if row.items() >= layer.items():
            cells = [row[field] for field in ("architecture", "kernel", "tile", "registers")]
            cells += [f"{row['spilled_loads']:,}", f"{row['shared_kib']:.0f} KiB", f"{row['clocks']:.1f}"]
            rows.append(cells)
    return table(["GPU", "kernel", "tile", "registers", "spills", "shared memory", "clocks a pair"], rows)


# ---- TPUs

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
CHIPS = ("v5e", "v5p", "v6e")


def tpu(directory: str, **wanted: Any) -> Row:
    """Return one row of `benchmarks.tpu`."""
    return select(read(f"tpu/{directory}/tpu.json")["rows"], **wanted)


def memory_and_times(row: Row) -> str:
    """Return the temporary memory of a layer, and the times of its kernels and of the rest."""
    times = [f"{row[field]:,.{2 if row[field] < 10 else 0}f}" for field in ("kernels_ms", "other_ms")]
    return f"{row['temporary_mib']:,.0f} MiB, {' + '.join(times)} ms"


def tpu_implementations() -> str:
    """Return memory, traffic and estimated time of one layer on v5e by implementation."""
    rows, parts = [], ("memory, MiB", "traffic, GB", "time, ms")
    for length in (2048, 8192, 32768, 131072):
        fused = tpu("lengths", length=length, direction="backward")
        cells = []
        for row in (fused, *(tpu(name, length=length) for name in ("blockwise", "naive")[: 1 + (length <= 8192)])):
            if row["fits"]:
                time = row["other_ms"] + (row["kernels_ms"] if row is fused else 0)
                cells += [f"{row['temporary_mib']:,.0f}", plain(row["moved_gb"]), plain(time)]
            else:
                cells += ["does not fit", "", ""]
        rows.append([f"{length:,}", *cells, *[""] * (9 - len(cells))])
    names = ("fused", "blockwise", "dense")
    return table(["T", *(f"`{n}`: {part}" if part == parts[0] else part for n in names for part in parts)], rows)


def tpu_roofline() -> str:
    """Return work, traffic and bundles of the kernel at T = 2,048 on v5e, with the times that each would take."""
    peak, bandwidth, found = 197e12, 819e9, tpu("lengths", length=2048, direction="backward")
    rows = []
    for name, each, ms in zip(("forward", "backward"), found["kernels"], found["kernels_of_passes_ms"], strict=True):
        flops = f"{each['flops'] / 1e9:.1f} GFLOP, {1e3 * each['flops'] / peak:.2f} ms"
        traffic = f"{each['bytes'] / 1e9:.2f} GB, {1e3 * each['bytes'] / bandwidth:.2f} ms"
        rows.append([name, flops, traffic, f"{ms:.2f} ms"])
    return table(["kernel", "executed, at the peak", "traffic, at the bandwidth", "instruction bundles"], rows)


def tpu_chips() -> str:
    """Return memory, times and seconds of compilation at T = 2,048 by chip and model."""
    models, rows = ("125m", "350m", "2.7b", "6.7b"), []
    for chip, topology in TOPOLOGIES.items():
        found = (tpu("chips", topology=topology, model=model) for model in models)
        shown = (f"{memory_and_times(row)}, {row['compile_s']:.0f} s" if row["fits"] else "refused" for row in found)
        rows.append([chip, *shown])
    return table(["chip", *(model.upper() for model in models)], rows)


def tpu_long() -> str:
    """Return memory and times of longer sequences by chip."""
    rows, lengths = [], (8192, 131072)
    for chip in CHIPS:
        at = {"topology": TOPOLOGIES[chip]}
        found = [tpu(f"chips-{length}", **at) for length in lengths if chip != "v5e"]
        found = found or [tpu("lengths", length=length, direction="backward") for length in lengths]
        rows.append([chip, *map(memory_and_times, [*found, tpu("chips-6.7b-8192", **at)])])
    return table(["chip", "125M, T = 8,192", "125M, T = 131,072", "6.7B, T = 8,192"], rows)


def tpu_plain() -> str:
    """Return times of a layer without a processor and with DAPE1x3 by chip."""
    rows = []
    for chip in CHIPS:
        found = [tpu("plain", topology=TOPOLOGIES[chip], processor=name) for name in ("plain", "dape")]
        cells = [
            text
            for row in found
            for text in (f"{' + '.join(fixed(row['kernels_of_passes_ms']))} ms", f"{row['other_ms']:.2f} ms")
        ]
        kernels, both = [row["kernels_ms"] for row in found], [step_ms(row) for row in found]
        rows.append([chip, *cells, *fixed(dape / without for without, dape in (kernels, both))])
    header = ("without a processor: kernels", "other", "DAPE1x3: kernels", "other", "ratio of kernels", "of both")
    return table(["chip", *header], rows)


def tpu_steps() -> str:
    """Return estimated times of whole training steps, relative to DAPE1x3-Kerple, and the paper's."""
    methods, rows = ("rope", "t5", "alibi", "kerple", "fire", "dape1x1-kerple", "dape1x3-kerple"), []
    for chip, model, length in itertools.product(("v5e", "v5p"), ("125m", "350m"), (512, 2048, 8192)):
        *others, ours = step_rows(f"{chip}-{model}", length, methods, model)
        share = f"{100 * ours['kernels_ms'] / step_ms(ours):.0f} %"
        ratios = fixed(row["ratio"] for row in others)
        rows.append([model.upper(), chip, f"{length:,}", *ratios, f"{step_ms(ours):,.0f} ms", share])
    printed = [each for each in paper_tables()["curves"] if (each["source"], each["size"]) == ("table 7", "350m")]
    *others, ours = (select(printed, method=method)["values"]["512"] for method in methods)
    rows.append(["350M", "paper, table 7", "512", *fixed(each / ours for each in others), f"{ours:.0f} ms", ""])
    return table(["model", "chip", "T", *(NAMES[method] for method in methods), "in its kernels"], rows)


def step_rows(name: str, length: int, methods: Sequence[str], model: str = "350m") -> list[Row]:
    """Return compiled training steps with the times of their parts."""
    found = read(f"step_cycles/{name}/step_cycles.json")["rows"]
    return [select(found, model=model, length=length, method=method) for method in methods]


def step_ms(row: Row) -> float:
    """Return the estimated time of a training step, or of a layer."""
    return row["kernels_ms"] + row["other_ms"]


def tpu_step_ratios() -> str:
    """Return the estimated times of steps with Kerple and with DAPE1x3-Kerple, now and before."""

    def cells(plain: Row, ours: Row) -> list[str]:
        return [*fixed(map(step_ms, (plain, ours)), 0, " ms"), f"{step_ms(ours) / step_ms(plain):.2f}"]

    rows = []
    for chip, model, length in itertools.product(("v5e", "v5p"), ("125m", "350m"), (128, 512, 2048, 8192)):
        plain, ours = step_rows(chip, length, PAIR, model)
        old = cells(*step_rows(f"{chip}-{model}", length, PAIR, model)) if length > 128 else [""] * 3
        differences = (f"{ours[name] - plain[name]:.0f} ms" for name in ("kernels_ms", "other_ms"))
        rows.append([model.upper(), chip, f"{length:,}", *cells(plain, ours), *differences, *old])
    names = [NAMES[method] for method in PAIR]
    before = (f"{name} before" for name in (*names, "ratio"))
    return table(["model", "chip", "T", *names, "ratio", "more in kernels", "elsewhere", *before], rows)


def tpu_step_parts() -> str:
    """Return the times of the parts of a training step of 350M on v5e, and RoPE beside NoPE, DAPE beside Kerple."""
    found = step_rows("v5e-350m-rope", 512, ("nope", "rope", *PAIR)) + step_rows("v5e", 2048, PAIR)
    rows = []
    for before, row in itertools.pairwise([found[0], *found]):
        parts = (row["kernels_ms"], row["matmuls_ms"], row["other_ms"] - row["matmuls_ms"], step_ms(row))
        is_beside = row["method"] in ("rope", "dape1x3-kerple")
        ratio = f"{step_ms(row) / step_ms(before):.2f} {NAMES[before['method']]}" if is_beside else ""
        cells = [*fixed(parts, 0, " ms"), ratio, f"{100 * row['mfu']:.0f} %"]
        rows.append([NAMES[row["method"]], f"{row['length']:,}", *cells])
    return table(["method", "T", "kernels", "matmuls", "rest", "all", "ratio to", "MFU"], rows)


def tpu_operations(length: int) -> str:
    """Return the ten most expensive operations of a training step outside kernels, without matmuls."""

    def cells(operation: Row) -> list[str]:
        path, _, name = operation["jax_name"].rpartition("/")
        again = "recomputed " if "rematted_computation" in path else "backward " if "transpose(jvp())" in path else ""
        place = operation["source"].removeprefix("dape_jax/")
        text = f"{again}`{name or operation['name']}`, {f'`{place}`' if place else 'by the compiler'}"
        return [text, f"{operation['ms']:.1f}"]

    columns = [map(cells, row["operations"]) for row in step_rows("v5e", length, PAIR)]
    header = [name for method in PAIR for name in (NAMES[method], "ms")]
    return table(header, (itertools.chain(*line) for line in zip(*columns, strict=True)))


def precision() -> str:
    """Return the largest errors of the last row's scores in 16-bit dtypes, in nats."""
    rows, found = [], read("precision/precision.json")["rows"]
    for bias, length in itertools.product(("alibi", "kerple", "kerple_power"), (512, 2048, 8192, 32768)):
        bf16, f16 = (select(found, bias=bias, length=length, dtype=dtype) for dtype in ("bfloat16", "float16"))
        values = [*(row[field] for row in (bf16, f16) for field in ("as_written", "dape")), f16["float32"]]
        shown = ("NaN" if x is None else "< 0.0001" if x < 5e-5 else plain(x) for x in values)
        rows.append([bias, f"{length:,}", *shown])
    return table(["bias", "T", "bfloat16: as written", "centred", "float16: as written", "centred", "float32"], rows)


# ---- planning, tasks, robustness, checkpoints of others


def h100_utilisation() -> str:
    """Return a sentence on the model FLOPs utilisation of training on an H100."""
    run = run_to_plan(read_config("configs/paper.py:125m,bias=kerple,processor=dape", ["--config.train.batch_size=32"]))
    rate = h100()["train", "fused"]["tokens_per_s"] * model_flops_per_token(run.model, run.train.train_length, 32)
    share = f"{mfu(rate, 'NVIDIA H100 80GB HBM3', 1):.0%}".replace("%", " %")
    return f"An H100, 125M parameters, 32 x 512 tokens, DAPE1x3-Kerple, Triton kernel: {share} (`results/gpu/h100`)."


COSTS = ("hours at 10 %", "chip-hours")


def best_plan(name: str) -> tuple[Row, Row, list[str]]:
    """Return the content of a plan, its best mesh, and the cells of `COSTS`."""
    content = read(f"planning/{name}/plan.json")
    plan = content["plans"][content["best"]]
    return content, plan, fixed((content["costs"][cost] for cost in ("hours", "chip_hours")), 1)


def gpu_plans() -> str:
    """Return the plans of the paper's four sizes on GPUs: memory by formula, and costs of all steps."""
    rows = []
    for name in ("125m-h100", "350m-a100", "2.7b-h200", "6.7b-h100", "6.7b-b200"):
        content, plan, costs = best_plan(name)
        row = [name.partition("-")[0], content["topology"], plan["mesh"], plan["remat"]]
        row += [f"{plan['peak_bytes'] / 2**30:.1f}", f"{content['largest_batch']:,} x {plan['length']}"]
        rows.append([*row, *costs])
    return table(["model", "GPUs", "mesh", "remat", "peak, GiB", "largest batch", *COSTS], rows)


def plans() -> str:
    """Return the plans of the paper's four sizes on TPU slices: compiled memory, and costs of all steps."""
    rows = []
    for name in ("125m", "125m-blockwise", "125m-T8192", "350m", "2.7b", "6.7b", "6.7b-T4096"):
        content, plan, costs = best_plan(name)
        held = plan["held_bytes"]["parameters"] + plan["held_bytes"]["moments"]
        row = [name, content["topology"], plan["mesh"].replace(",", ", "), f"{plan['batch_size']} x {plan['length']}"]
        rows.append([*row, *fixed(each / 2**30 for each in (held, plan["peak_bytes"])), *costs])
    header = ("model", "slice", "mesh", "batch x length", "state, GiB", "peak, GiB")
    return table([*header, *COSTS], rows)


def import_memory() -> str:
    """Return the memory that the import of published shapes takes."""
    rows, names = [], ("Pythia 2.8B", "Llama 3 8B, 6 of its 32 layers")
    for name, model in zip(names, read("pretrained/import_memory.json")["models"], strict=True):
        parameters, largest, peak = (model[f"{x}_bytes"] for x in ("parameter", "largest_tensor", "peak_read"))
        sizes = (parameters, largest, peak, peak - parameters)
        rows.append([name, *fixed((size / 1e9 for size in sizes), unit=" GB")])
    header = ["shapes", "parameters", "largest tensor, in float32", "peak of the import", "beyond the parameters"]
    return table(header, rows)


def continued() -> str:
    """Return perplexity by length after continuing a RoPE model in several ways."""
    lengths, found = (128, 256, 1024, 4096), read("retrofit/retrofit.json")["perplexity"]
    rows = ([way, *fixed(values[str(length)] for length in lengths)] for way, values in found.items())
    return table(["continued as", *lengths], rows)


def continued_pairs() -> str:
    """Return the paired differences of ways to continue, in per cent of perplexity."""
    lengths, rows = (128, 1024, 4096), []
    for pair in read("retrofit/retrofit.json")["pairs"]:
        found = [pair["changes"][str(length)] for length in lengths]
        shown = (format_difference(each["percent"], each["low"], each["high"], "%") for each in found)
        rows.append([pair["way"], pair["against"], *shown])
    return table(["", "against", *(f"at {length:,}" for length in lengths)], rows)


def continued_steps() -> str:
    """Return perplexity by the number of steps of continuation."""
    percents, steps, rows = (2, 5, 10, 20, 40), read("retrofit/retrofit.json")["steps"], []
    for way, length in itertools.product(("RoPE", "Kerple", "Kerple + DAPE1x3", "ALiBi + DAPE1x3"), (128, 1024)):
        found = (select(steps, way=way, percent=percent)["perplexity"][str(length)] for percent in percents)
        rows.append([way, f"{length:,}", *fixed(found)])
    return table(["continued as", "bytes", *(f"{percent} %" for percent in percents)], rows)


def continued_recall() -> str:
    """Return the recall of a passage at the beginning of the sequence, and where the loss breaks."""
    rows, found = [], read("retrofit/retrofit.json")["recall"]
    for each in found:
        breaks = ", ".join(f"{at:,}" if at else "no" for at in each["breaks_at"])
        rows.append([each["way"], *fixed(map(fmean, each["recall_nats"].values())), breaks])
    lengths = (f"recall at {int(at):,}, nats" for at in found[0]["recall_nats"])
    return table(["continued as", *lengths, "breaks at"], rows)


# ---- config


def config_fields() -> str:
    """Return the sections of the config, each with a table of its fields."""
    header, parts, titles = ("field", "meaning", "default", "type", "allowed values"), [], list[str]()
    for section in sections():
        name, _, choice = section.name.partition(" = ")
        if name not in titles or not choice:
            parts.append(f"## `{name}`{' of a task' if name in titles else ''}")
        titles.append(name)
        parts.append(f"**`{choice}`.** {_prose(section.summary)}" if choice else _prose(section.summary))
        rows = [
            [f"`{name}`", *map(_prose, (meaning, default, kind, allowed))]
            for name, kind, default, meaning, allowed in section.fields
        ]
        parts += [table(header, rows, is_text=True)] if rows else []
    return "\n\n".join(parts)


def _prose(text: str) -> str:
    """Return plain text as Markdown: code stays code, an option is code, and no other character is markup."""
    text = re.sub(r"(?<![`\w-])--\w+(?!`)", r"`\g<0>`", text)
    return re.sub(r"`[^`]*`|[*|<\\]", lambda found: found[0] if len(found[0]) > 1 else f"\\{found[0]}", text)
