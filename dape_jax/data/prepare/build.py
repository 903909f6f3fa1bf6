"""Documents -> tokens on disk: the builder of all stores, in one process or several, resumable per input file.

In: input files (`corpus`), a selection (`records`) and a tokenizer. Out: a directory that `store` opens. Next: `store`.

    train/           tokens.bin      the documents one after another, each with its end_of_document; little-endian
                     offsets.npy     int64[num_documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
                     tokenizer.json  the tokenizer; missing for bytes
                     store.json      the fields of `Sidecar`, written last
    validation/      the same
    record.json      the fields of `Record`
    rejected.jsonl   the bad records: file, line, reason, detail

`build_corpus` first converts each input file to a shard (consecutive small files share one), in any number of
processes. A shard is a directory that is renamed when it is complete; a kill loses only the shards in progress:

    input files -> shards/00000000/, ..   {train,validation}.{tokens,lengths}  rejected.jsonl  shard.json

It then concatenates the shards in the order of the input, so the result does not depend on the number of processes.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np
from jaxtyping import Integer
from tqdm import tqdm

from dape_jax.data import corpus
from dape_jax.data.corpus import InputFile, Split
from dape_jax.data.prepare.records import BadRecord, Document, Selection, Skipped, read_documents
from dape_jax.data.tokenizers import Tokenizer, save_tokenizer
from dape_jax.errors import InputError, printable, require
from dape_jax.files import read_json, sync_directory, write_json
from dape_jax.progress import Progress

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
TOKENS_FILE, OFFSETS_FILE, SIDECAR_FILE = "tokens.bin", "offsets.npy", "store.json"
RECORD_FILE, REJECTED_FILE = "record.json", "rejected.jsonl"
CORPUS_DIRECTORY, SHARDS_DIRECTORY, DIGESTS_FILE = "corpus", "shards", "shard.json"
SPLITS: tuple[Split, ...] = get_args(Split)

MAX_LISTED = 100_000  # maximum bad records in rejected.jsonl; the rest are only counted
_SHOWN = 5  # bad records that are also logged
_ADVANCE_BYTES = 2**20  # bytes of input between updates of the progress bar
_SHARD_BYTES = 2**22  # maximum bytes of input of small files that share a shard
_POLL_SECONDS = 0.5
_BLOCK_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """Description of a store, saved in its store.json."""

    format_version: int
    tokenizer: str  # name of the tokenizer: "bytes", or a hash of tokenizer.json
    vocab_size: int
    dtype: str  # dtype of tokens.bin in numpy's notation: "<u2"
    num_documents: int
    num_tokens: int
    digest: str  # sha256 of tokens.bin and then the numbers of offsets.npy
    split: str
    source: str  # data.path, or the inputs of `prepare`
    fingerprint: str  # hash of the input files and of the options that affect the result


def _per_split() -> collections.Counter[str]:
    return collections.Counter(dict.fromkeys(SPLITS, 0))


@dataclasses.dataclass
class Record:
    """Counts of a shard, or of a whole corpus."""

    num_input_bytes: int = 0
    num_text_bytes: int = 0  # total size of the documents that are text
    num_documents: collections.Counter[str] = dataclasses.field(default_factory=_per_split)
    num_tokens: collections.Counter[str] = dataclasses.field(default_factory=_per_split)
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by reason
    rejected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by reason
    num_lossy: int = 0  # documents that a lossy tokenizer cannot decode exactly

    def add(self, counts: dict[str, Any]) -> None:
        """Add the fields of another record to these."""
        for name, count in counts.items():
            if isinstance(count, int):
                setattr(self, name, getattr(self, name) + count)
            else:
                getattr(self, name).update(count)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype for all ids, little-endian."""
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


def read_record(file: Path) -> Record:
    """Return the record in a file.

    Raises:
        InputError: the file is damaged.
    """
    content = read_json(file)
    if not _is_like(content, vars(Record())):
        raise InputError(f"{file}: is damaged; delete {file.parent} to rebuild it")
    record = Record()
    record.add(content)
    return record


def _is_like(found: Any, like: Any) -> bool:
    """Return whether `found` has counts, 0 or more, for the keys of `like`, or for any keys where `like` has none."""
    if type(like) is int:
        return type(found) is int and found >= 0
    return (
        type(found) is dict
        and (not like or found.keys() == like.keys())
        and all(_is_like(value, like[name] if like else 0) for name, value in found.items())
    )


# Write a shard.


@contextlib.contextmanager
def _new_file(file: Path) -> Iterator[BinaryIO]:
    """Open a new file; its content is on disk when the block ends."""
    with open(file, "wb", _BLOCK_BYTES) as opened:
        yield opened
        opened.flush()
        os.fsync(opened.fileno())


def write_shard(
    selection: Selection,
    tokenizer: Tokenizer,
    strict: bool,
    files: list[InputFile],
    directory: Path,
    advance: Callable[[int], object],
) -> Path:
    """Write the documents of input files, in order, as one shard, and return `directory`.

    The directory appears when it is complete. Its content depends only on `selection`, `tokenizer` and `files`.
    `advance` is called with the number of input bytes read since the last call.

    Raises:
        InputError: a file cannot be read, a record is bad and `strict` is set, or ids are outside the vocabulary.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype).tobytes()
    record = Record(num_input_bytes=sum(file.num_bytes for file in files))
    names = [*(f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "lengths")), REJECTED_FILE]
    with contextlib.ExitStack() as stack:
        out = {name: stack.enter_context(_new_file(partial / name)) for name in names}
        for file in files:
            reached = _by_position(file.num_bytes, advance)
            for found in read_documents(file, selection, reached):
                result = _encode(found, selection, tokenizer) if isinstance(found, Document) else found
                if isinstance(result, str):
                    record.skipped[result] += 1
                elif isinstance(result, BadRecord):
                    if strict:
                        raise InputError(f"{describe(result)}; omit --strict to skip it")
                    record.rejected[result.reason] += 1
                    if record.rejected.total() <= MAX_LISTED:
                        out[REJECTED_FILE].write(json.dumps(vars(result)).encode() + b"\n")
                else:
                    split, ids, num_bytes, is_lossy = result
                    out[f"{split}.tokens"].write(ids.astype(dtype, casting="unsafe").tobytes() + end)
                    out[f"{split}.lengths"].write((len(ids) + 1).to_bytes(8, "little"))
                    record.num_documents[split] += 1
                    record.num_tokens[split] += len(ids) + 1
                    record.num_text_bytes += num_bytes
                    record.num_lossy += is_lossy
            reached(file.num_bytes)
    write_json(partial / RECORD_FILE, vars(record))
    write_json(partial / DIGESTS_FILE, {name: _digest(partial / name) for name in names})
    os.rename(partial, directory)
    sync_directory(directory.parent)
    return directory


def _by_position(num_bytes: int, advance: Callable[[int], object]) -> Callable[[int], None]:
    """Return a function of a file position that calls `advance` with the bytes since the last call.

    Except for the last one, calls are at least 1 MiB apart, because they acquire a lock that the workers share.
    """
    done = 0

    def reached(position: int) -> None:
        nonlocal done
        if position - done >= _ADVANCE_BYTES or (done < position == num_bytes):
            advance(position - done)
            done = position

    return reached


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _encode(
    document: Document, selection: Selection, tokenizer: Tokenizer
) -> tuple[Split, Integer[np.ndarray, "_"], int, bool] | BadRecord | Skipped:
    """Return split, ids without end_of_document, bytes of text, and whether the ids lose text; or a reason to skip."""
    content = document.content
    if isinstance(content, bytes):
        if reason := selection.skips_length(len(content)):
            return reason
        try:
            ids = tokenizer.encode(content)
        except InputError as error:
            return BadRecord(document.file, document.line, "cannot be encoded", str(error))
        is_lossy = tokenizer.loss is not None and tokenizer.decode(ids) != content
        return corpus.split_of(content, selection.validation_fraction), ids, len(content), is_lossy
    if len(content) and content[-1] == tokenizer.end_of_document:
        content = content[:-1]
    if reason := selection.skips_length(len(content)):
        return reason
    low, high = int(content.min()), int(content.max())
    require(
        0 <= low and high < tokenizer.vocab_size,
        f"{document.file}: document {document.line}: token id",
        low if low < 0 else high,
        f"must be 0 to {tokenizer.vocab_size - 1}, the ids of the tokenizer {tokenizer.name}",
    )
    return corpus.split_of(content.astype("<i8").tobytes(), selection.validation_fraction), content, 0, False


# Write all shards, in this process or in others.


def _write_shards(
    work: Path, files: list[InputFile], selection: Selection, tokenizer: Tokenizer, workers: int, strict: bool
) -> list[Path]:
    """Write the shards that are missing in `work`, and return all shards in order."""
    shards = {work / SHARDS_DIRECTORY / f"{index:08}": unit for index, unit in enumerate(_units(files))}
    missing = {shard: unit for shard, unit in shards.items() if not shard.exists()}
    found = [read_record(shard / RECORD_FILE) for shard in shards if shard not in missing]
    message = f"an earlier run skipped bad records; omit --strict, or delete {work} to start over"
    require(not (strict and any(record.rejected for record in found)), "strict", strict, message)
    num_bytes = sum(file.num_bytes for file in files)
    write = functools.partial(write_shard, selection, tokenizer, strict)
    num_shown = 0
    with progress(num_bytes, "tokenizing", sum(record.num_input_bytes for record in found)) as bar:
        if workers > 1:
            written = _write_in_pool(missing, write, workers, bar)
        else:
            written = (write(unit, shard, bar.update) for shard, unit in missing.items())
        with contextlib.closing(written):
            for shard in written:
                with open(shard / REJECTED_FILE) as rejected:
                    for line in itertools.islice(rejected, _SHOWN - num_shown):
                        logger.warning("skipped: %s", describe(BadRecord(**json.loads(line))))
                        num_shown += 1
    return list(shards)


def _units(files: list[InputFile]) -> list[list[InputFile]]:
    """Return the files of each shard: one file, or consecutive files of at most `_SHARD_BYTES` in total."""
    units: list[list[InputFile]] = []
    size = 0
    for file in files:
        if not units or size + file.num_bytes > _SHARD_BYTES:
            units.append([])
            size = 0
        units[-1].append(file)
        size += file.num_bytes
    return units


def _write_in_pool(
    missing: dict[Path, list[InputFile]], write: Callable[..., Path], workers: int, bar: tqdm
) -> Generator[Path, None, None]:
    """Yield the shards as worker processes complete them; the workers end with this process."""
    # spawn: a process that runs JAX has threads and must not be forked.
    context = multiprocessing.get_context("spawn")
    num_bytes = context.Value("q", 0)  # number of bytes that all workers have read
    alive, stop = context.Pipe(duplex=False)  # workers end when `stop` is closed, also if this process is killed
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (write, num_bytes, alive))
    before = bar.n
    try:
        # Workers inherit the signal mask: only the parent handles Ctrl-C, which all processes receive.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pending = {pool.submit(_work, unit, shard) for shard, unit in missing.items()}
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while pending:
            done, pending = concurrent.futures.wait(
                pending, _POLL_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED
            )
            bar.update(before + num_bytes.value - bar.n)
            for future in done:
                yield future.result()
    except BrokenProcessPool as error:
        raise InputError(
            f"workers = {workers}: a worker died, possibly for lack of memory; the same command resumes with the "
            "unfinished files, and fewer workers need less memory"
        ) from error
    finally:
        stop.close()
        pool.shutdown(cancel_futures=True)


# Set once in each worker process by `_start_worker`, so that the tokenizer is not sent with each task.
_write: Callable[[list[InputFile], Path], Path]


def _start_worker(write: Callable[..., Path], num_bytes: Any, alive: Any) -> None:
    def advance(more: int) -> None:
        with num_bytes.get_lock():
            num_bytes.value += more

    global _write
    _write = functools.partial(write, advance=advance)
    threading.Thread(target=lambda: (alive.poll(None), os._exit(1)), daemon=True).start()


def _work(unit: list[InputFile], shard: Path) -> Path:
    return _write(unit, shard)


# Combine the shards.


class NoDocumentsError(InputError):
    """Split without documents: the shards cannot become a corpus."""


def build_corpus(
    work: Path,
    files: list[InputFile],
    selection: Selection,
    tokenizer: Tokenizer,
    *,
    source: str,
    fingerprint: str,
    field: str,
    fraction_field: str,
    workers: int = 1,
    strict: bool = False,
) -> Record:
    """Build a corpus in `work / "corpus"`, and return its counts.

    `work` is empty or has shards of the same files, selection and tokenizer. The sidecars record `source`, the input as
    given by the user, and `fingerprint`. `field` and `fraction_field` are the names of the input and of the validation
    fraction in messages. Each of the `workers` writes one shard at a time; 1 uses only this process. `strict` stops at
    the first bad record.

    Raises:
        NoDocumentsError: a split has no documents.
        InputError: a file cannot be read, a record is bad and `strict` is set, a shard is damaged, or a worker died.
        OSError: the directory cannot be written to.
    """
    shards = _write_shards(work, files, selection, tokenizer, workers, strict)
    record = Record()
    for shard in shards:
        record.add(vars(read_record(shard / RECORD_FILE)))
    num_documents = record.num_documents.total()
    if not num_documents:
        counts = record.skipped | {f"bad ({reason})": count for reason, count in record.rejected.items()}
        found = ", ".join(f"{count:,} {what}" for what, count in counts.items()) or "no records"
        raise NoDocumentsError(f"{field} = {source!r}: no documents found: {found}")
    for split in SPLITS:
        if not record.num_documents[split]:
            other = "larger" if split == "validation" else "smaller"
            raise NoDocumentsError(
                f"{fraction_field} = {selection.validation_fraction}: leaves no {split} documents of the "
                f"{num_documents:,} in {field} = {source!r} (each split needs one); give a {other} fraction"
            )
    _combine_shards(shards, work / CORPUS_DIRECTORY, record, tokenizer, source, fingerprint)
    return record


def _combine_shards(
    shards: list[Path], directory: Path, record: Record, tokenizer: Tokenizer, source: str, fingerprint: str
) -> None:
    """Write the two stores in `directory` from the shards."""
    dtype = token_dtype(tokenizer.vocab_size)
    shutil.rmtree(directory, ignore_errors=True)
    with progress(record.num_tokens.total() * dtype.itemsize, "combining", 0) as bar:
        for split in SPLITS:
            store = directory / split
            store.mkdir(parents=True)
            save_tokenizer(tokenizer, store)
            sha = hashlib.sha256()
            with _new_file(store / TOKENS_FILE) as tokens:
                for block in _blocks(_verified(shards, f"{split}.tokens")):
                    tokens.write(block)
                    sha.update(block)
                    bar.update(len(block))
            with _new_file(store / OFFSETS_FILE) as offsets:
                header = {"descr": "<i8", "fortran_order": False, "shape": (record.num_documents[split] + 1,)}
                np.lib.format.write_array_header_1_0(offsets, header)
                end = 0
                for block in itertools.chain([bytes(8)], _blocks(_verified(shards, f"{split}.lengths"))):
                    ends = end + np.cumsum(np.frombuffer(block, "<i8"))
                    offsets.write(ends.tobytes())
                    sha.update(ends.tobytes())
                    end = ends[-1]
            sidecar = Sidecar(
                format_version=FORMAT_VERSION,
                tokenizer=tokenizer.name,
                vocab_size=tokenizer.vocab_size,
                dtype=dtype.str,
                num_documents=record.num_documents[split],
                num_tokens=record.num_tokens[split],
                digest=sha.hexdigest(),
                split=split,
                source=source,
                fingerprint=fingerprint,
            )
            write_json(store / SIDECAR_FILE, dataclasses.asdict(sidecar))
    with _new_file(directory / REJECTED_FILE) as rejected:
        lines = itertools.chain.from_iterable(_verified(shards, REJECTED_FILE))
        rejected.writelines(itertools.islice(lines, MAX_LISTED))
    write_json(directory / RECORD_FILE, vars(record))
    sync_directory(directory)


def _verified(shards: Iterable[Path], name: str) -> Iterator[BinaryIO]:
    """Yield one file of every shard, open for reading; raise if its digest has changed."""
    for shard in shards:
        with contextlib.suppress(FileNotFoundError):
            if read_json(shard / DIGESTS_FILE).get(name) == _digest(shard / name):
                with open(shard / name, "rb") as file:
                    yield file
                continue
        raise InputError(f"{shard / name}: has changed since it was written; delete {shard} to rebuild it")


def _blocks(files: Iterable[BinaryIO]) -> Iterator[bytes]:
    for file in files:
        while block := file.read(_BLOCK_BYTES):
            yield block


def describe(bad: BadRecord) -> str:
    """Return a bad record as one line."""
    return printable(f"{bad.file}{f', line {bad.line}' if bad.line else ''}: {bad.reason}: {bad.detail}")


def progress(total: int, description: str, done: int) -> tqdm:
    """Return a progress bar of bytes; in a log file, one line per minute."""
    seconds = 0.5 if sys.stderr.isatty() else 60
    return Progress(
        total=total,
        initial=done,
        desc=description,
        unit="B",
        unit_scale=True,
        mininterval=seconds,
        delay=seconds,
        leave=False,
    )
