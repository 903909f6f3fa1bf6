"""Programs in processes of their own: Python with arguments, and `train.py` in one or several processes."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a program that imports this project's packages, on a CPU, with changes."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | changes


def run_python(
    *arguments: object, cwd: Path = ROOT, timeout: float = 600, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a directory, with changes of the `environment`."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Run:
    """`train.py` in some processes that share four devices.

    `last_flags`, `last_directory` and `last_path` apply only to the last process: more flags, another working
    directory, and a directory with Python packages.
    """

    def __init__(
        self,
        root: Path,
        workdir: object,
        num_processes: int,
        *more: str,
        last_flags: tuple[str, ...] = (),
        last_directory: Path | None = None,
        last_path: Path | None = None,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        variables = environment(
            JAX_NUM_CPU_DEVICES=str(4 // num_processes), JAX_COMPILATION_CACHE_DIR=str(root / "compiled")
        )
        directory = workdir.parent if isinstance(workdir, Path) else root
        self.logs = [directory / f"{Path(str(workdir)).name}.{i}.log" for i in range(num_processes)]
        self.processes = []
        for i, log in enumerate(self.logs):
            flags = [f"--coordinator={coordinator}", f"--num_processes={num_processes}", f"--process_id={i}"]
            command = [sys.executable, f"{ROOT}/train.py", f"--config={ROOT}/configs/quickstart.py"]
            command += [f"--workdir={workdir}", *arguments(root), *(flags if num_processes > 1 else []), *more]
            place = directory
            if i == num_processes - 1:
                command += last_flags
                place = last_directory or directory
                variables |= {} if last_path is None else {"PYTHONPATH": str(last_path)}
            with log.open("w") as file:
                self.processes.append(subprocess.Popen(command, cwd=place, env=variables, stdout=file, stderr=file))

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

    def until(self, condition: Callable[[], object], timeout: float = 300) -> None:
        """Wait until a condition is fulfilled; fail if a process ends before."""
        end = time.monotonic() + timeout
        while time.monotonic() < end and all(process.poll() is None for process in self.processes):
            if condition():
                return
            time.sleep(0.002)
        self.wait(0.0 if time.monotonic() >= end else 30)
        pytest.fail(str(self.texts()))


def arguments(root: Path) -> list[str]:
    """Return the flags of a tiny run on the text in `root`."""
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


def every(interval: int, num_steps: int) -> tuple[str, ...]:
    """Return the flags of a run of `num_steps`, with a validation and a checkpoint after every interval."""
    fields = {"num_steps": num_steps, "eval_interval": interval, "checkpoint_interval": interval}
    return tuple(f"--config.train.{name}={value}" for name, value in fields.items())


def steps(workdir: Path) -> list[int]:
    """Return the saved steps."""
    directory = workdir / "checkpoints"
    return (
        sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal()) if directory.exists() else []
    )


def losses(workdir: Path) -> list[tuple[int, float]]:
    """Return the loss of every step, in the order of `metrics.jsonl`."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["train/loss_nats"]) for line in lines if "train/loss_nats" in line]
