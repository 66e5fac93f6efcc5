"""What texts depend on beside the call: brackets, the mode, the device, imports, time."""

from __future__ import annotations

import ast
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.codegenerate.spelling.forms import Mode
from shardwright.codegenerate.spelling.table import spell
from shardwright.codegenerate.writing.file import module_of
from shardwright.errors import GraphError
from shardwright.ir import DROPOUT, Builder, IRGraph, IRValue
from shardwright.ir.operators import is_random

EVAL = Mode(training=False)
X = "x"

INFIX = {
    "aten.add.Tensor": "+",
    "aten.sub.Tensor": "-",
    "aten.mul.Tensor": "*",
    "aten.div.Tensor": "/",
    "aten.matmul.default": "@",
    "aten.pow.Tensor_Tensor": "**",
    "aten.__and__.Tensor": "&",
    "aten.__or__.Tensor": "|",
    "aten.__lshift__.Tensor": "<<",
    "aten.lt.Tensor": "<",
    "aten.eq.Tensor": "==",
}
PREFIX = {"aten.neg.default": "-", "aten.bitwise_not.default": "~"}
LEAVES = st.sampled_from("abc")
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(INFIX)), inner, inner),
        st.tuples(st.sampled_from(sorted(PREFIX)), inner),
    ),
    max_leaves=8,
)


def nested(builder: Builder, tree: object, known: dict[int, str]) -> tuple[IRValue, str]:
    """Emits a tree; gives its value and the same as text with every bracket there can be."""
    if isinstance(tree, str):
        value = builder.input(tree, (2, 2))
        known[value.id] = tree
        return value, tree
    op, *parts = tree  # type: ignore[misc]
    made = [nested(builder, part, known) for part in parts]
    value = builder.value("v", (2, 2))
    attrs = {"alpha": 1} if op in ("aten.add.Tensor", "aten.sub.Tensor") else {}
    builder.emit(op, [operand for operand, _ in made], attrs, outputs=[value])
    known[value.id] = spell(builder.graph, builder.graph.nodes[-1], known, EVAL)
    texts = [f"({text})" for _, text in made]
    return value, PREFIX[op] + texts[0] if op in PREFIX else f" {INFIX[op]} ".join(texts)


@given(TREES)
def test_brackets_stand_where_they_are_needed(tree: object) -> None:
    known: dict[int, str] = {}
    value, bracketed = nested(Builder("tree"), tree, known)
    found = ast.dump(ast.parse(known[value.id], mode="eval"))
    assert found == ast.dump(ast.parse(bracketed, mode="eval"))


def one(op: str, *args: object, **kwargs: object) -> IRGraph:
    builder = Builder("one")
    given_ = [builder.input("x", item, "f32") if isinstance(item, tuple) else item for item in args]
    return builder.finish(builder.call(op, *given_, **kwargs))


def text(graph: IRGraph, mode: Mode, *operands: str) -> str:
    return spell(graph, graph.nodes[0], dict(zip(graph.inputs, operands, strict=True)), mode)


def test_a_method_of_a_sum_brackets_it() -> None:
    graph = one("aten.view.default", (2, 3), [6])
    assert text(graph, EVAL, "x + y") == "(x + y).view(6)"


def test_flags_follow_the_mode_of_a_module_only_where_they_are_the_modes() -> None:
    graph = one("aten.dropout.default", (2, 3), 0.1, True)
    assert text(graph, Mode(training=True), X) == "F.dropout(x, 0.1, training=self.training)"
    assert text(graph, Mode(training=True, in_module=False), X) == "F.dropout(x, 0.1)"
    assert text(graph, EVAL, X) == "F.dropout(x, 0.1)"
    off = one("aten.dropout.default", (2, 3), 0.1, False)
    assert text(off, Mode(training=True), X) == "F.dropout(x, 0.1, training=False)"


def test_a_device_is_an_operands_where_that_is_named() -> None:
    graph = one("aten.new_zeros.default", (2, 3), [2], device="cpu", pin_memory=False)
    there = Mode(training=False, device="ids.device")
    assert text(graph, there, "h.w") == "h.w.new_zeros(2, device=h.w.device)"
    assert text(graph, there, "f(x)") == "f(x).new_zeros(2, device=ids.device)"


def test_a_device_that_nobody_names_is_left_to_torch() -> None:
    graph = one("aten.arange.default", 5, pin_memory=False)
    assert text(graph, EVAL) == "torch.arange(5)"


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        ("aten.dropout.default", ((2,), 0.1, True), True),
        ("aten.dropout.default", ((2,), 0.1, False), False),
        ("aten.dropout.default", ((2,), 0.0, True), False),
        ("aten.bernoulli.p", ((2,), 0.0), True),
        ("aten.rand_like.default", ((2,),), True),
        ("aten.relu.default", ((2,),), False),
        ("aten.scaled_dot_product_attention.default", ((1, 2, 4),) * 3, False),
        ("aten.scaled_dot_product_attention.default", (*((1, 2, 4),) * 3, None, 0.1), True),
    ],
)
def test_randomness(op: str, args: tuple[object, ...], expected: bool) -> None:
    (node,) = one(op, *args).nodes
    assert is_random(node) is expected
    assert is_random(node, in_training=True) is (expected or args[1:] == (0.1, False))


def test_markers_have_no_text() -> None:
    builder = Builder("step")
    x = builder.input("x", (2,))
    builder.emit("Backward", [x])
    with pytest.raises(GraphError, match="marker"):
        spell(builder.graph, builder.graph.nodes[0], {x.id: X}, EVAL)


def test_modules_of_operators() -> None:
    @torch.library.custom_op("spelling_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert module_of("spelling_test.twice.default") == __name__
    assert module_of("aten.add.Tensor") is None
    assert module_of(DROPOUT) == "shardwright.ir.dropout"
    assert module_of("nowhere_known.at_all.default") == ""


def test_thousands_of_calls_take_less_than_a_second() -> None:
    builder = Builder("deep")
    x, weight = builder.input("x", (4, 8)), builder.input("w", (8, 8))
    for _ in range(1000):
        x = builder.call("aten.linear.default", x, weight)
        x = builder.call("aten.add.Tensor", x, x)
        x = builder.call("aten.view.default", x, [4, 8])
    graph = builder.finish(x)
    names = dict.fromkeys(graph.values, "x")
    start = time.process_time()
    for node in graph.nodes:
        spell(graph, node, names, EVAL)
    assert time.process_time() - start < 1
