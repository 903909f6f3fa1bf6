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
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dape_jax.distributed import first_fault, process_zero_only
from dape_jax.errors import InputError, require
from dape_jax.files import exclusive_lock, json_digest, read_json, write_json
from dape_jax.model.transformer import Params
from dape_jax.storage import absolute, is_remote, names_in, read_errors, run_marker
from dape_jax.training.step import TrainState

CONFIG_FILE, LOCK_FILE = "config.json", "run.lock"
_DELETED = "deleted"  # directory next to the steps, for steps that are being deleted; not in a bucket
_COMPLETE = "commit_success.txt"  # Orbax writes it last to a step in a bucket, where nothing can be renamed
# Errors of the machine, its network or permissions: they do not mean that a checkpoint is damaged.
_NOT_DAMAGE = {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_NOT_NOW = "cannot be read now"

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
def run_lock(workdir: epath.PathLike) -> Iterator[Callable[[], None]]:
    """Keep other runs out of `workdir`, creating it if missing, until the block ends. Process 0 does it for all.

    Yields a function to call between steps: in a bucket it renews the run's marker.

    Raises:
        InputError: another run uses the directory, or it cannot be written to.
    """
    require_writable_path(workdir)
    is_bucket = is_remote(_directory(workdir))
    lock = run_marker(epath.Path(workdir) / LOCK_FILE) if is_bucket else exclusive_lock(workdir, "workdir", LOCK_FILE)
    with contextlib.ExitStack() as stack:
        yield process_zero_only(lambda: stack.enter_context(lock)) or (lambda: None)


def require_writable_path(workdir: epath.PathLike) -> None:
    r"""Raise `InputError` for a path that cannot be created or written to, or that Orbax or TensorStore misreads.

    Orbax reads it as a pattern, and for TensorStore \ is a /. Nothing is created.
    """
    place = str(absolute(workdir))
    allowed = r"the path must not contain *, ? or [, which Orbax reads as a pattern, nor \, and must be UTF-8"
    require(re.search(r"[*?[\\\ud800-\udfff]", place) is None, "workdir", place, allowed)
    if not is_remote(place):
        nearest = next(path for path in (place, *epath.Path(place).parents) if os.path.exists(path))
        is_writable = os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
        allowed = f"cannot be written to: {nearest} is not a directory in which this user may create files"
        require(is_writable, "workdir", str(workdir), allowed)


def write_config(workdir: epath.PathLike, config: dict[str, Any]) -> None:
    """Write the run's config, atomically."""
    write_json(epath.Path(workdir) / CONFIG_FILE, config)


def read_config(workdir: epath.PathLike) -> dict[str, Any] | None:
    """Return the config that a run wrote to its directory, or None if there is no run.

    Raises:
        InputError: the file is damaged, or missing beside checkpoints, which have copies of it.
    """
    file, steps = epath.Path(workdir) / CONFIG_FILE, step_names(workdir)
    if not file.exists():
        if steps:
            copy = _directory(workdir) / steps[0] / "config" / "metadata"
            raise InputError(f"workdir = {str(workdir)!r}: {file} is missing; copy {copy} to it")
        return None
    record = read_json(file)
    is_record = isinstance(record.get("config"), dict) and isinstance(record.get("data_digest"), str)
    require(is_record, "workdir", str(workdir), f"{file} is no run's; dape-import makes a run of a Hugging Face model")
    return record


def _directory(workdir: epath.PathLike) -> epath.Path:
    allowed = "must be local or gs://bucket/path: Orbax writes no checkpoints to s3"
    require(not str(workdir).startswith("s3://"), "workdir", str(workdir), allowed)
    return absolute(workdir) / "checkpoints"


def step_names(workdir: epath.PathLike) -> list[str]:
    """Return the names of the saved steps, newest first, without unfinished saves.

    An unfinished save has another name, or in a bucket lacks the file `_COMPLETE`.
    """
    directory = _directory(workdir)
    with read_errors("workdir", str(workdir)):
        found = [name for name in names_in(directory) if name.isdecimal()]
    if is_remote(directory):
        found = [name for name in found if _COMPLETE in names_in(directory / name)]
    return sorted(found, key=int, reverse=True)


# ---- digests


@jax.jit  # one trace for all leaves of a shape
def _sums(leaf: Array) -> UInt32[Array, "2"]:
    """Return two wrap-around sums of hashes of an array; each word is hashed together with its index.

    For a given index the hash is one-to-one, so changing one word changes both sums. Integer sums do not depend on the
    order of their terms, and therefore not on the mesh. Each array is read once, and no array of its size is written.
    """
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
    unsigned = f"uint{min(8 * leaf.dtype.itemsize, 32)}"  # 8 bytes become two words, in a new last dim
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


@functools.partial(jax.jit, static_argnames="sharding")
def _sums_of(leaves: list[Array], sharding: NamedSharding | None) -> UInt32[Array, "leaves 2"]:
    stacked = jnp.stack([_sums(leaf) for leaf in leaves])
    return stacked if sharding is None else jax.lax.with_sharding_constraint(stacked, sharding)


def leaf_digests(items: dict[str, Any]) -> dict[str, str]:
    """Return path -> digest (16 hexadecimal digits) of each array of a tree; it does not depend on the sharding."""
    if not items:
        return {}
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(items), strict=True)
    shardings = [leaf.sharding for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]
    sums = np.asarray(_sums_of(list(leaves), NamedSharding(shardings[0].mesh, PartitionSpec()) if shardings else None))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    return {name: f"{one:08x}{other:08x}" for name, (one, other) in zip(names, sums, strict=True)}


# ---- saving


class Checkpoints(ocp.CheckpointManager):
    """Orbax's manager of a run's checkpoints. Closing it waits for the background save.

    A reader never sees a local step that is partly deleted: Orbax renames it into `deleted/`, which is emptied before
    the next save.
    """

    def __init__(self, workdir: epath.PathLike, max_to_keep: int):
        """Open the checkpoints of a run, creating their directory if missing; remove what a killed run has left.

        Orbax's `best_fn` with `max_to_keep` would delete every step newer than the best, so a preservation policy keeps
        the newest steps and the best. `best_fn` is set as well: without it Orbax does not write the metrics, and a
        resumed run could not find the best step.
        """
        self.workdir, self.saving = workdir, 0
        nats = operator.itemgetter("validation_nats")
        best = preservation_policy.BestN(get_metric_fn=nats, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(
                [preservation_policy.LatestN(max_to_keep), best]
            ),
            best_fn=nats,
            best_mode="min",
            cleanup_tmp_directories=True,
            todelete_subdir=None if is_remote(workdir) else _DELETED,
        )
        items = ("params", "opt_state", "health", "data", "config", "digests")
        super().__init__(_directory(workdir), item_names=items, options=options)
        self.wait_until_finished()

    def reached_preemption(self, step: int) -> bool:
        """Return False: `distributed.PreemptionGuard` queries jax, once for each step.

        Orbax would also query jax, from a background thread, about an earlier step. jax would mistake it for the
        current step, and could choose an earlier step as the one at which all processes stop.
        """
        return False

    def wait_until_finished(self) -> None:
        """Wait until the background save has finished; raise `InputError` if it cannot be written."""
        with self.one_line_errors():
            super().wait_until_finished()
        if jax.process_index() == 0 and not is_remote(self.workdir):
            shutil.rmtree(_directory(self.workdir) / _DELETED, ignore_errors=True)

    @contextlib.contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Raise `InputError` for an error of the file system, such as a full disk."""
        try:
            yield
        except Exception as error:  # TensorStore, which writes the arrays, raises ValueError
            number = _error_number(error)
            if number is None:
                raise
            raise InputError(
                f"workdir = {str(self.workdir)!r}: the checkpoint of step {self.saving} cannot be written: "
                f"{os.strerror(number)}; earlier checkpoints are intact, and the same command resumes from the newest"
            ) from error


def _error_number(error: BaseException) -> int | None:
    """Return the `errno` of an error or of its cause, or None. Errors of TensorStore contain it in their text."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    number = int(code[1]) if code else getattr(error, "errno", None)
    return _error_number(error.__cause__) if number is None and error.__cause__ is not None else number


def save(
    manager: Checkpoints, step: int, arrays: dict[str, Any], jsons: dict[str, Any], validation_nats: float | None
) -> None:
    """Start saving items of a step after the previous save; return when the arrays may be overwritten.

    A step without a validation loss (where SIGTERM stopped the run) is kept while it is among the newest, and is never
    the best.

    Raises:
        InputError: this step or the previous one cannot be written.
    """
    metrics = None if validation_nats is None else {"validation_nats": validation_nats}
    checked = {"step": step} | jsons | ({} if metrics is None else {"metrics": metrics})
    digests = leaf_digests(arrays) | {name: json_digest(value) for name, value in checked.items()}
    items: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items()}
    items |= {name: ocp.args.JsonSave(value) for name, value in (jsons | {"digests": digests}).items()}
    manager.wait_until_finished()
    manager.saving = step
    with manager.one_line_errors():
        manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)


def save_params(workdir: epath.PathLike, params: Params, config: dict[str, Any]) -> None:
    """Save parameters that were not trained in `workdir` as step 0, and wait until they are written."""
    with Checkpoints(workdir, 1) as manager:
        save(manager, 0, {"params": params}, {"config": config}, None)


# ---- restoring


def restore_newest(workdir: epath.PathLike, abstract: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
    """Read the newest intact step, and move the damaged ones to `damaged/`.

    Call it before `Checkpoints`. Of steps older than the newest intact one, only the JSON items are read.

    Returns:
        The step's number, its state (sharded like `abstract`) and its position in the data; or None if no step was
        saved.

    Raises:
        InputError: steps exist and none is intact.
    """
    arrays = {name: ocp.args.StandardRestore(tree) for name, tree in abstract._asdict().items()}
    jsons = {name: ocp.args.JsonRestore() for name in ("data", "config")}
    faults: dict[str, str] = {}
    found = None
    for name in step_names(workdir):
        if found and is_remote(workdir):  # an older step may be half deleted, which Orbax finishes
            break
        try:
            restored = _read(workdir, name, **jsons, **({} if found else arrays))
        except DamagedError as error:
            faults[name] = str(error)
        else:
            found = found or (int(name), TrainState(*(restored[item] for item in arrays)), restored["data"])
    if faults and found is None:
        raise _all_damaged(workdir, faults)
    process_zero_only(lambda: _move(workdir, faults))
    return found


def _all_damaged(workdir: epath.PathLike, faults: dict[str, str]) -> InputError:
    each = "; ".join(f"step {name}: {fault}" for name, fault in faults.items())
    return InputError(f"workdir = {str(workdir)!r}: no checkpoint is intact. {each}")


def _move(workdir: epath.PathLike, faults: dict[str, str]) -> None:
    """Move damaged steps to unused names in `damaged/`, each beside a file with the reason."""
    damaged = epath.Path(workdir) / "damaged"
    for name, fault in faults.items():
        damaged.mkdir(exist_ok=True)
        free = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        target = damaged / next(each for each in free if each not in names_in(damaged))
        target.with_suffix(".txt").write_text(f"{fault}\n", encoding="utf-8")  # also creates the directory in a bucket
        (_directory(workdir) / name).rename(target)
        logger.warning("step %s is damaged and moved to %s: %s", name, target, fault)


def restore_config(workdir: epath.PathLike, which: str = "newest") -> tuple[int, dict[str, Any]]:
    """Return a step's number and the config saved with it, from which evaluation rebuilds the model.

    `which` is "newest", "best" (the lowest validation loss) or a step's number. "newest" and "best" skip steps whose
    config or metrics are damaged, with a warning. If no step has a validation loss, "best" is the newest.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    allowed = "must be a directory written by dape-train or dape-import, with a checkpoint"
    require(bool(steps := step_names(workdir)), "workdir", str(workdir), allowed)
    allowed = ["newest", "best", *reversed(steps)]
    require(which in allowed, "step", which, f"must be one of {allowed} in {workdir}")
    intact: dict[str, dict[str, Any]] = {}
    faults: dict[str, str] = {}
    for name in steps if which in ("newest", "best") else [which]:
        try:
            intact[name] = _read(workdir, name, config=ocp.args.JsonRestore())
        except DamagedError as error:
            faults[name] = str(error)
            logger.warning("step %s is damaged and skipped: %s", name, error)
        if intact and which != "best":
            break
    if not intact:
        raise _all_damaged(workdir, faults)
    nats = {name: restored["metrics"]["validation_nats"] for name, restored in intact.items() if "metrics" in restored}
    name = min(nats, key=nats.__getitem__) if which == "best" and nats else next(iter(intact))
    return int(name), intact[name]["config"]


def restore_params(workdir: epath.PathLike, step: int, abstract: Params) -> Params:
    """Read only the parameters of a step, with the shardings of `abstract`; raise `InputError` if it is damaged."""
    return restore_items(workdir, step, params=ocp.args.StandardRestore(abstract))["params"]


def restore_items(workdir: epath.PathLike, step: int, **items: Any) -> dict[str, Any]:
    """Read some items of a step, each named with Orbax's arguments; raise `InputError` if it is damaged or deleted."""
    try:
        return _read(workdir, str(step), **items)
    except DamagedError as error:
        steps = step_names(workdir)
        deleted = "deleted since by its training, which keeps train.max_to_keep steps; run this again"
        reason = error if str(step) in steps else deleted
        raise InputError(f"step = '{step}': {reason}; the steps are {steps}") from error


def _read(workdir: epath.PathLike, name: str, **items: Any) -> dict[str, Any]:
    """Return items of a step, and its metrics if it has any, after comparing them with the step's digests.

    All processes must call this, and an error of one is raised on all.

    Raises:
        DamagedError: the step is damaged.
        InputError: the files cannot be read now, for a reason that does not mean damage.
    """
    step, process = _directory(workdir) / name, jax.process_index()
    of_arrays = [item for item, args in items.items() if isinstance(args, ocp.args.StandardRestore)]
    restored, digests, fault = {}, {}, ""
    try:
        # Each process reads on its own, without Orbax's barriers: the others would wait there for a failed process.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process_{process}"
        )
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone) as reader:
            args = ocp.args.Composite(**items, digests=ocp.args.JsonRestore())
            restored = dict(reader.restore(step, args=args).items())
        if "metrics" in names_in(step):  # written by Orbax's manager, which reads it on opening
            restored["metrics"] = read_json(step / "metrics" / "metrics")
        digests = dict(restored.pop("digests"))
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # does not mean that the step is damaged
    except Exception as error:  # Orbax and TensorStore raise many types; the root cause is the most specific error
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, InputError):
            cause = cause.__cause__
        # A bucket's errors do not tell damage from the network.
        verdict = _NOT_NOW if _error_number(cause) in _NOT_DAMAGE or is_remote(step) else "cannot be read"
        fault = f"{step}: {verdict}: {' '.join(str(cause).split())[:300]}"
    if fault := first_fault(fault):
        raise InputError(f"{fault}; nothing was moved") if _NOT_NOW in fault else DamagedError(fault)
    saved = {path: digest for path, digest in digests.items() if path.split("/")[0] in (*items, "metrics")}
    found = {item: json_digest(value) for item, value in restored.items() if item not in of_arrays}
    found |= leaf_digests({item: restored[item] for item in of_arrays})
    wrong = sorted(path for path in saved.keys() | found.keys() if saved.get(path) != found.get(path))
    if wrong:
        fault = f"{step}: {', '.join(wrong[:3])}: differs from what was saved"
    if digests.get("step") not in (None, json_digest(int(name))):  # None: saved by an older version
        fault = f"{step}: was saved as another step"
    if fault := first_fault(fault):
        raise DamagedError(fault)
    return restored
