"""Plans that take fused products apart, built and run."""

import pytest
import torch
from safetensors.torch import save_file

import shardwright as sw
from shardwright.planning import Terms
from tests.planning.projections import addmm, linear, stacked, thirds, transformer

TOKENS = torch.arange(24).reshape(4, 6) * 7 % 50


@pytest.mark.parametrize(
    "mesh",
    [
        {"tensor": 4},
        {"sequence": 3},
        {"pipeline": 2, "tensor": 2},
        {"data": 2, "tensor": 2},
        {"data": 2, "sequence": 2},
    ],
)
@pytest.mark.parametrize(("product", "taken"), [(addmm, thirds), (linear, stacked)])
def test_a_pipeline_of_parts_computes_what_the_whole_does(mesh, product, taken):
    graph = transformer(2, product=product, taken=taken, batch=4)
    pipeline = sw.build(graph, sw.plan(graph, mesh=mesh))
    found, expected = sw.run(pipeline, TOKENS, in_process=True), graph.run(TOKENS)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


def fused_values(pipeline):
    values = [info.value for info in pipeline.tensors.values() if info.value is not None]
    return [value for value in values if value.name == "blocks.0.qkv.weight"]


def test_parts_are_read_from_the_whole_stored_tensor(tmp_path):
    graph = transformer(1)
    made = sw.plan(graph, 2, policy="tensor")
    assert len(made.unfused) == 1
    assert any(isinstance(split, Terms) for a in made.assignments for split in a.splits)
    save_file(
        {value.name: graph.tensors[value.id] for value in graph.stored()},
        tmp_path / "w.safetensors",
    )
    for options in ({}, {"weights": tmp_path / "w.safetensors"}):
        values = fused_values(sw.build(graph, made, **options))
        assert {value.shape for value in values} == {(16, 48)}
        starts = sorted(value.placements[1] for value in values)
        assert starts == [(i, i + 8) for i in range(0, 48, 8)], "each column on one slot"
