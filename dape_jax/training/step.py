"""One training step, a pure function of state and batch. In: `optimizer.py`, a model. Next: `checkpoint.py`.

The model is split once into its static structure and a nested dict of parameters. Only that dict and the optimizer's
state change in training, so a step is an ordinary `jax.jit` function on donated arrays.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Wrapped
from jaxtyping import Array, Bool, Float, Int

from dape_jax.config import RunConfig, TaskRunConfig
from dape_jax.model.loss import nll, nll_of_features
from dape_jax.model.transformer import (
    Params,
    Transformer,
    TransformerConfig,
    merge_params,
    model_structure,
    split_params,
)
from dape_jax.sharding import parameter_shardings, replicated
from dape_jax.training.optimizer import make_optimizer, restarted

# Dynamic loss scaling for float16: the loss is multiplied by a scale, so that small gradients are not rounded to 0. The
# scale halves at an overflow, and doubles after STEPS_TO_DOUBLE steps without one (GPT-NeoX's loss_scale_window).
# Differs: GPT-NeoX configures a hysteresis of 2, so that its scale does not halve at the first overflow.
FIRST_SCALE, LARGEST_SCALE, STEPS_TO_DOUBLE = 2.0**16, 2.0**32, 1000


class Health(NamedTuple):
    """Counts of applied and skipped steps, and float16's loss scale."""

    applied: Int[Array, ""]  # steps that changed the parameters
    skipped: Int[Array, ""]  # steps that did not: bad steps and overflows
    bad_in_a_row: Int[Array, ""]  # consecutive bad steps so far
    loss_scale: Float[Array, ""] | None  # factor of the loss in float16, or None in other dtypes
    steps_at_scale: Int[Array, ""]  # applied steps since the scale last changed


class TrainState(NamedTuple):
    """State that a training step updates."""

    params: Params
    opt_state: optax.OptState
    health: Health


@dataclasses.dataclass(frozen=True)
class Training:
    """Model and optimizer of a run on a mesh, which determine its state and its step."""

    model: TransformerConfig
    optimizer: optax.GradientTransformation
    mesh: Mesh | AbstractMesh
    # Members of `PARAMETER_KINDS`, or () for all parameters. The others are frozen: they have no gradient, do not
    # contribute to its norm, and have no weight decay or optimizer state.
    train_only: tuple[str, ...] = ()
    accumulation_steps: int = 1  # parts of equal size in which the gradient of a batch is computed
    logits_chunk_tokens: int = 2048  # see `nll_of_features`
    seed: int = 0  # of the parameters and of dropout

    @classmethod
    def of(cls, run: RunConfig | TaskRunConfig, mesh: Mesh | AbstractMesh) -> "Training":
        """Return the training that a config describes."""
        train, optimizer = run.train, make_optimizer(run.optimizer, run.train.num_steps)
        sizes = train.accumulation_steps, train.logits_chunk_tokens
        return cls(run.model, optimizer, mesh, run.init.trained_kinds, *sizes, train.seed)


def abstract_params(config: TransformerConfig, mesh: Mesh | AbstractMesh) -> Params:
    """Return the shapes, dtypes and shardings of a model's parameters, without allocating them."""
    _, params = model_structure(config)
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), params, parameter_shardings(params, mesh)
    )


def abstract_state(training: Training) -> TrainState:
    """Return the shapes, dtypes and shardings of a state, without allocating it. Moments are sharded like parameters.

    `jax.jit(optimizer.init)` would replicate the moments, because they are constants that depend on no sharded input.
    """

    def replicate(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(sharding=replicated(training.mesh))

    params = abstract_params(training.model, training.mesh)
    trained, _ = split_params(params, training.train_only)
    opt_state = optax.tree_utils.tree_map_params(
        training.optimizer,
        lambda moment, param: moment.update(sharding=param.sharding),
        jax.eval_shape(training.optimizer.init, trained),
        trained,
        transform_non_params=replicate,
    )
    return TrainState(params, opt_state, jax.tree.map(replicate, jax.eval_shape(lambda: _init_health(training.model))))


def init_state(training: Training, given: Params | None = None, opt_state: optax.OptState | None = None) -> TrainState:
    """Return the initial state; each device computes its own shards.

    Parameters in `given` and an `opt_state`, which are donated, replace the initial ones.
    """

    def make(given: Params, opt_state: optax.OptState | None) -> TrainState:
        model = Transformer(training.model, rngs=nnx.Rngs(training.seed))
        params = merge_params(nnx.to_pure_dict(nnx.state(model, nnx.Param)), given)
        trained, _ = split_params(params, training.train_only)
        opt_state = training.optimizer.init(trained) if opt_state is None else restarted(opt_state)
        return TrainState(params, opt_state, _init_health(training.model))

    shardings = shardings_of(abstract_state(training))
    return jax.jit(make, out_shardings=shardings, donate_argnums=(0, 1))({} if given is None else given, opt_state)


def _init_health(config: TransformerConfig) -> Health:
    zero, scale = jnp.int32(0), jnp.float32(FIRST_SCALE) if config.dtype == "float16" else None
    return Health(applied=zero, skipped=zero, bad_in_a_row=zero, loss_scale=scale, steps_at_scale=zero)


def shardings_of(state: TrainState) -> TrainState:
    """Return the sharding of each array of a state."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def make_train_step(training: Training) -> Wrapped:
    """Return the jitted `step(state, batch) -> (state, metrics)`, which donates the given state.

    Call it inside the mesh of the run (`jax.set_mesh`).

    The gradient is that of the mean over the whole batch, computed in `accumulation_steps` parts of equal size.

    A step is bad if its loss or gradient is not finite. It leaves parameters and optimizer unchanged, and `health`
    counts it. In float16 a loss scale above 1 can cause the non-finite value: such a step, an overflow, is also skipped
    and halves the scale, but is not bad.

    Dropout's key is derived from the seed and the number of the step and of the part.

    Returns:
        The step. Its batch has `inputs` and `targets`, optionally `weights` (the loss is their weighted mean) and
        `positions` (the same in every row), or the `segment_ids` of packed documents. Its metrics, as device arrays:
        `loss_nats` per token, the `gradient_norm` before clipping, whether the step was `applied` and whether it was
        `bad`, the totals `num_applied` and `skipped`, and `bad_in_a_row`; in float16 also this step's `loss_scale`.
    """
    optimizer, train_only, accumulation_steps = training.optimizer, training.train_only, training.accumulation_steps
    graphdef, _ = model_structure(training.model)

    def loss_and_gradients(
        params: Params, batch: dict[str, Array], scale: Float[Array, ""] | None, number: Int[Array, ""]
    ) -> tuple[Array, Params]:
        trained, frozen = split_params(params, train_only)

        def loss_of(trained: Params) -> tuple[Float[Array, ""], Float[Array, ""]]:
            model = nnx.merge(graphdef, merge_params(trained, frozen))
            key = None if model.config.dropout == 0 else jax.random.fold_in(jax.random.key(training.seed), number)
            segment_ids = batch.get("segment_ids")
            features_BTD = model.features(batch["inputs"], positions_of(batch), key, segment_ids=segment_ids)
            nll_BT = nll_of_features(model, features_BTD, batch["targets"], training.logits_chunk_tokens)
            weights_BT = batch["weights"] if "weights" in batch else None
            loss = jnp.average(nll_BT, weights=weights_BT)
            return (loss if scale is None else loss * scale), loss

        gradients, loss = jax.grad(loss_of, has_aux=True)(trained)
        return loss, gradients if scale is None else jax.tree.map(lambda g: g / scale, gradients)

    def step(state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        health = state.health
        trained, frozen = split_params(state.params, train_only)
        first_number = (health.applied + health.skipped) * accumulation_steps
        if accumulation_steps == 1:
            loss, gradients = loss_and_gradients(state.params, batch, health.loss_scale, first_number)
        else:
            # Part i consists of every accumulation_steps-th row, so that each part is sharded like the batch.
            parts = jax.tree.map(lambda x: x.reshape(-1, accumulation_steps, *x.shape[1:]).swapaxes(0, 1), batch)
            shares = None
            if "weights" in batch:  # parts of packed documents have different padding
                weights = parts["weights"].sum(axis=(1, 2))
                shares = weights * accumulation_steps / weights.sum()

            def add(
                total: tuple[Array, Params], part: tuple[dict[str, Array], Float[Array, ""] | None, Int[Array, ""]]
            ) -> tuple[tuple[Array, Params], None]:
                # Without the barrier, libtpu 0.0.51 moves the sum over devices out of the loop and crashes.
                batch, share, number = part
                one = jax.lax.optimization_barrier(loss_and_gradients(state.params, batch, health.loss_scale, number))
                one = one if share is None else jax.tree.map(lambda x: share * x, one)
                return jax.tree.map(jnp.add, total, one), None

            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained))
            total, _ = jax.lax.scan(add, zero, (parts, shares, first_number + jnp.arange(accumulation_steps)))
            loss, gradients = jax.tree.map(lambda x: x / accumulation_steps, total)
        updates, opt_state = optimizer.update(gradients, state.opt_state, trained)
        updated = jax.tree.map(jnp.add, trained, updates)
        gradient_norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        overflows = jnp.zeros((), bool) if health.loss_scale is None else ~is_finite & (health.loss_scale > 1)
        is_bad = ~is_finite & ~overflows
        applied = ~(is_bad | overflows)
        updated, opt_state = jax.tree.map(
            lambda new, old: jnp.where(applied, new, old), (updated, opt_state), (trained, state.opt_state)
        )
        health = _next_health(health, applied, is_bad, overflows)
        metrics = {"loss_nats": loss, "gradient_norm": gradient_norm, "applied": applied, "bad": is_bad}
        metrics |= {"num_applied": health.applied, "skipped": health.skipped, "bad_in_a_row": health.bad_in_a_row}
        if state.health.loss_scale is not None:
            metrics |= {"loss_scale": state.health.loss_scale}
        return TrainState(merge_params(updated, frozen), opt_state, health), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings_of(abstract_state(training)), None))


def _next_health(
    health: Health, applied: Bool[Array, ""], is_bad: Bool[Array, ""], overflows: Bool[Array, ""]
) -> Health:
    scale, steps_at_scale = health.loss_scale, jnp.where(overflows, 0, health.steps_at_scale + applied)
    if scale is not None:
        doubles = steps_at_scale == STEPS_TO_DOUBLE
        scale = jnp.clip(scale * jnp.where(overflows, 0.5, jnp.where(doubles, 2.0, 1.0)), 1.0, LARGEST_SCALE)
        steps_at_scale = jnp.where(doubles, 0, steps_at_scale)
    return Health(
        applied=health.applied + applied,
        skipped=health.skipped + ~applied,
        bad_in_a_row=jnp.where(applied, 0, health.bad_in_a_row + is_bad),
        loss_scale=scale,
        steps_at_scale=steps_at_scale,
    )


def positions_of(batch: dict[str, Array]) -> Int[Array, "T"] | None:
    """Return the positions of a batch's inputs, the same for all rows, or None for 0..T-1, restarting at segments."""
    return batch["positions"][0] if "positions" in batch and "segment_ids" not in batch else None


def make_nll_step(graphdef: nnx.GraphDef, last_tokens: int) -> Wrapped:
    """Return the jitted `step(params, batch) -> nll_BT` for the last `last_tokens` targets of each row.

    Logits are computed for those positions only; see `nll_of_features`.
    """

    def step(params: Params, batch: dict[str, Array]) -> Float[Array, "B T"]:
        model = nnx.merge(graphdef, params)
        features_BTD = model.features(batch["inputs"], num_last=last_tokens, segment_ids=batch.get("segment_ids"))
        targets_BT = batch["targets"][:, -last_tokens:]
        return nll_of_features(model, features_BTD, targets_BT, logits_chunk_tokens=1024)

    return jax.jit(step)


def make_sums_step(graphdef: nnx.GraphDef) -> Wrapped:
    """Return the jitted `step(params, batch) -> sums` for validation.

    The sums are a float32 vector: loss in nats and its weights; for a batch of an algorithmic task, which has tokens
    that are `counted`, also the number of correct answers and the number of answers.
    """

    def step(params: Params, batch: dict[str, Array]) -> Float[Array, "sums"]:
        targets_BT = batch["targets"]
        if "counted" not in batch:
            nll_BT = make_nll_step(graphdef, targets_BT.shape[1])(params, batch)
            weights_BT = batch["weights"] if "weights" in batch else jnp.ones_like(nll_BT)
            return jnp.stack([(nll_BT * weights_BT).sum(), weights_BT.sum()])
        logits_BTV = nnx.merge(graphdef, params)(batch["inputs"], positions_of(batch))
        is_correct_BT = logits_BTV.argmax(axis=-1) == targets_BT
        nll_BT, weights_BT, counted_BT = nll(logits_BTV, targets_BT), batch["weights"], batch["counted"]
        sums = (nll_BT * weights_BT, weights_BT, is_correct_BT & counted_BT, counted_BT)
        return jnp.stack([values.sum(dtype=jnp.float32) for values in sums])

    return jax.jit(step)
