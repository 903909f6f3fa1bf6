"""Kill a training run repeatedly, and check that it ends bitwise equal to an uninterrupted run.

    python scripts/kill_test.py --kills=100
    python scripts/kill_test.py --kills=20 --storage=s3 --fail=0.01 --slow=0.02
    python scripts/kill_test.py --kills=25 --processes=2

`train.py` trains a tiny model twice with the same command. The first run is uninterrupted. The second run is killed at
random times, with SIGKILL or SIGTERM, and restarted with the same command. After the last kill it runs to its end. Then
the parameters, optimizer states, counters and positions in the data of both runs are compared, array by array and by
their digests. The counts are written to OUTPUT/kill_test.json, or with the flags above to OUTPUT/kill_test_s3.json and
OUTPUT/kill_test_2_processes.json. Each restart takes several seconds, mostly for imports. Needs the extra `dev`.

With `--storage`, the workdir of the second run is in a bucket of `object_storage.py`, where requests may fail; that of
the first run is on the local disk. With `--processes`, one process is killed, and the others must also end before all
are restarted.

The phase in which a signal arrives is read from the process's phase file: `OBSERVED` runs `train.py` with three
functions wrapped to write the phase and the number of calls to this file. A save continues in the background during the
next steps; unfinished files show whether a save was in progress.
"""

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.files import write_json
from dape_jax.provenance import make_results_directory, provenance
from dape_jax.storage import AnyPath, absolute, is_remote, list_directory, to_path
from dape_jax.training.checkpoint import step_names

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import object_storage  # noqa: E402

KILLS = flags.DEFINE_integer("kills", 100, "Number of kills.", lower_bound=1)
STORAGE = flags.DEFINE_enum("storage", "local", ["local", "s3", "gs"], "Storage of the killed run's workdir.")
PROCESSES = flags.DEFINE_integer("processes", 1, "Number of processes of each run.", lower_bound=1)
OUTPUT = flags.DEFINE_string("output", "results/survival", "Directory of the JSON.")

PHASES = ("start-up", "step", "validation", "save")
MAX_STEPS = 8  # maximum steps before a kill; with a checkpoint every second step, most restarts make progress
TIMEOUT_S = 300  # without a change of the phase file; a phase takes seconds on an idle machine
ENDED, STOPPED, LOST = 0, 128 + signal.SIGTERM, 128 + signal.SIGABRT  # exit statuses
OTHERS_TIMEOUT_S = 40  # until the other processes of a run end after one was killed

OBSERVED = """
import os, runpy, sys
phase_file, *sys.argv = sys.argv[1:]
phase_file = os.open(phase_file, os.O_WRONLY)
calls = dict.fromkeys(["step", "validation", "save"], 0)

def report(phase):
    os.pwrite(phase_file, " ".join(map(str, [phase, *calls.values()])).ljust(64).encode(), 0)

def observed(function, phase):
    def call(*args, **kwargs):
        calls[phase] += 1
        report(phase)
        result = function(*args, **kwargs)
        report("step")
        return result
    return call

report("start-up")
from dape_jax.training import checkpoint, loop
make_train_step = loop.make_train_step
loop.make_train_step = lambda *args, **kwargs: observed(make_train_step(*args, **kwargs), "step")
make_validation = loop.make_validation
loop.make_validation = lambda *args, **kwargs: observed(make_validation(*args, **kwargs), "validation")
checkpoint.save = observed(checkpoint.save, "save")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Process:
    """One process of a run."""

    def __init__(self, command: list[str], directory: Path, number: int = 0):
        self.phase_file, self.log = directory / f"phase{number}", (directory / f"log{number}").open("w+")
        self.phase_file.write_text("start-up 0 0 0")
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(directory / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        env = os.environ | cache | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        observed = [sys.executable, "-c", OBSERVED, str(self.phase_file), *command]
        self.popen = subprocess.Popen(observed, cwd=ROOT, env=env, stdout=self.log, stderr=self.log)
        self.started = self.changed_at = time.monotonic()
        self.last_content = ""

    def at(self) -> tuple[str, dict[str, int]]:
        """Return the current phase, and the number of times that each phase was entered."""
        phase, *calls = self.phase_file.read_text().split()
        return phase, dict(zip(PHASES[1:], map(int, calls), strict=True))

    def wait_for(self, phase: str, calls: int, at_most_s: float = TIMEOUT_S) -> None:
        """Wait until the process has entered a phase `calls` times, has ended, or is `at_most_s` seconds old."""
        while self.popen.poll() is None and time.monotonic() - self.started < at_most_s:
            if self.at()[1][phase] >= calls:
                return
            self.check_timeout()
            time.sleep(0.0005)

    def check_timeout(self) -> None:
        """Kill the process and raise `RuntimeError` if its phase file has not changed for `TIMEOUT_S`."""
        if (content := self.phase_file.read_text()) != self.last_content:
            self.last_content, self.changed_at = content, time.monotonic()
        if time.monotonic() - self.changed_at > TIMEOUT_S:
            self.popen.kill()
            raise RuntimeError(f"hangs in {self.at()}:\n{self.tail()}")

    def end(self, *more: int) -> int:
        """Wait for the end and return the exit status; raise `RuntimeError` if it is neither expected nor in `more`."""
        while self.popen.poll() is None:
            self.check_timeout()
            time.sleep(0.005)
        status = self.popen.returncode
        if status not in (ENDED, STOPPED, -signal.SIGKILL, -signal.SIGTERM, *more):
            raise RuntimeError(f"ended with status {status}:\n{self.tail()}")
        return status

    def end_after_another(self) -> int:
        """Wait for the end after another process of the run has ended, and return the exit status.

        A process that waits for the others to join would wait for minutes; this function kills it, as a launcher does.
        """
        end = time.monotonic() + OTHERS_TIMEOUT_S
        while self.popen.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        self.popen.kill()
        # jax's runtime may abort it at any line; faulthandler may then crash while printing the stacks.
        return self.end(LOST, -signal.SIGABRT, -signal.SIGSEGV)

    def tail(self) -> str:
        """Return the end of the log."""
        self.log.seek(0)
        return self.log.read()[-5000:]


def main(_: list[str]) -> None:
    """Run the test, and write and print its counts."""
    output = make_results_directory(Path(OUTPUT.value))
    storage_suffix = "" if STORAGE.value == "local" else f"_{STORAGE.value}"
    processes_suffix = "" if PROCESSES.value == 1 else f"_{PROCESSES.value}_processes"
    faults = object_storage.Faults(object_storage.FAIL.value, object_storage.SLOW.value, object_storage.SEED.value)
    with tempfile.TemporaryDirectory(prefix="kill_test_") as scratch, contextlib.ExitStack() as stack:
        workdir = to_path(f"{scratch}/killed", "workdir")
        if STORAGE.value != "local":
            os.environ.update(stack.enter_context(object_storage.servers(faults)))
            workdir = to_path(f"{STORAGE.value}://{object_storage.BUCKET}/killed", "workdir")
        result = kill_test(Path(scratch), workdir, KILLS.value, object_storage.SEED.value, PROCESSES.value)
    if STORAGE.value != "local":
        result["requests"] = {"all": faults.num_requests, "failed": faults.num_failed, "slow": faults.num_slow}
    result["provenance"] = provenance("orbax-checkpoint", "flax", "grain", "optax")
    write_json(output / f"kill_test{storage_suffix}{processes_suffix}.json", result)
    print(json.dumps(result, indent=2), flush=True)
    os._exit(0)  # do not wait for the threads of the servers


def start(command: list[str], directory: Path, processes: int) -> list[Process]:
    """Start all processes of a run."""
    if processes == 1:
        return [Process(command, directory)]
    runtime = [f"--coordinator=127.0.0.1:{object_storage.free_port()}", f"--num_processes={processes}"]
    return [Process([*command, *runtime, f"--process_id={number}"], directory, number) for number in range(processes)]


def kill_test(directory: Path, killed: AnyPath, kills: int, seed: int, processes: int) -> dict[str, Any]:
    """Train with and without kills, compare the results, and return counts of signals and phases.

    Args:
        directory: directory for the text, the uninterrupted run and logs.
        killed: workdir of the killed run.
        kills: number of kills.
        seed: seed of the random phases, times and signals.
        processes: number of processes of each run.

    Raises:
        RuntimeError: a run hangs, fails, finds a damaged checkpoint, or ends with different bits.
    """
    text = directory / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"{number} scores of queries and keys, " * 40)
    # The run must not end before the last kill. SIGTERM is detected within a second, in which a tiny model takes dozens
    # of steps, but few with saves to a bucket.
    num_steps = (6 if is_remote(killed) else 12) * kills + 40
    whole = directory / "whole"
    begun = time.monotonic()
    run = start(command(directory, whole, num_steps), directory, processes)
    run[0].wait_for("step", 1)
    start_up_s = time.monotonic() - begun
    end_all(run)

    draw = random.Random(seed)
    counts = {name: collections.Counter() for name in ("signals", "phases", "half_written", "statuses", "of_others")}
    begun = time.monotonic()
    for _ in tqdm(range(kills), unit="kill"):
        run = start(command(directory, killed, num_steps), directory, processes)
        process = draw.choice(run)
        phase = draw.choice(PHASES)
        if phase == "start-up":
            process.wait_for("step", 1, at_most_s=draw.uniform(0, start_up_s))
        else:
            most = MAX_STEPS if phase == "step" else MAX_STEPS // 2
            process.wait_for(phase, draw.randint(1, most))
            time.sleep(draw.uniform(0, 0.2 if phase == "save" else 0.01))
        sent = draw.choice([signal.SIGKILL] * 3 + [signal.SIGTERM])
        process.popen.send_signal(sent)
        hit = process.at()[0]
        is_half_written = unfinished(killed)
        status = process.end()
        if status == ENDED:
            raise RuntimeError(f"ended before or despite {sent.name}:\n{process.tail()}")
        counts["of_others"].update(str(other.end_after_another()) for other in run if other is not process)
        refuse_damage(killed, process)
        counts["signals"][sent.name] += 1
        counts["phases"][hit] += 1
        counts["half_written"]["a save was in progress" if is_half_written else "none"] += 1
        counts["statuses"][str(status)] += 1
    seconds = round(time.monotonic() - begun)
    steps_left = num_steps - int(next(iter(step_names(killed)), 0))
    run = start(command(directory, killed, num_steps), directory, processes)
    end_all(run)
    refuse_damage(killed, run[0])
    num_arrays = compare(read(whole, num_steps), read(killed, num_steps))
    return {
        "kills": kills,
        "seed": seed,
        "storage": STORAGE.value,
        "processes": processes,
        "seconds_of_kills": seconds,
        "steps": num_steps,
        "steps_after_the_last_kill": steps_left,
        "arrays_compared_bit_for_bit": num_arrays,
        "equal": True,
        **{name: dict(sorted(counter.items())) for name, counter in counts.items()},
    }


def end_all(run: list[Process]) -> None:
    """Wait until all processes of a run have ended; raise `RuntimeError` if one was killed or failed."""
    for process in run:
        if process.end() != ENDED:
            raise RuntimeError(f"stopped by a signal that the test did not send:\n{process.tail()}")


def unfinished(workdir: AnyPath) -> bool:
    """Return whether an incomplete step exists, which means that a save is in progress."""
    entries = list_directory(workdir / "checkpoints")
    if is_remote(workdir):
        return any(name.isdecimal() for name in set(entries) - set(step_names(workdir)))
    return any(name.endswith(".orbax-checkpoint-tmp") for name in entries)


def refuse_damage(workdir: AnyPath, process: Process) -> None:
    """Raise `RuntimeError` if the run found a damaged checkpoint: a kill must not cause damage."""
    if list_directory(workdir / "damaged"):
        raise RuntimeError(f"a kill has damaged a checkpoint:\n{process.tail()}")


def command(directory: Path, workdir: AnyPath, num_steps: int) -> list[str]:
    """Return the command line of the tiny run."""
    fields = {
        "model.num_layers": 2,
        "model.width": 16,
        "model.num_heads": 2,
        "data.path": directory / "text",
        "data.cache_dir": directory / "data",
        "data.validation_fraction": 0.3,
        "train.train_length": 32,
        "train.batch_size": 8,
        "train.num_steps": num_steps,
        "train.eval_interval": 2,
        "train.validation_batches": 4,
        "train.checkpoint_interval": 2,
    }
    flags = [f"--config.{field}={value}" for field, value in fields.items()]
    return ["train.py", "--config=configs/quickstart.py", f"--workdir={workdir}", *flags]


def read(workdir: AnyPath, step: int) -> dict[str, Any]:
    """Return the state, position in the data and digests of a checkpoint, also of one saved by several processes."""
    directory = absolute(workdir) / "checkpoints" / str(step)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        jsons = {name: ocp.args.JsonRestore() for name in ("data", "digests")}
        found = dict(reader.restore(directory, args=ocp.args.Composite(**jsons)).items())
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        for name in ("params", "opt_state", "health"):
            tree = reader.metadata(directory / name).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            found[name] = reader.restore(directory / name, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return found


def compare(whole: dict[str, Any], killed: dict[str, Any]) -> int:
    """Return the number of arrays, after checking that arrays, digests and positions in the data are bitwise equal.

    Raises:
        RuntimeError: they differ.
    """
    other = [name for name in ("data", "digests") if whole[name] != killed[name]]
    arrays = [jax.tree_util.tree_leaves_with_path({k: v for k, v in run.items() if k not in ("data", "digests")})
              for run in (whole, killed)]  # fmt: skip
    for (path, one), (_, two) in zip(*arrays, strict=True):
        if np.asarray(one).tobytes() != np.asarray(two).tobytes():
            other.append(jax.tree_util.keystr(path))
    if other:
        raise RuntimeError(f"not bitwise equal to the run without kills: {other}")
    return len(arrays[0])


if __name__ == "__main__":
    command_line.run(main)
