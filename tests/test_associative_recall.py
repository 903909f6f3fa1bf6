"""Proposition 1, as in `docs/associative_recall.md`: the page's code is run, and every claim is checked."""

import contextlib
import io
import itertools
import math
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import softmax

from dape_jax.model.attention import attend
from dape_jax.model.processors import DapeConfig

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "associative_recall.md"
HAKUNA = 0  # words are interchangeable, because their embeddings are
KERNELS = {  # kernels that recall according to the page, with their alignment
    "paper": ((-1.0, 1.0), "causal"),
    "shift": ((-1.0, 0.0), "causal"),
    "equation5": ((-1.0, 2.0), "causal"),
    "centered": ((-1.0, 1.0, 0.0), "centered"),
}


@pytest.fixture(scope="module")
def page():
    """Return the names that the page's code defines, and its output."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names, printed = {"__name__": "associative_recall"}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), names)
    return types.SimpleNamespace(**names, printed=printed.getvalue())


@pytest.fixture(scope="module")
def read(page):
    """Compute `recall` on one-hot embeddings, compiled once per shape, for the processor with this kernel."""
    processors = {name: page.linear_processor(*kernel) for name, kernel in KERNELS.items()}
    processors |= {"none": None, "flipped": page.linear_processor((1.0, -1.0))}

    @jax.jit(static_argnames=("vocab", "name"))
    def run(tokens_BS, vocab, beta, name, sign):
        return page.recall(tokens_BS, jnp.eye(vocab), beta, processors[name], sign)

    def share_BV(tokens_BS, vocab, beta, name="paper", sign=-1.0):
        return np.asarray(run(np.asarray(tokens_BS), vocab, beta, name, sign))

    return share_BV


def draw_text(rng, vocab: int, length: int, times: int) -> tuple[np.ndarray, int]:
    """Draw a text of random other tokens with "Hakuna Matata" `times` times among them, and "Hakuna" at the end."""
    hakuna, matata = rng.choice(vocab, 2, replace=False)
    others = rng.choice(np.delete(np.arange(vocab), hakuna), length - 1 - 2 * times)
    pieces = [[other] for other in others] + [[hakuna, matata]] * times
    return np.concatenate([pieces[i] for i in rng.permutation(len(pieces))] + [[hakuna]]), matata


def weights(tokens_BS, beta: float) -> np.ndarray:
    """Return exp(score) of the last row after the kernel [-1, 1], from the page's table, in NumPy."""
    match_BS = np.asarray(tokens_BS) == np.asarray(tokens_BS)[:, -1:]
    return np.exp(beta * (np.pad(match_BS, ((0, 0), (1, 0)))[:, :-1] - match_BS.astype(float)))


def test_page_prints_its_output(page):
    (said,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert page.printed == said


@pytest.mark.parametrize("name", KERNELS)
def test_operator_is_the_linear_convolution_of_the_keys(page, name):
    kernel, alignment = KERNELS[name]
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 11, 1, 5))
    pos = jnp.arange(11)
    before, own = kernel[:2]
    convolved = own * np.asarray(k) + before * np.pad(k, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    processor = page.linear_processor(kernel, alignment)
    out = np.asarray(jax.jit(lambda k: attend(q, k, v, pos, pos, processor=processor))(k))
    plain = jax.jit(lambda k: attend(q, k, v, pos, pos))
    np.testing.assert_allclose(out, plain(convolved), rtol=0, atol=1e-5)
    assert np.abs(out - plain(k)).max() > 0.1


def test_every_short_text_has_the_shares_of_the_table(read):
    """Check all texts of six tokens over four words that end with "Hakuna", and recall with all kernels."""
    vocab, length, beta = 4, 6, 3.0
    texts_BS = np.array([(*text, HAKUNA) for text in itertools.product(range(vocab), repeat=length - 1)])
    weights_BS = weights(texts_BS, beta)
    is_BSV = np.eye(vocab)[texts_BS]
    expected_BV = np.einsum("BS,BSV->BV", weights_BS, is_BSV) / weights_BS.sum(1, keepdims=True)
    share_BV = read(texts_BS, vocab, beta)
    np.testing.assert_allclose(share_BV, expected_BV, rtol=1e-5)

    match_BS = texts_BS == HAKUNA
    after_BS = np.pad(match_BS, ((0, 0), (1, 0)))[:, :-1]
    hits, starts = (after_BS & ~match_BS).sum(1), (match_BS & ~after_BS).sum(1)
    np.testing.assert_array_equal(starts, hits + 1)
    total = hits * math.exp(beta) + starts * math.exp(-beta) + length - 2 * hits - 1
    np.testing.assert_allclose(weights_BS.sum(1), total)

    # e^3 exceeds all counts here, so recall is right if exactly one token other than "Hakuna" follows "Hakuna".
    follows_BV = np.einsum("BS,BSV->BV", (after_BS & ~match_BS).astype(int), is_BSV) > 0
    consistent = follows_BV.sum(1) == 1
    assert consistent.sum() > 500
    for name in KERNELS:
        # The pure shift also recalls "Hakuna" after "Hakuna", a second successor.
        asked = consistent & ~(after_BS & match_BS).any(1) if name == "shift" else consistent
        answers = read(texts_BS, vocab, beta, name).argmax(1)
        np.testing.assert_array_equal(answers[asked], follows_BV[asked].argmax(1))


@pytest.mark.parametrize(("vocab", "length", "times", "batch"), [(5, 17, 8, 64), (97, 4096, 3, 8)])
def test_hakuna_gives_matata(page, read, vocab, length, times, batch):
    rng, eps = np.random.default_rng([vocab, length]), 0.01
    texts, matata = zip(*(draw_text(rng, vocab, length, times) for _ in range(batch)), strict=True)
    beta = page.sharpness(length, eps, times)
    assert beta <= math.log((length - times) * (1 - eps) / (times * eps))
    share_BV = read(texts, vocab, beta)
    np.testing.assert_array_equal(share_BV.argmax(1), matata)
    share = share_BV[np.arange(batch), matata]
    assert share.min() >= 1 - eps - 1e-6
    # The bound is attained by texts with no other "Matata".
    alone = (np.array(texts) == np.array(matata)[:, None]).sum(1) == times
    np.testing.assert_allclose(share[alone], 1 - eps, rtol=0, atol=1e-5)
    # A softmax over the vocabulary needs its own scale.
    delta = 0.02
    gamma = math.log((vocab - 1) * (1 - delta) / delta) / (1 - 2 * eps)
    assert softmax(gamma * share_BV, axis=1)[np.arange(batch), matata].min() >= 1 - delta
    assert softmax(share_BV, axis=1).max() <= math.e / (math.e + vocab - 1)
    for name in KERNELS:
        np.testing.assert_array_equal(read(texts, vocab, beta, name).argmax(1), matata)


def test_without_the_convolution_no_better_than_chance(page, read):
    """Put the first "Hakuna" before each other token in turn: each has another answer, but the multiset is the same."""
    vocab, num_others, most, beta = 12, 62, 15, 12.0
    rng = np.random.default_rng(0)
    others = rng.permutation([7] * most + rng.choice(np.delete(np.arange(1, vocab), 6), num_others - most).tolist())
    assert np.sort(np.bincount(others))[-2] < most
    texts = np.array([[*others[:i], HAKUNA, *others[i:], HAKUNA] for i in range(num_others)])
    dape_v1 = DapeConfig(kernel_width=1, channels=8).build(num_heads=1, has_bias=False, rngs=nnx.Rngs(3))
    blind = jax.jit(lambda sign: page.recall(jnp.asarray(texts), jnp.eye(vocab), beta, dape_v1, sign))
    for sign, num_right in ((-1.0, most), (1.0, 0)):  # it predicts the most frequent token, or "Hakuna"
        plain_BV = read(texts, vocab, beta, "none", sign)
        for share_BV in (plain_BV, np.asarray(blind(sign))):
            np.testing.assert_allclose(share_BV, np.tile(share_BV[:1], (num_others, 1)), rtol=0, atol=1e-6)
        assert (plain_BV.argmax(1) == others).sum() == num_right
    assert (read(texts, vocab, beta).argmax(1) == others).all()
