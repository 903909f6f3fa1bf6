"""Attention maps: equal to the layer's attention, pooled exactly, and written to a page."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import tiny
from flax import nnx
from test_command_lines import run

from dape_jax.config import RunConfig
from dape_jax.data.tokenizers import Bytes
from dape_jax.errors import InputError
from dape_jax.evaluation import trained
from dape_jax.model.attention import Blockwise
from dape_jax.model.contextual import Content, ContextualBias
from dape_jax.model.transformer import Block, Places, Transformer, TransformerConfig, model_structure
from dape_jax.tools import maps as module
from dape_jax.tools.maps import attention_maps, layer_maps
from dape_jax.training.source import load_corpus

MODULE = ("-m", "dape_jax.tools.attention_maps")
LENGTH = 77

# Every kind of bias and processor, grouped heads and a window, in two models.
CASES = {
    "residual": {
        "model__bias": {"name": "alibi"},
        "model__processor": {"name": "dape", "kernel_width": 3, "channels": 4, "residual": False},
        "model__num_kv_heads": 1,
        "model__window": 9,
    },
    "contextual": {"model__bias": {"name": "cope", "num_positions": 8}},
    "shared": {"model__bias": {"name": "t5"}, "model__processor": {"name": "none"}},
    "no bias": {"model__bias": {"name": "nope"}, "model__rotary": {"name": "rope"}},
}
COLUMNS = {"shared": ["scores", "bias", "probs"], "no bias": ["scores", "added", "probs"]}


@pytest.fixture(scope="module")
def root(trained_root) -> Path:
    """Return the directory of the text."""
    return trained_root


@pytest.fixture(scope="module")
def workdir(trained_run) -> Path:
    """Return a trained run."""
    return trained_run.rename(trained_run.parent / "a <b> $^$")


def config_of(root: Path, changes: dict) -> TransformerConfig:
    """Return the config of the small run's model, with memory linear in length."""
    config = RunConfig.from_dict(tiny.spec(root, **changes)).model
    return dataclasses.replace(config, attention=Blockwise(block_size=16))


def layer_of(model: Transformer, layer: int) -> Block:
    return jax.tree.map(lambda stacked: stacked[layer], model.layers)


@dataclasses.dataclass(frozen=True)
class Model:
    """Model without parameters at 0."""

    graphdef: nnx.GraphDef
    params: dict[str, Any]

    def run(self, function: Callable, *args) -> Any:
        """Return `function(model, *args)`, compiled."""

        def merged(params, *args):
            return function(nnx.merge(self.graphdef, params), *args)

        return jax.device_get(jax.jit(merged)(self.params, *args))


def model_and_input(root: Path, case: str) -> tuple[TransformerConfig, Model, np.ndarray]:
    """Return a model's config, the model, and the input of one of its layers."""
    config = config_of(root, CASES[case])
    graphdef, abstract = model_structure(config)
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: draw.normal(0, 0.5, leaf.shape).astype(leaf.dtype), abstract)
    return config, Model(graphdef, params), draw.normal(size=(1, LENGTH, 16)).astype(np.float32)


def dense_maps(
    config: TransformerConfig, model: Model, x_BTD: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return all pairs of layer 1, from the definition, the mask, and the values, for all heads."""

    def project(model, x_BTD):
        block = layer_of(model, 1)
        return block.attention.project(block.attention_norm(x_BTD), jnp.arange(LENGTH))

    q_BTHK, k_BTGK, v_BTGK = model.run(project, x_BTD)
    num_heads, head_dim = q_BTHK.shape[2:]
    q_THK, k_THK, v_THK = (np.repeat(x[0], num_heads // x.shape[2], axis=1) for x in (q_BTHK, k_BTGK, v_BTGK))
    distance_TT = np.arange(len(q_THK))[:, None] - np.arange(len(k_THK))
    mask_TT = (distance_TT >= 0) & (distance_TT < (config.window or LENGTH))
    scores_HTT = np.einsum("THK,SHK->HTS", q_THK, k_THK) / np.sqrt(head_dim)

    def process(model, q_BTHK, k_BTGK, scores_BHTT, mask_TT):
        attention, pos_T = layer_of(model, 1).attention, jnp.arange(LENGTH)
        bias = model.shared_bias if attention.bias is None else attention.bias
        if isinstance(bias, ContextualBias):
            bias_BHTT = bias.from_content(Content(q_BTHK, k_BTGK, scores_BHTT, mask_TT, pos_T, pos_T), causal=True)
        else:
            bias_BHTT = None if bias is None else bias(pos_T, pos_T)[None]
        return None if bias_BHTT is None else bias_BHTT[0], attention.processor(scores_BHTT, bias_BHTT, mask_TT)[0]

    bias_HTT, processed_HTT = model.run(process, q_BTHK, k_BTGK, scores_HTT[None], mask_TT)
    odds_HTT = np.where(mask_TT, np.exp(processed_HTT - processed_HTT.max(-1, keepdims=True)), 0)
    plain_HTT = scores_HTT if bias_HTT is None else scores_HTT + bias_HTT
    maps = {
        "scores": scores_HTT,
        "bias": bias_HTT,
        "added": processed_HTT - plain_HTT,
        "probs": odds_HTT / odds_HTT.sum(-1, keepdims=True),
    }
    return {name: maps[name] for name in maps if maps[name] is not None}, mask_TT, v_THK


@pytest.mark.parametrize(
    "case", ["residual", "contextual", *(pytest.param(name, marks=pytest.mark.slow) for name in COLUMNS)]
)
def test_pooled_maps_are_the_definition(root, case):
    """Check means of cells and statistics of all visible pairs, at a length that blocks and cells do not divide."""
    config, model, x_BTD = model_and_input(root, case)
    expected, mask_TT, _ = dense_maps(config, model, x_BTD)

    def pooled(model, x_BTD):
        block = layer_of(model, 1)
        maps = layer_maps(block, x_BTD, model.shared_bias, block_size=24, max_cells=16)
        return maps, block(x_BTD, Places(jnp.arange(LENGTH)), model.shared_bias)[0]

    (x_next_BTD, cells, stats), through_block = model.run(pooled, x_BTD)
    assert sorted(cells) == sorted(stats) == sorted(COLUMNS.get(case, ["scores", "bias", "added", "probs"]))
    for name, of_heads in cells.items():
        assert of_heads.shape == (2, 16, 16)
        for row, column in np.ndindex(16, 16):
            here = np.s_[5 * row : 5 * row + 5, 5 * column : 5 * column + 5]
            seen = [x_TT[here][mask_TT[here]] for x_TT in expected[name]]
            if mask_TT[here].any():
                means = np.mean(seen, axis=1, dtype=np.float64)
                np.testing.assert_allclose(of_heads[:, row, column], means, rtol=1e-5, atol=1e-5)
            else:
                assert np.isnan(of_heads[:, row, column]).all()
        assert np.isnan(of_heads[:, *np.triu_indices(16, 1)]).all()
        assert np.isnan(of_heads[:, 15, 0]).all() == (case == "residual")
        visible = expected[name][:, mask_TT].astype(np.float64)
        for key, function in {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}.items():
            np.testing.assert_allclose(stats[name][key], function(visible, axis=1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x_next_BTD, through_block, rtol=1e-5, atol=1e-5)


def test_maps_give_the_attention_of_the_layer(root):
    """softmax(scores + bias + added) V is what the layer attends to, and probs is that softmax; one cell is a pair."""
    config, model, x_BTD = model_and_input(root, "contextual")

    def maps_and_attended(model, x_BTD):
        block = layer_of(model, 1)
        _, cells, _ = layer_maps(block, x_BTD, model.shared_bias, block_size=32)
        attended, _ = block.attention(block.attention_norm(x_BTD), Places(jnp.arange(LENGTH)), model.shared_bias)
        return cells, attended, block.attention.output_HKD[...], block.attention.output_bias_D[...]

    cells, expected_BTD, output_HKD, output_bias_D = model.run(maps_and_attended, x_BTD)
    *_, v_THK = dense_maps(config, model, x_BTD)
    total_HTT = sum(np.asarray(cells[name]) for name in ("scores", "bias", "added") if name in cells)
    blank_TT = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
    assert (np.isnan(total_HTT) == blank_TT).all()
    odds_HTT = np.where(blank_TT, 0, np.exp(total_HTT - np.nanmax(total_HTT, axis=-1, keepdims=True)))
    probs_HTT = odds_HTT / odds_HTT.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.nan_to_num(cells["probs"]), probs_HTT, rtol=1e-4, atol=1e-6)
    out_THK = np.einsum("HTS,SHK->THK", probs_HTT, v_THK)
    found_TD = np.einsum("THK,HKD->TD", out_THK, output_HKD) + output_bias_D
    np.testing.assert_allclose(found_TD, expected_BTD[0], rtol=1e-4, atol=1e-4)


def test_memory_grows_with_the_length_and_not_with_its_square(root):
    graphdef, abstract = model_structure(config_of(root, {}))

    def temporary_bytes(length: int) -> int:
        def maps(params, x_BTD):
            model = nnx.merge(graphdef, params)
            return layer_maps(layer_of(model, 0), x_BTD, model.shared_bias, block_size=16, max_cells=64)

        x_BTD = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
        analysis = jax.jit(maps).lower(abstract, x_BTD).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporary_bytes(1024), temporary_bytes(2048)
    assert long < 2.5 * short
    assert long < 4 * 2048**2  # less than one head's map


def check_page(page: Path, length: int) -> dict:
    """Check that the page links a readable figure per layer, and that the JSON has statistics per layer and head."""
    text = page.read_text()
    content = json.loads((page.parent / "attention_maps.json").read_text())
    assert sorted(file.name for file in page.parent.iterdir()) == [
        "attention_maps.json",
        "index.html",
        "layer-00.png",
        "layer-01.png",
    ]
    assert "attention_maps.json" in text
    for layer, maps in enumerate(content["layers"]):
        assert maps["figure"] == f"layer-{layer:02}.png"
        assert f'src="{maps["figure"]}"' in text
        figure = matplotlib.image.imread(page.parent / maps["figure"])
        assert min(figure.shape[:2]) > 600
        assert len(np.unique(figure[..., 0])) > 50
        assert len(maps["heads"]) == 2
        for head in maps["heads"]:
            assert list(head) == ["scores", "bias", "added", "probs"]
            # The probabilities of each of the T rows sum to 1, over T (T + 1) / 2 pairs.
            assert head["probs"]["mean"] == pytest.approx(2 / (length + 1), rel=1e-5)
            for stats in head.values():
                assert stats["min"] <= stats["mean"] <= stats["max"]
                assert stats["std"] > 0
    assert content["length"] == length
    assert content["model"]["processor"]["name"] == "dape"
    assert content["versions"]["jax"] == jax.__version__
    return content


def test_a_run_is_drawn_once(workdir, root):
    page = attention_maps(workdir, length=64)
    assert page == workdir / "attention_maps" / "step-4-length-64" / "index.html"
    content = check_page(page, 64)
    store = load_corpus(RunConfig.from_dict(tiny.spec(root)).data).validation
    first = next(i for i in range(store.num_documents) if len(store.document(i)) > 64)
    beginning = store.tokenizer.decode(store.document(first)[:64]).decode()
    assert content["text"]["beginning"] == beginning
    assert f"validation document {first} " in content["text"]["source"]
    text = page.read_text()
    assert beginning in text
    assert "<h1>a &lt;b&gt; $^$, step 4" in text
    before = (page.parent / "attention_maps.json").read_bytes()
    with pytest.raises(InputError, match=r"output = .*step-4-length-64.*--output"):
        attention_maps(workdir, length=64, step="best")
    assert (page.parent / "attention_maps.json").read_bytes() == before


def test_a_model_that_diverged_is_refused(workdir, tmp_path, monkeypatch):
    restore = module.restore

    def diverged(trained):
        mesh, params = restore(trained)
        return mesh, jax.tree.map(lambda leaf: leaf * np.float32(np.nan), params)

    monkeypatch.setattr(module, "restore", diverged)
    with pytest.raises(
        InputError, match=r"^workdir = .*: the model has diverged: the output of layer 0 is not finite$"
    ):
        attention_maps(workdir, length=16, output=tmp_path / "maps")
    assert not (tmp_path / "maps" / "index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 1}, ["length = 1", "must be at least 2 tokens"]),
        ({"length": 10_000}, ["length = 10000", "must be at most", "--text"]),
        ({"length": 16, "step": "3"}, ["step = '3'", "newest"]),
        ({"length": 16, "text": "nowhere"}, ["text", "nowhere", "cannot be read"]),
        ({"length": 16, "text": "short"}, ["text", "short", "has 5 tokens", "16"]),
        ({"length": 16, "output": "short"}, ["output", "short", "cannot be written to"]),
    ],
)
def test_bad_input_is_named_before_any_work(workdir, tmp_path, monkeypatch, arguments, words):
    monkeypatch.setattr(module, "model_structure", None)  # calling it would be a TypeError
    (tmp_path / "short").write_text("short")
    files = {name: tmp_path / value for name, value in arguments.items() if name in ("text", "output")}
    with pytest.raises(InputError) as error:
        attention_maps(workdir, **({"output": tmp_path / "out"} | arguments | files))
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "out").exists()


def test_text_that_has_changed_since_training_leaves_another_way(workdir, tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "load_corpus", tiny.changed_corpus(tmp_path))
    with pytest.raises(InputError, match="--text"):
        attention_maps(workdir, length=16, output=tmp_path / "out")


@pytest.mark.slow
def test_command_line(workdir, tmp_path):
    (tmp_path / "text").write_bytes(b"<script>&\xff " * 20)
    done = run(*MODULE, f"--workdir={workdir}", "--length=100", f"--text={tmp_path}/text", f"--output={tmp_path}/out")
    assert done.returncode == 0, done.stderr
    page = tmp_path / "out" / "index.html"
    assert done.stdout.splitlines()[-1] == f"page: {page}"
    assert "2 of 2 layers" in done.stderr
    content = check_page(page, 100)
    assert "--length=100" in content["command"]
    assert content["text"]["source"] == f"{tmp_path}/text"
    text = page.read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;&amp;\ufffd " in text


def test_short_inputs_have_their_tokens_on_the_axes():
    text = b"a $b\n\xff"
    names = module.token_names(Bytes(), np.frombuffer(text, np.uint8).astype(np.int32))
    assert names == ["a", "\u00b7", r"\$", "b", r"\n", r"\xff"]
    cells = {"scores": np.zeros((2, 6, 6)), "probs": np.full((2, 6, 6), 0.5)}
    named, plain = (module.draw(cells, 6, "title", given) for given in (names, None))
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in (named.axes[0], plain.axes[0])]
    assert labels[0] == names
    assert labels[1] != names
