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

from dape_jax.model.attention import attend, score
from dape_jax.model.processors import DapeConfig

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "associative_recall.md"
HAKUNA, MATATA = 0, 1  # used if a test needs no other words: words are interchangeable, because their embeddings are
KERNELS = {  # kernels that recall according to the page, with their alignment
    "paper": ((-1.0, 1.0), "causal"),
    "shift": ((-1.0, 0.0), "causal"),
    "equation5": ((-1.0, 2.0), "causal"),
    "centered": ((-1.0, 1.0, 0.0), "centered"),
}


@pytest.fixture(scope="module")
def page():
    """Return the names that the page's code defines, and its output."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1, f"{PAGE}: one block of python is what this file tests, not {len(blocks)}"
    names, printed = {"__name__": "associative_recall"}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(blocks[0], str(PAGE), "exec"), names)
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


def draw_text(rng, vocab: int, length: int, times: int, place: str = "random") -> tuple[np.ndarray, int, int]:
    """Draw a text of random other tokens with "Hakuna Matata" `times` times among them, and "Hakuna" at the end."""
    hakuna, matata = rng.choice(vocab, 2, replace=False)
    others = rng.choice(np.delete(np.arange(vocab), hakuna), length - 1 - 2 * times)
    pieces = [[other] for other in others] + [[hakuna, matata]] * times
    order = rng.permutation(len(pieces))
    if place != "random":  # the last piece is a pair
        order = np.append(np.delete(order, order.argmax()), order.max())
        order = order[::-1] if place == "first" else order
    return np.concatenate([pieces[i] for i in order] + [[hakuna]]), hakuna, matata


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


@pytest.mark.parametrize(
    ("vocab", "length", "times", "batch"), [(3, 3, 1, 16), (5, 17, 8, 64), (11, 300, 4, 64), (97, 4096, 3, 8)]
)
def test_hakuna_gives_matata(page, read, vocab, length, times, batch):
    rng = np.random.default_rng([vocab, length])
    places = ["first", "last"] + ["random"] * (batch - 2)
    texts, hakuna, matata = zip(*(draw_text(rng, vocab, length, times, place) for place in places), strict=True)
    assert texts[0][:2].tolist() == [hakuna[0], matata[0]]
    assert texts[1][-3:].tolist() == [hakuna[1], matata[1], hakuna[1]]
    eps = 0.01
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
    if length == 17:
        for name in KERNELS:
            np.testing.assert_array_equal(read(texts, vocab, beta, name).argmax(1), matata)


A, B, C = 2, 3, 4
RUN = [HAKUNA] * 20 + [MATATA, HAKUNA]  # "Hakuna" has two columns of e^-beta, and 19 of weight 1
RIVAL = math.log((19 + math.sqrt(19**2 + 8)) / 2)  # e^beta > 2 e^-beta + 19
ITSELF = [A, HAKUNA, HAKUNA, B, A, HAKUNA, HAKUNA, C, HAKUNA, HAKUNA, A, C, HAKUNA]  # itself 3 times; 3, 4 and 2 once
ANSWERS = [  # text, beta, kernel, answer
    ([HAKUNA, MATATA, HAKUNA], math.log(2) / 2 + 0.01, "paper", MATATA),
    ([HAKUNA, MATATA, HAKUNA], math.log(2) / 2 - 0.01, "paper", HAKUNA),
    (RUN, RIVAL + 0.01, "paper", MATATA),
    (RUN, RIVAL - 0.01, "paper", HAKUNA),
    ([A, HAKUNA, MATATA, A, HAKUNA], 1.0, "paper", MATATA),  # three copies of another token outweigh it at beta = 1
    ([A, HAKUNA, MATATA, A, A, HAKUNA], 1.0, "paper", A),
    ([A, HAKUNA, HAKUNA, MATATA, A, B, HAKUNA, HAKUNA], 9.0, "paper", MATATA),
    (ITSELF, 9.0, "shift", HAKUNA),  # the kernel [-1, 1] cannot recall that a token follows itself
    *(([*[A] * (n > 0), HAKUNA, MATATA, *[A] * n, HAKUNA], math.log(n + 1) + 0.01, "paper", MATATA) for n in (2, 97)),
    *(([*[A] * (n > 0), HAKUNA, MATATA, *[A] * n, HAKUNA], math.log(n + 1) - 0.01, "paper", A) for n in (2, 97)),
]
SHARES = [  # text, beta, shares of "Hakuna", "Matata", A, B and C
    ([A, B, B, MATATA, B, HAKUNA], 12.0, [0, 1 / 5, 1 / 5, 3 / 5, 0]),  # no earlier "Hakuna" is not noticed
    (ITSELF, 9.0, [0, 0, 1 / 3, 1 / 3, 1 / 3]),
    ([A, A, B, HAKUNA, HAKUNA], 9.0, [1 / 4, 0, 2 / 4, 1 / 4, 0]),
    # Several successors are mixed by count, without a preference for the latest.
    ([HAKUNA, A, C, HAKUNA, B, C, HAKUNA], 12.0, [0, 0, 1 / 2, 1 / 2, 0]),
    ([HAKUNA, A, C, HAKUNA, A, B, C, HAKUNA, B, HAKUNA, A, C, B, HAKUNA], 12.0, [0, 0, 3 / 4, 1 / 4, 0]),
]


def test_answers_and_shares_of_the_conditions(read):
    for text, beta, name, answer in ANSWERS:
        assert read([text], 5, beta, name).argmax() == answer, (text, beta, name)
    for text, beta, expected in SHARES:
        np.testing.assert_allclose(read([text], 5, beta)[0], expected, rtol=0, atol=1e-3, err_msg=str(text))


def test_wrong_signs_and_the_residual_stream(read):
    rng = np.random.default_rng(2)
    texts, hakuna, matata = zip(*(draw_text(rng, 20, 60, 2) for _ in range(32)), strict=True)
    np.testing.assert_array_equal(read(texts, 20, 9.0, "paper", 1.0).argmax(1), hakuna)
    np.testing.assert_array_equal(read(texts, 20, 9.0, "flipped", -1.0).argmax(1), hakuna)
    share_BV = read(texts, 20, 9.0)
    np.testing.assert_allclose(read(texts, 20, 9.0, "flipped", 1.0), share_BV, rtol=1e-4)
    share_V, current_V = share_BV[0], np.eye(20)[hakuna[0]]
    threshold = 1 / (share_V[matata[0]] - share_V[hakuna[0]])
    assert threshold > 1
    assert (current_V + 0.999 * threshold * share_V).argmax() == hakuna[0]
    assert (current_V + 1.001 * threshold * share_V).argmax() == matata[0]


@pytest.mark.parametrize("beta", [0.5, 12.0])
def test_without_the_convolution_no_better_than_chance(page, read, beta):
    """Put the first "Hakuna" before each other token in turn: each has another answer, but the multiset is the same."""
    rng = np.random.default_rng(0)
    vocab, num_others, most = 12, 62, 15
    others = np.concatenate([np.full(most, 7), rng.choice(np.delete(np.arange(1, vocab), 6), num_others - most)])
    assert np.sort(np.bincount(others))[-2] < most
    others = rng.permutation(others)
    texts = np.array([[*others[:i], HAKUNA, *others[i:], HAKUNA] for i in range(num_others)])
    dape_v1 = DapeConfig(kernel_width=1, channels=8).build(num_heads=1, has_bias=False, rngs=nnx.Rngs(3))
    blind = jax.jit(lambda sign: page.recall(jnp.asarray(texts), jnp.eye(vocab), beta, dape_v1, sign))
    for sign in (-1.0, 1.0):
        plain_BV = read(texts, vocab, beta, "none", sign)
        for share_BV in (plain_BV, np.asarray(blind(sign))):
            np.testing.assert_allclose(share_BV, np.tile(share_BV[:1], (num_others, 1)), rtol=0, atol=1e-6)
        right = (plain_BV.argmax(1) == others).sum()
        if sign < 0:
            assert right == most  # it predicts the most frequent token, the only information in the multiset
        elif 2 * math.exp(beta) > most:
            assert right == 0  # it predicts "Hakuna"
    assert (read(texts, vocab, max(beta, 3.0)).argmax(1) == others).all()


def test_mask_hides_what_the_match_with_itself_points_at(page, read):
    """+beta is on the next column of every row, which contains its answer; attention still ignores it."""
    vocab, length, beta = 7, 24, 5.0
    texts_BS = np.random.default_rng(4).integers(0, vocab, (3, length))
    processor = page.linear_processor()

    @jax.jit
    def all_rows():
        x_BSHK = jnp.eye(vocab)[texts_BS][:, :, None]
        q_BTHK, pos = -beta * math.sqrt(vocab) * x_BSHK, jnp.arange(length)
        out_BTHK = attend(q_BTHK, x_BSHK, x_BSHK, pos, pos, processor=processor)
        return processor(*score(q_BTHK, x_BSHK, pos, pos)), out_BTHK

    processed, out = map(np.asarray, all_rows())
    rows = np.arange(length - 1)
    differs = texts_BS[:, 1:] != texts_BS[:, :-1]
    np.testing.assert_allclose(processed[:, 0, rows, rows + 1][differs], beta, rtol=1e-5)
    for stop in (1, 9, length):
        share_BV = read(texts_BS[:, :stop], vocab, beta)
        np.testing.assert_allclose(out[:, stop - 1, 0], share_BV, rtol=0, atol=1e-5)


def test_nearly_orthogonal_embeddings(page):
    """Wide random embeddings recall with the page's sharpness; narrow ones do not at any sharpness."""
    rng = np.random.default_rng(5)
    vocab, length, times, eps = 200, 400, 2, 0.1
    texts, _, matata = zip(*(draw_text(rng, vocab, length, times) for _ in range(16)), strict=True)
    recall = jax.jit(lambda x_VK, beta: page.recall(jnp.asarray(texts), x_VK, beta, page.linear_processor()))

    def unit_vectors(width: int) -> tuple[np.ndarray, float]:
        x_VK = rng.normal(size=(vocab, width)).astype(np.float32)
        x_VK /= np.linalg.norm(x_VK, axis=1, keepdims=True)
        return x_VK, float(np.abs(x_VK @ x_VK.T - np.eye(vocab)).max())

    width = math.ceil(36 * math.log(vocab)) + 1
    wide_VK, mu = unit_vectors(width)
    assert mu <= math.sqrt(4 * math.log(vocab) / width) < 1 / 3
    assert eps < (1 - mu) / 2
    beta = math.log((length - times) * (1 - eps) / (times * eps)) / (1 - 3 * mu)
    np.testing.assert_array_equal(recall(wide_VK, beta).argmax(1), matata)
    narrow_VK, mu = unit_vectors(6)
    assert mu > 1 / 3
    for beta in (3.0, 10.0, 100.0):
        assert (np.asarray(recall(narrow_VK, beta).argmax(1)) == matata).mean() < 0.5
