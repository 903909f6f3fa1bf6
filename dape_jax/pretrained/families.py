"""Families of Hugging Face models: from a `config.json` to our model, and from its tensors to our parameters.

In: a config. Out: the `model` section of a run's config, and a `Tensor` for each parameter. Next: `load.py`.

To add a family: a function from `Fields` to a `Family`, and a line in `FAMILIES`. A field that a function does not read
must be in `IGNORED`: a field that would change the result is refused by name, never ignored.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dape_jax.config import check_numbers, read_model
from dape_jax.errors import InputError, require
from dape_jax.model.transformer import GPT_NEOX, LLAMA, TransformerConfig, flat_params, model_structure
from dape_jax.pretrained.files import CONFIG_FILE

# Fields that do not change the logits of one forward pass: names, training, generation, and how PyTorch computes it.
IGNORED = (
    *("architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "id2label"),
    *("label2id", "problem_type", "_attn_implementation", "attn_implementation", "return_dict", "output_attentions"),
    *("output_hidden_states", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
    *("attention_dropout", "hidden_dropout", "classifier_dropout", "resid_pdrop", "embd_pdrop", "pretraining_tp"),
    *("max_window_layers", "gradient_checkpointing", "_flash_attn_2_enabled", "torchscript", "is_decoder"),
    *("chunk_size_feed_forward", "tokenizer_class", "prefix", "use_bfloat16", "name_or_path", "unsloth_version"),
)
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


# Fields of the `model` section that say how a model is trained or computed here; exported configs lack them.
NOT_EXPORTED = ("initializer", "attention", "remat", "dtype", "dropout", "num_outputs")


class Fields:
    """Fields of a `config.json`, each of which must be read or be in `IGNORED`."""

    def __init__(self, config: dict[str, Any], where: str = CONFIG_FILE):
        self.config, self.where, self.read = config, where, set[str]()

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field, or the default if it is missing or null. Without a default it must be there.

        Raises:
            InputError: it is missing, or of another type.
        """
        self.read.add(name)
        value = self.config[name] if name in self.config else None
        if value is None:
            require(default is not None, f"{self.where}: {name}", None, f"must be of type {kind.__name__}")
            return default
        is_right = type(value) is kind or (kind is float and type(value) is int)
        require(is_right, f"{self.where}: {name}", value, f"must be of type {kind.__name__}")
        return value

    def optional(self, name: str, kind: type) -> Any:
        """Return a field, or None if it is missing or null."""
        self.read.add(name)
        return None if name not in self.config or self.config[name] is None else self.take(name, kind)

    def refuse_others(self) -> None:
        """Raise `InputError` for the first field that is neither read nor ignored."""
        for name, value in self.config.items():
            is_known = name in self.read or name in IGNORED
            require(is_known, f"{self.where}: {name}", value, "is not supported: no such option in our models")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Tensor of a checkpoint that becomes a parameter, or one layer of a parameter.

    Args:
        name: in the checkpoint; "{layer}" is the number of the layer.
        shape: in the checkpoint.
        convert: to our layout.
    """

    name: str
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray] = lambda x: x


@dataclasses.dataclass(frozen=True)
class Family:
    """A model of a family.

    Args:
        model: fields of our `model` section that the config decides.
        max_length: tokens that the model was trained on, at most.
        tensors: by the path of our parameter, "layers/mlp/up_DF".
    """

    model: dict[str, Any]
    max_length: int
    tensors: dict[str, Tensor]


def family_of(config: dict[str, Any]) -> Family:
    """Return the model that a `config.json` describes.

    Raises:
        InputError: an unknown family, or a field that is missing, of a wrong type or value, or not supported.
    """
    fields = Fields(config)
    name = fields.take("model_type", str)
    require(name in FAMILIES, f"{CONFIG_FILE}: model_type", name, f"must be one of {list(FAMILIES)}")
    family = FAMILIES[name](fields)
    fields.refuse_others()
    return family


def _sizes(fields: Fields) -> dict[str, Any]:
    names = {"num_layers": "num_hidden_layers", "width": "hidden_size", "num_heads": "num_attention_heads"}
    names |= {"mlp_width": "intermediate_size", "vocab_size": "vocab_size"}
    sizes = {ours: fields.take(theirs, int) for ours, theirs in names.items()}
    for ours, size in sizes.items():
        require(size > 0, f"{CONFIG_FILE}: {names[ours]}", size, "must be positive")
    is_tied = fields.take("tie_word_embeddings", bool, False)
    return sizes | {"num_outputs": sizes["vocab_size"], "tied_embeddings": is_tied}


def _activation(fields: Fields, default: str) -> str:
    name = fields.take("hidden_act", str, default)
    require(name in ACTIVATIONS, f"{CONFIG_FILE}: hidden_act", name, f"must be one of {list(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rotary(fields: Fields, max_length: int, fraction: float = 1.0) -> dict[str, Any]:
    """Return our `rotary` section for `rope_theta` and `rope_scaling`, or `rope_parameters` of transformers 5."""
    base = fields.take("rope_theta", float, 10_000.0)
    old, new = fields.optional("rope_scaling", dict), fields.optional("rope_parameters", dict)
    where = f"{CONFIG_FILE}: {'rope_scaling' if new is None else 'rope_parameters'}"
    scaling = Fields((old or {}) if new is None else new, where)
    base = scaling.take("rope_theta", float, base)
    fraction = scaling.take("partial_rotary_factor", float, fraction)
    kind = scaling.take("rope_type", str, scaling.take("type", str, "default"))
    shared = {"base": float(base), "fraction": float(fraction)}
    if kind == "default":
        rotary = dict(name="rope", **shared)
    elif kind == "linear":
        rotary = dict(name="pi", factor=float(scaling.take("factor", float)), **shared)
    elif kind == "llama3":
        names = {"low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"}
        factors = {ours: float(scaling.take(theirs, float)) for ours, theirs in names.items()}
        factors |= {"factor": float(scaling.take("factor", float))}
        length = scaling.take("original_max_position_embeddings", int)
        rotary = dict(name="llama3", train_length=length, **factors, **shared)
    elif kind == "yarn":
        rotary = _yarn(scaling, max_length, shared)
    else:
        raise InputError(f"{where}: rope_type = {kind!r}: must be one of ['default', 'linear', 'llama3', 'yarn']")
    scaling.refuse_others()
    return rotary


def _yarn(scaling: Fields, max_length: int, shared: dict[str, float]) -> dict[str, Any]:
    """Return our `yarn`, if the options are those of its paper, from which it takes the attention's scale."""
    factor = float(scaling.take("factor", float))
    require(factor >= 1, f"{scaling.where}: factor", factor, "must be 1 or more")
    scale = scaling.take("attention_factor", float, 0.1 * math.log(factor) + 1)
    is_papers = math.isclose(scale, 0.1 * math.log(factor) + 1, rel_tol=1e-6)
    require(is_papers, f"{scaling.where}: attention_factor", scale, "must be 0.1 log(factor) + 1, or missing")
    require(scaling.take("truncate", bool, True), f"{scaling.where}: truncate", False, "must be true, or missing")
    length = scaling.take("original_max_position_embeddings", int, max_length)
    fast, slow = float(scaling.take("beta_fast", float, 32.0)), float(scaling.take("beta_slow", float, 1.0))
    return dict(name="yarn", factor=factor, train_length=length, beta_fast=fast, beta_slow=slow, **shared)


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.T


def _gpt_neox(fields: Fields) -> Family:
    """GPT-NeoX and Pythia: queries, keys and values of each head are one block of a fused projection."""
    sizes = _sizes(fields)
    D, H, F, V = (sizes[name] for name in ("width", "num_heads", "mlp_width", "vocab_size"))
    require(D % H == 0, f"{CONFIG_FILE}: num_attention_heads", H, f"must divide hidden_size = {D}")
    K, has_bias = D // H, fields.take("attention_bias", bool, True)
    max_length = fields.take("max_position_embeddings", int, 2048)
    # The old names of rope_theta and partial_rotary_factor.
    old_base, fraction = fields.take("rotary_emb_base", float, 10_000.0), fields.take("rotary_pct", float, 0.25)
    if "rope_theta" not in fields.config:
        fields.config = fields.config | {"rope_theta": old_base}
    model = (
        GPT_NEOX
        | sizes
        | {
            "num_kv_heads": H,
            "head_dim": K,
            "parallel_residual": fields.take("use_parallel_residual", bool, True),
            "norm_epsilon": float(fields.take("layer_norm_eps", float, 1e-5)),
            "activation": _activation(fields, "gelu"),
            "projection_bias": has_bias,
            "attention_output_bias": has_bias,
            "rotary": _rotary(fields, max_length, fraction),
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
    """Llama 1 to 3, and Mistral, which adds a sliding window."""
    has_bias = fields.take("attention_bias", bool, False)
    biases = {"projection_bias": has_bias, "attention_output_bias": has_bias}
    return _llama_like(fields, biases | {"mlp_bias": fields.take("mlp_bias", bool, False)}, None)


def _mistral(fields: Fields) -> Family:
    return _llama_like(fields, {}, fields.optional("sliding_window", int))


def _qwen2(fields: Fields) -> Family:
    """Qwen2: biases of queries, keys and values; a window in all layers or in none."""
    window, num_layers = fields.optional("sliding_window", int), fields.take("num_hidden_layers", int)
    uses_window = fields.take("use_sliding_window", bool, False)
    types = fields.optional("layer_types", list)
    if types is None:
        first = fields.take("max_window_layers", int, 28)  # layers before this one attend to everything
        num_full = min(first, num_layers) if uses_window else num_layers
        types = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    kinds = {str(kind) for kind in types}
    is_uniform = kinds in ({"full_attention"}, {"sliding_attention"}) and len(types) == num_layers
    require(is_uniform, f"{CONFIG_FILE}: layer_types", types, "must be all full_attention or all sliding_attention")
    return _llama_like(fields, {"projection_bias": True}, window if kinds == {"sliding_attention"} else None)


def _llama_like(fields: Fields, biases: dict[str, bool], window: int | None) -> Family:
    sizes = _sizes(fields)
    D, H, F, V = (sizes[name] for name in ("width", "num_heads", "mlp_width", "vocab_size"))
    G, K = fields.take("num_key_value_heads", int, H), fields.optional("head_dim", int)
    if K is None:
        require(D % H == 0, f"{CONFIG_FILE}: num_attention_heads", H, f"must divide hidden_size = {D}")
        K = D // H
    require(G > 0 and H % G == 0, f"{CONFIG_FILE}: num_key_value_heads", G, f"must divide num_attention_heads = {H}")
    max_length = fields.take("max_position_embeddings", int, 2048)
    model = (
        LLAMA
        | sizes
        | biases
        | {
            "num_kv_heads": G,
            "head_dim": K,
            "norm_epsilon": float(fields.take("rms_norm_eps", float, 1e-6)),
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
    """A run that was exported: fields and tensors have our names, and layers are single tensors."""
    model = {field.name: None for field in dataclasses.fields(TransformerConfig) if field.name not in NOT_EXPORTED}
    for name in model:
        require(name in fields.config, f"{CONFIG_FILE}: {name}", None, "is missing")
        model[name] = fields.config[name]
        fields.read.add(name)
    tied = fields.take("tie_word_embeddings", bool, False)  # transformers writes it: another field says it here
    require(
        not tied, f"{CONFIG_FILE}: tie_word_embeddings", tied, "must be False; tied_embeddings is this model's field"
    )
    model |= {"num_outputs": model["vocab_size"], "dropout": 0.0, "initializer": GPT_NEOX["initializer"]}
    computed = {"attention": {"name": "auto"}, "remat": "none", "dtype": "float32"}
    check_numbers({"model": model})
    _, params = model_structure(read_model(model | computed))
    tensors = {}
    for path, leaf in flat_params(params).items():
        is_stacked = path[0] == "layers"
        name = ".".join(("layers", "{layer}", *path[1:]) if is_stacked else path)
        tensors["/".join(path)] = Tensor(name, leaf.shape[1:] if is_stacked else leaf.shape)
    return Family(model, fields.take("max_position_embeddings", int), tensors)


FAMILIES = {"gpt_neox": _gpt_neox, "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "dape": _dape}
