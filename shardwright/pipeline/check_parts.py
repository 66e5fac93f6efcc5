"""Rules of constants that are parts of one stored tensor: together they are what was stored.

A part may be there several times, on several devices: a copy. Distinct parts tile the stored tensor
once or, where several operators cut it in their own ways, evenly often: each element is in as many
of them as any other. Where the file says the whole's shape, they make up all of it; a program that
uses some of a stored tensor leaves the shape out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from shardwright.pipeline.check_tensors import format_ranges
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import Document, ParamValue, Placements, TensorInfo


def check_parts(document: Document, _: Connections) -> None:
    """Each stored tensor's parts go together, and have one shape of the whole."""
    for (path, name), values in stored_wholes(document.tensors).items():
        shapes = {value.shape for value in values.values()}
        parts = [*{value.placements: None for value in values.values()}]
        (shape,) = shapes if len(shapes) == 1 else (None,)
        if len(shapes) > 1 or not are_parts(parts, shape):
            whole = "all of it" if shape is None else f"the whole of shape {list(shape)}"
            found = "; ".join(map(format_ranges, parts[:8])) + ("; …" if len(parts) > 8 else "")
            raise broken(
                "constant-parts",
                f"the parts {found} of {name!r} in {path!r} do not make up {whole}: each element "
                "must be in as many of them as any other, and the shape the same in all; a file "
                "that uses some of a stored tensor leaves value.shape out",
                tensor=next(reversed(values)),
            )


def stored_wholes(
    tensors: Mapping[str, TensorInfo],
) -> dict[tuple[str, str], dict[str, ParamValue]]:
    """The values of constants by tensor name, for each path and name of what is stored."""
    found: dict[tuple[str, str], dict[str, ParamValue]] = {}
    for tensor, info in tensors.items():
        if info.value is not None:
            key = (info.value.path, info.value.name)
            found.setdefault(key, {})[tensor] = info.value
    return found


def are_parts(parts: Sequence[Placements], shape: Sequence[int] | None) -> bool:
    """Whether each element is in equally many of distinct parts; with a ``shape``, all elements."""
    if len({len(part) for part in parts}) != 1:
        return False
    box = None if shape is None else tuple((0, size) for size in shape)
    if len(parts) == 1:
        return box in (None, parts[0])
    cuts = [sorted({end for part in parts for end in part[dim]}) for dim in range(len(parts[0]))]
    if math.prod(map(len, cuts)) > _MOST_CELLS:
        return False
    counts = Counter(cell for part in parts for cell in _cells(part, cuts))
    whole = box is None or counts.keys() == {*_cells(box, cuts)}
    inside = box is None or all(
        not row or (row[0], row[-1]) == ends for row, ends in zip(cuts, box, strict=True)
    )
    return whole and inside and len({*counts.values()}) <= 1


_MOST_CELLS = 1 << 20
"""A thousand parts along each of two dimensions; a file may ask for no more work than that."""


def _cells(part: Placements, cuts: Sequence[list[int]]) -> Iterator[tuple[int, ...]]:
    """The cells of the grid of ``cuts`` that a part is made of, by where they begin."""
    return product(
        *(
            [cut for cut in row if start <= cut < end]
            for (start, end), row in zip(part, cuts, strict=True)
        )
    )
