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
from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.evaluation.perplexity import compile_lengths, score_windows
from dape_jax.evaluation.trained import require_same, restore
from experiments.repetition import latest_match
from experiments.studies import interval, read_study, save

CLASSES = ("near", "far", "other")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    workdir: tuple[str, ...] = flag(dataclasses.MISSING, "Run directories of language models; the first is the base.")
    lengths: tuple[int, ...] = flag((64, 512), "Increasing lengths of the windows, in tokens.")
    match: int = flag(8, "Tokens that must be equal before a token is copied.")
    windows: int = flag(256, "Maximum number of windows.")
    output: str = flag("results/copying", "Result directory.")

    def __post_init__(self):
        require(self.match > 0, "--match", self.match, "must be positive")


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
        sums, counts = ((base - nll) * is_class).sum(1)[with_class], is_class.sum(1)[with_class].astype(float)
        record = {"class": name, "share": count / classes.size, "nats": float(nll[is_class].mean())}
        record |= {"decrease_nats": float(sums.sum() / count), **interval(documents[with_class], sums, counts)}
        records.append(record | {"decrease_share": float(sums.sum() / total) if total else None})
    return records


def main(settings: Settings) -> None:
    """Measure all models, print the table, write the files."""
    study = read_study(settings)
    require_same(study.models, "train.train_length", "evaluation.last_tokens")
    first, store, scores = study.models[0], study.store, {}
    for model in study.models:
        programs = compile_lengths(model, len(study.windows))
        mesh, params = restore(model)
        scores[model.name] = score_windows(programs, params, mesh, store, study.windows, model.name)
    base, train_length = scores[first.name], first.run.train.train_length
    classes = {}
    for length, nll in base.items():
        tokens = (window.tokens(store, length) for window in study.windows)
        classes[length] = np.stack([classes_of(each, settings.match, nll.shape[1], train_length) for each in tokens])
    results = []
    for model in study.models:
        records = [
            {"length": length} | record
            for length, nll in scores[model.name].items()
            for record in measure(nll, base[length], classes[length], study.documents)
        ]
        results.append({"name": model.name, "step": model.step, "train_length": train_length, "lengths": records})
    caption = (
        f"Loss in nats per token, and its decrease from {first.name}, on tokens that copying predicts after "
        f"{settings.match} equal tokens, from the last {train_length} tokens (near) or from farther (far), and on the "
        f"others. {study.sample}"
    )
    content = {"data": study.data_digest, "match": settings.match, "num_windows": len(study.windows), "runs": results}
    save("copying", study.directory, content, caption)


if __name__ == "__main__":
    command_line.run(main, Settings)
