"""Several processes in one run: joining, doing work once, agreeing on errors, and stopping together.

In: flags, or what a cluster sets in the environment. Out: jax's distributed runtime, also for one process.
Next: `training/loop.py`.

When a process dies, the runtime ends the others within half a minute: by SIGABRT, from a thread of its own, without
running any Python code. `docs/running.md` says how to resume.
"""

import contextlib
import hashlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dape_jax.errors import InputError, NonFiniteError, StoppedError, require

Result = TypeVar("Result")

# A process without a heartbeat for this long counts as dead; a process that failed waits this long for the others to
# shut down. The sum is less than half a minute.
HEARTBEAT_SECONDS, SHUTDOWN_SECONDS = 20, 8
_HEARTBEAT_SECONDS_ALONE = 10**6  # so that a single process survives the sleep of a laptop

_MESSAGE_BYTES = 4096
_LOST_CONNECTION = ("by peer", "UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat")  # in the errors of jax's runtime


@contextlib.contextmanager
def distributed_runtime(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Iterator[None]:
    """Initialise jax's distributed runtime, before any device is used, and end this process together with the others.

    `coordinator` is the host:port of process 0, whose `process_id` is 0. Without arguments, jax looks for a cluster in
    the environment (SLURM, a TPU pod, Open MPI, ..). If there is none, this process initialises the runtime alone,
    because the runtime is what records SIGTERM for `PreemptionGuard`.

    Raises:
        InputError: the arguments or the environment are incomplete or out of range.
    """
    os.environ.setdefault("grpc_proxy", "")  # otherwise gRPC connects to its own host through a web proxy, and hangs
    jax.config.update("jax_check_proxy_envs", False)
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    require(len(missing) in (0, 3), ", ".join(missing), None, f"must be given together with the rest of {list(given)}")
    if coordinator is not None and num_processes is not None and process_id is not None:
        _join(coordinator, num_processes, process_id)
    elif not _join_cluster():
        _join_alone()
    if jax.process_count() == 1:
        yield
        return

    if jax.process_index() > 0:
        logging.getLogger("dape_jax").setLevel(logging.WARNING)
    try:
        yield
    except (StoppedError, NonFiniteError) as error:  # raised on all processes; process 0 prints it
        if jax.process_index() == 0:
            raise
        sys.exit(128 + signal.SIGTERM if isinstance(error, StoppedError) else 1)
    except InputError:
        raise
    except Exception as error:
        _exit_at_once(error)


def _join(coordinator: str, num_processes: int, process_id: int) -> None:
    host, _, port = coordinator.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
    require(bool(host) and is_port, "--coordinator", coordinator, "must be the host:port of process 0")
    require(num_processes > 0, "--num_processes", num_processes, "must be positive")
    require(0 <= process_id < num_processes, "--process_id", process_id, f"must be from 0 to {num_processes - 1}")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            cluster_detection_method="deactivate",
            coordinator_bind_address=coordinator if _is_loopback(host) else None,  # None: all interfaces
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:  # the port is in use
        raise InputError(f"--coordinator = {coordinator!r}: {str(error).splitlines()[0]}") from error


def _is_loopback(host: str) -> bool:
    """Return whether a host's name or address leads back to this machine alone."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def _join_cluster() -> bool:
    """Join the processes that the environment describes; return False if it describes none."""
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=SHUTDOWN_SECONDS
        )
    except ValueError as error:  # jax has found no address, number of processes or process id
        address = os.environ.get("JAX_COORDINATOR_ADDRESS")
        require(address is None, "JAX_COORDINATOR_ADDRESS", address, f"{error} Give the three flags instead")
        return False
    return True


def _join_alone() -> None:
    jax.config.update("jax_cpu_collectives_implementation", None)  # not needed within one process
    with socket.socket() as reserved:  # holds the port until gRPC, which shares it, has opened it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*reserved.getsockname())
        jax.distributed.initialize(
            address,
            num_processes=1,
            process_id=0,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS_ALONE,
        )


def _exit_at_once(error: Exception) -> None:
    """Exit without waiting for the other processes; the runtime, or an error like this one, ends each of them."""
    if isinstance(error, jax.errors.JaxRuntimeError) and any(words in str(error) for words in _LOST_CONNECTION):
        message = f"error: lost the connection to another process: {str(error).splitlines()[0]}"
        print(f"{message}; restart all processes with the same command to resume", file=sys.stderr)
        status = 128 + signal.SIGABRT  # the status if the runtime notices first
    else:
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def process_zero_only(work: Callable[[], object]) -> None:
    """Run `work` on process 0 while the other processes wait.

    Raises:
        InputError: raised by `work`; it is raised on all processes.
    """
    if jax.process_count() == 1:
        work()
        return
    fault = ""
    if jax.process_index() == 0:
        try:
            work()
        except InputError as error:
            fault = str(error)
    if fault := first_fault(fault):
        raise InputError(fault)


def process_zero_first(work: Callable[[], Result]) -> Result:
    """Run `work` on process 0 while the other processes wait, then on those: they may find it done.

    Raises:
        InputError: raised by `work`; if process 0 raised it, it is raised on all processes.
    """
    results: list[Result] = []
    process_zero_only(lambda: results.append(work()))
    return results[0] if results else work()


def first_fault(fault: str) -> str:
    """Return the same message on all processes: that of the first process which has one, or "" if none has."""
    if jax.process_count() == 1:
        return fault
    padded = np.frombuffer(fault.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
    for row in np.asarray(multihost_utils.process_allgather(padded), np.uint8):
        if message := bytes(row).rstrip(b"\0"):
            return message.decode(errors="replace")
    return ""


def require_single_process() -> None:
    """Raise `InputError` if a launcher has started several processes of a program that runs in one."""
    message = "must be 1: this program runs in one process"
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        require(os.environ.get(name, "1") == "1", name, os.environ.get(name), message)
    require(jax.process_count() == 1, "processes", jax.process_count(), message)


def require_same(field: str, value: str) -> None:
    """Raise `InputError` on all processes unless all have the same value; otherwise they would deadlock later."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint32)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if others:
        raise InputError(f"{field}: must be the same on all processes, but processes {others} differ from process 0")


class PreemptionGuard:
    """Agreement of all processes on the step after which a SIGTERM to any of them stops the run.

    jax chooses, in the background, a number that no process has asked about yet, and answers True for that number
    only. The numbers asked about must therefore be consecutive from 1: a run that resumes at step 500 first asks about
    the steps before it.
    """

    def __init__(self):
        self.num_asked = 0

    def should_stop(self, step: int) -> bool:
        """Return whether to save and stop after this step; after True, another SIGTERM ends the process at once."""
        stop = False
        while self.num_asked < step:
            self.num_asked += 1
            stop |= multihost_utils.reached_preemption_sync_point(self.num_asked)
        if stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax would report the SIGTERM several times
        return stop
