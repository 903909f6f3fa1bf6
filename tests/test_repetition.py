"""Test `experiments/repetition.py` and `copying.py`: what copying predicts, against a search of the text."""

import numpy as np
import pytest

from experiments import copying, repetition


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


def test_a_period_is_predicted_from_a_context_that_contains_it():
    tokens = np.tile(np.arange(10, dtype=np.int32), 8)
    reach, copied = repetition.latest_match(tokens, 4, 10)
    assert set(reach.tolist()) == {14}  # a period and the tokens that must be equal
    np.testing.assert_array_equal(copied, tokens[-10:])
    reach, copied = repetition.latest_match(np.arange(80, dtype=np.int32), 4, 10)
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
    assert sum(each["share"] for each in records.values()) == pytest.approx(1)
    without_far = np.where(classes == 1, 0, classes)
    assert {each["class"] for each in copying.measure(nll, base, without_far, np.arange(6))} == {"near", "other"}
