"""Attention with processed scores: one function over rows of queries, and its implementations.

In: `q_BTHK`, `k_BSGK`, `v_BSGK` and their positions, a bias from `biases.py` or `contextual.py`, a processor from
`processors.py`. Out: `out_BTHK`. Next: `transformer.py`.

Query rows are independent: each operation on scores mixes heads and keys, never two query rows. `attend` therefore
gives the same numbers on all rows (`Dense`), on blocks of rows in a scan (`Blockwise`), on each device's share of the
rows (`attend_on_mesh`), and on one row against a cache.
"""

import dataclasses
import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dape_jax.errors import positive, require
from dape_jax.kernels import KERNELS, attend_fused, why_not_fused
from dape_jax.model.biases import Bias
from dape_jax.model.contextual import ContextualBias
from dape_jax.model.processors import Dape, Plain, Processor, ScoreMod
from dape_jax.model.scores import MIN_BLOCK_ROWS, Mask, Scores, causal_runs, masked_softmax, products, rows_in_block
from dape_jax.sharding import AXES, activation_spec, axis_sizes, device_platform, full_precision, unstripe

logger = logging.getLogger(__name__)


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
    """Return scores, bias and mask of any block of query rows; see `attend` for the arguments."""
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    mask_TS = Mask(causal, window).visible(q_pos_T, k_pos_S)
    scores_BHTS = products(q_BTHK, k_BSGK, dtype) * q_BTHK.shape[-1] ** -0.5
    if bias is None:
        bias_BHTS = None
    elif isinstance(bias, ContextualBias):
        bias_BHTS = bias.from_content(q_BTHK, k_BSGK, scores_BHTS, mask_TS, q_pos_T, k_pos_S, causal)
    else:
        bias_HTS = bias(q_pos_T, k_pos_S, causal=causal)
        _check_returned("bias", bias, bias_HTS, "H, T, S", scores_BHTS.shape[1:])
        bias_BHTS = bias_HTS[None]
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
    """Attend any block of query rows to the keys.

        softmax(processor(Q K^T / sqrt(K), bias, mask)) V

    Args:
        q_BTHK: queries, already rotated if the model uses rotary embedding.
        k_BSGK: keys of G heads. G divides H, and H/G neighbouring query heads share one (grouped-query attention).
            Scores always have H heads.
        v_BSGK: values.
        q_pos_T: positions of the queries, 0 or more, in any order.
        k_pos_S: positions of the keys, increasing: the convolution treats neighbouring columns as neighbouring keys.
            Padding at the end has negative positions.
        bias: position bias or contextual encoding, or None.
        processor: function of the scores; None for scores + bias.
        causal: a query sees no key after it. If False, distances are |i - j| and both sides are visible.
        window: a query sees keys at a distance below this, or None for all keys.

    Returns:
        The attended values in the dtype of `v_BSGK`. Scores, bias and softmax are float32 (float64 if the inputs are).

    Raises:
        InputError: the arrays are not of floating point, the shapes are inconsistent (also those that the bias or the
            processor returns), a config is given instead of its module, or the window is below 1.
    """
    check_arrays(q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S)
    check_modules(bias, processor)
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    processor = Plain() if processor is None else processor
    scores = score(q_BTHK, k_BSGK, q_pos_T, k_pos_S, bias=bias, causal=causal, window=window)
    processed_BHTS = processor(*scores)
    _check_returned("processor", processor, processed_BHTS, "B, H, T, S", scores.scores_BHTS.shape)
    probs_BHTS = masked_softmax(processed_BHTS, scores.mask_TS).astype(v_BSGK.dtype)
    batch, num_rows, heads, head_dim = q_BTHK.shape
    probs_BGRTS = probs_BHTS.reshape(batch, v_BSGK.shape[2], -1, *probs_BHTS.shape[2:])
    precision = full_precision(v_BSGK.dtype)
    out_BGRTK = jnp.einsum("BGRTS,BSGK->BGRTK", probs_BGRTS, v_BSGK, precision=precision, preferred_element_type=dtype)
    out_BHTK = out_BGRTK.reshape(batch, heads, num_rows, head_dim).astype(v_BSGK.dtype)
    return jnp.moveaxis(out_BHTK, 1, 2)


def check_arrays(q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, q_pos_T: Any, k_pos_S: Any) -> None:
    """Raise `InputError` if dtypes or shapes are wrong; the message points out a [B, H, T, K] layout."""
    for name, x, layout, pos_name, pos in (
        ("q_BTHK", q_BTHK, "B, T, H, K", "q_pos_T", q_pos_T),
        ("k_BSGK", k_BSGK, "B, S, G, K", "k_pos_S", k_pos_S),
        ("v_BSGK", v_BSGK, "B, S, G, K", "k_pos_S", k_pos_S),
    ):
        rows, heads = layout[3], layout[6]
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        require(is_float, f"{name}.dtype", x.dtype.name, "must be float16, bfloat16, float32 or float64")
        require(hasattr(pos, "ndim"), pos_name, pos, f"must be an array of positions, [{rows}]")
        require(x.ndim == 4, f"{name}.shape", x.shape, f"must be [{layout}]")
        require(0 not in x.shape, f"{name}.shape", x.shape, f"must be [{layout}], all above 0")
        require(pos.ndim == 1, f"{pos_name}.shape", pos.shape, f"must be [{rows}], the same for the whole batch")
        if x.shape[1] != pos.size:
            swapped = f"looks like [B, {heads}, {rows}, K]; " if x.shape[2] == pos.size else ""
            allowed = f"{swapped}must be [{layout}] with {rows} = {pos.size}, the length of {pos_name}"
            require(False, f"{name}.shape", x.shape, allowed)
    (batch, _, heads, head_dim), groups = q_BTHK.shape, k_BSGK.shape[2]
    require(k_BSGK.shape[0] == batch, "k_BSGK.shape", k_BSGK.shape, f"must have B = {batch}, like q_BTHK")
    require(k_BSGK.shape[3] == head_dim, "k_BSGK.shape", k_BSGK.shape, f"must have K = {head_dim}, like q_BTHK")
    require(k_BSGK.shape == v_BSGK.shape, "v_BSGK.shape", v_BSGK.shape, f"must be k_BSGK.shape = {k_BSGK.shape}")
    require(heads % groups == 0, "num_kv_heads", groups, f"must divide num_heads = {heads}")


def check_modules(bias: Any, processor: Any) -> None:
    """Raise `InputError` if a config is given instead of the module that its `build` returns."""
    for name, module in (("bias", bias), ("processor", processor)):
        require(not hasattr(module, "build"), name, module, "is a config: give the module that its build() returns")


def _check_returned(kind: str, module: Any, returned: Any, layout: str, expected: tuple[int, ...]) -> None:
    """Raise `InputError` unless a bias or processor returned an array of the expected shape."""
    found = getattr(returned, "shape", None)
    require(found == expected, f"{kind} {type(module).__name__}", found, f"must return [{layout}] = {expected}")


class Implementation:
    """Base class of the implementations of `attend`, which return the same values and gradients.

    A `ScoreMod` contains the arguments `bias` and `processor` of `attend`, and a `Mask` contains `causal` and `window`.
    A subclass defines `_attend`, with the arguments of `__call__`.
    """

    @property
    def for_cached_decoding(self) -> "Implementation":
        """Return the variant for queries at arbitrary positions (KV-cache decoding)."""
        return self

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        v_BSGK: Float[Array, "B S G K"],
        q_pos_T: Int[Array, "T"],
        k_pos_S: Int[Array, "S"],
        score_mod: ScoreMod = ScoreMod(),
        mask: Mask = Mask(),
    ) -> Float[Array, "B T H K"]:
        """Attend query rows to the keys; see `attend`.

        Args:
            q_BTHK: queries.
            k_BSGK: keys.
            v_BSGK: values.
            q_pos_T: positions of the queries.
            k_pos_S: positions of the keys.
            score_mod: bias and processor.
            mask: which keys a query sees, and the step between rows.

        Raises:
            InputError: dtypes or shapes are wrong, or `score_mod` does not contain modules.
            NotImplementedError: `Fused` has no kernel for these arguments; the message gives the reason.
        """
        check_arrays(q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S)
        check_modules(*score_mod)
        is_processor = isinstance(score_mod.processor, Processor)
        require(is_processor, "processor", type(score_mod.processor).__name__, "must be a subclass of Processor")
        return self._attend(q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, score_mod, mask)

    def _attend(self, q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, score_mod, mask):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Dense(Implementation):
    """Attend all rows at once: memory grows with T x S. For short lengths."""

    def _attend(self, q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, score_mod, mask):
        options = {"causal": mask.causal, "window": mask.window}
        return attend(q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, **score_mod._asdict(), **options)


@dataclasses.dataclass(frozen=True)
class Blockwise(Implementation):
    """Scan over blocks of rows, each recomputed in the backward pass: memory grows with block_size x S.

    The rows are cut into `num_buckets` runs, each with its own number of keys: see `causal_runs`. The program has one
    scan for each run and does not grow with T.

    With more than one bucket the rows must be at the last key positions, as in self-attention. With a window each block
    then reads only the block_size + window keys that it needs, so time grows linearly with T. With one bucket the rows
    may be at any positions, and every block reads all keys.

    Args:
        block_size: rows in a block.
        num_buckets: runs of rows, each with its own number of keys.
    """

    block_size: int = 64
    num_buckets: int = 1

    def __post_init__(self):
        positive(self, "model.attention", "block_size", "num_buckets")

    @property
    def for_cached_decoding(self) -> "Blockwise":
        """Return this implementation with one bucket."""
        return dataclasses.replace(self, num_buckets=1)

    def _attend(self, q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, score_mod, mask):
        batch, num_rows, heads, head_dim = q_BTHK.shape
        num_keys = k_BSGK.shape[1]
        block = min(self.block_size, num_rows)
        num_blocks = -(-num_rows // block)
        # Transpose to the heads-first layout of the matmuls once, not in every block. The last block is padded with
        # copies of the last row, which are removed from the result.
        q_BHTK, k_BGSK, v_BGSK = (jnp.moveaxis(x, 2, 1) for x in (q_BTHK, k_BSGK, v_BSGK))
        pad = (0, num_blocks * block - num_rows)
        q_padded = jnp.pad(q_BHTK, ((0, 0), (0, 0), pad, (0, 0)), mode="edge")
        q_blocks = jnp.moveaxis(q_padded.reshape(batch, heads, num_blocks, block, head_dim), 2, 0)
        pos_blocks = jnp.pad(q_pos_T, (pad,), mode="edge").reshape(num_blocks, block)
        first_columns = num_keys - mask.row_stride * (num_rows - block * jnp.arange(num_blocks))

        halo = score_mod.processor.key_halo
        windowed = mask.causal and mask.window is not None and self.num_buckets > 1
        outs = []
        for run in causal_runs(num_rows, num_keys, block, self.num_buckets, mask, halo):

            def keys_of(first_column, num_read=run.num_keys):
                if not windowed:
                    return k_BGSK[:, :, :num_read], v_BGSK[:, :, :num_read], k_pos_S[:num_read]
                begin = jnp.clip(first_column - (mask.window - 1) - halo[0], 0, num_keys - num_read)
                return tuple(
                    jax.lax.dynamic_slice_in_dim(x, begin, num_read, axis=axis)
                    for x, axis in ((k_BGSK, 2), (v_BGSK, 2), (k_pos_S, 0))
                )

            @jax.checkpoint
            def attend_block(q, pos, first_column, keys_of=keys_of):
                k, v, k_pos = keys_of(first_column)
                q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q, k, v))
                return jnp.moveaxis(Dense()(q, k, v, pos, k_pos, score_mod, mask), 2, 1)

            blocks = [x[run.start : run.stop] for x in (q_blocks, pos_blocks, first_columns)]
            outs.append(jax.lax.map(lambda block, attend_block=attend_block: attend_block(*block), blocks))
        out_blocks = jnp.concatenate(outs)
        out_BHTK = jnp.moveaxis(out_blocks, 0, 2).reshape(batch, heads, num_blocks * block, head_dim)[:, :, :num_rows]
        return jnp.moveaxis(out_BHTK, 1, 2)


@dataclasses.dataclass(frozen=True)
class Fused(Implementation):
    """Fused kernel, which never writes scores to memory (`kernels/`, `docs/kernel.md`): memory grows with T.

    It supports DAPE with a `DistanceBias`. Without a processor it supports a `DistanceBias` on a TPU, and no bias on a
    GPU. For other arguments it raises `NotImplementedError` with the reason. Positions of keys must be consecutive, and
    those of rows consecutive or `row_stride` apart; otherwise all values are NaN.

    Args:
        platform: "tpu" or "gpu", the platform of the kernel; None for that of the devices. On devices of another
            platform the kernel is interpreted, which is slow and meant for tests.
    """

    platform: str | None = None

    def __post_init__(self):
        allowed = f"must be one of {list(KERNELS)}, or None"
        require(self.platform is None or self.platform in KERNELS, "model.attention.platform", self.platform, allowed)

    @property
    def for_cached_decoding(self) -> Blockwise:
        """Return `Blockwise`: for a few rows against a cache the kernel is not faster."""
        return Blockwise()

    def _attend(self, q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, score_mod, mask):
        devices = device_platform()
        options = {"platform": self.platform or devices, "interpret": self.platform not in (None, devices)}
        return attend_fused(q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, score_mod, mask, **options)


# Chosen from measurements and compiled programs: docs/kernel.md, "Blockwise attention".
# TPU: one bucket, since compiling the loop of each takes about ten seconds; and 32 rows, so that a block's arrays stay
# in VMEM. By the compiler's cycle estimates, 64 rows are 1.3 times as fast at T = 2048, and 16 rows at T = 8192.
# GPU: more rows than these, if memory allows: see `rows_in_block`.
BLOCKWISE = {"cpu": Blockwise(32, 4), "gpu": Blockwise(128, 4), "tpu": Blockwise(32, 1)}


@dataclasses.dataclass(frozen=True)
class Auto(Implementation):
    """Implementation chosen by platform and length for each call; logged when first chosen.

        dense      if all rows are one block; on a GPU with a kernel, up to 128 rows
        fused      on a TPU or GPU, if a kernel supports this bias and processor
        blockwise  otherwise

    Args:
        block_size: rows in a block of `Blockwise`; None for the platform's default.
        num_buckets: buckets of `Blockwise`; None for the platform's default.
    """

    block_size: int | None = None
    num_buckets: int | None = None

    def __post_init__(self):
        self.blockwise("cpu")  # checks the fields

    @property
    def for_cached_decoding(self) -> Blockwise:
        """Return `Blockwise` for queries at arbitrary positions."""
        return self.blockwise(device_platform()).for_cached_decoding

    def blockwise(self, platform: str) -> Blockwise:
        """Return `Blockwise` with this object's sizes, and the platform's defaults for those that are None."""
        given = {name: size for name, size in dataclasses.asdict(self).items() if size is not None}
        return dataclasses.replace(BLOCKWISE.get(platform, BLOCKWISE["gpu"]), **given)

    def choose(
        self,
        q_BTHK: jax.ShapeDtypeStruct | Array,
        k_BSGK: jax.ShapeDtypeStruct | Array,
        score_mod: ScoreMod = ScoreMod(),
        mask: Mask = Mask(),
        *,
        platform: str,
        device_kind: str | None = None,
    ) -> Dense | Blockwise | Fused:
        """Return the implementation for a call. Arrays may be `ShapeDtypeStruct`s; see `kernels.why_not_fused`."""
        blockwise = self.blockwise(platform)
        if mask.window is not None and self.num_buckets is None:  # with one bucket, every block would read all keys
            blockwise = dataclasses.replace(blockwise, num_buckets=max(2, blockwise.num_buckets))
        if platform == "gpu" and self.block_size is None:
            blockwise = dataclasses.replace(blockwise, block_size=_rows_on_gpu(q_BTHK, k_BSGK, score_mod, blockwise))
        why = why_not_fused(q_BTHK, k_BSGK, score_mod, mask, platform=platform, device_kind=device_kind)
        # On a GPU a block has many rows, and the kernel was faster than `Dense` where both were measured.
        longest_dense = blockwise.block_size
        if platform == "gpu" and why is None:
            longest_dense = min(longest_dense, MIN_BLOCK_ROWS)
        if q_BTHK.shape[1] <= longest_dense:
            implementation, why = Dense(), "all rows are one block"
        else:
            implementation = Fused() if why is None else blockwise
        _log_choice(f"{implementation}" + (f": {why}" if why else ""))
        return implementation

    def _attend(self, q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, score_mod, mask):
        implementation = self.choose(q_BTHK, k_BSGK, score_mod, mask, platform=device_platform())
        return implementation(q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, score_mod, mask)


def _rows_on_gpu(
    q_BTHK: jax.ShapeDtypeStruct | Array,
    k_BSGK: jax.ShapeDtypeStruct | Array,
    score_mod: ScoreMod,
    blockwise: Blockwise,
) -> int:
    """Return the number of rows in a block of `Blockwise`; scores and hidden features determine its memory."""
    batch, num_rows, heads = q_BTHK.shape[:3]
    channels = score_mod.processor.config.channels if isinstance(score_mod.processor, Dape) else 0
    return rows_in_block(batch * (heads + channels), num_rows, k_BSGK.shape[1], blockwise.num_buckets)


@functools.cache
def _log_choice(choice: str) -> None:
    """Log a choice once per process, although many layers and programs make the same choice."""
    logger.info("attention: %s", choice)


def attend_on_mesh(
    implementation: Implementation,
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    pos_S: Int[Array, "S"],
    score_mod: ScoreMod = ScoreMod(),
    mask: Mask = Mask(),
) -> Float[Array, "B T H K"]:
    """Compute self-attention with query rows split over the `context` and `tensor` axes; each device has all heads.

    Before and after, rows are split over context (size c) in the order of `sharding.stripe`, and heads over tensor
    (size t). In between, a device has every n-th row, n = c t, starting at its own index, and all keys and values, each
    with all heads:

        q   all-to-all over tensor        heads -> rows
        k v all-gather over tensor and over context
        out all-to-all over tensor        rows -> heads

    Attention is not split over heads, since the score convolution mixes them: a device with some of the heads would
    need the scores of all others. Every row is computed by `attend`, whatever the mesh, so this is exact for every bias
    and processor, and so are its gradients.

    On one device, or without a mesh, this is a plain call of the implementation. On more devices `shard_map` is used
    even if only the batch is split: the compiler would sum the gradient of a bias, [H, T, S], over all devices, while
    here each device first reduces it to the gradient of the parameters.

    Args:
        implementation: implementation of attention on each device.
        q_BTHK: queries of the last T positions, in the order of `stripe`.
        k_BSGK: keys, in the same order.
        v_BSGK: values, in the same order.
        pos_S: positions, in the same order.
        score_mod: bias and processor.
        mask: which keys a query sees; the row stride is set here.
    """
    sizes = axis_sizes()
    num_context, num_tensor = sizes["context"], sizes["tensor"]
    if math.prod(sizes.values()) == 1:
        return implementation(q_BTHK, k_BSGK, v_BSGK, pos_S[-q_BTHK.shape[1] :], pos_S, score_mod, mask)

    mask = dataclasses.replace(mask, row_stride=num_context * num_tensor)
    leaves, structure = jax.tree.flatten(score_mod)  # a bias that is a plain function is a leaf, but not an array

    def attend_rows(shared: list[Array], k_pos_S: Array, q: Array, k: Array, v: Array) -> Array:
        # Mark replicated arrays as varying over devices, so that their gradients are summed over all devices.
        shared, k_pos_S = jax.lax.pcast((shared, k_pos_S), AXES, to="varying")
        arrays = iter(shared)
        score_mod = structure.unflatten([next(arrays) if isinstance(x, jax.Array) else x for x in leaves])
        batch, rows, heads, head_dim = q.shape
        q = q.reshape(batch, rows // num_tensor, num_tensor, heads, head_dim)
        q = jax.lax.all_to_all(q, "tensor", split_axis=2, concat_axis=3, tiled=True)[:, :, 0]

        def gather(x: Array) -> Array:
            x = jax.lax.all_gather(x, "tensor", axis=2, tiled=True)
            x = jax.lax.all_gather(x, "context", axis=2)  # [B, rows, context, G, K]: unstriped
            return x.reshape(batch, -1, *x.shape[3:])

        index = jax.lax.axis_index("tensor") * num_context + jax.lax.axis_index("context")
        q_pos_T = k_pos_S.reshape(-1, mask.row_stride)[-q.shape[1] :, index]
        out = implementation(q, gather(k), gather(v), q_pos_T, k_pos_S, score_mod, mask)
        out = jax.lax.all_to_all(out[:, :, None], "tensor", split_axis=3, concat_axis=2, tiled=True)
        return out.reshape(batch, rows, heads, head_dim)

    heads_spec = activation_spec("BTHK")
    return jax.shard_map(
        attend_rows,
        in_specs=(PartitionSpec(), PartitionSpec(), heads_spec, heads_spec, heads_spec),
        out_specs=heads_spec,
    )([x for x in leaves if isinstance(x, jax.Array)], unstripe(pos_S, 0), q_BTHK, k_BSGK, v_BSGK)


IMPLEMENTATIONS = {"auto": Auto, "dense": Dense, "blockwise": Blockwise, "fused": Fused}
