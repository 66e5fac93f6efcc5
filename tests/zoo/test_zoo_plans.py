"""The zoo by execution plans: what eager gives, in an arena hardly larger than what lives."""

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shardwright as sw
from shardwright.exec.passes.pipeline import prepare
from shardwright.ir.structure import flatten_call
from tests.exec.running import assert_close, planned, run_nodes, run_plan
from zoo.models import MODELS

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]


def eager_peak(model, kwargs):
    """The bytes that a forward of torch holds at once, at most, as its allocator tells."""
    with torch.no_grad():
        model(**kwargs)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = model(**kwargs)
    events = profiled.profiler.kineto_results.events()
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    assert result is not None
    return max(accumulate(event.nbytes() for event in memory))


def captured(entry):
    model, args, kwargs = entry.make()
    graph = sw.capture(model, args, kwargs, name=entry.name)
    return graph, flatten_call(graph.in_structure, args, kwargs)


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_torchs_calls_give_what_the_graph_gives_to_the_last_bit(entry):
    graph, inputs = captured(entry)
    for found, wanted in zip(run_plan(graph, inputs)[0], run_nodes(graph, inputs)[0], strict=True):
        assert torch.equal(found, wanted)
    plan = planned(graph)
    assert plan.arena_bytes <= 1.1 * plan.peak_bytes


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_prepared_graphs_by_native_calls(entry):
    graph, inputs = captured(entry)
    prepared = prepare(graph, inference=True)
    wanted = run_nodes(graph, inputs)[0]
    found = run_plan(prepared, inputs, native=True, outputs="caller")[0]
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, 1e-5)
    plan = planned(prepared)
    assert plan.arena_bytes <= 1.1 * plan.peak_bytes


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_an_arena_is_no_larger_than_eagers_peak(entry):
    model, _, kwargs = entry.make()
    graph, _ = captured(entry)
    prepared = prepare(graph, inference=True)
    assert 0 < planned(prepared).arena_bytes <= eager_peak(model, kwargs)
