"""One training step, as a pure function of state and batch. In: `optimizer.py`, a model. Next: `checkpoint.py`.

The model is split once into its static structure and a plain nested dict of parameters; everything that trains is that
dict and the optimizer's state, so a step is an ordinary `jax.jit` function on donated arrays.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array, Bool, Float, Int

from dape_jax.model.loss import nll, nll_of_features
from dape_jax.model.transformer import Params, Transformer, TransformerConfig, model_structure
from dape_jax.sharding import parameter_shardings, replicated

# Dynamic loss scaling, for float16: the loss is multiplied so that small gradients are not rounded to 0. The scale
# halves at an overflow, and doubles after so many steps without one (GPT-NeoX's window).
FIRST_SCALE, LARGEST_SCALE, STEPS_TO_DOUBLE = 2.0**16, 2.0**32, 1000


class Health(NamedTuple):
    """What a step remembers of those before it, to tell whether it is one to skip.

    Args:
        mean_loss_nats: running mean of the loss over applied steps, decay 0.98.
        applied: steps in all that changed the parameters.
        skipped: steps in all that did not, bad ones and overflows.
        bad_in_a_row: bad steps just before this one.
        loss_scale: what the loss is multiplied with in float16; None in other dtypes.
        steps_at_scale: applied since the scale last changed.
    """

    mean_loss_nats: Float[Array, ""]
    applied: Int[Array, ""]
    skipped: Int[Array, ""]
    bad_in_a_row: Int[Array, ""]
    loss_scale: Float[Array, ""] | None
    steps_at_scale: Int[Array, ""]


class TrainState(NamedTuple):
    """What a training step reads and writes."""

    params: Params
    opt_state: optax.OptState
    health: Health


def init_params(config: TransformerConfig, seed: int, mesh: Mesh) -> Params:
    """Fresh parameters, each device making its own shards."""
    _, abstract = model_structure(config)
    return jax.jit(lambda: _fresh_params(config, seed), out_shardings=parameter_shardings(abstract, mesh))()


def _fresh_params(config: TransformerConfig, seed: int) -> Params:
    return nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(seed)), nnx.Param))


def abstract_state(config: TransformerConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and places of a state; nothing is allocated. The moments are sharded like their parameters.

    A plain `jax.jit(optimizer.init)` would replicate them: nothing in the program says otherwise.
    """
    _, params = model_structure(config)
    opt_state = jax.eval_shape(optimizer.init, params)
    health = jax.eval_shape(lambda: _healthy(config))
    shardings = TrainState(
        parameter_shardings(params, mesh),
        optax.tree_utils.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            opt_state,
            parameter_shardings(params, mesh),
            transform_non_params=lambda _: replicated(mesh),
        ),
        jax.tree.map(lambda _: replicated(mesh), health),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        TrainState(params, opt_state, health),
        shardings,
    )


def init_state(config: TransformerConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """A fresh state, each device making its own shards."""

    def make() -> TrainState:
        params = _fresh_params(config, seed)
        return TrainState(params, optimizer.init(params), _healthy(config))

    return jax.jit(make, out_shardings=shardings_of(abstract_state(config, optimizer, mesh)))()


def _healthy(config: TransformerConfig) -> Health:
    zero = jnp.zeros((), jnp.int32)
    return Health(
        mean_loss_nats=jnp.zeros(()),
        applied=zero,
        skipped=zero,
        bad_in_a_row=zero,
        loss_scale=jnp.asarray(FIRST_SCALE) if config.dtype == "float16" else None,
        steps_at_scale=zero,
    )


def shardings_of(state: TrainState) -> TrainState:
    """Where every array of a state lives."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    *,
    accumulation_steps: int = 1,
    logits_chunk_tokens: int = 8192,
    spike_nats: float | None = None,
    seed: int = 0,
) -> Wrapped:
    """Make `step(state, batch) -> (state, metrics)`, jitted; the state given is consumed.

    Call it in the mesh of the run (`jax.set_mesh`).

    The gradient is that of the mean over the whole batch, computed in `accumulation_steps` parts of equal size.

    A step is bad if its loss or its gradient is not finite, or if its loss is `spike_nats` above the running mean of
    those before. A bad step leaves parameters and optimizer as they are, and is counted in `health`. In float16, a
    gradient that is not finite halves the loss scale and the step is skipped too; it is bad only when the scale is 1.

    Args:
        graphdef: the model's structure.
        optimizer: of `optimizer.make_optimizer`.
        shardings: where the state lives, before and after.
        accumulation_steps: parts in which the gradient is computed.
        logits_chunk_tokens: see `nll_of_features`.
        spike_nats: see above; None for never.
        seed: of dropout, with the number of the step.

    Returns:
        The step. Where a batch has `weights` beside `inputs` and `targets`, the loss is their mean; where it has
        `positions`, those of its first row are what its inputs stand at. The metrics, as device arrays: `loss_nats` per
        token, the `gradient_norm` before clipping, whether the
        step was `applied` and whether it was `bad`, `num_applied` and `skipped` in all and `bad_in_a_row`; in float16
        the `loss_scale`.
    """

    def part(
        params: Params, batch: dict[str, Array], scale: Float[Array, ""] | None, number: Int[Array, ""]
    ) -> tuple[Array, Params]:
        def loss_of(params: Params) -> tuple[Float[Array, ""], Float[Array, ""]]:
            model = nnx.merge(graphdef, params)
            key = None if model.config.dropout == 0 else jax.random.fold_in(jax.random.key(seed), number)
            features_BTD = model.features(batch["inputs"], positions_of(batch), key)
            nll_BT = nll_of_features(model, features_BTD, batch["targets"], logits_chunk_tokens)
            weights_BT = batch["weights"] if "weights" in batch else None
            loss = jnp.average(nll_BT, weights=weights_BT)
            return (loss if scale is None else loss * scale), loss

        gradients, loss = jax.grad(loss_of, has_aux=True)(params)
        return loss, gradients if scale is None else jax.tree.map(lambda g: g / scale, gradients)

    def step(state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        health = state.health
        first_number = (health.applied + health.skipped) * accumulation_steps
        if accumulation_steps == 1:
            loss, gradients = part(state.params, batch, health.loss_scale, first_number)
        else:
            # Part i takes every accumulation_steps-th row, so that it is spread over the devices as the batch is.
            parts = jax.tree.map(lambda x: x.reshape(-1, accumulation_steps, *x.shape[1:]).swapaxes(0, 1), batch)

            def add(
                total: tuple[Array, Params], batch_and_number: tuple[dict[str, Array], Int[Array, ""]]
            ) -> tuple[tuple[Array, Params], None]:
                # Without the barrier, libtpu 0.0.51 tries to move the sum over devices out of the loop, and crashes.
                batch, number = batch_and_number
                found = jax.lax.optimization_barrier(part(state.params, batch, health.loss_scale, number))
                return jax.tree.map(jnp.add, total, found), None

            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            total, _ = jax.lax.scan(add, zero, (parts, first_number + jnp.arange(accumulation_steps)))
            loss, gradients = jax.tree.map(lambda x: x / accumulation_steps, total)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        gradient_norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        overflows = jnp.zeros((), bool) if health.loss_scale is None else ~is_finite & (health.loss_scale > 1)
        is_bad = ~is_finite & ~overflows
        if spike_nats is not None:
            is_bad |= (health.applied > 0) & (loss > health.mean_loss_nats + spike_nats)
        applied = ~(is_bad | overflows)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(applied, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        health = _next_health(health, loss, applied, is_bad, overflows)
        metrics = {"loss_nats": loss, "gradient_norm": gradient_norm, "applied": applied, "bad": is_bad}
        metrics |= {"num_applied": health.applied, "skipped": health.skipped, "bad_in_a_row": health.bad_in_a_row}
        if state.health.loss_scale is not None:
            metrics |= {"loss_scale": state.health.loss_scale}
        return TrainState(params, opt_state, health), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def _next_health(
    health: Health,
    loss: Float[Array, ""],
    applied: Bool[Array, ""],
    is_bad: Bool[Array, ""],
    overflows: Bool[Array, ""],
) -> Health:
    mean = jnp.where(health.applied > 0, 0.98 * health.mean_loss_nats + 0.02 * loss, loss)
    scale, steps_at_scale = health.loss_scale, jnp.where(overflows, 0, health.steps_at_scale + applied)
    if scale is not None:
        doubles = steps_at_scale == STEPS_TO_DOUBLE
        scale = jnp.clip(scale * jnp.where(overflows, 0.5, jnp.where(doubles, 2.0, 1.0)), 1.0, LARGEST_SCALE)
        steps_at_scale = jnp.where(doubles, 0, steps_at_scale)
    return Health(
        mean_loss_nats=jnp.where(applied, mean, health.mean_loss_nats),
        applied=health.applied + applied,
        skipped=health.skipped + ~applied,
        bad_in_a_row=jnp.where(applied, 0, health.bad_in_a_row + is_bad),
        loss_scale=scale,
        steps_at_scale=steps_at_scale,
    )


def positions_of(batch: dict[str, Array]) -> Int[Array, "T"] | None:
    """Positions of a batch's inputs, the same for all of its rows; None for 0..T-1."""
    return batch["positions"][0] if "positions" in batch else None


def make_nll_step(graphdef: nnx.GraphDef, last_tokens: int, logits_chunk_tokens: int = 1024) -> Wrapped:
    """Make `step(params, batch) -> nll_BT` of the last `last_tokens` targets of every row, jitted.

    Only those positions are unembedded; see `nll_of_features`.
    """

    def step(params: Params, batch: dict[str, Array]) -> Float[Array, "B T"]:
        model = nnx.merge(graphdef, params)
        features_BTD = model.features(batch["inputs"])[:, -last_tokens:]
        return nll_of_features(model, features_BTD, batch["targets"][:, -last_tokens:], logits_chunk_tokens)

    return jax.jit(step)


def make_sums_step(graphdef: nnx.GraphDef) -> Wrapped:
    """Make `step(params, batch) -> sums` over tapes of a task, jitted.

    The sums, a float32 vector: of the loss in nats, of its weights, of right answers and of those that count.
    """

    def step(params: Params, batch: dict[str, Array]) -> Float[Array, "4"]:
        logits_BTV = nnx.merge(graphdef, params)(batch["inputs"], positions_of(batch))
        is_right_BT = logits_BTV.argmax(axis=-1) == batch["targets"]
        nll_BT, weights_BT, counted_BT = nll(logits_BTV, batch["targets"]), batch["weights"], batch["counted"]
        sums = (nll_BT * weights_BT, weights_BT, is_right_BT & counted_BT, counted_BT)
        return jnp.stack([of.sum(dtype=jnp.float32) for of in sums])

    return jax.jit(step)
