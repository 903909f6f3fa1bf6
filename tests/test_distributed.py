"""Several processes: joining, stopping together, dying together, and the same results as one process."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import chex
import jax
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dape_jax import distributed
from dape_jax.config import RunConfig
from dape_jax.distributed import PreemptionGuard, distributed_runtime
from dape_jax.errors import InputError, StoppedError
from dape_jax.sharding import MeshConfig, make_mesh
from dape_jax.training import checkpoint, loop
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import abstract_state

ROOT = Path(__file__).parents[1]


# ---- joining


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("localhost:1234", None, None), ["--num_processes, --process_id", "must be set together"]),
        ((None, 2, 0), ["--coordinator", "must be set together"]),
        (("localhost", 2, 0), ["--coordinator", "'localhost'", "host:port"]),
        (("localhost:http", 2, 0), ["--coordinator", "host:port"]),
        (("localhost:65536", 2, 0), ["--coordinator", "host:port"]),
        ((":1234", 2, 0), ["--coordinator", "host:port"]),
        (("localhost:1234", 0, 0), ["--num_processes", "0", "must be positive"]),
        (("localhost:1234", 2, 2), ["--process_id", "2", "from 0 to 1"]),
        (("localhost:1234", 2, -1), ["--process_id", "-1", "from 0 to 1"]),
    ],
)
def test_incomplete_or_wrong_flags_are_refused(monkeypatch, flags, words):
    monkeypatch.setattr(jax.distributed, "initialize", None)  # calling it would be a TypeError
    with pytest.raises(InputError) as error, distributed_runtime(*flags):
        pass
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


LISTEN = """
import sys
from pathlib import Path
from dape_jax.distributed import distributed_runtime

port = int(sys.argv[2])
with distributed_runtime(f"{sys.argv[1]}:{port}", 1, 0):
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            address, opened = line.split()[1].split(":")
            if int(opened, 16) == port and line.split()[3] == "0A":
                print(address)
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}  # as /proc writes them


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux says who listens")
@pytest.mark.parametrize(("host", "is_local"), [("localhost", True), ("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_local_coordinator_listens_only_on_the_loopback_interface(host, is_local):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LISTEN, host, str(port)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    addresses = set(done.stdout.split())
    assert addresses
    assert (addresses <= LOOPBACK) == is_local


def test_an_incomplete_environment_is_refused():
    code = "import dape_jax.distributed as d; d.distributed_runtime(None, None, None).__enter__()"
    environment = os.environ | {"JAX_COORDINATOR_ADDRESS": "localhost:1234", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert re.search(r"InputError: JAX_COORDINATOR_ADDRESS = 'localhost:1234': .*three flags", done.stderr), done.stderr


ALONE = """
import time
from dape_jax.distributed import PreemptionGuard, distributed_runtime
with distributed_runtime(None, None, None):
    print("joined", flush=True)
    preemption = PreemptionGuard()
    for step in range(600):
        if preemption.should_stop(step):
            print("stopped", flush=True)
            break
        time.sleep(0.1)
"""


def test_single_processes_initialise_the_runtime_and_notice_sigterm():
    """Two at once on one machine, offline, with a proxy that does not exist."""
    environment = (
        os.environ | {"JAX_PLATFORMS": "cpu"} | dict.fromkeys(("http_proxy", "https_proxy"), "http://10.0.0.0:1")
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", ALONE], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for run in runs:
            assert run.stdout is not None
            assert run.stdout.readline() == "joined\n"
        for run in runs:
            run.send_signal(signal.SIGTERM)
        assert [run.communicate(timeout=30)[0] for run in runs] == ["stopped\n"] * 2
        assert [run.returncode for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()


SEVERAL = """
import sys
from pathlib import Path
import jax
from dape_jax import command_line, distributed
from dape_jax.errors import InputError, StoppedError

def refuse():
    raise InputError("text = 'a': of process 0" if jax.process_index() == 0 else "not raised")

def main(_):
    with distributed.distributed_runtime(None, None, None):
        done = distributed.process_zero_first(lambda: Path("order").open("a").write(str(jax.process_index())))
        for work in (refuse, lambda: distributed.require_same("text", f"{jax.process_index()}")):
            try:
                distributed.process_zero_first(work) if work is refuse else work()
            except InputError as error:
                print(error, flush=True)
        print(distributed.first_fault("fault of 1" if jax.process_index() == 1 else ""), flush=True)
        distributed.process_zero_only(lambda: Path("only").open("a").write(str(jax.process_index())))
        distributed.require_same("text", "same")
        raise StoppedError("stopped")

command_line.run(main)
"""


def test_processes_started_by_a_cluster_join_and_agree(tmp_path):
    """In SLURM's environment: process 0 goes first, its errors are raised on all, and all end with one status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_PORT": str(port), "PYTHONPATH": str(ROOT)}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SEVERAL],
            cwd=tmp_path,
            env=environment | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        out, err = zip(*[run.communicate(timeout=60) for run in runs], strict=True)
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [143, 143], err
    assert (tmp_path / "order").read_text() == "01"
    assert (tmp_path / "only").read_text() == "0"
    for text in out:
        refused, differs = [line for line in text.splitlines() if line.startswith("text")]
        assert refused == "text = 'a': of process 0"
        assert differs == "text: must be the same on all processes, but is 0 on process 0, 1 on process 1"
        assert "fault of 1" in text.splitlines()
    assert "stopped\n" in err[0]
    assert "stopped" not in err[1]


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_program_for_one_process_refuses_several(monkeypatch, name):
    distributed.require_single_process()
    monkeypatch.setenv(name, "2")
    with pytest.raises(InputError, match=f"{name} = '2': must be 1: .*one process"):
        distributed.require_single_process()


# ---- stopping


@given(start=st.integers(0, 50), noticed_at=st.integers(0, 60), num_steps=st.integers(1, 60))
@settings(deadline=None)
def test_sigterm_at_any_time_stops_a_run_once(start, noticed_at, num_steps):
    """Check with a stop number one above the last queried: jax returns True for one number only."""
    asked = []

    def reached(number):
        assert number == len(asked) + 1
        asked.append(number)
        return number == noticed_at + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed.multihost_utils, "reached_preemption_sync_point", reached)
        patch.setattr(signal, "signal", lambda *_: None)
        preemption = PreemptionGuard()
        stops = [step for step in range(start, start + num_steps + 1) if preemption.should_stop(step)]
    expected = max(start, noticed_at + 1)
    assert stops == ([expected] if expected <= start + num_steps else [])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("processes")
    tiny.write_text(root / "text")
    return root


class StopsAfter3(PreemptionGuard):
    def should_stop(self, step: int) -> bool:
        return step == 3


@pytest.mark.slow
def test_a_stopped_run_resumes_exactly_and_its_step_is_never_the_best(root, tmp_path, monkeypatch):
    """Stop between two validations, keeping one checkpoint: bitwise equal to the uninterrupted run."""
    spec = tiny.spec(root, train__max_to_keep=1, train__num_steps=4, model__num_layers=1)
    spec["model"]["processor"] = {"name": "none"}
    loop.train(spec, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "PreemptionGuard", StopsAfter3)
        with pytest.raises(StoppedError, match="after step 3, saved"):
            loop.train(spec, tmp_path / "stopped")
    assert steps(tmp_path / "stopped") == [2, 3]  # the best, and the newest
    assert checkpoint.restore_config(tmp_path / "stopped", "best")[0] == 2
    assert checkpoint.restore_config(tmp_path / "stopped", "newest")[0] == 3
    loop.train(spec, tmp_path / "stopped")
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole")
    chex.assert_trees_all_equal(state_of(tmp_path / "stopped", spec), state_of(tmp_path / "whole", spec))


def steps(workdir: Path) -> list[int]:
    """Return the saved steps."""
    return sorted(int(entry.name) for entry in (workdir / "checkpoints").iterdir() if entry.name.isdecimal())


def state_of(workdir: Path, spec: dict) -> tuple:
    """Return the newest step, its state and its position in the data."""
    run = RunConfig.from_dict(spec)
    mesh = make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    found = checkpoint.restore_newest(workdir, abstract_state(run.model, make_optimizer(run.optimizer, 4), mesh))
    assert found is not None
    step, state, data = found
    return step, jax.device_get(state), data


# ---- real processes


class Run:
    """`train.py` in some processes that share four devices.

    `last_flags`, `last_directory` and `last_path` apply only to the last process: more flags, another working
    directory, and a directory with Python packages.
    """

    def __init__(
        self,
        root: Path,
        workdir: Path,
        num_processes: int,
        *more: str,
        last_flags: tuple[str, ...] = (),
        last_directory: Path | None = None,
        last_path: Path | None = None,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(4 // num_processes),
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        }
        self.logs = [workdir.with_name(f"{workdir.name}.{i}.log") for i in range(num_processes)]
        self.processes = []
        for i, log in enumerate(self.logs):
            flags = [f"--coordinator={coordinator}", f"--num_processes={num_processes}", f"--process_id={i}"]
            command = [sys.executable, f"{ROOT}/train.py", f"--config={ROOT}/configs/quickstart.py"]
            command += [f"--workdir={workdir}", *arguments(root), *(flags if num_processes > 1 else []), *more]
            directory = workdir.parent
            if i == num_processes - 1:
                command += last_flags
                directory = last_directory or directory
                environment |= {} if last_path is None else {"PYTHONPATH": str(last_path)}
            with log.open("w") as file:
                process = subprocess.Popen(command, cwd=directory, env=environment, stdout=file, stderr=file)
            self.processes.append(process)

    def wait(self, timeout: float = 300) -> list[int]:
        """Wait for the processes and return their exit statuses."""
        try:
            return [process.wait(timeout) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def texts(self) -> list[str]:
        """Return the output of each process."""
        return [log.read_text().replace("\r", "\n") for log in self.logs]


def arguments(root: Path) -> list[str]:
    return [
        f"--config.data.path={root}/text",
        f"--config.data.cache_dir={root}/cache",
        "--config.data.validation_fraction=0.3",
        "--config.model.num_layers=1",
        "--config.model.width=16",
        "--config.model.num_heads=2",
        "--config.model.attention.block_size=8",
        "--config.train.train_length=16",
        "--config.train.batch_size=8",
        "--config.train.validation_batches=2",
        "--config.train.max_to_keep=2",
    ]


EIGHT_STEPS = (
    "--config.train.num_steps=8",
    "--config.train.eval_interval=4",
    "--config.train.checkpoint_interval=4",
)


def result(workdir: Path) -> tuple:
    """Return the parameters after 8 steps, the validation loss and the position in the data."""
    _, saved = checkpoint.restore_config(workdir, "8")
    run = RunConfig.from_dict(saved["config"])
    mesh = make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    abstract = abstract_state(run.model, make_optimizer(run.optimizer, 8), mesh)
    directory = workdir / "checkpoints" / "8"
    metrics, data = (json.loads((directory / name).read_text()) for name in ("metrics/metrics", "data/metadata"))
    return jax.device_get(checkpoint.restore_params(workdir, 8, abstract.params)), metrics["validation_nats"], data


@pytest.fixture(scope="module")
def one_process(root, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("one") / "run"
    one = Run(root, workdir, 1, *EIGHT_STEPS)
    assert one.wait() == [0], one.texts()
    return workdir


def back_to_step_4(workdir: Path, copy: Path) -> Path:
    shutil.copytree(workdir, copy)
    shutil.rmtree(copy / "checkpoints" / "8")
    return copy


def assert_same_result(workdir: Path, other: Path) -> None:
    (params, nats, data), (expected_params, expected_nats, expected_data) = result(workdir), result(other)
    for tree in (params, expected_params):  # shifts a whole row of scores: its gradient is only rounding error
        del tree["layers"]["attention"]["processor"]["output_bias_H"]
    chex.assert_trees_all_close(params, expected_params, atol=2e-5)
    assert nats == pytest.approx(expected_nats, abs=1e-5)
    assert data == expected_data == {"global_next_index": 64}


@pytest.mark.slow
def test_two_processes_are_one(root, tmp_path, one_process):
    """With parameters sharded over both, on a new corpus; then one process resumes the run of two."""
    new = (f"--config.data.cache_dir={tmp_path}/cache",)
    two = Run(root, tmp_path / "two", 2, *EIGHT_STEPS, *new)
    assert two.wait() == [0, 0], two.texts()
    assert_same_result(tmp_path / "two", one_process)
    shown, hidden = two.texts()
    assert "validation" in shown
    # Gloo's threads write these in pieces, which may interleave.
    assert not [line for line in hidden.splitlines() if line and not re.search(r"\[Gloo\]|peer ranks", line)]
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1

    one = Run(root, back_to_step_4(tmp_path / "two", tmp_path / "two_one"), 1, *EIGHT_STEPS, *new)
    assert one.wait() == [0], one.texts()
    assert_same_result(tmp_path / "two_one", one_process)

    # If one process cannot decode its part of a step, both skip the step.
    workdir = tmp_path / "two_damaged"
    shutil.copytree(tmp_path / "two", workdir)
    (workdir / "config.json").write_text("{")
    for file in (workdir / "checkpoints" / "8" / "params" / "ocdbt.process_1" / "d").iterdir():
        file.write_bytes(bytes(byte ^ 0x55 if place % 7 == 3 else byte for place, byte in enumerate(file.read_bytes())))
    two = Run(root, workdir, 2, *EIGHT_STEPS, *new)
    assert two.wait() == [0, 0], two.texts()
    assert (workdir / "damaged" / "8").is_dir()
    assert "step 8 is damaged and moved" in two.texts()[0]
    assert_same_result(workdir, one_process)


@pytest.mark.slow
def test_two_processes_resume_the_run_of_one_with_context_parallelism(root, tmp_path, one_process):
    workdir = back_to_step_4(one_process, tmp_path / "one_two")
    two = Run(root, workdir, 2, *EIGHT_STEPS, "--config.mesh.fsdp=1", "--config.mesh.context=4")
    assert two.wait() == [0, 0], two.texts()
    assert_same_result(workdir, one_process)


@pytest.mark.slow
def test_two_processes_stop_together_and_die_together(root, tmp_path):
    """SIGTERM to one process stops both at the same step; SIGKILL of one ends the other within half a minute."""
    workdir = tmp_path / "run"
    endless = (
        "--config.train.num_steps=100000",
        "--config.train.eval_interval=20",
        "--config.train.checkpoint_interval=20",
    )
    two = Run(root, workdir, 2, *endless)
    until(two, lambda: steps(workdir))
    two.processes[1].send_signal(signal.SIGTERM)
    assert two.wait() == [143, 143], two.texts()
    said = re.search(r"^stopped by SIGTERM after step (\d+), saved; the same command resumes$", two.texts()[0], re.M)
    assert said, two.texts()
    stopped_after = steps(workdir)[-1]
    assert int(said[1]) == stopped_after

    two = Run(root, workdir, 2, *endless)
    until(two, lambda: steps(workdir)[-1] > stopped_after)
    two.processes[1].kill()
    killed_at = time.monotonic()
    survivor, killed = two.wait(30)
    assert time.monotonic() - killed_at < 30
    assert survivor in (-signal.SIGABRT, 128 + signal.SIGABRT)  # by the runtime, or by a collective's error
    assert killed == -signal.SIGKILL
    assert checkpoint.restore_config(workdir)[0] == steps(workdir)[-1]


# ---- a wrong value on one process


def ending(run: Run) -> str:
    """Return the one line with which all processes of a run end, soon and with status 2."""
    started_at = time.monotonic()
    statuses, texts = run.wait(120), run.texts()
    assert statuses == [2] * len(statuses), texts
    assert time.monotonic() - started_at < 60, "the runtime's timeouts, and not an error"
    lines = {line for text in texts for line in text.splitlines() if line.startswith("error: ")}
    assert len(lines) == 1, texts
    assert [text.count("error: ") for text in texts] == [1] * len(texts), texts
    return lines.pop()


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--config.train.batch_size=0", "error: process 1: train.batch_size = 0: must be positive"),
        pytest.param(
            "--config.train.seed=7",
            "error: config: must be the same on all processes. train.seed: process 0 has 0, process 1 has 7",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--config.train.no=1",
            "error: process 1: --config.train.no=1: the config has no such field",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_config_on_one_process_ends_all(root, tmp_path, flag, expected):
    assert ending(Run(root, tmp_path / "run", 2, last_flags=(flag,))).startswith(expected)


LONELY = """
from dape_jax import command_line, distributed
distributed.JOIN_SECONDS = 2
def main(_):
    with distributed.distributed_runtime("127.0.0.1:{}", 2, 0):
        print("joined")
command_line.run(main)
"""


def test_a_process_that_no_other_joins_ends_with_one_line():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        code = LONELY.format(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"error: processes: not all have joined after 2 seconds.*\n", done.stderr), done.stderr


@pytest.mark.slow
def test_the_same_error_on_all_processes_names_none(root, tmp_path):
    assert ending(Run(root, tmp_path / "run", 2, "--config.no=1")).startswith("error: --config.no=1: ")


@pytest.mark.slow
def test_a_wrong_corpus_on_one_process_ends_all(root, tmp_path):
    """Relative paths lead to another corpus on process 1, or to none: its working directory differs."""
    here, there = tmp_path / "here", tmp_path / "there"
    for directory, words in ((here, "keys and values "), (there, "queries and keys ")):
        (directory / "text").mkdir(parents=True)
        for number in range(10):
            (directory / "text" / f"{number}.txt").write_text(f"{number} {words}" * 20)
    own = ("--config.data.path=text", "--config.data.cache_dir=cache")
    line = ending(Run(root, here / "run", 2, *own, last_directory=there))
    assert re.fullmatch(
        r"error: digest of the data: must be the same .* \w{12} on process 0, \w{12} on process 1", line
    )
    line = ending(Run(root, here / "run", 2, *own, last_directory=tmp_path))
    assert line.startswith("error: process 1: data.path = 'text': no files there")


@pytest.mark.slow
def test_processes_agree_on_the_steps_before_they_resume(root, tmp_path, one_process):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    shutil.copytree(one_process, here / "run")
    back_to_step_4(one_process, there / "run")
    line = ending(Run(root, here / "run", 2, *EIGHT_STEPS, "--workdir=run", last_directory=there))
    assert "'run'" in line
    assert (
        "['8', '4'] on process 0, ['4'] on process 1; is the workdir on a file system that all processes share?" in line
    )
    assert steps(here / "run") == [4, 8]


@pytest.mark.slow
def test_another_version_on_one_process_ends_all(root, tmp_path):
    """Change another package's version: ours may be next to train.py, whose directory is searched first."""
    metadata = tmp_path / "packages" / "optax-99.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: optax\nVersion: 99\n")
    line = ending(Run(root, tmp_path / "run", 2, last_path=metadata.parents[1]))
    assert re.fullmatch(r"error: process 1: optax = '99': must be '.*', the version of process 0", line), line


def until(run: Run, condition: Callable[[], object]) -> None:
    """Wait until the processes have fulfilled a condition."""
    end = time.monotonic() + 300
    while time.monotonic() < end and all(process.poll() is None for process in run.processes):
        try:
            if condition():
                return
        except FileNotFoundError:
            pass
        time.sleep(0.1)
    for process in run.processes:
        process.kill()
        process.wait()
    pytest.fail(str(run.texts()))


GLOO = (
    "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:5"
)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (ValueError(GLOO), True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: recvmsg:Connection reset by peer"), True),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes differ"), False),
        (ValueError("closed by peer"), False),
    ],
)
def test_a_lost_process_is_distinguished_from_a_bug(error, is_lost):
    assert distributed._is_lost_connection(error) == is_lost
