"""Fields of a config with their types, defaults, meanings and allowed values: `--help=SECTION` and `docs/config.md`.

A meaning is the comment beside a field of its dataclass. The allowed values are what the dataclass's checks say about
values that they refuse.
"""

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from typing import Any, NamedTuple

from dape_jax.config import CHOICES, RunConfig, TaskRunConfig, read_run
from dape_jax.data.store import follow_corpus
from dape_jax.errors import InputError, did_you_mean, require
from dape_jax.model.transformer import TransformerConfig
from dape_jax.recipes import RECIPES, read_config

# Recipes whose values are shown as defaults; the others take those of another run.
SHOWN = {"quickstart": "", "small": "", "paper": "", "che": ":task=even_pairs"}
PROBES = {int: (-2,), float: (-2.0,), str: ("?", "")}  # values that checks may refuse


class Field(NamedTuple):
    """Field of a config section."""

    name: str
    kind: str  # its type
    default: str  # in the recipes, if they have it, or else of the dataclass
    meaning: str
    allowed: str  # "" if nothing is refused


class Section(NamedTuple):
    """Section of a config, or a choice by name in the section `model`."""

    name: str  # "optimizer", or "model.bias = fire"
    summary: str  # first line of the dataclass's docstring
    fields: list[Field]


def sections() -> list[Section]:
    """Return all sections of the configs of language models and of tasks."""
    specs = {name: read_config(f"{RECIPES / name}.py{argument}") for name, argument in SHOWN.items()}
    specs["paper"]["data"]["path"] = None  # it has no default
    found = []
    for cls, run, recipes in (
        (RunConfig, read_run(follow_corpus(specs["quickstart"])), ("quickstart", "small", "paper", "che")),
        (TaskRunConfig, read_run(specs["che"]), ("che",)),
    ):
        for section in dataclasses.fields(cls):
            config = getattr(run, section.name)
            if type(config) in [type(other) for _, other, _ in found]:
                continue
            values = {name: specs[name][section.name] for name in recipes if _fits(config, specs[name][section.name])}
            found.append((section.name, config, values))
            if section.name == "model":
                for field, table in CHOICES.items():
                    if field != "alternate_rotary":
                        found += [(f"model.{field} = {name}", table[name](), {}) for name in table]
    return [Section(name, _summary(config), _fields(config, values)) for name, config, values in found]


def _fits(config: Any, values: dict[str, Any]) -> bool:
    return set(values) <= {field.name for field in dataclasses.fields(config)}


def _summary(config: Any) -> str:
    return (inspect.getdoc(type(config)) or "").partition("\n")[0]


def _fields(config: Any, recipes: dict[str, dict[str, Any]]) -> list[Field]:
    meanings, found = _meanings(type(config)), []
    for field in dataclasses.fields(config):
        is_choice = isinstance(config, TransformerConfig) and field.name in CHOICES
        groups: dict[str, list[str]] = {}
        for recipe, values in recipes.items():
            if field.name in values:
                groups.setdefault(_text(values[field.name]), []).append(recipe)
        of_recipes = [f"{value} ({', '.join(names)})" if len(groups) > 1 else value for value, names in groups.items()]
        kind = "name" if is_choice else _kind(field)
        allowed = ", ".join(CHOICES[field.name]) if is_choice else _allowed(config, field)
        default = "; ".join(of_recipes) or _text(field.default)
        found.append(Field(field.name, kind, default, meanings[field.name], allowed))
    return found


def _text(value: Any) -> str:
    """Return a value as it is given to a flag; of a choice, its name."""
    if isinstance(value, tuple):
        few = value if len(value) <= 8 else (*value[:3], "..", value[-1])
        return ", ".join(map(str, few)) or "()"
    return str(value["name"] if isinstance(value, dict) else value)


def _meanings(cls: type) -> dict[str, str]:
    """Return the comments beside and above the fields of a dataclass."""
    found: dict[str, str] = {}
    for each in [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]:
        above: list[str] = []
        for line in inspect.getsource(each).splitlines():
            if line.startswith("    # "):
                above.append(line.removeprefix("    # "))
                continue
            if field := re.match(r"    (\w+):", line):
                _, _, beside = line.partition("  # ")
                found[field[1]] = " ".join([*above, beside]).strip()
            above = []
    return found


def _kind(field: dataclasses.Field) -> str:
    """Return the type of a field as text: "int", "int or None", "list of int"."""
    kind: Any = field.type
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    names = [
        f"list of {typing.get_args(kind)[0].__name__}" if typing.get_args(kind) else kind.__name__ for kind in kinds
    ]
    names = [name for name in names if name != "NoneType"]
    return " or ".join([*names, "None"] if len(kinds) > len(names) or field.default is None else names)


def _allowed(config: Any, field: dataclasses.Field) -> str:
    """Return what the dataclass says about a value that it refuses, or ""."""
    kind = typing.get_args(field.type)[0] if typing.get_args(field.type) else field.type
    if kind is bool:
        return "True, False"
    for probe in PROBES[kind]:
        value = (probe,) if typing.get_origin(field.type) is tuple else probe
        try:
            dataclasses.replace(config, **{field.name: value})
        except InputError as error:
            of_field = [line for line in error.messages if f".{field.name} = " in line]
            if of_field:
                allowed = of_field[0].partition(f" = {value!r}: ")[2]
                allowed = re.sub(r"(?<=\w) = ([\d.]+|None)", "", allowed)  # values of this recipe
                allowed = re.sub(r"[\[\]]|(?<!\w)'([^']*)'", r"\1", allowed)
                return re.sub(r"^must (be )?(not be )?", lambda found: "not " if found[2] else "", allowed)
    return ""


def describe(name: str) -> str:
    """Return the description of a section, such as `optimizer`, `model` or `model.bias`, for the terminal.

    Raises:
        InputError: there is no such section.
    """
    found = sections()
    known = list(dict.fromkeys(each.name.partition(" = ")[0] for each in found))
    require(name in known, "--help", name, f"must be one of {known}{did_you_mean(name, known)}")
    lines = []
    for section in found:
        if section.name.partition(" = ")[0] == name:
            lines += [f"{section.name}: {section.summary}", ""]
            for field in section.fields:
                lines += [f"  --config.{name}.{field.name}  ({field.kind})"]
                parts = (field.meaning, f"default: {field.default}", field.allowed and f"allowed: {field.allowed}")
                for part in filter(None, parts):
                    lines += textwrap.wrap(part, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
            lines += [""] if section.fields else []
    return "\n".join(lines).rstrip()
