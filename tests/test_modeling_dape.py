"""PyTorch operator: values and gradients of JAX, and linear memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import ALL_PROCESSORS, SMALL_BIAS, make_bias, make_processor

import dape_jax
from dape_jax.model.positions import ROTARY, Llama3Rope, Yarn
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import TransformerConfig, flat_params
from dape_jax.pretrained import modeling_dape as theirs
from dape_jax.pretrained.export import EXPORTED
from dape_jax.pretrained.families import NOT_EXPORTED

pytestmark = [pytest.mark.hf, pytest.mark.extra]
torch.set_num_threads(1)

# Every bias, and every option of DAPE.
CASES = (
    *(("nope", "causal4"), ("nope", "dape3"), ("alibi", "none"), ("kerple", "dape1"), ("kerple", "dape3")),
    *(("t5", "equation2"), ("t5", "of_scores"), ("fire", "of_bias")),
)


def make_twins(bias: str, processor: str, heads: int, head_dim: int) -> torch.nn.ModuleDict:
    """Return PyTorch's bias and processor in double precision, or None, as arguments of `attend`."""
    config = ALL_PROCESSORS[processor]
    spec = {"name": "dape", **vars(config)} if isinstance(config, DapeConfig) else {"name": "none"}
    twins = {
        "bias": theirs.make_bias({"name": bias} | SMALL_BIAS.get(bias, {}), heads, head_dim),
        "processor": theirs.make_processor(spec, heads, bias != "nope"),
    }
    return torch.nn.ModuleDict(twins).double()


def by_name(params: Any) -> dict[str, torch.Tensor]:
    return {".".join(path): torch.tensor(np.asarray(x)) for path, x in flat_params(nnx.to_pure_dict(params)).items()}


def random_param(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    """Return a random parameter without a 0."""
    name = jax.tree_util.keystr(path)
    numbers = np.random.default_rng(sum(name.encode())).normal(0, 0.4, leaf.shape)
    is_positive = any(key in name for key in ("p_H", "a_H", "'c'", "threshold"))
    return jnp.asarray(np.exp(numbers) if is_positive else numbers)


def test_all_that_is_exported_is_there():
    """A field of the model that PyTorch lacks would be ignored."""
    assert set(EXPORTED["bias", "name"]) == {"nope", *theirs.BIASES} == {bias for bias, _ in CASES}
    fields = {field.name for field in dataclasses.fields(TransformerConfig)} - set(NOT_EXPORTED)
    assert fields == set(theirs.DEFAULTS) - {"max_position_embeddings", "use_cache"}


@pytest.mark.parametrize(("bias", "processor"), CASES)
def test_values_and_gradients_are_those_of_jax(bias, processor, float64):
    """Compare in float64, with grouped keys and a window, in one block and in blocks of rows."""
    length, H, K, window = 13, 4, 6, 7
    modules = {"bias": make_bias(bias, H, K), "processor": make_processor(processor, H, bias != "nope", jnp.float64)}
    graphdef, params = nnx.split(nnx.Dict(modules))
    params = jax.tree_util.tree_map_with_path(random_param, params)
    draw = np.random.default_rng(0)
    q, k, v, weight = (draw.normal(size=(2, length, heads, K)) for heads in (H, 2, 2, H))
    pos = jnp.arange(length)

    @jax.jit
    def loss(params, q, k, v):
        out = dape_jax.attend(q, k, v, pos, pos, **nnx.merge(graphdef, params), window=window)
        return (out * weight).sum(), out

    (_, expected), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(
        params, *map(jnp.asarray, (q, k, v))
    )
    twins = make_twins(bias, processor, H, K)
    twins.load_state_dict(by_name(params))
    for block_size in (None, 4):
        inputs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
        twins.zero_grad()
        out = theirs.attend(*inputs, **twins, window=window, block_size=block_size)
        np.testing.assert_allclose(out.detach().numpy(), expected, rtol=0, atol=1e-10)
        (out * torch.tensor(weight)).sum().backward()
        for found, gradient in zip(inputs, gradients[1:], strict=True):
            np.testing.assert_allclose(found.grad.numpy(), gradient, rtol=0, atol=1e-9)
        of_params, found = by_name(gradients[0]), dict(twins.named_parameters())
        assert found.keys() == of_params.keys()
        for name, gradient in of_params.items():
            torch.testing.assert_close(found[name].grad, gradient, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_convolution_of_accelerators_is_that_of_cpus(width, monkeypatch):
    """Compare values and gradients of the matmuls, used because cuDNN would round float32."""
    torch.manual_seed(0)
    x, kernel = torch.randn(2, 3, 4, 9, dtype=torch.float64), torch.randn(width, 3, 5, dtype=torch.float64)
    results = []
    for convolve in (lambda x, kernel: theirs.key_convolution(x, kernel, (0, 0)), theirs.convolution_by_taps):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, kernel)]
        y = convolve(*inputs)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    monkeypatch.delattr(torch.nn.functional, "conv2d")
    assert theirs.key_convolution(x.to("meta"), kernel.to("meta"), (1, 2)).shape == (2, 5, 4, 9 + 3 - width + 1)


def test_autocast_does_not_round_scores():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 40, 4, 16)
    options = {"bias": theirs.Alibi(4), "processor": theirs.Dape(4, True, channels=3)}
    gradients = []
    for is_on in (False, True):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            assert (inputs[0] @ inputs[1].mT).dtype == (torch.bfloat16 if is_on else torch.float32)
            out = theirs.attend(*inputs, block_size=9, **options)
        gradients.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_rotary_embeddings_are_those_of_jax(float64):
    rope = {"name": "rope", "base": 100.0, "fraction": 1.0}
    kinds = {
        "rope": ROTARY["rope"](100.0),
        "pi": ROTARY["pi"](100.0, 4.0),
        "ntk": ROTARY["ntk"](100.0, 4.0),
        "yarn": Yarn(100.0, 4.0, 64),
        "llama3": Llama3Rope(100.0, 4.0, 1.0, 4.0, 32),
        "fraction": ROTARY["rope"](100.0, fraction=0.5),
    }
    assert {*kinds, "none"} == {*EXPORTED["rotary", "name"], "fraction"}
    x, pos = np.random.default_rng(0).normal(size=(1, 9, 2, 16)), np.arange(9) * 11
    for name, ours in kinds.items():
        spec = rope | {"name": "rope" if name == "fraction" else name} | vars(ours)
        found = theirs.rotate(torch.tensor(x), torch.tensor(pos)[None], spec)
        np.testing.assert_allclose(found, ours(jnp.asarray(x), jnp.asarray(pos)), rtol=0, atol=1e-12)
        assert np.abs(found.numpy() - x).max() > 0.5


def test_memory_of_long_inputs_is_linear():
    """With 4,096 keys and 1 head, all scores would take 64 MiB in float32, and a block of 64 rows takes 1 MiB.

    With a window of 30, the rows of a block read 64 + 29 keys, and one more for the convolution.
    """
    torch.manual_seed(0)
    options = {"bias": theirs.Kerple(1), "processor": theirs.Dape(1, True, channels=1), "block_size": 64}
    q, k, v = torch.randn(3, 1, 4096, 1, 4)
    sizes = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    # With a window, the largest array is the result.
    for window, largest in ((None, 65 * 4096 * 2), (30, 4096 * 4)):
        sizes.clear()
        with torch.no_grad(), Largest():
            assert theirs.attend(q, k, v, **options, window=window).shape == (1, 4096, 1, 4)
        assert max(sizes) <= largest


def attend_random(num_rows: int = 5, key_heads: int = 4, **options: Any) -> torch.Tensor:
    q, k = torch.randn(1, num_rows, 4, 8), torch.randn(1, 5, key_heads, 8)
    return theirs.attend(q, k, k, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: theirs.Dape(2, True, kernel_width=2), "kernel_width = 2: must be odd"),
        (lambda: theirs.Dape(2, False, inputs="bias"), "inputs = 'bias'"),
        (lambda: theirs.make_processor({"name": "dape", "edge": "listing"}, 2, True), "edge = 'listing': must be one"),
        (lambda: theirs.make_processor({"name": "dape", "leak": True}, 2, True), "leak = True: must be one of"),
        (lambda: theirs.DapeConfig(norm="batch"), "norm = 'batch': must be one of"),
        (lambda: theirs.DapeConfig(bias={"name": "alibis"}), "bias = 'alibis': must be one of"),
        (lambda: theirs.DapeConfig(causal=False), "causal = False: must be one of"),
        (lambda: attend_random(processor=theirs.Dape(4, True)), "must be given, as has_bias=True"),
        (lambda: attend_random(bias=theirs.Alibi(4), processor=theirs.Dape(4, False)), "must be None, as has_bias=Fa"),
        (lambda: attend_random(key_heads=3), "heads of k = 3: must divide the 4 heads of q"),
        (lambda: attend_random(num_rows=6), "rows of q = 6: must be at most the 5 keys"),
        (lambda: attend_random(window=0), "window = 0: must be 1 or more"),
        (lambda: attend_random(block_size=0), "block_size = 0: must be 1 or more"),
    ],
)
def test_impossible_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
