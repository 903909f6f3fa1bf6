"""Command lines: flags from dataclasses, quiet libraries, one-line errors for bad input."""

import dataclasses
import logging
import os
import re
import signal
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import ConfigDict

from dape_jax.errors import InputError, NonFiniteError, StoppedError, describe, did_you_mean, printable, require
from dape_jax.storage import errors

flags.disclaim_key_flags()  # flags of `define_flags` belong to its caller, whose --help lists them

Settings = TypeVar("Settings")


def run(
    main: Callable[[list[str]], None],
    interrupted: str = "interrupted",
    positional: tuple[str, ...] = (),
    on_bad_flags: Callable[[list[str], InputError], None] = lambda arguments, error: None,
) -> None:
    """Parse flags and call `main` with the program's name and its positional arguments.

    Args:
        main: the program.
        interrupted: message after Ctrl-C.
        positional: names of the positional arguments, for messages; more arguments than these are refused.
        on_bad_flags: called with the command line and the error of its flags or config file, before this is printed.

    An `InputError`, like bad flags, ends the program with status 2 and a line on standard error for each message, a
    `NonFiniteError` with one line and status 1, a `StoppedError` with one line and status 143. So does an `OSError`,
    with status 1: a file that may not be read, a full disk, a lost network. Any other exception is a bug and keeps its
    traceback. Messages of this package are logged from INFO, those of libraries from WARNING (Orbax logs many lines for
    each checkpoint).
    """

    def quietly(arguments: list[str]) -> None:
        absl_logging.set_verbosity(absl_logging.WARNING)
        absl_logging.get_absl_handler().setFormatter(_PlainFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logging.getLogger("dape_jax").setLevel(logging.INFO)
        if len(arguments) > 1 + len(positional):
            accepted = f"{' '.join(positional)} and flags" if positional else "a flag"
            raise InputError(
                f"command line = {arguments[1 + len(positional)]!r}: must be {accepted} of the form --name=value"
            )
        with errors():
            main(arguments)

    def parse(arguments: list[str]) -> list[str]:
        try:
            return _parse(arguments)
        except InputError as error:
            on_bad_flags(arguments, error)
            raise

    sys.unraisablehook = _print_unraisable
    # For --help, which shows the docstring of the main module: that of an entry point has none.
    sys.modules["__main__"].__doc__ = sys.modules[main.__module__].__doc__
    try:
        app.run(quietly, flags_parser=parse)
    except InputError as error:
        for message in error.messages:
            print(f"error: {printable(message)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has exited, as in `| head`; the flush at exit must not fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except NonFiniteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except StoppedError as error:
        print(error, file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except OSError as error:
        print(f"error: {printable(describe(error))}", file=sys.stderr)
        sys.exit(1)


class _PlainFormatter(logging.Formatter):
    """Format a line of a log: its time, "warning" or worse if it is that, and its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = super().format(record)
        if record.levelno < logging.WARNING:
            return line
        clock, _, message = line.partition(" ")
        return f"{clock} {record.levelname.lower()}: {message}"


def _print_unraisable(unraisable: Any) -> None:
    """Print an exception of a thread, but not that of TensorStore's when Orbax has closed the loop they report to."""
    if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(unraisable)


def _parse(arguments: list[str]) -> list[str]:
    """Return the positional arguments after parsing the flags.

    `--flag=None` sets an optional flag or config field to None. Wrong flags are reported together.

    Raises:
        InputError: a flag or the config file is wrong.
    """
    unset = [argument for argument in arguments if _is_set_to_none(argument)]
    try:
        remaining = flags.FLAGS([argument for argument in arguments if argument not in unset])
        for argument in unset:
            name = argument.lstrip("-").removesuffix("=None")
            if name.startswith("config."):
                _set_to_none(flags.FLAGS["config"].value, name.removeprefix("config."))
            else:
                flags.FLAGS[name].value = None
        return remaining
    except flags.Error as error:
        text = "; ".join(str(error).splitlines())
        text = re.sub(r"flag --(\w+)=None: Flag --\1 must have a value other than None\.", r"--\1: must be given", text)
        _, _, message = text.rpartition("dape_jax.errors.InputError: ")  # raised in a config file, after its traceback
        messages = _wrong_flags(arguments) if message == text else []
        raise InputError(*(messages or [message])) from error
    except BrokenPipeError:  # `--help | head`
        raise
    except OSError as error:
        raise _unreadable(error) from error
    except AttributeError as error:  # raised by a config without this field
        messages = _wrong_flags(arguments)
        if not messages:  # a bug in the config file
            raise
        raise InputError(*messages) from error


def _is_set_to_none(argument: str) -> bool:
    name, _, value = argument.lstrip("-").partition("=")
    if not argument.startswith("-") or value != "None":
        return False
    return name.startswith("config.") or (name in flags.FLAGS and flags.FLAGS[name].default is None)


def _set_to_none(config: Any, path: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        config = config[section]
    with config.ignore_type():  # whether None is allowed there is checked with the rest of the config
        config[name] = None


PARSERS = {int: flags.IntegerParser(), float: flags.FloatParser(), bool: flags.BooleanParser()}


def _wrong_flags(arguments: list[str]) -> list[str]:
    """Return a message for each flag that does not exist or whose value cannot be read."""
    defined, messages, config = flags.FLAGS, [], None
    for argument in arguments[1:]:
        if argument == "--":
            break
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not name or name[0].isdigit():  # -1 is a value
            continue
        if name == "config" and equals:
            config = defined["config"].parser.parse(value)
        elif name.startswith("config.") and config is not None and (advice := _missing_field(config, name)):
            messages.append(f"{argument}: the config has no such field{advice}")
        elif name not in defined and name.removeprefix("no") not in defined and not name.startswith("config."):
            messages.append(f"{argument}: no such flag{did_you_mean(name, defined, '--') or '; see --help'}")
        elif equals and not _is_set_to_none(argument):
            try:
                _parser_of(name, config).parse(value)
            except ValueError as error:
                messages.append(f"{argument}: {' '.join(str(error).split())}")
    return messages


def _parser_of(name: str, config: Any) -> Any:
    """Return the parser of a flag. Flags of a config are not defined yet if absl has stopped at an earlier one."""
    if name.startswith("config.") and config is not None:
        *sections, field = name.split(".")[1:]
        for section in sections:
            config = config[section]
        kind = config.get_type(field.partition("[")[0])
        if issubclass(kind, ConfigDict):
            return _Section()
        if kind in PARSERS and "[" not in field:
            return PARSERS[kind]
    return flags.FLAGS[name].parser if name in flags.FLAGS else flags.ArgumentParser()


class _Section(flags.ArgumentParser):
    """Refuse to set a section of a config."""

    def parse(self, argument: str) -> None:
        """Raise an error."""
        raise ValueError("has fields; set those, or choose by name in the config file's argument")


def _missing_field(config: Any, name: str) -> str:
    """Return "" if the config has the field of a flag `config.SECTION.FIELD`, otherwise advice."""
    here: Any = config
    path = name.partition(".")[2]
    for part in path.split("."):
        part = part.partition("[")[0]  # an item of a tuple
        if not isinstance(here, ConfigDict) or part not in here:
            known = _paths(config)
            same_name = [each for each in known if each.rpartition(".")[2] == path.rpartition(".")[2]]
            prefix = "--config."
            advice = did_you_mean(path, same_name or known, prefix) or did_you_mean(path, known, prefix)
            fields = f"; its fields are {sorted(here.keys())}" if isinstance(here, ConfigDict) else ""
            return advice or fields or "; it has no fields"
        here = here[part]
    return ""


def _paths(config: Any, prefix: str = "") -> list[str]:
    """Return the dotted path of every field of nested config sections."""
    paths = []
    for name in config.keys():
        paths += (
            _paths(config[name], f"{prefix}{name}.") if isinstance(config[name], ConfigDict) else [f"{prefix}{name}"]
        )
    return paths


def config_of(flag: flags.Flag | flags.FlagHolder) -> dict[str, Any]:
    """Return the nested dict of a config-file flag. absl reports an unreadable file only here."""
    config: Any = flag.value
    try:
        return config.to_dict()
    except OSError as error:
        raise _unreadable(error) from error


def flag(default: Any, text: str, repeated: bool = False) -> Any:
    """Return a dataclass field that `define_flags` turns into a flag with this help text.

    The default `dataclasses.MISSING` makes the flag required. A tuple is a comma-separated list or, if `repeated`, one
    text for each time that the flag is given.
    """
    return dataclasses.field(default=default, metadata={"help": text, "repeated": repeated})


def define_flags(settings: type) -> None:
    """Define one absl flag for each field of a dataclass, except those that it inherits.

    The type of the field gives the kind of flag: a list for a tuple, a switch for a bool, otherwise a number or text,
    which may be None. A field without a default is a required flag.
    """
    kinds = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
    hints = typing.get_type_hints(settings)
    for field in (field for field in dataclasses.fields(settings) if field.name in settings.__annotations__):
        text, default = field.metadata["help"], field.default
        is_required = default is dataclasses.MISSING
        if field.metadata["repeated"]:
            flags.DEFINE_multi_string(field.name, None if is_required else default, text)
        elif typing.get_origin(hints[field.name]) is tuple:
            flags.DEFINE_list(field.name, None if is_required else list(map(str, default)), text)  # type: ignore[arg-type]
        else:
            (kind,) = set(typing.get_args(hints[field.name]) or (hints[field.name],)) - {type(None)}
            kinds[kind](field.name, None if is_required else default, text)
        if is_required:
            flags.mark_flag_as_required(field.name)
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[field.name])  # --help lists these


def from_flags(settings: type[Settings]) -> Settings:
    """Return the dataclass with the values of its flags, which `define_flags` defined.

    Raises:
        InputError: a list of numbers contains something else, or the dataclass refuses a value.
    """
    hints, given = typing.get_type_hints(settings), flags.FLAGS.flag_values_dict()
    values = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = given[field.name]
        if typing.get_origin(hints[field.name]) is tuple:
            is_text = typing.get_args(hints[field.name])[0] is str
            value = tuple(value or ()) if is_text else read_numbers(f"--{field.name}", value or ())
        values[field.name] = value
    return settings(**values)


MAX_NUMBERS = 1_000_000  # in a range of a flag


def read_numbers(field: str, items: Sequence[str]) -> tuple[int, ...]:
    """Return the integers in the items of a flag: `7`, `1-40` (1 to 40) or `40-500/20` (every 20th from 40).

    Raises:
        InputError: an item has another form, or its range is empty or too long.
    """
    numbers: list[int] = []
    for item in items:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:/([1-9]\d{0,8}))?)?", item, re.ASCII)
        message = "must be comma-separated integers, or ranges first-last or first-last/step"
        require(match is not None, field, list(items), message)
        assert match is not None
        first, last, step = (int(number or 0) for number in match.groups())
        require(match[2] is None or first <= last, field, list(items), f"{item} is an empty range")
        is_short = (last - first) // (step or 1) < MAX_NUMBERS
        require(is_short, field, list(items), f"{item} is a range of more than {MAX_NUMBERS:,} integers")
        numbers.extend(range(first, max(first, last) + 1, step or 1))
    return tuple(numbers)


def _unreadable(error: OSError) -> InputError:
    return InputError("--config: cannot be read: " + "; ".join(line.strip() for line in str(error).splitlines()))
