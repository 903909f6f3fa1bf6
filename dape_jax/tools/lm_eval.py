"""A trained model under the lm-evaluation-harness: multiple choice, rolling perplexity, and text up to a stop.

    python -m dape_jax.tools.lm_eval --workdir=runs/mine --tasks=my_task --include_path=tasks/
    python -m dape_jax.tools.lm_eval --workdir=runs/mine --tasks=lambada_openai --limit=100 --max_length=1024

In: a checkpoint, and tasks of the harness or of files of one's own (`docs/lm_eval.md`). Out: `lm_eval.json`, which has
the harness's results under the same name, and their table as text and Markdown.

A request is a row of tokens whose last ones are scored. Rows are filled up on the right to one of a few widths, so that
a few programs serve all of them:

    row        c c c c x x . . . . . . . . . .      c: context, x: scored, filled up to the width of its batch
    position         ^ ^                            whose logits are needed, and the only ones that are unembedded

Filling changes nothing before it: a row of queries is complete in itself. The two kinds of model of which that is not
true (those that generation refuses) are given rows as long as they are, in batches of equal length.
"""

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.data.tokenizers import Tokenizer, saved_tokenizer
from dape_jax.errors import InputError, require
from dape_jax.evaluation import report
from dape_jax.evaluation.perplexity import model_at
from dape_jax.evaluation.trained import TrainedModel, read_trained, restore
from dape_jax.model.loss import nll
from dape_jax.model.transformer import Params, TransformerConfig, make_cache, model_structure
from dape_jax.sharding import put_batch
from dape_jax.tools.generate import Sampling, TextStream, generate

try:
    from datasets.exceptions import DatasetsError
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window
except ModuleNotFoundError as missing:
    advice = f"{missing.name} is not installed: pip install 'dape_jax[lm-eval]'"
    if __name__ == "__main__":
        print(f"error: {advice}", file=sys.stderr)
        sys.exit(2)
    raise InputError(advice) from missing

logger = logging.getLogger(__name__)

NARROWEST = 64  # rows are filled up to this width at least
CHUNK = 128  # positions of every row that are unembedded at once
# Of what the harness adds to its results: time and surroundings, for which ours stand (`provenance.py`).
LEFT_OUT = ("date", "git_hash", "upper_git_hash", "pretty_env_info", "transformers_version")


def width_of(length: int, longest: int) -> int:
    """What a row of `length` tokens is filled up to: a power of two, or the longest."""
    return min(longest, max(NARROWEST, 1 << (length - 1).bit_length()))


@dataclasses.dataclass(frozen=True)
class Row:
    """Tokens of one request.

    Args:
        tokens: inputs, and after them the last target.
        num_scored: so many of them, the last, are scored; fewer than all.
    """

    tokens: list[int]
    num_scored: int

    @property
    def length(self) -> int:
        """Inputs."""
        return len(self.tokens) - 1


def make_batch(rows: Sequence[Row], width: int, batch_size: int) -> dict[str, np.ndarray]:
    """Rows filled up with zeros to one width, and with copies of the last row to one number."""
    filled = [*rows, *[rows[-1]] * (batch_size - len(rows))]
    tokens = np.zeros((batch_size, width + 1), np.int32)
    for line, row in zip(tokens, filled, strict=True):
        line[: len(row.tokens)] = row.tokens
    stop = np.array([row.length for row in filled], np.int32)
    first = stop - np.array([row.num_scored for row in filled], np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "first": first, "stop": stop}


@functools.partial(jax.jit, static_argnames=("config", "num_ids"))
def score(
    config: TransformerConfig, params: Params, batch: dict[str, Array], *, num_ids: int
) -> tuple[Float[Array, "B T"], Bool[Array, "B"]]:
    """Nll of the scored targets of every row, from column 0 on, zero after them; and whether all of them are greedy.

    Positions are unembedded `CHUNK` at a time and only as many as the batch scores, so memory does not grow with
    length times vocabulary.

    Args:
        config: the model's.
        params: its parameters.
        batch: from `make_batch`: targets `first` to `stop` - 1 of each row are scored.
        num_ids: ids that generation draws from (a model may have more than its tokenizer): greedy among those.
    """
    graphdef, _ = model_structure(config)
    model = nnx.merge(graphdef, params)
    x_BTD = model.features(batch["inputs"])
    batch_size, width = batch["inputs"].shape
    size = min(CHUNK, width)
    first_B, stop_B = batch["first"], batch["stop"]

    def chunk(
        number: Integer[Array, ""], found: tuple[Float[Array, "B T"], Bool[Array, "B"]]
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B"]]:
        nll_BT, greedy_B = found
        pos_BT = first_B[:, None] + (number * size + jnp.arange(size))[None]
        scored_BT = pos_BT < stop_B[:, None]
        pos_BT = jnp.minimum(pos_BT, width - 1)
        logits_BTV = model.logits(jnp.take_along_axis(x_BTD, pos_BT[:, :, None], axis=1))
        targets_BT = jnp.take_along_axis(batch["targets"], pos_BT, axis=1)
        chunk_BT = jnp.where(scored_BT, nll(logits_BTV, targets_BT), 0.0)
        greedy_BT = jnp.argmax(logits_BTV[:, :, :num_ids], axis=-1) == targets_BT
        nll_BT = jax.lax.dynamic_update_slice(nll_BT, chunk_BT, (0, number * size))
        return nll_BT, greedy_B & jnp.all(greedy_BT | ~scored_BT, axis=1)

    nothing = (jnp.zeros((batch_size, math.ceil(width / size) * size)), jnp.ones((batch_size,), bool))
    num_chunks = (jnp.max(stop_B - first_B) + size - 1) // size
    return jax.lax.fori_loop(0, num_chunks, chunk, nothing)


@dataclasses.dataclass(frozen=True)
class Continuation:
    """How a `generate_until` request is to be continued: the harness's `generation_kwargs`, read.

    Args:
        until: texts that end it, none of which is in the answer.
        max_gen_toks: tokens at most.
        sampling: how a token is drawn.
    """

    until: tuple[str, ...]
    max_gen_toks: int
    sampling: Sampling


def read_continuation(gen_kwargs: dict[str, Any], max_length: int) -> Continuation:
    """The harness's `generation_kwargs`: greedy unless `do_sample` or a temperature says otherwise.

    Raises:
        InputError: a bad value, an option that generation does not have, or no room for a context.
    """
    options: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs)}
    known = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
    others = {name: value for name, value in options.items() if name not in known}
    if "num_beams" in others and others["num_beams"] == 1:
        others.pop("num_beams")  # one beam is no beam search
    require(not others, "generation_kwargs", others, f"options of generation, which are {', '.join(known)}")
    until, max_gen_toks = options["until"], options["max_gen_toks"]
    require(all(isinstance(stop, str) for stop in until), "generation_kwargs.until", until, "a text or a list of texts")
    require(max_gen_toks > 0, "generation_kwargs.max_gen_toks", max_gen_toks, "1 or more")
    require(
        max_gen_toks < max_length,
        "generation_kwargs.max_gen_toks",
        max_gen_toks,
        f"less than max_length = {max_length}, so that there is room for a context; give another --max_length",
    )
    temperature, top_k, top_p = 1.0, None, None
    if "temperature" in options:
        temperature = float(options["temperature"])
    if "top_k" in options:
        top_k = int(options["top_k"]) or None
    if "top_p" in options:
        top_p = float(options["top_p"])
    sampling = Sampling(temperature if options["do_sample"] else 0.0, top_k, top_p)
    return Continuation(tuple(stop for stop in until if stop), max_gen_toks, sampling)


def texts_until(
    steps: Iterable[Integer[np.ndarray, "B"]], num_texts: int, tokenizer: Tokenizer, until: Sequence[str]
) -> list[str]:
    """Take steps of `generate` until each of the first `num_texts` sequences has ended or has come to a stop.

    Texts are compared, not tokens: a stop counts wherever its tokens begin and end.
    """
    streams = [TextStream(tokenizer) for _ in range(num_texts)]
    texts, open_rows = [""] * num_texts, set(range(num_texts))
    for token_B in steps:
        for row in list(open_rows):
            texts[row] += streams[row].feed(token_B[row : row + 1])
            if token_B[row] == tokenizer.end_of_document or any(stop in texts[row] for stop in until):
                open_rows.remove(row)
        if not open_rows:
            break
    texts = [text + stream.feed(np.zeros(0, int), last=True) for text, stream in zip(texts, streams, strict=True)]
    return [postprocess_generated_text(text, list(until), None) for text in texts]


class HarnessModel(TemplateLM):
    """A trained model as the harness calls it.

    A context that is empty is the end of a document, after which training has the beginning of the next. A context that
    is too long loses its beginning, and how many did is logged.
    """

    def __init__(self, trained: TrainedModel, *, max_length: int | None = None, batch_size: int | None = None):
        """Read the parameters.

        Args:
            trained: from `read_trained`.
            max_length: tokens of context and continuation at most; None for the longest that the run's evaluation has.
                It is a choice, not a limit: nothing in the model has one.
            batch_size: rows at once, rounded up to a multiple of the devices; None for what fits in the run's
                `evaluation.batch_tokens` at each width.

        Raises:
            InputError: a bad number.
        """
        super().__init__()
        self.trained = trained
        self.max_length = read_max_length(trained, max_length)
        require(batch_size is None or batch_size > 0, "batch_size", batch_size, "1 row or more")
        self.batch_size = batch_size
        self._tokenizer = saved_tokenizer(trained.workdir)
        self._mesh, self._params = restore(trained)

    @property
    def eot_token_id(self) -> int:
        """The end of a document."""
        return self._tokenizer.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text; there are no special tokens to add."""
        return self._tokenizer.encode(string.encode("utf-8", "replace")).tolist()

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results as the model."""
        return {"workdir": str(self.trained.workdir), "step": self.trained.step, "max_length": self.max_length}

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether it is what greedy generation gives."""
        for request in requests:
            _, continuation = cast(tuple[str, str], request.args)
            require(continuation != "", "continuation", continuation, "one character or more")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, every token once, after as much of what is before it as windows have."""
        rows, owners = [], []
        for owner, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            for context, scored in map(make_disjoint_window, windows):
                rows.append(Row(context + scored, len(scored)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (loglikelihood, _) in zip(owners, self._score(rows, "window", disable_tqdm), strict=True):
            totals[owner] += loglikelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows, num_cut = [], 0
        for texts, context, continuation in requests:
            allowed = "a text whose tokens are not all merged with those of its context"
            require(len(continuation) > 0, "continuation", texts[1], allowed)
            allowed = f"at least {len(continuation)}, the tokens of one continuation; give --max_length"
            require(len(continuation) <= self.max_length, "max_length", self.max_length, allowed)
            # A context of spaces alone is empty too: the harness moves them to the continuation.
            tokens = (context or [self.prefix_token_id]) + continuation
            rows.append(Row(tokens[-(self.max_length + 1) :], len(continuation)))
            num_cut += len(tokens) > self.max_length + 1
        self._warn_of_cut(num_cut, len(requests), self.max_length)
        answers = self._score(rows, "request", disable_tqdm)
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _score(self, rows: list[Row], unit: str, disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Log-likelihood of the scored tokens of every row, and whether all are greedy; the widest batches first."""
        run = self.trained.run
        of_width = defaultdict(list)
        for index, row in enumerate(rows):
            width = row.length if run.model.processor.why_not_cached else width_of(row.length, self.max_length)
            of_width[width].append(index)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        with jax.set_mesh(self._mesh), tqdm(total=len(rows), unit=unit, disable=disable_tqdm) as bar:
            for width, indices in sorted(of_width.items(), reverse=True):
                bar.set_postfix_str(f"width {width}")
                config = model_at(run.model, width, run.evaluation, "rope", run.train.train_length)
                size = self._batch_size(width, len(indices))
                # Rows that score alike together: a batch unembeds as many positions as the row that scores most.
                indices.sort(key=lambda index: rows[index].num_scored, reverse=True)
                for first in range(0, len(indices), size):
                    chosen = indices[first : first + size]
                    batch = put_batch(make_batch([rows[index] for index in chosen], width, size), self._mesh)
                    found = score(config, self._params, batch, num_ids=self._tokenizer.vocab_size)
                    nll_BT, greedy_B = jax.device_get(found)
                    sums = -nll_BT.sum(axis=1, dtype=np.float64)
                    for index, total, greedy in zip(chosen, sums, greedy_B, strict=False):
                        answers[index] = (float(total), bool(greedy))
                    bar.update(len(chosen))
        return answers

    def _batch_size(self, width: int, num_rows: int) -> int:
        fitting = self.batch_size or max(1, self.trained.run.evaluation.batch_tokens // width)
        return math.ceil(min(fitting, num_rows) / self._mesh.size) * self._mesh.size

    def _warn_of_cut(self, num_cut: int, num_requests: int, longest: int) -> None:
        if num_cut:
            logger.warning(
                "%d of %d requests are longer than %d tokens: their contexts lose their beginning (--max_length)",
                num_cut,
                num_requests,
                longest,
            )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows each context up to a stop, the end of the document, or so many tokens; greedy by default.

        Drawn texts depend on the order of the requests and on the batch size as well; the same call gives the same.

        Raises:
            InputError: a model that cannot generate, or bad `generation_kwargs`.
        """
        jax.eval_shape(lambda: make_cache(self.trained.run.model, 1, 1))
        prompts: list[np.ndarray] = []
        alike: dict[Continuation, list[int]] = defaultdict(list)
        num_cut = 0
        for index, request in enumerate(requests):
            context, gen_kwargs = cast(tuple[str, dict[str, Any]], request.args)
            continuation = read_continuation(gen_kwargs, self.max_length)
            ids, room = self.tok_encode(context) or [self.eot_token_id], self.max_length - continuation.max_gen_toks
            num_cut += len(ids) > room
            prompts.append(np.array(ids[-room:], np.int32))
            alike[continuation].append(index)
        self._warn_of_cut(num_cut, len(requests), self.max_length)
        answers = [""] * len(requests)
        seeds = itertools.count()
        with tqdm(total=len(requests), unit="request", disable=disable_tqdm) as bar:
            for continuation, indices in alike.items():
                indices.sort(key=lambda index: len(prompts[index]), reverse=True)
                while indices:
                    width = width_of(len(prompts[indices[0]]) + continuation.max_gen_toks, self.max_length)
                    size = self._batch_size(width, len(alike[continuation]))
                    chosen, indices = indices[:size], indices[size:]
                    texts = self._continue([prompts[index] for index in chosen], size, width, continuation, next(seeds))
                    for index, text in zip(chosen, texts, strict=True):
                        answers[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update(len(chosen))
        return answers

    def _continue(
        self, prompts: list[np.ndarray], batch_size: int, width: int, continuation: Continuation, seed: int
    ) -> list[str]:
        """Continue some prompts, the longest first, against caches of one width."""
        stream = generate(
            self.trained.run.model,
            self._params,
            self._mesh,
            [*prompts, *[prompts[-1]] * (batch_size - len(prompts))],
            max_new_tokens=width - len(prompts[0]) + 1,  # the caches' size; `islice` has the last word
            sampling=continuation.sampling,
            seed=seed,
            num_ids=self._tokenizer.vocab_size,
            end_token=self.eot_token_id,
        )
        steps = itertools.islice(stream, continuation.max_gen_toks)
        return texts_until(steps, len(prompts), self._tokenizer, continuation.until)


def read_max_length(trained: TrainedModel, max_length: int | None) -> int:
    """`max_length`, or the longest that the run's evaluation has."""
    longest = max(trained.run.evaluation.lengths) if max_length is None else max_length
    require(longest > 0, "max_length", longest, "1 token or more")
    return longest


def load_tasks(names: Sequence[str], include_path: Path | None) -> tuple[TaskManager, list[Any]]:
    """Find tasks, groups and tags by name, and read their data.

    Args:
        names: of tasks of the harness, or of files under `include_path`.
        include_path: directory of task files; None for none.

    Raises:
        InputError: no such task, or its data or its file cannot be read.
    """
    require(len(names) > 0, "tasks", list(names), "one name or more, parted by commas")
    if include_path is not None:
        require(include_path.is_dir(), "include_path", str(include_path), "a directory of task files (.yaml)")
    manager = TaskManager(include_path=include_path)
    unknown = [name for name in names if name not in manager.all_tasks]
    allowed = "tasks, groups or tags that the harness knows, or that a .yaml file under --include_path defines"
    require(not unknown, "tasks", unknown, allowed)
    try:
        loaded = manager.load(list(names))
    except (OSError, ValueError, DatasetsError) as error:
        first_line = str(error).partition("\n")[0]
        raise InputError(f"tasks = {list(names)}: cannot be read: {type(error).__name__}: {first_line}") from error
    groups = loaded["groups"] if "groups" in loaded else {}
    inner = {child for group in groups.values() for child in group.child_names}
    grouped = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    return manager, [
        *(group for name, group in groups.items() if name not in inner),
        *(task for name, task in loaded["tasks"].items() if name not in grouped),
    ]


def check_tasks(trained: TrainedModel, manager: TaskManager, tasks: list[Any], max_length: int) -> None:
    """Raise what the harness or `HarnessModel` would raise later, when requests have been run already."""
    for name, task in manager.load(tasks)["tasks"].items():
        require(
            not getattr(task, "UNSAFE_CODE", False),
            "tasks",
            name,
            "tasks that do not run code that the model has written",
        )
        require(not getattr(task, "MULTIMODAL", False), "tasks", name, "tasks of text alone")
        if task.OUTPUT_TYPE == "generate_until":
            jax.eval_shape(lambda: make_cache(trained.run.model, 1, 1))
            read_continuation(cast(dict[str, Any], task.get_config("generation_kwargs")), max_length)


def evaluate_tasks(
    workdir: Path,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
    step: str = "newest",
    output: Path | None = None,
) -> report.ReportPaths:
    """Run tasks of the harness on a trained model and write its results.

    Args:
        workdir: of the run.
        tasks: names; see `load_tasks`.
        include_path: directory of task files; None for none.
        limit: so many documents of each task, or below 1 that share of them; None for all.
        num_fewshot: examples before each request, for tasks that do not fix it at 0; None for each task's own number.
        max_length: see `HarnessModel`.
        batch_size: see `HarnessModel`.
        step: "newest", "best" (the lowest validation loss) or a number.
        output: where results go; None for the workdir.

    Raises:
        InputError: bad input, before any device work.
    """
    require(limit is None or limit > 0, "limit", limit, "a number of documents, a share below 1, or None for all")
    require(num_fewshot is None or num_fewshot >= 0, "num_fewshot", num_fewshot, "0 or more")
    require(batch_size is None or batch_size > 0, "batch_size", batch_size, "1 row or more")
    trained = read_trained(workdir, step, {})
    longest = read_max_length(trained, max_length)
    manager, loaded = load_tasks(tasks, include_path)
    check_tasks(trained, manager, loaded, longest)
    directory = workdir if output is None else output
    report.make_directory(directory)
    # The harness forks for some of its standard errors, which a process that has JAX's threads must not do.
    os.environ["DISABLE_MULTIPROC"] = "1"
    model = HarnessModel(trained, max_length=longest, batch_size=batch_size)
    try:
        results = simple_evaluate(
            model,
            tasks=loaded,
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
        )
    except OverflowError as error:
        raise InputError(
            f"tasks = {list(tasks)}: a perplexity is too large for a float; leave word_perplexity out of the task's "
            "metric_list, for words that are long or a model that is not trained, and keep bits_per_byte"
        ) from error
    assert results is not None
    kept = {name: value for name, value in results.items() if name not in LEFT_OUT}
    # To JSON and back: a task's config may hold anything, functions too.
    kept = json.loads(json.dumps(kept, default=handle_non_serializable))
    caption = f"{workdir.absolute().name}, step {trained.step}, sequences of at most {longest} tokens"
    return report.save("lm_eval", directory, {"lm_eval": kept}, caption, table_of(kept), None)


def table_of(results: dict[str, Any]) -> list[list[str]]:
    """The harness's table: a line for each metric of each task, then of each group.

    Differs: from `lm_eval.utils.make_table`, which starts processes to find the types of cells, by fork.
    """
    rows = [["task", "filter", "n-shot", "metric", "value", "stderr"]]
    measured = results["results"] | (results["groups"] if "groups" in results else {})
    for task, figures in measured.items():
        for key, value in figures.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue  # the task's name and size, or what stands beside its metric
            error = f"{metric}_stderr,{filter_name}"
            cells = [value, figures[error] if error in figures else ""]
            shown = [f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells]
            num_shots = results["n-shot"][task] if task in results["n-shot"] else ""
            rows.append([task, filter_name, str(num_shots), metric, *shown])
    return rows


def define_flags() -> None:
    """The command line's."""
    flags.DEFINE_string("workdir", None, "Directory of the run.")
    flags.DEFINE_list("tasks", None, "Names of tasks, groups or tags, parted by commas.")
    flags.DEFINE_string("include_path", None, "Directory of task files (.yaml) of your own.")
    flags.DEFINE_float("limit", None, "So many documents of each task, or below 1 that share of them; all if unset.")
    flags.DEFINE_integer("num_fewshot", None, "Examples before each request; each task's own number if unset.")
    flags.DEFINE_integer(
        "max_length", None, "Tokens of context and continuation; the longest of the run's evaluation if unset."
    )
    flags.DEFINE_integer("batch_size", None, "Rows at once; what fits in the run's evaluation.batch_tokens if unset.")
    flags.DEFINE_string("step", "newest", "Checkpoint: newest, best (lowest validation loss) or its number.")
    flags.DEFINE_string("output", None, "Where results go; the workdir if unset.")
    flags.mark_flags_as_required(["workdir", "tasks"])


def main(_: list[str]) -> None:
    """Flags, then one call."""
    given = flags.FLAGS
    done = evaluate_tasks(
        Path(given.workdir),
        given.tasks,
        include_path=Path(given.include_path) if given.include_path else None,
        limit=given.limit,
        num_fewshot=given.num_fewshot,
        max_length=given.max_length,
        batch_size=given.batch_size,
        step=given.step,
        output=Path(given.output) if given.output else None,
    )
    print(f"\n{done.table}\n\nresults: {done.directory}")


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
