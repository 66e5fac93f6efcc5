"""Graphs up to names and the order of independent nodes: what each node computes, of what.

A value's mark says how it comes about: which input it is, which stored tensor, or which operator
made it with which attributes of values with which marks. Two graphs are equal if their outputs and
updates have equal marks and their nodes make equal marks equally often.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.ir import IRGraph, IRNode, IRValue

LENGTH = 12
"""Characters of a mark."""


@dataclass
class Canonical:
    """Graphs that follow one another, seen as one.

    ``nodes`` has a line for each, in order; ``updates`` the mark of what takes a stored tensor's
    place; ``names`` those of stored tensors by their leading name.
    """

    leading: Mapping[str, str]
    marks: dict[str, str] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    updates: dict[str, str] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def like(cls, graph: IRGraph) -> Canonical:
        """Empty, for graphs whose stored tensors are those of a graph."""
        return cls({name: value.names[0] for value in graph.stored() for name in value.names})

    def add(self, graph: IRGraph, inputs: list[str], outputs: list[str]) -> None:
        """Add a graph whose inputs and outputs go by these names among all graphs."""
        found = {
            value_id: self.marks.setdefault(name, _mark("input", name))
            for value_id, name in zip(graph.inputs, inputs, strict=True)
        }
        for value in graph.stored():
            found[value.id] = self._stored(value)
        for node in graph.nodes:
            self._node(graph, node, found)
        self.marks |= {
            name: found[value_id] for value_id, name in zip(graph.outputs, outputs, strict=True)
        }
        for old, new in graph.updates.items():
            self.updates[found[old]] = found[new]

    def _stored(self, value: IRValue) -> str:
        leading = self.leading[value.names[0]]
        assert {self.leading[name] for name in value.names} == {leading}
        self.names.setdefault(leading, set()).update(value.names)
        kind = "param" if value.role == "param" else "buffer"
        return _mark(kind, leading, _type(value))

    def _node(self, graph: IRGraph, node: IRNode, found: dict[int, str]) -> None:
        reads = [found[value_id] for value_id in node.inputs]
        makes = [_type(graph.values[value_id]) for value_id in node.outputs]
        attributes = ", ".join(f"{key}={node.attrs[key]!r}" for key in sorted(node.attrs))
        line = f"{node.op}({', '.join([*reads, attributes])}) -> {', '.join(makes)} {node.absent}"
        self.nodes.append(line)
        for place, value_id in enumerate(node.outputs):
            found[value_id] = _mark(line, str(place))


def _type(value: IRValue) -> str:
    strides = "" if value.strides is None else f" strides {value.strides}"
    return f"{value.dtype}{list(value.shape)}{strides}"


def _mark(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:LENGTH]


def assert_equal(found: Canonical, expected: Canonical, outputs: list[str]) -> None:
    """Fail with the first node that only one of them has."""
    extra, missing = Counter(found.nodes), Counter(expected.nodes)
    extra, missing = extra - missing, missing - extra
    first = next((line for line in expected.nodes if missing[line]), None)
    other = next((line for line in found.nodes if extra[line]), None)
    assert (other, first) == (None, None), f"{extra.total()} nodes more, {missing.total()} fewer"
    assert found.updates == expected.updates
    assert found.names == expected.names
    assert [found.marks[name] for name in outputs] == [expected.marks[name] for name in outputs]
