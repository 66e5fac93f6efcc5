"""A training step of every model: in two stages it is eager's, and passes keep what it computes.

Models that compute in float64 throughout are held to 1e-12, the others to float32's rounding.
"""

from functools import cache

import pytest
import torch

from shardwright.compiler.bind import plan_graph
from shardwright.compiler.passes.pipeline import prepare
from shardwright.compiler.sources import whole_step
from shardwright.tracing import capture_step
from tests.compiler.allocated import peak_of
from tests.compiler.passes.rewritten import rewritten

pytest.importorskip("transformers")

from tests.turns import sampled
from tests.zoo.captures import SHALLOW, unchanged
from zoo.gradients import ROUNDING, compare
from zoo.models import BY_NAME
from zoo.training import LEARNING_RATE, trained

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]
"""bloom's GELU has a backward of its own, which is that of its forward up to rounding."""


@cache
def step(name):
    """A model and its step: what it is of one microbatch it is of each."""
    dtype = torch.float32 if BY_NAME[name].single_only else torch.float64
    entry = trained(name, dtype, layers=SHALLOW)
    return entry, capture_step(entry.step, (), entry.microbatches(1)[0])


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_step_in_two_stages_is_that_of_eager(name, microbatches):
    entry, captured = step(name)
    with unchanged(entry):
        found = compare(entry, captured.graph, microbatches)
    limit = ROUNDING[found.double]
    assert found.loss <= limit
    for group in (found.gradients, found.parameters, found.buffers):
        assert max(group.values(), default=0.0) <= limit, max(group, key=group.get)


@pytest.mark.parametrize("name", sampled(list(BY_NAME), 2))
def test_passes_keep_what_a_step_computes(name):
    """In f64, where rounding cannot hide behind the optimizer's division by small roots.

    What is computed so lies in hardly more than lives at once, and in no more than eager holds.
    """
    entry, captured = step(name)
    graph = whole_step(captured)
    (batch,) = entry.microbatches(1)
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    tensors["lr"] = torch.tensor(LEARNING_RATE, dtype=torch.float64)
    inputs = [tensors[graph.values[value_id].name] for value_id in graph.inputs]
    after = rewritten(graph, lambda g: prepare(g, inference=False), inputs, tolerance=1e-5)
    plan = plan_graph(after)
    assert plan.arena_bytes <= 1.1 * plan.peak_bytes

    def eager():
        entry.optimizer.zero_grad()
        entry.step(**batch)
        entry.optimizer.zero_grad()

    with unchanged(entry):
        assert 0 < plan.arena_bytes <= peak_of(eager)
