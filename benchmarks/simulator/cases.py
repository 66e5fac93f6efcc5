"""Steps of three models, predicted and measured: their time, and the memory of the fullest slot.

In the table mb are microbatches. Memory is what live tensors need, as the allocator of each worker
counts it; for comparison, by how much the processes grew over those of a step that holds next to
nothing. That is more: messages, and gaps in the heap, which nobody predicts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import shardwright as sw
from benchmarks.simulator.report import milliseconds
from benchmarks.simulator.steps import MODELS, Program, in_turn, step_graph, take_steps
from shardwright.clusters import Cluster
from shardwright.runtime.memory import COUNT_TENSORS, MEMORY, TENSORS
from shardwright.simulation.slot import StepSimulation

SCHEDULES = ("gpipe", "1f1b")
WITHIN = 0.10
"""How far a prediction may be off."""
HEADINGS = (
    *("model", "schedule", "mb", "step", "measured", "off"),
    *("memory", "measured", "off", "process"),
)


class Found(NamedTuple):
    """A file predicted and measured.

    pairs
        Seconds of a step, predicted and measured, one pair a round.
    simulation
        That of the last prediction.
    tensors, processes
        Bytes of live tensors, and of processes, by slot.
    """

    pairs: Sequence[tuple[float, float]]
    simulation: StepSimulation
    tensors: Mapping[str, int]
    processes: Mapping[str, int]

    @property
    def seconds(self) -> tuple[float, float]:
        """Medians of what was predicted, and of what was measured."""
        predicted, measured = zip(*self.pairs, strict=True)
        return statistics.median(predicted), statistics.median(measured)

    @property
    def off(self) -> float:
        """How far the prediction is off: the median over rounds, as a fraction."""
        return statistics.median(predicted / measured for predicted, measured in self.pairs) - 1


class Case(NamedTuple):
    """A row of the table, and how far time and memory are off, as fractions of the measured."""

    row: tuple[str, ...]
    time_off: float
    memory_off: float


def cases(
    models: Sequence[str], microbatches: Sequence[int], rounds: int, cluster: Cluster
) -> Iterator[Case]:
    """Predict and measure each model, schedule and number of microbatches."""
    if not models:
        return
    empty = found_of(tiny(), (torch.zeros(2, 8),), cluster, 1).processes
    for name in models:
        program = MODELS[name]()
        for schedule in SCHEDULES:
            for n in microbatches:
                graph = step_graph(program, n)
                plan = sw.plan(graph, mesh={"pipeline": 2}, schedule=schedule, microbatches=n)
                found = found_of(sw.build(graph, plan), program.batch, cluster, rounds)
                yield _compared((name, schedule, str(n)), found, empty)


def found_of(
    pipeline: sw.Pipeline, batch: Sequence[Tensor], cluster: Cluster, rounds: int
) -> Found:
    """Predict and run steps in turn, on two processes of one thread that are new in each round.

    How well caches serve a process may depend on where its memory lies, which stays as it is.
    """
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        with sw.TrainingRunner(pipeline, threads=1) as session:
            take_steps(session, batch)
            found = in_turn(session, pipeline, cluster, batch, 1)
            pairs += found.pairs
            if number == rounds - 1:
                processes = session.call_workers(MEMORY)
                session.call_workers(COUNT_TENSORS)
                take_steps(session, batch)
                tensors = session.call_workers(TENSORS)
    return Found(pairs, found.simulation, tensors, processes)


def tiny() -> sw.Pipeline:
    """A step whose tensors take next to nothing."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    program = Program(model, (torch.zeros(2, 8),), lambda x: model(x).square().mean())
    graph = step_graph(program, 2)
    return sw.build(graph, sw.plan(graph, mesh={"pipeline": 2}, microbatches=2))


def _compared(texts: tuple[str, ...], found: Found, empty: Mapping[str, int]) -> Case:
    slot = max(found.tensors, key=lambda name: found.tensors[name])
    held, bytes_ = _of_tensors(found.simulation)[slot], found.tensors[slot]
    off = held / bytes_ - 1
    row = (
        *texts,
        *map(milliseconds, found.seconds),
        f"{found.off:+.1%}",
        f"{held / 1e6:.0f} MB",
        f"{bytes_ / 1e6:.0f} MB",
        f"{off:+.1%}",
        f"{(found.processes[slot] - empty[slot]) / 1e6:.0f} MB",
    )
    return Case(row, found.off, off)


def _of_tensors(simulation: StepSimulation) -> dict[str, int]:
    """The bytes that each slot's allocator has: all but messages, which stand where slots share."""
    return {slot.slot: slot.memory.total - slot.memory.messages for slot in simulation.slots}


def summary(found: Sequence[Case]) -> list[str]:
    """How many cases are near enough, a line for time and one for memory."""
    columns = {
        "step time": [case.time_off for case in found],
        "peak memory": [case.memory_off for case in found],
    }
    return [
        f"{name} within {WITHIN:.0%}: {sum(abs(off) <= WITHIN for off in values)} of "
        f"{len(values)}; largest error {max(map(abs, values)):.1%}"
        for name, values in columns.items()
    ]
