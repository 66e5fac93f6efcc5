"""Split graphs are run slot by slot in one process and held against the whole."""

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import shardwright as sw
from shardwright.building import build
from shardwright.building.localize import localize
from shardwright.clusters import ETHERNET, Cluster, Link, Mesh
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.ops.catalog import dimop_of
from shardwright.planner import plan
from shardwright.planning import Assignment, Plan, Split, Terms
from shardwright.planning.assemble import make_plan
from shardwright.runtime import run
from tests.graphs import language_model, tokens
from tests.planning.projections import addmm, linear, stacked, thirds, transformer


def kinds(localized):
    return [communication.kind for communication in localized.communications]


def split_all(graph, size, chosen):
    """A plan on one mesh axis: ``chosen`` maps an operator to (input, dimension) or None."""
    devices = tuple(f"d{i}" for i in range(size))
    mesh = Mesh(("slots",), (size,), devices)
    assigned = []
    for node in graph.nodes:
        where = chosen.get(node.op.split(".")[1])
        split = None
        if where is not None:
            split = Split(dimop_of(graph, node).identifier(*where))
        assigned.append(Assignment(mesh, (split,)))
    return make_plan(graph, "by hand", devices, assigned)


def two_layers(bias=True):
    torch.manual_seed(0)
    builder = Builder("mlp")
    x = builder.input("x", (3, 5), "f64")

    def weight(name, *shape):
        return builder.param(name, torch.randn(*shape, dtype=torch.float64))

    def linear(x, name, rows, columns):
        added = weight(f"{name}.bias", rows) if bias else None
        return builder.call(
            "aten.linear.default", x, weight(f"{name}.weight", rows, columns), added
        )

    y = builder.call("aten.relu.default", linear(x, "up", 10, 5))
    return builder.finish(linear(y, "down", 5, 10))


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_columns_then_rows_need_one_reduction(slots, bias):
    """10 columns on 4 slots are 3, 3, 2, 2; the second bias is added once."""
    graph = two_layers(bias)
    made = plan(graph, slots, policy="tensor")
    localized = localize(graph, made)
    assert kinds(localized) == ["all_reduce"]
    x = torch.randn(3, 5, dtype=torch.float64)
    found = run(build(graph, made), x, in_process=True)
    torch.testing.assert_close(found, graph.run(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slots", [2, 3])
def test_a_batch_goes_through_without_communication_and_comes_out_in_slices(slots):
    graph = two_layers()
    pipeline = build(graph, plan(graph, slots, policy="data"))
    slices = pipeline.metadata.tensor_slices.outputs.values()
    sizes = [part.placements[0][1] - part.placements[0][0] for part in slices]
    assert sizes == {2: [2, 1], 3: [1, 1, 1]}[slots]
    assert not [t for t in pipeline.supertasks.values() if t.group is not None]
    x = torch.randn(3, 5, dtype=torch.float64)
    found = run(pipeline, x, in_process=True)
    torch.testing.assert_close(found, graph.run(x), rtol=1e-12, atol=1e-12)


MIXTURES = [
    (linear, relu)
    for linear in (None, (0, 0), (0, 1), (1, 0))
    for relu in (None, (0, 0), (0, 1))
    if linear or relu
]


@pytest.mark.parametrize(("linear", "relu"), MIXTURES)
def test_any_mixture_of_splits_is_right(linear, relu):
    graph = two_layers(bias=False)
    made = split_all(graph, 2, {"linear": linear, "relu": relu})
    pipeline = build(graph, made)
    x = torch.randn(3, 5, dtype=torch.float64)
    found = run(pipeline, x, in_process=True)
    torch.testing.assert_close(found, graph.run(x), rtol=1e-12, atol=1e-12)


def test_a_slot_whose_work_nobody_reads_is_refused():
    graph = two_layers()
    with pytest.raises(PlanError, match="gives d1 nothing to do"):
        build(graph, split_all(graph, 2, {}))


def test_a_conversion_is_done_once_for_all_that_read_it():
    builder = Builder("twice")
    x = builder.input("x", (4, 4), "f64")
    y = builder.call("aten.relu.default", x)
    a, b = (builder.call(f"aten.{op}.default", y, 0) for op in ("cumsum", "cumprod"))
    graph = builder.finish([a, b])
    localized = localize(graph, split_all(graph, 2, {"relu": (0, 0)}))
    assert kinds(localized) == ["all_gather"]


@pytest.mark.parametrize(
    ("slow", "taken"), [("all_to_all", ["all_gather"]), ("all_gather", ["all_to_all"])]
)
def test_what_the_links_of_the_plan_cost_decides_the_collectives(slow, taken, tmp_path):
    builder = Builder("turned")
    x = builder.input("x", (8, 8), "f64")
    y = builder.call("aten.relu.default", x)
    graph = builder.finish(builder.call("aten.cumsum.default", y, 0))
    links = msgspec.structs.replace(ETHERNET, **{slow: Link(1.0, 1e9)})
    made = split_all(graph, 2, {"relu": (0, 0), "cumsum": (0, 1)})
    made = msgspec.structs.replace(made, cluster=Cluster.of(2, inside=links))
    made.save(tmp_path / "plan.json")
    assert kinds(localize(graph, Plan.load(tmp_path / "plan.json"))) == taken


def test_what_is_whole_is_sliced_without_communication():
    builder = Builder("slices")
    x = builder.input("x", (4, 4), "f64")
    y = builder.call("aten.cumsum.default", x, 0)
    graph = builder.finish(builder.call("aten.relu.default", y))
    made = split_all(graph, 2, {"relu": (0, 1)})
    assert kinds(localize(graph, made)) == []
    x = torch.randn(4, 4, dtype=torch.float64)
    assert torch.equal(run(build(graph, made), x, in_process=True), graph.run(x))


def test_slots_of_a_split_model_hold_their_share():
    graph = language_model(layers=4, width=32, vocabulary=200)
    pipeline = build(graph, plan(graph, 4, policy="tensor"))
    held = dict.fromkeys(pipeline.devices, 0)
    for name, info in pipeline.tensors.items():
        if info.value is not None:
            held[pipeline.connections.devices[name]] += info.nbytes
    total = sum(value.nbytes for value in graph.stored())
    assert max(held.values()) < 0.3 * total
    found = run(pipeline, tokens(200), in_process=True)
    torch.testing.assert_close(found, graph.run(tokens(200)), rtol=1e-10, atol=1e-10)


def test_a_split_that_the_annotation_does_not_allow_is_refused():
    graph = language_model()
    assigned = [Assignment(Mesh(("slots",), (2,), ("d0", "d1")), (Split("nothing"),))]
    whole = [Assignment.whole(assigned[0].mesh)] * (len(graph.nodes) - 1)
    with pytest.raises(Exception, match="nothing"):
        localize(graph, make_plan(graph, "by hand", ("d0", "d1"), assigned + whole))


def test_nothing_to_split_is_refused():
    builder = Builder("scalar")
    x = builder.input("x", (1,), "f64")
    graph = builder.finish(builder.call("aten.relu.default", x))
    with pytest.raises(PlanError, match="nothing in the graph 'scalar' can be split in 2"):
        plan(graph, 2, policy="data")


# --- plans that take fused products apart, built and run ------------------------------------------


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
