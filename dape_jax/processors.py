"""What is done to attention scores before the softmax: nothing, or DAPE.

In: `scores_BHTS`, the position bias `bias_HTS` (None where there is none) and the causal `mask_TS`. Out: the scores
that the softmax sees. Next: `attention.py`.

A processor mixes heads and keys, never two query rows, and nothing it returns for a row may depend on a masked score.

To add one: a pure function, an NNX module, a frozen config and one line in `PROCESSORS` at the foot.
"""

import dataclasses
import functools
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from dape_jax.errors import InputError, require

EDGES = ("prefix", "listing")


@runtime_checkable
class Processor(Protocol):
    """What `attention.py` knows of a processor.

    `key_halo` is how many key columns to the right of a row's own position its result may depend on (their being there,
    not their values, which are masked): a caller who leaves out keys must leave these in.
    """

    key_halo: int

    def __call__(
        self, scores_BHTS: Float[Array, "B H T S"], bias_HTS: Float[Array, "H T S"] | None, mask_TS: Bool[Array, "T S"]
    ) -> Float[Array, "B H T S"]:
        """Return the processed scores; where the mask is False they may hold anything finite."""
        ...


@runtime_checkable
class ProcessorConfig(Protocol):
    """What `transformer.py` knows of a processor."""

    def build(self, num_heads: int, has_bias: bool, dtype: jnp.dtype | None, rngs: nnx.Rngs) -> Processor:
        """Make the module; `dtype` is that of its convolutions' operands, None for that of the scores."""
        ...


def add_bias(scores_BHTS: Float[Array, "B H T S"], bias_HTS: Float[Array, "H T S"] | None) -> Float[Array, "B H T S"]:
    """A + B, or A where there is no bias."""
    return scores_BHTS if bias_HTS is None else scores_BHTS + bias_HTS[None].astype(scores_BHTS.dtype)


class Plain(nnx.Module):
    """No processing: scores + bias."""

    key_halo = 0

    def __call__(
        self, scores_BHTS: Float[Array, "B H T S"], bias_HTS: Float[Array, "H T S"] | None, mask_TS: Bool[Array, "T S"]
    ) -> Float[Array, "B H T S"]:
        """See `add_bias`."""
        return add_bias(scores_BHTS, bias_HTS)


@dataclasses.dataclass(frozen=True)
class PlainConfig:
    """No processing."""

    def build(self, num_heads: int, has_bias: bool, dtype: jnp.dtype | None, rngs: nnx.Rngs) -> Plain:
        """Make the module."""
        return Plain()


def key_convolution(
    x_BTSI: Float[Array, "B T S I"], kernel_WIO: Float[Array, "W I O"], pad_left: int, pad_right: int
) -> Float[Array, "B T R O"]:
    """1xW convolution (cross-correlation) along the keys, zero padding, accumulated in float32 or better.

        y[.., j, o] = sum over w, i of kernel[w, i, o] x[.., j + w - pad_left, i]

    I and O are the channels in and out; the R = S + pad_left + pad_right - W + 1 columns out are keys again.

    Its gradients are those of the convolution. That of the kernel is written as W matmuls: the convolution that
    autodiff would use is several times slower inside a loop on CPU (`benchmarks/attention.py`), and the layers are a
    loop.
    """
    return _key_convolution(x_BTSI, kernel_WIO, pad_left, pad_right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _key_convolution(x_BTSI: Array, kernel_WIO: Array, pad_left: int, pad_right: int) -> Array:
    return jax.lax.conv_general_dilated(
        x_BTSI,
        kernel_WIO[None],
        window_strides=(1, 1),
        padding=((0, 0), (pad_left, pad_right)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=jnp.promote_types(x_BTSI.dtype, jnp.float32),
    )


def _key_convolution_forward(x_BTSI: Array, kernel_WIO: Array, pad_left: int, pad_right: int) -> tuple[Array, Any]:
    return _key_convolution(x_BTSI, kernel_WIO, pad_left, pad_right), (x_BTSI, kernel_WIO)


def _key_convolution_backward(pad_left: int, pad_right: int, saved: Any, dy_BTRO: Array) -> tuple[Array, Array]:
    x_BTSI, kernel_WIO = saved
    width, inputs, outputs = kernel_WIO.shape
    back_left, back_right = width - 1 - pad_left, width - 1 - pad_right
    dtype, dy_BTRO = dy_BTRO.dtype, dy_BTRO.astype(x_BTSI.dtype)
    dx_BTSI = key_convolution(dy_BTRO, kernel_WIO[::-1].swapaxes(1, 2), back_left, back_right)

    def correlate(narrow: Array, wide: Array, pad: tuple[int, int]) -> Array:
        """[W, narrow channels, wide channels]; it is the operand with fewer channels that is shifted and transposed."""
        narrow = jnp.pad(narrow, ((0, 0), (0, 0), pad, (0, 0)))
        flat_wide = wide.reshape(-1, wide.shape[-1])
        shifted = [narrow[:, :, w : w + wide.shape[2]].reshape(-1, narrow.shape[-1]) for w in range(width)]
        return jnp.stack([jnp.matmul(x.T, flat_wide, preferred_element_type=dtype) for x in shifted])

    if inputs <= outputs:
        dkernel_WIO = correlate(x_BTSI, dy_BTRO, (pad_left, pad_right))
    else:
        dkernel_WIO = correlate(dy_BTRO, x_BTSI, (back_left, back_right))[::-1].swapaxes(1, 2)
    return dx_BTSI.astype(x_BTSI.dtype), dkernel_WIO.astype(kernel_WIO.dtype)


_key_convolution.defvjp(_key_convolution_forward, _key_convolution_backward)


def dape(
    scores_BHTS: Float[Array, "B H T S"],
    bias_HTS: Float[Array, "H T S"] | None,
    mask_TS: Bool[Array, "T S"],
    scores_WHC: Float[Array, "W H C"],
    bias_WHC: Float[Array, "W H C"] | None,
    hidden_bias_C: Float[Array, "C"],
    output_WCH: Float[Array, "W C H"],
    output_bias_H: Float[Array, "H"],
    *,
    edge: str = "prefix",
    dtype: jnp.dtype | None = None,
) -> Float[Array, "B H T S"]:
    """DAPE V2 (DAPE V1 at W = 1): the scores plus a small convolution of them, over heads and neighbouring keys.

        A + B + Conv2(LeakyReLU(Conv1([tril(A); tril(B)])))        Conv1: 2H -> C, Conv2: C -> H, both 1xW, slope 0.01
        A + Conv2(LeakyReLU(Conv1(tril(A))))                       where there is no bias: Conv1: H -> C

    tril comes first and keeps a symmetric kernel from reading the future: row i, with x a score and 0 a masked one,

        tril(A)   x x x x 0 0 0 ..                   hidden column j reads j - W//2 .. j + W//2, so columns up to
                        ^ i                          i + W//2 still see scores of row i, and all later ones see none

    What stands to the right of the last key differs between the two edges:

        "prefix"   zero scores, for ever. The hidden columns S .. S + W//2 - 1 are computed from them, so a row's result
                   does not depend on how many keys lie to its right.
        "listing"  zero hidden features, as in the paper's listing: the last W//2 rows change when a key is appended.

    Args:
        scores_BHTS: scores A = Q K^T / sqrt(K).
        bias_HTS: position bias B.
        mask_TS: True where the key may be seen.
        scores_WHC: the half of Conv1's kernel that reads A.
        bias_WHC: the half that reads B, None without a bias; B has no batch dim and is neither tiled nor concatenated.
        hidden_bias_C: bias of Conv1.
        output_WCH: kernel of Conv2.
        output_bias_H: bias of Conv2. It moves a whole row of scores, cancels in the softmax, and its gradient is 0.
        edge: "prefix" or "listing".
        dtype: of the convolutions' operands, but for the half that reads B; None keeps that of the scores. They
            accumulate in float32 or better.

    Source: the paper's equations 3 and 4 and its listing (appendix L).
    Differs: the right edge, unless edge="listing". With W = 1 the first paper's code does not mask; the results are
        equal wherever the mask is True.
    """
    if (bias_HTS is None) != (bias_WHC is None):
        raise InputError("bias_HTS, bias_WHC: a bias and the kernel that reads it come together, or neither does")
    dtype = scores_BHTS.dtype if dtype is None else dtype
    require(edge in EDGES, "edge", edge, f"one of {EDGES}")
    half = scores_WHC.shape[0] // 2
    right_1, right_2 = {"prefix": (2 * half, 0), "listing": (half, half)}[edge]

    def masked(x_BHTS: Float[Array, "_ H T S"]) -> Float[Array, "_ T S H"]:
        return jnp.moveaxis(jnp.where(mask_TS[None, None], x_BHTS, 0), 1, -1)

    hidden_BTRC = key_convolution(masked(scores_BHTS).astype(dtype), scores_WHC.astype(dtype), half, right_1)
    hidden_BTRC += hidden_bias_C[None, None, None].astype(hidden_BTRC.dtype)
    if bias_HTS is not None and bias_WHC is not None:
        # At full precision: it has no batch dim, and a bias far from its query is too large for bfloat16 to resolve.
        hidden_BTRC += key_convolution(masked(bias_HTS[None]), bias_WHC.astype(bias_HTS.dtype), half, right_1)
    hidden_BTRC = jax.nn.leaky_relu(hidden_BTRC, 0.01).astype(dtype)
    update_BTSH = key_convolution(hidden_BTRC, output_WCH.astype(dtype), half, right_2)
    update_BTSH += output_bias_H[None, None, None].astype(update_BTSH.dtype)
    return add_bias(scores_BHTS, bias_HTS) + jnp.moveaxis(update_BTSH, -1, 1).astype(scores_BHTS.dtype)


class Dape(nnx.Module):
    """DAPE V2 as a module; kernels and biases start U(+-1/sqrt(fan_in)), as PyTorch's Conv2d does."""

    def __init__(
        self, num_heads: int, has_bias: bool, config: "DapeConfig", *, dtype: jnp.dtype | None = None, rngs: nnx.Rngs
    ):
        def uniform(shape: tuple[int, ...], fan_in: int) -> nnx.Param:
            limit = 1 / math.sqrt(fan_in)
            return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit))

        width, channels = config.kernel_width, config.channels
        fan_in = (2 if has_bias else 1) * num_heads * width
        self.scores_WHC = uniform((width, num_heads, channels), fan_in)
        self.bias_WHC = uniform((width, num_heads, channels), fan_in) if has_bias else None
        self.hidden_bias_C = uniform((channels,), fan_in)
        self.output_WCH = uniform((width, channels, num_heads), channels * width)
        self.output_bias_H = uniform((num_heads,), channels * width)
        self.edge = config.edge
        self.dtype = dtype
        self.key_halo = width // 2 if config.edge == "listing" else 0

    def __call__(
        self, scores_BHTS: Float[Array, "B H T S"], bias_HTS: Float[Array, "H T S"] | None, mask_TS: Bool[Array, "T S"]
    ) -> Float[Array, "B H T S"]:
        """See `dape`."""
        return dape(
            scores_BHTS,
            bias_HTS,
            mask_TS,
            self.scores_WHC[...],
            None if self.bias_WHC is None else self.bias_WHC[...],
            self.hidden_bias_C[...],
            self.output_WCH[...],
            self.output_bias_H[...],
            edge=self.edge,
            dtype=self.dtype,
        )


@dataclasses.dataclass(frozen=True)
class DapeConfig:
    """DAPE 1xW.

    Args:
        kernel_width: W. 1 is DAPE V1, 3 the paper's usual choice; odd, since the kernel is centred on its key.
        channels: C, the paper's D_DAPE.
        edge: "prefix", or "listing" for the paper's listing to the bit (see `dape`).
    """

    kernel_width: int = 3
    channels: int = 32
    edge: str = "prefix"

    def __post_init__(self):
        require(
            self.kernel_width > 0 and self.kernel_width % 2 == 1,
            "model.processor.kernel_width",
            self.kernel_width,
            "a positive odd width (a centred kernel has none other)",
        )
        require(self.channels > 0, "model.processor.channels", self.channels, "a positive number of channels")
        require(self.edge in EDGES, "model.processor.edge", self.edge, f"one of {EDGES}")

    def build(self, num_heads: int, has_bias: bool, dtype: jnp.dtype | None, rngs: nnx.Rngs) -> Dape:
        """Make the module."""
        return Dape(num_heads, has_bias, self, dtype=dtype, rngs=rngs)


PROCESSORS = {"none": PlainConfig, "dape": DapeConfig}
