"""Cross entropy and its gradient in one piece each, and as a mean where they are one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.compiler.passes.decompose import decompose
from shardwright.compiler.passes.losses import fuse_losses, mean_losses
from shardwright.ir import Builder, IRGraph, IRValue
from tests.compiler.passes.rewritten import calls, operators, rewritten

X, T, W = torch.randn(6, 5), torch.tensor([0, 4, -100, 2, 1, 1]), torch.rand(5) + 0.5
ONE = torch.tensor(1.0)


def training(
    *, weight: bool = False, divide: bool = True, ignore: int = -100, read: bool = False
) -> IRGraph:
    """Loss and gradient as a recorded training step has them."""
    builder = Builder()
    x, t = builder.input("x", (6, 5)), builder.input("t", (6,), "i64")
    w = builder.constant("w", W) if weight else None
    one = builder.constant("one", ONE)
    mask = builder.call("aten.ne.Scalar", t, ignore)
    count = builder.call("aten.sum.default", mask, dtype=torch.float32)
    log_probs = builder.call("aten._log_softmax.default", x, 1, False)
    loss, total = builder.call("aten.nll_loss_forward.default", log_probs, t, w, 2, -100)
    mean = builder.call("aten.div.Tensor", loss, count) if divide else loss
    seed = builder.call("aten.div.Tensor", one, count) if divide else one
    inner = builder.call("aten.nll_loss_backward.default", seed, log_probs, t, w, 2, -100, total)
    name = "aten._log_softmax_backward_data.default"
    dx = builder.call(name, inner, log_probs, 1, torch.float32)
    outputs: list[IRValue] = [mean, dx, *([loss] if read else [])]
    return builder.finish(outputs)


def test_loss_and_gradient_are_one_call_each() -> None:
    after = rewritten(training(divide=False), fuse_losses, [X, T])
    assert calls(after)[-2:] == [
        "cross_entropy(x, t, reduction=2, ignore=-100) -> nll_loss_forward, nll_loss_forward__1, "
        "_log_softmax",
        "cross_entropy_bwd(one, _log_softmax, t, nll_loss_forward__1, reduction=2, ignore=-100) "
        "-> _log_softmax_backward_data",
    ]


def test_weights_go_along() -> None:
    after = rewritten(training(weight=True), fuse_losses, [X, T])
    assert "cross_entropy" in operators(after)
    assert "cross_entropy_bwd" in operators(after)


def test_log_probabilities_that_are_read_before_stay() -> None:
    builder = Builder()
    x = builder.input("x", (6, 5))
    log_probs = builder.call("aten._log_softmax.default", x, 1, False)
    labels = builder.call("aten.argmax.default", log_probs, 1)
    loss, _ = builder.call("aten.nll_loss_forward.default", log_probs, labels, None, 1, -100)
    graph = builder.finish(loss)
    assert fuse_losses(graph) is graph


def test_other_dimensions_stay() -> None:
    builder = Builder()
    x, t = builder.input("x", (6, 5)), builder.input("t", (6,), "i64")
    log_probs = builder.call("aten._log_softmax.default", x, 0, False)
    loss, _ = builder.call("aten.nll_loss_forward.default", log_probs, t, None, 1, -100)
    graph = builder.finish(loss)
    assert fuse_losses(graph) is graph


def mean(graph: IRGraph) -> IRGraph:
    return mean_losses(fuse_losses(decompose(graph)))


def test_a_sum_divided_by_its_count_is_the_mean() -> None:
    after = rewritten(training(), mean, [X, T], tolerance=1e-6)
    assert calls(after) == [
        "cross_entropy(x, t, reduction=1, ignore=-100) -> div, nll_loss_forward__1, _log_softmax",
        "cross_entropy_bwd(one, _log_softmax, t, nll_loss_forward__1, reduction=1, ignore=-100) "
        "-> _log_softmax_backward_data",
    ]


@pytest.mark.parametrize("options", [{"weight": True}, {"ignore": 0}, {"read": True}])
def test_what_is_no_mean_stays(options: dict[str, Any]) -> None:
    after = rewritten(training(**options), mean, [X, T])
    assert operators(after).count("div") == 2
