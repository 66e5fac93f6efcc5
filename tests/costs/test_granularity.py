"""Which nodes are measured together."""

import pytest
import torch
from torch import nn

import shardwright as sw
from benchmarks.models import GPT, Block
from shardwright.costs.granularity import unit_graph, units
from shardwright.errors import ProfileError
from shardwright.ir import IRGraph, compile_graph
from tests.graphs import language_model
from tests.steps import language_step


@pytest.fixture(scope="module")
def graph() -> IRGraph:
    return sw.capture(GPT(layers=2, width=32, length=8), (torch.zeros(1, 8, dtype=torch.long),))


def names(graph: IRGraph, **options: object) -> list[str]:
    return [unit.name for unit in units(graph, graph.nodes, **options)]  # type: ignore[arg-type]


def test_without_a_depth_every_node_is_by_itself(graph: IRGraph) -> None:
    assert [unit.nodes for unit in units(graph, graph.nodes)] == [(node,) for node in graph.nodes]


def test_depth_0_is_the_whole_graph(graph: IRGraph) -> None:
    (unit,) = units(graph, graph.nodes, depth=0)
    assert (unit.name, list(unit.nodes)) == ("GPT", graph.nodes)


def test_depth_1_is_the_modules_of_the_model_and_what_it_does_between_them(graph: IRGraph) -> None:
    expected = ["embed", "arange", "position", "add", "blocks.0", "blocks.1", "norm", "head"]
    assert names(graph, depth=1) == expected


def test_depth_2_goes_into_modules_that_have_modules(graph: IRGraph) -> None:
    expected = [
        *("blocks.0.norm1", "blocks.0.attention", "add_1"),
        *("blocks.0.norm2", "blocks.0.mlp", "add_2"),
    ]
    assert names(graph, depth=2)[4:10] == expected
    assert names(graph, depth=2)[-2:] == ["norm", "head"]


def test_a_module_without_modules_stays_whole_at_any_depth() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).relu()

    graph = sw.capture(nn.Sequential(Twice(), Twice()), (torch.ones(2),))
    assert names(graph, depth=5) == ["0", "1"]
    assert len(names(graph)) == 4


def test_a_class_of_modules_is_one_piece_wherever_it_stands(graph: IRGraph) -> None:
    found = units(graph, graph.nodes, basic_blocks=(Block, "Embedding"))
    assert [(unit.name, unit.kind) for unit in found if len(unit.nodes) > 1] == [
        ("blocks.0", "Block"),
        ("blocks.1", "Block"),
    ]
    assert [unit.name for unit in found if unit.kind == "Embedding"] == ["embed", "position"]
    assert names(graph, depth=1) == names(graph, depth=1, basic_blocks=[Block])


def test_calls_of_one_module_after_one_another_are_units_each() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.cell(x)
            return x

    graph = sw.capture(Recurrent(), (torch.ones(2, 4),))
    assert [(unit.name, len(unit.nodes)) for unit in units(graph, graph.nodes, depth=1)] == [
        ("cell", 2)
    ] * 3


@pytest.mark.parametrize("depth", [None, 0, 1, 2, 3])
def test_units_are_all_nodes_in_their_order(graph: IRGraph, depth: int | None) -> None:
    found = units(graph, graph.nodes, depth=depth)
    assert [node for unit in found for node in unit.nodes] == graph.nodes


@pytest.mark.parametrize("depth", [None, 0, 1, 2])
def test_units_run_one_after_another_compute_the_model(graph: IRGraph, depth: int | None) -> None:
    tokens = torch.arange(8).reshape(1, 8)
    known = {**graph.tensors, graph.inputs[0]: tokens}
    for unit in units(graph, graph.nodes, depth=depth):
        alone = unit_graph(graph, unit)
        program = compile_graph(alone)
        results = program([known[value_id] for value_id in program.arguments])
        known |= dict(zip(alone.outputs, results, strict=True))
    assert torch.equal(known[graph.outputs[0]], graph.run(tokens))


def test_a_unit_without_readers_gives_what_its_last_node_makes() -> None:
    graph = language_step()
    first = graph.nodes[1]
    (unit,) = units(graph, [first])
    assert unit_graph(graph, unit).outputs == first.outputs


def test_a_class_that_is_not_there_is_named() -> None:
    graph = language_model()
    with pytest.raises(ProfileError, match=r"class torch.nn.*Conv2d; the graph has tests.Block"):
        units(graph, graph.nodes, basic_blocks=(nn.Conv2d,))
    with pytest.raises(ProfileError, match=r"depth=-1: .* a number from 0 up"):
        units(graph, graph.nodes, depth=-1)


@pytest.mark.parametrize("blocks", [Block, "Block", [Block], ("Block",), {Block}])
def test_a_class_or_a_name_by_itself_is_one_of_them(graph: IRGraph, blocks: object) -> None:
    assert names(graph, basic_blocks=blocks) == names(graph, basic_blocks=(Block,))


@pytest.mark.parametrize("blocks", [(3,), 3, nn.Linear(2, 2), (nn.Linear(2, 2),)])
def test_what_is_no_class_of_modules_is_refused(graph: IRGraph, blocks: object) -> None:
    with pytest.raises(ProfileError, match="basic_blocks are classes of modules, or their names"):
        names(graph, basic_blocks=blocks)
