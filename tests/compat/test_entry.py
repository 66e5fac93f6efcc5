"""Seed 001's entry points: a model in, a file of partitions out."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from benchmarks.models import GPT, Block
from shardwright.compat.entry import by_time
from shardwright.errors import CodegenError, PlanError, ProfileError
from tests.codegenerate.written import configured, imported, run, stages

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(4, 16, 2, vocabulary=30, length=6).eval()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, and measurements, are this test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def assert_runs(path: Path, model: nn.Module) -> None:
    found = run(configured(imported(path), model), {"ids": IDS})
    assert torch.equal(found["output"], model(IDS))


def test_a_model_is_partitioned_end_to_end(model: GPT, tmp_path: Path) -> None:
    graph = sw.pipe_model(model, IDS, n_iter=1, nparts=3, output_file="gpt", seed=1)
    assert set(graph.stages) == {0, 1, 2}
    assert str(graph).startswith("partition of GPT: metis, 3 stages")
    assert_runs(tmp_path / "gpt.py", model)


def test_each_operator_has_a_line_in_debug(model: GPT, tmp_path: Path) -> None:
    def lines(name: str) -> int:
        code = (line.strip() for line in (tmp_path / name).read_text().splitlines())
        return sum(not line.startswith("#") for line in code)

    for name, debug in (("short.py", False), ("long.py", True)):
        sw.pipe_model(model, (IDS,), None, 1, 2, output_file=tmp_path / name, DEBUG=debug)
    assert lines("long.py") > lines("short.py")


def test_basic_blocks_are_in_one_stage(model: GPT) -> None:
    graph = sw.partition_with_profiler(model, IDS, n_iter=1, nparts=2, basic_blocks=[Block])
    blocks = [node for node in graph.nodes if node.kind == "Block"]
    assert [node.name for node in blocks] == [f"blocks.{i}" for i in range(4)]
    assert graph.partition is not None
    for node in blocks:
        assert len({graph.partition.stages[inside.number] for inside in node.nodes}) == 1
    assert_runs(sw.compile_partitioned_model(graph, model), model)


def test_the_depth_says_what_a_layer_is(model: GPT) -> None:
    found = {depth: sw.build_graph(model, IDS, max_depth=depth).nodes for depth in (0, 1, 2, 1000)}
    assert len(found[0]) == 1
    assert "blocks.0" in {node.name for node in found[1]}
    assert "blocks.0.attention" in {node.name for node in found[2]}
    assert "blocks.0.attention.qkv" in {node.name for node in found[1000]}
    for nodes in found.values():
        numbers = [inside.number for node in nodes for inside in node.nodes]
        assert numbers == list(range(len(numbers)))


def test_layers_are_measured_or_given_their_weights(model: GPT) -> None:
    assert all(node.weight is None for node in sw.build_graph(model, IDS).nodes)
    measured = sw.build_graph(model, IDS, max_depth=1, use_profiler=True, n_iter=1)
    weights = {node.name: node.weight for node in measured.nodes if node.weight is not None}
    assert all(weight.forward_time > 0 for weight in weights.values() if weight.kind == "Block")
    again = sw.build_graph(model, IDS, max_depth=1, weights=weights)
    assert [node.weight for node in again.nodes] == [node.weight for node in measured.nodes]
    profile = sw.profile_network(model, IDS, max_depth=1, n_iter=1)
    given = sw.build_graph(model, IDS, max_depth=1, weights=profile)
    assert [node.weight for node in given.nodes] == list(profile.layers)


def test_weights_may_be_milliseconds(model: GPT) -> None:
    graph = sw.build_graph(model, IDS, max_depth=1, weights={"blocks.0": 100, "blocks.1": 2.5})
    weights = {node.name: node.weight for node in graph.nodes}
    assert weights["blocks.0"].forward_time == 100
    assert weights["blocks.2"] is None
    stages = sw.metis_partition(graph, 2, by_time, seed=3)
    of = {node.name: stage for node, stage in zip(stages.nodes, stages.stages, strict=True)}
    assert of["blocks.0"] != of["blocks.1"] == of["blocks.3"]
    for given, said in (({"blocks.0": "a"}, "has 'a' for 'blocks.0'"), ([3], "is a list")):
        with pytest.raises(ProfileError, match=f"weights= {said}"):
            sw.build_graph(model, IDS, weights=given)


def test_weights_of_ones_own(model: GPT) -> None:
    """The first block outweighs all the rest."""
    seen = []

    def weigh(node) -> float:  # type: ignore[no-untyped-def]
        return 100 if node.scope == "blocks.0" else 1

    def weigh_edge(maker, reader) -> float:  # type: ignore[no-untyped-def]
        seen.append((maker.name, reader.name))
        return 1

    graph = sw.build_graph(model, IDS, None, 1)
    found = sw.METIS_partition(graph, 2, weigh, weigh_edge, seed=3)
    of = {node.name: stage for node, stage in zip(found.nodes, found.stages, strict=True)}
    assert of["blocks.1"] == of["blocks.2"] == of["blocks.3"] == 1
    assert of["blocks.0"] == 0
    assert ("blocks.0", "blocks.1") in seen
    assert graph.partition is None, "the graph that was given stays as it is"


def test_stages_of_equal_bytes(model: GPT) -> None:
    wide = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 400))
    graph = sw.pipe_model(wide, torch.randn(2, 8), n_iter=1, partition_by_memory=True)
    assert graph.stages.count(1) == 1, "the last layer is as large as all others together"
    assert Path("generated_Sequential2.py").exists()


def test_what_is_compiled_without_a_model_or_by_the_seeds_name(model: GPT) -> None:
    graph = sw.partition_with_profiler(model, IDS, n_iter=1, nparts=2)
    assert sw.compile_partitoned_model is sw.compile_partitioned_model
    path = sw.compile_partitoned_model(graph, model=None, verbose=True, output_file="tied.py")
    assert path == Path("tied.py")
    assert_runs(path, model)
    assert len(stages(configured(imported(path), model))) == 2


def test_graphs_that_cannot_be_compiled_are_refused(model: GPT) -> None:
    graph = sw.build_graph(model, IDS)
    with pytest.raises(CodegenError, match=r"has no stages; give what pipe_model"):
        sw.compile_partitioned_model(graph, model)
    with pytest.raises(CodegenError, match=r"is IRGraph; give what pipe_model"):
        sw.compile_partitioned_model(graph.graph, model)  # type: ignore[arg-type]
    graph = sw.METIS_partition(graph, 2)
    other = GPT(2, 16, 2, vocabulary=30, length=6)
    with pytest.raises(CodegenError, match=r"stores the parameter 'blocks\.2\..*GPT has none"):
        sw.compile_partitioned_model(graph, other)
    wider = GPT(4, 32, 2, vocabulary=30, length=6)
    with pytest.raises(CodegenError, match=r"of shape \[.*16.*\], the GPT has \[.*32.*\]"):
        sw.compile_partitioned_model(graph, wider)


def test_what_cannot_be_partitioned_is_refused(model: GPT) -> None:
    with pytest.raises(PlanError, match=r"9 parts, but the graph 'GPT' has only 1 layers; go"):
        sw.METIS_partition(sw.build_graph(model, IDS, max_depth=0), 9)
    with pytest.raises(PlanError, match=r"METIS has no option 'speed'"):
        sw.partition_with_profiler(model, IDS, n_iter=1, speed=1)
    with pytest.raises(PlanError, match=r"node_weight_function gives -1 for layer 0 \("):
        sw.METIS_partition(sw.build_graph(model, IDS), 2, lambda node: -1)
    with pytest.raises(ProfileError, match=r"no node is in a module of class torch.*Conv2d"):
        sw.build_graph(model, IDS, basic_blocks=[nn.Conv2d])


def test_parameters_are_those_of_the_seed() -> None:
    expected = {
        sw.pipe_model: "model sample_batch kwargs n_iter nparts depth basic_blocks "
        "partition_by_memory node_weight_function edge_weight_function output_file DEBUG METIS_opt",
        sw.partition_with_profiler: "model sample_batch kwargs n_iter nparts max_depth "
        "basic_blocks node_weight_function edge_weight_function METIS_opt",
        sw.build_graph: "model sample_batch kwargs max_depth basic_blocks use_profiler n_iter "
        "weights",
        sw.compile_partitoned_model: "graph model verbose output_file",
    }
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters) == names.split()
