"""PyTorch operator and model: values and gradients of the golden vectors and of JAX."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import ALL_BIASES, ALL_PROCESSORS, SMALL_BIAS, make_bias, make_processor
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden import FLOAT32_FACTOR, build, files, load, longest_of_each_method, name

from dape_jax.config import CHOICES
from dape_jax.model.attention import Dense
from dape_jax.model.positions import ROTARY, Llama3Rope, Yarn
from dape_jax.model.processors import DapeConfig, Plain, ScoreMod
from dape_jax.model.scores import Mask
from dape_jax.model.transformer import flat_params
from dape_jax.pretrained import modeling_dape as theirs
from dape_jax.pretrained.export import EXPORTED

torch.set_num_threads(1)

LENGTH = 13


def as_torch(module: torch.nn.Module | None, ours: Any) -> Any:
    """Copy the parameters of one of our modules to its PyTorch twin, in double precision."""
    if module is None:
        assert ours is None or isinstance(ours, Plain)
        return None
    params = flat_params(nnx.to_pure_dict(nnx.state(ours, nnx.Param)))
    state = {".".join(path): torch.tensor(np.asarray(leaf, np.float64)) for path, leaf in params.items()}
    module.double().load_state_dict(state)
    return module


def random_params(module: Any, seed: int) -> Any:
    """Return a module whose parameters are random, none of them 0."""
    if module is None:
        return None
    draw = np.random.default_rng(seed)
    graphdef, state = nnx.split(module)

    def random(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        numbers = draw.normal(0, 0.4, leaf.shape)
        is_positive = any(key in jax.tree_util.keystr(path) for key in ("p_H", "a_H", "'c'", "threshold"))
        return jnp.asarray(np.exp(numbers) if is_positive else numbers)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(random, state))


def operator_cases() -> list:
    """Return every bias with and without DAPE1x3, every processor with and without a bias; the quick ones once."""
    biases, processors = list(ALL_BIASES), list(ALL_PROCESSORS)
    chosen = {*itertools.product(biases, ("none", "dape3")), *itertools.product(("kerple", "nope"), processors)}
    chosen -= {("nope", "of_bias")}
    fast = {(bias, processors[i % len(processors)]) for i, bias in enumerate(biases)} | {("kerple", "dape3")}
    fast -= {("nope", "of_bias")}
    return [
        pytest.param(*case, marks=() if case in fast else pytest.mark.slow, id="-".join(case))
        for case in sorted(chosen | fast)
    ]


def test_export_knows_the_biases_and_processors():
    assert set(EXPORTED["bias"]) == {"nope", *theirs.BIASES}
    assert set(EXPORTED["processor"]) == set(theirs.PROCESSORS)


@pytest.mark.parametrize(("bias", "processor"), operator_cases())
def test_values_and_gradients_are_those_of_jax(bias, processor, float64):
    """Compare in float64, with grouped keys and a window, in one block and in blocks of rows."""
    H, K, window = 4, 6, 7
    score_mod = ScoreMod(
        random_params(make_bias(bias, H, K), 1),
        random_params(make_processor(processor, H, bias != "nope", jnp.float64), 2),
    )
    draw = np.random.default_rng(0)
    q, k, v, weight = (draw.normal(size=(2, LENGTH, heads, K)) for heads in (H, 2, 2, H))
    pos = jnp.arange(LENGTH)
    graphdef, params = nnx.split(score_mod)

    @jax.jit
    def loss(params, q, k, v):
        out = Dense()(q, k, v, pos, pos, nnx.merge(graphdef, params), Mask(True, window))
        return (out * weight).sum(), out

    (_, expected), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(
        params, *map(jnp.asarray, (q, k, v))
    )
    options = SMALL_BIAS.get(bias, {})
    bias_module = as_torch(theirs.make_bias({"name": bias} | options, H, K), score_mod.bias)
    config = ALL_PROCESSORS[processor]
    spec = {"name": "dape", **vars(config)} if isinstance(config, DapeConfig) else {"name": "none"}
    processor_module = as_torch(theirs.make_processor(spec, H, bias != "nope"), score_mod.processor)
    for block_size in (None, 4):
        inputs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
        modules = [module for module in (bias_module, processor_module) if module is not None]
        for module in modules:
            module.zero_grad()
        out = theirs.attend(*inputs, bias=bias_module, processor=processor_module, window=window, block_size=block_size)
        np.testing.assert_allclose(out.detach().numpy(), expected, rtol=0, atol=1e-10)
        (out * torch.tensor(weight)).sum().backward()
        for found, gradient in zip(inputs, gradients[1:], strict=True):
            np.testing.assert_allclose(found.grad.numpy(), gradient, rtol=0, atol=1e-9)
        of_params = flat_params(nnx.to_pure_dict(gradients[0]))
        found = {
            f"{part}.{key}": parameter.grad.numpy()
            for part, module in (("bias", bias_module), ("processor", processor_module))
            if module is not None
            for key, parameter in module.named_parameters()
        }
        assert len(found) == len(of_params)
        for path, gradient in of_params.items():
            key = ".".join(map(str, path)).replace("0.", "bias.", 1).replace("1.", "processor.", 1)
            np.testing.assert_allclose(found[key], gradient, rtol=1e-9, atol=1e-8, err_msg=key)


GOLDEN = [
    pytest.param(
        file, id=name(file), marks=() if file in longest_of_each_method(files("attention")) else pytest.mark.slow
    )
    for file in files("attention")
]


@pytest.mark.parametrize("file", GOLDEN)
def test_golden(file, float64):
    """Compare outputs and gradients of queries, keys and values in float64 to 1e-10, and outputs in float32."""
    data, meta = load(file)
    params = {x.removeprefix("param."): jnp.asarray(value) for x, value in data.items() if x.startswith("param.")}
    ours = build(params, meta)
    kind = meta["name"].split("_")[0]
    H, K = meta["H"], data["q"].shape[-1]
    specs = {
        "t5": {"num_buckets": meta.get("num_buckets"), "max_distance": meta.get("max_distance")},
        "cope": {"num_positions": meta.get("npos_max")},
    }
    if kind == "fire":
        width, threshold = params["mlp.0.weight"].shape[0], meta["init_L_argument"] // 2
        activation = "leaky_relu" if "dape" in meta["name"] else "relu"
        specs["fire"] = {"threshold": threshold, "width": width, "activation": activation}
    names = {"transformer": "transformer_xl", "rope": "nope"}
    spec = {"name": names.get(kind, kind)} | specs.get(kind, {})
    bias = as_torch(theirs.make_bias(spec, H, K), ours[0])
    processor = None
    if "dape" in meta["name"]:
        width, channels = ours[1].output_WCH.shape[:2]
        options = {"name": "dape", "kernel_width": width, "channels": channels, "edge": "listing"}
        processor = as_torch(theirs.make_processor(options, H, bias is not None), ours[1])
    q, k, v = (torch.tensor(data[x], requires_grad=True) for x in "qkv")
    rope = {"name": "rope", "base": 10_000.0, "fraction": 1.0} if kind == "rope" else {"name": "none"}
    pos = torch.arange(meta["T"])[None]
    heads_last = [x.movedim(1, 2) for x in (q, k, v)]
    rotated = [theirs.rotate(x, pos, rope) for x in heads_last[:2]]
    out = theirs.attend(*rotated, heads_last[2], bias=bias, processor=processor, block_size=16).movedim(2, 1)
    np.testing.assert_allclose(out.detach().numpy(), data["out"], rtol=0, atol=1e-10)
    (out * torch.tensor(data["cot"])).sum().backward()
    for x, tensor in (("q", q), ("k", k), ("v", v)):
        scale = max(1.0, float(np.abs(data[f"grad.{x}"]).max()))
        np.testing.assert_allclose(tensor.grad.numpy(), data[f"grad.{x}"], rtol=0, atol=1e-10 * scale)
    for module in (bias, processor):
        if module is not None:
            module.float()
    with torch.no_grad():
        rotated = [theirs.rotate(x.float(), pos, rope) for x in heads_last[:2]]
        out = theirs.attend(*rotated, heads_last[2].float(), bias=bias, processor=processor).movedim(2, 1)
    assert out.dtype == torch.float32
    error = FLOAT32_FACTOR * meta["max_abs_diff_f32_vs_f64"]["out"]
    np.testing.assert_allclose(out.numpy(), data["out"], rtol=0, atol=error)


@functools.cache
def layer(heads: int, width: int) -> tuple[theirs.Kerple, theirs.Dape]:
    torch.manual_seed(0)
    return theirs.Kerple(heads).double(), theirs.Dape(heads, True, kernel_width=width, channels=3).double()


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 24),
    rows=st.integers(1, 24),
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 3, 5]),
    block_size=st.integers(1, 9),
    num_left=st.integers(0, 4),
    window=st.none() | st.integers(1, 9),
)
def test_blocks_rows_and_padding_change_nothing(length, rows, heads, width, block_size, num_left, window):
    """Compare the last rows alone, as with a cache; rows in blocks; and padding to the left with other numbers."""
    bias, processor = layer(heads, width)
    options = {"bias": bias, "processor": processor, "window": window}
    torch.manual_seed(length)
    q, k, v = torch.randn(3, 1, num_left + length, heads, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs.attend(q[:, num_left:], k[:, num_left:], v[:, num_left:], **options)
        rows = min(rows, length)
        last = theirs.attend(q[:, -rows:], k[:, num_left:], v[:, num_left:], block_size=block_size, **options)
        torch.testing.assert_close(last, expected[:, -rows:], rtol=1e-11, atol=1e-11)
        pos = torch.arange(num_left + length)[None] - num_left
        padded = theirs.attend(q, k, v, k_pos_BS=pos, block_size=block_size, **options)[:, num_left:]
        torch.testing.assert_close(padded, expected, rtol=1e-11, atol=1e-11)


LEAKING = {
    "leak": DapeConfig(kernel_width=3, channels=3, leak=True),
    "causal_leak": DapeConfig(kernel_width=3, channels=3, leak=True, alignment="causal"),
    "listing": DapeConfig(kernel_width=5, channels=3, edge="listing"),
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("bias", "processor"),
    [
        *((bias, "dape5") for bias in ALL_BIASES),
        *(("fire", processor) for processor in (*ALL_PROCESSORS, *LEAKING) if processor != "dape5"),
    ],
)
def test_rows_of_every_method_are_the_same_alone_in_blocks_and_padded(bias, processor, window):
    """Compare the last rows alone, as with a cache; in blocks; and with different padding for each sequence."""
    torch.manual_seed(0)
    module = theirs.make_bias({"name": bias} | SMALL_BIAS.get(bias, {}), 4, 6)
    config = (ALL_PROCESSORS | LEAKING)[processor]
    spec = {"name": "dape", **vars(config)} if isinstance(config, DapeConfig) else {"name": "none"}
    made = theirs.make_processor(spec | {"init": "uniform"} if "kernel_width" in spec else spec, 4, bias != "nope")
    for part in (module, made):
        for parameter in () if part is None else part.double().parameters():
            torch.nn.init.uniform_(parameter, 0.1, 1.0) if parameter.ndim < 2 else torch.nn.init.normal_(parameter)
    options = {"bias": module, "processor": made, "window": window}
    q, k, v = (torch.randn(2, 17, heads, 6, dtype=torch.float64) for heads in (4, 2, 2))
    with torch.no_grad():
        expected = theirs.attend(q, k, v, **options)
        assert expected.std() > 0.1
        alone = theirs.attend(q[:, -3:], k, v, **options)
        torch.testing.assert_close(alone, expected[:, -3:], rtol=1e-11, atol=1e-11)
        for block_size in (1, 4, 16):
            found = theirs.attend(q, k, v, block_size=block_size, **options)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        num_left = torch.tensor([[3], [8]])
        junk = [torch.randn(2, 17 + 8, *x.shape[2:], dtype=torch.float64) for x in (q, k, v)]
        rows = [slice(int(n), int(n) + 17) for n in num_left]
        for row, part in enumerate(rows):
            for x, values in zip(junk, (q, k, v), strict=True):
                x[row, part] = values[row]
        # The first sequence is padded on the right too, where no processor that reads the future may see it.
        last = 17 + 8 if made is None or made.why_not_cached is None else None
        for row in range(2) if last else (1,):
            one = [x[row : row + 1] for x in junk]
            pos = (torch.arange(17 + 8) - num_left[row])[None]
            padded = theirs.attend(*one, k_pos_BS=pos, block_size=7, **options)[0, rows[row]]
            torch.testing.assert_close(padded, expected[row], rtol=1e-10, atol=1e-10)
        if last:
            padded = theirs.attend(*junk, k_pos_BS=torch.arange(17 + 8)[None] - num_left, **options)
            for row, part in enumerate(rows):
                torch.testing.assert_close(padded[row, part], expected[row], rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize("rotary", [*(n for n in ROTARY if n != "none"), "fraction"])
def test_rotary_embeddings_are_those_of_jax(rotary, float64):
    rope = {"name": "rope", "base": 100.0, "fraction": 1.0}
    kinds = {
        "rope": ROTARY["rope"](100.0),
        "pi": ROTARY["pi"](100.0, 4.0),
        "ntk": ROTARY["ntk"](100.0, 4.0),
        "yarn": Yarn(100.0, 4.0, 64),
        "llama3": Llama3Rope(100.0, 4.0, 1.0, 4.0, 32),
        "fraction": ROTARY["rope"](100.0, fraction=0.5),
    }
    ours = kinds[rotary]
    spec = rope | {"name": "rope" if rotary == "fraction" else rotary} | vars(ours)
    x = np.random.default_rng(0).normal(size=(1, 9, 2, 16))
    pos = np.arange(9) * 11
    found = theirs.rotate(torch.tensor(x), torch.tensor(pos)[None], spec)
    np.testing.assert_allclose(found, ours(jnp.asarray(x), jnp.asarray(pos)), rtol=0, atol=1e-12)
    assert np.abs(found.numpy() - x).max() > 0.5


def test_memory_of_long_inputs_is_linear():
    """With 8,192 keys and 1 head, all scores would take 256 MiB in float32, and a block of 64 rows takes 2 MiB.

    With a window of 30, the rows of a block read 64 + 29 keys, and one more for the convolution.
    """
    torch.manual_seed(0)
    bias, processor = theirs.Kerple(1), theirs.Dape(1, True, channels=1)
    q, k, v = torch.randn(3, 1, 8192, 1, 4)
    sizes = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    with torch.no_grad(), Largest():
        out = theirs.attend(q, k, v, bias=bias, processor=processor, block_size=64)
    assert out.shape == (1, 8192, 1, 4)
    assert max(sizes) <= 65 * 8192 * 2
    sizes.clear()
    with torch.no_grad(), Largest():
        theirs.attend(q, k, v, bias=bias, processor=processor, block_size=64, window=30)
    assert max(sizes) == 8192 * 4  # the result
    with torch.no_grad():
        first = theirs.attend(q[:, :256], k[:, :256], v[:, :256], bias=bias, processor=processor)
    torch.testing.assert_close(out[:, :256], first)


def attend_random(num_rows: int = 5, key_heads: int = 4, **options: Any) -> torch.Tensor:
    q, k = torch.randn(1, num_rows, 4, 8), torch.randn(1, 5, key_heads, 8)
    return theirs.attend(q, k, k, **options)


def test_every_method_is_in_both():
    assert {"nope", *theirs.BIASES} == set(CHOICES["bias"])
    assert set(theirs.PROCESSORS) == set(CHOICES["processor"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: theirs.Dape(2, True, kernel_width=2), "kernel_width = 2: must be odd"),
        (lambda: theirs.Dape(2, False, inputs="bias"), "inputs = 'bias'"),
        (lambda: theirs.Dape(2, True, edge="left"), "edge = 'left': must be one of"),
        (lambda: theirs.DapeConfig(norm="batch"), "norm = 'batch': must be one of"),
        (lambda: theirs.DapeConfig(bias={"name": "alibis"}), "bias = 'alibis': must be one of"),
        (lambda: theirs.DapeConfig(num_heads=6, num_kv_heads=4), "num_kv_heads = 4: must divide 6"),
        (lambda: attend_random(processor=theirs.Dape(4, True)), "bias: none is given, .* made with has_bias=True"),
        (lambda: attend_random(bias=theirs.Alibi(4), processor=theirs.Dape(4, False)), "bias: one is given"),
        (lambda: attend_random(key_heads=3), "heads of k = 3: must divide the 4 heads of q"),
        (lambda: attend_random(num_rows=6), "q_pos_BT = None: must be given for more rows than keys"),
        (lambda: attend_random(window=0), "window = 0: must be 1 or more"),
        (lambda: attend_random(block_size=0), "block_size = 0: must be 1 or more"),
        (lambda: theirs.DapeConfig(causal=False), "causal = False: must be True"),
    ],
)
def test_impossible_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
