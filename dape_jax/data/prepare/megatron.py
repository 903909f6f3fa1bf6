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
"""

import itertools
import os
import struct
from collections.abc import Iterator

import numpy as np
from jaxtyping import Integer

from dape_jax.errors import InputError, require

MAGIC, VERSION = b"MMIDIDX\0\0", 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floating-point

_HEADER = struct.Struct("<9sQBQQ")


def read_documents(path: str) -> Iterator[Integer[np.ndarray, "_"]]:
    """Yield the tokens of each document of the pair `x.bin`, `x.idx`, not checked against a vocabulary.

    Raises:
        InputError: a file is missing, damaged or of another kind.
    """
    prefix, _ = os.path.splitext(path)
    try:
        raw, tokens = (np.memmap(f"{prefix}{suffix}", np.uint8, "r") for suffix in (".idx", ".bin"))
        magic, version, code, num_sequences, num_offsets = _HEADER.unpack_from(raw.data)
    except (OSError, ValueError, struct.error) as error:
        raise InputError(f"{prefix}: .bin and .idx must be a pair of Megatron-LM's; cannot be read: {error}") from error
    header, allowed = (magic, version, code), f"must be {MAGIC!r}, {VERSION} and one of {DTYPES}"
    is_index = (magic, version) == (MAGIC, VERSION) and code in DTYPES
    require(is_index, f"{prefix}.idx: magic, version, dtype", header, allowed)
    dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    # Python's integers cannot overflow, so nothing is mapped before the two counts are known to fit.
    ends = [_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_offsets]
    require(raw.size == sum(ends) and num_offsets > 0, f"{prefix}.idx: size", raw.size, f"must be {sum(ends)}")
    _, sizes, starts, documents = np.split(raw, np.cumsum(ends)[:-1])
    sizes, starts, documents = sizes.view("<i4"), starts.view("<i8"), documents.view("<i8")
    expected = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64) * dtype.itemsize])
    is_whole = bool(np.all(sizes >= 0)) and np.array_equal(starts, expected[:-1])
    require(is_whole, f"{prefix}.idx: sequences", "sizes and starts", "must fit: each begins where the last ends")
    require(tokens.size == expected[-1], f"{prefix}.bin: size", tokens.size, f"must be {expected[-1]}, as in the .idx")
    is_whole = documents[0] == 0 and documents[-1] == num_sequences and bool(np.all(np.diff(documents) >= 0))
    require(is_whole, f"{prefix}.idx: documents", documents[[0, -1]].tolist(), f"must go from 0 to {num_sequences}")
    for begin, end in itertools.pairwise(expected[documents] // dtype.itemsize):
        yield tokens.view(dtype)[begin:end]
