"""Programs of slots: any order that a program allows reads what its own order does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.engine.program import (
    Entry,
    SlotProgram,
    constants_of,
    entries_of,
    is_training,
    slot_program,
)
from shardwright.engine.replacement import MemoryUse
from shardwright.engine.walk import Instruction
from shardwright.pipeline import Pipeline
from tests.runtime.linear_step import linear_step
from tests.runtime.sketch import Sketch, chain, identity

Reads = dict[int, list[object]]


class Memory:
    """Which instruction made what is in each place; constants are told by name."""

    def __init__(self, plan: SlotProgram) -> None:
        self.plan = plan
        self.made: dict[object, object] = {}
        self.dropped: set[object] = set()
        self.reads: Reads = {}

    def begin(self, instruction: Instruction) -> None:
        places = [self._resource(place) for place in instruction.reads]
        assert self.dropped.isdisjoint(places), f"{instruction.task.name} reads what is dropped"
        self.reads[instruction.index] = [self.made.get(place) for place in places]

    def end(self, instruction: Instruction) -> None:
        for name in instruction.task.outputs:
            self.made[instruction.space, name] = instruction.index
        for name in instruction.task.writes:
            self.made[name] = instruction.index
        self.dropped.update(instruction.drops)

    def _resource(self, place: tuple[int, str]) -> object:
        space, name = place
        return name if space == self.plan.microbatches + 1 else place


def in_order(plan: SlotProgram) -> Memory:
    memory = Memory(plan)
    for instruction in plan.instructions:
        memory.begin(instruction)
        memory.end(instruction)
    return memory


def in_any_order(plan: SlotProgram, lookahead: int, choose: Any) -> Memory:
    """Do instructions as a worker may: turns near each other together, each in its order.

    Communication that has begun ends at any time.
    """
    memory, done = Memory(plan), set[int]()
    turns = [list(turn.instructions) for turn in plan.turns]
    pending: list[list[Instruction]] = [[] for _ in turns]
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
            instruction = turn.pop(0)
            memory.begin(instruction)
            if instruction.task.communicates:
                under_way.append(instruction)
                continue
        else:
            instruction = act.pop(choose(range(len(act))))
        memory.end(instruction)
        done.add(instruction.index)
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
    plan = slot_program(pipeline, slot, lookahead=lookahead)
    found = in_any_order(plan, lookahead, lambda of: data.draw(st.sampled_from(of)))
    assert found.reads == in_order(plan).reads


def test_the_first_microbatch_takes_accumulators_for_zeros() -> None:
    plan = slot_program(linear_step(microbatches=2), "d0", lookahead=1)
    first, second = [o for o in plan.instructions if o.task.name == "W0.0"]
    assert (first.first, second.first) == (True, False)
    assert [entry.task for entry in plan.entries].count("W0.0") == 2


def test_outputs_of_microbatches_are_put_together_and_kept() -> None:
    plan = slot_program(linear_step(microbatches=2), "d1", lookahead=1)
    last = plan.turns[-1].instructions[-1]
    assert (last.task.name, last.task.does) == ("stack h2.0", "stack")
    assert last.reads == ((0, "h2.0"), (1, "h2.0"))
    assert plan.outputs == ("h2.0", "loss")
    dropped = {place for o in plan.instructions for place in o.drops}
    assert dropped.isdisjoint((2, name) for name in plan.outputs)
    assert (0, "h2.0") in dropped


@pytest.mark.parametrize(("lookahead", "waits"), [(0, False), (1, True)])
def test_only_turns_that_may_be_under_way_together_wait_for_each_other(
    lookahead: int, waits: bool
) -> None:
    plan = slot_program(linear_step("gpipe", microbatches=2), "d1", lookahead=lookahead)
    second = [o for o in plan.instructions if o.task.name == "loss.0"][1]
    assert bool(second.after) == waits, "the sum of losses goes on where the first left off"


def told(pipeline: Pipeline, slot: str) -> str:
    """Turns on lines: the number of the action, the microbatch, the tasks."""
    lines = []
    program = slot_program(pipeline, slot)
    for turn in program.turns:
        tasks = turn.instructions
        when = {program.entries[i.entry].microbatch for i in tasks}
        shown = "-" if when == {None} else when.pop()
        lines.append(f"{turn.action} {shown} {' '.join(i.task.name for i in tasks)}")
    return "\n".join(lines)


def test_a_call_is_one_turn_in_file_order() -> None:
    pipeline = chain(3)
    assert not is_training(pipeline)
    assert told(pipeline, "d1") == "0 - recv.y0@d1 d1.0 send.y1@d2"
    assert entries_of(pipeline, "d1") == [
        Entry("recv.y0@d1", "y0@d1"),
        Entry("d1.0"),
        Entry("send.y1@d2", "y1"),
    ]
    found = slot_program(pipeline, "d1")
    instructions = [(i.task.does, i.after, [x for _, x in i.drops]) for i in found.instructions]
    assert instructions == [
        ("communicate", (), []),
        ("compute", (0,), ["y0@d1"]),
        ("communicate", (), ["y1"]),
    ]
    assert found.constants == constants_of(pipeline, "d1")
    assert (found.outputs, found.replaced) == ((), {})
    assert slot_program(pipeline, "d2").outputs == ("y2",)


def test_an_output_that_nobody_reads_is_dropped_at_once() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    sketch.fx("a", "d0", ["x"], ["y"], identity)
    sketch.fx("b", "d0", ["x"], ["z"], identity)
    first, second = slot_program(sketch.finish(["z"]), "d0").instructions
    assert (first.drops, second.drops) == (((0, "y"),), ((0, "x"),))


def test_a_step_overwrites_what_is_replaced() -> None:
    found = slot_program(linear_step(), "d0")
    assert found.replaced == {}
    memory = found.memory
    assert memory["F0.0"] == MemoryUse()
    assert memory["W0.0"].zeros == {"g0.0"}
    assert memory["U0.0"].sharing == {"w_new0.0": {"w0.0"}, "m_new0.0": {"m0.0"}}
    tasks = {task.name: task for task in found.tasks}
    assert (tasks["W0.0"].writes, tasks["W0.0"].starts) == (("g0.0",), True)
    assert (tasks["U0.0"].writes, tasks["U0.0"].starts) == (("m0.0", "w0.0"), False)


def test_a_backward_that_is_not_split_has_its_weight_gradients_behind_it() -> None:
    pipeline = linear_step("1f1b", microbatches=2)
    assert is_training(pipeline)
    assert told(pipeline, "d0") == (
        "1 0 F0.0 send.h1.0@d1\n"
        "2 1 F0.0 send.h1.0@d1\n"
        "3 0 recv.dh0.0@d0\n"
        "3 0 W0.0\n"
        "4 1 recv.dh0.0@d0\n"
        "4 1 W0.0\n"
        "5 - U0.0"
    )
    assert entries_of(pipeline, "d1")[0] == Entry("recv.h1.0@d1", "h1.0@d1", 1, 0)
    assert list(slot_program(pipeline, "d1").entries) == entries_of(pipeline, "d1")


def test_weight_gradients_come_when_the_schedule_says() -> None:
    pipeline = linear_step("zb-h1", microbatches=2)
    tasks = [entry.task for entry in entries_of(pipeline, "d0")]
    assert tasks.index("W0.0") > tasks.index("recv.dh0.0@d0")
    assert tasks.count("W0.0") == 2
    numbers = [turn.action for turn in slot_program(pipeline, "d0").turns]
    assert numbers == sorted(set(numbers)), "each weight gradient is an action of its own"
