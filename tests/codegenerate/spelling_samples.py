"""Sample calls for the tables of spelling: an overload, its arguments, the text of the call.

Tensors are `Spec`s; in the text they are ``a``, ``b``, ``c`` in the order in which they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from string import ascii_lowercase
from typing import Any

import torch
from torch import nn

from shardwright.codegenerate.spelling.forms import Mode
from shardwright.codegenerate.spelling.table import spell
from shardwright.codegenerate.writing.file import MYPY
from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.ir.tensor_meta import torch_dtype


@dataclass(frozen=True)
class Spec:
    """A tensor: whole numbers are below ``below``; transposed ones lie turned in memory."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    below: int = 2
    turned: bool = False

    def make(self) -> torch.Tensor:
        shape = self.shape[::-1] if self.turned else self.shape
        if self.dtype == "bool":
            made = torch.rand(shape) > 0.5
        elif torch_dtype(self.dtype).is_floating_point:
            made = (torch.rand(shape) + 0.1).to(torch_dtype(self.dtype))
        elif torch_dtype(self.dtype).is_complex:
            made = torch.randn(shape, dtype=torch_dtype(self.dtype))
        else:
            made = torch.randint(0, self.below, shape, dtype=torch_dtype(self.dtype))
        return made.permute(*range(len(shape))[::-1]) if self.turned else made


def f(*shape: int, dtype: str = "f32", turned: bool = False) -> Spec:
    return Spec(shape, dtype, turned=turned)


def i(*shape: int, below: int = 2, dtype: str = "i64") -> Spec:
    return Spec(shape, dtype, below)


def b(*shape: int) -> Spec:
    return Spec(shape, "bool")


X, Y, M = f(2, 3, 4), f(2, 3, 4), b(2, 3, 4)
IMAGE = f(2, 4, 8, 8)


@dataclass(frozen=True)
class Sample:
    """One call, ``aten.`` left out of its name, and what it is written as.

    ``captured`` is False where the text is the overload's own name and capture makes something
    else of it, such as nothing.
    """

    op: str
    args: tuple[Any, ...]
    text: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    training: bool = False
    captured: bool = True

    def __str__(self) -> str:
        return f"{self.op}: {self.text}"

    def specs(self) -> list[Spec]:
        return list(_specs([*self.args, *self.kwargs.values()]))

    def graph(self) -> tuple[IRGraph, IRNode]:
        """A graph of the one node, the same every time."""
        return self._graph

    @cached_property
    def _graph(self) -> tuple[IRGraph, IRNode]:
        builder = Builder("sample")
        name = self.op if self.op.count(".") > 1 else f"aten.{self.op}"

        def take(item: Any) -> Any:
            if isinstance(item, Spec):
                tensor = item.make()
                return builder.input("x", item.shape, item.dtype, strides=tensor.stride())
            return [take(each) for each in item] if isinstance(item, list) else item

        args = [take(item) for item in self.args]
        kwargs = {key: take(item) for key, item in self.kwargs.items()}
        made = builder.call(name, *args, **kwargs)
        graph = builder.finish(made)
        return graph, graph.nodes[0]

    def spelled(self, *, in_module: bool = True) -> str:
        graph, node = self.graph()
        mode = Mode(training=self.training, in_module=in_module, device="self.place")
        return spell(graph, node, operands(graph), mode)


def operands(graph: IRGraph) -> dict[int, str]:
    """``a``, ``b``, … for a graph's inputs."""
    return dict(zip(graph.inputs, ascii_lowercase, strict=False))


def _specs(value: Any) -> Iterator[Spec]:
    if isinstance(value, Spec):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _specs(item)


def class_text(name: str, calls: Iterable[tuple[str, int, bool]]) -> str:
    """A module with a method ``call_k`` for each ``(expression, operands, gives one)``."""
    lines = [
        MYPY,
        "import torch",
        "import torch.nn.functional as F",
        "from torch import Tensor, nn",
        "",
        f"class {name}(nn.Module):",
        '    place = torch.device("cpu")',
        "",
    ]
    for k, (expression, count, one) in enumerate(calls):
        names = "".join(f", {letter}: Tensor" for letter in ascii_lowercase[:count])
        kind = "Tensor" if one else "tuple[Tensor, ...]"
        lines.append(f"    def call_{k}(self{names}) -> {kind}:")
        lines.append(f"        return {expression}")
    return "\n".join(lines) + "\n"


def run_class(name: str, text: str) -> type[nn.Module]:
    namespace: dict[str, Any] = {}
    exec(compile(text, f"<{name}>", "exec"), namespace)
    return namespace[name]


class EveryCall(nn.Module):
    """Calls the methods of a `class_text`, each with as many tensors of its own as it takes."""

    def __init__(self, calls: type[nn.Module], counts: Sequence[int]) -> None:
        super().__init__()
        self.calls = calls()
        self.counts = counts

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        return [
            getattr(self.calls, f"call_{k}")(*(next(given) for _ in range(count)))
            for k, count in enumerate(self.counts)
        ]
