"""Exceptions for users, the checks that raise them, marks of a config's fields, and text that is safe to print."""

import difflib
import importlib.metadata
import importlib.util
import re
import signal
from collections.abc import Collection, Iterable
from typing import Annotated, Any, TypeVar

Value = TypeVar("Value")
# Types of a config's fields that may change when a run resumes. `Resumable` fields affect only performance, storage,
# evaluation or the handling of bad steps: the trained model changes at most by rounding, and dropout's masks by
# `mesh.context` and the accumulation. `Changeable` fields may change if the user names them: later steps are computed
# with the new value.
Resumable = Annotated[Value, "resumable"]
Changeable = Annotated[Value, "changeable"]


class InputError(ValueError):
    """Invalid input, described in one line with the field, its value and the allowed values; or in several lines.

    Command lines print these lines without a traceback. Any other exception is a bug and keeps its traceback.
    """

    def __init__(self, *messages: str):
        super().__init__("; ".join(messages))
        self.messages = messages


class NonFiniteError(RuntimeError):
    """Non-finite loss or gradient; command lines print it without a traceback."""


class StoppedError(RuntimeError):
    """Run stopped by a signal after saving its state; command lines print it and exit with 128 + its number."""

    def __init__(self, message: str, number: int = signal.SIGTERM):
        super().__init__(message)
        self.number = number


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise `InputError("field = value: allowed")` unless the condition holds."""
    if not condition:
        first_line = repr(value).partition("\n")[0]  # modules of Flax have many lines
        raise InputError(f"{field} = {first_line}: {allowed}")


def require_package(package: str, extra: str, field: str, value: object) -> None:
    """Raise `InputError`, with the command that installs an extra, if the package that `value` needs is missing."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{field} = {value!r}: needs the package {package}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It does not name this package, so that it works for an installation from a clone, a wheel or an index.
    """
    try:
        requirements = importlib.metadata.requires("dape_jax") or []
    except importlib.metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in the clone"
    wanted, packages = [extra], list[str]()
    for name in wanted:
        for found in (re.fullmatch(rf"([^;]+); extra == .{name}.", each) for each in requirements):
            if found and (inner := re.fullmatch(r"dape[_-]jax\[(.+)\]", found[1])):
                wanted += inner[1].split(",")
            elif found:
                packages.append(f"'{found[1]}'")
    return f"pip install {' '.join(packages)}"


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean NAME?" with the known name that is most similar, after the prefix, or "" if none is."""
    nearest = most_similar(name, known)
    return "" if nearest is None else f"; did you mean {prefix}{nearest}?"


def most_similar(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar, or None if none is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)), None)


def positive(config: object, section: str, *fields: str) -> None:
    """Raise `InputError` unless each of these fields of a config dataclass is above 0, or None.

    positive(self, "model", "num_layers", "width")
    """
    given = {field: value for field in fields if (value := getattr(config, field)) is not None}
    wrong = [f"{section}.{field} = {value!r}: must be positive" for field, value in given.items() if not value > 0]
    if wrong:
        raise InputError(*wrong)


def one_of(config: object, section: str, **allowed: Collection[Any]) -> None:
    """Raise `InputError` unless each of these fields of a config dataclass has one of the allowed values.

    one_of(self, "model", activation=ACTIVATIONS, dtype=DTYPES)
    """
    for field, values in allowed.items():
        value = getattr(config, field)
        require(value in values, f"{section}.{field}", value, f"must be one of {list(values)}")


def printable(text: str, keep: str = "") -> str:
    r"""Return the text with control characters escaped (\x1b), because they could control the terminal.

    Characters in `keep` are not escaped, for example a newline; by default the result is one line.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a program does not fit in a device's memory."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "CompileTimeHbmOom" in text or "out of memory" in text.lower()
