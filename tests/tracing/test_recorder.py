"""What a step does that no graph can hold is refused with its line, and nothing is left changed."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import CaptureError
from shardwright.tracing import CaptureWarning, compile_ir
from tests.tracing.stepping import assert_unchanged, snapshot

X = torch.ones(4, 3)


def refusal(step: Callable[..., Any], *args: torch.Tensor) -> str:
    """The message with which a step is refused, after seeing that it was left alone."""
    before = snapshot(step)
    with pytest.raises(CaptureError) as caught:
        compile_ir(step, *(args or (X,)))
    assert_unchanged(before, snapshot(step))
    return str(caught.value)


def step_of(
    body: Callable[..., Any],
    make_optimizer: Callable[..., Any] = torch.optim.AdamW,
    model: nn.Module | None = None,
) -> Callable[..., Any]:
    """A step with warm gradients and state, a batch norm and a scheduler, around ``body``."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(X).sum().backward()
    optimizer.step()

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        result = body(model, optimizer, loss)
        optimizer.step()
        scheduler.step()
        return result

    return step


def second_derivative(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward(create_graph=True)


def gradient_by_function(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    torch.autograd.grad(loss, model[0].weight)


def hook(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * 2)


def retained(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.retain_grad()


def item(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> float:
    loss.backward()
    return loss.item()


def number(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    print(float(loss.detach()))


def text(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> str:
    return f"{loss:.3f}"


def branch(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    if loss > 3:
        loss.backward()


def rate(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.param_groups[0]["lr"] = 1.0


def no_parameter(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    torch.ones(()).backward()


def several_numbers(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    (loss * torch.ones(2)).backward()


def no_leaf_of_the_step(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    (loss * torch.ones((), requires_grad=True)).backward()


def several_losses(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    torch.autograd.backward([loss, loss * 2])


def optimizer_made_inside(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    torch.optim.SGD(model.parameters()).step()


def norm_must_be_finite(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def no_gradient_of_the_step(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    nn.utils.clip_grad_norm_([torch.ones(2)], 1.0)


def own_error(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    raise ValueError("out of cheese")


def write_with_gradient(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    model[0].weight.detach().mul_(loss)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (second_derivative, "differentiates twice"),
        (gradient_by_function, r"use backward\(\)"),
        (hook, "change p.grad"),
        (retained, "make the tensor an nn.Parameter"),
        (item, "return the tensor from the step"),
        (number, "return the tensor from the step"),
        (text, "return the tensor from the step"),
        (branch, "branches on the contents"),
        (rate, "sets the learning rate of 'optimizer'"),
        (no_parameter, "does not depend on a parameter"),
        (several_numbers, r"of shape \[2\]"),
        (no_leaf_of_the_step, "is no parameter"),
        (several_losses, "add the losses up"),
        (optimizer_made_inside, "calls a SGD"),
        (norm_must_be_finite, "leave it out"),
        (no_gradient_of_the_step, "closes over no such parameter"),
        (own_error, r"ValueError: out of cheese"),
        (write_with_gradient, "no_grad"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_refusals_name_the_line(body: Callable[..., Any], message: str) -> None:
    found = refusal(step_of(body))
    assert re.search(message, found)
    where = re.match(rf"{re.escape(__file__)}:(\d+) `", found)
    assert where is not None
    first = body.__code__.co_firstlineno if body is not rate else step_of.__code__.co_firstlineno
    assert first < int(where[1]) < first + 20


def plain(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


def test_optimizers_that_no_graph_knows() -> None:
    assert "SGD, Adam, AdamW" in refusal(step_of(plain, torch.optim.NAdam))


def test_an_optimizer_that_the_step_leaves_alone() -> None:
    model = nn.Linear(3, 1)
    optimizers = [torch.optim.NAdam(model.parameters()), torch.optim.SGD(model.parameters())]

    def step(x: torch.Tensor) -> None:
        optimizers[1].zero_grad()
        model(x).sum().backward()
        optimizers[1].step()

    assert [node.op for node in compile_ir(step, X).nodes][-1] == "sgd_step"


def test_dampening_of_a_momentum_that_is_not_there() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    assert "no momentum yet" in refusal(step)


def test_optimizers_with_hooks_or_derivatives() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), differentiable=True)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    assert "differentiable=True" in refusal(step)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    assert "step hooks" in refusal(step)


def test_a_grad_scaler() -> None:
    model = nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor) -> None:
        scaler.scale(model(x).sum()).backward()

    assert re.search("GradScaler 'scaler'.*bfloat16", refusal(step))


def test_a_scheduler_that_looks_at_the_loss() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def step(x: torch.Tensor) -> None:
        scheduler.step(model(x).sum())

    assert "between the steps" in refusal(step)


def test_hooks_on_gradients() -> None:
    model = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    handle = model.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(CaptureError, match="parameter 'weight' has hooks"):
        compile_ir(step, X)
    handle.remove()
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="model has backward hooks"):
        compile_ir(step, X)


def test_a_path_that_depends_on_whether_a_gradient_exists() -> None:
    model = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        model(x).sum().backward()

    assert "takes another path" in refusal(step)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert compile_ir(step, X).nodes


def test_an_input_that_would_get_a_gradient() -> None:
    model = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    assert "detach()" in refusal(step, torch.ones(4, 3, requires_grad=True))


@pytest.mark.parametrize("first", [False, True], ids=["never", "not in this call"])
def test_a_step_that_does_not_call_its_optimizer(first: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters())
    calls = [0]

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        if first:
            calls[0] += 1
            if calls[0] % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    expect = pytest.warns(CaptureWarning, match="'calls'") if first else contextlib.nullcontext()
    with expect:
        assert "holds the optimizer optimizer, but takes no step" in refusal(step)
    assert calls == [0]


def test_an_optimizers_step_without_any_gradient() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.step()
        model(x).sum().backward()

    assert "finds no gradient" in refusal(step)


def test_a_step_that_trains_nothing_is_not_trained() -> None:
    model = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    assert compile_ir(step, X).nodes
    with pytest.raises(CaptureError, match="changes no parameter"):
        sw.train(step, [X], mesh={"data": 1}, epochs=1, in_process=True, quiet=True)


def mapped(p: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row * row.sum())(p)


def differentiated(p: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda q: (q**3).sum())(p) * p


def hooked(p: torch.Tensor) -> torch.Tensor:
    doubled = p * 2
    doubled.register_hook(lambda gradient: gradient * 5)
    return doubled


def quantile(p: torch.Tensor) -> torch.Tensor:
    return p.quantile(0.3)


def sparse(p: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(torch.tensor([0, 1]), p, sparse=True)


def conditional(p: torch.Tensor) -> torch.Tensor:
    return torch.cond(p.sum() > 0, lambda p: p * 2, lambda p: p * 3, (p,))


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (mapped, "write the batch dimension out"),
        (differentiated, "write the batch dimension out|use backward"),
        (hooked, "change p.grad"),
        (quantile, r"x\.sort\(\)"),
        (sparse, "leave sparse=True out"),
        (conditional, r"torch\.where"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_what_autograd_does_beyond_a_graph(
    function: Callable[[torch.Tensor], torch.Tensor], advice: str
) -> None:
    """One refusal each, with the line, and no warning of something else before it."""
    parameter = nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.SGD([parameter])

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        function(parameter).square().mean().backward()
        optimizer.step()

    message = refusal(step)
    line = function.__code__.co_firstlineno
    found = re.match(r".*test_recorder\.py:(\d+) ", message)
    assert found and line < int(found[1]) <= line + 2  # noqa: PT018
    assert re.search(advice, message)


def test_what_has_no_gradient_may_be_used_without_one() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: torch.Tensor) -> None:
        with torch.no_grad():
            middle = model(x).quantile(0.5)
        optimizer.zero_grad()
        (model(x) - middle + x.quantile(0.5)).sum().backward()
        optimizer.step()

    assert "aten.quantile.scalar" in {node.op for node in compile_ir(step, X).nodes}
