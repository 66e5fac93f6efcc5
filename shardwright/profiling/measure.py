"""Running one unit alone, and measuring it.

Comes in: the graph of a unit, and which of its values want gradients. Goes out: a `Timing`. What
always holds: the unit runs on tensors of its own; global generators, the number of threads and the
modes of the caller are afterwards what they were; a unit that fails is a `ProfileError` that says
which node, where it stands and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardwright.costs.timing import Timing
from shardwright.errors import ProfileError
from shardwright.ir import IRGraph, compile_graph
from shardwright.ir.execute import describe_node
from shardwright.profiling.backward import measure_backward
from shardwright.profiling.clock import computing_threads, median_seconds
from shardwright.profiling.contents import contents
from shardwright.profiling.memory import peak_bytes


@dataclass(frozen=True, slots=True)
class Settings:
    """Where and how to measure: the device, its host's threads, how many samples."""

    device: torch.device
    threads: int = 1
    samples: int = 10


def measure(graph: IRGraph, wanted: Collection[int], settings: Settings) -> Timing:
    """Run a unit's graph and its backward, and say what they take.

    ``wanted`` are values, of which those that the unit reads want gradients. Raises ProfileError.
    """
    try:
        with alone(settings):
            return _measured(graph, wanted, settings)
    except Exception as error:
        raise ProfileError(_failure(graph, error)) from error


def _measured(graph: IRGraph, wanted: Collection[int], settings: Settings) -> Timing:
    device, samples = settings.device, settings.samples
    program = compile_graph(graph, device)
    tensors = contents(graph, program.arguments, device)
    forward = median_seconds(lambda: program(tensors), samples, device)
    memory = peak_bytes(lambda: program(tensors), device).most
    mine = {v: t for v, t in zip(program.arguments, tensors, strict=True) if v in wanted}
    if not mine:
        return Timing(forward, memory=memory, memory_kept=memory, samples=samples)
    found = measure_backward(
        program,
        tensors,
        [t for v, t in mine.items() if not graph.values[v].is_stored],
        [t for v, t in mine.items() if graph.values[v].is_stored],
        samples=samples,
        device=device,
    )
    return Timing(
        forward,
        found.made,
        found.stored,
        memory,
        found.kept,
        found.memory,
        found.again,
        samples,
    )


def check_counts(**counts: int) -> None:
    """Raise ProfileError for the first that is no number from 1 up."""
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ProfileError(f"{name} is a number from 1 up, found {count!r}")


@contextmanager
def alone(settings: Settings) -> Iterator[None]:
    """Compute as a worker does: no gradients, so many threads, and random numbers that are lost."""
    devices = [settings.device] if settings.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(settings.device.type, enabled=False),
        computing_threads(settings.threads),
    ):
        yield


def _failure(graph: IRGraph, error: Exception) -> str:
    """Which node failed, where it stands in the program, and why."""
    notes = getattr(error, "__notes__", [])
    where = notes[-1].removeprefix("in ") if notes else _described(graph)
    return (
        f"{where} cannot be measured alone: {type(error).__name__}: {error}; nothing of it was "
        "stored. Measure a larger piece with it (depth= or basic_blocks=), if it needs what stands "
        "before it"
    )


def _described(graph: IRGraph) -> str:
    """A unit in words: its one node, or its first and the number of them."""
    more = len(graph.nodes) - 1
    first = describe_node(graph.nodes[0])
    return f"{first} and the {more} nodes behind it" if more else first
