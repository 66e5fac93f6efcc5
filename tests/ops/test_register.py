"""Operators of a user's own."""

import pytest
import torch

import shardwright as sw
from shardwright.errors import AnnotationError
from shardwright.ir import Builder, compile_graph, resolve
from shardwright.ops import dimop_of, register_op, registered
from tests.ops.splitting import check, gradients


@register_op("(h^ m^) kd+, kd+ n -> h^ m^ n", name="test_matmul")
def matmul(x: torch.Tensor, w: torch.Tensor, h: float = 2) -> torch.Tensor:
    out = torch.matmul(x, w)
    return out.view(h, out.size(0) // h, out.size(1))


@register_op("l e^, h+ e^, h+, e^ h+ -> l e^", name="testing::feed_forward")
def feed_forward(
    x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return torch.relu(x @ up.t() + bias) @ down.t()


@register_op("* k+, k+ n, n -> * n", name="test_biased")
def biased(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ w + bias


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_the_operator_computes_what_the_function_does():
    x, w = random(6, 4), random(4, 5)
    expected = (x @ w).reshape(3, 2, 5)
    assert torch.equal(matmul(x, w, 3), expected)
    assert torch.equal(matmul(x, w=w, h=3.0), expected)
    assert torch.equal(resolve("shardwright.test_matmul.default")(x, w, 3), expected)
    assert matmul.__name__ == "matmul"


def test_the_operator_is_differentiated_by_running_the_function_again():
    assert torch.autograd.gradcheck(lambda x, w: matmul(x, w, 2), (random(4, 3), random(3, 5)))
    assert torch.autograd.gradcheck(
        feed_forward, (random(2, 3), random(4, 3), random(4), random(3, 4))
    )


def test_the_operator_is_one_node_of_an_exported_graph():
    class Model(torch.nn.Module):
        def forward(self, x, w):
            return matmul(x, w, h=2) + 1

    exported = torch.export.export(Model(), (random(4, 3), random(3, 5)), strict=False)
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert called == ["shardwright.test_matmul.default", "aten.add.Tensor"]


def bound_call(op, tensors, *rest):
    builder = Builder("call")
    values = [builder.input(f"x{i}", t.shape, "f64") for i, t in enumerate(tensors)]
    graph = builder.finish([builder.call(op, *values, *rest)])
    outputs = compile_graph(graph)(tensors)
    return dimop_of(graph, graph.nodes[0]), tensors, outputs, gradients(outputs, tensors)


CALLS = {
    "matmul": ("shardwright.test_matmul.default", [(6, 7), (7, 5)], 2),
    "feed_forward": ("testing.feed_forward.default", [(3, 4), (7, 4), (7,), (4, 7)]),
    "biased": ("shardwright.test_biased.default", [(4, 3, 5), (5, 4), (4,)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_parts_of_a_registered_operator_join_to_the_whole(name):
    op, shapes, *rest = CALLS[name]
    bound, *whole = bound_call(op, [random(*shape) for shape in shapes], *rest)
    assert bound.source == "registered"
    for identifier in bound.identifiers:
        for num in (2, 3):
            check(bound, bound.split(identifier, num), *whole)


def test_trial_tells_terms_of_a_sum_from_what_its_parts_share():
    assert registered("shardwright.test_biased.default").dimop.terms == {2}
    assert registered("testing.feed_forward.default").dimop.shared == {0}
    assert registered("shardwright.test_biased.default").module == __name__


def test_a_length_that_is_split_is_changed_in_the_call():
    @register_op("(h t) k -> h t k", name="test_fold")
    def fold(x: torch.Tensor, h: int) -> torch.Tensor:
        return x.reshape(h, x.size(0) // h, x.size(1))

    bound, *whole = bound_call("shardwright.test_fold.default", [random(20, 3)], 5)
    parts = bound.partition(0, 0, 2)
    assert [part.attrs for part in parts] == [{"h": 3}, {"h": 2}]
    check(bound, parts, *whole)


def test_an_output_that_is_a_view_of_an_input_is_copied():
    @register_op("a b -> b a, a b, a b", name="test_views")
    def views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        twice = x * 2
        return x.t(), twice, twice.view(x.shape)

    x = random(3, 4)
    memories = {item.untyped_storage().data_ptr() for item in (x, *views(x))}
    assert len(memories) == 4


def test_a_backward_of_ones_own():
    @register_op("a -> a", name="test_own_backward", backward=lambda grads, x, factor: 3 * grads[0])
    def scaled(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    x = random(3)
    assert torch.autograd.grad(scaled(x).sum(), x)[0].tolist() == [3.0] * 3


def test_a_wrong_annotation_is_refused_with_the_counterexample():
    def softmax(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(1)

    with pytest.raises(AnnotationError) as caught:
        register_op("a b -> a b", name="test_wrong")(softmax)
    message = str(caught.value)
    assert caught.value.column == 3
    assert "the annotation does not hold: in 2 parts by 'b', output 0 at (" in message
    assert "write 'b^'" in message
    assert "Inputs: x = [" in message
    assert registered("shardwright.test_wrong.default") is None
    register_op("a b^ -> a b^", name="test_right")(softmax)


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ("a b -> b a", "output 0 has shape .*; the annotation says"),
        ("* -> *", "in 2 parts by '\\*'"),
        ("a+ b^ -> a+ b^, b^", "returns 1 tensors, but .* has 2 outputs"),
        ("a b, c -> a b", "takes 1 tensors \\(x\\), but .* has 2 inputs"),
        ("3 b^ -> 3 b^", "output 0|'3' is|does not run"),
    ],
)
def test_an_annotation_that_does_not_fit_the_function(annotation, message):
    def softmax(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(1) if x.size(0) != 3 else x[:2]

    with pytest.raises(AnnotationError, match=message):
        register_op(annotation, name="test_unfit")(softmax)


def test_a_part_that_does_not_run_is_a_counterexample():
    def even(x: torch.Tensor) -> torch.Tensor:
        if x.size(0) % 2:
            raise ValueError("odd")
        return x * 2

    with pytest.raises(AnnotationError, match="a part does not run: ValueError: odd"):
        register_op("a -> a", name="test_even", example=[torch.randn(4)])(even)


def test_an_example_is_asked_for_where_no_random_input_runs():
    def strict(x: torch.Tensor) -> torch.Tensor:
        if x.numel() < 50:
            raise ValueError("small")
        return x * 2

    def needs(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    with pytest.raises(AnnotationError, match=r"ValueError: small.*; give example="):
        register_op("a b^ -> a b^", name="test_strict")(strict)
    with pytest.raises(AnnotationError, match=r"factor has no default .* give example="):
        register_op("a -> a", name="test_needs")(needs)
    with pytest.raises(AnnotationError, match="the example's arguments, by name"):
        register_op("a -> a", name="test_needs", example={"y": 1})(needs)
    register_op("a -> a", name="test_needs", example={"x": torch.randn(4), "factor": 2})(needs)


def test_types_and_their_order_are_asked_for():
    def untyped(x):
        return x

    def turned(h: int, x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(AnnotationError, match="x, return without a type"):
        register_op("a -> a")(untyped)
    with pytest.raises(AnnotationError, match=r"h is no tensor, .* with \? .*: '\?, …'"):
        register_op("a -> a")(turned)


def test_a_number_before_a_tensor_has_a_question_mark():
    def middle(x: torch.Tensor, factor: float, y: torch.Tensor, power: int = 2) -> torch.Tensor:
        return x + factor * y**power

    def backward(grads, x, factor, y, power):
        return grads[0], grads[0] * factor * power * y ** (power - 1)

    for name, options in (("test_middle", {}), ("test_middle_own", {"backward": backward})):
        call = register_op("a b, ?, a b -> a b", name=name, **options)(middle)
        x, y = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
        assert torch.equal(call(x, 0.5, y), middle(x, 0.5, y))
        assert torch.autograd.gradcheck(lambda x, y, call=call: call(x, y=y, factor=3.0), (x, y))
        graph = sw.capture(Calls(call), (x, y))
        pipeline = sw.build(graph, sw.plan(graph, devices=2, policy="data"))
        assert torch.equal(sw.run(pipeline, x, y, in_process=True), middle(x, 2.0, y))


class Calls(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.call(x, 2.0, y)


@pytest.mark.parametrize("kind", ["optional", "list", "dict"])
def test_a_type_that_an_operator_cannot_have_is_named(kind: str):
    def optional(x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
        return x if w is None else x * w

    def many(xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(xs).sum(0)

    def table(x: torch.Tensor, given: dict = {}) -> torch.Tensor:  # noqa: B006
        return x * 2

    function, text = {
        "optional": (optional, r"w is a torch.Tensor \| None, which"),
        "list": (many, r"xs is a list\[torch.Tensor\], which"),
        "dict": (table, "of a type that an operator cannot have: .*dict"),
    }[kind]
    with pytest.raises(AnnotationError, match=text):
        register_op("a b -> a b", name=f"test_{kind}")(function)


def test_a_name_belongs_to_one_function():
    def one(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    register_op("a -> a", name="test_name")(one)
    register_op("a -> a", name="test_name")(one)
    with pytest.raises(AnnotationError, match=r"is registered already, by .*one of module"):
        register_op("a -> a", name="test_name")(other)
    with pytest.raises(AnnotationError, match="'a b' is no name of an operator"):
        register_op("a -> a", name="a b")(one)
    assert torch.equal(
        resolve("shardwright.test_name.default")(torch.ones(2)), torch.full((2,), 2.0)
    )
