"""Watch a run: `train.log` in its workdir, profiler traces, and a traceback when no step ends. Next: `loop.py`."""

import contextlib
import faulthandler
import logging
import logging.handlers
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from dape_jax.storage import AppendedFiles

LOG_FILE = "train.log"
TRACED_STEPS = 5  # after SIGUSR2
STALL_SECONDS = 600.0

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def train_log(files: AppendedFiles) -> Iterator[Callable[[], None]]:
    """Keep the lines of this package's log in memory, and the error that ends the block.

    Yields a function that appends them and all later ones to `train.log`, for process 0 to call when the workdir is
    locked.
    """
    package, lines = logging.getLogger("dape_jax"), logging.handlers.MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)

    def open_file() -> None:
        target = stack.enter_context(contextlib.closing(logging.FileHandler(files.earlier(LOG_FILE))))
        target.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        lines.capacity = 0
        lines.setTarget(target)
        lines.flush()

    package.addHandler(lines)
    with contextlib.ExitStack() as stack:
        try:
            yield open_file
        except BaseException as error:
            message = {"msg": f"{type(error).__name__}: {error}", "levelno": logging.ERROR, "levelname": "ERROR"}
            lines.handle(logging.makeLogRecord(message))
            raise
        finally:
            package.removeHandler(lines)
            lines.close()


class Trace(contextlib.ExitStack):
    """Traces of `jax.profiler` in `WORKDIR/profile/step_N/process_I`, written by every process for itself.

    They are of the steps from the first to the last of `steps`, if any, and of the next `TRACED_STEPS` of a process
    that receives SIGUSR2.
    """

    def __init__(self, files: AppendedFiles, steps: tuple[int, ...]):
        super().__init__()
        self.root, self.steps = files.local / "profile", steps
        self.is_asked, self.last, self.name = False, 0, ""  # last: that of the running trace, or 0
        self.callback(self._stop)
        self.callback(signal.signal, signal.SIGUSR2, signal.signal(signal.SIGUSR2, self._ask))

    def _ask(self, number: int, _: object) -> None:
        self.is_asked = True

    def begin(self, step: int) -> None:
        """Start a trace if one is due before this step."""
        first, last = (step, step + TRACED_STEPS - 1) if self.is_asked else self.steps or (0, 0)
        if first <= step <= last and not self.last:
            self.is_asked, self.last, self.name = False, last, f"step_{step}/process_{jax.process_index()}"
            jax.profiler.start_trace(str(self.root / self.name))

    def end(self, step: int, metrics: Any) -> None:
        """End a trace of which this step is the last, when its metrics are computed."""
        if step == self.last:
            jax.block_until_ready(metrics)
            self._stop()

    def _stop(self) -> None:
        if self.last:
            self.last = 0
            jax.profiler.stop_trace()
            logger.info("trace: profile/%s", self.name)


@contextlib.contextmanager
def watchdog() -> Iterator[Callable[[], None]]:
    """Write to stderr where every thread is when no step has ended for `STALL_SECONDS`, until the block ends.

    Yields a function to call after each step.
    """

    def restart() -> None:
        faulthandler.dump_traceback_later(STALL_SECONDS, file=2)  # sys.stderr has no file in a notebook

    restart()
    try:
        yield restart
    finally:
        faulthandler.cancel_dump_traceback_later()
