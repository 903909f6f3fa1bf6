"""Model: invariants end to end, sizes, and initial values."""

import contextlib
import dataclasses
import functools
import operator
import re
import runpy
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx
from helpers import random_params
from tiny import ARCHITECTURES, SPEC

from dape_jax.config import choose, read_model, read_run
from dape_jax.errors import InputError
from dape_jax.model.attention import attend
from dape_jax.model.biases import BIASES, BiasConfig, distances
from dape_jax.model.loss import nll, nll_of_features
from dape_jax.model.positions import DynamicNtk, LongRope, NoRotary
from dape_jax.model.transformer import (
    ACTIVATIONS,
    ENCODER,
    GPT_NEOX,
    NORMS,
    QK_NORMS,
    REMAT,
    SIZES,
    LayerNorm,
    Places,
    Transformer,
    TransformerConfig,
    flat_params,
    make_cache,
    model_structure,
    parameter_counts,
)
from dape_jax.sharding import MeshConfig, make_mesh
from dape_jax.tools.completion import Sampling, generate

DOCS = Path(__file__).parents[1] / "docs" / "methods.md"
BLOCKWISE = {"name": "blockwise", "block_size": 4, "num_buckets": 3}


def make_config(**changes) -> TransformerConfig:
    return read_model(SPEC["model"] | {"vocab_size": 11} | changes)


def random_model(config: TransformerConfig):
    """Return the structure of a model, and random parameters."""
    return model_structure(config)[0], random_params(config)


def initial_params(**changes):
    """Return the initial parameters of a model, computed in one program."""
    init = jax.jit(
        lambda: nnx.to_pure_dict(nnx.state(Transformer(make_config(**changes), rngs=nnx.Rngs(0)), nnx.Param))
    )
    return jax.device_get(init())


def logits_of(graphdef: nnx.GraphDef):
    """Return a jitted function of parameters and tokens."""
    return jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))


def tokens(batch: int, length: int) -> np.ndarray:
    """Return tokens; longer sequences begin with the shorter ones."""
    return np.random.default_rng(0).integers(0, 11, (length, batch), np.int32).T


def count(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# A bias in every layer, a shared one, one that reads content, and positions by rotation.
METHODS = [("kerple", "dape", "none"), ("t5", "dape", "none"), ("cope", "dape", "rope"), ("nope", "none", "yarn")]


@pytest.mark.parametrize(("bias", "processor", "rotary"), METHODS)
def test_logits_are_causal_and_do_not_depend_on_length(bias, processor, rotary):
    """Check f(x[:t]) = f(x)[:t] for any later tokens, at four times the length and more."""
    config = make_config(bias={"name": bias}, processor={"name": processor}, rotary={"name": rotary})
    graphdef, params = random_model(config)
    x, step = tokens(2, 40), logits_of(graphdef)
    whole = np.asarray(step(params, x))
    assert whole.shape == (2, 40, 11)
    np.testing.assert_allclose(step(params, x[:, :9]), whole[:, :9], atol=1e-4)
    changed = np.asarray(step(params, np.concatenate([x[:, :9], (x[:, 9:] + 1) % 11], 1)))
    np.testing.assert_array_equal(changed[:, :9], whole[:, :9])
    assert np.abs(changed[:, 9:] - whole[:, 9:]).max() > 1e-3


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


EQUATIONS = {
    "gelu": lambda x: x * (1 + scipy.special.erf(x / np.sqrt(2))) / 2,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
BLOCKS = {"decoder": GPT_NEOX, "encoder": ENCODER} | ARCHITECTURES


@pytest.mark.parametrize("form", BLOCKS)
def test_a_block_is_its_equation(form):
    """Compare with the sums of `Block`'s docstring, with plain norms, activations and projections."""
    same_layers = {"window": None, "alternate_layers": (), "alternate_window": None, "alternate_rotary": None}
    config = dataclasses.replace(make_config(**BLOCKS[form]), rotary=NoRotary(), **same_layers)
    block = jax.tree.map(lambda x: x[0], nnx.merge(*random_model(config)).layers)
    x_BTD, pos_T = np.random.default_rng(1).normal(size=(2, 7, config.width)).astype(np.float32), jnp.arange(7)

    def norm(layer: nnx.LayerNorm | nnx.RMSNorm, x: np.ndarray) -> np.ndarray:
        is_layer_norm = config.norm == "layer_norm"
        centred = x - x.mean(-1, keepdims=True) if is_layer_norm else x
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_epsilon) * layer.scale[...]
        return y + layer.bias[...] if is_layer_norm else y

    def project(equation: str, x: np.ndarray, module: nnx.Module, weight: str, bias: str) -> np.ndarray:
        y, b = np.einsum(equation, x, getattr(module, weight)[...]), getattr(module, bias)
        return y if b is None else y + b[...]

    def attention(x: np.ndarray) -> np.ndarray:
        a = block.attention
        names = ("query_DHK", "query_bias_HK"), ("key_DGK", "key_bias_GK"), ("value_DGK", "value_bias_GK")
        q, k, v = (project("BTD,DHK->BTHK", x, a, *each) for each in names)
        if config.qk_norm == "head":
            q, k = norm(a.query_norm, q), norm(a.key_norm, k)
        elif config.qk_norm == "projection":
            q, k = (
                norm(layer, x.reshape(2, 7, -1)).reshape(x.shape) for layer, x in ((a.query_norm, q), (a.key_norm, k))
            )
        run = jax.jit(functools.partial(attend, causal=config.causal, cap=config.score_cap))
        out = np.asarray(run(q, k, v, pos_T, pos_T, bias=a.bias, processor=a.processor))
        return project("BTHK,HKD->BTD", out, a, "output_HKD", "output_bias_D")

    def mlp(x: np.ndarray) -> np.ndarray:
        m, activation = block.mlp, EQUATIONS[config.activation]
        up = project("BTD,DF->BTF", x, m, "up_DF", "up_bias_F")
        if config.gated_mlp:
            up = activation(project("BTD,DF->BTF", x, m, "gate_DF", "gate_bias_F")) * up
        else:
            up = activation(up)
        return project("BTF,FD->BTD", up, m, "down_FD", "down_bias_D")

    flags = config.projection_bias, config.attention_output_bias, config.mlp_bias, config.mlp_bias and config.gated_mlp
    biases = "attention.key_bias_GK", "attention.output_bias_D", "mlp.down_bias_D", "mlp.gate_bias_F"
    assert flags == tuple(operator.attrgetter(name)(block) is not None for name in biases)
    with jax.numpy_rank_promotion("allow"):
        if config.parallel_residual:
            expected = x_BTD + attention(norm(block.attention_norm, x_BTD)) + mlp(norm(block.mlp_norm, x_BTD))
        elif config.branch_norm and config.norm_first:
            expected = x_BTD + norm(block.attention_branch_norm, attention(norm(block.attention_norm, x_BTD)))
            expected = expected + norm(block.mlp_branch_norm, mlp(norm(block.mlp_norm, expected)))
        elif config.branch_norm:
            expected = x_BTD + norm(block.attention_norm, attention(x_BTD))
            expected = expected + norm(block.mlp_norm, mlp(expected))
        elif config.norm_first:
            expected = x_BTD + attention(norm(block.attention_norm, x_BTD))
            expected = expected + mlp(norm(block.mlp_norm, expected))
        else:
            expected = norm(block.attention_norm, x_BTD + attention(x_BTD))
            expected = norm(block.mlp_norm, expected + mlp(expected))
    found, _ = jax.jit(lambda block, x_BTD: block(x_BTD, Places(pos_T), None))(block, x_BTD)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("float64")
def test_layer_norm_and_its_derivatives_are_flaxs():
    x_BTD, dx_BTD, dy_BTD = 3 + jax.random.normal(jax.random.key(0), (3, 2, 5, 16))
    options = {"epsilon": 1e-5, "param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}

    def derivatives(norm: nnx.LayerNorm):
        norm.scale[...], norm.bias[...] = jnp.linspace(-1, 2, 16), jnp.linspace(0, 1, 16)
        graphdef, params = nnx.split(norm)
        value, gradient = jax.vjp(lambda params, x_BTD: nnx.merge(graphdef, params)(x_BTD), params, x_BTD)
        of_gradient = jax.jvp(jax.grad(lambda x_BTD: (dy_BTD * norm(x_BTD)).sum()), (x_BTD,), (dx_BTD,))
        return value, gradient(dy_BTD), of_gradient

    expected = derivatives(nnx.LayerNorm(16, use_fast_variance=False, **options))
    chex.assert_trees_all_close(derivatives(LayerNorm(16, **options)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gelu_is_exact_up_to_rounding(dtype):
    x = jnp.linspace(-8, 8, 4001).astype(dtype)
    exact = np.asarray(x, np.float64)
    slope = scipy.special.ndtr(exact) + exact * np.exp(-(exact**2) / 2) / np.sqrt(2 * np.pi)
    results = jax.jvp(ACTIVATIONS["gelu"], (x,), (jnp.ones_like(x),))
    for found, expected in zip(results, (EQUATIONS["gelu"](exact), slope), strict=True):
        assert found.dtype == x.dtype
        np.testing.assert_allclose(found.astype(np.float32), expected, rtol=float(jnp.finfo(dtype).eps), atol=5e-7)


def test_the_architectures_have_every_option_with_every_value():
    """Tests run over `ARCHITECTURES`; add new options of the model there."""
    configs = [make_config(**options) for options in (GPT_NEOX, *ARCHITECTURES.values())]
    for field in dataclasses.fields(TransformerConfig):
        values = {getattr(config, field.name) for config in configs}
        if isinstance(values.copy().pop(), bool) and field.name not in ("causal", "norm_first", "scale_embedding"):
            assert values == {False, True}, field.name
    assert {config.norm for config in configs} == set(NORMS)
    assert {config.qk_norm for config in configs} == set(QK_NORMS)
    assert len({(config.norm_first, config.branch_norm) for config in (*configs, make_config(**ENCODER))}) == 4
    assert {config.activation for config in configs} == set(ACTIVATIONS) - {"relu"}
    assert {config.head_dim for config in configs} == {6, 8, 12}
    assert len({config.mlp_width for config in configs}) == 2


@pytest.mark.usefixtures("float64")  # in float32 the order of sums, which depends on the CPU, changes gradients
@pytest.mark.extra
def test_remat_and_attention_change_no_number():
    found = []
    for remat, attention in (("none", {"name": "dense"}), *((x, BLOCKWISE) for x in REMAT)):
        graphdef, params = random_model(make_config(remat=remat, dtype="float64", attention=attention))
        params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)  # some are float32 in every model

        @jax.jit
        @jax.value_and_grad
        def value_and_grad(params, x, graphdef=graphdef):
            return jax.nn.log_softmax(nnx.merge(graphdef, params)(x))[..., 0].mean()

        found.append(jax.device_get(value_and_grad(params, tokens(2, 11))))
        chex.assert_trees_all_close(found[-1], found[0], rtol=1e-12, atol=1e-12)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(found[0])) > 1e-2


@pytest.mark.parametrize(("size", "expected"), [("125m", 162e6), ("350m", 405e6), ("2.7b", 2.78e9), ("6.7b", 6.86e9)])
def test_sizes_are_the_papers(size, expected):
    """GPT-NeoX's count at its vocabulary of 50,304: 12 L D^2 + 2 V D, and vectors."""
    config = dataclasses.replace(read_model(SPEC["model"] | SIZES[size]), vocab_size=50_304, num_outputs=50_304)
    num = count(model_structure(config)[1])
    D, L = config.width, config.num_layers
    assert num == pytest.approx(12 * L * D**2 + 2 * 50_304 * D, rel=0.01)
    assert num == pytest.approx(expected, rel=0.01)


@functools.cache
def documented() -> dict[str, str]:
    """Return the formula, in letters of the shape legend, of each method's parameters in docs/methods.md."""
    return dict(re.findall(r"^\| `(\w+)` \|.*?\| `([0-9A-Z*+/ ]+)` \|", DOCS.read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("bias", "kernel"),
    [
        *((bias, {"kernel_width": 5, "channels": 7}) for bias in BIASES),
        ("kerple", {"kernel_width": 2, "alignment": "causal"}),
    ],
)
def test_parameter_counts_are_those_that_the_docs_give(bias, kernel):
    """Compare the counts printed at the start of training: biases, score convolutions, and total."""
    dape = choose("processor", "dape", **kernel)
    config = make_config(bias=choose("bias", bias), processor=dape)
    counts = parameter_counts(model_structure(config)[1])
    L, H, W, C = config.num_layers, config.num_heads, dape["kernel_width"], dape["channels"]
    sizes = {"L": L, "H": H, "K": config.head_dim, "D": config.width, "N": 32, "M": 32, "P": 64, "W": W, "C": C}
    assert counts["bias"] == L * eval(documented()[bias], sizes)
    of_no_bias = H * C * W if bias == "nope" else 0
    assert counts["processor"] == L * (eval(documented()["dape"], sizes) - of_no_bias)
    alone = model_structure(make_config(bias={"name": "nope"}, processor={"name": "none"}))[1]
    assert counts["total"] == count(alone) + counts["bias"] + counts["processor"]


@pytest.mark.extra
def test_every_method_starts_from_the_same_model():
    """Random initial values of a bias or processor do not change those of the rest of the model."""

    def shared(**changes):
        params = flat_params(initial_params(**changes))
        return {path: leaf for path, leaf in params.items() if not {"bias", "processor", "shared_bias"} & set(path)}

    base = shared(bias={"name": "nope"}, processor={"name": "none"})
    for bias in ("kerple", "t5", "transformer_xl"):
        chex.assert_trees_all_equal(shared(bias={"name": bias}), base)


def test_grouped_queries_and_windows():
    """Check the number of parameters with fewer key heads, and the range of a window, layers x (window - 1)."""
    x, full = tokens(2, 40), count(model_structure(make_config())[1])
    other = np.concatenate([(x[:, :1] + 1) % 11, x[:, 1:]], axis=1)
    for window, reached in ((None, 40), (5, 1 + 2 * 4)):
        graphdef, params = random_model(make_config(num_kv_heads=1, window=window))
        assert full - count(params) == 2 * 2 * (16 * 8 + 8)  # k, v in two layers
        step = logits_of(graphdef)
        is_changed = np.asarray(step(params, other) != step(params, x)).any((0, 2))
        assert np.flatnonzero(is_changed).tolist() == list(range(reached))


def test_extending_a_cache_is_the_whole_forward():
    """Blockwise attention otherwise assumes that its rows are the last of the keys."""
    config, x = make_config(attention=BLOCKWISE, window=5), tokens(2, 19)
    graphdef, params = random_model(config)
    extend = jax.jit(lambda params, *args: nnx.merge(graphdef, params).extend(*args))
    cache, pos, features = make_cache(config, 2, 24), np.arange(19, dtype=np.int8), []
    for start, stop in ((0, 9), (9, 10), (10, 19)):
        some, cache = extend(params, x[:, start:stop], pos[start:stop], cache)
        features.append(some)
    whole = jax.jit(lambda params, x: nnx.merge(graphdef, params).features(x))(params, x)
    np.testing.assert_allclose(np.concatenate(features, axis=1), whole, atol=1e-5)


def test_longer_sequences_than_learned_positions_are_refused():
    config = make_config(learned_positions=8)
    graphdef, params = model_structure(config)

    def forward(length):
        jax.eval_shape(lambda params, x: nnx.merge(graphdef, params)(x), params, tokens(1, length))

    def prompt(length):
        mesh, options = make_mesh(MeshConfig(1, 1, 1, 8)), {"max_new_tokens": 5, "sampling": Sampling()}
        generate(config, params, mesh, [tokens(1, length)[0]], **options)

    forward(8)
    prompt(4)
    parts = {"model": SPEC["model"] | {"learned_positions": 8}, "data": SPEC["data"] | {"path": "a", "cache_dir": "b"}}
    for refused, words in (
        (lambda: forward(9), "length = 9: must be at most"),
        (lambda: prompt(5), r"prompts\[0\] and max_new_tokens - 1 = 9: must be at most"),
        (lambda: read_run(SPEC | parts), "train.train_length = 16: must be at most model.learned_positions = 8"),
    ):
        with pytest.raises(InputError, match=words):
            refused()


def test_dropout_of_both_branches_and_of_every_layer_is_independent():
    """Let every branch add 3: with a rate of 1/4 it adds 0 or 4, so two independent ones add 0, 4 or 8."""
    config = make_config(dropout=0.25, attention_output_bias=True, mlp_bias=True)
    model = nnx.merge(*random_model(config))
    for branch, weight, bias in (("attention", "output_HKD", "output_bias_D"), ("mlp", "down_FD", "down_bias_D")):
        module = getattr(model.layers, branch)
        getattr(module, weight)[...] = jnp.zeros_like(getattr(module, weight)[...])
        getattr(module, bias)[...] = jnp.full_like(getattr(module, bias)[...], 3)
    model.embedding_VD[...], model.norm = jnp.zeros_like(model.embedding_VD[...]), None
    features = jax.jit(lambda model, x, key: model.features(x, dropout_key=key))
    found = np.asarray(features(model, tokens(4, 16), jax.random.key(0)))  # the sum of four branches
    shares = [np.mean(found == total) for total in (0, 4, 8, 12, 16)]
    np.testing.assert_allclose(shares, np.array([1, 12, 54, 108, 81]) / 256, atol=0.05)


LAST_ROWS = {
    "pythia": {},
    "llama, window": {"window": 5, "attention": BLOCKWISE},
    "encoder": {},
    "cope": {"bias": {"name": "cope", "num_positions": 4}, "rotary": {"name": "rope"}},
}


@pytest.mark.parametrize(("name", "mesh"), [*((name, None) for name in LAST_ROWS), ("llama, window", (1, 2, 2, 2))])
def test_the_last_layer_computes_only_the_rows_asked_for(name, mesh):
    """Compare with all rows, also where devices share a sequence, and count the work of the program."""
    options = ENCODER if name == "encoder" else ARCHITECTURES.get(name.split(",")[0], {})
    config = make_config(**options | {"num_heads": 4, "num_kv_heads": 2, "vocab_size": 12} | LAST_ROWS[name])
    (graphdef, params), x = random_model(config), tokens(2, 24)

    def run(num_last):
        program = jax.jit(lambda params, x: nnx.merge(graphdef, params).features(x, num_last=num_last))
        return program(params, x), program.lower(params, x).cost_analysis()["flops"]

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(MeshConfig(*mesh))):
        whole, _ = run(None)
        found, few = run(4)
        _, more = run(12)
    assert whole.std() > 0.3
    np.testing.assert_allclose(found, whole[:, -4:], rtol=1e-5, atol=1e-5)
    assert few < 0.9 * more


def test_the_bias_that_the_readme_adds():
    readme = (DOCS.parents[1] / "README.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "InverseConfig" in block]
    names = {"dataclasses": dataclasses, "BiasConfig": BiasConfig, "jnp": jnp, "distances": distances}
    exec(code.split("BIASES =")[0], names)
    bias = names["InverseConfig"]().build(2, 8, None)
    np.testing.assert_allclose(bias(jnp.array([3]), jnp.arange(4))[1, 0], [1 / 4, 1 / 3, 1 / 2, 1])


def test_fire_has_other_settings_under_dape():
    """Settings of FIRE depend on DAPE, as in the official configurations: a confound (`docs/methods.md`)."""
    get_config = runpy.run_path(str(DOCS.parents[1] / "configs" / "paper.py"))["get_config"]
    for processor, threshold, activation in (("dape,kernel=3", 256, "leaky_relu"), ("none", 64, "relu")):
        bias = get_config(f"125m,bias=fire,processor={processor}").model.bias.to_dict()
        assert bias == {"name": "fire", "threshold": threshold, "width": 32, "initial_c": 0.1, "activation": activation}
        assert all(f"`{value}`" in DOCS.read_text() for value in (threshold, activation))


def test_a_cache_that_could_not_be_right_is_refused():
    for options, reason in (({"edge": "listing"}, "listing.*appended"), ({"leak": True}, "leak.*not generated yet")):
        with pytest.raises(InputError, match=reason):
            make_cache(make_config(processor=choose("processor", "dape", **options)), 2, 8)
        make_cache(make_config(processor=choose("processor", "dape", kernel_width=1, **options)), 2, 8)
    for rotary in (DynamicNtk(), LongRope()):
        with pytest.raises(InputError, match=r"model.rotary.name = .*cannot generate"):
            make_cache(dataclasses.replace(make_config(), rotary=rotary), 2, 8)


def test_bfloat16_keeps_parameters_and_logits_in_float32():
    graphdef, params = random_model(make_config(dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    half, full = (logits_of(each)(params, tokens(2, 9)) for each in (graphdef, model_structure(make_config())[0]))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, full, atol=0.2)
    assert np.abs(half - full).max() > 1e-4  # the dtype changes the result


BAD = [
    ("num_heads = 3: must divide model.width = 16", {"num_heads": 3}),
    ("num_heads = 0: must be positive", {"num_heads": 0}),
    ("num_kv_heads = 3: must divide model.num_heads = 2", {"num_kv_heads": 3}),
    ("head_dim = 0: must be positive", {"head_dim": 0}),
    ("width = 0: must be positive", {"width": 0}),
    ("mlp_width = -1: must be positive", {"mlp_width": -1}),
    ("window = 0: must be 1 or more", {"window": 0}),
    ("alternate_window = 0: must be 1 or more", {"alternate_layers": [0], "alternate_window": 0}),
    ("alternate_layers = (1, 0): must be increasing numbers below", {"alternate_layers": [1, 0]}),
    ("alternate_layers = (2,): must be increasing numbers below", {"alternate_layers": [2]}),
    ("alternate_layers = (): must be given with", {"alternate_window": 4}),
    ("learned_positions = 0: must be 1 or more", {"learned_positions": 0}),
    ("score_cap = -1.0: must be positive, or None", {"score_cap": -1.0}),
    ("head_dim = 7: must be even", {"head_dim": 7, "alternate_layers": [0], "alternate_rotary": {"name": "rope"}}),
    ("norm = 'batch_norm': must be one of", {"norm": "batch_norm"}),
    ("norm_epsilon = 0.0: must be positive", {"norm_epsilon": 0.0}),
    ("parallel_residual = True: must be False", {"norm_first": False, "parallel_residual": True}),
    ("num_outputs = 5: must be model.vocab_size = 11", {"tied_embeddings": True, "num_outputs": 5}),
    ("dtype = 'float64': must be another dtype", {"dtype": "float64"}),
    ("dtype = 'float8': must be one of", {"dtype": "float8"}),
    ("rotary.fraction = 8 x 0.4 = 3: must be even", {"rotary": {"name": "rope", "fraction": 0.4}}),
    ("rotary.fraction = 1.5: must be", {"rotary": {"name": "rope", "fraction": 1.5}}),
    ("rotary.high_frequency_factor = 4.0: must", {"rotary": {"name": "llama3", "low_frequency_factor": 4.0}}),
]


def test_the_normaliser_of_chunked_logits_is_computed_once():
    graphdef, params = random_model(make_config())
    model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, params))
    gradient = jax.grad(lambda x: nll_of_features(model, x, jnp.asarray(tokens(2, 8)), 4).sum())
    program = str(jax.make_jaxpr(gradient)(jnp.ones((2, 8, 16))))
    assert (program.count(" exp "), program.count(" reduce_max")) == (2, 1)  # the backward pass needs exp again


@pytest.mark.parametrize(
    ("chunk_tokens", "changes"), [(4, {"tied_embeddings": True}), (6, {"output_bias": True, "logit_cap": 3.0})]
)
def test_the_loss_in_chunks_is_that_of_the_logits(chunk_tokens, changes):
    """The vocabulary is padded with columns that are not 0 and have no probability; gradients: `test_sharding`."""
    model = nnx.merge(*random_model(make_config(num_layers=1, vocab_multiple=8, **changes)))

    @jax.jit
    def losses(model, tokens_BT):
        features_BTD, targets_BT = model.features(tokens_BT[:, :-1]), tokens_BT[:, 1:]
        logits_BTV = model.logits(features_BTD)
        assert logits_BTV.shape == (2, 8, 11)
        return nll_of_features(model, features_BTD, targets_BT, chunk_tokens), nll(logits_BTV, targets_BT)

    np.testing.assert_allclose(*losses(model, tokens(2, 9)), rtol=1e-5)


def test_parameters_are_float32_also_with_64_bits():
    """A checkpoint can be read with and without JAX_ENABLE_X64; comparisons in float64 keep float64 parameters."""
    config = make_config(bias={"name": "fire"}, num_layers=1)
    with jax.enable_x64(True):
        for dtype in ("float32", "float64"):
            _, params = model_structure.__wrapped__(dataclasses.replace(config, dtype=dtype))
            dtypes = {path: leaf.dtype for path, leaf in flat_params(params).items()}
            assert set(dtypes.values()) >= {np.dtype(dtype)}, dtypes
            assert dtype == "float64" or set(dtypes.values()) == {np.dtype(dtype)}, dtypes


@pytest.mark.parametrize(("message", "changes"), BAD)
def test_bad_models_are_named(message, changes):
    with pytest.raises(InputError, match=re.escape(f"model.{message}")):
        make_config(**changes)
