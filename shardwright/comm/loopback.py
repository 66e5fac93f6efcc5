"""All members in one process and one thread: communication is arithmetic on shared tensors.

The members of a `Loopback` start their operations in turn; when the last one that gives
something has arrived, `rounds.combine` says what all of them get. The bits are those of the
transports between processes. What is handed on as it is (`_hands_on`) is copied, as messages are:
its giver may write to the tensor's memory when it has left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.comm.rounds import combine
from shardwright.comm.transport import (
    Interval,
    Membership,
    Operation,
    PendingTransfer,
    TensorSpec,
    Transport,
)
from shardwright.comm.wire import conform


class Loopback:
    """Where the members of one process meet; `LoopbackTransport` is one member's access to it."""

    def __init__(self) -> None:
        self._operations: dict[tuple[int, int], _LoopbackOperation] = {}

    def join(self, membership: Membership, call: int, tensor: Tensor | None) -> _LoopbackOperation:
        """Give a member's tensor to the operation in a call."""
        key = (membership.operation.tag, call)
        joined = self._operations.setdefault(key, _LoopbackOperation(membership.operation))
        joined.arrived += 1
        if tensor is not None:
            joined.inputs[membership.member] = tensor
        if joined.arrived == membership.operation.size:
            del self._operations[key]
        return joined

    def clear(self) -> None:
        """Forget what has not been finished."""
        self._operations.clear()


@dataclass(slots=True)
class _LoopbackOperation:
    """One operation in one call."""

    operation: Operation
    arrived: int = 0
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[Tensor | None] | None = None

    def complete(self) -> bool:
        """Whether everything that members give is there."""
        return len(self.inputs) == sum(spec is not None for spec in self.operation.inputs)

    def output(self, member: int) -> Tensor | None:
        """What a member gets."""
        if self.outputs is None:
            device = next(iter(self.inputs.values())).device
            inputs = {i: tensor.to(device) for i, tensor in self.inputs.items()}
            members = range(self.operation.size)
            self.outputs = combine(self.operation, [inputs.get(i) for i in members])
        return self.outputs[member]


class LoopbackTransport(Transport):
    """A device slot's access to a `Loopback`."""

    def __init__(self, loopback: Loopback, device: torch.device | None = None) -> None:
        self._loopback = loopback
        self._device = device or torch.device("cpu")

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> PendingTransfer:
        """Join the operation."""
        if tensor is not None and _hands_on(membership.operation):
            tensor = tensor.clone()
        joined = self._loopback.join(membership, call, tensor)
        return _LoopbackTransfer(membership, joined, self._device)

    def close(self) -> None:
        """Forget what has not been finished."""
        self._loopback.clear()

    def abort(self) -> None:
        """Forget what has not been finished."""
        self._loopback.clear()


class _LoopbackTransfer(PendingTransfer):
    """A member that has joined an operation."""

    def __init__(
        self, membership: Membership, joined: _LoopbackOperation, device: torch.device
    ) -> None:
        self._membership = membership
        self._joined = joined
        self._device = device
        self._interval = Interval(time.monotonic(), time.monotonic())

    def ready(self) -> bool:
        """True at once for a sender; for others when all have given what they give."""
        return self._spec() is None or self._joined.complete()

    def result(self) -> Tensor | None:
        """The member's share, in the layout that the pipeline declares for it."""
        spec = self._spec()
        if spec is None:
            return None
        start = time.monotonic()
        output = self._joined.output(self._membership.member)
        assert output is not None, "whoever is declared an output gets one"
        output = conform(output.to(self._device), spec)
        self._interval = Interval(start, time.monotonic())
        return output

    def interval(self) -> Interval:
        """When the arithmetic was done."""
        return self._interval

    def _spec(self) -> TensorSpec | None:
        return self._membership.operation.outputs[self._membership.member]


def _hands_on(operation: Operation) -> bool:
    """Whether a giver is done before others have taken what it gave: some give or get nothing."""
    return None in (*operation.inputs, *operation.outputs)
