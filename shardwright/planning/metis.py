"""Partitions by METIS: the forward as an undirected graph, cut in parts of equal weight.

METIS (Karypis and Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning Irregular
Graphs", 1998) knows no directions: its parts are numbered as data flows, their nodes put in an
order in which they can be done, and that order is cut anew; each move that this takes is a note.
Weights are any numbers that are not negative; METIS counts in whole ones, so others are scaled.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import pymetis

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.tensor_meta import count_text
from shardwright.planning.policy import PolicyNode
from shardwright.planning.stages import contiguous, recut
from shardwright.planning.workload import SentValue, Shares, Workload

NodeWeight = Callable[[PolicyNode], float]
EdgeWeight = Callable[[PolicyNode, PolicyNode], float]
Weighable = TypeVar("Weighable")
"""Nodes or layers; their text names them in messages."""

OPTIONS: Mapping[str, tuple[float, float]] = {
    "compress": (0, 1),
    "contig": (0, 1),
    "minconn": (0, 1),
    "ncuts": (1, math.inf),
    "niter": (1, math.inf),
    "no2hop": (0, 1),
    "pfactor": (0, math.inf),
    "seed": (-math.inf, math.inf),
    "ufactor": (1, math.inf),
}
"""METIS's options that a partition in k parts knows, each with its least and its greatest value."""
NAMED = 3
"""How many of the nodes that were moved a note names."""
LARGEST_TOTAL = 10**9
"""METIS adds weights in 32 bits."""

Edge = tuple[int, int]


def metis_stages(
    workload: Workload,
    count: int,
    weights: Sequence[float],
    edges: Mapping[Edge, float],
    options: Mapping[str, int],
    cut: Callable[[Workload], list[int]],
    merit: Callable[[Shares], float],
) -> tuple[list[int], list[str]]:
    """So many stages near to METIS's parts, and notes of what was moved. Raises PlanError.

    ``edges`` are the weights of pairs (maker, reader). Parts become stages by a contiguous ``cut``
    of the nodes part after part, or in their own order, whichever has the smaller ``merit``.
    """
    parts = _parts(workload, count, weights, edges, options)
    numbers = _numbers(parts, count)
    wanted = [numbers[part] for part in parts]
    stages = list(wanted)
    for node, makers in enumerate(workload.predecessors):
        stages[node] = max([stages[node], *(stages[maker] for maker in makers)])
    order = sorted(range(len(stages)), key=lambda node: (stages[node], node))
    found = recut(workload, order, cut, merit)
    return found, [*_numbered(numbers, parts), *_moved(workload, wanted, found)]


def _parts(
    workload: Workload,
    count: int,
    weights: Sequence[float],
    edges: Mapping[Edge, float],
    options: Mapping[str, int],
) -> Sequence[int]:
    """The part of each node, as METIS numbers them."""
    graph = _adjacency(len(workload), edges)
    try:
        with unheard():  # METIS tells of parts that it finds empty
            _, parts = pymetis.part_graph(
                count,
                graph,
                vweights=_whole(weights, least=0),
                eweights=_edge_list(graph, edges),
                options=_options(options),
            )
    except RuntimeError as error:
        given = ", ".join(f"{name}={value}" for name, value in options.items()) or "its defaults"
        raise PlanError(f"METIS does not take {given}: {error}; leave options out") from None
    return list(parts)


def _numbers(parts: Sequence[int], count: int) -> dict[int, int]:
    """The number of each part as a stage, in the order of the middles of their nodes."""
    places: list[list[int]] = [[] for _ in range(count)]
    for node, part in enumerate(parts):
        places[part].append(node)
    middles = [sum(nodes) / max(len(nodes), 1) for nodes in places]
    return {part: at for at, part in enumerate(sorted(range(count), key=middles.__getitem__))}


def _numbered(numbers: Mapping[int, int], parts: Sequence[int]) -> list[str]:
    """A note of the order of parts, where it is another than that of their numbers."""
    order = [part for part in numbers if part in parts]
    text = ", ".join(map(str, order))
    return [f"parts numbered anew, as data flows: {text}"] if order != sorted(order) else []


def _moved(workload: Workload, before: Sequence[int], after: Sequence[int]) -> list[str]:
    """A note of the nodes that are in another stage than before, where there are any."""
    moved = [node for node, stage in enumerate(after) if stage != before[node]]
    if not moved:
        return []
    names = ", ".join(workload.names[node] for node in moved[:NAMED])
    more = ", …" if len(moved) > NAMED else ""
    return [
        f"moved {count_text(len(moved), 'node')} ({names}{more}) to where the best contiguous cut "
        "has them"
    ]


def weigh_nodes(
    nodes: Sequence[Weighable],
    function: Callable[[Weighable], float] | None,
) -> list[float]:
    """The weight of each node, 1 by default and where none has any.

    Raises PlanError for what is no weight.
    """
    name = "node_weight_function"
    weights = [_checked(function(node), name, str(node)) for node in nodes] if function else []
    return weights if any(weights) else [1.0] * len(nodes)


def weigh_edges(
    nodes: Sequence[Weighable],
    workload: Workload,
    function: Callable[[Weighable, Weighable], float] | None,
) -> dict[Edge, float]:
    """The weight of each edge, 1 by default. Raises PlanError for what is no weight."""
    edges = [(a, b) for a, readers in enumerate(workload.successors) for b in readers]
    if function is None:
        return dict.fromkeys(edges, 1.0)
    return {
        (a, b): _checked(
            function(nodes[a], nodes[b]),
            "edge_weight_function",
            f"the edge from {nodes[a]} to {nodes[b]}",
        )
        for a, b in edges
    }


def policy_nodes(view: IRGraph) -> list[PolicyNode]:
    """What weight functions see of the nodes of a forward."""
    return [PolicyNode(i, node, view) for i, node in enumerate(view.nodes)]


def _checked(weight: Any, function: str, where: str) -> float:
    usable = isinstance(weight, Real) and math.isfinite(weight) and float(weight) >= 0
    if not usable or isinstance(weight, bool):
        raise PlanError(
            f"{function} gives {weight!r} for {where}; a weight is a finite number from 0 up"
        )
    return float(weight)


def check_options(options: Mapping[str, int]) -> None:
    """Raise PlanError for what is no option of METIS, or no value of it."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise PlanError(f"METIS has no option {name!r}; known are {', '.join(OPTIONS)}")
        if not isinstance(value, int):
            raise PlanError(f"METIS's option {name!r} is a whole number, found {value!r}")
        least, most = OPTIONS[name]
        if not least <= value <= most:
            expected = f"{least} or {most}" if most == 1 else f"a number from {least} up"
            raise PlanError(f"METIS's option {name!r} is {expected}, found {value}")


def _options(options: Mapping[str, int]) -> pymetis.Options:
    check_options(options)
    return pymetis.Options(**{"seed": 0, **{name: int(value) for name, value in options.items()}})


def _adjacency(count: int, edges: Mapping[Edge, float]) -> pymetis.CSRAdjacency:
    """Each node's neighbours, both ways."""
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for a, b in edges:
        neighbours[a].add(b)
        neighbours[b].add(a)
    starts, flat = [0], []
    for found in neighbours:
        flat += sorted(found)
        starts.append(len(flat))
    return pymetis.CSRAdjacency(starts, flat)


def _edge_list(graph: pymetis.CSRAdjacency, edges: Mapping[Edge, float]) -> list[int]:
    """The weight of each neighbour, in their order."""
    starts, flat = list(graph.adj_starts), list(graph.adjacent)
    weights = [
        edges[(a, b) if (a, b) in edges else (b, a)]
        for a, (start, stop) in enumerate(pairwise(starts))
        for b in flat[start:stop]
    ]
    return _whole(weights, least=1)


def _whole(weights: Sequence[float], least: int) -> list[int]:
    """Whole numbers in proportion to the weights, none below ``least``."""
    total = sum(weights)
    if not total:
        return [1] * len(weights)
    if all(weight == int(weight) for weight in weights) and total <= LARGEST_TOTAL:
        return [max(least, int(weight)) for weight in weights]
    scale = LARGEST_TOTAL / total
    return [max(least, round(weight * scale)) for weight in weights]


# --- output of C code -----------------------------------------------------------------------------


STDOUT = 1
"""The file descriptor that C code prints to, whatever `sys.stdout` is."""
_ONE_AT_A_TIME = Lock()
"""What the output was must be known."""


@contextmanager
def unheard() -> Iterator[None]:
    """Nothing that C code prints to the standard output is heard."""
    library = ctypes.CDLL(None)
    with _ONE_AT_A_TIME:
        library.fflush(None)
        kept = _duplicate(STDOUT)
        try:
            if kept is not None:
                with Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), STDOUT)
            yield
        finally:
            library.fflush(None)
            if kept is not None:
                os.dup2(kept, STDOUT)
                os.close(kept)


def _duplicate(descriptor: int) -> int | None:
    """Another descriptor of the same file; None where it is closed."""
    try:
        return os.dup(descriptor)
    except OSError:
        return None


# --- stages by weights ----------------------------------------------------------------------------
#
# Weights are all that counts; no stage weighs more than METIS allows if that can be.


BALANCE = 1.03
"""METIS's parts may weigh so much more than an even share; of cuts up to that, one with few edges
across is taken."""


def weighed_stages(
    workload: Workload,
    count: int,
    weights: Sequence[float],
    edges: Mapping[Edge, float],
    options: Mapping[str, int],
) -> tuple[list[int], list[str]]:
    """So many stages by weights, and notes of what was moved.

    Raises PlanError as `metis_stages` does.
    """
    factor = 1 + options["ufactor"] / 1000 if "ufactor" in options else BALANCE
    allowed = factor * sum(weights) / count
    return metis_stages(
        _weighed(workload, weights, edges),
        count,
        weights,
        edges,
        options,
        lambda nodes: contiguous(nodes, count, allowed=allowed),
        lambda shares: max(allowed, *shares.work),
    )


def _weighed(workload: Workload, weights: Sequence[float], edges: Mapping[Edge, float]) -> Workload:
    """The workload in which nodes and edges take what their weights say."""
    sent = tuple(SentValue(a, (b,), weight, 0) for (a, b), weight in edges.items())
    return replace(workload, seconds=tuple(weights), sent=sent, stored=())
