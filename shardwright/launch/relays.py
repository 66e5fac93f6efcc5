"""Bringing what a training step returns to rank 0, where torchrun made a process for each rank.

A step's outputs are whole only when it ends, some of them put together of all microbatches, so no
supertask of the file can send them. Each becomes one more operation of the transports, behind those
of the file, and one more occurrence at the end of the step on both ranks.
"""

from __future__ import annotations

from shardwright.comm.transport import Membership, Operation, TensorSpec, operations
from shardwright.engine.program import Microbatching, Relay, is_training
from shardwright.pipeline.schema import Document


def relays(document: Document) -> dict[str, Operation]:
    """The operation that brings each output of a training step to rank 0, by tensor."""
    if not is_training(document):
        return {}
    cut, slots = Microbatching.of(document), list(document.devices)
    found: dict[str, Operation] = {}
    for name, piece in document.metadata.tensor_slices.outputs.items():
        if piece.device == slots[0]:
            continue
        spec = TensorSpec.of(document.tensors[name])
        if name in cut.outputs:
            spec = TensorSpec((cut.n, *spec.shape), spec.dtype)
        found[name] = Operation(
            kind="send",
            group=f"output {name}",
            tag=len(operations(document)) + len(found),
            ranks=(slots.index(piece.device), 0),
            tasks=(f"output {name}",) * 2,
            inputs=(spec, None),
            outputs=(None, spec),
        )
    return found


def relays_of(rank: int, found: dict[str, Operation]) -> dict[Relay, Membership]:
    """A rank's part in the relays."""
    return {
        Relay(name, gives=rank != 0): Membership(operation, operation.ranks.index(rank))
        for name, operation in found.items()
        if rank in operation.ranks
    }
