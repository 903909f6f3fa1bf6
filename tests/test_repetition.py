"""Test `scripts/repetition.py`: what copying predicts, against a search of the text."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import repetition as script


@pytest.mark.parametrize("match", [1, 3])
def test_copies_are_those_that_a_search_finds(match: int):
    tokens = np.random.default_rng(0).integers(3, size=200).astype(np.int32)
    text, scored = tokens.astype(np.uint8).tobytes(), 50
    reach, copied = script.latest_match(tokens, match, scored)
    by_length = []
    for length in (match + 1, 20, 150):
        found = []
        for at in range(len(tokens) - scored, len(tokens)):
            start = text.rfind(text[at - match : at], at - length, at - 1)  # the occurrence ends before the token
            found.append(-1 if start < 0 else text[start + match])
        assert np.where(reach <= length, copied, -1).tolist() == found
        by_length.append(np.mean(np.array(found) >= 0))
    assert 0 < by_length[0] < by_length[1] < by_length[2]


def test_a_period_is_predicted_from_a_context_that_contains_it():
    tokens = np.tile(np.arange(10, dtype=np.int32), 8)
    reach, copied = script.latest_match(tokens, 4, 10)
    assert set(reach.tolist()) == {14}  # a period and the tokens that must be equal
    np.testing.assert_array_equal(copied, tokens[-10:])
    reach, copied = script.latest_match(np.arange(80, dtype=np.int32), 4, 10)
    assert (reach > 80).all()
    assert (copied == -1).all()
