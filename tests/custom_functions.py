"""Modules with a ``torch.autograd.Function`` each, whose backward is not its forward's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Rows = tuple[int, ...]


class Round(Function):
    """Straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Reverse(Function):
    """Gradient reversal; what it takes it returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.factor * gradient, None


class Scale(Function):
    """Gradient scaling, with a ``setup_context`` and a default."""

    @staticmethod
    def forward(x: torch.Tensor, by: float = 0.25) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.by, None


class Clip(Function):
    """Clips each element of the gradient, in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, most: float) -> torch.Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        kept = gradient.clone()
        kept.clamp_(-ctx.most, ctx.most)
        return kept, None


class Norm(Function):
    """Limits the norm of the whole gradient, so that no row of it stands alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (0.01 / (gradient.norm() + 1e-6)).clamp(max=1)


class Quantize(Function):
    """Fake quantization with a learned step a channel: several inputs, some with a mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
        most = 2 ** (bits - 1) - 1
        scaled = x / step
        ctx.save_for_backward(scaled, step)
        ctx.most = most
        return scaled.round().clamp(-most - 1, most) * step

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        scaled, _step = ctx.saved_tensors
        inside = (scaled >= -ctx.most - 1) & (scaled <= ctx.most)
        rest = torch.where(inside, scaled.round() - scaled, scaled.sign() * ctx.most)
        return gradient * inside, (gradient * rest).sum(0) * 0.5, None


class Softmax(Function):
    """Softmax that saves its output, twice the gradient of torch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return 2 * y * (gradient - (gradient * y).sum(-1, keepdim=True))


class Gelu(Function):
    """GELU by its tanh, with another derivative; a Function inside its forward is passed by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        return nn.functional.gelu(Scale.apply(x) + bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, bias = ctx.saved_tensors
        found = gradient * torch.sigmoid(1.5 * Scale.apply(x + bias))
        return found, found  # torch adds the second up to the bias's shape


class Two(Function):
    """Two outputs, one more of whole numbers, and a gradient by needs_input_grad."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
        best = x.argmax(-1)
        ctx.mark_non_differentiable(best)
        ctx.save_for_backward(x, w, best)
        return x * w, best, x + w, "done"

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        x, w, best = ctx.saved_tensors
        a, none, b, _ = gradients
        assert not ctx.needs_input_grad[0] or none.dtype == torch.int64
        return a * w * 3 + b, (a * x + b * best.unsqueeze(-1)).sum(0)


class Product(Function):
    """A matrix product with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.sign(), gradient.t() @ x.tanh()


class Half(Function):
    """Under autocast in forward and backward alike, as torch.amp writes it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.mm(x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return torch.mm(gradient, w.t()) * 2, torch.mm(x.t(), gradient)


class Applied(nn.Module):
    """A linear layer, a Function of what that makes and of a parameter, and another layer."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.w = nn.Parameter(torch.linspace(0.2, 1, 8))
        self.square = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.last(self.function(self, self.first(x)))
        return made + (self.w + self.square).sum() * 1e-3


def _two(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, best, b, _ = Two.apply(x, m.w)
    return a * b + best.unsqueeze(-1)


def _one_of_two(m: Any, x: torch.Tensor) -> torch.Tensor:
    return Two.apply(x, m.w)[2].relu()


def _without_gradient(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        held = Round.apply(x)
    return x * held


def _half(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Half.apply(x, m.square).to(x.dtype)


MODULES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "straight through": lambda m, x: Round.apply(x),
    "of a parameter": lambda m, x: x * Round.apply(m.w),
    "reversal": lambda m, x: Reverse.apply(x, 0.5),
    "scaling": lambda m, x: Scale.apply(x) * Scale.apply(x, 0.125),
    "clipping": lambda m, x: Clip.apply(x, 1e-3),
    "clipping by norm": lambda m, x: Norm.apply(x),
    "fake quantization": lambda m, x: Quantize.apply(x, m.w, 3),
    "softmax": lambda m, x: Softmax.apply(x) * 8,
    "gelu": lambda m, x: Gelu.apply(x, m.w),
    "two outputs": _two,
    "one output of two": _one_of_two,
    "product": lambda m, x: Product.apply(x, m.square),
    "the same twice": lambda m, x: Product.apply(m.square, m.square)[:1] * x,
    "inside no_grad": _without_gradient,
    "inside another's gradient": lambda m, x: Reverse.apply(Softmax.apply(Round.apply(x)), 2.0),
    "autocast": _half,
}
"""Functions of the module and what its first layer makes."""


def module(name: str) -> Applied:
    """The module of this name, the same parameters each time."""
    torch.manual_seed(0)
    return Applied(MODULES[name])
