"""Fields of a config with their types, defaults, meanings and allowed values: `--help=SECTION` and `docs/config.md`.

A meaning is the comment beside a field of its dataclass. The allowed values are what the dataclass's checks say about
values that they refuse.
"""

import dataclasses
import inspect
import re
import textwrap
import typing
from typing import Any, NamedTuple

from dape_jax.config import CHOICES, read_run
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
    found: dict[type, tuple[str, Any]] = {}
    for run in (read_run(follow_corpus(specs["quickstart"])), read_run(specs["che"])):
        for section in dataclasses.fields(run):
            config = getattr(run, section.name)
            found.setdefault(type(config), (section.name, config))
            for field, table in CHOICES.items() if section.name == "model" else ():
                for name in table if field != "alternate_rotary" else ():
                    found.setdefault(table[name], (f"model.{field} = {name}", table[name]()))
    return [
        Section(name, (inspect.getdoc(cls) or "").partition("\n")[0], _fields(config, name, specs))
        for cls, (name, config) in found.items()
    ]


def _fields(config: Any, section: str, specs: dict[str, dict[str, Any]]) -> list[Field]:
    """Return the fields of a section, with the values of those recipes that have all of their fields in it."""
    meanings, found = meanings_of(type(config)), []
    fields, kinds = {field.name: field for field in dataclasses.fields(config)}, typing.get_type_hints(type(config))
    values = {
        name: spec[section] for name, spec in specs.items() if section in spec and set(spec[section]) <= {*fields}
    }
    for name, field in fields.items():
        groups: dict[str, list[str]] = {}
        for recipe in (recipe for recipe, of_recipe in values.items() if name in of_recipe):
            groups.setdefault(_text(values[recipe][name]), []).append(recipe)
        defaults = [f"{value} ({', '.join(names)})" if len(groups) > 1 else value for value, names in groups.items()]
        if isinstance(config, TransformerConfig) and name in CHOICES:
            kind, allowed = "name", ", ".join(CHOICES[name])
        else:
            kind = re.sub(r"tuple\[(\w+), \.\.\.\]", r"list of \1", inspect.formatannotation(kinds[name]))
            kind = kind.replace(" | ", " or ") + " or None" * (field.default is None and "None" not in kind)
            allowed = _allowed(config, name, kinds[name])
        found.append(Field(name, kind, "; ".join(defaults) or _text(field.default), meanings[name], allowed))
    return found


def _text(value: Any) -> str:
    """Return a value as it is given to a flag; of a choice, its name."""
    if isinstance(value, tuple):
        few = value if len(value) <= 8 else (*value[:3], "..", value[-1])
        return ", ".join(map(str, few)) or "()"
    return str(value["name"] if isinstance(value, dict) else value)


def meanings_of(cls: type) -> dict[str, str]:
    """Return the comments beside and above the fields of a dataclass or named tuple."""
    found: dict[str, str] = {}
    for each in [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base) or hasattr(base, "_fields")]:
        above: list[str] = []
        source = inspect.getsource(each)
        indent = re.findall(r"\n([ \t]+)", source)[0]  # of a user's module, perhaps two spaces
        for line in source.splitlines():
            if line.startswith(f"{indent}# "):
                above.append(line.removeprefix(f"{indent}# "))
                continue
            if field := re.match(rf"{indent}(\w+):", line):
                _, _, beside = line.partition("  # ")
                found[field[1]] = " ".join([*above, beside]).strip()
            above = []
    return found


def _allowed(config: Any, name: str, annotation: Any) -> str:
    """Return what the dataclass says about a value of a field that it refuses, or ""."""
    kind = typing.get_args(annotation)[0] if typing.get_args(annotation) else annotation
    if kind is bool:
        return "True, False"
    for probe in PROBES[kind] if kind in PROBES else ():
        value = (probe,) if typing.get_origin(annotation) is tuple else probe
        try:
            dataclasses.replace(config, **{name: value})
        except InputError as error:
            of_field = [line for line in error.messages if f".{name} = " in line]
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
