"""DAPE in bfloat16 and float16 is accurate at any length: one row against many keys, compared with float64."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SPEC

from benchmarks import precision
from benchmarks.precision import HEAD_DIM, as_written, exact, largest_error, last_row, process, processed
from dape_jax.config import read_model
from dape_jax.model.attention import Dense, Fused, attend
from dape_jax.model.biases import BIASES
from dape_jax.model.loss import nll_of_features
from dape_jax.model.processors import SLOPE, DapeConfig, leaky_relu_change
from dape_jax.model.scores import masked_softmax
from dape_jax.model.transformer import model_structure

DAPE = DapeConfig()


ALLOWED_NATS = {"bfloat16": 0.01, "float16": 0.0015}  # largest errors found: 0.0035 and 0.0008
CAUSAL = DapeConfig(kernel_width=4, alignment="causal")
FAST = [("alibi", DAPE, "bfloat16", 8192), ("kerple_power", DAPE, "float16", 8192), ("kerple", DAPE, "float16", 2048)]
FAST += [("alibi", CAUSAL, dtype, 8192) for dtype in ALLOWED_NATS]
SLOW = [(bias, DAPE, dtype, 8192) for bias in BIASES for dtype in ALLOWED_NATS]
SLOW += [("kerple_power", DAPE, dtype, length) for dtype in ALLOWED_NATS for length in (512, 2048, 32_768)]
SLOW += [("sandwich", DapeConfig(kernel_width=7), "float16", 8192)]
SLOW += [("alibi", DapeConfig(inputs=inputs), "bfloat16", 8192) for inputs in ("bias", "scores")]


@pytest.mark.parametrize(
    ("bias", "config", "dtype", "length"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in FAST)],
    ids=str,
)
def test_scores_are_right_at_any_length(bias, config, dtype, length):
    """Compare scores with weight, except those that float32 cannot resolve either (Kerple's power far away)."""
    rows, params = last_row(bias, length, config)
    expected = exact(rows, params, config)
    in_float32 = largest_error(jax.device_get(process(rows, params, config, "float32")), expected)
    found = jax.device_get(process(rows, params, config, dtype))
    assert np.isfinite(found).all()
    assert bias != "kerple_power" or length < 8192 or np.abs(rows[1]).max() > 65_504  # the largest number of float16
    assert not np.array_equal(found, expected)
    assert largest_error(found, expected) < ALLOWED_NATS[dtype] + 2 * in_float32
    assert in_float32 < 0.002 or bias == "kerple_power"


def test_the_formula_as_written_loses_what_dape_keeps():
    """Check that the benchmark computes the same function twice: only the dtype of the hidden features differs."""
    rows, params = last_row("alibi", 2048, DAPE)
    in_float32 = jax.device_get(as_written(rows, params, "float32"))
    assert largest_error(in_float32, exact(rows, params, DAPE)) < 1e-4
    found = precision.measure("alibi", "bfloat16", 2048, DAPE)
    assert found["as_written"] > 50 * found["dape"]


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32) | st.floats(-1e9, 1e9, width=32))
def test_the_change_of_leaky_relu_is_a_difference(x, center):
    """Compare also where all digits would cancel if the two terms were computed in float32."""

    def leaky_relu(y: Fraction) -> Fraction:
        return y if y > 0 else Fraction(SLOPE) * y

    expected = leaky_relu(Fraction(center) + Fraction(x)) - leaky_relu(Fraction(center))
    with jax.enable_x64(True):
        found = float(leaky_relu_change(jnp.float64(x), jnp.float64((1 - SLOPE) * center)))
    assert found == pytest.approx(float(expected), rel=1e-12, abs=1e-6 * abs(x))


@pytest.mark.usefixtures("smooth_leaky_relu")
def test_gradients_are_right_far_away():
    """Compare gradients of the probabilities with respect to scores, bias and every parameter."""
    (scores, bias_HS, mask), params = last_row("alibi", 4096, DAPE)
    weight = np.random.default_rng(2).standard_normal(scores.shape, np.float32)

    @functools.partial(jax.jit, static_argnums=1)
    @jax.grad
    def gradients(inputs, dtype, weight):
        scores, bias_HS, params = inputs
        visible = jnp.asarray(mask)
        return (masked_softmax(processed((scores, bias_HS, visible), params, DAPE, dtype), visible) * weight).sum()

    inputs = (scores, bias_HS, params)
    found = jax.device_get(gradients(inputs, "bfloat16", weight))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (inputs, weight))
        expected = jax.device_get(gradients(wide[0], "float64", wide[1]))
    for tree in (found, expected):
        tree[2].pop("output_bias_H")  # 0 up to rounding: it shifts whole rows
    for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert 0 < error < 0.02, jax.tree_util.keystr(path)


@pytest.mark.parametrize("platform", [pytest.param("tpu", marks=pytest.mark.slow), "gpu"])
def test_kernels_are_right_far_away(platform):
    """Compare the last rows of 1,200 keys in bfloat16 with dense attention in float32 on rounded q, k and v."""
    heads, length, rows = 3, 1200, 8
    bias = BIASES["alibi"]().build(heads, HEAD_DIM, nnx.Rngs(0))
    processor = nnx.jit(lambda: DapeConfig(channels=8).build(heads, dtype=jnp.bfloat16, rngs=nnx.Rngs(1)))()
    draw = np.random.default_rng(3)
    shapes = [(1, n, heads, HEAD_DIM) for n in (rows, length, length)]
    q, k, v = (draw.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in shapes)

    def run(implementation, *qkv):
        options = {"bias": bias, "processor": processor, "implementation": implementation}
        return jax.device_get(jax.jit(functools.partial(attend, **options))(*qkv))

    found = run(Fused(platform), q, k, v).astype(np.float32)
    processor.dtype = None
    expected = run(Dense(), *(x.astype(np.float32) for x in (q, k, v)))
    assert np.abs(expected).max() > 0.5
    assert 1e-4 < np.abs(found - expected).max() < 0.02


def matmuls(jaxpr) -> list:
    """Return the equations of a jaxpr, and of those inside it, that are matmuls or convolutions."""
    found = []
    for equation in jaxpr.eqns:
        found += [equation] if equation.primitive.name in ("dot_general", "conv_general_dilated") else []
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            found += matmuls(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [pytest.param(b, marks=() if b == "fire" else pytest.mark.slow) for b in BIASES])
@pytest.mark.extra
def test_operands_in_float32_are_not_rounded(bias, dtype):
    """Matmuls and convolutions of a training step set the precision, since TPUs and GPUs round by default.

    With bfloat16, gradients in float32 meet activations in bfloat16: those are rounded.
    """
    config = read_model(SPEC["model"] | {"bias": {"name": bias}, "dtype": dtype})
    graphdef, params = model_structure(config)
    tokens_BT = jax.ShapeDtypeStruct((2, 9), jnp.int32)

    def loss(params, tokens_BT):
        model = nnx.merge(graphdef, params)
        nll_BT = nll_of_features(model, model.features(tokens_BT), tokens_BT, 8)
        return nll_BT.mean() + model(tokens_BT).mean()

    found = matmuls(jax.make_jaxpr(jax.grad(loss))(params, tokens_BT).jaxpr)
    in_float32 = [equation for equation in found if {x.aval.dtype for x in equation.invars} == {jnp.dtype("float32")}]
    assert len(found) > 20
    assert (len(in_float32) == len(found)) == (dtype == "float32")
    assert in_float32 or bias == "nope"
    for equation in in_float32:
        assert equation.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2, equation
