"""How many microbatches a rank holds at once."""

import pytest

from shardwright.schedules import make_schedule
from shardwright.schedules.run import HeldMicrobatches, held_at_once, waits_inside


def rows(kind, rank, *, inside=False, microbatches=4):
    schedule = make_schedule(kind, ranks=2, microbatches=microbatches)
    return held_at_once(schedule, rank, inside=inside)


def test_a_forward_goes_ahead_while_a_backward_waits():
    assert [rows("1f1b", rank) for rank in (0, 1)] == [((3,),), ((1,),)]
    assert [rows("gpipe", rank) for rank in (0, 1)] == [((4,),), ((4,),)]
    assert rows("zb-v", 0) == ((3, 1), (4, 0))


def test_a_last_stage_waits_too_where_its_slots_wait_for_one_another():
    assert rows("1f1b", 1, inside=True) == ((2,),)
    assert rows("1f1b", 1, inside=True, microbatches=1) == ((1,),)


def test_the_most_is_that_of_the_fullest_time():
    assert HeldMicrobatches(((3, 1), (4, 0))).most([10, 1]) == 40
    assert HeldMicrobatches(((3, 1), (4, 0))).most([10, 20]) == 50


def test_a_slot_that_waits_now_and_again_has_done_half_of_the_next_forward():
    assert HeldMicrobatches(((1,),), ((2,),)).most([10]) == pytest.approx(15)


def test_a_loss_alone_lets_nobody_wait():
    assert not waits_inside(4, 1000)
    assert waits_inside(40, 1000)


def test_the_least_counts_no_forward_ahead_and_nothing_behind_its_backward():
    def least(kind, rank):
        schedule = make_schedule(kind, ranks=2, microbatches=4)
        return held_at_once(schedule, rank, least=True)

    assert [least("1f1b", rank) for rank in (0, 1)] == [((2,),), ((1,),)]
    assert [least("gpipe", rank) for rank in (0, 1)] == [((4,),), ((4,),)]
    assert [least("zb-h1", rank) for rank in (0, 1)] == [((2,),), ((1,),)]
