"""Views: how a tensor is part of another, and how a write to the part changes the whole.

Comes in: the call of an operator whose result shares memory with its first tensor. Goes out: a
`ViewRow`, two calls of functional operators: one reads the part from the whole, one makes the new
whole from the new part. What always holds: reading from what was written gives the part again.

Only shapes of the program's own tensors are looked at, never the layout in memory, unless the
program did (``as_strided``): a view means the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class ViewOperator(NamedTuple):
    """An operator, and its arguments after the tensors."""

    op: str
    args: tuple[Any, ...] = ()


class ViewRow(NamedTuple):
    """``read(whole, *args)`` is the part, ``write(part, *args)`` the new whole.

    Where ``partial``, the write needs what the part leaves out: ``write(whole, part, *args)``.
    A call that is None changes nothing. Where not ``writable``, elements of the part share memory.
    """

    read: ViewOperator | None
    write: ViewOperator | None
    partial: bool = False
    writable: bool = True


class ViewCall(NamedTuple):
    """A call that made a view.

    ``name`` is the operator's name without overload, ``args`` its arguments by name that are no
    tensors, ``whole`` the tensor viewed, ``parts`` all results, ``number`` which of them is meant.
    """

    name: str
    args: dict[str, Any]
    whole: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    number: int = 0

    @property
    def part(self) -> torch.Tensor:
        """The result that is meant."""
        return self.parts[self.number]


SAME = ViewRow(None, None)


def same_geometry(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors that share memory show the same elements in the same way."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
    )


def describe_view(call: ViewCall) -> ViewRow | None:
    """The view that a call made, or None where the operator is not known as one."""
    if call.whole.is_conj() != call.part.is_conj():
        return None
    if same_geometry(call.whole, call.part):
        return SAME
    if call.whole.dtype != call.part.dtype:
        rule = _OTHER_ELEMENTS.get(call.name)
    else:
        rule = _RULES.get(call.name)
    return rule(call) if rule else None


def _reshape(call: ViewCall) -> ViewRow:
    """The same elements in the same order."""
    return ViewRow(
        ViewOperator("aten.reshape.default", (list(call.part.shape),)),
        ViewOperator("aten.reshape.default", (list(call.whole.shape),)),
    )


def _expand(call: ViewCall) -> ViewRow:
    """Elements shown several times, unless only dimensions of size 1 are added."""
    if call.part.numel() == call.whole.numel():
        return _reshape(call)
    return ViewRow(
        ViewOperator("aten.expand.default", (list(call.part.shape),)), None, writable=False
    )


def _unfold(call: ViewCall) -> ViewRow:
    args = tuple(call.args[name] for name in ("dimension", "size", "step"))
    return ViewRow(ViewOperator("aten.unfold.default", args), None, writable=False)


def _permute(call: ViewCall) -> ViewRow:
    """Dimensions in another order, found by running the operator on distinct sizes."""
    sizes = [2 + i for i in range(call.whole.dim())]
    probe = torch.empty(sizes, device="meta")
    op = getattr(torch.ops.aten, call.name)
    order = [size - 2 for size in op(probe, *call.args.values()).shape]
    inverse = [order.index(dim) for dim in range(len(order))]
    return ViewRow(
        ViewOperator("aten.permute.default", (order,)),
        ViewOperator("aten.permute.default", (inverse,)),
    )


def _slice(call: ViewCall) -> ViewRow:
    a = call.args
    return _slice_of(a["dim"], a["start"], a["end"], a["step"])


def _slice_of(dim: int, start: int | None, end: int | None, step: int = 1) -> ViewRow:
    args = (dim, start, end, step)
    return ViewRow(
        ViewOperator("aten.slice.Tensor", args),
        ViewOperator("aten.slice_scatter.default", args),
        partial=True,
    )


def _narrow(call: ViewCall) -> ViewRow | None:
    if "start" not in call.args:  # a tensor
        return None
    dim, start = call.args["dim"], call.args["start"]
    start += call.whole.shape[dim] if start < 0 else 0
    return _slice_of(dim, start, start + call.args["length"])


def _split_along(dim_of: Callable[[ViewCall], int]) -> Callable[[ViewCall], ViewRow]:
    """Pieces that lie one after the other along a dimension."""

    def rule(call: ViewCall) -> ViewRow:
        dim = dim_of(call)
        start = sum(piece.shape[dim] for piece in call.parts[: call.number])
        return _slice_of(dim, start, start + call.part.shape[dim])

    return rule


def _select(call: ViewCall) -> ViewRow:
    return _select_of(call.args["dim"], call.args["index"])


def _unbind(call: ViewCall) -> ViewRow:
    return _select_of(call.args["dim"], call.number)


def _select_of(dim: int, index: int) -> ViewRow:
    args = (dim, index)
    return ViewRow(
        ViewOperator("aten.select.int", args),
        ViewOperator("aten.select_scatter.default", args),
        partial=True,
    )


def _diagonal(call: ViewCall) -> ViewRow:
    args = tuple(call.args[name] for name in ("offset", "dim1", "dim2"))
    return ViewRow(
        ViewOperator("aten.diagonal.default", args),
        ViewOperator("aten.diagonal_scatter.default", args),
        partial=True,
    )


def _as_strided(call: ViewCall) -> ViewRow:
    offset = call.part.storage_offset() - call.whole.storage_offset()
    args = (list(call.part.shape), list(call.part.stride()), offset)
    return ViewRow(
        ViewOperator("aten.as_strided.default", args),
        ViewOperator("aten.as_strided_scatter.default", args),
        partial=True,
    )


def _bits(call: ViewCall) -> ViewRow:
    """The same bits as elements of another type."""
    return ViewRow(
        ViewOperator("aten.view.dtype", (call.part.dtype,)),
        ViewOperator("aten.view.dtype", (call.whole.dtype,)),
    )


def _as_real(call: ViewCall) -> ViewRow:
    return ViewRow(
        ViewOperator("aten.view_as_real.default"), ViewOperator("aten.view_as_complex.default")
    )


def _as_complex(call: ViewCall) -> ViewRow:
    return ViewRow(
        ViewOperator("aten.view_as_complex.default"), ViewOperator("aten.view_as_real.default")
    )


_RULES: dict[str, Callable[[ViewCall], ViewRow | None]] = {
    **dict.fromkeys(
        (
            "view",
            "reshape",
            "view_as",
            "reshape_as",
            "_reshape_alias",
            "_unsafe_view",
            "flatten",
            "unflatten",
            "ravel",
            "squeeze",
            "unsqueeze",
            "atleast_1d",
            "atleast_2d",
            "atleast_3d",
        ),
        _reshape,
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "unfold": _unfold,
    **dict.fromkeys(
        (
            "permute",
            "transpose",
            "t",
            "numpy_T",
            "mT",
            "mH",
            "matrix_H",
            "adjoint",
            "movedim",
            "moveaxis",
            "swapaxes",
            "swapdims",
        ),
        _permute,
    ),
    "slice": _slice,
    "narrow": _narrow,
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "tensor_split"),
        _split_along(lambda call: int(call.args["dim"])),
    ),
    "hsplit": _split_along(lambda call: min(1, call.whole.dim() - 1)),
    "vsplit": _split_along(lambda call: 0),
    "dsplit": _split_along(lambda call: 2),
    "select": _select,
    "unbind": _unbind,
    "diagonal": _diagonal,
    "as_strided": _as_strided,
}
_OTHER_ELEMENTS: dict[str, Callable[[ViewCall], ViewRow | None]] = {
    "view": _bits,
    "view_as_real": _as_real,
    "view_as_complex": _as_complex,
}
