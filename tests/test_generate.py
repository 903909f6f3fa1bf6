"""Generation: the cache agrees with the full forward, draws have the right distribution, errors name the input."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from helpers import ALL_PROCESSORS, SMALL_BIAS, each_value, random_params
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from processes import run_python

from dape_jax.config import read_model
from dape_jax.data.tokenizers import Bytes
from dape_jax.errors import InputError, printable
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.sharding import MeshConfig, make_mesh, parameter_shardings
from dape_jax.tools import completion
from dape_jax.tools.completion import CHUNK, Sampling, complete, decode, generate, make_caches, prefill, sample
from dape_jax.tools.options import GenerateFlags

pytestmark = pytest.mark.extra

GREEDY = Sampling(temperature=0.0)
# Tables of biases are small enough for positions of these tests to exceed them.
BIAS_OPTIONS = SMALL_BIAS | {"t5": {"num_buckets": 8, "max_distance": 12}}
FACTOR = {"factor": 4.0}
ROTARY = {"none": {}, "rope": {}, "pi": FACTOR, "ntk": FACTOR, "yarn": FACTOR | {"train_length": 16}}
PROCESSORS = ALL_PROCESSORS | {
    "listing1": DapeConfig(kernel_width=1, channels=5, edge="listing"),  # one column has no edge
    "leak_causal": DapeConfig(kernel_width=2, channels=5, alignment="causal", leak=True),  # to the left alone
}


def make_config(bias: str, processor: str = "none", rotary: str = "none", **changes) -> TransformerConfig:
    spec = tiny.SPEC["model"] | {"vocab_size": 11, "num_heads": 4, "num_kv_heads": 4, "processor": {"name": "none"}}
    spec |= {"bias": {"name": bias} | BIAS_OPTIONS.get(bias, {}), "rotary": {"name": rotary} | ROTARY[rotary]}
    return dataclasses.replace(read_model(spec | changes), processor=PROCESSORS[processor])


# The contracts have every bias and processor with a cache; here they are sampled through the whole model.
CASES = [*each_value((BIASES, PROCESSORS, ROTARY, (4, 2, 1), (None, 5))), *tiny.ARCHITECTURES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cached_logits_are_those_of_the_full_forward(case):
    """Extend by a prompt, single tokens, several tokens, and a single token again: all logits are the same."""
    if isinstance(case, str):
        config = read_model(tiny.SPEC["model"] | {"vocab_size": 11} | tiny.ARCHITECTURES[case])
    else:
        *method, kv_heads, window = case
        config = make_config(*method, num_kv_heads=kv_heads, window=window)
    params = random_params(config)
    tokens_BT = np.random.default_rng(1).integers(0, 11, (2, 18), np.int32)
    graphdef, _ = nnx.split(completion.decoding_model(config, params))
    expected = jax.jit(lambda params, tokens_BT: nnx.merge(graphdef, params)(tokens_BT))(params, tokens_BT)

    @jax.jit
    def more(params, tokens_BT, first, caches):
        model = nnx.merge(graphdef, params)
        x_BTD, caches = completion.extend(model, tokens_BT, first, caches)
        return model.logits(x_BTD), caches

    caches, found = make_caches(config, 2, 23, one_device()), []
    for first, last in [(0, 6), (6, 7), (7, 8), (8, 14), (14, 15), (15, 16), (16, 17), (17, 18)]:
        start = np.int32(first) if last - first > 1 else np.full(2, first, np.int32)
        logits, caches = more(params, tokens_BT[:, first:last], start, caches)
        found.append(logits)
    assert expected.std() > 0.3
    # Rounding of the largest score, times a few: Sandwich's is 64 / (8 / H) = 32, the others are of size 1.
    atol = 1e-4 if type(config.bias).__name__.startswith("Sandwich") else 1e-5
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=atol)


def one_device() -> Mesh:
    return make_mesh(MeshConfig(data=1, fsdp=1, context=1, tensor=1), jax.devices()[:1])


def place(params: Params, mesh: Mesh) -> Params:
    return jax.device_put(params, parameter_shardings(params, mesh))


@pytest.fixture(scope="module")
def model() -> tuple[TransformerConfig, Params]:
    config = make_config("kerple", "dape3", "rope", num_kv_heads=2)
    return config, place(random_params(config), one_device())


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 11, length)


def tokens_of(
    model: tuple[TransformerConfig, Params], prompts: list, num: int, sampling: Sampling, mesh=None, **more
) -> np.ndarray:
    """Return all tokens of a generation, [prompts, steps]."""
    mesh = one_device() if mesh is None else mesh
    return np.stack(list(generate(*model, mesh, prompts, max_new_tokens=num, sampling=sampling, **more)), axis=1)


def test_logits_of_a_ragged_batch_are_those_of_each_alone(model):
    """Use lengths at which the last row is, or is not, in another chunk than the rows before it."""
    config, params = model
    length = CHUNK + 2
    prompts = [prompt_of(size) for size in (3, CHUNK + 1, length)]

    @jax.jit
    def last_logits(params, token_B, pos_B, caches):
        decoder = completion.decoding_model(config, params)
        return decoder.logits(completion.extend(decoder, token_B[:, None], pos_B, caches)[0])[:, 0]

    def logits_of(prompts: list[np.ndarray]) -> jax.Array:
        latest, caches = completion.read_prompts(config, params, one_device(), prompts, CHUNK)
        return last_logits(params, latest.token_B, latest.pos_B, caches)

    filled_BT = jnp.asarray([np.pad(prompt, (0, length - len(prompt))) for prompt in prompts])
    whole = jax.jit(lambda params: completion.decoding_model(config, params)(filled_BT))(params)
    for row, prompt, found in zip(whole, prompts, logits_of(prompts), strict=True):
        np.testing.assert_allclose(found, logits_of([prompt])[0], atol=1e-5)
        np.testing.assert_allclose(found, row[len(prompt) - 1], atol=1e-5)


def test_a_draw_depends_only_on_seed_index_and_position(model):
    prompts, sampling = [prompt_of(length) for length in (4, 9, 6)], Sampling(temperature=2.0)
    tokens = tokens_of(model, prompts, 12, sampling)
    np.testing.assert_array_equal(tokens_of(model, prompts, 12, sampling), tokens)
    np.testing.assert_array_equal(tokens_of(model, prompts[:1], 12, sampling)[0], tokens[0])
    np.testing.assert_array_equal(tokens_of(model, prompts[::-1], 12, sampling)[1], tokens[1])
    assert np.any(tokens_of(model, prompts, 12, sampling, seed=1) != tokens)
    same = tokens_of(model, [prompts[0]] * 3, 12, sampling)
    assert len({tuple(row) for row in same.tolist()}) == 3


def test_a_mesh_changes_no_token(model):
    """With eight devices and three prompts, the batch is padded and split, and the caches stay split."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=4, context=1, tensor=1))
    config, params = model[0], place(model[1], mesh)
    prompts, sampling = [prompt_of(length) for length in (4, CHUNK + 3, 6)], Sampling(1.0, 5, 0.9)
    expected = tokens_of(model, prompts, 6, sampling)
    np.testing.assert_array_equal(tokens_of((config, params), prompts, 6, sampling, mesh), expected)
    caches = make_caches(config, 8, 2 * CHUNK, mesh)
    caches = prefill(config, params, jnp.zeros((8, CHUNK), jnp.int32), jnp.asarray(0), caches, mesh=mesh)
    for leaf in caches:
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {1}


def test_memory_is_linear_in_length_and_the_caches_are_not_copied(model):
    """Prefill and decode update their cache in place, and other memory grows linearly with its length."""
    config, mesh, batch = dataclasses.replace(model[0], num_layers=8), one_device(), 2
    _, params = model_structure(config)

    def of(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def temporary_bytes(length: int) -> list[int]:
        caches = jax.eval_shape(lambda: make_caches(config, batch, length, mesh))
        cache_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in caches)
        latest = completion.Latest(of((batch,), "int32"), of((batch,), "int32"))
        options = {"sampling": Sampling(0.8, 5, 0.9), "num_ids": 11, "mesh": mesh}
        programs = [
            prefill.lower(config, params, of((batch, CHUNK), "int32"), of((), "int32"), caches, mesh=mesh),
            decode.lower(config, params, latest, caches, of((), "uint32"), **options),
        ]
        memories = [program.compile().memory_analysis() for program in programs]
        assert all(memory.alias_size_in_bytes >= cache_bytes for memory in memories)
        assert memories[1].temp_size_in_bytes < cache_bytes
        return [memory.temp_size_in_bytes for memory in memories]

    for short, long in zip(temporary_bytes(1024), temporary_bytes(2048), strict=True):
        assert 1.2 * short < long < 2.1 * short


def test_steps_and_prompts_of_other_lengths_need_no_other_program(model):
    def programs() -> int:
        return prefill._cache_size() + decode._cache_size() + make_caches._cache_size()

    assert tokens_of(model, [prompt_of(3)], 2, GREEDY).shape == (1, 2)
    before = programs()
    assert tokens_of(model, [prompt_of(3)], 60, GREEDY).shape == (1, 60)
    assert tokens_of(model, [prompt_of(41)], 9, GREEDY).shape == (1, 9)
    assert programs() == before


def test_a_sequence_ends_at_the_end_token_and_the_stream_with_the_last(model):
    prompts, sampling = [prompt_of(length) for length in (4, 7, 2)], Sampling(temperature=2.0)
    free = tokens_of(model, prompts, 20, sampling)
    num_steps = []
    first, second, other = free[0, 3], free[0, 9], free[1, 5]
    for end_tokens in ((first,), (second,), (second, other)):
        ends = [int(np.append(np.flatnonzero(np.isin(row, end_tokens)), 20)[0]) for row in free]
        found = tokens_of(model, prompts, 20, sampling, end_tokens=tuple(map(int, end_tokens)))
        num_steps.append(found.shape[1])
        assert num_steps[-1] == min(max(ends) + 1, 20)
        for row, expected, end in zip(found, free, ends, strict=True):
            np.testing.assert_array_equal(row[:end], expected[:end])
            np.testing.assert_array_equal(row[end : end + 1], expected[end : end + 1])
            assert np.all(row[end + 1 :] == end_tokens[0])
    assert min(num_steps) < 20


def test_end_tokens_in_a_prompt_only_start_a_document_and_unknown_ids_are_never_drawn(model):
    free = tokens_of(model, [np.array([3])], 5, GREEDY)
    assert 3 not in free
    np.testing.assert_array_equal(tokens_of(model, [np.array([3])], 5, GREEDY, end_tokens=(3,)), free)
    assert tokens_of(model, [prompt_of(4)], 40, Sampling(temperature=5.0), num_ids=4).max() == 3


# ---- draws


def draw(logits: list[float], sampling: Sampling, num: int = 64) -> np.ndarray:
    """Draw tokens from one row of logits."""
    logits_BV = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (num, len(logits)))
    return np.asarray(sample(logits_BV, jax.random.split(jax.random.key(7), num), sampling))


def truncated(logits: list[float], sampling: Sampling) -> np.ndarray:
    """Return the expected probabilities of a draw, in double precision."""
    scaled = np.asarray(logits, float) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = np.zeros(len(scaled), bool)
    kept[order[: sampling.top_k]] = True
    probs = np.where(kept, np.exp(scaled - scaled.max()), 0)
    probs /= probs.sum()
    if sampling.top_p is not None:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order] = np.where(before < sampling.top_p, probs[order], 0)
    return probs / probs.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_k=2**63 - 1, top_p=1.0),
        Sampling(top_p=0.7),
        Sampling(temperature=2.0, top_k=4, top_p=0.8),
        Sampling(temperature=0.3, top_k=2, top_p=0.3),
    ],
)
def test_frequencies_are_the_probabilities(sampling):
    """Compare within five standard errors, in 40,000 draws: a truncated token is never drawn. Two logits are equal."""
    logits, num = [0.5, 2.0, -1.0, 2.0, 0.0, 1.0], 40_000
    expected = truncated(logits, sampling)
    found = np.bincount(draw(logits, sampling, num), minlength=6) / num
    assert np.all(np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / num))


def test_of_equal_logits_the_lower_ids_are_kept():
    logits = [0.0, 1.0, 1.0, 1.0, 0.0]
    assert set(draw(logits, Sampling(top_k=2))) == {1, 2}
    assert set(draw(logits, Sampling(top_k=1))) == {1}
    assert set(draw(logits, Sampling(top_p=1e-6))) == {1}
    assert set(draw(logits, GREEDY)) == {1}
    # The fewest of five, each 0.2, that reach 0.5: three.
    assert set(draw([0.0] * 5, Sampling(top_p=0.5))) == {0, 1, 2}
    assert set(draw([0.0] * 4, Sampling(top_p=0.5))) == {0, 1}
    for small in (1e-300, 1e-30, 1e-3):  # close to greedy, and finite
        assert set(draw([5.0, 7.0, -3.0], Sampling(small))) == {1}
        assert set(draw([5.0, 7.0, -3.0], Sampling(top_p=small))) == {1}


# ---- what is refused


@pytest.mark.parametrize(
    ("prompts", "changes", "words"),
    [
        ([], {}, r"prompts = \[\]"),
        ([[1], []], {}, r"prompts\[1\] = \[\]"),
        ([[1], [2, 11]], {}, r"prompts\[1\] = 11: .*0 to 10"),
        ([[-1, 3]], {}, r"prompts\[0\] = -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([[1]], {"max_new_tokens": 2**63 - 1}, r"max_new_tokens = \d+: must be 1 to 2\*\*31 - 1"),
        ([[1]] * 1000, {"max_new_tokens": 2**31 - 1}, r"max_new_tokens = \d+: the cache needs \S+ GiB on each device"),
        ([[1]], {"seed": -1}, "seed = -1"),
    ],
)
def test_bad_requests_are_named_at_the_call(model, prompts, changes, words):
    """Raise at the call, not at the first step."""
    options = {"max_new_tokens": 2, "sampling": GREEDY} | changes
    with pytest.raises(InputError, match=words):
        generate(*model, one_device(), [np.array(prompt, int) for prompt in prompts], **options)


def test_bad_sampling_is_named():
    wrong = [("temperature", math.nan), ("temperature", math.inf), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5)]
    for name, value in wrong:
        with pytest.raises(InputError, match=f"{name} = {value}: must be"):
            Sampling(**{name: value})


# ---- text


@given(st.text().map(str.encode) | st.binary(), st.integers(0, 20))
def test_added_text_is_that_of_the_tokens(content, start):
    """The end of a document is not part of the text, and bytes of incomplete characters are replaced."""
    prompt, tokens = np.split(np.frombuffer(content, np.uint8).astype(int), [start])
    with_end = np.append(tokens, Bytes.end_of_document)
    assert completion.added_text(Bytes(), prompt, with_end) == content[start:].decode("utf-8", "replace")


# ---- from a checkpoint


def test_completions_are_those_of_the_library_and_shown(trained_run, capsys):
    """Empty prompts start a document, and control characters are escaped."""
    prompts = ["the läng".encode(), b"", b"scores\x1b"]
    given = GenerateFlags(str(trained_run), max_new_tokens=12, temperature=1.0, top_k=0, top_p=1.0)
    texts = complete(given, prompts)
    shown, _ = capsys.readouterr()
    assert "==== 1 of 3 ====\nthe läng" in shown
    assert "==== 3 of 3 ====\nscores\\x1b" in shown
    assert "\x1b" not in shown
    trained = read_trained(trained_run, "newest", {})
    mesh, params = restore(trained)
    ids = [Bytes().encode(prompt) if prompt else np.array([256]) for prompt in prompts]
    tokens = tokens_of((trained.run.model, params), ids, 12, Sampling(1.0), mesh, end_tokens=(256,))
    assert texts == [Bytes().decode(row).decode("utf-8", "replace") for row in tokens]
    assert complete(given, prompts[:1]) == texts[:1]
    assert capsys.readouterr().out == printable("the läng" + texts[0], keep="\n\t") + "\n"


def test_bad_input_is_named_before_any_parameter_is_read(trained_run, monkeypatch):
    monkeypatch.setattr(completion, "restore", None)  # calling it would be a TypeError
    for prompts, words in (([], r"prompt = \[\]: .*--prompt_file"), ([b"a"], "seed = 4294967296")):
        with pytest.raises(InputError, match=words):
            complete(GenerateFlags(str(trained_run), max_new_tokens=2, seed=2**32), prompts)


@pytest.mark.slow
def test_the_command_line_continues_prompts(trained_run, tmp_path, capsys):
    """Read prompts from flags and files, which are the last prompts, and give what the function gives."""
    (tmp_path / "prompt.txt").write_text("the attention\n", encoding="utf-8-sig")  # with a byte order mark
    flags = ["--max_new_tokens=20", "--seed=3", "--top_k=0", "--temperature=1.5", "--step=best", r"--stop=\n"]
    flags += ["--prompt=", "--prompt=é", *[f"--prompt_file={tmp_path}/prompt.txt"] * 2]
    done = run_python("-m", "dape_jax.tools.generate", f"--workdir={trained_run}", *flags)
    assert done.returncode == 0, done.stderr
    prompts = [b"", "é".encode(), *[b"the attention\n"] * 2]
    options = {"temperature": 1.5, "top_k": 0, "seed": 3, "step": "best", "stop": (r"\n",)}
    complete(GenerateFlags(str(trained_run), max_new_tokens=20, **options), prompts)
    assert done.stdout == capsys.readouterr().out
    assert "==== 4 of 4 ====\nthe attention\n" in done.stdout
