"""`simulate`: a pipeline file in simulated time, supertask by supertask.

Slots are the runtime's `SlotEngine`s in simulated time, so what is simulated differs from a run
only by how long things take. Events are few: a slot is looked at when it has done what it was busy
with, and when something may have come for it. Equal pipelines and costs give equal simulations.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count
from typing import overload

from shardwright.building.build import without_weights
from shardwright.clusters import Cluster
from shardwright.comm.transport import memberships
from shardwright.costs.cost import Analytic, Costs
from shardwright.costs.tasks import TaskTimes
from shardwright.engine.program import default_lookahead, is_training, slot_program
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.pipeline.connections import connect
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.planning.options import check_graph
from shardwright.planning.plan import Plan, cluster_of
from shardwright.simulation.memory import TaskWork
from shardwright.simulation.network import Network
from shardwright.simulation.slot import SimulatedSlot, StepSimulation


@overload
def simulate(
    program: Pipeline,
    costs: TaskTimes | Costs,
    /,
    cluster: Cluster | None = None,
    *,
    calls: int = 1,
    in_flight: int | None = None,
    lookahead: int | None = None,
) -> StepSimulation: ...


@overload
def simulate(
    program: IRGraph,
    plan: Plan,
    cluster: Cluster | None = None,
    costs: TaskTimes | Costs | None = None,
    *,
    calls: int = 1,
    in_flight: int | None = None,
    lookahead: int | None = None,
) -> StepSimulation: ...


def simulate(
    program: Pipeline | IRGraph,
    plan: Plan | TaskTimes | Costs | None = None,
    cluster: Cluster | None = None,
    costs: TaskTimes | Costs | None = None,
    *,
    calls: int = 1,
    in_flight: int | None = None,
    lookahead: int | None = None,
) -> StepSimulation:
    """Simulate the time of a program, the waits between devices, and the memory of each device.

    Called as ``simulate(pipeline, costs, cluster)`` or ``simulate(graph, plan, cluster, costs)``.

    program
        A pipeline; or a graph with its plan, which may be of a model on the meta device, because
        contents of stored values are not read.
    costs
        Times of the tasks (`profile_tasks`), or costs of nodes: ``Analytic(device)``, or
        ``profile.costs()``. A lowered pipeline needs times. For a plan, costs are by default
        estimated from shapes and the cluster's device.
    cluster
        The machines and their links; by default a plan's own, or CPU cores of one host.
    calls, in_flight
        Number of consecutive training steps or calls of the model, and how many may run at once: by
        default 2 steps, or twice the devices in calls, as for `TrainingRunner` and `Runner`.
    lookahead
        Number of actions of its schedule that a device may start early; by default as for
        `TrainingRunner`.

    Raises PlanError if the cluster does not have a device, a number is invalid, the plan is for
    another graph, or the pipeline has tasks that do not run or that deadlock; ProfileError if the
    times are those of other tasks.
    """
    if calls < 1 or (in_flight is not None and in_flight < 1) or (lookahead or 0) < 0:
        raise PlanError(
            f"calls={calls}, in_flight={in_flight}, lookahead={lookahead}: calls and calls under "
            "way count from 1, actions begun early from 0"
        )
    pipeline, costs, cluster = _given(program, plan, cluster, costs)
    if isinstance(costs, TaskTimes):
        costs.check_belong(pipeline)
    else:
        _check_kinds(pipeline)
    cluster.among(tuple(pipeline.devices))
    return _Simulator(pipeline, costs, cluster, calls, in_flight, lookahead).run()


def _given(
    program: Pipeline | IRGraph,
    plan: Plan | TaskTimes | Costs | None,
    cluster: Cluster | None,
    costs: TaskTimes | Costs | None,
) -> tuple[Pipeline, TaskTimes | Costs, Cluster]:
    """What is simulated, by either way of calling. Raises PlanError for what is neither."""
    if isinstance(program, Pipeline):
        found = costs if plan is None else plan
        if found is None or isinstance(found, Plan):
            raise PlanError(
                "a pipeline is simulated by what its work costs: simulate(pipeline, costs); "
                "a plan is given with its graph: simulate(graph, plan)"
            )
        return program, found, cluster or Cluster((tuple(program.devices),))
    check_graph(program)
    if not isinstance(plan, Plan):
        raise PlanError(
            f"a graph is simulated as a plan has it, found a {type(plan).__name__}; give "
            "simulate(graph, plan)"
        )
    program.check()
    cluster = cluster or cluster_of(plan)
    pipeline = without_weights(program, plan)
    return pipeline, costs or Analytic(cluster.device), cluster


class _Simulator:
    """The clock, and the calls that slots are given."""

    def __init__(
        self,
        pipeline: Pipeline,
        costs: TaskTimes | Costs,
        cluster: Cluster,
        calls: int,
        in_flight: int | None,
        lookahead: int | None,
    ) -> None:
        self._pipeline = pipeline
        self._calls = calls
        self._in_flight = in_flight or (2 if is_training(pipeline) else 2 * len(pipeline.devices))
        self._events: list[tuple[float, int, str]] = []
        self._numbers = count()
        self._begun = 0
        self._waited: dict[int, int] = {}
        self._ended = 0
        graphs = TaskGraphs(pipeline)
        network = Network(tuple(pipeline.devices), cluster, self._wake)
        work = TaskWork(pipeline, costs, cluster.device, graphs)
        parts, index = memberships(pipeline), connect(pipeline)
        if lookahead is None:
            lookahead = default_lookahead(pipeline) if is_training(pipeline) else 0
        self._slots = {}
        for rank, name in enumerate(pipeline.devices):
            program = slot_program(pipeline, name, lookahead=lookahead, graphs=graphs, index=index)
            self._slots[name] = SimulatedSlot(rank, program, parts, work, network)
        self._inputs = _inputs(pipeline)

    def run(self) -> StepSimulation:
        """Go from event to event until nothing happens any more."""
        for _ in range(min(self._in_flight, self._calls)):
            self._begin(0.0)
        end = 0.0
        while self._events:
            now, _, name = heapq.heappop(self._events)
            slot = self._slots[name]
            if now < slot.busy_until:
                continue
            seconds, done = slot.advance(now)
            for call in done:
                self._finish(call, now)
            if seconds is not None:
                end = max(end, now + seconds)
                self._wake(now + seconds, name)
        if self._ended < self._calls:
            raise self._stuck()
        for slot in self._slots.values():
            slot.end_wait(end)
        return self._result(end)

    def _stuck(self) -> PlanError:
        """Says what each slot waits for when nothing happens any more."""
        found = [(slot.engine, slot.awaited()) for slot in self._slots.values()]
        waits = [
            f"slot {engine.slot.name!r} for {engine.program.entries[at.entry].task!r}"
            for engine, at in found
            if at is not None
        ]
        return PlanError(f"the pipeline waits for ever: {', '.join(waits)}; check it first")

    def _wake(self, at: float, slot: str) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), slot))

    def _begin(self, now: float) -> None:
        """Give the next call to all slots."""
        call, self._begun = self._begun, self._begun + 1
        self._waited[call] = len(self._slots)
        for name, slot in self._slots.items():
            slot.begin(call, self._inputs[name])
            self._wake(now, name)

    def _finish(self, call: int, now: float) -> None:
        self._waited[call] -= 1
        if not self._waited[call]:
            self._ended += 1
            if self._begun < self._calls:
                self._begin(now)

    def _result(self, end: float) -> StepSimulation:
        return StepSimulation(
            seconds=end,
            calls=self._calls,
            slots=tuple(slot.summary() for slot in self._slots.values()),
            events=tuple(event for slot in self._slots.values() for event in slot.events),
        )


def _check_kinds(pipeline: Pipeline) -> None:
    """Raise PlanError where a compute supertask is lowered: it has no nodes that cost anything."""
    for name, task in pipeline.supertasks.items():
        if task.kind == "dfg":
            raise PlanError(
                f"supertask {name!r} is lowered (kind 'dfg'): no costs of nodes say what it takes; "
                "measure it (profile_tasks, shardwright simulate --measure), or simulate the "
                "pipeline that it was lowered from"
            )


def _inputs(pipeline: Pipeline) -> Mapping[str, dict[str, int]]:
    """The bytes of the pipeline's inputs by slot and name."""
    found: dict[str, dict[str, int]] = {slot: {} for slot in pipeline.devices}
    for name, piece in pipeline.metadata.tensor_slices.inputs.items():
        found[piece.device][name] = pipeline.tensors[name].nbytes
    return found
