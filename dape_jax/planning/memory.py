"""Estimate the memory of a training step by formula, in seconds, for a chip whose compiler is not at hand.

In: a run, a mesh and the implementations of attention. Out: bytes on each chip by purpose. Next: `plan.py`.

With N tokens and B sequences on a chip in one part of the accumulation, V, H, G and F its part of vocabulary, heads and
MLP, a bytes of the compute dtype and 4 bytes of float32, a layer keeps for the backward pass

    its input                       4 N D                                        with every remat policy
    results of matmuls              a N (2 D + H K + 2 G K + F)                  with "dots" or "none"
    norms, activation, attention    N (12 D + a (2 D + H K + A F))               with "none"
    dense scores                    4 B T^2 (3 H + 4 C)                          with "none"

where A is 1 for GELU, whose slope alone is kept, else 4. The step also holds what one layer recomputes or
differentiates, of which the compiler fuses a part, a block of scores with its gradients, 4 B rows T (3 H + 4 C), the
logits of a chunk in float32 and their gradient in the compute dtype, gathered weights and the gradients of all
parameters. The compiler's own buffers and fragmentation are not counted. `tests/test_planning.py` compares the sum with
programs that were compiled.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from dape_jax.config import RunConfig
from dape_jax.model.attention import Blockwise, Dense, Implementation
from dape_jax.model.processors import DapeConfig
from dape_jax.sharding import BATCH_AXES


def estimate_memory(
    run: RunConfig, mesh: AbstractMesh, state: dict[str, int], attentions: Sequence[Implementation]
) -> dict[str, int]:
    """Return the bytes on each chip, by purpose, in addition to `state`, those of parameters and moments.

    `attentions` are the implementations of attention of each of `model.layer_kinds`, none of them `Auto`.
    """
    model, train, sizes = run.model, run.train, dict(mesh.shape)
    tensor, rows_parts = sizes["tensor"], sizes["context"] * sizes["tensor"]
    B = train.batch_size // (math.prod(sizes[axis] for axis in BATCH_AXES) * train.accumulation_steps)
    T, D, a = train.train_length, model.width, jnp.dtype(model.compute_dtype).itemsize
    N, K = B * T // sizes["context"], model.head_dim
    H, G, F = (size // tensor for size in (model.num_heads, model.num_kv_heads, model.mlp_width))
    V = model.padded(model.num_outputs) // tensor

    channels = model.processor.channels if isinstance(model.processor, DapeConfig) else 0
    row = 4 * B * T * (3 * model.num_heads + 4 * channels)  # scores, features and gradients of a row of every sequence
    rows = {"kept": 0, "at once": 0}
    for kind, attention in zip(model.layer_kinds, attentions, strict=True):
        local = T // rows_parts
        if isinstance(attention, Dense):
            rows["kept"] += kind.num_layers * local
            rows["at once"] = max(rows["at once"], local)
        elif isinstance(attention, Blockwise):
            rows["at once"] = max(rows["at once"], min(attention.block_size, local))

    dots = a * N * (2 * D + (H + 2 * G) * K + (1 + model.gated_mlp) * F)
    A = 1 if model.activation == "gelu" else 4
    others, fused = N * (12 * D + a * (2 * D + H * K + A * F)), N * (8 * D + (A - 1) * a * F)
    kept = {"full": 0, "dots": dots, "none": dots + others}[model.remat] + 4 * N * D
    tokens, is_chunked = min(N, train.logits_chunk_tokens), train.logits_chunk_tokens < N
    return {
        "gradients": state["parameters"] * (1 + (train.accumulation_steps > 1)),
        "activations": model.num_layers * kept + (row * rows["kept"] if model.remat == "none" else 0),
        "one layer": dots + others - fused + row * rows["at once"],
        "logits": (a + 4) * tokens * V,
        "gathered weights": (a + 4 * is_chunked) * V * D + (a + 4) * D * F,  # the table, a matrix and their gradients
    }
