"""Token stores on disk, memory-mapped: of a prepared corpus, or built once from raw text.

In: a `DataConfig`. Out: a `Corpus` of two `TokenStore`s. Next: `batches`.

A corpus is a directory of two stores, train/ and validation/, in the format of `prepare.build`. `data.path` is the path
of a corpus made by `prepare`, or of raw text. The corpus of raw text is stored in cache_dir/<16 hex digits of the
inputs' fingerprint>. It is built in a temporary directory .tmp-* next to it and renamed, so a directory with the final
name is complete. A killed build leaves its .tmp-* directory, which is never read and may be deleted.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import fsspec
import numpy as np
from jaxtyping import Int64, UInt

from dape_jax.data import corpus
from dape_jax.data.corpus import InputFile
from dape_jax.data.prepare.build import (
    CORPUS_DIRECTORY,
    FORMAT_VERSION,
    OFFSETS_FILE,
    RECORD_FILE,
    SIDECAR_FILE,
    SPLITS,
    TOKENS_FILE,
    Sidecar,
    build_corpus,
    progress,
    read_record,
    token_dtype,
)
from dape_jax.data.prepare.records import Selection
from dape_jax.data.tokenizers import Tokenizer, read_tokenizer, saved_tokenizer
from dape_jax.errors import InputError, os_errors, require
from dape_jax.files import json_digest, parse_json, read_json, sync_directory, waiting_lock
from dape_jax.storage import bucket_errors, require_local

logger = logging.getLogger(__name__)

_TOKENIZERS = (
    "must be None (the prepared corpus's), 'bytes', or the path or name (bpe-<16 hex digits>) of a tokenizer.json"
)
_NAME = "(bpe|unigram|wordpiece|wordlevel)-[0-9a-f]{16}"
_MAX_LENGTH = 2**30  # maximum bytes of a document of raw text
_CHUNK = 2**20  # offsets that are checked at a time
_DIGEST_BYTES = 2**24  # bytes that are hashed at a time


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text for training and evaluation."""

    # A prepared corpus, or raw text: "stdlib", a directory, a glob or a file; or a URL of these. None for an imported
    # model, whose training text is unknown.
    # It may change on resume, because a digest identifies the data.
    path: str | None = dataclasses.field(metadata={"resumable": True})
    tokenizer: str | None  # "bytes", or the path or name of a tokenizer.json; None for the prepared corpus's
    # directory for the stores of raw text, and for copies of corpora in buckets
    cache_dir: str = dataclasses.field(metadata={"resumable": True})
    validation_fraction: float  # share of raw text's documents for validation
    seed: int  # seed of the order of the training windows

    def __post_init__(self):
        require(self.path != "", "data.path", self.path, f"must be a file, a directory, a glob or {corpus.STDLIB!r}")
        known = self.tokenizer is None or re.fullmatch(rf"bytes|.*\.json|{_NAME}", self.tokenizer, re.DOTALL)
        require(bool(known), "data.tokenizer", self.tokenizer, _TOKENIZERS)
        require(self.cache_dir != "", "data.cache_dir", self.cache_dir, "must be a directory")
        require_local(self.cache_dir, "data.cache_dir")
        require(
            0 < self.validation_fraction < 1, "data.validation_fraction", self.validation_fraction, "must be in (0, 1)"
        )
        require(0 <= self.seed < 2**32, "data.seed", self.seed, "must be 0 to 2**32 - 1")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """Memory-mapped tokens of one split. Opening it reads the offsets but no tokens; it is pickled as its path."""

    directory: Path
    sidecar: Sidecar
    tokens: UInt[np.ndarray, "num_tokens"] = dataclasses.field(repr=False)
    offsets: Int64[np.ndarray, "num_offsets"] = dataclasses.field(repr=False)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.sidecar.num_documents

    @property
    def num_tokens(self) -> int:
        """Number of tokens, with one end_of_document per document."""
        return self.sidecar.num_tokens

    @property
    def digest(self) -> str:
        """SHA-256 of the data, recorded in checkpoints."""
        return self.sidecar.digest

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the tokens."""
        return saved_tokenizer(self.directory)

    def document(self, index: int) -> UInt[np.ndarray, "document_tokens"]:
        """Return the tokens of one document, including its end_of_document."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def verify(self) -> None:
        """Compute the digest of all data and compare it with the recorded one.

        Raises:
            InputError: the files have changed since they were written.
        """
        found = hashlib.sha256()
        size = self.tokens.nbytes
        with open(self.directory / TOKENS_FILE, "rb") as file, progress(size, f"checking {self.directory}", 0) as bar:
            while block := file.read(_DIGEST_BYTES):
                found.update(block)
                bar.update(len(block))
        found.update(np.ascontiguousarray(self.offsets, "<i8").data)
        field = f"{self.directory / SIDECAR_FILE}: digest"
        require(
            found.hexdigest() == self.digest,
            field,
            self.digest,
            f"must be the digest of the files, {found.hexdigest()}",
        )

    def __reduce__(self):
        # A memory map is pickled with all of its content, which would be sent to each of Grain's worker processes.
        return open_store, (self.directory,)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Corpus with two disjoint splits."""

    train: TokenStore
    validation: TokenStore

    @property
    def digest(self) -> str:
        """SHA-256 of both splits. The same text, tokenizer and split give the same digest on every machine."""
        return hashlib.sha256(f"{self.train.digest} {self.validation.digest}".encode()).hexdigest()


def load_corpus(config: DataConfig, lossy: bool = False) -> Corpus:
    """Return the token stores of a corpus: a prepared one, or one of raw text.

    The stores of raw text are built once, then reused without reading the text as long as its files do not change. Raw
    text is read as `prepare` reads it with default options, except that a document may have up to 1 GiB.

    Args:
        config: config of the corpus.
        lossy: accept a tokenizer that loses raw text, and log a warning with the number of documents that it changes.
            For an existing model, whose tokenizer cannot be chosen.

    Raises:
        InputError: there is no input, a split has no documents, a directory cannot be written to, the tokenizer is
            missing or differs from the prepared corpus's, or a store is damaged.
    """
    allowed = "must be the path of text or of a corpus: this model was imported, and its training text is unknown"
    require(config.path is not None, "data.path", config.path, allowed)
    assert config.path is not None
    path = Path(os.path.expanduser(config.path))
    cache = Path(os.path.abspath(os.path.expanduser(config.cache_dir)))
    if corpus.is_remote(config.path) and (found := prepared_stores(config.path)):
        path = local_copy(config.path, found, cache)
    if config.path != corpus.STDLIB and _is_prepared(path):
        loaded = open_corpus(path)
        name, given = loaded.train.sidecar.tokenizer, config.tokenizer
        if given is not None and not re.fullmatch(rf"bytes|{_NAME}", given):
            given = read_tokenizer(given, lossy=True).name
        allowed = f"data.path = {config.path!r} was prepared with {name!r}" + ("" if lossy else "; None selects it")
        require(given in (None, name), "data.tokenizer", config.tokenizer, allowed)
        return loaded
    if config.tokenizer is None:
        raise InputError(
            f"data.tokenizer = None: raw text (data.path = {config.path!r}) needs 'bytes' or a tokenizer.json"
        )
    tokenizer = read_tokenizer(config.tokenizer, lossy=lossy)
    files = corpus.unique_files(corpus.find_files(config.path))
    selection = Selection("text", (), 1, _MAX_LENGTH, config.validation_fraction)
    # The paths are part of the key: files unpacked from archives may have equal sizes and times in different corpora.
    inputs = [(corpus.absolute(file.path), file.num_bytes, file.version) for file in files]
    fingerprint = json_digest([FORMAT_VERSION, tokenizer.name, dataclasses.asdict(selection), inputs])
    directory = cache / fingerprint[:16]
    if not os.path.exists(directory):
        _build(config, files, selection, tokenizer, fingerprint, directory)
    try:
        loaded = open_corpus(directory, fingerprint)
    except InputError as error:
        raise InputError(f"{error}; delete {directory} to rebuild it") from error
    if tokenizer.loss is not None:
        record = read_record(directory / RECORD_FILE)
        if record.num_lossy:
            logger.warning(
                "%s: %d of %d documents cannot be decoded exactly: the tokenizer %s is lossy",
                *(config.path, record.num_lossy, record.num_documents.total(), tokenizer.name),
            )
    return loaded


def follow_corpus(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a config file's dict in which the corpus determines `model.vocab_size` and `data.tokenizer`.

    If `model.vocab_size` is None, it becomes that of the tokenizer, and a `data.tokenizer` of None becomes "bytes" for
    raw text; for a prepared corpus it remains None, which selects the corpus's tokenizer. A dict with a vocabulary
    size, or without these fields, is returned unchanged; `config.read_run` reports missing fields.

    Raises:
        InputError: the corpus or the tokenizer cannot be read.
    """
    try:
        data, model = spec["data"], spec["model"]
        path, tokenizer, cache_dir, vocab_size = data["path"], data["tokenizer"], data["cache_dir"], model["vocab_size"]
    except (KeyError, TypeError):
        return spec
    if vocab_size is not None or not all(isinstance(text, str) and text for text in (path, cache_dir)):
        return spec
    sidecar = _prepared_sidecar(path)
    if sidecar is not None:
        return spec | {"model": model | {"vocab_size": sidecar.vocab_size}}
    tokenizer = "bytes" if tokenizer is None else tokenizer
    vocab_size = read_tokenizer(tokenizer, lossy=True).vocab_size
    return spec | {"data": data | {"tokenizer": tokenizer}, "model": model | {"vocab_size": vocab_size}}


def _prepared_sidecar(path: str) -> Sidecar | None:
    """Return the sidecar of a prepared corpus's train store, or None if the path is of raw text."""
    if corpus.is_remote(path):
        found = prepared_stores(path)
        return found["train"] if found else None
    directory = Path(os.path.expanduser(path))
    return _read_sidecar(directory / SPLITS[0] / SIDECAR_FILE) if _is_prepared(directory) else None


def open_corpus(directory: Path, fingerprint: str | None = None) -> Corpus:
    """Map the two stores of a complete directory, after checking each (`open_store`) and one against the other.

    Raises:
        InputError: a file is missing or damaged, or the stores do not match each other or the fingerprint.
    """
    stores = {split: open_store(directory / split) for split in SPLITS}
    train = stores["train"].sidecar
    for split, store in stores.items():
        expected = {
            "split": split,
            "fingerprint": train.fingerprint if fingerprint is None else fingerprint,
            "tokenizer": train.tokenizer,
        }
        for field, value in expected.items():
            found = getattr(store.sidecar, field)
            require(found == value, f"{store.directory / SIDECAR_FILE}: {field}", found, f"must be {value!r}")
    return Corpus(**stores)


def _is_prepared(path: Path) -> bool:
    """Return whether a directory is a prepared corpus, complete or not, and therefore not raw text."""
    of_store = (SIDECAR_FILE, TOKENS_FILE, OFFSETS_FILE)
    names = (RECORD_FILE, *(f"{split}/{name}" for split in SPLITS for name in of_store))
    try:
        return all((path / split).is_dir() for split in SPLITS) and any((path / name).exists() for name in names)
    except (OSError, ValueError):  # ValueError: a NUL byte in the path
        return False


def prepared_stores(url: str) -> dict[str, Sidecar]:
    """Return the sidecars of the two stores at a URL, or {} if there is no prepared corpus.

    Raises:
        InputError: the URL cannot be read, or a sidecar is damaged.
    """
    found = {}
    with _reading(url):
        system, root = fsspec.url_to_fs(url)
        for split in SPLITS:
            try:
                file = f"{url}/{split}/{SIDECAR_FILE}"
                content = system.cat_file(f"{root}/{split}/{SIDECAR_FILE}")
            except (FileNotFoundError, NotADirectoryError):
                return {}
            found[split] = _sidecar(file, parse_json(file, content))
    return found


def local_copy(url: str, sidecars: dict[str, Sidecar], cache: Path) -> Path:
    """Return a local copy of the prepared corpus at a URL, cache/<16 hex digits of its digest>; make it if missing.

    One process of a machine copies and the others wait. A copy gets its final name after its digests are verified, so a
    directory with that name is complete.

    Raises:
        InputError: the URL cannot be read, the copy differs from its digest, or the cache is full or not writable.
    """
    digest = hashlib.sha256(f"{sidecars['train'].digest} {sidecars['validation'].digest}".encode()).hexdigest()
    directory = cache / digest[:16]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with waiting_lock(cache / f".{directory.name}.lock"):
            if not directory.exists():
                temporary = cache / f".tmp-{directory.name}-{uuid.uuid4().hex}"
                try:
                    _copy(url, temporary)
                    copied = open_corpus(temporary)
                    copied.train.verify()
                    copied.validation.verify()
                    temporary.rename(directory)
                    sync_directory(cache)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise InputError(f"data.cache_dir = {str(cache)!r}: cannot be written to: {error}") from error
    return directory


def _copy(url: str, target: Path) -> None:
    """Copy the files of a corpus, after checking that they fit on the disk."""
    with _reading(url):
        system, root = fsspec.url_to_fs(url)
        sizes = {name: info["size"] for name, info in system.find(root, detail=True).items() if info["size"]}
    free = shutil.disk_usage(target.parent).free
    message = f"has {sum(sizes.values()) / 1e6:,.1f} MB, but {target.parent} has {free / 1e6:,.1f} MB free"
    require(sum(sizes.values()) < free, "data.path", url, message)
    with progress(sum(sizes.values()), f"copying {url}", 0) as bar:
        for name in sizes:
            file = target / name.removeprefix(root).lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            with _reading(url):
                source = system.open(name, "rb")
            with source, file.open("wb") as copied:
                while True:
                    with _reading(url):
                        block = source.read(_DIGEST_BYTES)
                    if not block:
                        break
                    copied.write(block)
                    bar.update(len(block))


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    with os_errors("data.path", url, "cannot be read"), bucket_errors():
        try:
            yield
        except InputError:
            raise
        except (ImportError, ValueError) as error:  # a package is missing, or fsspec does not know the scheme
            raise InputError(f"data.path = {url!r}: cannot be read: {' '.join(str(error).split())}") from error


def open_store(directory: Path) -> TokenStore:
    """Map a store on disk. Everything is checked except the tokens themselves; `verify` checks those.

    Raises:
        InputError: a file is missing or damaged; the message names the sidecar, the field and its value.
    """
    file = directory / SIDECAR_FILE
    sidecar = _read_sidecar(file)
    try:
        tokenizer = saved_tokenizer(directory)
        dtype = token_dtype(tokenizer.vocab_size)
        tokens = np.memmap(directory / TOKENS_FILE, dtype, mode="r")
        offsets = np.lib.format.open_memmap(directory / OFFSETS_FILE, mode="r")
    except Exception as error:  # numpy raises many kinds of errors for damaged headers, some of several lines
        raise InputError(f"{file}: the files next to it cannot be read: {error!r}") from error
    found = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.str,
        "num_documents": offsets.size - 1,
        "num_tokens": tokens.size,
    }
    for field, value in found.items():
        require(getattr(sidecar, field) == value, f"{file}: {field}", getattr(sidecar, field), f"must be {value!r}")
    is_whole = offsets.dtype == np.dtype("<i8") and offsets.ndim == 1 and offsets.size > 1
    is_whole = is_whole and bool(offsets[0] == 0 and offsets[-1] == tokens.size)
    for begin in range(0, offsets.size if is_whole else 0, _CHUNK):  # there may be hundreds of millions
        piece = offsets[begin : begin + _CHUNK + 1]
        is_whole = is_whole and bool(np.all(piece[1:] > piece[:-1]))
    name, shape = f"{file}: {OFFSETS_FILE}", f"{offsets.dtype}{list(offsets.shape)}"
    require(is_whole, name, shape, "must be int64 in one dim, increasing from 0 to num_tokens")
    return TokenStore(directory, sidecar, tokens, offsets)


def _read_sidecar(file: Path) -> Sidecar:
    return _sidecar(str(file), read_json(file))


def _sidecar(file: str, content: dict[str, Any]) -> Sidecar:
    fields = get_type_hints(Sidecar)
    require(content.keys() == fields.keys(), f"{file}: fields", sorted(content), f"must be {sorted(fields)}")
    for name, kind in fields.items():
        require(type(content[name]) is kind, f"{file}: {name}", content[name], f"must be of type {kind.__name__}")
    for name in ("digest", "fingerprint"):
        is_digest = re.fullmatch("[0-9a-f]{64}", content[name]) is not None
        require(is_digest, f"{file}: {name}", content[name], "must be 64 hexadecimal digits")
    return Sidecar(**content)


def _build(
    config: DataConfig,
    files: list[InputFile],
    selection: Selection,
    tokenizer: Tokenizer,
    fingerprint: str,
    directory: Path,
) -> None:
    """Build both splits and rename them to `directory`."""
    assert config.path is not None
    temporary = directory.with_name(f".tmp-{directory.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        build_corpus(
            temporary,
            files,
            selection,
            tokenizer,
            source=config.path,
            fingerprint=fingerprint,
            field="data.path",
            fraction_field="data.validation_fraction",
        )
        try:
            os.rename(temporary / CORPUS_DIRECTORY, directory)
        except OSError:
            if not directory.exists():
                raise
            logger.info("%s: another process built it first; using that one", directory)
        sync_directory(directory.parent)
    except OSError as error:  # from writing: reading raises `InputError`
        raise InputError(f"data.cache_dir = {config.cache_dir!r}: cannot be written to: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
