import operator

import pytest
import torch
from hypothesis import given
from torch import fx

from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, Source, from_fx, to_fx
from tests.ir.random_graphs import RandomGraph, random_graphs

ATEN = torch.ops.aten


@given(random_graphs())
def test_there_and_back_is_the_same_graph(case: RandomGraph):
    assert from_fx(to_fx(case.graph)) == case.graph


@given(random_graphs())
def test_the_module_runs_by_itself(case: RandomGraph):
    found = to_fx(case.graph)(*case.inputs)
    for left, right in zip(found, case.outputs + case.updates, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def small() -> IRGraph:
    builder = Builder("small")
    x = builder.input("x", (4, 6))
    weight = builder.param("weight", torch.ones(6))
    y = builder.call("aten.mul.Tensor", x, weight)
    with builder.scope("act", "my.Act"):
        y = builder.emit("aten.relu.default", [y], source=Source("my.py", 3))
    return builder.finish(builder.call("aten.add.Tensor", y, 1.0))


def calls(module: fx.GraphModule) -> dict[str, fx.Node]:
    return {str(node.target): node for node in module.graph.nodes if node.op == "call_function"}


def test_contents_travel_with_the_module():
    graph = small()
    module = to_fx(graph)
    (name,) = dict(module.named_buffers())
    setattr(module, name, torch.full((6,), 3.0))
    again = from_fx(module)
    assert again == graph
    assert torch.equal(next(iter(again.tensors.values())), torch.full((6,), 3.0))


def test_a_stored_value_without_contents_stays_without():
    graph = small()
    graph.tensors.clear()
    again = from_fx(to_fx(graph))
    assert again == graph
    assert again.tensors == {}


def test_an_operator_that_a_person_replaced():
    graph = small()
    module = to_fx(graph)
    calls(module)["aten.relu.default"].target = ATEN.gelu.default
    again = from_fx(module)
    gelu = again.nodes[1]
    assert (gelu.op, gelu.attrs) == ("aten.gelu.default", {"approximate": "none"})
    assert (gelu.scope, gelu.source) == ("act", ("my.py", 3))
    x = torch.randn(4, 6)
    assert torch.equal(again.run(x), torch.nn.functional.gelu(x) + 1)


def test_shapes_after_an_edit_are_inferred_anew():
    module = to_fx(small())
    relu = calls(module)["aten.relu.default"]
    relu.target = ATEN.sum.dim_IntList
    relu.args = (relu.args[0], [0])
    again = from_fx(module)
    assert [again.values[node.outputs[0]].shape for node in again.nodes] == [(4, 6), (6,), (6,)]


def test_an_operator_that_a_person_added():
    module = to_fx(small())
    relu = calls(module)["aten.relu.default"]
    with module.graph.inserting_after(relu):
        parts = module.graph.call_function(ATEN.split.Tensor, (relu, 2, 0))
    with module.graph.inserting_after(parts):
        second = module.graph.call_function(operator.getitem, (parts, 1))
    calls(module)["aten.add.Tensor"].args = (second, 1.0)
    again = from_fx(module)
    assert [node.op for node in again.nodes][1:] == [
        "aten.relu.default",
        "aten.split.Tensor",
        "aten.add.Tensor",
    ]
    x = torch.randn(4, 6)
    assert torch.equal(again.run(x), x.relu()[2:] + 1)


def test_dead_code_that_fx_removes():
    builder = Builder("g")
    x = builder.input("x", (2,))
    old = builder.buffer("old", torch.zeros(2))
    builder.call("aten.relu.default", old)
    graph = builder.finish([x], updates={old.id: x.id})
    module = to_fx(graph)
    module.graph.eliminate_dead_code()
    again = from_fx(module)
    assert again.nodes == []
    assert [again.values[value_id].name for value_id in again.updates] == ["old"]


def test_factories_are_made_where_the_module_runs():
    builder = Builder("g")
    graph = builder.finish(builder.call("aten.zeros.default", [2]))
    module = to_fx(graph, "meta")
    assert module()[0].is_meta
    assert from_fx(module) == graph


def add_placeholder(module: fx.GraphModule) -> None:
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.placeholder("extra")


def call_python(module: fx.GraphModule) -> None:
    calls(module)["aten.relu.default"].target = torch.relu


def call_method(module: fx.GraphModule) -> None:
    relu = calls(module)["aten.relu.default"]
    with module.graph.inserting_after(relu):
        module.graph.call_method("relu", (relu,))


def return_nothing(module: fx.GraphModule) -> None:
    next(iter(reversed(module.graph.nodes))).args = ((),)


def forget_origin(module: fx.GraphModule) -> None:
    module.meta.clear()


def break_a_call(module: fx.GraphModule) -> None:
    relu = calls(module)["aten.relu.default"]
    relu.args = (*relu.args, 3)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (add_placeholder, "placeholder extra was added after to_fx; add inputs and stored values"),
        (call_python, "calls <built-in method relu .*; only operators are allowed"),
        (call_method, "call_method relu.* calls relu; only operators are allowed"),
        (return_nothing, "the module returns 0 tensors; it must return the graph's 1 outputs and"),
        (forget_origin, "this GraphModule was not made by to_fx; capture it"),
        (break_a_call, r"a call of aten\.relu\.default with 2 positional .* does not fit its"),
    ],
)
def test_edits_that_make_no_graph(edit, message: str):
    module = to_fx(small())
    edit(module)
    with pytest.raises(GraphError, match=message):
        from_fx(module)


def test_markers_have_no_module():
    builder = Builder("g")
    builder.emit("Backward", [])
    with pytest.raises(GraphError, match="'Backward' is a marker"):
        to_fx(builder.finish([]))
