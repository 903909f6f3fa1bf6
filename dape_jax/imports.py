"""Modules of the user that add biases and processors: `--import`, and `model.imports` of a config."""

import importlib
import sys
from collections.abc import Sequence

from dape_jax.errors import InputError, require


def import_modules(names: Sequence[str], field: str) -> None:
    """Import modules of the user, which add biases and processors; the current directory is the last to be searched.

    Raises:
        InputError: a module is missing. The message names `field`.
    """
    if "" not in sys.path:  # as in a console command; the directory may have been deleted
        sys.path.append("")
    for name in names:
        parts = str(name).split(".")
        is_name = all(map(str.isidentifier, parts)) and parts[1:] != ["py"]
        require(is_name, field, name, "must be the name of a module, without .py")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # it imports a module that is missing
                raise
            places = f"not found: run in the directory of {parts[0]}.py, add it to PYTHONPATH, or install the module"
            raise InputError(f"{field} = {name!r}: {places}") from error
