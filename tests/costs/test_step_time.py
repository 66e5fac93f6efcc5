"""Schedules in time: as `schedules.simulate` lays them out, with messages and collectives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import DeviceModel
from shardwright.costs.placed import BACKWARD, FORWARD, WEIGHT
from shardwright.costs.step_time import StageMessage, WorkPiece, lay_out, order_of
from shardwright.schedules import KINDS, simulate

GPU = DeviceModel("gpu", "cuda", 10**9, flops=1e12, bandwidth=1e11)
durations = st.floats(0.1, 10)


@st.composite
def scheduled(draw):
    order = order_of(draw(st.sampled_from(KINDS)), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    stages = order.schedule.stages
    return order, [draw(st.lists(durations, min_size=stages, max_size=stages)) for _ in "FBW"]


def programs(order, forward, backward, weight, *, apart=False):
    """One piece for each pass of a stage; weight gradients are made in backwards unless apart."""
    found = {}
    for stage, (f, b, w) in enumerate(zip(forward, backward, weight, strict=True)):
        alone = apart or order.schedule.splits_backward
        works = {FORWARD: f, BACKWARD: b if alone else b + w, WEIGHT: w}
        for work, seconds in works.items():
            found[stage, work] = found[stage, work, True] = [WorkPiece(0.0, seconds, 0.0, 0.0)]
    return found


def chain(stages, line, taking=0.0):
    there = [StageMessage(i, i + 1, line, 0.0, taking) for i in range(stages - 1)]
    back = [StageMessage(i + 1, i, line, 0.0, taking) for i in range(stages - 1)]
    return {FORWARD: there, BACKWARD: back}


def laid(order, sends, found, **options):
    return lay_out(order, sends, found, [0.0] * order.schedule.ranks, GPU, **options)


@settings(max_examples=30)
@given(scheduled())
def test_without_messages_it_is_the_schedule_itself(found):
    order, times = found
    forward, backward, weight = times
    expected = simulate(order.schedule, forward=forward, backward=backward, weight=weight)
    got = laid(order, chain(order.schedule.stages, 0.0), programs(order, *times), lookahead=0)
    assert max(got.done) == pytest.approx(expected.step_time)
    assert got.busy == pytest.approx(expected.busy)


@settings(max_examples=30)
@given(scheduled(), st.floats(0, 5))
def test_messages_and_late_gradients_take_time(found, line):
    order, times = found
    stages, apart = order.schedule.stages, not order.schedule.splits_backward
    early = programs(order, *times, apart=apart)
    plain = laid(order, chain(stages, 0.0), early, apart=apart, lookahead=0)
    far = laid(order, chain(stages, line), early, apart=apart, lookahead=0)
    late = laid(order, chain(stages, 0.0), programs(order, *times), lookahead=0)
    assert min(max(far.done), max(late.done)) >= max(plain.done) - 1e-9
    assert max(plain.done) >= max(plain.busy) - 1e-9


def only_forward(*seconds):
    """Programs of stages whose backwards take no time."""
    found = {}
    for stage, one in enumerate(seconds):
        for key in ((stage, FORWARD), (stage, FORWARD, True)):
            found[key] = [WorkPiece(0.0, one, 0.0, 0.0)]
    return found


def test_a_line_sends_one_message_after_another():
    """Three microbatches made in a second each, ten seconds a message."""
    order = order_of("gpipe", 2, 3)
    got = laid(order, {FORWARD: [StageMessage(0, 1, 10.0)]}, only_forward(1.0, 1.0))
    assert got.done[1] == 1 + 3 * 10 + 1


def test_a_rank_makes_ready_for_a_message_while_it_is_under_way():
    order = order_of("gpipe", 2, 1)
    for line, done in ((10.0, 1 + 10 + 1), (0.0, 4 + 1)):
        got = laid(order, {FORWARD: [StageMessage(0, 1, line, 0.0, 4.0)]}, only_forward(1.0, 1.0))
        assert (got.done[1], got.busy[1]) == (done, 5.0)


def test_stages_that_read_nothing_of_each_other_do_not_wait():
    order = order_of("1f1b", 2, 1)
    assert laid(order, {}, programs(order, [3.0] * 2, [1.0] * 2, [1.0] * 2)).done == [5.0, 5.0]


def test_another_microbatch_is_done_while_a_collective_is_under_way():
    """Two forwards of a second, a collective of a second, a second, on one rank."""
    order = order_of("gpipe", 1, 2)
    forward = [WorkPiece(0.0, 1.0, 0.0, 8.0), WorkPiece(1.0, 1.0, 0.0, 8.0)]
    found = {(0, FORWARD): forward, (0, FORWARD, True): forward}
    got = laid(order, {}, found)
    assert (got.done, got.busy) == ([4.0], [4.0])
    assert laid(order, {}, found, lookahead=0).done == [6.0]
    assert got.most == [24.0], "each holds 8 bytes more behind each of its pieces"


def test_gradients_are_put_together_while_others_are_made():
    """Two pieces of two seconds, whose gradients take three seconds each to put together."""
    order = order_of("gpipe", 1, 1)
    backward = [
        WorkPiece(0.0, 2.0, 0.0, 0.0, ((3.0, 5.0),)),
        WorkPiece(0.0, 2.0, 0.0, 0.0, ((3.0, 7.0),)),
    ]
    got = laid(order, {}, {(0, BACKWARD, True): backward})
    assert got.done[0] == pytest.approx(2 + 3 + 3, abs=1e-4)
    assert got.most == [12.0]


@pytest.mark.parametrize(("kind", "forward", "backward"), [("gpipe", 4, 1), ("1f1b", 2, 1)])
def test_what_was_sent_stays_until_the_taker_is_done_with_the_microbatch(kind, forward, backward):
    order = order_of(kind, 2, 4)
    times = [1.0] * 2, [1.0, 1.1], [0.0] * 2
    found = laid(order, chain(2, 0.0), programs(order, *times), lookahead=0)
    assert found.under_way[0, 1, FORWARD] == forward
    assert found.under_way[1, 0, BACKWARD] == backward


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
