"""The order in which a slot works."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shardwright.engine.program import slot_program
from shardwright.engine.walk import Instruction, SlotTask, StepWalk, Turn, last_given, order_calls
from tests.runtime.sketch import chain


def computing(index: int, after: Sequence[int] = (), writes: Sequence[str] = ()) -> Instruction:
    task = SlotTask(f"c{index}", "compute", (), (), writes=tuple(writes))
    return Instruction(index, 0, task, (), 0, after=tuple(after))


def sending(index: int, after: Sequence[int] = ()) -> Instruction:
    task = SlotTask(f"s{index}", "communicate", (), (), group=f"g{index}")
    return Instruction(index, 0, task, (), 0, after=tuple(after))


def walk(*turns: Sequence[Instruction], lookahead: int = 1, in_order: bool = False) -> StepWalk:
    planned = [Turn(k, tuple(turn)) for k, turn in enumerate(turns)]
    return StepWalk(planned, lookahead=lookahead, in_order=in_order)


def taken(found: StepWalk, blocked: Sequence[str] = ()) -> list[str]:
    """What is begun until there is only waiting; no communication arrives."""
    names = []
    while (chosen := found.choose(lambda o: o.task.name in blocked)) is not None:
        cursor, instruction = chosen
        names.append(instruction.task.name)
        if instruction.task.communicates:
            found.begin(cursor)
        else:
            found.compute(cursor, instruction)
    return names


def test_communication_goes_before_computation() -> None:
    found = walk([computing(0), sending(1)], [sending(2), computing(3)])
    assert taken(found) == ["s2", "c0", "s1", "c3"]
    assert [cursor.is_done for cursor in found.turns] == [False, False]


def test_what_needs_others_waits_and_later_turns_go_on() -> None:
    found = walk([sending(0), computing(1, after=[0])], [computing(2)], [computing(3)])
    assert taken(found) == ["s0", "c2"]
    cursor = found.turns[0]
    found.arrive(cursor, cursor.turn.instructions[0])
    assert taken(found) == ["c1", "c3"]
    assert not found.turns


def test_lookahead_bounds_how_far_a_slot_runs_ahead() -> None:
    turns = ([sending(0)], [computing(1)], [computing(2)])
    assert taken(walk(*turns, lookahead=0)) == ["s0"]
    assert taken(walk(*turns, lookahead=2)) == ["s0", "c1", "c2"]
    assert taken(walk(*turns, lookahead=2, in_order=True)) == ["s0"]


def test_what_must_not_write_yet_lets_others_go() -> None:
    found = walk([computing(0, writes=["w"])], [computing(1)])
    assert taken(found, blocked=["c0"]) == ["c1"]
    assert taken(found) == ["c0"]


def test_of_several_calls_what_others_wait_for_goes_first() -> None:
    assert order_calls([3, 1, 0], 2) == [1, 2, 0]
    assert order_calls([3, 1, 1], 0) == [0, 1]


def test_until_where_a_slot_gives() -> None:
    first, last = (slot_program(chain(2), slot) for slot in ("d0", "d1"))
    assert last_given([*first.instructions]) == 2
    assert last_given([*last.instructions]) == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 5))
def test_no_call_comes_up_to_the_one_before_it(positions: list[int], given_up_to: int) -> None:
    positions.sort(reverse=True)
    found = order_calls(positions, given_up_to)
    assert 0 in found
    for k in found:
        assert positions[k] < min([6, *positions[:k]])
