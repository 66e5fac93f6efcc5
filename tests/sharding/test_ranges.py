from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.sharding.ranges import (
    format_ranges,
    overlap,
    part,
    shape_of,
    volume,
    whole,
    within,
)

spans = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: (min(pair), max(pair)))


@given(spans, st.integers(1, 6))
def test_parts_follow_one_another_evenly_and_larger_first(span, parts):
    cuts = [part(span, parts, i) for i in range(parts)]
    assert cuts[0][0] == span[0]
    assert cuts[-1][1] == span[1]
    assert all(one[1] == other[0] for one, other in pairwise(cuts))
    sizes = [end - start for start, end in cuts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_ten_over_four():
    assert [part((0, 10), 4, i) for i in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [part((0, 10), 4, i, unit=2) for i in range(4)] == [(0, 4), (4, 6), (6, 8), (8, 10)]


@given(spans, spans)
def test_overlap_is_what_both_hold(one, other):
    shared = set(range(*one)) & set(range(*other))
    found = overlap(one, other)
    assert set(range(*found)) == shared if found else not shared


@pytest.mark.parametrize(
    ("box", "shape", "count", "text"),
    [
        ((), (), 1, "[]"),
        (((2, 5),), (3,), 3, "[2:5]"),
        (((2, 5), (1, 1)), (3, 0), 0, "[2:5, 1:1]"),
    ],
)
def test_boxes(box, shape, count, text):
    assert shape_of(box) == shape
    assert volume(box) == count
    assert format_ranges(box) == text
    assert within(box, box) == whole(shape)
