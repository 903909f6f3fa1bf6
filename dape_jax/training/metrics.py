"""Metrics of a training run: progress, TensorBoard, Weights & Biases, and the log of skipped steps. Next: `loop.py`."""

import contextlib
import hashlib
import itertools
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from dape_jax.config import RunConfig, TaskRunConfig, resolved
from dape_jax.errors import NonFiniteError, describe, require_package
from dape_jax.evaluation.statistics import perplexity_of
from dape_jax.files import read_bytes, write_atomically
from dape_jax.hardware import mfu
from dape_jax.planning.flops import model_flops_per_token
from dape_jax.progress import Progress
from dape_jax.storage import AnyPath, absolute, is_remote
from dape_jax.training.optimizer import make_schedule

logger = logging.getLogger(__name__)

SKIPPED_FILE = "skipped.jsonl"
_SESSION_START = 1  # SessionLog.START of TensorBoard's events
_UPLOAD_SECONDS = 60.0  # between uploads of TensorBoard's events to a bucket


@runtime_checkable
class Sink(Protocol):
    """Destination of a run's scalars. After an `OSError` in a method, the run continues without this sink."""

    name: str  # in messages

    def start(self, first_step: int, config: dict[str, Any]) -> None:
        """Accept the number of the first step that will be reported, and the run's config."""
        ...

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Accept scalars such as {"train/loss_nats": 5.5}."""
        ...

    def close(self) -> None:
        """Write all accepted scalars."""
        ...


class MetricLogger:
    """Progress, sinks and `skipped.jsonl`, one step behind the device. Only process 0 writes.

    The metrics of a step are fetched after the next step is dispatched, so that the device never waits for the host.
    """

    def __init__(self, workdir: AnyPath, run: RunConfig | TaskRunConfig, start: int):
        """Open the files of a run that starts after step `start`."""
        # Computed here for all steps: a device computation between steps would wait for the running step.
        schedule = make_schedule(run.optimizer, run.train.num_steps)
        self.learning_rates = np.asarray(schedule(jnp.arange(run.train.num_steps)))
        self.workdir, self.max_bad_steps = workdir, run.train.max_bad_steps
        self.has_perplexity = isinstance(run, RunConfig)
        # None: no MFU. The formula assumes one length, but a task's lengths vary, and counts the gradients of all
        # parameters, but frozen parameters have none.
        self.token_flops: float | None = None
        if isinstance(run, RunConfig) and run.init.train_only is None:
            self.token_flops = model_flops_per_token(run.model, run.train.train_length, run.train.batch_size)
        self.is_first = jax.process_index() == 0
        self.sinks: list[Sink] = []
        if self.is_first:
            self._drop_skipped_after(start)
            self._open_sinks(run.train.wandb)
            config = resolved(run)
            self._write(lambda sink: sink.start(start + 1, config))
        self.bar = Progress(
            total=run.train.num_steps,
            initial=start,
            unit="step",
            desc=workdir.name,
            mininterval=1.0,
            disable=not self.is_first,
        )
        self.train_text, self.validation_text = "", ""
        self.pending: tuple[int, dict[str, jax.Array], int] | None = None
        self.fetched_at = time.monotonic()

    def __enter__(self) -> "MetricLogger":
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()
        for sink in self.sinks:
            self._close(sink)

    def log(self, step: int, metrics: dict[str, jax.Array], tokens: int) -> None:
        """Accept the metrics of a step on `tokens` tokens, and report the previous step.

        Raises:
            NonFiniteError: see `flush`.
        """
        self.flush()
        self.pending = (step, metrics, tokens)

    def flush(self) -> None:
        """Fetch and report the pending metrics, if any.

        Raises:
            NonFiniteError: more than `max_bad_steps` consecutive steps were not finite.
        """
        if self.pending is None:
            return
        step, metrics, tokens = self.pending
        self.pending = None
        values = {name: float(value) for name, value in metrics.items()}
        num_applied, applied = int(values.pop("num_applied")), bool(values.pop("applied"))
        is_bad, bad_in_a_row = bool(values.pop("bad")), int(values.pop("bad_in_a_row"))
        if not applied:
            self._log_skipped(step, values, is_bad, bad_in_a_row)
        now = time.monotonic()
        step_seconds = now - self.fetched_at
        tokens_per_second = tokens / step_seconds
        self.fetched_at = now
        # Skipped steps do not advance the schedule.
        values["learning_rate"] = float(self.learning_rates[max(num_applied - 1, 0)])
        values["tokens_per_second"], values["step_seconds"] = tokens_per_second, step_seconds
        self.train_text = f"loss {values['loss_nats']:.3f}, {tokens_per_second:,.0f} tokens/s"
        if self.token_flops is not None:
            share = mfu(tokens_per_second * self.token_flops, jax.devices()[0].device_kind, jax.device_count())
            if share is not None:
                values["mfu"] = share
                self.train_text += f", MFU {share:.1%}"
        self._write_scalars("train", step, values)
        self.bar.set_postfix_str(self.train_text + self.validation_text, refresh=False)
        self.bar.update()

    def log_validation(self, step: int, validation: dict[str, float]) -> None:
        """Report the results of a validation.

        Raises:
            NonFiniteError: its loss is not finite.
        """
        loss = validation["loss_nats"]
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {step}: validation_nats = {loss}; earlier checkpoints are kept")
        self._write_scalars("validation", step, validation)
        self.validation_text = f", validation {loss:.3f}"
        if "accuracy" in validation:
            self.validation_text += f", accuracy {validation['accuracy']:.1%}"
        self.bar.set_postfix_str(self.train_text + self.validation_text, refresh=self.bar.is_terminal)
        self.fetched_at = time.monotonic()

    def _log_skipped(self, step: int, values: dict[str, float], is_bad: bool, bad_in_a_row: int) -> None:
        message = ", ".join(f"{name} = {values[name]:.6g}" for name in ("loss_nats", "gradient_norm"))
        if bad_in_a_row > self.max_bad_steps:
            skipped = f"; bad steps skipped before it: {bad_in_a_row - 1}" if bad_in_a_row > 1 else ""
            raise NonFiniteError(
                f"step {step}: {message}{skipped}; train.max_bad_steps = {self.max_bad_steps}; "
                "earlier checkpoints are kept"
            )
        if not self.is_first:
            return
        reason = "bad" if is_bad else "overflow"
        logger.warning("step %d: skipped (%s): %s", step, reason, message)
        # JSON has no infinity and no NaN, so they are written as strings.
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        try:
            _append(self.workdir / SKIPPED_FILE, json.dumps({"step": step, "reason": reason} | numbers) + "\n")
        except OSError as error:
            logger.warning("%s: cannot be written to: %s", self.workdir / SKIPPED_FILE, describe(error))

    def _drop_skipped_after(self, start: int) -> None:
        """Remove the lines of `skipped.jsonl` for steps after `start`, which will be repeated.

        Unreadable lines are removed as well; a kill may truncate the last line, so only other lines cause a warning.
        """
        file = self.workdir / SKIPPED_FILE
        try:
            lines = read_bytes(file).splitlines(keepends=True)
            kept = [line for line in lines if (step := _step_of(line)) is not None and step <= start]
            write_atomically(file, b"".join(kept))
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s is left unchanged: %s", file, describe(error))
            return
        if any(_step_of(line) is None for line in lines[:-1]):
            logger.warning("unreadable lines were removed from %s", file)

    def _write_scalars(self, group: str, step: int, values: dict[str, float]) -> None:
        if self.has_perplexity:
            values = values | {"perplexity": perplexity_of(values["loss_nats"])}
        named = {f"{group}/{name}": value for name, value in values.items()}
        self._write(lambda sink: sink.scalars(step, named))

    def _open_sinks(self, wandb_project: str | None) -> None:
        try:
            self.sinks.append(_Events(self.workdir / "tensorboard"))
        except OSError as error:
            logger.warning("TensorBoard's scalars are not written: %s", describe(error))
        if wandb_project is not None:
            self.sinks.append(_Wandb(wandb_project, self.workdir))

    def _write(self, write: Callable[[Sink], None]) -> None:
        """Call `write` with every sink. After an `OSError`, warn and remove the sink."""
        for sink in list(self.sinks):
            try:
                write(sink)
            except OSError as error:
                logger.warning("%s: %s's scalars are no longer written: %s", self.workdir, sink.name, describe(error))
                self.sinks.remove(sink)
                self._close(sink)

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except OSError as error:  # such as a full disk: lost scalars must not end a run
            logger.warning("%s: %s's last scalars are not written: %s", self.workdir, sink.name, describe(error))


def require_wandb(project: str | None) -> None:
    """Raise `InputError` if the package of `train.wandb` is not installed."""
    if project is not None:
        require_package("wandb", "wandb", "train.wandb", project)


class _Wandb:
    """Run in Weights & Biases. The workdir's path gives its id, so that a resumed run continues it."""

    name = "Weights & Biases"

    def __init__(self, project: str, workdir: AnyPath):
        self.project, self.workdir = project, workdir
        self.run: Any = None

    def start(self, first_step: int, config: dict[str, Any]) -> None:
        """See `Sink`."""
        import wandb  # pyright: ignore[reportMissingImports]  # an optional package

        place = str(absolute(self.workdir))
        try:
            self.run = wandb.init(
                project=self.project,
                name=self.workdir.name,
                id=hashlib.sha256(place.encode()).hexdigest()[:16],
                resume="allow",
                config=config | {"workdir": place},
            )
        except wandb.Error as error:  # such as a missing key
            raise OSError(str(error)) from error

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """See `Sink`."""
        self.run.log(values, step=step)

    def close(self) -> None:
        """See `Sink`."""
        if self.run is not None:
            self.run.finish()


def _tensorboard() -> tuple[Callable[[str, str], Any], Any]:
    """Import tensorboardX without PyTorch; return its class that writes events and its class of an event.

    tensorboardX imports PyTorch if it is installed, which takes seconds and is not needed here.
    """
    is_imported = "torch" in sys.modules
    if not is_imported:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # importing it now raises ImportError
    try:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        if not is_imported:
            del sys.modules["torch"]
    return EventsWriter, Event


class _Events:
    """TensorBoard's event files, in a directory of the workdir.

    Objects in a bucket cannot be appended to. There, the events of each minute are a separate file, and TensorBoard
    reads the files one after the other.
    """

    name = "TensorBoard"

    def __init__(self, directory: AnyPath):
        """Open the first file. The caller calls `close`.

        Raises:
            OSError: the file cannot be written to.
        """
        self.writer_of, self.event = _tensorboard()
        self.directory, self.num_files = directory, 0
        self.staging = tempfile.TemporaryDirectory() if is_remote(directory) else None
        if not is_remote(directory):
            directory.mkdir(exist_ok=True)
        self._open()

    def _open(self) -> None:
        # Not SummaryWriter: its thread dies when the disk is full, and the run then waits for the thread forever.
        prefix = str(self.directory / "events") if self.staging is None else f"{self.staging.name}/events"
        self.writer, self.opened_at = self.writer_of(prefix, f".{self.num_files}"), time.monotonic()
        self.num_files += 1

    def start(self, first_step: int, config: dict[str, Any]) -> None:
        """See `Sink`. TensorBoard discards earlier events from this step on, because these steps are repeated."""
        self.write(step=first_step, session_log={"status": _SESSION_START})
        code = "".join(f"    {line}\n" for line in json.dumps(config, indent=1).splitlines())  # a Markdown code block
        text = {"dtype": "DT_STRING", "string_val": [code.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
        described = {"plugin_data": {"plugin_name": "text"}}
        self.write(
            step=first_step, summary={"value": [{"tag": "config/text_summary", "metadata": described, "tensor": text}]}
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """See `Sink`."""
        self.write(step=step, summary={"value": [{"tag": tag, "simple_value": x} for tag, x in values.items()]})

    def write(self, **fields: Any) -> None:
        """Append an event with these fields; raise `OSError` if it cannot be written."""
        self.writer.write_event(self.event(wall_time=time.time(), **fields))
        self.writer.flush()
        if self.staging is not None and time.monotonic() - self.opened_at > _UPLOAD_SECONDS:
            self._upload()
            self._open()

    def _upload(self) -> None:
        assert self.staging is not None
        self.writer.close()
        for file in Path(self.staging.name).iterdir():
            write_atomically(self.directory / file.name, file.read_bytes())
            file.unlink()

    def close(self) -> None:
        """See `Sink`."""
        if self.staging is None:
            self.writer.close()
        else:
            with self.staging:
                self._upload()


def read_scalars(workdir: Path) -> dict[str, dict[int, float]]:
    """Return the scalars of a run's TensorBoard files by tag and step; for a repeated step, the newest.

    A record is its length (8 bytes), a checksum (4), an event, and a checksum (4). A kill can cut the last record.

    Raises:
        OSError: a file cannot be read.
    """
    _, event_of = _tensorboard()
    files = []
    for file in (workdir / "tensorboard").glob("*tfevents*"):
        content, at, events = file.read_bytes(), 0, []
        while (end := at + 16 + int.from_bytes(content[at : at + 8], "little")) <= len(content):
            events.append(event_of.FromString(content[at + 12 : end - 4]))
            at = end
        files.append(events)
    found: dict[str, dict[int, float]] = {}
    for event in sorted(itertools.chain(*files), key=lambda event: event.wall_time):
        if event.session_log.status == _SESSION_START:
            found = {tag: {step: x for step, x in of.items() if step < event.step} for tag, of in found.items()}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def _append(file: AnyPath, line: str) -> None:
    """Append a line to a file; in a bucket, rewrite the file with the line."""
    if not is_remote(file):
        with file.open("a") as opened:
            opened.write(line)
        return
    content = b""
    with contextlib.suppress(FileNotFoundError):
        content = read_bytes(file)
    write_atomically(file, content + line.encode())


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of `skipped.jsonl`, or None if it is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None
