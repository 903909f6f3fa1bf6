"""Measure the recall of a sentence in held-out text by depth and length (needle in a haystack).

    python -m experiments.needle --workdir=runs/kerple,runs/dape1x3-kerple --lengths=128,512,2048 --output=runs/needle

A window of N tokens has one needle at depth d (0 at the beginning, 1 at the end), and the question at its end:

    ... text ... The code of kobuta is 40817. ... text ... The code of kobuta is 40817
    |<------ d ------>|                                                        ^^^^^ scored

Key and value are random. Measured over `--windows` windows: the loss of the value in nats per token, the same loss
without the needle (with more text instead), and the share of windows in which every token of the value is the most
probable one, given the tokens before it. A model with DAPE is measured twice: as trained, and with DAPE's update set to
zero, which leaves its weights with the plain bias.

Writes needle.json.
"""

import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, Float64, Int

from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.data.tokenizers import Tokenizer, saved_tokenizer
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.evaluation.options import STEP_HELP
from dape_jax.evaluation.perplexity import choose_windows, common_corpus
from dape_jax.evaluation.programs import model_at, run_in_batches
from dape_jax.evaluation.statistics import bootstrap_interval, ratio_of_sums
from dape_jax.evaluation.trained import TrainedModel, read_trained, require_different_names, restore
from dape_jax.model.flops import forward_flops
from dape_jax.model.loss import nll
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import Params, TransformerConfig, flat_params, model_structure
from dape_jax.progress import Progress
from dape_jax.provenance import make_results_directory
from dape_jax.storage import to_path

DIGITS = 5
ZEROED = ("output_WCH", "output_bias_H")  # parameters of DAPE's second convolution; at zero, the update is zero


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    workdir: tuple[str, ...] = flag(dataclasses.MISSING, "Run directories of language models with the same tokenizer.")
    lengths: tuple[int, ...] = flag((128, 256, 512, 1024, 2048), "Lengths of the windows, in tokens.")
    depths: int = flag(5, "Number of depths, evenly spaced from 0 to 1.")
    windows: int = flag(128, "Number of windows of each length and depth.")
    batch_tokens: int = flag(8192, "Tokens in a batch.")
    data: str | None = flag(None, "Corpus of the text, like --config.data.path; if unset, the corpus of each run.")
    step: str = flag("newest", STEP_HELP)
    output: str = flag("results/needle", "Result directory.")

    def __post_init__(self):
        require(self.depths > 1, "--depths", self.depths, "must be 2 or more")
        require(self.windows > 0, "--windows", self.windows, "must be positive")
        require(bool(self.lengths) and min(self.lengths) >= 96, "--lengths", self.lengths, "must be 96 or more")


@dataclasses.dataclass(frozen=True)
class Needle:
    """Sentence to insert, the question at the end of the window, and the value that answers it, in tokens."""

    sentence: Int[np.ndarray, "sentence"]
    question: Int[np.ndarray, "question"]
    value: Int[np.ndarray, "value"]


def make_needle(number: int, tokenizer: Tokenizer) -> Needle:
    """Return the needle of a window; the same for all models, lengths and depths."""
    draw = random.Random(number)
    key = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3))
    value = "".join(draw.choice("0123456789") for _ in range(DIGITS))

    def encoded(text: str) -> np.ndarray:
        return np.asarray(tokenizer.encode(text.encode()), np.int32)

    return Needle(encoded(f" The code of {key} is {value}. "), encoded(f" The code of {key} is "), encoded(value))


def window_tokens(
    text: Int[np.ndarray, "text"], needle: Needle, length: int, depth: float | None
) -> Int[np.ndarray, "length"]:
    """Return a window of `length` tokens with the needle at a depth, or without it if the depth is None.

    `text` is used from its end, so that all lengths have the same text before the question.
    """
    ending = np.concatenate([needle.question, needle.value])
    room = length - len(ending)
    if depth is None:
        return np.concatenate([text[len(text) - room :], ending])
    room -= len(needle.sentence)
    around, at = text[len(text) - room :], round(depth * room)
    return np.concatenate([around[:at], needle.sentence, around[at:], ending])


def make_step(config: TransformerConfig, num_scored: int) -> Any:
    """Return the jitted `step(params, batch)`: losses and hits of the last tokens of each row, [B, num_scored] each."""
    graphdef, _ = model_structure(config)

    @jax.jit
    def step(params: Params, batch: dict[str, Array]) -> tuple[Array, Array]:
        model = nnx.merge(graphdef, params)
        targets = batch["targets"][:, -num_scored:]
        logits = model.logits(model.features(batch["inputs"], num_last=num_scored))
        return nll(logits, targets), logits.argmax(-1) == targets

    return step


def without_update(params: Params) -> Params:
    """Return the parameters of a model with DAPE whose update is zero."""
    flat = flat_params(params)
    return unflatten_dict(
        {path: jnp.zeros_like(x) if "processor" in path and path[-1] in ZEROED else x for path, x in flat.items()}
    )


def measure(
    trained: TrainedModel,
    params: Params,
    mesh: Mesh,
    texts: list[np.ndarray],
    documents: np.ndarray,
    tokenizer: Tokenizer,
    settings: Settings,
    name: str,
) -> dict[str, Any]:
    """Return the results of one model at every length and depth."""
    needles = [make_needle(number, tokenizer) for number in range(len(texts))]
    (num_scored,) = {len(needle.value) for needle in needles}
    depths = [None, *np.linspace(0, 1, settings.depths).tolist()]
    records, without = [], np.zeros(0)
    row_flops = {length: forward_flops(trained.run.model, length, 1).total for length in settings.lengths}
    total = len(texts) * len(depths) * sum(row_flops.values())
    with jax.set_mesh(mesh), Progress(total=total, unit="FLOP", unit_scale=True, desc=name) as bar:
        for length, flops in row_flops.items():
            run = trained.run
            step = make_step(model_at(run.model, length, run.evaluation, "rope", run.train.train_length), num_scored)
            for depth in depths:

                def batch_of(rows: np.ndarray, length: int = length, depth: float | None = depth) -> dict[str, Any]:
                    chosen = [window_tokens(texts[row], needles[row], length + 1, depth) for row in rows]
                    tokens = np.stack(chosen).astype(np.int32)
                    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

                losses, hits = run_in_batches(
                    functools.partial(step, params),
                    batch_of,
                    num_rows=len(texts),
                    batch_size=max(1, min(len(texts), settings.batch_tokens // length)),
                    mesh=mesh,
                    progress=lambda num_rows, flops=flops: bar.update(num_rows * flops),
                )
                nats = losses.astype(np.float64).mean(axis=1)
                if depth is None:
                    without = nats
                    continue
                records.append(
                    {
                        "length": length,
                        "depth": depth,
                        "nats": float(nats.mean()),
                        "nats_without": float(without.mean()),
                        "exact": float(hits.all(axis=1).mean()),
                        **decrease(documents, without - nats),
                    }
                )
    return {"name": name, "step": trained.step, "train_length": trained.run.train.train_length, "lengths": records}


def decrease(documents: np.ndarray, gains: Float64[np.ndarray, "windows"]) -> dict[str, Any]:
    """Return the mean decrease in loss with the needle, and its 95 % bootstrap interval over documents."""
    low, high = bootstrap_interval(documents, (gains, np.ones_like(gains)), ratio_of_sums)
    return {"decrease_nats": float(gains.mean()), "low": low, "high": high}


def main(_: list[str]) -> None:
    """Measure all models, print the table, write the files."""
    settings = from_flags(Settings)
    models = [read_trained(to_path(workdir, "--workdir"), settings.step, {}) for workdir in settings.workdir]
    require_different_names(models, "--workdir")
    corpus = common_corpus(models, settings.data)
    directory = make_results_directory(to_path(settings.output, "--output"), "--output")
    store, longest = corpus.validation, max(settings.lengths)
    windows = choose_windows(store, longest, settings.windows)
    texts = [window.tokens(store, longest) for window in windows]
    documents = np.array([each.document for each in windows])

    results = []
    for trained in models:
        mesh, params = restore(trained)
        arguments = (mesh, texts, documents, saved_tokenizer(trained.workdir), settings)
        results.append(measure(trained, params, *arguments, trained.name))
        if isinstance(trained.run.model.processor, DapeConfig):
            results.append(measure(trained, without_update(params), *arguments, f"{trained.name}, update zero"))
    rows = [["model", "length", "depth", "loss with", "without", "decrease", "exact"]]
    for result in results:
        for each in result["lengths"]:
            interval = "" if each["low"] is None else f" [{each['low']:.2f}, {each['high']:.2f}]"
            rows.append(
                [
                    *(result["name"], f"{each['length']:,}", f"{each['depth']:.2f}", f"{each['nats']:.2f}"),
                    *(f"{each['nats_without']:.2f}", f"{each['decrease_nats']:.2f}{interval}", f"{each['exact']:.1%}"),
                ]
            )
    caption = (
        f"Loss of a value of {DIGITS} digits, in nats per token, with its needle in the text and without. "
        f"{len(texts)} windows from {len(set(documents.tolist()))} validation documents; 95 % bootstrap intervals over "
        "documents."
    )
    content = {"data": corpus.digest, "digits": DIGITS, "num_windows": len(texts), "runs": results}
    report.save("needle", directory, content, caption, rows, None)


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
