"""Steps laid out: any order that a plan allows reads what the agenda's order does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.engine.slot_steps import Occurrence, slot_steps
from shardwright.engine.step_plan import StepPlan, plan_step
from shardwright.pipeline import Pipeline
from tests.runtime.linear_step import linear_step

Reads = dict[int, list[object]]


def plan_of(pipeline: Pipeline, slot: str, lookahead: int) -> StepPlan:
    return plan_step(pipeline, slot_steps(pipeline, slot), lookahead=lookahead)


class Memory:
    """Which occurrence made what is in each place; constants are told by name."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.made: dict[object, object] = {}
        self.dropped: set[object] = set()
        self.reads: Reads = {}

    def begin(self, occurrence: Occurrence) -> None:
        places = [self._resource(place) for place in occurrence.reads]
        assert self.dropped.isdisjoint(places), f"{occurrence.step.task} reads what is dropped"
        self.reads[occurrence.index] = [self.made.get(place) for place in places]

    def end(self, occurrence: Occurrence) -> None:
        for name in occurrence.step.outputs:
            self.made[occurrence.space, name] = occurrence.index
        for name in occurrence.step.writes:
            self.made[name] = occurrence.index
        self.dropped.update(occurrence.drops)

    def _resource(self, place: tuple[int, str]) -> object:
        space, name = place
        return name if space == self.plan.microbatches + 1 else place


def in_order(plan: StepPlan) -> Memory:
    memory = Memory(plan)
    for turn in plan.turns:
        for occurrence in turn.occurrences:
            memory.begin(occurrence)
            memory.end(occurrence)
    return memory


def in_any_order(plan: StepPlan, lookahead: int, choose: Any) -> Memory:
    """Do occurrences as a worker may: turns near each other together, each in its order.

    Communication that has begun ends at any time.
    """
    memory, done = Memory(plan), set[int]()
    turns = [list(turn.occurrences) for turn in plan.turns]
    pending: list[list[Occurrence]] = [[] for _ in turns]
    actions = [turn.action for turn in plan.turns]
    while any(turns) or any(pending):
        oldest = next(a for a, *left in zip(actions, turns, pending, strict=True) if any(left))
        ready = [
            (turn, under_way)
            for action, turn, under_way in zip(actions, turns, pending, strict=True)
            if turn and action <= oldest + lookahead and done.issuperset(turn[0].after)
        ]
        acts = [*ready, *(under_way for under_way in pending if under_way)]
        act = choose(acts)
        if isinstance(act, tuple):
            turn, under_way = act
            occurrence = turn.pop(0)
            memory.begin(occurrence)
            if occurrence.step.communicates:
                under_way.append(occurrence)
                continue
        else:
            occurrence = act.pop(choose(range(len(act))))
        memory.end(occurrence)
        done.add(occurrence.index)
    return memory


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v"]),
    lookahead=st.integers(0, 3),
    shards=st.integers(1, 2),
)
def test_any_order_that_is_allowed_reads_the_same(
    data: Any, kind: str, lookahead: int, shards: int
) -> None:
    pipeline = linear_step(kind, microbatches=4, data=shards)
    slot = data.draw(st.sampled_from(list(pipeline.devices)))
    plan = plan_of(pipeline, slot, lookahead)
    found = in_any_order(plan, lookahead, lambda of: data.draw(st.sampled_from(of)))
    assert found.reads == in_order(plan).reads


def test_the_first_microbatch_takes_accumulators_for_zeros() -> None:
    plan = plan_of(linear_step(microbatches=2), "d0", 1)
    first, second = [o for turn in plan.turns for o in turn.occurrences if o.step.task == "W0.0"]
    assert (first.first, second.first) == (True, False)
    assert [entry.task for entry in plan.entries].count("W0.0") == 2


def test_outputs_of_microbatches_are_put_together_and_kept() -> None:
    plan = plan_of(linear_step(microbatches=2), "d1", 1)
    last = plan.turns[-1].occurrences[-1]
    assert (last.step.task, last.step.does) == ("stack h2.0", "stack")
    assert last.reads == ((0, "h2.0"), (1, "h2.0"))
    assert plan.outputs == ("h2.0", "loss")
    dropped = {place for turn in plan.turns for o in turn.occurrences for place in o.drops}
    assert dropped.isdisjoint((2, name) for name in plan.outputs)
    assert (0, "h2.0") in dropped


@pytest.mark.parametrize(("lookahead", "waits"), [(0, False), (1, True)])
def test_only_turns_that_may_be_under_way_together_wait_for_each_other(
    lookahead: int, waits: bool
) -> None:
    plan = plan_of(linear_step("gpipe", microbatches=2), "d1", lookahead)
    second = [o for turn in plan.turns for o in turn.occurrences if o.step.task == "loss.0"][1]
    assert bool(second.after) == waits, "the sum of losses goes on where the first left off"
