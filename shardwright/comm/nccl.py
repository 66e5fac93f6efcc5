"""Communication between devices of one kind by their own library: NCCL for CUDA.

`NcclTransport` enqueues each operation on the device and returns at once; the device's streams do
the waiting. Kinds that only move data move bytes; reductions use the library's own, so the order of
additions is the library's; what it has no type for is reduced in another one (bool, f8, i16,
u16 to u64).

Invariant: operations of a rank are enqueued in one order, the file's, one call after the
other (``in_order``), which `pipeline.check` has shown to be free of deadlock. Process groups are
made once a distinct set of members, by all ranks, in one order; pairs use the group of all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.collectives import assemble, narrow, pieces, widen
from shardwright.comm.transport import (
    Interval,
    Membership,
    Operation,
    PendingTransfer,
    TensorSpec,
    Transport,
)
from shardwright.comm.wire import conform, flat_bytes, pack, unpack

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]

WIDER: dict[torch.dtype, torch.dtype] = {
    torch.bool: torch.uint8,
    torch.float8_e4m3fn: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""The dtype a reduction is done in, where the library lacks the tensors' own."""

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def make_groups(operations: Iterable[Operation], backend: str) -> Groups:
    """A process group for each distinct set of members of the collectives among ``operations``.

    Every rank must call it with the same operations, whether it is a member or not.
    """
    sets = sorted({tuple(sorted(o.ranks)) for o in operations if o.kind != "send"})
    return {ranks: dist.new_group(list(ranks), backend=backend) for ranks in sets}


class NcclTransport(Transport):
    """A rank's access to the device library's process groups."""

    in_order = True

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> PendingTransfer:
        """Enqueue the operation on the device."""
        del call
        operation, member = membership.operation, membership.member
        start = time.monotonic()
        if operation.kind == "send":
            output = self._pair(operation, tensor)
        else:
            group = self._groups[tuple(sorted(operation.ranks))]
            collective = _NcclCollective(operation, member, group, self._device)
            output = _KINDS[operation.kind](collective, tensor)
        spec = operation.outputs[member]
        result = conform(output, spec) if spec is not None and output is not None else None
        return _Enqueued(result, Interval(start, time.monotonic()))

    def close(self) -> None:
        """Wait until what was sent has left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def abort(self) -> None:
        """Forget what was sent; the library's own watchdog ends what hangs on the device."""
        self._under_way.clear()

    def _pair(self, operation: Operation, tensor: Tensor | None) -> Tensor | None:
        spec = operation.gotten(1)
        sender, receiver = operation.ranks
        if tensor is None:
            content = self._blank(spec)
            _wait(dist.irecv(content, sender))
            return unpack(content, spec)
        content = pack(conform(tensor, spec), spec)
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        work = dist.isend(content, receiver)
        assert work is not None, "both ranks are members of the group of all"
        self._under_way.append((work, content))
        return None

    def _blank(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.nbytes, dtype=torch.uint8, device=self._device)


class _Enqueued(PendingTransfer):
    """An operation that the device will do in its turn."""

    def __init__(self, result: Tensor | None, interval: Interval) -> None:
        self._result = result
        self._interval = interval

    def ready(self) -> bool:
        """The device keeps the order."""
        return True

    def result(self) -> Tensor | None:
        """A tensor that later work on the device may use."""
        return self._result

    def interval(self) -> Interval:
        """When the operation was enqueued."""
        return self._interval


class _NcclCollective:
    """One collective of one member, in the terms of `torch.distributed`."""

    def __init__(
        self, operation: Operation, member: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.operation = operation
        self.member = member
        self.group = group
        self.device = device

    @property
    def root_rank(self) -> int:
        """The rank of the member that ``src`` or ``dst`` names."""
        return self.operation.ranks[self.operation.root or 0]

    @property
    def reduction(self) -> dist.ReduceOp.RedOpType:
        """The library's name of the reduction; the sum of bools is their maximum."""
        is_bool = self.operation.given(self.member).dtype == torch.bool
        name = self.operation.reduce_op
        return _REDUCTIONS["max" if is_bool and name == "sum" else name]

    def by_rank(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One entry a member, put in the order of the group's ranks, which are sorted."""
        order = sorted(range(self.operation.size), key=lambda i: self.operation.ranks[i])
        return [tensors[i] for i in order]

    def blank(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """LendBuffer for what will be received."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


def _broadcast(collective: _NcclCollective, tensor: Tensor | None) -> Tensor:
    spec = collective.operation.gotten(collective.member)
    plain = TensorSpec(spec.shape, spec.dtype)
    content = (
        collective.blank((plain.nbytes,), torch.uint8)
        if tensor is None
        else pack(tensor.contiguous(), plain)
    )
    _wait(dist.broadcast(content, collective.root_rank, collective.group, async_op=True))
    return unpack(content, plain)


def _reduce(collective: _NcclCollective, tensor: Tensor | None) -> Tensor:
    total = _widened(collective, tensor)
    operation = collective.reduction
    _wait(dist.reduce(total, collective.root_rank, operation, collective.group, async_op=True))
    return _narrowed(collective, total, tensor)


def _all_reduce(collective: _NcclCollective, tensor: Tensor | None) -> Tensor:
    total = _widened(collective, tensor)
    _wait(dist.all_reduce(total, collective.reduction, collective.group, async_op=True))
    return _narrowed(collective, total, tensor)


def _reduce_scatter(collective: _NcclCollective, tensor: Tensor | None) -> Tensor:
    parts = [part.contiguous() for part in _cut(collective, _widened(collective, tensor))]
    total = torch.empty_like(parts[collective.member])
    by_rank = collective.by_rank(parts)
    _wait(
        dist.reduce_scatter(total, by_rank, collective.reduction, collective.group, async_op=True)
    )
    return _narrowed(collective, total, tensor)


def _all_gather(collective: _NcclCollective, tensor: Tensor | None) -> Tensor:
    operation, member = collective.operation, collective.member
    assert tensor is not None, "every member of an all_gather gives a tensor"
    parts = [
        collective.blank(operation.pieces[i][member].shape, tensor.dtype)
        for i in range(operation.size)
    ]
    received = [flat_bytes(part) for part in collective.by_rank(parts)]
    given = flat_bytes(tensor.contiguous())
    _wait(dist.all_gather(received, given, collective.group, async_op=True))
    return assemble(operation, parts)


def _all_to_all(collective: _NcclCollective, tensor: Tensor | None) -> Tensor:
    operation, member = collective.operation, collective.member
    assert tensor is not None, "every member of an all_to_all gives a tensor"
    given = [part.contiguous() for part in _cut(collective, tensor)]
    parts = [
        collective.blank(operation.pieces[i][member].shape, tensor.dtype)
        for i in range(operation.size)
    ]
    received = [flat_bytes(part) for part in collective.by_rank(parts)]
    sent = [flat_bytes(part) for part in collective.by_rank(given)]
    _wait(dist.all_to_all(received, sent, collective.group, async_op=True))
    return assemble(operation, parts)


_KINDS: dict[str, Callable[[_NcclCollective, Tensor | None], Tensor]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def _cut(collective: _NcclCollective, tensor: Tensor) -> list[Tensor]:
    return pieces(collective.operation, collective.member, tensor)


def _widened(collective: _NcclCollective, tensor: Tensor | None) -> Tensor:
    """A copy to reduce in place, in a dtype that the library has."""
    assert tensor is not None, "every member of a reduction gives a tensor"
    return widen(tensor, WIDER.get(tensor.dtype, tensor.dtype), collective.operation.reduce_op)


def _narrowed(collective: _NcclCollective, total: Tensor, like: Tensor | None) -> Tensor:
    assert like is not None, "every member of a reduction gives a tensor"
    return narrow(total, like.dtype, collective.operation.reduce_op)


def _wait(work: dist.Work | None) -> None:
    """Make later work on the device wait; the host does not."""
    if work is not None:
        work.wait()
