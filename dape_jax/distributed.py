"""Several processes in one run: joining, doing work once, agreeing on errors, and stopping together.

In: flags, or a cluster's environment variables. Out: jax's distributed runtime, also for one process.
Next: `training/loop.py`.

When a process fails with an error, it writes the error to the key-value store of jax's runtime. A thread in each
process reads it, prints it and exits, because the main thread may be waiting for the failed process. When a process
dies without an error, the runtime kills the others within half a minute: with SIGABRT, from its own thread, without
running any Python code. `docs/distributed.md` explains how to resume.
"""

import contextlib
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dape_jax.errors import InputError, NonFiniteError, StoppedError, describe, exit_at_once, require
from dape_jax.provenance import package_versions
from dape_jax.storage import bucket_errors

Result = TypeVar("Result")

# A process without a heartbeat for this long counts as dead; a failed process waits this long for the others to shut
# down. The sum is less than half a minute.
HEARTBEAT_SECONDS, SHUTDOWN_SECONDS = 20, 8
_HEARTBEAT_SECONDS_ALONE = 10**6  # so that a single process survives suspending a laptop

# All processes must join within this time; a process that already has an error waits a shorter time.
JOIN_SECONDS, JOIN_WITH_ERROR_SECONDS = 300, 20
_POLL_SECONDS = 0.5  # interval between checks for an error of another process
_EXIT_SECONDS = 5  # maximum wait for all processes to read an error, before they exit
_VERSIONS, _ERRORS, _ENDING = "dape_jax/versions", "dape_jax/errors", "dape_jax/ending"  # keys of the store

_LOST_CONNECTION = ("by peer", "UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat")  # in error messages of jax's runtime


@contextlib.contextmanager
def distributed_runtime(
    coordinator: str | None, num_processes: int | None, process_id: int | None, error: InputError | None = None
) -> Iterator[None]:
    """Initialise jax's distributed runtime, before any device is used, and end this process together with the others.

    `coordinator` is the host:port of process 0. Without arguments, jax detects a cluster from the environment (SLURM, a
    TPU pod, Open MPI, ..). Without a cluster, this process initialises the runtime alone, because `PreemptionGuard`
    needs the runtime to record SIGTERM.

    With several processes, an error in the block, on any process, ends all of them with the same line and status. If
    this process has an `error` before it joins, it is raised when all have joined, because the others wait for it.

    Raises:
        InputError: the arguments or the environment are incomplete or out of range.
    """
    os.environ.setdefault("grpc_proxy", "")  # otherwise gRPC connects to its own host through an HTTP proxy, and hangs
    jax.config.update("jax_check_proxy_envs", False)
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    require(len(missing) in (0, 3), ", ".join(missing), None, f"must be set together with the others of {list(given)}")
    with _join_timeout(error):
        if coordinator is not None and num_processes is not None and process_id is not None:
            _join(coordinator, num_processes, process_id)
        elif not _join_cluster():
            _join_alone()
    runtime = _runtime()
    if runtime.num_processes == 1:
        if error is not None:
            raise error
        yield
        return

    if runtime.process_id > 0:
        logging.getLogger("dape_jax").setLevel(logging.WARNING)
    with _Listener() as listener:
        try:
            if error is not None:
                raise error
            _require_same_versions()
            with bucket_errors():
                yield
            _wait_for_all("end", SHUTDOWN_SECONDS)  # a process that is still writing a checkpoint may fail
        except (StoppedError, NonFiniteError) as stopped:  # raised on all processes; process 0 prints it
            is_on_all, status = _wait_for_all("end", SHUTDOWN_SECONDS), 1
            if isinstance(stopped, StoppedError):
                status = 128 + signal.SIGTERM
            elif not is_on_all:
                listener.end_all(status, str(stopped))
            if runtime.process_id == 0:
                raise
            sys.exit(status)
        except InputError as bad:
            listener.end_all(2, str(bad))
        except OSError as failed:
            listener.end_all(1, describe(failed))
        except Exception as bug:
            if _is_lost_connection(bug):
                if listener.told.wait(2 * _POLL_SECONDS):  # lost because the other process has called `end_all`
                    listener.join()
                line = f"lost the connection to another process: {str(bug).splitlines()[0]}"
                # The same status as if the runtime detects it first.
                exit_at_once(128 + signal.SIGABRT, f"{line}; restart all processes with the same command to resume")
            traceback.print_exception(bug)
            listener.end_all(1, "".join(traceback.format_exception_only(bug)).strip())


def _runtime() -> Any:
    """Return the client of the key-value store, the number of processes, and the index of this process.

    They are read from a private module: jax has no public interface to the store, and `jax.process_count()` first
    initialises the devices, which waits for the other processes.
    """
    from jax._src import distributed

    return distributed.global_state


@contextlib.contextmanager
def _join_timeout(error: InputError | None) -> Iterator[None]:
    """Exit with one line if the block takes too long: jax would end this process with SIGABRT."""
    seconds = JOIN_SECONDS if error is None else JOIN_WITH_ERROR_SECONDS
    line = f"processes: not all have joined after {seconds} seconds; start all with the same --coordinator"
    timer = threading.Timer(seconds, exit_at_once, (2, line if error is None else str(error)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
            initialization_timeout=2 * JOIN_SECONDS,  # never reached: see `_join_timeout`
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:  # the port is in use
        raise InputError(f"--coordinator = {coordinator!r}: {str(error).splitlines()[0]}") from error


def _is_loopback(host: str) -> bool:
    """Return whether a host's name or address is a loopback address."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def _join_cluster() -> bool:
    """Join the processes described by the environment; return False if there are none."""
    try:
        jax.distributed.initialize(
            initialization_timeout=2 * JOIN_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except ValueError as error:  # jax could not determine the address, number of processes or process id
        address = os.environ.get("JAX_COORDINATOR_ADDRESS")
        require(address is None, "JAX_COORDINATOR_ADDRESS", address, f"{error} Give the three flags instead")
        return False
    return True


def _join_alone() -> None:
    jax.config.update("jax_cpu_collectives_implementation", None)  # not needed within one process
    with socket.socket() as reserved:  # reserves the port until gRPC, which shares it, has opened it
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


class _Listener(threading.Thread):
    """Thread that ends this process when this process or another one has called `end_all`.

    It polls, because a blocking call in the runtime would delay the end of the process.
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.told, self.finished = threading.Event(), threading.Event()

    def __enter__(self) -> "_Listener":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.finished.set()
        self.join()

    def run(self) -> None:
        """Exit as soon as process 0 has chosen the line and the status of all processes."""
        runtime = _runtime()
        while not self.finished.wait(_POLL_SECONDS):
            try:
                if runtime.process_id == 0:
                    _choose_ending()
                status, line = json.loads(runtime.client.key_value_try_get(_ENDING))
            except jax.errors.JaxRuntimeError as error:
                if "NOT_FOUND" in str(error):
                    continue
                return  # process 0 has died, and the runtime will end this process
            self.told.set()
            # If a process exited before all have read the line, the others would fail with lost connections.
            _wait_for_all("told", _EXIT_SECONDS)
            if runtime.process_id == 0:
                time.sleep(_POLL_SECONDS)  # the others still need the runtime of process 0
            exit_at_once(status, line)

    def end_all(self, status: int, line: str) -> NoReturn:
        """Exit on all processes with this line and status."""
        runtime = _runtime()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            runtime.client.key_value_set(f"{_ERRORS}/{runtime.process_id}", json.dumps([status, line]))
        self.join()
        exit_at_once(status, line)  # process 0 has died, so the others cannot be informed


def _choose_ending() -> None:
    """Store the status and line of the first process with an error, for all processes; runs on process 0."""
    client, num_processes = _runtime().client, _runtime().num_processes
    if not client.key_value_dir_get(_ERRORS):
        return
    time.sleep(_POLL_SECONDS)  # for processes with the same error
    errors = {int(key.rpartition("/")[2]): value for key, value in client.key_value_dir_get(_ERRORS)}
    chosen = errors[min(errors)]
    having = sorted(process for process, value in errors.items() if value == chosen)
    status, line = json.loads(chosen)
    where = "" if len(having) == num_processes else f"process {', '.join(map(str, having))}: "
    client.key_value_set(_ENDING, json.dumps([status, where + line]))


def _wait_for_all(name: str, seconds: float) -> bool:
    """Wait until all processes have called this function with this name; return False if it times out."""
    try:
        _runtime().client.wait_at_barrier(f"dape_jax/{name}", int(seconds * 1000))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _require_same_versions() -> None:
    """Raise `InputError` if this process has other versions than process 0: results could differ."""
    runtime, versions = _runtime(), package_versions()
    if runtime.process_id == 0:
        runtime.client.key_value_set(_VERSIONS, json.dumps(versions))
    expected = json.loads(runtime.client.blocking_key_value_get(_VERSIONS, JOIN_SECONDS * 1000))
    for name, version in versions.items():
        require(version == expected[name], name, version, f"must be {expected[name]!r}, the version of process 0")


def _is_lost_connection(error: Exception) -> bool:
    is_of_runtime = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)  # Gloo raises ValueErrors
    return is_of_runtime and any(words in str(error) for words in _LOST_CONNECTION)


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
    """Run `work` on process 0 while the other processes wait, then on the others, which may reuse its result.

    Raises:
        InputError: raised by `work`; if process 0 raised it, it is raised on all processes.
    """
    results: list[Result] = []
    process_zero_only(lambda: results.append(work()))
    return results[0] if results else work()


def first_fault(fault: str) -> str:
    """Return the same message on all processes: that of the first process with a message, or "" if there is none."""
    return next(filter(None, texts_of_all(fault)), "")


def texts_of_all(text: str) -> list[str]:
    """Return the texts of all processes, in the order of the processes."""
    if jax.process_count() == 1:
        return [text]
    encoded = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.uint32(encoded.size)))
    if not sizes.any():
        return [""] * len(sizes)
    rows = np.asarray(multihost_utils.process_allgather(np.pad(encoded, (0, sizes.max() - encoded.size))), np.uint8)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def require_single_process() -> None:
    """Raise `InputError` if a launcher has started several processes of a single-process program."""
    message = "must be 1: this program runs in one process"
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        require(os.environ.get(name, "1") == "1", name, os.environ.get(name), message)
    require(jax.process_count() == 1, "processes", jax.process_count(), message)


def require_same(field: str, value: str, more: str = "") -> None:
    """Raise `InputError`, with a message ending in `more`, on all processes unless all have the same value."""
    processes: dict[str, list[int]] = {}
    for process, text in enumerate(texts_of_all(value)):
        processes.setdefault(text, []).append(process)
    if len(processes) > 1:
        values = ", ".join(f"{text} on process {', '.join(map(str, which))}" for text, which in processes.items())
        raise InputError(f"{field}: must be the same on all processes, but is {values}{more}")


class PreemptionGuard:
    """Agreement of all processes on the step after which a SIGTERM to any of them stops the run.

    jax chooses, in the background, a step number that no process has queried yet, and returns True for that number
    only. The queried numbers must therefore be consecutive from 1: a run that resumes at step 500 first queries the
    steps before it.
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
            logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax would log the SIGTERM several times
        return stop
