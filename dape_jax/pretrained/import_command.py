"""Import a Hugging Face checkpoint as a run at step 0, which all commands accept like a trained run.

    dape-import --source=/models/pythia-410m --workdir=runs/pythia
    dape-import --source=Qwen/Qwen3-0.6B --workdir=runs/qwen3          # downloaded from Hugging Face's hub

In: a directory with `config.json` and `*.safetensors`, or the name of a model on the hub. Out: a run directory. Next:
`docs/pretrained.md`.

The run has no training text: `data.path` is None. Its optimizer and schedule are defaults for continued training.
"""

import dataclasses

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.storage import require_local, to_path


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of the command line."""

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


def main(given: Flags) -> None:
    """Import the checkpoint."""
    require_local(given.source, "--source")
    workdir = to_path(given.workdir, "--workdir")

    from dape_jax.distributed import require_single_process  # after the flags are checked: JAX takes seconds to import
    from dape_jax.pretrained.files import find_source
    from dape_jax.pretrained.load import import_run

    require_single_process()
    import_run(
        find_source(given.source),
        workdir,
        tokenizer=given.tokenizer,
        train_length=given.train_length,
        dtype=given.dtype,
        check=given.check,
    )
    print(f"run: {workdir}\nevaluate it: dape-eval --workdir={workdir} --data=TEXT --lengths=...")


def command() -> None:
    """Run the command line `dape-import`."""
    command_line.run(main, Flags)


if __name__ == "__main__":
    command()
