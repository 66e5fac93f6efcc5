"""Norms in training, which write to their running statistics without saying so in a schema.

Comes in: a call of ``aten.batch_norm`` or ``aten.instance_norm`` that updates running statistics.
Goes out: functional operators with the same result and the statistics' new values, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwright.ir.values import IRValue
from shardwright.torch_internals import OpOverload
from shardwright.tracing.emitter import Emitter
from shardwright.tracing.memory import Memory, Place

_FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"


class Norm(NamedTuple):
    """``writes(attrs)`` says whether a call updates statistics; ``emit`` writes such a call."""

    writes: Callable[[dict[str, Any]], bool]
    emit: Callable[[Emitter, Memory, list[Place], dict[str, Any]], IRValue]


def _batch_norm(
    emitter: Emitter, memory: Memory, places: list[Place], attrs: dict[str, Any]
) -> IRValue:
    x, *affine, mean, var = map(memory.read, places)
    weight, bias = _affine(affine, attrs)
    result, _, _, new_mean, new_var = emitter.call(
        _FUNCTIONAL, x, weight, bias, mean, var, True, attrs["momentum"], attrs["eps"]
    )
    _update(emitter, memory, places[-2:], [new_mean, new_var])
    return result


def _instance_norm(
    emitter: Emitter, memory: Memory, places: list[Place], attrs: dict[str, Any]
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


def _update(emitter: Emitter, memory: Memory, places: list[Place], values: list[IRValue]) -> None:
    for place, value in zip(places, values, strict=True):
        statistics = emitter.cast(value, place.spec.dtype)
        emitter.hide(statistics)
        memory.write(place, statistics)


def _has_statistics(attrs: dict[str, Any]) -> bool:
    return "running_mean" not in attrs


NORMS: dict[OpOverload, Norm] = {
    torch.ops.aten.batch_norm.default: Norm(
        lambda attrs: attrs["training"] and _has_statistics(attrs), _batch_norm
    ),
    torch.ops.aten.instance_norm.default: Norm(
        lambda attrs: attrs["use_input_stats"] and _has_statistics(attrs), _instance_norm
    ),
}
