"""Contract tests of biases and processors, for pytest: `python -m pytest -p my_methods --pyargs dape_jax.testing`.

`-p` imports a module that adds to `BIASES` and `PROCESSORS`. Each bias of it is tested without a processor, with DAPE
and with its processors; each processor without a bias, with Kerple and with its biases. Without such a module, all
methods of the package are tested.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from dape_jax.config import CHOICES, choose, read_model
from dape_jax.errors import InputError
from dape_jax.model.attention import Blockwise, attend
from dape_jax.model.transformer import Transformer

LENGTH, HEADS, HEAD_DIM = 11, 2, 4
POS = np.arange(LENGTH, dtype=np.int32)
SIZES = {"num_layers": 2, "width": HEADS * HEAD_DIM, "num_heads": HEADS, "vocab_size": 7, "dtype": "float32"}
assert_close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4)
# Consecutive rows all at once, in blocks with their own keys, and rows at given positions.
WAYS: dict[str, dict[str, Any]] = {
    "dense": {"implementation": "dense"},
    "blockwise": {"implementation": Blockwise(block_size=4, num_buckets=2)},
    "positions": {"q_pos_T": POS, "k_pos_S": POS},
}


def methods() -> list[tuple[str, str]]:
    """Return the names of the biases and processors to test."""
    kinds = {
        field: [name for name, kind in CHOICES[field].items() if not kind.__module__.startswith("dape_jax.")]
        for field in ("bias", "processor")
    }
    if not any(kinds.values()):
        kinds = {field: list(CHOICES[field]) for field in kinds}
    biases, processors = kinds["bias"], kinds["processor"]
    pairs = [(bias, processor) for bias in biases for processor in ("none", "dape", *processors)]
    pairs += [(bias, processor) for processor in processors for bias in ("nope", "kerple", *biases)]
    return list(dict.fromkeys(pairs))


each_method = pytest.mark.parametrize(("bias", "processor"), methods())


def config_of(bias: str, processor: str) -> Any:
    """Return the config of a small model, as a config file would give it."""
    return read_model(SIZES | {"bias": choose("bias", bias), "processor": choose("processor", processor)})


def arrays(seed: int, length: int = LENGTH) -> list[np.ndarray]:
    """Return random queries, keys and values."""
    return list(np.random.default_rng(seed).normal(size=(3, 1, length, HEADS, HEAD_DIM)).astype(np.float32))


@functools.cache
def make_layer(bias: str, processor: str) -> tuple[Any, Callable]:
    """Return the parameters of a layer, and a function of them and of q, k, v that attends.

    Random numbers are added to the parameters: one at 0 could hide an error.
    """
    config = config_of(bias, processor)

    def build() -> Any:
        layer, rngs = nnx.Dict(bias=config.bias.build(HEADS, HEAD_DIM, nnx.Rngs(0))), nnx.Rngs(1)
        layer.processor = config.processor.build(HEADS, has_bias=layer.bias is not None, rngs=rngs)
        graphdef, params, others = nnx.split(layer, nnx.Param, ...)
        graphdefs.append(graphdef)
        return params, others

    graphdefs: list[nnx.GraphDef] = []
    params, others = jax.jit(build)()
    draw = np.random.default_rng(2)
    params = jax.tree.map(lambda p: p + 0.1 * draw.normal(size=p.shape).astype(p.dtype), params)

    def run(params: Any, qkv: Any, **options: Any) -> jax.Array:
        layer = nnx.merge(graphdefs[0], params, others)
        return attend(*qkv, bias=layer.bias, processor=layer.processor, **options)

    return params, run


@functools.cache
def value_and_gradients(bias: str, processor: str, way: str) -> Callable:
    """Return a compiled function of q, k, v and the weights of the output, whose weighted sum is differentiated."""
    params, run = make_layer(bias, processor)

    def weighted(params: Any, qkv: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
        out = run(params, qkv, **WAYS[way])
        return (out * weights).sum(), out

    compiled = jax.jit(jax.grad(weighted, (0, 1), has_aux=True))
    return lambda qkv, weights: jax.device_get(compiled(params, qkv, weights))


@each_method
@pytest.mark.parametrize("way", WAYS)
def test_rows_depend_on_visible_keys_only(bias: str, processor: str, way: str) -> None:
    """Later keys change no bit of a row and have gradient 0; values and gradients are those of dense attention.

    A processor that reads further must say so in `key_halo`; none may mix rows, or read masked scores.
    """
    run, qkv, weights, t = value_and_gradients(bias, processor, way), arrays(0), arrays(2)[0], 6
    later = (POS > t)[None, :, None, None]
    grads, out = run(qkv, weights)
    _, changed = run([np.where(later, y, x) for x, y in zip(qkv, arrays(1), strict=True)], weights)
    np.testing.assert_array_equal(changed[:, : t + 1], out[:, : t + 1])
    assert np.abs(changed - out)[:, t + 1 :].max() > 1e-3
    (_, of_qkv), _ = run(qkv, np.where(later, 0, weights))
    for grad in of_qkv:
        np.testing.assert_array_equal(grad[:, t + 1 :], 0)
    dense = value_and_gradients(bias, processor, "dense")(qkv, weights)
    for found, expected in zip(jax.tree.leaves((grads, out)), jax.tree.leaves(dense), strict=True):
        assert np.isfinite(found).all()
        assert_close(found, expected)


@each_method
def test_a_prefix_gives_a_prefix(bias: str, processor: str) -> None:
    """Results do not depend on the length; one row against a cache with unused columns gives that row.

    A processor without a cache says so in `why_not_cached`.
    """
    params, run = make_layer(bias, processor)
    run, qkv, t = jax.jit(run), arrays(0), 7
    whole = run(params, qkv)
    assert_close(run(params, [x[:, :t] for x in qkv]), whole[:, :t])
    if config_of(bias, processor).processor.why_not_cached is None:
        q, k, v = qkv
        cached = [np.where((POS <= t)[None, :, None, None], x, 9.0) for x in (k, v)]
        row = run(params, [q[:, t : t + 1], *cached], q_pos_T=POS[t : t + 1], k_pos_S=POS)
        assert_close(row, whole[:, t : t + 1])


@each_method
def test_packed_documents_give_what_they_give_alone(bias: str, processor: str) -> None:
    """A processor with a `key_halo` needs the argument `first_BT`; without it, it is refused in one line."""
    params, run = make_layer(bias, processor)
    run, qkv, t = jax.jit(run), arrays(0), 5
    try:
        packed = run(params, qkv, segment_ids=(POS >= t).astype(np.int32)[None])
    except InputError as error:
        if "first_BT" not in str(error):
            raise
        pytest.skip(str(error))
    for rows in (slice(0, t), slice(t, None)):
        assert_close(packed[:, rows], run(params, [x[:, rows] for x in qkv]))


@each_method
def test_a_model_has_gradients_and_named_parameters(bias: str, processor: str) -> None:
    """The config is frozen; letters at the end of a parameter's name are its dims, from which shardings follow."""
    config = config_of(bias, processor)
    assert hash(config) == hash(dataclasses.replace(config))
    model = nnx.jit(lambda: Transformer(config, rngs=nnx.Rngs(0)))()
    tokens_BT = np.arange(12, dtype=np.int32).reshape(2, 6) % config.vocab_size
    graphdef, params = nnx.split(model, nnx.Param)
    loss = jax.jit(jax.grad(lambda params: (nnx.merge(graphdef, params)(tokens_BT) ** 2).mean()))
    for path, grad in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(loss(params))):
        assert np.isfinite(grad).all(), path
        letters = path[-1].key.rsplit("_", 1)[-1]
        is_stacked = path[0].key == "layers"
        assert not letters.isupper() or len(letters) == grad.ndim - is_stacked, path
