"""All passes on every model of the zoo: forwards. `test_zoo_training` has the training steps."""

from __future__ import annotations

import pytest

from shardwright.compiler.passes.pipeline import prepare
from shardwright.ir import IRGraph
from tests.compiler.passes.rewritten import rewritten

pytest.importorskip("transformers")

from tests.zoo.captures import single
from zoo.models import BY_NAME

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]


def infer(graph: IRGraph) -> IRGraph:
    return prepare(graph, inference=True)


@pytest.mark.parametrize("name", BY_NAME)
def test_forwards_compute_the_same(name: str) -> None:
    found = single(name)
    after = rewritten(found.graph, infer, found.inputs, tolerance=1e-5)
    assert len(after.nodes) < len(found.graph.nodes) * 1.25
