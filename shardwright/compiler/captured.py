"""Capture: a program prepared for one set of shapes, and bound.

Comes in: what prepares the graph, and what binds it. Goes out: a `Capture`, which runs on a call's
tensors. What always holds: where preparing or binding anew fails, the capture is what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.compiler.guards import Facts, Guard, Parts, is_placed
from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.replay import Known, Replaying
from shardwright.compiler.sources import Prepared
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.structure import rebuild
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.kernels.native.library import CallLog


class Bound(Protocol):
    """A prepared graph, ready to run; `compile` makes them."""

    @property
    def plan(self) -> ExecPlan:
        """What it runs, and where."""
        ...

    def __call__(self, inputs: Sequence[Tensor], *, slots: bool = False) -> list[Tensor]:
        """Run on inputs in the graph's order; gives its outputs, or the slots they lie in."""
        ...

    def logging(self) -> AbstractContextManager[CallLog]:
        """What the runs inside of it call, in order."""
        ...

    def feed(self, stored: Mapping[str, Tensor]) -> None:
        """Give stored values, by their first names, other contents."""
        ...

    def take_contents(self) -> bool:
        """Read stored values anew, whose contents have changed; False where it must be bound."""
        ...


Bind = Callable[[Prepared, Replaying], Bound]


class Capture:
    """One capture of a program: what is prepared for one set of shapes, and bound."""

    def __init__(
        self,
        prepare: Callable[[], Prepared],
        parts: Callable[[], Parts],
        replaying: Replaying,
        bind: Bind,
        device: torch.device,
    ) -> None:
        self._prepare = prepare
        self._parts = parts
        self._replaying = replaying
        self._bind = bind
        self._device = device
        self._expected: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._plain: int | None = None
        self._make()

    def _make(self) -> None:
        """Prepare and bind; what fails leaves everything as it was."""
        facts = Facts(self._parts())
        with self._plainly():
            prepared = self._prepare()
            parts = self._parts()
            guard = Guard(parts, facts, read(prepared.graph, self._replaying, parts))
            bound = self._bind(prepared, self._replaying)
        self.prepared, self.bound, self.guard = prepared, bound, guard
        graph, given = prepared.graph, prepared.rate_inputs
        ordered = [*prepared.call_inputs, *given]
        places = [ordered.index(value_id) for value_id in graph.inputs]
        self._places = None if places == sorted(places) else places
        self.rates = tuple(graph.values[value_id].name for value_id in given)
        self._rate_tensors = [_empty(graph.values[value_id], self._device) for value_id in given]
        self._rate_values: dict[str, float] = {}
        self.known = _known(self.prepared)

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Outside of the modes that a caller may be in, which would be those of later calls."""
        with torch.autocast(self._device.type, enabled=False), torch.inference_mode(False):
            yield

    def expect(self, args: Sequence[Any], tensors: Sequence[Tensor], *, plain: bool) -> None:
        """From now on calls like this one are known at a glance, if it is ``plain``."""
        self._expected = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._plain = len(args) if plain else None

    def knows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is plainly one of this capture's: the same tensors alone, in order."""
        if kwargs or len(args) != self._plain:
            return False
        for given, (shape, dtype, device) in zip(args, self._expected, strict=True):
            if not isinstance(given, Tensor) or given.shape != shape:
                return False
            if given.dtype != dtype or given.device != device or given.layout != torch.strided:
                return False
        return True

    def run(
        self,
        tensors: Sequence[Tensor],
        *,
        rates: Mapping[str, Tensor] | None = None,
        slots: bool = False,
    ) -> list[Tensor]:
        """Run once; gives the graph's outputs, in order."""
        self.prepared.begin()
        if self.rates:
            tensors = [*tensors, *self._rates_of_step(rates or {})]
        if self._places is not None:
            tensors = [tensors[place] for place in self._places]
        if torch.is_autocast_enabled(self._device.type):
            with torch.autocast(self._device.type, enabled=False):
                results = self.bound(tensors, slots=slots)
        else:
            results = self.bound(tensors, slots=slots)
        if self.prepared.rates is not None:
            self.prepared.rates.advance()
        return results

    def fold(self, results: Sequence[Tensor]) -> Any:
        """The graph's outputs as the program's own result."""
        assert self.prepared.graph.out_structure is not None
        return rebuild(self.prepared.graph.out_structure, results)

    def follow(self) -> None:
        """Be of the program as it is now: packed, folded or prepared anew where it has changed."""
        if not self.guard.has_same_objects():
            self._make()
        elif not self.guard.has_same_contents():
            versions = self.guard.versions()
            if not self.bound.take_contents():
                with self._plainly():
                    self.bound = self._bind(self.prepared, self._replaying)
            self.guard.took(versions)

    def refresh(self) -> None:
        """Prepare and bind anew: tensors may be others, and what was made of them with them."""
        self._make()

    def _rates_of_step(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """The learning rates as the graph takes them, written where one has changed."""
        assert self.prepared.rates is not None
        values = self.prepared.rates.values
        if values != self._rate_values:
            for name, tensor in zip(self.rates, self._rate_tensors, strict=True):
                tensor.fill_(values[name])
            self._rate_values = values
        pairs = zip(self.rates, self._rate_tensors, strict=True)
        return [given.get(name, tensor) for name, tensor in pairs] if given else self._rate_tensors


def read(graph: IRGraph, replaying: Replaying, parts: Parts) -> list[Tensor]:
    """The tensors whose contents binding takes: what the program itself changes are none.

    In training these are the constants, which are folded. In inference all tensors of the modules
    count: a batch norm writes to its statistics unseen, but counts its batches.
    """
    stored = [value for value in graph.stored() if value.id not in graph.updates]
    if replaying.mode == "train":
        return [graph.tensors[value.id] for value in stored if value.role == "constant"]
    written = {graph.tensors[value_id].data_ptr() for value_id in graph.updates}
    held = (t for m in parts.modules for t in (*m.parameters(), *m.buffers()))
    others = [t for t in held if is_placed(t) and t.data_ptr() not in written]
    return [*(graph.tensors[value.id] for value in stored), *others]


def _known(prepared: Prepared) -> dict[str, Known]:
    """What a feed may name: the call's tensors, the rates, and stored values."""
    graph = prepared.graph
    values = [graph.values[value_id] for value_id in prepared.call_inputs]
    rates = [graph.values[value_id] for value_id in prepared.rate_inputs]
    names = [*prepared.names, *(value.name for value in rates)]
    inputs = {
        name: Known("input", value.shape, value.dtype)
        for name, value in zip(names, (*values, *rates), strict=True)
    }
    stored = {
        name: Known(value.role, value.shape, value.dtype)
        for value in graph.stored()
        for name in value.names
    }
    return {**stored, **inputs}


def _empty(value: IRValue, device: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=torch_dtype(value.dtype), device=device)
