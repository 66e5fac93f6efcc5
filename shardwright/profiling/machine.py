"""What the machine at hand is, measured: a `DeviceModel`, and the `Cluster` of its devices.

A few operators that show one rate each are run alone: products of growing matrices, in float32 and
bfloat16, and sums and functions of growing tensors. The rates are fitted to their times. Invariant:
nothing but what is measured, asked of the system, or said by the caller goes into the result.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import msgspec
import torch

from shardwright.clusters import CPU_CORE, DEVICES, Cluster, DeviceModel, Links
from shardwright.comm import make_store
from shardwright.costs.fit import FitPoint, LinkTime, fit, fit_links
from shardwright.errors import DeviceError, ProfileError
from shardwright.ir import Builder, IRGraph
from shardwright.profiling.measure import Settings, check_counts, measure

WIDTHS = (64, 128, 256, 512, 1024)
"""Of the square matrices that are multiplied."""
ELEMENTS = (256, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
"""Of the tensors that are added, and given to functions."""
MEGABYTE = 10**6
CUDA_GROWTH = 8
"""How much wider and larger these are on a GPU, which small ones do not fill."""


def profile_device(
    device: str = "cpu", *, threads: int = 1, n_iter: int = 10, slots: int = 1
) -> DeviceModel:
    """Measure the rates of a device of this machine; a CPU uses ``threads`` threads.

    The memory is that of the GPU, or for a CPU the machine's memory divided by ``slots``. Takes a
    few seconds, during which the machine should be idle. Raises ProfileError.
    """
    check_counts(threads=threads, n_iter=n_iter, slots=slots)
    place = present_device(device)
    settings = Settings(place, threads, n_iter)
    growth = CUDA_GROWTH if place.type == "cuda" else 1
    measured = [
        FitPoint.of_forward(graph, graph.nodes[0], measure(graph, (), settings).forward)
        for graph in _probes(growth)
    ]
    known = DEVICES["A100-80GB"] if place.type == "cuda" else CPU_CORE
    share = device_memory(place) // (1 if place.type == "cuda" else slots)
    memory = share - share % MEGABYTE
    return msgspec.structs.replace(fit(known, measured), name=model_name(place), memory=memory)


def profile_cluster(
    devices: int | None = None, *, device: str = "cpu", threads: int = 1, n_iter: int = 10
) -> Cluster:
    """Measure this machine as a cluster of one host: a device, and the links between devices.

    By default the devices are all cores, one device per core, or all GPUs. Takes about ten seconds,
    during which the machine should be idle. Raises ProfileError.
    """
    check_counts(threads=threads, n_iter=n_iter, devices=1 if devices is None else devices)
    place = present_device(device)
    count = _present(place, threads) if devices is None else devices
    found = profile_device(device, threads=threads, n_iter=n_iter, slots=count)
    alone = Cluster.of(count, device=found)
    if count == 1:
        return alone
    inside = profile_links(count, device=device)
    return msgspec.structs.replace(alone, inside=inside)


def device_memory(place: torch.device) -> int:
    """The bytes of a GPU's memory, or of the machine's."""
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _present(place: torch.device, threads: int) -> int:
    """How many slots of a kind this process may use."""
    if place.type == "cuda":
        return torch.cuda.device_count()
    return max(1, len(os.sched_getaffinity(0)) // threads)


def _probes(growth: int) -> Iterator[IRGraph]:
    """Graphs of one call each."""
    for width in WIDTHS:
        matrix = (growth * width, growth * width)
        for dtype in ("f32", "bf16"):
            yield _call("aten.mm.default", dtype, matrix, matrix)
    for count in ELEMENTS:
        vector = (growth * growth * count,)
        yield _call("aten.add.Tensor", "f32", vector, vector)
        yield _call("aten.gelu.default", "f32", vector)


def _call(op: str, dtype: str, *shapes: tuple[int, ...]) -> IRGraph:
    builder = Builder(op)
    values = [builder.input("x", shape, dtype) for shape in shapes]
    return builder.finish(outputs=builder.call(op, *values))


# --- links ----------------------------------------------------------------------------------------
#
# `profile_links` starts one process a device (`link_process`), which do every kind of communication
# with messages of several sizes among two of them and among all, over the transports that pipelines
# run on. All processes are gone when it returns or raises; whoever dies takes the others along.


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
    """Measure the links between devices of this machine, and fit `Links` to the times.

    ``sizes`` are in bytes, at least two different ones; each time is a median of ``samples``. Takes
    a few seconds, during which the machine should be idle. Raises ProfileError if the processes
    fail or do not finish within ``timeout`` seconds, and DeviceError if this machine has no such
    device.
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


# --- what devices call themselves -----------------------------------------------------------------


def present_device(name: str | torch.device) -> torch.device:
    """The device ``cpu``, ``cuda`` or ``cuda:1``. Raises DeviceError where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) < count:
        return torch.device("cuda", device.index or 0)
    raise DeviceError(
        f"device {str(name)!r} cannot be measured: this machine has a CPU and {count} CUDA "
        "devices; name one of them, as cpu or cuda:0"
    )


@cache
def model_name(device: torch.device) -> str:
    """The model of a device, as the machine knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name()


def _cpu_name() -> str:
    """From Linux's own list of processors, else what Python knows."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "cpu"
