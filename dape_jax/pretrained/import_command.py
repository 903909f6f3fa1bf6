"""Import a Hugging Face checkpoint as a run at step 0, which all commands accept like a trained run.

    dape-import --source=/models/pythia-410m --workdir=runs/pythia
    dape-import --source=Qwen/Qwen3-0.6B --workdir=runs/qwen3          # downloaded from Hugging Face's hub

In: a directory with `config.json` and `*.safetensors`, or the name of a model on the hub. Out: a run directory. Next:
`docs/pretrained.md`.

The run has no training text: `data.path` is None. Its optimizer and schedule are defaults for continued training.
"""

from dape_jax import command_line
from dape_jax.pretrained.options import ImportFlags


def main(given: ImportFlags) -> None:
    """Import the checkpoint."""
    from dape_jax.distributed import require_single_process  # JAX takes seconds to import, --help none
    from dape_jax.pretrained.load import import_run

    require_single_process()
    import_run(given)
    print(f"run: {given.workdir}\nevaluate it: dape-eval --workdir={given.workdir} --data=TEXT --lengths=...")


def command() -> None:
    """Run the command line `dape-import`."""
    command_line.run(main, ImportFlags)


if __name__ == "__main__":
    command()
