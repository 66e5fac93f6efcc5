"""A whole graph and the partition of each of its nodes, as a Program.

Comes in: a graph, and a number for each node, none of which reads what a higher one makes. Goes
out: a stage a number that has live nodes. What always holds: the stages run one after another give
what the graph gives, new contents of buffers included; nodes keep their modules and lines, and
within a stage their order, so that random numbers are drawn in it; what nobody needs is left out.

A stored value stands in every stage that reads it. One that the graph gives new contents stands in
one stage alone, which changes it at the end of its forward: the first that reads it. Others get it
by a port, and what leaves that stage is never the memory that it writes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardwright.codegenerate.sources.placed_updates import Placed, first_readers, together
from shardwright.codegenerate.sources.port_names import PortNames
from shardwright.codegenerate.stage import Port, Program, Stage
from shardwright.errors import CodegenError
from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.ir.aliasing import memory_roots
from shardwright.ir.execute import describe_node
from shardwright.ir.graph import live_values
from shardwright.ir.inference import Inference
from shardwright.ir.structure import leaves


def cut(
    graph: IRGraph,
    numbers: Sequence[int],
    *,
    training: bool,
    notes: Sequence[str] = (),
    loss: int | None = None,
) -> Program:
    """The program of a graph whose node at each position is of the partition with that number.

    ``loss`` is the output that a training step differentiates. Raises CodegenError where a
    partition needs what a later one makes.
    """
    return _Cutting(graph, numbers).program(training, tuple(notes), loss)


@dataclass(slots=True)
class _Traffic:
    """What one stage does, by value id in the whole graph; insertion orders are of no matter."""

    nodes: list[IRNode] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)
    entering: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    updates: list[int] = field(default_factory=list)
    """Stored values of the stage that get new contents."""


class _Cutting:
    """One graph, cut; `program` gives it."""

    def __init__(self, graph: IRGraph, numbers: Sequence[int]) -> None:
        self.graph = graph
        self.home: dict[int, int] = {}
        """The stage that makes a value, or alone has a stored one; others are had where read."""
        placed = _live(graph, numbers)
        together(graph, placed)
        count = max((found.number for found in placed), default=0) + 1
        self.traffic = [_Traffic() for _ in range(count)]
        for found in placed:
            self.traffic[found.number].nodes.append(found.node)
            self.home.update(dict.fromkeys(found.node.outputs, found.number))
        self._settle_updates(placed)
        for found in placed:
            for value_id in found.node.inputs:
                self._bring(value_id, found.number, describe_node(found.node))
        for value_id in graph.outputs:
            self._give(value_id)
        for old, new in graph.updates.items():
            name = graph.values[old].name
            self._bring(new, self.home[old], f"the new contents of {name!r}")

    def program(self, training: bool, notes: tuple[str, ...], loss: int | None) -> Program:
        """The stages, with names for what enters and leaves them."""
        graph = self.graph
        assert graph.in_structure is not None
        names = PortNames(graph, [leaf.name for leaf in leaves(graph.in_structure)])
        between = set().union(*(traffic.leaving for traffic in self.traffic))
        names.add(between)
        written = _Writer(graph, names.found, self.home)
        return Program(
            name=graph.name,
            partitions=tuple(
                (written.stage(number, traffic),) for number, traffic in enumerate(self.traffic)
            ),
            inputs=tuple(names.found[value_id] for value_id in graph.inputs),
            outputs=tuple(names.found[value_id] for value_id in graph.outputs),
            in_structure=graph.in_structure,
            out_structure=graph.out_structure,
            training=training,
            loss=None if loss is None else names.found[loss],
            notes=notes,
        )

    # --- who has what -------------------------------------------------------------------------

    def _settle_updates(self, placed: Iterable[Placed]) -> None:
        """Give each stored value that changes to the first stage that reads it."""
        readers = first_readers(self.graph, placed)
        for old, new in self.graph.updates.items():
            self.home[old] = readers.get(old, self.home.get(new, 0))
        for old in self.graph.updates:
            self.traffic[self.home[old]].stored.add(old)
            self.traffic[self.home[old]].updates.append(old)

    def _bring(self, value_id: int, number: int, reader: str) -> None:
        """A stage needs a value."""
        value, home = self.graph.values[value_id], self.home.get(value_id)
        if home == number:
            return
        if home is None and value.is_stored:
            self.traffic[number].stored.add(value_id)
            return
        if home is not None and home > number:
            raise CodegenError(
                f"{reader} is in partition {number} and needs {value.name!r} of partition {home}; "
                "plan so that nothing needs what a later partition makes"
            )
        self.traffic[number].entering.add(value_id)
        if home is not None:
            self.traffic[home].leaving.add(value_id)

    def _give(self, value_id: int) -> None:
        """An output of the graph leaves the stage that has it; an input is the caller's own."""
        home = self.home.get(value_id)
        if home is None and self.graph.values[value_id].is_stored:
            having = (n for n, traffic in enumerate(self.traffic) if value_id in traffic.stored)
            home = next(having, 0)
            self.traffic[home].stored.add(value_id)
        if home is not None:
            self.traffic[home].leaving.add(value_id)


def _live(graph: IRGraph, numbers: Sequence[int]) -> list[Placed]:
    """The nodes that something needs, each with its partition; partitions count from 0."""
    needed = live_values(graph, (*graph.outputs, *graph.updates.values()))
    pairs = zip(graph.nodes, numbers, strict=True)
    live = [(node, number) for node, number in pairs if not needed.isdisjoint(node.outputs)]
    order = {number: i for i, number in enumerate(sorted({number for _, number in live}))}
    return [Placed(node, order[number]) for node, number in live]


# --- stages ---------------------------------------------------------------------------------------


class _Writer:
    """Writes stages as graphs of their own; ``names`` are those of ports."""

    def __init__(self, graph: IRGraph, names: dict[int, str], home: dict[int, int]) -> None:
        self.graph = graph
        self.names = names
        self.inference = Inference()
        self.roots = memory_roots(graph) if graph.updates else {}

    def stage(self, number: int, traffic: _Traffic) -> Stage:
        """One stage."""
        name = f"Stage{number}"
        builder = Builder(name, inference=self.inference)
        entering, leaving = self._sorted(traffic.entering), self._sorted(traffic.leaving)
        values, mapping = self.graph.values, dict[int, int]()
        for value_id in entering:
            mapping[value_id] = builder.copy_value(self.graph, values[value_id], role="input").id
        for value_id in sorted(traffic.stored):
            mapping[value_id] = builder.copy_value(self.graph, values[value_id]).id
        for node in traffic.nodes:
            builder.copy_node(self.graph, node, mapping)
        made = builder.finish(
            [self._given(builder, value_id, mapping, traffic) for value_id in leaving],
            updates={mapping[old]: mapping[self.graph.updates[old]] for old in traffic.updates},
        )
        return Stage(
            name=name,
            graph=made,
            inputs=self._ports(entering, made.inputs),
            outputs=self._ports(leaving, made.outputs),
        )

    def _given(
        self, builder: Builder, value_id: int, mapping: dict[int, int], traffic: _Traffic
    ) -> int:
        """What leaves for a value: a copy where the stage writes to its memory afterwards."""
        here = mapping[value_id]
        if traffic.updates and not self.roots[value_id].isdisjoint(traffic.updates):
            copy: int = builder.call("aten.clone.default", builder.graph.values[here]).id
            return copy
        return here

    def _sorted(self, value_ids: Iterable[int]) -> list[int]:
        return sorted(value_ids, key=self.names.__getitem__)

    def _ports(self, value_ids: Sequence[int], here: Sequence[int]) -> tuple[Port, ...]:
        pairs = zip(value_ids, here, strict=True)
        return tuple(Port(self.names[value_id], own) for value_id, own in pairs)
