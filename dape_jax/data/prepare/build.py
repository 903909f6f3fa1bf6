"""Documents -> tokens on disk, in one process or several, resumable per input file.

In: input files (`corpus`), a selection (`records`) and a tokenizer. Out: a directory that `store` opens, and in it

    record.json      the fields of `Record`
    rejected.jsonl   the bad records: file, line, reason, detail

`build_corpus` first converts each input file to a shard (consecutive small files share one), in any number of
processes. A shard is a directory that is renamed when it is complete; a kill loses only the shards in progress:

    input files -> shards/00000000/, ..   {train,validation}.{tokens,lengths}  rejected.jsonl  record.json

It then concatenates the shards in the order of the input, so the result does not depend on the number of processes.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Integer

from dape_jax.data.corpus import InputFile, Split, split_of
from dape_jax.data.prepare.records import Bad, Content, Selection, Skipped, read_documents
from dape_jax.data.store import FORMAT_VERSION, OFFSETS_FILE, SIDECAR_FILE, SPLITS, TOKENS_FILE, Sidecar, token_dtype
from dape_jax.data.tokenizers import Tokenizer, save_tokenizer
from dape_jax.errors import InputError, require
from dape_jax.files import read_json, sync_directory, write_json
from dape_jax.progress import Progress

RECORD_FILE, REJECTED_FILE = "record.json", "rejected.jsonl"
CORPUS_DIRECTORY, SHARDS_DIRECTORY = "corpus", "shards"

MAX_LISTED = 100_000  # maximum bad records of a shard in rejected.jsonl; the rest are only counted
_SHARD_BYTES = 2**22  # maximum bytes of input of small files that share a shard
_BLOCK_BYTES = 2**22


@dataclasses.dataclass
class Record:
    """Counts of a shard, or of a whole corpus."""

    num_input_bytes: int = 0
    num_text_bytes: int = 0  # total size of the documents that are text
    num_documents: Counter[str] = dataclasses.field(default_factory=lambda: Counter(train=0, validation=0))
    num_tokens: Counter[str] = dataclasses.field(default_factory=lambda: Counter(train=0, validation=0))
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason
    rejected: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason
    num_lossy: int = 0  # documents that their ids do not decode to

    def add(self, counts: dict[str, Any]) -> None:
        """Add the fields of another record to these."""
        for name, count in counts.items():
            if isinstance(count, int):
                setattr(self, name, getattr(self, name) + count)
            else:
                getattr(self, name).update(count)


def read_record(*files: Path) -> Record:
    """Return the sum of the records in files."""
    record = Record()
    for file in files:
        record.add(read_json(file))
    return record


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Everything that the content of a shard depends on, except its input files."""

    selection: Selection
    tokenizer: Tokenizer
    lossy: bool  # accept documents that their ids do not decode to

    def write_shard(self, files: list[InputFile], shard: Path) -> Path:
        """Write the documents of input files, in order, to a directory that appears when it is complete; return it.

        Raises:
            InputError: a file cannot be read, ids are outside the vocabulary, or a document needs `lossy`.
        """
        partial = shard.with_name(f".{shard.name}.{uuid.uuid4().hex}")
        partial.mkdir(parents=True)
        dtype = token_dtype(self.tokenizer.vocab_size)
        end = np.array([self.tokenizer.end_of_document], dtype).tobytes()
        record = Record(num_input_bytes=sum(file.num_bytes for file in files))
        names = [*(f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "lengths")), REJECTED_FILE]
        with contextlib.ExitStack() as stack:
            out = {name: stack.enter_context(_new_file(partial / name)) for name in names}
            for file in files:
                for number, content in read_documents(file, self.selection):
                    found = content if isinstance(content, str | Bad) else self._encode(file, number, content, record)
                    if isinstance(found, str):
                        record.skipped[found] += 1
                    elif isinstance(found, Bad):
                        record.rejected[found.reason] += 1
                        if record.rejected.total() <= MAX_LISTED:
                            detail = " ".join(found.detail.split())[:200]
                            bad = {"file": file.path, "line": number, "reason": found.reason, "detail": detail}
                            out[REJECTED_FILE].write(json.dumps(bad).encode() + b"\n")
                    else:
                        split, ids = found
                        out[f"{split}.tokens"].write(ids.astype(dtype, casting="unsafe").tobytes() + end)
                        out[f"{split}.lengths"].write((len(ids) + 1).to_bytes(8, "little"))
                        record.num_documents[split] += 1
                        record.num_tokens[split] += len(ids) + 1
        write_json(partial / RECORD_FILE, vars(record))
        os.rename(partial, shard)
        sync_directory(shard.parent)
        return shard

    def _encode(
        self, file: InputFile, number: int, content: Content, record: Record
    ) -> tuple[Split, Integer[np.ndarray, "_"]] | Bad | Skipped:
        """Return split and ids without end_of_document, or why the document is skipped or bad."""
        selection, tokenizer = self.selection, self.tokenizer
        where = f"{file.path}: document {number}"
        if isinstance(content, bytes):
            if reason := selection.skips_length(len(content)):
                return reason
            try:
                ids = tokenizer.encode(content)
            except InputError as error:
                return Bad("cannot be encoded", str(error))
            if tokenizer.decode(ids) != content:
                allowed = "must decode to the text; --lossy accepts and counts documents that differ"
                require(self.lossy, f"{where}: tokenizer", tokenizer.name, allowed)
                record.num_lossy += 1
            record.num_text_bytes += len(content)
            return split_of(content, selection.validation_fraction), ids
        if len(content) and content[-1] == tokenizer.end_of_document:
            content = content[:-1]
        if reason := selection.skips_length(len(content)):
            return reason
        low, high = int(content.min()), int(content.max())
        allowed = f"must be 0 to {tokenizer.vocab_size - 1}, the ids of the tokenizer {tokenizer.name}"
        require(0 <= low and high < tokenizer.vocab_size, f"{where}: token id", low if low < 0 else high, allowed)
        return split_of(content.astype("<i8").tobytes(), selection.validation_fraction), content


@contextlib.contextmanager
def _new_file(file: Path) -> Iterator[BinaryIO]:
    """Open a new file; its content is on disk when the block ends."""
    with open(file, "wb", _BLOCK_BYTES) as opened:
        yield opened
        opened.flush()
        os.fsync(opened.fileno())


class NoDocumentsError(InputError):
    """Split without documents: the shards cannot become a corpus."""


def build_corpus(
    work: Path, files: list[InputFile], conversion: Conversion, *, source: str, fingerprint: str, workers: int
) -> Record:
    """Build a corpus in `work / "corpus"`, and return its counts.

    `work` is empty or has shards of the same files and conversion. The sidecars record `source`, the input as given by
    the user, and `fingerprint`. Each of the `workers` writes one shard at a time; 1 uses only this process.

    Raises:
        NoDocumentsError: a split has no documents.
        InputError: as `Conversion.write_shard`, or a worker died.
    """
    shards = {work / SHARDS_DIRECTORY / f"{index:08}": unit for index, unit in enumerate(_units(files))}
    for killed in (work / SHARDS_DIRECTORY).glob(".*"):
        shutil.rmtree(killed)
    missing = {shard: unit for shard, unit in shards.items() if not shard.exists()}
    num_bytes = sum(file.num_bytes for unit in missing.values() for file in unit)
    if workers > 1:
        written = _write_in_pool(conversion, missing, workers)
    else:
        written = (conversion.write_shard(unit, shard) for shard, unit in missing.items())
    bar = Progress(total=num_bytes, desc="tokenizing", unit="B", unit_scale=True, leave=False)
    with bar, contextlib.closing(written):
        for shard in written:
            bar.update(sum(file.num_bytes for file in missing[shard]))
    record = read_record(*(shard / RECORD_FILE for shard in shards))
    if not (num_documents := record.num_documents.total()):
        counts = record.skipped | {f"bad ({reason})": count for reason, count in record.rejected.items()}
        found = ", ".join(f"{count:,} {what}" for what, count in counts.items()) or "no records"
        raise NoDocumentsError(f"input = {source!r}: no documents found: {found}")
    for split, other in zip(SPLITS, ("smaller", "larger"), strict=True):
        if not record.num_documents[split]:
            raise NoDocumentsError(
                f"validation_fraction = {conversion.selection.validation_fraction}: leaves no {split} documents of the "
                f"{num_documents:,} in {source!r} (each split needs one); give a {other} fraction"
            )
    _combine(list(shards), work / CORPUS_DIRECTORY, conversion.tokenizer, record, source, fingerprint)
    return record


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
    conversion: Conversion, missing: dict[Path, list[InputFile]], workers: int
) -> Generator[Path, None, None]:
    """Yield the shards as worker processes complete them; the workers end with this process, also if it is killed."""
    context = multiprocessing.get_context("spawn")  # a process that runs JAX has threads and must not be forked
    alive, stop = context.Pipe(duplex=False)  # workers end when `stop` is closed
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (conversion, alive))
    try:
        futures = [pool.submit(_work, unit, shard) for shard, unit in missing.items()]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise InputError(
            f"workers = {workers}: a worker died, possibly for lack of memory; the same command resumes, and fewer "
            "workers need less memory"
        ) from error
    finally:
        stop.close()
        pool.shutdown(cancel_futures=True)


# Set once in each worker process by `_start_worker`, so that the tokenizer is not sent with each task.
_conversion: Conversion


def _start_worker(conversion: Conversion, alive: Any) -> None:
    global _conversion
    _conversion = conversion
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, which all processes receive
    threading.Thread(target=lambda: (alive.poll(None), os._exit(1)), daemon=True).start()


def _work(unit: list[InputFile], shard: Path) -> Path:
    return _conversion.write_shard(unit, shard)


def _combine(
    shards: list[Path], directory: Path, tokenizer: Tokenizer, record: Record, source: str, fingerprint: str
) -> None:
    """Write the two stores in `directory` from the shards."""
    dtype = token_dtype(tokenizer.vocab_size)
    shutil.rmtree(directory, ignore_errors=True)
    for split in SPLITS:
        store, sha = directory / split, hashlib.sha256()
        store.mkdir(parents=True)
        save_tokenizer(tokenizer, store)
        with _new_file(store / TOKENS_FILE) as tokens:
            for block in _blocks(shards, f"{split}.tokens"):
                tokens.write(block)
                sha.update(block)
        lengths = np.frombuffer(b"".join(_blocks(shards, f"{split}.lengths")), "<i8")
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
        sha.update(offsets.data)
        with _new_file(store / OFFSETS_FILE) as file:
            np.save(file, offsets)
        num_documents, num_tokens = len(lengths), int(offsets[-1])
        is_whole = (num_documents, num_tokens) == (record.num_documents[split], record.num_tokens[split])
        is_whole = is_whole and (store / TOKENS_FILE).stat().st_size == num_tokens * dtype.itemsize
        require(is_whole, str(shards[0].parent), f"{split} shards", "are damaged; delete them to build them again")
        sidecar = Sidecar(
            format_version=FORMAT_VERSION,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype.str,
            num_documents=num_documents,
            num_tokens=num_tokens,
            digest=sha.hexdigest(),
            split=split,
            source=source,
            fingerprint=fingerprint,
        )
        write_json(store / SIDECAR_FILE, dataclasses.asdict(sidecar))
    with _new_file(directory / REJECTED_FILE) as rejected:
        rejected.writelines(_blocks(shards, REJECTED_FILE))
    write_json(directory / RECORD_FILE, vars(record))
    sync_directory(directory)


def _blocks(shards: list[Path], name: str) -> Iterator[bytes]:
    for shard in shards:
        with open(shard / name, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
