"""Causality: the keys that a query row depends on, for every bias x processor x implementation.

Strict causality is bitwise: values and gradients of a row do not depend on later tokens, tokens before its window, or
padding.
"""

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
    AXES,
    KINDS,
    LENGTH,
    attend_rows,
    compiled,
    each_value,
    every_case,
    make_layer,
    make_qkv,
    make_weight,
    pairwise,
    sample,
    tolerance,
)

from dape_jax.errors import InputError
from dape_jax.model.attention import Dense
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig, ScoreMod
from dape_jax.model.scores import Mask

POS = np.arange(LENGTH, dtype=np.int32)


def test_every_pair_of_values_meets():
    """Check that the default sample has every valid pair of values of two axes, and is far smaller than all."""
    cases = [case.values for case in every_case(AXES, ())]

    def pairs(cases):
        return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}

    assert ("nope", "of_bias") not in {case[:2] for case in cases}
    for chosen in (sample(), pairwise(AXES)):
        assert pairs(chosen) == pairs(cases)
        assert len(chosen) < len(cases) / 5
    assert pairwise(AXES) == pairwise(AXES) != pairwise(AXES, seed=1)


@pytest.mark.parametrize(("bias", "processor", "implementation", "kind"), every_case(AXES, sample()))
def test_rows_depend_on_visible_keys_only(bias, processor, implementation, kind):
    """Later keys, keys before the window, and padding change no bit and have gradient 0; rows are in any order."""
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
        return run(qkv, POS, POS, np.where(rows[None, :, None, None], weight, 0))[1][1]

    before, all_grads = run(qkv, POS, POS, weight)
    chex.assert_tree_all_finite((before, all_grads))

    # The future.
    after, _ = run(replace(POS > t), POS, POS, weight)
    chex.assert_trees_all_equal(before[:, : t + 1], after[:, : t + 1])
    assert np.abs(before - after)[:, t + 1 :].max() > 1e-3
    for grad in grads(POS <= t):
        np.testing.assert_array_equal(grad[:, t + 1 :], 0)
        assert np.abs(grad[:, 1 : t + 1]).max() > 1e-4

    # Keys before the window.
    if window < LENGTH:
        first = t - window + 1  # the first key that row t sees
        after, _ = run(replace(POS < first, arrays=(1, 2)), POS, POS, weight)
        chex.assert_trees_all_equal(before[:, t:], after[:, t:])
        assert np.abs(before - after)[:, t - 1].max() > 1e-3
        for grad in grads(POS >= t)[1:]:
            np.testing.assert_array_equal(grad[:, :first], 0)
            assert np.abs(grad[:, first]).max() > 1e-6

    # Padding: keys at negative positions. Later rows see the keys before it.
    k_pos = np.where(POS < t, POS, -1)
    padded, after = (run(x, POS, k_pos, weight)[0] for x in (qkv, replace(POS >= t, arrays=(1, 2))))
    some = slice(0, t + window - 1)  # rows with a visible key
    chex.assert_trees_all_equal(padded[:, some], after[:, some])
    assert np.abs(padded - before)[:, t : t + window - 1].max() > 1e-3

    # Any rows, in any order, against all keys.
    if implementation in ("dense", "any_rows"):
        rows = np.array([7, 0, 3, 3, 9, 10, 1, 2, 8, 5, 6], np.int32)
        found, _ = run([qkv[0][:, rows], *qkv[1:]], rows, POS, weight)
        chex.assert_trees_all_close(found, before[:, rows], atol=tolerance(bias))


PREFIX = (ALL_BIASES, ALL_PROCESSORS, ("dense", "blockwise"), KINDS)
PREFIX_QUICK = each_value(PREFIX, valid=lambda *case: case in sample())


@pytest.mark.parametrize(("bias", "processor", "implementation", "kind"), every_case(PREFIX, PREFIX_QUICK))
def test_a_prefix_of_the_input_gives_a_prefix_of_the_output(bias, processor, implementation, kind):
    """f(x[:t]) = f(x)[:t] at true lengths, and the last row alone against all keys."""
    params, attend = make_layer(bias, processor)
    q, k, v = jax.device_get(make_qkv(kv_heads=KINDS[kind].get("kv_heads")))

    @jax.jit
    def step(q, k, v, q_pos):
        return attend(params, q, k, v, ALL_IMPLEMENTATIONS[implementation], q_pos, window=KINDS[kind].get("window"))

    whole, _ = compiled(bias, processor, implementation, kind)([q, k, v], POS, POS, make_weight(q))
    for t in (2, 7):
        part = jax.device_get(step(q[:, :t], k[:, :t], v[:, :t], POS[:t]))
        chex.assert_trees_all_close(part, whole[:, :t], atol=tolerance(bias))
        assert np.abs(part[:, -1] - whole[:, t]).max() > 1e-3
    chex.assert_trees_all_close(step(q[:, -1:], k, v, POS[-1:]), whole[:, -1:], atol=tolerance(bias))


def test_a_window_as_long_as_the_input_equals_no_window():
    params, attend = make_layer("kerple", "dape3")
    q, k, v = make_qkv()
    run = jax.jit(lambda window: attend(params, q, k, v, Dense(), window=window), static_argnums=0)
    wide, none, narrow = (run(window) for window in (LENGTH, None, LENGTH - 1))
    chex.assert_trees_all_equal(wide, none)
    assert np.abs(narrow - none).max() > 1e-4


def test_the_mask_agrees_with_its_docstring():
    drawn = [line.split()[2:7] for line in Mask.__doc__.splitlines() if line.strip().startswith("q ")]
    seen = np.array([[mark == "x" for mark in row] for row in drawn])
    assert seen.shape == (5, 5)
    pos = jnp.arange(5)
    chex.assert_trees_all_equal(np.asarray(Mask(True, 3).visible(pos, pos)), seen)
    chex.assert_trees_all_equal(np.asarray(Mask(False, 3).visible(pos, pos)), seen | seen.T)


BIDIRECTIONAL = ([bias for bias in ALL_BIASES if bias != "cope"], ("none", "dape3", "causal2", "of_scores"), KINDS)


@pytest.mark.parametrize(("bias", "processor", "kind"), every_case(BIDIRECTIONAL, each_value(BIDIRECTIONAL)))
def test_bidirectional_rows_depend_on_both_sides(bias, processor, kind):
    """Not causal: every row depends on every key within the window; blockwise = dense."""
    dense, blockwise = (compiled(bias, processor, name, kind, causal=False) for name in ("dense", "blockwise"))
    qkv = make_qkv(kv_heads=KINDS[kind].get("kv_heads"))
    weight = make_weight(qkv[0])
    expected = dense(qkv, POS, POS, weight)
    close = {"atol": 10 * tolerance(bias), "rtol": 10 * tolerance(bias)}
    chex.assert_trees_all_close(blockwise(qkv, POS, POS, weight), expected, **close)
    sees_TS = np.asarray(jax.jit(Mask(False, KINDS[kind].get("window")).visible)(POS, POS))
    for row in range(LENGTH):
        _, (_, (_, _, grad)) = dense(qkv, POS, POS, np.where((POS == row)[None, :, None, None], weight, 0))
        np.testing.assert_array_equal(np.abs(grad).max((0, 2, 3)) > 0, sees_TS[row])


def test_cope_is_causal():
    params, attend = make_layer("cope", "none")
    with pytest.raises(InputError, match=r"cope.*causal"):
        attend(params, *make_qkv(5), Dense(), causal=False)


@pytest.mark.parametrize("width", range(1, 12))
@pytest.mark.parametrize("alignment", ["centered", "causal"])
def test_columns_that_a_convolution_reads(width, alignment):
    """Two convolutions: centered, 2 (W//2) columns on either side; causal, 2 (W - 1) columns to the left."""
    if alignment == "centered" and width % 2 == 0:
        with pytest.raises(InputError, match=rf"{width}.*odd"):
            DapeConfig(kernel_width=width, alignment=alignment)
        return
    length, column = 60, 30
    config = DapeConfig(kernel_width=width, channels=7, alignment=alignment)

    @jax.jit
    def process(scores):
        processor = config.build(2, has_bias=False, rngs=nnx.Rngs(0))
        return processor(scores, None, jnp.ones((1, length), bool))

    scores = np.random.default_rng(0).standard_normal((1, 2, 1, length), np.float32)
    moved = np.subtract(process(scores), process(scores + (np.arange(length) == column)))
    left, right = (0, 2 * (width - 1)) if alignment == "causal" else (2 * (width // 2),) * 2
    np.testing.assert_array_equal(
        np.flatnonzero(np.abs(moved).max((0, 1, 2)) > 0), range(column - left, column + right + 1)
    )


@pytest.mark.parametrize("width", [1, 3, 5, 7])
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_the_listing_edge_differs_only_in_the_last_rows(width, implementation):
    """Appending a key changes the last W//2 rows of the paper's listing; all other rows are those of "prefix"."""
    bias = BIASES["alibi"]().build(2, 4, nnx.Rngs(0))
    qkv = make_qkv(13)
    pos, half = jnp.arange(13), width // 2

    def run(edge, implementation):
        processor = DapeConfig(kernel_width=width, channels=5, edge=edge).build(2, rngs=nnx.Rngs(0))
        function = ALL_IMPLEMENTATIONS[implementation]
        return jax.jit(lambda q, k, v: attend_rows(function, q, k, v, pos, pos, ScoreMod(bias, processor)))(*qkv)

    prefix, listing = run("prefix", implementation), run("listing", implementation)
    chex.assert_trees_all_close(prefix[:, : 13 - half], listing[:, : 13 - half], atol=2e-6)
    for row in range(13 - half, 13):
        assert np.abs(prefix[:, row] - listing[:, row]).max() > 1e-4
    if implementation != "dense":
        chex.assert_trees_all_close(listing, run("listing", "dense"), atol=2e-6)
