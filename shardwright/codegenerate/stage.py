"""What code is written from: one graph a partition, and what enters and leaves it.

`Program` is the whole: its partitions in order, each a `Stage` a slot of its mesh (one, where
nothing in it is split). What always holds: a stage's graph is a valid IRGraph whose nodes are ATen
calls, registered operators, and the collectives of `shardwright.codegenerate.collectives`; its
``inputs`` are the values of ``stage.inputs`` and its ``outputs`` those of ``stage.outputs``, in the
same order; a port that leaves one stage and enters another has one name in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir import IRGraph
from shardwright.ir.structure import Arguments, Tree


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
    """

    name: str
    graph: IRGraph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    index: int = 0


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
    """

    name: str
    partitions: tuple[tuple[Stage, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_structure: Arguments | None = None
    out_structure: Tree | None = None
    training: bool = False
