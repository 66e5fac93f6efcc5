"""Where a process stands among those that share the work of a stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch.distributed as dist


@cache
def group_of(ranks: tuple[int, ...], world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The processes with these ranks: one group, however many stages and axes have them."""
    made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return made


class Axis:
    """The slots along one axis of a stage's mesh, and the place of this one among them."""

    def __init__(
        self, members: tuple[int, ...], index: int, group: dist.ProcessGroup | None
    ) -> None:
        self.members = members
        self.index = index
        self._stage = group
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The processes of these slots; a group of their own is made when it is first needed."""
        if self._group is None:
            everyone = self._stage if self._stage is not None else dist.group.WORLD
            assert everyone is not None, "initialize torch.distributed before the first call"
            ranks = dist.get_process_group_ranks(everyone)
            if len(ranks) > len(self.members):
                mine = [ranks[slot] for slot in self.members]
                everyone = group_of(tuple(mine), dist.group.WORLD)
            self._group = everyone
        assert self._group is not None
        return self._group


class Slots:
    """The slots of a stage's mesh, and which of them this process is.

    ``axes`` has the mesh's sizes, the outermost first; the last axis runs fastest. ``group`` are
    the processes of the slots in that order, all processes by default. ``slot`` is this one's
    number, by default its rank in the group. Without communication any slot may be looked at:
    torch.distributed is only needed by forward and backward.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        group: dist.ProcessGroup | None = None,
        slot: int | None = None,
    ) -> None:
        stride = math.prod(axes.values())
        self.slot = slot = slot_of(stride, group, slot)
        self._axes: dict[str, Axis] = {}
        for name, size in axes.items():
            stride //= size
            index = slot // stride % size
            first = slot - index * stride
            members = tuple(first + place * stride for place in range(size))
            self._axes[name] = Axis(members, index, group)

    def __getitem__(self, name: str) -> Axis:
        return self._axes[name]

    def __deepcopy__(self, memo: object) -> Slots:
        """Copies of a stage talk to the same processes."""
        return self


def slot_of(count: int, group: dist.ProcessGroup | None, slot: int | None) -> int:
    """The slot, of so many, that is given, or that this process is by its rank in the group."""
    if slot is None:
        if not dist.is_initialized():
            raise RuntimeError(
                f"this stage is split over {count} slots: give slot=0 to {count - 1}, or "
                "initialize torch.distributed first"
            )
        slot = dist.get_rank(group)
    if not 0 <= slot < count:
        raise ValueError(
            f"this stage has the slots 0 to {count - 1}, found {slot}; give slot=, or the group= "
            "of its processes"
        )
    return slot
