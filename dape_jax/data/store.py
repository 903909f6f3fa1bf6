"""Documents -> tokens on disk, written once and mapped into memory ever after.

In: a `DataConfig`. Out: a `Corpus` of two `TokenStore`s. Next: `batches`.

    cache_dir/<16 hex digits of the inputs' fingerprint>/
        train/        tokens.bin    the documents one after another, each with its end_of_document; little-endian
                      offsets.npy   int64[num_documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
                      store.json    the sidecar: the fields of `Sidecar`
        validation/   the same

A corpus is built in a directory named .tmp-* beside its final place and renamed into it whole, so what has a final name
is complete. A killed build leaves its .tmp-* behind: nothing ever reads it, and it may be deleted.
"""

import array
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
from jaxtyping import Int64, UInt
from tqdm import tqdm

from dape_jax.data import corpus
from dape_jax.data.corpus import Split
from dape_jax.data.tokenizers import TOKENIZERS, Tokenizer
from dape_jax.errors import InputError, require

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
TOKENS_FILE, OFFSETS_FILE, SIDECAR_FILE = "tokens.bin", "offsets.npy", "store.json"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text that a model is trained and judged on."""

    path: str  # "stdlib", a directory, a glob or a file: see corpus.find_files
    tokenizer: str  # a key of TOKENIZERS
    cache_dir: str  # where the token stores are kept
    held_out_fraction: float  # the share of the documents that training never sees
    seed: int  # of the order of the training windows

    def __post_init__(self):
        require(self.path != "", "data.path", self.path, f"a file, a directory, a glob or {corpus.STDLIB!r}")
        require(self.tokenizer in TOKENIZERS, "data.tokenizer", self.tokenizer, f"one of {sorted(TOKENIZERS)}")
        require(self.cache_dir != "", "data.cache_dir", self.cache_dir, "a directory to write to")
        require(0 < self.held_out_fraction < 1, "data.held_out_fraction", self.held_out_fraction, "between 0 and 1")
        require(0 <= self.seed < 2**32, "data.seed", self.seed, "0 to 2**32 - 1")


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """What store.json records about the two files beside it."""

    format_version: int
    tokenizer: str
    vocab_size: int
    dtype: str  # of tokens.bin, as numpy writes it: "<u2"
    num_documents: int
    num_tokens: int
    digest: str  # sha256 of tokens.bin and then the numbers of offsets.npy
    split: str
    source: str  # the data.path it was built from
    fingerprint: str  # of the files found there: see _fingerprint


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """One split's tokens, mapped from disk: opening it reads almost nothing, and pickling it sends its path alone."""

    directory: Path
    sidecar: Sidecar
    tokens: UInt[np.ndarray, "num_tokens"] = dataclasses.field(repr=False)
    offsets: Int64[np.ndarray, "num_offsets"] = dataclasses.field(repr=False)

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return self.sidecar.num_documents

    @property
    def num_tokens(self) -> int:
        """How many tokens there are, one end_of_document per document included."""
        return self.sidecar.num_tokens

    @property
    def digest(self) -> str:
        """What a checkpoint records to know this data again."""
        return self.sidecar.digest

    @property
    def tokenizer(self) -> Tokenizer:
        """What the tokens were made with."""
        return TOKENIZERS[self.sidecar.tokenizer]()

    def document(self, index: int) -> UInt[np.ndarray, "document_tokens"]:
        """The tokens of one document, its end_of_document last."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def verify(self) -> None:
        """Read everything and compare it with the recorded digest.

        Raises:
            InputError: the files have changed since they were written.
        """
        with open(self.directory / TOKENS_FILE, "rb") as file:
            found = hashlib.file_digest(file, "sha256")
        found.update(np.ascontiguousarray(self.offsets, "<i8").data)
        field = f"{self.directory / SIDECAR_FILE}: digest"
        require(found.hexdigest() == self.digest, field, self.digest, f"the files beside it give {found.hexdigest()}")

    def __reduce__(self):
        # A memory map pickles as all of its contents, which Grain's worker processes would each receive.
        return open_store, (self.directory,)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The two sides of a corpus; no document is on both."""

    train: TokenStore
    validation: TokenStore

    @property
    def digest(self) -> str:
        """Of both splits together: the same text, tokenizer and split give the same digest on every machine."""
        return hashlib.sha256(f"{self.train.digest} {self.validation.digest}".encode()).hexdigest()


def load_corpus(config: DataConfig) -> Corpus:
    """The token stores of a corpus: built once, then reused without reading the text while its files stay the same.

    Args:
        config: the text, the tokenizer, the split and where to keep the result.

    Raises:
        InputError: nothing to read, nothing on one side of the split, nowhere to write, or a damaged store.
    """
    files = corpus.find_files(config.path)
    fingerprint = _fingerprint(config, files)
    directory = Path(os.path.abspath(os.path.expanduser(config.cache_dir)), fingerprint[:16])
    if not os.path.exists(directory):
        _build(config, files, fingerprint, directory)
    try:
        return Corpus(**{split: _open_split(directory, split, fingerprint) for split in get_args(Split)})
    except InputError as error:
        raise InputError(f"{error}; delete {directory} to have it built anew") from error


def open_store(directory: Path) -> TokenStore:
    """Map a store that is on disk; everything is checked that needs no reading of the tokens (that is `verify`).

    Args:
        directory: what holds tokens.bin, offsets.npy and store.json.

    Raises:
        InputError: a file is missing or damaged; names the sidecar, the field and its value.
    """
    sidecar = _read_sidecar(directory / SIDECAR_FILE)

    def check(condition: bool, field: str, allowed: str) -> None:
        require(condition, f"{directory / SIDECAR_FILE}: {field}", getattr(sidecar, field), allowed)

    check(sidecar.format_version == FORMAT_VERSION, "format_version", f"this program reads {FORMAT_VERSION}")
    check(sidecar.tokenizer in TOKENIZERS, "tokenizer", f"one of {sorted(TOKENIZERS)}")
    vocab_size = TOKENIZERS[sidecar.tokenizer]().vocab_size
    check(sidecar.vocab_size == vocab_size, "vocab_size", f"the tokenizer {sidecar.tokenizer!r} has {vocab_size}")
    dtype = _token_dtype(vocab_size)
    check(sidecar.dtype == dtype.str, "dtype", f"{dtype.str!r} for a vocabulary of {vocab_size}")
    check(sidecar.split in get_args(Split), "split", f"one of {list(get_args(Split))}")
    check(sidecar.num_documents > 0, "num_documents", "at least 1")
    check(sidecar.num_tokens > 0, "num_tokens", "at least 1")
    for field in ("digest", "fingerprint"):
        check(re.fullmatch("[0-9a-f]{64}", getattr(sidecar, field)) is not None, field, "64 hexadecimal digits")

    try:
        size = (directory / TOKENS_FILE).stat().st_size
        check(sidecar.num_tokens == size / dtype.itemsize, "num_tokens", f"{TOKENS_FILE} has {size} bytes")
        tokens = np.memmap(directory / TOKENS_FILE, dtype, mode="r")
    except OSError as error:
        raise InputError(f"{directory / SIDECAR_FILE}: {TOKENS_FILE} beside it cannot be read: {error}") from error
    try:
        offsets = np.lib.format.open_memmap(directory / OFFSETS_FILE, mode="r")
    except Exception as error:  # a damaged header makes numpy raise half a dozen kinds, some of several lines
        raise InputError(f"{directory / SIDECAR_FILE}: {OFFSETS_FILE} beside it cannot be read: {error!r}") from error
    check(
        offsets.dtype == np.dtype("<i8") and offsets.shape == (sidecar.num_documents + 1,),
        "num_documents",
        f"{OFFSETS_FILE} must hold one int64 more than that",
    )
    check(
        bool(offsets[0] == 0 and offsets[-1] == sidecar.num_tokens and np.all(offsets[1:] > offsets[:-1])),
        "num_tokens",
        f"{OFFSETS_FILE} must increase from 0 to that",
    )
    return TokenStore(directory, sidecar, tokens, offsets)


def _open_split(directory: Path, split: Split, fingerprint: str) -> TokenStore:
    store = open_store(directory / split)
    for field, expected in (("split", split), ("fingerprint", fingerprint)):
        value = getattr(store.sidecar, field)
        require(value == expected, f"{store.directory / SIDECAR_FILE}: {field}", value, f"{expected!r} by its place")
    return store


def _read_sidecar(file: Path) -> Sidecar:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON: {error}") from error
    require(type(content) is dict, str(file), type(content).__name__, "a JSON object")
    fields = get_type_hints(Sidecar)
    require(content.keys() == fields.keys(), f"{file}: fields", sorted(content), f"{sorted(fields)}")
    for name, kind in fields.items():
        require(type(content[name]) is kind, f"{file}: {name}", content[name], f"must be of type {kind.__name__}")
    return Sidecar(**content)


def _fingerprint(config: DataConfig, files: list[tuple[str, Path]]) -> str:
    """What decides the store, told without reading the text: the files' places, sizes and times, and the recipe."""
    try:
        # The place counts because archives unpack with equal times: two corpora could agree in all the rest.
        inputs = [(os.path.abspath(file), file.stat().st_size, file.stat().st_mtime_ns) for _, file in files]
    except OSError as error:
        raise InputError(f"data.path = {config.path!r}: cannot be read: {error}") from error
    recipe = (FORMAT_VERSION, config.tokenizer, config.held_out_fraction)
    return hashlib.sha256(json.dumps([recipe, inputs]).encode()).hexdigest()


def _token_dtype(vocab_size: int) -> np.dtype:
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


def _build(config: DataConfig, files: list[tuple[str, Path]], fingerprint: str, directory: Path) -> None:
    """Write both splits in one pass over the text, and put them in place in one step."""
    temporary = directory.with_name(f".tmp-{directory.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            writers = {split: _Writer(stack, temporary / split, config.tokenizer) for split in get_args(Split)}
            progress = tqdm(files, desc="tokenizing", unit=" files", disable=None)
            for document in corpus.read_documents(config.path, progress):
                writers[corpus.split_of(document, config.held_out_fraction)].append(document)
            for split, writer in writers.items():
                writer.finish(split, config, fingerprint)
        _sync(temporary)
        try:
            os.rename(temporary, directory)
        except OSError:
            if not directory.exists():
                raise
            logger.info("%s: another process built it first; using that one", directory)
        _sync(directory.parent)
    except OSError as error:  # of writing: read_documents reports its own
        raise InputError(f"data.cache_dir = {config.cache_dir!r}: cannot be written to: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # nothing is left there once it is renamed


class _Writer:
    """Writes one split, document by document; holds no more of it than the offsets."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path, tokenizer: str):
        directory.mkdir()
        self.directory = directory
        self.file = stack.enter_context(open(directory / TOKENS_FILE, "wb"))
        self.tokenizer = TOKENIZERS[tokenizer]()
        self.dtype = _token_dtype(self.tokenizer.vocab_size)
        self.offsets = array.array("q", [0])
        self.digest = hashlib.sha256()

    def append(self, document: bytes) -> None:
        ids = self.tokenizer.encode(document)
        tokens = np.empty(ids.size + 1, self.dtype)
        tokens[:-1], tokens[-1] = ids, self.tokenizer.end_of_document
        self.file.write(tokens.data)
        self.digest.update(tokens.data)
        self.offsets.append(self.offsets[-1] + tokens.size)

    def finish(self, split: Split, config: DataConfig, fingerprint: str) -> None:
        num_documents = len(self.offsets) - 1
        require(
            num_documents > 0,
            "data.held_out_fraction",
            config.held_out_fraction,
            f"leaves no {split} documents of data.path = {config.path!r} (one document per file; each side needs one)",
        )
        self.file.flush()
        offsets = np.array(self.offsets, "<i8")
        self.digest.update(offsets.data)
        np.save(self.directory / OFFSETS_FILE, offsets)
        sidecar = Sidecar(
            format_version=FORMAT_VERSION,
            tokenizer=config.tokenizer,
            vocab_size=self.tokenizer.vocab_size,
            dtype=self.dtype.str,
            num_documents=num_documents,
            num_tokens=self.offsets[-1],
            digest=self.digest.hexdigest(),
            split=split,
            source=config.path,
            fingerprint=fingerprint,
        )
        (self.directory / SIDECAR_FILE).write_text(json.dumps(dataclasses.asdict(sidecar), indent=1) + "\n")
        for path in (*self.directory.iterdir(), self.directory):
            _sync(path)


def _sync(path: Path) -> None:
    """Make a file or a directory's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
