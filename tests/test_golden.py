"""Every method against vectors of the official PyTorch code: outputs and all gradients, float64, to 1e-10."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dape_jax import biases, positions
from dape_jax.attention import Blockwise, Dense, masked_softmax
from dape_jax.processors import Dape, DapeConfig, Plain

FOLDERS = [Path(__file__).parent / "golden"]
if "DAPE_GOLDEN_DIR" in os.environ:
    FOLDERS.append(Path(os.environ["DAPE_GOLDEN_DIR"]))

# The content-dependent encodings, which the package does not have yet.
NOT_YET = ("cope", "transformer_xl")

# How a name of the official code starts -> which position bias it has.
BIAS_OF = {"alibi": "alibi", "kerple": "kerple", "fire": "fire", "t5": "t5", "nope": "none", "rope": "none"}

TOLERANCE = 1e-10


def files(kind: str) -> list:
    """Every vector of a kind in every folder; a folder without any would make a test that cannot fail."""
    found = [file for folder in FOLDERS for file in sorted((folder / kind).glob("*.npz"))]
    assert found, f"no {kind} in {FOLDERS}"
    return [pytest.param(f, id=f"{f.parents[1].name}-{f.stem}") for f in found if not f.stem.startswith(NOT_YET)]


def load(file: Path) -> tuple[dict, dict]:
    with np.load(file) as arrays:
        data = {name: arrays[name] for name in arrays.files}
    return data, json.loads(str(data.pop("meta")))


def select(data: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in data.items() if name.startswith(prefix)}


def build(name: str, params: dict, meta: dict) -> tuple:
    """Our bias and processor, holding the official parameters."""
    H = meta["H"]
    kind = BIAS_OF[name.split("_")[0]]
    bias = None
    if kind == "alibi":
        bias = biases.Alibi(H)
    elif kind == "kerple":
        bias = biases.Kerple(H, rngs=nnx.Rngs(0))
        bias.p_H, bias.a_H = nnx.Param(params["bias_p"].reshape(H)), nnx.Param(params["bias_a"].reshape(H))
    elif kind == "t5":
        bias = biases.T5(H, meta["d"], meta["num_buckets"], meta["max_distance"], rngs=nnx.Rngs(0))
        bias.table_NH = nnx.Param(params["weight"])
    elif kind == "fire":
        activation = "leaky_relu" if "dape" in name else "relu"
        width = params["mlp.0.weight"].shape[0]
        config = biases.FireConfig(threshold=meta["init_L_argument"] // 2, width=width, activation=activation)
        bias = biases.Fire(H, config, rngs=nnx.Rngs(0))
        bias.c, bias.threshold_multiplier = nnx.Param(params["c"]), nnx.Param(params["L_multiplier"])
        bias.hidden_M, bias.hidden_bias_M = nnx.Param(params["mlp.0.weight"][:, 0]), nnx.Param(params["mlp.0.bias"])
        bias.output_MH, bias.output_bias_H = nnx.Param(params["mlp.2.weight"].T), nnx.Param(params["mlp.2.bias"])
    if "dape" not in name:
        return bias, Plain()

    def kernel(weight):  # [out, in] or [out, in, 1, W] -> [W, in, out]
        return jnp.moveaxis(weight.reshape(*weight.shape[:2], -1), (0, 1, 2), (2, 1, 0))

    first, second = kernel(params["mlp2.0.weight"]), kernel(params["mlp2.2.weight"])
    config = DapeConfig(kernel_width=first.shape[0], channels=first.shape[2], edge="listing")
    processor = Dape(H, bias is not None, config, rngs=nnx.Rngs(0))
    processor.scores_WHC = nnx.Param(first[:, :H])
    processor.bias_WHC = None if bias is None else nnx.Param(first[:, H:])
    processor.hidden_bias_C = nnx.Param(params["mlp2.0.bias"])
    processor.output_WCH, processor.output_bias_H = nnx.Param(second), nnx.Param(params["mlp2.2.bias"])
    return bias, processor


def assert_close(actual, expected, name):
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * scale, err_msg=name)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("file", files("modules"))
def test_module(file):
    data, meta = load(file)
    params, T = select(data, "param."), meta["T"]
    pos = jnp.arange(T)
    mask = pos[None, :] <= pos[:, None]
    inputs = {name: data[name] for name in ("q", "k", "scores_in") if name in data}

    def probs_of(inputs, params):
        bias, processor = build(meta["module"], params, meta)
        if meta["module"] == "rope":
            q, k = (positions.Rope()(jnp.moveaxis(inputs[x], 1, 2), pos) for x in ("q", "k"))
            scores = jnp.einsum("BTHK,BSHK->BHTS", q, k) * meta["d"] ** -0.5
        else:
            scores = inputs["scores_in"]
        scores = processor(scores, None if bias is None else bias(pos, pos), mask)
        return masked_softmax(scores, mask), scores

    def loss(inputs, params):
        probs, scores = probs_of(inputs, params)
        return (probs * data["cot"]).sum(), (probs, scores)

    (_, (probs, scores)), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(inputs, params)
    assert_close(jnp.where(mask[None, None], scores, 0), data["scores_out"], "scores_out")
    assert_close(probs, data["probs"], "probs")
    for name, grad in grads[0].items():
        assert_close(grad, data[f"grad.{name}"], f"grad.{name}")
    for name, grad in grads[1].items():
        assert_close(grad, data[f"grad.param.{name}"], f"grad.param.{name}")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("attention", [Dense(), Blockwise(block_size=16, num_buckets=3)], ids=["dense", "blockwise"])
@pytest.mark.parametrize("file", files("attention"))
def test_attention(file, attention):
    data, meta = load(file)
    pos = jnp.arange(meta["T"])

    def loss(qkv, params):
        bias, processor = build(meta["variant"], params, meta)
        q, k, v = (jnp.moveaxis(x, 1, 2) for x in qkv)
        if meta["variant"].startswith("rope"):
            q, k = positions.Rope()(q, pos), positions.Rope()(k, pos)
        out = jnp.moveaxis(attention(q, k, v, pos, pos, bias=bias, processor=processor), 2, 1)
        return (out * data["cot"]).sum(), out

    qkv = tuple(data[name] for name in "qkv")
    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, out), (grads, param_grads) = step(qkv, select(data, "param."))
    assert_close(out, data["out"], "out")
    for name, grad in zip("qkv", grads, strict=True):
        assert_close(grad, data[f"grad.{name}"], f"grad.{name}")
    for name, grad in param_grads.items():
        assert_close(grad, data[f"grad.param.{name}"], f"grad.param.{name}")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables(folder):
    slopes = json.loads((folder / "tables" / "alibi_slopes.json").read_text())
    for heads, expected in slopes.items():
        if heads.isdecimal():
            np.testing.assert_allclose(biases.alibi_slopes(int(heads)), expected, rtol=TOLERANCE)
    assert any(heads.isdecimal() for heads in slopes)
    with np.load(folder / "tables" / "t5_buckets.npz") as tables:
        assert tables.files
        for name in tables.files:
            num_buckets, max_distance = (int(part[2:]) for part in name.split("_")[1:])
            found = biases.t5_buckets(jnp.arange(len(tables[name])), num_buckets, max_distance)
            np.testing.assert_array_equal(found, tables[name], err_msg=name)
