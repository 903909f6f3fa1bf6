"""Position biases: terms added to attention scores that depend on the positions of query and key.

In: query positions `q_pos_T` and key positions `k_pos_S`. Out: `bias_HTS`. Next: `contextual.py`.

A bias is a function of positions only: there is no maximum length and no stored table over positions, so a model
trained at one length runs at any other. Each bias has an NNX module with its parameters and its formula, and a frozen
config that names the module.

To add one, write these two and add a line to `BIASES` at the end of the file. Tests, benchmarks and command lines read
that dict.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dape_jax.errors import one_of, positive, require
from dape_jax.sharding import full_precision, wide

Distance = Int[Array, "*shape"]  # at least 0
HeadBias = Float[Array, "H *shape"]  # the bias of every head at each distance
QueryPositions = Int[Array, "T"]
KeyPositions = Int[Array, "S"]
PositionBias = Float[Array, "H T S"]


@runtime_checkable
class Bias(Protocol):
    """Position bias: any callable with this signature. `attention.py` and the processors call it."""

    def __call__(
        self, q_pos_T: Int[Array, "T"], k_pos_S: Int[Array, "S"], *, causal: bool = True
    ) -> Float[Array, "H T S"]:
        """Return the bias of every head for every (query, key) pair; see `distances` for `causal`."""
        ...


class BiasConfig:
    """Base class of the configs of biases, which are frozen dataclasses, as `transformer.py` uses them.

    `build` calls `module` with the number of heads, the width of a head, the config and the random numbers; a config
    without `module` defines `build`.
    """

    module: ClassVar[Any]
    shared_by_layers: ClassVar[bool] = False  # True: one module for all layers
    reads_content: ClassVar[bool] = False  # True: a contextual encoding, with a bias for each sequence

    def build(self, num_heads: int, head_dim: int, rngs: nnx.Rngs) -> Any:
        """Make the module, or return None if there is no bias."""
        return self.module(num_heads, head_dim, self, rngs)


def distances(q_pos_T: Int[Array, "T"], k_pos_S: Int[Array, "S"], *, causal: bool = True) -> Int[Array, "T S"]:
    """Return max(query position - key position, 0), or the absolute difference if attention is not causal.

    In causal attention, future keys have distance 0, as in the official code. They are masked, so only a processor with
    `leak=True` uses that value.
    """
    difference_TS = q_pos_T[:, None] - k_pos_S[None, :]
    return jnp.maximum(difference_TS, 0) if causal else jnp.abs(difference_TS)


class DistanceBias(nnx.Module):
    """Base class of biases that depend only on the distance between query and key.

    The fused kernels support only these: they read the bias from a table over distances.
    """

    def of_distance(self, distance: Distance) -> HeadBias:
        """Return the bias of every head at each distance."""
        raise NotImplementedError(f"{type(self).__name__} must define of_distance")

    def __call__(self, q_pos_T: QueryPositions, k_pos_S: KeyPositions, *, causal: bool = True) -> PositionBias:
        """Return the bias for every (query, key) pair."""
        return self.of_distance(distances(q_pos_T, k_pos_S, causal=causal))


def fan_in_uniform(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param:
    """Return a parameter that is initialised U(+-1/sqrt(fan_in))."""
    limit = fan_in**-0.5
    return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit))


def _per_head(x_H: Float[Array, "H"], distance: Array) -> Float[Array, "H ..."]:
    """Reshape one number per head to broadcast against `distance[None]`."""
    return x_H.reshape(-1, *(1,) * distance.ndim)


@dataclasses.dataclass(frozen=True)
class NopeConfig(BiasConfig):
    """Config of a model without a position bias: NoPE, or rotary embedding alone."""

    def build(self, num_heads: int, head_dim: int, rngs: nnx.Rngs) -> None:
        """Return None: attention adds no bias, and DAPE reads only the scores."""


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slopes of ALiBi in double precision, shape [H].

    If H is a power of two: 2^(-8 (n+1) / H), n = 0..H-1. Otherwise: the slopes of the next smaller power of two P, then
    every other slope of 2P, starting with the first.

    Source: Press et al. 2022 and their released code.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (n + 1) / power) for n in range(power)]
    between = [2.0 ** (-8 * (n + 1) / (2 * power)) for n in range(0, 2 * power, 2)]
    return np.asarray((slopes + between)[:num_heads])


class Alibi(DistanceBias):
    """ALiBi, the linear bias -slope_h dist, with the slopes of `alibi_slopes`. It has no parameters.

    Source: Press et al. 2022, section 3.
    """

    def __init__(self, num_heads: int, head_dim: int, config: "AlibiConfig", rngs: nnx.Rngs):
        self.num_heads = num_heads

    def of_distance(self, distance: Distance) -> HeadBias:
        """See the class."""
        slopes_H = jnp.asarray(alibi_slopes(self.num_heads), dtype=float)
        return -_per_head(slopes_H, distance) * distance.astype(slopes_H.dtype)[None]


@dataclasses.dataclass(frozen=True)
class AlibiConfig(BiasConfig):
    """Config of ALiBi, for any number of heads."""

    module = Alibi


def _clamp(x_H: Float[Array, "H"], low: float, high: float = math.inf) -> Float[Array, "H"]:
    """Clamp the value to low..high, in float32 or better; the gradient is the identity's."""
    x_H = wide(x_H)
    return x_H + jax.lax.stop_gradient(jnp.clip(x_H, low, high) - x_H)


def kerple(distance: Distance, p_H: Float[Array, "H"], a_H: Float[Array, "H"]) -> HeadBias:
    """Return the logarithmic kernel, -p_h log(1 + a_h dist), with p and a clamped to 0.01 or above.

    Source: Chi et al. 2022, equation 4 (r1 = p, r2 = a).
    Differs: the official code overwrites the parameters with max(parameter, 0.01) in every forward pass. Here only the
      value is clamped, not the parameter. In both, the parameter's gradient is the gradient at the clamped value, so a
      parameter below 0.01 can rise again.
    """
    p, a = (_per_head(_clamp(x_H, 0.01), distance) for x_H in (p_H, a_H))
    return -p * jnp.log1p(a * distance.astype(p.dtype)[None])


def kerple_power(distance: Distance, p_H: Float[Array, "H"], a_H: Float[Array, "H"]) -> HeadBias:
    """Return the power kernel, -a_h dist^p_h, with a clamped to 0.01 or above and p to 0.01..2.

    Source: Chi et al. 2022, equation 3 (r1 = a, r2 = p), their variant without a factor on the scores.
    Differs: see `kerple`.
    """
    a, p = _per_head(_clamp(a_H, 0.01), distance), _per_head(_clamp(p_H, 0.01, 2.0), distance)
    return -a * distance.astype(p.dtype)[None] ** p


class Kerple(DistanceBias):
    """Kerple, -p_h log(1 + a_h dist), see `kerple`: p ~ U(0, 2), a ~ U(0, 1), one pair for each head."""

    def __init__(self, num_heads: int, head_dim: int, config: BiasConfig, rngs: nnx.Rngs):
        self.p_H = nnx.Param(jax.random.uniform(rngs.params(), (num_heads,), maxval=2.0))
        self.a_H = nnx.Param(jax.random.uniform(rngs.params(), (num_heads,), maxval=1.0))

    def of_distance(self, distance: Distance) -> HeadBias:
        """See `kerple`."""
        return kerple(distance, self.p_H[...], self.a_H[...])


class KerplePower(Kerple):
    """Kerple's power kernel, -a_h dist^p_h, see `kerple_power`; initialised as `Kerple`."""

    def of_distance(self, distance: Distance) -> HeadBias:
        """See `kerple_power`."""
        return kerple_power(distance, self.p_H[...], self.a_H[...])


@dataclasses.dataclass(frozen=True)
class KerpleConfig(BiasConfig):
    """Config of Kerple with the logarithmic kernel."""

    module = Kerple


@dataclasses.dataclass(frozen=True)
class KerplePowerConfig(BiasConfig):
    """Config of Kerple with the power kernel."""

    module = KerplePower


class Sandwich(DistanceBias):
    """Sandwich: inner products of sinusoidal position embeddings, divided by the head's compression ratio.

        bias_h = sum over m < d/2 of cos((q_pos - k_pos) 10000^(-2m/d)) / r_h      d = position_dim, r_h = 8 (h + 1) / H

    It has no parameters.

    Source: Chi et al. 2023, section 5 and their listing (appendix E).
    Differs: embeddings are of positions relative to the first query, so that in float32 the error of an angle is 6e-8
        times the range of the positions in one call, not times their size. The bias is an even function of the
        distance, causal or not.
    """

    def __init__(self, num_heads: int, head_dim: int, config: "SandwichConfig", rngs: nnx.Rngs):
        self.num_heads, self.position_dim = num_heads, config.position_dim

    def _angles(self, pos: Int[Array, "*shape"]) -> Float[Array, "*shape m"]:
        frequency_m = 10_000.0 ** (-np.arange(0, self.position_dim, 2) / self.position_dim)
        return jnp.multiply.outer(pos.astype(float), jnp.asarray(frequency_m, float))

    def _compressed(self, sums: Float[Array, "*shape"]) -> HeadBias:
        ratios_H = jnp.asarray(8 * np.arange(1, self.num_heads + 1) / self.num_heads, float)
        return sums[None] / _per_head(ratios_H, sums)

    def of_distance(self, distance: Distance) -> HeadBias:
        """See the class. Needs position_dim / 2 numbers of memory per distance, so `__call__` has its own formula."""
        return self._compressed(jnp.cos(self._angles(distance)).sum(-1))

    def __call__(self, q_pos_T: QueryPositions, k_pos_S: KeyPositions, *, causal: bool = True) -> PositionBias:
        """See the class."""
        angles = self._angles(q_pos_T - q_pos_T[0]), self._angles(k_pos_S - q_pos_T[0])
        q_Td, k_Sd = (jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1) for angle in angles)
        return self._compressed(jnp.matmul(q_Td, k_Sd.T, precision=jax.lax.Precision.HIGHEST))


@dataclasses.dataclass(frozen=True)
class SandwichConfig(BiasConfig):
    """Config of Sandwich."""

    position_dim: int = 128  # width of the sinusoidal embeddings, the paper's d-bar
    module = Sandwich

    def __post_init__(self):
        positive(self, "model.bias", "position_dim")
        require(self.position_dim % 2 == 0, "model.bias.position_dim", self.position_dim, "must be even")


def t5_buckets(distance: Distance, num_buckets: int = 32, max_distance: int = 128) -> Distance:
    """Return T5's bucket of each distance (causal form).

    With E = num_buckets / 2, the bucket of a distance n < E is n. Above, buckets are logarithmic up to max_distance:

        min(E + floor(log(n / E) / log(max_distance / E) * (num_buckets - E)), num_buckets - 1)

    Source: Raffel et al. 2020, section 2.1 and their released code.
    Differs: the first distance of every logarithmic bucket is computed on the host in double precision and compared as
      an integer, so the edges do not depend on a device's logarithm. `tests/golden/tables` compares the result with the
      official code in float32.
    """
    exact = num_buckets // 2
    steps = num_buckets - exact
    first = [math.ceil(round(exact * (max_distance / exact) ** (m / steps), 9)) for m in range(1, steps)]
    large = exact + jnp.searchsorted(jnp.asarray(first, distance.dtype), distance, side="right")
    return jnp.where(distance < exact, distance, large.astype(distance.dtype))


class T5(DistanceBias):
    """T5's relative position bias: sqrt(head dim) table[bucket(dist), h], with one entry for each bucket and head.

    The table is initialised Xavier normal.

    Source: Raffel et al. 2020, section 2.1, with the factor of the official DAPE code.
    Differs: if attention is not causal, T5 has separate buckets for keys on the right; here both sides share them, as
        in every other bias.
    """

    def __init__(self, num_heads: int, head_dim: int, config: "T5Config", rngs: nnx.Rngs):
        self.table_NH = nnx.Param(nnx.initializers.xavier_normal()(rngs.params(), (config.num_buckets, num_heads)))
        self.max_distance = config.max_distance
        self.scale = math.sqrt(head_dim)

    def of_distance(self, distance: Distance) -> HeadBias:
        """See the class."""
        table_NH = wide(self.table_NH[...])
        return self.scale * jnp.moveaxis(table_NH[t5_buckets(distance, table_NH.shape[0], self.max_distance)], -1, 0)


@dataclasses.dataclass(frozen=True)
class T5Config(BiasConfig):
    """Config of T5's bias. As in the official code, all layers share one table, multiplied by sqrt(head dim)."""

    num_buckets: int = 32  # rows of the table
    max_distance: int = 128  # this distance and all larger ones are in the last bucket
    module = T5
    shared_by_layers: ClassVar[bool] = True

    def __post_init__(self):
        require(self.num_buckets >= 4, "model.bias.num_buckets", self.num_buckets, "must be 4 or more")
        allowed = f"must be more than num_buckets / 2 = {self.num_buckets // 2}"
        require(self.max_distance > self.num_buckets // 2, "model.bias.max_distance", self.max_distance, allowed)


FIRE_ACTIVATIONS = {"relu": jax.nn.relu, "leaky_relu": jax.nn.leaky_relu}


class Fire(nnx.Module):
    """FIRE: an MLP of the log distance relative to the query's log position.

        z = log(|c dist| + 1) / (log(|c max(q_pos, |threshold|)| + 1) + 1e-6)        bias = MLP(z), 1 -> M -> H

    c and the threshold's multiplier are learned scalars; the MLP is initialised U(+-1/sqrt(fan_in)).

    Source: Li et al. 2024, equation 5.
    Differs: FIRE is defined for causal attention. For causal=False, max(q_pos, k_pos) replaces q_pos in the norm, so
        that z stays in 0..1.
    """

    def __init__(self, num_heads: int, head_dim: int, config: "FireConfig", rngs: nnx.Rngs):
        uniform = functools.partial(fan_in_uniform, rngs)
        self.c = nnx.Param(jnp.asarray(config.initial_c, jnp.float32))
        self.threshold_multiplier = nnx.Param(jnp.ones((), jnp.float32))
        self.hidden_M = uniform((config.width,), 1)
        self.hidden_bias_M = uniform((config.width,), 1)
        self.output_MH = uniform((config.width, num_heads), config.width)
        self.output_bias_H = uniform((num_heads,), config.width)
        self.threshold = config.threshold
        self.activation = config.activation

    def __call__(self, q_pos_T: QueryPositions, k_pos_S: KeyPositions, *, causal: bool = True) -> PositionBias:
        """Return the bias for every (query, key) pair."""
        c, threshold = wide(self.c[...]), wide(self.threshold_multiplier[...]) * self.threshold
        distance_TS = distances(q_pos_T, k_pos_S, causal=causal).astype(c.dtype)
        last_TS = q_pos_T[:, None] if causal else jnp.maximum(q_pos_T[:, None], k_pos_S[None, :])
        norm_TS = jnp.maximum(last_TS.astype(c.dtype), jnp.abs(threshold))
        z_TS = jnp.log1p(jnp.abs(c * distance_TS)) / (jnp.log1p(jnp.abs(c * norm_TS)) + 1e-6)
        weight_M, bias_M = wide(self.hidden_M[...]), wide(self.hidden_bias_M[...])
        hidden_TSM = z_TS[..., None] * weight_M[None, None, :] + bias_M[None, None, :]
        hidden_TSM = FIRE_ACTIVATIONS[self.activation](hidden_TSM)
        precision = full_precision(hidden_TSM.dtype)
        bias_HTS = jnp.einsum("TSM,MH->HTS", hidden_TSM, wide(self.output_MH[...]), precision=precision)
        return bias_HTS + wide(self.output_bias_H[...])[:, None, None]


@dataclasses.dataclass(frozen=True)
class FireConfig(BiasConfig):
    """Config of FIRE. The official V2 configs use threshold 256 at train length 512."""

    threshold: int = 256  # query positions below it are normalised as if they were equal to it
    width: int = 32  # M, hidden width of the MLP
    initial_c: float = 0.1  # initial value of the learned c
    activation: str = "relu"  # "relu" for FIRE alone, "leaky_relu" (0.01) under DAPE, as in the official code
    module = Fire

    def __post_init__(self):
        positive(self, "model.bias", "threshold", "width")
        one_of(self, "model.bias", activation=FIRE_ACTIVATIONS)


BIASES: dict[str, type[BiasConfig]] = {  # `contextual.py` adds to it
    "nope": NopeConfig,
    "alibi": AlibiConfig,
    "kerple": KerpleConfig,
    "kerple_power": KerplePowerConfig,
    "sandwich": SandwichConfig,
    "t5": T5Config,
    "fire": FireConfig,
}
