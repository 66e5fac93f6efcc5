"""Rows of operators that pick or place elements by index.

    embedding    v+ d, a b -> a b d        a part looks up its own rows; others are zero
    gather       a v+ c, a j c -> a j c    the same along the dimension gathered from
    index        v+ d, j -> j d            the same where one dimension is indexed

Indices split as the output does. What is placed (scatter, index_put) splits along dimensions that
are not indexed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.ops.call import (
    Call,
    Dims,
    Emitter,
    Inputs,
    Local,
    Row,
    Rule,
    Shape,
    aligned,
    fixed,
    letters,
    named,
    text,
    whole,
)

# --- a part of what is looked up in ---------------------------------------------------------------


def own(e: Emitter, local: Local, name: str, index: Any) -> tuple[Any, Any]:
    """Indices into this part of the looked-up dimension, and where they point outside it.

    Indices that point elsewhere become 0: what is found there is to be masked.
    """
    start = local.start(name)
    shifted = e.call("aten.sub.Tensor", index, start) if start else index
    outside = e.call(
        "aten.logical_or.default",
        e.call("aten.lt.Scalar", shifted, 0),
        e.call("aten.ge.Scalar", shifted, local.lengths[name]),
    )
    return e.call("aten.masked_fill.Scalar", shifted, outside, 0), outside


def masked(e: Emitter, found: Any, outside: Any, after: int = 0) -> Any:
    """What was found, zero where the index points outside; the index lacks ``after`` dimensions."""
    for _ in range(after):
        outside = e.call("aten.unsqueeze.default", outside, -1)
    return e.call("aten.masked_fill.Scalar", found, outside, 0)


# --- lookups ------------------------------------------------------------------------------------


def embedding(call: Call) -> Rule:
    """Rows of a table: the table's rows, its columns and the indices split."""
    table, index = call.inputs
    names = named(index, without="vd")
    columns = "d" if table[1] > 1 else "1"
    rows = "v+" if table[0] > 1 else "1"
    return Rule(
        text([[rows, columns], names], [[*names, columns]]), emit=embedding_part, linear=((0,),)
    )


def embedding_part(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """Rows that another part has are zero here, and give this part's table no gradient."""
    table, index = inputs
    attrs = dict(local.call.attrs)
    if "v" not in local.cuts:
        return e.emit(local.call.op, inputs, attrs)
    padding = attrs["padding_idx"] - local.start("v")
    attrs["padding_idx"] = padding if 0 <= padding < local.lengths["v"] else -1
    safe, outside = own(e, local, "v", index)
    return masked(e, e.emit(local.call.op, [table, safe], attrs), outside, after=1)


def gather(call: Call) -> Rule:
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
    sources[dim] = "v+" if source[dim] > 1 else "1"
    return Rule(text([sources, names], [names]), emit=gather_part, linear=((0,),))


def gather_part(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """Elements that another part has are zero here."""
    if "v" not in local.cuts:
        return e.emit(local.call.op, inputs, local.call.attrs)
    safe, outside = own(e, local, "v", inputs[1])
    return masked(e, e.emit(local.call.op, [inputs[0], safe], local.call.attrs), outside)


def index_select(call: Call) -> Rule:
    """Slices of one dimension by a list of indices."""
    source, index = call.inputs
    if not source:
        return Rule(text([[], [str(size) for size in index]], [[]]))
    dim = call.dim()
    names = named(source, without="vj")
    picked = "j" if index and index[0] > 1 else "1"
    sources = [*names[:dim], "v+" if source[dim] > 1 else "1", *names[dim + 1 :]]
    output = [*names[:dim], picked, *names[dim + 1 :]]
    return Rule(
        text([sources, [picked] if index else []], [output]),
        emit=index_select_part,
        linear=((0,),),
    )


def index_select_part(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """Slices that another part has are zero here."""
    if "v" not in local.cuts:
        return e.emit(local.call.op, inputs, local.call.attrs)
    safe, outside = own(e, local, "v", inputs[1])
    found = e.emit(local.call.op, [inputs[0], safe], local.call.attrs)
    rank = len(local.call.outputs[0])
    return masked(e, found, outside, after=rank - 1 - local.call.dim())


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


def index(call: Call) -> Rule | None:
    """Indices are broadcast; together they take the place of the dimensions they index."""
    if {"bool", "u8"} & set(call.dtypes[1:]):
        return None  # a mask: how much it finds is not known
    source, *indices = call.inputs
    indexed = Indexed.of(source, call.attrs["indices"])
    full = broadcast_shape(indices)
    places = named(full, without="v")
    sources = whole(indexed.names, set(indexed.dims))
    alone = len(indexed.dims) == 1 and source[indexed.dims[0]] > 1
    if alone:
        sources[indexed.dims[0]] = "v+"
    return Rule(
        text(
            [sources, *(aligned(shape, places, full) for shape in indices)],
            [indexed.picked(indexed.names, places)],
        ),
        emit=index_part if alone else None,
        linear=((0,),),
    )


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape that shapes are broadcast to."""
    return tuple(torch.broadcast_shapes(*shapes))


def index_part(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """Elements that another part has are zero here; negative indices count from the end."""
    call = local.call
    if "v" not in local.cuts:
        return e.emit(call.op, inputs, call.attrs)
    place = next(i for i, item in enumerate(call.attrs["indices"]) if item is not None)
    size = call.inputs[0][place]
    positive = e.call("aten.remainder.Scalar", inputs[1], size)
    safe, outside = own(e, local, "v", positive)
    after = len(call.inputs[0]) - place - 1
    return masked(e, e.emit(call.op, [inputs[0], safe], call.attrs), outside, after=after)


# --- placing ------------------------------------------------------------------------------------


def scatter(call: Call) -> Rule:
    """Dimensions split that all inputs have in full, but the one that is indexed."""
    target = call.inputs[0]
    if not target:
        return Rule(text([[str(n) for n in shape] for shape in call.inputs], [[]]))
    dim = call.dim()
    common = {
        i
        for i, size in enumerate(target)
        if i != dim and size > 1 and all(shape[i] == size for shape in call.inputs)
    }
    names = letters(len(target))

    def dims(shape: Shape) -> Dims:
        return [names[i] if i in common else str(size) for i, size in enumerate(shape)]

    return Rule(text([dims(shape) for shape in call.inputs], [dims(target)]))


def place_slices(call: Call) -> Rule:
    """Slices of one dimension replaced or added to: the other dimensions split."""
    target, positions, *values = call.inputs
    dim, names = call.dim(), named(target)
    ends = [fixed(names, shape, {dim}) if shape else [] for shape in (target, *values)]
    return Rule(text([ends[0], [str(size) for size in positions], *ends[1:]], [ends[0]]))


def index_put(call: Call) -> Rule | None:
    """Elements replaced or added to: dimensions that are not indexed split."""
    if {"bool", "u8"} & set(call.dtypes[2:]):
        return None  # a mask: how much it finds is not known
    target, values, *indices = call.inputs
    indexed = Indexed.of(target, call.attrs["indices"])
    targets = fixed(indexed.names, target, set(indexed.dims))
    places = broadcast_shape(indices)
    picked = indexed.picked(targets, [str(size) for size in places])
    full = indexed.picked(target, places)
    numbers = [[str(size) for size in shape] for shape in indices]
    return Rule(text([targets, aligned(values, picked, full), *numbers], [targets]))


# --- other uses of indices ------------------------------------------------------------------------


def one_hot(call: Call) -> Rule | None:
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
        return e.emit(local.call.op, inputs, local.call.attrs)
    start = local.start("v")
    classes = e.call("aten.arange.start", start, start + local.lengths["v"])
    equal = e.call("aten.eq.Tensor", e.call("aten.unsqueeze.default", inputs[0], -1), classes)
    return e.call("aten.to.dtype", equal, torch.int64)


def against_all(call: Call) -> Rule:
    """Each element of the first input on its own, against all of the second."""
    names = named(call.inputs[0])
    others = [[str(size) for size in shape] for shape in call.inputs[1:]]
    return Rule(text([names, *others], [names]))


def searchsorted(call: Call) -> Rule:
    """Each value against one sorted list, or against the list of its own row."""
    borders, values, *sorter = call.inputs
    names = named(values)
    rows = [] if len(borders) == 1 else [f"{n}" for n in names[:-1]]
    lists = [[*rows, str(shape[-1])] for shape in (borders, *sorter)]
    return Rule(text([lists[0], names, *lists[1:]], [names]))


ROWS: dict[str, Row] = {
    "aten.embedding.default": embedding,
    "aten.gather.default": gather,
    "aten.index_select.default": index_select,
    "aten.index.Tensor": index,
    **{
        f"aten.{name}": scatter
        for name in (
            "scatter.src",
            "scatter.value",
            "scatter.reduce",
            "scatter.value_reduce",
            "scatter_add.default",
            "scatter_reduce.two",
        )
    },
    **{
        f"aten.{name}": place_slices
        for name in (
            "index_add.default",
            "index_copy.default",
            "index_fill.int_Scalar",
            "index_fill.int_Tensor",
        )
    },
    "aten.index_put.default": index_put,
    "aten.one_hot.default": one_hot,
    "aten.bucketize.Tensor": against_all,
    "aten.isin.Tensor_Tensor": against_all,
    "aten.searchsorted.Tensor": searchsorted,
}
