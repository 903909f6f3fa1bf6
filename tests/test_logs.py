"""Test the output of a training run: its log, TensorBoard's events, Weights & Biases and a trace."""

import io
import logging
import re
import struct
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import pytest
import tiny

from dape_jax import progress
from dape_jax.command_line import _PlainFormatter
from dape_jax.config import RunConfig
from dape_jax.errors import InputError, StoppedError
from dape_jax.evaluation.statistics import perplexity_of
from dape_jax.progress import Progress
from dape_jax.training import loop, metrics
from dape_jax.training.trace import StepTrace


def events_of(directory: Path) -> list:
    """Return the events in a directory: each is a length, its checksum, the event and its checksum."""
    _, event = metrics._tensorboard()
    events = []
    for file in sorted(directory.iterdir()):
        content = io.BytesIO(file.read_bytes())
        while head := content.read(12):
            (length,) = struct.unpack("<Q", head[:8])
            events.append(event.FromString(content.read(length)))
            content.read(4)
    return events


class FakeWandb(types.ModuleType):
    """Replace the names of wandb that are used, and record arguments. Without a key, `init` fails."""

    Error = RuntimeError

    def __init__(self, has_key: bool = True):
        self.has_key = has_key
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")  # pyright: ignore[reportAttributeAccessIssue]
        self.begun, self.logged, self.finished = {}, [], 0

    def init(self, **arguments):
        if not self.has_key:
            raise self.Error("api_key not configured")
        self.begun = arguments
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture(scope="module")
def told(trained_root, tmp_path_factory):
    """Train once with every destination; return the workdir, the lines of the log and the fake of wandb."""
    workdir, fake, stream = tmp_path_factory.mktemp("told") / "my run", FakeWandb(), io.StringIO()
    handler, package = logging.StreamHandler(stream), logging.getLogger("dape_jax")
    handler.setFormatter(_PlainFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", fake)
        patch.setattr(metrics, "mfu", lambda *_: 0.5)
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        spec = tiny.spec(trained_root, train__num_steps=4, train__wandb="extrapolation", train__profile_steps=(2, 3))
        try:
            loop.train(spec, workdir)
        finally:
            package.removeHandler(handler)
            package.setLevel(logging.NOTSET)
    return workdir, stream.getvalue().splitlines(), fake


def test_a_log_has_a_time_and_a_message_in_each_line(told):
    workdir, lines, _ = told
    assert all(line[2] == line[5] == ":" and line[8] == " " for line in lines)
    messages = [line[9:] for line in lines]
    assert "mesh: data=1 fsdp=8 context=1 tensor=1" in messages
    (text,) = [message for message in messages if message.startswith("text: ")]
    assert re.fullmatch(r"text: \d+ documents \([\d,]+ tokens\) to train on, \d+ \([\d,]+ tokens\) held out", text)
    assert not [message for message in messages if message.startswith("resuming")]
    begun = messages.index("compiling the training step ...")
    assert messages[begun + 1].startswith("compiled the training step in ")
    (last_progress,) = [message for message in messages if message.startswith("my run: ")]  # less than a minute
    assert last_progress.startswith("my run: 4 of 4 steps, ")
    assert "validation" in last_progress
    assert messages[-2:] == [
        f"training of '{workdir}' is complete: step 4 of 4",
        f"evaluate it: dape-eval --workdir='{workdir}'",
    ]


def test_a_resumed_run_names_its_step(trained_root, tmp_path, caplog):
    """Stop after step 2 of 4, and train again."""
    workdir, spec = tmp_path / "run", tiny.spec(trained_root, train__num_steps=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.PreemptionGuard, "should_stop", lambda guard, step: step == 2)
        with pytest.raises(StoppedError):
            loop.train(spec, workdir)
    with caplog.at_level(logging.INFO, logger="dape_jax"):
        loop.train(spec, workdir)
    assert "resuming from step 2 of 4" in caplog.messages


def test_a_warning_is_marked():
    formatter = _PlainFormatter("%(asctime)s %(message)s", "%H:%M:%S")
    record = logging.LogRecord("dape_jax", logging.WARNING, "loop.py", 1, "low on %s", ("space",), None)
    assert formatter.format(record)[8:] == " warning: low on space"


def test_progress_is_a_line_a_minute(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "dape_jax")
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    with Progress(total=1000, unit="step", desc="run") as bar:
        bar._time = lambda: clock[0]
        for _ in range(300):
            clock[0] += 0.5
            bar.update()
    lines = caplog.messages
    assert [line.partition(" of ")[0] for line in lines] == ["run: 120", "run: 240", "run: 300"]
    assert lines[0] == "run: 120 of 1000 steps, 01:00 elapsed, 07:20 left"
    assert progress.sys.stderr.getvalue() == ""  # pyright: ignore[reportAttributeAccessIssue]


def test_tensorboard_has_every_scalar_and_the_config(told):
    workdir, _, _ = told
    events = events_of(workdir / "tensorboard")
    scalars = {
        (value.tag, event.step): value.simple_value
        for event in events
        for value in event.summary.value
        if not value.HasField("tensor")
    }
    names = ("loss_nats", "perplexity", "tokens_per_second", "step_seconds", "mfu", "learning_rate", "gradient_norm")
    assert {(f"train/{name}", step) for name in names for step in range(1, 5)} <= set(scalars)
    assert {("validation/perplexity", 2), ("validation/perplexity", 4)} <= set(scalars)
    for (tag, step), value in scalars.items():
        if tag.endswith("/perplexity"):
            loss = scalars[tag.replace("perplexity", "loss_nats"), step]
            assert value == pytest.approx(perplexity_of(loss), rel=1e-5)
            assert value > 1
    read = metrics.read_scalars(workdir)
    assert {(tag, step): value for tag, values in read.items() for step, value in values.items()} == scalars
    (text,) = [value for event in events for value in event.summary.value if value.HasField("tensor")]
    assert (text.tag, text.metadata.plugin_data.plugin_name) == ("config/text_summary", "text")
    assert '"profile_steps"' in text.tensor.string_val[0].decode()


def test_scalars_of_repeated_steps_replace_earlier_ones(tmp_path):
    """Steps after a checkpoint are trained again after a kill, which also cuts the last event."""
    directory = tmp_path / "tensorboard"
    for first, last in ((1, 5), (3, 4)):
        events = metrics._Events(directory)
        events.start(first, {})
        for step in range(first, last + 1):
            events.scalars(step, {"loss": 10.0 * first + step})
        events.close()
        (file,) = directory.glob("events*")
        (directory / f"cut-tfevents-{first}").write_bytes(file.read_bytes()[:-3])
        file.unlink()
    assert metrics.read_scalars(tmp_path) == {"loss": {1: 11, 2: 12, 3: 33}}
    assert metrics.read_scalars(tmp_path / "none") == {}


def test_wandb_gets_the_same_scalars(told):
    workdir, _, fake = told
    assert (fake.begun["project"], fake.begun["name"], fake.begun["resume"]) == ("extrapolation", "my run", "allow")
    assert fake.begun["config"]["train"]["num_steps"] == 4
    assert fake.finished == 1
    by_step = {}
    for step, values in fake.logged:
        by_step.setdefault(step, {}).update(values)
    assert sorted(by_step) == [1, 2, 3, 4]
    tags = {value.tag for event in events_of(workdir / "tensorboard") for value in event.summary.value}
    assert {tag for values in by_step.values() for tag in values} == tags - {"config/text_summary"}


def test_a_missing_package_is_one_line(trained_root, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    spec = tiny.spec(trained_root, train__wandb="mine")
    with pytest.raises(InputError, match=r"train\.wandb = 'mine': needs the package wandb: pip install") as error:
        loop.train(spec, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_wandb_without_a_key_is_a_warning(trained_root, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(has_key=False))
    run = RunConfig.from_dict(tiny.spec(trained_root, train__wandb="mine"))
    with metrics.MetricLogger(tmp_path, run, 0) as metric_logger:
        assert [sink.name for sink in metric_logger.sinks] == ["TensorBoard"]
    assert "Weights & Biases's scalars are no longer written: api_key not configured" in caplog.text


def test_a_trace_that_ends_early_names_its_steps(tmp_path, monkeypatch, caplog):
    """Resume at step 3 of a trace of steps 2 to 9, and end after step 4."""
    monkeypatch.setattr("jax.profiler.start_trace", lambda directory: None)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: None)
    with caplog.at_level("INFO"), StepTrace(tmp_path, (2, 9)).of_run() as trace:
        for step in (3, 4):
            trace.before(step)
            trace.after(step, jnp.zeros(()))
    assert "trace of steps 3 to 4" in caplog.text


def test_a_trace_is_written(told):
    workdir, lines, _ = told
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    assert any(f"trace of steps 2 to 3: tensorboard --logdir={workdir}/profile" in line for line in lines)


@pytest.mark.parametrize("steps", [(3,), (3, 2), (0, 2), (1, 2, 3)])
def test_wrong_steps_of_a_trace_are_refused(tmp_path, steps):
    with pytest.raises(InputError, match=r"train\.profile_steps = .*must be empty, or the first and the last step"):
        RunConfig.from_dict(tiny.spec(tmp_path, train__profile_steps=steps))
