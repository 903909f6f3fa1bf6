"""Changes between a run's config and that with which it resumes. In: both configs. Next: `loop.py`."""

import shlex

import jax.numpy as jnp
import numpy as np
from etils import epath

from dape_jax.config import CHANGEABLE_FIELDS, RESUMABLE_FIELDS, RunConfig, TaskRunConfig, differences, resolved
from dape_jax.errors import InputError, did_you_mean, require
from dape_jax.training.optimizer import RATE_FIELDS, make_schedule


def allowed_changes(
    workdir: epath.Path,
    old: RunConfig | TaskRunConfig,
    new: RunConfig | TaskRunConfig,
    done: int,
    change: tuple[str, ...],
) -> list[str]:
    """Return the differences between a run's config and that with which it resumes; [] if nothing changes.

    Fields in `config.RESUMABLE_FIELDS` do not count. The schedule may differ if the learning rates of the `done` steps
    are the same bits: a constant rate can be extended, and its decay can begin. Fields in `config.CHANGEABLE_FIELDS`
    may differ if they, or their section, are in `change`.

    Raises:
        InputError: other fields differ, a field of `change` may not, or the run would end before the step it is at.
    """
    known = [*CHANGEABLE_FIELDS, *(f"optimizer.{field}" for field in vars(new.optimizer))]
    for field in change:
        allowed = f"must be one of {list(CHANGEABLE_FIELDS)}, or a field of optimizer{did_you_mean(field, known)}"
        require(field in known, "--change", field, allowed)
    num_steps, allowed = new.train.num_steps, f"must be at least {done}, the steps that {workdir} has done"
    require(num_steps >= done, "train.num_steps", num_steps, allowed)
    configs = resolved(old), resolved(new)
    before, after = (make_schedule(run.optimizer, run.train.num_steps)(jnp.arange(done)) for run in (old, new))
    of_rates = ("train.num_steps", *(f"optimizer.{field}" for field in RATE_FIELDS))
    kept = of_rates if np.array_equal(before, after) else ()
    refused = differences(*configs, ignored=(*RESUMABLE_FIELDS, *kept, *change))
    fields, advice = [line.partition(":")[0] for line in refused], []
    if not differences(*configs, ignored=(*RESUMABLE_FIELDS, *CHANGEABLE_FIELDS)):
        advice.append(f"--change={','.join((*change, *fields))} resumes with the new values")
    if "train.num_steps" in fields:
        recipe = shlex.quote(f"configs/continued.py:source={workdir}")
        advice.append(
            "The rates of the steps that are done depend on train.num_steps; another run can begin with the weights, "
            f"moments and place in the data of this one: --config={recipe} "
            "--config.init.optimizer=True --config.init.data=continue --config.train.num_steps=N"
        )
    refuse(workdir, refused, *advice)
    return differences(*configs, ignored=RESUMABLE_FIELDS)


def refuse(workdir: epath.Path, differing: list[str], *advice: str) -> None:
    """Raise `InputError` with the differences between a run's config and that with which it should resume, if any."""
    if differing:
        message = "holds a run with another config; choose another directory, or use the config of that run"
        raise InputError(f"workdir = {str(workdir)!r}: {'. '.join([message, '; '.join(differing), *advice])}")
