"""Count the FLOPs that a model needs, by formula.

In: a model's config, a length and a batch size. Out: a number. Next: `training/metrics.py`, `planning/plan.py`.

A multiply-add counts as 2 FLOPs, and the backward pass as twice the forward pass. Counted:

    projections     D -> H K, twice D -> G K, and H K -> D, for every token
    mlp             D -> F -> D for every token, with D -> F once more if gated
    unembedding     D -> V for every token
    attention       Q K^T and P V, 4 H K for every pair of a query and a key
    processor       `ProcessorConfig.pair_flops` for every pair: the score convolutions of DAPE

Pairs are counted causally: T (T + 1) / 2 in a sequence of T tokens, or those inside the window. If the bias does not
depend on content, the part of the processor that reads it is counted once per batch, because it is computed once.

Not counted: embedding lookups, norms, softmax, activations, the optimizer, and the biases themselves.
"""

from dape_jax.model.biases import NopeConfig
from dape_jax.model.transformer import TransformerConfig


def num_pairs(length: int, window: int | None) -> int:
    """Return the number of pairs of a query and a visible key in one causal sequence."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def forward_flops(config: TransformerConfig, length: int, batch_size: int) -> int:
    """Return the FLOPs that the model needs for the forward pass of a batch of sequences of `length` tokens."""
    D, H, G, K, F = config.width, config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_width
    tokens, num_biases = length * batch_size, batch_size if config.bias.reads_content else 1
    pairs = sum(kind.num_layers * num_pairs(length, kind.mask.window) for kind in config.layer_kinds)
    pair = config.processor.pair_flops(H, has_bias=not isinstance(config.bias, NopeConfig))
    projections = config.num_layers * tokens * 2 * D * (2 * H * K + 2 * G * K)
    mlp = config.num_layers * tokens * (2 + config.gated_mlp) * 2 * D * F
    unembedding = tokens * 2 * D * config.num_outputs
    attention = pairs * batch_size * 4 * H * K
    processor = pairs * (pair.of_scores * batch_size + pair.of_bias * num_biases)
    return projections + mlp + unembedding + attention + processor


def model_flops(config: TransformerConfig, length: int, batch_size: int) -> int:
    """Return the FLOPs that the model needs for a training step, without recomputation: the numerator of MFU."""
    return 3 * forward_flops(config, length, batch_size)


def model_flops_per_token(config: TransformerConfig, length: int, batch_size: int) -> float:
    """Return `model_flops` per token of a training step."""
    return model_flops(config, length, batch_size) / (length * batch_size)
