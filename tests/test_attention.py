"""The invariants of the design, over every bias x processor x implementation that the package has."""

import dataclasses
import itertools
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dape_jax.errors import InputError
from dape_jax.model.attention import Blockwise, Dense, attend, attend_on_mesh
from dape_jax.model.biases import BIASES
from dape_jax.model.contextual import CONTEXTUAL
from dape_jax.model.processors import PROCESSORS, DapeConfig, PlainConfig, ScoreMod, key_convolution
from dape_jax.model.scores import Mask
from dape_jax.sharding import MeshConfig, make_mesh, stripe, unstripe

ALL_BIASES = BIASES | CONTEXTUAL
SMALL_BIAS = {"fire": {"threshold": 6}, "cope": {"num_positions": 4}}  # so that what sets in late sets in here

CENTERED = (1, 3, 5, 11)
CAUSAL = (2, 4)
ALL_PROCESSORS = {name: kind() for name, kind in PROCESSORS.items() if kind is not DapeConfig}
ALL_PROCESSORS |= {f"dape{W}": DapeConfig(kernel_width=W, channels=5) for W in CENTERED}
ALL_PROCESSORS |= {f"causal{W}": DapeConfig(kernel_width=W, channels=5, alignment="causal") for W in CAUSAL}
ALL_PROCESSORS |= {
    "equation2": DapeConfig(kernel_width=3, channels=5, residual=False),
    "of_scores": DapeConfig(kernel_width=3, channels=5, inputs="scores"),
    "of_bias": DapeConfig(kernel_width=3, channels=5, inputs="bias"),
    "identity": DapeConfig(kernel_width=3, channels=5, init="identity"),
}

# Heads of keys and values, and how far a query sees.
KINDS = {"full": {}, "grouped_window": {"kv_heads": 1, "window": 4}}


@dataclasses.dataclass(frozen=True)
class Cached:
    """What generation does: a few rows at a time against a cache whose columns beyond them hold anything."""

    num_rows: int = 3

    def __call__(self, q, k, v, q_pos, k_pos, *score_mod_and_mask):
        start, stop = k.shape[1] - q.shape[1], k.shape[1]
        cache = [
            jnp.concatenate([x[:, :start], 7 * make_qkv(q.shape[1] + 3, *x.shape[:1], *x.shape[2:])[0]], 1)
            for x in (k, v)
        ]
        outs = []
        for row in range(start, stop, self.num_rows):
            some = slice(row, min(row + self.num_rows, stop))
            cache = [c.at[:, some].set(x[:, some]) for c, x in zip(cache, (k, v), strict=True)]
            rows = slice(some.start - start, some.stop - start)
            outs.append(Dense()(q[:, rows], *cache, q_pos[rows], jnp.arange(stop + 3), *score_mod_and_mask))
        return jnp.concatenate(outs, axis=1)


# Several blocks and buckets at the lengths used here. The kernels, and what chooses: `test_kernels.py`.
PORTABLE = {"dense": Dense(), "blockwise": Blockwise(block_size=4, num_buckets=3)}
IMPLEMENTED = PORTABLE | {"cached": Cached()}


def fits(bias: str, processor: str, *others: str) -> bool:
    """Nothing reads a bias that is not there; windows and grouped heads are the same for every kernel."""
    if "grouped_window" in others and processor not in ("none", "dape3", "dape5", "causal2"):
        return False
    return not (bias == "nope" and processor == "of_bias")


def covers(bias: str, processor: str, *others: str) -> bool:
    """A part of the product that has every bias, every kind and every option of a processor: what `make test` runs.

    Wider kernels have no code of their own (`test_what_a_column_reads` has them all). Cached attention is `attend` on
    rows, one call after the other; that it agrees with the others is among this part.
    """
    if "cached" in others:
        return False
    if "grouped_window" in others:
        return (bias, processor) in {("kerple", "dape3"), ("cope", "causal2"), ("t5", "none"), ("nope", "dape5")}
    with_kerple = {"none", "dape5", "causal2", "equation2", "of_bias"}
    return (
        processor == "dape3" or (bias == "kerple" and processor in with_kerple) or (bias, processor) == ("cope", "none")
    )


def has_turn(*case: str) -> bool:
    """Of a bias, a processor and a kind, one driver after the other has its turn; of two things alone, all do."""
    if len(case) == 2:
        return True
    axes = (ALL_BIASES, ALL_PROCESSORS, IMPLEMENTED, KINDS)
    return sum(list(axis).index(value) for axis, value in zip(axes, case, strict=True)) % len(IMPLEMENTED) == 0


def product(*names) -> list:
    """Bias x processor, and x driver x kind if these are named; all but a covering part is left to the slow tests.

    A driver hands rows and columns to whatever bias and processor it is given, so of all four axes any two values meet
    (`test_any_two_meet`), but not any three; every bias meets every processor, of either kind. The covering part has
    all its drivers. What is left out is drawn from by `test_any_combination`.
    """
    return [
        pytest.param(*case, marks=() if covers(*case) else pytest.mark.slow)
        for case in itertools.product(ALL_BIASES, ALL_PROCESSORS, *names)
        if fits(*case) and (has_turn(*case) or covers(*case))
    ]


def test_any_two_meet():
    """Each two values, of two axes, that fit at all are in a case of the product."""

    def pairs(cases) -> set:
        return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}

    every = itertools.product(ALL_BIASES, ALL_PROCESSORS, IMPLEMENTED, KINDS)
    taken = [case.values for case in product(IMPLEMENTED, KINDS)]
    assert pairs(taken) == pairs(case for case in every if fits(*case))
    assert {case[:2] + case[3:] for case in taken} == {
        (bias, processor, kind)
        for bias, processor, kind in itertools.product(ALL_BIASES, ALL_PROCESSORS, KINDS)
        if fits(bias, processor, kind)
    }


# The part of the product that `make test` runs in bfloat16.
BFLOAT16 = {("kerple", "dape3"), ("fire", "dape3"), ("nope", "dape3"), ("cope", "none"), ("kerple", "causal2")}


def make_layer(bias: str, processor: str, heads: int = 2, head_dim: int = 4, seed: int = 0, dtype=jnp.float32):
    """A bias and a processor with random parameters, as one pytree of parameters and a function of it."""
    rngs = nnx.Rngs(seed)
    layer = nnx.Dict(
        bias=ALL_BIASES[bias](**SMALL_BIAS.get(bias, {})).build(heads, head_dim, rngs),
        processor=ALL_PROCESSORS[processor].build(heads, has_bias=bias != "nope", dtype=dtype, rngs=rngs),
    )
    graphdef, params = nnx.split(layer, nnx.Param)
    # What starts at 0 would hide what is made of it.
    params = jax.tree.map(
        lambda p: p if p.any() else 0.3 * jax.random.normal(jax.random.key(p.size), p.shape), nnx.to_pure_dict(params)
    )

    def run(params, q, k, v, implementation, q_pos=None, k_pos=None, **options):
        layer = nnx.merge(graphdef, params)
        k_pos = jnp.arange(k.shape[1]) if k_pos is None else k_pos
        q_pos = k_pos if q_pos is None else q_pos
        score_mod = ScoreMod(layer.bias, layer.processor)
        return implementation(q, k, v, q_pos, k_pos, score_mod, Mask(**options))

    return params, run


def make_qkv(
    length: int, batch: int = 2, heads: int = 2, head_dim: int = 4, seed: int = 1, kv_heads: int | None = None
):
    shapes = [(batch, length, h, head_dim) for h in (heads, kv_heads or heads, kv_heads or heads)]
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def tolerance(bias: str) -> float:
    """Rounding of the scores: a few float32 units of the largest, and Sandwich's bias is d / 2r = 32 at distance 0."""
    return 2e-5 if bias == "sandwich" else 2e-6


@pytest.mark.parametrize(("bias", "processor", "implementation", "kind"), product(IMPLEMENTED, KINDS))
def test_the_future_changes_nothing(bias, processor, implementation, kind):
    """Keys, values and queries after t: no bit of the rows up to t depends on them, and the gradient is exactly 0."""
    options = dict(KINDS[kind])
    kv_heads = options.pop("kv_heads", None)
    params, run = make_layer(bias, processor)
    length, t = 11, 6
    qkv, other = make_qkv(length, kv_heads=kv_heads), make_qkv(length, seed=2, kv_heads=kv_heads)
    changed = [jnp.concatenate([x[:, : t + 1], y[:, t + 1 :]], axis=1) for x, y in zip(qkv, other, strict=True)]
    weight = jax.random.normal(jax.random.key(3), qkv[0][:, : t + 1].shape)

    def rows(qkv):
        out = run(params, *qkv, IMPLEMENTED[implementation], **options)
        return (out[:, : t + 1] * weight).sum(), out

    step = jax.jit(jax.grad(rows, has_aux=True))
    (grads, before), (_, after) = step(qkv), step(changed)
    np.testing.assert_array_equal(before[:, : t + 1], after[:, : t + 1])
    assert np.abs(before[:, t + 1 :] - after[:, t + 1 :]).max() > 1e-3
    for grad in grads:
        np.testing.assert_array_equal(grad[:, t + 1 :], 0)
        assert np.abs(grad[:, 1 : t + 1]).max() > 1e-4


@pytest.mark.parametrize(("bias", "processor", "implementation", "kind"), product(IMPLEMENTED, KINDS))
def test_rows_do_not_depend_on_what_is_to_their_right(bias, processor, implementation, kind):
    """Prefix invariance: f(x[:t]) = f(x)[:t], and for single rows against all keys."""
    options = dict(KINDS[kind])
    params, run = make_layer(bias, processor)
    length = 9
    q, k, v = make_qkv(length, kv_heads=options.pop("kv_heads", None))
    implementation, close = IMPLEMENTED[implementation], {"atol": tolerance(bias)}
    step = jax.jit(lambda q, k, v, q_pos: run(params, q, k, v, implementation, q_pos=q_pos, **options))
    whole = step(q, k, v, jnp.arange(length))
    for t in (2, 7):
        part = step(q[:, :t], k[:, :t], v[:, :t], jnp.arange(t))
        np.testing.assert_allclose(part, whole[:, :t], **close)
    last = step(q[:, -1:], k, v, jnp.array([length - 1]))
    np.testing.assert_allclose(last, whole[:, -1:], **close)


@pytest.mark.parametrize(("bias", "processor"), product())
def test_implementations_agree(bias, processor):
    """Dense = every other, forward and all gradients, at any size, any number of key heads and any window.

    Each method has sizes of its own, one token among them: it is programs that take time, and every method is one.
    """
    draw = random.Random(f"{bias} {processor}")
    length = draw.randint(1, 23)
    batch, kv_heads, group = (draw.randint(1, 2) for _ in range(3))
    head_dim = draw.choice([2, 4])
    window = draw.choice([None, draw.randint(1, 25)])
    heads = kv_heads * group
    params, run = make_layer(bias, processor, heads, head_dim)
    qkv = make_qkv(length, batch, heads, head_dim, kv_heads=kv_heads)
    weight = jax.random.normal(jax.random.key(3), qkv[0].shape)
    implementations = [
        Blockwise(block_size=draw.randint(1, 15), num_buckets=draw.randint(1, 6)),
        Cached(num_rows=draw.randint(3, 15)),
    ]

    def value_and_grads(implementation):
        def loss(params, qkv):
            return (run(params, *qkv, implementation, window=window) * weight).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, qkv)

    expected = value_and_grads(Dense())
    for implementation in implementations:
        close = {"atol": 10 * tolerance(bias), "rtol": 10 * tolerance(bias)}
        chex.assert_trees_all_close(value_and_grads(implementation), expected, **close)


@pytest.mark.parametrize(
    ("bias", "processor"),
    [
        pytest.param(
            *case.values, marks=() if case.values in {*BFLOAT16, ("transformer_xl", "dape3")} else pytest.mark.slow
        )
        # Every bias with and without a kernel; of the biases, one of each kind with the options.
        for case in product()
        if case.values[1] in ("none", "dape3")
        or (
            case.values[0] in ("kerple", "cope", "transformer_xl")
            and case.values[1] in ("dape5", "causal2", "equation2", "of_bias")
        )
    ],
)
def test_rows_over_devices_agree(bias, processor):
    """Rows dealt over context and tensor, heads whole: dense on one device, forward and all gradients."""
    params, run = make_layer(bias, processor, heads=4)
    qkv = make_qkv(24, heads=4, kv_heads=2)
    weight = jax.random.normal(jax.random.key(3), qkv[0].shape)

    def on_mesh(q, k, v, q_pos, k_pos, *score_mod_and_mask):
        q, k, v = (stripe(x, 1) for x in (q, k, v))
        out = attend_on_mesh(Blockwise(4, 3), q, k, v, stripe(q_pos, 0), *score_mod_and_mask)
        return unstripe(out, 1)

    def value_and_grads(implementation):
        def loss(params, qkv):
            return (run(params, *qkv, implementation) * weight).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, qkv)

    expected = jax.device_get(value_and_grads(Dense()))
    with jax.set_mesh(make_mesh(MeshConfig(1, 1, 2, 2), jax.devices()[:4])):
        found = jax.device_get(value_and_grads(on_mesh))
    chex.assert_trees_all_close(found, expected, atol=10 * tolerance(bias), rtol=10 * tolerance(bias))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_combination(data):
    """Any method, sizes, window, driver and place: the future is nothing, a prefix is enough, drivers agree."""
    bias, processor = data.draw(
        st.sampled_from([pair for pair in itertools.product(ALL_BIASES, ALL_PROCESSORS) if fits(*pair)]), "method"
    )
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
    params, run = make_layer(bias, processor, heads, 4)
    qkv, other = (make_qkv(length, batch, heads, 4, seed, kv_heads) for seed in (1, 2))
    changed = [jnp.concatenate([x[:, :t], y[:, t:]], axis=1) for x, y in zip(qkv, other, strict=True)]
    step = jax.jit(lambda qkv: run(params, *qkv, implementation, window=window))
    whole = step(qkv)
    np.testing.assert_array_equal(step(changed)[:, :t], whole[:, :t])
    dense = jax.jit(lambda qkv: run(params, *qkv, Dense(), window=window))
    np.testing.assert_allclose(dense(qkv), whole, atol=tolerance(bias))
    np.testing.assert_allclose(step([x[:, :t] for x in qkv]), whole[:, :t], atol=tolerance(bias))


@pytest.mark.parametrize(("bias", "processor"), product())
def test_any_rows_give_the_same(bias, processor):
    """`attend` on rows in any order is the same as taking those rows from the whole."""
    params, run = make_layer(bias, processor)
    q, k, v = make_qkv(10)
    rows = jnp.array([7, 0, 3, 3, 9])
    whole = jax.jit(lambda: run(params, q, k, v, Dense(), window=7))()
    for implementation in (Dense(), Blockwise(block_size=2, num_buckets=1)):
        some = jax.jit(lambda i=implementation: run(params, q[:, rows], k, v, i, rows, jnp.arange(10), window=7))()
        np.testing.assert_allclose(some, whole[:, rows], atol=tolerance(bias))


@pytest.mark.parametrize(
    ("bias", "processor"),
    [
        pytest.param(*case.values, marks=() if case.values in BFLOAT16 else pytest.mark.slow)
        for case in product()
        if case.values[1] in ("none", "dape3", "causal2", "of_bias")
    ],
)
def test_bfloat16_is_near_float32(bias, processor, monkeypatch):
    """Inputs and convolutions in bfloat16: values, and all gradients together.

    For the gradients the LeakyReLU is made smooth: rounding may carry a hidden feature that is almost 0 over its kink,
    and in a layer as small as this one that feature alone can be several per cent of the gradient. The gradient of
    Kerple's power weighs the rounding of the probabilities by dist^2, CoPE's jumps where a position passes an integer,
    and Sandwich's bias is 32 at distance 0, so that features made of it are rounded by 0.1 before Conv2.
    """
    qkv = make_qkv(16)
    weight = jax.random.normal(jax.random.key(3), qkv[0].shape)

    def value(params, qkv, run, dtype):
        out = run(params, *[x.astype(dtype) for x in qkv], Dense())
        assert out.dtype == dtype
        return out.astype(jnp.float32)

    def gradient(params, qkv, *options):
        grads = jax.grad(lambda *of: (value(*of, *options) * weight).sum(), (0, 1))(params, qkv)
        return jnp.concatenate([grad.reshape(-1) for grad in jax.tree.leaves(grads)])

    def full_and_half(what):
        for dtype in (jnp.float32, jnp.bfloat16):
            params, run = make_layer(bias, processor, dtype=dtype)
            yield jax.jit(lambda *of, options=(run, dtype): what(*of, *options))(params, qkv)

    full, half = full_and_half(value)
    np.testing.assert_allclose(half, full, atol=0.06)
    assert not np.array_equal(half, full)
    monkeypatch.setattr(jax.nn, "leaky_relu", lambda x, _: 0.5 * x + 0.49 * jnp.sqrt(x * x + 1))
    full, half = full_and_half(gradient)
    allowed = 0.03 if bias in ("kerple_power", "cope", "sandwich") else 0.01
    assert jnp.linalg.norm(half - full) < allowed * jnp.linalg.norm(full)


@pytest.mark.parametrize("processor", ["none", "dape5", "causal2"])
@pytest.mark.parametrize("bias", ["nope", "transformer_xl"])
@pytest.mark.parametrize("implementation", IMPLEMENTED)
def test_a_window_hides_what_is_before_it(bias, processor, implementation):
    """No bit of a row depends on keys that are `window` or more before it."""
    params, run = make_layer(bias, processor)
    q, k, v = make_qkv(13)
    window, t = 4, 5
    step = jax.jit(lambda k, v: run(params, q, k, v, IMPLEMENTED[implementation], window=window))
    before, after = step(k, v), step(k.at[:, : t + 1].add(1), v.at[:, : t + 1].add(1))
    np.testing.assert_array_equal(before[:, t + window :], after[:, t + window :])
    assert np.abs(before[:, t + window - 1] - after[:, t + window - 1]).max() > 1e-3
    wide = run(params, q, k, v, IMPLEMENTED[implementation], window=13)
    np.testing.assert_allclose(wide, run(params, q, k, v, Dense()), atol=2e-6)


def test_a_window_is_what_its_picture_shows():
    drawn = ["x . . . .", "x x . . .", "x x x . .", ". x x x .", ". . x x x"]
    seen = np.array([[mark == "x" for mark in row.split()] for row in drawn])
    np.testing.assert_array_equal(Mask(True, 3).visible(jnp.arange(5), jnp.arange(5)), seen)
    np.testing.assert_array_equal(Mask(False, 3).visible(jnp.arange(5), jnp.arange(5)), seen | seen.T)


@pytest.mark.parametrize("bias", ["kerple", "cope", "transformer_xl"])
@pytest.mark.parametrize("implementation", PORTABLE)
def test_grouped_heads_are_shared_heads(bias, implementation):
    """Two key heads for six query heads: the same as each of the two written down three times, gradients summed."""
    params, run = make_layer(bias, "dape3", heads=6)
    q, k, v = make_qkv(9, heads=6, kv_heads=2)
    weight = jax.random.normal(jax.random.key(3), q.shape)

    def loss(k, v, repeats):
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
        return (run(params, q, k, v, IMPLEMENTED[implementation]) * weight).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    chex.assert_trees_all_close(step(k, v, 1), step(k, v, 3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("bias", "processor", "window"),
    [
        # The methods have the window by turns: every bias and every processor is met with it and without.
        pytest.param(b, p, (None, 4)[(i + j) % 2], marks=() if p == "dape3" or b == "kerple" else pytest.mark.slow)
        for (i, b), (j, p) in itertools.product(
            enumerate(bias for bias in ALL_BIASES if bias != "cope"),
            enumerate(("none", "dape3", "causal2", "of_scores")),
        )
    ],
)
def test_bidirectional_attention(bias, processor, window):
    """Every row depends on every key, with a window on those within it; blockwise = dense."""
    params, run = make_layer(bias, processor)
    qkv = make_qkv(11)
    weight = jax.random.normal(jax.random.key(3), qkv[0].shape)

    def value_and_grads(implementation):
        def loss(params, qkv):
            return (run(params, *qkv, implementation, causal=False, window=window) * weight).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, qkv)

    close = {"atol": 10 * tolerance(bias), "rtol": 10 * tolerance(bias)}
    chex.assert_trees_all_close(value_and_grads(Blockwise(4, 3)), value_and_grads(Dense()), **close)

    def rows(v):
        return run(params, *qkv[:2], v, Dense(), causal=False, window=window).sum((0, 2, 3))

    sees = np.abs(jax.jit(jax.jacobian(rows))(qkv[2])).sum((1, 3, 4)) > 0
    np.testing.assert_array_equal(sees, Mask(False, window).visible(jnp.arange(11), jnp.arange(11)))


@pytest.mark.parametrize("bias", BIASES)
def test_bidirectional_biases_are_of_the_distance(bias):
    """b(i, j) = b(j, i), and where the key is not after the query it is the causal bias."""
    layer = BIASES[bias](**SMALL_BIAS.get(bias, {})).build(3, 4, nnx.Rngs(0))
    if layer is None:
        return
    pos = jnp.arange(20)
    both, causal = layer(pos, pos, causal=False), layer(pos, pos)
    np.testing.assert_allclose(both, both.swapaxes(1, 2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.tril(both), np.tril(causal), rtol=1e-6)


def test_cope_is_causal():
    params, run = make_layer("cope", "none")
    with pytest.raises(InputError, match=r"cope.*causal"):
        run(params, *make_qkv(5), Dense(), causal=False)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "options",
    [{"edge": "listing"}, {"leak": True}, {"leak": True, "edge": "listing"}, {"leak": True, "alignment": "causal"}],
    ids=str,
)
@pytest.mark.parametrize("width", [1, 3, 7])
def test_blocks_leave_in_what_a_row_reads(width, options, window):
    """The options that are no good for a cache read keys beside a row's own: blockwise keeps them (`key_halo`)."""
    processor = DapeConfig(kernel_width=width, channels=5, **options).build(2, rngs=nnx.Rngs(0))
    bias = BIASES["kerple"]().build(2, 4, nnx.Rngs(0))
    q, k, v = make_qkv(29)
    pos = jnp.arange(29)
    whole, blocks = (
        implementation(q, k, v, pos, pos, ScoreMod(bias, processor), Mask(window=window))
        for implementation in (Dense(), Blockwise(block_size=4, num_buckets=5))
    )
    np.testing.assert_allclose(blocks, whole, atol=2e-6)


@pytest.mark.parametrize(("bias", "processor"), [("kerple", "dape3"), ("t5", "none"), ("cope", "causal2")])
def test_a_batch_is_its_sequences(bias, processor):
    """Each for itself gives the same values; parameters that all share have the sum of the gradients of each."""
    params, run = make_layer(bias, processor)
    qkv = make_qkv(9, batch=3)
    weight = jax.random.normal(jax.random.key(3), qkv[0].shape)

    @jax.jit
    def value_and_grads(qkv, weight):
        def loss(params, qkv):
            out = run(params, *qkv, Blockwise(block_size=4, num_buckets=2))
            return (out * weight).sum(), out

        (of_params, of_qkv), out = jax.grad(loss, (0, 1), has_aux=True)(params, qkv)
        return of_params, (of_qkv, out)

    shared, own = value_and_grads(qkv, weight)
    each = [value_and_grads([x[b : b + 1] for x in qkv], weight[b : b + 1]) for b in range(3)]
    close = {"atol": 10 * tolerance(bias), "rtol": 10 * tolerance(bias)}
    chex.assert_trees_all_close(shared, jax.tree.map(lambda *x: sum(x), *(of_params for of_params, _ in each)), **close)
    chex.assert_trees_all_close(
        own, jax.tree.map(lambda *x: jnp.concatenate(x), *(of_own for _, of_own in each)), **close
    )


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 7), st.integers(0, 6), st.integers(0, 6), st.integers(1, 9), st.sampled_from(["float32", "bfloat16"])
)
def test_matmuls_and_convolution_agree(monkeypatch, width, left, right, columns, dtype):
    """What a TPU computes with matmuls is what all others compute with a convolution, gradients too."""
    left, right = min(left, width - 1), min(right, width - 1)
    columns = max(columns, width)
    x, kernel, dy = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(2, 3, columns, 4), (width, 4, 5), (2, 3, columns + left + right - width + 1, 5)])
    )
    x, kernel = x.astype(dtype), kernel.astype(dtype)

    def value_and_grads(platform):
        monkeypatch.setattr("dape_jax.model.processors.device_platform", lambda: platform)
        y, pullback = jax.vjp(lambda x, kernel: key_convolution(x, kernel, left, right), x, kernel)
        return y, *pullback(dy)

    found, expected = (value_and_grads(platform) for platform in ("tpu", "cpu"))
    assert [y.dtype for y in found] == [jnp.float32, dtype, dtype]
    chex.assert_trees_all_close(found, expected, atol=1e-5 if dtype == "float32" else 0.1, rtol=1e-5)


@pytest.mark.parametrize("width", range(1, 12))
@pytest.mark.parametrize("alignment", ["centered", "causal"])
def test_what_a_column_reads(width, alignment):
    """Two convolutions: centered, 2 (W//2) columns to either side; causal, 2 (W - 1) columns to the left."""
    if alignment == "centered" and width % 2 == 0:
        with pytest.raises(InputError, match=rf"{width}.*odd"):
            DapeConfig(kernel_width=width, alignment=alignment)
        return
    length, column = 60, 30
    processor = DapeConfig(kernel_width=width, channels=7, alignment=alignment).build(
        2, has_bias=False, rngs=nnx.Rngs(0)
    )
    scores = jax.random.normal(jax.random.key(0), (1, 2, 1, length))
    mask = jnp.ones((1, length), bool)
    moved = processor(scores, None, mask) - processor(scores.at[..., column].add(1), None, mask)
    left, right = (0, 2 * (width - 1)) if alignment == "causal" else (2 * (width // 2),) * 2
    np.testing.assert_array_equal(
        np.flatnonzero(np.abs(moved).max((0, 1, 2)) > 0), range(column - left, column + right + 1)
    )


def test_what_the_convolution_reads_and_what_stands_beside_it():
    """inputs="scores" does not read B, inputs="bias" does not read A, and without the residual B is not added."""
    scores, other = jax.random.normal(jax.random.key(0), (2, 3, 2, 5, 5))
    bias, other_bias = jax.random.normal(jax.random.key(1), (2, 1, 2, 5, 5))
    mask = jnp.tril(jnp.ones((5, 5), bool))

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
        added(scores, bias) - added(scores, bias, residual=False), jnp.tile(bias, (3, 1, 1, 1)), **close
    )


@pytest.mark.parametrize("bias", ALL_BIASES)
def test_identity_starts_as_the_base(bias):
    """With init="identity" not a bit differs from plain attention, and the second convolution has a gradient."""
    layer = ALL_BIASES[bias](**SMALL_BIAS.get(bias, {})).build(2, 4, nnx.Rngs(0))
    processor = DapeConfig(channels=5, init="identity").build(2, has_bias=layer is not None, rngs=nnx.Rngs(0))
    q, k, v = make_qkv(9)
    pos = jnp.arange(9)

    @jax.jit
    def run(processor):
        return attend(q, k, v, pos, pos, bias=layer, processor=processor)

    np.testing.assert_array_equal(
        run(processor), run(PlainConfig().build(2, has_bias=layer is not None, rngs=nnx.Rngs(0)))
    )
    weight = jax.random.normal(jax.random.key(3), q.shape)
    grads = nnx.to_pure_dict(nnx.state(nnx.grad(lambda processor: (run(processor) * weight).sum())(processor)))
    assert np.abs(grads["output_WCH"]).max() > 1e-3
    np.testing.assert_array_equal(grads["scores_WHC"], 0)  # it is read through a kernel that is still 0


@pytest.mark.parametrize("width", [1, 3, 5, 7])
@pytest.mark.parametrize("implementation", PORTABLE)
def test_listing_edge_differs_from_prefix_edge_in_the_last_rows_alone(width, implementation):
    """The paper's listing changes its last W//2 rows when a key is appended; that is all that sets it apart."""
    half = width // 2
    length = 13
    layers = {}
    for edge in ("prefix", "listing"):
        layers[edge] = DapeConfig(kernel_width=width, channels=5, edge=edge).build(2, rngs=nnx.Rngs(0))
    bias = BIASES["alibi"]().build(2, 4, nnx.Rngs(0))
    q, k, v = make_qkv(length)
    pos = jnp.arange(length)
    prefix, listing = (
        IMPLEMENTED[implementation](q, k, v, pos, pos, ScoreMod(bias, layers[edge])) for edge in ("prefix", "listing")
    )
    np.testing.assert_allclose(prefix[:, : length - half], listing[:, : length - half], atol=2e-6)
    for row in range(length - half, length):
        assert np.abs(prefix[:, row] - listing[:, row]).max() > 1e-4
    dense_listing = attend(q, k, v, pos, pos, bias=bias, processor=layers["listing"])
    np.testing.assert_allclose(listing, dense_listing, atol=2e-6)


@pytest.mark.parametrize("bias", ALL_BIASES)
def test_biases_are_functions_of_positions_alone(bias):
    """No length and no offset in the arrays: a corner of a large bias is the small bias, far away too."""
    layer = ALL_BIASES[bias]().build(2, 4, nnx.Rngs(0))
    if bias in BIASES and layer is not None:
        q_pos, k_pos = jnp.array([1000, 3, 5]), jnp.array([0, 2, 3, 999])
        whole = layer(jnp.arange(1001), jnp.arange(1001))
        np.testing.assert_allclose(layer(q_pos, k_pos), whole[:, q_pos][:, :, k_pos], rtol=1e-5, atol=1e-5)
    if bias not in ("nope", "fire"):  # FIRE's norm is of the position itself
        params, run = make_layer(bias, "dape3")
        qkv, pos = make_qkv(9), jnp.arange(9)
        near, far = (run(params, *qkv, Dense(), q_pos=pos + start, k_pos=pos + start) for start in (0, 100_000))
        np.testing.assert_allclose(near, far, atol=tolerance(bias))


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


def test_a_window_bounds_what_a_block_reads():
    """With a window, temporary memory grows by queries, keys, values and results laid out in blocks, and no more."""

    def temporary_bytes(length, window):
        params, run = make_layer("kerple", "dape3", heads=4, head_dim=16)
        qkv = make_qkv(length, batch=1, heads=4, head_dim=16)
        forward = jax.jit(lambda params, qkv: run(params, *qkv, Blockwise(32, 2), window=window))
        return forward.lower(params, qkv).compile().memory_analysis().temp_size_in_bytes / (qkv[0].nbytes / length)

    windowed, whole = (temporary_bytes(4096, window) - temporary_bytes(2048, window) for window in (128, None))
    assert windowed < 4.1 * 2048  # in rows of queries
    assert whole > 4 * windowed


@pytest.mark.parametrize(
    ("make", "words"),
    [
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
        (lambda: attend(*make_qkv(3, heads=3, kv_heads=2), *[jnp.arange(3)] * 2), ["num_kv_heads", "2", "3"]),
        (lambda: attend(*make_qkv(3), *[jnp.arange(3)] * 2, window=0), ["window", "0", "None"]),
        (lambda: Blockwise(block_size=0), ["model.attention.block_size", "0"]),
        (lambda: BIASES["fire"](activation="tanh"), ["model.bias.activation", "tanh", "relu"]),
        (lambda: BIASES["t5"](num_buckets=32, max_distance=8), ["model.bias.max_distance", "8"]),
    ],
)
def test_bad_options_are_named(make, words):
    with pytest.raises(InputError) as error:
        make()
    assert all(word in str(error.value) for word in words)
