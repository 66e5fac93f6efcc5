"""How stored tensors are declared in a constructor.

Comes in: a stored value, with its contents where they are known. Goes out: a statement that
declares it. What always holds: shape, dtype and whether it takes a gradient are the original's. A
parameter holds nothing until a state is loaded or a model shares its own; a buffer holds what it
held in the model where that can be said in a line or is short.
"""

from __future__ import annotations

import torch

from shardwright.codegenerate.spelling.literals import quoted
from shardwright.codegenerate.writing.contents import contents, empty
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.dtypes import torch_dtype

ON_CPU = ', device="cpu"'
"""Behind the arguments of what no model has: it is made even where all else is on meta."""


def parameter(graph: IRGraph, value: IRValue) -> str:
    """``nn.Parameter(torch.empty(768, 2304))``."""
    frozen = "" if takes_gradient(graph, value) else ", requires_grad=False"
    return f"nn.Parameter({empty(value.shape, torch_dtype(value.dtype))}{frozen})"


def buffer(graph: IRGraph, value: IRValue, name: str) -> str:
    """``self.register_buffer("mask", torch.ones(4, 4), persistent=False)``."""
    saved = "" if is_saved(value) else ", persistent=False"
    return f"self.register_buffer({quoted(name)}, {_contents(graph, value)}{saved})"


def _contents(graph: IRGraph, value: IRValue) -> str:
    tensor = graph.tensors.get(value.id)
    options = ON_CPU if value.role not in ("param", "buffer") else ""
    found = contents(tensor, options) if tensor is not None else None
    if found is None and value.init == "zeros":
        found = contents(torch.zeros(value.shape, dtype=torch_dtype(value.dtype)), options)
    return found or empty(value.shape, torch_dtype(value.dtype), options)


def is_saved(value: IRValue) -> bool:
    """Whether a state dict holds the buffer."""
    return value.persistent and value.role in ("param", "buffer")


def is_told(graph: IRGraph, value: IRValue) -> bool:
    """Whether a fresh module has the right contents, or its state has them."""
    if value.role == "param" or is_saved(value):
        return True
    tensor = graph.tensors.get(value.id)
    return tensor is not None and contents(tensor) is not None


def takes_gradient(graph: IRGraph, value: IRValue) -> bool:
    """Whether a parameter is trained; so it is where nothing is known."""
    tensor = graph.tensors.get(value.id)
    dtype = torch_dtype(value.dtype)
    differentiable = dtype.is_floating_point or dtype.is_complex
    return differentiable and (tensor is None or tensor.requires_grad)
