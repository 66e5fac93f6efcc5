"""Making the worker of a slot, of whichever kind its pipeline needs.

In come a checked document, a slot's name, the contents of its constants and its transport; out
comes a `CallWorker`, or a `StepWorker` where the document is of a training step. A second pipeline
on the same slot takes the first one's constants, told by name and placements (`shared_constants`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.comm.operation import Membership
from shardwright.comm.transport import Transport
from shardwright.errors import RunError
from shardwright.pipeline.schema import Document, StateOrigin
from shardwright.runtime.board import Board
from shardwright.runtime.call_worker import CallWorker
from shardwright.runtime.slot import make_slot, wholes_of
from shardwright.runtime.step_programs import bind
from shardwright.runtime.step_worker import StepWorker
from shardwright.runtime.worker import Worker
from shardwright.schedule.agenda import is_training
from shardwright.schedule.slot_steps import constants_of
from shardwright.schedule.step_plan import Relay, plan_step


@dataclass(frozen=True, slots=True)
class Options:
    """How workers run: whether they note events, and how many actions they may begin early."""

    trace: bool = False
    lookahead: int = 1


def make_worker(
    document: Document,
    name: str,
    constants: Mapping[str, Tensor],
    transport: Transport,
    options: Options,
    *,
    board: Board | None = None,
    relays: Mapping[Relay, Membership] | None = None,
    shares: bool = False,
) -> Worker:
    """The worker of a slot. Raises GraphError, DeviceError, RunError.

    ``relays`` are for a training step; ``shares`` says that another worker changes the constants.
    """
    fixed = not shares and not is_training(document)
    slot = make_slot(document, name, constants, fixed=fixed)
    if not is_training(document):
        return CallWorker(slot, transport, trace=options.trace, board=board, shares=shares)
    given = relays or {}
    plan = plan_step(document, slot.plain, lookahead=options.lookahead, relays=tuple(given))
    programs = bind(document, slot, plan, {relay.task: part for relay, part in given.items()})
    return StepWorker(
        slot, programs, transport, lookahead=options.lookahead, trace=options.trace, board=board
    )


def shared_constants(document: Document, trained: Document) -> dict[str, str]:
    """Which constant of ``trained`` each of ``document``'s is, slot by slot, where it is one.

    Those whose name nothing in ``trained`` has are left out. Raises RunError where the slots are
    others, or where ``trained`` has a constant of the name but not this part of it on the slot.
    """
    if list(document.devices) != list(trained.devices):
        raise RunError(
            f"the pipeline has the device slots {', '.join(document.devices)}, the workers are "
            f"{', '.join(trained.devices)}; build it with the same mesh and stages"
        )
    known = {
        whole.name
        for slot in trained.devices
        for whole in wholes_of(trained, constants_of(trained, slot)).values()
    }
    found: dict[str, str] = {}
    for slot in document.devices:
        theirs = wholes_of(trained, constants_of(trained, slot))
        ours = wholes_of(document, constants_of(document, slot))
        found.update(_matched(slot, document, trained, (ours, theirs), known))
    return found


def _matched(
    slot: str,
    document: Document,
    trained: Document,
    wholes: tuple[Mapping[str, StateOrigin], Mapping[str, StateOrigin]],
    known: Collection[str],
) -> dict[str, str]:
    """One slot's constants by those of the other document, by name and placements."""
    ours, theirs = wholes
    known_parts = {_part_key(trained, name, whole): name for name, whole in theirs.items()}
    found = {}
    for name, whole in ours.items():
        other = known_parts.get(_part_key(document, name, whole))
        if other is not None:
            found[name] = other
        elif whole.name in known:
            raise RunError(
                f"device slot {slot!r} needs {whole.name!r} {_ranges(whole)}, which is not what it "
                "has of it for training; build the pipeline with the plan of the training one"
            )
    return found


def _part_key(document: Document, name: str, whole: StateOrigin) -> tuple[Any, ...]:
    """What two documents' constants have in common where one can be used as the other."""
    info = document.tensors[name]
    return whole.name, whole.placements, info.dtype, info.strides


def _ranges(whole: StateOrigin) -> str:
    return f"[{', '.join(f'{start}:{end}' for start, end in whole.placements)}]"
