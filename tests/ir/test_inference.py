import pytest
import torch

from shardwright.errors import GraphError
from shardwright.ir import Builder, IRValue, inference
from shardwright.ir.inference import Inference
from shardwright.ir.operators import allow_namespace
from shardwright.ir.values import Input


def value_like(builder: Builder, tensor: torch.Tensor) -> IRValue:
    name = f"x{len(builder.graph.inputs)}"
    return builder.input(name, tensor.shape, "f32", strides=tensor.stride())


Q = torch.randn(2, 8, 4, 16).transpose(1, 2)
IMAGE = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
FILTER = torch.randn(4, 3, 3, 3)


@pytest.mark.parametrize(
    ("op", "tensors", "attributes"),
    [
        ("aten.scaled_dot_product_attention.default", (Q, Q, Q), ()),
        ("aten.conv2d.default", (IMAGE, FILTER), ()),
        ("aten.max_pool2d.default", (IMAGE,), ([2],)),
        ("aten.add.Tensor", (torch.randn(4, 5).t(), torch.randn(5, 4)), ()),
        ("aten.softmax.int", (torch.randn(4, 5, 3).transpose(0, 1),), (-1,)),
        ("aten.expand.default", (torch.randn(4, 1),), ([4, 5],)),
        ("aten.sum.default", (Q,), ()),
    ],
)
def test_shapes_and_strides_are_those_of_the_cpu(op, tensors, attributes):
    builder = Builder("g")
    made = builder.call(op, *(value_like(builder, tensor) for tensor in tensors), *attributes)
    graph = builder.finish(made)
    found = graph.values[graph.outputs[0]]
    expected = graph.run(*tensors)
    assert found.shape == tuple(expected.shape)
    assert found.strides == (None if expected.is_contiguous() else expected.stride())


def test_one_answer_serves_every_call_of_its_kind(monkeypatch):
    asked = []
    run = Inference._run
    monkeypatch.setattr(Inference, "_run", lambda *args: asked.append(args[1]) or run(*args))
    monkeypatch.setattr(inference, "_kept", {})
    for _ in range(2):
        builder = Builder("g")
        x = builder.input("x", (2, 2))
        for _ in range(3):
            x = builder.call("aten.add.Tensor", x, 1)
        assert len(asked) == 1
    x = builder.call("aten.add.Tensor", x, True)
    x = builder.call("aten.add.Tensor", builder.call("aten.t.default", x), 1)
    assert len(asked) == 4


def test_what_torch_chooses_by_is_asked_again():
    def made() -> str:
        builder = Builder("g")
        return builder.call("aten.mul.Tensor", builder.input("x", (2,), "i64"), 0.5).dtype

    assert made() == "f32"
    torch.set_default_dtype(torch.float64)
    try:
        assert made() == "f64"
    finally:
        torch.set_default_dtype(torch.float32)


def test_operators_of_users_are_asked_anew_for_every_graph():
    allow_namespace("inference_tests")
    widths: list[int] = []
    with torch.library._scoped_library("inference_tests", "DEF") as library:
        library.define("widened(Tensor x) -> Tensor")
        library.impl("widened", lambda x: x.new_empty(len(x), widths[-1]), "Meta")
        for width in (3, 4):
            widths.append(width)
            builder = Builder("g")
            made = builder.call("inference_tests.widened.default", builder.input("x", (2,)))
            assert made.shape == (2, width)


def test_settings_around_the_builder_do_not_matter():
    builder = Builder("g")
    x, weight = builder.input("x", (2, 3)), builder.input("w", (4, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert builder.call("aten.linear.default", x, weight).dtype == "f32"


def test_a_call_that_does_not_run_says_which():
    builder = Builder("g")
    x, y = builder.input("x", (2, 3)), builder.input("y", (4, 5))
    with pytest.raises(GraphError) as caught:
        builder.call("aten.add.Tensor", x, y)
    message = str(caught.value)
    assert message.startswith("aten.add.Tensor(%x f32[2, 3], %y f32[4, 5], alpha=1) does not run: ")


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("aten.nonzero.default", r"aten.nonzero.default\(%x f32\[2, 3\]\) does not run"),
        ("aten.equal.default", r"aten.equal.default\(%x f32.*does not run"),
        ("aten.sym_size.int", "sym_size.int.* returns 2; a graph holds operators that return tens"),
    ],
)
def test_results_that_are_no_tensors_of_a_known_shape(op: str, message: str):
    builder = Builder("g")
    x = builder.input("x", (2, 3))
    more = {"aten.equal.default": (x,), "aten.sym_size.int": (0,)}.get(op, ())
    with pytest.raises(GraphError, match=message):
        builder.call(op, x, *more)


def test_places_without_a_tensor_are_left_out():
    builder = Builder("g")
    x, weight = builder.input("x", (1, 2, 4)), builder.input("w", (2, 2, 1))
    like = ([1], [0], [1], False, [0], 1)
    mask = [False, True, False]
    made = builder.call("aten.convolution_backward.default", x, x, weight, None, *like, mask)
    assert [value and value.shape for value in made] == [None, (2, 2, 1), None]
    (node,) = builder.graph.nodes
    assert (node.outputs, node.absent) == ([made[1].id], (0, 2))
    assert node.results == [None, made[1].id, None]


def test_a_fused_step_takes_no_memory_to_be_told_what_it_makes() -> None:
    builder = Builder("step")
    huge = [builder.input(name, (10**6, 10**6)) for name in ("p", "g", "m", "v")]
    count, rate = builder.input("t", ()), builder.input("lr", ())
    lists = {
        key: [Input(place)]
        for place, key in enumerate(("self", "grads", "exp_avgs", "exp_avg_sqs"))
    }
    attrs = {
        **lists,
        "max_exp_avg_sqs": [],
        "state_steps": [Input(4)],
        "lr": Input(5),
        **{"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8},
        **{"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None},
    }
    made = Inference().outputs("aten._fused_adamw.tensor_lr", [*huge, count, rate], attrs)
    assert [tuple(tensor.shape) for tensor in made] == [(10**6, 10**6)] * 4
