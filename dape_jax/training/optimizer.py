"""Adam as the paper trains: warm-up, cosine, decoupled weight decay, clipping. Next: `step.py`."""

import dataclasses
import math
from typing import Any

import jax
import optax

from dape_jax.errors import require


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Args of AdamW and of its schedule.

    Args:
        learning_rate: at the peak.
        warmup_fraction: of all steps, linear from 0.
        final_fraction: of the peak, where the cosine ends; 1 for a constant rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: times the learning rate, on all but norms and biases of linear and convolution layers.
        clip_norm: largest global norm of a gradient.
    """

    learning_rate: float
    warmup_fraction: float
    final_fraction: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip_norm: float

    def __post_init__(self):
        for field in ("learning_rate", "epsilon", "clip_norm"):
            require(
                0 < getattr(self, field) < math.inf, f"optimizer.{field}", getattr(self, field), "a positive number"
            )
        for field in ("warmup_fraction", "beta1", "beta2"):
            require(0 <= getattr(self, field) < 1, f"optimizer.{field}", getattr(self, field), "from 0 to below 1")
        require(0 <= self.final_fraction <= 1, "optimizer.final_fraction", self.final_fraction, "from 0 to 1")
        require(0 <= self.weight_decay < math.inf, "optimizer.weight_decay", self.weight_decay, "0 or more")


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate by step: linear up, then cosine down to `final_fraction` of the peak at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=round(config.warmup_fraction * num_steps),
        decay_steps=num_steps,
        end_value=config.final_fraction * config.learning_rate,
    )


def is_decayed(path: tuple[Any, ...]) -> bool:
    """True for what weight decay acts on.

    Source: the official code exempts norms and whatever is literally named "bias". Position-bias parameters (Kerple's p
    and a, FIRE's c, T5's table) are decayed there, and so they are here.
    """
    name = path[-1].key
    return not ("_bias_" in name or name in ("bias", "scale"))


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW."""
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
