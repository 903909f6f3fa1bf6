"""Config files: recipes of the package or a user's own, `PATH[:ARGUMENT]`, and the flags that set their fields."""

import ast
import contextlib
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from dape_jax.errors import InputError, most_similar, require
from dape_jax.imports import import_modules

RECIPES = Path(__file__).with_name("configs")  # in a clone, `configs` is a link to it


def describe() -> str:
    """Return the recipes and their arguments, from the docstrings of their files, for --help."""
    common, lines = "", ["Recipes, for --config=configs/NAME.py:ARGUMENT", ""]
    for file in sorted(RECIPES.glob("*.py")):
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        first, _, others = doc.partition("\n\n")
        # Paragraphs from that of the argument, with those after it that are indented or continue a sentence.
        found = re.search(r"^(The a|A)rgument.*?(?=\n\n[^ a-z]|\Z)", others, re.DOTALL | re.MULTILINE)
        text = re.sub(r"\n+", "\n", found[0]) if found else ""
        if file.name == "common.py":
            common = text
        else:
            lines += [f"configs/{file.name}: {' '.join(first.split())}", textwrap.indent(text, "    "), ""]
    fields = (
        "--help=SECTION prints the fields of a section, with their defaults and allowed values: model, model.rotary,\n"
        "model.bias, model.processor, model.attention, data, optimizer, train, mesh, init or evaluation.\n"
        "docs/config.md has all of them."
    )
    return "\n".join([*lines, common, "", fields])


def read_module(file: Path) -> ModuleType:
    """Import a config file by its path.

    Raises:
        InputError: the file is missing, is no config file, or raises an error.
    """
    is_python, allowed = file.is_file() and file.suffix == ".py", "must be a Python file with a function get_config"
    require(is_python, "config file", str(file), allowed)
    module = sys.modules[str(file)] = ModuleType(str(file))  # where `dataclasses` looks for a class's module
    module.__file__ = str(file)
    with _one_line_errors(file):
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
    require(hasattr(module, "get_config"), "config file", str(file), allowed)
    return module


@contextlib.contextmanager
def _one_line_errors(file: Path) -> Iterator[None]:
    """Raise `InputError` with the line of a config file in which the block raises any other error."""
    try:
        yield
    except (InputError, OSError, RuntimeError, AssertionError):  # the last two are JAX's, if it has no device
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        numbers = [frame.lineno for frame in frames if frame.filename == str(file)]
        where = f"config file = {str(file)!r}" + (f", line {numbers[-1]}" if numbers else "")
        text = " ".join(re.split(r"(?:\s|\\n)+", str(error)))  # a KeyError's text is quoted, with escapes
        raise InputError(f"{where}: {type(error).__name__}: {text}") from error


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
    get_config, allowed = read_module(file).get_config, "must have a get_config that returns a ConfigDict"
    with _one_line_errors(file):
        found = get_config(*argument)
    require(isinstance(found, ConfigDict | dict), "config file", str(file), allowed)
    config: Any = ConfigDict(found)  # it may be frozen
    if imports:
        recorded = config.model.imports if "imports" in config.model else ()
        config.model.imports = tuple(dict.fromkeys((*recorded, *imports)))
    messages: list[str] = []
    for each in arguments:
        try:
            _set(config, each)
        except InputError as error:
            messages += error.messages
    if messages:
        raise InputError(*messages)
    return config.to_dict()


def _set(config: Any, argument: str) -> None:
    """Set a field by a flag `--config.SECTION.FIELD=VALUE`, whose value has the type of the field, or is None."""
    from flax.traverse_util import flatten_dict, unflatten_dict  # after the flags are parsed: it imports JAX

    from dape_jax.config import choose, read_text

    name, equals, text = argument.lstrip("-").partition("=")
    path = name.removeprefix("config.").removesuffix(".name")  # the name of a choice; no other field ends so
    section, _, field = path.rpartition(".")
    known, value = list(flatten_dict(spec := config.to_dict(), sep=".")), text
    if path == "model.attention" and equals:  # it does not change results, so that it belongs to no recipe's method
        config.model.attention = ConfigDict(choose("attention", text))
        return
    if any(each.startswith(f"{path}.") for each in known):
        advice = "is a section; set its fields, or choose it by name in the config file's argument"
        raise InputError(f"{argument}: {advice}")
    try:
        value = read_text(spec, path, text)
    except (LookupError, TypeError, InputError):
        if path not in known:  # otherwise `read_run` says what is wrong with the config file
            known.sort(key=lambda each: each.startswith(section))  # of equal names, that of the section is last
            paths = {each.rpartition(".")[2]: each for each in known}
            nearest, advice = most_similar(field, paths), "--help lists the sections, --help=SECTION the fields of one"
            if nearest is not None:
                advice = f"did you mean --config.{paths[nearest]}?"
            raise InputError(f"{argument}: the config has no such field; {advice}") from None
    if not equals:
        raise InputError(f"{argument}: must be {argument}=VALUE")
    with config.ignore_type(), config.unlocked():  # `read_run` refuses values of another type
        config.update(unflatten_dict({path: value}, sep="."))
