"""Documents -> tokens on disk, resumable per input file.

In: input files (`inputs`), a selection (`records`) and a tokenizer. Out: WORK/corpus, a directory that `store` opens.

    corpus/             train/ and validation/: see `store`
                        record.json     the fields of `Record`
                        rejected.jsonl  what was left out, except by --where: file, line, reason, detail
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

from dape_jax.data.prepare.config import Bad, PrepareConfig, Skipped
from dape_jax.data.prepare.inputs import InputFile
from dape_jax.data.prepare.splits import Found, described, divided
from dape_jax.data.store import (
    FORMAT_VERSION,
    OFFSETS_FILE,
    SIDECAR_FILE,
    SPLITS,
    TOKENS_FILE,
    Sidecar,
    token_dtype,
)
from dape_jax.data.tokenizers import HfTokenizer, Tokenizer, save_tokenizer
from dape_jax.errors import InputError, printable, require
from dape_jax.files import read_json, write_json
from dape_jax.progress import Progress

CORPUS_DIRECTORY, PROGRESS_FILE = "corpus", "progress.json"
RECORD_FILE, REJECTED_FILE = "record.json", "rejected.jsonl"

_NAMES = 3  # of files in a line of the log
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


def read_record(file: Path) -> Record:
    """Return the record in a file."""
    return _record_of(read_json(file))


def _record_of(saved: dict[str, Any]) -> Record:
    values: dict[str, Any] = {name: Counter(x) if isinstance(x, dict) else x for name, x in saved.items()}
    return Record(**values)


class Document(NamedTuple):
    """Document of a corpus."""

    ids: Integer[np.ndarray, "_"]  # without end_of_document
    num_text_bytes: int
    is_lossy: bool


def to_document(config: PrepareConfig, tokenizer: Tokenizer, where: str, found: Found) -> Document | Skipped | Bad:
    """Return a record as a document, or why it is skipped or bad.

    Raises:
        InputError: ids are outside the vocabulary, or a document needs `lossy`. The message names `where`.
    """
    content = found.content
    if isinstance(content, str | Bad):
        return content
    if not isinstance(content, bytes):
        low, high = int(content.min()), int(content.max())
        allowed = f"must be 0 to {tokenizer.vocab_size - 1}, the ids of the tokenizer {tokenizer.name}"
        require(0 <= low and high < tokenizer.vocab_size, f"{where}: token id", low if low < 0 else high, allowed)
        return Document(content, num_text_bytes=0, is_lossy=False)
    try:
        ids = tokenizer.encode(content)
    except InputError as error:
        return Bad("cannot be encoded", str(error))
    is_lossy = tokenizer.decode(ids) != content
    allowed = "must decode to the text; dape-prepare --lossy accepts and counts documents that differ"
    require(config.lossy or not is_lossy, f"{where}: tokenizer", tokenizer.name, allowed)
    return Document(ids, len(content), is_lossy)


def build_corpus(
    work: Path,
    files: list[InputFile],
    config: PrepareConfig,
    tokenizer: Tokenizer,
    fingerprint: str,
    cut: int | None,
) -> Record:
    """Build a corpus in `work / "corpus"`, and return its counts.

    `work` is empty or has the progress of the same files and options; `fingerprint` identifies these in the sidecars,
    and `cut` is that of `splits.find_cut`.

    Raises:
        InputError: a split has no documents, a file cannot be read, or as in `to_document`.
    """
    record, source = _write_documents(work, files, config, tokenizer, cut), ",".join(config.input)
    has_both = bool(config.validation) or 0 < config.validation_fraction < 1
    if len(record.num_documents) < 1 + has_both:
        shutil.rmtree(work)  # otherwise it would refuse the corrected flags
        counts = described(record.skipped, record.rejected)
        raise InputError(f"input = {source!r}: must have more text, some for each split; left out: {counts}")
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


def _write_documents(
    work: Path, files: list[InputFile], config: PrepareConfig, tokenizer: Tokenizer, cut: int | None
) -> Record:
    """Write the documents of all files that are not yet complete, and return the counts of all."""
    paths = {f"{split}.tokens": work / CORPUS_DIRECTORY / split / TOKENS_FILE for split in SPLITS}
    paths |= {f"{split}.lengths": work / f"{split}.lengths" for split in SPLITS}
    paths |= {REJECTED_FILE: work / CORPUS_DIRECTORY / REJECTED_FILE}
    progress: dict[str, Any] = {"num_files": 0, "sizes": dict.fromkeys(paths, 0), "record": {}}
    if cut is None and (work / PROGRESS_FILE).exists():  # the cut is at a position in all documents
        progress = read_json(work / PROGRESS_FILE)
    record, num_complete, unsaved = _record_of(progress["record"] | {"cut": cut}), progress["num_files"], 0
    files_left, num_done = files[num_complete:], 0
    num_threads = config.workers if isinstance(tokenizer, HfTokenizer) else 1
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype).tobytes()

    def convert(found: Found) -> tuple[Found, Document | Skipped | Bad]:
        where = f"{files_left[found.file].path}: document {found.number}"
        return found, to_document(config, tokenizer, where, found)

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
        num_bytes = sum(file.num_bytes for file in files_left)
        bar = stack.enter_context(Progress(total=num_bytes, desc="tokenizing", unit="B", unit_scale=True, leave=False))
        records = divided(files_left, config, tokenizer, cut)
        for found, made in _map_in_order(convert, records, num_threads):
            for file in files_left[num_done : found.file]:
                bar.update(file.num_bytes)
                unsaved += file.num_bytes
            num_done = found.file
            if unsaved >= _SAVE_BYTES:
                save(num_complete + num_done)
                unsaved = 0
            if isinstance(made, str | Bad):
                bad = made if isinstance(made, Bad) else Bad(made, "")
                (record.skipped if isinstance(made, str) else record.rejected)[bad.reason] += 1
                if bad.reason != "filtered":
                    detail = " ".join(bad.detail.split())[:200]
                    line = {"file": files_left[found.file].path, "line": found.number, "reason": bad.reason}
                    out[REJECTED_FILE].write(json.dumps(line | {"detail": detail}).encode() + b"\n")
            else:
                out[f"{found.split}.tokens"].write(made.ids.astype(dtype, casting="unsafe").tobytes() + end)
                out[f"{found.split}.lengths"].write((len(made.ids) + 1).to_bytes(8, "little"))
                assert found.split is not None
                record.num_documents[found.split] += 1
                record.num_tokens[found.split] += len(made.ids) + 1
                record.num_text_bytes += made.num_text_bytes
                record.num_lossy += made.is_lossy
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


def left_out(directory: Path, record: Record) -> str:
    """Return what is not in a corpus as one line: counts by reason, and the names of the first files; or ""."""
    names: dict[str, dict[str, None]] = {}
    with open(directory / REJECTED_FILE, "rb") as file:
        for line in file:
            bad = json.loads(line)
            names.setdefault(bad["reason"], {})[os.path.basename(bad["file"])] = None
    shown = []
    for reason, count in (record.skipped + record.rejected).items():
        first = [*names.get(reason, ())]
        some = ", ".join(first[:_NAMES]) + ", .." * (len(first) > _NAMES)
        shown.append(f"{count:,} {reason}" + f" ({some})" * bool(first))
    return printable(", ".join(shown))
