"""A slot's compute supertasks as programs.

Comes in: a checked document and the slot's supertasks that compute. Goes out: a `Compiled` for
each. In a training step programs overwrite the constants that `replacement` says they may.

What always holds: supertasks that share a graph, the shapes they bind and what they overwrite share
one program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.errors import RunError
from shardwright.ir.execute import compile_graph
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.schema import Document
from shardwright.schedule.overwriting import Overwriting

Run = Callable[[Sequence[Tensor]], list[Tensor]]
"""From a supertask's inputs to its outputs."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A supertask's program; ``first`` is that of the first microbatch, where it has another."""

    program: Run
    first: Run | None = None


def compile_tasks(
    document: Document,
    memory: Mapping[str, Overwriting],
    device: torch.device,
    graphs: TaskGraphs | None = None,
) -> dict[str, Compiled]:
    """Compile supertasks, each with what it does to memory. Raises GraphError."""
    compiler = _Compiler(document, device, graphs or TaskGraphs(document))
    return {task: compiler.compile(task, found) for task, found in memory.items()}


def check_kinds(document: Document, slot: str) -> None:
    """Raise RunError where a slot has compute supertasks that this version does not run."""
    for task, spec in document.supertasks.items():
        if spec.device == slot and spec.group is None and spec.kind != "FX":
            raise RunError(
                f"supertask {task!r} is of kind {spec.kind!r}, which this version does not run; "
                "build the pipeline with FX supertasks"
            )


class _Compiler:
    """Compiles supertasks, equal ones once."""

    def __init__(self, document: Document, device: torch.device, graphs: TaskGraphs) -> None:
        self._document = document
        self._device = device
        self._graphs = graphs
        self._programs: dict[object, Run] = {}

    def compile(self, task: str, memory: Overwriting) -> Compiled:
        program = self._program(task, memory, frozenset())
        first = self._program(task, memory, memory.zeros) if memory.zeros else None
        return Compiled(program, first)

    def _program(self, task: str, memory: Overwriting, zeros: frozenset[str]) -> Run:
        """The program that overwrites what it may; some outputs get memory of their own."""
        spec, over = self._document.supertasks[task], memory.over
        key = (
            self._graphs.key(task),
            tuple((spec.outputs.index(new), spec.inputs.index(old)) for new, old in over.items()),
            tuple(sorted(map(spec.outputs.index, memory.fresh))),
            tuple(sorted(map(spec.inputs.index, zeros))),
        )
        if key not in self._programs:
            graph = self._graphs.of(task)
            donated = {
                graph.inputs[spec.inputs.index(old)]: graph.outputs[spec.outputs.index(new)]
                for new, old in over.items()
            }
            run: Run = compile_graph(
                graph,
                self._device,
                donated=donated,
                zeros=[graph.inputs[spec.inputs.index(old)] for old in zeros],
            )
            self._programs[key] = _cloning(run, key[2]) if memory.fresh else run
        return self._programs[key]


def _cloning(run: Run, positions: Sequence[int]) -> Run:
    """The program, with memory of their own for the results at ``positions``."""

    def cloning(tensors: Sequence[Tensor]) -> list[Tensor]:
        results = run(tensors)
        for position in positions:
            results[position] = results[position].clone()
        return results

    return cloning
