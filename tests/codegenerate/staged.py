"""Models cut in stages by hand, with the configurations that a generated file would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Configuration = dict[str | int, Any]
PATIENCE = 30.0
"""Seconds that a stage waits for another one, where tests let them meet."""


class Stage(nn.Module):
    """Some of a model's children under their names, and a forward in place of the model's."""

    def __init__(
        self, children: dict[str, nn.Module], compute: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.compute = compute

    def forward(self, *inputs: Tensor) -> Any:
        if self.compute is not None:
            return self.compute(self, *inputs)
        (x,) = inputs
        for child in self.children():
            x = child(x)
        return x


def configured(
    stages: Sequence[tuple[Sequence[str], Sequence[str], nn.Module]],
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("output",),
) -> Configuration:
    """A configuration of stages given as inputs, outputs and module."""
    made: Configuration = {"model inputs": list(inputs), "model outputs": list(outputs)}
    for number, (taken, given, module) in enumerate(stages):
        made[number] = {"inputs": list(taken), "outputs": list(given), "model": module}
    return made


def chain(model: nn.Sequential, *cuts: int) -> Configuration:
    """A Sequential in stages that end before these children."""
    children = list(model.named_children())
    ends = [0, *cuts, len(children)]
    stages = []
    for number, (start, end) in enumerate(pairwise(ends)):
        taken = "x" if number == 0 else f"boundary{number}"
        given = "output" if number == len(cuts) else f"boundary{number + 1}"
        stages.append(([taken], [given], Stage(dict(children[start:end]))))
    return configured(stages)


def perceptron(
    layers: int = 4, width: int = 6, dtype: torch.dtype = torch.float64
) -> nn.Sequential:
    """Linear layers with a tanh behind each."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for _ in range(layers):
        made += [nn.Linear(width, width, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*made)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's gradients by name, which are then cleared."""
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def assert_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    """The same tensors, up to a rounding of the largest number."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name


class Meeting(torch.autograd.Function):
    """An identity that calls back in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.backward = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.backward()
        return gradient, None, None


def met(model: nn.Sequential, before: Any, after: Any) -> Configuration:
    """A model in two stages, each of which reports (stage, row) of each microbatch."""
    children = list(model.named_children())

    def computing(number: int) -> Any:
        def compute(stage: nn.Module, x: Tensor, rows: Tensor) -> Any:
            place = number, int(rows[0])
            x = Meeting.apply(x, lambda: before(*place), lambda: after(*place))
            for child in stage.children():
                x = child(x)
            return (x, rows.clone()) if number == 0 else x

        return compute

    half = len(children) // 2
    return configured(
        [
            (["x", "rows"], ["y", "rows1"], Stage(dict(children[:half]), computing(0))),
            (["y", "rows1"], ["output"], Stage(dict(children[half:]), computing(1))),
        ],
        inputs=["x", "rows"],
    )


def nothing(*place: int) -> None:
    """What a stage does that need not report."""
