"""Operators that torch composes of others, as graphs of these: torch's own decompositions.

Comes in: a call of such an operator on tensors of some kind. Goes out: a `Template`, what reaches
the kernels when torch runs it without gradients (`softmax` is ``_softmax``, `matmul` a few views
and a ``bmm``), recorded from fake tensors once for all calls of the same kind. None where it stays
one call: where it draws random numbers, cannot be recorded, or comes apart into very many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from shardwright.autodiff.record import Kind, record
from shardwright.autodiff.simplify import simplify
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.operators import flatten_results, is_marker, join_call, resolve
from shardwright.torch_internals import FakeTensorMode, is_composite

_CHOOSING = ("aten.scaled_dot_product_attention.default",)
"""Operators that are no kernels, but choose one by device and operands, and prepare its mask.

What they choose on a GPU only the machine that runs it knows: there they stay one call.
"""

LARGEST = 64
"""Nodes: an operator that comes apart into more (an LSTM, step by step) stays one call."""


class Template(NamedTuple):
    """Nodes whose inputs are the call's, and the values that are its results."""

    graph: IRGraph
    results: list[int | None]


class Composites:
    """Recorded templates, each once; ``device_kind`` is whose kernels are asked for.

    Those of another kind than the CPU are asked of torch's ``meta`` device: what a graph comes
    apart into depends on the kind, and not on the machine where that is done.
    """

    def __init__(self, device_kind: str = "cpu") -> None:
        self._device = device_kind if device_kind == "cpu" else "meta"
        self._mode = FakeTensorMode()
        self._known: dict[object, Template | None] = {}

    def of(self, op: str, inputs: Sequence[IRValue], attrs: Mapping[str, Any]) -> Template | None:
        """What a call comes apart into."""
        if not is_composed(op) or attrs.get("dropout_p"):
            return None
        if op in _CHOOSING and self._device != "cpu":
            return None
        kinds = tuple(Kind.of(value) for value in inputs)
        key = (op, kinds, repr(attrs))
        if key not in self._known:
            self._known[key] = self._record(op, kinds, dict(attrs))
        return self._known[key]

    def _record(self, op: str, kinds: Sequence[Kind], attrs: dict[str, Any]) -> Template | None:
        overload = resolve(op)

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
            args, kwargs = join_call(overload, tensors, attrs, torch.device(self._device))
            return flatten_results(overload(*args, **kwargs))

        try:
            with torch.no_grad():
                recorded = record(run, kinds, self._mode, self._device)
        except Exception:  # whatever the reason is that torch cannot trace it: it stays one call
            return None
        graph = recorded.builder.graph
        results = simplify(graph, recorded.results)
        unchanged = any(node.op == op for node in graph.nodes)
        return None if unchanged or len(graph.nodes) > LARGEST else Template(graph, results)


@cache
def is_composed(op: str) -> bool:
    """Whether torch runs the operator as others, whatever the device, and draws nothing."""
    if is_marker(op) or op in _CHOOSING:
        return op in _CHOOSING
    overload = resolve(op)
    return is_composite(overload) and torch.Tag.nondeterministic_seeded not in overload.tags
