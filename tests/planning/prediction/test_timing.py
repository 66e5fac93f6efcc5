"""Schedules in time: as `schedules.simulate` lays them out, with messages, and many at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.prediction.timing import Passing, StageTimes, Traffic, lay_out, order_of
from shardwright.schedules import KINDS, simulate

durations = st.floats(0.1, 10)


@st.composite
def laid(draw):
    order = order_of(draw(st.sampled_from(KINDS)), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    stages = order.schedule.stages
    times = StageTimes(
        *(draw(st.lists(durations, min_size=stages, max_size=stages)) for _ in "FBW")
    )
    return order, times


def chain(stages, line):
    forward = {(i, i + 1): Passing(line, 0.0) for i in range(stages - 1)}
    return Traffic(forward, {(b, a): passing for (a, b), passing in forward.items()})


@settings(max_examples=30, deadline=None)
@given(laid())
def test_without_messages_it_is_the_schedule_itself(found):
    order, times = found
    simulated = simulate(
        order.schedule, forward=times.forward, backward=times.backward, weight=times.weight
    )
    got = lay_out(order, times, chain(order.schedule.stages, 0.0), early=False)
    assert max(got.done) == pytest.approx(simulated.step_time)
    assert got.busy == pytest.approx(simulated.busy)


@settings(max_examples=30, deadline=None)
@given(laid(), st.floats(0, 5))
def test_messages_and_late_gradients_take_time(found, line):
    order, times = found
    stages = order.schedule.stages
    plain = lay_out(order, times, chain(stages, 0.0))
    assert max(lay_out(order, times, chain(stages, line)).done) >= max(plain.done) - 1e-9
    assert (
        max(lay_out(order, times, chain(stages, 0.0), early=False).done) >= max(plain.done) - 1e-9
    )
    assert max(plain.done) >= max(plain.busy) - 1e-9


@settings(max_examples=30, deadline=None)
@given(laid(), st.lists(st.tuples(durations, durations), min_size=1, max_size=3))
def test_many_candidates_are_laid_out_as_each_by_itself(found, factors):
    order, times = found
    stages = order.schedule.stages
    scale = np.array([factor for factor, _ in factors])
    lines = np.array([line for _, line in factors])
    absent = np.where(lines > 5, -np.inf, 0.0)
    many = StageTimes(*([seconds * scale for seconds in column] for column in times))

    def traffic(line, latency):
        forward = {(i, j): Passing(line, latency) for j in range(stages) for i in range(j)}
        return Traffic(forward, {(b, a): passing for (a, b), passing in forward.items()})

    together = lay_out(order, many, traffic(np.where(lines > 5, 0.0, lines), absent))
    for i, (factor, line) in enumerate(factors):
        alone = StageTimes(*([seconds * factor for seconds in column] for column in times))
        got = lay_out(order, alone, Traffic() if line > 5 else traffic(line, 0.0))
        assert [done[i] for done in together.done] == pytest.approx(got.done)
        assert [busy[i] for busy in together.busy] == pytest.approx(got.busy)


def test_a_line_sends_one_message_after_another():
    """Three microbatches made in a second each, ten seconds a message."""
    order = order_of("gpipe", 2, 3)
    times = StageTimes([1.0, 1.0], [0.0, 0.0], [0.0, 0.0])
    got = lay_out(order, times, Traffic({(0, 1): Passing(10.0, 0.0)}, {}))
    assert got.done[1] == 1 + 3 * 10 + 1


def test_a_rank_makes_ready_for_a_message_while_it_is_under_way():
    order = order_of("gpipe", 2, 1)
    times = StageTimes([1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 4.0])
    for line, done in ((10.0, 1 + 10 + 1), (0.0, 4 + 1)):
        got = lay_out(order, times, Traffic({(0, 1): Passing(line, 0.0)}, {}))
        assert (got.done[1], got.busy[1]) == (done, 5.0)


def test_stages_that_read_nothing_of_each_other_do_not_wait():
    order = order_of("1f1b", 2, 1)
    times = StageTimes([3.0, 3.0], [1.0, 1.0], [1.0, 1.0])
    assert lay_out(order, times, Traffic()).done == [5.0, 5.0]


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("gpipe", [((4,),), ((4,),)]),
        ("1f1b", [((3,),), ((1,),)]),
        ("zb-v", [((3, 1), (4, 0)), ((2, 2), (3, 1))]),
    ],
)
def test_microbatches_held_at_once(kind, held):
    assert list(order_of(kind, 2, 4).held) == held


@pytest.mark.parametrize(
    ("kind", "ahead"), [("gpipe", [((4,),), ((4,),)]), ("1f1b", [((3,),), ((2,),)])]
)
def test_a_forward_goes_ahead_where_a_last_stage_waits_too(kind, ahead):
    assert list(order_of(kind, 2, 4).ahead) == ahead
    assert order_of(kind, 1, 1).ahead == (((1,),),)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_what_is_held_is_what_a_replay_holds(kind, microbatches):
    """A worker that looks one action ahead may hold one more than its list says."""
    order = order_of(kind, 3, microbatches)
    for rank, rows in enumerate(order.held):
        assert not any(
            one != row and np.all(np.less_equal(one, row)) for one in rows for row in rows
        )
        for place, stage in enumerate(order.schedule.stages_of(rank)):
            works = [a.kind for a in order.schedule.actions[rank] if a.stage == stage]
            now = np.cumsum([(work == "F") - (work == order.schedule.works[-1]) for work in works])
            most = max(row[place] for row in rows)
            assert order.most_held[stage] == most
            assert most - now.max() in (0, 1)


@pytest.mark.parametrize(
    ("kind", "forward", "backward"), [("gpipe", 4, 1), ("1f1b", 2, 1), ("zb-h1", 2, 1)]
)
def test_what_was_sent_stays_until_the_taker_is_done_with_the_microbatch(kind, forward, backward):
    order = order_of(kind, 2, 4)
    assert order.under_way(0, 1, "F") == forward
    assert order.under_way(1, 0, "B") == backward
