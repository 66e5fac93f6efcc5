"""Cross entropy and its gradient in one piece each."""

from __future__ import annotations

import torch

from shardwright.compiler.passes.losses import fuse_losses
from shardwright.ir import Builder, IRGraph
from tests.compiler.passes.rewritten import calls, operators, rewritten

X, T, W = torch.randn(6, 5), torch.tensor([0, 4, -100, 2, 1, 1]), torch.rand(5) + 0.5
ONE = torch.tensor(1.0)


def training(*, weight: bool = False) -> IRGraph:
    """Loss and gradient as a recorded training step has them."""
    builder = Builder()
    x, t = builder.input("x", (6, 5)), builder.input("t", (6,), "i64")
    w = builder.constant("w", W) if weight else None
    one = builder.constant("one", ONE)
    log_probs = builder.call("aten._log_softmax.default", x, 1, False)
    loss, total = builder.call("aten.nll_loss_forward.default", log_probs, t, w, 2, -100)
    inner = builder.call("aten.nll_loss_backward.default", one, log_probs, t, w, 2, -100, total)
    name = "aten._log_softmax_backward_data.default"
    dx = builder.call(name, inner, log_probs, 1, torch.float32)
    return builder.finish([loss, dx])


def test_loss_and_gradient_are_one_call_each() -> None:
    after = rewritten(training(), fuse_losses, [X, T])
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
