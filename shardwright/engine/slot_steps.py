"""A slot's supertasks as data: what each reads, makes and overwrites, and when tensors are dead.

In comes a checked document and a slot's name; out come `SlotStep`s in file order. The runtime adds
programs and connections to them, the simulator durations and sizes.

What always holds: a slot knows only its own tensors; each step says which tensors nothing needs
after it in a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.engine.overwriting import Overwriting, overwriting
from shardwright.engine.replacement import Replacements, replacements
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.rules import COMPUTE_KINDS
from shardwright.pipeline.schema import Document, TensorInfo

Does = Literal["compute", "communicate", "relay", "zero", "copy", "stack"]
"""What a step does. The last three stand in no file: accumulators are set to zero, new contents
copied into constants, outputs of microbatches put together; a ``relay`` brings an output to another
slot."""


@dataclass(frozen=True, slots=True)
class SlotStep:
    """A supertask of a slot, or work that stands in no file.

    group
        A communication's; None where the step computes.
    dead
        Tensors of the call that no later step needs.
    starts
        Whether it has another program for the first microbatch, where accumulators are zeros.
    writes
        Constants that it overwrites.
    sharing
        Outputs that may lie in the memory of constants which change, and those constants.
    """

    task: str
    does: Does
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    group: str | None = None
    dead: tuple[str, ...] = ()
    starts: bool = False
    writes: tuple[str, ...] = ()
    sharing: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """Whether others take part."""
        return self.group is not None


@dataclass(frozen=True, slots=True)
class SlotSteps:
    """A slot's steps, what it has, and what it gives.

    constants
        The constants that it reads.
    outputs
        The pipeline outputs that are made here.
    replaces
        Produced tensor to the constant that it becomes; in a call, when that is over.
    overwriting
        What each supertask that computes does to memory.
    replacements
        Which constants change in a training step, and where.
    """

    slot: str
    steps: tuple[SlotStep, ...]
    constants: Mapping[str, TensorInfo]
    outputs: tuple[str, ...]
    replaces: Mapping[str, str]
    overwriting: Mapping[str, Overwriting]
    replacements: Replacements = field(default_factory=Replacements)


def constants_of(
    document: Document, slot: str, connections: Connections | None = None
) -> dict[str, TensorInfo]:
    """The constants that a slot's supertasks read, by name."""
    order = (connections or connect(document)).order[slot]
    tasks = (document.supertasks[name] for name in order)
    return {
        name: document.tensors[name]
        for task in tasks
        for name in task.inputs
        if document.tensors[name].is_constant
    }


def slot_steps(
    document: Document,
    slot: str,
    graphs: TaskGraphs | None = None,
    connections: Connections | None = None,
) -> SlotSteps:
    """The steps of a slot. Raises GraphError where a graph is none."""
    connections = connections or connect(document)
    constants = constants_of(document, slot, connections)
    outputs = tuple(
        tensor
        for task in connections.ends["output"]
        for tensor in document.supertasks[task].inputs
        if connections.devices[tensor] == slot
    )
    replaces = document.training.replaces if document.training is not None else {}
    own = {new: old for new, old in replaces.items() if connections.devices[new] == slot}
    order, tasks = connections.order[slot], document.supertasks
    computing = [task for task in order if tasks[task].kind in COMPUTE_KINDS]
    found = replacements(document, slot, connections)
    memory = overwriting(document, found, computing, graphs or TaskGraphs(document), connections)
    steps = _steps(document, connections, slot, {*outputs, *own, *constants}, memory)
    return SlotSteps(slot, steps, constants, outputs, own, memory, found)


def _steps(
    document: Document,
    connections: Connections,
    slot: str,
    kept: set[str],
    memory: Mapping[str, Overwriting],
) -> tuple[SlotStep, ...]:
    steps: list[SlotStep] = []
    alive = set(kept)
    for task in reversed(connections.order[slot]):
        spec = document.supertasks[task]
        used = tuple(dict.fromkeys((*spec.inputs, *spec.outputs)))
        dead = tuple(tensor for tensor in used if tensor not in alive)
        found = memory.get(task, Overwriting())
        steps.append(
            SlotStep(
                task,
                "compute" if spec.group is None else "communicate",
                spec.inputs,
                spec.outputs,
                spec.group,
                dead,
                bool(found.zeros),
                found.writes,
                found.sharing,
            )
        )
        alive.update(used)
    return tuple(reversed(steps))


# --- occurrences ----------------------------------------------------------------------------------
#
# An occurrence is a step on one microbatch, or once a step. Its tensors are in spaces: one a
# microbatch, one for the step, one that is the slot's constants.


Place = tuple[int, str]
"""A tensor: its space, and its name."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A step, once.

    index, entry
        Its number among all, and that of the agenda's entry that says where the worker is.
    reads, space
        Where its inputs are, and where its outputs go: the microbatch's space, or the step's.
    first
        Whether accumulators count as zeros, whatever they hold.
    drops
        Tensors that nothing reads after it.
    after
        Occurrences of other turns that must be done before it begins.
    """

    index: int
    entry: int
    step: SlotStep
    reads: tuple[Place, ...]
    space: int
    first: bool = False
    drops: tuple[Place, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A turn's occurrences; turns whose ``action`` is near may be under way together."""

    action: int
    occurrences: tuple[Occurrence, ...]


def occurrences_of(turns: Iterable[PlannedTurn]) -> Iterator[Occurrence]:
    """All occurrences of turns, in order."""
    for turn in turns:
        yield from turn.occurrences
