"""Attention with processed scores: one function over rows of queries, and its implementations.

In: `q_BTHK`, `k_BSGK`, `v_BSGK` and their positions, a bias from `biases.py` or `contextual.py`, a processor from
`processors.py`. Out: `out_BTHK`. Next: `transformer.py`.

Query rows are independent: each operation on scores mixes heads and keys, never two query rows. `attend` therefore
gives the same numbers on all rows (`Dense`), on blocks of rows in a scan (`Blockwise`), on each device's share of the
rows (`attend_on_mesh`), and on one row against a cache.
"""

import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer

from dape_jax.errors import positive, require
from dape_jax.kernels import KERNELS, attend_fused, why_not_fused
from dape_jax.model.biases import Bias, DistanceBias
from dape_jax.model.contextual import Content, ContextualBias
from dape_jax.model.processors import Dape, Plain, Processor, ScoreMod
from dape_jax.model.scores import (
    MIN_BLOCK_ROWS,
    BiasPairs,
    Keys,
    Mask,
    Positions,
    Queries,
    Scores,
    as_positions,
    causal_runs,
    masked_exp,
    products,
    rows_in_block,
    segment_starts,
    soft_cap,
)
from dape_jax.sharding import (
    AXES,
    activation_spec,
    at_least_float32,
    axis_sizes,
    device_platform,
    full_precision,
    split_batch,
)

logger = logging.getLogger(__name__)


def score(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    q_pos_T: Integer[Array, "T"] | Sequence[int] | None = None,
    k_pos_S: Integer[Array, "S"] | Sequence[int] | None = None,
    *,
    bias: Bias | ContextualBias | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: Float[Array, ""] | float | None = None,
    cap: Float[Array, ""] | float | None = None,
) -> Scores:
    """Return the first half of `attend`: scores, bias and mask, the arguments of a processor.

    Raises:
        InputError: as `attend`.
    """
    score_mod = ScoreMod(bias, scale=scale, cap=cap)
    q_pos, k_pos = check_arguments(q_BTHK, k_BSGK, k_BSGK, q_pos_T, k_pos_S, score_mod)
    positions = _positions(q_BTHK.shape[1], k_BSGK.shape[1], q_pos, k_pos)
    return _score(q_BTHK, k_BSGK, positions, score_mod, Mask(causal, window))


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    q_pos_T: Integer[Array, "T"] | Sequence[int] | None = None,
    k_pos_S: Integer[Array, "S"] | Sequence[int] | None = None,
    *,
    bias: Bias | ContextualBias | None = None,
    processor: Processor | None = None,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Int[Array, "B S"] | Sequence[Sequence[int]] | None = None,
    scale: Float[Array, ""] | float | None = None,
    cap: Float[Array, ""] | float | None = None,
    implementation: "str | Implementation" = "auto",
) -> Float[Array, "B T H K"]:
    """Attend any block of query rows to the keys.

        softmax(processor(scale Q K^T, bias, mask)) V

    Args:
        q_BTHK: queries, already rotated if the model uses rotary embedding.
        k_BSGK: keys of G heads. G divides H, and H/G neighbouring query heads share one (grouped-query attention).
            Scores always have H heads.
        v_BSGK: values.
        q_pos_T: positions of the queries, 0 or more, in any order. If None, the queries are at the last T of S
            consecutive positions, as in self-attention. Only then a kernel can be used, and only then blocks of rows
            read the keys before them, not all keys.
        k_pos_S: positions of the keys, increasing: the convolution treats neighbouring columns as neighbouring keys.
            Padding at the end has negative positions; padding on the left is a segment. None for 0..S-1.
        bias: position bias or contextual encoding, or None.
        processor: function of the scores; None for scores + bias.
        causal: a query sees no key after it. If False, distances are |i - j| and both sides are visible.
        window: a query sees keys at a distance below this, or None for all keys.
        segment_ids: document of each key, for rows of packed documents: a query sees keys of its own document only, and
            no convolution crosses an edge, so a packed row gives what its documents give alone. A document is a run of
            equal ids. Needs positions None.
        scale: factor of Q K^T, or None for 1 / sqrt(K).
        cap: c in c tanh(scores / c), which replaces the scaled scores before bias and processor; None for no cap.
        implementation: "auto", "dense", "blockwise", "fused" or "cuda", or an `Auto`, `Dense`, `Blockwise` or `Fused`
            with its own sizes. All return the same values and gradients.

    Returns:
        The attended values in the dtype of `v_BSGK`. Scores, bias and softmax are float32 (float64 if the inputs are).
        With DAPE they have reverse-mode derivatives only: a Hessian is `jax.jacrev(jax.grad(f))`. The fused
        kernels have first derivatives only.

    Raises:
        InputError: the arrays are not of floating point, the shapes are inconsistent (also those that the bias or the
            processor returns), key positions do not increase (seen outside of `jit` only), a name, a config or an array
            is given instead of a module, or an option is not allowed.
        NotImplementedError: "fused" has no kernel for these arguments; the message gives the reason.
    """
    named: dict[Any, type[Implementation]] = IMPLEMENTATIONS
    chosen: Any = named[implementation]() if implementation in named else implementation
    allowed = f"must be one of {list(named)}, or an instance of one"
    require(isinstance(chosen, Implementation), "implementation", implementation, allowed)
    score_mod = ScoreMod(bias, Plain() if processor is None else processor, scale, cap)
    q_pos, k_pos = check_arguments(q_BTHK, k_BSGK, v_BSGK, q_pos_T, k_pos_S, score_mod)
    given = q_pos is not None or k_pos is not None
    require(segment_ids is None or not given, "q_pos_T, k_pos_S", "given", "must be None with segment_ids")
    starts_BS = None if segment_ids is None else segment_starts(segment_ids, k_BSGK.shape[:2])
    positions = _positions(q_BTHK.shape[1], k_BSGK.shape[1], q_pos, k_pos, starts_BS)
    mask = Mask(causal, window, row_stride=None if given else 1)
    args = q_BTHK, k_BSGK, v_BSGK, positions, score_mod
    # A bias or processor that is a plain function is no argument of a compiled function.
    are_arrays = all(isinstance(leaf, jax.Array | np.ndarray | float) for leaf in jax.tree.leaves(score_mod[:2]))
    return (_attend_compiled if are_arrays else _attend)(chosen, mask, *args)


def _attend(
    implementation: "Implementation",
    mask: Mask,
    q_BTHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    positions: Positions,
    score_mod: ScoreMod,
) -> Array:
    """Call an implementation; on a mesh with explicit axes, for each device's sequences."""
    arrays, restored = _arrays(score_mod)

    def attend_part(q, k, v, q_start, k_start, q_pos, k_pos, *arrays):
        positions = Positions(q_pos, k_pos, q_start, k_start)
        return implementation.attend_rows(q, k, v, positions, restored(arrays), mask)

    return split_batch(attend_part, [q_BTHK, k_BSGK, v_BSGK, *positions[2:]], [*positions[:2], *arrays])


# Outside a user's `jit`, the loops of an implementation would be compiled again in every call.
_attend_compiled = jax.jit(_attend, static_argnums=(0, 1), inline=True)


def _arrays(score_mod: ScoreMod) -> tuple[list[Array], Callable[[Sequence[Array]], ScoreMod]]:
    """Return the arrays of bias, processor and options, and a function that puts others in their places.

    A bias that is a plain function is a leaf, but not an array.
    """
    leaves, structure = jax.tree.flatten(score_mod)

    def restored(arrays: Sequence[Array]) -> ScoreMod:
        given = iter(arrays)
        return structure.unflatten([next(given) if isinstance(x, jax.Array) else x for x in leaves])

    return [x for x in leaves if isinstance(x, jax.Array)], restored


def _positions(num_rows: int, num_keys: int, q_pos: Any, k_pos: Any, starts_BS: Array | None = None) -> Positions:
    """Return the positions of a call of `attend`; see there."""
    k_pos_S = jnp.arange(num_keys) if k_pos is None else jnp.asarray(k_pos)
    q_pos_T = k_pos_S[num_keys - num_rows :] if q_pos is None else jnp.asarray(q_pos)
    return Positions(q_pos_T, k_pos_S, None if starts_BS is None else starts_BS[:, num_keys - num_rows :], starts_BS)


def check_arguments(
    q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, q_pos_T: Any, k_pos_S: Any, score_mod: ScoreMod
) -> tuple[Any, Any]:
    """Return the positions as arrays, or raise `InputError` if modules, dtypes, shapes or positions are wrong."""
    check_modules(score_mod)
    k_pos_S = as_positions("k_pos_S", k_pos_S, score_mod.processor.key_halo)
    q_pos_T = as_positions("q_pos_T", q_pos_T)
    for name, x, layout, pos_name, pos in (
        ("q_BTHK", q_BTHK, "B, T, H, K", "q_pos_T", q_pos_T),
        ("k_BSGK", k_BSGK, "B, S, G, K", "k_pos_S", k_pos_S),
        ("v_BSGK", v_BSGK, "B, S, G, K", "k_pos_S", k_pos_S),
    ):
        require(isinstance(x, jax.Array | np.ndarray), name, type(x).__name__, "must be an array of JAX or NumPy")
        is_float = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
        require(is_float, f"{name}.dtype", x.dtype.name, "must be float16, bfloat16, float32 or float64")
        allowed = f"must be [{layout}], rows before heads, all above 0"
        require(x.ndim == 4 and 0 not in x.shape, f"{name}.shape", x.shape, allowed)
        if pos is not None:
            allowed = f"must be [{layout}], rows before heads, with {layout[3]} = {len(pos)}, the length of {pos_name}"
            require(x.shape[1] == len(pos), f"{name}.shape", x.shape, allowed)
    (batch, num_rows, heads, head_dim), groups = q_BTHK.shape, k_BSGK.shape[2]
    allowed = f"must have B = {batch} and K = {head_dim}, like q_BTHK"
    require((k_BSGK.shape[0], k_BSGK.shape[3]) == (batch, head_dim), "k_BSGK.shape", k_BSGK.shape, allowed)
    require(k_BSGK.shape == v_BSGK.shape, "v_BSGK.shape", v_BSGK.shape, f"must be k_BSGK.shape = {k_BSGK.shape}")
    allowed = f"[B, T, H, K] must have T <= S if q_pos_T is None; S = {k_BSGK.shape[1]}"
    require(q_pos_T is not None or num_rows <= k_BSGK.shape[1], "q_BTHK.shape", q_BTHK.shape, allowed)
    require(heads % groups == 0, "num_kv_heads", groups, f"must divide num_heads = {heads}")
    return q_pos_T, k_pos_S


def check_modules(score_mod: ScoreMod) -> None:
    """Raise `InputError` for a config or an array in place of a module, and an array in place of a number."""
    for name, module in (("bias", score_mod.bias), ("processor", score_mod.processor)):
        require(not hasattr(module, "build"), name, module, "is a config: give the module that its build() returns")
    bias, kind = score_mod.bias, type(score_mod.processor)
    shown = f"array {bias.shape}" if isinstance(bias, jax.Array | np.ndarray) else bias
    allowed = "must be a module, as build() of a config returns, or lambda q_pos, k_pos, *, causal: ARRAY"
    require(bias is None or isinstance(bias, ContextualBias) or callable(bias), "bias", shown, allowed)
    require(issubclass(kind, Processor), "processor", kind.__name__, "must be a subclass of Processor")
    for name, number in (("scale", score_mod.scale), ("cap", score_mod.cap)):
        shape = getattr(number, "shape", ())
        require(shape == (), name, f"array {shape}", "must be a number, the same for all scores")
    cap = score_mod.cap
    is_above_0 = cap is None or isinstance(cap, Tracer) or bool(cap > 0)
    require(is_above_0, "cap", cap, "must be above 0, or None for no cap")


def _check_returned(kind: str, module: Any, returned: Any, layout: str, expected: tuple[int, ...]) -> None:
    """Raise `InputError` unless a bias or processor returned an array of the expected shape."""
    found = getattr(returned, "shape", None)
    require(found == expected, f"{kind} {type(module).__name__}", found, f"must return [{layout}] = {expected}")


def _score(q_BTHK: Queries, k_BSGK: Keys, positions: Positions, score_mod: ScoreMod, mask: Mask) -> Scores:
    """Return scores, bias and mask of a block of query rows."""
    dtype = at_least_float32(q_BTHK.dtype)
    scale = q_BTHK.shape[-1] ** -0.5 if score_mod.scale is None else score_mod.scale
    scores_BHTS = soft_cap(products(q_BTHK, k_BSGK, dtype) * scale, score_mod.cap)
    visible, bias = mask.visible(positions), score_mod.bias
    content = Content(q_BTHK, k_BSGK, scores_BHTS, visible, positions.q_pos_T, positions.k_pos_S)
    starts = positions.q_start_BT, positions.k_start_BS
    return Scores(scores_BHTS, None if bias is None else _bias(bias, content, *starts, causal=mask.causal), visible)


def _bias(
    bias: Any, content: Content, q_start_BT: Array | None = None, k_start_BS: Array | None = None, *, causal: bool
) -> BiasPairs:
    """Return the bias of a block of query rows.

    With segments, positions restart in each; for a bias of the distance this makes no difference.
    """
    if q_start_BT is not None and k_start_BS is not None and not isinstance(bias, DistanceBias):

        def of_sequence(content: Content) -> Float[Array, "H T S"]:
            q, k, scores, visible, *pos = content
            return _bias(bias, Content(q[None], k[None], scores[None], visible[None], *pos), causal=causal)[0]

        pos = {"q_pos_T": content.q_pos_T[None] - q_start_BT, "k_pos_S": content.k_pos_S[None] - k_start_BS}
        return jax.vmap(of_sequence)(content._replace(**pos))
    shape = content.scores_BHTS.shape
    if not isinstance(bias, ContextualBias):
        bias_HTS = bias(content.q_pos_T, content.k_pos_S, causal=causal)
        _check_returned("bias", bias, bias_HTS, "H, T, S", shape[1:])
        return bias_HTS[None]
    bias_BHTS = bias.from_content(content, causal=causal)
    shape = (1, *shape[1:]) if getattr(bias_BHTS, "shape", shape)[:1] == (1,) else shape
    _check_returned("bias", bias, bias_BHTS, "B or 1, H, T, S", shape)
    return bias_BHTS


class Implementation:
    """Base class of the implementations of `attend`, which return the same values and gradients."""

    def attend_rows(
        self, q_BTHK: Queries, k_BSGK: Keys, v_BSGK: Keys, positions: Positions, score_mod: ScoreMod, mask: Mask
    ) -> Float[Array, "B T H K"]:
        """Attend a block of query rows, at any positions, to the keys that `mask` lets them see."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Dense(Implementation):
    """Attend all rows at once: memory grows with T x S. For short lengths."""

    def attend_rows(self, q_BTHK, k_BSGK, v_BSGK, positions, score_mod, mask):
        """See `Implementation`."""
        dtype = at_least_float32(q_BTHK.dtype)
        processor, options = score_mod.processor, {}
        scores = _score(q_BTHK, k_BSGK, positions, score_mod, mask)
        if positions.q_start_BT is not None and processor.key_halo != (0, 0):
            takes_it = "first_BT" in inspect.signature(processor.__call__).parameters
            name, allowed = f"processor {type(processor).__name__}", "must take first_BT to be used with segment_ids"
            require(takes_it, name, "mixes keys", allowed)
            options = {"first_BT": positions.q_start_BT - positions.k_pos_S[0]}
        processed_BHTS = processor(*scores, **options)
        _check_returned("processor", processor, processed_BHTS, "B, H, T, S", scores.scores_BHTS.shape)
        exp_BHTS, total_BHT1 = masked_exp(processed_BHTS, scores.mask, v_BSGK.dtype)
        batch, num_rows, heads, head_dim = q_BTHK.shape
        exp_BGRTS = exp_BHTS.reshape(batch, v_BSGK.shape[2], -1, *exp_BHTS.shape[2:])
        options = {"precision": full_precision(v_BSGK.dtype), "preferred_element_type": dtype}
        out_BGRTK = jnp.einsum("BGRTS,BSGK->BGRTK", exp_BGRTS, v_BSGK, **options)
        out_BHTK = (out_BGRTK.reshape(batch, heads, num_rows, head_dim) / total_BHT1).astype(v_BSGK.dtype)
        return jnp.moveaxis(out_BHTK, 1, 2)


@dataclasses.dataclass(frozen=True)
class Blockwise(Implementation):
    """Scan over blocks of rows, each recomputed in the backward pass: memory grows with block_size x S.

    The program has one scan for each run of blocks and does not grow with T. With a window and more than one bucket,
    each block reads only the block_size + window keys that it needs, so time grows linearly with T. With one bucket,
    and if positions are given, every block reads all keys.
    """

    block_size: int = 64  # rows in a block
    num_buckets: int = 1  # runs of blocks: n buckets compute (n + 1) / 2n of all pairs; see `causal_runs`

    def __post_init__(self):
        positive(self, "model.attention", "block_size", "num_buckets")

    def attend_rows(self, q_BTHK, k_BSGK, v_BSGK, positions, score_mod, mask):
        """See `Implementation`."""
        batch, num_rows, heads, head_dim = q_BTHK.shape
        num_keys = k_BSGK.shape[1]
        block = min(self.block_size, num_rows)
        num_blocks = -(-num_rows // block)
        q_pos_T, k_pos_S, q_start_BT, k_start_BS = positions
        # Transpose to the heads-first layout of the matmuls once, not in every block. The last block is padded with
        # copies of the last row, which are removed from the result.
        q_BHTK, k_BGSK, v_BGSK = (jnp.moveaxis(x, 2, 1) for x in (q_BTHK, k_BSGK, v_BSGK))
        pad = (0, num_blocks * block - num_rows)

        def to_blocks(x: Array, dim: int) -> Array:
            x = jnp.pad(x, [pad if i == dim else (0, 0) for i in range(x.ndim)], mode="edge")
            return jnp.moveaxis(x.reshape(*x.shape[:dim], num_blocks, block, *x.shape[dim + 1 :]), dim, 0)

        starts = None if q_start_BT is None else to_blocks(q_start_BT, 1)
        first_columns = num_keys - (mask.row_stride or 1) * (num_rows - block * jnp.arange(num_blocks))
        all_blocks = to_blocks(q_BHTK, 2), to_blocks(q_pos_T, 0), first_columns, starts

        halo = score_mod.processor.key_halo
        window = mask.window or 0
        windowed = mask.causal and mask.window is not None and self.num_buckets > 1 and mask.row_stride is not None
        outs = []
        for start, stop, num_read in causal_runs(num_rows, num_keys, block, self.num_buckets, mask, halo):

            def keys_of(first_column, num_read=num_read):
                """Return keys, values, positions and starts of segments of the columns that a block reads."""
                arrays = (k_BGSK, 2), (v_BGSK, 2), (k_pos_S, 0), (k_start_BS, 1)
                if not windowed:
                    return [x if x is None else jax.lax.slice_in_dim(x, 0, num_read, axis=axis) for x, axis in arrays]
                begin = jnp.clip(first_column - (window - 1) - halo[0], 0, num_keys - num_read)
                read = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=begin, slice_size=num_read)
                return [x if x is None else read(x, axis=axis) for x, axis in arrays]

            @jax.checkpoint
            def attend_block(q, q_pos, first_column, q_start, keys_of=keys_of):
                k, v, k_pos, k_start = keys_of(first_column)
                q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q, k, v))
                out = Dense().attend_rows(q, k, v, Positions(q_pos, k_pos, q_start, k_start), score_mod, mask)
                return jnp.moveaxis(out, 2, 1)

            blocks = jax.tree.map(lambda x, start=start, stop=stop: x[start:stop], all_blocks)
            outs.append(jax.lax.map(lambda block, attend_block=attend_block: attend_block(*block), blocks))
        out_blocks = jnp.concatenate(outs)
        out_BHTK = jnp.moveaxis(out_blocks, 0, 2).reshape(batch, heads, num_blocks * block, head_dim)[:, :, :num_rows]
        return jnp.moveaxis(out_BHTK, 1, 2)


@dataclasses.dataclass(frozen=True)
class Fused(Implementation):
    """Fused kernel, which never writes scores to memory (`kernels/`, `docs/kernel.md`): memory grows with T.

    It supports DAPE with a `DistanceBias`. Without a processor it supports a `DistanceBias` on a TPU, and no bias on a
    GPU. Positions must be None. For other arguments it raises `NotImplementedError` with the reason.
    """

    # Kernel: "tpu", "gpu" (Triton, and cuDNN without a processor), "cuda" (see `Cuda`); None for "tpu" or "gpu", after
    # the devices. On devices of another platform the kernel is interpreted, which is slow and meant for tests.
    platform: str | None = None

    def __post_init__(self):
        allowed = f"must be one of {list(KERNELS)}, or None"
        require(self.platform is None or self.platform in KERNELS, "model.attention.platform", self.platform, allowed)

    def attend_rows(self, q_BTHK, k_BSGK, v_BSGK, positions, score_mod, mask):
        """See `Implementation`."""
        devices = device_platform()
        runs_on = "gpu" if self.platform == "cuda" else self.platform
        options = {"platform": self.platform or devices, "interpret": runs_on not in (None, devices)}
        return attend_fused(q_BTHK, k_BSGK, v_BSGK, positions, score_mod, mask, **options)


@dataclasses.dataclass(frozen=True)
class Cuda(Fused):
    """Fused kernels in CUDA C++ for NVIDIA GPUs (`kernels/cuda`): all heads and both convolutions in one kernel.

    They take bfloat16 and float16, and a `DistanceBias` also without a processor. Not chosen by `Auto` yet, because
    they have only run in an emulator: see `docs/gpu.md`.
    """

    platform: str | None = "cuda"  # see `Fused`

    def attend_rows(self, q_BTHK, k_BSGK, v_BSGK, positions, score_mod, mask):
        """See `Implementation`. Without a GPU, `Fused("cuda")` runs the kernels in the emulator."""
        if device_platform() != "gpu":
            raise NotImplementedError(f"the kernels in CUDA need an NVIDIA GPU, not the platform {device_platform()!r}")
        return super().attend_rows(q_BTHK, k_BSGK, v_BSGK, positions, score_mod, mask)


# Chosen from measurements and compiled programs: docs/kernel.md, "Blockwise attention".
# CPU: 128 rows without a processor, see `Auto.choose`.
# TPU: one bucket, since compiling the loop of each takes about ten seconds; and 32 rows, so that a block's arrays stay
# in VMEM. By the compiler's cycle estimates, 64 rows are 1.3 times as fast at T = 2048, and 16 rows at T = 8192.
# GPU: more rows than these, if memory allows: see `rows_in_block`.
BLOCKWISE = {"cpu": Blockwise(32, 4), "gpu": Blockwise(128, 4), "tpu": Blockwise(32, 1)}


@dataclasses.dataclass(frozen=True)
class Auto(Implementation):
    """Implementation chosen by platform and length for each call; logged at level INFO when first chosen.

    dense      if all rows are one block; on a GPU with a kernel, up to 128 rows
    fused      on a TPU or GPU, if a kernel supports this bias and processor
    blockwise  otherwise
    """

    block_size: int | None = None  # of blockwise attention; None: the platform's
    num_buckets: int | None = None  # of blockwise attention; None: the platform's

    def __post_init__(self):
        self.blockwise("cpu")  # checks the fields

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
        **options: Any,
    ) -> Dense | Blockwise | Fused:
        """Return the implementation for a call; the arguments are those of `kernels.why_not_fused`."""
        blockwise, (batch, num_rows, heads, _) = self.blockwise(platform), q_BTHK.shape
        if mask.window is not None and self.num_buckets is None:  # with one bucket, every block would read all keys
            blockwise = dataclasses.replace(blockwise, num_buckets=max(2, blockwise.num_buckets))
        if platform == "gpu" and self.block_size is None:  # scores and hidden features determine a block's memory
            channels = score_mod.processor.config.channels if isinstance(score_mod.processor, Dape) else 0
            rows = rows_in_block(batch * (heads + channels), num_rows, k_BSGK.shape[1], blockwise.num_buckets)
            blockwise = dataclasses.replace(blockwise, block_size=rows)
        elif platform == "cpu" and self.block_size is None and isinstance(score_mod.processor, Plain):
            blockwise = dataclasses.replace(blockwise, block_size=MIN_BLOCK_ROWS)  # no hidden features: more rows fit
        why = why_not_fused(q_BTHK, k_BSGK, score_mod, mask, platform=platform, **options)
        # On a GPU a block has many rows, and the kernel was faster than `Dense` where both were measured.
        has_gpu_kernel = platform == "gpu" and why is None
        if num_rows <= min(blockwise.block_size, MIN_BLOCK_ROWS if has_gpu_kernel else num_rows):
            implementation, why = Dense(), "all rows are one block"
        else:
            implementation = Fused() if why is None else blockwise
        _log_choice(f"{implementation}" + (f": {why}" if why else ""))
        return implementation

    def attend_rows(self, q_BTHK, k_BSGK, v_BSGK, positions, score_mod, mask):
        """See `Implementation`."""
        options = {"v_dtype": v_BSGK.dtype, "has_segments": positions.q_start_BT is not None}
        chosen = self.choose(q_BTHK, k_BSGK, score_mod, mask, platform=device_platform(), **options)
        return chosen.attend_rows(q_BTHK, k_BSGK, v_BSGK, positions, score_mod, mask)


@functools.cache
def _log_choice(choice: str) -> None:
    """Log a choice once per process, although many layers and programs make the same choice."""
    logger.info("attention: %s", choice)


def attend_on_mesh(
    implementation: Implementation,
    q_BTHK: Queries,
    k_BSGK: Keys,
    v_BSGK: Keys,
    score_mod: ScoreMod = ScoreMod(),
    mask: Mask = Mask(),
    pos_S: Int[Array, "S"] | None = None,
    starts_BS: Int[Array, "B S"] | None = None,
) -> Float[Array, "B T H K"]:
    """Compute self-attention with query rows split over the `context` and `tensor` axes; each device has all heads.

    Before and after, rows are split over context (size c) in the order of `sharding.stripe`, and heads over tensor
    (size t). In between, a device has every n-th row, n = c t, starting at its own index, and all keys and values, each
    with all heads:

        q   all-to-all over tensor        heads -> rows
        k v all-gather over tensor and over context
        out all-to-all over tensor        rows -> heads

    Attention is not split over heads, since the score convolution mixes them. Every row is computed by the
    implementation, whatever the mesh, so this is exact for every bias and processor, and so are its gradients.

    On more than one device `shard_map` is used even if only the batch is split: the compiler would sum the gradient of
    a bias, [H, T, S], over all devices, while here each device first reduces it to the gradient of the parameters.

    Args:
        implementation: implementation of attention on each device.
        q_BTHK: queries of the last T positions, in the order of `stripe`.
        k_BSGK: keys, in the same order.
        v_BSGK: values, in the same order.
        score_mod: bias, processor and scale.
        mask: which keys a query sees; the row stride is set here.
        pos_S: increasing positions, or None for 0..S-1.
        starts_BS: result of `segment_starts`, or None if each row is one segment.
    """
    sizes = axis_sizes()
    num_context, num_tensor = sizes["context"], sizes["tensor"]
    num_parts = num_context * num_tensor  # of the rows
    check_modules(score_mod)
    mask = dataclasses.replace(mask, row_stride=num_parts if pos_S is None else None)
    if math.prod(sizes.values()) == 1:
        positions = _positions(q_BTHK.shape[1], k_BSGK.shape[1], None, pos_S, starts_BS)
        return implementation.attend_rows(q_BTHK, k_BSGK, v_BSGK, positions, score_mod, mask)

    arrays, restored = _arrays(score_mod)
    k_pos_S = jnp.arange(k_BSGK.shape[1]) if pos_S is None else pos_S

    def attend_on_device(
        shared: list[Array], k_pos_S: Array, k_start_BS: Array | None, q: Array, k: Array, v: Array
    ) -> Array:
        # Mark replicated arrays as varying over devices, so that their gradients are summed over all devices.
        shared, k_pos_S = jax.lax.pcast((shared, k_pos_S), AXES, to="varying")
        batch, rows, heads, head_dim = q.shape
        q = q.reshape(batch, rows // num_tensor, num_tensor, heads, head_dim)
        q = jax.lax.all_to_all(q, "tensor", split_axis=2, concat_axis=3, tiled=True)[:, :, 0]

        def gather(x: Array) -> Array:
            x = jax.lax.all_gather(x, "tensor", axis=2, tiled=True)
            x = jax.lax.all_gather(x, "context", axis=2)  # [B, rows, context, G, K]: unstriped
            return x.reshape(batch, -1, *x.shape[3:])

        index = jax.lax.axis_index("tensor") * num_context + jax.lax.axis_index("context")

        def rows_of(x: Array) -> Array:
            """Return the elements of this device's rows, from those of all columns."""
            return x.reshape(*x.shape[:-1], -1, num_parts)[..., -q.shape[1] :, index]

        starts = None if k_start_BS is None else rows_of(k_start_BS)
        positions = Positions(rows_of(k_pos_S), k_pos_S, starts, k_start_BS)
        out = implementation.attend_rows(q, gather(k), gather(v), positions, restored(shared), mask)
        out = jax.lax.all_to_all(out[:, :, None], "tensor", split_axis=3, concat_axis=2, tiled=True)
        return out.reshape(batch, rows, heads, head_dim)

    heads_spec, everywhere = activation_spec("BTHK"), PartitionSpec()
    return jax.shard_map(
        attend_on_device,
        in_specs=(everywhere, everywhere, activation_spec("B"), heads_spec, heads_spec, heads_spec),
        out_specs=heads_spec,
    )(arrays, k_pos_S, starts_BS, q_BTHK, k_BSGK, v_BSGK)


IMPLEMENTATIONS = {"auto": Auto, "dense": Dense, "blockwise": Blockwise, "fused": Fused, "cuda": Cuda}
