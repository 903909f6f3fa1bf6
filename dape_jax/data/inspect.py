"""Inspect a prepared corpus: print counts, document lengths and samples, and verify its digest.

    python -m dape_jax.data.inspect data/arxiv
    python -m dape_jax.data.inspect data/arxiv/validation --samples=10 --output=results/arxiv

In: a directory written by `prepare`, or one of its two stores. Out: a summary on the terminal and, on request,
`inspect.json` and `lengths.png`. The corpus is not changed. Samples are shown after the digest is checked, with control
characters escaped.
"""

import dataclasses
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.data.prepare.build import RECORD_FILE, REJECTED_FILE, SIDECAR_FILE, SPLITS, read_record
from dape_jax.data.store import TokenStore, open_corpus, open_store
from dape_jax.errors import InputError, printable, require
from dape_jax.files import write_json
from dape_jax.storage import require_local

JSON_FILE, FIGURE_FILE = "inspect.json", "lengths.png"
QUANTILES = {"smallest": 0.0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "largest": 1.0}

_CHUNK = 2**20  # documents whose lengths are in memory at a time
_MAX_RANKED = 2**22  # documents used for quantiles; a larger store is sampled
_NUM_DECODED = 500  # documents used for bytes per token
_MAX_DECODED_TOKENS = 4096  # tokens decoded of each document
_SHOWN_CHARS = 200  # characters of a sample
_BAR_CHARS = 50  # width of the longest bar


@dataclasses.dataclass(frozen=True)
class InspectConfig:
    """Options of `inspect_corpus`; each field is a flag."""

    samples: int = flag(3, "Number of documents per store whose beginning is printed.")
    seed: int = flag(0, "Seed of the random choice of documents.")
    output: str | None = flag(None, f"Directory for {JSON_FILE} and {FIGURE_FILE}; not written if unset.")

    def __post_init__(self):
        require(self.samples >= 0, "samples", self.samples, "must be 0 or more documents")
        require(0 <= self.seed < 2**32, "seed", self.seed, "must be 0 to 2**32 - 1")


def inspect_corpus(directory: Path, config: InspectConfig) -> dict[str, Any]:
    """Print a summary of a corpus (train/ and validation/) or of one store, and return the content of inspect.json.

    Raises:
        InputError: there is no corpus, it is damaged, or the output directory contains one of the files.
    """
    stores = _open(directory)
    record = read_record(directory / RECORD_FILE) if (directory / RECORD_FILE).exists() else None
    output = Path(config.output) if config.output else None
    if output is not None:
        for name in (JSON_FILE, FIGURE_FILE):
            require(not (output / name).exists(), "output", str(output), f"must not contain {name} yet")
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output = {str(output)!r}: cannot be written to: {error}") from error

    sidecar = stores[0].sidecar
    print(f"made from {sidecar.source!r}")
    print(f"tokenizer {sidecar.tokenizer}: {sidecar.vocab_size:,} ids, each stored as {stores[0].tokens.dtype.name}")
    content: dict[str, Any] = {name: getattr(sidecar, name) for name in ("source", "tokenizer", "vocab_size", "dtype")}
    counts = {"skipped": record.skipped, "rejected": record.rejected} if record else {}
    for name, by_reason in counts.items():
        found = ", ".join(f"{count:,} {printable(reason)}" for reason, count in by_reason.items() if count)
        print(f"{name}: {found or 'nothing'}")
    if record and record.rejected.total():
        print(f"rejected records are listed in {directory / REJECTED_FILE}")
    content |= counts
    content["splits"] = {store.sidecar.split: _inspect_store(store, config) for store in stores}
    if output is not None:
        _draw(content["splits"], output / FIGURE_FILE)
        write_json(output / JSON_FILE, content)
        print(f"\n{output / JSON_FILE}, {output / FIGURE_FILE}")
    return content


def _open(directory: Path) -> list[TokenStore]:
    if (directory / SIDECAR_FILE).exists():
        return [open_store(directory)]
    expected = " and ".join(f"{split}/{SIDECAR_FILE}" for split in SPLITS)
    is_corpus = any((directory / split).is_dir() for split in SPLITS)
    require(is_corpus, "directory", str(directory), f"must be a prepared corpus ({expected}) or one of its stores")
    corpus = open_corpus(directory)
    return [corpus.train, corpus.validation]


def _inspect_store(store: TokenStore, config: InspectConfig) -> dict[str, Any]:
    """Print and return the summary of one store."""
    size = f"{store.tokens.nbytes / 1e6:,.1f} MB on disk"
    print(f"\n{store.sidecar.split}: {store.num_documents:,} documents, {store.num_tokens:,} tokens, {size}")
    lengths = _lengths(store, config.seed)
    of_sample = "" if store.num_documents <= _MAX_RANKED else f", quantiles of a sample of {_MAX_RANKED:,}"
    quantiles = ", ".join(f"{name} {value:,}" for name, value in lengths["quantiles"].items())
    print(f"  tokens per document (mean {lengths['mean']:,.1f}{of_sample}): {quantiles}")
    most = max(row["documents"] for row in lengths["histogram"])
    for row in lengths["histogram"]:
        span = f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,} to {row['to']:,}"
        print(f"  {span:>27} {row['documents']:>13,}  {'#' * -(-row['documents'] * _BAR_CHARS // most)}".rstrip())
    store.verify()
    print(f"  digest {store.digest}: verified")
    rate = _bytes_per_token(store, config.seed)
    if rate is not None:
        megabytes = rate * (store.num_tokens - store.num_documents) / 1e6
        print(f"  {rate:.3f} bytes of text per token, {megabytes:,.1f} MB in total, estimated from a sample")
    samples = []
    for document in _choose(store, config.samples, config.seed).tolist():
        tokens = store.document(document)
        # A character has at most 4 bytes, and a token at least one.
        text = store.tokenizer.decode(tokens[: 4 * _SHOWN_CHARS]).decode("utf-8", "replace")[:_SHOWN_CHARS]
        samples.append({"document": document, "tokens": len(tokens) - 1, "text": text})
        print(f"  document {document:,}, {len(tokens) - 1:,} tokens: {printable(text)}")
    return {
        "num_documents": store.num_documents,
        "num_tokens": store.num_tokens,
        "num_bytes": store.tokens.nbytes,
        "digest": store.digest,
        "bytes_per_token": rate,
        "lengths": lengths,
        "samples": samples,
    }


def _lengths(store: TokenStore, seed: int) -> dict[str, Any]:
    """Return statistics of the tokens per document, without end_of_document: mean, quantiles, counts by powers of 2."""
    counts = np.zeros(65, np.int64)  # indexed by the number of binary digits of the length
    for first in range(0, store.num_documents, _CHUNK):
        lengths = np.diff(store.offsets[first : first + _CHUNK + 1]) - 1
        _, digits = np.frexp(lengths.astype(np.float64))
        counts += np.bincount(digits, minlength=65)
    ranked = _choose(store, _MAX_RANKED, seed)
    lengths = store.offsets[ranked + 1] - store.offsets[ranked] - 1
    quantiles = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    nonzero = np.flatnonzero(counts)
    return {
        "mean": (store.num_tokens - store.num_documents) / store.num_documents,
        "quantiles": dict(zip(QUANTILES, map(int, quantiles), strict=True)),
        "histogram": [
            {"from": 2**digits // 2, "to": max(2**digits - 1, 0), "documents": int(counts[digits])}
            for digits in range(int(nonzero[0]), int(nonzero[-1]) + 1)
        ],
    }


def _choose(store: TokenStore, number: int, seed: int) -> Int64[np.ndarray, "documents"]:
    """Return a sorted sample of at most `number` documents."""
    if number >= store.num_documents:
        return np.arange(store.num_documents)
    return np.sort(np.random.default_rng(seed).choice(store.num_documents, number, replace=False))


def _bytes_per_token(store: TokenStore, seed: int) -> float | None:
    """Return the bytes of text per token, from the beginning of sampled documents, or None if they are empty."""
    num_bytes = num_tokens = 0
    for document in _choose(store, _NUM_DECODED, seed).tolist():
        tokens = store.document(document)[:-1][:_MAX_DECODED_TOKENS]
        num_bytes += len(store.tokenizer.decode(tokens))
        num_tokens += len(tokens)
    return num_bytes / num_tokens if num_tokens else None


def _draw(splits: dict[str, Any], file: Path) -> None:
    """Plot the share of each store's documents by length."""
    from matplotlib.figure import Figure

    figure = Figure((6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for split, summary in splits.items():
        rows = summary["lengths"]["histogram"]
        edges = [max(row["from"], 0.5) for row in rows] + [rows[-1]["to"] + 1]
        share = [100 * row["documents"] / summary["num_documents"] for row in rows]
        axes.stairs(share, edges, linewidth=2, label=f"{split}: {summary['num_documents']:,} documents")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens per document")
    axes.set_ylabel("share of the documents (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def main(arguments: list[str]) -> None:
    """Parse flags and print the summary."""
    require(len(arguments) == 2, "DIR", "", "must be the directory of a prepared corpus, or of one of its stores")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not be UTF-8
    require_local(arguments[1], "DIR")
    inspect_corpus(Path(arguments[1]), command_line.from_flags(InspectConfig))


if __name__ == "__main__":
    command_line.define_flags(InspectConfig)
    command_line.run(main, positional=("DIR",))
