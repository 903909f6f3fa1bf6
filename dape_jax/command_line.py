"""Command lines: flags from dataclasses, quiet libraries, one-line errors for bad input."""

import dataclasses
import functools
import gc
import io
import logging
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from absl import app, flags
from absl import logging as absl_logging

from dape_jax import recipes
from dape_jax.errors import InputError, NonFiniteError, StoppedError, did_you_mean, printable, require
from dape_jax.hardware import platform_fault
from dape_jax.imports import import_modules
from dape_jax.storage import absolute, read_errors, to_path
from dape_jax.version import __version__

flags.disclaim_key_flags()  # flags of `run` belong to its caller, whose --help lists them

Settings = TypeVar("Settings")
LOG_FORMATTER = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")


def run(
    main: Callable[..., None],
    *settings: type,
    config: bool = False,
    interrupted: str = "interrupted",
    positional: tuple[str, ...] = (),
) -> None:
    """Call `main`, and turn expected exceptions into one line on standard error and an exit status.

    Each field of a dataclass in `settings` is a flag; see `flag`.

        InputError (also for bad flags)   2, with one line for each message
        OverflowError                     2, a size of the config that does not fit into a device's integers
        RuntimeError of a missing device  2, if JAX_PLATFORMS asks for it
        NonFiniteError                    1
        OSError                           1, for example for an unreadable file or a full disk
        StoppedError                      143 after SIGTERM, 138 after SIGUSR1
        Ctrl-C                            130
        BrokenPipeError                   141, without a line

    Any other exception is a bug and keeps its traceback. Messages of this package are logged from INFO, those of
    libraries from WARNING, because Orbax logs many lines for each checkpoint.

    Args:
        main: function of an instance of the first of `settings`, if there are any, of the config and of the positional
            arguments.
        settings: dataclasses; `from_flags` returns instances of the others.
        config: whether there are flags `--config`, `--config.SECTION.FIELD` and `--import`; see `recipes.read_config`.
        interrupted: message after Ctrl-C.
        positional: names of the positional arguments, for messages. Further arguments are refused.
    """
    fields = _field_flags() if config else []

    def parse(arguments: list[str]) -> list[str]:
        try:
            remaining = _parse([each for each in arguments if each not in fields])
        except SystemExit:  # absl has printed the help, and exits with 1
            sys.exit(0)
        if excess := remaining[1 + len(positional) :]:
            accepted = " ".join([*positional, "flags of the form --name=value, with commas between values"])
            raise InputError(f"command line = {excess[0]!r}: must be {accepted}")
        absl_logging.set_verbosity(absl_logging.WARNING)
        absl_logging.get_absl_handler().setFormatter(LOG_FORMATTER)
        logging.getLogger("dape_jax").setLevel(logging.INFO)
        return remaining

    def call(arguments: list[str]) -> None:
        given = flags.FLAGS.flag_values_dict()
        spec = [recipes.read_config(given["config"], fields, given["import"])] if config else []
        main(*map(from_flags, settings[:1]), *spec, *arguments[1:])

    gc.set_threshold(100_000)  # imports and tracing make many objects: by default a tenth of the start is collections
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for text that the locale cannot represent
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # None if it was closed, as by `2>&-`
    os.environ.pop("MPLBACKEND", None)  # figures are files, and matplotlib raises for a backend that it has no longer
    _define_flags(config, settings)
    # --help shows the docstring of the main module, and the script of an installed entry point has none.
    needs_recipes = config and any(re.match("--?help", each) for each in sys.argv[1:])
    of_recipes = f"\n{recipes.describe()}\n" if needs_recipes else ""
    sys.modules["__main__"].__doc__ = f"{sys.modules[main.__module__].__doc__}{of_recipes}"
    try:
        try:
            app.run(call, flags_parser=parse)
        finally:
            print(end="", flush=True)  # now, so that the reader of a pipe is missed here and not at the exit
        return
    except KeyboardInterrupt:
        status, lines = 130, [interrupted]
    except BrokenPipeError:  # the reader of the output has exited, as in `| head`; without dup2 the final flush fails
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status, lines = 141, []
    except StoppedError as error:
        status, lines = 128 + error.number, [str(error)]
    except InputError as error:
        status, lines = 2, [f"error: {line}" for line in error.messages]
    except OverflowError as error:
        status, lines = 2, [f"error: a number of the config is too large: {error}"]
    except (NonFiniteError, OSError) as error:
        status, lines = 1, [f"error: {error}"]
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it has a platform
        fault = platform_fault(error)
        if fault is None:
            raise
        status, lines = 2, [f"error: {fault}"]
    for line in lines:
        print(printable(line), file=sys.stderr)
    if status == 130:
        os._exit(status)  # the interpreter's own exit waits for threads, and may crash in a running XLA program
    sys.exit(status)


def config_flags() -> list[str]:
    """Return the flags that chose the config of this process: --config, --import and those of fields."""
    given = flags.FLAGS.flag_values_dict()
    modules = [f"--import={','.join(given['import'])}"] if given["import"] else []
    return [f"--config={given['config']}", *modules, *_field_flags()]


def _field_flags() -> list[str]:
    return [each for each in sys.argv[1:] if re.match("--?config[.]", each)]


def _parse(arguments: list[str]) -> list[str]:
    """Return the positional arguments after parsing the flags.

    Raises:
        InputError: flags are unknown, or else values of flags are wrong; with a line for each.
    """
    if {"-version", "--version"} & set(arguments[1:]):
        print(f"dape_jax {__version__}")
        sys.exit(0)
    given = [re.fullmatch("--?(help|import)=(.+)", each) for each in arguments[1:]]
    values = {match[1]: match[2] for match in given if match}
    if "config" in flags.FLAGS and "help" in values:
        import_modules(values["import"].split(",") if "import" in values else (), "--import")
        from dape_jax.fields import describe  # it imports JAX

        print(describe(values["help"]))
        sys.exit(0)
    names = {each: each.lstrip("-").partition("=")[0] for each in arguments[1:] if re.match("--?[^-0-9]", each)}
    unknown = {each: name for each, name in names.items() if not {name, name.removeprefix("no")} & set(flags.FLAGS)}
    if unknown:
        fields = "; fields of the config are --config.SECTION.FIELD=VALUE" * ("config" in flags.FLAGS)
        nearest = [did_you_mean(name, flags.FLAGS, "--") or f"{fields}; see --help" for name in unknown.values()]
        raise InputError(*(f"{each}: no such flag{advice}" for each, advice in zip(unknown, nearest, strict=True)))
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        missing = r"=None: Flag --\w+ must have a value other than None\."
        text = re.sub(missing, ": must be given", str(error))
        text = text.replace("already defined as", "must be given once, with commas between its values; it is also")
        raise InputError(*(line.removeprefix("flag ") for line in text.splitlines())) from error


COMPILATION_CACHE = "Directory, local or gs://, for compiled programs; by default $JAX_COMPILATION_CACHE_DIR."


def use_compilation_cache(directory: str | None) -> None:
    """Set the directory of JAX's compilation cache, if the flag is given, and create it if it is missing.

    Raises:
        InputError: it cannot be created or read. (JAX would warn at every program that it compiles.)
    """
    if directory:
        path = absolute(to_path(directory, "--compilation_cache"))
        with read_errors("--compilation_cache", directory, "created or read"):
            path.mkdir(parents=True, exist_ok=True)
            next(path.iterdir(), None)
        import jax  # imported here: it takes seconds, and a wrong flag is reported first

        jax.config.update("jax_compilation_cache_dir", str(path))


def flag(default: Any, text: str, repeated: bool = False) -> Any:
    """Return a dataclass field that `run` turns into a flag of its type with this help text.

    The default `dataclasses.MISSING` makes the flag required. A tuple is given as a comma-separated list or, if
    `repeated`, as one string for each occurrence of the flag. A field of `TYPE | None` may be None.
    """
    return dataclasses.field(default=default, metadata={"help": text, "repeated": repeated})


def unescape(text: str) -> str:
    r"""Return the text of a flag whose escapes \n, \r, \t, \f and \\ are these characters."""
    escapes = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\"}
    return re.sub(r"\\([nrtf\\])", lambda match: escapes[match[1]], text)


class _BooleanParser(flags.BooleanParser):
    """Read true, false, yes, no."""

    def parse(self, argument: str | int) -> bool:
        """Return the value of a flag."""
        try:
            return super().parse({"yes": True, "no": False}.get(str(argument).lower(), argument))
        except ValueError:
            raise ValueError("must be true, false, yes or no") from None


def _define_flags(config: bool, settings: Sequence[type]) -> None:
    """Define one absl flag for each field of the dataclasses, those of a config file, and --version."""
    kinds = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
    if "version" not in flags.FLAGS:  # defined by an earlier call in this process
        flags.DEFINE_bool("version", False, "Print the version.")
    names, required = ["version"], list[str]()
    if config:
        text = "Config file or recipe of the package, with its argument after a colon: configs/quickstart.py:bias=alibi"
        flags.DEFINE_string("config", None, f"{text}. --config.SECTION.FIELD=VALUE sets a field.")
        text = "Modules of your own that add to BIASES and PROCESSORS, in the current directory or installed"
        flags.DEFINE_list("import", [], f"{text}: my_methods.", allow_overwrite=False)
        names, required = [*names, "config", "import"], ["config"]
    for each in settings:
        hints = typing.get_type_hints(each)
        for field in dataclasses.fields(each):
            kind, is_required = hints[field.name], field.default is dataclasses.MISSING
            default: Any = None if is_required else field.default
            if field.metadata["repeated"]:
                define = flags.DEFINE_multi_string
            elif typing.get_origin(kind) is tuple:
                define = functools.partial(flags.DEFINE_list, allow_overwrite=False)  # else the last one counts
                default = None if is_required else list(map(str, default))
            else:
                define = kinds[next(member for member in (*typing.get_args(kind), kind) if member in kinds)]
            define(field.name, default, field.metadata["help"])
            if define is flags.DEFINE_bool:
                flags.FLAGS[field.name].parser = _BooleanParser()
            names.append(field.name)
            required += [field.name] if is_required else []
    flags.mark_flags_as_required(required)
    for name in names:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])  # --help lists these


def from_flags(settings: type[Settings]) -> Settings:
    """Return the dataclass with the values of the flags that `run` defined for it.

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


def read_numbers(field: str, items: Sequence[str]) -> tuple[int, ...]:
    """Return the integers of a flag's items: `7`, `1-40` (1 to 40, both included) or `40-500/20` (every 20th from 40).

    Raises:
        InputError: an item has another form, or is an empty range.
    """
    numbers: list[int] = []
    for item in items:
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7})(?:/([1-9]\d{0,6}))?)?", item, re.ASCII)
        if match is None:
            message = "must be comma-separated integers of up to 7 digits, or ranges first-last or first-last/step"
            raise InputError(f"{field} = {list(items)!r}: {message}")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        require(first <= last, field, list(items), f"{item} is an empty range")
        numbers.extend(range(first, last + 1, step))
    return tuple(numbers)
