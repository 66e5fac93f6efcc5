"""Writing nodes of a traced program, with gradients as they flow in the program.

Nodes are under the scopes and the source line of the program's call at hand. What the program makes
without gradient is hidden: it is detached where something that records gradients reads it, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import CaptureError
from shardwright.ir.builder import Builder
from shardwright.ir.operators import operator_name, resolve, split_call
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ir.values import IRValue, Scope, Source
from shardwright.torch_internals import OpOverload
from shardwright.tracing.failures import line_before


class GraphEmitter:
    """Emits into ``builder``.

    ``scopes`` and ``source`` belong to the next nodes, and ``records`` says whether the program
    records gradients there.
    """

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.scopes: tuple[Scope, ...] = ()
        self.source: Source | None = None
        self.records = True
        self._flows: set[int] = set()
        self._hidden: set[int] = set()
        self._detached: dict[int, IRValue] = {}

    def emit(
        self,
        overload: OpOverload,
        inputs: Sequence[IRValue],
        attrs: dict[str, Any],
        *,
        outputs: Sequence[torch.Tensor | None] | None = None,
        name: str | None = None,
    ) -> list[IRValue]:
        """One node; its tensors as a list, with the specs of ``outputs`` where given."""
        if self._hidden:
            inputs = [self.seen(value) for value in inputs]
        values = self._append(overload, inputs, attrs, outputs, name)
        if any(value.id in self._flows for value in inputs):
            self.let_flow(*values)
            if not self.records:
                self.hide(*values)
        return values

    def _append(
        self,
        overload: OpOverload,
        inputs: Sequence[IRValue],
        attrs: dict[str, Any],
        outputs: Sequence[torch.Tensor | None] | None = None,
        name: str | None = None,
    ) -> list[IRValue]:
        made = self.builder.emit(
            operator_name(overload),
            inputs,
            attrs,
            outputs=outputs,
            name=name,
            scopes=self.scopes,
            source=self.source,
        )
        values = [made] if isinstance(made, IRValue) else made
        return [value for value in values if value is not None]

    def call(self, op: OpOverload | str, /, *args: Any, **kwargs: Any) -> list[IRValue]:
        """One node, its call written as in Python."""
        overload = resolve(op) if isinstance(op, str) else op
        inputs, attrs = split_call(
            overload, args, kwargs, is_tensor=lambda item: isinstance(item, IRValue)
        )
        return self.emit(overload, inputs, attrs)

    def one(self, op: OpOverload | str, /, *args: Any, **kwargs: Any) -> IRValue:
        """One node of an operator with one result."""
        return self.call(op, *args, **kwargs)[0]

    def cast(self, value: IRValue, dtype: torch.dtype) -> IRValue:
        """The same contents as ``dtype``."""
        if torch_dtype(value.dtype) == dtype:
            return value
        return self.one("aten.to.dtype", value, dtype)

    # --- gradients --------------------------------------------------------------------------

    def let_flow(self, *values: IRValue) -> None:
        """Say that a gradient flows through those of ``values`` that can have one."""
        dtypes = ((value.id, torch_dtype(value.dtype)) for value in values)
        self._flows.update(i for i, dtype in dtypes if dtype.is_floating_point or dtype.is_complex)

    def hide(self, *values: IRValue) -> None:
        """Say that the program made ``values`` without gradient, whatever flows in the graph."""
        self._hidden.update(value.id for value in values if value.id in self._flows)

    def flows(self, value: IRValue) -> bool:
        """Whether a gradient flows through ``value`` in the graph."""
        return value.id in self._flows

    def is_differentiable(self, value: IRValue) -> bool:
        """Whether a gradient flows through ``value`` in the program."""
        return value.id in self._flows and value.id not in self._hidden

    def detached(self, value: IRValue) -> IRValue:
        """The same contents without a gradient; ``value`` itself where none flows through it."""
        if value.id not in self._flows:
            return value
        if value.id not in self._detached:
            (made,) = self._append(resolve("aten.detach.default"), [value], {})
            self._detached[value.id] = made
        return self._detached[value.id]

    def seen(self, value: IRValue) -> IRValue:
        """What the program sees at this point: without gradient where it was made so."""
        return self.detached(value) if self.records and value.id in self._hidden else value

    def refuse(self, message: str) -> CaptureError:
        """The error for what the program does at the line at hand."""
        return CaptureError(f"{line_before(self.source)}{message}")
