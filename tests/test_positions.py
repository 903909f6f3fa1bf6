"""Rotary embedding and its variants, and the biases without golden vectors, against their formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import OF_POSITIONS

from dape_jax.model.biases import BIASES, DistanceBias, distances, kerple, kerple_power
from dape_jax.model.positions import STRETCHES, Llama3Rope, NtkAware, PositionInterpolation, Rope, Yarn, stretched

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3, 16), np.float32))


def test_distances_of_later_keys_are_zero_unless_both_sides_are_visible():
    pos = jnp.arange(3)
    np.testing.assert_array_equal(distances(pos[:2], pos), [[0, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(distances(pos[:2], pos, causal=False), [[0, 1, 2], [1, 0, 1]])


def test_kerple_is_its_formula_and_holds_its_parameters():
    """p and a are held at 0.01 or above, and p of the power at 2 or below, with the gradients of the values held."""
    pos, distance = jnp.arange(6), np.tril(np.subtract.outer(np.arange(6), np.arange(6))).astype(float)
    p, a = np.float32([0.5, 3.0, -1.0, 0.005]), np.float32([0.7, 0.2, 0.001, 0.3])
    weight = np.random.default_rng(1).standard_normal((4, 6, 6), np.float32)
    for function, formula, largest in (
        (kerple, lambda p, a: -p * np.log1p(a * distance), np.inf),
        (kerple_power, lambda p, a: -a * distance**p, 2),
    ):

        @jax.jit
        @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
        def grads_and_bias(p, a, function=function):
            bias_HTS = function(distances(pos, pos), p, a)
            return (bias_HTS * weight).sum(), bias_HTS

        held = np.clip(p, 0.01, largest).astype(np.float32), np.maximum(a, 0.01)
        (grads, bias_HTS), (at_held, _) = grads_and_bias(p, a), grads_and_bias(*held)
        np.testing.assert_allclose(bias_HTS, formula(*(x[:, None, None] for x in held)), rtol=1e-5)
        np.testing.assert_allclose(grads, at_held, rtol=1e-5)
        assert np.isfinite(grads).all()
        assert np.all(np.asarray(grads) != 0)


def test_rotation_and_its_derivatives_are_products_with_the_matrix():
    """Values are exact, also of bfloat16 and with dims that are not rotated or scaled; so are gradient and tangent."""
    pos, rope = jnp.arange(5) * 7, Yarn(factor=4.0, fraction=0.5)
    angle_T1m = (pos[:, None] * jnp.asarray(rope.frequencies(8), jnp.float32)[None])[:, None]
    cos, sin = (np.float32(rope.scale) * np.asarray(f(angle_T1m)) for f in (jnp.cos, jnp.sin))
    for dtype in ("float32", "bfloat16"):
        x, weight = X.astype(dtype), X[::-1].astype(dtype)

        def formula(x, sin):
            a, b, rest = np.split(np.asarray(x, np.float32), [4, 8], -1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x.dtype)

        y_BTHK, pullback = jax.vjp(lambda x: rope(x, pos), x)
        np.testing.assert_allclose(y_BTHK.astype(np.float32), formula(x, sin).astype(np.float32), rtol=1e-6, atol=1e-6)
        found = pullback(weight)[0].astype(np.float32)
        np.testing.assert_allclose(found, formula(weight, -sin).astype(np.float32), rtol=1e-6, atol=1e-6)
        tangent = jax.jvp(lambda x: rope(x, pos), (x,), (weight,))[1].astype(np.float32)
        np.testing.assert_allclose(tangent, formula(weight, sin).astype(np.float32), rtol=1e-6, atol=1e-6)


def test_position_interpolation_divides_positions_and_ntk_the_slow_angles():
    pos = jnp.arange(5) * 8
    np.testing.assert_allclose(PositionInterpolation(factor=4.0)(X, pos), Rope()(X, pos // 4), rtol=1e-5, atol=1e-5)
    ratio = NtkAware(factor=4.0).frequencies(16) / Rope().frequencies(16)
    assert ratio[[0, -1]] == pytest.approx([1, 1 / 4])
    assert np.all(np.diff(ratio) < 0)


@pytest.mark.parametrize("name", STRETCHES)
def test_a_factor_of_one_is_rope_and_a_fraction_of_a_head_is_a_smaller_head(name):
    rotary = stretched(Rope(fraction=0.5), name, 64, 16)
    assert rotary.fraction == 0.5
    x, pos = jax.random.normal(jax.random.key(0), (1, 5, 2, 24)), jnp.arange(5) + 3
    found = rotary(x, pos)
    np.testing.assert_array_equal(found[..., 12:], x[..., 12:])
    for same in (STRETCHES[name](), stretched(Rope(), name, 16, 64)):  # a factor of 1
        np.testing.assert_allclose(same(x, pos), Rope()(x, pos), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[..., :12], stretched(Rope(), name, 64, 16)(x[..., :12], pos), rtol=1e-6, atol=1e-6)
    assert np.abs(found - Rope()(x, pos)).max() > 0.1


def test_llama3_divides_slow_angles_and_keeps_fast_ones():
    """Compare with the released code, one angle at a time."""
    original, expected = Rope(500_000.0).frequencies(128), []
    for w in original:
        wavelength = 2 * np.pi / w
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        kept = 1.0 if wavelength < 8192 / 4.0 else 0.0 if wavelength > 8192 / 1.0 else smooth
        expected.append((1 - kept) * w / 8 + kept * w)
    found = Llama3Rope(500_000.0, 8.0, 1.0, 4.0, 8192).frequencies(128)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.any((found / original > 1 / 8) & (found / original < 1))


@pytest.mark.parametrize(("head_dim", "base"), [(2, 100.0), (8, 10_000.0), (64, 100.0), (64, 1e6)])
def test_yarn_agrees_with_the_released_code_at_every_train_length(head_dim, base):
    """Compare also at train lengths at which no angle completes a turn."""

    def released(length: int, factor: float) -> np.ndarray:
        def correction_dim(rotations: float) -> float:
            return head_dim * np.log(length / (rotations * 2 * np.pi)) / (2 * np.log(base))

        low, high = max(np.floor(correction_dim(32)), 0), min(np.ceil(correction_dim(1)), head_dim - 1)
        high += 0.001 if low == high else 0
        unchanged = 1 - np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        powers = base ** (np.arange(0, head_dim, 2) / head_dim)
        return (1 - unchanged) / (factor * powers) + unchanged / powers

    for length in [*range(1, 70), 128, 512, 2048, 4096]:
        found = Yarn(base, 4.0, length).frequencies(head_dim)
        np.testing.assert_allclose(found, released(length, 4.0), rtol=1e-12)
    assert Yarn(factor=8.0).scale == pytest.approx(0.1 * np.log(8) + 1)


def test_sandwich_is_its_formula():
    q_pos, k_pos = jnp.array([70_005, 70_000, 70_003]), jnp.arange(70_000, 70_006)
    distance = np.asarray(q_pos[:, None] - k_pos[None, :], float)
    frequencies = 10_000.0 ** (-2 * np.arange(8) / 16)
    total = np.cos(distance[..., None] * frequencies).sum(-1)
    expected = np.stack([total / (8 * (head + 1) / 3) for head in range(3)])
    sandwich = BIASES["sandwich"](position_dim=16).build(3, 4, nnx.Rngs(0))
    np.testing.assert_allclose(sandwich(q_pos, k_pos), expected, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_fire_at_any_positions_is_a_corner_of_a_large_bias(causal):
    """It depends on the query, too. Of both sides it is symmetric."""
    fire, q_pos, k_pos = BIASES["fire"]().build(3, 4, nnx.Rngs(0)), jnp.array([600, 3, 5]), jnp.arange(0, 599, 9)
    found_HTS, whole_HTS = (fire(*pos, causal=causal) for pos in ((q_pos, k_pos), (jnp.arange(601), jnp.arange(601))))
    np.testing.assert_allclose(found_HTS, whole_HTS[:, q_pos][:, :, k_pos], rtol=1e-5, atol=1e-5)
    assert np.abs(whole_HTS[:, 600, 0] - whole_HTS[:, 600, 600]).max() > 1e-3
    assert np.allclose(whole_HTS, whole_HTS.swapaxes(1, 2), rtol=1e-5, atol=1e-5) != causal


@pytest.mark.parametrize("name", [name for name in OF_POSITIONS if name != "fire"])
def test_distance_biases_are_their_table(name):
    """`of_distance` at any shape, from which the kernels make tables, equals the bias of positions."""
    q_pos, k_pos = jnp.array([500, 3, 41]), jnp.asarray(np.arange(0, 500, 7))
    bias = BIASES[name]().build(3, 4, nnx.Rngs(0))
    assert isinstance(bias, DistanceBias)
    at_distance, atol = jax.jit(bias.of_distance)(jnp.arange(501)), 2e-4 if name == "sandwich" else 1e-6
    for causal in (True, False):
        bias_HTS = np.asarray(bias(q_pos, k_pos, causal=causal))
        assert np.ptp(bias_HTS) > 0.1
        # Sandwich is even in the distance: there is nothing to clip in the future, which causal attention masks.
        seen_TS = np.greater_equal.outer(q_pos, k_pos) | (name != "sandwich" or not causal)
        at_table_HTS = at_distance[:, distances(q_pos, k_pos, causal=causal)]
        np.testing.assert_allclose(bias_HTS[:, seen_TS], at_table_HTS[:, seen_TS], rtol=1e-6, atol=atol)


@pytest.mark.parametrize("name", OF_POSITIONS)
def test_biases_with_parameters_in_16_bits_are_not_rounded(name):
    bias, (q_pos, k_pos) = BIASES[name]().build(3, 4, nnx.Rngs(0)), jnp.array([[257, 501], [0, 3]])
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), bias)
    same = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    np.testing.assert_array_equal(half(q_pos, k_pos), same(q_pos, k_pos))
