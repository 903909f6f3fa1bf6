"""Checkpoints: one composite save of `params`, `opt_state`, `data` and `config`, by Orbax. Next: `loop.py`.

The four are separate items, so that an evaluator reads `params` and `config` alone. The newest few are kept, and the
one with the lowest validation loss besides.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dape_jax.errors import InputError, require
from dape_jax.training.step import TrainState
from dape_jax.transformer import Params

CONFIG_FILE = "config.json"


def open_checkpoints(workdir: Path, keep_latest: int) -> ocp.CheckpointManager:
    """The manager of a run's checkpoints. Call `close()` on it: saves run in the background until then.

    Orbax's `best_fn` with `max_to_keep` would delete every step newer than the best; a policy that is the union of
    newest and best is what a run needs. `best_fn` is given besides: without it Orbax does not write the metrics down,
    and a resumed run would know of no best and delete nothing.
    """
    policy = preservation_policy.AnyPreservationPolicy(
        [
            preservation_policy.LatestN(keep_latest),
            preservation_policy.BestN(get_metric_fn=_validation_nats, reverse=True, n=1),
        ]
    )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policy, best_fn=_validation_nats, best_mode="min", cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(
        _directory(workdir), item_names=("params", "opt_state", "health", "data", "config"), options=options
    )


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
    validation_nats: float,
) -> None:
    """Start saving everything that a resumed run needs; returns when the arrays may be overwritten."""
    manager.save(
        step,
        args=ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            opt_state=ocp.args.StandardSave(state.opt_state),
            health=ocp.args.StandardSave(state.health),
            data=ocp.args.JsonSave(data_state),
            config=ocp.args.JsonSave(config),
        ),
        metrics={"validation_nats": validation_nats},
    )


def restore(manager: ocp.CheckpointManager, step: int, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Read training state and data position of a step, placed like the arrays of `state`."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    restored = manager.restore(
        step,
        args=ocp.args.Composite(
            params=ocp.args.StandardRestore(abstract.params),
            opt_state=ocp.args.StandardRestore(abstract.opt_state),
            health=ocp.args.StandardRestore(abstract.health),
            data=ocp.args.JsonRestore(),
        ),
    )
    return TrainState(restored["params"], restored["opt_state"], restored["health"]), restored["data"]


def restore_config(workdir: Path, which: str = "newest") -> tuple[int, dict[str, Any]]:
    """A step's number and the config that was saved with it: all that an evaluator needs to rebuild the model.

    Args:
        workdir: of the run.
        which: "newest", "best" (the lowest validation loss) or a number.

    Raises:
        InputError: there is no such checkpoint.
    """
    require(_directory(workdir).is_dir(), "workdir", str(workdir), "a directory that train.py has written")
    options = ocp.CheckpointManagerOptions(create=False, best_fn=_validation_nats, best_mode="min")
    with ocp.CheckpointManager(_directory(workdir), options=options) as manager:
        steps = sorted(manager.all_steps())
        require(bool(steps), "workdir", str(workdir), "has no checkpoint yet")
        named = {"newest": manager.latest_step(), "best": manager.best_step()} | {str(step): step for step in steps}
        require(which in named, "step", which, f"one of {list(named)} in {workdir}")
        step = named[which]
        assert step is not None
        restored = manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
    return step, restored["config"]


def restore_params(workdir: Path, step: int, abstract: Params) -> Params:
    """Read the parameters of a step, and nothing else, placed as `abstract` says."""
    with ocp.CheckpointManager(_directory(workdir), options=ocp.CheckpointManagerOptions(create=False)) as manager:
        restored = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract)))
    return restored["params"]


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
        raise InputError(f"workdir = {str(workdir)!r}: cannot be written to: {error}") from error


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
    except ValueError as error:
        raise InputError(f"workdir = {str(workdir)!r}: {file} is not JSON ({error})") from error
    require(
        isinstance(config, dict) and set(config) >= {"config", "data_digest"},
        "workdir",
        str(workdir),
        f"{file} is no run's",
    )
    return config
