"""A training step of every model in two stages: loss, gradients and update are eager's.

Models that compute in float64 throughout are held to 1e-12, the others to float32's rounding.
"""

from functools import cache

import pytest

pytest.importorskip("transformers")

from tests.zoo.captures import SHALLOW, unchanged
from zoo.gradients import ROUNDING, captured, compare
from zoo.models import BY_NAME

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
    pytest.mark.filterwarnings("ignore:the graph differentiates the forward of GeLUFunction"),
]
"""bloom's GELU has a backward of its own, which is that of its forward up to rounding."""


@cache
def step(name):
    """A model and its step: what it is of one microbatch it is of each."""
    return captured(name, 1, layers=SHALLOW)


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_step_in_two_stages_is_that_of_eager(name, microbatches):
    entry, graph = step(name)
    with unchanged(entry):
        found = compare(entry, graph, microbatches)
    limit = ROUNDING[found.double]
    assert found.loss <= limit
    for group in (found.gradients, found.parameters, found.buffers):
        assert max(group.values(), default=0.0) <= limit, max(group, key=group.get)
