"""What a user is told when the input is wrong; every room raises it, the two command lines print it."""


class InputError(ValueError):
    """Bad input, in one line that names the field, its value and what is allowed.

    The command lines print it without a traceback; any other exception is a bug and keeps its traceback.
    """


class NonFiniteError(RuntimeError):
    """The loss or its gradient is no longer a finite number; the command line prints it without a traceback."""


class StoppedError(RuntimeError):
    """SIGTERM has ended a run whose state is saved; the command line says so and ends with a signal's status."""


def printable(text: str) -> str:
    r"""A text in one line that cannot drive a terminal: a file's name may hold escape sequences, shown as \x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise `InputError("field = value: allowed")` unless the condition holds."""
    if not condition:
        raise InputError(f"{field} = {value!r}: {allowed}")
