"""How every command line of the project starts: quiet libraries, and one line for bad input."""

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

from dape_jax.errors import InputError, NonFiniteError, StoppedError, printable, require

flags.disclaim_key_flags()  # flags of `define_flags` belong to its caller, whose --help lists them

Settings = TypeVar("Settings")


def run(main: Callable[[list[str]], None], interrupted: str = "interrupted", positional: tuple[str, ...] = ()) -> None:
    """Parse flags and call `main` with the program's name and its arguments that are no flags.

    Args:
        main: the program.
        interrupted: what is said after Ctrl-C.
        positional: names of the arguments that are no flags, for messages; as many are taken at most.

    An `InputError`, like a bad flag, ends the program with one line on standard error and status 2, a `NonFiniteError`
    with one line and status 1, a `StoppedError` with one line and status 143. Any other exception is a bug and keeps
    its traceback. Of the logs, ours are shown from INFO on and those of the libraries from WARNING on (Orbax writes a
    screenful for every checkpoint).
    """

    def quietly(arguments: list[str]) -> None:
        absl_logging.set_verbosity(absl_logging.WARNING)
        logging.getLogger("dape_jax").setLevel(logging.INFO)
        if len(arguments) > 1 + len(positional):
            taken = f"after {' '.join(positional)}, flags" if positional else "flags"
            raise InputError(
                f"command line = {arguments[1 + len(positional)]!r}: {taken} alone, in the form --name=value"
            )
        main(arguments)

    try:
        app.run(quietly, flags_parser=_parse)
    except InputError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has gone, `| head` for one; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except NonFiniteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except StoppedError as error:
        print(error, file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)


def _parse(arguments: list[str]) -> list[str]:
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        text = "; ".join(str(error).splitlines())
        _, ours, said = text.rpartition("dape_jax.errors.InputError: ")  # a config's own, at the end of its traceback
        if not ours and "as a ConfigDict" in text:
            said = f"{text.split(':')[0]}: has fields; set those, or choose by name in the config file's argument"
        raise InputError(said if said else text) from error
    except OSError as error:
        raise _unreadable(error) from error
    except AttributeError as error:  # what a config says of a field that it does not have
        field = str(error).strip("\"'")
        given = [flag for flag in arguments if field in flag.split("=")[0].split(".")]
        raise InputError(f"{', '.join(given) or field}: the config has no such field for what it has chosen") from error


def config_of(flag: flags.FlagHolder) -> dict[str, Any]:
    """The nested dict of a config-file flag; a file that could not be read says so only when it is asked for."""
    try:
        return flag.value.to_dict()
    except OSError as error:
        raise _unreadable(error) from error


def flag(default: Any, text: str, repeated: bool = False) -> Any:
    """Return a dataclass field that `define_flags` turns into a flag with this help text.

    A tuple is a comma-separated list or, if `repeated`, one text for each time that the flag is given.
    """
    return dataclasses.field(default=default, metadata={"help": text, "repeated": repeated})


def define_flags(settings: type) -> None:
    """Define one absl flag for each field of a dataclass.

    The type of the field decides the kind: a list for a tuple, a switch for a bool, a number or text otherwise, also
    where it may be None. A field without a default is a required flag.
    """
    kinds = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
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


def from_flags(settings: type[Settings]) -> Settings:
    """Return the dataclass whose fields `define_flags` defined, filled from the command line.

    Raises:
        InputError: a list of numbers that holds something else; or what the dataclass refuses.
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


MOST_NUMBERS = 1_000_000  # that a flag may list


def read_numbers(field: str, items: Sequence[str]) -> tuple[int, ...]:
    """The whole numbers that a flag lists: `7`, or `1-40` for all of 1 to 40, or `40-500/20` for every 20th from 40 on.

    Raises:
        InputError: an item of another form.
    """
    numbers: list[int] = []
    for item in items:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:/([1-9]\d{0,8}))?)?", item, re.ASCII)
        allowed = "whole numbers, parted by commas; first-last or first-last/step for many"
        require(match is not None, field, list(items), allowed)
        assert match is not None
        first, last, step = (int(number or 0) for number in match.groups())
        require(match[2] is None or first <= last, field, list(items), f"{item} would be no numbers")
        require(
            (last - first) // (step or 1) < MOST_NUMBERS, field, list(items), f"{item} would be millions of numbers"
        )
        numbers.extend(range(first, max(first, last) + 1, step or 1))
    return tuple(numbers)


def _unreadable(error: OSError) -> InputError:
    return InputError("--config: cannot be read: " + "; ".join(line.strip() for line in str(error).splitlines()))
