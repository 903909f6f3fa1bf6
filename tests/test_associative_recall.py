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
    ("vocab", "length", "times", "batch"),
    [
        (3, 3, 1, 16),
        (3, 4, 1, 32),
        (5, 17, 8, 64),
        (11, 300, 4, 64),
        (50, 257, 1, 64),
        (257, 64, 2, 64),
        (400, 1000, 5, 16),
        (3, 4096, 1, 8),
        (97, 4096, 3, 8),
    ],
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


@pytest.mark.parametrize(("vocab", "length"), [(3, 8), (3, 4096), (6, 4096), (40, 500)])
def test_sharpness_of_the_arg_max_is_the_least(read, vocab, length):
    """e^beta must exceed the largest count, whether the other tokens are all equal or as different as possible."""
    for kinds in (1, vocab - 2):
        others = 2 + np.arange(length - 3) % kinds
        text = np.concatenate([others[:3], [HAKUNA, MATATA], others[3:], [HAKUNA]])
        needed = math.log(math.ceil((length - 3) / kinds))
        assert read([text], vocab, needed + 0.01).argmax() == MATATA
        assert read([text], vocab, needed - 0.01).argmax() == others[0]


def test_sharpness_where_hakuna_is_the_rival(read):
    """ "Hakuna" itself has r + 1 columns of e^-beta, and a column of weight 1 each time it follows itself."""
    needed = math.log(2) / 2
    for margin, answer in ((0.01, MATATA), (-0.01, HAKUNA)):
        assert read([[HAKUNA, MATATA, HAKUNA]], 3, needed + margin).argmax() == answer
    text = [HAKUNA] * 20 + [MATATA, HAKUNA]
    needed = math.log((19 + math.sqrt(19**2 + 8)) / 2)  # e^beta > 2 e^-beta + 19
    for margin, answer in ((0.01, MATATA), (-0.01, HAKUNA)):
        assert read([text], 3, needed + margin).argmax() == answer


def test_minus_identity_on_unit_vectors_is_too_blunt(read):
    """At beta = 1 three copies of another token outweigh "Matata", two do not, and at 4096 its share is almost 0."""
    assert read([[2, HAKUNA, MATATA, 2, HAKUNA]], 3, 1.0).argmax() == MATATA
    assert read([[2, HAKUNA, MATATA, 2, 2, HAKUNA]], 3, 1.0).argmax() == 2
    text = [HAKUNA, MATATA] + [2] * 4093 + [HAKUNA]
    assert read([text], 3, 1.0)[0, MATATA] == pytest.approx(math.e / (math.e + 2 / math.e + 4093), rel=1e-4)


@pytest.mark.parametrize("beta", [0.5, 3.0, 12.0])
def test_without_the_convolution_no_better_than_chance(read, beta):
    """Put the first "Hakuna" before each other token in turn: each has another answer, but the multiset is the same."""
    rng = np.random.default_rng(0)
    vocab, num_others, most = 12, 62, 15
    others = np.concatenate([np.full(most, 7), rng.choice(np.delete(np.arange(1, vocab), 6), num_others - most)])
    assert np.bincount(others).argmax() == 7
    assert np.sort(np.bincount(others))[-2] < most
    others = rng.permutation(others)
    texts = [[*others[:i], HAKUNA, *others[i:], HAKUNA] for i in range(num_others)]
    for sign in (-1.0, 1.0):
        share_BV = read(texts, vocab, beta, "none", sign)
        np.testing.assert_allclose(share_BV, np.tile(share_BV[:1], (num_others, 1)), rtol=0, atol=1e-6)
        right = (share_BV.argmax(1) == others).sum()
        if sign < 0:
            assert right == most  # it predicts the most frequent token, the only information in the multiset
        elif 2 * math.exp(beta) > most:
            assert right == 0  # it predicts "Hakuna"
        assert right <= most
    right = (read(texts, vocab, max(beta, 3.0)).argmax(1) == others).sum()
    assert right == num_others


def test_only_neighbours_tell_the_order(page, read):
    """Permuting earlier tokens changes the answer with the convolution, but not without it or with DAPE V1."""
    rng = np.random.default_rng(1)
    vocab, length, beta = 30, 50, 8.0
    text, hakuna, matata = draw_text(rng, vocab, length, 1)
    texts = [np.append(rng.permutation(text[:-1]), hakuna) for _ in range(40)]
    texts = np.array([text] + [t for t in texts if t[-2] != hakuna])
    follows = texts[np.arange(len(texts)), (texts[:, :-1] == hakuna).argmax(1) + 1]
    assert follows[0] == matata
    assert len(set(follows)) > 10
    share_BV = read(texts, vocab, beta)
    np.testing.assert_array_equal(share_BV.argmax(1), follows)
    dape_v1 = DapeConfig(kernel_width=1, channels=8).build(num_heads=1, has_bias=False, rngs=nnx.Rngs(3))
    blind = jax.jit(lambda sign: page.recall(jnp.asarray(texts), jnp.eye(vocab), beta, dape_v1, sign))
    for sign in (-1.0, 1.0):
        for share_BV in (read(texts, vocab, beta, "none", sign), np.asarray(blind(sign))):
            np.testing.assert_allclose(share_BV, np.tile(share_BV[:1], (len(texts), 1)), rtol=0, atol=1e-6)

    # One layer only: a second layer could use the order, since earlier rows see different prefixes.
    @jax.jit
    def two_layers():
        pos = jnp.arange(length)
        x_BSHK = jnp.eye(vocab)[texts][:, :, None]
        x_BSHK += attend(x_BSHK, x_BSHK, x_BSHK, pos, pos)
        return attend(3 * x_BSHK[:, -1:], x_BSHK, x_BSHK, pos[-1:], pos)

    assert np.ptp(np.asarray(two_layers()), axis=0).max() > 1e-3


def test_adjacent_pairs_are_all_that_it_sees(read):
    """Permuting adjacent pairs keeps the shares, up to rounding, so it cannot prefer the latest successor."""
    a, b, c = 2, 3, 4
    one = [HAKUNA, a, c, HAKUNA, b, c, HAKUNA]
    other = [HAKUNA, b, c, HAKUNA, a, c, HAKUNA]
    share_BV = read([one, other], 5, 6.0)
    np.testing.assert_allclose(share_BV[0], share_BV[1], rtol=1e-5)
    np.testing.assert_allclose(share_BV[:, a], share_BV[:, b], rtol=1e-5)


@pytest.mark.parametrize("beta", [1.0, 5.0, 12.0])
def test_several_successors_are_mixed_by_count(read, beta):
    a, b, c = 1, 2, 3
    text = [HAKUNA, a, c, HAKUNA, a, b, c, HAKUNA, b, HAKUNA, a, c, b, HAKUNA]  # a 3 times; b once, and twice elsewhere
    share_V = read([text], 4, beta)[0]
    assert share_V[a] / share_V[b] == pytest.approx(3 * math.exp(beta) / (math.exp(beta) + 2), rel=1e-4)
    assert share_V.argmax() == a
    if beta == 12.0:
        assert share_V[a] == pytest.approx(0.75, abs=1e-4)


def test_no_earlier_hakuna_is_not_noticed(read):
    share_V = read([[2, 3, 3, 1, 3, HAKUNA]], 4, 12.0)[0]
    np.testing.assert_allclose(share_V, [0, 1 / 5, 1 / 5, 3 / 5], rtol=0, atol=1e-4)


def test_hakuna_hakuna(read):
    """Kernel [-1, 1] cannot recall that a token follows itself; the pure shift can."""
    beta, vocab = 9.0, 5
    text = [2, HAKUNA, HAKUNA, 3, 2, HAKUNA, HAKUNA, 4, HAKUNA, HAKUNA, 2, 4, HAKUNA]  # itself 3 times, 3, 4 and 2 once
    assert read([text], vocab, beta, "shift").argmax() == HAKUNA
    share_V = read([text], vocab, beta)[0]
    np.testing.assert_allclose(share_V, [0, 0, 1 / 3, 1 / 3, 1 / 3], rtol=0, atol=1e-3)
    # It does not prevent "Hakuna Hakuna Matata", nor a last "Hakuna" after another.
    text = [2, HAKUNA, HAKUNA, MATATA, 2, 3, HAKUNA, HAKUNA]
    assert read([text], vocab, beta).argmax() == MATATA
    # Alone it keeps the earlier columns, and the current token's own column at weight 1.
    share_V = read([[2, 2, 3, HAKUNA, HAKUNA]], vocab, beta)[0]
    np.testing.assert_allclose(share_V, [1 / 4, 0, 2 / 4, 1 / 4, 0], rtol=0, atol=1e-4)


def test_wrong_sign_names_hakuna(read):
    rng = np.random.default_rng(2)
    texts, hakuna, _ = zip(*(draw_text(rng, 20, 60, 2) for _ in range(32)), strict=True)
    np.testing.assert_array_equal(read(texts, 20, 9.0, "paper", 1.0).argmax(1), hakuna)
    np.testing.assert_array_equal(read(texts, 20, 9.0, "flipped", -1.0).argmax(1), hakuna)
    both = read(texts, 20, 9.0, "flipped", 1.0)  # two wrong signs make the same scores
    np.testing.assert_allclose(both, read(texts, 20, 9.0), rtol=1e-4)


def test_residual_stream_needs_a_louder_head(read):
    text, hakuna, matata = draw_text(np.random.default_rng(3), 20, 60, 2)
    for beta in (6.0, 9.0, 14.0):
        share_V = read([text], 20, beta)[0]
        threshold = 1 / (share_V[matata] - share_V[hakuna])
        assert threshold > 1
        current_V = np.eye(20)[hakuna]
        assert (current_V + share_V).argmax() == hakuna
        assert (current_V + 0.999 * threshold * share_V).argmax() == hakuna
        assert (current_V + 1.001 * threshold * share_V).argmax() == matata


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


def unit_vectors(rng, vocab: int, width: int) -> tuple[np.ndarray, float]:
    """Return random embeddings, and the largest inner product between two of them."""
    embed_VK = rng.normal(size=(vocab, width))
    embed_VK /= np.linalg.norm(embed_VK, axis=1, keepdims=True)
    return embed_VK.astype(np.float32), np.abs(embed_VK @ embed_VK.T - np.eye(vocab)).max()


def test_nearly_orthogonal_embeddings(page):
    """Wide random embeddings recall with the page's sharpness; narrow ones do not at any sharpness."""
    rng = np.random.default_rng(5)
    vocab, length, times, eps = 200, 400, 2, 0.1
    texts, _, matata = zip(*(draw_text(rng, vocab, length, times) for _ in range(16)), strict=True)
    texts = np.array(texts)
    processor = page.linear_processor()
    recall = jax.jit(lambda embed_VK, beta: page.recall(jnp.asarray(texts), embed_VK, beta, processor))

    width = math.ceil(36 * math.log(vocab)) + 1
    wide_VK, mu = unit_vectors(rng, vocab, width)
    assert mu <= math.sqrt(4 * math.log(vocab) / width) < 1 / 3
    assert eps < (1 - mu) / 2
    beta = math.log((length - times) * (1 - eps) / (times * eps)) / (1 - 3 * mu)
    np.testing.assert_array_equal(recall(jnp.asarray(wide_VK), beta).argmax(1), matata)

    narrow_VK, mu = unit_vectors(rng, vocab, 6)
    assert mu > 1 / 3
    for beta in (3.0, 10.0, 100.0):
        assert (np.asarray(recall(jnp.asarray(narrow_VK), beta).argmax(1)) == matata).mean() < 0.5
