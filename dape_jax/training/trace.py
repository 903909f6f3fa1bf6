"""Profiler trace of training steps on request: `--config.train.profile_steps=10,15`. Next: `loop.py`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from dape_jax.errors import require
from dape_jax.storage import AnyPath, is_remote

PROFILE_DIRECTORY = "profile"

logger = logging.getLogger(__name__)


class StepTrace:
    """Profiler trace of training steps in `workdir/profile`, written by process 0."""

    def __init__(self, workdir: AnyPath, steps: tuple[int, ...]):
        """Prepare a trace of `steps`, the field `train.profile_steps`: the first and the last step, or () for no trace.

        Raises:
            InputError: the workdir is in a bucket, where JAX's profiler cannot write.
        """
        allowed = "must be empty for a workdir in a bucket: the profiler writes local files"
        require(not (steps and is_remote(workdir)), "train.profile_steps", steps, allowed)
        self.directory = workdir / PROFILE_DIRECTORY
        self.first, self.last = steps if steps and jax.process_index() == 0 else (0, 0)
        self.traced: tuple[int, int] | None = None  # first and last step of the running trace

    @contextmanager
    def of_run(self) -> Iterator["StepTrace"]:
        """Stop and write the trace at the end of the block, if the block ends before the last traced step."""
        try:
            yield self
        finally:
            self.stop()

    def before(self, step: int) -> None:
        """Start the trace before its first step, or before a later one if the run resumes there."""
        if self.first <= step <= self.last:
            if self.traced is None:
                jax.profiler.start_trace(str(self.directory))
            self.traced = (step if self.traced is None else self.traced[0], step)

    def after(self, step: int, results: Any) -> None:
        """Stop the trace after its last step, once the devices have computed the step's `results`."""
        if self.traced is not None and step == self.last:
            jax.block_until_ready(results)
            self.stop()

    def stop(self) -> None:
        """Stop and write the trace, if it is running."""
        if self.traced is not None:
            jax.profiler.stop_trace()
            logger.info("trace of steps %d to %d: tensorboard --logdir=%s", *self.traced, self.directory)
            self.traced = None
