"""The row of `with_backward`: a Function's call splits where its backward, as a graph, splits.

Input: a call, whose attribute ``backward`` is a graph. Output: its rule. A dimension of what
the Function made may be cut where cutting the gradients there cuts the backward in independent
parts, operator by operator, as the catalog's rows say: gradients of inputs that have the dimension
come out cut likewise, those of all others as terms of a sum. A clipping by the norm of the whole
gradient splits nowhere, an elementwise backward everywhere. A part's call has the part's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.with_backward import backward_graph, name_backward
from shardwright.ops.bound import BoundDimop
from shardwright.ops.call import CatalogCall, Local, Rule, letters, text
from shardwright.ops.dimop import Cut

Find = Callable[[IRGraph, IRNode], BoundDimop | None]
"""What is known of splitting a node."""

_Point = tuple[str, int, int | str]
"""A dimension of a value, ("v", value, dim); of an input, ("x", number, dim); an identifier of a
node, ("n", node, name)."""
_Lies = Literal["cut", "whole", "terms"]


def with_backward(call: CatalogCall, find: Find) -> Rule:
    """The rule of a call of `with_backward`; a call without a backward stays whole."""
    spread = _Spread(call, find)
    names = dict(zip(spread.splitting(), letters(1000), strict=False))

    def dims(number: int) -> list[str]:
        return [
            names.get(spread.root(("x", number, dim)), str(size))
            for dim, size in enumerate(call.inputs[number])
        ]

    inputs = [dims(number) for number in range(len(call.inputs))]

    def attrs(local: Local) -> Mapping[str, Any]:
        cuts = {root: local.cuts[name] for root, name in names.items() if name in local.cuts}
        return {"backward": name_backward(spread.part(cuts))} if cuts else {}

    return Rule(text(inputs, inputs[: len(call.outputs)]), attrs=attrs if names else None)


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the backward, and what is known of it."""

    node: IRNode
    bound: BoundDimop | None


class _Spread:
    """Dimensions of a backward that are cut together, as classes of equal points."""

    def __init__(self, call: CatalogCall, find: Find) -> None:
        self._graph = (
            IRGraph("none")
            if call.attrs["failure"]
            else backward_graph(str(call.attrs["backward"]))
        )
        self._call = call
        self._nodes = [_Node(node, find(self._graph, node)) for node in self._graph.nodes]
        self._parent: dict[_Point, _Point] = {}
        self._fixed: set[_Point] = set()
        self._join_ends()
        for known in self._nodes:
            self._join(known)

    # --- classes ------------------------------------------------------------------------------

    def root(self, point: _Point) -> _Point:
        """The point that stands for all that are cut together with this one."""
        while (above := self._parent.get(point, point)) != point:
            point = above
        return point

    def _union(self, a: _Point, b: _Point) -> None:
        a, b = self.root(a), self.root(b)
        if a != b:
            self._parent[a] = b
            if a in self._fixed:
                self._fixed.add(b)

    def _fix(self, point: _Point) -> None:
        self._fixed.add(self.root(point))

    def _join_ends(self) -> None:
        """Gradients lie as what they are gradients of; what is read lies as it does."""
        call, graph = self._call, self._graph
        if call.attrs["failure"]:
            return
        made, wanted = len(call.attrs["made"]), len(call.attrs["inputs"])
        ends = [*zip(graph.inputs[:made], range(made), strict=True)]
        ends += zip(graph.outputs, range(made, made + wanted), strict=True)
        ends += zip(graph.inputs[made:], range(made + wanted, len(call.inputs)), strict=True)
        for value_id, number in ends:
            for dim, size in enumerate(call.inputs[number]):
                self._union(("v", value_id, dim), ("x", number, dim))
                if size <= 1:
                    self._fix(("x", number, dim))

    def _join(self, known: _Node) -> None:
        """The dimensions that an operator cuts together; all others stay whole."""
        node, bound = known.node, known.bound
        free: set[_Point] = set()
        for name in bound.identifiers if bound else ():
            assert bound is not None
            flow = bound.flow(name)
            point = ("n", node.id, name)
            ends = [*zip(node.inputs, flow.inputs, strict=True)]
            ends += zip(node.outputs, flow.outputs, strict=True)
            for value_id, carry in ends:
                if carry.kind == "shard":
                    assert carry.dim is not None
                    here = ("v", value_id, carry.dim)
                    free.add(here)
                    self._union(here, point)
                    if carry.unit != 1:
                        self._fix(point)
        for value_id in (*node.inputs, *node.outputs):
            for dim in range(len(self._graph.values[value_id].shape)):
                if ("v", value_id, dim) not in free:
                    self._fix(("v", value_id, dim))

    # --- which of them split ------------------------------------------------------------------

    def splitting(self) -> Iterator[_Point]:
        """The classes that a call may be split by: every output has them, and all follows."""
        made = range(len(self._call.attrs["made"])) if not self._call.attrs["failure"] else ()
        seen: set[_Point] = set()
        for number in made[:1]:
            for dim in range(len(self._call.inputs[number])):
                root = self.root(("x", number, dim))
                if root not in self._fixed and root not in seen and self._splits(root):
                    yield root
                seen.add(root)

    def _splits(self, root: _Point) -> bool:
        graph = self._graph
        made = len(self._call.attrs["made"])
        lies: dict[int, _Lies] = {v: self._of_end(v, root) for v in graph.inputs}
        if any(lies[v] != "cut" for v in graph.inputs[:made]):
            return False
        for known in self._nodes:
            found = self._through(known, root, lies)
            if found is None:
                return False
            lies |= found
        return all(lies[v] != "whole" for v in graph.outputs)

    def _of_end(self, value_id: int, root: _Point) -> _Lies:
        """How what the backward is given lies."""
        dims = range(len(self._graph.values[value_id].shape))
        return "cut" if any(self.root(("v", value_id, d)) == root for d in dims) else "whole"

    def _through(
        self, known: _Node, root: _Point, lies: Mapping[int, _Lies]
    ) -> dict[int, _Lies] | None:
        """How an operator's results lie; None where its parts would not be independent."""
        node, bound = known.node, known.bound
        names = [
            name
            for name in (bound.identifiers if bound else ())
            if self.root(("n", node.id, name)) == root
        ]
        terms = {i for i, value_id in enumerate(node.inputs) if lies[value_id] == "terms"}
        cut = any(lies[value_id] == "cut" for value_id in node.inputs)
        if not names:
            if cut or (terms and not (bound and any(set(t) == terms for t in bound.linear))):
                return None
            return dict.fromkeys(node.outputs, "terms" if terms else "whole")
        if len(names) > 1 or terms:
            return None
        assert bound is not None
        flow = bound.flow(names[0])
        for value_id, carry in zip(node.inputs, flow.inputs, strict=True):
            wants = {"shard": "cut", "whole": "whole", "any": lies[value_id]}.get(carry.kind)
            if wants != lies[value_id]:
                return None
        kinds = {carry.kind for carry in flow.outputs}
        if "whole" in kinds or ("partial" in kinds and bound.reduction != "sum"):
            return None
        return {
            value_id: "cut" if carry.kind == "shard" else "terms"
            for value_id, carry in zip(node.outputs, flow.outputs, strict=True)
        }

    # --- a part -------------------------------------------------------------------------------

    def part(self, cuts: Mapping[_Point, Cut]) -> IRGraph:
        """The backward of a part."""
        builder = Builder("backward")
        here: dict[int, IRValue] = {}
        for value_id in self._graph.inputs:
            value = self._graph.values[value_id]
            found = (cuts.get(self.root(("v", value_id, d))) for d in range(len(value.shape)))
            pairs = zip(found, value.shape, strict=True)
            shape = [size if cut is None else cut.length for cut, size in pairs]
            strides = _like(shape, value.strides)
            here[value_id] = builder.input(value.name, shape, value.dtype, strides=strides)
        for known in self._nodes:
            node, bound = known.node, known.bound
            own = {
                name: cuts[root]
                for name in (bound.identifiers if bound else ())
                if (root := self.root(("n", node.id, name))) in cuts
            }
            inputs = [here[value_id] for value_id in node.inputs]
            if own and bound:
                made = bound.part(own).emit(builder, inputs)
            else:
                emitted = builder.emit(node.op, inputs, node.attrs)
                listed = emitted if isinstance(emitted, list) else [emitted]
                made = [value for value in listed if value is not None]
            here |= dict(zip(node.outputs, made, strict=True))
        return builder.finish([here[value_id] for value_id in self._graph.outputs])


def _like(shape: list[int], strides: tuple[int, ...] | None) -> list[int] | None:
    """Strides of a dense tensor whose dimensions lie in the same order."""
    if strides is None:
        return None
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        found[dim] = step
        step *= max(shape[dim], 1)
    return found
