"""DAPE V2 (attention scores as a feature map) in PyTorch: the operator, and a model for Hugging Face transformers.

This file needs only PyTorch and transformers, and is copied into every exported checkpoint:

    model = AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)

The operator is `attend`; a bias is a module of `BIASES`, a processor a module of `PROCESSORS`:

    processor = Dape(num_heads=8, has_bias=True, kernel_width=3, channels=32)
    out_BTHK = attend(q_BTHK, k_BSGK, v_BSGK, bias=Kerple(num_heads=8), processor=processor)

Letters in names are dims: B batch, T query rows, S keys, H heads, G heads of keys and values (grouped queries), K head
dim, D width, F feed-forward width, V vocabulary, C channels of DAPE, W width of its kernels, M hidden width of FIRE, N
buckets of T5. Parameters have the names and shapes of the package `dape_jax`, which has the same functions in JAX, and
more methods. Positions have a batch dim here, of size 1 if they are the same for all sequences. `torch.compile` and
`torch.export` give one graph: nothing branches on the values of a tensor while `torch.compiler.is_compiling()`.

Source: Zheng et al., "DAPE V2: Process Attention Score as Feature Map for Length Extrapolation", ACL 2025; for the
biases and rotary embeddings see each class.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

try:
    from .cuda_dape import attend as attend_in_cuda
    from .cuda_dape import why_not as why_not_in_cuda
    from .cuda_kernels import SOURCES  # noqa: F401  # older transformers copy only files that this one imports itself
except ImportError:  # this file alone, or not in a package
    attend_in_cuda = why_not_in_cuda = None
SLOPE = 0.01  # negative slope of the LeakyReLU
BLOCK_BYTES = 2**27  # maximum size of the scores of one block of rows
PACKED_ROWS = 128  # least number of rows of a block of packed sequences
ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}
# Arguments that tokenizers, trainers and servers pass to every model, and that have no effect here.
_WITHOUT_EFFECT = ("cache_position", "token_type_ids", "tokenizer")
# Arguments that say again what position_ids say.
_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Name of the cache in the outputs of a model, and of the argument of `forward` that `generate` passes it as.
CACHE = "past_key_values"  # up to transformers 5.23
if "cache" in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}:
    CACHE = "cache"
# Fields of a config, with the values of a field that is missing.
DEFAULTS: dict[str, Any] = {
    "num_layers": 2,
    "width": 64,
    "num_heads": 4,
    "num_kv_heads": None,  # num_heads
    "head_dim": None,  # width / num_heads
    "mlp_width": None,  # 4 width
    "vocab_size": 257,
    "rotary": {"name": "none"},
    "bias": {"name": "nope"},
    "processor": {"name": "none"},
    "causal": True,
    "window": None,
    "alternate_layers": (),  # numbers of the layers that have the next two in place of window and rotary
    "alternate_window": None,
    "alternate_rotary": None,  # rotary
    "norm_first": True,
    "branch_norm": False,
    "parallel_residual": False,
    "norm": "layer_norm",
    "norm_epsilon": 1e-5,
    "activation": "gelu",
    "gated_mlp": False,
    "qk_norm": "none",
    "score_cap": None,
    "projection_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "scale_embedding": False,
    "learned_positions": None,
    "tied_embeddings": False,
    "output_bias": False,
    "logit_cap": None,
    "max_position_embeddings": 512,  # the train length
    "use_cache": True,
}


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} = {value!r}: {allowed}")


def _require_all(is_right: Tensor, name: str, allowed: str) -> None:
    """Raise `ValueError` unless all values are True; a compiled model asserts it."""
    if torch.compiler.is_compiling():
        torch._assert_async(is_right.all(), f"{name}: {allowed}")  # pyright: ignore[reportPrivateImportUsage]
    elif not is_right.all():
        raise ValueError(f"{name}: {allowed}")


def _one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    _require(value in allowed, name, value, f"must be one of {list(allowed)}")


class DapeConfig(PretrainedConfig):
    """Model section of a run's config, and the train length.

    Fields are those of `dape_jax.model.transformer.TransformerConfig`; `rotary`, `bias` and `processor` are dicts with
    a name and options.
    """

    model_type = "dape"
    attribute_map = {  # noqa: RUF012  # as transformers declares it
        "hidden_size": "width",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "mlp_width",
        "final_logit_softcapping": "logit_cap",  # trainers that compute the loss themselves read it
    }

    def __init__(self, **fields: Any):
        for name, default in DEFAULTS.items():
            setattr(self, name, fields.pop(name, default))
        if self.rotary["name"] == "yarn":  # exports of older versions lack these options
            self.rotary = {"attention_factor": None, "truncate": True} | self.rotary
        self.num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        self.head_dim = self.width // self.num_heads if self.head_dim is None else self.head_dim
        self.mlp_width = 4 * self.width if self.mlp_width is None else self.mlp_width
        _one_of("norm", self.norm, ("layer_norm", "rms_norm"))
        _one_of("activation", self.activation, ACTIVATIONS)
        _one_of("qk_norm", self.qk_norm, ("none", "head", "projection"))
        for name, rotary in (("rotary", self.rotary), ("alternate_rotary", self.alternate_rotary or self.rotary)):
            _one_of(name, rotary["name"], ("none", "rope", "pi", "ntk", "yarn", "llama3"))
        _one_of("bias", self.bias["name"], ("nope", *BIASES))
        _one_of("processor", self.processor["name"], ("none", "dape"))
        _one_of("causal", self.causal, (True,))
        fields["tie_word_embeddings"] = False  # a tied model uses the table twice and has no second parameter to tie
        super().__init__(**fields)


# ---- rotary embedding


def rotary_frequencies(rotary: dict[str, Any], head_dim: int) -> tuple[list[float], float]:
    """Return the angles per position, in double precision, and the factor of queries and keys.

        w_m = base^(-2m/R), m < R/2, R = fraction K

    "pi" divides all angles by the factor; "ntk" enlarges the base; "yarn" and "llama3" divide the slow ones.

    Args:
        rotary: {"name": "rope" | "pi" | "ntk" | "yarn" | "llama3", "base": .., "fraction": .., ..}.
        head_dim: K.

    Source: Su et al. 2021, Chen et al. 2023, bloc97 2023, Peng et al. 2024, Llama 3.1.
    """
    name, base, size = rotary["name"], float(rotary["base"]), int(rotary["fraction"] * head_dim)
    factor = 1.0 if name == "rope" else float(rotary["factor"])
    if name == "ntk":
        base *= factor ** (size / (size - 2))
    frequencies, scale = [base ** (-m / size) for m in range(0, size, 2)], 1.0
    # Share of each frequency that is not divided by the factor.
    kept = [0.0 if name == "pi" else 1.0] * len(frequencies)
    if name == "yarn":

        def dim_of(turns: float) -> float:
            return size * math.log(rotary["train_length"] / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = dim_of(rotary["beta_fast"]), dim_of(rotary["beta_slow"])
        low, high = (math.floor(low), math.ceil(high)) if rotary["truncate"] else (low, high)
        low, high = max(low, 0), min(high, size - 1)
        kept = [1 - min(max((m - low) / ((high - low) or 1e-3), 0), 1) for m in range(size // 2)]
        scale = rotary["attention_factor"] or 0.1 * math.log(factor) + 1
    elif name == "llama3":
        low, high = rotary["low_frequency_factor"], rotary["high_frequency_factor"]
        turns = [rotary["train_length"] * w / (2 * math.pi) for w in frequencies]
        kept = [min(max((r - low) / (high - low), 0), 1) for r in turns]
    return [g * w + (1 - g) * w / factor for g, w in zip(kept, frequencies, strict=True)], scale


def rotate(x_BTHK: Tensor, pos_BT: Tensor, rotary: dict[str, Any]) -> Tensor:
    """Rotate queries or keys by their positions.

    With a, b the halves of the first R dims: a' = a cos(pos w) - b sin(pos w), b' = b cos(pos w) + a sin(pos w).
    """
    if rotary["name"] == "none":
        return x_BTHK
    frequencies, scale = rotary_frequencies(rotary, x_BTHK.shape[-1])
    dtype = torch.promote_types(x_BTHK.dtype, torch.float32)
    frequency_m = torch.tensor(frequencies, dtype=dtype, device=x_BTHK.device)
    angle_BT1m = (pos_BT.to(dtype)[..., None] * frequency_m)[:, :, None]
    cos, sin = scale * angle_BT1m.cos(), scale * angle_BT1m.sin()
    size = 2 * len(frequencies)
    a, b = x_BTHK[..., :size].to(dtype).chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BTHK.dtype)
    return torch.cat([rotated, x_BTHK[..., size:]], dim=-1)


# ---- position biases: modules with parameters


class Bias(nn.Module):
    """Base class of biases: a term that is added to the scores and is an input of DAPE."""

    is_of_distance = False  # and of nothing else: the CUDA kernels tabulate it

    def forward(self, distance_TS: Tensor, q_pos_BT: Tensor) -> Tensor:
        """Return the bias [B, H, T, S]; B is 1 if it is the same for all sequences.

        Args:
            distance_TS: query's column - key's column, 0 for later keys, in the dtype of the bias.
            q_pos_BT: position of each query in its sequence, in the same dtype.
        """
        raise NotImplementedError


def _per_head(x_H: Tensor) -> Tensor:
    return x_H[None, :, None, None]


def _uniform(*shape: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter((2 * torch.rand(*shape) - 1) * fan_in**-0.5)


class Alibi(Bias):
    """ALiBi, -slope_h dist, for any number of heads.

    Source: Press et al. 2022, section 3, and their released code.
    """

    is_of_distance = True

    def __init__(self, num_heads: int, head_dim: int = 0):
        super().__init__()
        power = 2 ** math.floor(math.log2(num_heads))
        slopes = [2.0 ** (-8 * (n + 1) / power) for n in range(power)]
        between = [2.0 ** (-8 * (n + 1) / (2 * power)) for n in range(0, 2 * power, 2)]
        self.slopes = (slopes + between)[:num_heads]

    def forward(self, distance_TS: Tensor, q_pos_BT: Tensor) -> Tensor:
        """See `Bias`."""
        return -_per_head(distance_TS.new_tensor(self.slopes)) * distance_TS


class Kerple(Bias):
    """Kerple's logarithmic kernel, -p_h log(1 + a_h dist), with p and a clamped to 0.01 or above.

    Source: Chi et al. 2022, equation 4.
    """

    is_of_distance = True

    def __init__(self, num_heads: int, head_dim: int = 0):
        super().__init__()
        self.p_H = nn.Parameter(2 * torch.rand(num_heads))
        self.a_H = nn.Parameter(torch.rand(num_heads))

    def forward(self, distance_TS: Tensor, q_pos_BT: Tensor) -> Tensor:
        """See `Bias`."""
        p, a = (x.to(distance_TS.dtype) for x in (self.p_H, self.a_H))
        p, a = (_per_head(x + (x.clamp(0.01) - x).detach()) for x in (p, a))  # the gradient is the identity's
        return -p * torch.log1p(a * distance_TS)


class T5(Bias):
    """T5's bias, sqrt(K) table[bucket(dist), h]; all layers share one table.

    Source: Raffel et al. 2020, section 2.1, with the official DAPE code's scale.
    """

    is_of_distance = True

    def __init__(self, num_heads: int, head_dim: int, num_buckets: int = 32, max_distance: int = 128):
        super().__init__()
        self.table_NH = nn.Parameter(nn.init.xavier_normal_(torch.empty(num_buckets, num_heads)))
        exact = num_buckets // 2
        steps = num_buckets - exact
        edges = [exact * (max_distance / exact) ** (m / steps) for m in range(1, steps)]
        # First distance of every bucket but the first: the first buckets have one distance, the others are logarithmic.
        self.first = [*range(1, exact + 1), *(math.ceil(round(edge, 9)) for edge in edges)]
        self.scale = math.sqrt(head_dim)

    def forward(self, distance_TS: Tensor, q_pos_BT: Tensor) -> Tensor:
        """See `Bias`."""
        bucket_TS = torch.bucketize(distance_TS, distance_TS.new_tensor(self.first), right=True)
        return self.scale * self.table_NH.to(distance_TS.dtype)[bucket_TS].movedim(-1, 0)[None]


class Fire(Bias):
    """FIRE: an MLP of the log distance, relative to the query's log position.

        z = log(|c dist| + 1) / (log(|c max(q_pos, |threshold|)| + 1) + 1e-6)        MLP(z), 1 -> M -> H

    Source: Li et al. 2024, equation 5.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int = 0,
        threshold: int = 256,
        width: int = 32,
        initial_c: float = 0.1,
        activation: str = "relu",
    ):
        super().__init__()
        self.c = nn.Parameter(torch.tensor(float(initial_c)))
        self.threshold_multiplier = nn.Parameter(torch.ones(()))
        self.hidden_M, self.hidden_bias_M = _uniform(width, fan_in=1), _uniform(width, fan_in=1)
        self.output_MH, self.output_bias_H = _uniform(width, num_heads, fan_in=width), _uniform(num_heads, fan_in=width)
        self.threshold, self.slope = threshold, {"relu": 0.0, "leaky_relu": SLOPE}[activation]

    def forward(self, distance_TS: Tensor, q_pos_BT: Tensor) -> Tensor:
        """See `Bias`."""
        dtype = distance_TS.dtype
        c, threshold = self.c.to(dtype), (self.threshold_multiplier * self.threshold).to(dtype).abs()
        norm_BT1 = torch.log1p((c * torch.maximum(q_pos_BT, threshold)).abs())[..., None] + 1e-6
        z_BTS = torch.log1p((c * distance_TS).abs()) / norm_BT1
        hidden_BTSM = z_BTS[..., None] * self.hidden_M.to(dtype) + self.hidden_bias_M.to(dtype)
        hidden_BTSM = functional.leaky_relu(hidden_BTSM, self.slope)
        return (hidden_BTSM @ self.output_MH.to(dtype) + self.output_bias_H.to(dtype)).movedim(-1, 1)


BIASES = {"alibi": Alibi, "kerple": Kerple, "t5": T5, "fire": Fire}
SHARED_BY_LAYERS = ("t5",)


def make_bias(spec: dict[str, Any], num_heads: int, head_dim: int) -> Bias | None:
    """Return the module of {"name": .., options}, or None for "nope"."""
    options = dict(spec)
    name = options.pop("name")
    return None if name == "nope" else BIASES[name](num_heads, head_dim, **options)


# ---- DAPE


def key_convolution(x_BITS: Tensor, kernel_WIO: Tensor, pad: tuple[int, int]) -> Tensor:
    """Convolve along the keys, 1xW, with `pad` zeros (left, right); W - 1 columns fewer than the padded input.

    Except on a CPU, the convolution is a sum of shifted matmuls: by default cuDNN's convolutions round float32 to 10
    bits, and the bias far from the query is so large that rounding would lose the scores.
    """
    padded_BITJ, kernel_WIO = functional.pad(x_BITS, pad), kernel_WIO.to(x_BITS.dtype)
    if x_BITS.device.type == "cpu":
        return functional.conv2d(padded_BITJ, kernel_WIO.permute(2, 1, 0)[:, :, None])
    return convolution_by_taps(padded_BITJ, kernel_WIO)


def convolution_by_taps(padded_BITJ: Tensor, kernel_WIO: Tensor) -> Tensor:
    """Return y[.., j] = sum over w of kernel[w] x[.., j + w], by matmuls."""
    num_columns = padded_BITJ.shape[-1] - len(kernel_WIO) + 1
    taps = (torch.einsum("BITJ,IO->BOTJ", padded_BITJ, kernel_IO) for kernel_IO in kernel_WIO)
    return functools.reduce(torch.add, (tap[..., w : w + num_columns] for w, tap in enumerate(taps)))


class Dape(nn.Module):
    """DAPE V2 (DAPE V1 at W = 1): scores plus a small convolution of them, over heads and neighbouring keys.

        A + B + Conv2(LeakyReLU(Conv1([tril(A); tril(B)])))        Conv1: 2H -> C, Conv2: C -> H, both 1xW

    Args:
        num_heads: H.
        has_bias: whether calls pass a bias B.
        kernel_width: W.
        channels: C.
        alignment: "centered" (W odd) or "causal".
        residual: add B outside the convolution as well.
        inputs: inputs of Conv1: "both", "scores" or "bias".
        init: "uniform"; or "identity", which initialises Conv2 to 0.

    Source: the paper's equations 3 to 5 and its listing in appendix L; see `dape_jax.model.processors.dape`.
    Differs: keys after the last one count as zero scores (edge "prefix"), so that a row does not change when keys are
    appended.
    """

    def __init__(
        self,
        num_heads: int,
        has_bias: bool,
        kernel_width: int = 3,
        channels: int = 32,
        alignment: str = "centered",
        residual: bool = True,
        inputs: str = "both",
        init: str = "uniform",
    ):
        super().__init__()
        _one_of("alignment", alignment, ("centered", "causal"))
        _one_of("inputs", inputs, ("both", "scores", "bias"))
        _one_of("init", init, ("uniform", "identity"))
        is_possible = kernel_width % 2 == 1 or alignment == "causal"
        _require(is_possible, "kernel_width", kernel_width, "must be odd for a centered kernel")
        _require(inputs != "bias" or has_bias, "inputs", inputs, "must be 'scores' or 'both' without a bias")
        reads_scores, reads_bias = inputs != "bias", has_bias and inputs != "scores"
        fan_in, fan_hidden = (reads_scores + reads_bias) * num_heads * kernel_width, channels * kernel_width
        shape = (kernel_width, num_heads, channels)
        self.scores_WHC = _uniform(*shape, fan_in=fan_in) if reads_scores else None
        self.bias_WHC = _uniform(*shape, fan_in=fan_in) if reads_bias else None
        self.hidden_bias_C = _uniform(channels, fan_in=fan_in)
        self.output_WCH = _uniform(kernel_width, channels, num_heads, fan_in=fan_hidden)
        self.output_bias_H = _uniform(num_heads, fan_in=fan_hidden)
        if init == "identity":
            nn.init.zeros_(self.output_WCH)
            nn.init.zeros_(self.output_bias_H)
        self.residual, self.has_bias = residual, has_bias
        half, before = kernel_width // 2, kernel_width - 1
        # Zero padding (left, right) of the inputs of both convolutions.
        self.paddings = ((before, 0), (before, 0)) if alignment == "causal" else ((half, 2 * half), (half, 0))
        self.halo = before if alignment == "causal" else half  # keys before the first visible key that a row depends on

    def forward(self, scores_BHTS: Tensor, bias_BHTS: Tensor | None, mask_BTS: Tensor, is_key_BTS: Tensor) -> Tensor:
        """Return the processed scores; where the mask is False, any finite number.

        Args:
            scores_BHTS: A.
            bias_BHTS: B, or None.
            mask_BTS: True where the query sees the key.
            is_key_BTS: False for keys before the first of the query's sequence.
        """
        allowed = f"must be {'given' if self.has_bias else 'None'}, as has_bias={self.has_bias} says"
        _require(self.has_bias == (bias_BHTS is not None), "bias", type(bias_BHTS).__name__, allowed)
        first_pad, second_pad = self.paddings
        hidden_BCTJ = self.hidden_bias_C.to(scores_BHTS.dtype)[None, :, None, None]
        for x_BHTS, kernel_WHC in ((scores_BHTS, self.scores_WHC), (bias_BHTS, self.bias_WHC)):
            if x_BHTS is not None and kernel_WHC is not None:
                visible = torch.where(mask_BTS[:, None], x_BHTS, 0)
                hidden_BCTJ = hidden_BCTJ + key_convolution(visible, kernel_WHC, first_pad)
        hidden_BCTJ = functional.leaky_relu(hidden_BCTJ, SLOPE)
        # Hidden features left of the first key are zero, as without keys there.
        is_key_BTJ = functional.pad(is_key_BTS, (0, hidden_BCTJ.shape[-1] - is_key_BTS.shape[-1]), value=True)
        hidden_BCTJ = hidden_BCTJ.masked_fill(~is_key_BTJ[:, None], 0)
        update_BHTS = key_convolution(hidden_BCTJ, self.output_WCH, second_pad)
        update_BHTS = update_BHTS + _per_head(self.output_bias_H.to(scores_BHTS.dtype))
        base = scores_BHTS + bias_BHTS if self.residual and bias_BHTS is not None else scores_BHTS
        return base + update_BHTS


def make_processor(spec: dict[str, Any], num_heads: int, has_bias: bool) -> Dape | None:
    """Return the module of {"name": .., options}, or None for "none".

    Raises:
        ValueError: rows would change when keys are appended.
    """
    options = dict(spec)
    if options.pop("name") == "none":
        return None
    _one_of("edge", options.pop("edge", "prefix"), ("prefix",))
    _one_of("leak", options.pop("leak", False), (False,))
    return Dape(num_heads, has_bias, **options)


# ---- attention


def attend(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    pos_BT: Tensor | None = None,
    *,
    bias: Bias | None = None,
    processor: Dape | None = None,
    window: int | None = None,
    cap: float | None = None,
    block_size: int | None = None,
) -> Tensor:
    """Attend query rows, the last columns of the keys: softmax(processor(Q K^T / sqrt(K), bias, causal mask)) V.

    A row may have padding on its left, or several sequences, which do not see each other. A query at position p of its
    sequence sees p + 1 keys, up to its own, and DAPE's kernels reach no further either:

        columns        0  1  2  3  4  5  6  7
        positions     -2 -1  0  1  2  0  1  2        two of padding, then two sequences
        first key      -  -  2  2  2  5  5  5

    Many rows are processed in blocks, which are recomputed in the backward pass: memory grows with block_size x S.
    With DAPE_CUDA_KERNELS=1 CUDA kernels run instead on NVIDIA GPUs, unless `why_not_cuda` has a reason; a log line
    says which.

    Args:
        q_BTHK: queries, already rotated if the model uses rotary embedding.
        k_BSGK: keys of G heads, a divisor of H.
        v_BSGK: values.
        pos_BT: positions of the queries, [B, T] or [1, T]; None if each row is one sequence without padding.
        bias: position bias, or None.
        processor: processor of the scores; None for scores + bias.
        window: a query sees keys at a distance below this, or None for all.
        cap: c in c tanh(scores / c), which replaces the scaled scores before bias and processor; None for no cap.
        block_size: rows in a block; None for as many as `BLOCK_BYTES` allows.

    Returns:
        The attended values [B, T, H, K] in the dtype of `v_BSGK`. Scores and softmax are float32 (under autocast too),
        or float64.

    Raises:
        ValueError: H is not a multiple of G, there are more queries than keys, or a number is not positive.
    """
    (batch, num_rows, heads, _), (num_keys, groups) = q_BTHK.shape, k_BSGK.shape[1:3]
    _require(heads % groups == 0, "heads of k", groups, f"must divide the {heads} heads of q")
    _require(num_rows <= num_keys, "rows of q", num_rows, f"must be at most the {num_keys} keys")
    for name, value in (("window", window), ("block_size", block_size)):
        _require(value is None or value > 0, name, value, "must be 1 or more, or None")
    if not torch.compiler.is_compiling():
        arrays, options = (q_BTHK, k_BSGK, v_BSGK), {"bias": bias, "processor": processor}
        reason = why_not_cuda(*arrays, pos_BT, **options, cap=cap, block_size=block_size)
        log_once(f"attention: {'CUDA kernels' if reason is None else f'PyTorch, {reason}'}")
        if reason is None and attend_in_cuda is not None:
            return attend_in_cuda(*arrays, **options, window=window)
    num_past = num_keys - num_rows
    column_T = torch.arange(num_past, num_keys, device=q_BTHK.device)
    size = block_size or max(1, BLOCK_BYTES // (4 * batch * heads * num_keys))
    is_whole = size >= num_rows
    has_sequences = pos_BT is not None and not is_whole and not torch.compiler.is_compiling()
    pos_BT = column_T[None] if pos_BT is None else pos_BT
    if has_sequences:  # a block of about as many rows as the longest has reads little of others
        size = min(size, max(PACKED_ROWS, int(pos_BT.max()) + 1))

    def of_rows(start: int) -> Tensor:
        stop, halo = min(start + size, num_rows), 0 if processor is None else processor.halo
        rows = slice(start, stop)
        first = 0 if window is None else max(0, num_past + start - window + 1 - halo)
        if has_sequences:
            first_of_sequences = int((column_T[rows] - pos_BT[:, rows]).min())
            first = max(first, min(first_of_sequences, num_past + start))
        keys = slice(first, num_past + stop)
        args = q_BTHK[:, rows], k_BSGK[:, keys], v_BSGK[:, keys], pos_BT[:, rows], bias, processor, window, cap
        if is_whole or not torch.is_grad_enabled():
            return _attend_rows(*args)
        return checkpoint(_attend_rows, *args, use_reentrant=False, preserve_rng_state=False)

    # The largest block first, so that the allocator reuses its memory.
    return torch.cat([of_rows(start) for start in reversed(range(0, num_rows, size))][::-1], dim=1)


def why_not_cuda(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    pos_BT: Tensor | None = None,
    *,
    bias: Bias | None = None,
    processor: Dape | None = None,
    cap: float | None = None,
    block_size: int | None = None,
) -> str | None:
    """Return why the CUDA kernels cannot compute a call of `attend`, or None if they can."""
    if why_not_in_cuda is None:
        return "cuda_dape.py is not in the same package"
    for name, value in (("pos_BT", pos_BT), ("cap", cap), ("block_size", block_size)):
        if value is not None:
            return f"{name} is given"
    if bias is not None and not bias.is_of_distance:
        return f"{type(bias).__name__} is not a function of the distance"
    if processor is not None and (type(processor) is not Dape or processor.has_bias != (bias is not None)):
        return "the processor is not Dape for this bias"
    return why_not_in_cuda(q_BTHK, k_BSGK, v_BSGK, processor)


@functools.cache
def log_once(text: str) -> None:
    """Log a line at its first call."""
    logging.getLogger(__name__).info(text)


def _attend_rows(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    pos_BT: Tensor,
    bias: Bias | None,
    processor: Dape | None,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """Return `attend` of all rows at once."""
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    (batch, num_rows, heads, head_dim), (num_keys, groups) = q_BTHK.shape, k_BSGK.shape[1:3]
    column_S = torch.arange(num_keys, device=q_BTHK.device)
    distance_TS = column_S[num_keys - num_rows :, None] - column_S
    is_key_BTS = distance_TS <= pos_BT[..., None]
    mask_BTS = is_key_BTS & (distance_TS >= 0)
    if window is not None:
        mask_BTS = mask_BTS & (distance_TS < window)
    with torch.autocast(q_BTHK.device.type, enabled=False):  # it would compute scores in 16 bits
        q_BGRTK = q_BTHK.to(dtype).movedim(2, 1).reshape(batch, groups, heads // groups, num_rows, head_dim)
        scores_BGRTS = q_BGRTK @ k_BSGK.to(dtype).permute(0, 2, 3, 1)[:, :, None]
        scores_BHTS = scores_BGRTS.reshape(batch, heads, num_rows, num_keys) * head_dim**-0.5
        if cap is not None:
            scores_BHTS = cap * torch.tanh(scores_BHTS / cap)
        bias_BHTS = None
        if bias is not None:  # one that all layers share may be on another device
            bias_BHTS = bias(distance_TS.clamp(min=0).to(dtype), pos_BT.to(dtype)).to(scores_BHTS.device)
        if processor is not None:
            scores_BHTS = processor(scores_BHTS, bias_BHTS, mask_BTS, is_key_BTS)
        elif bias_BHTS is not None:
            scores_BHTS = scores_BHTS + bias_BHTS
        scores_BHTS = scores_BHTS.masked_fill(~mask_BTS[:, None], -0.7 * torch.finfo(dtype).max)
        probs_BGRTS = scores_BHTS.softmax(-1).to(v_BSGK.dtype).reshape(scores_BGRTS.shape)
        out_BGRTK = probs_BGRTS @ v_BSGK.movedim(2, 1)[:, :, None]
    return out_BGRTK.reshape(batch, heads, num_rows, head_dim).movedim(1, 2)


# ---- model


def project(equation: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the einsum of an activation and a weight, to whose dtype and device it goes, plus a bias if given."""
    y = torch.einsum(equation, x.to(weight), weight)
    return y if bias is None else y + bias


class Norm(nn.Module):
    """LayerNorm of the last dim, or without a bias RMSNorm, in the dtype of the input."""

    def __init__(self, size: int, epsilon: float, has_bias: bool):
        super().__init__()
        self.scale, self.epsilon = nn.Parameter(torch.ones(size)), epsilon
        self.bias = nn.Parameter(torch.zeros(size)) if has_bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the normalised input."""
        scale = self.scale.to(x_BTD.dtype)
        if self.bias is None:
            return x_BTD * torch.rsqrt(x_BTD.square().mean(-1, keepdim=True) + self.epsilon) * scale
        return functional.layer_norm(x_BTD, x_BTD.shape[-1:], scale, self.bias.to(x_BTD.dtype), self.epsilon)


def make_norm(config: DapeConfig) -> Norm:
    """Return a norm of the residual stream."""
    return Norm(config.width, config.norm_epsilon, config.norm == "layer_norm")


def _normal(std: float, *shape: int) -> nn.Parameter:
    return nn.Parameter(std * torch.randn(*shape))


def _zeros(is_present: bool, *shape: int) -> nn.Parameter | None:
    return nn.Parameter(torch.zeros(*shape)) if is_present else None


class SelfAttention(nn.Module):
    """Projections around `attend`."""

    def __init__(self, config: DapeConfig, layer: int):
        super().__init__()
        D, H, G, K = config.width, config.num_heads, config.num_kv_heads, config.head_dim
        std, has_bias = math.sqrt(2 / (5 * D)), config.projection_bias
        self.query_DHK, self.key_DGK, self.value_DGK = (_normal(std, D, heads, K) for heads in (H, G, G))
        self.output_HKD = _normal(2 / (config.num_layers * math.sqrt(D)), H, K, D)
        self.query_bias_HK, self.key_bias_GK, self.value_bias_GK = (_zeros(has_bias, n, K) for n in (H, G, G))
        self.output_bias_D = _zeros(config.attention_output_bias, D)
        self.bias = None if config.bias["name"] in SHARED_BY_LAYERS else make_bias(config.bias, H, K)
        self.processor = make_processor(config.processor, H, config.bias["name"] != "nope")
        sizes = {"none": (0, 0), "head": (K, K), "projection": (H * K, G * K)}[config.qk_norm]
        self.query_norm, self.key_norm = (Norm(n, config.norm_epsilon, False) if n else None for n in sizes)
        is_alternate = layer in config.alternate_layers
        self.rotary = (is_alternate and config.alternate_rotary) or config.rotary
        self.window = config.alternate_window if is_alternate else config.window
        self.cap, self.layer = config.score_cap, layer

    def forward(
        self,
        x_BTD: Tensor,
        pos_BT: Tensor | None,
        shared_bias: Callable[[], Bias | None],
        cache: Cache | None,
        num_keys: int,
    ) -> Tensor:
        """Attend to the visible positions of `x_BTD` and of the cache, to which its keys and values are appended.

        Args:
            x_BTD: normalised residual stream.
            pos_BT: position of each token in its sequence; None if each row is one sequence without padding.
            shared_bias: returns the bias shared by all layers, or None if this layer has its own bias or no bias.
            cache: keys and values of earlier positions, or None.
            num_keys: number of columns, of the cache and of `x_BTD`, which is the last.
        """
        q_BTHK = project("BTD,DHK->BTHK", x_BTD, self.query_DHK, self.query_bias_HK)
        k_BSGK = project("BTD,DHK->BTHK", x_BTD, self.key_DGK, self.key_bias_GK)
        v_BSGK = project("BTD,DHK->BTHK", x_BTD, self.value_DGK, self.value_bias_GK)
        if self.query_norm is not None and self.key_norm is not None:  # in float32
            q_BTHK, k_BSGK = (
                norm(x.to(x_BTD.dtype).reshape(*x.shape[:2], -1, len(norm.scale))).reshape(x.shape).to(x.dtype)
                for norm, x in ((self.query_norm, q_BTHK), (self.key_norm, k_BSGK))
            )
        columns_1T = torch.arange(num_keys - x_BTD.shape[1], num_keys, device=x_BTD.device)[None]
        q_BTHK, k_BSGK = (rotate(x, columns_1T if pos_BT is None else pos_BT, self.rotary) for x in (q_BTHK, k_BSGK))
        if cache is not None:  # the cache has heads before positions
            k_BGSK, v_BGSK = cache.update(k_BSGK.movedim(2, 1), v_BSGK.movedim(2, 1), self.layer)
            # A static cache has more columns.
            k_BSGK, v_BSGK = k_BGSK[:, :, :num_keys].movedim(1, 2), v_BGSK[:, :, :num_keys].movedim(1, 2)
        bias = shared_bias() if self.bias is None else self.bias
        options = {"bias": bias, "processor": self.processor, "window": self.window, "cap": self.cap}
        out_BTHK = attend(q_BTHK, k_BSGK, v_BSGK, pos_BT, **options)
        return project("BTHK,HKD->BTD", out_BTHK, self.output_HKD, self.output_bias_D)


class MLP(nn.Module):
    """MLP: down(activation(up(x))), or down(activation(gate(x)) up(x))."""

    def __init__(self, config: DapeConfig):
        super().__init__()
        D, F, std = config.width, config.mlp_width, math.sqrt(2 / (5 * config.width))
        self.up_DF, self.up_bias_F = _normal(std, D, F), _zeros(config.mlp_bias, F)
        self.gate_DF = _normal(std, D, F) if config.gated_mlp else None
        self.gate_bias_F = _zeros(config.mlp_bias and config.gated_mlp, F)
        self.down_FD = _normal(2 / (config.num_layers * math.sqrt(D)), F, D)
        self.down_bias_D = _zeros(config.mlp_bias, D)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_BTD: Tensor) -> Tensor:
        """See the class."""
        h_BTF = project("BTD,DF->BTF", x_BTD, self.up_DF, self.up_bias_F)
        if self.gate_DF is None:
            h_BTF = self.activation(h_BTF)
        else:
            h_BTF = self.activation(project("BTD,DF->BTF", x_BTD, self.gate_DF, self.gate_bias_F)) * h_BTF
        return project("BTF,FD->BTD", h_BTF, self.down_FD, self.down_bias_D)


class Block(nn.Module):
    """Block: y = x + attention(norm(x)), then y + mlp(norm(y)), or y + mlp(norm(x)) with parallel residuals.

    Without `norm_first` norm(x + f(x)); with `branch_norm` x + norm'(f(norm(x))); with it and without `norm_first`
    x + norm(f(x)).
    """

    def __init__(self, config: DapeConfig, layer: int):
        super().__init__()
        self.attention_norm, self.attention = make_norm(config), SelfAttention(config, layer)
        self.mlp_norm, self.mlp = make_norm(config), MLP(config)
        has_both = config.norm_first and config.branch_norm
        self.attention_branch_norm, self.mlp_branch_norm = (make_norm(config) if has_both else None for _ in range(2))
        self.parallel_residual = config.parallel_residual
        self.norm_first, self.branch_norm = config.norm_first, config.branch_norm

    def forward(self, x_BTD: Tensor, *args: Any) -> Tensor:
        """Apply the layer to the residual stream; see `SelfAttention` for the arguments."""

        def add(norm: Norm, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
            update_BTD = update_BTD.to(x_BTD.dtype)
            if self.branch_norm:
                return x_BTD + norm(update_BTD)
            return x_BTD + update_BTD if self.norm_first else norm(x_BTD + update_BTD)

        attended_BTD = self.attention(self.attention_norm(x_BTD) if self.norm_first else x_BTD, *args)
        added_BTD = add(self.attention_branch_norm or self.attention_norm, x_BTD, attended_BTD)
        mlp_input_BTD = x_BTD if self.parallel_residual else added_BTD
        update_BTD = self.mlp(self.mlp_norm(mlp_input_BTD) if self.norm_first else mlp_input_BTD)
        return add(self.mlp_branch_norm or self.mlp_norm, added_BTD, update_BTD)


class DapeModel(PreTrainedModel):
    """Decoder with DAPE without its head: the residual stream after the last norm."""

    config_class = DapeConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012  # as transformers declares it
    # Patterns of tensor names: a model in 16 bits keeps norms, biases and processors in float32, as in `dape_jax`.
    _keep_in_fp32_modules_strict = ["norm", "attention.bias", "shared_bias", "processor"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = ["unembedding_DV", "output_bias_V"]  # noqa: RUF012
    embedding_VD: nn.Parameter

    def __init__(self, config: DapeConfig):
        super().__init__(config)
        quantization = getattr(config, "quantization_config", None)
        allowed = "must be None: quantizers find no nn.Linear in this model; load it with dtype=torch.bfloat16"
        _require(quantization is None, "quantization_config", type(quantization).__name__, allowed)
        D, V, std = config.width, config.vocab_size, math.sqrt(2 / (5 * config.width))
        self.embedding_VD = _normal(std, V, D)
        self.positions_PD = None if config.learned_positions is None else _normal(std, config.learned_positions, D)
        # In a list, so that it is no child, whose tensors would have other names.
        self._embeddings = [nn.Embedding(V, D, device="meta")]
        is_shared = config.bias["name"] in SHARED_BY_LAYERS
        self.shared_bias = make_bias(config.bias, config.num_heads, config.head_dim) if is_shared else None
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = make_norm(config) if config.norm_first or config.branch_norm else None
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the values of constructors; give parameters that a checkpoint lacks those of a new model."""
        params = dict(self.named_parameters())
        missing = [name for name, parameter in params.items() if not hasattr(parameter, "_is_hf_initialized")]
        if 0 < len(missing) < len(params):
            new = type(self)(self.config)  # pyright: ignore[reportArgumentType]  # a DapeConfig
            for name in missing:
                params[name].copy_(new.get_parameter(name))
                params[name]._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]  # transformers' flag

    def enable_input_require_grads(self) -> None:
        """Do nothing: gradient checkpointing here does not need a gradient of a layer's input."""

    def get_input_embeddings(self) -> nn.Module:
        """Return a module of the embedding, whose weight is the model's parameter and whose hooks `forward` calls."""
        (module,) = self._embeddings
        module._parameters["weight"] = self.embedding_VD  # loading replaces it, and `torch.func` by a plain tensor
        return module

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the embedding by a module of the same size."""
        self.embedding_VD, self._embeddings = value.weight, [value]

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """Return the embedding; raise `NotImplementedError` for another size: the vocabulary of a run is fixed."""
        size, multiple = new_num_tokens or self.config.vocab_size, pad_to_multiple_of or 1
        if -(-size // multiple) * multiple != self.config.vocab_size:
            allowed = f"must be vocab_size = {self.config.vocab_size}: this model's vocabulary cannot be resized"
            raise NotImplementedError(f"new_num_tokens = {size}, in multiples of {multiple}: {allowed}")
        return self.get_input_embeddings()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Return the residual stream [B, T, D] after the last norm, and the other outputs.

        Args:
            input_ids: tokens [B, T] after those of the cache.
            attention_mask: 0 for padding, to the left or to the right, [B, tokens of the cache + T].
            past_key_values: keys and values of the tokens so far.
            cache: name of `past_key_values` since transformers 5.24.
            position_ids: positions [B, T] or [1, T] of the tokens, counted from the first that is not padding. Where
                they begin again at 0, another packed sequence begins: sequences do not see each other, and each has
                the values that it has alone. There is no cache then; a compiled model needs `use_cache=False`.
            inputs_embeds: rows [B, T, D] of the embedding, instead of `input_ids`.
            use_cache: return the cache; the default is the config's, and False in training.
            output_hidden_states: return the stream before every layer and, after the norm, the last one.
            others: arguments of other models, which must not change the result: None or False; those of packed
                sequences beside `position_ids`, which say the same.

        Raises:
            ValueError: an argument is not supported, padding is between tokens, or a cache is not possible.
        """
        harmless = _WITHOUT_EFFECT if position_ids is None else _WITHOUT_EFFECT + _OF_PACKING
        for name, value in ({"output_attentions": self.config.output_attentions} | others).items():
            if value is not None and value is not False and name not in harmless:
                raise ValueError(f"{name}: must be None or False: this model has no such argument")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: must be given, or inputs_embeds, and not both")
        if cache is None:
            cache = past_key_values
        else:
            kind = type(past_key_values).__name__
            _require(past_key_values is None, "past_key_values", kind, "must be None beside cache")
        x_BTD = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        shape = tuple(x_BTD.shape[:-1])
        _require(len(shape) == 2 and shape[1] > 0, "shape of input_ids", shape, "must be [B, T], with a token or more")
        (batch, length), device = shape, x_BTD.device
        num_past = 0 if cache is None else int(cache.get_seq_length())
        num_keys = num_past + length
        column_1T = torch.arange(num_past, num_keys, device=device)[None]
        pos_BT, is_token_BT = count_tokens(attention_mask, column_1T, (batch, num_keys))
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training
        is_checkpointed = self.gradient_checkpointing and self.training
        use_cache = use_cache and not is_checkpointed  # a layer that is computed again would append its keys again
        is_compiling = torch.compiler.is_compiling()
        if position_ids is not None:
            found, shapes = tuple(position_ids.shape), ((batch, length), (1, length))
            _require(found in shapes, "shape of position_ids", found, f"must be {batch, length}")
            given_BT = torch.where(is_token_BT, position_ids, pos_BT)
            is_right_BT = given_BT == pos_BT
            is_packed = not is_compiling and not bool(is_right_BT.all())
            if is_packed or (is_compiling and not use_cache and cache is None):  # in a graph perhaps
                allowed = "must be None with packed sequences; give an empty prompt a token"
                _require(cache is None, "cache", type(cache).__name__, allowed)
                next_BT = functional.pad(given_BT[:, :-1] + 1, (1, 0))
                is_right_BT = (given_BT == 0) | (given_BT == next_BT) | ~is_token_BT
                pos_BT, use_cache = given_BT, False
            allowed = "must count the tokens that are not padding from 0, and again from 0 for each packed sequence"
            _require_all(is_right_BT, "position_ids", f"{allowed}, or be None")
        is_plain = pos_BT is column_1T or (not is_compiling and bool((pos_BT == column_1T).all()))
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)

        x_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
        if self.config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.width)
        if self.positions_PD is not None:
            limit = len(self.positions_PD)
            if num_keys > limit:
                _require_all((pos_BT < limit) | ~is_token_BT, "length", f"must be at most learned_positions = {limit}")
            x_BTD = x_BTD + self.positions_PD[pos_BT.clamp(0, limit - 1)].to(x_BTD.dtype)
        hidden_states = []
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        for block in self.layers:
            if output_hidden_states:
                hidden_states.append(x_BTD)
            # A function: accelerate moves arguments that are modules.
            args = x_BTD, None if is_plain else pos_BT, lambda: self.shared_bias, cache, num_keys
            x_BTD = checkpoint(block, *args, use_reentrant=False) if is_checkpointed else block(*args)
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD)
        outputs: dict[str, Any] = {"last_hidden_state": x_BTD, CACHE: cache if use_cache else None}
        outputs["hidden_states"] = (*hidden_states, x_BTD) if output_hidden_states else None
        return BaseModelOutputWithPast(**outputs)


class DapeForCausalLM(DapeModel, GenerationMixin):
    """Decoder with DAPE: the model of `dape_jax.model.transformer` for language modelling."""

    _keys_to_ignore_on_load_unexpected: list[str] = []  # noqa: RUF012
    unembedding_DV: nn.Parameter | None
    output_bias_V: nn.Parameter | None

    def __init__(self, config: DapeConfig):
        super().__init__(config)
        D, V, std = config.width, config.vocab_size, math.sqrt(2 / (5 * config.width))
        self.unembedding_DV = None if config.tied_embeddings else _normal(std, D, V)
        self.output_bias_V = _zeros(config.output_bias, V)
        self.post_init()

    @property
    def base_model(self) -> Any:
        """Return the function that applies the model without its head, which trainers with their own loss call."""
        return super().forward

    def get_output_embeddings(self) -> nn.Module:
        """Return a module of the head, with its weight [V, D]."""
        return Head(self)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
        """Return the mask as it is, also for a static cache."""
        return attention_mask

    def _valid_auto_compile_criteria(self, *args: Any, **options: Any) -> bool:
        """Return False: with a static cache `generate` would compile the model again for each length."""
        return False

    @can_return_tuple
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # labels are before use_cache
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, V] in float32, and the mean loss of next tokens if there are labels.

        Other arguments are those of `DapeModel`. `labels` [B, T] are the tokens to predict, not shifted: this function
        shifts them; -100 is not scored. `logits_to_keep` is the number of last tokens whose logits are computed, 0 for
        all, or their places. `num_items_in_batch` divides the sum of losses, for gradient accumulation; None: the mean.
        """
        args = past_key_values, cache, position_ids, inputs_embeds, use_cache, output_hidden_states
        outputs: Any = super().forward(input_ids, attention_mask, *args, return_dict=True, **others)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.get_output_embeddings()(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            size, items = self.config.vocab_size, num_items_in_batch
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=size, num_items_in_batch=items)
        shared: dict[str, Any] = {"hidden_states": outputs.hidden_states, CACHE: getattr(outputs, CACHE)}
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, **shared)


# `Trainer` shifts the labels of these classes before it smooths them; those of others it compares with the same tokens.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["dape"] = DapeForCausalLM.__name__


class Head(nn.Module):
    """Head of a model as a module, with no parameters of its own."""

    def __init__(self, model: DapeForCausalLM):
        super().__init__()
        table_VD = model.embedding_VD if model.unembedding_DV is None else model.unembedding_DV.T
        self._tables = table_VD, model.output_bias_V  # in a tuple, so that the model's parameters are not its own
        self.cap = model.config.logit_cap

    @property
    def weight(self) -> Tensor:
        """Return the table [V, D]."""
        return self._tables[0]

    @property
    def bias(self) -> Tensor | None:
        """Return the output bias [V], or None."""
        return self._tables[1]

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the logits, in the dtype of the input."""
        logits_BTV = project("BTD,VD->BTV", x_BTD, self.weight).to(x_BTD.dtype)
        if self.cap is not None:
            logits_BTV = self.cap * torch.tanh(logits_BTV / self.cap)
        return logits_BTV if self.bias is None else logits_BTV + self.bias.to(logits_BTV.dtype)


def count_tokens(attention_mask: Tensor | None, column_1T: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the positions of the tokens [B, T], counted from the first that is not padding, and whether they are ones.

        mask        0 0 1 1 1 1
        positions  -2 -1 0 1 2 3

    Args:
        attention_mask: 0 for padding, or None.
        column_1T: columns of the tokens, the last of the mask.
        shape: that the mask must have.

    Raises:
        ValueError: the shape is wrong, or padding is between tokens, for example after padding on the right.
    """
    if attention_mask is None:
        return column_1T, torch.ones_like(column_1T, dtype=torch.bool)
    found = tuple(attention_mask.shape)
    _require(found == shape, "shape of attention_mask", found, f"must be {shape}")
    is_token_BS = attention_mask.bool()
    num_ends_B = (is_token_BS[:, :-1] & ~is_token_BS[:, 1:]).sum(-1) + is_token_BS[:, -1]
    _require_all(num_ends_B <= 1, "attention_mask", "must have no zeros between ones; pad to the left to generate")
    num_left_B1 = (is_token_BS.cumsum(-1) == 0).sum(-1, keepdim=True)
    return column_1T - num_left_B1, is_token_BS[:, -column_1T.shape[1] :]
