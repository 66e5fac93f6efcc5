"""One layer of a profile, in the seed's names and units; equal ones together for tables and charts.

Times are in ms and sizes in MB (1e6 bytes) here, and nowhere below.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

MEGABYTE = 1e6
"""Bytes."""


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node or a block of nodes, run alone (seed 001, Model Profiling).

    name
        The module's path, or the name of what the node makes.
    kind
        The module's class, or the operator.
    nodes
        Ids of the nodes, in the order of the graph.
    measurement
        Which measurement of the profile the numbers are from; equal layers share it.
    forward_time, backward_time
        Milliseconds, medians after warm-up. The backward gives the gradients of parameters and of
        what nodes made; where it recomputes, the forward counts in it again.
    memory_forward, memory_backward
        MB (1e6 bytes) that a run needs at most, beyond its inputs and parameters; of the backward,
        beyond what its forward has left.
    layer_size, input_size, output_size
        MB of the stored tensors that the layer reads, of its other inputs, and of its outputs.
    """

    name: str
    kind: str
    nodes: tuple[int, ...]
    measurement: str
    forward_time: float
    backward_time: float
    memory_forward: float
    memory_backward: float
    layer_size: float
    input_size: float
    output_size: float

    @property
    def cuda_memory_forward(self) -> float:
        """`memory_forward`, under the seed's name."""
        return self.memory_forward

    @property
    def cuda_memory_backward(self) -> float:
        """`memory_backward`, under the seed's name."""
        return self.memory_backward


@dataclass(frozen=True, slots=True)
class Equals:
    """Layers that share one measurement: the first, and how many there are."""

    first: Layer
    count: int

    @property
    def name(self) -> str:
        """The first one's name, with dots where there are more."""
        return self.first.name if self.count == 1 else f"{self.first.name} …"


def equals(layers: Iterable[Layer]) -> list[Equals]:
    """Layers by measurement, in the order of the first of each."""
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(layer.measurement, []).append(layer)
    return [Equals(same[0], len(same)) for same in found.values()]
