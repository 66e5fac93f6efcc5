"""`simulate`: a pipeline file in simulated time, supertask by supertask.

Comes in: a pipeline (or a graph and a plan, of which one without weights is built), what its
supertasks cost, and the machines. Goes out: a `StepSimulation`.
Slots walk their task lists by the rules that the runtime's workers go by (`engine.walk`,
`engine.walk`), so what is simulated differs from a run only by how long things take.

Events are few: a slot is looked at when it has done what it was busy with, and when something may
have come for it. What always holds: time never goes back, and equal pipelines and costs give equal
simulations.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import overload

from shardwright.building.build import without_weights
from shardwright.clusters import Cluster
from shardwright.comm.transport import memberships
from shardwright.costs.cost import Analytic, Costs
from shardwright.costs.tasks import TaskTimes
from shardwright.costs.worker_time import worker_seconds
from shardwright.engine.agenda import Entry, default_lookahead, is_training
from shardwright.engine.slot_steps import SlotStep, SlotSteps, slot_steps
from shardwright.engine.step_plan import plan_step
from shardwright.engine.walk import call_order, last_given
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.pipeline.connections import connect
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.planning.given import check_graph
from shardwright.planning.plan import Plan, cluster_of
from shardwright.simulation.simulated import SlotSimulation, StepSimulation, Wait, added_up
from shardwright.simulation.simulated_memory import SimulatedStorage
from shardwright.simulation.simulated_network import Network
from shardwright.simulation.simulated_slot import (
    Awaited,
    SimulatedSlot,
    SimulatedTransfer,
    StepSlot,
    World,
)
from shardwright.simulation.task_work import TaskWork


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
    """How long a program takes, who waits for whom, and what each slot holds.

    Called as ``simulate(pipeline, costs, cluster)`` or ``simulate(graph, plan, cluster, costs)``.

    program
        A pipeline; or a graph with the plan of it, which may be of a model on the meta device: what
        stored values hold is not asked for.
    costs
        Times of the supertasks (`profile_tasks`), or costs of nodes: ``Analytic(device)``, or
        ``profile.costs()``; of a lowered pipeline times alone. Of a plan they follow from shapes
        and the cluster's device if not given.
    cluster
        The machines and their links; without one a plan's own, or all slots are CPU cores of one
        host.
    calls, in_flight
        How many training steps or calls of the model follow one another, and how many may be under
        way at once: for steps 2, for calls twice the slots, as `Session` and `Runner` have it.
    lookahead
        How many actions of its schedule a slot begins early; as `Session` has it by default.

    Raises PlanError where the cluster lacks a slot, a number makes no sense, the plan is for
    another graph, or the pipeline has supertasks that do not run, or waits for ever;
    ProfileError where the times are those of other supertasks.
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
        self._training = is_training(pipeline)
        self._calls = calls
        self._in_flight = in_flight or (2 if self._training else 2 * len(pipeline.devices))
        self._events: list[tuple[float, int, str]] = []
        self._numbers = count()
        self._begun = 0
        self._waited: dict[int, int] = {}
        self._ended = 0
        graphs = TaskGraphs(pipeline)
        world = World(
            pipeline,
            memberships(pipeline),
            TaskWork(pipeline, costs, cluster.device, graphs),
            Network(tuple(pipeline.devices), cluster, self._wake),
            self._wake,
            self._finish,
            worker_seconds(cluster.device),
        )
        self._slots = {
            slot.name: slot for slot in _slots(pipeline, world, graphs, lookahead, self._training)
        }
        self._inputs = _inputs(pipeline)

    def run(self) -> StepSimulation:
        """Go from event to event until nothing happens any more."""
        for _ in range(min(self._in_flight, self._calls)):
            self._begin(0.0)
        end = 0.0
        while self._events:
            now, _, name = heapq.heappop(self._events)
            slot = self._slots[name]
            if now >= slot.busy_until and (seconds := slot.advance(now)) is not None:
                end = max(end, now + seconds)
                self._wake(now + seconds, name)
        if self._ended < self._calls:
            raise self._stuck()
        for slot in self._slots.values():
            slot.end_wait(end)
        return self._result(end)

    def _stuck(self) -> PlanError:
        """Says what each slot waits for when nothing happens any more."""
        found = [(name, slot.awaited()) for name, slot in self._slots.items()]
        waits = [f"slot {name!r} for {at.entry.task!r}" for name, at in found if at is not None]
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

    def _finish(self, slot: str, call: int, now: float) -> None:
        self._waited[call] -= 1
        if not self._waited[call]:
            self._ended += 1
            if self._begun < self._calls:
                self._begin(now)

    def _result(self, end: float) -> StepSimulation:
        return StepSimulation(
            seconds=end,
            calls=self._calls,
            slots=tuple(_summary(slot) for slot in self._slots.values()),
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


def _slots(
    pipeline: Pipeline, world: World, graphs: TaskGraphs, lookahead: int | None, training: bool
) -> list[SimulatedSlot]:
    found: list[SimulatedSlot] = []
    connections = connect(pipeline)
    for rank, name in enumerate(pipeline.devices):
        steps = slot_steps(pipeline, name, graphs, connections)
        if training:
            ahead = default_lookahead(pipeline) if lookahead is None else lookahead
            plan = plan_step(pipeline, steps, lookahead=ahead, connections=connections)
            found.append(StepSlot(rank, steps, world, plan, ahead))
        else:
            found.append(CallSlot(rank, steps, world))
    return found


def _inputs(pipeline: Pipeline) -> Mapping[str, dict[str, int]]:
    """The bytes of the pipeline's inputs by slot and name."""
    found: dict[str, dict[str, int]] = {slot: {} for slot in pipeline.devices}
    for name, piece in pipeline.metadata.tensor_slices.inputs.items():
        found[piece.device][name] = pipeline.tensors[name].nbytes
    return found


def _summary(slot: SimulatedSlot) -> SlotSimulation:
    waits = [Wait(*_reason(slot.name, awaited), seconds) for awaited, seconds in slot.waits]
    return SlotSimulation(
        slot.name,
        slot.rank,
        slot.computing,
        slot.moving,
        sum(seconds for _, seconds in slot.waits),
        added_up(waits),
        slot.ledger.memory(),
    )


def _reason(slot: str, awaited: Awaited | None) -> tuple[str, tuple[str, ...]]:
    """What kind of thing a slot waited for, and who else takes part in it."""
    if awaited is None:
        return "end", ()
    if awaited.posted is None:
        return "order", ()
    part = awaited.posted.part
    kind = part.exchange.operation.kind
    if kind == "send" and part.member == 1:
        kind = "recv"
    return kind, tuple(name for name in part.exchange.slots if name != slot)


# --- calls ----------------------------------------------------------------------------------------
#
# Calls walk the slot's steps in file order, and `call_order` says which goes first, as it does in
# the runtime's `CallWorker`.


@dataclass(slots=True, eq=False)
class _SimulatedCall:
    """A call under way: its place in the steps, and its communication."""

    call: int
    place: int = 0
    pending: SimulatedTransfer | None = None
    leaving: list[SimulatedTransfer] = field(default_factory=list)
    places: set[Hashable] = field(default_factory=set)


class CallSlot(SimulatedSlot):
    """A slot at work on calls."""

    def __init__(self, rank: int, steps: SlotSteps, world: World) -> None:
        super().__init__(rank, steps, world)
        self._calls: deque[_SimulatedCall] = deque()
        self._serial = bool(steps.replaces)
        self._last_given = last_given(steps.steps)

    def begin(self, call: int, inputs: Mapping[str, int]) -> None:
        """Take on a call."""
        found = _SimulatedCall(call)
        for name, nbytes in inputs.items():
            self.ledger.hold((call, name), SimulatedStorage(nbytes, "activations"))
            found.places.add((call, name))
        self.ledger.note(0)
        self._calls.append(found)

    def awaited(self) -> Awaited | None:
        """What the oldest call waits for."""
        if not self._calls:
            return None
        call = self._calls[0]
        if call.place < len(self.steps.steps):
            return Awaited(call.call, self._entry(self.steps.steps[call.place]), call.pending)
        return Awaited(call.call, call.leaving[0].entry, call.leaving[0]) if call.leaving else None

    def _advance(self, now: float) -> float | None:
        places = [call.place for call in self._calls]
        steps = len(self.steps.steps)
        for k in call_order(places, steps, self._last_given, serial=self._serial):
            busy = self._move_on(self._calls[k], now)
            if busy is not None:
                return busy
        return self._retire(now)

    def _move_on(self, call: _SimulatedCall, now: float) -> float | None:
        """Do a call's next step; None where it waits for others."""
        step = self.steps.steps[call.place]
        if step.communicates:
            return self._communicate(call, step, now)
        places = self._places(call, step.inputs), self._places(call, step.outputs)
        busy = self._compute(call.call, self._entry(step), step, places, now)
        self._step_over(call, step, places[1])
        return busy

    def _communicate(self, call: _SimulatedCall, step: SlotStep, now: float) -> float | None:
        busy = 0.0
        if call.pending is None:
            places = self._places(call, step.inputs), self._places(call, step.outputs)
            entry, numbers = self._entry(step), (call.call, call.call)
            call.pending, busy = self._start(numbers, entry, step, places, now)
        if not call.pending.part.is_ready(now + busy):
            return busy or None
        busy += self._take(call.pending, now + busy)
        if call.pending.part.over:
            call.leaving.append(call.pending)
            self._step_over(call, step, call.pending.outputs)
            call.pending = None
        return busy

    def _step_over(self, call: _SimulatedCall, step: SlotStep, made: Sequence[Hashable]) -> None:
        """A step is done: there is what it makes, and no more what nothing reads after it."""
        call.place += 1
        call.places.update(made)
        for place in self._places(call, step.dead):
            self.ledger.drop(place)
            call.places.discard(place)

    def _retire(self, now: float) -> float | None:
        """Finish the oldest call if all its steps are done and all it sends has left."""
        if not self._calls or self._calls[0].place < len(self.steps.steps):
            return None
        call = self._calls[0]
        call.leaving = [posted for posted in call.leaving if not self._has_left(posted, now)]
        if call.leaving:
            return None
        for place in call.places:
            self.ledger.drop(place)
        self._calls.popleft()
        self._world.finish(self.name, call.call, now)
        return 0.0

    def _entry(self, step: SlotStep) -> Entry:
        return Entry(step.task, next(iter((*step.inputs, *step.outputs)), None))

    def _places(self, call: _SimulatedCall, names: Sequence[str]) -> tuple[Hashable, ...]:
        constants = self.steps.constants
        return tuple(
            ("constant", name) if name in constants else (call.call, name) for name in names
        )
