"""Plans give what graphs give, whatever shares memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from shardwright.compiler.executor import Executor
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import make_exec_plan
from shardwright.errors import ExecError, InputError
from shardwright.ir import Builder
from shardwright.kernels.emitters import emit_graph
from tests.compiler.running import (
    assert_close,
    assert_same,
    contents,
    feed_of,
    planned,
    run_nodes,
    run_plan,
)
from tests.graphs import language_model, tokens
from tests.ir.random_graphs import RandomGraph, random_graphs

both = pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])


def f64(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@settings(deadline=None, max_examples=60)
@given(random_graphs())
def test_a_plan_gives_what_torch_gives(drawn: RandomGraph):
    outputs, updates = run_plan(drawn.graph, drawn.inputs)
    for found, wanted in zip([*outputs, *updates], [*drawn.outputs, *drawn.updates], strict=True):
        assert_close(found, wanted.contiguous(), 1e-12)


@settings(deadline=None, max_examples=30)
@given(random_graphs())
def test_native_calls_and_owned_outputs_change_nothing(drawn: RandomGraph):
    # Gradients of norms may cancel to nearly nothing: what they are summed of is of the order of 1.
    assert_same(
        drawn.graph, drawn.inputs, native=True, outputs="caller", tolerance=1e-9, absolute=1e-15
    )


@both
@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model(native, tied):
    tolerance = 1e-12 if native else 0.0
    assert_same(language_model(tied=tied), [tokens()], native=native, tolerance=tolerance)


# --- memory that is shared -------------------------------------------------------------------


def test_an_output_that_is_an_input_and_the_same_value_twice():
    builder = Builder()
    x = builder.input("x", (3,), "f64")
    y = builder.call("aten.relu.default", x)
    graph = builder.finish([x, y, y, x])
    inputs = [f64(3)]
    assert_same(graph, inputs)
    first, second, third, last = run_plan(graph, inputs)[0]
    addresses = {tensor.data_ptr() for tensor in (first, second, third, last, *inputs)}
    assert len(addresses) == 5


def counter(builder, name="count", size=4):
    return builder.buffer(name, torch.arange(size, dtype=torch.float64))


@both
def test_an_update_is_made_in_the_stored_tensor(native):
    builder = Builder()
    x, count = builder.input("x", (4,), "f64"), counter(builder)
    new = builder.call("aten.add.Tensor", count, x)
    graph = builder.finish([builder.call("aten.relu.default", new)], updates={count.id: new.id})
    plan = planned(graph)
    assert len(plan.calls) == 2
    assert_same(graph, [f64(4)], native=native)


def test_the_old_contents_are_returned_with_the_new():
    builder = Builder()
    x, count = builder.input("x", (4,), "f64"), counter(builder)
    new = builder.call("aten.add.Tensor", count, x)
    view = builder.call("aten.slice.Tensor", count, 0, 1, 3)
    graph = builder.finish([count, view, new], updates={count.id: new.id})
    assert_same(graph, [f64(4)])


def test_old_contents_that_are_read_after_the_update():
    builder = Builder()
    x, count = builder.input("x", (4,), "f64"), counter(builder)
    new = builder.call("aten.mul.Tensor", count, x)
    late = builder.call("aten.sub.Tensor", count, new)
    graph = builder.finish([late], updates={count.id: new.id})
    assert_same(graph, [f64(4)])


def test_stored_values_that_change_places():
    builder = Builder()
    a, b = counter(builder, "a"), builder.buffer("b", f64(4))
    graph = builder.finish([], updates={a.id: b.id, b.id: a.id})
    assert_same(graph, [])


def test_updates_by_views_inputs_and_one_value():
    builder = Builder()
    a = builder.buffer("a", f64(2, 3))
    b, c = builder.buffer("b", f64(3, 2)), builder.buffer("c", f64(2, 3))
    d, x = builder.buffer("d", f64(2, 3)), builder.input("x", (2, 3), "f64")
    new = builder.call("aten.relu.default", a)
    turned = builder.call("aten.t.default", a)
    graph = builder.finish([new], updates={a.id: new.id, b.id: turned.id, c.id: new.id, d.id: x.id})
    assert_same(graph, [f64(2, 3)])


def test_an_update_through_a_view_of_what_is_made():
    builder = Builder()
    a, x = builder.buffer("a", f64(6)), builder.input("x", (2, 3), "f64")
    made = builder.call("aten.view.default", builder.call("aten.relu.default", x), [6])
    graph = builder.finish([], updates={a.id: made.id})
    assert len(planned(graph).calls) == 1
    assert_same(graph, [f64(2, 3)])


def test_a_stored_value_that_is_its_own_update():
    builder = Builder()
    a = builder.buffer("a", f64(3))
    assert_same(builder.finish([a], updates={a.id: a.id}), [])


@both
def test_views_of_views_of_what_is_written_in_place(native):
    builder = Builder()
    x = builder.input("x", (2, 6), "f64")
    a = builder.call("aten.relu.default", x)
    left, right = builder.call("aten.split.Tensor", a, 3, 1)
    b = builder.call("aten.add.Tensor", left, right)
    turned = builder.call("aten.t.default", builder.call("aten.view.default", b, [3, 2]))
    square = builder.call("aten.mm.default", turned, builder.call("aten.t.default", turned))
    graph = builder.finish([builder.call("aten.add.Tensor", a, a), square])
    assert_same(graph, [f64(2, 6)], native=native, tolerance=1e-14)


@both
def test_a_matrix_added_to_its_own_transpose(native):
    builder = Builder()
    a = builder.call("aten.relu.default", builder.input("x", (3, 3), "f64"))
    graph = builder.finish(builder.call("aten.add.Tensor", a, builder.call("aten.t.default", a)))
    assert planned(graph).alias == {}
    assert_same(graph, [f64(3, 3)], native=native)


@both
def test_numbers_empty_tensors_and_broadcasts(native):
    builder = Builder()
    number, empty = builder.input("n", (), "f64"), builder.input("e", (0, 3), "f64")
    x = builder.input("x", (3,), "f64")
    wide = builder.call("aten.expand.default", x, [2, 3])
    outputs = [
        builder.call("aten.add.Tensor", wide, number),
        builder.call("aten.relu.default", number),
        builder.call("aten.add.Tensor", empty, x),
        builder.call("aten.sum.default", empty),
        builder.call("aten.cat.default", [empty, wide]),
        wide,
        builder.call("aten.sum.dim_IntList", wide, [0], False, dtype=None),
    ]
    assert_same(builder.finish(outputs), [f64(), f64(0, 3), f64(3)], native=native)


OVER_NOTHING = {
    "gemm": ("shardwright.gemm.default", [(3, 0), (0, 4)], [None, None, False, False, 0, 1.0]),
    "gemm of rows": ("aten.linear.default", [(2, 3, 0), (4, 0), (4,)], []),
    "bmm": ("aten.bmm.default", [(2, 3, 0), (2, 0, 4)], []),
    "reduce_sum": ("aten.sum.dim_IntList", [(0, 3)], [[0]]),
    "concat": ("aten.cat.default", [(0, 3), (2, 3)], []),
}


@pytest.mark.parametrize(("op", "shapes", "more"), OVER_NOTHING.values(), ids=OVER_NOTHING)
def test_no_native_kernel_is_given_an_empty_operand(op, shapes, more):
    builder = Builder()
    values = [builder.input(f"x{i}", shape, "f64") for i, shape in enumerate(shapes)]
    given = [values] if op == "aten.cat.default" else values
    graph = builder.finish(builder.call(op, *given, *more))
    assert_same(graph, [f64(*shape) for shape in shapes], native=True)
    assert set(Executor(planned(graph)).refused.values()) == {"an operand is empty"}


def test_inputs_that_are_given_away():
    builder = Builder()
    acc, x = builder.input("acc", (4,), "f64"), builder.input("x", (4,), "f64")
    new = builder.call("aten.add.Tensor", acc, x)
    late = builder.call("aten.mul.Tensor", x, 2.0)
    graph = builder.finish([new, late])
    a, b = f64(4), f64(4) + 1
    wanted = run_nodes(graph, [a, b])[0]
    for donated in ({graph.inputs[0]: graph.outputs[0]}, {graph.inputs[1]: graph.outputs[0]}):
        plan = planned(graph, donated=donated)
        given = [a.clone(), b.clone()]
        feed = feed_of(plan, graph, given, {})
        found = Executor(plan).run(feed, copy=False)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        (taken,) = donated
        assert found[0].data_ptr() == given[graph.inputs.index(taken)].data_ptr()


# --- calls that were made by hand ------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("op", "change", "said"),
    [
        ("aten.relu.default", {"attr_schema": 1}, "relu has no attribute schema 1"),
        ("aten.relu.default", {"attr_blob": b"\0"}, "schema 0 has no blob, found 1 bytes"),
        ("aten.abs.default", {"attr_schema": 7}, "has no attribute schema 7"),
        ("aten.sum.default", {"attr_blob": b"\0" * 64}, "a blob of 64 bytes"),
        ("aten.sum.default", {"attr_blob": b""}, "a blob of 0 bytes"),
    ],
)
def test_attributes_that_a_kind_cannot_read_are_refused(native, op, change, said):
    builder = Builder()
    graph = builder.finish(builder.call(op, builder.input("x", (2, 3), "f64")))
    lowered = lower_graph(emit_graph(graph))
    calls = (replace(lowered.ops[0], **change), *lowered.ops[1:])
    plan = make_exec_plan(replace(lowered, ops=calls))
    with pytest.raises(ExecError, match=said):
        Executor(plan, native=native).run({"x": f64(2, 3)})


@pytest.mark.parametrize("op", ["aten.softmax.int", "aten.sin.default"])
def test_a_call_that_moves_what_it_writes_to_is_found_out(op):
    """Torch resizes an output that a plan has another shape for; files are refused before."""
    builder = Builder()
    more = {"dim": 1} if op == "aten.softmax.int" else {}
    graph = builder.finish(builder.call(op, builder.input("x", (2, 3), "f64"), **more))
    lowered = lower_graph(emit_graph(graph))
    (made,) = lowered.outputs
    values = {**lowered.values, made: replace(lowered.values[made], shape=(3, 2))}
    executor = Executor(make_exec_plan(replace(lowered, values=values)), native=False)
    with pytest.raises(
        ExecError, match=r"moved.*\[3, 2\].*became \[2, 3\]|made \[2, 3\] where .* says \[3, 2\]"
    ):
        executor.run({"x": f64(2, 3)})


# --- feeds -----------------------------------------------------------------------------------


def small():
    builder = Builder()
    x = builder.input("x", (2, 3), "f64")
    w = builder.param("fc.weight", f64(4, 3), names=("fc.weight", "tied.weight"))
    return builder.finish(builder.call("aten.linear.default", x, w))


@pytest.mark.parametrize(
    ("feed", "said"),
    [
        ({"y": f64(2, 3)}, "nothing is named 'y'"),
        ({"x": f64(3, 3)}, r"'x' is f64\[3, 3\].*f64\[2, 3\]"),
        ({"x": f64(2, 3).float()}, r"'x' is f32\[2, 3\]"),
        ({"x": f64(2, 3).to("meta")}, "'x' is on meta"),
        ({"x": [1]}, "'x' is a list"),
        ({"x": f64(2, 3)}, "lacks 'fc.weight'"),
    ],
)
def test_feeds_are_refused_by_name(feed, said):
    with pytest.raises(InputError, match=said):
        Executor(planned(small())).run(feed)


@both
def test_inputs_of_any_strides_at_any_address(native):
    graph = small()
    executor = Executor(planned(graph), native=native)
    weight = graph.tensors[graph.inputs[0] + 1]
    executor.feeds.bind({"tied.weight": weight})
    for x in (f64(2, 3), f64(3, 2).t(), f64(4, 6)[::2, ::2], f64(1, 3).expand(2, 3)):
        for _ in range(2):
            (found,) = executor.run({"x": x})
            assert_close(found, x @ weight.t(), 1e-14)
            x = x if 0 in x.stride() else x.mul_(2)


@both
def test_static_weights_are_renewed_by_refresh(native):
    graph = small()
    (weight,) = (value.id for value in graph.stored())
    plan = planned(graph, static=[weight])
    executor = Executor(plan, native=native)
    w, x = f64(4, 3), f64(2, 3)
    executor.run({"x": x, "fc.weight": w})
    w.mul_(3)
    executor.refresh()
    assert_close(executor.run({"x": x})[0], x @ w.t(), 1e-14)
    other = f64(4, 3) - 1
    assert_close(executor.run({"fc.weight": other})[0], x @ other.t(), 1e-14)


def test_an_input_in_memory_that_a_run_writes_is_copied_first():
    builder = Builder()
    x, count = builder.input("x", (4,), "f64"), counter(builder)
    new = builder.call("aten.add.Tensor", count, x)
    late = builder.call("aten.mul.Tensor", x, new)
    graph = builder.finish([late], updates={count.id: new.id})
    executor = Executor(planned(graph))
    own = f64(4)
    before = own.clone()
    for _ in range(2):
        before = own.clone()
        (found,) = executor.run({"x": own, "count": own})
        assert torch.equal(own, 2 * before)
        assert torch.equal(found, before * 2 * before)


def test_stored_tensors_that_share_written_memory_are_refused():
    builder = Builder()
    a, b = counter(builder, "a"), counter(builder, "b")
    new = builder.call("aten.add.Tensor", a, b)
    graph = builder.finish([new], updates={a.id: new.id})
    own = f64(8)
    with pytest.raises(InputError, match=r"'b'.*'a'.*share memory"):
        Executor(planned(graph)).run({"a": own[:4], "b": own[2:6]})
    with pytest.raises(InputError, match="strides"):
        Executor(planned(graph)).run({"a": own[::2], "b": f64(4)})


def test_an_input_that_lies_on_itself_is_fed_as_it_is_or_refused():
    builder = Builder()
    x = builder.input("x", (2, 3), "f64", strides=(0, 1))
    plan = planned(builder.finish(builder.call("aten.sin.default", x)))
    row = f64(1, 3)
    (found,) = Executor(plan).run({"x": row.expand(2, 3)})
    assert torch.equal(found, row.sin().expand(2, 3))
    with pytest.raises(InputError, match=r"'x' has strides \(3, 1\).*\(0, 1\).*one another"):
        Executor(plan).run({"x": row.expand(2, 3).contiguous()})


def test_a_refused_feed_binds_nothing():
    builder = Builder()
    a, b = counter(builder, "a"), counter(builder, "b")
    new = builder.call("aten.add.Tensor", a, b)
    graph = builder.finish(
        [new], updates={a.id: new.id, b.id: builder.call("aten.relu.default", new).id}
    )
    executor, own = Executor(planned(graph)), f64(8)
    before = own.clone()
    for _ in range(2):
        with pytest.raises(InputError, match="share memory"):
            executor.run({"a": own[:4], "b": own[2:6]})
    feed = {"a": own[:4], "b": own[2:6]}
    for _ in range(2):
        with pytest.raises(InputError, match="share memory"):
            executor.run(feed)
    with pytest.raises(InputError, match="lacks 'a', 'b'"):
        executor.run()
    assert torch.equal(own, before)
    apart = {"a": own[:4], "b": own[4:]}
    assert torch.equal(executor.run(apart)[0], before[:4] + before[4:])
    with pytest.raises(InputError, match=r"f64\[3\]"):
        executor.run({"a": f64(3)})
    executor.run()


@both
def test_empty_tensors_share_no_memory(native):
    builder = Builder()
    a, b = counter(builder, "a"), builder.buffer("b", f64(0, 2))
    new = builder.call("aten.add.Tensor", a, 1.0)
    none = builder.call("aten.add.Tensor", b, 1.0)
    graph = builder.finish([new], updates={a.id: new.id, b.id: none.id})
    own = f64(6)
    wanted = own[:4] + 1
    empty = own[1:1].view(0, 2)
    (found,) = Executor(planned(graph), native=native).run({"a": own[:4], "b": empty})
    assert torch.equal(found, wanted)


@both
def test_an_input_that_was_turned_in_place(native):
    builder = Builder()
    x = builder.input("x", (3, 3), "f64")
    executor = Executor(
        planned(builder.finish(builder.call("aten.relu.default", x))), native=native
    )
    own = f64(3, 3)
    for turn in (False, True, True):
        if turn:
            own.t_()
        assert torch.equal(executor.run({"x": own})[0], own.relu())


@both
@pytest.mark.parametrize("strided", [False, True])
def test_an_input_that_was_resized_in_place(native, strided):
    executor, graph = Executor(planned(small()), native=native), small()
    own = f64(3, 2).t() if strided else f64(2, 3)
    executor.run({"x": own, "fc.weight": contents(graph)[graph.inputs[0] + 1]})
    own.resize_(1, 3)
    with pytest.raises(InputError, match=r"f64\[1, 3\]"):
        executor.run({"x": own})


def test_outputs_are_copies_unless_slots_are_asked_for():
    graph = small()
    executor = Executor(planned(graph))
    feed = feed_of(executor.plan, graph, [f64(2, 3)], contents(graph))
    (copy,) = executor.run(feed)
    (slot,) = executor.run(copy=False)
    assert torch.equal(copy, slot)
    executor.run({"x": f64(2, 3) + 1})
    assert not torch.equal(copy, slot)
    (again,) = executor.run_compiled({"x": f64(2, 3)})
    assert again.data_ptr() == slot.data_ptr()
    assert torch.equal(copy, slot)


@both
def test_nothing_runs_before_all_is_bound(native):
    executor, x = Executor(planned(small(), outputs="caller"), native=native), f64(2, 3)
    for run in (executor.run_compiled, executor.run_bound):
        with pytest.raises(InputError, match=r"the feed lacks 'x', 'fc\.weight'"):
            run()
    weight = f64(4, 3)
    with pytest.raises(InputError, match="nothing is named 'nope'"):
        executor.run({"fc.weight": weight, "x": x, "nope": x})
    with pytest.raises(InputError, match="the feed lacks 'x'"):
        executor.run_compiled()
    executor.feeds.bind({"fc.weight": weight})
    assert_close(executor.run_compiled({"x": x})[0], x @ weight.t(), 1e-14)


@both
def test_a_replay_copies_its_inputs_into_memory_of_its_own(native):
    graph = small()
    executor, x = Executor(planned(graph), native=native), f64(2, 3)
    weight = contents(graph)[graph.inputs[0] + 1]
    executor.bind_and_alloc_slots({"x": x, "fc.weight": weight})
    before, addresses = x.clone(), set()
    for k in range(3):
        other = f64(2, 3) + k
        (found,) = executor.run_compiled({"x": other})
        assert_close(found, other @ weight.t(), 1e-14)
        assert torch.equal(executor.run_compiled()[0], found)
        addresses.add(executor.memory[graph.inputs[0]].data_ptr())
    assert torch.equal(x, before)
    assert len(addresses - {x.data_ptr()}) == 1
    assert_close(executor.run({"x": x})[0], before @ weight.t(), 1e-14)


@pytest.mark.parametrize(
    ("feed", "said"),
    [
        ([f64(2, 3)], "a feed is a list, but tensors are fed by name"),
        ([], "a feed is a list"),
        ({"x": f64(2, 3), "y": f64(2, 3)}, "nothing is named 'y'"),
        ({"x": f64(1, 3)}, r"'x' is f64\[1, 3\].*f64\[2, 3\]"),
        ({"x": f64(2, 3).float()}, r"'x' is f32\[2, 3\]"),
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, r"'x' is i64\[2, 3\]"),
        ({"x": 3}, "'x' is a int"),
        ({"fc.weight": f64(4, 3)}, "param 'fc.weight' is stored"),
    ],
)
def test_a_replay_refuses_what_does_not_fit(feed, said):
    executor, weight, x = Executor(planned(small())), f64(4, 3), f64(2, 3)
    executor.bind_and_alloc_slots({"x": x, "fc.weight": weight})
    for run in (executor.run_compiled, *([executor.run] if isinstance(feed, list) else [])):
        with pytest.raises(InputError, match=said):
            run(feed)
    assert_close(executor.run_compiled()[0], x @ weight.t(), 1e-14)


@both
def test_outputs_that_the_caller_owns(native):
    graph = small()
    executor = Executor(planned(graph, outputs="caller"), native=native)
    feed = feed_of(executor.plan, graph, [f64(2, 3)], contents(graph))
    (first,) = executor.run(feed)
    kept = first.clone()
    (second,) = executor.run({"x": f64(2, 3) + 1})
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)


def test_an_error_of_a_call_says_where_it_came_from():
    builder = Builder()
    table, index = builder.input("t", (3, 2), "f64"), builder.input("i", (2,), "i64")
    graph = builder.finish(builder.call("aten.embedding.default", table, index))
    with pytest.raises(IndexError) as caught:
        Executor(planned(graph), native=False).run({"t": f64(3, 2), "i": torch.tensor([0, 7])})
    assert "aten.embedding.default" in caught.value.__notes__[0]
