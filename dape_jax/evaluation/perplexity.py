"""Perplexity by length, after the paper's protocol. In: workdirs of language models. Out: files, by `report.py`.

The whole N-token sequence is processed and its last tokens are scored. Sequences of every length end at the same places
of the same documents, so lengths differ in how much context there is, not in what is predicted:

    document   . . . . . . . . . . . . . . . . e          e: where a window ends
    N = 4                      [i i i i]                  inputs; the target of each is the token after it
    N = 8              [i i i i i i i i]
    scored                          t t                   the last 2 targets, the same for both

`protocols.py` has the questions that this answers. Reading order: `evaluate`, then the functions in the order in which
it calls them.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Int

from dape_jax.config import RunConfig
from dape_jax.data.conventions import saved_conventions
from dape_jax.data.store import TokenStore, joined, verify_stores
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.programs import Program, batch_size_at, compile_programs, model_at, run_in_batches
from dape_jax.evaluation.protocols import PROTOCOLS, Protocol, longest_window, methods_of, save
from dape_jax.evaluation.statistics import NllByLength
from dape_jax.evaluation.trained import TrainedModel, corpora_of, measure_each, read_models, require_same
from dape_jax.model.positions import STRETCHES, Rope
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.progress import Progress
from dape_jax.provenance import make_results_directory
from dape_jax.sharding import MeshConfig, check_mesh, make_mesh
from dape_jax.training.source import load_corpora
from dape_jax.training.step import abstract_params, make_nll_step

logger = logging.getLogger(__name__)

Model = TrainedModel[RunConfig]


def evaluate(
    workdirs: Sequence[epath.PathLike],
    options: Options = Options(),
    *,
    mesh: MeshConfig | None = None,
    output: epath.PathLike | None = None,
) -> report.ReportPaths:
    """Evaluate one checkpoint of every workdir, print a comparison and write it: `lengths.*`, `delta.*`, `positions.*`.

    Args:
        workdirs: run directories.
        options: what to measure.
        mesh: mesh of the devices; by default sequences are spread over all. With `context`, devices share a sequence.
        output: directory of the results; by default the workdir, or the longest path common to all workdirs.

    Raises:
        InputError: before any parameters are read, for bad input, a text that differs from its digest, or a length that
            does not fit into memory; later, if a checkpoint is damaged.
    """
    options.refuse("runs on tasks", "num_sequences", "dropout")
    models = read_models(RunConfig, workdirs, options, mesh, "lengths", "last_tokens", "max_windows")
    protocol = protocol_of(options, models[0].run.evaluation.lengths)
    models = rotary_variants([scored_as(protocol, model) for model in models], options.rotary)
    fields = ["train.train_length"] if options.protocol == "delta" else []
    fields += ["evaluation.lengths", "evaluation.last_tokens"]
    fields += ["evaluation.max_windows"] if options.stride is None else []  # --stride takes all windows
    require_same(models, *fields)
    methods_of([model.identity for model in models], options)  # refuses wrong names

    store, digests = common_text(models, options.data, options.split, options.verify)
    windows, facts = windows_of(store, models, options)
    directory = make_results_directory(output or report.common_directory(workdirs))
    evaluation, num_bytes = models[0].run.evaluation, None
    if store.tokenizer.decodes_tokens_alone:
        num_bytes = [scored_bytes(store, windows, n, min(n, evaluation.last_tokens)) for n in evaluation.lengths]
    documents = np.array([window.document for window in windows])

    def measure(model: Model, programs: list[Program], params: Params, mesh: Mesh) -> dict[str, Any]:
        nll = score_windows(programs, params, mesh, store, windows, model.name)
        scores = protocol.scores(documents, nll)._replace(num_bytes=num_bytes)
        facts_of_model = model.identity | {"data": digests[model.name]} | facts
        return facts_of_model | protocol.result(scores, model.run.train.train_length)

    results = measure_each(models, functools.partial(compile_lengths, num_windows=len(windows)), measure)
    return save(protocol.stem, directory, results, options)


# ---- models, variants and corpora


def protocol_of(options: Options, lengths: Sequence[int]) -> Protocol:
    """Return the protocol that the options ask for; with --stride, windows of the only length.

    Raises:
        InputError: it is unknown, or options contradict it or the lengths.
    """
    require(options.protocol in PROTOCOLS, "protocol", options.protocol, f"must be one of {list(PROTOCOLS)}")
    protocol, stride = PROTOCOLS[options.protocol], options.stride
    allowed = f"must not be given with --protocol={options.protocol}, which has its own number of scored tokens"
    require(options.last_tokens is None or protocol.windows is None, "last_tokens", options.last_tokens, allowed)
    if stride is None:
        return protocol
    require(protocol.windows is None, "stride", stride, "must not be given with --protocol")
    allowed = f"must be 1 to {max(lengths)}, with one length (--lengths)"
    require(len(lengths) == 1 and 0 < stride <= max(lengths), "stride", stride, allowed)
    return protocol._replace(windows=longest_window)


def rotary_variants(models: Sequence[Model], rotary: tuple[str, ...]) -> list[Model]:
    """Return a model for each rotary variant: `rotary` of models with RoPE, only "rope" (as trained) of others.

    Raises:
        InputError: a variant is unknown or given twice, or no model has RoPE and others than "rope" are asked for.
    """
    is_known = set(rotary) <= set(STRETCHES) and len(set(rotary)) == len(rotary) > 0
    require(is_known, "rotary", rotary, f"must be one or more of {list(STRETCHES)}, each once")
    names = [type(model.run.model.rotary).__name__ for model in models]
    allowed = f"must be 'rope', as trained: no model has RoPE, model.rotary is {', '.join(names)}"
    require(rotary == ("rope",) or Rope.__name__ in names, "rotary", rotary, allowed)
    return [
        dataclasses.replace(model, rotary=each, name=model.name + ("" if each == "rope" else f"+{each}"))
        for model, name in zip(models, names, strict=True)
        for each in (rotary if name == Rope.__name__ else ("rope",))
    ]


def first_token(models: Sequence[Model], bos: bool) -> str | None:
    """Return the token that the models' tokenizer puts before a text, or None if there is none or `bos` is False.

    Raises:
        InputError: the models differ in it.
    """
    conventions = {model.name: saved_conventions(model.workdir) for model in models if bos}
    names = {name: each.bos_token if each.adds_bos else None for name, each in conventions.items()}
    allowed = f"must be False to compare models that begin a text differently: {names}"
    require(len(set(names.values())) <= 1, "bos", bos, allowed)
    return next(iter(names.values()), None)


def scored_as(protocol: Protocol, model: Model) -> Model:
    """Return the model with the lengths and scored tokens of a protocol, which its mesh must divide."""
    evaluation, mesh = model.run.evaluation, make_mesh(model.mesh)
    if protocol.windows is not None:
        evaluation = protocol.windows(evaluation, model.run.train.train_length)
    for length in evaluation.lengths:
        check_mesh(mesh, {"T": ("evaluation.lengths", length)})
        scored, context = min(evaluation.last_tokens, length), mesh.shape["context"]
        allowed = f"must be a multiple of mesh.context = {context}"
        require(scored % context == 0, "evaluation.last_tokens", scored, allowed)
    return dataclasses.replace(model, run=dataclasses.replace(model.run, evaluation=evaluation))


def common_text(
    models: Sequence[Model], data: str | None, split: str = "validation", verify: bool = False
) -> tuple[TokenStore, dict[str, str]]:
    """Return the documents that all models are scored on, verified, and by model the digest of its corpora.

    Imported models, which have no text, get that of the first trained one, with their own tokenizer.

    Raises:
        InputError: a corpus cannot be read, they differ, the split has no documents, the text differs from its digest,
            or all models are imported and `data` is None.
    """
    first = next((model for model in models if model.run.data.weights), models[0])
    corpora, texts, load = {}, {}, functools.cache(load_corpora)  # the log describes a text once
    for model in models:
        if not model.run.data.weights:
            config = dataclasses.replace(first.run.data, tokenizer=model.run.data.tokenizer)
            run = dataclasses.replace(model.run, data=config)
            model = dataclasses.replace(model, run=run, data_digest=first.data_digest)
        corpora[model.name] = found = corpora_of(model, data, load)
        stores = found.train | found.validation
        (tokenizer,) = {store.sidecar.tokenizer for store in stores.values()}
        texts[model.name] = f"{', '.join(stores)} as {tokenizer}"
    allowed = (
        "must be the same text and tokenizer for all; --data=TEXT scores all runs of one tokenizer on one text; "
        "to compare different tokenizers, evaluate each run alone, and read bits_per_byte"
    )
    scored = [[store.sidecar.digest for store in each.stores(split)] for each in corpora.values()]
    require(scored.count(scored[0]) == len(scored), "data", texts, allowed)
    stores = corpora[models[0].name].stores(split)
    allowed = f"must have documents in {texts[models[0].name]}; --split=all scores the documents of both splits"
    require(bool(stores), "split", split, allowed)
    verify_stores(stores, verify)
    return joined(stores), {name: each.digest for name, each in corpora.items()}


# ---- windows


@dataclasses.dataclass(frozen=True)
class Window:
    """Sequence of a document, whose last tokens are scored: the token at `end - 1` is the last target.

    Sequences of all lengths end there, and begin where the length says, unless there is a `start`.
    """

    document: int
    end: int
    _: dataclasses.KW_ONLY
    first: int | None = None  # id in place of the first token; `start` may be -1, before the document
    start: int | None = None
    num_scored: int | None = None  # by default that of the evaluation

    def tokens(self, store: TokenStore, length: int) -> Int[np.ndarray, "N"]:
        """Return the N = `length` + 1 tokens of a sequence: its inputs, then the last target, padded with zeros."""
        start = self.end - length - 1 if self.start is None else self.start
        tokens = store.document(self.document)[max(start, 0) : self.end].astype(np.int32)
        if self.first is not None:
            tokens = np.concatenate([[np.int32(self.first)], tokens[start >= 0 :]])
        return np.pad(tokens, (0, length + 1 - len(tokens)))

    def scored(self, length: int, last_tokens: int) -> slice:
        """Return which targets of a sequence are scored."""
        stop = length if self.start is None else self.end - self.start - 1
        return slice(stop - (last_tokens if self.num_scored is None else self.num_scored), stop)


def windows_of(store: TokenStore, models: Sequence[Model], options: Options) -> tuple[list[Window], dict[str, Any]]:
    """Return the windows that all models are scored on, and the facts about them in a result."""
    evaluation = models[0].run.evaluation
    longest, bos = max(evaluation.lengths), first_token(models, options.bos)
    first = None if bos is None else store.tokenizer.id_of(bos)
    if options.stride is None:
        windows, shortest = choose_windows(store, longest, evaluation.max_windows, first), longest + 1
        facts: dict[str, Any] = {} if bos is None else {"bos": bos}
    else:
        windows = strided_windows(store, longest, options.stride, first)[: options.max_windows]
        shortest = 3 if first is None else 2  # with the end of the document, which is not scored
        facts = {"stride": options.stride, "bos": bos}
    counts = store.num_documents, store.num_tokens, int((np.diff(store.offsets) < shortest).sum())
    message = "text: %s documents (%s tokens); %s of them are left out, being shorter than %s tokens"
    logger.info(message, *(f"{count:,}" for count in (*counts, shortest)))
    return windows, facts | {"last_tokens": evaluation.last_tokens, "split": options.split}


def choose_windows(store: TokenStore, longest: int, max_windows: int, first: int | None = None) -> list[Window]:
    """Return non-overlapping windows of the longest length, from the end of each document backwards.

    Every document that is long enough gives one window before any document gives two, so that a few long documents do
    not dominate the result.

    A window has `longest` inputs, of which the first is `first` if given, and one more token, the last target.
    Documents are taken in a random order that is always the same.

    Raises:
        InputError: no document is long enough.
    """
    document_lengths = np.diff(store.offsets)
    windows_each = (document_lengths - 1) // longest
    order = np.random.default_rng(0).permutation(store.num_documents)
    windows = [
        Window(int(document), int(document_lengths[document]) - taken * longest, first=first)
        for taken in range(min(max_windows, max(windows_each)))
        for document in order
        if taken < windows_each[document]
    ]
    longest_document = max(document_lengths)
    allowed = f"must be at most {longest_document - 1} (--lengths): the longest document has {longest_document} tokens"
    require(bool(windows), "evaluation.lengths", longest, allowed)
    return windows[:max_windows]


def strided_windows(store: TokenStore, length: int, stride: int, first: int | None) -> list[Window]:
    """Return windows of at most `length` tokens that score each token of every document once, but its first.

    With `first`, documents begin with this token. If `stride` is `length`, no window scores its first token, as in the
    guide. With a length of 4 and a stride of 2, the document a b c d e f g has:

        window 0   a b c d            scored   b c d
        window 1       c d e f        scored         e f
        window 2           e f g      scored             g

    Source: the guide "Perplexity of fixed-length models" of Hugging Face's transformers.
    Differs: the mean is over tokens; the guide weights windows by one token fewer than they score.
    """
    windows = []
    for document, size in enumerate((np.diff(store.offsets) - 1).tolist()):  # without the end of the document
        begin = -1 if first is not None else 0
        scored = begin + 1
        for start in range(begin, size, stride):
            end = min(start + length, size)
            scored = max(scored, start + 1)
            if scored < end:
                at_start = first if start < 0 else None
                windows.append(Window(document, end, first=at_start, start=start, num_scored=end - scored))
            scored = end
            if end == size:
                break
    require(bool(windows), "data", str(store.directory), "must have a document of two tokens")
    return windows


def scored_bytes(store: TokenStore, windows: Sequence[Window], length: int, last_tokens: int) -> int:
    """Return the number of bytes that the scored tokens of all windows decode to."""
    scored = (window.tokens(store, length)[1:][window.scored(length, last_tokens)] for window in windows)
    return sum(len(store.tokenizer.decode(tokens)) for tokens in scored)


def window_batch(
    store: TokenStore, windows: Sequence[Window], length: int, rows: Int[np.ndarray, "B"]
) -> dict[str, np.ndarray]:
    """Return the inputs and targets of the sequences of one length that end at some of the windows."""
    tokens = np.stack([windows[row].tokens(store, length) for row in rows])
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


# ---- scores


def compile_lengths(model: Model, num_windows: int) -> list[Program]:
    """Compile the scoring step of one model for every length, without reading its parameters."""
    mesh, run, evaluation = make_mesh(model.mesh), model.run, model.run.evaluation

    def step_at(length: int) -> tuple[Wrapped, TransformerConfig, int]:
        config = model_at(run.model, length, evaluation, model.rotary, run.train.train_length)
        step = make_nll_step(model_structure(config)[0], min(evaluation.last_tokens, length))
        return step, config, batch_size_at(length, num_windows, evaluation, mesh)

    params, names = abstract_params(run.model, mesh), ("inputs", "targets")
    return compile_programs(step_at, evaluation.lengths, params, mesh, batch_names=names, name=model.name)


def score_windows(
    programs: list[Program], params: Params, mesh: Mesh, store: TokenStore, windows: Sequence[Window], name: str
) -> NllByLength:
    """Run the programs of `compile_lengths`; return the nll of the scored tokens of every window, by length."""
    nll_by_length = {}
    flops = len(windows) * sum(program.row_flops for program in programs)
    with jax.set_mesh(mesh), Progress(total=flops, unit="FLOP", unit_scale=True, desc=name) as bar:
        for program in programs:
            bar.set_postfix_str(f"length {program.length}")
            nll = run_in_batches(
                functools.partial(program.step, params),
                functools.partial(window_batch, store, windows, program.length),
                num_rows=len(windows),
                batch_size=program.batch_size,
                mesh=mesh,
                progress=lambda num_rows, program=program: bar.update(num_rows * program.row_flops),
            )
            nll_by_length[program.length] = mask_unscored(nll.astype(np.float64), windows)
    return nll_by_length


def mask_unscored(nll: np.ndarray, windows: Sequence[Window]) -> np.ndarray:
    """Return the nll of the last targets of windows, without those that windows with `num_scored` do not score."""
    if windows[0].num_scored is None:
        return nll
    is_unscored = np.ones(nll.shape, bool)
    for row, window in zip(is_unscored, windows, strict=True):
        row[window.scored(len(row), len(row))] = False
    return np.ma.masked_array(nll, is_unscored)
