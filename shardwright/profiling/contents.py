"""Tensors for a unit that is run alone: what stands in the model, or something like it.

Input: a unit's graph. Output: contents for what it reads, with the shapes, dtypes and strides
of the model. What is stored has the model's own contents, copied, where it has any. Other numbers
are drawn: floating point from 0 to 1, so that logarithms, roots and probabilities are defined;
indices, wherever they enter the unit, within what they look up; all other integers are 1 and truth
values True, so that a mask hides nothing.

Invariant: the tensors are nobody else's, and no global generator is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardwright.costs.roofline import FREE
from shardwright.ir import Input, IRGraph, IRNode, IRValue
from shardwright.ir.tensor_meta import contiguous_strides, torch_dtype

Bound = tuple[int, int]
"""A value id, and below what its numbers must be."""


def contents(graph: IRGraph, value_ids: Sequence[int], device: str | torch.device) -> list[Tensor]:
    """Tensors for values that a graph reads but does not make, on ``device``."""
    bounds = index_bounds(graph)
    generator = torch.Generator(device).manual_seed(0)
    return [
        _tensor(graph.values[v], bounds.get(v), graph.tensors.get(v), generator) for v in value_ids
    ]


def index_bounds(graph: IRGraph) -> dict[int, int]:
    """Below what the numbers of values must be that are used as indices, by value id.

    Values that reach an index only by views, copies and casts count with it.
    """
    bounds: dict[int, int] = {}

    def note(value_id: int, bound: int) -> None:
        bounds[value_id] = min(bound, bounds.get(value_id, bound))

    for node in reversed(graph.nodes):
        for value_id, bound in _INDICES.get(node.op, _none)(graph, node):
            note(value_id, bound)
        if node.op in FREE or node.op in _COPIES:
            for output in node.outputs:
                if output in bounds:
                    note(node.inputs[0], bounds[output])
    return bounds


def _tensor(
    value: IRValue, bound: int | None, own: Tensor | None, generator: torch.Generator
) -> Tensor:
    strides = value.strides or contiguous_strides(value.shape)
    if own is not None and not own.is_meta and tuple(own.shape) == value.shape:
        return _empty(value, strides, generator.device).copy_(own.detach())
    extent = 1 + sum((size - 1) * step for size, step in zip(value.shape, strides, strict=True))
    flat = _numbers(value, 0 if value.numel == 0 else extent, bound, generator)
    return flat.as_strided(value.shape, strides)


def _empty(value: IRValue, strides: Sequence[int], device: torch.device) -> Tensor:
    dtype = torch_dtype(value.dtype)
    return torch.empty_strided(value.shape, strides, dtype=dtype, device=device)


def _numbers(value: IRValue, count: int, bound: int | None, generator: torch.Generator) -> Tensor:
    """So many elements for a value, as the module's docstring says."""
    dtype, device = torch_dtype(value.dtype), generator.device
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.rand(count, generator=generator, device=device)
        if value.is_stored and len(value.shape) > 1:
            drawn = (drawn - 0.5) / math.sqrt(max(value.shape[-1], 1))
        return drawn.to(dtype)
    if bound is not None and dtype != torch.bool:
        return torch.randint(max(bound, 1), (count,), generator=generator, device=device).to(dtype)
    return torch.ones(count, dtype=dtype, device=device)


# --- which operators look things up ----------------------------------------------------------


def _none(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    return iter(())


def _rows(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    """The second input picks rows of the first."""
    yield node.inputs[1], graph.values[node.inputs[0]].shape[0]


def _bags(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    """The second input picks rows of the first, the third says where bags begin: all at 0."""
    yield node.inputs[1], graph.values[node.inputs[0]].shape[0]
    yield node.inputs[2], 1


def _along(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    """The second input picks along a dimension of the first, or of all its elements in a row."""
    picked = graph.values[node.inputs[0]]
    dim = node.attrs["dim"]
    if dim is None:
        yield node.inputs[1], picked.numel
    else:
        yield node.inputs[1], picked.shape[dim] if picked.shape else 1


def _elements(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    """The second input picks elements of the first, counted through."""
    yield node.inputs[1], graph.values[node.inputs[0]].numel


def _places(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    """A list of indices, one a dimension; none for dimensions that are taken whole."""
    shape = graph.values[node.inputs[0]].shape
    for size, item in zip(shape, node.attrs["indices"], strict=False):
        if isinstance(item, Input):
            yield node.inputs[item.index], size


def _classes(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    """The second input is labels, one of the classes that the first has scores of."""
    shape = graph.values[node.inputs[0]].shape
    if shape:
        yield node.inputs[1], shape[1] if len(shape) > 1 else shape[0]


def _classes_behind(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    """The same where a gradient stands before both."""
    shape = graph.values[node.inputs[1]].shape
    yield node.inputs[2], shape[1] if len(shape) > 1 else shape[0]


def _table(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    """The second input is rows of a table that is made."""
    yield node.inputs[1], node.attrs["num_weights"]


def _one_hot(graph: IRGraph, node: IRNode) -> Iterator[Bound]:
    yield node.inputs[0], graph.values[node.outputs[0]].shape[-1]


_INDICES: Mapping[str, Callable[[IRGraph, IRNode], Iterator[Bound]]] = {
    "aten.embedding.default": _rows,
    "aten.embedding_bag.default": _bags,
    "aten.embedding_bag.padding_idx": _bags,
    "aten.gather.default": _along,
    "aten.index_select.default": _along,
    "aten.scatter.src": _along,
    "aten.scatter.value": _along,
    "aten.scatter.reduce": _along,
    "aten.scatter.value_reduce": _along,
    "aten.scatter_add.default": _along,
    "aten.scatter_reduce.two": _along,
    "aten.index_add.default": _along,
    "aten.index_copy.default": _along,
    "aten.index_fill.int_Scalar": _along,
    "aten.index_fill.int_Tensor": _along,
    "aten.take_along_dim.default": _along,
    "aten.take.default": _elements,
    "aten.put.default": _elements,
    "aten.index.Tensor": _places,
    "aten.index_put.default": _places,
    "aten.cross_entropy_loss.default": _classes,
    "aten.nll_loss.default": _classes,
    "aten.nll_loss_nd.default": _classes,
    "aten.nll_loss_forward.default": _classes,
    "aten.nll_loss2d.default": _classes,
    "aten.nll_loss2d_forward.default": _classes,
    "aten.nll_loss_backward.default": _classes_behind,
    "aten.nll_loss2d_backward.default": _classes_behind,
    "aten.multi_margin_loss.default": _classes,
    "aten.embedding_dense_backward.default": _table,
    "aten.one_hot.default": _one_hot,
}
"""Operators that take indices: which of their inputs are, and how many there are to pick from."""

_COPIES = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy.default",
        "to.dtype",
        "to.dtype_layout",
        "clone.default",
        "contiguous.default",
        "type_as.default",
        "repeat.default",
    )
)
"""Operators beside views that make the same numbers again."""
