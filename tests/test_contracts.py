"""Contracts of attention, for every bias x processor x implementation: causality, prefix invariance, agreement, shapes.

Packed documents: `test_segments.py`. The fused kernels: `test_kernels.py`, `test_gpu_kernel.py`.
"""

import functools
import random
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    ALL_IMPLEMENTATIONS,
    ALL_PROCESSORS,
    AXES,
    KINDS,
    LENGTH,
    Cached,
    OnMesh,
    compiled,
    each_value,
    every_case,
    make_bias,
    make_layer,
    make_qkv,
    make_weight,
    sample,
    tolerance,
    value_and_grads,
)

from dape_jax.errors import InputError
from dape_jax.model.attention import Blockwise, Dense, attend
from dape_jax.model.biases import BIASES
from dape_jax.model.positions import NtkAware, PositionInterpolation, Yarn
from dape_jax.model.processors import DapeConfig, key_convolution
from dape_jax.model.scores import Mask, Positions, causal_runs, products
from dape_jax.sharding import MeshConfig, make_mesh

POS = np.arange(LENGTH, dtype=np.int32)


def close(bias: str) -> dict[str, float]:
    return {"atol": 10 * tolerance(bias), "rtol": 10 * tolerance(bias)}


def test_the_sample_has_every_method_with_every_implementation():
    cases = [case.values for case in every_case(AXES, ())]
    assert len(sample()) < len(cases) / 10
    assert set(sample()) <= set(cases)
    for axis in (0, 1, 3):
        assert {(case[axis], case[2]) for case in sample()} == {(case[axis], case[2]) for case in cases}


@pytest.mark.parametrize(("bias", "processor", "implementation", "kind"), every_case(AXES, each_value(AXES), sample()))
def test_rows_depend_on_visible_keys_only(bias, processor, implementation, kind):
    """Later keys, keys before the window, and padding change no bit and have gradient 0; rows are in any order.

    Values and all gradients are those of `Dense`.
    """
    run = compiled(bias, processor, implementation, kind)
    window = KINDS[kind].get("window") or LENGTH
    qkv, other = (make_qkv(seed=seed, kv_heads=KINDS[kind].get("kv_heads")) for seed in (1, 2))
    weight = make_weight(qkv[0])
    t = 6

    def replace(columns, arrays=(0, 1, 2)):
        return [
            np.where(columns[None, :, None, None], y, x) if i in arrays else x
            for i, (x, y) in enumerate(zip(qkv, other, strict=True))
        ]

    def grads(rows):
        """Return the gradients of q, k and v with respect to the sum over some rows."""
        return run(qkv, np.where(rows[None, :, None, None], weight, 0), POS, POS)[1][1]

    before, all_grads = run(qkv, weight, POS, POS)
    chex.assert_tree_all_finite((before, all_grads))
    if implementation != "dense":
        expected = compiled(bias, processor, "dense", kind)(qkv, weight, POS, POS)
        chex.assert_trees_all_close((before, all_grads), expected, **close(bias))

    # The future.
    after, _ = run(replace(POS > t), weight, POS, POS)
    chex.assert_trees_all_equal(before[:, : t + 1], after[:, : t + 1])
    assert np.abs(before - after)[:, t + 1 :].max() > 1e-3
    for grad in grads(POS <= t):
        np.testing.assert_array_equal(grad[:, t + 1 :], 0)
        assert np.abs(grad[:, 1 : t + 1]).max() > 1e-4

    # Keys before the window.
    if window < LENGTH:
        first = t - window + 1  # the first key that row t sees
        after, _ = run(replace(POS < first, arrays=(1, 2)), weight, POS, POS)
        chex.assert_trees_all_equal(before[:, t:], after[:, t:])
        assert np.abs(before - after)[:, t - 1].max() > 1e-3
        for grad in grads(POS >= t)[1:]:
            np.testing.assert_array_equal(grad[:, :first], 0)
            assert np.abs(grad[:, first]).max() > 1e-6

    # Padding: keys at negative positions. Later rows see the keys before it.
    k_pos = np.where(POS < t, POS, -1)
    padded, after = (run(x, weight, POS, k_pos)[0] for x in (qkv, replace(POS >= t, arrays=(1, 2))))
    some = slice(0, t + window - 1)  # rows with a visible key
    chex.assert_trees_all_equal(padded[:, some], after[:, some])
    assert np.abs(padded - before)[:, t : t + window - 1].max() > 1e-3

    # Any rows, in any order, against all keys.
    if implementation in ("dense", "any_rows"):
        rows = np.array([7, 0, 3, 3, 9, 10, 1, 2, 8, 5, 6], np.int32)
        found, _ = run([qkv[0][:, rows], *qkv[1:]], weight, rows, POS)
        chex.assert_trees_all_close(found, before[:, rows], atol=tolerance(bias))


PREFIX = (BIASES, ALL_PROCESSORS, ("dense", "blockwise"), KINDS)


@pytest.mark.parametrize(("bias", "processor", "implementation", "kind"), every_case(PREFIX, each_value(PREFIX)))
def test_a_prefix_of_the_input_gives_a_prefix_of_the_output(bias, processor, implementation, kind):
    """f(x[:t]) = f(x)[:t] at true lengths, and the last row alone against all keys."""
    params, attend = make_layer(bias, processor)
    q, k, v = jax.device_get(make_qkv(kv_heads=KINDS[kind].get("kv_heads")))

    @jax.jit
    def step(q, k, v, q_pos):
        return attend(params, q, k, v, ALL_IMPLEMENTATIONS[implementation], q_pos, window=KINDS[kind].get("window"))

    whole, _ = compiled(bias, processor, implementation, kind)([q, k, v], make_weight(q), POS, POS)
    for t in (2, 7):
        part = jax.device_get(step(q[:, :t], k[:, :t], v[:, :t], POS[:t]))
        chex.assert_trees_all_close(part, whole[:, :t], atol=tolerance(bias))
        assert np.abs(part[:, -1] - whole[:, t]).max() > 1e-3
    chex.assert_trees_all_close(step(q[:, -1:], k, v, POS[-1:]), whole[:, -1:], atol=tolerance(bias))


def test_the_mask_agrees_with_its_docstring():
    drawn = [line.split()[2:7] for line in Mask.__doc__.splitlines() if line.strip().startswith("q ")]
    seen = np.array([[mark == "x" for mark in row] for row in drawn])
    assert seen.shape == (5, 5)
    pos = jnp.arange(5)
    chex.assert_trees_all_equal(np.asarray(Mask(True, 3).visible(Positions(pos, pos))), seen)
    chex.assert_trees_all_equal(np.asarray(Mask(False, 3).visible(Positions(pos, pos))), seen | seen.T)


BIDIRECTIONAL = ([bias for bias in BIASES if bias != "cope"], ("none", "dape3", "causal2", "of_scores"), KINDS)


@pytest.mark.parametrize(("bias", "processor", "kind"), every_case(BIDIRECTIONAL, each_value(BIDIRECTIONAL)))
def test_bidirectional_rows_depend_on_both_sides(bias, processor, kind):
    """Not causal: every row depends on every key within the window; blockwise = dense."""
    dense, blockwise = (compiled(bias, processor, name, kind, causal=False) for name in ("dense", "blockwise"))
    qkv = make_qkv(kv_heads=KINDS[kind].get("kv_heads"))
    weight = make_weight(qkv[0])
    expected = dense(qkv, weight, POS, POS)
    chex.assert_trees_all_close(blockwise(qkv, weight, POS, POS), expected, **close(bias))
    sees_TS = np.asarray(Mask(False, KINDS[kind].get("window")).visible(Positions(POS, POS)))
    for row in range(LENGTH):
        _, (_, (_, _, grad)) = dense(qkv, np.where((POS == row)[None, :, None, None], weight, 0), POS, POS)
        np.testing.assert_array_equal(np.abs(grad).max((0, 2, 3)) > 0, sees_TS[row])


@pytest.mark.parametrize(("width", "alignment"), [(1, "centered"), (7, "centered"), (2, "causal"), (7, "causal")])
def test_columns_that_a_convolution_reads(width, alignment):
    """Two convolutions: centered, 2 (W//2) columns on either side; causal, 2 (W - 1) columns to the left."""
    length, column = 60, 30
    config = DapeConfig(kernel_width=width, channels=7, alignment=alignment)

    @jax.jit
    def process(scores):
        processor = config.build(2, has_bias=False, rngs=nnx.Rngs(0))
        return processor(scores, None, jnp.ones((1, length), bool))

    scores = np.random.default_rng(0).standard_normal((1, 2, 1, length), np.float32)
    moved = np.subtract(process(scores), process(scores + (np.arange(length) == column)))
    left, right = (0, 2 * (width - 1)) if alignment == "causal" else (2 * (width // 2),) * 2
    changed = np.flatnonzero(np.abs(moved).max((0, 1, 2)) > 0)
    np.testing.assert_array_equal(changed, range(column - left, column + right + 1))


@pytest.mark.parametrize(("length", "window"), [(1, None), (23, 7), (30, 40)])
def test_implementations_agree_at_any_length(length, window):
    """Test one token, one block, ragged last blocks, grouped heads, and windows shorter and longer than a block."""
    layer, qkv = make_layer("kerple", "dape5", heads=4), make_qkv(length, 1, heads=4, kv_heads=2)
    dense, *others = (
        value_and_grads(layer, implementation, window=window)(qkv, make_weight(qkv[0]))
        for implementation in (Dense(), Blockwise(5, 4), Blockwise(64, 2), Cached(7))
    )
    for found in others:
        chex.assert_trees_all_close(found, dense, **close("kerple"))


ON_MESH = (BIASES, ("none", "dape3", "dape5", "causal2", "equation2", "of_bias"), (None, 5))
ON_MESH_QUICK = [("kerple", "dape3", 5), ("transformer_xl", "causal2", None), ("cope", "none", None)]


@pytest.mark.parametrize(("bias", "processor", "window"), every_case(ON_MESH, ON_MESH_QUICK))
@pytest.mark.extra
def test_rows_over_devices_agree(bias, processor, window):
    """Rows striped over context and tensor equal dense on one device, in values and all gradients."""
    layer, qkv = make_layer(bias, processor, heads=4), make_qkv(24, heads=4, kv_heads=2)
    expected = value_and_grads(layer, Dense(), window=window)(qkv, make_weight(qkv[0]))
    with jax.set_mesh(make_mesh(MeshConfig(1, 1, 2, 2), jax.devices()[:4])):
        found = value_and_grads(layer, OnMesh(Blockwise(4, 3)), window=window)(qkv, make_weight(qkv[0]))
    chex.assert_trees_all_close(found, expected, **close(bias))


@pytest.mark.parametrize(
    ("bias", "processor"), [("kerple", "dape3"), ("nope", "causal2"), ("cope", "none"), ("fire", "of_bias")]
)
@pytest.mark.usefixtures("smooth_leaky_relu")
def test_bfloat16_is_near_float32(bias, processor):
    """Inputs and convolutions in bfloat16: values, and all gradients together.

    LeakyReLU is smoothed: rounding may move a hidden feature that is almost 0 across the kink, and in a small layer
    this feature can be several per cent of the gradient. A larger error is allowed where CoPE's gradient jumps as a
    position passes an integer.
    """
    qkv = make_qkv(16)
    (full, full_grads), (half, half_grads) = (
        value_and_grads(make_layer(bias, processor, dtype=dtype), Dense(), dtype)(qkv, make_weight(qkv[0]))
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    full_grad, half_grad = (np.concatenate([x.ravel() for x in jax.tree.leaves(y)]) for y in (full_grads, half_grads))
    assert not np.array_equal(half, full)
    np.testing.assert_allclose(half, full, atol=0.06)
    allowed = 0.03 if bias == "cope" else 0.01
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


@pytest.mark.parametrize(("bias", "implementation"), [("kerple", "blockwise"), ("cope", "dense")])
@pytest.mark.extra
def test_grouped_heads_are_shared_heads(bias, implementation):
    """Two key heads for six query heads equal the two repeated three times, with gradients summed."""
    layer, (q, k, v) = make_layer(bias, "dape3", heads=6), make_qkv(9, heads=6, kv_heads=2)
    weight, run = make_weight(q), value_and_grads(layer, ALL_IMPLEMENTATIONS[implementation])
    shared = run((q, k, v), weight)
    repeated = (q, *(jnp.repeat(x, 3, axis=2) for x in (k, v)))
    out, (of_params, (dq, *grads)) = run(repeated, weight)
    sums = (grad.reshape(2, 9, 2, 3, 4).sum(3) for grad in grads)
    chex.assert_trees_all_close(shared, (out, (of_params, (dq, *sums))), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("width", "options", "window"),
    [
        (1, {"edge": "listing"}, 3),
        (3, {"leak": True}, None),
        (7, {"leak": True, "edge": "listing"}, 3),
        (3, {"leak": True, "alignment": "causal"}, None),
    ],
)
@pytest.mark.extra
def test_blocks_read_the_halo_of_a_row(width, options, window):
    """Options without a cache read keys next to the visible ones: blockwise reads them too (`key_halo`)."""
    processor = DapeConfig(kernel_width=width, channels=5, **options).build(2, rngs=nnx.Rngs(0))
    options = {"bias": make_bias("kerple", 2, 4), "processor": processor, "window": window}
    whole, blocks = (
        jax.jit(functools.partial(attend, **options, implementation=f))(*make_qkv(29))
        for f in (Dense(), Blockwise(block_size=4, num_buckets=5))
    )
    chex.assert_trees_all_close(blocks, whole, atol=2e-6)


@pytest.mark.parametrize("bias", ["kerple", "cope", "transformer_xl"])
@pytest.mark.extra
def test_attention_depends_on_no_offset(bias):
    """Also far away; but FIRE's norm depends on the position itself."""
    run, qkv = compiled(bias, "dape3", "dense"), make_qkv()
    near, far = (run(qkv, make_weight(qkv[0]), POS + start, POS + start)[0] for start in (0, 100_000))
    np.testing.assert_allclose(near, far, atol=tolerance(bias))


def plain_convolution(x, kernel, pads):
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel[None], (1, 1), ((0, 0), pads), dimension_numbers=names)


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
@pytest.mark.parametrize("seed", range(4))
def test_matmuls_and_convolution_agree(monkeypatch, seed, platform):
    """Values and gradients, on a TPU and elsewhere, are those that JAX derives for the plain convolution."""
    monkeypatch.setattr("dape_jax.model.processors.device_platform", lambda: platform)
    draw, normal = random.Random(seed), np.random.default_rng(seed).normal
    width = draw.randint(1, 7)
    left, right, columns = draw.randint(0, width - 1), draw.randint(0, width - 1), draw.randint(width, width + 4)
    dtype, (inputs, outputs) = draw.choice(["float32", "bfloat16"]), [(4, 5), (5, 4), (3, 3)][seed % 3]
    shapes = (2, 3, columns, inputs), (width, inputs, outputs), (2, 3, columns + left + right - width + 1, outputs)
    x, kernel, dy = (jnp.asarray(normal(size=shape), jnp.float32) for shape in shapes)

    def value_and_grads(function, *args):
        def run(x, kernel):
            y, pullback = jax.vjp(function, x, kernel)
            return y, *pullback(dy)

        return jax.jit(run)(*args)

    plain = functools.partial(plain_convolution, pads=(left, right))
    expected = value_and_grads(plain, *(y.astype(dtype).astype(jnp.float32) for y in (x, kernel)))
    assert min(np.abs(y).max() for y in expected) > 0.1
    rounded = x.astype(dtype), kernel.astype(dtype)
    found = value_and_grads(lambda x, kernel: key_convolution(x, kernel, left, right), *rounded)
    assert [y.dtype for y in found] == [jnp.float32, dtype, dtype]
    found = tuple(y.astype(jnp.float32) for y in found)
    chex.assert_trees_all_close(found, expected, atol=1e-5 if dtype == "float32" else 0.1, rtol=1e-5)


def test_no_convolution_on_a_cpu_is_longer_than_its_input():
    """XLA's fast convolution requires it, so the compiler must not merge the padding into the convolution."""

    def longest(convolve):
        """Return by how many columns the longest convolution of the compiled gradients exceeds its input."""
        gradients = jax.jit(jax.grad(lambda x, kernel: jnp.square(convolve(x, kernel)).sum(), (0, 1)))
        text = gradients.lower(jnp.ones((2, 8, 128, 4)), jnp.ones((3, 4, 32))).compile().as_text()
        windows = re.findall(r" convolution\(.*window=\{size=1x(\d+) pad=0_0x(-?\d+)_(-?\d+)", text)
        return max(int(left) + int(right) - int(width) + 1 for width, left, right in windows)

    assert longest(lambda x, kernel: plain_convolution(x, kernel, (1, 2))) > 0
    assert longest(lambda x, kernel: key_convolution(x, kernel, 1, 2)) == 0


@pytest.mark.parametrize(
    ("bias", "processor", "implementation"),
    [("kerple", "dape3", name) for name in ALL_IMPLEMENTATIONS] + [("cope", "causal2", "dense")],
)
@pytest.mark.extra
def test_large_inputs_give_finite_values_and_gradients(bias, processor, implementation):
    """Scores of 1e4: the softmax is one key, and a masked score is a finite number below all of them."""
    q, k, v = make_qkv()
    found = compiled(bias, processor, implementation)([100 * q, 100 * k, v], jnp.ones_like(q), POS, POS)
    chex.assert_tree_all_finite(found)
    probs = found[1][1][2][0, :, 0, 0]  # the gradient of a value is the sum of the probabilities of its key
    np.testing.assert_allclose(probs.sum(), LENGTH, rtol=1e-5)


def test_inputs_of_the_convolution_and_residual():
    """Check that inputs="scores" does not read B, inputs="bias" does not read A, and residual=False does not add B."""
    draw = np.random.default_rng(0)
    scores, other = draw.standard_normal((2, 3, 2, 5, 5), np.float32)
    bias, other_bias = draw.standard_normal((2, 3, 2, 5, 5), np.float32)
    mask = jnp.asarray(np.tril(np.ones((5, 5), bool)))

    @functools.partial(jax.jit, static_argnames=("inputs", "residual"))
    def added(scores, bias, **options):
        processor = DapeConfig(kernel_width=3, channels=4, **options).build(2, rngs=nnx.Rngs(0))
        return processor(scores, bias, mask) - scores - bias

    with_other_bias, with_other_scores = (scores, other_bias), (other, bias)
    for inputs, unread, read in (
        ("scores", with_other_bias, with_other_scores),
        ("bias", with_other_scores, with_other_bias),
    ):
        found = added(scores, bias, inputs=inputs)
        np.testing.assert_allclose(found, added(*unread, inputs=inputs), atol=1e-5)
        assert np.abs(found - added(*read, inputs=inputs)).max() > 0.1
    np.testing.assert_allclose(added(scores, bias) - added(scores, bias, residual=False), bias, atol=1e-5)


@pytest.mark.parametrize("bias", ["nope", "kerple", "cope"])
def test_identity_starts_as_the_base_and_trains(bias):
    """With init="identity" results are bitwise plain attention's; both convolutions change within two steps."""
    layer = make_bias(bias, 2, 4)

    @jax.jit
    def build():
        configs = (DapeConfig(channels=5, init="identity"), DapeConfig(channels=5), ALL_PROCESSORS["none"])
        return [config.build(2, has_bias=layer is not None, rngs=nnx.Rngs(0)) for config in configs]

    identity, random, plain = build()
    qkv, weight = make_qkv(9), make_weight(make_qkv(9)[0])
    run = jax.jit(lambda processor: attend(*qkv, bias=layer, processor=processor))
    base = jax.device_get(run(plain))
    np.testing.assert_array_equal(run(identity), base)
    assert np.abs(run(random) - base).max() > 1e-3
    gradient = jax.jit(jax.grad(lambda processor: (run(processor) * weight).sum()))
    first = gradient(identity)
    second = gradient(jax.tree.map(lambda p, g: p - g, identity, first))
    assert np.abs(first.output_WCH[...]).max() > 1e-3
    np.testing.assert_array_equal(first.scores_WHC[...], 0)  # it is read through a kernel that is still 0
    assert np.abs(second.scores_WHC[...]).max() > 1e-3


@pytest.mark.parametrize(("num_runs", "halo", "row_stride"), [(1, (2, 1), 1), (2, (0, 0), 3), (4, (2, 1), 3)])
def test_runs_read_the_keys_that_their_rows_see(num_runs, halo, row_stride):
    """Compare by brute force: keys up to the last column of a row of the run; with a window, enough for any block."""
    rows, block, (left, right) = 11, 2, halo
    keys = rows * row_stride
    runs = causal_runs(rows, keys, block, num_runs, Mask(row_stride=row_stride), halo)
    assert runs[-1][1] == -(-rows // block)
    assert [start for start, _, _ in runs] == [0, *[stop for _, stop, _ in runs[:-1]]]
    for _, stop, num_read in runs:
        last_row = min(stop * block, rows) - 1
        assert num_read == (keys if num_runs == 1 else min(keys, (last_row + 1) * row_stride + right))
    if num_runs > 1:
        ((_, _, num_read),) = causal_runs(rows, keys, block, num_runs, Mask(window=4, row_stride=row_stride), halo)
        assert num_read == left + 3 + block * row_stride + right


def lowered(length, implementation, *, heads=4, head_dim=16, gradient=True, **options):
    """Return the program of a layer, with its gradients, before it is compiled."""
    params, attend = make_layer("kerple", "dape3", heads, head_dim)
    qkv = make_qkv(length, 1, heads, head_dim)

    def forward(params, qkv):
        return attend(params, *qkv, implementation, **options)

    program = jax.grad(lambda *args: forward(*args).sum(), (0, 1)) if gradient else forward
    return jax.jit(program).lower(params, qkv)


def temporary_bytes(length, implementation, **options):
    """Return the peak memory of a layer, by the compiler's plan."""
    return lowered(length, implementation, **options).compile().memory_analysis().temp_size_in_bytes


def test_compile_time_does_not_grow_with_length():
    """Blockwise attention compiles to the same number of instructions at any length."""
    short, long, one_block = (
        len(lowered(length, Blockwise(block_size, 2)).as_text().splitlines())
        for length, block_size in ((128, 16), (1024, 16), (128, 128))
    )
    assert short == long != one_block


def test_blockwise_memory_is_linear_in_length():
    """Peak memory of forward and backward grows with T, not with T squared."""
    blockwise = Blockwise(32, 2)
    whole, half, dense = (temporary_bytes(*case) for case in ((2048, blockwise), (1024, blockwise), (2048, Dense())))
    assert whole < 2.5 * half
    assert whole < dense / 8


def test_a_window_bounds_the_memory_of_a_block():
    """With a window, temporary memory grows only by queries, keys, values and results in blocks."""
    row_bytes = 4 * 16 * 4

    def growth(window):
        sizes = [temporary_bytes(length, Blockwise(32, 2), gradient=False, window=window) for length in (4096, 2048)]
        return (sizes[0] - sizes[1]) / row_bytes

    assert growth(128) < 4.1 * 2048 < growth(None) / 3  # in rows of queries


REFUSED = [
    (lambda: DapeConfig(kernel_width=2), "model.processor.kernel_width = 2: .*odd"),
    (lambda: DapeConfig(kernel_width=0), "model.processor.kernel_width = 0"),
    (lambda: DapeConfig(channels=0), "model.processor.channels = 0"),
    (lambda: DapeConfig(edge="middle"), "model.processor.edge = 'middle': .*listing"),
    (lambda: DapeConfig(inputs="bias").build(2, has_bias=False, rngs=nnx.Rngs(0)), "model.processor.inputs = 'bias'"),
    (lambda: BIASES["cope"](num_positions=0), "model.bias.num_positions = 0"),
    (lambda: attend(*make_qkv(5), bias=make_bias("cope", 2, 4), causal=False), "model.bias = 'cope': .*causal"),
    (lambda: attend(*make_qkv(3), window=0), "window = 0: .*None"),
    (lambda: PositionInterpolation(factor=0.5), "model.rotary.factor = 0.5"),
    (lambda: NtkAware(base=0.5), "model.rotary.base = 0.5"),
    (lambda: NtkAware(factor=2.0).frequencies(2), "= 2: .*NTK"),
    (lambda: Yarn(train_length=0), "model.rotary.train_length = 0"),
    (lambda: Yarn(beta_fast=1.0, beta_slow=2.0), "model.rotary.beta_fast = 1.0: .*2.0"),
    (lambda: BIASES["transformer_xl"]().build(3, 5, nnx.Rngs(0)), "model.width = 15: .*even"),
    (lambda: BIASES["sandwich"](position_dim=5), "model.bias.position_dim = 5: .*even"),
    (lambda: Blockwise(block_size=0), "model.attention.block_size = 0"),
    (lambda: BIASES["fire"](activation="tanh"), "model.bias.activation = 'tanh': .*relu"),
    (lambda: BIASES["t5"](num_buckets=32, max_distance=8), "model.bias.max_distance = 8"),
]


def test_bad_options_are_named():
    for make, words in REFUSED:
        with pytest.raises(InputError, match=words):
            make()
