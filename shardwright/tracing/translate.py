"""From an exported program to an IRGraph, in one pass over its nodes.

Comes in: the calls of a flat model: a graph of ATen calls that may write in place,
and what `origins` noted of each call. Goes out: nodes in a `Builder`. What always holds: what was
emitted is functional and flat, with casts where the program ran under autocast. Each node of the
program is handled by one rule:

    getitem                      picks a result
    a Function's backward        becomes part of one call (`functions`)
    a mark                       becomes a marker, where the program is a step (`markers`)
    a change of settings         is left out; what it changes is noted on each call
    an operator that writes      becomes its functional form, and a write in `memory` (`writes`)
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

from shardwright.errors import GraphError
from shardwright.ir.operators import allow_namespace, operator_name, split_call
from shardwright.ir.overloads import BY_STRIDES
from shardwright.ir.values import SLOT, Input, with_absent
from shardwright.torch_internals import (
    AUTOCAST_SWITCHES,
    SET_GRAD_ENABLED,
    OpOverload,
    operator_of,
    schema_of,
)
from shardwright.tracing.casts import Casts
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.functions import BEGIN, END, Backwards
from shardwright.tracing.held import TranslatedNodes, is_node, listed
from shardwright.tracing.marks import MARK
from shardwright.tracing.memory import ProgramMemory, TensorView
from shardwright.tracing.origins import Note, Scopes, note_of
from shardwright.tracing.views import ViewCall, same_geometry
from shardwright.tracing.writes import NORMS, Writes

Translated = Callable[[int, list[TensorView], Sequence[torch.Tensor]], list[TensorView]]
"""From a mark's number, the places it reads and what it makes to the places of that."""


class Translator:
    """Walks a program and emits its nodes.

    ``scopes`` names the program's modules. Where the program is a step of training it
    ``updates_parameters``, and ``marked`` translates its marks.
    """

    def __init__(
        self,
        emitter: GraphEmitter,
        scopes: Scopes | None = None,
        *,
        updates_parameters: bool = False,
    ) -> None:
        self.marked: Translated | None = None
        self.memory = ProgramMemory(emitter, updates_parameters=updates_parameters)
        self._emitter = emitter
        self._held = TranslatedNodes(self.memory)
        self._writes = Writes(emitter, self.memory, self._held)
        self.backwards = Backwards(emitter, self.memory)
        self._casts = Casts(emitter)
        self._scopes = scopes
        self._note = Note()

    def walk(
        self,
        graph: torch.fx.Graph,
        arguments: Sequence[TensorView],
        constant: Callable[[str], TensorView] | None = None,
    ) -> Any:
        """Translate ``graph`` on what ``arguments`` stand for; returns what its output stands for.

        ``constant`` gives what its other tensors stand for. Raises CaptureError.
        """
        given = iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                self._held[node] = next(given)
            elif node.op == "get_attr" and constant is not None:
                self._held[node] = constant(str(node.target))
            elif node.op == "call_function" and not self.backwards.passes_by(node):
                self._enter(node)
                with self.backwards.trying():
                    self._held[node] = self._call(node)
        return self._held.standing_for(graph.output_node().args[0])

    def _enter(self, node: torch.fx.Node) -> None:
        """Let what is emitted next belong to ``node``."""
        self._note = note_of(node) or self._note
        self._emitter.scopes = self._scopes.of(self._note) if self._scopes else ()
        self._emitter.source = self._note.source
        self._emitter.records = self._note.records
        if not self._note.autocast:
            self._casts.leave()

    def _call(self, node: torch.fx.Node) -> Any:
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            return self._held.standing_for(source)[index]
        if target in _SETTINGS:
            return None
        if not isinstance(target, OpOverload):
            raise self._emitter.refuse(_advice_for_function(target))
        try:
            return self._operator(target, node)
        except GraphError as error:
            raise self._emitter.refuse(f"{target.name()} cannot be in a graph: {error}") from error

    def _operator(self, overload: OpOverload, node: torch.fx.Node) -> Any:
        if overload in _DROPPED or overload.namespace == "profiler":
            return None
        specs = self._specs(node)
        tensors = [spec for spec in specs if spec is not None]
        if overload is MARK and self.marked is not None:
            number, reads, _ = self._held.standing_for(node.args)
            return self.marked(number, reads, tensors)
        if overload is BEGIN:
            return self.backwards.begin(tensors)
        if overload is END:
            return self.backwards.end(node, self._held.standing_for)
        if overload.namespace != "aten":
            allow_namespace(overload.namespace)
        if schema_of(overload).is_mutable:
            return self._writes.translate(overload, node, tensors)
        inputs, attrs = split_call(overload, node.args, node.kwargs, is_tensor=is_node)
        self._check_attributes(overload, attrs)
        places = self._held.standing_for(inputs)
        if operator_of(overload) == "lift_fresh_copy":
            return self.memory.copy(tensors[0], self.memory.read(places[0]))
        if self._does_nothing(overload, tensors, places, attrs):
            call = ViewCall(operator_of(overload), attrs, places[0].spec, tuple(tensors))
            return self.memory.view(places[0], self.memory.read(places[0]), call)
        norm = NORMS.get(overload)
        if norm is not None and norm.writes(attrs):
            made = norm.emit(self._emitter, self.memory, places, attrs)
            return self.memory.root(tensors[0], made)
        return self._stay(overload, places, attrs, node, specs)

    def _does_nothing(
        self,
        overload: OpOverload,
        specs: Sequence[torch.Tensor],
        places: list[TensorView],
        attrs: dict[str, Any],
    ) -> bool:
        """Whether the result is the first input."""
        rule = _DOES_NOTHING.get(operator_of(overload)) if overload.namespace == "aten" else None
        if rule is None or not rule(attrs):
            return False
        if operator_of(overload) == "dropout":  # its fake result is a copy, its real one the input
            self.memory.join(specs[0], places[0])
            return True
        shared = self.memory.parent_of(specs[0], places[:1]) is not None
        return shared and same_geometry(specs[0], places[0].spec)

    def _stay(
        self,
        overload: OpOverload,
        places: list[TensorView],
        attrs: dict[str, Any],
        node: torch.fx.Node,
        specs: Sequence[torch.Tensor | None],
    ) -> Any:
        """Emit the operator as it is; a result that shares memory with an input is its view."""
        present = tuple(spec for spec in specs if spec is not None)
        if operator_name(overload) in BY_STRIDES:
            places, attrs = _from_first_element(overload, places, attrs)
        values = [self.memory.read(place) for place in places]
        if self._note.autocast:
            values = self._casts.of(overload, places, values, attrs, self._note.autocast)
        made = self._emitter.emit(overload, values, attrs, outputs=specs, name=node.name)
        results = []
        for number, (spec, value) in enumerate(zip(present, made, strict=True)):
            parent = self.memory.parent_of(spec, places)
            if parent is None:
                results.append(self.memory.root(spec, value))
            else:
                call = ViewCall(operator_of(overload), attrs, parent.spec, present, number)
                results.append(self.memory.view(parent, value, call))
        if isinstance(node.meta.get("val"), torch.Tensor):
            return results[0]
        return with_absent(results, [i for i, spec in enumerate(specs) if spec is None])

    # --- what a graph cannot hold -----------------------------------------------------------

    def _specs(self, node: torch.fx.Node) -> list[torch.Tensor | None]:
        """Export's fake results of a node, None where no tensor is among several results.

        Refuses what depends on contents.
        """
        made = node.meta.get("val")
        specs = [] if made is None else listed(made)
        tensors = [spec for spec in specs if isinstance(spec, torch.Tensor)]
        others = [spec for spec in specs if not isinstance(spec, torch.Tensor)]
        if (
            any(type(size) is not int for tensor in tensors for size in tensor.shape)
            or any(item is not None and type(item) is not int for item in others)
            or (specs and not tensors)
        ):
            raise self._emitter.refuse(_DEPENDS_ON_CONTENTS)
        return [spec if isinstance(spec, torch.Tensor) else None for spec in specs]

    def _check_attributes(self, overload: OpOverload, attrs: dict[str, Any]) -> None:
        unknown = [name for name, value in attrs.items() if not _is_attribute(value)]
        if unknown:
            raise self._emitter.refuse(
                f"{overload.name()} takes {', '.join(unknown)} from outside of the graph, which "
                "holds tensors, numbers and strings only"
            )


_DEPENDS_ON_CONTENTS = (
    "a number or a size depends on the contents of a tensor, and a graph's are fixed: keep it a "
    "tensor, use masks or torch.where, or compute it before the call and pass it as an argument"
)
_SETTINGS = frozenset(
    {
        SET_GRAD_ENABLED,
        *AUTOCAST_SWITCHES,
    }
)
"""Changes of settings, which each call's note has anyway."""
_DROPPED = frozenset(
    {torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default}
)


def _from_first_element(
    overload: OpOverload, places: list[TensorView], attrs: dict[str, Any]
) -> tuple[list[TensorView], dict[str, Any]]:
    """A call that counts in memory: of the whole memory where it reads, and from its beginning."""
    first, *others = places
    given = attrs["storage_offset"]
    offset = first.spec.storage_offset() if given is None else given
    if operator_of(overload) != "as_strided_scatter":  # its result is as the view that it writes to
        first = first.root
    counted = offset - first.spec.storage_offset()
    said = given if given is None and counted == 0 else counted
    return [first, *others], {**attrs, "storage_offset": said}


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
"""ATen operators that return their input where their attributes say so, on every device."""

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
