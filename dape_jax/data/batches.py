"""Token store -> batches of windows or of packed documents, through Grain.

In: a `TokenStore`, or several with weights. Out: {"inputs": int32[B, T], "targets": int32[B, T], ..} in host memory,
only this process's rows. Next: `dape_jax.training`, which places them on the devices, and `dape_jax.evaluation`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import grain
import numpy as np
from grain.experimental import ElasticIterator
from jaxtyping import Int64, Num

from dape_jax.data.store import TokenStore
from dape_jax.errors import require

Window = dict[str, Num[np.ndarray, "T"]]
Batch = dict[str, Num[np.ndarray, "B T"]]

# Grain's defaults, 16 threads and 500 prefetched batches, can use gigabytes and are slower on a memory map.
_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


@dataclasses.dataclass(frozen=True, eq=False)
class Windows(grain.sources.RandomAccessDataSource[Window]):
    """Token store as non-overlapping windows of T inputs with their targets: the tokens one position later.

    Documents are concatenated as in GPT-NeoX: a window may contain the end of one and the beginning of the next,
    separated by end_of_document (#). With T = 4, the first three windows of the documents "abcde", "xyz", ...:

        stream        a b c d e # x y z # ...
        inputs   0    a b c d
        targets  0      b c d e
        inputs   1            e # x y
        targets  1              # x y z
        inputs   2                    z # ...

    Every token is a target exactly once, except the store's first token and its last tokens (fewer than T).
    """

    store: TokenStore
    length: int

    def __len__(self) -> int:
        return (self.store.num_tokens - 1) // self.length  # the last target needs one more token

    def __getitem__(self, index: int) -> Window:
        start = index * self.length
        tokens = self.store.tokens[start : start + self.length + 1].astype(np.int32)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}


@dataclasses.dataclass(frozen=True, eq=False)
class PackedDocuments(grain.sources.RandomAccessDataSource[Window]):
    """Token store as rows of T positions with whole documents that do not see each other.

    A row also has the `segment_ids` of its documents (from 1; 0 for padding), with which the
    model restarts positions at each, and the loss `weights` (0 for padding). The last target of a document is its
    end_of_document (#). With T = 8, a row of "abcde" and "xy":

        inputs       a b c d e x y .
        targets      b c d e # y # .
        segment_ids  1 1 1 1 1 2 2 0
        weights      1 1 1 1 1 1 1 0

    A document of more than T tokens is cut into pieces of T and a rest, which count as documents. Every token but the
    first of each document is a target exactly once. Rests are packed longest first, each into the row with the least
    space that suffices (best fit decreasing). Which documents share a row depends only on the store and T.
    """

    store: TokenStore
    length: int

    @functools.cached_property
    def _rows(self) -> tuple[Int64[np.ndarray, "pieces"], Int64[np.ndarray, "pieces"], Int64[np.ndarray, "bounds"]]:
        """Start and length of every piece, ordered by row, and the first piece of every row, with one more bound."""
        starts, sizes = self.store.offsets[:-1], np.diff(self.store.offsets) - 1
        whole, rests = sizes // self.length, sizes % self.length
        document = np.repeat(np.arange(len(sizes)), whole)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(whole) - whole, whole)
        has_rest = rests > 0
        starts = np.concatenate([starts[document] + nth * self.length, (starts + whole * self.length)[has_rest]])
        sizes = np.concatenate([np.full(len(document), self.length), rests[has_rest]])
        rows = np.concatenate([np.arange(len(document)), len(document) + _best_fit(rests[has_rest], self.length)])
        order = np.argsort(rows, kind="stable")
        return starts[order], sizes[order], np.append(np.flatnonzero(np.diff(rows[order], prepend=-1)), len(order))

    def __len__(self) -> int:
        return len(self._rows[2]) - 1

    def __getitem__(self, index: int) -> Window:
        starts, sizes, bounds = self._rows
        row: dict[str, np.ndarray] = {
            name: np.zeros(self.length, np.int32) for name in ("inputs", "targets", "segment_ids")
        }
        row["weights"] = np.zeros(self.length, np.float32)
        begin = 0
        for segment, piece in enumerate(range(bounds[index], bounds[index + 1]), 1):
            tokens = self.store.tokens[starts[piece] : starts[piece] + sizes[piece] + 1]
            place = slice(begin, begin + int(sizes[piece]))
            row["inputs"][place], row["targets"][place] = tokens[:-1], tokens[1:]
            row["segment_ids"][place], row["weights"][place] = segment, 1
            begin = place.stop
        return row


def _best_fit(sizes: Int64[np.ndarray, "pieces"], room: int) -> Int64[np.ndarray, "pieces"]:
    """Return the row of every piece; pieces of a row have at most `room` in total."""
    rows, num_rows = np.zeros(len(sizes), np.int64), 0
    rows_with: dict[int, list[int]] = {}  # space -> rows with this much
    spaces = 0  # bit i is set if there is a row with space i
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        if fitting := spaces >> size:
            space = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[space].pop()
            spaces ^= 0 if rows_with[space] else 1 << space
        else:
            space, row, num_rows = room, num_rows, num_rows + 1
        rows[piece] = row
        if space > size:
            rows_with.setdefault(space - size, []).append(row)
            spaces |= 1 << (space - size)
    return rows


def train_batches(
    *stores: TokenStore,
    weights: Sequence[float] = (1.0,),
    train_length: int,
    global_batch_size: int,
    seed: int,
    shard_index: int,
    num_shards: int,
    packing: str = "stream",
) -> grain.DatasetIterator[Batch]:
    """Return endless shuffled batches: every window or row once per epoch, in a new order in each epoch.

    Several stores are mixed: each gives the share of the windows that its weight has in `weights`, to 1 %, and has its
    own epochs. `packing` is "stream" for `Windows`, as in the paper, or "documents" for `PackedDocuments`.

    The iterator's complete state, `get_state()` -> {"global_next_index": N}, is the number of windows that all
    processes together have read. It is the same on all processes, and `set_state` resumes exactly, also with another
    number of processes or another batch size. The caller must keep the stores, the weights, the length T and the seed.

    `global_batch_size` is the number of rows over all processes. This process, `shard_index` of `num_shards`, yields
    global_batch_size / num_shards of them.

    Raises:
        InputError: a store is shorter than one window.
    """
    # seed().shuffle(), not shuffle(seed): Grain shuffles epoch e with seed + e, so epoch 2 of seed 0 would equal
    # epoch 1 of seed 1; seed() hashes the seed first.
    parts = [
        grain.MapDataset.source(_windows(store, train_length, packing)).seed(seed).shuffle().repeat()
        for store in stores
    ]
    dataset = parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, weights)
    shard = grain.sharding.ShardOptions(shard_index=shard_index, shard_count=num_shards)
    return iter(ElasticIterator(dataset, global_batch_size, shard, read_options=_READ_OPTIONS))


def validation_batches(
    store: TokenStore, *, length: int, batch_size: int, num_batches: int, packing: str, multiple: int, parts: int = 1
) -> list[Batch]:
    """Return full batches of windows evenly spaced over the store, in order; the same batches in every run.

    T = `length` may be longer than in training. There are `num_batches`, or fewer if the store is too small. With fewer
    windows than `batch_size` there is one batch of all windows. Its last rows repeat the last window, with loss
    `weights` of 0, if the number of rows would not be a multiple of `multiple`. Each batch is divided into `parts`
    batches, or a small one into fewer.

    Raises:
        InputError: the store is shorter than one window.
    """
    windows = _windows(store, length, packing)
    num_windows = min(num_batches, len(windows) // batch_size) * batch_size or len(windows)
    spread = np.arange(num_windows) * len(windows) // num_windows
    size = batch_size // parts
    num_padding = -num_windows % (size if num_windows > size else multiple)
    rows = [windows[index] for index in spread.tolist()]
    if num_padding:
        rows = [{"weights": np.ones(length, np.float32)} | row for row in rows]
        rows += [rows[-1] | {"weights": np.zeros(length, np.float32)}] * num_padding
    size = min(size, len(rows))
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [{name: np.stack([row[name] for row in batch]) for name in batch[0]} for batch in batches]


def _windows(store: TokenStore, length: int, packing: str) -> Windows | PackedDocuments:
    windows = PackedDocuments(store, length) if packing == "documents" else Windows(store, length)
    allowed = f"must be at most {store.num_tokens - 1}: {store.directory} has {store.num_tokens} tokens"
    require(len(windows) > 0, "train.train_length", length, allowed)
    return windows
