"""Flags of `dape-import` and `dape-export`. Imports no JAX, so that --help is quick."""

import dataclasses

from dape_jax.command_line import flag
from dape_jax.evaluation.options import STEP_HELP


@dataclasses.dataclass(frozen=True)
class ImportFlags:
    """Flags of `dape-import`."""

    source: str = flag(
        dataclasses.MISSING,
        "Directory with config.json and *.safetensors, or the name of a model on Hugging Face's hub.",
    )
    workdir: str = flag(dataclasses.MISSING, "Run directory to create.")
    tokenizer: str | None = flag(None, "'bytes' or the path of a tokenizer.json; the source's if unset.")
    train_length: int | None = flag(
        None, "Train length of the model, in tokens; max_position_embeddings of its config if unset."
    )
    dtype: str = flag("auto", "Dtype of matmuls: float32, bfloat16, float16, or auto (float32 on CPU, else bfloat16).")
    check: bool = flag(
        False, "Compare the logits of random tokens with transformers' model of the source, which must be installed."
    )


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    """Flags of `dape-export`."""

    workdir: str = flag(dataclasses.MISSING, "Run directory.")
    output: str = flag(dataclasses.MISSING, "Directory to create.")
    step: str = flag("newest", STEP_HELP)
    dtype: str = flag("float32", "Dtype of the matrices: float32, bfloat16 or float16.")
