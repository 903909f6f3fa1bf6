"""Test `experiments/needle.py`: the place of the needle in a window, and a model whose update is zero."""

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from dape_jax.config import read_model
from dape_jax.data.tokenizers import Bytes
from dape_jax.model.transformer import Transformer, flat_params
from experiments import needle as script


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0, None])
def test_a_window_has_the_needle_at_its_depth(depth):
    hidden = script.make_needle(3, Bytes())
    text = np.frombuffer(b"0" * 100 + b"abcdefghij" * 40, np.uint8).astype(np.int32)
    tokens = script.window_tokens(text, hidden, 300, depth)
    window = tokens.astype(np.uint8).tobytes()
    sentence, question, value = (part.astype(np.uint8).tobytes() for part in vars(hidden).values())
    assert len(window) == 300
    assert window.endswith(question + value)
    assert sentence.endswith(value + b". ")
    assert window.count(value) == (1 if depth is None else 2)
    rest = window[: -len(question + value)].replace(sentence, b"")
    assert rest == text.astype(np.uint8).tobytes()[-len(rest) :]  # from the end of the text, in order
    if depth is not None:
        assert window.index(sentence) == round(depth * len(rest))
    assert len({script.make_needle(number, Bytes()).value.tobytes() for number in range(50)}) > 45


def test_without_its_update_a_model_is_that_with_the_plain_bias():
    spec = tiny.SPEC["model"] | {"bias": {"name": "kerple"}}
    model = read_model(spec)
    plain = read_model(spec | {"processor": {"name": "none"}})
    init = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Transformer(model, rngs=nnx.Rngs(0)), nnx.Param)))
    params = init()
    tokens = jax.random.randint(jax.random.key(0), (2, 20), 0, 257)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    step = script.make_step(model, 5)
    zeroed, _ = step(script.without_update(params), batch)
    trained, _ = step(params, batch)
    assert np.abs(trained - zeroed).max() > 1e-5
    without_dape = {path: leaf for path, leaf in flat_params(params).items() if "processor" not in path}
    nested = nnx.traversals.unflatten_mapping(without_dape)
    expected, hits = script.make_step(plain, 5)(nested, batch)
    np.testing.assert_allclose(zeroed, expected, rtol=1e-5, atol=1e-6)
    assert hits.shape == expected.shape == (2, 5)
