"""How every command line of the project starts: quiet libraries, and one line for bad input."""

import logging
import sys
from collections.abc import Callable

from absl import app
from absl import logging as absl_logging

from dape_jax.errors import InputError


def run(main: Callable[[list[str]], None]) -> None:
    """Parse flags and call `main`.

    An `InputError` ends the program with its one line on standard error and status 2. Of the logs, our own are shown
    from INFO on and those of the libraries from WARNING on (Orbax writes a screenful for every checkpoint).
    """

    def quietly(arguments: list[str]) -> None:
        absl_logging.set_verbosity(absl_logging.WARNING)
        logging.getLogger("dape_jax").setLevel(logging.INFO)
        main(arguments)

    try:
        app.run(quietly)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
