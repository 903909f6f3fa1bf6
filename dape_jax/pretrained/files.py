"""Hugging Face directories: `config.json` and the tensors of `*.safetensors`, read one at a time.

In: a directory. Out: a `Source`. Next: `families.py`.

The directory is untrusted: only JSON and safetensors are read, which contain no code, and an index can only name files
of the directory. Links are followed, as the cache of Hugging Face's hub needs.
"""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import safetensors

from dape_jax.errors import InputError, printable, require
from dape_jax.files import read_json

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"  # of PEFT
HEADS = ("lm_head.weight", "embed_out.weight")  # names of the unembedding

_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_COPIES = ["*/*", "consolidated*"]  # the same weights in other formats, as Mistral's and Meta's repositories have
_SHOWN_CHARS = 200
_DTYPES = ("F32", "F16", "BF16", "F64")  # supported dtypes; only float64 is rounded to float32
_WRAPPERS = re.compile(r"\b(?:module|_orig_mod(?:ule)?|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_TEXT_PREFIX = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor in the header of its file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """Checkpoint in a directory, with no tensor in memory."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `InputError` if a tensor is missing, or has another shape or an unsupported dtype."""
        field = f"{self.directory}: {name}"
        if name not in self.tensors:
            stored = short(", ".join(self.tensors))
            raise InputError(f"{field}: is missing; save the model with AutoModelForCausalLM. Its tensors are {stored}")
        info = self.tensors[name]
        require(info.shape == shape, f"{field}: shape", list(info.shape), f"must be {list(shape)} as in {CONFIG_FILE}")
        require(info.dtype in _DTYPES, f"{field}: dtype", info.dtype, f"must be one of {list(_DTYPES)}")

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in the dtype of the file.

        Raises:
            InputError: the file cannot be read.
        """
        info = self.tensors[name]
        with _reading(info.file), safetensors.safe_open(info.file, "numpy") as opened:
            return np.asarray(opened.get_tensor(info.name))

    def named_like(self, embedding: str, head: str) -> "Source":
        """Return the source with the names that a model with its head has, and without tensors of other modalities.

        Wrappers of PyTorch add parts to names ("_orig_mod." of `torch.compile`, "module." of data parallelism), a model
        without its head lacks the first part ("model."), and the text model of a multimodal one has another
        ("language_model.model.", "model.language_model."). `safetensors.torch.save_model` stores a tied table as the
        head, and the head of GPT-NeoX has two names: transformers 5.14 changed it.

        Args:
            embedding: name of the embedding in the model with its head.
            head: name of the tensor of the head, which is the embedding in a tied model.
        """
        prefix, own = f"{embedding.partition('.')[0]}.", embedding.partition(".")[2]
        tensors, others = {}, 0
        for stored, info in self.tensors.items():
            name = _WRAPPERS.sub("", stored)
            if "text_config" in self.config:
                name, found = _TEXT_PREFIX.subn(prefix, name, count=1)
                name = name.replace(f"{prefix}lm_head.", "lm_head.")
                if not found and not name.startswith("lm_head."):
                    others += 1
                    continue
            require(name not in tensors, f"{self.directory}: {short(name)}", "tensor", "must be stored once")
            tensors[name] = info
        if others:
            logger.info("%s: %s tensors that are not of the text model are ignored", self.directory, f"{others:,}")
        if own and own in tensors:
            tensors = {name if name.startswith("lm_head.") else prefix + name: info for name, info in tensors.items()}
        for name in HEADS:
            if head not in tensors and name in tensors:
                tensors[head] = tensors.pop(name)
        return dataclasses.replace(self, tensors=tensors)


def find_source(source: str) -> Path:
    """Return the directory of a checkpoint: a local one, or the cache's copy of a model on Hugging Face's hub.

    Only configs, safetensors and tokenizers are downloaded.

    Raises:
        InputError: there is neither; the message has the command that downloads the model.
    """
    require("://" not in source, "source", source, "must be a local directory, or a model of the hub: ORG/NAME")
    directory = Path(source).expanduser()
    if directory.exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source, re.ASCII):
        return directory
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=_DOWNLOADED, ignore_patterns=_COPIES))
    except Exception as error:  # of its own, of httpx, and of the file system
        advice = f"must be a directory, or a model of the hub: hf download {source} --local-dir=DIRECTORY"
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"source = {source!r}: {advice}. {type(error).__name__}: {reason}") from error


def open_source(directory: Path) -> Source:
    """Read the config and the headers of a checkpoint.

    Raises:
        InputError: the directory is not a checkpoint, or a file is damaged.
    """
    allowed = "must be a directory; for a model of the hub: hf download NAME --local-dir=DIRECTORY"
    require(directory.is_dir(), "source", str(directory), allowed)
    allowed = "must be missing: merge the adapter into its model (merge_and_unload()), or remove it if it is merged"
    require(not (directory / ADAPTER_FILE).exists(), "source", str(directory / ADAPTER_FILE), allowed)
    allowed = f"must have {CONFIG_FILE}; in the hub's cache, name a directory below snapshots"
    require((directory / CONFIG_FILE).exists(), "source", str(directory), allowed)
    config = read_json(directory / CONFIG_FILE)
    if (directory / WEIGHTS_FILE).exists():  # transformers, too, ignores an index beside it
        return Source(directory, config, _read_header(directory / WEIGHTS_FILE))
    if not (directory / INDEX_FILE).exists():
        found = sorted(file.name for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        files = short(", ".join(found))
        advice = f"; pickled files may run code when they are read: convert {files} to safetensors" if found else ""
        raise InputError(f"source = {str(directory)!r}: must have {WEIGHTS_FILE}, or shards and {INDEX_FILE}{advice}")
    return Source(directory, config, _read_index(directory))


def _read_index(directory: Path) -> dict[str, TensorInfo]:
    """Return all tensors of the shards; which of them the index lists does not matter, as in transformers."""
    where = directory / INDEX_FILE
    weight_map = read_json(where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{where}: weight_map: must be a JSON object that is not empty")
    files = dict.fromkeys(weight_map.values())
    for file in files:
        is_name = file.endswith(".safetensors") and Path(file).name == file
        require(is_name, f"{where}: file", short(file), "must be the name of a .safetensors file in this directory")
    headers = [_read_header(directory / file) for file in files]
    return {name: info for header in headers for name, info in header.items()}


def _read_header(file: Path) -> dict[str, TensorInfo]:
    with _reading(file), safetensors.safe_open(file, "numpy") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # `opened` is not a dict
        return {
            name: TensorInfo(file, name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
        }


def short(text: str) -> str:
    """Return the beginning of a text from a checkpoint, for a one-line message."""
    return printable(text[:_SHOWN_CHARS]) + (".." if len(text) > _SHOWN_CHARS else "")


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise `InputError` for an error of the file system or of the safetensors library."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        advice = "" if isinstance(error, OSError) else "; download it again (in a clone: git lfs pull)"
        raise InputError(f"{short(str(file))}: cannot be read: {short(str(error))}{advice}") from error
