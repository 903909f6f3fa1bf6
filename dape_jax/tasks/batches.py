"""Batches of an algorithmic task; Grain prefetches training batches in a separate thread.

In: a `TaskConfig`. Out: the arrays of `tapes.make_tapes`, only this process's rows. Next: `dape_jax.training`.
"""

import grain
import numpy as np

from dape_jax.sharding import rows_of_part
from dape_jax.tasks.tapes import TRAINING, VALIDATION, Batch, TaskConfig, draw_tapes

_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)


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
    """

    def batch_of(index: int) -> Batch:
        batch = draw_tapes(config, TRAINING, index, global_batch_size, longest=longest)
        return rows_of_part(batch, shard_index, num_shards)

    endless = grain.MapDataset.range(2**40)  # batch i depends only on the arguments and i
    return iter(endless.map(batch_of).to_iter_dataset(_READ_OPTIONS))


def validation_batches(config: TaskConfig, *, longest: int, batch_size: int, num_batches: int) -> list[Batch]:
    """Return the fixed validation batches; their lengths are evenly spaced and end with `longest`."""
    lengths = np.linspace(1, longest, num_batches + 1)[1:].round().astype(int)
    return [
        draw_tapes(config, VALIDATION, number, batch_size, length=length)
        for number, length in enumerate(lengths.tolist())
    ]
