"""Clipping gradients on the slots: by their norm over all slots, or each element by itself.

The norm of all gradients is that of one long vector. Each slot makes the sum of powers (or the
largest magnitude) of what it has to count, one reduction over all slots of the plan makes the
whole, and every slot scales its gradients by the same number. What always holds: an element counts
once, on however many slots it lies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.building.holdings import Holding, Holdings
from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import Builder, IRNode, IRValue
from shardwright.ir.dtypes import torch_dtype
from shardwright.sharding import Layout, Partial, Replicate

GUARD = 1e-6
"""What torch adds to the norm before it divides by it."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm as a sum of powers of magnitudes (``order``), or the largest of them (infinity)."""

    order: float

    @property
    def reduction(self) -> Partial:
        return Partial("max" if math.isinf(self.order) else "sum")

    def term(self, builder: Builder, tensors: Sequence[IRValue], total: IRValue) -> IRValue:
        """A slot's term: 0-d, of the total's dtype."""
        dtype = torch_dtype(total.dtype)
        tensors = [tensor for tensor in tensors if tensor.numel]
        if not tensors:
            return builder.call("aten.zeros.default", [], dtype=dtype)  # type: ignore[no-any-return]
        norms = builder.call("aten._foreach_norm.Scalar", tensors, self.order, dtype=dtype)
        norm = builder.call("aten.stack.default", norms)
        norm = builder.call("aten.linalg_vector_norm.default", norm, self.order)
        return norm if math.isinf(self.order) else self._power(builder, norm, self.order)

    def whole(self, builder: Builder, reduced: IRValue) -> IRValue:
        """The norm from the terms of all slots, reduced."""
        if math.isinf(self.order):
            return reduced
        return self._power(builder, reduced, 1 / self.order)

    def _power(self, builder: Builder, value: IRValue, exponent: float) -> IRValue:
        """Roots and squares by the operators that round once."""
        if exponent == 1:
            return value
        if exponent == 0.5:
            return builder.call("aten.sqrt.default", value)  # type: ignore[no-any-return]
        return builder.call("aten.pow.Tensor_Scalar", value, exponent)  # type: ignore[no-any-return]


def total_norm(holdings: Holdings, node: IRNode, gradients: Sequence[Holding]) -> Holding:
    """The norm of all gradients, held by every slot. Raises PlanError for orders below 1."""
    order = float(node.attrs["norm_type"])
    if not order >= 1:
        raise PlanError(f"clip_grad_norm with norm_type={order}; from 1 up, or infinity, is known")
    norm, total = _Norm(order), holdings.graph.values[node.outputs[0]]
    counted = _counted(gradients)
    slots = Mesh(("slots",), (len(holdings.slots),), tuple(holdings.slots))
    local = {}
    for device, slot in holdings.slots.items():
        tensors = [slot.value(value_id) for value_id in counted.get(device, ())]
        local[device] = norm.term(slot.builder, tensors, total).id
    layout = Layout.of(norm.reduction).normal(slots, ())
    terms = holdings.derive(total)
    holdings.add(terms.id, Holding(slots, layout, local))
    reduced = holdings.fetch(terms.id, slots, Layout.of(Replicate()))
    found = {}
    for device, slot in holdings.slots.items():
        found[device] = norm.whole(slot.builder, slot.value(reduced.local[device])).id
    return holdings.add(total.id, Holding(slots, reduced.layout, found))


def _counted(gradients: Sequence[Holding]) -> dict[str, list[int]]:
    """What each slot counts: a slice that several slots hold is the first one's."""
    counted: dict[str, list[int]] = {}
    for holding in gradients:
        for device, coordinate in zip(
            holding.mesh.devices, holding.mesh.coordinates(), strict=True
        ):
            copies = zip(coordinate, holding.layout.placements, strict=True)
            if not any(at and isinstance(found, Replicate) for at, found in copies):
                counted.setdefault(device, []).append(holding.local[device])
    return counted


def scaled(
    builder: Builder, node: IRNode, norm: IRValue, gradients: Sequence[IRValue]
) -> Sequence[IRValue]:
    """A slot's gradients, smaller where the norm is more than it may be."""
    guarded = builder.call("aten.add.Scalar", norm, GUARD)
    share = builder.call("aten.mul.Scalar", builder.call("aten.reciprocal.default", guarded),
                         float(node.attrs["max_norm"]))  # fmt: skip
    share = builder.call("aten.clamp.default", share, max=1.0)
    return builder.call("aten._foreach_mul.Tensor", gradients, share)  # type: ignore[no-any-return]


def limited(
    builder: Builder, attrs: Mapping[str, float], gradients: Sequence[IRValue]
) -> Sequence[IRValue]:
    """A slot's gradients, each element within ``clip_value`` of zero."""
    limit = float(attrs["clip_value"])
    found = builder.call("aten._foreach_clamp_min.Scalar", gradients, -limit)
    return builder.call("aten._foreach_clamp_max.Scalar", found, limit)  # type: ignore[no-any-return]
