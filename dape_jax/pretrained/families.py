"""Families of Hugging Face models: map a `config.json` to our model, and its tensors to our parameters.

In: a config. Out: the `model` section of a run's config, and a `Tensor` for each parameter. Next: `load.py`.

To add a family, write a function from `Fields` to a `Family`, usually by `_decoder`, and add a line to `FAMILIES`. A
field that the function does not read must be `HARMLESS`; all other fields, which could change the result, raise
`InputError`.
"""

import dataclasses
import functools
import math
import operator
import re
from collections import defaultdict
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
    r"|neftune_noise_alpha|perceiver_config|pixel_shuffle_factor"  # the last two are of SmolVLM's images
    # classification, generation and other outputs
    r"|.*label.*|problem_type|task_.*|finetuning_task|summary_.*|output_(attentions|hidden_states|scores|past)"
    r"|return_dict.*|generation.*|(use_)?cache(_implementation)?|is_decoder|do_sample|temperature|top_[kp]|typical_p"
    r"|num_beam.*|num_return_sequences|early_stopping|.*_penalty|.*no_repeat_ngram_size|bad_words_ids"
    r"|(max|min)_(new_tokens|length)|n_special|predict_special_tokens|custom_pipelines|num_steps|type_vocab_size"
    r"|bias|dual_chunk_attention_config"  # biases are known by their tensors; only vLLM reads the second, of Qwen2.5-1M
    # computation: dtypes, kernels, lengths that nothing depends on, and experts, which `family_of` refuses unless none
    r"|(torch_)?dtype|(use_)?(bfloat16|float16|bf16|fp16)|.*softmax_in_fp32|.*flash_att.*|attn_implementation|torchscript"
    r"|max_window_layers|chunk_size_feed_forward|.*expert.*|(model_)?max_(seq|sequence)?_?len(gth)?|seq_len(gth)?"
    r"|make_vocab_size_divisible_by"
)
# Fields whose default in transformers or a model's own code, which our models have, is not null, false or empty.
DEFAULTS = {"is_causal": True, "scale_attn_weights": True, "partial_rotary_factor": 1, "activation": "swiglu"}
DEFAULTS |= {"full_attn_mod": 1, "interpolate_factor": 1, "rotary_scaling_factor": 1}  # of Phi-4-mini and StableLM
DEFAULTS |= {"factor": 1}  # of a rotary embedding that is not scaled
# Buffers that older versions of transformers, or ColossalAI, saved with the parameters.
BUFFERS = (".rotary_emb.inv_freq", ".cos_cached", ".sin_cached", ".attention.bias", ".attn.bias", ".masked_bias")
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

    Fields are asked for by the names of Llama's config; see `rename` for a family that has others.
    """

    def __init__(self, config: dict[str, Any], where: str = CONFIG_FILE):
        self.config, self.where, self.read = dict(config), where, set[str]()
        self.names: dict[str, str] = {}  # in the config, of the fields that it names otherwise

    def is_given(self, name: str) -> bool:
        """Return whether the config has this field, and it is not null."""
        return name in self.config and self.config[name] is not None

    def rename(self, **names: str) -> None:
        """Read fields under other names. A field that the config has under both must have the same value twice."""
        for theirs, name in names.items():
            if self.is_given(theirs):
                if not self.is_given(name):
                    self.config[name], self.names[name] = self.config[theirs], theirs
                allowed = f"must be {self.names.get(name, name)} = {self.config[name]}, or missing"
                self.check(self.config[theirs] == self.config[name], theirs, allowed)
                self.read.add(theirs)

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
        self.read.add(name)
        value = self.config[name] if name in self.config else missing
        value = int(value) if kind is int and type(value) is float and value.is_integer() else value  # 8192.0
        is_right = value is None or type(value) is kind or (kind is float and type(value) is int)
        self.check(is_right, name, f"must be of type {kind.__name__}")
        return float(value) if kind is float and value is not None else value

    def refuse_others(self) -> None:
        """Raise `InputError` for the first unread field that could change the logits.

        An option at its default changes nothing: null, false or empty, if `DEFAULTS` has no other value for it.
        """
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

    def changed(
        self,
        *,
        before: Callable[[np.ndarray], np.ndarray] = lambda x: x,
        after: Callable[[np.ndarray], np.ndarray] = lambda x: x,
        **fields: Any,
    ) -> "Tensor":
        """Return the tensor with functions that are applied before and after `convert`, and with other fields."""
        return dataclasses.replace(self, convert=lambda x: after(self.convert(before(x))), **fields)


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
    text = text_config(config)
    fields = Fields(text, CONFIG_FILE if text is config else f"{CONFIG_FILE}: text_config")
    for each in text:
        fields.check(not text[each] or "expert" not in each, each, "mixtures of experts are not supported")
        is_quantized = each in ("quantization_config", "quantization") and bool(text[each])
        allowed = "must be missing: save the model without quantization first, or remove it if no tensor is quantized"
        fields.check(not is_quantized, each, allowed)
    name = fields.take("model_type", str)
    fields.check(name in FAMILIES, "model_type", f"must be one of {list(FAMILIES)}")
    family = FAMILIES[name](fields)
    fields.refuse_others()
    return family


# Sizes that LLaVA and Idefics 2 leave out of `text_config`: transformers' defaults.
OF_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11_008}
LEFT_OUT = {"llama": OF_LLAMA, "mistral": OF_LLAMA | {"intermediate_size": 14_336}}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text model, which a multimodal config has in `text_config`."""
    if "text_config" not in config:
        return config
    fields = Fields(config)
    text, kind = fields.take("text_config", dict), fields.take("model_type", str)
    left_out = LEFT_OUT.get(Fields(text).optional("model_type", str), {})
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
    original = scaling.take("original_max_position_embeddings", int, max_length)
    if rotary["name"] == "longrope":
        original = fields.take("original_max_position_embeddings", int, original)  # it takes precedence in transformers
        factor = scaling.take("factor", float, max_length / original)
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        rotary |= {"train_length": original, "attention_factor": scaling.take("attention_factor", float, scale)}
        rotary |= {f"{each}_factors": scaling.take(f"{each}_factor", list) for each in ("short", "long")}
    elif kind != "default":
        rotary["factor"] = factor = scaling.take("factor", float)
    if kind == "dynamic":
        rotary["train_length"] = max_length  # not `original`, which LLaMA-Factory writes and transformers does not read
    if kind == "llama3":
        rotary["train_length"] = original
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
        rotary["train_length"] = original
        rotary["beta_fast"] = scaling.take("beta_fast", float, 32.0)
        rotary["beta_slow"] = scaling.take("beta_slow", float, 1.0)
    scaling.refuse_others()
    return rotary


def _gpt_neox(fields: Fields) -> Family:
    """Map GPT-NeoX and Pythia: queries, keys and values of each head are one block of a fused projection."""
    fields.rename(layer_norm_eps="rms_norm_eps", num_key_value_heads="num_attention_heads")
    fields.rename(rotary_emb_base="rope_theta", rotary_pct="partial_rotary_factor")  # old names
    defaults = {"partial_rotary_factor": 0.25, "hidden_act": "gelu", "rms_norm_eps": 1e-5}
    defaults |= {"attention_bias": True, "use_parallel_residual": True, "max_position_embeddings": 2048}
    names = {"layer": "gpt_neox.layers.{layer}.", "embedding": "gpt_neox.embed_in", "unembedding": "embed_out"}
    names |= dict.fromkeys(QKV, "attention.query_key_value") | {"attention/output": "attention.dense"}
    names |= {"mlp/up": "mlp.dense_h_to_4h", "mlp/down": "mlp.dense_4h_to_h", "norm": "gpt_neox.final_layer_norm"}
    family = _decoder(fields, defaults, names=names, preset=GPT_NEOX)
    H, K = (family.model[name] for name in ("num_heads", "head_dim"))
    rows_3HK = np.arange(3 * H * K).reshape(H, 3, K).swapaxes(0, 1).flatten()
    return _changed(family, "attention/(query|key|value)_", before=lambda x: x[rows_3HK])


def _gpt2(fields: Fields) -> Family:
    """Map GPT-2: learned positions, fused queries, keys and values, and weights [inputs, outputs]."""
    fields.rename(n_layer="num_hidden_layers", n_embd="hidden_size", n_head="num_attention_heads")
    fields.rename(n_inner="intermediate_size", n_positions="max_position_embeddings", n_ctx="max_position_embeddings")
    fields.rename(activation_function="hidden_act", layer_norm_epsilon="rms_norm_eps")
    fields.rename(num_key_value_heads="num_attention_heads")
    max_length, D = fields.take("max_position_embeddings", int, 1024), fields.take("hidden_size", int)
    fields.read.add("reorder_and_upcast_attn")  # only of computation in 16 bits
    defaults = {"intermediate_size": 4 * D, "max_position_embeddings": max_length, "hidden_act": "gelu_new"}
    defaults |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    options = {"learned_positions": max_length, "rotary": {"name": "none"}}
    names = {"layer": "transformer.h.{layer}.", "embedding": "transformer.wte", "positions": "transformer.wpe"}
    names |= dict.fromkeys(QKV, "attn.c_attn") | {"attention/output": "attn.c_proj", "norm": "transformer.ln_f"}
    names |= {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj", "attention_norm": "ln_1", "mlp_norm": "ln_2"}
    family = _decoder(fields, defaults, options, names, preset=GPT_NEOX)
    for path, tensor in family.tensors.items():
        if path.startswith("layers/"):
            family.tensors[path] = tensor.changed(before=np.transpose, shape=tensor.shape[::-1])
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
    family = _decoder(fields, defaults, {"scale_embedding": True, "activation": "gelu_tanh"})
    return _changed(family, "norm/scale", after=_plus_1)


def _gemma2(fields: Fields) -> Family:
    """Map Gemma 2: norms before and after each branch, caps of scores and logits, a window in every other layer."""
    fields.rename(sliding_window_size="sliding_window")
    window = fields.optional("sliding_window", int, 4096)
    options = _windows(fields, window, lambda layer: layer % 2 == 0)
    options |= {"score_cap": fields.optional("attn_logit_softcapping", float, 50.0)}
    options |= {"logit_cap": fields.optional("final_logit_softcapping", float, 30.0)}
    return _gemma_2_or_3(fields, {"max_position_embeddings": 8192}, options, "attention/query_")


def _gemma3(fields: Fields) -> Family:
    """Map the text model of Gemma 3: two rotary embeddings, norms of each head's queries and keys."""
    fields.read.add("_sliding_window_pattern")
    pattern, window = fields.take("sliding_window_pattern", int, 6), fields.optional("sliding_window", int, 4096)
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072}
    options = _windows(fields, window, lambda layer: (layer + 1) % pattern != 0)
    local_base = fields.take("rope_local_base_freq", float, 10_000.0)
    options |= _rotary_of_types(fields, options, 131_072, 1_000_000.0, local_base)
    options |= {"qk_norm": "head", "logit_cap": fields.optional("final_logit_softcapping", float)}
    return _gemma_2_or_3(fields, defaults, options, "attention/query_norm")


def _gemma_2_or_3(fields: Fields, defaults: dict[str, Any], options: dict[str, Any], queries: str) -> Family:
    """Map what Gemma 2 and 3 share. The parameters `queries` are multiplied by the factor of the scores."""
    activation = _activation(fields, "gelu_pytorch_tanh", "hidden_activation")
    options |= {"activation": activation, "scale_embedding": True, "branch_norm": True}
    names = {"attention_branch_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
    names |= {"mlp_branch_norm": "post_feedforward_layernorm"}
    family = _decoder(fields, GEMMA | {"num_key_value_heads": 4} | defaults, options, names)
    scalar = fields.take("query_pre_attn_scalar", float, 256.0)
    fields.check(scalar > 0, "query_pre_attn_scalar", "must be positive")
    factor = math.sqrt(family.model["head_dim"] / scalar)
    return _changed(_changed(family, "norm/scale", after=_plus_1), queries, after=_times(factor))


def _granite(fields: Fields) -> Family:
    """Map Granite: constants that multiply embeddings, scores and branches, and one that divides logits."""
    family = _llama(fields)
    names = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    embedding, attention, residual, logits = (fields.take(name, float, 1.0) for name in names)
    for name, value in zip(names, (embedding, attention, residual, logits), strict=True):
        fields.check(value > 0, name, "must be positive")
    is_tied = family.model["tied_embeddings"]  # then the unembedding is multiplied like the embedding
    factors = {"^norm/": 1 / (embedding * logits)} if is_tied else {"^unembedding": 1 / logits}
    factors |= {"^embedding": embedding, "/query_": attention * math.sqrt(family.model["head_dim"])}
    for parameters, factor in (factors | {"attention/output_|mlp/down_": residual}).items():
        _changed(family, parameters, after=_times(factor))
    return family


def _phi(fields: Fields) -> Family:
    """Map Phi-1 and Phi-2: attention and MLP have the same input, for which we have two norms with the same values."""
    fields.rename(layer_norm_eps="rms_norm_eps")
    defaults = {"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    names = {"attention/output": "self_attn.dense", "mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2"}
    names |= {"mlp_norm": "input_layernorm", "norm": "model.final_layernorm"}
    options = {"parallel_residual": True, "output_bias": True}
    return _decoder(fields, defaults | {"max_position_embeddings": 2048}, options, names, preset=GPT_NEOX)


def _phi3(fields: Fields) -> Family:
    """Map Phi-3 and Phi-4: fused projections."""
    fields.read.add("original_max_position_embeddings")  # of longrope
    defaults = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "max_position_embeddings": 4096}
    names: dict[str, str] = dict.fromkeys(QKV, "self_attn.qkv_proj")
    names |= dict.fromkeys(("mlp/gate", "mlp/up"), "mlp.gate_up_proj")
    return _decoder(fields, defaults, {"window": fields.optional("sliding_window", int)}, names)


def _stablelm(fields: Fields) -> Family:
    """Map StableLM: LayerNorm, a part of the dims rotated."""
    fields.rename(layer_norm_eps="rms_norm_eps", norm_eps="rms_norm_eps")
    fields.rename(rope_pct="partial_rotary_factor", num_heads="num_attention_heads")
    defaults = {"use_qkv_bias": False, "use_parallel_residual": False, "rms_norm_eps": 1e-5}
    defaults |= {"num_key_value_heads": 32, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096}
    is_parallel = fields.take("use_parallel_residual", bool, False)
    names = {"mlp_norm": "input_layernorm"} if is_parallel else {}
    return _decoder(fields, defaults, {"norm": "layer_norm"}, names)


def _starcoder2(fields: Fields) -> Family:
    """Map StarCoder2: LayerNorm, an MLP without a gate, biases."""
    fields.rename(norm_epsilon="rms_norm_eps")
    for name, value in (("mlp_type", "default"), ("norm_type", "layer_norm")):
        fields.check(fields.take(name, str, value) == value, name, f"must be {value}")
    fields.read |= {"activation_function", "layer_norm_epsilon"}  # of StarCoder 1; published configs still have them
    defaults = {"use_bias": True, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    defaults |= {"num_key_value_heads": 2, "max_position_embeddings": 4096}
    names = {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
    return _decoder(fields, defaults, {"window": fields.optional("sliding_window", int)}, names, preset=GPT_NEOX)


def _olmo(fields: Fields) -> Family:
    """Map OLMo 1: LayerNorms without parameters, for which we have ones and zeros."""
    options = {"norm": "layer_norm", "norm_epsilon": 1e-5}
    defaults = {"attention_bias": False, "rms_norm_eps": None, "max_position_embeddings": 2048}
    family = _changed(_decoder(fields, defaults, options), "norm/", name=None)
    return _changed(family, "norm/scale", after=_plus_1)


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
    is_off = "use_sliding_window" in fields.read and not fields.take("use_sliding_window", bool, False)
    name, allowed = ("use_sliding_window", "true") if is_off else ("sliding_window", "given")
    fields.check(not layers or window is not None, name, f"must be {allowed} with {SLIDING} in layer_types")
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
QKV = ("attention/query", "attention/key", "attention/value")
# Names of the tensors of our modules, the first part those of a layer.
NAMES = {"layer": "model.layers.{layer}.", "embedding": "model.embed_tokens", "attention/query": "self_attn.q_proj"}
NAMES |= {"attention/key": "self_attn.k_proj", "attention/value": "self_attn.v_proj", "mlp/gate": "mlp.gate_proj"}
NAMES |= {"attention/query_norm": "self_attn.q_norm", "attention/key_norm": "self_attn.k_norm", "mlp/up": "mlp.up_proj"}
NAMES |= {"attention/output": "self_attn.o_proj", "mlp/down": "mlp.down_proj", "attention_norm": "input_layernorm"}
NAMES |= {"mlp_norm": "post_attention_layernorm", "norm": "model.norm", "unembedding": "lm_head", "output": "lm_head"}


def _decoder(
    fields: Fields,
    defaults: dict[str, Any],
    options: dict[str, Any] | None = None,
    names: dict[str, str] | None = None,
    *,
    preset: dict[str, Any] = LLAMA,
) -> Family:
    """Map a decoder whose tensors are named like Llama's, or by `names`.

    Args:
        fields: the config.
        defaults: values of fields that a config may lack, in transformers' names, where they differ from Llama's; of a
            family that rotates a part of the dims, also `partial_rotary_factor`. None: the family has no such field.
        options: fields of our `model` section that the family determines, whatever the config has.
        names: names of tensors that differ from `NAMES`.
        preset: other fields of our `model` section.
    """
    defaults = DEFAULTS_OF_LLAMA | defaults
    sizes = {ours: fields.take(theirs, int, defaults.get(theirs)) for ours, theirs in SIZES.items()}
    for ours, size in sizes.items():
        fields.check(size > 0, SIZES[ours], "must be positive")
    D, H = sizes["width"], sizes["num_heads"]
    G = fields.optional("num_key_value_heads", int, defaults.get("num_key_value_heads"))
    K = fields.optional("head_dim", int, defaults.get("head_dim"))
    G = H if G is None else G
    if K is None:
        fields.check(D % H == 0, "num_attention_heads", f"must divide the width {D}")
        K = D // H
    fields.check(G > 0 and H % G == 0, "num_key_value_heads", f"must divide num_attention_heads = {H}")
    max_length = fields.take("max_position_embeddings", int, defaults["max_position_embeddings"])
    model = preset | sizes | {"num_outputs": sizes["vocab_size"], "num_kv_heads": G, "head_dim": K, "window": None}
    model |= {"bias": {"name": "nope"}, "processor": {"name": "none"}}
    model["activation"] = _activation(fields, defaults["hidden_act"])
    for theirs in OPTIONS.keys() & defaults.keys():
        if (default := defaults[theirs]) is not None:
            model |= dict.fromkeys(OPTIONS[theirs], fields.take(theirs, type(default), default))
    model |= options or {}
    if model["window"] is None and "alternate_layers" not in model and fields.is_given("layer_types"):
        num_layers = model["num_layers"]
        allowed = f"must be {FULL} for each of {num_layers} layers"
        fields.check(fields.take("layer_types", list) == [FULL] * num_layers, "layer_types", allowed)
    if "rotary" not in model:
        fraction = defaults.get("partial_rotary_factor")
        share = fraction if fraction is None else fields.take("partial_rotary_factor", float, fraction)
        model["rotary"] = _rotary(fields, max_length, defaults["rope_theta"], share)
    return Family(model, max_length, _tensors(model, NAMES | (names or {})))


def _tensors(model: dict[str, Any], names: dict[str, str]) -> dict[str, Tensor]:
    """Return the tensors of all parameters of a model by the names of its modules: "query_bias_HK" is one of "query".

    A linear map is stored as [outputs, inputs]; we transpose it and split it into heads. Maps of one name are rows of
    one map, in the order of `names`.
    """

    def module_of(path: tuple[str, ...]) -> str:
        *modules, last = path[1:] if path[0] == "layers" else path
        return "/".join(modules if last in ("scale", "bias") else (*modules, last.partition("_")[0]))

    params, order = flat_params(model_structure(read_model(model))[1]), list(names)
    tensors, together = {}, defaultdict[str, list[str]](list)
    for path in sorted(params, key=lambda path: order.index(module_of(path))):
        ours, module, is_stacked, is_bias = "/".join(path), module_of(path), path[0] == "layers", "bias" in path[-1]
        shape, inputs = params[path].shape[is_stacked:], 2 if module == "attention/output" else 1
        is_map = len(shape) > 1 and not is_bias and module not in ("embedding", "positions")
        sizes = [math.prod(shape[inputs:]), math.prod(shape[:inputs])] if is_map else shape
        name = f"{names['layer'] if is_stacked else ''}{names[module]}.{'bias' if is_bias else 'weight'}"
        turn = np.transpose if is_map else np.asarray
        convert = functools.partial(lambda shape, turn, x: turn(x).reshape(shape), shape, turn)
        tensors[ours] = Tensor(name, (math.prod(shape),) if is_bias else tuple(sizes), convert)
        if "norm" not in module:  # Phi has the same norm twice
            together[name].append(ours)
    for paths in together.values():
        ends = np.cumsum([tensors[ours].shape[0] for ours in paths]).tolist()
        for ours, first, last in zip(paths, [0, *ends], ends, strict=False):
            rows, rest = slice(first, last), tensors[ours].shape[1:]
            tensors[ours] = tensors[ours].changed(before=operator.itemgetter(rows), shape=(ends[-1], *rest))
    return tensors


def _changed(family: Family, parameters: str, **changes: Any) -> Family:
    """Change the tensors of the parameters in whose paths the pattern is found; see `Tensor.changed`."""
    for path, tensor in family.tensors.items():
        if re.search(parameters, path):
            family.tensors[path] = tensor.changed(**changes)
    return family


def _plus_1(x: np.ndarray) -> np.ndarray:
    return 1 + np.asarray(x, np.float32)


def _times(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return the change of a parameter whose results the source multiplies by a constant."""
    return lambda x: np.float32(factor) * np.asarray(x, np.float32)


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
    tensors = {}
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
