"""Backwards that trust what their forward saved: as the forward, asked on fake tensors, makes it.

What a tensor must be for a kernel that does not look itself stands here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import GraphError
from shardwright.ir.inference import Inference
from shardwright.ir.operators import resolve, signature, split_call
from shardwright.ir.tensor_meta import contiguous_strides, strides_or_none, tensor_text
from shardwright.ir.values import IRValue

Arguments = Mapping[str, Any]
"""A call's arguments by name: `IRValue`s, or tensors, lists of them, and plain values."""


@dataclass(frozen=True)
class SavedTensors:
    """A backward that trusts what its forward saved.

    forward
        The forward's name, and of each of its arguments the backward's name for it; what is not
        among them has the value that ``given`` says, or its default.
    results
        The backward's names for what the forward makes, by place; None for what it does not read.
    flat
        Names of those whose kernels read their memory from the first element on.
    alike
        Names of those whose kernels read them so too, contiguous or with channels last, but all in
        one way: that of the last one.
    """

    forward: str
    arguments: Mapping[str, str]
    results: Sequence[str | None]
    flat: Sequence[str] = ()
    given: Mapping[str, Callable[[Arguments], Any]] = field(default_factory=dict)
    alike: Sequence[str] = ()

    def __call__(self, call: Arguments, inference: Inference) -> None:
        """Raise GraphError where a call's tensors are not what its forward makes."""
        for name, made in zip(self.results, self._made(call, inference), strict=False):
            found = call.get(name or "")
            if isinstance(found, IRValue) and made is not None and found.shape != tuple(made.shape):
                raise unlike(name, found, made.shape)
        for name in self.flat:
            need_flat(name, call[name])
        _need_one_order([call[name] for name in self.alike])

    def _made(self, call: Arguments, inference: Inference) -> Sequence[Any]:
        overload = resolve(f"aten.{self.forward}")
        values = {
            p.name: self.given[p.name](call)
            if p.name in self.given
            else call[self.arguments[p.name]]
            if p.name in self.arguments
            else p.default
            for p in signature(overload).parameters
        }
        inputs, attrs = split_call(
            overload, (), values, is_tensor=lambda item: isinstance(item, IRValue)
        )
        return inference.outputs(f"aten.{self.forward}", inputs, attrs)


def unlike(name: str | None, found: IRValue, shape: Sequence[int]) -> GraphError:
    """The error for a tensor of another shape than a kernel reads."""
    return GraphError(
        f"has {tensor_text(found.dtype, found.shape)} for the argument {name!r}; its kernel reads "
        f"{list(shape)}"
    )


def need_flat(name: str, value: Any) -> None:
    """Raise GraphError where a tensor is not contiguous."""
    if isinstance(value, IRValue) and strides_or_none(value.shape, value.strides) is not None:
        raise GraphError(
            f"has a tensor of strides {list(value.strides or ())} for the argument {name!r}; its "
            "kernel reads contiguous memory"
        )


def _need_one_order(values: Sequence[IRValue]) -> None:
    """Raise GraphError where tensors of one shape are neither all contiguous nor channels last."""
    for shape in {value.shape for value in values}:
        rest = shape[2:]
        last = (math.prod(shape[1:]), 1, *(step * shape[1] for step in contiguous_strides(rest)))
        ways = (contiguous_strides(shape), last if rest else contiguous_strides(shape))
        if 0 not in shape and not any(all(v.meta.same_order(way) for v in values) for way in ways):
            found = " and ".join(str(list(value.strides or ways[0])) for value in values)
            raise GraphError(
                f"has tensors of the strides {found}; its kernel reads them contiguous, or all "
                "with channels last"
            )
