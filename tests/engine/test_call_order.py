"""Which call a slot moves next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwright.engine.slot_steps import slot_steps
from shardwright.engine.walk import call_order, last_given
from tests.runtime.sketch import chain


def test_what_others_wait_for_goes_first() -> None:
    assert call_order([3, 1, 0], 4, 2, serial=False) == [1, 2, 0]
    assert call_order([3, 1, 0], 4, 2, serial=True) == [0]
    assert call_order([4, 1, 1], 4, 2, serial=True) == []
    assert call_order([4, 1, 1], 4, 0, serial=False) == [1]


def test_until_where_a_slot_gives() -> None:
    pipeline = chain(2)
    assert last_given(slot_steps(pipeline, "d0").steps) == 2
    assert last_given(slot_steps(pipeline, "d1").steps) == 0


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 5))
def test_no_call_comes_up_to_the_one_before_it(places: list[int], given_up_to: int) -> None:
    places.sort(reverse=True)
    for k in call_order(places, 5, given_up_to, serial=False):
        assert places[k] < min([5, *places[:k]])
