"""The paper's information-leak experiment (section 4.5, figure 6): it is tril that keeps the future out.

A centered kernel reads to its right. Row i may see columns up to i, and without tril the convolutions carry the scores
of columns i + 1 .. i + 2 (W//2) into them: numbers about the next token, one for each head, that training can read.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from dape_jax.config import read_model
from dape_jax.model.attention import Blockwise, Dense
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig, ScoreMod
from dape_jax.model.transformer import GPT_NEOX, Params, model_structure
from dape_jax.sharding import MeshConfig, make_mesh
from dape_jax.training.optimizer import OptimizerConfig, make_optimizer
from dape_jax.training.step import (
    TrainState,
    init_state,
    make_nll_step,
    make_train_step,
    shardings_of,
)

LENGTH = 12
NUM_TOKENS = 16  # drawn uniformly; one more opens every text
MODEL = {
    "num_layers": 2,
    "width": 32,
    "num_heads": 16,  # the next token reaches a row as one number for each head
    "num_kv_heads": 16,
    "vocab_size": NUM_TOKENS + 1,
    "num_outputs": None,
    **GPT_NEOX,
    "rotary": {"name": "none"},
    "bias": {"name": "kerple"},  # weight on near columns, the ones that the leak reaches, from the start
    "processor": {"name": "dape", "kernel_width": 3, "channels": 32},
    "window": None,
    "attention": {"name": "dense"},
    "remat": "none",
    "dtype": "float32",
}
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2,
    warmup_fraction=0.1,
    final_fraction=0.01,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
    weight_decay=0.0,
    clip_norm=1.0,
)
BATCH_SIZE = 64
NUM_STEPS = 250
IMPLEMENTATIONS = {"dense": Dense(), "blockwise": Blockwise(block_size=4, num_buckets=3)}


def random_text(key: jax.Array, batch_size: int) -> dict[str, jax.Array]:
    """Fresh tokens, uniform and independent: nothing before a token tells of it.

    The first input is always the same token, and none like it follows. What a row can say is how it weighs values that
    differ, and random tokens repeat: a row that sees one token twice, and nothing else, has no way to say anything.
    """
    tokens_BT = jax.random.randint(key, (batch_size, LENGTH + 1), 0, NUM_TOKENS).at[:, 0].set(NUM_TOKENS)
    return {"inputs": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]}


def trained(leak: bool, seed: int, mesh: Mesh) -> tuple[nnx.GraphDef, Params]:
    """The model after `NUM_STEPS` steps, each on tokens that it has never seen."""
    config = read_model(MODEL | {"processor": MODEL["processor"] | {"leak": leak}})
    optimizer = make_optimizer(OPTIMIZER, NUM_STEPS)
    graphdef, _ = model_structure(config)
    state = init_state(config, optimizer, seed, mesh)
    step = make_train_step(graphdef, optimizer, shardings_of(state))

    @jax.jit
    def run(state: TrainState, keys: jax.Array) -> TrainState:
        return jax.lax.scan(lambda state, key: (step(state, random_text(key, BATCH_SIZE))[0], None), state, keys)[0]

    with jax.set_mesh(mesh):
        return graphdef, run(state, jax.random.split(jax.random.key(seed), NUM_STEPS)).params


def fresh_nll(leak: bool, seed: int, batch_size: int = 1000) -> np.ndarray:
    """Train, and return the nll [B, T] of every target of texts that are new again."""
    mesh = make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    graphdef, params = trained(leak, seed, mesh)
    with jax.set_mesh(mesh):
        batch = random_text(jax.random.fold_in(jax.random.key(seed), 1), batch_size)
        return np.asarray(make_nll_step(graphdef, LENGTH)(params, batch), np.float64)


def lower_bound(nll_nats: np.ndarray) -> float:
    """What the mean nll of a model that does not see its target stays above, but for a chance of about 1 in 30000.

    No distribution over the next token has an expected nll below ln V where the token is uniform and independent of all
    that the distribution was made from. So the estimate's only error is that of sampling: the nlls, less their means
    given the text before, are uncorrelated, and over N targets their mean deviates by sigma / sqrt(N) at most.
    """
    return math.log(NUM_TOKENS) - 4 * nll_nats.std() / math.sqrt(nll_nats.size)


@pytest.mark.slow
def test_without_tril_random_tokens_are_predicted():
    """Far below ln V on fresh random tokens, which nothing but a leak can do; and only where there is a leak.

    The first row sees one column, so its softmax is 1 whatever the score, and the last row's target is not among the
    inputs: there the loss is that of a guess.
    """
    nll_BT = fresh_nll(leak=True, seed=0)
    assert nll_BT[:, 1:-1].mean() < 0.1
    for nll_B in (nll_BT[:, 0], nll_BT[:, -1]):
        assert nll_B.mean() >= lower_bound(nll_B)


@pytest.mark.slow
def test_with_tril_random_tokens_stay_random():
    """The same model, seed, tokens and steps: the loss on fresh tokens is ln V, at every row."""
    nll_BT = fresh_nll(leak=False, seed=0)
    assert lower_bound(nll_BT) > math.log(NUM_TOKENS) - 0.02  # a bound that says something
    assert lower_bound(nll_BT) <= nll_BT.mean() < math.log(NUM_TOKENS) + 0.05
    for nll_B in nll_BT.T:
        assert nll_B.mean() >= lower_bound(nll_B)


def attended(qkv: list[jax.Array], implementation: str, **options) -> np.ndarray:
    """One layer of attention; its parameters are the same whether it leaks or not."""
    heads, head_dim = qkv[0].shape[2:]
    rngs, pos_T = nnx.Rngs(0), jnp.arange(qkv[0].shape[1])
    bias = BIASES["kerple"]().build(heads, head_dim, rngs)
    processor = DapeConfig(channels=5, **options).build(heads, rngs=rngs)
    run = IMPLEMENTATIONS[implementation]
    return np.asarray(run(*qkv, pos_T, pos_T, ScoreMod(bias, processor)))


def make_qkv(length: int = 14) -> list[jax.Array]:
    """Queries, keys and values [B, T, H, K]."""
    return [jax.random.normal(key, (2, length, 2, 4)) for key in jax.random.split(jax.random.key(1), 3)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("kernel_width", "alignment", "leak", "reach"),
    [
        (3, "centered", True, 2),
        (5, "centered", True, 4),
        (3, "centered", False, 0),
        (5, "centered", False, 0),
        (1, "centered", True, 0),
        (2, "causal", True, 0),
        (3, "causal", True, 0),
    ],
)
def test_how_far_a_leak_reaches(implementation, kernel_width, alignment, leak, reach):
    """A change of key j reaches the rows from j - 2 (W//2) on if the kernel is centered and leaks, else from j on.

    It touches the score of key j and nothing else of the rows before j; no bit of the rows out of reach may change.
    """
    q, k, v = make_qkv()
    options = {"kernel_width": kernel_width, "alignment": alignment, "leak": leak}
    before = attended([q, k, v], implementation, **options)
    for j in (8, 10):  # the first of a block, where a leak must cross to the blocks before it, and one inside
        after = attended([q, k.at[:, j].add(1.0), v], implementation, **options)
        np.testing.assert_array_equal(after[:, : j - reach], before[:, : j - reach])
        assert np.abs(after - before)[:, j - reach :].max((0, 2, 3)).min() > 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("kernel_width", "alignment"), [(1, "centered"), (1, "causal"), (2, "causal"), (3, "causal")])
def test_without_a_kernel_to_the_right_there_is_nothing_to_leak(implementation, kernel_width, alignment):
    """To the bit: tril takes away only what such a kernel never brings to a visible column."""
    outs = [
        attended(make_qkv(), implementation, kernel_width=kernel_width, alignment=alignment, leak=leak)
        for leak in (False, True)
    ]
    np.testing.assert_array_equal(*outs)
