"""What a slot does in one call or one training step, as data that follows from the file alone.

`slot_program` lays a slot's supertasks out as instructions: a supertask once a microbatch, or once
a step, with the tensors that it reads, makes and overwrites, when tensors are dead, and what it has
to wait for. A call is a step without microbatches. Workers and the simulator run the same program.
To the supertasks of the file come what sets accumulators to zero, copies new contents into
constants, puts outputs of microbatches together, and relays outputs to other slots.

Everybody who reads the file finds the same program, so a number is enough to say where a worker is:
that of an `Entry`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from shardwright.comm.transport import TensorSpec
from shardwright.engine.replacement import (
    MemoryUse,
    Replacements,
    find_memory_use,
    find_replacements,
    group_of,
    runs_once,
)
from shardwright.engine.walk import (
    Instruction,
    SlotTask,
    SpacedTensor,
    Turn,
    order_in_file,
    order_step,
)
from shardwright.pipeline.check_schedule import SlotAction, schedule_of, slot_actions
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.rules import COMPUTE_KINDS
from shardwright.pipeline.schema import Document, SuperTask, TensorInfo


class Entry(NamedTuple):
    """A supertask at its place in a program; ``tensor`` is what a communication is about."""

    task: str
    tensor: str | None = None
    stage: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class Relay:
    """A pipeline output that this slot gives to another, or gets from it, as a step ends."""

    tensor: str
    gives: bool

    @property
    def task(self) -> str:
        """What stands in the place of a supertask."""
        return f"output {self.tensor}"


@dataclass(frozen=True, slots=True)
class SlotProgram:
    """One slot's work in a call or a step.

    tasks
        The slot's supertasks, in file order.
    entries
        What is known of each place, by `Instruction.entry`.
    microbatches
        How many; the space of the step has this number, that of the constants the next. None in a
        call, whose tensors are all the step's.
    inputs
        Pipeline inputs that come with a leading dimension, the microbatch, and what a part is.
    outputs
        What is given, from the step's space; those made once a microbatch have the leading
        dimension too.
    constants
        The constants that the supertasks read.
    replaced
        Produced tensor to the constant that it becomes when a call is over.
    memory
        What each supertask that computes does to memory.
    sums
        Constants that are zero when a step begins.
    lookahead
        How many actions of the schedule a later turn may begin early.
    """

    slot: str
    is_step: bool
    tasks: tuple[SlotTask, ...]
    turns: tuple[Turn, ...]
    entries: tuple[Entry, ...]
    microbatches: int
    inputs: Mapping[str, TensorSpec]
    outputs: tuple[str, ...]
    constants: Mapping[str, TensorInfo]
    replaced: Mapping[str, str]
    memory: Mapping[str, MemoryUse]
    sums: frozenset[str]
    lookahead: int

    @property
    def instructions(self) -> Iterator[Instruction]:
        """All instructions, turn by turn."""
        return chain.from_iterable(turn.instructions for turn in self.turns)


def is_training(document: Document) -> bool:
    """Whether the document is of a training step, cut in microbatches."""
    return document.training is not None and document.training.microbatches is not None


def default_lookahead(document: Document) -> int:
    """How many actions a worker begins early where nobody says."""
    assert document.training is not None
    assert document.training.schedule is not None
    return 2 if document.training.schedule.ranks == 1 else 1


def constants_of(document: Document, slot: str) -> dict[str, TensorInfo]:
    """The constants that a slot's supertasks read, by name."""
    return _constants([t for t in document.supertasks.values() if t.device == slot], document)


def entries_of(document: Document, slot: str) -> list[Entry]:
    """The entries of a slot's program, in order."""
    index = connect(document)
    return [
        _entry(document, name, action) for action in _actions(index, slot) for name in action.tasks
    ]


def slot_program(
    document: Document,
    slot: str,
    *,
    lookahead: int = 1,
    relays: Sequence[Relay] = (),
    graphs: TaskGraphs | None = None,
    index: Connections | None = None,
) -> SlotProgram:
    """The program of a slot of a checked document. Raises GraphError where a graph is none."""
    index = index or connect(document)
    computing = [t for t in index.order[slot] if document.supertasks[t].kind in COMPUTE_KINDS]
    changes = find_replacements(index, slot, is_step=is_training(document))
    memory = find_memory_use(index, changes, computing, graphs or TaskGraphs(document))
    layout = _TensorLayout(index, slot, changes, memory)
    for action in _actions(index, slot):
        layout.add(action)
    return layout.finish(relays, lookahead)


def _actions(index: Connections, slot: str) -> Iterator[SlotAction]:
    """What a slot does in order; a call is a single action."""
    if is_training(index.document):
        assert index.document.training is not None
        yield from slot_actions(index, slot, schedule_of(index.document.training))
    else:
        yield SlotAction(0, "forward", None, tuple(index.order[slot]))


def _entry(document: Document, name: str, action: SlotAction) -> Entry:
    spec = document.supertasks[name]
    tensor = next(iter((*spec.inputs, *spec.outputs))) if spec.group is not None else None
    if action.action is None:
        return Entry(name, tensor)
    return Entry(name, tensor, action.action.stage, action.action.microbatch)


class _TensorLayout:
    """Writes the instructions of a program, then what they wait for."""

    def __init__(
        self,
        index: Connections,
        slot: str,
        changes: Replacements,
        memory: Mapping[str, MemoryUse],
    ) -> None:
        document = index.document
        self._index = index
        self._slot = slot
        self._is_step = is_training(document)
        self._cut = Microbatching.of(document, index)
        self._n = self._cut.n if self._is_step else 0
        self._changes = changes
        self._memory = memory
        self._tasks = {name: self._task(name) for name in index.order[slot]}
        self._constants = _constants([document.supertasks[t] for t in self._tasks], document)
        self._made = {made: task.name for task in self._tasks.values() for made in task.outputs}
        replaces = document.replaces
        self._replaces = {a: b for a, b in replaces.items() if index.devices[a] == slot}
        self._turns: list[Turn] = []
        self._entries: list[Entry] = []
        self._begun: set[str] = set()
        self._count = 0
        if changes.zeroed:
            zero = SlotTask("zero accumulators", "zero", changes.zeroed, (), writes=changes.zeroed)
            self._apart(0, [self._instruction(zero, self._n)])

    def add(self, action: SlotAction) -> None:
        """Lay out an action, with the copies at its end.

        What comes once a step has no order but what it waits for: sums of gradients begin as they
        are made.
        """
        space = self._n if action.action is None else action.action.microbatch
        found = []
        for name in action.tasks:
            self._entries.append(_entry(self._index.document, name, action))
            found.append(self._instruction(self._tasks[name], space))
        group = group_of(self._index.document, action.tasks[0]) if action.tasks else None
        if copied := self._changes.copied.get(group):
            names = tuple(chain.from_iterable(copied.items()))
            copy = SlotTask("replace constants", "copy", names, (), writes=(*copied.values(),))
            found.append(self._instruction(copy, space))
        if self._is_step and action.action is None:
            self._apart(action.number, found)
        elif found:
            self._turns.append(Turn(action.number, tuple(found)))

    def finish(self, relays: Sequence[Relay], lookahead: int) -> SlotProgram:
        """Put outputs of microbatches together, send outputs to where they are wanted, and order.

        Instructions of a call go in file order, each behind the communication before it.
        """
        tensors = self._index.document.tensors
        own = self._outputs()
        self._finish_outputs(own, relays)
        given = {relay.tensor for relay in relays if relay.gives}
        outputs = {*own, *(relay.tensor for relay in relays)} - given
        kept = {(self._n, name) for name in outputs}
        if self._is_step:
            sharing = {old: frozenset((old,)) for old in self._changes.written}
            for task in self._tasks.values():
                sharing.update(task.sharing)
            turns = order_step(
                self._turns, sharing, lookahead=lookahead, constants=self._n + 1, kept=kept
            )
        else:
            kept |= {(self._n, new) for new in self._replaces}
            turns = order_in_file(self._turns, constants=self._n + 1, kept=kept)
        return SlotProgram(
            slot=self._slot,
            is_step=self._is_step,
            tasks=tuple(self._tasks.values()),
            turns=tuple(turns),
            entries=tuple(self._entries),
            microbatches=self._n,
            inputs={name: TensorSpec.of(tensors[name]) for name in self._cut.inputs},
            outputs=tuple(sorted(outputs)) if self._is_step else own,
            constants=self._constants,
            replaced={} if self._is_step else self._replaces,
            memory=self._memory,
            sums=frozenset((*self._changes.assigned, *self._changes.zeroed)),
            lookahead=lookahead,
        )

    def _outputs(self) -> tuple[str, ...]:
        """The pipeline outputs that are made here."""
        return tuple(
            tensor
            for task in self._index.ends["output"]
            for tensor in self._index.document.supertasks[task].inputs
            if self._index.devices[tensor] == self._slot
        )

    def _finish_outputs(self, own: Sequence[str], relays: Sequence[Relay]) -> None:
        found = []
        for name in own:
            if name in self._cut.outputs:
                stack = SlotTask(f"stack {name}", "stack", (), (name,))
                reads = tuple((space, name) for space in range(self._n))
                found.append(self._instruction(stack, self._n, reads))
        for relay in relays:
            inputs, outputs = ((relay.tensor,), ()) if relay.gives else ((), (relay.tensor,))
            task = SlotTask(relay.task, "relay", inputs, outputs, group=relay.task)
            reads = tuple((self._n, name) for name in inputs)
            found.append(self._instruction(task, self._n, reads))
        self._apart(self._turns[-1].action if self._turns else 0, found)

    def _apart(self, action: int, found: Sequence[Instruction]) -> None:
        """Add a turn for each instruction."""
        self._turns += [Turn(action, (instruction,)) for instruction in found]

    def _task(self, name: str) -> SlotTask:
        spec = self._index.document.supertasks[name]
        memory = self._memory.get(name, MemoryUse())
        return SlotTask(
            name,
            "compute" if spec.group is None else "communicate",
            spec.inputs,
            spec.outputs,
            spec.group,
            bool(memory.zeros),
            memory.writes,
            memory.sharing,
        )

    def _instruction(
        self, task: SlotTask, space: int, reads: tuple[SpacedTensor, ...] | None = None
    ) -> Instruction:
        first = task.starts and task.name not in self._begun
        self._begun.add(task.name)
        if reads is None:
            reads = tuple(self._find(name, space) for name in task.inputs)
        entry = max(0, len(self._entries) - 1)
        self._count += 1
        return Instruction(self._count - 1, entry, task, reads, space, first)

    def _find(self, name: str, space: int) -> SpacedTensor:
        """Where an instruction in ``space`` finds a tensor."""
        n, document = self._n, self._index.document
        if name in self._constants:
            return n + 1, name
        if not self._is_step:
            return n, name
        if space == n and name in self._made and not runs_once(document, self._made[name]):
            old = self._replaces.get(name)
            return (n + 1, old) if old is not None else (n - 1, name)
        if name in self._made:
            return (n if runs_once(document, self._made[name]) else space), name
        return (space if name in self._cut.inputs else n), name


def _constants(tasks: Iterable[SuperTask], document: Document) -> dict[str, TensorInfo]:
    """The constants that supertasks read, by name."""
    names = chain.from_iterable(task.inputs for task in tasks)
    return {name: document.tensors[name] for name in names if document.tensors[name].is_constant}


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a batch is cut.

    ``inputs`` and ``outputs`` are the pipeline's tensors of which there is one a microbatch, each
    with the dimension along which that of microbatch i lies further on; an output of a single
    microbatch may have none.
    """

    n: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int | None]

    @classmethod
    def of(cls, document: Document, index: Connections | None = None) -> Microbatching:
        """How a document says it."""
        if not is_training(document):
            return cls(1, {}, {})
        assert document.training is not None
        assert document.training.microbatches is not None
        dims, slices = document.training.microbatches.dim, document.metadata.tensor_slices
        index = index or connect(document)
        inputs = {
            name: dims[piece.origin]
            for name, piece in slices.inputs.items()
            if piece.origin in dims
            and not all(runs_once(document, user) for user in index.users.get(name, ()))
        }
        outputs = {
            name: dims.get(piece.origin)
            for name, piece in slices.outputs.items()
            if not runs_once(document, index.producers[name][0])
        }
        return cls(document.training.microbatches.n, inputs, outputs)
