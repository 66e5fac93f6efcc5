"""The kinds of communication: one row each, which all else that knows of them reads.

A row says what the members of a group give and what each gets of it. From that follow the keys of
the kind's metadata and the tensors of its tasks (`pipeline`), the messages between members and
their arithmetic (`comm.rounds`), what a member holds when it is measured
(`profiling.link_process`), and its price (`clusters.links`).

A top-level module, since files, links and transports all read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CommunicationKind = Literal[
    "send",
    "recv",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
]
"""The format's kinds; the two tasks of a message are one operation, a ``send``."""

MetadataType = Literal["reduce_op", "device", "dim"]


@dataclass(frozen=True, slots=True)
class CommunicationRow:
    """One kind of communication.

    tensors
        How many inputs and outputs a member has.
    root
        The metadata key that names the one device that has an input and an output.
    cut
        The metadata key of the dimension along which every input is cut, a piece for each member;
        None where all get the same.
    join
        The metadata key of the dimension along which a member joins what it gets of the others.
    reduces
        Whether a member reduces what it gets of the others, as ``reduce_op`` says.
    passes
        Its price: as often does a member pass an ``n``-th of the bytes to each of the other
        ``n - 1``, one after another; 0 for one message.
    priced_as
        The kind whose price it has on links that do not tell it apart; None where all do.
    """

    tensors: tuple[int, int] = (1, 1)
    root: Literal["src", "dst"] | None = None
    cut: str | None = None
    join: str | None = None
    reduces: bool = False
    passes: int = 1
    priced_as: CommunicationKind | None = None

    @property
    def metadata(self) -> Mapping[str, MetadataType]:
        """The keys of its metadata, and what each holds."""
        found: dict[str, MetadataType] = {"reduce_op": "reduce_op"} if self.reduces else {}
        found |= {key: "dim" for key in (self.cut, self.join) if key is not None}
        return found | ({self.root: "device"} if self.root is not None else {})

    def counts(self, *, is_root: bool) -> tuple[int, int]:
        """How many inputs and outputs a member has that is the root, or is not."""
        return (1, 1) if is_root else self.tensors


COMMUNICATION: Mapping[str, CommunicationRow] = {
    "send": CommunicationRow((1, 0), passes=0),
    "recv": CommunicationRow((0, 1), passes=0, priced_as="send"),
    "all_gather": CommunicationRow(join="dim"),
    "reduce_scatter": CommunicationRow(reduces=True, cut="dim"),
    # A reduce_scatter and an all_gather with one start.
    "all_reduce": CommunicationRow(reduces=True, passes=2),
    "all_to_all": CommunicationRow(cut="src_dim", join="dst_dim"),
    # It scatters and gathers.
    "broadcast": CommunicationRow((0, 1), root="src", passes=2, priced_as="send"),
    "reduce": CommunicationRow((1, 0), root="dst", reduces=True, passes=2, priced_as="all_reduce"),
}
"""By kind. Sizes of uneven pieces are those of the members' tensors."""


def even_sizes(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` sizes as equal as can be, larger ones first."""
    quotient, rest = divmod(total, parts)
    return [quotient + (part < rest) for part in range(parts)]
