"""Plan: on which device slots each node of one graph runs, and how it is split over them.

Each node has an `Assignment`: a mesh of slots and, for each axis of the mesh, the identifier of
the operator's dimension annotation that the axis splits, or None where every slot along the axis
does the same. A pipeline stage is a mesh of one slot; a lookup table cut over all slots, or a
layer under tensor parallelism, is a node split along an axis.

A plan belongs to the graph it was made for: it holds the graph's fingerprint, and `build` refuses
another. Where it says that fused products are taken apart (`unfuse`), its nodes are those of the
graph after that.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shardwright.atomic import read_whole, replacing
from shardwright.clusters import Cluster, Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.repeats import fingerprint
from shardwright.ir.tensor_meta import count_text
from shardwright.planning.copies import Copy
from shardwright.planning.explanation import Explanation
from shardwright.planning.predicted import Prediction
from shardwright.schedules import make_schedule, simulate
from shardwright.sharding.strategy import Split as Split
from shardwright.sharding.strategy import Terms as Terms


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a node runs: a mesh, and what each of its axes splits."""

    mesh: Mesh
    splits: tuple[Split | Terms | None, ...] = ()

    @classmethod
    def whole(cls, mesh: Mesh) -> Assignment:
        """All of the node on every slot of the mesh."""
        return cls(mesh, (None,) * mesh.ndim)

    @classmethod
    def on(cls, device: str) -> Assignment:
        """All of the node on one slot."""
        return cls(Mesh((), (), (device,)))


class SlotLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one slot carries, estimated.

    ``work`` is in floating-point operations a run, ``stored_bytes`` counts each parameter and
    buffer of the slot once, ``received_bytes`` is what it lacks of the values it reads.
    """

    device: str
    nodes: int
    work: int
    stored_bytes: int
    received_bytes: int


class TrainingPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a training step is cut in time: microbatches, virtual stages, their schedule.

    ``placement`` is the pipeline rank of each virtual stage, ``slots`` the device slots of each
    pipeline rank, ``chunks`` how many virtual stages a rank has. ``stages`` is the virtual stage of
    each planned node, ``work`` what a microbatch's forward and backward take in each virtual stage,
    in floating-point operations, estimated.
    ``recompute`` says of which activations the backward keeps none (``none``, ``full``, or
    ``auto``, to keep within ``memory`` bytes a slot); with ``zero`` 1 the optimizer's state is
    split along the data axis.
    """

    microbatches: int
    schedule: str
    chunks: int
    placement: tuple[int, ...]
    slots: tuple[tuple[str, ...], ...]
    stages: tuple[int, ...]
    work: tuple[int, ...]
    recompute: str = "none"
    memory: int | None = None
    zero: int = 0

    def __str__(self) -> str:
        total = sum(self.work) or 1
        lines = [
            f"{count_text(self.microbatches, 'microbatch')}, {self.schedule}, "
            f"{count_text(len(self.slots), 'pipeline rank')} of "
            f"{count_text(self.chunks, 'stage')}, bubble {100 * self.bubble():.1f}%, "
            f"recompute {self.recompute}, zero {self.zero}"
        ]
        lines += [
            f"stage {stage} on {' '.join(self.slots[rank])}: "
            f"{count_text(self.stages.count(stage), 'node')}, "
            f"{100 * self.work[stage] / total:.1f}% of the work"
            for stage, rank in enumerate(self.placement)
        ]
        return "\n".join(lines)

    def bubble(self) -> float:
        """The fraction of a step that the pipeline's ranks wait, estimated, sends not counted."""
        schedule = make_schedule(
            self.schedule,
            ranks=len(self.slots),
            microbatches=self.microbatches,
            chunks=self.chunks,
        )
        third = [max(found, 1) / 3 for found in self.work]
        return simulate(schedule, forward=third, backward=third, weight=third).bubble


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Assignments, and the index of the assignment of each node in execution order.

    ``unfused`` are the positions, in the graph itself, of fused products that are taken apart
    before anything else. ``loads`` has an entry a slot; ``notes`` say in words what was decided
    and why. Of a training step the nodes are those of the forward (`planning.step`), and
    ``training`` says how it is cut in microbatches and stages. ``inputs`` are the graph's, with
    their types, and ``labels`` says of each node where it stands and what it does: for people who
    compare plans, and for messages. ``stages`` is the stage of each node of a model whose stages
    are no ranges of nodes: they are done one after another; a training step has its own. ``copies``
    are nodes that other stages do again (`planning.copies`), which count as nodes too.
    ``prediction`` is what the automatic planner expects of the plan, ``explanation`` why it is so.
    ``cluster`` is the machines that it is for: what their links cost decides by which collectives
    `build` brings values from one layout to another.
    """

    graph: str
    fingerprint: str
    policy: str
    devices: tuple[str, ...]
    assignments: tuple[Assignment, ...]
    nodes: tuple[int, ...]
    loads: tuple[SlotLoad, ...] = ()
    notes: tuple[str, ...] = ()
    unfused: tuple[int, ...] = ()
    training: TrainingPlan | None = None
    inputs: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()
    prediction: Prediction | None = None
    explanation: Explanation | None = None
    cluster: Cluster | None = None

    def __str__(self) -> str:
        work = sum(load.work for load in self.loads) or 1
        stored = sum(load.stored_bytes for load in self.loads) or 1
        lines = [f"plan for {self.graph}: {self.policy}, {count_text(len(self.devices), 'slot')}"]
        for load in self.loads:
            lines.append(
                f"  {load.device}: {count_text(load.nodes, 'node')}, "
                f"{100 * load.work / work:.1f}% of the work, "
                f"{load.stored_bytes / 1e6:.2f} MB stored "
                f"({100 * load.stored_bytes / stored:.1f}%), "
                f"receives {load.received_bytes / 1e6:.3f} MB"
            )
        if self.training is not None:
            lines += [f"  {line}" for line in str(self.training).splitlines()]
        if self.prediction is not None:
            lines.append(f"  predicted: {self.prediction.summary()}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def explain(self) -> str:
        """Why the plan is as it is: what it was compared with, each split, each slot's memory.

        Only the automatic planner compares; of another plan this is what it says of itself.
        """
        if self.explanation is None or self.prediction is None:
            return f"{self}\n  not compared with others: policy='auto' does that, and explains"
        said = [f"note: {note}" for note in self.notes]
        return "\n".join([self.explanation.text(self.prediction), *said])

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. Raises OSError as writing does."""
        write_plan(Path(path), self)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a file that `save` wrote. Raises PlanError.

        Whether it belongs to a graph is found out where it is used.
        """
        plan = read_plan(Path(path), cls)
        try:
            check_whole(plan)
        except PlanError as error:
            raise PlanError(f"{path}: {error}; plan again, or mend the file") from None
        return plan


def cluster_of(plan: Plan) -> Cluster:
    """The machines that a plan is for: this one's processes where it does not say."""
    return plan.cluster or Cluster((plan.devices,))


def assignments(plan: Plan, nodes: int) -> Iterator[Assignment]:
    """The assignment of each node in order. Raises PlanError where the plan lacks one."""
    if len(plan.nodes) != nodes:
        raise PlanError(f"the plan assigns {len(plan.nodes)} nodes, the graph has {nodes}")
    devices, checked = set(plan.devices), set[int]()
    for position, index in enumerate(plan.nodes):
        if not 0 <= index < len(plan.assignments):
            raise PlanError(f"node {position} has the assignment {index}, which the plan lacks")
        assignment = plan.assignments[index]
        if index not in checked and not _is_on(assignment, devices):
            raise PlanError(
                f"node {position} is assigned to {assignment.mesh} with "
                f"{len(assignment.splits)} splits; the plan's slots are {', '.join(plan.devices)}, "
                "and each axis of a mesh has one split or None"
            )
        checked.add(index)
        yield assignment


def _is_on(assignment: Assignment, devices: Collection[str]) -> bool:
    """Whether an assignment is to these devices, with one split or None an axis."""
    known = all(device in devices for device in assignment.mesh.devices)
    return known and len(assignment.splits) == assignment.mesh.ndim


def check_whole(plan: Plan) -> None:
    """Raise PlanError where a plan's parts do not fit each other, as one in an edited file may."""
    for _ in assignments(plan, len(plan.nodes)):
        pass
    if plan.stages and len(plan.stages) != len(plan.nodes):
        raise PlanError(f"stages has {len(plan.stages)} entries, expected {len(plan.nodes)}")
    if missing := set(plan.devices).difference(cluster_of(plan).devices):
        raise PlanError(f"devices names {min(missing)!r}, which cluster.hosts lacks")
    if plan.training is None:
        return
    training, stages = plan.training, len(plan.training.placement)
    counts = (
        ("stages", len(training.stages), len(plan.nodes)),
        ("work", len(training.work), stages),
    )
    for name, found, expected in counts:
        if found != expected:
            raise PlanError(f"training.{name} has {found} entries, expected {expected}")
    for name, numbers, limit in (
        ("stages", training.stages, stages),
        ("placement", training.placement, len(training.slots)),
    ):
        if wrong := [number for number in numbers if not 0 <= number < limit]:
            raise PlanError(f"training.{name} holds {wrong[0]}; expected numbers below {limit}")
    known = {slot for slots in training.slots for slot in slots}
    if unknown := known.difference(plan.devices):
        raise PlanError(f"training.slots names {min(unknown)!r}, which devices lacks")


def input_texts(graph: IRGraph) -> tuple[str, ...]:
    """The graph's inputs with their types: ``x f32[8, 128]``."""
    values = (graph.values[value_id] for value_id in graph.inputs)
    return tuple(
        f"{value.name} {value.dtype}[{', '.join(map(str, value.shape))}]" for value in values
    )


def label_of(node: IRNode) -> str:
    """Where a node stands in the model, and what it does: ``layers.0.up: linear``."""
    name = node.op.split(".")[1] if "." in node.op else node.op
    return f"{node.scope}: {name}" if node.scope else name


def fingerprint_graph(graph: IRGraph) -> str:
    """A hash of what a graph computes: operators, attributes, shapes, and how they connect.

    Dropout counts without its seed: a plan is good for any.
    """
    digest = hashlib.sha256()
    for value_id in graph.inputs:
        value = graph.values[value_id]
        digest.update(repr((value_id, value.shape, value.dtype)).encode())
    for node in graph.nodes:
        seeded = replace(node, attrs={**node.attrs, "seed": 0}) if node.op == DROPOUT else node
        digest.update(repr((fingerprint(graph, seeded), node.inputs, node.outputs)).encode())
    digest.update(repr((graph.outputs, graph.updates)).encode())
    return digest.hexdigest()[:16]


def check_belongs(plan: Plan, graph: IRGraph) -> None:
    """Raise PlanError where ``plan`` was made for another graph."""
    found = fingerprint_graph(graph)
    if found == plan.fingerprint:
        return
    message = (
        f"the plan was made for the graph {plan.graph!r} ({plan.fingerprint}), this is "
        f"{graph.name!r} ({found})"
    )
    inputs = input_texts(graph)
    if plan.inputs and plan.inputs != inputs:
        message += f"; its inputs were {', '.join(plan.inputs)}, here they are {', '.join(inputs)}"
        if plan.training is not None and plan.training.microbatches > 1:
            message += f", of one microbatch; the plan has {plan.training.microbatches}"
    raise PlanError(f"{message}; plan again for this graph")


# --- files ----------------------------------------------------------------------------------------
#
# What is read equals what was written; a file is there whole or not at all; what cannot be read is
# one PlanError that names the file, the place and what to do.


PLAN_VERSION = 1
"""Of the format; a file of a later version is refused."""

MAKE = "make one with Plan.save or shardwright plan -o"

P = TypeVar("P", bound=msgspec.Struct)


def write_plan(path: Path, plan: msgspec.Struct) -> None:
    """Write a plan. Raises PlanError where it holds what JSON cannot, WriteError."""
    fields: dict[str, Any] = {"version": PLAN_VERSION, **msgspec.to_builtins(plan)}
    _check_numbers(fields, "the plan")
    lines = (f"{json.dumps(name)}: {_text(value)}" for name, value in fields.items())
    with replacing(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_plan(path: Path, kind: type[P]) -> P:
    """The plan in a file. Raises PlanError."""
    fields = _fields(path)
    _check_version(path, fields.pop("version", None))
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where = f" at {place.rstrip('`').removeprefix('.')}" if place else ""
        raise PlanError(f"{path}{where}: {what}; plan again, or mend the file") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}; plan again, or mend the file") from None


def _fields(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_whole(path))
    except OSError as error:
        raise PlanError(f"no plan can be read from {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is no plan, or was cut short: {error}; {MAKE}") from None
    if isinstance(found, dict) and "supertasks" in found and "assignments" not in found:
        raise PlanError(f"{path} is a pipeline file, no plan: it is run, not planned with; {MAKE}")
    if not isinstance(found, dict):
        raise PlanError(f"{path} is no plan: it holds a {type(found).__name__}, not an object")
    return found


def _check_version(path: Path, version: Any) -> None:
    if type(version) is int and version > PLAN_VERSION:
        raise PlanError(
            f"{path} is a plan of version {version}, this shardwright reads {PLAN_VERSION}; "
            "upgrade shardwright, or plan again"
        )
    if type(version) is not int or version < 1:
        raise PlanError(
            f"{path} is no plan: its version is {version!r}, expected {PLAN_VERSION}; {MAKE}"
        )


def _text(value: Any) -> str:
    """JSON, with a line for each object of a list."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def _check_numbers(value: Any, place: str) -> None:
    """Raise PlanError at a float that JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{place} holds {value!r}, which a file cannot: it must be a finite number")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_numbers(item, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_numbers(item, f"{place}[{i}]")
