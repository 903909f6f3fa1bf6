"""Generation: the cache agrees with the full forward, draws have the right distribution, errors name the input."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from test_command_lines import run

from dape_jax.config import CHOICES, RunConfig, read_model
from dape_jax.data.tokenizers import Bytes
from dape_jax.errors import InputError, printable
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.sharding import MeshConfig, make_mesh, parameter_shardings
from dape_jax.tools import completion as module
from dape_jax.tools.completion import (
    CHUNK,
    Latest,
    Sampling,
    added_text,
    complete,
    decode,
    decoding_model,
    extend,
    generate,
    make_caches,
    prefill,
    read_prompts,
    sample,
)
from dape_jax.training.checkpoint import restore_config, restore_params

GREEDY = Sampling(temperature=0.0)
BIAS_OPTIONS = {
    # Small enough for positions of these tests to exceed them.
    "t5": {"num_buckets": 8, "max_distance": 12},
    "fire": {"threshold": 6},
    "cope": {"num_positions": 6},
}
PROCESSORS = {
    "none": {"name": "none"},
    "dape1": {"name": "dape", "kernel_width": 1},
    "dape3": {"name": "dape", "kernel_width": 3},
    "dape5": {"name": "dape", "kernel_width": 5},
    "causal2": {"name": "dape", "kernel_width": 2, "alignment": "causal"},
    "no_residual": {"name": "dape", "kernel_width": 3, "residual": False},
    "scores_alone": {"name": "dape", "kernel_width": 3, "inputs": "scores"},
    "identity": {"name": "dape", "kernel_width": 3, "init": "identity"},
    "listing1": {"name": "dape", "kernel_width": 1, "edge": "listing"},  # one column has no edge
    "leak_causal": {"name": "dape", "kernel_width": 2, "alignment": "causal", "leak": True},  # to the left alone
}
ROTARY = {
    "none": {},
    "rope": {},
    "pi": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "yarn": {"factor": 4.0, "train_length": 16},
}


def make_config(bias: str, processor: str, rotary: str = "none", **changes) -> TransformerConfig:
    spec = tiny.SPEC["model"] | {"vocab_size": 11, "num_heads": 4, "num_kv_heads": 4}
    spec |= {
        "bias": {"name": bias} | BIAS_OPTIONS.get(bias, {}),
        "processor": PROCESSORS[processor] | ({} if processor == "none" else {"channels": 4}),
        "rotary": {"name": rotary} | ROTARY[rotary],
    }
    return read_model(spec | changes)


def random_params(config: TransformerConfig) -> Params:
    """Return random parameters: initial zeros could hide an error."""
    draw = np.random.default_rng(1)

    def random(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean, std = (1, 0.2) if path[-1].key == "scale" else (0, 0.3)
        return draw.normal(mean, std, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, model_structure(config)[1])


def cached_cases() -> list:
    """Return every processor and every bias, each rotary variant and number of key heads, with and without a window.

    Attention's own tests have every bias and processor with a cache; here they are sampled through the whole model.
    """
    cases = []
    for number, (processor, bias) in enumerate(zip(PROCESSORS, itertools.cycle(CHOICES["bias"]), strict=False)):
        changes = {"num_kv_heads": (4, 2, 1)[number % 3], "window": (None, 5)[number % 2]}
        rotary = list(ROTARY)[number % len(ROTARY)]
        marks = pytest.mark.slow if number % 2 and bias not in ("t5", "cope") else ()
        id_ = f"{bias}-{processor}-{rotary}"
        cases.append(
            pytest.param(functools.partial(make_config, bias, processor, rotary, **changes), id=id_, marks=marks)
        )
    for name, options in tiny.ARCHITECTURES.items():
        config = functools.partial(read_model, tiny.SPEC["model"] | {"vocab_size": 11} | options)
        cases.append(pytest.param(config, id=name))
    return cases


@pytest.mark.parametrize("make", cached_cases())
def test_cached_logits_are_those_of_the_full_forward(make):
    """Extend by a prompt, single tokens, several tokens, and a single token again: all logits are the same."""
    config = make()
    params = random_params(config)
    tokens_BT = np.random.default_rng(1).integers(0, 11, (2, 18), np.int32)
    graphdef, _ = nnx.split(decoding_model(config, params))
    expected = jax.jit(lambda params, tokens_BT: nnx.merge(graphdef, params)(tokens_BT))(params, tokens_BT)

    @jax.jit
    def more(params, tokens_BT, first, caches):
        model = nnx.merge(graphdef, params)
        x_BTD, caches = extend(model, tokens_BT, first, caches)
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


@pytest.mark.parametrize("length", [CHUNK + 2, pytest.param(CHUNK + 1, marks=pytest.mark.slow)])
def test_logits_of_a_ragged_batch_are_those_of_each_alone(model, length):
    """Use lengths at which the last row is, or is not, in another chunk than the rows before it."""
    config, params = model
    prompts = [prompt_of(3), prompt_of(length)]

    @jax.jit
    def last_logits(params, token_B, pos_B, caches):
        decoder = decoding_model(config, params)
        return decoder.logits(extend(decoder, token_B[:, None], pos_B, caches)[0])[:, 0]

    def logits_of(prompts: list[np.ndarray]) -> jax.Array:
        latest, caches = read_prompts(config, params, one_device(), prompts, CHUNK)
        return last_logits(params, latest.token_B, latest.pos_B, caches)

    filled_BT = jnp.asarray([np.pad(prompt, (0, length - len(prompt))) for prompt in prompts])
    whole = jax.jit(lambda params: decoding_model(config, params)(filled_BT))(params)
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
    config, params = model
    mesh = make_mesh(MeshConfig(data=2, fsdp=4, context=1, tensor=1))
    params = place(params, mesh)
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
        latest = Latest(of((batch,), "int32"), of((batch,), "int32"), of((batch,), "bool"))
        options = {"sampling": Sampling(0.8, 5, 0.9), "num_ids": 11, "mesh": mesh}
        programs = [
            prefill.lower(config, params, of((batch, CHUNK), "int32"), of((), "int32"), caches, mesh=mesh),
            decode.lower(config, params, latest, caches, of((), "uint32"), of((), "int32"), **options),
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
    for end_token in free[0, [3, 9]].tolist():
        ends = [int(np.flatnonzero(row == end_token)[0]) if end_token in row else 20 for row in free]
        found = tokens_of(model, prompts, 20, sampling, end_token=end_token)
        num_steps.append(found.shape[1])
        assert num_steps[-1] == min(max(ends) + 1, 20)
        for row, expected, end in zip(found, free, ends, strict=True):
            np.testing.assert_array_equal(row[:end], expected[:end])
            assert np.all(row[end:] == end_token)
    assert min(num_steps) < 20


def test_a_prompt_may_end_with_the_end_token(model):
    """End tokens in a prompt only start a new document."""
    free = tokens_of(model, [np.array([3])], 5, GREEDY)
    assert 3 not in free
    np.testing.assert_array_equal(tokens_of(model, [np.array([3])], 5, GREEDY, end_token=3), free)


def test_ids_beyond_the_tokenizers_are_never_drawn(model):
    found = tokens_of(model, [prompt_of(4)], 40, Sampling(temperature=5.0), num_ids=4)
    assert found.max() == 3


# ---- draws

LOGITS = st.lists(st.floats(-8, 8, width=16) | st.sampled_from([0.0, 1.0]), min_size=7, max_size=7)


def draw(logits: list[float], sampling: Sampling, num: int = 64) -> np.ndarray:
    """Draw tokens from one row of logits."""
    logits_BV = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (num, len(logits)))
    return np.asarray(sample(logits_BV, jax.random.split(jax.random.key(7), num), sampling))


def truncated(logits: list[float], sampling: Sampling, slack: float = 0.0) -> np.ndarray:
    """Return the expected probabilities of a draw, in double precision; `slack` is added to top_p."""
    scaled = np.asarray(logits, float) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = np.zeros(len(scaled), bool)
    kept[order[: sampling.top_k]] = True
    probs = np.where(kept, np.exp(scaled - scaled.max()), 0)
    probs /= probs.sum()
    if sampling.top_p is not None:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order] = np.where(before < sampling.top_p + slack, probs[order], 0)
    return probs / probs.sum()


@settings(deadline=None, max_examples=60)
@given(
    LOGITS,
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sampled_from([None, 1, 2, 5, 7, 100]),
    st.sampled_from([None, 1e-6, 0.3, 0.9, 1.0]),
)
def test_only_tokens_of_the_truncated_set_are_drawn(logits, temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    found = draw(logits, sampling)
    assert set(found) <= set(np.flatnonzero(truncated(logits, sampling, slack=1e-5)))
    if top_k == 1 or top_p == 1e-6:
        assert set(found) == {np.argmax(logits)}
    assert set(draw(logits, Sampling(0.0, top_k, top_p))) == {np.argmax(logits)}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.7),
        Sampling(temperature=2.0, top_k=4, top_p=0.8),
    ],
)
def test_frequencies_are_the_probabilities(sampling):
    """Compare within five standard errors, in 40,000 draws; two of the logits are equal."""
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
    for temperature in (1e-300, 1e-30, 1e-3):  # close to greedy, and finite
        assert set(draw([5.0, 7.0, -3.0], Sampling(temperature))) == {1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": math.nan}, ["temperature = nan", "0 (greedy) or more"]),
        ({"temperature": math.inf}, ["temperature = inf"]),
        ({"top_k": 0}, ["top_k = 0", "must be positive"]),
        ({"top_p": 0.0}, ["top_p = 0.0", "above 0"]),
        ({"top_p": 1.5}, ["top_p = 1.5", "at most 1"]),
    ],
)
def test_bad_sampling_is_named(options, words):
    with pytest.raises(InputError) as error:
        Sampling(**options)
    assert all(word in str(error.value) for word in words), error.value


# ---- what is refused


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (DapeConfig(edge="listing"), ["model.processor.edge = 'listing'", "kernel_width // 2 = 1 rows"]),
        (DapeConfig(leak=True), ["model.processor.leak = True", "not generated yet"]),
    ],
)
def test_models_that_no_cache_can_serve_are_refused_with_the_reason(processor, words):
    config = dataclasses.replace(make_config("kerple", "none"), processor=processor)
    with pytest.raises(InputError) as error:
        generate(config, {}, one_device(), [prompt_of(3)], max_new_tokens=2, sampling=GREEDY)
    assert all(word in str(error.value) for word in [*words, "cannot generate"]), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompts", "changes", "words"),
    [
        ([], {}, ["prompts = []", "at least one prompt"]),
        ([[1], []], {}, ["prompts[1] = []", "one token"]),
        ([[1], [2, 11]], {}, ["prompts[1] = 11", "0 to 10"]),
        ([[-1, 3]], {}, ["prompts[0] = -1"]),
        ([[1]], {"max_new_tokens": 0}, ["max_new_tokens = 0", "must be positive"]),
        ([[1]], {"seed": -1}, ["seed = -1", "2**32"]),
    ],
)
def test_bad_requests_are_named_at_the_call(model, prompts, changes, words):
    """Raise at the call, not at the first step."""
    options = {"max_new_tokens": 2, "sampling": GREEDY} | changes
    with pytest.raises(InputError) as error:
        generate(*model, one_device(), [np.array(prompt, int) for prompt in prompts], **options)
    assert all(word in str(error.value) for word in words), error.value


# ---- text


@given(st.text().map(str.encode) | st.binary(), st.integers(0, 20))
def test_added_text_is_that_of_the_tokens(content, start):
    """The end of a document is not part of the text, and bytes of incomplete characters are replaced."""
    prompt, tokens = np.split(np.frombuffer(content, np.uint8).astype(int), [start])
    with_end = np.append(tokens, Bytes.end_of_document)
    assert added_text(Bytes(), prompt, with_end) == content[start:].decode("utf-8", "replace")


# ---- from a checkpoint


@pytest.fixture(scope="module")
def trained(trained_run) -> Path:
    return trained_run


def expected_tokens(workdir: Path, prompts: list[bytes], num: int, sampling: Sampling) -> list[list[int]]:
    """Return the tokens directly from the library, on one device."""
    config = RunConfig.from_dict(restore_config(workdir)[1]["config"]).model
    mesh = one_device()
    _, abstract = model_structure(config)
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, parameter_shardings(abstract, mesh)
    )
    params = restore_params(workdir, 4, target)
    ids = [Bytes().encode(prompt) if prompt else np.array([256]) for prompt in prompts]
    return tokens_of((config, params), ids, num, sampling, mesh, end_token=256).tolist()


def test_completions_are_shown_and_written(trained, tmp_path, capsys):
    """Empty prompts start a document; --output contains everything and is not overwritten."""
    prompts, sampling = ["the läng".encode(), b"", b"scores\x1b"], Sampling(temperature=1.0)
    file = tmp_path / "out.json"
    expected = expected_tokens(trained, prompts, 12, sampling)
    texts = complete(trained, prompts, max_new_tokens=12, sampling=sampling, output=file)
    shown, _ = capsys.readouterr()
    assert "==== 1 of 3 ====\nthe läng" in shown
    assert "==== 3 of 3 ====\nscores\\x1b" in shown
    assert "\x1b" not in shown
    written = json.loads(file.read_text())
    assert [c["tokens"] for c in written["completions"]] == expected
    assert [c["text"] for c in written["completions"]] == texts
    assert [c["prompt"] for c in written["completions"]] == [prompt.decode() for prompt in prompts]
    assert written["step"] == 4
    assert written["settings"] == {"temperature": 1.0, "top_k": None, "top_p": None, "max_new_tokens": 12, "seed": 0}
    before = file.read_bytes()
    with pytest.raises(InputError, match=r"output = .*out\.json'.*must not exist yet"):
        complete(trained, prompts, max_new_tokens=12, sampling=sampling, output=file)
    assert file.read_bytes() == before
    assert complete(trained, prompts[:1], max_new_tokens=12, sampling=sampling) == texts[:1]
    assert capsys.readouterr().out == printable("the läng" + texts[0], keep="\n\t") + "\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": []}, ["prompt = []", "--prompt_file"]),
        ({"max_new_tokens": 0}, ["max_new_tokens = 0"]),
        ({"seed": 2**32}, ["seed = 4294967296"]),
        ({"step": "5"}, ["step = '5'", "'newest', 'best'"]),
        ({"workdir": Path("nothing")}, ["workdir = 'nothing'", "must be a directory written by dape-train"]),
    ],
)
def test_bad_input_is_named_before_any_parameter_is_read(trained, monkeypatch, changes, words):
    monkeypatch.setattr(module, "restore", None)  # calling it would be a TypeError
    request = {"workdir": trained, "prompts": [b"a"], "max_new_tokens": 2, "sampling": GREEDY} | changes
    with pytest.raises(InputError) as error:
        complete(request.pop("workdir"), request.pop("prompts"), **request)
    assert all(word in str(error.value) for word in words), error.value


def generate_arguments(workdir: Path, *more: str) -> list[str]:
    return ["-m", "dape_jax.tools.generate", f"--workdir={workdir}", *more]


@pytest.mark.slow
def test_the_command_line_continues_prompts(trained, tmp_path):
    """Read prompts from flags and a file; in a batch of three the first prompt gives the same text."""
    (tmp_path / "prompt.txt").write_text("the attention\n")
    arguments = ["--max_new_tokens=20", "--seed=3", "--top_k=0", "--temperature=1.5", "--step=best"]
    alone = run(*generate_arguments(trained, f"--prompt_file={tmp_path}/prompt.txt", *arguments))
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.startswith("the attention\n")
    batch = ["--prompt=the attention\n", "--prompt=", "--prompt=é", f"--output={tmp_path}/out.json"]
    three = run(*generate_arguments(trained, *batch, *arguments))
    assert three.returncode == 0, three.stderr
    assert f"==== 1 of 3 ====\n{alone.stdout}" in three.stdout
    assert "==== 3 of 3 ====\né" in three.stdout
    completions = json.loads((tmp_path / "out.json").read_text())["completions"]
    assert printable("the attention\n" + completions[0]["text"], keep="\n\t") + "\n" == alone.stdout
    greedy = [run(*generate_arguments(trained, "--prompt=the ", "--greedy", f"--seed={seed}")) for seed in (0, 1)]
    assert greedy[0].stdout == greedy[1].stdout
