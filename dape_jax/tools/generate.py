"""Generate text from a trained model, one token at a time, against a cache of keys and values.

    python -m dape_jax.tools.generate --workdir=runs/mine --prompt="def main("
    python -m dape_jax.tools.generate --workdir=runs/mine --prompt="class " --prompt="import " --greedy
    python -m dape_jax.tools.generate --workdir=runs/mine --prompt_file=long.txt --output=text.json

In: a checkpoint and prompts. Out: one token of every sequence at each step, and the text on the terminal.

Sequences differ in length, so each has a cache of its own and all are extended together by `jax.vmap`. Prompts are
filled up on the right and read, all but the last token of the longest, in chunks of `CHUNK` rows:

    prompts    a b c d e f            sequence 0
               x y z . . .            sequence 1, filled up
    prefill    a b c d e              columns of the cache; what filling leaves in them stands to the right of every
               x y z . .              query that is still to come, so it is masked until it is overwritten
    decode     f at column 5, z at column 2: the first step; each step gives the logits of every sequence's next token

Memory is linear in length: a chunk holds `CHUNK` rows of scores, and only positions that are sampled are unembedded.
"""

import codecs
import dataclasses
import functools
import json
import math
import os
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Integer, Key, UInt
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.data.tokenizers import Tokenizer, saved_tokenizer
from dape_jax.errors import InputError, require
from dape_jax.evaluation import report
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.model.attention import Dense
from dape_jax.model.transformer import Cache, Params, Transformer, TransformerConfig, make_cache, model_structure
from dape_jax.provenance import provenance
from dape_jax.sharding import BATCH

# Rows that the prefill reads at once. Caches are a multiple of it long: prompts of many lengths share a program.
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits: temperature first, then top-k, then top-p of what top-k has left.

    Args:
        temperature: logits are divided by it; 0 is greedy, the most probable token.
        top_k: only so many most probable tokens are drawn; None for all.
        top_p: only the fewest most probable tokens are drawn whose probability together reaches it; None for all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or more")
        require(self.top_k is None or self.top_k > 0, "top_k", self.top_k, "1 or more tokens, or None for all")
        require(
            self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1, or None for all"
        )


def sample(logits_BV: Float[Array, "B V"], keys_B: Key[Array, "B"], sampling: Sampling) -> Int[Array, "B"]:
    """Draw one token from each row of logits.

    Args:
        logits_BV: of the next token.
        keys_B: one key for each row, so that a row's draw does not depend on the others.
        sampling: how.

    Differs: of equal logits at the edge of top-k the lower ids stay, so that top_k=1 is greedy; common
        implementations keep all of them.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    # Less the maximum first, so that no temperature, however small, makes an infinity of it.
    logits_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
    logits_BV = logits_BV / max(sampling.temperature, float(jnp.finfo(logits_BV.dtype).tiny))
    if sampling.top_k is not None or sampling.top_p is not None:
        order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
        ranked_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
        if sampling.top_k is not None:
            ranked_BV = jnp.where(jnp.arange(ranked_BV.shape[1])[None] < sampling.top_k, ranked_BV, -jnp.inf)
        if sampling.top_p is not None and sampling.top_p < 1:
            before_BV = jnp.cumsum(jax.nn.softmax(ranked_BV, axis=-1), axis=-1)[:, :-1]
            before_BV = jnp.pad(before_BV, ((0, 0), (1, 0)))
            ranked_BV = jnp.where(before_BV < sampling.top_p, ranked_BV, -jnp.inf)
        logits_BV = jnp.take_along_axis(ranked_BV, jnp.argsort(order_BV, axis=-1), axis=-1)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV)


def decoding_model(config: TransformerConfig, params: Params) -> Transformer:
    """The model as it is run here: chunks of rows are small, so attention takes all of a chunk's at once."""
    graphdef, _ = model_structure(dataclasses.replace(config, attention=Dense(), remat="none"))
    return nnx.merge(graphdef, params)


def empty_caches(config: TransformerConfig, batch: int, length: int) -> Cache:
    """A cache for each sequence, stacked: a leading dim B before the dims of a `Cache` of one sequence.

    Raises:
        InputError: see `make_cache`.
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), make_cache(config, 1, length))


def extend(
    model: Transformer, tokens_BT: Int[Array, "B T"], first: Int[Array, "*B"], caches: Cache
) -> tuple[Float[Array, "B T D"], Cache]:
    """`Transformer.extend` of every sequence.

    Args:
        model: the model.
        tokens_BT: T more tokens of every sequence.
        first: position of the first of them, one number for all sequences or one for each.
        caches: from `empty_caches`, or from an earlier call.
    """

    def extend_one(tokens_T: Int[Array, "T"], first: Int[Array, ""], cache: Cache) -> tuple[Float[Array, "T D"], Cache]:
        x_BTD, cache = model.extend(tokens_T[None], first + jnp.arange(tokens_T.shape[0]), cache)
        return x_BTD[0], cache

    return jax.vmap(extend_one, in_axes=(0, 0 if first.ndim else None, 0))(tokens_BT, first, caches)


def check(config: TransformerConfig, max_new_tokens: int, seed: int) -> None:
    """Raise the `InputError` that `generate` raises whatever the prompts; nothing is allocated."""
    jax.eval_shape(lambda: make_cache(config, 1, 1))
    require(max_new_tokens > 0, "max_new_tokens", max_new_tokens, "1 or more")
    require(0 <= seed < 2**32, "seed", seed, "0 to 2**32 - 1")


class Latest(NamedTuple):
    """The newest token of every sequence, not in the cache yet.

    Args:
        token_B: its id.
        pos_B: its position.
        finished_B: whether it ended its sequence, or came after the end.
    """

    token_B: Int[Array, "B"]
    pos_B: Int[Array, "B"]
    finished_B: Bool[Array, "B"]


@functools.partial(jax.jit, static_argnames=("config", "batch", "length", "mesh"))
def make_caches(config: TransformerConfig, batch: int, length: int, mesh: Mesh) -> Cache:
    """`empty_caches`, split over the devices."""
    return jax.lax.with_sharding_constraint(empty_caches(config, batch, length), NamedSharding(mesh, BATCH))


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames="caches")
def prefill(
    config: TransformerConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    first: Int[Array, ""],
    caches: Cache,
    *,
    mesh: Mesh,
) -> Cache:
    """Put tokens from one position on into the caches."""
    _, caches = extend(decoding_model(config, params), tokens_BT, first, caches)
    return jax.lax.with_sharding_constraint(caches, NamedSharding(mesh, BATCH))


@functools.partial(jax.jit, static_argnames=("config", "sampling", "num_ids", "mesh"), donate_argnames="caches")
def decode(
    config: TransformerConfig,
    params: Params,
    latest: Latest,
    caches: Cache,
    seed: UInt[Array, ""],
    end_token: Int[Array, ""],
    *,
    sampling: Sampling,
    num_ids: int,
    mesh: Mesh,
) -> tuple[Latest, Cache]:
    """Put the newest tokens into the caches and draw the next ones; arguments as those of `generate`."""
    model = decoding_model(config, params)
    x_BTD, caches = extend(model, latest.token_B[:, None], latest.pos_B, caches)
    logits_BV = model.logits(x_BTD)[:, 0, :num_ids]

    def key(sequence: Int[Array, ""], pos: Int[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sequence), pos)

    pos_B = latest.pos_B + 1
    token_B = sample(logits_BV, jax.vmap(key)(jnp.arange(len(pos_B)), pos_B), sampling).astype(jnp.int32)
    token_B = jnp.where(latest.finished_B, end_token, token_B)
    return jax.lax.with_sharding_constraint(
        (Latest(token_B, pos_B, token_B == end_token), caches), NamedSharding(mesh, BATCH)
    )


def read_prompts(
    config: TransformerConfig,
    params: Params,
    mesh: Mesh,
    prompts: Sequence[Integer[np.ndarray, "_"]],
    max_new_tokens: int,
) -> tuple[Latest, Cache]:
    """The last token of every prompt, and caches with room for all that follows, the prompts before it in them."""
    batch = NamedSharding(mesh, BATCH)
    last_B = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
    num_rows = int(last_B.max())
    caches = make_caches(config, len(prompts), math.ceil((num_rows + max_new_tokens) / CHUNK) * CHUNK, mesh)
    tokens_BT = np.zeros((len(prompts), math.ceil(num_rows / CHUNK) * CHUNK + 1), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt
    for first in range(0, num_rows, CHUNK):
        chunk_BT = jax.device_put(tokens_BT[:, first : first + CHUNK], batch)
        caches = prefill(config, params, chunk_BT, np.int32(first), caches, mesh=mesh)
    token_B, finished_B = tokens_BT[np.arange(len(prompts)), last_B], np.zeros(len(prompts), bool)
    return Latest(*jax.device_put((token_B, last_B, finished_B), batch)), caches


def generate(
    config: TransformerConfig,
    params: Params,
    mesh: Mesh,
    prompts: Sequence[Integer[np.ndarray, "_"]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    num_ids: int | None = None,
    end_token: int | None = None,
) -> Iterator[Integer[np.ndarray, "B"]]:
    """Continue every prompt; one step's tokens at a time.

    A draw depends on the seed, the prompt's index among the prompts, and the position, and on nothing else: a prompt
    gives the same tokens whatever stands after it in the batch (to the rounding of its logits).

    Args:
        config: the model's.
        params: its parameters.
        mesh: where they live; sequences are split over its devices, filled up with copies of the last.
        prompts: token ids of every prompt, one at least.
        max_new_tokens: steps at most.
        sampling: how a token is drawn.
        seed: of the draws.
        num_ids: ids from there on are never drawn (a model may have more than its tokenizer); None for all.
        end_token: ends a sequence, which goes on as nothing but `end_token`; when all have ended, so has the iterator.
            None for an end at `max_new_tokens` alone.

    Raises:
        InputError: no prompts, a bad prompt or number, or a model that cannot be cached.
    """
    check(config, max_new_tokens, seed)
    require(len(prompts) > 0, "prompts", [], "one prompt or more")
    for index, prompt in enumerate(prompts):
        require(len(prompt) > 0, f"prompts[{index}]", [], "one token or more")
        low, high = int(prompt.min()), int(prompt.max())
        allowed = f"ids of the model, 0 to {config.vocab_size - 1}"
        require(0 <= low and high < config.vocab_size, f"prompts[{index}]", low if low < 0 else high, allowed)

    num_prompts = len(prompts)
    filled_up = [*prompts, *[prompts[-1]] * (-num_prompts % mesh.size)]
    end = -1 if end_token is None else end_token  # no token is -1

    def steps() -> Iterator[Integer[np.ndarray, "B"]]:
        latest, caches = read_prompts(config, params, mesh, filled_up, max_new_tokens)
        for _ in range(max_new_tokens):
            latest, caches = decode(
                config,
                params,
                latest,
                caches,
                np.uint32(seed),
                np.int32(end),
                sampling=sampling,
                num_ids=config.vocab_size if num_ids is None else num_ids,
                mesh=mesh,
            )
            token_B = np.asarray(latest.token_B)[:num_prompts]
            yield token_B
            if np.all(token_B == end):
                return

    return steps()


class TextStream:
    """Token ids -> text, as they come: bytes that begin a character wait for those that end it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Integer[np.ndarray, "_"], *, last: bool = False) -> str:
        """The text that is complete with these ids; with `last`, what still waits comes too, as a replacement sign."""
        return self._decoder.decode(self._tokenizer.decode(ids), final=last)


def printable(text: str) -> str:
    r"""The text without control characters, which could do anything to a terminal: they become escapes like \x1b."""

    def shown(char: str) -> str:
        is_control = unicodedata.category(char) == "Cc" and char not in "\n\t"
        return char.encode("unicode_escape").decode() if is_control else char

    return "".join(map(shown, text))


def show(text: str) -> None:
    """Write to the terminal at once."""
    print(printable(text), end="", flush=True)


def watch(
    stream: Iterator[Integer[np.ndarray, "B"]],
    prompts: Sequence[Integer[np.ndarray, "_"]],
    tokenizer: Tokenizer,
    max_new_tokens: int,
) -> list[Integer[np.ndarray, "_"]]:
    """Take all tokens from `generate` and return each sequence's, its end included.

    One sequence is shown as it comes, after its prompt; of several, the progress. The rate is that after the first
    step, which waits for compilation.
    """
    alone = len(prompts) == 1
    text = TextStream(tokenizer)
    if alone:
        show(text.feed(prompts[0]))
    start = time.perf_counter()
    times, steps = [], []
    for token_B in tqdm(stream, total=max_new_tokens, unit="step", disable=alone):
        times.append(time.perf_counter())
        steps.append(token_B)
        if alone:
            show(text.feed(token_B))
    if alone:
        show(text.feed(steps[-1][:0], last=True) + "\n")
    tokens = []
    for sequence in np.stack(steps, axis=1):
        ends = np.flatnonzero(sequence == tokenizer.end_of_document)
        tokens.append(sequence[: ends[0] + 1] if len(ends) else sequence)
    num_tokens = sum(map(len, tokens))
    rate = f", then {(num_tokens - len(prompts)) / (times[-1] - times[0]):,.1f} tokens/s" if len(times) > 1 else ""
    print(f"{num_tokens:,} tokens: the first after {times[0] - start:.1f} s{rate}", file=sys.stderr)
    return tokens


def complete(
    workdir: Path,
    prompts: Sequence[bytes],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    step: str = "newest",
    output: Path | None = None,
) -> list[str]:
    """Continue prompts with a trained model, on the terminal and, if wanted, in a file.

    A prompt is read as it is, as a piece of a document whose beginning is not seen: so training windows begin. An empty
    prompt is the end of a document, after which training has the beginning of the next.

    Args:
        workdir: of the run.
        prompts: one or more. One is shown with its text as it comes, several with theirs when all are complete.
        max_new_tokens: at most; a text ends earlier where its document does.
        sampling: how a token is drawn.
        seed: of the draws.
        step: "newest", "best" (the lowest validation loss) or a number.
        output: a new JSON file for prompts, texts, tokens and settings; None for none.

    Returns:
        What follows each prompt.

    Raises:
        InputError: bad input, before any device work.
    """
    require(len(prompts) > 0, "prompt", list(prompts), "one or more: --prompt=TEXT or --prompt_file=FILE")
    if output is not None:
        require(not output.exists(), "output", str(output), "a file that does not exist yet")
    trained = read_trained(workdir, step, {})
    check(trained.run.model, max_new_tokens, seed)
    tokenizer = saved_tokenizer(workdir)
    ids = [tokenizer.encode(prompt) if prompt else np.array([tokenizer.end_of_document]) for prompt in prompts]
    if output is not None:
        report.make_directory(output.absolute().parent)
    mesh, params = restore(trained)
    stream = generate(
        trained.run.model,
        params,
        mesh,
        ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        num_ids=tokenizer.vocab_size,
        end_token=tokenizer.end_of_document,
    )
    tokens = watch(stream, ids, tokenizer, max_new_tokens)
    texts = [tokenizer.decode(sequence).decode("utf-8", "replace") for sequence in tokens]
    if len(prompts) > 1:
        for number, (prompt, sequence) in enumerate(zip(ids, tokens, strict=True), 1):
            whole = TextStream(tokenizer).feed(np.concatenate([prompt, sequence]), last=True)
            show(f"\n==== {number} of {len(prompts)} ====\n{whole}\n")
    if output is not None:
        settings = dataclasses.asdict(sampling) | {"max_new_tokens": max_new_tokens, "seed": seed}
        completions = [
            {"prompt": prompt.decode("utf-8", "replace"), "text": text, "tokens": sequence.tolist()}
            for prompt, text, sequence in zip(prompts, texts, tokens, strict=True)
        ]
        content = {"workdir": str(workdir), "step": trained.step, "settings": settings, "completions": completions}
        with output.open("x") as file:
            file.write(json.dumps(content | provenance("flax"), indent=1) + "\n")
    return texts


def define_flags() -> None:
    """The command line's."""
    flags.DEFINE_string("workdir", None, "Directory of the run.")
    flags.DEFINE_multi_string("prompt", [], "Text to continue; give it again for a batch.")
    flags.DEFINE_string("prompt_file", None, "File whose whole content, a last newline included, is one more prompt.")
    flags.DEFINE_integer("max_new_tokens", 256, "Tokens at most; a text ends earlier where its document does.")
    flags.DEFINE_float("temperature", 0.8, "Logits are divided by it; 0 is greedy.")
    flags.DEFINE_integer("top_k", 40, "Only so many most probable tokens are drawn; 0 for all.")
    flags.DEFINE_float("top_p", 0.95, "Only the most probable tokens that together reach it are drawn; 1 for all.")
    flags.DEFINE_bool("greedy", False, "Always the most probable token: --temperature=0.")
    flags.DEFINE_integer("seed", 0, "Of the draws.")
    flags.DEFINE_string("step", "newest", "Checkpoint: newest, best (lowest validation loss) or its number.")
    flags.DEFINE_string("output", None, "New JSON file for prompts, texts, tokens and settings.")
    flags.mark_flag_as_required("workdir")


def main(_: list[str]) -> None:
    """Flags, then one call."""
    given = flags.FLAGS
    require(given.top_k >= 0, "--top_k", given.top_k, "1 or more tokens, or 0 for all")
    prompts = [os.fsencode(prompt) for prompt in given.prompt]
    if given.prompt_file is not None:
        try:
            prompts.append(Path(given.prompt_file).read_bytes())
        except OSError as error:
            raise InputError(f"--prompt_file = {given.prompt_file!r}: cannot be read: {error}") from error
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    complete(
        Path(given.workdir),
        prompts,
        max_new_tokens=given.max_new_tokens,
        sampling=Sampling(0.0 if given.greedy else given.temperature, given.top_k or None, given.top_p),
        seed=given.seed,
        step=given.step,
        output=Path(given.output) if given.output else None,
    )


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
