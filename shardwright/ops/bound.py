"""The rule of a call bound to its shapes: what the call can be split by, and each part's program.

The program that `BoundPart.emit` writes, run on the slices that ``inputs`` names, makes the slices
or partial results that ``outputs`` names. For a mesh, `BoundDimop.flow` says how each tensor is
placed along the axis that splits an identifier, and `BoundDimop.part` takes the cuts of all axes at
once, even or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from shardwright.errors import AnnotationError
from shardwright.ir import Builder, IRValue, Scope, Source
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.annotation import Factor, TensorDims
from shardwright.ops.call import CatalogCall, Direct, Emitter, Local, Rule, Writer
from shardwright.ops.dimop import Cut, Dimop, InferredDimop, Slice, even_cuts


@dataclass(frozen=True, slots=True)
class Carry:
    """How a tensor lies on the mesh axis that splits an identifier.

    kind
        ``shard``: each slot has a range of ``dim``, whose boundaries are multiples of ``unit``;
        ``whole``: each slot has all of it; ``partial``: the slots' tensors are reduced to it;
        ``any``: only its dtype is read, so that any part of it will do.
    """

    kind: Literal["shard", "whole", "partial", "any"]
    dim: int | None = None
    unit: int = 1


@dataclass(frozen=True, slots=True)
class Flow:
    """Where an identifier goes: a `Carry` for each input and output."""

    identifier: str
    inputs: tuple[Carry, ...]
    outputs: tuple[Carry, ...]


@dataclass(frozen=True)
class BoundDimop:
    """One call, its rule and the lengths of the identifiers.

    ``source`` says where the rule comes from: ``catalog``, ``registered`` or ``inferred``.
    """

    call: CatalogCall
    rule: Rule
    dimop: Dimop
    inference: InferredDimop
    source: str = "catalog"

    def __str__(self) -> str:
        return f"{self.call.op}: {self.inference.annotation}"

    @property
    def lengths(self) -> Mapping[str, int]:
        """The length of each identifier."""
        return self.inference.lengths

    def length(self, identifier: str) -> int:
        """The length of an identifier."""
        return self.inference.lengths[identifier]

    @property
    def reduction(self) -> str:
        """How partial outputs are put together: ``sum``, ``max`` or ``min``."""
        return self.rule.reduction

    @property
    def linear(self) -> tuple[tuple[int, ...], ...]:
        """As `Rule.linear`; sums of bools are no sums."""
        dtypes = self.call.dtypes
        return tuple(
            together
            for together in self.rule.linear
            if all(dtypes[idx] != "bool" for idx in together)
        )

    @cached_property
    def identifiers(self) -> tuple[str, ...]:
        """What the call can be split by, those included that stand in no input (``arange``)."""
        inference = self.inference
        return tuple(
            name
            for name in inference.annotation.reductions()
            if self.dimop.may_split(inference, inference.factor(name))
        )

    def algorithms(self) -> list[tuple[int, int]]:
        """Each way to split that an input names, as (input index, dimension)."""
        return self.dimop.ways(self.inference)

    def identifier(self, idx: int, dim: int) -> str:
        """What a split of dimension ``dim`` of input ``idx`` splits. Raises AnnotationError."""
        return str(self._splittable(self.inference.factor_at(idx, dim)).name)

    def _splittable(self, factor: Factor) -> Factor:
        """The factor. Raises AnnotationError where it may not be split."""
        if (reason := self.dimop.refusal(self.inference, factor)) is not None:
            raise AnnotationError(f"{self}: {reason}")
        return factor

    def partition(self, idx: int, dim: int, num: int) -> list[BoundPart]:
        """The call in ``num`` parts by a dimension of an input. Raises AnnotationError."""
        return self.split(self.identifier(idx, dim), num)

    def split(self, identifier: str, num: int) -> list[BoundPart]:
        """The call in ``num`` parts by an identifier. Raises AnnotationError."""
        length = self.inference.length(self.inference.factor(identifier))
        return [self.part({identifier: cut}) for cut in even_cuts(length, num)]

    def part(self, cuts: Mapping[str, Cut]) -> BoundPart:
        """What is left of the call where identifiers are cut. Raises AnnotationError."""
        part = self.dimop.part(self.inference, cuts, {})
        reductions = self.inference.annotation.reductions()
        local = Local(
            self.call,
            {**self.lengths, **{name: cut.length for name, cut in cuts.items()}},
            self.lengths,
            dict(cuts),
            tuple(None if item is None else item.shape for item in part.inputs),
            tuple(None if item is None else item.shape for item in part.outputs),
            frozenset(name for name in cuts if reductions[name] == "+"),
        )
        return BoundPart(self, part.inputs, part.outputs, local)

    def flow(self, identifier: str) -> Flow:
        """How each input and output lies where ``identifier`` is split. Raises AnnotationError."""
        if identifier not in self._flows:
            self._flows[identifier] = self._flow(identifier)
        return self._flows[identifier]

    @cached_property
    def _flows(self) -> dict[str, Flow]:
        """Flows by identifier, once asked for."""
        return {}

    def _flow(self, identifier: str) -> Flow:
        factor = self._splittable(self.inference.factor(identifier))
        annotation, summed = self.inference.annotation, factor.reduction == "+"
        inputs = tuple(
            self._carry(tensor, identifier, partial=summed and idx in self.dimop.terms)
            for idx, tensor in enumerate(annotation.inputs)
        )
        outputs = tuple(
            self._carry(tensor, identifier, partial=summed) for tensor in annotation.outputs
        )
        return Flow(identifier, inputs, outputs)

    def _carry(self, tensor: TensorDims, identifier: str, *, partial: bool) -> Carry:
        if tensor.dims is None:
            return Carry("any")
        for index, dim in enumerate(tensor.dims):
            unit = 1
            for factor in reversed(dim.factors):
                if factor.name == identifier:
                    return Carry("shard", index, unit)
                unit *= self.inference.length(factor)
        return Carry("partial" if partial else "whole")


@dataclass(frozen=True)
class BoundPart:
    """One part of a split call: which slices it takes and makes, and its program.

    A None among the slices is a tensor of which only the dtype is read.
    """

    bound: BoundDimop
    inputs: tuple[Slice | None, ...]
    outputs: tuple[Slice | None, ...]
    local: Local

    @property
    def plain(self) -> bool:
        """Whether the program is one call of the same operator."""
        return self.bound.rule.emit is None

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of the part's call, where its program is `plain`."""
        rule, attrs = self.bound.rule, dict(self.bound.call.attrs)
        return attrs | dict(rule.attrs(self.local)) if rule.attrs else attrs

    def emit(
        self,
        builder: Builder,
        inputs: Sequence[IRValue | None],
        *,
        scopes: tuple[Scope, ...] = (),
        source: Source | None = None,
    ) -> list[IRValue]:
        """Write the part's program; ``inputs`` are the values of its slices.

        An input whose slice is partial may be None in all parts but one: a term that is zero.
        An input without a slice may be None too: only its dtype is read.
        """
        return self._make(Writer(builder, scopes, source), inputs)

    def run(self, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """What the part's program makes of tensors; ``inputs`` as for `emit`."""
        devices = [tensor.device for tensor in inputs if tensor is not None]
        return self._make(Direct(*devices[:1]), inputs)

    def _make(self, emitter: Emitter, inputs: Sequence[Any]) -> list[Any]:
        rule, attrs = self.bound.rule, self.attrs
        dropped = {idx for idx in rule.optional if inputs[idx] is None}
        attrs |= {rule.optional[idx]: None for idx in dropped}
        present = [
            self._stand_in(emitter, idx) if value is None else value
            for idx, value in enumerate(inputs)
            if idx not in dropped
        ]
        made = rule.emit(emitter, self.local, present) if rule.emit else None
        if made is None:
            made = emitter.emit(self.bound.call.op, present, attrs)
        return made if isinstance(made, list) else [made]

    def _stand_in(self, emitter: Emitter, idx: int) -> Any:
        """Zeros in place of a term that this part does not have, or of what has only a dtype."""
        shape = self.local.inputs[idx]
        assert shape is None or idx in self.bound.dimop.terms
        dtype = torch_dtype(self.bound.call.dtypes[idx])
        return emitter.call("aten.zeros.default", list(shape or ()), dtype=dtype)


def bind(call: CatalogCall, rule: Rule, source: str = "catalog") -> BoundDimop:
    """The rule held against the call's shapes. Raises AnnotationError where it does not fit."""
    parsed = Dimop.parse(rule.annotation, terms=rule.terms)
    shared = frozenset(range(len(parsed.annotation.inputs))) - rule.terms
    dimop = Dimop(parsed.annotation, shared, rule.terms)
    shapes = [
        None if tensor.dims is None else shape
        for tensor, shape in zip(dimop.annotation.inputs, call.inputs, strict=True)
    ]
    inference = dimop.infer(shapes, **rule.lengths)
    if len(inference.outputs) != len(call.outputs):
        raise AnnotationError(
            f"{call.op}: the annotation {rule.annotation!r} has {len(inference.outputs)} outputs, "
            f"but the call makes {len(call.outputs)}"
        )
    for index, (told, shape) in enumerate(zip(inference.outputs, call.outputs, strict=True)):
        if told is not None and told != shape:
            raise AnnotationError(
                f"{call.op}: output {index} has shape {shape}, but the annotation "
                f"{rule.annotation!r} makes {told}"
            )
    return BoundDimop(call, rule, dimop, inference, source)
