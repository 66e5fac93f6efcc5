"""Running through schedules: deadlocks, what is missing, and how long they take."""

from __future__ import annotations

import itertools
import re

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.errors import ScheduleError
from shardwright.schedules import Action, Schedule, format_schedule, make_schedule, prove, simulate
from shardwright.schedules.run import execution_order, needs
from tests.schedules.drawing import schedules


def with_actions(schedule: Schedule, rank: int, *actions: Action) -> Schedule:
    changed = [*schedule.actions]
    changed[rank] = actions
    return msgspec.structs.replace(schedule, actions=tuple(changed))


@given(schedules())
def test_every_schedule_is_whole_and_cannot_deadlock(schedule: Schedule) -> None:
    prove(schedule)


@given(schedules())
def test_the_order_of_execution_keeps_every_order(schedule: Schedule) -> None:
    order = {action: place for place, action in enumerate(execution_order(schedule))}
    assert len(order) == sum(map(len, schedule.actions))
    for actions in schedule.actions:
        places = [order[action] for action in actions]
        assert places == sorted(places)
    for action in order:
        assert all(order[need] < order[action] for need in needs(schedule, action))


@given(schedules())
def test_a_stage_takes_microbatches_in_their_order(schedule: Schedule) -> None:
    for actions in schedule.actions:
        for work in {(action.kind, action.stage) for action in actions}:
            taken = [a.microbatch for a in actions if (a.kind, a.stage) == work]
            assert taken == [*range(schedule.microbatches)]


def test_ranks_that_wait_for_one_another_are_shown() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    one_by_one = [Action(kind, 0, m) for m in (0, 1) for kind in ("F", "B")]
    both_first = [Action(kind, 1, m) for kind in ("F", "B") for m in (0, 1)]
    with pytest.raises(ScheduleError) as error:
        prove(with_actions(with_actions(schedule, 0, *one_by_one), 1, *both_first))
    assert str(error.value).splitlines() == [
        "the order deadlocks:",
        "  rank 0 waits in B0 of stage 0 for B0 of stage 1, which rank 1 does after F1 of stage 1",
        "  rank 1 waits in F1 of stage 1 for F1 of stage 0, which rank 0 does after B0 of stage 0",
    ]


@pytest.mark.parametrize(
    ("works", "waiting"),
    [("BFW", "B0 of stage 0 for F0 of stage 0"), ("FWB", "W0 of stage 0 for B0 of stage 0")],
)
def test_a_rank_that_waits_for_itself_is_shown(works: str, waiting: str) -> None:
    schedule = make_schedule("zb-h1", ranks=1, microbatches=1)
    actions = [Action(work, 0, 0) for work in works]
    with pytest.raises(ScheduleError, match=f"rank 0 waits in {waiting}, which rank 0 does after"):
        prove(with_actions(schedule, 0, *actions))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (["F", "B"], "rank 0 lacks W0 of stage 0; it does F, B, W once for each of its stages [0]"),
        (["F", "B", "W", "W"], "rank 0 must not do W0 of stage 0; it does F, B, W once"),
    ],
)
def test_each_action_has_to_be_there_once(actions: list[str], message: str) -> None:
    schedule = make_schedule("zb-h1", ranks=1, microbatches=1)
    with pytest.raises(ScheduleError, match=re.escape(message)):
        prove(with_actions(schedule, 0, *(Action(kind, 0, 0) for kind in actions)))


def test_an_action_on_the_wrong_rank_is_refused() -> None:
    schedule = make_schedule("gpipe", ranks=2, microbatches=1)
    swapped = with_actions(with_actions(schedule, 0, *schedule.actions[1]), 1, *schedule.actions[0])
    with pytest.raises(ScheduleError, match="rank 0 lacks F0 of stage 0, B0 of stage 0; it does"):
        prove(swapped)


RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 20)
DURATIONS = st.integers(1, 5)


@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, MICROBATCHES, DURATIONS, DURATIONS, DURATIONS)
def test_a_flush_costs_what_one_microbatch_takes_on_the_other_ranks(
    kind: str, ranks: int, microbatches: int, forward: int, backward: int, weight: int
) -> None:
    simulation = simulate(
        make_schedule(kind, ranks=ranks, microbatches=microbatches),
        forward=forward,
        backward=backward,
        weight=weight,
    )
    assert simulation.step_time == (microbatches + ranks - 1) * (forward + backward + weight)
    assert simulation.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(RANKS, MICROBATCHES, st.integers(1, 4), DURATIONS, DURATIONS)
def test_interleaving_divides_the_bubble_by_the_chunks(
    ranks: int, microbatches: int, chunks: int, forward: int, backward: int
) -> None:
    assume(microbatches >= ranks)
    schedule = make_schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    simulation = simulate(schedule, forward=forward, backward=backward, weight=0)
    assert simulation.step_time == (chunks * microbatches + ranks - 1) * (forward + backward)


@given(RANKS, MICROBATCHES, DURATIONS, DURATIONS, DURATIONS)
def test_zb_h1_waits_as_its_paper_says(
    ranks: int, microbatches: int, forward: int, backward: int, weight: int
) -> None:
    assume(microbatches >= ranks and forward <= backward)
    simulation = simulate(
        make_schedule("zb-h1", ranks=ranks, microbatches=microbatches),
        forward=forward,
        backward=backward,
        weight=weight,
    )
    work = microbatches * (forward + backward + weight)
    assert simulation.step_time == work + (ranks - 1) * (backward + max(forward - weight, 0))


@given(RANKS, MICROBATCHES)
def test_zb_v_waits_for_single_chunks_only(ranks: int, microbatches: int) -> None:
    assume(microbatches >= 2 * ranks - 1)
    simulation = simulate(make_schedule("zb-v", ranks=ranks, microbatches=microbatches))
    assert simulation.step_time == 6 * microbatches + ranks - 1


@given(RANKS, MICROBATCHES)
def test_peak_activations(ranks: int, microbatches: int) -> None:
    def peaks(kind: str) -> list[float]:
        schedule = make_schedule(kind, ranks=ranks, microbatches=microbatches)
        return list(simulate(schedule).peak_activations)

    everywhere = range(ranks)
    assert peaks("gpipe") == [microbatches for _ in everywhere]
    assert peaks("1f1b") == [min(microbatches, ranks - rank) for rank in everywhere]
    assert peaks("zb-h1") == [min(microbatches, ranks) for _ in everywhere]
    assert max(peaks("zb-v")) <= 2 * min(microbatches, ranks)


@given(RANKS, st.integers(1, 3), st.integers(2, 4))
def test_interleaving_holds_what_megatron_does(ranks: int, rounds: int, chunks: int) -> None:
    microbatches = rounds * ranks
    schedule = make_schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    assert list(simulate(schedule).peak_activations) == [
        min(chunks * microbatches, (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1)
        for rank in range(ranks)
    ]


@given(schedules(), st.integers(0, 3))
def test_actions_of_a_rank_follow_one_another_and_wait_for_what_they_need(
    schedule: Schedule, communication: int
) -> None:
    simulation = simulate(schedule, communication=communication)
    for actions in schedule.actions:
        times = [simulation.spans[action] for action in actions]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    for action, (start, _) in simulation.spans.items():
        if action.kind == "F" and action.stage > 0:
            sent = simulation.spans[Action("F", action.stage - 1, action.microbatch)][1]
            far = schedule.placement[action.stage] != schedule.placement[action.stage - 1]
            assert start >= sent + communication * far
    assert max(end for _, end in simulation.spans.values()) == simulation.step_time


def test_communication_delays_the_first_and_the_last_microbatch() -> None:
    schedule = make_schedule("gpipe", ranks=3, microbatches=4)
    assert simulate(schedule, communication=0.5).step_time == simulate(schedule).step_time + 4 * 0.5


def test_a_stage_may_take_longer_than_another() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    simulation = simulate(schedule, forward=[1, 3], backward=[1, 3], weight=[0, 0])
    assert simulation.busy == (8, 24)
    assert simulation.rank_bubbles == pytest.approx((1 - 8 / 26, 1 - 24 / 26))


def test_a_smaller_last_microbatch_takes_and_holds_less() -> None:
    schedule = make_schedule("gpipe", ranks=1, microbatches=3)
    simulation = simulate(schedule, sizes=[1, 1, 0.5])
    assert simulation.step_time == 2.5 * 3
    assert simulation.peak_activations == (2.5,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": [1, 2, 3]}, "3 forward durations for 2 stages"),
        ({"weight": []}, "0 weight durations for 2 stages"),
        ({"sizes": [1]}, "1 sizes for 4 microbatches"),
    ],
)
def test_too_few_durations_are_refused(arguments: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(make_schedule("1f1b", ranks=2, microbatches=4), **arguments)


def test_a_table_of_one_stage_a_rank() -> None:
    assert format_schedule(make_schedule("1f1b", ranks=2, microbatches=3)) == (
        """\
1f1b: ranks 2, stages a rank 1, microbatches 3

        0              5             10
rank 0 F0 F1  .  . B0 -- F2 B1 --  . B2 --
rank 1  . F0 B0 -- F1 B1 -- F2 B2 --  .  .

bubble            25.0% of 12 slots (25.0%, 25.0%)
peak activations  2, 1 (of one stage and one microbatch)
deadlock          impossible: one order of all 12 actions agrees with every rank's"""
    )


def test_a_wide_table_goes_on_below_with_stages_marked() -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=2)
    assert format_schedule(schedule, width=50, labels=["d0 d1", "d2 d3"]) == (
        """\
zb-v: ranks 2, stages a rank 2, microbatches 2

                  0                   5
d0 d1 (a=0 b=3) F0a F1a   . F0b B0b W0b F1b
d2 d3 (a=1 b=2)   . F0a F0b F1a F1b B0b W0b

                  7          10
d0 d1 (a=0 b=3) B1b W1b B0a W0a   . B1a W1a
d2 d3 (a=1 b=2) B0a W0a B1b W1b B1a W1a   .

bubble            14.3% of 14 slots (14.3%, 14.3%)
peak activations  3, 4 (of one stage and one microbatch)
deadlock          impossible: one order of all 24 actions agrees with every rank's"""
    )


def test_more_stages_than_letters_have_their_numbers() -> None:
    text = format_schedule(make_schedule("interleaved", ranks=1, microbatches=1, chunks=27))
    assert "F0.26" in text


@given(schedules(), st.integers(40, 200))
def test_rows_stay_within_the_width(schedule: Schedule, width: int) -> None:
    rows = [line for line in format_schedule(schedule, width=width).splitlines() if "rank " in line]
    assert all(len(line) <= width for line in rows[1:])
