"""From marks to markers: the nodes of a graph that stand for a step of training.

Comes in: a mark of the exported program, its record, and the places it reads. Goes out: a marker
node (`BackwardMark`, `zero_grad`, `clip_grad_norm`, `adamw_step`, …) with what it makes. What
always holds: parameters, gradients and state are values that never change; each marker makes new
ones, and from then on the program reads those.

    Backward         loss, [gradient]              -> a gradient a parameter
    zero_grad        nothing                       -> nothing
    clip_grad_norm   gradients                     -> the total norm, then clipped gradients
    clip_grad_value  gradients                     -> clipped gradients
    *_step           lr, parameters, gradients,    -> parameters, then each list of state
                     then each list of state
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwright.ir.tensor_meta import dtype_name, torch_dtype
from shardwright.ir.values import IRValue
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.marks import BackwardMark, Clip, Own, Record, UpdateMark, ZeroGrad
from shardwright.tracing.memory import ProgramMemory, TensorView
from shardwright.tracing.optimizers import OptimizerGroup


class RateInput(NamedTuple):
    """The learning rate of a group, as an input of the graph."""

    input: str
    group: OptimizerGroup
    value: IRValue


class Markers:
    """Emits markers.

    ``originals`` are the program's parameters by name, and ``carried`` those whose gradient is
    left for the next step to add to, though there was none before this one.
    ``rates`` are the learning rates read, in the order of first use, and ``gradients`` the states
    in which carried gradients begin.
    """

    def __init__(
        self,
        emitter: GraphEmitter,
        memory: ProgramMemory,
        records: Sequence[Record],
        originals: Mapping[str, torch.Tensor],
        carried: Collection[str],
    ) -> None:
        self.rates: list[RateInput] = []
        self.gradients: dict[str, IRValue] = {}
        self._emitter = emitter
        self._memory = memory
        self._records = records
        self._originals = originals
        self._carried = set(carried)
        self._state: dict[tuple[int, str, str], tuple[IRValue, IRValue]] = {}
        self._zeros: set[int] = set()

    def translate(
        self, number: int, reads: list[TensorView], specs: Sequence[torch.Tensor]
    ) -> list[TensorView]:
        """Emit the marker of a mark; gives the places of the tensors that the mark made."""
        record = self._records[number]
        rule = _RULES[type(record)]
        return rule(self, record, reads, specs)

    def updates(self) -> dict[int, int]:
        """State of optimizers to what replaces it."""
        return {old.id: new.id for old, new in self._state.values()}

    # --- the rules --------------------------------------------------------------------------

    def _backward(
        self, record: BackwardMark, reads: list[TensorView], specs: Sequence[torch.Tensor]
    ) -> list[TensorView]:
        count = 1 + record.has_gradient
        given, old = reads[:count], dict(zip(record.existing, reads[count:], strict=True))
        self._memory.differentiated = True
        before = {name: self._existing(name, old.get(name)) for name in record.parameters}
        made = self._marker(
            "Backward",
            [self._memory.read(place) for place in given],
            {
                "parameters": list(record.parameters),
                "accumulate": any(value is not None for value in before.values()),
            },
            [self._like(f"grad.{name}", self._originals[name]) for name in record.parameters],
        )
        new: list[IRValue] = []
        for name, value in zip(record.parameters, made, strict=True):
            earlier = before[name]
            if earlier is not None:
                value = self._emitter.one("aten.add.Tensor", earlier, value)
            if name in old:
                self._memory.write(old[name], value)
            else:
                new.append(value)
        return [self._memory.root(spec, value) for spec, value in zip(specs, new, strict=True)]

    def _existing(self, name: str, place: TensorView | None) -> IRValue | None:
        """What a new gradient is added to; None where that is nothing, or zeros."""
        if place is not None:
            value = self._memory.read(place)
            return None if value.id in self._zeros else value
        if name in self._carried:
            self._carried.remove(name)
            spec = torch.empty_like(self._originals[name], device="meta", requires_grad=False)
            self.gradients[name] = self._emitter.builder.zeros("state", f"grad.{name}", spec)
            return self.gradients[name]
        return None

    def _zero_grad(
        self, record: ZeroGrad, reads: list[TensorView], specs: Sequence[torch.Tensor]
    ) -> list[TensorView]:
        attrs = {"parameters": list(record.parameters), "set_to_none": record.set_to_none}
        self._marker("zero_grad", [], attrs, [])
        for place in reads:
            zeros = self.zeros_like(place.value)
            self._zeros.add(zeros.id)
            self._memory.write(place, zeros)
        return []

    def _clip(
        self, record: Clip, reads: list[TensorView], specs: Sequence[torch.Tensor]
    ) -> list[TensorView]:
        values = [self._memory.read(place) for place in reads]
        made = [self._like("total_norm", spec) for spec in specs]
        made += [
            self._same(value, f"grad.{name}")
            for value, name in zip(values, record.parameters, strict=True)
        ]
        made = self._marker(record.op, values, record.attrs, made)
        for place, value in zip(reads, made[len(specs) :], strict=True):
            self._memory.write(place, value)
        return [self._memory.root(spec, value) for spec, value in zip(specs, made, strict=False)]

    def _update(
        self, record: UpdateMark, reads: list[TensorView], specs: Sequence[torch.Tensor]
    ) -> list[TensorView]:
        group, names = record.group, record.parameters
        parameters = reads[: len(names)]
        values = [self._memory.read(place) for place in reads]
        keys = [(id(group.optimizer), name, key) for key in group.state_names for name in names]
        state = [self._state_of(group, name, key) for key in group.state_names for name in names]
        made = self._marker(
            group.op,
            [self._rate(group), *values, *state],
            {"parameters": list(names), **group.attrs},
            [self._same(value, f"new.{value.name}") for value in (*values[: len(names)], *state)],
        )
        for place, value in zip(parameters, made[: len(names)], strict=True):
            self._memory.replace(place, value)
        for where, value in zip(keys, made[len(names) :], strict=True):
            self._state[where] = (self._state[where][0], value)
        return []

    def _own(
        self, record: Own, reads: list[TensorView], specs: Sequence[torch.Tensor]
    ) -> list[TensorView]:
        made = self._marker(
            record.op,
            [self._memory.read(place) for place in reads],
            record.attrs,
            [self._like(name, spec) for name, spec in zip(record.names, specs, strict=True)],
        )
        return [self._memory.root(spec, value) for spec, value in zip(specs, made, strict=True)]

    # --- what they read ---------------------------------------------------------------------

    def _rate(self, group: OptimizerGroup) -> IRValue:
        """The input with the learning rate of a group."""
        for rate in self.rates:
            if rate.group is group:
                return rate.value
        name = f"lr_{len(self.rates)}" if self.rates else "lr"
        value = self._emitter.builder.input(name, (), "f64")
        self.rates.append(RateInput(name, group, value))
        return value

    def _state_of(self, group: OptimizerGroup, name: str, key: str) -> IRValue:
        """The optimizer's state of a parameter at this point, begun where it is read first."""
        where = (id(group.optimizer), name, key)
        if where not in self._state:
            parameter = self._originals[name]
            label = f"optimizer.{name}.{key}"
            contents = group.state_of(parameter, key)
            if contents is not None:
                value = self._emitter.builder.state(label, contents)
            else:
                empty = group.empty_state(parameter, key)
                value = self._emitter.builder.zeros("state", label, empty)
            self._state[where] = (value, value)
        return self._state[where][1]

    # --- what they make ---------------------------------------------------------------------

    def _marker(
        self, op: str, inputs: Sequence[IRValue], attrs: dict[str, Any], outputs: list[IRValue]
    ) -> list[IRValue]:
        self._emitter.builder.emit(
            op,
            inputs,
            attrs,
            outputs=outputs,
            scopes=self._emitter.scopes,
            source=self._emitter.source,
        )
        return outputs

    def _like(self, name: str, tensor: torch.Tensor) -> IRValue:
        """A value to be made, of a tensor's kind."""
        return self._emitter.builder.value(
            name, tensor.shape, dtype_name(tensor.dtype), strides=tensor.stride()
        )

    def _same(self, value: IRValue, name: str) -> IRValue:
        """A value to be made, of another value's kind."""
        return self._emitter.builder.value(
            name, value.shape, value.dtype, strides=value.strides, device=value.device
        )

    def zeros_like(self, value: IRValue) -> IRValue:
        """Zeros of a value's shape and dtype."""
        return self._emitter.one(
            "aten.zeros.default", list(value.shape), dtype=torch_dtype(value.dtype)
        )


_RULES: dict[type, Callable[..., list[TensorView]]] = {
    BackwardMark: Markers._backward,
    ZeroGrad: Markers._zero_grad,
    Clip: Markers._clip,
    UpdateMark: Markers._update,
    Own: Markers._own,
}
