"""A program while it is drawn: statements that ran, and the values that they made.

Each statement is executed on real tensors as it is added, so that rules know shapes and dtypes and
a statement that PyTorch refuses is never in a program.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Item = TypeVar("Item")

BATCHES = (4, 4, 4, 6, 8, 2, 5)
WIDTHS = (2, 3, 4, 5, 6, 8, 8, 12)
HELPERS = {
    "RoundThrough": '''class RoundThrough(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient
''',
    "Reverse": '''class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None
''',
    "Cube": '''class Cube(torch.autograd.Function):
    """A cube whose gradient is cut off above 1."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (3 * x * x).clamp(max=1)
''',
    "Blend": '''class Blend(torch.autograd.Function):
    """Two results of two tensors, whose gradients swap places."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x - y

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        return first * y - second, first * x + second
''',
}


class UnfitError(Exception):
    """A rule does not apply here; another one is drawn."""


@dataclass(frozen=True)
class Var:
    """A value of the program: its name, and whether dimension 0 is the batch, row by row."""

    name: str
    tensor: Tensor
    batched: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""
        return tuple(self.tensor.shape)

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through it."""
        return self.tensor.is_floating_point()


@dataclass
class Draft:
    """What has been drawn so far."""

    chance: random.Random
    rowwise: bool
    dtype: torch.dtype
    rows: int
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    variables: list[Var] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    linears: list[tuple[str, int, int]] = field(default_factory=list)
    mixes: bool = False
    writes: bool = False
    dropout: bool = False
    autocast: bool = False
    count: int = 0
    module: nn.Module = field(default_factory=nn.Module)
    names: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names |= {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "self": self.module}

    # --- choices ---

    def pick(self, items: Sequence[Item]) -> Item:
        """One of them. Raises UnfitError where there is none."""
        if not items:
            raise UnfitError
        return self.chance.choice(items)

    def maybe(self, probability: float = 0.5) -> bool:
        """True with this probability."""
        return self.chance.random() < probability

    def number(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.chance.randint(low, high)

    def width(self) -> int:
        """The size of a dimension."""
        return self.pick(WIDTHS)

    def tensors(self, fits: Callable[[Var], bool] = lambda var: var.is_float) -> list[Var]:
        """The values that fit, later ones more often."""
        found = [var for var in self.variables if fits(var)]
        return found + found[-3:] * 2

    def alike(self, x: Var) -> Var:
        """A float value that has the same shape and batch, or the value itself."""
        return self.pick(
            self.tensors(lambda v: v.is_float and v.shape == x.shape and v.batched <= x.batched)
        )

    def first_dim(self, x: Var) -> int:
        """The first dimension that a rule may touch; 1 where the batch is to be left alone."""
        return 1 if x.batched and self.rowwise else 0

    def dim(self, x: Var, *, at_least: int = 1) -> int:
        """A dimension that a rule may touch, now and then counted from behind."""
        found = [d for d in range(self.first_dim(x), x.tensor.dim()) if x.shape[d] >= at_least]
        d = self.pick(found)
        return d - x.tensor.dim() if self.maybe(0.4) else d

    def mixed(self, x: Var, *dims: int) -> None:
        """Note that a rule works along these dimensions, the batch perhaps among them."""
        if x.batched and any(d % max(x.tensor.dim(), 1) == 0 for d in dims):
            self.mixes = True

    # --- statements ---

    def fresh(self, letter: str) -> str:
        """A name that nothing has yet."""
        self.count += 1
        return f"{letter}{self.count}"

    def stored(self, expression: str) -> str:
        """A submodule, parameter or any other attribute; gives ``self.name``."""
        name = f"self.{self.fresh('m')}"
        self.initialize(f"{name} = {expression}")
        return name

    def buffer(self, expression: str) -> str:
        """A registered buffer."""
        name = self.fresh("b")
        self.initialize(f'self.register_buffer("{name}", {expression})')
        return f"self.{name}"

    def parameter(self, shape: Sequence[int], scale: float = 0.5) -> str:
        """A parameter of random numbers."""
        return self.stored(f"nn.Parameter(torch.randn({list(shape)}) * {scale})")

    def initialize(self, line: str) -> None:
        """A line of the constructor."""
        self._run(line)
        self.module.to(self.dtype)
        self.init.append(line)

    def do(self, *lines: str) -> None:
        """Lines of the forward."""
        self._run("\n".join(lines))
        self.body.extend(lines)

    def let(self, expression: str, batched: bool) -> Var:
        """A new value."""
        name = self.fresh("v")
        self.do(f"{name} = {expression}")
        return self.keep(name, batched)

    def keep(self, name: str, batched: bool) -> Var:
        """A value that statements made, for others to use. Raises UnfitError for a useless one."""
        tensor = self.names[name]
        if not isinstance(tensor, Tensor) or tensor.numel() > 4096 or tensor.dim() > 5:
            raise UnfitError
        if tensor.is_floating_point() and tensor.numel():
            largest = float(tensor.detach().abs().max())
            if not largest < 1e3:  # NaN, too
                raise UnfitError
        if batched and not self.mixes and (not tensor.dim() or tensor.shape[0] != self.rows):
            raise UnfitError
        var = Var(name, tensor, batched and tensor.dim() > 0 and tensor.shape[0] == self.rows)
        self.variables.append(var)
        return var

    def _run(self, text: str) -> None:
        for helper, definition in HELPERS.items():
            if re.search(rf"\b{helper}\b", text) and helper not in self.helpers:
                exec(definition, self.names)
                self.helpers.add(helper)
        exec(text, self.names)

    def attempt(self, rule: Callable[[Draft, Var], None], x: Var) -> bool:
        """Apply a rule; leave no trace where PyTorch, or the rule, refuses."""
        kept = {
            name: list(getattr(self, name)) for name in ("init", "body", "variables", "linears")
        }
        flags = {n: getattr(self, n) for n in ("mixes", "writes", "dropout", "autocast")}
        names, helpers = dict(self.names), set(self.helpers)
        try:
            rule(self, x)
        except (UnfitError, RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            fitting = False
        else:
            fitting = not (self.rowwise and self.mixes)
        if not fitting:
            for name, value in (*kept.items(), *flags.items(), ("helpers", helpers)):
                setattr(self, name, value)
            self.names = names
        return fitting
