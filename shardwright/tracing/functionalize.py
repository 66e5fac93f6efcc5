"""Functionalization: from the calls of a program to nodes of a graph, in one pass.

What is emitted is functional and flat, with casts where the program ran under autocast. Each node
of the program is handled by one rule:

    getitem                      picks a result
    a Function's backward        becomes part of one call (`functions`)
    an effect                    becomes a marker, where the program is a step (`effects`)
    a change of settings         is left out; what it changes is noted on each call
    an operator that writes      becomes its functional form, and a write in `memory`
    one that writes in secret    likewise, by name: the running statistics of norms
    one that does nothing        gives its input (`_DOES_NOTHING`)
    any other                    stays; its result is a view where it shares memory with an input

torch's own functionalization knows nothing of gradients that a program records or not, nor of the
lines that an error has to name. It also gives other operators (a view and a copy for a reshape,
statistics of norms that are not updated), and `run_decompositions({})` takes 1.1 to 2.3 times as
long as torch.export itself, where a whole capture takes 0.4 to 0.7 (zoo's gpt2, llama, resnet, t5).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx

from shardwright.errors import GraphError
from shardwright.ir.operators import allow_namespace, operator_name, split_call
from shardwright.ir.overloads import BY_STRIDES
from shardwright.ir.values import IRValue, is_attribute, with_absent
from shardwright.torch_internals import (
    AUTOCAST_SWITCHES,
    SET_GRAD_ENABLED,
    OpOverload,
    operator_of,
    schema_of,
)
from shardwright.tracing.autocast import Casts
from shardwright.tracing.effects import EFFECT
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.functions import BEGIN, END, Backwards
from shardwright.tracing.memory import ProgramMemory, TensorView, ViewCall, same_geometry
from shardwright.tracing.origins import Note, Scopes, note_of

Effects = Callable[[int, list[TensorView], Sequence[torch.Tensor]], list[TensorView]]
"""From an effect's number, the tensors it reads and fakes of what it makes to the latter."""


class Functionalizer:
    """Walks a program and emits its nodes.

    ``scopes`` names the program's modules. Where the program is a step of training it
    ``updates_parameters``, and ``effects`` emits what it does besides computing.
    """

    def __init__(
        self,
        emitter: GraphEmitter,
        scopes: Scopes | None = None,
        *,
        updates_parameters: bool = False,
    ) -> None:
        self.effects: Effects | None = None
        self.memory = ProgramMemory(emitter, updates_parameters=updates_parameters)
        self.backwards = Backwards(emitter, self.memory)
        self._emitter = emitter
        self._casts = Casts(emitter)
        self._scopes = scopes
        self._note = Note()
        self._made: dict[torch.fx.Node, Any] = {}
        """Each node with its result: a `TensorView`, a list where it has several, or None."""

    def walk(
        self,
        graph: torch.fx.Graph,
        arguments: Sequence[TensorView],
        constant: Callable[[str], TensorView] | None = None,
    ) -> Any:
        """Emit ``graph`` on ``arguments``; gives what it returns.

        ``constant`` gives the other tensors that it reads. Raises CaptureError.
        """
        given = iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                self._made[node] = next(given)
            elif node.op == "get_attr" and constant is not None:
                self._made[node] = constant(str(node.target))
            elif node.op == "call_function" and not self.backwards.passes_by(node):
                self._enter(node)
                with self.backwards.trying():
                    self._made[node] = self._call(node)
        return self._result_of(graph.output_node().args[0])

    def _result_of(self, argument: Any) -> Any:
        """An fx argument with every node replaced by its result."""
        if isinstance(argument, torch.fx.Node):
            return self._made[argument]
        if isinstance(argument, (list, tuple)):
            return [self._result_of(item) for item in argument]
        return argument

    def _value_of(self, argument: Any) -> Any:
        """An fx argument with every node replaced by its value at this point."""
        if isinstance(argument, torch.fx.Node):
            return self.memory.read(self._made[argument])
        if isinstance(argument, (list, tuple)):
            return [self._value_of(item) for item in argument]
        return argument

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
            return self._result_of(source)[index]
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
        if overload is EFFECT and self.effects is not None:
            number, reads, _ = self._result_of(node.args)
            return self.effects(number, reads, tensors)
        if overload is BEGIN:
            return self.backwards.begin(tensors)
        if overload is END:
            return self.backwards.end(node, self._result_of)
        if overload.namespace != "aten":
            allow_namespace(overload.namespace)
        if schema_of(overload).is_mutable:
            return self._write(overload, node, tensors)
        inputs, attrs = split_call(overload, node.args, node.kwargs, is_tensor=_is_node)
        self._check_attributes(overload, attrs)
        read = self._result_of(inputs)
        if operator_of(overload) == "lift_fresh_copy":
            return self.memory.copy(tensors[0], self.memory.read(read[0]))
        if self._does_nothing(overload, tensors, read, attrs):
            call = ViewCall(operator_of(overload), attrs, read[0].spec, tuple(tensors))
            return self.memory.view(read[0], self.memory.read(read[0]), call)
        if overload in _NORMS and attrs[_NORMS[overload][0]] and "running_mean" not in attrs:
            made = _NORMS[overload][1](self._emitter, self.memory, read, attrs)
            return self.memory.root(tensors[0], made)
        return self._stay(overload, read, attrs, node, specs)

    def _does_nothing(
        self,
        overload: OpOverload,
        specs: Sequence[torch.Tensor],
        read: list[TensorView],
        attrs: dict[str, Any],
    ) -> bool:
        """Whether the result is the first input."""
        rule = _DOES_NOTHING.get(operator_of(overload)) if overload.namespace == "aten" else None
        if rule is None or not rule(attrs):
            return False
        if operator_of(overload) == "dropout":  # its fake result is a copy, its real one the input
            self.memory.join(specs[0], read[0])
            return True
        shared = self.memory.parent_of(specs[0], read[:1]) is not None
        return shared and same_geometry(specs[0], read[0].spec)

    def _stay(
        self,
        overload: OpOverload,
        read: list[TensorView],
        attrs: dict[str, Any],
        node: torch.fx.Node,
        specs: Sequence[torch.Tensor | None],
    ) -> Any:
        """Emit the operator as it is; a result that shares memory with an input is its view."""
        present = tuple(spec for spec in specs if spec is not None)
        if operator_name(overload) in BY_STRIDES:
            read, attrs = _from_first_element(overload, read, attrs)
        values = [self.memory.read(tensor) for tensor in read]
        if self._note.autocast:
            values = self._casts.of(overload, read, values, attrs, self._note.autocast)
        made = self._emitter.emit(overload, values, attrs, outputs=specs, name=node.name)
        results = []
        for number, (spec, value) in enumerate(zip(present, made, strict=True)):
            parent = self.memory.parent_of(spec, read)
            if parent is None:
                results.append(self.memory.root(spec, value))
            else:
                call = ViewCall(operator_of(overload), attrs, parent.spec, present, number)
                results.append(self.memory.view(parent, value, call))
        if isinstance(node.meta.get("val"), torch.Tensor):
            return results[0]
        return with_absent(results, [i for i, spec in enumerate(specs) if spec is None])

    # --- calls that write -------------------------------------------------------------------
    #
    # A tensor keeps its shape, dtype and strides when it is written to; only operators that are
    # views in place (``x.squeeze_()``) change a shape.

    def _write(
        self, overload: OpOverload, node: torch.fx.Node, specs: Sequence[torch.Tensor]
    ) -> Any:
        """Emit the functional form, and store what it makes; gives the call's results."""
        form = functional_form(overload)
        if form is None or operator_of(overload) in _CHANGES_STORAGE:
            raise self._emitter.refuse(
                f"{overload.name()} writes in place in a way that has no functional form; write "
                "it with operators that return a new tensor"
            )
        schema = schema_of(overload)
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
        arguments = {a.name: given.get(a.name, a.default_value) for a in schema.arguments}
        if torch.Tag.inplace_view in overload.tags:
            return self._view_in_place(form, arguments, specs[0])
        targets: list[TensorView] = [
            self._result_of(item)
            for name in form.writes
            for item in _listed(arguments[name])
            if item is not None
        ]
        results = self._new_contents(overload, form, arguments, targets)
        for target, value in zip(targets, results[len(results) - len(targets) :], strict=True):
            self._store(target, value)
        if not specs:
            return None
        if any(item.alias_info is not None for item in schema.returns):
            made = targets
        else:
            made = [self.memory.root(spec, v) for spec, v in zip(specs, results, strict=False)]
        return made[0] if isinstance(node.meta["val"], torch.Tensor) else made

    def _view_in_place(
        self, form: FunctionalForm, arguments: dict[str, Any], spec: torch.Tensor
    ) -> TensorView:
        """``x.squeeze_()``: from here on the program's tensor is a view of what it was."""
        named = {to: arguments[name] for to, name in form.reads}
        inputs, attrs = split_call(form.overload, (), named, is_tensor=_is_node)
        tensor: TensorView = self._result_of(inputs[0])
        value = self.memory.read(tensor)
        if operator_of(form.overload) != "detach":
            (value,) = self._emitter.emit(form.overload, [value], attrs, outputs=[spec])
        call = ViewCall(operator_of(form.overload), attrs, tensor.spec, (spec,))
        return self.memory.view(tensor, value, call)

    def _new_contents(
        self,
        overload: OpOverload,
        form: FunctionalForm,
        arguments: dict[str, Any],
        targets: list[TensorView],
    ) -> list[IRValue]:
        """What the functional form returns; the new contents of ``targets`` come last."""
        values = {to: self._value_of(arguments[name]) for to, name in form.reads}
        if overload is torch.ops.aten.copy_.default:
            spec = targets[0].spec
            value: IRValue = self._emitter.cast(values["src"], spec.dtype)
            if value.shape != tuple(spec.shape):
                value = self._emitter.one("aten.expand.default", value, list(spec.shape))
            return [value]
        if form.takes_dtype:
            values["dtype"] = targets[0].spec.dtype
        return self._emitter.call(form.overload, **values)

    def _store(self, target: TensorView, value: IRValue) -> None:
        if value.shape != tuple(target.spec.shape):
            raise self._emitter.refuse(
                f"the result {list(value.shape)} is written to a tensor of shape "
                f"{list(target.spec.shape)}, which would be resized; give out= the right shape"
            )
        self.memory.write(target, self._emitter.cast(value, target.spec.dtype))

    # --- what a graph cannot hold -----------------------------------------------------------

    def _specs(self, node: torch.fx.Node) -> list[torch.Tensor | None]:
        """The fake results of a node, None where no tensor is among several.

        Refuses what depends on contents.
        """
        made = node.meta.get("val")
        specs = [] if made is None else _listed(made)
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
        unknown = [name for name, value in attrs.items() if not is_attribute(value)]
        if unknown:
            raise self._emitter.refuse(
                f"{overload.name()} takes {', '.join(unknown)} from outside of the graph, which "
                "holds tensors, numbers and strings only"
            )


def _is_node(item: Any) -> bool:
    return isinstance(item, torch.fx.Node)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


_DEPENDS_ON_CONTENTS = (
    "a number or a size depends on the contents of a tensor, and a graph's are fixed: keep it a "
    "tensor, use masks or torch.where, or compute it before the call and pass it as an argument"
)
_SETTINGS = frozenset({SET_GRAD_ENABLED, *AUTOCAST_SWITCHES})
"""Changes of settings, which each call's note has anyway."""
_DROPPED = frozenset(
    {torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default}
)
_CHANGES_STORAGE = frozenset({"resize_", "resize_as_", "set_", "set_data"})


def _from_first_element(
    overload: OpOverload, read: list[TensorView], attrs: dict[str, Any]
) -> tuple[list[TensorView], dict[str, Any]]:
    """A call that counts in memory: of the whole memory where it reads, and from its beginning."""
    first, *others = read
    given = attrs["storage_offset"]
    offset = first.spec.storage_offset() if given is None else given
    if operator_of(overload) != "as_strided_scatter":  # its result is as the view that it writes to
        first = first.root
    counted = offset - first.spec.storage_offset()
    said = given if given is None and counted == 0 else counted
    return [first, *others], {**attrs, "storage_offset": said}


def _keeps_memory_format(attrs: dict[str, Any]) -> bool:
    return attrs.get("memory_format") in (None, torch.preserve_format)


def _drops_nothing(attrs: dict[str, Any]) -> bool:
    return not attrs["train"] or attrs["p"] == 0


_DOES_NOTHING: dict[str, Callable[[dict[str, Any]], bool]] = {
    "to": _keeps_memory_format,
    **dict.fromkeys(("alias", "detach", "lift", "lift_fresh"), lambda attrs: True),
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), _drops_nothing
    ),
}
"""ATen operators that return their input where their attributes say so, on every device."""


def _advice_for_function(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    if "vmap" in name or "batch_dim" in name or "lazy_load" in name:
        return "torch.vmap cannot be in a graph; write the batch dimension out"
    return f"{name}: {_DEPENDS_ON_CONTENTS}"


# --- functional forms -----------------------------------------------------------------------------
#
# From an overload whose schema is mutable, such as ``aten.add_.Tensor``, ``aten.fill_.Scalar``,
# ``aten.add.out`` or ``aten._foreach_add_.List``, to the functional one with the same parameters,
# in order and by type, the written ones of an ``out=`` left out: it draws the same numbers and
# rounds alike.

_FACTORY_OPTIONS = {"dtype", "layout", "device", "pin_memory"}
"""Parameters that a factory has only where it makes its result itself, without ``out=``."""


@dataclass(frozen=True, slots=True)
class FunctionalForm:
    """``overload`` gives the new contents of the arguments named in ``writes``.

    ``reads`` maps its parameters to the arguments of the mutable call; ``takes_dtype`` says that
    it is a factory, and makes its result of the dtype it is told.
    """

    overload: OpOverload
    reads: tuple[tuple[str, str], ...]
    writes: tuple[str, ...]
    takes_dtype: bool


@cache
def functional_form(overload: OpOverload) -> FunctionalForm | None:
    """The functional form of a mutable overload, or None where torch has none."""
    arguments = schema_of(overload).arguments
    writes = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    kept = [argument for argument in arguments if not argument.is_out]
    wanted = [str(argument.type) for argument in kept]
    for candidate in _candidates(overload):
        schema = schema_of(candidate)
        found, extra = schema.arguments[: len(kept)], schema.arguments[len(kept) :]
        options = {argument.name for argument in extra}
        returns = [str(item.type) for item in schema.returns]
        enough = len(returns) >= len(writes) or any("List" in item for item in returns)
        if enough and wanted == [str(a.type) for a in found] and options <= _FACTORY_OPTIONS:
            reads = tuple((to.name, at.name) for to, at in zip(found, kept, strict=True))
            return FunctionalForm(candidate, reads, writes, "dtype" in options)
    return None


def _candidates(overload: OpOverload) -> Iterator[OpOverload]:
    """Overloads that do not write, of the packets that may hold the functional form."""
    name = operator_of(overload)
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    namespace = getattr(torch.ops, overload.namespace)
    for packet_name in dict.fromkeys((plain, f"{plain}_functional", name)):
        packet = getattr(namespace, packet_name, None)
        for overload_name in packet.overloads() if packet else ():
            candidate = getattr(packet, overload_name)
            if not schema_of(candidate).is_mutable:
                yield candidate


# --- norms in training ----------------------------------------------------------------------------

_FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"


def _batch_norm(
    emitter: GraphEmitter, memory: ProgramMemory, read: list[TensorView], attrs: dict[str, Any]
) -> IRValue:
    x, *affine, mean, var = map(memory.read, read)
    weight, bias = _affine(affine, attrs)
    result, _, _, *new = emitter.call(
        _FUNCTIONAL, x, weight, bias, mean, var, True, attrs["momentum"], attrs["eps"]
    )
    _update(emitter, memory, read[-2:], new)
    return result


def _instance_norm(
    emitter: GraphEmitter, memory: ProgramMemory, read: list[TensorView], attrs: dict[str, Any]
) -> IRValue:
    """Batch norm over ``[1, batch * channels, ...]``; the statistics are means over the batch."""
    x, *affine, mean, var = map(memory.read, read)
    batch, channels, *rest = x.shape
    weight, bias = (
        emitter.one("aten.repeat.default", value, [batch]) if value else None
        for value in _affine(affine, attrs)
    )
    flat = emitter.one("aten.contiguous.default", x)
    flat = emitter.one("aten.view.default", flat, [1, batch * channels, *rest])
    stats = [emitter.one("aten.repeat.default", value, [batch]) for value in (mean, var)]
    result, _, _, *new = emitter.call(
        _FUNCTIONAL, flat, weight, bias, *stats, True, attrs["momentum"], attrs["eps"]
    )
    rows = [emitter.one("aten.view.default", value, [batch, channels]) for value in new]
    means = [emitter.one("aten.mean.dim", value, [0]) for value in rows]
    _update(emitter, memory, read[-2:], means)
    return emitter.one("aten.view.default", result, list(x.shape))


def _affine(values: list[IRValue], attrs: dict[str, Any]) -> tuple[IRValue | None, IRValue | None]:
    """Weight and bias, where the call has them."""
    left = iter(values)
    weight, bias = (None if name in attrs else next(left) for name in ("weight", "bias"))
    return weight, bias


def _update(
    emitter: GraphEmitter, memory: ProgramMemory, tensors: list[TensorView], values: list[IRValue]
) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        statistics = emitter.cast(value, tensor.spec.dtype)
        emitter.hide(statistics)
        memory.write(tensor, statistics)


_NORMS: dict[OpOverload, tuple[str, Callable[..., IRValue]]] = {
    torch.ops.aten.batch_norm.default: ("training", _batch_norm),
    torch.ops.aten.instance_norm.default: ("use_input_stats", _instance_norm),
}
"""The attribute by which a call updates running statistics, and what emits such a call."""
