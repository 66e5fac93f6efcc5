"""Which values may lie in the same memory."""

from __future__ import annotations

import pytest

from shardwright.ir import Builder
from shardwright.ir.aliasing import may_return_an_argument, memory_roots

N = 3


def test_roots() -> None:
    builder = Builder("roots")
    x, y = builder.input("x", (N, N)), builder.input("y", (N, N))
    view = builder.call("aten.t.default", x)
    product = builder.call("aten.mm.default", view, y)
    flat = builder.call("aten._unsafe_view.default", product, [N * N])
    maybe = builder.call("aten.dropout.default", flat, 0.5, False)
    graph = builder.finish([maybe])
    names = {value_id: value.name for value_id, value in graph.values.items()}
    found = {
        names[value_id]: {names[root] for root in roots}
        for value_id, roots in memory_roots(graph).items()
    }
    product = {"mm"}
    assert found == {
        "x": {"x"}, "y": {"y"}, "t": {"x"}, "mm": product, "_unsafe_view": product,
        "dropout": product,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("op", "shares"),
    [
        ("aten.t.default", True),
        ("aten.reshape.default", True),
        ("aten._unsafe_view.default", True),
        ("aten.dropout.default", True),
        ("aten.add.Tensor", False),
        ("aten.clone.default", False),
        ("aten._foreach_add.List", False),
    ],
)
def test_operators_that_may_return_an_argument(op: str, shares: bool) -> None:
    assert may_return_an_argument(op) == shares
