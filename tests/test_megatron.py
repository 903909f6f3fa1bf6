"""Check that pairs in the published layout are read exactly; other files are rejected with file and field."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dape_jax.data.prepare import megatron
from dape_jax.data.prepare.megatron import open_indexed
from dape_jax.errors import InputError

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
Documents = list[list[list[int]]]  # documents of sequences of tokens

DOCUMENTS: Documents = [[[5, 6, 7]], [[1], [], [2, 3], [40_000]], [], [[]], [[9, 9]], []]


def write(prefix: Path, documents: Documents, dtype: str = "uint16") -> Path:
    """Write a pair as the official code's builder does."""
    sequences = [sequence for document in documents for sequence in document]
    sizes = [len(sequence) for sequence in sequences]
    tokens = b"".join(
        np.array(sequence, dtype).astype(f"<{np.dtype(dtype).str[1:]}").tobytes() for sequence in sequences
    )
    starts = [sum(sizes[:i]) * np.dtype(dtype).itemsize for i in range(len(sizes))]
    offsets = [sum(len(document) for document in documents[:i]) for i in range(len(documents) + 1)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(offsets))
    index += struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(starts)}q", *starts)
    index += struct.pack(f"<{len(offsets)}q", *offsets)
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(tokens)
    return prefix


def flattened(documents: Documents) -> list[list[int]]:
    return [[token for sequence in document for token in sequence] for document in documents]


def read(path: Path) -> list[list[int]]:
    dataset = open_indexed(path)
    documents = [dataset.document(i).tolist() for i in range(dataset.num_documents)]
    assert sum(map(len, documents)) == dataset.num_tokens
    return documents


# whole pairs


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(["uint16", "int32"]),
    documents=st.lists(st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=4), max_size=6),
)
def test_pairs_are_read_token_for_token(tmp_path_factory, dtype, documents):
    dataset = open_indexed(write(tmp_path_factory.getbasetemp() / "pair", documents, dtype))
    assert dataset.dtype == dtype
    assert dataset.num_documents == len(documents)
    found = [dataset.document(i) for i in range(dataset.num_documents)]
    assert [tokens.tolist() for tokens in found] == flattened(documents)
    assert all(tokens.dtype == dtype for tokens in found)


@pytest.mark.parametrize("dtype", CODES)
def test_every_integer_dtype_is_read(tmp_path, dtype):
    largest = int(np.iinfo(dtype).max)
    documents = [[[1, largest]], [[0]]]
    assert read(write(tmp_path / "pair", documents, dtype)) == flattened(documents)


@pytest.mark.parametrize("name", ["{}.bin", "{}.idx", "{}"])
@pytest.mark.parametrize("prefix", ["pile_text_document", "part.0"])
def test_a_pair_is_named_by_either_file_or_by_what_they_share(tmp_path, prefix, name):
    write(tmp_path / prefix, DOCUMENTS)
    assert read(tmp_path / name.format(prefix)) == flattened(DOCUMENTS)


def test_the_index_is_checked_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "_CHUNK", 2)
    documents = [[[i] * (i % 3)] * (i % 4) for i in range(20)]
    assert read(write(tmp_path / "pair", documents)) == flattened(documents)
    for sequence in range(sum(map(len, documents))):
        change_number(tmp_path / "pair", "starts", sequence, 1)
        with pytest.raises(InputError, match=f"start of sequence {sequence} = "):
            open_indexed(tmp_path / "pair")
        write(tmp_path / "pair", documents)


def test_a_pair_is_mapped(tmp_path):
    dataset = open_indexed(write(tmp_path / "pair", [[list(range(1000))] * 100], "int32"))
    assert isinstance(dataset.document(0), np.memmap)
    assert not dataset.document(0).flags.writeable


def test_documents_out_of_range_are_no_documents(tmp_path):
    dataset = open_indexed(write(tmp_path / "pair", DOCUMENTS))
    for index in (-1, len(DOCUMENTS)):
        with pytest.raises(IndexError, match=f"document {index} of {len(DOCUMENTS)}"):
            dataset.document(index)


# damaged pairs

NUM_SEQUENCES = len([sequence for document in DOCUMENTS for sequence in document])


def change_number(prefix: Path, array: str, index: int, by: int) -> None:
    """Add to a number of the index."""
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    num_sequences = struct.unpack_from("<Q", data, 18)[0]
    first = {"sizes": 34, "starts": 34 + 4 * num_sequences, "documents": 34 + 12 * num_sequences}[array]
    form = "<i" if array == "sizes" else "<q"
    place = first + index * struct.calcsize(form)
    struct.pack_into(form, data, place, struct.unpack_from(form, data, place)[0] + by)
    Path(f"{prefix}.idx").write_bytes(data)


def put(form: str, place: int, value: int | bytes) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        data = bytearray(Path(f"{prefix}.idx").read_bytes())
        struct.pack_into(form, data, place, value)
        Path(f"{prefix}.idx").write_bytes(data)

    return change


def number(array: str, index: int, by: int) -> Callable[[Path], None]:
    return lambda prefix: change_number(prefix, array, index, by)


def cut(suffix: str, size: int) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        file = Path(f"{prefix}{suffix}")
        data = file.read_bytes()
        file.write_bytes(data[:size] if size < len(data) else data + b"\0" * (size - len(data)))

    return change


REFUSED = {
    "other magic": (put("<9s", 0, b"TNTIDX\0\0\1"), r"pair\.idx: magic = b'TNTIDX"),
    "other version": (put("<Q", 9, 2), r"pair\.idx: version = 2: must be 1"),
    "no dtype": (put("<B", 17, 0), r"pair\.idx: dtype = 0: must be one of .*'uint16'"),
    "float": (put("<B", 17, 6), r"pair\.idx: dtype = 6"),
    "double": (put("<B", 17, 7), r"pair\.idx: dtype = 7"),
    "unknown dtype": (put("<B", 17, 9), r"pair\.idx: dtype = 9"),
    "wider dtype": (put("<B", 17, 4), r"pair\.idx: start of sequence 1 = 6: must be 12"),
    "more sequences": (put("<Q", 18, NUM_SEQUENCES + 1), r"pair\.idx: size = \d+: must be \d+ bytes for its 8 "),
    "sequences without end": (
        put("<Q", 18, 2**64 - 1),
        r"pair\.idx: size = \d+: must be \d+ bytes for its 18446744073709551615",
    ),
    "no documents": (put("<Q", 26, 0), r"pair\.idx: length of the document index = 0"),
    "documents without end": (put("<Q", 26, 2**61), r"pair\.idx: size = \d+: must be \d+ bytes"),
    "negative size": (number("sizes", 2, -1), r"pair\.idx: size of sequence 2 = -1: must be 0 or more"),
    "larger size": (number("sizes", 0, 1), r"pair\.idx: start of sequence 1 = 6: must be 8"),
    "larger last size": (number("sizes", NUM_SEQUENCES - 1, 1), r"pair\.bin: size = 18: must be 20 bytes .*pair\.idx"),
    "huge size": (number("sizes", 0, 2**31 - 10), r"pair\.idx: start of sequence 1 = 6"),
    "unaligned start": (number("starts", 1, 1), r"pair\.idx: start of sequence 1 = 7: must be 6"),
    "negative start": (number("starts", 0, -2), r"pair\.idx: start of sequence 0 = -2: must be 0"),
    "start outside": (number("starts", 4, 2**40), r"pair\.idx: start of sequence 4 = "),
    "index begins late": (number("documents", 0, 1), r"pair\.idx: document index = \(1, 7\)"),
    "index ends early": (number("documents", len(DOCUMENTS), -1), r"pair\.idx: document index"),
    "index ends late": (number("documents", len(DOCUMENTS), 1), r"pair\.idx: document index = \(0, 8\)"),
    "index decreases": (number("documents", 1, 6), r"pair\.idx: document index = 'decreasing'"),
    "index is negative": (number("documents", 1, -9), r"pair\.idx: document index = 'decreasing'"),
    "cut header": (cut(".idx", 20), r"pair\.idx: size = 20: must be at least the 34"),
    "empty index": (cut(".idx", 0), r"pair\.idx: size = 0: must be at least the 34"),
    "cut index": (cut(".idx", 90), r"pair\.idx: size = 90"),
    "longer index": (cut(".idx", 1000), r"pair\.idx: size = 1000"),
    "cut tokens": (cut(".bin", 16), r"pair\.bin: size = 16: must be 18 bytes"),
    "half a token": (cut(".bin", 17), r"pair\.bin: size = 17: must be 18 bytes"),
    "no tokens": (cut(".bin", 0), r"pair\.bin: size = 0: must be 18 bytes"),
    "longer tokens": (cut(".bin", 20), r"pair\.bin: size = 20: must be 18 bytes"),
    "missing index": (lambda prefix: Path(f"{prefix}.idx").unlink(), r"pair\.idx: cannot be read"),
    "missing tokens": (lambda prefix: Path(f"{prefix}.bin").unlink(), r"pair\.bin: cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_pair_is_refused_by_file_and_field(tmp_path, case):
    change, words = REFUSED[case]
    prefix = write(tmp_path / "pair", DOCUMENTS)
    assert read(prefix) == flattened(DOCUMENTS)
    change(prefix)
    with pytest.raises(InputError, match=words) as refused:
        open_indexed(prefix)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("path", ["", "/", ".", "a\0b", "/nowhere/pair.bin"])
def test_other_files_are_refused(path):
    with pytest.raises(InputError, match="cannot be read"):
        open_indexed(Path(path))


def test_a_directory_is_refused(tmp_path):
    (tmp_path / "pair.idx").mkdir()
    with pytest.raises(InputError, match=r"pair\.idx: cannot be read"):
        open_indexed(tmp_path / "pair")


def test_a_wrong_count_takes_no_memory(tmp_path):
    """Sparse files of terabytes with a matching header are rejected after the first piece."""
    prefix = tmp_path / "pair"
    num_sequences, num_offsets = 2**37, 2**37
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 5, num_sequences, num_offsets)
    with open(f"{prefix}.idx", "wb") as index, open(f"{prefix}.bin", "wb") as tokens:
        index.write(header + struct.pack("<i", 2**31 - 1) * 8)
        index.truncate(len(header) + 12 * num_sequences + 8 * num_offsets)
        tokens.truncate(2**42)
    with pytest.raises(InputError, match="start of sequence 1 = 0: must be 17179869176"):
        open_indexed(prefix)


numbers = st.one_of(st.integers(-3, 20), st.integers(-(2**63), 2**63 - 1)).map(lambda number: struct.pack("<q", number))


@settings(max_examples=400, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["uint16", "int32"]), suffix=st.sampled_from([".idx", ".idx", ".bin"]))
def test_mutated_pairs_are_valid_or_refused(tmp_path_factory, data, dtype, suffix):
    prefix = write(tmp_path_factory.getbasetemp() / "mutated", DOCUMENTS, dtype)
    file = Path(f"{prefix}{suffix}")
    written = bytearray(file.read_bytes())
    begin, length = data.draw(st.integers(0, len(written))), data.draw(st.sampled_from([0, 1, 2, 4, 8]))
    written[begin : begin + length] = data.draw(st.one_of(st.binary(max_size=8), numbers))
    file.write_bytes(written)
    try:
        documents = read(prefix)
    except InputError as error:
        refused = str(error)
        assert refused.splitlines() == [refused]
        assert str(prefix) in refused
        return
    assert len(documents) == open_indexed(prefix).num_documents
