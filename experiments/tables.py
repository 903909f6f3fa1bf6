"""Tables and sentences with numbers for README.md and docs/, from the files in `results/`.

`make tables` runs the blocks of the pages that call these functions (cogapp), and a test fails if a page is not up to
date. A block is an HTML comment, so that only its output is shown.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.catalogue import EXPERIMENTS
from experiments.methods import NOT_IN_PAPER, paper_tables

RESULTS = Path(__file__).parents[1] / "results"
NAMES = {
    "rope": "RoPE",
    "t5": "T5",
    "alibi": "ALiBi",
    "kerple": "Kerple",
    "fire": "FIRE",
    "dape1x1-kerple": "DAPE1x1-Kerple",
    "dape1x3-kerple": "DAPE1x3-Kerple",
    "dape1x3-rope": "DAPE1x3-RoPE",
    "kerple-8500-steps": "Kerple, 8,500 steps",
    "dape1x3-kerple-scores": "DAPE1x3 that reads the scores alone",
    "dape1x3-kerple-bias": "DAPE1x3 that reads the bias alone",
}
PAIR = ("kerple", "dape1x3-kerple")
Row = dict[str, Any]


@cache
def read(name: str) -> Any:
    """Return the content of a JSON file in results/."""
    return json.loads((RESULTS / name).read_text())


def select(rows: Iterable[Row], **wanted: Any) -> Row:
    """Return the only row with these values."""
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; the columns after the first whose cells are all numbers or empty are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [i > 0 and all(not row[i] or row[i][0] in "+-<0123456789" for row in cells) for i in range(len(header))]
    rule = ["---:" if is_numeric else "---" for is_numeric in numeric]
    return "\n".join("| " + " | ".join(row) + " |" for row in (list(header), rule, *cells))


def with_interval(row: Row, field: str, digits: int = 2) -> str:
    """Return a number with its interval, if it has one."""
    interval = "" if row["low"] is None else f" [{row['low']:.{digits}f}, {row['high']:.{digits}f}]"
    return f"{row[field]:.{digits}f}{interval}"


def plain(value: float) -> str:
    """Return a positive number with two significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


# ---- experiments


def groups_of(experiment: str) -> dict[str, Row]:
    """Return the groups of an experiment's report."""
    return read(f"{experiment}/report.json")


def seeds_of(
    experiment: str, method: str, train_length: int, length: int, group: str, size: str = "125m"
) -> list[float]:
    """Return the result of each seed at a length; lengths are ours, which are the paper's over four in all groups."""
    series = select(groups_of(experiment)[group]["series"], method=method, size=size, train_length=4 * train_length)
    return [values[str(4 * length)] for values in series["values"].values()]


def counts() -> str:
    """Return a sentence on how many claims of the paper have each verdict."""
    names = [name for name, each in EXPERIMENTS.items() if each.source != NOT_IN_PAPER]
    total = sum(len(EXPERIMENTS[name].claims) for name in names)
    found = Counter(claim["verdict"] for _, _, claim in judged(names))
    rest = total - sum(found.values())
    text = f"{found['holds']} hold, {found['contradicted']} are contradicted, {found['undecided']} are undecided"
    return f"Of the paper's {total} claims, judged with small models, {text} and {rest} not tested so far."


def judged(names: Iterable[str], groups: str = "") -> list[tuple[str, str, Row]]:
    """Return experiment, group and verdict of the claims of experiments that were tested, on the groups with a name."""
    return [
        (name, group, claim)
        for name in names
        for group, content in (groups_of(name) if (RESULTS / name / "report.json").exists() else {}).items()
        for claim in content["claims"]
        if claim["verdict"] != "not tested" and groups in group
    ]


def verdicts(*names: str, group: str = "", verdict: str = "") -> str:
    """Return a table of the tested claims of experiments: verdict, and our difference that decides."""
    rows = []
    for name, _, claim in judged(names or [n for n, e in EXPERIMENTS.items() if e.source != NOT_IN_PAPER], group):
        if verdict in ("", claim["verdict"]):
            unit, digits = (" %", 1) if claim["unit"] == "%" else ("", 2)
            shown = f"{claim['difference']:+.{digits}f}{unit} [{claim['low']:+.{digits}f}, {claim['high']:+.{digits}f}]"
            seeds = claim["seeds"]
            rows.append([name, claim["claim"], f"**{claim['verdict']}**", f"{claim['deciding']}: {shown}", seeds])
    return table(["experiment", "claim, with the paper's lengths", "verdict", "decided by", "seeds"], rows)


def means(experiment: str, methods: Sequence[str], trained: int, lengths: Sequence[int], **more: str) -> str:
    """Return a table of the means over seeds by length, of models trained at one of our lengths."""
    more = {"group": "small-stdlib"} | more
    rows = [
        [
            NAMES.get(method, method),
            *(f"{fmean(seeds_of(experiment, method, trained, at, **more)):.2f}" for at in lengths),
        ]
        for method in methods
    ]
    return table([f"trained at {trained}", *(f"{length:,}" for length in lengths)], rows)


def converged(text: str) -> str:
    """Return the table of `converged`: means over seeds after fifty tokens per parameter, trained at 64 and 128."""
    methods = ("rope", "dape1x3-rope", "alibi", "kerple", "kerple-8500-steps", "dape1x1-kerple", "dape1x3-kerple")
    rows, group = [], f"converged-{text}"
    for trained, method in ((trained, method) for trained in (64, 128) for method in methods):
        experiment = "converged" if method in EXPERIMENTS["converged"].methods else "equal_time"
        found = groups_of(experiment)[group]["series"] if group in groups_of(experiment) else []
        if any((each["method"], each["train_length"]) == (method, 4 * trained) for each in found):
            values = [
                seeds_of(experiment, method, trained, at, group) if at >= trained else [] for at in (64, 128, 512, 4096)
            ]
            shown = [f"{fmean(each):.2f}" if each else "-" for each in values]
            rows.append([NAMES[method], trained, len(values[-1]), *shown])
    return table(["perplexity per byte", "trained at", "seeds", "64", "128", "512", "4,096"], rows)


def larger() -> str:
    """Return the table of the models with 25 million parameters, seed 0."""
    rows = []
    for method in ("rope", "kerple", "dape1x3-kerple"):
        values = larger_values(method)
        rows.append([NAMES[method], *(f"{values[str(at)]:.2f}" for at in (256, 512, 1024, 4096, 16384))])
    return table(["perplexity per byte at", "256", "512", "1,024", "4,096", "16,384"], rows)


def larger_values(method: str) -> dict[str, float]:
    """Return the perplexities of seed 0 with 25 million parameters, by length."""
    return select(groups_of("larger")["25m-math"]["series"], method=method)["values"]["0"]


def table6(methods: Sequence[str] = ("kerple", "dape1x1-kerple", "dape1x3-kerple")) -> str:
    """Return our accuracies of table 6, mean and range over seeds, within and beyond the train lengths; the paper's."""
    printed = paper_tables()["table6"]
    papers = {row["task"]: dict(zip(printed["methods"], row["accuracy"], strict=True)) for row in printed["tasks"]}
    rows = []
    for task in dict.fromkeys(each["task"] for each in groups_of("table6")["small"]["series"]):
        of_task = {each["method"]: each for each in groups_of("table6")["small"]["series"] if each["task"] == task}
        for part, lengths in (("within", "1 to 40"), ("beyond", "41 to 500")):
            values = [list(of_task[m][part].values()) if m in of_task else [] for m in methods]
            shown = [f"{fmean(v):.1f} ({min(v):.1f} to {max(v):.1f})" if v else "" for v in values]
            paper = ", ".join(f"{papers[task][method]:.2f}" for method in methods) if part == "beyond" else ""
            rows.append([f"`{task}`", lengths, *shown, paper])
    return table(["task", "lengths", *(NAMES[method] for method in methods), "in the paper"], rows)


# ---- evaluations


def perplexities(name: str) -> str:
    """Return the table of `lengths.json`: perplexity by length, with intervals."""
    results = read(f"{name}/lengths.json")["runs"]
    lengths = [f"{each['length']:,}" for each in results[0]["lengths"]]
    return table(
        ["", *lengths], [[run["name"], *(with_interval(at, "perplexity") for at in run["lengths"])] for run in results]
    )


def deltas(name: str) -> str:
    """Return the table of `delta.json`: perplexity with the context, with the last tokens only, and the difference."""
    results, rows = read(f"{name}/delta.json")["runs"], []
    for of_length in zip(*(run["deltas"] for run in results), strict=True):
        length = of_length[0]["length"]
        rows.append([f"P({length})", *(f"{each['full']:.2f}" for each in of_length)])
        rows.append([f"P({length}, local)", *(f"{each['local']:.2f}" for each in of_length)])
        rows.append([f"ΔP({length})", *(with_interval(each, "delta") for each in of_length)])
    return table(["", *(run["name"] for run in results)], rows)


def positions(name: str) -> str:
    """Return the table of `positions.json`: loss by position, and where it breaks."""
    rows, octave = [], ""
    for run in read(f"{name}/positions.json")["runs"]:
        found = run["positions"]
        octave = f"{found['length'] // 2}..{found['length']}"
        breaks_at = "-" if found["breaks_at"] is None else found["breaks_at"]
        rows.append([run["name"], f"{found['reference_nats']:.3f}", f"{found['last_octave_nats']:.3f}", breaks_at])
    return table(["", "around the train length", octave, "breaks at"], rows)


def accuracies(name: str, lengths: Sequence[int]) -> str:
    """Return the table of `accuracy.json`, in %: means within and beyond the train lengths, and some lengths."""
    results = read(f"{name}/accuracy.json")["runs"]
    several = len({run["task"] for run in results}) > 1
    rows = []
    for run in results:
        of_length = {each["length"]: each["accuracy"] for each in run["lengths"]}
        values = [run["trained"], run["score"], *(of_length[length] for length in lengths)]
        rows.append([run["name"], *[run["task"]] * several, *(f"{100 * value:.2f}" for value in values)])
    return table(["", *["task"] * several, "<= 40", "> 40", *map(str, lengths)], rows)


def needle() -> str:
    """Return the decrease in loss with a needle at the beginning of a window, by length."""
    results = read("needle/needle.json")["runs"]
    lengths = sorted({each["length"] for each in results[0]["lengths"]})
    rows = [
        [run["name"], *(with_interval(select(run["lengths"], length=at, depth=0.0), "decrease_nats") for at in lengths)]
        for run in results
    ]
    return table(["nats per digit", *(f"{length:,}" for length in lengths)], rows)


def copying(*texts: str) -> str:
    """Return the decrease in loss from Kerple to DAPE1x3-Kerple in windows of 512, by what copying predicts."""
    rows = []
    for text, name in zip(texts, ("copying", "copying_prose"), strict=True):
        for each in (each for each in read(f"{name}/copying.json")["runs"][1]["lengths"] if each["length"] == 512):
            share = f"{100 * each['share']:.1f} %"
            rows.append([text, each["class"], share, with_interval(each, "decrease_nats", 3)])
    return table(["text", "copy", "share of the bytes", "decrease in loss, nats"], rows)


def repetition() -> str:
    """Return the share of bytes that copying from the context predicts, by its length."""
    results = read("repetition/repetition.json")["runs"]
    lengths = (64, 512, 4096)
    rows = [
        [run["name"], *(f"{100 * select(run['lengths'], length=at)['predicted']:.1f} %" for at in lengths)]
        for run in results
    ]
    return table(["predictable by copying from", *(f"{length:,} bytes" for length in lengths)], rows)


def curves(text: str, steps: Sequence[int] = (300, 1200, 5000)) -> str:
    """Return the validation loss of Kerple and DAPE1x3-Kerple during training at 64, mean of three seeds, in nats."""
    from experiments.runs import read_runs  # imports JAX

    stored, rows = read_runs(RESULTS)["converged"][f"converged-{text}"], []
    for method in PAIR:
        losses = [stored[f"{method}-xs-T64-seed{seed}"]["validation_nats"] for seed in range(3)]
        rows.append([NAMES[method], *(f"{fmean(of_seed[str(step)] for of_seed in losses):.3f}" for step in steps)])
    return table([f"{text}, after steps", *(f"{step:,}" for step in steps)], rows)


# ---- README


def evidence() -> str:
    """Return the table of README.md."""

    def at(experiment: str, method: str, text: str) -> str:
        return ", ".join(
            f"{fmean(seeds_of(experiment, method, 64, length, f'converged-{text}')):.2f}" for length in (64, 2048)
        )

    demo = []
    for method in PAIR:
        lengths = select(read("quickstart/lengths.json")["runs"], name=method)["lengths"]
        demo.append(", ".join(f"{select(lengths, length=length)['perplexity']:.2f}" for length in (64, 2048)))
    math, prose = ([at("converged", method, text) for method in PAIR] for text in ("math", "prose"))
    math[0] += f"; 1.7 times the steps: {at('equal_time', 'kerple-8500-steps', 'math')}"
    large = [f"{larger_values(method)['256']:.2f}, {larger_values(method)['16384']:.2f}" for method in PAIR]
    recall = [select(read("recall/accuracy.json")["runs"], name=method) for method in PAIR]
    scores = [f"{100 * run['score']:.2f} %" for run in recall]
    scores[0] += f" ({100 * recall[0]['trained']:.2f} % at the train lengths)"
    rows = (
        ("perplexity per byte at 64, the train length, and at 2,048 (one seed)", demo, "quickstart/lengths.json"),
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


def layer_times() -> str:
    """Return a paragraph on the time of one layer at 2,048 tokens."""
    rows = read("attention/cpu.json")["rows"]
    ours, eager = (select(rows, length=2048, direction="backward", name=name) for name in ("blockwise", "torch eager"))
    fused, blockwise = (h100()["layers", f"{name}/2048/1/backward"]["min_ms"] for name in ("fused", "blockwise"))
    return (
        "One DAPE layer of the 125M model, forward and backward at 2,048 tokens in float32, takes "
        f"{ours['min_ms'] / 1000:.2f} s here and\n{eager['min_ms'] / 1000:.2f} s with the paper's listing in eager "
        f"PyTorch on the same CPU, at a peak of {ours['peak_mib']:,.0f} and {eager['peak_mib']:,.0f} MiB ([raw file]"
        f"(results/attention/cpu.json)).\nOn an H100, in bfloat16, it takes {fused:.1f} ms with the fused kernel and "
        f"{blockwise:.1f} ms without ([GPUs](docs/gpu.md))."
    )


def layers_on_a_cpu() -> str:
    """Return time and memory of one layer on a CPU, beside PyTorch."""
    names = ("blockwise", "torch eager", "torch.compile", "plain jax", "plain torch")
    header = ("here (`blockwise`)", "PyTorch eager", "`torch.compile`", "plain attention, JAX", "plain, PyTorch")
    rows = []
    for label, length, field, unit in (
        ("512", 512, "min_ms", "ms"),
        ("2,048", 2048, "min_ms", "ms"),
        ("2,048, peak memory", 2048, "peak_mib", "MiB"),
    ):
        found = [select(read("attention/cpu.json")["rows"], length=length, direction="backward", name=n) for n in names]
        rows.append([label, *(f"{row[field]:,.0f} {unit}" for row in found)])
    return table(["T", *header], rows)


# ---- GPUs


def h100(name: str = "h100") -> dict[tuple[str, str], Row]:
    """Return what was measured on an H100, by group and case; the group of one layer's times is "layers"."""
    lines = [json.loads(line) for line in (RESULTS / f"gpu/{name}/results.jsonl").read_text().splitlines()]
    return {("layers" if line["case"].count("/") == 3 else line["group"], line["case"]): line for line in lines}


def h100_layers() -> str:
    """Return times and memory of one layer on an H100, and how many times as fast as `blockwise` the kernel is."""
    layers, rows = {case: line for (_, case), line in h100().items() if "min_ms" in line}, []
    for length, batch in ((512, 1), (512, 16), (1024, 8), (2048, 1), (2048, 8), (4096, 2), (8192, 1)):
        for direction, shown in (("forward", "forward"), ("backward", "and backward")):
            row = []
            for name in ("fused", "blockwise", "", "dense", "torch.compile", "cudnn"):
                line = layers.get(f"{name}/{length}/{batch}/{direction}")
                memory = line and line[next(field for field in ("temporary_mib", "peak_mib") if field in line)]
                row.append(f"{line['min_ms']:.3f} ({memory:,.0f})" if line else "")
            if row[0] and row[1]:
                fused, blockwise = (
                    layers[f"{n}/{length}/{batch}/{direction}"]["min_ms"] for n in ("fused", "blockwise")
                )
                row[2] = f"{blockwise / fused:.1f}"
            rows += [[f"{length:,}", batch, shown, *row]] if any(row) else []
    others = ("`dense`", "PyTorch, compiled listing", "cuDNN, no bias, no DAPE")
    return table(["T", "B", "", "`fused`", "`blockwise`", "`blockwise` / `fused`", *others], rows)


def h100_correct() -> str:
    """Return the number of shapes, and the largest relative error of each implementation, of the check on an H100."""
    checked, rows = h100("h100_correct"), []
    for dtype in ("bfloat16", "float32"):
        lines = [line for (group, _), line in checked.items() if group == f"correct-{dtype}"]
        names = ("fused", "blockwise", "dense")
        assert all(line[name]["right"] and line[name]["same_bits"] for line in lines for name in names)
        worst = [max(error for line in lines for error in line[name]["errors"].values()) for name in names]
        rows.append([dtype, len(lines), *(f"{error:.2g}" for error in worst)])
    return table(["largest relative error", "shapes", "`fused`", "`blockwise`", "`dense`"], rows)


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
    from experiments.runs import read_runs  # imports JAX

    stored = read_runs(RESULTS)["larger"]["25m-math"]
    for method, name in (("kerple", "`dense`"), ("dape1x3-kerple", "`fused`"), ("rope", "cuDNN")):
        run = stored[f"{method}-25m-T256-seed0"]
        rows.append([f"25M, {NAMES[method]}, {name}", "512 x 256", f"{run['train_step_ms']:.0f} ms", "", ""])
    return table(["model", "batch", "training step", "XLA needs", "loss, nats"], rows)


def gpu_compiled() -> str:
    """Return launches, temporary memory and traffic of one layer, compiled for an H200."""
    now, before = (read(f"gpu_compiled/{part}gpu_compiled.json")["rows"] for part in ("", "before/"))
    rows = []
    for length in (512, 2048, 8192):
        for batch in (1, 8):
            cells = []
            names = ("fused", "fused", "blockwise", "dense", "cudnn")
            for source, name in zip((now, before, now, now, now), names, strict=True):
                row = select(source, implementation=name, length=length, batch=batch, direction="backward")
                memory = row["temporary_mib"]
                shown = f"{memory:,.0f} MiB" if memory < 1e4 else f"{memory / 1024:,.0f} GiB"
                traffic = f"{row['gbyte']:,.1f}" if row["gbyte"] < 1000 else f"{row['gbyte']:,.0f}"
                cells.append(f"{row['launches']:,}; {shown}; {traffic} GB")
            rows.append([f"{length:,}", batch, *cells])
    earlier = "`fused`, 128 rows in each block (7520777)"
    return table(["T", "B", "`fused`", earlier, "`blockwise`, 128 rows", "`dense`", "cuDNN, no bias, no DAPE"], rows)


# ---- TPUs


def tpu(directory: str, **wanted: Any) -> Row:
    """Return one row of `benchmarks.tpu`."""
    return select(read(f"tpu/{directory}/tpu.json")["rows"], **wanted)


def tpu_implementations() -> str:
    """Return memory, traffic and estimated time of one layer on v5e by implementation."""
    rows = []
    for length in (2048, 8192, 32768, 131072):
        found = [tpu("lengths", length=length, direction="backward"), tpu("blockwise", length=length)]
        found += [tpu("naive", length=length)] if length <= 8192 else []
        cells = []
        for row in found:
            if not row["fits"]:
                cells += ["does not fit", "", ""]
                continue
            time = row["other_ms"] + (row["kernels_ms"] if row is found[0] else 0)
            cells += [f"{row['temporary_mib']:,.0f} MiB", f"{plain(row['moved_gb'])} GB", f"{plain(time)} ms"]
        rows.append([f"{length:,}", *cells, *[""] * (9 - len(cells))])
    parts = ("memory", "traffic", "time")
    header = [
        f"`{name}`: memory" if part == "memory" else part for name in ("fused", "blockwise", "dense") for part in parts
    ]
    return table(["T", *header], rows)


def tpu_roofline() -> str:
    """Return work, traffic and bundles of the kernel at T = 2,048 on v5e, with the times that each would take."""
    peak, bandwidth = 197e12, 819e9
    found = tpu("lengths", length=2048, direction="backward")
    rows = []
    for name, each, bundles in zip(
        ("forward", "backward"), found["kernels"], found["kernels_of_passes_ms"], strict=True
    ):
        flops = f"{each['flops'] / 1e9:.1f} GFLOP, {1e3 * each['flops'] / peak:.2f} ms"
        traffic = f"{each['bytes'] / 1e9:.2f} GB, {1e3 * each['bytes'] / bandwidth:.2f} ms"
        rows.append([name, flops, traffic, f"{bundles:.2f} ms"])
    return table(["kernel", "executed, at the peak", "traffic, at the bandwidth", "instruction bundles"], rows)


TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def tpu_chips() -> str:
    """Return memory, times and seconds of compilation at T = 2,048 by chip and model."""
    rows = []
    for chip, topology in TOPOLOGIES.items():
        cells = []
        for model in ("125m", "350m", "2.7b", "6.7b"):
            row = tpu("chips", topology=topology, model=model)
            shown = row["fits"] and f"{_memory_and_times(row)}, {row['compile_s']:.0f} s"
            cells.append(shown or "refused")
        rows.append([chip, *cells])
    return table(["chip", "125M", "350M", "2.7B", "6.7B"], rows)


def _memory_and_times(row: Row) -> str:
    times = [f"{row[field]:,.2f}" if row[field] < 10 else f"{row[field]:,.0f}" for field in ("kernels_ms", "other_ms")]
    return f"{row['temporary_mib']:,.0f} MiB, {' + '.join(times)} ms"


def tpu_long() -> str:
    """Return memory and times of longer sequences by chip."""
    rows = []
    for chip in ("v5e", "v5p", "v6e"):
        found = [
            tpu("lengths", length=length, direction="backward")
            if chip == "v5e"
            else tpu(f"chips-{length}", topology=TOPOLOGIES[chip])
            for length in (8192, 131072)
        ]
        found.append(tpu("chips-6.7b-8192", topology=TOPOLOGIES[chip]))
        rows.append([chip, *map(_memory_and_times, found)])
    return table(["chip", "125M, T = 8,192", "125M, T = 131,072", "6.7B, T = 8,192"], rows)


def tpu_plain() -> str:
    """Return times of a layer without a processor and with DAPE1x3 by chip."""
    rows = []
    for chip in ("v5e", "v5p", "v6e"):
        without, dape = (tpu("plain", topology=TOPOLOGIES[chip], processor=name) for name in ("plain", "dape"))
        cells = []
        for row in (without, dape):
            kernels = " + ".join(f"{ms:.2f}" for ms in row["kernels_of_passes_ms"])
            cells += [f"{kernels} ms", f"{row['other_ms']:.2f} ms"]
        ratio = dape["kernels_ms"] / without["kernels_ms"]
        both = (dape["kernels_ms"] + dape["other_ms"]) / (without["kernels_ms"] + without["other_ms"])
        rows.append([chip, *cells, f"{ratio:.2f}", f"{both:.2f}"])
    header = ("without a processor: kernels", "other", "DAPE1x3: kernels", "other", "ratio of kernels", "of both")
    return table(["chip", *header], rows)


def tpu_steps() -> str:
    """Return estimated times of whole training steps, relative to DAPE1x3-Kerple, and the paper's."""
    methods = ("rope", "t5", "alibi", "kerple", "fire", "dape1x1-kerple")
    rows = []
    for chip in ("v5e", "v5p"):
        for model in ("125m", "350m"):
            found = read(f"step_cycles/{chip}-{model}/step_cycles.json")["rows"]
            for length in (512, 2048, 8192):
                ratios = [f"{select(found, length=length, method=method)['ratio']:.2f}" for method in methods]
                ours = select(found, length=length, method="dape1x3-kerple")
                ms = ours["kernels_ms"] + ours["other_ms"]
                share = f"{100 * ours['kernels_ms'] / ms:.0f} %"
                rows.append([model.upper(), chip, f"{length:,}", *ratios, f"{ms:,.0f} ms", share])
    printed = {
        curve["method"]: curve["values"]["512"]
        for curve in paper_tables()["curves"]
        if curve["source"] == "table 7" and curve["size"] == "350m"
    }
    ours = printed["dape1x3-kerple"]
    ratios = [f"{printed[method] / ours:.2f}" for method in methods]
    rows.append(["350M", "paper, table 7", "512", *ratios, f"{ours:.0f} ms", ""])
    return table(["model", "chip", "T", *(NAMES[m] for m in (*methods, "dape1x3-kerple")), "in its kernels"], rows)


def precision() -> str:
    """Return the largest errors of the last row's scores in 16-bit dtypes, in nats."""

    def shown(value: float | None) -> str:
        return "NaN" if value is None else "< 0.0001" if value < 5e-5 else plain(value)

    rows = []
    for bias in ("alibi", "kerple", "kerple_power"):
        for length in (512, 2048, 8192, 32768):
            found = [
                select(read("precision/precision.json")["rows"], bias=bias, length=length, dtype=dtype)
                for dtype in ("bfloat16", "float16")
            ]
            values = [row[field] for row in found for field in ("as_written", "dape")] + [found[1]["float32"]]
            rows.append([bias, f"{length:,}", *map(shown, values)])
    return table(["bias", "T", "bfloat16: as written", "centred", "float16: as written", "centred", "float32"], rows)


# ---- planning, tasks, robustness, checkpoints of others


def plans() -> str:
    """Return the plans of the paper's four sizes: memory and lower bounds of the time of a step."""
    rows = []
    order = ("125m", "125m-blockwise", "125m-T8192", "350m", "2.7b", "6.7b", "6.7b-T4096")
    for name, content in ((name, read(f"planning/{name}/plan.json")) for name in order):
        plan = content["plans"][content["best"]]
        held, gib = plan["held_bytes"], 2**30
        times = [f"{1e3 * plan['roofline_seconds'][part]:,.0f} ms" for part in ("compute", "memory", "interconnect")]
        memory = f"{(held['parameters'] + held['moments']) / gib:.2f} GiB", f"{plan['peak_bytes'] / gib:.2f} GiB"
        received = f"{sum(each['num_bytes'] for each in plan['collectives']) / 1e9:.1f} GB"
        batch = f"{plan['batch_size']} x {plan['length']}"
        rows.append(
            [name, content["topology"], plan["mesh"], batch, *memory, received, *times, f"{100 * plan['mfu']:.0f} %"]
        )
    times = ("compute", "memory", "interconnect", "MFU at most")
    header = ("model", "slice", "mesh", "batch x length", "parameters and moments", "peak", "received", *times)
    return table(header, rows)


def sampling() -> str:
    """Return the range, over tasks, of the time that a batch at length 40 takes."""
    batches = [select(rows, length=40) for rows in read("tasks/sampling.json")["tasks"].values()]
    milliseconds = [sum(batch[f"{part}_ms"] for part in ("sample", "solve", "tape")) for batch in batches]
    return (
        f"A batch of 128 strings of length 40 takes {min(milliseconds):.2g} to {max(milliseconds):.2g} ms, by task\n"
        "(`python -m benchmarks.tasks`, `results/tasks/`)."
    )


def dispatch() -> str:
    """Return a sentence on the host's work for a step."""
    return f"The host's work for a step of 12 layers takes {read('dispatch/dispatch.json')['median_ms']['sum']:.1f} ms."


def import_memory() -> str:
    """Return the memory that the import of published shapes takes."""
    rows = []
    names = ("Pythia 2.8B", "Llama 3 8B, 6 of its 32 layers")
    for model, name in zip(read("pretrained/import_memory.json")["models"], names, strict=True):
        parameters, peak = model["parameter_bytes"], model["peak_read_bytes"]
        values = (parameters, model["largest_tensor_bytes"], peak, peak - parameters)
        rows.append([name, *(f"{value / 1e9:.2f} GB" for value in values)])
    return table(
        ["shapes", "parameters", "largest tensor, in float32", "peak of the import", "beyond the parameters"], rows
    )


def continued() -> str:
    """Return perplexity by length after continuing a RoPE model in several ways."""
    found = read("retrofit/retrofit.json")["perplexity"]
    lengths = (128, 256, 1024, 4096)
    rows = [[way, *(f"{values[str(length)]:.2f}" for length in lengths)] for way, values in found.items()]
    return table(["continued as", *(f"{length:,}" for length in lengths)], rows)


def continued_pairs() -> str:
    """Return the paired differences of ways to continue, in per cent of perplexity."""
    rows = []
    for pair in read("retrofit/retrofit.json")["pairs"]:
        changes = [pair["changes"][str(length)] for length in (128, 1024, 4096)]
        shown = [f"{each['percent']:+.1f} % [{each['low']:+.1f}, {each['high']:+.1f}]" for each in changes]
        rows.append([pair["way"], pair["against"], *shown])
    return table(["", "against", "at 128", "at 1,024", "at 4,096"], rows)


def continued_steps() -> str:
    """Return perplexity by the number of steps of continuation."""
    steps = {(each["way"], each["percent"]): each["perplexity"] for each in read("retrofit/retrofit.json")["steps"]}
    percents = (2, 5, 10, 20, 40)
    rows = [
        [way, f"{length:,}", *(f"{steps[way, percent][str(length)]:.2f}" for percent in percents)]
        for way in ("RoPE", "Kerple", "Kerple + DAPE1x3", "ALiBi + DAPE1x3")
        for length in (128, 1024)
    ]
    return table(["continued as", "bytes", *(f"{percent} %" for percent in percents)], rows)


def continued_recall() -> str:
    """Return the recall of a passage at the beginning of the sequence, and where the loss breaks."""
    rows = []
    for each in read("retrofit/retrofit.json")["recall"]:
        gains = [f"{fmean(of_seeds):.2f}" for of_seeds in each["recall_nats"].values()]
        rows.append([each["way"], *gains, ", ".join(f"{at:,}" if at else "no" for at in each["breaks_at"])])
    lengths = read("retrofit/retrofit.json")["recall"][0]["recall_nats"]
    return table(["continued as", *(f"recall at {int(at):,}, nats" for at in lengths), "breaks at"], rows)
