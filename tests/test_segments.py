"""Packed documents: a packed row gives what its documents give alone, for every bias x processor x implementation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    ALL_PROCESSORS,
    OnMesh,
    each_value,
    every_case,
    make_bias,
    make_layer,
    make_qkv,
    make_weight,
    tolerance,
    value_and_grads,
)
from tiny import SPEC

from dape_jax.config import read_model
from dape_jax.errors import InputError
from dape_jax.model.attention import Blockwise, Dense, Fused, attend
from dape_jax.model.biases import BIASES
from dape_jax.model.processors import DapeConfig, Processor
from dape_jax.model.transformer import model_structure
from dape_jax.sharding import MeshConfig, make_mesh

IDS = jnp.array([[5, 5, 5, 5, 3, 9, 9, 9, 9, 9, 9], [2] * 7 + [8] * 4, [0] * 11], jnp.int32)
DOCUMENTS = [(0, 0, 4), (0, 4, 5), (0, 5, 11), (1, 0, 7), (1, 7, 11), (2, 0, 11)]  # row, first token, end
WINDOWS = {"dape11": 5, "causal4": 2}  # with 2, a block reads a part of the keys


def unpacked(x):
    """Return one row for each document, followed by zeros."""
    out = np.zeros((len(DOCUMENTS), *x.shape[1:]), x.dtype)
    for row, (b, start, stop) in zip(out, DOCUMENTS, strict=True):
        row[: stop - start] = x[b, start:stop]
    return out


def packed(x):
    """Undo `unpacked`."""
    out = np.zeros((3, *x.shape[1:]), x.dtype)
    for row, (b, start, stop) in zip(x, DOCUMENTS, strict=True):
        out[b, start:stop] = row[: stop - start]
    return out


METHODS = (BIASES, ALL_PROCESSORS)
QUICK = {("fire", "dape3"), ("t5", "dape3"), ("kerple", "none"), ("kerple", "causal2")}
QUICK |= {("cope", processor) for processor in WINDOWS}


@pytest.mark.parametrize(("bias", "processor"), every_case(METHODS, QUICK, each_value(METHODS)))
def test_a_packed_row_is_its_documents_alone(bias, processor):
    """Values and all gradients: documents alone by `Dense`, packed by every implementation, without and with a window.

    A document alone is followed by tokens that it does not see, so that all documents are one program.
    """
    qkv = jax.device_get(make_qkv(batch=3))
    weight = np.asarray(make_weight(qkv[0]))
    close = {"atol": 10 * tolerance(bias), "rtol": 10 * tolerance(bias)}
    layer, options = make_layer(bias, processor), {"window": WINDOWS.get(processor)}
    run = value_and_grads(layer, Dense(), **options)
    out, (of_params, of_qkv) = run([unpacked(x) for x in qkv], unpacked(weight))
    out, *of_qkv = (packed(x * (unpacked(np.ones_like(weight)) > 0)) for x in (out, *of_qkv))
    for implementation in (Dense(), Blockwise(4, 2)):
        found = value_and_grads(layer, implementation, segment_ids=IDS, **options)(qkv, weight)
        chex.assert_trees_all_close(found, (out, (of_params, of_qkv)), **close)


def test_both_sides_of_a_document():
    """Without causality, too, a document is what it is alone."""
    (params, layer), qkv = make_layer("fire", "dape3"), make_qkv(batch=3)
    run = jax.jit(lambda qkv, ids=None: layer(params, *qkv, Dense(), causal=False, segment_ids=ids))
    found = run(qkv, IDS)
    for b, start, stop in DOCUMENTS[3:]:
        alone = run([x[b : b + 1, start:stop] for x in qkv])
        chex.assert_trees_all_close(found[b : b + 1, start:stop], alone, atol=1e-5)


def test_rows_over_devices_are_those_of_one_device():
    (params, layer), qkv = make_layer("fire", "dape3", heads=4), make_qkv(12, heads=4)
    ids = jnp.array([[0] * 5 + [1] * 7, [4] * 12], np.int32)
    whole = jax.jit(functools.partial(layer, params), static_argnums=3)
    with jax.set_mesh(make_mesh(MeshConfig(1, 1, 2, 2), jax.devices()[:4])):
        found = jax.device_get(whole(*qkv, OnMesh(Blockwise(2, 2)), segment_ids=ids))
    chex.assert_trees_all_close(found, whole(*qkv, Dense(), segment_ids=ids), atol=1e-5)
    assert np.abs(found - whole(*qkv, Dense()))[0, 5:].max() > 1e-3


@pytest.mark.parametrize(("rotary", "bias"), [("rope", "nope"), ("none", "fire")])
def test_a_model_on_packed_documents(rotary, bias):
    """Logits are those of the documents alone: positions restart, also of rotary embedding and of the last rows."""
    changes = {"vocab_size": 17, "rotary": {"name": rotary}, "bias": {"name": bias}}
    blocks = {"attention": {"name": "auto", "block_size": 4, "num_buckets": 2}}
    graphdef, abstract = model_structure(read_model(SPEC["model"] | changes | blocks))
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(0, 0.3, x.shape), x.dtype), abstract)
    tokens = jnp.asarray(draw.integers(0, 17, IDS.shape, np.int32))

    @functools.partial(jax.jit, static_argnames="num_last")
    def run(tokens, ids=None, num_last=None):
        model = nnx.merge(graphdef, params)
        return model.logits(model.features(tokens, segment_ids=ids, num_last=num_last))

    found, alone = jax.device_get((run(tokens, IDS), run(unpacked(tokens))))
    mask = packed(unpacked(np.ones(IDS.shape, bool)))
    chex.assert_trees_all_close(found, packed(alone) * mask[..., None], atol=1e-5)
    assert np.abs(found - run(tokens))[0, 5:].max() > 1e-2
    chex.assert_trees_all_close(run(tokens, IDS, num_last=3), found[:, -3:], atol=1e-5)


class MixesKeys(Processor):
    key_halo = (1, 0)

    def __call__(self, scores_BHTS, bias_BHTS, mask):
        return scores_BHTS


def test_refused_segments_are_named():
    """What a document alone cannot be compared with, and what a kernel cannot do."""
    qkv, pos, bias = make_qkv(batch=3), jnp.arange(11), make_bias("kerple", 2, 4)

    def method(**options):
        return {"bias": bias, "processor": DapeConfig(channels=5, **options).build(2, rngs=nnx.Rngs(1))}

    for options, words in (
        (method(edge="listing"), "edge='listing'"),
        (method(leak=True), "leak=True"),
        ({"processor": MixesKeys()}, "first_BT"),
        ({"q_pos_T": pos}, "q_pos_T"),
        ({"implementation": "flash"}, "blockwise"),
    ):
        with pytest.raises(InputError, match=words):
            attend(*qkv, **{"segment_ids": IDS} | options)
    for options, words in (
        ({"segment_ids": IDS}, "segment_ids are given"),
        ({"q_pos_T": pos}, "positions are given"),
        ({"scale": 0.3}, "scale is given"),
        ({"cap": 2.0}, "cap is given"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            attend(*qkv, **method(), **options, implementation=Fused("gpu"))
        attend(*qkv, **method(), **options)
