"""Export a run as a Hugging Face checkpoint, for PyTorch transformers and programs that use it.

    dape-export --workdir=runs/dape --output=exported

In: a run directory. Out: `config.json`, `*.safetensors`, `modeling_dape.py` with its CUDA kernels, and the tokenizer.
Next: `modeling_dape.py`, which loads the checkpoint:

    model = AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained("exported", trust_remote_code=True)
"""

from dape_jax import command_line
from dape_jax.pretrained.options import ExportFlags
from dape_jax.storage import require_local


def main(given: ExportFlags) -> None:
    """Export the run."""
    require_local(given.output, "--output")

    from dape_jax.distributed import require_single_process  # after the flags are checked: JAX takes seconds to import
    from dape_jax.pretrained.export import export_run

    require_single_process()
    export_run(given)
    print(f"exported: {given.output}")


def command() -> None:
    """Run the command line `dape-export`."""
    command_line.run(main, ExportFlags)


if __name__ == "__main__":
    command()
