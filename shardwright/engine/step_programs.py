"""A slot's step, laid out, with what runs each occurrence.

In come a slot, made ready, and its `StepPlan`; out come `StepPrograms`: for every occurrence the
`Instruction` that has its program or its place in a communication. What stands in no file gets its
program here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.comm.transport import Membership, TensorSpec
from shardwright.engine.slot import Instruction, SlotProgram, storage_of
from shardwright.engine.slot_steps import Does, Occurrence, occurrences_of
from shardwright.engine.step_plan import StepPlan
from shardwright.pipeline.schema import Document


@dataclass(frozen=True, slots=True)
class StepPrograms:
    """A step's plan; ``steps`` by `Occurrence.index`, ``inputs`` that come once a microbatch."""

    plan: StepPlan
    steps: tuple[Instruction, ...]
    inputs: Mapping[str, TensorSpec]


def bind(
    document: Document,
    slot: SlotProgram,
    plan: StepPlan,
    relays: Mapping[str, Membership] | None = None,
) -> StepPrograms:
    """Give a plan's occurrences the slot's steps; ``relays`` are places in operations by task."""
    known = {step.task: step for step in slot.steps}

    def step_of(occurrence: Occurrence) -> Instruction:
        of = occurrence.step
        if of.does == "relay":
            return Instruction(of, None, membership=(relays or {})[of.task])
        return known[of.task] if of.task in known else Instruction(of, None, _PROGRAMS[of.does])

    found = sorted(occurrences_of(plan.turns), key=lambda occurrence: occurrence.index)
    inputs = {name: TensorSpec.of(document.tensors[name]) for name in plan.inputs}
    return StepPrograms(plan, tuple(map(step_of, found)), inputs)


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


_PROGRAMS: dict[Does, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    "copy": _copy_pairs,
    "zero": _set_to_zero,
    "stack": _stack,
}
