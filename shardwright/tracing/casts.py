"""Autocast written out: the casts that a call's arguments get, as nodes.

Comes in: the values that an operator is called with, and the autocast that is in force. Goes out:
the values that autocast would hand to it. What always holds: a gradient is rounded where autocast
rounds it. Autocast shares the casts of parameters and inputs within a region, so that their
gradients are added up before the cast's backward, and no others; so do we.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.ir.values import IRValue
from shardwright.torch_internals import OpOverload
from shardwright.tracing.autocast import autocast_casts, has_autocast_rule
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.memory import TensorView


class Casts:
    """The casts made in the autocast region at hand; `leave` forgets them."""

    def __init__(self, emitter: GraphEmitter) -> None:
        self._emitter = emitter
        self._made: dict[tuple[int, torch.dtype, bool], IRValue] = {}

    def leave(self) -> None:
        """No autocast is in force any more."""
        self._made.clear()

    def of(
        self,
        overload: OpOverload,
        places: Sequence[TensorView],
        values: list[IRValue],
        attrs: dict[str, Any],
        autocast: Sequence[tuple[str, torch.dtype]],
    ) -> list[IRValue]:
        """``values`` as autocast hands them to ``overload``. Raises CaptureError."""
        specs = [place.spec for place in places]
        for device_type, dtype in autocast:
            if any(spec.device.type == device_type for spec in specs):
                casts = autocast_casts(overload, specs, attrs, device_type, dtype)
                own_rule = has_autocast_rule(overload, device_type)
                values = [
                    value if cast is None else self._cast(value, cast, own_rule and place.is_leaf)
                    for place, value, cast in zip(places, values, casts, strict=True)
                ]
        return values

    def _cast(self, value: IRValue, dtype: torch.dtype, shared: bool) -> IRValue:
        """A cast, made once where it is ``shared`` or where no gradient flows through it."""
        if self._emitter.is_differentiable(value) and not shared:
            return self._emitter.cast(value, dtype)
        key = (value.id, dtype, self._emitter.records)
        if key not in self._made:
            self._made[key] = self._emitter.cast(value, dtype)
        return self._made[key]
