"""Operators that write: their functional forms, and what they write in `memory`.

Comes in: a call of an overload whose schema says that it writes. Goes out: nodes without writes,
and what the call stands for. What always holds: a tensor keeps its shape, dtype and strides when
it is written to; only operators that are views in place (``x.squeeze_()``) change a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.fx

from shardwright.ir.operators import split_call
from shardwright.ir.values import IRValue
from shardwright.torch_internals import OpOverload, operator_of, schema_of
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.held import TranslatedNodes, is_node, listed
from shardwright.tracing.memory import ProgramMemory, TensorView
from shardwright.tracing.views import ViewCall

_CHANGES_STORAGE = frozenset({"resize_", "resize_as_", "set_", "set_data"})


class Writes:
    """Translates the calls that write."""

    def __init__(self, emitter: GraphEmitter, memory: ProgramMemory, held: TranslatedNodes) -> None:
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
    ) -> TensorView:
        """``x.squeeze_()``: from here on the program's tensor is a view of what it was."""
        named = {to: arguments[name] for to, name in form.reads}
        inputs, attrs = split_call(form.overload, (), named, is_tensor=is_node)
        place: TensorView = self._held.standing_for(inputs[0])
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
        targets: list[TensorView],
    ) -> list[IRValue]:
        """What the functional form returns; the new contents of ``targets`` come last."""
        values = {to: self._held.value_of(arguments[name]) for to, name in form.reads}
        if overload is torch.ops.aten.copy_.default:
            return [self._copied(targets[0], values["src"])]
        if form.takes_dtype:
            values["dtype"] = targets[0].spec.dtype
        return self._emitter.call(form.overload, **values)

    def _copied(self, target: TensorView, source: IRValue) -> IRValue:
        """``source`` with the dtype and the shape of ``target``."""
        value = self._emitter.cast(source, target.spec.dtype)
        shape = tuple(target.spec.shape)
        if value.shape != shape:
            value = self._emitter.one("aten.expand.default", value, list(shape))
        return value

    def _store(self, target: TensorView, value: IRValue) -> None:
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
        targets: list[TensorView],
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


# --- functional forms -----------------------------------------------------------------------------
#
# From an overload whose schema is mutable, such as ``aten.add_.Tensor``, ``aten.fill_.Scalar``,
# ``aten.add.out`` or ``aten._foreach_add_.List``, to the functional one with the same parameters,
# such as ``aten.add.Tensor``. The two have the same parameters, in order and by type, the written
# ones of an ``out=`` left out, so the functional one draws the same numbers and rounds alike.


FACTORY_OPTIONS = ("dtype", "layout", "device", "pin_memory")
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
    writes = tuple(argument.name for argument in arguments if _is_written(argument))
    kept = [argument for argument in arguments if not argument.is_out]
    for candidate in _candidates(overload):
        extra = _extra_parameters(kept, candidate)
        if extra is not None and _returns_enough(candidate, len(writes)):
            found = schema_of(candidate).arguments[: len(kept)]
            reads = tuple((to.name, at.name) for to, at in zip(found, kept, strict=True))
            return FunctionalForm(candidate, reads, writes, "dtype" in extra)
    return None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


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


def _extra_parameters(wanted: list[Any], candidate: OpOverload) -> set[str] | None:
    """What ``candidate`` takes beyond ``wanted``, if it is nothing but a factory's options."""
    found = schema_of(candidate).arguments
    extra = {argument.name for argument in found[len(wanted) :]}
    same = [str(argument.type) for argument in wanted] == [
        str(argument.type) for argument in found[: len(wanted)]
    ]
    return extra if same and extra <= set(FACTORY_OPTIONS) else None


def _returns_enough(candidate: OpOverload, count: int) -> bool:
    """Whether it returns at least ``count`` tensors, or a list of them."""
    returns = schema_of(candidate).returns
    return len(returns) >= count or any("List" in str(item.type) for item in returns)


# --- norms in training ----------------------------------------------------------------------------


_FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"


class NormRow(NamedTuple):
    """``writes(attrs)`` says whether a call updates statistics; ``emit`` writes such a call."""

    writes: Callable[[dict[str, Any]], bool]
    emit: Callable[[GraphEmitter, ProgramMemory, list[TensorView], dict[str, Any]], IRValue]


def _batch_norm(
    emitter: GraphEmitter, memory: ProgramMemory, places: list[TensorView], attrs: dict[str, Any]
) -> IRValue:
    x, *affine, mean, var = map(memory.read, places)
    weight, bias = _affine(affine, attrs)
    result, _, _, new_mean, new_var = emitter.call(
        _FUNCTIONAL, x, weight, bias, mean, var, True, attrs["momentum"], attrs["eps"]
    )
    _update(emitter, memory, places[-2:], [new_mean, new_var])
    return result


def _instance_norm(
    emitter: GraphEmitter, memory: ProgramMemory, places: list[TensorView], attrs: dict[str, Any]
) -> IRValue:
    """Batch norm over ``[1, batch * channels, ...]``; the statistics are means over the batch."""
    x, *affine, mean, var = map(memory.read, places)
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
    _update(emitter, memory, places[-2:], means)
    return emitter.one("aten.view.default", result, list(x.shape))


def _affine(values: list[IRValue], attrs: dict[str, Any]) -> tuple[IRValue | None, IRValue | None]:
    """Weight and bias, where the call has them."""
    left = iter(values)
    weight, bias = (None if name in attrs else next(left) for name in ("weight", "bias"))
    return weight, bias


def _update(
    emitter: GraphEmitter, memory: ProgramMemory, places: list[TensorView], values: list[IRValue]
) -> None:
    for place, value in zip(places, values, strict=True):
        statistics = emitter.cast(value, place.spec.dtype)
        emitter.hide(statistics)
        memory.write(place, statistics)


def _has_statistics(attrs: dict[str, Any]) -> bool:
    return "running_mean" not in attrs


NORMS: dict[OpOverload, NormRow] = {
    torch.ops.aten.batch_norm.default: NormRow(
        lambda attrs: attrs["training"] and _has_statistics(attrs), _batch_norm
    ),
    torch.ops.aten.instance_norm.default: NormRow(
        lambda attrs: attrs["use_input_stats"] and _has_statistics(attrs), _instance_norm
    ),
}
