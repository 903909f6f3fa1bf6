"""Families of Hugging Face models: map a `config.json` to our model, and its tensors to our parameters.

In: a config. Out: the `model` section of a run's config, and a `Tensor` for each parameter. Next: `load.py`.

To add a family, write a function from `Fields` to a `Family`, usually by `_decoder`, and add a line to `FAMILIES`. A
field that the function does not read must be `HARMLESS`; all other fields, which could change the result, raise
`InputError`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from dape_jax.config import read_model
from dape_jax.errors import InputError
from dape_jax.model.transformer import GPT_NEOX, LLAMA, TransformerConfig, flat_params, model_structure
from dape_jax.pretrained.files import CONFIG_FILE, short

# Fields that do not change the logits of a forward pass, by their names.
HARMLESS = re.compile(
    r"_.*|architectures|auto_map|(base_model_)?name_or_path|unsloth.*|(transformers|model)_version|transformers\.js_config"
    r"|license|author|created_date|prefix|tokenizer.*|.*_token_(ids?|index)|(add_)?(bos|eos|pad|unk|sep|cls|mask)_token"
    # training
    r"|.*dropout.*|.*_pdrop|.*initializer.*|init_std|.*checkpointing|.*loss.*|pretraining_tp|is_llama_config|finetuned"
    # classification, generation and other outputs
    r"|.*label.*|problem_type|task_.*|finetuning_task|summary_.*|output_(attentions|hidden_states|scores|past)"
    r"|return_dict.*|generation.*|(use_)?cache(_implementation)?|is_decoder|do_sample|temperature|top_[kp]|typical_p"
    r"|num_beam.*|num_return_sequences|early_stopping|.*_penalty|.*no_repeat_ngram_size|bad_words_ids"
    r"|(max|min)_(new_tokens|length)|n_special|predict_special_tokens"
    # computation: dtypes, kernels, lengths that nothing depends on, and experts, which `family_of` refuses unless none
    r"|(torch_)?dtype|(use_)?(bfloat16|float16|bf16|fp16)|.*softmax_in_fp32|.*flash_att.*|attn_implementation|torchscript"
    r"|max_window_layers|chunk_size_feed_forward|.*expert.*|(model_)?max_(seq|sequence)?_?len(gth)?|seq_len(gth)?"
)
# Fields whose default in transformers or a model's own code, which our models have, is not null, false or empty.
DEFAULTS = {"is_causal": True, "scale_attn_weights": True}
DEFAULTS |= {"full_attn_mod": 1, "interpolate_factor": 1, "rotary_scaling_factor": 1}  # of Phi-4-mini and StableLM
# Buffers that older versions of transformers saved with the parameters.
BUFFERS = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias", ".attn.bias", ".attn.masked_bias")
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

# Our rotary embeddings.
SCALINGS = {"default": "rope", "linear": "pi", "llama3": "llama3", "yarn": "yarn", "dynamic": "dynamic"}
SCALINGS |= {"longrope": "longrope", "su": "longrope"}

# Fields of the `model` section for training and computation in JAX; exported configs do not have them.
NOT_EXPORTED = ("initializer", "attention", "remat", "dtype", "dropout", "num_outputs", "vocab_multiple", "imports")


class Fields:
    """Fields of a `config.json`, each of which must be read or be `HARMLESS`.

    Fields are asked for by the names of Llama's config; `names` has the names of a family that has others.
    """

    def __init__(self, config: dict[str, Any], where: str = CONFIG_FILE):
        self.config, self.where, self.read = config, where, set[str]()
        self.names: dict[str, str] = {}

    def check(self, condition: bool, name: str, allowed: str) -> None:
        """Raise `InputError` for a field unless the condition holds. Long values are shortened in the message."""
        if not condition:
            name = self.names.get(name, name)
            value = self.config[name] if name in self.config else None
            raise InputError(f"{self.where}: {short(name)} = {short(repr(value))}: {allowed}")

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field, or the default if it is missing or null. Without a default the field is required.

        Raises:
            InputError: the field is missing or has another type.
        """
        value = self.optional(name, kind)
        self.check(value is not None or default is not None, name, f"must be of type {kind.__name__}")
        return default if value is None else value

    def optional(self, name: str, kind: type, missing: Any = None) -> Any:
        """Return a field, None if it is null, or `missing` if the config does not have it."""
        name = self.names.get(name, name)
        self.read.add(name)
        value = self.config[name] if name in self.config else missing
        is_right = value is None or type(value) is kind or (kind is float and type(value) is int)
        self.check(is_right, name, f"must be of type {kind.__name__}")
        return float(value) if kind is float and value is not None else value

    def same(self, name: str, other: str, value: Any) -> None:
        """Raise `InputError` if a field is given and differs from the value of another one, which it only repeats."""
        self.check(self.optional(name, type(value)) in (None, value), name, f"must be {other} = {value}, or missing")

    def refuse_others(self) -> None:
        """Raise `InputError` for the first unread field that could change the logits.

        An option at its default changes nothing: null, false or empty, if `DEFAULTS` has no other value for it.
        """
        self.names = {}  # from here on, names are those of the config
        for name, value in self.config.items():
            is_default = value == DEFAULTS[name] if name in DEFAULTS else value is False or value in ("", [], {})
            is_harmless = value is None or is_default or name in self.read or HARMLESS.fullmatch(name) is not None
            allowed = "is not supported: no such option in our models (remove the field if it changes no logits)"
            self.check(is_harmless, name, allowed)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Tensor of a checkpoint that becomes a parameter, or one layer of a parameter.

    Args:
        name: name in the checkpoint; "{layer}" is the number of the layer. None: the model has no such tensor, and
            `convert` is given zeros.
        shape: shape in the checkpoint.
        convert: function that converts the tensor to our layout.
    """

    name: str | None
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray] = lambda x: x

    def name_in(self, layer: int) -> str | None:
        """Return the name of a layer's tensor."""
        return None if self.name is None else self.name.format(layer=layer)


class Tensors(dict[str, Tensor]):
    """Tensors by the path of our parameter. The letters at the end of a path name its dims.

    Args:
        sizes: size of each letter.
    """

    def __init__(self, **sizes: int):
        super().__init__()
        self.sizes = sizes

    def _dims(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in letters)

    def linear(
        self,
        ours: str,
        theirs: str,
        *,
        bias: bool = False,
        inputs: int = 1,
        rows: slice | np.ndarray = slice(None),
        total: int | None = None,
    ) -> None:
        """Add the weight [outputs, inputs] of a linear map, which we transpose and split into heads, and its bias.

        Args:
            ours: path of our weight.
            theirs: name in the checkpoint.
            bias: whether there is a bias.
            inputs: number of letters that are inputs, from the first.
            rows: rows of ours, in a map that contains several.
            total: number of rows of such a map.
        """
        name, letters = ours.rsplit("_", 1)
        outputs = self._dims(letters[inputs:])
        shape = (total or math.prod(outputs), math.prod(self._dims(letters[:inputs])))
        self[ours] = Tensor(f"{theirs}.weight", shape, lambda x: x[rows].T.reshape(self._dims(letters)))
        if bias:
            bias_name = f"{name}_bias_{letters[inputs:]}"
            self[bias_name] = Tensor(f"{theirs}.bias", shape[:1], lambda x: x[rows].reshape(outputs))

    def norm(self, ours: str, theirs: str | None, *, bias: bool = False, size: str = "D", offset: float = 0.0) -> None:
        """Add the scale of a norm, to which `offset` is added, and its bias; constants if `theirs` is None."""
        weight, shift = (None, None) if theirs is None else (f"{theirs}.weight", f"{theirs}.bias")
        shape = (math.prod(self._dims(size)),)
        self[f"{ours}/scale"] = Tensor(weight, shape, lambda x: np.asarray(x, np.float32) + offset if offset else x)
        if bias:
            self[f"{ours}/bias"] = Tensor(shift, self._dims(size))


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
    tensors: Tensors


def family_of(config: dict[str, Any]) -> Family:
    """Return the model that a `config.json` describes.

    Raises:
        InputError: the family is unknown, or a field is missing, has a wrong type or value, or is not supported.
    """
    text = text_config(config)
    fields = Fields(text, CONFIG_FILE if text is config else f"{CONFIG_FILE}: text_config")
    for each in text:
        fields.check(not text[each] or "expert" not in each, each, "mixtures of experts are not supported")
        is_quantized = each in ("quantization_config", "quantization") and bool(text[each])
        fields.check(not is_quantized, each, "must be missing: save the model without quantization first")
    name = fields.take("model_type", str)
    fields.check(name in FAMILIES, "model_type", f"must be one of {list(FAMILIES)}")
    family = FAMILIES[name](fields)
    fields.refuse_others()
    return family


# Sizes that LLaVA leaves out of `text_config`: transformers' defaults for Llama, and for Mistral except the MLP's.
LEFT_OUT = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11_008}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text model, which a multimodal config has in `text_config`."""
    if "text_config" not in config:
        return config
    fields = Fields(config)
    text, kind = fields.take("text_config", dict), fields.take("model_type", str)
    left_out = LEFT_OUT if Fields(text).optional("model_type", str) in ("llama", "mistral") else {}
    fields.check(kind != "paligemma", "model_type", "is not supported: its prompts are not causal")
    shared = ("tie_word_embeddings", "quantization_config", "eos_token_id")
    return left_out | text | {name: config[name] for name in shared if name in config}


def _activation(fields: Fields, default: str, field: str = "hidden_act") -> str:
    name = fields.take(field, str, default)
    fields.check(name in ACTIVATIONS, field, f"must be one of {list(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rotary(fields: Fields, max_length: int, base: float = 10_000.0, fraction: float | None = None) -> dict[str, Any]:
    """Return our `rotary` section for `rope_theta` and `rope_scaling`, or `rope_parameters` of transformers 5.

    `base` and `fraction` are the defaults of the family. If `fraction` is None, its models rotate all dims.
    """
    base = fields.take("rope_theta", float, base)
    old, new = fields.optional("rope_scaling", dict), fields.optional("rope_parameters", dict)
    if old and new is not None:  # for programs with transformers 4, too
        twice = {"rope_type" if name == "type" else name: value for name, value in old.items()} | {"rope_theta": base}
        are_same = all(name in new and new[name] == value for name, value in twice.items())
        fields.check(are_same, "rope_scaling", f"must be as in rope_parameters, whose rope_theta must be {base}")
    where = f"{CONFIG_FILE}: {'rope_scaling' if new is None else 'rope_parameters'}"
    scaling = Fields((old or {}) if new is None else new, where)
    shared = {
        "base": scaling.take("rope_theta", float, base),
        "fraction": scaling.take("partial_rotary_factor", float, 1.0 if fraction is None else fraction),
    }
    is_family = fraction is not None or shared["fraction"] == 1
    scaling.check(is_family, "partial_rotary_factor", "must be 1 in this family")
    kind = scaling.take("rope_type", str, scaling.take("type", str, "default"))
    allowed = f"must be one of {list(SCALINGS)}"
    scaling.check(kind in SCALINGS, "rope_type" if "rope_type" in scaling.config else "type", allowed)
    rotary, factor = {"name": SCALINGS[kind], **shared}, 1.0
    if rotary["name"] == "longrope":
        original = fields.optional("original_max_position_embeddings", int)
        original = scaling.take("original_max_position_embeddings", int, original)
        factor = scaling.take("factor", float, max_length / original)
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        rotary |= {"train_length": original, "attention_factor": scaling.take("attention_factor", float, scale)}
        rotary |= {f"{each}_factors": scaling.take(f"{each}_factor", list) for each in ("short", "long")}
    elif kind != "default":
        rotary["factor"] = factor = scaling.take("factor", float)
    if kind == "dynamic":
        rotary["train_length"] = max_length
    if kind == "llama3":
        rotary["train_length"] = scaling.take("original_max_position_embeddings", int)
        rotary["low_frequency_factor"] = scaling.take("low_freq_factor", float)
        rotary["high_frequency_factor"] = scaling.take("high_freq_factor", float)
    elif kind == "yarn":
        scaling.check(factor >= 1, "factor", "must be 1 or more")
        of_all, of_dims = scaling.take("mscale", float, 0.0), scaling.take("mscale_all_dim", float, 0.0)
        rotary["attention_factor"] = scaling.optional("attention_factor", float)
        if rotary["attention_factor"] is None and of_all and of_dims:
            scale, scale_of_dims = (0.1 * each * math.log(factor) + 1 for each in (of_all, of_dims))
            rotary["attention_factor"] = scale / scale_of_dims
        rotary["truncate"] = scaling.take("truncate", bool, True)
        rotary["train_length"] = scaling.take("original_max_position_embeddings", int, max_length)
        rotary["beta_fast"] = scaling.take("beta_fast", float, 32.0)
        rotary["beta_slow"] = scaling.take("beta_slow", float, 1.0)
    scaling.refuse_others()
    return rotary


def _gpt_neox(fields: Fields) -> Family:
    """Map GPT-NeoX and Pythia: queries, keys and values of each head are one block of a fused projection."""
    fields.names = {"rms_norm_eps": "layer_norm_eps"}
    # Old names of rope_theta and partial_rotary_factor.
    old_base, old_fraction = fields.take("rotary_emb_base", float, 10_000.0), fields.take("rotary_pct", float, 0.25)
    base = fields.take("rope_theta", float, old_base)
    fraction = fields.take("partial_rotary_factor", float, old_fraction)
    fields.same("rotary_emb_base", "rope_theta", base)
    fields.same("rotary_pct", "partial_rotary_factor", fraction)
    defaults = {"rope_theta": base, "partial_rotary_factor": fraction, "hidden_act": "gelu", "rms_norm_eps": 1e-5}
    defaults |= {"attention_bias": True, "use_parallel_residual": True, "max_position_embeddings": 2048}
    layer = "gpt_neox.layers.{layer}."
    names = {"layer": layer, "embedding": "gpt_neox.embed_in", "unembedding": "embed_out"}
    names |= {"output": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    names |= {"norm": "gpt_neox.final_layer_norm"}
    family = _decoder(fields, defaults, names=names, preset=GPT_NEOX)
    H, K, has_bias = (family.model[name] for name in ("num_heads", "head_dim", "projection_bias"))
    fields.same("num_key_value_heads", "num_attention_heads", H)
    rows_3HK = np.arange(3 * H * K).reshape(H, 3, K).swapaxes(0, 1)
    for name, rows_HK in zip(QKV, rows_3HK, strict=True):
        ours, fused = f"layers/attention/{name}", f"{layer}attention.query_key_value"
        family.tensors.linear(ours, fused, bias=has_bias, rows=rows_HK.flatten(), total=rows_3HK.size)
    return family


def _gpt2(fields: Fields) -> Family:
    """Map GPT-2: learned positions, fused queries, keys and values, and weights [inputs, outputs]."""
    fields.names = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
    fields.names |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
    fields.names |= {"hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}
    max_length, D = fields.take("max_position_embeddings", int, 1024), fields.take("hidden_size", int)
    fields.same("n_ctx", "n_positions", max_length)
    fields.read.add("reorder_and_upcast_attn")  # only of computation in 16 bits
    defaults = {"intermediate_size": 4 * D, "max_position_embeddings": max_length, "hidden_act": "gelu_new"}
    defaults |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    options = {"learned_positions": max_length, "rotary": {"name": "none"}}
    layer = "transformer.h.{layer}."
    names = {"layer": layer, "embedding": "transformer.wte", "norm": "transformer.ln_f", "output": "attn.c_proj"}
    names |= {"up": "mlp.c_fc", "down": "mlp.c_proj", "attention_norm": "ln_1", "mlp_norm": "ln_2"}
    family = _decoder(fields, defaults, options, names, preset=GPT_NEOX)
    H, K = (family.model[name] for name in ("num_heads", "head_dim"))
    fields.same("num_key_value_heads", "num_attention_heads", H)
    for index, name in enumerate(QKV):
        ours, rows = f"layers/attention/{name}", slice(index * H * K, (index + 1) * H * K)
        family.tensors.linear(ours, f"{layer}attn.c_attn", bias=True, rows=rows, total=3 * H * K)
    for path, tensor in family.tensors.items():
        if path.startswith("layers/") and len(tensor.shape) == 2:
            convert = functools.partial(lambda convert, x: convert(x.T), tensor.convert)
            family.tensors[path] = dataclasses.replace(tensor, shape=tensor.shape[::-1], convert=convert)
    family.tensors["positions_PD"] = Tensor("transformer.wpe.weight", (max_length, D))
    return family


def _llama(fields: Fields) -> Family:
    """Map Llama 1 to 3."""
    return _decoder(fields, {"attention_bias": False, "mlp_bias": False, "max_position_embeddings": 2048})


def _mistral(fields: Fields) -> Family:
    """Map Mistral, and Ministral with windows in some layers; the default window is 4,096 tokens."""
    options = {"window": fields.optional("sliding_window", int, missing=4096)}
    if fields.take("model_type", str) == "ministral":
        options = _windows(fields, options["window"], lambda _: options["window"] is not None)
    return _decoder(fields, {"num_key_value_heads": 8, "max_position_embeddings": 131_072}, options)


def _qwen2(fields: Fields) -> Family:
    """Map Qwen2 and Qwen2.5: biases of queries, keys and values."""
    options = {"projection_bias": True, **_qwen_windows(fields)}
    return _decoder(fields, {"num_key_value_heads": 32, "max_position_embeddings": 32_768}, options)


def _qwen3(fields: Fields) -> Family:
    """Map Qwen3: norms of each head's queries and keys."""
    defaults = {"attention_bias": False, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768}
    return _decoder(fields, defaults, {"qk_norm": "head", **_qwen_windows(fields)})


def _qwen_windows(fields: Fields) -> dict[str, Any]:
    """Return the options for the windows of Qwen's models."""
    window = fields.optional("sliding_window", int, missing=4096)
    window = window if fields.take("use_sliding_window", bool, False) else None
    first = fields.take("max_window_layers", int, 28)  # layers before this one have no window
    return _windows(fields, window, lambda layer: window is not None and layer >= first)


GEMMA = {"head_dim": 256, "attention_bias": False, "tie_word_embeddings": True}


def _gemma(fields: Fields) -> Family:
    """Map Gemma 1: embeddings times sqrt(D), norms with 1 + weight. "gelu" in its configs means the approximation."""
    allowed = "must be gelu or gelu_pytorch_tanh in this family"
    for name in ("hidden_act", "hidden_activation"):
        kind = fields.take(name, str, "gelu_pytorch_tanh")
        fields.check(kind in ("gelu", "gelu_pytorch_tanh"), name, allowed)
    defaults = GEMMA | {"num_key_value_heads": 16, "max_position_embeddings": 8192}
    return _decoder(fields, defaults, {"scale_embedding": True, "activation": "gelu_tanh"}, norm_offset=1.0)


def _gemma2(fields: Fields) -> Family:
    """Map Gemma 2: norms before and after each branch, caps of scores and logits, a window in every other layer."""
    window = fields.optional("sliding_window", int, 4096)
    fields.same("sliding_window_size", "sliding_window", window)
    options = _windows(fields, window, lambda layer: layer % 2 == 0)
    options |= {"score_cap": fields.optional("attn_logit_softcapping", float, 50.0)}
    options |= {"logit_cap": fields.optional("final_logit_softcapping", float, 30.0)}
    return _gemma_2_or_3(fields, {"max_position_embeddings": 8192}, options, "query_DHK", "query_bias_HK")


def _gemma3(fields: Fields) -> Family:
    """Map the text model of Gemma 3: two rotary embeddings, norms of each head's queries and keys."""
    fields.read.add("_sliding_window_pattern")
    pattern, window = fields.take("sliding_window_pattern", int, 6), fields.optional("sliding_window", int, 4096)
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072}
    options = _windows(fields, window, lambda layer: (layer + 1) % pattern != 0)
    local_base = fields.take("rope_local_base_freq", float, 10_000.0)
    options |= _rotary_of_types(fields, options, 131_072, 1_000_000.0, local_base)
    options |= {"qk_norm": "head", "logit_cap": fields.optional("final_logit_softcapping", float)}
    return _gemma_2_or_3(fields, defaults, options, "query_norm/scale")


def _gemma_2_or_3(fields: Fields, defaults: dict[str, Any], options: dict[str, Any], *queries: str) -> Family:
    """Map what Gemma 2 and 3 share. `queries` are the parameters that are multiplied by the factor of the scores."""
    activation = _activation(fields, "gelu_pytorch_tanh", "hidden_activation")
    options |= {"activation": activation, "scale_embedding": True, "branch_norm": True}
    names = {"attention_branch_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
    names |= {"mlp_branch_norm": "post_feedforward_layernorm"}
    family = _decoder(fields, GEMMA | {"num_key_value_heads": 4} | defaults, options, names, norm_offset=1.0)
    scalar = fields.take("query_pre_attn_scalar", float, 256.0)
    fields.check(scalar > 0, "query_pre_attn_scalar", "must be positive")
    factor = math.sqrt(family.model["head_dim"] / scalar)
    return _multiplied(family, {f"layers/attention/{name}": factor for name in queries})


def _multiplied(family: Family, factors: dict[str, float]) -> Family:
    """Multiply parameters by constants by which the source multiplies their results."""

    def multiplied(convert: Callable[[np.ndarray], np.ndarray], factor: float, x: np.ndarray) -> np.ndarray:
        return np.float32(factor) * np.asarray(convert(x), np.float32)

    for path in factors.keys() & family.tensors.keys():
        tensor = family.tensors[path]
        convert = functools.partial(multiplied, tensor.convert, factors[path])
        family.tensors[path] = dataclasses.replace(tensor, convert=convert)
    return family


def _granite(fields: Fields) -> Family:
    """Map Granite: constants that multiply embeddings, scores and branches, and one that divides logits."""
    family = _llama(fields)
    names = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    embedding, attention, residual, logits = (fields.take(name, float, 1.0) for name in names)
    for name, value in zip(names, (embedding, attention, residual, logits), strict=True):
        fields.check(value > 0, name, "must be positive")
    is_tied = family.model["tied_embeddings"]  # then the unembedding is multiplied like the embedding
    factors = {"norm/scale": 1 / (embedding * logits)} if is_tied else {"unembedding_DV": 1 / logits}
    factors |= {"embedding_VD": embedding}
    of_scores = attention * math.sqrt(family.model["head_dim"])
    factors |= {f"layers/attention/{name}": of_scores for name in ("query_DHK", "query_bias_HK")}
    factors |= {f"layers/attention/{name}": residual for name in ("output_HKD", "output_bias_D")}
    factors |= {f"layers/mlp/{name}": residual for name in ("down_FD", "down_bias_D")}
    return _multiplied(family, factors)


def _phi(fields: Fields) -> Family:
    """Map Phi-1 and Phi-2: attention and MLP have the same input, for which we have two norms with the same values."""
    fields.names = {"rms_norm_eps": "layer_norm_eps"}
    defaults = {"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    names = {"output": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2", "mlp_norm": "input_layernorm"}
    names |= {"norm": "model.final_layernorm"}
    options = {"parallel_residual": True, "output_bias": True}
    return _decoder(fields, defaults | {"max_position_embeddings": 2048}, options, names, preset=GPT_NEOX)


def _phi3(fields: Fields) -> Family:
    """Map Phi-3 and Phi-4: fused projections."""
    fields.read.add("original_max_position_embeddings")  # of longrope
    defaults = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "max_position_embeddings": 4096}
    family = _decoder(fields, defaults, {"window": fields.optional("sliding_window", int)})
    H, G, K, F = (family.model[name] for name in ("num_heads", "num_kv_heads", "head_dim", "mlp_width"))
    tensors, layer, first = family.tensors, NAMES["layer"], [0, H * K, (H + G) * K, (H + 2 * G) * K]
    for index, name in enumerate(QKV):
        rows, fused = slice(first[index], first[index + 1]), f"{layer}self_attn.qkv_proj"
        tensors.linear(f"layers/attention/{name}", fused, rows=rows, total=first[-1])
    for index, name in enumerate(("gate_DF", "up_DF")):
        rows = slice(index * F, (index + 1) * F)
        tensors.linear(f"layers/mlp/{name}", f"{layer}mlp.gate_up_proj", rows=rows, total=2 * F)
    return family


def _stablelm(fields: Fields) -> Family:
    """Map StableLM: LayerNorm, a part of the dims rotated."""
    fields.names = {"rms_norm_eps": "layer_norm_eps"}
    fields.same("rope_pct", "partial_rotary_factor", fields.take("partial_rotary_factor", float, 0.25))
    fields.same("norm_eps", "layer_norm_eps", fields.take("layer_norm_eps", float, 1e-5))
    fields.same("num_heads", "num_attention_heads", fields.take("num_attention_heads", int))
    defaults = {"use_qkv_bias": False, "use_parallel_residual": False, "rms_norm_eps": 1e-5}
    defaults |= {"num_key_value_heads": 32, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096}
    is_parallel = fields.take("use_parallel_residual", bool, False)
    names = {"mlp_norm": "input_layernorm"} if is_parallel else {}
    return _decoder(fields, defaults, {"norm": "layer_norm"}, names)


def _starcoder2(fields: Fields) -> Family:
    """Map StarCoder2: LayerNorm, an MLP without a gate, biases."""
    fields.names = {"rms_norm_eps": "norm_epsilon"}
    for name, value in (("mlp_type", "default"), ("norm_type", "layer_norm")):
        fields.check(fields.take(name, str, value) == value, name, f"must be {value}")
    fields.read |= {"activation_function", "layer_norm_epsilon"}  # of StarCoder 1; published configs still have them
    defaults = {"use_bias": True, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    defaults |= {"num_key_value_heads": 2, "max_position_embeddings": 4096}
    names = {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    return _decoder(fields, defaults, {"window": fields.optional("sliding_window", int)}, names, preset=GPT_NEOX)


def _olmo(fields: Fields) -> Family:
    """Map OLMo 1: LayerNorms without parameters, for which we have ones and zeros."""
    options = {"norm": "layer_norm", "norm_epsilon": 1e-5}
    defaults = {"attention_bias": False, "rms_norm_eps": None, "max_position_embeddings": 2048}
    family = _decoder(fields, defaults, options)
    for name in ("layers/attention_norm", "layers/mlp_norm", "norm"):
        family.tensors.norm(name, None, bias=True, offset=1.0)
    return family


def _smollm3(fields: Fields) -> Family:
    """Map SmolLM3: no rotary embedding in every fourth layer, which may have a window."""
    num_layers, interval = _num_layers(fields), fields.take("no_rope_layer_interval", int, 4)
    fields.check(interval > 0, "no_rope_layer_interval", "must be positive")
    has_rope = fields.optional("no_rope_layers", list)
    if has_rope is None:
        has_rope = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    are_flags = len(has_rope) >= num_layers and all(each in (0, 1) for each in has_rope)
    fields.check(are_flags, "no_rope_layers", f"must be 0 or 1 for each of {num_layers} layers")
    layers = [layer for layer in range(num_layers) if not has_rope[layer]]
    window = fields.optional("sliding_window", int)
    window = window if fields.take("use_sliding_window", bool, False) else None
    windows = _windows(fields, window, lambda layer: window is not None and layer in layers)
    found = windows["alternate_layers"] if "alternate_layers" in windows else []
    are_same = window is None or found == layers
    fields.check(are_same, "layer_types", f"must be {SLIDING} in the layers without rotary embedding")
    options = {"alternate_layers": layers, "alternate_window": window, "alternate_rotary": {"name": "none"}}
    defaults = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "rope_theta": 2e6}
    defaults |= {"num_key_value_heads": 4, "max_position_embeddings": 32_768}
    return _decoder(fields, defaults, options if layers else {})


def _olmo2(fields: Fields) -> Family:
    """Map OLMo 2: norms of the outputs of attention and MLP, and of all queries and keys of a token."""
    options = {"norm_first": False, "branch_norm": True, "qk_norm": "projection"}
    names = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
    if fields.take("model_type", str) == "olmo3":
        options |= _windows(fields, fields.optional("sliding_window", int, 4096), lambda layer: (layer + 1) % 4 != 0)
        options |= _rotary_of_types(fields, options, 2048, 500_000.0, 500_000.0)
    defaults = {"attention_bias": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
    return _decoder(fields, defaults, options, names)


def _num_layers(fields: Fields) -> int:
    """Return the number of layers, of which lists are made before the tensors are seen."""
    num_layers = fields.take("num_hidden_layers", int)
    fields.check(0 < num_layers < 10_000, "num_hidden_layers", "must be positive and below 10,000")
    return num_layers


FULL, SLIDING = "full_attention", "sliding_attention"


def _windows(fields: Fields, window: int | None, has_window: Callable[[int], bool]) -> dict[str, Any]:
    """Return the options for `layer_types`; without this field, `has_window` says which layers have the window."""
    num_layers = _num_layers(fields)
    types = fields.optional("layer_types", list)
    if types is None:
        types = [SLIDING if has_window(layer) else FULL for layer in range(num_layers)]
    are_types = len(types) == num_layers and all(kind in (FULL, SLIDING) for kind in types)
    fields.check(are_types, "layer_types", f"must be {FULL} or {SLIDING} for each of {num_layers} layers")
    layers = [layer for layer, kind in enumerate(types) if kind == SLIDING]
    fields.check(not layers or window is not None, "sliding_window", f"must be given with {SLIDING} in layer_types")
    if len(layers) in (0, num_layers):
        return {"window": window if layers else None}
    return {"alternate_layers": layers, "alternate_window": window}


def _rotary_of_types(
    fields: Fields, options: dict[str, Any], max_length: int, base: float, local_base: float
) -> dict[str, Any]:
    """Return the options for the rotary embeddings of layers without and with a window, for `_windows`' options.

    In the fields of transformers 4, `rope_scaling` is only of layers without a window. `max_length` is a default.
    """
    max_length = fields.take("max_position_embeddings", int, max_length)
    new = fields.optional("rope_parameters", dict)
    others = [] if new is None else [value for name, value in new.items() if name not in (FULL, SLIDING)]
    are_types = all(value in (None, "default") for value in others)  # transformers 5.4 adds rope_type and rope_theta
    fields.check(are_types, "rope_parameters", f"must have {FULL} and {SLIDING}")
    rotary = {}
    for kind, default in ((FULL, base), (SLIDING, local_base)):
        changes = {} if new is None else {"rope_parameters": new[kind] if kind in new else {}}
        if new is None and kind == SLIDING:
            changes = {"rope_scaling": None, "rope_theta": None}
        of_kind = Fields(fields.config | changes, fields.where)
        rotary[kind] = _rotary(of_kind, max_length, default)
        fields.read |= of_kind.read
    if "alternate_layers" in options:
        return {"rotary": rotary[FULL], "alternate_rotary": rotary[SLIDING]}
    return {"rotary": rotary[FULL if options["window"] is None else SLIDING]}


SIZES = {"num_layers": "num_hidden_layers", "width": "hidden_size", "num_heads": "num_attention_heads"}
SIZES |= {"mlp_width": "intermediate_size", "vocab_size": "vocab_size"}
# Fields of the `model` section that a field gives; a family reads those of which it has a default.
OPTIONS = {"attention_bias": ("projection_bias", "attention_output_bias"), "mlp_bias": ("mlp_bias",)}
OPTIONS |= {"use_bias": ("projection_bias", "attention_output_bias", "mlp_bias"), "use_qkv_bias": ("projection_bias",)}
OPTIONS |= {"use_parallel_residual": ("parallel_residual",), "tie_word_embeddings": ("tied_embeddings",)}
OPTIONS |= {"rms_norm_eps": ("norm_epsilon",)}
DEFAULTS_OF_LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
QKV = ("query_DHK", "key_DGK", "value_DGK")
NAMES = {"layer": "model.layers.{layer}.", "embedding": "model.embed_tokens", "unembedding": "lm_head"}
NAMES |= {"output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
NAMES |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "norm": "model.norm"}


def _decoder(
    fields: Fields,
    defaults: dict[str, Any],
    options: dict[str, Any] | None = None,
    names: dict[str, str] | None = None,
    *,
    preset: dict[str, Any] = LLAMA,
    norm_offset: float = 0.0,
) -> Family:
    """Map a decoder whose tensors are named like Llama's, or by `names`.

    Args:
        fields: the config.
        defaults: values of fields that a config may lack, in transformers' names, where they differ from Llama's; of a
            family that rotates a part of the dims, also `partial_rotary_factor`. None: the family has no such field.
        options: fields of our `model` section that the family determines, whatever the config has.
        names: names of tensors that differ from `NAMES`.
        preset: other fields of our `model` section.
        norm_offset: number that is added to the scale of norms.
    """
    defaults, names = DEFAULTS_OF_LLAMA | defaults, NAMES | (names or {})
    sizes = {ours: fields.take(theirs, int, defaults.get(theirs)) for ours, theirs in SIZES.items()}
    for ours, size in sizes.items():
        fields.check(size > 0, SIZES[ours], "must be positive")
    D, H, F, V = (sizes[name] for name in ("width", "num_heads", "mlp_width", "vocab_size"))
    G = fields.optional("num_key_value_heads", int, defaults.get("num_key_value_heads"))
    K = fields.optional("head_dim", int, defaults.get("head_dim"))
    G = H if G is None else G
    if K is None:
        fields.check(D % H == 0, "num_attention_heads", f"must divide the width {D}")
        K = D // H
    fields.check(G > 0 and H % G == 0, "num_key_value_heads", f"must divide num_attention_heads = {H}")
    max_length = fields.take("max_position_embeddings", int, defaults["max_position_embeddings"])
    model = preset | sizes | {"num_outputs": V, "num_kv_heads": G, "head_dim": K, "window": None}
    model["activation"] = _activation(fields, defaults["hidden_act"])
    for theirs in OPTIONS.keys() & defaults.keys():
        if (default := defaults[theirs]) is not None:
            model |= dict.fromkeys(OPTIONS[theirs], fields.take(theirs, type(default), default))
    model |= options or {}
    if "rotary" not in model:
        fraction = defaults.get("partial_rotary_factor")
        share = fraction if fraction is None else fields.take("partial_rotary_factor", float, fraction)
        model["rotary"] = _rotary(fields, max_length, defaults["rope_theta"], share)
    is_centered = model["norm"] == "layer_norm"
    tensors, layer = Tensors(D=D, H=H, G=G, K=K, F=F, V=V), names["layer"]
    tensors["embedding_VD"] = Tensor(f"{names['embedding']}.weight", (V, D))
    for ours, theirs in zip(QKV, ("q_proj", "k_proj", "v_proj"), strict=True):
        tensors.linear(f"layers/attention/{ours}", f"{layer}self_attn.{theirs}", bias=model["projection_bias"])
    has_bias = model["attention_output_bias"]
    tensors.linear("layers/attention/output_HKD", f"{layer}{names['output']}", bias=has_bias, inputs=2)
    if model["qk_norm"] != "none":
        for name, heads in (("query", "H"), ("key", "G")):
            size = "K" if model["qk_norm"] == "head" else f"{heads}K"
            theirs = f"{layer}self_attn.{name[0]}_norm"
            tensors.norm(f"layers/attention/{name}_norm", theirs, size=size, offset=norm_offset)
    maps = {"gate_DF": "gate", "up_DF": "up", "down_FD": "down"}
    for ours in [*maps][0 if model["gated_mlp"] else 1 :]:
        tensors.linear(f"layers/mlp/{ours}", f"{layer}{names[maps[ours]]}", bias=model["mlp_bias"])
    for name in ("attention_norm", "mlp_norm", "attention_branch_norm", "mlp_branch_norm"):
        if name in names:
            tensors.norm(f"layers/{name}", f"{layer}{names[name]}", bias=is_centered, offset=norm_offset)
    tensors.norm("norm", names["norm"], bias=is_centered, offset=norm_offset)
    if not model["tied_embeddings"]:
        tensors.linear("unembedding_DV", names["unembedding"])
    if model["output_bias"]:
        tensors["output_bias_V"] = Tensor("lm_head.bias", (V,))
    return Family(model, max_length, tensors)


# Fields of the `model` section that older exports do not have.
NEWER = ("qk_norm", "branch_norm", "score_cap", "logit_cap", "alternate_layers", "alternate_window", "alternate_rotary")
NEWER += ("learned_positions",)


def _dape(fields: Fields) -> Family:
    """Map an exported run: fields and tensors have our names, and each layer has its own tensors."""
    model: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(TransformerConfig) if field.name not in NOT_EXPORTED
    }
    for name in model:
        fields.check(name in fields.config or name in NEWER, name, "is missing")
        fields.read.add(name)
    model |= {name: fields.config[name] for name in model if name in fields.config}
    tied = fields.take("tie_word_embeddings", bool, False)  # written by transformers; our field is tied_embeddings
    fields.check(not tied, "tie_word_embeddings", "must be False; tied_embeddings is this model's field")
    model |= {"num_outputs": model["vocab_size"], "dropout": 0.0, "initializer": GPT_NEOX["initializer"]}
    computed = {"attention": {"name": "auto"}, "remat": "none", "dtype": "float32"}
    _, params = model_structure(read_model(model | computed))
    tensors = Tensors()
    for path, leaf in flat_params(params).items():
        is_stacked = path[0] == "layers"
        name = ".".join(("layers", "{layer}", *path[1:]) if is_stacked else path)
        tensors["/".join(path)] = Tensor(name, leaf.shape[1:] if is_stacked else leaf.shape)
    return Family(model, fields.take("max_position_embeddings", int), tensors)


FAMILIES = {
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "granite": _granite,
    "phi": _phi,
    "phi3": _phi3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "olmo": _olmo,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "dape": _dape,
}
