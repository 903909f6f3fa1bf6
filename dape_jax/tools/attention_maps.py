"""Draw the attention maps of a trained model for one document.

dape-attention-maps --workdir=runs/a --length=512
"""

from dape_jax import command_line
from dape_jax.tools.options import MapsFlags


def main(given: MapsFlags) -> None:
    """Draw the maps."""
    from dape_jax.tools.maps import attention_maps  # after the flags are checked: JAX takes seconds to import

    print(f"\npage: {attention_maps(given)}")


def command() -> None:
    """Run the command line `dape-attention-maps`."""
    command_line.run(main, MapsFlags)


if __name__ == "__main__":
    command()
