"""Records -> texts: values of fields, and whether they match. In: a JSON value or a row of parquet. Next: `records`."""

import dataclasses
import datetime
import decimal
import fractions
import itertools
import json
from collections.abc import Iterable
from typing import Any

from dape_jax.data.prepare.config import PrepareConfig, Skipped


@dataclasses.dataclass(frozen=True)
class Bad:
    """Record that cannot be read, or the position at which a file is damaged."""

    reason: str  # category, for counts
    detail: str


def select_text(record: Any, config: PrepareConfig) -> bytes | Skipped | Bad:
    """Return the text of a record, or why it is skipped or bad."""
    for field, accepted in config.conditions:
        value = lookup(record, field)
        if not any(_matches(value, text) for text in accepted):
            return "filtered"
    text = lookup(record, config.text_field)
    try:
        if isinstance(text, str | bytes):  # bytes from parquet
            return (text if isinstance(text, str) else text.decode()).encode()
    except UnicodeError as error:  # half a surrogate pair is JSON, but not Unicode
        return Bad("not Unicode", str(error))
    fields = record if isinstance(record, dict) else ()
    found = f"missing; fields: {listed(fields)}" if text is None else type(text).__name__
    return Bad("no text", f"{config.text_field!r} is {found}")


def lookup(record: Any, field: str) -> Any:
    """Return the value of a field, or None: its name as it is, or else with dots that descend into objects."""
    if not isinstance(record, dict) or field in record:
        return record[field] if isinstance(record, dict) else None
    dots = (i for i, char in enumerate(field) if char == ".")
    found = (lookup(record[field[:i]], field[i + 1 :]) for i in dots if field[:i] in record)
    return next((value for value in found if value is not None), None)


def spelled(value: Any) -> str:
    """Return a value as `where` gives it: as in JSON, text without quotes, a date or time in ISO 8601."""
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    return json.dumps(value) if isinstance(value, bool | int | float | None) else str(value)


def _matches(value: Any, text: str) -> bool:
    """Return whether a value is the one in `where`, perhaps spelled otherwise."""
    if text == spelled(value):
        return True
    try:
        if isinstance(value, datetime.datetime):
            given = datetime.datetime.fromisoformat(text)
            return value == (given if given.tzinfo else given.replace(tzinfo=value.tzinfo))
        is_number = isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool)
        return is_number and fractions.Fraction(text) == fractions.Fraction(value)  # 2003 and 2003.0
    except (ValueError, ArithmeticError):
        return False


def listed(names: Iterable[Any]) -> str:
    """Return the first names of fields as text."""
    return ", ".join(str(name) for name in itertools.islice(names, 20)) or "none"
