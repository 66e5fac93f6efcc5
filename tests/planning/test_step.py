"""Steps made ready to be cut: what is moved, what becomes a quotient, and that nothing changes."""

import pytest
import torch
from torch.nn import functional as F

from shardwright.errors import PlanError
from shardwright.ir import Builder, compile_graph
from shardwright.ir.graph import forward_nodes
from shardwright.planning import as_step
from shardwright.planning.step_graph import forward_view
from tests.steps import adamw, backward, finish, image_step, language_step


def ops(graph):
    return [node.op.split(".")[1] if "." in node.op else node.op for node in graph.nodes]


def value_of(step, value_id, **inputs):
    """A value of a step's forward, for inputs by name; those of the whole batch end in ``__1``."""
    graph = forward_view(step.graph)
    graph.outputs = [value_id]
    graph.inputs = [*graph.inputs, *step.whole]
    graph.updates = {}
    program = compile_graph(graph)
    given = {**inputs, "lr": torch.zeros(())}
    tensors = [
        given[graph.values[v].name] if v in graph.inputs else graph.tensors[v]
        for v in program.arguments
    ]
    return program(tensors)[0]


@pytest.fixture
def batch():
    torch.manual_seed(1)
    tokens, labels = torch.randint(50, (8, 6)), torch.randint(50, (8, 6))
    labels[:3, 2:] = -100
    return tokens, labels


def test_the_forward_comes_first_and_a_marker_before_it_goes_behind():
    step = as_step(language_step(layers=1), 1)
    assert ops(step.graph)[0] == "embedding"
    assert ops(step.graph)[step.forward :] == ["zero_grad", "Backward", "adamw_step"]
    assert (step.prepare, step.whole) == (frozenset(), {})


def test_what_the_program_does_after_its_backward_without_need_is_forward():
    builder = Builder("step")
    x = builder.input("x", (4, 3), "f64")
    weight = builder.param("weight", torch.ones(2, 3, dtype=torch.float64))
    loss = builder.call("aten.mean.default", builder.call("aten.linear.default", x, weight))
    updates = adamw(builder, [weight], backward(builder, loss, [weight]))
    shown = builder.call("aten.detach.default", loss)
    step = as_step(builder.finish([shown], updates=updates), 2)
    assert ops(step.graph) == ["linear", "mean", "detach", "Backward", "adamw_step"]
    assert step.forward == 3


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_mean_over_labels_becomes_a_quotient_of_sums_of_the_whole_batch(
    batch, weighted, microbatches
):
    tokens, labels = batch
    graph = language_step(batch=8 // microbatches, weighted=weighted)
    step = as_step(graph, microbatches)
    cuts = [
        {"tokens": a, "labels": b, "labels__1": labels}
        for a, b in zip(tokens.chunk(microbatches), labels.chunk(microbatches), strict=True)
    ]
    entropy = next(node for node in step.graph.nodes if "cross_entropy" in node.op)
    scores = torch.cat([value_of(step, entropy.inputs[0], **cut) for cut in cuts])
    classes = next((graph.tensors[v.id] for v in graph.stored() if v.name == "classes"), None)
    expected = F.cross_entropy(scores, labels[:, 1:].reshape(-1), classes)
    losses = [value_of(step, step.graph.outputs[0], **cut) for cut in cuts]
    torch.testing.assert_close(sum(losses) / microbatches, expected, rtol=1e-14, atol=0)
    assert bool(step.prepare) == (microbatches > 1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("likely", [False, True])
def test_smoothed_labels_and_probabilities_are_quotients_too(likely, smoothing):
    torch.manual_seed(0)
    builder = Builder("step")
    x = builder.input("x", (4, 5, 3), "f64")
    if likely:
        labels, given = builder.input("labels", (4, 5, 3), "f64"), torch.rand(4, 5, 3).double()
    else:
        labels, given = builder.input("labels", (4, 3), "i64"), torch.randint(5, (4, 3))
        given[0, 1] = -100
    weight = builder.param("weight", torch.rand(5, 1, dtype=torch.float64))
    scores = builder.call("aten.mul.Tensor", x, weight)
    loss = builder.call(
        "aten.cross_entropy_loss.default", scores, labels, label_smoothing=smoothing
    )
    graph = finish(builder, loss)
    step = as_step(graph, 1)
    assert {node.attrs.get("reduction") for node in step.graph.nodes} == {None, 2}
    values = torch.rand(4, 5, 3, dtype=torch.float64)
    found = value_of(step, step.graph.outputs[0], x=values, labels=given)
    (table,) = graph.tensors.values()
    expected = F.cross_entropy(values * table, given, label_smoothing=smoothing)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_inputs_of_the_whole_batch_are_no_inputs_of_the_graph():
    step = as_step(language_step(batch=2, length=6), 4)
    values = step.graph.values
    ((whole, part),) = step.whole.items()
    assert (values[whole].shape, values[part].shape) == ((8, 6), (2, 6))
    assert (values[whole].role, whole in step.graph.inputs) == ("input", False)
    made = {v for i in step.prepare for v in step.graph.nodes[i].outputs}
    read = {v for i in step.prepare for v in step.graph.nodes[i].inputs}
    assert read - made == {whole}


def test_the_same_graph_gives_the_same_step():
    graph = language_step(layers=1)
    assert as_step(graph, 3).graph == as_step(graph, 3).graph


def test_losses_with_the_same_labels_share_a_count():
    builder = Builder("step")
    x, labels = builder.input("x", (4, 3), "f64"), builder.input("labels", (4,), "i64")
    weight = builder.param("weight", torch.ones(5, 3, dtype=torch.float64))
    scores = builder.call("aten.linear.default", x, weight)
    losses = [
        builder.call("aten.cross_entropy_loss.default", s, labels)
        for s in (scores, builder.call("aten.mul.Scalar", scores, 2.0))
    ]
    step = as_step(finish(builder, builder.call("aten.add.Tensor", *losses)), 2)
    assert ops(step.graph).count("ne") == 1


SHIFTED = {
    "flat": (1, lambda call, labels: call("aten.reshape.default", labels, [5])),
    "of one row": (1, lambda call, labels: call("aten.view.default", labels, [1, 5])),
    "padded": (
        1,
        lambda call, labels: call(
            "aten.view.default",
            call(*SLICED, call("aten.constant_pad_nd.default", labels, [0, 1], -100), 1, 1, 6),
            [5],
        ),
    ),
    "cast": (1, lambda call, labels: call("aten.to.dtype", labels, torch.int64)),
    "squeezed": (
        1,
        lambda call, labels: call("aten.squeeze.dim", call("aten.unsqueeze.default", labels, 1), 1),
    ),
    "of two rows": (2, lambda call, labels: call("aten.reshape.default", labels, [10])),
}
SLICED = ("aten.slice.Tensor",)


@pytest.mark.parametrize("case", SHIFTED)
def test_labels_are_counted_in_the_whole_batch_also_where_a_microbatch_is_one_row(case):
    torch.manual_seed(0)
    rows, shift = SHIFTED[case]
    builder = Builder("step")
    x, labels = builder.input("x", (rows, 5, 3), "f64"), builder.input("labels", (rows, 5), "i64")
    weight = builder.param("weight", torch.rand(4, 3, dtype=torch.float64))
    targets = shift(builder.call, labels)
    shape = [*targets.shape, 4]
    scores = builder.call(
        "aten.reshape.default", builder.call("aten.linear.default", x, weight), shape
    )
    if len(shape) == 3:
        scores = builder.call("aten.transpose.int", scores, 1, 2)
    graph = finish(builder, builder.call("aten.cross_entropy_loss.default", scores, targets))
    step = as_step(graph, 4)
    values, given = torch.rand(4 * rows, 5, 3).double(), torch.randint(4, (4 * rows, 5))
    given[0, 1:], given[-1, 3] = -100, -100
    cuts = [
        {"x": a, "labels": b, "labels__1": given}
        for a, b in zip(values.chunk(4), given.chunk(4), strict=True)
    ]
    losses = [value_of(step, step.graph.outputs[0], **cut) for cut in cuts]
    (table,) = (graph.tensors[v.id] for v in graph.stored() if v.name == "weight")
    if case == "padded":
        given = F.pad(given[:, 1:], (0, 1), value=-100)
    expected = F.cross_entropy((values @ table.T).flatten(0, 1), given.flatten())
    torch.testing.assert_close(sum(losses) / 4, expected, rtol=1e-14, atol=0)


def test_labels_that_mix_the_batch_are_refused_in_several_microbatches():
    builder = Builder("step")
    x, labels = builder.input("x", (4, 3), "f64"), builder.input("labels", (4,), "i64")
    weight = builder.param("weight", torch.ones(5, 3, dtype=torch.float64))
    scores = builder.call("aten.linear.default", x, weight)
    targets = builder.call("aten.flip.default", labels, [0])
    graph = finish(builder, builder.call("aten.cross_entropy_loss.default", scores, targets))
    as_step(graph, 1)
    with pytest.raises(PlanError, match=r"labels that do not come from inputs row by row.*sum"):
        as_step(graph, 2)


def test_inputs_and_outputs_tell_along_which_dimension_microbatches_lie():
    builder = Builder("step")
    x = builder.input("x", (4, 3), "f64")
    weight = builder.param("weight", torch.ones(5, 3, dtype=torch.float64))
    y = builder.call("aten.linear.default", x, weight)
    turned = builder.call("aten.t.default", y)
    loss = builder.call("aten.mean.default", y)
    updates = adamw(builder, [weight], backward(builder, loss, [weight]))
    graph = builder.finish([loss, y, turned], updates=updates)
    step = as_step(graph, 2)
    _, y_id, turned_id = step.graph.outputs
    assert step.dims == {step.graph.inputs[0]: 0, y_id: 0, turned_id: 1}


def test_a_step_with_two_backwards_is_refused():
    builder = Builder("step")
    x = builder.input("x", (4, 3), "f64")
    weight = builder.param("weight", torch.ones(2, 3, dtype=torch.float64))
    loss = builder.call("aten.mean.default", builder.call("aten.linear.default", x, weight))
    backward(builder, loss, [weight])
    backward(builder, loss, [weight])
    with pytest.raises(PlanError, match=r"calls backward 2 times; .* plan\(…, microbatches=n\)"):
        as_step(builder.finish([loss]), 1)


def test_the_forward_view_has_what_a_model_has():
    graph = image_step()
    view = forward_view(graph)
    assert view.nodes == forward_nodes(graph)
    inside = {node.id for node in view.nodes}
    assert all(inside.issuperset(value.users) for value in view.values.values())
    assert len(view.updates) == 2
    assert view.outputs == graph.outputs
