"""What the search for splits asks of a graph again and again, gathered once.

Comes in: a forward view. Goes out: an `Outline`: which nodes do the same (by structural hashing,
so that equal layers are looked at once), who reads each value, and which values a gradient goes
through. What always holds: nodes of one kind have equal operators, attributes, shapes and dtypes.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.ir import IRGraph
from shardwright.ir.repeats import fingerprint
from shardwright.ops.bound import BoundDimop
from shardwright.ops.catalog import dimop_of

KEPT = 8
"""How many graphs' outlines are kept: a search asks the same few again and again."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A graph's nodes by kind, and its values by who makes and reads them.

    kinds
        The kind of each node; ``bounds`` has an entry a kind.
    readers
        By value id: the position and input number of each read, in order.
    makers
        By value id: the position of the node that makes it.
    trained, required
        Parameters that are trained, and all values that their gradients go through.
    losses
        Results where gradients begin: numbers, or all results where there is none.
    has_gradient
        Of each node, whether it makes what has a gradient, so that it gives one to what it reads.
    """

    view: IRGraph
    kinds: tuple[int, ...]
    bounds: tuple[BoundDimop | None, ...]
    readers: dict[int, list[tuple[int, int]]]
    makers: dict[int, int]
    trained: frozenset[int]
    required: frozenset[int]
    losses: frozenset[int]
    has_gradient: tuple[bool, ...]

    def bound(self, position: int) -> BoundDimop | None:
        """The annotation of a node, None where it has none."""
        return self.bounds[self.kinds[position]]


class _Known(NamedTuple):
    """A graph whose outline was made, and how many nodes it had then."""

    graph: weakref.ref[IRGraph]
    nodes: int
    outline: Outline


_outlines: dict[int, _Known] = {}
"""By the graph's id in memory. None keeps the graph alive, or the tensors of its stored values."""


def outline_of(view: IRGraph) -> Outline:
    """The outline of a graph that is complete."""
    known = _outlines.get(id(view))
    if known is not None and known.graph() is view and known.nodes == len(view.nodes):
        return known.outline
    made = _outline(view)
    while len(_outlines) >= KEPT:
        del _outlines[next(iter(_outlines))]
    _outlines[id(view)] = _Known(weakref.ref(view), len(view.nodes), made)
    return made


def _outline(view: IRGraph) -> Outline:
    trained = trained_parameters(view)
    required = frozenset(needing_gradients(view, trained))
    numbers: dict[object, int] = {}
    kinds, bounds = [], []
    readers: dict[int, list[tuple[int, int]]] = {}
    makers: dict[int, int] = {}
    for position, node in enumerate(view.nodes):
        key = fingerprint(view, node), tuple(v in required for v in node.inputs)
        if key not in numbers:
            numbers[key] = len(numbers)
            bounds.append(dimop_of(view, node))
        kinds.append(numbers[key])
        for index, value_id in enumerate(node.inputs):
            readers.setdefault(value_id, []).append((position, index))
        makers |= dict.fromkeys(node.outputs, position)
    return Outline(
        replace(view, tensors={}),
        tuple(kinds),
        tuple(bounds),
        readers,
        makers,
        trained,
        required,
        _losses(view, required),
        tuple(not required.isdisjoint(node.outputs) for node in view.nodes),
    )


def _losses(view: IRGraph, required: frozenset[int]) -> frozenset[int]:
    ends = [value_id for value_id in view.outputs if value_id in required]
    return frozenset([v for v in ends if view.values[v].numel == 1] or ends)
