"""Read pairs of token files, `x.bin` and `x.idx`, written by Megatron-LM or GPT-NeoX (the official code's data).

In: the path of a pair. Out: its documents, memory-mapped. Next: `records`.

    x.bin   tokens, one sequence after another, little-endian
    x.idx   9 bytes     MMIDIDX and two zeros
            uint64      version, 1
            uint8       dtype of the tokens: see DTYPES
            uint64      number of sequences N
            uint64      length of the document index D + 1, for D documents
            int32[N]    tokens of each sequence
            int64[N]    start of each sequence in x.bin, in bytes
            int64[D+1]  document i is the sequences index[i] to index[i + 1] - 1

The index is checked before use.
"""

import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from dape_jax.errors import InputError, require

MAGIC, VERSION = b"MMIDIDX\0\0", 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floating-point

_HEADER = struct.Struct("<9sQBQQ")


def read_documents(path: str) -> Iterator[Integer[np.ndarray, "_"]]:
    """Yield the tokens of each document of the pair `x.bin`, `x.idx`, not checked against a vocabulary.

    Raises:
        InputError: a file is missing, damaged or of another kind; the message names the file, the field and its value.
    """
    prefix, _ = os.path.splitext(path)
    file = f"{prefix}.idx"
    raw, tokens = _map(file), _map(f"{prefix}.bin")
    require(
        raw.size >= _HEADER.size, f"{file}: size", raw.size, f"must be at least the {_HEADER.size} bytes of a header"
    )
    magic, version, code, num_sequences, num_offsets = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    require(magic == MAGIC, f"{file}: magic", magic, f"must be {MAGIC!r}, the beginning of a memory-mapped index")
    require(version == VERSION, f"{file}: version", version, f"must be {VERSION}")
    require(code in DTYPES, f"{file}: dtype", code, f"must be one of {DTYPES}")
    dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    # Python's integers cannot overflow, so nothing is mapped before the two counts are known to fit.
    ends = [_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_offsets]
    allowed = f"must be {sum(ends)} bytes for {num_sequences} sequences and a document index of length {num_offsets}"
    require(raw.size == sum(ends) and num_offsets > 0, f"{file}: size", raw.size, allowed)
    _, sizes, starts, documents = np.split(raw, np.cumsum(ends)[:-1])
    sizes, starts, documents = sizes.view("<i4"), starts.view("<i8"), documents.view("<i8")
    expected = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64) * dtype.itemsize])
    is_whole = bool(np.all(sizes >= 0)) and np.array_equal(starts, expected[:-1])
    require(is_whole, f"{file}: sequences", "sizes and starts", "must fit together: each begins where the last ends")
    require(
        tokens.size == expected[-1], f"{prefix}.bin: size", tokens.size, f"must be {expected[-1]} bytes, as in {file}"
    )
    is_whole = documents[0] == 0 and documents[-1] == num_sequences and bool(np.all(np.diff(documents) >= 0))
    require(
        is_whole, f"{file}: document index", documents[[0, -1]].tolist(), f"must increase from 0 to {num_sequences}"
    )
    bounds = expected[documents] // dtype.itemsize
    for begin, end in itertools.pairwise(bounds):
        yield tokens.view(dtype)[begin:end]


def _map(file: str) -> np.ndarray:
    """Map the bytes of a file; an empty file, which cannot be mapped, gives an empty array."""
    try:
        return np.memmap(file, np.uint8, "r") if Path(file).stat().st_size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error
