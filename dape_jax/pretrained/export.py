"""Conversion of a run to a Hugging Face checkpoint; `export_command.py` is its command line."""

import json
import math
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from dape_jax.config import resolved
from dape_jax.data.tokenizers import TOKENIZER_FILE, Bytes, Tokenizer, byte_tokenizer_json, saved_tokenizer
from dape_jax.errors import os_errors, require
from dape_jax.evaluation.trained import TrainedModel, read_trained, restore
from dape_jax.files import sync_directory, write_json
from dape_jax.model.transformer import Params, flat_params, parameter_kind
from dape_jax.pretrained.families import NOT_EXPORTED
from dape_jax.pretrained.files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from dape_jax.provenance import provenance
from dape_jax.storage import AnyPath

MODELING_FILE = "modeling_dape.py"
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Biases and processors of modeling_dape.py, which cannot be imported without PyTorch.
EXPORTED = {
    "bias": ("nope", "alibi", "kerple", "kerple_power", "sandwich", "t5", "fire", "cope", "transformer_xl"),
    "processor": ("none", "dape"),
}
_FILE_BYTES = 5 * 10**9  # maximum bytes of tensors in one file


def export_run(workdir: AnyPath, output: Path, *, step: str = "newest", dtype: str = "float32") -> None:
    """Write a run's checkpoint as a directory for transformers, which appears only when it is complete.

    Args:
        workdir: run directory.
        output: directory to create.
        step: "newest", "best" or a number.
        dtype: dtype of the tensors; a run has float32.

    Raises:
        InputError: the checkpoint is missing, the model is not a decoder, PyTorch's model lacks its bias or processor,
            or `output` exists or cannot be written to.
    """
    require(dtype in SAFETENSORS_DTYPES, "dtype", dtype, f"must be one of {list(SAFETENSORS_DTYPES)}")
    require(not output.exists(), "output", str(output), "must not exist yet")
    trained = read_trained(workdir, step, {})
    model = trained.run.model
    require(model.norm_first, "model.norm_first", model.norm_first, "must be True: PyTorch's model is a decoder")
    for field, names in EXPORTED.items():
        name = resolved(trained.run)["model"][field]["name"]
        require(name in names, f"model.{field}.name", name, f"must be one of {names}, which {MODELING_FILE} has")
    tokenizer = saved_tokenizer(workdir)
    _, params = restore(trained)
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex}.partial")
    with os_errors("output", str(output), "cannot be written to"):
        try:
            temporary.mkdir(parents=True)
            write_tensors(params, temporary, dtype, _FILE_BYTES)
            config = hf_config(trained, tokenizer, dtype)
            write_json(temporary / CONFIG_FILE, config)
            write_json(temporary / "generation_config.json", generation_config(config))
            write_tokenizer(tokenizer, temporary)
            shutil.copy(Path(__file__).with_name(MODELING_FILE), temporary)
            (temporary / "README.md").write_text(model_card(trained))
            temporary.rename(output)
            sync_directory(output.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def hf_config(trained: TrainedModel, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """Return the content of `config.json`: the `model` section of the run, and the classes for transformers."""
    model = {name: value for name, value in resolved(trained.run)["model"].items() if name not in NOT_EXPORTED}
    return {
        "model_type": "dape",
        "architectures": ["DapeForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{Path(MODELING_FILE).stem}.DapeConfig",
            "AutoModelForCausalLM": f"{Path(MODELING_FILE).stem}.DapeForCausalLM",
        },
        **model,
        "max_position_embeddings": trained.run.train.train_length,
        "dtype": dtype,
        "bos_token_id": tokenizer.end_of_document,
        "eos_token_id": tokenizer.end_of_document,
        "use_cache": trained.run.model.processor.why_not_cached is None,
    }


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `generation_config.json`, given the content of `config.json`."""
    shared = {name: config[name] for name in ("bos_token_id", "eos_token_id", "use_cache")}
    return shared | {"pad_token_id": config["eos_token_id"]}


class Tensor(NamedTuple):
    """Tensor of the checkpoint: a parameter, or one layer of a stacked parameter.

    Args:
        parameter: array of the run.
        layer: index of the first dim of `parameter`, or None for all layers.
        dtype: dtype in the file.
    """

    parameter: Array
    layer: int | None
    dtype: jnp.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.parameter.shape if self.layer is None else self.parameter.shape[1:]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Return the values."""
        value = self.parameter if self.layer is None else self.parameter[self.layer]
        return np.asarray(jax.device_get(value), self.dtype, order="C")


def tensors_of(params: Params, dtype: str) -> dict[str, Tensor]:
    """Return all tensors by name: parameters by their path, stacked parameters as one tensor per layer.

        layers/mlp/up_DF [L, D, F] becomes layers.0.mlp.up_DF [D, F], layers.1.mlp.up_DF, ..

    Norms, position biases and processors are float32 for every `dtype`, as in PyTorch's model.
    """
    tensors = {}
    for path, leaf in flat_params(params).items():
        is_small = parameter_kind(path) is not None or any("norm" in part for part in path)
        kind = jnp.dtype(jnp.float32 if is_small else dtype)
        if path[0] == "layers":
            for layer in range(leaf.shape[0]):
                tensors[".".join(("layers", str(layer), *path[1:]))] = Tensor(leaf, layer, kind)
        else:
            tensors[".".join(path)] = Tensor(leaf, None, kind)
    return tensors


def write_tensors(params: Params, directory: Path, dtype: str, file_bytes: int) -> None:
    """Write the tensors to one file, or to an index and files of at most `file_bytes` (or one tensor)."""
    tensors = tensors_of(params, dtype)
    files: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if files[-1] and sum(other.num_bytes for other in files[-1].values()) + tensor.num_bytes > file_bytes:
            files.append({})
        files[-1][name] = tensor
    names = [WEIGHTS_FILE]
    if len(files) > 1:
        names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
        weight_map = {name: file for file, members in zip(names, files, strict=True) for name in members}
        total = sum(tensor.num_bytes for tensor in tensors.values())
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    with tqdm(total=len(tensors), unit="tensor", desc=directory.name, disable=None) as bar:
        for file, members in zip(names, files, strict=True):
            for _ in write_file(directory / file, members):
                bar.update()


def write_file(file: Path, tensors: dict[str, Tensor]) -> Iterator[str]:
    """Write a safetensors file with one tensor in memory at a time, and yield the name of each tensor written.

    The library would need all tensors of the file in memory. Larger dtypes come first, so that all are aligned.

    Source: https://github.com/huggingface/safetensors, "Format".
    """
    ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in ordered:
        tensor = tensors[name]
        stop = start + tensor.num_bytes
        kind = SAFETENSORS_DTYPES[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            opened.write(tensors[name].read().reshape(-1).view(np.uint8).data)
            yield name


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write `tokenizer.json` and its config, without a maximum length; for `Bytes` with one token per byte."""
    content = byte_tokenizer_json() if isinstance(tokenizer, Bytes) else tokenizer.content
    (directory / TOKENIZER_FILE).write_text(content + "\n")
    parsed = json.loads(content)
    (end,) = [token["content"] for token in parsed["added_tokens"] if token["id"] == tokenizer.end_of_document]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(directory / "tokenizer_config.json", config)


def model_card(trained: TrainedModel) -> str:
    """Return the content of `README.md`."""
    record = provenance("flax", "jax")
    return f"""---
library_name: transformers
tags: [dape]
---

# {trained.name}

A decoder whose attention scores are processed by DAPE, exported from step {trained.step} of the run `{trained.name}`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("PATH", trust_remote_code=True)
```

Trained on sequences of {trained.run.train.train_length} tokens of data `{trained.data_digest[:16]}`. The length of
an input is not limited.

```json
{json.dumps({"model": resolved(trained.run)["model"], **record}, indent=1)}
```
"""
