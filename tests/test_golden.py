"""Golden tests: every method against vectors of the reference implementations.

Float64: all outputs and all gradients to 1e-10. Float32: all outputs within 4 times the reference's own error in
float32, which every file records. Files in `tests/golden` or the directory `$DAPE_GOLDEN_DIR` are tested without new
code, except for new methods. The slow tests run every file in both dtypes, dense and blockwise.
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
from dape_jax.model.attention import Blockwise, Dense, attend, score
from dape_jax.model.processors import DapeConfig, Plain
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


def one_of_each(found: list[Path], *keys: str, longest: bool = True) -> set[Path]:
    """Return a file of each combination of these values in every directory: the longest, or the methods in turn."""
    groups = collections.defaultdict(list)
    for file in sorted(found, key=lambda file: read_meta(file)["T"]):
        groups[file.parent, *(read_meta(file).get(key) for key in keys)].append(file)
    return {each[-1] if longest else each[turn % len(each)] for turn, each in enumerate(groups.values())}


def slow_unless(quick: bool) -> tuple:
    return () if quick else (pytest.mark.slow,)


def vectors() -> list:
    """Return every file in both dtypes, whole attention layers with two implementations.

    Not slow are: float64, dense, for the longest file of each method and for each size; float32 for the longest files;
    and float64, blockwise, for the longest of FIRE, which needs the positions of a block's rows.
    """
    cases = []
    for kind, implementations in (("modules", ("",)), ("attention", ATTENTION)):
        found = files(kind)
        longest, sizes = one_of_each(found, "name"), one_of_each(found, *"BHTk", longest=False)
        quick = {
            "": {"float64": longest | sizes, "float32": longest},
            "dense": {"float64": longest | sizes},
            "blockwise": {"float64": {file for file in longest if "fire" in file.stem}},
        }
        for dtype, implementation, file in itertools.product(("float64", "float32"), implementations, found):
            is_quick = file in quick[implementation].get(dtype, ())
            case_id = "-".join(filter(None, (name(file), dtype, implementation)))
            cases.append(pytest.param(file, dtype, implementation, id=case_id, marks=slow_unless(is_quick)))
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
    fields = {}
    if kind == "alibi":
        config = biases.AlibiConfig()
    elif kind == "kerple":
        config, fields = biases.KerpleConfig(), {x: params[f"bias_{x[0]}"].reshape(H) for x in ("p_H", "a_H")}
    elif kind == "t5":
        config = biases.T5Config(meta["num_buckets"], meta["max_distance"])
        fields = {"table_NH": params["weight"]}
    elif kind == "fire":
        activation = "leaky_relu" if "dape" in meta["name"] else "relu"
        width = params["mlp.0.weight"].shape[0]
        config = biases.FireConfig(threshold=meta["init_L_argument"] // 2, width=width, activation=activation)
        fields = {"c": params["c"], "threshold_multiplier": params["L_multiplier"]}
        fields |= {"hidden_M": params["mlp.0.weight"][:, 0], "hidden_bias_M": params["mlp.0.bias"]}
        fields |= {"output_MH": params["mlp.2.weight"].T, "output_bias_H": params["mlp.2.bias"]}
    elif kind == "cope":
        config, fields = contextual.CopeConfig(meta["npos_max"]), {"table_KP": params["pos_emb"][0]}
    elif kind == "transformer":
        config = contextual.TransformerXLConfig()
        fields = {"content_HK": params["r_w_bias"], "position_HK": params["r_r_bias"]}
        fields |= {"relative_DHK": params["r_net.weight"].T.reshape(-1, H, meta["d"])}
    else:
        assert kind in ("nope", "rope"), f"unknown method: {meta['name']}"
        config = biases.NopeConfig()
    bias = config.build(H, meta.get("d", 1), nnx.Rngs(0))  # files without d have methods that do not use it
    for field, value in fields.items():
        setattr(bias, field, nnx.Param(value))
    if "dape" not in meta["name"]:
        return bias, Plain()

    def kernel(weight):  # [out, in] or [out, in, 1, W] -> [W, in, out]
        return jnp.moveaxis(weight.reshape(*weight.shape[:2], -1), (0, 1, 2), (2, 1, 0))

    first, second = kernel(params["mlp2.0.weight"]), kernel(params["mlp2.2.weight"])
    config = DapeConfig(kernel_width=first.shape[0], channels=first.shape[2], **{"edge": "listing"} | options)
    processor = config.build(H, has_bias=bias is not None, rngs=nnx.Rngs(0))
    processor.scores_WHC = nnx.Param(first[:, :H])
    processor.bias_WHC = None if bias is None else nnx.Param(first[:, H:])
    processor.hidden_bias_C = nnx.Param(params["mlp2.0.bias"])
    processor.output_WCH, processor.output_bias_H = nnx.Param(second), nnx.Param(params["mlp2.2.bias"])
    return bias, processor


def heads_last(x):
    return jnp.moveaxis(x, 1, 2)


def outputs_of(inputs: dict, params: dict, meta: dict, attention: str = "", **options) -> dict:
    """Return the outputs in the file of a module or an attention layer; the loss is computed from the last."""
    bias, processor = build(params, meta, **options)
    pos = jnp.arange(meta["T"])
    mask = pos[None, :] <= pos[:, None]
    outputs = {}
    if "q" in inputs:
        q, k = heads_last(inputs["q"]), heads_last(inputs["k"])
        if meta["name"].startswith("rope"):
            q, k = positions.Rope()(q, pos), positions.Rope()(k, pos)
        if attention:
            options = {"bias": bias, "processor": processor, "implementation": ATTENTION[attention]}
            return {"out": heads_last(attend(q, k, heads_last(inputs["v"]), **options))}
        outputs |= {"q_rot": heads_last(q), "k_rot": heads_last(k)} if meta["name"] == "rope" else {}
        scores = processor(*score(q, k, pos, pos, bias=bias))
    else:
        scores = processor(inputs["scores_in"], None if bias is None else bias(pos, pos)[None], mask)
    return outputs | {"scores_out": jnp.where(mask[None, None], scores, 0), "probs": masked_softmax(scores, mask)}


@pytest.mark.parametrize(("file", "dtype", "attention"), vectors())
def test_golden(file, dtype, attention):
    data, meta = load(file)
    with jax.enable_x64(dtype == "float64"):
        inputs = {x: jnp.asarray(data[x].astype(dtype)) for x in ("q", "k", "v", "scores_in") if x in data}
        if "q" in inputs:
            inputs.pop("scores_in", None)  # CoPE's, computed from q and k
        params = {x: jnp.asarray(value.astype(dtype)) for x, value in select(data, "param.").items()}

        forward = functools.partial(outputs_of, meta=meta, attention=attention)
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


DAPE_V2 = files("modules", "*dapev2*")
EACH_WIDTH = one_of_each([file for file in DAPE_V2 if read_meta(file)["name"].startswith("kerple")], "k")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "file", [pytest.param(file, id=name(file), marks=slow_unless(file in EACH_WIDTH)) for file in DAPE_V2]
)
def test_golden_where_we_differ(file):
    """Edge "prefix" differs from the listing only in the last W//2 rows; `leak` is the listing without tril."""
    data, meta = load(file)
    params, half, T = select(data, "param."), meta["k"] // 2, meta["T"]

    @jax.jit
    def scores(inputs, params):
        options = ({"leak": True}, {"edge": "prefix"})
        return [outputs_of(inputs, params, meta, **some)["scores_out"] for some in options]

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
