"""Training data: a corpus or an algorithmic task. In: a run's config. Out: batches. Next: `loop.py`."""

import dataclasses
import functools
import logging
import math
from typing import Any

from jax.sharding import Mesh

from dape_jax.config import RunConfig, TaskRunConfig
from dape_jax.data.store import Corpora, DataConfig, find_corpus, verify_stores
from dape_jax.data.tokenizers import TOKENIZER_FILE, Bytes, Tokenizer
from dape_jax.distributed import process_zero_only
from dape_jax.errors import require
from dape_jax.sharding import BATCH_AXES, batch_part, rows_of_part
from dape_jax.tasks.tapes import Batch, digest

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """Input of the training loop; each process has its own rows of every batch."""

    batches: Any  # endless iterator over `Batch`; `get_state` returns its position as JSON values, `set_state` sets it
    validation: dict[str, list[Batch]]  # by the path of their text, or by the task
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
    shard: dict[str, Any] = {"global_batch_size": train.batch_size, "shard_index": part, "num_shards": num_parts}
    sizes: dict[str, Any] = {"batch_size": train.batch_size, "num_batches": train.validation_batches}
    if isinstance(run, TaskRunConfig):
        batches = task_batches.train_batches(run.data, longest=train.train_length, **shard)
        validation = {run.data.task: task_batches.validation_batches(run.data, longest=train.train_length, **sizes)}
        data_digest, tokenizer = digest(run.data), None
    else:
        load = functools.partial(load_corpora, run.data, lossy=run.init.source is not None)
        corpora = process_zero_only(load) or load()  # the first prepares raw text, the others open the result
        process_zero_only(lambda: verify_stores(corpora.stores("all"), verify))
        train_stores, held_out = corpora.stores("train"), corpora.stores("validation")
        for path, store in corpora.train.items():
            require(store.num_documents > 0, run.data.fields[path], path, "must have documents to train on")
        path, field = [*run.data.fields.items()][-1]  # validation_path, if it is given
        advice = "has no documents for validation; name a text that has some, --config.data.validation_path=TEXT"
        require(bool(held_out), field, path, advice)
        fields = ("num_documents", "num_tokens")
        counts = [sum(getattr(x, field) for x in stores) for stores in (train_stores, held_out) for field in fields]
        logger.info("text: %s documents (%s tokens) to train on, %s (%s tokens) held out", *map("{:,}".format, counts))
        vocab_size, tokenizer = train_stores[0].sidecar.vocab_size, train_stores[0].tokenizer
        allowed = f"must be at least the tokenizer's {vocab_size}; --config.model.vocab_size=None selects it"
        require(vocab_size <= run.model.vocab_size, "model.vocab_size", run.model.vocab_size, allowed)
        weights, packing = list(corpora.weights.values()), run.data.packing
        shard |= {"train_length": train.train_length, "seed": run.data.seed, "packing": packing}
        batches = corpus_batches.train_batches(*train_stores, weights=weights, **shard)
        multiple = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        sizes |= dict(length=train.train_length, packing=packing, multiple=multiple, parts=train.accumulation_steps)
        validation = {
            path: corpus_batches.validation_batches(store, **sizes)
            for path, store in corpora.validation.items()
            if store.num_documents
        }
        data_digest = corpora.digest
    mine = {path: [rows_of_part(batch, part, num_parts) for batch in batches] for path, batches in validation.items()}
    return Source(batches, mine, data_digest, tokenizer)


def load_corpora(config: DataConfig, lossy: bool = False) -> Corpora:
    """Open the corpora at `data.path` or of the mixture, and at `data.validation_path`.

    Raw text is prepared first, into `data.cache_dir`. With `lossy`, a tokenizer may change it, with a warning that
    counts the changed documents: for an existing model, whose tokenizer cannot be chosen. With `data.validation_path`,
    all documents of other raw text are trained on; files that both paths name are held out.

    Raises:
        InputError: there is no text, a split has no documents, a store is damaged, or the texts do not have the same
            tokenizer, by default that of a prepared corpus.
    """
    allowed = "must be the path of text or of a corpus: this model was imported, and its training text is unknown"
    require(bool(config.weights), "data.path", config.path, allowed)
    fields, held_out = config.fields, config.validation_path
    found = {path: find_corpus(path, config, name) for path, name in fields.items()}
    corpora = {path: corpus for path, corpus in found.items() if corpus is not None}
    if config.document_separator and len(corpora) == len(found):
        unused = "data.document_separator = %r: not used: dape-prepare --document_separator divides text of a corpus"
        logger.warning(unused, config.document_separator)
    if config.tokenizer is None and corpora:
        names = {path: corpus.train.sidecar.tokenizer for path, corpus in corpora.items()}
        field, *_ = fields.values()
        require(len(set(names.values())) == 1, field, names, "must have been prepared with the same tokenizer")
        file = next(iter(corpora.values())).train.directory / TOKENIZER_FILE
        config = dataclasses.replace(config, tokenizer=str(file) if file.exists() else Bytes.name)
    for path, name in fields.items():
        if path not in corpora:
            from dape_jax.data.prepare.command import prepare_text  # imported here: a prepared corpus needs none of it

            raw = config
            if held_out is not None:
                others = held_out if path != held_out and found[held_out] is None else None
                fraction = 1.0 if path == held_out else 0.0
                raw = dataclasses.replace(config, validation_path=others, validation_fraction=fraction)
            corpora[path] = prepare_text(path, raw, lossy, name)
    train = {path: corpora[path].train for path in config.weights}
    validation = {path: corpora[path].validation for path in (config.weights if held_out is None else [held_out])}
    return Corpora(train, validation, config.weights)
