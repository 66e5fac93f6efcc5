"""Models with int8 weights: compiled, in files, lowered; tensors that hold several are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import shardwright as sw
from shardwright.errors import CaptureError
from tests.compiler.steps import assert_close


class Int8(nn.Module):
    """A linear layer of int8 weights, with a scale a row."""

    q: Tensor
    scale: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs) / inputs**0.5
        scale = weight.abs().amax(1) / 127
        self.register_buffer("q", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.q.to(x.dtype) * self.scale[:, None])


class Packed(Int8):
    """By torch's product of floats and int8."""

    def forward(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.bfloat16(), self.q, self.scale.bfloat16()).float()


class Dynamic(Int8):
    """By torch's product of int8, the input quantized as it comes."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        made = torch._int_mm((x / scale).round().to(torch.int8), self.q.t())
        return made.to(x.dtype) * scale * self.scale


@pytest.mark.parametrize("layer", [Int8, Packed, Dynamic])
def test_int8_weights_go_every_way(layer: type[Int8]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(layer(32, 32), nn.ReLU(), layer(32, 16)).eval(), torch.randn(32, 32)
    run = sw.compile(model, x)
    assert_close(run(x), model(x), 1e-5)
    graph = sw.capture(model, (x,))
    pipeline = sw.build(graph, sw.plan(graph, devices=2))
    assert sw.verify(pipeline, model, (x,)).equal
    assert sw.verify(sw.lower(pipeline), model, (x,), tolerance=1e-5).equal
    first = model[0]
    assert isinstance(first, Int8)
    first.q.neg_()
    assert_close(run(x), model(x), 1e-5)


class Quantized(torch.Tensor):
    """A tensor that holds two, as torchao makes of weights."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.linear:
            x, weight, *rest = args
            return F.linear(x, weight.q.to(x.dtype) * weight.scale[:, None], *rest)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].q.detach(), args[0].scale.detach())
        raise NotImplementedError(function)


class Unwrapped(Quantized):
    """One that can be made anew of what it holds."""

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: None, shape: Any, strides: Any
    ) -> Unwrapped:
        return Unwrapped(inner["q"], inner["scale"])


class Wrapped(nn.Module):
    """What makes the tensor of its two parameters at each call, as torchao unwraps it."""

    def forward(self, q: Tensor, scale: Tensor) -> Tensor:
        return Quantized(q, scale)

    def right_inverse(self, weight: Quantized) -> tuple[Tensor, Tensor]:
        return weight.q, weight.scale


def test_weights_that_hold_several_tensors_are_unwrapped_first() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    layer = model[0]
    made = Int8(8, 8)
    layer.weight = nn.Parameter(Quantized(made.q, made.scale), requires_grad=False)
    expected = model(x).detach()
    with pytest.raises(CaptureError, match=r"0\.weight is a Quantized.*unwrap_tensor_subclass"):
        sw.compile(model, x)
    parametrize.register_parametrization(layer, "weight", Wrapped())
    assert_close(sw.compile(model, x)(x), expected, 1e-5)


def test_weights_that_hold_several_tensors_are_captured_as_these(tmp_path: Path) -> None:
    """The model keeps them, and a file is run by processes that know nothing of their class."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    for layer in (model[0], model[2]):
        made = Int8(8, 8)
        layer.weight = nn.Parameter(Unwrapped(made.q, made.scale), requires_grad=False)
    kept = model[0].weight
    expected = model(x).detach()
    graph = sw.capture(model, (x,))
    assert model[0].weight is kept
    stored = {value.name: value.dtype for value in graph.stored()}
    assert (stored["0.weight.q"], stored["0.weight.scale"]) == ("i8", "f32")
    run = sw.compile(model, x)
    assert_close(run(x), expected, 1e-5)
    pipeline = sw.build(graph, sw.plan(graph, devices=2))
    assert sw.verify(pipeline, model, (x,)).equal
    pipeline.save(tmp_path / "a.json")
    assert torch.equal(sw.run(tmp_path / "a.json", x, in_process=True), expected)
    kept.q.neg_()
    assert_close(run(x), model(x), 1e-5)


def test_a_step_says_that_it_takes_no_such_weights() -> None:
    model, made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Int8(8, 8)
    model[0].weight = nn.Parameter(Unwrapped(made.q, made.scale), requires_grad=False)
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    with pytest.raises(CaptureError, match=r"0\.weight is a Unwrapped.*step of training"):
        sw.compile_ir(step, torch.randn(4, 8))
