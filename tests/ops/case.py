"""Calls of operators, with sizes to be drawn.

``case("linear.default", F("a b k"), F("n k"), F("n"))`` is a linear layer of random sizes: a
letter is a size from 4 up, another for each letter, so that four parts are possible and few
divide evenly. ``"h*2"`` is a product. An argument that is a function gets the sizes.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.ir import Builder, IRGraph, IRValue
from shardwright.ir.tensor_meta import dtype_name


class Sizes(dict):
    """Sizes by letter, drawn when first asked for."""

    def __init__(self, seed: str):
        super().__init__()
        self.draws = random.Random(seed)

    def __missing__(self, letter: str) -> int:
        unused = [size for size in range(4, 9) if size not in self.values()]
        self[letter] = self.draws.choice(unused or range(4, 9))
        return self[letter]

    def of(self, text: str) -> int:
        return math.prod(int(f) if f.isdecimal() else self[f] for f in text.split("*"))


@dataclass(frozen=True, eq=False)
class T:
    """A tensor argument: its dimensions and how it is filled."""

    dims: str
    fill: Callable[[tuple[int, ...], Sizes], torch.Tensor]
    constant: bool = False

    def make(self, sizes: Sizes) -> torch.Tensor:
        tensor = self.fill(tuple(sizes.of(text) for text in self.dims.split()), sizes)
        return tensor.requires_grad_(tensor.is_floating_point() and not self.constant)


def F(dims):
    """Normal numbers."""
    return T(dims, lambda shape, _: torch.randn(shape, dtype=torch.float64))


def U(dims):
    """Numbers between 0.1 and 0.9."""
    return T(dims, lambda shape, _: 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64))


def K(dims):
    """Numbers between 0.1 and 0.9 that the operator has no derivative by."""
    return T(dims, U(dims).fill, constant=True)


def I(dims, below):  # noqa: E743
    """Integers below a size."""
    return T(dims, lambda shape, sizes: torch.randint(sizes.of(str(below)), shape))


def B(dims):
    """True and false."""
    return T(dims, lambda shape, _: torch.rand(shape) > 0.4)


def C(dims):
    """Complex numbers."""
    return T(dims, lambda shape, _: torch.randn(shape, dtype=torch.complex128))


def distinct(dims, below):
    """Different integers below a size."""
    return T(dims, lambda shape, sizes: torch.randperm(sizes.of(str(below)))[: math.prod(shape)])


def sorted_list(dims):
    """Ascending numbers."""
    return T(dims, lambda shape, _: torch.rand(shape, dtype=torch.float64).sort().values)


@dataclass(frozen=True)
class Case:
    """A call: operator, arguments."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(
        self, seed: int = 0, lay: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    ) -> tuple[IRGraph, list[torch.Tensor]]:
        """A graph of this one call, and contents for the inputs of its node, one argument once.

        ``lay`` gives the tensors another order in memory.
        """
        sizes = Sizes(f"{seed}")
        builder = Builder("call")
        tensors: list[torch.Tensor] = []
        known: dict[T, IRValue] = {}

        def value_of(arg: T) -> IRValue:
            made = arg.make(sizes)
            tensor = lay(made.detach()).requires_grad_(made.requires_grad)
            tensors.append(tensor)
            name, dtype = f"x{len(tensors)}", dtype_name(tensor.dtype)
            return builder.input(name, tensor.shape, dtype, strides=tensor.stride())

        def filled(arg: Any) -> Any:
            if isinstance(arg, T):
                if arg not in known:
                    known[arg] = value_of(arg)
                return known[arg]
            if isinstance(arg, list):
                return [filled(item) for item in arg]
            return arg(sizes) if callable(arg) else arg

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            args = [filled(arg) for arg in self.args]
            kwargs = {name: filled(arg) for name, arg in self.kwargs.items()}
        made = builder.call(self.op, *args, **kwargs)
        graph = builder.finish(made if isinstance(made, list) else [made])
        inputs = list(dict.fromkeys(graph.nodes[0].inputs))
        order = [graph.inputs.index(value_id) for value_id in inputs]
        graph.inputs = inputs
        return graph, [tensors[place] for place in order]


def case(op, *args, **kwargs):
    return Case(f"aten.{op}", args, kwargs)


def sizes_of(text):
    """A list of sizes."""
    return lambda sizes: [sizes.of(item) for item in text.split()]


def of(letter):
    return lambda sizes: sizes[letter]
