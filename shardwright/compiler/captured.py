"""Capture: a program prepared for one set of shapes, and bound.

Where preparing or binding anew fails, the capture is what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.bind import BoundPlan
from shardwright.compiler.guards import Facts, Guard, GuardedParts, is_placed
from shardwright.compiler.replay import FeedSpec, Replaying
from shardwright.compiler.sources import Prepared
from shardwright.ir import IRGraph
from shardwright.ir.structure import rebuild
from shardwright.ir.tensor_meta import torch_dtype

Bind = Callable[[Prepared, Replaying], BoundPlan]


class Capture:
    """One capture of a program: what is prepared for one set of shapes, and bound."""

    def __init__(
        self,
        prepare: Callable[[], Prepared],
        parts: Callable[[], GuardedParts],
        replaying: Replaying,
        bind: Bind,
        device: torch.device,
    ) -> None:
        self._prepare = prepare
        self._parts = parts
        self._replaying = replaying
        self._bind = bind
        self._device = device
        self._signature: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._positional: int | None = None
        self.refresh()

    def refresh(self) -> None:
        """Prepare and bind anew: tensors may be others, and what was made of them with them."""
        facts = Facts(self._parts())
        with self._outside_of_modes():
            prepared = self._prepare()
            parts = self._parts()
            guard = Guard(parts, facts, read_tensors(prepared.graph, self._replaying, parts))
            bound = self._bind(prepared, self._replaying)
        self.prepared, self.bound, self.guard = prepared, bound, guard
        graph, given = prepared.graph, prepared.rate_inputs
        ordered = [*prepared.call_inputs, *given]
        places = [ordered.index(value_id) for value_id in graph.inputs]
        self._places = None if places == sorted(places) else places
        rates = [graph.values[value_id] for value_id in given]
        self.rates = tuple(value.name for value in rates)
        self._rate_tensors = [
            torch.empty(value.shape, dtype=torch_dtype(value.dtype), device=self._device)
            for value in rates
        ]
        self._rate_values: dict[str, float] = {}
        self.feed_specs = _feed_specs(prepared)

    @contextmanager
    def _outside_of_modes(self) -> Iterator[None]:
        """Outside of the modes that a caller may be in, which would be those of later calls."""
        with torch.autocast(self._device.type, enabled=False), torch.inference_mode(False):
            yield

    def remember(self, args: Sequence[Any], tensors: Sequence[Tensor], *, plain: bool) -> None:
        """From now on calls like this one take the fast path, if it is ``plain``."""
        self._signature = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._positional = len(args) if plain else None

    def is_like_last(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is plainly one of this capture's: the same tensors alone, in order."""
        if kwargs or len(args) != self._positional:
            return False
        for given, (shape, dtype, device) in zip(args, self._signature, strict=True):
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
            self.refresh()
        elif not self.guard.has_same_contents():
            versions = self.guard.versions()
            if not self.bound.take_contents():
                with self._outside_of_modes():
                    self.bound = self._bind(self.prepared, self._replaying)
            self.guard.took(versions)

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


def read_tensors(graph: IRGraph, replaying: Replaying, parts: GuardedParts) -> list[Tensor]:
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


def _feed_specs(prepared: Prepared) -> dict[str, FeedSpec]:
    """What a feed may name: the call's tensors, the rates, and stored values."""
    graph = prepared.graph
    values = [graph.values[k] for k in (*prepared.call_inputs, *prepared.rate_inputs)]
    rates = (graph.values[value_id].name for value_id in prepared.rate_inputs)
    named = zip((*prepared.names, *rates), values, strict=True)
    stored = ((name, value) for value in graph.stored() for name in value.names)
    return {
        **{name: FeedSpec(value.role, value.shape, value.dtype) for name, value in stored},
        **{name: FeedSpec("input", value.shape, value.dtype) for name, value in named},
    }
