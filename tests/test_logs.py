"""Test the output of a training run: its log, `metrics.jsonl`, TensorBoard, Weights & Biases and a trace."""

import io
import json
import logging
import os
import re
import signal
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import pytest
import tiny
from etils import epath

from dape_jax import progress
from dape_jax.command_line import LOG_FORMATTER
from dape_jax.config import RunConfig
from dape_jax.distributed import process_zero_only
from dape_jax.errors import InputError, StoppedError
from dape_jax.evaluation.statistics import perplexity_of
from dape_jax.progress import Progress
from dape_jax.provenance import describe, record_start, run_id
from dape_jax.storage import AppendedFiles
from dape_jax.training import loop, metrics, watch

pytestmark = pytest.mark.extra


def fake_wandb() -> mock.MagicMock:
    """Return a module with the names of wandb that are used."""
    return mock.MagicMock(Error=RuntimeError, __spec__=types.SimpleNamespace(name="wandb"))


@pytest.fixture(scope="module")
def told(trained_root, tmp_path_factory):
    """Train once with every destination, stopped at step 2; return the workdir, the lines of the log and the fake."""
    workdir, fake, stream = tmp_path_factory.mktemp("told") / "my run", fake_wandb(), io.StringIO()
    handler, package = logging.StreamHandler(stream), logging.getLogger("dape_jax")
    handler.setFormatter(LOG_FORMATTER)
    spec = tiny.spec(trained_root, train__num_steps=4, train__wandb="extrapolation", train__profile_steps=(1, 3))
    spec["train"] |= {"wandb_entity": "lab", "wandb_group": "seeds", "wandb_tags": "kerple,T16"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", fake)
        patch.setattr(metrics, "mfu", lambda *_: 1e-9)
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        try:
            with patch.context() as stop:
                stop.setattr(loop.PreemptionGuard, "should_stop", lambda guard, step: step == 2)
                with pytest.raises(StoppedError):
                    loop.train(spec, workdir)
            loop.train(spec, workdir)
        finally:
            package.removeHandler(handler)
            package.setLevel(logging.NOTSET)
    return workdir, stream.getvalue().splitlines(), fake


def test_a_log_has_a_time_and_a_message_in_each_line(told, caplog):
    workdir, lines, _ = told
    assert all(re.match(r"\d\d:\d\d:\d\d INFO ", line) for line in lines)
    messages = [line[14:] for line in lines]
    assert "mesh: data=1 fsdp=8 context=1 tensor=1" in messages
    assert "learning rate: 0.01 after 0 steps of warm-up, at the end 0.00231802" in messages
    text = next(message for message in messages if message.startswith("text: "))
    assert re.fullmatch(r"text: \d+ documents \([\d,]+ tokens\) to train on, \d+ \([\d,]+ tokens\) held out", text)
    assert messages.count("resuming from step 2 of 4") == 1
    begun = messages.index("compiling the training step ...", messages.index("resuming from step 2 of 4"))
    assert messages[begun + 1].startswith("compiled the training step in ")
    (last_progress,) = [message for message in messages[begun:] if message.startswith("my run: ")]  # under a minute
    assert re.match(r"my run: 4 of 4 steps, .*MFU 0\.0%, validation", last_progress)
    # `train.log` has the same lines with the date, of both starts, and why the first one ended.
    kept = (workdir / "train.log").read_text().splitlines()
    stopped = [line.split(" ERROR ")[1] for line in kept if " ERROR " in line]
    assert stopped == ["StoppedError: stopped by SIGTERM after step 2, saved; the same command resumes"]
    assert [line.split(" INFO ")[1] for line in kept if " INFO " in line] == messages
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line) for line in kept)
    assert messages[-1] == f"evaluate it: dape-eval --workdir='{workdir}'"
    with caplog.at_level(logging.INFO, "dape_jax"):  # --workdir is a list
        loop.log_end(epath.Path("runs/lr=1,wd=2"), 4)
    assert caplog.messages[-1] == """evaluate it: dape-eval --workdir='"runs/lr=1,wd=2"'"""


@pytest.fixture
def clock(monkeypatch, caplog) -> list[float]:
    """Return the time of progress without a terminal, which a test may change."""
    caplog.set_level(logging.INFO, "dape_jax")
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(metrics, "time", types.SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0]))
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=io.StringIO()))
    return clock


def test_progress_is_a_line_a_minute(clock, caplog):
    with Progress(total=1000, unit="step", desc="run") as bar:
        bar._time = lambda: clock[0]
        for _ in range(300):
            clock[0] += 0.5
            bar.update()
    lines = caplog.messages
    assert [line.partition(" of ")[0] for line in lines] == ["run: 120", "run: 240", "run: 300"]
    assert lines[0] == "run: 120 of 1000 steps, 01:00 elapsed, 07:20 left"
    assert progress.sys.stderr.getvalue() == ""  # pyright: ignore[reportAttributeAccessIssue]


def test_rates_are_means_since_the_last_line_without_compilation_validation_and_saving(
    tmp_path, monkeypatch, clock, caplog
):
    monkeypatch.setattr(metrics, "mfu", lambda *_: 1e-3)
    names = ("loss_nats", "gradient_norm", "applied", "bad", "num_applied", "skipped", "bad_in_a_row")
    values = {name: jnp.float32(name in ("loss_nats", "applied", "num_applied")) for name in names}
    run = RunConfig.from_dict(tiny.spec(tmp_path, train__num_steps=10))

    def steps(*seconds: float) -> None:
        for each in seconds:
            logger.log(logger.bar.n + 1, values, 12_000)
            clock[0] += each
            logger.flush()

    with metrics.MetricLogger(AppendedFiles(tmp_path), run, 0) as logger:
        clock[0] += 500  # compiles
        logger.restart_clock()
        steps(30, 90)
        clock[0] += 700
        logger.log_validation(2, {"loss_nats": 1.0})
        steps(20)
        logger.flush()
        clock[0] += 40  # saves
        logger.restart_clock()
        steps(20, 20)
    lines = [line for line in caplog.messages if " of 10 steps" in line]
    assert "2 of 10 steps, 10:20 elapsed, 08:00 left, loss 1.000, 200 tokens/s, MFU 20.0%" in lines[0]
    assert "5 of 10 steps, 23:40 elapsed, " in lines[1]
    assert "600 tokens/s, MFU 60.0%, validation 1.000" in lines[1]
    assert list(metrics.read_metrics(tmp_path)["train/step_seconds"].values()) == [30, 90, 20, 20, 20]
    assert metrics.read_metrics(tmp_path)["train/mfu"][2] == pytest.approx(12 / 90)


def test_the_id_of_a_run_is_drawn_once_and_moves_with_it(tmp_path):
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        for step in (0, 0, 5):
            record_start(tmp_path / name, step, {"versions": {}})
    drawn = run_id(tmp_path / "run")
    assert drawn != run_id(tmp_path / "other")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert run_id(tmp_path / "moved") == drawn
    assert len((tmp_path / "moved" / "starts.jsonl").read_text().splitlines()) == 3


def test_the_line_on_where_a_run_runs():
    facts = {"device": "TPU v5e", "num_devices": 8, "num_processes": 2, "platform": "tpu", "dtype": "bfloat16"}
    facts |= {"attention": "fused", "versions": {"jax": "1"}}
    assert describe(facts) == "8 x TPU v5e (tpu) of 2 processes, bfloat16, attention fused, jax 1"


def test_every_destination_has_every_scalar_of_every_step_once(told):
    workdir, lines_of_log, fake = told
    found = metrics.read_metrics(workdir)
    names = ("loss_nats", "perplexity", "tokens_per_second", "step_seconds", "mfu", "learning_rate", "gradient_norm")
    for name in names:
        assert sorted(found[f"train/{name}"]) == [1, 2, 3, 4]
    assert sorted(found["validation/loss_nats"]) == [2, 4]
    for group in ("train", "validation"):
        for step, value in found[f"{group}/perplexity"].items():
            assert value == perplexity_of(found[f"{group}/loss_nats"][step]) > 1
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]

    starts = [json.loads(line) for line in (workdir / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 2]
    facts = {"platform": "cpu", "device": "cpu", "num_devices": 8, "num_processes": 1, "attention": "dense"}
    facts |= {"dtype": "float32", "versions": {name: version(name) for name in ("jax", "jaxlib", "flax")}}
    assert starts[0].items() >= facts.items()
    assert sum(line.endswith(f" device: {describe(facts)}") for line in lines_of_log) == 2

    begun, run = fake.init.call_args.kwargs, fake.init.return_value
    expected = {"project": "extrapolation", "name": "my run", "resume": "allow", "id": starts[1]["id"]}
    expected |= {"entity": "lab", "group": "seeds", "tags": ["kerple", "T16"]}
    assert begun.items() >= expected.items()
    assert begun["config"]["train"]["num_steps"] == 4
    assert run.finish.call_count == 2
    assert [{"step": call.kwargs["step"]} | call.args[0] for call in run.log.call_args_list] == lines

    first, second = (events_of(file) for file in sorted((workdir / "tensorboard").iterdir()))
    assert [event.step for event in second if event.session_log.status] == [3]
    shown: dict[str, dict[int, float]] = {}
    for event in first + second:
        for value in event.summary.value:
            shown.setdefault(value.tag, {})[event.step] = value.simple_value
    assert shown == {tag: pytest.approx(values, rel=1e-6) for tag, values in found.items()}


def events_of(file: Path) -> list:
    """Return the events in a file: each is a length (8 bytes), its checksum (4), the event and its checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    content, events = file.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        events.append(Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    return events


def test_repeated_steps_replace_earlier_ones_and_a_cut_line_is_removed(tmp_path):
    run = RunConfig.from_dict(tiny.spec(tmp_path))
    file = tmp_path / "metrics.jsonl"
    cut = '{"step": 2, "a/'
    file.write_text('{"step": 1, "a/x": 1.5}\n{"step": 2, "a/x": "nan"}\n{"step": 3, "a/x": 9}\n' + cut)
    assert set(metrics.read_metrics(tmp_path)["a/x"]) == {1, 2, 3}
    with metrics.MetricLogger(AppendedFiles(tmp_path), run, start=2) as metric_logger:
        metric_logger.log_validation(4, {"loss_nats": 2.0})
        assert len(file.read_text().splitlines()) == 3  # written at once
    found = metrics.read_metrics(tmp_path)
    assert found["a/x"] == {1: 1.5, 2: pytest.approx(float("nan"), nan_ok=True)}
    assert found["validation/loss_nats"] == {4: 2.0}
    assert metrics.read_metrics(tmp_path / "none") == {}


def test_wandb_without_the_package_or_a_key_is_one_line(trained_root, tmp_path, monkeypatch):
    spec, fake = tiny.spec(trained_root, train__wandb="mine"), fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"^train\.wandb = 'mine': needs the package wandb: pip install .*$"):
        loop.train(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    record_start(tmp_path, 0, {})
    for error in (fake.Error("api_key not configured"), ValueError("api_key\n not configured")):
        fake.init.side_effect = error
        with pytest.raises(InputError, match=r"^train\.wandb = 'mine': api_key not configured$"):
            metrics.MetricLogger(AppendedFiles(tmp_path), RunConfig.from_dict(spec), 0)


def test_a_trace_is_written(told):
    workdir, _, _ = told
    traces = list((workdir / "profile").rglob("*.xplane.pb"))
    steps = [file.relative_to(workdir).parts[1:3] for file in sorted(traces)]
    assert steps == [("step_1", "process_0"), ("step_3", "process_0")]  # of steps 1 and 2, and of 3 after resuming


def test_a_signal_traces_the_next_steps_of_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "TRACED_STEPS", 2)
    before = signal.getsignal(signal.SIGUSR2)
    with watch.Trace(AppendedFiles(tmp_path), (9, 9)) as trace:
        for step in range(1, 10):
            if step == 3:
                os.kill(os.getpid(), signal.SIGUSR2)
            trace.begin(step)
            assert bool(trace.last) == (step in (3, 4, 9))
            trace.end(step, jnp.ones(()))
    assert signal.getsignal(signal.SIGUSR2) == before
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == ["step_3", "step_9"]
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 2


def test_a_stalled_run_says_where_it_is(monkeypatch, capfd):
    monkeypatch.setattr(watch, "STALL_SECONDS", 0.5)
    with watch.watchdog() as note_step:
        for _ in range(2):
            time.sleep(0.3)
            note_step()
        assert not capfd.readouterr().err
        process_zero_only(lambda: time.sleep(0.7))
    assert "in process_zero_only" in capfd.readouterr().err


def test_tensorboard_without_its_package_is_one_line(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="dape_jax")
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with metrics.MetricLogger(AppendedFiles(tmp_path), RunConfig.from_dict(tiny.spec(tmp_path)), 0):
        pass
    _, message = caplog.messages  # after the learning rate
    assert message.startswith("TensorBoard: no events are written; pip install ")
    assert not (tmp_path / "tensorboard").exists()
