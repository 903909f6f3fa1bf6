"""Golden tests: every method against vectors of the reference implementations.

Float64: all outputs and all gradients to 1e-10. Float32: all outputs within 4 times the reference's own error in
float32, which every file records. Files in `tests/golden` or the directory `$DAPE_GOLDEN_DIR` are tested without new
code, except for new methods. The slow tests run every file in both dtypes, dense and blockwise; the others every
method, every size and every file of a plain bias.
"""

import collections
import functools
import itertools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dape_jax.model import biases, contextual, positions
from dape_jax.model.attention import Blockwise, Dense, score
from dape_jax.model.processors import Dape, DapeConfig, Plain, ScoreMod
from dape_jax.model.scores import masked_softmax

FOLDERS = [Path(__file__).parent / "golden"]
if "DAPE_GOLDEN_DIR" in os.environ:
    FOLDERS.append(Path(os.environ["DAPE_GOLDEN_DIR"]))

FLOAT64_TOLERANCE = 1e-10
FLOAT32_FACTOR = 4
ATTENTION = {"dense": Dense(), "blockwise": Blockwise(block_size=16, num_buckets=3)}


def files(kind: str, name: str = "*") -> list[Path]:
    """Return every file of a kind in every folder; without any, fail, since a test without files would pass."""
    found = [file for folder in FOLDERS for file in sorted((folder / kind).glob(f"{name}.npz"))]
    assert found, f"no {kind} in {FOLDERS}"
    return found


@functools.cache
def read_meta(file: Path) -> dict:
    """Return a file's description, with the method as "name"."""
    with np.load(file) as arrays:
        meta = json.loads(str(arrays["meta"]))
    return meta | {"name": meta.get("module") or meta["variant"]}


def longest_of_each_method(found: list[Path]) -> set[Path]:
    """Return the file with the most positions of each method, in every directory."""
    by_method = {}
    for file in sorted(found, key=lambda file: read_meta(file)["T"]):
        by_method[file.parent, read_meta(file)["name"]] = file
    return set(by_method.values())


def sample(found: list[Path]) -> set[Path]:
    """Return every file of a plain bias, and with DAPE each size once, of the methods in turn."""
    chosen = {file for file in found if "dape" not in read_meta(file)["name"]}
    by_size = collections.defaultdict(list)
    for file in sorted(set(found) - chosen):
        by_size[file.parent, file.stem.split("__")[1].split("_L")[0]].append(file)
    return chosen | {each[turn % len(each)] for turn, each in enumerate(by_size.values())}


def vectors() -> list:
    """Return every file in both dtypes, whole attention layers with two implementations.

    Not slow are: float64, dense, for a sample of the files; and for one file per method also float32, and float64
    blockwise.
    """
    cases = []
    for kind, implementations in (("modules", ("",)), ("attention", ATTENTION)):
        found = files(kind)
        longest = longest_of_each_method(found)
        sampled = sample(found) | longest
        for dtype, implementation, file in itertools.product(("float64", "float32"), implementations, found):
            unusual = (dtype == "float32") + (implementation == "blockwise")
            quick = (unusual == 0 and file in sampled) or (unusual == 1 and file in longest)
            case_id = "-".join(filter(None, (name(file), dtype, implementation)))
            marks = () if quick else pytest.mark.slow
            cases.append(pytest.param(file, dtype, implementation, id=case_id, marks=marks))
    return cases


def name(file: Path) -> str:
    return f"{file.parents[1].name}-{file.stem}"


def load(file: Path) -> tuple[dict, dict]:
    with np.load(file) as arrays:
        return {name: arrays[name] for name in arrays.files if name != "meta"}, read_meta(file)


def select(data: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in data.items() if name.startswith(prefix)}


def build(params: dict, meta: dict, **options) -> tuple:
    """Return our bias and processor with the official parameters; the options are the processor's."""
    H, kind = meta["H"], meta["name"].split("_")[0]
    bias = None

    def make(config):
        return config.build(H, meta.get("d", 1), nnx.Rngs(0))  # files without d have methods that do not use it

    if kind == "alibi":
        bias = make(biases.AlibiConfig())
    elif kind == "kerple":
        bias = make(biases.KerpleConfig())
        bias.p_H, bias.a_H = nnx.Param(params["bias_p"].reshape(H)), nnx.Param(params["bias_a"].reshape(H))
    elif kind == "t5":
        bias = make(biases.T5Config(meta["num_buckets"], meta["max_distance"]))
        bias.table_NH = nnx.Param(params["weight"])
    elif kind == "fire":
        activation = "leaky_relu" if "dape" in meta["name"] else "relu"
        width = params["mlp.0.weight"].shape[0]
        config = biases.FireConfig(threshold=meta["init_L_argument"] // 2, width=width, activation=activation)
        bias = make(config)
        bias.c, bias.threshold_multiplier = nnx.Param(params["c"]), nnx.Param(params["L_multiplier"])
        bias.hidden_M, bias.hidden_bias_M = nnx.Param(params["mlp.0.weight"][:, 0]), nnx.Param(params["mlp.0.bias"])
        bias.output_MH, bias.output_bias_H = nnx.Param(params["mlp.2.weight"].T), nnx.Param(params["mlp.2.bias"])
    elif kind == "cope":
        bias = make(contextual.CopeConfig(meta["npos_max"]))
        bias.table_KP = nnx.Param(params["pos_emb"][0])
    elif kind == "transformer":
        bias = make(contextual.TransformerXLConfig())
        bias.content_HK, bias.position_HK = nnx.Param(params["r_w_bias"]), nnx.Param(params["r_r_bias"])
        bias.relative_DHK = nnx.Param(params["r_net.weight"].T.reshape(-1, H, meta["d"]))
    else:
        assert kind in ("nope", "rope"), f"unknown method: {meta['name']}"
    if "dape" not in meta["name"]:
        return bias, Plain()

    def kernel(weight):  # [out, in] or [out, in, 1, W] -> [W, in, out]
        return jnp.moveaxis(weight.reshape(*weight.shape[:2], -1), (0, 1, 2), (2, 1, 0))

    first, second = kernel(params["mlp2.0.weight"]), kernel(params["mlp2.2.weight"])
    config = DapeConfig(kernel_width=first.shape[0], channels=first.shape[2], **{"edge": "listing"} | options)
    processor = Dape(H, bias is not None, config, rngs=nnx.Rngs(0))
    processor.scores_WHC = nnx.Param(first[:, :H])
    processor.bias_WHC = None if bias is None else nnx.Param(first[:, H:])
    processor.hidden_bias_C = nnx.Param(params["mlp2.0.bias"])
    processor.output_WCH, processor.output_bias_H = nnx.Param(second), nnx.Param(params["mlp2.2.bias"])
    return bias, processor


def heads_last(x):
    return jnp.moveaxis(x, 1, 2)


def module_outputs(inputs: dict, params: dict, meta: dict, **options) -> dict:
    """Return the outputs in the file of a module; the loss is computed from the last."""
    bias, processor = build(params, meta, **options)
    pos = jnp.arange(meta["T"])
    mask = pos[None, :] <= pos[:, None]
    if "q" in inputs:
        q, k = heads_last(inputs["q"]), heads_last(inputs["k"])
        if meta["name"].startswith("rope"):
            q, k = positions.Rope()(q, pos), positions.Rope()(k, pos)
        scores = processor(*score(q, k, pos, pos, bias=bias))
    else:
        scores = processor(inputs["scores_in"], None if bias is None else bias(pos, pos)[None], mask)
    outputs = {"scores_out": jnp.where(mask[None, None], scores, 0), "probs": masked_softmax(scores, mask)}
    if meta["name"] == "rope":
        outputs = {"q_rot": heads_last(q), "k_rot": heads_last(k)} | outputs
    return outputs


def attention_outputs(inputs: dict, params: dict, meta: dict, attention) -> dict:
    """Return the outputs in the file of an attention layer."""
    bias, processor = build(params, meta)
    pos = jnp.arange(meta["T"])
    q, k, v = (heads_last(inputs[name]) for name in "qkv")
    if meta["name"].startswith("rope"):
        q, k = positions.Rope()(q, pos), positions.Rope()(k, pos)
    return {"out": heads_last(attention(q, k, v, pos, pos, ScoreMod(bias, processor)))}


@pytest.mark.parametrize(("file", "dtype", "attention"), vectors())
def test_golden(file, dtype, attention):
    data, meta = load(file)
    with jax.enable_x64(dtype == "float64"):
        inputs = {x: jnp.asarray(data[x].astype(dtype)) for x in ("q", "k", "v", "scores_in") if x in data}
        if "q" in inputs:
            inputs.pop("scores_in", None)  # CoPE's, computed from q and k
        params = {x: jnp.asarray(value.astype(dtype)) for x, value in select(data, "param.").items()}

        def forward(inputs, params):
            if attention:
                return attention_outputs(inputs, params, meta, ATTENTION[attention])
            return module_outputs(inputs, params, meta)

        if dtype == "float32":
            outputs = jax.jit(forward)(inputs, params)
            assert outputs.keys() >= meta["max_abs_diff_f32_vs_f64"].keys() > set()
            for output, error in meta["max_abs_diff_f32_vs_f64"].items():
                np.testing.assert_allclose(outputs[output], data[output], rtol=0, atol=FLOAT32_FACTOR * error)
            return

        def loss(inputs, params):
            outputs = forward(inputs, params)
            return (list(outputs.values())[-1] * data["cot"]).sum(), outputs

        (_, outputs), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(inputs, params)
        assert outputs.keys() == data.keys() & {"scores_out", "probs", "q_rot", "k_rot", "out"}
        expected = {output: data[output] for output in outputs} | select(data, "grad.")
        found = outputs | grads[0] | {f"param.{x}": grad for x, grad in grads[1].items()}
        assert found.keys() == expected.keys()
        for x in expected:
            scale = max(1.0, float(np.abs(expected[x]).max()))
            np.testing.assert_allclose(found[x], expected[x], rtol=0, atol=FLOAT64_TOLERANCE * scale, err_msg=x)


def one_per_width_and_length() -> list:
    """Return every DAPE V2 file; all but one bias, which has every (W, T), are slow."""
    found = files("modules", "*dapev2*")
    return [
        pytest.param(
            file, id=name(file), marks=() if read_meta(file)["name"].startswith("kerple") else pytest.mark.slow
        )
        for file in found
    ]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("file", one_per_width_and_length())
def test_golden_where_we_differ(file):
    """Edge "prefix" differs from the listing only in the last W//2 rows; `leak` is the listing without tril."""
    data, meta = load(file)
    params, half, T = select(data, "param."), meta["k"] // 2, meta["T"]

    @jax.jit
    def scores(inputs, params):
        options = ({"leak": True}, {"edge": "prefix"})
        return [module_outputs(inputs, params, meta, **some)["scores_out"] for some in options]

    leaky, prefix = jax.device_get(scores({"scores_in": data["scores_in"]}, params))
    np.testing.assert_allclose(leaky, data["scores_out_leaky"], rtol=0, atol=FLOAT64_TOLERANCE)
    assert half == 0 or T <= 2 or np.abs(leaky - data["scores_out"]).max() > 1e-3
    first = max(0, T - half)
    np.testing.assert_allclose(prefix[:, :, :first], data["scores_out"][:, :, :first], rtol=0, atol=FLOAT64_TOLERANCE)
    for row in range(first, T):
        assert np.abs(prefix[:, :, row] - data["scores_out"][:, :, row]).max() > 1e-4


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden_tables(folder):
    slopes = json.loads((folder / "tables" / "alibi_slopes.json").read_text())
    for heads, expected in slopes.items():
        if heads.isdecimal():
            np.testing.assert_allclose(biases.alibi_slopes(int(heads)), expected, rtol=FLOAT64_TOLERANCE)
    assert any(heads.isdecimal() for heads in slopes)
    with np.load(folder / "tables" / "t5_buckets.npz") as tables:
        assert tables.files
        for table in tables.files:
            num_buckets, max_distance = (int(part[2:]) for part in table.split("_")[1:])
            found = biases.t5_buckets(jnp.arange(len(tables[table])), num_buckets, max_distance)
            np.testing.assert_array_equal(found, tables[table], err_msg=table)
