"""A planned graph as segments: runs of nodes that one slot executes without talking to another.

Comes in: a graph and its plan. Goes out: segments in one order in which all of them can be run,
each with its part of the graph as a graph. A stage is several segments where layers repeat, so
that equal layers give equal text and share it in the file. What always holds: a segment reads
only stored values, inputs, and what segments before it made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.repeats import repeated_blocks
from shardwright.ir.subgraph import Subgraph, extract
from shardwright.planning import Plan


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes of one slot that become one compute task."""

    name: str
    device: str
    part: Subgraph


def segments(graph: IRGraph, plan: Plan) -> list[Segment]:
    """The segments of a graph whose tables are cut already, in an order that can be executed."""
    runs = list(_runs(graph, _devices(graph, plan)))
    home = {
        value_id: i
        for i, (_, nodes) in enumerate(runs)
        for node in nodes
        for value_id in node.outputs
    }
    escaping = _escaping(graph, runs, home)
    counts: dict[str, int] = {}
    found = []
    for i, (device, nodes) in enumerate(runs):
        number = counts.get(device, 0)
        counts[device] = number + 1
        name = f"{device}.{number}"
        found.append(Segment(name, device, extract(graph, nodes, escaping[i], name)))
    return found


def _devices(graph: IRGraph, plan: Plan) -> list[str]:
    """The slot of each node, by position. Raises PlanError where the plan leaves one out."""
    devices: list[str | None] = [None] * len(graph.nodes)
    for stage in plan.stages:
        for position in stage.nodes:
            if not 0 <= position < len(devices) or devices[position] is not None:
                raise PlanError(
                    f"stage {stage.device} names node {position}, which another stage has or "
                    f"which the graph of {len(devices)} nodes lacks; plan again"
                )
            devices[position] = stage.device
    if None in devices:
        raise PlanError(f"no stage has the node {devices.index(None)}; plan again")
    return [device for device in devices if device is not None]


def _runs(graph: IRGraph, devices: Sequence[str]) -> Iterator[tuple[str, list[IRNode]]]:
    """Maximal runs of nodes on one slot, cut where repeated layers meet."""
    borders = {cut for repeat in repeated_blocks(graph) for cut in repeat.cuts}
    run: list[IRNode] = []
    for position, node in enumerate(graph.nodes):
        if run and (position in borders or devices[position] != devices[position - 1]):
            yield devices[position - 1], run
            run = []
        run.append(node)
    if run:
        yield devices[-1], run


def _escaping(
    graph: IRGraph, runs: Sequence[tuple[str, list[IRNode]]], home: dict[int, int]
) -> list[list[int]]:
    """For each run, the values it makes that are read elsewhere, in the order it makes them."""
    wanted = {*graph.outputs, *graph.updates.values()}
    for i, (_, nodes) in enumerate(runs):
        for node in nodes:
            wanted.update(value_id for value_id in node.inputs if home.get(value_id, i) != i)
    return [
        [value_id for node in nodes for value_id in node.outputs if value_id in wanted]
        for _, nodes in runs
    ]
