"""Kill a run again and again, and see that it ends with the same bits as one that nobody touched.

    python scripts/kill_test.py --kills=100 --seed=0

`train.py` trains a tiny model twice, with one command. The first run is left alone. The second is killed at random
moments, by SIGKILL or SIGTERM, and started again with the same command until it has ended; then the parameters, the
optimizer, the counters and the data position of both are compared, array by array and by their digests. The tally goes
to `results/survival/kill_test.json`. A life takes some seconds, most of them for imports.

What the run is at when a signal comes is read from a note that it keeps: the calls of three functions are counted
(`OBSERVED`), which is all that is not `train.py` itself. A save goes on in the background of the steps that follow;
whether one was under way is read from the files that it leaves half-written.
"""

import collections
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
from dape_jax.provenance import provenance

KILLS = flags.DEFINE_integer("kills", 100, "How often the run is killed.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")
OUTPUT = flags.DEFINE_string("output", "results/survival", "Directory of the JSON.")

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("start-up", "step", "validation", "save")
STEPS_A_LIFE = 8  # the most that pass before a kill; with a checkpoint after every second step, lives get on
PATIENCE_S = 300  # for what takes seconds, on a busy machine
ENDED, STOPPED = 0, 128 + signal.SIGTERM

OBSERVED = """
import os, runpy, sys
note, *sys.argv = sys.argv[1:]
note = os.open(note, os.O_WRONLY)
calls = dict.fromkeys(["step", "validation", "save"], 0)

def say(phase):
    os.pwrite(note, " ".join(map(str, [phase, *calls.values()])).ljust(64).encode(), 0)

def observed(function, phase):
    def call(*args, **kwargs):
        calls[phase] += 1
        say(phase)
        result = function(*args, **kwargs)
        say("step")
        return result
    return call

say("start-up")
from dape_jax.training import checkpoint, loop
make_train_step = loop.make_train_step
loop.make_train_step = lambda *args, **kwargs: observed(make_train_step(*args, **kwargs), "step")
make_validation = loop.make_validation
loop.make_validation = lambda *args, **kwargs: observed(make_validation(*args, **kwargs), "validation")
checkpoint.save = observed(checkpoint.save, "save")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Life:
    """One process of the run, from its start to its end."""

    def __init__(self, command: list[str], directory: Path):
        self.note, self.log = directory / "note", (directory / "log").open("w+")
        self.note.write_text("start-up 0 0 0")
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(directory / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        env = os.environ | cache | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        observed = [sys.executable, "-c", OBSERVED, str(self.note), *command]
        self.process = subprocess.Popen(observed, cwd=ROOT, env=env, stdout=self.log, stderr=self.log)
        self.started = time.monotonic()

    def at(self) -> tuple[str, dict[str, int]]:
        """What it is doing, and how many times it has done what."""
        phase, *calls = self.note.read_text().split()
        return phase, dict(zip(PHASES[1:], map(int, calls), strict=True))

    def wait_for(self, phase: str, calls: int, at_most_s: float = PATIENCE_S) -> None:
        """Return when the run is at a phase for the so many-th time in this life, or has ended, or after a time."""
        while self.process.poll() is None and time.monotonic() - self.started < at_most_s:
            if self.at()[1][phase] >= calls:
                return
            self.check_patience()
            time.sleep(0.0005)

    def check_patience(self) -> None:
        """Fail when a life takes longer than any should."""
        if time.monotonic() - self.started > PATIENCE_S:
            self.process.kill()
            raise RuntimeError(f"hangs in {self.at()}:\n{self.tail()}")

    def end(self) -> int:
        """Wait for the end; the status is one of those that a run in order has."""
        while self.process.poll() is None:
            self.check_patience()
            time.sleep(0.005)
        status = self.process.returncode
        if status not in (ENDED, STOPPED, -signal.SIGKILL, -signal.SIGTERM):
            raise RuntimeError(f"ended with status {status}:\n{self.tail()}")
        return status

    def tail(self) -> str:
        """The last of what it said."""
        self.log.seek(0)
        return self.log.read()[-5000:]


def main(_: list[str]) -> None:
    """Flags, then the test, then its tally."""
    with tempfile.TemporaryDirectory(prefix="kill_test_") as scratch:
        result = kill_test(Path(scratch), KILLS.value, SEED.value)
    result["provenance"] = provenance("orbax-checkpoint", "flax", "grain", "optax")
    output = Path(OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    (output / "kill_test.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def kill_test(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    """Train with and without kills, compare, and count what was hit.

    Args:
        directory: for text and runs.
        kills: how many.
        seed: of the moments.

    Raises:
        RuntimeError: a run hangs, fails, or ends with other bits.
    """
    text = directory / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"{number} scores of queries and keys, " * 40)
    num_steps = 12 * kills + 40  # SIGTERM is noticed within a second, in which a tiny model takes dozens of steps
    whole, killed = directory / "whole", directory / "killed"
    life = Life(command(directory, whole, num_steps), directory)
    life.wait_for("step", 1)
    start_up_s = time.monotonic() - life.started
    if life.end() != ENDED:
        raise RuntimeError(f"killed by someone else:\n{life.tail()}")

    draw = random.Random(seed)
    counts = {name: collections.Counter() for name in ("signals", "phases", "half_written", "statuses")}
    for _ in tqdm(range(kills), unit="kill"):
        life = Life(command(directory, killed, num_steps), directory)
        phase = draw.choice(PHASES)
        if phase == "start-up":
            life.wait_for("step", 1, at_most_s=draw.uniform(0, start_up_s))
        else:
            most = STEPS_A_LIFE if phase == "step" else STEPS_A_LIFE // 2
            life.wait_for(phase, draw.randint(1, most))
            time.sleep(draw.uniform(0, 0.2 if phase == "save" else 0.01))
        sent = draw.choice([signal.SIGKILL] * 3 + [signal.SIGTERM])
        life.process.send_signal(sent)
        hit = life.at()[0]
        is_half_written = any((killed / "checkpoints").glob("*.orbax-checkpoint-tmp"))
        status = life.end()
        if status == ENDED:
            raise RuntimeError(f"has ended before or in spite of {sent.name}:\n{life.tail()}")
        refuse_damage(killed, life)
        counts["signals"][sent.name] += 1
        counts["phases"][hit] += 1
        counts["half_written"]["a save was under way" if is_half_written else "none"] += 1
        counts["statuses"][str(status)] += 1
    life = Life(command(directory, killed, num_steps), directory)
    steps_left = num_steps - newest(killed)
    if life.end() != ENDED:
        raise RuntimeError(f"killed by someone else:\n{life.tail()}")
    refuse_damage(killed, life)
    num_arrays = compare(read(whole, num_steps), read(killed, num_steps))
    return {
        "kills": kills,
        "seed": seed,
        "steps": num_steps,
        "steps_after_the_last_kill": steps_left,
        "arrays_compared_bit_for_bit": num_arrays,
        "equal": True,
        **{name: dict(sorted(counter.items())) for name, counter in counts.items()},
    }


def refuse_damage(workdir: Path, life: Life) -> None:
    """Raise `RuntimeError` if the run has found a checkpoint damaged: a kill must not do that."""
    if (workdir / "damaged").exists():
        raise RuntimeError(f"a kill has damaged a checkpoint:\n{life.tail()}")


def command(directory: Path, workdir: Path, num_steps: int) -> list[str]:
    """A tiny run of `train.py`."""
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


def newest(workdir: Path) -> int:
    """The newest whole checkpoint; 0 where there is none."""
    return max((int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def read(workdir: Path, step: int) -> dict[str, Any]:
    """All that a checkpoint says of the state, as Orbax reads it."""
    arrays = {name: ocp.args.StandardRestore() for name in ("params", "opt_state", "health")}
    jsons = {name: ocp.args.JsonRestore() for name in ("data", "digests")}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        args = ocp.args.Composite(**arrays, **jsons)
        return dict(reader.restore(workdir.absolute() / "checkpoints" / str(step), args=args).items())


def compare(whole: dict[str, Any], killed: dict[str, Any]) -> int:
    """The number of arrays, all of them equal; and so are their digests and the position in the data.

    Raises:
        RuntimeError: something is not.
    """
    other = [name for name in ("data", "digests") if whole[name] != killed[name]]
    arrays = [jax.tree_util.tree_leaves_with_path({k: v for k, v in run.items() if k not in ("data", "digests")})
              for run in (whole, killed)]  # fmt: skip
    for (path, one), (_, two) in zip(*arrays, strict=True):
        if np.asarray(one).tobytes() != np.asarray(two).tobytes():
            other.append(jax.tree_util.keystr(path))
    if other:
        raise RuntimeError(f"not the same bits as without kills: {other}")
    return len(arrays[0])


if __name__ == "__main__":
    command_line.run(main)
