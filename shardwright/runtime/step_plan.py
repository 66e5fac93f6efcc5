"""One slot's training step, laid out: each supertask as often as it runs.

In come a checked document and a `Slot`; out comes a `StepPlan`: the turns of the agenda, as
occurrences that find their tensors and know what they wait for (`step_order`). To the supertasks of
the file come what sets accumulators to zero, copies new contents into constants, and puts outputs
of microbatches together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.comm.operation import Membership
from shardwright.comm.spec import TensorSpec
from shardwright.pipeline.schema import Document
from shardwright.runtime.agenda import Entry, Turn, agenda
from shardwright.runtime.microbatches import Microbatching
from shardwright.runtime.occurrences import Occurrence, Place, PlannedTurn, occurrences_of
from shardwright.runtime.replacement import Replacements, group_of, replacements, runs_once
from shardwright.runtime.slot import Slot, Step, storage_of
from shardwright.runtime.step_order import in_order


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
        Pipeline inputs that come with a leading dimension, the microbatch, and what each one is.
    outputs
        What a step gives: tensors of the step's space; those made once a microbatch have the
        leading dimension too.
    """

    turns: tuple[PlannedTurn, ...]
    entries: tuple[Entry, ...]
    count: int
    microbatches: int
    inputs: Mapping[str, TensorSpec]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Relay:
    """How this slot's pipeline outputs get to another, or others' to it: a name and its part."""

    tensor: str
    membership: Membership
    gives: bool


def plan_step(
    document: Document, slot: Slot, *, lookahead: int = 1, relays: Sequence[Relay] = ()
) -> StepPlan:
    """Lay out the step of a slot whose worker begins up to ``lookahead`` actions early."""
    layout = _Layout(document, slot)
    for turn in agenda(document, slot.name):
        layout.add(turn)
    layout.finish(relays)
    n, inputs = layout.cut.n, layout.cut.inputs
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
        inputs={name: TensorSpec.of(document.tensors[name]) for name in inputs},
        outputs=tuple(sorted(outputs)),
    )


class _Layout:
    """Writes a step's occurrences, without what they wait for."""

    def __init__(self, document: Document, slot: Slot) -> None:
        self.cut = Microbatching.of(document)
        self.turns: list[PlannedTurn] = []
        self.entries: list[Entry] = []
        self._document = document
        self._slot = slot
        self._steps = {step.task: step for step in slot.steps}
        self._changes: Replacements = replacements(document, slot.name)
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
                step = Step(f"stack {name}", None, (), (name,), _stack)
                reads = tuple((space, name) for space in range(self.cut.n))
                found.append(self._occurrence(step, self.cut.n, reads))
        for relay in relays:
            inputs, outputs = ((relay.tensor,), ()) if relay.gives else ((), (relay.tensor,))
            step = Step(f"output {relay.tensor}", None, inputs, outputs, None, relay.membership)
            found.append(self._occurrence(step, self.cut.n, tuple((self.cut.n, i) for i in inputs)))
        self._apart(self.turns[-1].action if self.turns else 0, found)

    def _apart(self, action: int, found: Sequence[Occurrence]) -> None:
        """Add a turn for each occurrence."""
        self.turns += [PlannedTurn(action, (occurrence,)) for occurrence in found]

    def _zero(self, names: tuple[str, ...]) -> None:
        step = Step("zero accumulators", None, names, (), _set_to_zero, writes=names)
        self._apart(0, [self._occurrence(step, self.cut.n)])

    def _occurrence(
        self, step: Step, space: int, reads: tuple[Place, ...] | None = None
    ) -> Occurrence:
        run = step.program
        if step.first is not None and step.task not in self._begun:
            self._begun.add(step.task)
            run = step.first
        if reads is None:
            reads = tuple(self._place(name, space) for name in step.inputs)
        found = Occurrence(self._index, max(0, len(self.entries) - 1), step, run, reads, space)
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


def _copy(copied: Mapping[str, str]) -> Step:
    """Copy new contents into the constants that they replace, unless they are there."""
    names = tuple(name for pair in copied.items() for name in pair)
    return Step("replace constants", None, names, (), _copy_pairs, writes=tuple(copied.values()))


def _copy_pairs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy each even one to the next; one that lies in memory to be written to is cloned first."""
    news, olds = tensors[::2], tensors[1::2]
    written = {storage_of(old) for old in olds}
    moved = [(new, old) for new, old in zip(news, olds, strict=True) if not _are_one(new, old)]
    sources = [new.clone() if storage_of(new) in written else new for new, _ in moved]
    for source, (_, old) in zip(sources, moved, strict=True):
        old.copy_(source)
    return []


def _are_one(new: Tensor, old: Tensor) -> bool:
    return new.data_ptr() == old.data_ptr() and new.stride() == old.stride()


def _set_to_zero(tensors: Sequence[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        tensor.zero_()
    return []


def _stack(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(tensors))]
