"""Making the engine of a slot, and engines of several pipelines on one slot's constants.

A second pipeline on the same slot takes the first one's constants, told by name and placements
(`shared_constants`); where it is of a training step too, it changes them in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.comm.transport import Membership, Transport
from shardwright.engine.board import Board
from shardwright.engine.program import Relay, constants_of, is_training
from shardwright.engine.slot import compile_slot, wholes_of
from shardwright.engine.slot_engine import SlotEngine
from shardwright.errors import RunError
from shardwright.pipeline.schema import Document, StateOrigin


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
) -> SlotEngine:
    """The worker of a slot. Raises GraphError, DeviceError, RunError.

    ``relays`` are for a training step; ``shares`` says that another worker changes the constants.
    """
    slot = compile_slot(
        document,
        name,
        constants,
        lookahead=options.lookahead,
        relays=relays,
        fixed=not shares and not is_training(document),
    )
    return SlotEngine(slot, transport, trace=options.trace, board=board, shares=shares)


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


def check_updates(document: Document, trained: Document, shared: Mapping[str, str]) -> None:
    """Raise RunError where a step would change some copies of a state and leave others.

    ``document`` is another step on the state of ``trained``; ``shared`` says which constant of that
    each of its constants is.
    """
    if document.training is None:
        return
    replaced = wholes_of(document, document.training.replaces.values())
    changed = {whole.name for whole in replaced.values()}
    theirs = {
        name: whole.name
        for slot in trained.devices
        for name, whole in wholes_of(trained, constants_of(trained, slot)).items()
    }
    expected = sorted(name for name, whole in theirs.items() if whole in changed)
    found = sorted(shared[name] for name in replaced if name in shared)
    if lacking := [whole.name for name, whole in replaced.items() if name not in shared]:
        raise RunError(
            f"the step {document.name!r} changes {lacking[0]!r}, which the one that is trained "
            "does not have: what it does depends on the shapes of its batch; give batches of "
            "one shape"
        )
    if found != expected:
        wrong = next(iter({*expected}.symmetric_difference(found)), expected[0])
        raise RunError(
            f"the step {document.name!r} does not change {theirs[wrong]!r} on every slot that has "
            "it; build it with the plan of the step that is trained"
        )


def _matched(
    slot: str,
    document: Document,
    trained: Document,
    wholes: tuple[Mapping[str, StateOrigin], Mapping[str, StateOrigin]],
    known: Collection[str],
) -> dict[str, str]:
    """One slot's constants by those of the other document, by name and placements."""
    ours, theirs = wholes
    copies: dict[tuple[Any, ...], list[str]] = {}
    for name, whole in theirs.items():
        copies.setdefault(_part_key(trained, name, whole), []).append(name)
    found = {}
    for name, whole in ours.items():
        if same := copies.get(_part_key(document, name, whole)):
            # Copies of one part, as a fused weight's count of steps has, are told apart by order.
            found[name] = same.pop(0) if len(same) > 1 else same[0]
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
