"""`shardwright::with_backward`: the identity, with a backward of its own.

    with_backward(Tensor[] made, Tensor[] inputs, Tensor[] saved,
                  str name, str backward, bool fills, str failure) -> Tensor[]

``made`` is what a `torch.autograd.Function` computed, without a gradient; the result is the same
tensors. Their gradients go to ``inputs``, through the Function's own backward: ``backward`` names a
graph that takes a gradient for each of ``made`` and then ``saved``, and gives one for each of
``inputs``. So a graph holds a Function's forward as operators like any others, with this one call
behind them, and a program of training, once it is differentiated, holds neither.

An output without a gradient has zeros where the Function ``fills``; else its backward was written
to be told, which a graph cannot, and such a call is refused. Where a backward could not be traced,
``failure`` says why, and nothing else than a differentiation asks for it.

Every process that imports the package has the operator; no file has to require a module for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import GraphError
from shardwright.ir.builder import Builder
from shardwright.ir.execute import compile_graph
from shardwright.ir.graph import IRGraph
from shardwright.ir.values import IRValue

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
    """The name of a backward that gives the gradient, of the kind of ``value``, as it is."""
    builder = Builder("backward")
    gradient = builder.input("g", value.shape, value.dtype, strides=value.strides)
    return name_backward(builder.finish([gradient]))


# --- backwards by name ----------------------------------------------------------------------------
#
# An operator's arguments are tensors, numbers and strings, so a backward is known by a name: its
# text, by which plans of version 1 know a step as well.

_graphs: dict[str, IRGraph] = {}


def name_backward(graph: IRGraph) -> str:
    """The name of a backward in this process, which is its text; it is called by position alone."""
    graph.in_structure = graph.out_structure = None
    name = str(graph)
    _graphs.setdefault(name, graph)
    return name


def backward_graph(name: str) -> IRGraph:
    """The backward of a name: its inputs, its calls and what it gives.

    Raises GraphError where another process has traced it.
    """
    if name not in _graphs:
        raise GraphError(
            "the backward of a torch.autograd.Function is known to the process alone that has "
            "captured it: capture the program here, and differentiate that"
        )
    return _graphs[name]
