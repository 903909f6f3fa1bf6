"""Input files -> documents and their splits.

In: input files. Out: documents, each with its split, from `divided`. Next: `build`, which tokenizes them.

The first of these rules that applies divides a corpus:

1. The user names the files of the validation split.
2. A hash of each document's content (`records.split_of`) decides.
3. The input is one text, or the hash leaves a split without documents, as it may with few: the end of the input is held
   out, and the document there is cut.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dape_jax.data.prepare.config import Bad, PrepareConfig, Skipped
from dape_jax.data.prepare.inputs import InputFile
from dape_jax.data.prepare.records import Content, is_text, listed, lookup, read_documents, spelled, split_of
from dape_jax.data.prepare.texts import cut_before
from dape_jax.data.store import SPLITS, Split
from dape_jax.data.tokenizers import END_TOKENS, Bytes, Tokenizer
from dape_jax.errors import InputError

logger = logging.getLogger(__name__)

_SEPARATOR = END_TOKENS[0]  # usual between the documents of a text file
_SHOWN = 5  # values of a field in a message


class Found(NamedTuple):
    """Record of an input file."""

    file: int  # index
    number: int  # in the file, from 1
    content: Content | Skipped | Bad
    split: Split | None  # of a document


def divided(
    files: list[InputFile], config: PrepareConfig, tokenizer: Tokenizer | None, cut: int | None = None
) -> Iterator[Found]:
    """Yield the records of files; ids without the end_of_document that they may have.

    `tokenizer` is None if it will be trained on the texts. `cut` is the length of the documents before the held-out
    end, in bytes or ids, or None if the other rules apply.
    """
    position = 0
    for index, file in enumerate(files):
        for number, content in read_documents(file, config):
            if isinstance(content, np.ndarray) and len(content) and tokenizer:
                content = content[:-1] if content[-1] == tokenizer.end_of_document else content
            if isinstance(content, bytes) and not isinstance(tokenizer, Bytes):
                try:
                    content.decode()
                except UnicodeError as error:
                    content = Bad("cannot be encoded", str(error))
            if isinstance(content, str | Bad):
                yield Found(index, number, content, None)
            elif reason := config.skips_length(len(content)):
                yield Found(index, number, reason, None)
            elif cut is None:
                key = content if isinstance(content, bytes) else content.astype("<i8").tobytes()
                split = file.split or split_of(key, config.validation_fraction)
                yield Found(index, number, content, split)
            else:
                at, position = min(max(0, cut - position), len(content)), position + len(content)
                if isinstance(content, bytes) and 0 < at < len(content):
                    at = cut_before(content, at)
                if at > 0:
                    yield Found(index, number, content[:at], "train")
                if at < len(content):
                    yield Found(index, number, content[at:], "validation")


def find_cut(files: list[InputFile], config: PrepareConfig, tokenizer: Tokenizer | None) -> int | None:
    """Return `cut` for `divided`. Read documents until both splits have one.

    Raises:
        InputError: there are no documents, or none in the files that the user named for validation.
    """
    if config.validation:
        for split, field in zip(SPLITS, ("input", "validation"), strict=True):
            next(_documents([file for file in files if file.split == split], config, tokenizer, field))
        return None
    if not 0 < config.validation_fraction < 1:
        next(_documents(files, config, tokenizer, "input"))
        return None
    splits, total, is_separated = set(), 0, False
    is_one_text = len(files) == 1 and config.separator is None and is_text(files[0], config)
    for split, number, length in _documents(files, config, tokenizer, "input"):
        splits.add(split)
        total += length
        is_separated |= number > 1
        if len(splits) == len(SPLITS) and not is_one_text:
            return None
    if config.separator and not is_separated:
        logger.warning("document_separator = %r: separates nothing in the input", config.document_separator)
    return min(max(1, round(total * (1 - config.validation_fraction))), total - 1)


def _documents(
    files: list[InputFile], config: PrepareConfig, tokenizer: Tokenizer | None, field: str
) -> Iterator[tuple[Split | None, int, int]]:
    """Yield split, number and length of the documents of files. Warn if the first is text that may have several.

    Raises:
        InputError: there are none. The message names `field`.
    """
    left_out, first, is_empty = Counter(), "", True
    for found in divided(files, config, tokenizer):
        content = found.content
        if isinstance(content, str):
            left_out[content] += 1
        elif isinstance(content, Bad):
            left_out[content.reason] += 1
            first = first or f"; {files[found.file].path}: {found.number}: {content.detail}"
        else:
            file = files[found.file]
            if is_empty and isinstance(content, bytes) and is_text(file, config):
                if (count := content.count(_SEPARATOR.encode())) > 1:
                    flag = f"--document_separator='{_SEPARATOR}' (in training, --config.data.document_separator)"
                    logger.warning("%s has %d times %s: %s divides it", file.path, count, _SEPARATOR, flag)
                if file.is_alone and file.path.lower().endswith((".json", ".csv", ".tsv")):
                    advice = "records are read from JSON lines, parquet and JSON arrays of objects"
                    logger.warning("%s is read as text, without the field %r: %s", file.path, config.text_field, advice)
            is_empty = False
            yield found.split, found.number, len(content)
    if is_empty:
        first = f"; {why_filtered(files, config)}" if left_out["filtered"] else first
        paths = ",".join(getattr(config, field))
        raise InputError(f"{field} = {paths!r}: no documents found: {described(left_out)}{first}")


def why_filtered(files: list[InputFile], config: PrepareConfig) -> str:
    """Return why no record matches `where`: the values of its fields, and the names of all fields."""
    values: dict[str, dict[str, None]] = {field: {} for field, _ in config.conditions}
    names: dict[str, None] = {}

    def collect(record: Any, config: PrepareConfig) -> Skipped:
        names.update(dict.fromkeys(record if isinstance(record, dict) else ()))
        for field, shown in values.items():
            if (value := lookup(record, field)) is not None and len(shown) < _SHOWN:
                is_container = isinstance(value, dict | list)
                shown[f"a {type(value).__name__}, not compared" if is_container else spelled(value)[:40]] = None
        return "filtered"

    for file in files:
        for _ in read_documents(file, config, collect):
            pass
    found = [f"{field!r} is {' or '.join(shown) or 'in no record'}" for field, shown in values.items()]
    return f"{', '.join(found)}; fields: {listed(names)}"


def described(*counts: Counter[str]) -> str:
    """Return counts by reason as text: "3 filtered, 1 not JSON"."""
    found = sum(counts, Counter())
    return ", ".join(f"{count:,} {reason}" for reason, count in found.items()) or "none"
