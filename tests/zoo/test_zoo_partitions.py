"""Real models, made tiny, in the stages of every partitioner: equal to eager, to the last bit."""

import pytest

import shardwright as sw
from shardwright.planning.partitioners import PARTITIONERS
from tests.turns import rotated
from tests.zoo.captures import single
from tests.zoo.test_zoo import NAMES, bits, check

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]


@pytest.mark.parametrize(
    ("name", "policy"), rotated(NAMES, sorted(PARTITIONERS.keys() - {"pipedream"}))
)
def test_stages_of_any_nodes_are_equal_to_the_last_bit(name, policy):
    check(single(name), lambda g: sw.plan(g, 3, policy), tolerance=bits(name))
