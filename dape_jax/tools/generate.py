"""Continue prompts with a trained model.

dape-generate --workdir=runs/mine --prompt="def main("
dape-generate --workdir=runs/mine --prompt="class " --prompt_file=long.txt --temperature=0
"""

import codecs
import os

from dape_jax import command_line
from dape_jax.storage import read_errors, to_path
from dape_jax.tools.options import GenerateFlags


def main(given: GenerateFlags) -> None:
    """Complete the prompts."""
    prompts = [os.fsencode(prompt) for prompt in given.prompt]
    for file in given.prompt_file:
        with read_errors("--prompt_file", file):  # without a byte order mark, as texts of training are read
            prompts.append(to_path(file, "--prompt_file").read_bytes().removeprefix(codecs.BOM_UTF8))

    from dape_jax.tools.completion import complete  # after the flags are checked: JAX takes seconds to import

    complete(given, prompts)


def command() -> None:
    """Run the command line `dape-generate`."""
    command_line.run(main, GenerateFlags)


if __name__ == "__main__":
    command()
