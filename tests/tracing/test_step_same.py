"""Captured steps give the same bits as eager ones, step after step, and leave the caller alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.errors import CaptureError
from shardwright.tracing import compile_ir
from tests.tracing.stepping import assert_same_steps


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int = 3, rows: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(count)
    ]


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), eps=1e-6),
    "maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True, amsgrad=True),
    "tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, dtype=torch.float64)),
}


WARM = ("sgd", "nesterov", "amsgrad", "adamw")
"""Those whose state is tried with contents, too."""


@pytest.mark.parametrize(
    ("name", "warm"), [(name, False) for name in OPTIMIZERS] + [(name, True) for name in WARM]
)
def test_optimizers(name: str, warm: bool) -> None:
    def make() -> Callable[..., Any]:
        model = mlp()
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        if warm:
            step(*batches()[0])
        return step

    assert_same_steps(make, batches())


def step_on(
    model: nn.Module, body: Callable[..., Any], optimizer: Any = None
) -> Callable[..., torch.Tensor]:
    """A step that zeroes, computes a loss, leaves the rest to ``body``, and updates."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = body(model, x, y)
        optimizer.step()
        return loss

    return step


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


# --- gradients before the step ---------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["first", "last", "never"])
def test_gradients_that_exist_before_the_step(where: str, set_to_none: bool) -> None:
    def make() -> Callable[..., Any]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if where == "first":
                optimizer.zero_grad(set_to_none)
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            if where == "last":
                model.zero_grad(set_to_none)
            return loss

        return step

    graph = assert_same_steps(make, batches())
    state = {value.names[0] for value in graph.stored() if value.role == "state"}
    assert ("grad.0.weight" in state) == (where != "first")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_without_part_in_the_loss_has_zeros_or_nothing(set_to_none: bool) -> None:
    def make() -> Callable[..., Any]:
        model = mlp()
        model.register_parameter("unused", nn.Parameter(torch.ones(2)))
        model.unused.grad = torch.ones(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none)
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    graph = assert_same_steps(make, batches())
    (update,) = (node for node in graph.nodes if node.op == "adamw_step")
    assert ("unused" in update.attrs["parameters"]) == (not set_to_none)


def test_a_step_that_never_clears_its_gradients_adds_them_up() -> None:
    def make() -> Callable[..., Any]:
        model = mlp()

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        return step

    graph = assert_same_steps(make, batches())
    gradients = [value for value in graph.stored() if value.names[0].startswith("grad.")]
    assert {value.init for value in gradients} == {"zeros"}
    assert {value.id for value in gradients} <= graph.updates.keys()


# --- what steps do between backward and update -----------------------------------------------


def accumulated(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for part, label in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = loss_of(model, part, label) / 2
        loss.backward()
        total += loss.detach()
    return total


def clipped(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = loss_of(model, x, y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), clip_value=0.01)
    return {"loss": loss, "norm": norm, "after": nn.utils.clip_grad_norm_(model[0].weight, 1, 1)}


def rescaled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = loss_of(model, x, y)
    (loss * 8).backward()
    before = model[0].weight.grad.norm()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(8)
        model[3].bias.grad = model[3].bias.grad * 2
    return loss, before, model[0].weight.grad.norm()


def with_gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y, reduction="none")
    loss.backward(torch.full_like(loss, 0.25), retain_graph=True)
    loss.sum().backward()
    return loss


def by_a_function(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y, reduction="none")
    loss.backward(torch.full_like(loss, 0.25), retain_graph=True)
    torch.autograd.backward(loss.sum())
    return loss


def some_of_them(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x, y)
    loss.backward(inputs=[model[0].weight, model[3].bias])
    return loss


def without_gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model(x).softmax(-1)
    hidden = model[0](x)
    scale = hidden.detach().abs().mean()
    loss = (model[3](torch.relu(hidden)) / scale - target).square().mean()
    loss.backward()
    return loss


def in_bfloat16(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, x, y)
    loss.backward()
    return loss


def in_evaluation(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model.train()
    loss = loss_of(model, x, y)
    loss.backward()
    model.eval()
    return torch.stack([loss, loss_of(model, x, y)])


BODIES = [
    accumulated,
    clipped,
    rescaled,
    with_gradient,
    some_of_them,
    without_gradient,
    in_bfloat16,
    in_evaluation,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_bodies(body: Callable[..., Any]) -> None:
    assert_same_steps(lambda: step_on(mlp(), body), batches())


def test_a_backward_by_a_function_is_recorded_where_torch_shows_it() -> None:
    if "handle_torch_function" in torch.autograd.backward.__code__.co_names:  # not in 2.9
        assert_same_steps(lambda: step_on(mlp(), by_a_function), batches())
    else:
        with pytest.raises(CaptureError, match=r"torch\.autograd\.backward\(.*loss\.backward\(\)"):
            compile_ir(step_on(mlp(), by_a_function), *batches()[0])


# --- parameters and optimizers ---------------------------------------------------------------


def test_groups_of_parameters_have_rates_of_their_own() -> None:
    def make() -> Callable[..., Any]:
        model = mlp()
        groups = [
            {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.0},
            {"params": [*model[1].parameters(), *model[3].parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        step = step_on(model, backward, optimizer)

        def scheduled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = step(x, y)
            scheduler.step()
            return loss

        return scheduled

    graph = assert_same_steps(make, batches())
    assert [graph.values[value_id].name for value_id in graph.inputs] == ["x", "y", "lr", "lr_1"]


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x, y)
    loss.backward()
    return loss


def test_two_models_with_optimizers_of_their_own() -> None:
    def make() -> Callable[..., Any]:
        torch.manual_seed(0)
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        first = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5)
        second = torch.optim.Adam(generator.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            first.zero_grad()
            made = generator(x)
            worse = (critic(made.detach()) - critic(x)).mean()
            worse.backward()
            first.step()
            second.zero_grad()
            better = -critic(made).mean()  # of the critic as it is now
            better.backward()
            second.step()
            return worse, better

        return step

    graph = assert_same_steps(make, batches())
    names = [value.names[0] for value in graph.stored() if value.role == "param"]
    assert sorted(names) == ["critic.bias", "critic.weight", "generator.bias", "generator.weight"]


def test_tied_and_frozen_parameters() -> None:
    def make() -> Callable[..., Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
        model[2].weight = model[0].weight
        model[3].weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return step_on(model, backward, optimizer)

    graph = assert_same_steps(make, batches())
    tied = next(value for value in graph.stored() if value.names[0] == "0.weight")
    assert tied.names == ("0.weight", "2.weight")
    (marker,) = (node for node in graph.nodes if node.op == "Backward")
    assert marker.attrs["parameters"] == ["0.weight", "0.bias", "2.bias", "3.bias"]


def test_dampening_is_exact_once_there_is_momentum() -> None:
    def make() -> Callable[..., Any]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        step = step_on(model, backward, optimizer)
        step(*batches()[0])
        return step

    assert_same_steps(make, batches())


def test_parameters_that_stand_alone() -> None:
    def make() -> Callable[..., Any]:
        weights = [torch.full((4, 3), 0.1, requires_grad=True), nn.Parameter(torch.zeros(3))]
        table = torch.linspace(0, 1, 3)
        optimizer = torch.optim.SGD(weights, lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for weight in weights:
                weight.grad = None
            loss = F.cross_entropy(x @ weights[0] + weights[1] * table, y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    graph = assert_same_steps(make, batches())
    stored = {value.names[0]: value.role for value in graph.stored()}
    assert stored == {"weights_0": "param", "weights_1": "param", "table": "constant"}


def test_a_closure_is_run_by_the_optimizer() -> None:
    def make() -> Callable[..., Any]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                return backward(model, x, y)

            return optimizer.step(closure)

        return step

    assert_same_steps(make, batches())


# --- parameters that the step writes to itself -----------------------------------------------


def test_updates_written_by_hand() -> None:
    def make() -> Callable[..., Any]:
        model = mlp()

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, x, y)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            model[0].weight.data.mul_(0.9)
            return loss

        return step

    graph = assert_same_steps(make, batches())
    parameters = {value.id for value in graph.stored() if value.role == "param"}
    assert parameters <= graph.updates.keys()


def test_an_average_of_the_model() -> None:
    def make() -> Callable[..., Any]:
        model, average = mlp(), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = step_on(model, backward, optimizer)

        def averaged(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = step(x, y)
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.5)
                for mean, buffer in zip(average.buffers(), model.buffers(), strict=True):
                    mean.copy_(buffer)
            return loss

        return averaged

    assert_same_steps(make, batches())
