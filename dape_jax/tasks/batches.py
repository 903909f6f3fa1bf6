"""Batches of an algorithmic task; Grain prefetches training batches in a separate thread.

In: a `TaskConfig`. Out: the arrays of `tapes.make_tapes`, only this process's rows. Next: `dape_jax.training`.
"""

import dataclasses

import grain
import numpy as np

from dape_jax.errors import require
from dape_jax.sharding import rows_of_part
from dape_jax.tasks.tapes import TRAINING, VALIDATION, Batch, TaskConfig, draw_tapes

_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)


@dataclasses.dataclass(frozen=True, eq=False)
class _Batches(grain.sources.RandomAccessDataSource[Batch]):
    """Training batches by index; batch i depends only on the config, `longest`, the batch size and i."""

    config: TaskConfig
    longest: int
    batch_size: int
    part: int
    num_parts: int

    def __len__(self) -> int:
        return 2**40  # effectively endless

    def __getitem__(self, index: int) -> Batch:
        batch = draw_tapes(self.config, TRAINING, int(index), self.batch_size, longest=self.longest)
        return rows_of_part(batch, self.part, self.num_parts)


def train_batches(
    config: TaskConfig, *, longest: int, global_batch_size: int, shard_index: int, num_shards: int
) -> grain.DatasetIterator[Batch]:
    """Return an endless iterator of batches of fresh strings; each batch has one length, uniform in 1..longest.

    The iterator's state is the number of batches read, so that a run can resume with another number of processes.

    Args:
        config: task and strings.
        longest: largest N, in symbols.
        global_batch_size: rows of a batch over all processes; this process yields global_batch_size / num_shards.
        shard_index: index of this process.
        num_shards: number of processes that share the batch.

    Raises:
        InputError: the batch size is not a positive multiple of the number of processes.
    """
    require(
        global_batch_size > 0 and global_batch_size % num_shards == 0,
        "train.batch_size",
        global_batch_size,
        f"must be a positive multiple of the number of processes, {num_shards}",
    )
    source = _Batches(config, longest, global_batch_size, shard_index, num_shards)
    return iter(grain.MapDataset.source(source).to_iter_dataset(_READ_OPTIONS))


def validation_batches(config: TaskConfig, *, longest: int, batch_size: int, num_batches: int) -> list[Batch]:
    """Return the fixed validation batches; their lengths are evenly spaced and end with `longest`."""
    lengths = np.linspace(1, longest, num_batches + 1)[1:].round().astype(int)
    return [
        draw_tapes(config, VALIDATION, number, batch_size, length=int(length)) for number, length in enumerate(lengths)
    ]
