"""Shapes and dtypes of every bias x processor x implementation, and finite numbers for any finite input."""

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
    LENGTH,
    compiled,
    every_case,
    make_layer,
    make_qkv,
    pairwise,
)

from dape_jax.errors import InputError
from dape_jax.model.attention import attend, check_shapes
from dape_jax.model.biases import BIASES

AXES = (ALL_BIASES, ALL_PROCESSORS, ALL_IMPLEMENTATIONS, ("float32", "bfloat16"))
BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 6, 2, 4


@pytest.mark.parametrize(("bias", "processor", "implementation", "dtype"), every_case(AXES, pairwise(AXES)))
def test_output_has_the_shape_of_queries_and_the_dtype_of_values(bias, processor, implementation, dtype):
    """Shapes are abstract: nothing is compiled. All dims differ, so no two can be confused."""
    params, attend = make_layer(bias, processor, HEADS, HEAD_DIM, dtype=jnp.dtype(dtype))
    q, k, v = (x.astype(dtype) for x in make_qkv(LENGTH, BATCH, HEADS, HEAD_DIM, kv_heads=KV_HEADS))
    function = ALL_IMPLEMENTATIONS[implementation]
    out = jax.eval_shape(lambda *qkv: attend(params, *qkv, function), q, k, v)
    chex.assert_shape(out, (BATCH, LENGTH, HEADS, HEAD_DIM))
    assert out.dtype == v.dtype
    if implementation in ("dense", "any_rows"):  # fewer rows than keys, one row, and no other number of keys
        for num_rows in (5, 1):
            rows = jnp.arange(LENGTH)[-num_rows:]
            some = jax.eval_shape(lambda *qkv, rows=rows: attend(params, *qkv, function, rows), q[:, -num_rows:], k, v)
            chex.assert_shape(some, (BATCH, num_rows, HEADS, HEAD_DIM))


@pytest.mark.parametrize("bias", BIASES)
def test_biases_have_a_head_a_row_and_a_column_for_each(bias):
    layer = BIASES[bias]().build(3, HEAD_DIM, nnx.Rngs(0))
    if layer is None:
        assert bias == "nope"
        return
    q_pos, k_pos = jnp.array([4, 0]), jnp.arange(5)
    found = layer(q_pos, k_pos)
    chex.assert_shape(found, (3, 2, 5))
    chex.assert_tree_all_finite(found)
    chex.assert_shape(layer(q_pos, k_pos[:1]), (3, 2, 1))


@pytest.mark.parametrize(("bias", "processor"), [("kerple", "dape3"), ("t5", "none"), ("cope", "causal2")])
@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
def test_large_inputs_give_finite_values_and_gradients(bias, processor, implementation):
    """Scores of 1e4: the softmax is one key, and a masked score is a finite number below all of them."""
    q, k, v = make_qkv()
    pos = jnp.arange(LENGTH)
    found = compiled(bias, processor, implementation)([100 * q, 100 * k, v], pos, pos, jnp.ones_like(q))
    chex.assert_tree_all_finite(found)
    probs = found[1][1][2][0, :, 0, 0]  # the gradient of a value is the sum of the probabilities of its key
    np.testing.assert_allclose(probs.sum(), LENGTH, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: attend(*make_qkv(3, heads=3, kv_heads=2), *[jnp.arange(3)] * 2), ["num_kv_heads", "2", "3"]),
        (lambda: attend(*make_qkv(3), *[jnp.arange(3)] * 2, window=0), ["window", "0", "None"]),
        # Not through `attend`, whose annotations refuse these first wherever they are checked, as in tests.
        (
            lambda: check_shapes(*(jnp.moveaxis(x, 1, 2) for x in make_qkv(5)), *[jnp.arange(5)] * 2),
            ["q_BTHK.shape", "[B, T, H, K]", "[B, H, T, K]"],
        ),
        (lambda: check_shapes(*make_qkv(5), jnp.arange(4), jnp.arange(5)), ["q_BTHK.shape", "4"]),
    ],
)
def test_shapes_that_do_not_fit_are_named(make, words):
    with pytest.raises(InputError) as error:
        make()
    assert all(word in str(error.value) for word in words)
