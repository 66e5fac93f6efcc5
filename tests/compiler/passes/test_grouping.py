"""Nodes that are done together never need one another's results too soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.compiler.passes.pointwise import groups
from shardwright.compiler.passes.pointwise_rules import Family, family
from shardwright.ir import IRGraph, IRNode
from tests.compiler.passes.rewritten import captured

X = torch.randn(3, 3)


def grouped(graph: IRGraph) -> list[list[str]]:
    """Groups of the nodes that are called as arithmetic, by what they are called."""
    makers = {value_id: node for node in graph.nodes for value_id in node.outputs}
    plain = ("exp", "add", "mul", "sin")

    def name(node: IRNode) -> str:
        return node.op.split(".")[1]

    def fuses(value_id: int, user: IRNode) -> bool:
        return name(makers[value_id]) in plain and name(user) in plain

    found = groups(graph, graph.nodes, fuses, set(graph.outputs))
    return [[name(node) for node in group] for group in found if name(group[0]) in plain]


GROUPS: dict[str, tuple[Callable[..., Any], list[list[str]]]] = {
    "a row": (lambda x: x.exp().sin() + 1, [["exp", "sin", "add"]]),
    "past what does not fuse": (
        lambda x: (lambda e: e.sin() * e.tanh())(x.exp()),
        [["exp"], ["sin", "mul"]],
    ),
    "through what does not fuse": (lambda x: x.exp().tanh().sin(), [["exp"], ["sin"]]),
    "waiting for one": (lambda x: x.exp() * x.tanh().tanh(), [["exp", "mul"]]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups(name: str) -> None:
    function, expected = GROUPS[name]
    assert grouped(captured(function, X)) == expected


def families(function: Callable[..., Any], *inputs: torch.Tensor) -> list[Family | None]:
    graph = captured(function, *inputs)
    return [family(graph, node) for node in graph.nodes]


def test_families_are_widths_and_shapes() -> None:
    f32, f64 = Family("f32", (3, 3)), Family("f64", (3, 3))
    assert families(lambda x: x.exp() > 1, X) == [f32, f32]
    assert families(lambda x: x.exp() > 1, X.double()) == [f64, f64]
    assert families(lambda x: x.exp(), X.bfloat16()) == [f32]
    assert families(lambda x: x.cumsum(0), X) == [None]
    assert families(lambda x: x + 1j, X) == [None]
    assert families(lambda x: x.exp(), X[:0]) == [None]
