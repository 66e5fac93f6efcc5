"""Memory that a program writes to, as values that never change.

A value is told by (storage, version). A write makes the next version of a storage: the tensor that
is written to and all that it is a view of get their new values at once, through the inverse of each
view, and every other tensor of the storage is read again from its parent at its next use.

    y = x.view(-1)         root x                 %x, version 0
    y[1:3].add_(1)         x ← view ← slice       slice, add, slice_scatter, reshape: version 1
    x + z                  reads the new x, and y again as reshape(x) where it is used
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from shardwright.ir.values import IRValue, Source
from shardwright.ir.with_backward import WITH_BACKWARD, identity_backward
from shardwright.torch_internals import storage_key
from shardwright.tracing.emitter import GraphEmitter

Owner = Literal["input", "param", "buffer", "state", "constant", "tmp"]


@dataclass(slots=True, eq=False)
class TracedStorage:
    """Memory: ``version`` counts the writes, ``seen`` is the last version that was read.

    ``keys`` are its identities among fake tensors; ``owner`` and ``name`` say whose it is,
    ``written`` where it was written to first; ``apart`` is False where tensors share it of which
    none is a view of the other.
    """

    keys: set[int]
    owner: Owner
    name: str
    version: int = 0
    seen: int = 0
    apart: bool = True
    written: Source | None = None


@dataclass(slots=True, eq=False)
class TensorView:
    """A tensor of the program: the root of a storage, or ``origin`` of its ``parent``.

    ``spec`` is its fake tensor, ``value`` the contents at ``version``, ``first`` those at the
    beginning. What is read from a ``detached`` view has no gradient; a ``settled`` one has a value
    of its own, though its memory is another's.
    """

    storage: TracedStorage
    spec: torch.Tensor
    value: IRValue
    version: int = 0
    parent: TensorView | None = None
    origin: ViewCall | None = None
    detached: bool = False
    settled: bool = False
    first: IRValue = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.value

    @property
    def root(self) -> TensorView:
        """The tensor that is the whole storage."""
        return self if self.parent is None else self.parent.root

    @property
    def is_leaf(self) -> bool:
        """Whether the tensor was there before the program."""
        return self.storage.owner != "tmp"


class ProgramMemory:
    """All storages of a program.

    ``updates_parameters`` says that the program may write to its parameters, as a step does.
    """

    def __init__(self, emitter: GraphEmitter, *, updates_parameters: bool = False) -> None:
        self.emitter = emitter
        self.differentiated = False
        """Whether the program has called a backward."""
        self._updates_parameters = updates_parameters
        self._storages: dict[int, TracedStorage] = {}

    def root(
        self, spec: torch.Tensor, value: IRValue, owner: Owner = "tmp", name: str = ""
    ) -> TensorView:
        """A tensor that is a view of no other."""
        made = self.copy(spec, value, owner, name)
        other = self._storages.setdefault(storage_key(spec), made.storage)
        if other is not made.storage:
            made.storage.apart = other.apart = False
        return made

    def copy(
        self, spec: torch.Tensor, value: IRValue, owner: Owner = "tmp", name: str = ""
    ) -> TensorView:
        """A tensor with memory of its own, though its fake may share another's."""
        storage = TracedStorage({storage_key(spec)}, owner, name or value.name)
        return TensorView(storage, spec, value)

    def join(self, spec: torch.Tensor, tensor: TensorView) -> None:
        """Say that ``spec`` is in the storage of ``tensor``, though its fake is not."""
        tensor.storage.keys.add(storage_key(spec))

    def parent_of(self, spec: torch.Tensor, candidates: list[TensorView]) -> TensorView | None:
        """The first of ``candidates`` that shares its storage with ``spec``."""
        key = storage_key(spec)
        return next((tensor for tensor in candidates if key in tensor.storage.keys), None)

    def view(self, parent: TensorView, value: IRValue, origin: ViewCall) -> TensorView:
        """A tensor that is a view of ``parent``, whose contents are current."""
        cuts = not self.emitter.records or origin.name == "detach"
        detached = cuts and self.emitter.flows(parent.value)
        storage = parent.storage
        return TensorView(storage, origin.part, value, storage.version, parent, origin, detached)

    def read(self, tensor: TensorView) -> IRValue:
        """The contents of a tensor at this point of the program."""
        tensor.storage.seen = tensor.storage.version
        return self._current(tensor)

    def _current(self, tensor: TensorView) -> IRValue:
        if tensor.version != tensor.storage.version and tensor.parent is not None:
            tensor.value = self._apply(self._row(tensor).read, self._current(tensor.parent))
            tensor.version = tensor.storage.version
        if tensor.detached and self.emitter.records:
            return self.emitter.detached(tensor.value)
        return tensor.value

    def write(self, tensor: TensorView, value: IRValue) -> None:
        """Let ``tensor`` have the contents ``value``, of its shape and dtype. Raises CaptureError.

        A parameter's gradient is from here on that of its new contents, not of what they were made
        of. Behind a backward no gradient is asked for any more, and the new contents have none.
        """
        if not (self._updates_parameters and tensor.storage.owner == "param"):
            self._check_write(tensor)
            self._store(tensor, value)
            return
        self._check_parameter(tensor, value)
        self._store(tensor, value)
        emitter, root = self.emitter, tensor.root
        if not emitter.flows(root.first):
            return
        value = emitter.detached(root.value)
        if not self.differentiated:
            records, emitter.records = emitter.records, True
            attrs = (root.storage.name, identity_backward(value), True, "")
            (value,) = emitter.call(WITH_BACKWARD, [value], [root.first], [], *attrs)
            emitter.records = records
        root.value = value
        emitter.let_flow(value)

    def replace(self, root: TensorView, value: IRValue) -> None:
        """Let ``root`` have the contents ``value``, as an optimizer's step or the like says.

        No rule for the program's own writes holds: parameters are replaced, and a gradient that
        flowed through the old contents flows through the new ones.
        """
        if self.emitter.flows(root.first):
            self.emitter.let_flow(value)
        self._store(root, value)

    def versions(self) -> dict[TracedStorage, int]:
        """How often each storage was written to."""
        return {storage: storage.version for storage in self._storages.values()}

    def settle(self, tensor: TensorView, value: IRValue) -> None:
        """``tensor`` has the value ``value``, equal to its own but for its gradient.

        Where its memory is another tensor's, neither may be written to from here on.
        """
        tensor.value, tensor.version, tensor.detached = value, tensor.storage.version, False
        tensor.settled = tensor.parent is not None

    def _store(self, tensor: TensorView, value: IRValue) -> None:
        """Write to the root first, then note the new values on the way back."""
        storage = tensor.storage
        storage.written = storage.written or self.emitter.source
        if tensor.parent is None:
            value = self._with_strides(tensor, value)
            storage.version += 1
        else:
            row = self._row(tensor)
            if row.partial and row.write is not None:
                whole = self._current(tensor.parent)
                op, args = row.write
                self._store(tensor.parent, self.emitter.one(op, whole, value, *args))
            else:
                self._store(tensor.parent, self._apply(row.write, value))
        if value.meta.same_order(tensor.spec.stride()):
            tensor.value, tensor.version = value, storage.version

    def _apply(self, call: ViewOperator | None, value: IRValue) -> IRValue:
        return value if call is None else self.emitter.one(call.op, value, *call.args)

    def _row(self, tensor: TensorView) -> ViewRow:
        assert tensor.origin is not None
        if tensor.settled:
            raise self.emitter.refuse(
                "memory is written to that a torch.autograd.Function took and returned as a view; "
                "clone() what it returns first"
            )
        row = describe_view(tensor.origin)
        if row is None:
            raise self.emitter.refuse(
                f"memory is written to of which another tensor is a view by "
                f"{tensor.origin.name}, which cannot be followed; clone() that tensor first"
            )
        return row

    def _with_strides(self, root: TensorView, value: IRValue) -> IRValue:
        """``value`` with the strides of ``root``, which a write keeps."""
        if value.meta.same_order(root.spec.stride()):
            return value
        before = self.emitter.detached(root.value)
        size = root.spec.shape[0]
        return self.emitter.one("aten.slice_scatter.default", before, value, 0, 0, size)

    # --- what may be written ----------------------------------------------------------------

    def _check_parameter(self, tensor: TensorView, value: IRValue) -> None:
        if self.emitter.records and self.emitter.is_differentiable(value):
            raise self.emitter.refuse(
                f"the step writes to its parameter {tensor.storage.name!r} what has a gradient "
                "itself; write inside `with torch.no_grad():`"
            )

    def _check_write(self, tensor: TensorView) -> None:
        storage = tensor.storage
        refuse = self.emitter.refuse
        if storage.owner == "param":
            raise refuse(
                f"the model writes to its parameter {storage.name!r} while it runs; parameters "
                "are fixed in a graph, so compute with a copy (clone) or make it a buffer"
            )
        if storage.owner == "constant":
            raise refuse(
                f"the model writes to the tensor {storage.name!r}, which it keeps outside of its "
                "parameters and buffers; register it as a buffer (register_buffer), or clone it"
            )
        if not storage.apart:
            raise refuse(
                f"the model writes to {storage.name!r}, which shares memory with another tensor in "
                "a way that cannot be followed; clone() it first"
            )
        views, root = [], tensor
        while root.parent is not None:
            views.append(root)
            root = root.parent
        if not all(self._row(item).writable for item in views):
            raise refuse(
                "the model writes to an expanded tensor, of which elements share memory; use "
                "repeat() or clone() in place of expand()"
            )
        cut = not self.emitter.records or any(item.detached for item in views)
        if cut and self.emitter.is_differentiable(root.value):
            raise refuse(
                "the model writes, without gradient, to a tensor that has one, and a graph would "
                "give another gradient; write a new tensor instead (h = h + 1), or, where no "
                "gradient is needed, capture inside `with torch.no_grad():`"
            )


# --- views ----------------------------------------------------------------------------------------
#
# How a tensor is part of another, and how a write to the part changes the whole: reading from what
# was written gives the part again. Only shapes of the program's own tensors are looked at, never
# strides, unless the program did (``as_strided``): a view means the same on every device.


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
    rules = _RULES if call.whole.dtype == call.part.dtype else _OTHER_ELEMENTS
    rule = rules.get(call.name)
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
    shown = ViewOperator("aten.expand.default", (list(call.part.shape),))
    return ViewRow(shown, None, writable=False)


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


def _part(read: str, write: str, *args: Any) -> ViewRow:
    return ViewRow(ViewOperator(read, args), ViewOperator(write, args), partial=True)


def _slice(dim: int, start: int | None, end: int | None, step: int = 1) -> ViewRow:
    return _part("aten.slice.Tensor", "aten.slice_scatter.default", dim, start, end, step)


def _select(dim: int, index: int) -> ViewRow:
    return _part("aten.select.int", "aten.select_scatter.default", dim, index)


def _narrow(call: ViewCall) -> ViewRow | None:
    if "start" not in call.args:  # a tensor
        return None
    dim, start = call.args["dim"], call.args["start"]
    start += call.whole.shape[dim] if start < 0 else 0
    return _slice(dim, start, start + call.args["length"])


def _diagonal(call: ViewCall) -> ViewRow:
    args = (call.args[name] for name in ("offset", "dim1", "dim2"))
    return _part("aten.diagonal.default", "aten.diagonal_scatter.default", *args)


def _as_strided(call: ViewCall) -> ViewRow:
    offset = call.part.storage_offset() - call.whole.storage_offset()
    args = (list(call.part.shape), list(call.part.stride()), offset)
    return _part("aten.as_strided.default", "aten.as_strided_scatter.default", *args)


def _pieces_along(dim_of: Callable[[ViewCall], int]) -> Callable[[ViewCall], ViewRow]:
    """Pieces that follow one another along a dimension."""

    def rule(call: ViewCall) -> ViewRow:
        dim = dim_of(call)
        start = sum(piece.shape[dim] for piece in call.parts[: call.number])
        return _slice(dim, start, start + call.part.shape[dim])

    return rule


def _bits(call: ViewCall) -> ViewRow:
    """The same bits as elements of another type."""
    return ViewRow(
        ViewOperator("aten.view.dtype", (call.part.dtype,)),
        ViewOperator("aten.view.dtype", (call.whole.dtype,)),
    )


_REAL, _COMPLEX = (
    ViewOperator("aten.view_as_real.default"),
    ViewOperator("aten.view_as_complex.default"),
)
_RESHAPES = (
    *("view", "reshape", "view_as", "reshape_as", "_reshape_alias", "_unsafe_view", "flatten"),
    *("unflatten", "ravel", "squeeze", "unsqueeze", "atleast_1d", "atleast_2d", "atleast_3d"),
)
_PERMUTES = (
    *("permute", "transpose", "t", "numpy_T", "mT", "mH", "matrix_H", "adjoint"),
    *("movedim", "moveaxis", "swapaxes", "swapdims"),
)
_RULES: dict[str, Callable[[ViewCall], ViewRow | None]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_PERMUTES, _permute),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "tensor_split"),
        _pieces_along(lambda call: int(call.args["dim"])),
    ),
    "hsplit": _pieces_along(lambda call: min(1, call.whole.dim() - 1)),
    "vsplit": _pieces_along(lambda call: 0),
    "dsplit": _pieces_along(lambda call: 2),
    "unfold": _unfold,
    "slice": lambda call: _slice(*(call.args[name] for name in ("dim", "start", "end", "step"))),
    "narrow": _narrow,
    "select": lambda call: _select(call.args["dim"], call.args["index"]),
    "unbind": lambda call: _select(call.args["dim"], call.number),
    "diagonal": _diagonal,
    "as_strided": _as_strided,
}
_OTHER_ELEMENTS: dict[str, Callable[[ViewCall], ViewRow | None]] = {
    "view": _bits,
    "view_as_real": lambda call: ViewRow(_REAL, _COMPLEX),
    "view_as_complex": lambda call: ViewRow(_COMPLEX, _REAL),
}
