"""Convert files to a corpus for training: tokens on disk, in parallel, resumable.

    dape-prepare --input='pile/*.jsonl.zst' --where=meta.pile_set_name=ArXiv --output=data/arxiv --tokenizer=bytes
    dape-prepare --input='notes,papers/**/*.tex.gz' --output=data/mine --train_bpe=8192
    dape-prepare --input=books_text_document.bin --output=data/books --tokenizer=20B_tokenizer.json --lossy
    dape-prepare --show=data/arxiv      # print counts, lengths and samples of a corpus, and check its digest

In: files of text, JSON lines, parquet or token ids; see `records`. Out: a directory for `data.path`:

    train/  validation/             see `store`
    record.json  rejected.jsonl     see `build`
    recipe.json                     options and input files
    tokenizer.json                  the tokenizer; missing for bytes

It is built in OUTPUT.partial, and renamed to OUTPUT when it is complete. After an interruption the same command resumes
with the unfinished input files; the result is the same. A command with other options is rejected.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.data.prepare.build import CORPUS_DIRECTORY, RECORD_FILE, REJECTED_FILE, Record, build_corpus, to_record
from dape_jax.data.prepare.config import MAX_LENGTH, PrepareConfig
from dape_jax.data.prepare.inputs import InputFile, find_files
from dape_jax.data.prepare.records import holds_ids
from dape_jax.data.prepare.splits import Inputs, described, divided, find_cut
from dape_jax.data.store import FORMAT_VERSION, Corpus, DataConfig, TokenStore, open_corpus, verify_stores
from dape_jax.data.tokenizers import TOKENIZER_FILE, read_tokenizer, save_tokenizer, saved_tokenizer, train_bpe
from dape_jax.errors import InputError, printable, require
from dape_jax.files import json_digest, name_errors, read_json, write_json

logger = logging.getLogger(__name__)

RECIPE_FILE = "recipe.json"
TRAIN_BPE_BYTES = 2**30  # bytes of text on which a BPE is trained
QUANTILES = {"smallest": 0.0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "largest": 1.0}
_SAMPLES, _SHOWN_CHARS = 3, 200  # documents of each store whose beginning is shown, and its length


class Prepared(NamedTuple):
    """Result of `prepare`."""

    corpus: Corpus
    record: Record


def prepare(config: PrepareConfig, is_cache: bool = False) -> Prepared:
    """Build a corpus, resume building it, or open it if it is complete. Wait for another process that is building it.

    `config.output` is its directory or, with `is_cache`, one of many corpora, each in a directory named by its recipe.

    Raises:
        InputError: the input is invalid, or the output was made with another recipe.
    """
    output = Path(os.path.abspath(os.path.expanduser(config.output)))
    if is_cache:  # its corpora may be below the input
        inputs = find_inputs(config, [file.parent for file in output.glob(f"{'[0-9a-f]' * 16}*/{RECIPE_FILE}")])
        output /= json_digest(inputs.recipe)[:16]
        logger.info("text of %r is prepared in %s", ",".join(config.input), output)
    else:
        is_ours = not output.exists() or (output / RECIPE_FILE).is_file()
        require(is_ours, "output", str(output), "must be a new directory, or one made by this program")
        inputs = find_inputs(config, [output, Path(f"{output}.partial")])
    work = Path(f"{output}.partial")
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        with name_errors(output), filelock.FileLock(output.with_name(f".{output.name}.lock")):
            if not output.exists():  # unless the process that had the lock made it
                _build(inputs, work)
                os.rename(work / CORPUS_DIRECTORY, output)
                shutil.rmtree(work)
    _check_recipe(output, inputs.recipe)
    record = to_record(read_json(output / RECORD_FILE))
    allowed = f"{record.num_lossy:,} documents of {output} differ from their text; dape-prepare --lossy accepts them"
    require(config.lossy or not record.num_lossy, "lossy", config.lossy, allowed)
    if record.cut is not None:
        percent = 100 * config.validation_fraction
        logger.info("held out: about the last %.3g %%: there are too few documents to choose whole ones", percent)
    if len(record.first) > 1:
        kinds = (f"{kind}, as in {path}" for kind, path in record.first.items())
        logger.warning("the corpus has %s", " and ".join(kinds))
    if config.separator and record.num_documents.total() - (record.cut is not None) <= len(inputs.files):
        logger.warning("document_separator = %r: separates nothing in the input", config.document_separator)
    if counts := record.skipped + record.rejected:
        level = logging.WARNING if record.rejected or record.skipped["too long"] else logging.INFO
        see = f"; see {output / REJECTED_FILE}" if counts.keys() != {"filtered"} else ""  # it lists the others
        logger.log(level, "left out: %s%s", described(counts), see)
    return Prepared(open_corpus(output), record)


def prepare_text(path: str, data: DataConfig, lossy: bool, field: str) -> Corpus:
    """Prepare raw text of a run in `data.cache_dir`/<16 hex digits of its recipe>, unless it is there.

    Changed text gets another directory. Documents may be longer than by default.

    Raises:
        InputError: as in `prepare`; the message names `field`.
    """
    allowed = f"raw text ({field} = {path!r}) needs 'bytes' or a tokenizer.json"
    require(data.tokenizer is not None, "data.tokenizer", data.tokenizer, allowed)
    try:
        held_out = () if data.validation_path is None else (data.validation_path,)
        fields: dict[str, Any] = {"input": (path,), "validation": held_out, "output": data.cache_dir, "lossy": lossy}
        fields |= {"max_length": MAX_LENGTH, "workers": 1}  # of the longest documents, few fit in memory
        fields |= {name: getattr(data, name) for name in ("tokenizer", "document_separator", "validation_fraction")}
        corpus, record = prepare(PrepareConfig(**fields), is_cache=True)
    except InputError as error:
        raise InputError(f"{field} = {path!r}: {str(error).removeprefix(f'input = {path!r}: ')}") from error
    if record.num_lossy:
        logger.warning("%d documents cannot be decoded exactly from their tokens", record.num_lossy)
    return corpus


def warn_of_parts(paths: list[str]) -> None:
    """Warn of two files whose names differ only in the part of a data set, as train and test, or in a compression.

    Numbers and hashes of shards do not count.
    """
    shards = {re.sub(r"\d+|-[0-9a-f]{16}", "", path.lower()): path for path in paths}
    part = r"(?<![a-z])(train|test|valid|validation|val|dev|eval)(?![a-z])|\.(gz|bz|xz|zst)$"  # .bz2 without its digit
    seen: dict[str, str] = {}
    for name, path in shards.items():
        other = seen.setdefault(re.sub(part, "", name), path)
        if other != path:
            advice = "give the files to train on, and others as --validation (in training, data.validation_path)"
            logger.warning("%s and %s are both used, whatever their names: %s", other, path, advice)
            return


def find_inputs(config: PrepareConfig, excluded: Collection[Path]) -> Inputs:
    """Return the inputs of a config. Files in the `excluded` directories are left out.

    Raises:
        InputError: a path has no files, the tokenizer cannot be read, or they do not fit each other.
    """
    files, held_out, tokenizer = find_files(config.input, excluded), list[InputFile](), None
    if config.validation:
        held_out = find_files(config.validation, excluded, "validation")
        paths = {os.path.realpath(file.path) for file in held_out}
        files = [file._replace(split="train") for file in files if os.path.realpath(file.path) not in paths]
        require(bool(files), "input", ",".join(config.input), "must have files that are not in validation")
    warn_of_parts([file.path for file in files])
    options = ("text_field", "min_length", "max_length", "validation_fraction")
    recipe: dict[str, Any] = {"format_version": FORMAT_VERSION, "where": config.conditions}
    recipe |= {option: getattr(config, option) for option in options}
    if config.tokenizer is not None:
        tokenizer = read_tokenizer(config.tokenizer, "tokenizer", config.end_of_document)
        recipe["tokenizer"] = tokenizer.name
    else:
        of_ids = next((file.path for file in files if holds_ids(file.path)), None)
        require(of_ids is None, "train_bpe", config.train_bpe, f"{of_ids} has ids: give their tokenizer, --tokenizer")
        recipe |= {"train_bpe": config.train_bpe, "train_bpe_bytes": TRAIN_BPE_BYTES}
    recipe["input"] = {file.path: [file.num_bytes, file.version] for file in files}
    # Absent by default, so that corpora made before these options existed keep their recipe.
    if config.document_separator:
        recipe["document_separator"] = config.document_separator
    if held_out:
        recipe["validation"] = {file.path: [file.num_bytes, file.version] for file in held_out}
    held_out = [file._replace(split="validation") for file in held_out]
    return Inputs(config, files + held_out, tokenizer, json.loads(json.dumps(recipe)))


def _check_recipe(directory: Path, recipe: dict[str, Any]) -> None:
    """Raise `InputError` unless the directory was made or started with this recipe."""
    saved = read_json(directory / RECIPE_FILE)
    old, new = ({**each, "input": [*each["input"]], **each["input"]} for each in (saved, recipe))
    for name in sorted(old | new, key="input".__eq__):  # the order of the files is compared last
        found, given = (str(each.get(name))[:200] for each in (old, new))
        kind = " (bytes and time of change)" * (name in saved["input"] | recipe["input"])
        allowed = f"must be {found}{kind}: {directory} was made with it; for another, delete it or give a new output"
        require(old.get(name) == new.get(name), name, given, allowed)


def _build(inputs: Inputs, work: Path) -> None:
    """Build a corpus in `work`, or resume."""
    if work.exists() and any(work.iterdir()):
        _check_recipe(work, inputs.recipe)
    cut, tokenizer, complete = find_cut(inputs), inputs.tokenizer, work / CORPUS_DIRECTORY
    work.mkdir(exist_ok=True)
    write_json(work / RECIPE_FILE, inputs.recipe)
    if tokenizer is None:
        assert inputs.config.train_bpe is not None
        if not (work / TOKENIZER_FILE).exists():
            save_tokenizer(train_bpe(_training_texts(inputs, cut), inputs.config.train_bpe), work)
        tokenizer = saved_tokenizer(work)
    build_corpus(work, inputs._replace(tokenizer=tokenizer), cut)
    save_tokenizer(tokenizer, complete)
    write_json(complete / RECIPE_FILE, inputs.recipe)


def _training_texts(inputs: Inputs, cut: int | None) -> Iterator[str]:
    """Yield the first training documents, up to `TRAIN_BPE_BYTES`."""
    num_bytes = 0
    for found in divided(inputs, cut):
        if found.split == "train" and isinstance(found.content, bytes):
            yield found.content.decode()
            num_bytes += len(found.content)
        if num_bytes >= TRAIN_BPE_BYTES:
            return


def show(directory: Path) -> None:
    """Print a summary of a corpus. Samples follow the check of the digest, with control characters escaped.

    Raises:
        InputError: there is no corpus, or it is damaged.
    """
    corpus = open_corpus(directory, "--show")
    sidecar, record = corpus.train.sidecar, to_record(read_json(directory / RECORD_FILE))
    print(f"{directory}: made from {sidecar.source!r}, {record.num_input_bytes / 1e6:,.1f} MB of input")
    print(f"tokenizer {sidecar.tokenizer}: {sidecar.vocab_size:,} ids, each stored as {corpus.train.tokens.dtype.name}")
    print(f"skipped: {described(record.skipped)}")
    print(f"bad: {described(record.rejected)}" + (f"; see {directory / REJECTED_FILE}" if record.rejected else ""))
    print(f"documents that cannot be decoded exactly from their tokens: {record.num_lossy:,}")
    for store in corpus:
        if store.num_documents:
            _show_store(store)
    print(f"\ndigest {corpus.digest}: verified")


def _show_store(store: TokenStore) -> None:
    count, size = store.num_documents, f"{store.tokens.nbytes / 1e6:,.1f} MB on disk"
    print(f"\n{store.sidecar.split}: {count:,} document{'s' * (count > 1)}, {store.num_tokens:,} tokens, {size}")
    lengths = np.diff(store.offsets) - 1
    at = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    quantiles = ", ".join(f"{name} {value:,}" for name, value in zip(QUANTILES, at.tolist(), strict=True))
    print(f"  tokens per document, without its end (mean {lengths.mean():,.1f}): {quantiles}")
    verify_stores([store])
    for index in np.random.default_rng(0).permutation(store.num_documents)[:_SAMPLES].tolist():
        # A character has at most 4 bytes, and a token at least one.
        text = store.tokenizer.decode(store.document(index)[: 4 * _SHOWN_CHARS]).decode("utf-8", "replace")
        print(f"  document {index:,}, {lengths[index]:,} tokens: {printable(text[:_SHOWN_CHARS])}")


@dataclasses.dataclass(frozen=True)
class ShowConfig:
    """Flag to show a corpus that is there already."""

    show: str | None = flag(None, "Prepared corpus to show, instead of preparing one.")


def main(given: ShowConfig) -> None:
    """Prepare the corpus and show it; or show another one."""
    shown = given.show
    if shown is None:
        shown = prepare(command_line.from_flags(PrepareConfig)).corpus.train.directory.parent
    show(Path(os.path.expanduser(shown)))


def command() -> None:
    """Run the command line `dape-prepare`."""
    command_line.run(main, ShowConfig, PrepareConfig, interrupted="interrupted: the same command resumes")
