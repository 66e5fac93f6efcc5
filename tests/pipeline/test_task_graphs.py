"""Graphs of supertasks, decoded once."""

from __future__ import annotations

from shardwright.pipeline.graphs import TaskGraphs
from tests.runtime.sketch import Sketch, identity


def test_supertasks_with_equal_tensors_share_a_graph() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    sketch.input("wide", (3,))
    sketch.fx("a", "d0", ["x"], ["y"], identity)
    sketch.fx("b", "d0", ["y"], ["z"], identity)
    sketch.fx("c", "d0", ["wide"], ["u"], identity)
    graphs = TaskGraphs(sketch.finish(["z", "u"]))
    assert graphs.of("a") is graphs.of("b")
    assert graphs.key("a") == graphs.key("b") != graphs.key("c")
    assert graphs.of("c").values[graphs.of("c").inputs[0]].shape == (3,)
