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
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.data.prepare.build import (
    CORPUS_DIRECTORY,
    RECORD_FILE,
    REJECTED_FILE,
    Record,
    build_corpus,
    left_out,
    read_record,
)
from dape_jax.data.prepare.config import MAX_LENGTH, PrepareConfig
from dape_jax.data.prepare.inputs import InputFile, find_files
from dape_jax.data.prepare.records import holds_ids
from dape_jax.data.prepare.show import show
from dape_jax.data.prepare.splits import divided, find_cut
from dape_jax.data.store import FORMAT_VERSION, Corpus, DataConfig, open_corpus
from dape_jax.data.tokenizers import (
    TOKENIZER_FILE,
    Tokenizer,
    read_tokenizer,
    save_tokenizer,
    saved_tokenizer,
    train_bpe,
)
from dape_jax.errors import InputError, require
from dape_jax.files import json_digest, read_json, write_json

logger = logging.getLogger(__name__)

Inputs = tuple[dict[str, Any], list[InputFile], Tokenizer | None]  # results of `_recipe`, where they are known already
RECIPE_FILE = "recipe.json"
TRAIN_BPE_BYTES = 2**30  # bytes of text on which a BPE is trained


class Prepared(NamedTuple):
    """Result of `prepare`."""

    corpus: Corpus
    record: Record


def prepare(config: PrepareConfig, inputs: Inputs | None = None) -> Prepared:
    """Build a corpus, resume building it, or open it if it is complete. Wait for another process that is building it.

    Raises:
        InputError: the input is invalid, or the output was made with another recipe.
    """
    output = Path(os.path.abspath(os.path.expanduser(config.output)))
    work = output.with_name(output.name + ".partial")
    is_new = not output.exists() or (output / RECIPE_FILE).is_file()
    require(is_new, "output", str(output), "must be a new directory, or one made by this program")
    recipe, files, tokenizer = inputs or _recipe(config, output, work)
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(output.with_name(f".{output.name}.lock")):
            if not output.exists():  # unless the process that had the lock made it
                _build(config, files, tokenizer, recipe, output, work)
    _check_recipe(output, recipe)
    record = read_record(output / RECORD_FILE)
    allowed = f"{record.num_lossy:,} documents of {output} differ from their text; dape-prepare --lossy accepts them"
    require(config.lossy or not record.num_lossy, "lossy", config.lossy, allowed)
    if record.cut is not None:
        percent, few = 100 * config.validation_fraction, "there are too few documents to choose whole ones"
        logger.info("held out: about the last %.3g %%, after %s bytes or ids: %s", percent, f"{record.cut:,}", few)
    if names := left_out(output, record):
        level = logging.WARNING if record.rejected or record.skipped["too long"] else logging.INFO
        logger.log(level, "left out: %s; see %s", names, output / REJECTED_FILE)
    return Prepared(open_corpus(output), record)


def prepare_text(path: str, data: DataConfig, lossy: bool, field: str) -> Path:
    """Prepare raw text of a run in `data.cache_dir`/<16 hex digits of its recipe>, unless it is there; return it.

    Changed text gets another directory. Documents may be longer than by default.

    Raises:
        InputError: as in `prepare`; the message names `field`.
    """
    allowed = f"raw text ({field} = {path!r}) needs 'bytes' or a tokenizer.json"
    require(data.tokenizer is not None, "data.tokenizer", data.tokenizer, allowed)
    cache = Path(os.path.abspath(os.path.expanduser(data.cache_dir)))
    corpora = [file.parent for file in cache.glob(f"{'[0-9a-f]' * 16}*/{RECIPE_FILE}")]  # they may be below `path`
    try:
        config = PrepareConfig(
            input=(path,),
            validation=() if data.validation_path is None else (data.validation_path,),
            output=data.cache_dir,
            tokenizer=data.tokenizer,
            lossy=lossy,
            max_length=MAX_LENGTH,
            document_separator=data.document_separator,
            validation_fraction=data.validation_fraction,
            workers=1,  # of the longest documents, few fit in memory
        )
        inputs = _recipe(config, *corpora)
        output = cache / json_digest(inputs[0])[:16]
        corpus, record = prepare(dataclasses.replace(config, output=str(output)), inputs)
    except InputError as error:
        raise InputError(f"{field} = {path!r}: {str(error).removeprefix(f'input = {path!r}: ')}") from error
    except OSError as error:  # of input it is an InputError
        raise OSError(f"data.cache_dir = {data.cache_dir!r}: {error}") from error
    directory = corpus.train.directory.parent
    logger.info("text of %r, prepared in %s", path, directory)
    if record.num_lossy:
        logger.warning("%d documents cannot be decoded exactly from their tokens", record.num_lossy)
    return directory


def _recipe(config: PrepareConfig, *excluded: Path) -> Inputs:
    """Return everything that the result depends on, as JSON; and input files and tokenizer, or None to train one.

    Files in the `excluded` directories are left out.
    """
    files, tokenizer = find_files(config.input, excluded), None
    if config.validation:
        others = [file._replace(split="validation") for file in find_files(config.validation, excluded, "validation")]
        paths = {file.path for file in others}
        files = [file._replace(split="train") for file in files if file.path not in paths] + others
        allowed = "must have files that are not in validation"
        require(files[0].split == "train", "input", ",".join(config.input), allowed)
    num_files = Counter(file.split for file in files)
    files = [file._replace(is_alone=num_files[file.split] == 1) for file in files]
    if config.tokenizer is not None:
        tokenizer = read_tokenizer(config.tokenizer, "tokenizer", config.end_of_document)
        name: dict[str, Any] = {"tokenizer": tokenizer.name}
    else:
        of_ids = next((file.path for file in files if holds_ids(file.path)), None)
        require(of_ids is None, "train_bpe", config.train_bpe, f"{of_ids} has ids: give their tokenizer, --tokenizer")
        name = {"train_bpe": config.train_bpe, "train_bpe_bytes": TRAIN_BPE_BYTES}
    named, held_out = (
        {file.path: [file.num_bytes, file.version] for file in files if (file.split == "validation") == is_held_out}
        for is_held_out in (False, True)
    )
    recipe = {
        "format_version": FORMAT_VERSION,
        **name,
        "text_field": config.text_field,
        "where": config.conditions,
        "min_length": config.min_length,
        "max_length": config.max_length,
        "validation_fraction": config.validation_fraction,
        "input": named,
    }
    # Absent by default, so that corpora made before these options existed keep their recipe.
    optional = {"document_separator": config.document_separator, "validation": held_out}
    recipe |= {name: value for name, value in optional.items() if value}
    return json.loads(json.dumps(recipe)), files, tokenizer


def _check_recipe(directory: Path, recipe: dict[str, Any]) -> None:
    """Raise `InputError` unless the directory was made or started with this recipe."""
    file = directory / RECIPE_FILE
    require(file.is_file(), "output", str(directory), "must be a new directory, or one made by this program")
    old, new = ({**each, "input": [*each["input"]], **each["input"]} for each in (read_json(file), recipe))
    for name in sorted(old | new, key="input".__eq__):  # the order of the files is compared last
        found, given = (str(each.get(name))[:200] for each in (old, new))
        allowed = f"must be {found}: {directory} was made with it; for another, give a new output"
        require(old.get(name) == new.get(name), name, given, allowed)


def _build(
    config: PrepareConfig,
    files: list[InputFile],
    tokenizer: Tokenizer | None,
    recipe: dict[str, Any],
    output: Path,
    work: Path,
) -> None:
    """Build a corpus in `work`, or resume, and rename it to `output`."""
    if work.exists() and any(work.iterdir()):
        _check_recipe(work, recipe)
    cut = find_cut(files, config, tokenizer)
    work.mkdir(exist_ok=True)
    write_json(work / RECIPE_FILE, recipe)
    if tokenizer is None and (work / TOKENIZER_FILE).exists():
        tokenizer = saved_tokenizer(work)
    elif tokenizer is None:
        assert config.train_bpe is not None
        tokenizer = train_bpe(_training_texts(config, files, cut), config.train_bpe)
        save_tokenizer(tokenizer, work)
    build_corpus(work, files, config, tokenizer, fingerprint=json_digest(recipe), cut=cut)
    complete = work / CORPUS_DIRECTORY
    save_tokenizer(tokenizer, complete)
    write_json(complete / RECIPE_FILE, recipe)
    os.rename(complete, output)
    shutil.rmtree(work)


def _training_texts(config: PrepareConfig, files: list[InputFile], cut: int | None) -> Iterator[str]:
    """Yield the first training documents, up to `TRAIN_BPE_BYTES`."""
    num_bytes = 0
    for found in divided(files, config, None, cut):
        if found.split == "train" and isinstance(found.content, bytes):
            yield found.content.decode()
            num_bytes += len(found.content)
        if num_bytes >= TRAIN_BPE_BYTES:
            return


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
