"""`docs/library.md`: its code is run, its claims are checked, and its stable names are listed here."""

import ast
import dataclasses
import functools
import importlib
import inspect
import operator
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
from jax.sharding import NamedSharding, PartitionSpec
from processes import run_python
from tiny import SPEC

import dape_jax
from dape_jax import AlibiConfig, Blockwise, DapeConfig, Dense, KerpleConfig, attend, dape, masked_softmax
from dape_jax.config import read_model
from dape_jax.model import processors
from dape_jax.model.contextual import CONTEXTUAL
from dape_jax.model.flops import forward_flops
from dape_jax.model.processors import PlainConfig
from dape_jax.model.transformer import model_structure

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "library.md"

# Other programs rely on these names. Removing a name or an argument, or changing the name or the shape of a parameter,
# breaks them, so edit this list only deliberately.
STABLE = set(
    """
    attend Dense Blockwise Fused Auto score masked_softmax dape distances kerple AlibiConfig KerpleConfig
    KerplePowerConfig SandwichConfig T5Config FireConfig CopeConfig TransformerXLConfig DapeConfig Rope
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
def names():
    """Run the page's blocks of code in order, and return the names that they define."""
    blocks = python_blocks(PAGE)
    assert blocks, f"{PAGE}: no Python"
    names = {"__name__": "library"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def page(names):
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
    assert set(dape_jax.__all__) == STABLE
    assert len(dape_jax.__all__) == len(STABLE)
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
        biases = {name: config() for name, config in (dape_jax.BIASES | CONTEXTUAL).items()}
        built = {name: config.build(num_heads=4, head_dim=8, rngs=nnx.Rngs(0)) for name, config in biases.items()}
        built |= {name: config().build(num_heads=4, rngs=nnx.Rngs(0)) for name, config in dape_jax.PROCESSORS.items()}
        return nnx.Dict({name: module for name, module in built.items() if module is not None})

    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(build)))
    assert jax.tree.map(jnp.shape, {name: x for name, x in params.items() if x}) == PARAMETERS


def test_names_that_are_not_there():
    """Refuse a name outside the interface, find a submodule, and give all names to `import *`."""
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        _ = dape_jax.atend  # pyright: ignore[reportAttributeAccessIssue]
    assert importlib.import_module("dape_jax.command_line") is dape_jax.command_line
    names = {}
    exec("from dape_jax import *", names)
    assert set(names) >= STABLE


def test_pages_use_names_that_exist():
    """Names of docs/library.md are stable. README's code is valid Python, except where parts are written `...`."""
    used = [pair for block in python_blocks(PAGE) for pair in imported(block)]
    assert used
    assert all(module == "dape_jax" and name in STABLE for module, name in used)
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


# The pure op.


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

    def composed(processor, q, k, v):
        one = jax.checkpoint(lambda *x: loss(processor, *(y[None] for y in x)))
        return jax.lax.scan(lambda total, x: (total + jax.vmap(one)(*x).sum(), None), 0.0, (q[None], k[None], v[None]))[
            0
        ]

    step = jax.jit(lambda f, *args: jax.value_and_grad(f, (0, 1, 2, 3))(*args), static_argnums=0)
    expected = jax.device_get(step(loss, page.processor, *page.args))
    chex.assert_trees_all_close(step(composed, page.processor, *page.args), expected, rtol=1e-4, atol=1e-5)
    donating = jax.jit(functools.partial(attend, **page.ours), donate_argnums=0)
    close(donating(page.q_BTHK + 0, *page.args[1:]), page.attended_BTHK)
    half_scale = jax.jit(functools.partial(attend, **page.ours, scale=page.K**-0.5 / 2))
    close(half_scale(2 * page.q_BTHK, *page.args[1:]), page.attended_BTHK, atol=1e-5)


@pytest.mark.extra
def test_gradients(page):
    chex.assert_tree_all_finite(page.grads)
    assert float(np.abs(page.grads["dape"].pop("output_bias_H")).max()) < 1e-6  # it cancels in the softmax
    for leaf in jax.tree.leaves(page.grads):
        assert np.abs(leaf).max() > 1e-5
    of_module = nnx.to_pure_dict(nnx.state(page.processor_grads))
    for name, grad in page.grads["dape"].items():
        close(of_module[name], grad)


@pytest.mark.extra
def test_ensemble_is_a_loop(page):
    members = [jax.tree.map(lambda leaf, e=e: leaf[e], page.ensemble) for e in range(3)]
    alone = [page.attention(params, page.q_BTHK, page.k_BTHK, page.v_BTHK, page.pos_T) for params in members]
    close(page.outs_EBTHK, jnp.stack(alone))
    assert np.abs(alone[0] - alone[1]).max() > 1e-2
    chex.assert_trees_all_close(page.init(jax.random.split(jax.random.key(2), 3)[1]), members[1])


@pytest.mark.extra
def test_each_sequence_has_its_own_positions(page):
    for b in range(2):
        qkv = [x[b : b + 1] for x in page.args]
        close(page.each_BTHK[b : b + 1], page.run(*qkv, page.pos_BT[b], page.pos_BT[b], **page.ours))
    close(page.each_BTHK[0], page.attended_BTHK[0])
    assert np.abs(page.each_BTHK[1] - page.attended_BTHK[1]).max() > 1e-2


@pytest.mark.extra
def test_linen(page):
    variables = page.LinenAttention().init(jax.random.key(3), *page.args, page.pos_T)
    params = variables["params"]["attention"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, page.params)
    close(page.linen_BTHK, page.attention(params, *page.args, page.pos_T))


# Models of other projects.


@pytest.mark.extra
def test_model_learns(page, names, monkeypatch):
    assert page.losses[0] > np.log(12)
    assert np.mean(page.losses[-10:]) < 0.7
    plain = page.YourModel(V=12, D=32, H=4, processor=None, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(plain)
    monkeypatch.setitem(names, "graphdef", graphdef)
    step, opt_state = jax.jit(lambda *args: page.train_step(*args)), page.optimizer.init(params)
    for key in jax.random.split(jax.random.key(4), 60):
        params, opt_state, loss = step(params, opt_state, key)
    assert loss > 2


# The recipes.


@pytest.mark.extra
def test_encoder_sees_all_keys(page):
    distance_TS = jnp.abs(page.pos_T[:, None] - page.pos_T[None, :])
    p_H, a_H = page.params["kerple"]["p_H"], page.params["kerple"]["a_H"]
    bias_HTS = -p_H[:, None, None] * jnp.log1p(a_H[:, None, None] * distance_TS[None])
    all_TS = jnp.ones_like(distance_TS, bool)
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", page.q_BTHK, page.k_BTHK) * page.K**-0.5
    probs_BHTS = masked_softmax(dape(scores_BHTS, bias_HTS[None], all_TS, **page.params["dape"]), all_TS)
    close(page.both_ways_BTHK, jnp.einsum("BHTS,BSHK->BTHK", probs_BHTS, page.v_BTHK))


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
    for derivative in (
        lambda: jax.jvp(page.loss_of, (x_C,), (ones_C,)),
        lambda: jax.jacfwd(page.loss_of)(x_C),
        lambda: jax.hessian(page.loss_of)(x_C),
    ):
        with pytest.raises(TypeError, match="forward-mode"):
            derivative()
    monkeypatch.setattr(processors, "_key_convolution", processors._key_convolution.fun)
    hessian_CC = jax.jit(jax.hessian(page.loss_of))(x_C)
    assert np.abs(hessian_CC).max() > 1e-2
    close(page.hessian_CC, hessian_CC, atol=1e-5)
    close(page.hessian_times_ones_C, hessian_CC @ ones_C, atol=1e-5)


@pytest.mark.extra
def test_split_heads_give_right_numbers(page):
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    split = NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    qkv = jax.device_put(page.args[:3], split)
    ours = jax.device_put(page.ours, everywhere)
    out = jax.jit(attend, out_shardings=split)(*qkv, **ours)
    close(out, page.attended_BTHK)


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


@pytest.mark.parametrize("implementation", [Dense(), Blockwise(block_size=4, num_buckets=3)], ids=str)
def test_minimal_processor_in_a_model(implementation):
    """Minimal processors work in training, cached decoding and FLOP counting, and change the logits."""
    plain = dataclasses.replace(read_model(SPEC["model"] | {"vocab_size": 11}), processor=PlainConfig())
    config = dataclasses.replace(plain, attention=implementation, processor=CappedConfig())
    (graphdef, abstract), (uncapped, _) = model_structure(config), model_structure(plain)
    draw = np.random.default_rng(13)
    tokens_BT = jnp.asarray(draw.integers(0, 11, (2, 13), np.int32))
    params = jax.tree.map(lambda leaf: draw.normal(0, 0.3, leaf.shape).astype(leaf.dtype), abstract)
    params["layers"]["attention"]["query_DHK"] *= 10  # scores that the cap changes

    @jax.jit
    def run(params):
        def loss(params):
            logits_BTV = nnx.merge(graphdef, params)(tokens_BT)
            return (logits_BTV**2).mean(), logits_BTV

        return *jax.grad(loss, has_aux=True)(params), nnx.merge(uncapped, params)(tokens_BT)

    @jax.jit
    def decode(params):
        model, cache, outs = nnx.merge(graphdef, params), dape_jax.make_cache(config, 2, 13), []
        for rows in (slice(0, 9), slice(9, 10), slice(10, 13)):
            features_BTD, cache = model.extend(tokens_BT[:, rows], jnp.arange(13)[rows], cache)
            outs.append(model.logits(features_BTD))
        return jnp.concatenate(outs, axis=1)

    grads, logits_BTV, uncapped_BTV = jax.device_get(run(params))
    assert np.abs(uncapped_BTV - logits_BTV).max() > 1e-3
    chex.assert_tree_all_finite(grads)
    close(decode(params), logits_BTV, atol=1e-5)
    assert forward_flops(config, 13, 2) == forward_flops(plain, 13, 2)


class Unfinished(dape_jax.Processor):
    """Forget `__call__`."""


class Flat(dape_jax.Processor):
    def __call__(self, scores_BHTS, bias_BHTS, mask):
        return scores_BHTS[:, 0]


def flat_bias(q_pos_T, k_pos_S, *, causal=True):
    return jnp.zeros((1, len(q_pos_T), len(k_pos_S)))


@pytest.mark.usefixtures("no_annotations")
@pytest.mark.parametrize("implementation", ["dense", Blockwise(2)])
def test_a_wrong_bias_or_processor_is_named(implementation):
    for options, error, words in (
        ({"processor": Flat()}, dape_jax.InputError, ["processor Flat", "must return [B, H, T, S] = (2, 2, "]),
        ({"processor": Unfinished()}, NotImplementedError, ["Unfinished must define __call__"]),
        ({"processor": DapeConfig()}, dape_jax.InputError, ["processor = DapeConfig(", "its build() returns"]),
        ({"processor": lambda *x: x[0]}, dape_jax.InputError, ["processor = 'function'", "subclass of Processor"]),
        ({"bias": flat_bias}, dape_jax.InputError, ["bias function", "must return [H, T, S] = (2, "]),
        ({"segment_ids": jnp.zeros((2, 4), int)}, dape_jax.InputError, ["segment_ids.shape = (2, 4)", "(2, 3)"]),
        ({"bias": KerpleConfig()}, dape_jax.InputError, ["bias = KerpleConfig(", "its build() returns"]),
        ({"bias": jnp.zeros((2, 3, 3))}, dape_jax.InputError, ["bias = 'array (2, 3, 3)'", "lambda q_pos, k_pos"]),
    ):
        with pytest.raises(error) as raised:
            attend(*jnp.zeros((3, 2, 3, 2, 4)), **options, implementation=implementation)
        assert all(word in str(raised.value) for word in words), raised.value


B, T, H, G, K = 2, 16, 4, 2, 8
Q, KV = (B, T, H, K), (B, T, G, K)
WRONG_SHAPES = [  # shapes of q, k and v, lengths of the positions or None, and parts of the message
    (
        (B, H, T, K),
        KV,
        KV,
        (T, T),
        "q_BTHK.shape = (2, 4, 16, 8): must be [B, T, H, K], rows before heads, with T = 16",
    ),
    (Q, (B, G, T, K), (B, G, T, K), (T, T), "k_BSGK.shape = (2, 2, 16, 8): must be [B, S, G, K]"),
    (Q, KV, (B, G, T, K), (T, T), "v_BSGK.shape = (2, 2, 16, 8): must be [B, S, G, K], rows before heads, with S = 16"),
    ((T, H, K), Q, Q, None, "q_BTHK.shape = (16, 4, 8): must be [B, T, H, K]"),
    (Q, (B, T, H * K), Q, None, "k_BSGK.shape = (2, 16, 32)"),
    ((B, 0, H, K), KV, KV, None, "q_BTHK.shape = (2, 0, 4, 8)"),
    (Q, Q, Q, ((B, T), T), "q_pos_T = (2, 16): must be [T], the same for the batch"),
    (Q, Q, Q, ((), T), "q_pos_T = "),
    (Q, KV, (B, T - 1, G, K), None, "v_BSGK.shape = (2, 15, 2, 8): must be k_BSGK.shape = (2, 16, 2, 8)"),
    (Q, Q, Q, (T - 1, T), "q_BTHK.shape = (2, 16, 4, 8): must be [B, T, H, K], rows before heads, with T = 15"),
    (Q, Q, Q, (T, T + 1), "S = 17, the length of k_pos_S"),
    (Q, (B, T, H, 2 * K), (B, T, H, 2 * K), None, "k_BSGK.shape = (2, 16, 4, 16): must have B = 2 and K = 8"),
    (Q, (1, T, H, K), (1, T, H, K), None, "k_BSGK.shape = (1, 16, 4, 8): must have B = 2 and K = 8"),
    ((B, T + 1, H, K), KV, KV, None, "q_BTHK.shape = (2, 17, 4, 8): [B, T, H, K] must have T <= S"),
    (Q, (B, T, 3, K), (B, T, 3, K), None, "num_kv_heads = 3: must divide num_heads = 4"),
]


@pytest.mark.usefixtures("no_annotations")
def test_wrong_arrays_are_named():
    for *shapes, positions, message in WRONG_SHAPES:
        positions = [jnp.zeros(shape, int) for shape in positions or ()]
        with pytest.raises(dape_jax.InputError, match=re.escape(message)):
            attend(*map(jnp.zeros, shapes), *positions)
    again = jnp.arange(T) % 10
    with pytest.raises(dape_jax.InputError, match=r"k_pos_S = \[\[9, 0\]\]: must increase .* give segment_ids"):
        attend(*map(jnp.zeros, (Q, Q, Q)), again, again)
    with pytest.raises(dape_jax.InputError, match=r"q_BTHK\.dtype = 'int32': must be float16"):
        attend(*(jnp.zeros(Q, int) for _ in range(3)))


def test_unsigned_positions_and_padding_are_positions():
    q, k, v = jax.random.normal(jax.random.key(0), (3, B, T, H, K))
    bias, signed = AlibiConfig().build(H, K, nnx.Rngs(0)), jnp.arange(T)
    expected = np.asarray(attend(q, k, v, signed, signed, bias=bias))
    assert np.ptp(expected) > 0.1
    for kind in (np.uint32, jnp.uint8):
        pos = signed.astype(kind)
        np.testing.assert_array_equal(attend(q, k, v, pos, pos, bias=bias), expected)
    padded = jnp.pad(k, [(0, 0), (0, 2), (0, 0), (0, 0)]), jnp.pad(v, [(0, 0), (0, 2), (0, 0), (0, 0)])
    k_pos = jnp.concatenate([signed, jnp.array([-1, -1])])
    np.testing.assert_allclose(attend(q, *padded, signed, k_pos, bias=bias), expected, atol=1e-6)
