"""AdamW with a learning-rate schedule and gradient clipping. Next: `step.py`."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dape_jax.errors import one_of, require

SCHEDULES = ("cosine", "wsd")
RATE_FIELDS = ("learning_rate", "warmup_fraction", "final_fraction", "schedule", "warmup_steps", "decay_steps")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW and its schedule. The defaults are the paper's."""

    learning_rate: float  # peak learning rate
    warmup_fraction: float = 0.01  # fraction of all steps in which the rate rises linearly from 0
    final_fraction: float = 0.1  # last learning rate as a fraction of the peak; 1: constant after the warm-up
    beta1: float = 0.9  # decay rate of the first moment
    beta2: float = 0.95  # decay rate of the second moment
    epsilon: float = 1e-8  # constant added to the root of the second moment
    weight_decay: float = 0.1  # decay, multiplied by the learning rate; see `is_decayed` for exempt parameters
    clip_norm: float = 1.0  # global norm to which larger gradients are scaled down; 1e9 turns it off
    # after the warm-up: "cosine", as in the paper, or "wsd": constant, then linear in the last `decay_steps`
    schedule: str = "cosine"
    warmup_steps: int | None = None  # None: `warmup_fraction` of all steps
    decay_steps: int = 0  # steps in which the rate of "wsd" falls

    def __post_init__(self):
        one_of(self, "optimizer", schedule=SCHEDULES)
        for field in ("learning_rate", "epsilon", "clip_norm"):
            value = getattr(self, field)
            require(0 < value < math.inf, f"optimizer.{field}", value, "must be positive and finite")
        for field in ("warmup_fraction", "beta1", "beta2"):
            value = getattr(self, field)
            require(0 <= value < 1, f"optimizer.{field}", value, "must be at least 0 and below 1")
        require(0 <= self.final_fraction <= 1, "optimizer.final_fraction", self.final_fraction, "must be from 0 to 1")
        decay = self.weight_decay
        require(0 <= decay < math.inf, "optimizer.weight_decay", decay, "must be at least 0 and finite")
        require((self.warmup_steps or 0) >= 0, "optimizer.warmup_steps", self.warmup_steps, "must not be negative")
        is_used, allowed = self.schedule == "wsd" or self.decay_steps == 0, "must be 0 unless optimizer.schedule is wsd"
        require(self.decay_steps >= 0 and is_used, "optimizer.decay_steps", self.decay_steps, allowed)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the steps of the warm-up in a run of `num_steps`."""
        return round(self.warmup_fraction * num_steps) if self.warmup_steps is None else self.warmup_steps


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate by step: linear warm-up from 0 to the peak, then one of two schedules.

    Both end at `final_fraction` of the peak. "cosine" falls in all steps after the warm-up. "wsd" (warm-up, stable,
    decay) is constant until it falls linearly in the last `decay_steps`, so its constant part can be extended, and a
    decay can begin after any of its steps.

    Source: cosine, the paper's official configurations; wsd, MiniCPM (arXiv 2404.06395).
    Differs: the decay of MiniCPM is exponential.
    """
    peak, warmup_steps = config.learning_rate, config.num_warmup_steps(num_steps)
    if config.schedule == "wsd":
        warmup = optax.linear_schedule(0.0, peak, max(warmup_steps, 1))
        decay = optax.linear_schedule(peak, config.final_fraction * peak, max(config.decay_steps, 1))
        boundaries = [warmup_steps, num_steps - config.decay_steps]
        return optax.join_schedules([warmup, optax.constant_schedule(peak), decay], boundaries)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=warmup_steps,
        decay_steps=num_steps,
        end_value=config.final_fraction * peak,
    )


def restarted(opt_state: optax.OptState) -> optax.OptState:
    """Return an optimizer state with the same moments, whose schedule starts from the beginning."""
    of_schedule = optax.ScaleByScheduleState.__name__
    return optax.tree.set(opt_state, lambda path, _: path[-1].tuple_name == of_schedule, count=jnp.int32(0))


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
