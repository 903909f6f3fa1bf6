"""The paper's decoder: embeddings -> blocks -> logits, in GPT-NeoX's form.

In: `tokens_BT`. Out: `logits_BTV`. Next: `sharding.py`.

`extend` is the same model on some rows against a `Cache` of keys and values: what generation calls.

Pre-LayerNorm blocks, x + attention(norm(x)) then x + mlp(norm(x)); biases everywhere; untied embeddings; no dropout.
The layers are one module with stacked parameters, run by a scan, so that compile time does not grow with depth.

Parameters are float32 and named after the shape legend; matmuls run in the compute dtype; norms, scores and logits are
float32.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dape_jax.attention import Attention, attend_on_mesh
from dape_jax.biases import Bias, BiasConfig
from dape_jax.contextual import ContextualBias
from dape_jax.errors import InputError, require
from dape_jax.positions import NoRotary, Rope
from dape_jax.processors import ProcessorConfig
from dape_jax.sharding import collect_rows, deal_rows, look_up, matmul, place

# The paper's model sizes: table 8, and the official configurations for the two that table 8 leaves out.
SIZES = {
    "125m": {"num_layers": 12, "width": 768, "num_heads": 12},
    "350m": {"num_layers": 24, "width": 1024, "num_heads": 16},
    "2.7b": {"num_layers": 32, "width": 2560, "num_heads": 32},
    "6.7b": {"num_layers": 32, "width": 4096, "num_heads": 32},
}

# What the backward pass keeps of a block: everything; the results of matmuls without a batch dim (not the scores);
# nothing but the block's input.
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}

# Parameters outside a module: a nested dict of arrays, which is what trains and what a checkpoint holds.
Params = dict[str, Any]

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Everything that decides the model's function and how it is computed.

    Args:
        num_layers: number of blocks.
        width: D.
        num_heads: H; divides the width.
        num_kv_heads: G, heads of keys and values; divides H. H, or fewer for grouped-query attention.
        vocab_size: V.
        rotary: what rotates queries and keys.
        bias: position bias.
        processor: what is done to the scores.
        window: a token sees itself and so many tokens less one before it; None for all (sliding-window attention).
        attention: `Dense` or `Blockwise`; how it is computed, not what.
        remat: what the backward pass keeps of a block, a key of `REMAT`.
        dtype: of the matmuls. (A config file may say "auto": bfloat16 on TPU and GPU, float32 on CPU.)
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rotary: NoRotary | Rope
    bias: BiasConfig
    processor: ProcessorConfig
    window: int | None
    attention: Attention
    remat: str
    dtype: str

    def __post_init__(self):
        for field in ("num_layers", "width", "num_heads", "num_kv_heads", "vocab_size"):
            require(getattr(self, field) > 0, f"model.{field}", getattr(self, field), "a positive number")
        require(
            self.width % self.num_heads == 0,
            "model.num_heads",
            self.num_heads,
            f"a divisor of model.width = {self.width}",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"a divisor of model.num_heads = {self.num_heads}",
        )
        require(self.window is None or self.window > 0, "model.window", self.window, "1 or more, or None for all")
        if isinstance(self.rotary, Rope):
            require(self.head_dim % 2 == 0, "model.width / model.num_heads", self.head_dim, "even for rotary embedding")
            self.rotary.frequencies(self.head_dim)  # a variant may refuse a head dim
        require(self.remat in REMAT, "model.remat", self.remat, f"one of {sorted(REMAT)}")
        require(self.dtype in DTYPES, "model.dtype", self.dtype, f"one of {list(DTYPES)}")

    @property
    def head_dim(self) -> int:
        """K."""
        return self.width // self.num_heads

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of the matmuls."""
        return jnp.dtype(self.dtype)


def layer_norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """GPT-NeoX's LayerNorm: epsilon 1e-5; float32, the variance from centred values."""
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class Cache(NamedTuple):
    """Keys (rotated already) and values of the tokens so far, of all layers; column j holds position j.

    Args:
        k_LBSGK: keys of S columns.
        v_LBSGK: values.
    """

    k_LBSGK: Float[Array, "L B S G K"]
    v_LBSGK: Float[Array, "L B S G K"]


def make_cache(config: TransformerConfig, batch: int, length: int) -> Cache:
    """An empty cache.

    Args:
        config: the model's.
        batch: B.
        length: S, the most tokens that a sequence will have.

    Raises:
        InputError: a row's result would change when keys are appended, so that a cache could not be right.
    """
    if reason := config.processor.why_not_cached:
        raise InputError(f"{reason}: this model cannot generate")
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    return Cache(jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype))


class SelfAttention(nnx.Module):
    """Projections around `attention.py`; holds the layer's own bias (unless all layers share one) and processor."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, H, G, K = config.width, config.num_heads, config.num_kv_heads, config.head_dim
        normal = nnx.initializers.normal(math.sqrt(2 / (5 * D)))
        output_normal = nnx.initializers.normal(2 / (config.num_layers * math.sqrt(D)))
        self.query_DHK = nnx.Param(normal(rngs.params(), (D, H, K)))
        self.key_DGK = nnx.Param(normal(rngs.params(), (D, G, K)))
        self.value_DGK = nnx.Param(normal(rngs.params(), (D, G, K)))
        self.output_HKD = nnx.Param(output_normal(rngs.params(), (H, K, D)))
        self.query_bias_HK = nnx.Param(jnp.zeros((H, K)))
        self.key_bias_GK = nnx.Param(jnp.zeros((G, K)))
        self.value_bias_GK = nnx.Param(jnp.zeros((G, K)))
        self.output_bias_D = nnx.Param(jnp.zeros((D,)))
        # Of their own stream, so that all other parameters are the same for every method.
        score_rngs = nnx.Rngs(rngs.params())
        self.bias = None if config.bias.shared_by_layers else config.bias.build(H, K, score_rngs)
        has_bias = config.bias.shared_by_layers or self.bias is not None
        self.processor = config.processor.build(H, has_bias=has_bias, dtype=config.compute_dtype, rngs=score_rngs)
        self.rotary = config.rotary
        self.window = config.window
        self.attention = config.attention
        self.dtype = config.compute_dtype

    def project(
        self, x_BTD: Float[Array, "B T D"], pos_T: Int[Array, "T"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
        """Queries, keys and values, rotated where positions are rotary."""

        def project(weight_DHK: nnx.Param, bias_HK: nnx.Param) -> Float[Array, "B T H K"]:
            y_BTHK = matmul("BTD,DHK->BTHK", x_BTD, weight_DHK.astype(self.dtype))
            return y_BTHK + bias_HK[None, None].astype(self.dtype)

        q_BTHK = self.rotary(project(self.query_DHK, self.query_bias_HK), pos_T)
        k_BTGK = self.rotary(project(self.key_DGK, self.key_bias_GK), pos_T)
        return q_BTHK, k_BTGK, project(self.value_DGK, self.value_bias_GK)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        pos_T: Int[Array, "T"],
        shared_bias: Bias | ContextualBias | None,
        cache: Cache | None = None,
        layer: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Attend every position to itself and those before it, in `x_BTD` or in the cache, and write to the cache."""
        q_BTHK, k_BSGK, v_BSGK = self.project(x_BTD, pos_T)
        options = {
            "bias": shared_bias if self.bias is None else self.bias,
            "processor": self.processor,
            "window": self.window,
        }
        if cache is None:
            out_BTHK = attend_on_mesh(self.attention, q_BTHK, k_BSGK, v_BSGK, pos_T, **options)
        else:
            corner = (layer, 0, pos_T[0], 0, 0)
            cache = Cache(
                jax.lax.dynamic_update_slice(cache.k_LBSGK, k_BSGK[None], corner),
                jax.lax.dynamic_update_slice(cache.v_LBSGK, v_BSGK[None], corner),
            )
            k_BSGK, v_BSGK = cache.k_LBSGK[layer], cache.v_LBSGK[layer]
            out_BTHK = self.attention.for_any_rows()(
                q_BTHK, k_BSGK, v_BSGK, pos_T, jnp.arange(k_BSGK.shape[1]), **options
            )
        out_BTD = matmul("BTHK,HKD->BTD", out_BTHK, self.output_HKD.astype(self.dtype))
        return out_BTD + self.output_bias_D[None, None].astype(self.dtype), cache


class MLP(nnx.Module):
    """Two layers with GELU (the exact one) between, F = 4 D."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, F = config.width, 4 * config.width
        normal = nnx.initializers.normal(math.sqrt(2 / (5 * D)))
        output_normal = nnx.initializers.normal(2 / (config.num_layers * math.sqrt(D)))
        self.up_DF = nnx.Param(normal(rngs.params(), (D, F)))
        self.up_bias_F = nnx.Param(jnp.zeros((F,)))
        self.down_FD = nnx.Param(output_normal(rngs.params(), (F, D)))
        self.down_bias_D = nnx.Param(jnp.zeros((D,)))
        self.dtype = config.compute_dtype

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """down(gelu(up(x)))."""
        h_BTF = matmul("BTD,DF->BTF", x_BTD, self.up_DF.astype(self.dtype))
        h_BTF = nnx.gelu(h_BTF + self.up_bias_F[None, None].astype(self.dtype), approximate=False)
        y_BTD = matmul("BTF,FD->BTD", h_BTF, self.down_FD.astype(self.dtype))
        return y_BTD + self.down_bias_D[None, None].astype(self.dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = layer_norm(config.width, rngs)
        self.attention = SelfAttention(config, rngs=rngs)
        self.mlp_norm = layer_norm(config.width, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dtype = config.compute_dtype

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        pos_T: Int[Array, "T"],
        shared_bias: Bias | ContextualBias | None,
        cache: Cache | None = None,
        layer: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """One layer of the residual stream, which is float32."""
        normed_BTD = self.attention_norm(x_BTD).astype(self.dtype)
        attended_BTD, cache = self.attention(normed_BTD, pos_T, shared_bias, cache, layer)
        x_BTD += attended_BTD.astype(x_BTD.dtype)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD).astype(self.dtype)).astype(x_BTD.dtype), cache


class Decoder(nnx.Module):
    """The language model."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(math.sqrt(2 / (5 * config.width)))
        self.embedding_VD = nnx.Param(normal(rngs.params(), (config.vocab_size, config.width)))
        score_rngs = nnx.Rngs(rngs.params())  # see `SelfAttention`
        self.shared_bias = (
            config.bias.build(config.num_heads, config.head_dim, score_rngs) if config.bias.shared_by_layers else None
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def make_layers(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.layers = make_layers(rngs)
        self.norm = layer_norm(config.width, rngs)
        self.unembedding_DV = nnx.Param(normal(rngs.params(), (config.width, config.vocab_size)))
        self.config = config

    def features(self, tokens_BT: Int[Array, "B T"], pos_T: Int[Array, "T"] | None = None) -> Float[Array, "B T D"]:
        """Everything but the unembedding; positions 0..T-1 unless given."""
        pos_T = deal_rows(jnp.arange(tokens_BT.shape[1]) if pos_T is None else pos_T, 0)
        x_BTD = look_up(self.embedding_VD[...], deal_rows(tokens_BT, 1))

        def layer(x_BTD: Float[Array, "B T D"], block: Block) -> tuple[Float[Array, "B T D"], None]:
            return place(block(x_BTD, pos_T, self.shared_bias)[0], "BTD"), None

        if REMAT[self.config.remat] is not None:
            layer = jax.checkpoint(layer, policy=REMAT[self.config.remat], prevent_cse=False)
        x_BTD, _ = jax.lax.scan(layer, x_BTD, self.layers)
        return place(collect_rows(self.norm(x_BTD), 1), "BTD")

    def extend(
        self, tokens_BT: Int[Array, "B T"], pos_T: Int[Array, "T"], cache: Cache
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Features of T more tokens of every sequence, and the cache with them in it.

        Args:
            tokens_BT: the tokens.
            pos_T: their positions, going up by one, after what the cache holds. All tokens before them must be in it
                already. Beyond its last column the result is wrong, not an error: positions are not known here.
                (Sequences of different length: one `jax.vmap` over all of it, as in `evaluation/generate.py`.)
            cache: from `make_cache`, or from an earlier call. Columns from a query's position on are overwritten before
                they are read.
        """
        x_BTD = self.embedding_VD[...][tokens_BT]

        def layer(
            carry: tuple[Float[Array, "B T D"], Cache], block_and_number: tuple[Block, Int[Array, ""]]
        ) -> tuple[tuple[Float[Array, "B T D"], Cache], None]:
            (x_BTD, cache), (block, number) = carry, block_and_number
            x_BTD, written = block(x_BTD, pos_T, self.shared_bias, cache, number)
            assert written is not None
            return (x_BTD, written), None

        numbers = jnp.arange(self.config.num_layers)
        (x_BTD, cache), _ = jax.lax.scan(layer, (x_BTD, cache), (self.layers, numbers))
        return self.norm(x_BTD), cache

    def logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of the features of any positions."""
        dtype = self.config.compute_dtype
        return matmul("BTD,DV->BTV", x_BTD.astype(dtype), self.unembedding_DV.astype(dtype), jnp.float32)

    def __call__(self, tokens_BT: Int[Array, "B T"], pos_T: Int[Array, "T"] | None = None) -> Float[Array, "B T V"]:
        """Logits of the next token at every position."""
        return self.logits(self.features(tokens_BT, pos_T))


def parameter_counts(params: Params) -> dict[str, int]:
    """Numbers in a model's parameters: the `total`, and of it what is in position biases and in score convolutions."""
    counts = {"total": 0, "bias": 0, "processor": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        modules = {key.key for key in path[:-1]}
        counts["total"] += leaf.size
        counts["bias"] += leaf.size if modules & {"bias", "shared_bias"} else 0
        counts["processor"] += leaf.size if "processor" in modules else 0
    return counts


def model_structure(config: TransformerConfig) -> tuple[nnx.GraphDef, Params]:
    """The model's static structure, and its parameters' shapes and dtypes; nothing is allocated."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    return graphdef, nnx.to_pure_dict(params)
