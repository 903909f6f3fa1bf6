"""Token stores of a prepared corpus, checked and mapped into memory.

In: the path of a corpus that `prepare` made. Out: a `Corpus` of two `TokenStore`s. Next: `batches`.

    train/           tokens.bin      the documents one after another, each with its end_of_document; little-endian
                     offsets.npy     int64[num_documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
                     tokenizer.json  the tokenizer; missing for bytes
                     store.json      the fields of `Sidecar`
                     verified.json   size, times, inode and device of these files when their digest was last checked
    validation/      the same

Nothing is built here: `training.source.load_corpora` first calls `prepare` if `data.path` is raw text.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import itertools
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import filelock
import fsspec
import numpy as np
from jaxtyping import Int64, UInt

from dape_jax.data.tokenizers import TOKENIZER_FILE, Bytes, Tokenizer, read_tokenizer, saved_tokenizer
from dape_jax.errors import InputError, Resumable, did_you_mean, one_of, require
from dape_jax.files import json_digest, parse_json, read_json, write_json
from dape_jax.progress import Progress
from dape_jax.storage import is_remote, read_errors, require_local

logger = logging.getLogger(__name__)

Split = Literal["train", "validation"]

STDLIB = "stdlib"  # `data.path` of the source of the interpreter's standard library
FORMAT_VERSION = 2
TOKENS_FILE, OFFSETS_FILE, SIDECAR_FILE = "tokens.bin", "offsets.npy", "store.json"
VERIFIED_FILE = "verified.json"
SPLITS: tuple[Split, ...] = get_args(Split)

PACKINGS = ("stream", "documents")
_TEXT = f"must be a file, a directory, a glob or {STDLIB!r}"
_NAME = "bytes|[a-z]+-[0-9a-f]{16}"  # of a tokenizer
_BLOCK = 2**23  # tokens that are hashed at a time


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text for training and evaluation."""

    # A prepared corpus, or raw text: "stdlib", a directory, a glob or a file; or a URL of these. None for an imported
    # model, whose training text is unknown. It may change on resume, because a digest identifies the data.
    path: Resumable[str | None]
    # "bytes", or the path or name of a tokenizer.json; None for the prepared corpus's, or bytes for raw text
    tokenizer: str | None = None
    # directory for corpora prepared from raw text, and for copies of corpora in buckets
    cache_dir: Resumable[str] = "data"
    validation_fraction: float = 0.05  # share of raw text's documents for validation; with 0 or 1, one split is empty
    seed: int = 0  # seed of the order of the training windows
    # "stream": windows of the concatenated documents, as in the paper; "documents": packed documents that do not see
    # each other, with positions that restart (`batches.PackedDocuments`)
    packing: str = "stream"
    document_separator: str | None = None  # between the documents of a text file; see `prepare.config`
    # Text for validation, in the form of `path`: all of its documents, and all those of raw text at `path` are trained
    # on. A prepared corpus has its own splits. None: documents of `path`.
    validation_path: Resumable[str | None] = None
    # Several texts in place of `path`, with the share of the training windows from each: "data/books=0.7,data/code=0.3"
    mixture: Resumable[str | None] = None

    def __post_init__(self):
        if self.mixture is not None:
            object.__setattr__(self, "path", None)
            parse_mixture(self.mixture)
        one_of(self, "data", packing=PACKINGS)
        require(self.path is None or (isinstance(self.path, str) and self.path != ""), "data.path", self.path, _TEXT)
        is_other = self.validation_path != "" and self.validation_path not in self.weights
        allowed = "must be another text than those that are trained on, or None"
        require(is_other, "data.validation_path", self.validation_path, allowed)
        is_known = self.tokenizer is None or re.fullmatch(rf"{_NAME}|.*\.json", self.tokenizer, re.DOTALL)
        allowed = "must be None (the prepared corpus's), 'bytes', or the path or name of a tokenizer.json"
        require(bool(is_known), "data.tokenizer", self.tokenizer, allowed)
        require_local(self.cache_dir, "data.cache_dir")
        fraction = self.validation_fraction
        require(0 <= fraction <= 1, "data.validation_fraction", fraction, "must be 0 to 1")
        require(0 <= self.seed < 2**32, "data.seed", self.seed, "must be 0 to 2**32 - 1")

    @property
    def weights(self) -> dict[str, float]:
        """Texts to train on, with their weights in the mixture; {} for an imported model."""
        if self.mixture is not None:
            return parse_mixture(self.mixture)
        return {} if self.path is None else {self.path: 1.0}

    @property
    def fields(self) -> dict[str, str]:
        """Texts to train on and for validation, with the name of the field that has each."""
        fields = dict.fromkeys(self.weights, "data.path" if self.mixture is None else "data.mixture")
        return fields | ({} if self.validation_path is None else {self.validation_path: "data.validation_path"})


def parse_mixture(mixture: str) -> dict[str, float]:
    """Return the weights of texts by their paths: "data/books=0.7,data/code=0.3".

    Raises:
        InputError: a weight is missing or not positive, or a path is missing or named twice.
    """
    items = [item.strip().rpartition("=")[::2] for item in mixture.split(",")]
    weights = {path: float(weight) for path, weight in items if re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", weight)}
    is_valid = len(weights) == len(items) and all(weights) and min(weights.values()) > 0
    allowed = "must be PATH=WEIGHT,PATH=WEIGHT with different paths, without commas in them, and positive weights"
    require(is_valid, "data.mixture", mixture, allowed)
    return weights


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
    source: str  # inputs of `prepare`, as the user gave them
    fingerprint: str  # hash of the input files and of the options that affect the result


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype for all ids, little-endian."""
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


def map_tokens(file: Path, vocab_size: int) -> UInt[np.ndarray, "num_tokens"]:
    """Map the tokens of a file into memory."""
    dtype = token_dtype(vocab_size)
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)  # an empty one has no map


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """Memory-mapped tokens of one split. Opening it reads the offsets but no tokens."""

    directory: Path
    sidecar: Sidecar
    tokens: UInt[np.ndarray, "num_tokens"] = dataclasses.field(repr=False)
    offsets: Int64[np.ndarray, "num_offsets"] = dataclasses.field(repr=False)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, with one end_of_document per document."""
        return len(self.tokens)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the tokens."""
        found, name = saved_tokenizer(self.directory), self.sidecar.tokenizer
        require(found.name == name, f"{self.directory / TOKENIZER_FILE}: tokenizer", found.name, f"must be {name}")
        return found

    def document(self, index: int) -> UInt[np.ndarray, "document_tokens"]:
        """Return the tokens of one document, including its end_of_document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


class Corpus(NamedTuple):
    """Corpus with two disjoint splits."""

    train: TokenStore
    validation: TokenStore

    @property
    def digest(self) -> str:
        """SHA-256 of both splits. The same text, tokenizer and split give the same digest on every machine."""
        return _digest(self.train.sidecar, self.validation.sidecar)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpora:
    """Stores of a run by path: those of one corpus, or of a mixture with its weights."""

    train: dict[str, TokenStore]
    validation: dict[str, TokenStore]
    weights: dict[str, float]

    @property
    def digest(self) -> str:
        """SHA-256 of all stores and weights; of one store each, as that of `Corpus`."""
        train, validation = list(self.train.values()), list(self.validation.values())
        if len(train) == len(validation) == 1:
            return Corpus(*train, *validation).digest
        weighted = [[self.weights[path], store.sidecar.digest] for path, store in self.train.items()]
        return json_digest([weighted, [store.sidecar.digest for store in validation]])

    def stores(self, split: str) -> list[TokenStore]:
        """Return the stores of "train", "validation" or "all" that have documents."""
        chosen = [self.train] * (split != "validation") + [self.validation] * (split != "train")
        return [store for stores in chosen for store in stores.values() if store.num_documents]


def verify_stores(stores: Sequence[TokenStore], full: bool = True) -> None:
    """Read all data of stores, and check digests, ids and the places of documents.

    Unless `full`, nothing is read of a store whose files are those that were last verified, by size, times and inode.
    This is remembered in its directory, if it can be written to.

    Raises:
        InputError: the files have changed since they were written, or were written by another program.
    """
    for store in stores:
        stats = {name: os.stat(store.directory / name) for name in (TOKENS_FILE, OFFSETS_FILE, SIDECAR_FILE)}
        fields = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev")
        identity = {name: [getattr(stat, field) for field in fields] for name, stat in stats.items()}
        with contextlib.suppress(InputError):  # there is none, or it is damaged
            if read_json(store.directory / VERIFIED_FILE) == identity and not full:
                continue
        found, largest = digest_of(store.tokens, store.offsets, f"checking {store.directory}")
        digest, size = store.sidecar.digest, store.sidecar.vocab_size
        allowed = f"must be the digest of the files, {found}"
        require(found == digest, f"{store.directory / SIDECAR_FILE}: digest", digest, allowed)
        require(largest < size, f"{store.directory / TOKENS_FILE}: token id", largest, f"must be 0 to {size - 1}")
        first, last, end = int(store.offsets[0]), int(store.offsets[-1]), store.tokens.size
        is_rising = first == 0 and last == end and bool((np.diff(store.offsets) >= 0).all())
        allowed = f"offsets must rise from 0 to {end}, the number of tokens"
        require(is_rising, f"{store.directory / OFFSETS_FILE}: first and last offset", (first, last), allowed)
        with contextlib.suppress(OSError):  # a corpus of another user, or a full disk
            write_json(store.directory / VERIFIED_FILE, identity)


def digest_of(
    tokens: UInt[np.ndarray, "num_tokens"], offsets: Int64[np.ndarray, "num_offsets"], task: str
) -> tuple[str, int]:
    """Return the SHA-256 of tokens and then offsets, and the largest token. `task` names the work in its progress."""
    digest, largest = hashlib.sha256(), 0
    with Progress(total=tokens.nbytes, desc=task, unit="B", unit_scale=True, delay=1, leave=False) as bar:
        for begin in range(0, len(tokens), _BLOCK):
            block = tokens[begin : begin + _BLOCK]
            digest.update(block.data)
            largest = max(largest, int(block.max()))
            bar.update(block.nbytes)
    digest.update(np.ascontiguousarray(offsets, "<i8").data)
    return digest.hexdigest(), largest


def joined(stores: Sequence[TokenStore]) -> TokenStore:
    """Return the documents of several stores of one tokenizer as one store, in memory; a single store as it is."""
    first, *others = stores
    if not others:
        return first
    tokens = np.concatenate([store.tokens for store in stores])
    sizes = np.concatenate([np.diff(store.offsets) for store in stores])
    return TokenStore(first.directory, first.sidecar, tokens, np.cumsum(np.concatenate([[0], sizes]), dtype="<i8"))


def _digest(train: Sidecar, validation: Sidecar) -> str:
    return hashlib.sha256(f"{train.digest} {validation.digest}".encode()).hexdigest()


def find_corpus(path: str, config: DataConfig, field: str) -> Corpus | None:
    """Open the prepared corpus at a path, or return None if there is raw text.

    A corpus at a URL is first copied to `data.cache_dir`/<16 hex digits of its digest>, unless it is there.

    Raises:
        InputError: the path cannot be read, the tokenizer differs from the corpus's, or a copy is damaged. The message
            names `field`.
    """
    sidecars = _sidecars(path, field)
    if not sidecars:
        return None
    name, given = sidecars["train"].tokenizer, config.tokenizer
    if given is not None and not re.fullmatch(_NAME, given):
        given = read_tokenizer(given).name
    allowed = f"must be None or {name!r}: {field} = {path!r} was prepared with {name!r}"
    require(given in (None, name), "data.tokenizer", config.tokenizer, allowed)
    directory = Path(os.path.expanduser(path))
    if is_remote(path):
        directory = _local_copy(path, field, sidecars, Path(os.path.abspath(os.path.expanduser(config.cache_dir))))
    return open_corpus(directory)


def follow_corpus(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a config file's dict in which the corpus determines `model.vocab_size` and `data.tokenizer`.

    A `data.tokenizer` of None becomes "bytes" for raw text; for a prepared corpus it remains None, which selects the
    corpus's tokenizer. A `model.vocab_size` of None becomes that of the tokenizer. A dict without these fields is
    returned unchanged, or with values of a wrong type; `config.read_run` reports them.

    Raises:
        InputError: the corpus or the tokenizer cannot be read.
    """
    names = "path", "tokenizer", "validation_path", "mixture"  # mistakes in others are reported with all others
    try:
        data = DataConfig(**{name: spec["data"][name] for name in names if name in spec["data"]})
        vocab_size = spec["model"]["vocab_size"]
    except (AttributeError, KeyError, TypeError):
        return spec
    if None not in (data.tokenizer, vocab_size):
        return spec
    require(bool(data.weights), "data.path", data.path, _TEXT)
    sidecars = next(filter(None, itertools.starmap(_sidecars, data.fields.items())), {})
    tokenizer = data.tokenizer or Bytes.name
    if vocab_size is None:
        vocab_size = sidecars["train"].vocab_size if sidecars else read_tokenizer(tokenizer).vocab_size
    sections = {"data": {"tokenizer": data.tokenizer if sidecars else tokenizer}, "model": {"vocab_size": vocab_size}}
    return spec | {name: spec[name] | fields for name, fields in sections.items()}


def open_corpus(directory: Path, field: str = "corpus") -> Corpus:
    """Map the two stores of a corpus. Opening reads no tokens; `verify_stores` reads and checks all.

    Raises:
        InputError: a file is missing or has another size, or the stores do not match each other. The message names
            `field` or the file.
    """
    stores: dict[str, TokenStore] = {}
    for split, sidecar in _sidecars(str(directory), field).items():
        store = directory / split
        file = store / SIDECAR_FILE
        with read_errors("corpus", str(file)):  # numpy raises many kinds of errors for damaged headers
            tokens = map_tokens(store / TOKENS_FILE, sidecar.vocab_size)
            offsets = np.load(store / OFFSETS_FILE, mmap_mode="r").astype("<i8", copy=False)
        sizes, found = (sidecar.num_tokens, sidecar.num_documents), (tokens.size, *(size - 1 for size in offsets.shape))
        allowed = f"must be {found}, as in the files next to it; copy or prepare the corpus again"
        require(sizes == found, f"{file}: num_tokens, num_documents", sizes, allowed)
        stores[split] = TokenStore(store, sidecar, tokens, offsets)
    require(bool(stores), field, str(directory), "must be a prepared corpus")
    return Corpus(**stores)


def _sidecars(path: str, field: str) -> dict[Split, Sidecar]:
    """Return the sidecars of the prepared corpus at a path or URL, or {} if it is raw text."""
    if path == STDLIB:
        return {}
    sidecars: dict[Split, Sidecar] = {}
    kinds = get_type_hints(Sidecar)
    for split in SPLITS:
        file = f"{path.rstrip('/')}/{split}/{SIDECAR_FILE}"
        with read_errors(field, path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            system, name = fsspec.url_to_fs(file) if is_remote(file) else (None, os.path.expanduser(file))
            content = parse_json(file, Path(name).read_bytes() if system is None else system.cat_file(name))
            require(content.keys() == kinds.keys(), f"{file}: fields", sorted(content), f"must be {sorted(kinds)}")
            for key, kind in kinds.items():
                require(type(content[key]) is kind, f"{file}: {key}", content[key], f"must be of type {kind.__name__}")
            sidecar = sidecars[split] = Sidecar(**content)
            given = (sidecar.format_version, sidecar.split, sidecar.fingerprint)
            expected = (FORMAT_VERSION, split, next(iter(sidecars.values())).fingerprint)
            require(given == expected, f"{file}: format_version, split, fingerprint", given, f"must be {expected}")
    require(len(sidecars) != 1, field, path, f"must be a whole corpus; only {list(sidecars)} has a {SIDECAR_FILE}")
    if not sidecars:
        local = Path(os.path.expanduser(path))
        is_split = (local / TOKENS_FILE).exists()
        require(not is_split, field, path, "is one split of a corpus; give the directory above it")
        if not (is_remote(path) or glob.has_magic(path) or local.exists()):
            names = os.listdir(local.parent) if local.parent.is_dir() else ()
            meant = did_you_mean(local.name, names, "" if local.parent == Path() else f"{local.parent}/")
            allowed = f"; give a prepared corpus, or text: a file, a directory, a quoted glob or {STDLIB}"
            allowed += "; several texts are a data.mixture, TEXT=WEIGHT,TEXT=WEIGHT"
            raise InputError(f"{field} = {path!r}: does not exist{meant or allowed}")
    return sidecars


def _local_copy(url: str, field: str, sidecars: dict[Split, Sidecar], cache: Path) -> Path:
    """Return a local copy of the prepared corpus at a URL; make it if missing.

    One process of a machine copies and the others wait. Only the files of a store are copied, whatever else is there. A
    copy gets its final name after its digests are verified, so a directory with that name is complete.
    """
    directory = cache / _digest(**sidecars)[:16]
    if directory.exists():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache / f".{directory.name}.lock"), tempfile.TemporaryDirectory(dir=cache) as temporary:
        if not directory.exists():
            logger.info("copying %s to %s", url, directory)
            copy = Path(temporary, "corpus")
            for split, sidecar in sidecars.items():
                names = [TOKENS_FILE, OFFSETS_FILE, SIDECAR_FILE]
                names += [TOKENIZER_FILE] if sidecar.tokenizer != Bytes.name else []
                (copy / split).mkdir(parents=True)
                with read_errors(field, url):
                    system, root = fsspec.url_to_fs(f"{url.rstrip('/')}/{split}")
                    system.get([f"{root}/{name}" for name in names], [f"{copy / split / name}" for name in names])
            verify_stores(open_corpus(copy))
            copy.rename(directory)
    return directory
