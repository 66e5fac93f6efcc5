"""Rows of operators that pick or place elements by index.

    embedding    v+ d, a b -> a b d        a part looks up its own rows; others are zero
    gather       a v+ c, a j c -> a j c    the same along the dimension gathered from
    index        v+ d, j -> j d            the same where one dimension is indexed

Indices split as the output does. What is placed (scatter, index_put) splits along dimensions that
are not indexed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.ops.call import (
    CatalogCall,
    Dims,
    Emit,
    Emitter,
    Inputs,
    Local,
    OperatorRow,
    Rule,
    Shape,
    aligned,
    along,
    fixed,
    named,
    numbers,
    table,
    text,
    whole,
)

# --- lookups --------------------------------------------------------------------------------------


def lookup(
    after: Callable[[CatalogCall], int],
    positive: Callable[[Emitter, CatalogCall, Any], Any] = lambda e, call, index: index,
    attrs: Callable[[Local], Mapping[str, Any]] = lambda local: local.call.attrs,
) -> Emit:
    """The part of a lookup in a range of ``v``: what another part has is zero, without gradient.

    ``after`` is the number of dimensions that the output has behind those of the index.
    """

    def emit(e: Emitter, local: Local, inputs: Inputs) -> Any:
        if "v" not in local.cuts:
            return None
        index, start = positive(e, local.call, inputs[1]), local.start("v")
        index = e.call("aten.sub.Tensor", index, start) if start else index
        outside = e.call(
            "aten.logical_or.default",
            e.call("aten.lt.Scalar", index, 0),
            e.call("aten.ge.Scalar", index, local.lengths["v"]),
        )
        safe = e.call("aten.masked_fill.Scalar", index, outside, 0)
        found = e.emit(local.call.op, [inputs[0], safe], attrs(local))
        for _ in range(after(local.call)):
            outside = e.call("aten.unsqueeze.default", outside, -1)
        return e.call("aten.masked_fill.Scalar", found, outside, 0)

    return emit


def summed(size: int) -> str:
    """The dimension that is looked up in; a single row is not split."""
    return "v+" if size > 1 else "1"


def embedding(call: CatalogCall) -> Rule:
    """Rows of a table: the table's rows, its columns and the indices split."""
    vocabulary, index = call.inputs
    names = named(index, without="vd")
    columns = "d" if vocabulary[1] > 1 else "1"
    return Rule(
        text([[summed(vocabulary[0]), columns], names], [[*names, columns]]),
        emit=lookup(lambda call: 1, attrs=_own_padding),
        linear=((0,),),
    )


def _own_padding(local: Local) -> dict[str, Any]:
    padding = local.call.attrs["padding_idx"] - local.start("v")
    inside = 0 <= padding < local.lengths["v"]
    return {**local.call.attrs, "padding_idx": padding if inside else -1}


def gather(call: CatalogCall) -> Rule:
    """Along other dimensions the index may be shorter: then only its size is common."""
    source, index = call.inputs
    names = named(index, without="v")
    if not source:
        return Rule(text([[], names], [names]))
    dim = call.dim()
    sources: Dims = []
    for i, (size, other) in enumerate(zip(source, index, strict=True)):
        sources.append(names[i] if size == other else str(size))
        if size != other and i != dim:
            names[i] = str(other)
    sources[dim] = summed(source[dim])
    return Rule(text([sources, names], [names]), emit=lookup(lambda call: 0), linear=((0,),))


def index_select(call: CatalogCall) -> Rule:
    """Slices of one dimension by a list of indices."""
    source, index = call.inputs
    if not source:
        return Rule(text([[], numbers(index)], [[]]))
    dim = call.dim()
    names = named(source, without="vj")
    picked = "j" if index and index[0] > 1 else "1"
    sources = [*names[:dim], summed(source[dim]), *names[dim + 1 :]]
    output = [*names[:dim], picked, *names[dim + 1 :]]
    return Rule(
        text([sources, [picked] if index else []], [output]),
        emit=lookup(lambda call: len(call.outputs[0]) - 1 - call.dim()),
        linear=((0,),),
    )


@dataclass(frozen=True, slots=True)
class Indexed:
    """Where the dimensions that indices replace stand in a tensor and in what is picked of it."""

    dims: list[int]
    """Those that are indexed."""
    names: Dims
    """Of all dimensions."""
    first: int
    """Where the indices' own dimensions stand in what is picked."""

    @classmethod
    def of(cls, shape: Shape, slots: list[Any]) -> Indexed:
        """By torch's rule: in place where the indexed dimensions are neighbours, else in front."""
        dims = [i for i, item in enumerate(slots) if item is not None]
        together = dims == list(range(dims[0], dims[-1] + 1))
        names = ["1" if size == 1 else f"x{i}" for i, size in enumerate(shape)]
        return cls(dims, names, dims[0] if together else 0)

    def picked(self, names: Sequence[Any], places: Sequence[Any]) -> list[Any]:
        """What the tensor has by dimension, with ``places`` for the indexed dimensions."""
        kept = [name for i, name in enumerate(names) if i not in self.dims]
        return [*kept[: self.first], *places, *kept[self.first :]]


def index(call: CatalogCall) -> Rule | None:
    """Indices are broadcast; together they take the place of the dimensions they index."""
    if {"bool", "u8"} & set(call.dtypes[1:]):
        return None  # a mask: how much it finds is not known
    source, *indices = call.inputs
    indexed = Indexed.of(source, call.attrs["indices"])
    full = tuple(torch.broadcast_shapes(*indices))
    places = named(full, without="v")
    sources = whole(indexed.names, set(indexed.dims))
    first = indexed.dims[0]
    alone = len(indexed.dims) == 1 and source[first] > 1
    if alone:
        sources[first] = "v+"

    def positive(e: Emitter, call: CatalogCall, index: Any) -> Any:
        return e.call("aten.remainder.Scalar", index, source[first])  # -1 is the last

    return Rule(
        text(
            [sources, *(aligned(shape, places, full) for shape in indices)],
            [indexed.picked(indexed.names, places)],
        ),
        emit=lookup(lambda call: len(source) - first - 1, positive) if alone else None,
        linear=((0,),),
    )


# --- placing --------------------------------------------------------------------------------------


def scatter(call: CatalogCall) -> Rule:
    """Dimensions split that all inputs have in full, but the one that is indexed."""
    target = call.inputs[0]
    uneven = {i for i, sizes in enumerate(zip(*call.inputs, strict=False)) if len({*sizes}) > 1}
    return along(call, {call.dim(), *uneven} if target else ())


def place_slices(call: CatalogCall) -> Rule:
    """Slices of one dimension replaced or added to: the other dimensions split."""
    return along(call, {call.dim()}, indices={1})


def index_put(call: CatalogCall) -> Rule | None:
    """Elements replaced or added to: dimensions that are not indexed split."""
    if {"bool", "u8"} & set(call.dtypes[2:]):
        return None  # a mask: how much it finds is not known
    target, values, *indices = call.inputs
    indexed = Indexed.of(target, call.attrs["indices"])
    targets = fixed(indexed.names, target, set(indexed.dims))
    places = torch.broadcast_shapes(*indices)
    picked = indexed.picked(targets, numbers(places))
    full = indexed.picked(target, places)
    return Rule(text([targets, aligned(values, picked, full), *map(numbers, indices)], [targets]))


# --- other uses of indices ------------------------------------------------------------------------


def one_hot(call: CatalogCall) -> Rule | None:
    """Classes split too: a part has its own range of them."""
    if call.attrs["num_classes"] < 0:
        return None  # as many as the largest index says
    names = named(call.inputs[0], without="v")
    classes = call.outputs[0][-1]
    return Rule(
        text([names], [[*names, "v" if classes > 1 else "1"]]),
        lengths={"v": classes} if classes > 1 else {},
        emit=one_hot_part,
    )


def one_hot_part(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """One where the class is the index's."""
    if "v" not in local.cuts:
        return None
    start = local.start("v")
    classes = e.call("aten.arange.start", start, start + local.lengths["v"])
    equal = e.call("aten.eq.Tensor", e.call("aten.unsqueeze.default", inputs[0], -1), classes)
    return e.call("aten.to.dtype", equal, torch.int64)


def against_all(call: CatalogCall) -> Rule:
    """Each element of the first input on its own, against all of the second."""
    names = named(call.inputs[0])
    return Rule(text([names, *map(numbers, call.inputs[1:])], [names]))


def searchsorted(call: CatalogCall) -> Rule:
    """Each value against one sorted list, or against the list of its own row."""
    borders, values, *sorter = call.inputs
    names = named(values)
    rows = [] if len(borders) == 1 else names[:-1]
    lists = [[*rows, str(shape[-1])] for shape in (borders, *sorter)]
    return Rule(text([lists[0], names, *lists[1:]], [names]))


ROWS: Mapping[str, OperatorRow] = {
    **table(embedding, "embedding", reads="rows"),
    **table(gather, "gather", reads="rows"),
    **table(None, "take_along_dim", reads="rows"),
    **table(index_select, "index_select", reads="rows"),
    **table(index, "index.Tensor", reads="rows"),
    **table(
        scatter,
        """
        scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add scatter_reduce.two
        """,
    ),
    **table(place_slices, "index_add index_copy index_fill.int_Scalar index_fill.int_Tensor"),
    **table(index_put, "index_put"),
    **table(one_hot, "one_hot"),
    **table(against_all, "bucketize.Tensor isin.Tensor_Tensor"),
    **table(searchsorted, "searchsorted.Tensor"),
}
