"""The processes of a run: how they find each other, what one does for all, and how they end together.

In: flags, or what a cluster has set in the environment. Out: jax's distributed runtime, for one process too.
Next: `training/loop.py`.

When a process dies, the runtime ends the others within half a minute: by SIGABRT, in a thread of its own, after which
Python has no say. What the user should know is therefore said by a shell that outlives the process it waits for.
"""

import contextlib
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dape_jax.errors import InputError, NonFiniteError, StoppedError, require

Result = TypeVar("Result")

# A process without a sign of life for so long is taken for dead; one that has failed waits so long for the others to
# end with it. Together they are less than half a minute.
HEARTBEAT_SECONDS, SHUTDOWN_SECONDS = 20, 8
# Alone there is nobody to be taken for dead, but a laptop that was asleep would be.
_HEARTBEAT_SECONDS_ALONE = 10**6

_MESSAGE_BYTES = 4096
_LOST_CONNECTION = ("by peer", "UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat")  # in the errors of jax's runtime

# A process that ends in order writes a line first; one that is killed or aborted does not. What a terminal or a
# scheduler sends to all processes of a group must not end the shell before.
_LAST_WORDS = """
trap "" HUP INT TERM
read -r ended && exit
newest=$(ls "$2" 2>/dev/null | grep -x "[0-9][0-9]*" | sort -n | tail -n 1)
echo "error: $1 has ended, because it or another has died or lost its connection; the newest whole checkpoint in" \\
    "$2 is ${newest:-none}. Start all processes again, with the same command" >&2
"""


@contextlib.contextmanager
def distributed_runtime(
    coordinator: str | None, num_processes: int | None, process_id: int | None, checkpoints: Path
) -> Iterator[None]:
    """Join the processes of a run, before any device is touched; at the end, end as one of them.

    Without flags, jax looks for a cluster in the environment (SLURM, a TPU pod, Open MPI, ..). Where there is none this
    process joins itself alone, since it is jax's runtime that takes note of SIGTERM.

    Args:
        coordinator: host:port of process 0, where all meet.
        num_processes: how many there are.
        process_id: which of them this is.
        checkpoints: directory of the run's checkpoints, for the message when a process has died.

    Raises:
        InputError: flags, or an environment, that make no set of processes.
    """
    os.environ.setdefault("grpc_proxy", "")  # or gRPC looks for its own host behind the web's proxy, and hangs
    jax.config.update("jax_check_proxy_envs", False)
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    require(len(missing) in (0, 3), ", ".join(missing), None, f"must be given too, or none of {list(given)}")
    if coordinator is not None and num_processes is not None and process_id is not None:
        _join(coordinator, num_processes, process_id)
    elif not _join_cluster():
        _join_alone()
        yield
        return

    if jax.process_count() == 1:
        yield
        return
    if jax.process_index() > 0:
        logging.getLogger("dape_jax").setLevel(logging.WARNING)
    with _last_words(checkpoints) as end_in_order:
        try:
            yield
        except (StoppedError, NonFiniteError) as error:  # which come to all alike
            end_in_order()
            if jax.process_index() == 0:
                raise
            sys.exit(128 + signal.SIGTERM if isinstance(error, StoppedError) else 1)
        except (InputError, KeyboardInterrupt, SystemExit):
            end_in_order()
            raise
        except Exception as error:
            _end_at_once(error)
        end_in_order()


def _join(coordinator: str, num_processes: int, process_id: int) -> None:
    host, _, port = coordinator.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
    require(bool(host) and is_port, "--coordinator", coordinator, "host:port of process 0")
    require(num_processes > 0, "--num_processes", num_processes, "at least 1")
    require(0 <= process_id < num_processes, "--process_id", process_id, f"0 to {num_processes - 1}")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:  # the port is taken
        raise InputError(f"--coordinator = {coordinator!r}: {str(error).splitlines()[0]}") from error


def _join_cluster() -> bool:
    """Join the processes that the environment tells of; False if it tells of none."""
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=SHUTDOWN_SECONDS
        )
    except ValueError as error:  # what jax says when it has found no address, no number of processes or no id
        address = os.environ.get("JAX_COORDINATOR_ADDRESS")
        require(address is None, "JAX_COORDINATOR_ADDRESS", address, f"{error} Give the three flags instead")
        return False
    return True


def _join_alone() -> None:
    jax.config.update("jax_cpu_collectives_implementation", None)  # between processes; within this one XLA has its own
    with socket.socket() as reserved:  # kept until gRPC, which shares it, has taken the port
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


@contextlib.contextmanager
def _last_words(checkpoints: Path) -> Iterator[Callable[[], None]]:
    """Have a shell say what to do if this process ends without a call of the function that is given."""
    me = f"process {jax.process_index()} of {jax.process_count()}"
    shell = subprocess.Popen(["sh", "-c", _LAST_WORDS, "sh", me, str(checkpoints)], stdin=subprocess.PIPE)
    assert shell.stdin is not None

    def end_in_order() -> None:
        with contextlib.suppress(OSError):  # it has been killed
            shell.communicate(b"\n")

    yield end_in_order


def _end_at_once(error: Exception) -> None:
    """End without waiting for the others, who cannot go on: each is ended by the runtime, or by an error like this."""
    if isinstance(error, jax.errors.JaxRuntimeError) and any(sign in str(error) for sign in _LOST_CONNECTION):
        print(f"error: lost the connection to another process: {str(error).splitlines()[0]}", file=sys.stderr)
        status = 128 + signal.SIGABRT  # as when the runtime is the first to know
    else:
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def process_zero_first(work: Callable[[], Result]) -> Result:
    """Let process 0 do something while the others wait, and then the others, who may find it done.

    Raises:
        InputError: the work's own; on all processes if process 0 raised it.
    """
    if jax.process_count() == 1:
        return work()
    result, fault = [], b""
    if jax.process_index() == 0:
        try:
            result = [work()]
        except InputError as error:
            fault = str(error).encode()[:_MESSAGE_BYTES]
    padded = np.frombuffer(fault.ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
    if fault := bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)).rstrip(b"\0"):
        raise InputError(fault.decode(errors="replace"))
    return result[0] if result else work()


def require_single_process() -> None:
    """Raise `InputError` where a launcher has started several processes of a program that is for one."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        require(os.environ.get(name, "1") == "1", name, os.environ.get(name), "1: this program runs in one process")
    require(jax.process_count() == 1, "processes", jax.process_count(), "1: this program runs in one process")


def require_same(field: str, value: str) -> None:
    """Raise `InputError` on all processes if one has another value than process 0: they would wait for each other."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint32)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if others:
        raise InputError(f"{field}: must be the same on all processes, and on {others} is another than on process 0")


class PreemptionGuard:
    """Whether SIGTERM has come to any of the processes; asked after every step, with the same answer on all.

    jax agrees in the background on a number that no process has asked with yet, and says yes to that one alone. So the
    numbers must leave none out, from 1 on: a run that goes on at step 500 first asks for those before.
    """

    def __init__(self):
        self.asked = 0

    def should_stop(self, step: int) -> bool:
        """Whether to stop here: save and end. From then on a further SIGTERM ends the process without ado."""
        stop = False
        while self.asked < step:
            self.asked += 1
            stop |= multihost_utils.reached_preemption_sync_point(self.asked)
        if stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax, which asks too, would say it several times over
        return stop
