"""The arithmetic of communications: reductions, and the pieces that members cut and join.

Every transport of ours calls these functions, so that all give the same bits.

A reduction adds in the order of the members, ``((x0 + x1) + x2)``; half precision and f8 are added
in f32 and rounded once; the sum of bools is ``or``; sums of integers wrap around; a largest or
least element that is zero has the sign that torch gives it. Where a dimension does not divide
evenly, the pieces have the sizes of the members' declared tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from functools import reduce as fold

import torch
from torch import Tensor

from shardwright.comm.transport import Operation

ACCUMULATE: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""The dtype a reduction is computed in, where it is not the tensors' own."""

_FOLDS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_BOOL_FOLDS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.logical_or,
    "max": torch.logical_or,
    "min": torch.logical_and,
}


def reduce(operation: Operation, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The tensors, one a member and in their order, reduced element by element.

    Into ``out`` where it is given, which may be the first of them.
    """
    dtype = tensors[0].dtype
    name = operation.reduce_op
    if dtype.is_complex:
        parts = [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]
        into = None if out is None else torch.view_as_real(out)
        return torch.view_as_complex(reduce(operation, parts, into))
    wide = ACCUMULATE.get(dtype)
    if wide is not None:
        total = _folded(name, [widen(tensor, wide, name) for tensor in tensors], None)
        total = narrow(total, dtype, name)
        return total if out is None else out.copy_(total)
    return _folded(name, tensors, out)


def widen(tensor: Tensor, dtype: torch.dtype, reduce_op: str) -> Tensor:
    """A copy for a reduction in ``dtype``, which has the order and the sums of the tensor's own.

    Sums of u64 are those of i64 bit for bit; its order is that of i64 where the first bit is
    turned.
    """
    wide = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return wide.bitwise_xor_(_FIRST_BIT) if _turns(tensor.dtype, reduce_op) else wide


def narrow(total: Tensor, dtype: torch.dtype, reduce_op: str) -> Tensor:
    """What `widen` made and a reduction kept, in the tensors' own dtype; integers wrap around."""
    return (total ^ _FIRST_BIT if _turns(dtype, reduce_op) else total).to(dtype)


def _turns(dtype: torch.dtype, reduce_op: str) -> bool:
    return dtype == torch.uint64 and reduce_op != "sum"


_FIRST_BIT = -(2**63)


def _folded(name: str, tensors: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """Reduced in the tensors' own dtype; into ``out`` where it is given."""
    folds = _BOOL_FOLDS if tensors[0].dtype == torch.bool else _FOLDS
    total = fold(partial(folds[name], out=out), tensors)
    return torch.div(total, len(tensors), out=out) if name == "avg" else total


def pieces(operation: Operation, member: int, tensor: Tensor) -> list[Tensor]:
    """What ``member`` gives to each member, cut along the operation's dimension."""
    dim = operation.cut
    assert dim is not None
    return list(tensor.split([spec.shape[dim] for spec in operation.pieces[member]], dim))


def assemble(operation: Operation, tensors: Sequence[Tensor]) -> Tensor:
    """What a member gets of the tensors given to it, in their members' order.

    They are reduced or joined, or there is only one.
    """
    if operation.row.reduces:
        return reduce(operation, tensors)
    if operation.join is not None:
        return torch.cat(list(tensors), operation.join)
    (only,) = tensors
    return only
