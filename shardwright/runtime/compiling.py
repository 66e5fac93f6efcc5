"""A slot's compute supertasks as programs.

Comes in: a checked document and the slot's supertasks that compute. Goes out: a `Compiled` for
each. In a training step programs overwrite the constants that `replacement` says they may.

What always holds: supertasks that share a graph, the shapes they bind and what they overwrite share
one program. A tensor that is still read when a constant changes does not lie in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import RunError
from shardwright.ir import IRGraph
from shardwright.ir.aliasing import memory_roots
from shardwright.ir.execute import compile_graph
from shardwright.pipeline.check_compute import data_of
from shardwright.pipeline.connections import connect
from shardwright.pipeline.fxtext import decode
from shardwright.pipeline.schema import Document, SuperTask
from shardwright.runtime.replacement import Replacements, replacements

Run = Callable[[Sequence[Tensor]], list[Tensor]]
"""From a supertask's inputs to its outputs."""

_ORDER = ("prepare", "forward", "backward", "backward_weight", "update", None)
"""In which order phases come in a step; the output supertask, which has none, is last."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A supertask's program; see `slot.Step` for what the fields are."""

    program: Run
    first: Run | None
    writes: tuple[str, ...]
    sharing: Mapping[str, frozenset[str]]

    def fields(self) -> dict[str, Any]:
        """The fields by name, for the step that has them too."""
        return {name: getattr(self, name) for name in self.__slots__}


def compile_tasks(
    document: Document, tasks: Sequence[str], device: torch.device
) -> dict[str, Compiled]:
    """Compile supertasks of one slot, in file order. Raises GraphError and RunError."""
    if not tasks:
        return {}
    compiler = _Compiler(document, str(document.supertasks[tasks[0]].device), device)
    return {task: compiler.compile(task) for task in tasks}


class _Compiler:
    """Compiles supertasks, equal ones once."""

    def __init__(self, document: Document, slot: str, device: torch.device) -> None:
        self._document = document
        self._device = device
        self._graphs: dict[object, IRGraph] = {}
        self._programs: dict[object, Run] = {}
        self._replacements: Replacements = replacements(document, slot)
        self._sharing: dict[str, frozenset[str]] = {
            old: frozenset((old,)) for old in self._replacements.written
        }
        self._lives = _Lives(document)

    def compile(self, task: str) -> Compiled:
        spec = self._document.supertasks[task]
        if spec.kind != "FX":
            raise RunError(
                f"supertask {task!r} is of kind {spec.kind!r}, which this version does not run; "
                "build the pipeline with FX supertasks"
            )
        over = self._replacements.in_place.get(task, {})
        fresh = self._share(task, spec, over)
        zeros = self._replacements.assigned.intersection(over.values())
        return Compiled(
            self._program(task, spec, over, fresh, frozenset()),
            self._program(task, spec, over, fresh, zeros) if zeros else None,
            self._constants(over.values()),
            {name: self._sharing[name] for name in spec.outputs if name in self._sharing},
        )

    def _constants(self, tensors: Iterable[str]) -> tuple[str, ...]:
        """The constants in whose memory tensors lie."""
        return tuple(sorted({old for name in tensors for old in self._sharing.get(name, ())}))

    def _program(
        self,
        task: str,
        spec: SuperTask,
        over: Mapping[str, str],
        fresh: frozenset[str],
        zeros: frozenset[str],
    ) -> Run:
        """The program that writes ``over``; the outputs ``fresh`` get memory of their own."""
        key = (
            self._key(spec),
            tuple((spec.outputs.index(new), spec.inputs.index(old)) for new, old in over.items()),
            tuple(sorted(map(spec.outputs.index, fresh))),
            tuple(sorted(map(spec.inputs.index, zeros))),
        )
        if key not in self._programs:
            graph = self._graph(task, spec)
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
            self._programs[key] = _cloning(run, key[2]) if fresh else run
        return self._programs[key]

    def _key(self, spec: SuperTask) -> object:
        inputs = [self._document.tensors[name] for name in spec.inputs]
        text = data_of(self._document, spec)
        return text, tuple((info.shape, info.dtype, info.strides) for info in inputs)

    def _graph(self, task: str, spec: SuperTask) -> IRGraph:
        key = self._key(spec)
        if key not in self._graphs:
            inputs = [self._document.tensors[name] for name in spec.inputs]
            self._graphs[key] = decode(data_of(self._document, spec), inputs, name=task)
        return self._graphs[key]

    def _share(self, task: str, spec: SuperTask, over: Mapping[str, str]) -> frozenset[str]:
        """Note which outputs lie in memory of constants that change; gives those that must not."""
        if self._sharing.keys().isdisjoint(spec.inputs):
            return frozenset()
        graph = self._graph(task, spec)
        roots = memory_roots(graph)
        homes: dict[int, frozenset[str]] = {}
        for value_id, name in zip(graph.inputs, spec.inputs, strict=True):
            homes[value_id] = self._sharing.get(name, frozenset())
        for value_id, name in zip(graph.outputs, spec.outputs, strict=True):
            if name in over:
                homes[value_id] = self._sharing.get(over[name], frozenset())
        fresh = set()
        for value_id, name in zip(graph.outputs, spec.outputs, strict=True):
            found = frozenset[str]().union(*(homes.get(r, frozenset()) for r in roots[value_id]))
            if name in over:
                self._sharing[name] = homes[value_id]
            elif found and self._lives.outlives(name, found, self._replacements):
                fresh.add(name)
            elif found:
                self._sharing[name] = found
        return frozenset(fresh)


class _Lives:
    """Until when tensors are read, in the order of one microbatch and of the file."""

    def __init__(self, document: Document) -> None:
        self._connections = connect(document)
        self._order = {
            name: (_ORDER.index(task.phase), k)
            for k, (name, task) in enumerate(document.supertasks.items())
        }

    def outlives(self, tensor: str, constants: frozenset[str], found: Replacements) -> bool:
        """Whether a tensor is still read when, or after, one of ``constants`` changes."""
        changes = [self._connections.producers[found.written[old]][0] for old in constants]
        first = min(self._order[maker] for maker in changes)
        return any(self._order[user] >= first for user in self._connections.users.get(tensor, ()))


def _cloning(run: Run, positions: Sequence[int]) -> Run:
    """The program, with memory of their own for the results at ``positions``."""

    def cloning(tensors: Sequence[Tensor]) -> list[Tensor]:
        results = run(tensors)
        for position in positions:
            results[position] = results[position].clone()
        return results

    return cloning
