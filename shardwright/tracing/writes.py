"""Operators that write: their functional forms, and what they write in `memory`.

Comes in: a call of an overload whose schema says that it writes. Goes out: nodes without writes,
and what the call stands for. What always holds: a tensor keeps its shape, dtype and strides when
it is written to; only operators that are views in place (``x.squeeze_()``) change a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from shardwright.ir.operators import split_call
from shardwright.ir.values import IRValue
from shardwright.torch_internals import OpOverload, operator_of, schema_of
from shardwright.tracing.emitter import Emitter
from shardwright.tracing.functional_forms import FunctionalForm, functional_form
from shardwright.tracing.held import Held, is_node, listed
from shardwright.tracing.memory import Memory, Place
from shardwright.tracing.views import ViewCall

_CHANGES_STORAGE = frozenset({"resize_", "resize_as_", "set_", "set_data"})


class Writes:
    """Translates the calls that write."""

    def __init__(self, emitter: Emitter, memory: Memory, held: Held) -> None:
        self._emitter = emitter
        self._memory = memory
        self._held = held

    def translate(
        self, overload: OpOverload, node: torch.fx.Node, specs: Sequence[torch.Tensor]
    ) -> Any:
        """Emit the call ``node`` of ``overload``; returns what it stands for.

        ``specs`` are its fake results. Raises CaptureError.
        """
        form = functional_form(overload)
        if form is None or operator_of(overload) in _CHANGES_STORAGE:
            raise self._emitter.refuse(
                f"{overload.name()} writes in place in a way that has no functional form; write "
                "it with operators that return a new tensor"
            )
        arguments = _named_arguments(overload, node)
        if torch.Tag.inplace_view in overload.tags:
            return self._view_in_place(form, arguments, specs[0])
        targets = [
            self._held.standing_for(item)
            for name in form.writes
            for item in listed(arguments[name])
            if item is not None
        ]
        results = self._results(overload, form, arguments, targets)
        for target, value in zip(targets, results[len(results) - len(targets) :], strict=True):
            self._store(target, value)
        return self._standing(overload, node, targets, specs, results)

    def _view_in_place(
        self, form: FunctionalForm, arguments: dict[str, Any], spec: torch.Tensor
    ) -> Place:
        """``x.squeeze_()``: from here on the program's tensor is a view of what it was."""
        named = {to: arguments[name] for to, name in form.reads}
        inputs, attrs = split_call(form.overload, (), named, is_tensor=is_node)
        place: Place = self._held.standing_for(inputs[0])
        value = self._memory.read(place)
        if operator_of(form.overload) != "detach":
            (value,) = self._emitter.emit(form.overload, [value], attrs, outputs=[spec])
        return self._memory.view(
            place, value, ViewCall(operator_of(form.overload), attrs, place.spec, (spec,))
        )

    def _results(
        self,
        overload: OpOverload,
        form: FunctionalForm,
        arguments: dict[str, Any],
        targets: list[Place],
    ) -> list[IRValue]:
        """What the functional form returns; the new contents of ``targets`` come last."""
        values = {to: self._held.value_of(arguments[name]) for to, name in form.reads}
        if overload is torch.ops.aten.copy_.default:
            return [self._copied(targets[0], values["src"])]
        if form.takes_dtype:
            values["dtype"] = targets[0].spec.dtype
        return self._emitter.call(form.overload, **values)

    def _copied(self, target: Place, source: IRValue) -> IRValue:
        """``source`` with the dtype and the shape of ``target``."""
        value = self._emitter.cast(source, target.spec.dtype)
        shape = tuple(target.spec.shape)
        if value.shape != shape:
            value = self._emitter.one("aten.expand.default", value, list(shape))
        return value

    def _store(self, target: Place, value: IRValue) -> None:
        if value.shape != tuple(target.spec.shape):
            raise self._emitter.refuse(
                f"the result {list(value.shape)} is written to a tensor of shape "
                f"{list(target.spec.shape)}, which would be resized; give out= the right shape"
            )
        self._memory.write(target, self._emitter.cast(value, target.spec.dtype))

    def _standing(
        self,
        overload: OpOverload,
        node: torch.fx.Node,
        targets: list[Place],
        specs: Sequence[torch.Tensor],
        results: list[IRValue],
    ) -> Any:
        """What the call stands for: the tensors written to, or those made beside them."""
        if not specs:
            return None
        if any(item.alias_info is not None for item in schema_of(overload).returns):
            places = targets
        else:
            places = [self._memory.root(spec, v) for spec, v in zip(specs, results, strict=False)]
        return places[0] if isinstance(node.meta["val"], torch.Tensor) else places


def _named_arguments(overload: OpOverload, node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in."""
    schema = schema_of(overload).arguments
    given = dict(zip((item.name for item in schema), node.args, strict=False)) | node.kwargs
    return {item.name: given.get(item.name, item.default_value) for item in schema}
