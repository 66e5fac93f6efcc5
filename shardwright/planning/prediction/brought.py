"""What is kept of values that communication brought: copies of their own, beside what was made.

Comes in: what nodes' backwards read, by which views they came to it, in how many parts values are,
and what communication brought. Goes out: `Pairs`. What always holds: a row stands for the tensor
that views of it lie in, which is what was brought last on the way, or else what was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.planning.prediction.source import Integers, Pairs, Ways


def with_brought(
    kept: Pairs, ways: Ways, parts: Integers, fetched: Sequence[tuple[int, int, float]]
) -> Pairs:
    """What is kept, where ``fetched`` came by communication: value, the node that reads it, bytes.

    What other nodes read of a value in the same size is what was brought, if the value was made in
    another, or whole: then in terms of a sum.
    """
    if not fetched or not len(ways.row):
        return kept
    read, made = ways.readings.pairs(parts), ways.made.pairs(parts)
    came = Pairs.of(fetched)
    other = (read.size != made.size) | (read.size == ways.readings.nbytes)
    hit = np.isin(_mark(read.number, read.node), _mark(came.number, came.node)) | (
        other & np.isin(_tensor(read), _tensor(came))
    )
    rows, nearest = np.unique(ways.row[hit], return_index=True)
    chosen = np.flatnonzero(hit)[nearest]
    _, tensors = np.unique(_tensor(read)[chosen], return_inverse=True)
    number, size = kept.number.copy(), kept.size.copy()
    number[rows] = kept.number.max(initial=0) + 1 + tensors
    size[rows] = read.size[chosen]
    return kept._replace(number=number, size=size)


def _mark(number: Integers, node: Integers) -> Integers:
    return number * (1 << 32) + node


def _tensor(pairs: Pairs) -> NDArray[Any]:
    """A number for a value in a size."""
    return pairs.number + 1j * pairs.size
