import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.errors import GraphError
from shardwright.ir import Builder, Input, IRGraph, validate
from shardwright.ir.structure import Leaf, TupleTree


def build() -> IRGraph:
    """x, weight and running -> relu, add and update; ids 0 1 2, 3>4, 5>6, 7>8."""
    builder = Builder("g")
    x = builder.input("x", (2, 3))
    weight = builder.param("weight", torch.zeros(2, 3))
    running = builder.buffer("running", torch.zeros(2, 3))
    relu = builder.call("aten.relu.default", x)
    added = builder.call("aten.add.Tensor", relu, weight)
    cat = builder.call("aten.stack.default", [added, running])
    new = builder.call("aten.select.int", cat, 0, 1)
    return builder.finish([added, x], updates={running.id: new.id})


def find(graph: IRGraph, name: str) -> Any:
    return next(value for value in graph.values.values() if value.name == name)


def change(name: str, /, **fields: Any) -> Callable[[IRGraph], None]:
    """Set fields of the value of this name, or of its meta."""

    def mutate(graph: IRGraph) -> None:
        value = find(graph, name)
        for field, content in fields.items():
            if field in ("shape", "dtype", "strides"):
                value.meta = replace(value.meta, **{field: content})
            else:
                setattr(value, field, content)

    return mutate


def node(index: int, **fields: Any) -> Callable[[IRGraph], None]:
    """Set fields of a node."""

    def mutate(graph: IRGraph) -> None:
        for field, content in fields.items():
            setattr(graph.nodes[index], field, content)

    return mutate


def file_under_another_id(graph: IRGraph) -> None:
    graph.values[99] = graph.values.pop(0)


def use_before(graph: IRGraph) -> None:
    graph.nodes[0], graph.nodes[1] = graph.nodes[1], graph.nodes[0]


def drop_producer(graph: IRGraph) -> None:
    del graph.nodes[3]


def make_again(graph: IRGraph) -> None:
    graph.nodes[1].outputs = graph.nodes[0].outputs


def swap_listed(graph: IRGraph) -> None:
    graph.nodes[2].attrs["tensors"] = [Input(1), Input(0)]


def add_attribute(name: str, value: Any) -> Callable[[IRGraph], None]:
    def mutate(graph: IRGraph) -> None:
        graph.nodes[1].attrs[name] = value

    return mutate


def drop_dim(graph: IRGraph) -> None:
    """The tensor that is left would stand where ``dim`` does."""
    select, x = graph.nodes[3], find(graph, "x")
    del select.attrs["dim"]
    select.inputs.append(x.id)
    x.users.append(select.id)


def call_in_place(graph: IRGraph) -> None:
    graph.nodes[0].op = "aten.relu_.default"


def make_two(graph: IRGraph) -> None:
    extra = graph.new_value("extra", (1,), "f32")
    extra.producer = graph.nodes[0].id
    graph.nodes[0].outputs.append(extra.id)


def return_unknown(graph: IRGraph) -> None:
    graph.outputs[0] = 99


def return_less(graph: IRGraph) -> None:
    graph.outputs = graph.outputs[1:]


def update_input(graph: IRGraph) -> None:
    graph.updates = {find(graph, "x").id: find(graph, "relu").id}


def update_shape(graph: IRGraph) -> None:
    graph.updates = {find(graph, "running").id: find(graph, "stack").id}


def no_inputs(graph: IRGraph) -> None:
    graph.inputs = []


def contents(name: str, tensor: torch.Tensor) -> Callable[[IRGraph], None]:
    def mutate(graph: IRGraph) -> None:
        graph.tensors[find(graph, name).id] = tensor

    return mutate


def result(*found: Leaf) -> Callable[[IRGraph], None]:
    def mutate(graph: IRGraph) -> None:
        graph.out_structure = TupleTree(found)

    return mutate


MUTATIONS: list[tuple[Callable[[IRGraph], None], str]] = [
    (file_under_another_id, "value %x is not filed under its id 0"),
    (change("relu", dtype="float"), "value %relu has the unknown dtype 'float'"),
    (change("relu", shape=(2, -1)), r"value %relu has the shape \(2, -1\); sizes are integers"),
    (change("relu", shape=(2.0, 3)), "sizes are integers from 0 up"),
    (change("relu", strides=(1,)), "value %relu has 1 strides for 2 sizes"),
    (change("weight", names=()), "value %weight is a param without a name in a checkpoint"),
    (change("weight", placements=((0, 2),)), r"placements \(\(0, 2\),\) do not give \(2, 3\)"),
    (change("weight", placements=((-2, 0), (0, 3))), "%weight: placements .* do not give"),
    (change("relu", producer=None), "%relu is tmp and has no producer; only values of the roles"),
    (change("x", producer=3), "%x is input and has a producer"),
    (change("relu", role="param", names=("relu",)), "%relu is param and has a producer"),
    (change("relu", name="x"), "two values are named %x"),
    (change("relu", users=[]), r"%relu lists the users \[\], but they are \[5\]"),
    (change("relu", role="output"), "%relu is output and is not among the graph's outputs"),
    (change("add", role="tmp"), "%add is tmp and is among the graph's outputs"),
    (node(1, id=3), r"aten\.add\.Tensor \(node 3\): another node has the same id"),
    (node(0, inputs=[99]), r"aten\.relu\.default \(node 3\) names the unknown value 99"),
    (use_before, r"aten\.add\.Tensor \(node 5\) uses %relu before it is made"),
    (make_again, r"aten\.add\.Tensor \(node 5\) makes %relu, which is .* made by another node"),
    (drop_producer, "%select: the producer is not a node of the graph"),
    (add_attribute("alpha", (1,)), r"the attribute alpha is \(1,\); attributes are None, numbers"),
    (add_attribute("alpha", [{}]), r"the attribute alpha is \[\{\}\]"),
    (add_attribute("alpha", [Input(7)]), r"has 2 inputs, and its attributes name \[7\]; they must"),
    (add_attribute("beta", 1), r"has 2 inputs and the attributes alpha, beta; its schema is aten:"),
    (swap_listed, r"has 2 inputs, and its attributes name \[1, 0\]"),
    (drop_dim, r"aten\.select\.int \(node 9\) has 2 inputs and the attributes index; its schema"),
    (call_in_place, r"aten\.relu_\.default \(node 3\) writes to its input; graphs are functional"),
    (node(0, op="aten.no.such"), "operator 'aten.no.such' does not exist"),
    (make_two, r"aten\.relu\.default \(node 3\) makes 2 values; its schema is aten::relu"),
    (no_inputs, "graph.inputs and the values of role input are not the same"),
    (return_unknown, "outputs or updates name the unknown value 99"),
    (return_less, "value %add is output and is not among the graph's outputs"),
    (update_input, r"%relu f32\[2, 3\] cannot replace %x \(input\) f32\[2, 3\]"),
    (update_shape, r"%stack f32\[2, 2, 3\] cannot replace %running \(buffer\) f32\[2, 3\]"),
    (result(Leaf("a", 0)), "the structure has 1 outputs, the graph 2"),
    (result(Leaf("a", 1), Leaf("b", 0)), "the structure does not number the outputs from 0 up"),
    (result(Leaf("a", 0), Leaf("a", 1)), "the structure names two of the outputs alike"),
    (contents("relu", torch.zeros(2, 3)), "holds contents for 4, which is not stored"),
    (
        contents("weight", torch.zeros(3, dtype=torch.float64)),
        r"the contents of %weight are f64\[3\], the value is f32\[2, 3\]",
    ),
]


def test_the_graph_is_valid_before():
    validate(build())


@pytest.mark.parametrize(("mutate", "message"), MUTATIONS)
def test_what_breaks_a_rule_is_named(mutate: Callable[[IRGraph], None], message: str):
    graph = build()
    mutate(graph)
    with pytest.raises(GraphError, match=message):
        validate(graph)


def test_markers_may_have_any_inputs_and_attributes():
    builder = Builder("g")
    x = builder.input("x", ())
    made = builder.emit("Backward", [x, x], {"grads": [1, None]}, outputs=[torch.zeros(2)])
    validate(builder.finish(made))


def test_structures_are_not_needed():
    graph = build()
    graph.in_structure = graph.out_structure = None
    validate(graph)


def test_absent_places_are_places_of_the_call():
    builder = Builder("g")
    first, _ = builder.call("aten.unbind.int", builder.input("x", (2, 3)))
    graph = builder.finish(first)
    graph.nodes[0].absent = (3,)
    with pytest.raises(GraphError, match=r"returns 3 things, and \(3,\) are to be absent"):
        validate(graph)


def test_a_node_before_its_operands_is_told_wherever_the_graph_goes() -> None:
    builder = sw.Builder("reversed")
    x = builder.input("x", (2,))
    good = builder.finish(builder.call("aten.neg.default", builder.call("aten.relu.default", x)))
    good.check()
    made = sw.plan(good, devices=1)
    graph = copy.deepcopy(good)
    graph.nodes.reverse()
    for use in (
        graph.check,
        lambda: graph.run(torch.ones(2)),
        lambda: sw.plan(graph, devices=1),
        lambda: sw.build(graph, made),
        lambda: sw.optimize_ir(graph, device="cpu"),
    ):
        with pytest.raises(GraphError, match=r"aten\.neg\.default \(node \d+\) uses %relu before"):
            use()
