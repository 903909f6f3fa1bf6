"""Draw the attention maps of a trained model for one document.

dape-attention-maps --workdir=runs/a --length=512
"""

import dataclasses

from dape_jax import command_line
from dape_jax.command_line import flag, use_compilation_cache
from dape_jax.evaluation.options import STEP_HELP
from dape_jax.storage import to_path


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of the command line."""

    workdir: str = flag(dataclasses.MISSING, "Run directory.")
    length: int = flag(dataclasses.MISSING, "Number of tokens that the model reads.")
    text: str | None = flag(
        None, "File whose first tokens the model reads; the first validation document that is long enough if unset."
    )
    step: str = flag("newest", STEP_HELP)
    output: str | None = flag(None, "Result directory; WORKDIR/attention_maps/step-STEP-length-LENGTH if unset.")


def main(given: Flags) -> None:
    """Draw the maps."""
    text = to_path(given.text, "--text") if given.text else None
    output = to_path(given.output, "--output") if given.output else None
    use_compilation_cache()
    from dape_jax.tools.maps import attention_maps  # after the flags are checked: JAX takes seconds to import

    page = attention_maps(
        to_path(given.workdir, "--workdir"), length=given.length, text=text, step=given.step, output=output
    )
    print(f"\npage: {page}")


def command() -> None:
    """Run the command line `dape-attention-maps`."""
    command_line.run(main, Flags)


if __name__ == "__main__":
    command()
