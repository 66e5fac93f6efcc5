"""`plan`: from a graph and a number of slots to a Plan, by a policy, over a mesh, or by search.

The plan by search (``auto``) is the fastest candidate of `planning.search`; where several are
predicted to take about as long, these are built and simulated, and the fastest by simulation is the
plan. With it come its prediction and what it was compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from shardwright.building.build import without_weights
from shardwright.clusters import Cluster
from shardwright.costs.cost import Analytic, Costs
from shardwright.costs.predict import SlotMemory
from shardwright.costs.profile import Profile
from shardwright.costs.step_time import order_of
from shardwright.errors import PlanError, ShardwrightError
from shardwright.ir import IRGraph
from shardwright.ir.graph import is_step, without_collection
from shardwright.ir.tensor_meta import count_text
from shardwright.planning.assemble import make_plan
from shardwright.planning.candidates import Candidate, alternatives, done_whole, split_reasons
from shardwright.planning.mesh_plan import (
    PlanMachines,
    plan_by_partition,
    plan_over_mesh,
    training_plan,
)
from shardwright.planning.options import StepOptions, check_count, check_devices, check_graph
from shardwright.planning.partitioners import PARTITIONERS
from shardwright.planning.pipeline import measure_work, pipeline
from shardwright.planning.plan import Assignment, Explanation, Plan, assignments
from shardwright.planning.policy import Policy, by_policy, policy_name
from shardwright.planning.predict import predict
from shardwright.planning.rules import AXES, DATA, PIPELINE, batch_rows, whole_notes
from shardwright.planning.search import OTHERS, PlanSearch
from shardwright.planning.shapes import PlacedShapes
from shardwright.planning.step import check_one_backward, mixing_notes
from shardwright.planning.step_graph import forward_view
from shardwright.simulation.simulate import simulate
from shardwright.tracing.program_set import ProgramSet

__all__ = ["POLICIES", "plan"]

AUTO = "auto"
POLICIES = (*AXES, *PARTITIONERS, AUTO)
FEW_NODES = 200
"""Candidates of graphs of more nodes are not simulated: building them takes longer than the search.
A choice."""
CLOSE = 1.03
"""Candidates that are predicted to take up to this times the fastest are simulated: a prediction is
rarely further off than a few percent (benchmarks/results/prediction.md)."""
SIMULATED = 2
"""So many at the most, and the fastest one of METIS's stages."""


def plan(
    graph: IRGraph | ProgramSet,
    devices: int | Cluster | None = None,
    policy: str | Policy = "pipeline",
    *,
    mesh: Mapping[str, int] | None = None,
    profile: Profile | Costs | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    recompute: str | None = None,
    memory: int | None = None,
    zero: int | None = None,
) -> Plan:
    """Plan which devices run each node and which dimensions are split over them.

    graph
        A model's or a training step's; of a `ProgramSet` the first is planned, for `build`.
    devices
        A number of devices, which are processes of one host; or a `Cluster`.
    policy
        ``pipeline``: contiguous stages that minimize the largest share of work or of stored bytes.
        ``data``: the batch is split. ``tensor``: layers are split by columns, then rows.
        ``sequence``: as tensor, with the activations between them split along the sequence.
        ``metis``, ``memory``, ``pipedream``: stages by `planning.partitioners`. ``auto``: the plan
        with the lowest predicted time that fits in memory, found by search. Or a function that
        decides node by node (`shardwright.planning.policy`).
    mesh
        Several policies at once, with the size of each axis, instead of ``policy`` and ``devices``:
        ``{"pipeline": 2, "tensor": 2}``. It may be combined with a policy that makes stages.
    profile
        Measured costs of the graph's nodes, for ``auto`` and policies that make stages; by default
        they are estimated from shapes.

    The other arguments are for training steps (`compile_ir`).

    microbatches
        Number of microbatches of a step; 1 by default, for every policy. A graph is captured with
        the size of one microbatch, so a number that does not divide the batch is never planned.
    schedule, chunks
        The order of actions of the pipeline's ranks (`shardwright.schedules`), ``1f1b`` by default,
        and the number of virtual stages per rank, by default that of the schedule.
    recompute, memory
        Which activations are recomputed in the backward: ``none`` (the default), ``full`` (all of a
        stage), or ``auto`` (as few as keep a device's activations within ``memory`` bytes).
    zero
        1: each device along the mesh axis ``data`` holds and updates its shard of the optimizer
        state (ZeRO-1). 0 by default.

    Raises PlanError if there is no such plan or a cluster's devices have too little memory for it,
    GraphError if the graph is invalid (`IRGraph.check`), and the errors of a policy function.
    """
    options = {
        "microbatches": microbatches,
        "schedule": schedule,
        "chunks": chunks,
        "recompute": recompute,
        "memory": memory,
        "zero": zero,
    }
    given = {name: value for name, value in options.items() if value is not None}
    graph = graph.first if isinstance(graph, ProgramSet) else graph
    made = _made(graph, devices, policy, mesh, profile, given)
    if not isinstance(devices, Cluster):
        return msgspec.structs.replace(made, cluster=Cluster((made.devices,)))
    if policy != AUTO:
        check_fits(graph, made, devices, _costs(profile))
    return msgspec.structs.replace(made, cluster=devices)


def _made(
    graph: IRGraph,
    devices: int | Cluster | None,
    policy: str | Policy,
    mesh: Mapping[str, int] | None,
    profile: Profile | Costs | None,
    given: Mapping[str, Any],
) -> Plan:
    check_graph(graph)
    graph.check()
    if not graph.nodes:
        raise PlanError(
            f"the graph {graph.name!r} has no nodes, it gives back its inputs: there is nothing to "
            "plan"
        )
    options = StepOptions(**given)
    training = is_step(graph)
    if not training and options != StepOptions():
        raise PlanError(
            f"the graph {graph.name!r} is no training step, but {_first(given)} is for one; "
            "capture a step with compile_ir, or leave it out"
        )
    if policy == AUTO:
        return auto_plan(graph, _cluster(devices, mesh), _costs(profile), given, simulated_seconds)
    if profile is not None and policy not in PARTITIONERS:
        raise PlanError(
            f"a profile is for policy='auto' and for {', '.join(PARTITIONERS)}; {policy!r} counts "
            "operations and bytes"
        )
    slots = devices.devices if isinstance(devices, Cluster) else None
    count = len(devices.devices) if isinstance(devices, Cluster) else devices
    if callable(policy):
        if training:
            raise PlanError("a policy function plans models; plan a training step over a mesh=")
        return _plan_by_policy(graph, count, policy, mesh, slots)
    axes = _axes(count, policy, mesh)
    label = " × ".join(f"{axis} {size}" for axis, size in axes.items()) if mesh else policy
    names = slots or tuple(f"d{i}" for i in range(math.prod(axes.values())))
    if policy in PARTITIONERS:
        machines = _machines(devices, names, _costs(profile))
        return plan_by_partition(graph, axes, policy, machines, options)
    if not training and tuple(axes) == (PIPELINE,):
        return make_plan(graph, label, names, *pipeline(graph, names))
    return plan_over_mesh(graph, axes, label, names, options)


def _first(given: Mapping[str, Any]) -> str:
    """The first option that is not the default, as it is written."""
    default = StepOptions()
    return next(f"{k}={v!r}" for k, v in given.items() if v != getattr(default, k))


def _plan_by_policy(
    graph: IRGraph,
    devices: int | None,
    policy: Policy,
    mesh: Mapping[str, int] | None,
    slots: Sequence[str] | None,
) -> Plan:
    if mesh is not None:
        raise PlanError("a policy function makes its own meshes; give devices instead of mesh")
    names = slots or tuple(f"d{i}" for i in range(_count(devices)))
    return make_plan(graph, policy_name(policy), names, *by_policy(graph, policy, names))


def _cluster(devices: int | Cluster | None, mesh: Mapping[str, int] | None) -> Cluster:
    """The machines that an automatic plan is for. Raises PlanError."""
    if mesh is not None:
        raise PlanError("policy 'auto' chooses the mesh; give devices, or leave the policy out")
    return devices if isinstance(devices, Cluster) else Cluster.of(_count(devices))


def _machines(
    devices: int | Cluster | None, names: tuple[str, ...], costs: Costs | None
) -> PlanMachines:
    """The machines that stages are for; how much memory they have is known of a cluster alone."""
    known = isinstance(devices, Cluster)
    cluster = devices if isinstance(devices, Cluster) else Cluster((names,))
    memory = float(cluster.device.memory) if known else None
    return PlanMachines(cluster, costs or Analytic(cluster.device), memory)


def _costs(profile: Profile | Costs | None) -> Costs | None:
    if profile is not None and not hasattr(profile, "node") and not isinstance(profile, Profile):
        raise PlanError(
            f"profile is a Profile, or costs of nodes, found {profile!r}; read a file with "
            "Profile.load(path)"
        )
    return profile.costs() if isinstance(profile, Profile) else profile


def _count(devices: int | None) -> int:
    check_devices(devices)
    assert devices is not None
    return devices


def _axes(devices: int | None, policy: str, mesh: Mapping[str, int] | None) -> Mapping[str, int]:
    """The mesh that is asked for. Raises PlanError."""
    if mesh is None:
        if policy not in POLICIES:
            raise PlanError(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")
        return {PIPELINE if policy in PARTITIONERS else policy: _count(devices)}
    if policy != PIPELINE and policy not in PARTITIONERS:
        raise PlanError(f"policy {policy!r} and a mesh are both given; give one of them")
    if not isinstance(mesh, Mapping):
        raise PlanError(f"mesh gives sizes by axis, {{'pipeline': 2, 'tensor': 2}}, found {mesh!r}")
    for axis, size in mesh.items():
        check_count(f"the size of mesh axis {axis!r}", size)
    if devices is not None and devices != math.prod(mesh.values()):
        sizes = " × ".join(map(str, mesh.values()))
        raise PlanError(
            f"the mesh has {sizes} slots, but there are {devices} devices; leave them out, or name "
            "as many"
        )
    return mesh


# --- by search ------------------------------------------------------------------------------------


Simulate = Callable[[IRGraph, Plan, Costs, Cluster], float]
"""Seconds of a plan for each batch of the captured size."""


@without_collection()
def auto_plan(
    graph: IRGraph,
    cluster: Cluster,
    costs: Costs | None = None,
    given: Mapping[str, Any] | None = None,
    simulate: Simulate | None = None,
) -> Plan:
    """The fastest plan for a graph on a cluster: by ``simulate`` where given, else by prediction.

    ``given`` are options that are not searched for. Raises PlanError where no plan fits, with what
    is missing in the nearest.
    """
    given = dict(given or {})
    _check_given(given)
    graphs = PlacedShapes(
        graph, cluster, costs or Analytic(cluster.device), given.get("microbatches", 1)
    )
    if graphs.training:
        check_one_backward(graph)
    search = PlanSearch(graphs, cluster, given)
    found = search.run()
    refused = [f"{shape}: {why}" for shape, why in search.refused.items()]
    if simulate is not None and len(graph.nodes) <= FEW_NODES:
        found = _reranked(search, found, simulate, refused)
    return _explained(search, found, refused)


def _check_given(given: Mapping[str, Any]) -> None:
    """Raise PlanError for what is not to be had on any mesh."""
    options = StepOptions(**given)
    options.check({DATA: 2})
    if options.chunks is not None and (type(options.chunks) is not int or options.chunks < 1):
        raise PlanError(f"chunks must be a number from 1 up, found {options.chunks!r}")
    if "schedule" in given:
        options.schedule_on(2)


def _reranked(
    search: PlanSearch, found: Sequence[Candidate], simulate: Simulate, refused: list[str]
) -> list[Candidate]:
    """The candidates by simulation: the first few, and METIS's, that are about as fast."""
    close = [one for one in found[:SIMULATED] if one.seconds <= CLOSE * found[0].seconds]
    rest = found[len(close) :]
    branched = min(search.branched, key=lambda one: one.seconds, default=None)
    if branched is not None and branched.seconds <= CLOSE * found[0].seconds:
        close.append(branched)
    if not close[1:]:
        return [*found]
    ranked = [_simulated(search, one, simulate, refused) for one in close]
    ranked.sort(key=lambda one: one.simulated)
    return [*ranked, *rest][: 1 + OTHERS]


def _simulated(
    search: PlanSearch, found: Candidate, simulate: Simulate, refused: list[str]
) -> Candidate:
    """The candidate with its simulated time; infinite, and noted, where it cannot be built."""
    plan = msgspec.structs.replace(write_plan(search, found), cluster=search.cluster, notes=())
    try:
        seconds = simulate(search.graphs.graph, plan, search.graphs.costs, search.cluster)
    except ShardwrightError as error:
        refused.append(f"{found}: it cannot be built: {error}")
        seconds = math.inf
    return replace(found, simulated=seconds)


def _explained(search: PlanSearch, found: Sequence[Candidate], refused: Sequence[str]) -> Plan:
    """The plan of the first candidate with its prediction, and with what it is compared with."""
    best, source = found[0], found[0].placed.source
    chosen = write_plan(search, best)
    assigned = list(assignments(chosen, len(source.view.nodes)))
    explanation = Explanation(
        plan=str(best),
        rows=batch_rows(search.graphs.graph),
        others=alternatives(best, found[1:]),
        refused=tuple(refused),
        splits=split_reasons(source, assigned, best.placed.reasons),
        whole=done_whole(source, assigned),
        simulated=best.simulated if math.isfinite(best.simulated) else 0.0,
    )
    return msgspec.structs.replace(
        chosen, prediction=best.estimate.prediction(), explanation=explanation
    )


def write_plan(search: PlanSearch, found: Candidate) -> Plan:
    """What was found as a plan of the graph."""
    graphs, options, shape = search.graphs, found.options, found.shape
    apart, unfused = graphs.apart(shape)
    meshes, splits = shape.ranks(search.cluster), found.placed.splits
    devices = [device for mesh in meshes for device in mesh.devices]
    order = order_of(options.schedule, len(meshes), options.microbatches, options.chunks)
    assigned = [
        Assignment(meshes[order.schedule.placement[stage]], split)
        for stage, split in zip(found.stages.tolist(), splits, strict=True)
    ]
    fingerprint = graphs.fingerprint
    if graphs.training:
        step = graphs.step(shape)
        work = measure_work(step, step.view, options.microbatches)
        notes = [
            *whole_notes(step.view, splits),
            *mixing_notes(forward_view(apart), options.microbatches, shape.shards),
        ]
        made = make_plan(
            step.view, AUTO, devices, assigned, notes, work=work, fingerprint=fingerprint
        )
        training = training_plan(options, order.schedule, meshes, found.stages.tolist(), work)
        made = msgspec.structs.replace(made, training=training)
    else:
        notes = whole_notes(apart, splits)
        made = make_plan(apart, AUTO, devices, assigned, notes, fingerprint=fingerprint)
        made = msgspec.structs.replace(made, stages=tuple(found.stages.tolist()))
    idle = len(search.cluster.devices) - len(devices)
    if idle:
        said = f"{count_text(idle, 'slot')} {'has' if idle == 1 else 'have'} nothing to do"
        made = msgspec.structs.replace(made, notes=(*made.notes, said))
    return msgspec.structs.replace(made, unfused=unfused)


# --- memory ---------------------------------------------------------------------------------------
#
# Of every slot of a plan that passes no more bytes are predicted than the cluster's device has.


def check_fits(graph: IRGraph, plan: Plan, cluster: Cluster, costs: Costs | None) -> None:
    """Raise PlanError where a slot would hold more than it has room for, with what lacks."""
    fullest = max(predict(graph, plan, cluster, costs).slots, key=lambda slot: slot.memory.total)
    held, room = fullest.memory.total, cluster.device.memory
    if held > room:
        raise PlanError(
            f"the plan for {graph.name!r} by {plan.policy} does not fit: slot {fullest.device!r} "
            f"would hold {fullest.memory}, {held - room} bytes more than its {room}; it would fit "
            f"in slots of {held} bytes; {', '.join(_remedies(plan, fullest.memory))}, or let "
            "policy='auto' look for a plan that fits"
        )


def _remedies(plan: Plan, held: SlotMemory) -> Iterator[str]:
    """What leaves a slot less to hold, or more room."""
    yield "give those, or more slots"
    if plan.training is not None and held.activations > held.total // 4:
        yield "take smaller microbatches"
        if plan.training.recompute == "none":
            yield "give recompute='full'"


# --- simulated time -------------------------------------------------------------------------------


CALLS = 16
"""So many calls of a model follow one another: how long one takes alone says little."""


def simulated_seconds(graph: IRGraph, plan: Plan, costs: Costs, cluster: Cluster) -> float:
    """Seconds of the built plan for each batch of the captured size."""
    pipeline = without_weights(graph, plan)
    if plan.training is None:
        return simulate(pipeline, costs, cluster, calls=CALLS).step_time
    return simulate(pipeline, costs, cluster).step_time / plan.training.microbatches
