"""Memory that a program writes to, as values that never change.

Comes in: the program's tensors, told apart by storage and by how each is a view of another.
Goes out: for each read the value of the contents at that point; a write makes new values.
What always holds: identity is (storage, version). A write makes the next version of a storage;
the tensor written to and all it is a view of have their new values at once, through the inverse
of each view, and every other tensor of the storage is read again from its parent at its next use.

    y = x.view(-1)         root x                 %x, version 0
    y[1:3].add_(1)         x ← view ← slice       slice, add, slice_scatter, reshape: version 1
    x + z                  reads the new x, and y again as reshape(x) where it is used
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from shardwright.ir.tensor_meta import contiguous_strides
from shardwright.ir.values import IRValue, Source
from shardwright.ir.with_backward import WITH_BACKWARD, identity_backward
from shardwright.torch_internals import storage_key
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.views import ViewCall, ViewOperator, ViewRow, describe_view

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

    ``spec`` is export's fake tensor, ``value`` the contents at ``version``, ``first`` those at the
    beginning. What is read from a ``detached`` place has no gradient; a ``settled`` one has a value
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
        place = self.copy(spec, value, owner, name)
        other = self._storages.setdefault(storage_key(spec), place.storage)
        if other is not place.storage:
            place.storage.apart = other.apart = False
        return place

    def copy(
        self, spec: torch.Tensor, value: IRValue, owner: Owner = "tmp", name: str = ""
    ) -> TensorView:
        """A tensor with memory of its own, though its fake may share another's."""
        storage = TracedStorage({storage_key(spec)}, owner, name or value.name)
        return TensorView(storage, spec, value)

    def join(self, spec: torch.Tensor, place: TensorView) -> None:
        """Say that ``spec`` lies in the storage of ``place``, though its fake does not."""
        place.storage.keys.add(storage_key(spec))

    def parent_of(self, spec: torch.Tensor, candidates: list[TensorView]) -> TensorView | None:
        """The first of ``candidates`` that shares its storage with ``spec``."""
        key = storage_key(spec)
        return next((place for place in candidates if key in place.storage.keys), None)

    def view(self, parent: TensorView, value: IRValue, origin: ViewCall) -> TensorView:
        """A tensor that is a view of ``parent``, whose contents are current."""
        cuts = not self.emitter.records or origin.name == "detach"
        detached = cuts and self.emitter.flows(parent.value)
        storage = parent.storage
        return TensorView(storage, origin.part, value, storage.version, parent, origin, detached)

    def read(self, place: TensorView) -> IRValue:
        """The contents of ``place`` at this point of the program."""
        place.storage.seen = place.storage.version
        return self._current(place)

    def _current(self, place: TensorView) -> IRValue:
        if place.version != place.storage.version and place.parent is not None:
            place.value = self._apply(self._view(place).read, self._current(place.parent))
            place.version = place.storage.version
        if place.detached and self.emitter.records:
            return self.emitter.detached(place.value)
        return place.value

    def write(self, place: TensorView, value: IRValue) -> None:
        """``place`` has the contents ``value`` from this point on, of its shape and dtype.

        Raises CaptureError.
        """
        updates = self._updates_parameters and place.storage.owner == "param"
        if updates:
            self._check_parameter(place, value)
        else:
            self._check_write(place)
        place.storage.written = place.storage.written or self.emitter.source
        self._store(place, value)
        if updates:
            self._begin_anew(place.root)

    def _begin_anew(self, root: TensorView) -> None:
        """A parameter's gradient is that of its new contents, not of what they were made of.

        Behind a backward no gradient is asked for any more, and the new contents stand alone.
        """
        emitter = self.emitter
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

    def replace(self, place: TensorView, value: IRValue) -> None:
        """``place``, a root, has the contents ``value`` from here on, as a step of training says.

        No rule for the program's own writes holds: parameters are replaced, and a gradient that
        flowed through the old contents flows through the new ones.
        """
        if self.emitter.flows(place.first):
            self.emitter.let_flow(value)
        place.storage.written = place.storage.written or self.emitter.source
        self._store(place, value)

    def versions(self) -> dict[TracedStorage, int]:
        """How often each storage was written to."""
        return {storage: storage.version for storage in self._storages.values()}

    def settle(self, place: TensorView, value: IRValue) -> None:
        """``place`` has the value ``value``, equal to its own but for its gradient.

        Where its memory is another tensor's, neither may be written to from here on.
        """
        place.value, place.version, place.detached = value, place.storage.version, False
        place.settled = place.parent is not None

    def _store(self, place: TensorView, value: IRValue) -> None:
        """Write to the root first, then note the new values on the way back."""
        if place.parent is None:
            value = self._with_strides(place, value)
            place.storage.version += 1
        else:
            view = self._view(place)
            if view.partial and view.write is not None:
                whole = self._current(place.parent)
                op, args = view.write
                self._store(place.parent, self.emitter.one(op, whole, value, *args))
            else:
                self._store(place.parent, self._apply(view.write, value))
        if same_layout(value, place.spec):
            place.value, place.version = value, place.storage.version

    def _apply(self, call: ViewOperator | None, value: IRValue) -> IRValue:
        return value if call is None else self.emitter.one(call.op, value, *call.args)

    def _view(self, place: TensorView) -> ViewRow:
        assert place.origin is not None
        if place.settled:
            raise self.emitter.refuse(
                "memory is written to that a torch.autograd.Function took and returned as a view; "
                "clone() what it returns first"
            )
        view = describe_view(place.origin)
        if view is None:
            raise self.emitter.refuse(
                f"memory is written to of which another tensor is a view by "
                f"{place.origin.name}, which cannot be followed; clone() that tensor first"
            )
        return view

    def _with_strides(self, place: TensorView, value: IRValue) -> IRValue:
        """``value`` laid out as ``place`` is: a write keeps a tensor's strides."""
        if same_layout(value, place.spec):
            return value
        before = self.emitter.detached(place.value)
        size = place.spec.shape[0]
        return self.emitter.one("aten.slice_scatter.default", before, value, 0, 0, size)

    # --- what may be written ----------------------------------------------------------------

    def _check_parameter(self, place: TensorView, value: IRValue) -> None:
        if self.emitter.records and self.emitter.is_differentiable(value):
            raise self.emitter.refuse(
                f"the step writes to its parameter {place.storage.name!r} what has a gradient "
                "itself; write inside `with torch.no_grad():`"
            )

    def _check_write(self, place: TensorView) -> None:
        storage = place.storage
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
        views = _views_from(place)
        if not all(self._view(item).writable for item in views):
            raise refuse(
                "the model writes to an expanded tensor, of which elements share memory; use "
                "repeat() or clone() in place of expand()"
            )
        cut = not self.emitter.records or any(item.detached for item in views)
        if cut and self.emitter.is_differentiable(place.root.value):
            raise refuse(
                "the model writes, without gradient, to a tensor that has one, and a graph would "
                "give another gradient; write a new tensor instead (h = h + 1), or, where no "
                "gradient is needed, capture inside `with torch.no_grad():`"
            )


def same_layout(value: IRValue, spec: torch.Tensor) -> bool:
    """Whether a value's elements lie in memory as those of ``spec``, which has its shape."""
    strides = value.strides or contiguous_strides(value.shape)
    return all(
        size <= 1 or found == expected
        for size, found, expected in zip(value.shape, strides, spec.stride(), strict=True)
    )


def _views_from(place: TensorView) -> list[TensorView]:
    """``place``, what it is a view of, and so on up to the root, which is left out."""
    views = []
    while place.parent is not None:
        views.append(place)
        place = place.parent
    return views
