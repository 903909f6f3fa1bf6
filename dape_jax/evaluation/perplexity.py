"""Perplexity by length, after the paper's protocol. In: workdirs of language models. Out: files, by `report.py`.

The whole N-token sequence is processed and its last tokens are scored. Sequences of every length end at the same places
of the same documents, so lengths differ in how much context there is, not in what is predicted:

    document   . . . . . . . . . . . . . . . . e          e: where a window ends
    N = 4                      [i i i i]                  inputs; the target of each is the token after it
    N = 8              [i i i i i i i i]
    scored                          t t                   the last 2 targets, the same for both

Appendix A of the paper measures the gain from the context before the last T_train tokens: their perplexity given only
those tokens, minus their perplexity given all N (equation 6). The first is the perplexity at length T_train with all
targets scored, because sequences of all lengths end at the same places.

Reading order: `evaluate`, then the functions in the order in which it calls them.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Float64, Int

from dape_jax.config import RunConfig
from dape_jax.data.store import Corpus, TokenStore
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.evaluation.options import PerplexityOptions
from dape_jax.evaluation.programs import Program, batch_size_at, compile_programs, model_at, run_in_batches
from dape_jax.evaluation.statistics import delta_result, length_result, perplexity_of, positions_result
from dape_jax.evaluation.trained import (
    TrainedModel,
    read_models,
    read_trained,
    require_same,
    restore_current,
    validation_corpus,
)
from dape_jax.model.positions import Rope
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.progress import Progress
from dape_jax.provenance import make_results_directory
from dape_jax.sharding import MeshConfig, check_mesh, make_mesh
from dape_jax.storage import AnyPath
from dape_jax.training.step import abstract_params, make_nll_step

logger = logging.getLogger(__name__)

NllByLength = dict[int, Float64[np.ndarray, "windows scored"]]  # nats, of the scored tokens of every window


@dataclasses.dataclass(frozen=True)
class ScoredWindow:
    """Place in a document where sequences of all lengths end: the token at `end - 1` is the last target."""

    document: int
    end: int

    def tokens(self, store: TokenStore, length: int) -> Int[np.ndarray, "N"]:
        """Return the N = `length` + 1 tokens of a sequence: its inputs, then the last target."""
        return store.document(self.document)[self.end - length - 1 : self.end].astype(np.int32)


def evaluate(
    workdirs: Sequence[AnyPath],
    options: PerplexityOptions = PerplexityOptions(),
    *,
    mesh: MeshConfig | None = None,
    output: AnyPath | None = None,
    show: report.Show | None = None,
) -> report.ReportPaths:
    """Evaluate one checkpoint of every workdir and write one comparison: `lengths.*`, `delta.*` or `positions.*`.

    Args:
        workdirs: run directories with different names.
        options: what to measure.
        mesh: mesh of the devices; by default sequences are spread over all. With `context`, devices share a sequence.
        output: directory of the results; by default the workdir, or the longest path common to all workdirs.
        show: called with the table, before anything is written.

    Raises:
        InputError: before any parameters are read, for bad input, a text that differs from its digest, or a length that
            does not fit into memory; later, if a checkpoint cannot be read or a directory cannot be written to.
    """
    models = read_models(read_trained, workdirs, options, mesh, "lengths", "last_tokens", "max_windows")
    if options.kind == "delta":
        require_same(models, "train.train_length")
    models = [with_protocol(model, options.kind) for model in models]
    variants = rotary_variants(models, options.rotary)
    for model in models:
        check_lengths(model)
    require_same(models, "evaluation.lengths", "evaluation.last_tokens", "evaluation.max_windows")

    corpus = common_corpus(models, options.data)
    store, evaluation = corpus.validation, models[0].run.evaluation
    windows = choose_windows(store, max(evaluation.lengths), evaluation.max_windows)

    directory = make_results_directory(output or report.common_directory(workdirs))
    # Compile everything before reading parameters, so that a length that does not fit is refused early.
    programs = [
        {rotary: compile_lengths(model, rotary, len(windows)) for rotary in chosen}
        for model, chosen in zip(models, variants, strict=True)
    ]
    results = []
    for model, by_rotary in zip(models, programs, strict=True):
        model, mesh_of_model, params = restore_current(model)
        for rotary, compiled in by_rotary.items():
            nll = score_windows(compiled, params, mesh_of_model, store, windows, variant_name(model, rotary))
            warn_of_divergence(variant_name(model, rotary), nll)
            results.append(summarise(options.kind, model, rotary, corpus.digest, windows, nll))
        del params  # before the next model's are read
    return report.WRITERS[options.kind](results, directory, show)


# ---- models, variants and corpora


def _text_of(model: TrainedModel[RunConfig], corpus: Corpus, data: str | None) -> str:
    return f"{data or model.run.data.path} as {corpus.validation.sidecar.tokenizer}"


def validation_corpora(models: Sequence[TrainedModel[RunConfig]], data: str | None) -> list[Corpus]:
    """Return the corpus of each model; see `validation_corpus`. Imported models get that of the first trained one.

    Raises:
        InputError: a corpus cannot be read, or all models are imported, and `data` is None.
    """
    first = next((model for model in models if model.run.data.path is not None), models[0])
    corpora = []
    for model in models:
        if model.run.data.path is None:  # imported: text and split of `first`, with this model's tokenizer
            config = dataclasses.replace(first.run.data, tokenizer=model.run.data.tokenizer)
            model = dataclasses.replace(
                model, run=dataclasses.replace(model.run, data=config), data_digest=first.data_digest
            )
        corpora.append(validation_corpus(model, data))
    return corpora


def common_corpus(models: Sequence[TrainedModel[RunConfig]], data: str | None) -> Corpus:
    """Return the corpus that all models are scored on, after its validation documents were verified.

    Raises:
        InputError: a corpus cannot be read, they differ, or the text differs from its digest.
    """
    corpora = validation_corpora(models, data)
    texts = {model.name: _text_of(model, corpus, data) for model, corpus in zip(models, corpora, strict=True)}
    allowed = "must be the same text and tokenizer for all; --data=TEXT scores all runs of one tokenizer on one text"
    require(len({corpus.digest for corpus in corpora}) == 1, "data", texts, allowed)
    corpora[0].validation.verify()
    return corpora[0]


def with_protocol(model: TrainedModel[RunConfig], kind: str) -> TrainedModel[RunConfig]:
    """Return the model with the lengths and scored tokens of a kind of comparison.

    "delta" has T_train and the lengths above it, and scores T_train tokens; "positions" has the longest length, and
    scores all of it.

    Raises:
        InputError: "delta", and no length is above the train length.
    """
    evaluation, train_length = model.run.evaluation, model.run.train.train_length
    if kind == "delta":
        longer = tuple(length for length in evaluation.lengths if length > train_length)
        allowed = f"must have one or more above the train length, {train_length}"
        require(bool(longer), "evaluation.lengths", evaluation.lengths, allowed)
        evaluation = dataclasses.replace(evaluation, lengths=(train_length, *longer), last_tokens=train_length)
    elif kind == "positions":
        longest = max(evaluation.lengths)
        evaluation = dataclasses.replace(evaluation, lengths=(longest,), last_tokens=longest)
    return dataclasses.replace(model, run=dataclasses.replace(model.run, evaluation=evaluation))


def rotary_variants(models: Sequence[TrainedModel[RunConfig]], rotary: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the rotary variants of each model: `rotary` for models with RoPE, only "rope" (as trained) for others.

    Raises:
        InputError: variants are asked for, and no model has RoPE.
    """
    have_rope = [type(model.run.model.rotary) is Rope for model in models]
    names = [type(model.run.model.rotary).__name__ for model in models]
    allowed = f"must be 'rope', as trained: no model has RoPE, model.rotary is {', '.join(names)}"
    require(rotary == ("rope",) or any(have_rope), "rotary", rotary, allowed)
    return [rotary if has_rope else ("rope",) for has_rope in have_rope]


def check_lengths(model: TrainedModel[RunConfig]) -> None:
    """Raise `InputError` unless the model's mesh divides lengths and scored tokens."""
    mesh, evaluation = make_mesh(model.mesh), model.run.evaluation
    for length in evaluation.lengths:
        check_mesh(mesh, {"T": ("evaluation.lengths", length)})
        scored, context = min(evaluation.last_tokens, length), mesh.shape["context"]
        allowed = f"must be a multiple of mesh.context = {context}"
        require(scored % context == 0, "evaluation.last_tokens", scored, allowed)


def variant_name(model: TrainedModel[RunConfig], rotary: str) -> str:
    """Return the name of a model in one rotary variant."""
    return model.name + ("" if rotary == "rope" else f"+{rotary}")


# ---- windows


def choose_windows(store: TokenStore, longest: int, max_windows: int) -> list[ScoredWindow]:
    """Return non-overlapping windows of the longest length, from the end of each document backwards.

    Every document that is long enough gives one window before any document gives two, so that a few long documents do
    not dominate the result.

    A window has `longest` inputs and one more token, the last target. Documents are taken in a random order that is
    always the same.

    Raises:
        InputError: no document is long enough.
    """
    document_lengths = np.diff(store.offsets)
    windows_each = (document_lengths - 1) // longest
    order = np.random.default_rng(0).permutation(store.num_documents)
    windows = [
        ScoredWindow(int(document), int(document_lengths[document]) - taken * longest)
        for taken in range(min(max_windows, max(windows_each)))
        for document in order
        if taken < windows_each[document]
    ]
    longest_document = max(document_lengths)
    allowed = f"must be at most {longest_document - 1}: the longest validation document has {longest_document} tokens"
    require(bool(windows), "evaluation.lengths", longest, allowed)
    return windows[:max_windows]


def window_batch(
    store: TokenStore, windows: list[ScoredWindow], length: int, rows: Int[np.ndarray, "B"]
) -> dict[str, np.ndarray]:
    """Return the inputs and targets of the sequences of one length that end at some of the windows."""
    tokens = np.stack([windows[row].tokens(store, length) for row in rows])
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


# ---- scores


def compile_lengths(model: TrainedModel[RunConfig], rotary: str, num_windows: int) -> list[Program]:
    """Compile the scoring step of one model for every length, without reading its parameters."""
    mesh, run, evaluation = make_mesh(model.mesh), model.run, model.run.evaluation

    def step_at(length: int) -> tuple[Wrapped, TransformerConfig, int]:
        config = model_at(run.model, length, evaluation, rotary, run.train.train_length)
        step = make_nll_step(model_structure(config)[0], min(evaluation.last_tokens, length))
        return step, config, batch_size_at(length, num_windows, evaluation, mesh)

    names = ("inputs", "targets")
    name = variant_name(model, rotary)
    params = abstract_params(run.model, mesh)
    return compile_programs(step_at, evaluation.lengths, params, mesh, batch_names=names, name=name)


def score_windows(
    programs: list[Program], params: Params, mesh: Mesh, store: TokenStore, windows: list[ScoredWindow], name: str
) -> NllByLength:
    """Run the programs of `compile_lengths`; return the nll of the scored tokens of every window, by length."""
    nll_by_length = {}
    flops = len(windows) * sum(program.row_flops for program in programs)
    with jax.set_mesh(mesh), Progress(total=flops, unit="FLOP", unit_scale=True, desc=name) as bar:
        for program in programs:
            length = program.length
            bar.set_postfix_str(f"length {length}")
            nll = run_in_batches(
                functools.partial(program.step, params),
                functools.partial(window_batch, store, windows, length),
                num_rows=len(windows),
                batch_size=program.batch_size,
                mesh=mesh,
                progress=lambda num_rows, program=program: bar.update(num_rows * program.row_flops),
            )
            nll_by_length[length] = nll.astype(np.float64)
    return nll_by_length


def warn_of_divergence(name: str, nll_by_length: NllByLength) -> None:
    """Log the lengths at which the loss of a model is NaN, and those at which its perplexity is infinite."""
    losses = {length: float(nll.mean()) for length, nll in nll_by_length.items()}
    if lengths := [str(length) for length, loss in losses.items() if math.isnan(loss)]:
        logger.warning("%s: the loss is NaN at length %s", name, ", ".join(lengths))
    if infinite := [
        f"{length} ({loss:,.6g} nats)" for length, loss in losses.items() if math.isinf(perplexity_of(loss))
    ]:
        logger.warning(
            "%s: the loss is so large that the perplexity is infinite at length %s", name, ", ".join(infinite)
        )


def summarise(
    kind: str,
    model: TrainedModel[RunConfig],
    rotary: str,
    data: str,
    windows: list[ScoredWindow],
    nll_by_length: NllByLength,
) -> dict[str, Any]:
    """Return the result of a model in one rotary variant, scored on the corpus with the digest `data`."""
    train_length = model.run.train.train_length
    identity = {
        "name": variant_name(model, rotary),
        "workdir": str(model.workdir),
        "step": model.step,
        "train_length": train_length,
        "rotary": rotary,
        "last_tokens": model.run.evaluation.last_tokens,
        "data": data,
    }
    documents = np.array([window.document for window in windows])
    if kind == "positions":
        (nll,) = nll_by_length.values()
        return identity | {"positions": positions_result(documents, nll, train_length)}
    identity |= {"documents": documents.tolist()}  # of each window
    lengths = [length_result(length, documents, nll) for length, nll in nll_by_length.items()]
    if kind == "perplexity":
        return identity | {"lengths": lengths}
    local, *longer = nll_by_length  # T_train and the lengths above it
    deltas = [delta_result(length, documents, nll_by_length[local], nll_by_length[length]) for length in longer]
    return identity | {"lengths": lengths, "deltas": deltas}
