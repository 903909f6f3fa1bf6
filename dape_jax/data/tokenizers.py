"""Bytes <-> token ids.

In: a document's bytes. Out: an array of ids below `vocab_size`. Next: `prepare.build`, which appends `end_of_document`
to every document and writes the ids to disk.

With a lossless tokenizer, decode(encode(text)) == text and perplexities per byte are comparable. `prepare` decodes
every document; it accepts a tokenizer that changes some only with --lossy, and counts them. A store or a run's workdir
contains the `tokenizer.json` of its tokens; without the file, tokens are bytes.
"""

import functools
import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers
from etils import epath
from jaxtyping import Integer, UInt

from dape_jax.errors import InputError, require
from dape_jax.files import write_atomically
from dape_jax.storage import to_path

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
# The end-of-document token is the added token of the file with "end_of_document": true, or else the first of these.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
_END_MARK = "end_of_document"
_PIECE_CHARS = 2**18  # encoding needs more than 100 bytes of memory per byte of text
_TRAINING_PIECE_CHARS = 2**14  # training processes 256 pieces at a time


class Bytes:
    """Byte tokenizer: ids 0 to 255 are the bytes, 256 is end_of_document."""

    name = "bytes"  # recorded with the tokens: tokenizers with the same name give the same ids
    vocab_size = 257  # one more than the largest id
    end_of_document = 256  # follows the last token of a document; no text is encoded to it
    decodes_tokens_alone = True  # decode(a + b) == decode(a) + decode(b)
    first_token = None  # token that the tokenizer's file puts before a text

    def encode(self, text: bytes) -> UInt[np.ndarray, "tokens"]:
        """Return the ids of a text, without `end_of_document`, as a view."""
        return np.frombuffer(text, np.uint8)

    encode_controls = encode  # takes the text of a control token as the token

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        return None

    def decode(self, ids: Integer[np.ndarray, "tokens"]) -> bytes:
        """Return the text of the ids; the text of `end_of_document`, and of larger ids, is empty."""
        return ids[ids < self.end_of_document].astype(np.uint8).tobytes()


class HfTokenizer:
    """Tokenizer of a Hugging Face `tokenizer.json`.

    Tokens of a byte-level BPE, such as GPT-2's or Llama 3's, are decoded here, as bytes. Tokens of other models (BPE,
    Unigram, WordPiece, WordLevel) are decoded by the library: a token's text may depend on the tokens before it.

    The attributes are those of `Bytes`, and `content`: the file, with sorted keys. `where` is the name of the file in
    messages. `end` is the added token that ends a document; `content` marks it, so that the saved file needs no other
    record.

    Raises:
        InputError: the library rejects the file, or gives tokens other ids than the file, or there is no such `end`.

    Differs: special tokens that occur in a text are encoded as ordinary text, so that no text can end a document; no
        special tokens are added to a text, and the file's truncation, padding and dropout of merges are ignored.
    """

    def __init__(self, content: str | bytes, where: str = "the tokenizer", end: str | None = None):
        try:
            parsed: Any = json.loads(content)
            if not parsed["added_tokens"]:  # a file made of vocab.json and merges.txt; GPT-2's have an end
                library = tokenizers.Tokenizer.from_str(json.dumps(parsed))
                ends = [token for token in END_TOKENS if library.token_to_id(token) is not None]
                library.add_special_tokens(ends[:1])
                parsed = json.loads(library.to_str())
            for token in parsed["added_tokens"] if end is not None else ():
                token[_END_MARK] = token["content"] == end
            self.content = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
            digest = hashlib.sha256(self.content.encode()).hexdigest()
            self._library = _load(self.content)
        except Exception as error:  # the library raises only this class
            message = f"is not a {TOKENIZER_FILE} that the tokenizers library reads: {str(error)[:200]!r}"
            raise InputError(f"{where}: {message}") from error
        self._library.encode_special_tokens = True
        model, vocab = self._library.model, self._library.get_vocab(with_added_tokens=False)
        added = self._library.get_added_tokens_decoder()
        id_of = {token.content: id for id, token in added.items()}
        require(end is None or end in id_of, "end_of_document", end, f"must be one of added_tokens: {list(id_of)[:20]}")
        marked = [token["content"] for token in parsed["added_tokens"] if token.get(_END_MARK)]
        end = next((token for token in (*marked, *END_TOKENS) if token in id_of), None)
        if end is None:
            usual = " or ".join(END_TOKENS)
            advice = "; `add_special_tokens` of the tokenizers library adds one"
            if id_of:
                advice = f"; --end_of_document of dape-prepare names another of {list(id_of)}"
            raise InputError(f"{where}: added_tokens must have an end-of-document token: {usual}{advice[:500]}")
        for token in parsed["added_tokens"]:  # the library numbers them consecutively and ignores the ids in the file
            found, name = id_of[token["content"]], f"added token {token['content']!r}"
            require(found == token["id"], f"{where}: {name}: id", token["id"], f"must be {found}, the library's id")

        self.name = f"{type(model).__name__.lower()}-{digest[:16]}"
        self.vocab_size = max([*vocab.values(), *added]) + 1
        self.end_of_document = id_of[end]
        is_bpe = isinstance(model, tokenizers.models.BPE)
        self.decodes_tokens_alone = is_bpe and isinstance(self._library.decoder, tokenizers.decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}  # bytes of each token, if tokens can be decoded separately
        if self.decodes_tokens_alone:
            byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
            for token, id in vocab.items():
                # A token with other characters than those of the byte alphabet is its own text, as in the library.
                is_spelt = all(char in byte_of for char in token)
                self._bytes_of[id] = bytes(byte_of[char] for char in token) if is_spelt else token.encode()
            self._bytes_of |= {id: token.content.encode() for id, token in added.items()}
            self._bytes_of[self.end_of_document] = b""

    def encode(self, text: bytes) -> UInt[np.ndarray, "tokens"]:
        """Return the ids of a text, without `end_of_document`. Other threads run while the library encodes.

        Raises:
            InputError: the text is not UTF-8, the library cannot encode it, or encodes a part as end of document.
        """
        try:
            string = text.decode()
            pieces = _pieces(string, _PIECE_CHARS) if self.decodes_tokens_alone else [string]
            # A batch of one: `encode` does not release the interpreter's lock.
            encoded = [self._library.encode_batch_fast([piece], add_special_tokens=False)[0] for piece in pieces]
        except Exception as error:
            message = f"cannot be encoded by the tokenizer {self.name}: {str(error)[:200]!r}"
            raise InputError(f"text = {text[:20]!r}: {message}") from error
        ids = np.concatenate([np.array(piece.ids, np.uint32) for piece in encoded])
        if np.any(ids == self.end_of_document):
            raise InputError(f"text = {text[:40]!r}: the tokenizer {self.name} encodes a part as end of document")
        return ids

    @functools.cached_property
    def _prompting(self) -> tokenizers.Tokenizer:
        """The library as other programs use it: control tokens in a text are these tokens."""
        return _load(self.content)

    @property
    def first_token(self) -> str | None:
        """Text of the token that the file puts before a text (beginning of sequence), or None."""
        text = self._prompting.encode("a", add_special_tokens=True)  # a file may only append a token
        is_added = text.special_tokens_mask[:1] == [1] and text.ids[0] != self.end_of_document
        return text.tokens[0] if is_added else None

    def encode_controls(self, text: bytes) -> UInt[np.ndarray, "tokens"]:
        """Return the ids of a text in which the text of a control token is the token; for prompts that are trusted.

        Raises:
            InputError: the text is not UTF-8.
        """
        try:
            return np.array(self._prompting.encode(text.decode(), add_special_tokens=False).ids, np.uint32)
        except UnicodeDecodeError as error:
            raise InputError(f"text = {text[:20]!r}: must be UTF-8") from error

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        return self._library.token_to_id(token)

    def decode(self, ids: Integer[np.ndarray, "tokens"]) -> bytes:
        """Return the text of the ids; a token of a byte-level BPE may be part of a character.

        The text of `end_of_document`, and of ids that the file does not have, is empty: a model can sample them.
        """
        if self.decodes_tokens_alone:
            return b"".join(self._bytes_of.get(id, b"") for id in ids.tolist())
        shown = ids[ids != self.end_of_document].tolist()
        return self._library.decode(shown, skip_special_tokens=False).encode()


Tokenizer = Bytes | HfTokenizer


def _load(content: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a file, which encodes a text as a whole and always to the same ids."""
    library = tokenizers.Tokenizer.from_str(content)
    library.no_truncation()
    library.no_padding()
    if isinstance(library.model, tokenizers.models.BPE):
        library.model.dropout = None
    return library


def read_tokenizer(spec: str, field: str = "data.tokenizer", end: str | None = None) -> Tokenizer:
    """Return the tokenizer named by a config or a command line: "bytes", or the path of a `tokenizer.json`.

    `end` is the token of the file that ends a document, or None for the usual one.

    Raises:
        InputError: the name is invalid, or the file is damaged. The message names `field`.
    """
    if spec == Bytes.name:
        return Bytes()
    where, file = f"{field} = {spec!r}", to_path(spec, field)
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        allowed = f"must be {Bytes.name!r}, or the path of a Hugging Face {TOKENIZER_FILE} that can be read"
        raise InputError(f"{where}: {allowed}: {error}") from error
    return HfTokenizer(content, where, end)


def saved_tokenizer(directory: epath.PathLike) -> Tokenizer:
    """Return the tokenizer of a store or a run: the tokenizer.json in its directory, or `Bytes` if there is none.

    Raises:
        InputError: the file is damaged.
    """
    file = epath.Path(directory) / TOKENIZER_FILE
    try:
        return HfTokenizer(file.read_bytes(), str(file))
    except FileNotFoundError:
        return Bytes()


def save_tokenizer(tokenizer: Tokenizer, directory: epath.PathLike) -> None:
    """Write a tokenizer for `saved_tokenizer`, atomically; `Bytes` needs no file.

    Raises:
        InputError: the directory contains another tokenizer.
    """
    directory = epath.Path(directory)
    found, file = saved_tokenizer(directory).name, directory / TOKENIZER_FILE
    if found != tokenizer.name:
        require(found == Bytes.name, str(file), found, f"must be {tokenizer.name} or missing")
        assert isinstance(tokenizer, HfTokenizer)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(file, tokenizer.content.encode() + b"\n")


def train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on documents, in any order. Words are split as in GPT-2.

    Id 0 is <|endoftext|>, the next 256 are the bytes, and the rest are merges; the vocabulary is smaller than
    `vocab_size` only if no pairs are left to merge. Memory grows with the number of distinct words, so train on a
    sample of a large corpus.
    """
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=_byte_alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    pieces = (piece for document in documents for piece in _pieces(document, _TRAINING_PIECE_CHARS))
    library.train_from_iterator(pieces, trainer)
    tokenizer = HfTokenizer(library.to_str())
    if tokenizer.vocab_size < vocab_size:
        logger.warning("the vocabulary has only %d tokens: no pairs are left to merge", tokenizer.vocab_size)
    return tokenizer


def byte_tokenizer_json() -> str:
    """Return a `tokenizer.json` with the ids of `Bytes`, one token per byte, for other programs."""
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={char: byte for byte, char in enumerate(_byte_alphabet())}, merges=[])
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([END_TOKENS[0]])
    assert library.token_to_id(END_TOKENS[0]) == Bytes.end_of_document
    return library.to_str()


def _byte_alphabet() -> list[str]:
    """Return the character that represents each byte in a vocabulary, as in GPT-2.

    Visible characters of Latin-1 are unchanged; the other bytes are, in order, U+0100 and up.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def _pieces(text: str, size: int) -> list[str]:
    """Return a long text in pieces, which are encoded separately to bound the library's memory.

    Cuts are after a letter or a digit and before white space, where GPT-2 and similar tokenizers also split, so the
    ids are those of the whole text: "one two" -> "one", " two". A piece of `size` characters without such a position is
    cut at its end.
    """
    before_space = r"(?<=[^\W_])(?=[ \t\r\n])"
    return re.findall(rf"(?s).{{1,{size}}}(?:\Z|{before_space})|.{{1,{size}}}", text) or [""]
