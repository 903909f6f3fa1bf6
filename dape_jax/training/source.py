"""Training data: a corpus or an algorithmic task. In: a run's config. Out: batches. Next: `loop.py`."""

import dataclasses
import logging
import math
from typing import Any

from jax.sharding import Mesh

from dape_jax.config import RunConfig, TaskRunConfig
from dape_jax.data.store import Corpus, DataConfig, find_corpus, open_corpus
from dape_jax.data.tokenizers import Tokenizer
from dape_jax.distributed import process_zero_first, process_zero_only
from dape_jax.errors import require
from dape_jax.sharding import BATCH_AXES, batch_part, rows_of_part
from dape_jax.tasks.tapes import Batch, digest

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """Input of the training loop; each process has its own rows of every batch."""

    batches: Any  # endless iterator over `Batch`; `get_state` returns its position as JSON values, `set_state` sets it
    validation: list[Batch]
    digest: str  # of the data; `config.json` records it
    tokenizer: Tokenizer | None  # of the corpus; None for a task


def open_source(run: RunConfig | TaskRunConfig, mesh: Mesh, verify: bool = False) -> Source:
    """Open the training data of a run. With `verify`, a corpus is read and checked even if its files are unchanged.

    Raises:
        InputError: the corpus is missing, too short or damaged, or its vocabulary is larger than the model's.
    """
    from dape_jax.data import batches as corpus_batches  # imported here: Grain takes 0.1 s to import
    from dape_jax.tasks import batches as task_batches

    train, (part, num_parts) = run.train, batch_part(mesh)
    shard = {"global_batch_size": train.batch_size, "shard_index": part, "num_shards": num_parts}
    sizes = {"batch_size": train.batch_size, "num_batches": train.validation_batches}
    if isinstance(run, TaskRunConfig):
        batches = task_batches.train_batches(run.data, longest=train.train_length, **shard)
        validation = task_batches.validation_batches(run.data, longest=train.train_length, **sizes)
        data_digest, tokenizer = digest(run.data), None
    else:
        corpus = process_zero_first(lambda: load_corpus(run.data, lossy=run.init.source is not None))
        process_zero_only(lambda: corpus.verify(full=verify))
        counts = [
            f"{n:,}" for store in (corpus.train, corpus.validation) for n in (store.num_documents, store.num_tokens)
        ]
        logger.info("text: %s documents (%s tokens) to train on, %s (%s tokens) held out", *counts)
        vocab_size, tokenizer = corpus.train.sidecar.vocab_size, corpus.train.tokenizer
        allowed = f"must be at least the tokenizer's {vocab_size}; --config.model.vocab_size=None selects it"
        require(vocab_size <= run.model.vocab_size, "model.vocab_size", run.model.vocab_size, allowed)
        packing = run.data.packing
        batches = corpus_batches.train_batches(
            corpus.train, train_length=train.train_length, seed=run.data.seed, packing=packing, **shard
        )
        multiple = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        validation = corpus_batches.validation_batches(
            corpus.validation, length=train.train_length, packing=packing, multiple=multiple, **sizes
        )
        data_digest = corpus.digest
    mine = [rows_of_part(batch, part, num_parts) for batch in validation]
    return Source(batches, mine, data_digest, tokenizer)


def load_corpus(config: DataConfig, lossy: bool = False) -> Corpus:
    """Open the prepared corpus at `data.path`; prepare raw text first, into `data.cache_dir`.

    Args:
        config: config of the corpus.
        lossy: accept a tokenizer that loses raw text, and log a warning with the number of documents that it changes.
            For an existing model, whose tokenizer cannot be chosen.

    Raises:
        InputError: there is no text, a split has no documents, the tokenizer is missing or differs from the prepared
            corpus's, or a store is damaged.
    """
    directory = find_corpus(config)
    if directory is None:
        from dape_jax.data.prepare.command import prepare_text  # imported here: training on a corpus needs none of it

        directory = prepare_text(config, lossy)
    return open_corpus(directory)
