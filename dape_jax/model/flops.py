"""Count FLOPs by formula: needed by a model, and executed by the program of a training step.

In: a model's config. Out: `Flops`. Next: `training/metrics.py`, `planning/plan.py`.

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

import dataclasses

import numpy as np

from dape_jax.model.attention import Blockwise, Fused, Implementation
from dape_jax.model.biases import NopeConfig
from dape_jax.model.scores import Mask, causal_runs
from dape_jax.model.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of each part; see the module's docstring."""

    projections: int
    mlp: int
    unembedding: int
    attention: int
    processor: int

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(dataclasses.astuple(self))


def num_pairs(length: int, window: int | None) -> int:
    """Return the number of pairs of a query and a visible key in one causal sequence."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def forward_flops(config: TransformerConfig, length: int, batch_size: int) -> Flops:
    """Return the FLOPs that the model needs for the forward pass of a batch of sequences of `length` tokens."""
    pairs = sum(kind.num_layers * num_pairs(length, kind.mask.window) for kind in config.layer_kinds)
    return _flops(config, length * batch_size, pairs, batch_size)


def model_flops(config: TransformerConfig, length: int, batch_size: int) -> Flops:
    """Return the FLOPs that the model needs for a training step, without recomputation: the numerator of MFU."""
    return Flops(*(3 * part for part in dataclasses.astuple(forward_flops(config, length, batch_size))))


def model_flops_per_token(config: TransformerConfig, length: int, batch_size: int) -> float:
    """Return `model_flops` per token of a training step."""
    return model_flops(config, length, batch_size).total / (length * batch_size)


def _flops(
    config: TransformerConfig,
    tokens: int,
    pairs: int,
    batch_size: int,
    num_bias_batches: int = 1,
    *,
    inner: int = 1,
    down: int = 1,
    unembedding: int = 1,
    scores: int = 1,
    values: int = 1,
) -> Flops:
    """Return the FLOPs of all parts.

    `tokens` is the number of tokens of the batch, and `pairs` the number of pairs of a query and a key in one sequence,
    over all layers. Arrays without a batch dim are computed `num_bias_batches` times. The last arguments are the costs
    of parts in forward passes; a backward pass costs two. `inner` is that of a layer's matmuls with weights, except the
    last one, `down`.
    """
    D, H, G, K, L = config.width, config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers
    F, num_ups = config.mlp_width, 1 + config.gated_mlp
    pair = config.processor.pair_flops(H, has_bias=not isinstance(config.bias, NopeConfig))
    if config.bias.reads_content:
        num_bias_batches = batch_size
    return Flops(
        projections=inner * L * tokens * 2 * D * (2 * H * K + 2 * G * K),
        mlp=(inner * num_ups + down) * L * tokens * 2 * D * F,
        unembedding=unembedding * tokens * 2 * D * config.num_outputs,
        attention=(scores + values) * pairs * batch_size * 2 * H * K,
        processor=scores * pairs * (pair.of_scores * batch_size + pair.of_bias * num_bias_batches),
    )


def executed_flops(
    config: TransformerConfig,
    length: int,
    batch_size: int,
    *,
    row_parts: int = 1,
    batch_parts: int = 1,
    accumulation_steps: int = 1,
    chunked_unembedding: bool = False,
    alternate_attention: Implementation | None = None,
) -> Flops:
    """Return the FLOPs of a training step's program on all devices, with recomputation and computed masked pairs.

    The backward pass recomputes a layer's forward pass without its last matmul (remat "full"), or all except its
    matmuls with weights (remat "dots"); the scores of each block once more (`Blockwise` and `Fused`); chunked logits.

    Args:
        config: config of the model; its `attention` must not be `Auto`: see `transformer.attention_of`.
        length: T, in tokens.
        batch_size: sequences in the batch.
        row_parts: number of devices over which the query rows of a sequence are split: mesh.context x mesh.tensor.
        batch_parts: number of devices over which the batch is split: mesh.data x mesh.fsdp. Each of them computes all
            arrays without a batch dim.
        accumulation_steps: parts of a step; each computes the arrays without a batch dim again.
        chunked_unembedding: whether the logits are computed in chunks.
        alternate_attention: implementation of attention in `config.alternate_layers`; None for that of other layers.
    """
    full, recomputed = config.remat == "full", config.remat != "none"
    in_block = isinstance(config.attention, Blockwise | Fused)
    alternate = config.attention if alternate_attention is None else alternate_attention
    pairs = row_parts * sum(
        kind.num_layers * pairs_computed(attention, length, kind.mask.window, row_parts)
        for kind, attention in zip(config.layer_kinds, (config.attention, alternate), strict=False)
    )
    return _flops(
        config,
        length * batch_size,
        pairs,
        batch_size,
        batch_parts * accumulation_steps,
        inner=3 + full,
        down=3,
        unembedding=3 + chunked_unembedding,
        scores=3 + recomputed + in_block,
        values=3 + recomputed,
    )


def pairs_computed(attention: Implementation, length: int, window: int | None, row_stride: int = 1) -> int:
    """Return the number of pairs of a query and a key that a device with every `row_stride`-th row computes.

    `Dense` computes all pairs; `Blockwise`, for each run of blocks, those up to the run's last row, or in the window;
    `Fused`, for each block, all tiles visible to a row of the block, without columns computed by two tiles.
    """
    num_rows = length // row_stride
    if isinstance(attention, Fused):
        from dape_jax.kernels.tpu import BLOCKS, LANES, PHASES  # with Pallas, which the training loop need not import

        tile = min((LANES * phases for phases in PHASES if length <= LANES * phases), default=LANES * max(PHASES))
        block = min((rows for rows in BLOCKS if num_rows <= rows), default=max(BLOCKS))
        begins = row_stride * np.arange(0, num_rows, block)
        first = 0 if window is None else np.maximum(begins - window + 1, 0) // tile
        last = np.minimum(begins + row_stride * block, length) - 1
        return int((last // tile + 1 - first).sum()) * tile * block
    if not isinstance(attention, Blockwise):
        return num_rows * length
    block = min(attention.block_size, num_rows)
    runs = causal_runs(num_rows, length, block, attention.num_buckets, Mask(window=window, row_stride=row_stride))
    return sum((stop - start) * block * num_read for start, stop, num_read in runs)
