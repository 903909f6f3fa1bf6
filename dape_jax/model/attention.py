"""Attention with processed scores: one function over rows of queries, and two drivers for it.

In: `q_BTHK`, `k_BSGK`, `v_BSGK` and their positions, a bias from `biases.py` or `contextual.py`, a processor from
`processors.py`. Out: `out_BTHK`. Next: `transformer.py`.

A query row is complete in itself: everything done to scores mixes heads and keys, never two query rows. So `attend` on
all rows (`dense`), on blocks of rows (`blockwise`), on some rows of many devices, or on one row against a cache, is the
same function and gives the same numbers.

What a row may see is a function of positions too: all keys up to its own (causal), all keys at all (`causal=False`,
for encoders), or those less than `window` away. Keys and values may have fewer heads than queries (grouped-query
attention).
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dape_jax.errors import require
from dape_jax.kernels import KERNELS, attend_fused, why_not_fused
from dape_jax.model.biases import Bias
from dape_jax.model.contextual import ContextualBias, products
from dape_jax.model.processors import Plain, Processor
from dape_jax.sharding import AXES, activation_spec, axis_sizes, device_platform, unstripe

logger = logging.getLogger(__name__)


def visible(q_pos_T: Int[Array, "T"], k_pos_S: Int[Array, "S"], causal: bool, window: int | None) -> Bool[Array, "T S"]:
    """True where a query may see a key. Causal, with a window of 3:

        k 0 1 2 3 4
    q 0   x . . . .        key position <= query position
    q 1   x x . . .        and, with a window, distance < window: a query sees itself and window - 1 keys before it
    q 2   x x x . .        (to either side where attention is not causal)
    q 3   . x x x .
    q 4   . . x x x

    A key with a negative position is padding, and no query at a position of 0 or more sees it.
    """
    distance_TS = q_pos_T[:, None] - k_pos_S[None, :]
    if causal:  # as unsigned numbers, negative positions come after all others: one comparison, not two
        mask_TS = k_pos_S.astype(jnp.uint32)[None, :] <= q_pos_T.astype(jnp.uint32)[:, None]
    else:
        mask_TS = jnp.broadcast_to(k_pos_S[None, :] >= 0, distance_TS.shape)
    return mask_TS if window is None else mask_TS & (jnp.abs(distance_TS) < window)


def masked_softmax(scores_BHTS: Float[Array, "B H T S"], mask_TS: Bool[Array, "T S"]) -> Float[Array, "B H T S"]:
    """Softmax over the keys that the mask lets through; exactly 0 elsewhere.

    A masked score is a large finite negative number, not -inf: a row with no key at all then gives numbers (1 / S for
    every key), not NaNs, and so does its gradient.
    """
    masked = jnp.asarray(-0.7 * jnp.finfo(scores_BHTS.dtype).max, scores_BHTS.dtype)
    return jax.nn.softmax(jnp.where(mask_TS[None, None], scores_BHTS, masked), axis=-1)


class Scores(NamedTuple):
    """What a processor is given.

    Args:
        scores_BHTS: A = Q K^T / sqrt(K).
        bias_BHTS: B, or None; its batch dim is 1 where it does not depend on content.
        mask_TS: True where the key may be seen.
    """

    scores_BHTS: Float[Array, "B H T S"]
    bias_BHTS: Float[Array, "#B H T S"] | None
    mask_TS: Bool[Array, "T S"]


def score(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    q_pos_T: Int[Array, "T"],
    k_pos_S: Int[Array, "S"],
    *,
    bias: Bias | ContextualBias | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Scores:
    """Scores, bias and mask of any block of query rows; arguments as those of `attend`."""
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    mask_TS = visible(q_pos_T, k_pos_S, causal, window)
    scores_BHTS = products(q_BTHK, k_BSGK, dtype) * q_BTHK.shape[-1] ** -0.5
    if bias is None:
        bias_BHTS = None
    elif isinstance(bias, ContextualBias):
        bias_BHTS = bias.from_content(q_BTHK, k_BSGK, scores_BHTS, mask_TS, q_pos_T, k_pos_S, causal)
    else:
        bias_BHTS = bias(q_pos_T, k_pos_S, causal=causal)[None]
    return Scores(scores_BHTS, bias_BHTS, mask_TS)


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    q_pos_T: Int[Array, "T"],
    k_pos_S: Int[Array, "S"],
    *,
    bias: Bias | ContextualBias | None = None,
    processor: Processor | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Float[Array, "B T H K"]:
    """Attention of any block of query rows over the keys.

        softmax(processor(Q K^T / sqrt(K), bias, mask)) V

    Args:
        q_BTHK: queries, rotated already where positions are rotary.
        k_BSGK: keys, of G heads; G divides H, and H/G neighbouring query heads share one. The scores have H heads in
            any case, and so has what the processor mixes.
        v_BSGK: values.
        q_pos_T: positions of the queries, 0 or more, in any order.
        k_pos_S: positions of the keys, increasing: neighbouring columns are what the convolution calls neighbours.
            Those of padding at the end are negative.
        bias: position bias, or contextual encoding; None for none.
        processor: what is done to the scores; None for scores + bias.
        causal: a query sees no key after it; if False, distances are |i - j| and the processor's mask lets all through.
        window: a query sees keys less than so many positions away; None for all.

    Returns:
        The attended values in the dtype of `v_BSGK`. Scores, bias and softmax are float32 (float64 if the inputs are).

    Raises:
        InputError: heads that do not divide, or a window below 1.
    """
    check(q_BTHK, k_BSGK, window)
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    processor = Plain() if processor is None else processor
    scores = score(q_BTHK, k_BSGK, q_pos_T, k_pos_S, bias=bias, causal=causal, window=window)
    probs_BHTS = masked_softmax(processor(*scores), scores.mask_TS).astype(v_BSGK.dtype)
    batch, num_rows, heads, head_dim = q_BTHK.shape
    probs_BGRTS = probs_BHTS.reshape(batch, v_BSGK.shape[2], -1, *probs_BHTS.shape[2:])
    out_BGRTK = jnp.einsum("BGRTS,BSGK->BGRTK", probs_BGRTS, v_BSGK, preferred_element_type=dtype)
    out_BHTK = out_BGRTK.reshape(batch, heads, num_rows, head_dim).astype(v_BSGK.dtype)
    return jnp.moveaxis(out_BHTK, 1, 2)


def check(q_BTHK: Float[Array, "B T H K"], k_BSGK: Float[Array, "B S G K"], window: int | None) -> None:
    """Raise `InputError` for what no shape annotation can say."""
    heads, groups = q_BTHK.shape[2], k_BSGK.shape[2]
    require(heads % groups == 0, "num_kv_heads", groups, f"a divisor of num_heads = {heads}")
    require(window is None or window > 0, "window", window, "1 or more, or None")


@runtime_checkable
class Attention(Protocol):
    """What `transformer.py` knows of a driver: the signature of `attend`."""

    def for_any_rows(self) -> "Attention":
        """The driver for rows that may stand anywhere among the keys, as against a cache."""
        ...

    def for_every_nth_row(self, n: int) -> Callable[..., Float[Array, "B T H K"]]:
        """The same call for rows i, n + i, 2 n + i, .. of as many as there are keys, one i < n that is not known."""
        ...

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        v_BSGK: Float[Array, "B S G K"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        *,
        bias: Bias | ContextualBias | None = None,
        processor: Processor | None = None,
        causal: bool = True,
        window: int | None = None,
    ) -> Float[Array, "B T H K"]:
        """See `attend`."""
        ...


@dataclasses.dataclass(frozen=True)
class Dense:
    """All rows at once: memory grows with T x S. The choice at short lengths."""

    def for_any_rows(self) -> "Dense":
        """Itself: it takes any rows."""
        return self

    def for_every_nth_row(self, n: int) -> "Dense":
        """Itself: it takes any rows."""
        return self

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        v_BSGK: Float[Array, "B S G K"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        *,
        bias: Bias | ContextualBias | None = None,
        processor: Processor | None = None,
        causal: bool = True,
        window: int | None = None,
    ) -> Float[Array, "B T H K"]:
        """See `attend`."""
        return attend(
            q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, bias=bias, processor=processor, causal=causal, window=window
        )


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """A scan over blocks of rows, each recomputed in the backward pass: memory grows with block_size x S.

    Causal saving: the rows are cut into `num_buckets` runs, each with its own number of keys, so that n buckets do
    (n + 1) / (2 n) of the square. The program has one scan for each bucket and does not grow with T.

    With more than one bucket the rows must stand at the end of the keys, row t at column S - T + t, as in
    self-attention; and with a window each block then reads the block_size + window keys (and the processor's halo) that
    it needs, so that time grows with T alone. With one bucket they may be any rows, and every block reads all keys.

    Args:
        block_size: rows in a block.
        num_buckets: runs of rows with their own number of keys.
    """

    block_size: int = 64
    num_buckets: int = 1

    def for_any_rows(self) -> "Blockwise":
        """The same with one bucket."""
        return dataclasses.replace(self, num_buckets=1)

    def for_every_nth_row(self, n: int) -> Callable[..., Float[Array, "B T H K"]]:
        """The same with blocks that reach over n times as many keys."""
        return functools.partial(self, row_stride=n)

    def __post_init__(self):
        require(self.block_size > 0, "model.attention.block_size", self.block_size, "a positive number of rows")
        require(self.num_buckets > 0, "model.attention.num_buckets", self.num_buckets, "1 or more")

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        v_BSGK: Float[Array, "B S G K"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        *,
        bias: Bias | ContextualBias | None = None,
        processor: Processor | None = None,
        causal: bool = True,
        window: int | None = None,
        row_stride: int = 1,
    ) -> Float[Array, "B T H K"]:
        """See `attend`."""
        # Row t stands at one of the `row_stride` columns from S - apart (T - t) on, which one is not known.
        check(q_BTHK, k_BSGK, window)
        batch, num_rows, heads, head_dim = q_BTHK.shape
        num_keys = k_BSGK.shape[1]
        processor = Plain() if processor is None else processor
        block = min(self.block_size, num_rows)
        num_blocks = -(-num_rows // block)
        # One head after the other, as matmuls read them: laid out so once, and not in every block. The last block is
        # filled up with copies of the last row, which are cut off again.
        q_BHTK, k_BGSK, v_BGSK = (jnp.moveaxis(x, 2, 1) for x in (q_BTHK, k_BSGK, v_BSGK))
        fill = (0, num_blocks * block - num_rows)
        q_filled = jnp.pad(q_BHTK, ((0, 0), (0, 0), fill, (0, 0)), mode="edge")
        q_blocks = jnp.moveaxis(q_filled.reshape(batch, heads, num_blocks, block, head_dim), 2, 0)
        pos_blocks = jnp.pad(q_pos_T, (fill,), mode="edge").reshape(num_blocks, block)
        first_columns = num_keys - row_stride * (num_rows - block * jnp.arange(num_blocks))

        left, right = processor.key_halo
        reach = num_keys if window is None else window
        windowed = causal and window is not None and self.num_buckets > 1
        num_runs = min(self.num_buckets, num_blocks) if causal and not windowed else 1
        cuts = [num_blocks * i // num_runs for i in range(num_runs + 1)]
        outs = []
        for start, stop in itertools.pairwise(cuts):
            num_read = num_keys  # by every block of the run
            if windowed:
                num_read = min(num_keys, left + reach - 1 + row_stride * block + right)
            elif num_runs > 1:
                num_read = min(num_keys, num_keys - row_stride * (num_rows - stop * block) + right)

            def keys_of(first_column, num_read=num_read):
                if not windowed:
                    return k_BGSK[:, :, :num_read], v_BGSK[:, :, :num_read], k_pos_S[:num_read]
                begin = jnp.clip(first_column - (reach - 1) - left, 0, num_keys - num_read)
                return tuple(
                    jax.lax.dynamic_slice_in_dim(x, begin, num_read, axis=axis)
                    for x, axis in ((k_BGSK, 2), (v_BGSK, 2), (k_pos_S, 0))
                )

            @jax.checkpoint
            def rows_of_block(q, pos, first_column, keys_of=keys_of):
                k, v, k_pos = keys_of(first_column)
                q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q, k, v))
                out = attend(q, k, v, pos, k_pos, bias=bias, processor=processor, causal=causal, window=window)
                return jnp.moveaxis(out, 2, 1)

            blocks = (q_blocks[start:stop], pos_blocks[start:stop], first_columns[start:stop])
            outs.append(jax.lax.map(lambda block: rows_of_block(*block), blocks))
        out_blocks = jnp.concatenate(outs)
        out_BHTK = jnp.moveaxis(out_blocks, 0, 2).reshape(batch, heads, num_blocks * block, head_dim)[:, :, :num_rows]
        return jnp.moveaxis(out_BHTK, 1, 2)


@dataclasses.dataclass(frozen=True)
class Fused:
    """A kernel that holds no scores (`kernels/`, `docs/kernel.md`): memory grows with T, and traffic little more.

    For DAPE over a bias that is a function of the distance, on a TPU or a GPU; anything else is refused with the
    reason. Positions are those of neighbouring tokens: each key stands one after the one before it, and so do rows (or
    n after, for every n-th row). Where they turn out not to, all values are NaN.

    Args:
        platform: whose kernel, "tpu" or "gpu"; None for that of the devices. On devices of another platform a kernel is
            interpreted, which shows what it computes and not how fast.
    """

    platform: str | None = None

    def __post_init__(self):
        require(
            self.platform is None or self.platform in KERNELS,
            "model.attention.platform",
            self.platform,
            f"one of {KERNELS}, or None",
        )

    def for_any_rows(self) -> Blockwise:
        """Blocks of rows: a few rows against a cache are no work for this kernel."""
        return Blockwise()

    def for_every_nth_row(self, n: int) -> Callable[..., Float[Array, "B T H K"]]:
        """The same with rows that are n columns apart."""
        return functools.partial(self, row_stride=n)

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        v_BSGK: Float[Array, "B S G K"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        *,
        bias: Bias | ContextualBias | None = None,
        processor: Processor | None = None,
        causal: bool = True,
        window: int | None = None,
        row_stride: int = 1,
    ) -> Float[Array, "B T H K"]:
        """See `attend`.

        Raises:
            NotImplementedError: there is no kernel for this; the reason stands in it.
        """
        check(q_BTHK, k_BSGK, window)
        devices = device_platform()
        return attend_fused(
            q_BTHK,
            k_BSGK,
            v_BSGK,
            q_pos_T,
            k_pos_S,
            bias=bias,
            processor=processor,
            causal=causal,
            window=window,
            row_stride=row_stride,
            platform=self.platform or devices,
            interpret=self.platform not in (None, devices),
        )


class Blocks(NamedTuple):
    """What `Blockwise` is given."""

    block_size: int
    num_buckets: int


# By platform, from measurements and compiled programs: docs/kernel.md, "Without a kernel".
# On a TPU one bucket, since each is a loop that takes the compiler some ten seconds; and 32 rows, so that what a block
# holds stays in vector memory: by the compiler's cycles 64 rows are 1.3 times as fast at T = 2048, and 16 at T = 8192.
BLOCKS = {"cpu": Blocks(32, 4), "gpu": Blocks(128, 4), "tpu": Blocks(32, 1)}
FUSED_ON = ("tpu",)  # The kernel for GPUs has never been timed on one: ask for it by name, `Fused`.


@dataclasses.dataclass(frozen=True)
class Auto:
    """The driver that suits platform and length, chosen for each call and logged when it is first chosen.

        fused      on a TPU, where there is a kernel for this bias and processor
        dense      where all rows are one block
        blockwise  elsewhere

    Args:
        block_size: of `Blockwise`; None for what suits the platform.
        num_buckets: of `Blockwise`; None for what suits the platform.
    """

    block_size: int | None = None
    num_buckets: int | None = None

    def __post_init__(self):
        self.blockwise("cpu")  # to check the fields

    def blockwise(self, platform: str) -> Blockwise:
        """`Blockwise` as it suits a platform, where this does not say otherwise."""
        best = BLOCKS.get(platform, BLOCKS["gpu"])
        block_size = best.block_size if self.block_size is None else self.block_size
        return Blockwise(block_size, best.num_buckets if self.num_buckets is None else self.num_buckets)

    def choose(
        self,
        q_BTHK: jax.ShapeDtypeStruct | Array,
        k_BSGK: jax.ShapeDtypeStruct | Array,
        *,
        bias: Bias | ContextualBias | None = None,
        processor: Processor | None = None,
        causal: bool = True,
        window: int | None = None,
        row_stride: int = 1,
        platform: str,
        device_kind: str | None = None,
    ) -> Dense | Blockwise | Fused:
        """The driver for a call, of which shapes and dtypes are enough; see `kernels.why_not_fused`."""
        blockwise = self.blockwise(platform)
        if window is not None and self.num_buckets is None:  # with one bucket, every block would read all keys
            blockwise = dataclasses.replace(blockwise, num_buckets=max(2, blockwise.num_buckets))
        if q_BTHK.shape[1] <= blockwise.block_size:
            implementation, why = Dense(), "all rows are one block"
        else:
            options = {"causal": causal, "window": window, "row_stride": row_stride}
            options |= {"platform": platform, "device_kind": device_kind}
            why = why_not_fused(q_BTHK, k_BSGK, bias=bias, processor=processor, **options)
            if why is None and platform not in FUSED_ON:
                why = f"the kernel for the platform {platform!r} has to be asked for by name"
            implementation = Fused() if why is None else blockwise
        _log_choice(f"{implementation}" + (f": {why}" if why else ""))
        return implementation

    def for_any_rows(self) -> Blockwise:
        """`Blockwise` for any rows."""
        return self.blockwise(device_platform()).for_any_rows()

    def for_every_nth_row(self, n: int) -> Callable[..., Float[Array, "B T H K"]]:
        """The same of the driver that is chosen."""
        return functools.partial(self, row_stride=n)

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        v_BSGK: Float[Array, "B S G K"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        *,
        bias: Bias | ContextualBias | None = None,
        processor: Processor | None = None,
        causal: bool = True,
        window: int | None = None,
        row_stride: int = 1,
    ) -> Float[Array, "B T H K"]:
        """See `attend`; positions as `Fused` and `Blockwise` have them."""
        options = {"bias": bias, "processor": processor, "causal": causal, "window": window}
        implementation = self.choose(q_BTHK, k_BSGK, **options, row_stride=row_stride, platform=device_platform())
        return implementation.for_every_nth_row(row_stride)(q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, **options)


@functools.cache
def _log_choice(choice: str) -> None:
    """Once in a process, however many layers and programs choose alike."""
    logger.info("attention: %s", choice)


def attend_on_mesh(
    attention: Attention,
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    pos_T: Int[Array, "T"],
    *,
    bias: Bias | ContextualBias | None = None,
    processor: Processor | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Float[Array, "B T H K"]:
    """Self-attention, each device of `context` and `tensor` taking its share of the query rows, with all heads.

    Before and after, a device of context c has the rows that `sharding.stripe` gave it, and one of tensor t some
    heads of them. In between it has every n-th row, n = c t, from its own place on, with all heads, and all keys and
    values, with all heads:

        q   all-to-all over tensor        heads -> rows
        k v all-gather over tensor and over context
        out all-to-all over tensor        rows -> heads

    Heads are not what attention is split over, since the score convolution mixes them: a device that had some of the
    heads would need the scores of all the others. What is computed for a row is `attend`, whatever the mesh, so this
    is exact for every bias and processor, and its gradients are.

    Arguments are those of `attend`, in the order of `stripe`, and the driver. On one device, or without a mesh, this
    is the driver's own call. On any more it is not left to the compiler, not even where the batch alone is split: that
    would sum the gradient of a bias, [H, T, S], over all devices, where here each takes its own back to the parameters
    first.
    """
    sizes = axis_sizes()
    num_context, num_tensor = sizes["context"], sizes["tensor"]
    n = num_context * num_tensor
    if math.prod(sizes.values()) == 1:
        options = {"bias": bias, "processor": processor, "causal": causal, "window": window}
        return attention(q_BTHK, k_BTGK, v_BTGK, pos_T, pos_T, **options)

    leaves, structure = jax.tree.flatten((bias, processor))  # of which some may be no arrays: functions, for one

    def rows_of_device(shared: list[Array], k_pos_S: Array, q: Array, k: Array, v: Array) -> Array:
        # What all devices share is said to differ between them, so that its gradients are added up over all.
        shared, k_pos_S = jax.lax.pcast((shared, k_pos_S), AXES, to="varying")
        given = iter(shared)
        bias, processor = structure.unflatten([next(given) if isinstance(x, jax.Array) else x for x in leaves])
        batch, rows, heads, head_dim = q.shape
        q = q.reshape(batch, rows // num_tensor, num_tensor, heads, head_dim)
        q = jax.lax.all_to_all(q, "tensor", split_axis=2, concat_axis=3, tiled=True)[:, :, 0]

        def all_of(x: Array) -> Array:
            x = jax.lax.all_gather(x, "tensor", axis=2, tiled=True)
            x = jax.lax.all_gather(x, "context", axis=2)  # [B, rows, context, G, K]: dealt rows in order again
            return x.reshape(batch, -1, *x.shape[3:])

        place = jax.lax.axis_index("tensor") * num_context + jax.lax.axis_index("context")
        q_pos_T = k_pos_S.reshape(-1, n)[:, place]
        out = attention.for_every_nth_row(n)(
            q, all_of(k), all_of(v), q_pos_T, k_pos_S, bias=bias, processor=processor, causal=causal, window=window
        )
        out = jax.lax.all_to_all(out[:, :, None], "tensor", split_axis=3, concat_axis=2, tiled=True)
        return out.reshape(batch, rows, heads, head_dim)

    of_heads = activation_spec("BTHK")
    return jax.shard_map(
        rows_of_device,
        in_specs=(PartitionSpec(), PartitionSpec(), of_heads, of_heads, of_heads),
        out_specs=of_heads,
    )([x for x in leaves if isinstance(x, jax.Array)], unstripe(pos_T, 0), q_BTHK, k_BTGK, v_BTGK)


IMPLEMENTATIONS = {"auto": Auto, "dense": Dense, "blockwise": Blockwise, "fused": Fused}
