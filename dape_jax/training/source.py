"""Training data: a corpus or an algorithmic task. In: a run's config. Out: batches. Next: `loop.py`."""

import dataclasses

import grain
import jax
from jax.sharding import Mesh

from dape_jax.config import RunConfig, TaskRunConfig
from dape_jax.data import batches as corpus_batches
from dape_jax.data.store import Corpus, DataConfig, load_corpus
from dape_jax.data.tokenizers import Tokenizer
from dape_jax.distributed import process_zero_first
from dape_jax.errors import require
from dape_jax.sharding import batch_part, rows_of_part
from dape_jax.tasks import batches as task_batches
from dape_jax.tasks.tapes import Batch, digest


@dataclasses.dataclass(frozen=True)
class Source:
    """Input of the training loop.

    Args:
        batches: infinite iterator over this process's rows, with `get_state` and `set_state`.
        validation: this process's rows of the validation batches.
        digest: digest of the data, which the run's config records.
        tokenizer: tokenizer of the corpus, or None for a task.
    """

    batches: grain.DatasetIterator[Batch]
    validation: list[Batch]
    digest: str
    tokenizer: Tokenizer | None


def open_source(run: RunConfig | TaskRunConfig, mesh: Mesh) -> Source:
    """Open the training data of a run.

    Raises:
        InputError: the corpus is missing, too short or damaged, or its vocabulary is larger than the model's.
    """
    return _task(run, mesh) if isinstance(run, TaskRunConfig) else _corpus(run, mesh)


def _corpus(run: RunConfig, mesh: Mesh) -> Source:
    corpus = process_zero_first(lambda: load_verified(run.data))
    require(
        corpus.train.sidecar.vocab_size <= run.model.vocab_size,
        "model.vocab_size",
        run.model.vocab_size,
        f"must be at least the tokenizer's {corpus.train.sidecar.vocab_size}",
    )
    part, num_parts = batch_part(mesh)
    batches = corpus_batches.train_batches(
        corpus.train,
        train_length=run.train.train_length,
        global_batch_size=run.train.batch_size,
        seed=run.data.seed,
        shard_index=part,
        num_shards=num_parts,
    )
    validation = corpus_batches.validation_batches(
        corpus.validation,
        length=run.train.train_length,
        batch_size=run.train.batch_size,
        num_batches=run.train.validation_batches,
    )
    mine = [rows_of_part(batch, part, num_parts) for batch in validation]
    return Source(batches, mine, corpus.digest, corpus.train.tokenizer)


def _task(run: TaskRunConfig, mesh: Mesh) -> Source:
    longest, (part, num_parts) = run.train.train_length, batch_part(mesh)
    batches = task_batches.train_batches(
        run.data, longest=longest, global_batch_size=run.train.batch_size, shard_index=part, num_shards=num_parts
    )
    validation = task_batches.validation_batches(
        run.data, longest=longest, batch_size=run.train.batch_size, num_batches=run.train.validation_batches
    )
    return Source(batches, [rows_of_part(batch, part, num_parts) for batch in validation], digest(run.data), None)


def load_verified(config: DataConfig) -> Corpus:
    """Return the corpus, after process 0 has compared all its bytes with their digest."""
    corpus = load_corpus(config)
    if jax.process_index() == 0:
        corpus.train.verify()
        corpus.validation.verify()
    return corpus
