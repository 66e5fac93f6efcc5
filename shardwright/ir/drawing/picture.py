"""What a picture shows: boxes, groups of them, and what flows between.

A `Box` stands for nodes, a `Group` is drawn around boxes, an `Edge` has the bytes of all tensors
that some nodes make and others read. What always holds: every node of the graph is in one box; an
edge's bytes are those of the distinct values that its source makes and its target reads; ends are
the graph's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.ir.drawing.parts import Parts


@dataclass(frozen=True, slots=True)
class Box:
    """One node, a module, or equal ones in one.

    name
        Box names are ``b0``, ``b1``, … in the order of the picture.
    title, path
        The operator, or the module's class; and where in the model it is.
    count
        Of how many equal ones in a row it is.
    nodes
        Ids of all the nodes that it stands for.
    types
        What it gives to others: types of tensors, each once.
    milliseconds
        Of all of its nodes; None where no time is known of any.
    stored
        Bytes of the distinct stored values that its nodes read.
    tip
        What a viewer shows of it where the pointer rests.
    """

    name: str
    title: str
    path: str
    count: int
    part: int | None
    nodes: tuple[int, ...]
    types: tuple[str, ...]
    milliseconds: float | None
    stored: int
    is_module: bool
    tip: str

    @property
    def boxes(self) -> Iterator[Box]:
        """Itself."""
        yield self


@dataclass(frozen=True, slots=True)
class Group:
    """What a frame is drawn around: an opened module, equal ones in one, or a part."""

    title: str
    path: str
    count: int
    part: int | None
    items: tuple[Box | Group, ...]
    is_part: bool = False

    @property
    def boxes(self) -> Iterator[Box]:
        """All boxes inside, in order."""
        return (box for item in self.items for box in item.boxes)


@dataclass(frozen=True, slots=True)
class End:
    """An input or an output of the graph, or several in one."""

    name: str
    title: str
    type: str
    is_input: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """Tensors that one end makes and another reads.

    sizes
        Bytes of each distinct tensor.
    crosses
        Whether it leads from one part to another.
    leads_back
        Whether it leads against the order of the picture: from a layer to the next, where both
        are drawn as one.
    """

    source: str
    target: str
    sizes: tuple[int, ...]
    crosses: bool
    leads_back: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn of a graph."""

    name: str
    caption: str
    parts: Parts
    items: tuple[Box | Group, ...]
    ends: tuple[End, ...]
    edges: tuple[Edge, ...]

    @property
    def boxes(self) -> list[Box]:
        """All boxes, in order."""
        return boxes_of(self.items)

    @property
    def groups(self) -> list[Group]:
        """All groups, outer ones first."""
        return list(_groups(self.items))


def boxes_of(items: Sequence[Box | Group]) -> list[Box]:
    """All boxes of items, in order."""
    return [box for item in items for box in item.boxes]


def _groups(items: Sequence[Box | Group]) -> Iterator[Group]:
    for item in items:
        if isinstance(item, Group):
            yield item
            yield from _groups(item.items)
