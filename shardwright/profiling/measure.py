"""Running one unit alone, and measuring it.

Input: the graph of a unit, and which of its values want gradients. Output: a `Timing`. Invariant:
the unit runs on tensors of its own; global generators, the number of threads and the modes of the
caller are afterwards what they were; a unit that fails is a `ProfileError` that says which node,
where it stands and why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shardwright.costs.measurement import Timing
from shardwright.errors import ProfileError
from shardwright.ir import IRGraph, compile_graph
from shardwright.ir.execute import describe_node
from shardwright.profiling.clock import computing_threads, median_seconds, sample_seconds
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


# --- backwards ------------------------------------------------------------------------------------
#
# Gradients come from torch.autograd, which takes some microseconds to start; in a whole backward
# that is paid once, so it is left out here.
#
# Only the tensors that are given get to want gradients, and no ``.grad`` is set.


Function = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Backward:
    """Seconds of the gradients of what nodes made and of what is stored, and bytes.

    ``kept`` are the most bytes of a forward that keeps what the backward needs; ``memory`` those of
    the backward beyond what such a forward leaves; ``again`` those of both together.
    """

    made: float = 0.0
    stored: float = 0.0
    kept: int = 0
    memory: int = 0
    again: int = 0


def measure_backward(
    function: Function,
    tensors: Sequence[Tensor],
    made: Sequence[Tensor],
    stored: Sequence[Tensor],
    *,
    samples: int,
    device: torch.device,
) -> Backward:
    """Measure the gradients of ``made`` and ``stored``, which are among ``tensors``.

    Each is 0 where there is nothing to give one of. Where there are both, their sum is the time of
    the backward that gives both at once.
    """
    with torch.enable_grad():
        for tensor in (*made, *stored):
            tensor.requires_grad_()
        results: list[Tensor] = []
        kept = peak_bytes(lambda: results.extend(function(tensors)), device).most
        outputs = [result for result in results if result.requires_grad]
        if not outputs:
            return Backward(kept=kept)
        run = _Gradients(outputs, [torch.ones_like(output) for output in outputs])
        everything = [*made, *stored]
        memory = peak_bytes(lambda: run.of(everything), device).most
        both = run.seconds(everything, samples, device)
        share = _share(run, made, stored, samples, device)
        again = peak_bytes(lambda: _again(function, tensors, everything, run.seeds), device).most
        return Backward(share * both, (1 - share) * both, kept, memory, again)


def _share(
    run: _Gradients,
    made: Sequence[Tensor],
    stored: Sequence[Tensor],
    samples: int,
    device: torch.device,
) -> float:
    """The part of a backward that its gradients of ``made`` take."""
    if not made or not stored:
        return 1.0 if made else 0.0
    first, second = (run.seconds(part, samples, device) for part in (made, stored))
    return first / (first + second) if first + second > 0 else 0.5


def _again(
    function: Function,
    tensors: Sequence[Tensor],
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
) -> object:
    """A forward and its backward, of which nothing is kept but the gradients."""
    outputs = [result for result in function(tensors) if result.requires_grad]
    return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The backward of a forward that was run once."""

    outputs: Sequence[Tensor]
    seeds: Sequence[Tensor]

    def of(self, inputs: Sequence[Tensor]) -> object:
        """Run it for some inputs."""
        return torch.autograd.grad(
            self.outputs, inputs, self.seeds, retain_graph=True, allow_unused=True
        )

    def seconds(self, inputs: Sequence[Tensor], samples: int, device: torch.device) -> float:
        """What it takes, without the start of autograd."""
        whole = median_seconds(lambda: self.of(inputs), samples, device)
        return max(0.0, whole - start_seconds(device))


@lru_cache(maxsize=16)
def start_seconds(device: torch.device) -> float:
    """What a backward that computes nothing takes, at its quickest."""
    with torch.enable_grad():
        x = torch.ones(1, device=device, requires_grad=True)
        nothing = _Gradients([x.view_as(x)], [torch.ones(1, device=device)])
        return min(sample_seconds(lambda: nothing.of([x]), 20, device))
