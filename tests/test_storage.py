"""Buckets: paths, errors, leases, the local copy of a corpus, and complete runs, with two unreliable servers."""

import gc
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from etils import epath
from test_survival import abstract, save_steps, small_state

from dape_jax import files, storage
from dape_jax.data import store
from dape_jax.errors import InputError
from dape_jax.evaluation import report
from dape_jax.provenance import make_results_directory
from dape_jax.training import checkpoint, source

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import object_storage  # noqa: E402

# The servers' threads and the libraries' sockets outlive a test.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def faults() -> object_storage.Faults:
    return object_storage.Faults()


@pytest.fixture(scope="module")
def environment(faults) -> Iterator[dict[str, str]]:
    with object_storage.servers(faults) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment
    # Release the connections here: a later test would fail if it collected an unclosed socket, or found these classes.
    for protocol in ("s3", "gs"):
        if protocol in fsspec.registry:
            fsspec.get_filesystem_class(protocol).clear_instance_cache()
    for protocol in ("s3", "s3a", "gs", "gcs"):
        sys.modules["fsspec.registry"]._registry.pop(protocol, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
        # The servers' threads, which have lost their connections, would warn of their sockets in a later test.
        deadline = time.monotonic() + 20
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:
                thread.join(max(0.0, deadline - time.monotonic()))
                assert not thread.is_alive(), f"{thread.name}: a connection was not closed"


@pytest.fixture(params=["s3", "gs"])
def bucket(request, environment, faults) -> Iterator[epath.Path]:
    """Return a directory in a bucket of either kind; disable failures when the test has ended."""
    yield storage.to_path(f"{request.param}://bucket/{request.node.originalname}-{time.monotonic_ns()}", "path")
    faults.fail = faults.slow = 0.0
    faults.lose_next = ""


def test_a_path_is_local_or_in_a_bucket(environment):
    local, remote = storage.to_path("runs/a", "--workdir"), storage.to_path("s3://bucket/runs/a", "--workdir")
    assert not storage.is_remote(local)
    assert storage.is_remote(remote)
    assert str(remote / "config.json") == "s3://bucket/runs/a/config.json"
    assert storage.absolute(remote) == remote
    assert storage.absolute(local).is_absolute()
    assert storage.to_path("file:///tmp/a", "--workdir") == Path("/tmp/a")


@pytest.mark.parametrize(
    "text",
    ["az://bucket/a", "gs:/bucket/a", "abfs:/x/y", "http://host/a", "s3://", "gs:///a", "hdfs://a/b", "gs://b/a[1]"],
)
def test_another_kind_of_path_is_refused(text):
    with pytest.raises(InputError, match=f"^--workdir = {re.escape(repr(text))}: must "):
        storage.to_path(text, "--workdir")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs the package s3fs: pip install 'dape_jax\[s3\]'"):
        storage.to_path("s3://bucket/a", "--workdir")


def test_files_are_written_read_and_listed(bucket):
    assert storage.list_directory(bucket) == []
    assert not storage.exists(bucket / "config.json")
    files.write_json(bucket / "config.json", {"a": 1})
    files.write_atomically(bucket / "sub" / "file", b"content")
    assert files.read_json(bucket / "config.json") == {"a": 1}
    assert sorted(storage.list_directory(bucket)) == ["config.json", "sub"]
    assert storage.exists(bucket / "config.json")
    assert storage.exists(bucket / "sub")
    with pytest.raises(FileNotFoundError):
        files.read_bytes(bucket / "missing")


def test_a_listing_shows_what_another_process_has_written(bucket, environment):
    files.write_atomically(bucket / "one", b"")
    assert storage.list_directory(bucket) == ["one"]
    write = f"files.write_atomically(storage.to_path({str(bucket / 'two')!r}, ''), b'')"
    code = f"from dape_jax import files, storage; {write}"
    subprocess.run([sys.executable, "-c", code], env=os.environ | environment | {"PYTHONPATH": str(ROOT)}, check=True)
    assert sorted(storage.list_directory(bucket)) == ["one", "two"]


def test_requests_that_fail_are_repeated(bucket, faults):
    faults.fail, failed = 0.1, faults.num_failed
    for number in range(15):
        files.write_atomically(bucket / f"{number}", bytes([number]))
        assert files.read_bytes(bucket / f"{number}") == bytes([number])
    assert sorted(map(int, storage.list_directory(bucket))) == list(range(15))
    assert faults.num_failed > failed


def test_a_deletion_whose_answer_is_lost_is_not_an_error(bucket, faults):
    # s3fs deletes objects with one request that does not name them.
    pattern = {"gs": "^DELETE .*/o/.*{}", "s3": r"^POST .*\?delete"}[str(bucket).split("://")[0]]

    faults.lose_next = pattern.format(r"results%2F\.")
    make_results_directory(bucket / "results")
    assert not faults.lose_next  # it was lost
    assert storage.list_directory(bucket / "results") == []

    files.write_atomically(bucket / "old" / "file", b"content")
    faults.lose_next = pattern.format("old%2Ffile")
    storage.move_directory(bucket / "old", bucket / "new")
    assert not faults.lose_next
    assert storage.list_directory(bucket) == ["new"]
    assert files.read_bytes(bucket / "new" / "file") == b"content"


def test_errors_of_the_network_become_os_errors():
    from aiohttp import ClientPayloadError
    from botocore.exceptions import EndpointConnectionError, NoCredentialsError
    from gcsfs.retry import HttpError

    unavailable = ValueError("UNAVAILABLE: Error reading s3://bucket/a")
    for error in (
        EndpointConnectionError(endpoint_url="http://x"),
        NoCredentialsError(),
        ClientPayloadError("cut"),
        HttpError({"code": 503, "message": "again"}),
        unavailable,
    ):
        with pytest.raises(OSError, match=r".") as raised, storage.bucket_errors():
            raise error
        assert raised.value.__cause__ is error
    for error in (ValueError("DATA_LOSS: checksum"), KeyError("x"), InputError("x")):
        with pytest.raises(type(error)) as same, storage.bucket_errors():
            raise error
        assert same.value is error


def test_a_bucket_that_is_missing_is_one_line(environment, bucket):
    missing = storage.to_path(f"{str(bucket).split('://')[0]}://nobody/runs/a", "--workdir")
    with pytest.raises(InputError, match=r"^output = .*cannot be written to"):
        make_results_directory(missing)
    with pytest.raises(InputError, match=r"^workdir = .*cannot be written to"), checkpoint.run_lock(missing):
        pass


def test_the_directory_common_to_workdirs(environment):
    paths = [storage.to_path(f"s3://bucket/runs/{name}", "") for name in ("a", "b")]
    assert str(report.common_directory(paths)) == "s3://bucket/runs"
    assert report.common_directory(paths[:1]) == paths[0]
    for other in ("gs://bucket/runs/a", "s3://other/runs/a", "runs/a"):
        with pytest.raises(InputError, match="must have a common directory; give --output"):
            report.common_directory([paths[0], storage.to_path(other, "")])


# ---- the lease


@pytest.fixture
def quick(monkeypatch):
    """Shorten the times of a lease, and let no process count as one of this machine."""
    for name, seconds in {"_RENEW_SECONDS": 0.1, "_WATCH_SECONDS": 1.0, "_LOOK_SECONDS": 0.05}.items():
        monkeypatch.setattr(storage, name, seconds)
    monkeypatch.setattr(storage, "_machine", lambda: str(time.monotonic_ns()))


def test_one_run_holds_a_lease(bucket, quick):
    with checkpoint.run_lock(bucket):
        for _ in range(2):
            with (
                pytest.raises(InputError, match=rf"^workdir = .*in use by another process \(process {os.getpid()} on"),
                checkpoint.run_lock(bucket),
            ):
                pass
    with checkpoint.run_lock(bucket):  # released
        time.sleep(0.3)  # renewed


def test_a_lease_that_is_not_renewed_is_taken_over(bucket, quick):
    lost = storage._Lease(bucket / "run.lock")
    lost.acquire("workdir")
    begun = time.monotonic()
    with checkpoint.run_lock(bucket):
        assert time.monotonic() - begun >= 1
        with pytest.raises(storage._ChangedError):
            lost.write()
        assert json.loads(files.read_bytes(bucket / "run.lock"))["id"] != lost.id


def test_the_lease_of_a_process_that_has_ended_here_is_taken_over_at_once(bucket):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = {"host": "here", "process": ended.pid, "machine": storage._machine(), "released": False}
    files.write_json(bucket / "run.lock", left)
    begun = time.monotonic()
    with checkpoint.run_lock(bucket):
        assert time.monotonic() - begun < storage._LOOK_SECONDS


def test_a_run_whose_lease_was_taken_over_ends(bucket, quick, monkeypatch):
    ended = threading.Event()
    messages = []
    monkeypatch.setattr(storage, "_end", lambda message: (messages.append(message), ended.set()))
    with storage.lease(bucket, "workdir", "run.lock"):
        files.write_atomically(bucket / "run.lock", b"{}")
        assert ended.wait(10)
    assert "another run has taken the directory over" in messages[0]


def test_a_run_that_cannot_renew_its_lease_ends(bucket, quick, monkeypatch):
    def fail(self: storage._Lease, released: bool = False) -> None:
        raise OSError(5, "no network")

    ended = threading.Event()
    messages = []
    monkeypatch.setattr(storage, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(storage, "_end", lambda message: (messages.append(message), ended.set()))
    with storage.lease(bucket, "workdir", "run.lock"):
        monkeypatch.setattr(storage._Lease, "write", fail)
        assert ended.wait(10)
    assert "could not be renewed for 0 seconds: no network" in messages[0]


def test_one_of_many_gets_the_lease(bucket, quick, faults, monkeypatch):
    """Check also when requests fail, and when they are executed but the answer is lost."""
    monkeypatch.setattr(storage, "_WATCH_SECONDS", 60.0)  # a request that fails is repeated for seconds
    faults.fail = 0.1
    for _ in range(3):
        directory = bucket / str(time.monotonic_ns())
        outcomes: list[str] = []
        held = threading.Event()

        def take(directory=directory, outcomes=outcomes, held=held) -> None:
            try:
                with storage.lease(directory, "workdir", "run.lock"):
                    outcomes.append("held")
                    held.wait(60)
            except InputError:
                outcomes.append("refused")

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60
        while len(outcomes) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        held.set()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["held", "refused", "refused", "refused"]


# ---- a prepared corpus


def prepared(root: Path) -> Path:
    """Return a corpus that `prepare` has made."""
    from dape_jax.data.prepare.command import PrepareConfig, prepare

    tiny.write_text(root / "text")
    config = PrepareConfig(
        input=(str(root / "text"),), output=str(root / "corpus"), tokenizer="bytes", validation_fraction=0.3, workers=1
    )
    prepare(config)
    return root / "corpus"


def upload(source: Path, target: epath.Path) -> None:
    system, path = fsspec.url_to_fs(str(target))
    system.put(f"{source}/", path, recursive=True)


def config_of(path: object, cache: Path) -> store.DataConfig:
    return store.DataConfig(str(path), None, str(cache), 0.3, 0)


def load_digest(path: str, cache: str) -> str:
    return source.load_corpus(config_of(path, Path(cache))).digest


def test_a_corpus_in_a_bucket_is_copied_once(bucket, tmp_path, faults):
    local = prepared(tmp_path)
    upload(local, bucket)
    faults.fail = 0.05
    expected = source.load_corpus(config_of(local, tmp_path / "unused"))
    found = source.load_corpus(config_of(bucket, tmp_path / "cache"))
    faults.fail = 0.0
    assert found.digest == expected.digest
    np.testing.assert_array_equal(found.train.tokens, expected.train.tokens)
    assert found.train.directory.parent == tmp_path / "cache" / found.digest[:16]
    before = faults.num_requests
    assert source.load_corpus(config_of(bucket, tmp_path / "cache")).digest == found.digest
    assert faults.num_requests - before < 10  # two sidecars, and the libraries' other requests
    assert not list((tmp_path / "cache").glob(".tmp-*"))


@pytest.mark.slow
def test_processes_of_one_machine_copy_a_corpus_once(environment, tmp_path, faults):
    local = prepared(tmp_path)
    url = storage.to_path("s3://bucket/shared-corpus", "")
    upload(local, url)
    faults.slow = 0.3
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        digests = pool.starmap(load_digest, [(str(url), str(tmp_path / "cache"))] * 3)
    faults.slow = 0.0
    assert len(set(digests)) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")] == [digests[0][:16]]


def test_a_damaged_corpus_in_a_bucket_gets_no_name(bucket, tmp_path):
    local = prepared(tmp_path)
    tokens = local / "train" / store.TOKENS_FILE
    content = bytearray(tokens.read_bytes())
    content[5] ^= 1
    tokens.write_bytes(content)
    upload(local, bucket)
    with pytest.raises(InputError, match=r"digest = .*must be the digest of the files, "):
        source.load_corpus(config_of(bucket, tmp_path / "cache"))
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


# ---- checkpoints


@pytest.mark.slow
def test_a_damaged_step_is_moved_and_an_older_one_read(bucket, caplog):
    save_steps(bucket, 1, 2)
    system, path = fsspec.url_to_fs(str(bucket))
    name = max(system.find(f"{path}/checkpoints/2/params"), key=system.size)  # the arrays
    content = bytearray(system.cat_file(name))
    content[len(content) // 2] ^= 1
    system.pipe_file(name, bytes(content))
    found = checkpoint.restore_newest(bucket, abstract(small_state(0)))
    assert found is not None
    assert found[0] == 1
    np.testing.assert_array_equal(found[1].params["up_DF"], small_state(1).params["up_DF"])
    assert storage.list_directory(bucket / "damaged") == ["2"]
    assert checkpoint.step_names(bucket) == ["1"]
    assert "step 2 is damaged and moved to" in caplog.text


@pytest.mark.slow
def test_an_unfinished_save_is_not_a_step(bucket):
    save_steps(bucket, 1, 2)
    (bucket / "checkpoints" / "2" / "commit_success.txt").unlink()
    assert checkpoint.step_names(bucket) == ["1"]
    assert checkpoint.restore_config(bucket)[0] == 1
    save_steps(bucket, 3)  # opening the checkpoints deletes what is unfinished
    assert checkpoint.step_names(bucket) == ["3", "1"]
    assert sorted(storage.list_directory(bucket / "checkpoints")) == ["1", "3"]


@pytest.mark.slow
def test_steps_that_are_not_kept_are_deleted(bucket):
    save_steps(bucket, 1, 2, 3, 4)
    assert checkpoint.step_names(bucket) == ["4", "3", "2"]
    assert sorted(storage.list_directory(bucket / "checkpoints")) == ["2", "3", "4"]


@pytest.mark.parametrize("message", ["UNAVAILABLE: Error reading", "DEADLINE_EXCEEDED: slow", "PERMISSION_DENIED: no"])
def test_a_network_error_is_not_damage(environment, monkeypatch, message):
    bucket = storage.to_path(f"s3://bucket/lost-{time.monotonic_ns()}", "")
    save_steps(bucket, 1)

    def restore(*_, **__):
        raise ValueError(message)

    monkeypatch.setattr(ocp.Checkpointer, "restore", restore)
    with pytest.raises(InputError, match=f"checkpoints/1: cannot be read now: {message}"):
        checkpoint.restore_newest(bucket, abstract(small_state(0)))
    assert checkpoint.step_names(bucket) == ["1"]
    assert storage.list_directory(bucket / "damaged") == []


# ---- files of a run


def run(*arguments: object, environment: dict[str, str], timeout: int = 300) -> subprocess.CompletedProcess:
    env = os.environ | environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def train_arguments(path: object, workdir: object, cache: Path, num_steps: int = 12) -> list[object]:
    """Return the command line of a tiny run."""
    fields = {
        "model.num_layers": 1,
        "model.width": 16,
        "model.num_heads": 2,
        "data.path": path,
        "data.tokenizer": "bytes",
        "data.cache_dir": cache,
        "train.train_length": 32,
        "train.batch_size": 8,
        "train.num_steps": num_steps,
        "train.eval_interval": 2,
        "train.validation_batches": 1,
        "train.checkpoint_interval": 2,
    }
    flags = [f"--config.{field}={value}" for field, value in fields.items()]
    return ["train.py", "--config=configs/quickstart.py", f"--workdir={workdir}", *flags]


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    # `test_a_lost_network_ends_a_run_with_one_line` trains in S3.
    [pytest.param("s3", marks=pytest.mark.exhaustive), "gs"],
)
def test_train_kill_resume_evaluate(scheme, environment, faults, tmp_path):
    """Train in a bucket with failing requests, bitwise equal to a local run; `eval.py` and the tools read it."""
    local = prepared(tmp_path)
    corpus = storage.to_path(f"{scheme}://bucket/{scheme}-corpus", "")
    upload(local, corpus)
    faults.fail, faults.slow = 0.01, 0.01

    there, here = storage.to_path(f"{scheme}://bucket/{scheme}-runs/a", ""), tmp_path / "a"
    done = run(*train_arguments(local, here, tmp_path / "unused"), environment=environment)
    assert done.returncode == 0, done.stderr
    env = os.environ | environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, train_arguments(corpus, there, tmp_path / "cache"))]
    killed = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 200
    while not checkpoint.step_names(there) and killed.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    left = checkpoint.step_names(there)
    assert left
    assert left[0] != "12"
    done = run(*train_arguments(corpus, there, tmp_path / "cache"), environment=environment)
    assert done.returncode == 0, done.stderr
    assert checkpoint.step_names(there)[0] == "12"
    assert len(checkpoint.step_names(there)) <= 4  # older ones were deleted
    assert not storage.list_directory(there / "damaged")
    digests = [files.read_json(each / "checkpoints" / "12" / "digests" / "metadata") for each in (here, there)]
    assert digests[0].pop("config") != digests[1].pop("config")  # which names the path of the corpus
    assert digests[0] == digests[1]

    done = run("eval.py", f"--workdir={there}", "--lengths=32,64", environment=environment)
    assert done.returncode == 0, done.stderr
    assert files.read_json(there / "lengths.json")["runs"][0]["step"] == 12
    assert storage.exists(there / "lengths.png")
    text = ["-m", "dape_jax.tools.generate", f"--workdir={there}", "--prompt=the", "--max_new_tokens=4"]
    done = run(*text, f"--output={there}/text.json", environment=environment)
    assert done.returncode == 0, done.stderr
    assert files.read_json(there / "text.json")["completions"]
    page = ["-m", "dape_jax.tools.attention_maps", f"--workdir={there}", "--length=32"]
    done = run(*page, environment=environment)
    assert done.returncode == 0, done.stderr
    maps = there / "attention_maps" / "step-12-length-32"
    assert {"index.html", "layer-00.png"} <= set(storage.list_directory(maps))


@pytest.mark.slow
def test_a_lost_network_ends_a_run_with_one_line(environment, faults, tmp_path):
    """Runs end when their lease has not been renewed for a minute, or earlier with an error of another request."""
    local = prepared(tmp_path)
    workdir = storage.to_path("s3://bucket/lost/a", "")
    command = [sys.executable, *map(str, train_arguments(local, workdir, tmp_path / "unused", num_steps=100_000))]
    env = os.environ | environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 200
    while not checkpoint.step_names(workdir) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    left = checkpoint.step_names(workdir)
    try:
        faults.fail = 1.0
        _, messages = process.communicate(timeout=200)
    finally:
        faults.fail = 0.0
    assert left
    assert process.returncode in (1, 2)
    lines = messages.replace("\r", "\n").splitlines()
    assert "Traceback" not in messages
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert any("the same command resumes" in line for line in lines)
