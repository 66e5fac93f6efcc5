"""Autocast regions: the same results and gradients, with every cast a node."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardwright.ir.operators import split_call
from shardwright.tracing.autocast import autocast_casts, has_autocast_rule
from tests.tracing.equality import Module, assert_same, captured, operators


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def test_autocast_is_written_as_casts(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.linear(x)
            z = F.mse_loss(y, y.t().reshape(3, 4)) + torch.einsum("ij,kj->ik", x, x).sum()
            with torch.autocast("cpu", enabled=False):
                z = z + (x @ x.t()).sum()
            w = torch.cat([x, y])
        return y, z, w, m.linear(x)

    graph = assert_same(function, x)
    assert operators(graph)[:4] == ["to", "to", "to", "linear"]


def test_a_value_is_cast_once(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.linear(m.linear(x))

    assert operators(assert_same(function, x)).count("to") == 3


def test_autocast_around_capture(x: torch.Tensor) -> None:
    model = Module(lambda m, x: m.linear(x).softmax(-1) @ x.t())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = captured(model.function, x)
        expected = model(x)
    assert torch.equal(graph.run(x), expected)


def test_autocast_for_another_device_does_nothing(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.autocast("cuda", enabled=False):
            return m.linear(x)

    assert operators(assert_same(function, x)) == ["linear"]


def test_autocast_and_no_grad_nest(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = m.linear(x)
            z.add_(1)
            with torch.no_grad():
                w = m.linear(x)
        return y + z + w

    assert_same(function, x)


# --- autocast's treatment of operators, found by running them -------------------------------------


aten = torch.ops.aten
X, HALF = torch.randn(4, 4), torch.randn(4, 4).bfloat16()
SDPA = aten.scaled_dot_product_attention.default
LOW, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.linear.default, (X, X), (LOW, LOW)),
        (aten.linear.default, (HALF, X, X[0]), (None, LOW, LOW)),
        (aten.matmul.default, (HALF, HALF), (None, None)),
        (aten.mse_loss.default, (HALF, HALF), (FULL, FULL)),
        (aten.cat.default, ([X, HALF],), (None, FULL)),
        (aten.cat.default, ([HALF, HALF],), (None, None)),
        (aten.add.Tensor, (X, HALF), (None, None)),
        (aten.einsum.default, ("ij,jk->ik", [X, X]), (LOW, LOW)),
        (aten.einsum.default, ("ij->ji", [X]), (None,)),
        (aten.where.self, (X > 0, X, HALF), (None, None, None)),
        (aten.embedding.default, (X, torch.tensor([1])), (None, None)),
        (SDPA, (X[None, None], X[None, None], HALF[None, None]), (LOW, LOW, None)),
    ],
)
def test_casts(op: Any, args: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    tensors, attrs = split_call(op, args, {})
    assert autocast_casts(op, tensors, attrs, "cpu", LOW) == expected


def test_casts_give_what_autocast_gives() -> None:
    for op, args in (
        (aten.linear.default, [X, X]),
        (aten.baddbmm.default, [X[None], X[None], X[None]]),
        (aten.scaled_dot_product_attention.default, [X[None, None]] * 3),
        (aten.prod.default, [HALF]),
        (aten.binary_cross_entropy_with_logits.default, [HALF, HALF]),
    ):
        casts = autocast_casts(op, args, split_call(op, args, {})[1], "cpu", LOW)
        cast = [x if d is None else x.to(d) for x, d in zip(args, casts, strict=True)]
        with torch.autocast("cpu", dtype=LOW):
            expected = op(*args)
        assert torch.equal(op(*cast), expected)
        assert op(*cast).dtype == expected.dtype


def test_rules_are_found_by_device() -> None:
    assert has_autocast_rule(aten.linear.default, "cpu")
    assert has_autocast_rule(aten.layer_norm.default, "cuda")
    assert not has_autocast_rule(aten.add.Tensor, "cpu")


def test_attention_of_rotated_queries_is_captured() -> None:
    """Rotary embeddings leave queries and keys in f32, and values as autocast made them."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=LOW):
            q, k, v = (m.linear(x).view(1, 4, 2, 2).transpose(1, 2) for _ in range(3))
            angles = torch.ones(2)
            made: torch.Tensor = aten.scaled_dot_product_attention(q * angles, k * angles, v)
            return made

    assert_same(function, X[None])
