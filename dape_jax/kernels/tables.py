"""What a kernel reads of bias and processor: two convolutions, and functions of the distance.

In: a bias that is a function of the distance, and a `Dape`. Out: an `Operator`. XLA makes it and differentiates it: the
kernels give gradients of what is in it, and autodiff takes those on to the parameters.

The first convolution is linear, so its two halves can be computed apart. The half that reads the bias has no batch dim,
and where the bias is b(d), d = row - column, it is a function of the distance too, but for the first columns:

    Conv1_B(tril(B))[c, i, j] + hidden_bias[c] = hidden[c, i - j] - left[j, c, i]

        hidden[c, d] = hidden_bias[c] + sum over w, h of bias_WHC[w, h, c] b_h(d + pad - w)    b(d) = 0 where masked

with `pad` zeros to the left of the first key. Hidden column j reads columns j + w - pad; where that is negative there
is a zero, and `hidden` has b all the same: that is `left`, of columns 0 .. pad - 1 alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dape_jax.model.biases import DistanceBias
from dape_jax.model.processors import Dape, DapeConfig
from dape_jax.model.scores import Mask

HIGHEST = jax.lax.Precision.HIGHEST
SLOPE = 0.01  # of the leaky ReLU


class Operator(NamedTuple):
    """DAPE over a bias of the distance: A -> A + added + Conv2(LeakyReLU(Conv1_A(tril(A)) + hidden - left)).

    All are float32. N distances stand in a table: -(W - 1 - pad), from which on a hidden column is read, .. S - 1.

    Args:
        scores_WHC: the half of Conv1 that reads scores.
        output_WCH: Conv2.
        hidden_CN: see the head of this file.
        added_HN: the bias, if it is added outside the convolution, and the bias of Conv2.
        left_PCT: see the head of this file; P = pad.
    """

    scores_WHC: Float[Array, "W H C"]
    output_WCH: Float[Array, "W C H"]
    hidden_CN: Float[Array, "C N"]
    added_HN: Float[Array, "H N"]
    left_PCT: Float[Array, "P C T"]

    @property
    def width(self) -> int:
        """W."""
        return self.scores_WHC.shape[0]

    @property
    def pad(self) -> int:
        """P; see `left_pad`."""
        return self.left_PCT.shape[0]

    @property
    def ahead(self) -> int:
        """W - 1 - P: how far to its right a column reads, and the distance of column 0 of a table, but for the sign."""
        return self.width - 1 - self.pad


def vary_alike(*trees: Any) -> Any:
    """All arrays, said to vary over the mesh axes over which any does: a kernel in a `shard_map` wants them alike."""
    leaves, structure = jax.tree.flatten(trees)
    varies = [jax.typeof(x).manual_axis_type.varying for x in leaves]
    every = frozenset().union(*varies)
    alike = [jax.lax.pcast(x, tuple(every - own), to="varying") for x, own in zip(leaves, varies, strict=True)]
    return structure.unflatten(alike)


def left_pad(config: DapeConfig) -> int:
    """Columns of zeros to the left of either convolution: as many as a column reads to its left."""
    return config.kernel_width - 1 if config.alignment == "causal" else config.kernel_width // 2


def make_operator(
    bias: DistanceBias | None,
    processor: Dape,
    *,
    num_heads: int,
    num_rows: int,
    num_keys: int,
    first: Int[Array, ""],
    mask: Mask,
    valid: Bool[Array, ""],
) -> Operator:
    """Tabulate bias and processor.

    Args:
        bias: a function of the distance; None for none.
        processor: DAPE.
        num_heads: H.
        num_rows: T.
        num_keys: S.
        first: column of the first row.
        mask: window, and step between rows.
        valid: if False, every value that the kernel returns is NaN.
    """
    config = processor.config
    width, channels = config.kernel_width, config.channels
    pad = left_pad(config)
    ahead = width - 1 - pad
    hidden_C = processor.hidden_bias_C[...].astype(jnp.float32)
    # It moves a whole row and cancels in the softmax: its gradient is 0, here exactly.
    output_bias_H = jax.lax.stop_gradient(processor.output_bias_H[...]).astype(jnp.float32)
    output_bias_H = jnp.where(valid, output_bias_H, jnp.nan)
    hidden_CN = jnp.broadcast_to(hidden_C[:, None], (channels, ahead + num_keys))
    added_HN = jnp.broadcast_to(output_bias_H[:, None], (num_heads, ahead + num_keys))
    left_PCT = jnp.zeros((pad, channels, num_rows), jnp.float32)

    if bias is not None:
        # Of distances -2 ahead .. S + pad - 1: all that is read for a column of the table.
        distance_N = jnp.arange(-2 * ahead, num_keys + pad)
        seen_N = (distance_N >= 0) if mask.window is None else (distance_N >= 0) & (distance_N < mask.window)
        bias_HN = bias.of_distance(jnp.maximum(distance_N, 0)).astype(jnp.float32)
        bias_HN = jnp.where(seen_N, bias_HN, 0)
        if config.residual:
            added_HN += bias_HN[:, ahead : ahead + hidden_CN.shape[1]]
        if processor.bias_WHC is not None:
            kernel_WHC = processor.bias_WHC[...].astype(jnp.float32)

            def read(w: int, bias_HN: Float[Array, "H N"]) -> Float[Array, "C N"]:
                return jnp.einsum("HC,HN->CN", kernel_WHC[w], bias_HN, precision=HIGHEST)

            for w in range(width):
                hidden_CN += read(w, bias_HN[:, width - 1 - w :][:, : hidden_CN.shape[1]])
            column_T = first + mask.row_stride * jnp.arange(num_rows)
            for column in range(pad):
                # Taps w < pad - column read column + w - pad < 0, at distance i - column - w + pad.
                too_much = [read(w, bias_HN[:, column_T - column - w + pad + 2 * ahead]) for w in range(pad - column)]
                left_PCT = left_PCT.at[column].set(sum(too_much))

    scores = processor.scores_WHC
    return Operator(
        scores_WHC=jnp.zeros((width, num_heads, channels)) if scores is None else scores[...].astype(jnp.float32),
        output_WCH=processor.output_WCH[...].astype(jnp.float32),
        hidden_CN=hidden_CN,
        added_HN=added_HN,
        left_PCT=left_PCT,
    )
