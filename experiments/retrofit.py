"""Extend the length of a trained RoPE model: replace its positions, continue training briefly, and measure the cost.

    python -m experiments.corpora --corpus=manuals --output=data/manuals
    python -m experiments.retrofit --data=data/manuals --workdir=runs/retrofit

A model with Pythia's architecture (parallel residual, RoPE on a quarter of each head, about 5M parameters) is trained
on bytes in PyTorch transformers at T = 128, saved, imported, and continued at T = 128 in the ways of `WAYS`, with a
constant learning rate after warm-up: one run gives the points at 2, 5, 10, 20 and 40 % of the original steps. A way of
several stages has the points of its last stage. All are evaluated up to 32 T on the same windows, one in each document,
so that differences of two runs have paired intervals over documents. Needs the extra `hf`.

Recall is measured on text: the last bytes of a sequence are replaced by a passage of another document, and in half of
the sequences the first bytes are replaced by the same passage. Recall is the difference in loss of the last passage
between the two halves. The passage's first bytes are the cue and are not scored.

Finished parts are kept: the same command resumes, and commands for different seeds can run at the same time. A WORKDIR
has one corpus and one number of steps. OUTPUT has `points.jsonl.zst` with the loss of every window, `retrofit.png`, and
`retrofit.json` with perplexities after the last step and, on half of the windows, after fewer, with the effect of DAPE,
recall, and the position where the loss breaks.
"""

import dataclasses
import functools
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.data.batches import train_batches
from dape_jax.data.store import Corpus, DataConfig, TokenStore
from dape_jax.data.tokenizers import byte_tokenizer_json
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.evaluation.perplexity import (
    ScoredWindow,
    choose_windows,
    compile_lengths,
    score_windows,
    window_batch,
)
from dape_jax.evaluation.programs import Program, run_in_batches
from dape_jax.evaluation.statistics import bootstrap_interval, positions_result, ratio_of_sums
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.files import read_json, write_json
from dape_jax.model.transformer import Params
from dape_jax.pretrained.load import import_run
from dape_jax.provenance import make_results_directory
from dape_jax.training.checkpoint import step_names
from dape_jax.training.source import load_corpus
from experiments.runs import write_lines

ROOT = Path(__file__).resolve().parent.parent

TRAIN_LENGTH, BATCH_SIZE = 128, 16
SIZES = {"num_hidden_layers": 4, "hidden_size": 320, "num_attention_heads": 5, "intermediate_size": 1280}
PEAK, CONTINUED = 1e-3, 5e-4  # learning rates
PERCENTS = (2, 5, 10, 20, 40)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
WINDOWS = 32
QUICK_LENGTHS, QUICK_WINDOWS = (128, 1024, 4096), 16  # of the points before the last; the first of the windows
RECALL_LENGTHS = (128, 1024)
PASSAGE, CUE = 32, 8  # bytes
KERPLE = "rotary=none,bias=kerple"
DAPE = "processor=dape,channels=16"

# Stages of each way to continue: percent of the original steps, argument of configs/continued.py, and flags.
Stage = tuple[float, str, tuple[str, ...]]
WAYS: dict[str, list[Stage]] = {
    "RoPE": [(40, "", ())],
    "RoPE + DAPE1x3": [(40, f"{DAPE},kernel=3", ())],
    "RoPE + Kerple + DAPE1x3": [(40, f"bias=kerple,{DAPE},kernel=3", ())],
    "Kerple": [(40, KERPLE, ())],
    "Kerple + DAPE1x1": [(40, f"{KERPLE},{DAPE},kernel=1", ())],
    "Kerple + DAPE1x3": [(40, f"{KERPLE},{DAPE},kernel=3", ())],
    "ALiBi": [(40, "rotary=none,bias=alibi", ())],
    "ALiBi + DAPE1x1": [(40, f"rotary=none,bias=alibi,{DAPE},kernel=1", ())],
    "ALiBi + DAPE1x3": [(40, f"rotary=none,bias=alibi,{DAPE},kernel=3", ())],
    "Kerple + DAPE1x3, only these": [
        (40, f"{KERPLE},{DAPE},kernel=3", ("--config.init.train_only=bias,processor",)),
    ],
    # Angles are divided by increasing factors, and then removed.
    "Kerple + DAPE1x3, RoPE faded": [
        (5, f"rotary=pi,bias=kerple,{DAPE},kernel=3", ("--config.model.rotary.factor=2.0",)),
        (5, "", ("--config.model.rotary.factor=8.0",)),
        (5, "", ("--config.model.rotary.factor=64.0",)),
        (25, "rotary=none", ()),
    ],
}
# Lines of the original with each rotary embedding at evaluation; positions and steps have the first two.
ORIGINALS = {"rope": ":", "yarn": "--", "ntk": "-.", "pi": ":"}
DRAWN_ORIGINALS = ("original, rope", "original, yarn")
# Pairs of ways to compare, which differ in DAPE, a bias or the start.
PAIRS = (
    ("RoPE + DAPE1x3", "RoPE"),
    ("RoPE + Kerple + DAPE1x3", "RoPE"),
    ("Kerple", "RoPE"),
    ("Kerple + DAPE1x3", "RoPE"),
    ("ALiBi", "RoPE"),
    ("ALiBi + DAPE1x3", "RoPE"),
    ("Kerple + DAPE1x1", "Kerple"),
    ("Kerple + DAPE1x3", "Kerple"),
    ("ALiBi + DAPE1x1", "ALiBi"),
    ("ALiBi + DAPE1x3", "ALiBi"),
    ("Kerple + DAPE1x3, only these", "Kerple + DAPE1x3"),
    ("Kerple + DAPE1x3, RoPE faded", "Kerple + DAPE1x3"),
)


@dataclasses.dataclass(frozen=True)
class Study:
    """Checked flags, and the paths and sizes that follow from them."""

    data: str = flag("data/manuals", "Corpus of bytes written by `prepare`.")
    workdir: str = flag("runs/retrofit", "Directory of the run directories.")
    output: str = flag("results/retrofit", "Directory of the results.")
    seeds: tuple[int, ...] = flag((0, 1), "Seeds of the models.")
    steps: int = flag(1500, "Steps of the original training; a multiple of 100.")
    way: tuple[str, ...] = flag((), "Name of a way to continue; may be repeated. All if not given.", repeated=True)

    def __post_init__(self):
        require(bool(self.seeds), "--seeds", self.seeds, "must have one or more seeds")
        require(self.steps > 0 and self.steps % 100 == 0, "--steps", self.steps, "must be a positive multiple of 100")
        for name in self.way:
            require(name in WAYS, "--way", name, f"must be one of {list(WAYS)}")

    def percent(self, percent: float) -> int:
        """Return the number of steps that is this percentage of the original steps."""
        return round(self.steps * percent / 100)

    def original(self, seed: int) -> Path:
        """Return the directory of the model trained in PyTorch."""
        return Path(self.workdir, f"original-{seed}")

    def imported(self, seed: int) -> Path:
        """Return the run directory of the imported model."""
        return Path(self.workdir, f"imported-{seed}")

    def continued(self, way: str, seed: int, stage: int) -> Path:
        """Return the run directory of a stage of a way."""
        name = "".join(c if c.isalnum() else "-" for c in way.lower()).replace("--", "-").replace("--", "-")
        return Path(self.workdir, f"{name}-{seed}-{stage}")

    def corpus(self, seed: int) -> Corpus:
        """Return the text; the seed orders the training windows."""
        return load_corpus(DataConfig(self.data, None, str(Path(self.workdir, "cache")), 0.05, seed))


def main(_: list[str]) -> None:
    """Train, import, continue, evaluate, and write the results."""
    study = from_flags(Study)
    output = make_results_directory(Path(study.output))
    ways = {name: WAYS[name] for name in (study.way or WAYS)}
    keep_settings(study)
    for seed in study.seeds:
        train_original(study, seed)
        if not step_names(study.imported(seed)):
            import_run(study.original(seed), study.imported(seed), tokenizer="bytes")
    points: list[dict[str, Any]] = []
    for seed in study.seeds:
        points += [evaluate(study, seed, "original", study.imported(seed), 0, 0, rotary) for rotary in ORIGINALS]
    for seed, (way, stages) in itertools.product(study.seeds, ways.items()):
        points += continue_way(study, way, stages, seed)
    write_lines(Path(output, "points.jsonl.zst"), points)
    content = summarise(points)
    rows = [["continued as", *map(str, LENGTHS)]]
    rows += [[way, *(f"{value:.2f}" for value in of_way.values())] for way, of_way in content["perplexity"].items()]
    caption = (
        f"Perplexity per byte of the last {TRAIN_LENGTH} bytes by length, {WINDOWS} windows, mean of "
        f"{len(study.seeds)} seeds; trained at {TRAIN_LENGTH} bytes and continued there for {max(PERCENTS)} % of the "
        "original steps."
    )
    report.save("retrofit", output, content, caption, rows, steps_figure(content["steps"]))


def keep_settings(study: Study) -> None:
    """Record corpus and steps in the directory, or check that its finished parts have the same.

    Raises:
        InputError: the directory has another corpus or number of steps.
    """
    file, settings = Path(study.workdir, "study.json"), {"data": study.data, "steps": study.steps}
    if file.exists():
        require(read_json(file) == settings, "--workdir", study.workdir, f"was begun with {read_json(file)}")
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, settings)


# ---- training


def train_original(study: Study, seed: int) -> None:
    """Train the model in PyTorch with AdamW, warm-up and a cosine schedule, and save it with transformers."""
    directory = study.original(seed)
    if (directory / "config.json").exists():
        return
    import torch
    import transformers

    torch.manual_seed(seed)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPTNeoXConfig(vocab_size=257, max_position_embeddings=TRAIN_LENGTH, **SIZES, **ends)
    model = transformers.GPTNeoXForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, study.percent(2), study.steps, min_lr_rate=0.1
    )
    sizes: dict[str, Any] = {"train_length": TRAIN_LENGTH, "global_batch_size": BATCH_SIZE}
    batches = train_batches(study.corpus(seed).train, seed=seed, shard_index=0, num_shards=1, **sizes)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    losses = []
    with tqdm(total=study.steps, desc=f"{directory.name}, {num_params / 1e6:.1f}M parameters") as bar:
        for _ in range(study.steps):
            batch = next(batches)
            logits = model(torch.tensor(np.asarray(batch["inputs"], np.int64))).logits
            targets = torch.tensor(np.asarray(batch["targets"], np.int64))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {np.mean(losses[-50:]):.3f}", refresh=False)
            bar.update()
    partial = directory.with_name(f"{directory.name}.partial")
    model.save_pretrained(partial)
    (partial / "tokenizer.json").write_text(byte_tokenizer_json())
    write_json(partial / "losses.json", {"loss_nats": losses, "num_params": num_params})
    partial.rename(directory)


def continue_way(study: Study, way: str, stages: list[Stage], seed: int) -> list[dict[str, Any]]:
    """Continue the imported model in one way, and return its perplexities at all points of its last stage."""
    source, done = study.imported(seed), 0.0
    for stage, (percent, argument, more) in enumerate(stages):
        workdir = study.continued(way, seed, stage)
        num_steps, is_last = study.percent(percent), stage == len(stages) - 1
        interval = study.percent(1)
        if str(num_steps) not in step_names(workdir):
            arguments = ",".join(filter(None, (f"source={source}", argument)))
            command = [sys.executable, str(ROOT / "train.py"), f"--config={ROOT}/configs/continued.py:{arguments}"]
            settings = {
                "data.path": study.data,
                "data.tokenizer": "bytes",
                "data.seed": 100 + seed,  # windows in another order than in the original training
                "train.train_length": TRAIN_LENGTH,
                "train.batch_size": BATCH_SIZE,
                "train.num_steps": num_steps,
                "train.eval_interval": interval,
                "train.validation_batches": 4,
                "train.checkpoint_interval": interval,
                "train.max_to_keep": 100 if is_last else 1,
                "optimizer.learning_rate": CONTINUED,
                "optimizer.warmup_fraction": study.percent(1) / num_steps,
                "optimizer.final_fraction": 1.0,
            }
            command += [f"--config.{field}={value}" for field, value in settings.items()]
            subprocess.run([*command, *more, f"--workdir={workdir}"], check=True)
        if is_last:
            steps = {p: study.percent(p - done) for p in PERCENTS if p > done}
            return [evaluate(study, seed, way, workdir, p, step, "rope") for p, step in steps.items()]
        source, done = workdir, done + percent
    raise AssertionError("a way has at least one stage")


# ---- evaluation


def evaluate(study: Study, seed: int, way: str, workdir: Path, percent: int, step: int, rotary: str) -> dict[str, Any]:
    """Return the loss of every window by length, in nats per byte of the last 128, and save it in a file.

    The original and the last point of a way also have the loss by position, and recall.
    """
    file = Path(study.workdir, "scores") / f"{workdir.name}-{step}-{rotary}.json"
    if file.exists():
        return read_json(file)
    is_last = percent in (0, max(PERCENTS))
    lengths, num_windows = (LENGTHS, WINDOWS) if is_last else (QUICK_LENGTHS, QUICK_WINDOWS)
    overrides = {"lengths": lengths, "last_tokens": max(LENGTHS), "max_windows": num_windows, "batch_tokens": 4096}
    model = read_trained(workdir, str(step), overrides)
    store = study.corpus(seed).validation
    windows = choose_windows(store, max(LENGTHS), WINDOWS)
    enough = len({window.document for window in windows}) == WINDOWS
    require(enough, "--data", study.data, f"must hold out {WINDOWS} documents of more than {max(LENGTHS):,} bytes")
    windows = windows[:num_windows]
    programs = compile_lengths(model, rotary, len(windows))
    mesh, params = restore(model)
    nll = score_windows(programs, params, mesh, store, windows, f"{workdir.name} {percent} % {rotary}")
    result = {
        "way": way if way != "original" else f"original, {rotary}",
        "seed": seed,
        "percent": percent,
        "documents": [window.document for window in windows],
        "nll_nats": {str(length): each[:, -TRAIN_LENGTH:].mean(axis=1).tolist() for length, each in nll.items()},
    }
    if is_last:
        documents = np.array(result["documents"])
        result["positions"] = positions_result(documents, nll[max(LENGTHS)], TRAIN_LENGTH)
        recalled = [program for program in programs if program.length in RECALL_LENGTHS]
        result["recall_nats"] = recall(recalled, params, mesh, store, windows)
    file.parent.mkdir(exist_ok=True)
    write_json(file, result)
    jax.clear_caches()
    return result


def recall(
    programs: list[Program], params: Params, mesh: Mesh, store: TokenStore, windows: list[ScoredWindow]
) -> dict[str, list[float]]:
    """Return, by length, the decrease in loss of each passage if it was also at the start, in nats."""
    passages = [store.document(window.document)[-PASSAGE:] for window in (*windows[1:], windows[0])]

    def batch(length: int, is_repeated: bool, rows: Int[np.ndarray, "B"]) -> dict[str, np.ndarray]:
        text = window_batch(store, windows, length, rows)
        tokens = np.concatenate([text["inputs"], text["targets"][:, -1:]], axis=1)
        tokens[:, -PASSAGE:] = [passages[row] for row in rows]
        if is_repeated:
            tokens[:, :PASSAGE] = tokens[:, -PASSAGE:]
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    gains = {}
    with jax.set_mesh(mesh):
        for program in programs:
            unseen, seen = (
                run_in_batches(
                    functools.partial(program.step, params),
                    functools.partial(batch, program.length, is_repeated),
                    num_rows=len(windows),
                    batch_size=program.batch_size,
                    mesh=mesh,
                    progress=lambda _: None,
                )[:, CUE - PASSAGE :].mean(axis=1)
                for is_repeated in (False, True)
            )
            gains[str(program.length)] = (unseen - seen).tolist()
    return gains


# ---- report

Key = tuple[str, int]  # way and percent


def by_seed(points: list[dict[str, Any]]) -> dict[Key, dict[int, dict[str, Any]]]:
    """Return the points of each way and percent by seed."""
    table: dict[Key, dict[int, dict[str, Any]]] = {}
    for point in points:
        table.setdefault((point["way"], point["percent"]), {})[point["seed"]] = point
    return table


def perplexities(seeds: dict[int, dict[str, Any]], lengths: tuple[int, ...], num_windows: int) -> dict[int, float]:
    """Return the perplexity, by length, of the mean loss over seeds and the first windows."""
    return {
        length: math.exp(np.mean([point["nll_nats"][str(length)][:num_windows] for point in seeds.values()]))
        for length in lengths
    }


def change(ours: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]], length: int) -> dict[str, Any]:
    """Return the change of perplexity in per cent, paired by seed and window, and that of each seed.

    The 95 % bootstrap interval is over documents. It does not include the variation over seeds.
    """
    documents, changes, each = [], [], {}
    for seed, point in ours.items():
        assert point["documents"] == base[seed]["documents"]
        documents += point["documents"]
        differences = np.subtract(point["nll_nats"][str(length)], base[seed]["nll_nats"][str(length)])
        changes += differences.tolist()
        each[seed] = in_percent(float(differences.mean()))
    sums = np.array(changes), np.ones(len(changes))
    low, high = bootstrap_interval(np.array(documents), sums, ratio_of_sums)
    mean = in_percent(float(np.mean(changes)))
    return {"percent": mean, "low": in_percent(low), "high": in_percent(high), "seeds": each}


def in_percent(difference_nats: float) -> float:
    """Return the change of perplexity, in per cent, that corresponds to a difference of losses."""
    return 100 * math.expm1(difference_nats)


def summarise(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the points say: perplexities, their paired changes, recall, and where the loss breaks."""
    table, last = by_seed(points), max(PERCENTS)
    recalled = [
        {
            "way": way,
            "percent": percent,
            "seeds": list(seeds),
            "recall_nats": {
                length: [np.mean(point["recall_nats"][str(length)]) for point in seeds.values()]
                for length in RECALL_LENGTHS
            },
            "breaks_at": [point["positions"]["breaks_at"] for point in seeds.values()],
            "last_octave_nats": [point["positions"]["last_octave_nats"] for point in seeds.values()],
        }
        for (way, percent), seeds in table.items()
        if percent in (0, last)
    ]
    return {
        "ways": WAYS,
        "perplexity": {
            way: perplexities(seeds, LENGTHS, WINDOWS)
            for (way, percent), seeds in table.items()
            if percent in (0, last)
        },
        "steps": [
            {"way": way, "percent": percent, "perplexity": perplexities(seeds, QUICK_LENGTHS, QUICK_WINDOWS)}
            for (way, percent), seeds in table.items()
            if way in WAYS or way in DRAWN_ORIGINALS
        ],
        "pairs": [
            {
                "way": way,
                "against": base,
                "changes": {length: change(table[way, last], table[base, last], length) for length in LENGTHS},
            }
            for way, base in PAIRS
            if (way, last) in table and (base, last) in table
        ],
        "recall": recalled,
    }


def style(way: str) -> dict[str, Any]:
    """Return the color, marker and line of a way: colors for positions, markers for the processor; originals black."""
    if way not in WAYS:
        return {"color": "black", "linestyle": ORIGINALS[way.removeprefix("original, ")]}
    colors = {"RoPE + Kerple": "tab:purple", "RoPE": "tab:gray", "Kerple": "tab:blue", "ALiBi": "tab:orange"}
    color = next(color for positions, color in colors.items() if way.startswith(positions))
    marker = "^" if "1x3" in way else "s" if "1x1" in way else "o"
    line = "--" if "only these" in way else ":" if "faded" in way else "-"
    return {"color": color, "marker": marker, "linestyle": line, "markersize": 4}


def steps_figure(steps: list[dict[str, Any]]) -> Figure:
    """Plot perplexity against steps of continued training, at 1, 8 and 32 times the train length."""
    table = {(each["way"], each["percent"]): each["perplexity"] for each in steps}
    drawing = Figure(figsize=(13, 5), layout="constrained")
    panels = drawing.subplots(1, len(QUICK_LENGTHS))
    for axes, length in zip(panels, QUICK_LENGTHS, strict=True):
        for way in dict.fromkeys(way for way, _ in table):
            curve = {percent: perplexity[length] for (name, percent), perplexity in table.items() if name == way}
            if way in WAYS:
                axes.plot(list(curve), list(curve.values()), label=way, **style(way))
            else:
                axes.axhline(curve[0], label=way, color="black", linewidth=1, linestyle=style(way)["linestyle"])
        axes.set(title=f"{length:,} bytes ({length // TRAIN_LENGTH} T)", yscale="log")
        axes.set_xlabel("steps, % of the original")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(StrMethodFormatter("{x:g}"))  # plain numbers on a logarithmic axis
    panels[0].set_ylabel(f"perplexity of the last {TRAIN_LENGTH} bytes")
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return drawing


if __name__ == "__main__":
    define_flags(Study)
    command_line.run(main)
