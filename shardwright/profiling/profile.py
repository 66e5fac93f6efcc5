"""What each layer of a program takes, as it was measured.

Comes in: what `profile` measured. Goes out: a `Profile`, which prints as a table, is a file, and is
what planners take for measured costs. What always holds: layers stand in the order of the graph,
their nodes are all its forward nodes, each once; equal layers share one measurement.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shardwright.profiling.timing import Timing

MEGABYTE = 1e6
MILLISECOND = 1e-3


class Layer(msgspec.Struct, frozen=True):
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


class Measurement(msgspec.Struct, frozen=True):
    """A `Timing`, and the calls that were made in it, one key for each node in order."""

    timing: Timing
    calls: tuple[str, ...]


class Profile(msgspec.Struct, frozen=True):
    """What each layer of a graph takes on a device.

    graph
        The graph's name.
    device
        The model of the device, as it calls itself.
    torch_version, threads
        What it was measured with.
    recompute
        Whether backward runs the forward again, instead of keeping what it needs.
    layers
        In the order of the graph.
    measurements
        By key: what was measured, each distinct layer once.
    """

    graph: str
    device: str
    torch_version: str
    threads: int
    recompute: bool
    layers: tuple[Layer, ...]
    measurements: Mapping[str, Measurement]
