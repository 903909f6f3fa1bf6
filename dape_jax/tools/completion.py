"""Generate text from a trained model, one token at a time, with a key/value cache. `generate.py` is the command line.

Sequences differ in length, so each has its own cache, and `jax.vmap` extends all of them together. Prompts are padded
on the right; all but the last token of the longest are prefilled in chunks of `CHUNK` rows:

    prompts    a b c d e f            sequence 0
               x y z . . .            sequence 1, padded
    prefill    a b c d e              columns of the cache. Padding is to the right of every later query, so it is
               x y z . .              masked until it is overwritten
    decode     f at column 5, z at column 2: the first step; each step gives the logits of every sequence's next token

Memory is linear in length: a chunk holds `CHUNK` rows of scores, and only sampled positions are unembedded.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Integer, Key, UInt

from dape_jax.command_line import unescape
from dape_jax.data.conventions import saved_conventions
from dape_jax.data.tokenizers import Tokenizer, saved_tokenizer
from dape_jax.errors import printable, require
from dape_jax.evaluation.programs import available_bytes
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.hardware import GIB
from dape_jax.model.attention import Dense
from dape_jax.model.transformer import Cache, Params, Transformer, TransformerConfig, make_cache, model_structure
from dape_jax.progress import Progress
from dape_jax.sharding import activation_spec
from dape_jax.storage import to_path
from dape_jax.tools.options import GenerateFlags

logger = logging.getLogger(__name__)

# Rows per prefill step. Lengths of caches are multiples of it, so that prompts of many lengths share a program.
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Apply temperature first, then top-k, then top-p among the tokens that top-k keeps."""

    temperature: float = 1.0  # divisor of the logits; 0 is greedy, the most probable token
    top_k: int | None = None  # number of most probable tokens to sample from, or None for all
    top_p: float | None = None  # total probability that the smallest set of most probable tokens reaches, or None

    def __post_init__(self):
        allowed = "must be 0 (greedy) or a positive number"
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, allowed)
        require(self.top_k is None or self.top_k > 0, "top_k", self.top_k, "must be positive, or None for all")
        allowed = "must be above 0 and at most 1, or None for all"
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, allowed)


def sample(logits_BV: Float[Array, "B V"], keys_B: Key[Array, "B"], sampling: Sampling) -> Int[Array, "B"]:
    """Draw one token from each row of logits. A row has its own key, so its draw does not depend on the others.

    Differs: among equal logits at the edge of top-k the lower ids are kept, so that top_k=1 is greedy; common
        implementations keep all of them.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    # Subtract the maximum first, so that no small temperature overflows.
    logits_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
    tiny = float(jnp.finfo(logits_BV.dtype).tiny)  # smaller numbers are 0 on the device
    logits_BV = logits_BV / max(sampling.temperature, tiny)
    if sampling.top_k is not None or sampling.top_p is not None:
        order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
        ranked_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
        if sampling.top_k is not None:
            ranked_BV = jnp.where(
                jnp.arange(ranked_BV.shape[1])[None] < min(sampling.top_k, ranked_BV.shape[1]), ranked_BV, -jnp.inf
            )
        if sampling.top_p is not None and sampling.top_p < 1:
            before_BV = jnp.cumsum(jax.nn.softmax(ranked_BV, axis=-1), axis=-1)[:, :-1]
            before_BV = jnp.pad(before_BV, ((0, 0), (1, 0)))
            ranked_BV = jnp.where(before_BV < max(sampling.top_p, tiny), ranked_BV, -jnp.inf)
        logits_BV = jnp.take_along_axis(ranked_BV, jnp.argsort(order_BV, axis=-1), axis=-1)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV)


def decoding_model(config: TransformerConfig, params: Params) -> Transformer:
    """Return the model with dense attention: a chunk has few rows."""
    graphdef, _ = model_structure(dataclasses.replace(config, attention=Dense(), remat="none"))
    return nnx.merge(graphdef, params)


def extend(
    model: Transformer, tokens_BT: Int[Array, "B T"], first: Int[Array, "*B"], caches: Cache
) -> tuple[Float[Array, "B T D"], Cache]:
    """Apply `Transformer.extend` to the next T tokens of every sequence.

    `first` is the position of the first new token: a scalar for all sequences, or one number for each.
    """

    def extend_one(tokens_T: Int[Array, "T"], first: Int[Array, ""], cache: Cache) -> tuple[Float[Array, "T D"], Cache]:
        x_BTD, cache = model.extend(tokens_T[None], first + jnp.arange(tokens_T.shape[0]), cache)
        return x_BTD[0], cache

    return jax.vmap(extend_one, in_axes=(0, 0 if first.ndim else None, 0))(tokens_BT, first, caches)


def check(config: TransformerConfig, max_new_tokens: int, seed: int) -> None:
    """Raise `InputError` for arguments that `generate` refuses for any prompt. Allocates nothing."""
    jax.eval_shape(lambda: make_cache(config, 1, 1))
    require(0 < max_new_tokens < 2**31, "max_new_tokens", max_new_tokens, "must be 1 to 2**31 - 1")
    require(0 <= seed < 2**32, "seed", seed, "must be 0 to 2**32 - 1")


class Latest(NamedTuple):
    """Newest token of every sequence, not yet in the cache, and its position."""

    token_B: Int[Array, "B"]
    pos_B: Int[Array, "B"]


@functools.partial(jax.jit, static_argnames=("config", "batch", "length", "mesh"))
def make_caches(config: TransformerConfig, batch: int, length: int, mesh: Mesh) -> Cache:
    """Return one cache per sequence, split over the devices: every array of `Cache` has a leading dim B."""
    caches = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), make_cache(config, 1, length))
    return jax.lax.with_sharding_constraint(caches, NamedSharding(mesh, activation_spec("B")))


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
    """Append tokens to the caches, starting at position `first`."""
    _, caches = extend(decoding_model(config, params), tokens_BT, first, caches)
    return jax.lax.with_sharding_constraint(caches, NamedSharding(mesh, activation_spec("B")))


@functools.partial(jax.jit, static_argnames=("config", "sampling", "num_ids", "mesh"), donate_argnames="caches")
def decode(
    config: TransformerConfig,
    params: Params,
    latest: Latest,
    caches: Cache,
    seed: UInt[Array, ""],
    *,
    sampling: Sampling,
    num_ids: int,
    mesh: Mesh,
) -> tuple[Latest, Cache]:
    """Append the newest tokens to the caches and draw the next ones; see `generate`."""
    model = decoding_model(config, params)
    x_BTD, caches = extend(model, latest.token_B[:, None], latest.pos_B, caches)
    logits_BV = model.logits(x_BTD)[:, 0, :num_ids]

    def key(sequence: Int[Array, ""], pos: Int[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sequence), pos)

    pos_B = latest.pos_B + 1
    token_B = sample(logits_BV, jax.vmap(key)(jnp.arange(len(pos_B)), pos_B), sampling).astype(jnp.int32)
    batch = NamedSharding(mesh, activation_spec("B"))
    return jax.lax.with_sharding_constraint((Latest(token_B, pos_B), caches), batch)


def read_prompts(
    config: TransformerConfig,
    params: Params,
    mesh: Mesh,
    prompts: Sequence[Integer[np.ndarray, "_"]],
    max_new_tokens: int,
) -> tuple[Latest, Cache]:
    """Prefill caches with all but the last token of every prompt; return the last tokens and the caches."""
    batch = NamedSharding(mesh, activation_spec("B"))
    last_B = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
    num_rows = int(last_B.max())
    caches = make_caches(config, len(prompts), math.ceil((num_rows + max_new_tokens) / CHUNK) * CHUNK, mesh)
    tokens_BT = np.zeros((len(prompts), math.ceil(num_rows / CHUNK) * CHUNK + 1), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt
    for first in range(0, num_rows, CHUNK):
        chunk_BT = jax.device_put(tokens_BT[:, first : first + CHUNK], batch)
        caches = prefill(config, params, chunk_BT, np.int32(first), caches, mesh=mesh)
    token_B = tokens_BT[np.arange(len(prompts)), last_B]
    return Latest(*jax.device_put((token_B, last_B), batch)), caches


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
    end_tokens: tuple[int, ...] = (),
) -> Iterator[Integer[np.ndarray, "B"]]:
    """Continue every prompt; yield the tokens of one step at a time.

    A draw depends only on the seed, the index of the prompt and the position, so later prompts do not change the tokens
    of earlier ones (up to rounding of the logits). Sequences are split over the devices of `mesh`, the mesh of the
    parameters; the batch is padded with copies of the last prompt.

    Tokens are drawn from the first `num_ids` ids: the tokenizer's vocabulary, or the model's if None. Each of the
    `end_tokens` ends a sequence, which then repeats the first of them. The iterator stops when all sequences have
    ended, and always after `max_new_tokens` steps. The model does not read the last token.

    Raises:
        InputError: there are no prompts, a prompt or number is invalid, the model cannot use a cache, or the cache
            does not fit into memory.
    """
    check(config, max_new_tokens, seed)
    require(len(prompts) > 0, "prompts", [], "must have at least one prompt")
    for index, prompt in enumerate(prompts):
        require(len(prompt) > 0, f"prompts[{index}]", [], "must have at least one token")
        low, high = int(prompt.min()), int(prompt.max())
        allowed = f"must be ids of the model, 0 to {config.vocab_size - 1}"
        require(0 <= low and high < config.vocab_size, f"prompts[{index}]", low if low < 0 else high, allowed)
        config.check_length(f"tokens of prompts[{index}] and max_new_tokens - 1", len(prompt) + max_new_tokens - 1)

    num_prompts = len(prompts)
    padded = [*prompts, *[prompts[-1]] * (-num_prompts % mesh.size)]
    column = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.eval_shape(lambda: make_cache(config, 1, 1)))
    needed = column * (max(map(len, prompts)) + max_new_tokens) * len(padded) // mesh.size
    available = available_bytes(mesh)
    allowed = f"the cache needs {needed / GIB:.2f} GiB on each device, where {available / GIB:.2f} GiB are free"
    require(needed <= available, "max_new_tokens", max_new_tokens, allowed)
    num_ids = config.vocab_size if num_ids is None else num_ids

    def steps() -> Iterator[Integer[np.ndarray, "B"]]:
        latest, caches = read_prompts(config, params, mesh, padded, max_new_tokens)
        ended_B = np.zeros(num_prompts, bool)
        for _ in range(max_new_tokens):
            latest, caches = decode(
                config, params, latest, caches, np.uint32(seed), sampling=sampling, num_ids=num_ids, mesh=mesh
            )
            token_B = np.array(latest.token_B)[:num_prompts]
            token_B[ended_B] = end_tokens[:1]
            yield token_B
            ended_B |= np.isin(token_B, end_tokens)
            if ended_B.all():
                return

    return steps()


def added_text(tokenizer: Tokenizer, prompt: Integer[np.ndarray, "_"], tokens: Integer[np.ndarray, "_"]) -> str:
    """Return the text that tokens add to a prompt. Incomplete characters become replacement signs.

    The text of a token may depend on the tokens before it: sentencepiece's "▁a" is "a" where a text begins, and " a"
    elsewhere.
    """
    if tokenizer.decodes_tokens_alone:
        return tokenizer.decode(tokens).decode("utf-8", "replace")
    prompt = prompt[-16:]  # all that a decoder looks at
    both = tokenizer.decode(np.concatenate([prompt, tokens])).decode("utf-8", "replace")
    return both[len(tokenizer.decode(prompt).decode("utf-8", "replace")) :]


def generate_until(
    steps: Iterator[Integer[np.ndarray, "B"]],
    prompts: Sequence[Integer[np.ndarray, "_"]],
    tokenizer: Tokenizer,
    end_tokens: Sequence[int],
    until: Sequence[str],
) -> list[str]:
    """Consume steps of `generate` until the sequence of each prompt has ended or contains a stop sequence.

    Stop sequences are compared with the decoded string, so they may begin and end inside tokens. The returned texts end
    before them, and before the end token.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    outputs, unfinished = [""] * len(prompts), set(range(len(prompts)))
    for token_B in steps:
        for row in list(unfinished):
            if token_B[row] in end_tokens:
                unfinished.remove(row)
                continue
            tokens[row].append(int(token_B[row]))
            outputs[row] = added_text(tokenizer, prompts[row], np.array(tokens[row]))
            if any(stop in outputs[row] for stop in until):
                for stop in until:
                    outputs[row] = outputs[row].partition(stop)[0]
                unfinished.remove(row)
        if not unfinished:
            break
    return outputs


def complete(given: GenerateFlags, prompts: Sequence[bytes]) -> list[str]:
    """Continue prompts with a trained model, print the completions and return them.

    A prompt is read as the middle of a document, as training windows are. An empty prompt is the end-of-document token,
    which precedes every document in training. A completion ends at any end token of the model.

    Raises:
        InputError: the input is invalid; raised before any device is used.
    """
    require(len(prompts) > 0, "prompt", list(prompts), "must have at least one: --prompt=TEXT or --prompt_file=FILE")
    sampling = Sampling(given.temperature, given.top_k or None, given.top_p)
    trained = read_trained(to_path(given.workdir, "--workdir"), given.step, {})
    check(trained.run.model, given.max_new_tokens, given.seed)
    tokenizer = saved_tokenizer(trained.workdir)
    conventions = saved_conventions(trained.workdir)
    end_tokens = conventions.ends(tokenizer)
    first = conventions.bos_id(tokenizer) if given.bos and not given.chat else None
    if first is not None:
        logger.info("prompts begin with %s, as in the imported model; --bos=no leaves it out", conventions.bos_token)
    if given.chat:
        texts = [prompt.decode("utf-8", "replace") for prompt in prompts]
        prompts = [conventions.render([{"role": "user", "content": text}]).encode() for text in texts]
    encode = tokenizer.encode_controls if given.chat or given.control_tokens else tokenizer.encode
    start = np.array([] if first is None else [first], np.uint32)
    ids = [np.concatenate([start, encode(prompt)]) for prompt in prompts]
    ids = [each if len(each) else np.array([tokenizer.end_of_document]) for each in ids]
    mesh, params = restore(trained)
    options = {"sampling": sampling, "seed": given.seed, "num_ids": tokenizer.vocab_size, "end_tokens": end_tokens}
    stream = generate(trained.run.model, params, mesh, ids, max_new_tokens=given.max_new_tokens, **options)
    steps = iter(Progress(stream, total=given.max_new_tokens, unit="step", desc=trained.name))
    completions = generate_until(steps, ids, tokenizer, end_tokens, list(map(unescape, given.stop)))
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), 1):
        if len(prompts) > 1:
            print(f"\n==== {number} of {len(prompts)} ====")
        print(printable(prompt.decode("utf-8", "replace") + completion, keep="\n\t"))
    return completions
