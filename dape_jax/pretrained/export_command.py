"""Export a run as a Hugging Face checkpoint, for PyTorch transformers and programs that use it.

    dape-export --workdir=runs/dape --output=exported

In: a run directory. Out: `config.json`, `*.safetensors`, `modeling_dape.py` with its CUDA kernels, and the tokenizer.
Next: `modeling_dape.py`, which loads the checkpoint:

    model = AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained("exported", trust_remote_code=True)
"""

import dataclasses
from pathlib import Path

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.evaluation.options import STEP_HELP
from dape_jax.storage import require_local, to_path


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of the command line."""

    workdir: str = flag(dataclasses.MISSING, "Run directory.")
    output: str = flag(dataclasses.MISSING, "Directory to create.")
    step: str = flag("newest", STEP_HELP)
    dtype: str = flag("float32", "Dtype of the matrices: float32, bfloat16 or float16.")


def main(given: Flags) -> None:
    """Export the run."""
    require_local(given.output, "--output")

    from dape_jax.distributed import require_single_process  # after the flags are checked: JAX takes seconds to import
    from dape_jax.pretrained.export import export_run

    require_single_process()
    export_run(to_path(given.workdir, "--workdir"), Path(given.output).expanduser(), step=given.step, dtype=given.dtype)
    print(f"exported: {given.output}")


def command() -> None:
    """Run the command line `dape-export`."""
    command_line.run(main, Flags)


if __name__ == "__main__":
    command()
