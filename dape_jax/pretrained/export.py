"""Conversion of a run to a Hugging Face checkpoint; `export_command.py` is its command line."""

import inspect
import json
import math
import shutil
import uuid
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import safetensors.numpy
import tokenizers
from jaxtyping import Array
from tqdm import tqdm

from dape_jax.config import resolved
from dape_jax.data.conventions import TEMPLATE_FILE, Conventions, saved_conventions
from dape_jax.data.tokenizers import TOKENIZER_FILE, Bytes, Tokenizer, byte_tokenizer_json, saved_tokenizer
from dape_jax.errors import require
from dape_jax.evaluation.trained import TrainedModel, read_trained, restore
from dape_jax.files import write_json
from dape_jax.kernels.cuda import nvrtc, tiling
from dape_jax.kernels.cuda.compiler import SOURCES
from dape_jax.model.transformer import Params, flat_params, parameter_kind
from dape_jax.pretrained.families import NOT_EXPORTED
from dape_jax.pretrained.files import CONFIG_FILE, INDEX_FILE
from dape_jax.pretrained.options import ExportFlags
from dape_jax.storage import to_path

DTYPES = ("float32", "bfloat16", "float16")
# Values of fields of the `model` section that modeling_dape.py has; it cannot be imported without PyTorch.
EXPORTED: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("rotary", "name"): ("none", "rope", "pi", "ntk", "yarn", "llama3"),
    ("alternate_rotary", "name"): ("none", "rope", "pi", "ntk", "yarn", "llama3"),
    ("bias", "name"): ("nope", "alibi", "kerple", "t5", "fire"),
    ("processor", "name"): ("none", "dape"),
    ("processor", "edge"): ("prefix",),
    ("processor", "leak"): (False,),
}
_FILE_BYTES = 5 * 10**9  # maximum bytes of tensors in one file


def export_run(given: ExportFlags) -> None:
    """Write a run's checkpoint as a directory for transformers, which appears only when it is complete.

    Raises:
        InputError: the checkpoint is missing, the model is not a decoder, PyTorch's model lacks its bias or processor,
            or the output exists.
    """
    workdir, output, dtype = to_path(given.workdir, "--workdir"), Path(given.output).expanduser(), given.dtype
    require(dtype in DTYPES, "dtype", dtype, f"must be one of {list(DTYPES)}")
    require(not output.exists(), "output", str(output), "must not exist yet")
    trained = read_trained(workdir, given.step, {})
    for path, allowed in EXPORTED.items():
        value: Any = resolved(trained.run)["model"]
        for name in path:
            value = (value or {}).get(name, allowed[0])  # a processor without DAPE has no edge
        require(value in allowed, f"model.{'.'.join(path)}", value, f"must be one of {list(allowed)} to be exported")
    tokenizer, conventions = saved_tokenizer(workdir), saved_conventions(workdir)
    _, params = restore(trained)
    V = trained.run.model.vocab_size  # without padding
    tables = {"embedding_VD": np.s_[:V], "unembedding_DV": np.s_[:, :V], "output_bias_V": np.s_[:V]}
    params |= {name: params[name][rows] for name, rows in tables.items() if name in params}
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex}.partial")
    try:
        temporary.mkdir(parents=True)
        write_tensors(params, temporary, dtype)
        config = hf_config(trained, tokenizer, conventions, dtype)
        write_json(temporary / CONFIG_FILE, config)
        own = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache")}
        write_json(temporary / "generation_config.json", conventions.generation | own)
        write_tokenizer(tokenizer, conventions, temporary)
        write_code(temporary)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_code(directory: Path | str) -> None:
    """Write the PyTorch model and its CUDA kernels, which need nothing of this package.

    The kernels' sources are strings of a Python file, because transformers copies only Python files to its cache.
    """
    for name in ("modeling_dape.py", "cuda_dape.py"):
        shutil.copy(Path(__file__).with_name(name), directory)
    doc = '"""CUDA kernels of DAPE, with their compiler and tiles: parts of `dape_jax.kernels.cuda`."""'
    sources = "".join(f"SOURCES[{name!r}] = r'''{text}'''\n" for name, text in SOURCES.items())
    parts = (doc, inspect.getsource(tiling), inspect.getsource(nvrtc), f"SOURCES = {{}}\n{sources}")
    Path(directory, "cuda_kernels.py").write_text("\n\n".join(parts), encoding="utf-8")


def hf_config(trained: TrainedModel, tokenizer: Tokenizer, conventions: Conventions, dtype: str) -> dict[str, Any]:
    """Return the content of `config.json`: the `model` section of the run, and the classes for transformers."""
    first, ends, tokens = conventions.bos_id(tokenizer), conventions.ends(tokenizer), conventions.other_tokens
    padding = tokenizer.id_of(tokens["pad_token"]) if "pad_token" in tokens else tokenizer.end_of_document
    model = {name: value for name, value in resolved(trained.run)["model"].items() if name not in NOT_EXPORTED}
    return {
        "model_type": "dape",
        "architectures": ["DapeForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_dape.DapeConfig",
            "AutoModel": "modeling_dape.DapeModel",
            "AutoModelForCausalLM": "modeling_dape.DapeForCausalLM",
        },
        **model,
        "max_position_embeddings": trained.run.train.train_length,
        "dtype": dtype,
        "bos_token_id": tokenizer.end_of_document if first is None else first,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "pad_token_id": padding,
        "use_cache": True,
    }


def write_tensors(params: Params, directory: Path, dtype: str) -> None:
    """Write all tensors to one file, or to an index and files of about `_FILE_BYTES`.

    A tensor has the path of its parameter, a stacked parameter is one tensor per layer:

        layers/mlp/up_DF [L, D, F] becomes layers.0.mlp.up_DF [D, F], layers.1.mlp.up_DF, ..

    Norms, position biases and processors are float32 for every `dtype`, as in PyTorch's model. One file's tensors are
    in memory at a time.

    Raises:
        InputError: a value is too large for the dtype.
    """
    tensors: dict[str, tuple[Array, tuple[int, ...], np.dtype]] = {}  # parameter, index of the layer, dtype
    for path, leaf in flat_params(params).items():
        is_small = parameter_kind(path) is not None or any("norm" in part for part in path)
        kind = jax.numpy.dtype("float32" if is_small else dtype)
        if path[0] == "layers":
            for layer in range(leaf.shape[0]):
                tensors[".".join(("layers", str(layer), *path[1:]))] = leaf, (layer,), kind
        else:
            tensors[".".join(path)] = leaf, (), kind

    def num_bytes(tensor: tuple[Array, tuple[int, ...], np.dtype]) -> int:
        leaf, index, kind = tensor
        return math.prod(leaf.shape[len(index) :]) * kind.itemsize

    files = huggingface_hub.split_state_dict_into_shards_factory(
        tensors, get_storage_size=num_bytes, filename_pattern="model{suffix}.safetensors", max_shard_size=_FILE_BYTES
    )
    if files.is_sharded:
        write_json(directory / INDEX_FILE, {"metadata": files.metadata, "weight_map": files.tensor_to_filename})
    for file in tqdm(files.filename_to_tensors, unit="file", desc=directory.name, disable=None):
        values = {}
        for name in files.filename_to_tensors[file]:
            leaf, index, kind = tensors[name]
            with np.errstate(over="ignore"):
                values[name] = np.asarray(jax.device_get(leaf[index]), kind, order="C")
            allowed = f"{name} has values beyond its largest number; must be float32 or bfloat16"
            require(bool(np.isfinite(values[name]).all()), "dtype", dtype, allowed)
        safetensors.numpy.save_file(values, directory / file, {"format": "pt"})


def write_tokenizer(tokenizer: Tokenizer, conventions: Conventions, directory: Path) -> None:
    """Write `tokenizer.json` and its config, without a maximum length; for `Bytes` with one token per byte."""
    parsed = json.loads(byte_tokenizer_json() if isinstance(tokenizer, Bytes) else tokenizer.content)
    if conventions.adds_bos != (tokenizer.first_token is not None):  # as the source's add_bos_token says
        first = [conventions.bos_token] if conventions.adds_bos else []
        ids = [(token, conventions.bos_id(tokenizer)) for token in first]
        processor = tokenizers.processors.TemplateProcessing([*first, "$A"], special_tokens=ids)
        parsed["post_processor"] = json.loads(processor.__getstate__())
    (directory / TOKENIZER_FILE).write_text(json.dumps(parsed, ensure_ascii=False) + "\n", encoding="utf-8")
    (end,) = [token["content"] for token in parsed["added_tokens"] if token["id"] == tokenizer.end_of_document]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": conventions.bos_token or end,
        "eos_token": conventions.eos_token or end,
        "pad_token": end,
        **conventions.other_tokens,
        "padding_side": conventions.padding_side,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(directory / "tokenizer_config.json", config)
    if conventions.chat_template is not None:
        (directory / TEMPLATE_FILE).write_text(conventions.chat_template, encoding="utf-8")
