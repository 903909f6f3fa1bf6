r"""Run EleutherAI's lm-evaluation-harness on a trained model: multiple choice, rolling perplexity, generation.

    dape-lm-eval run --model dape_jax --model_args workdir=runs/mine,max_length=1024 \
        --tasks lambada_openai --batch_size auto --output_path results/

The command line is the harness's own; this module adds the model `dape_jax` to it, because the harness finds no models
of other packages. `docs/lm_eval.md` has examples.

A request becomes one row of tokens, of which the last ones are scored. Rows are padded on the right to one of a few
widths, so that a few programs serve all requests:

    row        c c c c x x . . . . . . . . . .      c: context   x: scored   .: padding up to the width of the batch
    position         ^ ^                            the only positions that are unembedded

Padding changes no score, because attention is causal. Models in which later tokens matter (`edge="listing"`,
`leak=True`) are refused.
"""

import functools
import itertools
import logging
import math
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from dape_jax.data.conventions import saved_conventions
from dape_jax.data.tokenizers import saved_tokenizer
from dape_jax.errors import InputError, install_command, printable, require
from dape_jax.evaluation.programs import model_at, padded_batches, run_in_batches
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.files import json_digest
from dape_jax.model.loss import nll
from dape_jax.model.positions import Rope
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.progress import Progress
from dape_jax.provenance import provenance
from dape_jax.storage import read_errors, to_path
from dape_jax.tools.completion import Sampling, check, generate, generate_until
from dape_jax.version import __version__

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as missing:
    advice = f"{missing.name}: not installed; {install_command('lm-eval')}"
    if __name__ == "__main__" or os.path.basename(sys.argv[0]).startswith("dape-lm-eval"):  # a program, not a library
        print(f"error: {advice}", file=sys.stderr)
        sys.exit(2)
    raise InputError(advice) from missing

logger = logging.getLogger(__name__)

MIN_WIDTH = 64  # rows are padded to this width at least
CHUNK = 128  # positions of every row that are unembedded at once


def padded_width(length: int, max_length: int) -> int:
    """Return the width that a row of `length` tokens is padded to: a power of two, or `max_length`."""
    return min(max_length, max(MIN_WIDTH, 1 << (length - 1).bit_length()))


class ScoredRow(NamedTuple):
    """Inputs of one request, followed by the last target; the last `num_scored` targets are scored."""

    tokens: list[int]
    num_scored: int


def make_batch(rows: Sequence[ScoredRow], width: int) -> dict[str, np.ndarray]:
    """Return the batch of these rows, padded with zeros to one width: targets `first` to `stop` - 1 are scored."""
    tokens = np.zeros((len(rows), width + 1), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row.tokens)] = row.tokens
    stop = np.array([len(row.tokens) - 1 for row in rows], np.int32)
    first = stop - np.array([row.num_scored for row in rows], np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "first": first, "stop": stop}


@functools.partial(jax.jit, static_argnames=("config", "num_ids"))
def score(
    config: TransformerConfig, params: Params, batch: dict[str, Array], *, num_ids: int
) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
    """Return the negative log-likelihood of each row's scored targets, and whether all of them are greedy.

    Positions are unembedded `CHUNK` at a time, so memory does not grow with length times vocabulary. `batch` is from
    `make_batch`; `num_ids` is the size of the tokenizer's vocabulary, which may be smaller than the model's: the greedy
    token is one of these ids.
    """
    graphdef, _ = model_structure(config)
    model = nnx.merge(graphdef, params)
    x_BTD = model.features(batch["inputs"])
    batch_size, width = batch["inputs"].shape
    first_B, stop_B = batch["first"], batch["stop"]

    def add_chunk(
        number: Integer[Array, ""], found: tuple[Float[Array, "B"], Bool[Array, "B"]]
    ) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
        pos_BT = first_B[:, None] + (number * CHUNK + jnp.arange(CHUNK))[None]
        scored_BT = pos_BT < stop_B[:, None]
        pos_BT = jnp.minimum(pos_BT, width - 1)
        logits_BTV = model.logits(jnp.take_along_axis(x_BTD, pos_BT[:, :, None], axis=1))
        targets_BT = jnp.take_along_axis(batch["targets"], pos_BT, axis=1)
        nll_BT = jnp.where(scored_BT, nll(logits_BTV, targets_BT), 0.0)
        greedy_BT = jnp.argmax(logits_BTV[:, :, :num_ids], axis=-1) == targets_BT
        return found[0] + nll_BT.sum(axis=1), found[1] & jnp.all(greedy_BT | ~scored_BT, axis=1)

    num_chunks = -(-jnp.max(stop_B - first_B) // CHUNK)
    return jax.lax.fori_loop(0, num_chunks, add_chunk, (jnp.zeros(batch_size), jnp.ones(batch_size, bool)))


class GenerationOptions(NamedTuple):
    """Options of a `generate_until` request; `until` are stop sequences, excluded from the output."""

    until: tuple[str, ...]
    max_gen_toks: int
    sampling: Sampling


def read_generation_kwargs(gen_kwargs: dict[str, Any], max_length: int) -> GenerationOptions:
    """Return the options in the harness's `generation_kwargs`: greedy unless `do_sample` or a temperature is set.

    Raises:
        InputError: a value is invalid, an option is not supported, or no space is left for a context.
    """
    with read_errors("generation_kwargs", str(gen_kwargs)):
        options: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": None, **normalize_gen_kwargs(gen_kwargs)}
        temperature, top_k = float(options["temperature"]), int(options["top_k"] or 0)
        top_p = None if options["top_p"] is None else float(options["top_p"])
    supported = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
    # One beam is greedy search.
    others = {key: value for key, value in options.items() if key not in supported and (key, value) != ("num_beams", 1)}
    require(not others, "generation_kwargs", others, f"not supported; the options are {', '.join(supported)}")
    until, max_gen_toks = options["until"], options["max_gen_toks"]
    allowed = f"must be 1 to {max_length - 1}, to leave room for a context; or increase max_length"
    require(0 < max_gen_toks < max_length, "generation_kwargs.max_gen_toks", max_gen_toks, allowed)
    sampling = Sampling(temperature if options["do_sample"] else 0.0, top_k or None, top_p)
    return GenerationOptions(tuple(str(stop) for stop in until if stop not in ("", None)), max_gen_toks, sampling)


def _number(option: int | str | None) -> int | None:
    """Return an option of the harness, which may be text, as a number of 0 or more, or None if it is none."""
    return int(str(option)) if str(option).isdecimal() else None


@register_model("dape_jax")
class DapeLM(TemplateLM):
    """Trained model behind the harness's interface.

    Texts begin with the token that an imported model's tokenizer puts before them, as with `--model hf`. Without one,
    an empty context is the end-of-document token, which precedes every document in training. A context that is too long
    loses its beginning; the number of such contexts is logged.
    """

    def __init__(
        self,
        workdir: epath.PathLike = "",
        step: str | int = "newest",
        max_length: int | str | None = None,
        batch_size: int | str | None = None,
        prefix_token_id: int | str | None = None,
        add_bos_token: bool | None = None,
        **ignored: Any,
    ):
        """Read a checkpoint.

        Args:
            workdir: run directory.
            step: "newest", "best" (lowest validation loss) or a number.
            max_length: maximum tokens of context and continuation; None for the train length of a model with RoPE, and
                of others for the longest of the run's `evaluation.lengths`. The model itself has no limit.
            batch_size: rows per batch, rounded up to a multiple of the devices; None or "auto" for as many as fit into
                the run's `evaluation.batch_tokens`.
            prefix_token_id: id that is an empty context; None for the first token of texts, or the end of a document.
            add_bos_token: begin every text with the model's BOS token; None: if its tokenizer does.
            ignored: options that the harness passes to every model, such as `device` (JAX uses all of them) and
                `trust_remote_code`, and `tokenizer`, from which some tasks read a tokenizer of their own.

        Raises:
            InputError: the checkpoint is missing, a number is invalid, or later tokens matter in the model; raised
                before any parameter is read.
        """
        unknown = set(ignored) - {"device", "max_batch_size", "tokenizer", "trust_remote_code"}
        allowed = "must be workdir, step, max_length, prefix_token_id, add_bos_token or tokenizer"
        require(not unknown, "model_args", sorted(unknown), allowed)
        require(bool(workdir), "model_args.workdir", workdir, "must be a run directory: --model_args workdir=RUN")
        super().__init__()
        self.info = read_trained(to_path(str(workdir), "workdir"), str(step), {})
        run = self.info.run
        if max_length is None:
            has_rope = isinstance(run.model.rotary, Rope)
            max_length = run.train.train_length if has_rope else max(run.evaluation.lengths)
            logger.info("max_length = %d tokens of context and continuation", max_length)
        self.max_length = _number(max_length) or 0
        require(self.max_length > 0, "max_length", max_length, "must be a positive number")
        self.batch_size = _number(batch_size)
        is_auto = batch_size is None or str(batch_size).partition(":")[0] == "auto"  # auto:N chooses N times
        require(is_auto or bool(self.batch_size), "batch_size", batch_size, "must be positive, or auto")
        check(self.info.run.model, max_new_tokens=1, seed=0)
        self._tokenizer = saved_tokenizer(self.info.workdir)
        self.conventions, self._is_chat = saved_conventions(self.info.workdir), False
        self._bos = self.conventions.bos_id(self._tokenizer)
        if add_bos_token is not None:
            name = self.conventions.bos_token
            self._bos = self._tokenizer.id_of(name) if add_bos_token and name else None
            has_one = self._bos is not None or not add_bos_token
            require(has_one, "add_bos_token", add_bos_token, "must be False: the model's tokenizer has no BOS token")
        allowed = f"must be an id of the model, 0 to {run.model.vocab_size - 1}"
        self._prefix = _number(prefix_token_id)
        is_id = self._prefix is not None and self._prefix < run.model.vocab_size
        require(prefix_token_id is None or is_id, "prefix_token_id", prefix_token_id, allowed)
        self._mesh, self._params = restore(self.info)

    @property
    def prefix_token_id(self) -> int:
        """Token that is an empty context."""
        first = self.eot_token_id if self._bos is None else self._bos
        return first if self._prefix is None else self._prefix

    @property
    def eot_token_id(self) -> int:
        """End-of-document token."""
        return self._tokenizer.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a string, after the BOS token unless the string begins with it.

        Control tokens in the string are its text, unless a chat template has been applied.
        """
        encode = self._tokenizer.encode_controls if self._is_chat else self._tokenizer.encode
        ids = encode(string.encode("utf-8", "replace")).tolist()
        start = [] if self._bos is None or ids[:1] == [self._bos] or add_special_tokens is False else [self._bos]
        return [*start, *ids]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation, by the imported model's template; `InputError` if it has none."""
        self._is_chat = True
        return self.conventions.render(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template, for the harness's record; a template cannot be chosen by name."""
        return self.conventions.chat_template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Name of tokenizer and template, for the harness's cache of requests.

        The harness reads it only with a chat template. Requests from the cache have the template already, so that
        `apply_chat_template` is not called; from here on, control tokens in a text are tokens.
        """
        self._is_chat = True
        return f"{self._tokenizer.name}-{json_digest(self.conventions.chat_template)[:16]}"

    def get_model_info(self) -> dict[str, Any]:
        """Return the harness's record of the model: checkpoint and provenance."""
        about = {"workdir": str(self.info.workdir), "step": self.info.step, "max_length": self.max_length}
        return about | provenance("flax")

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole document; every token is scored once, in windows of `max_length`."""
        rows, owners = [], []
        for owner, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            for context, scored in map(make_disjoint_window, windows):
                rows.append(ScoredRow(context + scored, len(scored)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._score(rows, "window", disable_tqdm), strict=True):
            totals[owner] += log_likelihood
        return totals

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation of a context, and whether it is greedy."""
        allowed = "must not be empty; see the task's choices"
        require(all(each.args[-1] for each in requests), "continuation", "", allowed)
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows, num_truncated = [], 0
        for strings, context, continuation in requests:
            # The harness gives no tokens if the continuation is part of the last token of its context.
            continuation = continuation or self.tok_encode(strings[1], add_special_tokens=False)
            allowed = f"must be at least {len(continuation)}, the tokens of one continuation"
            require(len(continuation) <= self.max_length, "max_length", self.max_length, allowed)
            # The harness moves trailing spaces to the continuation, so a context of spaces is empty here.
            tokens = (context or [self.prefix_token_id]) + continuation
            rows.append(ScoredRow(tokens[-(self.max_length + 1) :], len(continuation)))
            num_truncated += len(tokens) > self.max_length + 1
        self._warn_of_truncation(num_truncated, len(requests))
        return self._score(rows, "request", disable_tqdm)

    def _score(self, rows: list[ScoredRow], unit: str, disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each row's scored tokens, and whether all are greedy; widest batches first."""
        run, widths = self.info.run, [padded_width(len(row.tokens) - 1, self.max_length) for row in rows]
        # A batch unembeds as many positions as its row with the most scored tokens: group similar rows.
        order = sorted(range(len(rows)), key=lambda index: (widths[index], rows[index].num_scored), reverse=True)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        with jax.set_mesh(self._mesh), Progress(total=len(rows), unit=unit, disable=disable_tqdm) as bar:
            for width, group in itertools.groupby(order, key=widths.__getitem__):
                bar.set_postfix_str(f"width {width}")
                indices = list(group)
                config = model_at(run.model, width, run.evaluation, "rope", run.train.train_length)
                nll_B, greedy_B = run_in_batches(
                    functools.partial(score, config, self._params, num_ids=self._tokenizer.vocab_size),
                    lambda chosen: make_batch([rows[indices[i]] for i in chosen], width),  # noqa: B023
                    num_rows=len(indices),
                    batch_size=self._rows_per_batch(width, len(indices)),
                    mesh=self._mesh,
                    progress=bar.update,
                )
                for index, nll_nats, greedy in zip(indices, nll_B.tolist(), greedy_B.tolist(), strict=True):
                    answers[index] = (-nll_nats, greedy)
        return answers

    def _rows_per_batch(self, width: int, num_rows: int) -> int:
        fitting = self.batch_size or max(1, self.info.run.evaluation.batch_tokens // width)
        return math.ceil(min(fitting, num_rows) / self._mesh.size) * self._mesh.size

    def _warn_of_truncation(self, num_truncated: int, num_requests: int) -> None:
        if num_truncated:
            message = "%d of %d requests exceed max_length = %d tokens: the beginning of their context is dropped"
            logger.warning(message, num_truncated, num_requests, self.max_length)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context up to a stop sequence, the end of the document, or `max_gen_toks`.

        Sampled continuations depend on the order of the requests and on the batch size; equal calls give equal results.

        Raises:
            InputError: `generation_kwargs` are invalid.
        """
        prompts: list[np.ndarray] = []
        indices_of_options: dict[GenerationOptions, list[int]] = defaultdict(list)
        num_truncated = 0
        for index, request in enumerate(requests):
            context, gen_kwargs = cast(tuple[str, dict[str, Any]], request.args)
            options = read_generation_kwargs(gen_kwargs, self.max_length)
            ids, max_prompt = self.tok_encode(context) or [self.prefix_token_id], self.max_length - options.max_gen_toks
            num_truncated += len(ids) > max_prompt
            prompts.append(np.array(ids[-max_prompt:], np.int32))
            indices_of_options[options].append(index)
        self._warn_of_truncation(num_truncated, len(requests))
        answers, seeds = [""] * len(requests), itertools.count()
        ends = self.conventions.ends(self._tokenizer)
        with Progress(total=len(requests), unit="request", disable=disable_tqdm) as bar:
            for options, indices in indices_of_options.items():
                indices.sort(key=lambda index: len(prompts[index]), reverse=True)
                batch_size = self._rows_per_batch(self._cache_width(prompts[indices[0]], options), len(indices))
                for rows, num_real in padded_batches(len(indices), batch_size):
                    batch = [prompts[indices[row]] for row in rows]  # the longest first
                    steps = generate(
                        self.info.run.model,
                        self._params,
                        self._mesh,
                        batch,
                        # Gives caches one of a few sizes, so that programs are shared; `islice` stops earlier.
                        max_new_tokens=self._cache_width(batch[0], options) - len(batch[0]) + 1,
                        sampling=options.sampling,
                        seed=next(seeds),
                        num_ids=self._tokenizer.vocab_size,
                        end_tokens=ends,
                    )
                    steps = itertools.islice(steps, options.max_gen_toks)
                    outputs = generate_until(steps, batch[:num_real], self._tokenizer, ends, options.until)
                    for row, output in zip(rows, outputs, strict=False):
                        answers[indices[row]] = output
                    bar.update(num_real)
        return answers

    def _cache_width(self, prompt: np.ndarray, options: GenerationOptions) -> int:
        return padded_width(len(prompt) + options.max_gen_toks, self.max_length)


def command() -> None:
    """Run the command line `dape-lm-eval`, the harness's own with the model `dape_jax` registered."""
    if "--version" in sys.argv:
        print(f"dape_jax {__version__}, lm_eval {version('lm_eval')}")
        return
    # The harness and its table writer start processes; by fork they could deadlock on the threads of JAX.
    multiprocessing.set_start_method("spawn")
    os.environ["DISABLE_MULTIPROC"] = "1"  # bootstrap in this process: a spawned one takes longer to start
    try:
        cli_evaluate()
    except InputError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    command()
