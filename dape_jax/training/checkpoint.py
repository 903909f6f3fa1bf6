"""Checkpoints: saved whole or not at all, checked when they are read. In: `step.py`'s state. Next: `loop.py`.

One composite save by Orbax: `params`, `opt_state`, `health`, `data` and `config` are items of their own, so that an
evaluator reads `params` and `config` alone. The newest few are kept, and the one with the lowest validation loss.

Orbax restores a flipped bit of an array without a word, so every save carries digests:

- one for each array, computed on the devices before the arrays are written, with integers alone: the same on any mesh;
- one for each JSON item;
- `checksums/<step>.json`, beside the checkpoints: the size of every file and the SHA-256 of its end, which is the whole
  of it but for the data of large arrays. (Those would have to be read back for it.)

A step that does not agree with them is left out, with a warning that says why, and never deleted: training that goes on
from an older step moves it to `damaged/`, where it is in the way of nothing.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dape_jax.distributed import process_zero_first
from dape_jax.errors import InputError, require
from dape_jax.model.transformer import Params
from dape_jax.training.step import TrainState

CONFIG_FILE = "config.json"
LOCK_FILE = "run.lock"
NOT_EVALUATED = ("opt_state", "health", "data")  # items that an evaluator does not read
_PASSING = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT)  # faults of a machine
HASHED_BYTES = 2**18  # at the end of every file; behind the arrays of a large one stands an index
_DELETED = "deleted"  # directory beside the steps, for those on their way out

logger = logging.getLogger(__name__)


def _is_no_traceback_of_orbax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and f"{os.sep}orbax{os.sep}" in record.pathname)


# Orbax logs an error with its traceback, that of a background thread up to four times; all of them are raised besides.
logging.getLogger("absl").addFilter(_is_no_traceback_of_orbax)


# ---- one run in a workdir


@contextlib.contextmanager
def sole_run(workdir: Path) -> Iterator[None]:
    """Have a workdir, made if need be, to this run alone until the block ends or its process dies.

    In several processes the first holds it for all.

    Raises:
        InputError: a live run has it, or it cannot be written to.
    """
    descriptor = process_zero_first(lambda: _lock(workdir) if jax.process_index() == 0 else None)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(workdir: Path) -> int:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(workdir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unwritable(workdir, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise InputError(
            f"workdir = {str(workdir)!r}: a run is at work in it{holder and f' ({holder})'}; wait for it, end it, or "
            "take another workdir"
        ) from error
    except OSError as error:
        logger.warning(
            "%s: the file system has no locks (%s), so nothing here keeps two runs out of one workdir", workdir, error
        )
        return descriptor
    with contextlib.suppress(OSError):  # it is for the message above alone, and a full disk is told elsewhere
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def require_space(workdir: Path, state: TrainState) -> None:
    """Raise `InputError` if a checkpoint of such a state would not fit beside what the file system holds.

    What unfinished saves and deletions have left is on its way out, and counts as free.
    """

    def check() -> None:
        entries = _directory(workdir).iterdir() if _directory(workdir).is_dir() else ()
        left = [file for entry in entries if not entry.name.isdecimal() for file in entry.rglob("*") if file.is_file()]
        free = shutil.disk_usage(workdir).free + sum(file.stat().st_size for file in left)
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        megabytes = f"a checkpoint takes {num_bytes / 1e6:,.1f} MB, and its file system has {free / 1e6:,.1f} MB free"
        require(free >= num_bytes, "workdir", str(workdir), megabytes)

    process_zero_first(lambda: check() if jax.process_index() == 0 else None)


# ---- digests


@functools.partial(jax.jit, static_argnames="sharding")
def _sums(leaves: list[Array], sharding: NamedSharding | None) -> UInt32[Array, "leaves 2"]:
    """Two wrap-around sums over every array, of hashes of each word with its place.

    A hash is one to one on the words of a place, so a change of one word is sure to change both sums. Integer sums are
    the same in any order, so the mesh does not matter. Each array is read once, and nothing of its size is written.
    """

    def sums(leaf: Array) -> Array:
        if jnp.issubdtype(leaf.dtype, jnp.bool_):
            words = leaf.astype(jnp.uint32)
        else:  # 8 bytes are two words, in a new last dimension
            unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
            words = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
        place = jnp.zeros(words.shape, jnp.uint32)
        for dim, size in enumerate(words.shape):
            place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        place = place * np.uint32(0x9E3779B1)
        hashed = (words ^ place ^ (place >> 15)) * np.uint32(0x85EBCA77)
        hashed = (hashed ^ (hashed >> 13)) * np.uint32(0xC2B2AE3D)
        hashed = hashed ^ (hashed >> 16)
        again = hashed * np.uint32(0x27D4EB2F)
        again = again ^ (again >> 15)
        # Both sums in one reduction: apart, the compiler writes the hashes down for the second.
        zero, dims = np.uint32(0), tuple(range(words.ndim))
        return jnp.stack(jax.lax.reduce((hashed, again), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), dims))

    stacked = jnp.stack([sums(leaf) for leaf in leaves])
    return stacked if sharding is None else jax.lax.with_sharding_constraint(stacked, sharding)


def leaf_digests(items: dict[str, Any]) -> dict[str, str]:
    """A digest of every array of a tree, 16 hexadecimal digits by its path; the same wherever the arrays lie."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(items), strict=True)
    placed = [leaf.sharding for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]
    sums = np.asarray(_sums(list(leaves), NamedSharding(placed[0].mesh, PartitionSpec()) if placed else None))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    return {name: f"{one:08x}{other:08x}" for name, (one, other) in zip(names, sums, strict=True)}


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---- saving


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which also writes `checksums/` and says in one line why a save has failed."""

    def __init__(self, workdir: Path, max_to_keep: int):
        """Open, or make, the checkpoints of a workdir.

        Orbax's `best_fn` with `max_to_keep` would delete every step newer than the best; a policy that is the union of
        newest and best is what a run needs. `best_fn` is given besides: without it Orbax does not write the metrics
        down, and a resumed run would know of no best and delete nothing.
        """
        self.workdir = workdir
        self.saving: int | None = None
        policy = preservation_policy.AnyPreservationPolicy(
            [
                preservation_policy.LatestN(max_to_keep),
                preservation_policy.BestN(
                    get_metric_fn=_validation_nats, reverse=True, n=1, keep_checkpoints_without_metrics=False
                ),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=_validation_nats,
            best_mode="min",
            cleanup_tmp_directories=True,
            todelete_subdir=_DELETED,
            # Called by the first process when all have written all files, just before the step gets its name.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )
        super().__init__(
            _directory(workdir),
            item_names=("params", "opt_state", "health", "data", "config", "digests"),
            options=options,
        )
        self._delete()  # what a kill has left of it

    def _delete(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(_directory(self.workdir) / _DELETED, ignore_errors=True)

    def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
        """As Orbax's, in its background thread, which renames the steps that are no longer kept; then delete them.

        Deleted in place, a step would for a while be one that has lost some files.
        """
        super()._finalize(step, steps_to_remove)
        self._delete()

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """As Orbax's; all files of the step before are listed by then."""
        with self._failure_in_one_line():
            self.wait_until_finished()
            if jax.process_index() == 0:
                _checksum_file(self.workdir, str(step)).unlink(missing_ok=True)
            self.saving = step
            return super().save(step, *args, **kwargs)

    def reached_preemption(self, step: int) -> bool:
        """Never: `processes.Stopping` asks jax, once for every step.

        Orbax would ask in the background too, for a step that has passed. jax would take that for where the run is, and
        have it stop at a step that it has behind it.
        """
        return False

    def wait_until_finished(self) -> None:
        """As Orbax's.

        Raises:
            InputError: the step could not be written.
        """
        with self._failure_in_one_line():
            super().wait_until_finished()
            if self.saving is not None and (_directory(self.workdir) / str(self.saving)).exists():
                if jax.process_index() == 0:
                    self._write_checksums()  # again, with the file that was written at the very end
                self.saving = None

    def _write_checksums(self) -> None:
        if self.saving is None:
            return
        named = [d for d in _directory(self.workdir).iterdir() if d.name.partition(".")[0] == str(self.saving)]
        if len(named) != 1:
            return
        try:
            _write_checksums(self.workdir, str(self.saving), named[0])
        except OSError as error:
            logger.warning("%s: the checksums of its files cannot be written: %s", named[0], error)

    @contextlib.contextmanager
    def _failure_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore, which writes the arrays, raises ValueError
            code = re.search(r"os_error_code='(\d+)'", str(error))
            if isinstance(error, InputError) or not (code or isinstance(error, OSError)):
                raise
            step, self.saving = self.saving, None
            reason = os.strerror(int(code[1])) if code else error
            raise InputError(
                f"workdir = {str(self.workdir)!r}: the checkpoint of step {step} cannot be written: {reason}; those "
                "before it are whole, and the same command goes on from the newest"
            ) from error


def open_checkpoints(workdir: Path, max_to_keep: int) -> ocp.CheckpointManager:
    """The manager of a run's checkpoints. Call `close()` on it: saves run in the background until then."""
    return _Manager(workdir, max_to_keep)


def _validation_nats(metrics: dict[str, float]) -> float:
    return metrics["validation_nats"]


def _directory(workdir: Path) -> Path:
    return workdir.absolute() / "checkpoints"


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    data_state: dict[str, Any],
    config: dict[str, Any],
    validation_nats: float | None,
) -> None:
    """Start saving everything that a resumed run needs; returns when the arrays may be overwritten.

    A step that was not validated, where the run was stopped, is kept while it is among the newest, and never the best.

    Raises:
        InputError: this step, or the one before it, cannot be written.
    """
    arrays = state._asdict()
    metrics = None if validation_nats is None else {"validation_nats": validation_nats}
    jsons = {"data": data_state, "config": config}
    digests = leaf_digests(arrays) | {
        name: _json_digest(value) for name, value in (jsons | ({"metrics": metrics} if metrics else {})).items()
    }
    manager.save(
        step,
        args=ocp.args.Composite(
            **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
            **{name: ocp.args.JsonSave(value) for name, value in jsons.items()},
            digests=ocp.args.JsonSave(digests),
        ),
        metrics=metrics,
    )


def _checksum_file(workdir: Path, step: str) -> Path:
    return workdir.absolute() / "checksums" / f"{step}.json"


def _write_checksums(workdir: Path, step: str, directory: Path) -> None:
    """Write size and checksum of every file of a step, atomically."""
    files = {
        str(file.relative_to(directory)): [file.stat().st_size, _sha256(file)]
        for file in sorted(directory.rglob("*"))
        # Orbax writes the time into this one just before it gives the step its name, and a kill may fall in between.
        if file.is_file() and (directory.name == step or file.name != "_CHECKPOINT_METADATA")
    }
    target = _checksum_file(workdir, step)
    partial = target.with_suffix(".tmp")
    target.parent.mkdir(exist_ok=True)
    partial.write_text(json.dumps({"digest": _json_digest(files), "files": files}, indent=1) + "\n")
    partial.replace(target)
    for old in target.parent.iterdir():  # of steps that are no longer kept
        if old.stem != step and not (_directory(workdir) / old.stem).exists():
            old.unlink()


def _sha256(file: Path) -> str:
    """Of the end of a file."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - HASHED_BYTES))
        return hashlib.sha256(opened.read()).hexdigest()


# ---- restoring


def restore_newest(workdir: Path, abstract: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
    """Read the newest step that is whole, and move those that are not out of the way, to `damaged/`.

    Call it before `open_checkpoints`.

    Args:
        workdir: of the run.
        abstract: shapes, dtypes and places of the state, of `step.abstract_state`.

    Returns:
        The step's number, its state and the position in the data; None where no step was ever saved.

    Raises:
        InputError: there are steps, and none is whole.
    """
    items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract._asdict().items()}
    faults: dict[str, str] = {}
    found = None
    for name in _step_names(workdir):
        try:
            _check_files(workdir, name)
            if found is None:
                restored = _read(workdir, name, **items, data=ocp.args.JsonRestore())
                found = int(name), TrainState(*(restored[item] for item in items)), restored["data"]
        except _DamagedError as error:
            faults[name] = str(error)
    if faults and found is None:
        raise InputError(
            f"workdir = {str(workdir)!r}: none of its checkpoints is whole, and they are left as they are. "
            + "; ".join(f"step {name}: {fault}" for name, fault in faults.items())
        )
    for name, fault in faults.items():
        if jax.process_index() == 0:
            logger.warning("step %s is left out and moved to %s: %s", name, _move_aside(workdir, name), fault)
    if faults and jax.process_count() > 1:
        multihost_utils.sync_global_devices("damaged checkpoints are moved aside")
    return found


def _move_aside(workdir: Path, name: str) -> Path:
    directory = workdir / "damaged"
    directory.mkdir(exist_ok=True)
    target = directory / name
    number = 1
    while target.exists():
        number += 1
        target = directory / f"{name}-{number}"
    (_directory(workdir) / name).rename(target)
    if (checksums := _checksum_file(workdir, name)).exists():
        checksums.rename(directory / f"{target.name}.json")
    return target


def restore_config(workdir: Path, which: str = "newest") -> tuple[int, dict[str, Any]]:
    """A step's number and the config that was saved with it: all that an evaluator needs to rebuild the model.

    Args:
        workdir: of the run.
        which: "newest", "best" (the lowest validation loss) or a number. The first two are of the steps whose files are
            whole; the others are left out, with a warning.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    require(_directory(workdir).is_dir(), "workdir", str(workdir), "a directory that train.py has written")
    names = _step_names(workdir)
    require(bool(names), "workdir", str(workdir), "has no checkpoint yet")
    allowed = ["newest", "best", *reversed(names)]
    require(which in allowed, "step", which, f"one of {allowed} in {workdir}")
    whole: dict[str, dict[str, Any]] = {}
    for name in names if which in ("newest", "best") else [which]:
        try:
            _check_files(workdir, name, but=NOT_EVALUATED)
            restored = _read(workdir, name, config=ocp.args.JsonRestore())
        except _DamagedError as error:
            if name == which:
                raise InputError(f"step = {which!r}: {error}") from error
            logger.warning("step %s is left out: %s", name, error)
            continue
        whole[name] = restored["config"]
        if which != "best":
            break
    require(bool(whole), "workdir", str(workdir), "none of its checkpoints is whole")
    nats = {name: metrics["validation_nats"] for name in whole if (metrics := _read_metrics(workdir, name))}
    name = min(nats, key=nats.__getitem__) if which == "best" and nats else next(iter(whole))
    return int(name), whole[name]


def restore_params(workdir: Path, step: int, abstract: Params) -> Params:
    """Read the parameters of a step, and nothing else, placed as `abstract` says.

    Raises:
        InputError: they are not what was saved.
    """
    try:
        return _read(workdir, str(step), params=ocp.args.StandardRestore(abstract))["params"]
    except _DamagedError as error:
        others = [name for name in reversed(_step_names(workdir)) if name != str(step)]
        raise InputError(f"step = '{step}': {error}" + (f"; other steps are {others}" if others else "")) from error


class _DamagedError(Exception):
    """A step is not what was saved; the text says what is wrong, and where."""


def has_steps(workdir: Path) -> bool:
    """Whether any step was saved, whole or not."""
    return bool(_step_names(workdir))


def _step_names(workdir: Path) -> list[str]:
    """Names of what stands where steps do, the newest first; unfinished saves have other names."""
    if not _directory(workdir).is_dir():
        return []
    names = [entry.name for entry in _directory(workdir).iterdir() if entry.name.isdecimal()]
    return sorted(names, key=lambda name: (int(name), name), reverse=True)


def _check_files(workdir: Path, name: str, but: tuple[str, ...] = ()) -> None:
    """Compare a step's files with its checksums, on the first process; and read what Orbax would trip over.

    Args:
        workdir: of the run.
        name: of the step.
        but: items that are not read, and may be gone.

    Raises:
        _DamagedError: on every process.
    """
    fault = None
    if jax.process_index() == 0:
        step = _directory(workdir) / name
        files = {name: of for name, of in _read_checksums(workdir, name).items() if name.split("/")[0] not in but}
        fault = "is no directory" if not step.is_dir() else _file_fault(step, files)
        if fault is None:
            try:
                _read_metrics(workdir, name)
            except _DamagedError as error:
                fault = str(error)
        else:
            fault = f"{step}: {fault}"
    if fault := _agreed(fault):
        raise _DamagedError(fault)


def _file_fault(step: Path, files: dict[str, list]) -> str | None:
    faults = []
    for name, (num_bytes, sha256) in files.items():
        file = step / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif (found := file.stat().st_size) != num_bytes:
            faults.append(f"{name} has {found} bytes instead of {num_bytes}")
        elif _sha256(file) != sha256:
            faults.append(f"{name} was changed since it was written")
    return _few(faults) if faults else None


def _few(parts: list[str]) -> str:
    return ", ".join(parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _read_checksums(workdir: Path, name: str) -> dict[str, list]:
    """What `_write_checksums` wrote; empty where it is missing or damaged itself, and the digests alone decide."""
    file = _checksum_file(workdir, name)
    try:
        listed = json.loads(file.read_bytes())
        if listed["digest"] != _json_digest(listed["files"]):
            raise ValueError("its own digest is another")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged and left out: %s", file, error)
        return {}
    return listed["files"]


def _read_metrics(workdir: Path, name: str) -> dict[str, float] | None:
    """The metrics of a step, which Orbax reads on opening; None for a step that was saved without.

    Raises:
        _DamagedError: that would fail.
    """
    file = _directory(workdir) / name / "metrics" / "metrics"
    if not file.parent.exists():
        return None
    try:
        metrics = json.loads(file.read_bytes())
        float(metrics["validation_nats"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"{file}: is not the metrics of a step: {error}") from error
    return metrics


def _read(workdir: Path, name: str, **items: Any) -> dict[str, Any]:
    """Items of a step, compared with its digests.

    Raises:
        _DamagedError: on every process.
    """
    step = _directory(workdir) / name
    restored, fault = {}, None
    me = jax.process_index()
    try:
        # Each process for itself: one that fails would leave the others waiting in Orbax.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
        )
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone) as reader:
            args = ocp.args.Composite(**items, digests=ocp.args.JsonRestore())
            restored = dict(reader.restore(step, args=args).items())
    except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
        raise  # nothing that is wrong with the step
    except Exception as error:  # Orbax and TensorStore raise what they please, and the first of them knows best
        while error.__cause__ is not None:
            error = error.__cause__
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = error.errno if isinstance(error, OSError) else int(code[1]) if code else None
        if number in _PASSING:
            raise InputError(f"{step}: cannot be read now: {os.strerror(number)}") from error
        fault = f"{step}: cannot be read: {' '.join(str(error).split())[:300]}"
        if me > 0:  # the first process, which warns of it, knows only that it is so
            logger.warning("process %d: %s", me, fault)
    if fault := _agreed(fault):
        raise _DamagedError(fault)
    saved = restored.pop("digests")
    jsons = {item: restored[item] for item, args in items.items() if isinstance(args, ocp.args.JsonRestore)}
    arrays = {item: tree for item, tree in restored.items() if item not in jsons}
    if metrics := _read_metrics(workdir, name):
        jsons["metrics"] = metrics
    found = {item: _json_digest(value) for item, value in jsons.items()} | (leaf_digests(arrays) if arrays else {})
    if wrong := [path for path, digest in found.items() if not isinstance(saved, dict) or saved.get(path) != digest]:
        raise _DamagedError(f"{step}: {_few(wrong)}: not what was saved")
    return restored


def _agreed(fault: str | None) -> str | None:
    """The fault of a process, known to all of them: each has to come to the same end. None if none has one."""
    if jax.process_count() == 1:
        return fault
    faulty = np.asarray(multihost_utils.process_allgather(np.int32(fault is not None)))
    if not faulty.any():
        return None
    return fault or f"process {faulty.argmax()} of {len(faulty)} says why"


# ---- a run's config


def _unwritable(workdir: Path, error: OSError) -> InputError:
    return InputError(f"workdir = {str(workdir)!r}: cannot be written to: {error}")


def write_config(workdir: Path, config: dict[str, Any]) -> None:
    """Write the run's config, atomically.

    Raises:
        InputError: the workdir cannot be made or written to.
    """
    partial = workdir / f"{CONFIG_FILE}.{os.getpid()}.tmp"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(config, indent=2) + "\n")
        partial.replace(workdir / CONFIG_FILE)
    except OSError as error:
        raise _unwritable(workdir, error) from error


def read_config(workdir: Path) -> dict[str, Any] | None:
    """The config that a run wrote into its workdir; None where there is none.

    Raises:
        InputError: the file is not what a run writes.
    """
    file = workdir / CONFIG_FILE
    if not file.exists():
        return None
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"workdir = {str(workdir)!r}: {file} cannot be read as JSON ({error})") from error
    require(
        isinstance(config, dict) and set(config) >= {"config", "data_digest"},
        "workdir",
        str(workdir),
        f"{file} is no run's",
    )
    return config
