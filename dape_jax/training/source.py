"""What a run is trained on: a corpus, or a task that has no end. In: its config. Out: batches. Next: `loop.py`."""

import dataclasses

import grain
import jax
from jax.sharding import Mesh

from dape_jax.config import RunConfig, TaskRunConfig
from dape_jax.data import batches as of_corpus
from dape_jax.data.store import Corpus, DataConfig, load_corpus
from dape_jax.data.tokenizers import Tokenizer
from dape_jax.distributed import process_zero_first
from dape_jax.errors import require
from dape_jax.sharding import batch_part, rows_of_part
from dape_jax.tasks import batches as of_task
from dape_jax.tasks.tapes import Batch, digest


@dataclasses.dataclass(frozen=True)
class Source:
    """What the training loop reads.

    Args:
        batches: endless, with `get_state` and `set_state`; this process's rows.
        held_out: the batches of a validation; this process's rows.
        digest: what a checkpoint records to know the data again.
        tokenizer: of text; None for a task.
    """

    batches: grain.DatasetIterator[Batch]
    validation: list[Batch]
    digest: str
    tokenizer: Tokenizer | None


def open_source(run: RunConfig | TaskRunConfig, mesh: Mesh) -> Source:
    """Open what a run is trained on.

    Raises:
        InputError: no such text, text that is too short, or damaged, or a vocabulary that the model has no rows for.
    """
    return _task(run, mesh) if isinstance(run, TaskRunConfig) else _corpus(run, mesh)


def _corpus(run: RunConfig, mesh: Mesh) -> Source:
    corpus = process_zero_first(lambda: load_verified(run.data))
    require(
        corpus.train.sidecar.vocab_size <= run.model.vocab_size,
        "model.vocab_size",
        run.model.vocab_size,
        f"at least the tokenizer's {corpus.train.sidecar.vocab_size}",
    )
    part, num_parts = batch_part(mesh)
    batches = of_corpus.train_batches(
        corpus.train,
        train_length=run.train.train_length,
        global_batch_size=run.train.batch_size,
        seed=run.data.seed,
        shard_index=part,
        num_shards=num_parts,
    )
    validation = of_corpus.validation_batches(
        corpus.validation,
        length=run.train.train_length,
        batch_size=run.train.batch_size,
        num_batches=run.train.validation_batches,
    )
    mine = [rows_of_part(batch, part, num_parts) for batch in validation]
    return Source(batches, mine, corpus.digest, corpus.train.tokenizer)


def _task(run: TaskRunConfig, mesh: Mesh) -> Source:
    longest, (part, num_parts) = run.train.train_length, batch_part(mesh)
    batches = of_task.train_batches(
        run.data, longest=longest, global_batch_size=run.train.batch_size, shard_index=part, num_shards=num_parts
    )
    validation = of_task.validation_batches(
        run.data, longest=longest, batch_size=run.train.batch_size, num_batches=run.train.validation_batches
    )
    return Source(batches, [rows_of_part(batch, part, num_parts) for batch in validation], digest(run.data), None)


def load_verified(config: DataConfig) -> Corpus:
    """The corpus, whose every byte process 0 has read and compared with its digest."""
    corpus = load_corpus(config)
    if jax.process_index() == 0:
        corpus.train.verify()
        corpus.validation.verify()
    return corpus
