"""Communication in simulated time: who starts when, and when the others have it.

Input: the members' starts, at their times; output: for each a `SimulatedMember`, which says when
its result is there, and for how long the member itself is busy with it.

Where slots are CPU cores, members move their bytes themselves, as `comm` does in shared memory: a
sender copies what it sends, and in a collective each member copies and adds, round by round, when
it looks at it; what others do meanwhile, it does not see. Devices of other kinds move bytes beside
their work: a message takes its line, which each pair of slots has one of, and a collective begins
when all members have come to it and none of them is in another.

Invariant: nothing arrives before it was sent, and times are never negative.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from shardwright.clusters import Cluster, Links
from shardwright.clusters.links import Kind
from shardwright.comm.shared_memory import IN_PLACE
from shardwright.comm.transport import Membership, Operation
from shardwright.costs.roofline import worker_seconds
from shardwright.simulation.memory import MessageBlock

Wake = Callable[[float, str], None]
"""Tells a slot that something may be there for it at a time."""


@dataclass(slots=True, eq=False)
class SimulatedMember:
    """A member's part in one communication.

    began
        When it was started.
    ready_at
        When the member may look at it next, None while others are still to come.
    left_at
        When what it sends has left.
    over
        Whether its result is there.
    block
        Where what it gives stands, if others read it there.
    """

    exchange: SimulatedExchange
    member: int
    began: float
    ready_at: float | None = None
    left_at: float = 0.0
    over: bool = False
    block: MessageBlock | None = None

    def is_ready(self, now: float) -> bool:
        """Whether there is something to take."""
        return not self.over and self.ready_at is not None and self.ready_at <= now

    def take(self, now: float) -> float:
        """Take what is there; gives the seconds that this keeps the member busy."""
        return self.exchange.take(self, now)


@dataclass(slots=True, eq=False)
class SimulatedExchange(ABC):
    """One communication of a group, in one call; ``parts`` are of the members that have come."""

    operation: Operation
    slots: tuple[str, ...]
    links: Links
    wake: Wake
    parts: dict[int, SimulatedMember] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """What a member holds before or after it, whichever is more."""
        specs = (*self.operation.inputs, *self.operation.outputs)
        return max((spec.nbytes for spec in specs if spec is not None), default=0)

    @property
    def seconds(self) -> float:
        """What it takes from the moment when all members are there."""
        return self.links.seconds(self._kind, self.operation.size, self.nbytes)

    @property
    def moving(self) -> float:
        """How long whoever gives is at it."""
        return self.links.moving(self._kind, self.operation.size, self.nbytes)

    @property
    def _kind(self) -> Kind:
        return cast("Kind", self.operation.kind)

    @abstractmethod
    def start(self, part: SimulatedMember, now: float) -> float:
        """A member comes; the seconds that this keeps it busy."""

    def take(self, part: SimulatedMember, now: float) -> float:
        """A member takes what is there."""
        part.over, part.ready_at = True, None
        return 0.0

    def _ready(self, part: SimulatedMember, at: float) -> None:
        part.ready_at = at
        self.wake(at, self.slots[part.member])

    def _let_others_have_it(self, now: float) -> None:
        """Where one member gives, the others have it when it has left and travelled."""
        giver = self.parts.get(self.operation.givers[0])
        if giver is not None:
            travels = self.links.seconds(self._kind, self.operation.size, 0)
            for other in self.parts.values():
                if other is not giver and other.ready_at is None and not other.over:
                    self._ready(other, max(now, giver.left_at + travels))


class _Given(SimulatedExchange):
    """One member gives, the others get, moved by the one that gives: a send, a broadcast."""

    def start(self, part: SimulatedMember, now: float) -> float:
        """The giver copies; whoever gets waits for the giver."""
        self.parts[part.member] = part
        busy = 0.0
        if part.member in self.operation.givers:
            busy = self.moving
            part.left_at = now + busy
            self._ready(part, now + busy)
        self._let_others_have_it(now)
        return busy


@dataclass(slots=True, eq=False)
class _Together(SimulatedExchange):
    """A collective whose members do the work, each a share of it in each round."""

    posted: dict[int, list[float]] = field(default_factory=dict)

    def start(self, part: SimulatedMember, now: float) -> float:
        """The first round."""
        self.parts[part.member] = part
        return self._post(part, now)

    def take(self, part: SimulatedMember, now: float) -> float:
        """The next round, or the end."""
        part.ready_at = None
        if len(self.posted[part.member]) == self._rounds:
            part.over = True
            return self._share
        return self._post(part, now)

    @property
    def _rounds(self) -> int:
        """In a second one, members tell one another that their parts are written."""
        return 2 if self.operation.kind in IN_PLACE else 1

    @property
    def _share(self) -> float:
        """Seconds of each round, and of taking the result."""
        return self.seconds / (self._rounds + 1)

    def _post(self, part: SimulatedMember, now: float) -> float:
        busy = self._share
        part.left_at = now + busy
        mine = self.posted.setdefault(part.member, [])
        mine.append(now + busy)
        for other in self.parts.values():
            turn = len(self.posted.get(other.member, ()))
            reached = [self.posted.get(m, [])[turn - 1 : turn] for m in range(self.operation.size)]
            if turn and all(reached) and other.ready_at is None and not other.over:
                self._ready(other, max(at for (at,) in reached))
        return busy


@dataclass(slots=True, eq=False)
class _Beside(SimulatedExchange):
    """A communication that devices do beside their work.

    ``lines`` are free from a time on: one for each pair of slots, one for each slot's collectives.
    """

    lines: dict[object, float] = field(default_factory=dict)

    def start(self, part: SimulatedMember, now: float) -> float:
        """Bytes move as soon as all that is needed is there, and the line is free."""
        self.parts[part.member] = part
        if len(self.operation.givers) == 1:
            self._given(part, now)
        elif len(self.parts) == self.operation.size:
            lines = [self.lines.get(slot, 0.0) for slot in self.slots]
            end = max(now, *lines) + self.seconds
            for other in self.parts.values():
                self.lines[self.slots[other.member]] = other.left_at = end
                self._ready(other, end)
        return 0.0

    def _given(self, part: SimulatedMember, now: float) -> None:
        if part.member in self.operation.givers:
            begin = max(now, self.lines.get(self.slots, 0.0))
            part.left_at = self.lines[self.slots] = begin + self.moving
            self._ready(part, now)
        self._let_others_have_it(now)


class Network:
    """All communication among the slots of a cluster.

    ``slots`` are those of the document, in order.
    """

    def __init__(self, slots: tuple[str, ...], cluster: Cluster, wake: Wake) -> None:
        self._slots = slots
        self._cluster = cluster
        self.wake = wake
        self._open: dict[tuple[str, int], SimulatedExchange] = {}
        self._lines: dict[object, float] = {}

    @property
    def overhead(self) -> float:
        """Seconds that a worker takes for each thing that it does, beside the thing itself."""
        return worker_seconds(self._cluster.device)

    @property
    def lends(self) -> bool:
        """Whether messages stand in memory that slots share."""
        return self._cluster.device.kind == "cpu"

    def start(self, membership: Membership, call: int, now: float) -> tuple[SimulatedMember, float]:
        """A member starts its part of a call's communication; its seconds busy with that."""
        operation, member = membership.operation, membership.member
        key = (operation.group, call)
        if key not in self._open:
            self._open[key] = self._exchange(operation)
        exchange = self._open[key]
        part = SimulatedMember(exchange, member, now)
        busy = exchange.start(part, now)
        if len(exchange.parts) == operation.size:
            del self._open[key]
        return part, busy

    def names(self, operation: Operation) -> tuple[str, ...]:
        """The slots of an operation's members."""
        return tuple(self._slots[rank] for rank in operation.ranks)

    def _exchange(self, operation: Operation) -> SimulatedExchange:
        slots = self.names(operation)
        links = self._cluster.among(slots)
        if self._cluster.device.kind != "cpu":
            return _Beside(operation, slots, links, self.wake, lines=self._lines)
        kind = _Given if len(operation.givers) == 1 else _Together
        return kind(operation, slots, links, self.wake)
