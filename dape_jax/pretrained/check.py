"""Comparison of an imported model with transformers: `dape-import --check`. In: the source and our parameters."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dape_jax.errors import InputError, require
from dape_jax.model.transformer import Params, TransformerConfig, model_structure
from dape_jax.pretrained.files import Source

logger = logging.getLogger(__name__)

_MAX_TOKENS = 64  # of a sequence
_TOLERANCE = 1e-3  # of the largest logit


def compare_logits(source: Source, params: Params, config: TransformerConfig, mesh: Mesh, train_length: int) -> None:
    """Compare the logits of one batch of random tokens with those of transformers' model, both in float32.

    Raises:
        InputError: transformers cannot load the source, or a logit differs by more than `_TOLERANCE`.
    """
    import torch  # large, like transformers, and needed only here
    import transformers

    from dape_jax.pretrained.modeling_dape import DapeForCausalLM

    loader = transformers.AutoModelForCausalLM
    if source.config["model_type"] == "dape":
        loader = DapeForCausalLM  # not the directory's code, which is not trusted
    elif "text_config" in source.config:
        loader = transformers.AutoModelForImageTextToText
    shape = (2 * mesh.size, min(train_length, _MAX_TOKENS))
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, shape)
    try:
        model = loader.from_pretrained(
            source.directory,
            use_safetensors=True,  # no pickled file
            trust_remote_code=False,  # no code of the checkpoint
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()
        with torch.no_grad():
            expected_BTV = model(torch.from_numpy(tokens_BT)).logits.numpy()
    except Exception as error:  # of many kinds
        raise InputError(f"check: transformers cannot run the source: {' '.join(str(error).split())[:200]}") from error
    graphdef, _ = model_structure(dataclasses.replace(config, dtype="float32"))
    with jax.default_matmul_precision("highest"):
        apply = jax.jit(lambda params, x_BT: nnx.merge(graphdef, params)(x_BT))
        found_BTV = np.asarray(apply(params, jnp.asarray(tokens_BT, jnp.int32)))[..., : expected_BTV.shape[-1]]
    largest = float(np.abs(expected_BTV).max())
    difference = float(np.abs(found_BTV - expected_BTV).max())
    message = (
        f"the largest difference from transformers {transformers.__version__} is {difference:.2g} in logits of up to"
    )
    logger.info("%s: %s %.2g", source.directory, message, largest)
    allowed = f"{message} {largest:.2g}; must be at most {_TOLERANCE} of them"
    require(difference <= _TOLERANCE * largest, "check", True, allowed)
