"""Taking fused products apart: one product a part in place of one for all.

Input: a graph, and positions of fused products in it (`fusions`). Output: the same program
with each of them replaced by one node a part, whose stored inputs are ranges of the original ones
(``placements``; the names in a checkpoint stay), and what stands between the product and where it
is unfused done to each part. Invariant: each element is computed from the same numbers,
in sums whose order is the only thing that may differ; everything else is as it was.

In a training step each part of a parameter has its own gradient, state and update: where a marker's
list has the parameter, it has the parts, all under the parameter's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardwright.errors import PlanError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.operators import is_marker
from shardwright.planning.fusions import Fusion, Passing, Range, Taking, find_fusions
from shardwright.planning.step_graph import is_elementwise, parameters_of


def unfuse(
    graph: IRGraph,
    positions: Collection[int] | None = None,
    fusions: Mapping[int, Fusion] | None = None,
) -> IRGraph:
    """The graph with the fused products at ``positions`` taken apart; all of them by default.

    ``fusions`` is what `find_fusions` says of the graph, where it is known. The graph itself where
    there is none. Raises PlanError where a position has no fused product.
    """
    if positions is not None and not positions:
        return graph
    found = find_fusions(graph) if fusions is None else fusions
    if positions is not None:
        if unknown := set(positions) - found.keys():
            raise PlanError(
                f"node {min(unknown)} of {graph.name!r} is no fused product; plan again"
            )
        found = {position: found[position] for position in positions}
    if not found:
        return graph
    return _Unfusing(graph, [found.get(i) for i in range(len(graph.nodes))]).run()


@dataclass(slots=True)
class _Unfusing:
    """The graph written again; `run` gives it."""

    graph: IRGraph
    fusions: Sequence[Fusion | None]
    """By position."""
    builder: Builder = field(init=False)
    mapping: dict[int, int] = field(default_factory=dict)
    """Values here by the original's id."""
    parts: dict[tuple[int, Range], IRValue] = field(default_factory=dict)
    """Parts of a fused value, by its id and the range of the fusion's identifier."""
    slices: dict[tuple[int, int, Range], IRValue] = field(default_factory=dict)
    """Ranges of a dimension of stored values."""
    narrowed: dict[object, torch.Tensor] = field(default_factory=dict)
    """Ranges of contents on the meta device, by what they are ranges of."""
    apart: dict[int, Ranges] = field(init=False)
    """Of a step: parameters in parts, their gradients, states and new contents."""
    made: dict[int, list[IRValue]] = field(default_factory=dict)
    """Those of them that nodes made, part by part."""

    def __post_init__(self) -> None:
        self.builder = Builder(self.graph.name)
        self.apart = _apart(self.graph, self.fusions)

    def run(self) -> IRGraph:
        graph, inside = self.graph, self._inside()
        self._copy_ends()
        for node, fusion in zip(graph.nodes, self.fusions, strict=True):
            if fusion is not None:
                self._add_product(node, fusion)
            elif node.id in inside and node.id in inside[node.id].passing:
                self._add_passing(node, *inside[node.id].passing[node.id])
            elif node.id in inside:
                self._add_taking(node, *inside[node.id].takings[node.id])
            elif any(value_id in self.apart for value_id in (*node.inputs, *node.outputs)):
                self._add_behind(node)
            else:
                self._add_copy(node)
        return self.builder.finish(
            [self._value(value_id) for value_id in graph.outputs],
            in_structure=graph.in_structure,
            out_structure=graph.out_structure,
            updates={
                a.id: b.id
                for old, new in graph.updates.items()
                for a, b in zip(self._all(old), self._all(new), strict=True)
            },
        )

    def _inside(self) -> dict[int, Fusion]:
        """The fusion of each node behind a product, by node id."""
        return {
            node_id: fusion
            for fusion in self.fusions
            if fusion is not None
            for node_id in (*fusion.passing, *fusion.takings)
        }

    def _copy_ends(self) -> None:
        """Inputs, and the stored values that are still read whole, or by nothing as before."""
        pairs = zip(self.graph.nodes, self.fusions, strict=True)
        rewritten = {node.id for node, fusion in pairs if fusion is not None}
        for value_id in self.graph.inputs:
            copy = self.builder.copy_value(self.graph, self.graph.values[value_id])
            self.mapping[value_id] = copy.id
        for value in self.graph.stored():
            if value.id in self.apart:
                continue
            if not value.users or not rewritten.issuperset(value.users):
                self.mapping[value.id] = self.builder.copy_value(self.graph, value).id

    def _add_copy(self, node: IRNode) -> None:
        """The node as it is; strides are worked out anew where its inputs have others now."""
        old = [self.graph.values[value_id] for value_id in node.inputs]
        new = [self._value(value_id) for value_id in node.inputs]
        if all(one.strides == other.strides for one, other in zip(old, new, strict=True)):
            self.builder.copy_node(self.graph, node, self.mapping)
            return
        name = self.graph.values[node.outputs[0]].name
        made = self.builder.emit(
            node.op, new, node.attrs, name=name, scopes=node.scopes, source=node.source
        )
        made = made if isinstance(made, list) else [made]
        self.mapping |= {a: b.id for a, b in zip(node.outputs, made, strict=True)}

    def _value(self, value_id: int) -> IRValue:
        """A value whole; of one in parts, their concatenation."""
        if value_id in self.apart:
            parts, dim = self._all(value_id), self.apart[value_id].dim
            if value_id not in self.mapping:
                joined = self.builder.call("aten.cat.default", parts, dim)
                self.mapping[value_id] = joined.id
        return self.builder.graph.values[self.mapping[value_id]]

    # --- the parts ----------------------------------------------------------------------------

    def _add_product(self, node: IRNode, fusion: Fusion) -> None:
        """One product a part, of ranges of the stored inputs."""
        flow = fusion.product.bound.flow(fusion.product.identifier)
        for part in fusion.parts:
            inputs = [
                self._slice(value_id, carry.dim, (part[0] * carry.unit, part[1] * carry.unit))
                if carry.kind == "shard" and carry.dim is not None
                else self._value(value_id)
                for value_id, carry in zip(node.inputs, flow.inputs, strict=True)
            ]
            self._add_part(node, fusion.product, part, inputs)

    def _add_passing(self, node: IRNode, passing: Passing, parts: Sequence[Range]) -> None:
        for part in parts:
            self._add_part(node, passing, part, [self.parts[node.inputs[0], part]])

    def _add_part(
        self, node: IRNode, passing: Passing, part: Range, inputs: Sequence[IRValue]
    ) -> None:
        cut = passing.cut(part)
        assert cut is not None
        (made,) = passing.bound.part({passing.identifier: cut}).emit(
            self.builder, inputs, scopes=node.scopes, source=node.source
        )
        self.parts[node.outputs[0], part] = made

    def _add_taking(self, node: IRNode, taking: Taking, parts: Sequence[Range]) -> None:
        """Each output is a part; without the dimension where the node drops it."""
        for value_id, part in zip(node.outputs, parts, strict=True):
            value = self.parts[node.inputs[0], part]
            if taking.drop:
                first = {"dim": taking.dim, "index": 0}
                value = self.builder.emit(
                    "aten.select.int", [value], first, scopes=node.scopes, source=node.source
                )
            self.mapping[value_id] = value.id

    def _slice(self, value_id: int, dim: int, part: Range) -> IRValue:
        """A range of a dimension of a stored value: a stored value of its own."""
        key = (value_id, dim, part)
        if key not in self.slices:
            self.slices[key] = self._new_slice(self.graph.values[value_id], dim, part)
        return self.slices[key]

    def _new_slice(self, value: IRValue, dim: int, part: Range) -> IRValue:
        origin = list(value.placements or ((0, size) for size in value.shape))
        first = origin[dim][0]
        origin[dim] = (first + part[0], first + part[1])
        shape = [end - start for start, end in origin]
        made = self.builder.graph.new_value(
            value.name,
            shape,
            value.dtype,
            device=value.device,
            role=value.role,
            names=value.names,
            placements=origin,
            init=value.init,
        )
        if value.id in self.graph.tensors:
            tensor = self.graph.tensors[value.id]
            self.builder.graph.tensors[made.id] = self._narrowed(tensor, dim, part)
        return made

    def _narrowed(self, tensor: torch.Tensor, dim: int, part: Range) -> torch.Tensor:
        """A range of contents; of contents that are nowhere one stands for all of its kind."""
        if not tensor.is_meta:
            return tensor.narrow(dim, part[0], part[1] - part[0])
        key = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, dim, part
        if key not in self.narrowed:
            self.narrowed[key] = tensor.narrow(dim, part[0], part[1] - part[0])
        return self.narrowed[key]

    # --- behind the backward --------------------------------------------------------------------

    def _all(self, value_id: int) -> list[IRValue]:
        """A value in its parts, one where it is whole; every part has a number for itself."""
        value = self.graph.values[value_id]
        if value_id not in self.apart:
            return [self._value(value_id)]
        if value_id not in self.made:
            dim, parts = self.apart[value_id]
            self.made[value_id] = [
                self._slice(value_id, dim, part)
                if value.shape
                else self.builder.copy_value(self.graph, value)
                for part in parts
            ]
        return self.made[value_id]

    def _add_behind(self, node: IRNode) -> None:
        """A node of values in parts: with all parts in its lists, or done to each part."""
        if is_marker(node.op):
            self._add_marker(node)
        elif is_elementwise(self.graph, node):
            self._add_to_each(node)
        else:
            self._add_copy(node)

    def _add_marker(self, node: IRNode) -> None:
        outputs = [self._new_parts(value_id) for value_id in node.outputs]
        self.builder.emit(
            node.op,
            [part for value_id in node.inputs for part in self._all(value_id)],
            {**node.attrs, **self._names(node)},
            outputs=[part for parts in outputs for part in parts],
            scopes=node.scopes,
            source=node.source,
        )

    def _names(self, node: IRNode) -> dict[str, list[str]]:
        """The parameters that a marker lists, those in parts once for each."""
        values = self.graph.values
        counts = {values[v].names[:1]: len(ranges.parts) for v, ranges in self.apart.items()}
        return {
            key: [name for name in names for _ in range(counts.get((name,), 1))]
            for key, names in node.attrs.items()
            if key == "parameters"
        }

    def _new_parts(self, value_id: int) -> list[IRValue]:
        """What a marker makes: as many values as there are parts, or one."""
        value = self.graph.values[value_id]
        if value_id not in self.apart:
            made = self.builder.copy_value(self.graph, value, role="tmp")
            self.mapping[value_id] = made.id
            return [made]
        dim, parts = self.apart[value_id]
        self.made[value_id] = [
            self.builder.value(value.name, _cut(value.shape, dim, part), value.dtype)
            for part in parts
        ]
        return self.made[value_id]

    def _add_to_each(self, node: IRNode) -> None:
        """An operator of gradients, done to each part."""
        inputs = [self._all(value_id) for value_id in node.inputs]
        count = max(map(len, inputs))
        rows = zip(*(parts * (count // len(parts)) for parts in inputs), strict=True)
        self.made[node.outputs[0]] = [
            self.builder.emit(node.op, row, node.attrs, scopes=node.scopes, source=node.source)
            for row in rows
        ]


class Ranges(NamedTuple):
    """The ranges of a dimension that a parameter's parts are."""

    dim: int
    parts: tuple[Range, ...]


def _apart(graph: IRGraph, fusions: Sequence[Fusion | None]) -> dict[int, Ranges]:
    """The parameters that a step updates in parts, their gradients, states and new contents."""
    owners = parameters_of(graph)
    updated = set(owners.values())
    found: dict[int, Ranges] = {}
    for node, fusion in zip(graph.nodes, fusions, strict=True):
        if fusion is None:
            continue
        flow = fusion.product.bound.flow(fusion.product.identifier)
        for value_id, carry in zip(node.inputs, flow.inputs, strict=True):
            if value_id in updated and carry.kind == "shard" and carry.dim is not None:
                parts = tuple((a * carry.unit, b * carry.unit) for a, b in fusion.parts)
                found[value_id] = Ranges(carry.dim, parts)
    return found | {v: found[owner] for v, owner in owners.items() if owner in found}


def _cut(shape: Sequence[int], dim: int, part: Range) -> list[int]:
    """The shape of a part; a number's is its own."""
    return [part[1] - part[0] if i == dim else size for i, size in enumerate(shape)]
