"""Built files are walked task by task, in the file's order, with nothing of the runtime."""

import pytest
import torch

from shardwright.building import build
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.pipeline import Pipeline, check
from shardwright.planner import plan
from shardwright.runtime import run
from tests.graphs import language_model, tokens
from tests.walk import built, walk


def kinds(pipeline):
    return [task.kind for task in pipeline.supertasks.values()]


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_computes_what_its_graph_does(devices, tied):
    graph = language_model(tied=tied)
    pipeline = built(graph, devices)
    assert torch.equal(walk(pipeline, {"tokens": tokens()})["output"], graph.run(tokens()))
    assert kinds(pipeline).count("send") == kinds(pipeline).count("recv") >= devices - 1


def test_cut_tables_are_parts_of_one_stored_tensor():
    graph = language_model(vocabulary=1000, classes=2)
    pipeline = built(graph, 2)
    values = [info.value for info in pipeline.tensors.values() if info.value is not None]
    parts = sorted(value.placements for value in values if value.name == "embed.weight")
    assert parts == [((0, 1000), (0, 4)), ((0, 1000), (4, 8))]
    ids = tokens(1000)
    assert torch.equal(walk(pipeline, {"tokens": ids})["output"], graph.run(ids))


def test_equal_layers_share_one_graph():
    few, many = built(language_model(layers=8), 2), built(language_model(layers=64), 2)
    assert len(few.blobs) == len(many.blobs) == 1
    texts = [sum(len(task.data or "") for task in p.supertasks.values()) for p in (few, many)]
    assert texts[0] == texts[1]


def test_a_tied_weight_is_two_tensors_of_one_stored_one():
    pipeline = built(language_model(tied=True), 2)
    tied = {n: i.value for n, i in pipeline.tensors.items() if i.value is not None}
    assert {name for name, value in tied.items() if value.name == "embed.weight"} == {
        "embed.weight",
        "embed.weight@d1",
    }
    assert len({(value.path, value.name) for value in tied.values()}) == len(tied) - 1


def test_values_are_sent_to_each_slot_that_reads_them_and_once():
    """A skip connection over four stages, and an input that the first and the last read."""
    builder = Builder("skip")
    x = builder.input("x", (4, 4), "f64")
    first = value = builder.call("aten.sin.default", x)
    for _ in range(3):
        value = builder.call("aten.matmul.default", value, first)
    graph = builder.finish([builder.call("aten.add.Tensor", value, x)])
    pipeline = built(graph, 4)
    data = torch.randn(4, 4, dtype=torch.float64)
    assert torch.equal(walk(pipeline, {"x": data})["output_0"], graph.run(data)[0])
    received = [t.outputs[0] for t in pipeline.supertasks.values() if t.kind == "recv"]
    assert len(received) == len(set(received))
    assert set(pipeline.metadata.tensor_slices.inputs) == {"x", "x@d3"}


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (lambda builder, x: builder.call("aten.slice.Tensor", x, dim=1, start=2), (20, 4, 1)),
        (lambda builder, x: builder.call("aten.transpose.int", x, 0, 1), (4, 20, 1)),
        (lambda builder, x: builder.call("aten.expand.default", x, [4, 4, 5, 4]), None),
    ],
    ids=["with gaps", "turned", "expanded"],
)
def test_what_a_stage_sends_lies_as_it_does_in_the_graph(view, strides):
    builder = Builder("views")
    x = builder.call("aten.relu.default", builder.input("x", (4, 5, 4), "f64"))
    seen = view(builder, x)
    weight = builder.param("weight", torch.randn(6, 4, dtype=torch.float64))
    graph = builder.finish(builder.call("aten.linear.default", seen, weight))
    pipeline = built(graph, 3)
    *_, received = (
        pipeline.tensors[task.outputs[0]]
        for task in pipeline.supertasks.values()
        if task.kind == "recv"
    )
    assert received.strides == strides
    check(pipeline)
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    found, expected = run(pipeline, x, in_process=True), graph.run(x)
    if strides is None:  # elements that lie at one place are sent each for itself
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


def test_sends_stand_behind_the_task_that_makes_what_they_send():
    pipeline = built(language_model(), 3)
    last_made = ()
    for task in pipeline.supertasks.values():
        if task.kind == "FX":
            last_made = task.outputs
        elif task.kind == "send":
            assert task.inputs[0] in last_made


def test_returned_inputs_stored_values_and_repeats_pass_through_identities():
    builder = Builder("returns")
    x = builder.input("x", (2,))
    weight = builder.param("w", torch.ones(2))
    y = builder.call("aten.add.Tensor", x, weight)
    graph = builder.finish([x, weight, y, y])
    pipeline = built(graph, 1)
    results = walk(pipeline, {"x": torch.zeros(2)})
    assert [results[f"output_{i}"].tolist() for i in range(4)] == [[0, 0], [1, 1], [1, 1], [1, 1]]
    identities = [name for name in pipeline.supertasks if name.startswith("identity.")]
    assert identities == ["identity.output_0", "identity.output_1", "identity.output_3"]


def test_buffers_changed_in_place_are_replaced():
    builder = Builder("counter")
    x = builder.input("x", (2,))
    count = builder.buffer("count", torch.zeros(2))
    last = builder.buffer("last", torch.zeros(2))
    y = builder.call("aten.mul.Tensor", x, count)
    y = builder.call("aten.sub.Tensor", y, last)
    more = builder.call("aten.add.Tensor", count, 1)
    graph = builder.finish(y, updates={count.id: more.id, last.id: x.id})
    pipeline = built(graph, 1)
    new_of = {old: new for new, old in pipeline.training.replaces.items()}
    assert new_of.keys() == {"count", "last"}
    assert pipeline.supertasks[f"identity.{new_of['last']}"].inputs == ("x",)


def test_a_plan_of_another_graph_is_refused():
    with pytest.raises(PlanError, match="plan again"):
        build(language_model(layers=2), plan(language_model(layers=3), 2))


def test_a_saved_pipeline_is_the_same_pipeline(tmp_path):
    graph = language_model()
    pipeline = built(graph, 2)
    pipeline.save(tmp_path / "model.pipeline.json")
    read = Pipeline.load(tmp_path / "model.pipeline.json")
    check(read)
    assert torch.equal(walk(read, {"tokens": tokens()})["output"], graph.run(tokens()))
