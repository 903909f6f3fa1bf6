"""Config and text of a run that is small enough for a test."""

import copy
import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from dape_jax.configs import common
from dape_jax.data.store import Corpora, Corpus, DataConfig, Sidecar, TokenStore
from dape_jax.model.transformer import GPT_NEOX, LLAMA
from dape_jax.training.source import load_corpora

WORDS = "the attention scores of a long text are a picture whose rows are queries and whose columns are keys".split()

SPEC = common.make(
    model={"num_layers": 2, "width": 16, "num_heads": 2, "vocab_size": 257, "vocab_multiple": 1, "dtype": "float32"}
    | {"rotary": {"name": "none"}, "bias": {"name": "kerple"}, "attention": {"name": "dense"}}
    | {"processor": {"name": "dape", "kernel_width": 3, "channels": 4, "edge": "prefix"}},
    data={"path": "", "tokenizer": "bytes", "cache_dir": "", "validation_fraction": 0.3},
    optimizer={"learning_rate": 1e-2, "warmup_fraction": 0.1},
    train={"train_length": 16, "batch_size": 8, "num_steps": 6, "eval_interval": 2, "checkpoint_interval": 2}
    | {"validation_batches": 2},
    evaluation={"lengths": (16, 32, 64), "last_tokens": 16, "max_windows": 8, "batch_tokens": 256}
    | {"blockwise_from": 64, "block_size": 16},
).to_dict()

# Options of published decoders, in which every option of a decoder has every value.
HALF_ROPE = {"rotary": {"name": "rope", "fraction": 0.5}}
ARCHITECTURES = {
    "pythia": GPT_NEOX | HALF_ROPE | {"parallel_residual": True, "mlp_width": 24},
    "llama": LLAMA | {"head_dim": 6, "num_kv_heads": 1, "norm_epsilon": 1e-3, "tied_embeddings": True},
    "qwen": LLAMA | {"head_dim": 12, "qk_norm": "head", "projection_bias": True, "activation": "gelu_tanh"},
    "gemma": LLAMA
    | {"branch_norm": True, "qk_norm": "head", "score_cap": 2.0, "logit_cap": 3.0, "tied_embeddings": True}
    | {"rotary": {"name": "rope", "base": 100.0}, "alternate_layers": (0,), "alternate_window": 5}
    | {"alternate_rotary": {"name": "pi", "base": 30.0, "factor": 2.0}},
    "olmo": LLAMA
    | {"norm_first": False, "branch_norm": True, "qk_norm": "projection", "num_kv_heads": 1, "window": 5}
    | HALF_ROPE
    | {"alternate_layers": (1,), "alternate_rotary": {"name": "none"}},
    "mixed": LLAMA
    | {"parallel_residual": True, "attention_output_bias": True, "mlp_bias": True, "output_bias": True}
    | {"learned_positions": 64},
}


def write_text(directory: Path) -> Path:
    """Write forty files of repeated words, 100 to 600 bytes each, and return their directory."""
    directory.mkdir(parents=True)
    draw = random.Random(0)
    for i in range(40):
        (directory / f"{i:02}.txt").write_text(" ".join(draw.choices(WORDS, k=draw.randint(20, 120))))
    return directory


def flip(file: Path, place: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def changed(spec: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a copy of a config with changes such as train__num_steps=3."""
    result = copy.deepcopy(spec)
    for name, value in changes.items():
        section, field = name.split("__")
        result[section][field] = value
    return result


def spec(root: Path, **changes: Any) -> dict[str, Any]:
    """Return the small config on a text under `root`, with changes such as train__num_steps=3."""
    text = root / "text"
    if not text.exists():
        write_text(text)
    return changed(SPEC, **{"data__path": str(text), "data__cache_dir": str(root / "cache")} | changes)


def load_corpus(config: DataConfig, lossy: bool = False) -> Corpus:
    """Return the corpus of a config with one text."""
    corpora = load_corpora(config, lossy)
    return Corpus(*corpora.train.values(), *corpora.validation.values())


def store_of(sizes: Sequence[int], tokens: np.ndarray | None = None) -> TokenStore:
    """Return a store in memory of documents with these numbers of tokens, ends included; by default token i is i."""
    tokens = np.arange(sum(sizes), dtype=np.uint32) if tokens is None else tokens
    sidecar = Sidecar(1, "bytes", 257, "<u4", len(sizes), len(tokens), "", "train", "memory", "")
    return TokenStore(Path("memory"), sidecar, tokens, np.cumsum([0, *sizes]))


def sentencepiece_bpe(texts: Sequence[str]) -> dict[str, Any]:
    """Return a tokenizer.json like Llama 1's and 2's.

    Spaces are "▁", one is put before a text, and characters outside the alphabet are bytes.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = tokenizers.normalizers.Replace(" ", "▁")
    bpe.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), replace])
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Split("▁", "merged_with_next")  # in training only
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    options = {"special_tokens": ["<unk>", "<s>", "</s>", *bytes_], "limit_alphabet": 50, "show_progress": False}
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=420, **options))
    content = json.loads(bpe.to_str())
    parts: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    parts += [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    content |= {"pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": parts}}
    return content | {"added_tokens": content["added_tokens"][:3]}


def changed_corpus(directory: Path) -> Callable[..., Corpora]:
    """Return a `load_corpora` that reads the text as if a file had been added to it; the copy is in `directory`."""

    def load_changed(config: DataConfig, **options: Any) -> Corpora:
        text = directory / "text"
        shutil.copytree(config.path, text)
        (text / "new.txt").write_text("new text " * 50)
        return load_corpora(dataclasses.replace(config, path=str(text)), **options)

    return load_changed
