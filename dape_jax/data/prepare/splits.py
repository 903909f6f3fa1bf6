"""Input files -> documents and their splits.

In: input files. Out: documents, each with its split, from `divided`. Next: `build`, which tokenizes them.

The first of these rules that applies divides a corpus:

1. The user names the files of the validation split.
2. A hash of each document's content (`split_of`) decides.
3. The input is one text, or the hash leaves a split without documents, as it may with few: the end of the input is held
   out, and the document there is cut.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from dape_jax.data.prepare.config import PrepareConfig
from dape_jax.data.prepare.inputs import InputFile
from dape_jax.data.prepare.records import Content, LeftOut, cut_before, read_records
from dape_jax.data.store import SPLITS, Split
from dape_jax.data.tokenizers import END_TOKENS, Bytes, Tokenizer
from dape_jax.errors import require

logger = logging.getLogger(__name__)

_SHOWN = 4  # details in a message


class Inputs(NamedTuple):
    """Input of a preparation."""

    config: PrepareConfig
    files: list[InputFile]
    tokenizer: Tokenizer | None  # None: it will be trained on the texts
    recipe: dict[str, Any]  # everything that the result depends on, as JSON


class Found(NamedTuple):
    """Document of an input file, or what is left out of it."""

    file: int  # index
    number: int  # of the record in the file, from 1
    content: bytes | Integer[np.ndarray, "_"] | LeftOut  # text in UTF-8 unless the tokenizer is `Bytes`, or token ids
    split: Split | None  # of a document
    is_text: bool  # from a text file


def divided(inputs: Inputs, cut: int | None = None, start: int = 0) -> Iterator[Found]:
    """Yield the documents of `files[start:]`, and what is left out; ids without the end_of_document that they may have.

    `cut` is the length of the documents before the held-out end, in bytes or ids, or None if the other rules apply.
    """
    config, files, tokenizer, _ = inputs
    num_files, position = Counter(file.split for file in files), 0
    for index, file in enumerate(files[start:], start):
        for number, record in read_records(file, config, is_alone=num_files[file.split] == 1):
            content = _checked(record, config, tokenizer)
            if isinstance(content, LeftOut):
                parts: Iterable[Any] = [(content, None)]
            elif cut is None:
                key = content if isinstance(content, bytes) else content.astype("<i8").tobytes()
                parts = [(content, file.split or split_of(key, config.validation_fraction))]
            else:
                at, position = min(max(0, cut - position), len(content)), position + len(content)
                if isinstance(content, bytes) and 0 < at < len(content):
                    at = cut_before(content, at)
                parts = [part for part in zip((content[:at], content[at:]), SPLITS, strict=True) if len(part[0])]
            yield from (Found(index, number, *part, is_text=isinstance(record, bytes)) for part in parts)


def _checked(
    record: Content | LeftOut, config: PrepareConfig, tokenizer: Tokenizer | None
) -> bytes | Integer[np.ndarray, "_"] | LeftOut:
    """Return the document of a record, or why it is left out."""
    if isinstance(record, LeftOut):
        return record
    try:
        content = record.encode() if isinstance(record, str) else record
        # A longer text was not read to its end, perhaps not to that of a character.
        if isinstance(record, bytes) and len(record) <= config.max_length and not isinstance(tokenizer, Bytes):
            record.decode()
    except UnicodeError as error:  # half a surrogate pair is JSON, but not Unicode
        return LeftOut("not Unicode", str(error))
    if isinstance(content, np.ndarray) and len(content) and tokenizer and content[-1] == tokenizer.end_of_document:
        content = content[:-1]
    if len(content) < config.min_length:
        return LeftOut("too short", f"shorter than min_length = {config.min_length}")
    if len(content) > config.max_length:
        return LeftOut("too long", f"longer than max_length = {config.max_length}")
    return content


def split_of(document: bytes, validation_fraction: float) -> Split:
    """Return the split of a document, which depends only on a hash of its content.

    Copies of a document are therefore always in the same split, independent of their names, locations and order. A
    document is its text, or its token ids as bytes.
    """
    hash_in_64_bits = int.from_bytes(hashlib.sha256(document).digest()[:8])
    return "validation" if hash_in_64_bits < validation_fraction * 2**64 else "train"


def find_cut(inputs: Inputs) -> int | None:
    """Return `cut` for `divided`. Read documents until both splits have one.

    Raises:
        InputError: there are no documents, or none in the files that the user named for validation.
    """
    config, files = inputs.config, inputs.files
    for split, field in zip(SPLITS, ("input", "validation"), strict=True):
        if named := [file for file in files if file.split == split]:
            next(_documents(inputs._replace(files=named), field))
    if config.validation:
        return None
    splits, total = set(), 0
    for found in _documents(inputs, "input"):
        splits.add(found.split)
        total += len(found.content)
        is_one_text = found.is_text and len(files) == 1 and config.separator is None
        if not 0 < config.validation_fraction < 1 or (len(splits) == len(SPLITS) and not is_one_text):
            return None
    return min(max(1, round(total * (1 - config.validation_fraction))), total - 1)


def _documents(inputs: Inputs, field: str) -> Iterator[Found]:
    """Yield the documents of files. Warn if the first text, except a README, may have several.

    Raises:
        InputError: there are none. The message names `field`, and why the first records are left out.
    """
    config, files = inputs.config, inputs.files
    reasons, details, num_documents, examined = Counter[str](), dict[str, str](), 0, False
    tables = {each.path for each in files if re.search(r"\.(json|csv|tsv)(\.(gz|bz2|xz|zst))?$", each.path.lower())}
    if any(each.path not in tables and "/readme." not in each.path.lower() for each in files):
        tables.clear()  # beside texts, they are probably meant as text
    for found in divided(inputs):
        path, content = files[found.file].path, found.content
        if isinstance(content, LeftOut):
            reasons[content.reason] += 1
            if len(details) < _SHOWN:
                details.setdefault(content.detail, f"{path}: {found.number}: {content.detail}")
            continue
        num_documents += 1
        if found.is_text and isinstance(content, bytes) and not examined and "/readme." not in path.lower():
            examined = True
            for token in END_TOKENS:  # usual between the documents of a text file
                if (count := content.count(token.encode())) > 1:
                    flag = f"--document_separator='{token}' (in training, --config.data.document_separator)"
                    logger.warning("%s has %d times %s: %s divides it", path, count, token, flag)
            if re.match(rb'\{ *"[^\n]*\}\r?\n\{ *"', content):  # JSON lines: in the first two, the field is no text
                tables.add(path)
        if found.is_text and path in tables:
            advice = "records are read from JSON lines, parquet and JSON arrays of objects (see --text_field)"
            logger.warning("%s is read as text, without the field %r: %s", path, config.text_field, advice)
            tables.clear()
        yield found
    why = "; ".join([described(reasons), *details.values()]) if reasons else "the files are empty"
    require(num_documents > 0, field, ",".join(getattr(config, field)), f"no documents found: {why}")


def described(counts: Mapping[str, int]) -> str:
    """Return counts by reason as text: "3 filtered, 1 not JSON"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "none"
