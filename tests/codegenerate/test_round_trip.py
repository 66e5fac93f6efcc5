"""Generated stages captured and joined are the graph that they were generated from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from benchmarks.models import GPT
from shardwright.ir import IRGraph
from shardwright.ir.structure import flatten_call
from shardwright.planning.assemble import planned
from shardwright.planning.plan import Plan
from tests.codegenerate.canonical import Canonical, assert_equal
from tests.codegenerate.written import configured, steps, written

ZOO = ("gpt2", "llama", "bert", "t5", "resnet", "vit", "mixtral")


def assert_comes_back(
    model: nn.Module, graph: IRGraph, plan: Plan, inputs: dict[str, Any], folder: Path
) -> None:
    """Write the stages, capture them again, and compare what they are together with the graph."""
    whole = planned(graph, plan)
    names = [graph.values[value_id].name for value_id in graph.inputs]
    assert graph.in_structure is not None
    given = dict(zip(names, flatten_call(graph.in_structure, (), inputs), strict=True))
    expected = Canonical.like(whole)
    expected.add(whole, names, whole.output_names)

    configuration = configured(written(graph, plan, folder), model)
    assert configuration["model inputs"] == names
    assert configuration["model outputs"] == sorted(whole.output_names)
    found = Canonical.like(whole)
    for part, arguments, _ in steps(configuration, given):
        again = sw.capture(part["model"], [apart(tensor) for tensor in arguments])
        found.add(again, part["inputs"], part["outputs"])
    assert_equal(found, expected, whole.output_names)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own that wants a gradient as the first does: attention's kernel tells."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("training", [False, True])
def test_a_tied_model_comes_back(parts: int, training: bool, tmp_path: Path) -> None:
    model = GPT(4, 16, 2, vocabulary=30, length=6).train(training)
    ids = torch.arange(12).reshape(2, 6)
    graph = sw.capture(model, (ids,))
    assert_comes_back(model, graph, sw.plan(graph, parts), {"ids": ids}, tmp_path)


def test_stages_of_any_nodes_come_back(tmp_path: Path) -> None:
    model = GPT(4, 16, 2, vocabulary=30, length=6).eval()
    ids = torch.arange(12).reshape(2, 6)
    graph = sw.capture(model, (ids,))
    assert_comes_back(model, graph, sw.plan(graph, 3, "metis"), {"ids": ids}, tmp_path)


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore::Warning:transformers")
@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo_come_back(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from zoo.models import BY_NAME

    model, _, inputs = BY_NAME[name].make(layers=2)
    graph = sw.capture(model, (), inputs, name=name)
    assert_comes_back(model, graph, sw.plan(graph, 2), inputs, tmp_path)
