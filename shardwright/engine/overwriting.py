"""Which memory a slot's compute supertasks write to and share, as it follows from the file.

Comes in: a checked document, a slot, and its supertasks that compute, in file order. Goes out: an
`Overwriting` for each.

What always holds: a tensor that is still read when a constant changes does not lie in its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.engine.replacement import Replacements
from shardwright.ir.aliasing import memory_roots
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.schema import Document

_ORDER = ("prepare", "forward", "backward", "backward_weight", "update", None)
"""In which order phases come in a step; the output supertask, which has none, is last."""


@dataclass(frozen=True, slots=True)
class Overwriting:
    """What a supertask's program does to memory.

    over
        Outputs that it makes in the memory of an input, and that input.
    fresh
        Outputs that must get memory of their own.
    zeros
        Inputs whose contents count as zeros in the first microbatch.
    writes
        Constants that it overwrites.
    sharing
        Outputs that may lie in the memory of constants which change, and those constants.
    """

    over: Mapping[str, str] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    zeros: frozenset[str] = frozenset()
    writes: tuple[str, ...] = ()
    sharing: Mapping[str, frozenset[str]] = field(default_factory=dict)


def overwriting(
    document: Document,
    found: Replacements,
    tasks: Sequence[str],
    graphs: TaskGraphs,
    connections: Connections,
) -> dict[str, Overwriting]:
    """What each of a slot's compute supertasks does to memory. Raises GraphError."""
    survey = _Survey(document, found, graphs, connections)
    return {task: survey.of(task) for task in tasks}


class _Survey:
    """Goes through the supertasks in file order.

    Lowered ones have memory of their own for all that they do not make in an input's.
    """

    def __init__(
        self,
        document: Document,
        found: Replacements,
        graphs: TaskGraphs,
        connections: Connections,
    ) -> None:
        self._document = document
        self._graphs = graphs
        self._replacements = found
        self._sharing = {old: frozenset((old,)) for old in found.written}
        self._lives = _TensorLives(document, connections)

    def of(self, task: str) -> Overwriting:
        over = self._replacements.in_place.get(task, {})
        fresh = self._share(task, over)
        outputs = self._document.supertasks[task].outputs
        return Overwriting(
            over,
            fresh,
            self._replacements.assigned.intersection(over.values()),
            self._constants(over.values()),
            {name: self._sharing[name] for name in outputs if name in self._sharing},
        )

    def _constants(self, tensors: Iterable[str]) -> tuple[str, ...]:
        """The constants in whose memory tensors lie."""
        return tuple(sorted({old for name in tensors for old in self._sharing.get(name, ())}))

    def _share(self, task: str, over: Mapping[str, str]) -> frozenset[str]:
        """Note which outputs lie in memory of constants that change; gives those that must not."""
        spec = self._document.supertasks[task]
        if self._sharing.keys().isdisjoint(spec.inputs):
            return frozenset()
        if spec.kind == "dfg":
            self._sharing |= {new: self._sharing.get(old, frozenset()) for new, old in over.items()}
            return frozenset()
        graph = self._graphs.of(task)
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


class _TensorLives:
    """Until when tensors are read, in the order of one microbatch and of the file."""

    def __init__(self, document: Document, connections: Connections) -> None:
        self._connections = connections
        self._order = {
            name: (_ORDER.index(task.phase), k)
            for k, (name, task) in enumerate(document.supertasks.items())
        }

    def outlives(self, tensor: str, constants: frozenset[str], found: Replacements) -> bool:
        """Whether a tensor is still read when, or after, one of ``constants`` changes."""
        changes = [self._connections.producers[found.written[old]][0] for old in constants]
        first = min(self._order[maker] for maker in changes)
        return any(self._order[user] >= first for user in self._connections.users.get(tensor, ()))
