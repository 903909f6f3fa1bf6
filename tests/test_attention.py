"""Options of biases and processors, and the memory of blockwise attention.

Shapes, causality and the agreement of implementations: `test_shapes.py`, `test_causality.py`, `test_agreement.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import ALL_BIASES, SMALL_BIAS, make_layer, make_qkv, make_weight

from dape_jax.errors import InputError
from dape_jax.model.attention import Blockwise, Dense, attend
from dape_jax.model.biases import BIASES
from dape_jax.model.contextual import CONTEXTUAL
from dape_jax.model.processors import DapeConfig, PlainConfig
from dape_jax.model.scores import Mask, causal_runs


def test_inputs_of_the_convolution_and_residual():
    """Check that inputs="scores" does not read B, inputs="bias" does not read A, and residual=False does not add B."""
    draw = np.random.default_rng(0)
    scores, other = draw.standard_normal((2, 3, 2, 5, 5), np.float32)
    bias, other_bias = draw.standard_normal((2, 1, 2, 5, 5), np.float32)
    mask = jnp.asarray(np.tril(np.ones((5, 5), bool)))

    @functools.partial(jax.jit, static_argnames=("inputs", "residual"))
    def added(scores, bias, **options):
        processor = DapeConfig(kernel_width=3, channels=4, **options).build(2, rngs=nnx.Rngs(0))
        return processor(scores, bias, mask) - scores - bias

    close = {"atol": 1e-5}
    of_scores, of_bias = added(scores, bias, inputs="scores"), added(scores, bias, inputs="bias")
    np.testing.assert_allclose(of_scores, added(scores, other_bias, inputs="scores"), **close)
    np.testing.assert_allclose(of_bias, added(other, bias, inputs="bias"), **close)
    assert np.abs(of_scores - added(other, bias, inputs="scores")).max() > 0.1
    assert np.abs(of_bias - added(scores, other_bias, inputs="bias")).max() > 0.1
    np.testing.assert_allclose(
        added(scores, bias) - added(scores, bias, residual=False), np.tile(bias, (3, 1, 1, 1)), **close
    )


@pytest.mark.parametrize(
    "bias",
    [pytest.param(b, marks=() if b in ("nope", "kerple", "cope") else pytest.mark.slow) for b in ALL_BIASES],
)
def test_identity_starts_as_the_base(bias):
    """With init="identity" results are bitwise plain attention's, and the second convolution has a gradient."""

    @jax.jit
    def build():
        layer = ALL_BIASES[bias](**SMALL_BIAS.get(bias, {})).build(2, 4, nnx.Rngs(0))
        configs = (DapeConfig(channels=5, init="identity"), DapeConfig(channels=5), PlainConfig())
        return layer, [config.build(2, has_bias=layer is not None, rngs=nnx.Rngs(0)) for config in configs]

    layer, (identity, random, plain) = build()
    q, k, v = make_qkv(9)
    pos = jnp.asarray(np.arange(9))

    @jax.jit
    def run(processor):
        return attend(q, k, v, pos, pos, bias=layer, processor=processor)

    base = jax.device_get(run(plain))
    np.testing.assert_array_equal(run(identity), base)
    assert np.abs(run(random) - base).max() > 1e-3
    weight = make_weight(q)
    grads = nnx.to_pure_dict(nnx.state(nnx.jit(nnx.grad(lambda processor: (run(processor) * weight).sum()))(identity)))
    assert np.abs(grads["output_WCH"]).max() > 1e-3
    np.testing.assert_array_equal(grads["scores_WHC"], 0)  # it is read through a kernel that is still 0


@pytest.mark.parametrize("row_stride", [1, 3])
@pytest.mark.parametrize("halo", [(0, 0), (2, 1)])
@pytest.mark.parametrize("num_runs", [1, 2, 4])
def test_runs_read_the_keys_that_their_rows_see(num_runs, halo, row_stride):
    """Compare by brute force: keys up to the last column of a row of the run; with a window, enough for any block."""
    rows, block, (left, right) = 11, 2, halo
    keys = rows * row_stride
    runs = causal_runs(rows, keys, block, num_runs, Mask(row_stride=row_stride), halo)
    assert [run.stop for run in runs][-1] == -(-rows // block)
    assert [run.start for run in runs] == [0, *[run.stop for run in runs[:-1]]]
    for run in runs:
        last_row = min(run.stop * block, rows) - 1
        assert run.num_keys == (keys if num_runs == 1 else min(keys, (last_row + 1) * row_stride + right))
    if num_runs > 1:
        (run,) = causal_runs(rows, keys, block, num_runs, Mask(window=4, row_stride=row_stride), halo)
        assert run.num_keys == left + 3 + block * row_stride + right


def test_compile_time_does_not_grow_with_length():
    """Blockwise attention compiles to the same number of instructions at any length."""

    def num_instructions(length, block_size=16):
        params, attend = make_layer("kerple", "dape3")
        qkv = make_qkv(length, batch=1)

        def loss(params, qkv):
            return attend(params, *qkv, Blockwise(block_size=block_size, num_buckets=2)).sum()

        return len(jax.jit(jax.grad(loss, (0, 1))).lower(params, qkv).as_text().splitlines())

    assert num_instructions(128) == num_instructions(1024) != num_instructions(128, block_size=128)


def test_blockwise_memory_is_linear_in_length():
    """Peak memory of forward and backward, by the compiler's plan, grows with T, not with T squared."""

    def temporary_bytes(length, implementation):
        params, attend = make_layer("kerple", "dape3", heads=4, head_dim=16)
        qkv = make_qkv(length, batch=1, heads=4, head_dim=16)

        def loss(params, qkv):
            return attend(params, *qkv, implementation).sum()

        return jax.jit(jax.grad(loss, (0, 1))).lower(params, qkv).compile().memory_analysis().temp_size_in_bytes

    blockwise = Blockwise(block_size=32, num_buckets=2)
    assert temporary_bytes(2048, blockwise) < 2.5 * temporary_bytes(1024, blockwise)
    assert temporary_bytes(2048, blockwise) < temporary_bytes(2048, Dense()) / 8


def test_a_window_bounds_the_memory_of_a_block():
    """With a window, temporary memory grows only by queries, keys, values and results in blocks."""

    def temporary_bytes(length, window):
        params, attend = make_layer("kerple", "dape3", heads=4, head_dim=16)
        qkv = make_qkv(length, batch=1, heads=4, head_dim=16)
        forward = jax.jit(lambda params, qkv: attend(params, *qkv, Blockwise(32, 2), window=window))
        return forward.lower(params, qkv).compile().memory_analysis().temp_size_in_bytes / (qkv[0].nbytes / length)

    windowed, whole = (temporary_bytes(4096, window) - temporary_bytes(2048, window) for window in (128, None))
    assert windowed < 4.1 * 2048  # in rows of queries
    assert whole > 4 * windowed


REFUSED = [
    (lambda: DapeConfig(kernel_width=2), ["model.processor.kernel_width", "2", "odd"]),
    (lambda: DapeConfig(kernel_width=0), ["model.processor.kernel_width", "0"]),
    (lambda: DapeConfig(channels=0), ["model.processor.channels", "0", "positive"]),
    (lambda: DapeConfig(edge="middle"), ["model.processor.edge", "middle", "listing"]),
    (lambda: DapeConfig(alignment="left"), ["model.processor.alignment", "left", "causal"]),
    (lambda: DapeConfig(inputs="none"), ["model.processor.inputs", "none", "scores"]),
    (lambda: DapeConfig(init="zero"), ["model.processor.init", "zero", "identity"]),
    (
        lambda: DapeConfig(inputs="bias").build(2, has_bias=False, rngs=nnx.Rngs(0)),
        ["model.processor.inputs", "bias", "both"],
    ),
    (lambda: CONTEXTUAL["cope"](num_positions=0), ["model.bias.num_positions", "0"]),
    (lambda: CONTEXTUAL["transformer_xl"]().build(3, 5, nnx.Rngs(0)), ["model.width", "15", "even"]),
    (lambda: BIASES["sandwich"](position_dim=5), ["model.bias.position_dim", "5", "even"]),
    (lambda: Blockwise(block_size=0), ["model.attention.block_size", "0"]),
    (lambda: BIASES["fire"](activation="tanh"), ["model.bias.activation", "tanh", "relu"]),
    (lambda: BIASES["t5"](num_buckets=32, max_distance=8), ["model.bias.max_distance", "8"]),
]


def test_bad_options_are_named():
    for make, words in REFUSED:
        with pytest.raises(InputError) as error:
            make()
        assert all(word in str(error.value) for word in words), (words, error.value)
