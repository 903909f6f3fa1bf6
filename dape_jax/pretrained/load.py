"""Conversion of a Hugging Face checkpoint to a run at step 0; `import_command.py` is its command line.

The run has no training text: `data.path` is None. Its optimizer and schedule are defaults for continued training.
`compare_logits` is `dape-import --check`.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int
from tqdm import tqdm

from dape_jax.config import RunConfig, resolved
from dape_jax.configs import common
from dape_jax.data.conventions import conventions_of, save_conventions, special_tokens
from dape_jax.data.tokenizers import END_TOKENS, TOKENIZER_FILE, HfTokenizer, Tokenizer, read_tokenizer, save_tokenizer
from dape_jax.errors import InputError, require, require_package
from dape_jax.files import read_json
from dape_jax.model.transformer import Params, TransformerConfig, flat_params, model_structure
from dape_jax.pretrained.families import BUFFERS, Tensor, family_of, text_config
from dape_jax.pretrained.files import HEADS, Source, find_source, open_source, short
from dape_jax.pretrained.options import ImportFlags
from dape_jax.sharding import make_mesh, mesh_of_all_devices
from dape_jax.storage import absolute, to_path
from dape_jax.training import checkpoint
from dape_jax.training.step import abstract_params

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")  # without a tokenizer.json
_ADDED_TOKEN_FILES = ("tokenizer_config.json", "added_tokens.json")  # the second is of older releases of transformers
# Text of which the ids of a converted tokenizer are compared.
_SAMPLE = "The ids of these words, 1234 of them:\n  é, 日本 and 🙂"
_CHECK_TOKENS = 64  # largest length of the random sequences of `compare_logits`
_CHECK_TOLERANCE = 1e-3  # of the largest logit


def import_run(given: ImportFlags) -> None:
    """Make a run at step 0 from a Hugging Face checkpoint, on as many devices as the width allows.

    Raises:
        InputError: the checkpoint is damaged or not supported, the workdir contains a run, or the logits differ.
    """
    workdir, directory = to_path(given.workdir, "--workdir"), find_source(given.source)
    for package in ("torch", "transformers") if given.check else ():
        require_package(package, "hf", "check", given.check)
    source = open_source(directory)
    family = family_of(source.config)
    embedding = family.tensors["embedding_VD"]
    source = source.named_like(embedding.name or "", family.tensors.get("unembedding_DV", embedding).name or "")
    length = family.max_length if given.train_length is None else given.train_length
    require(0 < length <= family.max_length, "train_length", length, f"must be 1 to {family.max_length}")
    num_ids = family.model["vocab_size"]
    if given.tokenizer is None:
        chosen = source_tokenizer(directory, num_ids)
    else:
        chosen = read_tokenizer(given.tokenizer, "tokenizer")
    require(checkpoint.read_config(workdir) is None, "workdir", str(workdir), "must not contain a run")
    tokenizer = chosen.name if chosen.name == "bytes" else str(absolute(workdir) / TOKENIZER_FILE)
    run = RunConfig.from_dict(run_spec(family.model | {"dtype": given.dtype}, length, tokenizer))
    allowed = f"must be at least the tokenizer's {chosen.vocab_size}"
    require(chosen.vocab_size <= run.model.vocab_size, "vocab_size", run.model.vocab_size, allowed)
    check_tensors(source, family.tensors, run.model.num_layers)
    mesh = make_mesh(mesh_of_all_devices(run.model.width))
    with jax.set_mesh(mesh), checkpoint.run_lock(workdir):
        params = read_params(source, family.tensors, run.model, mesh)
        if given.check:
            compare_logits(source, params, run.model, mesh, length)
        save_tokenizer(chosen, workdir)
        save_conventions(conventions_of(directory, text_config(source.config), chosen), workdir)
        record = {"config": resolved(run), "data_digest": "", "imported": {"source": str(directory.resolve())}}
        checkpoint.save_params(workdir, params, record)
        checkpoint.write_config(workdir, record)  # last: an import that was killed before can be repeated


def source_tokenizer(directory: Path, num_ids: int) -> Tokenizer:
    """Return the tokenizer of a checkpoint: its tokenizer.json, or one that transformers makes of its other files.

    Added tokens that have no row among the `num_ids` embeddings, such as Gemma 3's of images, are left out.

    Raises:
        InputError: there is no tokenizer, or it cannot be converted.
    """
    file = directory / TOKENIZER_FILE
    content = read_json(file) if file.exists() else _convert_tokenizer(directory)
    added = _added_tokens(directory, content.get("added_tokens") or [])
    content["added_tokens"] = [token for token in added if token["id"] < num_ids]
    names = {token["content"] for token in content["added_tokens"]}
    if others := ", ".join(token["content"] for token in added if token["content"] not in names):
        logger.warning("%s: tokens without an embedding are left out: %s", directory, short(others))
    end = special_tokens(directory).get("eos_token") if names.isdisjoint(END_TOKENS) else None
    return HfTokenizer(json.dumps(content), str(file), end)


def _added_tokens(directory: Path, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the added tokens of tokenizer.json and the files beside it; the flags in these replace those in it."""
    settings, legacy = (read_json(file) if (file := directory / name).exists() else {} for name in _ADDED_TOKEN_FILES)
    tokens = {token["content"]: token for token in added}
    special = {*special_tokens(directory).values(), *map(str, settings.get("additional_special_tokens") or [])}
    others = {id: {"content": name, "special": name in special} for name, id in legacy.items() if name not in tokens}
    found = {int(id): token for id, token in settings.get("added_tokens_decoder", others).items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    for id, token in sorted(found.items()):
        known = tokens.get(token["content"], {"id": id, "normalized": not token["special"], **flags})
        tokens[token["content"]] = known | token
    return list(tokens.values())


def _convert_tokenizer(directory: Path) -> dict[str, Any]:
    """Return the tokenizer.json that transformers makes of a checkpoint's other files.

    A sentencepiece model is converted as it describes itself: the class that `tokenizer_class` names may be of another
    kind (LlamaTokenizer of Unigram). Some releases of transformers give other ids than sentencepiece, which is compared
    if it is installed.

    Raises:
        InputError: there are no such files, a package is missing, or the conversion fails or gives other ids.
    """
    others = [name for name in _TOKENIZER_FILES if (directory / name).exists()]
    require(bool(others), "source", str(directory), f"has no {TOKENIZER_FILE}; give --tokenizer")
    require_package("transformers", "hf", f"{directory}: tokenizer", others[0])
    import transformers  # large, and needed only here

    kind, advice = transformers.AutoTokenizer, ""
    if others[0].endswith(".model"):
        kind = type("Model", (transformers.PreTrainedTokenizerFast,), {"vocab_files_names": {"vocab_file": others[0]}})
        advice = "; it needs the package sentencepiece, or tiktoken (in a clone: git lfs pull)"
    where = f"source = {str(directory)!r}: {others[0]} cannot be converted"
    try:
        tokenizer = kind.from_pretrained(directory, trust_remote_code=False)
        content = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # of many kinds: a damaged file, or the package sentencepiece is missing
        raise InputError(f"{where}: {' '.join(str(error).split())[:200]}{advice}") from error
    if not others[0].endswith(".model"):
        return content
    with contextlib.suppress(ImportError, RuntimeError):  # sentencepiece is missing, or the model is of tiktoken
        sentencepiece = importlib.import_module("sentencepiece")
        expected = sentencepiece.SentencePieceProcessor(model_file=str(directory / others[0])).encode(_SAMPLE)
        if tokenizer.encode(_SAMPLE, add_special_tokens=False) != expected:
            raise InputError(f"{where}: update transformers: this release gives other ids than sentencepiece")
    return content


def run_spec(model: dict[str, Any], train_length: int, tokenizer: str) -> dict[str, Any]:
    """Return the config of an imported run; `configs/continued.py` reads it to continue training."""
    windows = {"last_tokens": min(256, train_length), "max_windows": 128, "blockwise_from": 1024, "block_size": 128}
    steps = {"num_steps": 1000, "eval_interval": 100, "validation_batches": 8, "checkpoint_interval": 500}
    # Learned positions have no rows for longer sequences.
    factors = (1, 2, 4, 8) if model.get("learned_positions") is None else (1,)
    return common.make(
        model=model | {"attention": {"name": "auto"}, "vocab_multiple": 1},
        data={"path": None, "tokenizer": tokenizer},
        optimizer={"learning_rate": 1e-4, "warmup_fraction": 0.05},
        train={"train_length": train_length, "batch_size": 32, **steps},
        evaluation={"lengths": tuple(train_length * factor for factor in factors), **windows},
    ).to_dict()


def check_tensors(source: Source, tensors: dict[str, Tensor], num_layers: int) -> None:
    """Compare names, shapes and dtypes of all tensors with those of the config, before anything is allocated.

    Raises:
        InputError: a tensor is missing, differs, or belongs to no parameter.
    """
    needed = set()
    for layer in range(num_layers):
        for tensor in tensors.values():
            if name := tensor.name_in(layer):
                source.check(name, tensor.shape)
                needed.add(name)
    for name in sorted(set(source.tensors) - needed):
        field = f"{source.directory}: {short(name)}"
        if "unembedding_DV" not in tensors and name in HEADS:  # some store a copy
            is_copy = np.array_equal(source.read(name), source.read(tensors["embedding_VD"].name or ""))
            require(is_copy, field, "tensor", "must be a copy of the embedding, because tie_word_embeddings is true")
        else:
            allowed = "is not supported: the model has no such parameter; merge adapters first"
            require(name.endswith(BUFFERS), field, "tensor", allowed)


def read_params(source: Source, tensors: dict[str, Tensor], config: TransformerConfig, mesh: Mesh) -> Params:
    """Read a checkpoint's tensors, one at a time, onto the devices.

    Host memory contains one tensor, in the dtype of the file and in float32. A parameter of all layers is allocated on
    the devices, and filled layer by layer.

    Raises:
        InputError: a tensor contains NaN or infinity, or cannot be read.
    """
    planned, params = flat_params(abstract_params(config, mesh)), {}
    for path, leaf in tqdm(planned.items(), unit="parameter", desc=source.directory.name, disable=None):
        tensor, is_stacked = tensors["/".join(path)], path[0] == "layers"
        part = NamedSharding(mesh, PartitionSpec(*leaf.sharding.spec[is_stacked:]))
        whole = jnp.zeros(leaf.shape, jnp.float32, device=leaf.sharding) if is_stacked else None
        for layer in range(config.num_layers if is_stacked else 1):
            name = tensor.name_in(layer)
            read = np.zeros(tensor.shape, np.float32) if name is None else source.read(name)
            value = np.asarray(tensor.convert(read), np.float32, order="C")
            assert value.shape == leaf.shape[is_stacked:], (name, value.shape)
            # Only the extremes: `isfinite` of all values would allocate an array. The minimum is NaN if any value is.
            is_finite = bool(np.isfinite(value.min()) and np.isfinite(value.max()))
            require(is_finite, f"{source.directory}: {name}", "NaN or infinity", "must be finite")
            value = jax.block_until_ready(jax.device_put(value, part))  # queued transfers would keep several in memory
            whole = value if whole is None else jax.block_until_ready(_with_layer(whole, value, layer))
        params[path] = whole
    return unflatten_dict(params)


@functools.partial(jax.jit, donate_argnums=0)
def _with_layer(stacked: Array, value: Array, layer: Int[Array, ""] | int) -> Array:
    return jax.lax.dynamic_update_index_in_dim(stacked, value, layer, 0)


def compare_logits(source: Source, params: Params, config: TransformerConfig, mesh: Mesh, train_length: int) -> None:
    """Compare the logits of one batch of random tokens with those of transformers' model, both in float32.

    Raises:
        InputError: transformers cannot load the source, or a logit differs by more than `_CHECK_TOLERANCE`.
    """
    import torch  # large, like transformers, and needed only here
    import transformers

    from dape_jax.pretrained.modeling_dape import DapeForCausalLM

    loader = transformers.AutoModelForCausalLM
    if source.config["model_type"] == "dape":
        loader = DapeForCausalLM  # not the directory's code, which is not trusted
    elif "text_config" in source.config:
        loader = transformers.AutoModelForMultimodalLM
    shape = (2 * mesh.size, min(train_length, _CHECK_TOKENS))
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, shape)
    try:
        model = loader.from_pretrained(
            source.directory,
            use_safetensors=True,  # no pickled file
            trust_remote_code=False,  # no code of the checkpoint
            dtype=torch.float32,
            attn_implementation="eager",
        )
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
    found = f"the largest difference from transformers {transformers.__version__} is {difference:.2g}"
    found += f" in logits of up to {largest:.2g}"
    logger.info("%s: %s", source.directory, found)
    allowed = f"{found}; must be at most {_CHECK_TOLERANCE} of them"
    require(difference <= _CHECK_TOLERANCE * largest, "check", True, allowed)
