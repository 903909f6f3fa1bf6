"""Checkpoints: saved completely or not at all, and verified when read. In: `step.py`'s state. Next: `loop.py`.

Each step is one composite Orbax save with the items `params`, `opt_state`, `health`, `data` and `config`, so that
evaluation reads only `params` and `config`. The newest steps and the one with the lowest validation loss are kept.

Orbax restores an array with a flipped bit without an error. Each save therefore has one more item, `digests`: a digest
of each array, computed on the devices before the arrays are written, of each JSON item and of the step's number. Every
item that is read is compared with its digest. A damaged step is skipped with a warning that gives the reason. When
training resumes from an older step, it moves the damaged steps to `damaged/`. Damaged steps are never deleted.
"""

import contextlib
import errno
import functools
import itertools
import logging
import operator
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dape_jax.config import without_removed
from dape_jax.distributed import first_fault, process_zero_only, require_same
from dape_jax.errors import InputError, describe, require
from dape_jax.files import (
    exclusive_lock,
    json_digest,
    parse_json,
    read_bytes,
    read_json,
    write_atomically,
    write_json,
)
from dape_jax.model.transformer import Params
from dape_jax.storage import (
    AnyPath,
    absolute,
    bucket_errors,
    exists,
    is_of_network,
    is_remote,
    lease,
    list_directory,
    move_directory,
)
from dape_jax.training.step import TrainState

CONFIG_FILE = "config.json"
LOCK_FILE = "run.lock"
_DELETED = "deleted"  # directory next to the steps, for steps that are being deleted; not in a bucket, see `_Manager`
_METADATA = "_CHECKPOINT_METADATA"  # written by Orbax to each step
_COMPLETE = "commit_success.txt"  # Orbax writes it last to a step in a bucket, where nothing can be renamed
# Errors caused by the machine, its network or file permissions: they do not mean that a checkpoint is damaged.
_ENVIRONMENT_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ETIMEDOUT,
)

logger = logging.getLogger(__name__)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    is_traceback = bool(record.exc_info) and f"{os.sep}orbax{os.sep}" in record.pathname
    return not is_traceback and "did not provide metrics" not in record.getMessage()


# Orbax raises an error and also logs its traceback, up to four times from background threads. It also logs that a step
# has no validation loss, as is normal for steps saved at SIGTERM and for imported models. When one read or write fails,
# the others fail as well; Orbax never awaits them, and asyncio logs each one.
logging.getLogger("absl").addFilter(_is_worth_logging)
logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())


class DamagedError(Exception):
    """Damaged step: it cannot be read, or differs from what was saved. The message names the file or item."""


# ---- the run directory


@contextlib.contextmanager
def run_lock(workdir: AnyPath) -> Iterator[None]:
    """Hold an exclusive lock on `workdir`, creating it if missing. Process 0 holds it for all processes.

    In a bucket it is a lease; see `storage.lease`.

    Raises:
        InputError: another run holds the lock, or the directory cannot be written to.
    """
    held = lease(workdir, "workdir", LOCK_FILE) if is_remote(workdir) else exclusive_lock(workdir, "workdir", LOCK_FILE)
    with contextlib.ExitStack() as stack:
        process_zero_only(lambda: stack.enter_context(held))
        yield


def write_config(workdir: AnyPath, config: dict[str, Any]) -> None:
    """Write the run's config, atomically.

    Raises:
        InputError: the directory cannot be written to.
    """
    try:
        write_json(workdir / CONFIG_FILE, config)
    except OSError as error:
        raise InputError(f"workdir = {str(workdir)!r}: cannot be written to: {error}") from error


def read_config(workdir: AnyPath) -> dict[str, Any] | None:
    """Return the config that a run wrote to its directory, or None if there is no run.

    Each checkpoint has a copy. If the file is missing or damaged, the copy in the newest intact checkpoint is returned.

    Raises:
        InputError: there is a run, but neither the file nor any checkpoint is intact.
        OSError: the file exists but cannot be read.
    """
    try:
        return read_config_file(workdir)
    except InputError as error:
        if not step_names(workdir):
            raise
        logger.warning("%s; the copy in the newest checkpoint is used", error)
    except (FileNotFoundError, NotADirectoryError):
        if not step_names(workdir):
            return None
        logger.warning("%s is missing; the copy in the newest checkpoint is used", workdir / CONFIG_FILE)
    step, record = restore_config(workdir)
    _require_record(record, workdir, f"the config of step {step}")
    return record


def read_config_file(workdir: AnyPath) -> dict[str, Any]:
    """Return the content of the config's file.

    Raises:
        InputError: the file is damaged, or was not written by a run.
        OSError: the file is missing, or cannot be read.
    """
    file = workdir / CONFIG_FILE
    read_bytes(file)  # raises OSError, which `read_json` would report as a damaged file
    record = read_json(file)
    _require_record(record, workdir, str(file))
    return record | {"config": without_removed(record["config"])}


def _require_record(record: dict[str, Any], workdir: AnyPath, source: str) -> None:
    is_record = isinstance(record.get("config"), dict) and isinstance(record.get("data_digest"), str)
    require(is_record, "workdir", str(workdir), f"{source} was not written by dape-train")


def require_space(workdir: AnyPath, state: TrainState | Params) -> None:
    """Raise `InputError` unless the file system has space for a checkpoint of this state, which may be abstract.

    Files of unfinished saves and deletions count as free: they are removed before the next save. A bucket always has
    space.
    """

    def check() -> None:
        if is_remote(workdir):
            return
        steps = workdir / "checkpoints"
        entries = [steps / name for name in list_directory(steps)]
        removed = [file for entry in entries if not entry.name.isdecimal() for file in entry.rglob("*")]
        free = shutil.disk_usage(workdir).free + sum(file.stat().st_size for file in removed if file.is_file())
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        message = f"a checkpoint takes {num_bytes / 1e6:,.1f} MB, but the file system has {free / 1e6:,.1f} MB free"
        require(free >= num_bytes, "workdir", str(workdir), message)

    process_zero_only(check)


def _directory(workdir: AnyPath) -> AnyPath:
    return absolute(workdir) / "checkpoints"


def step_names(workdir: AnyPath) -> list[str]:
    """Return the names of the saved steps, newest first, without unfinished saves.

    An unfinished save has another name, or in a bucket lacks the file `_COMPLETE`.
    """
    directory = _directory(workdir)
    found = [name for name in list_directory(directory) if name.isdecimal()]
    if is_remote(directory):
        found = [name for name in found if exists(directory / name / _COMPLETE)]
    return sorted(found, key=lambda name: (int(name), name), reverse=True)


# ---- digests


@functools.partial(jax.jit, static_argnames="sharding")
def _sums(leaves: list[Array], sharding: NamedSharding | None) -> UInt32[Array, "leaves 2"]:
    """Return two wrap-around sums of hashes for each array; each word is hashed together with its index.

    For a given index the hash is one-to-one, so changing one word changes both sums. Integer sums do not depend on the
    order of their terms, and therefore not on the mesh. Each array is read once, and no array of its size is written.
    """

    def sums(leaf: Array) -> Array:
        if jnp.issubdtype(leaf.dtype, jnp.bool_):
            words = leaf.astype(jnp.uint32)
        else:  # 8 bytes become two words, in a new last dim
            unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
            words = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
        index = jnp.zeros(words.shape, jnp.uint32)
        for dim, size in enumerate(words.shape):
            index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        index = index * np.uint32(0x9E3779B1)
        hashed = (words ^ index ^ (index >> 15)) * np.uint32(0x85EBCA77)
        hashed = (hashed ^ (hashed >> 13)) * np.uint32(0xC2B2AE3D)
        hashed = hashed ^ (hashed >> 16)
        again = hashed * np.uint32(0x27D4EB2F)
        again = again ^ (again >> 15)
        # One reduction for both sums: with two, the compiler writes the hashes to memory for the second.
        zero, dims = np.uint32(0), tuple(range(words.ndim))
        return jnp.stack(jax.lax.reduce((hashed, again), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), dims))

    stacked = jnp.stack([sums(leaf) for leaf in leaves])
    return stacked if sharding is None else jax.lax.with_sharding_constraint(stacked, sharding)


def leaf_digests(items: dict[str, Any]) -> dict[str, str]:
    """Return path -> digest (16 hexadecimal digits) of each array of a tree; it does not depend on the sharding."""
    if not items:
        return {}
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(items), strict=True)
    shardings = [leaf.sharding for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]
    sums = np.asarray(_sums(list(leaves), NamedSharding(shardings[0].mesh, PartitionSpec()) if shardings else None))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    return {name: f"{one:08x}{other:08x}" for name, (one, other) in zip(names, sums, strict=True)}


# ---- saving


class _Manager(ocp.CheckpointManager):
    """Orbax's manager with one-line errors for failed saves, and with atomic deletion.

    A reader never sees a step that is partly deleted: a local step is first renamed, and a step in a bucket first loses
    the file `_COMPLETE`.
    """

    def __init__(self, workdir: AnyPath, max_to_keep: int):
        """Open the checkpoints of a run, creating their directory if missing.

        Orbax's `best_fn` with `max_to_keep` would delete every step newer than the best, so a preservation policy keeps
        the newest steps and the best. `best_fn` is set as well: without it Orbax does not write the metrics, and a
        resumed run could not find the best step.
        """
        self.workdir = workdir
        self.saving: int | None = None
        validation_nats = operator.itemgetter("validation_nats")
        best = preservation_policy.BestN(
            get_metric_fn=validation_nats, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(
                [preservation_policy.LatestN(max_to_keep), best]
            ),
            best_fn=validation_nats,
            best_mode="min",
            cleanup_tmp_directories=True,
            todelete_subdir=None if is_remote(workdir) else _DELETED,
            temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath if is_remote(workdir) else None,
        )
        items = ("params", "opt_state", "health", "data", "config", "digests")
        super().__init__(_directory(workdir), item_names=items, options=options)
        self._delete()  # steps whose deletion was interrupted by a kill

    def _delete(self) -> None:
        if jax.process_index() == 0 and not is_remote(self.workdir):
            shutil.rmtree(_directory(self.workdir) / _DELETED, ignore_errors=True)

    def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
        """Finish a save and delete the steps that are no longer kept; Orbax calls this in its background thread."""
        directory = _directory(self.workdir)
        if not is_remote(directory):
            super()._finalize(step, steps_to_remove)
            self._delete()
            return
        super()._finalize(step, [])
        for removed in steps_to_remove if jax.process_index() == 0 else []:
            try:
                with bucket_errors():
                    (directory / str(removed) / _COMPLETE).unlink(missing_ok=True)
                    (directory / str(removed)).rmtree()
            except OSError as error:  # the rest is deleted when the run is resumed
                logger.warning("%s/%d: cannot be deleted: %s", directory, removed, describe(error))

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Start a save, after the previous one has finished.

        Raises:
            InputError: this step or the previous one cannot be written.
        """
        self.wait_until_finished()
        self.saving = step
        with self._one_line_errors():
            return super().save(step, *args, **kwargs)

    def reached_preemption(self, step: int) -> bool:
        """Return False: `distributed.PreemptionGuard` queries jax, once for each step.

        Orbax would also query jax, from a background thread, about an earlier step. jax would mistake it for the
        current step, and could choose an earlier step as the one at which all processes stop.
        """
        return False

    def wait_until_finished(self) -> None:
        """Wait until the background save has finished.

        Raises:
            InputError: the step cannot be written.
        """
        with self._one_line_errors():
            super().wait_until_finished()

    @contextlib.contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # TensorStore, which writes the arrays, raises ValueError
            number = _error_number(error)
            if isinstance(error, InputError) or not (number or isinstance(error, OSError) or is_of_network(error)):
                raise
            reason = os.strerror(number) if number else " ".join(str(error).split())[:300]
            raise InputError(
                f"workdir = {str(self.workdir)!r}: the checkpoint of step {self.saving} cannot be written: {reason}; "
                "earlier checkpoints are intact, and the same command resumes from the newest"
            ) from error


def _error_number(error: BaseException) -> int | None:
    """Return the `errno` of an error, including errors of TensorStore, which contain it in their text; or None."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return int(code[1]) if code else getattr(error, "errno", None)


def open_checkpoints(workdir: AnyPath, max_to_keep: int) -> ocp.CheckpointManager:
    """Return the manager of a run's checkpoints. The caller closes it, which waits for the background save."""
    return _Manager(workdir, max_to_keep)


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    data_state: dict[str, Any],
    config: dict[str, Any],
    validation_nats: float | None,
) -> None:
    """Start saving the state that a resumed run needs; return when the arrays may be overwritten.

    A step without a validation loss (where SIGTERM stopped the run) is kept while it is among the newest, and is never
    the best.

    Raises:
        InputError: this step or the previous one cannot be written.
    """
    arrays = state._asdict()
    metrics = None if validation_nats is None else {"validation_nats": validation_nats}
    jsons = {"data": data_state, "config": config}
    checked = {"step": step} | jsons | ({} if metrics is None else {"metrics": metrics})
    digests = leaf_digests(arrays) | {name: json_digest(value) for name, value in checked.items()}
    manager.save(
        step,
        args=ocp.args.Composite(
            **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
            **{name: ocp.args.JsonSave(value) for name, value in jsons.items()},
            digests=ocp.args.JsonSave(digests),
        ),
        metrics=metrics,
    )


def save_params(workdir: AnyPath, params: Params, config: dict[str, Any]) -> None:
    """Save parameters that were not trained in `workdir` as step 0, and wait until they are written.

    Raises:
        InputError: they cannot be written.
    """
    checked = {"step": 0, "config": config}
    digests = leaf_digests({"params": params}) | {name: json_digest(value) for name, value in checked.items()}
    items = {"config": ocp.args.JsonSave(config), "digests": ocp.args.JsonSave(digests)}
    with open_checkpoints(workdir, 1) as manager:
        manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(params), **items))
        manager.wait_until_finished()


# ---- restoring


def restore_newest(workdir: AnyPath, abstract: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
    """Read the newest intact step, and move the damaged ones to `damaged/`.

    Call it before `open_checkpoints`. Of steps older than the newest intact one, only the JSON items are read.

    Returns:
        The step's number, its state (sharded like `abstract`) and its position in the data; or None if no step was
        saved.

    Raises:
        InputError: steps exist and none is intact, or the processes see different steps.
    """
    arrays = {name: ocp.args.StandardRestore(tree) for name, tree in abstract._asdict().items()}
    jsons = {name: ocp.args.JsonRestore() for name in ("data", "config")}
    faults: dict[str, str] = {}
    found = None
    names = step_names(workdir)
    field = f"steps in workdir = {str(workdir)!r}"
    require_same(field, str(names), "; is the workdir on a file system that all processes share?")
    for name in names:
        try:
            restored = _read(workdir, name, **jsons, **({} if found else arrays))
        except DamagedError as error:
            faults[name] = str(error)
        else:
            found = found or (int(name), TrainState(*(restored[item] for item in arrays)), restored["data"])
    if faults and found is None:
        raise InputError(
            f"workdir = {str(workdir)!r}: all of its checkpoints are damaged; none was moved. "
            + "; ".join(f"step {name}: {fault}" for name, fault in faults.items())
        )

    def move_damaged() -> None:
        for name, fault in faults.items():
            with bucket_errors():
                target = _free_name(workdir, name)
                move_directory(_directory(workdir) / name, target)
            logger.warning("step %s is damaged and moved to %s: %s", name, target, fault)
        for name in names:
            if name not in faults:
                _move_unreadable_metadata(workdir, name)

    process_zero_only(move_damaged)
    return found


def _free_name(workdir: AnyPath, name: str) -> AnyPath:
    """Return an unused path in `damaged/`: `name`, or `name` with a number."""
    damaged = workdir / "damaged"
    damaged.mkdir(exist_ok=True)  # does nothing in a bucket
    free = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return damaged / next(each for each in free if each not in list_directory(damaged))


def _move_unreadable_metadata(workdir: AnyPath, name: str) -> None:
    """Move Orbax's metadata of a step to `damaged/` if it is not JSON.

    The metadata contains only times. Orbax works without it, but fails on JSON that is nested too deeply.
    """
    file = _directory(workdir) / name / _METADATA
    with contextlib.suppress(OSError), bucket_errors():  # Orbax also works if the file cannot be read
        content = read_bytes(file)
        try:
            parse_json(str(file), content)
        except InputError as error:
            target = _free_name(workdir, f"{name}{_METADATA}")
            write_atomically(target, content)
            file.unlink(missing_ok=True)
            logger.warning("the metadata of step %s is damaged and moved to %s: %s", name, target, error)


def restore_config(workdir: AnyPath, which: str = "newest") -> tuple[int, dict[str, Any]]:
    """Return a step's number and the config saved with it, from which evaluation rebuilds the model.

    `which` is "newest", "best" (the lowest validation loss) or a step's number. "newest" and "best" skip steps whose
    config or metrics are damaged, with a warning. If no step has a validation loss, "best" is the newest.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    is_run = exists(_directory(workdir)) or exists(workdir / CONFIG_FILE)
    require(is_run, "workdir", str(workdir), "must be a directory written by dape-train")
    steps = step_names(workdir)
    require(bool(steps), "workdir", str(workdir), "has no checkpoint yet")
    allowed = ["newest", "best", *reversed(steps)]
    require(which in allowed, "step", which, f"must be one of {allowed} in {workdir}")
    intact: dict[str, dict[str, Any]] = {}
    for name in steps if which in ("newest", "best") else [which]:
        try:
            intact[name] = _read(workdir, name, config=ocp.args.JsonRestore())
        except DamagedError as error:
            if name == which:
                raise InputError(f"step = {which!r}: {error}") from error
            logger.warning("step %s is damaged and skipped: %s", name, error)
        else:
            if which != "best":
                break
    if not intact and step_names(workdir) != steps:  # a training run has deleted these steps since they were listed
        return restore_config(workdir, which)
    require(bool(intact), "workdir", str(workdir), "all of its checkpoints are damaged")
    nats = {name: restored["metrics"]["validation_nats"] for name, restored in intact.items() if "metrics" in restored}
    name = min(nats, key=nats.__getitem__) if which == "best" and nats else next(iter(intact))
    record = intact[name]["config"]
    if isinstance(record.get("config"), dict):
        record = record | {"config": without_removed(record["config"])}
    return int(name), record


def restore_params(workdir: AnyPath, step: int, abstract: Params) -> Params:
    """Read only the parameters of a step, with the shardings of `abstract`.

    Raises:
        InputError: the step is damaged, or cannot be read now.
    """
    try:
        return _read(workdir, str(step), params=ocp.args.StandardRestore(abstract))["params"]
    except DamagedError as error:
        others = [name for name in reversed(step_names(workdir)) if name != str(step)]
        raise InputError(f"step = '{step}': {error}" + (f"; other steps are {others}" if others else "")) from error


def _why_unreadable(step: AnyPath) -> str:
    """Open all files of a step; describe the first error if it is one of `_ENVIRONMENT_ERRORS`, otherwise return "".

    A step in a bucket is not checked: there, Orbax's errors distinguish unreadable from missing files.
    """
    if is_remote(step):
        return ""

    errors: list[OSError] = []
    for directory, _, names in os.walk(step, onerror=errors.append):
        for name in names:
            try:
                Path(directory, name).open("rb").close()
            except OSError as error:
                errors.append(error)
    found = [error for error in errors if error.errno in _ENVIRONMENT_ERRORS]
    return f"{step}: cannot be read now: {describe(found[0])}" if found else ""


def _read(workdir: AnyPath, name: str, **items: Any) -> dict[str, Any]:
    """Return items of a step, and its metrics if it has any, after comparing them with the step's digests.

    With arrays in `items`, all processes must call this, and an error of one process is raised on all. Without arrays,
    each process reads on its own.

    Raises:
        DamagedError: the step is damaged.
        InputError: the files cannot be read now, for a reason that does not mean damage.
    """
    step = _directory(workdir) / name
    is_together = any(isinstance(args, ocp.args.StandardRestore) for args in items.values())
    agreed = first_fault if is_together else str
    restored, fault, unreadable = {}, "", ""
    process = jax.process_index()
    try:
        # Each process reads on its own, without Orbax's barriers: the others would wait there for a failed process.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process_{process}"
        )
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone) as reader:
            args = ocp.args.Composite(**items, digests=ocp.args.JsonRestore())
            restored = dict(reader.restore(step, args=args).items())
        if exists(step / "metrics" / "metrics"):  # written by Orbax's manager, which reads it on opening
            restored["metrics"] = read_json(step / "metrics" / "metrics")
        require(isinstance(restored["digests"], dict), f"{step}/digests", restored["digests"], "must be a JSON object")
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # does not mean that the step is damaged
    except InputError as error:
        fault = str(error)
    except Exception as error:  # Orbax and TensorStore raise many types; the root cause is the most specific error
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        if (number := _error_number(chain[-1])) in _ENVIRONMENT_ERRORS:
            unreadable = f"{step}: cannot be read now: {os.strerror(number)}"
        elif any(map(is_of_network, chain)) and not any(isinstance(each, FileNotFoundError) for each in chain):
            unreadable = f"{step}: cannot be read now: {' '.join(str(chain[-1]).split())[:300]}"
        else:
            fault = f"{step}: cannot be read: {' '.join(str(chain[-1]).split())[:300]}"
    if fault and not unreadable:  # Orbax reports a file without read permission as missing
        unreadable = _why_unreadable(step)
    if unreadable := agreed(unreadable):
        raise InputError(unreadable)
    if fault := agreed(fault):
        raise DamagedError(fault)
    known = (*items, "metrics")
    is_other = restored["digests"].get("step") not in (None, json_digest(int(name)))  # None: saved by an older version
    saved = {path: digest for path, digest in restored.pop("digests").items() if path.split("/")[0] in known}
    arrays = {item: restored[item] for item, args in items.items() if isinstance(args, ocp.args.StandardRestore)}
    found = {item: json_digest(value) for item, value in restored.items() if item not in arrays} | leaf_digests(arrays)
    if wrong := sorted(path for path in saved.keys() | found.keys() if saved.get(path) != found.get(path)):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        fault = f"{step}: {', '.join(wrong[:3])}{more}: differs from what was saved"
    if fault := agreed(f"{step}: was saved as another step" if is_other else fault):
        raise DamagedError(fault)
    return restored
