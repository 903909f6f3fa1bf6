"""Give length to a trained RoPE model: replace its positions, continue briefly, and measure what that costs.

    python -m dape_jax.data.prepare --input=PATH/_sources --output=data/linux-doc --tokenizer=bytes \
        --validation_fraction=0.05
    python scripts/retrofit.py --data=data/linux-doc --workdir=runs/retrofit

A model in the shape of Pythia (parallel residual, RoPE on a quarter of each head, some 5M parameters) is trained on
bytes in PyTorch transformers at T = 128, saved, imported, and continued at T = 128 in the ways of `WAYS`, with a
constant learning rate: one run gives the points at 2, 5, 10, 20 and 40 % of the original steps. All are evaluated to
32 T on the same windows of the same documents, so that differences of two runs have paired intervals over documents.

Each finished part is kept: the same command resumes. Results are written to OUTPUT: `retrofit.json` with every
perplexity, `retrofit.md` and `retrofit.png`.
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
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.data.batches import train_batches
from dape_jax.data.store import Corpus, DataConfig, load_corpus
from dape_jax.data.tokenizers import byte_tokenizer_json
from dape_jax.evaluation import report
from dape_jax.evaluation.perplexity import choose_windows, compile_lengths, score_windows
from dape_jax.evaluation.statistics import bootstrap_interval
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.files import read_json, write_json
from dape_jax.pretrained.load import import_run
from dape_jax.provenance import make_results_directory
from dape_jax.training.checkpoint import step_names

ROOT = Path(__file__).resolve().parent.parent

DATA = flags.DEFINE_string("data", "data/linux-doc", "Corpus of bytes that `prepare` has written.")
WORKDIR = flags.DEFINE_string("workdir", "runs/retrofit", "Directory of the models.")
OUTPUT = flags.DEFINE_string("output", "results/retrofit", "Directory of the results.")
SEEDS = flags.DEFINE_integer("seeds", 2, "Number of seeds.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 2000, "Steps of the original training; a multiple of 100.", lower_bound=100)
WAY = flags.DEFINE_multi_string("way", [], "Name of a way to continue, see WAYS; repeat it. All if it is not given.")

TRAIN_LENGTH, BATCH_SIZE = 128, 16
SIZES = {"num_hidden_layers": 4, "hidden_size": 320, "num_attention_heads": 5, "intermediate_size": 1280}
PEAK, CONTINUED = 1e-3, 5e-4  # learning rates
PERCENTS = (2, 5, 10, 20, 40)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
QUICK = (128, 1024, 4096)  # lengths before the last point
WINDOWS = {False: 32, True: 64}  # by whether it is the last point
KERPLE = "rotary=none,bias=kerple"
DAPE = "processor=dape,channels=16"

# What each way continues with: stages of percent of the original steps, argument of configs/continue.py, and flags.
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
    # Angles are divided by more and more, and then removed.
    "Kerple + DAPE1x3, RoPE faded": [
        (5, f"rotary=pi,bias=kerple,{DAPE},kernel=3", ("--config.model.rotary.factor=2.0",)),
        (5, "", ("--config.model.rotary.factor=8.0",)),
        (5, "", ("--config.model.rotary.factor=64.0",)),
        (25, "rotary=none", ()),
    ],
}
STRETCHES = ("rope", "pi", "ntk", "yarn")  # of the original model


@dataclasses.dataclass(frozen=True)
class Study:
    """Paths and sizes of a study."""

    data: str
    workdir: Path
    steps: int

    def percent(self, percent: float) -> int:
        """Return a share of the original steps."""
        return round(self.steps * percent / 100)

    def original(self, seed: int) -> Path:
        """Return the directory of the model that PyTorch has trained."""
        return self.workdir / f"original-{seed}"

    def imported(self, seed: int) -> Path:
        """Return the run that it is imported as."""
        return self.workdir / f"imported-{seed}"

    def continued(self, way: str, seed: int, stage: int) -> Path:
        """Return the run of a stage of a way."""
        name = "".join(c if c.isalnum() else "-" for c in way.lower()).replace("--", "-").replace("--", "-")
        return self.workdir / f"{name}-{seed}-{stage}"

    def corpus(self, seed: int) -> Corpus:
        """Return the text; the seed orders the training windows."""
        return load_corpus(DataConfig(self.data, None, str(self.workdir / "cache"), 0.05, seed))


def main(_: list[str]) -> None:
    """Train, import, continue, evaluate, and write the results."""
    output = make_results_directory(Path(OUTPUT.value))
    study = Study(DATA.value, Path(WORKDIR.value), STEPS.value)
    ways = {name: WAYS[name] for name in (WAY.value or WAYS)}
    for seed in range(SEEDS.value):
        train_original(study, seed)
        if not step_names(study.imported(seed)):
            import_run(study.original(seed), study.imported(seed))
    points: list[dict[str, Any]] = []
    for seed in range(SEEDS.value):
        points += [evaluate(study, seed, "original", study.imported(seed), 0, 0, rotary) for rotary in STRETCHES]
    for seed, (way, stages) in itertools.product(range(SEEDS.value), ways.items()):
        points += continue_way(study, way, stages, seed)
    write_report(study, points, output)


# ---- training


def train_original(study: Study, seed: int) -> None:
    """Train the model in PyTorch with AdamW, a warm-up and a cosine schedule, and save it as transformers does."""
    directory = study.original(seed)
    if (directory / "config.json").exists():
        return
    import torch
    import transformers

    torch.manual_seed(seed)
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPTNeoXConfig(vocab_size=257, max_position_embeddings=TRAIN_LENGTH, **SIZES, **ends)
    model = transformers.GPTNeoXForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, study.percent(2), study.steps, min_lr_rate=0.1
    )
    sizes = {"train_length": TRAIN_LENGTH, "global_batch_size": BATCH_SIZE}
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
            command = [sys.executable, str(ROOT / "train.py"), f"--config={ROOT}/configs/continue.py:{arguments}"]
            settings = {
                "data.path": study.data,
                "data.tokenizer": "bytes",
                "data.seed": 100 + seed,  # other windows than those of the original training
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
    """Return the loss of every window by length, in nats per byte of the last 128; it is kept in a file."""
    file = study.workdir / "scores" / f"{workdir.name}-{step}-{rotary}.json"
    if file.exists():
        return read_json(file)
    is_last = percent in (0, max(PERCENTS))
    lengths, num_windows = (LENGTHS if is_last else QUICK), WINDOWS[is_last]
    overrides = {"lengths": lengths, "last_tokens": TRAIN_LENGTH, "max_windows": num_windows, "batch_tokens": 4096}
    model = read_trained(workdir, str(step), overrides)
    store = study.corpus(seed).validation
    windows = choose_windows(store, max(LENGTHS), num_windows)
    programs = compile_lengths(model, rotary, len(windows))
    mesh, params = restore(model)
    nll = score_windows(programs, params, mesh, store, windows, f"{workdir.name} {percent} % {rotary}")
    result = {
        "way": way if way != "original" else f"original, {rotary}",
        "seed": seed,
        "percent": percent,
        "documents": [window.document for window in windows],
        "nll_nats": {str(length): values.mean(axis=1).tolist() for length, values in nll.items()},
        "positions_nats": nll[max(lengths)].mean(axis=0).tolist(),
    }
    file.parent.mkdir(exist_ok=True)
    write_json(file, result)
    jax.clear_caches()
    return result


# ---- report


def write_report(study: Study, points: list[dict[str, Any]], output: Path) -> None:
    """Write perplexities, means over seeds, and paired differences from the model without DAPE."""
    table: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in points:
        table.setdefault((point["way"], point["percent"]), []).append(point)
    rows = [["continued as", "steps", *map(str, LENGTHS), "vs. unchanged at 4,096"]]
    summary = []
    for (way, percent), seeds in table.items():
        perplexity = {
            length: math.exp(np.mean([np.mean(point["nll_nats"][str(length)]) for point in seeds]))
            for length in LENGTHS
            if str(length) in seeds[0]["nll_nats"]
        }
        change = difference(seeds, table[("original, rope", 0)], max(LENGTHS))
        summary.append({"way": way, "percent": percent, "perplexity": perplexity, "change_at_longest": change})
        cells = [f"{perplexity[length]:.3f}" if length in perplexity else "" for length in LENGTHS]
        low, mean, high = (f"{100 * (math.exp(value) - 1):+.1f}" for value in change)
        rows.append([way, f"{percent} %", *cells, f"{mean} % [{low}, {high}]"])
    caption = (
        f"Perplexity of the last {TRAIN_LENGTH} bytes by length; trained at {TRAIN_LENGTH} for {study.steps} steps"
    )
    content = {"points": points, "summary": summary, "ways": WAYS}
    report.save("retrofit", output, content, caption, rows, figure(summary), print)


def difference(points: list[dict[str, Any]], base: list[dict[str, Any]], length: int) -> tuple[float, float, float]:
    """Return low, mean and high of the difference of two losses in nats per byte, paired by seed and window."""
    by_seed = {point["seed"]: point for point in base}
    documents, changes = [], []
    for point in points:
        ours, theirs = point["nll_nats"][str(length)], by_seed[point["seed"]]["nll_nats"][str(length)]
        number = min(len(ours), len(theirs))
        assert point["documents"][:number] == by_seed[point["seed"]]["documents"][:number]
        documents += point["documents"][:number]
        changes += (np.array(ours[:number]) - theirs[:number]).tolist()
    sums = np.array(changes), np.ones(len(changes))
    low, high = bootstrap_interval(np.array(documents), sums, lambda a, b, axis: a.sum(axis) / b.sum(axis))
    return float(low), float(np.mean(changes)), float(high)


def figure(summary: list[dict[str, Any]]) -> Figure:
    """Draw perplexity against steps of continuation, at 1, 8 and 32 times the train length."""
    drawing = Figure(figsize=(13, 4.5), layout="constrained")
    panels = drawing.subplots(1, len(QUICK))
    original = {each["way"]: each["perplexity"] for each in summary if each["percent"] == 0}
    for axes, length in zip(panels, QUICK, strict=True):
        for way in WAYS:
            found = [each for each in summary if each["way"] == way and length in each["perplexity"]]
            if found:
                axes.plot(
                    [e["percent"] for e in found], [e["perplexity"][length] for e in found], marker="o", label=way
                )
        for name, style in (("original, rope", ":"), ("original, yarn", "--")):
            axes.axhline(original[name][length], color="gray", linestyle=style, label=name)
        axes.set(title=f"{length} bytes ({length // TRAIN_LENGTH} T)", xlabel="steps, % of the original", yscale="log")
    panels[0].set_ylabel("perplexity")
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return drawing


if __name__ == "__main__":
    command_line.run(main)
