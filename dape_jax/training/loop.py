"""Training loop. In: a config and a run directory. Out: checkpoints. Next: `evaluation/perplexity.py`."""

import logging
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Wrapped

from dape_jax.config import RunConfig, TaskRunConfig, differences, follow_saved, read_run, resolved
from dape_jax.data.conventions import save_conventions
from dape_jax.data.store import follow_corpus
from dape_jax.data.tokenizers import save_tokenizer
from dape_jax.distributed import PreemptionGuard, SharedTimer, process_zero_only, require_same, wait_for_all
from dape_jax.errors import require, require_package
from dape_jax.files import name_errors
from dape_jax.model.transformer import Params, attention_of, model_structure, parameter_counts
from dape_jax.provenance import describe, package_versions, provenance, record_start
from dape_jax.sharding import make_mesh, put_batch
from dape_jax.storage import AppendedFiles, is_remote
from dape_jax.tasks.tapes import Batch
from dape_jax.training import checkpoint
from dape_jax.training.changes import allowed_changes, refuse
from dape_jax.training.metrics import MetricLogger
from dape_jax.training.source import open_source
from dape_jax.training.step import Training, TrainState, abstract_state, init_state, make_sums_step, make_train_step
from dape_jax.training.watch import Trace, train_log, watchdog
from dape_jax.training.weights import Start, find_start, read_start

logger = logging.getLogger(__name__)


def train(spec: dict[str, Any], workdir: epath.PathLike, verify: bool = False, change: tuple[str, ...] = ()) -> None:
    """Train the model described by `spec`: start, resume or return, depending on `workdir`.

    With `verify`, the corpus is read and compared with its digest, even if it is unchanged since that was last done.

    `workdir` contains:

    1. No config: start a new run, with random parameters or those of the run named by `init.source`.
    2. The same config and a checkpoint: resume bit-exactly from the newest intact checkpoint. Damaged checkpoints are
       moved to `damaged/` with a warning; if all are damaged, refuse.
    3. The same config and no checkpoint: the run ended before its first checkpoint. Start again, as in 1.
    4. Another config: refuse with the differences, unless `changes.allowed_changes` accepts them, as it does those of
       the fields in `change`.
    5. An imported model: refuse.
    6. A checkpoint of the last step: return.

    Raises:
        InputError: bad input, or a checkpoint that cannot be read or written.
        NonFiniteError: more than `train.max_bad_steps` consecutive steps are not finite, or a validation loss is not;
            earlier checkpoints are kept.
        StoppedError: SIGTERM or SIGUSR1; the state is saved.
    """
    with name_errors(workdir), AppendedFiles(workdir) as files, train_log(files) as open_log:
        _train(spec, files, verify, change, open_log)


def _train(
    spec: dict[str, Any], files: AppendedFiles, verify: bool, change: tuple[str, ...], open_log: Callable[[], None]
) -> None:
    # ---- check the config
    workdir = files.workdir
    checkpoint.require_writable_path(workdir)
    saved = checkpoint.read_config(workdir)
    run = read_run(follow_saved(follow_corpus(spec), saved))
    for path in run.data.weights if isinstance(run, RunConfig) else ():  # the next start would read the workdir as text
        is_inside = Path(workdir).resolve().is_relative_to(Path(path).expanduser().resolve())
        allowed = f"must not be in the text {path!r}; give another directory, or a glob as the text"
        require(is_remote(workdir) or not is_inside, "workdir", str(workdir), allowed)
    mesh = make_mesh(run.mesh)
    run.check_mesh(mesh)
    if run.train.wandb is not None:
        require_package("wandb", "wandb", "train.wandb", run.train.wandb)
    record: dict[str, Any] = {"config": resolved(run)}
    require_same(workdir=str(workdir), config=record["config"], versions=package_versions())
    step_names, changes = checkpoint.step_names(workdir), []
    if saved is not None:
        allowed = "holds an imported model, which is not trained in place; name it in init.source of another run"
        require("imported" not in saved, "workdir", str(workdir), allowed)
        done = int(step_names[0]) if step_names else 0
        changes = allowed_changes(workdir, read_run(saved["config"]), run, done, change)
        record |= {name: saved[name] for name in ("init", "changes") if name in saved}
        if changes:
            earlier = saved["changes"] if "changes" in saved else []
            record["changes"] = [*earlier, {"step": done, "fields": changes}]
    # Build and trace the model, so that the checks of its bias and processor run before any file is written.
    device, row_parts = mesh.devices.flat[0], mesh.shape["context"] * mesh.shape["tensor"]
    is_packed = isinstance(run, RunConfig) and run.data.packing == "documents"
    place = device.platform, device.device_kind, row_parts, is_packed
    attention = type(attention_of(run.model, run.train.train_length, *place)).__name__.lower()
    facts = provenance("jaxlib", "flax") | {"platform": device.platform, "num_processes": jax.process_count()}
    facts |= {"dtype": run.model.dtype, "attention": attention}
    graphdef, abstract = model_structure(run.model)
    tokens = jnp.zeros((1, 1), jnp.int32)
    segment_ids = tokens if is_packed else None
    jax.eval_shape(lambda params: nnx.merge(graphdef, params).features(tokens, segment_ids=segment_ids), abstract)

    # ---- data
    found = None if step_names or run.init.source is None else find_start(run)
    source = open_source(run, mesh, verify)
    record["data_digest"] = source.digest
    require_same(data_digest=source.digest, saved_steps=step_names)
    if saved is not None:
        recipe = shlex.quote(f"configs/continued.py:source={workdir}")
        advice = f"The data are others or have changed; --config={recipe} trains on them"
        refuse(workdir, differences({"data_digest": saved["data_digest"]}, {"data_digest": source.digest}), advice)

    # ---- model and optimizer
    training = Training.of(run, mesh)
    planned = abstract_state(training)
    given = Start({})
    if found is not None:
        given, record["init"] = read_start(run, found, source, planned, mesh)
    train_step = make_train_step(training)
    validate = make_validation(run, source.validation, mesh)
    counts = parameter_counts(abstract)
    logger.info(
        "%s parameters, %s of them in position biases and %s in processors",
        *(f"{counts[name]:,}" for name in ("total", "bias", "processor")),
    )
    logger.info("device: %s", describe(facts))
    logger.info("mesh: %s", " ".join(f"{axis}={size}" for axis, size in mesh.shape.items()))
    if training.train_only:
        logger.info("only parameters of these kinds are trained: %s", ", ".join(training.train_only))

    def begin() -> None:
        allowed = "another run wrote to it during start-up"
        require(checkpoint.read_config(workdir) == saved, "workdir", str(workdir), allowed)
        if source.tokenizer is not None:
            save_tokenizer(source.tokenizer, workdir)  # before the config, so that a run with a config has a tokenizer
        save_conventions(given.conventions, workdir)
        # A run with a checkpoint keeps its config, also if it resumes with other resumable fields.
        checkpoint.write_config(workdir, saved if saved is not None and step_names and not changes else record)
        open_log()

    with jax.set_mesh(mesh), checkpoint.run_lock(workdir) as refresh_lock:
        # ---- start or resume
        process_zero_only(begin)
        if resumed := checkpoint.restore_newest(workdir, planned):
            start, state, data_state = resumed
            logger.info("resuming from step %d of %d", start, run.train.num_steps)
            source.batches.set_state(data_state)
        else:
            assert run.init.source is None or given.params, "the checkpoints were deleted during start-up"
            start, state = 0, init_state(training, *given[:2])
            if given.data is not None:
                source.batches.set_state(given.data)
        if start == run.train.num_steps:
            log_end(workdir, start)
            return
        process_zero_only(lambda: record_start(workdir, start, facts))

        # ---- steps
        with (
            PreemptionGuard() as preemption,
            checkpoint.Checkpoints(workdir, run.train.max_to_keep) as manager,
            MetricLogger(files, run, start) as metric_logger,
            Trace(files, run.train.profile_steps) as trace,
            watchdog() as note_step,
        ):
            if preemption.should_stop(start):
                raise preemption.stopped(f"before step {start + 1}")
            timer = SharedTimer(run.train.checkpoint_seconds, start)
            for step in range(start + 1, run.train.num_steps + 1):
                batch = next(source.batches)
                tokens = (batch["positions"][0] >= 0).sum() if "positions" in batch else batch["inputs"].shape[1]
                batch = put_batch(batch, mesh)
                if step == start + 1:
                    compile_step(train_step, state, batch)
                    metric_logger.restart_clock()
                trace.begin(step)
                state, metrics = train_step(state, batch)
                trace.end(step, metrics)
                metric_logger.log(step, metrics, int(tokens) * run.train.batch_size)
                note_step()  # the metrics of the step before were fetched
                last, stop = step == run.train.num_steps, preemption.should_stop(step)
                is_due = timer.is_due(step) or step % run.train.checkpoint_interval == 0
                refresh_lock()
                validation_nats = None
                if last or step % run.train.eval_interval == 0:
                    metric_logger.flush()
                    validation = validate(state.params)
                    validation_nats = validation["loss_nats"]
                    metric_logger.log_validation(step, validation)
                if last or stop or is_due:
                    metric_logger.flush()
                    files.upload()
                    jsons = {"data": source.batches.get_state(), "config": record}
                    checkpoint.save(manager, step, state._asdict(), jsons, validation_nats)
                    metric_logger.restart_clock()
                if stop and not last:
                    manager.wait_until_finished()
                    raise preemption.stopped(f"after step {step}, saved")
    log_end(workdir, run.train.num_steps)


def compile_step(step: Wrapped, state: TrainState, batch: dict[str, jax.Array]) -> None:
    """Compile the training step on all processes before the first of them calls it.

    A process may compile for longer than the others wait in the step's collectives, if they found their programs in
    the compilation cache.
    """
    logger.info("compiling the training step ...")
    started_at = time.monotonic()
    step.lower(state, batch).compile()  # jit keeps the program for its calls
    logger.info("compiled the training step in %.1f s", time.monotonic() - started_at)
    wait_for_all("compiling the training step")


def log_end(workdir: epath.Path, num_steps: int) -> None:
    """Log the directory of a finished run and the command that evaluates it."""
    directory = shlex.quote(str(workdir))
    listed = shlex.quote(f'"{workdir}"') if "," in str(workdir) else directory  # the flag is a list
    logger.info("training of %s is complete: step %d of %d", directory, num_steps, num_steps)
    program = "python eval.py" if Path(sys.argv[0]).name == "train.py" else "dape-eval"
    logger.info("evaluate it: %s --workdir=%s", program, listed)


def make_validation(
    run: RunConfig | TaskRunConfig, validation: dict[str, list[Batch]], mesh: Mesh
) -> Callable[[Params], dict[str, float]]:
    """Return `validate(params)`, which computes the mean validation loss in nats, and for a task also the accuracy.

    Of several texts, it returns the loss of each and their mean with the weights of the mixture.
    """
    step = make_sums_step(model_structure(run.model)[0])

    def validate(params: Params) -> dict[str, float]:
        found = {}
        for name, batches in validation.items():
            sums = jax.device_get([step(params, put_batch(batch, mesh)) for batch in batches])
            found[name] = np.sum(sums, axis=0, dtype=np.float64)
        losses = {name: float(nats / weight) for name, (nats, weight, *_) in found.items()}
        if isinstance(run, TaskRunConfig):
            ((_, _, num_correct, num_answers),) = found.values()
            return {"loss_nats": losses[run.data.task], "accuracy": float(num_correct / num_answers)}
        if len(losses) == 1:
            return {"loss_nats": next(iter(losses.values()))}
        weights = run.data.weights
        mean = sum(weights[path] * loss for path, loss in losses.items()) / sum(weights[path] for path in losses)
        return {"loss_nats": mean} | {f"loss_nats/{path}": loss for path, loss in losses.items()}

    return validate
