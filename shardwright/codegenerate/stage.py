"""What code is written from: one graph a partition, and what enters and leaves it.

A stage's graph is valid; its nodes are ATen calls, registered operators and collectives; its
``inputs`` are the values of ``stage.inputs`` and its ``outputs`` those of ``stage.outputs``, in the
same order. A port that leaves one stage and enters another has one name in both. A stored value of
``graph.updates`` stands in no other partition. Of a training step a Program is the forward: inputs
that only the rest reads (``lr``) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.clusters import Mesh
from shardwright.ir import IRGraph
from shardwright.sharding.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that enters or leaves a stage.

    name
        That of the model's input or output; of any other tensor the scope of the module that makes
        it and its name there, ``transformer.h.5/add_1``. Unique in the program.
    value
        Its id in the stage's graph.
    """

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What one slot does of one partition.

    name
        The class's: ``Stage0``.
    inputs, outputs
        Sorted by name, each once.
    index
        The slot's place in the partition's mesh.
    mesh
        The partition's mesh, where its work is split.
    slices
        Stored values that are slices of the model's, by their names in the graph, which say where
        they stand in the stage: the model's name, the range of each dimension, and the shape of
        the whole. In the graph they have no placements; parts of one tensor have names of their
        own, ``weight_0``.
    """

    name: str
    graph: IRGraph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    index: int = 0
    mesh: Mesh | None = None
    slices: Mapping[str, tuple[str, Ranges, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """A model in partitions, topologically ordered.

    partitions
        For each, the stages of its slots, in the order of its mesh.
    inputs, outputs
        The ports' names of the model's tensors, in the model's flat order; an output may be the
        name of an input or stand twice.
    training
        Whether the model was captured in training mode.
    notes
        In words, where the partitions are not what the plan says.
    """

    name: str
    partitions: tuple[tuple[Stage, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    training: bool = False
    notes: tuple[str, ...] = ()
