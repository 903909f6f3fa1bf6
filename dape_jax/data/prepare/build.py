"""Documents -> tokens on disk, resumable per input file.

In: input files (`inputs`), options and a tokenizer. Out: WORK/corpus, a directory that `store` opens.

    corpus/             train/ and validation/: see `store`
                        record.json     the fields of `Record`
                        rejected.jsonl  what was left out, except by --where: file, line, reason, detail
    train.lengths  validation.lengths   int64[num_documents]: tokens of each document
    progress.json       number of complete input files, sizes of the files above at that time, and the record

An interrupted build resumes at the last saved progress: the files are truncated to the saved sizes.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Integer

from dape_jax.data import store
from dape_jax.data.prepare.records import SKIPPED, LeftOut
from dape_jax.data.prepare.splits import Found, Inputs, described, divided
from dape_jax.data.tokenizers import HfTokenizer, Tokenizer, save_tokenizer
from dape_jax.errors import InputError, require
from dape_jax.files import json_digest, read_json, write_json
from dape_jax.progress import Progress

CORPUS_DIRECTORY, PROGRESS_FILE = "corpus", "progress.json"
RECORD_FILE, REJECTED_FILE = "record.json", "rejected.jsonl"

_SAVE_BYTES = 2**26  # bytes of input between two saves of the progress, at least


@dataclasses.dataclass
class Record:
    """Counts of a corpus; fields without values are of corpora made before they were added."""

    num_input_bytes: int = 0
    num_text_bytes: int = 0  # total size of the documents that are text
    num_documents: Counter[str] = dataclasses.field(default_factory=Counter)  # by split
    num_tokens: Counter[str] = dataclasses.field(default_factory=Counter)  # by split
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason
    rejected: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason
    num_lossy: int = 0  # documents that their ids do not decode to
    cut: int | None = None  # length of the documents before the end that is held out; None: whole documents are
    first: dict[str, str] = dataclasses.field(default_factory=dict)  # a file for each kind of documents


def to_record(saved: dict[str, Any]) -> Record:
    """Return a saved record."""
    values: dict[str, Any] = {name: Counter(x) if isinstance(x, dict) else x for name, x in saved.items()}
    return Record(**values)


def encode(found: Found, inputs: Inputs) -> tuple[Found, Integer[np.ndarray, "_"] | LeftOut, bool]:
    """Return a document with its ids, or why it is left out, and whether the ids decode to another text.

    Raises:
        InputError: ids are outside the vocabulary, or a document needs `lossy`. The message names the document.
    """
    content, tokenizer = found.content, inputs.tokenizer
    assert tokenizer is not None
    if isinstance(content, LeftOut):
        return found, content, False
    where = f"{inputs.files[found.file].path}: document {found.number}"
    if not isinstance(content, bytes):
        low, high = int(content.min()), int(content.max())
        allowed = f"must be 0 to {tokenizer.vocab_size - 1}, the ids of the tokenizer {tokenizer.name}"
        require(0 <= low and high < tokenizer.vocab_size, f"{where}: token id", low if low < 0 else high, allowed)
        return found, content, False
    try:
        ids = tokenizer.encode(content)
    except InputError as error:
        return found, LeftOut("cannot be encoded", str(error)), False
    is_lossy = tokenizer.decode(ids) != content
    allowed = "must decode to the text; dape-prepare --lossy accepts and counts documents that differ"
    require(inputs.config.lossy or not is_lossy, f"{where}: tokenizer", tokenizer.name, allowed)
    return found, ids, is_lossy


def build_corpus(work: Path, inputs: Inputs, cut: int | None) -> None:
    """Build a corpus in `work / "corpus"`.

    `work` is empty or has the progress of the same inputs; `cut` is that of `splits.find_cut`.

    Raises:
        InputError: a split has no documents, a file cannot be read, or as in `encode`.
    """
    config, tokenizer = inputs.config, inputs.tokenizer
    assert tokenizer is not None
    record, source = _write_documents(work, inputs, tokenizer, cut), ",".join(config.input)
    has_both = bool(config.validation) or 0 < config.validation_fraction < 1
    if len(record.num_documents) < 1 + has_both:
        shutil.rmtree(work)  # otherwise it would refuse the corrected flags
        counts = described(record.skipped + record.rejected)
        raise InputError(f"input = {source!r}: must have more text, some for each split; left out: {counts}")
    for split in store.SPLITS:
        directory = work / CORPUS_DIRECTORY / split
        offsets = np.cumsum(np.append(0, np.fromfile(work / f"{split}.lengths", "<i8")), dtype="<i8")
        tokens = store.map_tokens(directory / store.TOKENS_FILE, tokenizer.vocab_size)
        assert len(tokens) == offsets[-1]
        np.save(directory / store.OFFSETS_FILE, offsets)
        save_tokenizer(tokenizer, directory)
        sidecar = store.Sidecar(
            format_version=store.FORMAT_VERSION,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            dtype=tokens.dtype.str,
            num_documents=record.num_documents[split],
            num_tokens=record.num_tokens[split],
            digest=store.digest_of(tokens, offsets, "digest")[0],
            split=split,
            source=source,
            fingerprint=json_digest(inputs.recipe),
        )
        write_json(directory / store.SIDECAR_FILE, vars(sidecar))
    write_json(work / CORPUS_DIRECTORY / RECORD_FILE, vars(record))


def _write_documents(work: Path, inputs: Inputs, tokenizer: Tokenizer, cut: int | None) -> Record:
    """Write the documents of all files that are not yet complete, and return the counts of all."""
    files, dtype = inputs.files, store.token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype).tobytes()
    paths = {f"{split}.tokens": work / CORPUS_DIRECTORY / split / store.TOKENS_FILE for split in store.SPLITS}
    paths |= {f"{split}.lengths": work / f"{split}.lengths" for split in store.SPLITS}
    paths |= {REJECTED_FILE: work / CORPUS_DIRECTORY / REJECTED_FILE}
    progress: dict[str, Any] = {"num_files": 0, "sizes": dict.fromkeys(paths, 0), "record": {"cut": cut}}
    if cut is None and (work / PROGRESS_FILE).exists():  # the cut is at a position in all documents
        progress = read_json(work / PROGRESS_FILE)
    record, num_complete, unsaved = to_record(progress["record"]), progress["num_files"], 0

    def save(num_files: int) -> None:
        for file in out.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in out.items()}
        write_json(work / PROGRESS_FILE, {"num_files": num_files, "sizes": sizes, "record": vars(record)})

    with contextlib.ExitStack() as stack:
        out: dict[str, BinaryIO] = {}
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            out[name] = stack.enter_context(open(path, "ab"))
            out[name].truncate(progress["sizes"][name])
            out[name].seek(0, os.SEEK_END)
        num_bytes = sum(file.num_bytes for file in files[num_complete:])
        bar = stack.enter_context(Progress(total=num_bytes, desc="tokenizing", unit="B", unit_scale=True, leave=False))
        num_threads = inputs.config.workers if isinstance(tokenizer, HfTokenizer) else 1
        documents = divided(inputs, cut, num_complete)
        for found, ids, is_lossy in _map_in_order(functools.partial(encode, inputs=inputs), documents, num_threads):
            num_bytes = sum(file.num_bytes for file in files[num_complete : found.file])
            num_complete, unsaved = found.file, unsaved + num_bytes
            bar.update(num_bytes)
            if unsaved >= _SAVE_BYTES:
                save(num_complete)
                unsaved = 0
            if not isinstance(ids, LeftOut):
                out[f"{found.split}.tokens"].write(ids.astype(dtype, casting="unsafe").tobytes() + end)
                out[f"{found.split}.lengths"].write((len(ids) + 1).to_bytes(8, "little"))
                record.num_documents[found.split] += 1
                record.num_tokens[found.split] += len(ids) + 1
                record.num_text_bytes += len(found.content) if isinstance(found.content, bytes) else 0
                record.num_lossy += is_lossy
                kind = "texts" if found.is_text else "records" if isinstance(found.content, bytes) else "ids"
                record.first.setdefault(kind, files[found.file].path)
                continue
            (record.skipped if ids.reason in SKIPPED else record.rejected)[ids.reason] += 1
            if ids.reason != "filtered":
                detail = " ".join(ids.detail.split())[:200]
                line = {"file": files[found.file].path, "line": found.number, "reason": ids.reason, "detail": detail}
                out[REJECTED_FILE].write(json.dumps(line).encode() + b"\n")
        record.num_input_bytes = sum(file.num_bytes for file in files)
        save(len(files))
    return record


def _map_in_order(function: Callable[[Any], Any], items: Iterable[Any], num_threads: int) -> Iterator[Any]:
    """Yield `function` of every item, computed in threads; few items are in memory at a time."""
    if num_threads == 1:
        yield from map(function, items)
        return
    pending: deque[concurrent.futures.Future[Any]] = deque()
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) == 2 * num_threads:
                yield pending.popleft().result()
        yield from (each.result() for each in pending)
