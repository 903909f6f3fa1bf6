"""Transformer models: embeddings -> blocks -> logits.

In: `tokens_BT`. Out: `logits_BTV`. Next: `sharding.py`.

The paper's language models are GPT-NeoX decoders, `GPT_NEOX`: blocks x + attention(norm(x)) then x + mlp(norm(x)),
biases in all projections, untied embeddings, no dropout. Its algorithmic tasks use `ENCODER`: bidirectional attention,
and blocks norm(x + attention(x)) then norm(x + mlp(x)). `LLAMA` has the options of most published models. All are one
class with different options.

`extend` runs the same model on new tokens against a `Cache` of keys and values, for generation.

The layers are one module with stacked parameters, run by a scan, so that compile time does not grow with depth.

Parameters are float32 and named after the shape legend; matmuls run in the compute dtype; norms, scores and logits are
float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dape_jax.errors import InputError, Resumable, one_of, positive, require
from dape_jax.kernels import why_not_fused
from dape_jax.model.attention import Auto, Cuda, Fused, Implementation, attend_on_mesh
from dape_jax.model.biases import Bias, BiasConfig, KerpleConfig
from dape_jax.model.contextual import ContextualBias
from dape_jax.model.positions import NoRotary, Rope
from dape_jax.model.processors import DapeConfig, ProcessorConfig, ScoreMod
from dape_jax.model.scores import Mask, Positions, as_positions, segment_starts, soft_cap
from dape_jax.sharding import (
    ROW_AXES,
    at_least_float32,
    axis_sizes,
    constrain,
    embed,
    last_rows,
    matmul,
    stripe,
    unstripe,
    wide,
)

# Model sizes of the paper: table 8, and the official configurations for the two that table 8 omits.
SIZES = {
    "125m": {"num_layers": 12, "width": 768, "num_heads": 12},
    "350m": {"num_layers": 24, "width": 1024, "num_heads": 16},
    "2.7b": {"num_layers": 32, "width": 2560, "num_heads": 32},
    "6.7b": {"num_layers": 32, "width": 4096, "num_heads": 32},
}


@jax.custom_jvp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x Phi(x), where Phi is the normal distribution function, computed in float32 or better."""
    x = jax.lax.optimization_barrier(x)  # otherwise XLA may fuse the matmuls around it, which takes TPUs twice as long
    return (wide(x) * _normal_cdf(x)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals, tangents):
    """Only the slope is saved for the backward pass, in the dtype of x."""
    (x,), (dx,) = primals, tangents
    density = jnp.exp(-0.5 * jnp.square(wide(x))) / math.sqrt(2 * math.pi)
    return gelu(x), (_normal_cdf(x) + wide(x) * density).astype(x.dtype) * dx


def _normal_cdf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return Phi(x). For 16 bits, 1 + erf is exact enough, and has half the operations of erfc."""
    y = wide(x) * math.sqrt(0.5)
    return 0.5 * (1 + jax.lax.erf(y) if x.dtype.itemsize < 4 else jax.lax.erfc(-y))


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
NORMS = ("layer_norm", "rms_norm")
QK_NORMS = ("none", "head", "projection")
INITIALIZERS = ("gpt_neox", "fan_in")

# Values of a block that are saved for the backward pass: all; its input and the results of matmuls with weights; its
# input. The moments of a layer norm, two numbers per token, are always saved.
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names("moment", "product"),
    "full": jax.checkpoint_policies.save_only_these_names("moment"),
}

# Parameters outside a module: a nested dict of arrays, as training and checkpoints use them.
Params = dict[str, Any]

DTYPES = ("float32", "bfloat16", "float16", "float64")


FOLLOWS: Any = None  # default of a field whose value follows from other fields


class LayerKind(NamedTuple):
    """Options in which the layers of a model may differ."""

    rotary: NoRotary | Rope  # rotary embedding of queries and keys
    mask: Mask  # which keys a query sees
    num_layers: int  # number of layers with these options


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Architecture of the model, and options of its computation. The defaults are those of the paper's language models.

    TransformerConfig(num_layers=2, width=64, num_heads=4, vocab_size=257, **LLAMA)      # or GPT_NEOX, of this module
    """

    num_layers: int  # L, blocks
    width: int  # D, of the residual stream
    num_heads: int  # H, of queries
    vocab_size: int  # rows of the embedding table
    num_kv_heads: int = FOLLOWS  # G, heads of keys and values, divides H; None: H. Fewer is grouped-query attention
    head_dim: int = FOLLOWS  # K; None: D / H
    mlp_width: int = FOLLOWS  # F; None: 4 D
    num_outputs: int = FOLLOWS  # V, tokens that have a logit; None: vocab_size, as in a language model
    # The tables of the tokens have unused rows up to a multiple of this. A row of padding is zero, and it is never
    # scored or sampled. None, in a run: mesh.tensor, and on several accelerators also a multiple of 128.
    vocab_multiple: int | None = 1
    rotary: NoRotary | Rope = NoRotary()  # rotary embedding of queries and keys
    bias: BiasConfig = KerpleConfig()  # position bias or contextual encoding
    processor: ProcessorConfig = DapeConfig()  # processor of the scores
    causal: bool = True  # a token sees no later token; if False, attention is bidirectional
    window: int | None = None  # a token sees itself and window - 1 tokens before it; None: all
    # Numbers of the layers, from 0, that have the next two fields in place of window and rotary, as in models with a
    # window in some layers only.
    alternate_layers: tuple[int, ...] = ()
    alternate_window: int | None = None  # None: all keys
    alternate_rotary: NoRotary | Rope | None = None  # None: that of the other layers
    norm_first: bool = True  # blocks x + f(norm(x)), and a norm after the last; if False, norm(x + f(x))
    branch_norm: bool = False  # blocks x + norm'(f(norm(x))) and, without norm_first, x + norm(f(x))
    parallel_residual: bool = False  # blocks x + attention(norm(x)) + mlp(norm'(x)); needs norm_first
    norm: str = "layer_norm"  # of the residual stream; "rms_norm" is without mean and bias
    norm_epsilon: float = 1e-5  # added to the variance or mean square
    activation: str = "gelu"  # of the MLP; "gelu" is the exact one
    gated_mlp: bool = False  # down(activation(gate(x)) up(x)) instead of down(activation(up(x)))
    dropout: float = 0.0  # rate, of the outputs of attention and MLP before they are added to the residual stream
    # RMSNorm of queries and keys before the rotary embedding: "none", of each "head" or of the whole "projection"
    qk_norm: str = "none"
    score_cap: float | None = None  # c in c tanh(scores / c), which replaces the scores before bias and processor
    projection_bias: bool = True  # the projections to queries, keys and values have biases
    attention_output_bias: bool = True  # the projection of the attended values has a bias
    mlp_bias: bool = True  # the projections of the MLP have biases
    scale_embedding: bool = False  # embeddings are multiplied by sqrt(D)
    learned_positions: int | None = None  # P, rows of a table that is added to the embeddings: the greatest length
    tied_embeddings: bool = False  # the unembedding is the embedding table
    output_bias: bool = False  # the logits have a bias
    logit_cap: float | None = None  # c in c tanh(logits / c), which replaces the logits before their bias is added
    # "gpt_neox": normal with std sqrt(2 / (5 D)), and 2 / (L sqrt(D)) for the last matrix of a branch; or "fan_in":
    # std 1 / sqrt(fan in) truncated at two std, and 0.02 for the embedding.
    initializer: str = "gpt_neox"
    # Implementation of attention, which does not change the result.
    attention: Resumable[Implementation] = dataclasses.field(default=Auto())
    # Values that are saved for the backward pass: all ("none"), results of matmuls ("dots"), inputs of blocks ("full")
    remat: Resumable[str] = "none"
    # Dtype of the matmuls. "auto": bfloat16 on TPU and GPU, float32 on CPU. "float64", with JAX_ENABLE_X64=true, is for
    # comparisons with other implementations.
    dtype: str = "auto"
    # Modules of your own, in the current directory or installed, that add to BIASES and PROCESSORS: see --import. They
    # are imported whenever the config is read.
    imports: Resumable[tuple[str, ...]] = ()

    def __post_init__(self):
        for field, *kinds in (
            ("rotary", NoRotary, Rope),
            ("alternate_rotary", NoRotary, Rope, type(None)),
            ("bias", BiasConfig),
            ("processor", ProcessorConfig),
            ("attention", Implementation),
        ):
            allowed = f"must be an instance of {' or '.join(kind.__name__ for kind in kinds)}"
            require(isinstance(getattr(self, field), tuple(kinds)), f"model.{field}", getattr(self, field), allowed)
        positive(self, "model", "num_layers", "width", "num_heads", "vocab_size", "norm_epsilon")
        heads, width = self.num_heads, self.width
        allowed = f"must divide model.width = {width} if model.head_dim is None"
        require(self.head_dim is not None or width % heads == 0, "model.num_heads", heads, allowed)
        follows = {"num_kv_heads": heads, "head_dim": width // heads, "mlp_width": 4 * width}
        follows |= {"num_outputs": self.vocab_size}
        for field, value in follows.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        positive(self, "model", *follows)
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", "float32" if jax.default_backend() == "cpu" else "bfloat16")
        one_of(self, "model", norm=NORMS, qk_norm=QK_NORMS, activation=ACTIVATIONS)
        one_of(self, "model", initializer=INITIALIZERS, remat=REMAT, dtype=("auto", *DTYPES))
        layers, has_alternate = self.alternate_layers, (self.alternate_window, self.alternate_rotary) != (None, None)
        are_layers = list(layers) == sorted(set(layers)) and all(0 <= layer < self.num_layers for layer in layers)
        can_tie = not self.tied_embeddings or self.num_outputs == self.vocab_size
        has_dtype = self.dtype != "float64" or jax.config.read("jax_enable_x64")
        for field, is_right, allowed in (
            ("num_kv_heads", heads % self.num_kv_heads == 0, f"must divide model.num_heads = {heads}"),
            ("alternate_layers", are_layers, f"must be increasing numbers below model.num_layers = {self.num_layers}"),
            ("alternate_layers", bool(layers) or not has_alternate, "must be given with alternate_window or _rotary"),
            ("parallel_residual", self.norm_first or not self.parallel_residual, "must be False without norm_first"),
            ("dropout", 0 <= self.dropout < 1, "must be at least 0 and below 1"),
            ("num_outputs", can_tie, f"must be model.vocab_size = {self.vocab_size} with tied_embeddings"),
            ("dtype", has_dtype, "must be another dtype, unless JAX_ENABLE_X64=true is set"),
        ):
            require(is_right, f"model.{field}", getattr(self, field), allowed)
        counts = "window", "alternate_window", "vocab_multiple", "learned_positions"
        limits = dict.fromkeys(counts, "1 or more")
        for field, allowed in (limits | dict.fromkeys(("score_cap", "logit_cap"), "positive")).items():
            value = getattr(self, field)
            require(value is None or value > 0, f"model.{field}", value, f"must be {allowed}, or None")
        for rotary, _, _ in self.layer_kinds:
            if isinstance(rotary, Rope):
                rotary.frequencies(rotary.num_rotated(self.head_dim))  # raises if the head dim is not supported

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the options of the layers and, if there are `alternate_layers`, those of these."""
        num_alternate = len(self.alternate_layers)
        kind = LayerKind(self.rotary, Mask(self.causal, self.window), self.num_layers - num_alternate)
        if not num_alternate:
            return (kind,)
        rotary = self.rotary if self.alternate_rotary is None else self.alternate_rotary
        return kind, LayerKind(rotary, Mask(self.causal, self.alternate_window), num_alternate)

    def check_length(self, field: str, length: int) -> None:
        """Raise `InputError` if the model has learned positions, and fewer than `length`, which `field` names."""
        limit = self.learned_positions
        require(limit is None or length <= limit, field, length, f"must be at most model.learned_positions = {limit}")

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Return the dtype of the matmuls."""
        return jnp.dtype(self.dtype)

    def padded(self, num_tokens: int) -> int:
        """Return the number of rows of a table of tokens."""
        return math.ceil(num_tokens / (self.vocab_multiple or 1)) * (self.vocab_multiple or 1)


# Presets: options of the paper's language models (the defaults), of the encoder of its algorithmic tasks (Deletang et
# al. 2023), and of Llama's decoder (Touvron et al. 2023).
GPT_NEOX = {
    field.name: field.default
    for field in dataclasses.fields(TransformerConfig)
    if field.type in (bool, float, str) and field.name != "dtype"
}
ENCODER = GPT_NEOX | {
    "causal": False,
    "norm_first": False,
    "activation": "relu",
    "dropout": 0.1,
    "projection_bias": False,
    "attention_output_bias": False,
    "scale_embedding": True,
    "output_bias": True,
    "initializer": "fan_in",
}
LLAMA = GPT_NEOX | {
    "norm": "rms_norm",
    "activation": "silu",
    "gated_mlp": True,
    "projection_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
}


def initializer(config: TransformerConfig, fan_in: int, *, ends_branch: bool = False) -> nnx.Initializer:
    """Return the initializer of a weight matrix; see `TransformerConfig`."""
    if config.initializer == "fan_in":
        return nnx.initializers.truncated_normal(1 / math.sqrt(fan_in))
    width = config.width
    return nnx.initializers.normal(
        2 / (config.num_layers * math.sqrt(width)) if ends_branch else math.sqrt(2 / (5 * width))
    )


@jax.custom_jvp
def variance(x: Float[Array, "... D"], mean: Float[Array, "... 1"]) -> Float[Array, "... 1"]:
    """Return the variance, from centred values. Its derivative by the mean, a sum of zeros, is not computed."""
    return jnp.square(x - mean).mean(axis=-1, keepdims=True)


@variance.defjvp
def _variance_jvp(primals, tangents):
    (x, mean), (dx, _) = primals, tangents
    return variance(x, mean), 2 * ((x - mean) * dx).mean(axis=-1, keepdims=True)


class LayerNorm(nnx.LayerNorm):
    """Flax's layer norm in the dtype of its input, with fewer passes over it in the backward pass."""

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the normalised input. Its moments are saved for the backward pass with every remat policy."""
        assert self.scale is not None
        assert self.bias is not None
        mean_BT1 = checkpoint_name(x_BTD.mean(axis=-1, keepdims=True), "moment")
        variance_BT1 = checkpoint_name(variance(x_BTD, mean_BT1), "moment")
        scale_BTD = jax.lax.rsqrt(variance_BT1 + self.epsilon) * self.scale[None, None]
        return (x_BTD - mean_BT1) * scale_BTD + self.bias[None, None]


Norm = LayerNorm | nnx.RMSNorm


def make_norm(config: TransformerConfig, rngs: nnx.Rngs) -> Norm:
    """Make a norm of the residual stream, in float32."""
    norm = nnx.RMSNorm if config.norm == "rms_norm" else LayerNorm
    return norm(config.width, epsilon=config.norm_epsilon, rngs=rngs)


def token_table(config: TransformerConfig, table: Float[Array, "_ _"], dim: int) -> nnx.Param:
    """Return a table of tokens as a parameter, with zeros up to `config.padded` of the size of `dim`."""
    padding = [(0, 0), (0, 0)]
    padding[dim] = (0, config.padded(table.shape[dim]) - table.shape[dim])
    return nnx.Param(jnp.pad(table, padding))


def bias_parameter(is_present: bool, *shape: int) -> nnx.Param | None:
    """Return the bias of a projection, initialised to zeros, or None."""
    return nnx.Param(jnp.zeros(shape)) if is_present else None


def linear(
    equation: str, x: Float[Array, "B T ..."], weight: Any, bias: nnx.Param | None, dtype: DTypeLike | None = None
) -> Float[Array, "B T ..."]:
    """Return `sharding.matmul` of `x` and a weight, in the dtype of `x`, plus the bias of the projection."""
    y = checkpoint_name(matmul(equation, x, weight.astype(x.dtype), dtype), "product")
    if bias is None:
        return y
    # The dims of heads as one, so that K < 128 leaves no lane of a TPU empty.
    return (y.reshape(*y.shape[:2], -1) + bias[...].reshape(1, 1, -1).astype(y.dtype)).reshape(y.shape)


class Cache(NamedTuple):
    """Keys (already rotated) and values of all layers for the tokens so far; column j contains position j."""

    k_LBSGK: Float[Array, "L B S G K"]
    v_LBSGK: Float[Array, "L B S G K"]


def make_cache(config: TransformerConfig, batch: int, length: int) -> Cache:
    """Return an empty cache in the compute dtype, for sequences of up to `length` tokens.

    Raises:
        InputError: the model cannot use a cache: it is bidirectional, or appending keys changes earlier rows.
    """
    require(config.causal, "model.causal", config.causal, "must be True: a bidirectional model cannot generate")
    for reason in filter(None, (config.processor.why_not_cached, why_not_stable(config))):
        raise InputError(f"{reason}: this model cannot generate")
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    return Cache(jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype))


def why_not_stable(config: TransformerConfig) -> str | None:
    """Return why appending a token changes the queries and keys of earlier ones, or None."""
    return next(filter(None, (kind.rotary.why_not_cached for kind in config.layer_kinds)), None)


class Places(NamedTuple):
    """Positions of the tokens of a sequence."""

    # For rotary embedding, in the order of `sharding.stripe`; with packed documents, of each sequence.
    pos: Int[Array, "S"] | Int[Array, "B S"]
    given_S: Int[Array, "S"] | None = None  # increasing, for attention; None: 0..S-1
    starts_BS: Int[Array, "B S"] | None = None  # see `scores.segment_starts`; None: each row is one document
    num_rows: int | None = None  # rows at the end to compute, from all keys and values; None: all rows

    def rows(self, x: Float[Array, "B S ..."]) -> Float[Array, "B T ..."]:
        """Return the rows to compute."""
        return x if self.num_rows is None else last_rows(x, self.num_rows, 1)


class SelfAttention(nnx.Module):
    """Projections around `attention.py`, with the layer's processor and, unless all layers share one, its bias."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, H, G, K = config.width, config.num_heads, config.num_kv_heads, config.head_dim
        normal = initializer(config, D)
        self.query_DHK = nnx.Param(normal(rngs.params(), (D, H, K)))
        self.key_DGK = nnx.Param(normal(rngs.params(), (D, G, K)))
        self.value_DGK = nnx.Param(normal(rngs.params(), (D, G, K)))
        self.output_HKD = nnx.Param(initializer(config, D, ends_branch=True)(rngs.params(), (H, K, D)))

        has_bias = config.projection_bias
        self.query_bias_HK, self.key_bias_GK, self.value_bias_GK = (
            bias_parameter(has_bias, *shape) for shape in ((H, K), (G, K), (G, K))
        )
        self.output_bias_D = bias_parameter(config.attention_output_bias, D)
        has_norm, is_per_head = config.qk_norm != "none", config.qk_norm == "head"
        self.query_norm, self.key_norm = (
            nnx.RMSNorm(size, epsilon=config.norm_epsilon, rngs=rngs) if has_norm else None
            for size in ((K, K) if is_per_head else (H * K, G * K))
        )
        # A separate random stream, so that all other parameters are initialised identically for every method.
        score_rngs = nnx.Rngs(rngs.params())
        self.bias = None if config.bias.shared_by_layers else config.bias.build(H, K, score_rngs)
        has_bias = config.bias.shared_by_layers or self.bias is not None
        self.processor = config.processor.build(H, has_bias=has_bias, dtype=config.compute_dtype, rngs=score_rngs)
        self.kinds, self.alternate_layers = config.layer_kinds, config.alternate_layers
        self.score_cap, self.attention = config.score_cap, config.attention

    def of_kind(self, function: Callable[..., Any], layer: Int[Array, ""] | int, *args: Any) -> Any:
        """Return `function(kind, *args)` for the kind of a layer. If its number is traced, both kinds are compiled."""
        if len(self.kinds) == 1 or isinstance(layer, int):
            return function(self.kinds[len(self.kinds) > 1 and layer in self.alternate_layers], *args)
        is_alternate = (layer == np.array(self.alternate_layers)).any()
        first, alternate = (functools.partial(function, kind) for kind in self.kinds)
        return jax.lax.cond(is_alternate, alternate, first, *args)

    def project(
        self, x_BTD: Float[Array, "B T D"], pos: Int[Array, "T"] | Int[Array, "B T"], layer: Int[Array, ""] | int = 0
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
        """Return queries and keys, normalised (if the model does this) and rotated, and values."""
        q_BTHK = linear("BTD,DHK->BTHK", x_BTD, self.query_DHK, self.query_bias_HK)
        k_BTGK = linear("BTD,DGK->BTGK", x_BTD, self.key_DGK, self.key_bias_GK)
        v_BTGK = linear("BTD,DGK->BTGK", x_BTD, self.value_DGK, self.value_bias_GK)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHK, k_BTGK = (
                norm(wide(x).reshape(*x.shape[:2], -1, norm.num_features)).reshape(x.shape).astype(x.dtype)
                for norm, x in ((self.query_norm, q_BTHK), (self.key_norm, k_BTGK))
            )
        q_BTHK, k_BTGK = self.of_kind(lambda kind, *x: [kind.rotary(each, pos) for each in x], layer, q_BTHK, k_BTGK)
        return q_BTHK, k_BTGK, v_BTGK

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        places: Places,
        shared_bias: Bias | ContextualBias | None,
        cache: Cache | None = None,
        layer: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "B _ D"], Cache | None]:
        """Attend to the visible positions of `x_BTD` or, if there is a cache, of the cache after adding `x_BTD` to it.

        Returns:
            The update of the rows of the residual stream that are computed, and the updated cache.
        """
        q_BTHK, k_BSGK, v_BSGK = self.project(x_BTD, places.pos, layer)
        q_BTHK = places.rows(q_BTHK)
        score_mod = ScoreMod(shared_bias if self.bias is None else self.bias, self.processor, cap=self.score_cap)
        if cache is None:

            def attend(kind: LayerKind, q: Array, k: Array, v: Array) -> Float[Array, "B _ H K"]:
                return attend_on_mesh(self.attention, q, k, v, score_mod, kind.mask, places.given_S, places.starts_BS)

        else:
            corner = (layer, 0, places.pos[0], 0, 0)
            cache = Cache(
                jax.lax.dynamic_update_slice(cache.k_LBSGK, k_BSGK[None], corner),
                jax.lax.dynamic_update_slice(cache.v_LBSGK, v_BSGK[None], corner),
            )
            k_BSGK, v_BSGK = cache.k_LBSGK[layer], cache.v_LBSGK[layer]
            positions = Positions(places.pos, jnp.arange(k_BSGK.shape[1]))
            attention = Auto() if isinstance(self.attention, Fused) else self.attention

            def attend(kind: LayerKind, q: Array, k: Array, v: Array) -> Float[Array, "B _ H K"]:
                mask = dataclasses.replace(kind.mask, row_stride=None)  # rows are anywhere in the cache
                return attention.attend_rows(q, k, v, positions, score_mod, mask)

        out_BTHK = self.of_kind(attend, layer, q_BTHK, k_BSGK, v_BSGK)
        return linear("BTHK,HKD->BTD", out_BTHK, self.output_HKD, self.output_bias_D), cache


class MLP(nnx.Module):
    """Two layers with an activation between them; if gated, the activation of a third layer multiplies the first."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, F = config.width, config.mlp_width
        self.up_DF = nnx.Param(initializer(config, D)(rngs.params(), (D, F)))
        self.up_bias_F = bias_parameter(config.mlp_bias, F)
        self.down_FD = nnx.Param(initializer(config, F, ends_branch=True)(rngs.params(), (F, D)))
        self.down_bias_D = bias_parameter(config.mlp_bias, D)
        self.gate_DF = nnx.Param(initializer(config, D)(rngs.params(), (D, F))) if config.gated_mlp else None
        self.gate_bias_F = bias_parameter(config.mlp_bias and config.gated_mlp, F)
        self.activation = config.activation  # its name: functions of JAX cannot be serialised

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return down(activation(up(x))), or down(activation(gate(x)) up(x))."""
        h_BTF, activation = linear("BTD,DF->BTF", x_BTD, self.up_DF, self.up_bias_F), ACTIVATIONS[self.activation]
        if self.gate_DF is None:
            h_BTF = activation(h_BTF)
        else:
            h_BTF *= activation(linear("BTD,DF->BTF", x_BTD, self.gate_DF, self.gate_bias_F))
        return linear("BTF,FD->BTD", h_BTF, self.down_FD, self.down_bias_D)


class Block(nnx.Module):
    """Attention and the MLP, each adding to the residual stream.

    x + f(norm(x))                                attention, then the MLP
    norm(x + f(x))                                the same, without `norm_first`
    x + norm'(f(norm(x)))                         `branch_norm`
    x + norm(f(x))                                `branch_norm` without `norm_first`
    x + attention(norm(x)) + mlp(norm'(x))        `parallel_residual`
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, rngs)
        self.attention = SelfAttention(config, rngs=rngs)
        self.mlp_norm = make_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.attention_branch_norm, self.mlp_branch_norm = (
            make_norm(config, rngs) if config.branch_norm and config.norm_first else None for _ in range(2)
        )
        self.dropout = nnx.Dropout(config.dropout)
        self.norm_first, self.parallel_residual = config.norm_first, config.parallel_residual
        self.branch_norm = config.branch_norm
        self.dtype = config.compute_dtype

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        places: Places,
        shared_bias: Bias | ContextualBias | None,
        cache: Cache | None = None,
        layer: Int[Array, ""] | int = 0,
        dropout_key: Array | None = None,
    ) -> tuple[Float[Array, "B _ D"], Cache | None]:
        """Apply the layer to the residual stream, which is float32; return the rows computed and the updated cache."""
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)

        def add(norm: Norm, x_BTD: Array, update_BTD: Array, key: Array | None) -> Float[Array, "B _ D"]:
            if self.branch_norm:
                update_BTD = norm(update_BTD.astype(x_BTD.dtype))
            x_BTD += self.dropout(update_BTD, deterministic=key is None, rngs=key).astype(x_BTD.dtype)
            return x_BTD if self.norm_first or self.branch_norm else norm(x_BTD)

        attention_input_BTD = self.branch_input(self.attention_norm, x_BTD)
        attended_BTD, cache = self.attention(attention_input_BTD, places, shared_bias, cache, layer)
        x_BTD = places.rows(x_BTD)
        added_BTD = add(self.attention_branch_norm or self.attention_norm, x_BTD, attended_BTD, keys[0])
        mlp_input_BTD = self.branch_input(self.mlp_norm, x_BTD if self.parallel_residual else added_BTD)
        return add(self.mlp_branch_norm or self.mlp_norm, added_BTD, self.mlp(mlp_input_BTD), keys[1]), cache

    def branch_input(self, norm: Norm, x_BTD: Float[Array, "B _ D"]) -> Float[Array, "B _ D"]:
        """Return the input of attention or of the MLP, in the compute dtype."""
        return (norm(x_BTD) if self.norm_first else x_BTD).astype(self.dtype)


class Transformer(nnx.Module):
    """Decoder of a language model, or encoder of the algorithmic tasks: `Transformer(config, rngs=nnx.Rngs(0))`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, V = config.width, config.num_outputs
        is_fan_in = config.initializer == "fan_in"
        embedding_initializer = nnx.initializers.truncated_normal(0.02) if is_fan_in else initializer(config, D)
        self.embedding_VD = token_table(config, embedding_initializer(rngs.params(), (config.vocab_size, D)), 0)
        P = config.learned_positions
        self.positions_PD = None if P is None else nnx.Param(embedding_initializer(rngs.params(), (P, D)))
        score_rngs = nnx.Rngs(rngs.params())  # see `SelfAttention`
        self.shared_bias = (
            config.bias.build(config.num_heads, config.head_dim, score_rngs) if config.bias.shared_by_layers else None
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def make_layers(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.layers = make_layers(rngs)
        self.norm = make_norm(config, rngs) if config.norm_first or config.branch_norm else None
        is_tied, draw = config.tied_embeddings, initializer(config, D)
        self.unembedding_DV = None if is_tied else token_table(config, draw(rngs.params(), (D, V)), 1)
        self.output_bias_V = bias_parameter(config.output_bias, config.padded(V))
        self.config = config
        if config.dtype != "float64":  # also with JAX_ENABLE_X64, so that a checkpoint does not depend on it
            params = nnx.state(self, nnx.Param)
            nnx.update(self, jax.tree.map(lambda param: param.astype(jnp.float32), params))

    @property
    def output_DV(self) -> Float[Array, "D V"]:
        """Return the padded matrix from features to logits: the unembedding, or the transposed embedding table."""
        return self.embedding_VD[...].T if self.unembedding_DV is None else self.unembedding_DV[...]

    def features(
        self,
        tokens_BT: Int[Array, "B T"],
        pos_T: Int[Array, "T"] | None = None,
        dropout_key: Array | None = None,
        num_last: int | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B _ D"]:
        """Run the model up to the unembedding.

        Args:
            tokens_BT: the tokens.
            pos_T: positions of the tokens, increasing, negative for padding at the end; 0..T-1 if None.
            dropout_key: random key of dropout, or None to disable dropout.
            num_last: number of positions at the end whose features are returned, or None for all. The last layer
                computes only these rows.
            segment_ids: document of each token, for packed documents, or None. Positions restart at each document, and
                its features are those of the document alone. Needs `pos_T` None.
        """
        require(pos_T is None or segment_ids is None, "pos_T", "given", "must be None with segment_ids")
        reason = why_not_stable(self.config)
        require(segment_ids is None or reason is None, "segment_ids", "given", f"must be None: {reason}")

        require(tokens_BT.ndim == 2, "tokens_BT.shape", tokens_BT.shape, "must be [B, T]")
        length, num_layers = tokens_BT.shape[1], self.config.num_layers
        self.config.check_length("length", length)
        pos_T = as_positions("pos_T", pos_T, self.layers.attention.processor.key_halo)
        shape = (length,) if pos_T is None else pos_T.shape
        require(shape == (length,), "pos_T.shape", shape, f"must be [T] = {(length,)}")
        num_last, parts = num_last or length, math.prod(axis_sizes()[axis] for axis in ROW_AXES)
        num_rows = -(-num_last // parts) * parts  # the same number on every device
        pos = jnp.arange(length) if pos_T is None else pos_T
        starts_BT = None if segment_ids is None else segment_starts(segment_ids, tokens_BT.shape)
        pos = stripe(pos, 0) if starts_BT is None else stripe(pos[None] - starts_BT, 1)
        places = Places(pos, pos_T, starts_BT)
        x_BTD = self.embeddings(stripe(tokens_BT, 1), pos)

        def layer(x_BTD: Array, of_layer: tuple[Block, Array, Array | None]) -> tuple[Float[Array, "B T D"], None]:
            block, number, key = of_layer
            return constrain(block(x_BTD, places, self.shared_bias, layer=number, dropout_key=key)[0], "BTD"), None

        if REMAT[self.config.remat] is not None:
            layer = jax.checkpoint(layer, policy=REMAT[self.config.remat], prevent_cse=False)
        keys = None if dropout_key is None else jax.random.split(dropout_key, num_layers)
        if num_rows >= length:
            x_BTD, _ = jax.lax.scan(layer, x_BTD, (self.layers, jnp.arange(num_layers), keys))
        else:
            assert dropout_key is None
            # Blocks are taken out of the stack one at a time: a slice with all but the last would be a copy.
            x_BTD, _ = jax.lax.scan(lambda x, i: layer(x, (self.block(i), i, None)), x_BTD, jnp.arange(num_layers - 1))
            last, places = num_layers - 1, places._replace(num_rows=num_rows)
            x_BTD, _ = self.block(last)(x_BTD, places, self.shared_bias, layer=last)
        return constrain(unstripe(self._normed(x_BTD), 1), "BTD")[:, -num_last:]

    def block(self, number: Int[Array, ""] | int) -> Block:
        """Return one layer of the stack."""
        return jax.tree.map(lambda stacked: stacked[number], self.layers)

    def embeddings(
        self, tokens_BT: Int[Array, "B T"], pos: Int[Array, "T"] | Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Return the input of the first layer."""
        x_BTD = embed(self.embedding_VD[...], tokens_BT)
        if self.config.scale_embedding:
            x_BTD *= math.sqrt(self.config.width)
        if self.positions_PD is not None:
            x_BTD += embed(self.positions_PD[...], jnp.broadcast_to(pos, tokens_BT.shape))
        return x_BTD

    def _normed(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return x_BTD if self.norm is None else self.norm(x_BTD)

    def extend(
        self, tokens_BT: Int[Array, "B T"], pos_T: Int[Array, "T"], cache: Cache
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Run the model on T more tokens of every sequence; return their features and the updated cache.

        Args:
            tokens_BT: the tokens.
            pos_T: positions of the tokens, consecutive. The cache must contain all earlier tokens. Positions beyond its
                last column give wrong results, not an error. For sequences of different lengths, `jax.vmap` the call.
            cache: result of `make_cache` or of an earlier call. Columns at the first position and later are overwritten
                before they are read.
        """
        pos_T = jnp.asarray(as_positions("pos_T", pos_T), int)
        x_BTD = self.embeddings(tokens_BT, pos_T)

        def layer(
            carry: tuple[Array, Cache], of_layer: tuple[Block, Array]
        ) -> tuple[tuple[Float[Array, "B T D"], Cache], None]:
            (x_BTD, cache), (block, number) = carry, of_layer
            x_BTD, written = block(x_BTD, Places(pos_T), self.shared_bias, cache, number)
            assert written is not None
            return (x_BTD, written), None

        numbers = jnp.arange(self.config.num_layers)
        (x_BTD, cache), _ = jax.lax.scan(layer, (x_BTD, cache), (self.layers, numbers))
        return self._normed(x_BTD), cache

    def logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the logits of features, float32 (float64 if the compute dtype is)."""
        x_BTD = x_BTD.astype(self.config.compute_dtype)
        dtype = at_least_float32(x_BTD.dtype)
        logits_BTV = soft_cap(linear("BTD,DV->BTV", x_BTD, self.output_DV, None, dtype), self.config.logit_cap)
        if self.output_bias_V is not None:
            logits_BTV += self.output_bias_V[None, None].astype(logits_BTV.dtype)
        return logits_BTV[..., : self.config.num_outputs]

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        pos_T: Int[Array, "T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Return the logits at every position; in a language model, the logits of the next token."""
        return self.logits(self.features(tokens_BT, pos_T, segment_ids=segment_ids))


def attention_of(
    config: TransformerConfig,
    length: int,
    platform: str,
    device_kind: str | None = None,
    row_stride: int = 1,
    has_segments: bool = False,
    kind: int = 0,
) -> Implementation:
    """Return the implementation of a model's self-attention: `config.attention`, or the choice of `Auto`.

    `row_stride` is the number of devices that share the rows: mesh.context x mesh.tensor. `kind` is an index into
    `config.layer_kinds`.

    Raises:
        InputError: the model uses `Fused` or `Cuda`, and no kernel supports it.
    """
    attention = config.attention
    if not isinstance(attention, Auto | Fused):
        return attention
    model = nnx.merge(*model_structure(config))
    layer = model.layers.attention
    score_mod = ScoreMod(model.shared_bias if layer.bias is None else layer.bias, layer.processor, cap=config.score_cap)
    q_BTHK, k_BSGK = (
        jax.ShapeDtypeStruct((1, rows, heads, config.head_dim), config.compute_dtype)
        for rows, heads in ((length // row_stride, config.num_heads), (length, config.num_kv_heads))
    )
    args = q_BTHK, k_BSGK, score_mod, dataclasses.replace(config.layer_kinds[kind].mask, row_stride=row_stride)
    options: dict[str, Any] = {"has_segments": has_segments, "device_kind": device_kind}
    if isinstance(attention, Auto):
        return attention.choose(*args, **options, platform=platform)
    reason = why_not_fused(*args, **options, platform=attention.platform or platform)
    if isinstance(attention, Cuda) and platform != "gpu":
        reason = f"it needs an NVIDIA GPU, not the platform {platform!r}"
    name = "cuda" if isinstance(attention, Cuda) else "fused"
    require(reason is None, "model.attention.name", name, f"must be auto, blockwise or dense: {reason}")
    return attention


PARAMETER_KINDS = ("bias", "processor")  # position biases and processors; other parameters have no kind


def parameter_kind(path: tuple[str, ...]) -> str | None:
    """Return the kind of the parameter at this path, one of `PARAMETER_KINDS`, or None."""
    if "processor" in path[:-1]:
        return "processor"
    return "bias" if {"bias", "shared_bias"} & set(path[:-1]) else None


def flat_params(params: Params) -> dict[tuple[str, ...], Any]:
    """Return the parameters of a nested dict by path; `flax.traverse_util.unflatten_dict` is the inverse."""
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def parameter_counts(params: Params) -> dict[str, int]:
    """Count the parameters: in `total`, and of each of `PARAMETER_KINDS`."""
    sizes = [(parameter_kind(path), leaf.size) for path, leaf in flat_params(params).items()]
    counts = {kind: sum(size for other, size in sizes if other == kind) for kind in PARAMETER_KINDS}
    return {"total": sum(size for _, size in sizes)} | counts


def split_params(params: Params, kinds: tuple[str, ...]) -> tuple[Params, Params]:
    """Return the parameters of these kinds, and all others, as nested dicts; without kinds, all parameters and {}.

    Raises:
        InputError: the model has no parameters of one of the kinds.
    """
    if not kinds:
        return params, {}
    flat = flat_params(params)
    missing = set(kinds) - set(map(parameter_kind, flat))
    allowed = f"the model has no parameters of: {', '.join(sorted(missing))}"
    require(not missing, "init.train_only", ",".join(kinds), allowed)
    chosen = {path: leaf for path, leaf in flat.items() if parameter_kind(path) in kinds}
    others = {path: leaf for path, leaf in flat.items() if path not in chosen}
    return unflatten_dict(chosen), unflatten_dict(others)


def merge_params(first: Params, second: Params) -> Params:
    """Merge the parameters of two nested dicts; where both have a parameter, return the second's."""
    return unflatten_dict(flat_params(first) | flat_params(second)) if second else first


@functools.cache  # every step, evaluator and tool of a run needs it, and building takes a tenth of a second
def model_structure(config: TransformerConfig) -> tuple[nnx.GraphDef, Params]:
    """Return the model's static structure and the shapes and dtypes of its parameters, without allocating them.

    All callers share the result: do not modify it.
    """
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    return graphdef, nnx.to_pure_dict(params)
