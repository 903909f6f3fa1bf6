"""Bytes <-> token ids.

In: a document's bytes (`corpus`). Out: an array of ids below `vocab_size`. Next: `build`, which appends
`end_of_document` to every document and writes the ids to disk.

Every tokenizer here is lossless, decode(encode(text)) == text to the byte: perplexities per byte can be compared, and
generated text is what the model was trained on. A `tokenizer.json` in a store or in a run's workdir is the one that its
tokens were made with; where there is none, they are bytes.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tokenizers
from jaxtyping import Integer, UInt

from dape_jax.errors import InputError, require

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # the first that a file has ends its documents

_MAX_FILE_BYTES = 64 * 2**20  # the largest that are published have about 30 MiB
_MAX_TRAINED_VOCAB_SIZE = 2**20  # the trainer sets memory aside for all of it at once
_PIECE_CHARS = 2**18  # the library takes more than 100 bytes of memory for each byte of a text
_TRAINING_PIECE_CHARS = 2**14  # and 256 of them at once, to train on
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


@runtime_checkable  # for the annotations that the tests check
class Tokenizer(Protocol):
    """What the store, training and generation need of a tokenizer; its name and numbers are fixed."""

    @property
    def name(self) -> str:
        """What is recorded beside the tokens: tokenizers of one name give the same ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, `end_of_document` included."""
        ...

    @property
    def end_of_document(self) -> int:
        """The id that follows the last token of a document; no text is encoded to it."""
        ...

    def encode(self, text: bytes) -> Integer[np.ndarray, "tokens"]:
        """The ids of a text, without `end_of_document`."""
        ...

    def decode(self, ids: Integer[np.ndarray, "tokens"]) -> bytes:
        """The text of the ids; `end_of_document` stands for no text. Inverts `encode`."""
        ...


class Bytes:
    """Ids 0 to 255 are the bytes themselves, 256 ends a document: nothing to train, nothing to lose."""

    name = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: bytes) -> UInt[np.ndarray, "tokens"]:
        """The bytes as numbers; a view, not a copy."""
        return np.frombuffer(text, np.uint8)

    def decode(self, ids: Integer[np.ndarray, "tokens"]) -> bytes:
        """The numbers as bytes.

        Raises:
            InputError: an id outside the vocabulary.
        """
        _check_ids(self, ids)
        return ids[ids != self.end_of_document].astype(np.uint8).tobytes()


class Bpe:
    """A byte-level BPE from a Hugging Face `tokenizer.json`, such as GPT-2's or GPT-NeoX-20B's.

    Made by `read_tokenizer`, `saved_tokenizer` and `train_bpe`, which check what they pass on. It pickles as `content`.

    Args:
        content: the file's, as `_lossless` leaves it.

    Differs: from the library's own use of the file, in what would lose or add text. Special tokens that are written out
        in a text are encoded as the text that they are, so that no text can end a document; there is no Unicode normal
        form, no space put before a text, no token put around it, no truncation, padding or dropout.
    """

    def __init__(self, content: str):
        self.content = content
        self._library = tokenizers.Tokenizer.from_str(content)
        self._library.encode_special_tokens = True
        added = {id: token.content for id, token in self._library.get_added_tokens_decoder().items()}
        byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
        self._text_of = {}
        for token, id in self._library.get_vocab(with_added_tokens=False).items():
            # A token that is not spelt in the byte alphabet is, as for the library, its own text.
            spelt = all(char in byte_of for char in token)
            self._text_of[id] = bytes(byte_of[char] for char in token) if spelt else token.encode()
        self._text_of |= {id: token.encode() for id, token in added.items()}

        self.name = "bpe-" + hashlib.sha256(content.encode()).hexdigest()[:16]
        self.vocab_size = max(self._text_of) + 1
        self.end_of_document = min(added, key=lambda id: _end_rank(added[id]))
        self._text_of[self.end_of_document] = b""

    def encode(self, text: bytes) -> UInt[np.ndarray, "tokens"]:
        """The ids of a text, which is checked to come back from them.

        Raises:
            InputError: the text is not UTF-8, or the tokenizer cannot encode it without loss.
        """
        try:
            string = text.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"text = {text[error.start : error.start + 20]!r}, from byte {error.start} on: not UTF-8, which the "
                f"tokenizer {self.name} needs; the tokenizer {Bytes.name!r} takes any"
            ) from error
        return np.concatenate([self._encode_piece(piece) for piece in _pieces(string, _PIECE_CHARS)])

    def _encode_piece(self, piece: str) -> UInt[np.ndarray, "tokens"]:
        with _library_errors(f"text = {piece[:20]!r}: cannot be encoded by the tokenizer {self.name}"):
            ids = self._library.encode(piece, add_special_tokens=False).ids
        text, back = piece.encode(), b"".join(map(self._text_of.__getitem__, ids))
        if back != text:
            differing = (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b)
            start = next(differing, min(len(text), len(back)))
            raise InputError(
                f"text = {text[start : start + 40]!r}: the tokenizer {self.name} would make "
                f"{back[start : start + 40]!r} of it"
            )
        return np.array(ids, np.uint32)

    def decode(self, ids: Integer[np.ndarray, "tokens"]) -> bytes:
        """The text of the ids, also of those that are a piece of a character.

        Ids below `vocab_size` that the file gives to no token stand for no text: a model can draw them.

        Raises:
            InputError: an id outside the vocabulary.
        """
        _check_ids(self, ids)
        return b"".join(self._text_of.get(id, b"") for id in ids.tolist())

    def __reduce__(self):
        return Bpe, (self.content,)


def read_tokenizer(spec: str, field: str = "data.tokenizer") -> Tokenizer:
    """The tokenizer that a config or a command line names.

    Args:
        spec: "bytes", or the path of a Hugging Face `tokenizer.json` with a byte-level BPE.
        field: what names it, for messages.

    Raises:
        InputError: neither, or a file that is damaged or not lossless.
    """
    if spec == Bytes.name:
        return Bytes()
    where = f"{field} = {spec!r}"
    if "\0" in spec or not os.path.exists(os.path.expanduser(spec)):
        raise InputError(f"{where}: {Bytes.name!r}, or the path of a Hugging Face {TOKENIZER_FILE} that exists")
    return _read(Path(os.path.expanduser(spec)), where)


def saved_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a store or a run: of the tokenizer.json in its directory, or bytes where there is none.

    Raises:
        InputError: the file is damaged.
    """
    file = directory / TOKENIZER_FILE
    return _read(file, str(file)) if os.path.lexists(file) else Bytes()


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write a tokenizer to where `saved_tokenizer` finds it, in one step; bytes leave no file.

    Raises:
        InputError: the directory cannot be made or written to, or holds another tokenizer.
    """
    file = directory / TOKENIZER_FILE
    if os.path.lexists(file):
        found = saved_tokenizer(directory).name
        require(found == tokenizer.name, str(file), found, f"is in the way of the tokenizer {tokenizer.name}")
        return
    if not isinstance(tokenizer, Bpe):
        return
    partial = directory / f".{TOKENIZER_FILE}.{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as out:
            out.write(tokenizer.content.encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):  # nothing is left there once it is renamed
            partial.unlink()


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, split into words as GPT-2's is; the same texts, in any order, give the same tokenizer.

    Id 0 is <|endoftext|>, the next 256 are the bytes, and merges take the rest. What is held in memory is the texts'
    distinct words with their counts, so of a large corpus a sample is enough.

    Args:
        texts: read once.
        vocab_size: of the result; it is smaller only where the texts have nothing more to merge.

    Raises:
        InputError: the vocabulary has no room for the bytes, or is too large.
    """
    check_trained_vocab_size(vocab_size)
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=_byte_alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    library.train_from_iterator((piece for text in texts for piece in _pieces(text, _TRAINING_PIECE_CHARS)), trainer)
    tokenizer = _parse(library.to_str().encode(), "the trained tokenizer")
    if tokenizer.vocab_size < vocab_size:
        logger.warning("the texts gave a vocabulary of %d: there was nothing more to merge", tokenizer.vocab_size)
    return tokenizer


def check_trained_vocab_size(vocab_size: int) -> None:
    """Raise `InputError` unless a BPE of this size can be trained."""
    smallest = len(_byte_alphabet()) + 1
    require(
        smallest <= vocab_size <= _MAX_TRAINED_VOCAB_SIZE,
        "train_bpe",
        vocab_size,
        f"{smallest} (the bytes and {END_TOKENS[0]}) to {_MAX_TRAINED_VOCAB_SIZE}",
    )


def _check_ids(tokenizer: Tokenizer, ids: Integer[np.ndarray, "tokens"]) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise InputError(
            f"ids in [{ids.min()}, {ids.max()}]: the tokenizer {tokenizer.name} knows 0 to {tokenizer.vocab_size - 1}"
        )


def _end_rank(token: str) -> int:
    return END_TOKENS.index(token) if token in END_TOKENS else len(END_TOKENS)


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in a vocabulary, as in GPT-2's.

    Bytes that are visible characters of Latin-1 stand for themselves; the others, in order, take U+0100 and up.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


@contextlib.contextmanager
def _library_errors(where: str) -> Iterator[None]:
    """The library raises plain Exceptions, and for a panic of its own a BaseException that has no importable name."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{where}: {str(error)[:200]!r}") from error  # a text or a file may stand in it


def _pieces(text: str, size: int) -> Iterator[str]:
    """A long text in pieces that the library encodes one by one, so that its memory does not grow with the text.

    A cut is made after a letter or a digit and before white space, where GPT-2 and its like cut as well: the ids are
    those of the whole text. Only a piece of `size` characters that holds no such place is cut where it ends.
    """
    start = 0
    while len(text) - start > size:
        end = start + size
        cuts = (i for i in range(end, start, -1) if text[i] in " \t\r\n" and text[i - 1].isalnum())
        cut = next(cuts, end)
        yield text[start:cut]
        start = cut
    yield text[start:]


def _read(file: Path, where: str) -> Bpe:
    try:
        with open(file, "rb") as opened:
            data = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise InputError(f"{where}: more than {_MAX_FILE_BYTES} bytes, so it is no {TOKENIZER_FILE}")
    return _parse(data, where)


def _parse(data: bytes, where: str) -> Bpe:
    """The tokenizer of a file's bytes, shown to be lossless on every byte of UTF-8 and on what is easily lost."""
    try:
        content, forms = _lossless(json.loads(data), where)
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        text.encode()  # half a surrogate pair is JSON but not Unicode
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: is no {TOKENIZER_FILE}: {error}") from error
    if forms:
        logger.warning(
            "%s: its normaliser (%s) is left out, since it loses what a text is made of: text that is not in that form "
            "is encoded as it is, to other ids than upstream's",
            where,
            ", ".join(forms),
        )
    with _library_errors(f"{where}: the tokenizers library refuses it"):
        tokenizer = Bpe(text)
    for token in content["added_tokens"]:
        # The library numbers added tokens one after another and passes over the file's numbers without a word.
        found = tokenizer._library.token_to_id(token["content"])
        name = f"{where}: added token {token['content']!r}: id"
        require(found == token["id"], name, token["id"], f"the tokenizers library makes it {found}")
    for probe in _probes([token["content"] for token in content["added_tokens"]]):
        try:
            tokenizer.encode(probe.encode())
        except InputError as error:
            raise InputError(f"{where}: loses text, and only a tokenizer that is lossless is taken: {error}") from error
    return tokenizer


def _lossless(content: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """The parsed file as `Bpe` takes it, without what would lose or add text, and the Unicode forms left out of it.

    Everything that is looked at is checked; the rest is for the library to judge.
    """

    def check(condition: bool, field: str, allowed: str) -> None:
        if not condition:
            raise InputError(f"{where}: {field} must be {allowed}")

    given: Any = content.get("model") if type(content) is dict else None
    check(type(given) is dict, "model", "there, as in every tokenizer.json of Hugging Face")
    model: dict[str, Any] = {"type": "BPE", **given, "dropout": None}  # GPT-2's file does not name its type
    decoder: Any = content.get("decoder")
    added: Any = content.get("added_tokens")
    vocab: Any = model.get("vocab")
    merges: Any = model.get("merges")
    check(model["type"] == "BPE", "model.type", "'BPE'")
    check(type(decoder) is dict and decoder.get("type") == "ByteLevel", "decoder.type", "'ByteLevel', of a byte level")
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        check(model.get(affix) in (None, ""), f"model.{affix}", "empty, as on a byte level")

    check(type(vocab) is dict and all(type(id) is int for id in vocab.values()), "model.vocab", "tokens and their ids")
    ids = set(vocab.values())
    check(len(ids) == len(vocab), "model.vocab", "without two tokens of one id")
    check(all(0 <= id < 2**31 for id in ids), "model.vocab", "of ids from 0 to 2**31 - 1")
    check(type(merges) is list, "model.merges", "a list")
    model["merges"] = [merge.split(" ") if type(merge) is str else merge for merge in merges]  # to the newer form
    for merge in model["merges"]:
        pair = type(merge) is list and len(merge) == 2 and all(type(part) is str for part in merge)
        known = pair and {*merge, "".join(merge)} <= vocab.keys()
        check(known, "model.merges", f"pairs of tokens that together are a token, not {str(merge)[:60]!r}")

    check(type(added) is list, "added_tokens", "a list")
    for token in added:
        fields = type(token) is dict and type(token.get("id")) is int and type(token.get("content")) is str
        check(fields and token["content"] != "", "added_tokens", "objects with id and content")
    ends = [token for token in added if token["content"] in END_TOKENS]
    check(bool(ends), "added_tokens", f"with one that ends a document: {' or '.join(END_TOKENS)}")
    end = min(ends, key=lambda token: _end_rank(token["content"]))
    forms: list[str] = []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        # Only what is marked as special can be kept from being read out of a text.
        "added_tokens": [
            token | {"special": True} if token is end else token
            for token in sorted(added, key=lambda token: token["id"])  # the library numbers them as they stand
        ],
        "normalizer": _without_forms(content.get("normalizer"), forms),
        "pre_tokenizer": _without_prefix(content.get("pre_tokenizer")),
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }, forms


def _without_forms(normalizer: Any, forms: list[str]) -> Any:
    """The normaliser without Unicode normal forms, whose names are added to `forms`; None if nothing is left."""
    if type(normalizer) is not dict:
        return normalizer
    if normalizer.get("type") in _UNICODE_FORMS:
        forms.append(normalizer["type"])
        return None
    parts = normalizer.get("normalizers")
    if type(parts) is not list:
        return normalizer
    left = [part for part in (_without_forms(part, forms) for part in parts) if part is not None]
    return normalizer | {"normalizers": left} if left else None


def _without_prefix(node: Any) -> Any:
    """A pre-tokenizer, and all within it, that puts no space before a text."""
    if type(node) is list:
        return [_without_prefix(part) for part in node]
    if type(node) is dict:
        return {key: False if key == "add_prefix_space" else _without_prefix(part) for key, part in node.items()}
    return node


def _probes(added_tokens: list[str]) -> Iterator[str]:
    """Texts that tokenizers lose something of, and every byte that UTF-8 can hold."""
    yield from (
        "",
        " ",
        "   leading and trailing   ",
        "\n\n\r\n\r \t\t\x0b\x0c\n ",
        "a\u00a0b\u1680c\u2003d\u2009e\u200bf\u2028g\u2029h\u202fi\u205fj\u3000k\ufeffl\u0085m",
        "I don't , we 've . it 's ! n't ? : ;",
        "Case CASE İıßẞ ΣΑΣ ς",
        "e\u0301 \u00e9 A\u030a \u00c5 \u212b \u1100\u1161 \uac00 q\u0307\u0323 q\u0323\u0307 ﬁ ² ½ ＡＢ \u0344",
        "👩‍👩‍👧‍👦 👍🏽 🇬🇧 ❤️ 𝔸 \U000e0001 \ufffd \ufffe \uffff",
        "▁ Ġ ## @@ </w> <0x0A> <unk> [UNK] <s> </s> <pad> <|endoftext|>",
        "0123456789 1,234.5 ١٢٣ 日本語のテキスト ไทย हिन्दी עברית العربية",
    )
    for token in added_tokens:
        yield f"{token} a{token}{token}  {token} \n{token}"
    for first in range(0, 0x800, 64):
        yield "".join(map(chr, range(first, first + 64)))
    yield "".join(map(chr, [*range(0x800, 0xD800, 0x800), *range(0xE000, 0x10000, 0x800)]))
    yield "".join(map(chr, range(0x10000, 0x110000, 0x8000)))
