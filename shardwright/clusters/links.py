"""What a collective costs: a model of the machines by latency and bandwidth.

Input: a kind of communication, the number of slots that take part, and bytes. Output: the
seconds that it takes.

A collective among ``n`` slots costs its start and then a number of messages after one another,
each with a latency and an ``n``-th of the bytes (the alpha-beta model; Thakur, Rabenseifner and
Gropp, 2005): ``n - 1`` of them, and twice as many for all_reduce, which is a reduce_scatter and an
all_gather with one start, for broadcast, which scatters and gathers, and for reduce. Links that say
nothing of the last two price a broadcast as one message and a reduce as an all_reduce. How many,
and what stands in for what, is in `shardwright.communication`.

Invariant: no price is negative, more bytes or more slots never cost less, and what stays
on a slot costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import msgspec

from shardwright.clusters.units import check_seconds
from shardwright.communication import COMMUNICATION, CommunicationKind
from shardwright.errors import PlanError

Kind = Literal[CommunicationKind, "slice"]
"""A ``slice`` is what each slot does by itself."""


def messages(kind: Kind, members: int) -> int:
    """Messages after one another that a collective of so many members takes."""
    return COMMUNICATION[kind].passes * (members - 1)


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``latency`` of a message in seconds, ``bandwidth`` of one slot in bytes a second."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not self.latency >= 0:
            raise PlanError(f"a link's latency must not be negative, found {self.latency} s")
        if not self.bandwidth > 0:
            raise PlanError(f"a link's bandwidth must be positive, found {self.bandwidth} byte/s")
        check_seconds("a link's latency", self.latency)
        check_seconds("what a byte takes on a link", 1 / self.bandwidth)

    def seconds(self, nbytes: float) -> float:
        """The time of one message."""
        return self.latency + nbytes / self.bandwidth


class Links(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The link as each kind of communication sees it; ``start`` of a collective is in seconds.

    Kinds that are None, or no field, have another's price: `CommunicationRow.priced_as`.
    """

    send: Link
    all_gather: Link
    reduce_scatter: Link
    all_reduce: Link
    all_to_all: Link
    start: float = 0.0
    broadcast: Link | None = None
    reduce: Link | None = None

    def __post_init__(self) -> None:
        if not self.start >= 0:
            raise PlanError(f"the start of a collective must not be negative, found {self.start} s")
        check_seconds("the start of a collective", self.start)

    @classmethod
    def of(cls, send: Link, collective: Link, start: float = 0.0) -> Links:
        """One link for messages between two slots, another for all collectives."""
        return cls(send, collective, collective, collective, collective, start)

    def seconds(self, kind: Kind, members: int, nbytes: int) -> float:
        """The time of one communication among ``members`` slots.

        ``nbytes`` is what a slot holds before or after it, whichever is more. A ``slice`` is local
        and free, and so is everything on one slot.
        """
        if kind == "slice" or members < 2:
            return 0.0
        kind, link = self._priced(kind)
        if kind == "send":
            return link.seconds(nbytes)
        return self.start + messages(kind, members) * link.seconds(nbytes / members)

    def moving(self, kind: Kind, members: int, nbytes: int) -> float:
        """What of these seconds the bytes take; what is left passes without any, too."""
        kind, link = self._priced(kind)
        if kind == "send":
            return nbytes / link.bandwidth
        return messages(kind, members) * nbytes / members / link.bandwidth

    def _priced(self, kind: Kind) -> tuple[Kind, Link]:
        """The kind that a kind is priced as, and its link."""
        link = getattr(self, kind, None)
        if link is not None:
            return kind, link
        priced_as = COMMUNICATION[kind].priced_as
        assert priced_as is not None, f"links have no {kind}, and it has no other's price"
        return self._priced(priced_as)


_FIELDS = {f.name: f for f in msgspec.structs.fields(Links) if f.name in COMMUNICATION}
KINDS: tuple[Kind, ...] = cast("tuple[Kind, ...]", tuple(_FIELDS))
"""The kinds of communication that a file may tell apart, ``send`` first."""
OPTIONAL = tuple(kind for kind in KINDS if _FIELDS[kind].default is None)
"""Those that it need not."""
COLLECTIVES = tuple(kind for kind in KINDS[1:] if kind not in OPTIONAL)
"""Collectives that every file has a link for."""


SHARED = Links.of(send=Link(36e-6, 7e9), collective=Link(5e-6, 4e9), start=55e-6)
"""Processes of one host on CPU in shared memory: two cores of a Xeon of 2023, the best times of
`profile_links`. Collectives reach 2.2 GB/s (all_to_all) to 8.8 GB/s (all_gather, which is read
where it stands); one rate for all leaves to those who measure to gather where others scatter, which
takes more memory."""
GLOO = Links.of(send=Link(60e-6, 3.2e9), collective=Link(60e-6, 0.5e9), start=150e-6)
"""The same by gloo, over sockets."""
ETHERNET = Links.of(send=Link(100e-6, 1.1e9), collective=Link(100e-6, 0.4e9), start=150e-6)
"""Hosts on a network of 10 Gbit/s, assumed."""


def _nccl(latency: float, gigabytes_a_second: float) -> Links:
    """GPUs; NCCL reaches about four fifths of what a link has in one direction."""
    link = Link(latency, 0.8e9 * gigabytes_a_second)
    return Links.of(send=link, collective=link, start=10e-6)


LINKS: Mapping[str, Links] = {
    "shared-memory": SHARED,
    "gloo": GLOO,
    "ethernet": ETHERNET,
    # Peaks a GPU and direction: NVIDIA's data sheets of A100 and H100; one adapter a GPU of HDR and
    # NDR InfiniBand (200 and 400 Gbit/s).
    "nvlink3": _nccl(2e-6, 300.0),
    "nvlink4": _nccl(2e-6, 450.0),
    "infiniband-hdr": _nccl(5e-6, 25.0),
    "infiniband-ndr": _nccl(5e-6, 50.0),
}
"""Links by name; a cluster file may name them."""
