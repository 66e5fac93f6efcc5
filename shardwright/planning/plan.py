"""Plan: on which device slots each node of one graph runs, and how it is split over them.

Each node has an `Assignment`: a mesh of slots and, for each axis of the mesh, the identifier of
the operator's dimension annotation that the axis splits, or None where every slot along the axis
does the same. A pipeline stage is a mesh of one slot; a lookup table cut over all slots, or a
layer under tensor parallelism, is a node split along an axis.

A plan belongs to the graph it was made for: it holds the graph's fingerprint, and `build` refuses
another. Where it says that fused products are unfused (`unfuse`), its nodes are those of the
graph after that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from shardwright.clusters import Cluster, Mesh
from shardwright.costs.predict import ITEMS, Prediction
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.repeats import fingerprint
from shardwright.ir.tensor_meta import count_text
from shardwright.planning.plan_file import read_plan, write_plan
from shardwright.schedules import make_schedule, simulate
from shardwright.sharding.strategy import Choice
from shardwright.sharding.strategy import Split as Split
from shardwright.sharding.strategy import Terms as Terms

# --- explanation ----------------------------------------------------------------------------------
#
# Plans with other numbers of microbatches make other steps, so all are compared by what one batch
# of the captured size takes.


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that was looked at: seconds for a captured batch, the most bytes of a slot, and why
    it is not chosen."""

    plan: str
    seconds: float
    memory: int
    why: str

    def __str__(self) -> str:
        return f"{self.plan}: {1e3 * self.seconds:.3f} ms, {self.memory / 1e6:.2f} MB: {self.why}"


class SplitReason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal nodes that are split alike: how many, the first's place, how, and why."""

    count: int
    operator: str
    scope: str
    split: str
    reason: str

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        return f"{self.count} × {self.operator}{where}: {self.split}: {self.reason}"


class Explanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen, and against what.

    rows
        Of the captured batch; 0 where it has none.
    simulated
        Seconds of the built plan for a captured batch; 0 where others are not close to it.
    refused
        Meshes that cannot be, with the reason.
    whole
        Operators that every slot of a stage does in full for want of an annotation.
    """

    plan: str
    rows: int
    others: tuple[Alternative, ...] = ()
    refused: tuple[str, ...] = ()
    splits: tuple[SplitReason, ...] = ()
    whole: tuple[str, ...] = ()
    simulated: float = 0.0

    def text(self, prediction: Prediction) -> str:
        """All of it, with what the plan is predicted to take."""
        return "\n".join(self._lines(prediction))

    def items(self) -> Iterator[str]:
        """What is said beside the prediction, a text each."""
        yield f"chosen: {self.plan}, {self.rows} rows a captured batch"
        yield from (f"other: {other}" for other in self.others)
        yield from (f"not possible: {reason}" for reason in self.refused)
        yield from (f"split: {split}" for split in self.splits)
        yield from (f"whole for want of an annotation: {operator}" for operator in self.whole)

    def _lines(self, prediction: Prediction) -> Iterator[str]:
        yield f"chosen: {self.plan}"
        yield f"  {prediction.summary()}"
        yield f"  {_batch(prediction.per_microbatch, self.rows)}; plans are compared by this"
        if self.simulated:
            yield f"  built and simulated it takes {1e3 * self.simulated:.3f} ms a captured batch"
        yield "others:"
        for other in self.others:
            seconds = _compared(other.seconds, prediction.per_microbatch)
            yield (f"  {other.plan}: {seconds}, {other.memory / 1e6:.2f} MB: {other.why}")
        if not self.others:
            yield "  none is possible"
        yield from (f"  not possible: {reason}" for reason in self.refused)
        yield "splits:"
        for found in self.splits:
            yield f"  {found}"
        if not self.splits:
            yield "  a stage is one slot, which does its nodes whole"
        if self.whole:
            yield f"whole for want of an annotation: {', '.join(self.whole)}"
        yield "memory of the slots, in MB:"
        yield from _memory(prediction)


def _batch(seconds: float, rows: int) -> str:
    """What a captured batch takes, and a row of it."""
    text = f"{1e3 * seconds:.3f} ms a captured batch"
    return f"{text} of {rows} rows, {1e3 * seconds / rows:.3f} ms a row" if rows else text


def _compared(seconds: float, best: float) -> str:
    """What a captured batch takes, and how much more that is; nothing has no share of nothing."""
    text = f"{1e3 * seconds:.3f} ms a captured batch"
    return f"{text} ({100 * (seconds / best - 1):+.1f}%)" if best else text


def _memory(prediction: Prediction) -> Iterator[str]:
    """A line for neighbours that hold the same."""
    names = ("total", *ITEMS)
    alike: dict[tuple[int, ...], list[str]] = {}
    for slot in prediction.slots:
        held = tuple(getattr(slot.memory, name) for name in names)
        alike.setdefault(held, []).append(slot.device)
    for held, devices in alike.items():
        items = (f"{name} {size / 1e6:.2f}" for name, size in zip(names, held, strict=True))
        shown = devices if len(devices) <= 4 else [devices[0], "…", devices[-1]]
        yield f"  {' '.join(shown)}: {', '.join(items)}"


# --- plan -----------------------------------------------------------------------------------------


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


def split_text(axes: Sequence[str], splits: Sequence[Choice]) -> str:
    """What each axis splits of a node: ``data by b, tensor by n in units of 64``."""
    words = []
    for axis, split in zip(axes, splits, strict=True):
        if isinstance(split, Terms):
            words.append(f"{axis} in terms of a sum")
        elif split is not None:
            unit = f" in units of {split.unit}" if split.unit > 1 else ""
            words.append(f"{axis} by {split.identifier}{unit}")
    return ", ".join(words) or "whole"


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
    """The devices and splits of each node of a graph; `plan` makes it.

    assignments, nodes
        The distinct assignments, and the index of the assignment of each node in execution order.
        For a training step the nodes are those of its forward (`planning.step`).
    loads
        One entry per device.
    notes
        Decisions and their reasons, in words.
    unfused
        Positions of the fused products in the graph that are unfused before anything else.
    training
        How a training step is split into microbatches and stages.
    inputs, labels
        The graph's inputs with their types, and the module and operator of each node, for
        comparing plans and for messages.
    stages
        The stage of each node of a model whose stages are not contiguous; they run one after
        another. A training step has its own.
    prediction, explanation
        The automatic planner's prediction, and its reasons.
    cluster
        The machines of the plan. The costs of their links decide which collectives `build` uses to
        redistribute values.
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
        """Why the plan was chosen: its alternatives, each split, and the memory of each device.

        Only the automatic planner compares alternatives; other plans describe only themselves.
        """
        if self.explanation is None or self.prediction is None:
            return f"{self}\n  not compared with others: policy='auto' does that, and explains"
        said = [f"note: {note}" for note in self.notes]
        return "\n".join([self.explanation.text(self.prediction), *said])

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. Raises OSError if that fails."""
        write_plan(Path(path), self)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Load a plan that `save` wrote. Raises PlanError.

        Whether the plan belongs to a graph is checked where it is used.
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
