"""FLOPs by formula, and the chips they run on.

In: a model's config. Out: FLOPs of a training step, those that the model needs and those that its program executes;
model FLOPs utilisation (MFU). Next: `training/loop.py`, `planning.py`.

What is counted, 2 FLOPs for a multiply-add, the backward pass as twice the forward pass:

    projections     D -> H K, twice D -> G K, and H K -> D, for every token
    mlp             D -> 4 D -> D for every token
    unembedding     D -> V for every token
    attention       Q K^T and P V, 4 D for every pair of a query and a key
    processor       what its config says of a pair (`ProcessorConfig.pair_flops`): the score convolutions of DAPE

Pairs are counted causally: T (T + 1) / 2 of them in a text of T tokens, or those inside the window. What a processor
does with a bias that does not depend on content counts once for the batch, as it is computed.

Not counted: embedding lookups, norms, softmax, activations, the optimizer, and whatever a bias itself costs.
"""

import dataclasses

from dape_jax.kernels.tpu import BLOCKS
from dape_jax.model.attention import Blockwise, Fused, Implementation
from dape_jax.model.biases import NopeConfig
from dape_jax.model.contextual import CONTEXTUAL
from dape_jax.model.scores import Mask, causal_runs
from dape_jax.model.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs by what they are spent on; the parts are described at the head of this file."""

    projections: int
    mlp: int
    unembedding: int
    attention: int
    processor: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


def num_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, in one text, causally."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def forward_flops(config: TransformerConfig, length: int, batch_size: int) -> Flops:
    """FLOPs that the model needs to score a batch.

    Args:
        config: the model.
        length: T, in tokens.
        batch_size: sequences.
    """
    return _flops(config, length * batch_size, num_pairs(length, config.window), batch_size, 1, Passes())


def model_flops(config: TransformerConfig, length: int, batch_size: int) -> Flops:
    """FLOPs that the model needs for a training step, recomputation not counted: what MFU is measured by."""
    passes = Passes(*[3] * len(dataclasses.fields(Passes)))
    return _flops(config, length * batch_size, num_pairs(length, config.window), batch_size, 1, passes)


def model_flops_per_token(config: TransformerConfig, length: int, batch_size: int) -> float:
    """`model_flops` of a training step for each of its tokens."""
    return model_flops(config, length, batch_size).total / (length * batch_size)


@dataclasses.dataclass(frozen=True)
class Passes:
    """How often each part of a step is computed, in forward passes; a backward pass is worth two."""

    projections: int = 1
    up: int = 1
    down: int = 1
    unembedding: int = 1
    scores: int = 1
    values: int = 1
    processor: int = 1


def _flops(
    config: TransformerConfig, tokens: int, pairs: int, batch_size: int, num_bias_batches: int, passes: Passes
) -> Flops:
    """Add up the parts.

    Args:
        config: the model.
        tokens: in the batch.
        pairs: of a query and a key, in one text.
        batch_size: texts.
        num_bias_batches: how often what has no batch dim is computed.
        passes: of each part.
    """
    D, H, G, K, L = config.width, config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers
    pair = config.processor.pair_flops(H, has_bias=not isinstance(config.bias, NopeConfig))
    if isinstance(config.bias, tuple(CONTEXTUAL.values())):
        num_bias_batches = batch_size
    return Flops(
        projections=passes.projections * L * tokens * 2 * D * (2 * H * K + 2 * G * K),
        mlp=(passes.up + passes.down) * L * tokens * 2 * D * 4 * D,
        unembedding=passes.unembedding * tokens * 2 * D * config.num_outputs,
        attention=(passes.scores + passes.values) * L * pairs * batch_size * 2 * H * K,
        processor=passes.processor * L * pairs * (pair.of_scores * batch_size + pair.of_bias * num_bias_batches),
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
) -> Flops:
    """FLOPs of a training step's program over all devices: with recomputation, and masked pairs that are computed too.

    Recomputed in the backward pass are: a layer's forward pass but for its last matmul (remat "full"), or what of it is
    no matmul with a weight (remat "dots"); the scores of a block (`Blockwise` and `Fused`, besides); the logits, where
    they are computed in parts.

    Args:
        config: the model; its `attention` one that does not choose: see `transformer.attention_of`.
        length: T, in tokens.
        batch_size: sequences.
        row_parts: devices that a text's query rows are split over: mesh.context x mesh.tensor.
        batch_parts: devices that the batch is split over: mesh.data x mesh.fsdp. Each computes for itself what has no
            batch dim.
        accumulation_steps: parts of a step, each of which computes it again.
        chunked_unembedding: whether the logits are computed in parts.
    """
    full, again = config.remat == "full", config.remat != "none"
    in_block = isinstance(config.attention, Blockwise | Fused)
    passes = Passes(
        projections=3 + full,
        up=3 + full,
        down=3,
        unembedding=3 + chunked_unembedding,
        scores=3 + again + in_block,
        values=3 + again,
        processor=3 + again + in_block,
    )
    pairs = row_parts * pairs_computed(config.attention, length, config.window, row_parts)
    return _flops(config, length * batch_size, pairs, batch_size, batch_parts * accumulation_steps, passes)


def pairs_computed(attention: Implementation, length: int, window: int | None, row_stride: int = 1) -> int:
    """Pairs of a query and a key that a driver computes on a device that has every `row_stride`-th row of a text.

    `Dense` computes all; `Blockwise` in each of its runs of blocks those up to the run's last row, or up to the window;
    `Fused` in each of its blocks those up to the block's last row, or up to the window. (Not counted are those that its
    neighbouring windows of columns share.)
    """
    num_rows = length // row_stride
    if isinstance(attention, Fused):
        block = min(BLOCKS[0], num_rows)
        attention = Blockwise(block, num_buckets=max(2, -(-num_rows // block)))
    if not isinstance(attention, Blockwise):
        return num_rows * length
    block = min(attention.block_size, num_rows)
    runs = causal_runs(num_rows, length, block, attention.num_buckets, Mask(window=window, row_stride=row_stride))
    return sum((run.stop - run.start) * block * run.num_keys for run in runs)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a vendor says of a chip.

    Args:
        name: as a topology begins: v5e:4x4, h200:8.
        device_kinds: what `jax.Device.device_kind` says of it.
        peak_flops: bfloat16 matmuls with float32 accumulation, without sparsity, a second.
        hbm_bytes: main memory.
        hbm_bytes_per_second: its bandwidth.
        link_bytes_per_second: that the chip can receive from its neighbours over all of its links at once: half of what
            is called bidirectional.
        source: where the figures are from.
    """

    name: str
    device_kinds: tuple[str, ...]
    peak_flops: float
    hbm_bytes: int
    hbm_bytes_per_second: float
    link_bytes_per_second: float
    source: str


GIB = 2**30
TPU_PAGES = "Google Cloud documentation, system architecture of TPU"
GPU_SHEET = "NVIDIA data sheet,"

CHIPS = (
    Chip("v4", ("TPU v4",), 275e12, 32 * GIB, 1228e9, 300e9, f"{TPU_PAGES} v4"),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * GIB, 819e9, 200e9, f"{TPU_PAGES} v5e"),
    Chip("v5p", ("TPU v5", "TPU v5p"), 459e12, 95 * GIB, 2765e9, 600e9, f"{TPU_PAGES} v5p"),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * GIB, 1640e9, 400e9, f"{TPU_PAGES} v6e"),
    Chip("h100", ("NVIDIA H100 80GB HBM3",), 989.4e12, 80 * 10**9, 3350e9, 450e9, f"{GPU_SHEET} H100 SXM"),
    Chip("h200", ("NVIDIA H200",), 989.4e12, 141 * 10**9, 4800e9, 450e9, f"{GPU_SHEET} H200 SXM"),
)


def chip_of(device_kind: str) -> Chip | None:
    """The chip that a device is; None for a CPU, or one that is not in the table."""
    found = [chip for chip in CHIPS if device_kind in chip.device_kinds]
    return found[0] if found else None


def mfu(flops_per_second: float, device_kind: str, num_devices: int) -> float | None:
    """Model FLOPs utilisation: the share of the devices' peak that the model's own FLOPs reach; None without a peak."""
    chip = chip_of(device_kind)
    return None if chip is None else flops_per_second / (chip.peak_flops * num_devices)
