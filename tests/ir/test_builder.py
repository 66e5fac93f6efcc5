import pytest
import torch

from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, Scope, Source
from shardwright.ir.structure import Leaf, Parameter, TupleTree


def linear(name: str = "part") -> IRGraph:
    """y = x @ w.T with a buffer that counts calls."""
    builder = Builder(name)
    x = builder.input("x", (2, 4))
    count = builder.buffer("count", torch.zeros(()))
    with builder.scope("fc", "torch.nn.Linear"):
        y = builder.call("aten.linear.default", x, builder.param("fc.weight", torch.eye(4)))
    more = builder.call("aten.add.Tensor", count, 1)
    return builder.finish(y, updates={count.id: more.id})


# --- values and nodes ------------------------------------------------------------------------


def test_values_keep_what_they_are_made_of():
    builder = Builder("g")
    x = builder.input("x", (2, 3), "bf16", strides=(1, 2), device="cuda:0")
    assert (x.role, x.shape, x.dtype, x.strides, x.device) == (
        "input",
        (2, 3),
        "bf16",
        (1, 2),
        "cuda:0",
    )
    for role in ("param", "buffer", "state", "constant"):
        tensor = torch.zeros(3, 2, dtype=torch.int8).t()
        value = getattr(builder, role)(f"my.{role}", tensor)
        assert (value.role, value.shape, value.dtype) == (role, (2, 3), "i8")
        assert (value.strides, value.names) == ((1, 2), (f"my.{role}",))
        assert builder.graph.tensors[value.id] is tensor
    tied = builder.param("a", torch.zeros(2), names=("a", "b"), placements=[(4, 6)])
    assert (tied.names, tied.placements) == (("a", "b"), ((4, 6),))


def test_several_outputs_are_a_list():
    builder = Builder("g")
    x = builder.input("x", (4, 6))
    values, indices = builder.call("aten.max.dim", x, 1)
    assert [(v.shape, v.dtype) for v in (values, indices)] == [((4,), "f32"), ((4,), "i64")]
    parts = builder.call("aten.split.Tensor", x, 4, 1)
    assert [part.shape for part in parts] == [(4, 4), (4, 2)]
    assert [part.shape for part in builder.call("aten.split.Tensor", x, 4)] == [(4, 6)]
    assert builder.call("aten.relu.default", x).name == "relu"


def test_keywords_may_be_called_self():
    builder = Builder("g")
    x = builder.input("x", (2,))
    y = builder.call("aten.add.Tensor", self=x, other=x, alpha=2)
    assert builder.finish(y).nodes[0].attrs == {"alpha": 2}


def test_overloads_themselves_can_be_called():
    builder = Builder("g")
    x = builder.input("x", (2,))
    builder.call(torch.ops.aten.relu.default, x)
    assert builder.graph.nodes[0].op == "aten.relu.default"


def test_outputs_that_are_given_are_not_inferred():
    builder = Builder("g")
    x = builder.input("x", (2, 3), device="cuda:0")
    y = builder.emit("aten.relu.default", [x], outputs=[torch.empty(7, device="meta")], name="y")
    assert (y.name, y.shape, y.device) == ("y", (7,), "cuda:0")
    z = builder.value("z", (9,), "f16")
    assert builder.emit("aten.relu.default", [x], outputs=[z]) is z
    (part,) = builder.emit(
        "aten.split.Tensor", [x], {"split_size": 2, "dim": 0}, outputs=[x_like()]
    )
    assert part.name == "split"


def x_like() -> torch.Tensor:
    return torch.empty(2, 3, device="meta")


def test_a_factory_keeps_the_dtype_it_had_when_it_was_written():
    builder = Builder("g")
    made = [
        builder.call("aten.zeros.default", [2]),
        builder.call("aten.arange.default", 3),
        builder.call("aten.full.default", [2], True),
    ]
    graph = builder.finish(made)
    assert [node.attrs["dtype"] for node in graph.nodes] == [
        torch.float32,
        torch.int64,
        torch.bool,
    ]
    torch.set_default_dtype(torch.float64)
    try:
        assert graph.run()[0].dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_markers_make_what_they_are_told_to():
    builder = Builder("g")
    x = builder.input("x", (2,))
    assert builder.emit("Backward", [x]) == []
    assert builder.emit("Backward", [x], outputs=[x_like()]).name == "Backward"
    assert len(builder.emit("adamw_step", [x], outputs=[x_like(), x_like()])) == 2


def test_scopes_nest_and_sources_stay():
    builder = Builder("g")
    x = builder.input("x", (2,))
    with builder.scope("a", "A"), builder.scope("a.b", "B"):
        x = builder.call("aten.relu.default", x)
    x = builder.emit("aten.relu.default", [x], scopes=(Scope("c", "C"),), source=Source("f", 1))
    x = builder.call("aten.relu.default", x)
    nodes = builder.finish(x).nodes
    scopes = [(Scope("a", "A"), Scope("a.b", "B")), (Scope("c", "C"),), ()]
    assert [node.scopes for node in nodes] == scopes
    assert [node.source for node in nodes] == [None, ("f", 1), None]


def test_values_of_another_graph_are_refused():
    here, there = Builder("here"), Builder("there")
    x = there.input("x", (2,))
    with pytest.raises(GraphError, match="the graph 'here' has no value 0"):
        here.call("aten.relu.default", x)
    y = here.input("y", (3,))
    assert y.id == x.id
    for use in (
        lambda: here.call("aten.relu.default", x),
        lambda: here.finish(x),
        lambda: here.emit("Marker", [y], outputs=[x]),
        lambda: here.inline(linear(), [x]),
    ):
        with pytest.raises(GraphError, match="%x is a value of another graph than 'here'"):
            use()


def test_a_call_must_fit_the_schema():
    builder = Builder("g")
    x = builder.input("x", (2,))
    with pytest.raises(GraphError, match="does not fit its schema"):
        builder.call("aten.relu.default", x, x)
    with pytest.raises(GraphError, match=r"with 1 inputs and attributes none does not fit"):
        builder.emit("aten.linear.default", [x])
    with pytest.raises(GraphError, match="does not exist"):
        builder.call("aten.no_such_operator.default", x)


# --- inlining --------------------------------------------------------------------------------


def test_a_graph_inlined_twice_keeps_two_sets_of_weights():
    builder = Builder("whole")
    x = builder.input("x", (2, 4))
    with builder.scope("body", "my.Body"):
        (x,) = builder.inline(linear(), [x], prefix="0")
    (x,) = builder.inline(linear(), [x], prefix="1")
    graph = builder.finish(x)
    stored = {value.name: value.names for value in graph.stored()}
    assert stored == {
        name: (name,) for name in ("0.count", "0.fc.weight", "1.count", "1.fc.weight")
    }
    assert [node.scopes for node in graph.nodes if "linear" in node.op] == [
        (Scope("body", "my.Body"), Scope("0.fc", "torch.nn.Linear")),
        (Scope("1.fc", "torch.nn.Linear"),),
    ]
    assert len(graph.updates) == 2
    assert graph.output_names == ["output"]
    tensor = torch.randn(2, 4)
    assert torch.equal(graph.run(tensor), tensor)


def test_stored_values_can_be_shared_and_updates_follow_one_another():
    part = linear()
    builder = Builder("whole")
    x = builder.input("x", (2, 4))
    (x,) = builder.inline(part, [x])
    shared = dict(zip((v.id for v in part.stored()), builder.graph.stored(), strict=True))
    (x,) = builder.inline(part, [x], stored=shared)
    graph = builder.finish(x)
    assert [value.name for value in graph.stored()] == ["count", "fc.weight"]
    first, second = (node for node in graph.nodes if node.op == "aten.add.Tensor")
    count = next(graph.stored())
    assert first.inputs == [count.id]
    assert second.inputs == first.outputs
    assert graph.updates == {count.id: second.outputs[0]}


def test_inlining_takes_as_many_inputs_as_there_are():
    builder = Builder("whole")
    with pytest.raises(GraphError, match="graph 'part' has 1 inputs, 0 given"):
        builder.inline(linear("part"), [])


# --- finishing -------------------------------------------------------------------------------


def test_ids_run_in_one_order_whatever_the_order_of_writing():
    def build(late: bool) -> IRGraph:
        builder = Builder("g")
        x = builder.input("x", (2,))
        if not late:
            weight = builder.param("w", torch.zeros(2))
        builder.value("never_made", (2,))
        y = builder.call("aten.relu.default", x)
        if late:
            weight = builder.param("w", torch.zeros(2))
        return builder.finish(builder.call("aten.add.Tensor", y, weight))

    assert build(late=True) == build(late=False)
    assert str(build(late=True)) == str(build(late=False))


def test_structures_that_are_made():
    builder = Builder("g")
    x, y = builder.input("x", (2,)), builder.input("y", (2,))
    graph = builder.finish((x, y))
    assert graph.in_structure.parameters == tuple(
        Parameter(name, "POSITIONAL_OR_KEYWORD", Leaf(name, i)) for i, name in enumerate("xy")
    )
    assert graph.out_structure == TupleTree((Leaf("output_0", 0), Leaf("output_1", 1)))
    assert builder.finish(x).out_structure == Leaf("output", 0)
    assert builder.finish([x]).out_structure == TupleTree((Leaf("output_0", 0),))


@pytest.mark.parametrize("name", ["fc.weight", "lambda", "0"])
def test_inputs_that_cannot_be_parameters_are_taken_by_place(name: str):
    builder = Builder("g")
    builder.input("x", (2,))
    graph = builder.finish(builder.input(name, (2,)))
    tensors = torch.zeros(2), torch.ones(2)
    assert graph.run(*tensors) is tensors[1]


def test_finishing_does_not_change_what_was_written():
    builder = Builder("g")
    x = builder.input("x", (2,))
    y = builder.call("aten.relu.default", x)
    z = builder.call("aten.neg.default", y)
    first, second = builder.finish(y), builder.finish([z, x])
    roles = [[v.role for v in graph.values.values()] for graph in (first, second)]
    assert roles == [["input", "output", "tmp"], ["input", "tmp", "output"]]
    assert builder.finish(y) == first


def test_ends_must_be_made():
    builder = Builder("g")
    x = builder.input("x", (2,))
    never = builder.value("never", (2,))
    with pytest.raises(GraphError, match="%never is used, but no node before that makes it"):
        builder.finish([x, never])
    builder.emit("aten.relu.default", [never])
    with pytest.raises(GraphError, match="%never is used, but no node before that makes it"):
        builder.finish(x)
    with pytest.raises(GraphError, match="has no value 77"):
        builder.finish(77)


def test_what_is_not_valid_is_refused_at_the_end():
    builder = Builder("g")
    x = builder.input("x", (2,))
    y = builder.call("aten.add_.Tensor", x, 1)
    with pytest.raises(GraphError, match="writes to its input; graphs are functional"):
        builder.finish(y)


def test_state_may_begin_with_zeros() -> None:
    builder = Builder()
    x = builder.input("x", (2,))
    state = builder.zeros("state", "average", torch.empty(2))
    total = builder.call("aten.add.Tensor", x, state)
    graph = builder.finish(total, updates={state.id: total.id})
    assert not graph.tensors
    assert graph.run(torch.ones(2)).tolist() == [1.0, 1.0]


def test_what_begins_with_zeros_has_no_contents() -> None:
    builder = Builder()
    state = builder.zeros("state", "average", torch.empty(2))
    builder.graph.tensors[state.id] = torch.zeros(2)
    with pytest.raises(GraphError, match="begin with zeros"):
        builder.finish(state)
