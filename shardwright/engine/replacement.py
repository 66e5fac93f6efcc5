"""How a slot's constants change during a training step, and which memory its programs write to.

`Replacements` say for each constant that is replaced whether the program that makes its new
contents leaves them in its memory, or whether they are copied there at the end of the turn; and how
accumulators become zero. `MemoryUse` says for each supertask that computes what its program does to
memory.

A constant stays where it is in memory for as long as its slot lives. Who reads the old contents by
name reads them: no program overwrites what a later supertask of its turn still reads, and a tensor
that is still read when a constant changes does not lie in its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.ir.aliasing import memory_roots
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.rules import COMPUTE_KINDS
from shardwright.pipeline.schema import Document, Phase, TensorInfo

Group = tuple[Phase | None, int | None]
"""Phase and stage: supertasks of one slot that have both alike run in one turn."""


@dataclass(frozen=True, slots=True)
class Replacements:
    """What becomes of a slot's constants in a step; tensors and supertasks are named.

    written
        Every constant that is replaced, and its new contents.
    in_place
        Supertask to what it makes in the memory of one of its inputs: mostly a constant's new
        contents in the constant's, sometimes in two steps (`_carriers`).
    copied
        Phase and stage to new contents, and the constants they are copied to when the turn ends,
        if they are not there already.
    assigned
        Accumulators that their supertask takes for zeros in the first microbatch.
    zeroed
        Accumulators that are set to zero before a step.
    """

    written: dict[str, str] = field(default_factory=dict)
    in_place: dict[str, dict[str, str]] = field(default_factory=dict)
    copied: dict[Group | None, dict[str, str]] = field(default_factory=dict)
    assigned: frozenset[str] = frozenset()
    zeroed: tuple[str, ...] = ()


def group_of(document: Document, task: str) -> Group:
    """A supertask's phase and stage."""
    return document.supertasks[task].phase, document.supertasks[task].stage


def runs_once(document: Document, task: str) -> bool:
    """Whether a supertask of a training step runs once a step, not once a microbatch."""
    return document.supertasks[task].phase in ("prepare", "update")


def find_replacements(index: Connections, slot: str, *, is_step: bool) -> Replacements:
    """The replacements of a slot in a training step; none in a call."""
    document = index.document
    if not is_step or document.training is None:
        return Replacements()
    written: dict[str, str] = {}
    in_place: dict[str, dict[str, str]] = {}
    copied: dict[Group | None, dict[str, str]] = {}
    accumulators: dict[str, bool] = {}
    for new, old in document.training.replaces.items():
        if index.devices[new] != slot:
            continue
        written[old] = new
        (maker,) = index.producers[new]
        carriers = _carriers(index, maker, new, old)
        for task, made, memory in carriers:
            in_place.setdefault(task, {})[made] = memory
        if len(carriers) != 1:
            copied.setdefault(group_of(document, maker), {})[new] = old
        if document.tensors[old].init is not None and not runs_once(document, maker):
            accumulators[old] = bool(carriers) and _is_read_by_one(index, old)
    assigned = frozenset(old for old, alone in accumulators.items() if alone)
    zeroed = tuple(old for old in accumulators if old not in assigned)
    return Replacements(written, in_place, copied, assigned, zeroed)


def _carriers(index: Connections, maker: str, new: str, old: str) -> list[tuple[str, str, str]]:
    """The supertasks that carry old contents to the new ones, the last first; none if none may.

    With each is what it makes, and the input in whose memory it may make it. Mostly there is only
    ``maker``. Where a parameter is used twice, one supertask adds to its accumulator and another to
    what that one made.
    """
    if not _is_short_lived(index, new):
        return []
    found: list[tuple[str, str, str]] = []
    task: str | None = maker
    while task is not None and index.document.supertasks[task].kind in COMPUTE_KINDS:
        inputs = index.document.supertasks[task].inputs
        if inputs.count(old) == 1:
            found.append((task, new, old))
            return found if _reads_last(index, task, old) else []
        between = _between(index, task, old)
        if between is None:
            return []
        found.append((task, new, between))
        (task,), new = index.producers[between], between
    return []


def _is_short_lived(index: Connections, new: str) -> bool:
    """Whether new contents are read only in their turn, where that comes once a microbatch."""
    document, (maker,) = index.document, index.producers[new]
    group = group_of(document, maker)
    return runs_once(document, maker) or all(
        group_of(document, reader) == group or document.supertasks[reader].phase == "update"
        for reader in index.users.get(new, ())
    )


def _reads_last(index: Connections, task: str, old: str) -> bool:
    """Whether no later supertask of the turn reads the old contents."""
    document = index.document

    def turn(name: str) -> object:
        return group_of(document, name), document.supertasks[name].device

    users = index.users[old]
    return turn(task) not in map(turn, users[users.index(task) + 1 :])


def _between(index: Connections, task: str, old: str) -> str | None:
    """The one input of ``task`` that may be what another supertask of the turn made of ``old``.

    None where several may: two accumulators would be taken to lie in one place.
    """
    document = index.document
    group = group_of(document, task)
    found = []
    for name in document.supertasks[task].inputs:
        info, makers = document.tensors[name], index.producers.get(name, [])
        if (
            _kind(info) == _kind(document.tensors[old])
            and not info.is_constant
            and index.users[name] == [task]
            and makers
            and group_of(document, makers[0]) == group
            and _leads_to(index, makers[0], old)
        ):
            found.append(name)
    return found[0] if len(found) == 1 else None


def _leads_to(index: Connections, task: str, old: str) -> bool:
    """Whether a supertask reads ``old``, or what may have been made of it, and none like it."""
    tensors, inputs = index.document.tensors, index.document.supertasks[task].inputs
    if old not in inputs:
        return _between(index, task, old) is not None
    kind = _kind(tensors[old])
    return sum(tensors[x].init is not None and _kind(tensors[x]) == kind for x in inputs) == 1


def _kind(info: TensorInfo) -> object:
    return info.shape, info.dtype, info.strides


def _is_read_by_one(index: Connections, old: str) -> bool:
    """Whether a single supertask reads an accumulator before the update."""
    tasks = index.document.supertasks
    return len({user for user in index.users[old] if tasks[user].phase != "update"}) == 1


# --- memory -------------------------------------------------------------------------------------


_PHASES = ("prepare", "forward", "backward", "backward_weight", "update", None)
"""In which order phases come in a step; the output supertask, which has none, is last."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
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


def find_memory_use(
    index: Connections, changes: Replacements, tasks: Sequence[str], graphs: TaskGraphs
) -> dict[str, MemoryUse]:
    """What a slot's compute supertasks, in file order, do to memory. Raises GraphError."""
    analysis = _AliasAnalysis(index, changes, graphs)
    return {task: analysis.of(task) for task in tasks}


class _AliasAnalysis:
    """Follows constants that change, and what lies in their memory, through supertasks.

    Lowered ones have memory of their own for all that they do not make in an input's.
    """

    def __init__(self, index: Connections, changes: Replacements, graphs: TaskGraphs) -> None:
        self._index = index
        self._changes = changes
        self._graphs = graphs
        self._sharing = {old: frozenset((old,)) for old in changes.written}
        self._order = {
            name: (_PHASES.index(task.phase), k)
            for k, (name, task) in enumerate(index.document.supertasks.items())
        }

    def of(self, task: str) -> MemoryUse:
        over = self._changes.in_place.get(task, {})
        fresh = self._share(task, over)
        outputs = self._index.document.supertasks[task].outputs
        return MemoryUse(
            over,
            fresh,
            self._changes.assigned.intersection(over.values()),
            tuple(sorted(self._constants(over.values()))),
            {name: self._sharing[name] for name in outputs if name in self._sharing},
        )

    def _constants(self, tensors: Iterable[str]) -> frozenset[str]:
        """The constants in whose memory tensors lie."""
        return frozenset[str]().union(*(self._sharing.get(name, ()) for name in tensors))

    def _share(self, task: str, over: Mapping[str, str]) -> frozenset[str]:
        """Note which outputs lie in memory of constants that change; gives those that must not."""
        spec = self._index.document.supertasks[task]
        if self._sharing.keys().isdisjoint(spec.inputs):
            return frozenset()
        inherited = {new: self._constants([old]) for new, old in over.items()}
        if spec.kind == "dfg":
            self._sharing |= inherited
            return frozenset()
        graph = self._graphs.of(task)
        roots = memory_roots(graph)
        memory = {v: self._constants([x]) for v, x in zip(graph.inputs, spec.inputs, strict=True)}
        outputs = dict(zip(spec.outputs, graph.outputs, strict=True))
        memory |= {outputs[new]: constants for new, constants in inherited.items()}
        fresh = set()
        for name, value_id in outputs.items():
            found = frozenset[str]().union(*(memory.get(root, ()) for root in roots[value_id]))
            if name in over:
                self._sharing[name] = memory[value_id]
            elif found and self._outlives(name, found):
                fresh.add(name)
            elif found:
                self._sharing[name] = found
        return frozenset(fresh)

    def _outlives(self, tensor: str, constants: frozenset[str]) -> bool:
        """Whether a tensor is still read when, or after, one of ``constants`` changes.

        In the order of one microbatch, and of the file.
        """
        changes = [self._index.producers[self._changes.written[old]][0] for old in constants]
        first = min(self._order[maker] for maker in changes)
        return any(self._order[user] >= first for user in self._index.users.get(tensor, ()))
