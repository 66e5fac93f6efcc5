"""A pass under test: what it gives is valid and computes the same, and its source stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import shardwright as sw
from shardwright.ir import IRGraph, format_graph, validate
from tests.compiler.running import assert_close, run_nodes

Pass = Callable[[IRGraph], IRGraph]


def rewritten(
    graph: IRGraph, change: Pass, inputs: Sequence[torch.Tensor], *, tolerance: float = 0.0
) -> IRGraph:
    """The changed graph, held against the graph before: to the last bit, unless told otherwise."""
    text = format_graph(graph)
    after = change(graph)
    assert format_graph(graph) == text
    validate(after)
    with torch.no_grad():
        wanted, found = run_nodes(graph, inputs), run_nodes(after, inputs)
    for made, expected in zip(found, wanted, strict=True):
        for a, b in zip(made, expected, strict=True):
            assert_close(a, b, tolerance)
    assert [v.strides for v in _ends(after)] == [v.strides for v in _ends(graph)]
    return after


def _ends(graph: IRGraph) -> list[Any]:
    return [graph.values[value_id] for value_id in (*graph.outputs, *graph.updates.values())]


def captured(function: Callable[..., Any], *inputs: torch.Tensor, **modules: Any) -> IRGraph:
    """The graph of a function of tensors; ``modules`` become its attributes ``self.<name>``."""

    class Program(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, module in modules.items():
                setattr(self, name, module)

        def forward(self, *args: torch.Tensor) -> Any:
            return function(self, *args) if modules else function(*args)

    return sw.capture(Program().eval(), inputs)


def operators(graph: IRGraph) -> list[str]:
    """The nodes' operators, without namespace and overload."""
    return [node.op.split(".")[1] for node in graph.nodes]


def calls(graph: IRGraph) -> list[str]:
    """The nodes as a person reads them: ``add(x, y) -> z``, attributes that are not defaults."""
    lines = []
    for node in graph.nodes:
        given = [graph.values[value_id].name for value_id in node.inputs]
        given += [f"{key}={value!r}" for key, value in node.attrs.items() if _tells(key, value)]
        made = ", ".join(graph.values[value_id].name for value_id in node.outputs)
        lines.append(f"{node.op.split('.')[1]}({', '.join(given)}) -> {made}")
    return lines


def _tells(key: str, value: object) -> bool:
    """Whether an attribute says anything: no default, and not where inputs stand."""
    plain = value is None or value is False or isinstance(value, list)
    return not plain and (key, value) not in (("alpha", 1), ("activation", 0))


def programs(graph: IRGraph) -> list[str]:
    """The programs of a graph's chains."""
    return [node.attrs["program"] for node in graph.nodes if "program" in node.attrs]
