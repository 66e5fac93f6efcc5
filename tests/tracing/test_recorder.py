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


def text(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> str:
    return f"{loss:.3f}"


def branch(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    if loss > 3:
        loss.backward()


def rate(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.param_groups[0]["lr"] = 1.0


def decay(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.param_groups[0]["weight_decay"] = 0.5


def optimizer_made_inside(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    torch.optim.SGD(model.parameters()).step()


def norm_must_be_finite(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def own_error(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    raise ValueError("out of cheese")


def write_with_gradient(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    model[0].weight.detach().mul_(loss)


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda m, o, loss: loss.backward(create_graph=True), "differentiates twice"),
    (lambda m, o, loss: torch.autograd.grad(loss, m[0].weight), r"use backward\(\)"),
    (lambda m, o, loss: m[0].weight.register_hook(torch.neg), "change p.grad"),
    (lambda m, o, loss: loss.retain_grad(), "make the tensor an nn.Parameter"),
    (lambda m, o, loss: (loss.backward(), loss.item()), "return the tensor from the step"),
    (lambda m, o, loss: print(float(loss.detach())), "return the tensor from the step"),
    (text, "return the tensor from the step"),
    (branch, "branches on the contents"),
    (rate, "sets the learning rate of 'optimizer'"),
    (decay, r"sets 'weight_decay' of parameter group 0 of 'optimizer' from 0.* to 0.5"),
    (lambda m, o, loss: torch.ones(()).backward(), "does not depend on a parameter"),
    (lambda m, o, loss: (loss * torch.ones(2)).backward(), r"of shape \[2\]"),
    (lambda m, o, loss: (loss * torch.ones((), requires_grad=True)).backward(), "is no parameter"),
    (lambda m, o, loss: torch.autograd.backward([loss, loss * 2]), "add the losses up"),
    (optimizer_made_inside, "calls a SGD"),
    (norm_must_be_finite, "leave it out"),
    (lambda m, o, loss: nn.utils.clip_grad_norm_([X], 1.0), "closes over no such parameter"),
    (own_error, r"ValueError: out of cheese"),
    (write_with_gradient, "no_grad"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_refusals_name_the_line(body: Callable[..., Any], message: str) -> None:
    found = refusal(step_of(body))
    assert re.search(message, found)
    where = re.match(rf"{re.escape(__file__)}:(\d+) `", found)
    assert where is not None
    named = body if body not in (rate, decay) else step_of
    first = named.__code__.co_firstlineno
    assert 0 <= int(where[1]) - first < (1 if body.__name__ == "<lambda>" else 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups[0].update(lr=0.5), "sets the learning rate of 'optimizer'"),
        (lambda groups: groups[0].update(momentum=0.5), "sets 'momentum' .* from 0 to 0.5"),
        (lambda groups: groups.append({**groups[0]}), "adds parameter groups to 'optimizer'"),
    ],
)
def test_options_set_behind_the_update(change: Callable[..., Any], message: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        change(optimizer.param_groups)

    assert re.search(message, refusal(step))


@pytest.mark.parametrize("cycles", [True, False])
def test_a_momentum_that_a_scheduler_in_the_step_cycles(cycles: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=9, cycle_momentum=cycles
    )

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        scheduler.step()

    message = r"OneCycleLR moves betas\[0\] .* make the scheduler with cycle_momentum=False"
    with pytest.warns(CaptureWarning, match=message) if cycles else contextlib.nullcontext():
        compile_ir(step, X)


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


def stepping(make: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A step with an optimizer, and with what is made of it called between."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), **options)
    between = make(model, optimizer)

    def step(x: torch.Tensor) -> None:
        loss = model(x).sum()
        loss.backward()
        if callable(between):
            between(loss)
        optimizer.step()

    return step


def hooked_optimizer(model: nn.Module, optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


def plateau(model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return lambda loss: scheduler.step(loss)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda *_: None, {"momentum": 0.9, "dampening": 0.5}, "no momentum yet"),
        (lambda *_: None, {"differentiable": True}, "differentiable=True"),
        (hooked_optimizer, {}, "step hooks"),
        (plateau, {}, "between the steps"),
    ],
)
def test_optimizers_and_schedulers_that_a_graph_cannot_hold(
    make: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    assert message in refusal(stepping(make, **options))


def test_a_grad_scaler() -> None:
    model = nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor) -> None:
        scaler.scale(model(x).sum()).backward()

    assert re.search("GradScaler 'scaler'.*bfloat16", refusal(step))


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
