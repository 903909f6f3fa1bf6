"""One training step, as a pure function of state and batch. In: `optimizer.py`, a model. Next: `checkpoint.py`.

The model is split once into its static structure and a plain nested dict of parameters; everything that trains is that
dict and the optimizer's state, so a step is an ordinary `jax.jit` function on donated arrays.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array, Float, Int

from dape_jax.sharding import parameter_shardings, replicated
from dape_jax.transformer import Decoder, Params, TransformerConfig, model_structure


class TrainState(NamedTuple):
    """What a training step reads and writes."""

    params: Params
    opt_state: optax.OptState


def init_params(config: TransformerConfig, seed: int, mesh: Mesh) -> Params:
    """Fresh parameters, each device making its own shards."""
    _, abstract = model_structure(config)

    def make() -> Params:
        return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(seed)), nnx.Param))

    return jax.jit(make, out_shardings=parameter_shardings(abstract, mesh))()


def init_opt_state(optimizer: optax.GradientTransformation, params: Params, mesh: Mesh) -> optax.OptState:
    """Fresh optimizer state, the moments sharded like their parameters.

    A plain `jax.jit(optimizer.init)` would replicate them: nothing in the program says otherwise.
    """
    shardings = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        parameter_shardings(params, mesh),
        transform_non_params=lambda _: replicated(mesh),
    )
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def shardings_of(state: TrainState) -> TrainState:
    """Where every array of a state lives."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def nll(logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Negative log-likelihood of every target, in nats, float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV.astype(jnp.float32), targets_BT)


def mean_nll(graphdef: nnx.GraphDef, params: Params, batch: dict[str, Array]) -> Float[Array, ""]:
    """Mean nll of a batch's targets, in nats per token."""
    logits_BTV = nnx.merge(graphdef, params)(batch["inputs"])
    return nll(logits_BTV, batch["targets"]).mean()


def make_train_step(
    graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, accumulation_steps: int, shardings: TrainState
) -> Callable[[TrainState, dict[str, Array]], tuple[TrainState, dict[str, Array]]]:
    """Make `step(state, batch) -> (state, metrics)`, jitted; the state given is consumed.

    Call it in the mesh of the run (`jax.set_mesh`). `shardings` is where the state lives, before and after.

    The gradient is that of the mean over the whole batch, computed in `accumulation_steps` parts of equal size.
    Metrics: `loss_nats` per token and the `gradient_norm` before clipping, as device arrays.
    """

    def part(params: Params, batch: dict[str, Array]) -> tuple[Array, Params]:
        return jax.value_and_grad(lambda params: mean_nll(graphdef, params, batch))(params)

    def step(state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        if accumulation_steps == 1:
            loss, gradients = part(state.params, batch)
        else:
            # Part i takes every accumulation_steps-th row, so that it is spread over the devices as the batch is.
            parts = jax.tree.map(lambda x: x.reshape(-1, accumulation_steps, *x.shape[1:]).swapaxes(0, 1), batch)

            def add(total: tuple[Array, Params], batch: dict[str, Array]) -> tuple[tuple[Array, Params], None]:
                return jax.tree.map(jnp.add, total, part(state.params, batch)), None

            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            total, _ = jax.lax.scan(add, zero, parts)
            loss, gradients = jax.tree.map(lambda x: x / accumulation_steps, total)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        metrics = {"loss_nats": loss, "gradient_norm": optax.tree.norm(gradients)}
        return TrainState(params, opt_state), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def make_nll_step(graphdef: nnx.GraphDef, last_tokens: int, unembedded_at_once: int = 1024) -> Wrapped:
    """Make `step(params, batch) -> nll_BT` of the last `last_tokens` targets of every row, jitted.

    Only those positions are unembedded, and no more than `unembedded_at_once` of a row at a time, so that memory does
    not grow with length times vocabulary.
    """

    def step(params: Params, batch: dict[str, Array]) -> Float[Array, "B T"]:
        model = nnx.merge(graphdef, params)
        features_BTD = model.features(batch["inputs"])[:, -last_tokens:]
        targets_BT = batch["targets"][:, -last_tokens:]
        if last_tokens <= unembedded_at_once:
            return nll(model.logits(features_BTD), targets_BT)

        def nll_of_position(position: tuple[Float[Array, "B D"], Int[Array, "B"]]) -> Float[Array, "B"]:
            features_BD, target_B = position
            return nll(model.logits(features_BD[:, None]), target_B[:, None])[:, 0]

        positions = jnp.moveaxis(features_BTD, 1, 0), targets_BT.T
        return jax.lax.map(nll_of_position, positions, batch_size=unembedded_at_once).T

    return jax.jit(step)
