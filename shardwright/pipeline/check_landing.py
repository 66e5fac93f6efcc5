"""Rules of state: where it changes, nothing that is made for it is lost.

A tensor that nothing reads, that is given out nowhere and replaces nothing is an update that was
forgotten; so is one of several parts of a state of which the others are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import COMPUTE_KINDS, broken
from shardwright.pipeline.schema import Document, TensorInfo

_REMEDY = "name the constant that it becomes in training.replaces"


def check_landing(document: Document, connections: Connections) -> None:
    """Each update lands, on every device that holds a part of the state."""
    if document.training is not None:
        _check_made(document, connections)
        _check_parts(document)


def _check_made(document: Document, connections: Connections) -> None:
    assert document.training is not None
    for made, each in _made(document, connections):
        lost = [t for t in made if t not in connections.users and not _replaces(document, t)]
        if lost and (each or len(lost) == len(made)):
            raise broken(
                "lands",
                f"nothing reads the tensor, and it replaces no constant; {_REMEDY}, or leave it "
                "out of what is made",
                task=connections.producers[lost[0]][0],
                tensor=lost[0],
            )


def _replaces(document: Document, tensor: str) -> bool:
    return document.training is not None and tensor in document.training.replaces


def _made(document: Document, connections: Connections) -> Iterator[tuple[Sequence[str], bool]]:
    """What a graph makes, each for something, and what a group makes, of which something is."""
    for task in document.supertasks.values():
        if task.kind in COMPUTE_KINDS:
            yield task.outputs, True
    for members in connections.groups.values():
        yield [made for name in members for made in document.supertasks[name].outputs], False


def _check_parts(document: Document) -> None:
    """Of a state that has a name, all parts and copies are replaced or none."""
    assert document.training is not None
    replaced = {*document.training.replaces.values()}
    parts: dict[tuple[str, str], list[str]] = {}
    for tensor, info in document.tensors.items():
        if (name := _name(info)) is not None:
            parts.setdefault(name, []).append(tensor)
    for tensors in parts.values():
        kept = [tensor for tensor in tensors if tensor not in replaced]
        if kept and len(kept) < len(tensors):
            other = next(tensor for tensor in tensors if tensor in replaced)
            raise broken(
                "lands",
                f"the constant is not replaced, but {other!r}, which is of the same state, is; a "
                "state changes on every device that holds a part of it",
                tensor=kept[0],
            )


def _name(info: TensorInfo) -> tuple[str, str] | None:
    """What the state is called whose part a constant is."""
    if info.value is not None:
        return info.value.path, info.value.name
    return ("", info.origin.name) if info.origin is not None else None
