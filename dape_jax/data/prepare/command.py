"""Convert files to a corpus for training: tokens on disk, in parallel, resumable.

    dape-prepare --input='pile/*.jsonl.zst' --where=meta.pile_set_name=ArXiv --output=data/arxiv --tokenizer=bytes
    dape-prepare --input='notes,papers/**/*.tex.gz' --output=data/mine --train_bpe=8192
    dape-prepare --input=books_text_document.bin --output=data/books --tokenizer=20B_tokenizer.json --lossy

In: files of text, JSON lines, parquet or token ids; see `records`. Out: a directory for `data.path`:

    train/  validation/  record.json  rejected.jsonl    see `build`
    recipe.json       options and input files
    tokenizer.json    the tokenizer; missing for bytes

It is built in OUTPUT.partial, which is renamed to OUTPUT when it is complete. After an interruption the same command
resumes with the unfinished input files; the result is the same. A command with other options is rejected.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.data import corpus
from dape_jax.data.corpus import InputFile
from dape_jax.data.prepare.build import (
    CORPUS_DIRECTORY,
    FORMAT_VERSION,
    RECORD_FILE,
    REJECTED_FILE,
    SHARDS_DIRECTORY,
    NoDocumentsError,
    Record,
    build_corpus,
    describe,
    progress,
    read_record,
)
from dape_jax.data.prepare.records import BadRecord, Document, Selection, holds_ids, read_documents
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
from dape_jax.files import exclusive_lock, json_digest, read_json, sync_directory, write_json

RECIPE_FILE, LOCK_FILE = "recipe.json", "lock"


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Input files, output directory and the conversion between them; each field is a flag."""

    input: tuple[str, ...] = flag(
        dataclasses.MISSING, "Comma-separated files, directories, globs (quoted; ** descends) and URLs of these."
    )
    output: str = flag(dataclasses.MISSING, "New directory for the corpus. Train on it with --config.data.path=OUTPUT.")
    tokenizer: str | None = flag(
        None,
        "bytes, or the path of a Hugging Face tokenizer.json; for .bin files, the tokenizer that made their ids. Give "
        "either this flag or --train_bpe.",
    )
    lossy: bool = flag(False, "Accept a lossy tokenizer.json, and count the documents that it changes.")
    train_bpe: int | None = flag(None, "Train a byte-level BPE of this vocabulary size, instead of --tokenizer.")
    train_bpe_bytes: int = flag(2**30, "Train the BPE on the first training documents, up to this number of bytes.")
    text_field: str = flag("text", "Field with the text of a record; a dot descends into an object.")
    where: tuple[str, ...] = flag(
        (), "field=value or field=value|value: keep only matching records. If repeated, all must match.", repeated=True
    )
    min_length: int = flag(1, "Minimum length of a document in bytes of UTF-8, or in ids for .bin files.")
    max_length: int = flag(2**24, "Maximum length of a document, in the same units. It bounds the memory.")
    validation_fraction: float = flag(0.01, "Share of the documents for validation, by a hash of their content.")
    workers: int = flag(1, "Number of processes that tokenize, each one shard at a time; 1 starts no other process.")
    strict: bool = flag(False, "Stop at the first bad record instead of skipping it.")

    def __post_init__(self):
        is_given = len(self.input) > 0 and all(self.input)
        require(is_given, "input", ",".join(self.input), "must be comma-separated files, directories, globs or URLs")
        allowed = "must be a local directory; copy it to a bucket when it is complete"
        require("://" not in self.output, "output", self.output, allowed)
        is_name = bool(self.output.strip("/")) and "\0" not in self.output
        require(is_name, "output", self.output, "must be a new directory")
        chosen = (self.tokenizer, self.train_bpe)
        allowed = "give exactly one: --tokenizer=bytes, --tokenizer=PATH of a tokenizer.json, or --train_bpe=SIZE"
        require(chosen.count(None) == 1, "tokenizer, train_bpe", chosen, allowed)
        if self.train_bpe is not None:
            check_trained_vocab_size(self.train_bpe)
        require(self.train_bpe_bytes > 0, "train_bpe_bytes", self.train_bpe_bytes, "must be positive")
        require(self.text_field != "", "text_field", self.text_field, "must be the name of a field")
        for where in self.where:
            is_condition = re.fullmatch(r"[^=]+=.+", where, re.DOTALL) is not None
            require(is_condition, "where", where, "must be field=value or field=value|value")
        require(self.min_length > 0, "min_length", self.min_length, "must be positive: an empty document has no text")
        allowed = f"must be min_length = {self.min_length} to {2**30}: it bounds the memory"
        require(self.min_length <= self.max_length <= 2**30, "max_length", self.max_length, allowed)
        require(0 < self.validation_fraction < 1, "validation_fraction", self.validation_fraction, "must be in (0, 1)")
        require(0 < self.workers <= 1024, "workers", self.workers, "must be 1 to 1024 processes")

    @property
    def selection(self) -> Selection:
        """Selection of the records that become documents."""
        where = tuple((field, tuple(values.split("|"))) for field, _, values in (w.partition("=") for w in self.where))
        return Selection(self.text_field, where, self.min_length, self.max_length, self.validation_fraction)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Result of `prepare`."""

    corpus: Corpus
    record: Record
    was_complete: bool  # whether an earlier run completed the corpus


def prepare(config: PrepareConfig) -> Prepared:
    """Build a corpus, resume building it, or open it if it is complete.

    With more than one worker, the calling program must be importable: guard its entry point with
    `if __name__ == "__main__":`.

    Raises:
        InputError: the input is invalid, the output was made with another recipe, another process is writing it, or a
            worker died.
    """
    output = Path(os.path.abspath(os.path.expanduser(config.output)))
    partial = output.with_name(output.name + ".partial")
    found = (file for path in config.input for file in corpus.find_files(path, "input"))
    files = corpus.unique_files(found, excluded=(output, partial))
    require(len(files) > 0, "input", ",".join(config.input), "must contain files other than the output")
    tokenizer = None
    if config.tokenizer is not None:
        tokenizer = read_tokenizer(config.tokenizer, "tokenizer", config.lossy)
    elif any(holds_ids(file.path) for file in files):
        raise InputError(f"train_bpe = {config.train_bpe}: .bin files contain ids; set --tokenizer to their tokenizer")
    recipe = _recipe(config, tokenizer, files)
    if os.path.lexists(output):
        _check_recipe(output, recipe)
        if (partial / RECIPE_FILE).exists() and read_json(partial / RECIPE_FILE) == recipe:
            shutil.rmtree(partial)  # left by a process that was killed after renaming the corpus
        return Prepared(open_corpus(output), read_record(output / RECORD_FILE), was_complete=True)
    try:
        with exclusive_lock(partial, "output", LOCK_FILE):
            if (partial / RECIPE_FILE).exists():
                _check_recipe(partial, recipe)
            else:
                others = sorted(path.name for path in partial.glob("[!.]*") if path.name != LOCK_FILE)
                require(not others, str(partial), others, "must be deleted: these files are not part of a corpus")
                write_json(partial / RECIPE_FILE, recipe)
            if tokenizer is None and (partial / TOKENIZER_FILE).exists():
                tokenizer = saved_tokenizer(partial)
            elif tokenizer is None:
                assert config.train_bpe is not None
                tokenizer = train_bpe(_training_texts(config, files), config.train_bpe)
            save_tokenizer(tokenizer, partial)
            try:
                record = build_corpus(
                    partial,
                    files,
                    config.selection,
                    tokenizer,
                    source=",".join(config.input),
                    fingerprint=json_digest(recipe),
                    field="input",
                    fraction_field="validation_fraction",
                    workers=config.workers,
                    strict=config.strict,
                )
            except NoDocumentsError:
                shutil.rmtree(partial)  # otherwise it would refuse the corrected flags
                raise
            complete = partial / CORPUS_DIRECTORY
            save_tokenizer(tokenizer, complete)
            write_json(complete / RECIPE_FILE, recipe)
            os.rename(complete, output)
            sync_directory(output.parent)
            # Rename before deleting: after a kill, a half-deleted shard must not be resumed from.
            finished = tempfile.mkdtemp(prefix=".", dir=partial)
            os.rename(partial / SHARDS_DIRECTORY, finished)
            shutil.rmtree(finished)
            shutil.rmtree(partial)
    except OSError as error:  # from writing: reading raises `InputError`
        raise InputError(f"output = {config.output!r}: cannot be written to: {error}") from error
    return Prepared(open_corpus(output), record, was_complete=False)


def _recipe(config: PrepareConfig, tokenizer: Tokenizer | None, files: list[InputFile]) -> dict[str, Any]:
    """Return everything that the result depends on, as JSON."""
    trained = {"train_bpe": config.train_bpe, "train_bpe_bytes": config.train_bpe_bytes}
    recipe = {
        "format_version": FORMAT_VERSION,
        **({"tokenizer": tokenizer.name} if tokenizer else trained),
        **dataclasses.asdict(config.selection),
        "input": {corpus.absolute(file.path): [file.num_bytes, file.version] for file in files},
    }
    return json.loads(json.dumps(recipe))


def _check_recipe(directory: Path, recipe: dict[str, Any]) -> None:
    """Raise `InputError` unless the directory was made or started with this recipe."""
    from dape_jax.config import differences  # here, so that workers do not import optimizers

    file = directory / RECIPE_FILE
    require(file.is_file(), "output", str(directory), "must be a new directory, or one made by this program")
    saved = read_json(file)
    lines = differences(saved, recipe)
    if not lines and list(saved["input"]) != list(recipe["input"]):
        lines = ["input: the same files were given in another order"]
    if lines:
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise InputError(
            f"{directory}: was made with another recipe: {lines[0]}{more}; choose another output or delete it"
        )


def _training_texts(config: PrepareConfig, files: list[InputFile]) -> Iterator[str]:
    """Yield the training documents, up to `train_bpe_bytes`."""
    selection = config.selection
    num_bytes = 0
    with progress(sum(file.num_bytes for file in files), "reading for the tokenizer", 0) as bar:
        for file in files:
            for found in read_documents(file, selection, lambda _: None):
                if isinstance(found, BadRecord) and config.strict:
                    raise InputError(f"{describe(found)}; omit --strict to skip it")
                if not isinstance(found, Document) or not isinstance(found.content, bytes):
                    continue
                is_train = corpus.split_of(found.content, config.validation_fraction) == "train"
                if is_train and selection.skips_length(len(found.content)) is None:
                    with contextlib.suppress(UnicodeDecodeError):  # counted later, by the encoder
                        yield found.content.decode()
                        num_bytes += len(found.content)
                if num_bytes >= config.train_bpe_bytes:
                    return
            bar.update(file.num_bytes)


FEW_DOCUMENTS = 20  # with fewer, the intervals of an evaluation are wide


def summary(prepared: Prepared) -> str:
    """Return the counts of a corpus and its digest as text."""
    record, made = prepared.record, prepared.corpus
    output = made.train.directory.parent

    def counts(values: dict[str, int]) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in values.items()) or "none"

    lines = {
        "documents": counts(record.num_documents),
        "tokens": f"{counts(record.num_tokens)}; tokenizer {made.train.sidecar.tokenizer}",
        "text": f"{record.num_text_bytes / 1e6:,.1f} MB, from {record.num_input_bytes / 1e6:,.1f} MB of input",
        "skipped": counts(record.skipped),
        "bad records": counts(record.rejected) + (f": see {output / REJECTED_FILE}" if record.rejected else ""),
    }
    if record.num_documents["validation"] < FEW_DOCUMENTS:
        lines["documents"] += " (few to evaluate on: a larger --validation_fraction holds out more)"
    if record.num_lossy:
        lines["lossy"] = f"{record.num_lossy:,} documents cannot be decoded exactly from their tokens"
    lines["digest"] = made.digest
    state = "already complete, made with the same recipe" if prepared.was_complete else "corpus"
    return "\n".join([f"{output}: {state}", *(f"  {name:13}{text}" for name, text in lines.items())])


def define_flags() -> None:
    """Define the flags of the command line, which uses all CPUs by default."""
    command_line.define_flags(PrepareConfig)
    flags.FLAGS.set_default("workers", os.cpu_count() or 1)


def main(_: list[str]) -> None:
    """Parse flags, prepare the corpus and print a summary."""
    print(summary(prepare(command_line.from_flags(PrepareConfig))))


def command() -> None:
    """Run the command line `dape-prepare`."""
    define_flags()
    command_line.run(main, "interrupted: the same command resumes")
