"""Measure the recall of a sentence in held-out text by depth and length (needle in a haystack).

    python -m experiments.needle --workdir=runs/kerple,runs/dape1x3-kerple --lengths=128,512,2048 --output=runs/needle

A window of N tokens has one needle at depth d (0 at the beginning, 1 at the end), and the question at its end:

    ... text ... The code of kobuta is 40817. ... text ... The code of kobuta is 40817
    |<------ d ------>|                                                        ^^^^^ scored

Key and value are random. Measured over `--windows` windows: the loss of the value in nats per token, and the same loss
without the needle (with more text instead). A model with DAPE is measured twice: as trained, and with DAPE's update set
to zero, which leaves its weights with the plain bias.

Writes needle.json.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import Int

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.data.store import TokenStore
from dape_jax.data.tokenizers import Tokenizer, saved_tokenizer
from dape_jax.evaluation.perplexity import Window, compile_lengths, score_windows
from dape_jax.evaluation.statistics import NllByLength
from dape_jax.evaluation.trained import restore
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import Params, flat_params
from dape_jax.storage import to_path
from experiments.studies import Study, interval, read_study, save

DIGITS = 5
ZEROED = ("output_WCH", "output_bias_H")  # parameters of DAPE's second convolution; at zero, the update is zero


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    workdir: tuple[str, ...] = flag(dataclasses.MISSING, "Run directories of language models with the same tokenizer.")
    lengths: tuple[int, ...] = flag((128, 256, 512, 1024, 2048), "Increasing lengths of the windows, in tokens.")
    depths: int = flag(5, "Number of depths, evenly spaced from 0 to 1.")
    windows: int = flag(128, "Number of windows of each length and depth.")
    output: str = flag("results/needle", "Result directory.")


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
    texts = f" The code of {key} is {value}. ", f" The code of {key} is ", value
    return Needle(*(np.asarray(tokenizer.encode(text.encode()), np.int32) for text in texts))


@dataclasses.dataclass(frozen=True)
class NeedleWindow(Window):
    """Window with a question at its end, and its needle at a depth, or without the needle if the depth is None."""

    needle: Needle
    depth: float | None

    def tokens(self, store: TokenStore, length: int) -> Int[np.ndarray, "N"]:
        """Return the tokens of a window; at all lengths, the text before the question is the same."""
        return self.around(super().tokens(store, length))

    def around(self, text: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """Return the end of a text with the needle and the question, N tokens in all."""
        sentence = self.needle.sentence[: 0 if self.depth is None else None]
        ending = np.concatenate([self.needle.question, self.needle.value])
        kept = text[len(sentence) + len(ending) :]
        at = round((self.depth or 0) * len(kept))
        return np.concatenate([kept[:at], sentence, kept[at:], ending])


def without_update(params: Params) -> Params:
    """Return the parameters of a model with DAPE whose update is zero."""
    flat = flat_params(params)
    return unflatten_dict(
        {path: jnp.zeros_like(x) if "processor" in path and path[-1] in ZEROED else x for path, x in flat.items()}
    )


def measure(
    study: Study, needles: list[Needle], depths: list[float], score: Callable[[list[Window]], NllByLength]
) -> list[dict[str, Any]]:
    """Return the results of one model at every length and depth; `score` returns the loss of windows by length."""
    nats: dict[float | None, dict[int, np.ndarray]] = {}
    for depth in (None, *depths):
        places = zip(study.windows, needles, strict=True)
        scored = score([NeedleWindow(window.document, window.end, needle, depth) for window, needle in places])
        nats[depth] = {length: nll.mean(axis=1) for length, nll in scored.items()}
    without, records = nats.pop(None), []
    for length, (depth, found) in itertools.product(without, nats.items()):
        gains = without[length] - found[length]
        losses = {"nats": float(found[length].mean()), "nats_without": float(without[length].mean())}
        records.append({"length": length, "depth": depth, **losses, "decrease_nats": float(gains.mean())})
        records[-1] |= interval(study.documents, gains)
    return records


def main(settings: Settings) -> None:
    """Measure all models, print the table, write the files."""
    tokenizer = saved_tokenizer(to_path(settings.workdir[0], "--workdir"))
    needles = [make_needle(number, tokenizer) for number in range(settings.windows)]
    (num_scored,) = {len(needle.value) for needle in needles}
    study = read_study(settings, last_tokens=num_scored, batch_tokens=8192)
    needles, depths, results = needles[: len(study.windows)], np.linspace(0, 1, settings.depths).tolist(), []
    for model in study.models:
        programs = compile_lengths(model, len(study.windows))
        mesh, params = restore(model)
        variants = {model.name: params}
        if isinstance(model.run.model.processor, DapeConfig):
            variants[f"{model.name}, update zero"] = without_update(params)
        for name, of_variant in variants.items():
            score = functools.partial(score_windows, programs, of_variant, mesh, study.store, name=name)
            about = {"name": name, "step": model.step, "train_length": model.run.train.train_length}
            results.append(about | {"lengths": measure(study, needles, depths, score)})
    caption = f"Loss of {DIGITS} digits, in nats per token, with their needle in the text and without. {study.sample}"
    content = {"data": study.data_digest, "digits": DIGITS, "num_windows": len(study.windows), "runs": results}
    save("needle", study.directory, content, caption)


if __name__ == "__main__":
    command_line.run(main, Settings)
