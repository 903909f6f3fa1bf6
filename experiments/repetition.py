"""Measure how much a text repeats: what a model could copy from its context.

    python -m experiments.repetition --data=data/math,data/prose,stdlib --output=results/repetition

A token is predictable by copying from a context of N tokens if the last `--match` tokens before it are there already,
and the token after the latest of these occurrences is the same. No model is needed:

    ... the text of the context ... the text of the con[t] ...        match = 19: "t" followed the same text before
            |<--- the same --->|   |<--- the same -->|

Measured for each N of `--lengths`: the share of tokens whose last `--match` tokens occur in the N tokens before, and
the share of tokens that are predictable. The tokens are the last `--scored` of held-out windows, chosen as `eval.py`
does.

Writes repetition.json.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.data.store import DataConfig, TokenStore, follow_corpus
from dape_jax.errors import require
from dape_jax.evaluation.perplexity import choose_windows
from dape_jax.progress import Progress
from dape_jax.provenance import make_results_directory
from dape_jax.storage import to_path
from dape_jax.training.source import load_corpora
from experiments.studies import interval, save


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    data: tuple[str, ...] = flag(dataclasses.MISSING, "Texts, each in the form of --config.data.path.")
    lengths: tuple[int, ...] = flag(
        (64, 128, 256, 512, 1024, 2048, 4096), "Increasing lengths of the context, in tokens."
    )
    match: int = flag(8, "Tokens that must be equal before a token is copied.")
    scored: int = flag(256, "Tokens that are scored at the end of a window.")
    windows: int = flag(256, "Maximum number of windows.")
    output: str = flag("results/repetition", "Result directory.")

    def __post_init__(self):
        require(self.match > 0, "--match", self.match, "must be positive")


def latest_match(
    tokens: Int[np.ndarray, "N"], match: int, scored: int
) -> tuple[Int[np.ndarray, "scored"], Int[np.ndarray, "scored"]]:
    """Return for each of the last tokens how long a context must be to contain the tokens before it, and the copy.

    Args:
        tokens: tokens of a window.
        match: number of tokens before a token that must be equal.
        scored: number of tokens at the end of the window.

    Returns:
        The shortest context in tokens that contains an earlier occurrence of the last `match` tokens and the token
        after it, or more than N if there is none; and the token after the latest occurrence, or -1.
    """
    followers: dict[bytes, int] = {}  # index of the token that follows the latest occurrence
    reach, copied = np.full(scored, len(tokens) + 1), np.full(scored, -1)
    for at in range(match, len(tokens)):
        before = tokens[at - match : at].tobytes()
        number = at - (len(tokens) - scored)
        if number >= 0 and before in followers:
            reach[number], copied[number] = at - followers[before] + match, tokens[followers[before]]
        followers[before] = at
    return reach, copied


def measure(store: TokenStore, settings: Settings, name: str) -> dict[str, Any]:
    """Return the results of one text at every length of the context."""
    num_inputs, records = max(settings.lengths) + settings.scored - 1, []
    windows = choose_windows(store, num_inputs, settings.windows)
    tokens = [window.tokens(store, num_inputs) for window in windows]
    found = [latest_match(each, settings.match, settings.scored) for each in Progress(tokens, desc=name, unit="window")]
    reach, copied = (np.stack(each) for each in zip(*found, strict=True))
    is_right = copied == np.stack(tokens)[:, -settings.scored :]
    documents = np.array([window.document for window in windows])
    for length in settings.lengths:
        predicted = ((reach <= length) & is_right).mean(1)
        shares = {"repeated": float((reach <= length).mean()), "predicted": float(predicted.mean())}
        records.append({"length": length, **shares, **interval(documents, predicted)})
    counts = {"num_windows": len(windows), "num_documents": len(set(documents.tolist()))}
    return {"name": name, **counts, "lengths": records}


def main(settings: Settings) -> None:
    """Measure all texts, print the table, write the files."""
    directory = make_results_directory(to_path(settings.output, "--output"), "--output")
    results = []
    for path in settings.data:
        fields = {"path": path, "tokenizer": None, "cache_dir": "data"}
        fields = follow_corpus({"data": fields, "model": {"vocab_size": None}})["data"]
        corpora = load_corpora(DataConfig(**fields, validation_fraction=0.05, seed=0))
        results.append(measure(corpora.validation[path], settings, path) | {"data": corpora.digest})
    caption = (
        f"Share of tokens whose last {settings.match} tokens occur in the context, and of those that copying the token "
        f"after their latest occurrence predicts. The last {settings.scored} tokens of held-out windows; 95 % "
        "bootstrap intervals over documents."
    )
    content = {"match": settings.match, "scored": settings.scored, "runs": results}
    save("repetition", directory, content, caption)


if __name__ == "__main__":
    command_line.run(main, Settings)
