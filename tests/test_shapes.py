"""Shapes and dtypes of every bias x processor x implementation, and finite numbers for any finite input."""

import functools
import itertools

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
    attend_rows,
    compiled,
    covering,
    every_case,
    make_qkv,
)

from dape_jax.errors import InputError
from dape_jax.model.attention import attend, check_arrays
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import ScoreMod

AXES = (ALL_BIASES, ALL_PROCESSORS, ALL_IMPLEMENTATIONS, ("float32", "bfloat16"))
# Every bias and every processor with every implementation and dtype.
SAMPLE = covering(AXES, [(0, 2), (1, 2), (0, 3), (1, 3)])
BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 6, 2, 4


@pytest.mark.parametrize(("bias", "processor", "implementation", "dtype"), every_case(AXES, SAMPLE))
def test_output_has_the_shape_of_queries_and_the_dtype_of_values(bias, processor, implementation, dtype):
    """Shapes are abstract: nothing is compiled. All dims differ, so no two can be confused."""

    def attend(num_rows: int):
        rngs = nnx.Rngs(0)
        score_mod = ScoreMod(
            ALL_BIASES[bias]().build(HEADS, HEAD_DIM, rngs),
            ALL_PROCESSORS[processor].build(HEADS, has_bias=bias != "nope", dtype=jnp.dtype(dtype), rngs=rngs),
        )
        q = jnp.zeros((BATCH, num_rows, HEADS, HEAD_DIM), dtype)
        k, v = jnp.zeros((2, BATCH, LENGTH, KV_HEADS, HEAD_DIM), dtype)
        pos = jnp.arange(LENGTH)
        return attend_rows(ALL_IMPLEMENTATIONS[implementation], q, k, v, pos[-num_rows:], pos, score_mod)

    has_other_rows = implementation in ("dense", "any_rows")  # fewer rows than keys, one row
    for num_rows in (LENGTH, 5, 1) if has_other_rows else (LENGTH,):
        out = jax.eval_shape(functools.partial(attend, num_rows))
        chex.assert_shape(out, (BATCH, num_rows, HEADS, HEAD_DIM))
        assert out.dtype == dtype


@pytest.mark.parametrize("bias", BIASES)
def test_biases_have_a_head_a_row_and_a_column_for_each(bias):
    @jax.jit
    def both():
        layer = BIASES[bias]().build(3, HEAD_DIM, nnx.Rngs(0))
        q_pos, k_pos = jnp.array([4, 0]), jnp.arange(5)
        return None if layer is None else (layer(q_pos, k_pos), layer(q_pos, k_pos[:1]))

    if bias == "nope":
        assert both() is None
        return
    found, of_one_key = jax.device_get(both())
    chex.assert_shape(found, (3, 2, 5))
    chex.assert_tree_all_finite(found)
    chex.assert_shape(of_one_key, (3, 2, 1))


LARGE = (("kerple", "dape3"), ("t5", "none"), ("cope", "causal2")), ALL_IMPLEMENTATIONS


@pytest.mark.parametrize(
    ("bias", "processor", "implementation"),
    [
        pytest.param(*layer, implementation, marks=marks)
        for layer, implementation in itertools.product(*LARGE)
        for marks in [() if implementation == "dense" or layer == ("kerple", "dape3") else pytest.mark.slow]
    ],
)
def test_large_inputs_give_finite_values_and_gradients(bias, processor, implementation):
    """Scores of 1e4: the softmax is one key, and a masked score is a finite number below all of them."""
    q, k, v = make_qkv()
    pos = jnp.arange(LENGTH)
    found = compiled(bias, processor, implementation)([100 * q, 100 * k, v], pos, pos, jnp.ones_like(q))
    chex.assert_tree_all_finite(found)
    probs = found[1][1][2][0, :, 0, 0]  # the gradient of a value is the sum of the probabilities of its key
    np.testing.assert_allclose(probs.sum(), LENGTH, rtol=1e-5)


NARROW = [x[..., :-1] for x in make_qkv(5)[1:]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: attend(*make_qkv(3, heads=3, kv_heads=2), *[jnp.arange(3)] * 2), ["num_kv_heads", "2", "3"]),
        (lambda: attend(*make_qkv(3), *[jnp.arange(3)] * 2, window=0), ["window", "0", "None"]),
        # Not through `attend`, whose annotations refuse these first wherever they are checked, as in tests.
        (
            lambda: check_arrays(*(jnp.moveaxis(x, 1, 2) for x in make_qkv(5)), *[jnp.arange(5)] * 2),
            ["q_BTHK.shape", "[B, T, H, K]", "[B, H, T, K]"],
        ),
        (lambda: check_arrays(*make_qkv(5), jnp.arange(4), jnp.arange(5)), ["q_BTHK.shape", "4"]),
        (lambda: check_arrays(*make_qkv(5), 4, jnp.arange(5)), ["q_pos_T = 4", "array of positions"]),
        (lambda: check_arrays(*(x[:, :0] for x in make_qkv(5)), *[jnp.arange(0)] * 2), ["q_BTHK.shape", "above 0"]),
        (
            lambda: check_arrays(*(x.astype(int) for x in make_qkv(5)), *[jnp.arange(5)] * 2),
            ["q_BTHK.dtype = 'int32'", "float32"],
        ),
        (lambda: check_arrays(make_qkv(5)[0], *NARROW, *[jnp.arange(5)] * 2), ["k_BSGK.shape", f"K = {HEAD_DIM}"]),
    ],
)
def test_shapes_that_do_not_fit_are_named(make, words):
    with pytest.raises(InputError) as error:
        make()
    assert all(word in str(error.value) for word in words)
