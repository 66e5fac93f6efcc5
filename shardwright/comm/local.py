"""All members in one process and one thread: communication is arithmetic on shared tensors.

The members of a `Switchboard` start their operations in turn; when the last one that gives
something has arrived, `collectives.combine` says what all of them get. The bits are those of the
transports between processes. What is handed on as it is (`_HANDED_ON`) is copied, as messages are:
whoever gives a tensor may write to its memory when it has left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.comm.collectives import combine
from shardwright.comm.operation import Membership, Operation
from shardwright.comm.spec import TensorSpec
from shardwright.comm.transport import Interval, Pending, Transport
from shardwright.comm.wire import conform

_HANDED_ON = ("send", "broadcast", "reduce")
"""Kinds whose giver is done before whoever gets something of the tensor has taken it."""


class Switchboard:
    """Where the members of one process meet; `LocalTransport` is one member's access to it."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[int, int], _Meeting] = {}

    def join(self, membership: Membership, call: int, tensor: Tensor | None) -> _Meeting:
        """Give a member's tensor to the operation's meeting in a call."""
        key = (membership.operation.tag, call)
        meeting = self._meetings.setdefault(key, _Meeting(membership.operation))
        meeting.arrived += 1
        if tensor is not None:
            meeting.inputs[membership.member] = tensor
        if meeting.arrived == membership.operation.size:
            del self._meetings[key]
        return meeting

    def clear(self) -> None:
        """Forget what has not been finished."""
        self._meetings.clear()


@dataclass(slots=True)
class _Meeting:
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


class LocalTransport(Transport):
    """A device slot's access to a `Switchboard`."""

    def __init__(self, switchboard: Switchboard, device: torch.device | None = None) -> None:
        self._switchboard = switchboard
        self._device = device or torch.device("cpu")

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> Pending:
        """Join the operation's meeting."""
        if tensor is not None and membership.operation.kind in _HANDED_ON:
            tensor = tensor.clone()
        meeting = self._switchboard.join(membership, call, tensor)
        return _LocalPending(membership, meeting, self._device)

    def close(self) -> None:
        """Forget what has not been finished."""
        self._switchboard.clear()

    def abort(self) -> None:
        """Forget what has not been finished."""
        self._switchboard.clear()


class _LocalPending(Pending):
    """A member that has joined a meeting."""

    def __init__(self, membership: Membership, meeting: _Meeting, device: torch.device) -> None:
        self._membership = membership
        self._meeting = meeting
        self._device = device
        self._interval = Interval(time.monotonic(), time.monotonic())

    def ready(self) -> bool:
        """True at once for a sender; for others when all have given what they give."""
        return self._spec() is None or self._meeting.complete()

    def result(self) -> Tensor | None:
        """The member's share, in the layout that the pipeline declares for it."""
        spec = self._spec()
        if spec is None:
            return None
        start = time.monotonic()
        output = self._meeting.output(self._membership.member)
        assert output is not None, "whoever is declared an output gets one"
        output = conform(output.to(self._device), spec)
        self._interval = Interval(start, time.monotonic())
        return output

    def interval(self) -> Interval:
        """When the arithmetic was done."""
        return self._interval

    def _spec(self) -> TensorSpec | None:
        return self._membership.operation.outputs[self._membership.member]
