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
from dape_jax.storage import bucket_errors

flags.disclaim_key_flags()  # flags of `define_flags` belong to its caller, whose --help lists them

Settings = TypeVar("Settings")


def run(
    main: Callable[[list[str]], None],
    interrupted: str = "interrupted",
    positional: tuple[str, ...] = (),
    on_bad_flags: Callable[[list[str], InputError], None] = lambda arguments, error: None,
) -> None:
    """Parse flags, call `main`, and turn expected exceptions into one line on standard error and an exit status.

        InputError (also for bad flags)   2, with one line for each message
        NonFiniteError                    1
        OSError                           1, for example for an unreadable file or a full disk
        StoppedError                      143
        Ctrl-C                            130
        BrokenPipeError                   141, without a line

    Any other exception is a bug and keeps its traceback. Messages of this package are logged from INFO, those of
    libraries from WARNING, because Orbax logs many lines for each checkpoint.

    Args:
        main: function that is called with the program's name and its positional arguments.
        interrupted: message after Ctrl-C.
        positional: names of the positional arguments, for messages. Further arguments are refused.
        on_bad_flags: function that is called with the command line and the error of a flag or the config file, before
            the error is printed.
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
        with bucket_errors():
            main(arguments)

    def parse(arguments: list[str]) -> list[str]:
        try:
            return _parse(arguments)
        except InputError as error:
            on_bad_flags(arguments, error)
            raise
        except SystemExit:  # absl has printed the help, and exits with 1
            sys.exit(0)

    sys.unraisablehook = _print_unraisable
    # --help shows the docstring of the main module, and the script of an installed entry point has none.
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
    except BrokenPipeError:  # the reader of the output has exited, as in `| head`; without dup2 the final flush fails
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
    """Format log records as time, level (from WARNING) and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line = super().format(record)
        if record.levelno < logging.WARNING:
            return line
        clock, _, message = line.partition(" ")
        return f"{clock} {record.levelname.lower()}: {message}"


def _print_unraisable(unraisable: Any) -> None:
    """Print an unraisable exception, except those of TensorStore's threads after Orbax has closed its event loop."""
    if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(unraisable)


def _parse(arguments: list[str]) -> list[str]:
    """Return the positional arguments after parsing the flags.

    `--flag=None` sets an optional flag or config field to None.

    Raises:
        InputError: a flag or the config file is wrong; with a message for each wrong flag.
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
        _, _, message = text.rpartition("dape_jax.errors.InputError: ")  # a config file's error follows its traceback
        messages = _wrong_flags(arguments) if message == text else []
        raise InputError(*(messages or [message])) from error
    except BrokenPipeError:  # `--help | head`
        raise
    except OSError as error:
        raise _unreadable(error) from error
    except (AttributeError, KeyError) as error:  # raised by a config without this field, or without its section
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
    with config.ignore_type():  # the check of the whole config later refuses None where it is not allowed
        config[name] = None


PARSERS = {int: flags.IntegerParser(), float: flags.FloatParser(), bool: flags.BooleanParser()}


def _wrong_flags(arguments: list[str]) -> list[str]:
    """Return a message for each unknown flag, and for each flag with a value of the wrong type."""
    defined, messages, config = flags.FLAGS, [], None
    for argument in arguments[1:]:
        if argument == "--":
            break
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not name or name[0].isdigit():  # -1 is a value, not a flag
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
    """Return the parser of a flag.

    The type of a config field gives its parser: if absl has stopped at an earlier flag, it has not defined this one.
    """
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
    """Parser that refuses to set a whole section of a config."""

    def parse(self, argument: str) -> None:
        """Raise `ValueError`."""
        raise ValueError("is a section; set its fields, or choose it by name in the config file's argument")


def _missing_field(config: Any, name: str) -> str:
    """Return advice on a flag `config.SECTION.FIELD` whose field is not in the config, or "" if it is."""
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
    """Return the nested dict of a config-file flag.

    Raises:
        InputError: the file cannot be read, which absl reports only when the value is used.
    """
    config: Any = flag.value
    try:
        return config.to_dict()
    except OSError as error:
        raise _unreadable(error) from error


def flag(default: Any, text: str, repeated: bool = False) -> Any:
    """Return a dataclass field that `define_flags` turns into a flag with this help text.

    The default `dataclasses.MISSING` makes the flag required. A tuple is given as a comma-separated list or, if
    `repeated`, as one string for each occurrence of the flag.
    """
    return dataclasses.field(default=default, metadata={"help": text, "repeated": repeated})


def define_flags(settings: type) -> None:
    """Define one absl flag for each field of a dataclass, except inherited fields.

    A tuple becomes a list flag, and any other type the flag of the same type, which may be None for `TYPE | None`. A
    field without a default becomes a required flag.
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
    """Return the dataclass with the values of the flags that `define_flags` defined for it.

    Raises:
        InputError: an item of a list of numbers is not a number or range, or the dataclass refuses a value.
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


MAX_NUMBERS = 1_000_000  # maximum length of one range in a flag


def read_numbers(field: str, items: Sequence[str]) -> tuple[int, ...]:
    """Return the integers of a flag's items: `7`, `1-40` (1 to 40, both included) or `40-500/20` (every 20th from 40).

    Raises:
        InputError: an item has another form, or is an empty or too long range.
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
