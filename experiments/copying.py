"""Measure on which tokens models differ: those that copying from the context predicts, near or far, and the others.

    python -m experiments.copying --workdir=runs/kerple,runs/dape1x3-kerple --lengths=64,512 --output=results/copying

A token is predictable by copying if its last `--match` tokens occur earlier in the window, and the token after their
latest occurrence is the same (`repetition.py`). It is "near" if that needs no more context than the train length, "far"
if it needs more, and every token that is not predictable is "other". Measured for each model, at each length: the loss
of the last tokens of held-out windows in each class, in nats per token, and its decrease from the first model to the
others. The windows are those of `eval.py`.

Writes copying.json.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float64, Int

from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.data.store import TokenStore
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.evaluation.options import STEP_HELP
from dape_jax.evaluation.perplexity import (
    NllByLength,
    ScoredWindow,
    choose_windows,
    common_corpus,
    compile_lengths,
    score_windows,
)
from dape_jax.evaluation.statistics import bootstrap_interval, ratio_of_sums
from dape_jax.evaluation.trained import read_trained, require_different_names, require_same, restore
from dape_jax.provenance import make_results_directory
from dape_jax.storage import to_path
from experiments.repetition import latest_match

CLASSES = ("near", "far", "other")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    workdir: tuple[str, ...] = flag(dataclasses.MISSING, "Run directories of language models; the first is the base.")
    lengths: tuple[int, ...] = flag((64, 512), "Increasing lengths of the windows, in tokens.")
    match: int = flag(8, "Tokens that must be equal before a token is copied.")
    windows: int = flag(256, "Maximum number of windows.")
    data: str | None = flag(None, "Corpus of the text, like --config.data.path; if unset, the corpus of each run.")
    step: str = flag("newest", STEP_HELP)
    output: str = flag("results/copying", "Result directory.")

    def __post_init__(self):
        require(len(self.workdir) > 1, "--workdir", self.workdir, "must be two or more")
        for field in ("match", "windows"):
            require(getattr(self, field) > 0, f"--{field}", getattr(self, field), "must be positive")
        allowed = f"must be longer than --match = {self.match}"
        require(bool(self.lengths) and min(self.lengths) > self.match, "--lengths", self.lengths, allowed)


def classes_of(tokens: Int[np.ndarray, "N"], match: int, scored: int, train_length: int) -> Int[np.ndarray, "scored"]:
    """Return the class of each of the last tokens of a window, as its number in `CLASSES`."""
    reach, copied = latest_match(tokens, match, scored)
    classes = np.where(reach <= train_length, CLASSES.index("near"), CLASSES.index("far"))
    return np.where(copied == tokens[-scored:], classes, CLASSES.index("other"))


def measure(
    nll: Float64[np.ndarray, "W T"],
    base: Float64[np.ndarray, "W T"],
    classes: Int[np.ndarray, "W T"],
    documents: Int[np.ndarray, "W"],
) -> list[dict[str, Any]]:
    """Return for each class its share of the tokens, its loss, and the decrease from the base with an interval.

    `decrease_share` is the part of the decrease over all tokens that is in the class.
    """
    total = (base - nll).sum()
    records = []
    for number, name in enumerate(CLASSES):
        is_class = classes == number
        count = int(is_class.sum())
        if not count:
            continue
        with_class = is_class.any(1)  # no draw of documents must be without tokens of the class
        sums = ((base - nll) * is_class).sum(1)[with_class], is_class.sum(1)[with_class].astype(float)
        low, high = bootstrap_interval(documents[with_class], sums, ratio_of_sums)
        records.append({"class": name, "share": count / classes.size, "nats": float(nll[is_class].mean())})
        records[-1] |= {"decrease_nats": float(sums[0].sum() / count), "low": low, "high": high}
        records[-1]["decrease_share"] = float(sums[0].sum() / total) if total else None
    return records


def classify(
    store: TokenStore, windows: list[ScoredWindow], nll: NllByLength, match: int, train_length: int
) -> dict[int, Int[np.ndarray, "W T"]]:
    """Return the classes of the scored tokens of all windows, by length."""
    found = {}
    for length, nll_WT in nll.items():
        tokens = [window.tokens(store, length) for window in windows]
        found[length] = np.stack([classes_of(each, match, nll_WT.shape[1], train_length) for each in tokens])
    return found


def main(_: list[str]) -> None:
    """Measure all models, print the table, write the files."""
    settings = from_flags(Settings)
    changes = {"lengths": settings.lengths, "max_windows": settings.windows}
    models = [read_trained(to_path(workdir, "--workdir"), settings.step, changes) for workdir in settings.workdir]
    require_different_names(models, "--workdir")
    require_same(models, "train.train_length", "evaluation.last_tokens")
    corpus = common_corpus(models, settings.data)
    directory = make_results_directory(to_path(settings.output, "--output"), "--output")
    store, train_length = corpus.validation, models[0].run.train.train_length
    windows = choose_windows(store, max(settings.lengths), settings.windows)
    documents = np.array([each.document for each in windows])

    results, base, classes = [], {}, {}
    for model in models:
        programs = compile_lengths(model, "rope", len(windows))
        mesh, params = restore(model)
        nll = score_windows(programs, params, mesh, store, windows, model.name)
        if model is models[0]:
            base, classes = nll, classify(store, windows, nll, settings.match, train_length)
        records = [
            {"length": length} | record
            for length in settings.lengths
            for record in measure(nll[length], base[length], classes[length], documents)
        ]
        results.append({"name": model.name, "step": model.step, "train_length": train_length, "lengths": records})
    rows = [["model", "length", "tokens", "share", "loss", "decrease", "part of it"]]
    for result in results:
        for each in result["lengths"]:
            row = [result["name"], f"{each['length']:,}", each["class"], f"{each['share']:.1%}", f"{each['nats']:.3f}"]
            if result is not results[0]:
                interval = "" if each["low"] is None else f" [{each['low']:.3f}, {each['high']:.3f}]"
                part = "" if each["decrease_share"] is None else f"{each['decrease_share']:.0%}"
                row += [f"{each['decrease_nats']:.3f}{interval}", part]
            rows.append(row + [""] * (len(rows[0]) - len(row)))
    caption = (
        f"Loss in nats per token, and its decrease from {results[0]['name']}, on tokens that copying predicts after "
        f"{settings.match} equal tokens, from the last {train_length} tokens (near) or from farther (far), and on the "
        f"others. {len(windows)} windows from {len(set(documents.tolist()))} validation documents; 95 % bootstrap "
        "intervals over documents."
    )
    content = {"data": corpus.digest, "match": settings.match, "num_windows": len(windows), "runs": results}
    report.save("copying", directory, content, caption, rows, None)


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
