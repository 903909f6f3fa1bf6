"""`docs/library.md`: its code is run, its claims are checked, and its stable names are listed here."""

import ast
import dataclasses
import functools
import importlib
import inspect
import operator
import pickle
import re
import types
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from helpers import random_params
from jax.sharding import NamedSharding, PartitionSpec
from processes import ROOT, run_python
from tiny import SPEC

import dape_jax
from dape_jax import (
    AlibiConfig,
    Blockwise,
    DapeConfig,
    Dense,
    KerpleConfig,
    Transformer,
    TransformerConfig,
    attend,
    dape,
    masked_softmax,
)
from dape_jax.config import read_model
from dape_jax.model import attention, processors
from dape_jax.model.flops import forward_flops
from dape_jax.model.processors import PlainConfig
from dape_jax.model.transformer import model_structure

PAGE = ROOT / "docs" / "library.md"

# Other programs rely on these names. Removing a name or an argument, or changing the name or the shape of a parameter,
# breaks them, so edit this list only deliberately.
STABLE = set(
    """
    attend Dense Blockwise Fused Auto score masked_softmax dape distances kerple key_convolution AlibiConfig
    KerpleConfig KerplePowerConfig SandwichConfig T5Config FireConfig CopeConfig TransformerXLConfig DapeConfig Rope
    PositionInterpolation NtkAware Yarn Llama3Rope BIASES PROCESSORS Bias BiasConfig DistanceBias ContextualBias
    Processor ProcessorConfig TransformerConfig Transformer Cache make_cache InputError
    """.split()
)
ARGUMENTS = {  # as inspect names them; those after a * are given by name
    "attend": "q_BTHK k_BSGK v_BSGK q_pos_T k_pos_S * bias processor causal window segment_ids scale implementation",
    "score": "q_BTHK k_BSGK q_pos_T k_pos_S * bias causal window scale",
    "masked_softmax": "scores_BHTS mask",
    "dape": "scores_BHTS bias_BHTS mask * first_BT scores_WHC bias_WHC hidden_bias_C output_WCH output_bias_H "
    "alignment edge residual leak dtype",
    "distances": "q_pos_T k_pos_S * causal",
    "kerple": "distance p_H a_H",
    "key_convolution": "x_BTSI kernel_WIO pad_left pad_right",
    "make_cache": "config batch length",
    "Blockwise": "block_size num_buckets",
    "Fused": "platform",
    "Auto": "block_size num_buckets",
    "Cache": "k_LBSGK v_LBSGK",
    "DapeConfig": "kernel_width channels alignment edge residual leak inputs init",
    "SandwichConfig": "position_dim",
    "T5Config": "num_buckets max_distance",
    "FireConfig": "threshold width initial_c activation",
    "CopeConfig": "num_positions",
    "Rope": "base",
    "PositionInterpolation": "base factor",
    "NtkAware": "base factor",
    "Yarn": "base factor train_length beta_fast beta_slow",
    "Llama3Rope": "base factor low_frequency_factor high_frequency_factor train_length",
}
PARAMETERS = {  # with four heads of eight dims
    "kerple": {"p_H": (4,), "a_H": (4,)},
    "kerple_power": {"p_H": (4,), "a_H": (4,)},
    "t5": {"table_NH": (32, 4)},
    "fire": {
        **{"c": (), "threshold_multiplier": (), "hidden_M": (32,), "hidden_bias_M": (32,)},
        **{"output_MH": (32, 4), "output_bias_H": (4,)},
    },
    "cope": {"table_KP": (8, 64)},
    "transformer_xl": {"relative_DHK": (32, 4, 8), "content_HK": (4, 8), "position_HK": (4, 8)},
    "dape": {
        **{"scores_WHC": (3, 4, 32), "bias_WHC": (3, 4, 32), "hidden_bias_C": (32,)},
        **{"output_WCH": (3, 32, 4), "output_bias_H": (4,)},
    },
}


def python_blocks(path: Path) -> list[str]:
    """Return the blocks of Python in a page, with their line numbers."""
    text = path.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text[: block.start(1)].count("\n") + block[1] for block in found]


def imported(block: str) -> list[tuple[str, str]]:
    """Return (module, name) of a block's imports from this package."""
    froms = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    return [(node.module, alias.name) for node in froms if node.module.startswith("dape_jax") for alias in node.names]


@pytest.fixture(scope="module")
def page():
    """Run the page's blocks of code in order, and return the names that they define."""
    names = {"__name__": "library"}
    for block in python_blocks(PAGE):
        exec(compile(block, str(PAGE), "exec"), names)
    return types.SimpleNamespace(**names)


def close(actual, desired, atol=2e-6):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(desired), rtol=1e-5, atol=atol)


@pytest.fixture
def no_annotations():
    """Run the package as users do: without checking annotations at run time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Names.


def test_stable_names_exist_and_are_documented():
    assert sorted(STABLE & {*dir(dape_jax)}) == sorted(dape_jax.__all__) == sorted(STABLE)
    submodules = {path.stem for path in (ROOT / "dape_jax").iterdir()}
    assert not STABLE & submodules  # a function would hide the module of the same name
    for name in STABLE:
        thing = getattr(dape_jax, name)
        assert f"`{name}`" in PAGE.read_text()
        for documented in thing.values() if isinstance(thing, dict) else [thing]:
            doc = documented.__dict__["__doc__"] if inspect.isclass(documented) else documented.__doc__
            assert doc
            assert not doc.startswith(f"{documented.__name__}(")  # written by dataclasses and named tuples


def test_stable_arguments():
    """Stable arguments exist, in their positions and with their names; newer ones have a default."""
    for name, arguments in ARGUMENTS.items():
        parameters = inspect.signature(operator.attrgetter(name)(dape_jax)).parameters
        positional, _, by_name = (part.split() for part in arguments.partition("*"))
        by_position = [x for x, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        assert by_position[: len(positional)] == positional, name
        assert set(by_name) <= set(parameters), name
        added = set(parameters) - set(positional) - set(by_name)
        assert all(parameters[x].default is not inspect.Parameter.empty for x in added), name


def test_stable_parameters():
    """Call `build` with keywords only, as on the page."""

    def build():
        biases = {name: config() for name, config in dape_jax.BIASES.items()}
        built = {name: config.build(num_heads=4, head_dim=8, rngs=nnx.Rngs(0)) for name, config in biases.items()}
        built |= {name: config().build(num_heads=4, rngs=nnx.Rngs(0)) for name, config in dape_jax.PROCESSORS.items()}
        return nnx.Dict({name: module for name, module in built.items() if module is not None})

    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(build)))
    assert jax.tree.map(jnp.shape, {name: x for name, x in params.items() if x}) == PARAMETERS


def test_names_that_are_not_there():
    """Refuse a name outside the interface, and give all names to `import *`."""
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        _ = dape_jax.atend  # pyright: ignore[reportAttributeAccessIssue]
    names = {}
    exec("from dape_jax import *", names)
    assert set(names) >= STABLE


def test_pages_use_names_that_exist():
    """Names of docs/library.md are stable. README's code is valid Python, except where parts are written `...`."""
    used = [pair for block in python_blocks(PAGE) for pair in imported(block)]
    assert {module for module, _ in used} == {"dape_jax"}
    assert {name for _, name in used} <= STABLE
    blocks = [block for block in python_blocks(ROOT / "README.md") if "..." not in block]
    assert blocks
    for module, name in (pair for block in blocks for pair in imported(block)):
        assert hasattr(importlib.import_module(module), name)


IMPORTING = """
import sys
import dape_jax
print(*[name for name in ("jax", "flax", "numpy") if name in sys.modules])
dape_jax.attend
heavy = ["grain", "orbax", "matplotlib", "tensorboardX", "ml_collections"]
heavy += ["dape_jax.data", "dape_jax.training", "dape_jax.evaluation"]
print(*[name for name in heavy if name in sys.modules])

import jax
try:
    jax.devices()
except RuntimeError:
    print("no such platform")
"""


def test_import_is_light_and_touches_no_device():
    """Import on an unknown platform, where any computation would raise."""
    done = run_python("-c", IMPORTING, JAX_PLATFORMS="no_such_platform")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["", "", "no such platform"]  # before and after the first use of a name


# The page.


@pytest.mark.extra
def test_pure_op_is_module_is_attend(page):
    close(page.out_BTHK, page.attended_BTHK)

    @jax.jit
    def run():
        scores = dape_jax.score(page.q_BTHK, page.k_BTHK, bias=page.bias)
        by_module = page.processor(*scores)
        out = jnp.einsum("BHTS,BSHK->BTHK", masked_softmax(by_module, scores.mask), page.v_BTHK)
        return by_module, dape(*scores, **page.params["dape"]), out

    by_module, by_function, out = run()
    close(by_module, by_function)
    close(out, page.attended_BTHK)
    plain = page.run(*page.args, bias=page.bias)
    assert np.abs(out - plain).max() > 1e-2  # otherwise the comparison would be trivial


@pytest.mark.usefixtures("no_annotations")
@pytest.mark.extra
def test_jit(page):
    close(page.jitted_BTHK, page.out_BTHK)
    positions = [jnp.arange(page.T)] * 2
    close(jax.jit(attend)(*page.args, *positions, **page.ours), page.attended_BTHK)  # modules are pytrees
    for name, value in {"causal": True, "window": 3}.items():
        with pytest.raises(dape_jax.InputError, match=rf"{name}.*functools.partial"):
            jax.jit(attend)(*page.args, **page.ours, **{name: value})


@pytest.mark.extra
def test_transformations(page):
    """Values and gradients under vmap, checkpoint and scan, and with donated arguments; shard_map: `test_sharding`."""
    options = {"bias": page.bias, "implementation": Blockwise(8, 2)}

    def loss(processor, q, k, v):
        return (attend(q, k, v, **options, processor=processor) ** 2).sum()

    def composed(processor, *qkv):
        one = jax.checkpoint(lambda *x: loss(processor, *(y[None] for y in x)))
        total, _ = jax.lax.scan(lambda total, x: (total + jax.vmap(one)(*x).sum(), None), 0.0, [x[None] for x in qkv])
        return total

    step = jax.jit(lambda f, *args: jax.value_and_grad(f, (0, 1, 2, 3))(*args), static_argnums=0)
    expected = jax.device_get(step(loss, page.processor, *page.args))
    chex.assert_trees_all_close(step(composed, page.processor, *page.args), expected, rtol=1e-4, atol=1e-5)
    donating = jax.jit(functools.partial(attend, **page.ours), donate_argnums=0)
    close(donating(page.q_BTHK + 0, *page.args[1:]), page.attended_BTHK)
    half_scale = page.run(2 * page.q_BTHK, *page.args[1:], **page.ours, scale=page.K**-0.5 / 2)
    close(half_scale, page.attended_BTHK, atol=1e-5)


@pytest.mark.extra
def test_each_sequence_has_its_own_positions(page):
    for b in range(2):
        qkv = [x[b : b + 1] for x in page.args]
        close(page.each_BTHK[b : b + 1], page.run(*qkv, page.pos_BT[b], page.pos_BT[b], **page.ours))
    close(page.each_BTHK[0], page.attended_BTHK[0])
    assert np.abs(page.each_BTHK[1] - page.attended_BTHK[1]).max() > 1e-2


@pytest.mark.extra
def test_model_learns(page):
    assert page.losses[0] > np.log(12)
    assert np.mean(page.losses[-10:]) < 0.7


@pytest.mark.extra
def test_own_bias_and_processor(page):
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", page.q_BTHK, page.k_BTHK) * page.K**-0.5
    mask_TS = page.pos_T[:, None] >= page.pos_T[None, :]
    closeness_TS = 1 / (1 + (page.pos_T[:, None] - page.pos_T[None, :]).clip(0))
    bias_HTS = jnp.arange(1, 5)[:, None, None] * closeness_TS[None]
    probs_BHTS = masked_softmax(5 * jnp.tanh((scores_BHTS + bias_HTS[None]) / 5), mask_TS)
    close(page.own_BTHK, jnp.einsum("BHTS,BSHK->BTHK", probs_BHTS, page.v_BTHK))
    assert isinstance(page.SoftCap(5.0), dape_jax.Processor)
    assert isinstance(page.recency, dape_jax.Bias)


@pytest.mark.extra
def test_derivatives(page, monkeypatch):
    """Reverse over reverse equals forward over reverse with JAX's own gradient of the convolution."""
    x_C, ones_C = page.hidden_bias_C, page.ones_C
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(page.loss_of, (x_C,), (ones_C,))
    monkeypatch.setattr(processors, "_key_convolution", processors._key_convolution.fun)
    hessian_CC = jax.jit(jax.hessian(page.loss_of))(x_C)
    assert np.abs(hessian_CC).max() > 1e-2
    close(page.hessian_CC, hessian_CC, atol=1e-5)
    close(page.hessian_times_ones_C, hessian_CC @ ones_C, atol=1e-5)


@pytest.mark.extra
def test_second_derivatives_of_blocks(page):
    """With respect to what was differentiated, and to all else."""
    q_BTHK, k_BTHK, v_BTHK = page.args

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.grad, argnums=(1, 2))
    def second(implementation, q_BTHK, modules):
        def loss(q_BTHK):
            return (attend(q_BTHK, k_BTHK, v_BTHK, implementation=implementation, **modules) ** 2).sum()

        return jnp.vdot(jax.grad(loss)(q_BTHK), v_BTHK)

    expected = second(Dense(), q_BTHK, page.ours)
    assert np.abs(expected[0]).max() > 1
    chex.assert_trees_all_close(second(Blockwise(8, num_buckets=2), q_BTHK, page.ours), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.extra
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("spec", [("x",), (None, None, "x"), ()], ids=["batch", "heads", "parameters"])
def test_split_arrays_give_right_numbers(page, spec, kind):
    """Values and gradients, also on the explicit axes that `jax.make_mesh` makes by default."""
    pos_T, segment_ids = jnp.arange(24), page.segment_ids

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(qkv, ours):
        q_BTHK, k_BTHK, v_BTHK = qkv
        q_BTHK, k_BTHK = dape_jax.Rope()(q_BTHK, pos_T), dape_jax.Rope()(k_BTHK, jnp.stack([pos_T, pos_T]))
        out_BTHK = attend(q_BTHK, k_BTHK, v_BTHK, **ours, segment_ids=segment_ids)
        processed_BHTS = ours["processor"](*dape_jax.score(q_BTHK, k_BTHK, bias=ours["bias"]))
        return (out_BTHK**2).sum() + processed_BHTS.mean(), out_BTHK

    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    qkv, last = jax.device_put(page.args[:3], NamedSharding(mesh, PartitionSpec(*spec))), None if spec else "x"
    specs = jax.tree.map(lambda x: PartitionSpec(*[None] * (x.ndim - 1), last), page.ours)
    ours = jax.device_put(page.ours, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    found = run(qkv, ours)
    assert not spec or found[1][0][0].sharding.is_equivalent_to(qkv[0].sharding, 4)
    chex.assert_trees_all_close(
        jax.device_get(found), jax.device_get(run(page.args[:3], page.ours)), rtol=2e-4, atol=2e-5
    )


@pytest.mark.extra
def test_whole_model_on_explicit_axes(page):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    model = jax.device_put(page.model, NamedSharding(mesh, PartitionSpec()))
    tokens_BT = jax.device_put(page.tokens_BT, NamedSharding(mesh, PartitionSpec("x")))
    split = jax.sharding.auto_axes(lambda model, tokens_BT: model(tokens_BT), out_sharding=PartitionSpec("x"))
    with jax.set_mesh(mesh):
        logits_BTV = jax.jit(split)(model, tokens_BT)
    close(logits_BTV, page.logits_BTV, atol=1e-4)


@pytest.mark.usefixtures("no_annotations")
def test_strict_promotion_of_dtypes():
    """Trace values and gradients in 16 bits, where `jax_numpy_dtype_promotion` is "strict"."""
    x_BTHK = jnp.zeros((1, 4, 4, 8), jnp.bfloat16)

    def loss(modules, x_BTHK):
        rotated_BTHK = dape_jax.Rope()(x_BTHK, jnp.arange(4))
        options = {"bias": modules[0], "processor": modules[1], "implementation": Blockwise(2)}
        return attend(rotated_BTHK, x_BTHK, x_BTHK, **options).astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("strict"):
        for config in dape_jax.BIASES.values():
            bias = config().build(num_heads=4, head_dim=8, rngs=nnx.Rngs(0))
            processor = DapeConfig().build(num_heads=4, has_bias=bias is not None, rngs=nnx.Rngs(0))
            assert jax.eval_shape(jax.grad(loss, 1), (bias, processor), x_BTHK).dtype == jnp.bfloat16
        config = TransformerConfig(2, 16, 4, vocab_size=11, norm="rms_norm", qk_norm="head", dtype="bfloat16")
        model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        jax.eval_shape(jax.grad(lambda model: model(jnp.zeros((1, 4), int)).sum()), model)


def test_models_can_be_pickled():
    model = Transformer(TransformerConfig(1, 16, 4, vocab_size=11, bias=dape_jax.FireConfig()), rngs=nnx.Rngs(0))
    chex.assert_trees_all_equal(nnx.state(pickle.loads(pickle.dumps(model))), nnx.state(model))


@pytest.mark.usefixtures("no_annotations")
def test_summary():
    """List a module of a user's, with the modules of this package in it."""

    class Layer(nnx.Module):
        def __init__(self, bias):
            self.bias = bias.build(num_heads=4, head_dim=8, rngs=nnx.Rngs(0))

        def __call__(self, x_BTHK):
            return attend(x_BTHK, x_BTHK, x_BTHK, bias=self.bias)

    for bias in (KerpleConfig(), dape_jax.KerplePowerConfig()):
        assert "a_H" in nnx.tabulate(Layer(bias), jnp.zeros((1, 4, 4, 8)))


@dataclasses.dataclass(frozen=True)
class Capped(dape_jax.Processor):
    """Processor that defines only `__call__`."""

    def __call__(self, scores_BHTS, bias_BHTS, mask):
        total_BHTS = scores_BHTS if bias_BHTS is None else scores_BHTS + bias_BHTS
        return 2 * jnp.tanh(total_BHTS / 2)


@dataclasses.dataclass(frozen=True)
class CappedConfig(dape_jax.ProcessorConfig):
    """Config that defines only `build`."""

    def build(self, num_heads, *, has_bias=True, dtype=None, rngs):
        return Capped()


def test_minimal_processor_in_a_model():
    """Minimal processors work in training and FLOP counting, allow a cache, and change the logits."""
    plain = dataclasses.replace(read_model(SPEC["model"] | {"vocab_size": 11}), processor=PlainConfig())
    config = dataclasses.replace(plain, attention=Blockwise(block_size=4, num_buckets=3), processor=CappedConfig())
    params = random_params(config)
    params["layers"]["attention"]["query_DHK"] *= 10  # scores that the cap changes
    tokens_BT = jnp.asarray(np.random.default_rng(13).integers(0, 11, (2, 13), np.int32))

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.value_and_grad, argnums=1)
    def run(graphdef, params):
        return (nnx.merge(graphdef, params)(tokens_BT) ** 2).mean()

    (capped, grads), (uncapped, _) = (run(model_structure(each)[0], params) for each in (config, plain))
    assert abs(capped - uncapped) > 1e-3
    chex.assert_tree_all_finite(grads)
    dape_jax.make_cache(config, 2, 13)
    assert forward_flops(config, 13, 2) == forward_flops(plain, 13, 2)


class Unfinished(dape_jax.Processor):
    """Forget `__call__`."""


class Flat(dape_jax.Processor):
    def __call__(self, scores_BHTS, bias_BHTS, mask):
        return scores_BHTS[:, 0]


def flat_bias(q_pos_T, k_pos_S, *, causal=True):
    return jnp.zeros((1, len(q_pos_T), len(k_pos_S)))


class PartOfContent(nnx.Module):
    def __init__(self, batch, num_heads):
        self.batch, self.num_heads = batch, num_heads

    def from_content(self, content, *, causal):
        return content.scores_BHTS[: self.batch, : self.num_heads]


def contextual(config, num_heads, head_dim):
    return {"bias": config().build(num_heads, head_dim, nnx.Rngs(0))}


WRONG_OPTIONS = [
    ({"bias": PartOfContent(2, 1)}, "bias PartOfContent = ", r"must return \[B or 1, H, T, S\] = \(2, 2, "),
    (contextual(dape_jax.CopeConfig, 2, 8), r"bias Cope: head_dim = \(8,\)", r"must be \(4,\)"),
    (contextual(dape_jax.TransformerXLConfig, 1, 4), r"bias TransformerXL: .* = \(1, 4\)", r"must be \(2, 4\)"),
    ({"processor": Flat()}, "processor Flat.*", r"must return \[B, H, T, S\] = \(2, 2, "),
    ({"processor": DapeConfig()}, r"processor = DapeConfig\(", r"its build\(\) returns"),
    ({"processor": lambda *x: x[0]}, "processor = 'function'", "subclass of Processor"),
    ({"bias": flat_bias}, "bias function", r"must return \[H, T, S\] = \(2, "),
    ({"segment_ids": jnp.zeros((2, 4), int)}, r"segment_ids.shape = \(2, 4\)", r"\(2, 3\)"),
    ({"bias": KerpleConfig()}, r"bias = KerpleConfig\(", r"its build\(\) returns"),
    ({"bias": jnp.zeros((2, 3, 3))}, r"bias = 'array \(2, 3, 3\)'", "lambda q_pos, k_pos"),
    ({"bias": "kerple"}, "bias = 'kerple'", r"must be a module, as build\(\) of a config"),
    ({"window": (4, 0)}, r"window = \(4, 0\)", r"must be an integer from 1 to 2\*\*30, or None"),
    ({"window": np.int64(2**31)}, "window = .*2147483648", "must be an integer from 1"),  # negative in 32 bits
    ({"causal": None}, "causal = 'NoneType'", "must be True or False"),
    ({"causal": np.ones((3, 3), bool)}, "causal = 'ndarray'", "must be True or False"),
    ({"scale": jnp.ones(3)}, r"scale = 'array \(3,\)'", "must be a number"),
    ({"cap": 0.0}, "cap = 0.0", "must be above 0, or None"),
]


@pytest.mark.usefixtures("no_annotations")
@pytest.mark.parametrize("implementation", ["dense", Blockwise(2)])
def test_a_wrong_bias_or_processor_is_named(implementation):
    qkv = jnp.zeros((3, 2, 3, 2, 4))
    for options, value, allowed in WRONG_OPTIONS:
        with pytest.raises(dape_jax.InputError, match=f"{value}.*{allowed}"):
            attend(*qkv, **options, implementation=implementation)
    with pytest.raises(NotImplementedError, match="Unfinished must define __call__"):
        attend(*qkv, processor=Unfinished(), implementation=implementation)
    x = jnp.tile(jnp.linspace(0, 1, 24).reshape(1, 3, 2, 4), (2, 1, 1, 1))  # the batch of a bias may be 1
    outs = [attend(x, x, x, bias=PartOfContent(batch, 2), implementation=implementation) for batch in (1, 2)]
    np.testing.assert_array_equal(*outs)
    assert not np.allclose(outs[0], attend(x, x, x))


B, T, H, G, K = 2, 16, 4, 2, 8
Q, KV = (B, T, H, K), (B, T, G, K)
WRONG_SHAPES = [  # shapes of q, k and v, lengths of the positions or None, and parts of the message
    ((B, H, T, K), KV, KV, (T, T), "q_BTHK.shape = (2, 4, 16, 8): must be [B, T, H, K], rows before heads"),
    (Q, (B, G, T, K), (B, G, T, K), (T, T), "k_BSGK.shape = (2, 2, 16, 8): must be [B, S, G, K]"),
    (Q, KV, (B, G, T, K), (T, T), "v_BSGK.shape = (2, 2, 16, 8): must be [B, S, G, K]"),
    ((T, H, K), Q, Q, None, "q_BTHK.shape = (16, 4, 8)"),
    (Q, (B, T, H * K), Q, None, "k_BSGK.shape = (2, 16, 32)"),
    ((B, 0, H, K), KV, KV, None, "q_BTHK.shape = (2, 0, 4, 8)"),
    (Q, Q, Q, ((B, T), T), "q_pos_T = (2, 16): must be [T]"),
    (Q, Q, Q, ((), T), "q_pos_T = "),
    (Q, KV, (B, T - 1, G, K), None, "v_BSGK.shape = (2, 15, 2, 8): must be k_BSGK.shape = (2, 16, 2, 8)"),
    (Q, Q, Q, (T - 1, T), "q_BTHK.shape = (2, 16, 4, 8): must be [B, T, H, K], rows before heads, with T = 15"),
    (Q, Q, Q, (T, T + 1), "S = 17, the length of k_pos_S"),
    (Q, (B, T, H, 2 * K), (B, T, H, 2 * K), None, "k_BSGK.shape = (2, 16, 4, 16): must have B = 2 and K = 8"),
    ((B, T + 1, H, K), KV, KV, None, "q_BTHK.shape = (2, 17, 4, 8): [B, T, H, K] must have T <= S"),
    (Q, (B, T, 3, K), (B, T, 3, K), None, "num_kv_heads = 3: must divide num_heads = 4"),
]


@pytest.mark.usefixtures("no_annotations")
def test_wrong_arguments_are_named():
    for *shapes, positions, message in WRONG_SHAPES:
        positions = [jnp.arange(np.prod(shape)).reshape(shape) for shape in positions or ()]
        with pytest.raises(dape_jax.InputError, match=re.escape(message)):
            attend(*map(jnp.zeros, shapes), *positions)
    x, again, left, rngs = jnp.zeros(Q), np.arange(T) % 10, np.arange(T) - 3, nnx.Rngs(0)
    dape = {"processor": DapeConfig().build(H, has_bias=False, rngs=rngs)}
    dense, kerple = {"implementation": Dense}, KerpleConfig().build(H, 4, rngs)
    config, sizes, tokens = TransformerConfig, {"num_layers": 1, "width": 16, "num_heads": 4}, np.ones((B, T), int)
    module = sizes | {"vocab_size": 11, "bias": kerple}
    model = Transformer(config(**sizes, vocab_size=11), rngs=rngs)
    for function, args, options, words in (
        (attend, (x, x, x, again, again), {}, r"k_pos_S = \[\[9, 0\]\]: must increase.* give segment_ids"),
        (attend, (x, x, x, left, left), dape, r"k_pos_S = \[\[-1, 0\]\]: must .* padding last; .* on the left"),
        (attend, (x, x, x, again > 0), {}, r"q_pos_T\.dtype = 'bool': must be integers"),
        (attend, (x, x, x, again / 2), {}, r"q_pos_T\.dtype = 'float64': must be integers"),
        (attend, [x.astype(int)] * 3, {}, r"q_BTHK\.dtype = 'int32': must be float16"),
        (attend, [x.astype("float8_e4m3fn")] * 3, {}, r"q_BTHK\.dtype = 'float8_e4m3fn': must be float16"),
        (attend, (x, x, None), {}, "v_BSGK = 'NoneType': must be an array"),
        (attend, [x] * 3, dense, "implementation = <class '.*Dense'>: must be one of .*an instance"),
        (dape_jax.score, (x[0], x), {}, r"q_BTHK\.shape = \(16, 4, 8\): must be \[B, T, H, K\]"),
        (dape_jax.score, (x, x[:, :5]), {}, r"q_BTHK\.shape = .* must have T <= S"),
        (dape_jax.score, (x, x), {"bias": KerpleConfig()}, r"bias = KerpleConfig\(.*its build\(\) returns"),
        (model, (tokens[0],), {}, r"tokens_BT.shape = \(16,\): must be \[B, T\]"),
        (model, (tokens, left[1:]), {}, r"pos_T = \[\[-1, 0\]\]: must increase, padding last"),
        (model, (tokens, left[3:]), {}, r"pos_T.shape = \(13,\): must be \[T\] = \(16,\)"),
        (model, (tokens, again), {}, r"pos_T = \[\[9, 0\]\]: must increase.* give segment_ids"),
        (model, (tokens, None, tokens[:1]), {}, r"segment_ids.shape = \(1, 16\): must be \[B, S\] = \(2, 16\)"),
        (config, [], module, r"^model.bias = Kerple\(.*: must be an instance of BiasConfig$"),
    ):
        with pytest.raises(dape_jax.InputError, match=words):
            function(*args, **options)
    for field in ("rotary", "alternate_rotary", "bias", "processor", "attention"):
        with pytest.raises(dape_jax.InputError, match=f"^model.{field} = 'kerple': must be an instance of [A-Z]"):
            config(**sizes, vocab_size=11, **{field: "kerple"})
    for pos in (jnp.arange(1), jnp.zeros((B, 1), int), jnp.zeros((B + 1, T), int), 3):
        with pytest.raises(dape_jax.InputError, match=r"pos.shape = \(.*: must be \[T\] or \[B, T\]"):
            dape_jax.Rope()(x, pos)
    np.testing.assert_array_equal(dape_jax.Rope()(x + 1, list(range(T))), dape_jax.Rope()(x + 1, jnp.arange(T)))
    scores, visible = jnp.zeros((B, H, T, T)), jnp.tril(jnp.ones((T, T), bool))
    weights = nnx.to_pure_dict(nnx.state(DapeConfig(channels=2).build(H, rngs=nnx.Rngs(0))))
    for bias in (scores[0], scores[:1, :1]):  # without the batch dim, of one head
        with pytest.raises(dape_jax.InputError, match=r"bias_BHTS.shape = \(.*: must be \[1, H, T, S\] or"):
            dape_jax.dape(scores, bias, visible, **weights)
    visible, scores = np.tril(np.ones((T, T), bool)), np.zeros((B, H, T, T), np.float32)
    for mask in (np.where(visible, 0.0, -1e9), visible.astype(int), np.tile(visible, (H, 1, 1))):
        with pytest.raises(dape_jax.InputError, match=r"mask = .*: must be booleans, \[T, S\] or \[B, 1, T, S\]"):
            masked_softmax(scores, mask)


@pytest.mark.usefixtures("no_annotations")
def test_eager_calls_are_compiled_once():
    """Loops over blocks have new functions in each call. Options may be numbers of any type."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 9, H, K))
    options = {"bias": KerpleConfig().build(H, K, nnx.Rngs(0)), "implementation": Blockwise(4, 2)}
    before, kinds = attention._attend_compiled._cache_size(), (float, int, np.float32)
    outs = [attend(q, k, v, **options, scale=kind(1), cap=kind(3)) for kind in 2 * kinds]
    assert attention._attend_compiled._cache_size() == before + len(kinds)
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], atol=1e-6)


def test_a_bias_has_forward_derivatives_without_dape():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, H, K))
    bias = KerpleConfig().build(H, K, nnx.Rngs(0))
    forward, reverse = (
        jax.jit(of(lambda bias: (attend(q, k, v, bias=bias) ** 2).sum())) for of in (jax.jacfwd, jax.grad)
    )
    grads = reverse(bias)
    assert np.abs(grads.p_H[...]).max() > 1e-2
    chex.assert_trees_all_close(forward(bias), grads, rtol=1e-4, atol=1e-5)


def test_unsigned_positions_lists_and_padding_are_positions():
    q, k, v = jax.random.normal(jax.random.key(0), (3, B, T, H, K))
    bias, signed = AlibiConfig().build(H, K, nnx.Rngs(0)), jnp.arange(T)
    expected = np.asarray(attend(q, k, v, signed, signed, bias=bias))
    assert np.ptp(expected) > 0.1
    for pos in (signed.astype(np.uint32), signed.astype(jnp.uint8), range(T), np.arange(T).tolist()):
        np.testing.assert_array_equal(attend(q, k, v, pos, pos, bias=bias), expected)
        found, given = dape_jax.score(q, k, pos, pos, bias=bias), dape_jax.score(q, k, signed, signed, bias=bias)
        np.testing.assert_array_equal(found.bias_BHTS, given.bias_BHTS)
    ids = np.repeat([[1, 2]] * B, [5, T - 5], axis=1)
    packed = attend(q, k, v, bias=bias, segment_ids=jnp.asarray(ids))
    assert np.abs(packed - expected).max() > 0.1
    for given in (ids.tolist(), (ids << 32).tolist()):
        np.testing.assert_array_equal(attend(q, k, v, bias=bias, segment_ids=given), packed)
    padded = jnp.pad(k, [(0, 0), (0, 2), (0, 0), (0, 0)]), jnp.pad(v, [(0, 0), (0, 2), (0, 0), (0, 0)])
    k_pos = jnp.concatenate([signed, jnp.array([-1, -1])])
    np.testing.assert_allclose(attend(q, *padded, signed, k_pos, bias=bias), expected, atol=1e-6)
    found = attend(q, k, v, signed - 3, signed - 3, bias=bias)[:, 3:]
    np.testing.assert_allclose(found, attend(q[:, 3:], k[:, 3:], v[:, 3:], bias=bias), atol=1e-6)
