"""What communication costs on the machine at hand, measured between real processes.

`profile_links` starts one process a device (`link_process`), which do every kind of communication
with messages of several sizes among two of them and among all, over the transports that pipelines
run on. Goes out: `Links`, fitted to the times. What always holds: all processes are gone when it
returns or raises; whoever dies takes the others along.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

import msgspec

from shardwright.clusters import Links
from shardwright.comm import make_store
from shardwright.costs.fit import LinkTime, fit_links
from shardwright.errors import ProfileError
from shardwright.profiling.hardware import present_device

SIZES = (1 << 10, 32 << 10, 1 << 20, 8 << 20)
"""Bytes that are measured: where latency is all, where bandwidth is, and between."""
_LOOK = 0.02
"""Seconds between looks at the processes."""
_MODULE = "shardwright.profiling.link_process"


def profile_links(
    devices: int = 2,
    *,
    device: str = "cpu",
    sizes: Sequence[int] = SIZES,
    samples: int = 5,
    timeout: float = 120.0,
) -> Links:
    """Measure what links so many devices of this machine, and fit `Links` to it.

    ``sizes`` are bytes, two different ones or more; each time is a median of ``samples``. Takes
    some seconds, in which the machine should do nothing else. Raises ProfileError where the
    processes fail, or are not done after ``timeout`` seconds, and DeviceError where this
    machine has no such device.
    """
    kind = present_device(device).type
    return fit_links(measure_links(devices, kind, sizes, samples, timeout))


def measure_links(
    devices: int, device: str, sizes: Sequence[int], samples: int, timeout: float
) -> list[LinkTime]:
    """The times that `profile_links` fits. Raises ProfileError."""
    _check(devices, sizes, samples)
    with ExitStack() as stack:
        store = stack.enter_context(make_store()).fileno()
        options = tuple(map(str, (devices, store, device, samples, *sizes)))
        running = [
            stack.enter_context(_process((str(rank), *options), store)) for rank in range(devices)
        ]
        _wait(running, time.monotonic() + timeout, timeout)
        return msgspec.json.decode(running[0].printed(), type=list[LinkTime])


def _check(devices: int, sizes: Sequence[int], samples: int) -> None:
    if devices < 2:
        raise ProfileError(f"links are between 2 devices or more, found devices={devices}")
    element = 4 * devices
    if len({size // element for size in sizes}) < 2 or min(sizes) < 1:
        raise ProfileError(
            f"sizes are two numbers of bytes or more, {element} or more apart, found {sizes}"
        )
    if samples < 1:
        raise ProfileError(f"samples must be a number from 1 up, found {samples}")


@dataclass(frozen=True, slots=True)
class _Process:
    """A process, and the files that it prints to."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def printed(self) -> bytes:
        """What it has printed."""
        self.output.seek(0)
        return self.output.read()

    def last_words(self) -> str:
        """The last line of what it has printed of errors."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


@contextmanager
def _process(arguments: Sequence[str], store: int) -> Iterator[_Process]:
    """A process that measures, and has the store's descriptor; it is gone at the end."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            pass_fds=(store,),
            env=_environment(),
        )
        try:
            yield _Process(process, output, errors)
        finally:
            process.kill()
            process.communicate()


def _environment() -> dict[str, str]:
    """This process's, with its module path, and one thread."""
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _wait(running: Sequence[_Process], deadline: float, timeout: float) -> None:
    """Wait until all are done well. Raises ProfileError as soon as one is not."""
    while True:
        codes = [one.process.poll() for one in running]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            words = "; ".join(running[rank].last_words() for rank in failed)
            raise ProfileError(
                f"the process of device {failed[0]} ended with status {codes[failed[0]]} while "
                f"links were measured: {words}"
            )
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise ProfileError(
                f"links were not measured after {timeout:g} s; give a longer timeout, or smaller "
                "sizes"
            )
        time.sleep(_LOOK)
