"""How a slot walks through its step."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.engine.slot_steps import Occurrence, PlannedTurn, SlotStep
from shardwright.engine.walk import SlotWalk


def computing(index: int, after: Sequence[int] = (), writes: Sequence[str] = ()) -> Occurrence:
    step = SlotStep(f"c{index}", "compute", (), (), writes=tuple(writes))
    return Occurrence(index, 0, step, (), 0, after=tuple(after))


def sending(index: int, after: Sequence[int] = ()) -> Occurrence:
    step = SlotStep(f"s{index}", "communicate", (), (), group=f"g{index}")
    return Occurrence(index, 0, step, (), 0, after=tuple(after))


def walk(*turns: Sequence[Occurrence], lookahead: int = 1, in_order: bool = False) -> SlotWalk:
    planned = [PlannedTurn(k, tuple(turn)) for k, turn in enumerate(turns)]
    count = sum(map(len, turns))
    return SlotWalk(planned, count, lookahead=lookahead, in_order=in_order)


def taken(found: SlotWalk, blocked: Sequence[str] = ()) -> list[str]:
    """What is begun until there is only waiting; no communication arrives."""
    names = []
    while (chosen := found.choose(lambda o: o.step.task in blocked)) is not None:
        cursor, occurrence = chosen
        names.append(occurrence.step.task)
        if occurrence.step.communicates:
            found.begin(cursor)
        else:
            found.compute(cursor, occurrence)
    return names


def test_communication_goes_before_computation() -> None:
    found = walk([computing(0), sending(1)], [sending(2), computing(3)])
    assert taken(found) == ["s2", "c0", "s1", "c3"]
    assert [cursor.over for cursor in found.turns] == [False, False]


def test_what_needs_others_waits_and_later_turns_go_on() -> None:
    found = walk([sending(0), computing(1, after=[0])], [computing(2)], [computing(3)])
    assert taken(found) == ["s0", "c2"]
    cursor = found.turns[0]
    found.arrive(cursor, cursor.turn.occurrences[0])
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
