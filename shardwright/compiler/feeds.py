"""Feeds: tensors by name, checked against a plan and bound to its buffers.

Names are those of inputs and stored values, or a stored value's in a checkpoint. A bound tensor has
the plan's shape, dtype, device and strides; one of other strides was copied (an input at each run,
a stored value when it is bound). Nothing else that is bound is in memory that a run writes. What a
refused bind had moved is not bound any more, and must be fed again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch

from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.slots import PlanMemory
from shardwright.errors import InputError
from shardwright.ir import IRValue
from shardwright.ir.tensor_meta import describe_dtype, overlaps, torch_dtype
from shardwright.kernels.lowered import ValueSpec
from shardwright.kernels.strides import extent


class Feeds:
    """The external buffers of one executor."""

    def __init__(self, plan: ExecPlan, memory: PlanMemory) -> None:
        self._plan = plan
        self._memory = memory
        self._buffer = _names(plan)
        self._given: dict[int, tuple[torch.Tensor, tuple[object, ...]]] = {}
        self._copied: dict[int, torch.Tensor] = {}
        self._renewed = {k for k, b in enumerate(plan.buffers) if b.vid in plan.renewed}
        self._written: list[tuple[int, int, int]] = []
        self._missing = {k for k, b in enumerate(plan.buffers) if b.kind in ("input", "stored")}
        self.rebound_static = True
        """Whether a static value got other memory since this was last set to False."""

    def bind(self, feed: Mapping[str, torch.Tensor]) -> None:
        """Bind what is given; what is not stays as it was. Raises InputError, naming it."""
        check_feed(feed)
        moved: set[int] = set()
        try:
            for name, tensor in feed.items():
                self._bind(name, tensor, moved)
            if moved:
                self._separate(moved)
        except BaseException:
            self.forget(moved)
            raise

    def copy(self, feed: Mapping[str, torch.Tensor]) -> None:
        """Copy inputs into memory of their own, where they stay until others are bound.

        Raises InputError before anything is copied.
        """
        check_feed(feed)
        found = {self._input(name, tensor): tensor for name, tensor in feed.items()}
        moved = found.keys() - self._copied.keys()
        for buffer, tensor in found.items():
            self._given.pop(buffer, None)
            if buffer in moved:
                self._copy(buffer, tensor)
            else:
                self._copied[buffer].copy_(tensor.detach())
        self._missing -= moved
        if moved:
            self._separate(moved)

    def _input(self, name: str, tensor: torch.Tensor) -> int:
        """The buffer of an input that the tensor fits."""
        buffer = self._named(name)
        spec = self._plan.lowered.values[self._plan.buffers[buffer].vid]
        if spec.role != "input":
            raise InputError(
                f"{spec.role} {name!r} is stored, and a replay takes inputs alone; bind it before, "
                "by bind_and_alloc_slots"
            )
        check_tensor(name, tensor, spec, self._memory.device)
        return buffer

    def forget(self, buffers: Collection[int]) -> None:
        """Let go of the tensors of these buffers: they must be fed before the next run."""
        for buffer in buffers:
            self._given.pop(buffer, None)
            self._copied.pop(buffer, None)
            self._memory.release(buffer)
        self._missing.update(buffers)
        self._written = [span for span in self._written if span[2] not in self._missing]

    def check_complete(self) -> None:
        """Raise InputError where a buffer has no tensor yet."""
        if self._missing:
            named = (
                self._plan.lowered.values[self._plan.buffers[k].vid].name
                for k in sorted(self._missing)
            )
            raise InputError(f"the feed lacks {', '.join(map(repr, named))}")

    def _bind(self, name: str, tensor: torch.Tensor, moved: set[int]) -> None:
        """Bind one tensor, or copy it where a copy is bound; what gets other memory is noted."""
        buffer = self._named(name)
        if not self._is_where_it_was(buffer, tensor):
            self._check(buffer, name, tensor)
            moved.add(buffer)
            self._move(buffer, tensor)
        elif buffer in self._copied:
            self._copied[buffer].copy_(tensor.detach())

    def _named(self, name: str) -> int:
        """The buffer of a name. Raises InputError."""
        buffer = self._buffer.get(name)
        if buffer is None:
            known = ", ".join(self._buffer) or "none"
            raise InputError(f"nothing is named {name!r} to be fed; names are {known}")
        return buffer

    def _is_where_it_was(self, buffer: int, tensor: torch.Tensor) -> bool:
        """Whether this very tensor was given last, and nobody changed how it lies since."""
        given, layout = self._given.get(buffer, (None, ()))
        if given is not tensor or layout != _layout(tensor):
            return False
        return buffer in self._copied or self._memory.bases[buffer] == (tensor.data_ptr() or None)

    def _check(self, buffer: int, name: str, tensor: torch.Tensor) -> None:
        """Raise InputError where the buffer cannot be this tensor."""
        vid = self._plan.buffers[buffer].vid
        spec, strides = self._plan.lowered.values[vid], self._plan.allocations[vid].strides
        check_tensor(name, tensor, spec, self._memory.device)
        if vid in self._plan.renewed and not _lies_as(tensor, strides):
            raise InputError(
                f"{spec.role} {name!r} has strides {tensor.stride()}, but a run writes to it in "
                f"place with strides {strides}; give a tensor that lies so"
            )

    def _move(self, buffer: int, tensor: torch.Tensor) -> None:
        """Let the buffer be the tensor, or a copy that lies as the plan says."""
        self._copied.pop(buffer, None)
        self._given[buffer] = tensor, _layout(tensor)
        if _lies_as(tensor, self._plan.allocations[self._plan.buffers[buffer].vid].strides):
            self._hold(buffer, tensor.detach())
        else:
            self._copy(buffer, tensor)
        self._missing.discard(buffer)

    def _copy(self, buffer: int, tensor: torch.Tensor) -> None:
        """Let the buffer be memory of its own, with the tensor's contents."""
        own = self._memory.own(buffer)
        if overlaps(own.shape, own.stride()):
            spec = self._plan.lowered.values[self._plan.buffers[buffer].vid]
            raise InputError(
                f"{spec.role} {spec.name!r} has strides {tensor.stride()}, but the plan reads it "
                f"with strides {own.stride()}, by which elements lie on one another, so that it "
                "cannot be copied; give a tensor that lies so"
            )
        self._copied[buffer] = own
        own.copy_(tensor.detach())
        self._hold(buffer, own)

    def _hold(self, buffer: int, tensor: torch.Tensor) -> None:
        if self._memory.hold(buffer, tensor):
            self.rebound_static |= self._plan.buffers[buffer].vid in self._plan.static

    # --- memory that a run writes -------------------------------------------------------------

    def _separate(self, moved: set[int]) -> None:
        """See that nothing else lies in what a run writes: inputs there are copied."""
        if not self._renewed.isdisjoint(moved):
            self._written = sorted(
                (*_span(held), k)
                for k in self._renewed
                if (held := self._memory.held(k)) is not None and held.numel()
            )
            self._check_apart()
            moved = set(range(1, len(self._plan.buffers)))
        for k in moved - self._renewed - self._copied.keys():
            held = self._memory.held(k)
            if held is None or (other := self._overlapping(held)) is None:
                continue
            if self._plan.buffers[k].kind != "input":
                self._refuse(k, other)
            self._copy(k, held)

    def _check_apart(self) -> None:
        """Raise InputError where two tensors that a run writes share memory."""
        for (_, end, one), (begin, _, other) in pairwise(self._written):
            if begin < end:
                self._refuse(one, other)

    def _overlapping(self, tensor: torch.Tensor) -> int | None:
        """The written buffer that overlaps a tensor."""
        begin, end = _span(tensor)
        at = bisect_left(self._written, (end,))
        if at == 0 or begin == end:
            return None
        _, stop, buffer = self._written[at - 1]
        return buffer if begin < stop else None

    def _refuse(self, one: int, other: int) -> None:
        a, b = (self._plan.lowered.values[self._plan.buffers[k].vid] for k in (one, other))
        raise InputError(
            f"{a.role} {a.name!r} and {b.role} {b.name!r} share memory, and a run writes to it; "
            "give tensors with memory of their own"
        )


def _names(plan: ExecPlan) -> dict[str, int]:
    """Every name by which an external value may be fed, and its buffer: its own name first."""
    found: dict[str, int] = {}
    external = [k for k, b in enumerate(plan.buffers) if b.kind in ("input", "stored")]
    specs = [(plan.lowered.values[plan.buffers[k].vid], k) for k in external]
    for spec, k in reversed(specs):
        found.update(dict.fromkeys(spec.names, k))
    return found | {spec.name: k for spec, k in specs}


def check_feed(feed: object) -> None:
    """Raise InputError where a feed is no mapping from names."""
    if not isinstance(feed, Mapping):
        raise InputError(
            f"a feed is a {type(feed).__name__}, but tensors are fed by name: a dict like "
            '{"input": x}'
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    value: ValueSpec | IRValue,
    device: torch.device,
    *,
    static: bool = True,
) -> None:
    """Raise InputError where a tensor has another dtype or device, or ``static`` shape."""
    if not isinstance(tensor, torch.Tensor):
        raise InputError(
            f"{value.role} {name!r} is a {type(tensor).__name__}, no tensor; feed a tensor of "
            f"{value.dtype}"
        )
    shape = tuple(tensor.shape)
    if tensor.dtype != torch_dtype(value.dtype) or (static and shape != value.shape):
        wanted = f"{value.dtype}{list(value.shape) if static else ''}"
        raise InputError(
            f"{value.role} {name!r} is {describe_dtype(tensor.dtype)}{list(shape)}, but the plan "
            f"was made for {wanted}, which is static; feed such a tensor, or compile for this one"
        )
    check_device(f"{value.role} {name!r}", tensor, device)


def check_device(what: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise InputError where a tensor is not dense, or not where a program runs."""
    if tensor.layout != torch.strided:
        raise InputError(
            f"{what} is {tensor.layout}, but a program takes dense tensors; give its to_dense()"
        )
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        raise InputError(
            f"{what} is on {tensor.device}, but the program runs on {device}; move it there with "
            f".to({str(device)!r})"
        )


def _lies_as(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether the strides are these, where it matters, and the values stand as they are."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=False)
    return tensor.numel() == 0 or all(size == 1 or a == b for size, a, b in pairs)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """How a tensor lies and what it holds: all that may change in place."""
    seen_otherwise = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.dtype, seen_otherwise


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to behind its last."""
    begin = tensor.data_ptr()
    return begin, begin + extent(tensor.shape, tensor.stride()) * tensor.element_size()
