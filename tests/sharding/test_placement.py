import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.sharding import Partial, Replicate, Shard
from shardwright.sharding.layout import REDUCE_OPS, parse_placement

placements = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 20), st.integers(1, 20)),
    st.builds(Partial, st.sampled_from(REDUCE_OPS)),
)


@given(placements)
def test_text_round_trips(placement):
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize(
    ("placement", "text"),
    [(Shard(2), "Shard(2)"), (Shard(2, 64), "Shard(2 by 64)"), (Partial(), "Partial(sum)")],
)
def test_text(placement, text):
    assert str(placement) == text


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Shard(-1), "found -1 and 1"),
        (lambda: Shard(0, 0), "found 0 and 0"),
        (lambda: Partial("product"), "knows sum, avg, max, min, found 'product'"),
        (lambda: parse_placement("Shard"), "'Shard' is no placement; there are Replicate"),
    ],
)
def test_what_is_no_placement_is_refused(build, message):
    with pytest.raises(PlanError, match=message):
        build()
