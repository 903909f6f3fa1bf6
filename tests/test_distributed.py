"""Several processes: joining, stopping together, dying together, and the same results as one process."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Run, environment, every, losses, run_python, steps

from dape_jax import distributed
from dape_jax.config import RunConfig
from dape_jax.distributed import PreemptionGuard
from dape_jax.errors import InputError, StoppedError
from dape_jax.files import read_json
from dape_jax.sharding import MeshConfig, make_mesh
from dape_jax.training import checkpoint, loop
from dape_jax.training.metrics import read_metrics
from dape_jax.training.step import abstract_params

# ---- joining


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("localhost:1234", None, None), ["--num_processes, --process_id", "must be set together"]),
        ((None, 2, 0), ["--coordinator", "must be set together"]),
        (("localhost", 2, 0), ["--coordinator", "'localhost'", "host:port"]),
        (("localhost:65536", 2, 0), ["--coordinator", "host:port"]),
        ((":1234", 2, 0), ["--coordinator", "host:port"]),
        (("localhost:1234", 0, 0), ["--process_id", "0", "--num_processes = 0"]),
        (("localhost:1234", 2, -1), ["--process_id", "-1", "--num_processes = 2"]),
    ],
)
def test_incomplete_or_wrong_flags_are_refused(monkeypatch, flags, words):
    monkeypatch.setattr(jax.distributed, "initialize", None)  # calling it would be a TypeError
    with pytest.raises(InputError) as error:
        distributed.join(*flags)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.extra
def test_an_incomplete_environment_is_refused():
    code = "import dape_jax.distributed as d; d.join(None, None, None)"
    done = run_python("-c", code, JAX_COORDINATOR_ADDRESS="localhost:1234")
    assert re.search(r"InputError: JAX_COORDINATOR_ADDRESS = 'localhost:1234': .*three flags", done.stderr), done.stderr


SEVERAL = """
import sys
import time
from pathlib import Path
import jax
from dape_jax import command_line, distributed
from dape_jax.errors import InputError, StoppedError

def refuse():
    raise InputError("text = 'a': of process 0" if jax.process_index() == 0 else "not raised")

def main():
    distributed.join(None, None, None)
    note = lambda: Path("order").open("a").write(str(jax.process_index()))
    distributed.process_zero_only(note)
    if jax.process_index() == 1:
        note()
    facts = {"a": {"b": jax.process_index(), "c": 1}}
    for agree in (
        lambda: distributed.process_zero_only(refuse),
        lambda: distributed.require_same(text="same", config=facts),
    ):
        try:
            agree()
        except InputError as error:
            print(error, flush=True)
    print(distributed.first_fault("fault of 1" if jax.process_index() == 1 else ""), flush=True)
    distributed._MINUTE = 1
    time.sleep(2.5 * jax.process_index())
    distributed.wait_for_all("thinking")
    distributed.require_same(text="same")
    raise StoppedError("stopped")

command_line.run(main)
"""


@pytest.mark.extra
def test_processes_started_by_a_cluster_join_and_agree(tmp_path):
    """In SLURM's environment: process 0 goes first, its errors are raised on all, and all end with one status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    cluster |= {"JAX_COORDINATOR_PORT": str(port)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SEVERAL],
            cwd=tmp_path,
            env=environment(**cluster, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)),
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
    assert ["thinking: waiting for process 1" in text for text in err] == [True, False]
    for text in out:
        refused, differs, fault = (line for line in text.splitlines() if "Gloo" not in line)
        assert refused == "text = 'a': of process 0"
        assert differs == "must be the same on all processes: config.a.b: process 0 has 0, process 1 has 1"
        assert fault == "fault of 1"


@given(seconds=st.integers(1, 50), step_seconds=st.integers(1, 60), start=st.integers(0, 9))
@settings(max_examples=30)
def test_a_timer_is_due_as_soon_as_the_time_has_passed_and_asks_seldom(seconds, step_seconds, start):
    clock, asked = [0.0], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed.time, "monotonic", lambda: clock[0])
        patch.setattr(distributed.multihost_utils, "broadcast_one_to_all", lambda x: asked.append(x) or x)
        timer, due = distributed.SharedTimer(seconds, start), []
        for step in range(start + 1, start + 101):
            clock[0] += step_seconds
            due += [step] if timer.is_due(step) else []
    interval = max(1, -(-seconds // step_seconds))
    assert due == list(range(start + interval, start + 101, interval))
    assert len(asked) <= (len(due) + 1) * (3 + interval.bit_length())
    assert not distributed.SharedTimer(None, 0).is_due(10**9)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_program_for_one_process_refuses_several(monkeypatch, name):
    distributed.require_single_process()
    monkeypatch.setenv(name, "2")
    with pytest.raises(InputError, match=f"{name} = '2': must be 1: .*one process"):
        distributed.require_single_process()


# ---- stopping


def test_a_signal_to_a_single_process_is_noticed_and_the_handlers_restored():
    """A second SIGTERM ends the process at once; a second SIGUSR1, which SLURM may send, does not."""
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    for sent in (signal.SIGTERM, signal.SIGUSR1):
        with PreemptionGuard() as preemption:
            assert not preemption.should_stop(7)
            os.kill(os.getpid(), sent)
            assert preemption.should_stop(8)
            assert preemption.signal == sent
            assert (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) == (sent == signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preemption.should_stop(8)
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_stop_names_the_signal(trained_root, tmp_path, monkeypatch):
    monkeypatch.setattr(
        PreemptionGuard, "should_stop", lambda guard, step: guard._tell(signal.SIGUSR1, None) or guard.is_told
    )
    spec = tiny.spec(trained_root, train__num_steps=4)
    with pytest.raises(StoppedError, match=r"^stopped by SIGUSR1 before step 1; the same command resumes$") as error:
        loop.train(spec, tmp_path / "run")
    assert error.value.number == signal.SIGUSR1


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
        patch.setattr(jax, "process_count", lambda: 2)
        preemption = PreemptionGuard()
        stops = [step for step in range(start, start + num_steps + 1) if preemption.should_stop(step)]
    expected = max(start, noticed_at + 1)
    assert stops == ([expected] if expected <= start + num_steps else [])


# ---- real processes


EIGHT_STEPS = every(4, 8)


@pytest.fixture(scope="module")
def one_process(trained_root, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("one") / "run"
    one = Run(trained_root, workdir, 1, *EIGHT_STEPS)
    assert one.wait() == [0], one.texts()
    return workdir


def back_to_step_4(workdir: Path, copy: Path) -> Path:
    shutil.copytree(workdir, copy)
    shutil.rmtree(copy / "checkpoints" / "8")
    return copy


def assert_same_result(workdir: Path, other: Path) -> None:
    """Compare the parameters after 8 steps, the validation loss and the position in the data."""
    mesh, params, nats = make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1]), [], []
    for each in (workdir, other):
        run = RunConfig.from_dict(checkpoint.restore_config(each, "8")[1]["config"])
        params.append(jax.device_get(checkpoint.restore_params(each, 8, abstract_params(run.model, mesh))))
        # shifts a whole row of scores: its gradient is only rounding error
        del params[-1]["layers"]["attention"]["processor"]["output_bias_H"]
        nats.append(read_metrics(each)["validation/loss_nats"][8])
        assert read_json(each / "checkpoints" / "8" / "data" / "metadata") == {"global_next_index": 64}
    chex.assert_trees_all_close(*params, atol=2e-5)
    assert nats[0] == pytest.approx(nats[1], abs=1e-5)


@pytest.mark.slow
def test_two_processes_are_one(trained_root, tmp_path, one_process):
    """With parameters sharded over both, on a new corpus; then one process resumes the run of two."""
    new = (f"--config.data.cache_dir={tmp_path}/cache",)
    two = Run(trained_root, tmp_path / "two", 2, *EIGHT_STEPS, *new)
    assert two.wait() == [0, 0], two.texts()
    assert_same_result(tmp_path / "two", one_process)
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1
    assert [step for step, _ in losses(tmp_path / "two")] == list(range(1, 9))

    one = Run(trained_root, back_to_step_4(tmp_path / "two", tmp_path / "two_one"), 1, *EIGHT_STEPS, *new)
    assert one.wait() == [0], one.texts()
    assert_same_result(tmp_path / "two_one", one_process)

    # If one process cannot decode its part of a step, both skip the step. They resume with context parallelism.
    workdir = tmp_path / "two_damaged"
    shutil.copytree(tmp_path / "two", workdir)
    for file in (workdir / "checkpoints" / "8" / "params" / "ocdbt.process_1" / "d").iterdir():
        file.write_bytes(bytes(byte ^ 0x55 if place % 7 == 3 else byte for place, byte in enumerate(file.read_bytes())))
    two = Run(trained_root, workdir, 2, *EIGHT_STEPS, *new, "--config.mesh.fsdp=1", "--config.mesh.context=4")
    assert two.wait() == [0, 0], two.texts()
    assert (workdir / "damaged" / "8").is_dir()
    assert "step 8 is damaged and moved" in two.texts()[0]
    assert_same_result(workdir, one_process)


@pytest.mark.slow
def test_two_processes_stop_together_and_die_together(trained_root, tmp_path):
    """A signal to one process stops both at the same step; SIGKILL of one ends the other within half a minute."""
    workdir = tmp_path / "run"
    endless = every(4, 100_000)
    two = Run(trained_root, workdir, 2, *endless)
    two.until(lambda: steps(workdir))
    two.processes[1].send_signal(signal.SIGUSR1)
    assert two.wait() == [128 + signal.SIGTERM, 128 + signal.SIGUSR1], two.texts()
    stopped_after = steps(workdir)[-1]
    for text, name in zip(two.texts(), ("SIGTERM", "SIGUSR1"), strict=True):
        said = re.search(rf"^stopped by {name} after step (\d+), saved; the same command resumes$", text, re.M)
        assert said, two.texts()
        assert int(said[1]) == stopped_after

    two = Run(trained_root, workdir, 2, *endless)
    two.until(lambda: steps(workdir)[-1] > stopped_after)
    two.processes[1].kill()
    killed_at = time.monotonic()
    survivor, killed = two.wait(30)
    assert time.monotonic() - killed_at < 30
    # By a collective's error, or by a signal: the runtime aborts, and has crashed while Python was exiting. It aborts
    # with EnforceNotMet if one device of the survivor has given up and its next collective meets the other's last one.
    assert survivor != 0
    assert re.search("another task died|Gloo .* failed|gloo::EnforceNotMet", two.texts()[0]), two.texts()
    assert killed == -signal.SIGKILL
    assert checkpoint.restore_config(workdir)[0] == steps(workdir)[-1]


# ---- a difference between processes


def ending(run: Run) -> str:
    """Return the one line with which both processes of a run end, with status 2."""
    statuses, texts = run.wait(120), run.texts()
    assert statuses == [2, 2], texts
    lines = [line for text in texts for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2, texts
    assert len(set(lines)) == 1, texts
    return lines[0]


@pytest.mark.extra
def test_a_difference_between_processes_is_named_on_both(trained_root, tmp_path):
    """Check another package's version too: ours may be next to train.py, whose directory is searched first."""
    metadata = tmp_path / "packages" / "optax-99.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: optax\nVersion: 99\n")
    flags, path = ("--config.train.seed=7",), metadata.parents[1]
    line = ending(Run(trained_root, tmp_path / "run", 2, last_flags=flags, last_path=path))
    assert line.startswith(
        "error: must be the same on all processes: config.train.seed: process 0 has 0, process 1 has 7"
    )
    assert line.endswith("process 1 has '99'")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_agree_on_the_data_and_the_steps(trained_root, tmp_path, one_process):
    """Relative paths lead to another corpus and another workdir on process 1: its working directory differs."""
    here, there = tmp_path / "here", tmp_path / "there"
    for directory, words in ((here, "keys and values "), (there, "queries and keys ")):
        (directory / "text").mkdir(parents=True)
        for number in range(10):
            (directory / "text" / f"{number}.txt").write_text(f"{number} {words}" * 20)
    own = ("--config.data.path=text", "--config.data.cache_dir=cache")
    line = ending(Run(trained_root, here / "run", 2, *own, last_directory=there))
    assert re.search(r"data_digest: process 0 has '\w{64}', process 1 has '\w{64}'", line), line
    shutil.copytree(one_process, here / "run")
    back_to_step_4(one_process, there / "run")
    line = ending(Run(trained_root, here / "run", 2, *EIGHT_STEPS, "--workdir=run", last_directory=there))
    assert "saved_steps: process 0 has ['8', '4'], process 1 has ['4']" in line
    assert steps(here / "run") == [4, 8]
