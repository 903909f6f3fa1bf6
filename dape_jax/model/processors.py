"""Processors: functions of attention scores between Q K^T and the softmax, either addition of the bias or DAPE.

In: `scores_BHTS`, `bias_BHTS` (or None; its batch dim is 1 unless it depends on content) and a mask, True where the
query sees the key. Out: the scores for the softmax. Next: `attention.py`.

To add one, write a module and a frozen config, and add a line to `PROCESSORS` at the end of the file.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dape_jax.errors import InputError, one_of, positive, require
from dape_jax.model.biases import Bias, fan_in_uniform
from dape_jax.model.contextual import ContextualBias
from dape_jax.model.scores import BiasPairs, Pairs, VisiblePairs, over_heads
from dape_jax.sharding import at_least_float32, device_platform, full_precision, split_batch, vary_alike

ALIGNMENTS = ("centered", "causal")
EDGES = ("prefix", "listing")
INPUTS = ("both", "scores", "bias")
INITS = ("uniform", "identity")
SLOPE = 0.01  # negative slope of the LeakyReLU


class Processor:
    """Base class of processors: functions of scores, bias and mask.

    A processor mixes heads and keys, never two query rows. Its result for a row must not depend on a masked score. A
    processor with parameters is also an `nnx.Module`.

    Args:
        key_halo: (left, right), the numbers of keys before the first visible key and after the last one on which a
            row's result depends. Blockwise attention reads these too. (0, 0) if the processor does not mix keys. If it
            does, and the rows have segments, it is also called with `first_BT=`, the column of the first key of each
            row's segment: columns left of it must count as outside the array.
    """

    key_halo: tuple[int, int] = (0, 0)

    def __call__(
        self, scores_BHTS: Float[Array, "B H T S"], bias_BHTS: Float[Array, "#B H T S"] | None, mask: VisiblePairs
    ) -> Float[Array, "B H T S"]:
        """Return the processed scores; where the mask is False, any finite number."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


class PairFlops(NamedTuple):
    """Matmul FLOPs of a processor for one pair of a query and a key, all heads, forward; a multiply-add is 2."""

    of_scores: int  # for every sequence of the batch
    of_bias: int  # these depend only on the bias: once for the batch, unless the bias depends on content


class ProcessorConfig:
    """Base class of processor configs, which are frozen dataclasses.

    `build` calls `module` with the number of heads, whether there is a bias, the config, the dtype and the random
    numbers; a config without `module` defines `build`.
    """

    module: ClassVar[Any]

    @property
    def why_not_cached(self) -> str | None:
        """Return why appending keys changes earlier rows, which rules out a KV cache, or None if it does not."""
        return None

    def pair_flops(self, num_heads: int, has_bias: bool) -> PairFlops:
        """Return the cost of a pair of a query and a key; 0 by default."""
        return PairFlops(0, 0)

    def build(self, num_heads: int, *, has_bias: bool = True, dtype: DTypeLike | None = None, rngs: nnx.Rngs) -> Any:
        """Make the module.

        Args:
            num_heads: H.
            has_bias: whether calls pass a bias; rotary embedding is not a bias.
            dtype: dtype of the convolutions' operands; None for the dtype of the scores.
            rngs: random keys of the parameters.
        """
        return self.module(num_heads, has_bias, self, dtype, rngs)


def add_bias(scores_BHTS: Pairs, bias_BHTS: BiasPairs | None) -> Pairs:
    """Return A + B, or A if there is no bias."""
    if bias_BHTS is None:
        return scores_BHTS
    return scores_BHTS + broadcast_batch(bias_BHTS.astype(scores_BHTS.dtype), scores_BHTS.shape[0])


def broadcast_batch(x_BXYZ: Float[Array, "#B X Y Z"], batch: int) -> Float[Array, "B X Y Z"]:
    """Broadcast an array without a batch dim over the sequences of a batch.

    On a CPU the gradient is summed one sequence at a time: autodiff's sum over a leading dim is up to 20 times slower
    there, and took a third of the layer's time with four sequences.
    """
    if x_BXYZ.shape[0] == batch or device_platform() != "cpu":
        return jnp.broadcast_to(x_BXYZ, (batch, *x_BXYZ.shape[1:]))
    return _broadcast_batch(x_BXYZ, batch)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _broadcast_batch(x_1XYZ: Array, batch: int) -> Array:
    return jnp.broadcast_to(x_1XYZ, (batch, *x_1XYZ.shape[1:]))


@_broadcast_batch.defjvp
def _broadcast_batch_jvp(batch: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _broadcast_batch(*primals, batch), jnp.concatenate(tangents * batch)  # its transpose adds one part at a time


class Plain(nnx.Module, Processor):
    """Processor that only adds the bias."""

    def __call__(self, scores_BHTS: Pairs, bias_BHTS: BiasPairs | None, mask: VisiblePairs) -> Pairs:
        """See `add_bias`."""
        return add_bias(scores_BHTS, bias_BHTS)


@dataclasses.dataclass(frozen=True)
class PlainConfig(ProcessorConfig):
    """Config of plain attention: the bias is added to the scores."""

    def build(self, num_heads: int, *, has_bias: bool = True, dtype: DTypeLike | None = None, rngs: nnx.Rngs) -> Plain:
        """Make the module."""
        return Plain()


class ScoreMod(NamedTuple):
    """Computation of the scores between Q K^T and the softmax: a pytree whose arrays are parameters."""

    bias: Bias | ContextualBias | None = None
    processor: Processor = Plain()  # by default scores + bias
    scale: Float[Array, ""] | float | None = None  # factor of Q K^T; None: 1 / sqrt(K)
    cap: Float[Array, ""] | float | None = None  # of the scaled scores, before bias and processor; see `soft_cap`


def key_convolution(
    x_BTSI: Float[Array, "B T S I"], kernel_WIO: Float[Array, "W I O"], pad_left: int, pad_right: int
) -> Float[Array, "B T J O"]:
    """Convolve along the keys (1xW cross-correlation, zero padding), accumulating in float32 or better.

    Operands in float32 are not rounded, on any platform.

        y[.., j, o] = sum over w, i of kernel[w, i, o] x[.., j + w - pad_left, i]

    I and O are the channels in and out; the J = S + pad_left + pad_right - W + 1 output columns are keys again.

    The gradient of the kernel is written as W matmuls: autodiff's convolution is several times slower inside a loop on
    CPU (`benchmarks/attention.py`), and the model runs its layers in a loop.

    On a TPU the convolution itself is W matmuls: for a convolution the compiler maps channels to the 128 lanes of a
    vector, so 12 heads or 32 channels leave most lanes unused; for matmuls it maps the keys to lanes.

    On a CPU the compiler's fastest convolution on one core is for outputs that are not longer than the input. For a
    longer output the input is padded first, and a barrier keeps the compiler from merging it into the convolution.
    """

    def convolved(*args: Array) -> Array:
        return _key_convolution(*vary_alike(*args), pad_left, pad_right)

    return split_batch(convolved, [x_BTSI], [kernel_WIO])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _key_convolution(x_BTSI: Array, kernel_WIO: Array, pad_left: int, pad_right: int) -> Array:
    dtype, width = at_least_float32(x_BTSI.dtype), kernel_WIO.shape[0]
    options = {"precision": full_precision(x_BTSI.dtype), "preferred_element_type": dtype}
    if device_platform() == "tpu":
        padded = jnp.pad(x_BTSI, ((0, 0), (0, 0), (pad_left, pad_right), (0, 0)))
        num_columns = padded.shape[2] - width + 1
        taps = (padded[:, :, w : w + num_columns] for w in range(width))
        multiply = functools.partial(jnp.einsum, "BTJI,IO->BTJO", **options)
        return functools.reduce(jnp.add, map(multiply, taps, kernel_WIO))
    longer_by = pad_left + pad_right - width + 1  # columns
    if device_platform() == "cpu" and 0 < longer_by <= pad_right:
        x_BTSI = jax.lax.optimization_barrier(jnp.pad(x_BTSI, ((0, 0), (0, 0), (0, longer_by), (0, 0))))
        pad_right -= longer_by
    return jax.lax.conv_general_dilated(
        x_BTSI,
        kernel_WIO[None],
        window_strides=(1, 1),
        padding=((0, 0), (pad_left, pad_right)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        **options,
    )


def _key_convolution_backward(pad_left: int, pad_right: int, saved: Any, dy_BTJO: Array) -> tuple[Array, Array]:
    x_BTSI, kernel_WIO = saved
    width, inputs, outputs = kernel_WIO.shape
    back_left, back_right = width - 1 - pad_left, width - 1 - pad_right
    dtype, dy_BTJO = dy_BTJO.dtype, dy_BTJO.astype(x_BTSI.dtype)
    dx_BTSI = key_convolution(dy_BTJO, kernel_WIO[::-1].swapaxes(1, 2), back_left, back_right)

    def correlate(narrow: Array, wide: Array, pad: tuple[int, int]) -> Array:
        """Return [W, narrow channels, wide channels]; the operand with fewer channels is shifted and transposed."""
        narrow = jnp.pad(narrow, ((0, 0), (0, 0), pad, (0, 0)))
        flat_wide = wide.reshape(-1, wide.shape[-1])
        shifted = (narrow[:, :, w : w + wide.shape[2]].reshape(-1, narrow.shape[-1]) for w in range(width))
        options = {"precision": full_precision(wide.dtype), "preferred_element_type": dtype}
        return jnp.stack([jnp.matmul(x.T, flat_wide, **options) for x in shifted])

    if inputs <= outputs:
        dkernel_WIO = correlate(x_BTSI, dy_BTJO, (pad_left, pad_right))
    else:
        dkernel_WIO = correlate(dy_BTJO, x_BTSI, (back_left, back_right))[::-1].swapaxes(1, 2)
    return dx_BTSI.astype(x_BTSI.dtype), dkernel_WIO.astype(kernel_WIO.dtype)


def _key_convolution_forward(x_BTSI: Array, kernel_WIO: Array, *padding: int) -> tuple[Array, tuple[Array, Array]]:
    # Without copies, which compile to nothing, JAX 0.10 and 0.11 mix up what is saved in a scan's second derivative.
    return _key_convolution(x_BTSI, kernel_WIO, *padding), (jnp.copy(x_BTSI), jnp.copy(kernel_WIO))


_key_convolution.defvjp(_key_convolution_forward, _key_convolution_backward)


def leaky_relu_change(x: Array, knee: Array) -> Array:
    """Return LeakyReLU(c + x) - LeakyReLU(c), where knee = (1 - SLOPE) c.

        max(x + min(knee, 0), SLOPE x - max(knee, 0))

    The result is at most |x| in magnitude, and has the relative error of x, however large c is: the two terms of the
    difference, which nearly cancel, are not computed.
    """
    return jnp.maximum(x + jnp.minimum(knee, 0), SLOPE * x - jnp.maximum(knee, 0))


def leaky_relu_change_gradient(x: Array, knee: Array, dy: Array) -> Array:
    """Return the gradient of x, given the gradient of `leaky_relu_change(x, knee)`; for kernels."""
    return jnp.where((1 - SLOPE) * x + knee >= 0, dy, SLOPE * dy)


def dape(
    scores_BHTS: Float[Array, "B H T S"],
    bias_BHTS: Float[Array, "#B H T S"] | None,
    mask: VisiblePairs,
    *,
    first_BT: Int[Array, "B T"] | None = None,
    scores_WHC: Float[Array, "W _ C"] | None = None,
    bias_WHC: Float[Array, "W _ C"] | None = None,
    hidden_bias_C: Float[Array, "C"],
    output_WCH: Float[Array, "W C _"],
    output_bias_H: Float[Array, "_"],
    alignment: str = "centered",
    edge: str = "prefix",
    residual: bool = True,
    leak: bool = False,
    dtype: DTypeLike | None = None,
) -> Float[Array, "B H T S"]:
    """Return DAPE V2 (DAPE V1 at W = 1): the scores plus a small convolution of them, over heads and neighbouring keys.

        A + B + Conv2(LeakyReLU(Conv1([tril(A); tril(B)])))    Conv1: 2H -> C, Conv2: C -> H
        A + Conv2(LeakyReLU(Conv1(tril(A))))                   without a bias: Conv1: H -> C

    Both are 1xW, and the slope is 0.01. tril (zero wherever the mask is False) comes first and keeps a symmetric kernel
    from reading the future. Row i, with x a visible score and 0 a masked one:

        tril(A)   x x x x 0 0 0 ..    hidden column j reads j - W//2 .. j + W//2, so columns
                        ^ i           up to i + W//2 see scores of row i, and no later one

    The two edges differ in the values to the right of the last key:

        "prefix"   zero scores. The hidden columns S .. S + W//2 - 1 are computed from them,
                   so a row's result does not depend on the number of keys to its right.
        "listing"  zero hidden features, as in the paper's listing: the last W//2 rows change
                   when a key is appended.

    Far from the query the bias dominates the features, and rounding them to 16 bits would lose the scores. In a dtype
    below float32 the nonlinearity is therefore centred on the bias's features h_B, and the part without scores is
    computed in float32:

        Conv2(LeakyReLU(h_A + h_B)) = Conv2(LeakyReLU(h_B))
                                      + Conv2(LeakyReLU(h_A + h_B) - LeakyReLU(h_B))

    Args:
        scores_BHTS: scores A = Q K^T / sqrt(K).
        bias_BHTS: bias B, or None. The batch dim is 1 if B does not depend on content; B is then neither tiled nor
            concatenated.
        mask: True where the query sees the key.
        first_BT: column of the first key of each row's segment, or None if that is column 0. Hidden columns left of it
            are zero, as they are left of column 0, so a segment's result is that of the segment alone.
        scores_WHC: the half of Conv1's kernel that reads A, or None if the convolution does not read A.
        bias_WHC: the half that reads B, or None if the convolution does not read B.
        hidden_bias_C: bias of Conv1.
        output_WCH: kernel of Conv2.
        output_bias_H: bias of Conv2. It shifts a whole row of scores and cancels in the softmax: its gradient is 0.
        alignment: see `DapeConfig`.
        edge: see `DapeConfig`.
        residual: see `DapeConfig`.
        leak: see `DapeConfig`.
        dtype: dtype of the convolutions' operands, except those that depend only on B; None for the dtype of the
            scores. Accumulation is in float32 or better.

    Raises:
        InputError: an option is wrong, bias_WHC is given without a bias, neither scores_WHC nor bias_WHC is given, or
            the kernels or the bias and the scores have different numbers of heads.

    Source: the paper's equations 3 to 5, its listing (appendix L) for "centered", section 3.3 ("padding of k-1") for
        "causal", section 4.5 for the leak; without the residual, equation 2.
    Differs: from the listing at the right edge, unless edge="listing". With W = 1 the first paper's code does not mask;
        the results are equal where the mask is True.
    """
    if bias_BHTS is None and bias_WHC is not None:
        raise InputError("bias_WHC: must be None without a bias (bias_BHTS is None)")
    if scores_WHC is None and bias_WHC is None:
        raise InputError("scores_WHC, bias_WHC: at least one of them must be given")
    width, channels, num_outputs = output_WCH.shape
    config = DapeConfig(width, channels, alignment, edge, residual, leak)  # checks the options
    (left_1, right_1), (left_2, right_2) = config.paddings
    if first_BT is not None:  # the right edge of a segment is not known here
        ends_anywhere = not leak and (edge == "prefix" or alignment == "causal")
        name = "leak=True" if leak else f"edge={edge!r}"
        require(ends_anywhere, "segment_ids", "given", f"must be None with {name}, which depends on keys after a row")
    heads = {kernel.shape[1] for kernel in (scores_WHC, bias_WHC) if kernel is not None} | {num_outputs}
    require(heads == {scores_BHTS.shape[1]}, "heads of the kernels", heads, f"must be {scores_BHTS.shape[1]}")
    if bias_BHTS is not None:
        batch_heads = scores_BHTS.shape[:2]
        is_right = bias_BHTS.ndim == 4 and bias_BHTS.shape[:2] in (batch_heads, (1, batch_heads[1]))
        allowed = f"must be [1, H, T, S] or [B, H, T, S], with [B, H] = {list(batch_heads)}"
        require(is_right, "bias_BHTS.shape", bias_BHTS.shape, allowed)
    dtype = jnp.dtype(scores_BHTS.dtype if dtype is None else dtype)

    def convolved(x_BHTS: Float[Array, "_ H T S"], kernel_WHC: Float[Array, "W H C"]) -> Float[Array, "_ T J C"]:
        visible = x_BHTS if leak else jnp.where(over_heads(mask), x_BHTS, 0)
        return key_convolution(jnp.moveaxis(visible, 1, -1), kernel_WHC.astype(x_BHTS.dtype), left_1, right_1)

    def output(hidden_BTJC: Float[Array, "_ T J C"]) -> Float[Array, "_ T S H"]:
        if first_BT is not None:
            columns_J = jnp.arange(hidden_BTJC.shape[2])
            in_array_BTJ = columns_J[None, None] >= first_BT[:, :, None]
            hidden_BTJC = jnp.where(in_array_BTJ[..., None], hidden_BTJC, 0)
        return key_convolution(hidden_BTJC, output_WCH.astype(hidden_BTJC.dtype), left_2, right_2)

    batch, full_dtype = scores_BHTS.shape[0], at_least_float32(dtype)
    hidden_BTJC = hidden_bias_C[None, None, None].astype(full_dtype)
    if bias_BHTS is not None and bias_WHC is not None and dtype != full_dtype:
        hidden_BTJC += convolved(bias_BHTS.astype(full_dtype), bias_WHC)
        update_BTSH = broadcast_batch(output(jax.nn.leaky_relu(hidden_BTJC, SLOPE)), batch)
        if scores_WHC is not None:
            knee_BTJC = broadcast_batch((1 - SLOPE) * hidden_BTJC, batch)
            change_BTJC = leaky_relu_change(convolved(scores_BHTS.astype(dtype), scores_WHC), knee_BTJC)
            update_BTSH += output(change_BTJC.astype(dtype))
    else:
        inputs = [(scores_BHTS, scores_WHC), (bias_BHTS, bias_WHC)]
        inputs = [(x.astype(dtype), kernel) for x, kernel in inputs if x is not None and kernel is not None]
        if len({x_BHTS.shape for x_BHTS, _ in inputs}) < len(inputs):
            # The bias has a batch dim already, so it need not be tiled: one convolution of both is faster than two.
            inputs = [tuple(jnp.concatenate(halves, axis=1) for halves in zip(*inputs, strict=True))]
        for x_BHTS, kernel_WHC in inputs:
            hidden_BTJC += broadcast_batch(convolved(x_BHTS, kernel_WHC), batch)
        update_BTSH = output(jax.nn.leaky_relu(hidden_BTJC, SLOPE).astype(dtype))
    update_BTSH += output_bias_H[None, None, None].astype(update_BTSH.dtype)
    base_BHTS = add_bias(scores_BHTS, bias_BHTS) if residual else scores_BHTS
    return base_BHTS + jnp.moveaxis(update_BTSH, -1, 1).astype(scores_BHTS.dtype)


class Dape(nnx.Module, Processor):
    """DAPE V2 as a module. Kernels and biases are initialised U(+-1/sqrt(fan_in)), as in PyTorch's Conv2d."""

    def __init__(self, num_heads: int, has_bias: bool, config: "DapeConfig", dtype: DTypeLike | None, rngs: nnx.Rngs):
        uniform = functools.partial(fan_in_uniform, rngs)
        width, channels = config.kernel_width, config.channels
        reads_scores = config.inputs != "bias"
        reads_bias = has_bias and config.inputs != "scores"
        allowed = "must be 'scores' or 'both' without a bias"
        require(reads_scores or has_bias, "model.processor.inputs", config.inputs, allowed)
        fan_in = (reads_scores + reads_bias) * num_heads * width
        self.scores_WHC = uniform((width, num_heads, channels), fan_in) if reads_scores else None
        self.bias_WHC = uniform((width, num_heads, channels), fan_in) if reads_bias else None
        self.hidden_bias_C = uniform((channels,), fan_in)
        output = uniform if config.init == "uniform" else lambda shape, _: nnx.Param(jnp.zeros(shape))
        self.output_WCH = output((width, channels, num_heads), channels * width)
        self.output_bias_H = output((num_heads,), channels * width)
        self.has_bias, self.config, self.key_halo = has_bias, config, config.key_halo
        self.dtype = None if dtype is None else jnp.dtype(dtype)

    def check_bias(self, is_given: bool) -> None:
        """Raise `InputError` if a bias is given and the module was built without one, or the reverse."""
        if is_given != self.has_bias:
            given = "a bias is given" if is_given else "none is given"
            raise InputError(f"bias_BHTS: {given}, but the processor was built with has_bias={self.has_bias}")

    def __call__(
        self,
        scores_BHTS: Pairs,
        bias_BHTS: BiasPairs | None,
        mask: VisiblePairs,
        *,
        first_BT: Int[Array, "B T"] | None = None,
    ) -> Pairs:
        """See `dape`."""
        self.check_bias(bias_BHTS is not None)
        return dape(
            scores_BHTS,
            bias_BHTS,
            mask,
            first_BT=first_BT,
            scores_WHC=None if self.scores_WHC is None else self.scores_WHC[...],
            bias_WHC=None if self.bias_WHC is None else self.bias_WHC[...],
            hidden_bias_C=self.hidden_bias_C[...],
            output_WCH=self.output_WCH[...],
            output_bias_H=self.output_bias_H[...],
            dtype=self.dtype,
            **{name: getattr(self.config, name) for name in ("alignment", "edge", "residual", "leak")},
        )


@dataclasses.dataclass(frozen=True)
class DapeConfig(ProcessorConfig):
    """Config of DAPE with kernels 1xW.

    `dape-train --help=model.processor` prints the meaning of each field, as `--help=model.bias` does of a bias's.
    """

    kernel_width: int = 3  # W; 1 is DAPE V1, 3 the paper's usual choice
    channels: int = 32  # C, the paper's D_DAPE
    # "centered": a column reads W//2 columns on either side, W odd (the paper's listing); or "causal": a column reads
    # itself and W - 1 columns to its left, any W (the paper's text), and both edges are the same.
    alignment: str = "centered"
    edge: str = "prefix"  # of the last columns; "listing" is exactly the paper's listing: see `dape`
    residual: bool = True  # add B outside the convolution as well; False is the paper's equation 2
    leak: bool = False  # omit tril, so that a centered kernel reads the future: the paper's experiment on leakage
    inputs: str = "both"  # of the convolution: "both", "scores" or "bias"; without a bias "both" means the scores
    # "identity" initialises the second convolution to zero, so that the layer starts as scores + bias. The first
    # convolution then has a zero gradient in the first step.
    init: str = "uniform"
    module = Dape

    def __post_init__(self):
        positive(self, "model.processor", "kernel_width", "channels")
        one_of(self, "model.processor", alignment=ALIGNMENTS, edge=EDGES, inputs=INPUTS, init=INITS)
        fits = self.kernel_width % 2 == 1 or self.alignment == "causal"
        allowed = "must be odd for a centered kernel; alignment='causal' takes any"
        require(fits, "model.processor.kernel_width", self.kernel_width, allowed)

    @property
    def paddings(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the padding (left, right) of the input of Conv1, and of Conv2."""
        width, half = self.kernel_width, self.kernel_width // 2
        if self.alignment == "causal":
            return (width - 1, 0), (width - 1, 0)
        return {"prefix": ((half, 2 * half), (half, 0)), "listing": ((half, half), (half, half))}[self.edge]

    @property
    def key_halo(self) -> tuple[int, int]:
        """See `Processor`."""
        if self.alignment == "causal":
            # Hidden columns left of the first visible key read masked scores, which are 0 unless there is a leak.
            return (2 if self.leak else 1) * (self.kernel_width - 1), 0
        half = self.kernel_width // 2
        if self.leak:
            return 2 * half, 2 * half
        return half, half if self.edge == "listing" else 0

    @property
    def why_not_cached(self) -> str | None:
        """See `ProcessorConfig`."""
        if self.key_halo[1] == 0:  # no row reads later keys
            return None
        if self.leak:
            return "model.processor.leak = True: scores read tokens that are not generated yet"
        return (
            f"model.processor.edge = 'listing': the last kernel_width // 2 = {self.kernel_width // 2} rows change when "
            "a token is appended, so cached results would be wrong (with edge='prefix', no row changes)"
        )

    def pair_flops(self, num_heads: int, has_bias: bool) -> PairFlops:
        """Return the cost of both convolutions: W taps from H heads (2H with a bias) to C channels, and from C to H."""
        taps = 2 * self.kernel_width * num_heads * self.channels
        return PairFlops(
            of_scores=taps * ((self.inputs != "bias") + 1), of_bias=taps * (has_bias and self.inputs != "scores")
        )


PROCESSORS = {"none": PlainConfig, "dape": DapeConfig}
