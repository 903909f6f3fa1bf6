"""Metrics of a training run. In: device scalars of each step. Out: progress, `metrics.jsonl`, sinks. Next: `loop.py`.

`metrics.jsonl` in the workdir is the record of a run. It has a line for each step and one for each validation:

    {"step": 2, "train/loss_nats": 5.5, "train/gradient_norm": 1.2, "train/learning_rate": 0.001, ...}
    {"step": 2, "validation/loss_nats": 5.4, "validation/perplexity": 221.4}

Numbers that are not finite are strings ("nan", "inf"), because JSON has neither. The line of a skipped step has a
`reason`: "bad" or "overflow". Lines are written at once, in a bucket before each checkpoint. A run that resumes removes
the lines of the steps that it repeats. TensorBoard (with the extra `tensorboard`) and Weights & Biases receive the same
numbers.
"""

import contextlib
import importlib.util
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from dape_jax.config import RunConfig, TaskRunConfig, resolved
from dape_jax.errors import InputError, NonFiniteError, install_command
from dape_jax.evaluation.statistics import perplexity_of
from dape_jax.files import write_atomically
from dape_jax.hardware import mfu
from dape_jax.model.flops import model_flops_per_token
from dape_jax.progress import Progress
from dape_jax.provenance import run_id
from dape_jax.storage import AppendedFiles, absolute
from dape_jax.training.optimizer import make_schedule

METRICS_FILE = "metrics.jsonl"

logger = logging.getLogger(__name__)

Sink = Callable[[int, dict[str, float]], object]  # receives a step and its scalars, such as {"train/loss_nats": 5.5}


class MetricLogger(contextlib.ExitStack):
    """Progress, `metrics.jsonl` and sinks, one step behind the device. Only process 0 writes.

    Rates in lines of progress are means over the steps since the last line; the record has those of each step.
    The metrics of a step are fetched after the next step is dispatched, so that the device never waits for the host.
    """

    def __init__(self, files: AppendedFiles, run: RunConfig | TaskRunConfig, start: int):
        """Open the files of a run that starts after step `start`."""
        super().__init__()
        # Computed here for all steps: a device computation between steps would wait for the running step.
        schedule = make_schedule(run.optimizer, run.train.num_steps)
        self.learning_rates = np.asarray(schedule(jnp.arange(run.train.num_steps)))
        num_warmup, rates = run.optimizer.num_warmup_steps(run.train.num_steps), self.learning_rates
        logger.info("learning rate: %g after %d steps of warm-up, at the end %g", rates.max(), num_warmup, rates[-1])
        self.max_bad_steps, self.has_perplexity = run.train.max_bad_steps, isinstance(run, RunConfig)
        # MFU at one token per second. None: the formula assumes one length, but a task's lengths vary, and counts the
        # gradients of all parameters, but frozen parameters have none.
        self.unit_mfu: float | None = None
        if isinstance(run, RunConfig) and run.init.train_only is None:
            flops = model_flops_per_token(run.model, run.train.train_length, run.train.batch_size)
            self.unit_mfu = mfu(flops, jax.devices()[0].device_kind, jax.device_count())
        self.sinks: list[Sink] = []
        self.is_first = jax.process_index() == 0
        if self.is_first:
            if run.train.wandb is not None:
                self.sinks.append(self.enter_context(_wandb(run, files.workdir)))
            if importlib.util.find_spec("tensorboardX") is None:
                logger.info("TensorBoard: no events are written; %s", install_command("tensorboard"))
            else:
                self.sinks.append(self.enter_context(_tensorboard(files.local / "tensorboard", start)))
            # Later steps are repeated, and a kill may have cut the last line.
            file = files.earlier(METRICS_FILE)
            kept = [f"{json.dumps(line)}\n" for line in _lines(file) if line["step"] <= start]
            write_atomically(file, "".join(kept).encode())
            self.record = self.enter_context(file.open("a"))
        bar = Progress(
            total=run.train.num_steps,
            initial=start,
            unit="step",
            desc=files.workdir.name,
            mininterval=1.0,
            disable=not self.is_first,
        )
        self.bar = self.enter_context(bar)
        self.train_text, self.validation_text = "", ""
        self.pending: tuple[int, dict[str, jax.Array], int] | None = None
        self.fetched_at, self.tokens, self.seconds = time.monotonic(), 0, 0.0  # since the last line of progress

    def log(self, step: int, metrics: dict[str, jax.Array], tokens: int) -> None:
        """Accept the metrics of a step on `tokens` tokens, and report the previous step; see `flush`."""
        self.flush()
        self.pending = (step, metrics, tokens)

    def flush(self) -> None:
        """Fetch and report the pending metrics, if any. Call it before a checkpoint.

        Raises:
            NonFiniteError: more than `max_bad_steps` consecutive steps were not finite; no such state is saved.
        """
        if self.pending is None:
            return
        step, metrics, tokens = self.pending
        self.pending = None
        values = {name: float(value) for name, value in metrics.items()}
        num_applied, applied = int(values.pop("num_applied")), bool(values.pop("applied"))
        is_bad, bad_in_a_row = bool(values.pop("bad")), int(values.pop("bad_in_a_row"))
        now = time.monotonic()
        step_seconds, self.fetched_at = now - self.fetched_at, now
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + step_seconds
        # Skipped steps do not advance the schedule.
        values["learning_rate"] = float(self.learning_rates[max(num_applied - 1, 0)])
        values |= {"tokens_per_second": tokens / step_seconds, "step_seconds": step_seconds}
        rate = self.tokens / self.seconds
        self.train_text = f"loss {values['loss_nats']:.3f}, {rate:,.0f} tokens/s"
        if self.unit_mfu is not None:
            values["mfu"] = self.unit_mfu * tokens / step_seconds
            self.train_text += f", MFU {self.unit_mfu * rate:.1%}"
        reason = None if applied else "bad" if is_bad else "overflow"
        self._write("train", step, values, {} if reason is None else {"reason": reason})
        if reason is not None:
            numbers = ", ".join(f"{name} = {values[name]:.6g}" for name in ("loss_nats", "gradient_norm"))
            if bad_in_a_row > self.max_bad_steps:
                skipped = f"; bad steps skipped before it: {bad_in_a_row - 1}" if bad_in_a_row > 1 else ""
                limit = f"train.max_bad_steps = {self.max_bad_steps}; earlier checkpoints are kept"
                raise NonFiniteError(f"step {step}: {numbers}{skipped}; {limit}")
            if self.is_first:
                logger.warning("step %d: skipped (%s): %s", step, reason, numbers)
        self.bar.set_postfix_str(self.train_text + self.validation_text, refresh=False)
        if self.bar.update():
            self.tokens, self.seconds = 0, 0.0

    def log_validation(self, step: int, validation: dict[str, float]) -> None:
        """Report the results of a validation.

        Raises:
            NonFiniteError: its loss is not finite.
        """
        loss = validation["loss_nats"]
        self._write("validation", step, validation)
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {step}: validation_nats = {loss}; earlier checkpoints are kept")
        self.validation_text = f", validation {loss:.3f}"
        if "accuracy" in validation:
            self.validation_text += f", accuracy {validation['accuracy']:.1%}"
        self.bar.set_postfix_str(self.train_text + self.validation_text, refresh=self.bar.is_terminal)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave the time since the newest report out of rates and remaining time: a compilation, validation or save."""
        now = time.monotonic()
        if self.is_first:
            self.bar.last_print_t += now - self.fetched_at
        self.fetched_at = now

    def _write(self, group: str, step: int, values: dict[str, float], more: dict[str, str] | None = None) -> None:
        if not self.is_first:
            return
        if self.has_perplexity:
            values = values | {"perplexity": perplexity_of(values["loss_nats"])}
        named = {f"{group}/{name}": value for name, value in values.items()}
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in named.items()}
        self.record.write(json.dumps({"step": step} | numbers | (more or {})) + "\n")
        self.record.flush()
        for sink in self.sinks:
            sink(step, named)


def _lines(file: epath.Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of `metrics.jsonl`, except one that a kill has cut; none if the file is missing."""
    with contextlib.suppress(FileNotFoundError):
        for content in file.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(content)


def read_metrics(workdir: epath.PathLike) -> dict[str, dict[int, float]]:
    """Return the scalars of a run by name and step, from `metrics.jsonl`; {} for a run of an older version without it.

    {"train/loss_nats": {1: 5.5, 2: 5.4}, "validation/loss_nats": {2: 5.3}, ...}
    """
    found: dict[str, dict[int, float]] = {}
    for line in _lines(epath.Path(workdir) / METRICS_FILE):
        for name, value in line.items():
            if "/" in name:
                found.setdefault(name, {})[line["step"]] = float(value)
    return found


# ---- sinks


@contextlib.contextmanager
def _tensorboard(directory: epath.Path, start: int) -> Iterator[Sink]:
    """Write scalars to TensorBoard's event files.

    tensorboardX's SummaryWriter is not used: when the disk is full, its thread ends, and the run waits for it forever.
    """
    is_hidden = sys.modules.setdefault("torch", None) is None  # pyright: ignore[reportArgumentType]
    try:  # tensorboardX would import PyTorch if it is installed, which takes seconds
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        if is_hidden:
            del sys.modules["torch"]

    def write(step: int, **fields: Any) -> None:
        writer.write_event(Event(wall_time=time.time(), step=step, **fields))
        writer.flush()

    directory.mkdir(exist_ok=True)
    writer = EventsWriter(str(directory / "events"), "")
    write(start + 1, session_log={"status": 1})  # START: TensorBoard discards earlier events from this step on
    try:
        yield lambda step, values: write(
            step, summary={"value": [{"tag": tag, "simple_value": value} for tag, value in values.items()]}
        )
    finally:
        writer.close()


@contextlib.contextmanager
def _wandb(run: RunConfig | TaskRunConfig, workdir: epath.Path) -> Iterator[Sink]:
    """Log scalars to Weights & Biases, under the run's id, so that a resumed run continues it."""
    import wandb  # pyright: ignore[reportMissingImports]  # an optional package

    train = run.train
    try:
        logged = wandb.init(
            project=train.wandb,
            entity=train.wandb_entity,
            group=train.wandb_group,
            tags=train.wandb_tags and train.wandb_tags.split(","),
            name=workdir.name,
            id=run_id(workdir),
            resume="allow",
            config=resolved(run) | {"workdir": str(absolute(workdir))},
        )
    except (wandb.Error, ValueError) as error:  # such as a missing key, or a tag that is too long
        raise InputError(f"train.wandb = {train.wandb!r}: {' '.join(str(error).split())}") from error
    try:
        yield lambda step, values: logged.log(values, step=step)
    finally:
        logged.finish()
