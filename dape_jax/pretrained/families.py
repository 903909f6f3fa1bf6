"""Families of Hugging Face models: map a `config.json` to our model, and its tensors to our parameters.

In: a config. Out: the `model` section of a run's config, and a `Tensor` for each parameter. Next: `load.py`.

To add a family, write a function from `Fields` to a `Family` and add a line to `FAMILIES`. A field that the function
does not read must be in `IGNORED`; all other fields, which could change the result, raise `InputError`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dape_jax.config import read_model
from dape_jax.errors import InputError
from dape_jax.model.transformer import GPT_NEOX, LLAMA, TransformerConfig, flat_params, model_structure
from dape_jax.pretrained.files import CONFIG_FILE, short

# Fields that do not change the logits of a forward pass: names, training, generation, and options of PyTorch.
IGNORED = (
    *("architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "id2label"),
    *("label2id", "problem_type", "_attn_implementation", "attn_implementation", "return_dict", "output_attentions"),
    *("output_hidden_states", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
    *("attention_dropout", "hidden_dropout", "classifier_dropout", "resid_pdrop", "embd_pdrop", "pretraining_tp"),
    *("max_window_layers", "gradient_checkpointing", "_flash_attn_2_enabled", "torchscript", "is_decoder"),
    *("chunk_size_feed_forward", "tokenizer_class", "prefix", "use_bfloat16", "name_or_path", "unsloth_version"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "is_llama_config", "transformers.js_config"),
)
# Fields whose default in transformers, which our models have, is neither null nor false nor empty.
DEFAULTS = {"is_causal": True}
# Buffers that older versions of transformers saved with the parameters.
BUFFERS = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


SCALINGS = ("default", "linear", "llama3", "yarn")  # scalings of rotary embeddings
_LARGEST_FLOAT = 1e300

# Fields of the `model` section for training and computation in JAX; exported configs do not have them.
NOT_EXPORTED = ("initializer", "attention", "remat", "dtype", "dropout", "num_outputs")


class Fields:
    """Fields of a `config.json`, each of which must be read or be in `IGNORED`."""

    def __init__(self, config: dict[str, Any], where: str = CONFIG_FILE):
        self.config, self.where, self.read = config, where, set[str]()

    def check(self, condition: bool, name: str, allowed: str) -> None:
        """Raise `InputError` for a field unless the condition holds. Long values are shortened in the message."""
        if not condition:
            value = self.config[name] if name in self.config else None
            try:
                shown = repr(value)
            except RecursionError:
                shown = f"a nested {type(value).__name__}"
            raise InputError(f"{self.where}: {short(name)} = {short(shown)}: {allowed}")

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field, or the default if it is missing or null. Without a default the field is required.

        Raises:
            InputError: the field is missing, has another type, or is not a finite number.
        """
        self.read.add(name)
        value = self.config[name] if name in self.config else None
        if value is None:
            self.check(default is not None, name, f"must be of type {kind.__name__}")
            return default
        is_right = type(value) is kind or (kind is float and type(value) is int)
        self.check(is_right, name, f"must be of type {kind.__name__}")
        if kind is float:
            self.check(abs(value) < _LARGEST_FLOAT, name, "must be finite")  # also an integer of a thousand digits
            return float(value)
        return value

    def optional(self, name: str, kind: type, missing: Any = None) -> Any:
        """Return a field, None if it is null, or `missing` if the config does not have it."""
        self.read.add(name)
        if name not in self.config:
            return missing
        return None if self.config[name] is None else self.take(name, kind)

    def refuse_others(self) -> None:
        """Raise `InputError` for the first unread field that could change the logits.

        An option at its default changes nothing: null, false or empty, if `DEFAULTS` has no other value for it.
        """
        for name, value in self.config.items():
            is_default = value == DEFAULTS[name] if name in DEFAULTS else value is False or value in ("", [], {})
            is_harmless = value is None or is_default or name in self.read or name in IGNORED
            self.check(is_harmless, name, "is not supported: no such option in our models")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Tensor of a checkpoint that becomes a parameter, or one layer of a parameter.

    Args:
        name: name in the checkpoint; "{layer}" is the number of the layer.
        shape: shape in the checkpoint.
        convert: function that converts the tensor to our layout.
    """

    name: str
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray] = lambda x: x


@dataclasses.dataclass(frozen=True)
class Family:
    """Model of a family.

    Args:
        model: fields of our `model` section that the config determines.
        max_length: maximum length that the model was trained on, in tokens.
        tensors: tensors by the path of our parameter, "layers/mlp/up_DF".
    """

    model: dict[str, Any]
    max_length: int
    tensors: dict[str, Tensor]


def family_of(config: dict[str, Any]) -> Family:
    """Return the model that a `config.json` describes.

    Raises:
        InputError: the family is unknown, or a field is missing, has a wrong type or value, or is not supported.
    """
    fields = Fields(config)
    name = fields.take("model_type", str)
    fields.check(name in FAMILIES, "model_type", f"must be one of {list(FAMILIES)}")
    family = FAMILIES[name](fields)
    fields.refuse_others()
    return family


def _sizes(fields: Fields) -> dict[str, Any]:
    names = {"num_layers": "num_hidden_layers", "width": "hidden_size", "num_heads": "num_attention_heads"}
    names |= {"mlp_width": "intermediate_size", "vocab_size": "vocab_size"}
    sizes = {ours: fields.take(theirs, int) for ours, theirs in names.items()}
    for ours, size in sizes.items():
        fields.check(size > 0, names[ours], "must be positive")
    is_tied = fields.take("tie_word_embeddings", bool, False)
    return sizes | {"num_outputs": sizes["vocab_size"], "tied_embeddings": is_tied}


def _activation(fields: Fields, default: str) -> str:
    name = fields.take("hidden_act", str, default)
    fields.check(name in ACTIVATIONS, "hidden_act", f"must be one of {list(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rotary(fields: Fields, max_length: int, base: float = 10_000.0, fraction: float | None = None) -> dict[str, Any]:
    """Return our `rotary` section for `rope_theta` and `rope_scaling`, or `rope_parameters` of transformers 5.

    `base` and `fraction` are the defaults of the family. If `fraction` is None, its models rotate all dims.
    """
    base = fields.take("rope_theta", float, base)
    old, new = fields.optional("rope_scaling", dict), fields.optional("rope_parameters", dict)
    fields.check(old is None or new is None, "rope_scaling", "must be missing if there is rope_parameters")
    where = f"{CONFIG_FILE}: {'rope_scaling' if new is None else 'rope_parameters'}"
    scaling = Fields((old or {}) if new is None else new, where)
    base = scaling.take("rope_theta", float, base)
    given = scaling.take("partial_rotary_factor", float, 1.0 if fraction is None else fraction)
    scaling.check(fraction is not None or given == 1, "partial_rotary_factor", "must be 1 in this family")
    kind = scaling.take("rope_type", str, scaling.take("type", str, "default"))
    name = "rope_type" if "rope_type" in scaling.config else "type"
    scaling.check(kind in SCALINGS, name, f"must be one of {list(SCALINGS)}")
    shared = {"base": base, "fraction": given}
    if kind == "default":
        rotary = dict(name="rope", **shared)
    elif kind == "linear":
        rotary = dict(name="pi", factor=scaling.take("factor", float), **shared)
    elif kind == "llama3":
        names = {"low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"}
        factors = {ours: scaling.take(theirs, float) for ours, theirs in names.items()}
        factors |= {"factor": scaling.take("factor", float)}
        length = scaling.take("original_max_position_embeddings", int)
        rotary = dict(name="llama3", train_length=length, **factors, **shared)
    else:
        rotary = _yarn(scaling, max_length, shared)
    scaling.refuse_others()
    return rotary


def _yarn(scaling: Fields, max_length: int, shared: dict[str, float]) -> dict[str, Any]:
    """Return our `yarn` section, if the options are those of the paper, which determines the attention's scale."""
    factor = scaling.take("factor", float)
    scaling.check(factor >= 1, "factor", "must be 1 or more")
    scale = scaling.take("attention_factor", float, 0.1 * math.log(factor) + 1)
    is_papers = math.isclose(scale, 0.1 * math.log(factor) + 1, rel_tol=1e-6)
    scaling.check(is_papers, "attention_factor", "must be 0.1 log(factor) + 1, or missing")
    scaling.check(scaling.take("truncate", bool, True), "truncate", "must be true, or missing")
    length = scaling.take("original_max_position_embeddings", int, max_length)
    fast, slow = scaling.take("beta_fast", float, 32.0), scaling.take("beta_slow", float, 1.0)
    return dict(name="yarn", factor=factor, train_length=length, beta_fast=fast, beta_slow=slow, **shared)


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.T


def _gpt_neox(fields: Fields) -> Family:
    """Map GPT-NeoX and Pythia: queries, keys and values of each head are one block of a fused projection."""
    sizes = _sizes(fields)
    D, H, F, V = (sizes[name] for name in ("width", "num_heads", "mlp_width", "vocab_size"))
    fields.check(D % H == 0, "num_attention_heads", f"must divide hidden_size = {D}")
    K, has_bias = D // H, fields.take("attention_bias", bool, True)
    max_length = fields.take("max_position_embeddings", int, 2048)
    # Old names of rope_theta and partial_rotary_factor.
    old_base, fraction = fields.take("rotary_emb_base", float, 10_000.0), fields.take("rotary_pct", float, 0.25)
    base = fields.take("rope_theta", float, old_base)
    is_one = base == old_base or "rotary_emb_base" not in fields.config
    fields.check(is_one, "rotary_emb_base", f"must be rope_theta = {base}, or missing")
    model = (
        GPT_NEOX
        | sizes
        | {
            "num_kv_heads": H,
            "head_dim": K,
            "parallel_residual": fields.take("use_parallel_residual", bool, True),
            "norm_epsilon": fields.take("layer_norm_eps", float, 1e-5),
            "activation": _activation(fields, "gelu"),
            "projection_bias": has_bias,
            "attention_output_bias": has_bias,
            "rotary": _rotary(fields, max_length, base, fraction),
        }
    )
    layer, attention = "gpt_neox.layers.{layer}.", "layers/attention/"

    def fused(part: int) -> Tensor:
        return Tensor(
            f"{layer}attention.query_key_value.weight",
            (3 * D, D),
            lambda x: x.reshape(H, 3, K, D)[:, part].transpose(2, 0, 1),
        )

    def fused_bias(part: int) -> Tensor:
        return Tensor(f"{layer}attention.query_key_value.bias", (3 * D,), lambda x: x.reshape(H, 3, K)[:, part])

    tensors = {
        "embedding_VD": Tensor("gpt_neox.embed_in.weight", (V, D)),
        f"{attention}query_DHK": fused(0),
        f"{attention}key_DGK": fused(1),
        f"{attention}value_DGK": fused(2),
        f"{attention}output_HKD": Tensor(f"{layer}attention.dense.weight", (D, D), lambda x: x.T.reshape(H, K, D)),
        "layers/mlp/up_DF": Tensor(f"{layer}mlp.dense_h_to_4h.weight", (F, D), _transposed),
        "layers/mlp/up_bias_F": Tensor(f"{layer}mlp.dense_h_to_4h.bias", (F,)),
        "layers/mlp/down_FD": Tensor(f"{layer}mlp.dense_4h_to_h.weight", (D, F), _transposed),
        "layers/mlp/down_bias_D": Tensor(f"{layer}mlp.dense_4h_to_h.bias", (D,)),
    }
    if has_bias:
        tensors |= {
            f"{attention}query_bias_HK": fused_bias(0),
            f"{attention}key_bias_GK": fused_bias(1),
            f"{attention}value_bias_GK": fused_bias(2),
            f"{attention}output_bias_D": Tensor(f"{layer}attention.dense.bias", (D,)),
        }
    norms = {"layers/attention_norm": f"{layer}input_layernorm", "layers/mlp_norm": f"{layer}post_attention_layernorm"}
    for ours, theirs in (norms | {"norm": "gpt_neox.final_layer_norm"}).items():
        tensors |= {f"{ours}/scale": Tensor(f"{theirs}.weight", (D,)), f"{ours}/bias": Tensor(f"{theirs}.bias", (D,))}
    if not sizes["tied_embeddings"]:
        tensors["unembedding_DV"] = Tensor("embed_out.weight", (V, D), _transposed)
    return Family(model, max_length, tensors)


def _llama(fields: Fields) -> Family:
    """Map Llama 1 to 3."""
    has_bias = fields.take("attention_bias", bool, False)
    biases = {"projection_bias": has_bias, "attention_output_bias": has_bias}
    biases |= {"mlp_bias": fields.take("mlp_bias", bool, False)}
    return _llama_like(fields, biases, num_kv_heads=None, max_length=2048)


def _mistral(fields: Fields) -> Family:
    """Map Mistral; the default window is 4,096 tokens."""
    window = fields.optional("sliding_window", int, missing=4096)
    return _llama_like(fields, {}, num_kv_heads=8, max_length=131_072, window=window)


def _qwen2(fields: Fields) -> Family:
    """Map Qwen2: biases of queries, keys and values; a window in all layers or in none."""
    window, num_layers = fields.optional("sliding_window", int, missing=4096), fields.take("num_hidden_layers", int)
    if not fields.take("use_sliding_window", bool, False):
        window = None
    first = fields.take("max_window_layers", int, 28)  # layers before this one have no window
    types = fields.optional("layer_types", list)
    if types is None:
        is_uniform, is_window = window is None or not 0 < first < num_layers, window is not None and first <= 0
        fields.check(is_uniform, "max_window_layers", f"must be 0, or at least num_hidden_layers = {num_layers}")
    else:
        is_window = all(kind == "sliding_attention" for kind in types)
        is_uniform = len(types) == num_layers and (
            window is not None if is_window else all(kind == "full_attention" for kind in types)
        )
        allowed = "must be full_attention for all layers, or sliding_attention for all and use_sliding_window"
        fields.check(is_uniform, "layer_types", allowed)
    window = window if is_window else None
    return _llama_like(fields, {"projection_bias": True}, num_kv_heads=32, max_length=32_768, window=window)


def _llama_like(
    fields: Fields, biases: dict[str, bool], *, num_kv_heads: int | None, max_length: int, window: int | None = None
) -> Family:
    """Map a model with Llama's layers; the numbers are the family's defaults."""
    sizes = _sizes(fields)
    D, H, F, V = (sizes[name] for name in ("width", "num_heads", "mlp_width", "vocab_size"))
    G, K = fields.optional("num_key_value_heads", int, missing=num_kv_heads), fields.optional("head_dim", int)
    G = H if G is None else G
    if K is None:
        fields.check(D % H == 0, "num_attention_heads", f"must divide hidden_size = {D}")
        K = D // H
    fields.check(G > 0 and H % G == 0, "num_key_value_heads", f"must divide num_attention_heads = {H}")
    max_length = fields.take("max_position_embeddings", int, max_length)
    model = (
        LLAMA
        | sizes
        | biases
        | {
            "num_kv_heads": G,
            "head_dim": K,
            "norm_epsilon": fields.take("rms_norm_eps", float, 1e-6),
            "activation": _activation(fields, "silu"),
            "window": window,
            "rotary": _rotary(fields, max_length),
        }
    )
    layer, attention = "model.layers.{layer}.", "layers/attention/"

    def projected(name: str, heads: int) -> Tensor:
        return Tensor(f"{layer}self_attn.{name}.weight", (heads * K, D), lambda x: x.T.reshape(D, heads, K))

    tensors = {
        "embedding_VD": Tensor("model.embed_tokens.weight", (V, D)),
        f"{attention}query_DHK": projected("q_proj", H),
        f"{attention}key_DGK": projected("k_proj", G),
        f"{attention}value_DGK": projected("v_proj", G),
        f"{attention}output_HKD": Tensor(f"{layer}self_attn.o_proj.weight", (D, H * K), lambda x: x.T.reshape(H, K, D)),
        "layers/mlp/gate_DF": Tensor(f"{layer}mlp.gate_proj.weight", (F, D), _transposed),
        "layers/mlp/up_DF": Tensor(f"{layer}mlp.up_proj.weight", (F, D), _transposed),
        "layers/mlp/down_FD": Tensor(f"{layer}mlp.down_proj.weight", (D, F), _transposed),
        "layers/attention_norm/scale": Tensor(f"{layer}input_layernorm.weight", (D,)),
        "layers/mlp_norm/scale": Tensor(f"{layer}post_attention_layernorm.weight", (D,)),
        "norm/scale": Tensor("model.norm.weight", (D,)),
    }
    if model["projection_bias"]:
        for ours, theirs, heads in (("query_bias_HK", "q", H), ("key_bias_GK", "k", G), ("value_bias_GK", "v", G)):
            name = f"{layer}self_attn.{theirs}_proj.bias"
            tensors[attention + ours] = Tensor(name, (heads * K,), lambda x, heads=heads: x.reshape(heads, K))
    if model["attention_output_bias"]:
        tensors[f"{attention}output_bias_D"] = Tensor(f"{layer}self_attn.o_proj.bias", (D,))
    if model["mlp_bias"]:
        for ours, theirs, size in (("gate_bias_F", "gate", F), ("up_bias_F", "up", F), ("down_bias_D", "down", D)):
            tensors[f"layers/mlp/{ours}"] = Tensor(f"{layer}mlp.{theirs}_proj.bias", (size,))
    if not sizes["tied_embeddings"]:
        tensors["unembedding_DV"] = Tensor("lm_head.weight", (V, D), _transposed)
    return Family(model, max_length, tensors)


def _dape(fields: Fields) -> Family:
    """Map an exported run: fields and tensors have our names, and each layer has its own tensors."""
    model = {field.name: None for field in dataclasses.fields(TransformerConfig) if field.name not in NOT_EXPORTED}
    for name in model:
        fields.check(name in fields.config, name, "is missing")
        model[name] = fields.config[name]
        fields.read.add(name)
    tied = fields.take("tie_word_embeddings", bool, False)  # written by transformers; our field is tied_embeddings
    fields.check(not tied, "tie_word_embeddings", "must be False; tied_embeddings is this model's field")
    model |= {"num_outputs": model["vocab_size"], "dropout": 0.0, "initializer": GPT_NEOX["initializer"]}
    computed = {"attention": {"name": "auto"}, "remat": "none", "dtype": "float32"}
    _, params = model_structure(read_model(model | computed))
    tensors = {}
    for path, leaf in flat_params(params).items():
        is_stacked = path[0] == "layers"
        name = ".".join(("layers", "{layer}", *path[1:]) if is_stacked else path)
        tensors["/".join(path)] = Tensor(name, leaf.shape[1:] if is_stacked else leaf.shape)
    return Family(model, fields.take("max_position_embeddings", int), tensors)


FAMILIES = {"gpt_neox": _gpt_neox, "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "dape": _dape}
