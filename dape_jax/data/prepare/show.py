"""Print counts, document lengths and samples of a prepared corpus, and check its digest: `dape-prepare --show=DIR`."""

from pathlib import Path

import numpy as np

from dape_jax.data.prepare.build import RECORD_FILE, REJECTED_FILE, to_record
from dape_jax.data.prepare.splits import described
from dape_jax.data.store import TokenStore, open_corpus, verify_stores
from dape_jax.errors import printable
from dape_jax.files import read_json

QUANTILES = {"smallest": 0.0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "largest": 1.0}
FEW_DOCUMENTS = 20
_SAMPLES = 3  # documents of each store whose beginning is printed
_SHOWN_CHARS = 200


def show(directory: Path) -> None:
    """Print a summary of a corpus. Samples follow the check of the digest, with control characters escaped.

    Raises:
        InputError: there is no corpus, or it is damaged.
    """
    corpus = open_corpus(directory, "--show")
    sidecar, record = corpus.train.sidecar, to_record(read_json(directory / RECORD_FILE))
    print(f"{directory}: made from {sidecar.source!r}, {record.num_input_bytes / 1e6:,.1f} MB of input")
    print(f"tokenizer {sidecar.tokenizer}: {sidecar.vocab_size:,} ids, each stored as {corpus.train.tokens.dtype.name}")
    print(f"skipped: {described(record.skipped)}")
    print(f"bad: {described(record.rejected)}" + (f"; see {directory / REJECTED_FILE}" if record.rejected else ""))
    print(f"documents that cannot be decoded exactly from their tokens: {record.num_lossy:,}")
    if corpus.validation.num_documents < FEW_DOCUMENTS:
        print("few documents to evaluate on: the intervals of an evaluation will be wide")
    for store in corpus:
        if store.num_documents:
            _show_store(store)
    print(f"\ndigest {corpus.digest}: verified")


def _show_store(store: TokenStore) -> None:
    size = f"{store.tokens.nbytes / 1e6:,.1f} MB on disk"
    documents = f"{store.num_documents:,} document{'s' * (store.num_documents > 1)}"
    print(f"\n{store.sidecar.split}: {documents}, {store.num_tokens:,} tokens, {size}")
    lengths = np.diff(store.offsets) - 1
    at = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    quantiles = ", ".join(f"{name} {value:,}" for name, value in zip(QUANTILES, at.tolist(), strict=True))
    print(f"  tokens per document, without its end (mean {lengths.mean():,.1f}): {quantiles}")
    verify_stores([store])
    for index in np.random.default_rng(0).permutation(store.num_documents)[:_SAMPLES].tolist():
        # A character has at most 4 bytes, and a token at least one.
        text = store.tokenizer.decode(store.document(index)[: 4 * _SHOWN_CHARS]).decode("utf-8", "replace")
        print(f"  document {index:,}, {lengths[index]:,} tokens: {printable(text[:_SHOWN_CHARS])}")
