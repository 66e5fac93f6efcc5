"""`plan`: from a graph and a number of slots to a Plan, by a policy or over a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from shardwright.building.build import without_weights
from shardwright.clusters import Cluster
from shardwright.costs.cost import Analytic, Costs
from shardwright.costs.profile import Profile
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.graph import is_step
from shardwright.planner.auto import AUTO, auto_plan
from shardwright.planning.assemble import make_plan
from shardwright.planning.automatic.candidates import Asked
from shardwright.planning.mesh_plan import PlanMachines, plan_by_partition, plan_over_mesh
from shardwright.planning.options import StepOptions, check_count, check_devices, check_graph
from shardwright.planning.partitioners import PARTITIONERS
from shardwright.planning.pipeline import pipeline
from shardwright.planning.plan import Plan
from shardwright.planning.policy import Policy, by_policy, policy_name
from shardwright.planning.predicted import SlotMemory
from shardwright.planning.prediction.predict import predict
from shardwright.planning.rules import AXES, PIPELINE
from shardwright.simulation.simulate import simulate

__all__ = ["POLICIES", "plan"]

POLICIES = (*AXES, *PARTITIONERS, AUTO)


def plan(
    graph: IRGraph,
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
    """Which of ``devices`` slots runs which node, and which dimensions are split over them.

    devices
        How many slots, processes of one host; or a `Cluster`, whose slots are used.
    policy
        ``pipeline``: contiguous stages, so that the largest share of the work or of the stored
        bytes that any stage carries is as small as possible. ``data``: the batch is split.
        ``tensor``: layers are split by their dimensions, columns and then rows. ``sequence``: as
        tensor, with what lies between the layers split along the sequence. ``metis``, ``memory``,
        ``pipedream``: stages, by `planning.partitioners`.
        Or a function that decides node by node; `shardwright.planning.policy` says how.
    mesh
        Several of these at once, by the size of each: ``{"pipeline": 2, "tensor": 2}``, in place
        of ``policy`` and ``devices``; a policy that makes stages may stand beside it.

    profile
        Measured costs of the graph's nodes, for ``auto`` and policies that make stages; without it
        they follow from shapes.

    The others are for training steps (`compile_ir`).

    microbatches
        How many batches of the captured size a step takes: 1 by default.
    schedule, chunks
        The order of work of the pipeline's ranks (`shardwright.schedules`), ``1f1b`` by default,
        and how many virtual stages each has: as many as the schedule has by default.
    recompute, memory
        Which activations the backward computes again: ``none``, ``full`` (all of a stage's), or
        ``auto`` (as few as keep a slot's activations within ``memory`` bytes). By default none.
    zero
        1: each slot along the mesh axis ``data`` holds and updates its part of the optimizer's
        state. 0 by default.

    Raises PlanError where that cannot be done, where a cluster's slots have too little memory for
    it, GraphError where the graph is none (`IRGraph.check`), and what a policy function raises.
    """
    asked = Asked(microbatches, schedule, chunks, recompute, memory, zero)
    made = _made(graph, devices, policy, mesh, profile, asked)
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
    asked: Asked,
) -> Plan:
    check_graph(graph)
    graph.check()
    if not graph.nodes:
        raise PlanError(
            f"the graph {graph.name!r} has no nodes, it gives back its inputs: there is nothing to "
            "plan"
        )
    options = asked.options()
    training = is_step(graph)
    if not training and options != StepOptions():
        raise PlanError(
            f"the graph {graph.name!r} is no training step, but {_given(options)} is for one; "
            "capture a step with compile_ir, or leave it out"
        )
    if policy == AUTO:
        return auto_plan(graph, _cluster(devices, mesh), _costs(profile), asked, simulated_seconds)
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


def _given(options: StepOptions) -> str:
    """The first option that is not the default, as it is written."""
    default = StepOptions()
    for name in StepOptions.__slots__:
        if getattr(options, name) != getattr(default, name):
            return f"{name}={getattr(options, name)!r}"
    raise AssertionError("all options have their defaults")


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
