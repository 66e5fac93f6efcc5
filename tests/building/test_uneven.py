"""Dimensions that do not divide: 10 heads on 4 slots, a vocabulary of 50257 on 4, 7 rows on 3."""

import pytest
import torch

import shardwright as sw
from benchmarks.models import GPT


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = GPT(layers=1, width=40, heads=10, vocabulary=50257, length=4)
    return made.double().eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.arange(28).reshape(7, 4) * 1801 % 50257


@pytest.fixture(scope="module")
def graph(model, tokens):
    return sw.capture(model, (tokens,))


def stored(pipeline, name):
    """The ranges of the first dimension that the slots hold of a stored tensor."""
    values = [info.value for info in pipeline.tensors.values() if info.value is not None]
    return sorted({value.placements[0] for value in values if value.name == name})


@pytest.mark.parametrize(("policy", "slots"), [("tensor", 4), ("sequence", 4), ("data", 3)])
def test_uneven_splits_are_right(model, tokens, graph, policy, slots):
    pipeline = sw.build(graph, sw.plan(graph, slots, policy=policy))
    assert sw.verify(pipeline, model, (tokens,), tolerance=1e-12).equal


def test_a_mesh_of_uneven_splits_is_right(model, tokens, graph):
    pipeline = sw.build(graph, sw.plan(graph, mesh={"data": 2, "tensor": 3}))
    assert sw.verify(pipeline, model, (tokens,), tolerance=1e-12).equal


def test_heads_are_dealt_out_whole_and_larger_parts_first(graph):
    """10 heads of 4 columns: 3, 3, 2 and 2 heads, of queries, keys and values each."""
    pipeline = sw.build(graph, sw.plan(graph, 4, policy="tensor"))
    ranges = stored(pipeline, "blocks.0.attention.qkv.weight")
    assert [stop - start for start, stop in ranges] == [12, 12, 8, 8] * 3
    vocabulary = stored(pipeline, "embed.weight")
    assert [stop - start for start, stop in vocabulary] == [12565, 12564, 12564, 12564]


def test_rows_are_dealt_out_larger_parts_first(graph):
    pipeline = sw.build(graph, sw.plan(graph, 3, policy="data"))
    slices = pipeline.metadata.tensor_slices.inputs.values()
    assert [part.placements[0] for part in slices] == [(0, 3), (3, 5), (5, 7)]
