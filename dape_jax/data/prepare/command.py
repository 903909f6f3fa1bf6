"""Turn files into a corpus to train on: tokens on disk, in parallel, as often interrupted as need be.

    python -m dape_jax.data.prepare --input='pile/*.jsonl.zst' --where=meta.pile_set_name=ArXiv --output=data/arxiv \
        --tokenizer=20B_tokenizer.json
    python -m dape_jax.data.prepare --input=notes,papers/**/*.tex --output=data/mine --train_bpe=8192
    python -m dape_jax.data.prepare --input=books_text_document.bin --output=data/books --tokenizer=20B_tokenizer.json

In: files of text, JSON lines, parquet or token ids; `records` says which. Out: a directory for `data.path`, which has

    train/  validation/  record.json  rejected.jsonl    see `build`
    recipe.json       the options and inputs that it was made with
    tokenizer.json    what --train_bpe has trained, or a copy of --tokenizer

It is built in OUTPUT.partial, which is renamed when all of it is on disk. The same command after an interruption goes
on from the last record there, and comes to the same tokens as without one; another command is refused.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from dape_jax.data import corpus
from dape_jax.data.prepare.build import (
    FORMAT_VERSION,
    REJECTED_FILE,
    Record,
    Usage,
    build,
    check_found,
    describe,
    finish,
    progress,
    read_json,
    read_record,
    sync,
    write_json,
)
from dape_jax.data.prepare.records import (
    BadRecord,
    Document,
    Position,
    Selection,
    examine,
    holds_ids,
    input_files,
    read_batches,
)
from dape_jax.data.store import Corpus, open_corpus
from dape_jax.data.tokenizers import (
    TOKENIZER_FILE,
    Tokenizer,
    check_trained_vocab_size,
    read_tokenizer,
    save_tokenizer,
    saved_tokenizer,
    train_bpe,
)
from dape_jax.errors import InputError, require

RECIPE_FILE, LOCK_FILE = "recipe.json", "lock"


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """What is made of which files.

    Args:
        input: files, directories and globs.
        output: a new directory.
        tokenizer: "bytes" or the path of a Hugging Face tokenizer.json; None to train one.
        train_bpe: size of the vocabulary of a byte-level BPE to train; None for `tokenizer`.
        train_bpe_bytes: the first so many bytes of training text that it is trained on.
        text_field: where a record has its text; a dot leads into an object.
        where: "field=value" or "field=value|value", all of which a record must match.
        min_length: bytes of UTF-8 of a document; ids, if it is of a .bin file.
        max_length: the same. It bounds the memory.
        validation_fraction: the share of the documents that training never sees.
        workers: processes that tokenize; 1 for all in this process.
        strict: stop at the first bad record.
    """

    input: tuple[str, ...]
    output: str
    tokenizer: str | None = None
    train_bpe: int | None = None
    train_bpe_bytes: int = 2**30
    text_field: str = "text"
    where: tuple[str, ...] = ()
    min_length: int = 1
    max_length: int = 2**24
    validation_fraction: float = 0.01
    workers: int = 1
    strict: bool = False

    def __post_init__(self):
        given = len(self.input) > 0 and all(self.input)
        require(given, "input", ",".join(self.input), "files, directories or globs, parted by commas")
        require(bool(self.output.strip("/")) and "\0" not in self.output, "output", self.output, "a new directory")
        chosen = (self.tokenizer, self.train_bpe)
        require(chosen.count(None) == 1, "tokenizer, train_bpe", chosen, "one of the two")
        if self.train_bpe is not None:
            check_trained_vocab_size(self.train_bpe)
        require(self.train_bpe_bytes > 0, "train_bpe_bytes", self.train_bpe_bytes, "a positive number")
        require(self.text_field != "", "text_field", self.text_field, "the name of a field")
        for where in self.where:
            allowed = "field=value or field=value|value"
            require(re.fullmatch(r"[^=]+=.+", where, re.DOTALL) is not None, "where", where, allowed)
        require(self.min_length > 0, "min_length", self.min_length, "1 or more: an empty document holds nothing")
        allowed = f"min_length = {self.min_length} to {2**30}: it bounds the memory"
        require(self.min_length <= self.max_length <= 2**30, "max_length", self.max_length, allowed)
        require(0 < self.validation_fraction < 1, "validation_fraction", self.validation_fraction, "between 0 and 1")
        require(0 < self.workers <= 1024, "workers", self.workers, "1 to 1024 processes")

    @property
    def selection(self) -> Selection:
        """What becomes a document."""
        where = tuple((field, tuple(values.split("|"))) for field, _, values in (w.partition("=") for w in self.where))
        return Selection(self.text_field, where, self.min_length, self.max_length, self.validation_fraction)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What `prepare` has made."""

    corpus: Corpus
    record: Record
    usage: Usage | None  # None if the output was there already


def prepare(config: PrepareConfig) -> Prepared:
    """Make a corpus, or what is left to do of it.

    With more than one worker, a program that calls this must be importable: its own start stands behind
    `if __name__ == "__main__"`.

    Args:
        config: what of which files.

    Raises:
        InputError: bad input, an output that is there and was not made by the same recipe, or that another process is
            making, or a worker that died.
    """
    output = Path(os.path.abspath(os.path.expanduser(config.output)))
    partial = output.with_name(output.name + ".partial")
    files = _files(config, (output, partial))
    tokenizer = None if config.tokenizer is None else read_tokenizer(config.tokenizer, "tokenizer")
    if tokenizer is None and any(map(holds_ids, files)):
        raise InputError(f"train_bpe = {config.train_bpe}: .bin files hold ids; name the tokenizer that made them")
    recipe = _recipe(config, tokenizer, files)
    if os.path.lexists(output):
        _check_recipe(output, recipe)
        with contextlib.suppress(OSError):  # of a process that was killed when it had just renamed the directory
            (output / LOCK_FILE).unlink()
        return Prepared(open_corpus(output), read_record(output), None)
    try:
        with _locked(partial):
            if (partial / RECIPE_FILE).exists():
                _check_recipe(partial, recipe)
            else:
                others = sorted({path.name for path in partial.iterdir()} - {LOCK_FILE, f"{RECIPE_FILE}.partial"})
                require(not others, str(partial), others, "is in the way: it holds files that are not of this program")
                write_json(partial / RECIPE_FILE, recipe)
            for torn in partial.rglob(f".{TOKENIZER_FILE}.*"):  # of a kill while a tokenizer was saved
                torn.unlink()
            if tokenizer is None:
                tokenizer = _trained_tokenizer(config, files, partial)
            save_tokenizer(tokenizer, partial)
            record, usage = build(
                partial, files, config.selection, tokenizer, workers=config.workers, strict=config.strict
            )
            source = ",".join(config.input)
            check_found(record, f"input = {source!r}", "validation_fraction", config.validation_fraction)
            fingerprint = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
            finish(partial, record, tokenizer, source=source, fingerprint=fingerprint)
            sync(partial)
            os.rename(partial, output)
            sync(output.parent)
            (output / LOCK_FILE).unlink(missing_ok=True)
    except OSError as error:  # of writing: reading reports its own
        raise InputError(f"output = {config.output!r}: cannot be written to: {error}") from error
    return Prepared(open_corpus(output), record, usage)


def _files(config: PrepareConfig, left_out: tuple[Path, Path]) -> list[Path]:
    """The inputs' files, each once; not what this program has written among them."""
    found = [pair for path in config.input for pair in corpus.find_files(path, "input")]
    files = input_files(found)
    files = [file for file in files if not any(Path(os.path.abspath(file)).is_relative_to(path) for path in left_out)]
    require(len(files) > 0, "input", ",".join(config.input), "nothing there but the output")
    return files


def _recipe(config: PrepareConfig, tokenizer: Tokenizer | None, files: list[Path]) -> dict[str, Any]:
    """All that decides the result, as JSON."""
    made_with = (
        {"tokenizer": tokenizer.name}
        if tokenizer
        else {"train_bpe": config.train_bpe, "train_bpe_bytes": config.train_bpe_bytes}
    )
    try:
        stats = {os.path.abspath(file): file.stat() for file in files}
    except OSError as error:
        raise InputError(f"input = {','.join(config.input)!r}: cannot be read: {error}") from error
    recipe = {
        "format_version": FORMAT_VERSION,
        **made_with,
        **dataclasses.asdict(config.selection),
        "input": {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()},
    }
    return json.loads(json.dumps(recipe))


def _check_recipe(directory: Path, recipe: dict[str, Any]) -> None:
    """Raise `InputError` unless the directory is, or will be, what the recipe makes."""
    file = directory / RECIPE_FILE
    require(file.is_file(), "output", str(directory), "a new directory; this is there, and not of this program")
    from dape_jax.config import differences  # not above: the workers import this module, and need no optimizers

    lines = differences(read_json(file), recipe)
    if not lines and list(read_json(file)["input"]) != list(recipe["input"]):
        lines = ["input: saved in another order"]
    if lines:
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise InputError(
            f"{directory}: was made or begun with another recipe: {lines[0]}{more}; choose another output or delete it"
        )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Have a directory, made if need be, to this process alone.

    Raises:
        InputError: another process has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK_FILE, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have finished since, and have renamed the directory with the file in it.
            is_ours = os.path.samestat(os.fstat(lock.fileno()), os.stat(directory / LOCK_FILE))
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        require(is_ours, "output", str(directory), "another process is at work in it")
        yield


def _trained_tokenizer(config: PrepareConfig, files: list[Path], directory: Path) -> Tokenizer:
    """The tokenizer of an earlier attempt, or one that is trained now."""
    if (directory / TOKENIZER_FILE).exists():
        return saved_tokenizer(directory)
    assert config.train_bpe is not None
    texts = _training_texts(config, files)
    first = next(texts, None)
    if first is None:
        raise InputError(f"input = {','.join(config.input)!r}: no text there to train a tokenizer on")
    return train_bpe(itertools.chain([first], texts), config.train_bpe)


def _training_texts(config: PrepareConfig, files: list[Path]) -> Iterator[str]:
    """The first `train_bpe_bytes` of the documents that training will see."""
    selection = config.selection
    num_bytes = 0
    with progress(sum(file.stat().st_size for file in files), "reading for the tokenizer", 0) as bar:
        for batch in read_batches(files, selection, Position()):
            for found in (found for piece in batch.pieces for found in examine(piece, selection)):
                if isinstance(found, BadRecord) and config.strict:
                    raise InputError(f"{describe(found)}; without strict it is left out")
                if not isinstance(found, Document) or not isinstance(found.content, bytes):
                    continue
                is_train = corpus.split_of(found.content, config.validation_fraction) == "train"
                if is_train and selection.by_length(len(found.content)) is None:
                    with contextlib.suppress(UnicodeDecodeError):  # counted when it is to be encoded
                        yield found.content.decode()
                        num_bytes += len(found.content)
                if num_bytes >= config.train_bpe_bytes:
                    return
            bar.update(batch.num_input_bytes - bar.n)


def summary(prepared: Prepared) -> str:
    """The closing words."""
    record, usage, made = prepared.record, prepared.usage, prepared.corpus
    output = made.train.directory.parent

    def counts(values: dict[str, int]) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in values.items()) or "none"

    lines = {
        "documents": counts(record.num_documents),
        "tokens": f"{counts(record.num_tokens)}; tokenizer {made.train.sidecar.tokenizer}",
        "text": f"{record.num_text_bytes / 1e6:,.1f} MB, from {record.num_input_bytes / 1e6:,.1f} MB of input",
        "left out": counts(record.left_out),
        "bad records": counts(record.rejected) + (f": see {output / REJECTED_FILE}" if record.rejected else ""),
    }
    if usage:
        text, read = (f"{num / 1e6 / usage.seconds:,.1f}" for num in (usage.num_text_bytes, usage.num_input_bytes))
        workers = f", {usage.worker_peak_bytes / 2**20:,.0f} MiB in the largest worker"
        lines |= {
            "time": f"{usage.seconds:,.1f} s: {text} MB/s of text, {read} MB/s of input",
            "peak memory": f"{usage.peak_bytes / 2**20:,.0f} MiB" + (workers if usage.worker_peak_bytes else ""),
        }
    lines |= {"digest": made.digest}
    what = "corpus" if usage else "was complete, made by the same recipe"
    return "\n".join([f"{output}: {what}", *(f"  {name:13}{text}" for name, text in lines.items())])


def define_flags() -> None:
    """The command line's."""
    flags.DEFINE_list("input", None, "Files, directories and globs (quoted, ** descends), parted by commas.")
    flags.DEFINE_string("output", None, "New directory for the corpus, for --config.data.path.")
    flags.DEFINE_string("tokenizer", None, "bytes, or a Hugging Face tokenizer.json (of .bin files: what made them).")
    flags.DEFINE_integer("train_bpe", None, "Train a byte-level BPE of this vocabulary size instead.")
    flags.DEFINE_integer("train_bpe_bytes", 2**30, "First bytes of training text that --train_bpe learns from.")
    flags.DEFINE_string("text_field", "text", "Field of a record that holds its text; a dot leads into an object.")
    flags.DEFINE_multi_string("where", [], "field=value or field=value|value: only records that match all of these.")
    flags.DEFINE_integer("min_length", 1, "Bytes of UTF-8 of a document at least; ids, in .bin files.")
    flags.DEFINE_integer("max_length", 2**24, "Bytes of UTF-8 of a document at most; ids, in .bin files.")
    flags.DEFINE_float(
        "validation_fraction", 0.01, "Share of the documents that is held out, by a hash of their content."
    )
    flags.DEFINE_integer("workers", os.cpu_count() or 1, "Processes that tokenize; 1 for all in one.")
    flags.DEFINE_bool("strict", False, "Stop at the first bad record instead of leaving it out.")
    flags.mark_flags_as_required(["input", "output"])


def main(_: list[str]) -> None:
    """Flags, then one call."""
    given = flags.FLAGS
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(PrepareConfig)}
    listed = {name: tuple(fields[name]) for name in ("input", "where")}
    print(summary(prepare(PrepareConfig(**{**fields, **listed}))))
