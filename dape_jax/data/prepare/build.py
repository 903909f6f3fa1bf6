"""Records -> tokens on disk: one builder for every store, in one process or many, that can be stopped at any moment.

In: the files of `corpus`, what to select of them (`records`) and a tokenizer. Out: a directory that `store` opens, in
two steps: `build` writes the tokens, `finish` the digests and sidecars, without which nothing opens it. Next: `store`.

    train/           tokens.bin      the documents one after another, each with its end_of_document; little-endian
                     offsets.npy     int64[num_documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
                     tokenizer.json  what the tokens were made with; not there for bytes
                     store.json      the sidecar, written last: the fields of `Sidecar`
    validation/      the same
    record.json      the fields of `Record`: how far it has been read, what was counted
    rejected.jsonl   the bad records: file, line, reason, detail

This process reads, cuts and writes; `workers` other processes parse, choose, hash and tokenize. Results are written in
the order of the input, so that their number decides nothing but the time:

    read_batches -> at most 2 * workers batches on their way -> tokenize -> tokens.bin, offsets.npy, rejected.jsonl

`record.json` is replaced in one step and only when all that it counts is on disk. A build that was killed leaves more
behind than its record says; the next one cuts that off and goes on.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np
from jaxtyping import Int64, UInt
from tqdm import tqdm

from dape_jax.data import corpus
from dape_jax.data.corpus import Split
from dape_jax.data.prepare.records import (
    BadRecord,
    Batch,
    Document,
    Position,
    Selection,
    Skipped,
    examine,
    read_batches,
)
from dape_jax.data.tokenizers import Tokenizer, save_tokenizer
from dape_jax.errors import InputError, printable, require

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
TOKENS_FILE, OFFSETS_FILE, SIDECAR_FILE = "tokens.bin", "offsets.npy", "store.json"
RECORD_FILE, REJECTED_FILE = "record.json", "rejected.jsonl"
SPLITS: tuple[Split, ...] = get_args(Split)

RECORD_SECONDS = 5.0  # between two records
MAX_LISTED = 100_000  # bad records in rejected.jsonl; the rest is only counted
_SHOWN = 5  # bad records that are also logged
_BATCHES_PER_WORKER = 2  # on their way, so that no worker waits for the next
_DIGEST_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """What store.json records about the files beside it."""

    format_version: int
    tokenizer: str  # its name, which is a hash of tokenizer.json
    vocab_size: int
    dtype: str  # of tokens.bin, as numpy writes it: "<u2"
    num_documents: int
    num_tokens: int
    digest: str  # sha256 of tokens.bin and then the numbers of offsets.npy
    split: str
    source: str  # the data.path or the inputs that it was built from
    fingerprint: str  # of the files found there and what was made of them


@dataclasses.dataclass(frozen=True)
class Record:
    """How far the files have been read, and what was found up to there."""

    position: Position = dataclasses.field(default_factory=Position)
    num_input_bytes: int = 0
    num_text_bytes: int = 0  # of the documents that are text
    num_documents: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    num_tokens: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)  # by reason
    rejected: dict[str, int] = dataclasses.field(default_factory=dict)  # by reason
    rejected_bytes: int = 0  # of rejected.jsonl


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a build took, of this process alone; another one may have begun it."""

    seconds: float
    num_input_bytes: int
    num_text_bytes: int
    peak_bytes: int  # resident memory of the process that reads and writes
    worker_peak_bytes: int  # of the largest worker; 0 if there are none


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Documents of one side, one after another."""

    tokens: UInt[np.ndarray, "num_tokens"]
    lengths: Int64[np.ndarray, "num_documents"]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a batch came to."""

    after: Position
    num_input_bytes: int
    num_text_bytes: int
    tokens: dict[Split, Tokens]
    left_out: dict[str, int]
    rejected: dict[str, int]
    listed: list[BadRecord]  # the first `MAX_LISTED` of the rejected
    peak_bytes: int  # resident memory of the process that made it


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id, little-endian."""
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


def tokenize(batch: Batch, selection: Selection, tokenizer: Tokenizer) -> Result:
    """Everything that is done to a batch between reading and writing; a function of its arguments.

    Raises:
        InputError: ids of a .bin file that are not the tokenizer's.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype)
    ids: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
    num_text_bytes, left_out, rejected, listed = 0, collections.Counter(), collections.Counter(), []
    for found in (found for piece in batch.pieces for found in examine(piece, selection)):
        if isinstance(found, Document):
            found = _tokenize_document(found, selection, tokenizer)
        match found:
            case BadRecord():
                rejected[found.reason] += 1
                if len(listed) < MAX_LISTED:
                    listed.append(found)
            case str():
                left_out[found] += 1
            case (split, document_ids, num_bytes):
                ids[split] += document_ids, end
                num_text_bytes += num_bytes
    return Result(
        after=batch.after,
        num_input_bytes=batch.num_input_bytes,
        num_text_bytes=num_text_bytes,
        tokens={
            split: Tokens(
                np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="unsafe"),
                np.array([len(array) + 1 for array in arrays[::2]], np.int64),
            )
            for split, arrays in ids.items()
        },
        left_out=dict(left_out),
        rejected=dict(rejected),
        listed=listed,
        peak_bytes=peak_bytes(),
    )


def _tokenize_document(
    document: Document, selection: Selection, tokenizer: Tokenizer
) -> tuple[Split, np.ndarray, int] | BadRecord | Skipped:
    """Side, ids without end_of_document, and bytes of text; or why there are none."""
    content = document.content
    if isinstance(content, bytes):
        if left_out := selection.by_length(len(content)):
            return left_out
        try:
            ids = tokenizer.encode(content)
        except InputError as error:
            return BadRecord(document.file, document.line, "cannot be encoded", str(error))
        return corpus.split_of(content, selection.validation_fraction), ids, len(content)
    if len(content) and content[-1] == tokenizer.end_of_document:
        content = content[:-1]
    if left_out := selection.by_length(len(content)):
        return left_out
    low, high = int(content.min()), int(content.max())
    require(
        0 <= low and high < tokenizer.vocab_size,
        f"{document.file}: document {document.line}: token id",
        low if low < 0 else high,
        f"the tokenizer {tokenizer.name} has 0 to {tokenizer.vocab_size - 1}",
    )
    return corpus.split_of(content.astype("<i8").tobytes(), selection.validation_fraction), content, 0


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux: getrusage would count what the parent had when it started this process.
        (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        return int(kib) * 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)


# The worker processes.

_job: tuple[Selection, Tokenizer] | None = None  # of a worker, which it is given once and not with every batch


def _begin_worker(*job: Any) -> None:
    global _job
    _job = job
    parent = multiprocessing.parent_process()
    if parent:
        # A killed parent does not close the queue that its workers wait at: they hold both of its ends themselves.
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(batch: Batch) -> Result:
    assert _job
    return tokenize(batch, *_job)


def _results(
    batches: Iterator[Batch], selection: Selection, tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Result, int], None, None]:
    """The results of the batches in their order, each with its worker's peak memory; `workers` = 1 is this process."""
    if workers == 1:
        for batch in batches:
            yield tokenize(batch, selection, tokenizer), 0
        return
    # spawn: a process that runs JAX has threads, and must not be forked.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin_worker, (selection, tokenizer)
    )
    pending: collections.deque[concurrent.futures.Future[Result]] = collections.deque()

    def first() -> tuple[Result, int]:
        result = pending.popleft().result()
        return result, result.peak_bytes

    try:
        for batch in batches:
            if len(pending) == _BATCHES_PER_WORKER * workers:
                yield first()
            # Workers that this starts inherit the mask: Ctrl-C, which goes to all of them, is for the parent alone.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                pending.append(pool.submit(_work, batch))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while pending:
            yield first()
    except BrokenProcessPool as error:
        raise InputError(
            f"workers = {workers}: one of them died, perhaps for want of memory; the same command goes on from the "
            "last record, and fewer workers need less memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# Writing.


def build(
    directory: Path,
    files: list[Path],
    selection: Selection,
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    strict: bool = False,
) -> tuple[Record, Usage]:
    """Write the tokens of both sides, from the directory's record on; `finish` is what is left to do.

    Args:
        directory: exists. It holds nothing, or what a build of the same files, selection and tokenizer has left.
        files: from `records.input_files`.
        selection: what becomes a document.
        tokenizer: what it is encoded with.
        workers: processes that tokenize; 1 for none but this.
        strict: stop at the first bad record.

    Raises:
        InputError: a file cannot be read, a record is bad and `strict` set, or a worker died.
        OSError: the directory cannot be written to.
    """
    record = read_record(directory)
    allowed = f"False: bad records were left out before, see {directory / REJECTED_FILE}"
    require(not (strict and record.rejected), "strict", strict, allowed)
    first, started, worker_peak, num_shown = record, time.monotonic(), 0, 0
    dtype = token_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        sides = {}
        for split in SPLITS:
            counts = record.num_documents[split], record.num_tokens[split]
            sides[split] = stack.enter_context(_Side(directory / split, *counts, dtype))
        rejected = stack.enter_context(_open_at(directory / REJECTED_FILE, record.rejected_bytes))
        written = [rejected, *(file for side in sides.values() for file in (side.tokens, side.offsets))]
        batches = read_batches(files, selection, record.position)
        results = stack.enter_context(contextlib.closing(_results(batches, selection, tokenizer, workers)))
        total = sum(file.stat().st_size for file in files)
        bar = stack.enter_context(progress(total, "tokenizing", record.num_input_bytes))
        saved = time.monotonic()
        for result, peak in results:
            worker_peak = max(worker_peak, peak)
            listed = result.listed[: max(0, MAX_LISTED - sum(record.rejected.values()))]
            if strict and result.listed:
                raise InputError(f"{describe(result.listed[0])}; without strict it is left out")
            for bad in listed[: max(0, _SHOWN - num_shown)]:
                logger.warning("left out: %s", describe(bad))
            num_shown += len(listed)
            lines = "".join(json.dumps(dataclasses.asdict(bad)) + "\n" for bad in listed).encode()
            rejected.write(lines)
            for split, side in sides.items():
                side.append(result.tokens[split])
            bar.update(result.num_input_bytes - record.num_input_bytes)
            record = _advance(record, result, len(lines))
            rate = (record.num_text_bytes - first.num_text_bytes) / 1e6 / (time.monotonic() - started)
            num_documents, num_tokens = sum(record.num_documents.values()), sum(record.num_tokens.values())
            bar.set_postfix_str(f"{num_documents:,} documents, {num_tokens:,} tokens, {rate:.1f} MB/s of text", False)
            if time.monotonic() - saved > RECORD_SECONDS:
                _save(record, directory, written)
                saved = time.monotonic()
        _save(record, directory, written)
    return record, Usage(
        seconds=time.monotonic() - started,
        num_input_bytes=record.num_input_bytes - first.num_input_bytes,
        num_text_bytes=record.num_text_bytes - first.num_text_bytes,
        peak_bytes=peak_bytes(),
        worker_peak_bytes=worker_peak,
    )


def check_found(record: Record, given: str, validation: str, validation_fraction: float) -> None:
    """Raise `InputError` unless there are documents on both sides.

    Args:
        record: of the whole build.
        given: what was read, in the user's words: "data.path = 'books'".
        validation: what the user knows the fraction as.
        validation_fraction: the share that is held out.
    """
    num_documents = sum(record.num_documents.values())
    if not num_documents:
        counts = record.left_out | {f"bad ({reason})": count for reason, count in record.rejected.items()}
        found = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "nothing at all"
        raise InputError(f"{given}: no documents there: {found}")
    for split in SPLITS:
        allowed = f"leaves no {split} documents of the {num_documents:,} in {given} (each side needs one)"
        require(record.num_documents[split] > 0, validation, validation_fraction, allowed)


def finish(directory: Path, record: Record, tokenizer: Tokenizer, *, source: str, fingerprint: str) -> None:
    """Make stores of what `build` has written: digests, tokenizers and, last, the sidecars.

    Args:
        directory: where it has written.
        record: what it has returned.
        tokenizer: the same.
        source: for the sidecars.
        fingerprint: for the sidecars.

    Raises:
        InputError: the directory holds another tokenizer.
        OSError: the directory cannot be written to.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    total = sum((directory / split / name).stat().st_size for split in SPLITS for name in (TOKENS_FILE, OFFSETS_FILE))
    with progress(total, "digest", 0) as bar:
        for split in SPLITS:
            side = directory / split
            save_tokenizer(tokenizer, side)
            digest = hashlib.sha256()
            with open(side / OFFSETS_FILE, "r+b") as offsets, open(side / TOKENS_FILE, "rb") as tokens:
                _write_offsets_header(offsets, record.num_documents[split] + 1)
                for file in (tokens, offsets):
                    while block := file.read(_DIGEST_BYTES):
                        digest.update(block)
                        bar.update(len(block))
            sidecar = Sidecar(
                format_version=FORMAT_VERSION,
                tokenizer=tokenizer.name,
                vocab_size=tokenizer.vocab_size,
                dtype=dtype.str,
                num_documents=record.num_documents[split],
                num_tokens=record.num_tokens[split],
                digest=digest.hexdigest(),
                split=split,
                source=source,
                fingerprint=fingerprint,
            )
            for path in (*side.iterdir(), side):
                sync(path)
            write_json(side / SIDECAR_FILE, dataclasses.asdict(sidecar))


class _Side(contextlib.AbstractContextManager):
    """The two files of one side, which grow from a recorded size on."""

    def __init__(self, directory: Path, num_documents: int, num_tokens: int, dtype: np.dtype):
        directory.mkdir(exist_ok=True)
        self.end = num_tokens
        self.tokens = _open_at(directory / TOKENS_FILE, num_tokens * dtype.itemsize)
        size = _OFFSETS_HEADER_BYTES + 8 * (num_documents + 1) if num_documents else 0
        self.offsets = _open_at(directory / OFFSETS_FILE, size)
        if not size:
            _write_offsets_header(self.offsets, 1)
            self.offsets.write(bytes(8))

    def append(self, part: Tokens) -> None:
        self.tokens.write(part.tokens.data)
        self.offsets.write((self.end + np.cumsum(part.lengths)).astype("<i8").data)
        self.end += len(part.tokens)

    def __exit__(self, *_: object) -> None:
        self.tokens.close()
        self.offsets.close()


_OFFSETS_HEADER_BYTES = 128


def _write_offsets_header(file: BinaryIO, num_offsets: int) -> None:
    """What numpy puts before an array; it leaves room for the number to grow, so the header can be written over."""
    header = {"descr": "<i8", "fortran_order": False, "shape": (num_offsets,)}
    np.lib.format.write_array_header_1_0(file, header)
    assert file.tell() == _OFFSETS_HEADER_BYTES


def _open_at(file: Path, size: int) -> BinaryIO:
    """Open a file of at least `size` bytes, to write behind them; what else it has is cut off."""
    opened = open(file, "r+b" if size else "w+b")
    found = opened.seek(0, os.SEEK_END)
    require(found >= size, f"{file}: bytes", found, f"at least {size}, which {RECORD_FILE} beside it counts")
    opened.seek(size)
    opened.truncate()
    return opened


def _advance(record: Record, result: Result, num_listed_bytes: int) -> Record:
    def added(counts: dict[str, int], more: dict[str, int]) -> dict[str, int]:
        return dict(collections.Counter(counts) + collections.Counter(more))

    tokens = result.tokens.items()
    return Record(
        position=result.after,
        num_input_bytes=result.num_input_bytes,
        num_text_bytes=record.num_text_bytes + result.num_text_bytes,
        num_documents={split: record.num_documents[split] + len(part.lengths) for split, part in tokens},
        num_tokens={split: record.num_tokens[split] + len(part.tokens) for split, part in tokens},
        left_out=added(record.left_out, result.left_out),
        rejected=added(record.rejected, result.rejected),
        rejected_bytes=record.rejected_bytes + num_listed_bytes,
    )


def _save(record: Record, directory: Path, written: list[BinaryIO]) -> None:
    """Make all that the record counts survive a power cut, and then the record."""
    for file in written:
        file.flush()
        os.fsync(file.fileno())
    for split in SPLITS:
        sync(directory / split)
    write_json(directory / RECORD_FILE, dataclasses.asdict(record))


def read_record(directory: Path) -> Record:
    """The record of a directory; of its beginning, if it has none.

    Raises:
        InputError: the file is damaged.
    """
    file = directory / RECORD_FILE
    if not file.exists():
        return Record()
    content = read_json(file)
    if not _is_like(content, dataclasses.asdict(Record())):
        raise InputError(f"{file}: is damaged; delete {directory} to begin anew")
    return Record(**{**content, "position": Position(**content["position"])})


def _is_like(found: Any, like: Any) -> bool:
    """Whether there are numbers, from 0 on, under the same names; under any, where `like` has none."""
    if type(like) is int:
        return type(found) is int and found >= 0
    return (
        type(found) is dict
        and (not like or found.keys() == like.keys())
        and all(_is_like(value, like[name] if like else 0) for name, value in found.items())
    )


def describe(bad: BadRecord) -> str:
    """A bad record in one line."""
    return printable(f"{bad.file}{f', line {bad.line}' if bad.line else ''}: {bad.reason}: {bad.detail}")


def progress(total: int, what: str, done: int) -> tqdm:
    """A bar of bytes; in a log file, a line every minute."""
    every = 0.5 if sys.stderr.isatty() else 60
    return tqdm(
        total=total, initial=done, desc=what, unit="B", unit_scale=True, mininterval=every, delay=every, leave=False
    )


def read_json(file: Path) -> dict[str, Any]:
    """An object in JSON.

    Raises:
        InputError: it cannot be read, or is none.
    """
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON: {error}") from error
    require(type(content) is dict, str(file), type(content).__name__, "a JSON object")
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Put a file in its place in one step, to survive a power cut."""
    partial = file.with_name(file.name + ".partial")
    with open(partial, "w") as opened:
        opened.write(json.dumps(content, indent=1) + "\n")
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(partial, file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Make a file or a directory's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
