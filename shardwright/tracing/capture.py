"""`capture`: from a model and example arguments to an IRGraph.

Comes in: a module and a call of it. Goes out: a functional, flat graph whose ``run`` gives what
the model gives. What always holds: the model is afterwards what it was before, on every path, and
whatever cannot be captured is a CaptureError with the program's line.

    structure   the call is taken apart into tensors       ir.structure, flat
    export      the flat model runs on fake tensors        export, tracer
    translate   its program becomes nodes, in one pass     translate
    finish      ends are named, dead nodes dropped         exported, boundary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.errors import CaptureError, InputError
from shardwright.ir.graph import IRGraph
from shardwright.ir.structure import Arguments, describe_arguments
from shardwright.tracing.boundary import contents_of
from shardwright.tracing.export import export_flat
from shardwright.tracing.exported import ExportedGraph
from shardwright.tracing.flat import FlatModel
from shardwright.tracing.wrapped import check_wrapped


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> IRGraph:
    """The graph of ``model(*args, **kwargs)``, for tensors of these shapes and dtypes.

    Contents of the arguments are not looked at; shapes, strings, numbers and None become part of
    the graph. The graph shares the model's parameters and buffers, and is called as the model is:
    ``graph.run(*args, **kwargs)``. Buffers that the model changes are ``graph.updates``.

    A model built under `empty_weights` is captured without contents. ``name`` names the graph,
    by default after the model's class.

    Raises CaptureError where the model cannot be a graph, with the line and what to do.
    """
    arguments, tensors = _take_apart(model, args, kwargs or {})
    flat = FlatModel(model, arguments)
    contents = contents_of(model)
    program = export_flat(flat, tensors)
    graph = ExportedGraph(name or type(model).__name__, flat, program, contents).finish(2)
    graph.training = model.training
    return graph


def _take_apart(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Arguments, list[torch.Tensor]]:
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"capture takes an nn.Module, found a {type(model).__name__}; put the function into "
            "the forward of a module"
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'} is a script module, which does not run in Python; give "
                "the module it was made from"
            )
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_wrapped(path, tensor)
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"args is a {type(args).__name__}; give positional arguments as a tuple, as in "
            "capture(model, (x,))"
        )
    try:
        return describe_arguments(model.forward, args, kwargs)
    except InputError as error:
        raise CaptureError(f"{type(model).__name__}.forward: {error}") from None
