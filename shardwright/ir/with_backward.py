"""`shardwright::with_backward`: the identity, with a backward of its own.

    with_backward(Tensor[] made, Tensor[] inputs, Tensor[] saved,
                  str name, str backward, bool fills, str failure) -> Tensor[]

Comes in: ``made``, what a `torch.autograd.Function` computed, without a gradient. Goes out: the
same tensors. Their gradients go to ``inputs``, through the Function's own backward: ``backward`` is
the text of a graph that takes a gradient for each of ``made`` and then ``saved``, and gives one for
each of ``inputs``. So a graph holds a Function's forward as operators like any others, with this
one call behind them, and a program of training, once it is differentiated, holds neither.

An output without a gradient has zeros where the Function ``fills``; else its backward was written
to be told, which a graph cannot, and such a call is refused. Where a backward could not be traced,
``failure`` says why, and nothing else than a differentiation asks for it.

Every process that imports the package has the operator; no file has to require a module for it.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from shardwright.errors import GraphError
from shardwright.ir.builder import Builder
from shardwright.ir.execute import compile_graph
from shardwright.ir.graph import IRGraph
from shardwright.ir.tensor_meta import DTYPES
from shardwright.ir.values import LAYOUTS, MEMORY_FORMATS, SLOT, Input, IRValue

WITH_BACKWARD = "shardwright.with_backward.default"
"""The operator's full name in a graph."""


@torch.library.custom_op("shardwright::with_backward", mutates_args=())
def with_backward(
    made: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    name: str,
    backward: str,
    fills: bool,
    failure: str,
) -> list[torch.Tensor]:
    """``made``."""
    return [tensor.clone() for tensor in made]


@with_backward.register_fake
def _fake(made: Sequence[torch.Tensor], *others: Any) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in made]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    made, wanted, saved, *ctx.rest = inputs
    ctx.count = len(saved)
    ctx.wanted = len(wanted)
    ctx.save_for_backward(*saved, *made)


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    name, backward, fills, failure = ctx.rest
    saved, made = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    if failure:
        raise GraphError(f"the backward of {name} cannot be part of a graph: {failure}")
    if not fills and any(gradient is None for gradient in gradients):
        raise GraphError(
            f"{name} does not materialize gradients (ctx.set_materialize_grads(False)) and the "
            "loss does not depend on all that it returns; let it, or return what is used alone"
        )
    given = [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(made, gradients, strict=True)
    ]
    device = given[0].device
    found = compile_graph(backward_graph(backward), device)([*given, *saved])
    return [None] * len(made), list(found), [None] * ctx.count, None, None, None, None


with_backward.register_autograd(_backward, setup_context=_keep)


def identity_backward(value: IRValue) -> str:
    """The text of a backward that gives what it is given, a gradient of a value's kind."""
    builder = Builder("backward")
    gradient = builder.input("g", value.shape, value.dtype, strides=value.strides)
    graph = builder.finish([gradient])
    graph.in_structure = graph.out_structure = None
    return str(graph)


_VALUE = re.compile(r"%(\w+)!?: (\w+)\[([\d, ]*)\](?:\{([\d, ]*)\})?")
_STRING_OR_VALUE = re.compile(r'("(?:[^"\\]|\\.)*")|%(?=\w)')
_WORDS = {
    **{str(item): item for item in (*DTYPES.values(), *LAYOUTS.values(), *MEMORY_FORMATS.values())},
    **{"slot": SLOT, "nan": math.nan, "inf": math.inf},
}


@lru_cache(256)
def backward_graph(text: str) -> IRGraph:
    """The graph of a backward, from its text: its inputs, its calls and what it gives, a line each.

    Names are plain and nothing is stored. Plans of version 1 know a step by the same text. Raises
    GraphError for any other.
    """
    builder = Builder("backward")
    values: dict[str, IRValue] = {}
    returned: list[IRValue] = []
    line = ""
    try:
        for line in text.splitlines()[1:]:
            made, is_call, call = line.strip().partition(" = ")
            if is_call:
                op, bracket, arguments = call.partition("(")
                inputs, attrs = _arguments(bracket + arguments, values)
                specs = [
                    None if item == "_" else _spec(item) for item in re.split(", (?=[%_])", made)
                ]
                results = [spec and builder.value(*spec[:3], strides=spec[3]) for spec in specs]
                builder.emit(op, inputs, attrs, outputs=results)
                values |= {f"value.{value.name}": value for value in results if value}
            elif made.startswith("input "):
                name, shape, dtype, strides = _spec(made.removeprefix("input "))
                value = builder.input(name, shape, dtype, strides=strides)
                values[f"value.{value.name}"] = value
            elif made.partition(" ")[0] == "return":
                returned = _arguments(f"({made.removeprefix('return')})", values)[0]
            else:
                raise ValueError(line)
    except (KeyError, SyntaxError, TypeError, ValueError):
        raise GraphError(f"the text of a backward cannot be read at {line.strip()!r}") from None
    graph = builder.finish(returned)
    graph.in_structure = graph.out_structure = None
    return graph


def _spec(text: str) -> tuple[str, list[int], str, list[int] | None]:
    """``%name: f32[2, 3]{1, 2}`` as name, shape, dtype and strides. Raises ValueError."""
    match = _VALUE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    name, dtype, *sizes = match.groups()
    shape, strides = (
        None if item is None else [int(n) for n in item.split(",") if n] for item in sizes
    )
    return name, shape or [], dtype, strides


def _arguments(text: str, values: Mapping[str, IRValue]) -> tuple[list[IRValue], dict[str, Any]]:
    """The inputs and attributes of a call, which are written as Python writes them."""
    written = _STRING_OR_VALUE.sub(lambda match: match[1] or "value.", text)
    call = ast.parse(f"call{written}", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(text)
    inputs = [values[ast.unparse(item)] for item in call.args]

    def attribute(item: ast.expr) -> Any:
        if isinstance(item, ast.Constant):
            return item.value
        if isinstance(item, ast.List):
            return [attribute(inside) for inside in item.elts]
        if isinstance(item, ast.UnaryOp):
            return -attribute(item.operand)
        if isinstance(item, ast.Call) and ast.unparse(item.func) == "complex":
            return complex(*map(attribute, item.args))
        name = ast.unparse(item)
        if name in values:
            inputs.append(values[name])
            return Input(len(inputs) - 1)
        return _WORDS[name]

    return inputs, {str(keyword.arg): attribute(keyword.value) for keyword in call.keywords}
