"""Bytes <-> token ids.

In: a document's bytes (`corpus`). Out: an array of ids below `vocab_size`. Next: `store`, which appends
`end_of_document` to every document and writes the ids to disk.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, UInt

from dape_jax.errors import InputError


@runtime_checkable  # for the annotations that the tests check
class Tokenizer(Protocol):
    """What the store, training and generation need of a tokenizer; its name and numbers are fixed."""

    @property
    def name(self) -> str:
        """The key in `TOKENIZERS`, recorded beside the tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, `end_of_document` included."""
        ...

    @property
    def end_of_document(self) -> int:
        """The id that follows the last token of a document."""
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
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise InputError(
                f"ids in [{ids.min()}, {ids.max()}]: the bytes tokenizer knows 0 to {self.end_of_document}"
            )
        return ids[ids != self.end_of_document].astype(np.uint8).tobytes()


TOKENIZERS: dict[str, type[Tokenizer]] = {"bytes": Bytes}
