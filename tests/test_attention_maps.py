"""Attention maps: the definition of each map, pooled exactly, in linear memory, on a page."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import tiny
from flax import nnx
from helpers import random_params
from processes import run_python
from tiny import load_corpus

from dape_jax.config import RunConfig
from dape_jax.data.tokenizers import Bytes
from dape_jax.errors import InputError
from dape_jax.evaluation import trained
from dape_jax.model.attention import Blockwise
from dape_jax.model.contextual import Content, ContextualBias
from dape_jax.model.scores import Mask, Positions
from dape_jax.model.transformer import Params, Places, TransformerConfig, model_structure
from dape_jax.tools import maps as module
from dape_jax.tools.maps import attention_maps, layer_maps
from dape_jax.tools.options import MapsFlags

pytestmark = pytest.mark.extra

LENGTH = 77
# Every kind of bias, with grouped heads and a window; and the maps that each has.
CASES = {
    "residual": {"model__bias": {"name": "alibi"}, "model__num_kv_heads": 1, "model__window": 9}
    | {"model__processor": {"name": "dape", "kernel_width": 3, "channels": 4, "residual": False}},
    "contextual": {"model__bias": {"name": "cope", "num_positions": 8}},
    "no bias": {"model__bias": {"name": "nope"}, "model__rotary": {"name": "rope"}},
}


@pytest.fixture(scope="module")
def workdir(trained_run) -> Path:
    """Return a trained run whose name needs escaping."""
    return trained_run.rename(trained_run.parent / "a <b> $^$")


def config_of(root: Path, changes: dict) -> TransformerConfig:
    """Return the config of the small run's model, with memory linear in length."""
    config = RunConfig.from_dict(tiny.spec(root, **changes)).model
    return dataclasses.replace(config, attention=Blockwise(block_size=16))


def dense_maps(
    config: TransformerConfig, params: Params, x_BTD: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return all pairs of layer 1, from the definition, which give its attention; the mask; and the layer's output."""

    @jax.jit
    def of_layer(params, x_BTD):
        model, pos_T = nnx.merge(model_structure(config)[0], params), jnp.arange(LENGTH)
        block = model.block(1)
        bias = model.shared_bias if block.attention.bias is None else block.attention.bias
        normed_BTD, attention, places = block.attention_norm(x_BTD), block.attention, Places(pos_T)
        q_BTHK, k_BTGK, v_BTGK = attention.project(normed_BTD, pos_T)
        k_BTHK, v_BTHK = (jnp.repeat(x, q_BTHK.shape[2] // x.shape[2], axis=2) for x in (k_BTGK, v_BTGK))
        mask_TT = Mask(window=config.window).visible(Positions(pos_T, pos_T))
        scores_BHTT = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BTHK) / np.sqrt(q_BTHK.shape[3])
        if isinstance(bias, ContextualBias):
            bias_BHTT = bias.from_content(Content(q_BTHK, k_BTGK, scores_BHTT, mask_TT, pos_T, pos_T), causal=True)
        else:
            bias_BHTT = None if bias is None else bias(pos_T, pos_T)[None]
        processed_BHTT = attention.processor(scores_BHTT, bias_BHTT, mask_TT)
        maps = {"scores": scores_BHTT} | ({} if bias_BHTT is None else {"bias": bias_BHTT})
        maps["added"] = processed_BHTT - sum(maps.values())
        maps["probs"] = jax.nn.softmax(jnp.where(mask_TT[None, None], processed_BHTT, -jnp.inf), axis=-1)
        attended_BTHK = jnp.einsum("BHTS,BSHK->BTHK", maps["probs"], v_BTHK)
        from_maps_BTD = jnp.einsum("BTHK,HKD->BTD", attended_BTHK, attention.output_HKD[...])
        from_maps_BTD += attention.output_bias_D[...][None, None]
        return maps, mask_TT, block(x_BTD, places, bias)[0], from_maps_BTD, attention(normed_BTD, places, bias)[0]

    maps, mask_TT, output_BTD, from_maps_BTD, whole_BTD = jax.device_get(of_layer(params, x_BTD))
    np.testing.assert_allclose(from_maps_BTD, whole_BTD, rtol=1e-4, atol=1e-4)
    return {name: x_BHTT[0] for name, x_BHTT in maps.items()}, mask_TT, output_BTD


@pytest.mark.parametrize("case", CASES)
def test_maps_are_those_of_the_layer_and_pooled_exactly(trained_root, case):
    """Check each pair, and means of cells at a length that blocks and cells do not divide."""
    config = config_of(trained_root, CASES[case])
    params = random_params(config)
    x_BTD = np.random.default_rng(1).normal(size=(1, LENGTH, 16)).astype(np.float32)
    expected, mask_TT, output_BTD = dense_maps(config, params, x_BTD)
    for size in (1, 5):
        found_BTD, cells = layer_maps(config, params, 1, x_BTD, cell_size=size)
        np.testing.assert_allclose(found_BTD, output_BTD, rtol=1e-5, atol=1e-5)
        assert set(cells) == {"scores", "bias", "added", "probs"} - ({"bias"} if case == "no bias" else set())
        for name, found in cells.items():
            assert found.shape == (2, -(-LENGTH // size), -(-LENGTH // size))
            for row, column in np.ndindex(found.shape[1:]):
                here = np.s_[size * row : size * (row + 1), size * column : size * (column + 1)]
                visible = expected[name][:, *here][:, mask_TT[here]]
                means = visible.mean(axis=1, dtype=np.float64) if visible.size else np.full(2, np.nan)
                np.testing.assert_allclose(found[:, row, column], means, rtol=1e-5, atol=1e-5)
    assert np.isnan(cells["scores"][:, 15, 0]).all() == (case == "residual")


def test_memory_grows_with_the_length_and_not_with_its_square(trained_root):
    config = config_of(trained_root, {})
    _, abstract = model_structure(config)

    def temporary_bytes(length: int) -> int:
        lowered = layer_maps.lower(config, abstract, 0, jax.ShapeDtypeStruct((1, length, 16), "float32"), length // 64)
        analysis = lowered.compile().memory_analysis()
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    short, long = temporary_bytes(1024), temporary_bytes(2048)
    assert long < 2.5 * short
    assert long < 4 * 2048**2  # less than one head's map


def check_page(page: Path, *words: str) -> None:
    """Check that the page shows a readable figure per layer, and these words."""
    text, layers = page.read_text(), ["layer-00.png", "layer-01.png"]
    assert sorted(file.name for file in page.parent.iterdir()) == ["index.html", *layers]
    for name in layers:
        assert f'<a href="{name}"><img src="{name}"' in text
        figure = matplotlib.image.imread(page.parent / name)
        assert min(figure.shape[:2]) > 600
        assert len(np.unique(figure[..., 0])) > 50
    for word in (*words, "kernel_width", jax.__version__):
        assert word in text, word


def test_a_run_is_drawn(workdir, trained_root):
    page = attention_maps(MapsFlags(str(workdir), length=64))
    assert page == workdir / "attention_maps" / "step-4-length-64" / "index.html"
    store = load_corpus(RunConfig.from_dict(tiny.spec(trained_root)).data).validation
    first = next(i for i in range(store.num_documents) if len(store.document(i)) > 64)
    beginning = store.tokenizer.decode(store.document(first)[:64]).decode()
    check_page(page, f"validation document {first} ", beginning, "<h1>a &lt;b&gt; $^$, step 4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 1}, "length = 1: "),
        ({"length": 10_000}, "length = 10000: .*--text"),
        ({"length": 16, "text": "nowhere"}, "text = 'nowhere'"),
        ({"length": 16, "text": "short"}, "text = 'short': has 5 tokens"),
        ({"length": 16, "output": "short"}, "output = 'short'"),
    ],
)
def test_bad_input_is_named_before_any_work(workdir, tmp_path, monkeypatch, arguments, words):
    monkeypatch.setattr(module, "restore", None)  # calling it would be a TypeError
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short", encoding="utf-8-sig")  # with a byte order mark, which is no token
    with pytest.raises(InputError, match=words):
        attention_maps(MapsFlags(str(workdir), **{"output": "out"} | arguments))
    assert not Path("out").exists()


def test_text_that_has_changed_since_training_leaves_another_way(workdir, tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "load_corpora", tiny.changed_corpus(tmp_path))
    with pytest.raises(InputError, match="--text"):
        attention_maps(MapsFlags(str(workdir), length=16, output=str(tmp_path / "out")))


@pytest.mark.slow
def test_command_line(workdir, tmp_path):
    (tmp_path / "text").write_bytes(b"<script>&\xff " * 20)
    flags = [f"--workdir={workdir}", "--length=100", f"--text={tmp_path}/text", f"--output={tmp_path}/out"]
    done = run_python("-m", "dape_jax.tools.attention_maps", *flags)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "out" / "index.html"
    assert done.stdout.splitlines()[-1] == f"page: {page}"
    assert "2 of 2 layers" in done.stderr
    check_page(page, "--length=100", f"{tmp_path}/text", "&lt;script&gt;&amp;\ufffd ")
    assert "<script>" not in page.read_text()


def test_tokens_are_on_the_axes_if_not_all_with_their_positions():
    text = b"a $b\n\xff"
    names = module.token_names(Bytes(), np.frombuffer(text, np.uint8).astype(np.int32))
    assert names == ["a", "\u00b7", "$", "b", r"\n", r"\xff"]
    cells = {"scores": np.zeros((2, 6, 6)), "probs": np.full((2, 6, 6), 0.5)}
    few, many = (module.draw(cells, len(given), "title", given).axes[0] for given in (names, 15 * names))
    few, many = ([label.get_text() for label in axes.get_yticklabels()] for axes in (few, many))
    assert few == names
    assert many == [f"{(15 * names)[at]} {at}" for at in range(0, 90, 3)]
