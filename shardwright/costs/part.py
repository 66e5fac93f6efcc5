"""How much of a node one slot does where several share it.

A split does not touch all of a node's tensors: the weights of a layer whose rows are dealt out, and
their gradients, are whole on every slot. So each tensor of a part has its own shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from shardwright.ir import IRGraph, IRNode

Shape = tuple[int, ...]


class Part(NamedTuple):
    """The largest part of a node's work.

    work
        How many times it goes into all of the work.
    shapes
        Those of what a slot has of each input, then of each output; none where it has all of them.
    """

    work: float = 1.0
    shapes: tuple[Shape, ...] = ()

    def shapes_of(self, graph: IRGraph, node: IRNode) -> Mapping[int, Shape]:
        """The shape of what a slot has of each value; of one read twice the larger piece."""
        values = (*node.inputs, *node.outputs)
        if not self.shapes:
            return {value_id: graph.values[value_id].shape for value_id in values}
        found: dict[int, Shape] = {}
        for value_id, shape in zip(values, self.shapes, strict=True):
            found[value_id] = max(shape, found.get(value_id, shape), key=math.prod)
        return found


WHOLE = Part()
