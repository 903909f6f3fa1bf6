"""Information leak, the paper's experiment (section 4.5, figure 6): without tril, rows read the future.

A centered kernel reads to its right. Row i sees columns up to i, and without tril the convolutions carry the scores of
columns i + 1 .. i + 2 (W//2) into them: numbers that depend on the next token, one per head, which training can use.
"""

import functools
import math

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from helpers import make_qkv
from tiny import SPEC

from dape_jax.config import read_model
from dape_jax.model.attention import Blockwise, Dense, attend
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import model_structure
from dape_jax.sharding import MeshConfig, make_mesh
from dape_jax.training.optimizer import OptimizerConfig, make_optimizer
from dape_jax.training.step import Training, TrainState, init_state, make_nll_step, make_train_step

pytestmark = pytest.mark.extra

LENGTH = 12
NUM_TOKENS = 16  # drawn uniformly; one more starts every sequence
MODEL = SPEC["model"] | {
    "num_layers": 1,
    "width": 32,
    "num_heads": 16,  # the next token reaches a row as one number per head
    "vocab_size": NUM_TOKENS + 1,
    "processor": {"name": "dape", "kernel_width": 3, "channels": 32},
}  # with Kerple, which initially weights near columns most, those that leak
OPTIMIZER = OptimizerConfig(**SPEC["optimizer"] | {"final_fraction": 0.01, "weight_decay": 0.0})
BATCH_SIZE = 32
NUM_STEPS = 250
IMPLEMENTATIONS = {"dense": Dense(), "blockwise": Blockwise(block_size=4, num_buckets=3)}


def random_tokens(key: jax.Array, batch_size: int) -> dict[str, jax.Array]:
    """Return uniform independent tokens: no token can be predicted from those before it.

    The first input is always the same token, which does not occur again. The output of a row is a weighted mean of
    values: a row that sees only copies of one random token could not express anything.
    """
    tokens_BT = jax.random.randint(key, (batch_size, LENGTH + 1), 0, NUM_TOKENS).at[:, 0].set(NUM_TOKENS)
    return {"inputs": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]}


def fresh_nll(leak: bool, seed: int, batch_size: int = 1000) -> np.ndarray:
    """Train on new tokens in each step, and return the nll [B, T] of every target of new sequences."""
    mesh = make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    config = read_model(MODEL | {"processor": MODEL["processor"] | {"leak": leak}})
    training = Training(config, make_optimizer(OPTIMIZER, NUM_STEPS), mesh, seed=seed)
    (graphdef, _), state, step = model_structure(config), init_state(training), make_train_step(training)

    @jax.jit
    def run(state: TrainState, keys: jax.Array) -> TrainState:
        return jax.lax.scan(lambda state, key: (step(state, random_tokens(key, BATCH_SIZE))[0], None), state, keys)[0]

    with jax.set_mesh(mesh):
        params = run(state, jax.random.split(jax.random.key(seed), NUM_STEPS)).params
        batch = random_tokens(jax.random.fold_in(jax.random.key(seed), 1), batch_size)
        return np.asarray(make_nll_step(graphdef, LENGTH)(params, batch), np.float64)


def lower_bound(nll_nats: np.ndarray) -> float:
    """Return a lower bound of the mean nll of a model that does not see its targets; it fails in 1 of 30,000 cases.

    If the next token is uniform and independent of the inputs, no prediction has an expected nll below ln V. The only
    error of the estimate is then that of sampling: the nlls minus their conditional means are uncorrelated, and over N
    targets their mean has a standard deviation of at most sigma / sqrt(N).
    """
    return math.log(NUM_TOKENS) - 4 * nll_nats.std() / math.sqrt(nll_nats.size)


@pytest.mark.slow
def test_without_tril_random_tokens_are_predicted_and_with_it_they_are_not():
    """With a leak the loss on new random tokens falls far below ln V, at every row that the leak reaches.

    The first row sees one column, so its softmax is always 1, and the target of the last row is not an input: there the
    loss is that of chance. Without a leak, with the same seed, tokens and steps, it is ln V at every row.
    """
    leaking, nll_BT = fresh_nll(leak=True, seed=0), fresh_nll(leak=False, seed=0)
    assert leaking[:, 1:-1].mean() < 0.1
    for nll_B in (leaking[:, 0], leaking[:, -1], *nll_BT.T):
        assert nll_B.mean() >= lower_bound(nll_B)
    assert lower_bound(nll_BT) > math.log(NUM_TOKENS) - 0.02  # the bound is tight
    assert lower_bound(nll_BT) <= nll_BT.mean() < math.log(NUM_TOKENS) + 0.05


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("kernel_width", "alignment", "leak", "reach"),
    [(3, "centered", True, 2), (5, "centered", True, 4), (5, "centered", False, 0), (1, "centered", True, 0)]
    + [(width, "causal", True, 0) for width in (1, 2, 3)],
)
def test_how_far_a_leak_reaches(implementation, kernel_width, alignment, leak, reach):
    """Changing key j affects rows j - 2 (W//2) and later if the kernel is centered and leaks, else rows j and later.

    It changes only the score of key j in the rows before j; no bit of the other rows may change. Without a kernel to
    the right, tril changes no bit: it removes only scores that such a kernel never carries to a visible column.
    """
    q, k, v = make_qkv(14)

    def layer(leak):
        rngs = nnx.Rngs(0)  # the parameters are the same whether it leaks or not
        bias = BIASES["kerple"]().build(2, 4, rngs)
        config = DapeConfig(kernel_width=kernel_width, channels=5, alignment=alignment, leak=leak)
        options = {"bias": bias, "processor": config.build(2, rngs=rngs)}
        return jax.jit(functools.partial(attend, **options, implementation=IMPLEMENTATIONS[implementation]))

    run = layer(leak)
    before = run(q, k, v)
    for j in (8, 10):  # the first row of a block, where a leak must reach the blocks before it, and one inside
        after = run(q, k.at[:, j].add(1.0), v)
        chex.assert_trees_all_equal(after[:, : j - reach], before[:, : j - reach])
        assert np.abs(after - before)[:, j - reach :].max((0, 2, 3)).min() > 1e-5
    if leak and reach == 0:
        without = layer(leak=False)
        chex.assert_trees_all_equal(without(q, k, v), before)
