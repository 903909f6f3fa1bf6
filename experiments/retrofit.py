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

Finished parts are kept: the same command resumes, and commands for different seeds can run at the same time. OUTPUT has
`points.jsonl.zst` with the loss of every window, `retrofit.png`, and `retrofit.json` with perplexities after the last
step and, on half of the windows, after fewer, with the effect of DAPE, recall, and the position where the loss breaks.
"""

import dataclasses
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
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
from dape_jax.evaluation.perplexity import ScoredWindow, choose_windows, compile_lengths, score_windows
from dape_jax.evaluation.statistics import positions_result
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.files import read_json, write_json
from dape_jax.pretrained.load import import_run
from dape_jax.provenance import make_results_directory
from dape_jax.training.checkpoint import step_names
from dape_jax.training.source import load_corpus
from experiments.runs import write_lines
from experiments.studies import interval

ROOT = Path(__file__).resolve().parent.parent

TRAIN_LENGTH, BATCH_SIZE, STEPS = 128, 16, 1500
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
    "Kerple + DAPE1x3, only these": [(40, f"{KERPLE},{DAPE},kernel=3", ("--config.init.train_only=bias,processor",))],
    # Angles are divided by increasing factors, and then removed.
    "Kerple + DAPE1x3, RoPE faded": [
        (5, f"rotary=pi,bias=kerple,{DAPE},kernel=3", ("--config.model.rotary.factor=2.0",)),
        (5, "", ("--config.model.rotary.factor=8.0",)),
        (5, "", ("--config.model.rotary.factor=64.0",)),
        (25, "rotary=none", ()),
    ],
}
# Rotary embeddings of the original at evaluation, with their lines in the figure.
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
class Settings:
    """Checked flags, and the paths that follow from them."""

    data: str = flag("data/manuals", "Corpus of bytes written by `prepare`.")
    workdir: str = flag("runs/retrofit", "Directory of the run directories.")
    output: str = flag("results/retrofit", "Directory of the results.")
    seeds: tuple[int, ...] = flag((0, 1), "Seeds of the models.")

    def __post_init__(self):
        require(bool(self.seeds), "--seeds", self.seeds, "must have one or more seeds")

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


def steps_of(percent: float) -> int:
    """Return the number of steps that is this percentage of the original steps."""
    return round(STEPS * percent / 100)


def main(_: list[str]) -> None:
    """Train, import, continue, evaluate, and write the results."""
    settings = from_flags(Settings)
    output = make_results_directory(Path(settings.output))
    points: list[dict[str, Any]] = []
    for seed in settings.seeds:
        imported = settings.imported(seed)
        train_original(settings, seed)
        if not step_names(imported):
            import_run(settings.original(seed), imported, tokenizer="bytes")
        points += [evaluate(settings, seed, "original", imported, 0, 0, rotary) for rotary in ORIGINALS]
    for seed, (way, stages) in itertools.product(settings.seeds, WAYS.items()):
        points += continue_way(settings, way, stages, seed)
    write_lines(Path(output, "points.jsonl.zst"), points)
    content = summarise(points)
    rows = [["continued as", *map(str, LENGTHS)]]
    rows += [[way, *(f"{value:.2f}" for value in of_way.values())] for way, of_way in content["perplexity"].items()]
    caption = (
        f"Perplexity per byte of the last {TRAIN_LENGTH} bytes by length, {WINDOWS} windows, mean of "
        f"{len(settings.seeds)} seeds; trained at {TRAIN_LENGTH} bytes and continued there for {max(PERCENTS)} % of "
        "the original steps."
    )
    report.save("retrofit", output, content, caption, rows, steps_figure(content["steps"]))


# ---- training


def train_original(settings: Settings, seed: int) -> None:
    """Train the model in PyTorch with AdamW, warm-up and a cosine schedule, and save it with transformers."""
    directory = settings.original(seed)
    if (directory / "config.json").exists():
        return
    import torch
    import transformers

    torch.manual_seed(seed)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPTNeoXConfig(vocab_size=257, max_position_embeddings=TRAIN_LENGTH, **SIZES, **ends)
    model = transformers.GPTNeoXForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, steps_of(2), STEPS, min_lr_rate=0.1)
    sizes: dict[str, Any] = {"train_length": TRAIN_LENGTH, "global_batch_size": BATCH_SIZE}
    batches = train_batches(settings.corpus(seed).train, seed=seed, shard_index=0, num_shards=1, **sizes)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    losses = []
    for _ in tqdm(range(STEPS), desc=f"{directory.name}, {num_params / 1e6:.1f}M parameters"):
        batch = {name: torch.tensor(np.asarray(each, np.int64)) for name, each in next(batches).items()}
        logits = model(batch["inputs"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    partial = directory.with_name(f"{directory.name}.partial")
    model.save_pretrained(partial)
    (partial / "tokenizer.json").write_text(byte_tokenizer_json())
    write_json(partial / "losses.json", {"loss_nats": losses, "num_params": num_params})
    partial.rename(directory)


def continue_way(settings: Settings, way: str, stages: list[Stage], seed: int) -> list[dict[str, Any]]:
    """Continue the imported model in one way, and return its perplexities at all points of its last stage."""
    source, done, interval = settings.imported(seed), 0.0, steps_of(1)
    for stage, (percent, argument, more) in enumerate(stages):
        workdir, num_steps = settings.continued(way, seed, stage), steps_of(percent)
        if str(num_steps) not in step_names(workdir):
            arguments = ",".join(filter(None, (f"source={source}", argument)))
            command = [sys.executable, str(ROOT / "train.py"), f"--config={ROOT}/configs/continued.py:{arguments}"]
            fields = {
                "data.path": settings.data,
                "data.tokenizer": "bytes",
                "data.seed": 100 + seed,  # windows in another order than in the original training
                "train.train_length": TRAIN_LENGTH,
                "train.batch_size": BATCH_SIZE,
                "train.num_steps": num_steps,
                "train.eval_interval": interval,
                "train.validation_batches": 4,
                "train.checkpoint_interval": interval,
                "train.max_to_keep": 100,
                "optimizer.learning_rate": CONTINUED,
                "optimizer.warmup_fraction": interval / num_steps,
                "optimizer.final_fraction": 1.0,
            }
            command += [f"--config.{field}={value}" for field, value in fields.items()]
            subprocess.run([*command, *more, f"--workdir={workdir}"], check=True)
        if stage < len(stages) - 1:
            source, done = workdir, done + percent
    steps = {percent: steps_of(percent - done) for percent in PERCENTS if percent > done}
    return [evaluate(settings, seed, way, workdir, percent, step, "rope") for percent, step in steps.items()]


# ---- evaluation


def evaluate(
    settings: Settings, seed: int, way: str, workdir: Path, percent: int, step: int, rotary: str
) -> dict[str, Any]:
    """Return the loss of every window by length, in nats per byte of the last 128, and save it in a file.

    The original and the last point of a way also have the loss by position, and recall.
    """
    file = Path(settings.workdir, "scores") / f"{workdir.name}-{step}-{rotary}.json"
    if file.exists():
        return read_json(file)
    is_last = percent in (0, max(PERCENTS))
    lengths, num_windows = (LENGTHS, WINDOWS) if is_last else (QUICK_LENGTHS, QUICK_WINDOWS)
    overrides = {"lengths": lengths, "last_tokens": max(LENGTHS), "max_windows": num_windows, "batch_tokens": 4096}
    model, store = read_trained(workdir, str(step), overrides), settings.corpus(seed).validation
    windows = choose_windows(store, max(LENGTHS), WINDOWS)
    enough = len({window.document for window in windows}) == WINDOWS
    require(enough, "--data", settings.data, f"must hold out {WINDOWS} documents of more than {max(LENGTHS):,} bytes")
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
        result["positions"] = positions_result(np.array(result["documents"]), nll[max(LENGTHS)], TRAIN_LENGTH)
        recalled = [program for program in programs if program.length in RECALL_LENGTHS]
        unseen, seen = (
            score_windows(recalled, params, mesh, store, with_passages(store, windows, is_repeated), f"{way}, recall")
            for is_repeated in (False, True)
        )
        result["recall_nats"] = {
            str(length): (unseen[length] - seen[length])[:, CUE - PASSAGE :].mean(axis=1).tolist() for length in unseen
        }
    file.parent.mkdir(exist_ok=True)
    write_json(file, result)
    jax.clear_caches()
    return result


@dataclasses.dataclass(frozen=True)
class RecallWindow(ScoredWindow):
    """Window that ends with a passage of another document, and begins with it too if `is_repeated`."""

    passage: Int[np.ndarray, "passage"]
    is_repeated: bool

    def tokens(self, store: TokenStore, length: int) -> Int[np.ndarray, "N"]:
        """Return the tokens of the window with the passage."""
        tokens = super().tokens(store, length)
        tokens[-PASSAGE:] = self.passage
        if self.is_repeated:
            tokens[:PASSAGE] = self.passage
        return tokens


def with_passages(store: TokenStore, windows: list[ScoredWindow], is_repeated: bool) -> list[RecallWindow]:
    """Return the windows, each with the last bytes of the next window's document."""
    passages = [store.document(window.document)[-PASSAGE:].astype(np.int32) for window in (*windows[1:], windows[0])]
    return [
        RecallWindow(window.document, window.end, passage, is_repeated)
        for window, passage in zip(windows, passages, strict=True)
    ]


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
        each[seed] = 100 * math.expm1(float(differences.mean()))
    found = {"percent": float(np.mean(changes)), **interval(np.array(documents), np.array(changes))}
    return {name: 100 * math.expm1(nats) for name, nats in found.items()} | {"seeds": each}


def summarise(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the points say: perplexities, their paired changes, recall, and where the loss breaks."""
    table, last = by_seed(points), max(PERCENTS)
    ends = {key: seeds for key, seeds in table.items() if key[1] in (0, last)}
    pairs = [pair for pair in PAIRS if all((way, last) in table for way in pair)]
    return {
        "ways": WAYS,
        "perplexity": {way: perplexities(seeds, LENGTHS, WINDOWS) for (way, _), seeds in ends.items()},
        "steps": [
            {"way": way, "percent": percent, "perplexity": perplexities(seeds, QUICK_LENGTHS, QUICK_WINDOWS)}
            for (way, percent), seeds in table.items()
            if way in WAYS or way in DRAWN_ORIGINALS
        ],
        "pairs": [
            {"way": way, "against": base}
            | {"changes": {length: change(table[way, last], table[base, last], length) for length in LENGTHS}}
            for way, base in pairs
        ],
        "recall": [
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
            for (way, percent), seeds in ends.items()
        ],
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
    define_flags(Settings)
    command_line.run(main)
