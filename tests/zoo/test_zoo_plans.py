"""The zoo by execution plans: what eager gives, in an arena hardly larger than what lives."""

from functools import cache

import pytest
import torch

from shardwright.compiler.passes.pipeline import prepare
from tests.compiler.allocated import peak_of
from tests.compiler.passes.rewritten import rewritten
from tests.compiler.running import assert_close, planned, run_nodes, run_plan
from tests.rounding import BITS
from tests.zoo.captures import single
from zoo.models import BY_NAME

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]

ONE_PRODUCT = {"mamba"}
"""Models with a linear layer of rows that stand apart: one product here, in eager one a batch."""


@cache
def prepared(name):
    """A model's graph made ready for inference, which is valid and computes the same."""
    graph = single(name).graph
    after = rewritten(
        graph, lambda g: prepare(g, inference=True), single(name).inputs, tolerance=1e-5
    )
    assert len(after.nodes) < len(graph.nodes) * 1.25
    return after


@cache
def plan_of(name):
    """The plan of a prepared graph."""
    return planned(prepared(name))


@pytest.mark.parametrize("name", BY_NAME)
def test_torchs_calls_give_what_the_graph_gives_to_the_last_bit(name):
    graph, inputs = single(name).graph, single(name).inputs
    for found, wanted in zip(run_plan(graph, inputs)[0], run_nodes(graph, inputs)[0], strict=True):
        assert_close(found, wanted, BITS if name in ONE_PRODUCT else 0.0)
    plan = planned(graph)
    assert plan.arena_bytes <= 1.1 * plan.peak_bytes


@pytest.mark.parametrize("name", BY_NAME)
def test_prepared_graphs_by_native_calls(name):
    inputs = single(name).inputs
    wanted = run_nodes(single(name).graph, inputs)[0]
    found = run_plan(prepared(name), inputs, native=True, outputs="caller")[0]
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, 1e-5)
    assert plan_of(name).arena_bytes <= 1.1 * plan_of(name).peak_bytes


@pytest.mark.parametrize("name", BY_NAME)
def test_an_arena_is_no_larger_than_eagers_peak(name):
    model, kwargs = single(name).model, single(name).kwargs
    with torch.no_grad():
        peak = peak_of(lambda: model(**kwargs))
    assert 0 < plan_of(name).arena_bytes <= peak
