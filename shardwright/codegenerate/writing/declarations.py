"""How stored tensors are declared in a constructor.

Comes in: a stored value, with its contents where they are known. Goes out: a statement that
declares it. What always holds: shape, dtype and whether it takes a gradient are the original's. A
parameter holds nothing until a state is loaded or a model shares its own; a buffer holds what it
held in the model where that can be said in a line or is short. What neither a state nor a model
has, a constant, always holds what it should, or is refused.
"""

from __future__ import annotations

import torch

from shardwright.codegenerate.spelling.literals import quoted
from shardwright.codegenerate.stage import Program
from shardwright.codegenerate.writing.contents import contents, empty
from shardwright.codegenerate.writing.encoding import encoded
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.tensor_meta import torch_dtype

ON_CPU = ', device="cpu"'
"""Behind the arguments of what no model has: it is made even where all else is on meta."""


def parameter(graph: IRGraph, value: IRValue) -> str:
    """``nn.Parameter(torch.empty(768, 2304))``."""
    frozen = "" if takes_gradient(graph, value) else ", requires_grad=False"
    return f"nn.Parameter({empty(value.shape, torch_dtype(value.dtype))}{frozen})"


def buffer(graph: IRGraph, value: IRValue, name: str) -> str:
    """``self.register_buffer("mask", torch.ones(4, 4), persistent=False)``.

    Raises CodegenError for a constant whose contents are too many, or not known.
    """
    saved = "" if is_saved(value) else ", persistent=False"
    return f"self.register_buffer({quoted(name)}, {_contents(graph, value)}{saved})"


def _contents(graph: IRGraph, value: IRValue) -> str:
    found = _told(graph, value, "" if _is_models(value) else ON_CPU)
    if found is None and not _is_models(value):
        raise CodegenError(
            f"{value.name!r}, {value.dtype}[{', '.join(map(str, value.shape))}], is no buffer of "
            "the model, and its contents are not known or too many to be written into a file; "
            "register it as a buffer of the model (register_buffer)"
        )
    return found or empty(value.shape, torch_dtype(value.dtype))


def _told(graph: IRGraph, value: IRValue, options: str = "") -> str | None:
    """What a buffer holds; of what a state has, only where that is said in a line."""
    tensor = graph.tensors.get(value.id)
    if tensor is None and value.init == "zeros":
        tensor = torch.zeros(value.shape, dtype=torch_dtype(value.dtype))
    if tensor is None:
        return None
    found = contents(tensor, options)
    return encoded(tensor, options) if found is None and not is_saved(value) else found


def _is_models(value: IRValue) -> bool:
    """Whether a model has it, among its parameters and buffers."""
    return value.role in ("param", "buffer")


def is_saved(value: IRValue) -> bool:
    """Whether a state dict holds the buffer."""
    return value.persistent and _is_models(value)


def is_told(graph: IRGraph, value: IRValue) -> bool:
    """Whether a fresh module has the right contents, or its state has them."""
    if value.role == "param" or is_saved(value):
        return True
    return _told(graph, value) is not None


def untold(program: Program) -> list[str]:
    """The names of buffers that only a model can fill."""
    graphs = [stage.graph for partition in program.partitions for stage in partition]
    pairs = ((graph, value) for graph in graphs for value in graph.stored())
    return [value.name for graph, value in pairs if not is_told(graph, value)]


def takes_gradient(graph: IRGraph, value: IRValue) -> bool:
    """Whether a parameter is trained; so it is where nothing is known."""
    tensor = graph.tensors.get(value.id)
    dtype = torch_dtype(value.dtype)
    differentiable = dtype.is_floating_point or dtype.is_complex
    return differentiable and (tensor is None or tensor.requires_grad)
