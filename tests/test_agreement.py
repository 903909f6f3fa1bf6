"""Implementations agree: dense = blockwise = any rows = cached = over devices, in values and all gradients.

The fused kernels agree in `test_kernels.py`.
"""

import functools
import itertools
import random
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    ALL_BIASES,
    ALL_IMPLEMENTATIONS,
    ALL_PROCESSORS,
    KINDS,
    LENGTH,
    Cached,
    compiled,
    every_case,
    is_valid,
    make_layer,
    make_qkv,
    make_weight,
    pairwise,
    sample,
    tolerance,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dape_jax.model.attention import Blockwise, Dense, Implementation, attend, attend_on_mesh
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig, key_convolution
from dape_jax.model.scores import products
from dape_jax.sharding import MeshConfig, make_mesh, stripe, unstripe

POS = jnp.arange(LENGTH)
NOT_DENSE = (ALL_BIASES, ALL_PROCESSORS, [name for name in ALL_IMPLEMENTATIONS if name != "dense"], KINDS)


def close(bias: str) -> dict[str, float]:
    return {"atol": 10 * tolerance(bias), "rtol": 10 * tolerance(bias)}


@pytest.mark.parametrize(("bias", "processor", "implementation", "kind"), every_case(NOT_DENSE, sample()))
def test_implementations_agree(bias, processor, implementation, kind):
    qkv = make_qkv(kv_heads=KINDS[kind].get("kv_heads"))
    weight = make_weight(qkv[0])
    dense, other = (compiled(bias, processor, name, kind) for name in ("dense", implementation))
    expected = dense(qkv, POS, POS, weight)
    chex.assert_trees_all_close(other(qkv, POS, POS, weight), expected, **close(bias))
    changed_k = qkv[1] + (np.arange(LENGTH) == 0)[None, :, None, None]  # a key that the first rows see
    moved, _ = other([qkv[0], changed_k, qkv[2]], POS, POS, weight)
    assert np.abs(moved - expected[0]).max() > 1e-3


@pytest.mark.parametrize("length", [1, 2, 3, 23])
def test_implementations_agree_at_any_length(length):
    """Test one token, one block, ragged last blocks, grouped heads, and a window longer than one block."""
    params, attend = make_layer("kerple", "dape5", heads=4)
    qkv = make_qkv(length, 1, heads=4, kv_heads=2)
    weight = make_weight(qkv[0])

    @functools.partial(jax.jit, static_argnums=2)
    def value_and_grads(params, qkv, implementation):
        def loss(params, qkv):
            return (attend(params, *qkv, implementation, window=7) * weight).sum()

        return jax.value_and_grad(loss, (0, 1))(params, qkv)

    expected = value_and_grads(params, qkv, Dense())
    for implementation in (Blockwise(5, 4), Blockwise(64, 2), Cached(7)):
        chex.assert_trees_all_close(value_and_grads(params, qkv, implementation), expected, **close("kerple"))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_combination(data):
    """Random methods, sizes, windows and implementations are strictly causal, prefix-invariant and equal to dense."""
    methods = [pair for pair in itertools.product(ALL_BIASES, ALL_PROCESSORS) if is_valid(*pair)]
    bias, processor = data.draw(st.sampled_from(methods), "method")
    length = data.draw(st.integers(2, 30), "length")
    t = data.draw(st.integers(1, length - 1), "t")
    batch, kv_heads, group = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), "B, G, H/G")
    window = data.draw(st.none() | st.integers(1, 32), "window")
    implementation = data.draw(
        st.builds(Blockwise, block_size=st.integers(1, 32), num_buckets=st.integers(1, 6))
        | st.builds(Cached, num_rows=st.integers(2, 30)),
        "implementation",
    )
    heads = kv_heads * group
    params, attend = make_layer(bias, processor, heads, 4)
    qkv, other = (make_qkv(length, batch, heads, 4, seed, kv_heads) for seed in (1, 2))
    changed = [jnp.concatenate([x[:, :t], y[:, t:]], axis=1) for x, y in zip(qkv, other, strict=True)]
    step = jax.jit(lambda qkv: attend(params, *qkv, implementation, window=window))
    whole = step(qkv)
    chex.assert_trees_all_equal(step(changed)[:, :t], whole[:, :t])
    dense = jax.jit(lambda qkv: attend(params, *qkv, Dense(), window=window))
    chex.assert_trees_all_close(dense(qkv), whole, atol=tolerance(bias))
    chex.assert_trees_all_close(step([x[:, :t] for x in qkv]), whole[:, :t], atol=tolerance(bias))


ON_MESH = (ALL_BIASES, ("none", "dape3", "dape5", "causal2", "equation2", "of_bias"), (None, 5))
ON_MESH_QUICK = [("kerple", "dape3", 5), ("transformer_xl", "causal2", None), ("cope", "none", None)]


@pytest.mark.parametrize(("bias", "processor", "window"), every_case(ON_MESH, ON_MESH_QUICK))
def test_rows_over_devices_agree(bias, processor, window):
    """Rows striped over context and tensor equal dense on one device, in values and all gradients."""
    params, attend = make_layer(bias, processor, heads=4)
    qkv = make_qkv(24, heads=4, kv_heads=2)
    weight = make_weight(qkv[0])

    class OnMesh(Implementation):
        def attend_rows(self, q, k, v, positions, *score_mod_and_mask):
            q, k, v = (stripe(x, 1) for x in (q, k, v))
            return unstripe(attend_on_mesh(Blockwise(4, 3), q, k, v, *score_mod_and_mask), 1)

    def value_and_grads(implementation):
        def loss(params, qkv):
            return (attend(params, *qkv, implementation, window=window) * weight).sum()

        return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1)))(params, qkv))

    expected = value_and_grads(Dense())
    with jax.set_mesh(make_mesh(MeshConfig(1, 1, 2, 2), jax.devices()[:4])):
        found = value_and_grads(OnMesh())
    chex.assert_trees_all_close(found, expected, **close(bias))


BFLOAT16 = (ALL_BIASES, ("none", "dape3", "causal2", "of_bias"))
BFLOAT16_QUICK = [("kerple", "dape3"), ("nope", "causal2"), ("cope", "none"), ("fire", "dape3")]


@pytest.mark.parametrize(("bias", "processor"), every_case(BFLOAT16, BFLOAT16_QUICK))
@pytest.mark.usefixtures("smooth_leaky_relu")
def test_bfloat16_is_near_float32(bias, processor):
    """Inputs and convolutions in bfloat16: values, and all gradients together.

    LeakyReLU is smoothed: rounding may move a hidden feature that is almost 0 across the kink, and in a small layer
    this feature can be several per cent of the gradient. Larger errors are allowed where the gradient of Kerple's power
    multiplies rounding errors of the probabilities by dist^2, and where CoPE's gradient jumps as a position passes an
    integer.
    """
    qkv = make_qkv(16)
    weight = make_weight(qkv[0])

    def run(dtype):
        params, attend = make_layer(bias, processor, dtype=dtype)

        @jax.jit
        def value_and_grads(params, qkv):
            def loss(params, qkv):
                out = attend(params, *[x.astype(dtype) for x in qkv], Dense())
                assert out.dtype == dtype
                return (out.astype(jnp.float32) * weight).sum(), out.astype(jnp.float32)

            grads, out = jax.grad(loss, (0, 1), has_aux=True)(params, qkv)
            return out, jnp.concatenate([grad.reshape(-1) for grad in jax.tree.leaves(grads)])

        return value_and_grads(params, qkv)

    (full, full_grad), (half, half_grad) = (jax.device_get(run(dtype)) for dtype in (jnp.float32, jnp.bfloat16))
    assert not np.array_equal(half, full)
    np.testing.assert_allclose(half, full, atol=0.06)
    allowed = 0.03 if bias in ("kerple_power", "cope") else 0.01
    assert np.linalg.norm(half_grad - full_grad) < allowed * np.linalg.norm(full_grad)


def test_bfloat16_operands_accumulate_in_float32():
    """Scores and convolutions of bfloat16 operands are those of the same numbers in float32, unrounded."""
    q, k, _ = (x.astype(jnp.bfloat16) for x in make_qkv(head_dim=64))
    kernel = jax.random.normal(jax.random.key(4), (3, 64, 5)).astype(jnp.bfloat16)
    for function in (
        lambda q, k, _: products(q, k, jnp.dtype("float32")),
        lambda q, _, kernel: key_convolution(q, kernel, 1, 1),
    ):
        found = jax.jit(function)(q, k, kernel)
        expected = jax.jit(function)(*(x.astype(jnp.float32) for x in (q, k, kernel)))
        assert np.abs(expected.astype(jnp.bfloat16) - expected).max() > 1e-2
        chex.assert_trees_all_close(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("bias", "implementation"),
    every_case(
        (("kerple", "cope", "transformer_xl"), ("dense", "blockwise")),
        [("kerple", "blockwise"), ("cope", "dense"), ("transformer_xl", "blockwise")],
    ),
)
def test_grouped_heads_are_shared_heads(bias, implementation):
    """Two key heads for six query heads equal the two repeated three times, with gradients summed."""
    params, attend = make_layer(bias, "dape3", heads=6)
    q, k, v = make_qkv(9, heads=6, kv_heads=2)
    weight = make_weight(q)

    def loss(k, v, repeats):
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
        return (attend(params, q, k, v, ALL_IMPLEMENTATIONS[implementation]) * weight).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    chex.assert_trees_all_close(step(k, v, 1), step(k, v, 3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("bias", "processor"), [("kerple", "dape3"), ("t5", "none"), ("cope", "causal2")])
def test_a_batch_is_its_sequences(bias, processor):
    """Sequences give the same values alone, and gradients of parameters are sums over sequences."""
    params, attend = make_layer(bias, processor)
    qkv = make_qkv(9, batch=3)
    weight = make_weight(qkv[0])

    @jax.jit
    def value_and_grads(qkv, weight):
        def loss(params, qkv):
            out = attend(params, *qkv, Blockwise(block_size=4, num_buckets=2))
            return (out * weight).sum(), out

        (of_params, of_qkv), out = jax.grad(loss, (0, 1), has_aux=True)(params, qkv)
        return of_params, (of_qkv, out)

    shared, own = value_and_grads(qkv, weight)
    each = [jax.device_get(value_and_grads([x[b : b + 1] for x in qkv], weight[b : b + 1])) for b in range(3)]
    assert np.abs(each[0][1][1] - each[1][1][1]).max() > 1e-2
    sums = jax.tree.map(lambda *x: sum(x), *(of_params for of_params, _ in each))
    chex.assert_trees_all_close(shared, sums, **close(bias))
    chex.assert_trees_all_close(own, jax.tree.map(lambda *x: np.concatenate(x), *(x for _, x in each)), **close(bias))


HALO = (
    (1, 3, 7),
    ("edge=listing", "leak", "leak,edge=listing", "leak,alignment=causal"),
    (None, 3),
)


@pytest.mark.parametrize(("width", "options", "window"), every_case(HALO, pairwise(HALO)))
def test_blocks_read_the_halo_of_a_row(width, options, window):
    """Options without a cache read keys next to the visible ones: blockwise reads them too (`key_halo`)."""
    options = dict(option.split("=") if "=" in option else (option, True) for option in options.split(","))
    processor = DapeConfig(kernel_width=width, channels=5, **options).build(2, rngs=nnx.Rngs(0))
    bias = BIASES["kerple"]().build(2, 4, nnx.Rngs(0))
    qkv, options = make_qkv(29), {"bias": bias, "processor": processor, "window": window}
    whole, blocks = (
        jax.jit(functools.partial(attend, **options, implementation=f))(*qkv)
        for f in (Dense(), Blockwise(block_size=4, num_buckets=5))
    )
    chex.assert_trees_all_close(blocks, whole, atol=2e-6)


@pytest.mark.parametrize("bias", ALL_BIASES)
def test_biases_are_functions_of_positions_only(bias):
    """Biases depend on no length and no offset: a corner of a large bias is the small bias, also far away."""
    layer = ALL_BIASES[bias]().build(2, 4, nnx.Rngs(0))
    if bias in BIASES and layer is not None:
        q_pos, k_pos = jnp.array([1000, 3, 5]), jnp.array([0, 2, 3, 999])
        values = jax.jit(layer)
        whole = jax.device_get(values(jnp.arange(1001), jnp.arange(1001)))
        assert np.abs(whole[:, 1000, 0] - whole[:, 1000, 1000]).max() > 1e-3
        np.testing.assert_allclose(values(q_pos, k_pos), whole[:, q_pos][:, :, k_pos], rtol=1e-5, atol=1e-5)
    if bias not in ("nope", "fire"):  # FIRE's norm depends on the position itself
        run, qkv = compiled(bias, "dape3", "dense"), make_qkv()
        near, far = (run(qkv, POS + start, POS + start, make_weight(qkv[0]))[0] for start in (0, 100_000))
        np.testing.assert_allclose(near, far, atol=tolerance(bias))


@pytest.mark.parametrize("bias", BIASES)
def test_bidirectional_biases_are_of_the_distance(bias):
    """b(i, j) = b(j, i), and if the key is not after the query it is the causal bias."""
    layer = BIASES[bias]().build(3, 4, nnx.Rngs(0))
    if layer is None:
        return
    pos = jnp.arange(20)
    both, causal = (jax.jit(lambda causal=causal: layer(pos, pos, causal=causal))() for causal in (False, True))
    np.testing.assert_allclose(both, both.swapaxes(1, 2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.tril(both), np.tril(causal), rtol=1e-6)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 5 else pytest.mark.slow) for seed in range(40)])
def test_matmuls_and_convolution_agree(monkeypatch, seed):
    """Values and gradients, on a TPU and elsewhere, are those that JAX derives for the plain convolution."""
    draw = random.Random(seed)
    width = draw.randint(1, 7)
    left, right = draw.randint(0, width - 1), draw.randint(0, width - 1)
    columns, dtype = draw.randint(width, width + 4), draw.choice(["float32", "bfloat16"])
    channels = [(4, 5), (5, 4), (3, 3)][seed % 3]
    normal = np.random.default_rng(seed).normal
    x, kernel, dy = (
        jnp.asarray(normal(size=shape), jnp.float32)
        for shape in [
            (2, 3, columns, channels[0]),
            (width, *channels),
            (2, 3, columns + left + right - width + 1, channels[1]),
        ]
    )

    def plain(x, kernel):
        padding = ((0, 0), (left, right))
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel[None], (1, 1), padding, dimension_numbers=names)

    def value_and_grads(function):
        @jax.jit
        def run(x, kernel):
            y, pullback = jax.vjp(function, x, kernel)
            return y, *pullback(dy)

        return run

    rounded = [y.astype(dtype).astype(jnp.float32) for y in (x, kernel)]
    expected = value_and_grads(plain)(*rounded)
    assert min(np.abs(y).max() for y in expected) > 0.1
    for platform in ("tpu", "cpu"):
        monkeypatch.setattr("dape_jax.model.processors.device_platform", lambda platform=platform: platform)
        ours = value_and_grads(lambda x, kernel: key_convolution(x, kernel, left, right))
        found = ours(x.astype(dtype), kernel.astype(dtype))
        assert [y.dtype for y in found] == [jnp.float32, dtype, dtype]
        chex.assert_trees_all_close(
            [y.astype(jnp.float32) for y in found], list(expected), atol=1e-5 if dtype == "float32" else 0.1, rtol=1e-5
        )


def test_no_convolution_on_a_cpu_is_longer_than_its_input():
    """XLA's fast convolution requires it, so the compiler must not merge the padding into the convolution."""

    def longest(convolve):
        """Return by how many columns the longest convolution of the compiled gradients exceeds its input."""
        gradients = jax.jit(jax.grad(lambda x, kernel: convolve(x, kernel).sum(), (0, 1)))
        text = gradients.lower(jnp.ones((2, 8, 128, 4)), jnp.ones((3, 4, 32))).compile().as_text()
        windows = re.findall(r" convolution\(.*window=\{size=1x(\d+) pad=0_0x(-?\d+)_(-?\d+)", text)
        return max(int(left) + int(right) - int(width) + 1 for width, left, right in windows)

    def plain(x, kernel):
        names = ("NHWC", "HWIO", "NHWC")
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0)))
        return jnp.square(
            jax.lax.conv_general_dilated(padded, kernel[None], (1, 1), ((0, 0), (1, 1)), None, None, names)
        )

    assert longest(plain) > 0
    assert longest(lambda x, kernel: jnp.square(key_convolution(x, kernel, 1, 2))) == 0
