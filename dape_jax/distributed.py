"""Several processes in one run: joining, doing work once, agreeing, and stopping together.

In: flags, or a cluster's environment variables. Out: jax's distributed runtime. Next: `training/loop.py`.

A process that fails prints its error and ends. jax's runtime then ends the others within half a minute, with its own
message. `docs/distributed.md` explains how to resume.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dape_jax.config import differences
from dape_jax.errors import InputError, StoppedError, require

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

# A process without a heartbeat for this long counts as dead; a failed process waits this long for the others to shut
# down. The sum is less than half a minute.
TIMEOUTS: dict[str, Any] = {"heartbeat_timeout_seconds": 20, "shutdown_timeout_seconds": 8}

# The processes wait for each other, where one compiles or prepares text, for at most four hours: one minute at a time,
# to log who is late.
_MINUTE, _MOST_MINUTES = 60, 240
_barriers = itertools.count()  # their numbers are the same on all processes


def join(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Join the other processes of a run, before any device is used; return at once if this process is alone.

    `coordinator` is the host:port of process 0. Without arguments, jax detects a cluster from the environment (SLURM, a
    TPU pod, Open MPI, ..).

    Raises:
        InputError: the arguments or the environment are incomplete or out of range.
    """
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    require(len(missing) in (0, 3), ", ".join(missing), None, f"must be set together with the others of {list(given)}")
    os.environ.setdefault("grpc_proxy", "")  # otherwise gRPC connects to its own host through an HTTP proxy, and hangs
    jax.config.update("jax_check_proxy_envs", False)
    if coordinator is not None and num_processes is not None and process_id is not None:
        host, _, port = coordinator.rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
        require(bool(host) and is_port, "--coordinator", coordinator, "must be the host:port of process 0")
        allowed = f"must be at least 0 and below --num_processes = {num_processes}"
        require(0 <= process_id < num_processes, "--process_id", process_id, allowed)
        jax.distributed.initialize(
            coordinator, num_processes, process_id, cluster_detection_method="deactivate", **TIMEOUTS
        )
    else:
        try:
            jax.distributed.initialize(**TIMEOUTS)
        except ValueError as error:  # jax could not determine the address, number of processes or process id
            address = os.environ.get("JAX_COORDINATOR_ADDRESS")
            require(address is None, "JAX_COORDINATOR_ADDRESS", address, f"{error} Give the three flags instead")
            return
    if jax.process_index() > 0:
        logging.getLogger("dape_jax").setLevel(logging.WARNING)


def process_zero_only(work: Callable[[], Result]) -> Result | None:
    """Run `work` on process 0 while the other processes wait. Return its result, or None on the others.

    Raises:
        InputError: raised by `work`; it is raised on all processes.
    """
    if jax.process_count() == 1:
        return work()
    result, fault = None, ""
    if jax.process_index() == 0:
        try:
            result = work()
        except InputError as error:
            fault = str(error)
    if fault := first_fault(fault):
        raise InputError(fault)
    return result


def first_fault(fault: str) -> str:
    """Return the same message on all processes: that of the first process with a message, or "" if there is none."""
    return next(filter(None, _texts_of_all(fault)), "")


def _texts_of_all(text: str) -> list[str]:
    if jax.process_count() == 1:
        return [text]
    wait_for_all("start-up")
    encoded = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.uint32(encoded.size)))
    if not sizes.any():
        return [""] * len(sizes)
    rows = np.asarray(multihost_utils.process_allgather(np.pad(encoded, (0, sizes.max() - encoded.size))), np.uint8)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def wait_for_all(work: str) -> None:
    """Wait until all processes have finished some work, which may take one of them much longer than the others.

    It is a barrier of jax's coordination service. In a collective of the devices, the first processes would give up
    after the backend's own, shorter timeout. Each minute, the first process that waits logs which are late.

    Raises:
        JaxRuntimeError: a process has died, or is late by four hours.
    """
    if jax.process_count() == 1:
        return
    number, everyone = next(_barriers), set(range(jax.process_count()))
    for minute in range(_MOST_MINUTES):
        try:  # a process that is late fails at once in the barriers of earlier minutes
            name = f"dape_jax {number} {minute}"
            return ocp.multihost.sync_global_processes(name, timeout=_MINUTE, processes=everyone)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or minute == _MOST_MINUTES - 1:
                raise
            late = {int(process) for process in re.findall(r"^\d+$", str(error), re.M)}
            if jax.process_index() == min(everyone - late):
                logger.warning("%s: waiting for process %s", work, ", ".join(map(str, sorted(late))))


class SharedTimer:
    """Agreement of all processes on the steps at which some time has passed on process 0.

    The processes communicate at few steps: when half of the steps that fit into the remaining time are done.
    """

    def __init__(self, seconds: float | None, start: int):
        """Start the time after step `start`; it never passes if `seconds` is None."""
        self.seconds, self.started_at, self.start, self.next = seconds, time.monotonic(), start, start + 1

    def is_due(self, step: int) -> bool:
        """Return whether the time has passed, and start it again. All processes must ask after each step."""
        if self.seconds is None or step < self.next:
            return False
        elapsed = float(multihost_utils.broadcast_one_to_all(np.float32(time.monotonic() - self.started_at)))
        if elapsed >= self.seconds:
            self.started_at, self.start, self.next = time.monotonic(), step, step + 1
            return True
        self.next = step + max(1, int((self.seconds / elapsed - 1) * (step - self.start) / 2))
        return False


def require_same(**facts: Any) -> None:
    """Raise `InputError` on all processes unless all have the same JSON values; the message names the differences.

    require_same(config=config, versions=versions)
    """
    first, *others = map(json.loads, _texts_of_all(json.dumps(facts)))
    for process, other in enumerate(others, 1):
        if lines := differences(first, other, names=("process 0 has", f"process {process} has")):
            raise InputError(f"must be the same on all processes: {'; '.join(lines)}")


def require_single_process() -> None:
    """Raise `InputError` if a launcher has started several processes of a single-process program."""
    message = "must be 1: this program runs in one process"
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        require(os.environ.get(name, "1") == "1", name, os.environ.get(name), message)


class PreemptionGuard(contextlib.ExitStack):
    """Agreement of all processes on the step after which SIGTERM or SIGUSR1 to any of them stops the run.

    with PreemptionGuard() as preemption:  # from here on, the first SIGTERM and no SIGUSR1 end the process

    `signal` is the one that this process received, or SIGTERM if another process received one.

    With several processes, jax chooses, in the background, a step number that no process has queried yet, and returns
    True for that number only. The queried numbers must therefore be consecutive from 1: a run that resumes at step 500
    first queries the steps before it.
    """

    def __init__(self):
        super().__init__()
        self.is_alone, self.is_told, self.num_asked = jax.process_count() == 1, False, 0
        self.signal = signal.SIGTERM
        handled = (signal.SIGUSR1, *([signal.SIGTERM] if self.is_alone else []))  # jax handles it in several processes
        for each in handled:
            self.callback(signal.signal, each, signal.signal(each, self._tell))

    def _tell(self, number: int, _: object) -> None:
        is_first, self.is_told, self.signal = not self.is_told, True, signal.Signals(number)
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another SIGTERM ends the process at once
        elif is_first and not self.is_alone:
            os.kill(os.getpid(), signal.SIGTERM)  # jax tells the others

    def should_stop(self, step: int) -> bool:
        """Return whether to save and stop after this step."""
        stop = self.is_told and self.is_alone
        while not self.is_alone and self.num_asked < step:
            self.num_asked += 1
            stop |= multihost_utils.reached_preemption_sync_point(self.num_asked)
        if stop and not self.is_alone:
            self.is_told = True  # a later SIGUSR1 must not end the process
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax would log the SIGTERM several times
        return stop

    def stopped(self, where: str) -> StoppedError:
        """Return the error that ends the run at this place, such as "after step 3, saved"."""
        return StoppedError(f"stopped by {self.signal.name} {where}; the same command resumes", self.signal)
