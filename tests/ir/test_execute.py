import gc
import weakref

import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import GraphError, InputError, WeightError
from shardwright.ir import Builder, IRGraph, Source, compile_graph
from tests.ir.random_graphs import RandomGraph, random_graphs


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit for bit, not-a-number included."""
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


@given(random_graphs())
def test_a_program_computes_what_torch_does(case: RandomGraph):
    program = compile_graph(case.graph)
    stored = program.arguments[len(case.inputs) :]
    results = program([*case.inputs, *(case.graph.tensors[value_id] for value_id in stored)])
    assert_equal(results, case.outputs + case.updates)


def chain(length: int = 5) -> IRGraph:
    """``length`` values of which each is dead as soon as the next is made."""
    builder = Builder("chain")
    x = builder.input("x", (8,))
    for _ in range(length):
        x = builder.call("aten.add.Tensor", x, 1.0)
    return builder.finish(x)


class Watch(TorchDispatchMode):
    """Counts how many results of operators are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(result)]
        self.peak = max(self.peak, len(self.alive))
        return result


def test_dead_values_are_freed_at_once():
    program, x = compile_graph(chain(6)), torch.zeros(8)
    gc.disable()  # freed by counting references, not by the collector
    try:
        with Watch() as watch:
            (result,) = program([x])
    finally:
        gc.enable()
    assert watch.peak == 2
    assert_equal([result], [torch.full((8,), 6.0)])


def test_values_that_nothing_reads_are_freed_too():
    builder = Builder("g")
    x = builder.input("x", (4,))
    for _ in range(4):
        builder.call("aten.add.Tensor", x, 1.0)
    program, tensor = compile_graph(builder.finish(x)), torch.zeros(4)
    with Watch() as watch:
        program([tensor])
    assert watch.peak == 1


def failing() -> IRGraph:
    builder = Builder("g")
    x = builder.input("x", (4,))
    index = builder.input("index", (1,), "i64")
    x = builder.call("aten.relu.default", x)
    with builder.scope("layers.3", "my.Layer"):
        attrs = {"dim": 0}
        x = builder.emit("aten.index_select.default", [x, index], attrs, source=Source("my.py", 7))
    return builder.finish(x)


def test_an_exception_names_the_node_and_its_line():
    with pytest.raises(IndexError) as caught:
        failing().run(torch.zeros(4), torch.tensor([9]))
    assert caught.value.__notes__ == [
        "in aten.index_select.default in layers.3 (my.Layer) at my.py:7"
    ]


def test_an_exception_before_the_first_node_has_no_note():
    with pytest.raises(ValueError, match="not enough values") as caught:
        compile_graph(chain())([])
    assert not hasattr(caught.value, "__notes__")


def test_arguments_are_inputs_then_what_is_used_of_the_stored():
    builder = Builder("g")
    used, unused, returned, source = (
        builder.param(name, torch.full((2,), float(i))) for i, name in enumerate("abcd")
    )
    x = builder.input("x", (2,))
    y = builder.call("aten.add.Tensor", x, used)
    graph = builder.finish([returned, x, y, y], updates={unused.id: source.id, used.id: y.id})
    program = compile_graph(graph)
    names = [graph.values[value_id].name for value_id in program.arguments]
    assert names == ["x", "a", "c", "d"]
    x, a, c, d = (torch.full((2,), float(i)) for i in range(4))
    results = program([x, a, c, d])
    assert results[0] is c
    assert results[1] is x
    assert results[2] is results[3]
    assert_equal(results, [c, x, x + a, x + a, d, x + a])


def test_gradients_flow_through_a_program():
    builder = Builder("g")
    x = builder.input("x", (3, 4))
    weight = torch.randn(2, 4, requires_grad=True)
    y = builder.call("aten.linear.default", x, builder.param("w", weight))
    graph = builder.finish(builder.call("aten.gelu.default", y))
    x = torch.randn(3, 4, requires_grad=True)
    (found,) = compile_graph(graph)([x, weight])
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight))
    seed = torch.randn(3, 2)
    assert_equal(
        list(torch.autograd.grad(found, [x, weight], seed)),
        list(torch.autograd.grad(expected, [x, weight], seed)),
    )


def test_factories_make_their_tensors_on_the_device():
    builder = Builder("g")
    graph = builder.finish(builder.call("aten.arange.default", 3))
    assert compile_graph(graph, "meta")([])[0].is_meta
    assert not graph.run().is_meta


def test_a_graph_without_nodes_runs():
    builder = Builder("g")
    assert builder.finish([]).run() is None
    x = builder.input("x", (2,))
    tensor = torch.zeros(2)
    assert builder.finish(x).run(tensor) is tensor


def test_operators_that_return_nothing_or_lists():
    builder = Builder("g")
    x = builder.input("x", (4,))
    builder.emit(
        "aten._assert_tensor_metadata.default",
        [x],
        {"size": [4], "stride": None, "dtype": None, "device": None, "layout": None},
        outputs=[],
    )
    (whole,) = builder.call("aten.split.Tensor", x, 4)
    graph = builder.finish(whole)
    assert_equal([graph.run(torch.arange(4.0))], [torch.arange(4.0)])


def test_a_marker_cannot_be_compiled():
    builder = Builder("g")
    builder.emit("Backward", [])
    with pytest.raises(GraphError, match="'Backward' is a marker"):
        compile_graph(builder.finish([]))


def test_run_takes_and_gives_what_the_structures_say():
    builder = Builder("g")
    x, y = builder.input("x", (2,)), builder.input("y", (2,))
    graph = builder.finish([builder.call("aten.sub.Tensor", x, y), x])
    one, two = torch.ones(2), torch.full((2,), 2.0)
    difference, same = graph.run(two, y=one)
    assert same is two
    assert_equal([difference], [one])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3), r"input 'x' is f32\[3\], but the graph was captured for f32\[8\]; shapes"),
        (torch.zeros(8, dtype=torch.int64), r"input 'x' is i64\[8\], but"),
        (torch.zeros(8, dtype=torch.uint16), r"input 'x' is u16\[8\], but"),
        ([1.0], "input x must be a tensor, found a list of 1"),
    ],
)
def test_inputs_of_another_shape_or_dtype(tensor, message: str):
    with pytest.raises(InputError, match=message):
        chain().run(tensor)


@pytest.mark.parametrize("forget", [False, True])
def test_stored_values_without_contents(forget: bool):
    builder = Builder("g")
    weight = builder.param("fc.weight", torch.empty(2, device="meta"))
    graph = builder.finish(builder.call("aten.relu.default", weight))
    if forget:
        graph.tensors.clear()
    with pytest.raises(WeightError, match=r"param 'fc\.weight' has no contents"):
        graph.run()


def test_a_run_leaves_stored_values_as_they_were():
    builder = Builder("g")
    count = builder.buffer("count", torch.zeros(1))
    more = builder.call("aten.add.Tensor", count, 1.0)
    graph = builder.finish(more, updates={count.id: more.id})
    for _ in range(2):
        assert_equal([graph.run()], [torch.ones(1)])


def test_structures_are_needed_to_run():
    graph = chain()
    graph.in_structure = None
    with pytest.raises(GraphError, match="no structure of inputs and outputs"):
        graph.run(torch.zeros(8))


def test_several_lists_are_results_one_after_another() -> None:
    builder = Builder("lists")
    given = [builder.input(f"x{i}", (2, 3), "f64") for i in range(8)]
    steps = [builder.input(f"step{i}", (), "f32") for i in range(2)]
    lists = [given[i : i + 2] for i in range(0, 8, 2)]
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    made = builder.call("aten._fused_adamw.default", *lists, [], steps, **hyper, **flags)
    graph = builder.finish(made)
    tensors = [torch.rand(2, 3, dtype=torch.float64) for _ in given]
    expected = [tensor.clone() for tensor in tensors]
    torch._fused_adamw_(
        *[expected[i : i + 2] for i in range(0, 8, 2)], [], [torch.ones(()), torch.ones(())],
        **hyper, **flags,
    )  # fmt: skip
    found = graph.run(*tensors, torch.ones(()), torch.ones(()))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
