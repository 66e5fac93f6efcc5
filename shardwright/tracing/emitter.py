"""Writing nodes while a program is translated.

Comes in: operators on values. Goes out: nodes in a `Builder`, under the scopes and the source
line of the program's node at hand. What always holds: `differentiable` says of every value
whether a gradient may flow through it in the program, so that what a program computes without
gradient is detached in the graph exactly where that makes a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from shardwright.errors import CaptureError
from shardwright.ir.builder import Builder
from shardwright.ir.dtypes import torch_dtype
from shardwright.ir.operators import operator_name, resolve, split_call
from shardwright.ir.values import IRValue, Scope, Source
from shardwright.tracing.failures import line_before


class Emitter:
    """Emits into ``builder``; ``scopes``, ``source`` and ``name`` belong to the next nodes."""

    def __init__(self, builder: Builder, *, with_gradient: bool) -> None:
        self.builder = builder
        self.scopes: tuple[Scope, ...] = ()
        self.source: Source | None = None
        self.with_gradient = with_gradient
        self._differentiable: set[int] = set()
        self._detached: dict[int, IRValue] = {}
        self._casts: dict[tuple[int, torch.dtype], IRValue] = {}

    def emit(
        self,
        overload: OpOverload,
        inputs: Sequence[IRValue],
        attrs: dict[str, Any],
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        name: str | None = None,
    ) -> list[IRValue]:
        """One node; its results as a list, with the specs of ``outputs`` where given."""
        made = self.builder.emit(
            operator_name(overload),
            inputs,
            attrs,
            outputs=outputs,
            name=name,
            scopes=self.scopes,
            source=self.source,
        )
        values: list[IRValue] = [made] if isinstance(made, IRValue) else list(made)
        if any(value.id in self._differentiable for value in inputs):
            self.mark_differentiable(*values)
        return values

    def call(self, op: OpOverload | str, /, *args: Any, **kwargs: Any) -> list[IRValue]:
        """One node, its call written as in Python."""
        overload = resolve(op) if isinstance(op, str) else op
        inputs, attrs = split_call(overload, args, kwargs, is_tensor=is_value)
        return self.emit(overload, inputs, attrs)

    def one(self, op: OpOverload | str, /, *args: Any, **kwargs: Any) -> IRValue:
        """One node of an operator with one result."""
        return self.call(op, *args, **kwargs)[0]

    def mark_differentiable(self, *values: IRValue) -> None:
        """A gradient may flow through those of ``values`` that are not of an integer type."""
        if self.with_gradient:
            self._differentiable.update(v.id for v in values if has_gradient(torch_dtype(v.dtype)))

    def is_differentiable(self, value: IRValue) -> bool:
        """Whether a gradient may flow through ``value`` in the program."""
        return value.id in self._differentiable

    def detached(self, value: IRValue) -> IRValue:
        """The same contents without a gradient; ``value`` itself where none flows through it."""
        if value.id not in self._differentiable:
            return value
        if value.id not in self._detached:
            made = self.one("aten.detach.default", value)
            self._differentiable.discard(made.id)
            self._detached[value.id] = made
        return self._detached[value.id]

    def cast(self, value: IRValue, dtype: torch.dtype) -> IRValue:
        """The same contents as ``dtype``; each cast of a value is made once."""
        if torch_dtype(value.dtype) == dtype:
            return value
        key = (value.id, dtype)
        if key not in self._casts:
            self._casts[key] = self.one("aten.to.dtype", value, dtype)
        return self._casts[key]

    def refuse(self, message: str) -> CaptureError:
        """The error for what the program does at the line at hand."""
        return CaptureError(f"{line_before(self.source)}{message}")


def is_value(item: Any) -> bool:
    """Whether an argument stands for a tensor."""
    return isinstance(item, IRValue)


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex
