"""Dividing lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import AnnotationError
from shardwright.ops import Cut, even_cuts, even_ranges


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 5))
def test_ranges_join_to_the_whole_in_multiples_of_the_unit(units, num, unit):
    ranges = even_ranges(units * unit, num, unit)
    assert [i for start, end in ranges for i in range(start, end)] == list(range(units * unit))
    lengths = [end - start for start, end in ranges]
    assert len(ranges) == num
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] in (0, unit)
    assert all(length % unit == 0 for length in lengths)


@given(st.integers(12, 100), st.integers(1, 4), st.integers(1, 3))
def test_cuts_nest(length, outer, inner):
    cuts = [part for cut in even_cuts(length, outer) for part in cut.cut(inner)]
    assert [i for cut in cuts for i in range(cut.start, cut.end)] == list(range(length))
    assert [(cut.index, cut.num) for cut in cuts] == [(i, outer * inner) for i in range(len(cuts))]


def test_ten_in_four():
    assert [cut.length for cut in even_cuts(10, 4)] == [3, 3, 2, 2]
    assert even_cuts(10, 1) == [Cut(0, 10, 0, 1)]


@pytest.mark.parametrize("num", [0, -1, 2.0, True, None])
def test_a_number_of_parts_is_a_whole_number_from_one(num):
    with pytest.raises(AnnotationError, match="expected the number of parts"):
        even_cuts(10, num)


def test_no_part_is_empty():
    with pytest.raises(AnnotationError, match="a length of 3 does not give 4 parts"):
        even_cuts(3, 4)
