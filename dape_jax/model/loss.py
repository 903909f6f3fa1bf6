"""Loss of a language model: negative log-likelihoods, without all logits in memory. Next: `training/step.py`."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dape_jax.model.scores import soft_cap
from dape_jax.model.transformer import Transformer
from dape_jax.sharding import activation_spec, full_precision, in_mesh, parameter_spec


def nll(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"], vocab_axis: str | tuple[()] = ()
) -> Float[Array, "B T"]:
    """Return the negative log-likelihood of every target, in nats, float32.

        nll = log(sum over v of exp(logits_v)) - logits_target

    The target's logit is selected by comparison, not by indexing, so that each device reads only its own part of a
    vocabulary that is split over devices.

    Args:
        logits_BTV: logits of the whole vocabulary, or of this device's part of it.
        targets_BT: token ids, counted from the first id of that part.
        vocab_axis: mesh axis that splits the vocabulary, inside a `shard_map`.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    largest_BT = jax.lax.stop_gradient(logits_BTV).max(axis=-1)
    largest_BT = jax.lax.pmax(largest_BT, vocab_axis) if vocab_axis else largest_BT
    largest_BT = checkpoint_name(largest_BT, "normaliser")
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])[None, None]
    total_BT = jnp.exp(logits_BTV - largest_BT[..., None]).sum(axis=-1)
    target_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(axis=-1)
    total_BT, target_BT = jax.lax.psum((total_BT, target_BT), vocab_axis) if vocab_axis else (total_BT, target_BT)
    total_BT = checkpoint_name(total_BT, "normaliser")
    return largest_BT + jnp.log(total_BT) - target_BT


def nll_of_features(
    model: Transformer, features_BTD: Float[Array, "B T D"], targets_BT: Int[Array, "B T"], logits_chunk_tokens: int
) -> Float[Array, "B T"]:
    """Return the negative log-likelihood of every target from the model's features, in nats, float32.

    On a mesh, each device computes the logits of its tokens and, if `tensor` splits the vocabulary, of its part of the
    vocabulary. The unembedding is gathered once, and its gradient is summed over devices once.

    Args:
        model: model with the unembedding.
        features_BTD: result of `Transformer.features`.
        targets_BT: token ids of the targets.
        logits_chunk_tokens: tokens per device whose logits are in memory at a time, at least one position of every
            sequence. Logits of more tokens are computed in chunks and recomputed in the backward pass, so memory does
            not grow with length times vocabulary. The values are the same.
    """
    dtype, options = model.config.compute_dtype, {"chunk_tokens": logits_chunk_tokens, "cap": model.config.logit_cap}
    features_BTD, weight_DV = features_BTD.astype(dtype), model.output_DV.astype(dtype)
    bias_V = None if model.output_bias_V is None else model.output_bias_V[...]
    is_token_V = jnp.arange(weight_DV.shape[1]) < model.config.num_outputs
    if model.config.num_outputs < len(is_token_V):  # the rest is padding, of probability 0
        bias_V = jnp.where(is_token_V, 0.0 if bias_V is None else bias_V, -jnp.inf)
    if not in_mesh():
        return _nll_on_device(features_BTD, weight_DV, bias_V, targets_BT, **options)

    def on_device(features_BTD: Array, weight_DV: Array, bias_V: Array | None, targets_BT: Array) -> Array:
        first_id = jax.lax.axis_index("tensor") * weight_DV.shape[1]
        weight_DV = jax.lax.all_gather(weight_DV, "fsdp", axis=0, tiled=True)
        return _nll_on_device(features_BTD, weight_DV, bias_V, targets_BT - first_id, **options, vocab_axis="tensor")

    of_weight = parameter_spec("unembedding_DV", 2)
    return jax.shard_map(
        on_device,
        in_specs=(activation_spec("BTD"), of_weight, PartitionSpec(of_weight[1]), activation_spec("BT")),
        out_specs=activation_spec("BT"),
    )(features_BTD, weight_DV, bias_V, targets_BT)


def _nll_on_device(
    features_BTD: Array,
    weight_DV: Array,
    bias_V: Array | None,
    ids_BT: Array,
    *,
    chunk_tokens: int,
    cap: float | None,
    vocab_axis: str | tuple[()] = (),
) -> Array:
    """Return `nll_of_features` on one device; ids are counted from the first id of its part of the vocabulary."""

    def nll_of_chunk(features_BTD: Array, weight_DV: Array, ids_BT: Array) -> Array:
        precision = full_precision(features_BTD.dtype)
        logits_BTV = jnp.einsum(
            "BTD,DV->BTV", features_BTD, weight_DV, precision=precision, preferred_element_type=jnp.float32
        )
        logits_BTV = soft_cap(logits_BTV, cap)
        return nll(logits_BTV if bias_V is None else logits_BTV + bias_V[None, None], ids_BT, vocab_axis)

    batch, length, _ = features_BTD.shape
    if batch * length <= chunk_tokens:
        return nll_of_chunk(features_BTD, weight_DV, ids_BT)
    # The gradient is accumulated over chunks in the weight's dtype, so the weight must be float32.
    weight_DV, dtype = weight_DV.astype(jnp.float32), weight_DV.dtype

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("normaliser"))
    def nll_of_position(position: tuple[Array, Array]) -> Array:
        features_BD, ids_B = position
        return nll_of_chunk(features_BD[:, None], weight_DV.astype(dtype), ids_B[:, None])[:, 0]

    positions = jnp.moveaxis(features_BTD, 1, 0), ids_BT.T
    return jax.lax.map(nll_of_position, positions, batch_size=max(1, chunk_tokens // batch)).T
