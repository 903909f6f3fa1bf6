"""Read pairs of token files, `x.bin` and `x.idx`, written by Megatron-LM or GPT-NeoX (the official code's data).

In: the path of a pair. Out: an `IndexedDataset` with memory-mapped documents. Next: `records`.

    x.bin   tokens, one sequence after another, little-endian
    x.idx   9 bytes     MMIDIDX and two zeros
            uint64      version, 1
            uint8       dtype of the tokens: see DTYPES
            uint64      number of sequences N
            uint64      length of the document index D + 1, for D documents
            int32[N]    tokens of each sequence
            int64[N]    start of each sequence in x.bin, in bytes
            int64[D+1]  document i is the sequences index[i] to index[i + 1] - 1

The index is untrusted: it is checked before use, in pieces, so that memory is bounded.
"""

import dataclasses
import os
import struct
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from dape_jax.errors import InputError, require

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floating-point

_HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 2**20  # entries that are checked at a time


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IndexedDataset:
    """Pair of token files with a checked index, memory-mapped. Opening it reads the index once."""

    tokens: Integer[np.ndarray, "num_tokens"]
    starts: Int64[np.ndarray, "num_sequences"]  # start of each sequence, in bytes
    documents: Int64[np.ndarray, "num_offsets"]  # document index

    @property
    def num_documents(self) -> int:
        """Number of documents, including empty ones."""
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens; ends of documents count only if the file contains them."""
        return len(self.tokens)

    @property
    def dtype(self) -> np.dtype:
        """Type of the tokens."""
        return self.tokens.dtype

    def document(self, index: int) -> Integer[np.ndarray, "document_tokens"]:
        """Return the tokens of one document, not checked against a vocabulary."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        begin, end = (self._first_token(int(sequence)) for sequence in self.documents[index : index + 2])
        return self.tokens[begin:end]

    def _first_token(self, sequence: int) -> int:
        return int(self.starts[sequence]) // self.dtype.itemsize if sequence < len(self.starts) else self.num_tokens


def open_indexed(path: Path) -> IndexedDataset:
    """Map the pair `x.bin`, `x.idx` or `x` after checking the index, also against the size of the tokens.

    Raises:
        InputError: a file is missing, damaged or of another kind; the message names the file, the field and its value.
    """
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    file, tokens_file = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")  # the prefix may contain dots
    raw, tokens = _map(file), _map(tokens_file)

    def check(condition: bool, field: str, value: object, allowed: str) -> None:
        require(condition, f"{file}: {field}", value, allowed)

    check(raw.size >= _HEADER.size, "size", raw.size, f"must be at least the {_HEADER.size} bytes of a header")
    magic, version, code, num_sequences, num_offsets = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    check(magic == MAGIC, "magic", magic, f"must be {MAGIC!r}, the beginning of a memory-mapped Megatron index")
    check(version == VERSION, "version", version, f"must be {VERSION}")
    check(code in DTYPES, "dtype", code, f"must be one of {DTYPES}")
    dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    check(num_offsets > 0, "length of the document index", num_offsets, "must be one more than the number of documents")
    # Python's integers cannot overflow, so nothing is mapped before the two counts are known to fit.
    ends = [_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_offsets]
    check(
        raw.size == sum(ends),
        "size",
        raw.size,
        f"must be {sum(ends)} bytes for its {num_sequences} sequences and its document index of length {num_offsets}",
    )
    _, sizes, starts, documents = np.split(raw, np.cumsum(ends)[:-1])
    sizes, starts, documents = sizes.view("<i4"), starts.view("<i8"), documents.view("<i8")

    num_tokens = 0
    for first in range(0, num_sequences, _CHUNK):
        chunk = sizes[first : first + _CHUNK].astype(np.int64)
        negative = np.flatnonzero(chunk < 0)
        if negative.size:
            at = int(negative[0])
            check(False, f"size of sequence {first + at}", int(chunk[at]), "must be 0 or more tokens")
        expected = (num_tokens + np.cumsum(chunk) - chunk) * dtype.itemsize
        wrong = np.flatnonzero(starts[first : first + _CHUNK] != expected)
        if wrong.size:
            at = int(wrong[0])
            allowed = f"must be {expected[at]}, the end of the previous sequence"
            check(False, f"start of sequence {first + at}", int(starts[first + at]), allowed)
        num_tokens += int(chunk.sum())
        if num_tokens * dtype.itemsize > tokens.size:
            break  # the check below fails; a larger sum could exceed 64 bits
    require(
        tokens.size == num_tokens * dtype.itemsize,
        f"{tokens_file}: size",
        tokens.size,
        f"must be {num_tokens * dtype.itemsize} bytes for the {num_tokens} tokens of {dtype.name} in {file}",
    )
    for first in range(0, num_offsets, _CHUNK):
        chunk = documents[max(first - 1, 0) : first + _CHUNK]
        check(bool(np.all(chunk[1:] >= chunk[:-1])), "document index", "decreasing", "must not decrease")
    ends = (int(documents[0]), int(documents[-1]))
    check(ends == (0, num_sequences), "document index", ends, f"must be 0 and the number of sequences, {num_sequences}")
    return IndexedDataset(tokens.view(dtype), starts, documents)


def _map(file: Path) -> np.ndarray:
    """Map the bytes of a file; an empty file, which cannot be mapped, gives an empty array."""
    try:
        return np.memmap(file, np.uint8, "r") if os.stat(file).st_size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error
