"""Starting worker processes, and ending them.

A worker is forked from a process that has imported what it needs (`forking`), or where that cannot
be it is ``python -m shardwright.launch.process``. It has three descriptors: its end of a pair of
sockets, the notice board, and the store by which the workers find each other. All of them are
handed over by inheritance; so there is no port, no path and no secret by which anybody else could
reach it, scripts and notebooks need no ``__main__`` guard, and the kernel tells the driver at once
when it dies.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import LaunchError
from shardwright.launch.connection import Connection
from shardwright.launch.forking import Forked, can_fork, fork_worker

_MODULE = "shardwright.launch.process"

_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Bytes, for glibc: a worker makes the same tensors in every call, so it keeps their memory rather
than give it back and have the kernel clear fresh pages (a tenth of the time of a transformer)."""


@dataclass(frozen=True, slots=True)
class Child:
    """A worker process and the driver's end of the connection to it."""

    rank: int
    process: subprocess.Popen[bytes] | Forked
    connection: Connection

    def ending(self) -> str:
        """How the process ended, or that it has not; waits a moment for the kernel to say."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        code = self.process.returncode
        if code is None:
            return "it closed its connection"
        if code >= 0:
            return f"its process ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"its process was killed by {name}{hint}"

    @property
    def is_stopped(self) -> bool:
        """Whether the process is held still, as by SIGSTOP; False where no ``/proc`` says so."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")


def launch(size: int, threads: int, board: int, store: int) -> list[Child]:
    """Start ``size`` workers that compute with ``threads`` threads each. Raises LaunchError.

    ``board`` and ``store`` are the descriptors of what they share.
    """
    children: list[Child] = []
    try:
        for rank in range(size):
            children.append(_launch_one(rank, size, threads, (board, store)))
    except BaseException as error:
        end(children, patience=0)
        if not isinstance(error, OSError):
            raise
        raise LaunchError(f"worker {len(children)} of {size} cannot be started: {error}") from None
    return children


def end(children: Sequence[Child], *, patience: float) -> None:
    """Give the workers ``patience`` seconds to end by themselves, then kill and bury them."""
    deadline = time.monotonic() + patience
    try:
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for child in children:
            child.process.kill()
        for child in children:
            child.process.wait()
            child.connection.close()


def _launch_one(rank: int, size: int, threads: int, shared: tuple[int, int]) -> Child:
    ours, theirs = socket.socketpair()
    start = fork_worker if can_fork() else _start_python
    try:
        process = start(rank, size, (theirs.fileno(), *shared), _environment(threads))
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Child(rank, process, Connection(ours))


def _start_python(
    rank: int, size: int, descriptors: tuple[int, ...], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A worker as a Python of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, *map(str, (*descriptors, rank, size))],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env=environment,
        process_group=0,  # The terminal's Ctrl-C is for the driver, which ends its workers.
    )


def _environment(threads: int) -> dict[str, str]:
    """The driver's environment and module path; local ranks meet on the loopback interface."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    environment = {
        **_MALLOC,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(threads),
    }
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment
