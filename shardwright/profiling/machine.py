"""What the machine at hand is, measured: a `DeviceModel`, and the `Cluster` of its devices.

A few operators that show one rate each are run alone: products of growing matrices, in float32 and
bfloat16, and sums and functions of growing tensors. The rates are fitted to their times. What
always holds: nothing but what is measured, asked of the system, or said by the caller goes into the
result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import torch

from shardwright.clusters import CPU_CORE, DEVICES, Cluster, DeviceModel
from shardwright.costs.fit import Measurement, fit
from shardwright.ir import Builder, IRGraph
from shardwright.profiling.hardware import model_name, present_device
from shardwright.profiling.links import profile_links
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
    """Measure a device of this machine; a CPU computes with so many threads.

    Its memory is its own, or for a CPU a share of the machine's among so many ``slots``. Takes
    some seconds, in which the machine should do nothing else. Raises ProfileError.
    """
    check_counts(threads=threads, n_iter=n_iter, slots=slots)
    place = present_device(device)
    settings = Settings(place, threads, n_iter)
    growth = CUDA_GROWTH if place.type == "cuda" else 1
    measured = [
        Measurement.of_forward(graph, graph.nodes[0], measure(graph, (), settings).forward)
        for graph in _probes(growth)
    ]
    known = DEVICES["A100-80GB"] if place.type == "cuda" else CPU_CORE
    share = device_memory(place) // (1 if place.type == "cuda" else slots)
    memory = share - share % MEGABYTE
    return msgspec.structs.replace(fit(known, measured), name=model_name(place), memory=memory)


def profile_cluster(
    devices: int | None = None, *, device: str = "cpu", threads: int = 1, n_iter: int = 10
) -> Cluster:
    """Measure this machine as a cluster of one host: a device, and what links so many of them.

    By default as many as there are cores, each a slot, or GPUs. Takes some ten seconds, in which
    the machine should do nothing else. Raises ProfileError.
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
