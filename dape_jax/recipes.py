"""Recipes: config files of the package, which `--config=configs/NAME.py` names in any directory."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from absl import flags
from ml_collections import config_flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from dape_jax.errors import require

RECIPES = Path(__file__).with_name("configs")  # in a clone, `configs` is a link to it
_SHARED = "common.py"  # read by the recipes


def recipe_names() -> list[str]:
    """Return the names of the package's recipes, as `--config` takes them."""
    return [f"configs/{file.name}" for file in sorted(RECIPES.glob("*.py")) if file.name != _SHARED]


def find_recipe(name: str) -> Path:
    """Return the path of a config file: `name` itself if it exists, or the package's recipe of this name.

    Raises:
        InputError: neither exists.
    """
    file = Path(name)
    if file.exists():
        return file
    recipes = recipe_names()
    require(file.as_posix() in recipes, "config file", name, f"does not exist; the recipes are {', '.join(recipes)}")
    return RECIPES / file.name


def read_module(file: Path) -> ModuleType:
    """Import a config file by its path: it is not part of a package.

    Raises:
        InputError: the file is missing.
    """
    allowed = "must exist"
    require(file.is_file(), "config file", str(file), allowed)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _RecipeParser(ConfigFileFlagParser):
    """Parser of PATH or PATH:ARGUMENT, where PATH may be a recipe of the package."""

    def parse(self, path: str):
        name, *argument = path.split(":", 1)
        return super().parse(":".join([str(find_recipe(name)), *argument]))


def define_config_flag() -> None:
    """Define the required flag `--config`: a config file, with its argument after a colon."""
    text = "Config file or recipe of the package, with its argument after a colon: configs/quickstart.py:bias=alibi."
    config_flags.DEFINE_config_file("config", help_string=text)
    flag = flags.FLAGS["config"]
    flag.parser = _RecipeParser(flag.name)
    flags.mark_flag_as_required(flag.name)
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)  # --help lists it
