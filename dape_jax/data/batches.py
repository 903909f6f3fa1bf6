"""Token store -> batches of windows, through Grain.

In: a `TokenStore`. Out: {"inputs": int32[B, T], "targets": int32[B, T]} in host memory, only this process's rows.
Next: `dape_jax.training`, which places them on the devices, and `dape_jax.evaluation`.
"""

import dataclasses

import grain
import numpy as np
from grain.experimental import ElasticIterator
from jaxtyping import Int32

from dape_jax.data.store import TokenStore
from dape_jax.errors import require

Window = dict[str, Int32[np.ndarray, "T"]]
Batch = dict[str, Int32[np.ndarray, "B T"]]

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
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        tokens = self.store.tokens[start : start + self.length + 1].astype(np.int32)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}


def train_batches(
    store: TokenStore, *, train_length: int, global_batch_size: int, seed: int, shard_index: int, num_shards: int
) -> grain.DatasetIterator[Batch]:
    """Return endless shuffled batches: every window once per epoch, in a new order in each epoch.

    The iterator's complete state, `get_state()` -> {"global_next_index": N}, is the number of windows that all
    processes together have read. It is the same on all processes, and `set_state` resumes exactly, also with another
    number of processes or another batch size. The caller must keep the store, the length T and the seed the same.

    `global_batch_size` is the number of rows over all processes. This process, `shard_index` of `num_shards`, yields
    global_batch_size / num_shards of them.

    Raises:
        InputError: a size is invalid, or the store is shorter than one window.
    """
    windows = _windows(store, train_length)
    require(0 <= seed < 2**32, "data.seed", seed, "must be 0 to 2**32 - 1")
    require(num_shards > 0, "num_shards", num_shards, "must be at least 1")
    require(0 <= shard_index < num_shards, "shard_index", shard_index, f"must be 0 to {num_shards - 1}")
    require(
        global_batch_size > 0 and global_batch_size % num_shards == 0,
        "train.batch_size",
        global_batch_size,
        f"must be a positive multiple of the number of processes, {num_shards}",
    )
    # seed().shuffle(), not shuffle(seed): Grain shuffles epoch e with seed + e, so epoch 2 of seed 0 would equal
    # epoch 1 of seed 1; seed() hashes the seed first.
    dataset = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    shard = grain.sharding.ShardOptions(shard_index=shard_index, shard_count=num_shards)
    return iter(ElasticIterator(dataset, global_batch_size, shard, read_options=_READ_OPTIONS))


def validation_batches(store: TokenStore, *, length: int, batch_size: int, num_batches: int) -> list[Batch]:
    """Return full batches of windows evenly spaced over the store, in order; the same batches in every run.

    T = `length` may be longer than in training. There are `num_batches`, or fewer if the store is too small.

    Raises:
        InputError: a size is invalid, or the store is shorter than one batch.
    """
    windows = _windows(store, length)
    require(num_batches > 0, "num_batches", num_batches, "must be at least 1")
    require(
        0 < batch_size <= len(windows),
        "train.batch_size",
        batch_size,
        f"must be 1 to {len(windows)}, the number of windows of length {length} in {store.directory}",
    )
    num_windows = min(num_batches, len(windows) // batch_size) * batch_size
    spread = np.arange(num_windows) * len(windows) // num_windows
    batches = [[windows[index] for index in indices] for indices in spread.reshape(-1, batch_size).tolist()]
    return [{name: np.stack([row[name] for row in rows]) for name in ("inputs", "targets")} for rows in batches]


def _windows(store: TokenStore, length: int) -> Windows:
    field = "train.train_length"
    require(length > 0, field, length, "must be at least 1")
    windows = Windows(store, length)
    require(
        len(windows) > 0,
        field,
        length,
        f"must be at most {store.num_tokens - 1}: {store.directory} has {store.num_tokens} tokens",
    )
    return windows
