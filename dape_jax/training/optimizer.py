"""Optimizer of the paper: AdamW with warm-up, cosine schedule and clipping. Next: `step.py`."""

import dataclasses
import math
from typing import Any

import jax
import optax

from dape_jax.errors import require


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW and its schedule."""

    learning_rate: float  # peak learning rate
    warmup_fraction: float  # fraction of all steps in which the rate rises linearly from 0
    final_fraction: float  # last learning rate as a fraction of the peak; 1: constant after the warm-up
    beta1: float  # decay rate of the first moment
    beta2: float  # decay rate of the second moment
    epsilon: float  # constant added to the root of the second moment
    weight_decay: float  # decay, multiplied by the learning rate; see `is_decayed` for exempt parameters
    clip_norm: float  # global norm to which larger gradients are scaled down

    def __post_init__(self):
        for field in ("learning_rate", "epsilon", "clip_norm"):
            value = getattr(self, field)
            require(0 < value < math.inf, f"optimizer.{field}", value, "must be positive and finite")
        for field in ("warmup_fraction", "beta1", "beta2"):
            value = getattr(self, field)
            require(0 <= value < 1, f"optimizer.{field}", value, "must be at least 0 and below 1")
        require(0 <= self.final_fraction <= 1, "optimizer.final_fraction", self.final_fraction, "must be from 0 to 1")
        decay = self.weight_decay
        require(0 <= decay < math.inf, "optimizer.weight_decay", decay, "must be at least 0 and finite")


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate by step: linear warm-up, then cosine to `final_fraction` of the peak at the end."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=round(config.warmup_fraction * num_steps),
        decay_steps=num_steps,
        end_value=config.final_fraction * config.learning_rate,
    )


def is_decayed(path: tuple[Any, ...]) -> bool:
    """Return whether weight decay applies to the parameter at this path.

    Source: the official code exempts norms and parameters named "bias". Parameters of position biases (Kerple's p and
    a, FIRE's c, T5's table) are decayed.
    Differs: nothing.
    """
    name = path[-1].key
    return not ("_bias_" in name or name in ("bias", "scale"))


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Return gradient clipping by global norm followed by AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config, num_steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: is_decayed(path), params),
        ),
    )
