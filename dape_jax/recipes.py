"""Config files: recipes of the package or a user's own, `PATH[:ARGUMENT]`, and the flags that set their fields."""

import ast
import functools
import os
import re
import string
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from dape_jax.errors import InputError, most_similar, require
from dape_jax.imports import import_modules

RECIPES = Path(__file__).with_name("configs")  # in a clone, `configs` is a link to it
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def describe() -> str:
    """Return the recipes and their arguments, from the docstrings of their files, for --help."""
    common, lines = "", ["Recipes, for --config=configs/NAME.py:ARGUMENT", ""]
    for file in sorted(RECIPES.glob("*.py")):
        first, *others = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")
        text = []
        for paragraph in others:
            is_first = re.match("(The a|A)rgument", paragraph)
            if is_first or (text and paragraph[0] in f" {string.ascii_lowercase}"):
                text += paragraph.split("\n")
            elif text:
                break
        if file.name == "common.py":
            common = "\n".join(text)
        else:
            lines += [f"configs/{file.name}: {' '.join(first.split())}", *(f"    {line}" for line in text), ""]
    fields = (
        "--help=SECTION prints the fields of a section, with their defaults and allowed values: model, model.rotary,\n"
        "model.bias, model.processor, model.attention, data, optimizer, train, mesh, init or evaluation.\n"
        "docs/config.md has all of them."
    )
    return "\n".join([*lines, common, "", fields])


def read_module(file: Path) -> ModuleType:
    """Import a config file by its path.

    Raises:
        InputError: the file is missing, or is no config file.
    """
    is_python, allowed = file.is_file() and file.suffix == ".py", "must be a Python file with a function get_config"
    require(is_python, "config file", str(file), allowed)
    module = ModuleType(file.stem)
    module.__file__ = str(file)
    exec(compile(file.read_bytes(), file, "exec"), vars(module))
    require(hasattr(module, "get_config"), "config file", str(file), allowed)
    return module


def read_config(name: str, arguments: Sequence[str] = (), imports: Sequence[str] = ()) -> dict[str, Any]:
    """Return the nested dict of the config file `PATH[:ARGUMENT]`, after flags such as `--config.train.num_steps=8`.

    If there is no such file, PATH names a recipe of the package, in any directory. The modules `imports` are imported
    first, and added to `model.imports`.

    Raises:
        InputError: there is neither, the file rejects its argument, or flags are wrong; with a line for each flag.
    """
    import_modules(imports, "--import")
    path, *argument = name.split(":", 1)
    file = Path(os.path.expanduser(path))
    if not file.exists():
        names = [f"configs/{each.name}" for each in sorted(RECIPES.glob("*.py")) if each.name != "common.py"]
        require(file.as_posix() in names, "config file", path, f"does not exist; the recipes are {', '.join(names)}")
        file = RECIPES / file.name
    config = read_module(file).get_config(*argument)
    messages: list[str] = []
    for each in arguments:
        try:
            _set(config, each)
        except InputError as error:
            messages += error.messages
    if messages:
        raise InputError(*messages)
    spec = config.to_dict()
    if imports:
        recorded = spec["model"]["imports"] if "imports" in spec["model"] else ()
        spec["model"]["imports"] = tuple(dict.fromkeys((*recorded, *imports)))
    return spec


def _set(config: Any, argument: str) -> None:
    """Set a field by a flag `--config.SECTION.FIELD=VALUE`, whose value has the type of the field, or is None."""
    name, equals, text = argument.lstrip("-").partition("=")
    path = name.removeprefix("config.")
    *sections, field = path.split(".")
    if path == "model.attention" and equals:  # it does not change results, so that it belongs to no recipe's method
        from dape_jax.config import choose  # after the flags are parsed: it imports JAX

        config.model.attention = ConfigDict(choose("attention", text))
        return
    if path not in (known := list(_paths(config))):
        if any(each.startswith(f"{path}.") for each in known):
            advice = "is a section; set its fields, or choose it by name in the config file's argument"
            raise InputError(f"{argument}: {advice}")
        known.sort(key=lambda each: each.startswith(".".join(sections)))  # of equal names, that of the section is last
        paths = {each.rpartition(".")[2]: each for each in known}
        nearest, advice = most_similar(field, paths), "--help lists the sections, --help=SECTION the fields of one"
        if nearest is not None:
            advice = f"did you mean --config.{paths[nearest]}?"
        raise InputError(f"{argument}: the config has no such field; {advice}")
    if not equals:
        raise InputError(f"{argument}: must be {argument}=VALUE")
    section = functools.reduce(lambda inner, each: inner[each], sections, config)
    kind = section.get_type(field)
    try:
        value = None if text == "None" else _parse(kind, text)
    except (ValueError, TypeError, SyntaxError, KeyError) as error:
        allowed = "comma-separated numbers" if kind in (tuple, list) else f"of type {kind.__name__}"
        raise InputError(f"{argument}: must be {allowed}") from error
    with section.ignore_type():  # `read_run` refuses None where it is not allowed
        section[field] = value


def _parse(kind: type, text: str) -> Any:
    if kind is bool:
        return _BOOLS[text.lower()]
    if kind in (tuple, list):
        value = ast.literal_eval(text)
        return kind(value) if isinstance(value, tuple | list) else kind([value])
    if kind is type(None):  # a field without a value has no type yet: `read_run` checks it
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    return kind(text)


def _paths(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every field of nested config sections."""
    for name in config.keys():
        value = config[name]
        yield from _paths(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else [f"{prefix}{name}"]


def define_config_flag() -> None:
    """Define the required flag `--config`, a config file with its argument after a colon, and `--import`."""
    text = "Config file or recipe of the package, with its argument after a colon: configs/quickstart.py:bias=alibi. "
    flags.DEFINE_string("config", None, text + "--config.SECTION.FIELD=VALUE sets a field.")
    flags.mark_flag_as_required("config")
    text = "Modules of your own that add to BIASES and PROCESSORS, in the current directory or installed: my_methods."
    flags.DEFINE_list("import", [], text)
    for name in ("config", "import"):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])  # --help lists them
