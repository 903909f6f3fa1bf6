"""Many devices are one device: every mesh axis, alone and mixed, on eight simulated devices."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from dape_jax.attention import Blockwise, Dense, attend, attend_on_mesh
from dape_jax.config import RunConfig, choose
from dape_jax.errors import InputError, NonFiniteError
from dape_jax.sharding import (
    AXES,
    MeshConfig,
    activation_spec,
    axis_sizes,
    batch_part,
    collect_rows,
    deal_rows,
    make_mesh,
    put_batch,
    read_mesh,
)
from dape_jax.training import loop
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import (
    FIRST_SCALE,
    abstract_state,
    init_state,
    make_nll_step,
    make_train_step,
    nll,
    nll_of_features,
    shardings_of,
)
from dape_jax.transformer import model_structure

# (data, fsdp, context, tensor)
MESHES = {"fsdp": (1, 8, 1, 1), "context": (1, 1, 8, 1), "tensor": (2, 1, 1, 4), "mix": (1, 2, 2, 2)}
ONE = make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])

BIASES = ("nope", "kerple", "fire", "cope")
PROCESSORS = ("none", "dape")
# Each bias and each processor on each axis: the rest of the product is slow.
FAST = {("kerple", "dape", mesh) for mesh in MESHES} | {
    ("fire", "none", "mix"),
    ("cope", "dape", "mix"),
    ("nope", "dape", "context"),
}


def make_run(root, bias: str, processor: str, **model) -> RunConfig:
    spec = tiny.spec(root)
    options = {"channels": 4} if processor == "dape" else {}
    spec["model"] |= {"num_heads": 4, "vocab_size": 260, "bias": choose("bias", bias)}
    spec["model"] |= {"processor": choose("processor", processor, **options)}
    spec["model"] |= {"attention": {"name": "blockwise", "block_size": 4, "num_buckets": 2}} | model
    return RunConfig.from_dict(spec)


def three_steps(run: RunConfig, mesh: Mesh, **options):
    """Losses, and the parameters after them; what has gradient 0 in truth stays, so momentum and not Adam."""
    graphdef, _ = model_structure(run.model)
    optimizer = optax.sgd(0.5, momentum=0.9)
    state = init_state(run.model, optimizer, 0, mesh)
    shardings = shardings_of(state)
    step = make_train_step(graphdef, optimizer, shardings, **options)
    losses = []
    with jax.set_mesh(mesh):
        for rows in np.asarray(jax.random.randint(jax.random.key(1), (3, 8, 33), 0, 257)):
            state, metrics = step(state, put_batch({"inputs": rows[:, :-1], "targets": rows[:, 1:]}, mesh))
            losses.append(float(metrics["loss_nats"]))
    assert shardings_of(state) == shardings
    return losses, jax.device_get(state)


@functools.cache
def one_device(root, bias, processor):
    return three_steps(make_run(root, bias, processor), ONE)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("sharding")


@pytest.mark.parametrize(
    ("bias", "processor", "mesh"),
    [
        pytest.param(bias, processor, mesh, marks=() if (bias, processor, mesh) in FAST else pytest.mark.slow)
        for bias in BIASES
        for processor in PROCESSORS
        for mesh in MESHES
    ],
)
def test_eight_devices_are_one(root, bias, processor, mesh):
    """Losses, parameters and momenta (each the sum of every gradient so far) after three steps."""
    expected_losses, expected = one_device(root, bias, processor)
    sizes = MeshConfig(*MESHES[mesh])
    losses, found = three_steps(make_run(root, bias, processor), make_mesh(sizes), unembedded_at_once=16)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    chex.assert_trees_all_close(found.params, expected.params, atol=1e-5)
    chex.assert_trees_all_close(found.opt_state, expected.opt_state, atol=3e-5)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected.opt_state)) > 1e-2


@pytest.mark.parametrize("mesh", ["context", "tensor", "mix"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"num_kv_heads": 4, "attention": {"name": "dense"}, "remat": "full"}], ids=str
)
def test_other_attention_on_every_mesh(root, mesh, options):
    """Windows, dense attention and recomputation, with two parts in a step."""
    run = make_run(root, "kerple", "dape", **options)
    expected_losses, expected = three_steps(run, ONE)
    losses, found = three_steps(run, make_mesh(MeshConfig(*MESHES[mesh])), accumulation_steps=2)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    chex.assert_trees_all_close(found.params, expected.params, atol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_device_computes_its_share(root, mesh):
    """About an eighth of the work and of the activations on each of eight devices, as the compiler plans it."""
    run = make_run(root, "kerple", "dape", width=32, attention={"name": "dense"})
    graphdef, _ = model_structure(run.model)
    optimizer = make_optimizer(run.optimizer, 10)

    def planned(mesh):
        state = abstract_state(run.model, optimizer, mesh)
        rows = np.zeros((16, 256), np.int32)
        with jax.set_mesh(mesh):
            step = make_train_step(graphdef, optimizer, shardings_of(state))
            compiled = step.lower(state, put_batch({"inputs": rows, "targets": rows}, mesh)).compile()
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    flops, memory = planned(make_mesh(MeshConfig(*MESHES[mesh])))
    one_flops, one_memory = planned(ONE)
    assert flops < 1.3 * one_flops / 8
    assert memory < 2 * one_memory / 8
