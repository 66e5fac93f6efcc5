"""What a node costs: seconds of its forward, and of its backward.

`Costs` is what planners ask; `Analytic` answers it from shapes alone, by the roofline of a device,
`Measured` from measurements of calls, or of several calls in a row. Nodes of a graph are known by
what they do, so what was measured need not have been that graph.

- What was measured alone costs what it took; what was measured together shares that, as the
  fallback thinks that it would.
- What was not measured costs what the fallback says, times a factor: what the measured nodes of its
  operator in the same graph took, over what the fallback says of them; that of all operators, where
  none of its own was measured.
- A part of a node is the same share of it that the fallback says.

Invariant: no cost is negative, a view costs nothing, and a smaller part never costs more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import DeviceModel
from shardwright.costs.measurement import Measurement, call_key, forward_key
from shardwright.costs.roofline import Calls, node_calls, seconds
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.graph import forward_nodes
from shardwright.sharding.strategy import WHOLE, LargestPart


class NodeCost(NamedTuple):
    """Seconds of one call on one microbatch.

    forward
        The call itself.
    backward
        The gradients of what nodes made; 0 where none is needed.
    weight
        The gradients of stored values; 0 where none is needed.
    """

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.weight


class Costs(Protocol):
    """Says what nodes cost."""

    def node(self, graph: IRGraph, node: IRNode, part: LargestPart = WHOLE) -> NodeCost:
        """The seconds of a node, or of a part of it."""


@dataclass(frozen=True, slots=True)
class Analytic(Costs):
    """Roofline costs: times of nodes from shapes and the rates of a device.

    The backward is that of a training step. ``trained`` are the parameters, by value id, that need
    gradients: by default those that a step's optimizer replaces, or all parameters of a graph
    without an optimizer.
    """

    device: DeviceModel
    trained: frozenset[int] | None = None
    _memory: list[_Known] = field(default_factory=list, compare=False, repr=False)
    """What is known of the graph that was asked for last."""

    def node(self, graph: IRGraph, node: IRNode, part: LargestPart = WHOLE) -> NodeCost:
        """The seconds of a node, or of a part of it."""
        known = self._known(graph)
        key = node.id, part
        if key not in known.work:
            known.work[key] = node_calls(graph, node, known.needing, part)
        return NodeCost(
            *(sum(seconds(self.device, call) for call in calls) for calls in known.work[key])
        )

    def _known(self, graph: IRGraph) -> _Known:
        memory = self._memory
        if not memory or memory[0].graph is not graph or memory[0].nodes != len(graph.nodes):
            trained = trained_parameters(graph) if self.trained is None else self.trained
            needing = frozenset(needing_gradients(graph, trained))
            memory[:] = [_Known(graph, len(graph.nodes), needing)]
        return memory[0]


@dataclass(frozen=True, slots=True)
class _Known:
    """A graph when it had so many nodes: which values want gradients, and work by node and part."""

    graph: IRGraph
    nodes: int
    needing: frozenset[int]
    work: dict[tuple[int, LargestPart], Calls] = field(default_factory=dict)


# --- costs that were measured ---------------------------------------------------------------------


GRAPHS = 8
"""Of how many graphs costs are kept."""
_NOTHING = NodeCost(0.0, 0.0, 0.0)
_AS_ESTIMATED = NodeCost(1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class _Priced:
    """A graph, its forward nodes' costs by id, and the factors by operator and of all others."""

    graph: IRGraph
    size: int
    costs: Mapping[int, NodeCost]
    factors: Mapping[str, NodeCost]
    others: NodeCost


class Measured(Costs):
    """Costs by measurements, and by ``fallback`` where there are none."""

    def __init__(self, measurements: Iterable[Measurement], fallback: Costs) -> None:
        self.fallback = fallback
        self._runs: dict[str, list[Measurement]] = {}
        self._forwards: dict[str, float] = {}
        for found in measurements:
            self._runs.setdefault(found.calls[0], []).append(found)
            if len(found.calls) == 1:
                self._forwards[forward_key(found.calls[0])] = found.timing.forward
        for runs in self._runs.values():
            runs.sort(key=lambda found: -len(found.calls))
        self._known: dict[int, _Priced] = {}

    def node(self, graph: IRGraph, node: IRNode, part: LargestPart = WHOLE) -> NodeCost:
        """The seconds of a node, or of a part of it."""
        priced = self._priced(graph)
        whole = priced.costs.get(node.id)
        if whole is None:
            estimate = self.fallback.node(graph, node, part)
            return _times(estimate, priced.factors.get(node.op, priced.others))
        if part == WHOLE:
            return whole
        all_of_it, of_part = (self.fallback.node(graph, node, one) for one in (WHOLE, part))
        return _times(whole, _over(of_part, all_of_it, NodeCost(*(1 / part.work for _ in whole))))

    def _priced(self, graph: IRGraph) -> _Priced:
        """The costs in a graph; those of the last few are kept, and so are these graphs."""
        known = self._known.get(id(graph))
        if known is None or known.size != len(graph.nodes):
            if len(self._known) == GRAPHS:
                del self._known[next(iter(self._known))]
            self._known[id(graph)] = known = self._price(graph)
        return known

    def _price(self, graph: IRGraph) -> _Priced:
        nodes = forward_nodes(graph)
        needing = needing_gradients(graph, trained_parameters(graph))
        keys = [call_key(graph, node, needing) for node in nodes]
        estimates = [self.fallback.node(graph, node) for node in nodes]
        measured = dict(self._measured(keys, estimates))
        factors, others = _factors(nodes, estimates, measured)
        costs = {}
        for i, (node, key, estimate) in enumerate(zip(nodes, keys, estimates, strict=True)):
            cost = measured.get(i) or _times(estimate, factors.get(node.op, others))
            if i not in measured and (forward := self._forwards.get(forward_key(key))) is not None:
                cost = cost._replace(forward=forward)
            costs[node.id] = cost
        return _Priced(graph, len(graph.nodes), costs, factors, others)

    def _measured(
        self, keys: Sequence[str], estimates: Sequence[NodeCost]
    ) -> Iterator[tuple[int, NodeCost]]:
        """The costs of the calls that are in measured runs, the longest runs first."""
        place = 0
        while place < len(keys):
            found = self._longest(keys, place)
            stop = place + (len(found.calls) if found is not None else 1)
            if found is not None:
                yield from enumerate(_shared(found, estimates[place:stop]), start=place)
            place = stop

    def _longest(self, keys: Sequence[str], place: int) -> Measurement | None:
        """The longest measured run of calls that begins at a place."""
        for found in self._runs.get(keys[place], ()):
            if tuple(keys[place : place + len(found.calls)]) == found.calls:
                return found
        return None


def _shared(found: Measurement, estimates: Sequence[NodeCost]) -> Iterator[NodeCost]:
    """What a measured run took, dealt to its calls in proportion to their estimates."""
    timing, count = found.timing, len(found.calls)
    whole = NodeCost(timing.forward, timing.backward, timing.weight)
    sums = _sum(estimates)
    for estimate in estimates:
        yield _times(whole, _over(estimate, sums, NodeCost(*(1 / count for _ in whole))))


def _factors(
    nodes: Sequence[IRNode], estimates: Sequence[NodeCost], measured: Mapping[int, NodeCost]
) -> tuple[dict[str, NodeCost], NodeCost]:
    """What was measured over what was estimated, by operator and of all together."""
    everything = _over(
        _sum(measured.values()), _sum([estimates[i] for i in measured]), _AS_ESTIMATED
    )
    places: dict[str, list[int]] = {}
    for i in measured:
        places.setdefault(nodes[i].op, []).append(i)
    factors = {
        op: _over(_sum([measured[i] for i in own]), _sum([estimates[i] for i in own]), everything)
        for op, own in places.items()
    }
    return factors, everything


def _sum(costs: Iterable[NodeCost]) -> NodeCost:
    return NodeCost(*map(sum, zip(*costs, strict=True))) if (costs := [*costs]) else _NOTHING


def _times(cost: NodeCost, factor: NodeCost) -> NodeCost:
    return NodeCost(*(a * b for a, b in zip(cost, factor, strict=True)))


def _over(cost: NodeCost, other: NodeCost, default: NodeCost) -> NodeCost:
    """One over the other, field by field; ``default`` where the other is 0."""
    triples = zip(cost, other, default, strict=True)
    return NodeCost(*(a / b if b > 0 else instead for a, b, instead in triples))
