"""Documents -> tokens on disk, resumable per input file.

In: input files (`inputs`), a selection (`records`) and a tokenizer. Out: WORK/corpus, a directory that `store` opens.

    corpus/             train/ and validation/: see `store`
                        record.json     the fields of `Record`
                        rejected.jsonl  the bad records: file, line, reason, detail
    train.lengths  validation.lengths   int64[num_documents]: tokens of each document
    progress.json       number of complete input files, sizes of the files above at that time, and the record

An interrupted build resumes at the last saved progress: the files are truncated to the saved sizes.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Integer

from dape_jax.data.prepare.config import PrepareConfig, Skipped
from dape_jax.data.prepare.inputs import InputFile
from dape_jax.data.prepare.records import Bad, Content, read_documents, split_of
from dape_jax.data.store import (
    FORMAT_VERSION,
    OFFSETS_FILE,
    SIDECAR_FILE,
    SPLITS,
    TOKENS_FILE,
    Sidecar,
    Split,
    token_dtype,
)
from dape_jax.data.tokenizers import HfTokenizer, Tokenizer, save_tokenizer
from dape_jax.errors import InputError, require
from dape_jax.files import read_json, write_json
from dape_jax.progress import Progress

CORPUS_DIRECTORY, PROGRESS_FILE = "corpus", "progress.json"
RECORD_FILE, REJECTED_FILE = "record.json", "rejected.jsonl"

MAX_LISTED = 100_000  # maximum bad records in rejected.jsonl; the rest are only counted
_SAVE_BYTES = 2**26  # bytes of input between two saves of the progress, at least


@dataclasses.dataclass
class Record:
    """Counts of a corpus."""

    num_input_bytes: int = 0
    num_text_bytes: int = 0  # total size of the documents that are text
    num_documents: Counter[str] = dataclasses.field(default_factory=Counter)  # by split
    num_tokens: Counter[str] = dataclasses.field(default_factory=Counter)  # by split
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason
    rejected: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason
    num_lossy: int = 0  # documents that their ids do not decode to


def read_record(file: Path) -> Record:
    """Return the record in a file."""
    return _record_of(read_json(file))


def _record_of(saved: dict[str, Any]) -> Record:
    values: dict[str, Any] = {name: Counter(x) if isinstance(x, dict) else x for name, x in saved.items()}
    return Record(**values)


class Document(NamedTuple):
    """Document of a corpus."""

    split: Split
    ids: Integer[np.ndarray, "_"]  # without end_of_document
    num_text_bytes: int
    is_lossy: bool


def to_document(
    config: PrepareConfig, tokenizer: Tokenizer, where: str, content: Content | Skipped | Bad
) -> Document | Skipped | Bad:
    """Return a record as a document, or why it is skipped or bad.

    Raises:
        InputError: ids are outside the vocabulary, or a document needs `lossy`. The message names `where`.
    """
    if isinstance(content, str | Bad):
        return content
    if not isinstance(content, bytes) and len(content) and content[-1] == tokenizer.end_of_document:
        content = content[:-1]
    if reason := config.skips_length(len(content)):
        return reason
    if not isinstance(content, bytes):
        low, high = int(content.min()), int(content.max())
        allowed = f"must be 0 to {tokenizer.vocab_size - 1}, the ids of the tokenizer {tokenizer.name}"
        require(0 <= low and high < tokenizer.vocab_size, f"{where}: token id", low if low < 0 else high, allowed)
        split = split_of(content.astype("<i8").tobytes(), config.validation_fraction)
        return Document(split, content, num_text_bytes=0, is_lossy=False)
    try:
        ids = tokenizer.encode(content)
    except InputError as error:
        return Bad("cannot be encoded", str(error))
    is_lossy = tokenizer.decode(ids) != content
    allowed = "must decode to the text; --lossy accepts and counts documents that differ"
    require(config.lossy or not is_lossy, f"{where}: tokenizer", tokenizer.name, allowed)
    return Document(split_of(content, config.validation_fraction), ids, len(content), is_lossy)


def build_corpus(
    work: Path, files: list[InputFile], config: PrepareConfig, tokenizer: Tokenizer, fingerprint: str
) -> Record:
    """Build a corpus in `work / "corpus"`, and return its counts.

    `work` is empty or has the progress of the same files and options; `fingerprint` identifies these in the sidecars.

    Raises:
        InputError: a split has no documents, a file cannot be read, or as in `to_document`.
    """
    record, source = _write_documents(work, files, config, tokenizer), ",".join(config.input)
    if len(record.num_documents) < (len(SPLITS) if 0 < config.validation_fraction < 1 else 1):
        shutil.rmtree(work)  # otherwise it would refuse the corrected flags
        found = record.num_documents.total()
        require(found > 0, "input", source, f"no documents found: {described(record.skipped, record.rejected)}")
        allowed = f"must leave documents for both splits of the {found} in {source!r}; change it, or split the text"
        raise InputError(f"validation_fraction = {config.validation_fraction}: {allowed} into more files or records")
    for split in SPLITS:
        store, dtype = work / CORPUS_DIRECTORY / split, token_dtype(tokenizer.vocab_size)
        lengths = np.fromfile(work / f"{split}.lengths", "<i8")
        offsets = np.cumsum(np.concatenate([[0], lengths]), dtype="<i8")
        assert (store / TOKENS_FILE).stat().st_size == offsets[-1] * dtype.itemsize
        with open(store / TOKENS_FILE, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(offsets.data)
        with open(store / OFFSETS_FILE, "wb") as file:
            np.save(file, offsets)
            _sync(file)
        save_tokenizer(tokenizer, store)
        sidecar = Sidecar(
            format_version=FORMAT_VERSION,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype.str,
            num_documents=len(lengths),
            num_tokens=int(offsets[-1]),
            digest=digest.hexdigest(),
            split=split,
            source=source,
            fingerprint=fingerprint,
        )
        write_json(store / SIDECAR_FILE, vars(sidecar))
    write_json(work / CORPUS_DIRECTORY / RECORD_FILE, vars(record))
    return record


def _write_documents(work: Path, files: list[InputFile], config: PrepareConfig, tokenizer: Tokenizer) -> Record:
    """Write the documents of all files that are not yet complete, and return the counts of all."""
    paths = {f"{split}.tokens": work / CORPUS_DIRECTORY / split / TOKENS_FILE for split in SPLITS}
    paths |= {f"{split}.lengths": work / f"{split}.lengths" for split in SPLITS}
    paths |= {REJECTED_FILE: work / CORPUS_DIRECTORY / REJECTED_FILE}
    progress: dict[str, Any] = {"num_files": 0, "sizes": dict.fromkeys(paths, 0), "record": {}}
    if (work / PROGRESS_FILE).exists():
        progress = read_json(work / PROGRESS_FILE)
    record, num_complete, unsaved = _record_of(progress["record"]), progress["num_files"], 0
    num_threads = config.workers if isinstance(tokenizer, HfTokenizer) else 1
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype).tobytes()

    def convert(item: tuple[int, int, Any]) -> tuple[int, int, Document | Skipped | Bad]:
        index, number, content = item
        return index, number, to_document(config, tokenizer, f"{files[index].path}: document {number}", content)

    def save(num_files: int) -> None:
        for file in out.values():
            _sync(file)
        sizes = {name: file.tell() for name, file in out.items()}
        write_json(work / PROGRESS_FILE, {"num_files": num_files, "sizes": sizes, "record": vars(record)})

    with contextlib.ExitStack() as stack:
        out: dict[str, BinaryIO] = {}
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            out[name] = stack.enter_context(open(path, "ab"))
            out[name].truncate(progress["sizes"][name])
            out[name].seek(0, os.SEEK_END)
        records = (
            (index, number, content)
            for index in range(num_complete, len(files))
            for number, content in read_documents(files[index], config)
        )
        num_bytes = sum(file.num_bytes for file in files[num_complete:])
        bar = stack.enter_context(Progress(total=num_bytes, desc="tokenizing", unit="B", unit_scale=True, leave=False))
        for index, number, found in _map_in_order(convert, records, num_threads):
            for file in files[num_complete:index]:
                bar.update(file.num_bytes)
                unsaved += file.num_bytes
            num_complete = index
            if unsaved >= _SAVE_BYTES:
                save(num_complete)
                unsaved = 0
            if isinstance(found, str):
                record.skipped[found] += 1
            elif isinstance(found, Bad):
                record.rejected[found.reason] += 1
                if record.rejected.total() <= MAX_LISTED:
                    detail = " ".join(found.detail.split())[:200]
                    bad = {"file": files[index].path, "line": number, "reason": found.reason, "detail": detail}
                    out[REJECTED_FILE].write(json.dumps(bad).encode() + b"\n")
            else:
                out[f"{found.split}.tokens"].write(found.ids.astype(dtype, casting="unsafe").tobytes() + end)
                out[f"{found.split}.lengths"].write((len(found.ids) + 1).to_bytes(8, "little"))
                record.num_documents[found.split] += 1
                record.num_tokens[found.split] += len(found.ids) + 1
                record.num_text_bytes += found.num_text_bytes
                record.num_lossy += found.is_lossy
        record.num_input_bytes = sum(file.num_bytes for file in files)
        save(len(files))
    return record


def _map_in_order(function: Callable[[Any], Any], items: Iterable[Any], num_threads: int) -> Iterator[Any]:
    """Yield `function` of every item, computed in threads; few items are in memory at a time."""
    if num_threads == 1:
        yield from map(function, items)
        return
    pending: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        for item in items:
            if len(pending) == 2 * num_threads:
                yield pending.popleft().result()
            pending.append(pool.submit(function, item))
        while pending:
            yield pending.popleft().result()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def described(*counts: Counter[str]) -> str:
    """Return counts by reason as text: "3 filtered, 1 not JSON"."""
    found = sum(counts, Counter())
    return ", ".join(f"{count:,} {reason}" for reason, count in found.items()) or "none"
