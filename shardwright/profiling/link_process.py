"""A process that measures communication with others like it.

``python -m shardwright.profiling.link_process RANK SIZE PORT KIND SAMPLES BYTES…``: one rank of so
many, which meet at a port of this machine, on devices of a kind. All do the same operations in the
same order; the first writes the times to its standard output, as JSON. Whoever started it holds its
standard input: when that is closed, the process ends at once, whatever it is doing.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import torch
from torch import Tensor

from shardwright.clusters.links import KINDS, Kind
from shardwright.comm import (
    Membership,
    Operation,
    TensorSpec,
    Transport,
    connect,
    join_group,
    open_store,
)
from shardwright.communication import COMMUNICATION, MetadataType
from shardwright.costs.fit import LinkTime

ELEMENT = torch.float32
SAMPLE_BYTES = 8 << 20
"""A sample moves so many bytes, in at least `FEWEST` and at most `MOST` operations."""
FEWEST, MOST = 2, 100
BELL_BYTES = 4096
"""As often may the bell have rung before it is quieted."""
LEAVING = "leaving"
"""Under this key the ranks count who is done."""
TOGETHER = 0
"""The tag of the operation in which all wait for each other."""


def operation(kind: str, ranks: Sequence[int], nbytes: int, tag: int, root: int = 0) -> Operation:
    """An operation among ranks of which each holds so many bytes, before it or after it.

    The member ``root`` has what a broadcast gives, and gets what is reduced.
    """
    members, row = len(ranks), COMMUNICATION[kind]
    elements = max(1, nbytes // (ELEMENT.itemsize * members)) * members
    whole, part = TensorSpec((elements,), ELEMENT), TensorSpec((elements // members,), ELEMENT)
    given = part if row.join is not None and row.cut is None else whole
    gotten = part if row.cut is not None and row.join is None else whole
    kinds = ("send", "recv") if kind == "send" else (kind,) * members
    counts = [
        COMMUNICATION[each].counts(is_root=row.root is not None and member == root)
        for member, each in enumerate(kinds)
    ]
    values: dict[MetadataType, int | str] = {"reduce_op": "sum", "dim": 0, "device": str(root)}
    return Operation(
        kind=kind,
        group=str(tag),
        tag=tag,
        ranks=tuple(ranks),
        tasks=("",) * members,
        inputs=tuple(given if inputs else None for inputs, _ in counts),
        outputs=tuple(gotten if outputs else None for _, outputs in counts),
        metadata={key: values[what] for key, what in row.metadata.items()},
        root=None if row.root is None else root,
    )


def measured(size: int, sizes: Sequence[int]) -> list[tuple[Kind, list[Operation]]]:
    """What is measured, in order: each kind among two ranks and among all, of each size.

    A send has one operation there and one back, and what has a root one from or to the first rank
    and one from or to the last: who gives does not wait for those who get.
    """
    tags = itertools.count(TOGETHER + 1)
    groups = [tuple(range(members)) for members in sorted({2, size})]
    found: list[tuple[Kind, list[Operation]]] = []
    for nbytes in sizes:
        there_and_back = [
            operation("send", ranks, nbytes, next(tags)) for ranks in ((0, 1), (1, 0))
        ]
        found.append(("send", there_and_back))
        for kind in KINDS[1:]:
            for ranks in groups:
                roots = (0, len(ranks) - 1) if COMMUNICATION[kind].root is not None else (0,)
                operations = [operation(kind, ranks, nbytes, next(tags), root) for root in roots]
                found.append((kind, operations))
    return found


class Member:
    """A rank's part in operations."""

    def __init__(
        self, rank: int, size: int, store: int, kind: str, operations: Sequence[Operation]
    ) -> None:
        self.rank = rank
        self._device = _device(kind, rank)
        self._calls: Counter[int] = Counter()
        self._bell, self._rope = socket.socketpair()
        for end in (self._bell, self._rope):
            end.setblocking(False)
        self._store = opened = open_store(store)
        self._transport: Transport = connect(
            opened,
            rank,
            [_device(kind, i) for i in range(size)],
            operations,
            threads=1,
            notify=self._ring,
            make_group=lambda: join_group(opened, rank, size, [kind]),
        )

    def tensor(self, operation: Operation) -> Tensor | None:
        """What this rank gives."""
        spec = operation.inputs[operation.ranks.index(self.rank)]
        return None if spec is None else torch.zeros(spec.shape, device=self._device)

    def perform(self, operation: Operation, tensor: Tensor | None) -> None:
        """Take part, to the end."""
        membership = Membership(operation, operation.ranks.index(self.rank))
        pending = self._transport.start(membership, self._calls[operation.tag], tensor)
        self._calls[operation.tag] += 1
        while not (self._transport.in_order or pending.ready()):
            self._transport.wait(self._bell.fileno(), None)
            with suppress(BlockingIOError):
                self._bell.recv(BELL_BYTES)
        pending.result()

    def leave(self, size: int) -> None:
        """Wait until so many ranks are here: who is gone early cuts others off."""
        self._store.add(LEAVING, 1)
        while self._store.add(LEAVING, 0) < size:
            time.sleep(0.01)

    def finish(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it has rung often enough
            self._rope.send(b"\0")


def _device(kind: str, rank: int) -> torch.device:
    return torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")


def times(member: Member, size: int, sizes: Sequence[int], samples: int) -> Iterator[LinkTime]:
    """Every time that this rank takes part in."""
    together = operation("all_reduce", range(size), 4 * size, TOGETHER)
    for kind, operations in measured(size, sizes):
        first = operations[0]
        if member.rank in first.ranks:
            seconds = _median(member, operations, samples)
            yield LinkTime(kind, first.size, _bytes(first), seconds / len(operations))
        member.perform(together, member.tensor(together))


def _median(member: Member, operations: Sequence[Operation], samples: int) -> float:
    """The median of several samples, after one to warm up, of all operations once."""
    repeats = min(MOST, max(FEWEST, SAMPLE_BYTES // _bytes(operations[0])))
    tensors = [member.tensor(operation) for operation in operations]

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            for operation, tensor in zip(operations, tensors, strict=True):
                member.perform(operation, tensor)
        member.finish()
        return (time.perf_counter() - start) / repeats

    sample()
    return statistics.median(sample() for _ in range(samples))


def _bytes(operation: Operation) -> int:
    """What a rank holds before or after an operation, whichever is more."""
    return max(spec.nbytes for spec in (*operation.inputs, *operation.outputs) if spec is not None)


def _end_with_parent() -> None:
    """Sleep until whoever started this process is gone, then end it."""
    os.read(sys.stdin.fileno(), 1)  # sys.stdin itself has a lock that the end would wait for
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Measure, and let the first rank write what was found."""
    rank, size, store, samples = (int(arguments[i]) for i in (0, 1, 2, 4))
    kind, sizes = arguments[3], [int(text) for text in arguments[5:]]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    together = operation("all_reduce", range(size), 4 * size, TOGETHER)
    every = [o for _, operations in measured(size, sizes) for o in operations]
    member = Member(rank, size, store, kind, [together, *every])
    found = list(times(member, size, sizes, samples))
    if rank == 0:
        sys.stdout.buffer.write(msgspec.json.encode(found))
        sys.stdout.buffer.flush()
    member.leave(size)
    os._exit(0)  # threads of the transport may sleep; connections are the kernel's to close


if __name__ == "__main__":
    main(sys.argv[1:])
