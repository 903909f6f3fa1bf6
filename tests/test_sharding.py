"""Sharding: eight simulated devices equal one device, on every mesh axis, alone and combined."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx
from helpers import padded_like
from jax.sharding import Mesh, PartitionSpec

from dape_jax.config import RunConfig, choose
from dape_jax.errors import InputError
from dape_jax.model.attention import Blockwise, Dense, attend, attend_on_mesh
from dape_jax.model.biases import KerpleConfig
from dape_jax.model.positions import Rope
from dape_jax.model.processors import DapeConfig, ScoreMod
from dape_jax.sharding import (
    AXES,
    MeshConfig,
    activation_spec,
    axis_sizes,
    batch_part,
    make_mesh,
    put_batch,
    read_mesh,
    rows_of_part,
    stripe,
    unstripe,
)
from dape_jax.training.step import Training, abstract_state, init_state, make_train_step, shardings_of

# (data, fsdp, context, tensor)
MESHES = {"fsdp": (1, 8, 1, 1), "context": (1, 1, 8, 1), "tensor": (2, 1, 1, 4), "mix": (1, 2, 2, 2)}
ONE = make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])

DENSE = {"name": "dense"}
ARCHITECTURES = {name: options | {"num_kv_heads": 4} for name, options in tiny.ARCHITECTURES.items()}


def make_run(bias: str, processor: str, **model) -> RunConfig:
    spec = tiny.changed(tiny.SPEC, data__path="stdlib", data__cache_dir="data")
    options = {"channels": 4} if processor == "dape" else {}
    spec["model"] |= {"num_heads": 4, "vocab_size": 260, "bias": choose("bias", bias)}
    spec["model"] |= {"processor": choose("processor", processor, **options)}
    spec["model"] |= {"attention": {"name": "blockwise", "block_size": 4, "num_buckets": 2}} | model
    return RunConfig.from_dict(spec)


def random_rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 257, shape, np.int32)


def three_steps(run: RunConfig, mesh: Mesh, **options):
    """Return losses and parameters; with momentum, not Adam, so that parameters with gradient 0 do not change."""
    training = Training(run.model, optax.sgd(0.5, momentum=0.9), mesh, **options)
    state, step = init_state(training), make_train_step(training)
    shardings, losses = shardings_of(state), []
    with jax.set_mesh(mesh):
        for rows in random_rows(3, 8, 33):
            state, metrics = step(state, put_batch({"inputs": rows[:, :-1], "targets": rows[:, 1:]}, mesh))
            losses.append(float(metrics["loss_nats"]))
    assert shardings_of(state) == shardings
    return losses, jax.device_get(state)


@functools.cache
def three_steps_on_one_device(run: RunConfig):
    return three_steps(run, ONE)


def case(bias, processor, mesh, marks=pytest.mark.slow, accumulation_steps=1, **model):
    return pytest.param(bias, processor, mesh, accumulation_steps, model, marks=marks)


@pytest.mark.parametrize(
    ("bias", "processor", "mesh", "accumulation_steps", "model"),
    [
        case("kerple", "dape", "context"),
        case("kerple", "dape", "tensor", pytest.mark.extra),
        case("nope", "none", "fsdp"),
        case("fire", "dape", "mix"),
        case("cope", "none", "context"),
        # Tied embeddings, gates and root-mean-square norms have gradients that are summed over devices, too; layers
        # of two kinds are branches of one program.
        case("kerple", "dape", "mix", (), **ARCHITECTURES["gemma"]),
        case("kerple", "dape", "mix", **ARCHITECTURES["llama"]),
        case("kerple", "dape", "tensor", **ARCHITECTURES["olmo"]),
        case("kerple", "dape", "tensor", **ARCHITECTURES["pythia"]),
        case("kerple", "dape", "mix", **ARCHITECTURES["mixed"]),
        # Windows, dense attention and recomputation, with two parts in a step.
        case("cope", "dape", "mix", pytest.mark.extra, accumulation_steps=2, window=5),
        case("cope", "dape", "tensor", accumulation_steps=2, window=5),
        case("cope", "dape", "context", accumulation_steps=2, attention=DENSE, remat="full"),
    ],
)
def test_eight_devices_are_one(bias, processor, mesh, accumulation_steps, model):
    """Compare losses, parameters and momenta (sums of all gradients so far) after three steps.

    On eight devices the vocabulary is padded, and the padding stays zero.
    """
    run = make_run(bias, processor, **{"vocab_size": 257} | model)
    expected_losses, expected = three_steps_on_one_device(run)
    padded = make_run(bias, processor, **{"vocab_size": 257, "vocab_multiple": 4} | model)
    options = {"logits_chunk_tokens": 16, "accumulation_steps": accumulation_steps}
    losses, found = three_steps(padded, make_mesh(MeshConfig(*MESHES[mesh])), **options)
    expected = padded_like(expected, found)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    chex.assert_trees_all_close(found.params, expected.params, atol=1e-5)
    chex.assert_trees_all_close(found.opt_state, expected.opt_state, atol=3e-5)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected.opt_state)) > 1e-2


@pytest.mark.extra
def test_every_device_computes_its_share():
    """Work and activations on each of eight devices are about an eighth of the total, by the compiler's plan."""
    run = make_run("kerple", "dape", width=32, attention=DENSE)

    def planned(mesh):
        training, rows = Training.of(run, mesh), np.zeros((16, 256), np.int32)
        with jax.set_mesh(mesh):
            step, state = make_train_step(training), abstract_state(training)
            compiled = step.lower(state, put_batch({"inputs": rows, "targets": rows}, mesh)).compile()
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    flops, memory = planned(make_mesh(MeshConfig(*MESHES["mix"])))
    one_flops, one_memory = planned(ONE)
    assert flops < 1.3 * one_flops / 8
    assert memory < 2 * one_memory / 8


def test_state_is_where_the_table_says():
    """Parameters follow the table, moments their parameters, and the state has the planned shardings."""
    run = make_run("kerple", "dape")
    training = Training.of(run, make_mesh(MeshConfig(*MESHES["mix"])))
    made, planned = init_state(training), abstract_state(training)
    assert shardings_of(made) == shardings_of(planned)
    chex.assert_trees_all_equal_shapes_and_dtypes(made, planned)
    moments = made.opt_state[1][0]
    for moment in (moments.mu, moments.nu):
        jax.tree.map(lambda m, p: chex.assert_equal(m.sharding, p.sharding), moment, made.params)
    layers = made.params["layers"]
    for leaf, shape in (  # two layers; V = 260, D = 16, F = 64 and H = 4 in halves
        (layers["mlp"]["up_DF"], (2, 8, 32)),
        (layers["attention"]["query_DHK"], (2, 8, 2, 4)),
        (layers["attention"]["output_HKD"], (2, 2, 4, 8)),
        (layers["attention"]["processor"]["scores_WHC"], (2, 3, 4, 4)),
        (made.params["embedding_VD"], (130, 8)),
    ):
        assert leaf.addressable_shards[0].data.shape == shape


@pytest.mark.parametrize(("num_context", "rows_each", "dim"), [(1, 3, 0), (2, 1, 1), (4, 5, 2), (8, 2, 0)])
def test_striped_rows_are_restored(num_context, rows_each, dim):
    """Striped, device i of n has rows i, n + i, ..; unstriped, the sequence is restored."""
    length = num_context * rows_each
    shape = tuple(length if d == dim else 2 for d in range(3))
    x = np.arange(np.prod(shape)).reshape(shape)

    with jax.set_mesh(make_mesh(MeshConfig(1, 1, num_context, 1), jax.devices()[:num_context])):
        dealt = stripe(x, dim)
        collected = unstripe(dealt, dim)
    np.testing.assert_array_equal(collected, x)
    for device, rows in enumerate(np.split(np.asarray(dealt), num_context, axis=dim)):
        np.testing.assert_array_equal(rows, np.take(x, np.arange(device, length, num_context), axis=dim))


def test_meshes_are_read_and_bad_ones_are_named():
    assert read_mesh("--mesh", "context=2,fsdp=-1") == MeshConfig(data=1, fsdp=-1, context=2, tensor=1)
    assert read_mesh("--mesh", "fsdp=-1").sizes(8) == (1, 8, 1, 1)
    assert MeshConfig(1, 4, 2, 1).asked() == "fsdp=4,context=2"
    for text, words in (
        ("fsdp", "--mesh = 'fsdp': .*axis=size"),
        ("fsdp=4,expert=2", "expert.*'context'"),
        ("fsdp=0", "mesh.fsdp = 0: .*positive"),
        ("fsdp=-1,data=-1", "mesh.*-1.*one axis"),
        ("fsdp=2,fsdp=4", "fsdp=2,fsdp=4.*each once"),
        ("fsdp=3", "fsdp=3.*8 devices"),
    ):
        with pytest.raises(InputError, match=words):
            make_mesh(read_mesh("--mesh", text))


def test_the_tables_specs_and_parts_of_a_batch():
    assert tuple(activation_spec("BTD")) == (("data", "fsdp"), "context", None)
    assert tuple(activation_spec("BTHK")) == (("data", "fsdp"), "context", "tensor", None)
    assert axis_sizes() == dict.fromkeys(AXES, 1)
    assert batch_part(ONE) == (0, 1)
    batch = {"inputs": np.arange(8).reshape(4, 2)}
    parts = [rows_of_part(batch, part, 2)["inputs"] for part in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), batch["inputs"])


def test_attention_on_one_device_is_the_implementations_own():
    """If nothing is split, nothing is added to the program."""
    x = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
    with jax.set_mesh(ONE):
        program = jax.jit(lambda x: attend_on_mesh(Dense(), x, x, x)).lower(x).as_text()
        assert program == jax.jit(lambda x: attend(x, x, x, implementation="dense")).lower(x).as_text()


def test_a_bias_that_is_a_plain_function_works_on_a_mesh():
    """Test a plain function as in the README, without parameters."""

    def bias(q_pos, k_pos, *, causal=True):
        return jnp.tile(-1.0 * (q_pos[:, None] - k_pos[None, :])[None], (2, 1, 1))

    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 16, 2, 4), np.float32)
    pos = jnp.arange(16)
    expected = jax.jit(lambda q, k, v: attend(q, k, v, pos, pos, bias=bias))(q, k, v)
    with jax.set_mesh(make_mesh(MeshConfig(2, 2, 1, 2))):
        found = jax.jit(lambda q, k, v: attend_on_mesh(Dense(), q, k, v, ScoreMod(bias)))(q, k, v)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_heads_that_the_mesh_does_not_divide_are_rotated():
    x, pos = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 9, 8))), jnp.arange(3)
    with jax.set_mesh(make_mesh(MeshConfig(1, 2, 1, 4))):
        found = [Rope()(x[:, :, :heads], pos) for heads in (1, 3, 9)]
    expected = Rope()(x, pos)
    jax.tree.map(np.testing.assert_array_equal, found, [expected[:, :, :heads] for heads in (1, 3, 9)])


@pytest.mark.parametrize("split", ["batch", "rows"])
def test_gradients_in_a_users_shard_map(split):
    """In `jax.shard_map` with its default checks, the gradients are those without it."""
    bias = KerpleConfig().build(4, 8, nnx.Rngs(0))
    processor = DapeConfig(kernel_width=3, channels=5).build(4, rngs=nnx.Rngs(1))
    *qkv, weight = np.random.default_rng(0).normal(size=(4, 4, 8, 4, 8)).astype(np.float32)
    mesh, pos = Mesh(jax.devices()[:4], ("x",)), jnp.arange(8)
    whole, rows = PartitionSpec(), PartitionSpec("x") if split == "batch" else PartitionSpec(None, "x")
    keys, q_spec = (rows, whole) if split == "batch" else (whole, PartitionSpec("x"))

    def loss(modules, q, k, v, q_pos, weight):
        options = {"bias": modules[0], "processor": modules[1], "implementation": Blockwise(4, 2)}
        positions = () if split == "batch" else (q_pos, pos)
        return (attend(q, k, v, *positions, **options) * weight).sum()

    def local(*args):
        return jax.lax.psum(loss(*args), "x")

    split_loss = jax.shard_map(local, mesh=mesh, in_specs=(whole, rows, keys, keys, q_spec, rows), out_specs=whole)
    args = (bias, processor), *qkv, pos, weight
    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(*args) for f in (split_loss, loss))
    chex.assert_trees_all_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(found[1][1:]))
