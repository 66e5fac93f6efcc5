"""One spread of several: each node as it is on the mesh of its own rank.

Comes in: spreads of the same forward over different meshes, and which of them each node is in. Goes
out: a `Spread`. What always holds: a row that says what a node reads is that of the node's spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwright.planning.prediction.source import Floats, Integers, Pairs
from shardwright.planning.prediction.spread import Spread


def merged(spreads: Sequence[Spread], which: Sequence[int]) -> Spread:
    """A forward whose nodes are in these of the spreads; its axes are those of the first."""
    first, at = spreads[0], np.asarray(which, dtype=np.int64)
    if not spreads[1:]:
        return first
    nodes = np.arange(len(at))

    def of_nodes(name: str) -> Floats:
        return _taken(spreads, name, at, nodes)

    def of_pairs(name: str) -> Pairs:
        pairs: Pairs = getattr(first, name)
        rows = at[pairs.node], np.arange(len(pairs.node))
        numbers, sizes = (
            np.stack([getattr(getattr(spread, name), column) for spread in spreads])
            for column in ("number", "size")
        )
        return pairs._replace(number=numbers[rows], size=sizes[rows])

    return replace(
        first,
        splits=[spreads[found].splits[i] for i, found in enumerate(which)],
        forward=of_nodes("forward"),
        backward=of_nodes("backward"),
        weight=of_nodes("weight"),
        once=of_nodes("once"),
        gathered=of_nodes("gathered"),
        saved=of_pairs("saved"),
        waiting=of_pairs("waiting"),
        crossing=_brought(spreads, at, "crossing"),
        stored=of_pairs("stored"),
        gradient=_taken(spreads, "gradient", at, first.stored.node),
        state=_taken(spreads, "state", at, first.stored.node),
        passed=of_pairs("passed"),
        again=of_nodes("again"),
        working=of_nodes("working"),
        fetched=_brought(spreads, at, "fetched"),
    )


def _taken(spreads: Sequence[Spread], name: str, which: Integers, nodes: Integers) -> Floats:
    """Of rows that belong to these nodes each from its node's spread."""
    rows = np.stack([getattr(spread, name) for spread in spreads])
    return np.asarray(rows[which[nodes], np.arange(len(nodes))], dtype=np.float64)


def _brought(spreads: Sequence[Spread], which: Integers, name: str) -> Pairs:
    """What communication brings differs from mesh to mesh, so there are other rows in each."""
    every: list[Pairs] = [getattr(spread, name) for spread in spreads]
    found = [
        Pairs(*(column[which[pairs.node] == number] for column in pairs))
        for number, pairs in enumerate(every)
    ]
    return Pairs(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
