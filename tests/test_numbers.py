"""Numbers of README, the documentation and the recipes are those of the committed raw files."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks import gpu_cases
from benchmarks.gpu import read_results
from dape_jax.tasks import CHE
from experiments.catalogue import EXPERIMENTS, NOT_IN_PAPER, paper_tables

ROOT = Path(__file__).parents[1]

# A statement of a page with # for each number, and the numbers in the raw files. Pages round as they like.
Statement = tuple[str, list[float]]
NUMBER = r"(-?\d+(?:,\d{3})*(?:\.\d+)?)"


def find(text: str, template: str) -> re.Match[str] | None:
    """Return the place of a template in a text, in which line breaks count as spaces."""
    pattern = re.escape(" ".join(template.split())).replace(r"\ ", " ").replace(r"\#", NUMBER)
    return re.search(r"(?<![\d.,-])" + pattern + r"(?!\d)", " ".join(text.split()))


def difference(text: str, statement: Statement) -> str | None:
    """Return how a text differs from a statement, or None."""
    template, values = statement
    found = find(text, template)
    if not found:
        return f"has no {template!r}"
    for shown, value in zip(found.groups(), values, strict=True):
        digits = len(shown.partition(".")[2])
        if shown.replace(",", "") != f"{value:.{digits}f}":
            return f"has {found.group()!r}, not {value}"
    return None


@cache
def read(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def select(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Return the only row with these values."""
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def by_length(name: str, run: str, key: str = "perplexity", **wanted: Any) -> dict[int, Any]:
    """Return a figure of a run of a results file, by length."""
    return {each["length"]: each[key] for each in select(read(name)["runs"], name=run, **wanted)["lengths"]}


ON_MATH, ON_PROSE = "converged/converged-math", "converged/converged-prose"  # for `claims_of`


def differences_of(name: str) -> dict[str, float]:
    """Return the effect of each claim that was tested, in %; see `claims_of`."""
    return {claim["claim"]: claim["difference"] for claim in claims_of(name) if claim["verdict"] != "not tested"}


def claims_of(name: str) -> list[dict[str, Any]]:
    """Return the claims of an experiment in the report: EXPERIMENT, on all texts, or EXPERIMENT/PRESET-TEXT."""
    experiment, _, chosen = name.partition("/")
    groups = read("report.json")[experiment]
    return [claim for group in ([chosen] if chosen else groups) for claim in groups[group]["claims"]]


def verdicts() -> list[float]:
    """Return the numbers of the paper's claims: all, those that hold, contradicted, undecided and untested ones."""
    experiments = {name: each for name, each in EXPERIMENTS.items() if each.source != NOT_IN_PAPER}
    total = sum(len(each.claims) for each in experiments.values())
    found = Counter(claim["verdict"] for name in experiments for claim in claims_of(name))
    holding, contradicted, undecided = (found[verdict] for verdict in ("holds", "contradicted", "undecided"))
    return [total, holding, contradicted, undecided, total - holding - contradicted - undecided]


def readme() -> Iterator[Statement]:
    layers = h100_layers()
    times = [layers[f"{name}/2048/1/backward"]["min_ms"] for name in ("fused", "blockwise")]
    yield "On an H100, in bfloat16, it takes # ms with the fused kernel and # ms without", times
    yield (
        "Of the paper's # claims, # hold at this size, # are contradicted, # are undecided and # not tested so far",
        verdicts(),
    )
    dape, kerple = (by_length("quickstart/lengths.json", name) for name in ("dape1x3-kerple", "kerple"))
    yield (
        "| perplexity per byte at 64, the train length, and at 2,048 (quickstart, one seed) | #, # | #, # |",
        [each[length] for each in (dape, kerple) for length in (64, 2048)],
    )
    yield (
        "| the same after 20 M tokens of SageMath's manual (mean of three seeds) | #, # "
        "| #, #; 1.7 times the steps: #, # |",
        [
            value
            for method in ("dape1x3-kerple", "kerple", "kerple-8500-steps")
            for value in converged(method, 64, 2048)
        ],
    )
    on_prose = [value for method in ("dape1x3-kerple", "kerple") for value in converged(method, 64, 2048, text="prose")]
    yield "| at 64 and 2,048 after 20 M tokens of prose: no gain (mean of three seeds) | #, # | #, # |", on_prose
    perplexities = [
        larger_by_length(method)[length] for method in ("dape1x3-kerple", "kerple") for length in (256, 16384)
    ]
    row = "25 M parameters on an H100, the manual: at 256, the train length, and at 16,384 (one seed)"
    yield f"| {row} | #, # | #, # |", perplexities
    recall = [select(read("recall/accuracy.json")["runs"], name=run) for run in ("dape1x3-kerple", "kerple")]
    task = "associative recall, lengths 60 to 480, trained on 1 to 40 (chance 6.25 %)"
    values = [recall[0]["score"], recall[1]["score"], recall[1]["trained"]]
    yield f"| {task} | # % | # % (# % at the train lengths) |", [100 * value for value in values]
    ours, eager = (attention(2048, name) for name in ("blockwise", "torch eager"))
    yield (
        "takes # s here and # s with the paper's listing in eager PyTorch on the same CPU, at a peak of # and # MiB",
        [ours["min_ms"] / 1000, eager["min_ms"] / 1000, ours["peak_mib"], eager["peak_mib"]],
    )


def getting_started() -> Iterator[Statement]:
    for name in ("kerple", "dape1x3-kerple"):
        lengths = select(read("quickstart/lengths.json")["runs"], name=name)["lengths"]
        cells = [value for each in lengths for value in (each["perplexity"], each["low"], each["high"])]
        yield f"| {name} |" + " # [#, #] |" * len(lengths), cells
    first = read("quickstart/lengths.json")["runs"][0]["lengths"][0]
    yield (
        "# sequences from # held-out documents, # scored tokens",
        [first["num_windows"], first["num_documents"], first["num_tokens"]],
    )


def evaluation() -> Iterator[Statement]:
    names = ("kerple", "dape1x3-kerple")
    deltas = [select(read("quickstart/delta.json")["runs"], name=name)["deltas"] for name in names]
    for both in zip(*deltas, strict=True):
        length = both[0]["length"]
        assert all(each["length"] == length for each in both)
        yield f"| P({length}) | # | # |", [each["full"] for each in both]
        yield f"| P({length}, local) | # | # |", [each["local"] for each in both]
        cells = [each[key] for each in both for key in ("delta", "low", "high")]
        yield f"| ΔP({length}) | # [#, #] | # [#, #] |", cells
    for name in names:
        found = select(read("quickstart/positions.json")["runs"], name=name)["positions"]
        assert found["breaks_at"] is None
        yield f"| {name} | # | # | - |", [found["reference_nats"], found["last_octave_nats"]]


def quickstart() -> Iterator[Statement]:
    kerple, dape = (by_length("quickstart/lengths.json", name) for name in ("kerple", "dape1x3-kerple"))
    yield "Kerple # and #; DAPE1x3-Kerple # and #.", [kerple[64], kerple[2048], dape[64], dape[2048]]


def of_seeds(
    experiment: str, method: str, train_length: int, length: int, group: str = "small-stdlib", size: str = "125m"
) -> list[float]:
    """Return the result of each seed at a length; the report has the paper's sizes and lengths."""
    series = read("report.json")[experiment][group]["series"]
    seeds = select(series, method=method, size=size, train_length=4 * train_length)["values"].values()
    return [values[str(4 * length)] for values in seeds]


def mean_of(*arguments: Any, **more: Any) -> float:
    """Return the mean over seeds of the result at a length; see `of_seeds`."""
    return fmean(of_seeds(*arguments, **more))


def on_task(method: str, task: str) -> dict[str, Any]:
    """Return the accuracies in % of a method on a task of table 6; see `Series`."""
    return select(read("report.json")["table6"]["small"]["series"], method=method, task=task)


def accuracy_of(method: str, task: str, part: str) -> float:
    """Return the mean over seeds of the accuracy in % in table 6, "within" the train lengths or "beyond" them."""
    return fmean(on_task(method, task)[part].values())


def range_of(method: str, task: str, part: str) -> list[float]:
    """Return the lowest and the highest accuracy of the seeds in %, see `accuracy_of`."""
    accuracies = on_task(method, task)[part].values()
    return [min(accuracies), max(accuracies)]


def paper_accuracies(task: str, methods: Iterable[str]) -> list[float]:
    """Return the paper's accuracies in %, beyond the train lengths of table 6."""
    printed = paper_tables()["table6"]
    accuracies = select(printed["tasks"], task=task)["accuracy"]
    return [accuracies[printed["methods"].index(method)] for method in methods]


def tasks_with_a_gain() -> list[float]:
    """Return on how many tasks DAPE1x3-Kerple is ahead of Kerple, of how many whose order matters, and in the paper."""
    methods = ("kerple", "dape1x3-kerple")
    printed = [row["task"] for row in paper_tables()["table6"]["tasks"]]
    tasks = [task for task in printed if not CHE[task].permutation_invariant]
    ours = [[accuracy_of(method, task, "beyond") for method in methods] for task in tasks]
    papers = [paper_accuracies(task, methods) for task in tasks]
    return [sum(base < dape for base, dape in ours), len(tasks), sum(base < dape for base, dape in papers)]


def small() -> Iterator[Statement]:
    values = [mean_of("fig2", method, 32, length) for method in ("dape1x3-kerple", "kerple") for length in (32, 2048)]
    yield "# and #; with processor=none # and #.", values


def che_recipe() -> Iterator[Statement]:
    kerple, dape = (
        select(read("che/accuracy.json")["runs"], task="even_pairs", name=name) for name in ("kerple", "dape1x3-kerple")
    )
    values = [100 * run[key] for run in (kerple, dape) for key in ("trained", "score")]
    yield "Kerple # and #; DAPE1x3-Kerple # and #.", values


def che() -> Iterator[Statement]:
    for file, lengths in (("che", (10, 20, 40, 500)), ("recall", (9, 15, 24, 30, 39, 180, 300, 480))):
        name = f"{file}/accuracy.json"
        for run in read(name)["runs"]:
            accuracy = by_length(name, run["name"], "accuracy", task=run["task"])
            task = f" {run['task']} |" if file == "che" else ""
            values = [run["trained"], run["score"], *(accuracy[length] for length in lengths)]
            yield f"| {run['name']} |{task}" + " # |" * len(values), [100 * value for value in values]
    methods = ("kerple", "dape1x1-kerple", "dape1x3-kerple")
    pair = ("kerple", "dape1x3-kerple")
    of_preset = ("even_pairs", "missing_duplicate_string", "cycle_navigation", "stack_manipulation", "reverse_string")
    digits = ("modular_arithmetic", "modular_arithmetic_brackets", "solve_equation")
    bits = ("compute_sqrt", "odds_first", "binary_addition")
    of_pair = (*digits, *bits, "duplicate_string")
    for tasks, row, shown in ((of_preset, "# | # | #", methods), (of_pair, "# |  | #", pair)):
        for task, (part, lengths) in product(tasks, (("within", "1 to 40"), ("beyond", "41 to 500"))):
            yield f"| `{task}` | {lengths} | {row} |", [accuracy_of(method, task, part) for method in shown]
    assert max(abs(accuracy_of(method, task, "beyond") - 20) for method in pair for task in digits) < 2
    for method, task in product(pair, ("modular_arithmetic", "solve_equation")):
        assert max(abs(accuracy - 20) for accuracy in range_of(method, task, "beyond")) < 4
    yield (
        "beyond the train lengths Kerple has # to # %, and DAPE1x3 # to # %",
        [accuracy for method in pair for accuracy in range_of(method, digits[1], "beyond")],
    )
    yield (
        "In the paper Kerple has #, # and # on these three tasks, and DAPE1x3 #, # and #",
        [accuracy for method in pair for task in digits for accuracy in paper_accuracies(task, [method])],
    )
    for task in bits:
        assert max(range_of(pair[0], task, "within")) < min(range_of(pair[1], task, "within"))
        assert max(abs(accuracy_of(method, task, "beyond") - 50) for method in pair) < 4
    yield "on compute sqrt, where Kerple has # and DAPE1x3 #", paper_accuracies(bits[0], pair)
    yield (
        "the paper has Kerple ahead, with # and # against # and #",
        [accuracy for method in pair for task in bits[1:] for accuracy in paper_accuracies(task, [method])],
    )
    yield (
        "with the two seeds Kerple has # and # % within the train lengths, and DAPE1x3 # and # %",
        [accuracy for method in pair for accuracy in range_of(method, "duplicate_string", "within")],
    )
    yield "the paper has Kerple ahead, with # against #.", paper_accuracies("duplicate_string", pair)
    yield (
        "mean than Kerple on # of the # tasks where the order of the input matters, in the paper on #",
        tasks_with_a_gain(),
    )
    (learned, *others) = zip(
        *(on_task(method, "cycle_navigation")["within"].values() for method in methods), strict=True
    )
    yield (
        "there Kerple has # %, DAPE (1x1) # % and DAPE1x3 # %. With the other seeds no method has more than # %",
        [*learned, max(max(values) for values in others)],
    )
    for task, sentence in (
        ("cycle_navigation", "In the paper they have #, # and # beyond the train lengths"),
        ("reverse_string", "in the paper Kerple has # there, DAPE (1x1) # and DAPE1x3 #"),
    ):
        yield sentence, paper_accuracies(task, methods)
    yield (
        "In the paper DAPE (1x1) has # there and DAPE1x3 #",
        paper_accuracies("stack_manipulation", methods[1:]),
    )
    for task in ("stack_manipulation", "reverse_string"):
        yield (
            f"On {task.replace('_', ' ')} seeds differ more than methods: within the train lengths "
            "Kerple has # to # %, DAPE (1x1) # to # % and DAPE1x3 # to # %",
            [accuracy for method in methods for accuracy in range_of(method, task, "within")],
        )
    at_480 = by_length("recall/accuracy.json", "dape1x3-kerple", "accuracy")[480]
    yield "recalls every value at 13 pairs and # % of them at 160", [100 * at_480]
    batches = [select(rows, length=40) for rows in read("tasks/sampling.json")["tasks"].values()]
    milliseconds = [sum(batch[f"{part}_ms"] for part in ("sample", "solve", "tape")) for batch in batches]
    yield "a batch at length 40 takes # to # ms", [min(milliseconds), max(milliseconds)]


def distributed() -> Iterator[Statement]:
    kills = [read(f"survival/{name}.json") for name in ("kill_test", "kill_test_2_processes", "kill_test_gs")]
    assert read("survival/kill_test_s3.json")["kills"] == kills[2]["kills"]
    yield (
        "after # local kills, # of one of two processes, # in each kind of bucket",
        [test["kills"] for test in kills],
    )
    corrupt = read("survival/corrupt.json")
    yield (
        "# cases: the results of the undamaged run in #, those of an older checkpoint with a warning in #, one line "
        "of error in #",
        [len(corrupt["cases"]), *(corrupt["outcomes"][outcome] for outcome in ("equal", "older", "one line"))],
    )
    disk = read("survival/full_disk.json")["outcomes"]
    yield "with the same bits at # sizes; enough space at #", [disk["refused"], disk["equal"]]
    yield "is # ms (`python -m benchmarks.dispatch`", [read("dispatch/dispatch.json")["median_ms"]["sum"]]


def training() -> Iterator[Statement]:
    signals = read("survival/kill_test.json")["signals"]
    yield "(# by SIGKILL, # by SIGTERM)", [signals["SIGKILL"], signals["SIGTERM"]]


def gpu() -> Iterator[Statement]:
    now, before, blockwise = (
        read(f"gpu_compiled/{part}gpu_compiled.json")["rows"] for part in ("", "before/", "blockwise/")
    )
    for length in (512, 2048, 8192):
        for batch in (1, 8):
            wanted = dict(length=length, batch=batch, direction="backward")
            template, values = f"| {length:,} | {batch} |", []
            for rows, name in ((now, "fused"), (before, "fused"), *((now, n) for n in ("blockwise", "dense", "cudnn"))):
                row = select(rows, implementation=name, **wanted)
                memory = row["temporary_mib"]
                template += f" #; # {'MiB' if memory < 1e4 else 'GiB'}; # GB |"
                values += [row["launches"], memory if memory < 1e4 else memory / 1024, row["gbyte"]]
            yield template, values
    wanted = dict(length=2048, batch=1, direction="backward")
    registers = [
        kernel[key]
        for rows in (now, before)
        for kernel in (
            select(rows, implementation="fused", **wanted)["kernels"][name]
            for name in ("forward", "scores_gradient", "parameters_gradient")
        )
        for key in ("registers", "spilled_bytes")
    ]
    yield (
        "forward # (#), gradient of the scores # (#), gradients of the parameters # (#). Before the kernels stored "
        "their own zeros (commit 7520777): # (#), # (#), # (#).",
        registers,
    )
    row = select(blockwise, implementation="blockwise-256x4", **wanted)
    yield "# launches and # MiB with 256", [row["launches"], row["temporary_mib"]]
    yield from h100()


def h100() -> Iterator[Statement]:
    """Yield what was measured on an H100."""
    layers, speed = h100_layers(), h100_speed()
    empty_rows = []
    for length, batch in ((512, 1), (512, 16), (1024, 8), (2048, 1), (2048, 8), (4096, 2), (8192, 1)):
        for direction, name in (("forward", "forward"), ("backward", "and backward")):
            template, values = f"| {length:,} | {batch} | {name} |", []
            for variant in ("fused", "blockwise", "ratio", "dense", "torch.compile", "cudnn"):
                line = layers.get(f"{variant}/{length}/{batch}/{direction}")
                if line is not None:
                    template += " # (#) |"
                    values += [line["min_ms"], line.get("temporary_mib", line.get("peak_mib"))]
                elif variant == "ratio" and (times := speed.get((length, batch, direction))):
                    template += " # |"
                    values.append(times)
                else:
                    template += " |"
            if values:
                yield template, values
            else:
                empty_rows.append(template)
    assert len(empty_rows) == 3
    long = {name: layers[f"{name}/8192/1/forward"]["min_ms"] for name in ("fused", "cudnn")}
    yield "at T = 8,192, # times", [long["fused"] / long["cudnn"]]
    checked = read_results(ROOT / "results/gpu/h100_correct/results.jsonl")
    worst: dict[tuple[str, str], float] = {}
    for (group, _), line in checked.items():
        for name in ("fused", "blockwise", "dense"):
            assert line[name]["right"], (group, line["case"], name)
            assert line[name]["same_bits"], (group, line["case"], name)
            worst[group, name] = max(worst.get((group, name), 0.0), *line[name]["errors"].values())
    groups = [group for group, _ in checked]
    yield (
        "in bfloat16 at # shapes (300 to 2,048 tokens, W = 1 to 7, grouped heads, windows, a causal kernel, cuDNN) and "
        "in float32 at #. In bfloat16 the largest relative error of `fused` is #, and that of `dense` #; in float32 #",
        [
            groups.count("correct-bfloat16"),
            groups.count("correct-float32"),
            *(worst["correct-bfloat16", name] for name in ("fused", "dense")),
            worst["correct-float32", "fused"],
        ],
    )
    shapes = len(gpu_cases.FULL.correct)
    yield (
        "# shapes in bfloat16 and # in float32 were not reached",
        [shapes - groups.count(group) for group in ("correct-bfloat16", "correct-float32")],
    )
    train = measured_on_h100()["train", "fused"]
    yield "with `fused`: # tokens/s, loss # nats", [train["tokens_per_s"], train["loss_nats"]]
    steps = read_results(ROOT / "results/gpu/h100_steps/results.jsonl")
    fused, blockwise = (steps["steps", f"125m/dape1x3-kerple/512/32/{name}"] for name in ("fused", "blockwise"))
    yield "32 x 512 tokens, takes # ms with `fused` and # ms with `blockwise`", [fused["min_ms"], blockwise["min_ms"]]
    yield "XLA needs # and # GiB for it", [fused["needed_gib"], blockwise["needed_gib"]]
    for each in (fused, blockwise):
        yield "the losses of the first step are the same to six digits, #", [each["loss_nats"]]
    yield (
        "takes # ms with Kerple (`dense`), # ms with DAPE1x3-Kerple (`fused`) and # ms with RoPE (cuDNN)",
        [larger(method)["train_step_ms"] for method in ("kerple", "dape1x3-kerple", "rope")],
    )


def larger(method: str, seed: int = 0) -> Any:
    """Return a method's results with 25 million parameters."""
    return read(f"larger/25m-math/{method}-25m-T256-seed{seed}.json")


def larger_by_length(method: str, seed: int = 0) -> dict[int, float]:
    """Return a method's perplexity with 25 million parameters, by length."""
    return {each["length"]: each["perplexity"] for each in larger(method, seed)["lengths"]}


def on_a_gpu() -> Iterator[Statement]:
    """Yield what was measured with 25 million parameters."""
    names = {"rope": "RoPE", "kerple": "Kerple", "dape1x3-kerple": "DAPE1x3-Kerple"}
    values = {method: larger_by_length(method) for method in names}
    for method, name in names.items():
        yield (
            f"| {name}, 25M | # | # | # | # | # |",
            [values[method][length] for length in (256, 512, 1024, 4096, 16384)],
        )
    dape, kerple = values["dape1x3-kerple"], values["kerple"]
    yield (
        "# % less than Kerple at the train length, # % at four times, and # % at 64 times the train length",
        [100 * (1 - dape[length] / kerple[length]) for length in (256, 1024, 16384)],
    )
    assert min(dape, key=dape.__getitem__) == 4096
    assert min(kerple, key=kerple.__getitem__) == 1024
    yield "improves up to 4,096 and has lost # % of that at 16,384", [100 * (dape[16384] / dape[4096] - 1)]
    yield "Kerple is best at 1,024 and has lost # %", [100 * (kerple[16384] / kerple[1024] - 1)]
    second = larger_by_length("dape1x3-kerple", 1)
    yield "second seed has # at 256 and # at 16,384", [second[256], second[16384]]
    step_ms, nats = ({method: larger(method)[key] for method in names} for key in ("train_step_ms", "validation_nats"))
    yield (
        "# times as long as Kerple's. After 600 steps, nearly the time of 1,000",
        [step_ms["dape1x3-kerple"] / step_ms["kerple"]],
    )
    assert 0.85 < 600 * step_ms["dape1x3-kerple"] / (1000 * step_ms["kerple"]) < 1
    yield (
        "its validation loss is # nats; Kerple has # after 1,000, and DAPE1x3-Kerple #",
        [nats["dape1x3-kerple"]["600"], nats["kerple"]["1000"], nats["dape1x3-kerple"]["1000"]],
    )
    yield "takes # times as long, and is worse than all others", [step_ms["rope"] / step_ms["kerple"]]


@cache
def measured_on_h100() -> dict[tuple[str, str], Any]:
    """Return the last line of every case that was timed on an H100, by group and case."""
    return read_results(ROOT / "results/gpu/h100/results.jsonl")


def h100_layers() -> dict[str, Any]:
    """Return what was timed of one layer on an H100, by VARIANT/T/B/DIRECTION."""
    return {case: line for (_, case), line in measured_on_h100().items() if "min_ms" in line}


def h100_speed() -> dict[tuple[int, int, str], float]:
    """Return the time of `blockwise` over that of the fused kernel on an H100, by (T, B, direction)."""
    layers, found = h100_layers(), {}
    for case, line in layers.items():
        name, length, batch, direction = case.split("/")
        if name == "blockwise":
            fused = layers[f"fused/{length}/{batch}/{direction}"]
            found[int(length), int(batch), direction] = line["min_ms"] / fused["min_ms"]
    return found


def tpu(directory: str, **wanted: Any) -> dict[str, Any]:
    return select(read(f"tpu/{directory}/tpu.json")["rows"], **wanted)


def kernel() -> Iterator[Statement]:
    yield from kernel_sizes()
    yield from kernel_precision()
    yield from kernel_chips()
    yield from kernel_steps()
    speed = h100_speed().values()
    yield "it is # to # times as fast as `blockwise`", [min(speed), max(speed)]


def kernel_sizes() -> Iterator[Statement]:
    """Yield the figures of one layer on v5e, by length."""
    for length in (2048, 8192, 32768, 131072):
        fused = tpu("lengths", length=length, direction="backward")
        template, values = f"| {length:,} | # MiB | # GB | # ms |", [fused["temporary_mib"], fused["moved_gb"]]
        values += [fused["kernels_ms"] + fused["other_ms"]]
        rows = [tpu("blockwise", length=length)]
        if length <= 8192:
            rows += [row for row in [tpu("naive", length=length)] if row["fits"]]
        for row in rows:
            template += " # MiB | # GB | # ms |"
            values += [row["temporary_mib"], row["moved_gb"], row["other_ms"]]
        yield template, values
        forward = tpu("lengths", length=length, direction="forward")
        yield (
            f"| {length:,} | # MiB | # GB | # ms | # ms | # MiB | # GB | # ms | # ms |",
            [row[key] for row in (forward, fused) for key in ("temporary_mib", "moved_gb", "kernels_ms", "other_ms")],
        )
    naive, blockwise = tpu("naive", length=2048), [tpu("blockwise", length=length) for length in (2048, 8192)]
    yield (
        "takes # MiB, moves # GB and needs # ms by the compiler's estimate",
        [naive["temporary_mib"], naive["moved_gb"], naive["other_ms"]],
    )
    yield "needs # ms at T = 2048 and # ms at T = 8192", [row["other_ms"] for row in blockwise]
    passes = tpu("lengths", length=2048, direction="backward")
    forward, backward = passes["kernels"]
    peak, bandwidth = 197e12, 819e9
    yield "The kernel executes # and # GFLOP", [forward["flops"] / 1e9, backward["flops"] / 1e9]
    yield (
        "# and # ms, and moves # and # GB, # and # ms",
        [
            *(1e3 * each["flops"] / peak for each in (forward, backward)),
            *(each["bytes"] / 1e9 for each in (forward, backward)),
            *(1e3 * each["bytes"] / bandwidth for each in (forward, backward)),
        ],
    )
    yield "Its instruction bundles take # and # ms", passes["kernels_of_passes_ms"]
    yield "the blocks stay in VMEM: # GB of traffic", [blockwise[0]["moved_gb"]]


def kernel_precision() -> Iterator[Statement]:
    for bias in ("alibi", "kerple", "kerple_power"):
        for length in (512, 2048, 8192, 32768):
            bfloat16, float16 = (
                select(read("precision/precision.json")["rows"], bias=bias, length=length, dtype=dtype)
                for dtype in ("bfloat16", "float16")
            )
            template, values = f"| {bias} | {length:,} |", []
            for value in (
                *(row[key] for row in (bfloat16, float16) for key in ("as_written", "dape")),
                float16["float32"],
            ):
                if value is None:
                    template += " NaN |"
                elif value < 5e-5:
                    template += " < 0.0001 |"
                else:
                    template += " # |"
                    values += [value]
            yield template, values


def kernel_chips() -> Iterator[Statement]:
    chips = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
    for chip, topology in chips.items():
        template, values = f"| {chip} |", []
        for model in ("125m", "350m", "2.7b", "6.7b"):
            row = tpu("chips", topology=topology, model=model)
            template += " # MiB, # + # ms, # s |" if row["fits"] else " refused |"
            if row["fits"]:
                values += [row[key] for key in ("temporary_mib", "kernels_ms", "other_ms", "compile_s")]
        yield template, values
    del chips["v4"]
    for chip, topology in chips.items():
        medium, long = (
            tpu("lengths", length=length, direction="backward")
            if chip == "v5e"
            else tpu(f"chips-{length}", topology=topology)
            for length in (8192, 131072)
        )
        rows = (medium, long, tpu("chips-6.7b-8192", topology=topology))
        yield (
            f"| {chip} |" + " # MiB, # + # ms |" * 3,
            [row[key] for row in rows for key in ("temporary_mib", "kernels_ms", "other_ms")],
        )
        plain, dape = (tpu("plain", topology=topology, processor=processor) for processor in ("plain", "dape"))
        yield (
            f"| {chip} | # + # ms | # ms | # + # ms | # ms | # | # |",
            [
                *(value for row in (plain, dape) for value in (*row["kernels_of_passes_ms"], row["other_ms"])),
                dape["kernels_ms"] / plain["kernels_ms"],
                (dape["kernels_ms"] + dape["other_ms"]) / (plain["kernels_ms"] + plain["other_ms"]),
            ],
        )
    fused, splash = (tpu("nope", implementation=name, direction="backward") for name in ("fused", "splash"))
    yield (
        "splash attention takes # + # ms in its kernels where this one takes # + #, and # ms in other operations "
        "where this one takes #: # ms each",
        [
            *(*splash["kernels_of_passes_ms"], *fused["kernels_of_passes_ms"], splash["other_ms"], fused["other_ms"]),
            fused["kernels_ms"] + fused["other_ms"],
        ],
    )


def kernel_steps() -> Iterator[Statement]:
    methods = ("rope", "t5", "alibi", "kerple", "fire", "dape1x1-kerple")
    for chip in ("v5e", "v5p"):
        for model in ("125m", "350m"):
            rows = read(f"step_cycles/{chip}-{model}/step_cycles.json")["rows"]
            for length in (512, 2048, 8192):
                ratios = [select(rows, length=length, method=method)["ratio"] for method in methods]
                ours = select(rows, length=length, method="dape1x3-kerple")
                milliseconds = ours["kernels_ms"] + ours["other_ms"]
                yield (
                    f"| {model.upper()} | {chip} | {length:,} |" + " # |" * 6 + " # ms | #% |",
                    [*ratios, milliseconds, 100 * ours["kernels_ms"] / milliseconds],
                )


def planning() -> Iterator[Statement]:
    for file in sorted((ROOT / "results" / "planning").glob("*/plan.json")):
        content = read(str(file.relative_to(ROOT / "results")))
        plan = content["plans"][content["best"]]
        held = plan["held_bytes"]
        yield (
            f"| {file.parent.name} | {content['topology']} | {plan['mesh']} "
            "| # x # | # GiB | # GiB | # GB | # ms | # ms | # ms | #% |",
            [
                *(plan["batch_size"], plan["length"], (held["parameters"] + held["moments"]) / 2**30),
                *(plan["peak_bytes"] / 2**30, sum(each["num_bytes"] for each in plan["collectives"]) / 1e9),
                *(1e3 * plan["roofline_seconds"][name] for name in ("compute", "memory", "interconnect")),
                100 * plan["mfu"],
            ],
        )
    blockwise, fused = (read(f"planning/{name}/plan.json")["plans"][0] for name in ("125m-blockwise", "125m"))
    yield (
        "# ms per step for 125M with `blockwise`, # ms with the kernel",
        [1e3 * plan["roofline_seconds"]["memory"] for plan in (blockwise, fused)],
    )


def attention(length: int, name: str) -> dict[str, Any]:
    return select(read("attention/cpu.json")["rows"], length=length, direction="backward", name=name)


def reproducing() -> Iterator[Statement]:
    names = ("blockwise", "torch eager", "torch.compile", "plain jax", "plain torch")
    for length in (512, 2048):
        yield f"| {length:,} |" + " # ms |" * 5, [attention(length, name)["min_ms"] for name in names]
    yield "| 2,048, peak memory |" + " # MiB |" * 5, [attention(2048, name)["peak_mib"] for name in names]
    yield "Of the paper's # claims, # hold, # are contradicted, # are undecided and # not tested so far", verdicts()
    closest = [mean_of("fig2", method, 32, 32) for method in ("dape1x3-kerple", "dape1x1-kerple")]
    yield "Trained at 32, it is # % better than the closest, DAPE (1x1).", [100 * (1 - closest[0] / closest[1])]
    longest, trained = (
        [mean_of("fig2", method, 32, length) for method in ("rope", "t5", "cope")] for length in (2048, 32)
    )
    yield (
        "are #, # and # times worse at 2,048 than at 32",
        [long / at for long, at in zip(longest, trained, strict=True)],
    )
    on_cycle = [
        accuracy_of(method, "cycle_navigation", "beyond") for method in ("kerple", "dape1x1-kerple", "dape1x3-kerple")
    ]
    yield "20 %: Kerple has # %, DAPE (1x1) # % and DAPE1x3-Kerple # %.", on_cycle
    yield "DAPE1x3-Kerple goes from # to #.", [mean_of("fig2", "dape1x3-kerple", 32, length) for length in (32, 2048)]
    yield (
        "DAPE1x3-Kerple stays level (# at 128, # at 2,048) and Kerple rises (# and #)",
        [mean_of("fig2", method, 128, at) for method in ("dape1x3-kerple", "kerple") for at in (128, 2048)],
    )
    yield (
        "with ALiBi as with Kerple (# and # at 2,048, trained at 32)",
        [mean_of("fig5", f"dape1x3-{bias}", 32, 2048) for bias in ("alibi", "kerple")],
    )
    rise = mean_of("table5", "dape1x1-kerple", 128, 2048) / mean_of("table5", "dape1x1-kerple", 128, 128) - 1
    yield "with DAPE (1x1) it rises by # % from 128 to 2,048.", [100 * rise]
    yield (
        "DAPE1x3-Kerple reads the next byte and has # at 32 and # at 2,048.",
        [mean_of("fig6", "dape1x3-kerple", 32, at) for at in (32, 2048)],
    )
    widths = {at: [mean_of("widths", f"dape1x{w}-kerple", 32, at) for w in (1, 3, 5, 7, 9, 11)] for at in (32, 2048)}
    yield (
        "#, #, #, #, # and # at 32 for 1, 3, 5, 7, 9 and 11 keys, #, #, #, #, # and # at 2,048",
        widths[32] + widths[2048],
    )
    yield (
        "At 1,024 DAPE1x3-Kerple has # if trained at 32, # if trained at 1,024, and RoPE trained at 1,024 has #.",
        [
            mean_of("fig3", method, train, 1024)
            for method, train in (("dape1x3-kerple", 32), ("dape1x3-kerple", 1024), ("rope", 1024))
        ],
    )
    yield (
        "trained at 32, DAPE1x3 has # at 32 and # at 2,048, DAPE (1x1) # and #, Kerple # and # (`fig4`).",
        [
            mean_of("fig4", method, 32, at, size="350m")
            for method in ("dape1x3-kerple", "dape1x1-kerple", "kerple")
            for at in (32, 2048)
        ],
    )
    yield (
        "It has # at 128 and # at 2,048, DAPE (1x1) # and #, Kerple # and #.",
        [
            mean_of("table3", method, 128, at, size="2.7b")
            for method in ("dape1x3-kerple", "dape1x1-kerple", "kerple")
            for at in (128, 2048)
        ],
    )
    inputs = ("kerple", "dape1x3-kerple-scores", "dape1x3-kerple-bias", "dape1x3-kerple")
    yield (
        "at 2,048 Kerple has #, DAPE1x3 # if it reads the scores alone, # if it reads the bias alone, "
        "and # if it reads both",
        [mean_of("variants", method, 128, 2048) for method in inputs],
    )
    rates = ("-rate0.5", "", "-rate2")
    swept = ("rope", "t5", "alibi", "kerple", "fire", "dape1x1-kerple", "dape1x3-kerple")
    half, common, twice = ({method: mean_of("rates", method + rate, 32, 32) for method in swept} for rate in rates)
    assert all(half[method] > common[method] for method in swept)
    assert {method for method in swept if twice[method] < common[method]} == {
        "dape1x3-kerple",
        "dape1x1-kerple",
        "kerple",
    }
    gains = {method: 100 * (1 - twice[method] / common[method]) for method in swept}
    yield (
        "Twice the rate is better by # % for DAPE1x3-Kerple, by # % for Kerple and by # % for DAPE (1x1), and worse",
        [gains[method] for method in ("dape1x3-kerple", "kerple", "dape1x1-kerple")],
    )
    (sweep,) = claims_of("rates")
    undecided = {pair["pair"] for pair in sweep["pairs"] if pair["verdict"] == "undecided"}
    assert undecided == {f"dape1x3-kerple T32 against {method} T32" for method in ("t5", "dape1x1-kerple")}
    yield "the three is undecided: # of # comparisons are in its favour", [sweep["holding"], len(sweep["pairs"])]
    yield (
        "they have #, #, # and #, and DAPE (1x1) #, where DAPE1x3-Kerple has # at the common rate.",
        [
            *(
                min(mean_of("rates", method + rate, 32, 2048) for rate in rates)
                for method in ("rope", "t5", "fire", "kerple", "dape1x1-kerple")
            ),
            mean_of("rates", "dape1x3-kerple", 32, 2048),
        ],
    )
    channels = ("dape1x3-kerple-c10", "dape1x3-kerple-c21", "dape1x1-kerple-c64")
    yield (
        "DAPE1x3-Kerple has # at 32 and # at 2,048 with 10 channels, # and # with 21, and DAPE (1x1) # and # with 64",
        [mean_of("appendixE", method, 32, at) for method in channels for at in (32, 2048)],
    )
    yield (
        "It has # at 256 and # at 2,048, DAPE (1x1) # and #, Kerple # and #, ALiBi # and #.",
        [
            mean_of("table2", method, 256, at)
            for method in ("dape1x3-kerple", "dape1x1-kerple", "kerple", "alibi")
            for at in (256, 2048)
        ],
    )
    longer, _ = read("report.json")["table9"]["small-stdlib"]["claims"]
    yield "better than Transformer-XL is undecided: by # % at 32.", [-longer["difference"]]
    without_bias = [
        mean_of("fig1", method, 32, at)
        for at in (32, 256, 2048)
        for method in ("nope", "dape1x3-nope", "rope", "dape1x3-rope")
    ]
    yield (
        "NoPE goes from # to # and RoPE from # to # at 32, from # to # and from # to # at 256, "
        "from # to # and from # to # at 2,048.",
        without_bias,
    )
    yield "DAPE (1x1) does not help NoPE: # at 32.", [mean_of("fig1", "dape1x1-nope", 32, 32)]
    times = [
        [mean_of("table7", method, 128, 128, size=size) for size in ("350m", "2.7b", "6.7b")]
        for method in ("kerple", "dape1x3-kerple")
    ]
    yield "is #, # and # here (`table7`)", [kerple / dape for kerple, dape in zip(*times, strict=True)]
    yield (
        "(# at 32, # at 2,048; DAPE (1x1) # and #)",
        [mean_of("table9", method, 32, at) for method in ("transformer-xl", "dape1x1-kerple") for at in (32, 2048)],
    )
    step_ms = [
        read(f"times/small-stdlib/{method}-xs-T128-seed0.json")["step_ms"]
        for method in ("kerple", "dape1x1-kerple", "dape1x3-kerple")
    ]
    yield "takes # (1x1) and # (1x3) times as long as Kerple's", [each / step_ms[0] for each in step_ms[1:]]
    longer = ("kerple-900-steps", "dape1x3-kerple", "kerple-1200-steps", "kerple-840-steps")
    *at_equal_time, same_flops = [mean_of("cost", method, 128, 1024) for method in longer]
    other_text = [mean_of("cost", m, 128, 1024, "small-math") for m in ("kerple-1200-steps", "dape1x3-kerple")]
    yield (
        "reaches # at 1,024 where DAPE1x3-Kerple has # (`cost`, undecided). For twice the steps Kerple is better: "
        "# (a verdict). On SageMath's manual it is the same: # and # (one seed). Kerple with 1.4 times the steps has "
        "DAPE1x3's FLOPs and # (undecided)",
        [*at_equal_time, *other_text, same_flops],
    )
    yield (
        "wider and deeper models are worse than DAPE1x3-Kerple, # and #.",
        [mean_of("cost", method, 128, 1024) for method in ("kerple-width-116", "kerple-5-layers")],
    )
    rope = {train: [mean_of("fig2", "rope", train, factor * train) for factor in (1, 2, 4)] for train in (32, 128)}
    yield (
        "it is # and # times there, and # and # times at four times the train length",
        [rope[train][index] / rope[train][0] for index in (1, 2) for train in (32, 128)],
    )
    at_64, at_128 = converged("rope", 64, 128)
    yield "it is # times at twice the train length", [at_128 / at_64]
    task = "missing_duplicate_string"
    assert all(abs(accuracy_of(method, task, "beyond") - 50) < 1 for method in ("kerple", "dape1x1-kerple"))
    seeds = on_task("dape1x3-kerple", task)["values"]
    yield (
        "missing duplicate it has # % at 41 symbols, # % at 92 and # % at 143, and they are at chance",
        [fmean(by_length[length] for by_length in seeds.values()) for length in ("41", "92", "143")],
    )
    methods, task = ("dape1x1-kerple", "dape1x3-kerple"), "stack_manipulation"
    yield "they have # % and # %. Within", [accuracy_of(method, task, "beyond") for method in methods]
    yield (
        "# to # % with DAPE (1x1), # to # % with DAPE1x3-Kerple",
        [accuracy for method in methods for accuracy in range_of(method, task, "within")],
    )
    methods = ("dape1x3-kerple", "dape1x1-kerple", "kerple")
    task = "reverse_string"
    yield (
        "DAPE1x3-Kerple has # %, DAPE (1x1) # % and Kerple # %, in the paper #, # and # %",
        [*(accuracy_of(method, task, "beyond") for method in methods), *paper_accuracies(task, methods)],
    )
    pair, tasks = ("dape1x3-kerple", "kerple"), ("odds_first", "compute_sqrt", "binary_addition")
    yield (
        "DAPE1x3-Kerple has #, # and # % within the train lengths, and Kerple #, # and # %.",
        [accuracy_of(method, task, "within") for method in pair for task in tasks],
    )
    yield (
        "On duplicate string they have # and # % within, and # and # % beyond",
        [accuracy_of(method, "duplicate_string", part) for part in ("within", "beyond") for method in pair],
    )
    yield "it is ahead on # of the #, in the paper on #", tasks_with_a_gain()
    yield (
        "on compute sqrt DAPE1x3-Kerple has # % and Kerple # % beyond the train lengths",
        [accuracy_of(method, "compute_sqrt", "beyond") for method in pair],
    )
    yield from after_fifty_tokens_per_parameter()
    yield from prose()
    yield from copying()
    yield from on_a_gpu()


def converged(method: str, *lengths: int, train_length: int = 64, text: str = "math") -> list[float]:
    experiment = "converged" if method in EXPERIMENTS["converged"].methods else "equal_time"
    return [mean_of(experiment, method, train_length, length, f"converged-{text}") for length in lengths]


def percent_below(lows: Iterable[float], highs: Iterable[float]) -> list[float]:
    """Return by how many per cent each of `lows` is below its partner in `highs`."""
    return [100 * (1 - low / high) for low, high in zip(lows, highs, strict=True)]


AT, BEYOND = "at the train length", "at every length beyond"


def better_than(method: str, train_length: int, *where: str, text: str = "math") -> list[float]:
    """Return by how many per cent DAPE1x3-Kerple is better; the names of claims have the paper's lengths."""
    differences = differences_of(f"converged/converged-{text}")
    return [-differences[f"trained at {4 * train_length}, DAPE1x3-Kerple is better than {method} {at}"] for at in where]


def after_fifty_tokens_per_parameter() -> Iterator[Statement]:
    names = {
        "rope": "RoPE",
        "dape1x3-rope": "DAPE1x3-RoPE",
        "alibi": "ALiBi",
        "kerple": "Kerple",
        "kerple-8500-steps": "Kerple, 8,500 steps",
        "dape1x1-kerple": "DAPE (1x1)",
        "dape1x3-kerple": "DAPE1x3-Kerple",
    }
    for method, name in names.items():
        yield f"| {name} | # | # | # | # |", converged(method, 64, 128, 512, 4096)
    from_128 = [2**n for n in range(7, 13)]
    at_128 = {
        method: converged(method, *from_128, train_length=128)
        for method in ("rope", "dape1x3-rope", "alibi", "kerple", "dape1x1-kerple", "dape1x3-kerple")
    }
    for method, values in at_128.items():
        yield f"| {names[method]}, trained at 128 | - | # | # | # |", [values[0], values[2], values[-1]]
    assert all(low < high for low, high in zip(converged("dape1x3-kerple", *from_128), at_128["kerple"], strict=True))
    in_order = ("dape1x3-kerple", "alibi", "kerple", "rope")
    assert all(sorted(values) == list(values) for values in zip(*(at_128[name] for name in in_order), strict=True))
    lengths = [64, *from_128]
    pairs = zip(converged("kerple", *lengths), converged("alibi", *lengths), strict=True)
    assert all(kerple < alibi for kerple, alibi in pairs)
    yield "ALiBi is better than Kerple there, with # and # at 4,096", [at_128["alibi"][-1], at_128["kerple"][-1]]

    def range_of_seeds(method: str) -> float:
        seeds = of_seeds("converged", method, 128, 128, "converged-math")
        return 100 * (max(seeds) / min(seeds) - 1)

    yield (
        "better than ALiBi by # % at the train length, and at every length beyond, by # % at 4,096",
        better_than("alibi", 128, AT, BEYOND),
    )
    yield "than RoPE at the train length too, by # %: this **holds**", better_than("RoPE", 128, AT)
    better = percent_below(at_128["dape1x3-rope"], at_128["rope"])
    assert min(better) > 0
    yield "lowers RoPE's perplexity by # % at the train length", better[:1]
    yield (
        "better than DAPE (1x1) too, by # % at the train length and by # % and more beyond it: both **hold** "
        "(three seeds), although the seeds of DAPE (1x1) differ by # % at 128.",
        [*better_than("dape1x1-kerple", 128, AT, BEYOND), range_of_seeds("dape1x1-kerple")],
    )
    yield (
        "by # % at the train length and by # % and more beyond it, more than trained at 64, and it is "
        "better at 4,096 than at 128: these three **hold** too, although Kerple's seeds differ by # %.",
        [*better_than("kerple", 128, AT, BEYOND), range_of_seeds("kerple")],
    )
    times = [
        read(f"times/converged-math/{method}-xs-T64-seed0.json")["step_ms"] for method in ("dape1x3-kerple", "kerple")
    ]
    yield "A step of DAPE1x3-Kerple takes # times as long as Kerple's on a CPU core", [times[0] / times[1]]
    dape, kerple = (converged(method, 64, 128, 512, 4096) for method in ("dape1x3-kerple", "kerple"))
    yield (
        "better than Kerple by # % at the train length, and at every length beyond, by # % at 128, # % at 512 and "
        "# % at 4,096",
        percent_below(dape, kerple),
    )
    yield "better than RoPE at the train length by # %, which is undecided (two seeds)", better_than("RoPE", 64, AT)
    yield (
        "better than ALiBi by # % at the train length, and by # % and more beyond it: both **hold** (two seeds)",
        better_than("alibi", 64, AT, BEYOND),
    )
    better = percent_below(converged("dape1x3-kerple", *lengths), converged("dape1x1-kerple", *lengths))
    yield (
        "than DAPE (1x1) by # % at the train length, and by # % and more beyond it: both **hold** (three seeds)",
        [better[0], min(better[1:])],
    )
    at_equal_time = [
        [mean_of("equal_time", method, 64, length, "converged-math") for length in (64, 512)]
        for method in ("dape1x3-kerple", "kerple-8500-steps")
    ]
    yield (
        "by # % at eight times the train length. At the train length it is better by # %, which is undecided.",
        percent_below(*at_equal_time)[::-1],
    )
    best, last = converged("dape1x3-kerple", 512, 4096)
    yield "improves up to 512, and has lost # % of that at 4,096", [100 * (last / best - 1)]
    yield (
        "by # in windows of 512 and by # in windows of 4,096, and that of DAPE1x3-Kerple by # and # (`context`)",
        [
            mean_of("context", method, 64, length, "converged-math")
            for method in ("kerple", "dape1x3-kerple")
            for length in (512, 4096)
        ],
    )
    yield (
        "lowers Kerple's by # and that of DAPE1x3-Kerple by # in windows of 4,096; "
        "the three claims **hold** there too.",
        [mean_of("context", method, 128, 4096, "converged-math") for method in ("kerple", "dape1x3-kerple")],
    )
    dape, kerple = (by_length("long/lengths.json", name) for name in ("dape1x3-kerple", "kerple"))
    yield "DAPE1x3-Kerple has # and Kerple #", [dape[32768], kerple[32768]]
    yield "at 4,096 they have # and #", [dape[4096], kerple[4096]]
    yield "The gain is smaller there, and still # %.", [100 * (1 - dape[32768] / kerple[32768])]

    positions = [
        select(read("positions/positions.json")["runs"], name=name)["positions"]
        for name in ("kerple", "dape1x3-kerple")
    ]
    yield (
        "from 2,048 on is # and # nats with Kerple, # and # with DAPE1x3-Kerple",
        [each[key] for each in positions for key in ("reference_nats", "last_octave_nats")],
    )
    found = {each["name"]: each["lengths"] for each in read("needle/needle.json")["runs"]}
    first = {name: select(each, length=2048, depth=0.0)["decrease_nats"] for name, each in found.items()}
    yield (
        "by # nats per digit with DAPE1x3-Kerple, by # with Kerple, and by # with DAPE's update set to zero",
        [first[name] for name in ("dape1x3-kerple", "kerple", "dape1x3-kerple, update zero")],
    )
    assert {each["exact"] for lengths in found.values() for each in lengths} == {0.0}
    yield (
        "No model has all digits right in any of the # windows (one seed).",
        [read("needle/needle.json")["num_windows"]],
    )


def prose() -> Iterator[Statement]:
    """Yield what was measured after fifty tokens per parameter of prose."""
    names = {"rope": "RoPE", "dape1x3-rope": "DAPE1x3-RoPE", "alibi": "ALiBi", "kerple": "Kerple"}
    names |= {"dape1x1-kerple": "DAPE (1x1)", "dape1x3-kerple": "DAPE1x3-Kerple"}
    for method, name in names.items():
        yield f"| {name}, prose | # | # | # | # |", converged(method, 64, 128, 512, 4096, text="prose")
    from_128 = [2**n for n in range(7, 13)]
    for method in set(names) - {"rope", "dape1x3-rope"}:
        twice, *others = converged(method, *from_128, 64, text="prose")
        assert min(others) > 0.999 * twice
    at_128 = {method: converged(method, *from_128, train_length=128, text="prose") for method in names}
    for method, values in at_128.items():
        yield f"| {names[method]}, prose, trained at 128 | - | # | # | # |", [values[0], values[2], values[-1]]
    dape, kerple = at_128["dape1x3-kerple"], at_128["kerple"]
    yield (
        "has # % more than Kerple at the train length and # % more at 4,096",
        [100 * (dape[index] / kerple[index] - 1) for index in (0, -1)],
    )
    assert max(dape) < 1.0005 * min(dape)
    at, beyond = (claims_of(ON_PROSE)[number] for number in (0, 1))
    yield (
        "has # % more than Kerple, interval -# to +#; beyond it # %, -# to +#",
        [value for claim in (at, beyond) for value in (claim["difference"], -claim["low"], claim["high"])],
    )
    claim = select(claims_of(ON_PROSE), claim="trained at 512, DAPE1x3-Kerple is better than RoPE at the train length")
    yield (
        "is undecided at the train length: it has # % more, interval -# to +# (two seeds)",
        [claim["difference"], -claim["low"], claim["high"]],
    )
    claim = select(
        claims_of(ON_PROSE), claim="trained at 512, DAPE1x3-Kerple is better than dape1x1-kerple at the train length"
    )
    yield (
        "is undecided too: it has # % less at the train length, interval -# to +# (two seeds), and # % less at 4,096",
        [-claim["difference"], -claim["low"], claim["high"], *percent_below(dape[-1:], at_128["dape1x1-kerple"][-1:])],
    )
    rope, with_dape = at_128["rope"], at_128["dape1x3-rope"]
    yield (
        "on prose is # % lower at the train length when both are trained at 128. Both fail beyond it, at 256 more with "
        "DAPE1x3, which has # where RoPE has # in the means.",
        [*percent_below(with_dape[:1], rope[:1]), with_dape[1], rope[1]],
    )
    lower = percent_below(*(converged(method, 64, *from_128, text="prose") for method in ("dape1x3-rope", "rope")))
    assert max(lower[2:]) < 0
    yield (
        "Trained at 64, RoPE's perplexity is # % lower with DAPE1x3 at the train length, and # % higher at 256 and # % "
        "higher at 4,096;",
        [lower[0], -lower[2], -lower[-1]],
    )
    claim = select(claims_of(ON_PROSE), claim="trained at 256, DAPE1x3 improves RoPE at every length")
    assert claim["deciding"].startswith("dape1x3-rope T64 at 1024 ")
    yield (
        "with it perplexity is # % higher at 1,024, interval +# to +#, before the correction for seven lengths "
        "(two seeds).",
        [claim[key] for key in ("difference", "low", "high")],
    )
    for train_length, template in (
        (64, "better than ALiBi at the train length, by # %: this **holds**. Beyond, where it has # % less"),
        (128, "better than ALiBi by # % at the train length and by # % and more beyond it: both **hold** (two seeds)"),
    ):
        yield template, better_than("alibi", train_length, AT, BEYOND, text="prose")
    better = percent_below(kerple, at_128["alibi"])
    assert all(without < with_dape for without, with_dape in zip(kerple, dape, strict=True))
    yield "Kerple without DAPE is better than ALiBi by more than that: by # % and more at every length", [min(better)]
    yield (
        "lowers the perplexity of DAPE1x3-Kerple by # and that of Kerple by #",
        [mean_of("context", method, 64, 4096, "converged-prose") for method in ("dape1x3-kerple", "kerple")],
    )
    gains = [
        mean_of("context", method, 128, 4096, "converged-prose")
        for method in ("dape1x3-kerple", "kerple", "dape1x1-kerple")
    ]
    assert len({round(gain, 2) for gain in gains}) == 1
    yield "the text before the last 128 bytes lowers both, and that of DAPE (1x1), by #;", gains[:1]
    dape, kerple = (by_length("long_prose/lengths.json", name) for name in ("dape1x3-kerple", "kerple"))
    yield (
        "DAPE1x3-Kerple has # and Kerple # on the last 256 bytes of one document; at 256 they have # and #",
        [dape[131072], kerple[131072], dape[256], kerple[256]],
    )
    for text, template in (
        ("prose", "below Kerple's by # nats after 300 steps, by # after 1,200 and by # after 5,000"),
        ("math", "On SageMath's manual these are #, # and #"),
    ):
        losses = [
            [
                read(f"converged/converged-{text}/{method}-xs-T64-seed{seed}.json")["validation_nats"]
                for method in ("kerple", "dape1x3-kerple")
            ]
            for seed in range(3)
        ]
        yield (
            template,
            [fmean(kerple[step] - dape[step] for kerple, dape in losses) for step in ("300", "1200", "5000")],
        )
    shares = {
        run["name"]: {each["length"]: 100 * each["predicted"] for each in run["lengths"]}
        for run in read("repetition/repetition.json")["runs"]
    }
    yield (
        "from 512 bytes predicts # % of the bytes of SageMath's manual, # % of the standard library and # % of prose; "
        "from 4,096 bytes #, # and # %",
        [shares[text][length] for length in (512, 4096) for text in ("data/math", "stdlib", "data/prose")],
    )


def copying() -> Iterator[Statement]:
    """Yield on which bytes DAPE1x3-Kerple differs from Kerple in windows of 512."""
    math, prose = (
        {each["class"]: each for each in read(f"{name}/copying.json")["runs"][1]["lengths"] if each["length"] == 512}
        for name in ("copying", "copying_prose")
    )
    copies = [math["near"], math["far"]]
    yield (
        "In windows of 512 these are # % of the bytes and have # % of the decrease in loss: DAPE1x3-Kerple is better "
        "by # nats per byte where the copy is within the train length, by # where it is farther, and by # on the other",
        [
            *(100 * sum(each[field] for each in copies) for field in ("share", "decrease_share")),
            *(math[name]["decrease_nats"] for name in ("near", "far", "other")),
        ],
    )
    yield (
        "its loss is higher by # nats on the # % of the bytes whose copy is beyond the train length",
        [-prose["far"]["decrease_nats"], 100 * prose["far"]["share"]],
    )


def pretrained() -> Iterator[Statement]:
    names = {"pythia-2.8b": "Pythia 2.8B", "llama-3-8b": "Llama 3 8B, 6 of its 32 layers"}
    models = read("pretrained/import_memory.json")["models"]
    for model, name in zip(models, names.values(), strict=True):
        parameters, peak = model["parameter_bytes"], model["peak_read_bytes"]
        yield (
            f"| {name} | # GB | # GB | # GB | # GB |",
            [value / 1e9 for value in (parameters, model["largest_tensor_bytes"], peak, peak - parameters)],
        )
    yield from study()


def study() -> Iterator[Statement]:
    """Yield the figures of the continued RoPE model."""
    table = read("retrofit/retrofit.json")["perplexity"]
    for way, perplexity in table.items():
        yield f"| {way} | # | # | # | # |", [perplexity[length] for length in ("128", "256", "1024", "4096")]
    pairs = {(pair["way"], pair["against"]): pair["changes"] for pair in read("retrofit/pairs.json")["pairs"]}
    for (way, against), changes in pairs.items():
        template, values = f"| {way} | {against} |", []
        for length in ("128", "1024", "4096"):
            numbers = [changes[length][key] for key in ("percent", "low", "high")]
            signed = ["+#" if number > 0 else "#" for number in numbers]
            template += f" {signed[0]} % [{signed[1]}, {signed[2]}] |"
            values += numbers
        yield template, values
    steps = {(each["way"], each["percent"]): each["perplexity"] for each in read("retrofit/steps.json")["steps"]}
    for way in ("Kerple", "Kerple + DAPE1x3", "ALiBi + DAPE1x3"):
        for length in ("128", "1024"):
            values = [steps[way, percent][length] for percent in (2, 5, 10, 20, 40)]
            yield f"| {way} | {int(length):,} |" + " # |" * 5, values
    ways = ("Kerple", "ALiBi", "Kerple + DAPE1x3", "ALiBi + DAPE1x3")
    yield (
        "alone are # % and # % worse at the train length than RoPE; with DAPE1x3, # % and # %",
        [pairs[way, "RoPE"]["128"]["percent"] for way in ways],
    )
    recall = [each["recall_nats"] for each in read("retrofit/recall.json")["recall"]]
    near, far = (max(fmean(of_seeds[length]) for of_seeds in recall) for length in ("128", "1024"))
    yield "by # nats per byte at most", [near]
    yield "by up to # nats", [far]
    yarn, dape, rope = table["original, yarn"], steps["Kerple + DAPE1x3", 10], steps["RoPE", 10]
    yield "twice the train length and # % at four times", [100 * (yarn["512"] / yarn["128"] - 1)]
    yield (
        "was # % higher than RoPE's after 10 % of the steps (Kerple with DAPE1x3, as many steps of both), # % after "
        "40 %",
        [100 * (dape["128"] / rope["128"] - 1), pairs["Kerple + DAPE1x3", "RoPE"]["128"]["percent"]],
    )


PAGES = {
    "README.md": readme,
    "docs/getting_started.md": getting_started,
    "docs/evaluation.md": evaluation,
    "docs/che.md": che,
    "docs/distributed.md": distributed,
    "docs/training.md": training,
    "docs/gpu.md": gpu,
    "docs/kernel.md": kernel,
    "docs/planning.md": planning,
    "docs/reproducing.md": reproducing,
    "docs/pretrained.md": pretrained,
    "configs/quickstart.py": quickstart,
    "configs/small.py": small,
    "configs/che.py": che_recipe,
}


@pytest.mark.parametrize("page", PAGES)
def test_numbers_of_a_page_are_those_of_its_files(page):
    text = (ROOT / page).read_text()
    assert not [found for statement in PAGES[page]() if (found := difference(text, statement))]


# What pages say of the verdict of claims: words, verdict, experiment, parts of its claims.
VERDICTS = {
    "README.md": [
        ("Kerple alone becomes about as good (undecided,", "undecided", "cost", "kerple-900-steps"),
        ("; at the train length this is undecided:", "undecided", "equal_time", "at the train length"),
        ("it remains worse beyond the train length", "holds", "equal_time", "at every length beyond"),
    ],
    "docs/reproducing.md": [
        (
            "at and beyond the train length is undecided (three seeds)",
            "undecided",
            ON_PROSE,
            "256, DAPE1x3-Kerple is better than kerple at the train length",
            "256, DAPE1x3-Kerple is better than kerple at every length beyond",
        ),
        ("is undecided there too (two seeds)", "undecided", ON_PROSE, "512, DAPE1x3-Kerple is better than kerple"),
        ("better at 4,096 than at 128 is undecided", "undecided", ON_PROSE, "512, DAPE1x3-Kerple is better at 16384"),
        ("at 4,096 than at 64 on prose too: this **holds**", "holds", ON_PROSE, "256, DAPE1x3-Kerple is better at"),
        ("These three claims **hold**", "holds", "fig5", "improves ALiBi", "improves Kerple", "improves FIRE"),
        ("better than Kerple at every length: **holds**", "holds", "table4", "better than Kerple"),
        ("better than Kerple at every length: **holds**", "holds", "table5", "better than Kerple"),
        ("at every length: **holds** with Kerple and FIRE", "holds", "fig5", "(1x1)"),
        ("one of 3, to 1 %: **holds**, trained at 128 (`table5`)", "holds", "table5", "5 and 7"),
        ("the best of eight methods at every length: **holds** (`table2`)", "holds", "table2", "the best of all"),
        ("better than CoPE at every length: **holds** (`table9`)", "holds", "table9", "CoPE"),
        ("Transformer-XL is undecided", "undecided", "table9", "Transformer-XL"),
        ('is below that at the train length" is **contradicted**', "contradicted", "table5", "longest length is below"),
        ('more than doubles at twice the train length" is **contradicted**', "contradicted", "fig2", "RoPE fails"),
        ('about 1 (below 1.1)" is **contradicted**', "contradicted", "fig6", "is about 1 (below 1.1)"),
        ('(ratio above 0.75, 0.82, 0.89)" is **contradicted**', "contradicted", "table7", "above 0.75, 0.82, 0.89"),
        ("than RoPE trained there: **holds** (`fig3`)", "holds", "fig3", "RoPE trained at 4096"),
        ("as in the paper, is undecided", "undecided", "fig3", "the best DAPE1x3-Kerple is the one trained"),
        ("both **hold**. But", "holds", "table1", "helps DAPE1x3-Kerple at every length", "harms RoPE"),
        ("It **holds** with the next larger model size", "holds", "fig4", "better than DAPE-Kerple (1x1)"),
        ("of nine methods at every length: **holds**", "holds", "fig2", "the best of all at every length beyond"),
        ("of nine methods at the train length too", "undecided", "fig2", "the best of all at the train length"),
        ("five methods at every length up to 1,024: **holds** (`table3`)", "holds", "table3", "the best of all"),
        ("improves FIRE at every length also where", "holds", "fire", "DAPE1x3 improves FIRE"),
        ("trained at 128, at every length also with", "holds", "variants", "better than Kerple", "improves Kerple"),
        ("worse than DAPE1x3 is undecided", "undecided", "variants", "DAPE1x3 is better than DAPE1x3"),
        ("(`cost`, undecided)", "undecided", "cost", "kerple-900-steps"),
        ("For twice the steps Kerple is better", "contradicted", "cost", "kerple-1200-steps"),
        ("(undecided); wider and deeper models are worse", "undecided", "cost", "kerple-840-steps"),
        ("wider and deeper models are worse", "holds", "cost", "width-116", "5-layers"),
        ("at 64: these three claims **hold**", "holds", ON_MATH, "256, DAPE1x3-Kerple is better than kerple at"),
        ("at 64: these three claims **hold**", "holds", ON_MATH, "256, DAPE1x3-Kerple is better at 16384"),
        ("beyond the train length**: this **holds** at every length", "holds", "equal_time", "at every length beyond"),
        (
            "At the train length it is better by 1 %, which is undecided",
            "undecided",
            "equal_time",
            "at the train length",
        ),
        ("DAPE is better in less time, beyond the train", "holds", "equal_time", "at every length beyond"),
        ("at any of the three is undecided", "undecided", "rates", "at the common learning rate"),
        ("one of 2: both **hold** (`widths`", "holds", "widths", "of any width", "than a causal one of 2"),
        ("improves it at every length is undecided", "undecided", ON_MATH, "256, DAPE1x3 improves RoPE"),
        ("RoPE at every length is undecided, as trained at 64", "undecided", ON_MATH, "512, DAPE1x3 improves RoPE"),
        ("beyond it: both **hold** (three", "holds", ON_MATH, "256, DAPE1x3-Kerple is better than dape1x1-kerple"),
        ("more beyond it: both **hold** (two", "holds", ON_MATH, "256, DAPE1x3-Kerple is better than alibi"),
        (
            "and it is better at 4,096 than at 128: these three **hold** too",
            "holds",
            ON_MATH,
            "512, DAPE1x3-Kerple is better than kerple at the train length",
            "512, DAPE1x3-Kerple is better than kerple at every length beyond",
            "512, DAPE1x3-Kerple is better at 16384",
        ),
        ("by 20 % at 4,096: both **hold** (two", "holds", ON_MATH, "512, DAPE1x3-Kerple is better than alibi"),
        ("train length too, by 17 %: this **holds** (two", "holds", ON_MATH, "512, DAPE1x3-Kerple is better than RoPE"),
        (
            "both **hold** (three seeds), although",
            "holds",
            ON_MATH,
            "512, DAPE1x3-Kerple is better than dape1x1-kerple",
        ),
        ("better at 16,384 than at 256 **holds** (two seeds)", "holds", "larger", "better at 16384 than at 256"),
        ("by 6 %, which is undecided (two", "undecided", ON_MATH, "256, DAPE1x3-Kerple is better than RoPE at"),
        ("on stack manipulation is undecided", "undecided", "table6", "on stack manipulation, DAPE-Kerple (1x1) is"),
        ("(1x1) on missing duplicate is undecided too", "undecided", "table6", "better than DAPE-Kerple (1x1)"),
        ("DAPE1x3-Kerple more than Kerple: all **hold**", "holds", "context/converged-math", "trained at 256"),
        ("; the three claims **hold** there too", "holds", "context/converged-math", "trained at 512"),
        ("both claims **hold**. In windows of 4,096", "holds", "context/converged-prose", "more context helps"),
        ("more than Kerple is undecided, trained", "undecided", "context/converged-prose", "helps DAPE1x3"),
        ("is undecided too: it has", "undecided", ON_PROSE, "512, DAPE1x3-Kerple is better than dape1x1-kerple"),
        ("RoPE at every length is undecided (two", "undecided", ON_PROSE, "512, DAPE1x3 improves RoPE"),
        ("RoPE at every length is undecided there too", "undecided", ON_PROSE, "256, DAPE1x3 improves RoPE"),
        (
            "that more context helps DAPE (1x1) **holds** too",
            "holds",
            "context/converged-prose",
            "512, more context helps dape1x1",
        ),
        ("is undecided at the train length: it has", "undecided", ON_PROSE, "512, DAPE1x3-Kerple is better than RoPE"),
        ("beyond it: both **hold** (two seeds). In", "holds", ON_PROSE, "512, DAPE1x3-Kerple is better than alibi"),
        ("by 2.9 %: this **holds**. Beyond", "holds", ON_PROSE, "256, DAPE1x3-Kerple is better than alibi at the"),
        (
            "less at 4,096, this is undecided.",
            "undecided",
            ON_PROSE,
            "256, DAPE1x3-Kerple is better than alibi at every",
        ),
        (
            "at any, is undecided too (two seeds)",
            "undecided",
            ON_PROSE,
            "256, DAPE1x3-Kerple is better than RoPE at",
            "256, DAPE1x3-Kerple is better than dape1x1-kerple",
        ),
    ],
}


def verdicts_of(experiment: str, part: str) -> set[str]:
    """Return the verdicts of the claims with these words, without untested ones; see `claims_of`."""
    return {claim["verdict"] for claim in claims_of(experiment) if part in claim["claim"]} - {"not tested"}


@pytest.mark.parametrize("page", VERDICTS)
def test_verdicts_of_a_page_are_those_of_the_report(page):
    text = " ".join((ROOT / page).read_text().split())
    for words, verdict, experiment, *parts in VERDICTS[page]:
        assert words in text
        assert {part: verdicts_of(experiment, part) for part in parts} == {part: {verdict} for part in parts}, words


# What docs/reproducing.md says of parts of claims that are undecided: words, experiment, part of the claim, its pairs
# that hold.
PAIRS = [
    (
        "Trained at 32, it **holds** for 5 keys and is undecided for 7 (`table4`)",
        "table4",
        "5 and 7",
        {"dape1x5-kerple T32 against 1.01 x dape1x3-kerple T32"},
    ),
    (
        "in the mean over the lengths beyond training, **holds** on even pairs and is undecided on missing duplicate",
        "table6",
        "on even pairs and on missing duplicate",
        {"kerple on even_pairs minus dape1x3-kerple on even_pairs"},
    ),
    (
        "where the order of the input matters is undecided: it **holds** on even pairs and on compute sqrt",
        "table6",
        "on 8 of 11",
        {f"kerple on {task} minus dape1x3-kerple on {task}" for task in ("even_pairs", "compute_sqrt")},
    ),
]


@pytest.mark.parametrize(("words", "experiment", "part", "expected"), PAIRS)
def test_pairs_that_hold_are_those_of_the_report(words, experiment, part, expected):
    assert words in " ".join((ROOT / "docs/reproducing.md").read_text().split())
    (claim,) = [claim for claim in claims_of(experiment) if part in claim["claim"]]
    assert claim["verdict"] == "undecided"
    assert {pair["pair"] for pair in claim["pairs"] if pair["verdict"] == "holds"} == expected


def test_every_verdict_of_reproducing_is_tested():
    text = " ".join((ROOT / "docs/reproducing.md").read_text().split())
    (rest,) = re.findall("not tested so far:(.*)## Exactness", text)
    for words, *_ in (*VERDICTS["docs/reproducing.md"], *PAIRS):
        rest = rest.replace(words, "")
    assert not re.findall(r".{,60}\b(?:holds?|contradicted|undecided)\b", rest)


OTHERS = {  # first cells of rows whose numbers have no raw file in this repository
    "docs/kernel.md": {"350M"},  # the paper's
}


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))])
def test_every_number_of_a_table_is_tested(page):
    """Look for rows with a cell that begins with a decimal number, and that are in no statement."""
    templates = [template for template, _ in PAGES[page]()] if page in PAGES else []
    rows = re.findall(r"^\|.*\| -?\d[\d,]*\.\d+(?![\dB]).*$", (ROOT / page).read_text(), re.MULTILINE)
    untested = [row for row in rows if not any(find(row, template) for template in templates)]
    assert {row.split("|")[1].strip() for row in untested} == OTHERS.get(page, set())


def test_a_wrong_number_is_found():
    text = "| kerple |\n 4.88 | 1,234 MiB |"
    template = "| kerple | # | # MiB |"
    assert difference(text, (template, [4.884, 1233.6])) is None
    assert "not 4.889" in (difference(text, (template, [4.889, 1233.6])) or "")
    assert "not 1235" in (difference(text, (template, [4.884, 1235])) or "")
    assert "has no" in (difference(text, ("| kerple | # | # GiB |", [4.884, 1233.6])) or "")
