"""Communication among the slots of a stage, each with the counterpart for its gradients.

Of the gradient of a tensor that slots hold along an axis, each slot has the slice of a slice, and
all of a whole and of a term of a sum. Every slot does the same exchanges in one order, forward and,
in reverse, backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


class Conjugate(torch.autograd.Function):
    """Does one thing to a tensor, and another to its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """What ``there`` makes of the tensor."""
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """What ``back`` makes of the gradient."""
        return ctx.back(gradients[0]), None, None


def conjugate(
    x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """What ``there`` makes of a tensor; ``back`` makes its gradient of the result's."""
    apply: Callable[..., Tensor] = Conjugate.apply
    return apply(x, there, back)


def same(x: Tensor) -> Tensor:
    """The tensor as it is."""
    return x.view_as(x)


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum of the slots' tensors; of booleans whether any is true."""
    if x.dtype == torch.bool:
        return extreme(x, axis, "max")
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def extreme(x: Tensor, axis: Axis, op: str) -> Tensor:
    """The largest (``max``) or smallest (``min``) of the slots' elements."""
    best = x.to(torch.uint8) if x.dtype == torch.bool else x
    best = best.clone(memory_format=torch.contiguous_format)
    reduction = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    dist.all_reduce(best, reduction, group=axis.group)
    return best.to(x.dtype)


def own(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This slot's piece of a whole whose pieces along ``dim`` have these sizes."""
    start = sum(sizes[: axis.index])
    piece = x.narrow(dim, start, sizes[axis.index])
    return piece.clone(memory_format=torch.contiguous_format)


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """A tensor with zeros behind it along ``dim``, up to a size."""
    missing = list(x.shape)
    missing[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(missing)], dim) if missing[dim] else x.contiguous()


def gathered(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The slots' pieces, which have these sizes along ``dim``, joined."""
    if x.dtype == torch.bool:
        return gathered(x.view(torch.uint8), axis, dim, sizes).view(torch.bool)
    piece = padded(x, dim, max(sizes))
    pieces = [torch.empty_like(piece) for _ in sizes]
    dist.all_gather(pieces, piece, group=axis.group)
    found = [one.narrow(dim, 0, size) for one, size in zip(pieces, sizes, strict=True)]
    return torch.cat(found, dim)


def scattered(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This slot's piece of the sum of the slots' tensors."""
    largest = max(sizes)
    pieces = [padded(piece, dim, largest) for piece in torch.split(x, list(sizes), dim)]
    piece = torch.empty_like(pieces[0])
    dist.reduce_scatter(piece, pieces, group=axis.group)
    return piece.narrow(dim, 0, sizes[axis.index])


def swapped(
    x: Tensor,
    axis: Axis,
    split_dim: int,
    split_sizes: Sequence[int],
    join_dim: int,
    join_sizes: Sequence[int],
) -> Tensor:
    """Give each slot its piece of ``split_dim``, and join what they give along ``join_dim``."""
    if x.dtype == torch.bool:
        bits = x.view(torch.uint8)
        moved = swapped(bits, axis, split_dim, split_sizes, join_dim, join_sizes)
        return moved.view(torch.bool)
    given = [piece.reshape(-1) for piece in torch.split(x, list(split_sizes), split_dim)]
    shapes = []
    for size in join_sizes:
        shape = list(x.shape)
        shape[split_dim], shape[join_dim] = split_sizes[axis.index], size
        shapes.append(torch.Size(shape))
    counts = [shape.numel() for shape in shapes]
    got = x.new_empty(sum(counts))
    dist.all_to_all_single(
        got, torch.cat(given), counts, [piece.numel() for piece in given], group=axis.group
    )
    pieces = [
        flat.view(shape) for flat, shape in zip(torch.split(got, counts), shapes, strict=True)
    ]
    return torch.cat(pieces, join_dim)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The whole of which each slot holds a term. Its gradient is that of each term."""
    return conjugate(x, lambda term: summed(term, axis), same)


def all_reduce_extreme(x: Tensor, axis: Axis, op: str) -> Tensor:
    """The largest or smallest of the slots' elements, which no gradient goes through.

    Equal elements share a gradient evenly, and how many each slot has is not known here.
    """
    return extreme(x.detach(), axis, op)


def all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The whole of which each slot holds a piece; each goes on with its piece of the gradient."""
    return conjugate(
        x, lambda piece: gathered(piece, axis, dim, sizes), lambda g: own(g, axis, dim, sizes)
    )


def all_gather_for_parts(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """As `all_gather`, for readers that each do a part of the work: their gradients are summed."""
    return conjugate(
        x,
        lambda piece: gathered(piece, axis, dim, sizes),
        lambda g: scattered(g, axis, dim, sizes),
    )


def reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This slot's piece of the whole of which each holds a term."""
    return conjugate(
        x, lambda term: scattered(term, axis, dim, sizes), lambda g: gathered(g, axis, dim, sizes)
    )


def own_slice(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This slot's piece of a whole that all hold. The whole's gradient is of all pieces."""
    return conjugate(
        x, lambda whole: own(whole, axis, dim, sizes), lambda g: gathered(g, axis, dim, sizes)
    )


def all_to_all(
    x: Tensor,
    axis: Axis,
    split_dim: int,
    split_sizes: Sequence[int],
    join_dim: int,
    join_sizes: Sequence[int],
) -> Tensor:
    """From pieces along ``join_dim`` to pieces along ``split_dim``."""
    return conjugate(
        x,
        lambda piece: swapped(piece, axis, split_dim, split_sizes, join_dim, join_sizes),
        lambda g: swapped(g, axis, join_dim, join_sizes, split_dim, split_sizes),
    )


def all_reduce_gradient(x: Tensor, axis: Axis) -> Tensor:
    """A whole for readers that each do a part of the work: their gradients are summed."""
    return conjugate(x, same, lambda gradient: summed(gradient, axis))


def masked_partial(x: Tensor, axis: Axis) -> Tensor:
    """What only the first slot adds to a sum, zeros on others; all get the sum's gradient."""
    return conjugate(x, lambda term: same(term) if axis.index == 0 else zeros(term), same)


def masked_gradient(x: Tensor, axis: Axis) -> Tensor:
    """What all slots made alike of their parts: the first alone goes on with its gradient."""
    return conjugate(x, same, lambda gradient: gradient if axis.index == 0 else zeros(gradient))


def zeros(x: Tensor) -> Tensor:
    """Zeros in the place of a tensor."""
    return torch.zeros_like(x)
