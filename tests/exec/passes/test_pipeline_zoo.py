"""All passes on every model of the zoo: forwards, and training steps."""

from __future__ import annotations

import pytest
import torch

from shardwright.exec.bind import plan_graph
from shardwright.exec.passes.pipeline import prepare
from shardwright.exec.step import whole_step
from shardwright.ir import IRGraph
from shardwright.tracing import capture_step
from tests.exec.allocated import peak_of
from tests.exec.passes.rewritten import rewritten

pytest.importorskip("transformers")

from tests.zoo.captures import SHALLOW, single, unchanged
from zoo.models import BY_NAME
from zoo.training import trained

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
    pytest.mark.filterwarnings("ignore::shardwright.CaptureWarning"),
]


def infer(graph: IRGraph) -> IRGraph:
    return prepare(graph, inference=True)


@pytest.mark.parametrize("name", BY_NAME)
def test_forwards_compute_the_same(name: str) -> None:
    found = single(name)
    after = rewritten(found.graph, infer, found.inputs, tolerance=1e-5)
    assert len(after.nodes) < len(found.graph.nodes) * 1.25


def train(graph: IRGraph) -> IRGraph:
    return prepare(graph, inference=False)


@pytest.mark.parametrize("name", BY_NAME)
def test_training_steps_compute_the_same(name: str) -> None:
    """In f64, where rounding cannot hide behind the optimizer's division by small roots.

    What is computed so lies in hardly more than lives at once, and in no more than eager holds.
    """
    dtype = torch.float32 if BY_NAME[name].single_only else torch.float64
    entry = trained(name, dtype, layers=SHALLOW)
    (batch,) = entry.microbatches(1)
    graph = whole_step(capture_step(entry.step, (), batch))
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    tensors["lr"] = torch.tensor(1e-3, dtype=torch.float64)
    inputs = [tensors[graph.values[value_id].name] for value_id in graph.inputs]
    plan = plan_graph(rewritten(graph, train, inputs, tolerance=1e-5))
    assert plan.arena_bytes <= 1.1 * plan.peak_bytes

    def step() -> None:
        entry.optimizer.zero_grad()
        entry.step(**batch)
        entry.optimizer.zero_grad()

    with unchanged(entry):
        assert 0 < plan.arena_bytes <= peak_of(step)
