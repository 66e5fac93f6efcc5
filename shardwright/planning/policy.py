"""Policies of a user's own: functions that say, node by node, how a graph is split.

    def policy(graph, resource):
        for node in graph.nodes():
            if node.name == "linear":
                algo = node.algorithm("dim")
                graph.partition(node, algo, idx=1, dim=0, num=resource.ngpus)
        return graph

Input: an `IRGraph` and the slots; a policy sees a `PolicyGraph` made of them and decides on its
nodes. Output: an `Assignment` for each node.

Invariant: a node is decided on once. Nodes that are not decided on are replicated: every
slot does all of them. The parts of a partition go to the first slots, in order, but for those that
`PolicyGraph.assign` puts elsewhere, each to a slot of its own. A part can be partitioned again; the
parts of one node are all split alike, so that they make a grid, an axis for each partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.clusters import Mesh
from shardwright.errors import AnnotationError, PlanError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.graph import NodeList
from shardwright.ops.bound import BoundDimop, BoundPart
from shardwright.ops.catalog import dimop_of, why_whole
from shardwright.ops.dimop import Cut, Slice, even_cuts
from shardwright.planning.plan import Assignment, Split

AXES = ("split", "split2", "split3")
"""The mesh axes of a partition, of a partition of its parts, and so on."""


@dataclass(frozen=True, slots=True)
class Resource:
    """The device slots at a policy's disposal, by id."""

    devices: tuple[str, ...]

    @property
    def ngpus(self) -> int:
        """How many device slots, of whatever kind."""
        return len(self.devices)


class _PolicyPartition(NamedTuple):
    identifier: str
    parts: tuple[SubNode, ...]

    def __str__(self) -> str:
        return f"in {len(self.parts)} by {self.identifier!r}"


class PolicyGraph:
    """A graph as a policy sees it: nodes, and what is decided on them."""

    def __init__(self, graph: IRGraph, resource: Resource) -> None:
        self._graph = graph
        self._resource = resource
        self._nodes = NodeList(PolicyNode(i, node, graph) for i, node in enumerate(graph.nodes))
        self._partitions: dict[Item, _PolicyPartition] = {}
        self._devices: dict[Item, str] = {}
        self._taken: dict[tuple[PolicyNode, str], Item] = {}
        """What of a node is on a slot."""
        self._replicated: set[PolicyNode] = set()

    @property
    def name(self) -> str:
        """The graph's name."""
        return self._graph.name

    @property
    def nodes(self) -> NodeList[PolicyNode]:
        """The nodes in execution order, as ``graph.nodes`` or ``graph.nodes()``."""
        return self._nodes

    # --- decisions ----------------------------------------------------------------------------

    def partition(
        self, node: Item, algo: Algorithm | None, *, idx: int, dim: int, num: int
    ) -> list[SubNode]:
        """Split a node, or a part of one, in ``num`` parts by dimension ``dim`` of input ``idx``.

        ``algo`` is what ``node.algorithm('dim')`` gave. Parts are as even as can be, larger ones
        first. Raises AnnotationError where the dimension cannot be split so, PlanError where the
        node is decided on already or there are not enough slots.
        """
        self._check_undecided(node)
        if algo is None:
            reason = why_whole(self._graph, whole_of(node).node) or "no algorithm was given"
            raise PlanError(
                f"{node} cannot be split: {reason}; partition where node.algorithm('dim') is not "
                "None"
            )
        if algo.node is not whole_of(node):
            raise PlanError(f"{node}: the algorithm is that of {algo.node}; take this node's own")
        try:
            identifier = algo.identifier(idx, dim)
            parts = split(node, algo, identifier, num)
        except AnnotationError as error:
            ways = "; ".join(map(str, algo.ways()))
            raise AnnotationError(f"{node}: {error}; it can be split by {ways}") from None
        self._check_room(parts[0])
        self._partitions[node] = _PolicyPartition(identifier, parts)
        return list(parts)

    def assign(self, node: Item, device: str | int) -> None:
        """Put a node, or a part of one, on a slot, named by its id or its number.

        Raises PlanError where there is no such slot, or another part of the node is on it.
        """
        self._check_undecided(node)
        devices = self._resource.devices
        if type(device) is int and 0 <= device < len(devices):
            device = devices[device]
        if not isinstance(device, str) or device not in devices:
            raise PlanError(f"{node}: there is no slot {device!r}; there are {', '.join(devices)}")
        other = self._taken.setdefault((whole_of(node), device), node)
        if other is not node:
            raise PlanError(f"{node}: {other} is on {device}; give each part a slot of its own")
        self._devices[node] = device

    def replicate(self, node: PolicyNode) -> None:
        """Let every slot do all of a node, as is done with nodes that are not decided on."""
        self._check_undecided(node)
        if isinstance(node, SubNode):
            raise PlanError(f"{node} cannot be replicated: a part is on one slot; assign it to one")
        self._replicated.add(node)

    def _check_undecided(self, item: Item) -> None:
        """Raise where an item is not of this graph, or is decided on."""
        if not isinstance(item, PolicyNode | SubNode):
            raise PlanError(f"expected a node of graph.nodes(), or a part of one, found {item!r}")
        number = whole_of(item).number
        if number >= len(self._nodes) or self._nodes[number] is not whole_of(item):
            raise PlanError(f"{item} is of another graph; take nodes from this graph's nodes()")
        if item in self._partitions:
            found = f"partitioned {self._partitions[item]}"
        elif item in self._devices:
            found = f"assigned to {self._devices[item]}"
        elif item in self._replicated:
            found = "replicated"
        else:
            return
        raise PlanError(f"{item} is {found} already; decide on it once")

    def _check_room(self, part: SubNode) -> None:
        """Raise where there are more parts than slots, or parts of parts of parts of parts."""
        if len(part.place) > len(AXES):
            raise PlanError(f"{part.node} is split {len(AXES)} times already; split it no further")
        count, slots = math.prod(num for _, num in part.place), self._resource.ngpus
        if count > slots:
            raise PlanError(
                f"{part.node} is split in {count} parts, but there are {slots} slots; ask for "
                "fewer parts"
            )

    # --- what comes out -----------------------------------------------------------------------

    def assignments(self) -> list[Assignment]:
        """The assignment of each node. Raises PlanError where parts of a node make no grid."""
        decided = [self._decided(node) for node in self._nodes]
        whole = Assignment.whole(self._whole_mesh(decided))
        return [assignment or whole for assignment in decided]

    def notes(self) -> list[str]:
        """How many nodes were decided on, in words."""
        parted = sum(node in self._partitions for node in self._nodes)
        placed = sum(node in self._devices for node in self._nodes)
        rest = len(self._nodes) - parted - placed
        return [f"nodes: {parted} split, {placed} on one slot, {rest} done whole by every slot"]

    def _decided(self, node: PolicyNode) -> Assignment | None:
        if node in self._devices:
            return Assignment.on(self._devices[node])
        if node not in self._partitions:
            return None
        levels, parts = self._grid(node)
        sizes = tuple(len(level.parts) for level in levels)
        mesh = Mesh(AXES[: len(levels)], sizes, self._slots(parts))
        return Assignment(mesh, tuple(Split(level.identifier) for level in levels))

    def _grid(self, node: PolicyNode) -> tuple[list[_PolicyPartition], list[SubNode]]:
        """A partition for each axis, and the parts of all of them, row-major."""
        levels = [self._partitions[node]]
        parts = list(levels[0].parts)
        while any(part in self._partitions for part in parts):
            found = [self._partitions.get(part) for part in parts]
            texts = [str(partition or "not at all") for partition in found]
            for part, text in zip(parts, texts, strict=True):
                if text != texts[0]:
                    raise PlanError(
                        f"{parts[0]} is split {texts[0]}, but part {part.place[-1][0]} {text}; "
                        "split all parts of a node alike"
                    )
            partitions = [partition for partition in found if partition is not None]
            levels.append(partitions[0])
            parts = [part for partition in partitions for part in partition.parts]
        return levels, parts

    def _slots(self, parts: Sequence[SubNode]) -> tuple[str, ...]:
        """The slot of each part: the one it is assigned to, or the first that is free."""
        taken = {self._devices.get(part) for part in parts}
        free = (device for device in self._resource.devices if device not in taken)
        return tuple(self._devices.get(part) or next(free) for part in parts)

    def _whole_mesh(self, decided: Iterable[Assignment | None]) -> Mesh:
        """The mesh of nodes that every slot does: the grid of most axes that parts stand on.

        Collectives convert between layouts on one mesh; between two meshes there are messages.
        """
        devices = self._resource.devices
        meshes = [assignment.mesh for assignment in decided if assignment is not None]
        return max(
            (mesh for mesh in meshes if mesh.devices == devices and mesh.ndim > 0),
            key=lambda mesh: mesh.ndim,
            default=Mesh(AXES[:1], (len(devices),), devices),
        )


Policy = Callable[[PolicyGraph, Resource], PolicyGraph]
"""A function that decides on nodes of a graph and returns it."""


def by_policy(
    graph: IRGraph, policy: Policy, devices: Sequence[str]
) -> tuple[list[Assignment], list[str]]:
    """The assignment of each node as a policy decides, and notes.

    Raises PlanError where the policy returns anything but the graph that it was given, and what
    the policy raises.
    """
    resource = Resource(tuple(devices))
    given = PolicyGraph(graph, resource)
    returned = policy(given, resource)
    if returned is not given:
        found = "another graph" if isinstance(returned, PolicyGraph) else repr(returned)
        raise PlanError(
            f"the policy {policy_name(policy)} returned {found}; expected the graph that it was "
            "given; end it with 'return graph'"
        )
    return given.assignments(), given.notes()


def policy_name(policy: Policy) -> str:
    """What a policy is called."""
    return str(getattr(policy, "__name__", type(policy).__name__))


# --- what a policy sees ---------------------------------------------------------------------------
#
# A `SubNode` takes and makes exactly the slices and partial sums that it names, and the parts of
# one node together are the node.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PolicyNode:
    """A node of a graph; ``number`` is its place in execution order."""

    number: int
    node: IRNode
    graph: IRGraph

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        return f"node {self.number} ({self.name}{where})"

    def __repr__(self) -> str:
        return f"<{self}>"

    @property
    def op(self) -> str:
        """The operator's full name: ``aten.linear.default``."""
        return self.node.op

    @property
    def name(self) -> str:
        """The operator's short name, ``linear``; of a registered one the name it was given."""
        return self.op.split(".")[1] if "." in self.op else self.op

    @property
    def scope(self) -> str:
        """The path of the innermost module around the call, ``""`` for the root."""
        return self.node.scope

    @property
    def inputs(self) -> tuple[IRValue, ...]:
        """What it reads; each value has a name, a shape and a dtype."""
        return tuple(self.graph.values[value_id] for value_id in self.node.inputs)

    @property
    def outputs(self) -> tuple[IRValue, ...]:
        """What it makes."""
        return tuple(self.graph.values[value_id] for value_id in self.node.outputs)

    def algorithm(self, tag: str = "dim") -> Algorithm | None:
        """The ways to split the node by its dimensions, None where there are none.

        ``dim`` is the one tag there is. Raises PlanError for another.
        """
        if tag != "dim":
            raise PlanError(f"{self}: there is no algorithm {tag!r}; there is 'dim'")
        bound = dimop_of(self.graph, self.node)
        return Algorithm(self, bound) if bound is not None and bound.algorithms() else None


class Way(NamedTuple):
    """A way to split a node: by dimension ``dim`` of input ``idx``.

    ``length`` is how many parts there can be at most; ``partial`` whether they make partial sums.
    """

    idx: int
    dim: int
    identifier: str
    length: int
    partial: bool

    def __str__(self) -> str:
        sums = ", partial sums" if self.partial else ""
        return f"idx={self.idx}, dim={self.dim}: {self.identifier}, up to {self.length} parts{sums}"


@dataclass(frozen=True, slots=True, repr=False)
class Algorithm:
    """The ways to split a node by its dimensions; prints as its annotation and a line for each."""

    node: PolicyNode
    bound: BoundDimop

    def __str__(self) -> str:
        return "\n".join([str(self.bound), *(f"  {way}" for way in self.ways())])

    def __repr__(self) -> str:
        return f"<{self.bound} of {self.node}>"

    def ways(self) -> list[Way]:
        """Each way to split; two of them may name the same split, by different inputs."""
        return [self._way(idx, dim) for idx, dim in self.bound.algorithms()]

    def _way(self, idx: int, dim: int) -> Way:
        identifier = self.bound.identifier(idx, dim)
        outputs = self.bound.flow(identifier).outputs
        partial = any(carry.kind == "partial" for carry in outputs)
        return Way(idx, dim, identifier, self.bound.length(identifier), partial)

    def identifier(self, idx: int, dim: int) -> str:
        """What a split of dimension ``dim`` of input ``idx`` splits. Raises AnnotationError."""
        inputs = self.node.inputs
        if not 0 <= idx < len(inputs):
            raise AnnotationError(f"idx={idx} is none of its {len(inputs)} inputs")
        rank = len(inputs[idx].shape)
        if not -rank <= dim < rank:
            raise AnnotationError(f"dim={dim} is none of the {rank} dimensions of input {idx}")
        return self.bound.identifier(idx, dim)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SubNode:
    """A part of a node.

    ``place`` has its number and the number of all parts, a pair for each time the node was split.
    """

    node: PolicyNode
    part: BoundPart
    cuts: Mapping[str, Cut]
    place: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"part {', '.join(f'{i} of {num}' for i, num in self.place)} of {self.node}"

    def __repr__(self) -> str:
        return f"<{self}>"

    @property
    def name(self) -> str:
        """As of the node."""
        return self.node.name

    @property
    def inputs(self) -> tuple[Slice | None, ...]:
        """The slice of each input; None where only the dtype is read."""
        return self.part.inputs

    @property
    def outputs(self) -> tuple[Slice | None, ...]:
        """The slice of each output, and which term of a sum it is where it is one."""
        return self.part.outputs

    def algorithm(self, tag: str = "dim") -> Algorithm | None:
        """As of the node: the ways to split the part again."""
        return self.node.algorithm(tag)


Item = PolicyNode | SubNode
"""What can be partitioned and assigned."""


def whole_of(item: Item) -> PolicyNode:
    """The node that an item is, or is a part of."""
    return item.node if isinstance(item, SubNode) else item


def split(item: Item, algo: Algorithm, identifier: str, num: int) -> tuple[SubNode, ...]:
    """An item in ``num`` parts, as even as can be, larger ones first. Raises AnnotationError."""
    before = item.cuts if isinstance(item, SubNode) else {}
    place = item.place if isinstance(item, SubNode) else ()
    if identifier in before:
        pieces = before[identifier].cut(num)
    else:
        pieces = even_cuts(algo.bound.length(identifier), num)
    parts = []
    for index, piece in enumerate(pieces):
        cuts = {**before, identifier: piece}
        parts.append(SubNode(algo.node, algo.bound.part(cuts), cuts, (*place, (index, num))))
    return tuple(parts)
