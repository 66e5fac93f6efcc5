"""From an exported program to an IRGraph, in one pass over its nodes.

Comes in: what torch.export made of a flat model: a graph of ATen calls that may write in place,
with regions as higher-order operators, and what `origins` noted of each call. Goes out: nodes in
a `Builder`. What always holds: what was emitted is functional and flat, with casts where the
program ran under autocast. Each node of the program is handled by one rule:

    getitem                      picks a result
    a region                     is walked in place
    an operator that writes      becomes its functional form, and a write in `memory`
    one that writes in secret    likewise, by name: the running statistics of norms (`norms`)
    one that does nothing        stands for its input (`_DOES_NOTHING`)
    any other                    stays; its result is a view where it shares memory with an input
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload

from shardwright.errors import GraphError
from shardwright.ir.operators import allow_namespace, split_call
from shardwright.ir.values import SLOT, Input, IRValue
from shardwright.tracing.autocast import autocast_casts, has_autocast_rule
from shardwright.tracing.emitter import Emitter
from shardwright.tracing.functional_forms import FunctionalForm, functional_form
from shardwright.tracing.memory import Memory, Place
from shardwright.tracing.norms import NORMS
from shardwright.tracing.origins import Note, Scopes, note_of
from shardwright.tracing.views import ViewCall, same_geometry


class Translator:
    """Walks a program; ``held`` is what each fx node stands for.

    A `Place` stands for a tensor, a list for several, a GraphModule for the body of a region.
    """

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.memory = Memory(emitter)
        self.scopes = Scopes()
        self.held: dict[torch.fx.Node, Any] = {}
        self.note = Note()
        self._casts: dict[tuple[int, torch.dtype, bool], IRValue] = {}

    def walk(self, body: torch.fx.GraphModule, arguments: Sequence[Any]) -> Any:
        """Translate ``body`` on what ``arguments`` stand for; returns what its output stands for.

        Raises CaptureError.
        """
        given = iter(arguments)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                self.held[node] = next(given)
            elif node.op == "get_attr":
                self.held[node] = getattr(body, str(node.target))
            elif node.op == "call_function":
                self._enter(node)
                self.held[node] = self._call(node)
        return self._standing_for(body.graph.output_node().args[0])

    def _enter(self, node: torch.fx.Node) -> None:
        """Let what is emitted next belong to ``node``."""
        self.note = note_of(node) or self.note
        self.emitter.scopes = self.scopes.of(node)
        self.emitter.source = self.note.source
        self.emitter.records = self.note.records
        if not self.note.autocast:
            self._casts.clear()

    def _call(self, node: torch.fx.Node) -> Any:
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            return self._standing_for(source)[index]
        if isinstance(target, HigherOrderOperator):
            return self._region(target.name(), node)
        if not isinstance(target, OpOverload):
            raise self.emitter.refuse(_advice_for_function(target))
        try:
            return self._operator(target, node)
        except GraphError as error:
            raise self.emitter.refuse(f"{target.name()} cannot be in a graph: {error}") from error

    def _region(self, name: str, node: torch.fx.Node) -> Any:
        """Walk a region in place; its settings stand on its nodes."""
        if name not in _REGIONS:
            raise self.emitter.refuse(
                f"torch.{name} runs a function under control of a tensor, and a graph has one "
                "path: compute every side and choose with torch.where, or write the loop out"
            )
        body, *operands = node.args[_REGIONS[name] :]
        return self.walk(self._standing_for(body), self._standing_for(operands))

    # --- operators --------------------------------------------------------------------------

    def _operator(self, overload: OpOverload, node: torch.fx.Node) -> Any:
        specs = self._specs(node)
        if overload in _DROPPED or overload.namespace == "profiler":
            return None
        if overload.namespace != "aten":
            allow_namespace(overload.namespace)
        if overload._schema.is_mutable:
            return self._write(overload, node, specs)
        inputs, attrs = split_call(overload, node.args, node.kwargs, is_tensor=_is_node)
        self._check_attributes(overload, attrs)
        places = [self._standing_for(item) for item in inputs]
        if overload._opname == "lift_fresh_copy":
            return self.memory.copy(specs[0], self.memory.read(places[0]))
        if (same := self._same(overload, specs, places, attrs)) is not None:
            return same
        norm = NORMS.get(overload)
        if norm is not None and norm.writes(attrs):
            result = norm.emit(
                self.emitter, self.memory, [*map(self.memory.read, places)], places, attrs
            )
            return self.memory.root(specs[0], result)
        return self._stay(overload, places, attrs, node, specs)

    def _stay(
        self,
        overload: OpOverload,
        places: list[Place],
        attrs: dict[str, Any],
        node: torch.fx.Node,
        specs: Sequence[torch.Tensor],
    ) -> Any:
        """Emit the operator as it is."""
        values = [self.memory.read(place) for place in places]
        if self.note.autocast:
            values = self._cast(overload, places, values, attrs)
        if overload._opname == "as_strided":
            places = [_root(place) for place in places]
            values = [self.memory.read(place) for place in places]
        made = self.emitter.emit(overload, values, attrs, outputs=specs, name=node.name)
        call = ViewCall(overload._opname, attrs, specs[0], tuple(specs)) if specs else None
        results = [
            self._result(places, value, spec, call and call._replace(number=number))
            for number, (spec, value) in enumerate(zip(specs, made, strict=True))
        ]
        several = not isinstance(node.meta.get("val"), torch.Tensor)
        return results if several else results[0]

    def _result(
        self, places: list[Place], value: IRValue, spec: torch.Tensor, call: ViewCall | None
    ) -> Place:
        """The place of a result: a view of an input whose memory it shares, or a root."""
        parent = self.memory.parent_of(spec, places)
        if parent is None or call is None:
            return self.memory.root(spec, value)
        call = call._replace(whole=parent.spec)
        cut = not self.emitter.records and self.emitter.flows(parent.value)
        return self.memory.view(parent, value, call, detached=cut)

    def _same(
        self,
        overload: OpOverload,
        specs: Sequence[torch.Tensor],
        places: list[Place],
        attrs: dict[str, Any],
    ) -> Place | None:
        """The place of a result that is its input, where the operator does nothing."""
        does_nothing = _DOES_NOTHING.get(overload._opname)
        if does_nothing is None or not does_nothing(attrs):
            return None
        place = places[0]
        if overload._opname == "dropout":  # its fake result is a copy, its real one the input
            self.memory.join(specs[0], place)
        elif not (
            self.memory.parent_of(specs[0], places[:1]) and same_geometry(specs[0], place.spec)
        ):
            return None
        value = self.memory.read(place)
        call = ViewCall(overload._opname, attrs, place.spec, tuple(specs))
        detached = self._detaches(overload, value)
        return self.memory.view(place, value, call, detached=detached)

    def _detaches(self, overload: OpOverload, value: IRValue) -> bool:
        """Whether a view that an operator makes of ``value`` cuts the gradient off."""
        cuts = not self.emitter.records or overload._opname == "detach"
        return cuts and self.emitter.flows(value)

    def _cast(
        self,
        overload: OpOverload,
        places: list[Place],
        values: list[IRValue],
        attrs: dict[str, Any],
    ) -> list[IRValue]:
        """The values as autocast would hand them to the operator."""
        specs = [place.spec for place in places]
        for device_type, dtype in self.note.autocast:
            if any(spec.device.type == device_type for spec in specs):
                casts = autocast_casts(overload, specs, attrs, device_type, dtype)
                own_rule = has_autocast_rule(overload, device_type)
                values = [
                    self._cast_once(value, cast, shared=own_rule and place.storage.owner != "tmp")
                    if cast
                    else value
                    for place, value, cast in zip(places, values, casts, strict=True)
                ]
        return values

    def _cast_once(self, value: IRValue, dtype: torch.dtype, *, shared: bool) -> IRValue:
        """A cast, made once where that changes no gradient, or where it is ``shared``.

        Autocast itself shares the casts of parameters and inputs in a region, so that their
        gradients are added up before the cast's backward, and no others.
        """
        if self.emitter.is_differentiable(value) and not shared:
            return self.emitter.cast(value, dtype)
        key = (value.id, dtype, self.emitter.records)
        if key not in self._casts:
            self._casts[key] = self.emitter.cast(value, dtype)
        return self._casts[key]

    # --- operators that write ---------------------------------------------------------------

    def _write(
        self, overload: OpOverload, node: torch.fx.Node, specs: Sequence[torch.Tensor]
    ) -> Any:
        form = functional_form(overload)
        if form is None or overload._opname in _CHANGES_STORAGE:
            raise self.emitter.refuse(
                f"{overload.name()} writes in place in a way that has no functional form; write "
                "it with operators that return a new tensor"
            )
        arguments = _named_arguments(overload, node)
        if torch.Tag.inplace_view in overload.tags:
            return self._view_in_place(form, arguments, specs[0])
        targets = [
            self._standing_for(item)
            for name in form.writes
            for item in _listed(arguments[name])
            if item is not None
        ]
        results = self._new_contents(overload, form, arguments, targets)
        for target, value in zip(targets, results[len(results) - len(targets) :], strict=True):
            self._store(target, value)
        return self._returned(overload, node, targets, specs, results)

    def _view_in_place(
        self, form: FunctionalForm, arguments: dict[str, Any], spec: torch.Tensor
    ) -> Place:
        """``x.squeeze_()``: from here on the program's tensor is a view of what it was."""
        named = {to: arguments[name] for to, name in form.reads}
        inputs, attrs = split_call(form.overload, (), named, is_tensor=_is_node)
        place: Place = self._standing_for(inputs[0])
        value = self.memory.read(place)
        if form.overload._opname != "detach":
            (value,) = self.emitter.emit(form.overload, [value], attrs, outputs=[spec])
        call = ViewCall(form.overload._opname, attrs, place.spec, (spec,))
        return self.memory.view(place, value, call, detached=self._detaches(form.overload, value))

    def _new_contents(
        self,
        overload: OpOverload,
        form: FunctionalForm,
        arguments: dict[str, Any],
        targets: list[Place],
    ) -> list[IRValue]:
        """What the functional form returns; the new contents are the last of it."""
        values = {to: self._value_of(arguments[name]) for to, name in form.reads}
        if overload is torch.ops.aten.copy_.default:
            return [self._copied(targets[0], values["src"])]
        if form.takes_dtype:
            values["dtype"] = targets[0].spec.dtype
        return self.emitter.call(form.overload, **values)

    def _copied(self, target: Place, source: IRValue) -> IRValue:
        """``source`` with the dtype and the shape of ``target``."""
        value = self.emitter.cast(source, target.spec.dtype)
        shape = tuple(target.spec.shape)
        if value.shape != shape:
            value = self.emitter.one("aten.expand.default", value, list(shape))
        return value

    def _store(self, target: Place, value: IRValue) -> None:
        if value.shape != tuple(target.spec.shape):
            raise self.emitter.refuse(
                f"the result {list(value.shape)} is written to a tensor of shape "
                f"{list(target.spec.shape)}, which would be resized; give out= the right shape"
            )
        value = self.emitter.cast(value, target.spec.dtype)
        self.memory.write(target, value)

    def _returned(
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
        if any(item.alias_info is not None for item in overload._schema.returns):
            places = targets
        else:
            places = [self.memory.root(spec, v) for spec, v in zip(specs, results, strict=False)]
        return places[0] if isinstance(node.meta.get("val"), torch.Tensor) else places

    # --- arguments --------------------------------------------------------------------------

    def _standing_for(self, argument: Any) -> Any:
        """An fx argument with every node replaced by what it stands for."""
        if isinstance(argument, torch.fx.Node):
            return self.held[argument]
        if isinstance(argument, (list, tuple)):
            return [self._standing_for(item) for item in argument]
        return argument

    def _value_of(self, argument: Any) -> Any:
        """An fx argument with every node replaced by its value at this point."""
        if isinstance(argument, torch.fx.Node):
            return self.memory.read(self.held[argument])
        if isinstance(argument, (list, tuple)):
            return [self._value_of(item) for item in argument]
        return argument

    def _specs(self, node: torch.fx.Node) -> list[torch.Tensor]:
        """Export's fake results of a node; refuses what depends on contents."""
        specs = [item for item in _listed(node.meta.get("val")) if item is not None]
        for spec in specs:
            if not isinstance(spec, torch.Tensor) or any(type(n) is not int for n in spec.shape):
                raise self.emitter.refuse(_DEPENDS_ON_CONTENTS)
        return specs

    def _check_attributes(self, overload: OpOverload, attrs: dict[str, Any]) -> None:
        unknown = [name for name, value in attrs.items() if not _is_attribute(value)]
        if unknown or (overload._overloadname == "generator" and not attrs.get("generator", 0)):
            raise self.emitter.refuse(
                f"{overload.name()} takes {', '.join(unknown) or 'a generator'} from outside of "
                "the graph; use the default generator and torch.manual_seed"
            )


_DEPENDS_ON_CONTENTS = (
    "a number or a size depends on the contents of a tensor, and a graph's are fixed: keep it a "
    "tensor, use masks or torch.where, or compute it before the call and pass it as an argument"
)
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""Regions that only change settings, and how many arguments stand before their body."""
_DROPPED = frozenset(
    {torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default}
)
_CHANGES_STORAGE = frozenset({"resize_", "resize_as_", "set_", "set_data"})


def _keeps_layout(attrs: dict[str, Any]) -> bool:
    return attrs.get("memory_format") in (None, torch.preserve_format)


def _drops_nothing(attrs: dict[str, Any]) -> bool:
    return not attrs["train"] or attrs["p"] == 0


def _always(attrs: dict[str, Any]) -> bool:
    return True


_DOES_NOTHING: dict[str, Callable[[dict[str, Any]], bool]] = {
    "to": _keeps_layout,
    "alias": _always,
    "detach": _always,
    "lift": _always,
    "lift_fresh": _always,
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), _drops_nothing
    ),
}
"""Operators that return their input where their attributes say so, on every device."""

_PLAIN_TYPES = (type(None), bool, int, float, complex, str, type(SLOT), Input)
_TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format)


def _is_attribute(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_attribute(item) for item in value)
    return isinstance(value, (*_PLAIN_TYPES, *_TORCH_TYPES))


def _advice_for_function(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    if "vmap" in name or "batch_dim" in name or "lazy_load" in name:
        return "torch.vmap cannot be in a graph; write the batch dimension out"
    return f"{name}: {_DEPENDS_ON_CONTENTS}"


def _is_node(item: Any) -> bool:
    return isinstance(item, torch.fx.Node)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _named_arguments(overload: OpOverload, node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in."""
    schema = overload._schema.arguments
    given = dict(zip((item.name for item in schema), node.args, strict=False)) | node.kwargs
    return {item.name: given.get(item.name, item.default_value) for item in schema}


def _root(place: Place) -> Place:
    while place.parent is not None:
        place = place.parent
    return place
