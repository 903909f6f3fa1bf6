"""The training loop: config and workdir in, checkpoints out. Next: `evaluation/perplexity.py`."""

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tqdm import tqdm

from dape_jax.config import RESUMABLE_FIELDS, RunConfig, TaskRunConfig, differences, read_run, resolved
from dape_jax.data.tokenizers import Tokenizer, save_tokenizer
from dape_jax.distributed import PreemptionGuard, process_zero_first, require_same
from dape_jax.errors import InputError, NonFiniteError, StoppedError, require
from dape_jax.hardware import mfu
from dape_jax.model.transformer import Params, attention_of, model_structure, parameter_counts
from dape_jax.planning.flops import model_flops_per_token
from dape_jax.sharding import make_mesh, put_batch
from dape_jax.tasks.tapes import Batch
from dape_jax.training import checkpoint
from dape_jax.training.optimizer import make_optimizer, make_schedule
from dape_jax.training.source import open_source
from dape_jax.training.step import (
    abstract_state,
    init_state,
    make_nll_step,
    make_sums_step,
    make_train_step,
    shardings_of,
)

logger = logging.getLogger(__name__)

SKIPPED_FILE = "skipped.jsonl"


def train(spec: dict[str, Any], workdir: Path) -> None:
    """Train what a config describes; start, go on, or do nothing, by what the workdir holds.

    1. No config there: a new run.
    2. The same config and a checkpoint: go on from the newest, exactly (parameters, optimizer, data position). One that
       is damaged is moved aside, with a warning; where none is whole, refuse.
    3. The same config and no checkpoint: the run died before its first; start again.
    4. Another config: refuse and show the difference. Nothing is overwritten. (Mesh, accumulation and the like, `HOW`,
       may be another: the same run goes on, computed in another way.)
    5. A checkpoint of the last step: done.

    Args:
        spec: the nested dict of a config file.
        workdir: where config, checkpoints and TensorBoard scalars go.

    Raises:
        InputError: bad input, before any device work.
        NonFiniteError: the loss is not finite; the checkpoints before it are kept.
    """
    # ---- what is asked for, checked
    run = read_run(spec)
    mesh = make_mesh(run.mesh)
    run.check_mesh(mesh)
    device, row_parts = mesh.devices.flat[0], mesh.shape["context"] * mesh.shape["tensor"]
    attention_of(run.model, run.train.train_length, device.platform, device.device_kind, row_parts)
    config = resolved(run)
    require_same("workdir and config", json.dumps([str(workdir), config]))
    saved = checkpoint.read_config(workdir)
    if saved is not None:
        refuse_other_config(workdir, saved["config"], config)

    # What a method refuses is refused here, before anything is written: to be made, or to be called.
    graphdef, abstract = model_structure(run.model)
    jax.eval_shape(lambda params: nnx.merge(graphdef, params).features(jnp.zeros((1, 1), jnp.int32)), abstract)

    # ---- data
    source = open_source(run, mesh)
    record = {"config": config, "data_digest": source.digest}

    # ---- model and optimizer
    optimizer = make_optimizer(run.optimizer, run.train.num_steps)
    planned = abstract_state(run.model, optimizer, mesh)
    train_step = make_train_step(
        graphdef,
        optimizer,
        shardings_of(planned),
        accumulation_steps=run.train.accumulation_steps,
        logits_chunk_tokens=run.train.logits_chunk_tokens,
        spike_nats=run.train.spike_nats,
        seed=run.train.seed,
    )
    validate = make_validation(run, graphdef, source.validation, mesh)
    logger.info(
        "{total:,} parameters, {bias:,} of them in position biases and {processor:,} in score convolutions; %s".format(
            **parameter_counts(abstract)
        ),
        mesh,
    )

    with jax.set_mesh(mesh), checkpoint.sole_run(workdir):
        # ---- start, or go on where the newest whole checkpoint stands
        process_zero_first(lambda: write_or_compare(workdir, record, source.tokenizer))
        if resumed := checkpoint.restore_newest(workdir, planned):
            start, state, data_state = resumed
            source.batches.set_state(data_state)
        else:
            start, state = 0, init_state(run.model, optimizer, run.train.seed, mesh)
        if start == run.train.num_steps:
            logger.info("%s is trained: step %d of %d", workdir, start, run.train.num_steps)
            return
        preemption = PreemptionGuard()
        if preemption.should_stop(start):
            raise StoppedError(f"stopped by SIGTERM before step {start + 1}; the same command goes on")
        checkpoint.require_space(workdir, planned)

        # ---- steps
        with (
            checkpoint.open_checkpoints(workdir, run.train.max_to_keep) as manager,
            Scalars(workdir, run, start) as scalars,
        ):
            for step in range(start + 1, run.train.num_steps + 1):
                batch = next(source.batches)
                state, metrics = train_step(state, put_batch(batch, mesh))
                scalars.add(step, metrics, num_tokens(batch) * run.train.batch_size)
                last, stop = step == run.train.num_steps, preemption.should_stop(step)
                validation_nats = None
                if last or step % run.train.eval_interval == 0:
                    scalars.flush()
                    validation = validate(state.params)
                    validation_nats = validation["loss_nats"]
                    scalars.add_validation(step, validation)
                if last or stop or step % run.train.checkpoint_interval == 0:
                    scalars.flush()  # no state is saved whose loss has not been looked at
                    checkpoint.save(manager, step, state, source.batches.get_state(), record, validation_nats)
                if stop and not last:
                    manager.wait_until_finished()
                    raise StoppedError(f"stopped by SIGTERM after step {step}, saved; the same command goes on")


def write_or_compare(workdir: Path, record: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    """Make a workdir that of a run, or see that it is."""
    saved = checkpoint.read_config(workdir)
    if saved is None:
        require(
            not checkpoint.has_steps(workdir),
            "workdir",
            str(workdir),
            f"has checkpoints, and no {checkpoint.CONFIG_FILE} that says what they are of; put it back (each of "
            "them has a copy, config/metadata), or take another",
        )
        if tokenizer is not None:
            save_tokenizer(tokenizer, workdir)  # first: a run that has its config has its tokenizer
        checkpoint.write_config(workdir, record)
    else:
        refuse_other_config(workdir, saved["config"], record["config"])
        refuse_other_config(workdir, {"data_digest": saved["data_digest"]}, {"data_digest": record["data_digest"]})


def refuse_other_config(workdir: Path, saved: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise `InputError` with every difference between the run that the workdir holds and the one asked for.

    What only decides how a run is computed (`config.HOW`) may differ.
    """
    if lines := differences(saved, new, but=RESUMABLE_FIELDS):
        raise InputError(
            f"workdir = {str(workdir)!r}: holds a run with another config; take another workdir, or the config it was "
            "started with. " + "; ".join(lines)
        )


def num_tokens(batch: Batch) -> int:
    """Of one of a batch's sequences, padding not counted."""
    return int((batch["positions"][0] >= 0).sum()) if "positions" in batch else batch["inputs"].shape[1]


def make_validation(
    run: RunConfig | TaskRunConfig, graphdef: nnx.GraphDef, validation: list[Batch], mesh: Mesh
) -> Callable[[Params], dict[str, float]]:
    """Make `validate(params)`: the mean loss of the held-out batches, in nats, and of a task the accuracy."""

    def of_corpus(params: Params) -> dict[str, float]:
        nlls = [nll_step(params, put_batch(batch, mesh)) for batch in validation]
        return {"loss_nats": float(sum(float(nll.sum()) for nll in nlls) / sum(nll.size for nll in nlls))}

    def of_task(params: Params) -> dict[str, float]:
        sums = [sums_step(params, put_batch(batch, mesh)) for batch in validation]
        nats, weight, right, counted = np.sum(jax.device_get(sums), axis=0)
        return {"loss_nats": float(nats / weight), "accuracy": float(right / counted)}

    if isinstance(run, TaskRunConfig):
        sums_step = make_sums_step(graphdef)
        return of_task
    nll_step = make_nll_step(graphdef, run.train.train_length)
    return of_corpus


class Scalars:
    """Progress bar and TensorBoard, one step behind the device; of several processes, those of the first.

    A step's metrics are fetched when the next has been dispatched, so that fetching never leaves the device idle.
    """

    def __init__(self, workdir: Path, run: RunConfig | TaskRunConfig, start: int):
        # All at once, here: a computation on the device at every step would wait for the step that it runs.
        self.learning_rates = np.asarray(
            make_schedule(run.optimizer, run.train.num_steps)(jnp.arange(run.train.num_steps))
        )
        self.workdir, self.max_bad_steps = workdir, run.train.max_bad_steps
        # Those of a task's tapes differ from step to step.
        self.token_flops = (
            model_flops_per_token(run.model, run.train.train_length, run.train.batch_size)
            if isinstance(run, RunConfig)
            else None
        )
        self.is_first = jax.process_index() == 0
        # On resuming, what was recorded of steps that will be taken again is dropped.
        if (skipped := workdir / SKIPPED_FILE).exists() and self.is_first:
            whole = [
                line for line in skipped.read_text().splitlines() if line.endswith("}")
            ]  # a kill may tear the last
            partial = skipped.with_suffix(".tmp")
            partial.write_text("".join(f"{line}\n" for line in whole if json.loads(line)["step"] <= start))
            partial.replace(skipped)
        # Written event by event: SummaryWriter's thread, when it dies of a full disk, leaves the run waiting for ever.
        self.events: EventsWriter | None = None
        self.events_failed = False
        if self.is_first:
            (workdir / "tensorboard").mkdir(exist_ok=True)
            self.events = EventsWriter(str(workdir / "tensorboard" / "events"))
            self.write(Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)))
        self.bar = tqdm(
            total=run.train.num_steps,
            initial=start,
            unit="step",
            desc=workdir.name,
            mininterval=1.0,
            disable=not self.is_first,
        )
        self.pending: tuple[int, dict[str, jax.Array], int] | None = None
        self.fetched_at = time.monotonic()
        self.validation_text = ""

    def __enter__(self) -> "Scalars":
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()
        if self.events is not None:
            with contextlib.suppress(OSError):  # a full disk, which was said before
                self.events.close()

    def write(self, event: Event) -> None:
        """Append to TensorBoard's events; where that fails, training goes on without them, and says so once."""
        if self.events is None or self.events_failed:
            return
        event.wall_time = time.time()
        try:
            self.events.write_event(event)
            self.events.flush()
        except OSError as error:
            logger.warning("%s: TensorBoard's scalars are no longer written: %s", self.workdir, error)
            self.events_failed = True

    def write_scalars(self, step: int, values: dict[str, float]) -> None:
        """Write TensorBoard scalars by their names."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.write(Event(step=step, summary=Summary(value=scalars)))

    def add(self, step: int, metrics: dict[str, jax.Array], tokens: int) -> None:
        """Take a step's metrics and the number of its tokens, and report the step before it."""
        self.flush()
        self.pending = (step, metrics, tokens)

    def flush(self) -> None:
        """Fetch and report the metrics taken last.

        Raises:
            NonFiniteError: naming the step.
        """
        if self.pending is None:
            return
        step, metrics, tokens = self.pending
        self.pending = None
        values = {name: float(value) for name, value in metrics.items()}
        num_applied, applied = int(values.pop("num_applied")), bool(values.pop("applied"))
        is_bad, bad_in_a_row = bool(values.pop("bad")), int(values.pop("bad_in_a_row"))
        if not applied:
            self.add_skipped(step, values, is_bad, bad_in_a_row)
        now = time.monotonic()
        tokens_per_second = tokens / (now - self.fetched_at)
        self.fetched_at = now
        learning_rate = float(self.learning_rates[max(num_applied - 1, 0)])  # a skipped step does not move the schedule
        values |= {"learning_rate": learning_rate, "tokens_per_second": tokens_per_second}
        speed = f"{tokens_per_second:,.0f} tokens/s"
        share = None
        if self.token_flops is not None:
            share = mfu(tokens_per_second * self.token_flops, jax.devices()[0].device_kind, jax.device_count())
        if share is not None:
            values |= {"mfu": share}
            speed += f", MFU {share:.1%}"
        self.write_scalars(step, {f"train/{name}": value for name, value in values.items()})
        self.bar.set_postfix_str(f"loss {values['loss_nats']:.3f}, {speed}{self.validation_text}", refresh=False)
        self.bar.update()

    def add_skipped(self, step: int, values: dict[str, float], is_bad: bool, bad_in_a_row: int) -> None:
        """Record a step that was not applied, in the log, in TensorBoard and as a line of `skipped.jsonl`.

        Raises:
            NonFiniteError: it is one more bad step in a row than may be skipped.
        """
        what = ", ".join(f"{name} = {values[name]:.6g}" for name in ("loss_nats", "gradient_norm"))
        if bad_in_a_row > self.max_bad_steps:
            skipped = f" after {bad_in_a_row - 1} bad steps that were skipped" if bad_in_a_row > 1 else ""
            raise NonFiniteError(
                f"step {step}: {what}{skipped} (not finite, or a spike); train.max_bad_steps = {self.max_bad_steps}; "
                "checkpoints up to here are kept"
            )
        reason = "bad" if is_bad else "overflow"
        if not self.is_first:
            return
        logger.warning("step %d: skipped (%s): %s", step, reason, what)
        # As strings where JSON has no number.
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        try:
            with (self.workdir / SKIPPED_FILE).open("a") as file:
                file.write(json.dumps({"step": step, "reason": reason} | numbers) + "\n")
        except OSError as error:
            logger.warning("%s: cannot be written to: %s", self.workdir / SKIPPED_FILE, error)

    def add_validation(self, step: int, validation: dict[str, float]) -> None:
        """Report a validation."""
        loss = validation["loss_nats"]
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {step}: validation_nats = {loss}; checkpoints up to here are kept")
        self.write_scalars(step, {f"validation/{name}": value for name, value in validation.items()})
        self.validation_text = f", validation {loss:.3f}"
        if "accuracy" in validation:
            self.validation_text += f", accuracy {validation['accuracy']:.1%}"
        self.bar.set_postfix_str(self.bar.postfix.split(", validation")[0] + self.validation_text)
        self.fetched_at = time.monotonic()
