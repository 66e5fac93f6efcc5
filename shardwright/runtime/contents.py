"""The contents of a pipeline's constants, as wholes under the names that the program has for them.

`Contents` knows from the document which slot has which part of which whole. It says what to read of
each slot and joins the parts, and cuts wholes into what each slot is to take. `read` and `write`
are what the slots do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.engine.generator import Slices, part_of
from shardwright.engine.program import constants_of, is_training
from shardwright.engine.slot import LoadedSlot, wholes_of
from shardwright.errors import RunError, WeightError
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.launch.worker import Reply
from shardwright.pipeline.schema import Document, Placements, StateOrigin

READ = f"{__name__}:read"
WRITE = f"{__name__}:write"

Parts = dict[str, dict[str, StateOrigin]]
"""By slot and tensor, which part of which whole it is."""


class Contents:
    """Who has what of the named wholes of a document."""

    def __init__(self, document: Document) -> None:
        self.parts: Parts = {
            slot: wholes_of(document, constants_of(document, slot)) for slot in document.devices
        }
        self._tensors = document.tensors
        self._shapes: dict[str, tuple[int, ...]] = {}
        for _, _, whole in self._all():
            known = self._shapes.get(whole.name, whole.shape)
            self._shapes[whole.name] = tuple(map(max, known, whole.shape))

    def wanted(self, names: Collection[str] | None) -> dict[str, list[str]]:
        """Which tensors to read of each slot for these wholes; None for all.

        Raises WeightError where there is no whole of a name.
        """
        self._check_known(self._shapes if names is None else names)
        wanted: dict[str, list[str]] = {slot: [] for slot in self.parts}
        seen: set[tuple[str, Placements]] = set()
        for slot, tensor, whole in self._all():
            part = (whole.name, whole.placements)
            if (names is None or whole.name in names) and part not in seen:
                seen.add(part)
                wanted[slot].append(tensor)
        return wanted

    def join(self, found: Slices) -> dict[str, Tensor]:
        """The wholes of which these are all parts, in the order of their first slot."""
        wholes: dict[str, Tensor] = {}
        for slot, tensors in found.items():
            for tensor, content in tensors.items():
                part = self.parts[slot][tensor]
                if part.name not in wholes:
                    wholes[part.name] = content.new_empty(self._shapes[part.name])
                part_of(wholes[part.name], part.placements).copy_(content)
        return wholes

    def cut(self, wholes: Mapping[str, Tensor]) -> Slices:
        """What each slot is to take. Raises WeightError for unknown names, shapes or dtypes."""
        self._check_known(wholes)
        cut: Slices = {slot: {} for slot in self.parts}
        for slot, tensor, whole in self._all():
            if whole.name in wholes:
                content = wholes[whole.name].detach()
                self._check(whole.name, content, tensor)
                cut[slot][tensor] = part_of(content, whole.placements).contiguous()
        return cut

    def _all(self) -> Iterator[tuple[str, str, StateOrigin]]:
        for slot, parts in self.parts.items():
            for tensor, whole in parts.items():
                yield slot, tensor, whole

    def _check_known(self, names: Collection[str]) -> None:
        if unknown := next((name for name in names if name not in self._shapes), None):
            raise WeightError(
                f"the pipeline has no state named {unknown!r}; the names are those of the "
                "program's parameters and buffers, and optimizer.<parameter>.<key>"
            )

    def _check(self, name: str, content: Tensor, tensor: str) -> None:
        dtype, shape = torch_dtype(self._tensors[tensor].dtype), self._shapes[name]
        if tuple(content.shape) != shape or content.dtype != dtype:
            raise WeightError(
                f"{name!r} is {content.dtype}{list(content.shape)}, the pipeline has "
                f"{dtype}{list(shape)}; give the state of the same program"
            )


def read(slot: LoadedSlot, arguments: Any, tensors: Mapping[str, Tensor]) -> Reply:
    """The contents of the constants ``arguments[slot]``, as they are now."""
    del tensors
    names = arguments[slot.name]
    return Reply(None, {name: slot.constants[name].to("cpu", copy=True) for name in names})


def write(slot: LoadedSlot, arguments: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give constants new contents."""
    del arguments
    with torch.no_grad():
        for name, content in tensors.items():
            slot.constants[name].copy_(content)


# --- one program's constants in another -----------------------------------------------------------


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
    """Raise RunError where a program would change some copies of a state and leave others.

    ``document`` is another program on the state of ``trained``; ``shared`` says which constant of
    that each of its constants is. Where ``trained`` is of a model, what it does not change itself
    may lie packed on the slots, so no other program may change it.
    """
    if document.training is None:
        return
    if not is_training(trained):
        kept = set(shared.values()).difference(trained.replaces.values())
        if other := [old for old in document.replaces.values() if shared.get(old) in kept]:
            raise RunError(
                f"the program {document.name!r} changes {other[0]!r} for these sizes, which it "
                "leaves for those of the first one; build a pipeline for them by itself"
            )
    replaced = wholes_of(document, document.training.replaces.values())
    changed = {whole.name for whole in replaced.values()}
    theirs = {
        name: whole.name
        for slot in trained.devices
        for name, whole in wholes_of(trained, constants_of(trained, slot)).items()
    }
    expected = sorted(name for name, whole in theirs.items() if whole in changed)
    found = sorted(shared[name] for name in replaced if name in shared)
    if missing := [whole.name for name, whole in replaced.items() if name not in shared]:
        raise RunError(
            f"the step {document.name!r} changes {missing[0]!r}, which the one that is trained "
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
