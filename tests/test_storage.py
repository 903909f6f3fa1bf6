"""Buckets: paths, the marker of a run, and checkpoints in Google Cloud Storage, with a server on this machine."""

import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from etils import epath
from test_survival import abstract, save_steps, small_state

from dape_jax import files, storage
from dape_jax.config import RunConfig
from dape_jax.errors import InputError
from dape_jax.training import checkpoint, metrics, watch

# The server's threads and the libraries' sockets outlive a test.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def bucket(google_storage) -> epath.Path:
    return storage.to_path(f"gs://bucket/{time.monotonic_ns()}", "path")


def test_a_path_is_local_or_in_a_bucket(monkeypatch):
    local, remote = storage.to_path("runs/a", "--workdir"), storage.to_path("s3://bucket/runs/a", "--workdir")
    assert [storage.is_remote(path) for path in (local, remote)] == [False, True]
    assert str(remote / "config.json") == "s3://bucket/runs/a/config.json"
    assert str(storage.to_path("file:///tmp/a", "--workdir")) == "/tmp/a"
    assert storage.to_path("~/a", "--workdir") == Path.home() / "a"
    for text in ("az://b/a", "gs:/b/a", "abfs:/x/y", "http://host/a", "s3://", "gs:///a", "hdfs://a/b", "gs://b/a[1]"):
        with pytest.raises(InputError, match=f"^--workdir = {re.escape(repr(text))}: must "):
            storage.to_path(text, "--workdir")
    with pytest.raises(InputError, match=r"^workdir = 's3://bucket/runs/a': must be local or gs://"):
        checkpoint.step_names(remote)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs the package s3fs: pip install 's3fs>=[0-9.]+'$"):
        storage.to_path("s3://bucket/a", "--workdir")


def test_an_unreachable_bucket_is_one_line_with_the_directory(monkeypatch):
    """S3's errors are no OSError, and gcsfs logs the traceback of each of its own."""

    def fail(directory):
        raise RuntimeError("no such host")

    monkeypatch.setattr(checkpoint, "names_in", fail)
    for read in (checkpoint.read_config, checkpoint.restore_config):
        with pytest.raises(
            InputError, match=r"^workdir = 'gs://bucket/a': cannot be read: RuntimeError: no such host$"
        ):
            read(storage.to_path("gs://bucket/a", "--workdir"))
    assert not logging.getLogger("gcsfs").isEnabledFor(logging.ERROR)


def test_files_are_written_read_and_listed(bucket):
    assert storage.names_in(bucket) == []
    files.write_json(bucket / "config.json", {"a": 1})
    files.write_atomically(bucket / "sub" / "file", b"content")
    assert files.read_json(bucket / "config.json") == {"a": 1}
    assert sorted(storage.names_in(bucket)) == ["config.json", "sub"]
    with pytest.raises(InputError, match="missing: cannot be read as JSON"):
        files.read_json(bucket / "missing")
    assert checkpoint.read_config(bucket / "sub") is None


# ---- one run per directory


def marker(age: float = 0.0, host: str = "other", process: int = 1) -> dict[str, object]:
    return {"host": host, "process": process, "time": time.time() - age}


def test_one_run_writes_to_a_directory(bucket):
    with checkpoint.run_lock(bucket) as refresh:
        written = json.loads((bucket / "run.lock").read_bytes())
        assert written.items() >= {"host": socket.gethostname(), "process": os.getpid()}.items()
        refresh()
        assert json.loads((bucket / "run.lock").read_bytes()) == written  # a minute has not passed
    assert storage.names_in(bucket) == []
    files.write_json(bucket / "run.lock", marker(age=500))
    refused = rf"^workdir = .*in use by another run \(process 1 on other\); .*delete {bucket}/run.lock or wait"
    with pytest.raises(InputError, match=refused), checkpoint.run_lock(bucket):
        pass
    assert json.loads((bucket / "run.lock").read_bytes())["host"] == "other"


def test_the_marker_of_an_ended_run_is_ignored(bucket):
    """Check one that is old, one of an older version, and one of a process of this machine that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    of_old_version = {"host": "other", "process": 1, "machine": "b", "released": False}
    for ignored in (marker(age=700), of_old_version, marker(host=socket.gethostname(), process=ended.pid)):
        files.write_json(bucket / "run.lock", ignored)
        with checkpoint.run_lock(bucket):
            pass
    files.write_json(bucket / "run.lock", marker(host=socket.gethostname(), process=os.getppid()))
    with pytest.raises(InputError, match="in use by another run"), checkpoint.run_lock(bucket):
        pass


def test_a_run_whose_marker_was_replaced_ends(bucket, monkeypatch):
    monkeypatch.setattr(storage, "_WRITE_SECONDS", 0.0)
    with checkpoint.run_lock(bucket) as refresh:
        refresh()
        files.write_json(bucket / "run.lock", marker())
        with pytest.raises(InputError, match="in use by another run"):
            refresh()
    assert json.loads((bucket / "run.lock").read_bytes())["host"] == "other"


# ---- checkpoints and metrics


@pytest.mark.slow
def test_steps_are_saved_deleted_and_restored(bucket, monkeypatch):
    save_steps(bucket, 1, 2, 3, 4)
    assert checkpoint.step_names(bucket) == ["4", "3", "2"]
    assert sorted(storage.names_in(bucket / "checkpoints")) == ["2", "3", "4"]
    (bucket / "checkpoints" / "4" / "commit_success.txt").unlink()  # as after a kill during a save
    step, state, data = checkpoint.restore_newest(bucket, abstract(small_state(0)))
    assert (step, data) == (3, {"next": 3})
    np.testing.assert_array_equal(state.params["up_DF"], small_state(3).params["up_DF"])
    save_steps(bucket, 5)  # opening the checkpoints deletes what is unfinished
    assert checkpoint.step_names(bucket) == ["5", "3", "2"]

    def restore(*_, **__):
        raise ValueError("UNAVAILABLE: Error reading")

    monkeypatch.setattr(ocp.Checkpointer, "restore", restore)
    with pytest.raises(InputError, match=r"checkpoints/5: cannot be read now: UNAVAILABLE: .*nothing was moved"):
        checkpoint.restore_newest(bucket, abstract(small_state(0)))
    assert sorted(storage.names_in(bucket)) == ["checkpoints"]


def test_metrics_are_written_before_a_checkpoint(bucket, tmp_path):
    run = RunConfig.from_dict(tiny.spec(tmp_path))
    with storage.AppendedFiles(bucket) as appended, metrics.MetricLogger(appended, run, 0) as logger:
        for step in (1, 2):
            logger.log_validation(step, {"loss_nats": 1.0 / step})
        assert metrics.read_metrics(bucket) == {}
        appended.upload()
        assert metrics.read_metrics(bucket)["validation/loss_nats"] == {1: 1.0, 2: 0.5}
    with storage.AppendedFiles(bucket) as appended, metrics.MetricLogger(appended, run, 1) as logger:
        logger.log_validation(3, {"loss_nats": 3.0})
    assert metrics.read_metrics(bucket)["validation/loss_nats"] == {1: 1.0, 3: 3.0}
    assert sorted(storage.names_in(bucket)) == ["metrics.jsonl", "tensorboard"]
    assert not appended.local.exists()


def test_the_log_and_a_trace_are_uploaded(bucket):
    files.write_atomically(bucket / "train.log", b"earlier\n")
    appended = storage.AppendedFiles(bucket)
    with appended, watch.train_log(appended) as open_log, watch.Trace(appended, (2, 2)) as trace:
        logging.getLogger("dape_jax").error("before the lock")
        open_log()
        logging.getLogger("dape_jax").error("after it")
        appended.upload()
        lines = [line.rpartition("ERROR ")[2] for line in (bucket / "train.log").read_text().splitlines()]
        assert lines == ["earlier", "before the lock", "after it"]
        for step in (1, 2):
            trace.begin(step)
            trace.end(step, np.zeros(1))
    (directory,) = (bucket / "profile/step_2/process_0/plugins/profile").iterdir()
    assert any(name.endswith(".xplane.pb") for name in storage.names_in(directory))
