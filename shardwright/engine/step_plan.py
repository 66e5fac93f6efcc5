"""One slot's training step, laid out: each supertask as often as it runs.

In come a checked document and the slot's `SlotSteps`; out comes a `StepPlan`: the turns of the
agenda, as occurrences that find their tensors and know what they wait for (`step_order`). To the
supertasks of the file come what sets accumulators to zero, copies new contents into constants, and
puts outputs of microbatches together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from shardwright.engine.agenda import Entry, Turn, agenda
from shardwright.engine.replacement import Microbatching, group_of, runs_once
from shardwright.engine.slot_steps import (
    Occurrence,
    Place,
    PlannedTurn,
    SlotStep,
    SlotSteps,
    occurrences_of,
)
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.schema import Document


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A slot's step.

    entries
        What the agenda says of each place, by `Occurrence.entry`.
    count
        How many occurrences there are.
    microbatches
        How many; the space of the step has this number, that of the constants the next.
    inputs
        Pipeline inputs that come with a leading dimension, the microbatch.
    outputs
        What a step gives: tensors of the step's space; those made once a microbatch have the
        leading dimension too.
    """

    turns: tuple[PlannedTurn, ...]
    entries: tuple[Entry, ...]
    count: int
    microbatches: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Relay:
    """A pipeline output that this slot gives to another, or gets from it."""

    tensor: str
    gives: bool

    @property
    def task(self) -> str:
        """What stands in the place of a supertask."""
        return f"output {self.tensor}"


def plan_step(
    document: Document,
    slot: SlotSteps,
    *,
    lookahead: int = 1,
    relays: Sequence[Relay] = (),
    connections: Connections | None = None,
) -> StepPlan:
    """Lay out the step of a slot whose worker begins up to ``lookahead`` actions early."""
    connections = connections or connect(document)
    layout = _Layout(document, slot, connections)
    for turn in agenda(document, slot.slot, connections):
        layout.add(turn)
    layout.finish(relays)
    n = layout.cut.n
    given = {relay.tensor for relay in relays if relay.gives}
    outputs = {*slot.outputs, *(relay.tensor for relay in relays)} - given
    turns = in_order(
        layout.turns,
        layout.sharing,
        lookahead=lookahead,
        constants=n + 1,
        kept={(n, name) for name in outputs},
    )
    return StepPlan(
        turns=tuple(turns),
        entries=tuple(layout.entries),
        count=len(list(occurrences_of(turns))),
        microbatches=n,
        inputs=tuple(layout.cut.inputs),
        outputs=tuple(sorted(outputs)),
    )


class _Layout:
    """Writes a step's occurrences, without what they wait for."""

    def __init__(self, document: Document, slot: SlotSteps, connections: Connections) -> None:
        self.cut = Microbatching.of(document, connections)
        self.turns: list[PlannedTurn] = []
        self.entries: list[Entry] = []
        self._document = document
        self._slot = slot
        self._steps = {step.task: step for step in slot.steps}
        self._changes = slot.replacements
        self.sharing = {old: frozenset((old,)) for old in self._changes.written}
        for step in slot.steps:
            self.sharing.update(step.sharing)
        self._made = {tensor: step.task for step in slot.steps for tensor in step.outputs}
        self._begun: set[str] = set()
        self._index = 0
        if self._changes.zeroed:
            self._zero(self._changes.zeroed)

    def add(self, turn: Turn) -> None:
        """Lay out a turn of the agenda, with the copies at its end.

        What comes once a step has no order but what it waits for: sums of gradients begin as they
        are made.
        """
        space = self.cut.n if turn.microbatch is None else turn.microbatch
        found = []
        for entry in turn.entries:
            self.entries.append(entry)
            found.append(self._occurrence(self._steps[entry.task], space))
        copied = self._changes.copied.get(group_of(self._document, turn.entries[0].task))
        if copied:
            found.append(self._occurrence(_copy(copied), space))
        if turn.microbatch is None:
            self._apart(turn.action, found)
        else:
            self.turns.append(PlannedTurn(turn.action, tuple(found)))

    def finish(self, relays: Sequence[Relay]) -> None:
        """Put outputs of microbatches together, and send outputs to where they are wanted."""
        found = []
        for name in self._slot.outputs:
            if name in self.cut.outputs:
                step = SlotStep(f"stack {name}", "stack", (), (name,))
                reads = tuple((space, name) for space in range(self.cut.n))
                found.append(self._occurrence(step, self.cut.n, reads))
        for relay in relays:
            inputs, outputs = ((relay.tensor,), ()) if relay.gives else ((), (relay.tensor,))
            step = SlotStep(relay.task, "relay", inputs, outputs, group=relay.task)
            found.append(self._occurrence(step, self.cut.n, tuple((self.cut.n, i) for i in inputs)))
        self._apart(self.turns[-1].action if self.turns else 0, found)

    def _apart(self, action: int, found: Sequence[Occurrence]) -> None:
        """Add a turn for each occurrence."""
        self.turns += [PlannedTurn(action, (occurrence,)) for occurrence in found]

    def _zero(self, names: tuple[str, ...]) -> None:
        step = SlotStep("zero accumulators", "zero", names, (), writes=names)
        self._apart(0, [self._occurrence(step, self.cut.n)])

    def _occurrence(
        self, step: SlotStep, space: int, reads: tuple[Place, ...] | None = None
    ) -> Occurrence:
        first = step.starts and step.task not in self._begun
        self._begun.add(step.task)
        if reads is None:
            reads = tuple(self._place(name, space) for name in step.inputs)
        entry = max(0, len(self.entries) - 1)
        found = Occurrence(self._index, entry, step, reads, space, first)
        self._index += 1
        return found

    def _place(self, name: str, space: int) -> Place:
        """Where an occurrence in ``space`` finds a tensor."""
        n = self.cut.n
        if name in self._slot.constants:
            return n + 1, name
        if space == n and name in self._made and not runs_once(self._document, self._made[name]):
            old = self._slot.replaces.get(name)
            return (n + 1, old) if old is not None else (n - 1, name)
        if name in self._made:
            return (n if runs_once(self._document, self._made[name]) else space), name
        return (space if name in self.cut.inputs else n), name


def _copy(copied: Mapping[str, str]) -> SlotStep:
    """Copy new contents into the constants that they replace, unless they are there."""
    names = tuple(name for pair in copied.items() for name in pair)
    return SlotStep("replace constants", "copy", names, (), writes=tuple(copied.values()))


# --- order ----------------------------------------------------------------------------------------
#
# A worker goes through a turn in order, but does not wait for the communication that it starts, and
# may begin a turn while earlier ones wait for others. What always holds if it begins an occurrence
# only when those in its ``after`` are done: it reads what it would read if all were done one after
# another, it overwrites nothing that is still to be read, no tensor is dropped before its last
# reader is done, and a group's communication begins in the order of the microbatches.


Sharing = Mapping[str, frozenset[str]]
"""Tensor to the constants in whose memory it lies, where those change in a step."""


def in_order(
    turns: Sequence[PlannedTurn],
    sharing: Sharing,
    *,
    lookahead: int,
    constants: int,
    kept: Collection[Place],
) -> list[PlannedTurn]:
    """The turns with ``after`` and ``drops``.

    ``sharing`` says which tensors, constants among them, lie in memory that changes, and in which
    constants'. The tensors in ``kept`` are not dropped, nor are those in the space ``constants``.

    Turns that are more than ``lookahead`` actions apart are never under way together, and within a
    turn computation keeps its order anyhow, so nobody need wait for those.
    """
    needed = _needs(turns, sharing)
    lives = _Lives(turns, constants=constants, kept=kept)
    found = []
    for k, turn in enumerate(turns):
        near = _near(turns[:k], turn, lookahead)
        occurrences = []
        for occurrence in turn.occurrences:
            drops = lives.drops.get(occurrence.index, [])
            last = set[int]().union(*(lives.readers.get(place, ()) for place in drops))
            after = near & (needed[occurrence.index] | last)
            occurrences.append(replace(occurrence, after=tuple(sorted(after)), drops=tuple(drops)))
            if occurrence.step.communicates:
                near.add(occurrence.index)
        found.append(PlannedTurn(turn.action, tuple(occurrences)))
    return found


def _read(occurrence: Occurrence, sharing: Sharing) -> Iterator[object]:
    """What an occurrence must find as it was made: tensors, and memory that changes."""
    yield from occurrence.reads
    for _, name in occurrence.reads:
        yield from sharing.get(name, ())


def _made(occurrence: Occurrence) -> Iterator[object]:
    """What is another after an occurrence; communication of a group goes in order."""
    yield from ((occurrence.space, name) for name in occurrence.step.outputs)
    yield from occurrence.step.writes
    if occurrence.step.communicates:
        yield "group", occurrence.step.group


@dataclass(slots=True)
class _ResourceUse:
    """Who made a resource as it is now, if anybody did, and who has read it since."""

    makers: tuple[int, ...] = ()
    readers: list[int] = field(default_factory=list)


class _Lives:
    """Which tensors are dead after which occurrence, and who reads each of them.

    The tensors in ``kept`` are never dead, nor are those in the space ``constants``.
    """

    def __init__(
        self, turns: Sequence[PlannedTurn], *, constants: int, kept: Collection[Place]
    ) -> None:
        self.readers: dict[Place, set[int]] = {}
        last: dict[Place, int] = {}
        for occurrence in occurrences_of(turns):
            for place in occurrence.reads:
                self.readers.setdefault(place, set()).add(occurrence.index)
                last[place] = occurrence.index
            for name in occurrence.step.outputs:
                last[occurrence.space, name] = occurrence.index
        self.drops: dict[int, list[Place]] = {}
        for place, index in last.items():
            if place[0] != constants and place not in kept:
                self.drops.setdefault(index, []).append(place)


def _near(earlier: Sequence[PlannedTurn], turn: PlannedTurn, lookahead: int) -> set[int]:
    """The occurrences of earlier turns that may be under way when ``turn`` is."""
    turns = takewhile(lambda other: turn.action - other.action <= lookahead, reversed(earlier))
    return {occurrence.index for occurrence in occurrences_of(turns)}


def _needs(turns: Sequence[PlannedTurn], sharing: Sharing) -> dict[int, set[int]]:
    """What each occurrence waits for: makers of what it reads, readers of what it overwrites."""
    uses: dict[object, _ResourceUse] = {}
    needed: dict[int, set[int]] = {}
    for occurrence in occurrences_of(turns):
        mine = needed.setdefault(occurrence.index, set())
        for resource in _read(occurrence, sharing):
            use = uses.setdefault(resource, _ResourceUse())
            use.readers.append(occurrence.index)
            mine.update(use.makers)
        for resource in _made(occurrence):
            use = uses.setdefault(resource, _ResourceUse())
            mine.update(use.readers, use.makers)
            uses[resource] = _ResourceUse((occurrence.index,))
    return needed
