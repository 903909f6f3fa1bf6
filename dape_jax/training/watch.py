"""Watch a run: `train.log` in its workdir, profiler traces, and a warning when no step ends. Next: `loop.py`."""

import io
import logging
import logging.handlers
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
from etils import epath

from dape_jax.storage import is_remote

LOG_FILE = "train.log"
TRACED_STEPS = 5  # after SIGUSR2
STALL_SECONDS = 600.0
PACKAGE = Path(__file__).parents[1]

logger = logging.getLogger(__name__)


class TrainLog(logging.handlers.MemoryHandler):
    """Lines of this package's log, kept in memory until `open` appends them and all later ones to `train.log`.

    An object in a bucket cannot be appended to: `upload` writes it again.
    """

    def __init__(self, workdir: epath.PathLike):
        super().__init__(sys.maxsize, flushLevel=sys.maxsize)
        self.file, self.text = epath.Path(workdir) / LOG_FILE, io.StringIO()

    def __enter__(self) -> "TrainLog":
        logging.getLogger("dape_jax").addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        logging.getLogger("dape_jax").removeHandler(self)
        target = self.target
        if target is not None:
            if kind is not None:
                message = {"msg": f"{kind.__name__}: {error}", "levelno": logging.ERROR, "levelname": "ERROR"}
                target.handle(logging.makeLogRecord(message))
            self.upload()
            target.close()
        self.close()

    def open(self) -> None:
        """Write to the workdir from here on. Call it on process 0, when the workdir is locked."""
        if is_remote(self.file):
            self.text.write(self.file.read_text() if self.file.exists() else "")
        target = logging.StreamHandler(self.text) if is_remote(self.file) else logging.FileHandler(self.file)
        target.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.capacity = 0
        self.setTarget(target)
        self.flush()

    def upload(self) -> None:
        """Write the object in a bucket again."""
        if self.target is not None and is_remote(self.file):
            self.file.write_text(self.text.getvalue())


class Trace:
    """Traces of `jax.profiler` in `WORKDIR/profile/step_N/process_I`, written by every process for itself.

    They are of the steps from the first to the last of `steps`, if any, and of the next `TRACED_STEPS` of a process
    that receives SIGUSR2. For a bucket, a trace is written to a temporary directory and then uploaded.
    """

    def __init__(self, workdir: epath.PathLike, steps: tuple[int, ...], start: int):
        """Trace a run that starts after step `start`."""
        self.root, self.steps, self.start = epath.Path(workdir) / "profile", steps, start
        self.is_asked, self.last = False, 0  # last: that of the running trace, or 0
        self.directory = self.local = self.root

    def __enter__(self) -> "Trace":
        self.previous = signal.signal(signal.SIGUSR2, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGUSR2, self.previous)
        self._stop()

    def _ask(self, number: int, _: object) -> None:
        self.is_asked = True

    def begin(self, step: int) -> None:
        """Start a trace if one is due before this step."""
        if self.last:
            return
        if self.is_asked:
            self.is_asked, self.last = False, step + TRACED_STEPS - 1
        elif self.steps and max(self.steps[0], self.start + 1) == step <= self.steps[1]:
            self.last = self.steps[1]
        else:
            return
        self.directory = self.root / f"step_{step}" / f"process_{jax.process_index()}"
        self.local = epath.Path(tempfile.mkdtemp()) if is_remote(self.root) else self.directory
        jax.profiler.start_trace(str(self.local))

    def end(self, step: int, metrics: Any) -> None:
        """End a trace of which this step is the last, when its metrics are computed."""
        if step == self.last:
            jax.block_until_ready(metrics)
            self._stop()

    def _stop(self) -> None:
        if not self.last:
            return
        self.last = 0
        jax.profiler.stop_trace()
        if is_remote(self.root):
            for file in Path(self.local).rglob("*"):
                if file.is_file():
                    (self.directory / file.relative_to(self.local)).write_bytes(file.read_bytes())
            shutil.rmtree(self.local)
        logger.info("trace: %s", self.directory)


class Watchdog:
    """Thread that logs one line, with the place in the code, when no step has ended for `STALL_SECONDS`."""

    def __init__(self, start: int):
        self.step, self.ended_at, self.thread_id = start, time.monotonic(), threading.get_ident()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed.set()
        self.thread.join()

    def ended(self, step: int) -> None:
        """Note that a step has ended."""
        self.step, self.ended_at = step, time.monotonic()

    def _watch(self) -> None:
        told = -1
        while not self.closed.wait(STALL_SECONDS / 10):
            step, idle = self.step, time.monotonic() - self.ended_at
            if idle < STALL_SECONDS or step == told:
                continue
            told, frame = step, sys._current_frames().get(self.thread_id)
            while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                frame = frame.f_back
            place = "" if frame is None else f": in {frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno}"
            message = "process %d: no step has ended for %.0f minutes, since step %d%s"
            logger.warning(message, jax.process_index(), idle / 60, step, place)
