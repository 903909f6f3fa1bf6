"""Look into a prepared corpus: counts, lengths of documents, samples, and whether it is still what was written.

    python -m dape_jax.data.inspect data/arxiv
    python -m dape_jax.data.inspect data/arxiv/validation --samples=10 --output=results/arxiv

In: a directory that `prepare` has written, or one of its two stores. Out: a summary on the terminal and, if wanted,
`inspect.json` and `lengths.png`. Nothing of the corpus is changed. No text is shown before the digest is found right,
and none as it is: what a document could do to a terminal is escaped.
"""

import json
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from jaxtyping import Int64
from matplotlib.figure import Figure

from dape_jax import command_line
from dape_jax.data.prepare.build import RECORD_FILE, REJECTED_FILE, SIDECAR_FILE, SPLITS, read_record
from dape_jax.data.store import TokenStore, open_corpus, open_store
from dape_jax.errors import InputError, require

JSON_FILE, PICTURE_FILE = "inspect.json", "lengths.png"
QUANTILES = {"smallest": 0.0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "largest": 1.0}

_CHUNK = 2**20  # documents whose lengths are held at once
_RANKED = 2**22  # documents that quantiles are taken of; of a larger store, a sample
_DECODED = 500  # documents that bytes per token are taken of
_DECODED_TOKENS = 4096  # of each, at most
_SHOWN_CHARS = 200  # of a sample
_BAR = 50  # characters of the longest bar


def inspect_corpus(
    directory: Path, *, num_samples: int = 3, seed: int = 0, output: Path | None = None
) -> dict[str, Any]:
    """Summarise a corpus on the terminal.

    Args:
        directory: of a corpus (train/ and validation/) or of one store.
        num_samples: documents of each store whose beginning is shown.
        seed: of the choice of documents.
        output: a directory for the same as JSON and for a picture of the lengths; None for neither.

    Returns:
        What inspect.json holds.

    Raises:
        InputError: there is no corpus, it is damaged, or the output holds such files already.
    """
    require(num_samples >= 0, "samples", num_samples, "0 or more documents")
    require(0 <= seed < 2**32, "seed", seed, "0 to 2**32 - 1")
    stores = _open(directory)
    counts = _counts(directory)
    if output is not None:
        for name in (JSON_FILE, PICTURE_FILE):
            require(not (output / name).exists(), "output", str(output), f"has a file {name} already")
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output = {str(output)!r}: cannot be written to: {error}") from error

    sidecar = stores[0].sidecar
    print(f"made from {sidecar.source!r}")
    print(f"tokenizer {sidecar.tokenizer}: {sidecar.vocab_size:,} ids, each stored as {stores[0].tokens.dtype.name}")
    content: dict[str, Any] = {
        "source": sidecar.source,
        "tokenizer": sidecar.tokenizer,
        "vocab_size": sidecar.vocab_size,
        "dtype": sidecar.dtype,
        **counts,
        "splits": {},
    }
    for what, by_reason in counts.items():
        found = ", ".join(f"{count:,} {_escaped(reason)}" for reason, count in by_reason.items() if count)
        print(f"{what.replace('_', ' ')}: {found or 'nothing'}")
    if any(counts.get("rejected", {}).values()):
        print(f"what was rejected, and where: {directory / REJECTED_FILE}")
    for store in stores:
        content["splits"][store.sidecar.split] = _inspect_store(store, num_samples, seed)
    if output is not None:
        _draw(content["splits"], output / PICTURE_FILE)
        (output / JSON_FILE).write_text(json.dumps(content, indent=1) + "\n")
        print(f"\n{output / JSON_FILE}, {output / PICTURE_FILE}")
    return content


def _open(directory: Path) -> list[TokenStore]:
    if (directory / SIDECAR_FILE).exists():
        return [open_store(directory)]
    places = " and ".join(f"{split}/{SIDECAR_FILE}" for split in SPLITS)
    is_corpus = any((directory / split).is_dir() for split in SPLITS)
    require(is_corpus, "directory", str(directory), f"a prepared corpus ({places}), or one of its stores")
    corpus = open_corpus(directory)
    return [corpus.train, corpus.validation]


def _counts(directory: Path) -> dict[str, dict[str, int]]:
    """What the corpus's record says of the records that became no documents, by reason; nothing where there is none."""
    if not (directory / RECORD_FILE).exists():
        return {}
    record = read_record(directory)
    return {"left_out": record.left_out, "rejected": record.rejected}


def _inspect_store(store: TokenStore, num_samples: int, seed: int) -> dict[str, Any]:
    """Print the summary of one store, and return it."""
    lengths = _lengths(store, seed)
    print(
        f"\n{store.sidecar.split}: {store.num_documents:,} documents, {store.num_tokens:,} tokens, "
        f"{_bytes(store.tokens.nbytes)} on disk"
    )
    of_sample = "" if store.num_documents <= _RANKED else f", quantiles of a sample of {_RANKED:,}"
    quantiles = ", ".join(f"{name} {value:,}" for name, value in lengths["quantiles"].items())
    print(f"  tokens of a document (mean {lengths['mean']:,.1f}{of_sample}): {quantiles}")
    most = max(row["documents"] for row in lengths["histogram"])
    for row in lengths["histogram"]:
        span = f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,} to {row['to']:,}"
        print(f"  {span:>27} {row['documents']:>13,}  {'#' * -(-row['documents'] * _BAR // most)}".rstrip())
    store.verify()
    print(f"  digest {store.digest}: right")
    num_bytes, num_tokens = _decoded(store, seed)
    rate = num_bytes / num_tokens if num_tokens else None
    if rate is not None:
        text_bytes = round(rate * (store.num_tokens - store.num_documents))
        print(f"  {rate:.3f} bytes of text in a token, {_bytes(text_bytes)} in all, by {num_tokens:,} tokens decoded")
    samples = []
    for document in _choose(store, num_samples, seed).tolist():
        tokens = store.document(document)
        # A character has 4 bytes at most, and a token at least one.
        text = store.tokenizer.decode(tokens[: 4 * _SHOWN_CHARS]).decode("utf-8", "replace")[:_SHOWN_CHARS]
        samples.append({"document": document, "tokens": len(tokens) - 1, "text": text})
        print(f"  document {document:,}, {len(tokens) - 1:,} tokens: {_escaped(text)}")
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
    """Of the documents, in tokens, their end_of_document left out: mean, quantiles, and counts by powers of two."""
    counts = np.zeros(65, np.int64)  # by the binary digits of the length
    for first in range(0, store.num_documents, _CHUNK):
        lengths = np.diff(store.offsets[first : first + _CHUNK + 1]) - 1
        _, digits = np.frexp(lengths.astype(np.float64))
        counts += np.bincount(digits, minlength=65)
    ranked = _choose(store, _RANKED, seed)
    lengths = store.offsets[ranked + 1] - store.offsets[ranked] - 1
    quantiles = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    filled = np.flatnonzero(counts)
    return {
        "mean": (store.num_tokens - store.num_documents) / store.num_documents,
        "quantiles": dict(zip(QUANTILES, map(int, quantiles), strict=True)),
        "histogram": [
            {"from": 2**digits // 2, "to": max(2**digits - 1, 0), "documents": int(counts[digits])}
            for digits in range(int(filled[0]), int(filled[-1]) + 1)
        ],
    }


def _choose(store: TokenStore, number: int, seed: int) -> Int64[np.ndarray, "documents"]:
    """So many documents, in order; all of them if there are no more."""
    if number >= store.num_documents:
        return np.arange(store.num_documents)
    return np.sort(np.random.default_rng(seed).choice(store.num_documents, number, replace=False))


def _decoded(store: TokenStore, seed: int) -> tuple[int, int]:
    """Bytes of text and the tokens that they were, of the beginnings of some documents."""
    num_bytes = num_tokens = 0
    for document in _choose(store, _DECODED, seed).tolist():
        tokens = store.document(document)[:-1][:_DECODED_TOKENS]
        num_bytes += len(store.tokenizer.decode(tokens))
        num_tokens += len(tokens)
    return num_bytes, num_tokens


def _bytes(number: int) -> str:
    size, unit = (1e9, "GB") if number >= 1e9 else (1e6, "MB") if number >= 1e6 else (1e3, "kB")
    return f"{number / size:,.2f} {unit}"


def _escaped(text: str) -> str:
    r"""The text in one line, its control and formatting characters as escapes like \x1b."""
    return repr(text)[1:-1]


def _draw(splits: dict[str, Any], file: Path) -> None:
    """The share of each store's documents by length."""
    figure = Figure((6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for split, summary in splits.items():
        rows = summary["lengths"]["histogram"]
        edges = [max(row["from"], 0.5) for row in rows] + [rows[-1]["to"] + 1]
        share = [100 * row["documents"] / summary["num_documents"] for row in rows]
        axes.stairs(share, edges, linewidth=2, label=f"{split}: {summary['num_documents']:,} documents")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of a document")
    axes.set_ylabel("share of the documents (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def define_flags() -> None:
    """The flags; not at import, where they would meet those of other command lines."""
    flags.DEFINE_integer("samples", 3, "Documents of each store whose beginning is shown.")
    flags.DEFINE_integer("seed", 0, "Of the choice of documents.")
    flags.DEFINE_string("output", None, f"Directory for {JSON_FILE} and {PICTURE_FILE}; neither is written if unset.")


def main(arguments: list[str]) -> None:
    """Flags, then one call."""
    require(len(arguments) == 2, "DIR", "", "the directory of a prepared corpus, or of one of its stores")
    given = flags.FLAGS.flag_values_dict()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    inspect_corpus(
        Path(arguments[1]),
        num_samples=given["samples"],
        seed=given["seed"],
        output=Path(given["output"]) if given["output"] else None,
    )


if __name__ == "__main__":
    define_flags()
    command_line.run(main, positional=("DIR",))
