"""Options of a preparation: the flags of `dape-prepare` and the arguments of `prepare`."""

import dataclasses
import os
import re

from dape_jax.command_line import flag, unescape
from dape_jax.errors import require

MAX_LENGTH = 2**30  # maximum of max_length, and the limit for raw text


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Input files, output directory and the conversion between them; each field is a flag."""

    input: tuple[str, ...] = flag(
        (), "Comma-separated files, directories, globs (quoted; ** descends) and URLs of these."
    )
    validation: tuple[str, ...] = flag((), "Files as in --input: only their documents are held out, and all of them.")
    output: str = flag("", "New directory for the corpus. Train on it with --config.data.path=OUTPUT.")
    tokenizer: str | None = flag(
        None,
        "bytes, or the path of a Hugging Face tokenizer.json; for .bin files, the tokenizer that made their ids. Give "
        "either this flag or --train_bpe.",
    )
    lossy: bool = flag(False, "Accept a tokenizer that changes text, and count the documents that it changes.")
    train_bpe: int | None = flag(None, "Train a byte-level BPE of this vocabulary size, instead of --tokenizer.")
    end_of_document: str | None = flag(
        None, "Token of --tokenizer that ends a document; by default <|endoftext|> or another usual one."
    )
    document_separator: str | None = flag(
        None, r"Text between documents of a text file, such as <|endoftext|> or \n\n (\n, \r, \t, \f, \\ are escapes)."
    )
    text_field: str = flag("text", "Field with the text of a record; a dot descends into an object.")
    where: tuple[str, ...] = flag(
        (), "field=value or field=value|value: keep only matching records. If repeated, all must match.", repeated=True
    )
    min_length: int = flag(1, "Minimum length of a document in bytes of UTF-8, or in ids for .bin files.")
    max_length: int = flag(2**24, "Maximum length of a document, in the units of --min_length.")
    validation_fraction: float = flag(
        0.01, "Share of the documents for validation, by a hash of their content; of few, the end."
    )
    workers: int = flag(os.cpu_count() or 1, "Number of threads that tokenize; by default one per CPU.")

    def __post_init__(self):
        is_given = len(self.input) > 0 and all(self.input)
        require(is_given, "input", ",".join(self.input), "must be comma-separated files, directories, globs or URLs")
        allowed = "must be a new local directory; copy it to a bucket when it is complete"
        require(bool(self.output.strip("/")) and "://" not in self.output, "output", self.output, allowed)
        chosen = (self.tokenizer, self.train_bpe)
        allowed = "give exactly one: --tokenizer=bytes, --tokenizer=PATH of a tokenizer.json, or --train_bpe=SIZE"
        require(chosen.count(None) == 1, "tokenizer, train_bpe", chosen, allowed)
        allowed = "must be 257 (the bytes and the end of a document) to 1048576"
        require(self.train_bpe is None or 257 <= self.train_bpe <= 2**20, "train_bpe", self.train_bpe, allowed)
        allowed = "needs a --tokenizer of a file: bytes and a trained BPE have their own"
        is_used = self.end_of_document is None or self.tokenizer not in (None, "bytes")
        require(is_used, "end_of_document", self.end_of_document, allowed)
        require(self.document_separator != "", "document_separator", "", "must be a text, or not given")
        for where in self.where:
            is_condition = re.fullmatch(r"[^=]+=.+", where, re.DOTALL) is not None
            require(is_condition, "where", where, "must be field=value or field=value|value")
        require(self.min_length > 0, "min_length", self.min_length, "must be positive: an empty document has no text")
        allowed = f"must be min_length = {self.min_length} to {MAX_LENGTH}"
        require(self.min_length <= self.max_length <= MAX_LENGTH, "max_length", self.max_length, allowed)
        require(0 <= self.validation_fraction <= 1, "validation_fraction", self.validation_fraction, "must be 0 to 1")
        require(0 < self.workers <= 1024, "workers", self.workers, "must be 1 to 1024 threads")

    @property
    def separator(self) -> bytes | None:
        """Bytes between the documents of a text file, or None: a file is one document."""
        return None if self.document_separator is None else unescape(self.document_separator).encode()

    @property
    def conditions(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Fields of `where` and their accepted values, numbers and booleans as in JSON."""
        return tuple((field, tuple(values.split("|"))) for field, _, values in (w.partition("=") for w in self.where))
