"""Tables for the kernels: bias and processor as two convolutions and tables over the distance.

In: a `DistanceBias` or None, and a `Dape` or `Plain`. Out: an `Operator`. XLA computes and differentiates it: the
kernels return gradients of its arrays, and autodiff propagates those to the parameters.

The nonlinearity is centred on the bias's features h_B, as in `dape`: the part that depends only on the bias is computed
here, in float32, and the kernels convolve the difference, whose size is that of the scores:

    Conv2(LeakyReLU(h_A + h_B)) = Conv2(LeakyReLU(h_B)) + Conv2(LeakyReLU(h_A + h_B) - LeakyReLU(h_B))

h_B has no batch dim. If the bias is b(d), d = row - column, then h_B and Conv2(LeakyReLU(h_B)) are also functions of d,
except in the first columns:

    h_B[c, i, j] = hidden[c, i - j] - left[j, c, i]

        hidden[c, d] = hidden_bias[c] + sum over w, h of bias_WHC[w, h, c] b_h(d + pad - w)    b(d) = 0 where masked

with `pad` zeros to the left of the first key. Hidden column j reads columns j + w - pad. Negative columns are zero, but
`hidden` counts b there; `left` corrects this, for columns 0 .. pad - 1 only. Conv2 reads another `pad` columns to its
left: negative hidden columns are also zero, so the results of columns 0 .. 2 pad - 1 have their own correction.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dape_jax.model.biases import DistanceBias
from dape_jax.model.processors import SLOPE, Dape, DapeConfig, Plain
from dape_jax.model.scores import Mask

HIGHEST = jax.lax.Precision.HIGHEST


class Operator(NamedTuple):
    """DAPE over a bias of the distance, with `leaky_relu_change` as the nonlinearity.

        A -> A + added - left_added + Conv2(change(Conv1_A(tril(A)), knee - left_knee))

    C is 0 for a `Plain` processor. All arrays are float32. A table has an entry for each of the N distances
    -(W - 1 - pad) .. S - 1; hidden columns at smaller distances are not read.

    Args:
        scores_WHC: the half of Conv1 that reads scores.
        output_WCH: Conv2.
        knee_CN: (1 - SLOPE) hidden; see the module's docstring. The kernels define its gradient as that of the complete
            Conv2(LeakyReLU(h_A + h_B)): the gradient of the scores' features times d h_B / d knee.
        added_HN: the bias, if it is added outside the convolution, plus Conv2(LeakyReLU(h_B)) with the bias of Conv2.
        left_knee_PCT: (1 - SLOPE) left, in the first P = pad columns.
        left_added_QHT: part of `added` from columns that do not exist, in the first Q = 2 pad columns.
    """

    scores_WHC: Float[Array, "W H C"]
    output_WCH: Float[Array, "W C H"]
    knee_CN: Float[Array, "C N"]
    added_HN: Float[Array, "H N"]
    left_knee_PCT: Float[Array, "P C T"]
    left_added_QHT: Float[Array, "Q H T"]

    @property
    def width(self) -> int:
        """Return W."""
        return self.scores_WHC.shape[0]

    @property
    def pad(self) -> int:
        """Return P, the number of columns that a convolution reads to its left: zeros at the edge."""
        return self.left_knee_PCT.shape[0]

    @property
    def ahead(self) -> int:
        """Return W - 1 - P, the number of columns read to the right. Entry 0 of a table has the distance -ahead."""
        return self.width - 1 - self.pad


def convolution_sizes(config: DapeConfig | None) -> tuple[int, int, int]:
    """Return W, P (see `Operator.pad`) and C: 1, 0 and 0 without a processor."""
    return (1, 0, 0) if config is None else (config.kernel_width, config.paddings[0][0], config.channels)


def make_operator(
    bias: DistanceBias | None,
    processor: Dape | Plain,
    *,
    num_heads: int,
    num_rows: int,
    num_keys: int,
    first: Int[Array, ""],
    mask: Mask,
) -> Operator:
    """Tabulate bias and processor.

    Args:
        bias: a bias that depends only on the distance, or None.
        processor: DAPE, or `Plain` for no convolution.
        num_heads: H.
        num_rows: T.
        num_keys: S.
        first: column of the first row.
        mask: window, and step between rows.
    """
    if isinstance(processor, Plain):
        added_HN = jnp.zeros((num_heads, num_keys)) if bias is None else bias.of_distance(jnp.arange(num_keys))
        return Operator(
            scores_WHC=jnp.zeros((1, num_heads, 0)),
            output_WCH=jnp.zeros((1, 0, num_heads)),
            knee_CN=jnp.zeros((0, num_keys)),
            added_HN=added_HN.astype(jnp.float32),
            left_knee_PCT=jnp.zeros((0, 0, num_rows)),
            left_added_QHT=jnp.zeros((0, num_heads, num_rows)),
        )
    config = processor.config
    width, pad, channels = convolution_sizes(config)
    ahead = width - 1 - pad
    num_distances, row_stride = ahead + num_keys, mask.row_stride
    assert row_stride is not None

    def of_rows(table_XN: Float[Array, "X N"], offset: int) -> Float[Array, "X T"]:
        """Return the entry at `offset` plus the column of each row; the entries must exist."""
        size = row_stride * (num_rows - 1) + 1
        return jax.lax.dynamic_slice_in_dim(table_XN, first + offset, size, 1)[:, ::row_stride]

    hidden_C = processor.hidden_bias_C[...].astype(jnp.float32)
    output_WCH = processor.output_WCH[...].astype(jnp.float32)
    # The bias of Conv2 shifts a whole row and cancels in the softmax: stop_gradient makes its gradient exactly 0.
    output_bias_H = jax.lax.stop_gradient(processor.output_bias_H[...]).astype(jnp.float32)
    added_HN = jnp.broadcast_to(output_bias_H[:, None], (num_heads, num_distances))
    # All distances that Conv2 reads: -2 ahead .. S + pad - 1.
    hidden_CN = jnp.broadcast_to(hidden_C[:, None], (channels, ahead + num_distances + pad))
    left_PCT = jnp.zeros((pad, channels, num_rows), jnp.float32)

    if bias is not None:
        # All distances that hidden features depend on: -3 ahead .. S + 2 pad - 1.
        distance_N = jnp.arange(-3 * ahead, num_keys + 2 * pad)
        visible_N = (distance_N >= 0) if mask.window is None else (distance_N >= 0) & (distance_N < mask.window)
        bias_HN = bias.of_distance(jnp.maximum(distance_N, 0)).astype(jnp.float32)
        bias_HN = jnp.where(visible_N, bias_HN, 0)
        if config.residual:
            added_HN += bias_HN[:, 2 * ahead :][:, :num_distances]
        if processor.bias_WHC is not None:
            kernel_WHC = processor.bias_WHC[...].astype(jnp.float32)

            def read(w: int, bias_HN: Float[Array, "H N"]) -> Float[Array, "C N"]:
                return jnp.einsum("HC,HN->CN", kernel_WHC[w], bias_HN, precision=HIGHEST)

            for w in range(width):
                hidden_CN += read(w, bias_HN[:, width - 1 - w :][:, : hidden_CN.shape[1]])
            for column in range(pad):
                # Taps w < pad - column read column + w - pad < 0, at distance i - column - w + pad.
                excess = [read(w, of_rows(bias_HN, 3 * ahead + pad - column - w)) for w in range(pad - column)]
                left_PCT = left_PCT.at[column].set(sum(excess))

    def output(w: int, features_CN: Float[Array, "C N"]) -> Float[Array, "H N"]:
        return jnp.einsum("CH,CN->HN", output_WCH[w], features_CN, precision=HIGHEST)

    # No gradient flows to h_B here: it would cancel that of the change, which contains -LeakyReLU(h_B). The gradient of
    # `knee` that the kernels return includes neither (see `Operator`).
    fixed_CN, fixed_left_PCT = jax.lax.stop_gradient((hidden_CN, left_PCT))
    features_CN = jax.nn.leaky_relu(fixed_CN, SLOPE)
    for w in range(width):
        added_HN += output(w, features_CN[:, width - 1 - w :][:, :num_distances])

    def excess_features(column: int) -> Float[Array, "C T"]:
        """Return the table's features minus the true features of a hidden column left of column `pad`."""
        # Rows before the column use no result that reads it, so any entry is valid for them.
        hidden_CT = of_rows(jnp.pad(fixed_CN, ((0, 0), (pad, 0))), pad + 2 * ahead - column)
        features_CT = jax.nn.leaky_relu(hidden_CT, SLOPE)
        return features_CT if column < 0 else features_CT - jax.nn.leaky_relu(hidden_CT - fixed_left_PCT[column], SLOPE)

    excess_CT = {column: excess_features(column) for column in range(-pad, pad)}
    left_added_QHT = jnp.zeros((2 * pad, num_heads, num_rows), jnp.float32)
    for column in range(2 * pad):
        # Tap w reads the hidden column `column` + w - pad.
        added = [output(w, excess_CT[column + w - pad]) for w in range(min(width, 2 * pad - column))]
        left_added_QHT = left_added_QHT.at[column].set(sum(added))

    scores = processor.scores_WHC
    return Operator(
        scores_WHC=jnp.zeros((width, num_heads, channels)) if scores is None else scores[...].astype(jnp.float32),
        output_WCH=output_WCH,
        knee_CN=(1 - SLOPE) * hidden_CN[:, ahead:][:, :num_distances],
        added_HN=added_HN,
        left_knee_PCT=(1 - SLOPE) * left_PCT,
        left_added_QHT=left_added_QHT,
    )
