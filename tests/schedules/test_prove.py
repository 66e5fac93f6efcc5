import re

import msgspec
import pytest
from hypothesis import given

from shardwright.errors import ScheduleError
from shardwright.schedules import Action, Schedule, make_schedule, prove
from shardwright.schedules.prove import execution_order, needs
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
