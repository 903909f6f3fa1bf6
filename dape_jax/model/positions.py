"""Rotary position embedding of queries and keys, and its variants for sequences beyond the train length.

In: `x_BTHK` (queries or keys) and their positions, `pos_T` or one row for each sequence, `pos_BT`. Out: the rotated
`x_BTHK`. Next: `scores.py`.

To add a variant of RoPE, subclass `StretchedRope` with its own frequencies and add a line to `STRETCHES` at the end of
the file.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dape_jax.errors import positive, require
from dape_jax.hardware import LANES
from dape_jax.sharding import at_least_float32, axis_sizes, full_precision, split_batch

Heads = Float[Array, "B T H K"]
RowPositions = Int[Array, "T"] | Int[Array, "B T"]
RowAngles = Float[Array, "_ T 1 K"]


@dataclasses.dataclass(frozen=True)
class NoRotary:
    """Identity in place of rotary embedding."""

    why_not_cached = None

    def __call__(self, x_BTHK: Heads, pos: RowPositions) -> Heads:
        """Return `x_BTHK` unchanged."""
        return x_BTHK


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    With R = fraction K; a, b the first and second half of the first R dims of a head's vector; w_m = base^(-2m/R),
    m < R/2:

        a' = a cos(pos w) - b sin(pos w)        b' = b cos(pos w) + a sin(pos w)

    Source: Su et al. 2021, in GPT-NeoX's rotate-half form.
    Differs: angles are computed on use, in float32 or better; the official code caches them up to a maximum length,
      in the parameters' dtype, and cannot run beyond it. In float32 the error of an angle is 6e-8 times the position:
      0.006 at 100,000, as in every float32 implementation.
    """

    why_not_cached = None  # reason why appending a token changes the queries and keys of earlier ones, or None
    base: float = 10_000.0  # longest wavelength divided by 2 pi, in positions
    fraction: float = dataclasses.field(default=1.0, kw_only=True)  # of a head's dims to rotate: the first ones

    def __post_init__(self):
        require(self.base > 1, "model.rotary.base", self.base, "must be above 1")
        require(0 < self.fraction <= 1, "model.rotary.fraction", self.fraction, "must be above 0 and at most 1")

    def num_rotated(self, head_dim: int) -> int:
        """Return R, the number of rotated dims of a head with K dims, rounded down.

        Raises:
            InputError: R is odd or 0.
        """
        rotated = int(self.fraction * head_dim)
        name = "model.head_dim"
        if self.fraction != 1:
            name += f" x model.rotary.fraction = {head_dim} x {self.fraction}"
        require(rotated % 2 == 0 and rotated > 0, name, rotated, "must be even and positive for rotary embedding")
        return rotated

    def frequencies(self, num_rotated: int) -> np.ndarray:
        """Return w, the R/2 angles per position, in double precision."""
        return self.base ** (-np.arange(0, num_rotated, 2) / num_rotated)

    @property
    def scale(self) -> float:
        """Return the factor that multiplies rotated queries and keys."""
        return 1.0

    def at_length(self, length: int) -> "Rope":
        """Return the embedding for sequences of this length, in tokens."""
        return self

    def __call__(self, x_BTHK: Heads, pos: RowPositions) -> Heads:
        """Rotate `x_BTHK` by its positions, computing in float32 or better; return the dtype of `x_BTHK`.

        Raises:
            InputError: there is not one position for each row.
        """
        pos, (batch, num_rows) = jnp.asarray(pos), x_BTHK.shape[:2]
        allowed = f"must be [T] or [B, T], as x_BTHK.shape = {x_BTHK.shape} is [B, T, H, K]"
        is_right = x_BTHK.ndim == 4 and pos.shape in ((num_rows,), (1, num_rows), (batch, num_rows))
        require(is_right, "pos.shape", pos.shape, allowed)
        args = ([x_BTHK], [pos]) if pos.ndim == 1 else ([x_BTHK, pos], [])
        return split_batch(self._rotate, *args)

    def _rotate(self, x_BTHK: Heads, pos: RowPositions) -> Heads:
        rope, (heads, head_dim) = self.at_length(pos.shape[-1]), x_BTHK.shape[2:]
        dtype = at_least_float32(x_BTHK.dtype)
        num_rotated = rope.num_rotated(head_dim)
        half, others = num_rotated // 2, (0, head_dim - num_rotated)
        frequencies_K = np.pad(np.tile(rope.frequencies(num_rotated), 2), others)
        scale_111K = jnp.asarray([[[np.pad(np.full(num_rotated, rope.scale), others, constant_values=1)]]], dtype)
        turn_KK = np.pad(np.eye(num_rotated, k=half) - np.eye(num_rotated, k=-half), others)
        angle = jnp.multiply.outer(pos.astype(dtype), jnp.asarray(frequencies_K, dtype))
        angle_BT1K = angle.reshape(-1, pos.shape[-1], 1, head_dim)  # one row for all sequences if pos is [T]
        # Heads of a device side by side, as many as fit into the lanes of a TPU.
        n = math.gcd(heads, heads // axis_sizes()["tensor"], max(LANES // head_dim, 1))
        cos, sin = (jnp.tile(scale_111K * function(angle_BT1K), n) for function in (jnp.cos, jnp.sin))
        turn = jnp.asarray(np.kron(np.eye(n), turn_KK), x_BTHK.dtype)
        x = x_BTHK.reshape(*x_BTHK.shape[:2], heads // n, n * head_dim)
        return _rotated(x, cos, sin, turn).reshape(x_BTHK.shape)


@jax.custom_jvp
def _rotated(x_BTHK: Heads, cos: RowAngles, sin: RowAngles, turn_KK: Float[Array, "K K"]) -> Heads:
    """Return cos x + sin (-b, a, 0), with a and b the halves of the first dims of each head in the last dim."""
    return (x_BTHK.astype(cos.dtype) * cos + _turned(x_BTHK, turn_KK, cos.dtype) * sin).astype(x_BTHK.dtype)


@_rotated.defjvp
def _rotated_jvp(primals, tangents):
    """The gradient multiplies by sin after its matmul, as the function does: faster than JAX's own, and more exact.

    That is the transpose of a tangent that multiplies before; the halves of sin are equal. The other arguments have no
    tangents: positions are integers.
    """
    (x_BTHK, cos, sin, turn_KK), (tangent_BTHK, *_) = primals, tangents
    dx_BTHK = tangent_BTHK.astype(cos.dtype)  # once, so that its gradient is rounded once
    turned_BTHK = _turned(dx_BTHK * sin, turn_KK, cos.dtype)
    return _rotated(x_BTHK, cos, sin, turn_KK), (dx_BTHK * cos + turned_BTHK).astype(x_BTHK.dtype)


def _turned(x_BTHK: Heads, turn_KK: Float[Array, "K K"], dtype: DTypeLike) -> Heads:
    """Return (-b, a, 0) as an exact matmul, of entries 0, 1 and -1: TPUs move parts of a vector slowly."""
    options = {"precision": full_precision(turn_KK.dtype), "preferred_element_type": dtype}
    return jnp.einsum("BTHK,KJ->BTHJ", x_BTHK, turn_KK.astype(x_BTHK.dtype), **options)


@dataclasses.dataclass(frozen=True)
class StretchedRope(Rope):
    """Base class of variants of RoPE with a stretch factor, for long sequences."""

    factor: float = 1.0  # sequence length over train length, 1 or more; 1 is RoPE

    def __post_init__(self):
        super().__post_init__()
        require(1 <= self.factor < math.inf, "model.rotary.factor", self.factor, "must be 1 or more")


@dataclasses.dataclass(frozen=True)
class PositionInterpolation(StretchedRope):
    """RoPE with all positions divided by a factor.

        w'_m = w_m / factor

    Source: Chen et al. 2023, equation 4.
    """

    def frequencies(self, num_rotated: int) -> np.ndarray:
        """See the class."""
        return super().frequencies(num_rotated) / self.factor


@dataclasses.dataclass(frozen=True)
class NtkAware(StretchedRope):
    """RoPE with a larger base: the slowest angle is divided by the factor, the fastest is unchanged.

        base' = base factor^(R / (R - 2))

    Source: bloc97's "NTK-aware scaled RoPE" (2023), as in Peng et al. 2024, definition 1.
    """

    def frequencies(self, num_rotated: int) -> np.ndarray:
        """See the class."""
        allowed = "must be above 2 for NTK-aware rotary embedding"
        require(num_rotated > 2, "rotated dims of a head", num_rotated, allowed)
        base = self.base * self.factor ** (num_rotated / (num_rotated - 2))
        return base ** (-np.arange(0, num_rotated, 2) / num_rotated)


@dataclasses.dataclass(frozen=True)
class Yarn(StretchedRope):
    """YaRN: RoPE with slow angles interpolated, fast ones unchanged, and scaled queries and keys.

    The angle with r turns over the train length has the index m(r) = R log(train_length / (2 pi r)) / (2 log base).
    A ramp goes from low = max(floor(m(beta_fast)), 0) to high = min(ceil(m(beta_slow)), R - 1):

        g_m = clip((m - low) / (high - low), 0, 1)      w'_m = (1 - g_m) w_m + g_m w_m / factor
        q, k are multiplied by attention_factor, 0.1 log(factor) + 1 if it is None

    Source: Peng et al. 2024, definition 3 and section 3.4, and their released code.
    Differs: from the paper, and equal to the released code: the ramp is over dims, not over turns; and if no angle
        turns beta_slow times (train_length < 2 pi beta_slow), high is negative and no angle is changed.
    """

    train_length: int = 512  # of the model, in tokens
    beta_fast: float = 32.0  # angles with more turns than this are unchanged
    beta_slow: float = 1.0  # angles with fewer turns than this are divided by the factor
    attention_factor: float | None = None  # of queries and keys; None: after the factor
    truncate: bool = True  # round low and high; gpt-oss does not

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model.rotary", "train_length", "attention_factor", "beta_slow")
        allowed = f"must be above beta_slow = {self.beta_slow}"
        require(self.beta_fast > self.beta_slow, "model.rotary.beta_fast", self.beta_fast, allowed)

    def frequencies(self, num_rotated: int) -> np.ndarray:
        """See the class."""

        def dim_of(turns: float) -> float:
            return num_rotated * math.log(self.train_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        low, high = (math.floor(low), math.ceil(high)) if self.truncate else (low, high)
        low, high = max(low, 0), min(high, num_rotated - 1)
        ramp_m = np.clip((np.arange(num_rotated // 2) - low) / ((high - low) or 1e-3), 0, 1)
        frequency_m = super().frequencies(num_rotated)
        return (1 - ramp_m) * frequency_m + ramp_m * frequency_m / self.factor

    @property
    def scale(self) -> float:
        """See the class."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor


@dataclasses.dataclass(frozen=True)
class Llama3Rope(StretchedRope):
    """RoPE of Llama 3.1: slow angles are divided by a factor, fast ones are unchanged.

    With r_m = train_length w_m / (2 pi), the turns of an angle over the train length, and l and h the low and high
    frequency factors:

        g_m = clip((r_m - l) / (h - l), 0, 1)      w'_m = g_m w_m + (1 - g_m) w_m / factor

    Source: Llama 3.1's released code; `rope_type` "llama3" of Hugging Face transformers.
    """

    factor: float = 8.0  # divisor of slow angles
    low_frequency_factor: float = 1.0  # angles with fewer turns than this are divided by the factor
    high_frequency_factor: float = 4.0  # angles with more turns than this are unchanged
    train_length: int = 8192  # of the model before it was trained with this embedding, in tokens

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model.rotary", "train_length", "low_frequency_factor")
        high, allowed = self.high_frequency_factor, f"must be above low_frequency_factor = {self.low_frequency_factor}"
        require(high > self.low_frequency_factor, "model.rotary.high_frequency_factor", high, allowed)

    def frequencies(self, num_rotated: int) -> np.ndarray:
        """See the class."""
        frequency_m = super().frequencies(num_rotated)
        turns_m = self.train_length * frequency_m / (2 * math.pi)
        width = self.high_frequency_factor - self.low_frequency_factor
        kept_m = np.clip((turns_m - self.low_frequency_factor) / width, 0, 1)
        return kept_m * frequency_m + (1 - kept_m) * frequency_m / self.factor


_WITH_LENGTH = "its frequencies change with the length of the sequence"


@dataclasses.dataclass(frozen=True)
class DynamicNtk(StretchedRope):
    """NTK-aware RoPE whose factor follows the length N of the sequence; RoPE up to the train length.

        factor'(N) = factor N / train_length - (factor - 1)

    A row therefore depends on the length: longer sequences change the logits of their first tokens.

    Source: `rope_type` "dynamic" of Hugging Face transformers.
    """

    why_not_cached = f"model.rotary.name = dynamic: {_WITH_LENGTH}"
    train_length: int = 512  # of the model, in tokens

    def at_length(self, length: int) -> Rope:
        """See the class."""
        factor = self.factor * length / self.train_length - (self.factor - 1)
        return NtkAware(self.base, max(1.0, factor), fraction=self.fraction)


@dataclasses.dataclass(frozen=True)
class LongRope(Rope):
    """LongRoPE: every angle is divided by its own factor, one of two lists, by the length of the sequence.

        w'_m = w_m / short_factors[m], or w_m / long_factors[m] if it is longer than the train length
        q, k are multiplied by attention_factor

    Source: Ding et al. 2024 (arXiv 2402.13753); `rope_type` "longrope" of Hugging Face transformers.
    """

    why_not_cached = f"model.rotary.name = longrope: {_WITH_LENGTH}"
    short_factors: tuple[float, ...] = ()  # R / 2 numbers, or none for ones
    long_factors: tuple[float, ...] = ()  # the same, of sequences longer than the train length
    train_length: int = 512  # of the model before it was made longer, in tokens
    attention_factor: float = 1.0  # of queries and keys

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model.rotary", "train_length", "attention_factor")

    def at_length(self, length: int) -> Rope:
        """See the class."""
        return dataclasses.replace(self, short_factors=self.long_factors) if length > self.train_length else self

    def frequencies(self, num_rotated: int) -> np.ndarray:
        """See the class."""
        for field in ("short_factors", "long_factors"):
            factors, size = getattr(self, field), num_rotated // 2
            is_right = len(factors) in (0, size) and all(factor > 0 for factor in factors)
            require(is_right, f"model.rotary.{field}", factors, f"must be {size} positive numbers, or none")
        return super().frequencies(num_rotated) / np.array(self.short_factors or 1.0)

    @property
    def scale(self) -> float:
        """See the class."""
        return self.attention_factor


def stretched(rope: Rope, name: str, length: int, train_length: int) -> Rope:
    """Return a variant of a trained model's rotary embedding, for sequences longer than the train length.

    Args:
        rope: the model's rotary embedding in training.
        name: "pi", "ntk" or "yarn"; "rope" returns `rope` unchanged.
        length: sequence length, in tokens; the factor is length / train_length, at least 1.
        train_length: train length of the model, in tokens.

    Raises:
        InputError: the name is unknown.
    """
    require(name in STRETCHES, "rotary", name, f"must be one of {list(STRETCHES)}")
    if name == "rope":
        return rope
    factor = max(1.0, length / train_length)
    if name == "yarn":
        return Yarn(rope.base, factor, train_length, fraction=rope.fraction)
    return STRETCHES[name](rope.base, factor, fraction=rope.fraction)


STRETCHES = {"rope": Rope, "pi": PositionInterpolation, "ntk": NtkAware, "yarn": Yarn}
ROTARY = {"none": NoRotary} | STRETCHES | {"llama3": Llama3Rope, "dynamic": DynamicNtk, "longrope": LongRope}
