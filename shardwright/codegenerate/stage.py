"""What code is written from: one graph a partition, and what enters and leaves it.

`Program` is the whole: its partitions in order, each a `Stage` a slot of its mesh (one, where
nothing in it is split). What always holds: a stage's graph is a valid IRGraph whose nodes are ATen
calls, registered operators, and collectives (`shardwright.codegenerate.splitting.collectives`); its
``inputs`` are the values of ``stage.inputs`` and its ``outputs`` those of ``stage.outputs``, in the
same order; a port that leaves one stage and enters another has one name in both. A stored value of
``graph.updates`` stands in no other partition.

Of a training step a Program is the forward: inputs that only the rest reads (``lr``) are left out
of ``inputs`` and ``in_structure``, and where the rest makes an output, ``out_structure`` has None.
A scope's class is ``""`` where it is not known (a program from a file): then it may be a layer of
torch.nn; a class without a dot is a plain name, made from the module's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.clusters import Mesh
from shardwright.ir import IRGraph
from shardwright.ir.structure import Arguments, Tree
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
class Program:
    """A model in partitions, topologically ordered.

    partitions
        For each, the stages of its slots, in the order of its mesh.
    inputs, outputs
        The ports' names of the model's tensors, in the model's flat order; an output may be the
        name of an input or stand twice.
    in_structure, out_structure
        How flat tensors fold back into the model's arguments and result.
    training
        Whether the model was captured in training mode.
    loss
        Of a training step, the output that is differentiated, by its port's name; None of a model,
        or where a file does not say.
    notes
        In words, where the partitions are not what the plan says.
    """

    name: str
    partitions: tuple[tuple[Stage, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_structure: Arguments | None = None
    out_structure: Tree | None = None
    training: bool = False
    loss: str | None = None
    notes: tuple[str, ...] = ()
