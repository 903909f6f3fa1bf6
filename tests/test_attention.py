"""The invariants of the design, over every bias x processor x implementation that the package has."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from dape_jax.attention import IMPLEMENTATIONS, Blockwise, Dense, attend
from dape_jax.biases import BIASES
from dape_jax.errors import InputError
from dape_jax.processors import PROCESSORS, DapeConfig

WIDTHS = (1, 3, 5, 7)
SMALL = {"blockwise": Blockwise(block_size=4, num_buckets=3)}  # several blocks and buckets at the lengths used here
IMPLEMENTED = {name: SMALL.get(name) or make() for name, make in IMPLEMENTATIONS.items()}


def processors_of(name: str) -> list:
    """A processor's configs: one, or one for each kernel width where it has one."""
    kind = PROCESSORS[name]
    if "kernel_width" not in [field.name for field in dataclasses.fields(kind)]:
        return [kind()]
    return [kind(kernel_width=width, channels=5) for width in WIDTHS]


ALL_PROCESSORS = {
    f"{name}{getattr(config, 'kernel_width', '')}": config for name in PROCESSORS for config in processors_of(name)
}


def product(*names) -> list:
    """The full product; that of the widest kernels is left to the slow tests."""
    return [
        pytest.param(*combination, marks=pytest.mark.slow if {"dape5", "dape7"} & set(combination) else ())
        for combination in itertools.product(*names)
    ]


PRODUCT = product(BIASES, ALL_PROCESSORS, IMPLEMENTED)


def make_layer(bias: str, processor: str, heads: int = 2, head_dim: int = 4, seed: int = 0, dtype=jnp.float32):
    """A bias and a processor with random parameters, as one pytree of parameters and a function of it."""
    rngs = nnx.Rngs(seed)
    options = {"threshold": 6} if bias == "fire" else {}
    layer = nnx.Dict(
        bias=BIASES[bias](**options).build(heads, head_dim, rngs),
        processor=ALL_PROCESSORS[processor].build(heads, bias != "nope", jnp.dtype(dtype), rngs),
    )
    graphdef, params = nnx.split(layer, nnx.Param)
    params = nnx.to_pure_dict(params)

    def run(params, q, k, v, implementation, q_pos=None, k_pos=None):
        layer = nnx.merge(graphdef, params)
        k_pos = jnp.arange(k.shape[1]) if k_pos is None else k_pos
        q_pos = k_pos if q_pos is None else q_pos
        return implementation(q, k, v, q_pos, k_pos, bias=layer.bias, processor=layer.processor)

    return params, run


def make_qkv(length: int, batch: int = 2, heads: int = 2, head_dim: int = 4, seed: int = 1):
    return [
        jax.random.normal(key, (batch, length, heads, head_dim)) for key in jax.random.split(jax.random.key(seed), 3)
    ]


@pytest.mark.parametrize(("bias", "processor", "implementation"), PRODUCT)
def test_the_future_changes_nothing(bias, processor, implementation):
    """Keys, values and queries after t: no bit of the rows up to t depends on them, and the gradient is exactly 0."""
    params, run = make_layer(bias, processor)
    length, t = 11, 6
    qkv, other = make_qkv(length), make_qkv(length, seed=2)
    changed = [jnp.concatenate([x[:, : t + 1], y[:, t + 1 :]], axis=1) for x, y in zip(qkv, other, strict=True)]
    step = jax.jit(lambda params, qkv: run(params, *qkv, IMPLEMENTED[implementation]))
    before, after = step(params, qkv), step(params, changed)
    np.testing.assert_array_equal(before[:, : t + 1], after[:, : t + 1])
    assert np.abs(before[:, t + 1 :] - after[:, t + 1 :]).max() > 1e-3

    weight = jax.random.normal(jax.random.key(3), before[:, : t + 1].shape)
    grads = jax.jit(jax.grad(lambda qkv: (step(params, qkv)[:, : t + 1] * weight).sum()))(qkv)
    for grad in grads:
        np.testing.assert_array_equal(grad[:, t + 1 :], 0)
        assert np.abs(grad[:, 1 : t + 1]).max() > 1e-4


@pytest.mark.parametrize(("bias", "processor", "implementation"), PRODUCT)
def test_rows_do_not_depend_on_what_is_to_their_right(bias, processor, implementation):
    """Prefix invariance: f(x[:t]) = f(x)[:t], for every t, and for single rows against all keys."""
    params, run = make_layer(bias, processor)
    length = 9
    q, k, v = make_qkv(length)
    whole = run(params, q, k, v, IMPLEMENTED[implementation])
    for t in (1, 2, 5, 8):
        part = run(params, q[:, :t], k[:, :t], v[:, :t], IMPLEMENTED[implementation])
        np.testing.assert_allclose(part, whole[:, :t], atol=2e-6)
    last = run(params, q[:, -1:], k, v, IMPLEMENTED[implementation], q_pos=jnp.array([length - 1]))
    np.testing.assert_allclose(last, whole[:, -1:], atol=2e-6)


@pytest.mark.parametrize(("bias", "processor"), product(BIASES, ALL_PROCESSORS))
@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.data())
def test_implementations_agree(bias, processor, data):
    """Dense = every other, forward and all gradients, at any size."""
    length = data.draw(st.integers(1, 23), "length")
    batch, heads, head_dim = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 3)), "B, H, K")
    params, run = make_layer(bias, processor, heads, head_dim)
    qkv = make_qkv(length, batch, heads, head_dim)
    weight = jax.random.normal(jax.random.key(3), qkv[0].shape)
    sizes = {
        "block_size": data.draw(st.integers(1, 25), "block"),
        "num_buckets": data.draw(st.integers(1, 6), "buckets"),
    }

    def value_and_grads(implementation):
        def loss(params, qkv):
            return (run(params, *qkv, implementation) * weight).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, qkv)

    expected = value_and_grads(Dense())
    for kind in IMPLEMENTATIONS.values():
        options = {name: sizes[name] for name in sizes if name in [f.name for f in dataclasses.fields(kind)]}
        chex.assert_trees_all_close(value_and_grads(kind(**options)), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("bias", "processor"), product(BIASES, ALL_PROCESSORS))
def test_any_rows_give_the_same(bias, processor):
    """`attend` on rows in any order is the same as taking those rows from the whole."""
    params, run = make_layer(bias, processor)
    q, k, v = make_qkv(10)
    whole = run(params, q, k, v, Dense())
    rows = jnp.array([7, 0, 3, 3, 9])
    one_bucket = Blockwise(block_size=2, num_buckets=1)
    for implementation in (attend, one_bucket):
        some = run(params, q[:, rows], k, v, implementation, q_pos=rows, k_pos=jnp.arange(10))
        np.testing.assert_allclose(some, whole[:, rows], atol=2e-6)


@pytest.mark.parametrize(("bias", "processor"), product(BIASES, ALL_PROCESSORS))
def test_bfloat16_is_near_float32(bias, processor, monkeypatch):
    """Inputs and convolutions in bfloat16: values, and all gradients together.

    For the gradients the LeakyReLU is made smooth: rounding may carry a hidden feature that is almost 0 over its kink,
    and in a layer as small as this one that feature alone can be several per cent of the gradient.
    """
    qkv = make_qkv(16)
    weight = jax.random.normal(jax.random.key(3), qkv[0].shape)

    def value_and_gradient(dtype):
        params, run = make_layer(bias, processor, dtype=dtype)

        def loss(params, qkv):
            out = run(params, *[x.astype(dtype) for x in qkv], Dense())
            assert out.dtype == dtype
            return (out.astype(jnp.float32) * weight).sum(), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, qkv)
        return out.astype(jnp.float32), jnp.concatenate([grad.reshape(-1) for grad in jax.tree.leaves(grads)])

    full, half = (value_and_gradient(dtype)[0] for dtype in (jnp.float32, jnp.bfloat16))
    np.testing.assert_allclose(half, full, atol=0.06)
    assert not np.array_equal(half, full)
    monkeypatch.setattr(jax.nn, "leaky_relu", lambda x, _: 0.5 * x + 0.49 * jnp.sqrt(x * x + 1))
    full, half = (value_and_gradient(dtype)[1] for dtype in (jnp.float32, jnp.bfloat16))
    assert jnp.linalg.norm(half - full) < 0.01 * jnp.linalg.norm(full)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("implementation", IMPLEMENTED)
def test_listing_edge_differs_from_prefix_edge_in_the_last_rows_alone(width, implementation):
    """The paper's listing changes its last W//2 rows when a key is appended; that is all that sets it apart."""
    half = width // 2
    length = 13
    layers = {}
    for edge in ("prefix", "listing"):
        layers[edge] = DapeConfig(kernel_width=width, channels=5, edge=edge).build(
            2, True, jnp.dtype("float32"), nnx.Rngs(0)
        )
    bias = BIASES["alibi"]().build(2, 4, nnx.Rngs(0))
    q, k, v = make_qkv(length)
    pos = jnp.arange(length)
    prefix, listing = (
        IMPLEMENTED[implementation](q, k, v, pos, pos, bias=bias, processor=layers[edge])
        for edge in ("prefix", "listing")
    )
    np.testing.assert_allclose(prefix[:, : length - half], listing[:, : length - half], atol=2e-6)
    for row in range(length - half, length):
        assert np.abs(prefix[:, row] - listing[:, row]).max() > 1e-4
    dense_listing = attend(q, k, v, pos, pos, bias=bias, processor=layers["listing"])
    np.testing.assert_allclose(listing, dense_listing, atol=2e-6)


@pytest.mark.parametrize("bias", BIASES)
def test_biases_are_functions_of_positions_alone(bias):
    """No length and no offset in the arrays: a corner of a large bias is the small bias."""
    layer = BIASES[bias]().build(3, 4, nnx.Rngs(0))
    if layer is None:
        return
    q_pos, k_pos = jnp.array([1000, 3, 5]), jnp.array([0, 2, 3, 999])
    whole = layer(jnp.arange(1001), jnp.arange(1001))
    np.testing.assert_allclose(layer(q_pos, k_pos), whole[:, q_pos][:, :, k_pos], rtol=1e-6)


def test_compile_time_does_not_grow_with_length():
    """The compiled program of blockwise attention has as many instructions at any length."""

    def num_instructions(length):
        params, run = make_layer("kerple", "dape3")
        qkv = make_qkv(length, batch=1)

        def loss(params, qkv):
            return run(params, *qkv, Blockwise(block_size=16, num_buckets=2)).sum()

        return len(jax.jit(jax.grad(loss, (0, 1))).lower(params, qkv).as_text().splitlines())

    assert num_instructions(128) == num_instructions(1024)


def test_blockwise_memory_is_linear_in_length():
    """Peak memory of forward and backward, as the compiler plans it, grows with T and not with T squared."""

    def temporary_bytes(length, implementation):
        params, run = make_layer("kerple", "dape3", heads=4, head_dim=16)
        qkv = make_qkv(length, batch=1, heads=4, head_dim=16)

        def loss(params, qkv):
            return run(params, *qkv, implementation).sum()

        return jax.jit(jax.grad(loss, (0, 1))).lower(params, qkv).compile().memory_analysis().temp_size_in_bytes

    blockwise = Blockwise(block_size=32, num_buckets=2)
    assert temporary_bytes(2048, blockwise) < 2.5 * temporary_bytes(1024, blockwise)
    assert temporary_bytes(2048, blockwise) < temporary_bytes(2048, Dense()) / 8


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DapeConfig(kernel_width=2), ["model.processor.kernel_width", "2", "odd"]),
        (lambda: DapeConfig(kernel_width=0), ["model.processor.kernel_width", "0"]),
        (lambda: DapeConfig(channels=0), ["model.processor.channels", "0", "positive"]),
        (lambda: DapeConfig(edge="middle"), ["model.processor.edge", "middle", "listing"]),
        (lambda: Blockwise(block_size=0), ["model.attention.block_size", "0"]),
        (lambda: BIASES["fire"](activation="tanh"), ["model.bias.activation", "tanh", "relu"]),
        (lambda: BIASES["t5"](num_buckets=32, max_distance=8), ["model.bias.max_distance", "8"]),
    ],
)
def test_bad_options_are_named(make, words):
    with pytest.raises(InputError) as error:
        make()
    assert all(word in str(error.value) for word in words)
