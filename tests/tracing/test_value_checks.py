"""Branches on contents: those that only raise are left out, and said so; others are refused."""

import linecache
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.ir.values import Source
from shardwright.tracing import CaptureWarning, capture, compile_ir
from shardwright.tracing.export import harmless_answer
from tests.tracing.equality import Module


def raises_at_once(m: Any, x: Any) -> Any:
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    return x * 2


def raises_with_a_message(m: Any, x: Any) -> Any:
    if x.max() > 1e9 or x.min().item() < -1e9:
        where = "out of range"
        raise ValueError(where)
    return x * 2


def asserts(m: Any, x: Any) -> Any:
    assert (x.abs() < 1e9).all() and x.sum() < 1e9, "out of range"  # noqa: PT018
    return x * 2


def raises_in_the_other_branch(m: Any, x: Any) -> Any:
    if torch.isfinite(x).all():
        x = x * 2
    else:
        raise ValueError("not finite")
    return x


def checks_by_torch(m: Any, x: Any) -> Any:
    torch._check_tensor_all(x.sum() > -1e9)
    return x * 2


def checks_a_number(m: Any, x: Any) -> Any:
    torch._check(x.sum().item() < 1e9)
    return x * 2


@pytest.mark.parametrize(
    "function",
    [
        raises_at_once,
        raises_with_a_message,
        asserts,
        raises_in_the_other_branch,
        checks_by_torch,
        checks_a_number,
    ],
    ids=lambda function: function.__name__,
)
def test_checks_are_left_out_with_a_warning(function: Any) -> None:
    x = torch.ones(2, 4)
    line = function.__code__.co_firstlineno + 1
    with pytest.warns(CaptureWarning, match=rf"test_value_checks.py:{line}.*without the check"):
        graph = capture(Module(function), (x,))
    assert [node.op for node in graph.nodes] == ["aten.mul.Tensor"]
    assert torch.equal(graph.run(x), x * 2)


def test_a_step_may_check_its_labels() -> None:
    model, loss_of = nn.Linear(4, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 3:
            raise ValueError("no such class")
        optimizer.zero_grad()
        loss: torch.Tensor = loss_of(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    with pytest.warns(CaptureWarning, match="labels.max"):
        graph = compile_ir(step, torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))
    assert [node.op for node in graph.nodes][-2:] == ["Backward", "sgd_step"]


def test_a_mask_of_a_transformer_may_be_a_causal_one() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).eval()
    x, mask = torch.randn(2, 4, 8), nn.Transformer.generate_square_subsequent_mask(4)
    graph = capture(model, (x, x), {"tgt_mask": mask, "src_mask": mask})
    for given in (mask, torch.zeros(4, 4)):
        masks = {"tgt_mask": given, "src_mask": given}
        torch.testing.assert_close(graph.run(x, x, **masks), model(x, x, **masks))


@pytest.mark.parametrize(
    ("statement", "answer"),
    [
        ("if a: raise E", False),
        ("if not a: raise E", True),
        ("if not (a and not not b): raise E", True),
        ("assert not a", False),
        ("if a:\n    x = 1\nelse: raise E", True),
        ("if a and not b: raise E", None),
        ("if a: x = 1", None),
        ("if a:\n    if b: return\n    raise E", None),
        ("while a: x = 1", None),
        ("x = a", None),
    ],
)
def test_an_answer_is_given_where_the_other_way_raises(statement: str, answer: bool | None) -> None:
    file = f"<value check {statement}>"
    text = f"def f(a, b, E):\n    {statement.replace(chr(10), chr(10) + '    ')}\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    assert harmless_answer(Source(file, 2)) is answer


def test_a_branch_of_which_both_ways_go_on_is_refused() -> None:
    def function(m: Any, x: Any) -> Any:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(CaptureError, match="branches on the contents"):
        capture(Module(function), (torch.ones(2, 4),))
