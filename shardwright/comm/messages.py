"""Every kind of communication, for every dtype and any sizes, as messages between ranks.

`MessageTransport` runs the rounds of `exchange` over a `Post` for each other rank: in shared memory
(`shared`) where that can be, over sockets (`gloo`) elsewhere. Either way results have the bits of
the in-process transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardwright.comm.exchange import Exchange, Parcel, exchange
from shardwright.comm.operation import Membership, Operation
from shardwright.comm.post import Address, Post, Sent
from shardwright.comm.rooms import exchange_in_room
from shardwright.comm.shared import SharedPost
from shardwright.comm.spec import TensorSpec
from shardwright.comm.transport import Interval, Pending, Transport
from shardwright.comm.wire import conform


class MessageTransport(Transport):
    """A rank's access to others: ``posts`` has the post that reaches each of them."""

    def __init__(self, posts: Mapping[int, Post]) -> None:
        self._posts = posts
        self._distinct = list(dict.fromkeys(posts.values()))
        self._shared = next((p for p in self._distinct if isinstance(p, SharedPost)), None)

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> Pending:
        """Post the messages of the first round."""
        rounds = self._rounds(membership.operation, membership.member, tensor)
        return _MessagePending(self._posts, rounds, membership, call)

    def wait(self, bell: int, timeout: float | None) -> bool:
        """Sleep; the shared post wakes by itself, others ring the bell."""
        if self._shared is None:
            return super().wait(bell, timeout)
        return self._shared.wait(bell, timeout)

    def close(self) -> None:
        """Say goodbye to the other ranks."""
        for post in self._distinct:
            post.close()

    def abort(self) -> None:
        """Cut the connections of all ranks to this one."""
        for post in self._distinct:
            post.abort()

    def _rounds(self, operation: Operation, member: int, tensor: Tensor | None) -> Exchange:
        shared = self._shared
        if shared is None or not shared.ranks.issuperset(operation.ranks):
            return exchange(operation, member, tensor)

        def room(to: Sequence[int], spec: TensorSpec) -> Parcel:
            return shared.room([operation.ranks[peer] for peer in to], to, spec)

        return exchange_in_room(operation, member, tensor, room)


class _MessagePending(Pending):
    """A member on its way through the rounds of an exchange."""

    def __init__(
        self, posts: Mapping[int, Post], rounds: Exchange, membership: Membership, call: int
    ) -> None:
        self._posts = posts
        self._rounds = rounds
        self._operation = membership.operation
        self._member = membership.member
        self._call = call
        self._turn = -1
        self._sent: list[Sent] = []
        self._travelled: list[tuple[float, float]] = []
        self._finished = False
        self._result: Tensor | None = None
        self._step(None)

    def ready(self) -> bool:
        """Go through as many rounds as messages have arrived for."""
        while not self._finished and self._round_is_complete():
            self._step(self._take())
        return self._finished

    def result(self) -> Tensor | None:
        """The member's share, in the layout that the pipeline declares for it."""
        spec = self._operation.outputs[self._member]
        result, self._result = self._result, None
        return conform(result, spec) if spec is not None and result is not None else None

    def interval(self) -> Interval | None:
        """From the first byte on its way to the last."""
        times = list(self._travelled)
        for sent in self._sent:
            if sent.error is not None:
                raise sent.error
            if sent.end is None:
                return None
            times.append((sent.start, sent.end))
        return Interval(min(start for start, _ in times), max(end for _, end in times))

    def _step(self, received: dict[int, Tensor] | None) -> None:
        """Hand a round's tensors over and post the next round's messages."""
        try:
            # A generator takes None first.
            turn = self._rounds.send(received)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._finished, self._result = True, stop.value
            return
        self._turn += 1
        self._address = Address(self._operation.tag, self._call, self._turn)
        self._incoming = turn.incoming
        for parcel in turn.outgoing:
            for post, ranks in self._routes(parcel).items():
                self._sent += post.send(ranks, self._address, parcel)

    def _routes(self, parcel: Parcel) -> dict[Post, list[int]]:
        """The ranks that a parcel goes to, by the post that reaches them."""
        routes: dict[Post, list[int]] = {}
        for peer in parcel.to:
            rank = self._operation.ranks[peer]
            routes.setdefault(self._posts[rank], []).append(rank)
        return routes

    def _round_is_complete(self) -> bool:
        for peer in self._incoming:
            rank = self._operation.ranks[peer]
            if not self._posts[rank].has(rank, self._address):
                return False
        return True

    def _take(self) -> dict[int, Tensor]:
        tensors = {}
        for peer, spec in self._incoming.items():
            rank = self._operation.ranks[peer]
            arrived = self._posts[rank].take(rank, self._address, spec)
            self._travelled.append((arrived.start, arrived.end))
            tensors[peer] = arrived.tensor
        return tensors
